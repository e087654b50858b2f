/* fsdp.h: data parallelism written out: FSDP (ZeRO-3), ZeRO-2, DDP, and hybrids of them.
 *
 * A unit (the embedding, a block or a few, the head) is one flat buffer of its tensors. The ranks of the `fsdp` group
 * each own an equal range of it, their shard: master weights, gradient and Adam's moments, 16 bytes an element.
 * The vocabulary is three verbs: unshard_start, fsdp_reshard, fsdp_reduce_gradients; a strategy is a row that says when
 * each takes effect. The model asks for fsdp_unshard and fsdp_gradients. Under full_shard a full-size buffer exists
 * only in a slot, and there are few slots: they are the limit on what is in flight. Beside adapters the model's own
 * units are frozen: weights as they are gathered, in the compute dtype or as blocks of 8 bits, and nothing else;
 * fsdp_unshard widens the latter into a slot. Nobody asks for their gradients.
 */
#ifndef FSDP_H
#define FSDP_H
#include "lib/comm.h"
#include "llama3.h"
#include "lib/ops.h"

// ---------------------------------------------------------------------------
// strategies

/* Who asks to free a unit. Of a strategy: from which pass on it is freed indeed. */
typedef enum {
    AFTER_FORWARD,
    AFTER_BACKWARD,
    AFTER_LAST_USE /* nothing in this step needs it any more */,
    RESHARD_NEVER
} ReshardPoint;

typedef struct {
    const char *name;
    int sharded; // state (master, gradient, moments): this rank's shard of each unit, and gradients are
                 // reduce-scattered; else all of it is on every rank, weights need no gathering, and gradients are
                 // all-reduced
    ReshardPoint reshard; // gathered weights; they are gathered again when they are needed next
} Strategy;

static const Strategy strategies[] = {
    //               sharded   weights freed
    {"full_shard", 1, AFTER_FORWARD},     // FSDP, ZeRO-3
    {"shard_grad_op", 1, AFTER_LAST_USE}, // ZeRO-2
    {"no_shard", 0, RESHARD_NEVER},       // DDP
};
#define STRATEGY_NAMES "full_shard|shard_grad_op|no_shard"
enum { STRATEGIES = sizeof strategies / sizeof strategies[0] };

static const Strategy *strategy_find(const char *name) {
    for (int i = 0; i < STRATEGIES; i++)
        if (!strcmp(name, strategies[i].name)) return &strategies[i];
    return NULL;
}

typedef struct { // how a run shards: the options that fsdp.h goes by
    const Strategy *strategy;
    int slots;              // gathered blocks in flight
    int micro_batches;      // micro-batches a step
    int accumulate_locally; // micro-batches are summed unsharded on each rank, and over ranks once a step
    int deterministic;      // micro-batches are summed as a binary tree
    Dtype reduce_dtype;     // in which gradients travel; they are summed in fp32
    int transport_sums;     // the transport sums them on their way, in an order of its own, and in that dtype
    int check_replicas;     // what replicas have in common will be compared
    int writes_files;       // files will be written
    int merges_adapters;    // … and adapters added to the frozen weights there
} Sharding;

// ---------------------------------------------------------------------------
// what a rank has of each unit

enum { MAX_SLOTS = 20, GRADIENT_SLOTS = 2, MAX_CASCADE = 21 };

/* Weights of 8 bits as they are kept and gathered: the parts of all ranks one behind the other, each its blocks' bytes,
 * their scales, then its elements that are in no block, as of norms, in the compute dtype. A cut between ranks is one
 * between blocks. */
typedef struct {
    int64_t shards, blocks, unquantized, bytes;
} QuantizedLayout; // how many parts (0: the weights are not in 8 bits); of a part

typedef struct {
    const Unit *unit;
    int64_t padded; // the unit's size rounded up, so that what a rank of a replica owns is a multiple of TENSOR_ALIGN
    int64_t shard_size;               // padded / ranks: what a reduce-scatter leaves this rank, element rank × part on
    int64_t state_begin, state_count; // the elements that this rank keeps state of: its part; without sharding all
    int64_t replica_begin, replica_count; // the elements that nobody else answers for: its part divided among replicas
    float *master;                        // (held) weights in fp32
    float *grad;                          // (held) sum over ranks and micro-batches of the gradient of the summed loss
    float
        *accumulated; // sum over micro-batches: within grad, or, accumulated_size locally, (padded) of this rank alone
    float *partial_sums
        [MAX_CASCADE]; // as total; deterministic: sums of 1, 2, 4, … micro-batches that wait for their neighbour
    float *exp_avg, *exp_avg_sq; // (held) AdamW's moments
    floatX *
        sharded_weights; // (held) the weights as they are gathered; in fp32 the master itself. In 8 bits: bytes, as QuantizedLayout says
    floatX *
        persistent_weights; // (padded) where they are gathered to, when they stay for the step; NULL: a slot. On a GPU the host
                            // waits between one use and the next, as it reads a step's sums or writes a batch
    floatX *unsharded_weights;   // (padded) while gathered, else NULL
    floatX *dequantized_weights; // (padded) of 8 bits, while they are computed with, else NULL
    QuantizedLayout quantized;
    float *unsharded_gradient; // (padded) while this unit's gradient is made or reduced, else NULL
    Request all_gather;
} FsdpUnit;

typedef struct {
    UnitKind kind; // blocks share slots; embedding and head have their own
    void *memory;  // (largest padded unit of that kind)
    int taken;
    DeviceEvent freed; // on a GPU: who had it last is through with it
} PoolBuffer;

/* What AdamW reads and writes of a unit. */
typedef enum { STATE_MASTER, STATE_GRAD, STATE_EXP_AVG, STATE_EXP_AVG_SQ, STATE_COPY, STATES } StateKind;
static const struct {
    MemCategory category;
    size_t element;
    int written;
} states[STATES] = {{MEM_PARAMS, sizeof(float), 1},
                    {MEM_GRADS, sizeof(float), 0},
                    {MEM_OPTIMIZER, sizeof(float), 1},
                    {MEM_OPTIMIZER, sizeof(float), 1},
                    {MEM_PARAMS, sizeof(floatX), 1}};

typedef struct {        // of one unit
    void *at[STATES];   // (held) where AdamW computes with it; NULL: there is none, as of the copy in fp32
    void *near[STATES]; // where it comes to; NULL: it does not lie elsewhere
    DeviceEvent fetched, stored;
} Staged;

/* What a unit's gradient goes through, in this order: one unit at a stage, so that all stages travel at once. */
typedef enum { REDUCE_SHARDS, REDUCE_REPLICAS, GATHER_REPLICAS, GATHER_SHARDS, REDUCTION_STEPS } ReductionStepKind;

typedef struct {
    FsdpUnit *unit; // NULL: the stage is empty
    int micro;
    Request request;
    bf16 *rounded; // what is sent, where gradients travel in bf16
    void *receive; // what comes: of a reduction the pieces of all members; of a gather only in bf16, else it lands in
                   // place
} ReductionStep;

typedef struct {
    Comm *comm;
    Device *dev;
    const TensorTable *table;
    const Llama3Config *config;
    Sharding sharding;
    int ranks, rank;       // of the fsdp group
    int replicas, replica; // of the dp_replicate group
    FsdpUnit *units;       // (table->num_units)
    PoolBuffer weight_slots[2 * MAX_SLOTS], gradient_slots[MAX_SLOTS], widened_slots[MAX_SLOTS];
    int num_weight_slots, num_gradient_slots, num_widened_slots;
    Staged staged[2];                                            // one is computed with while the other comes and goes
    int weights_offloaded, gradients_offloaded, state_offloaded; // these lie in the slow tier, where nothing computes
    ReductionStep reductions[REDUCTION_STEPS];
    int accumulates_unsharded; // micro-batches are summed on this rank first: --accumulate local, or DDP's only one, straight in
                               // its place
    int rounds_micro_batches; // bf16: each micro-batch's gradient is rounded even where it goes nowhere, as on any other
                              // layout
    uint64_t seed;            // of the initial weights
    uint64_t *
        local_fingerprints; // (units) fingerprints of this rank's weights, where they are made; NULL: no rank has the same
                            // weights, or it is not checked
    uint64_t *fingerprints; // (1 + replicas, units) the same where the host reads them, and those of all ranks that
                            // must have the same
    float *
        tp_replicated_gradients; // (1 + tp, most at a time) gradients of what tensor parallelism does not split; NULL: tp is 1
    float *tied_gradient;        // (2, held) of a tied weight: of the other end of the pipeline, and what goes there
    Request tied_requests[2];
    int tree_levels; // deterministic: levels of partial sums; 0: each micro-batch is added to the sum so far
} Fsdp;

/* Is all of a unit's weights on this rank at all times, where it can compute with them? */
static int weights_are_resident(const Fsdp *f) {
    return (f->ranks == 1 || !f->sharding.strategy->sharded) && !f->weights_offloaded;
}

// ---------------------------------------------------------------------------
// slots

/* What is in a slot. */
typedef enum {
    SLOT_STORED,
    SLOT_WIDENED,
    SLOT_GRADIENT
} SlotUse; // weights as they are gathered; of 8 bits, as they are computed with; in fp32

/* Bytes of a unit's weights as they are gathered, of all ranks. */
static size_t unsharded_bytes(const FsdpUnit *u) {
    return u->quantized.shards ? (size_t)(u->quantized.shards * u->quantized.bytes)
                               : sizeof(floatX) * (size_t)u->padded;
}

/* … and of this rank's part of them. */
static size_t sharded_bytes(const Fsdp *f, const FsdpUnit *u) {
    return f->sharding.strategy->sharded ? unsharded_bytes(u) / (size_t)f->ranks : unsharded_bytes(u);
}

static void slots_add(Fsdp *f, PoolBuffer *slots, int *count, UnitKind kind, int how_many, const char *name,
                      SlotUse use) {
    size_t largest = 0;
    for (int i = 0; i < f->table->num_units; i++) {
        const FsdpUnit *u = &f->units[i];
        size_t bytes = use == SLOT_STORED ? unsharded_bytes(u)
                                          : (use == SLOT_WIDENED ? sizeof(floatX) : sizeof(float)) * (size_t)u->padded;
        if (u->unit->kind == kind && (use != SLOT_WIDENED || u->quantized.shards) && bytes > largest) largest = bytes;
    }
    for (int i = 0; i < how_many && largest; i++) {
        PoolBuffer *s = &slots[(*count)++];
        s->kind = kind;
        s->taken = 0;
        s->memory = arena_alloc(f->dev, MEM_COMM, name, largest);
    }
}

static PoolBuffer *slot_find(PoolBuffer *slots, int count, UnitKind kind) {
    for (int i = 0; i < count; i++)
        if (slots[i].kind == kind && !slots[i].taken) return &slots[i];
    return NULL;
}

static void slot_release(Device *dev, PoolBuffer *slots, int count, const void *memory) {
    for (int i = 0; i < count; i++)
        if (slots[i].memory == memory) slots[i].taken = 0, device_record(dev, &slots[i].freed);
}

// ---------------------------------------------------------------------------
// gather and free

static void *slot_take(Fsdp *f, PoolBuffer *slots, int count, const FsdpUnit *u, const char *what) {
    PoolBuffer *slot = slot_find(slots, count, u->unit->kind);
    if (!slot) run_failure("rank %d: no free slot for %s of %s", f->comm->rank, what, u->unit->name);
    slot->taken = 1;
    comm_await(f->comm, slot->freed, u->unit->name);
    return slot->memory;
}

/* Starts gathering a unit's weights from all shards. Where this rank has all of them nothing moves, unless they are
 * offloaded. */
static void unshard_start(Fsdp *f, FsdpUnit *u) {
    if (u->unsharded_weights) return;
    if (weights_are_resident(f)) {
        u->unsharded_weights = u->sharded_weights;
        return;
    }
    StreamKind before = device_stream(f->dev, STREAM_GATHER);
    u->unsharded_weights = u->persistent_weights
                               ? u->persistent_weights
                               : (floatX *)slot_take(f, f->weight_slots, f->num_weight_slots, u, "the weights");
    size_t held = sharded_bytes(f, u);
    void *mine = u->sharded_weights;
    if (f->weights_offloaded)
        device_copy(f->dev,
                    mine = (char *)u->unsharded_weights + (u->state_count < u->padded ? (size_t)f->rank * held : 0),
                    u->sharded_weights, held);
    if (u->state_count < u->padded)
        collective_start(f->comm, &u->all_gather, ALL_GATHER, AXIS_FSDP, u->unit->name, mine, u->unsharded_weights,
                         u->quantized.shards ? held : (size_t)u->shard_size, u->quantized.shards ? DTYPE_BYTE : FLOATX);
    else request_enqueued(f->comm, &u->all_gather, u->unit->name);
    device_stream(f->dev, before);
}

/* Gathers ahead of need, as far as free slots reach. */
static void fsdp_prefetch(Fsdp *f, FsdpUnit *u) {
    if (weights_are_resident(f) || u->persistent_weights ||
        slot_find(f->weight_slots, f->num_weight_slots, u->unit->kind))
        unshard_start(f, u);
}

/* A tensor whose unit's weights came as bytes, into `out`: part by part, as its elements lie. */
static void tensor_widen(Fsdp *f, const FsdpUnit *u, const Tensor *t, floatX *out) {
    const QuantizedLayout *p = &u->quantized;
    int64_t count = t->rows * t->cols,
            each = t->int8_block < 0 ? p->unquantized
                                     : p->blocks * INT8_BLOCK; // elements of a part, of this tensor's sort
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t at = (t->int8_block < 0 ? t->unquantized_offset : t->int8_block * INT8_BLOCK) + done,
                within = at % each;
        const char *part = (const char *)u->unsharded_weights + at / each * p->bytes;
        n = min_i64(count - done, each - within);
        if (t->int8_block >= 0)
            dequantize(f->dev, out + done, (const int8_t *)part + within,
                       (const float *)(const void *)(part + p->blocks * INT8_BLOCK) + within / INT8_BLOCK, n);
        else
            device_copy(f->dev, out + done,
                        part + p->blocks * (int64_t)(INT8_BLOCK + sizeof(float)) + within * (int64_t)sizeof(floatX),
                        sizeof(floatX) * (size_t)n);
    }
}

/* The gathered weights, (padded), valid until fsdp_reshard; waits for their arrival. Those of 8 bits are widened. */
static const floatX *fsdp_unshard(Fsdp *f, FsdpUnit *u) {
    unshard_start(f, u);
    collective_wait(f->comm, &u->all_gather);
    if (!u->quantized.shards) return u->unsharded_weights;
    if (u->dequantized_weights) return u->dequantized_weights;
    u->dequantized_weights =
        (floatX *)slot_take(f, f->widened_slots, f->num_widened_slots, u, "weights of 8 bits, widened");
    for (int i = u->unit->first_tensor; i < u->unit->first_tensor + u->unit->num_tensors; i++)
        tensor_widen(f, u, &f->table->tensors[i], u->dequantized_weights + f->table->tensors[i].offset);
    return u->dequantized_weights;
}

/* `pass` is through with the unit: frees its weights, if the strategy frees them there. */
static void fsdp_reshard(Fsdp *f, FsdpUnit *u, ReshardPoint pass) {
    slot_release(f->dev, f->widened_slots, f->num_widened_slots, u->dequantized_weights);
    u->dequantized_weights = NULL;
    if (pass < (f->weights_offloaded && f->sharding.strategy->reshard == RESHARD_NEVER ? AFTER_FORWARD
                                                                                       : f->sharding.strategy->reshard))
        return; // what was fetched does not stay
    slot_release(f->dev, f->weight_slots, f->num_weight_slots, u->unsharded_weights);
    u->unsharded_weights = NULL;
}

// ---------------------------------------------------------------------------
// gradients and their reduction

/* Does the backward pass write this tensor's gradient with `=` (one product), not add to it? */
static int gradient_is_assigned(const TensorTable *t, const Tensor *tensor) {
    WeightKind kind = tensor->row->kind;
    int tied_head = kind == W_EMBED && table_is_tied(t); // the head's product comes first, then the embedding adds
    return tensor->row->rows != DIM_ONE && (kind != W_EMBED || tied_head);
}

/* Zeroes what backward adds to, and the gaps between tensors and at the end: padding is zero and stays zero. */
static void gradients_clear(Fsdp *f, const FsdpUnit *u) {
    int64_t written = 0;
    for (int i = u->unit->first_tensor; i < u->unit->first_tensor + u->unit->num_tensors; i++) {
        const Tensor *t = &f->table->tensors[i];
        int64_t end = t->offset + t->rows * t->cols;
        int64_t zeros = (gradient_is_assigned(f->table, t) ? t->offset : end) - written;
        device_zero(f->dev, u->unsharded_gradient + written, sizeof(float) * (size_t)zeros);
        written = end;
    }
    device_zero(f->dev, u->unsharded_gradient + written, sizeof(float) * (size_t)(u->padded - written));
}

/* Elements of a unit's sum over micro-batches: its shard's, or all of them. */
static int64_t accumulated_size(const Fsdp *f, const FsdpUnit *u) {
    return f->accumulates_unsharded ? u->padded : u->shard_size;
}

/* The part of the gradient that this rank's reduce-scatter yields; the piece of it that this replica answers for. */
static float *shard_gradient(const Fsdp *f, const FsdpUnit *u) {
    return u->grad + (f->rank * u->shard_size - u->state_begin);
}
static float *replica_gradient(const FsdpUnit *u) { return u->grad + (u->replica_begin - u->state_begin); }

/* Where the gradient of micro-batch `micro` goes first; whether it replaces what is there. */
static float *accumulate_into(Fsdp *f, FsdpUnit *u, int micro, int *replace) {
    *replace = f->tree_levels ? micro % 2 == 0 : micro == 0;
    return f->tree_levels ? u->partial_sums[0] : u->accumulated;
}

/* Deterministic: micro-batches are summed as a binary tree too, by cascade (Knuth's binary counter): two sums of as
 * many micro-batches become one, a level up. The last micro-batch gathers what is left; u->total is the sum of all. */
static void accumulate_finish(Fsdp *f, FsdpUnit *u, int micro) {
    int level = 0, last = micro == f->sharding.micro_batches - 1;
    for (int bits = micro; f->tree_levels && level + 1 < f->tree_levels && (bits & 1 || last); bits >>= 1, level++) {
        int waits = micro >> (level + 1) & 1; // a sum of the next level waits: add to it; else move up
        if (waits)
            tree_sum(f->dev, u->partial_sums[level + 1], u->partial_sums[level], DTYPE_F32, 1, accumulated_size(f, u),
                     1);
        else {
            float *up = u->partial_sums[level];
            u->partial_sums[level] = u->partial_sums[level + 1], u->partial_sums[level + 1] = up;
        }
    }
    if (f->tree_levels && last) u->accumulated = u->partial_sums[level];
    if (f->accumulates_unsharded) return;
    if (u->state_count == u->shard_size) u->grad = u->accumulated;
    else if (last && u->accumulated != shard_gradient(f, u))
        tree_sum(f->dev, shard_gradient(f, u), u->accumulated, DTYPE_F32, 1, u->shard_size, 0);
}

static void gradient_release(Fsdp *f, FsdpUnit *u) {
    slot_release(f->dev, f->gradient_slots, f->num_gradient_slots, u->unsharded_gradient);
    u->unsharded_gradient = NULL;
}

/* A micro-batch's gradient is on this rank alone (there is one rank, or it is summed over ranks later): adds it up
 * here. */
static void accumulate_here(Fsdp *f, FsdpUnit *u, int micro) {
    int replace;
    float *sum = accumulate_into(f, u, micro, &replace);
    if (f->rounds_micro_batches) {
        cast_to_bf16(f->dev, f->reductions[REDUCE_SHARDS].rounded, u->unsharded_gradient, u->padded);
        tree_sum(f->dev, sum, f->reductions[REDUCE_SHARDS].rounded, DTYPE_BF16, 1, u->padded, !replace);
    } else if (u->unsharded_gradient != sum) {
        tree_sum(f->dev, sum, u->unsharded_gradient, DTYPE_F32, 1, u->padded, !replace);
    }
    accumulate_finish(f, u, micro);
    gradient_release(f, u);
}

/* Does the gradient of micro-batch `micro` go through this stage? */
static int reduction_applies(const Fsdp *f, ReductionStepKind kind, int micro) {
    int last = micro == f->sharding.micro_batches - 1,
        over_shards = f->ranks > 1 && (last || !f->accumulates_unsharded);
    if (kind == REDUCE_SHARDS) return over_shards;
    if (kind == GATHER_SHARDS) return over_shards && !f->sharding.strategy->sharded; // an all-reduce
    return f->replicas > 1 && last;                                                  // across replicas once a step
}

static void reduction_start(Fsdp *f, ReductionStepKind kind, FsdpUnit *u, int micro) {
    ReductionStep *s = &f->reductions[kind];
    int reduces = kind == REDUCE_SHARDS || kind == REDUCE_REPLICAS,
        shards = kind == REDUCE_SHARDS || kind == GATHER_SHARDS;
    int64_t piece = shards ? u->shard_size : u->replica_count,
            count = reduces ? piece * (shards ? f->ranks : f->replicas) : piece; // of a member; that this rank sends
    const float *from = kind == REDUCE_SHARDS     ? (f->accumulates_unsharded ? u->accumulated : u->unsharded_gradient)
                        : kind == GATHER_REPLICAS ? replica_gradient(u)
                                                  : shard_gradient(f, u);
    void *into = kind == GATHER_REPLICAS ? shard_gradient(f, u) : kind == GATHER_SHARDS ? u->grad : s->receive;
    if (s->rounded) cast_to_bf16(f->dev, s->rounded, from, count);
    s->request.summed = f->sharding.transport_sums;
    collective_start(f->comm, &s->request, reduces ? REDUCE_SCATTER : ALL_GATHER,
                     shards ? AXIS_FSDP : AXIS_DP_REPLICATE, u->unit->name,
                     s->rounded ? (const void *)s->rounded : from, s->rounded ? s->receive : into, (size_t)piece,
                     f->sharding.reduce_dtype);
    s->unit = u;
    s->micro = micro;
}

/* What a stage received is put where it belongs; a reduction's pieces are summed as a binary tree, in fp32. */
static void reduction_finish(Fsdp *f, ReductionStepKind kind) {
    ReductionStep *s = &f->reductions[kind];
    FsdpUnit *u = s->unit;
    int replace = 1;
    collective_wait(f->comm, &s->request);
    if (kind == REDUCE_SHARDS) {
        float *sum = f->accumulates_unsharded ? shard_gradient(f, u) : accumulate_into(f, u, s->micro, &replace);
        tree_sum(f->dev, sum, s->receive, f->sharding.reduce_dtype, f->sharding.transport_sums ? 1 : f->ranks,
                 u->shard_size, !replace);
        if (!f->accumulates_unsharded) accumulate_finish(f, u, s->micro);
        gradient_release(f, u);
    }
    if (kind == REDUCE_REPLICAS)
        tree_sum(f->dev, replica_gradient(u), s->receive, f->sharding.reduce_dtype,
                 f->sharding.transport_sums ? 1 : f->replicas, u->replica_count, 0);
    if (kind == GATHER_REPLICAS && s->rounded)
        tree_sum(f->dev, shard_gradient(f, u), s->receive, DTYPE_BF16, 1, u->shard_size, 0);
    int last = s->micro ==
               f->sharding.micro_batches -
                   1; // what an all-reduce brings before that nobody uses, and it would round this rank's sum so far
    if (kind == GATHER_SHARDS && s->rounded && last) tree_sum(f->dev, u->grad, s->receive, DTYPE_BF16, 1, u->padded, 0);
    s->unit = NULL;
}

/* Moves every gradient in flight on by a stage. `entering`: one whose first stage begins; NULL: none. Returns how many
 * are in flight. On a GPU all of that is one stream's, which the compute stream waits for only where it needs a slot,
 * or the sums. */
static int reductions_advance(Fsdp *f, FsdpUnit *entering, int entering_micro) {
    int in_flight = 0;
    if (entering) device_order(f->dev, STREAM_REDUCE, STREAM_COMPUTE); // its gradient is made there
    StreamKind before = device_stream(f->dev, STREAM_REDUCE);
    for (int from = REDUCTION_STEPS - 1; from >= -1; from--) { // the furthest first: it makes room for the next
        FsdpUnit *u = from < 0 ? entering : f->reductions[from].unit;
        int micro = from < 0 ? entering_micro : f->reductions[from].micro, to = from + 1;
        if (!u) continue;
        if (from >= 0) reduction_finish(f, (ReductionStepKind)from);
        while (to < REDUCTION_STEPS && !reduction_applies(f, (ReductionStepKind)to, micro)) to++;
        if (to < REDUCTION_STEPS) reduction_start(f, (ReductionStepKind)to, u, micro), in_flight++;
    }
    device_stream(f->dev, before);
    return in_flight;
}

static void fsdp_finish_gradients(Fsdp *f) {
    while (reductions_advance(f, NULL, 0)) {}
    comm_await(f->comm, device_mark(f->dev, STREAM_REDUCE), "reductions");
}

/* Where backward leaves the gradient of micro-batch `micro`, (padded), made from zero.
 * Where it stays on this rank and there is no sum to add to, straight into its place. */
static float *fsdp_gradients(Fsdp *f, FsdpUnit *u, int micro) {
    for (int s = 0; s < REDUCTION_STEPS; s++)
        if (f->reductions[s].unit == u) fsdp_finish_gradients(f); // tied: last to be reduced, first to be made again
    if (u->unsharded_gradient) return u->unsharded_gradient;
    int replace,
        stays = (f->ranks == 1 || f->accumulates_unsharded) && !f->rounds_micro_batches && !f->gradients_offloaded;
    float *sum = accumulate_into(f, u, micro, &replace);
    u->unsharded_gradient =
        stays && replace ? sum : (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "the gradient");
    gradients_clear(f, u);
    return u->unsharded_gradient;
}

/* Starts the sum of a unit's gradient over all ranks: over the fsdp group by a reduce-scatter made of an all-to-all and
 * a sum in a fixed order, then over replicas, then, without sharding, everybody gets all of it. It travels while the
 * next blocks compute. Accumulated locally, that is done once a step, with the sum of all micro-batches. */
static void fsdp_reduce_gradients(Fsdp *f, FsdpUnit *u, int micro) {
    for (int s = 0; s < REDUCTION_STEPS;
         s++) // of an interleaved pipeline: one run of blocks is at its last micro-batch before
              // another one, whose gradients, with fewer stages, must not overtake
        if (f->reductions[s].unit && reduction_applies(f, REDUCE_REPLICAS, f->reductions[s].micro) &&
            !reduction_applies(f, REDUCE_REPLICAS, micro) && reduction_applies(f, GATHER_SHARDS, micro))
            while (reductions_advance(f, NULL, 0)) {}
    if (f->ranks == 1 || f->accumulates_unsharded) accumulate_here(f, u, micro);
    reductions_advance(f, u, micro);
}

// ---------------------------------------------------------------------------
// loops over the shards

typedef struct {
    FsdpUnit *unit;
    const Tensor *tensor;
    int64_t first, count, at;
} ShardPiece; // element first… of the rank's part of the tensor lies at at… of what the rank holds

/* Does another rank answer for what this one has of a tensor? What tensor parallelism does not split its first rank
 * owns, a tied weight the embedding. */
static int is_owned_elsewhere(const Fsdp *f, const Tensor *t) {
    return t->is_tied_copy || (t->row->split == SPLIT_NONE && f->table->part.tp_rank > 0);
}

/* Visits each trained tensor's elements that this rank holds, or, with `owned`, of which every element of the model is
 * visited by one rank alone; in table order. Padding belongs to no tensor: nobody visits it. */
static int next_piece(const Fsdp *f, int *i, ShardPiece *piece, int owned) {
    while (*i < f->table->num_tensors) {
        const Tensor *t = &f->table->tensors[(*i)++];
        FsdpUnit *u = &f->units[t->unit];
        if (u->unit->frozen) continue; // it has no state
        int64_t begin = owned ? u->replica_begin : u->state_begin, count = owned ? u->replica_count : u->state_count;
        if (owned && is_owned_elsewhere(f, t)) continue;
        piece->unit = u;
        piece->tensor = t;
        piece->count = tensor_overlap(t, begin, begin + count, &piece->first);
        piece->at = t->offset + piece->first - u->state_begin;
        if (piece->count) return 1;
    }
    return 0;
}
static int next_state_piece(const Fsdp *f, int *i, ShardPiece *piece) { return next_piece(f, i, piece, 0); }
static int next_unique_piece(const Fsdp *f, int *i, ShardPiece *piece) { return next_piece(f, i, piece, 1); }

/* The compute copy follows the master; needed once the master was set from outside AdamW. */
static void fsdp_refresh_copies(Fsdp *f) {
    for (int u = 0; u < f->table->num_units; u++)
        if (f->units[u].master && (void *)f->units[u].sharded_weights != (void *)f->units[u].master)
            cast_to_bf16(f->dev, (bf16 *)(void *)f->units[u].sharded_weights, f->units[u].master,
                         f->units[u].state_count);
    device_order(f->dev, STREAM_GATHER, STREAM_COMPUTE);
}

static void *state_of(const FsdpUnit *u, StateKind k) {
    void *const all[STATES] = {u->master, u->grad, u->exp_avg, u->exp_avg_sq,
                               (void *)u->sharded_weights == (void *)u->master ? NULL : u->sharded_weights};
    return all[k];
}

/* Elements [first, first + count) of the whole tensor's state of one kind, made on the host. */
typedef void (*Fill)(const Fsdp *f, void *from, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                     int64_t count);

/* Elements [first, first + count) of the rank's part of a tensor, in fp32 as the file or the seed has them. */
static void fill_part(const Fsdp *f, Fill fill, void *from, StateKind kind, float *out, const Tensor *t, int64_t first,
                      int64_t count) {
    for (int64_t at = 0, run, whole; at < count; at += run) {
        run = min_i64(count - at, tensor_run(t, first + at, &whole));
        fill(f, from, kind, out + at, t, whole, run);
    }
}

/* Weights that come in 8 bits: bytes and scales of the blocks from element `first` on, which begins one. 0: this tensor
 * does not. */
typedef int (*FillBlocks)(void *from, int8_t *out, float *scales, const Tensor *tensor, int64_t first, int64_t count);

static int fill_part_blocks(FillBlocks fill, void *from, int8_t *out, float *scales, const Tensor *t, int64_t first,
                            int64_t count) {
    for (int64_t at = 0, run, whole; at < count; at += run) { // tp cuts between blocks
        run = min_i64(count - at, tensor_run(t, first + at, &whole));
        if (!fill(from, out + at, scales + at / INT8_BLOCK, t, whole, run)) return 0;
    }
    return 1;
}

/* Sets what this rank holds of one kind of state, a chunk at a time. */
static void fsdp_set_state(Fsdp *f, StateKind kind, Fill fill, void *from) {
    enum { CHUNK = 1 << 20 };
    float *chunk = (float *)checked_malloc(sizeof(float) * CHUNK);
    ShardPiece p;
    for (int i = 0; next_state_piece(f, &i, &p) && !f->dev->dry_run;)
        for (int64_t done = 0, n; done < p.count; done += n) {
            n = min_i64(CHUNK, p.count - done);
            fill_part(f, fill, from, kind, chunk, p.tensor, p.first + done, n);
            device_write(f->dev, (float *)state_of(p.unit, kind) + p.at + done, chunk, sizeof(float) * (size_t)n);
            comm_alive(f->comm);
        }
    free(chunk);
    if (kind == STATE_MASTER) fsdp_refresh_copies(f);
}

/* Sets what this rank holds of the frozen units, a chunk at a time: rounded to the compute dtype, or to blocks of 8
 * bits, unless they come as such by `fill_blocks` (NULL: none does). */
static void fsdp_set_base(Fsdp *f, Fill fill, FillBlocks fill_blocks, void *from) {
    enum { CHUNK = 1 << 20 }; // elements: whole blocks
    if (f->config->base == BASE_TRAINED || f->dev->dry_run) return;
    float *wide = (float *)checked_malloc(sizeof(float) * CHUNK);
    char *narrow = (char *)checked_malloc(CHUNK * sizeof(floatX));
    float *scales = (float *)checked_malloc(sizeof(float) * CHUNK / INT8_BLOCK);
    for (int i = 0; i < f->table->num_tensors; i++) {
        const Tensor *t = &f->table->tensors[i];
        FsdpUnit *u = &f->units[t->unit];
        const QuantizedLayout *p = &u->quantized;
        int64_t elements = t->rows * t->cols, part = f->sharding.strategy->sharded ? f->rank : 0, first = 0,
                count = elements, to;
        char *place = (char *)u->sharded_weights;
        if (!u->unit->frozen) continue;
        if (!p->shards)
            count = tensor_overlap(t, u->state_begin, u->state_begin + u->state_count, &first),
            to = t->offset + first - u->state_begin;
        else { // what of the tensor is in this rank's part
            int64_t each = t->int8_block < 0 ? p->unquantized : p->blocks * INT8_BLOCK,
                    at = t->int8_block < 0 ? t->unquantized_offset : t->int8_block * INT8_BLOCK;
            first = max_i64(0, part * each - at), count = max_i64(0, min_i64(elements, (part + 1) * each - at) - first),
            to = at + first - part * each;
            if (t->int8_block < 0) place += p->blocks * (int64_t)(INT8_BLOCK + sizeof(float));
        }
        for (int64_t done = 0, n; done < count; done += n) {
            n = min_i64(CHUNK, count - done);
            int64_t blocks = int8_blocks(n);
            int as_it_is = t->int8_block >= 0 && fill_blocks &&
                           fill_part_blocks(fill_blocks, from, (int8_t *)narrow, scales, t, first + done, n);
            if (!as_it_is) fill_part(f, fill, from, STATE_MASTER, wide, t, first + done, n);
            if (t->int8_block >= 0) {
                for (int64_t b = 0; b < blocks && !as_it_is; b++)
                    scales[b] = quantize_int8_block((int8_t *)narrow + b * INT8_BLOCK, wide + b * INT8_BLOCK,
                                                    min_i64(INT8_BLOCK, n - b * INT8_BLOCK));
                device_write(f->dev, place + to + done, narrow, (size_t)n);
                device_write(f->dev, place + p->blocks * INT8_BLOCK + (to + done) / INT8_BLOCK * (int64_t)sizeof(float),
                             scales, sizeof(float) * (size_t)blocks);
            } else {
                for (int64_t e = 0; e < n; e++) ((floatX *)(void *)narrow)[e] = from_float(wide[e]);
                device_write(f->dev, place + (to + done) * (int64_t)sizeof(floatX), narrow, sizeof(floatX) * (size_t)n);
            }
            comm_alive(f->comm);
        }
    }
    free(wide), free(narrow), free(scales);
    device_order(f->dev, STREAM_GATHER, STREAM_COMPUTE);
}

static void fill_at_random(const Fsdp *f, void *seed, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                           int64_t count) {
    (void)kind;
    tensor_init(out, tensor, f->config, *(const uint64_t *)seed, first, count, f->dev->threads);
}
static void fsdp_init_weights(Fsdp *f, uint64_t seed) {
    f->seed = seed;
    fsdp_set_base(f, fill_at_random, NULL, &seed);
    fsdp_set_state(f, STATE_MASTER, fill_at_random, &seed);
}

static const float *fsdp_gather_state(Fsdp *f, FsdpUnit *u, StateKind kind);
static void fsdp_release_state(Fsdp *f, const float *whole);

/* All of a frozen unit's weights in fp32, (padded), with what its adapters add to them. */
static const float *unit_merged(Fsdp *f, FsdpUnit *u) {
    const Llama3Config *c = f->config;
    float *whole = (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "all of its weights");
    tree_sum(f->dev, whole, fsdp_unshard(f, u), FLOATX, 1, u->padded, 0);
    fsdp_reshard(f, u, AFTER_LAST_USE);
    if (u->unit->kind != UNIT_BLOCK || !c->lora_rank) return whole;
    FsdpUnit *adapters = &f->units[table_block_adapters(f->table, u->unit->first_block)];
    const float *thin = fsdp_gather_state(f, adapters, STATE_MASTER);
    for (int i = u->unit->first_tensor; i < u->unit->first_tensor + u->unit->num_tensors; i++) {
        const Tensor *w = &f->table->tensors[i];
        int64_t block = (w->offset - u->unit->offsets[w->row->kind]) / f->table->block_stride *
                        f->table->adapters_stride; // where its block's adapters begin
        if (!is_adapted(c, w->row->kind)) continue;
        adapter_merge(f->dev, whole + w->offset, thin + block + adapters->unit->offsets[lora_a(w->row->kind)],
                      thin + block + adapters->unit->offsets[lora_b(w->row->kind)], adapter_scale(c), c->lora_rank,
                      w->cols, w->rows);
    }
    fsdp_release_state(f, thin);
    return whole;
}

/* All of a unit's state of one kind, (padded), in the device's memory: where it lies, or gathered from all shards to
 * where the unit's gradient is made in a step. Between steps; valid until fsdp_release_state. All ranks of the group
 * call it alike. */
static const float *fsdp_gather_state(Fsdp *f, FsdpUnit *u, StateKind kind) {
    float *mine = (float *)state_of(u, kind);
    if (u->unit->frozen) return unit_merged(f, u);
    if (u->state_count == u->padded) return mine;
    float *whole = (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "all of its state");
    if (f->dev->arenas[states[kind].category].slow && !SLOW_TIER_COMPUTES)
        device_copy(f->dev, whole + u->state_begin, mine, sizeof(float) * (size_t)u->state_count),
            mine = whole + u->state_begin;
    all_gather_now(f->comm, AXIS_FSDP, u->unit->name, mine, whole, sizeof(float) * (size_t)u->shard_size);
    return whole;
}
static void fsdp_release_state(Fsdp *f, const float *whole) {
    slot_release(f->dev, f->gradient_slots, f->num_gradient_slots, whole);
}

/* Adds the squares of what this rank owns of the gradient: exact over blocks that no cut divides, so the norm has the
 * same bits on any number of ranks. Padding is zero. */
static void fsdp_squared_norm(Fsdp *f, ExactSum *sum) {
    ShardPiece p;
    for (int u = 0, i; u < f->table->num_units; u++) {
        int all_owned = 1;
        const Unit *unit = &f->table->units[u];
        if (unit->frozen) continue;
        for (i = unit->first_tensor; i < unit->first_tensor + unit->num_tensors; i++)
            all_owned &= !is_owned_elsewhere(f, &f->table->tensors[i]);
        if (all_owned) squared_norm(f->dev, sum, replica_gradient(&f->units[u]), f->units[u].replica_count);
        for (i = unit->first_tensor; !all_owned && next_unique_piece(f, &i, &p) && p.unit == &f->units[u];)
            squared_norm(f->dev, sum, p.unit->grad + p.at, p.count);
    }
}

/* Elements that tensor parallelism does not split, of trained units [first, end). */
static int64_t tp_replicated_elements(const TensorTable *t, int first, int end) {
    int64_t n = 0;
    for (int i = 0; i < t->num_tensors; i++)
        if (t->tensors[i].unit >= first && t->tensors[i].unit < end && t->tensors[i].row->split == SPLIT_NONE &&
            !t->units[t->tensors[i].unit].frozen)
            n += t->tensors[i].rows * t->tensors[i].cols;
    return n;
}

/* How many units are summed over tp at once: norms are few, so all; of adapters, which are many, one. */
static int tp_replicated_units_at_once(const Fsdp *f) { return f->config->lora_rank ? 1 : f->table->num_units; }

/* What tensor parallelism does not split, the norms and one half of each adapter, has on each of its ranks the gradient
 * of that rank's rows of the sequence alone. Once a step it is gathered from all, and summed in the same order on each.
 */
static void fsdp_sum_tp_replicated(Fsdp *f) {
    const TensorTable *table = f->table;
    Group *tp = &f->comm->groups[AXIS_TP];
    for (int first = 0, end; first < table->num_units && tp->size > 1; first = end) {
        end = first + tp_replicated_units_at_once(f);
        int64_t n = tp_replicated_elements(table, first, end), at;
        float *mine = f->tp_replicated_gradients,
              *all = mine + n; // (n), (tp, n): what this rank does not hold is zero, as on its peers
        if (!n) continue;
        device_zero(f->dev, mine, sizeof(float) * (size_t)n);
        for (int back = 0; back < 2; back++) {
            at = 0;
            for (int i = table->units[first].first_tensor;
                 i < table->units[end - 1].first_tensor + table->units[end - 1].num_tensors; i++) {
                const Tensor *t = &table->tensors[i];
                FsdpUnit *u = &f->units[t->unit];
                int64_t begin, count = tensor_overlap(t, u->state_begin, u->state_begin + u->state_count, &begin);
                if (t->row->split != SPLIT_NONE) continue;
                float *grad = u->grad + (t->offset + begin - u->state_begin), *place = mine + at + begin;
                if (count) device_copy(f->dev, back ? grad : place, back ? place : grad, sizeof(float) * (size_t)count);
                at += t->rows * t->cols;
            }
            if (back) break;
            all_gather_now(f->comm, AXIS_TP, "gradients that tp does not split", mine, all, sizeof(float) * (size_t)n);
            tree_sum(f->dev, mine, all, DTYPE_F32, tp->size, n, 0);
        }
    }
}

/* A tied weight that is apart, as embedding and as head, has its gradient on the first and on the last stage of the
 * pipeline, or in two units of this rank. Once a step both get the sum: the same on both, and so both copies stay the
 * same. Shards are of the same elements. */
static void fsdp_sum_tied_embedding(Fsdp *f) {
    const TensorTable *t = f->table;
    if (!t->part.tied_head_copy || (t->embed < 0 && t->head < 0) || t->units[t->embed >= 0 ? t->embed : t->head].frozen)
        return;
    FsdpUnit *u = &f->units[t->embed >= 0 ? t->embed : t->head];
    int64_t first, count = tensor_overlap(&t->tensors[u->unit->first_tensor], u->state_begin,
                                          u->state_begin + u->state_count, &first);
    float *mine = u->grad, *others = f->tied_gradient;
    size_t bytes = sizeof(float) * (size_t)u->state_count;
    if (t->part.pp > 1) {
        int peer = t->embed >= 0 ? t->part.pp - 1 : 0;
        device_copy(f->dev, f->tied_gradient + u->state_count, mine, bytes); // what is sent stays as it is
        for (int i = 0; i < 2; i++) { // the first stage sends first: NCCL has one message after the other
            int sends = i == (t->embed < 0);
            point_start(f->comm, &f->tied_requests[i], sends ? SEND : RECEIVE, AXIS_PP, peer,
                        "gradient of the tied weight", sends ? f->tied_gradient + u->state_count : others,
                        (size_t)u->state_count, DTYPE_F32);
        }
        for (int i = 0; i < 2; i++) collective_wait(f->comm, &f->tied_requests[i]);
        if (count) tree_sum(f->dev, mine, others, DTYPE_F32, 1, count, 1);
        return;
    }
    float *head = f->units[t->head].grad;
    if (count) tree_sum(f->dev, mine, head, DTYPE_F32, 1, count, 1);
    if (count) tree_sum(f->dev, head, mine, DTYPE_F32, 1, count, 0);
}

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
} AdamW;

/* Brings a unit's state to where AdamW computes with it, beside the unit before; what was there before is put back
 * first. */
static Staged *state_fetch(Fsdp *f, FsdpUnit *u) {
    Staged *s = &f->staged[(u - f->units) % 2];
    StreamKind before = device_stream(f->dev, STREAM_FETCH);
    device_await(f->dev, s->stored);
    for (int k = 0; k < STATES; k++) {
        void *home = state_of(u, (StateKind)k);
        s->at[k] =
            home ? slow_fetch(f->dev, states[k].category, home, s->near[k], states[k].element * (size_t)u->state_count)
                 : NULL;
    }
    if (f->state_offloaded) device_record(f->dev, &s->fetched);
    device_stream(f->dev, before);
    return s;
}

/* The compute stream is through with it: puts what AdamW wrote where it belongs. */
static void state_store(Fsdp *f, FsdpUnit *u, Staged *s) {
    if (f->state_offloaded) device_order(f->dev, STREAM_STORE, STREAM_COMPUTE);
    StreamKind before = device_stream(f->dev, STREAM_STORE);
    for (int k = 0; k < STATES; k++) {
        void *home = state_of(u, (StateKind)k);
        if (home && (k != STATE_COPY || s->near[k]))
            slow_store(f->dev, states[k].category, home, s->at[k], states[k].element * (size_t)u->state_count,
                       states[k].written); // files: the copy is gathered next
    }
    if (f->state_offloaded) device_record(f->dev, &s->stored);
    device_stream(f->dev, before);
}

/* One AdamW step on what this rank holds; `grad_scale` turns the summed gradient into the clipped mean. Offloaded state
 * streams through: while a unit is updated the next one comes and the one before goes. */
static void fsdp_adamw(Fsdp *f, const AdamW *o, float grad_scale, int step) {
    ShardPiece p;
    FsdpUnit *now = NULL, *ahead = NULL, *end = f->units + f->table->num_units;
    Staged *s = NULL;
    device_order(f->dev, STREAM_FETCH, STREAM_COMPUTE);
    for (int i = 0; next_state_piece(f, &i, &p);) {
        if (p.unit != now) {
            device_pace(f->dev);
            if (now) state_store(f, now, s);
            now = p.unit;
            s = now == ahead ? &f->staged[(now - f->units) % 2]
                             : state_fetch(f, now); // there may be units of which this rank holds padding alone
            if (now + 1 < end) state_fetch(f, ahead = now + 1);
            comm_await(f->comm, s->fetched, "offloaded state");
        }
        float *master = (float *)s->at[STATE_MASTER], *grad = (float *)s->at[STATE_GRAD],
              *exp_avg = (float *)s->at[STATE_EXP_AVG], *exp_avg_sq = (float *)s->at[STATE_EXP_AVG_SQ];
        floatX *copy = s->at[STATE_COPY] ? (floatX *)s->at[STATE_COPY] + p.at : NULL;
        adamw(f->dev, master + p.at, exp_avg + p.at, exp_avg_sq + p.at, grad + p.at, copy, p.count, o->lr, o->beta1,
              o->beta2, o->eps, p.tensor->row->weight_decay ? o->weight_decay : 0.0f, grad_scale, step);
    }
    if (now) state_store(f, now, s);
    device_order(f->dev, STREAM_GATHER,
                 f->weights_offloaded ? STREAM_STORE : STREAM_COMPUTE); // the next step's weights
    device_order(f->dev, STREAM_COMPUTE, STREAM_STORE);
}

/* Which ranks hold the same weights as this one: its replicas, and without sharding all ranks of its fsdp group. */
static int is_replicated_over(const Fsdp *f, Axis axis) {
    return f->comm->groups[axis].size > 1 &&
           (axis == AXIS_DP_REPLICATE || (axis == AXIS_FSDP && !f->sharding.strategy->sharded));
}

/* What ranks have in common is still the same on each: silent corruption of memory shows nowhere else. */
static void fsdp_check_replicas(Fsdp *f, int64_t step) {
    int units = f->table->num_units;
    uint64_t *mine = f->fingerprints, *all = mine + units;
    for (int u = 0; u < units; u++) {
        const FsdpUnit *of = &f->units[u];
        if (!of->unit->frozen)
            fingerprint(f->dev, f->local_fingerprints + u, of->master, of->state_count * (int64_t)sizeof(float));
        else fingerprint(f->dev, f->local_fingerprints + u, of->sharded_weights, (int64_t)sharded_bytes(f, of));
    }
    device_read(f->dev, mine, f->local_fingerprints, sizeof(uint64_t) * (size_t)units);
    for (Axis axis = AXIS_TP; axis < AXES; axis = (Axis)(axis + 1)) {
        Group *g = &f->comm->groups[axis];
        if (!is_replicated_over(f, axis)) continue;
        all_gather_now(f->comm, axis, "replica check", mine, all, sizeof(uint64_t) * (size_t)units);
        for (int i = 0; i < units * g->size && !f->dev->dry_run; i++)
            if (all[i] != all[i % units])
                run_failure("step %" PRId64 ": ranks %d and %d are replicas (of %s), but their weights of %s differ: "
                            "memory or an exchange went wrong",
                            step, f->comm->hosts->group_member(f->comm, g, 0),
                            f->comm->hosts->group_member(f->comm, g, i / units), axis_names[axis],
                            f->table->units[i % units].name);
    }
}

// ---------------------------------------------------------------------------
// set-up

static float *state_alloc(Fsdp *f, MemCategory category, const char *name, int64_t elements) {
    return (float *)arena_alloc(f->dev, category, name, sizeof(float) * (size_t)elements);
}

static void unit_open(Fsdp *f, FsdpUnit *u, const Unit *unit, int training) {
    int sharded = f->sharding.strategy->sharded;
    u->unit = unit;
    u->padded = round_up(unit->size, (int64_t)TENSOR_ALIGN * f->ranks * f->replicas);
    u->shard_size = u->padded / f->ranks;
    u->state_count = sharded ? u->shard_size : u->padded;
    u->state_begin = sharded ? f->rank * u->shard_size : 0;
    u->replica_count = u->shard_size / f->replicas;
    u->replica_begin = f->rank * u->shard_size + f->replica * u->replica_count;
    if (unit->frozen) {
        if (unit->int8_blocks) {
            QuantizedLayout *p = &u->quantized;
            p->shards = sharded ? f->ranks : 1;
            p->blocks = round_up(unit->int8_blocks, 4 * p->shards) / p->shards; // scales begin on 16 bytes
            p->unquantized = round_up(unit->unquantized, TENSOR_ALIGN * p->shards) / p->shards;
            p->bytes = p->blocks * (int64_t)(INT8_BLOCK + sizeof(float)) + p->unquantized * (int64_t)sizeof(floatX);
        }
        u->sharded_weights = (floatX *)arena_alloc(
            f->dev, MEM_PARAMS, unit->int8_blocks ? "frozen weights of 8 bits" : "frozen weights", sharded_bytes(f, u));
        if (training && !weights_are_resident(f) && f->sharding.strategy->reshard == AFTER_LAST_USE)
            u->persistent_weights =
                (floatX *)arena_alloc(f->dev, MEM_COMM, "gathered weights of the step", unsharded_bytes(u));
        return;
    }
    u->master = state_alloc(f, MEM_PARAMS, "master weights", u->state_count);
    u->sharded_weights = (floatX *)u->master;
    MemCategory copies =
        f->dev->arenas[MEM_PARAMS].slow ? MEM_PARAMS : MEM_COMM; // offloaded, they go where the master goes
    if (sizeof(floatX) != sizeof(float))
        u->sharded_weights =
            (floatX *)arena_alloc(f->dev, copies, "weights to compute with", sizeof(floatX) * (size_t)u->state_count);
    if (!training) return;
    if (!weights_are_resident(f) && f->sharding.strategy->reshard == AFTER_LAST_USE)
        u->persistent_weights =
            (floatX *)arena_alloc(f->dev, MEM_COMM, "gathered weights of the step", sizeof(floatX) * (size_t)u->padded);
    u->grad = state_alloc(f, MEM_GRADS, "gradients", u->state_count);
    u->accumulated = f->accumulates_unsharded ? u->grad : shard_gradient(f, u);
    if (f->accumulates_unsharded && u->state_count < u->padded)
        u->accumulated = state_alloc(f, MEM_GRADS, "gradients of this rank's micro-batches", u->padded);
    u->partial_sums[0] = u->accumulated;
    for (int l = 1; l < f->tree_levels; l++)
        u->partial_sums[l] = state_alloc(f, MEM_WORKSPACE, "sums of micro-batches", accumulated_size(f, u));
    u->exp_avg = state_alloc(f, MEM_OPTIMIZER, "exp_avg", u->state_count);
    u->exp_avg_sq = state_alloc(f, MEM_OPTIMIZER, "exp_avg_sq", u->state_count);
}

/* Buffers of what gradients go through. */
static void reductions_open(Fsdp *f) {
    static const char *const names[REDUCTION_STEPS] = {
        "gradient pieces of all ranks", "gradient pieces of all replicas", "gradients gathered from replicas",
        "gradients gathered from ranks"};
    int half = f->sharding.reduce_dtype == DTYPE_BF16, last = f->sharding.micro_batches - 1;
    size_t element = half ? sizeof(bf16) : sizeof(float);
    int64_t largest = 0;
    for (int u = 0; u < f->table->num_units; u++)
        if (!f->units[u].unit->frozen) largest = max_i64(largest, f->units[u].padded);
    for (int k = 0; k < REDUCTION_STEPS; k++) {
        int64_t whole =
            k == REDUCE_SHARDS || k == GATHER_SHARDS ? largest : largest / f->ranks; // what all members have together
        int64_t sent = k == REDUCE_SHARDS || k == REDUCE_REPLICAS ? whole
                       : k == GATHER_SHARDS                       ? largest / f->ranks
                                                                  : largest / f->ranks / f->replicas;
        int applies = reduction_applies(f, (ReductionStepKind)k, last),
            lands_in_place = (k == GATHER_REPLICAS || k == GATHER_SHARDS) && !half;
        if (half && (applies || (k == REDUCE_SHARDS && f->rounds_micro_batches)))
            f->reductions[k].rounded =
                (bf16 *)arena_alloc(f->dev, MEM_COMM, "rounded gradients", sizeof(bf16) * (size_t)sent);
        int summed = f->sharding.transport_sums && (k == REDUCE_SHARDS || k == REDUCE_REPLICAS),
            members = k == REDUCE_SHARDS ? f->ranks : f->replicas;
        if (applies && !lands_in_place)
            f->reductions[k].receive =
                arena_alloc(f->dev, MEM_COMM, names[k], element * (size_t)(summed ? whole / members : whole));
    }
}

/* Where state that was offloaded comes to, to be computed with. */
static void staged_open(Fsdp *f) {
    int64_t largest = 0;
    const FsdpUnit *trained = f->units;
    for (int u = 0; u < f->table->num_units; u++)
        if (!f->units[u].unit->frozen) largest = max_i64(largest, f->units[u].state_count), trained = &f->units[u];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < STATES && !SLOW_TIER_COMPUTES; k++)
            if (f->dev->arenas[states[k].category].slow && state_of(trained, (StateKind)k)) {
                f->staged[i].near[k] = arena_alloc(f->dev, MEM_WORKSPACE, "offloaded state that AdamW computes with",
                                                   (size_t)largest * states[k].element);
                f->state_offloaded = 1;
            }
}

/* `training` = 0 (evaluation, generation): master weights only, no gradients, no moments, no gradient slots. */
static void fsdp_open(Fsdp *f, Comm *comm, const TensorTable *table, const Llama3Config *config, const Sharding *how,
                      int training) {
    memset(f, 0, sizeof *f);
    f->comm = comm;
    f->dev = comm->dev;
    f->table = table;
    f->config = config;
    f->sharding = *how;
    f->tree_levels = how->deterministic;
    while (how->deterministic && 1 << (f->tree_levels - 1) < how->micro_batches) f->tree_levels++;
    f->ranks = comm->groups[AXIS_FSDP].size, f->rank = comm->groups[AXIS_FSDP].rank;
    f->replicas = comm->groups[AXIS_DP_REPLICATE].size, f->replica = comm->groups[AXIS_DP_REPLICATE].rank;
    f->accumulates_unsharded =
        f->ranks > 1 && (how->micro_batches > 1 ? how->accumulate_locally : !how->strategy->sharded);
    f->rounds_micro_batches = how->reduce_dtype == DTYPE_BF16 && f->ranks == 1;
    f->weights_offloaded = f->dev->arenas[MEM_PARAMS].slow && !SLOW_TIER_COMPUTES;
    f->gradients_offloaded = f->dev->arenas[MEM_GRADS].slow && !SLOW_TIER_COMPUTES;
    f->units = (FsdpUnit *)checked_malloc(sizeof(FsdpUnit) * (size_t)table->num_units);
    for (int i = 0; i < table->num_units; i++) unit_open(f, &f->units[i], &table->units[i], training);
    if (!weights_are_resident(f) && !f->units[0].persistent_weights) {
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_EMBED, 1, "gathered embedding", SLOT_STORED);
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_BLOCK, how->slots, "gathered blocks", SLOT_STORED);
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_HEAD, 1, "gathered head", SLOT_STORED);
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_ADAPTERS, how->slots, "gathered adapters",
                  SLOT_STORED);
    }
    for (int k = UNIT_EMBED; k <= UNIT_HEAD; k++)
        slots_add(f, f->widened_slots, &f->num_widened_slots, (UnitKind)k, 1, "weights of 8 bits, widened",
                  SLOT_WIDENED);
    for (int k = UNIT_EMBED; k < UNIT_KINDS; k++) { // what is gathered to be written, where no gradient's slot will do
        int frozen = config->base != BASE_TRAINED && k != UNIT_ADAPTERS,
            gathers = !training && how->writes_files && how->strategy->sharded && f->ranks > 1;
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, (UnitKind)k, frozen ? how->merges_adapters : gathers,
                  "a unit to be written", SLOT_GRADIENT);
    }
    if (!training) return;
    int in_place = (f->ranks == 1 || f->accumulates_unsharded) && !f->rounds_micro_batches &&
                   !f->gradients_offloaded; // backward makes gradients where they belong
    if (!in_place || how->micro_batches > 1) {
        int adapters = config->lora_rank > 0;
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_EMBED, !adapters, "embedding gradient",
                  SLOT_GRADIENT);
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, adapters ? UNIT_ADAPTERS : UNIT_BLOCK,
                  in_place ? 1 : GRADIENT_SLOTS, "block gradients", SLOT_GRADIENT);
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_HEAD, !adapters, "head gradient", SLOT_GRADIENT);
    }
    reductions_open(f);
    staged_open(f);
    int64_t unsplit = 0;
    for (int u = 0; u < table->num_units; u += tp_replicated_units_at_once(f))
        unsplit = max_i64(unsplit, tp_replicated_elements(table, u, u + tp_replicated_units_at_once(f)));
    int tied = table->embed >= 0 ? table->embed : table->head; // of a pipeline's ends
    if (table->part.tied_head_copy && table->part.pp > 1 && tied >= 0 && !table->units[tied].frozen)
        f->tied_gradient = (float *)arena_alloc(f->dev, MEM_COMM, "gradient of the tied weight",
                                                2 * sizeof(float) * (size_t)f->units[tied].state_count);
    if (unsplit && table->part.tp > 1)
        f->tp_replicated_gradients = (float *)arena_alloc(f->dev, MEM_COMM, "gradients that tp does not split",
                                                          sizeof(float) * (size_t)(unsplit * (1 + table->part.tp)));
    int copies = (is_replicated_over(f, AXIS_DP_REPLICATE) ? f->replicas : 0) +
                 (is_replicated_over(f, AXIS_FSDP) ? f->ranks : 0);
    if ((!how->check_replicas && !how->writes_files) || !copies) return;
    f->local_fingerprints = (uint64_t *)arena_alloc(f->dev, MEM_WORKSPACE, "fingerprints of the weights",
                                                    sizeof(uint64_t) * (size_t)table->num_units);
    f->fingerprints = (uint64_t *)arena_alloc(f->dev, MEM_HOST, "fingerprints of all ranks",
                                              sizeof(uint64_t) * (size_t)table->num_units * (size_t)(1 + copies));
}

static void fsdp_close(Fsdp *f) {
    for (int u = 0; f->units && u < f->table->num_units; u++) device_forget_event(f->units[u].all_gather.arrived);
    for (int i = 0; i < REDUCTION_STEPS; i++) device_forget_event(f->reductions[i].request.arrived);
    for (int i = 0; i < f->num_weight_slots; i++) device_forget_event(f->weight_slots[i].freed);
    for (int i = 0; i < f->num_gradient_slots; i++) device_forget_event(f->gradient_slots[i].freed);
    for (int i = 0; i < f->num_widened_slots; i++) device_forget_event(f->widened_slots[i].freed);
    for (int i = 0; i < 2; i++) device_forget_event(f->tied_requests[i].arrived);
    for (int i = 0; i < 2; i++) device_forget_event(f->staged[i].fetched), device_forget_event(f->staged[i].stored);
    free(f->units);
}

#endif
