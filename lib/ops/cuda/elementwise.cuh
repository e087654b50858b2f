/* elementwise.cuh: ops that compute each element alone, on NVIDIA GPUs: casts, int8, scaling, adapters, the residual
 * addition; and the hash of a tensor. The contracts are in lib/ops/ops.h.
 *
 * Most kernels give a thread W elements. The result does not depend on the grid or on where a tensor is cut.
 */
#ifndef CUDA_ELEMENTWISE_CUH
#define CUDA_ELEMENTWISE_CUH
#include "flat.cuh" // defines: load_some, store_some, filling_grid, KERNEL_BY_WIDTH; includes vectors.cuh

template <int W>
__global__ void __launch_bounds__(BLOCK) cast_to_bf16_kernel(bf16 *out, const float *in, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some<true>(v, in + i, left);
    store_some(out + i, v, left);
}
static void cuda_cast_to_bf16(OpStream *on, bf16 *out, const float *in, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, 8, out, in), 8, cast_to_bf16_kernel, grid_of(blocks_of(count, BLOCK * W)),
                        BLOCK, 0, out, in, count);
}

template <int W> __global__ void __launch_bounds__(BLOCK) scale_kernel(floatX *x, float by, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some(v, x + i, left);
    UNROLL for (int k = 0; k < W; k++) v[k] *= by;
    store_some(x + i, v, left);
}
static void cuda_scale(OpStream *on, floatX *x, float by, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, x), WIDE, scale_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0,
                        x, by, count);
}

/* The int8 elements are loaded as words of four. A thread's W elements are in one block, since W divides INT8_BLOCK. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    dequantize_kernel(floatX *out, const int8_t *in, const float *scales, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    if (left <= 0) return;
    float by = scales[i / INT8_BLOCK], v[W];
    UNROLL for (int k = 0; k < W; k++) {
        if (W % 4 == 0 && left >= W)
            v[k] = (float)(int8_t)(((const uint32_t *)(const void *)(in + i))[k / 4] >> k % 4 * 8) * by;
        else v[k] = k < left ? (float)in[i + k] * by : 0;
    }
    store_some(out + i, v, left);
}
static void cuda_dequantize(OpStream *on, floatX *out, const int8_t *in, const float *scales, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, out, in), WIDE, dequantize_kernel,
                        grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, in, scales, count);
}

static __global__ void __launch_bounds__(BLOCK)
    adapter_merge_kernel(float *w, const float *a, const float *b, float by, int R, int64_t IC, int64_t count) {
    int64_t at = thread_of_grid();
    float sum = 0;
    if (at >= count) return;
    for (int r = 0; r < R; r++) sum = fmaf(a[r * IC + at % IC], b[at / IC * R + r], sum);
    w[at] = fmaf(sum, by, w[at]);
}
static void cuda_adapter_merge(OpStream *on, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                               int64_t OC) {
    if (IC > 0 && OC > 0)
        KERNEL(on, adapter_merge_kernel, grid_of(blocks_of(IC * OC, BLOCK)), BLOCK, 0, w, a, b, by, R, IC, IC * OC);
}

/* The sum over all words, each hashed together with its index: any order gives the same hash. */
static __global__ void __launch_bounds__(BLOCK)
    fingerprint_kernel(unsigned long long *total, const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = thread_of_grid(); i < count; i += (int64_t)gridDim.x * BLOCK)
        sum += mix64(words[i] + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) atomicAdd(total, (unsigned long long)sum);
}
static void cuda_fingerprint(OpStream *on, uint64_t *total, const void *data, int64_t bytes) {
    cuda_check(cudaMemsetAsync(total, 0, sizeof *total, on->stream), "clearing a hash");
    if (bytes)
        KERNEL(on, fingerprint_kernel, filling_grid(on, blocks_of(bytes / 8, BLOCK)), BLOCK, 0,
               (unsigned long long *)total, (const uint64_t *)data, bytes / 8);
}

template <int W>
__global__ void __launch_bounds__(BLOCK)
    residual_add_kernel(floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W], d[W];
    if (left <= 0) return;
    load_some(v, x + i, left);
    load_some(d, delta + i, left);
    UNROLL for (int j = 0; j < W; j++) v[j] += d[j];
    store_some(out + i, v, left);
}
static void cuda_residual_add(OpStream *on, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, out, x, delta), WIDE, residual_add_kernel,
                        grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, x, delta, count);
}

#endif
