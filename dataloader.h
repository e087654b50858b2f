/* dataloader.h: token files, the sampler, and the workers that read ahead.
 *
 * Owns: the token file format, which rank trains on which sample when, and the reading of samples.
 * A sample is a fixed window of T + 1 tokens; windows are shuffled each epoch by a permutation computed on the
 * fly, so any step of any run can be found at once. A step consumes samples [s·GB, (s+1)·GB) whatever the layout.
 * A caller may rely on: every token handed out is below the vocabulary; errors come as sentences; what a step
 * holds, and which sentence a bad one ends with, does not depend on the number of workers or on who read what.
 */
#ifndef DATALOADER_H
#define DATALOADER_H
#include "lib/device.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// token files (little-endian): header, tokens, and where flagged one byte a token: 0 = not a target

enum { TOKEN_FILE_MASKED = 1, IGNORED_TARGET = -100 };
#define TOKEN_FILE_MAGIC "LLM3TOK1"

typedef struct {
    char magic[8];
    uint32_t version, width, vocab_size, flags; // width: bytes a token, 2 or 4
    uint64_t count;                             // tokens
    uint8_t tokenizer[32];                      // SHA-256 of the tokenizer's file
} TokenFileHeader;
static_assert(sizeof(TokenFileHeader) == 64, "the header has no padding");

typedef struct {
    char *path;
    int fd;
    TokenFileHeader header;
    int64_t windows, first_window; // whole windows of T + 1 tokens, and how many lie in the files before
} TokenFile;

typedef struct {
    TokenFile *files;
    int num_files;
    int T, vocab_size;
    int64_t windows, tokens;
    int32_t document_end; // the token that ends a document, where documents are told apart
    uint64_t fingerprint; // of all headers
} Dataset;

static TokenFile token_file_open(const char *path, int vocab_size) {
    TokenFile f = ZERO;
    struct stat info;
    f.path = strdup(path);
    f.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f.fd < 0 || fstat(f.fd, &info))
        user_error("cannot read token file %s (%s): make one with dev/data/text.sh", path, strerror(errno));
    TokenFileHeader *h = &f.header;
    if (pread(f.fd, h, sizeof *h, 0) != (ssize_t)sizeof *h || memcmp(h->magic, TOKEN_FILE_MAGIC, 8))
        user_error("%s is not a token file: expected it to begin with %s; make one with dev/data/text.sh", path,
                   TOKEN_FILE_MAGIC);
    if (h->version != 1)
        user_error("%s has token file version %u, expected 1: make it again with dev/data/text.sh", path, h->version);
    if ((h->width != 2 && h->width != 4) || (h->flags & ~(uint32_t)TOKEN_FILE_MASKED))
        user_error("%s: token width %u with flags %u, expected width 2 or 4 and flags 0 or 1: make it again with "
                   "dev/data/text.sh",
                   path, h->width, h->flags);
    uint64_t each = h->width + (h->flags & TOKEN_FILE_MASKED ? 1u : 0u);
    if (h->count > (UINT64_MAX / 8) || (uint64_t)info.st_size != sizeof *h + h->count * each)
        user_error("%s is truncated or damaged: %" PRIu64 " tokens of %" PRIu64
                   " bytes after a header of 64 were expected, the file has %" PRId64 " bytes",
                   path, h->count, each, (int64_t)info.st_size);
    if (h->vocab_size > (uint32_t)vocab_size)
        user_error(
            "%s was made with a vocabulary of %u tokens, the model has %d: choose --vocab-size %u or another --data",
            path, h->vocab_size, vocab_size, h->vocab_size);
    return f;
}

/* `pattern` is a file or a glob; files count in the order of their names. `partial`: the last window of a file
 * may be shorter than T + 1 tokens (evaluation, where every token counts). */
static Dataset dataset_open(const char *pattern, int T, int vocab_size, int partial) {
    Dataset d = ZERO;
    glob_t found;
    if (glob(pattern, 0, NULL, &found) != 0)
        user_error("no token file at %s: make one with dev/data/kjv.sh or dev/data/text.sh", pattern);
    d.num_files = (int)found.gl_pathc;
    d.files = (TokenFile *)checked_malloc(sizeof(TokenFile) * (size_t)d.num_files);
    d.T = T;
    d.vocab_size = vocab_size;
    d.fingerprint = HASH_START;
    for (int i = 0; i < d.num_files; i++) {
        TokenFile *f = &d.files[i];
        *f = token_file_open(found.gl_pathv[i], vocab_size);
        int64_t targets = (int64_t)f->header.count - 1; // every token but a file's first is a target
        f->windows = targets < 1 ? 0 : partial ? (targets + T - 1) / T : targets / T;
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

/* Window `index` as inputs (T) and targets (T). `raw` holds 5·(T + 1) bytes. Returns how many positions are
 * targets, or -1 with a sentence in `error`. A window at or past the end has none: it pads a batch. */
static int dataset_window(const Dataset *d, int64_t index, int32_t *inputs, int32_t *targets, char *raw, char *error,
                          size_t error_size) {
    for (int t = 0; t < d->T; t++) inputs[t] = 0, targets[t] = IGNORED_TARGET;
    if (index >= d->windows) return 0;
    int file = 0;
    while (index >= d->files[file].first_window + d->files[file].windows) file++;
    const TokenFile *f = &d->files[file];
    int64_t first = (index - f->first_window) * d->T, n = min_i64(d->T + 1, (int64_t)f->header.count - first);
    int width = (int)f->header.width, masked = f->header.flags & TOKEN_FILE_MASKED;
    char *mask = raw + n * width;
    int64_t mask_at = (int64_t)sizeof(TokenFileHeader) + (int64_t)f->header.count * width + first;
    if (pread(f->fd, raw, (size_t)(n * width), (int64_t)sizeof(TokenFileHeader) + first * width) != n * width ||
        (masked && pread(f->fd, mask, (size_t)n, mask_at) != n)) {
        snprintf(
            error, error_size,
            "%s: tokens %" PRId64 " to %" PRId64
            " cannot be read: the file has changed since it was opened, or its disk fails; restore it and start again",
            f->path, first, first + n - 1);
        return -1;
    }
    int count = 0;
    for (int t = 0; t < n; t++) {
        uint16_t narrow;
        uint32_t token;
        if (width == 2) memcpy(&narrow, raw + 2 * t, 2), token = narrow;
        else memcpy(&token, raw + 4 * t, 4);
        if (token >= (uint32_t)d->vocab_size) {
            snprintf(error, error_size,
                     "%s: token %" PRId64
                     " is %u, the vocabulary has %d: the file does not fit the model, make it again",
                     f->path, first + t, token, d->vocab_size);
            return -1;
        }
        if (t < d->T) inputs[t] = (int32_t)token;
        if (t > 0 && (!masked || mask[t])) targets[t - 1] = (int32_t)token, count++;
    }
    return count;
}

/* Which document of its window each of T tokens belongs to: as many as ended before it. The token that ends a document
 * is its last. */
static void documents_of(int32_t *docs, const int32_t *inputs, int T, int32_t end) {
    int32_t ended = 0;
    for (int t = 0; t < T; t++) docs[t] = ended, ended += inputs[t] == end;
}

// ---------------------------------------------------------------------------
// the sampler

typedef struct {
    int64_t samples; // windows in the data set
    uint64_t seed;
    int pad;              // the last step of an epoch: padded by the epoch's head, else dropped
    int shards, replicas; // data-parallel ranks: dp_shard × cp's share, dp_replicate
    int shard, replica;   // this rank's coordinates
    int accumulation, B;  // micro-batches a step, samples a micro-batch
    int local;            // micro-batches are summed before ranks
    int64_t from_step, from_epoch,
        from_sample; // where it goes on: steps before it; its epoch, and how many of it are consumed
} Sampler;

static inline int64_t sampler_global_batch(const Sampler *s) {
    return (int64_t)s->replicas * s->shards * s->accumulation * s->B;
}

/* Of what all ranks' samplers have in common: with another shuffle a rank would train on samples that belong to others.
 */
static uint64_t sampler_fingerprint(const Sampler *s) {
    const int64_t common[] = {s->samples, (int64_t)s->seed, s->pad,       s->shards,     s->replicas,   s->accumulation,
                              s->B,       s->local,         s->from_step, s->from_epoch, s->from_sample};
    return hash_bytes(HASH_START, common, sizeof common);
}

/* Steps that `samples` of an epoch make. */
static inline int64_t sampler_steps_of(const Sampler *s, int64_t samples) {
    int64_t gb = sampler_global_batch(s);
    return s->pad ? (samples + gb - 1) / gb : samples / gb;
}
static inline int64_t sampler_steps_per_epoch(const Sampler *s) { return sampler_steps_of(s, s->samples); }

/* The epoch of step `step` (from 0); returns how many of its samples came before. The first epoch after a resume is
 * what is left of it. */
static int64_t sampler_place(const Sampler *s, int64_t step, int64_t *epoch) {
    int64_t ahead = step - s->from_step,
            first = s->from_sample < s->samples ? sampler_steps_of(s, s->samples - s->from_sample) : 0,
            whole = sampler_steps_per_epoch(s);
    *epoch = ahead < first ? s->from_epoch : s->from_epoch + 1 + (ahead - first) / whole;
    return ahead < first ? s->from_sample + ahead * sampler_global_batch(s)
                         : (ahead - first) % whole * sampler_global_batch(s);
}

/* A pseudo-random permutation of [0, n) without a table: a Feistel network (Luby and Rackoff 1988) on the next
 * even power of two, walked until it lands inside. */
static int64_t permute(int64_t x, int64_t n, uint64_t key) {
    int half = 1;
    while (((int64_t)1 << (2 * half)) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, left, right;
    do {
        left = (uint64_t)x >> half, right = (uint64_t)x & mask;
        for (int round = 0; round < 6; round++) {
            uint64_t next = left ^ (mix64(right + key + (uint64_t)round * 0x9E3779B97F4A7C15ull) & mask);
            left = right, right = next;
        }
        x = (int64_t)(left << half | right);
    } while (x >= n);
    return x;
}

/* Which window is sample b of micro-batch m in a step. Micro-batches are numbered in the order in which their
 * gradients are summed: first over shard ranks, then micro-steps, then replicas; local: micro-steps, shard ranks,
 * replicas. */
static int64_t sampler_window(const Sampler *s, int64_t step, int m, int b) {
    int64_t j = ((int64_t)s->replica * s->accumulation + m) * s->shards + s->shard;
    if (s->local) j = ((int64_t)s->replica * s->shards + s->shard) * s->accumulation + m;
    int64_t epoch, within = sampler_place(s, step, &epoch) + j * s->B + b;
    return permute(within % s->samples, s->samples, mix64(s->seed + (uint64_t)epoch + 1));
}

/* Of a sequence (T) the two of 2·cp chunks that rank i of `cp` has, with context parallelism: i and 2·cp - 1 - i. May
 * be in place. */
static void context_part(int32_t *part, const int32_t *whole, int T, int cp, int i) {
    int chunk = T / (2 * cp);
    size_t bytes = sizeof(int32_t) * (size_t)chunk;
    if (cp == 1) {
        memmove(part, whole, sizeof(int32_t) * (size_t)T);
        return;
    }
    memmove(part, whole + (int64_t)i * chunk, bytes);
    memmove(part + chunk, whole + (int64_t)(2 * cp - 1 - i) * chunk, bytes);
}

// ---------------------------------------------------------------------------
// the loader: workers read whole steps ahead, each the next sample that nobody has claimed

enum { LOADER_DEPTH = 2, LOADER_WORKERS = 4, LOADER_MAX_WORKERS = 64 };

typedef struct {
    int32_t *inputs, *targets; // (accumulation, B, T / cp) of this rank
    int32_t *docs;       // (accumulation, B, T) document of each token, counted in its window; NULL without --doc-mask
    int32_t *own_docs;   // (accumulation, B, T / cp) of this rank's tokens; without context parallelism docs
    int64_t *windows;    // (accumulation, B) which samples these are
    int64_t num_targets; // positions that count, of these samples
    uint64_t samples_hash; // of the windows and their places: a sum, the same in whatever order they are read
    int64_t unread;        // samples that are not there yet
    int64_t bad;           // where `error` says something: of the samples that cannot be trained on, the first
    char error[1024];
    DeviceEvent fed; // the device has copied all it needs of it
} StepBatch;

typedef struct {
    struct Loader *loader;
    char *raw;
    pthread_t thread;
} LoaderWorker; // raw: window_bytes

/* What a worker reads a window into: 5·(T + 1) bytes as it lies in the file, and with context parallelism all of it,
 * (2, T). */
static inline size_t raw_bytes(int T) { return (size_t)round_up(5 * ((int64_t)T + 1), sizeof(int32_t)); }
static inline size_t window_bytes(int T, int cp) {
    return raw_bytes(T) + (cp > 1 ? 2 * sizeof(int32_t) * (size_t)T : 0);
}

typedef struct Loader {
    const Dataset *data;
    Sampler sampler;
    int cp, cp_rank; // ranks that have a part of each sequence, and which one this rank has
    StepBatch ring[LOADER_DEPTH];
    int64_t samples;            // of this rank in a step: accumulation × B
    int64_t first_step, steps;  // steps are relative to the first; how many will be read
    int64_t claimed;            // samples, in order from the first step's first
    int64_t produced, consumed; // whole steps
    int num_workers, stop;
    LoaderWorker workers[LOADER_MAX_WORKERS];
    pthread_mutex_t lock;
    pthread_cond_t room, ready; // for a worker: a buffer is free; for the training step: its batch is whole
    double opened, first_after; // when; seconds from then until the first batch was whole
    double wait_seconds, later_wait_seconds; // of the last loader_next; of all but the first
    double read_seconds;                     // of all workers together
} Loader;

/* The next sample; waits until its step has a buffer. -1: the loader closes, or all are claimed. */
static int64_t loader_claim(Loader *l) {
    pthread_mutex_lock(&l->lock);
    while (!l->stop && l->claimed / l->samples < l->steps && l->claimed / l->samples >= l->consumed + LOADER_DEPTH)
        pthread_cond_wait(&l->room, &l->lock);
    int64_t sample = l->stop || l->claimed / l->samples >= l->steps ? -1 : l->claimed++;
    if (sample >= 0 && sample % l->samples == 0) {
        StepBatch *batch = &l->ring[sample / l->samples % LOADER_DEPTH];
        batch->num_targets = 0, batch->samples_hash = 0, batch->unread = l->samples, batch->error[0] = 0;
    }
    pthread_mutex_unlock(&l->lock);
    return sample;
}

/* Reads a claimed sample to its place. Steps become whole in any order and are handed out in theirs. A bad sample
 * is read like any other: its step is whole before it is judged, and by then the first of its bad ones is known. */
static void loader_read(Loader *l, int64_t sample, char *raw) {
    int64_t step = sample / l->samples, i = sample % l->samples, before;
    int B = l->sampler.B, T = l->data->T, mine = T / l->cp;
    StepBatch *batch = &l->ring[step % LOADER_DEPTH];
    int32_t *inputs = batch->inputs + i * mine, *targets_of = batch->targets + i * mine;
    char error[sizeof batch->error] = "";
    double start = seconds_now();
    int64_t window = sampler_window(&l->sampler, l->first_step + step, (int)(i / B), (int)(i % B));
    int32_t *whole = (int32_t *)(void *)(raw + raw_bytes(T)), *whole_inputs = l->cp > 1 ? whole : inputs,
            *whole_targets = l->cp > 1 ? whole + T : targets_of;
    int targets = dataset_window(l->data, window, whole_inputs, whole_targets, raw, error, sizeof error);
    if (batch->docs) documents_of(batch->docs + i * T, whole_inputs, T, l->data->document_end);
    if (batch->docs && l->cp > 1) context_part(batch->own_docs + i * mine, batch->docs + i * T, T, l->cp, l->cp_rank);
    if (l->cp > 1)
        context_part(inputs, whole_inputs, T, l->cp, l->cp_rank),
            context_part(targets_of, whole_targets, T, l->cp, l->cp_rank);
    double seconds = seconds_now() - start;
    pthread_mutex_lock(&l->lock);
    l->read_seconds += seconds;
    if (targets < 0 && (!batch->error[0] || i < batch->bad)) batch->bad = i, memcpy(batch->error, error, sizeof error);
    batch->windows[i] = window;
    batch->num_targets += targets;
    batch->samples_hash += mix64(mix64((uint64_t)i + 1) ^ (uint64_t)window);
    batch->unread--;
    before = l->produced;
    while (l->produced * l->samples < l->claimed && !l->ring[l->produced % LOADER_DEPTH].unread) l->produced++;
    if (!before && l->produced) l->first_after = seconds_now() - l->opened;
    if (l->produced > before) pthread_cond_signal(&l->ready);
    pthread_mutex_unlock(&l->lock);
}

static void *loader_worker(void *arg) {
    LoaderWorker *w = (LoaderWorker *)arg;
    for (int64_t sample; (sample = loader_claim(w->loader)) >= 0;) loader_read(w->loader, sample, w->raw);
    return NULL;
}

/* Reads steps `first_step` to `end` - 1. `workers` 0: as many as this rank has cores, up to LOADER_WORKERS; the memory
 * of that many is booked on every machine, so that a plan does not depend on the cores of the machine that makes it. On
 * a dry-run device the buffers are booked and nothing is read. `docs`: documents are told apart. */
static void loader_open(Loader *l, Device *dev, const Dataset *data, const Sampler *sampler, int T, int docs, int cp,
                        int cp_rank, int64_t first_step, int64_t end, int workers, int cores) {
    memset(l, 0, sizeof *l);
    l->data = data;
    l->sampler = *sampler;
    l->cp = cp, l->cp_rank = cp_rank;
    l->samples = (int64_t)sampler->accumulation * sampler->B;
    l->first_step = first_step, l->steps = end - first_step;
    l->num_workers = workers ? workers : (int)max_i64(1, min_i64(LOADER_WORKERS, cores));
    l->opened = seconds_now();
    size_t bytes = sizeof(int32_t) * (size_t)l->samples * (size_t)(T / cp);
    for (int i = 0; i < LOADER_DEPTH; i++) {
        l->ring[i].inputs = (int32_t *)arena_alloc(dev, MEM_HOST, "token batches", bytes);
        l->ring[i].targets = (int32_t *)arena_alloc(dev, MEM_HOST, "token batches", bytes);
        if (docs)
            l->ring[i].own_docs = l->ring[i].docs =
                (int32_t *)arena_alloc(dev, MEM_HOST, "documents", bytes * (size_t)cp);
        if (docs && cp > 1)
            l->ring[i].own_docs = (int32_t *)arena_alloc(dev, MEM_HOST, "documents of this rank's tokens", bytes);
        l->ring[i].windows =
            (int64_t *)arena_alloc(dev, MEM_HOST, "which samples", sizeof(int64_t) * (size_t)l->samples);
    }
    for (int i = 0; i < (workers ? workers : LOADER_WORKERS); i++) {
        l->workers[i].loader = l;
        l->workers[i].raw = (char *)arena_alloc(dev, MEM_HOST, "raw window", window_bytes(T, cp));
    }
    if (dev->dry_run) return;
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC); // a deadline that no change of the wall clock moves
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->room, NULL);
    pthread_cond_init(&l->ready, &steady);
    pthread_condattr_destroy(&steady);
    for (int i = 0; i < l->num_workers; i++)
        if (pthread_create(&l->workers[i].thread, NULL, loader_worker, &l->workers[i]))
            user_error("loader worker %d of %d could not be started as a thread: use fewer --workers, or raise this "
                       "account's limit of threads (ulimit -u)",
                       i + 1, l->num_workers);
}

/* The next step's batch; valid until loader_release. Waits for the disk no longer than `timeout` seconds. */
static StepBatch *loader_next(Loader *l, Device *dev, double timeout) {
    if (dev->dry_run) return &l->ring[0];
    StepBatch *batch = &l->ring[l->consumed % LOADER_DEPTH];
    double start = seconds_now();
    struct timespec limit;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += (time_t)ceil(timeout);
    int late = 0;
    pthread_mutex_lock(&l->lock);
    while (l->produced <= l->consumed && !late) late = pthread_cond_timedwait(&l->ready, &l->lock, &limit);
    int whole = l->produced > l->consumed;
    int64_t read = l->claimed > l->consumed * l->samples ? l->samples - batch->unread : 0;
    pthread_mutex_unlock(&l->lock);
    if (!whole)
        run_failure("step %" PRId64 ": %" PRId64 " of its %" PRId64
                    " samples could be read within %.0f s: look at the disk that holds %s; --timeout sets the limit",
                    l->first_step + l->consumed + 1, read, l->samples, timeout, l->data->files[0].path);
    if (batch->error[0]) user_error("%s", batch->error);
    l->wait_seconds = seconds_now() - start;
    if (l->consumed) l->later_wait_seconds += l->wait_seconds;
    return batch;
}

/* Wakes as many workers as there are samples to read: each once a step, and none that would find nothing. */
static void loader_release(Loader *l, Device *dev) {
    if (dev->dry_run) return;
    device_await_on_host(l->ring[l->consumed % LOADER_DEPTH].fed);
    pthread_mutex_lock(&l->lock);
    l->consumed++;
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->num_workers && i < l->samples; i++) pthread_cond_signal(&l->room);
}

static void loader_close(Loader *l, Device *dev) {
    if (dev->dry_run || l->stop) return; // a thread is joined once
    pthread_mutex_lock(&l->lock);
    l->stop = 1;
    pthread_cond_broadcast(&l->room);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->num_workers; i++) pthread_join(l->workers[i].thread, NULL);
    for (int i = 0; i < LOADER_DEPTH; i++) device_forget_event(l->ring[i].fed);
}

// ---------------------------------------------------------------------------
// --audit: samples.jsonl, in which a run writes what it consumed, held against the rule: each window once an epoch

typedef struct {
    int64_t windows; // in the data; 0: not told yet
    int pad;         // the last step of an epoch repeats its head; else what does not make a step is dropped
    int32_t *seen;   // (windows) by which step of this epoch, 0: not yet
    int64_t epoch, step, consumed, repeated, of_step;    // so far; repeated and samples of the step: the last step's
    int64_t whole_epochs, dropped, steps, samples, from; // of all; `from`: the first step told
    int cut_in; // the first epoch was entered in its middle: another file has its beginning
} Audit;

/* An epoch has ended: what is not consumed is less than a step. */
static void audit_epoch(Audit *a, const char *path) {
    int64_t missing = a->windows - (a->consumed - a->repeated);
    if (a->cut_in) missing = 0;
    if (missing && (a->pad || missing >= a->of_step))
        user_error("%s: epoch %" PRId64 " ended at step %" PRId64 " with %" PRId64 " of %" PRId64
                   " windows never consumed",
                   path, a->epoch, a->step, missing, a->windows);
    a->whole_epochs += !a->cut_in, a->dropped += missing;
    a->consumed = a->repeated = a->cut_in = 0;
    a->epoch++;
    memset(a->seen, 0, sizeof *a->seen * (size_t)a->windows);
}

static void audit_line(Audit *a, const char *path, int64_t number, const char *line) {
    cJSON *json = cJSON_Parse(line);
    const cJSON *windows = cJSON_GetObjectItemCaseSensitive(json, "windows"),
                *samples = cJSON_GetObjectItemCaseSensitive(json, "samples"), *item;
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(json, "step"),
                *epoch = cJSON_GetObjectItemCaseSensitive(json, "epoch"),
                *tail = cJSON_GetObjectItemCaseSensitive(json, "tail");
    if (cJSON_IsNumber(windows) && cJSON_IsString(tail)) { // what follows is of this data
        a->windows = (int64_t)windows->valuedouble, a->pad = !strcmp(tail->valuestring, "pad");
        if (a->windows < 1 || a->windows > INT32_MAX)
            user_error("%s, line %" PRId64 ": %g windows, expected 1 to %d", path, number, windows->valuedouble,
                       INT32_MAX);
        free(a->seen);
        a->seen = (int32_t *)checked_malloc(sizeof *a->seen * (size_t)a->windows);
        a->epoch = -1, a->consumed = a->repeated = 0;
        a->cut_in = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(json, "consumed_before")) > 0;
        cJSON_Delete(json);
        return;
    }
    if (!a->windows || !cJSON_IsNumber(step) || !cJSON_IsNumber(epoch) || !cJSON_IsArray(samples))
        user_error("%s, line %" PRId64 ": neither what data it is nor what a step consumed: the file is damaged", path,
                   number);
    int64_t now = (int64_t)step->valuedouble, in = (int64_t)epoch->valuedouble;
    if (a->steps && now != a->step + 1)
        user_error("%s, line %" PRId64 ": step %" PRId64 " comes after step %" PRId64, path, number, now, a->step);
    if (!a->steps) a->from = now;
    if (a->epoch < 0) a->epoch = in;
    else if (in == a->epoch + 1) audit_epoch(a, path);
    if (in != a->epoch)
        user_error("%s, line %" PRId64 ": step %" PRId64 " is of epoch %" PRId64 ", expected %" PRId64, path, number,
                   now, in, a->epoch);
    if (a->repeated)
        user_error("%s: epoch %" PRId64 " goes on at step %" PRId64 " though step %" PRId64 " had to repeat windows",
                   path, in, now, a->step);
    a->step = now, a->of_step = cJSON_GetArraySize(samples), a->steps++;
    cJSON_ArrayForEach(item, samples) {
        int64_t w = (int64_t)item->valuedouble;
        if (!cJSON_IsNumber(item) || w < 0 || w >= a->windows)
            user_error("%s: step %" PRId64 " consumed window %g of %" PRId64, path, now, item->valuedouble, a->windows);
        if (a->seen[w] && !a->pad)
            user_error("%s: step %" PRId64 " consumed window %" PRId64 " of epoch %" PRId64
                       " a second time, after step %d",
                       path, now, w, in, a->seen[w]);
        a->repeated += a->seen[w] != 0;
        if (!a->seen[w]) a->seen[w] = (int32_t)now;
        a->consumed++, a->samples++;
    }
    cJSON_Delete(json);
}

/* Reads OUT/samples.jsonl and prints what it shows, as one line of JSON; a window that is consumed twice or never is an
 * error. */
static void audit(const char *out) {
    char path[4096], *line = NULL;
    size_t room = 0;
    int64_t number = 0;
    Audit a = ZERO;
    snprintf(path, sizeof path, "%s/samples.jsonl", out);
    FILE *f = fopen(path, "r");
    if (!f) user_error("--audit: cannot read %s (%s): expected --out DIR of a run that trained", path, strerror(errno));
    while (getline(&line, &room, f) > 0) audit_line(&a, path, ++number, line);
    if (!a.steps) user_error("%s tells of no step", path);
    int64_t left = a.windows - (a.consumed - a.repeated);
    if (!left || (!a.pad && left < a.of_step)) audit_epoch(&a, path);
    printf("{\"file\":\"%s\",\"first_step\":%" PRId64 ",\"steps\":%" PRId64 ",\"samples\":%" PRId64
           ",\"windows\":%" PRId64 ",\"whole_epochs\":%" PRId64 ",\"dropped\":%" PRId64 ",\"last_epoch\":%" PRId64
           ",\"of_last_epoch\":%" PRId64 "}\n",
           path, a.from, a.steps, a.samples, a.windows, a.whole_epochs, a.dropped, a.epoch, a.consumed);
    fflush(stdout);
    fclose(f);
    free(line);
    free(a.seen);
}

#endif
