/* kernels.cuh: every op of kernels.h on an NVIDIA GPU: functions cuda_<op> that take what cpu_<op> takes.
 *
 * Owns: the kernels, each with a launcher that alone knows its grid, block and shared memory; cuBLASLt's handle, its
 * workspace and its choices by shape (ops_open, ops_close).
 * A caller may rely on: nothing here waits for the GPU; every kernel gives the same bits on each run (attention's dq
 * under dev->deterministic); but for cuBLASLt, which chooses by shape, a row's depend on that row alone; sums over rows
 * are cut at fixed places.
 */
#ifndef KERNELS_CUH
#define KERNELS_CUH
#include <cublasLt.h> // defines: cublasLtMatmul and its descriptors

// elements that a thread loads at once, of floatX and of floats; macros, so that messages name a kernel with its width
#ifdef PRECISION_BF16
#define WIDE 8
#else
#define WIDE 4
#endif
#define FLAT 4
enum { LOGIT_ROWS = 2048, LOGITS = 1 << 28 }; // at a time: at most so many rows, and 1 GiB of them
#ifdef CUDA_ON_CPU
enum { RATE_ROWS = 64, RATE_COLS = 32, RATE_COUNTS = 0 }; // its times tell nothing
#else
enum { RATE_ROWS = 8192, RATE_COLS = 4096, RATE_COUNTS = 1 }; // of the product that measures what this device can do
#endif
enum {
    WARP = 32,
    BLOCK = 256,
    MAX_BLOCK = 1024, // threads
    SUM_LANES = 8,    // threads that share the rows of a sum over rows
    TOKEN_BLOCK = 64,
    TOKENS_AHEAD = 4, // occurrences of tokens in a partial sum of the embedding's gradient; their rows in flight
    SORT_TOKENS = 4,
    SORT_BLOCK = 512, // tokens that a thread, and threads that a block of the sort has
    LOSS_TILE = 4,    // vectors of logits that a thread has in flight
    MATMUL_TILE = 64,
    MATMUL_DEPTH = 16,             // the plain product
    CUDA_WORKSPACE_BYTES = 32 << 20 // what NVIDIA recommends for Hopper
};

// ---------------------------------------------------------------------------
// vectors in registers; sums over warps and blocks

static inline __device__ float widen(float x) { return x; }
static inline __device__ float widen(bf16 x) { return bf16_to_float(x); }
static inline __device__ void narrow(float *p, float x) { *p = x; }
static inline __device__ void narrow(bf16 *p, float x) { *p = float_to_bf16(x); }

static inline __device__ uint32_t round_pair(float low, float high) { // to bf16, in one instruction
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* W elements at p, which is a multiple of their bytes (of 16, if they are more). W = 1: at any place.
 * ONCE: nobody comes back for them soon, so they leave the caches first. */
template <int W, bool ONCE = false> static __device__ __forceinline__ void load(float (&v)[W], const float *p) {
    if constexpr (W == 1) v[0] = *p;
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 x = ONCE ? __ldcs((const float4 *)(p + i)) : *(const float4 *)(p + i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
}
template <int W, bool ONCE = false> static __device__ __forceinline__ void load(float (&v)[W], const bf16 *p) {
    if constexpr (W == 1) v[0] = bf16_to_float(*p);
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) { // 8 at once where there are as many
            uint32_t u[4];
            if (W % 8 == 0 && i % 8) continue;
            if (W % 8 == 0) {
                uint4 x = ONCE ? __ldcs((const uint4 *)(p + i)) : *(const uint4 *)(p + i);
                u[0] = x.x, u[1] = x.y, u[2] = x.z, u[3] = x.w;
            } else {
                uint2 x = ONCE ? __ldcs((const uint2 *)(p + i)) : *(const uint2 *)(p + i);
                u[0] = x.x, u[1] = x.y;
            }
#pragma unroll
            for (int j = 0; j < (W % 8 ? 2 : 4); j++)
                v[i + 2 * j] = __uint_as_float(u[j] << 16), v[i + 2 * j + 1] = __uint_as_float(u[j] & 0xFFFF0000u);
        }
}
#ifdef CUDA_ON_CPU
template <class T> static inline void store_vector(T *p, T x) { __stwb(p, x); }
#else // left to the compiler, a vector may become four stores
static __device__ __forceinline__ void store_vector(uint2 *p, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}
static __device__ __forceinline__ void store_vector(uint4 *p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
static __device__ __forceinline__ void store_vector(float4 *p, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}
#endif
template <int W, bool ONCE = false> static __device__ __forceinline__ void store(float *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = v[0];
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 x = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
            if (ONCE) __stcs((float4 *)(p + i), x);
            else store_vector((float4 *)(p + i), x);
        }
}
template <int W, bool ONCE = false> static __device__ __forceinline__ void store(bf16 *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = float_to_bf16(v[0]);
    else if constexpr (W == 4) {
        uint2 x = make_uint2(round_pair(v[0], v[1]), round_pair(v[2], v[3]));
        if (ONCE) __stcs((uint2 *)p, x);
        else store_vector((uint2 *)p, x);
    } else {
        static_assert(W == 8, "1, 4 or 8 elements");
        uint4 x =
            make_uint4(round_pair(v[0], v[1]), round_pair(v[2], v[3]), round_pair(v[4], v[5]), round_pair(v[6], v[7]));
        if (ONCE) __stcs((uint4 *)p, x);
        else store_vector((uint4 *)p, x);
    }
}
template <int W> static __device__ __forceinline__ void store_shared(float *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = v[0];
    else *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
}
/* The same where only n of the elements may exist; those beyond are 0. */
template <int W, bool ONCE, class T>
static __device__ __forceinline__ void load_some(float (&v)[W], const T *p, int64_t n) {
    if (n >= W) load<W, ONCE>(v, p);
    else
#pragma unroll
        for (int j = 0; j < W; j++) v[j] = j < n ? widen(p[j]) : 0.0f;
}
template <int W, bool ONCE, class T>
static __device__ __forceinline__ void store_some(T *p, const float (&v)[W], int64_t n) {
    if (n >= W) store<W, ONCE>(p, v);
    else
#pragma unroll
        for (int j = 0; j < W; j++)
            if (j < n) narrow(p + j, v[j]);
}

template <class T> static __device__ __forceinline__ T warp_sum(T x) { // on all lanes; the order is that of the halves
#pragma unroll
    for (int h = WARP / 2; h; h /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, h);
    return x;
}
static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int h = WARP / 2; h; h /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, h));
    return x;
}
/* On all threads of a block of whole warps. `sums` (WARP) is shared memory that no thread still reads. */
static __device__ __forceinline__ float block_sum(float x, float *sums) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
}

/* out[column ...] += the sum of n rows of `in`, `width` apart, by a block of (WARP, SUM_LANES) threads: each has W
 * columns and every SUM_LANES-th row; then the lanes are added in their order. `sums` (SUM_LANES * WARP * W) is shared
 * memory. */
template <int W>
static __device__ __forceinline__ void add_rows(float *out, const float *in, int64_t n, int width, float *sums) {
    int column = ((int)blockIdx.y * WARP + (int)threadIdx.x) * W;
    float sum[W] = {}, v[W];
    if (column < width)
#pragma unroll 4
        for (int64_t k = threadIdx.y; k < n; k += SUM_LANES) {
            load(v, in + k * width + column);
            for (int j = 0; j < W; j++) sum[j] += v[j];
        }
    store_shared(sums + ((int)threadIdx.y * WARP + (int)threadIdx.x) * W, sum);
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

/* Do rows of `length` elements that begin at these addresses begin and end with vectors of `width` elements, at most 16
 * bytes? */
static int in_vectors(int64_t length, int width, const void *a, const void *b = NULL, const void *c = NULL,
                      const void *d = NULL, const void *e = NULL) {
    return length % width == 0 && ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e) % 16 == 0;
}
/* Launches kernel<W>, W = `wide` or 1. `grid` and `block` are expressions of W. */
#define KERNEL_BY_WIDTH(dev, vectors, wide, kernel, grid, block, shared_bytes, ...)                                    \
    do {                                                                                                               \
        if (vectors) {                                                                                                 \
            const int W = wide;                                                                                        \
            (void)W;                                                                                                   \
            KERNEL(dev, (kernel<wide>), grid, block, shared_bytes, __VA_ARGS__);                                       \
        } else {                                                                                                       \
            const int W = 1;                                                                                           \
            (void)W;                                                                                                   \
            KERNEL(dev, (kernel<1>), grid, block, shared_bytes, __VA_ARGS__);                                          \
        }                                                                                                              \
    } while (0)
/* Whole warps, at most `most` threads, for `count` things of which each takes one. */
static unsigned threads_for(int64_t count, int64_t most) { return (unsigned)min_i64(most, round_up(count, WARP)); }
static unsigned grid_of(int64_t blocks) {
    if (blocks > INT32_MAX) run_failure("a kernel would need %" PRId64 " blocks: a grid has at most 2^31 - 1", blocks);
    return (unsigned)blocks;
}

// ---------------------------------------------------------------------------
// matrix products: cuBLASLt
//
// Its matrices lie by columns. C (M,N) by rows is its C^T (N,M), so it is asked for C^T = B^T A^T: its first operand is
// our B, its second our A, and nothing is transposed in memory.

typedef struct CudaMatmulEntry {
    Matmul matmul;
    int64_t aligned[3]; // bytes that the addresses of A, B, C are multiples of, up to 256: the choice depends on it
    int found;          // 0: the library has nothing for it
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulAlgo_t algo;
    struct CudaMatmulEntry *next;
} CudaMatmulEntry;

typedef struct CudaMatmulCache {
    int plain, say; // plain: 1 asks the library for nothing; say: this rank tells what was refused, once
    cublasLtHandle_t handle;
    void *workspace; // this rank's own: with it cublasLtMatmul gives the same bits on each run (cuBLAS manual, Results
                     // Reproducibility)
    CudaMatmulEntry *entries; // one a shape, made when it is first met
} CudaMatmulCache;

static void cublas_check(cublasStatus_t status, const char *what) {
    if (status != CUBLAS_STATUS_SUCCESS) run_failure("cuBLASLt: %s failed with status %d", what, (int)status);
}

/* A matrix that B^T or A^T is to be: `rows` along its columns, `apart` between them; or the other way round, to be
 * transposed. */
static cublasLtMatrixLayout_t matmul_operand(CudaMatmulEntry *m, cublasLtMatmulDescAttributes_t which, int64_t rows,
                                             int64_t cols, int64_t row, int64_t col) {
    cublasLtMatrixLayout_t layout;
    cudaDataType_t type = FLOATX == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasOperation_t op = row == 1 && col >= rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublas_check(op == CUBLAS_OP_N ? cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, col)
                                   : cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)cols, (uint64_t)rows, row),
                 "describing a matrix");
    cublas_check(cublasLtMatmulDescSetAttribute(m->how, which, &op, sizeof op), "describing a product");
    return layout;
}

/* Up to `most` algorithms for a product, the likeliest first; returns how many. Sums are kept in fp32 until the end: no
 * split along K whose parts are added in the output's dtype. */
static int matmul_algorithms(CudaMatmulCache *cache, const CudaMatmulEntry *m, cublasLtMatmulHeuristicResult_t *results,
                             int most) {
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t aligned[3] = {(uint32_t)m->aligned[0], (uint32_t)m->aligned[1], (uint32_t)m->aligned[2]};
    const uint64_t bytes = CUDA_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t wanted;
    int found = 0;
    cublas_check(cublasLtMatmulPreferenceCreate(&wanted), "describing a choice");
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        const void *value;
        size_t size;
    } settings[6] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes},
                     {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned[1], 4},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned[0], 4},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned[2], 4},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned[2], 4}};
    for (int i = 0; i < 6; i++)
        cublas_check(
            cublasLtMatmulPreferenceSetAttribute(wanted, settings[i].what, settings[i].value, settings[i].size),
            "describing a choice");
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cache->handle, m->how, m->layout[0], m->layout[1],
                                                           m->layout[2], m->layout[2], wanted, most, results, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) cublas_check(status, "choosing an algorithm");
    cublasLtMatmulPreferenceDestroy(wanted);
    return status == CUBLAS_STATUS_SUCCESS ? found : 0;
}

static void matmul_choose(CudaMatmulCache *cache, CudaMatmulEntry *m) {
    const Matmul *p = &m->matmul;
    cublasLtMatmulHeuristicResult_t result;
    cublas_check(cublasLtMatmulDescCreate(&m->how, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "describing a product"); // fp32 stays fp32: no TF32
    m->layout[0] = matmul_operand(m, CUBLASLT_MATMUL_DESC_TRANSA, p->N, p->K, p->b_col, p->b_row);
    m->layout[1] = matmul_operand(m, CUBLASLT_MATMUL_DESC_TRANSB, p->K, p->M, p->a_col, p->a_row);
    cublas_check(cublasLtMatrixLayoutCreate(&m->layout[2], p->c_float ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)p->N,
                                            (uint64_t)p->M, p->c_row),
                 "describing a matrix");
    m->found = matmul_algorithms(cache, m, &result, 1) == 1 && result.state == CUBLAS_STATUS_SUCCESS;
    if (m->found) m->algo = result.algo;
}

static CudaMatmulEntry *cuda_matmul_find(CudaMatmulCache *cache, const Matmul *p, const void *a, const void *b, const void *c) {
    const uintptr_t at[3] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)c};
    int64_t aligned[3];
    for (int i = 0; i < 3; i++) aligned[i] = (int64_t)((at[i] | 256) & (0 - (at[i] | 256)));
    for (CudaMatmulEntry *m = cache->entries; m; m = m->next)
        if (!memcmp(&m->matmul, p, sizeof *p) && !memcmp(m->aligned, aligned, sizeof aligned)) return m;
    CudaMatmulEntry *m = (CudaMatmulEntry *)checked_malloc(sizeof *m);
    m->matmul = *p;
    memcpy(m->aligned, aligned, sizeof aligned);
    matmul_choose(cache, m);
    m->next = cache->entries;
    return cache->entries = m;
}

/* What the library refuses: a block has MATMUL_TILE x MATMUL_TILE of C, a thread every 16th row and column of it, 4 x
 * 4 in all; sums go over k in order. A tile's edges of A and B are read once a block, widened. */
static __global__ void __launch_bounds__(BLOCK)
    plain_matmul_kernel(void *c, const floatX *a, const floatX *b, Matmul p, int across) {
    SHARED(float, as, MATMUL_DEPTH *(MATMUL_TILE + 1));
    SHARED(float, bs, MATMUL_DEPTH *(MATMUL_TILE + 1));
    int64_t i0 = (int64_t)(blockIdx.x / (unsigned)across) * MATMUL_TILE,
            j0 = (int64_t)(blockIdx.x % (unsigned)across) * MATMUL_TILE;
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += MATMUL_DEPTH) {
        for (int e = (int)threadIdx.x; e < MATMUL_DEPTH * MATMUL_TILE;
             e += BLOCK) { // neighbouring threads read neighbours in memory
            int ak = p.a_col == 1 ? e % MATMUL_DEPTH : e / MATMUL_TILE,
                i = p.a_col == 1 ? e / MATMUL_DEPTH : e % MATMUL_TILE;
            int bk = p.b_col == 1 ? e / MATMUL_TILE : e % MATMUL_DEPTH,
                j = p.b_col == 1 ? e % MATMUL_TILE : e / MATMUL_DEPTH;
            as[ak * (MATMUL_TILE + 1) + i] =
                i0 + i < p.M && k0 + ak < p.K ? to_float(a[(i0 + i) * p.a_row + (k0 + ak) * p.a_col]) : 0.0f;
            bs[bk * (MATMUL_TILE + 1) + j] =
                j0 + j < p.N && k0 + bk < p.K ? to_float(b[(k0 + bk) * p.b_row + (j0 + j) * p.b_col]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < MATMUL_DEPTH; k++)
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++)
                    sum[r][s] = fmaf(as[k * (MATMUL_TILE + 1) + y + 16 * r], bs[k * (MATMUL_TILE + 1) + x + 16 * s],
                                     sum[r][s]);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int64_t i = i0 + y + 16 * r, j = j0 + x + 16 * s, at = i * p.c_row + j;
            if (i >= p.M || j >= p.N) continue;
            if (p.c_float) ((float *)c)[at] = p.accumulate ? ((float *)c)[at] + sum[r][s] : sum[r][s];
            else ((floatX *)c)[at] = from_float(p.accumulate ? to_float(((floatX *)c)[at]) + sum[r][s] : sum[r][s]);
        }
}

static void cuda_matmul(Device *dev, const Matmul *p, void *c, const floatX *a, const floatX *b) {
    CudaMatmulCache *cache = dev->cuda_matmuls;
    if (p->M == 0 || p->N == 0) return;
    CudaMatmulEntry *m = cache->plain ? NULL : cuda_matmul_find(cache, p, a, b, c);
    if (m && m->found) {
        const float one = 1, beta = (float)p->accumulate;
        cublasStatus_t status =
            cublasLtMatmul(cache->handle, m->how, &one, b, m->layout[0], a, m->layout[1], &beta, c, m->layout[2], c,
                           m->layout[2], &m->algo, cache->workspace, CUDA_WORKSPACE_BYTES, dev->stream);
        if (status == CUBLAS_STATUS_SUCCESS) return;
        if (status != CUBLAS_STATUS_NOT_SUPPORTED)
            run_failure("cuBLASLt: a product of (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64
                        ") failed with status %d",
                        p->M, p->K, p->K, p->N, (int)status);
        m->found =
            0; // it was promised, and refused before anything ran: some alignments (PyTorch's pull request 92201)
    }
    if (m && cache->say)
        fprintf(stderr,
                "matrix products: cuBLASLt has none for (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64
                "): such take a plain kernel, many times slower\n",
                p->M, p->K, p->K, p->N);
    if (m) cache->say = 0;
    int across = (int)blocks_of(p->N, MATMUL_TILE);
    KERNEL(dev, plain_matmul_kernel, grid_of(across * blocks_of(p->M, MATMUL_TILE)), BLOCK, 0, c, a, b, *p, across);
}

static void cuda_linear_forward(Device *dev, void *y, int y_float, const floatX *x, const floatX *w, int N, int IC,
                                int OC) {
    Matmul p = {N, OC, IC, IC, 1, 1, IC, OC, y_float, 0};
    cuda_matmul(dev, &p, y, x, w);
}
static void cuda_linear_backward_input(Device *dev, floatX *dx, const floatX *dy, int64_t dy_stride, const floatX *w,
                                       int N, int IC, int OC) {
    Matmul p = {N, IC, OC, dy_stride, 1, IC, 1, IC, FLOATX == DTYPE_F32, 0};
    cuda_matmul(dev, &p, dx, dy, w);
}
static void cuda_linear_forward_add(Device *dev, floatX *y, int64_t y_stride, const floatX *x, const floatX *w, int N,
                                    int IC, int OC) {
    Matmul p = {N, OC, IC, IC, 1, 1, IC, y_stride, FLOATX == DTYPE_F32, 1};
    cuda_matmul(dev, &p, y, x, w);
}
static void cuda_linear_backward_input_add(Device *dev, floatX *dx, const floatX *dy, const floatX *w, int N, int IC,
                                           int OC) {
    Matmul p = {N, IC, OC, OC, 1, IC, 1, IC, FLOATX == DTYPE_F32, 1};
    cuda_matmul(dev, &p, dx, dy, w);
}
static void cuda_linear_backward_weight(Device *dev, float *dw, const floatX *dy, int64_t dy_stride, const floatX *x,
                                        int N, int IC, int OC, int accumulate) {
    Matmul p = {OC, IC, N, 1, dy_stride, IC, 1, IC, 1, accumulate};
    cuda_matmul(dev, &p, dw, dy, x);
}

// ---------------------------------------------------------------------------
// by rows: embedding, RMSNorm, RoPE, SwiGLU, loss

/* A thread copies one T, of floatX or of 16 bytes; a row has `length` of them, in `chunks` blocks. */
template <class T>
__global__ void __launch_bounds__(BLOCK)
    embedding_forward_kernel(T *x, const T *embed, const int32_t *ids, int first, int V, int length, int chunks) {
    int64_t n = blockIdx.x / (unsigned)chunks, i = (int64_t)(blockIdx.x % (unsigned)chunks) * BLOCK + threadIdx.x,
            row = slice_row(ids[n], first, V);
    if (i < length) x[n * length + i] = row < 0 ? T{} : embed[row * length + i];
}
static void cuda_embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int first, int N,
                                   int C, int V) {
    int vectors = in_vectors(C, WIDE, x, embed), length = vectors ? C / WIDE : C,
        chunks = (int)blocks_of(length, BLOCK);
    if (!N) return;
    unsigned grid = grid_of((int64_t)N * chunks), threads = threads_for(length, BLOCK);
    if (vectors)
        KERNEL(dev, (embedding_forward_kernel<uint4>), grid, threads, 0, (uint4 *)x, (const uint4 *)embed, ids, first,
               V, length, chunks);
    else KERNEL(dev, (embedding_forward_kernel<floatX>), grid, threads, 0, x, embed, ids, first, V, length, chunks);
}

/* The embedding's gradient: a token may occur once or be nine tenths of a batch, and its sum must not be one thread's
 * work. Tokens are sorted by id; the sorted list is cut into blocks of TOKEN_BLOCK. A block adds the runs of one id
 * that begin in it to dembed; a run's parts in later blocks go to `partial`, a row a block, and a second kernel adds
 * those in their order.
 *
 * The sort: a token's place is the number of tokens that come before it. A block finds it for WARP * SORT_TOKENS
 * tokens, each warp counting in its share of all: N^2 comparisons of two instructions. At 32,768 tokens that is about
 * the time of the sums, and it takes neither passes nor counters per id. */
static __global__ void __launch_bounds__(SORT_BLOCK) sort_tokens_kernel(int32_t *order, const int32_t *ids, int N) {
    SHARED(int, counts, SORT_BLOCK *SORT_TOKENS);
    const int warps = SORT_BLOCK / WARP, tokens = WARP * SORT_TOKENS;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int64_t n0 = (int64_t)blockIdx.x * tokens, n1 = min_i64(N, n0 + tokens), begin = (int64_t)N * warp / warps,
            end = (int64_t)N * (warp + 1) / warps;
    int32_t mine[SORT_TOKENS], before[SORT_TOKENS] = {};
#pragma unroll
    for (int j = 0; j < SORT_TOKENS; j++) mine[j] = n0 + lane + WARP * j < N ? ids[n0 + lane + WARP * j] : 0;
    for (int64_t m = begin; m < min_i64(end, n0); m++) // of equal ids, those of earlier tokens come before
#pragma unroll
        for (int j = 0; j < SORT_TOKENS; j++) before[j] += ids[m] <= mine[j];
    for (int64_t m = max_i64(begin, n1); m < end; m++)
#pragma unroll
        for (int j = 0; j < SORT_TOKENS; j++) before[j] += ids[m] < mine[j];
    for (int64_t m = n0 + warp; m < n1; m += warps) // among themselves
#pragma unroll
        for (int j = 0; j < SORT_TOKENS; j++)
            before[j] += ids[m] < mine[j] || (ids[m] == mine[j] && m < n0 + lane + WARP * j);
#pragma unroll
    for (int j = 0; j < SORT_TOKENS; j++) counts[warp * tokens + WARP * j + lane] = before[j];
    __syncthreads();
    int place = 0;
    if ((int)threadIdx.x < tokens && n0 + threadIdx.x < n1) {
        for (int w = 0; w < warps; w++) place += counts[w * tokens + (int)threadIdx.x];
        order[place] = (int32_t)(n0 + threadIdx.x);
    }
}

/* A block: TOKEN_BLOCK sorted tokens; a thread W columns of all of them. Reads dx once, and dembed once for each id in
 * it. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    embedding_backward_kernel(float *dembed, float *partial /* (blocks, C) */, const floatX *dx, const int32_t *ids,
                              const int32_t *order, int first, int V, int N, int C) {
    SHARED(int32_t, token, TOKEN_BLOCK);
    SHARED(int32_t, id, TOKEN_BLOCK + TOKENS_AHEAD); // as rows of the table, -1: none
    int64_t begin = (int64_t)blockIdx.x * TOKEN_BLOCK, column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    int count = (int)min_i64(TOKEN_BLOCK, N - begin);
    if ((int)threadIdx.x < count)
        token[threadIdx.x] = order[begin + threadIdx.x],
        id[threadIdx.x] = slice_row(ids[order[begin + threadIdx.x]], first, V);
    else if (threadIdx.x < TOKEN_BLOCK + TOKENS_AHEAD) id[threadIdx.x] = -1;
    int32_t earlier = begin ? slice_row(ids[order[begin - 1]], first, V) : -1; // its run may go on here
    __syncthreads();
    if (column >= C) return;
    float v[TOKENS_AHEAD][W], sum[W] = {};
    for (int k0 = 0; k0 < count; k0 += TOKENS_AHEAD) {
        int any = -1; // of the slice: those of others stand together, and their rows are not read
#pragma unroll
        for (int r = 0; r < TOKENS_AHEAD; r++) any = max(any, id[k0 + r]);
        if (any < 0) continue;
#pragma unroll
        for (int r = 0; r < TOKENS_AHEAD; r++)
            load(v[r], dx + (int64_t)token[k0 + r < count ? k0 + r : k0] * C + column);
#pragma unroll
        for (int r = 0; r < TOKENS_AHEAD; r++) {
            int k = k0 + r;
            if (k >= count || id[k] < 0) continue;
            for (int j = 0; j < W; j++) sum[j] += v[r][j];
            if (id[k + 1] == id[k]) continue; // the run goes on
            if (id[k] == earlier) store(partial + (int64_t)blockIdx.x * C + column, sum);
            else {
                float *out = dembed + (int64_t)id[k] * C + column, old[W];
                load(old, out);
                for (int j = 0; j < W; j++) old[j] += sum[j];
                store(out, old);
            }
            for (int j = 0; j < W; j++) sum[j] = 0;
        }
    }
}

/* A block: the run that goes on into block b of the sorted tokens, and did not already into block b - 1, if there is
 * one. */
template <int W>
__global__ void __launch_bounds__(WARP *SUM_LANES)
    embedding_runs_kernel(float *dembed, const float *partial, const int32_t *ids, const int32_t *order, int first,
                          int V, int N, int C) {
    SHARED(float, sums, SUM_LANES *WARP *W);
    int b = (int)blockIdx.x + 1, last = (int)((N - 1) / TOKEN_BLOCK);
    const int32_t *tokens = order + (int64_t)b * TOKEN_BLOCK; // of block b
    int32_t id = ids[*tokens];
    int64_t row = slice_row(id, first, V);
    if (row < 0 || ids[tokens[-1]] != id || (b > 1 && ids[tokens[-TOKEN_BLOCK - 1]] == id)) return;
    int low = 0, high = last - b; // the run's last block is b + low ... b + high
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (ids[tokens[(int64_t)middle * TOKEN_BLOCK]] == id) low = middle;
        else high = middle - 1;
    }
    add_rows<W>(dembed + row * C, partial + (int64_t)b * C, low + 1, C, sums);
}

static size_t embedding_order_bytes(int N) { return (size_t)round_up((int64_t)N * 4, 256); }
static size_t cuda_embedding_backward_scratch(int N, int C) {
    return embedding_order_bytes(N) + (size_t)(blocks_of(N, TOKEN_BLOCK) * C) * sizeof(float);
}
static void cuda_embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                                    int C, int V, void *scratchpad) {
    int32_t *order = (int32_t *)scratchpad; // (N)
    float *partial = (float *)((char *)scratchpad + embedding_order_bytes(N));
    unsigned blocks = (unsigned)blocks_of(N, TOKEN_BLOCK);
    if (!N) return;
    KERNEL(dev, sort_tokens_kernel, (unsigned)blocks_of(N, WARP * SORT_TOKENS), SORT_BLOCK, 0, order, ids, N);
    KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, dx, dembed), WIDE, embedding_backward_kernel,
                    dim3(blocks, (unsigned)blocks_of(C, BLOCK * W)), BLOCK, 0, dembed, partial, dx, ids, order, first,
                    V, N, C);
    if (blocks > 1)
        KERNEL_BY_WIDTH(dev, in_vectors(C, FLAT, dembed), FLAT, embedding_runs_kernel,
                        dim3(blocks - 1, (unsigned)blocks_of(C, WARP * W)), dim3(WARP, SUM_LANES), 0, dembed, partial,
                        ids, order, first, V, N, C);
}

/* A block a row, a thread a vector of it, or several where the row has more than MAX_BLOCK: all but the first are read
 * twice, the second time from a cache. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rmsnorm_forward_kernel(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w,
                           float eps, int C) {
    SHARED(float, sums, WARP);
    int64_t row = (int64_t)blockIdx.x * C;
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    const floatX *in = delta ? sum : x;
    float kept[W] = {}, squares = 0;
#pragma unroll 1
    for (int i = first; i < C; i += step) {
        float v[W], d[W];
        load(v, x + row + i);
        if (delta) {
            load(d, delta + row + i);
#pragma unroll
            for (int j = 0; j < W; j++)
                v[j] = to_float(from_float(v[j] + d[j])); // the rounded sum: recomputing it elsewhere gives these bits
            store(sum + row + i, v);
        }
#pragma unroll
        for (int j = 0; j < W; j++) squares = fmaf(v[j], v[j], squares), kept[j] = i == first ? v[j] : kept[j];
    }
    float scale = rsqrtf(__fdividef(block_sum(squares, sums), (float)C) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
#pragma unroll 1
    for (int i = first; i < C; i += step) {
        float weight[W];
        if (i != first) load(kept, in + row + i);
        load(weight, w + i);
#pragma unroll
        for (int j = 0; j < W; j++) kept[j] *= scale * weight[j];
        store(out + row + i, kept);
    }
}
static void cuda_rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x,
                                 const floatX *delta, const floatX *w, float eps, int N, int C) {
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, out, sum, x, delta, w), WIDE, rmsnorm_forward_kernel, (unsigned)N,
                        threads_for(blocks_of(C, W), MAX_BLOCK), 0, out, rstd, sum, x, delta, w, eps, C);
}

/* A block NORM_ROWS rows, one after the other; a thread the same columns of each, and so their dw: that of its first
 * vector in registers, that of others (C > MAX_BLOCK * W) in `partial`. Reads x, dout and dresidual and writes dx,
 * once. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rmsnorm_backward_kernel(floatX *dx, float *partial /* (blocks, C) = */, const floatX *dout, const floatX *dresidual,
                            const floatX *x, const float *rstd, const floatX *w, int N, int C) {
    SHARED(float, sums, 2 * WARP); // in turns: a row's are read while the next row's are written
    int64_t begin = (int64_t)blockIdx.x * NORM_ROWS, end = min_i64(N, begin + NORM_ROWS);
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    float *dw = partial + (int64_t)blockIdx.x * C, first_w[W] = {}, first_dw[W] = {}, scale, dot, mean;
    auto gather = [&](const floatX *xi, const floatX *di, float(&y)[W], float(&d)[W], const float(&weight)[W],
                      float(&dw_sum)[W]) {
        load(y, xi);
        load(d, di);
#pragma unroll
        for (int j = 0; j < W; j++)
            y[j] *= scale, dot = fmaf(d[j] * weight[j], y[j], dot), dw_sum[j] = fmaf(d[j], y[j], dw_sum[j]);
    };
    auto spread = [&](floatX *out, const floatX *residual, const float(&y)[W], const float(&d)[W],
                      const float(&weight)[W]) {
        float r[W] = {};
        if (residual) load(r, residual);
#pragma unroll
        for (int j = 0; j < W; j++) r[j] = fmaf(fmaf(y[j], mean, d[j] * weight[j]), scale, r[j]);
        store(out, r);
    };
    if (first < C) load(first_w, w + first);
    for (int64_t n = begin; n < end; n++) {
        float y[W] = {}, d[W] = {}, other_y[W], other_d[W], other_w[W], other_dw[W];
        scale = rstd[n], dot = 0;
        if (first < C) gather(x + n * C + first, dout + n * C + first, y, d, first_w, first_dw);
#pragma unroll 1
        for (int i = first + step; i < C; i += step) {
            load_some<W, false>(other_dw, dw + i, n > begin ? W : 0);
            load(other_w, w + i);
            gather(x + n * C + i, dout + n * C + i, other_y, other_d, other_w, other_dw);
            store(dw + i, other_dw);
        }
        mean = -__fdividef(block_sum(dot, sums + n % 2 * WARP), (float)C);
        if (first < C) spread(dx + n * C + first, dresidual ? dresidual + n * C + first : NULL, y, d, first_w);
#pragma unroll 1
        for (int i = first + step; i < C; i += step) {
            load(other_y, x + n * C + i);
            load(other_d, dout + n * C + i);
            load(other_w, w + i);
            for (int j = 0; j < W; j++) other_y[j] *= scale;
            spread(dx + n * C + i, dresidual ? dresidual + n * C + i : NULL, other_y, other_d, other_w);
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
static void cuda_rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                                  const floatX *x, const float *rstd, const floatX *w, int N, int C, void *scratchpad) {
    float *partial = (float *)scratchpad;
    int blocks = (int)blocks_of(N, NORM_ROWS);
    if (!N) return;
    KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, dx, dout, dresidual, x, w), WIDE, rmsnorm_backward_kernel,
                    (unsigned)blocks, threads_for(blocks_of(C, W), MAX_BLOCK), 0, dx, partial, dout, dresidual, x, rstd,
                    w, N, C);
    if (dw)
        KERNEL(dev, rmsnorm_dw_kernel, dim3(1, (unsigned)blocks_of(C, WARP)), dim3(WARP, SUM_LANES), 0, dw, partial,
               blocks, C);
}

/* A block a token: its angles are read once. A thread turns W pairs of one head, then of another. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    residual_add_kernel(floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float v[W], d[W];
    if (left <= 0) return;
    load_some<W, false>(v, x + i, left);
    load_some<W, false>(d, delta + i, left);
#pragma unroll
    for (int j = 0; j < W; j++) v[j] += d[j];
    store_some<W, false>(out + i, v, left);
}
static void cuda_residual_add(Device *dev, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(dev, in_vectors(0, WIDE, out, x, delta), WIDE, residual_add_kernel,
                        grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, x, delta, count);
}

template <int W>
__global__ void __launch_bounds__(BLOCK)
    rope_kernel(floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int T, int heads, int HD,
                float direction) {
    int half = HD / 2, parts = half / W;
    const float *table = cos_sin + (int64_t)positions[blockIdx.x % (unsigned)T] * HD; // cosines, then sines
    for (int u = (int)threadIdx.x; u < heads * parts; u += (int)blockDim.x) {
        int i = u % parts * W;
        floatX *first = x + (int64_t)blockIdx.x * stride + (int64_t)(u / parts) * HD + i, *second = first + half;
        float c[W], s[W], x0[W], x1[W], y0[W], y1[W];
        load(c, table + i);
        load(s, table + half + i);
        load(x0, first);
        load(x1, second);
#pragma unroll
        for (int j = 0; j < W; j++) {
            s[j] *= direction;
            y0[j] = fmaf(x0[j], c[j], -__fmul_rn(x1[j], s[j]));
            y1[j] = fmaf(x1[j], c[j], __fmul_rn(x0[j], s[j]));
        }
        store(first, y0);
        store(second, y1);
    }
}
static void cuda_rope(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                      int T, int heads, int HD, float direction) {
    int vectors = in_vectors(HD / 2, WIDE, x, cos_sin) && stride % WIDE == 0;
    if (N && heads && HD > 1)
        KERNEL_BY_WIDTH(dev, vectors, WIDE, rope_kernel, (unsigned)N, threads_for((int64_t)heads * (HD / 2) / W, BLOCK),
                        0, x, stride, cos_sin, positions, T, heads, HD, direction);
}

static __device__ __forceinline__ float gpu_sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
} // exp = infinity: 0

/* A thread W elements of gate and up; a row is `chunks` blocks. Forward reads 2 F and writes F of it, backward reads 3
 * F, writes 2 F. */
template <int W>
__global__ void __launch_bounds__(BLOCK) swiglu_forward_kernel(floatX *h, const floatX *gate_up, int F, int chunks) {
    int64_t n = blockIdx.x / (unsigned)chunks, i = ((int64_t)(blockIdx.x % (unsigned)chunks) * BLOCK + threadIdx.x) * W;
    if (i >= F) return;
    float g[W], u[W];
    load(g, gate_up + n * 2 * F + i);
    load(u, gate_up + n * 2 * F + F + i);
#pragma unroll
    for (int j = 0; j < W; j++) g[j] *= gpu_sigmoid(g[j]) * u[j];
    store(h + n * F + i, g);
}
static void cuda_swiglu_forward(Device *dev, floatX *h, const floatX *gate_up, int N, int F) {
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(F, WIDE, h, gate_up), WIDE, swiglu_forward_kernel,
                        grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0, h, gate_up, F, (int)blocks_of(F, BLOCK * W));
}
template <int W>
__global__ void __launch_bounds__(BLOCK)
    swiglu_backward_kernel(floatX *dgate_up, const floatX *dh, const floatX *gate_up, int F, int chunks) {
    int64_t n = blockIdx.x / (unsigned)chunks, i = ((int64_t)(blockIdx.x % (unsigned)chunks) * BLOCK + threadIdx.x) * W;
    if (i >= F) return;
    float g[W], u[W], d[W];
    load(g, gate_up + n * 2 * F + i);
    load(u, gate_up + n * 2 * F + F + i);
    load(d, dh + n * F + i);
#pragma unroll
    for (int j = 0; j < W; j++) {
        float s = gpu_sigmoid(g[j]), silu = __fmul_rn(g[j], s), slope = fmaf(s, 1.0f - silu, silu); // d silu / d gate
        g[j] = d[j] * u[j] * slope, u[j] = d[j] * silu;
    }
    store(dgate_up + n * 2 * F + i, g);
    store(dgate_up + n * 2 * F + F + i, u);
}
static void cuda_swiglu_backward(Device *dev, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(F, WIDE, dgate_up, dh, gate_up), WIDE, swiglu_backward_kernel,
                        grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0, dgate_up, dh, gate_up, F,
                        (int)blocks_of(F, BLOCK * W));
}

/* The largest of a row of logits and the sum of exp(logit - largest), on all threads of a block. The pass goes from the
 * row's end to its beginning, keeps each thread's maximum and sum, and leaves the last `held` logits in shared memory.
 */
template <int W>
static __device__ __forceinline__ void exponentials_sum(const float *row, int V, float *tail, int held,
                                                        float *maxima /* (WARP) */, float *sums /* (WARP) */,
                                                        float *largest_logit, float *total) {
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W, near = V - held;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    float v[LOSS_TILE][W], max = -INFINITY, sum = 0;
    for (int t = (V - 1) / tile * tile; t >= 0; t -= tile) {
        float largest = -INFINITY;
#pragma unroll
        for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
#pragma unroll
            for (int j = 0; j < W; j++) v[u][j] = -INFINITY;
            if (i < V) load(v[u], row + i);
        }
#pragma unroll
        for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i >= near && i < V) store_shared(tail + i - near, v[u]);
#pragma unroll
            for (int j = 0; j < W; j++) largest = fmaxf(largest, v[u][j]);
        }
        if (largest > max) sum *= __expf(max - largest), max = largest;
        float base = max == -INFINITY ? 0.0f : max; // nothing but -infinity: exp(-inf - 0) = 0
#pragma unroll
        for (int u = 0; u < LOSS_TILE; u++)
#pragma unroll
            for (int j = 0; j < W; j++) sum += __expf(v[u][j] - base);
    }
    auto scaled = [](float s, float from, float to) { return from == to ? s : s * __expf(from - to); };
    float of_warp = warp_max(max), sum_of_warp = warp_sum(scaled(sum, max, of_warp));
    if (lane == 0) maxima[warp] = of_warp, sums[warp] = sum_of_warp;
    __syncthreads();
    of_warp = lane < warps ? maxima[lane] : -INFINITY;
    *largest_logit = max = warp_max(of_warp);
    *total = warp_sum(lane < warps ? scaled(sums[lane], of_warp, max) : 0.0f);
}

/* The gradient of a row where its logits are, the last `held` of which lie in shared memory; target: its place in the
 * row, if it is there. Element i of floatX lies over logit i / 2 in bf16. A tile of it is written when all threads have
 * read all logits of that tile and of those before it (the barrier): what it covers ends where its own logits end, and
 * those that are still to be read lie behind. */
template <int W>
static __device__ __forceinline__ void loss_gradient(float *row, int V, int target, float max, float inverse,
                                                     const float *tail, int held) {
    floatX *dlogits = (floatX *)row;
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W, near = V - held;
    float v[LOSS_TILE][W];
    for (int t = 0; t < V; t += tile) {
#pragma unroll
        for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
            if (i < near) load(v[u], row + i);
            else if (i < V) load(v[u], tail + i - near);
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < LOSS_TILE; u++) {
            int i = t + u * step + at;
#pragma unroll
            for (int j = 0; j < W; j++) v[u][j] = __expf(v[u][j] - max) * inverse - (i + j == target ? 1.0f : 0.0f);
            if (i < V) store(dlogits + i, v[u]);
        }
    }
}
template <int W> static __device__ __forceinline__ void no_gradient(float *row, int V) {
    float none[W] = {};
    for (int i = (int)threadIdx.x * W; i < V; i += (int)blockDim.x * W) store((floatX *)row + i, none);
}

/* Loss and gradient of a row, by one block. What the first pass leaves in shared memory is the end of the row; the
 * second, from the beginning on, finds the rest in the L2 cache: 4 V bytes come from memory once and sizeof(floatX) V
 * go back. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_kernel(float *losses, float *logits, const int32_t *targets, int V, int want_grad, int held) {
    DYN_SHARED(float, tail); // (held): logits V - held ... V - 1
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    float *row = logits + (int64_t)blockIdx.x * V, max, sum;
    int target = targets[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (want_grad) no_gradient<W>(row, V);
        return;
    }
    float target_logit = row[target]; // read by all before the first barrier
    exponentials_sum<W>(row, V, tail, held, maxima, sums, &max, &sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (max - target_logit) + logf(sum);
    if (want_grad) loss_gradient<W>(row, V, target, max, 1.0f / sum, tail, held);
}
static size_t cuda_cross_entropy_scratch(const Device *dev, int64_t V) { return (void)dev, (void)V, 0; }
static int loss_shared_bytes(const Device *dev) {
    return dev->shared_limit - 1024;
} // dynamic; the kernel has some of its own
static void cuda_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, int N, int V,
                               int want_grad, void *scratchpad) {
    (void)scratchpad;
    int held = want_grad ? (int)min_i64(V, loss_shared_bytes(dev) / 16 * 4) : 0; // whole vectors
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_kernel, (unsigned)N,
                        threads_for(blocks_of(V, W), MAX_BLOCK), held * sizeof(float), losses, logits, targets, V,
                        want_grad, held);
}

/* A block a row. */
template <int W>
__global__ void __launch_bounds__(MAX_BLOCK)
    cross_entropy_part_kernel(float *parts, const float *logits, const int32_t *targets, int first, int V) {
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    const float *row = logits + (int64_t)blockIdx.x * V;
    float *part = parts + 3 * (int64_t)blockIdx.x, max = -INFINITY, sum = 0;
    int at = slice_row(targets[blockIdx.x], first, V);
    if (targets[blockIdx.x] >= 0) exponentials_sum<W>(row, V, NULL, 0, maxima, sums, &max, &sum);
    if (threadIdx.x == 0) part[0] = max, part[1] = sum, part[2] = at < 0 ? -INFINITY : row[at];
}
static void cuda_cross_entropy_part(Device *dev, float *parts, const float *logits, const int32_t *targets, int first,
                                    int N, int V, void *scratchpad) {
    (void)scratchpad;
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_part_kernel, (unsigned)N,
                        threads_for(blocks_of(V, W), MAX_BLOCK), 0, parts, logits, targets, first, V);
}
template <int W>
__global__ void __launch_bounds__(BLOCK, 6)
    cross_entropy_join_kernel(float *losses, float *logits, const float *parts, const int32_t *targets, int ranks,
                              int first, int V, int want_grad) {
    float *row = logits + (int64_t)blockIdx.x * V;
    if (targets[blockIdx.x] < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (want_grad) no_gradient<W>(row, V);
        return;
    }
    LossPart all = join_parts(parts, ranks, gridDim.x, blockIdx.x);
    if (threadIdx.x == 0) losses[blockIdx.x] = (all.max - all.target) + logf(all.sum);
    if (want_grad) loss_gradient<W>(row, V, slice_row(targets[blockIdx.x], first, V), all.max, 1.0f / all.sum, NULL, 0);
}
static void cuda_cross_entropy_join(Device *dev, float *losses, float *logits, const float *parts,
                                    const int32_t *targets, int ranks, int first, int N, int V, int want_grad) {
    if (N)
        KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_join_kernel, (unsigned)N,
                        threads_for(want_grad ? blocks_of(V, W) : 1, BLOCK), 0, losses, logits, parts, targets, ranks,
                        first, V, want_grad);
}

// ---------------------------------------------------------------------------
// attention
/* After FlashAttention-2 (Dao 2023). In bf16, heads of 64 or 128 elements whose rows lie at multiples of 16 bytes go to
 * tensor cores (*_mma); all else, and fp32, to *_plain: fp32 arithmetic, heads of up to 256 elements; correct, and for
 * bf16 slow. No (T, T) tensor; K and V are read once for the query heads that share them, where caches allow. The same
 * bits on each run, but for dq of tensor cores, whose order of additions is open unless dev->deterministic. */
#define UNROLL _Pragma("unroll") // arrays stand in registers only if each index is known
#define ROLLED _Pragma("unroll 1")
#define DEVICE static __device__ __forceinline__

// ---------------------------------------------------------------------------
// PTX: what C++ has no words for

#ifndef CUDA_ON_CPU // which has these as functions of its own
DEVICE uint32_t ptx_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Blocks of 8 x 8 bf16 from shared memory into the registers of a warp, as mma wants them. Lanes 8 i ... 8 i + 7 give
 * the rows of block i, 16 bytes each; lane l gets elements 2 (l % 4) and the next of row l / 4 of each block, _trans:
 * of the transposed block. */
DEVICE void ptx_ldmatrix_x4(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(shared_row))
                 : "memory");
}
DEVICE void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(shared_row))
                 : "memory");
}
/* d(16,8) += a(16,16) b(16,8). Lane l has d at rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. */
DEVICE void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* 16 bytes, on their way until ptx_cp_async_wait; zeros where they are not valid, and then global is not read. */
DEVICE void ptx_cp_async(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void ptx_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
} // until at most N groups are on their way
DEVICE float ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---------------------------------------------------------------------------
// what all attention kernels share

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f; // exp(x) = exp2(x LOG2_E): the GPU has exp2
enum {
    ATTENTION_PAD = 128,    // queries: rows of the scratch's tensors are multiples of it
    ATTENTION_L2 = 16 << 20 // bytes of K and V that are worked on at a time: they should stay in the L2 cache
};

/* This thread's warp. The compiler should know that all its lanes have the same: what follows from it needs no register
 * a lane. */
DEVICE int warp_of_block() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

typedef struct { // a call, as its kernels get it
    AttentionShape s;
    const floatX *q, *k, *v, *dout, *out_read;
    const float *lse_read;
    floatX *out, *dq, *dk, *dv;
    float *lse;
    float *D,
        *lse2; // (B,NH,padded): rowsum(dout * out); lse LOG2_E, infinity where a row sees nothing or does not exist
    float *dq_sums;      // (B,NH,padded,HD), each tile of queries as the warps hold it (dq_add)
    int padded;          // Tq, up to ATTENTION_PAD
    int section;         // (sequence, kv head) pairs worked on at a time
    float scale, scale2; // 1 / sqrt(HD); the same LOG2_E
} AttentionCall;

/* Blocks start in this order: `section` pairs after each other; within them the tiles with most work first, so that
 * none of these begins last; of one tile all `heads` heads, which share K and V. */
typedef struct {
    int b, kv, h, rank;
} AttentionPlace; // rank: of the tile, 0 has most work
DEVICE AttentionPlace attention_place(const AttentionCall &a, int tiles, int heads) {
    int held = a.section * tiles * heads, i = (int)blockIdx.x % held, first = (int)blockIdx.x / held * a.section;
    int n = min(a.section, a.s.B * a.s.NKV - first), pair = first + i / heads % n;
    AttentionPlace p;
    p.b = pair / a.s.NKV, p.kv = pair % a.s.NKV, p.h = p.kv * (a.s.NH / a.s.NKV) + i % heads, p.rank = i / heads / n;
    return p;
}

/* The shape as sequence b alone has it: its own documents. What its query t sees: keys, by position; and this key? */
DEVICE AttentionShape sequence_of(const AttentionShape &s, int b) {
    AttentionShape x = s;
    x.q_doc = s.q_doc ? s.q_doc + (int64_t)b * s.Tq : NULL, x.k_doc = s.q_doc ? s.k_doc + (int64_t)b * s.Tk : NULL;
    return x;
}
DEVICE int seen_by(const AttentionShape &x, int t) {
    return t < x.Tq ? max(0, min(x.Tk, query_position(&x, t) + 1)) : 0;
}
DEVICE bool sees(const AttentionShape &x, int t, int key) {
    return key < seen_by(x, t) && (!x.q_doc || x.q_doc[t] == x.k_doc[key]);
}

/* Queries or keys `mine` ... mine_end - 1 have some documents. Going through the others' documents from `from` towards
 * `to` (which is not among them), up or down: where may one of these be met first? To within 32; `to`: nowhere. By all
 * lanes of a warp. What is skipped so would all be masked. */
DEVICE int documents_meet(const int32_t *mine_doc, int mine, int mine_end, const int32_t *doc, int from, int to) {
    int lane = (int)(threadIdx.x % 32), low = INT32_MAX, high = INT32_MIN, step = from < to ? 1 : -1;
    if (!mine_doc) return from;
    ROLLED for (int i = mine + lane; i < mine_end; i += 32) low = min(low, mine_doc[i]), high = max(high, mine_doc[i]);
    ROLLED for (int d = 16; d; d /= 2) low = min(low, __shfl_xor_sync(~0u, low, d)),
                                       high = max(high, __shfl_xor_sync(~0u, high, d));
    ROLLED for (int left = (to - from) * step; left > 0;
                left -= 32, from += 32 * step) if (__any_sync(~0u, lane < left && low <= doc[from + lane * step] &&
                                                                       doc[from + lane * step] <= high)) return from;
    return to;
}

#ifdef PRECISION_BF16
// ---------------------------------------------------------------------------
// tiles for tensor cores
//
// A tile is rows of W bf16 in shared memory. Pieces of 16 bytes change places within their row, so that eight rows'
// pieces at one column lie in different banks: no conflicts for ldmatrix, nor for the words that lanes write.
//
// Accumulators c[m][n] are 16 x 8 blocks of a matrix, see ptx_mma_bf16; packed to bf16 they are w[m][n / 2], 16 x 16
// blocks as mma takes its left operand: so what one product gives can enter the next without leaving the registers.

/* The compiler would compute addresses of a loop ahead of it, and keep addresses from before a loop for after it: too
 * many registers. So these give what they say in a way that it cannot see through, and what depends on them is computed
 * anew. */
DEVICE unsigned thread_anew() {
    unsigned x = threadIdx.x;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}
DEVICE int lane_anew() { return (int)(thread_anew() % 32); }
DEVICE int anew(int x) { return __shfl_sync(~0u, x, 0); } // x, which all lanes have
template <int W> DEVICE int swizzled(int row, int piece) {
    return row * W + (piece ^ (W == 32 ? row / 2 % 4 : row % 8)) * 8;
}
DEVICE const uint32_t (&half_of(const uint32_t (&r)[4], int i))[2] { return *(const uint32_t(*)[2])(r + 2 * i); }

/* `rows` rows of HD from global memory, `stride` apart, on their way into a tile; zeros beyond `count` rows. */
template <int HD>
DEVICE void tile_load(bf16 *tile, const bf16 *from, int64_t stride, int rows, int count, int threads) {
    enum { PIECES = HD / 8 };
    unsigned thread = thread_anew();
    int row = (int)(thread / PIECES), piece = (int)(thread % PIECES);
    const bf16 *at = from + row * stride + piece * 8;
    bf16 *to = tile + swizzled<HD>(row, piece); // the swizzle is the same every eighth row
    UNROLL for (int i = 0; i < rows; i += threads / PIECES) ptx_cp_async(to + i * HD, at + i * stride, row + i < count);
}
/* And back: `rows` rows, of which `count` exist, by `threads` threads. */
template <int HD>
DEVICE void tile_store(bf16 *to, int64_t stride, const bf16 *tile, int rows, int count, int thread, int threads) {
    enum { PIECES = HD / 8 };
    int piece = thread % PIECES;
    UNROLL for (int row = thread / PIECES; row < rows; row += threads / PIECES) if (row < count) *
        (uint4 *)(void *)(to + row * stride + piece * 8) =
        *(const uint4 *)(const void *)(tile + swizzled<HD>(row, piece));
}

template <int M, int N> DEVICE void fill(float (&c)[M][N][4], float x) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = 0; e < 4; e++)
        c[m][n][e] = x;
}
/* c(16 M, 8 N) = a(16 M, HD) b(8 N, HD)^T, rows of two tiles */
template <int HD, int M, int N> DEVICE void mma_scores(float (&c)[M][N][4], const bf16 *a, const bf16 *b) {
    int lane = lane_anew(), a_at = swizzled<HD>(lane % 16, lane / 16),
        b_at = swizzled<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    fill(c, 0);
    UNROLL for (int k = 0; k < HD; k += 16) {
        uint32_t x[M][4], y[4];
        UNROLL for (int m = 0; m < M; m++) ptx_ldmatrix_x4(x[m], a + m * 16 * HD + (a_at ^ k));
        UNROLL for (int n = 0; n < N; n += 2) {
            ptx_ldmatrix_x4(y, b + n * 8 * HD + (b_at ^ k));
            UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], x[m], half_of(y, 0)),
                ptx_mma_bf16(c[m][n + 1], x[m], half_of(y, 1));
        }
    }
}
/* c(16 M, HD) += w(16 M, 16 K) b(16 K, HD): rows of a tile, weighted */
template <int HD, int M, int K>
DEVICE void mma_weighted(float (&c)[M][HD / 8][4], const uint32_t (&w)[M][K][4], const bf16 *b) {
    int lane = lane_anew(), at = swizzled<HD>(lane % 16, lane / 16);
    UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < HD / 8; n += 2) {
        uint32_t y[4];
        ptx_ldmatrix_x4_trans(y, b + k * 16 * HD + (at ^ n * 8));
        UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], w[m][k], half_of(y, 0)),
            ptx_mma_bf16(c[m][n + 1], w[m][k], half_of(y, 1));
    }
}
template <int M, int N> DEVICE void mma_pack(uint32_t (&w)[M][N / 2][4], const float (&c)[M][N][4], float scale) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) UNROLL for (int half = 0; half < 2; half++)
        w[m][n / 2][n % 2 * 2 + half] = round_pair(c[m][n][2 * half] * scale, c[m][n][2 * half + 1] * scale);
}
/* Where this lane's word w[m][n / 2][n % 2 * 2 + half] is in a tile's rows from 0 on; at = mma_lane<W>(). */
template <int W> DEVICE int mma_lane() {
    int lane = lane_anew();
    return swizzled<W>(lane / 4, 0) + lane % 4 * 2;
}
template <int W> DEVICE uint32_t *mma_word(bf16 *tile, int at, int m, int n, int half) {
    return (uint32_t *)(void *)(tile + (m * 16 + half * 8) * W + (at ^ n * 8));
}
template <int W, int M, int K>
DEVICE void mma_store(bf16 *tile, const uint32_t (&w)[M][K][4], int column = 0 /* blocks of 8 */) {
    int at = mma_lane<W>() ^ column * 8;
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int i = 0; i < K * 4; i++) * mma_word<W>(tile, at, m, i / 2, i % 2) =
        w[m][i / 4][i % 4];
}
/* Scores of queries from t on (the rows, or the columns) and keys from j on that are not to be seen become -infinity.
 */
template <int KEYS_ARE_ROWS, int M, int N>
DEVICE void mma_mask(float (&c)[M][N][4], const AttentionShape &x, int t, int j) {
    int lane = lane_anew(), left = lane % 4 * 2; // this lane's first column
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int half = 0; half < 2; half++) {
        int row = m * 16 + half * 8 + lane / 4;
        int bound = KEYS_ARE_ROWS ? (j + row < x.Tk ? first_query(&x, j + row) - t : INT32_MAX) - left
                                  : min(x.Tk, query_position(&x, t + row) + 1) - j - left;
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 2; e++) if (KEYS_ARE_ROWS ? n * 8 + e < bound : n * 8 + e >= bound)
                c[m][n][2 * half + e] = -INFINITY;
        if (!x.q_doc) continue;
        const int32_t *columns = (KEYS_ARE_ROWS ? x.q_doc + t : x.k_doc + j) + left;
        int count = (KEYS_ARE_ROWS ? x.Tq - t : x.Tk - j) - left,
            doc = KEYS_ARE_ROWS ? x.k_doc[min(j + row, x.Tk - 1)] : x.q_doc[min(t + row, x.Tq - 1)];
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 2; e++) if (n * 8 + e < count && columns[n * 8 + e] != doc)
                c[m][n][2 * half + e] = -INFINITY;
    }
}

// ---------------------------------------------------------------------------
// forward by tensor cores
//
// A block has 128 queries of one head, each of its four warps 32 of them: Q in shared memory, O in registers. It goes
// over the keys, K and V through one tile each: V comes while Q K^T is computed, the next K during the softmax and P V.
// Each tile of keys is read by all warps: 8 HD FLOPs for each byte that a warp reads of them.

/* A step of the online softmax of 32 rows, in powers of two: c becomes exp2(c scale - base), o and sum follow base.
 * base is a row's largest score when it last moved, which it does only when one is 8 above it: P up to 256 is as exact,
 * and o is rarely multiplied. Sums are of this lane's columns. */
template <int N, int D>
DEVICE void softmax_step(float (&c)[2][N][4], float (&o)[2][D][4], float (&base)[2][2], float (&sum)[2][2],
                         float scale) {
    float rescale[2][2];
    bool any = false;
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
        UNROLL for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(c[m][n][2 * half], c[m][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)); // the four lanes of a row
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
        bool moves = top > base[m][half] + 8;
        rescale[m][half] = moves ? ptx_exp2(base[m][half] - top) : 1.0f; // 0 for the first
        if (moves) base[m][half] = top;
        any |= moves;
        float from = base[m][half] == -INFINITY ? 0.0f : base[m][half]; // nothing seen yet: exp2(-inf - 0) = 0
        float total = 0;
        UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) c[m][n][e] =
            ptx_exp2(fmaf(c[m][n][e], scale, -from)),
                                                                                                total += c[m][n][e];
        sum[m][half] = fmaf(sum[m][half], rescale[m][half], total);
    }
    if (!__any_sync(~0u, any)) return;
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < D; n++) UNROLL for (int e = 0; e < 4; e++)
        o[m][n][e] *= rescale[m][e / 2];
}

template <int HD> static __global__ void __launch_bounds__(128, 2) attention_forward_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 8192 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                               // (QUERIES, HD)
    bf16 *ks = qs + QUERIES * HD, *vs = ks + KEYS * HD; // (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32; // the first query of this block, of this warp
    const int end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1),
              warp_end = tw < s.Tq ? seen_by(x, min(tw + 32, s.Tq) - 1) : 0;
    const bf16 *q = a.q + ((int64_t)p.b * s.Tq + t0) * s.q_stride + p.h * HD;
    const bf16 *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * HD,
               *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * HD;
    int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS;

    float o[2][HD / 8][4], base[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, sum[2][2] = {{0, 0}, {0, 0}};
    fill(o, 0);
    if (j < end) {
        tile_load<HD>(qs, q, s.q_stride, QUERIES, s.Tq - t0, THREADS);
        tile_load<HD>(ks, k + j * s.k_stride, s.k_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
    }
    for (; j < end; j += KEYS) {
        const bool works = j < warp_end, masked = s.q_doc || j + KEYS > seen_by(x, tw);
        float c[2][N][4];
        ptx_cp_async_wait<0>();
        __syncthreads(); // K is there, and V no longer read
        tile_load<HD>(vs, v + j * s.v_stride, s.v_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
        if (works) mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        ptx_cp_async_wait<0>();
        __syncthreads(); // V is there, and K no longer read
        if (j + KEYS < end) {
            tile_load<HD>(ks, k + (j + KEYS) * s.k_stride, s.k_stride, KEYS, s.Tk - j - KEYS, THREADS);
            ptx_cp_async_commit();
        }
        if (works) {
            uint32_t w[2][N / 2][4];
            if (masked) mma_mask<0>(c, sequence_of(s, anew(p.b)), tw, j);
            softmax_step(c, o, base, sum, a.scale2);
            mma_pack(w, c, 1);
            mma_weighted<HD>(o, w, vs);
        }
    }
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int half = 0; half < 2; half++) {
        float total = sum[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float inverse = total > 0 ? __fdividef(1.0f, total) : total; // nothing seen: 0; NaN stays NaN
        UNROLL for (int n = 0; n < HD / 8; n++) o[m][n][2 * half] *= inverse, o[m][n][2 * half + 1] *= inverse;
        int t = tw + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && t < s.Tq)
            a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] =
                total == 0 ? -INFINITY : (base[m][half] + __log2f(total)) * LN_2;
    }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows
    mma_pack(w, o, 1);
    __syncwarp();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.out + ((int64_t)anew(p.b) * s.Tq + tw) * s.o_stride + p.h * HD, s.o_stride, mine, 32, s.Tq - tw,
                   lane, 32);
}

// ---------------------------------------------------------------------------
// backward by tensor cores: with P = exp(S - lse) and D = rowsum(dout * out),
//   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD)
//
// A block has KEYS keys of one head and goes over all queries that see them, of all query heads that share them,
// QUERIES at a time. Half of its warps own dV, the other half dK, each 32 keys' rows of it, in registers. The former
// compute S^T = K Q^T and from it P^T, the latter dP^T = V dO^T and dS^T: both have just what enters the product for
// their own sums as its left operand. P passes from the former to the latter in shared memory, where dS takes its place
// for dQ, which all compute, 32 x 32 elements each. Nobody waits for arithmetic alone: the dK of a step is computed at
// the start of the next, while others take exponentials, and dV while they form dS.

/* dQ is summed over blocks in fp32 by atomic additions, for which a tile lies as its warps hold it: x[4] of lane after
 * lane. */
DEVICE void dq_add(float *to /* of this warp's block of 16 x 8 */, const float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    UNROLL for (int e = 0; e < 4; e++) atomicAdd(to + 32 * e + lane, x[e]); // lanes side by side
#endif
}
DEVICE void dq_get(const float *from, float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    float4 y = *(const float4 *)(const void *)(from + 4 * lane);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
#else
    UNROLL for (int e = 0; e < 4; e++) x[e] = from[32 * e + lane];
#endif
}
enum { DQ_WARP = 32 * 32, DQ_BLOCK = 16 * 8 }; // elements of dQ that a warp has of a tile, as [2][4] blocks

template <int HD, int KEYS> struct Backward { // sizes, and where tiles are in a block's shared memory: elements of bf16
    static constexpr int THREADS = 2 * KEYS, QUERIES = 64 * KEYS / HD, TILE = QUERIES * HD, QUERY_WARPS = QUERIES / 32;
    static constexpr int K = 0, V = KEYS * HD;         // (KEYS, HD)
    static constexpr int Q = 2 * V, DO = Q + 2 * TILE; // (2, QUERIES, HD): of a step, and of the one before or after it
    static constexpr int P = DO + 2 * TILE;            // (KEYS, QUERIES): P^T, then dS^T
    static constexpr int LSE = P + KEYS * QUERIES;     // (2, QUERIES) floats, and as many for D
    static constexpr int BYTES = LSE * (int)sizeof(bf16) + 4 * QUERIES * (int)sizeof(float);
};
/* What a block works on. It lies in shared memory: what is needed once a step should not take registers. */
typedef struct {
    int b, kv, key, first, end, last_head;
} BackwardPlace; // first key; queries that may see it; the last query head of kv

/* Of the queries from t on of head h: Q, dO, lse2 and D. */
template <int HD, int KEYS>
DEVICE void backward_load(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int h, int t, int slot) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape &s = a.s;
    const int64_t token = (int64_t)p->b * s.Tq + t, row = ((int64_t)p->b * s.NH + h) * a.padded + t;
    tile_load<HD>(tiles + Z::Q + slot * Z::TILE, a.q + token * s.q_stride + h * HD, s.q_stride, Z::QUERIES, s.Tq - t,
                  Z::THREADS);
    tile_load<HD>(tiles + Z::DO + slot * Z::TILE, a.dout + token * s.o_stride + h * HD, s.o_stride, Z::QUERIES,
                  s.Tq - t, Z::THREADS);
    float *rows = (float *)(void *)(tiles + Z::LSE) + slot * Z::QUERIES;
    int i = (int)thread_anew() * 4;
    if (i < Z::QUERIES) ptx_cp_async(rows + i, a.lse2 + row + i, true);
    else if (i < 2 * Z::QUERIES) ptx_cp_async(rows + Z::QUERIES + i, a.D + row + i - Z::QUERIES, true);
}

/* What the warps of one half do; each half has its own function, so that what the other one keeps takes no registers
 * here. */
template <int HD, int KEYS, int WITH_DQ, int OWNS_DK>
DEVICE void backward_half(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int warp) {
    typedef Backward<HD, KEYS> Z;
    enum { QUERIES = Z::QUERIES, N = QUERIES / 8 };
    const AttentionShape &s = a.s;
    const int slice = warp % (KEYS / 32) * 32; // the first of this warp's keys
    bf16 *mine = tiles + (OWNS_DK ? Z::V : Z::K) + slice * HD, *ps = tiles + Z::P, *my_ps = ps + slice * QUERIES;
    int h = p->first < p->end ? p->last_head - s.NH / s.NKV + 1 : p->last_head + 1,
        t = p->first;         // a step: query head, first query
    float sums[2][HD / 8][4]; // dV or dK of 32 keys
    uint32_t w[2][N / 2][4];  // P^T or dS^T of 32 keys
    fill(sums, 0);
    for (int step = 0;; step++) {
        const int slot = step % 2, row = (p->b * s.NH + h) * a.padded + t;
        const float *rows = (const float *)(const void *)(tiles + Z::LSE) + (OWNS_DK * 2 + slot) * QUERIES; // lse2 or D
        float c[2][N][4];
        ptx_cp_async_wait<0>();
        __syncthreads(); // this step's rows are there, dS of the last is no longer read
        if (OWNS_DK && step) mma_weighted<HD>(sums, w, tiles + Z::Q + (slot ^ 1) * Z::TILE);
        if (h > p->last_head) break;
        mma_scores<HD>(c, mine, tiles + (OWNS_DK ? Z::DO : Z::Q) + slot * Z::TILE);
        if (!OWNS_DK) {
            if (s.q_doc || p->key + slice + 32 > query_position(&s, t) + 1 || p->key + KEYS > s.Tk)
                mma_mask<1>(c, sequence_of(s, p->b), t, p->key + slice);
            const int at = mma_lane<QUERIES>(), left = lane_anew() % 4 * 2;
            UNROLL for (int n = 0; n < N; n++) {
                float2 lse = *(const float2 *)(const void *)(rows + n * 8 + left);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float *score = &c[i / 2][n][i % 2 * 2];
                    uint32_t two = round_pair(ptx_exp2(fmaf(score[0], a.scale2, -lse.x)),
                                              ptx_exp2(fmaf(score[1], a.scale2, -lse.y)));
                    *mma_word<QUERIES>(my_ps, at, i / 2, n, i % 2) = w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
                }
            }
        }
        __syncthreads(); // P is there, rows of the last step are no longer read
        t += QUERIES;
        if (t >= p->end) h++, t = p->first;
        if (h <= p->last_head) backward_load<HD, KEYS>(a, tiles, p, h, t, slot ^ 1);
        ptx_cp_async_commit();
        if (!OWNS_DK) mma_weighted<HD>(sums, w, tiles + Z::DO + slot * Z::TILE);
        else {
            const int at = mma_lane<QUERIES>(), left = lane_anew() % 4 * 2;
            UNROLL for (int n = 0; n < N; n++) {
                float2 D = *(const float2 *)(const void *)(rows + n * 8 + left);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float *dp = &c[i / 2][n][i % 2 * 2];
                    uint32_t *word = mma_word<QUERIES>(my_ps, at, i / 2, n, i % 2), two = *word;
                    two = round_pair(__uint_as_float(two << 16) * (dp[0] - D.x),
                                     __uint_as_float(two & 0xFFFF0000u) * (dp[1] - D.y));
                    w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
                    if (WITH_DQ) *word = two; // dS where this lane has read P
                }
            }
        }
        if (!WITH_DQ) continue;
        __syncthreads();  // dS is there
        float d[2][4][4]; // 32 queries, 32 elements of the head
        const int lane = lane_anew();
        const int p_at = swizzled<QUERIES>(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ warp % Z::QUERY_WARPS * 32;
        const int k_at = swizzled<HD>(lane % 16, lane / 16) ^ warp / Z::QUERY_WARPS * 32;
        fill(d, 0);
        UNROLL for (int k = 0; k < KEYS; k += 16) {
            uint32_t y[2][4], z[4];
            UNROLL for (int m = 0; m < 2; m++) ptx_ldmatrix_x4_trans(y[m], ps + k * QUERIES + (p_at ^ m * 16));
            UNROLL for (int n = 0; n < 4; n += 2) {
                ptx_ldmatrix_x4_trans(z, tiles + Z::K + k * HD + (k_at ^ n * 8));
                UNROLL for (int m = 0; m < 2; m++) ptx_mma_bf16(d[m][n], y[m], half_of(z, 0)),
                    ptx_mma_bf16(d[m][n + 1], y[m], half_of(z, 1));
            }
        }
        float *dq = a.dq_sums + (int64_t)anew(row) * HD + anew(warp) * DQ_WARP;
        UNROLL for (int i = 0; i < 8; i++) dq_add(dq + i * DQ_BLOCK, d[i / 4][i % 4]);
    }
    uint32_t packed[2][HD / 16][4];
    mma_pack(packed, sums, OWNS_DK ? a.scale : 1);
    mma_store<HD>(tiles + (OWNS_DK ? Z::K : Z::V) + slice * HD, packed); // which are no longer read
}

template <int HD, int KEYS, int WITH_DQ>
static __global__ void __launch_bounds__(2 * KEYS, 1) attention_backward_mma(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    DYN_SHARED(bf16, tiles);
    SHARED(BackwardPlace, p, 1);
    const AttentionShape &s = a.s;
    const int warp = warp_of_block();
    {
        const AttentionPlace place = attention_place(a, (s.Tk + KEYS - 1) / KEYS, 1);
        const AttentionShape x = sequence_of(s, place.b);
        const int key = place.rank * KEYS, first = first_query(&s, key) / Z::QUERIES * Z::QUERIES, G = s.NH / s.NKV;
        const int end =
            documents_meet(x.k_doc, key, min(key + KEYS, s.Tk), x.q_doc, s.Tq - 1, min(first, s.Tq) - 1) + 1;
        if (threadIdx.x == 0)
            p->b = place.b, p->kv = place.kv, p->key = key, p->first = first, p->end = end,
            p->last_head = place.kv * G + G - 1;
    }
    __syncthreads();
    const int64_t token = (int64_t)p->b * s.Tk + p->key;
    tile_load<HD>(tiles + Z::K, a.k + token * s.k_stride + p->kv * HD, s.k_stride, KEYS, s.Tk - p->key, Z::THREADS);
    tile_load<HD>(tiles + Z::V, a.v + token * s.v_stride + p->kv * HD, s.v_stride, KEYS, s.Tk - p->key, Z::THREADS);
    if (p->first < p->end) backward_load<HD, KEYS>(a, tiles, p, p->last_head - s.NH / s.NKV + 1, p->first, 0);
    ptx_cp_async_commit();
    if (warp < KEYS / 32) backward_half<HD, KEYS, WITH_DQ, 0>(a, tiles, p, warp);
    else backward_half<HD, KEYS, WITH_DQ, 1>(a, tiles, p, warp);
    __syncthreads();
    const int64_t to = (int64_t)p->b * s.Tk + p->key;
    tile_store<HD>(a.dk + to * s.k_stride + p->kv * HD, s.k_stride, tiles + Z::K, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
    tile_store<HD>(a.dv + to * s.v_stride + p->kv * HD, s.v_stride, tiles + Z::V, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
}

/* dq = its sums, scaled and rounded: a tile a block, by as many warps as made it. */
template <int HD, int KEYS>
static __global__ void __launch_bounds__(2 * KEYS) attention_backward_round_dq(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    SHARED(bf16, tile, Z::TILE);
    const AttentionShape &s = a.s;
    const int warp = (int)threadIdx.x / 32, tiles = (s.Tq + Z::QUERIES - 1) / Z::QUERIES;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * Z::QUERIES,
              b = (int)blockIdx.x / s.NH / tiles;
    const float *sums = a.dq_sums + (((int64_t)b * s.NH + h) * a.padded + t0) * HD + warp * DQ_WARP;
    float d[2][4][4];
    uint32_t w[2][2][4];
    UNROLL for (int i = 0; i < 8; i++) dq_get(sums + i * DQ_BLOCK, d[i / 4][i % 4]);
    mma_pack(w, d, a.scale);
    mma_store<HD>(tile + warp % Z::QUERY_WARPS * 32 * HD, w, warp / Z::QUERY_WARPS * 4);
    __syncthreads();
    tile_store<HD>(a.dq + ((int64_t)b * s.Tq + t0) * s.q_stride + h * HD, s.q_stride, tile, Z::QUERIES, s.Tq - t0,
                   (int)threadIdx.x, Z::THREADS);
}

/* dq in a fixed order: as the forward goes over the keys, with S and dP computed once more. */
template <int HD>
static __global__ void __launch_bounds__(128, 2) attention_backward_queries_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 4096 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                                                          // (QUERIES, HD)
    bf16 *dos = qs + QUERIES * HD, *ks = dos + QUERIES * HD, *vs = ks + KEYS * HD; // (QUERIES, HD); (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32, end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    tile_load<HD>(qs, a.q + token * s.q_stride + p.h * HD, s.q_stride, QUERIES, s.Tq - t0, THREADS);
    tile_load<HD>(dos, a.dout + token * s.o_stride + p.h * HD, s.o_stride, QUERIES, s.Tq - t0, THREADS);
    ptx_cp_async_commit(); // here, since the loop may have no steps: only what is committed is waited for
    float sums[2][HD / 8][4];
    fill(sums, 0);
    for (int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS; j < end;
         j += KEYS) {
        float c[2][N][4], dp[2][N][4];
        uint32_t w[2][N / 2][4];
        __syncthreads(); // the last K and V are no longer read
        tile_load<HD>(ks, a.k + ((int64_t)p.b * s.Tk + j) * s.k_stride + p.kv * HD, s.k_stride, KEYS, s.Tk - j,
                      THREADS);
        tile_load<HD>(vs, a.v + ((int64_t)p.b * s.Tk + j) * s.v_stride + p.kv * HD, s.v_stride, KEYS, s.Tk - j,
                      THREADS);
        ptx_cp_async_commit();
        ptx_cp_async_wait<0>();
        __syncthreads();
        mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        mma_scores<HD>(dp, dos + warp * 32 * HD, vs);
        if (s.q_doc || j + KEYS > seen_by(x, tw)) mma_mask<0>(c, x, tw, j);
        const int row = (anew(p.b) * s.NH + p.h) * a.padded + tw + lane_anew() / 4;
        UNROLL for (int i = 0; i < 4; i++) {
            float lse = a.lse2[row + i * 8], D = a.D[row + i * 8];
            UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) c[i / 2][n][e] =
                ptx_exp2(fmaf(c[i / 2][n][e], a.scale2, -lse)) * (dp[i / 2][n][e] - D);
        }
        mma_pack(w, c, 1);
        mma_weighted<HD>(sums, w, ks);
    }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows
    mma_pack(w, sums, a.scale);
    ptx_cp_async_wait<0>();
    __syncthreads();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.dq + ((int64_t)anew(p.b) * s.Tq + tw) * s.q_stride + anew(p.h) * HD, s.q_stride, mine, 32,
                   s.Tq - tw, lane, 32);
}
#endif

// ---------------------------------------------------------------------------
// any head: fp32 arithmetic, 256 threads
//
// Tiles are TILE rows of DIM floats in shared memory, DIM being HD or the next of 64, 128, 256, zeros between them;
// four floats more a row, so that rows lie in different banks. Thread 16 y + x has rows y + 16 i and columns x + 16 j
// of a matrix of scores, and of a sum of rows the elements 4 x + 64 j and the three behind them.

enum { PLAIN_THREADS = 256 };
template <int DIM> struct PlainSizes { // bytes fit the 99 KB that each GPU has
    static constexpr int LD = DIM + 4, FORWARD = DIM == 256 ? 32 : 64 /* TILE */, BACKWARD = 4096 / DIM;
    static constexpr int FORWARD_BYTES = (2 * FORWARD * LD + FORWARD * (FORWARD + 4)) * 4,
                         BACKWARD_BYTES = (4 * BACKWARD * LD + BACKWARD * (BACKWARD + 4)) * 4;
};

DEVICE float4 plain_get(const floatX *x, int n) { // four elements, of which n are left
    float4 y = {0, 0, 0, 0};
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) return *(const float4 *)(const void *)x;
#endif
    if (n > 0) y.x = to_float(x[0]);
    if (n > 1) y.y = to_float(x[1]);
    if (n > 2) y.z = to_float(x[2]);
    if (n > 3) y.w = to_float(x[3]);
    return y;
}
DEVICE void plain_put(floatX *x, int n, float4 y, float scale) {
    y.x *= scale, y.y *= scale, y.z *= scale, y.w *= scale;
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) {
        *(float4 *)(void *)x = y;
        return;
    }
#endif
    if (n > 0) x[0] = from_float(y.x);
    if (n > 1) x[1] = from_float(y.y);
    if (n > 2) x[2] = from_float(y.z);
    if (n > 3) x[3] = from_float(y.w);
}
template <int DIM, int TILE>
DEVICE void plain_load(float *tile, const floatX *from, int64_t stride, int count, int HD) {
    for (int i = (int)threadIdx.x; i < TILE * DIM / 4; i += PLAIN_THREADS) {
        int row = i / (DIM / 4), d = i % (DIM / 4) * 4;
        *(float4 *)(void *)(tile + row * (DIM + 4) + d) = plain_get(from + row * stride + d, row < count ? HD - d : 0);
    }
}
/* Rows y + 16 i of a sum. */
template <int DIM, int R>
DEVICE void plain_store(floatX *to, int64_t stride, const float4 (&c)[R][DIM / 64], const float (&scale)[R], int count,
                        int HD) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < DIM / 64; j++) if (y + 16 * i < count)
        plain_put(to + (y + 16 * i) * stride + 4 * x + 64 * j, HD - 4 * x - 64 * j, c[i][j], scale[i]);
}
DEVICE float plain_dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
/* c = a b^T, rows of two tiles */
template <int DIM, int R> DEVICE void plain_scores(float (&c)[R][R], const float *a, const float *b) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) c[i][j] = 0;
    for (int d = 0; d < DIM; d += 4) {
        float4 u[R], v[R];
        UNROLL for (int i = 0; i < R; i++) {
            u[i] = *(const float4 *)(const void *)(a + (y + 16 * i) * (DIM + 4) + d);
            v[i] = *(const float4 *)(const void *)(b + (x + 16 * i) * (DIM + 4) + d);
        }
        UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) c[i][j] = plain_dot(u[i], v[j], c[i][j]);
    }
}
/* c += w b: w is in shared memory, for all threads to read; so c becomes w first. */
template <int DIM, int R>
DEVICE void plain_weighted(float4 (&sums)[R][DIM / 64], const float (&c)[R][R], float *w, const float *b) {
    enum { TILE = 16 * R, LD = TILE + 4 };
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) w[(y + 16 * i) * LD + x + 16 * j] = c[i][j];
    __syncthreads();
    for (int k = 0; k < TILE; k += 4) {
        float4 u[R];
        UNROLL for (int i = 0; i < R; i++) u[i] = *(const float4 *)(const void *)(w + (y + 16 * i) * LD + k);
        UNROLL for (int e = 0; e < 4; e++) UNROLL for (int j = 0; j < DIM / 64; j++) {
            float4 v = *(const float4 *)(const void *)(b + (k + e) * (DIM + 4) + 4 * x + 64 * j);
            UNROLL for (int i = 0; i < R; i++) {
                float f = e == 0 ? u[i].x : e == 1 ? u[i].y : e == 2 ? u[i].z : u[i].w;
                sums[i][j].x = fmaf(f, v.x, sums[i][j].x), sums[i][j].y = fmaf(f, v.y, sums[i][j].y);
                sums[i][j].z = fmaf(f, v.z, sums[i][j].z), sums[i][j].w = fmaf(f, v.w, sums[i][j].w);
            }
        }
    }
    __syncthreads(); // w and b may be written again
}
template <int DIM, int R> DEVICE void plain_zero(float4 (&sums)[R][DIM / 64]) {
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < DIM / 64; j++) sums[i][j].x = sums[i][j].y =
        sums[i][j].z = sums[i][j].w = 0;
}

template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_forward_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::FORWARD, R = TILE / 16 };
    DYN_SHARED(float, qs);
    float *kvs = qs + TILE * Z::LD, *ws = kvs + TILE * Z::LD; // K, then V; P
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape sight = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * TILE, end = seen_by(sight, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    const floatX *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * s.HD,
                 *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * s.HD;
    float4 o[R][DIM / 64];
    float base[R], sum[R];
    plain_zero<DIM>(o);
    UNROLL for (int i = 0; i < R; i++) base[i] = -INFINITY, sum[i] = 0;
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        float c[R][R];
        plain_load<DIM, TILE>(kvs, k + j0 * s.k_stride, s.k_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, kvs);
        __syncthreads();
        plain_load<DIM, TILE>(kvs, v + j0 * s.v_stride, s.v_stride, s.Tk - j0, s.HD);
        UNROLL for (int i = 0; i < R; i++) {
            float top = -INFINITY;
            UNROLL for (int j = 0; j < R; j++) {
                c[i][j] = sees(sight, t0 + y + 16 * i, j0 + x + 16 * j) ? c[i][j] * a.scale2 : -INFINITY;
                top = fmaxf(top, c[i][j]);
            }
            for (int d = 8; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); // the 16 threads of a row
            top = fmaxf(top, base[i]);
            float from = top == -INFINITY ? 0.0f : top, rescale = ptx_exp2(base[i] - from),
                  total = 0; // nothing seen yet: exp2(-inf - 0) = 0
            base[i] = top;
            UNROLL for (int j = 0; j < R; j++) c[i][j] = ptx_exp2(c[i][j] - from), total += c[i][j];
            sum[i] = fmaf(sum[i], rescale, total);
            UNROLL for (int j = 0; j < DIM / 64; j++) o[i][j].x *= rescale, o[i][j].y *= rescale, o[i][j].z *= rescale,
                o[i][j].w *= rescale;
        }
        plain_weighted<DIM>(o, c, ws, kvs);
    }
    float inverse[R];
    UNROLL for (int i = 0; i < R; i++) {
        for (int d = 8; d; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
        inverse[i] = sum[i] > 0 ? 1.0f / sum[i] : sum[i]; // nothing seen: 0; NaN stays NaN
        int t = t0 + y + 16 * i;
        if (x == 0 && t < s.Tq)
            a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] = sum[i] == 0 ? -INFINITY : (base[i] + log2f(sum[i])) * LN_2;
    }
    plain_store<DIM>(a.out + token * s.o_stride + p.h * s.HD, s.o_stride, o, inverse, s.Tq - t0, s.HD);
}

/* A block has a tile of keys, and goes over the queries that see them, of all query heads that share them. */
template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_keys_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const AttentionPlace p = attention_place(a, (s.Tk + TILE - 1) / TILE, 1);
    const AttentionShape sight = sequence_of(s, p.b);
    const int j0 = p.rank * TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16, G = s.NH / s.NKV;
    const int64_t key = (int64_t)p.b * s.Tk + j0;
    float4 dk[R][DIM / 64], dv[R][DIM / 64];
    plain_zero<DIM>(dk), plain_zero<DIM>(dv);
    plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
    plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
    for (int g = 0; g < G; g++)
        for (int t0 = first_query(&s, j0) / TILE * TILE; t0 < s.Tq; t0 += TILE) {
            const int h = p.kv * G + g;
            const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + h) * a.padded + t0;
            float c[R][R], dp[R][R]; // keys by queries
            plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + h * s.HD, s.q_stride, s.Tq - t0, s.HD);
            plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + h * s.HD, s.o_stride, s.Tq - t0, s.HD);
            __syncthreads();
            plain_scores<DIM>(c, ks, qs);
            plain_scores<DIM>(dp, vs, dos);
            UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) {
                int t = x + 16 * j;
                c[i][j] =
                    sees(sight, t0 + t, j0 + y + 16 * i) ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) : 0;
                dp[i][j] = c[i][j] * (dp[i][j] - a.D[row + t]);
            }
            plain_weighted<DIM>(dv, c, ws, dos);
            plain_weighted<DIM>(dk, dp, ws, qs);
        }
    float one[R], scale[R];
    UNROLL for (int i = 0; i < R; i++) one[i] = 1, scale[i] = a.scale;
    plain_store<DIM>(a.dk + key * s.k_stride + p.kv * s.HD, s.k_stride, dk, scale, s.Tk - j0, s.HD);
    plain_store<DIM>(a.dv + key * s.v_stride + p.kv * s.HD, s.v_stride, dv, one, s.Tk - j0, s.HD);
}

template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_queries_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape sight = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * TILE, end = seen_by(sight, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + p.h) * a.padded + t0;
    float4 dq[R][DIM / 64];
    plain_zero<DIM>(dq);
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + p.h * s.HD, s.o_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int64_t key = (int64_t)p.b * s.Tk + j0;
        float c[R][R], dp[R][R]; // queries by keys
        plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
        plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, ks);
        plain_scores<DIM>(dp, dos, vs);
        UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < R; j++) {
            int t = y + 16 * i;
            c[i][j] = sees(sight, t0 + t, j0 + x + 16 * j)
                          ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) * (dp[i][j] - a.D[row + t])
                          : 0;
        }
        plain_weighted<DIM>(dq, c, ws, ks);
    }
    float scale[R];
    UNROLL for (int i = 0; i < R; i++) scale[i] = a.scale;
    plain_store<DIM>(a.dq + token * s.q_stride + p.h * s.HD, s.q_stride, dq, scale, s.Tq - t0, s.HD);
}

// ---------------------------------------------------------------------------
// launches

/* D, lse2 and zeros in dq_sums, for ATTENTION_PAD queries of a head a block. LANES threads a row: HD / 8 with 16-byte
 * loads, or a warp. */
template <int LANES> static __global__ void __launch_bounds__(256) attention_backward_prepare(const AttentionCall a) {
    const AttentionShape &s = a.s;
    const int lane = (int)threadIdx.x % LANES, tiles = a.padded / ATTENTION_PAD;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * ATTENTION_PAD,
              b = (int)blockIdx.x / s.NH / tiles;
    const int64_t first = ((int64_t)b * s.NH + h) * a.padded + t0;
    for (int row = (int)threadIdx.x / LANES; row < ATTENTION_PAD; row += 256 / LANES) {
        const int t = t0 + row, exists = t < s.Tq;
        const floatX *x = a.dout + ((int64_t)b * s.Tq + t) * s.o_stride + h * s.HD, *y = a.out_read + (x - a.dout);
        float sum = 0;
        if (exists && LANES < 32) {
            uint4 u = *(const uint4 *)(const void *)(x + lane * 8), v = *(const uint4 *)(const void *)(y + lane * 8);
            const uint32_t us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int i = 0; i < 4; i++) {
                sum = fmaf(__uint_as_float(us[i] << 16), __uint_as_float(vs[i] << 16), sum);
                sum = fmaf(__uint_as_float(us[i] & 0xFFFF0000u), __uint_as_float(vs[i] & 0xFFFF0000u), sum);
            }
        } else if (exists)
            for (int d = lane; d < s.HD; d += LANES) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
        for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane) continue;
        float lse = exists ? a.lse_read[((int64_t)b * s.NH + h) * s.Tq + t] : -INFINITY;
        a.D[first + row] = sum, a.lse2[first + row] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
    }
    const float4 zero = {0, 0, 0, 0};
    for (int i = (int)threadIdx.x; a.dq_sums && i < ATTENTION_PAD * s.HD / 4; i += 256)
        ((float4 *)(void *)(a.dq_sums + first * s.HD))[i] = zero;
}

#define ATTENTION_KERNEL(kernel, blocks, threads, bytes, a)                                                            \
    do {                                                                                                               \
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)),            \
                   "shared memory for " #kernel);                                                                      \
        KERNEL(dev, kernel, (unsigned)(blocks), (unsigned)(threads), (size_t)(bytes), a);                              \
    } while (0)

/* 0: heads of HD elements cannot be had; 1: by plain arithmetic, which in bf16 is slow; 2: by tensor cores. */
static int cuda_attention_has(int HD) {
    return HD < 1 || HD > 256 ? 0 : FLOATX == DTYPE_BF16 && (HD == 64 || HD == 128) ? 2 : 1;
}

static int64_t attention_rows(const AttentionShape *s) {
    return (int64_t)s->B * s->NH * round_up(s->Tq, ATTENTION_PAD);
} // of D, lse2 and dq_sums

static size_t cuda_attention_scratch(const Device *dev, const AttentionShape *s, int backward) {
    int sums = cuda_attention_has(s->HD) == 2 && !dev->deterministic;
    return backward ? (size_t)(attention_rows(s) * (2 + (sums ? s->HD : 0))) * sizeof(float) : 0;
}

static AttentionCall attention_call(const AttentionShape *s, const floatX *q, const floatX *k, const floatX *v,
                                    float *space) {
    AttentionCall a;
    memset(&a, 0, sizeof a);
    a.s = *s, a.q = q, a.k = k, a.v = v, a.D = space, a.lse2 = space + attention_rows(s),
    a.dq_sums = space + 2 * attention_rows(s);
    a.padded = (int)round_up(s->Tq, ATTENTION_PAD), a.scale = 1.0f / sqrtf((float)s->HD), a.scale2 = a.scale * LOG2_E;
    a.section = (int)max_i64(
        1, min_i64((int64_t)s->B * s->NKV, ATTENTION_L2 / ((int64_t)s->Tk * s->HD * 2 * (int64_t)sizeof *k)));
    return a;
}
static int64_t attention_blocks(const AttentionShape *s, int heads, int T, int tile) {
    return (int64_t)s->B * heads * ((T + tile - 1) / tile);
}

#ifdef PRECISION_BF16
/* Do rows, at these pointers and these strides apart, lie as tensor cores take them? */
static int attention_mma(const AttentionShape *s, const void *const *pointers, int count) {
    uintptr_t bits = (uintptr_t)(s->q_stride | s->k_stride | s->v_stride | s->o_stride) * sizeof(bf16);
    for (int i = 0; i < count; i++) bits |= (uintptr_t)pointers[i];
    return cuda_attention_has(s->HD) == 2 && bits % 16 == 0;
}
template <int HD> static void attention_forward_launch(Device *dev, const AttentionCall *a) {
    ATTENTION_KERNEL(attention_forward_mma<HD>, attention_blocks(&a->s, a->s.NH, a->s.Tq, 128), 128,
                     (128 * HD + 2 * 8192) * sizeof(bf16), *a);
}
template <int HD, int KEYS> static void attention_backward_launch(Device *dev, const AttentionCall *a) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape *s = &a->s;
    int64_t blocks = attention_blocks(s, s->NKV, s->Tk, KEYS);
    ATTENTION_KERNEL(attention_backward_prepare<HD / 8>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 1>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL((attention_backward_round_dq<HD, KEYS>), attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                         Z::THREADS, 0, *a);
    } else {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 0>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL(attention_backward_queries_mma<HD>, attention_blocks(s, s->NH, s->Tq, 128), 128,
                         (2 * 128 * HD + 2 * 4096) * sizeof(bf16), *a);
    }
}
/* GPUs with 99 KB of shared memory a block get smaller tiles. */
template <int HD> static void attention_backward_launch(Device *dev, const AttentionCall *a) {
    if (dev->shared_limit >= Backward<HD, 128>::BYTES) attention_backward_launch<HD, 128>(dev, a);
    else attention_backward_launch<HD, 64>(dev, a);
}
#endif
template <int DIM> static void attention_forward_plain_launch(Device *dev, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    ATTENTION_KERNEL(attention_forward_plain<DIM>, attention_blocks(&a->s, a->s.NH, a->s.Tq, Z::FORWARD), PLAIN_THREADS,
                     Z::FORWARD_BYTES, *a);
}
template <int DIM> static void attention_backward_plain_launch(Device *dev, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    const AttentionShape *s = &a->s;
    ATTENTION_KERNEL(attention_backward_prepare<32>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    ATTENTION_KERNEL(attention_backward_keys_plain<DIM>, attention_blocks(s, s->NKV, s->Tk, Z::BACKWARD), PLAIN_THREADS,
                     Z::BACKWARD_BYTES, *a);
    ATTENTION_KERNEL(attention_backward_queries_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::BACKWARD),
                     PLAIN_THREADS, Z::BACKWARD_BYTES, *a);
}

static void attention_refuse(const AttentionShape *s) {
    if (!cuda_attention_has(s->HD))
        run_failure("attention: heads of %d elements reached the GPU, whose kernels take 1 to 256", s->HD);
}

static void cuda_attention_forward(Device *dev, floatX *out, float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *scratchpad) {
    AttentionCall a = attention_call(s, q, k, v, (float *)scratchpad);
    a.out = out, a.lse = lse;
    attention_refuse(s);
    if (!s->B || !s->Tq) return;
#ifdef PRECISION_BF16
    const void *const pointers[] = {out, q, k, v};
    if (attention_mma(s, pointers, 4)) {
        if (s->HD == 64) attention_forward_launch<64>(dev, &a);
        else attention_forward_launch<128>(dev, &a);
        return;
    }
#endif
    if (s->HD <= 64) attention_forward_plain_launch<64>(dev, &a);
    else if (s->HD <= 128) attention_forward_plain_launch<128>(dev, &a);
    else attention_forward_plain_launch<256>(dev, &a);
}

static void cuda_attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                    const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                    const floatX *v, const AttentionShape *s, void *scratchpad) {
    AttentionCall a = attention_call(s, q, k, v, (float *)scratchpad);
    a.dq = dq, a.dk = dk, a.dv = dv, a.dout = dout, a.out_read = out, a.lse_read = lse;
    attention_refuse(s);
    if (!s->B || !s->Tq) return;
#ifdef PRECISION_BF16
    const void *const pointers[] = {dq, dk, dv, dout, out, q, k, v};
    if (attention_mma(s, pointers, 8)) {
        if (dev->deterministic) a.dq_sums = NULL;
        if (s->HD == 64) attention_backward_launch<64>(dev, &a);
        else attention_backward_launch<128>(dev, &a);
        return;
    }
#endif
    a.dq_sums = NULL;
    if (s->HD <= 64) attention_backward_plain_launch<64>(dev, &a);
    else if (s->HD <= 128) attention_backward_plain_launch<128>(dev, &a);
    else attention_backward_plain_launch<256>(dev, &a);
}

// ---------------------------------------------------------------------------
// flat tensors: sums over pieces, norm, AdamW, cast

/* A thread W elements of all n pieces. level[b] waits for its right neighbour: a sum of 2^b pieces; their indices are
 * known when the loops are unrolled, so they stay in registers. n < 2^LEVELS. */
template <int W, int LEVELS, class Out, class T>
static __device__ __forceinline__ void tree_sum_of(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float level[LEVELS][W], sum[W] = {};
    if (left <= 0) return;
    for (int k = 0; k < n; k++) {
        int waits = 0;
        load_some<W, true>(sum, pieces + k * count + i, left);
#pragma unroll
        for (int b = 0; b < LEVELS; b++) {
            if (waits) continue;
#pragma unroll
            for (int j = 0; j < W; j++)
                if (k >> b & 1) sum[j] = level[b][j] + sum[j];
                else level[b][j] = sum[j];
            waits = !(k >> b & 1);
        }
    }
    int some = 0; // sums that had no right neighbour, the narrowest first
#pragma unroll
    for (int b = 0; b < LEVELS; b++) {
        if (!(n >> b & 1)) continue;
#pragma unroll
        for (int j = 0; j < W; j++) sum[j] = some ? level[b][j] + sum[j] : level[b][j];
        some = 1;
    }
    if (accumulate) {
        float before[W];
        load_some<W, false>(before, out + i, left);
#pragma unroll
        for (int j = 0; j < W; j++) sum[j] = before[j] + sum[j];
    }
    store_some<W, false>(out + i, sum, left);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    tree_sum_of<FLAT, 4>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_many_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) { // or at odd places
    tree_sum_of<1, 31>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
static void cuda_tree_sum_of(Device *dev, Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    int vectors = n < 16 && in_vectors(n > 1 ? count : 0, FLAT, out, pieces);
    if (!count) return;
    if (vectors)
        KERNEL(dev, (tree_sum_kernel<Out, T>), grid_of(blocks_of(count, BLOCK * FLAT)), BLOCK, 0, out, pieces, n, count,
               accumulate);
    else
        KERNEL(dev, (tree_sum_many_kernel<Out, T>), grid_of(blocks_of(count, BLOCK)), BLOCK, 0, out, pieces, n, count,
               accumulate);
}
static void cuda_tree_sum(Device *dev, float *out, const void *pieces, Dtype dtype, int n, int64_t count,
                          int accumulate) {
    if (dtype == DTYPE_F32) cuda_tree_sum_of(dev, out, (const float *)pieces, n, count, accumulate);
    else cuda_tree_sum_of(dev, out, (const bf16 *)pieces, n, count, accumulate);
}
static void cuda_sum_pieces(Device *dev, floatX *out, const floatX *pieces, int n, int64_t count) {
    cuda_tree_sum_of(dev, out, pieces, n, count, 0);
}

/* Exact sums: a thread keeps the digits in registers (the loop over them is unrolled), a warp adds its threads' to the
 * total. They are integers: whoever comes first, the sum is the same. The host passes the carries on. */
typedef struct {
    uint64_t digit[EXACT_DIGITS], not_finite;
} ExactPart;
static __device__ __forceinline__ void exact_add_to(ExactPart *s, float x) {
    uint64_t low, high;
    int i = exact_digits(x, &low, &high);
    s->not_finite += i < 0;
#pragma unroll
    for (int d = 0; d < EXACT_DIGITS; d++) s->digit[d] += d == i ? low : d == i + 1 ? high : 0;
}
static __device__ __forceinline__ void exact_add_all(ExactSum *total, ExactPart *s) {
#pragma unroll
    for (int d = 0; d <= EXACT_DIGITS; d++) {
        uint64_t sum = warp_sum(d < EXACT_DIGITS ? s->digit[d] : s->not_finite);
        if (sum && threadIdx.x % WARP == 0)
            atomicAdd((unsigned long long *)(d < EXACT_DIGITS ? &total->digit[d] : &total->not_finite),
                      (unsigned long long)sum);
    }
}

static __global__ void __launch_bounds__(BLOCK) exact_total_kernel(ExactSum *total, const float *x, int64_t count) {
    ExactPart s = {};
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK)
        exact_add_to(&s, x[i]);
    exact_add_all(total, &s);
}
/* So many blocks as fill the GPU, if there is work for them: for kernels whose sums do not depend on it. */
static unsigned filling_grid(const Device *dev, int64_t blocks) {
    return (unsigned)min_i64(blocks, 4 * (int64_t)dev->multiprocessors);
}
static void cuda_exact_total(Device *dev, ExactSum *total, const float *x, int64_t count) {
    if (count) KERNEL(dev, exact_total_kernel, filling_grid(dev, blocks_of(count, BLOCK)), BLOCK, 0, total, x, count);
}

/* A warp takes WARP blocks of NORM_BLOCK elements at a time: a lane 4 elements of each, and then the sum of one. */
template <int W>
__global__ void __launch_bounds__(BLOCK) squared_norm_kernel(ExactSum *total, const float *x, int64_t count) {
    static_assert(NORM_BLOCK == 4 * WARP, "a lane has 4 elements");
    int lane = (int)threadIdx.x % WARP;
    int64_t warp = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / WARP, warps = (int64_t)gridDim.x * BLOCK / WARP;
    ExactPart s = {};
    for (int64_t first = warp * WARP * NORM_BLOCK; first < count; first += warps * WARP * NORM_BLOCK) {
        float mine = 0;
#pragma unroll 8
        for (int k = 0; k < WARP; k++) {
            int64_t i = first + k * NORM_BLOCK + lane * 4;
            float v[4];
            load_some<4, true>(v, x + i, W == 4 || i + 4 > count ? count - i : 0);
            if (W == 1 && i + 4 <= count)
                for (int j = 0; j < 4; j++) v[j] = x[i + j];
            float squares = warp_sum(fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], __fmul_rn(v[0], v[0])))));
            mine = k == lane ? squares : mine;
        }
        exact_add_to(&s, mine);
    }
    exact_add_all(total, &s);
}
static void cuda_squared_norm(Device *dev, ExactSum *total, const float *x, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(dev, in_vectors(0, FLAT, x), FLAT, squared_norm_kernel,
                        filling_grid(dev, blocks_of(count, (int)BLOCK * NORM_BLOCK)), BLOCK, 0, total, x, count);
}

typedef struct {
    float keep, rate, root, new1, new2, beta2, eps, grad_scale;
} AdamScalars;
/* A thread W elements, 28 bytes each and the copy. What is rounded and what is fused is said: so it is the same for
 * every W, and as in C. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    adamw_kernel(float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, AdamScalars a) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float pi[W], mi[W], vi[W], gi[W];
    if (left <= 0) return;
    load_some<W, true>(gi, g + i, left);
    load_some<W, true>(mi, m + i, left);
    load_some<W, true>(vi, v + i, left);
    load_some<W, true>(pi, p + i, left);
#pragma unroll
    for (int j = 0; j < W; j++) {
        float grad = __fmul_rn(gi[j], a.grad_scale);
        mi[j] = fmaf(grad - mi[j], a.new1, mi[j]);
        vi[j] = fmaf(grad * a.new2, grad, __fmul_rn(vi[j], a.beta2));
        pi[j] = fmaf(mi[j] / fmaf(sqrtf(vi[j]), a.root, a.eps), -a.rate, __fmul_rn(pi[j], a.keep));
    }
    store_some<W, true>(m + i, mi, left);
    store_some<W, true>(v + i, vi, left);
    store_some<W, true>(p + i, pi, left);
    if (copy) store_some<W, false>(copy + i, pi, left);
}
static void cuda_adamw(Device *dev, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr,
                       float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    AdamScalars a = {(float)(1.0 - (double)lr * weight_decay),
                     (float)(lr / (1.0 - pow(beta1, step))),
                     (float)(1.0 / sqrt(1.0 - pow(beta2, step))),
                     (float)(1.0 - beta1),
                     (float)(1.0 - beta2),
                     beta2,
                     eps,
                     grad_scale};
    int vectors = in_vectors(0, FLAT, p, m, v, g) && (uintptr_t)copy % (FLAT * sizeof(floatX)) == 0;
    if (count)
        KERNEL_BY_WIDTH(dev, vectors, FLAT, adamw_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, p, m, v, g,
                        copy, count, a);
}

template <int W>
__global__ void __launch_bounds__(BLOCK) cast_to_bf16_kernel(bf16 *out, const float *in, int64_t count) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some<W, true>(v, in + i, left);
    store_some<W, false>(out + i, v, left);
}
static void cuda_cast_to_bf16(Device *dev, bf16 *out, const float *in, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(dev, in_vectors(0, 8, out, in), 8, cast_to_bf16_kernel, grid_of(blocks_of(count, BLOCK * W)),
                        BLOCK, 0, out, in, count);
}

template <int W> __global__ void __launch_bounds__(BLOCK) scale_kernel(floatX *x, float by, int64_t count) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some<W, false>(v, x + i, left);
#pragma unroll
    for (int k = 0; k < W; k++) v[k] *= by;
    store_some<W, false>(x + i, v, left);
}
static void cuda_scale(Device *dev, floatX *x, float by, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(dev, in_vectors(0, WIDE, x), WIDE, scale_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0,
                        x, by, count);
}

/* A thread widens W bytes of a block, which come as words of four. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    dequantize_kernel(floatX *out, const int8_t *in, const float *scales, int64_t count) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    if (left <= 0) return;
    float by = scales[i / INT8_BLOCK], v[W];
#pragma unroll
    for (int k = 0; k < W; k++) {
        if (W % 4 == 0 && left >= W)
            v[k] = (float)(int8_t)(((const uint32_t *)(const void *)(in + i))[k / 4] >> k % 4 * 8) * by;
        else v[k] = k < left ? (float)in[i + k] * by : 0;
    }
    store_some<W, false>(out + i, v, left);
}
static void cuda_dequantize(Device *dev, floatX *out, const int8_t *in, const float *scales, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(dev, in_vectors(0, WIDE, out, in), WIDE, dequantize_kernel,
                        grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, in, scales, count);
}

static __global__ void __launch_bounds__(BLOCK)
    adapter_merge_kernel(float *w, const float *a, const float *b, float by, int R, int64_t IC, int64_t count) {
    int64_t at = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    float sum = 0;
    if (at >= count) return;
    for (int r = 0; r < R; r++) sum = fmaf(a[r * IC + at % IC], b[at / IC * R + r], sum);
    w[at] = fmaf(sum, by, w[at]);
}
static void cuda_adapter_merge(Device *dev, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                               int64_t OC) {
    if (IC > 0 && OC > 0)
        KERNEL(dev, adapter_merge_kernel, grid_of(blocks_of(IC * OC, BLOCK)), BLOCK, 0, w, a, b, by, R, IC, IC * OC);
}

static __global__ void __launch_bounds__(BLOCK)
    fingerprint_kernel(unsigned long long *total, const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK)
        sum += mix64(words[i] + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) atomicAdd(total, (unsigned long long)sum);
}
static void cuda_fingerprint(Device *dev, uint64_t *total, const void *data, int64_t bytes) {
    device_zero(dev, total, sizeof *total);
    if (bytes)
        KERNEL(dev, fingerprint_kernel, filling_grid(dev, blocks_of(bytes / 8, BLOCK)), BLOCK, 0,
               (unsigned long long *)total, (const uint64_t *)data, bytes / 8);
}

// ---------------------------------------------------------------------------
// start and end

/* A GPU, and kernels for heads of HD elements. */
static void cuda_require_head_size(int HD) {
    cuda_require_gpu();
    if (!cuda_attention_has(HD))
        user_error("attention heads of %d elements have no CUDA kernel, 1 to 256 are expected: use ./train_llama3, "
                   "which runs on the processor",
                   HD);
    if (cuda_attention_has(HD) == 1 && FLOATX == DTYPE_BF16)
        fprintf(stderr,
                "attention: tensor cores serve heads of 64 and 128 elements; those of %d go through a plain kernel, "
                "many times slower\n",
                HD);
}

/* Once per rank, on the rank's own thread. `say`: whether this rank tells of what is slower than it should be. */
static void cuda_ops_open(Device *dev, int say) {
    void *workspace = arena_alloc(dev, MEM_WORKSPACE, "cuBLASLt", CUDA_WORKSPACE_BYTES);
    if (dev->dry_run) return;
    CudaMatmulCache *cache = dev->cuda_matmuls = (CudaMatmulCache *)checked_malloc(sizeof *cache);
    cache->say = say;
    cublas_check(cublasLtCreate(&cache->handle), "its start");
    cache->workspace = workspace;
    const void *with_shared[2] = {(const void *)cross_entropy_kernel<FLAT>, (const void *)cross_entropy_kernel<1>};
    for (int i = 0; i < 2; i++)
        cuda_check(
            cudaFuncSetAttribute(with_shared[i], cudaFuncAttributeMaxDynamicSharedMemorySize, loss_shared_bytes(dev)),
            "asking for shared memory");
}
static void cuda_ops_close(Device *dev) {
    CudaMatmulCache *cache = dev->cuda_matmuls;
    if (!cache) return;
    device_wait(dev); // products may still use the workspace
    for (CudaMatmulEntry *m = cache->entries, *next; m; m = next) {
        next = m->next;
        for (int i = 0; i < 3; i++) cublasLtMatrixLayoutDestroy(m->layout[i]);
        cublasLtMatmulDescDestroy(m->how);
        free(m);
    }
    cublasLtDestroy(cache->handle);
    free(cache);
    dev->cuda_matmuls = NULL;
}

#endif
