/* device.h: what every op, buffer and exchange stands on.
 *
 * Owns: the storage dtype `floatX`, the two error exits, the arenas (every buffer of a rank is named and belongs to a
 * category), the op ledger (every op says its FLOPs and bytes before it computes), streams and events, and the
 * timeline. A caller may rely on: a `Device` with `dry_run` set runs the same code, counts the same things and touches
 * no memory; so memory, FLOPs and traffic of any rank are known before anything is allocated. Arenas but MEM_HOST may
 * be a GPU's: the host reads and writes them through device_read, device_write, device_copy and device_zero alone.
 */
#ifndef DEVICE_H
#define DEVICE_H
#include "base.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#if defined USE_CUDA && defined HAVE_NCCL
#include <nccl.h>
#endif

// ---------------------------------------------------------------------------
// the device of one rank: arenas and the op ledger

typedef enum {
    MEM_PARAMS,
    MEM_GRADS,
    MEM_OPTIMIZER,
    MEM_ACTIVATIONS,
    MEM_COMM,
    MEM_WORKSPACE,
    MEM_HOST /* what only the host computes with */,
    MEM_CATEGORIES
} MemCategory;
static const char *const mem_category_names[MEM_CATEGORIES] = {"params", "grads",     "optimizer", "activations",
                                                               "comm",   "workspace", "host"};

typedef struct {
    char *base;      // start of the reservation
    size_t reserved; // bytes; what the dry run found to be the peak
    size_t used, peak;
    int slow; // the slow tier: a file mapped into memory, which the system may write out and forget; for a GPU, the
              // host's memory
} Arena;

typedef struct {
    const char *name;
    MemCategory category;
    size_t bytes;
    int count;
} Buffer;

typedef enum {
    OP_EMBEDDING_FORWARD,
    OP_EMBEDDING_BACKWARD,
    OP_RMSNORM_FORWARD,
    OP_RMSNORM_BACKWARD,
    OP_RESIDUAL_ADD,
    OP_LINEAR_FORWARD,
    OP_LINEAR_BACKWARD_INPUT,
    OP_LINEAR_BACKWARD_WEIGHT,
    OP_ROPE_FORWARD,
    OP_ROPE_BACKWARD,
    OP_ATTENTION_FORWARD,
    OP_ATTENTION_BACKWARD,
    OP_SWIGLU_FORWARD,
    OP_SWIGLU_BACKWARD,
    OP_CROSS_ENTROPY,
    OP_EXACT_TOTAL,
    OP_TREE_SUM,
    OP_SUM_PIECES,
    OP_SQUARED_NORM,
    OP_ADAMW,
    OP_CAST,
    OP_FINGERPRINT,
    OP_SCALE,
    OP_DEQUANTIZE,
    OP_ADAPTER_MERGE,
    OP_COUNT
} OpKind;
static const char *const op_names[OP_COUNT] = {"embedding_forward",
                                               "embedding_backward",
                                               "rmsnorm_forward",
                                               "rmsnorm_backward",
                                               "residual_add",
                                               "linear_forward",
                                               "linear_backward_input",
                                               "linear_backward_weight",
                                               "rope_forward",
                                               "rope_backward",
                                               "attention_forward",
                                               "attention_backward",
                                               "swiglu_forward",
                                               "swiglu_backward",
                                               "cross_entropy",
                                               "exact_total",
                                               "tree_sum",
                                               "sum_pieces",
                                               "squared_norm",
                                               "adamw",
                                               "cast",
                                               "fingerprint",
                                               "scale",
                                               "dequantize",
                                               "adapter_merge"};

typedef struct {
    int64_t calls;
    double flops, bytes, seconds, again;
} OpStat; // seconds: measured, or by a dry run's clock; again: of the FLOPs, those of activations computed again

// what happened when: in a run with --trace, or in a dry run by its own clock
typedef enum { EVENT_OP, EVENT_WAIT, EVENT_PHASE, EVENT_STEP, EVENT_EXCHANGE } EventKind;

/* What a GPU does side by side. Ops and copies go to the stream that is chosen (device_stream), and keep their order
 * there; what one stream needs of another it waits for (device_order, device_await). A processor does one after the
 * other. */
typedef enum {
    STREAM_COMPUTE,
    STREAM_GATHER,
    STREAM_REDUCE,
    STREAM_FETCH,
    STREAM_STORE,
    STREAM_SEND_NEXT,
    STREAM_RECEIVE_NEXT,
    STREAM_SEND_PREVIOUS,
    STREAM_RECEIVE_PREVIOUS /* of a pipeline's stages */,
    STREAMS
} StreamKind;
static const char *const stream_names[STREAMS] = {"compute",
                                                  "gather",
                                                  "reduce",
                                                  "fetch",
                                                  "store",
                                                  "send to next",
                                                  "receive from next",
                                                  "send to previous",
                                                  "receive from previous"};

typedef struct CUevent_st *DeviceEvent; // CUDA's, and never made elsewhere

typedef struct {
    const char *name, *of; // what happened, and to what (or NULL)
    double start, end;     // seconds
    double amount;         // an op's FLOPs, an exchange's bytes from others, a step's number
    int kind, lane;        // the first lanes are the streams'; those of exchanges are comm.h's
} Event;

typedef struct {       // something that lasts, from span_begin to span_end
    double start;      // seconds
    int64_t event;     // of the timeline
    DeviceEvent begun; // on a GPU: its stream has come to the beginning. NULL: the host's own time counts
} Span;

typedef struct { // on a GPU: a span whose end has been told to the stream, which may not have come to it
    Span span;
    DeviceEvent ended;
    double *seconds; // its length is added there; NULL: nowhere
    int line;        // of an exchange, as watchdog.h has it; -1: it is none
    int64_t number;  // the how manieth of its line, from 1
} OpenSpan;

// what a machine does in a second, for a dry run with a clock; rates of one rank
typedef struct {
    OpKind op;
    double flops, intensity, rate;
} OpRate; // of an op of so many FLOPs, and FLOPs a byte: FLOP/s
typedef struct {
    const OpRate *ops;
    int count;
    double memory;
} OpRates; // (count); bytes/s, read + written

enum { MAX_BUFFERS = 96, MAX_EVENTS = 1 << 18 };

typedef struct {
    int op, runs;
    double since;
} Activity; // the op that runs (or, runs = 0, that ran last), and since when

typedef struct {
    int dry_run;       // 1: count, compute nothing, touch nothing
    int threads;       // OpenMP threads of this rank
    int deterministic; // the same bits in each run, where that costs time
    int gpu;           // which one of this host's this rank has
    int by_nccl;       // what GPUs exchange is moved by NCCL
    int blocking;      // wait for each op's end before the next: faults and times are then the op's own
    Arena arenas[MEM_CATEGORIES];
    Buffer buffers[MAX_BUFFERS];
    int num_buffers;
    OpStat ops[OP_COUNT];
    int again;          // activations are computed again: their FLOPs are no progress
    size_t peak;        // bytes of all arenas in memory when there were most of them; …
    char peak_when[96]; // … and when that was
    OpKind op;          // the op that runs now
    Span op_span;
    const OpRates *rates;              // in a dry run: it has a clock. NULL: none
    double clock;                      // seconds of arithmetic since the dry run's step began
    StreamKind on;                     // where ops and copies go
    Event *events;                     // (max_events) the timeline; NULL: none is kept
    int64_t num_events, max_events;    // also counted where none are kept, or no more fit
    Span phase;                        // what runs now
    int in_phase;                      // 0: nothing does
    const char *phase_name, *phase_of; // what the program is at: forward, backward, …, and of which unit; NULL: none
    Activity *shown;                   // the same, where others can see it (watchdog.h); NULL: nobody looks
    void (*poll)(void *);              // lets exchanges in flight progress between ops; NULL when there are none
    void (*watch)(void *, double waited); // while the host waits for the device, and with 0 after that: ends the run
                                          // where it takes too long; NULL: nobody does
    void (*arrived)(void *, int line, int64_t number, double start,
                    double end); // the device has come to the end of an exchange
    void *poll_arg;              // of all three
    struct MatmulCache *matmuls; // kernels.h: oneDNN's primitives, by shape
#ifdef USE_CUDA
    cudaStream_t stream, streams[STREAMS]; // the chosen one; all
    DeviceEvent order[STREAMS];            // of each stream: how far it has come, for another to wait for
    DeviceEvent zero;                      // when device_now was `zero_seconds`: GPU times count from there
    double zero_seconds;
    OpenSpan *open_spans;      // (num_open, room for max_open) in the order in which they were ended
    DeviceEvent *spare_events; // (num_spare, room for max_spare) that spans may take
    int num_open, max_open, num_spare, max_spare;
    int64_t settled;                   // spans whose end was seen, and phases
    DeviceEvent phases[4];             // where the last ones began; …
    int64_t num_phases;                // … of so many
    struct CudaMatmulCache *cuda_matmuls; // lib/cuda/matmul.cuh: cuBLASLt's choices, by shape
    int multiprocessors, shared_limit; // of this GPU; bytes of shared memory a block may have
#endif
} Device;

static inline double device_now(const Device *dev) { return dev->dry_run ? dev->clock : seconds_now(); }

static inline void event_add(Device *dev, EventKind kind, int lane, const char *name, const char *of, double start,
                             double end, double amount) {
    if (dev->events && dev->num_events < dev->max_events) {
        Event *e = &dev->events[dev->num_events];
        e->name = name, e->of = of, e->start = start, e->end = end, e->amount = amount, e->kind = kind, e->lane = lane;
    }
    dev->num_events++;
}

static inline void event_end(Device *dev, int64_t event, double end) {
    if (dev->events && event < dev->max_events) dev->events[event].end = end;
}

static void device_pace(Device *dev);
static void stamp(Device *dev, DeviceEvent *event);    // on a GPU: notes when the chosen stream comes here
static void span_open(Device *dev, const OpenSpan *o); // its end is known when the GPU has come to it

/* Something begins on the chosen stream. Of a GPU it is the GPU's time that counts, unless `on_host`. */
static inline Span span_begin(Device *dev, EventKind kind, int lane, const char *name, const char *of, double amount,
                              int on_host) {
    Span s = {device_now(dev), dev->num_events, NULL};
    if (!dev->dry_run && !on_host) stamp(dev, &s.begun);
    event_add(dev, kind, lane, name, of, s.start, s.start, amount); // stands before what it holds
    return s;
}

/* It ends on the chosen stream. The rest: see OpenSpan. */
static inline void span_end(Device *dev, Span s, double *seconds, int line, int64_t number) {
    if (s.begun) {
        OpenSpan o = {s, NULL, seconds, line, number};
        stamp(dev, &o.ended);
        span_open(dev, &o);
        return;
    }
    double now = device_now(dev);
    event_end(dev, s.event, now);
    if (seconds) *seconds += now - s.start;
}

/* The timeline's lane of what the chosen stream does. */
static inline int stream_lane(const Device *dev) { return CUDA_BUILD && !dev->dry_run ? dev->on : STREAM_COMPUTE; }

static inline int is_timed(const Device *dev) {
    return !CUDA_BUILD || dev->dry_run || dev->max_events;
} // on a GPU ops are timed for a timeline alone

/* A phase (forward, backward, … of a unit) lasts until the next one begins; name NULL: none does. */
static inline void device_phase(Device *dev, const char *name, const char *of) {
    if (dev->in_phase) span_end(dev, dev->phase, NULL, -1, 0);
    if (name) device_pace(dev);
    dev->in_phase = name && is_timed(dev);
    if (dev->in_phase) dev->phase = span_begin(dev, EVENT_PHASE, STREAM_COMPUTE, name, of, 0, 0);
    dev->phase_name = name, dev->phase_of = of;
}

/* Seconds of an op: FLOPs at the rate of that op's nearest listed shape (in FLOPs and FLOPs a byte, both by ratio), but
 * no less than its bytes take; an op that is not listed moves bytes alone. */
static double op_seconds(const OpRates *r, OpKind op, double flops, double bytes) {
    double nearest = INFINITY, rate = INFINITY;
    for (int i = 0; i < r->count; i++) {
        if (r->ops[i].op != op) continue;
        double distance = hypot(log(flops / r->ops[i].flops), log(flops / bytes / r->ops[i].intensity));
        if (distance < nearest) nearest = distance, rate = r->ops[i].rate;
    }
    return fmax(flops / rate, bytes / r->memory);
}

/* Every op starts with this: books FLOPs and bytes (read + written), and says whether to compute. */
static inline int op_begin(Device *dev, OpKind op, double flops, double bytes) {
    dev->ops[op].calls++;
    dev->ops[op].flops += flops;
    dev->ops[op].bytes += bytes;
    if (dev->again) dev->ops[op].again += flops;
    if (dev->dry_run) {
        double start = dev->clock, took = dev->rates ? op_seconds(dev->rates, op, flops, bytes) : 0;
        dev->clock += took;
        dev->ops[op].seconds += took;
        event_add(dev, EVENT_OP, STREAM_COMPUTE, op_names[op], NULL, start, dev->clock, flops);
        return 0;
    }
    dev->op = op;
    if (is_timed(dev)) dev->op_span = span_begin(dev, EVENT_OP, stream_lane(dev), op_names[op], NULL, flops, 0);
    if (dev->shown)
        dev->shown->op = op, dev->shown->since = is_timed(dev) ? dev->op_span.start : seconds_now(),
        dev->shown->runs = 1;
    return 1;
}

static inline void device_wait(Device *dev);

static inline void op_end(Device *dev) {
    if (is_timed(dev)) span_end(dev, dev->op_span, &dev->ops[dev->op].seconds, -1, 0);
    if (dev->blocking) device_wait(dev);
    if (dev->shown) dev->shown->runs = 0, dev->shown->since = seconds_now();
    if (dev->poll) dev->poll(dev->poll_arg);
}

/* FLOPs of products and attention: what utilisation is measured by. `again`: only those of activations computed again,
 * which are no part of the rest. */
static double device_flops(const Device *dev, int again) {
    static const OpKind counted[] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_INPUT, OP_LINEAR_BACKWARD_WEIGHT,
                                     OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
    double sum = 0;
    for (int i = 0; i < 5; i++)
        sum += again ? dev->ops[counted[i]].again : dev->ops[counted[i]].flops - dev->ops[counted[i]].again;
    return sum;
}

/* Bytes of all arenas at their fullest: those that are not in the slow tier, or those that are. */
static size_t device_arenas(const Device *dev, int slow) {
    size_t sum = 0;
    for (int c = 0; c < MEM_CATEGORIES; c++) sum += dev->arenas[c].slow == slow ? dev->arenas[c].peak : 0;
    return sum;
}
static size_t device_peak(const Device *dev) { return device_arenas(dev, 0); }

/* A dry-run device hands out addresses in reservations that are never mapped. `slow`: which categories are to live in
 * the slow tier, bit by bit. */
static void device_open_dry_run(Device *dev, int threads, unsigned slow) {
    memset(dev, 0, sizeof *dev);
    dev->dry_run = 1;
    dev->threads = threads;
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        dev->arenas[c].slow = slow >> c & 1;
        dev->arenas[c].base = (char *)((uintptr_t)(c + 1) << 50);
        dev->arenas[c].reserved = (size_t)1 << 50;
    }
}

#ifdef USE_CUDA
// ---------------------------------------------------------------------------
// CUDA: errors, launches, memory of a GPU

static void cuda_failed(cudaError_t error, const char *what) {
    if (error == cudaErrorNoKernelImageForDevice)
        user_error("CUDA: %s: this program holds no kernel for this GPU: build it on this machine with make CUDA=1",
                   what);
    if (error == cudaErrorMemoryAllocation)
        user_error("CUDA: %s: out of memory on the GPU: use more ranks, a smaller --batch or --seq, --recompute full, "
                   "or a smaller model",
                   what);
    run_failure("CUDA: %s failed, or something enqueued before it: %s (%s). Most faults of a kernel end all later "
                "calls: run again on one rank with "
                "CUDA_LAUNCH_BLOCKING=1 to see whose it is, or the same options with the build of make cuda-on-cpu, "
                "which names the place",
                what, cudaGetErrorString(error), cudaGetErrorName(error));
}
static inline void cuda_check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) cuda_failed(error, what);
}
/* What a query says: not to be ready yet is no failure, but would be the next launch's unless it is forgotten. */
static inline int cuda_is_ready(cudaError_t state, const char *what) {
    if (state != cudaErrorNotReady) cuda_check(state, what);
    else cudaGetLastError();
    return state == cudaSuccess;
}

#ifndef CUDA_ON_CPU // which has these as functions of its own
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                         \
    (kernel)<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count] // fixed size; count elements
#define DYN_SHARED(type, name)                                                                                         \
    extern __shared__ __align__(128) char dynamic_shared_memory[];                                                     \
    type *name = (type *)dynamic_shared_memory // as many bytes as the launch says
#endif
/* Launches on this rank's stream, or ends the run with the kernel's name. A kernel with commas in its name goes in
 * parentheses. */
#define KERNEL(dev, kernel, grid, block, shared_bytes, ...)                                                            \
    do {                                                                                                               \
        LAUNCH(kernel, grid, block, shared_bytes, (dev)->stream, __VA_ARGS__);                                         \
        cuda_check(cudaGetLastError(), "the launch of " #kernel);                                                      \
    } while (0)

/* A GPU and a driver for it, or a sentence that says what is missing. Returns how many there are. */
static int cuda_require_gpu(void) {
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
    if (error == cudaErrorInsufficientDriver && !driver)
        user_error("no NVIDIA driver was found: install one, or use ./train_llama3, which runs on the processor");
    if (error == cudaErrorInsufficientDriver || (driver && driver / 1000 < runtime / 1000))
        user_error("the NVIDIA driver is for CUDA %d.%d, this program was built with CUDA %d.%d: install a newer "
                   "driver, or build with an older toolkit",
                   driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && !count))
        user_error("no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES hides some): use ./train_llama3, which runs on the "
                   "processor");
    cuda_check(error, "looking for a GPU");
    cudaDeviceProp gpu;
    cuda_check(cudaGetDeviceProperties(&gpu, 0), "asking what GPU this is");
    if (gpu.major < 8)
        user_error("%s has compute capability %d.%d, 8.0 (Ampere) or newer is expected: use ./train_llama3, which runs "
                   "on the processor",
                   gpu.name, gpu.major, gpu.minor);
    return count;
}

#define DEVICE_NAME "this GPU"
static int device_count(void) { return cuda_require_gpu(); }
static int device_of(int local) { return local % device_count(); }
/* Bytes of its memory that are free; those that a rank needs of it. */
static double device_memory(int gpu) {
    size_t have = 0, of = 0;
    cuda_check(cudaSetDevice(gpu), "choosing a GPU");
    cuda_check(cudaMemGetInfo(&have, &of), "asking for the GPU's memory");
    return (double)have;
}
static size_t device_need(const Device *dry_run) { return device_peak(dry_run) - dry_run->arenas[MEM_HOST].peak; }
/* The same of the host, all of it pinned: of that the system gives more than there is, and then ends whom it will. */
static size_t pinned_need(const Device *dry_run) { return device_arenas(dry_run, 1) + dry_run->arenas[MEM_HOST].peak; }
static double pinned_memory(void) {
    long long kilobytes = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %lld", &kilobytes) != 1) {}
    if (f) fclose(f);
    return kilobytes ? 1024.0 * (double)kilobytes : INFINITY;
}

/* The rank's thread, GPU, streams and limits. What other ranks wait for goes first. */
static void device_attach(Device *dev) {
    int least, most;
    cuda_check(cudaSetDevice(dev->gpu), "choosing a GPU");
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &most), "asking for the priorities of streams");
    for (int i = 0; i < STREAMS; i++)
        cuda_check(
            cudaStreamCreateWithPriority(&dev->streams[i], cudaStreamNonBlocking, i == STREAM_COMPUTE ? least : most),
            "making a stream");
    dev->stream = dev->streams[STREAM_COMPUTE];
    cuda_check(cudaDeviceGetAttribute(&dev->multiprocessors, cudaDevAttrMultiProcessorCount, dev->gpu),
               "asking for the multiprocessors");
    cuda_check(cudaDeviceGetAttribute(&dev->shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev->gpu),
               "asking for the shared memory");
}

/* Memory that NCCL itself gave can be registered with it: then it is read and written where it lies. */
static cudaError_t exchanged_alloc(const Device *dev, MemCategory category, void **p, size_t bytes) {
#ifdef HAVE_NCCL
    if (dev->by_nccl && category == MEM_COMM) {
        ncclResult_t result = ncclMemAlloc(p, bytes);
        if (result != ncclSuccess && result != ncclUnhandledCudaError)
            run_failure("NCCL could not allocate %.2f GB to exchange: %s. NCCL_DEBUG=INFO says more",
                        (double)bytes / 1e9, ncclGetErrorString(result));
        return result == ncclSuccess ? cudaSuccess : cudaErrorMemoryAllocation; // what CUDA refuses it is memory
    }
#endif
    (void)dev, (void)category;
    return cudaMalloc(p, bytes);
}
static void exchanged_free(const Device *dev, MemCategory category, void *p) {
#ifdef HAVE_NCCL
    if (dev->by_nccl && category == MEM_COMM) {
        ncclMemFree(p);
        return;
    }
#endif
    (void)dev, (void)category;
    cudaFree(p);
}

static void *memory_open(Device *dev, MemCategory category, size_t bytes, size_t in_all, const char *out, int rank) {
    (void)out, (void)rank;
    void *p = NULL;
    size_t have = 0, of = 0;
    int slow = dev->arenas[category].slow,
        on_host = category == MEM_HOST || slow; // there, kernels reach the slow tier over the bus
    cudaError_t error = on_host ? cudaHostAlloc(&p, bytes, slow ? cudaHostAllocMapped : cudaHostAllocDefault)
                                : exchanged_alloc(dev, category, &p, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // it is told here
        if (slow)
            user_error("%.2f GB of the host's memory for %s could not be had pinned: --offload needs so much a rank; "
                       "use more hosts, or fewer ranks on each",
                       (double)bytes / 1e9, mem_category_names[category]);
        if (on_host)
            user_error("%.2f GB of the host's memory could not be had pinned: use fewer ranks a host, or a smaller "
                       "--batch or --seq",
                       (double)bytes / 1e9);
        cudaMemGetInfo(&have, &of);
        user_error("%.2f GB for %s could not be had: by the plan a rank needs %.2f GB of the GPU, of whose %.2f GB "
                   "%.2f GB are free now: use a smaller --batch or --seq, "
                   "--recompute full, more GPUs, or a smaller model (--plan shows what takes how much)",
                   (double)bytes / 1e9, mem_category_names[category], (double)in_all / 1e9, (double)of / 1e9,
                   (double)have / 1e9);
    }
    cuda_check(error, "getting memory");
    if (on_host) memset(p, 0, bytes);
    else cuda_check(cudaMemsetAsync(p, 0, bytes, dev->stream), "clearing memory");
    return p;
}
static void memory_close(Device *dev, MemCategory category, Arena *a) {
    if (category == MEM_HOST || a->slow) cudaFreeHost(a->base);
    else exchanged_free(dev, category, a->base);
}

static inline StreamKind device_stream(Device *dev, StreamKind to) {
    StreamKind before = dev->on;
    dev->on = to;
    dev->stream = dev->streams[to];
    return before;
}

static void spans_settle(Device *dev);
static void clock_move(Device *dev);

/* The host waits until the chosen stream has come to `event`; NULL: to its end. It looks at others now and then: a rank
 * that is lost may leave an exchange, and so a stream, unfinished for good. */
static void host_wait(Device *dev, DeviceEvent event) {
    double start = dev->watch ? seconds_now() : 0, looked = start;
    for (int spins = 0; dev->watch && !cuda_is_ready(event ? cudaEventQuery(event) : cudaStreamQuery(dev->stream),
                                                     "waiting for the GPU");
         spins++) {
        if (spins > 2000) usleep(20);
        double now = seconds_now();
        if (now - looked < 0.05) continue;
        looked = now;
        dev->watch(dev->poll_arg, now - start);
    }
    if (looked > start) dev->watch(dev->poll_arg, 0); // it has come
    if (!dev->watch)
        cuda_check(event ? cudaEventSynchronize(event) : cudaStreamSynchronize(dev->stream), "waiting for the GPU");
}

static void device_wait(Device *dev) {
    if (dev->dry_run) return;
    host_wait(dev, NULL);
    spans_settle(dev);
    clock_move(dev);
}
static void device_send(Device *dev, void *to, const void *from, size_t bytes, int wait) {
    if (dev->dry_run || !bytes) return;
    if (wait) device_wait(dev); // a copy of memory that is not pinned waits in the call, where no deadline runs
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, dev->stream), "a copy");
    if (wait) device_wait(dev);
}
static void device_read(Device *dev, void *to, const void *from, size_t bytes) { device_send(dev, to, from, bytes, 1); }
static void device_write(Device *dev, void *to, const void *from, size_t bytes) {
    device_send(dev, to, from, bytes, 1);
}
static void device_feed(Device *dev, void *to, const void *from, size_t bytes) { device_send(dev, to, from, bytes, 0); }
static void device_copy(Device *dev, void *to, const void *from, size_t bytes) { device_send(dev, to, from, bytes, 0); }
static void device_copy_rows(Device *dev, void *to, size_t to_stride, const void *from, size_t from_stride,
                             size_t bytes, int rows) {
    if (!dev->dry_run)
        cuda_check(cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, (size_t)rows, cudaMemcpyDeviceToDevice,
                                     dev->stream),
                   "a copy of rows");
}
static void device_zero(Device *dev, void *p, size_t bytes) {
    if (!dev->dry_run && bytes) cuda_check(cudaMemsetAsync(p, 0, bytes, dev->stream), "clearing memory");
}

static void device_record(Device *dev, DeviceEvent *event) {
    if (dev->dry_run) return;
    if (!*event) cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
    cuda_check(cudaEventRecord(*event, dev->stream), "recording an event");
}
static void device_await(Device *dev, DeviceEvent event) {
    if (!dev->dry_run && event) cuda_check(cudaStreamWaitEvent(dev->stream, event, 0), "waiting for an event");
}
/* The host stays no more than a few phases ahead of its GPU: a queue that is full (about 1,000 entries) would hold it
 * in the call that enqueues, where no deadline runs, and with it, in one process, the other ranks'. */
static void device_pace(Device *dev) {
    if (dev->dry_run) return;
    DeviceEvent *event = &dev->phases[dev->num_phases % 4];
    if (dev->num_phases++ >= 4) host_wait(dev, *event), dev->settled++;
    device_record(dev, event);
}

static void device_await_on_host(DeviceEvent event) {
    if (event) cuda_check(cudaEventSynchronize(event), "waiting for an event");
}
static void device_forget_event(DeviceEvent event) {
    if (event) cudaEventDestroy(event);
}
static DeviceEvent device_mark(Device *dev, StreamKind of) {
    StreamKind before = device_stream(dev, of);
    device_record(dev, &dev->order[of]);
    device_stream(dev, before);
    return dev->order[of];
}
static void device_order(Device *dev, StreamKind later, StreamKind earlier) {
    DeviceEvent mark = device_mark(dev, earlier);
    StreamKind before = device_stream(dev, later);
    device_await(dev, mark);
    device_stream(dev, before);
}

/* Room for one more in a list of `count` that grows. */
static void *list_room(void *list, int count, int *max, size_t size) {
    if (count < *max) return list;
    *max = *max ? 2 * *max : 256;
    list = realloc(list, size * (size_t)*max);
    if (!list) run_failure("out of memory");
    return list;
}

static void stamp(Device *dev, DeviceEvent *event) {
    if (dev->num_spare) *event = dev->spare_events[--dev->num_spare];
    else cuda_check(cudaEventCreateWithFlags(event, cudaEventDefault), "making an event");
    cuda_check(cudaEventRecord(*event, dev->stream), "recording an event");
}

static void span_open(Device *dev, const OpenSpan *o) {
    dev->open_spans = (OpenSpan *)list_room(dev->open_spans, dev->num_open, &dev->max_open, sizeof *o);
    dev->open_spans[dev->num_open++] = *o;
}

/* The time at which a stream came to an event that it has come to. */
static double stamp_seconds(Device *dev, DeviceEvent event) {
    float milliseconds;
    cuda_check(cudaEventElapsedTime(&milliseconds, dev->zero, event), "asking for an event's time");
    return dev->zero_seconds + 1e-3 * milliseconds;
}

/* Spans whose end the GPU has come to get their times. */
static void spans_settle(Device *dev) {
    int kept = 0;
    for (int i = 0; i < dev->num_open; i++) {
        OpenSpan o = dev->open_spans[i];
        if (!cuda_is_ready(cudaEventQuery(o.ended), "asking for an event")) {
            dev->open_spans[kept++] = o;
            continue;
        }
        double start = stamp_seconds(dev, o.span.begun), end = stamp_seconds(dev, o.ended);
        dev->settled++;
        if (dev->events && o.span.event >= 0 && o.span.event < dev->max_events)
            dev->events[o.span.event].start = start, dev->events[o.span.event].end = end;
        if (o.seconds) *o.seconds += end - start;
        if (o.line >= 0 && dev->arrived) dev->arrived(dev->poll_arg, o.line, o.number, start, end);
        for (int k = 0; k < 2; k++) {
            dev->spare_events =
                (DeviceEvent *)list_room(dev->spare_events, dev->num_spare, &dev->max_spare, sizeof(DeviceEvent));
            dev->spare_events[dev->num_spare++] = k ? o.ended : o.span.begun;
        }
    }
    dev->num_open = kept;
}

/* The chosen stream has been waited for: a float of milliseconds stays exact to a microsecond. */
static void clock_move(Device *dev) {
    if (dev->num_open || !dev->zero || seconds_now() - dev->zero_seconds < 10) return;
    DeviceEvent before = dev->zero;
    dev->zero = NULL;
    stamp(dev, &dev->zero);
    cuda_check(cudaEventSynchronize(dev->zero), "waiting for an event");
    float milliseconds;
    cuda_check(cudaEventElapsedTime(&milliseconds, before, dev->zero), "asking for an event's time");
    dev->zero_seconds += 1e-3 * milliseconds;
    cudaEventDestroy(before);
}

static int64_t device_settled(Device *dev, const OpenSpan **exchange) {
    spans_settle(dev);
    *exchange = NULL;
    for (int i = dev->num_open - 1; i >= 0; i--)
        if (dev->open_spans[i].line >= 0 &&
            cuda_is_ready(cudaEventQuery(dev->open_spans[i].span.begun), "asking for an event"))
            *exchange = &dev->open_spans[i];
    return dev->settled;
}
static void events_drop(Device *dev, int64_t event) {
    dev->num_events = event;
    for (int i = 0; i < dev->num_open; i++)
        if (dev->open_spans[i].span.event >= event) dev->open_spans[i].span.event = -1;
}

static void device_start_clock(Device *dev) {
    device_wait(dev);
    stamp(dev, &dev->zero);
    cuda_check(cudaEventSynchronize(dev->zero), "waiting for an event");
    dev->zero_seconds = seconds_now();
}

static void device_detach(Device *dev) {
    for (int i = 0; i < STREAMS; i++)
        if (dev->streams[i]) device_forget_event(dev->order[i]), cudaStreamDestroy(dev->streams[i]);
    for (int i = 0; i < 4; i++) device_forget_event(dev->phases[i]);
    for (int i = 0; i < dev->num_open; i++)
        cudaEventDestroy(dev->open_spans[i].span.begun), cudaEventDestroy(dev->open_spans[i].ended);
    for (int i = 0; i < dev->num_spare; i++) cudaEventDestroy(dev->spare_events[i]);
    device_forget_event(dev->zero);
    free(dev->open_spans);
    free(dev->spare_events);
}

static void *slow_fetch(Device *dev, MemCategory category, void *home, void *near, size_t bytes) {
    if (!dev->arenas[category].slow) return home;
    device_copy(dev, near, home, bytes);
    return near;
}
static void slow_store(Device *dev, MemCategory category, void *home, const void *near, size_t bytes, int written) {
    if (dev->arenas[category].slow && written) device_copy(dev, home, near, bytes);
}

#define SLOW_TIER "in the host's memory"
#define SLOW_TIER_HELP "in pinned memory of the host"
static int is_in_memory(const char *dir) { return (void)dir, 0; } // no files are made
enum {
    SLOW_TIER_COMPUTES = 0
}; // to read weights over the bus for each product would take longer than to bring them over once
#else
// ---------------------------------------------------------------------------
// the processor's own memory

#define SLOW_TIER "in files"
#define SLOW_TIER_HELP "in files under --out that are mapped into memory"
enum { SLOW_TIER_COMPUTES = 1 }; // files that are mapped are memory like any other

#define DEVICE_NAME "this host"
static int device_count(void) { return 1; }
static int device_of(int local) { return (void)local, 0; } // which of this host's, for the rank that is its `local`-th
static double device_memory(int gpu) {
    return (void)gpu, (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}
static size_t device_need(const Device *dry_run) { return device_peak(dry_run); }
static size_t pinned_need(const Device *dry_run) { return (void)dry_run, 0; } // nothing is
static double pinned_memory(void) { return INFINITY; }
static void device_attach(Device *dev) { (void)dev; }
static void device_detach(Device *dev) { (void)dev; }
static void device_start_clock(Device *dev) { (void)dev; }

/* `bytes` of DIR/offload-RANK-CATEGORY, mapped. The file has no name any more when this returns: whatever happens,
 * nothing is left behind. */
static void *map_file(const char *dir, int rank, const char *category, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/offload-%d-%s", dir, rank, category);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        user_error("cannot make %s for --offload (%s): give an --out that can be written", path, strerror(errno));
    unlink(path);
    int error = posix_fallocate(fd, 0, (off_t)bytes); // a full disk is an error now, not a SIGBUS later
    if (error)
        user_error("%zu bytes for %s could not be had under --out (%s): --offload needs so much room on that disk",
                   bytes, path, strerror(error));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        user_error("%zu bytes of %s could not be mapped (%s): use more ranks, or a smaller model", bytes, path,
                   strerror(errno));
    return p;
}

/* Files there take memory: to offload to it saves none. */
static int is_in_memory(const char *dir) {
    const uint32_t tmpfs = 0x01021994u, ramfs = 0x858458F6u; // as the kernel's magic.h has them
    struct statfs info;
    return !statfs(dir, &info) && ((uint32_t)info.f_type == tmpfs || (uint32_t)info.f_type == ramfs);
}

static void *memory_open(Device *dev, MemCategory category, size_t bytes, size_t in_all, const char *out, int rank) {
    (void)in_all;
    if (dev->arenas[category].slow) return map_file(out, rank, mem_category_names[category], bytes);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        user_error("%zu bytes of memory for %s could not be had (%s): use more ranks, a smaller --batch or --seq, or a "
                   "smaller model",
                   bytes, mem_category_names[category], strerror(errno));
    if (bytes >= (8u << 20)) madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}
static void memory_close(Device *dev, MemCategory category, Arena *a) {
    (void)dev, (void)category, munmap(a->base, a->reserved);
}

/* Between the host's memory and the device's; each comes after the ops before it. Nothing in a dry run. */
static inline void device_wait(Device *dev) { (void)dev; }                       // until all of them are done
static void device_copy(Device *dev, void *to, const void *from, size_t bytes) { // within the device
    if (!dev->dry_run && bytes) memcpy(to, from, bytes);
}
static void device_read(Device *dev, void *to, const void *from, size_t bytes) {
    device_copy(dev, to, from, bytes);
} // to the host; waits for it
static void device_write(Device *dev, void *to, const void *from, size_t bytes) {
    device_copy(dev, to, from, bytes);
} // from the host, whose memory is free again at once
static void device_feed(Device *dev, void *to, const void *from, size_t bytes) {
    device_copy(dev, to, from, bytes);
} // from MEM_HOST, which must stay until the next device_read or device_wait
static void device_copy_rows(Device *dev, void *to, size_t to_stride, const void *from, size_t from_stride,
                             size_t bytes, int rows) { // strides in bytes
    for (int i = 0; i < rows && !dev->dry_run; i++)
        memcpy((char *)to + (size_t)i * to_stride, (const char *)from + (size_t)i * from_stride, bytes);
}
static void device_zero(Device *dev, void *p, size_t bytes) {
    if (!dev->dry_run && bytes) memset(p, 0, bytes);
}
/* From here on ops and copies go to stream `to`; returns where they went. All of one stream are done in their order. */
static inline StreamKind device_stream(Device *dev, StreamKind to) {
    StreamKind before = dev->on;
    dev->on = to;
    return before;
}
/* How far a stream has come, for others to wait for, of this rank or of one beside it; an event that was never recorded
 * has happened. Here an op is done when its function returns. */
static void device_record(Device *dev, DeviceEvent *event) { (void)dev, (void)event; }
static void device_await(Device *dev, DeviceEvent event) { (void)dev, (void)event; } // the chosen stream does
static void device_await_on_host(DeviceEvent event) { (void)event; }
static void device_forget_event(DeviceEvent event) { (void)event; }
static DeviceEvent device_mark(Device *dev, StreamKind of) {
    return (void)dev, (void)of, (DeviceEvent)NULL;
} // how far it has come by now
static void device_order(Device *dev, StreamKind later, StreamKind earlier) {
    (void)dev, (void)later, (void)earlier;
} // all that goes to `later` from now on waits for all that went to `earlier`
/* What lies in the slow tier is fetched before it is computed with: returns where that is done, `near` or where it
 * lies. And it is put back. Here it is read ahead from its file, and leaves this process's memory. */
static void slow_advise(Device *dev, MemCategory category, const void *from, size_t bytes, int soon) {
    if (dev->dry_run || !dev->arenas[category].slow) return;
    uintptr_t begin = ((uintptr_t)from + (soon ? 0 : 4095)) & ~(uintptr_t)4095,
              end = ((uintptr_t)from + bytes + (soon ? 4095 : 0)) & ~(uintptr_t)4095;
    if (end > begin)
        madvise((void *)begin, end - begin,
                soon ? MADV_WILLNEED : MADV_DONTNEED); // shared with the file: its contents stay
}
static void *slow_fetch(Device *dev, MemCategory category, void *home, void *near, size_t bytes) {
    (void)near;
    slow_advise(dev, category, home, bytes, 1);
    return home;
}
static void slow_store(Device *dev, MemCategory category, void *home, const void *near, size_t bytes, int written) {
    (void)near, (void)written;
    slow_advise(dev, category, home, bytes, 0);
}

static void device_pace(Device *dev) { (void)dev; }
static void stamp(Device *dev, DeviceEvent *event) { (void)dev, (void)event; }
static void span_open(Device *dev, const OpenSpan *o) { (void)dev, (void)o; }
static int64_t device_settled(Device *dev, const OpenSpan **exchange) {
    return (void)dev, *exchange = NULL, 0;
} // how many spans have come to their end; of exchanges that have begun and not ended, the first
static void events_drop(Device *dev, int64_t event) {
    dev->num_events = event;
} // what the timeline has noted from `event` on is forgotten
#endif

#ifdef CUDA_ON_CPU // what lies behind each buffer nobody may touch; what is given back is no number. In the order of
                   // the ops, as all of it
enum { RED_ZONE = 256 };
static void mark_buffer(Device *dev, MemCategory category, char *end) {
    if (!dev->dry_run && category != MEM_HOST) cuda_on_cpu_red_zone(end, RED_ZONE, dev->stream);
}
static void mark_free(Device *dev, MemCategory category, char *from, size_t bytes) {
    if (dev->dry_run || category == MEM_HOST || !bytes) return;
    cuda_on_cpu_forget_zones(from, bytes, dev->stream);
    cuda_on_cpu_poison(from, bytes, dev->stream);
}
#else
enum { RED_ZONE = 0 };
static inline void mark_buffer(Device *dev, MemCategory category, char *end) { (void)dev, (void)category, (void)end; }
static inline void mark_free(Device *dev, MemCategory category, char *from, size_t bytes) {
    (void)dev, (void)category, (void)from, (void)bytes;
}
#endif

/* Does the device's arithmetic reach this address? Where the host computes, everything is its memory. */
static inline int is_of_device(const Device *dev, const void *p) {
    for (int c = 0; c < MEM_HOST; c++)
        if ((const char *)p >= dev->arenas[c].base && (const char *)p < dev->arenas[c].base + dev->arenas[c].reserved)
            return 1;
    return 0;
}

/* A computing device reserves what `dry_run` needed, no more. On a processor pages become resident when first touched,
 * and what is offloaded lies in files under `out`. */
static void device_open(Device *dev, const Device *dry_run, const char *out, int rank) {
    memset(dev, 0, sizeof *dev);
    dev->gpu = dry_run->gpu, dev->by_nccl = dry_run->by_nccl;
    dev->threads = dry_run->threads;
    dev->deterministic = dry_run->deterministic;
    dev->max_events = dry_run->max_events;
    device_attach(dev);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        Arena *a = &dev->arenas[c];
        a->slow = dry_run->arenas[c].slow;
        a->reserved = (size_t)round_up((int64_t)dry_run->arenas[c].peak, 4096);
        if (a->reserved)
            a->base = (char *)memory_open(dev, (MemCategory)c, a->reserved, device_need(dry_run), out, rank);
    }
    device_start_clock(dev);
}

/* Waits for all streams. */
static void device_finish(Device *dev) {
    StreamKind before = dev->on;
    for (int i = 0; i < STREAMS; i++) device_stream(dev, (StreamKind)i), device_wait(dev);
    device_stream(dev, before);
}

static void device_close(Device *dev) {
    if (!dev->dry_run) device_finish(dev);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        Arena *a = &dev->arenas[c];
        if (!dev->dry_run && a->base) memory_close(dev, (MemCategory)c, a);
    }
    memset(dev->arenas, 0, sizeof dev->arenas);
    if (!dev->dry_run) device_detach(dev);
}

/* A named buffer of `bytes`, aligned to 256 bytes, zero when first handed out. Lives until arena_release. */
static void *arena_alloc(Device *dev, MemCategory category, const char *name, size_t bytes) {
    Arena *a = &dev->arenas[category];
    size_t size = (size_t)round_up((int64_t)bytes, 256) + RED_ZONE;
    if (dev->dry_run && a->used + size > a->reserved)
        user_error("a rank needs more than %zu TB of memory for %s alone: use more ranks, a smaller --batch or --seq, "
                   "or a smaller model",
                   a->reserved >> 40, mem_category_names[category]);
    if (a->used + size > a->reserved)
        run_failure("memory: buffer '%s' of %zu bytes does not fit the %zu bytes that the dry run found for %s", name,
                    bytes, a->reserved, mem_category_names[category]);
    int i = 0;
    while (i < dev->num_buffers && (dev->buffers[i].category != category || strcmp(dev->buffers[i].name, name))) i++;
    if (i == dev->num_buffers) {
        if (i == MAX_BUFFERS) run_failure("memory: more than %d kinds of buffers", MAX_BUFFERS);
        dev->num_buffers++;
        dev->buffers[i].name = name;
        dev->buffers[i].category = category;
        dev->buffers[i].bytes = 0;
        dev->buffers[i].count = 0;
    }
    dev->buffers[i].bytes = (size_t)max_i64((int64_t)dev->buffers[i].bytes, (int64_t)size);
    dev->buffers[i].count++;
    void *p = a->base + a->used;
    a->used += size;
    mark_buffer(dev, category, a->base + a->used - RED_ZONE);
    if (a->used > a->peak) a->peak = a->used;
    size_t now = 0;
    for (int c = 0; c < MEM_CATEGORIES; c++) now += dev->arenas[c].slow ? 0 : dev->arenas[c].used;
    if (now > dev->peak) {
        dev->peak = now;
        snprintf(dev->peak_when, sizeof dev->peak_when, "%s%s%s: %s", dev->phase_name ? dev->phase_name : "start-up",
                 dev->phase_of ? " of " : "", dev->phase_of ? dev->phase_of : "", name);
    }
    return p;
}

static inline size_t arena_mark(const Device *dev, MemCategory category) { return dev->arenas[category].used; }
static inline void arena_release(Device *dev, MemCategory category, size_t mark) {
    mark_free(dev, category, dev->arenas[category].base + mark, dev->arenas[category].used - mark);
    dev->arenas[category].used = mark;
}

/* Memory an op needs while it runs; the op releases it with arena_release(dev, MEM_WORKSPACE, mark). */
static inline void *scratch(Device *dev, const char *name, size_t bytes) {
    return arena_alloc(dev, MEM_WORKSPACE, name, bytes);
}

#endif
