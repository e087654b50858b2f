/* cross_entropy.h: the loss on the CPU. The contracts are in lib/ops.h.
 *
 * A row of logits does not fit the caches, so it is read from memory once: exponentials are taken block by block,
 * relative to the largest logit of the block, and scaled to the row's largest logit when that is known.
 */
#ifndef CPU_CROSS_ENTROPY_H
#define CPU_CROSS_ENTROPY_H
#include "../device.h"     // defines: Device
#include "../ops_common.h" // defines: LossPart, ZLoss, join_parts, slice_row
#include "vectors.h"       // defines: vfloat, load_float, store_x, vexp
#include <omp.h>

enum {
    LOSS_BLOCK = 512,  // logits in one partial sum of exponentials
    LOGIT_ROWS = 1024, // the model computes the loss in tiles of at most so many tokens,
    LOGITS = 1 << 25   // and of at most so many logits: 128 MiB
};

/* Floats per thread for the blocks' factors, and as many for their sums. */
static int64_t loss_blocks(int64_t V) { return round_up(blocks_of(V, LOSS_BLOCK), VL); }
static size_t cpu_cross_entropy_scratch(const Device *dev, int64_t V) {
    return (size_t)(dev->threads * 2 * loss_blocks(V)) * sizeof(float);
}
/* The part of the scratch memory that belongs to the calling thread. */
static float *loss_factors(void *workspace, int64_t V) {
    return (float *)workspace + omp_get_thread_num() * 2 * loss_blocks(V);
}

/* The sum of exp(logit - base) over one block. kept, if not NULL, receives the exponentials. */
static float exponentials_of_block(const float *logits, float *kept, int64_t n, int64_t left, float base) {
    vfloat sum = vsplat(0);
    for (int64_t i = 0; i < n; i += VL) {
        vfloat e = vexp(load_fill(logits + i, left - i, -INFINITY) - base);
        if (kept) store_float(kept + i, e, left - i);
        sum += e;
    }
    return vsum(sum);
}

/* Returns the sum of exp(logit - largest logit) over a row of V logits, and the largest logit. With `kept`, which is
 * then `logits`, the exponentials replace the logits: those of block b are relative to the block's own largest logit,
 * and factors[b] is what they still have to be multiplied by.
 *   factors (2, loss_blocks(V)): the factors and scratch memory for the blocks' sums */
static float exponentials_sum(const float *logits, float *kept, int64_t V, float *largest_logit, float *factors) {
    int64_t blocks = blocks_of(V, LOSS_BLOCK);
    float max = -INFINITY, *sums = factors + loss_blocks(V);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = b * LOSS_BLOCK, n = min_i64(V - begin, LOSS_BLOCK);
        vfloat largest = vsplat(-INFINITY);
        for (int64_t i = begin; i < begin + n; i += VL)
            largest = vmax(largest, load_fill(logits + i, V - i, -INFINITY));
        factors[b] = vmax_lane(largest);
        if (factors[b] > max) max = factors[b];
        float base = factors[b] == -INFINITY ? 0.0f : factors[b]; // all logits are -infinity: exp(-inf - 0) = 0
        sums[b] = exponentials_of_block(logits + begin, kept ? kept + begin : NULL, n, V - begin, base);
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

/* Row n. The gradient in floatX overwrites the exponentials from the front; since floatX is no wider than fp32, it
 * never overwrites one that is still to be read. */
static float cross_entropy_row(float *logits, int32_t target, ZLoss z, int64_t n, int64_t V, int want_grad,
                               float *factors) {
    floatX *dlogits = (floatX *)(void *)logits;
    if (z.losses) z.losses[n] = 0;
    if (target < 0) {
        if (want_grad) memset(dlogits, 0, (size_t)V * sizeof(floatX));
        return 0.0f;
    }
    float target_logit = logits[target], max;
    float total = exponentials_sum(logits, want_grad ? logits : NULL, V, &max, factors);
    float loss = (max - target_logit) + logf(total), log_z = max + logf(total);
    if (z.losses) z.losses[n] = z_loss_value(z, log_z);
    if (!want_grad) return loss;

    float inverse = z_loss_factor(z, log_z) / total;
    float at_target = logits[target] * (factors[target / LOSS_BLOCK] * inverse) - 1.0f;
    for (int64_t begin = 0; begin < V; begin += LOSS_BLOCK) {
        int64_t end = min_i64(V, begin + LOSS_BLOCK);
        float factor = factors[begin / LOSS_BLOCK] * inverse;
        for (int64_t i = begin; i < end; i += VL)
            store_x(dlogits + i, load_float(logits + i, V - i) * factor, V - i);
    }
    dlogits[target] = from_float(at_target);
    return loss;
}

static void cpu_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, ZLoss z, int N, int V,
                              int want_grad, void *workspace) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8) // adjacent rows: the hardware prefetches them
    for (int n = 0; n < N; n++) {
        float *row = logits + (int64_t)n * V;
        losses[n] = cross_entropy_row(row, targets[n], z, n, V, want_grad, loss_factors(workspace, V));
    }
}

// ---------------------------------------------------------------------------
// a vocabulary that is split over ranks

static void cpu_cross_entropy_part(Device *dev, float *parts, const float *logits, const int32_t *targets, int first,
                                   int N, int V, void *workspace) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        const float *row = logits + (int64_t)n * V;
        int at = slice_row(targets[n], first, V);
        LossPart part = {-INFINITY, 0, at < 0 ? -INFINITY : row[at]};
        if (targets[n] >= 0) part.sum = exponentials_sum(row, NULL, V, &part.max, loss_factors(workspace, V));
        memcpy(parts + 3 * (int64_t)n, &part, sizeof part);
    }
}

static void cpu_cross_entropy_join(Device *dev, float *losses, float *logits, const float *parts,
                                   const int32_t *targets, ZLoss z, int ranks, int first, int N, int V, int want_grad) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        float *row = logits + (int64_t)n * V;
        floatX *dlogits = (floatX *)(void *)row;
        int at = slice_row(targets[n], first, V);
        LossPart all = join_parts(parts, ranks, N, n);
        float log_z = all.max + logf(all.sum), inverse = z_loss_factor(z, log_z) / all.sum;
        losses[n] = targets[n] < 0 ? 0 : (all.max - all.target) + logf(all.sum);
        if (z.losses) z.losses[n] = targets[n] < 0 ? 0 : z_loss_value(z, log_z);
        if (want_grad && targets[n] < 0) memset(dlogits, 0, (size_t)V * sizeof(floatX));
        if (!want_grad || targets[n] < 0) continue;
        float at_target = at < 0 ? 0 : exp_float(row[at] - all.max) * inverse - 1.0f;
        for (int64_t i = 0; i < V; i += VL)
            store_x(dlogits + i, vexp(load_float(row + i, V - i) - all.max) * inverse, V - i);
        if (at >= 0) dlogits[at] = from_float(at_target);
    }
}

#endif
