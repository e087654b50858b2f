/* logits.h: rows of logits, slices of a vocabulary that tensor parallelism splits, and the z-loss, for the CPU and the
 * CUDA implementation of the loss.
 */
#ifndef LOGITS_H
#define LOGITS_H
#include "../device/kernel.h" // defines: floatX, Dtype, BOTH

/* Rows of V logits. In training, logits are floatX, and their gradient replaces them. Validation, scores and generation
 * use fp32 logits. */
typedef struct {
    void *data;     // (N, stride); elements V to stride of a row are padding, which no op writes
    int64_t stride; // elements from one row to the next
    Dtype dtype;    // DTYPE_F32 or floatX; the gradient has the same
} Logits;

// ---------------------------------------------------------------------------
// a slice of the vocabulary: tensor parallelism gives each rank V consecutive tokens, beginning with `first`

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

#endif
