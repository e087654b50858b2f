/* dataloader.h: token files, the sampler that says which rank trains on which sample, and the workers that prefetch.
 *
 * A sample is a window of T + 1 consecutive tokens: T inputs and, one position later, T targets. Every epoch shuffles
 * the windows with a permutation that is computed on the fly, so the samples of any step can be found without a table.
 * Each step takes the epoch's next GB samples (GB: the global batch), so layouts of equal GB train on the same samples.
 * A caller may rely on this: every token is below the vocabulary size, and neither a step's content nor the error
 * about a bad one depends on the number of workers.
 */
#ifndef DATALOADER_H
#define DATALOADER_H
#include "context_parallel.h" // defines: cp_select_halves
#include "lib/device.h"
#include <glob.h>

// ---------------------------------------------------------------------------
// token files (little-endian): a header, the tokens, and with TOKEN_FILE_MASKED one byte per token: 0 = not a target

enum { TOKEN_FILE_MASKED = 1, TOKEN_FILE_WINDOW_SHIFT = 8, IGNORED_TARGET = -100 }; // -100: PyTorch's ignore_index
#define TOKEN_FILE_MAGIC "LLM3TOK1"

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t width; // bytes per token, 2 or 4
    uint32_t vocab_size;
    uint32_t flags;        // TOKEN_FILE_MASKED; from bit 8 on, tokens in a window of packed conversations, or 0
    uint64_t count;        // tokens
    uint8_t tokenizer[32]; // SHA-256 of the tokenizer's file
} TokenFileHeader;
static_assert(sizeof(TokenFileHeader) == 64, "the header has no padding");

typedef struct {
    char *path;
    int fd;
    TokenFileHeader header;
    int64_t windows;      // samples in this file
    int64_t first_window; // samples in the files before it
} TokenFile;

typedef struct {
    TokenFile *files; // (num_files)
    int num_files;
    int T, vocab_size;
    int64_t windows, tokens; // in all files
    int32_t document_end;    // the token that ends a document; used by --doc-mask only
    uint64_t fingerprint;    // hash of all headers
} Dataset;

static void token_file_check(const TokenFile *f, int64_t bytes, int T, int vocab_size) {
    const TokenFileHeader *h = &f->header;
    if (h->version != 1)
        user_error("%s has token file version %u, expected 1: make it again with dev/data/text.sh", f->path,
                   h->version);
    if ((h->width != 2 && h->width != 4) || (h->flags & 255 & ~(uint32_t)TOKEN_FILE_MASKED))
        user_error("%s: token width %u with flags %u, expected width 2 or 4 and flags 0 or 1: make it again with "
                   "dev/data/text.sh",
                   f->path, h->width, h->flags & 255);
    uint64_t bytes_per_token = h->width + (h->flags & TOKEN_FILE_MASKED ? 1u : 0u);
    if (h->count > UINT64_MAX / 8 || (uint64_t)bytes != sizeof *h + h->count * bytes_per_token)
        user_error("%s is truncated or damaged: its header announces %" PRIu64 " tokens of %" PRIu64
                   " bytes after the 64 bytes of the header, but the file has %" PRId64
                   " bytes: copy it again or make it again with dev/data/text.sh",
                   f->path, h->count, bytes_per_token, bytes);
    if (h->vocab_size > (uint32_t)vocab_size)
        user_error(
            "%s was made with a vocabulary of %u tokens, the model has %d: choose --vocab-size %u or another --data",
            f->path, h->vocab_size, vocab_size, h->vocab_size);
    uint32_t window = h->flags >> TOKEN_FILE_WINDOW_SHIFT;
    if (window && window != (uint32_t)T)
        user_error("%s has conversations packed into windows of %u tokens, --seq is %d: use --seq %u, or pack them "
                   "again with build/data/chat --pack %d",
                   f->path, window, T, window, T);
}

static TokenFile token_file_open(const char *path, int T, int vocab_size) {
    TokenFile f = ZERO;
    struct stat info;
    f.path = checked_strdup(path);
    f.fd = open_regular_file(path, &info);
    if (f.fd < 0) user_error("cannot read token file %s (%s): make one with dev/data/text.sh", path, strerror(errno));
    int64_t got = read_bytes_at(f.fd, &f.header, sizeof f.header, 0);
    if (got < 0) user_error("cannot read token file %s: %s", path, strerror(errno));
    if (got != (int64_t)sizeof f.header || memcmp(f.header.magic, TOKEN_FILE_MAGIC, 8))
        user_error("%s is not a token file: expected it to begin with %s; make one with dev/data/text.sh", path,
                   TOKEN_FILE_MAGIC);
    token_file_check(&f, (int64_t)info.st_size, T, vocab_size);
    return f;
}

/* Opens the files that `pattern`, a path or a glob, matches, in alphabetical order.
 * `partial`: the last window of a file may be shorter than T + 1 tokens; evaluation uses it to count every token. */
static Dataset dataset_open(const char *pattern, int T, int vocab_size, int partial) {
    Dataset d = ZERO;
    glob_t found;
    int failed = glob(pattern, 0, NULL, &found);
    if (failed == GLOB_NOSPACE) run_failure("out of memory: could not list the files of %s", pattern);
    if (failed) user_error("no token file at %s: make one with dev/data/kjv.sh or dev/data/text.sh", pattern);
    d.num_files = (int)found.gl_pathc;
    d.files = new_array(TokenFile, d.num_files);
    d.T = T;
    d.vocab_size = vocab_size;
    d.fingerprint = HASH_START;
    for (int i = 0; i < d.num_files; i++) {
        TokenFile *f = &d.files[i];
        *f = token_file_open(found.gl_pathv[i], T, vocab_size);
        int64_t targets = max_i64(0, (int64_t)f->header.count - 1); // every token but the file's first is a target
        f->windows = partial ? (targets + T - 1) / T : targets / T;
        f->first_window = d.windows;
        d.windows += f->windows;
        d.tokens += (int64_t)f->header.count;
        d.fingerprint = hash_bytes(d.fingerprint, &f->header, sizeof f->header);
    }
    globfree(&found);
    if (!d.windows)
        user_error("%s holds %" PRId64 " tokens, a sample of --seq %d needs %d: use a shorter --seq or more text",
                   pattern, d.tokens, T, partial ? 2 : T + 1);
    return d;
}

static void dataset_close(Dataset *d) {
    for (int i = 0; i < d->num_files; i++) {
        close(d->files[i].fd);
        free(d->files[i].path);
    }
    free(d->files);
}

/* Reads `n` tokens of a file, from token `first`, to `raw`, and their mask bytes behind them. Returns 0 on failure. */
static int token_file_read(const TokenFile *f, int64_t first, int64_t n, char *raw) {
    int64_t width = f->header.width;
    int64_t tokens_offset = (int64_t)sizeof(TokenFileHeader);
    int64_t mask_offset = tokens_offset + (int64_t)f->header.count * width;
    if (read_bytes_at(f->fd, raw, n * width, tokens_offset + first * width) != n * width) return 0;
    if (!(f->header.flags & TOKEN_FILE_MASKED)) return 1;
    return read_bytes_at(f->fd, raw + n * width, n, mask_offset + first) == n;
}

static uint32_t token_at(const char *raw, int64_t t, int width) {
    uint32_t token = 0;
    memcpy(&token, raw + t * width, width); // the file and the machine are little-endian
    return token;
}

/* Reads window `index` to inputs (T) and targets (T), with `raw` (5·(T + 1) bytes) as scratch space. Returns the number
 * of targets, or -1 and a message in `error`. A window past the last one is padding: it has no targets. */
static int dataset_window(const Dataset *d, int64_t index, int32_t *inputs, int32_t *targets, char *raw, char *error,
                          size_t error_size) {
    for (int t = 0; t < d->T; t++) {
        inputs[t] = 0;
        targets[t] = IGNORED_TARGET;
    }
    if (index >= d->windows) return 0;
    const TokenFile *f = d->files;
    while (index >= f->first_window + f->windows) f++;
    int64_t first = (index - f->first_window) * d->T, n = min_i64(d->T + 1, (int64_t)f->header.count - first);
    int width = (int)f->header.width, masked = f->header.flags & TOKEN_FILE_MASKED;
    const char *mask = raw + n * width;
    if (!token_file_read(f, first, n, raw)) {
        snprintf(error, error_size,
                 "%s: tokens %" PRId64 " to %" PRId64
                 " cannot be read: the file has changed since it was opened, or its disk fails; restore it and start "
                 "again",
                 f->path, first, first + n - 1);
        return -1;
    }
    int num_targets = 0;
    for (int t = 0; t < n; t++) {
        uint32_t token = token_at(raw, t, width);
        if (token >= (uint32_t)d->vocab_size) {
            snprintf(error, error_size,
                     "%s: token %" PRId64
                     " is %u, the vocabulary has %d: the file does not fit the model; make it again with the model's "
                     "tokenizer",
                     f->path, first + t, token, d->vocab_size);
            return -1;
        }
        if (t < d->T) inputs[t] = (int32_t)token;
        if (t == 0 || (masked && !mask[t])) continue;
        targets[t - 1] = (int32_t)token;
        num_targets++;
    }
    return num_targets;
}

/* docs (T): the number of documents that ended before each token of the window, for --doc-mask. The token
 * `document_end` still belongs to the document that it ends. */
static void document_ids(int32_t *docs, const int32_t *inputs, int T, int32_t document_end) {
    int32_t ended = 0;
    for (int t = 0; t < T; t++) {
        docs[t] = ended;
        ended += inputs[t] == document_end;
    }
}

// ---------------------------------------------------------------------------
// the sampler. Like PyTorch's DistributedSampler it shuffles each epoch and deals the samples out to the ranks. But
// it deals out B consecutive samples at a time, where PyTorch's deals out single ones, and it advances the epoch itself

typedef struct {
    int64_t samples;      // windows in the data set
    uint64_t seed;        // of the shuffle
    int pad;              // --tail pad: the epoch's last step is filled up with its first samples; 0: it is dropped
    int shards, replicas; // data-parallel ranks: dp_shard × dp_replicate
    int shard, replica;   // this rank's coordinates among them
    int accumulation, B;  // micro-batches per step, samples per micro-batch
    int local;            // --accumulate local: a rank sums its micro-batches before ranks do
    int64_t start_step, start_epoch, start_sample; // where the run starts or resumes: step, its epoch, samples into it
} Sampler;

static int64_t sampler_global_batch(const Sampler *s) {
    return (int64_t)s->replicas * s->shards * s->accumulation * s->B;
}

/* Hash of everything that all ranks must agree on. A rank with another shuffle would train on other ranks' samples. */
static uint64_t sampler_fingerprint(const Sampler *s) {
    const int64_t common[] = {s->samples,    (int64_t)s->seed, s->pad,         s->shards,
                              s->replicas,   s->accumulation,  s->B,           s->local,
                              s->start_step, s->start_epoch,   s->start_sample};
    return hash_bytes(HASH_START, common, sizeof common);
}

/* Steps that fit into the last `samples` samples of an epoch. */
static int64_t sampler_steps_in(const Sampler *s, int64_t samples) {
    int64_t global_batch = sampler_global_batch(s);
    return s->pad ? (samples + global_batch - 1) / global_batch : samples / global_batch;
}
static int64_t sampler_steps_per_epoch(const Sampler *s) { return sampler_steps_in(s, s->samples); }

/* Returns how many samples of its epoch come before step `step` (counted from 0), and sets the epoch. After a resume,
 * the first epoch continues with the samples that are left of it. */
static int64_t sampler_position(const Sampler *s, int64_t step, int64_t *epoch) {
    int64_t global_batch = sampler_global_batch(s);
    int64_t since_start = step - s->start_step;
    int64_t left = max_i64(0, s->samples - s->start_sample), steps_left = sampler_steps_in(s, left);
    if (since_start < steps_left) {
        *epoch = s->start_epoch;
        return s->start_sample + since_start * global_batch;
    }
    int64_t steps_per_epoch = sampler_steps_per_epoch(s), after_start_epoch = since_start - steps_left;
    *epoch = s->start_epoch + 1 + after_start_epoch / steps_per_epoch;
    return after_start_epoch % steps_per_epoch * global_batch;
}

/* A pseudo-random permutation of [0, n) that needs no table: a Feistel network (Luby and Rackoff 1988) permutes the
 * next even power of two; it is applied again until the result lies below n. */
static int64_t permute(int64_t x, int64_t n, uint64_t key) {
    int half = 1; // bits of each half
    while (((int64_t)1 << (2 * half)) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = (uint64_t)x >> half, right = (uint64_t)x & mask;
        for (int round = 0; round < 6; round++) {
            uint64_t next = left ^ (mix64(right + key + (uint64_t)round * 0x9E3779B97F4A7C15ull) & mask);
            left = right;
            right = next;
        }
        x = (int64_t)(left << half | right);
    } while (x >= n);
    return x;
}

/* The window that is sample b of this rank's micro-batch m in a step. The micro-batches of all ranks are
 * numbered by j: number j takes samples [j·B, (j + 1)·B) of the step. Neighbors are summed first: j runs over the shard
 * ranks, then the micro-batches of a rank, then the replicas; with --accumulate local over the micro-batches of a rank,
 * then the shard ranks, then the replicas. */
static int64_t sampler_window(const Sampler *s, int64_t step, int m, int b) {
    int64_t j = ((int64_t)s->replica * s->accumulation + m) * s->shards + s->shard;
    if (s->local) j = ((int64_t)s->replica * s->shards + s->shard) * s->accumulation + m;
    int64_t epoch, position = sampler_position(s, step, &epoch) + j * s->B + b;
    return permute(position % s->samples, s->samples, mix64(s->seed + (uint64_t)epoch + 1));
}

// ---------------------------------------------------------------------------
// the loader: worker threads read whole steps ahead; each takes the next sample that no other worker has claimed

enum { LOADER_DEPTH = 2 /* steps in memory */, LOADER_WORKERS = 4, LOADER_MAX_WORKERS = 64 };

/* One step's samples of this rank. */
typedef struct {
    int32_t *inputs, *targets; // (accumulation, B, T / cp)
    int32_t *docs;             // (accumulation, B, T) document of each token in its window; NULL without --doc-mask
    int32_t *own_docs;         // (accumulation, B, T / cp) the same for this rank's tokens; is `docs` if cp = 1
    int64_t *windows;          // (accumulation, B) which windows these are
    int64_t num_targets;       // positions whose target is not ignored
    uint64_t samples_hash;     // hash of the windows, their tokens and their positions
    int64_t unread;            // samples that no worker has finished yet
    int64_t bad;               // the first sample that cannot be trained on; valid when `error` is not empty
    char error[1024];
    DeviceEvent fed; // recorded when the device has copied the batch
} StepBatch;

typedef struct {
    struct Loader *loader;
    char *raw; // (window_bytes) the worker's scratch space
    pthread_t thread;
} LoaderWorker;

/* What loader_open needs besides the data and the sampler. */
typedef struct {
    int T;
    int document_ids;             // --doc-mask: fill StepBatch.docs
    int cp, cp_rank;              // size of the context-parallel group and this rank's place in it
    int64_t first_step, end_step; // steps [first_step, end_step) are read, counted from 0
    int workers;                  // --workers; 0: one per core of this rank, up to LOADER_WORKERS
    int cores;                    // cores of this rank
} LoaderOptions;

/* Scratch space of a worker: the file's bytes of a window and, with context parallelism, all its inputs and targets
 * (2, T). */
static size_t raw_bytes(int T) { return (size_t)round_up(5 * ((int64_t)T + 1), sizeof(int32_t)); }
static size_t window_bytes(int T, int cp) { return raw_bytes(T) + (cp > 1 ? 2 * sizeof(int32_t) * T : 0); }

typedef struct Loader {
    const Dataset *data;
    Sampler sampler;
    LoaderOptions options;
    StepBatch ring[LOADER_DEPTH];
    int64_t samples;            // this rank's samples per step: accumulation × B
    int64_t steps;              // how many are read; the counters below start at the first
    int64_t claimed;            // samples that workers have taken
    int64_t produced, consumed; // steps read completely; steps released by the training loop
    int num_workers, stop;
    LoaderWorker workers[LOADER_MAX_WORKERS];
    pthread_mutex_t lock;
    pthread_cond_t room, ready;              // a buffer has become free; a step has become complete
    double opened_at, first_batch_seconds;   // when the loader was opened; from then to its first complete step
    double wait_seconds, later_wait_seconds; // of the last loader_next; of all but the first
    double read_seconds;                     // of all workers together
} Loader;

/* Claims the next sample and waits until its step has a buffer. -1: all samples are claimed, or the loader closes. */
static int64_t loader_claim(Loader *l) {
    pthread_mutex_lock(&l->lock);
    int64_t end = l->steps * l->samples;
    while (!l->stop && l->claimed < end && l->claimed / l->samples >= l->consumed + LOADER_DEPTH)
        pthread_cond_wait(&l->room, &l->lock);
    int64_t sample = l->stop || l->claimed >= end ? -1 : l->claimed++;
    if (sample >= 0 && sample % l->samples == 0) {
        StepBatch *batch = &l->ring[sample / l->samples % LOADER_DEPTH];
        batch->num_targets = 0;
        batch->samples_hash = 0;
        batch->unread = l->samples;
        batch->error[0] = 0;
    }
    pthread_mutex_unlock(&l->lock);
    return sample;
}

/* Reads window `window` to position i of the batch, of context-parallel rank cp_rank, and adds it to the batch's
 * samples_hash. Returns the number of targets, or -1 and a message in `error`. */
static int read_window(const Dataset *data, int cp, int cp_rank, StepBatch *batch, int64_t i, int64_t window,
                       char *raw /* (window_bytes) */, char *error /* as batch->error */) {
    int T = data->T, own = T / cp;
    int32_t *inputs = batch->inputs + i * own, *targets = batch->targets + i * own;
    int32_t *all_inputs = inputs, *all_targets = targets;
    if (cp > 1) {
        all_inputs = (int32_t *)(void *)(raw + raw_bytes(T));
        all_targets = all_inputs + T;
    }
    int num_targets = dataset_window(data, window, all_inputs, all_targets, raw, error, sizeof batch->error);
    uint64_t h = hash_bytes(mix64((uint64_t)i + 1) ^ (uint64_t)window, all_inputs, sizeof(int32_t) * (size_t)T);
    __atomic_fetch_add(&batch->samples_hash, mix64(h), __ATOMIC_RELAXED); // a sum: workers may read in any order
    if (batch->docs) document_ids(batch->docs + i * T, all_inputs, T, data->document_end);
    if (cp == 1) return num_targets;
    if (batch->docs) cp_select_halves(batch->own_docs + i * own, batch->docs + i * T, T, cp, cp_rank);
    cp_select_halves(inputs, all_inputs, T, cp, cp_rank);
    cp_select_halves(targets, all_targets, T, cp, cp_rank);
    return num_targets;
}

/* Reads a claimed sample. Workers may complete steps in any order, but the loader hands them out in sequence. A bad
 * sample does not stop its step from being read, so that the error always names the first bad sample of the step. */
static void loader_read(Loader *l, int64_t sample, char *raw) {
    int64_t step = sample / l->samples, i = sample % l->samples;
    int B = l->sampler.B;
    StepBatch *batch = &l->ring[step % LOADER_DEPTH];
    char error[sizeof batch->error] = "";
    double start = seconds_now();
    int64_t window = sampler_window(&l->sampler, l->options.first_step + step, (int)(i / B), (int)(i % B));
    int num_targets = read_window(l->data, l->options.cp, l->options.cp_rank, batch, i, window, raw, error);
    double seconds = seconds_now() - start;

    pthread_mutex_lock(&l->lock);
    l->read_seconds += seconds;
    if (num_targets < 0 && (!batch->error[0] || i < batch->bad)) {
        batch->bad = i;
        memcpy(batch->error, error, sizeof error);
    }
    batch->windows[i] = window;
    batch->num_targets += num_targets;
    batch->unread--;
    int64_t produced_before = l->produced;
    while (l->produced * l->samples < l->claimed && !l->ring[l->produced % LOADER_DEPTH].unread) l->produced++;
    if (!produced_before && l->produced) l->first_batch_seconds = seconds_now() - l->opened_at;
    if (l->produced > produced_before) pthread_cond_signal(&l->ready);
    pthread_mutex_unlock(&l->lock);
}

static void *loader_worker(void *arg) {
    LoaderWorker *w = (LoaderWorker *)arg;
    for (;;) {
        int64_t sample = loader_claim(w->loader);
        if (sample < 0) return NULL;
        loader_read(w->loader, sample, w->raw);
    }
}

/* Allocates a batch of `samples` samples of T tokens, of which this rank has T / cp. */
static void step_batch_open(StepBatch *batch, Device *dev, int64_t samples, int T, int cp, int document_ids) {
    int64_t whole = samples * T, own = whole / cp;
    batch->inputs = arena_array(int32_t, dev, MEM_HOST, "token batches", own);
    batch->targets = arena_array(int32_t, dev, MEM_HOST, "token batches", own);
    if (document_ids) batch->docs = arena_array(int32_t, dev, MEM_HOST, "documents", whole);
    batch->own_docs = batch->docs;
    if (document_ids && cp > 1)
        batch->own_docs = arena_array(int32_t, dev, MEM_HOST, "documents of this rank's tokens", own);
}

/* Memory for workers is reserved for LOADER_WORKERS of them even if the machine has fewer cores, so that a plan does
 * not depend on the machine that makes it. */
static void loader_allocate(Loader *l, Device *dev) {
    const LoaderOptions *o = &l->options;
    for (int i = 0; i < LOADER_DEPTH; i++) {
        step_batch_open(&l->ring[i], dev, l->samples, o->T, o->cp, o->document_ids);
        l->ring[i].windows = arena_array(int64_t, dev, MEM_HOST, "sample numbers", l->samples);
    }
    for (int i = 0; i < (o->workers ? o->workers : LOADER_WORKERS); i++) {
        l->workers[i].loader = l;
        l->workers[i].raw = (char *)arena_alloc(dev, MEM_HOST, "raw window", window_bytes(o->T, o->cp));
    }
}

/* Starts the workers. In a dry run the buffers are counted and nothing is read. */
static void loader_open(Loader *l, Device *dev, const Dataset *data, const Sampler *sampler, const LoaderOptions *o) {
    memset(l, 0, sizeof *l);
    l->data = data;
    l->sampler = *sampler;
    l->options = *o;
    l->samples = (int64_t)sampler->accumulation * sampler->B;
    l->steps = o->end_step - o->first_step;
    l->num_workers = o->workers ? o->workers : (int)max_i64(1, min_i64(LOADER_WORKERS, o->cores));
    l->opened_at = seconds_now();
    loader_allocate(l, dev);
    if (dev->dry_run) return;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->room, NULL);
    cond_init_timed(&l->ready);
    for (int i = 0; i < l->num_workers; i++)
        if (thread_start(&l->workers[i].thread, loader_worker, &l->workers[i]))
            user_error("loader worker %d of %d could not be started as a thread: use fewer --workers, or raise this "
                       "account's limit of threads (ulimit -u)",
                       i + 1, l->num_workers);
}

/* Returns the next step's batch, which stays valid until loader_release. Waits at most `timeout` seconds for it. */
static StepBatch *loader_next(Loader *l, Device *dev, double timeout) {
    if (dev->dry_run) return &l->ring[0];
    StepBatch *batch = &l->ring[l->consumed % LOADER_DEPTH];
    double start = seconds_now();
    struct timespec deadline;
    clock_gettime(COND_CLOCK, &deadline);
    deadline.tv_sec += (time_t)ceil(timeout);
    int late = 0;
    pthread_mutex_lock(&l->lock);
    while (l->produced <= l->consumed && !late) late = pthread_cond_timedwait(&l->ready, &l->lock, &deadline);
    int complete = l->produced > l->consumed;
    int64_t read = l->claimed > l->consumed * l->samples ? l->samples - batch->unread : 0;
    pthread_mutex_unlock(&l->lock);
    if (!complete)
        run_failure("step %" PRId64 ": only %" PRId64 " of its %" PRId64
                    " samples could be read within %.0f s: check the disk that holds %s; --timeout sets the limit",
                    l->options.first_step + l->consumed + 1, read, l->samples, timeout, l->data->files[0].path);
    if (batch->error[0]) user_error("%s", batch->error);
    l->wait_seconds = seconds_now() - start;
    if (l->consumed) l->later_wait_seconds += l->wait_seconds;
    return batch;
}

/* Gives the batch's buffer back, and wakes as many workers as there are samples to read into it, at most one each. */
static void loader_release(Loader *l, Device *dev) {
    if (dev->dry_run) return;
    device_synchronize_event(l->ring[l->consumed % LOADER_DEPTH].fed);
    pthread_mutex_lock(&l->lock);
    l->consumed++;
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->num_workers && i < l->samples; i++) pthread_cond_signal(&l->room);
}

static void loader_close(Loader *l, Device *dev) {
    if (dev->dry_run || l->stop) return; // threads can be joined only once
    pthread_mutex_lock(&l->lock);
    l->stop = 1;
    pthread_cond_broadcast(&l->room);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->num_workers; i++) pthread_join(l->workers[i].thread, NULL);
    for (int i = 0; i < LOADER_DEPTH; i++) device_destroy_event(l->ring[i].fed);
}

#endif
