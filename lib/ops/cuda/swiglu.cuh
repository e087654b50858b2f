/* swiglu.cuh: SwiGLU on NVIDIA GPUs. The contracts are in lib/ops/ops.h.
 *
 * Memory bandwidth limits it, so each kernel reads its inputs once and loads 16 bytes at a time where rows are aligned.
 */
#ifndef CUDA_SWIGLU_CUH
#define CUDA_SWIGLU_CUH
#include "vectors.cuh" // defines: load, store, KERNEL_BY_WIDTH

DEVICE float gpu_sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x)); // 0 where exp(-x) is infinite
}

template <int W>
__global__ void __launch_bounds__(BLOCK)
    swiglu_forward_kernel(floatX *h, const floatX *gate_up, int F, int row_blocks) {
    int64_t n = blockIdx.x / (unsigned)row_blocks;
    int64_t i = ((int64_t)(blockIdx.x % (unsigned)row_blocks) * BLOCK + threadIdx.x) * W;
    if (i >= F) return;
    float g[W], u[W];
    load(g, gate_up + n * 2 * F + i);
    load(u, gate_up + n * 2 * F + F + i);
    UNROLL for (int j = 0; j < W; j++) g[j] *= gpu_sigmoid(g[j]) * u[j];
    store(h + n * F + i, g);
}
static void cuda_swiglu_forward(OpStream *on, floatX *h, const floatX *gate_up, int N, int F) {
    if (N)
        KERNEL_BY_WIDTH(on, in_vectors(F, WIDE, h, gate_up), WIDE, swiglu_forward_kernel,
                        grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0, h, gate_up, F, (int)blocks_of(F, BLOCK * W));
}
template <int W>
__global__ void __launch_bounds__(BLOCK)
    swiglu_backward_kernel(floatX *dgate_up, const floatX *dh, const floatX *gate_up, int F, int row_blocks) {
    int64_t n = blockIdx.x / (unsigned)row_blocks;
    int64_t i = ((int64_t)(blockIdx.x % (unsigned)row_blocks) * BLOCK + threadIdx.x) * W;
    if (i >= F) return;
    float g[W], u[W], d[W];
    load(g, gate_up + n * 2 * F + i);
    load(u, gate_up + n * 2 * F + F + i);
    load(d, dh + n * F + i);
    UNROLL for (int j = 0; j < W; j++) {
        float s = gpu_sigmoid(g[j]), silu = __fmul_rn(g[j], s), slope = fmaf(s, 1.0f - silu, silu); // d silu / d gate
        g[j] = d[j] * u[j] * slope;
        u[j] = d[j] * silu;
    }
    store(dgate_up + n * 2 * F + i, g);
    store(dgate_up + n * 2 * F + F + i, u);
}
static void cuda_swiglu_backward(OpStream *on, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N,
                                 int F) {
    if (N)
        KERNEL_BY_WIDTH(on, in_vectors(F, WIDE, dgate_up, dh, gate_up), WIDE, swiglu_backward_kernel,
                        grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0, dgate_up, dh, gate_up, F,
                        (int)blocks_of(F, BLOCK * W));
}

#endif
