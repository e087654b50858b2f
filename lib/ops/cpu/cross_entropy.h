/* cross_entropy.h: the loss on the CPU. The contracts are in lib/ops/ops.h.
 *
 * A row of logits does not fit the caches, so the loss reads it from memory once: exponentials are taken block by
 * block, relative to the largest logit of the block, and scaled to the row's largest logit when that is known. In fp32
 * the exponentials replace the logits until the gradient uses them. In bf16 they do not fit there, so the gradient
 * reads the logits again and recomputes them.
 */
#ifndef CPU_CROSS_ENTROPY_H
#define CPU_CROSS_ENTROPY_H
#include "../logits.h" // defines: Logits, LossPart, ZLoss, join_parts; includes kernel.h: slice_row
#include "vectors.h"   // defines: vfloat, load_fill, load_bf16, store_float, vexp
#include <omp.h>

enum {
    LOSS_BLOCK = 512,  // logits in one partial sum of exponentials
    LOGIT_ROWS = 1024, // the model computes the loss in tiles of at most so many tokens,
    LOGITS = 1 << 25   // and of at most so many logits: 128 MiB in fp32, 64 MiB in bf16
};

/* Floats per thread for the blocks' factors, and as many for their sums. */
static int64_t loss_blocks(int64_t V) { return round_up(blocks_of(V, LOSS_BLOCK), VL); }
static size_t cpu_cross_entropy_scratch(const OpStream *on, int64_t V) {
    return (size_t)(on->threads * 2 * loss_blocks(V)) * sizeof(float);
}
/* The part of the scratch memory that belongs to the calling thread. */
static float *loss_factors(void *workspace, int64_t V) {
    return (float *)workspace + omp_get_thread_num() * 2 * loss_blocks(V);
}

/* One row. */
typedef struct {
    void *data; // (V)
    int64_t V;
    int is_fp32; // otherwise the logits are bf16
} LogitRow;

static inline LogitRow logit_row(Logits logits, int64_t n, int64_t V) {
    char *data = (char *)logits.data + n * logits.stride * (int64_t)dtype_size(logits.dtype);
    LogitRow row = {data, V, FLOATX == DTYPE_F32 || logits.dtype == DTYPE_F32};
    return row;
}
/* VL logits from i on; -infinity beyond the end of the row. */
static inline vfloat load_logits(LogitRow row, int64_t i) {
    const vint lane = {LANE_NUMBERS};
    int64_t n = row.V - i;
    if (row.is_fp32) return load_fill((const float *)row.data + i, n, -INFINITY);
    vfloat x = load_bf16((const bf16 *)row.data + i, n);
    return WHOLE(n) ? x : vselect(lane < (int)n, x, vsplat(-INFINITY));
}
static inline float logit_at(LogitRow row, int64_t i) {
    return row.is_fp32 ? ((const float *)row.data)[i] : bf16_to_float(((const bf16 *)row.data)[i]);
}
static inline void store_gradient(LogitRow row, int64_t i, vfloat gradient) {
    if (row.is_fp32) store_float((float *)row.data + i, gradient, row.V - i);
    else store_bf16((bf16 *)row.data + i, gradient, row.V - i);
}
static void zero_gradient(LogitRow row) {
    memset(row.data, 0, (size_t)row.V * (row.is_fp32 ? sizeof(float) : sizeof(bf16)));
}

/* Returns the sum of exp(logit - largest logit) over a row, and the largest logit. With `kept`, which is then the row
 * itself, the exponentials replace the logits: those of block b are relative to the block's own largest logit, and
 * factors[b] is what they still have to be multiplied by.
 *   factors (2, loss_blocks(V)): the factors and scratch memory for the blocks' sums */
static float exponentials_sum(LogitRow row, float *kept, float *largest_logit, float *factors) {
    int64_t V = row.V, blocks = blocks_of(V, LOSS_BLOCK);
    float max = -INFINITY, *sums = factors + loss_blocks(V);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = b * LOSS_BLOCK, end = min_i64(V, begin + LOSS_BLOCK);
        vfloat largest = vsplat(-INFINITY), sum = vsplat(0);
        for (int64_t i = begin; i < end; i += VL) largest = vmax(largest, load_logits(row, i));
        factors[b] = vmax_lane(largest);
        if (factors[b] > max) max = factors[b];
        float base = factors[b] == -INFINITY ? 0.0f : factors[b]; // all logits are -infinity: exp(-inf - 0) = 0
        for (int64_t i = begin; i < end; i += VL) {
            vfloat e = vexp(load_logits(row, i) - base);
            if (kept) store_float(kept + i, e, row.V - i);
            sum += e;
        }
        sums[b] = vsum(sum);
    }
    vfloat totals = vsplat(0);
    float base = max == -INFINITY ? 0.0f : max;
    for (int64_t b = 0; b < blocks; b += VL) {
        vfloat factor = vexp(load_fill(factors + b, blocks - b, -INFINITY) - base);
        totals += factor * load_float(sums + b, blocks - b);
        vstore(factors + b, factor);
    }
    *largest_logit = max;
    return vsum(totals);
}

/* The gradient takes the place of the logits: exp(logit - max) * inverse, minus 1 at the target. at: the target's index
 * in the row, -1 if another rank has it. */
static void loss_gradient(LogitRow row, int at, float max, float inverse) {
    float at_target = at < 0 ? 0 : exp_float(logit_at(row, at) - max) * inverse - 1.0f;
    for (int64_t i = 0; i < row.V; i += VL) store_gradient(row, i, vexp(load_logits(row, i) - max) * inverse);
    if (at >= 0 && row.is_fp32) ((float *)row.data)[at] = at_target;
    if (at >= 0 && !row.is_fp32) ((bf16 *)row.data)[at] = float_to_bf16(at_target);
}
/* The gradient of an fp32 row from the exponentials that exponentials_sum left in it, and its blocks' factors. */
static void loss_gradient_of_kept(LogitRow row, int at, float inverse, const float *factors) {
    float *kept = (float *)row.data, at_target = kept[at] * (factors[at / LOSS_BLOCK] * inverse) - 1.0f;
    for (int64_t begin = 0; begin < row.V; begin += LOSS_BLOCK) {
        int64_t end = min_i64(row.V, begin + LOSS_BLOCK);
        float factor = factors[begin / LOSS_BLOCK] * inverse;
        for (int64_t i = begin; i < end; i += VL)
            store_float(kept + i, load_float(kept + i, row.V - i) * factor, row.V - i);
    }
    kept[at] = at_target;
}

static float cross_entropy_row(LogitRow row, int32_t target, ZLoss z, int64_t n, int want_grad, float *factors) {
    if (z.losses) z.losses[n] = 0;
    if (target < 0) {
        if (want_grad) zero_gradient(row);
        return 0.0f;
    }
    float *kept = want_grad && row.is_fp32 ? (float *)row.data : NULL;
    float target_logit = logit_at(row, target), max;
    float total = exponentials_sum(row, kept, &max, factors);
    float loss = (max - target_logit) + logf(total), log_z = max + logf(total);
    if (z.losses) z.losses[n] = z_loss_value(z, log_z);
    if (!want_grad) return loss;
    float inverse = z_loss_factor(z, log_z) / total;
    if (kept) loss_gradient_of_kept(row, target, inverse, factors);
    else loss_gradient(row, target, max, inverse);
    return loss;
}

static void cpu_cross_entropy(OpStream *on, float *losses, Logits logits, const int32_t *targets, ZLoss z, int N, int V,
                              int want_grad, void *workspace) {
#pragma omp parallel for num_threads(on->threads) schedule(dynamic, 8) // adjacent rows: the hardware prefetches them
    for (int n = 0; n < N; n++)
        losses[n] = cross_entropy_row(logit_row(logits, n, V), targets[n], z, n, want_grad, loss_factors(workspace, V));
}

// ---------------------------------------------------------------------------
// a vocabulary that is split over ranks

static void cpu_cross_entropy_part(OpStream *on, float *parts, Logits logits, const int32_t *targets, int first, int N,
                                   int V, void *workspace) {
#pragma omp parallel for num_threads(on->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        LogitRow row = logit_row(logits, n, V);
        int at = slice_row(targets[n], first, V);
        LossPart part = {-INFINITY, 0, at < 0 ? -INFINITY : logit_at(row, at)};
        if (targets[n] >= 0) part.sum = exponentials_sum(row, NULL, &part.max, loss_factors(workspace, V));
        memcpy(parts + 3 * (int64_t)n, &part, sizeof part);
    }
}

static void cpu_cross_entropy_join(OpStream *on, float *losses, Logits logits, const float *parts,
                                   const int32_t *targets, ZLoss z, int ranks, int first, int N, int V, int want_grad) {
#pragma omp parallel for num_threads(on->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        LogitRow row = logit_row(logits, n, V);
        LossPart all = join_parts(parts, ranks, N, n);
        float log_z = all.max + logf(all.sum), inverse = z_loss_factor(z, log_z) / all.sum;
        losses[n] = targets[n] < 0 ? 0 : (all.max - all.target) + logf(all.sum);
        if (z.losses) z.losses[n] = targets[n] < 0 ? 0 : z_loss_value(z, log_z);
        if (!want_grad) continue;
        if (targets[n] < 0) zero_gradient(row);
        else loss_gradient(row, slice_row(targets[n], first, V), all.max, inverse);
    }
}

#endif
