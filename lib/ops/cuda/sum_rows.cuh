/* sum_rows.cuh: the sum over the rows of a matrix, in a fixed order. */
#ifndef CUDA_SUM_ROWS_CUH
#define CUDA_SUM_ROWS_CUH
#include "vectors.cuh" // defines: load, store, WARP

static constexpr int SUM_LANES = 8; // threads that share the rows of a column

/* out (width) += the sum over the n rows of in (n, width). The block has (WARP, SUM_LANES) threads: a thread adds up W
 * columns of every SUM_LANES-th row, and then the SUM_LANES partial sums of a column are added in order. blockIdx.y
 * says which columns. sums (SUM_LANES * WARP * W) is shared memory. */
template <int W>
DEVICE void add_rows(float *out, const float *in, int64_t n, int width, float *sums) {
    int column = ((int)blockIdx.y * WARP + (int)threadIdx.x) * W;
    float sum[W] = {}, v[W];
    if (column < width)
#pragma unroll 16
        for (int64_t k = threadIdx.y; k < n; k += SUM_LANES) {
            load(v, in + k * width + column);
            for (int j = 0; j < W; j++) sum[j] += v[j];
        }
    float *mine = sums + ((int)threadIdx.y * WARP + (int)threadIdx.x) * W;
    if constexpr (W == 1) *mine = sum[0];
    else *(float4 *)mine = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    for (int lane = 1; lane < SUM_LANES; lane++) {
        load(v, sums + (lane * WARP + (int)threadIdx.x) * W);
        for (int j = 0; j < W; j++) sum[j] += v[j];
    }
    load(v, out + column);
    for (int j = 0; j < W; j++) v[j] += sum[j];
    store(out + column, v);
}

#endif
