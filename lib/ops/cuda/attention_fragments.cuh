/* attention_fragments.cuh: blocks of a matrix in a warp's registers (fragments), as tensor cores leave them: the mask,
 * rounding to bf16, stores. The attention kernels by mma.sync and those by wgmma share this.
 *
 * Accumulators c[m][n] are 16 x 8 blocks of a matrix: lane l has rows l / 4 and l / 4 + 8, at columns 2 (l % 4) and
 * 2 (l % 4) + 1. Rounded to bf16 they are w[m][n / 2], 16 x 16 blocks in the layout of a matmul's left operand: the
 * result of one matmul enters the next without leaving the registers.
 */
#ifndef CUDA_ATTENTION_FRAGMENTS_CUH
#define CUDA_ATTENTION_FRAGMENTS_CUH
#include "attention_common.cuh" // defines: AttentionShape, query_position, first_query, round_pair

#ifdef PRECISION_BF16
/* These functions return values that the compiler cannot relate to earlier ones. Otherwise it would compute a loop's
 * addresses before the loop, or keep values through it, and run out of registers; so it recomputes them. */
DEVICE unsigned opaque_thread() {
    unsigned x = threadIdx.x;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}
DEVICE int opaque_lane() { return (int)(opaque_thread() % 32); }
DEVICE int opaque(int x) { return __shfl_sync(~0u, x, 0); } // x is the same on all lanes

template <int M, int N> DEVICE void fill(float (&c)[M][N][4], float x) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 4; e++) c[m][n][e] = x;
}

/* w = c * scale, rounded to bf16. */
template <int M, int N> DEVICE void mma_pack(uint32_t (&w)[M][N / 2][4], const float (&c)[M][N][4], float scale) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int half = 0; half < 2; half++)
                w[m][n / 2][n % 2 * 2 + half] = round_pair(c[m][n][2 * half] * scale, c[m][n][2 * half + 1] * scale);
}

/* Masks scores: -infinity where the query does not see the key. Queries begin with t, keys with j; the rows of c are
 * queries or, with KEYS_ARE_ROWS, keys. */
template <int KEYS_ARE_ROWS, int M, int N>
DEVICE void mma_mask(float (&c)[M][N][4], const AttentionShape &x, int t, int j) {
    int lane = opaque_lane(), left = lane % 4 * 2; // this lane's first column
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            int row = m * 16 + half * 8 + lane / 4;
            int bound = INT32_MAX; // the first column that is a masked key, or the first that is not a masked query
            if (!KEYS_ARE_ROWS) bound = min(x.Tk, query_position(&x, t + row) + 1) - j;
            else if (j + row < x.Tk) bound = first_query(&x, j + row) - t;
            bound -= left;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 0; e < 2; e++)
                    if (KEYS_ARE_ROWS ? n * 8 + e < bound : n * 8 + e >= bound) c[m][n][2 * half + e] = -INFINITY;
            if (!x.q_doc) continue;
            const int32_t *columns = (KEYS_ARE_ROWS ? x.q_doc + t : x.k_doc + j) + left;
            int count = (KEYS_ARE_ROWS ? x.Tq - t : x.Tk - j) - left;
            int doc = KEYS_ARE_ROWS ? x.k_doc[min(j + row, x.Tk - 1)] : x.q_doc[min(t + row, x.Tq - 1)];
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 0; e < 2; e++)
                    if (n * 8 + e < count && columns[n * 8 + e] != doc) c[m][n][2 * half + e] = -INFINITY;
        }
}

// ---------------------------------------------------------------------------
// tiles in shared memory
//
// Rows of W bf16, in pieces of 16 bytes. The pieces of a row are permuted (swizzled): those of eight rows at the same
// column are in different banks, so neither ldmatrix nor stores of words have bank conflicts.

/* The offset of piece `piece` of a row in a tile. */
template <int W> DEVICE int swizzled(int row, int piece) {
    return row * W + (piece ^ (W == 32 ? row / 2 % 4 : row % 8)) * 8;
}

/* Copies `rows` rows of a tile, of which `count` exist, to global memory, where they are `stride` elements apart. */
template <int HD>
DEVICE void tile_store(bf16 *to, int64_t stride, const bf16 *tile, int rows, int count, int thread, int threads) {
    enum { PIECES = HD / 8 };
    int piece = thread % PIECES;
    UNROLL for (int row = thread / PIECES; row < rows; row += threads / PIECES) {
        if (row >= count) continue;
        *(uint4 *)(void *)(to + row * stride + piece * 8) =
            *(const uint4 *)(const void *)(tile + swizzled<HD>(row, piece));
    }
}

/* The address of this lane's word w[m][n / 2][n % 2 * 2 + half] in a tile, with at = mma_lane<W>(). */
template <int W> DEVICE int mma_lane() {
    int lane = opaque_lane();
    return swizzled<W>(lane / 4, 0) + lane % 4 * 2;
}
template <int W> DEVICE uint32_t *mma_word(bf16 *tile, int at, int m, int n, int half) {
    return (uint32_t *)(void *)(tile + (m * 16 + half * 8) * W + (at ^ n * 8));
}

/* Stores w to a tile, beginning with column 8 * column. */
template <int W, int M, int K>
DEVICE void mma_store(bf16 *tile, const uint32_t (&w)[M][K][4], int column = 0) {
    int at = mma_lane<W>() ^ column * 8;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < K * 4; i++) *mma_word<W>(tile, at, m, i / 2, i % 2) = w[m][i / 4][i % 4];
}
#endif

#endif
