/* muon.cuh: Muon's elementwise ops on NVIDIA GPUs: momentum, normalization, weighted sums, update of the weights. The
 * contracts are in lib/ops/ops.h.
 *
 * Every product that meets an addition is explicitly fused (fmaf) or rounded (__fmul_rn), so the result is the same for
 * every W, the number of elements of a thread.
 */
#ifndef CUDA_MUON_CUH
#define CUDA_MUON_CUH
#include "squared_norm.cuh" // defines: ExactSum, squared_norm_of
#include "flat.cuh"         // defines: load_some, store_some, filling_grid; includes vectors.cuh

template <int W>
__global__ void __launch_bounds__(BLOCK) muon_momentum_kernel(floatX *update, float *m, const float *g, int64_t count,
                                                              float momentum, float new_part, float grad_scale) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float mi[W], gi[W];
    if (left <= 0) return;
    load_some<true>(gi, g + i, left);
    load_some<true>(mi, m + i, left);
    UNROLL for (int j = 0; j < W; j++) {
        float grad = __fmul_rn(gi[j], grad_scale);
        mi[j] = fmaf(grad - mi[j], new_part, mi[j]);
        gi[j] = fmaf(mi[j] - grad, momentum, grad);
    }
    store_some<true>(m + i, mi, left);
    store_some(update + i, gi, left);
}
static void cuda_muon_momentum(OpStream *on, floatX *update, float *m, const float *g, int64_t count, float momentum,
                               float grad_scale) {
    float new_part = (float)(1.0 - (double)momentum);
    int vectors = in_vectors(0, FLAT, m, g) && (uintptr_t)update % (FLAT * sizeof(floatX)) == 0;
    if (count)
        KERNEL_BY_WIDTH(on, vectors, FLAT, muon_momentum_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0,
                        update, m, g, count, momentum, new_part, grad_scale);
}

typedef struct {
    ExactSum squares;
    float by; // 1 / norm
} MatrixNorm;

static size_t cuda_normalize_matrix_scratch(void) { return sizeof(MatrixNorm); }

template <int W>
__global__ void __launch_bounds__(BLOCK, 4) squares_of_matrix_kernel(ExactSum *total, const floatX *x, int64_t count) {
    squared_norm_of<W>(total, x, count);
}

/* One thread. Digits may hold carries that were not propagated; their sum is the same. */
static __global__ void __launch_bounds__(1) inverse_norm_kernel(MatrixNorm *norm) {
    double sum = 0;
    for (int i = EXACT_DIGITS - 1; i >= 0; i--) sum += ldexp((double)norm->squares.digit[i], 32 * i - 149);
    float root = (float)sqrt(sum);
    norm->by = norm->squares.not_finite ? NAN : 1.0f / fmaxf(root, 1e-7f);
}

template <int W>
__global__ void __launch_bounds__(BLOCK) normalize_matrix_kernel(floatX *x, const MatrixNorm *norm, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W], by = norm->by;
    if (left <= 0) return;
    load_some(v, x + i, left);
    UNROLL for (int j = 0; j < W; j++) v[j] *= by;
    store_some(x + i, v, left);
}
static void cuda_normalize_matrix(OpStream *on, floatX *x, int64_t count, void *workspace) {
    MatrixNorm *norm = (MatrixNorm *)workspace;
    if (!count) return;
    cuda_check(cudaMemsetAsync(norm, 0, sizeof *norm, on->stream), "clearing a norm");
    KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, x), 4, squares_of_matrix_kernel,
                    filling_grid(on, blocks_of(count, (int)BLOCK * NORM_BLOCK)), BLOCK, 0, &norm->squares, x, count);
    KERNEL(on, inverse_norm_kernel, 1, 1, 0, norm);
    KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, x), WIDE, normalize_matrix_kernel, grid_of(blocks_of(count, BLOCK * W)),
                    BLOCK, 0, x, norm, count);
}

template <int W>
__global__ void __launch_bounds__(BLOCK)
    weighted_sum_kernel(floatX *x, float a, const float *y, float b, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float xi[W], yi[W];
    if (left <= 0) return;
    load_some(xi, x + i, left);
    load_some<true>(yi, y + i, left);
    UNROLL for (int j = 0; j < W; j++) xi[j] = fmaf(xi[j], a, __fmul_rn(yi[j], b));
    store_some(x + i, xi, left);
}
static void cuda_weighted_sum(OpStream *on, floatX *x, float a, const float *y, float b, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, x, y), WIDE, weighted_sum_kernel, grid_of(blocks_of(count, BLOCK * W)),
                        BLOCK, 0, x, a, y, b, count);
}

template <int W>
__global__ void __launch_bounds__(BLOCK)
    muon_update_kernel(float *p, floatX *copy, const floatX *direction, int64_t count, float keep, float rate) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float pi[W], di[W];
    if (left <= 0) return;
    load_some<true>(pi, p + i, left);
    load_some<true>(di, direction + i, left);
    UNROLL for (int j = 0; j < W; j++) pi[j] = fmaf(di[j], -rate, __fmul_rn(pi[j], keep));
    store_some<true>(p + i, pi, left);
    if (copy) store_some(copy + i, pi, left);
}
static void cuda_muon_update(OpStream *on, float *p, floatX *copy, const floatX *direction, int64_t count, float lr,
                             float adjust, float weight_decay) {
    float keep = (float)(1.0 - (double)lr * weight_decay), rate = lr * adjust;
    int vectors = in_vectors(0, FLAT, p) && ((uintptr_t)copy | (uintptr_t)direction) % (FLAT * sizeof(floatX)) == 0;
    if (count)
        KERNEL_BY_WIDTH(on, vectors, FLAT, muon_update_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, p, copy,
                        direction, count, keep, rate);
}

#endif
