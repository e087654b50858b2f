/* tensor_parallel.h: tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).
 *
 * Each rank of the tp group has a part of every matrix. Matrices split by outputs (Q, K, V, gate, up, the head) need
 * the inputs of all tokens; matrices split by inputs (O, down) yield partial sums for all tokens. Everything between,
 * the residual stream and the norms, is split by tokens. So a sublayer all-gathers its input's tokens at the start and
 * reduce-scatters its output's tokens at the end; backward does the same with the gradients. On a group of one rank
 * these calls neither copy nor send.
 */
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H
#include "lib/comm.h" // defines: Comm, Device, Request, all_gather_start, comm_wait
#include "lib/ops.h"  // defines: sum_pieces, cross_entropy, cross_entropy_part, cross_entropy_join

typedef struct {
    Comm *comm;
    Device *dev;
    int size, rank; // of the tp group
    int tokens;     // n: of the current micro-batch on this rank, rounded up; N = B·T is split into `size` shares
    int C;          // width of the residual stream
    int first_vocabulary; // the first token id of this rank's rows of the embedding and the head
    floatX *gathered;     // (n·size, C) tokens of all ranks; NULL if size = 1, as the following
    floatX *partial;      // (n·size, C) partial sums for all tokens; rows from N on stay zero
    floatX *pieces;       // (size, n, C) partial sums that all ranks computed for this rank's tokens
    float *loss_parts;    // (1 + size, rows of logits, 3) softmax statistics of this rank's, then of each rank's ids
    Request request;
} TensorParallel;

/* Allocates for micro-batches of up to N tokens. */
static void tp_open(TensorParallel *tp, Comm *comm, int N, int C, int first_vocabulary) {
    memset(tp, 0, sizeof *tp);
    tp->comm = comm;
    tp->dev = comm->dev;
    tp->size = comm->groups[AXIS_TP].size;
    tp->rank = comm->groups[AXIS_TP].rank;
    tp->tokens = (N + tp->size - 1) / tp->size;
    tp->C = C;
    tp->first_vocabulary = first_vocabulary;
    if (tp->size == 1) return;
    size_t bytes = sizeof(floatX) * (size_t)tp->tokens * (size_t)tp->size * (size_t)C;
    tp->gathered = (floatX *)arena_alloc(tp->dev, MEM_ACTIVATIONS, "tokens of all tp ranks", bytes);
    tp->partial = (floatX *)arena_alloc(tp->dev, MEM_ACTIVATIONS, "partial sums", bytes);
    tp->pieces = (floatX *)arena_alloc(tp->dev, MEM_ACTIVATIONS, "partial sums of all tp ranks", bytes);
    device_zero(tp->dev, tp->partial, bytes);
}

/* For the rank that has the head: `logit_rows` rows of logits exist at a time. */
static void tp_open_loss(TensorParallel *tp, int logit_rows) {
    size_t bytes = sizeof(float) * 3 * (size_t)logit_rows * (size_t)(1 + tp->size);
    if (tp->size > 1) tp->loss_parts = (float *)arena_alloc(tp->dev, MEM_ACTIVATIONS, "softmax statistics", bytes);
}

static void tp_close(TensorParallel *tp) { request_close(&tp->request); }

/* The following micro-batches have N tokens, at most as many as tp_open was told. */
static void tp_set_tokens(TensorParallel *tp, int N) { tp->tokens = (N + tp->size - 1) / tp->size; }

// ---------------------------------------------------------------------------
// before a matrix that is split by outputs: the tokens of all ranks

static void tp_all_gather_start(TensorParallel *tp, const floatX *x /* (n,C) */, const char *what) {
    size_t count = (size_t)tp->tokens * (size_t)tp->C;
    if (tp->size == 1) return;
    all_gather_start(tp->comm, &tp->request, AXIS_TP, what, x, tp->gathered, count, FLOATX);
}
static const floatX *tp_all_gather_wait(TensorParallel *tp, const floatX *x /* (n,C), as started */) {
    if (tp->size == 1) return x;
    comm_wait(tp->comm, &tp->request);
    return tp->gathered;
}

/* Returns x of all tokens, (N, C), valid until the next call. */
static const floatX *tp_all_gather_tokens(TensorParallel *tp, const floatX *x /* (n,C) */, const char *what) {
    tp_all_gather_start(tp, x, what);
    return tp_all_gather_wait(tp, x);
}

// ---------------------------------------------------------------------------
// after a matrix that is split by inputs: the sum over all ranks, of this rank's tokens

/* Where the matrix's partial sums (N, C) go: with one rank, where there is nothing to add, straight to the result. */
static floatX *tp_partial(TensorParallel *tp, floatX *sum /* (n,C) */) { return tp->size == 1 ? sum : tp->partial; }

static void tp_reduce_scatter_start(TensorParallel *tp, const char *what) {
    size_t count = (size_t)tp->tokens * (size_t)tp->C;
    if (tp->size == 1) return;
    reduce_scatter_start(tp->comm, &tp->request, AXIS_TP, what, tp->partial, tp->pieces, count, FLOATX);
}
/* The transport only moves the pieces: adding them in the order of ranks gives the same bits on every transport. */
static void tp_reduce_scatter_wait(TensorParallel *tp, floatX *sum /* (n,C) = */) {
    if (tp->size == 1) return;
    comm_wait(tp->comm, &tp->request);
    sum_pieces(tp->dev, sum, tp->pieces, tp->size, (int64_t)tp->tokens * tp->C);
}

/* sum = the partial sums of all ranks for this rank's tokens. */
static void tp_reduce_scatter_tokens(TensorParallel *tp, floatX *sum /* (n,C) = */, const char *what) {
    tp_reduce_scatter_start(tp, what);
    tp_reduce_scatter_wait(tp, sum);
}

// ---------------------------------------------------------------------------
// the loss over a vocabulary that is split among ranks

/* cross_entropy of `rows` rows of which this rank has the logits of V token ids. Ranks exchange three numbers a row:
 * the largest logit, the sum of exponentials and the target's logit; all of them get the same losses. */
static void tp_cross_entropy(TensorParallel *tp, float *losses /* (rows) = */, float *logits /* (rows,V) */,
                             const int32_t *targets /* (rows) */, int rows, int V, int with_gradient) {
    if (tp->size == 1) {
        cross_entropy(tp->dev, losses, logits, targets, rows, V, with_gradient);
        return;
    }
    float *own = tp->loss_parts, *all = own + 3 * (int64_t)rows; // (rows, 3), (size, rows, 3)
    cross_entropy_part(tp->dev, own, logits, targets, tp->first_vocabulary, rows, V);
    all_gather_start(tp->comm, &tp->request, AXIS_TP, "softmax statistics", own, all, 3 * (size_t)rows, DTYPE_F32);
    comm_wait(tp->comm, &tp->request);
    cross_entropy_join(tp->dev, losses, logits, all, targets, tp->size, tp->first_vocabulary, rows, V, with_gradient);
}

#endif
