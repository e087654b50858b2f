/* context_parallel.h: context parallelism with all-gathered keys and values (Llama 3 paper, section 3.3.2).
 *
 * A sequence is cut into 2·cp parts, and rank i of the cp group computes parts i and 2·cp - 1 - i: under the causal
 * mask all ranks then have the same work. Only attention looks beyond a rank's own tokens: before it, keys and values
 * of all ranks are all-gathered; in backward their gradients are reduce-scattered. On a group of one rank these calls
 * neither copy nor send.
 */
#ifndef CONTEXT_PARALLEL_H
#define CONTEXT_PARALLEL_H
#include "lib/comm/comm.h" // defines: Comm, Device, Request, all_gather_start, comm_wait
#include "lib/ops/ops.h"   // defines: sum_pieces

/* Keys and values as attention reads them. */
typedef struct {
    const floatX *k, *v; // (B, tokens, NKV, HD)
    int64_t stride;      // elements from one token's keys (or values) to the next token's
    int tokens;          // tokens of each sequence
} KeyValue;

typedef struct {
    Comm *comm;
    Device *dev;
    int size, rank; // of the cp group
    int B, T;       // sequences of a micro-batch; this rank's tokens of each: at most as many as given to cp_open
    int64_t Q, KV;  // elements of a token's queries, NH·HD, and of its keys or its values, NKV·HD
    // Buffers; NULL if size = 1. The first three are used again by cp_reduce_scatter_kv, which comes "later".
    floatX *own;        // (B, T, 2·KV) keys and values of this rank's tokens; later the sum of their gradients
    floatX *of_ranks;   // (size, B, T, 2·KV) `own` of all ranks, in the order of ranks; later d_sequence in that order
    floatX *sequence;   // (B, T·size, 2·KV) of_ranks in the order of the sequence; later the received gradients
    floatX *d_sequence; // (B, T·size, 2·KV) gradient of `sequence` from this rank's queries; NULL when not training
    Request request;
} ContextParallel;

static void cp_open(ContextParallel *cp, Comm *comm, int B, int T, int64_t Q, int64_t KV, int training) {
    memset(cp, 0, sizeof *cp);
    cp->comm = comm;
    cp->dev = comm->dev;
    cp->size = comm->groups[AXIS_CP].size;
    cp->rank = comm->groups[AXIS_CP].rank;
    cp->B = B;
    cp->T = T;
    cp->Q = Q;
    cp->KV = KV;
    if (cp->size == 1) return;
    int64_t own = (int64_t)B * T * 2 * KV, all = own * cp->size;
    cp->own = arena_array(floatX, cp->dev, MEM_ACTIVATIONS, "keys and values", own);
    cp->of_ranks = arena_array(floatX, cp->dev, MEM_ACTIVATIONS, "keys and values of all cp ranks", all);
    cp->sequence = arena_array(floatX, cp->dev, MEM_ACTIVATIONS, "keys and values of the sequence", all);
    if (training)
        cp->d_sequence = arena_array(floatX, cp->dev, MEM_ACTIVATIONS, "d keys and values of the sequence", all);
}

/* Position in the sequence of token t of this rank's T tokens. Their first half is part `rank` of the 2·size parts,
 * their second half is part 2·size - 1 - rank. */
static int cp_position(const ContextParallel *cp, int t, int T) {
    int half = T / 2;
    return t < half ? cp->rank * half + t : (2 * cp->size - 1 - cp->rank) * half + t - half;
}

/* selected (length / ranks) = the tokens of `sequence` (length) that rank i of a cp group of `ranks` ranks computes.
 * `selected` may be `sequence` itself. */
static void cp_select_halves(int32_t *selected, const int32_t *sequence, int length, int ranks, int i) {
    int half = length / (2 * ranks);
    size_t bytes = sizeof(int32_t) * half;
    memmove(selected, sequence + (int64_t)i * half, bytes);
    memmove(selected + half, sequence + (int64_t)(2 * ranks - 1 - i) * half, bytes);
}

/* Copies keys and values, or gradients, between cp->of_ranks (size, B, T, 2·KV) and `sequence` (B, T·size, 2·KV).
 * Each half of a rank's T tokens is one of the 2·size parts of the sequence. */
enum { CP_TO_SEQUENCE, CP_TO_RANKS };
static void cp_reorder(ContextParallel *cp, floatX *sequence, int direction) {
    size_t half = sizeof(floatX) * (cp->T / 2) * 2 * cp->KV; // bytes of one part
    size_t rank_stride = 2 * half, sequence_stride = rank_stride * cp->size;
    for (int rank = 0; rank < cp->size; rank++)
        for (int second = 0; second < 2; second++) {
            int part = second ? 2 * cp->size - 1 - rank : rank;
            char *in_sequence = (char *)sequence + part * half;
            char *in_ranks = (char *)cp->of_ranks + rank * cp->B * rank_stride + second * half;
            if (direction == CP_TO_SEQUENCE)
                device_copy_rows(cp->dev, in_sequence, sequence_stride, in_ranks, rank_stride, half, cp->B);
            else device_copy_rows(cp->dev, in_ranks, rank_stride, in_sequence, sequence_stride, half, cp->B);
        }
}

// ---------------------------------------------------------------------------
// before attention: keys and values of the whole sequence

/* All-gathers the keys and values in each rank's qkv and returns those of all tokens of the sequence. They are valid
 * until the next cp_all_gather_kv or cp_reduce_scatter_kv; with one rank they are those in qkv itself. */
static KeyValue cp_all_gather_kv(ContextParallel *cp, const floatX *qkv /* (B·T, Q + 2·KV) */) {
    size_t row = sizeof(floatX) * 2 * cp->KV, qkv_row = sizeof(floatX) * (cp->Q + 2 * cp->KV);
    int N = cp->B * cp->T;
    KeyValue own = {qkv + cp->Q, qkv + cp->Q + cp->KV, cp->Q + 2 * cp->KV, cp->T};
    if (cp->size == 1) return own;
    device_copy_rows(cp->dev, cp->own, row, qkv + cp->Q, qkv_row, row, N);
    all_gather_start(cp->comm, &cp->request, AXIS_CP, "keys and values", cp->own, cp->of_ranks, 2 * cp->KV * N, FLOATX);
    comm_wait(cp->comm, &cp->request);
    cp_reorder(cp, cp->sequence, CP_TO_SEQUENCE);
    KeyValue all = {cp->sequence, cp->sequence + cp->KV, 2 * cp->KV, cp->T * cp->size};
    return all;
}

// ---------------------------------------------------------------------------
// after attention's backward: the gradients of this rank's keys and values

/* Returns where attention_backward writes the gradient of the keys; that of the values begins KV elements after it.
 * With one rank both are columns of d_qkv (B·T, Q + 2·KV). */
static floatX *cp_key_gradient(ContextParallel *cp, floatX *d_qkv) {
    return cp->size == 1 ? d_qkv + cp->Q : cp->d_sequence;
}

/* Writes the gradients of this rank's keys and values, summed over the queries of all ranks, to columns of d_qkv. */
static void cp_reduce_scatter_kv(ContextParallel *cp, floatX *d_qkv /* (B·T, Q + 2·KV) */) {
    size_t row = sizeof(floatX) * 2 * cp->KV, qkv_row = sizeof(floatX) * (cp->Q + 2 * cp->KV);
    int N = cp->B * cp->T;
    floatX *pieces = cp->sequence; // (size, B, T, 2·KV) gradients of this rank's tokens from each rank's queries
    if (cp->size == 1) return;
    cp_reorder(cp, cp->d_sequence, CP_TO_RANKS);
    reduce_scatter_pieces_start(cp->comm, &cp->request, AXIS_CP, "gradients of keys and values", cp->of_ranks, pieces,
                                2 * cp->KV * N, FLOATX);
    comm_wait(cp->comm, &cp->request);
    sum_pieces(cp->dev, cp->own, pieces, cp->size, 2 * cp->KV * N);
    device_copy_rows(cp->dev, d_qkv + cp->Q, qkv_row, cp->own, row, row, N);
}

#endif
