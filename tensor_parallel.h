/* tensor_parallel.h: tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).
 *
 * Each rank of the tp group holds a part of every weight matrix of the model. A matrix split by outputs (Q, K, V, gate,
 * up, the head; column-parallel in Megatron-LM) needs the inputs of all N tokens. A matrix split by inputs (O, down;
 * row-parallel) yields partial sums for all N tokens, and so does the embedding, which is split by token id. The norms
 * and the residual stream have only the n = N / size tokens of this rank. So a sublayer begins with an all-gather of
 * its input and ends with a reduce-scatter of its output; backward does the same with gradients. With one rank these
 * functions neither copy nor send. Tokens are communicated on STREAM_TP, so that computation between a start and its
 * wait hides them; the loss's all-gather runs on the compute stream. In the comments on parameters, "=" after a shape
 * means that the call overwrites the tensor.
 */
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H
#include "lib/comm/comm.h" // defines: all_gather_start, reduce_scatter_pieces_start, comm_wait
#include "lib/ops/ops.h"   // defines: sum_pieces, cross_entropy, cross_entropy_part, cross_entropy_join

/* The tensors that are all-gathered, each into its own buffer: backward gathers one while it reads another. */
typedef enum {
    TP_ATTENTION_INPUT, // also the head's input
    TP_MLP_INPUT,
    TP_D_OUTPUT, // the gradient of a sublayer's or of the embedding's output
    TP_BUFFERS
} TpBuffer;

typedef struct {
    Comm *comm;
    Device *dev;
    int size, rank;     // of the tp group
    int tokens;         // n = N / size, rounded up: this rank's tokens of a micro-batch of N = B·T tokens
    int C;              // width of the residual stream
    int first_token_id; // token id of this rank's first row of the embedding and of the head
    // Buffers; NULL if size = 1. For scores, loss_parts (1, rows of logits, 3) exists then, too.
    floatX *gathered[TP_BUFFERS]; // (n·size, C) tokens of all ranks; the same buffer three times when not training
    floatX *partial;   // (n·size, C) this rank's partial sums for all N tokens, then padding, which is 0 in training
    floatX *pieces;    // (size, n, C) the partial sums of each rank for this rank's tokens
    float *loss_parts; // (1 + size, rows of logits, 3) softmax statistics: this rank's, then those of every rank
    int has_gather[TP_BUFFERS];  // 1: the all-gather into this buffer is started, or its result is kept for backward
    Request gathers[TP_BUFFERS]; // the all-gathers into `gathered`
    Request request;             // the reduce-scatter, or the all-gather of softmax statistics
} TensorParallel;

/* From now on micro-batches have N tokens, at most as many as given to tp_open. */
static void tp_set_tokens(TensorParallel *tp, int N) { tp->tokens = (N + tp->size - 1) / tp->size; }

/* Allocates for micro-batches of up to N tokens. */
static void tp_open(TensorParallel *tp, Comm *comm, int N, int C, int first_token_id, int training) {
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
    for (int i = 0; i < TP_BUFFERS; i++) {
        int shared = i > 0 && !training;
        tp->gathered[i] =
            shared ? tp->gathered[0] : arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "tokens of all tp ranks", all);
    }
    tp->partial = arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "partial sums", all);
    tp->pieces = arena_array(floatX, tp->dev, MEM_ACTIVATIONS, "partial sums of all tp ranks", all);
    device_zero(tp->dev, tp->partial, sizeof(floatX) * all);
}

/* Allocates the softmax statistics, on ranks that have the head. With one tp rank only `scores` need them, by
 * tp_softmax_statistics. `logit_rows`: the number of tokens whose logits exist at a time. */
static void tp_open_loss(TensorParallel *tp, int logit_rows, int scores) {
    int64_t count = (int64_t)logit_rows * 3 * (tp->size > 1 ? 1 + tp->size : 1);
    if (tp->size > 1 || scores)
        tp->loss_parts = arena_array(float, tp->dev, MEM_ACTIVATIONS, "softmax statistics", count);
}

static void tp_close(TensorParallel *tp) {
    for (int i = 0; i < TP_BUFFERS; i++) request_close(&tp->gathers[i]);
    request_close(&tp->request);
}

/* Makes STREAM_TP the current stream. Collectives that are started on it run after all work that the compute stream has
 * been given so far. Returns the stream that was current before. */
static StreamKind tp_stream(TensorParallel *tp) {
    device_wait_stream(tp->dev, STREAM_TP, STREAM_COMPUTE);
    return device_set_stream(tp->dev, STREAM_TP);
}

// ---------------------------------------------------------------------------
// all-gather of tokens: in forward the input of a matrix split by outputs, in backward the output gradient of a matrix
// split by inputs. For the gradient of a matrix split by outputs, backward also all-gathers that matrix's input again

/* Starts the all-gather of x, which overwrites the buffer. x must not change until tp_all_gather_tokens has waited for
 * it. Does nothing if the buffer's all-gather is already started, or if tp_keep_tokens has kept its result. */
static void tp_prefetch_tokens(TensorParallel *tp, TpBuffer buffer, const floatX *x /* (n,C) */, const char *what) {
    if (tp->size == 1 || tp->has_gather[buffer]) return;
    StreamKind before = tp_stream(tp);
    all_gather_start(tp->comm, &tp->gathers[buffer], AXIS_TP, what, x, tp->gathered[buffer],
                     (int64_t)tp->tokens * tp->C, FLOATX);
    device_set_stream(tp->dev, before);
    tp->has_gather[buffer] = 1;
}

/* Returns x of all tokens, (N, C), valid until the next all-gather into this buffer. Starts the all-gather unless
 * tp_prefetch_tokens has done so, and waits for it. */
static const floatX *tp_all_gather_tokens(TensorParallel *tp, TpBuffer buffer, const floatX *x /* (n,C) */,
                                          const char *what) {
    if (tp->size == 1) return x;
    tp_prefetch_tokens(tp, buffer, x, what);
    comm_wait(tp->comm, &tp->gathers[buffer]);
    tp->has_gather[buffer] = 0;
    return tp->gathered[buffer];
}

/* Called when a block's forward has been recomputed, which all-gathered both inputs: the next tp_all_gather_tokens of
 * each returns its buffer without another all-gather. */
static void tp_keep_tokens(TensorParallel *tp) {
    tp->has_gather[TP_ATTENTION_INPUT] = 1;
    tp->has_gather[TP_MLP_INPUT] = 1;
}

// ---------------------------------------------------------------------------
// reduce-scatter of tokens: in forward the output of a matrix split by inputs, in backward the input gradient of a
// matrix split by outputs

/* Returns the buffer for a matrix's partial sums (N, C). With one rank they are the result, so it is `sum` itself. */
static floatX *tp_partial(TensorParallel *tp, floatX *sum /* (n,C) */) { return tp->size == 1 ? sum : tp->partial; }

/* Starts the reduce-scatter of `partial`, tp_partial's buffer, which must not change until tp_reduce_scatter_wait. */
static void tp_reduce_scatter_start(TensorParallel *tp, const floatX *partial /* (N,C) */, const char *what) {
    int64_t count = (int64_t)tp->tokens * tp->C;
    if (tp->size == 1) return;
    StreamKind before = tp_stream(tp);
    reduce_scatter_pieces_start(tp->comm, &tp->request, AXIS_TP, what, partial, tp->pieces, count, FLOATX);
    device_set_stream(tp->dev, before);
}
/* The transport only moves the pieces. They are added here, as a binary tree over ranks, so that every transport gives
 * the same bits. */
static void tp_reduce_scatter_wait(TensorParallel *tp, floatX *sum /* (n,C) = */) {
    if (tp->size == 1) return;
    comm_wait(tp->comm, &tp->request);
    sum_pieces(tp->dev, sum, tp->pieces, tp->size, (int64_t)tp->tokens * tp->C);
}

/* sum = the sum of all ranks' `partial`, for this rank's tokens. */
static void tp_reduce_scatter_tokens(TensorParallel *tp, floatX *sum /* (n,C) = */, const floatX *partial /* (N,C) */,
                                     const char *what) {
    tp_reduce_scatter_start(tp, partial, what);
    tp_reduce_scatter_wait(tp, sum);
}

// ---------------------------------------------------------------------------
// the loss over a vocabulary that is split among ranks

/* Returns what the loss depends on: for each tp rank's slice of the vocabulary, in the order of ranks, a LossPart
 * (lib/ops/logits.h) of each row of logits: (size, rows, 3). */
static const float *tp_softmax_statistics(TensorParallel *tp, Logits logits /* (rows,V) */,
                                          const int32_t *targets /* (rows) */, int rows, int V) {
    float *own = tp->loss_parts, *all = own + 3 * (int64_t)rows; // (rows, 3), (size, rows, 3)
    cross_entropy_part(tp->dev, own, logits, targets, tp->first_token_id, rows, V);
    if (tp->size == 1) return own;
    all_gather_start(tp->comm, &tp->request, AXIS_TP, "softmax statistics", own, all, 3 * rows, DTYPE_F32);
    comm_wait(tp->comm, &tp->request);
    return all;
}

/* As cross_entropy (lib/ops/ops.h), but this rank has only the logits of its slice of the vocabulary: V token ids from
 * first_token_id on. For each row the ranks all-gather three numbers, the largest logit, the sum of exponentials and
 * the target's logit, and so compute the same loss and the same z-loss. */
static void tp_cross_entropy(TensorParallel *tp, float *losses /* (rows) = */, Logits logits /* (rows,V) */,
                             const int32_t *targets /* (rows) */, ZLoss z, int rows, int V, int with_gradient) {
    if (tp->size == 1) {
        cross_entropy(tp->dev, losses, logits, targets, z, rows, V, with_gradient);
        return;
    }
    const float *all = tp_softmax_statistics(tp, logits, targets, rows, V);
    cross_entropy_join(tp->dev, losses, logits, all, targets, z, tp->size, tp->first_token_id, rows, V, with_gradient);
}

#endif
