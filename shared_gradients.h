/* shared_gradients.h: sums the gradients of weights that several tp or pp ranks hold.
 *
 * Tensor parallelism leaves some weights whole on every rank, such as the norms. A pipeline has a copy of a tied weight
 * on its first and on its last stage. Each of these ranks computes only a part of such a weight's gradient. Every step
 * sums the parts after fsdp_finish_gradients, with the same bits on each rank, so that equal weights stay equal.
 */
#ifndef SHARED_GRADIENTS_H
#define SHARED_GRADIENTS_H
#include "fsdp.h"

typedef struct {
    Fsdp *fsdp;
    float *tp_buffer;         // (n) gradients of this rank, then (tp, n) those of all tp ranks; NULL: not needed
    float *tied_buffer;       // (2, state_count) the tied weight's gradient: received, then sent; NULL: not needed
    Request tied_requests[2]; // of the tied gradient: a send and a receive, in the order in which they start
} SharedGradients;

// ---------------------------------------------------------------------------
// weights that tensor parallelism does not split: norms, and one matrix of each adapter

/* How many units one all-gather over tp covers: norms are small, so all units; adapters are large, so one. */
static int tp_units_at_once(const Fsdp *fsdp) { return fsdp->config->lora_rank ? 1 : fsdp->table->num_units; }

typedef enum { COUNT_ONLY, GRADIENTS_TO_BUFFER, BUFFER_TO_GRADIENTS } CopyDirection;

/* Copies the gradients of the tensors that tp does not split, in the trained units [first, end), to or from buffer (n).
 * n, which is returned, counts all elements of these tensors; only those of this rank's FSDP shard are copied. */
static int64_t copy_tp_replicated(Fsdp *fsdp, int first, int end, float *buffer, CopyDirection direction) {
    const TensorTable *table = fsdp->table;
    int64_t n = 0;
    for (int i = table->units[first].first_tensor; i < table->units[end - 1].end_tensor; i++) {
        const Tensor *t = &table->tensors[i];
        const FsdpUnit *u = &fsdp->units[t->unit];
        if (u->table_unit->frozen || t->row->split != SPLIT_NONE) continue;
        int64_t begin, count = tensor_overlap(t, u->state_begin, u->state_begin + u->state_count, &begin);
        float *grad = u->grad + (t->offset + begin - u->state_begin);
        size_t bytes = sizeof(float) * count;
        if (count && direction == GRADIENTS_TO_BUFFER) device_copy(fsdp->dev, buffer + n + begin, grad, bytes);
        if (count && direction == BUFFER_TO_GRADIENTS) device_copy(fsdp->dev, grad, buffer + n + begin, bytes);
        n += t->rows * t->cols;
    }
    return n;
}

/* Each tp rank has only a part of these gradients: a norm's from its own tokens, due to sequence parallelism
 * (EleutherAI/gpt-neox issue 1257), an adapter's from its own inputs or outputs of the layer. */
static void sum_tp_replicated(SharedGradients *s) {
    Fsdp *fsdp = s->fsdp;
    int tp = fsdp->comm->groups[AXIS_TP].size, units_at_once = tp_units_at_once(fsdp);
    for (int first = 0; first < fsdp->table->num_units && tp > 1; first += units_at_once) {
        int end = first + units_at_once;
        int64_t n = copy_tp_replicated(fsdp, first, end, NULL, COUNT_ONLY);
        if (!n) continue; // then there may be no buffer
        size_t bytes = sizeof(float) * n;
        float *mine = s->tp_buffer, *all = mine + n;
        device_zero(fsdp->dev, mine, bytes); // elements of other FSDP shards stay zero on every tp rank
        copy_tp_replicated(fsdp, first, end, mine, GRADIENTS_TO_BUFFER);
        all_gather_now(fsdp->comm, AXIS_TP, "gradients that tp does not split", mine, all, bytes);
        tree_sum(fsdp->dev, mine, all, DTYPE_F32, tp, n, 0);
        copy_tp_replicated(fsdp, first, end, mine, BUFFER_TO_GRADIENTS);
    }
}

// ---------------------------------------------------------------------------
// a tied weight of which there are two copies, as embedding and as head

/* The unit of this rank with a copy of the tied weight, the embedding if it has both; -1: none that is trained. */
static int tied_copy_unit(const TensorTable *t) {
    int unit = t->embed >= 0 ? t->embed : t->head;
    return t->part.tied_head_copy && unit >= 0 && !t->units[unit].frozen ? unit : -1;
}

/* The first and the last stage send each other their gradient of the tied weight. */
static void exchange_tied_gradient(SharedGradients *s, const FsdpUnit *u) {
    Fsdp *fsdp = s->fsdp;
    const TensorTable *t = fsdp->table;
    int is_first_stage = t->embed >= 0, peer = is_first_stage ? t->part.pp - 1 : 0;
    float *received = s->tied_buffer, *sent = received + u->state_count;
    device_copy(fsdp->dev, sent, u->grad, sizeof(float) * u->state_count);
    const char *name = "gradient of the tied weight";
    int send_at = is_first_stage ? 0 : 1; // over NCCL, two ranks that both send first would wait for each other
    for (int i = 0; i < 2; i++) {
        Request *request = &s->tied_requests[i];
        if (i == send_at) send_start(fsdp->comm, request, AXIS_PP, peer, name, sent, u->state_count, DTYPE_F32);
        else receive_start(fsdp->comm, request, AXIS_PP, peer, name, received, u->state_count, DTYPE_F32);
    }
    for (int i = 0; i < 2; i++) comm_wait(fsdp->comm, &s->tied_requests[i]);
}

/* The two copies are on the pipeline's first and last stage or, with --deterministic and no pipeline, in two units of
 * this rank. Both units have the same size, so a rank's FSDP shard has the same elements of either copy. */
static void sum_tied_weight(SharedGradients *s) {
    Fsdp *fsdp = s->fsdp;
    const TensorTable *t = fsdp->table;
    int unit = tied_copy_unit(t);
    if (unit < 0) return;
    FsdpUnit *u = &fsdp->units[unit];
    const Tensor *weight = &t->tensors[u->table_unit->first_tensor];
    int64_t first, count = tensor_overlap(weight, u->state_begin, u->state_begin + u->state_count, &first);
    int over_pp = t->part.pp > 1;
    float *other_copy = over_pp ? s->tied_buffer : fsdp->units[t->head].grad;
    if (over_pp) exchange_tied_gradient(s, u);
    if (count) tree_sum(fsdp->dev, u->grad, other_copy, DTYPE_F32, 1, count, 1);
    if (count && !over_pp) tree_sum(fsdp->dev, other_copy, u->grad, DTYPE_F32, 1, count, 0);
}

// ---------------------------------------------------------------------------
// both kinds of weights

static void sum_shared_gradients(SharedGradients *s) {
    sum_tp_replicated(s);
    sum_tied_weight(s);
}

static void shared_gradients_open(SharedGradients *s, Fsdp *fsdp) {
    Device *dev = fsdp->dev;
    const TensorTable *t = fsdp->table;
    int tied = tied_copy_unit(t), units_at_once = tp_units_at_once(fsdp);
    int64_t most = 0, tied_size = tied < 0 ? 0 : 2 * fsdp->units[tied].state_count;
    memset(s, 0, sizeof *s);
    s->fsdp = fsdp;
    if (tied >= 0 && t->part.pp > 1)
        s->tied_buffer = arena_array(float, dev, MEM_COMM, "gradient of the tied weight", tied_size);
    for (int u = 0; u < t->num_units; u += units_at_once)
        most = max_i64(most, copy_tp_replicated(fsdp, u, u + units_at_once, NULL, COUNT_ONLY));
    if (most && t->part.tp > 1)
        s->tp_buffer = arena_array(float, dev, MEM_COMM, "gradients that tp does not split", (1 + t->part.tp) * most);
}

static void shared_gradients_close(SharedGradients *s) {
    for (int i = 0; i < 2; i++) request_close(&s->tied_requests[i]);
}

#endif
