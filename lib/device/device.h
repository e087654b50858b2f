/* device.h: the device of one rank: copies, streams, and named buffers in arenas.
 *
 * Every buffer comes from arena_alloc with a name and a category. Every op calls op_begin with its FLOPs and bytes, and
 * computes only if that returns 1. A dry-run device runs the same code, counts the same things and touches no memory,
 * so the memory, FLOPs and communication of any rank are known before anything is allocated. All arenas but MEM_HOST
 * may be memory of a GPU: the host reads and writes them with device_read, device_write, device_copy and device_zero
 * only.
 */
#ifndef DEVICE_H
#define DEVICE_H
#include "recorder.h" // defines: op_begin, op_end, device_phase, memory_event

// ---------------------------------------------------------------------------
// copies and streams, built on the functions that device_cpu.h and device_cuda.h define

/* Copies within the device's memory. */
static inline void device_copy(Device *dev, void *to, const void *from, size_t bytes) {
    copy_bytes(dev, to, from, bytes, 0);
}

/* Copies from the device to the host; returns when the data is there. */
static inline void device_read(Device *dev, void *to, const void *from, size_t bytes) {
    copy_bytes(dev, to, from, bytes, 1);
}

/* Copies from the host to the device; the host may reuse its memory at once. */
static inline void device_write(Device *dev, void *to, const void *from, size_t bytes) {
    copy_bytes(dev, to, from, bytes, 1);
}

/* Copies from MEM_HOST to the device; the source must not change until the next device_read or device_synchronize. */
static inline void device_feed(Device *dev, void *to, const void *from, size_t bytes) {
    copy_bytes(dev, to, from, bytes, 0);
}

/* An event for everything given to stream `of` so far. */
static inline DeviceEvent device_stream_event(Device *dev, StreamKind of) {
    StreamKind before = device_set_stream(dev, of);
    device_record_event(dev, &dev->order[of]);
    device_set_stream(dev, before);
    return dev->order[of];
}

/* What is given to `later` from now on waits for everything given to `earlier` so far. */
static inline void device_wait_stream(Device *dev, StreamKind later, StreamKind earlier) {
    DeviceEvent event = device_stream_event(dev, earlier);
    StreamKind before = device_set_stream(dev, later);
    device_wait_event(dev, event);
    device_set_stream(dev, before);
}

// ---------------------------------------------------------------------------
// opening and closing

/* Bytes that a rank needs, by its dry run: of the device, and of pinned memory of the host, which only a GPU needs. */
static inline size_t device_need(const Device *dry_run) {
    return device_peak(dry_run) - (CUDA_BUILD ? dry_run->arenas[MEM_HOST].peak : 0);
}
static inline size_t pinned_need(const Device *dry_run) {
    return CUDA_BUILD ? device_arenas(dry_run, 1) + dry_run->arenas[MEM_HOST].peak : 0;
}

/* Bytes of the device's memory that are free. */
static inline double device_memory(int gpu) {
    double total;
    return device_memory_with_total(gpu, &total);
}

/* A dry-run device hands out addresses that are never mapped. Bit c of `offloaded`: category c is to be offloaded. */
static inline void device_open_dry_run(Device *dev, int threads, unsigned offloaded) {
    memset(dev, 0, sizeof *dev);
    dev->dry_run = 1;
    dev->on.threads = threads;
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        dev->arenas[c].offloaded = offloaded >> c & 1;
        dev->arenas[c].base = (char *)((uintptr_t)(c + 1) << 50);
        dev->arenas[c].reserved = (size_t)1 << 50;
    }
}

/* The arenas of weights and of the optimizer's state, which outlive the device of a recipe's period. */
typedef struct {
    Arena params, optimizer;
} StateArenas;

/* Takes these arenas from a device that is about to be closed. */
static inline StateArenas device_take_state(Device *dev) {
    StateArenas taken = {dev->arenas[MEM_PARAMS], dev->arenas[MEM_OPTIMIZER]};
    dev->arenas[MEM_PARAMS].base = dev->arenas[MEM_OPTIMIZER].base = NULL;
    return taken;
}

/* Opens a real device with the options and the memory of its dry run. Files of offloaded arenas are under `out`.
 * `state`: arenas that it takes over, whose buffers will lie where they lay before; NULL: none. */
static inline void device_open(Device *dev, const Device *dry_run, const char *out, int rank,
                               const StateArenas *state) {
    memset(dev, 0, sizeof *dev);
    dev->gpu = dry_run->gpu;
    dev->by_nccl = dry_run->by_nccl;
    dev->reductions_apart = dry_run->reductions_apart;
    dev->streams_used = dry_run->streams_used;
    dev->on.threads = dry_run->on.threads;
    dev->on.deterministic = dry_run->on.deterministic;
    dev->rec.max_events = dry_run->rec.max_events;
    device_attach(dev);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        Arena *a = &dev->arenas[c];
        a->offloaded = dry_run->arenas[c].offloaded;
        a->reserved = (size_t)round_up((int64_t)dry_run->arenas[c].peak, 4096);
        if (!a->reserved) continue;
        const Arena *taken = NULL;
        if (state && c == MEM_PARAMS) taken = &state->params;
        if (state && c == MEM_OPTIMIZER) taken = &state->optimizer;
        if (taken && taken->reserved != a->reserved)
            run_failure("memory: %s of the next period would have %zu bytes, those of this period have %zu",
                        mem_category_names[c], a->reserved, taken->reserved);
        if (taken) a->base = taken->base;
        else a->base = (char *)memory_open(dev, (MemCategory)c, a->reserved, device_need(dry_run), out, rank);
    }
}

/* The host waits for all streams. */
static inline void device_synchronize_all(Device *dev) {
    StreamKind before = dev->current_stream;
    for (int i = 0; i < STREAMS; i++) {
        if (!(dev->streams_used >> i & 1)) continue;
        device_set_stream(dev, (StreamKind)i);
        device_synchronize(dev);
    }
    device_set_stream(dev, before);
}

static inline void device_close(Device *dev) {
    if (!dev->dry_run) {
        device_synchronize_all(dev);
        for (int c = 0; c < MEM_CATEGORIES; c++)
            if (dev->arenas[c].base) memory_close(dev, (MemCategory)c, &dev->arenas[c]);
        device_detach(dev);
    }
    memset(dev->arenas, 0, sizeof dev->arenas);
}

// ---------------------------------------------------------------------------
// buffers

#ifdef CUDA_ON_CPU // a red zone after each buffer finds accesses past its end; released memory is poisoned
enum { RED_ZONE = 256 };
static inline void mark_buffer(Device *dev, MemCategory category, char *end) {
    if (!dev->dry_run && category != MEM_HOST) cuda_on_cpu_red_zone(end, RED_ZONE, dev->on.stream);
}
static inline void mark_free(Device *dev, MemCategory category, char *from, size_t bytes) {
    if (dev->dry_run || category == MEM_HOST || !bytes) return;
    cuda_on_cpu_forget_zones(from, bytes, dev->on.stream);
    cuda_on_cpu_poison(from, bytes, dev->on.stream);
}
#else
enum { RED_ZONE = 0 };
#define mark_buffer(dev, category, end) ((void)0)
#define mark_free(dev, category, from, bytes) ((void)0)
#endif

/* Is this address in memory that ops compute with? On a CPU build ops reach all memory, and only arenas but MEM_HOST
 * count. */
static inline int is_of_device(const Device *dev, const void *p) {
    for (int c = 0; c < MEM_HOST; c++) {
        const Arena *a = &dev->arenas[c];
        if ((const char *)p >= a->base && (const char *)p < a->base + a->reserved) return 1;
    }
    return 0;
}

/* A buffer of `bytes` bytes, aligned to 256 bytes, zero when first allocated. Lives until arena_release. */
static inline void *arena_alloc(Device *dev, MemCategory category, const char *name, size_t bytes) {
    Arena *a = &dev->arenas[category];
    size_t size = (size_t)round_up((int64_t)bytes, 256) + RED_ZONE;
    if (dev->dry_run && a->used + size > a->reserved)
        user_error("a rank needs more than %zu TB of memory for %s alone: use more ranks, a smaller --batch or --seq, "
                   "or a smaller model",
                   a->reserved >> 40, mem_category_names[category]);
    if (a->used + size > a->reserved)
        run_failure("memory: buffer '%s' of %zu bytes does not fit into the %zu bytes that the dry run found for %s",
                    name, bytes, a->reserved, mem_category_names[category]);
    void *p = a->base + a->used;
    a->used += size;
    if (a->used > a->peak) a->peak = a->used;
    mark_buffer(dev, category, a->base + a->used - RED_ZONE);
    record_buffer(dev, category, name, size);
    return p;
}

/* arena_alloc of an array of `count` elements. */
#define arena_array(type, dev, category, name, count)                                                                  \
    ((type *)arena_alloc(dev, category, name, sizeof(type) * (size_t)(count)))

/* arena_release frees everything that was allocated since the arena_mark of that category. */
static inline size_t arena_mark(const Device *dev, MemCategory category) { return dev->arenas[category].used; }
static inline void arena_release(Device *dev, MemCategory category, size_t mark) {
    mark_free(dev, category, dev->arenas[category].base + mark, dev->arenas[category].used - mark);
    dev->arenas[category].used = mark;
    memory_event(dev, mem_category_names[category], mark);
}

/* Memory that an op needs while it runs; the op frees it with arena_release(dev, MEM_WORKSPACE, mark). */
static inline void *scratch(Device *dev, const char *name, size_t bytes) {
    return arena_alloc(dev, MEM_WORKSPACE, name, bytes);
}

// ---------------------------------------------------------------------------
// pools of buffers, each of which serves one unit after the other

static inline void pool_add(Device *dev, BufferPool *pool, int kind, size_t bytes, const char *name) {
    PoolBuffer *b = &pool->buffers[pool->count++];
    b->kind = kind;
    b->memory = arena_alloc(dev, MEM_COMM, name, bytes);
}

/* A free buffer for units of that kind; NULL: all are taken. */
static inline PoolBuffer *pool_find(BufferPool *pool, int kind) {
    for (int i = 0; i < pool->count; i++)
        if (pool->buffers[i].kind == kind && !pool->buffers[i].taken) return &pool->buffers[i];
    return NULL;
}

/* Gives a buffer back to its pool. Does nothing if `memory` is not the pool's, such as NULL. */
static inline void pool_release(Device *dev, BufferPool *pool, const void *memory) {
    for (int i = 0; i < pool->count; i++) {
        if (pool->buffers[i].memory != memory) continue;
        pool_use(dev, pool->contents, -(int64_t)pool->buffers[i].taken);
        pool->buffers[i].taken = 0;
        device_record_event(dev, &pool->buffers[i].freed);
    }
}

#endif
