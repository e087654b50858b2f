/* recorder.h: what a device records: ops (the ledger), buffers, and the timeline. Ops call op_begin and op_end; a step
 * calls step_begin and, where a part of it begins, device_phase. A dry run counts the same, with estimated times.
 * op_end also lets collectives progress, and device_phase keeps the host from running too far ahead of a GPU.
 */
#ifndef RECORDER_H
#define RECORDER_H
#ifdef USE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif

// ---------------------------------------------------------------------------
// the timeline, and the memory in use

static inline void event_add(Device *dev, EventKind kind, int lane, const char *name, const char *of, double start,
                             double end, double amount) {
    Recorder *rec = &dev->rec;
    Event e = {name, of, start, end, amount, (int)kind, lane};
    if (rec->events && rec->num_events < rec->max_events) rec->events[rec->num_events] = e;
    rec->num_events++;
}

/* Sets the counter `name` of the timeline to `bytes`; without a timeline it does nothing. */
static inline void memory_event(Device *dev, const char *name, size_t bytes) {
    if (!dev->dry_run && !dev->rec.max_events) return;
    double now = device_now(dev);
    event_add(dev, EVENT_MEMORY, STREAM_COMPUTE, name, NULL, now, now, (double)bytes);
}

/* Adds `bytes`, which may be negative, to the bytes of a pool that are in use. */
static inline void pool_use(Device *dev, PoolKind pool, int64_t bytes) {
    dev->rec.in_use[pool] += (size_t)bytes;
    memory_event(dev, pool_names[pool], dev->rec.in_use[pool]);
}

/* Counts a buffer of `size` bytes that was just allocated: in the list that plans and memory reports print, in the
 * timeline, and in the largest sum of all arenas so far. */
static inline void record_buffer(Device *dev, MemCategory category, const char *name, size_t size) {
    Recorder *rec = &dev->rec;
    size_t in_use = 0;
    int i = 0;
    while (i < rec->num_buffers && (rec->buffers[i].category != category || strcmp(rec->buffers[i].name, name))) i++;
    if (i == MAX_BUFFERS) run_failure("memory: more than %d kinds of buffers", MAX_BUFFERS);
    Buffer *b = &rec->buffers[i];
    if (i == rec->num_buffers) rec->num_buffers++;
    b->name = name;
    b->category = category;
    b->bytes = (size_t)max_i64((int64_t)b->bytes, (int64_t)size);
    b->count++;
    memory_event(dev, mem_category_names[category], dev->arenas[category].used);
    for (int c = 0; c < MEM_CATEGORIES; c++) in_use += dev->arenas[c].offloaded ? 0 : dev->arenas[c].used;
    if (in_use <= rec->peak) return;
    rec->peak = in_use;
    snprintf(rec->peak_when, sizeof rec->peak_when, "%s%s%s: %s", rec->phase_name ? rec->phase_name : "start-up",
             rec->phase_of ? " of " : "", rec->phase_of ? rec->phase_of : "", name);
}

/* Something begins on the current stream. A GPU measures it by its own clock; with `on_host` the host's counts. */
static inline Span span_begin(Device *dev, EventKind kind, int lane, const char *name, const char *of, double amount,
                              int on_host) {
    Span s = {device_now(dev), dev->rec.num_events, NULL};
    if (!dev->dry_run && !on_host) record_time(dev, &s.begun);
    event_add(dev, kind, lane, name, of, s.start, s.start, amount); // now, so that it precedes what it contains
    return s;
}

/* The span ends on the current stream. Its duration is added to *seconds unless that is NULL. `line` and `number` are
 * those of a collective (OpenSpan), or -1 and 0. */
static inline void span_end(Device *dev, Span s, double *seconds, int line, int64_t number) {
    if (s.begun) {
        OpenSpan o = {s, NULL, seconds, line, number};
        record_time(dev, &o.ended);
        span_add_open(dev, &o);
        return;
    }
    double now = device_now(dev);
    if (dev->rec.events && s.event < dev->rec.max_events) dev->rec.events[s.event].end = now;
    if (seconds) *seconds += now - s.start;
}

/* The timeline's lane for the current stream. On a CPU all streams are one. */
static inline int stream_lane(const Device *dev) {
    int has_streams = CUDA_BUILD;
    if (dev->dry_run) has_streams = dev->rec.times && dev->rec.times->has_streams;
    return has_streams ? (int)dev->current_stream : (int)STREAM_COMPUTE;
}

/* Are ops timed? On a GPU only for a timeline. */
static inline int is_timed(const Device *dev) { return !CUDA_BUILD || dev->dry_run || dev->rec.max_events; }

/* A phase, for example the forward of a unit, lasts until the next one begins; name NULL: only ends the last one. On a
 * GPU the host waits here if it is several phases ahead (device_pace). */
static inline void device_phase(Device *dev, const char *name, const char *of) {
    Recorder *rec = &dev->rec;
    if (rec->in_phase) span_end(dev, rec->phase, NULL, -1, 0);
    if (name) device_pace(dev);
    rec->in_phase = name && is_timed(dev);
    if (rec->in_phase) rec->phase = span_begin(dev, EVENT_PHASE, STREAM_COMPUTE, name, of, 0, 0);
    rec->phase_name = name;
    rec->phase_of = of;
}

/* A step begins in the timeline, followed by all counters of memory. The caller ends the span. */
static inline Span step_begin(Device *dev, int64_t step) {
    int on_host = !is_timed(dev); // without a timeline, the host's clock will do
    Span s = span_begin(dev, EVENT_STEP, STREAM_COMPUTE, "step", NULL, (double)step, on_host);
    for (int c = 0; c < MEM_CATEGORIES; c++) memory_event(dev, mem_category_names[c], dev->arenas[c].used);
    for (int p = 0; p < POOLS; p++) memory_event(dev, pool_names[p], dev->rec.in_use[p]);
    return s;
}

// ---------------------------------------------------------------------------
// the ledger of ops

/* Every op starts with this: counts its FLOPs and its bytes (read + written). Returns 0 in a dry run: do not
 * compute. */
static inline int op_begin(Device *dev, OpKind op, double flops, double bytes) {
    Recorder *rec = &dev->rec;
    OpStat *stat = &rec->ops[op];
    stat->calls++;
    stat->flops += flops;
    stat->bytes += bytes;
    if (dev->recomputing) stat->recomputed += flops;
    if (dev->dry_run) {
        double start = rec->clock, seconds = rec->times ? rec->times->seconds(rec->times, op, flops, bytes) : 0;
        if (stream_lane(dev) == STREAM_COMPUTE) rec->clock += seconds;
        stat->seconds += seconds;
        if (rec->stream_recorder) rec->stream_recorder->compute[dev->current_stream] += seconds;
        event_add(dev, EVENT_OP, stream_lane(dev), op_names[op], NULL, start, start + seconds, flops);
        return 0;
    }
    dev->op = op;
    if (is_timed(dev)) rec->op_span = span_begin(dev, EVENT_OP, stream_lane(dev), op_names[op], NULL, flops, 0);
    if (rec->activity) {
        rec->activity->op = op;
        rec->activity->since = is_timed(dev) ? rec->op_span.start : seconds_now();
        rec->activity->running = 1;
    }
    return 1;
}

static inline void op_end(Device *dev) {
    Activity *activity = dev->rec.activity;
    if (is_timed(dev)) span_end(dev, dev->rec.op_span, &dev->rec.ops[dev->op].seconds, -1, 0);
    if (activity) {
        activity->running = 0;
        activity->since = seconds_now();
    }
    if (dev->poll) dev->poll(dev->poll_arg); // comm_poll: collectives progress
}

/* FLOPs of linear layers and attention, the basis of MFU: those that recompute activations, or all others. */
static inline double device_flops(const Device *dev, int recomputed) {
    static const OpKind counted[] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_INPUT, OP_LINEAR_BACKWARD_WEIGHT,
                                     OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
    double sum = 0;
    for (int i = 0; i < 5; i++) {
        const OpStat *stat = &dev->rec.ops[counted[i]];
        sum += recomputed ? stat->recomputed : stat->flops - stat->recomputed;
    }
    return sum;
}

#endif
