/* device.h: the device of one rank: named buffers in arenas, the ledger of ops, and the timeline.
 *
 * Every buffer comes from arena_alloc with a name and a category. Every op calls op_begin with its FLOPs and bytes, and
 * computes only if that returns 1. A dry-run device runs the same code, counts the same things and touches no memory,
 * so the memory, FLOPs and communication of any rank are known before anything is allocated. All arenas but MEM_HOST
 * may be memory of a GPU: the host reads and writes them with device_read, device_write, device_copy and device_zero
 * only.
 */
#ifndef DEVICE_H
#define DEVICE_H
#ifdef USE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif

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

/* From the host to the device; the host may reuse its memory at once. */
static inline void device_write(Device *dev, void *to, const void *from, size_t bytes) {
    copy_bytes(dev, to, from, bytes, 1);
}

/* From MEM_HOST to the device; the source must not change until the next device_read or device_synchronize. */
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
// the timeline

static inline void event_add(Device *dev, EventKind kind, int lane, const char *name, const char *of, double start,
                             double end, double amount) {
    if (dev->events && dev->num_events < dev->max_events) {
        Event e = {name, of, start, end, amount, (int)kind, lane};
        dev->events[dev->num_events] = e;
    }
    dev->num_events++;
}

/* Sets the counter `name` of the timeline to `bytes`, at the host's time. Without a timeline it reads no clock. */
static inline void memory_event(Device *dev, const char *name, size_t bytes) {
    if (!dev->dry_run && !dev->max_events) return;
    double now = device_now(dev);
    event_add(dev, EVENT_MEMORY, STREAM_COMPUTE, name, NULL, now, now, (double)bytes);
}

/* Writes all counters of memory, so that the timeline of a step begins with their values. */
static inline void memory_events(Device *dev) {
    for (int c = 0; c < MEM_CATEGORIES; c++) memory_event(dev, mem_category_names[c], dev->arenas[c].used);
    for (int p = 0; p < POOLS; p++) memory_event(dev, pool_names[p], dev->in_use[p]);
}

/* Adds `bytes`, which may be negative, to the bytes of a pool that are in use. */
static inline void pool_use(Device *dev, PoolKind pool, int64_t bytes) {
    dev->in_use[pool] += (size_t)bytes;
    memory_event(dev, pool_names[pool], dev->in_use[pool]);
}

/* Something begins on the current stream. A GPU's own time is measured, unless it is something that the host does. */
static inline Span span_begin(Device *dev, EventKind kind, int lane, const char *name, const char *of, double amount,
                              int on_host) {
    Span s = {device_now(dev), dev->num_events, NULL};
    if (!dev->dry_run && !on_host) record_time(dev, &s.begun);
    event_add(dev, kind, lane, name, of, s.start, s.start, amount); // now, so that it precedes what it contains
    return s;
}

/* It ends on the current stream. Its duration is added to *seconds unless that is NULL; for line and number see
 * OpenSpan. */
static inline void span_end(Device *dev, Span s, double *seconds, int line, int64_t number) {
    if (s.begun) {
        OpenSpan o = {s, NULL, seconds, line, number};
        record_time(dev, &o.ended);
        span_add_open(dev, &o);
        return;
    }
    double now = device_now(dev);
    if (dev->events && s.event < dev->max_events) dev->events[s.event].end = now;
    if (seconds) *seconds += now - s.start;
}

/* The timeline's lane for the current stream. On a CPU all streams are one. */
static inline int stream_lane(const Device *dev) {
    int has_streams = CUDA_BUILD;
    if (dev->dry_run) has_streams = dev->times && dev->times->has_streams;
    return has_streams ? (int)dev->current_stream : (int)STREAM_COMPUTE;
}

/* Are ops timed? On a GPU only for a timeline. */
static inline int is_timed(const Device *dev) { return !CUDA_BUILD || dev->dry_run || dev->max_events; }

/* A phase, for example the forward of a unit, lasts until the next one begins; name NULL: only ends the last one. */
static inline void device_phase(Device *dev, const char *name, const char *of) {
    if (dev->in_phase) span_end(dev, dev->phase, NULL, -1, 0);
    if (name) device_pace(dev);
    dev->in_phase = name && is_timed(dev);
    if (dev->in_phase) dev->phase = span_begin(dev, EVENT_PHASE, STREAM_COMPUTE, name, of, 0, 0);
    dev->phase_name = name;
    dev->phase_of = of;
}

// ---------------------------------------------------------------------------
// the ledger of ops

/* Every op starts with this: counts its FLOPs and its bytes (read + written). Returns 0 in a dry run: do not
 * compute. */
static inline int op_begin(Device *dev, OpKind op, double flops, double bytes) {
    OpStat *stat = &dev->ops[op];
    stat->calls++;
    stat->flops += flops;
    stat->bytes += bytes;
    if (dev->recomputing) stat->recomputed += flops;
    if (dev->dry_run) {
        double start = dev->clock, seconds = dev->times ? dev->times->seconds(dev->times, op, flops, bytes) : 0;
        if (stream_lane(dev) == STREAM_COMPUTE) dev->clock += seconds;
        stat->seconds += seconds;
        if (dev->points) dev->points->compute[dev->current_stream] += seconds;
        event_add(dev, EVENT_OP, stream_lane(dev), op_names[op], NULL, start, start + seconds, flops);
        return 0;
    }
    dev->op = op;
    if (is_timed(dev)) dev->op_span = span_begin(dev, EVENT_OP, stream_lane(dev), op_names[op], NULL, flops, 0);
    if (dev->activity) {
        dev->activity->op = op;
        dev->activity->since = is_timed(dev) ? dev->op_span.start : seconds_now();
        dev->activity->running = 1;
    }
    return 1;
}

static inline void op_end(Device *dev) {
    if (is_timed(dev)) span_end(dev, dev->op_span, &dev->ops[dev->op].seconds, -1, 0);
    if (dev->blocking) device_synchronize(dev);
    if (dev->activity) {
        dev->activity->running = 0;
        dev->activity->since = seconds_now();
    }
    if (dev->poll) dev->poll(dev->poll_arg);
}

/* FLOPs of linear layers and attention, the basis of MFU: those that recompute activations, or all others. */
static inline double device_flops(const Device *dev, int recomputed) {
    static const OpKind counted[] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_INPUT, OP_LINEAR_BACKWARD_WEIGHT,
                                     OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
    double sum = 0;
    for (int i = 0; i < 5; i++) {
        const OpStat *stat = &dev->ops[counted[i]];
        sum += recomputed ? stat->recomputed : stat->flops - stat->recomputed;
    }
    return sum;
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

/* A dry-run device hands out addresses that are never mapped. Bit c of `offloaded`: category c is to be offloaded. */
static inline void device_open_dry_run(Device *dev, int threads, unsigned offloaded) {
    memset(dev, 0, sizeof *dev);
    dev->dry_run = 1;
    dev->threads = threads;
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

/* Takes them from a device that is about to be closed. */
static inline StateArenas device_take_state(Device *dev) {
    StateArenas taken = {dev->arenas[MEM_PARAMS], dev->arenas[MEM_OPTIMIZER]};
    dev->arenas[MEM_PARAMS].base = dev->arenas[MEM_OPTIMIZER].base = NULL;
    return taken;
}

/* Opens a real device with the options and the memory of its dry run. Files of offloaded arenas are under `out`.
 * `state`: arenas that it takes over, whose buffers will lie where they lay before; NULL: none. */
static inline void device_open_with_state(Device *dev, const Device *dry_run, const char *out, int rank,
                                          const StateArenas *state) {
    memset(dev, 0, sizeof *dev);
    dev->gpu = dry_run->gpu;
    dev->by_nccl = dry_run->by_nccl;
    dev->reductions_apart = dry_run->reductions_apart;
    dev->streams_used = dry_run->streams_used;
    dev->threads = dry_run->threads;
    dev->deterministic = dry_run->deterministic;
    dev->max_events = dry_run->max_events;
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
            run_failure("memory: %s of the next stage would have %zu bytes, those of this stage have %zu",
                        mem_category_names[c], a->reserved, taken->reserved);
        if (taken) a->base = taken->base;
        else a->base = (char *)memory_open(dev, (MemCategory)c, a->reserved, device_need(dry_run), out, rank);
    }
}

static inline void device_open(Device *dev, const Device *dry_run, const char *out, int rank) {
    device_open_with_state(dev, dry_run, out, rank, NULL);
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
    if (!dev->dry_run && category != MEM_HOST) cuda_on_cpu_red_zone(end, RED_ZONE, dev->stream);
}
static inline void mark_free(Device *dev, MemCategory category, char *from, size_t bytes) {
    if (dev->dry_run || category == MEM_HOST || !bytes) return;
    cuda_on_cpu_forget_zones(from, bytes, dev->stream);
    cuda_on_cpu_poison(from, bytes, dev->stream);
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

/* Adds to the list of buffers that --plan and memory reports print. */
static inline void buffer_count(Device *dev, MemCategory category, const char *name, size_t size) {
    int i = 0;
    while (i < dev->num_buffers && (dev->buffers[i].category != category || strcmp(dev->buffers[i].name, name))) i++;
    if (i == MAX_BUFFERS) run_failure("memory: more than %d kinds of buffers", MAX_BUFFERS);
    Buffer *b = &dev->buffers[i];
    if (i == dev->num_buffers) {
        Buffer first = {name, category, 0, 0};
        *b = first;
        dev->num_buffers++;
    }
    b->bytes = (size_t)max_i64((int64_t)b->bytes, (int64_t)size);
    b->count++;
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
    buffer_count(dev, category, name, size);
    void *p = a->base + a->used;
    a->used += size;
    memory_event(dev, mem_category_names[category], a->used);
    mark_buffer(dev, category, a->base + a->used - RED_ZONE);
    if (a->used > a->peak) a->peak = a->used;
    size_t now = 0;
    for (int c = 0; c < MEM_CATEGORIES; c++) now += dev->arenas[c].offloaded ? 0 : dev->arenas[c].used;
    if (now > dev->peak) {
        dev->peak = now;
        snprintf(dev->peak_when, sizeof dev->peak_when, "%s%s%s: %s", dev->phase_name ? dev->phase_name : "start-up",
                 dev->phase_of ? " of " : "", dev->phase_of ? dev->phase_of : "", name);
    }
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

#endif
