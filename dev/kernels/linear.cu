/* linear.cu: the steps of a matmul on a GPU.
 *
 * As on a CPU, what was loaded from memory must enter many multiplications before it is dropped: first from shared
 * memory, which a block fills and all of its threads read, then from registers. After that the multipliers are the
 * limit: with mma, one instruction on tensor cores multiplies 16 x 16 by 16 x 8 bf16, 16 times the rate of FMAs. C (M,
 * N) = A (M, K) B (K, N) by strides, as in linear.c. Grids are one-dimensional, since there may be more than 65,535
 * tiles.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp linear.cu -o linear -lcublasLt
 * with linear.h page.cuh page.h page_matmul.cuh page_rate.cuh lib/device/kernel.h lib/ops/cuda/matmul.cuh
 * lib/ops/cuda/vectors.cuh lib/ops/ops_common.h */
#include "page_matmul.cuh" // defines: page_matmul_open
#include "linear.h"

/* C[i][j] = or += sum. */
static __device__ __forceinline__ void put_sum(const Matmul &p, void *c, int64_t i, int64_t j, float sum) {
    if (i >= p.M || j >= p.N) return;
    int64_t at = i * p.c_row + j;
    if (!p.c_float) ((floatX *)c)[at] = from_float(sum);
    else ((float *)c)[at] = p.accumulate ? ((float *)c)[at] + sum : sum;
}

// Thread (x, y) computes one element of C: it reads a row of A and a column of B.
static __global__ void __launch_bounds__(256) naive_kernel(Matmul p, void *c, const floatX *a, const floatX *b) {
    int64_t across = blocks_of(p.N, 32), i = blockIdx.x / across * 8 + threadIdx.y,
            j = blockIdx.x % across * 32 + threadIdx.x;
    float sum = 0;
    if (i >= p.M || j >= p.N) return;
    for (int64_t k = 0; k < p.K; k++)
        sum += to_float(a[i * p.a_row + k * p.a_col]) * to_float(b[k * p.b_row + j * p.b_col]);
    put_sum(p, c, i, j, sum);
}
static void naive(Case *c) {
    Work w = work_of(c);
    KERNEL(c->on, naive_kernel, (unsigned)(blocks_of(w.p.M, 8) * blocks_of(w.p.N, 32)), dim3(32, 8), 0, w.p, w.c, w.a,
           w.b);
}

/* Loads ROWS rows of A (or columns of B) from r0 on, and DEPTH elements along the sum from k0 on, into tile (DEPTH,
 * ROWS + 1); zeros beyond the edges. Neighbouring threads load neighbouring elements, whichever stride is 1.
 */
template <int DEPTH, int ROWS>
static __device__ __forceinline__ void fetch(float (&tile)[DEPTH][ROWS + 1], const floatX *from, int64_t row,
                                             int64_t col, int64_t r0, int64_t rows, int64_t k0, int64_t depth,
                                             int thread) {
    for (int i = thread; i < DEPTH * ROWS; i += 256) {
        int r = col == 1 ? i / DEPTH : i % ROWS, k = col == 1 ? i % DEPTH : i / ROWS;
        tile[k][r] = r0 + r < rows && k0 + k < depth ? to_float(from[(r0 + r) * row + (k0 + k) * col]) : 0;
    }
}

// A block has 16 x 16 threads; thread (y, x) has EACH x EACH elements of C: (y + 16 r, x + 16 s) of the block's tile.
template <int EACH>
static __global__ void __launch_bounds__(256) tile_kernel(Matmul p, void *c, const floatX *a, const floatX *b) {
    enum { SIDE = 16 * EACH, DEPTH = 16 };
    typedef float Tile[DEPTH][SIDE + 1];
    SHARED(Tile, tiles, 2);
    int64_t across = blocks_of(p.N, SIDE), i0 = blockIdx.x / across * SIDE, j0 = blockIdx.x % across * SIDE;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum[EACH][EACH] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += DEPTH) {
        fetch<DEPTH, SIDE>(tiles[0], a, p.a_row, p.a_col, i0, p.M, k0, p.K, threadIdx.x);
        fetch<DEPTH, SIDE>(tiles[1], b, p.b_col, p.b_row, j0, p.N, k0, p.K, threadIdx.x);
        __syncthreads();
        for (int k = 0; k < DEPTH; k++) {
            float left[EACH], right[EACH];
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                left[r] = tiles[0][k][y + 16 * r];
                right[r] = tiles[1][k][x + 16 * r];
            }
#pragma unroll
            for (int r = 0; r < EACH; r++)
#pragma unroll
                for (int s = 0; s < EACH; s++) sum[r][s] += left[r] * right[s];
        }
        __syncthreads();
    }
    for (int r = 0; r < EACH; r++)
        for (int s = 0; s < EACH; s++) put_sum(p, c, i0 + y + 16 * r, j0 + x + 16 * s, sum[r][s]);
}
template <int EACH> static void tiles(Case *c) {
    Work w = work_of(c);
    KERNEL(c->on, tile_kernel<EACH>, (unsigned)(blocks_of(w.p.M, 16 * EACH) * blocks_of(w.p.N, 16 * EACH)), 256, 0, w.p,
           w.c, w.a, w.b);
}

#ifdef PRECISION_BF16
enum {
    SIDE = 128,
    DEPTH = 32,
    STAGES = 3,
    STAGE = 2 * SIDE * DEPTH
}; // a tile of C; its operands' depth a step; steps under way; elements of a step

/* Index in an operand's tile of the 8 elements (16 bytes) from row r (of A, or column r of B) and depth k on. The tile
 * is SIDE rows of DEPTH where memory runs along K, else DEPTH rows of SIDE. Pieces of 16 bytes are permuted within
 * their row so that the eight that ldmatrix reads together, one below the other, are in different banks. */
template <bool ALONG_K> static __device__ __forceinline__ int place(int r, int k) {
    return ALONG_K ? r * DEPTH + (k / 8 ^ r / 2 % 4) * 8 : k * SIDE + (r / 8 ^ k % 8) * 8;
}
template <bool ALONG_K>
static __device__ __forceinline__ void fetch_async(bf16 *tile, const bf16 *from, int64_t stride, int64_t r0,
                                                   int64_t rows, int64_t k0, int64_t depth) {
    for (int i = threadIdx.x; i < SIDE * DEPTH / 8; i += 256) {
        int r = ALONG_K ? i / (DEPTH / 8) : i % (SIDE / 8) * 8, k = ALONG_K ? i % (DEPTH / 8) * 8 : i / (SIDE / 8);
        int64_t at = ALONG_K ? (r0 + r) * stride + k0 + k : (k0 + k) * stride + r0 + r;
        ptx_cp_async(tile + place<ALONG_K>(r, k), from + at, r0 + r < rows && k0 + k < depth);
    }
}
/* Loads the four 8 x 8 matrices of rows r to r + 15 and depth k to k + 15 as mma's operand. ROWS_FIRST: registers go
 * along rows first (A), otherwise along the depth (B). */
template <bool ALONG_K, bool ROWS_FIRST>
static __device__ __forceinline__ void fragment(uint32_t (&out)[4], const bf16 *tile, int r, int k) {
    int lane = threadIdx.x % WARP, matrix = lane / 8, one = matrix % 2 * 8, two = matrix / 2 * 8;
    r += ROWS_FIRST ? one : two;
    k += ROWS_FIRST ? two : one;
    if (ALONG_K) ptx_ldmatrix_x4(out, tile + place<true>(r + lane % 8, k));
    else ptx_ldmatrix_x4_trans(out, tile + place<false>(r, k + lane % 8));
}

// A block of 8 warps computes a tile of 128 x 128; warp (y, x) of 2 x 4 has 64 x 32 of it. While a step is multiplied,
// the next two are loaded.
template <bool A_ALONG_K, bool B_ALONG_K>
static __global__ void __launch_bounds__(256, 2) mma_kernel(Matmul p, void *c, const bf16 *a, const bf16 *b) {
    DYN_SHARED(bf16, stages); // (STAGES, STAGE)
    int across = (int)blocks_of(p.N, SIDE), i0 = blockIdx.x / across * SIDE,
        j0 = blockIdx.x % across * SIDE; // M, N and K pass no int; offsets do
    int steps = (int)blocks_of(p.K, DEPTH), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = warp / 4 * 64,
        col = warp % 4 * 32;
    float sum[4][4][4] = {};
    for (int step = -(STAGES - 1); step < steps; step++) {
        int ahead = step + STAGES - 1;
        bf16 *to = stages + ahead % STAGES * STAGE, *as = stages + (step + STAGES) % STAGES * STAGE,
             *bs = as + SIDE * DEPTH;
        if (step >= 0) {
            ptx_cp_async_wait<STAGES - 2>(); // this thread's part of the step has arrived,
            __syncthreads();                 // everyone's has, and nobody reads the stage that is filled next
        }
        if (ahead < steps) {
            fetch_async<A_ALONG_K>(to, a, A_ALONG_K ? p.a_row : p.a_col, i0, p.M, ahead * DEPTH, p.K);
            fetch_async<B_ALONG_K>(to + SIDE * DEPTH, b, B_ALONG_K ? p.b_col : p.b_row, j0, p.N, ahead * DEPTH, p.K);
        }
        ptx_cp_async_commit(); // also if empty: the wait counts groups
        if (step < 0) continue;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t left[4], right[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) fragment<B_ALONG_K, false>(right[n], bs, col + 16 * n, k);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                fragment<A_ALONG_K, true>(left, as, row + 16 * m, k);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    uint32_t half[2] = {right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]};
                    ptx_mma_bf16(sum[m][n], left, half);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int e = 0; e < 16;
             e++) // element e % 4 of block (m, e / 4): rows lane / 4 and 8 below, columns 2 (lane % 4) and the next
            put_sum(p, c, i0 + row + 16 * m + lane / 4 + e % 4 / 2 * 8, j0 + col + e / 4 * 8 + lane % 4 * 2 + e % 2,
                    sum[m][e / 4][e % 4]);
        __syncwarp(); // what is added to comes for a quarter at a time: there are no registers for all
    }
}
static void tensor_cores(Case *c) {
    Work w = work_of(c);
    int64_t blocks = blocks_of(w.p.M, SIDE) * blocks_of(w.p.N, SIDE), a_stride = w.p.a_col == 1 ? w.p.a_row : w.p.a_col,
            b_stride = w.p.b_row == 1 ? w.p.b_col : w.p.b_row;
    int64_t a_length = w.p.a_col == 1 ? w.p.K : w.p.M, b_length = w.p.b_row == 1 ? w.p.K : w.p.N;
    size_t bytes = STAGES * STAGE * sizeof(bf16);
    if ((a_stride | b_stride | a_length | b_length) % 8) tiles<4>(c); // rows are not aligned to 16 bytes
    else if (w.p.a_col != 1)
        KERNEL(c->on, (mma_kernel<false, false>), (unsigned)blocks, 256, bytes, w.p, w.c, w.a, w.b);
    else if (w.p.b_row != 1) KERNEL(c->on, (mma_kernel<true, false>), (unsigned)blocks, 256, bytes, w.p, w.c, w.a, w.b);
    else KERNEL(c->on, (mma_kernel<true, true>), (unsigned)blocks, 256, bytes, w.p, w.c, w.a, w.b);
}
#define TENSOR_CORES                                                                                                   \
    {"4 tensor cores",                                                                                                 \
     "cp.async copies bf16 to shared memory without registers, two steps ahead; ldmatrix gives each lane the "         \
     "elements that mma expects, for either order of memory (rows not aligned to 16 bytes: as 3).",                    \
     tensor_cores},
#else
#define TENSOR_CORES
#endif

static const Version versions[PAGE_VERSIONS] = {
    {"1 naive", "A thread per element: two loads for each FMA, from the caches at best.", naive},
    {"2 tiles in shared memory",
     "16 x 16 elements a block: each operand is fetched once for sixteen FMAs; but an FMA still takes "
     "two loads from shared memory.",
     tiles<1>},
    {"3 tiles in registers",
     "4 x 4 elements a thread: eight loads for sixteen FMAs, and tiles of 64 x 64, so memory is asked a "
     "quarter as often.",
     tiles<4>},
    TENSOR_CORES{"in use: cuBLASLt",
                 "NVIDIA's library: the kernel is chosen by shape; on Hopper its operands come by TMA and "
                 "are multiplied from shared memory (wgmma).",
                 in_use}};

PAGE_THAT_OPENS(page_matmul_open, {&forward, versions}, {&input, versions}, {&weight, versions})
