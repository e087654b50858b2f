/* cross_entropy.cuh: the loss on NVIDIA GPUs. The contracts are in lib/ops.h.
 *
 * A block computes one row of logits: a pass for the largest logit and the sum of exponentials, and, if the gradient is
 * wanted, a second pass that overwrites the logits with it.
 */
#ifndef CUDA_CROSS_ENTROPY_CUH
#define CUDA_CROSS_ENTROPY_CUH
#include "../ops_common.h" // defines: LossPart, ZLoss, join_parts, slice_row
#include "vectors.cuh"     // defines: load, store, warp_max, warp_sum, KERNEL_BY_WIDTH

static constexpr int LOSS_TILE = 4; // vectors of logits that a thread loads before it uses the first
enum {
    LOGIT_ROWS = 8192, // the model computes the loss in tiles of at most so many tokens: each reads and writes dw once,
    LOGITS = 1 << 30   // and of at most so many logits: 4 GiB
};

/* The largest logit of a row and the sum of exp(logit - largest), on all threads of a block. Each thread keeps a
 * maximum and a sum relative to it (an online softmax). The pass goes from the row's end to its beginning and leaves
 * the last `held` logits in shared memory (`tail`), where the second pass finds them. */
template <int W>
DEVICE void exponentials_sum(const float *row, int V, float *tail, int held, float *largest_logit, float *total) {
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W, near = V - held;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    float v[LOSS_TILE][W], max = -INFINITY, sum = 0;
    for (int t = (V - 1) / tile * tile; t >= 0; t -= tile) {
        float largest = -INFINITY;
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            UNROLL for (int j = 0; j < W; j++) v[u][j] = -INFINITY;
            if (i < V) load(v[u], row + i);
        }
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i >= near && i < V) store_shared(tail + i - near, v[u]);
            UNROLL for (int j = 0; j < W; j++) largest = fmaxf(largest, v[u][j]);
        }
        if (largest > max) {
            sum *= __expf(max - largest);
            max = largest;
        }
        float base = max == -INFINITY ? 0.0f : max; // all logits are -infinity: exp(-inf - 0) = 0
        UNROLL for (int u = 0; u < LOSS_TILE; u++)
            UNROLL for (int j = 0; j < W; j++) sum += __expf(v[u][j] - base);
    }
    auto scaled = [](float s, float from, float to) { return from == to ? s : s * __expf(from - to); };
    float of_warp = warp_max(max), sum_of_warp = warp_sum(scaled(sum, max, of_warp));
    if (lane == 0) {
        maxima[warp] = of_warp;
        sums[warp] = sum_of_warp;
    }
    __syncthreads();
    of_warp = lane < warps ? maxima[lane] : -INFINITY;
    max = warp_max(of_warp);
    *largest_logit = max;
    *total = warp_sum(lane < warps ? scaled(sums[lane], of_warp, max) : 0.0f);
}

/* Overwrites a row of logits with its gradient. `inverse` is what exp(logit - max) is multiplied by; `target` is the
 * target's index in the row, -1 if another rank has it.
 * In bf16, gradient i occupies half of logit i / 2's memory: the gradients of a tile overwrite logits up to the middle
 * of what has been read by then. So a barrier is needed only where a tile ends beyond twice what all threads had read
 * at the last one: at tiles 0, 2, 6, 14, … Between barriers, warps load while others write. In fp32 a thread overwrites
 * what it has read itself. */
template <int W>
DEVICE void loss_gradient(float *row, int V, int target, float max, float inverse, const float *tail, int held) {
    floatX *dlogits = (floatX *)row;
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W, near = V - held;
    int read = 0; // logits [0, read) have been read by all threads
    float v[LOSS_TILE][W];
    for (int t = 0; t < V; t += tile) {
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i < near) load(v[u], row + i);
            else if (i < V) load(v[u], tail + i - near);
        }
        if (sizeof(floatX) < sizeof(float) && t + tile > 2 * read) {
            __syncthreads();
            read = t + tile;
        }
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            UNROLL for (int j = 0; j < W; j++)
                v[u][j] = __expf(v[u][j] - max) * inverse - (i + j == target ? 1.0f : 0.0f);
            if (i < V) store(dlogits + i, v[u]);
        }
    }
}
template <int W> DEVICE void no_gradient(float *row, int V) {
    float none[W] = {};
    for (int i = (int)threadIdx.x * W; i < V; i += (int)blockDim.x * W) store((floatX *)row + i, none);
}

/* Loss and gradient of a row, by one block. The gradient needs the logits a second time. The first pass leaves the end
 * of the row in shared memory and read the beginning last, so that it is still in the L2 cache: 4 V bytes come from
 * memory, once, and V * sizeof(floatX) return. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    cross_entropy_kernel(float *losses, float *logits, const int32_t *targets, ZLoss z, int V, int want_grad,
                         int held) {
    DYN_SHARED(float, tail); // (held): logits V - held … V - 1
    float *row = logits + (int64_t)blockIdx.x * V, max, sum;
    int target = targets[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = 0;
        if (want_grad) no_gradient<W>(row, V);
        return;
    }
    float target_logit = row[target]; // every thread reads it before the first barrier
    exponentials_sum<W>(row, V, tail, held, &max, &sum);
    float log_z = max + logf(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (max - target_logit) + logf(sum);
    if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = z_loss_value(z, log_z);
    if (want_grad) loss_gradient<W>(row, V, target, max, z_loss_factor(z, log_z) / sum, tail, held);
}

static size_t cuda_cross_entropy_scratch(const Device *dev, int64_t V) {
    (void)dev;
    (void)V;
    return 0;
}
/* Dynamic shared memory; 1 KiB is left for the kernel's static arrays. */
static int loss_shared_bytes(const Device *dev) { return dev->shared_limit - 1024; }

static void cuda_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, ZLoss z, int N, int V,
                               int want_grad, void *workspace) {
    (void)workspace;
    int held = want_grad ? (int)min_i64(V, loss_shared_bytes(dev) / 16 * 4) : 0; // floats, whole vectors of 16 bytes
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_kernel, (unsigned)N,
                        threads_for(blocks_of(V, W), MAX_BLOCK), held * sizeof(float), losses, logits, targets, z, V,
                        want_grad, held);
}

// ---------------------------------------------------------------------------
// a vocabulary that is split over ranks; a block has one row

template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_part_kernel(float *parts, const float *logits, const int32_t *targets, int first, int V) {
    const float *row = logits + (int64_t)blockIdx.x * V;
    float *part = parts + 3 * (int64_t)blockIdx.x, max = -INFINITY, sum = 0;
    int at = slice_row(targets[blockIdx.x], first, V);
    if (targets[blockIdx.x] >= 0) exponentials_sum<W>(row, V, NULL, 0, &max, &sum);
    if (threadIdx.x == 0) {
        part[0] = max;
        part[1] = sum;
        part[2] = at < 0 ? -INFINITY : row[at];
    }
}
static void cuda_cross_entropy_part(Device *dev, float *parts, const float *logits, const int32_t *targets, int first,
                                    int N, int V, void *workspace) {
    (void)workspace;
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_part_kernel, (unsigned)N,
                        threads_for(blocks_of(V, W), MAX_BLOCK), 0, parts, logits, targets, first, V);
}
template <int W>
__global__ void __launch_bounds__(BLOCK, 6)
    cross_entropy_join_kernel(float *losses, float *logits, const float *parts, const int32_t *targets, ZLoss z,
                              int ranks, int first, int V, int want_grad) {
    float *row = logits + (int64_t)blockIdx.x * V;
    if (targets[blockIdx.x] < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = 0;
        if (want_grad) no_gradient<W>(row, V);
        return;
    }
    LossPart all = join_parts(parts, ranks, gridDim.x, blockIdx.x);
    float log_z = all.max + logf(all.sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (all.max - all.target) + logf(all.sum);
    if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = z_loss_value(z, log_z);
    if (want_grad)
        loss_gradient<W>(row, V, slice_row(targets[blockIdx.x], first, V), all.max, z_loss_factor(z, log_z) / all.sum,
                         NULL, 0);
}
static void cuda_cross_entropy_join(Device *dev, float *losses, float *logits, const float *parts,
                                    const int32_t *targets, ZLoss z, int ranks, int first, int N, int V,
                                    int want_grad) {
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_join_kernel, (unsigned)N,
                        threads_for(want_grad ? blocks_of(V, W) : 1, BLOCK), 0, losses, logits, parts, targets, z,
                        ranks, first, V, want_grad);
}

#endif
