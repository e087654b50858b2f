/* device_types.h: the device of one rank, as a struct: memory arenas and streams, and a recorder of what it does.
 *
 * device_cpu.h and device_cuda.h implement memory, copies and streams for it, recorder.h the ledger of ops and the
 * timeline; device.h is what the rest of the program includes.
 */
#ifndef DEVICE_TYPES_H
#define DEVICE_TYPES_H
#include "base.h"

// ---------------------------------------------------------------------------
// memory

typedef enum {
    MEM_PARAMS,
    MEM_GRADS,
    MEM_OPTIMIZER,
    MEM_ACTIVATIONS,
    MEM_COMM,
    MEM_WORKSPACE,
    MEM_HOST, // read and written by the host only
    MEM_CATEGORIES
} MemCategory;
static const char *const mem_category_names[MEM_CATEGORIES] = {"params", "grads",     "optimizer", "activations",
                                                               "comm",   "workspace", "host"};

/* All buffers of a category, allocated and released as a stack. */
typedef struct {
    char *base;
    size_t reserved; // bytes; a run reserves the peak of its dry run
    size_t used, peak;
    int offloaded; // lies in a file mapped into memory, which the system may evict; for a GPU, in the host's memory
} Arena;

typedef struct {
    const char *name;
    MemCategory category;
    size_t bytes; // of the largest buffer with this name
    int count;
} Buffer;

enum { MAX_BUFFERS = 96 };

/* FSDP's pools of full-size buffers: weights as they are gathered, int8 weights after dequantization, fp32 gradients.
 * An arena holds the buffers for the whole run; the timeline counts those in use. */
typedef enum { POOL_WEIGHTS, POOL_DEQUANTIZED, POOL_GRADIENTS, POOLS } PoolKind;
static const char *const pool_names[POOLS] = {"gathered weights in use", "dequantized weights in use",
                                              "full-size gradients in use"};

// ---------------------------------------------------------------------------
// ops

// clang-format off
typedef enum {
    OP_EMBEDDING_FORWARD, OP_EMBEDDING_BACKWARD, OP_RMSNORM_FORWARD, OP_RMSNORM_BACKWARD, OP_RESIDUAL_ADD,
    OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_INPUT, OP_LINEAR_BACKWARD_WEIGHT, OP_ROPE_FORWARD, OP_ROPE_BACKWARD,
    OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD, OP_SWIGLU_FORWARD, OP_SWIGLU_BACKWARD, OP_CROSS_ENTROPY,
    OP_EXACT_TOTAL, OP_TREE_SUM, OP_SUM_PIECES, OP_SQUARED_NORM, OP_ADAMW,
    OP_CAST, OP_FINGERPRINT, OP_SCALE, OP_DEQUANTIZE, OP_ADAPTER_MERGE,
    OP_MUON_MOMENTUM, OP_NORMALIZE_MATRIX, OP_MUON_MATMUL, OP_WEIGHTED_SUM, OP_MUON_UPDATE,
    OP_COUNT
} OpKind;
static const char *const op_names[OP_COUNT] = {
    "embedding_forward", "embedding_backward", "rmsnorm_forward", "rmsnorm_backward", "residual_add",
    "linear_forward", "linear_backward_input", "linear_backward_weight", "rope_forward", "rope_backward",
    "attention_forward", "attention_backward", "swiglu_forward", "swiglu_backward", "cross_entropy",
    "exact_total", "tree_sum", "sum_pieces", "squared_norm", "adamw",
    "cast", "fingerprint", "scale", "dequantize", "adapter_merge",
    "muon_momentum", "normalize_matrix", "muon_matmul", "weighted_sum", "muon_update",
};
// clang-format on

/* The ledger's entry for one kind of op. */
typedef struct {
    int64_t calls;
    double flops;
    double bytes;      // read and written
    double seconds;    // measured, or estimated in a dry run with OpTimes
    double recomputed; // the part of `flops` that recomputes activations
} OpStat;

/* How long ops take on the planned machine, for a dry run with a clock (programs/shared/cluster.h). */
typedef struct OpTimes {
    double (*seconds)(const struct OpTimes *, OpKind op, double flops, double bytes);
    int has_streams; // a GPU, whose streams run side by side
} OpTimes;

/* What a rank computes at the moment, for others to read. */
typedef struct {
    int op; // the op that runs, or, if `running` is 0, that ran last; OP_COUNT: none yet
    int running;
    double since; // seconds
} Activity;

// ---------------------------------------------------------------------------
// streams, events, the timeline

/* Streams of a GPU run side by side. Ops and copies go to the current stream (device_set_stream) and keep their order
 * there; across streams order comes only from device_wait_stream and device_wait_event. A CPU runs one thing after the
 * other, and its streams are only names. */
// clang-format off
typedef enum {
    STREAM_COMPUTE, STREAM_GATHER, STREAM_REDUCE, STREAM_TP /* tensor parallelism's collectives */,
    STREAM_FETCH, STREAM_STORE, // of offloaded state
    // between stages of a pipeline: messages use four streams and the next four in turn
    STREAM_SEND_NEXT, STREAM_RECEIVE_NEXT, STREAM_SEND_PREVIOUS, STREAM_RECEIVE_PREVIOUS,
    STREAM_SEND_NEXT_2, STREAM_RECEIVE_NEXT_2, STREAM_SEND_PREVIOUS_2, STREAM_RECEIVE_PREVIOUS_2,
    STREAMS
} StreamKind;
static const char *const stream_names[STREAMS] = {
    "compute", "gather", "reduce", "tensor parallel",
    "fetch", "store",
    "send to next", "receive from next", "send to previous", "receive from previous",
    "send to next 2", "receive from next 2", "send to previous 2", "receive from previous 2",
};
// clang-format on

typedef struct CUevent_st *DeviceEvent; // CUDA's event; on a CPU NULL, or in a dry run a number

typedef struct {
    int kind;          // a buffer serves units of one kind
    void *memory;      // (largest unit of that kind)
    size_t taken;      // bytes; 0: the buffer is free
    DeviceEvent freed; // GPU: the previous user's work on the buffer has ended
} PoolBuffer;

typedef struct {
    PoolKind contents;
    PoolBuffer buffers[40];
    int count;
} BufferPool;

/* What a dry run tells the simulation of a GPU's streams; programs/plan/comm_events.h lists it. */
typedef struct StreamRecorder {
    /* The stream records the event of that number, from 1, or waits for it. */
    void (*point)(struct StreamRecorder *, StreamKind stream, int32_t event, int is_wait);
    int32_t events;          // recorded so far
    double compute[STREAMS]; // seconds of arithmetic of each stream since its last point or communication event
} StreamRecorder;

typedef enum { EVENT_OP, EVENT_WAIT, EVENT_PHASE, EVENT_STEP, EVENT_COMM, EVENT_MEMORY } EventKind;

/* An entry of the timeline, of a run with --trace or of a dry run. */
typedef struct {
    const char *name, *of; // what happened, and to what; `of` may be NULL
    double start, end;     // seconds
    double amount;         // an op's FLOPs, a collective's bytes from other ranks, a step's number, bytes in use
    int kind;              // EventKind
    int lane;              // a stream, or a lane of comm.h
} Event;

enum { MAX_EVENTS = 1 << 18 };

/* Something that lasts from span_begin to span_end. */
typedef struct {
    double start;      // seconds
    int64_t event;     // its index in the timeline
    DeviceEvent begun; // on a GPU: recorded in the stream at its start; NULL: the host's clock counts
} Span;

/* On a GPU: a span whose end is recorded in its stream, which may not have reached it yet. */
typedef struct {
    Span span;
    DeviceEvent ended;
    double *seconds; // its duration is added here; NULL: nowhere
    int line;        // of a collective: its line in the heartbeat table (watchdog.h); -1: not a collective
    int64_t number;  // of a collective: its number on that line, from 1
} OpenSpan;

// ---------------------------------------------------------------------------
// the recorder and the device

/* What a device counts, times and lists. Nothing that is computed depends on it. recorder.h fills it in. */
typedef struct {
    OpStat ops[OP_COUNT];        // the ledger of ops
    Buffer buffers[MAX_BUFFERS]; // (num_buffers)
    int num_buffers;
    size_t in_use[POOLS]; // bytes
    size_t peak;          // the most bytes that all arenas together held at once, offloaded ones apart
    char peak_when[96];   // during which phase, and which buffer was the last
    Event *events;        // (max_events) the timeline; NULL: not kept
    int64_t num_events;   // counted even if the timeline is not kept or is full
    int64_t max_events;
    Span op_span, phase;    // those that have begun last
    int in_phase;           // `phase` is timed
    const char *phase_name; // forward, backward, …; NULL: none
    const char *phase_of;   // the unit that it concerns, or NULL
    const OpTimes *times;   // dry run: estimates each op's time; NULL: ops take no time
    double clock;           // dry run: seconds of computing since its step began; of a GPU, on its compute stream
    StreamRecorder *stream_recorder; // dry run of a GPU: lists what its streams do; NULL: nothing does
    Activity *activity;              // shared with other ranks' view of this one; NULL: nobody looks
    void (*comm_finished)(void *, int line, int64_t number, double start, double end); // the GPU finished a collective
#ifdef USE_CUDA
    DeviceEvent zero;     // GPU times are measured from this event
    double zero_seconds;  // when it happened, by the host's clock
    OpenSpan *open_spans; // (num_open, room for max_open) in the order of their ends
    int num_open, max_open;
    DeviceEvent *spare_events; // (num_spare, room for max_spare) for spans to use
    int num_spare, max_spare;
    int64_t settled; // spans and phases that the GPU has finished
#endif
} Recorder;

typedef struct {
    OpStream on;          // the rank's threads, or its GPU's current stream
    int dry_run;          // count everything, compute nothing, touch no memory
    int gpu;              // number of this rank's GPU on its host
    int by_nccl;          // NCCL carries the collectives of GPU memory
    int reductions_apart; // NCCL: reductions over fsdp have a communicator of their own
    int left_to_nccl[2];  // multiprocessors that persistent kernels of forward and of backward leave to it

    Arena arenas[MEM_CATEGORIES];
    OpKind op;       // the running op
    int recomputing; // ops that run now recompute activations
    StreamKind current_stream;
    unsigned streams_used;      // bit i: the run uses stream i, as its dry run found; 0 on a CPU
    DeviceEvent order[STREAMS]; // how far each stream has come, for another stream to wait for
    Recorder rec;

    /* Set by comm.h, called with poll_arg. */
    void (*poll)(void *);                 // lets collectives progress between ops; NULL: none is in flight
    void (*watch)(void *, double waited); // checks the timeout while the host waits for the GPU, and with 0 after it
    void *poll_arg;

#ifdef USE_CUDA
    cudaStream_t streams[STREAMS];
    DeviceEvent phases[4]; // the starts of the last phases
    int64_t num_phases;
#endif
} Device;

/* Seconds: the host's clock, or in a dry run its estimate. */
static inline double device_now(const Device *dev) { return dev->dry_run ? dev->rec.clock : seconds_now(); }

/* The largest number of bytes in arenas that are offloaded, or that are not. */
static inline size_t device_arenas(const Device *dev, int offloaded) {
    size_t sum = 0;
    for (int c = 0; c < MEM_CATEGORIES; c++)
        if (dev->arenas[c].offloaded == offloaded) sum += dev->arenas[c].peak;
    return sum;
}
static inline size_t device_peak(const Device *dev) { return device_arenas(dev, 0); }

#endif
