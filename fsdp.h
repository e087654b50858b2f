/* fsdp.h: data parallelism written out: FSDP (ZeRO-3), ZeRO-2, DDP, and hybrids of them.
 *
 * A unit (the embedding, a block or a few, the head) is one flat buffer of its tensors. The ranks of the `fsdp` group
 * each own an equal range of it, their shard: master weights, gradient and Adam's moments, 16 bytes an element.
 * The vocabulary is three verbs: unit_gather, unit_free, unit_reduce; a strategy is a row that says when each takes
 * effect. The model asks for unit_weights and unit_gradients. Under full_shard a full-size buffer exists only in a
 * slot, and there are few slots: they are the limit on what is in flight. Beside adapters the model's own units are
 * frozen: weights as they are gathered, in the compute dtype or as blocks of 8 bits, and nothing else; unit_weights
 * widens the latter into a slot. Nobody asks for their gradients.
 */
#ifndef FSDP_H
#define FSDP_H
#include "lib/comm.h"
#include "llama3.h"
#include "lib/ops.h"

// ---------------------------------------------------------------------------
// strategies

/* Who asks to free a unit. Of a strategy: from which pass on it is freed indeed. */
typedef enum { PASS_FORWARD, PASS_BACKWARD, PASS_LAST /* nothing in this step needs it any more */, PASS_NEVER } Pass;

typedef struct {
    const char *name;
    int sharded; // state (master, gradient, moments): this rank's shard of each unit, and gradients are
                 // reduce-scattered; else all of it is on every rank, weights need no gathering, and gradients are
                 // all-reduced
    Pass freed; // gathered weights; they are gathered again when they are needed next
} Strategy;

static const Strategy strategies[] = {
    //               sharded   weights freed
    {"full_shard", 1, PASS_FORWARD}, // FSDP, ZeRO-3
    {"shard_grad_op", 1, PASS_LAST}, // ZeRO-2
    {"no_shard", 0, PASS_NEVER},     // DDP
};
#define STRATEGY_NAMES "full_shard|shard_grad_op|no_shard"
enum { STRATEGIES = sizeof strategies / sizeof strategies[0] };

static const Strategy *strategy_find(const char *name) {
    for (int i = 0; i < STRATEGIES; i++)
        if (!strcmp(name, strategies[i].name)) return &strategies[i];
    return NULL;
}

typedef struct { // how a run shards: the options that fsdp.h and the law go by
    const Strategy *strategy;
    int slots;          // gathered blocks in flight
    int accumulation;   // micro-batches a step
    int local;          // micro-batches are summed unsharded on each rank, and over ranks once a step
    int deterministic;  // micro-batches are summed as a binary tree
    Dtype reduce_dtype; // in which gradients travel; they are summed in fp32
    int summed;         // the transport sums them on their way, in an order of its own, and in that dtype
    int check_replicas; // what replicas have in common will be compared
    int saves;          // files will be written
    int merges;         // … and adapters added to the frozen weights there
} Sharding;

// ---------------------------------------------------------------------------
// what a rank has of each unit

enum { MAX_SLOTS = 20, GRADIENT_SLOTS = 2, MAX_CASCADE = 21 };

/* Weights of 8 bits as they are kept and gathered: the parts of all ranks one behind the other, each its blocks' bytes,
 * their scales, then its elements that are in no block, as of norms, in the compute dtype. A cut between ranks is one
 * between blocks. */
typedef struct {
    int64_t parts, blocks, plain, bytes;
} Packed; // how many parts (0: the weights are not in 8 bits); of a part

typedef struct {
    const Unit *unit;
    int64_t padded; // the unit's size rounded up, so that what a rank of a replica owns is a multiple of TENSOR_ALIGN
    int64_t part;   // padded / ranks: what a reduce-scatter leaves this rank, element rank × part on
    int64_t begin, held;        // the elements that this rank keeps state of: its part; without sharding all
    int64_t owned_begin, owned; // the elements that nobody else answers for: its part divided among replicas
    float *master;              // (held) weights in fp32
    float *grad;                // (held) sum over ranks and micro-batches of the gradient of the summed loss
    float *total; // sum over micro-batches: within grad, or, accumulated locally, (padded) of this rank alone
    float *
        partial[MAX_CASCADE]; // as total; deterministic: sums of 1, 2, 4, … micro-batches that wait for their neighbour
    float *exp_avg, *exp_avg_sq; // (held) AdamW's moments
    floatX
        *copy; // (held) the weights as they are gathered; in fp32 the master itself. In 8 bits: bytes, as Packed says
    floatX *home; // (padded) where they are gathered to, when they stay for the step; NULL: a slot. On a GPU the host
                  // waits between one use and the next, as it reads a step's sums or writes a batch
    floatX *weights; // (padded) while gathered, else NULL
    floatX *widened; // (padded) of 8 bits, while they are computed with, else NULL
    Packed packed;
    float *dweights; // (padded) while this unit's gradient is made or reduced, else NULL
    Request gather;
} FsdpUnit;

typedef struct {
    UnitKind kind; // blocks share slots; embedding and head have their own
    void *memory;  // (largest padded unit of that kind)
    int taken;
    DeviceEvent freed; // on a GPU: who had it last is through with it
} Slot;

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
typedef enum { REDUCE_SHARDS, REDUCE_REPLICAS, GATHER_REPLICAS, GATHER_SHARDS, STAGES } StageKind;

typedef struct {
    FsdpUnit *unit; // NULL: the stage is empty
    int micro;
    Request request;
    bf16 *rounded; // what is sent, where gradients travel in bf16
    void *receive; // what comes: of a reduction the pieces of all members; of a gather only in bf16, else it lands in
                   // place
} Stage;

typedef struct {
    Comm *comm;
    Device *dev;
    const TensorTable *table;
    const Llama3Config *config;
    Sharding how;
    int ranks, rank;       // of the fsdp group
    int replicas, replica; // of the dp_replicate group
    FsdpUnit *units;       // (table->num_units)
    Slot weight_slots[2 * MAX_SLOTS], gradient_slots[MAX_SLOTS], widened_slots[MAX_SLOTS];
    int num_weight_slots, num_gradient_slots, num_widened_slots;
    Staged staged[2];                                    // one is computed with while the other comes and goes
    int fetches_weights, stores_gradients, stages_state; // these lie in the slow tier, where nothing computes
    Stage stages[STAGES];
    int sums_here; // micro-batches are summed on this rank first: --accumulate local, or DDP's only one, straight in
                   // its place
    int rounds_leaves; // bf16: each micro-batch's gradient is rounded even where it goes nowhere, as on any other
                       // layout
    uint64_t seed;     // of the initial weights
    uint64_t *prints;  // (units) fingerprints of this rank's weights, where they are made; NULL: no rank has the same
                       // weights, or it is not checked
    uint64_t *fingerprints; // (1 + replicas, units) the same where the host reads them, and those of all ranks that
                            // must have the same
    float *unsplit_sums;  // (1 + tp, most at a time) gradients of what tensor parallelism does not split; NULL: tp is 1
    float *tied_gradient; // (2, held) of a tied weight: of the other end of the pipeline, and what goes there
    Request tied_requests[2];
    int cascade; // deterministic: levels of partial sums; 0: each micro-batch is added to the sum so far
} Fsdp;

/* Is all of a unit's weights on this rank at all times, where it can compute with them? */
static int weights_are_here(const Fsdp *f) {
    return (f->ranks == 1 || !f->how.strategy->sharded) && !f->fetches_weights;
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
static size_t stored_bytes(const FsdpUnit *u) {
    return u->packed.parts ? (size_t)(u->packed.parts * u->packed.bytes) : sizeof(floatX) * (size_t)u->padded;
}

/* … and of this rank's part of them. */
static size_t held_bytes(const Fsdp *f, const FsdpUnit *u) {
    return f->how.strategy->sharded ? stored_bytes(u) / (size_t)f->ranks : stored_bytes(u);
}

static void slots_add(Fsdp *f, Slot *slots, int *count, UnitKind kind, int how_many, const char *name, SlotUse use) {
    size_t largest = 0;
    for (int i = 0; i < f->table->num_units; i++) {
        const FsdpUnit *u = &f->units[i];
        size_t bytes = use == SLOT_STORED ? stored_bytes(u)
                                          : (use == SLOT_WIDENED ? sizeof(floatX) : sizeof(float)) * (size_t)u->padded;
        if (u->unit->kind == kind && (use != SLOT_WIDENED || u->packed.parts) && bytes > largest) largest = bytes;
    }
    for (int i = 0; i < how_many && largest; i++) {
        Slot *s = &slots[(*count)++];
        s->kind = kind;
        s->taken = 0;
        s->memory = arena_alloc(f->dev, MEM_COMM, name, largest);
    }
}

static Slot *slot_find(Slot *slots, int count, UnitKind kind) {
    for (int i = 0; i < count; i++)
        if (slots[i].kind == kind && !slots[i].taken) return &slots[i];
    return NULL;
}

static void slot_release(Device *dev, Slot *slots, int count, const void *memory) {
    for (int i = 0; i < count; i++)
        if (slots[i].memory == memory) slots[i].taken = 0, device_record(dev, &slots[i].freed);
}

// ---------------------------------------------------------------------------
// gather and free

static void *slot_take(Fsdp *f, Slot *slots, int count, const FsdpUnit *u, const char *what) {
    Slot *slot = slot_find(slots, count, u->unit->kind);
    if (!slot) run_failure("rank %d: no free slot for %s of %s", f->comm->rank, what, u->unit->name);
    slot->taken = 1;
    comm_await(f->comm, slot->freed, u->unit->name);
    return slot->memory;
}

/* Starts gathering a unit's weights from all shards. Where this rank has all of them nothing moves, unless they are
 * offloaded. */
static void unit_gather(Fsdp *f, FsdpUnit *u) {
    if (u->weights) return;
    if (weights_are_here(f)) {
        u->weights = u->copy;
        return;
    }
    StreamKind before = device_stream(f->dev, STREAM_GATHER);
    u->weights = u->home ? u->home : (floatX *)slot_take(f, f->weight_slots, f->num_weight_slots, u, "the weights");
    size_t held = held_bytes(f, u);
    void *mine = u->copy;
    if (f->fetches_weights)
        device_copy(f->dev, mine = (char *)u->weights + (u->held < u->padded ? (size_t)f->rank * held : 0), u->copy,
                    held);
    if (u->held < u->padded)
        collective_start(f->comm, &u->gather, ALL_GATHER, AXIS_FSDP, u->unit->name, mine, u->weights,
                         u->packed.parts ? held : (size_t)u->part, u->packed.parts ? DTYPE_BYTE : FLOATX);
    else request_enqueued(f->comm, &u->gather, u->unit->name);
    device_stream(f->dev, before);
}

/* Gathers ahead of need, as far as free slots reach. */
static void unit_prefetch(Fsdp *f, FsdpUnit *u) {
    if (weights_are_here(f) || u->home || slot_find(f->weight_slots, f->num_weight_slots, u->unit->kind))
        unit_gather(f, u);
}

/* A tensor whose unit's weights came as bytes, into `out`: part by part, as its elements lie. */
static void tensor_widen(Fsdp *f, const FsdpUnit *u, const Tensor *t, floatX *out) {
    const Packed *p = &u->packed;
    int64_t count = t->rows * t->cols,
            each = t->block8 < 0 ? p->plain : p->blocks * BASE_BLOCK; // elements of a part, of this tensor's sort
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t at = (t->block8 < 0 ? t->plain : t->block8 * BASE_BLOCK) + done, within = at % each;
        const char *part = (const char *)u->weights + at / each * p->bytes;
        n = min_i64(count - done, each - within);
        if (t->block8 >= 0)
            dequantize(f->dev, out + done, (const int8_t *)part + within,
                       (const float *)(const void *)(part + p->blocks * BASE_BLOCK) + within / BASE_BLOCK, n);
        else
            device_copy(f->dev, out + done,
                        part + p->blocks * (int64_t)(BASE_BLOCK + sizeof(float)) + within * (int64_t)sizeof(floatX),
                        sizeof(floatX) * (size_t)n);
    }
}

/* The gathered weights, (padded), valid until unit_free; waits for their arrival. Those of 8 bits are widened. */
static const floatX *unit_weights(Fsdp *f, FsdpUnit *u) {
    unit_gather(f, u);
    collective_wait(f->comm, &u->gather);
    if (!u->packed.parts) return u->weights;
    if (u->widened) return u->widened;
    u->widened = (floatX *)slot_take(f, f->widened_slots, f->num_widened_slots, u, "weights of 8 bits, widened");
    for (int i = u->unit->first; i < u->unit->first + u->unit->count; i++)
        tensor_widen(f, u, &f->table->tensors[i], u->widened + f->table->tensors[i].offset);
    return u->widened;
}

/* `pass` is through with the unit: frees its weights, if the strategy frees them there. */
static void unit_free(Fsdp *f, FsdpUnit *u, Pass pass) {
    slot_release(f->dev, f->widened_slots, f->num_widened_slots, u->widened);
    u->widened = NULL;
    if (pass < (f->fetches_weights && f->how.strategy->freed == PASS_NEVER ? PASS_FORWARD : f->how.strategy->freed))
        return; // what was fetched does not stay
    slot_release(f->dev, f->weight_slots, f->num_weight_slots, u->weights);
    u->weights = NULL;
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
    for (int i = u->unit->first; i < u->unit->first + u->unit->count; i++) {
        const Tensor *t = &f->table->tensors[i];
        int64_t end = t->offset + t->rows * t->cols;
        int64_t zeros = (gradient_is_assigned(f->table, t) ? t->offset : end) - written;
        device_zero(f->dev, u->dweights + written, sizeof(float) * (size_t)zeros);
        written = end;
    }
    device_zero(f->dev, u->dweights + written, sizeof(float) * (size_t)(u->padded - written));
}

/* Elements of a unit's sum over micro-batches: its shard's, or all of them. */
static int64_t accumulated(const Fsdp *f, const FsdpUnit *u) { return f->sums_here ? u->padded : u->part; }

/* The part of the gradient that this rank's reduce-scatter yields; the piece of it that this replica answers for. */
static float *gradient_part(const Fsdp *f, const FsdpUnit *u) { return u->grad + (f->rank * u->part - u->begin); }
static float *gradient_owned(const FsdpUnit *u) { return u->grad + (u->owned_begin - u->begin); }

/* Where the gradient of micro-batch `micro` goes first; whether it replaces what is there. */
static float *accumulate_into(Fsdp *f, FsdpUnit *u, int micro, int *replace) {
    *replace = f->cascade ? micro % 2 == 0 : micro == 0;
    return f->cascade ? u->partial[0] : u->total;
}

/* Deterministic: micro-batches are summed as a binary tree too, by cascade (Knuth's binary counter): two sums of as
 * many micro-batches become one, a level up. The last micro-batch gathers what is left; u->total is the sum of all. */
static void accumulate_finish(Fsdp *f, FsdpUnit *u, int micro) {
    int level = 0, last = micro == f->how.accumulation - 1;
    for (int bits = micro; f->cascade && level + 1 < f->cascade && (bits & 1 || last); bits >>= 1, level++) {
        int waits = micro >> (level + 1) & 1; // a sum of the next level waits: add to it; else move up
        if (waits) tree_sum(f->dev, u->partial[level + 1], u->partial[level], DTYPE_F32, 1, accumulated(f, u), 1);
        else {
            float *up = u->partial[level];
            u->partial[level] = u->partial[level + 1], u->partial[level + 1] = up;
        }
    }
    if (f->cascade && last) u->total = u->partial[level];
    if (f->sums_here) return;
    if (u->held == u->part) u->grad = u->total;
    else if (last && u->total != gradient_part(f, u))
        tree_sum(f->dev, gradient_part(f, u), u->total, DTYPE_F32, 1, u->part, 0);
}

static void gradient_release(Fsdp *f, FsdpUnit *u) {
    slot_release(f->dev, f->gradient_slots, f->num_gradient_slots, u->dweights);
    u->dweights = NULL;
}

/* A micro-batch's gradient is on this rank alone (there is one rank, or it is summed over ranks later): adds it up
 * here. */
static void accumulate_here(Fsdp *f, FsdpUnit *u, int micro) {
    int replace;
    float *sum = accumulate_into(f, u, micro, &replace);
    if (f->rounds_leaves) {
        cast_to_bf16(f->dev, f->stages[REDUCE_SHARDS].rounded, u->dweights, u->padded);
        tree_sum(f->dev, sum, f->stages[REDUCE_SHARDS].rounded, DTYPE_BF16, 1, u->padded, !replace);
    } else if (u->dweights != sum) {
        tree_sum(f->dev, sum, u->dweights, DTYPE_F32, 1, u->padded, !replace);
    }
    accumulate_finish(f, u, micro);
    gradient_release(f, u);
}

/* Does the gradient of micro-batch `micro` go through this stage? */
static int stage_applies(const Fsdp *f, StageKind kind, int micro) {
    int last = micro == f->how.accumulation - 1, over_shards = f->ranks > 1 && (last || !f->sums_here);
    if (kind == REDUCE_SHARDS) return over_shards;
    if (kind == GATHER_SHARDS) return over_shards && !f->how.strategy->sharded; // an all-reduce
    return f->replicas > 1 && last;                                             // across replicas once a step
}

static void stage_start(Fsdp *f, StageKind kind, FsdpUnit *u, int micro) {
    Stage *s = &f->stages[kind];
    int reduces = kind == REDUCE_SHARDS || kind == REDUCE_REPLICAS,
        shards = kind == REDUCE_SHARDS || kind == GATHER_SHARDS;
    int64_t piece = shards ? u->part : u->owned,
            count = reduces ? piece * (shards ? f->ranks : f->replicas) : piece; // of a member; that this rank sends
    const float *from = kind == REDUCE_SHARDS     ? (f->sums_here ? u->total : u->dweights)
                        : kind == GATHER_REPLICAS ? gradient_owned(u)
                                                  : gradient_part(f, u);
    void *into = kind == GATHER_REPLICAS ? gradient_part(f, u) : kind == GATHER_SHARDS ? u->grad : s->receive;
    if (s->rounded) cast_to_bf16(f->dev, s->rounded, from, count);
    s->request.summed = f->how.summed;
    collective_start(f->comm, &s->request, reduces ? REDUCE_SCATTER : ALL_GATHER,
                     shards ? AXIS_FSDP : AXIS_DP_REPLICATE, u->unit->name,
                     s->rounded ? (const void *)s->rounded : from, s->rounded ? s->receive : into, (size_t)piece,
                     f->how.reduce_dtype);
    s->unit = u;
    s->micro = micro;
}

/* What a stage received is put where it belongs; a reduction's pieces are summed as a binary tree, in fp32. */
static void stage_finish(Fsdp *f, StageKind kind) {
    Stage *s = &f->stages[kind];
    FsdpUnit *u = s->unit;
    int replace = 1;
    collective_wait(f->comm, &s->request);
    if (kind == REDUCE_SHARDS) {
        float *sum = f->sums_here ? gradient_part(f, u) : accumulate_into(f, u, s->micro, &replace);
        tree_sum(f->dev, sum, s->receive, f->how.reduce_dtype, f->how.summed ? 1 : f->ranks, u->part, !replace);
        if (!f->sums_here) accumulate_finish(f, u, s->micro);
        gradient_release(f, u);
    }
    if (kind == REDUCE_REPLICAS)
        tree_sum(f->dev, gradient_owned(u), s->receive, f->how.reduce_dtype, f->how.summed ? 1 : f->replicas, u->owned,
                 0);
    if (kind == GATHER_REPLICAS && s->rounded)
        tree_sum(f->dev, gradient_part(f, u), s->receive, DTYPE_BF16, 1, u->part, 0);
    int last = s->micro ==
               f->how.accumulation -
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
    for (int from = STAGES - 1; from >= -1; from--) { // the furthest first: it makes room for the next
        FsdpUnit *u = from < 0 ? entering : f->stages[from].unit;
        int micro = from < 0 ? entering_micro : f->stages[from].micro, to = from + 1;
        if (!u) continue;
        if (from >= 0) stage_finish(f, (StageKind)from);
        while (to < STAGES && !stage_applies(f, (StageKind)to, micro)) to++;
        if (to < STAGES) stage_start(f, (StageKind)to, u, micro), in_flight++;
    }
    device_stream(f->dev, before);
    return in_flight;
}

static void reductions_finish(Fsdp *f) {
    while (reductions_advance(f, NULL, 0)) {}
    comm_await(f->comm, device_mark(f->dev, STREAM_REDUCE), "reductions");
}

/* Where backward leaves the gradient of micro-batch `micro`, (padded), made from zero.
 * Where it stays on this rank and there is no sum to add to, straight into its place. */
static float *unit_gradients(Fsdp *f, FsdpUnit *u, int micro) {
    for (int s = 0; s < STAGES; s++)
        if (f->stages[s].unit == u) reductions_finish(f); // tied: last to be reduced, first to be made again
    if (u->dweights) return u->dweights;
    int replace, stays = (f->ranks == 1 || f->sums_here) && !f->rounds_leaves && !f->stores_gradients;
    float *sum = accumulate_into(f, u, micro, &replace);
    u->dweights =
        stays && replace ? sum : (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "the gradient");
    gradients_clear(f, u);
    return u->dweights;
}

/* Starts the sum of a unit's gradient over all ranks: over the fsdp group by a reduce-scatter made of an all-to-all and
 * a sum in a fixed order, then over replicas, then, without sharding, everybody gets all of it. It travels while the
 * next blocks compute. Accumulated locally, that is done once a step, with the sum of all micro-batches. */
static void unit_reduce(Fsdp *f, FsdpUnit *u, int micro) {
    for (int s = 0; s < STAGES; s++) // of an interleaved pipeline: one run of blocks is at its last micro-batch before
                                     // another one, whose gradients, with fewer stages, must not overtake
        if (f->stages[s].unit && stage_applies(f, REDUCE_REPLICAS, f->stages[s].micro) &&
            !stage_applies(f, REDUCE_REPLICAS, micro) && stage_applies(f, GATHER_SHARDS, micro))
            while (reductions_advance(f, NULL, 0)) {}
    if (f->ranks == 1 || f->sums_here) accumulate_here(f, u, micro);
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
    return t->is_copy || (t->row->split == SPLIT_NONE && f->table->part.tp_rank > 0);
}

/* Visits each trained tensor's elements that this rank holds, or, with `owned`, of which every element of the model is
 * visited by one rank alone; in table order. Padding belongs to no tensor: nobody visits it. */
static int piece_next(const Fsdp *f, int *i, ShardPiece *piece, int owned) {
    while (*i < f->table->num_tensors) {
        const Tensor *t = &f->table->tensors[(*i)++];
        FsdpUnit *u = &f->units[t->unit];
        if (u->unit->frozen) continue; // it has no state
        int64_t begin = owned ? u->owned_begin : u->begin, count = owned ? u->owned : u->held;
        if (owned && is_owned_elsewhere(f, t)) continue;
        piece->unit = u;
        piece->tensor = t;
        piece->count = tensor_overlap(t, begin, begin + count, &piece->first);
        piece->at = t->offset + piece->first - u->begin;
        if (piece->count) return 1;
    }
    return 0;
}
static int held_next(const Fsdp *f, int *i, ShardPiece *piece) { return piece_next(f, i, piece, 0); }
static int owned_next(const Fsdp *f, int *i, ShardPiece *piece) { return piece_next(f, i, piece, 1); }

/* The compute copy follows the master; needed once the master was set from outside AdamW. */
static void fsdp_refresh_copies(Fsdp *f) {
    for (int u = 0; u < f->table->num_units; u++)
        if (f->units[u].master && (void *)f->units[u].copy != (void *)f->units[u].master)
            cast_to_bf16(f->dev, (bf16 *)(void *)f->units[u].copy, f->units[u].master, f->units[u].held);
    device_order(f->dev, STREAM_GATHER, STREAM_COMPUTE);
}

static void *state_of(const FsdpUnit *u, StateKind k) {
    void *const all[STATES] = {u->master, u->grad, u->exp_avg, u->exp_avg_sq,
                               (void *)u->copy == (void *)u->master ? NULL : u->copy};
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
        if (!fill(from, out + at, scales + at / BASE_BLOCK, t, whole, run)) return 0;
    }
    return 1;
}

/* Sets what this rank holds of one kind of state, a chunk at a time. */
static void fsdp_set_state(Fsdp *f, StateKind kind, Fill fill, void *from) {
    enum { CHUNK = 1 << 20 };
    float *chunk = (float *)checked_malloc(sizeof(float) * CHUNK);
    ShardPiece p;
    for (int i = 0; held_next(f, &i, &p) && !f->dev->walk;)
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
    if (f->config->base == BASE_TRAINED || f->dev->walk) return;
    float *wide = (float *)checked_malloc(sizeof(float) * CHUNK);
    char *narrow = (char *)checked_malloc(CHUNK * sizeof(floatX));
    float *scales = (float *)checked_malloc(sizeof(float) * CHUNK / BASE_BLOCK);
    for (int i = 0; i < f->table->num_tensors; i++) {
        const Tensor *t = &f->table->tensors[i];
        FsdpUnit *u = &f->units[t->unit];
        const Packed *p = &u->packed;
        int64_t elements = t->rows * t->cols, part = f->how.strategy->sharded ? f->rank : 0, first = 0,
                count = elements, to;
        char *place = (char *)u->copy;
        if (!u->unit->frozen) continue;
        if (!p->parts)
            count = tensor_overlap(t, u->begin, u->begin + u->held, &first), to = t->offset + first - u->begin;
        else { // what of the tensor is in this rank's part
            int64_t each = t->block8 < 0 ? p->plain : p->blocks * BASE_BLOCK,
                    at = t->block8 < 0 ? t->plain : t->block8 * BASE_BLOCK;
            first = max_i64(0, part * each - at), count = max_i64(0, min_i64(elements, (part + 1) * each - at) - first),
            to = at + first - part * each;
            if (t->block8 < 0) place += p->blocks * (int64_t)(BASE_BLOCK + sizeof(float));
        }
        for (int64_t done = 0, n; done < count; done += n) {
            n = min_i64(CHUNK, count - done);
            int64_t blocks = blocks8(n);
            int as_it_is = t->block8 >= 0 && fill_blocks &&
                           fill_part_blocks(fill_blocks, from, (int8_t *)narrow, scales, t, first + done, n);
            if (!as_it_is) fill_part(f, fill, from, STATE_MASTER, wide, t, first + done, n);
            if (t->block8 >= 0) {
                for (int64_t b = 0; b < blocks && !as_it_is; b++)
                    scales[b] = quantize_block((int8_t *)narrow + b * BASE_BLOCK, wide + b * BASE_BLOCK,
                                               min_i64(BASE_BLOCK, n - b * BASE_BLOCK));
                device_write(f->dev, place + to + done, narrow, (size_t)n);
                device_write(f->dev, place + p->blocks * BASE_BLOCK + (to + done) / BASE_BLOCK * (int64_t)sizeof(float),
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

static const float *unit_state(Fsdp *f, FsdpUnit *u, StateKind kind);
static void unit_state_free(Fsdp *f, const float *whole);

/* All of a frozen unit's weights in fp32, (padded), with what its adapters add to them. */
static const float *unit_merged(Fsdp *f, FsdpUnit *u) {
    const Llama3Config *c = f->config;
    float *whole = (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "all of its weights");
    tree_sum(f->dev, whole, unit_weights(f, u), FLOATX, 1, u->padded, 0);
    unit_free(f, u, PASS_LAST);
    if (u->unit->kind != UNIT_BLOCK || !c->lora_rank) return whole;
    FsdpUnit *adapters = &f->units[table_block_adapters(f->table, u->unit->block)];
    const float *thin = unit_state(f, adapters, STATE_MASTER);
    for (int i = u->unit->first; i < u->unit->first + u->unit->count; i++) {
        const Tensor *w = &f->table->tensors[i];
        int64_t block = (w->offset - u->unit->where[w->row->kind]) / f->table->block_size *
                        f->table->adapters_size; // where its block's adapters begin
        if (!is_adapted(c, w->row->kind)) continue;
        adapter_merge(f->dev, whole + w->offset, thin + block + adapters->unit->where[lora_a(w->row->kind)],
                      thin + block + adapters->unit->where[lora_b(w->row->kind)], adapter_scale(c), c->lora_rank,
                      w->cols, w->rows);
    }
    unit_state_free(f, thin);
    return whole;
}

/* All of a unit's state of one kind, (padded), in the device's memory: where it lies, or gathered from all shards to
 * where the unit's gradient is made in a step. Between steps; valid until unit_state_free. All ranks of the group call
 * it alike. */
static const float *unit_state(Fsdp *f, FsdpUnit *u, StateKind kind) {
    float *mine = (float *)state_of(u, kind);
    if (u->unit->frozen) return unit_merged(f, u);
    if (u->held == u->padded) return mine;
    float *whole = (float *)slot_take(f, f->gradient_slots, f->num_gradient_slots, u, "all of its state");
    if (f->dev->arenas[states[kind].category].slow && !SLOW_TIER_COMPUTES)
        device_copy(f->dev, whole + u->begin, mine, sizeof(float) * (size_t)u->held), mine = whole + u->begin;
    all_gather_now(f->comm, AXIS_FSDP, u->unit->name, mine, whole, sizeof(float) * (size_t)u->part);
    return whole;
}
static void unit_state_free(Fsdp *f, const float *whole) {
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
        for (i = unit->first; i < unit->first + unit->count; i++)
            all_owned &= !is_owned_elsewhere(f, &f->table->tensors[i]);
        if (all_owned) squared_norm(f->dev, sum, gradient_owned(&f->units[u]), f->units[u].owned);
        for (i = unit->first; !all_owned && owned_next(f, &i, &p) && p.unit == &f->units[u];)
            squared_norm(f->dev, sum, p.unit->grad + p.at, p.count);
    }
}

/* Elements that tensor parallelism does not split, of trained units [first, end). */
static int64_t unsplit_elements(const TensorTable *t, int first, int end) {
    int64_t n = 0;
    for (int i = 0; i < t->num_tensors; i++)
        if (t->tensors[i].unit >= first && t->tensors[i].unit < end && t->tensors[i].row->split == SPLIT_NONE &&
            !t->units[t->tensors[i].unit].frozen)
            n += t->tensors[i].rows * t->tensors[i].cols;
    return n;
}

/* How many units are summed over tp at once: norms are few, so all; of adapters, which are many, one. */
static int unsplit_units(const Fsdp *f) { return f->config->lora_rank ? 1 : f->table->num_units; }

/* What tensor parallelism does not split, the norms and one half of each adapter, has on each of its ranks the gradient
 * of that rank's rows of the sequence alone. Once a step it is gathered from all, and summed in the same order on each.
 */
static void fsdp_sum_unsplit(Fsdp *f) {
    const TensorTable *table = f->table;
    Group *tp = &f->comm->groups[AXIS_TP];
    for (int first = 0, end; first < table->num_units && tp->size > 1; first = end) {
        end = first + unsplit_units(f);
        int64_t n = unsplit_elements(table, first, end), at;
        float *mine = f->unsplit_sums,
              *all = mine + n; // (n), (tp, n): what this rank does not hold is zero, as on its peers
        if (!n) continue;
        device_zero(f->dev, mine, sizeof(float) * (size_t)n);
        for (int back = 0; back < 2; back++) {
            at = 0;
            for (int i = table->units[first].first; i < table->units[end - 1].first + table->units[end - 1].count;
                 i++) {
                const Tensor *t = &table->tensors[i];
                FsdpUnit *u = &f->units[t->unit];
                int64_t begin, count = tensor_overlap(t, u->begin, u->begin + u->held, &begin);
                if (t->row->split != SPLIT_NONE) continue;
                float *grad = u->grad + (t->offset + begin - u->begin), *place = mine + at + begin;
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
static void fsdp_sum_tied(Fsdp *f) {
    const TensorTable *t = f->table;
    if (!t->part.tied_apart || (t->embed < 0 && t->head < 0) || t->units[t->embed >= 0 ? t->embed : t->head].frozen)
        return;
    FsdpUnit *u = &f->units[t->embed >= 0 ? t->embed : t->head];
    int64_t first, count = tensor_overlap(&t->tensors[u->unit->first], u->begin, u->begin + u->held, &first);
    float *mine = u->grad, *others = f->tied_gradient;
    size_t bytes = sizeof(float) * (size_t)u->held;
    if (t->part.stages > 1) {
        int peer = t->embed >= 0 ? t->part.stages - 1 : 0;
        device_copy(f->dev, f->tied_gradient + u->held, mine, bytes); // what is sent stays as it is
        for (int i = 0; i < 2; i++) { // the first stage sends first: NCCL has one message after the other
            int sends = i == (t->embed < 0);
            point_start(f->comm, &f->tied_requests[i], sends ? SEND : RECEIVE, AXIS_PP, peer,
                        "gradient of the tied weight", sends ? f->tied_gradient + u->held : others, (size_t)u->held,
                        DTYPE_F32);
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
            home ? slow_fetch(f->dev, states[k].category, home, s->near[k], states[k].element * (size_t)u->held) : NULL;
    }
    if (f->stages_state) device_record(f->dev, &s->fetched);
    device_stream(f->dev, before);
    return s;
}

/* The compute stream is through with it: puts what AdamW wrote where it belongs. */
static void state_store(Fsdp *f, FsdpUnit *u, Staged *s) {
    if (f->stages_state) device_order(f->dev, STREAM_STORE, STREAM_COMPUTE);
    StreamKind before = device_stream(f->dev, STREAM_STORE);
    for (int k = 0; k < STATES; k++) {
        void *home = state_of(u, (StateKind)k);
        if (home && (k != STATE_COPY || s->near[k]))
            slow_store(f->dev, states[k].category, home, s->at[k], states[k].element * (size_t)u->held,
                       states[k].written); // files: the copy is gathered next
    }
    if (f->stages_state) device_record(f->dev, &s->stored);
    device_stream(f->dev, before);
}

/* One AdamW step on what this rank holds; `grad_scale` turns the summed gradient into the clipped mean. Offloaded state
 * streams through: while a unit is updated the next one comes and the one before goes. */
static void fsdp_adamw(Fsdp *f, const AdamW *o, float grad_scale, int step) {
    ShardPiece p;
    FsdpUnit *now = NULL, *ahead = NULL, *end = f->units + f->table->num_units;
    Staged *s = NULL;
    device_order(f->dev, STREAM_FETCH, STREAM_COMPUTE);
    for (int i = 0; held_next(f, &i, &p);) {
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
              o->beta2, o->eps, p.tensor->row->decays ? o->weight_decay : 0.0f, grad_scale, step);
    }
    if (now) state_store(f, now, s);
    device_order(f->dev, STREAM_GATHER, f->fetches_weights ? STREAM_STORE : STREAM_COMPUTE); // the next step's weights
    device_order(f->dev, STREAM_COMPUTE, STREAM_STORE);
}

/* Which ranks hold the same weights as this one: its replicas, and without sharding all ranks of its fsdp group. */
static int holds_the_same(const Fsdp *f, Axis axis) {
    return f->comm->groups[axis].size > 1 &&
           (axis == AXIS_DP_REPLICATE || (axis == AXIS_FSDP && !f->how.strategy->sharded));
}

/* What ranks have in common is still the same on each: silent corruption of memory shows nowhere else. */
static void fsdp_check_replicas(Fsdp *f, int64_t step) {
    int units = f->table->num_units;
    uint64_t *mine = f->fingerprints, *all = mine + units;
    for (int u = 0; u < units; u++) {
        const FsdpUnit *of = &f->units[u];
        if (!of->unit->frozen) fingerprint(f->dev, f->prints + u, of->master, of->held * (int64_t)sizeof(float));
        else fingerprint(f->dev, f->prints + u, of->copy, (int64_t)held_bytes(f, of));
    }
    device_read(f->dev, mine, f->prints, sizeof(uint64_t) * (size_t)units);
    for (Axis axis = AXIS_TP; axis < AXES; axis = (Axis)(axis + 1)) {
        Group *g = &f->comm->groups[axis];
        if (!holds_the_same(f, axis)) continue;
        all_gather_now(f->comm, axis, "replica check", mine, all, sizeof(uint64_t) * (size_t)units);
        for (int i = 0; i < units * g->size && !f->dev->walk; i++)
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
    int sharded = f->how.strategy->sharded;
    u->unit = unit;
    u->padded = round_up(unit->size, (int64_t)TENSOR_ALIGN * f->ranks * f->replicas);
    u->part = u->padded / f->ranks;
    u->held = sharded ? u->part : u->padded;
    u->begin = sharded ? f->rank * u->part : 0;
    u->owned = u->part / f->replicas;
    u->owned_begin = f->rank * u->part + f->replica * u->owned;
    if (unit->frozen) {
        if (unit->blocks8) {
            Packed *p = &u->packed;
            p->parts = sharded ? f->ranks : 1;
            p->blocks = round_up(unit->blocks8, 4 * p->parts) / p->parts; // scales begin on 16 bytes
            p->plain = round_up(unit->plain, TENSOR_ALIGN * p->parts) / p->parts;
            p->bytes = p->blocks * (int64_t)(BASE_BLOCK + sizeof(float)) + p->plain * (int64_t)sizeof(floatX);
        }
        u->copy = (floatX *)arena_alloc(
            f->dev, MEM_PARAMS, unit->blocks8 ? "frozen weights of 8 bits" : "frozen weights", held_bytes(f, u));
        if (training && !weights_are_here(f) && f->how.strategy->freed == PASS_LAST)
            u->home = (floatX *)arena_alloc(f->dev, MEM_COMM, "gathered weights of the step", stored_bytes(u));
        return;
    }
    u->master = state_alloc(f, MEM_PARAMS, "master weights", u->held);
    u->copy = (floatX *)u->master;
    MemCategory copies =
        f->dev->arenas[MEM_PARAMS].slow ? MEM_PARAMS : MEM_COMM; // offloaded, they go where the master goes
    if (sizeof(floatX) != sizeof(float))
        u->copy = (floatX *)arena_alloc(f->dev, copies, "weights to compute with", sizeof(floatX) * (size_t)u->held);
    if (!training) return;
    if (!weights_are_here(f) && f->how.strategy->freed == PASS_LAST)
        u->home =
            (floatX *)arena_alloc(f->dev, MEM_COMM, "gathered weights of the step", sizeof(floatX) * (size_t)u->padded);
    u->grad = state_alloc(f, MEM_GRADS, "gradients", u->held);
    u->total = f->sums_here ? u->grad : gradient_part(f, u);
    if (f->sums_here && u->held < u->padded)
        u->total = state_alloc(f, MEM_GRADS, "gradients of this rank's micro-batches", u->padded);
    u->partial[0] = u->total;
    for (int l = 1; l < f->cascade; l++)
        u->partial[l] = state_alloc(f, MEM_WORKSPACE, "sums of micro-batches", accumulated(f, u));
    u->exp_avg = state_alloc(f, MEM_OPTIMIZER, "exp_avg", u->held);
    u->exp_avg_sq = state_alloc(f, MEM_OPTIMIZER, "exp_avg_sq", u->held);
}

/* Buffers of what gradients go through. */
static void stages_open(Fsdp *f) {
    static const char *const names[STAGES] = {"gradient pieces of all ranks", "gradient pieces of all replicas",
                                              "gradients gathered from replicas", "gradients gathered from ranks"};
    int half = f->how.reduce_dtype == DTYPE_BF16, last = f->how.accumulation - 1;
    size_t element = half ? sizeof(bf16) : sizeof(float);
    int64_t largest = 0;
    for (int u = 0; u < f->table->num_units; u++)
        if (!f->units[u].unit->frozen) largest = max_i64(largest, f->units[u].padded);
    for (int k = 0; k < STAGES; k++) {
        int64_t whole =
            k == REDUCE_SHARDS || k == GATHER_SHARDS ? largest : largest / f->ranks; // what all members have together
        int64_t sent = k == REDUCE_SHARDS || k == REDUCE_REPLICAS ? whole
                       : k == GATHER_SHARDS                       ? largest / f->ranks
                                                                  : largest / f->ranks / f->replicas;
        int applies = stage_applies(f, (StageKind)k, last),
            lands_in_place = (k == GATHER_REPLICAS || k == GATHER_SHARDS) && !half;
        if (half && (applies || (k == REDUCE_SHARDS && f->rounds_leaves)))
            f->stages[k].rounded =
                (bf16 *)arena_alloc(f->dev, MEM_COMM, "rounded gradients", sizeof(bf16) * (size_t)sent);
        int summed = f->how.summed && (k == REDUCE_SHARDS || k == REDUCE_REPLICAS),
            members = k == REDUCE_SHARDS ? f->ranks : f->replicas;
        if (applies && !lands_in_place)
            f->stages[k].receive =
                arena_alloc(f->dev, MEM_COMM, names[k], element * (size_t)(summed ? whole / members : whole));
    }
}

/* Where state that was offloaded comes to, to be computed with. */
static void staged_open(Fsdp *f) {
    int64_t largest = 0;
    const FsdpUnit *trained = f->units;
    for (int u = 0; u < f->table->num_units; u++)
        if (!f->units[u].unit->frozen) largest = max_i64(largest, f->units[u].held), trained = &f->units[u];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < STATES && !SLOW_TIER_COMPUTES; k++)
            if (f->dev->arenas[states[k].category].slow && state_of(trained, (StateKind)k)) {
                f->staged[i].near[k] = arena_alloc(f->dev, MEM_WORKSPACE, "offloaded state that AdamW computes with",
                                                   (size_t)largest * states[k].element);
                f->stages_state = 1;
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
    f->how = *how;
    f->cascade = how->deterministic;
    while (how->deterministic && 1 << (f->cascade - 1) < how->accumulation) f->cascade++;
    f->ranks = comm->groups[AXIS_FSDP].size, f->rank = comm->groups[AXIS_FSDP].rank;
    f->replicas = comm->groups[AXIS_DP_REPLICATE].size, f->replica = comm->groups[AXIS_DP_REPLICATE].rank;
    f->sums_here = f->ranks > 1 && (how->accumulation > 1 ? how->local : !how->strategy->sharded);
    f->rounds_leaves = how->reduce_dtype == DTYPE_BF16 && f->ranks == 1;
    f->fetches_weights = f->dev->arenas[MEM_PARAMS].slow && !SLOW_TIER_COMPUTES;
    f->stores_gradients = f->dev->arenas[MEM_GRADS].slow && !SLOW_TIER_COMPUTES;
    f->units = (FsdpUnit *)checked_malloc(sizeof(FsdpUnit) * (size_t)table->num_units);
    for (int i = 0; i < table->num_units; i++) unit_open(f, &f->units[i], &table->units[i], training);
    if (!weights_are_here(f) && !f->units[0].home) {
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
            gathers = !training && how->saves && how->strategy->sharded && f->ranks > 1;
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, (UnitKind)k, frozen ? how->merges : gathers,
                  "a unit to be written", SLOT_GRADIENT);
    }
    if (!training) return;
    int in_place = (f->ranks == 1 || f->sums_here) && !f->rounds_leaves &&
                   !f->stores_gradients; // backward makes gradients where they belong
    if (!in_place || how->accumulation > 1) {
        int adapters = config->lora_rank > 0;
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_EMBED, !adapters, "embedding gradient",
                  SLOT_GRADIENT);
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, adapters ? UNIT_ADAPTERS : UNIT_BLOCK,
                  in_place ? 1 : GRADIENT_SLOTS, "block gradients", SLOT_GRADIENT);
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_HEAD, !adapters, "head gradient", SLOT_GRADIENT);
    }
    stages_open(f);
    staged_open(f);
    int64_t unsplit = 0;
    for (int u = 0; u < table->num_units; u += unsplit_units(f))
        unsplit = max_i64(unsplit, unsplit_elements(table, u, u + unsplit_units(f)));
    int tied = table->embed >= 0 ? table->embed : table->head; // of a pipeline's ends
    if (table->part.tied_apart && table->part.stages > 1 && tied >= 0 && !table->units[tied].frozen)
        f->tied_gradient = (float *)arena_alloc(f->dev, MEM_COMM, "gradient of the tied weight",
                                                2 * sizeof(float) * (size_t)f->units[tied].held);
    if (unsplit && table->part.tp > 1)
        f->unsplit_sums = (float *)arena_alloc(f->dev, MEM_COMM, "gradients that tp does not split",
                                               sizeof(float) * (size_t)(unsplit * (1 + table->part.tp)));
    int copies =
        (holds_the_same(f, AXIS_DP_REPLICATE) ? f->replicas : 0) + (holds_the_same(f, AXIS_FSDP) ? f->ranks : 0);
    if ((!how->check_replicas && !how->saves) || !copies) return;
    f->prints = (uint64_t *)arena_alloc(f->dev, MEM_WORKSPACE, "fingerprints of the weights",
                                        sizeof(uint64_t) * (size_t)table->num_units);
    f->fingerprints = (uint64_t *)arena_alloc(f->dev, MEM_HOST, "fingerprints of all ranks",
                                              sizeof(uint64_t) * (size_t)table->num_units * (size_t)(1 + copies));
}

static void fsdp_close(Fsdp *f) {
    for (int u = 0; f->units && u < f->table->num_units; u++) device_forget_event(f->units[u].gather.arrived);
    for (int i = 0; i < STAGES; i++) device_forget_event(f->stages[i].request.arrived);
    for (int i = 0; i < f->num_weight_slots; i++) device_forget_event(f->weight_slots[i].freed);
    for (int i = 0; i < f->num_gradient_slots; i++) device_forget_event(f->gradient_slots[i].freed);
    for (int i = 0; i < f->num_widened_slots; i++) device_forget_event(f->widened_slots[i].freed);
    for (int i = 0; i < 2; i++) device_forget_event(f->tied_requests[i].arrived);
    for (int i = 0; i < 2; i++) device_forget_event(f->staged[i].fetched), device_forget_event(f->staged[i].stored);
    free(f->units);
}

#endif
