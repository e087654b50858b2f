/* matmul.cuh: matmuls on NVIDIA GPUs, by cuBLASLt. The contracts are in lib/ops.h. */
#ifndef CUDA_MATMUL_CUH
#define CUDA_MATMUL_CUH
#include "../ops_common.h" // defines: Matmul
#include "vectors.cuh"     // defines: BLOCK, grid_of
#include <cublasLt.h>      // defines: cublasLtMatmul and its descriptors

#ifdef CUDA_ON_CPU
enum { RATE_ROWS = 64, RATE_COLS = 32, RATE_COUNTS = 0 }; // its times tell nothing
#else
enum { RATE_ROWS = 8192, RATE_COLS = 4096, RATE_COUNTS = 1 }; // of the product that measures what this device can do
#endif
static constexpr int MATMUL_TILE = 64;              // rows and columns of C that a block of the plain kernel computes
static constexpr int MATMUL_DEPTH = 16;             // columns of A and rows of B that it holds in shared memory
static constexpr int CUDA_WORKSPACE_BYTES = 32 << 20; // for cuBLASLt: NVIDIA's recommendation for Hopper

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

#endif
