/* ops_common.h: what the CPU and the CUDA implementation of the ops share.
 *
 * The description of a matmul, and the attention mask. Both implementations call the same functions, so they agree on
 * every rule here. Logits and the z-loss are in logits.h.
 */
#ifndef OPS_COMMON_H
#define OPS_COMMON_H
#include "../device/kernel.h" // defines: floatX, BOTH, min_i64, max_i64

// ---------------------------------------------------------------------------
// matmul

/* C (M, N) = or += A (M, K) B (K, N). A and B are floatX with any strides: a transposed matrix is a matter of strides.
 * All fields are int64_t, so that there is no padding and two descriptions can be compared as bytes. */
typedef struct {
    int64_t M, N, K;
    int64_t a_row, a_col; // elements from A's row i to row i + 1, from column k to column k + 1
    int64_t b_row, b_col;
    int64_t c_row;      // C's columns are adjacent
    int64_t c_float;    // 1: C is fp32; 0: C is floatX
    int64_t accumulate; // 1: +=, and a floatX C is rounded again
} Matmul;

// ---------------------------------------------------------------------------
// attention: its shape and its mask

/* Queries and keys of a batch. A query sees the keys at its own position and before it, within its document.
 *
 * Queries need not start at key 0: a decoder with a KV cache has q_offset keys before its first query. With context
 * parallelism a rank has two halves of queries from different places of the sequence: from query q_split on,
 * positions are q_gap higher. */
typedef struct {
    int B, Tq, Tk;                // sequences, queries and keys of each
    int NH, NKV, HD;              // query heads, key/value heads, elements of a head
    int q_offset;                 // position of query 0; negative positions see nothing
    int q_split;                  // first query of the second half (context parallelism); 0 without one
    int q_gap;                    // positions between the halves
    const int32_t *q_doc, *k_doc; // (B, Tq), (B, Tk) document of each token; NULL: one document
    int64_t q_stride, k_stride, v_stride, o_stride; // elements from one token to the next; heads are HD apart
} AttentionShape;

/* The position of query t among the keys. It grows with t, so each query sees at least the keys that the one before it
 * saw, and whole tiles beyond the last visible key can be skipped. */
static inline BOTH int query_position(const AttentionShape *s, int t) {
    return s->q_offset + t + (t >= s->q_split ? s->q_gap : 0);
}

/* The first query that sees `key`; Tq or more if none does. */
static inline BOTH int first_query(const AttentionShape *s, int key) {
    int t = key - s->q_offset; // if that is in the first half
    if (t >= s->q_split) t = (int)max_i64(t - s->q_gap, s->q_split);
    return t > 0 ? t : 0;
}

/* How many keys query t sees by position alone, not counting document boundaries. */
static inline BOTH int64_t keys_seen(const AttentionShape *s, int64_t t) {
    return max_i64(0, min_i64(s->Tk, query_position(s, (int)t) + (int64_t)1));
}

#endif
