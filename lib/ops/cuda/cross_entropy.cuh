/* cross_entropy.cuh: the loss on NVIDIA GPUs. The contracts are in lib/ops/ops.h.
 *
 * A block computes one row of logits: a pass for the largest logit and the sum of exponentials, and, if the gradient is
 * wanted, a second pass that overwrites the logits with it. T is the dtype of both, fp32 or floatX; a thread reads and
 * writes W elements at a time, 16 bytes or one element.
 */
#ifndef CUDA_CROSS_ENTROPY_CUH
#define CUDA_CROSS_ENTROPY_CUH
#include "../logits.h" // defines: Logits, LossPart, ZLoss, join_parts; slice_row is in kernel.h
#include "vectors.cuh"     // defines: Waiting, fetch, unpack, store, narrow, warp_max, warp_sum, in_vectors

static constexpr int LOSS_TILE = 4; // vectors of logits that a thread loads before it uses the first
enum {
    LOGIT_ROWS = 8192, // the model computes the loss in tiles of at most so many tokens: each reads and writes dw once,
    LOGITS = 1 << 30   // and of at most so many logits: 4 GiB in fp32, 2 GiB in bf16
};

/* W logits of a row from i on, in their format in memory; -infinity beyond the end of the row. The last vector of
 * a bf16 row may read the row's padding, which is replaced by -infinity. fp32 rows have no padding. */
template <int W, class T> DEVICE void fetch_logits(Waiting<W, T> &v, const T *row, int i, int V) {
    constexpr int pairs = W > 1 && sizeof(T) == sizeof(bf16);
    const uint32_t none = pairs ? 0xFF80FF80u : 0xFF800000u;
    UNROLL for (uint32_t &word : v.words) word = none;
    if (i < V) fetch(v, row + i);
    if (!pairs || i + W <= V) return;
    UNROLL for (int k = 0; k < W / 2; k++) {
        if (i + 2 * k + 1 >= V) v.words[k] = (v.words[k] & 0xFFFFu) | 0xFF800000u;
        if (i + 2 * k >= V) v.words[k] = none;
    }
}
/* Stores W elements of a gradient from i on, but not into the row's padding. */
template <int W> DEVICE void store_gradient(float *row, int i, int, const float (&v)[W]) { store(row + i, v); }
template <int W> DEVICE void store_gradient(bf16 *row, int i, int V, const float (&v)[W]) {
    bf16 *to = row + i;
    int64_t n = V - i;
    if (n >= W) store(to, v);
    else
        UNROLL for (int j = 0; j < W; j++)
            if (j < n) narrow(to + j, v[j]);
}
/* Copies W logits to shared memory. */
template <int W, class T> DEVICE void keep(T *shared, const Waiting<W, T> &v) {
    if constexpr (W == 1) narrow(shared, __uint_as_float(v.words[0]));
    else *(uint4 *)shared = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
}

/* The largest logit of a row and the sum of exp(logit - largest), on all threads of a block. Each thread keeps a
 * maximum and a sum relative to it (an online softmax). The pass goes from the row's end to its beginning and leaves
 * the logits from `near` on in shared memory (`tail`), where the second pass finds them; near = V: none. */
template <int W, class T>
DEVICE void exponentials_sum(const T *row, int V, T *tail, int near, float *largest_logit, float *total) {
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    Waiting<W, T> logits[LOSS_TILE];
    float v[W], max = -INFINITY, sum = 0;
    for (int t = (V - 1) / tile * tile; t >= 0; t -= tile) {
        float largest = -INFINITY;
        UNROLL for (int u = 0; u < LOSS_TILE; u++) fetch_logits(logits[u], row, t + u * step + at, V);
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i >= near && i < V) keep(tail + i - near, logits[u]);
            unpack(v, logits[u]);
            UNROLL for (int j = 0; j < W; j++) largest = fmaxf(largest, v[j]);
        }
        if (largest > max) {
            sum *= __expf(max - largest);
            max = largest;
        }
        float base = max == -INFINITY ? 0.0f : max; // all logits are -infinity: exp(-inf - 0) = 0
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            unpack(v, logits[u]);
            UNROLL for (int j = 0; j < W; j++) sum += __expf(v[j] - base);
        }
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
 * target's index in the row, -1 if another rank has it. Logits from `near` on are in `tail`. A thread overwrites what
 * it has read itself. */
template <int W, class T>
DEVICE void loss_gradient(T *row, int V, int target, float max, float inverse, const T *tail, int near) {
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W;
    Waiting<W, T> logits[LOSS_TILE];
    float v[W];
    for (int t = 0; t < V; t += tile) {
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i < near) fetch(logits[u], row + i);
            else if (i < V) fetch(logits[u], tail + i - near);
        }
        UNROLL for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            unpack(v, logits[u]);
            UNROLL for (int j = 0; j < W; j++) v[j] = __expf(v[j] - max) * inverse - (i + j == target ? 1.0f : 0.0f);
            if (i < V) store_gradient(row, i, V, v);
        }
    }
}
template <int W, class T> DEVICE void zero_gradient(T *row, int V) {
    float none[W] = {};
    for (int i = (int)threadIdx.x * W; i < V; i += (int)blockDim.x * W) store_gradient(row, i, V, none);
}

/* Loss and gradient of a row, by one block. The gradient needs the logits a second time: as many as fit stay in shared
 * memory, 115,712 logits in bf16 on an H100 and half as many in fp32. The first pass reads the beginning of a longer
 * row last, so that it is still in the L2 cache. So a row comes from memory once, and returns once. */
template <int W, class T>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_kernel(float *losses, T *logits, int64_t stride, const int32_t *targets, ZLoss z, int V,
                         int want_grad, int near) {
    DYN_SHARED(T, tail); // logits from `near` on
    T *row = logits + blockIdx.x * stride;
    float max, sum;
    int target = targets[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = 0;
        if (want_grad) zero_gradient<W>(row, V);
        return;
    }
    float target_logit = widen(row[target]); // every thread reads it before the first barrier
    exponentials_sum<W>(row, V, tail, near, &max, &sum);
    float log_z = max + logf(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (max - target_logit) + logf(sum);
    if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = z_loss_value(z, log_z);
    if (want_grad) loss_gradient<W>(row, V, target, max, z_loss_factor(z, log_z) / sum, tail, near);
}

static size_t cuda_cross_entropy_scratch(const OpStream *on, int64_t V) {
    (void)on;
    (void)V;
    return 0;
}
/* Dynamic shared memory; 1 KiB is left for the kernel's static arrays. */
static int loss_shared_bytes(const OpStream *on) { return on->shared_limit - 1024; }

/* Whether the rows consist of whole vectors of 16 bytes; the last one of a bf16 row may end in the row's padding. */
static int rows_in_vectors(Logits logits, int64_t V) {
    if (logits.dtype == DTYPE_F32) return in_vectors(V, FLAT, logits.data) && logits.stride % FLAT == 0;
    return in_vectors(logits.stride, WIDE, logits.data) && round_up(V, WIDE) <= logits.stride;
}
/* Launches kernel<W, T> on `rows`, the logits in their dtype T. grid, block and arguments are expressions of W. */
#define KERNEL_OF_ROWS(on, logits, V, T, wide, kernel, grid, block, shared_bytes, ...)                                \
    do {                                                                                                               \
        T *rows = (T *)(logits).data;                                                                                  \
        if (rows_in_vectors(logits, V)) {                                                                              \
            [[maybe_unused]] const int W = wide;                                                                       \
            KERNEL(on, (kernel<wide, T>), grid, block, shared_bytes, __VA_ARGS__);                                     \
        } else {                                                                                                       \
            [[maybe_unused]] const int W = 1;                                                                          \
            KERNEL(on, (kernel<1, T>), grid, block, shared_bytes, __VA_ARGS__);                                        \
        }                                                                                                              \
    } while (0)
#define KERNEL_OF_LOGITS(on, logits, V, ...)                                                                          \
    do {                                                                                                               \
        if ((logits).dtype == DTYPE_F32) KERNEL_OF_ROWS(on, logits, V, float, FLAT, __VA_ARGS__);                     \
        else KERNEL_OF_ROWS(on, logits, V, floatX, WIDE, __VA_ARGS__);                                                \
    } while (0)

static void cuda_cross_entropy(OpStream *on, float *losses, Logits logits, const int32_t *targets, ZLoss z, int N,
                               int V, int want_grad, void *workspace) {
    (void)workspace;
    int64_t size = (int64_t)dtype_size(logits.dtype), vector = 16 / size, whole = round_up(V, vector);
    int64_t held = want_grad ? min_i64(whole, loss_shared_bytes(on) / 16 * vector) : 0; // logits in shared memory
    int near = held ? (int)(whole - held) : V;
    if (N)
        KERNEL_OF_LOGITS(on, logits, V, cross_entropy_kernel, (unsigned)N, threads_for(blocks_of(V, W), MAX_BLOCK),
                         (size_t)(held * size), losses, rows, logits.stride, targets, z, V, want_grad, near);
}

// ---------------------------------------------------------------------------
// a vocabulary that is split over ranks; a block has one row

template <int W, class T>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_part_kernel(float *parts, T *logits, int64_t stride, const int32_t *targets, int first, int V) {
    T *row = logits + blockIdx.x * stride;
    float *part = parts + 3 * (int64_t)blockIdx.x, max = -INFINITY, sum = 0;
    int at = slice_row(targets[blockIdx.x], first, V);
    if (targets[blockIdx.x] >= 0) exponentials_sum<W, T>(row, V, NULL, V, &max, &sum);
    if (threadIdx.x == 0) {
        part[0] = max;
        part[1] = sum;
        part[2] = at < 0 ? -INFINITY : widen(row[at]);
    }
}
static void cuda_cross_entropy_part(OpStream *on, float *parts, Logits logits, const int32_t *targets, int first, int N,
                                    int V, void *workspace) {
    (void)workspace;
    if (N)
        KERNEL_OF_LOGITS(on, logits, V, cross_entropy_part_kernel, (unsigned)N,
                         threads_for(blocks_of(V, W), MAX_BLOCK), 0, parts, rows, logits.stride, targets, first, V);
}
template <int W, class T>
__global__ void __launch_bounds__(BLOCK, 5)
    cross_entropy_join_kernel(float *losses, T *logits, int64_t stride, const float *parts, const int32_t *targets,
                              ZLoss z, int ranks, int first, int V, int want_grad) {
    T *row = logits + blockIdx.x * stride;
    if (targets[blockIdx.x] < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = 0;
        if (want_grad) zero_gradient<W>(row, V);
        return;
    }
    LossPart all = join_parts(parts, ranks, gridDim.x, blockIdx.x);
    float log_z = all.max + logf(all.sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (all.max - all.target) + logf(all.sum);
    if (threadIdx.x == 0 && z.losses) z.losses[blockIdx.x] = z_loss_value(z, log_z);
    if (want_grad)
        loss_gradient<W, T>(row, V, slice_row(targets[blockIdx.x], first, V), all.max,
                            z_loss_factor(z, log_z) / all.sum, NULL, V);
}
static void cuda_cross_entropy_join(OpStream *on, float *losses, Logits logits, const float *parts,
                                    const int32_t *targets, ZLoss z, int ranks, int first, int N, int V,
                                    int want_grad) {
    if (N)
        KERNEL_OF_LOGITS(on, logits, V, cross_entropy_join_kernel, (unsigned)N,
                         threads_for(want_grad ? blocks_of(V, W) : 1, BLOCK), 0, losses, rows, logits.stride, parts,
                         targets, z, ranks, first, V, want_grad);
}

/* More than 48 KB of shared memory must be asked for. */
static void cross_entropy_open(const OpStream *on) {
    const void *kernels[4] = {
        (const void *)cross_entropy_kernel<FLAT, float>, (const void *)cross_entropy_kernel<1, float>,
        (const void *)cross_entropy_kernel<WIDE, floatX>, (const void *)cross_entropy_kernel<1, floatX>};
    for (int i = 0; i < 4; i++)
        cuda_check(
            cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, loss_shared_bytes(on)),
            "asking for shared memory");
}

#endif
