/* rmsnorm.cuh: RMSNorm on NVIDIA GPUs, with the residual addition before it. The contracts are in lib/ops/ops.h.
 *
 * Memory bandwidth limits it, so each kernel reads its inputs once and loads 16 bytes at a time where rows are aligned.
 */
#ifndef CUDA_RMSNORM_CUH
#define CUDA_RMSNORM_CUH
#include "sum_rows.cuh" // defines: add_rows; includes vectors.cuh: load, store, block_sum, KERNEL_BY_WIDTH

static constexpr int NORM_ROWS = 32; // rows in one partial sum of the weight's gradient

/* A block has one row, a thread one vector of it, which it keeps in registers between the sum of squares and the
 * output. In rows of more than MAX_BLOCK vectors a thread has several; all but the first are read again, from the
 * cache. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rmsnorm_forward_kernel(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w,
                           float eps, int C) {
    SHARED(float, sums, WARP);
    int64_t row = (int64_t)blockIdx.x * C;
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    const floatX *in = delta ? sum : x;
    float kept[W] = {}, squares = 0;
    ROLLED for (int i = first; i < C; i += step) {
        float v[W], d[W];
        load(v, x + row + i);
        if (delta) {
            load(d, delta + row + i);
            UNROLL for (int j = 0; j < W; j++)
                v[j] = to_float(from_float(v[j] + d[j])); // rounded: recomputing the norm from `sum` gives these bits
            store(sum + row + i, v);
        }
        UNROLL for (int j = 0; j < W; j++) {
            squares = fmaf(v[j], v[j], squares);
            kept[j] = i == first ? v[j] : kept[j];
        }
    }
    float scale = rsqrtf(__fdividef(block_sum(squares, sums), (float)C) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    ROLLED for (int i = first; i < C; i += step) {
        float weight[W];
        if (i != first) load(kept, in + row + i);
        load(weight, w + i);
        UNROLL for (int j = 0; j < W; j++) kept[j] *= scale * weight[j];
        store(out + row + i, kept);
    }
}
static void cuda_rmsnorm_forward(OpStream *on, floatX *out, float *rstd, floatX *sum, const floatX *x,
                                 const floatX *delta, const floatX *w, float eps, int N, int C) {
    if (N)
        KERNEL_BY_WIDTH(on, in_vectors(C, WIDE, out, sum, x, delta, w), WIDE, rmsnorm_forward_kernel, (unsigned)N,
                        threads_for(blocks_of(C, W), MAX_BLOCK), 0, out, rstd, sum, x, delta, w, eps, C);
}

/* A block has NORM_ROWS rows, one after the other. A thread has the same vector of each, and therefore its dw in
 * registers. x, dout and dresidual are read once and dx is written once. There are only N / NORM_ROWS blocks, too few
 * to hide the latency of memory by their number. So the next row's x, dout and dresidual are under way while a row is
 * computed and the block adds up its dot product g y. The formula is rmsnorm_backward's in lib/ops/ops.h. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rmsnorm_backward_kernel(floatX *dx, float *partial /* (blocks, C) = */, const floatX *dout, const floatX *dresidual,
                            const floatX *x, const float *rstd, const floatX *w, int N, int C) {
    SHARED(float, sums, 2 * WARP); // two halves in turn: one row's sums are read while the next row's are written
    const int begin = (int)blockIdx.x * NORM_ROWS, end = min(N, begin + NORM_ROWS), column = (int)threadIdx.x * W;
    const int exists = column < C;
    Waiting<W> x_next = {}, d_next = {}, residual_next = {}, weights = {};
    float dw[W] = {}, scale_next = rstd[begin];
    if (exists) {
        fetch(weights, w + column);
        fetch(x_next, x + (int64_t)begin * C + column);
        fetch(d_next, dout + (int64_t)begin * C + column);
        if (dresidual) fetch(residual_next, dresidual + (int64_t)begin * C + column);
    }
    for (int n = begin; n < end; n++) {
        const Waiting<W> x_now = x_next, d_now = d_next, residual_now = residual_next;
        const int64_t at = (int64_t)n * C + column;
        const float scale = scale_next;
        float y[W], d[W], weight[W], r[W], dot = 0;
        if (n + 1 < end) scale_next = rstd[n + 1];
        if (exists && n + 1 < end) {
            fetch(x_next, x + at + C);
            fetch(d_next, dout + at + C);
            if (dresidual) fetch(residual_next, dresidual + at + C);
        }
        issue_loads();
        unpack(y, x_now);
        unpack(d, d_now);
        unpack(weight, weights);
        UNROLL for (int j = 0; j < W; j++) {
            y[j] *= scale;
            dot = fmaf(d[j] * weight[j], y[j], dot);
            dw[j] = fmaf(d[j], y[j], dw[j]);
        }
        const float mean = -__fdividef(block_sum(dot, sums + n % 2 * WARP), (float)C);
        if (!exists) continue;
        unpack(y, x_now);
        unpack(d, d_now);
        unpack(weight, weights);
        unpack(r, residual_now);
        UNROLL for (int j = 0; j < W; j++) r[j] = fmaf(fmaf(y[j] * scale, mean, d[j] * weight[j]), scale, r[j]);
        store(dx + at, r);
    }
    if (exists) store(partial + (int64_t)blockIdx.x * C + column, dw);
}

/* The same for rows of several vectors a thread, C > MAX_BLOCK * W. The dw of the first is in registers, that of the
 * others in `partial`, and they are read a second time. `accumulate` adds a vector to the row's dot product g y and to
 * dw, `finish` computes dx when the dot product is known. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rmsnorm_backward_wide_kernel(floatX *dx, float *partial /* (blocks, C) = */, const floatX *dout,
                                 const floatX *dresidual, const floatX *x, const float *rstd, const floatX *w, int N,
                                 int C) {
    SHARED(float, sums, 2 * WARP); // two halves in turn: one row's sums are read while the next row's are written
    int64_t begin = (int64_t)blockIdx.x * NORM_ROWS, end = min_i64(N, begin + NORM_ROWS);
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    float *dw = partial + (int64_t)blockIdx.x * C, first_w[W] = {}, first_dw[W] = {}, scale, dot, mean;
    auto accumulate = [&](const floatX *xi, const floatX *di, float(&y)[W], float(&d)[W], const float(&weight)[W],
                          float(&dw_sum)[W]) {
        load(y, xi);
        load(d, di);
        UNROLL for (int j = 0; j < W; j++) {
            y[j] *= scale;
            dot = fmaf(d[j] * weight[j], y[j], dot);
            dw_sum[j] = fmaf(d[j], y[j], dw_sum[j]);
        }
    };
    auto finish = [&](floatX *out, const floatX *residual, const float(&y)[W], const float(&d)[W],
                      const float(&weight)[W]) {
        float r[W] = {};
        if (residual) load(r, residual);
        UNROLL for (int j = 0; j < W; j++) r[j] = fmaf(fmaf(y[j], mean, d[j] * weight[j]), scale, r[j]);
        store(out, r);
    };
    if (first < C) load(first_w, w + first);
    for (int64_t n = begin; n < end; n++) {
        float y[W] = {}, d[W] = {}, other_y[W], other_d[W], other_w[W], other_dw[W];
        scale = rstd[n];
        dot = 0;
        if (first < C) accumulate(x + n * C + first, dout + n * C + first, y, d, first_w, first_dw);
        ROLLED for (int i = first + step; i < C; i += step) {
            UNROLL for (int j = 0; j < W; j++) other_dw[j] = 0;
            if (n > begin) load(other_dw, dw + i);
            load(other_w, w + i);
            accumulate(x + n * C + i, dout + n * C + i, other_y, other_d, other_w, other_dw);
            store(dw + i, other_dw);
        }
        mean = -__fdividef(block_sum(dot, sums + n % 2 * WARP), (float)C);
        if (first < C) finish(dx + n * C + first, dresidual ? dresidual + n * C + first : NULL, y, d, first_w);
        ROLLED for (int i = first + step; i < C; i += step) {
            load(other_y, x + n * C + i);
            load(other_d, dout + n * C + i);
            load(other_w, w + i);
            for (int j = 0; j < W; j++) other_y[j] *= scale;
            finish(dx + n * C + i, dresidual ? dresidual + n * C + i : NULL, other_y, other_d, other_w);
        }
    }
    if (first < C) store(dw + first, first_dw);
}
static __global__ void __launch_bounds__(WARP *SUM_LANES)
    rmsnorm_dw_kernel(float *dw, const float *partial, int blocks, int C) {
    SHARED(float, sums, SUM_LANES *WARP);
    add_rows<1>(dw, partial, blocks, C, sums);
}
static size_t cuda_rmsnorm_backward_scratch(int N, int C) {
    return (size_t)(blocks_of(N, NORM_ROWS) * C) * sizeof(float);
}
static void cuda_rmsnorm_backward(OpStream *on, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                                  const floatX *x, const float *rstd, const floatX *w, int N, int C, void *workspace) {
    if (!N) return;
    float *partial = (float *)workspace; // (blocks, C)
    int blocks = (int)blocks_of(N, NORM_ROWS);
    int vectors = in_vectors(C, WIDE, dx, dout, dresidual, x, w), width = vectors ? WIDE : 1;
    if (C <= MAX_BLOCK * width)
        KERNEL_BY_WIDTH(on, vectors, WIDE, rmsnorm_backward_kernel, (unsigned)blocks,
                        threads_for(blocks_of(C, W), MAX_BLOCK), 0, dx, partial, dout, dresidual, x, rstd, w, N, C);
    else
        KERNEL_BY_WIDTH(on, vectors, WIDE, rmsnorm_backward_wide_kernel, (unsigned)blocks, MAX_BLOCK, 0, dx, partial,
                        dout, dresidual, x, rstd, w, N, C);
    if (dw)
        KERNEL(on, rmsnorm_dw_kernel, dim3(1, (unsigned)blocks_of(C, WARP)), dim3(WARP, SUM_LANES), 0, dw, partial,
               blocks, C);
}

#endif
