/* fsdp.h: fully sharded data parallelism (ZeRO-3), written out.
 *
 * A unit (the embedding, a block, the head) is one flat buffer of its tensors. Each rank of the `fsdp` group
 * owns an equal range of it, its shard: master weights, gradient and Adam's moments, 16 bytes an element.
 * The vocabulary is three verbs: unit_gather, unit_free, unit_reduce. The model asks for unit_weights and
 * unit_gradients; a full-size buffer exists only in a slot, and there are few slots: they are the limit on
 * what is in flight.
 */
#ifndef FSDP_H
#define FSDP_H
#include "comm.h"
#include "llama3.h"
#include "kernels.h"

enum { MAX_SLOTS = 20, GRADIENT_SLOTS = 2, MAX_CASCADE = 21 };

typedef struct {
    const Unit *unit;
    int64_t shard;    // elements of one rank
    int64_t padded;   // shard × ranks: the unit's size rounded up, so that every shard starts on TENSOR_ALIGN
    float *master;    // (shard) weights in fp32
    float *grad;      // (shard) sum over ranks and micro-batches of the gradient of the summed loss
    float *total;     // sum over micro-batches: grad itself, or, accumulated locally, (padded) of this rank alone
    float *partial[MAX_CASCADE]; // as total; deterministic: sums of 1, 2, 4, … micro-batches that wait for their neighbour
    float *exp_avg, *exp_avg_sq; // (shard) AdamW's moments
    floatX *copy;     // (shard) the weights as they are gathered; in fp32 the master itself
    floatX *weights;  // (padded) while gathered, else NULL
    float *dweights;  // (padded) while this unit's gradient is made or reduced, else NULL
    Request gather;
} FsdpUnit;

typedef struct {
    UnitKind kind;    // blocks share slots; embedding and head have their own
    void *memory;     // (largest padded unit of that kind)
    int taken;
} Slot;

typedef struct {
    Comm *comm;
    Device *dev;
    const TensorTable *table;
    const Llama3Config *config;
    int ranks, rank;             // of the fsdp group
    FsdpUnit *units;             // (table->num_units)
    Slot weight_slots[MAX_SLOTS], gradient_slots[MAX_SLOTS];
    int num_weight_slots, num_gradient_slots;
    float *receive;              // (ranks, shard of the largest unit): the shard's gradient as each rank has it
    Request reduce;              // at most one reduction is in flight
    FsdpUnit *reducing;
    int reducing_micro;
    int accumulation;            // micro-batches a step
    int local;                   // micro-batches are summed unsharded on each rank, and over ranks once a step
    int cascade;                 // deterministic: levels of partial sums; 0: each micro-batch is added to the sum so far
} Fsdp;

// ---------------------------------------------------------------------------
// slots

static void slots_add(Fsdp *f, Slot *slots, int *count, UnitKind kind, int how_many, const char *name, size_t element) {
    int64_t largest = 0;
    for (int u = 0; u < f->table->num_units; u++)
        if (f->table->units[u].kind == kind) largest = max_i64(largest, f->units[u].padded);
    for (int i = 0; i < how_many && largest; i++) {
        Slot *s = &slots[(*count)++];
        s->kind = kind;
        s->taken = 0;
        s->memory = arena_alloc(f->dev, MEM_COMM, name, (size_t)largest * element);
    }
}

static Slot *slot_find(Slot *slots, int count, UnitKind kind) {
    for (int i = 0; i < count; i++)
        if (slots[i].kind == kind && !slots[i].taken) return &slots[i];
    return NULL;
}

static void slot_release(Slot *slots, int count, const void *memory) {
    for (int i = 0; i < count; i++)
        if (slots[i].memory == memory) slots[i].taken = 0;
}

// ---------------------------------------------------------------------------
// gather and free

/* Starts gathering a unit's weights from all shards. One rank owns all of them: nothing moves. */
static void unit_gather(Fsdp *f, FsdpUnit *u) {
    if (u->weights) return;
    if (f->ranks == 1) { u->weights = u->copy; return; }
    Slot *slot = slot_find(f->weight_slots, f->num_weight_slots, u->unit->kind);
    if (!slot) run_failure("rank %d: no free slot to gather %s", f->comm->rank, u->unit->name);
    slot->taken = 1;
    u->weights = (floatX *)slot->memory;
    collective_start(f->comm, &u->gather, ALL_GATHER, AXIS_FSDP, u->unit->name, u->copy, u->weights, (size_t)u->shard * sizeof(floatX));
}

/* Gathers ahead of need, as far as free slots reach. */
static void unit_prefetch(Fsdp *f, FsdpUnit *u) {
    if (f->ranks == 1 || slot_find(f->weight_slots, f->num_weight_slots, u->unit->kind)) unit_gather(f, u);
}

/* The gathered weights, (padded), valid until unit_free; waits for their arrival. */
static const floatX *unit_weights(Fsdp *f, FsdpUnit *u) {
    unit_gather(f, u);
    collective_wait(f->comm, &u->gather);
    return u->weights;
}

static void unit_free(Fsdp *f, FsdpUnit *u) {
    slot_release(f->weight_slots, f->num_weight_slots, u->weights);
    u->weights = NULL;
}

// ---------------------------------------------------------------------------
// gradients and their reduction

/* Does the backward pass write this tensor's gradient with `=` (one product), not add to it? */
static int gradient_is_assigned(const TensorTable *t, const Tensor *tensor) {
    WeightKind kind = tensor->row->kind;
    int tied_head = kind == W_EMBED && table_head_unit(t) == 0; // the head's product comes first, then the embedding adds
    return tensor->row->rows != DIM_ONE && (kind != W_EMBED || tied_head);
}

/* Zeroes what backward adds to, and the gaps between tensors and at the end: padding is zero and stays zero. */
static void gradients_clear(Fsdp *f, const FsdpUnit *u) {
    int64_t written = 0;
    for (int i = u->unit->first; i < u->unit->first + u->unit->count; i++) {
        const Tensor *t = &f->table->tensors[i];
        int64_t end = t->offset + t->rows * t->cols;
        if (gradient_is_assigned(f->table, t)) memset(u->dweights + written, 0, sizeof(float) * (size_t)(t->offset - written));
        else memset(u->dweights + written, 0, sizeof(float) * (size_t)(end - written));
        written = end;
    }
    memset(u->dweights + written, 0, sizeof(float) * (size_t)(u->padded - written));
}

/* Elements of a unit's sum over micro-batches: its shard's, or all of them. */
static int64_t accumulated(const Fsdp *f, const FsdpUnit *u) { return f->local ? u->padded : u->shard; }

/* Where the gradient of micro-batch `micro` goes first; whether it replaces what is there. */
static float *accumulate_into(Fsdp *f, FsdpUnit *u, int micro, int *replace) {
    *replace = f->cascade ? micro % 2 == 0 : micro == 0;
    return f->cascade ? u->partial[0] : u->total;
}

/* Deterministic: micro-batches are summed as a binary tree too, by cascade (Knuth's binary counter): two sums of as many
 * micro-batches become one, a level up. The last micro-batch gathers what is left; u->total is the sum of all. */
static void accumulate_finish(Fsdp *f, FsdpUnit *u, int micro) {
    int level = 0, last = micro == f->accumulation - 1;
    for (int bits = micro; f->cascade && level + 1 < f->cascade && (bits & 1 || last); bits >>= 1, level++) {
        int waits = micro >> (level + 1) & 1; // a sum of the next level waits: add to it; else move up
        if (waits) tree_sum(f->dev, u->partial[level + 1], u->partial[level], 1, accumulated(f, u), 1);
        else {
            float *up = u->partial[level];
            u->partial[level] = u->partial[level + 1], u->partial[level + 1] = up;
        }
    }
    if (f->cascade && last) u->total = u->partial[level];
    if (!f->local) u->grad = u->total;
}

/* A micro-batch's gradient is on this rank alone (there is one rank, or it is summed over ranks later): adds it up here. */
static void accumulate_here(Fsdp *f, FsdpUnit *u, int micro) {
    int replace;
    float *sum = accumulate_into(f, u, micro, &replace);
    if (!replace) tree_sum(f->dev, sum, u->dweights, 1, accumulated(f, u), 1);
    accumulate_finish(f, u, micro);
    slot_release(f->gradient_slots, f->num_gradient_slots, u->dweights);
    u->dweights = NULL;
}

/* A reduction in flight is finished: the pieces of all ranks are summed as a binary tree into the shard. */
static void reduce_finish(Fsdp *f) {
    FsdpUnit *u = f->reducing;
    if (!u) return;
    int replace = 1;
    float *sum = f->local ? u->grad : accumulate_into(f, u, f->reducing_micro, &replace);
    collective_wait(f->comm, &f->reduce);
    tree_sum(f->dev, sum, f->receive, f->ranks, u->shard, !replace);
    if (!f->local) accumulate_finish(f, u, f->reducing_micro);
    slot_release(f->gradient_slots, f->num_gradient_slots, u->dweights);
    u->dweights = NULL;
    f->reducing = NULL;
}

/* Where backward leaves the gradient of micro-batch `micro`, (padded), made from zero.
 * Where it stays on this rank and there is no sum to add to, straight into its place. */
static float *unit_gradients(Fsdp *f, FsdpUnit *u, int micro) {
    if (f->reducing == u) reduce_finish(f); // tied: last to be reduced, first to be made again
    if (u->dweights) return u->dweights;
    int replace;
    float *sum = accumulate_into(f, u, micro, &replace);
    if ((f->ranks == 1 || f->local) && replace) {
        u->dweights = sum;
    } else {
        Slot *slot = slot_find(f->gradient_slots, f->num_gradient_slots, u->unit->kind);
        if (!slot) run_failure("rank %d: no free slot for the gradient of %s", f->comm->rank, u->unit->name);
        slot->taken = 1;
        u->dweights = (float *)slot->memory;
    }
    if (!f->dev->walk) gradients_clear(f, u);
    return u->dweights;
}

/* Starts the sum of a unit's gradient over all ranks, each keeping its shard: a reduce-scatter made of an
 * all-to-all and a sum in a fixed order. It travels while the next block computes. Accumulated locally, that is
 * done once a step, with the sum of all micro-batches. */
static void unit_reduce(Fsdp *f, FsdpUnit *u, int micro) {
    reduce_finish(f);
    if (f->ranks == 1 || f->local) accumulate_here(f, u, micro);
    if (f->ranks == 1 || (f->local && micro < f->accumulation - 1)) return;
    const float *send = f->local ? u->total : u->dweights;
    collective_start(f->comm, &f->reduce, REDUCE_SCATTER, AXIS_FSDP, u->unit->name, send, f->receive, (size_t)u->shard * sizeof(float));
    f->reducing = u;
    f->reducing_micro = micro;
}

// ---------------------------------------------------------------------------
// loops over the shards

typedef struct { FsdpUnit *unit; const Tensor *tensor; int64_t first, count, at; } ShardPiece; // tensor[first…] lies at shard[at…]

/* Visits what this rank owns of each tensor, in table order. Padding belongs to no tensor: nobody visits it. */
static int shard_next(const Fsdp *f, int *i, ShardPiece *piece) {
    while (*i < f->table->num_tensors) {
        const Tensor *t = &f->table->tensors[(*i)++];
        FsdpUnit *u = &f->units[t->unit];
        int64_t begin = f->rank * u->shard;
        piece->unit = u;
        piece->tensor = t;
        piece->count = tensor_overlap(t, begin, begin + u->shard, &piece->first);
        piece->at = t->offset + piece->first - begin;
        if (piece->count) return 1;
    }
    return 0;
}

/* The compute copy follows the master; needed once the master was set from outside AdamW. */
static void fsdp_refresh_copies(Fsdp *f) {
    for (int u = 0; u < f->table->num_units; u++)
        if ((void *)f->units[u].copy != (void *)f->units[u].master)
            cast_to_floatx(f->dev, f->units[u].copy, f->units[u].master, f->units[u].shard);
}

static void fsdp_init_weights(Fsdp *f, uint64_t seed) {
    ShardPiece p;
    for (int i = 0; shard_next(f, &i, &p);)
        if (!f->dev->walk) tensor_init(p.unit->master + p.at, p.tensor, f->config, seed, p.first, p.count, f->dev->threads);
    fsdp_refresh_copies(f);
}

/* Sum of squares of this rank's part of the gradient: exact over blocks that no shard's cut divides, so the norm has
 * the same bits on any number of ranks. Padding is zero. */
static ExactSum fsdp_squared_norm(Fsdp *f) {
    ExactSum sum = ZERO;
    for (int u = 0; u < f->table->num_units; u++) squared_norm(f->dev, &sum, f->units[u].grad, f->units[u].shard);
    return sum;
}

typedef struct { float lr, beta1, beta2, eps, weight_decay; } AdamW;

/* One AdamW step on this rank's shards; `grad_scale` turns the summed gradient into the clipped mean. */
static void fsdp_adamw(Fsdp *f, const AdamW *o, float grad_scale, int step) {
    ShardPiece p;
    for (int i = 0; shard_next(f, &i, &p);) {
        FsdpUnit *u = p.unit;
        floatX *copy = (void *)u->copy == (void *)u->master ? NULL : u->copy + p.at;
        adamw(f->dev, u->master + p.at, u->exp_avg + p.at, u->exp_avg_sq + p.at, u->grad + p.at, copy, p.count,
              o->lr, o->beta1, o->beta2, o->eps, p.tensor->row->decays ? o->weight_decay : 0.0f, grad_scale, step);
    }
}

// ---------------------------------------------------------------------------
// set-up

static float *shard_alloc(Fsdp *f, MemCategory category, const char *name, int64_t elements) {
    return (float *)arena_alloc(f->dev, category, name, sizeof(float) * (size_t)elements);
}

/* `training` = 0 (evaluation, generation): master weights only, no gradients, no moments, no gradient slots. */
static void fsdp_open(Fsdp *f, Comm *comm, const TensorTable *table, const Llama3Config *config, int slots, int accumulation, int local, int deterministic, int training) {
    memset(f, 0, sizeof *f);
    f->comm = comm;
    f->dev = comm->dev;
    f->table = table;
    f->config = config;
    f->accumulation = accumulation;
    f->cascade = deterministic;
    while (deterministic && 1 << (f->cascade - 1) < accumulation) f->cascade++;
    f->ranks = comm->groups[AXIS_FSDP].size;
    f->rank = comm->groups[AXIS_FSDP].rank;
    f->local = local && accumulation > 1 && f->ranks > 1; // else the two are the same
    f->units = (FsdpUnit *)checked_malloc(sizeof(FsdpUnit) * (size_t)table->num_units);
    int64_t largest_shard = 0;
    for (int i = 0; i < table->num_units; i++) {
        FsdpUnit *u = &f->units[i];
        u->unit = &table->units[i];
        u->padded = round_up(u->unit->size, (int64_t)TENSOR_ALIGN * f->ranks);
        u->shard = u->padded / f->ranks;
        largest_shard = max_i64(largest_shard, u->shard);
        u->master = shard_alloc(f, MEM_PARAMS, "master weights", u->shard);
        u->copy = (floatX *)u->master;
        if (sizeof(floatX) != sizeof(float))
            u->copy = (floatX *)arena_alloc(f->dev, MEM_COMM, "weights to be gathered", sizeof(floatX) * (size_t)u->shard);
        if (!training) continue;
        u->grad = u->total = shard_alloc(f, MEM_GRADS, "gradient shards", u->shard);
        if (f->local) u->total = shard_alloc(f, MEM_GRADS, "gradients of this rank's micro-batches", u->padded);
        u->partial[0] = u->total;
        for (int l = 1; l < f->cascade; l++) u->partial[l] = shard_alloc(f, MEM_WORKSPACE, "sums of micro-batches", accumulated(f, u));
        u->exp_avg = shard_alloc(f, MEM_OPTIMIZER, "exp_avg", u->shard);
        u->exp_avg_sq = shard_alloc(f, MEM_OPTIMIZER, "exp_avg_sq", u->shard);
    }
    if (f->ranks > 1) {
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_EMBED, 1, "gathered embedding", sizeof(floatX));
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_BLOCK, slots, "gathered blocks", sizeof(floatX));
        slots_add(f, f->weight_slots, &f->num_weight_slots, UNIT_HEAD, 1, "gathered head", sizeof(floatX));
    }
    if (training && (f->ranks > 1 || accumulation > 1)) {
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_EMBED, 1, "embedding gradient", sizeof(float));
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_BLOCK, GRADIENT_SLOTS, "block gradients", sizeof(float));
        slots_add(f, f->gradient_slots, &f->num_gradient_slots, UNIT_HEAD, 1, "head gradient", sizeof(float));
    }
    if (training && f->ranks > 1) f->receive = shard_alloc(f, MEM_COMM, "gradient pieces of all ranks", largest_shard * f->ranks);
}

static void fsdp_close(Fsdp *f) { free(f->units); }

#endif
