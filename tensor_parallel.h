/* tensor_parallel.h: tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).
 *
 * Each rank of the tp group holds a part of every weight matrix of the model. A matrix split by outputs (Q, K, V, gate,
 * up, the head) needs the inputs of all N tokens; one split by inputs (O, down) yields partial sums for all N tokens.
 * So does the embedding, which is split by token id. Between them, in the residual stream and the norms, each rank has
 * only its n = N / size tokens. So a sublayer starts with an all-gather of its input's tokens and ends with a
 * reduce-scatter of its output's; backward does the same with gradients. On one rank these calls neither copy nor send.
 * In the comments on parameters, "=" after a shape means that the call overwrites the tensor.
 */
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H
#include "lib/comm.h" // defines: all_gather_start, reduce_scatter_start, comm_wait
#include "lib/ops.h"  // defines: sum_pieces, cross_entropy, cross_entropy_part, cross_entropy_join

typedef struct {
    Comm *comm;
    Device *dev;
    int size, rank;     // of the tp group
    int tokens;         // n: this rank's tokens of a micro-batch of N = B·T; N / size, rounded up
    int C;              // width of the residual stream
    int first_token_id; // of this rank's rows of the embedding and the head
    // the following are NULL if size = 1
    floatX *gathered;  // (n·size, C) tokens of all ranks
    floatX *partial;   // (n·size, C) partial sums for all tokens; rows N and up are padding that nobody reads
    floatX *pieces;    // (size, n, C) what each rank contributes to the sums of this rank's tokens
    float *loss_parts; // (1 + size, rows of logits, 3) softmax statistics: this rank's, then those of every rank
    Request request;
} TensorParallel;

/* From now on micro-batches have N tokens, at most as many as given to tp_open. */
static void tp_set_tokens(TensorParallel *tp, int N) { tp->tokens = (N + tp->size - 1) / tp->size; }

/* Allocates for micro-batches of up to N tokens. */
static void tp_open(TensorParallel *tp, Comm *comm, int N, int C, int first_token_id) {
    memset(tp, 0, sizeof *tp);
    tp->comm = comm;
    tp->dev = comm->dev;
    tp->size = comm->groups[AXIS_TP].size;
    tp->rank = comm->groups[AXIS_TP].rank;
    tp->C = C;
    tp->first_token_id = first_token_id;
    tp_set_tokens(tp, N);
    if (tp->size == 1) return;
    int64_t all = (int64_t)tp->tokens * tp->size * C;
    tp->gathered = arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "tokens of all tp ranks", all);
    tp->partial = arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "partial sums", all);
    tp->pieces = arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "partial sums of all tp ranks", all);
    device_zero(tp->dev, tp->partial, sizeof(floatX) * all);
}

/* Allocates for the loss, on ranks that have the head. `logit_rows`: how many tokens' logits exist at a time. */
static void tp_open_loss(TensorParallel *tp, int logit_rows) {
    int64_t count = (int64_t)logit_rows * 3 * (1 + tp->size);
    if (tp->size > 1) tp->loss_parts = arena_array(float, tp->dev, MEM_ACTIVATIONS, "softmax statistics", count);
}

static void tp_close(TensorParallel *tp) { request_close(&tp->request); }

// ---------------------------------------------------------------------------
// the tokens of all ranks: in forward before a matrix that is split by outputs, in backward before one split by inputs.
// Backward also gathers the input of a matrix that is split by outputs once more, for the gradient of its weights

static void tp_all_gather_start(TensorParallel *tp, const floatX *x /* (n,C) */, const char *what) {
    if (tp->size == 1) return;
    all_gather_start(tp->comm, &tp->request, AXIS_TP, what, x, tp->gathered, (int64_t)tp->tokens * tp->C, FLOATX);
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
// sums over all ranks for this rank's tokens: in forward after a matrix that is split by inputs, in backward after one
// that is split by outputs

/* Where the matrix's partial sums (N, C) go: with one rank, where there is nothing to add, straight to the result. */
static floatX *tp_partial(TensorParallel *tp, floatX *sum /* (n,C) */) { return tp->size == 1 ? sum : tp->partial; }

static void tp_reduce_scatter_start(TensorParallel *tp, const char *what) {
    int64_t count = (int64_t)tp->tokens * tp->C;
    if (tp->size == 1) return;
    reduce_scatter_start(tp->comm, &tp->request, AXIS_TP, what, tp->partial, tp->pieces, count, FLOATX);
}
/* The transport only moves the pieces. They are added here, as a binary tree over ranks, so that every transport gives
 * the same bits. */
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

/* As cross_entropy (lib/ops.h), but this rank has only the logits of its slice of the vocabulary: V token ids from
 * first_token_id on. For each row the ranks all-gather three numbers, the largest logit, the sum of exponentials and
 * the target's logit, and so compute the same loss. */
static void tp_cross_entropy(TensorParallel *tp, float *losses /* (rows) = */, float *logits /* (rows,V) */,
                             const int32_t *targets /* (rows) */, int rows, int V, int with_gradient) {
    if (tp->size == 1) {
        cross_entropy(tp->dev, losses, logits, targets, rows, V, with_gradient);
        return;
    }
    float *own = tp->loss_parts, *all = own + 3 * (int64_t)rows; // (rows, 3), (size, rows, 3)
    cross_entropy_part(tp->dev, own, logits, targets, tp->first_token_id, rows, V);
    all_gather_start(tp->comm, &tp->request, AXIS_TP, "softmax statistics", own, all, 3 * rows, DTYPE_F32);
    comm_wait(tp->comm, &tp->request);
    cross_entropy_join(tp->dev, losses, logits, all, targets, tp->size, tp->first_token_id, rows, V, with_gradient);
}

#endif
