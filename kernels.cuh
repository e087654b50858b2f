/* kernels.cuh: every op of kernels.h on an NVIDIA GPU: functions cuda_<op> that take what cpu_<op> takes.
 *
 * Owns: the kernels, each with a launcher that alone knows its grid, block and shared memory; cuBLASLt's handle, its
 * workspace and its choices by shape (kernels_open, kernels_close).
 * A caller may rely on: nothing here waits for the GPU; every kernel gives the same bits on each run; a row's depend on that
 * row alone, sums over rows are cut at fixed places, and only integers are added by atomics.
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
enum { RATE_ROWS = 64, RATE_COLS = 64 };
#else
enum { RATE_ROWS = 8192, RATE_COLS = 4096 }; // of the product that measures what this device can do
#endif
enum {
    WARP = 32, BLOCK = 256, MAX_BLOCK = 1024, // threads
    SUM_LANES = 8,                            // threads that share the rows of a sum over rows
    TOKEN_BLOCK = 64,                         // occurrences of tokens in a partial sum of the embedding's gradient
    SORT_TOKENS = 4, SORT_BLOCK = 512,        // tokens that a thread, and threads that a block of the sort has
    LOSS_TILE = 4,                            // vectors of logits that a thread has in flight
    PRODUCT_TILE = 64, PRODUCT_DEPTH = 16,    // the plain product
    CUDA_WORKSPACE_BYTES = 32 << 20           // what NVIDIA recommends for Hopper
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
            for (int j = 0; j < (W % 8 ? 2 : 4); j++) v[i + 2 * j] = __uint_as_float(u[j] << 16), v[i + 2 * j + 1] = __uint_as_float(u[j] & 0xFFFF0000u);
        }
}
#ifdef CUDA_ON_CPU
template <class T> static inline void store_vector(T *p, T x) { __stwb(p, x); }
#else // left to the compiler, a vector may become four stores
static __device__ __forceinline__ void store_vector(uint2 *p, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}
static __device__ __forceinline__ void store_vector(uint4 *p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
static __device__ __forceinline__ void store_vector(float4 *p, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
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
        uint4 x = make_uint4(round_pair(v[0], v[1]), round_pair(v[2], v[3]), round_pair(v[4], v[5]), round_pair(v[6], v[7]));
        if (ONCE) __stcs((uint4 *)p, x);
        else store_vector((uint4 *)p, x);
    }
}
template <int W> static __device__ __forceinline__ void store_shared(float *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = v[0];
    else *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
}
/* The same where only n of the elements may exist; those beyond are 0. */
template <int W, bool ONCE, class T> static __device__ __forceinline__ void load_some(float (&v)[W], const T *p, int64_t n) {
    if (n >= W) load<W, ONCE>(v, p);
    else
#pragma unroll
        for (int j = 0; j < W; j++) v[j] = j < n ? widen(p[j]) : 0.0f;
}
template <int W, bool ONCE, class T> static __device__ __forceinline__ void store_some(T *p, const float (&v)[W], int64_t n) {
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

/* out[column ...] += the sum of n rows of `in`, `width` apart, by a block of (WARP, SUM_LANES) threads: each has W columns and
 * every SUM_LANES-th row; then the lanes are added in their order. `sums` (SUM_LANES * WARP * W) is shared memory. */
template <int W> static __device__ __forceinline__ void add_rows(float *out, const float *in, int64_t n, int width, float *sums) {
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

/* Do rows of `length` elements that begin at these addresses begin and end with vectors of `width` elements, at most 16 bytes? */
static int in_vectors(int64_t length, int width, const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL, const void *e = NULL) {
    return length % width == 0 && ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e) % 16 == 0;
}
/* Launches kernel<W>, W = `wide` or 1. `grid` and `block` are expressions of W. */
#define KERNEL_BY_WIDTH(dev, vectors, wide, kernel, grid, block, shared_bytes, ...) do { \
    if (vectors) { \
        const int W = wide; (void)W; \
        KERNEL(dev, (kernel<wide>), grid, block, shared_bytes, __VA_ARGS__); \
    } else { \
        const int W = 1; (void)W; \
        KERNEL(dev, (kernel<1>), grid, block, shared_bytes, __VA_ARGS__); \
    } \
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
// Its matrices lie by columns. C (M,N) by rows is its C^T (N,M), so it is asked for C^T = B^T A^T: its first operand is our B,
// its second our A, and nothing is transposed in memory.

typedef struct CudaMatmul {
    Product product;
    int64_t aligned[3]; // bytes that the addresses of A, B, C are multiples of, up to 256: the choice depends on it
    int found;          // 0: the library has nothing for it
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulAlgo_t algo;
    struct CudaMatmul *next;
} CudaMatmul;

typedef struct CudaMatmuls {
    int plain, say;      // plain: 1 asks the library for nothing; say: this rank tells what was refused, once
    cublasLtHandle_t handle;
    void *workspace;     // this rank's own: with it cublasLtMatmul gives the same bits on each run (cuBLAS manual, Results Reproducibility)
    CudaMatmul *entries; // one a shape, made when it is first met
} CudaMatmuls;

static void cublas_check(cublasStatus_t status, const char *what) {
    if (status != CUBLAS_STATUS_SUCCESS) run_failure("cuBLASLt: %s failed with status %d", what, (int)status);
}

/* A matrix that B^T or A^T is to be: `rows` along its columns, `apart` between them; or the other way round, to be transposed. */
static cublasLtMatrixLayout_t matmul_operand(CudaMatmul *m, cublasLtMatmulDescAttributes_t which, int64_t rows, int64_t cols, int64_t row, int64_t col) {
    cublasLtMatrixLayout_t layout;
    cudaDataType_t type = FLOATX == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasOperation_t op = row == 1 && col >= rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublas_check(op == CUBLAS_OP_N ? cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, col)
                                   : cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)cols, (uint64_t)rows, row), "describing a matrix");
    cublas_check(cublasLtMatmulDescSetAttribute(m->how, which, &op, sizeof op), "describing a product");
    return layout;
}

/* Sums are kept in fp32 until the end: no split along K whose parts are added in the output's dtype. */
static void matmul_choose(CudaMatmuls *cache, CudaMatmul *m) {
    const Product *p = &m->product;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t aligned[3] = {(uint32_t)m->aligned[0], (uint32_t)m->aligned[1], (uint32_t)m->aligned[2]};
    const uint64_t bytes = CUDA_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t wanted;
    cublasLtMatmulHeuristicResult_t result;
    int results = 0;
    cublas_check(cublasLtMatmulDescCreate(&m->how, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product"); // fp32 stays fp32: no TF32
    m->layout[0] = matmul_operand(m, CUBLASLT_MATMUL_DESC_TRANSA, p->N, p->K, p->b_col, p->b_row);
    m->layout[1] = matmul_operand(m, CUBLASLT_MATMUL_DESC_TRANSB, p->K, p->M, p->a_col, p->a_row);
    cublas_check(cublasLtMatrixLayoutCreate(&m->layout[2], p->c_float ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)p->N, (uint64_t)p->M, p->c_row), "describing a matrix");
    cublas_check(cublasLtMatmulPreferenceCreate(&wanted), "describing a choice");
    const struct { cublasLtMatmulPreferenceAttributes_t what; const void *value; size_t size; } settings[6] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes}, {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned[1], 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned[0], 4},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned[2], 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned[2], 4}};
    for (int i = 0; i < 6; i++) cublas_check(cublasLtMatmulPreferenceSetAttribute(wanted, settings[i].what, settings[i].value, settings[i].size), "describing a choice");
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cache->handle, m->how, m->layout[0], m->layout[1], m->layout[2], m->layout[2], wanted, 1, &result, &results);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) cublas_check(status, "choosing an algorithm");
    m->found = status == CUBLAS_STATUS_SUCCESS && results == 1 && result.state == CUBLAS_STATUS_SUCCESS;
    if (m->found) m->algo = result.algo;
    cublasLtMatmulPreferenceDestroy(wanted);
}

static CudaMatmul *cuda_matmul_find(CudaMatmuls *cache, const Product *p, const void *a, const void *b, const void *c) {
    const uintptr_t at[3] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)c};
    int64_t aligned[3];
    for (int i = 0; i < 3; i++) aligned[i] = (int64_t)((at[i] | 256) & (0 - (at[i] | 256)));
    for (CudaMatmul *m = cache->entries; m; m = m->next)
        if (!memcmp(&m->product, p, sizeof *p) && !memcmp(m->aligned, aligned, sizeof aligned)) return m;
    CudaMatmul *m = (CudaMatmul *)checked_malloc(sizeof *m);
    m->product = *p;
    memcpy(m->aligned, aligned, sizeof aligned);
    matmul_choose(cache, m);
    m->next = cache->entries;
    return cache->entries = m;
}

/* What the library refuses: a block has PRODUCT_TILE x PRODUCT_TILE of C, a thread every 16th row and column of it, 4 x 4 in
 * all; sums go over k in order. A tile's edges of A and B are read once a block, widened. */
static __global__ void __launch_bounds__(BLOCK) plain_product_kernel(void *c, const floatX *a, const floatX *b, Product p, int across) {
    SHARED(float, as, PRODUCT_DEPTH * (PRODUCT_TILE + 1));
    SHARED(float, bs, PRODUCT_DEPTH * (PRODUCT_TILE + 1));
    int64_t i0 = (int64_t)(blockIdx.x / (unsigned)across) * PRODUCT_TILE, j0 = (int64_t)(blockIdx.x % (unsigned)across) * PRODUCT_TILE;
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += PRODUCT_DEPTH) {
        for (int e = (int)threadIdx.x; e < PRODUCT_DEPTH * PRODUCT_TILE; e += BLOCK) { // neighbouring threads read neighbours in memory
            int ak = p.a_col == 1 ? e % PRODUCT_DEPTH : e / PRODUCT_TILE, i = p.a_col == 1 ? e / PRODUCT_DEPTH : e % PRODUCT_TILE;
            int bk = p.b_col == 1 ? e / PRODUCT_TILE : e % PRODUCT_DEPTH, j = p.b_col == 1 ? e % PRODUCT_TILE : e / PRODUCT_DEPTH;
            as[ak * (PRODUCT_TILE + 1) + i] = i0 + i < p.M && k0 + ak < p.K ? to_float(a[(i0 + i) * p.a_row + (k0 + ak) * p.a_col]) : 0.0f;
            bs[bk * (PRODUCT_TILE + 1) + j] = j0 + j < p.N && k0 + bk < p.K ? to_float(b[(k0 + bk) * p.b_row + (j0 + j) * p.b_col]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PRODUCT_DEPTH; k++)
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = fmaf(as[k * (PRODUCT_TILE + 1) + y + 16 * r], bs[k * (PRODUCT_TILE + 1) + x + 16 * s], sum[r][s]);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int64_t i = i0 + y + 16 * r, j = j0 + x + 16 * s, at = i * p.c_row + j;
            if (i >= p.M || j >= p.N) continue;
            if (p.c_float) ((float *)c)[at] = p.accumulate ? ((float *)c)[at] + sum[r][s] : sum[r][s];
            else ((floatX *)c)[at] = from_float(sum[r][s]);
        }
}

static void cuda_product(Device *dev, const Product *p, void *c, const floatX *a, const floatX *b) {
    CudaMatmuls *cache = dev->products;
    if (p->M == 0 || p->N == 0) return;
    CudaMatmul *m = cache->plain ? NULL : cuda_matmul_find(cache, p, a, b, c);
    if (m && m->found) {
        const float one = 1, beta = (float)p->accumulate;
        cublasStatus_t status = cublasLtMatmul(cache->handle, m->how, &one, b, m->layout[0], a, m->layout[1], &beta, c, m->layout[2], c, m->layout[2],
                                               &m->algo, cache->workspace, CUDA_WORKSPACE_BYTES, dev->stream);
        if (status != CUBLAS_STATUS_SUCCESS)
            run_failure("cuBLASLt: a product of (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64 ") failed with status %d", p->M, p->K, p->K, p->N, (int)status);
        return;
    }
    if (m && cache->say)
        fprintf(stderr, "matrix products: cuBLASLt has none for (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64 "): such take a plain kernel, many times slower\n",
                p->M, p->K, p->K, p->N);
    if (m) cache->say = 0;
    int across = (int)blocks_of(p->N, PRODUCT_TILE);
    KERNEL(dev, plain_product_kernel, grid_of(across * blocks_of(p->M, PRODUCT_TILE)), BLOCK, 0, c, a, b, *p, across);
}

static void cuda_linear_forward(Device *dev, void *y, int y_float, const floatX *x, const floatX *w, int N, int IC, int OC) {
    Product p = {N, OC, IC, IC, 1, 1, IC, OC, y_float, 0};
    cuda_product(dev, &p, y, x, w);
}
static void cuda_linear_backward_input(Device *dev, floatX *dx, const floatX *dy, int64_t dy_stride, const floatX *w, int N, int IC, int OC) {
    Product p = {N, IC, OC, dy_stride, 1, IC, 1, IC, FLOATX == DTYPE_F32, 0};
    cuda_product(dev, &p, dx, dy, w);
}
static void cuda_linear_backward_weight(Device *dev, float *dw, const floatX *dy, int64_t dy_stride, const floatX *x, int N, int IC, int OC, int accumulate) {
    Product p = {OC, IC, N, 1, dy_stride, IC, 1, IC, 1, accumulate};
    cuda_product(dev, &p, dw, dy, x);
}

// ---------------------------------------------------------------------------
// by rows: embedding, RMSNorm, RoPE, SwiGLU, loss

/* A thread copies one T, of floatX or of 16 bytes; a row has `length` of them, in `chunks` blocks. */
template <class T> __global__ void __launch_bounds__(BLOCK) embedding_forward_kernel(T *x, const T *embed, const int32_t *ids, int length, int chunks) {
    int64_t n = blockIdx.x / (unsigned)chunks, i = (int64_t)(blockIdx.x % (unsigned)chunks) * BLOCK + threadIdx.x;
    if (i < length) x[n * length + i] = ids[n] < 0 ? T{} : embed[(int64_t)ids[n] * length + i];
}
static void cuda_embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int N, int C) {
    int vectors = in_vectors(C, WIDE, x, embed), length = vectors ? C / WIDE : C, chunks = (int)blocks_of(length, BLOCK);
    if (!N) return;
    unsigned grid = grid_of((int64_t)N * chunks), threads = threads_for(length, BLOCK);
    if (vectors) KERNEL(dev, (embedding_forward_kernel<uint4>), grid, threads, 0, (uint4 *)x, (const uint4 *)embed, ids, length, chunks);
    else KERNEL(dev, (embedding_forward_kernel<floatX>), grid, threads, 0, x, embed, ids, length, chunks);
}

/* The embedding's gradient: a token may occur once or be nine tenths of a batch, and its sum must not be one thread's work.
 * Tokens are sorted by id; the sorted list is cut into blocks of TOKEN_BLOCK. A block adds the runs of one id that begin in it
 * to dembed; a run's parts in later blocks go to `partial`, a row a block, and a second kernel adds those in their order.
 *
 * The sort: a token's place is the number of tokens that come before it. A block finds it for WARP * SORT_TOKENS tokens, each
 * warp counting in its share of all: N^2 comparisons of two instructions. At 32,768 tokens that is about the time of the sums,
 * and it takes neither passes nor counters per id. */
static __global__ void __launch_bounds__(SORT_BLOCK) sort_tokens_kernel(int32_t *order, const int32_t *ids, int N) {
    SHARED(int, counts, SORT_BLOCK * SORT_TOKENS);
    const int warps = SORT_BLOCK / WARP, tokens = WARP * SORT_TOKENS;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int64_t n0 = (int64_t)blockIdx.x * tokens, n1 = min_i64(N, n0 + tokens), begin = (int64_t)N * warp / warps, end = (int64_t)N * (warp + 1) / warps;
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
        for (int j = 0; j < SORT_TOKENS; j++) before[j] += ids[m] < mine[j] || (ids[m] == mine[j] && m < n0 + lane + WARP * j);
#pragma unroll
    for (int j = 0; j < SORT_TOKENS; j++) counts[warp * tokens + WARP * j + lane] = before[j];
    __syncthreads();
    int place = 0;
    if ((int)threadIdx.x < tokens && n0 + threadIdx.x < n1) {
        for (int w = 0; w < warps; w++) place += counts[w * tokens + (int)threadIdx.x];
        order[place] = (int32_t)(n0 + threadIdx.x);
    }
}

/* A block: TOKEN_BLOCK sorted tokens; a thread W columns of all of them. Reads dx once, and dembed once for each id in it. */
template <int W> __global__ void __launch_bounds__(BLOCK) embedding_backward_kernel(float *dembed, float *partial /* (blocks, C) */, const floatX *dx, const int32_t *ids,
                                                                                    const int32_t *order, int N, int C) {
    enum { AHEAD = 4 }; // rows in flight
    SHARED(int32_t, token, TOKEN_BLOCK);
    SHARED(int32_t, id, TOKEN_BLOCK + 1);
    int64_t begin = (int64_t)blockIdx.x * TOKEN_BLOCK, column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    int count = (int)min_i64(TOKEN_BLOCK, N - begin);
    if ((int)threadIdx.x < count) token[threadIdx.x] = order[begin + threadIdx.x], id[threadIdx.x] = ids[order[begin + threadIdx.x]];
    if (threadIdx.x == 0) id[count] = -1;
    int32_t earlier = begin ? ids[order[begin - 1]] : -1; // its run may go on here
    __syncthreads();
    if (column >= C) return;
    float v[AHEAD][W], sum[W] = {};
    for (int k0 = 0; k0 < count; k0 += AHEAD) {
#pragma unroll
        for (int r = 0; r < AHEAD; r++) load(v[r], dx + (int64_t)token[k0 + r < count ? k0 + r : k0] * C + column);
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
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

/* A block: the run that goes on into block b of the sorted tokens, and did not already into block b - 1, if there is one. */
template <int W> __global__ void __launch_bounds__(WARP *SUM_LANES) embedding_runs_kernel(float *dembed, const float *partial, const int32_t *ids, const int32_t *order,
                                                                                          int N, int C) {
    SHARED(float, sums, SUM_LANES * WARP * W);
    int b = (int)blockIdx.x + 1, last = (int)((N - 1) / TOKEN_BLOCK);
    const int32_t *first = order + (int64_t)b * TOKEN_BLOCK; // of block b
    int32_t id = ids[*first];
    if (id < 0 || ids[first[-1]] != id || (b > 1 && ids[first[-TOKEN_BLOCK - 1]] == id)) return;
    int low = 0, high = last - b; // the run's last block is b + low ... b + high
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (ids[first[(int64_t)middle * TOKEN_BLOCK]] == id) low = middle;
        else high = middle - 1;
    }
    add_rows<W>(dembed + (int64_t)id * C, partial + (int64_t)b * C, low + 1, C, sums);
}

static size_t embedding_order_bytes(int N) { return (size_t)round_up((int64_t)N * 4, 256); }
static size_t cuda_embedding_backward_scratch(int N, int C) { return embedding_order_bytes(N) + (size_t)(blocks_of(N, TOKEN_BLOCK) * C) * sizeof(float); }
static void cuda_embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int N, int C, void *scratchpad) {
    int32_t *order = (int32_t *)scratchpad; // (N)
    float *partial = (float *)((char *)scratchpad + embedding_order_bytes(N));
    unsigned blocks = (unsigned)blocks_of(N, TOKEN_BLOCK);
    if (!N) return;
    KERNEL(dev, sort_tokens_kernel, (unsigned)blocks_of(N, WARP * SORT_TOKENS), SORT_BLOCK, 0, order, ids, N);
    KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, dx, dembed), WIDE, embedding_backward_kernel, dim3(blocks, (unsigned)blocks_of(C, BLOCK * W)), BLOCK, 0,
                    dembed, partial, dx, ids, order, N, C);
    if (blocks > 1)
        KERNEL_BY_WIDTH(dev, in_vectors(C, FLAT, dembed), FLAT, embedding_runs_kernel, dim3(blocks - 1, (unsigned)blocks_of(C, WARP * W)), dim3(WARP, SUM_LANES), 0,
                        dembed, partial, ids, order, N, C);
}

/* A block a row, a thread a vector of it, or several where the row has more than MAX_BLOCK: all but the first are read twice,
 * the second time from a cache. */
template <int W> __global__ void __launch_bounds__(MAX_BLOCK) rmsnorm_forward_kernel(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta,
                                                                                     const floatX *w, float eps, int C) {
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
            for (int j = 0; j < W; j++) v[j] = to_float(from_float(v[j] + d[j])); // the rounded sum: recomputing it elsewhere gives these bits
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
static void cuda_rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w, float eps, int N, int C) {
    if (N) KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, out, sum, x, delta, w), WIDE, rmsnorm_forward_kernel, (unsigned)N, threads_for(blocks_of(C, W), MAX_BLOCK), 0,
                           out, rstd, sum, x, delta, w, eps, C);
}

/* A block NORM_ROWS rows, one after the other; a thread the same columns of each, and so their dw: that of its first vector
 * in registers, that of others (C > MAX_BLOCK * W) in `partial`. Reads x, dout and dresidual and writes dx, once. */
template <int W> __global__ void __launch_bounds__(MAX_BLOCK) rmsnorm_backward_kernel(floatX *dx, float *partial /* (blocks, C) = */, const floatX *dout,
                                                                                      const floatX *dresidual, const floatX *x, const float *rstd, const floatX *w, int N, int C) {
    SHARED(float, sums, 2 * WARP); // in turns: a row's are read while the next row's are written
    int64_t begin = (int64_t)blockIdx.x * NORM_ROWS, end = min_i64(N, begin + NORM_ROWS);
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    float *dw = partial + (int64_t)blockIdx.x * C, first_w[W] = {}, first_dw[W] = {}, scale, dot, mean;
    auto gather = [&](const floatX *xi, const floatX *di, float (&y)[W], float (&d)[W], const float (&weight)[W], float (&dw_sum)[W]) {
        load(y, xi);
        load(d, di);
#pragma unroll
        for (int j = 0; j < W; j++) y[j] *= scale, dot = fmaf(d[j] * weight[j], y[j], dot), dw_sum[j] = fmaf(d[j], y[j], dw_sum[j]);
    };
    auto spread = [&](floatX *out, const floatX *residual, const float (&y)[W], const float (&d)[W], const float (&weight)[W]) {
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
static __global__ void __launch_bounds__(WARP *SUM_LANES) rmsnorm_dw_kernel(float *dw, const float *partial, int blocks, int C) {
    SHARED(float, sums, SUM_LANES * WARP);
    add_rows<1>(dw, partial, blocks, C, sums);
}
static size_t cuda_rmsnorm_backward_scratch(int N, int C) { return (size_t)(blocks_of(N, NORM_ROWS) * C) * sizeof(float); }
static void cuda_rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x, const float *rstd,
                                  const floatX *w, int N, int C, void *scratchpad) {
    float *partial = (float *)scratchpad;
    int blocks = (int)blocks_of(N, NORM_ROWS);
    if (!N) return;
    KERNEL_BY_WIDTH(dev, in_vectors(C, WIDE, dx, dout, dresidual, x, w), WIDE, rmsnorm_backward_kernel, (unsigned)blocks, threads_for(blocks_of(C, W), MAX_BLOCK), 0,
                    dx, partial, dout, dresidual, x, rstd, w, N, C);
    KERNEL(dev, rmsnorm_dw_kernel, dim3(1, (unsigned)blocks_of(C, WARP)), dim3(WARP, SUM_LANES), 0, dw, partial, blocks, C);
}

/* A block a token: its angles are read once. A thread turns W pairs of one head, then of another. */
template <int W> __global__ void __launch_bounds__(BLOCK) rope_kernel(floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int T, int heads, int HD,
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
static void cuda_rope(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads, int HD, float direction) {
    int vectors = in_vectors(HD / 2, WIDE, x, cos_sin) && stride % WIDE == 0;
    if (N && heads && HD > 1)
        KERNEL_BY_WIDTH(dev, vectors, WIDE, rope_kernel, (unsigned)N, threads_for((int64_t)heads * (HD / 2) / W, BLOCK), 0,
                        x, stride, cos_sin, positions, T, heads, HD, direction);
}

static __device__ __forceinline__ float gpu_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); } // exp = infinity: 0

/* A thread W elements of gate and up; a row is `chunks` blocks. Forward reads 2 F and writes F of it, backward reads 3 F, writes 2 F. */
template <int W> __global__ void __launch_bounds__(BLOCK) swiglu_forward_kernel(floatX *h, const floatX *gate_up, int F, int chunks) {
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
    if (N) KERNEL_BY_WIDTH(dev, in_vectors(F, WIDE, h, gate_up), WIDE, swiglu_forward_kernel, grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0,
                           h, gate_up, F, (int)blocks_of(F, BLOCK * W));
}
template <int W> __global__ void __launch_bounds__(BLOCK) swiglu_backward_kernel(floatX *dgate_up, const floatX *dh, const floatX *gate_up, int F, int chunks) {
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
    if (N) KERNEL_BY_WIDTH(dev, in_vectors(F, WIDE, dgate_up, dh, gate_up), WIDE, swiglu_backward_kernel, grid_of(N * blocks_of(F, BLOCK * W)), BLOCK, 0,
                           dgate_up, dh, gate_up, F, (int)blocks_of(F, BLOCK * W));
}

/* Loss and gradient of a row, by one block. The first pass keeps each thread's maximum and sum of exponentials; it goes from the
 * row's end to its beginning and leaves the last `held` logits in shared memory, so that the second pass, from the beginning
 * on, finds the rest in the L2 cache: 4 V bytes come from memory once and sizeof(floatX) V go back.
 * The gradient lies where the logits lay: element i of floatX over logit i / 2 in bf16. A tile of it is written when all threads
 * have read all logits of that tile and of those before it (the barrier): what it covers ends where its own logits end,
 * and those that are still to be read lie behind. */
template <int W> __global__ void __launch_bounds__(MAX_BLOCK) cross_entropy_kernel(float *losses, float *logits, const int32_t *targets, int V, int want_grad, int held) {
    DYN_SHARED(float, tail); // (held): logits V - held ... V - 1
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    float *row = logits + (int64_t)blockIdx.x * V;
    floatX *dlogits = (floatX *)row;
    int step = (int)blockDim.x * W, tile = LOSS_TILE * step, at = (int)threadIdx.x * W, near = V - held;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP, target = targets[blockIdx.x];
    float v[LOSS_TILE][W], none[W] = {};
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        for (int i = at; want_grad && i < V; i += step) store(dlogits + i, none);
        return;
    }
    float target_logit = row[target], max = -INFINITY, sum = 0;
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
    __syncthreads(); // also: row[target] is read by all
    of_warp = lane < warps ? maxima[lane] : -INFINITY;
    max = warp_max(of_warp);
    sum = warp_sum(lane < warps ? scaled(sums[lane], of_warp, max) : 0.0f);
    float inverse = 1.0f / sum;
    if (threadIdx.x == 0) losses[blockIdx.x] = (max - target_logit) + logf(sum);
    for (int t = 0; want_grad && t < V; t += tile) {
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
static size_t cuda_cross_entropy_scratch(const Device *dev, int64_t V) { return (void)dev, (void)V, 0; }
static int loss_shared_bytes(const Device *dev) { return dev->shared_limit - 1024; } // dynamic; the kernel has some of its own
static void cuda_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, int N, int V, int want_grad, void *scratchpad) {
    (void)scratchpad;
    int held = want_grad ? (int)min_i64(V, loss_shared_bytes(dev) / 16 * 4) : 0; // whole vectors
    if (N) KERNEL_BY_WIDTH(dev, in_vectors(V, FLAT, logits), FLAT, cross_entropy_kernel, (unsigned)N, threads_for(blocks_of(V, W), MAX_BLOCK), held * sizeof(float),
                           losses, logits, targets, V, want_grad, held);
}

// ---------------------------------------------------------------------------
// attention
#include "kernels_attention.cuh" // defines: cuda_attention_forward, cuda_attention_backward, cuda_attention_scratch, and the ptx_* functions

// ---------------------------------------------------------------------------
// flat tensors: sums over pieces, norm, AdamW, cast

/* A thread W elements of all n pieces. level[b] waits for its right neighbour: a sum of 2^b pieces; their indices are known when
 * the loops are unrolled, so they stay in registers. n < 2^LEVELS. */
template <int W, int LEVELS, class T> static __device__ __forceinline__ void tree_sum_of(float *out, const T *pieces, int n, int64_t count, int accumulate) {
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
template <class T> __global__ void __launch_bounds__(BLOCK) tree_sum_kernel(float *out, const T *pieces, int n, int64_t count, int accumulate) {
    tree_sum_of<FLAT, 4>(out, pieces, n, count, accumulate);
}
template <class T> __global__ void __launch_bounds__(BLOCK) tree_sum_many_kernel(float *out, const T *pieces, int n, int64_t count, int accumulate) { // or at odd places
    tree_sum_of<1, 31>(out, pieces, n, count, accumulate);
}
template <class T> static void cuda_tree_sum_of(Device *dev, float *out, const T *pieces, int n, int64_t count, int accumulate) {
    int vectors = n < 16 && in_vectors(n > 1 ? count : 0, FLAT, out, pieces);
    if (!count) return;
    if (vectors) KERNEL(dev, (tree_sum_kernel<T>), grid_of(blocks_of(count, BLOCK * FLAT)), BLOCK, 0, out, pieces, n, count, accumulate);
    else KERNEL(dev, (tree_sum_many_kernel<T>), grid_of(blocks_of(count, BLOCK)), BLOCK, 0, out, pieces, n, count, accumulate);
}
static void cuda_tree_sum(Device *dev, float *out, const void *pieces, Dtype dtype, int n, int64_t count, int accumulate) {
    if (dtype == DTYPE_F32) cuda_tree_sum_of(dev, out, (const float *)pieces, n, count, accumulate);
    else cuda_tree_sum_of(dev, out, (const bf16 *)pieces, n, count, accumulate);
}

/* Exact sums: a thread keeps the digits in registers (the loop over them is unrolled), a warp adds its threads' to the total.
 * They are integers: whoever comes first, the sum is the same. The host passes the carries on. */
typedef struct { uint64_t digit[EXACT_DIGITS], not_finite; } ExactPart;
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
        if (sum && threadIdx.x % WARP == 0) atomicAdd((unsigned long long *)(d < EXACT_DIGITS ? &total->digit[d] : &total->not_finite), (unsigned long long)sum);
    }
}

static __global__ void __launch_bounds__(BLOCK) exact_total_kernel(ExactSum *total, const float *x, int64_t count) {
    ExactPart s = {};
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK) exact_add_to(&s, x[i]);
    exact_add_all(total, &s);
}
/* So many blocks as fill the GPU, if there is work for them: for kernels whose sums do not depend on it. */
static unsigned filling_grid(const Device *dev, int64_t blocks) { return (unsigned)min_i64(blocks, 4 * (int64_t)dev->multiprocessors); }
static void cuda_exact_total(Device *dev, ExactSum *total, const float *x, int64_t count) {
    if (count) KERNEL(dev, exact_total_kernel, filling_grid(dev, blocks_of(count, BLOCK)), BLOCK, 0, total, x, count);
}

/* A warp takes WARP blocks of NORM_BLOCK elements at a time: a lane 4 elements of each, and then the sum of one. */
template <int W> __global__ void __launch_bounds__(BLOCK) squared_norm_kernel(ExactSum *total, const float *x, int64_t count) {
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
    if (count) KERNEL_BY_WIDTH(dev, in_vectors(0, FLAT, x), FLAT, squared_norm_kernel, filling_grid(dev, blocks_of(count, (int)BLOCK * NORM_BLOCK)), BLOCK, 0,
                               total, x, count);
}

typedef struct { float keep, rate, root, new1, new2, beta2, eps, grad_scale; } AdamScalars;
/* A thread W elements, 28 bytes each and the copy. What is rounded and what is fused is said: so it is the same for every W, and as in C. */
template <int W> __global__ void __launch_bounds__(BLOCK) adamw_kernel(float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, AdamScalars a) {
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
static void cuda_adamw(Device *dev, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr, float beta1, float beta2,
                       float eps, float weight_decay, float grad_scale, int step) {
    AdamScalars a = {(float)(1.0 - (double)lr * weight_decay), (float)(lr / (1.0 - pow(beta1, step))), (float)(1.0 / sqrt(1.0 - pow(beta2, step))),
                     (float)(1.0 - beta1), (float)(1.0 - beta2), beta2, eps, grad_scale};
    int vectors = in_vectors(0, FLAT, p, m, v, g) && (uintptr_t)copy % (FLAT * sizeof(floatX)) == 0;
    if (count) KERNEL_BY_WIDTH(dev, vectors, FLAT, adamw_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, p, m, v, g, copy, count, a);
}

template <int W> __global__ void __launch_bounds__(BLOCK) cast_to_bf16_kernel(bf16 *out, const float *in, int64_t count) {
    int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some<W, true>(v, in + i, left);
    store_some<W, false>(out + i, v, left);
}
static void cuda_cast_to_bf16(Device *dev, bf16 *out, const float *in, int64_t count) {
    if (count) KERNEL_BY_WIDTH(dev, in_vectors(0, 8, out, in), 8, cast_to_bf16_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, in, count);
}

static __global__ void __launch_bounds__(BLOCK) fingerprint_kernel(unsigned long long *total, const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK) sum += mix64(words[i] + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) atomicAdd(total, (unsigned long long)sum);
}
static void cuda_fingerprint(Device *dev, uint64_t *total, const void *data, int64_t bytes) {
    device_zero(dev, total, sizeof *total);
    if (bytes) KERNEL(dev, fingerprint_kernel, filling_grid(dev, blocks_of(bytes / 8, BLOCK)), BLOCK, 0, (unsigned long long *)total, (const uint64_t *)data, bytes / 8);
}

// ---------------------------------------------------------------------------
// start and end

/* A GPU, and kernels for heads of HD elements. */
static void cuda_require(int HD) {
    cuda_require_gpu();
    if (!cuda_attention_has(HD))
        user_error("attention heads of %d elements have no CUDA kernel, 1 to 256 are expected: use ./train_llama3, which runs on the processor", HD);
    if (cuda_attention_has(HD) == 1 && FLOATX == DTYPE_BF16)
        fprintf(stderr, "attention: tensor cores serve heads of 64 and 128 elements; those of %d go through a plain kernel, many times slower\n", HD);
}

/* Once per rank, on the rank's own thread. `say`: whether this rank tells of what is slower than it should be. */
static void cuda_kernels_open(Device *dev, int say) {
    void *workspace = arena_alloc(dev, MEM_WORKSPACE, "cuBLASLt", CUDA_WORKSPACE_BYTES);
    if (dev->walk) return;
    CudaMatmuls *cache = dev->products = (CudaMatmuls *)checked_malloc(sizeof *cache);
    cache->say = say;
    cublas_check(cublasLtCreate(&cache->handle), "its start");
    cache->workspace = workspace;
    const void *with_shared[2] = {(const void *)cross_entropy_kernel<FLAT>, (const void *)cross_entropy_kernel<1>};
    for (int i = 0; i < 2; i++)
        cuda_check(cudaFuncSetAttribute(with_shared[i], cudaFuncAttributeMaxDynamicSharedMemorySize, loss_shared_bytes(dev)), "asking for shared memory");
}
static void cuda_kernels_close(Device *dev) {
    CudaMatmuls *cache = dev->products;
    if (!cache) return;
    device_wait(dev); // products may still use the workspace
    for (CudaMatmul *m = cache->entries, *next; m; m = next) {
        next = m->next;
        for (int i = 0; i < 3; i++) cublasLtMatrixLayoutDestroy(m->layout[i]);
        cublasLtMatmulDescDestroy(m->how);
        free(m);
    }
    cublasLtDestroy(cache->handle);
    free(cache);
    dev->products = NULL;
}

#endif
