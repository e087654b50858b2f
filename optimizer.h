/* optimizer.h: the state that a rank owns, the learning rate, the gradient norm for clipping, and the updates.
 *
 * AdamW needs no communication; Muon (muon.h) does, because it works on whole matrices. A caller may rely on: equal
 * gradients give a norm of equal bits, whatever ranks they are divided among; padding is never updated. With --offload
 * on a GPU, state is in the host's memory: while one unit is updated, the next unit's state is copied in and the
 * previous one's out. With Muon that happens twice, for momentum and for weights.
 */
#ifndef OPTIMIZER_H
#define OPTIMIZER_H
#include "muon.h" // defines: Muon, muon_orthogonalize; includes fsdp.h

// ---------------------------------------------------------------------------
// what this rank keeps of each unit, and of each tensor in it

/* What the optimizer reads and writes of a unit. */
typedef enum { STATE_MASTER, STATE_GRAD, STATE_EXP_AVG, STATE_EXP_AVG_SQ, STATE_COPY, STATES } StateKind;

/* Elements of one kind of state. */
static int64_t state_elements(const FsdpUnit *u, StateKind kind) {
    return kind == STATE_EXP_AVG_SQ ? u->adamw_count : u->state_count;
}

/* (state_elements) NULL: there is none. STATE_COPY: the weights in the compute dtype, if that is not fp32. */
static void *state_of(const FsdpUnit *u, StateKind kind) {
    void *copy = (void *)u->sharded_weights == (void *)u->master ? NULL : u->sharded_weights;
    void *const states[STATES] = {u->master, u->grad, u->exp_avg, u->exp_avg_sq, copy};
    return states[kind];
}

typedef struct {
    FsdpUnit *unit;
    const Tensor *tensor;
    int64_t first, count; // elements of this rank's part of the tensor
    int64_t at;           // where they begin in the unit's state: master + at, grad + at, …
    int64_t adamw_at;     // where they begin in exp_avg_sq; -1: Muon trains the tensor, and they have no exp_avg_sq
} ShardPiece;

/* How many elements this rank keeps of the unit's tensors before `end`, without those that Muon trains. */
static int64_t adamw_elements_before(const Fsdp *fsdp, const FsdpUnit *u, int end) {
    int64_t first, sum = 0;
    for (int i = u->table_unit->first_tensor; i < end; i++) {
        const Tensor *t = &fsdp->table->tensors[i];
        if (!t->is_muon) sum += tensor_overlap(t, u->state_begin, u->state_begin + u->state_count, &first);
    }
    return sum;
}

/* Is this tensor saved and counted elsewhere? A tensor that tensor parallelism does not split is tp rank 0's; a tied
 * head is counted with the embedding. */
static int is_owned_elsewhere(const Fsdp *fsdp, const Tensor *t) {
    return t->is_tied_copy || (t->row->split == SPLIT_NONE && fsdp->table->part.tp_rank > 0);
}

static int next_piece(const Fsdp *fsdp, int *i, ShardPiece *piece, int unique) {
    while (*i < fsdp->table->num_tensors) {
        const Tensor *t = &fsdp->table->tensors[*i];
        FsdpUnit *u = &fsdp->units[t->unit];
        int64_t begin = unique ? u->replica_begin : u->state_begin;
        int64_t count = unique ? u->replica_count : u->state_count;
        ++*i;
        if (u->table_unit->frozen || (unique && is_owned_elsewhere(fsdp, t))) continue;
        piece->unit = u;
        piece->tensor = t;
        piece->count = tensor_overlap(t, begin, begin + count, &piece->first);
        piece->at = t->offset + piece->first - u->state_begin;
        piece->adamw_at = piece->at;
        if (u->table_unit->has_muon) piece->adamw_at = adamw_elements_before(fsdp, u, *i - 1);
        if (t->is_muon) piece->adamw_at = -1;
        if (piece->count) return 1;
    }
    return 0;
}

/* Iterate over the trained tensors in table order, from tensor *i. next_state_piece visits every element whose state
 * this rank keeps, next_unique_piece only those that no other rank visits. Padding belongs to no tensor. */
static int next_state_piece(const Fsdp *fsdp, int *i, ShardPiece *piece) { return next_piece(fsdp, i, piece, 0); }
static int next_unique_piece(const Fsdp *fsdp, int *i, ShardPiece *piece) { return next_piece(fsdp, i, piece, 1); }

// ---------------------------------------------------------------------------
// learning rate and clipping

/* What follows the linear warm-up to the peak: a cosine or a straight line down to the minimum at the last step
 * (cosine: Llama 3 paper, section 3.4.1); the peak (constant); or the peak and, in the last steps, a straight line down
 * to the minimum (warmup-stable-decay, Hu et al. 2024, section 4). */
typedef enum { RATE_COSINE, RATE_LINEAR, RATE_CONSTANT, RATE_WSD, RATE_SHAPES } RateShape;
static const char *const rate_shape_names[RATE_SHAPES] = {"cosine", "linear", "constant", "wsd"};
#define RATE_SHAPE_NAMES "cosine|linear|constant|wsd"

/* A learning-rate curve. */
typedef struct {
    RateShape shape;
    double peak, minimum;
    int64_t warmup, decay;     // steps of linear warm-up; steps of the decay of RATE_WSD
    int64_t first_step, steps; // the curve begins after this step of the run; its length
} LearningRate;

/* The learning rate of step `step` of the run, which counts from 1. */
static double learning_rate_at(const LearningRate *l, int64_t step) {
    int64_t at = step - l->first_step, falls_after = l->warmup; // where the rate begins to fall
    if (at <= l->warmup) return l->peak * (double)at / (double)l->warmup;
    if (l->shape == RATE_WSD) falls_after = max_i64(l->warmup, l->steps - l->decay);
    if (l->shape == RATE_CONSTANT || at <= falls_after) return l->peak;
    double progress = fmin(1, (double)(at - falls_after) / (double)max_i64(1, l->steps - falls_after));
    double left = l->shape == RATE_COSINE ? 0.5 * (1 + cos(M_PI * progress)) : 1 - progress;
    return l->minimum + left * (l->peak - l->minimum);
}

/* torch.nn.utils.clip_grad_norm_. max_norm <= 0: no clipping. */
static double clip_coefficient(double max_norm, double norm) {
    return max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

/* Adds the squares of this rank's gradient elements, in fp32 within NORM_BLOCK elements and exactly over these blocks.
 * No cut between ranks divides a block, so the norm of equal gradients has equal bits (for equal gradients see
 * docs/book/10-determinism.md). Padding is zero: whole slices can be summed where no tensor is owned elsewhere. */
static void gradient_squared_norm(Fsdp *fsdp, ExactSum *sum) {
    for (int i = 0; i < fsdp->table->num_units; i++) {
        const FsdpUnit *u = &fsdp->units[i];
        int first = u->table_unit->first_tensor, end = u->table_unit->end_tensor, owns_all = 1;
        if (u->table_unit->frozen) continue;
        for (int t = first; t < end; t++)
            owns_all &= !is_owned_elsewhere(fsdp, &fsdp->table->tensors[t]) && !fsdp->table->tensors[t].is_frozen;
        if (owns_all) squared_norm(fsdp->dev, sum, replica_gradient(u), u->replica_count);
        ShardPiece p;
        for (int t = first; !owns_all && next_unique_piece(fsdp, &t, &p) && p.unit == u;) {
            if (p.tensor->is_frozen) continue;
            // The unit's blocks: the tensor may begin within one. state_begin is a multiple of NORM_BLOCK.
            int64_t rest = min_i64(p.count, round_up(p.at, NORM_BLOCK) - p.at);
            if (rest) squared_norm(fsdp->dev, sum, u->grad + p.at, rest);
            if (rest < p.count) squared_norm(fsdp->dev, sum, u->grad + p.at + rest, p.count - rest);
        }
    }
}

// ---------------------------------------------------------------------------
// the updates of AdamW and Muon

typedef struct {                               // of one step's update
    float lr, beta1, beta2, eps, weight_decay; // Muon uses lr and weight_decay, too
    float grad_scale;                          // turns the summed gradient into the clipped mean
    int updates; // of the run, this one included. Bias correction counts only those since the tensor was first trained
    int step;    // of the run, from 1; unlike `updates` it counts skipped steps
} AdamW;

/* How each kind of state is offloaded, and whether an update writes it. */
static const struct {
    MemCategory category;
    size_t element_size;
    int written;
} state_kinds[STATES] = {
    {MEM_PARAMS, sizeof(float), 1},    // STATE_MASTER
    {MEM_GRADS, sizeof(float), 0},     // STATE_GRAD
    {MEM_OPTIMIZER, sizeof(float), 1}, // STATE_EXP_AVG
    {MEM_OPTIMIZER, sizeof(float), 1}, // STATE_EXP_AVG_SQ
    {MEM_PARAMS, sizeof(floatX), 1},   // STATE_COPY
};

/* One unit's state while it is updated. */
typedef struct {
    void *at[STATES];      // (state_elements) where ops read and write; NULL: the unit has no such state
    void *staging[STATES]; // (largest state_count) for offloaded state; NULL: ops work on the state itself
    DeviceEvent fetched, stored;
} UnitState;

typedef struct {
    Fsdp *fsdp;
    Muon muon;
    UnitState states[2]; // of even and odd units: one unit is updated while its neighbor's state is copied
    int offloaded;       // some state is copied to the device and back
} Optimizer;

/* `momentum`: Muon's. */
static void optimizer_open(Optimizer *o, Fsdp *fsdp, float momentum) {
    int64_t largest = 0;
    const FsdpUnit *trained = NULL; // any trained unit: all have the same kinds of state
    memset(o, 0, sizeof *o);
    o->fsdp = fsdp;
    muon_open(&o->muon, fsdp, momentum);
    for (int i = 0; i < fsdp->table->num_units; i++) {
        const FsdpUnit *u = &fsdp->units[i];
        if (u->table_unit->frozen) continue;
        largest = max_i64(largest, u->state_count);
        trained = u;
    }
    for (int i = 0; i < 2 && trained && !OFFLOAD_IN_PLACE; i++)
        for (int k = 0; k < STATES; k++) {
            if (!fsdp->dev->arenas[state_kinds[k].category].offloaded || !state_of(trained, (StateKind)k)) continue;
            o->states[i].staging[k] = arena_alloc(fsdp->dev, MEM_WORKSPACE, "offloaded state that is being updated",
                                                  largest * state_kinds[k].element_size);
            o->offloaded = 1;
        }
}

static void optimizer_close(Optimizer *o) {
    request_close(&o->muon.request);
    for (int i = 0; i < 2; i++) {
        device_destroy_event(o->states[i].fetched);
        device_destroy_event(o->states[i].stored);
    }
}

static UnitState *unit_state(Optimizer *o, const FsdpUnit *u) { return &o->states[(u - o->fsdp->units) % 2]; }

/* Starts to copy a unit's offloaded state to the device, once the state that was there before has been stored. Without
 * offloading it only fills in s->at. */
static void fetch_state(Optimizer *o, const FsdpUnit *u) {
    Device *dev = o->fsdp->dev;
    UnitState *s = unit_state(o, u);
    StreamKind before = device_set_stream(dev, o->offloaded ? STREAM_FETCH : dev->current_stream);
    device_wait_event(dev, s->stored);
    for (int k = 0; k < STATES; k++) {
        void *state = state_of(u, (StateKind)k);
        size_t bytes = state_kinds[k].element_size * (size_t)state_elements(u, (StateKind)k);
        s->at[k] = state ? offload_fetch(dev, state_kinds[k].category, state, s->staging[k], bytes) : NULL;
    }
    if (o->offloaded) device_record_event(dev, &s->fetched);
    device_set_stream(dev, before);
}

/* Starts to copy what an update has written back to where the unit's state is kept. */
static void store_state(Optimizer *o, const FsdpUnit *u) {
    Device *dev = o->fsdp->dev;
    UnitState *s = unit_state(o, u);
    if (o->offloaded) device_wait_stream(dev, STREAM_STORE, STREAM_COMPUTE);
    StreamKind before = device_set_stream(dev, o->offloaded ? STREAM_STORE : dev->current_stream);
    for (int k = 0; k < STATES; k++) {
        void *state = state_of(u, (StateKind)k);
        size_t bytes = state_kinds[k].element_size * (size_t)state_elements(u, (StateKind)k);
        if (!state) continue;
        // Without staging the update has written the copy in place. On a CPU, offload_store would tell the system to
        // evict it from memory, but the next all-gather reads it.
        if (k == STATE_COPY && !s->staging[k]) continue;
        offload_store(dev, state_kinds[k].category, state, s->at[k], bytes, state_kinds[k].written);
    }
    if (o->offloaded) device_record_event(dev, &s->stored);
    device_set_stream(dev, before);
}

/* What is done with the units of a group: with Muon all of them get their momentum before any is updated. */
typedef enum { PASS_MOMENTUM, PASS_UPDATE } UpdatePass;

/* Extends a piece that AdamW updates by the unit's next tensors, as long as each begins where the one before it ends
 * and has the same weight decay and number of updates: one call of AdamW then updates all of them. Tensors with padding
 * between them are not joined. On return *i is the next tensor, as for next_state_piece. */
static void join_neighbors(const Fsdp *fsdp, int *i, ShardPiece *piece) {
    ShardPiece next;
    for (int after = *i; next_state_piece(fsdp, &after, &next) && next.unit == piece->unit; *i = after) {
        if (next.tensor->is_frozen || next.tensor->is_muon || next.at != piece->at + piece->count) return;
        if (next.tensor->row->weight_decay != piece->tensor->row->weight_decay) return;
        if (next.tensor->frozen_steps != piece->tensor->frozen_steps) return;
        piece->count += next.count;
    }
}

/* AdamW (Loshchilov and Hutter 2019), or Muon on the matrices of the blocks, on what this rank keeps of one unit.
 * `shard`: (state_count) Muon's updates, from PASS_MOMENTUM to PASS_UPDATE; NULL: AdamW trains the whole unit. */
static void update_unit(Optimizer *o, const FsdpUnit *u, UpdatePass pass, floatX *shard, const AdamW *a) {
    const UnitState *s = unit_state(o, u);
    ShardPiece p;
    for (int i = u->table_unit->first_tensor; next_state_piece(o->fsdp, &i, &p) && p.unit == u;) {
        if (pass == PASS_MOMENTUM && !p.tensor->is_muon) continue;
        if (p.tensor->is_frozen) {
            // Muon's iterations run over whole matrices of the unit, also over frozen ones, whose update is zero.
            if (pass == PASS_MOMENTUM) device_zero(o->fsdp->dev, shard + p.at, sizeof(floatX) * (size_t)p.count);
            continue;
        }
        float *master = (float *)s->at[STATE_MASTER] + p.at, *grad = (float *)s->at[STATE_GRAD] + p.at;
        float *exp_avg = (float *)s->at[STATE_EXP_AVG] + p.at;
        floatX *copy = s->at[STATE_COPY] ? (floatX *)s->at[STATE_COPY] + p.at : NULL;
        float weight_decay = p.tensor->row->weight_decay ? a->weight_decay : 0.0f;
        if (pass == PASS_MOMENTUM) { // exp_avg is the momentum; the shard receives Nesterov's update
            muon_momentum(o->fsdp->dev, shard + p.at, exp_avg, grad, p.count, o->muon.momentum, a->grad_scale);
        } else if (p.tensor->is_muon) {
            // so scaled, the orthogonal update has the root mean square of AdamW's (Liu et al. 2025, section 2.2)
            float scale = 0.2f * sqrtf((float)max_i64(p.tensor->whole_rows, p.tensor->whole_cols));
            muon_update(o->fsdp->dev, master, copy, shard + p.at, p.count, a->lr, scale, weight_decay);
        } else {
            float *exp_avg_sq = (float *)s->at[STATE_EXP_AVG_SQ] + p.adamw_at;
            join_neighbors(o->fsdp, &i, &p);
            adamw(o->fsdp->dev, master, exp_avg, exp_avg_sq, grad, copy, p.count, a->lr, a->beta1, a->beta2, a->eps,
                  weight_decay, a->grad_scale, (int)min_i64(a->updates, a->step - p.tensor->frozen_steps));
        }
    }
}

/* Does one pass over the units [first, end): the next unit's state is fetched while one is updated. */
static void update_units(Optimizer *o, int first, int end, UpdatePass pass, const AdamW *a) {
    Fsdp *fsdp = o->fsdp;
    const FsdpUnit *fetched = NULL;
    for (int i = first; i < end; i++) {
        const FsdpUnit *u = &fsdp->units[i];
        if (u->table_unit->frozen) continue;
        device_pace(fsdp->dev); // limits how far the host runs ahead of the GPU
        if (u != fetched) fetch_state(o, u);
        fetched = i + 1 < end ? u + 1 : NULL; // trained units follow each other
        if (fetched) fetch_state(o, fetched);
        comm_wait_event(fsdp->comm, unit_state(o, u)->fetched, "offloaded state", WAIT_OWN_COPY);
        floatX *shard = muon_has(&o->muon, i) ? o->muon.shards + (i - first) * o->muon.stride : NULL;
        update_unit(o, u, pass, shard, a);
        store_state(o, u);
    }
}

/* Updates everything this rank keeps. */
static void optimizer_step(Optimizer *o, const AdamW *a) {
    Fsdp *fsdp = o->fsdp;
    if (o->offloaded) device_wait_stream(fsdp->dev, STREAM_FETCH, STREAM_COMPUTE); // it has written the gradients
    for (int first = 0, end; first < fsdp->table->num_units; first = end) {
        end = muon_group_end(&o->muon, first);
        if (muon_has(&o->muon, first)) {
            muon_begin(&o->muon, first);
            update_units(o, first, end, PASS_MOMENTUM, a);
            muon_orthogonalize(&o->muon, first, end);
        }
        update_units(o, first, end, PASS_UPDATE, a);
        if (muon_has(&o->muon, first)) muon_end(&o->muon);
    }
    // The next step's all-gathers read what was written here.
    device_wait_stream(fsdp->dev, STREAM_GATHER, fsdp->weights_offloaded ? STREAM_STORE : STREAM_COMPUTE);
    if (o->offloaded) device_wait_stream(fsdp->dev, STREAM_COMPUTE, STREAM_STORE); // later ops read what was stored
}

#endif
