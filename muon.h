/* muon.h: Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982; torch.optim.Muon with match_rms_adamw): the
 * matrices of the blocks are updated by their momentum, made orthogonal by Newton-Schulz iterations on whole matrices.
 *
 * A shard may begin in the middle of a matrix. So of every n consecutive units of blocks, each of the n fsdp ranks owns
 * one. One all-to-all sends each rank the whole momentum of its unit, and a second one returns the results to the
 * shards: a rank receives 2 (n - 1) shards in the compute dtype. Under no_shard each rank iterates on all units. Under
 * tensor parallelism the owner's tp group all-gathers each matrix, and all of its ranks compute the same iterations: tp
 * times the arithmetic. A caller may rely on: the result has the same bits as with tp 1.
 */
#ifndef MUON_H
#define MUON_H
#include "fsdp.h"

/* Newton-Schulz: X' = a X + b (X X^T) X + c (X X^T)^2 X, which moves all singular values towards 1. */
enum { MUON_ITERATIONS = 5 };
static const float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;

typedef struct {
    Fsdp *fsdp;
    float momentum;
    int first_unit, end_unit; // units [first_unit, end_unit) are blocks; both 0: nothing is trained with Muon
    int owners;               // ranks that divide the units; 1: this rank has whole units
    int64_t stride;           // elements from one shard to the next below: the size of the largest unit's shards
    // while a group of units is updated:
    size_t mark;     // where MEM_COMM began
    floatX *shards;  // (owners, stride) of each unit of the group: momentum, then the orthogonal matrices
    floatX *unit;    // (owners, stride) this rank's unit; with one owner the same memory as shards
    Request request; // of the all-to-alls, and of the all-gathers over tp
} Muon;

static void muon_open(Muon *muon, Fsdp *fsdp, float momentum) {
    const TensorTable *table = fsdp->table;
    memset(muon, 0, sizeof *muon);
    muon->fsdp = fsdp;
    muon->momentum = momentum;
    muon->owners = fsdp->sharding.strategy->sharded ? fsdp->ranks : 1;
    for (int i = 0; i < table->num_units; i++) {
        const FsdpUnit *u = &fsdp->units[i];
        if (!u->table_unit->has_muon) continue;
        if (!muon->end_unit) muon->first_unit = i; // units of blocks follow each other
        muon->end_unit = i + 1;
        muon->stride = max_i64(muon->stride, u->state_count);
    }
}

/* The first unit after those that are updated together with unit `first`: units that AdamW alone updates, or a group of
 * as many units of blocks as there are owners. */
static int muon_group_end(const Muon *muon, int first) {
    if (first < muon->first_unit) return muon->first_unit;
    return first < muon->end_unit ? (int)min_i64(first + muon->owners, muon->end_unit) : muon->fsdp->table->num_units;
}

static int muon_has(const Muon *muon, int unit) { return unit >= muon->first_unit && unit < muon->end_unit; }

/* A buffer for a unit. With full_shard it comes from the pool of gathered weights: during the update all blocks are
 * resharded. */
static floatX *muon_buffer(Muon *muon, const FsdpUnit *u) {
    Fsdp *fsdp = muon->fsdp;
    if (pool_find(&fsdp->pools[POOL_WEIGHTS], UNIT_BLOCK)) return (floatX *)pool_take(fsdp, POOL_WEIGHTS, u);
    return arena_array(floatX, fsdp->dev, MEM_COMM, "a unit that Muon updates", muon->owners * muon->stride);
}

/* Takes the buffers for a group of units that begins with `unit`. */
static void muon_begin(Muon *muon, int unit) {
    const FsdpUnit *u = &muon->fsdp->units[unit];
    muon->mark = arena_mark(muon->fsdp->dev, MEM_COMM);
    muon->shards = muon_buffer(muon, u);
    muon->unit = muon->owners > 1 ? muon_buffer(muon, u) : muon->shards;
}

static void muon_end(Muon *muon) {
    Fsdp *fsdp = muon->fsdp;
    pool_release(fsdp->dev, &fsdp->pools[POOL_WEIGHTS], muon->shards);
    if (muon->owners > 1) pool_release(fsdp->dev, &fsdp->pools[POOL_WEIGHTS], muon->unit);
    arena_release(fsdp->dev, MEM_COMM, muon->mark);
}

/* Approximates U V^T of x = U S V^T, (rows, cols): five iterations bring the singular values to about 0.7 to 1.2
 * (Jordan et al. 2024). The iterations multiply by the smaller Gram matrix: X X^T from the left or, if there are more
 * rows than columns, X^T X from the right, which equals the iterations on the transposed matrix. */
static void newton_schulz(Device *dev, floatX *x, int64_t rows, int64_t cols) {
    int64_t side = min_i64(rows, cols), count = rows * cols;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    floatX *gram = (floatX *)scratch(dev, "Newton-Schulz: Gram matrix", sizeof(floatX) * (size_t)(side * side));
    float *matmul = (float *)scratch(dev, "Newton-Schulz: matmul", sizeof(float) * (size_t)count); // >= side * side
    normalize_matrix(dev, x, count);
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        gram_matrix(dev, gram, x, rows, cols);
        symmetric_matmul(dev, matmul, gram, gram, side, side);
        weighted_sum(dev, gram, MUON_B, matmul, MUON_C, side * side);
        symmetric_matmul(dev, matmul, gram, x, rows, cols);
        weighted_sum(dev, x, MUON_A, matmul, 1, count);
    }
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* Copies between a whole tensor, (whole_rows, whole_cols), and the slice of tp rank `rank`, (rows, cols). */
enum { MUON_TO_WHOLE, MUON_TO_SLICE };
static void copy_tp_slice(Device *dev, const Tensor *t, int tp, int rank, floatX *whole, floatX *slice, int direction) {
    int by_columns = t->row->split == SPLIT_COLUMNS;
    int64_t length = by_columns ? t->whole_cols : t->whole_rows, begin = split_begin(length, tp, rank);
    int64_t rows = by_columns ? t->whole_rows : split_count(length, tp, rank);
    int64_t cols = by_columns ? split_count(length, tp, rank) : t->whole_cols;
    floatX *place = whole + (by_columns ? begin : begin * cols);
    size_t row = sizeof(floatX) * (size_t)cols, whole_row = sizeof(floatX) * (size_t)t->whole_cols;
    if (direction == MUON_TO_WHOLE) device_copy_rows(dev, place, whole_row, slice, row, row, (int)rows);
    else device_copy_rows(dev, slice, row, place, whole_row, row, (int)rows);
}

/* Makes a matrix orthogonal, of which this tp rank has the slice `mine` (rows, cols). */
static void orthogonalize_matrix(Muon *muon, const Tensor *t, floatX *mine) {
    Fsdp *fsdp = muon->fsdp;
    Device *dev = fsdp->dev;
    int tp = fsdp->table->part.tp, rank = fsdp->table->part.tp_rank;
    if (tp == 1) {
        newton_schulz(dev, mine, t->rows, t->cols);
        return;
    }
    int by_columns = t->row->split == SPLIT_COLUMNS;
    int64_t whole_size = t->whole_rows * t->whole_cols, length = by_columns ? t->whole_cols : t->whole_rows;
    int64_t largest = (length + tp - 1) / tp * (whole_size / length); // the unit has room for the largest slice
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    floatX *slices = (floatX *)scratch(dev, "parts of a matrix", sizeof(floatX) * (size_t)(tp * largest));
    floatX *whole = (floatX *)scratch(dev, "a whole matrix", sizeof(floatX) * (size_t)whole_size);
    all_gather_start(fsdp->comm, &muon->request, AXIS_TP, "parts of a matrix", mine, slices, (size_t)largest, FLOATX);
    comm_wait(fsdp->comm, &muon->request);
    for (int i = 0; i < tp; i++) copy_tp_slice(dev, t, tp, i, whole, slices + i * largest, MUON_TO_WHOLE);
    newton_schulz(dev, whole, t->whole_rows, t->whole_cols);
    copy_tp_slice(dev, t, tp, rank, whole, mine, MUON_TO_SLICE);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* All-to-all between the shards of a group's units and whole units; it is its own inverse. */
static void muon_all_to_all(Muon *muon, const char *what, const floatX *send, floatX *recv) {
    if (muon->owners == 1) return;
    all_to_all_start(muon->fsdp->comm, &muon->request, AXIS_FSDP, what, send, recv, (size_t)muon->stride, FLOATX);
    comm_wait(muon->fsdp->comm, &muon->request);
}

/* Makes the matrices of this rank's unit orthogonal. The all-to-all sends shards as large as the largest unit's, so the
 * shards of a smaller unit have gaps between them in muon->unit. Then the iterations run on a copy without gaps in
 * muon->shards, which is free between the two all-to-alls. */
static void muon_orthogonalize_unit(Muon *muon, const FsdpUnit *u) {
    const Fsdp *fsdp = muon->fsdp;
    size_t shard = sizeof(floatX) * (size_t)u->state_count, stride = sizeof(floatX) * (size_t)muon->stride;
    int has_gaps = muon->owners > 1 && shard < stride;
    floatX *unit = has_gaps ? muon->shards : muon->unit;
    if (has_gaps) device_copy_rows(fsdp->dev, unit, shard, muon->unit, stride, shard, muon->owners);
    for (int i = u->table_unit->first_tensor; i < u->table_unit->end_tensor; i++) {
        const Tensor *t = &fsdp->table->tensors[i];
        if (t->is_muon) orthogonalize_matrix(muon, t, unit + t->offset);
    }
    if (has_gaps) device_copy_rows(fsdp->dev, muon->unit, stride, unit, shard, shard, muon->owners);
}

/* Replaces the momentum in muon->shards by the orthogonal updates of units [first, end), which form a group. */
static void muon_orthogonalize(Muon *muon, int first, int end) {
    int own = first + (muon->owners > 1 ? muon->fsdp->rank : 0);
    muon_all_to_all(muon, "momentum of matrices", muon->shards, muon->unit);
    if (own < end) muon_orthogonalize_unit(muon, &muon->fsdp->units[own]);
    muon_all_to_all(muon, "orthogonal matrices", muon->unit, muon->shards);
}

#endif
