/* dataloader.h: the sampler that says which rank trains on which sample, and the workers that prefetch.
 *
 * Every epoch shuffles the windows of the data with a permutation that is computed on the fly, so the samples of any
 * step can be found without a table. A window is one sample, or several consecutive ones (token_files.h). Each step
 * takes the epoch's next GB samples (GB: the global batch), so layouts of equal GB train on the same samples. A mixture
 * has no epoch as a whole, but each of its sources has.
 * A caller may rely on this: neither a step nor the error about a bad sample depends on the number of workers.
 */
#ifndef DATALOADER_H
#define DATALOADER_H
#include "context_parallel.h" // defines: cp_select_halves
#include "lib/device/device.h"
#include "lib/io/token_files.h" // defines: Dataset, DataSource, dataset_sample

// ---------------------------------------------------------------------------
// the sampler. Like PyTorch's DistributedSampler it shuffles each epoch and deals the samples out to the ranks. But
// it deals out B consecutive samples at a time, where PyTorch's deals out single ones, and it advances the epoch itself

typedef struct {
    int64_t samples;      // in the data set
    uint64_t seed;        // of the shuffle
    int pad;              // --tail pad: the epoch's last step is filled up with its first samples; 0: it is dropped
    int shards, replicas; // data-parallel ranks: dp_shard × dp_replicate
    int shard, replica;   // this rank's coordinates among them
    int micro_batches, B; // micro-batches of this rank per step, samples per micro-batch
    int local;            // --accumulate local: a rank sums its micro-batches before ranks do
    int64_t start_step, start_epoch, start_sample; // where the run starts or resumes, counted from 0
    const Dataset *mixed; // the data set if it is a mixture, which as a whole has no epochs; NULL otherwise
    int pieces;           // consecutive samples of a window, which are trained on one after the other
} Sampler;

static int64_t sampler_global_batch(const Sampler *s) {
    return (int64_t)s->replicas * s->shards * s->micro_batches * s->B;
}

/* Hash of everything that all ranks must agree on. A rank with another shuffle would train on other ranks' samples. */
static uint64_t sampler_fingerprint(const Sampler *s) {
    const int64_t common[] = {
        s->samples, (int64_t)s->seed, s->pad,        s->shards,      s->replicas,     s->micro_batches,
        s->B,       s->local,         s->start_step, s->start_epoch, s->start_sample, s->pieces};
    uint64_t h = hash_bytes(HASH_START, common, sizeof common);
    if (!s->mixed) return h;
    for (int k = 0; k < s->mixed->num_sources; k++)
        h = hash_bytes(h, &s->mixed->sources[k].used, sizeof s->mixed->sources[k].used);
    return hash_bytes(h, s->mixed->mixture->source, (size_t)s->mixed->mixture->cycle);
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
    int64_t global_batch = sampler_global_batch(s), since_start = step - s->start_step;
    int64_t left = max_i64(0, s->samples - s->start_sample), steps_left = sampler_steps_in(s, left);
    if (s->mixed || since_start < steps_left) { // a mixture as a whole has no epochs
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

/* Window n of a mixture. Each source shuffles its own windows, in its own epochs. */
static int64_t mixture_window(const Sampler *s, int64_t n) {
    MixtureSample window = mixture_sample(s->mixed->mixture, n);
    const DataSource *source = &s->mixed->sources[window.source];
    int64_t index = source->used + window.index, epoch = index / source->windows;
    uint64_t seed = mix64(s->seed + (uint64_t)source->number + 1);
    return source->first_window + permute(index % source->windows, source->windows, mix64(seed + (uint64_t)epoch + 1));
}

/* Whether a step may contain a window twice: --tail pad repeats windows if a step is larger than the data; in a mixture
 * a source may end an epoch in the step and begin the next one with the same window. */
static int sampler_may_repeat(const Sampler *s, int64_t step) {
    int64_t epoch, global_batch = sampler_global_batch(s), first = sampler_position(s, step, &epoch);
    if (!s->mixed) return global_batch > s->samples;
    int ends_epoch = 0;
    int64_t first_window = first / s->pieces, end_window = blocks_of(first + global_batch, s->pieces);
    for (int k = 0; k < s->mixed->num_sources; k++) {
        int64_t windows = s->mixed->sources[k].windows;
        int64_t before = source_windows_used(s->mixed, k, first_window);
        int64_t after = source_windows_used(s->mixed, k, end_window);
        ends_epoch |= after > before && before / windows != (after - 1) / windows;
    }
    return ends_epoch;
}

/* Sample b of this rank's micro-batch in a step, as a number in the data set. The micro-batches of all ranks are
 * numbered by j: number j takes samples [j·B, (j + 1)·B) of the step. Neighbors are summed first: j runs over the shard
 * ranks, then the micro-batches of a rank, then the replicas; with --accumulate local over the micro-batches of a rank,
 * then the shard ranks, then the replicas. */
static int64_t sampler_sample(const Sampler *s, int64_t step, int micro_batch, int b) {
    int64_t j = ((int64_t)s->replica * s->micro_batches + micro_batch) * s->shards + s->shard;
    if (s->local) j = ((int64_t)s->replica * s->shards + s->shard) * s->micro_batches + micro_batch;
    int64_t epoch, position = sampler_position(s, step, &epoch) + j * s->B + b;
    int64_t window = position / s->pieces, piece = position % s->pieces, windows = s->samples / s->pieces;
    if (s->mixed) window = mixture_window(s, window);
    else window = permute(window % windows, windows, mix64(s->seed + (uint64_t)epoch + 1));
    return window * s->pieces + piece;
}

// ---------------------------------------------------------------------------
// the loader: worker threads read whole steps ahead; each takes the next sample that no other worker has claimed

enum { LOADER_DEPTH = 2 /* steps in memory */, LOADER_WORKERS = 4, LOADER_MAX_WORKERS = 64 };

/* One step's samples of this rank. */
typedef struct {
    int32_t *inputs, *targets; // (micro_batches, B, T / cp)
    int32_t *docs;             // (micro_batches, B, T) document of each token in its sample; NULL without --doc-mask
    int32_t *own_docs;         // (micro_batches, B, T / cp) the same for this rank's tokens; is `docs` if cp = 1
    int64_t *samples;          // (micro_batches, B) their numbers in the data set
    int64_t num_targets;       // positions whose target is not ignored
    uint64_t samples_hash;     // hash of their numbers, tokens and places in the batch
    int64_t unread;            // samples that no worker has finished yet
    int64_t bad;               // the first sample that cannot be trained on; valid when `error` is not empty
    char error[1024];
    DeviceEvent fed; // recorded when the device has copied the batch
} StepBatch;

typedef struct {
    struct Loader *loader;
    char *raw; // (sample_bytes) the worker's scratch space
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

/* Scratch space of a worker: the file's bytes of a sample and, with context parallelism, all its inputs and targets
 * (2, T). */
static size_t raw_bytes(int T) { return (size_t)round_up(5 * ((int64_t)T + 1), sizeof(int32_t)); }
static size_t sample_bytes(int T, int cp) { return raw_bytes(T) + (cp > 1 ? 2 * sizeof(int32_t) * T : 0); }

typedef struct Loader {
    const Dataset *data;
    Sampler sampler;
    LoaderOptions options;
    StepBatch ring[LOADER_DEPTH];
    int64_t samples;            // this rank's samples per step: micro_batches × B
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

/* Claims the next of this rank's samples and waits until its step has a buffer. Returns how many were claimed before;
 * -1: all are claimed, or the loader closes. */
static int64_t loader_claim(Loader *l) {
    pthread_mutex_lock(&l->lock);
    int64_t end = l->steps * l->samples;
    while (!l->stop && l->claimed < end && l->claimed / l->samples >= l->consumed + LOADER_DEPTH)
        pthread_cond_wait(&l->room, &l->lock);
    int64_t claim = l->stop || l->claimed >= end ? -1 : l->claimed++;
    if (claim >= 0 && claim % l->samples == 0) {
        StepBatch *batch = &l->ring[claim / l->samples % LOADER_DEPTH];
        batch->num_targets = 0;
        batch->samples_hash = 0;
        batch->unread = l->samples;
        batch->error[0] = 0;
    }
    pthread_mutex_unlock(&l->lock);
    return claim;
}

/* Reads a sample of the data set to place i of the batch, of which context-parallel rank cp_rank gets its tokens, and
 * adds it to the batch's samples_hash. Returns the number of targets, or -1 and a message in `error`. */
static int read_sample(const Dataset *data, int cp, int cp_rank, StepBatch *batch, int64_t i, int64_t sample,
                       char *raw /* (sample_bytes) */, char *error /* as batch->error */) {
    int T = data->T, own = T / cp;
    int32_t *inputs = batch->inputs + i * own, *targets = batch->targets + i * own;
    int32_t *all_inputs = inputs, *all_targets = targets;
    if (cp > 1) {
        all_inputs = (int32_t *)(void *)(raw + raw_bytes(T));
        all_targets = all_inputs + T;
    }
    int32_t *docs = batch->docs ? batch->docs + i * T : NULL;
    int num_targets = dataset_sample(data, sample, all_inputs, all_targets, docs, raw, error, sizeof batch->error);
    uint64_t h = hash_bytes(mix64((uint64_t)i + 1) ^ (uint64_t)sample, all_inputs, sizeof(int32_t) * (size_t)T);
    __atomic_fetch_add(&batch->samples_hash, mix64(h), __ATOMIC_RELAXED); // a sum: workers may read in any order
    if (cp == 1) return num_targets;
    if (docs) cp_select_halves(batch->own_docs + i * own, docs, T, cp, cp_rank);
    cp_select_halves(inputs, all_inputs, T, cp, cp_rank);
    cp_select_halves(targets, all_targets, T, cp, cp_rank);
    return num_targets;
}

/* Reads a claimed sample. Workers may complete steps in any order, but the loader hands them out in sequence. A bad
 * sample does not stop its step from being read, so that the error always names the first bad sample of the step. */
static void loader_read(Loader *l, int64_t claim, char *raw) {
    int64_t step = claim / l->samples, i = claim % l->samples;
    int B = l->sampler.B;
    StepBatch *batch = &l->ring[step % LOADER_DEPTH];
    char error[sizeof batch->error] = "";
    double start = seconds_now();
    int64_t sample = sampler_sample(&l->sampler, l->options.first_step + step, (int)(i / B), (int)(i % B));
    int num_targets = read_sample(l->data, l->options.cp, l->options.cp_rank, batch, i, sample, raw, error);
    double seconds = seconds_now() - start;

    pthread_mutex_lock(&l->lock);
    l->read_seconds += seconds;
    if (num_targets < 0 && (!batch->error[0] || i < batch->bad)) {
        batch->bad = i;
        memcpy(batch->error, error, sizeof error);
    }
    batch->samples[i] = sample;
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
        int64_t claim = loader_claim(w->loader);
        if (claim < 0) return NULL;
        loader_read(w->loader, claim, w->raw);
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

/* Starts the workers. In a dry run the buffers are counted and nothing is read. */
static void loader_open(Loader *l, Device *dev, const Dataset *data, const Sampler *sampler, const LoaderOptions *o) {
    memset(l, 0, sizeof *l);
    l->data = data;
    l->sampler = *sampler;
    l->options = *o;
    l->samples = (int64_t)sampler->micro_batches * sampler->B;
    l->steps = o->end_step - o->first_step;
    l->num_workers = o->workers ? o->workers : (int)max_i64(1, min_i64(LOADER_WORKERS, o->cores));
    l->opened_at = seconds_now();
    for (int i = 0; i < LOADER_DEPTH; i++) {
        step_batch_open(&l->ring[i], dev, l->samples, o->T, o->cp, o->document_ids);
        l->ring[i].samples = arena_array(int64_t, dev, MEM_HOST, "sample numbers", l->samples);
    }
    // LOADER_WORKERS even if the machine has fewer cores, so that a plan does not depend on the machine that makes it
    for (int i = 0; i < (o->workers ? o->workers : LOADER_WORKERS); i++) {
        l->workers[i].loader = l;
        l->workers[i].raw = (char *)arena_alloc(dev, MEM_HOST, "raw window", sample_bytes(o->T, o->cp));
    }
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

static void loader_close(Loader *l, Device *dev) { // ends the workers; what they have read stays
    if (dev->dry_run || l->stop) return; // threads can be joined only once
    pthread_mutex_lock(&l->lock);
    l->stop = 1;
    pthread_cond_broadcast(&l->room);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < l->num_workers; i++) pthread_join(l->workers[i].thread, NULL);
}

#endif
