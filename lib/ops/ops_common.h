/* ops_common.h: what the CPU and the CUDA implementation of the ops share.
 *
 * The attention mask, rows of logits, the z-loss, slices of a vocabulary that tensor parallelism splits, the
 * description of a matmul, and the block sizes at which sums are cut. Both implementations call the same functions, so
 * they agree on every rule here.
 */
#ifndef OPS_COMMON_H
#define OPS_COMMON_H
#include "../device/device.h" // defines: floatX, BOTH, min_i64, max_i64

/* Where a sum is cut into partial sums decides its bits, so these sizes never depend on the number of threads. */
enum {
    NORM_BLOCK = 128, // elements in one partial sum of squares; shards and FSDP units start at multiples of it
    NORM_ROWS = 32    // rows in one partial sum of RMSNorm's weight gradient
};

static const float LEAST_NORM = 1e-7f; // a matrix with a smaller Frobenius norm is divided by this (normalize_matrix)

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
// logits

/* Rows of V logits. In training, logits are floatX, and their gradient replaces them. Validation, scores and generation
 * use fp32 logits. */
typedef struct {
    void *data;     // (N, stride); elements V to stride of a row are padding, which no op writes
    int64_t stride; // elements from one row to the next
    Dtype dtype;    // DTYPE_F32 or floatX; the gradient has the same
} Logits;

/* Elements from one row of floatX logits to the next. In bf16 the stride is a multiple of 8 elements, so that a GPU
 * can load 16 bytes at a time even if V is odd. */
static inline int64_t logits_stride(int64_t V) {
    return FLOATX == DTYPE_BF16 ? round_up(V, 16 / (int64_t)sizeof(bf16)) : V;
}
static inline Logits logits_x(floatX *data, int64_t V) {
    Logits logits = {data, logits_stride(V), FLOATX};
    return logits;
}
static inline Logits logits_fp32(float *data, int64_t V) {
    Logits logits = {data, V, DTYPE_F32};
    return logits;
}

// ---------------------------------------------------------------------------
// a slice of the vocabulary: tensor parallelism gives each rank V consecutive tokens, beginning with `first`

/* The row of token `id` in this rank's slice, or -1 if another rank has it. */
static inline BOTH int slice_row(int32_t id, int first, int V) {
    return id >= first && id - first < V ? id - first : -1;
}

/* What one rank knows about the softmax of one row of logits. As three floats it travels between ranks. */
typedef struct {
    float max;    // largest logit of this rank's slice
    float sum;    // sum of exp(logit - max) over the slice
    float target; // the target token's logit; -INFINITY if another rank has it
} LossPart;

/* The z-loss of a row is weight · log²Z, where Z is the denominator of its softmax (Chowdhery et al. 2022, section
 * 5). Together with cross-entropy it has the gradient softmax(logits) · (1 + 2 weight log Z) - onehot(target). */
typedef struct {
    float weight;
    float *losses; // (N) the z-loss of each row, 0 where the target is negative; NULL: there is no z-loss
} ZLoss;

static inline ZLoss no_z_loss(void) {
    const ZLoss none = {0, NULL};
    return none;
}

/* The z-losses of the rows from `first` on. */
static inline ZLoss z_loss_from(ZLoss z, int first) {
    if (z.losses) z.losses += first;
    return z;
}

static inline BOTH float z_loss_value(ZLoss z, float log_z) { return z.weight * log_z * log_z; }

/* The factor on softmax(logits) in the gradient. */
static inline BOTH float z_loss_factor(ZLoss z, float log_z) { return z.losses ? 1 + 2 * z.weight * log_z : 1; }

/* Combines all ranks' parts of row n, in the order of ranks: every rank gets the same bits. */
static inline BOTH LossPart join_parts(const float *parts /* (ranks, N, 3) */, int ranks, int64_t N, int64_t n) {
    LossPart all = {-INFINITY, 0, -INFINITY};
    for (int r = 0; r < ranks; r++) {
        const float *part = parts + 3 * (r * N + n);
        all.max = fmaxf(all.max, part[0]);
        all.target = fmaxf(all.target, part[2]);
    }
    for (int r = 0; r < ranks; r++) {
        const float *part = parts + 3 * (r * N + n);
        all.sum = fmaf(part[1], expf(part[0] - all.max), all.sum);
    }
    return all;
}

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
    int in_first_half = key - s->q_offset;
    int in_second_half = in_first_half - s->q_gap;
    int t = in_first_half;
    if (t >= s->q_split) t = in_second_half > s->q_split ? in_second_half : s->q_split;
    return t > 0 ? t : 0;
}

/* How many keys query t sees by position alone, not counting document boundaries. */
static inline BOTH int64_t keys_seen(const AttentionShape *s, int64_t t) {
    return max_i64(0, min_i64(s->Tk, query_position(s, (int)t) + (int64_t)1));
}

#endif
