/* attention_fragments.cuh: blocks of a matrix in a warp's registers (fragments), as tensor cores leave them: the mask,
 * rounding to bf16, stores, sums over blocks. The attention kernels by mma.sync and those by wgmma share this.
 *
 * Accumulators c[m][n] are 16 x 8 blocks of a matrix: lane l has rows l / 4 and l / 4 + 8, at columns 2 (l % 4) and
 * 2 (l % 4) + 1. Rounded to bf16 they are w[m][n / 2], 16 x 16 blocks in the layout of a matmul's left operand: the
 * result of one matmul enters the next without leaving the registers.
 */
#ifndef CUDA_ATTENTION_FRAGMENTS_CUH
#define CUDA_ATTENTION_FRAGMENTS_CUH
#include "attention_common.cuh" // defines: AttentionCall, round_pair, query_position, first_query

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

// ---------------------------------------------------------------------------
// sums over blocks, in backward: of dq, and of the parts of dk and dv

/* dQ is summed over blocks in fp32 by atomic additions. A tile of these sums is stored as the warps hold it: the four
 * elements of lane after lane of a 16 x 8 block, and block after block. */
DEVICE void dq_add(float *to, const float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    UNROLL for (int e = 0; e < 4; e++) atomicAdd(to + 32 * e + lane, x[e]); // adjacent lanes, adjacent addresses
#endif
}
DEVICE void dq_get(const float *from, float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    load(x, from + 4 * lane);
#else
    UNROLL for (int e = 0; e < 4; e++) x[e] = from[32 * e + lane];
#endif
}
enum { DQ_WARP = 32 * 32, DQ_BLOCK = 16 * 8 }; // a warp's elements of a tile of dQ, as [2][4] blocks of DQ_BLOCK

/* dk or dv of a tile: the sum over the parts, in order, rounded. A block has as many warps as computed the tile. */
template <int HD, int KEYS>
static __global__ void __launch_bounds__(KEYS) attention_backward_join(const AttentionCall a) {
    SHARED(bf16, tile, KEYS *HD);
    const AttentionShape &s = a.s;
    const int is_dk = (int)blockIdx.x % 2, tiles = (s.Tk + KEYS - 1) / KEYS, slice = (int)threadIdx.x / 32 * 32;
    const int i = (int)blockIdx.x / 2, key = i % tiles * KEYS, kv = i / tiles % s.NKV, b = i / tiles / s.NKV;
    const int64_t part_size = (int64_t)s.B * s.NKV * tiles * 2 * KEYS * HD;
    const float *from = a.part_sums + (int64_t)blockIdx.x * KEYS * HD + slice * HD + (int)threadIdx.x % 32 * 4;
    float sums[2][HD / 8][4], x[4];
    uint32_t packed[2][HD / 16][4];
    fill(sums, 0);
    ROLLED for (int part = 0; part < a.parts; part++, from += part_size)
        UNROLL for (int n = 0; n < HD / 4; n++) {
            load(x, from + n * DQ_BLOCK);
            UNROLL for (int e = 0; e < 4; e++) sums[n / (HD / 8)][n % (HD / 8)][e] += x[e];
        }
    mma_pack(packed, sums, is_dk ? a.scale : 1);
    mma_store<HD>(tile + slice * HD, packed);
    __syncthreads();
    floatX *out = is_dk ? a.dk + ((int64_t)b * s.Tk + key) * s.k_stride : a.dv + ((int64_t)b * s.Tk + key) * s.v_stride;
    tile_store<HD>(out + kv * HD, is_dk ? s.k_stride : s.v_stride, tile, KEYS, s.Tk - key, (int)threadIdx.x, KEYS);
}
#endif

#endif
