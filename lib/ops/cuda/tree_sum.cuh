/* tree_sum.cuh: sums over the pieces of several ranks on NVIDIA GPUs. The contracts are in lib/ops/ops.h.
 *
 * Each element is computed alone, so the result does not depend on the grid or on where a tensor is cut.
 */
#ifndef CUDA_TREE_SUM_CUH
#define CUDA_TREE_SUM_CUH
#include "flat.cuh" // defines: load_some, store_some, KERNEL; includes vectors.cuh

/* A thread sums W elements over all n < 2^LEVELS pieces by a binary tree. level[b] is a finished left half, the sum of
 * 2^b pieces, that waits for its right half. The indices of level[] are constants once the loops are unrolled, so it
 * stays in registers. */
template <int W, int LEVELS, class Out, class T>
DEVICE void tree_sum_of(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float level[LEVELS][W], sum[W] = {};
    if (left <= 0) return;
    for (int k = 0; k < n; k++) {
        int waits = 0;
        load_some<true>(sum, pieces + k * count + i, left);
        UNROLL for (int b = 0; b < LEVELS; b++) {
            if (waits) continue;
            UNROLL for (int j = 0; j < W; j++)
                if (k >> b & 1) sum[j] = level[b][j] + sum[j];
                else level[b][j] = sum[j];
            waits = !(k >> b & 1);
        }
    }
    int some = 0; // what is left are left halves without a right one: they are added from the narrowest on
    UNROLL for (int b = 0; b < LEVELS; b++) {
        if (!(n >> b & 1)) continue;
        UNROLL for (int j = 0; j < W; j++) sum[j] = some ? level[b][j] + sum[j] : level[b][j];
        some = 1;
    }
    if (accumulate) {
        float before[W];
        load_some(before, out + i, left);
        UNROLL for (int j = 0; j < W; j++) sum[j] = before[j] + sum[j];
    }
    store_some(out + i, sum, left);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    tree_sum_of<FLAT, 4>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_many_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) { // also for unaligned pieces
    tree_sum_of<1, 31>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
static void cuda_tree_sum_of(OpStream *on, Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    if (!count) return;
    int vectors = n < 16 && in_vectors(n > 1 ? count : 0, FLAT, out, pieces);
    if (vectors)
        KERNEL(on, (tree_sum_kernel<Out, T>), grid_of(blocks_of(count, BLOCK * FLAT)), BLOCK, 0, out, pieces, n, count,
               accumulate);
    else
        KERNEL(on, (tree_sum_many_kernel<Out, T>), grid_of(blocks_of(count, BLOCK)), BLOCK, 0, out, pieces, n, count,
               accumulate);
}
static void cuda_tree_sum(OpStream *on, float *out, const void *pieces, Dtype dtype, int n, int64_t count,
                          int accumulate) {
    if (dtype == DTYPE_F32) cuda_tree_sum_of(on, out, (const float *)pieces, n, count, accumulate);
    else cuda_tree_sum_of(on, out, (const bf16 *)pieces, n, count, accumulate);
}
static void cuda_sum_pieces(OpStream *on, floatX *out, const floatX *pieces, int n, int64_t count) {
    cuda_tree_sum_of(on, out, pieces, n, count, 0);
}

#endif
