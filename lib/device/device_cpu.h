/* device_cpu.h: the CPU as a device: memory, offloading to files, copies. Streams and events are empty here, because an
 * op or a copy is complete when its function returns. device_cuda.h has the same functions for a GPU.
 */
#ifndef DEVICE_CPU_H
#define DEVICE_CPU_H
#include "device_types.h"
#include <signal.h>

#define DEVICE_NAME "this host"
#define OFFLOAD_PLACE "in files"
#define OFFLOAD_HELP "in files under --out that are mapped into memory"
enum { OFFLOAD_IN_PLACE = 1 }; // ops read and write offloaded buffers directly: a mapped file is memory like any other

// ---------------------------------------------------------------------------
// memory

static inline void device_prepare_process(int shares_work) { (void)shares_work; }
static inline int device_count(void) { return 1; }
static inline int device_count_or_none(void) { return 1; }

/* The device of the `local`-th rank of this host. */
static inline int device_of(int local) {
    (void)local;
    return 0;
}

/* The name of a GPU's model; "": the device is a CPU. */
static inline void device_model(int gpu, char *name, size_t size) {
    (void)gpu;
    snprintf(name, size, "%s", "");
}

/* Bytes of memory, at most what the container allows. Other processes do not count: what they hold may be cache, which
 * the system gives up. So all of it is free. */
static inline double device_memory_with_total(int gpu, double *total) {
    (void)gpu;
    *total = fmin((double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE), container_limits().memory);
    return *total;
}

static inline double pinned_memory(void) { return INFINITY; }

static inline void device_attach(Device *dev) { (void)dev; }
static inline void device_detach(Device *dev) { (void)dev; }

/* Memory for an arena, set to zero. Pages become resident when first used. An offloaded arena is a new file
 * OUT/offload-RANK-CATEGORY that is mapped into memory. It is unlinked at once, so that nothing is left behind however
 * the run ends. */
static inline void *memory_open(Device *dev, MemCategory category, size_t bytes, size_t rank_needs, const char *out,
                                int rank) {
    (void)rank_needs;
    if (!dev->arenas[category].offloaded) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            user_error("cannot reserve %zu bytes of memory for %s (%s): use more ranks, a smaller --batch or --seq, or "
                       "a smaller model",
                       bytes, mem_category_names[category], strerror(errno));
        if (bytes >= (8u << 20)) madvise(p, bytes, MADV_HUGEPAGE);
        return p;
    }
    char path[4096];
    snprintf(path, sizeof path, "%s/offload-%d-%s", out, rank, mem_category_names[category]);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        user_error("cannot create %s for --offload (%s): give an --out that is writable", path, strerror(errno));
    unlink(path);
    int error = reserve_file(fd, 0, (int64_t)bytes);
    if (error)
        user_error("cannot reserve %zu bytes for %s under --out (%s): --offload needs that much free disk space", bytes,
                   path, strerror(error));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        user_error("cannot map %zu bytes of %s (%s): use more ranks or a smaller model", bytes, path, strerror(errno));
    return p;
}

static inline void memory_close(Device *dev, MemCategory category, Arena *a) {
    (void)dev;
    (void)category;
    munmap(a->base, a->reserved);
}

// ---------------------------------------------------------------------------
// copies; in a dry run they do nothing

/* On a GPU the host waits before and after the copy if `wait` is set. */
static inline void copy_bytes(Device *dev, void *to, const void *from, size_t bytes, int wait) {
    (void)wait;
    if (!dev->dry_run && bytes) memcpy(to, from, bytes);
}

/* `rows` rows of `bytes` bytes, whose starts are a stride apart; strides in bytes. */
static inline void device_copy_rows(Device *dev, void *to, size_t to_stride, const void *from, size_t from_stride,
                                    size_t bytes, int rows) {
    for (int i = 0; i < rows && !dev->dry_run; i++)
        memcpy((char *)to + (size_t)i * to_stride, (const char *)from + (size_t)i * from_stride, bytes);
}

static inline void device_zero(Device *dev, void *p, size_t bytes) {
    if (!dev->dry_run && bytes) memset(p, 0, bytes);
}

// ---------------------------------------------------------------------------
// streams and events, in PyTorch's words

/* Ops and copies go to stream `to` from here on. Returns the stream that was current. */
static inline StreamKind device_set_stream(Device *dev, StreamKind to) {
    StreamKind before = dev->current_stream;
    dev->current_stream = to;
    return before;
}

/* The host waits for the current stream. */
static inline void device_synchronize(Device *dev) { (void)dev; }

/* Records how far the current stream has come. On a GPU the event is created when *event is NULL, and also streams of
 * other ranks in this process may wait for it. */
static inline void device_record_event(Device *dev, DeviceEvent *event) {
    StreamRecorder *r = dev->rec.stream_recorder;
    if (!r) return;
    *event = (DeviceEvent)(uintptr_t)++r->events;
    r->point(r, dev->current_stream, r->events, 0);
}

/* The current stream waits for an event; one that was never recorded (NULL) has happened. */
static inline void device_wait_event(Device *dev, DeviceEvent event) {
    StreamRecorder *r = dev->rec.stream_recorder;
    if (r && event) r->point(r, dev->current_stream, (int32_t)(uintptr_t)event, 1);
}

/* The host waits for an event. */
static inline void device_synchronize_event(DeviceEvent event) { (void)event; }

static inline void device_destroy_event(DeviceEvent event) { (void)event; }

// ---------------------------------------------------------------------------
// offloaded buffers

/* Asks the system to read a buffer ahead from its file, or to drop its pages from memory; the file keeps them. */
static inline void offload_advise(Device *dev, MemCategory category, const void *from, size_t bytes, int read_ahead) {
    if (dev->dry_run || !dev->arenas[category].offloaded) return;
    const uintptr_t page = 4096;
    uintptr_t begin = ((uintptr_t)from + (read_ahead ? 0 : page - 1)) / page * page;
    uintptr_t end = ((uintptr_t)from + bytes + (read_ahead ? page - 1 : 0)) / page * page;
    if (end > begin) madvise((void *)begin, end - begin, read_ahead ? MADV_WILLNEED : MADV_DONTNEED);
}

/* Fetches an offloaded buffer before ops use it. Returns where they find it: in `near`, or in its home. */
static inline void *offload_fetch(Device *dev, MemCategory category, void *home, void *near, size_t bytes) {
    (void)near;
    offload_advise(dev, category, home, bytes, 1);
    return home;
}

/* Stores an offloaded buffer after ops have used it, if they have `written` it. */
static inline void offload_store(Device *dev, MemCategory category, void *home, const void *near, size_t bytes,
                                 int written) {
    (void)near;
    (void)written;
    offload_advise(dev, category, home, bytes, 0);
}

// ---------------------------------------------------------------------------
// time

/* Keeps the host from running far ahead of its GPU. */
static inline void device_pace(Device *dev) { (void)dev; }

/* On a GPU: records the time at which the current stream comes here; adds a span whose time is known once the GPU has
 * come to its end. */
static inline void record_time(Device *dev, DeviceEvent *event) {
    (void)dev;
    (void)event;
}
static inline void span_add_open(Device *dev, const OpenSpan *o) {
    (void)dev;
    (void)o;
}

/* Forgets the timeline's entries from number `event` on. */
static inline void timeline_truncate(Device *dev, int64_t event) { dev->rec.num_events = event; }

// ---------------------------------------------------------------------------
// threads

static inline void *wait_for_lock(void *lock) {
    pthread_mutex_lock((pthread_mutex_t *)lock);
    pthread_mutex_unlock((pthread_mutex_t *)lock);
    return NULL;
}

/* Refuses more threads than this account may start. OpenMP's library would end the process without naming an option. */
static inline void require_threads(int count) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // all threads exist until it is unlocked
    pthread_t *threads = new_array(pthread_t, count);
    int started = 1, failed = 0; // the first is the calling one
    pthread_mutex_lock(&lock);
    while (started < count && !failed) {
        failed = pthread_create(&threads[started], NULL, wait_for_lock, &lock);
        started += !failed;
    }
    pthread_mutex_unlock(&lock);
    for (int i = 1; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
    if (failed)
        user_error("only %d of the %d threads that a rank computes with could be started: use a smaller --threads, or "
                   "raise this account's limit of threads (ulimit -u) or the container's (pids.max)",
                   started, count);
}

/* Starts the threads that this rank computes with. oneDNN's matmuls let the stack pointer point into a buffer on the
 * heap for a while, so that the handler of a signal would overwrite what lies below that buffer. So handlers have a
 * stack of their own in the thread that calls oneDNN, and its OpenMP threads, which start here, take no signals. */
static inline void device_prepare_threads(int threads) {
    enum { BYTES = 1 << 16 };
    static __thread int has_stack;
    stack_t own = ZERO;
    sigset_t all, before;
    int started = 0;
    require_threads(threads);
    if (has_stack) return;
    has_stack = 1;
    own.ss_sp = checked_malloc(BYTES); // until the thread ends
    own.ss_size = BYTES;
    if (sigaltstack(&own, NULL)) run_failure("no stack could be set for the handlers of signals: %s", strerror(errno));
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
#pragma omp parallel num_threads(threads) reduction(+ : started)
    started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)started;
}

#endif
