/* squared_norm.cuh: exact sums and sums of squares on NVIDIA GPUs. The contracts are in lib/ops/ops.h.
 *
 * Exact sums (ExactSum) do not depend on the order of additions, nor do they on the grid. A sum of squares is an exact
 * sum of the rounded sums of blocks of NORM_BLOCK elements, so it is the same for a tensor that is cut between blocks.
 */
#ifndef CUDA_SQUARED_NORM_CUH
#define CUDA_SQUARED_NORM_CUH
#include "../../device/exact_sum.h" // defines: ExactSum, exact_digits, NORM_BLOCK
#include "flat.cuh"                // defines: filling_grid; includes vectors.cuh: load, warp_sum, issue_loads

/* A thread's part of an exact sum. Its digits are in registers, since every loop over them is unrolled. Digits are
 * integers, so warps add theirs to the total with atomics: any order gives the same sum. The host propagates carries
 * when it reads the total. */
typedef struct {
    uint64_t digit[EXACT_DIGITS], not_finite;
} ExactPart;
DEVICE void exact_add_to(ExactPart *s, float x) {
    uint64_t low, high;
    int i = exact_digits(x, &low, &high);
    s->not_finite += i < 0;
    UNROLL for (int d = 0; d < EXACT_DIGITS; d++) {
        uint64_t word = 0;
        if (d == i) word = low;
        else if (d == i + 1) word = high;
        s->digit[d] += word;
    }
}
DEVICE void exact_add_all(ExactSum *total, ExactPart *s) {
    UNROLL for (int d = 0; d <= EXACT_DIGITS; d++) {
        uint64_t sum = warp_sum(d < EXACT_DIGITS ? s->digit[d] : s->not_finite);
        if (sum && threadIdx.x % WARP == 0)
            atomicAdd((unsigned long long *)(d < EXACT_DIGITS ? &total->digit[d] : &total->not_finite),
                      (unsigned long long)sum);
    }
}

static __global__ void __launch_bounds__(BLOCK) exact_total_kernel(ExactSum *total, const float *x, int64_t count) {
    ExactPart s = {};
    for (int64_t i = thread_of_grid(); i < count; i += (int64_t)gridDim.x * BLOCK)
        exact_add_to(&s, x[i]);
    exact_add_all(total, &s);
}
static void cuda_exact_total(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    if (count) KERNEL(on, exact_total_kernel, filling_grid(on, blocks_of(count, BLOCK)), BLOCK, 0, total, x, count);
}

/* A warp takes WARP blocks of NORM_BLOCK elements at a time. Each lane has 4 elements of every block; when a block's
 * sum of squares is complete, lane k keeps the sum of block k and adds it to its exact sum. The loads of NORM_AHEAD
 * blocks are issued before the first of them is summed. */
static constexpr int NORM_AHEAD = 4;
DEVICE float squares_of_block(const float (&v)[4]) {
    return warp_sum(fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], __fmul_rn(v[0], v[0])))));
}
template <int W, class T>
DEVICE void squared_norm_of(ExactSum *total, const T *x, int64_t count) {
    static_assert(NORM_BLOCK == 4 * WARP, "a lane has 4 elements");
    int lane = (int)threadIdx.x % WARP;
    int64_t begin = thread_of_grid() / WARP * WARP * NORM_BLOCK, step = (int64_t)gridDim.x * BLOCK * NORM_BLOCK;
    const T *mine = x + begin + lane * 4;
    ExactPart s = {};
    for (int64_t left = count - begin; left > 0; left -= step, mine += step) {
        int k = 0, whole = W == 4 ? (int)min_i64(WARP, left / NORM_BLOCK) : 0;
        float v[NORM_AHEAD][4], kept = 0;
        ROLLED for (; k + NORM_AHEAD <= whole; k += NORM_AHEAD) {
            const T *from = mine + k * NORM_BLOCK;
            UNROLL for (int i = 0; i < NORM_AHEAD; i++) load<true>(v[i], from + i * NORM_BLOCK);
            issue_loads();
            UNROLL for (int i = 0; i < NORM_AHEAD; i++) {
                float squares = squares_of_block(v[i]);
                kept = k + i == lane ? squares : kept;
            }
        }
        ROLLED for (; k < WARP && k * NORM_BLOCK < left; k++) { // the tensor's end, or unaligned
            int64_t mine_left = left - k * NORM_BLOCK - lane * 4;
            UNROLL for (int j = 0; j < 4; j++) v[0][j] = j < mine_left ? widen(mine[k * NORM_BLOCK + j]) : 0;
            float squares = squares_of_block(v[0]);
            kept = k == lane ? squares : kept;
        }
        exact_add_to(&s, kept);
    }
    exact_add_all(total, &s);
}
template <int W>
__global__ void __launch_bounds__(BLOCK, 4) squared_norm_kernel(ExactSum *total, const float *x, int64_t count) {
    squared_norm_of<W>(total, x, count);
}
static void cuda_squared_norm(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, FLAT, x), FLAT, squared_norm_kernel,
                        filling_grid(on, blocks_of(count, (int)BLOCK * NORM_BLOCK)), BLOCK, 0, total, x, count);
}

#endif
