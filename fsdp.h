/* fsdp.h: fully sharded data parallelism: FSDP (ZeRO-3), ZeRO-2, DDP, and hybrids of them.
 *
 * The model's tensors are packed into FSDP units: the embedding, each transformer block (or several), the head. Each
 * of the n ranks of the fsdp group keeps 1/n of every unit, its shard: fp32 master weights, gradient and the moments of
 * AdamW, 16 bytes per parameter, and 2 more for the bf16 weights of a bf16 build; of a frozen unit only the weights.
 * fsdp_unshard all-gathers the unit's weights, fsdp_reshard frees them. fsdp_reduce_gradients starts to reduce-scatter
 * the unit's gradient, and fsdp_finish_gradients waits for those of all units. */
#ifndef FSDP_H
#define FSDP_H
#include "lib/comm/comm.h"
#include "lib/comm/ordered_sum.h" // defines: OrderedSum, sum_add; includes lib/ops/ops.h
#include "lora.h"                 // defines: QuantizedLayout, quantized_layout, dequantize_base; includes llama3.h

// ---------------------------------------------------------------------------
// what a unit is

enum { MAX_SLOTS = 20, GRADIENT_SLOTS = 2 };

typedef struct {
    const Unit *table_unit; // its tensors and their offsets

    // ranges, in elements
    int64_t padded;     // table_unit->size, rounded up so that shards and replicas' slices are equal and aligned
    int64_t shard_size; // padded / ranks; rank i's shard begins at i * shard_size
    int64_t state_begin, state_count;     // the elements whose state this rank keeps: its shard, or all
    int64_t adamw_count;                  // elements of exp_avg_sq, which Muon's matrices do not have
    int64_t replica_begin, replica_count; // this replica's slice of the shard, for the all-reduce across replicas

    // state, kept from step to step; a frozen unit has sharded_weights only
    float *master;             // (state_count) weights
    float *grad;               // (state_count) gradient, summed over ranks and micro-batches
    float *exp_avg;            // (state_count) AdamW's first moment, Muon's momentum
    float *exp_avg_sq;         // (adamw_count) AdamW's second moment
    floatX *sharded_weights;   // (state_count) in the compute dtype, or an int8 shard; in an fp32 build master itself
    QuantizedLayout quantized; // of sharded_weights and unsharded_weights in int8

    // full-size buffers
    floatX *persistent_weights; // (padded) ZeRO-2: this unit's own buffer, for the whole step; NULL: use the pool
    floatX *unsharded_weights;  // (padded) from fsdp_prefetch or fsdp_unshard until it is freed, else NULL
    floatX *dequantized;        // (padded) unsharded int8 weights in the compute dtype, until fsdp_reshard, else NULL
    float *unsharded_gradient;  // (padded) from fsdp_gradients until it is reduced, else NULL
    int adds_to_gradient;       // 1: unsharded_gradient is the sum of earlier micro-batches; backward adds to it
    Request all_gather;
    OrderedSum sum; // over micro-batches: of reduced shards or, with reduces_once, of full-size gradients
} FsdpUnit;

// ---------------------------------------------------------------------------
// the three strategies

/* The points of a step at which the model offers to free a unit's weights, in their order. */
typedef enum {
    AFTER_FORWARD,
    AFTER_BACKWARD, // of one micro-batch
    AFTER_LAST_USE, // nothing else in this step needs the unit
    RESHARD_NEVER
} ReshardPoint;

typedef struct {
    const char *name;
    int sharded;          // 1: each rank keeps one shard of each unit's state. 0: all of it (DDP)
    ReshardPoint reshard; // the first point at which unsharded weights are freed
} Strategy;

static const Strategy strategies[] = {
    {"full_shard", 1, AFTER_FORWARD},     // FSDP, ZeRO-3
    {"shard_grad_op", 1, AFTER_LAST_USE}, // ZeRO-2
    {"no_shard", 0, RESHARD_NEVER},       // DDP
};
#define STRATEGY_NAMES "full_shard|shard_grad_op|no_shard"
enum { FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, STRATEGIES }; // the rows

/* The options that decide what FSDP does. */
typedef struct {
    const Strategy *strategy;
    int slots;              // how many units of blocks may be unsharded at once
    int micro_batches;      // per step
    int accumulate_locally; // sum micro-batches unsharded on each rank, and reduce once per step
    int deterministic;      // sum micro-batches as a binary tree; all rules: docs/book/10-determinism.md
    Dtype reduce_dtype;     // of gradients as they are communicated; sums are fp32, unless NCCL sums
    int transport_sums;     // NCCL sums during the reduce-scatter, in its own order and in reduce_dtype
    int writes_files;       // checkpoints or an export will be written
    int merges_adapters;    // the export adds the adapters to the frozen weights
} Sharding;

// ---------------------------------------------------------------------------
// what a rank holds

/* A gradient passes through these hops in this order, after the backward of each micro-batch or only of the last one:
 *                     reduce over fsdp   reduce over replicas   gather over replicas   gather over fsdp
 *     full_shard      each               -                      -                      -
 *     no_shard        each               -                      -                      each
 *     hybrid          each               last                   last                   -
 *     hybrid DDP      each               last                   last                   each
 * shard_grad_op: as full_shard. With reduces_once, "each" means "last". All hops work at once, on one unit each. */
typedef enum { HOP_REDUCE_FSDP, HOP_REDUCE_REPLICAS, HOP_GATHER_REPLICAS, HOP_GATHER_FSDP, HOPS } ReductionHop;
static const struct {
    Axis axis;
    int reduces;          // 1: a reduce-scatter; 0: an all-gather
    const char *received; // name of the buffer for what arrives
} hops[HOPS] = {
    {AXIS_FSDP, 1, "gradient pieces of all ranks"},             // each rank sums its shard
    {AXIS_DP_REPLICATE, 1, "gradient pieces of all replicas"},  // hybrid: each replica sums its slice of the shard
    {AXIS_DP_REPLICATE, 0, "gradients gathered from replicas"}, // hybrid: and gets the other slices
    {AXIS_FSDP, 0, "gradients gathered from ranks"},            // DDP: every rank gets the sum of the whole gradient
};

typedef struct {
    FsdpUnit *unit; // NULL: the hop is empty
    int micro_batch;
    int members; // ranks of the hop's group
    Request request;
    bf16 *rounded; // what is sent when gradients travel in bf16, else NULL
    void *receive; // what arrives, before it is summed or converted. NULL: it arrives where it belongs
} Reduction;

typedef struct {
    Comm *comm;
    Device *dev;
    const TensorTable *table; // of this rank's part of the model
    const Llama3Config *config;
    Sharding sharding;
    int ranks, rank;       // of the fsdp group, dp_shard × cp: context-parallel ranks shard the weights too
    int replicas, replica; // of the dp_replicate group
    FsdpUnit *units;       // (table->num_units)
    BufferPool pools[POOLS];
    Reduction reductions[HOPS];
    int reduces_once;      // the full-size sum leaves once per step: see fsdp_bind
    int rounds_as_if_sent; // one fsdp rank: gradients are rounded to bf16 as if they had been sent
    int weights_offloaded, gradients_offloaded;  // they are kept in host memory and copied to the GPU for use
    uint64_t seed;                               // of the initial weights
    uint64_t *local_fingerprints, *fingerprints; // for run/checks/replica_check.h; NULL: replicas are not compared
} Fsdp;

// ---------------------------------------------------------------------------
// unshard and reshard

/* A step under full_shard with one micro-batch and three blocks; b2' is the backward of block b2. What is in one column
 * runs at the same time. The head computes forward and backward at once; the embedding's backward reads no weights.
 * The last block is freed after its forward as well, and all-gathered again at once, though its backward comes next.
 *
 *     all-gather      embed  b0     b1     b2  head  b2    b1   b0
 *     compute                embed  b0     b1  b2    head  b2'  b1'  b0'  embed'         AdamW
 *     reshard                       embed  b0  b1    b2    head b2   b1   b0
 *     reduce-scatter                                       head b2   b1   b0     embed */

/* Are the weights of whole units always in memory where this rank can compute with them? */
static int weights_are_resident(const Fsdp *fsdp) {
    return (fsdp->ranks == 1 || !fsdp->sharding.strategy->sharded) && !fsdp->weights_offloaded;
}

/* Bytes of a unit's weights as they are all-gathered, and of this rank's part of them. */
static size_t unsharded_bytes(const FsdpUnit *u) {
    return u->quantized.shards ? (size_t)(u->quantized.shards * u->quantized.bytes) : sizeof(floatX) * u->padded;
}
static size_t sharded_bytes(const Fsdp *fsdp, const FsdpUnit *u) {
    return unsharded_bytes(u) / (fsdp->sharding.strategy->sharded ? fsdp->ranks : 1);
}

/* Bytes that a unit needs of a pool's buffer; 0: it uses no such buffer. */
static size_t pool_bytes(PoolKind pool, const FsdpUnit *u) {
    if (pool == POOL_WEIGHTS) return unsharded_bytes(u);
    if (pool == POOL_GRADIENTS) return sizeof(float) * u->padded;
    return u->quantized.shards ? sizeof(floatX) * u->padded : 0;
}

/* A free buffer for the unit. On a GPU the current stream waits until the buffer's last user is done. */
static void *pool_take(Fsdp *fsdp, PoolKind pool, const FsdpUnit *u) {
    static const char *const contents[POOLS] = {"the weights", "the dequantized weights", "the gradient"};
    const char *name = u->table_unit->name;
    PoolBuffer *b = pool_find(&fsdp->pools[pool], u->table_unit->kind);
    if (!b) run_failure("%s: no free buffer for %s of %s", rank_name(fsdp->comm->rank), contents[pool], name);
    b->taken = pool_bytes(pool, u);
    pool_use(fsdp->dev, pool, (int64_t)b->taken);
    comm_wait_event(fsdp->comm, b->freed, name, AXIS_FSDP);
    return b->memory;
}

/* Starts the all-gather of a unit's weights. Offloaded weights are first copied to the device; if they are not sharded,
 * that copy is all. */
static void unshard_start(Fsdp *fsdp, FsdpUnit *u) {
    if (weights_are_resident(fsdp)) u->unsharded_weights = u->sharded_weights;
    if (u->unsharded_weights) return;
    const char *name = u->table_unit->name;
    StreamKind before = device_set_stream(fsdp->dev, STREAM_GATHER);
    u->unsharded_weights = u->persistent_weights ? u->persistent_weights : (floatX *)pool_take(fsdp, POOL_WEIGHTS, u);
    size_t bytes = sharded_bytes(fsdp, u);
    int is_sharded = u->state_count < u->padded;
    void *mine = u->sharded_weights;
    if (fsdp->weights_offloaded) {
        mine = (char *)u->unsharded_weights + (is_sharded ? fsdp->rank * bytes : 0);
        device_copy(fsdp->dev, mine, u->sharded_weights, bytes);
    }
    size_t count = u->quantized.shards ? bytes : (size_t)u->shard_size;
    Dtype dtype = u->quantized.shards ? DTYPE_BYTE : FLOATX;
    if (is_sharded)
        all_gather_start(fsdp->comm, &u->all_gather, AXIS_FSDP, name, mine, u->unsharded_weights, count, dtype);
    else request_follow_stream(fsdp->comm, &u->all_gather, name);
    device_set_stream(fsdp->dev, before);
}

/* Starts the all-gather ahead of need, if a buffer is free. */
static void fsdp_prefetch(Fsdp *fsdp, FsdpUnit *u) {
    int has_memory = weights_are_resident(fsdp) || u->persistent_weights;
    if (has_memory || pool_find(&fsdp->pools[POOL_WEIGHTS], u->table_unit->kind)) unshard_start(fsdp, u);
}

/* The unit's weights (padded) in the compute dtype, valid until fsdp_reshard. Waits for their all-gather. */
static const floatX *fsdp_unshard(Fsdp *fsdp, FsdpUnit *u) {
    unshard_start(fsdp, u);
    comm_wait(fsdp->comm, &u->all_gather);
    if (!u->quantized.shards) return u->unsharded_weights;
    if (u->dequantized) return u->dequantized;
    u->dequantized = (floatX *)pool_take(fsdp, POOL_DEQUANTIZED, u);
    dequantize_base(fsdp->dev, u->dequantized, u->unsharded_weights, &u->quantized, fsdp->table, u->table_unit);
    return u->dequantized;
}

/* Frees the unit's full-size weights, if the strategy does so at this point of the step. Under DDP with offloading they
 * are copied to the device for each use, and freed as under full_shard. Dequantized weights are always freed. */
static void fsdp_reshard(Fsdp *fsdp, FsdpUnit *u, ReshardPoint point) {
    ReshardPoint first = fsdp->sharding.strategy->reshard;
    if (fsdp->weights_offloaded && first == RESHARD_NEVER) first = AFTER_FORWARD;
    pool_release(fsdp->dev, &fsdp->pools[POOL_DEQUANTIZED], u->dequantized);
    u->dequantized = NULL;
    if (point < first) return;
    pool_release(fsdp->dev, &fsdp->pools[POOL_WEIGHTS], u->unsharded_weights);
    u->unsharded_weights = NULL;
}

// ---------------------------------------------------------------------------
// reduce gradients

/* A unit's gradient of a micro-batch, from backward to grad, where the optimizer reads the sum:
 *
 *                      backward writes it to                   it leaves the rank
 *     one rank         the sum over micro-batches itself       never
 *     reduces_once     that sum, which is full-size            once per step, as the sum
 *     otherwise        a full-size buffer of the pool          at once, and its shard is added to the sum
 * There are exceptions to the first two rows: if micro-batches are added as a tree, if gradients are offloaded, or with
 * rounds_as_if_sent, backward writes to a buffer of the pool, from which the gradient is added to the sum. */

/* Zeroes all but the tensors that backward overwrites: those that it adds to, and all padding, which stays zero. */
static void gradients_clear(Fsdp *fsdp, const FsdpUnit *u) {
    int64_t written = 0;
    for (int i = u->table_unit->first_tensor; i < u->table_unit->end_tensor; i++) {
        const Tensor *t = &fsdp->table->tensors[i];
        int64_t end = t->offset + t->rows * t->cols;
        int64_t zeros = (gradient_is_assigned(fsdp->table, t) ? t->offset : end) - written;
        device_zero(fsdp->dev, u->unsharded_gradient + written, sizeof(float) * zeros);
        written = end;
    }
    device_zero(fsdp->dev, u->unsharded_gradient + written, sizeof(float) * (u->padded - written));
}

static void gradient_release(Fsdp *fsdp, FsdpUnit *u) {
    pool_release(fsdp->dev, &fsdp->pools[POOL_GRADIENTS], u->unsharded_gradient);
    u->unsharded_gradient = NULL;
}

/* This rank's shard within grad, and this replica's slice of the shard. */
static float *shard_gradient(const Fsdp *fsdp, const FsdpUnit *u) {
    return u->grad + (fsdp->rank * u->shard_size - u->state_begin);
}
static float *replica_gradient(const FsdpUnit *u) { return u->grad + (u->replica_begin - u->state_begin); }

/* Does the gradient of this micro-batch go through this hop? See ReductionHop. */
static int hop_applies(const Fsdp *fsdp, ReductionHop hop, int micro_batch) {
    int last = micro_batch == fsdp->sharding.micro_batches - 1;
    int over_fsdp = fsdp->ranks > 1 && (last || !fsdp->reduces_once);
    if (hop == HOP_REDUCE_FSDP) return over_fsdp;
    if (hop == HOP_GATHER_FSDP) return over_fsdp && !fsdp->sharding.strategy->sharded;
    return fsdp->replicas > 1 && last; // across replicas once per step
}

/* The part of grad that is complete once a gradient has passed `hop`, whether or not the hop applies to it. */
static float *hop_result(const Fsdp *fsdp, int hop, const FsdpUnit *u) {
    if (hop == HOP_REDUCE_REPLICAS) return replica_gradient(u);
    return hop == HOP_GATHER_FSDP ? u->grad : shard_gradient(fsdp, u);
}

static void reduction_start(Fsdp *fsdp, ReductionHop hop, FsdpUnit *u, int micro_batch) {
    Reduction *r = &fsdp->reductions[hop];
    int reduces = hops[hop].reduces;
    Axis axis = hops[hop].axis;
    int64_t piece = axis == AXIS_FSDP ? u->shard_size : u->replica_count;              // of one member
    const float *sum = fsdp->reduces_once ? u->sum.partial[0] : u->unsharded_gradient; // what HOP_REDUCE_FSDP sends
    if (hop > HOP_REDUCE_FSDP) sum = hop_result(fsdp, hop - 1, u);
    const void *send = r->rounded ? (const void *)r->rounded : sum;
    void *receive = r->receive ? r->receive : hop_result(fsdp, hop, u);
    if (r->rounded) cast_to_bf16(fsdp->dev, r->rounded, sum, reduces ? piece * r->members : piece);
    r->unit = u;
    r->micro_batch = micro_batch;
    Dtype dtype = fsdp->sharding.reduce_dtype;
    const char *name = u->table_unit->name;
    if (reduces && fsdp->sharding.transport_sums)
        reduce_scatter_start(fsdp->comm, &r->request, axis, name, send, receive, piece, dtype);
    else if (reduces) reduce_scatter_pieces_start(fsdp->comm, &r->request, axis, name, send, receive, piece, dtype);
    else all_gather_start(fsdp->comm, &r->request, axis, name, send, receive, piece, dtype);
}

/* Waits for a hop and puts what it received where it belongs. The pieces of a reduce-scatter are summed here in fp32,
 * as a binary tree over ranks, unless NCCL has summed them. */
static void reduction_finish(Fsdp *fsdp, ReductionHop hop) {
    Reduction *r = &fsdp->reductions[hop];
    FsdpUnit *u = r->unit;
    Dtype dtype = fsdp->sharding.reduce_dtype;
    int pieces = fsdp->sharding.transport_sums ? 1 : r->members;
    float *sum = hop_result(fsdp, hop, u);
    comm_wait(fsdp->comm, &r->request);
    if (hop == HOP_REDUCE_FSDP) {
        if (fsdp->reduces_once) tree_sum(fsdp->dev, sum, r->receive, dtype, pieces, u->shard_size, 0);
        else sum_add(fsdp->dev, &u->sum, r->micro_batch, r->receive, dtype, pieces);
        gradient_release(fsdp, u);
    } else if (hop == HOP_REDUCE_REPLICAS) {
        tree_sum(fsdp->dev, replica_gradient(u), r->receive, dtype, pieces, u->replica_count, 0);
    } else {
        // All-gathers. fp32 sums arrive in grad itself. DDP gathers after each micro-batch, as PyTorch's does, but
        // bf16 sums are copied to grad only after the last one: an earlier copy would round this rank's fp32 sum.
        int64_t count = hop == HOP_GATHER_FSDP ? u->padded : u->shard_size;
        int last = r->micro_batch == fsdp->sharding.micro_batches - 1;
        if (r->rounded && last) tree_sum(fsdp->dev, sum, r->receive, DTYPE_BF16, 1, count, 0);
    }
    r->unit = NULL;
}

/* Waits for every hop that holds a unit and moves the unit to its next hop; then `entering` (or NULL) starts its first
 * one. Returns how many units are being reduced. On a GPU all of this is enqueued on STREAM_REDUCE, and the compute
 * stream waits for it only where it needs a buffer or the sums. */
static int reductions_advance(Fsdp *fsdp, FsdpUnit *entering, int micro_batch) {
    int in_flight = 0;
    StreamKind before = device_set_stream(fsdp->dev, STREAM_REDUCE);
    // from the last hop to the first, so that a unit moves into a hop that was just emptied; -1: the entering unit
    for (int from = HOPS - 1; from >= -1; from--) {
        FsdpUnit *u = from < 0 ? entering : fsdp->reductions[from].unit;
        int micro = from < 0 ? micro_batch : fsdp->reductions[from].micro_batch;
        int to = from + 1;
        if (!u) continue;
        if (from >= 0) reduction_finish(fsdp, (ReductionHop)from);
        while (to < HOPS && !hop_applies(fsdp, (ReductionHop)to, micro)) to++;
        if (to == HOPS) continue;
        // The entering gradient must be complete. Gradients in later hops were complete when they entered.
        if (from < 0) device_wait_stream(fsdp->dev, STREAM_REDUCE, STREAM_COMPUTE);
        reduction_start(fsdp, (ReductionHop)to, u, micro);
        in_flight++;
    }
    device_set_stream(fsdp->dev, before);
    return in_flight;
}

/* Waits until all gradients are reduced. A GPU's compute stream waits; the time counts for the axis of the last hop. */
static void fsdp_finish_gradients(Fsdp *fsdp) {
    Axis last = fsdp->replicas > 1 ? AXIS_DP_REPLICATE : AXIS_FSDP;
    while (reductions_advance(fsdp, NULL, 0)) {}
    comm_wait_event(fsdp->comm, device_stream_event(fsdp->dev, STREAM_REDUCE), "reductions", last);
}

/* Can backward write a gradient into the sum over micro-batches, without a buffer of the pool? */
static int backward_writes_sum(const Fsdp *fsdp) {
    return (fsdp->ranks == 1 || fsdp->reduces_once) && !fsdp->rounds_as_if_sent && !fsdp->gradients_offloaded;
}

/* Can it also add later micro-batches to that sum? A binary tree over micro-batches needs each gradient by itself. */
static int backward_adds_to_sum(const Fsdp *fsdp) { return backward_writes_sum(fsdp) && !fsdp->sharding.deterministic; }

/* The buffer (padded) into which backward writes the unit's gradient or, with adds_to_gradient, adds it. */
static float *fsdp_gradients(Fsdp *fsdp, FsdpUnit *u, int micro_batch) {
    // If the unit is still being reduced, that must end first. It happens to a tied embedding, which is the last unit
    // that one micro-batch reduces and, as the head, the first that the next one writes.
    for (int i = 0; i < HOPS; i++)
        if (fsdp->reductions[i].unit == u) fsdp_finish_gradients(fsdp);
    if (u->unsharded_gradient) return u->unsharded_gradient;
    int replace;
    float *sum = sum_target(&u->sum, micro_batch, &replace);
    u->adds_to_gradient = !replace && backward_adds_to_sum(fsdp);
    int in_place = u->adds_to_gradient || (replace && backward_writes_sum(fsdp));
    u->unsharded_gradient = in_place ? sum : (float *)pool_take(fsdp, POOL_GRADIENTS, u);
    if (!u->adds_to_gradient) gradients_clear(fsdp, u);
    return u->unsharded_gradient;
}

/* Would this gradient overtake one of the last micro-batch, which takes more hops (in an interleaved pipeline)? */
static int would_overtake(const Fsdp *fsdp, int micro_batch) {
    if (hop_applies(fsdp, HOP_REDUCE_REPLICAS, micro_batch)) return 0;
    for (const Reduction *r = fsdp->reductions; r < fsdp->reductions + HOPS; r++)
        if (r->unit && hop_applies(fsdp, HOP_REDUCE_REPLICAS, r->micro_batch)) return 1;
    return 0;
}

/* Starts to sum a unit's gradient over all ranks; it travels while the next units compute. With reduces_once that
 * happens once per step, with the sum of all micro-batches, to which this one is added here. */
static void fsdp_reduce_gradients(Fsdp *fsdp, FsdpUnit *u, int micro_batch) {
    bf16 *rounded = fsdp->reductions[HOP_REDUCE_FSDP].rounded;
    int stays_here = fsdp->ranks == 1 || fsdp->reduces_once;
    if (would_overtake(fsdp, micro_batch))
        while (reductions_advance(fsdp, NULL, 0)) {}
    if (fsdp->rounds_as_if_sent) {
        cast_to_bf16(fsdp->dev, rounded, u->unsharded_gradient, u->padded);
        sum_add(fsdp->dev, &u->sum, micro_batch, rounded, DTYPE_BF16, 1);
    } else if (stays_here) sum_add(fsdp->dev, &u->sum, micro_batch, u->unsharded_gradient, DTYPE_F32, 1);
    if (stays_here) gradient_release(fsdp, u);
    reductions_advance(fsdp, u, micro_batch);
}

// ---------------------------------------------------------------------------
// set-up

/* Allocates the weights that this rank keeps of a unit. */
static void open_weights(Fsdp *fsdp, FsdpUnit *u) {
    const Unit *unit = u->table_unit;
    if (unit->frozen) {
        const char *name = unit->int8_blocks ? "frozen int8 weights" : "frozen weights";
        int shards = fsdp->sharding.strategy->sharded ? fsdp->ranks : 1;
        u->quantized = quantized_layout(unit->int8_blocks, unit->unquantized, shards, TENSOR_ALIGN);
        u->sharded_weights = (floatX *)arena_alloc(fsdp->dev, MEM_PARAMS, name, sharded_bytes(fsdp, u));
        return;
    }
    u->master = arena_array(float, fsdp->dev, MEM_PARAMS, "master weights", u->state_count);
    u->sharded_weights = (floatX *)u->master;
    MemCategory copies = fsdp->dev->arenas[MEM_PARAMS].offloaded ? MEM_PARAMS : MEM_COMM; // offloaded with the master
    if (sizeof(floatX) != sizeof(float))
        u->sharded_weights = arena_array(floatX, fsdp->dev, copies, "weights in the compute dtype", u->state_count);
}

/* Allocates what training needs in addition. */
static void open_gradient_and_moments(Fsdp *fsdp, FsdpUnit *u) {
    Device *dev = fsdp->dev;
    const Sharding *how = &fsdp->sharding;
    if (!weights_are_resident(fsdp) && how->strategy->reshard == AFTER_LAST_USE)
        u->persistent_weights =
            (floatX *)arena_alloc(dev, MEM_COMM, "gathered weights of the step", unsharded_bytes(u));
    if (u->table_unit->frozen) return;
    u->grad = arena_array(float, dev, MEM_GRADS, "gradients", u->state_count);
    float *total = fsdp->reduces_once ? u->grad : shard_gradient(fsdp, u);
    int64_t count = fsdp->reduces_once ? u->padded : u->shard_size;
    if (fsdp->reduces_once && u->state_count < u->padded)
        total = arena_array(float, dev, MEM_GRADS, "gradients of this rank's micro-batches", u->padded);
    sum_open(&u->sum, dev, total, count, how->micro_batches, how->deterministic);
    u->exp_avg = arena_array(float, dev, MEM_OPTIMIZER, "exp_avg", u->state_count);
    u->exp_avg_sq = arena_array(float, dev, MEM_OPTIMIZER, "exp_avg_sq", u->adamw_count);
}

static void unit_open(Fsdp *fsdp, FsdpUnit *u, const Unit *unit, int training) {
    int sharded = fsdp->sharding.strategy->sharded;
    u->table_unit = unit;
    u->padded = round_up(unit->size, (int64_t)TENSOR_ALIGN * fsdp->ranks * fsdp->replicas);
    u->shard_size = u->padded / fsdp->ranks;
    u->state_begin = sharded ? fsdp->rank * u->shard_size : 0;
    u->state_count = sharded ? u->shard_size : u->padded;
    // With Muon, every rank allocates for the largest share of AdamW's tensors, so that all need equal memory.
    u->adamw_count = unit->has_muon ? min_i64(u->state_count, unit->adamw_elements) : u->state_count;
    u->replica_count = u->shard_size / fsdp->replicas;
    u->replica_begin = fsdp->rank * u->shard_size + fsdp->replica * u->replica_count;
    open_weights(fsdp, u);
    if (training) open_gradient_and_moments(fsdp, u);
}

/* Adds `count` buffers, each as large as the largest unit of that kind. */
static void add_buffers(Fsdp *fsdp, PoolKind pool, UnitKind kind, int count, const char *name) {
    int64_t largest = 0;
    for (int i = 0; i < fsdp->table->num_units; i++)
        if (fsdp->units[i].table_unit->kind == kind)
            largest = max_i64(largest, (int64_t)pool_bytes(pool, &fsdp->units[i]));
    for (int i = 0; i < count && largest; i++) pool_add(fsdp->dev, &fsdp->pools[pool], kind, (size_t)largest, name);
}

static void pools_open(Fsdp *fsdp, int training) {
    static const char *const weights[UNIT_KINDS] = {"gathered embedding", "gathered blocks", "gathered head",
                                                    "gathered adapters"};
    static const char *const gradients[UNIT_KINDS] = {"embedding gradient", "block gradients", "head gradient",
                                                      "block gradients"};
    const Sharding *how = &fsdp->sharding;
    int writes_sum = backward_writes_sum(fsdp);
    int needs_gradients = training && !(writes_sum && (how->micro_batches == 1 || backward_adds_to_sum(fsdp)));
    for (int k = UNIT_EMBED; k < UNIT_KINDS; k++) {
        UnitKind kind = (UnitKind)k;
        int is_of_blocks = kind == UNIT_BLOCK || kind == UNIT_ADAPTERS;
        if (!weights_are_resident(fsdp) && !fsdp->units[0].persistent_weights) // persistent: all units or none
            add_buffers(fsdp, POOL_WEIGHTS, kind, is_of_blocks ? how->slots : 1, weights[k]);
        add_buffers(fsdp, POOL_DEQUANTIZED, kind, 1, "dequantized weights");
        // Files are written from whole units in fp32, which are gathered (gather_trained) into gradient buffers.
        int is_trained = (fsdp->config->base == BASE_TRAINED) == (kind != UNIT_ADAPTERS);
        int has_muon = training && fsdp->config->muon && kind == UNIT_BLOCK;
        int is_gathered = how->writes_files && (has_muon || (how->strategy->sharded && fsdp->ranks > 1));
        if (is_trained && needs_gradients)
            add_buffers(fsdp, POOL_GRADIENTS, kind, is_of_blocks && !writes_sum ? GRADIENT_SLOTS : 1, gradients[k]);
        else if (is_trained ? is_gathered : how->merges_adapters)
            add_buffers(fsdp, POOL_GRADIENTS, kind, 1, "a unit to be written");
    }
}

/* Buffers for one hop, as large as the largest trained unit needs. */
static void reduction_open(Fsdp *fsdp, ReductionHop hop, int64_t largest) {
    Reduction *r = &fsdp->reductions[hop];
    Dtype dtype = fsdp->sharding.reduce_dtype;
    int half = dtype == DTYPE_BF16, reduces = hops[hop].reduces;
    int applies = hop_applies(fsdp, hop, fsdp->sharding.micro_batches - 1);
    r->members = fsdp->comm->groups[hops[hop].axis].size;
    int64_t whole = hops[hop].axis == AXIS_FSDP ? largest : largest / fsdp->ranks; // a unit, or for replicas a shard
    int64_t sent = reduces ? whole : whole / r->members;
    int64_t received = reduces && fsdp->sharding.transport_sums ? whole / r->members : whole;
    if (half && (applies || (hop == HOP_REDUCE_FSDP && fsdp->rounds_as_if_sent)))
        r->rounded = arena_array(bf16, fsdp->dev, MEM_COMM, "rounded gradients", sent);
    if (applies && (reduces || half))
        r->receive = arena_alloc(fsdp->dev, MEM_COMM, hops[hop].received, dtype_size(dtype) * received);
}

/* What FSDP is to do, and who does it; nothing is allocated yet. */
static void fsdp_bind(Fsdp *fsdp, Comm *comm, const TensorTable *table, const Llama3Config *c, const Sharding *how) {
    memset(fsdp, 0, sizeof *fsdp);
    fsdp->comm = comm;
    fsdp->dev = comm->dev;
    fsdp->table = table;
    fsdp->config = c;
    fsdp->sharding = *how;
    for (int p = 0; p < POOLS; p++) fsdp->pools[p].contents = (PoolKind)p;
    fsdp->ranks = comm->groups[AXIS_FSDP].size;
    fsdp->rank = comm->groups[AXIS_FSDP].rank;
    fsdp->replicas = comm->groups[AXIS_DP_REPLICATE].size;
    fsdp->replica = comm->groups[AXIS_DP_REPLICATE].rank;
    // With several micro-batches --accumulate decides. With one, DDP does it: backward writes straight into grad.
    fsdp->reduces_once =
        fsdp->ranks > 1 && (how->micro_batches > 1 ? how->accumulate_locally : !how->strategy->sharded);
    fsdp->rounds_as_if_sent = how->reduce_dtype == DTYPE_BF16 && fsdp->ranks == 1;
    fsdp->weights_offloaded = fsdp->dev->arenas[MEM_PARAMS].offloaded && !OFFLOAD_IN_PLACE;
    fsdp->gradients_offloaded = fsdp->dev->arenas[MEM_GRADS].offloaded && !OFFLOAD_IN_PLACE;
}

/* `training` = 0 (evaluation, generation, export): weights only, no gradients and no optimizer state. */
static void fsdp_open(Fsdp *fsdp, Comm *comm, const TensorTable *table, const Llama3Config *config, const Sharding *how,
                      int training) {
    int64_t largest = 0; // trained unit
    fsdp_bind(fsdp, comm, table, config, how);
    fsdp->units = new_array(FsdpUnit, table->num_units);
    for (int i = 0; i < table->num_units; i++) unit_open(fsdp, &fsdp->units[i], &table->units[i], training);
    pools_open(fsdp, training);
    for (int i = 0; i < table->num_units && training; i++)
        if (!table->units[i].frozen) largest = max_i64(largest, fsdp->units[i].padded);
    for (int i = 0; i < HOPS && training; i++) reduction_open(fsdp, (ReductionHop)i, largest);
}

static void fsdp_close(Fsdp *fsdp) {
    for (int i = 0; fsdp->units && i < fsdp->table->num_units; i++) request_close(&fsdp->units[i].all_gather);
    for (int i = 0; i < HOPS; i++) request_close(&fsdp->reductions[i].request);
    for (int p = 0; p < POOLS; p++)
        for (int i = 0; i < fsdp->pools[p].count; i++) device_destroy_event(fsdp->pools[p].buffers[i].freed);
    free(fsdp->units);
}

#endif
