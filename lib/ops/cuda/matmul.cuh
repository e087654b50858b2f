/* matmul.cuh: matmuls on NVIDIA GPUs, by cuBLASLt; a plain kernel computes the shapes that cuBLASLt refuses.
 *
 * The contracts of the linear layers are in lib/ops/ops.h. cuBLASLt's proposals are asked for once per shape and
 * alignment, and kept; the first one that it does not refuse computes. cuBLASLt expects column-major matrices: our C
 * (M, N), row-major, is its C^T (N, M). So it is asked for C^T = B^T A^T, with our B as its first operand and our A as
 * its second, and nothing is transposed in memory.
 */
#ifndef CUDA_MATMUL_CUH
#define CUDA_MATMUL_CUH
#include "../ops_common.h" // defines: Matmul
#include "vectors.cuh"     // defines: BLOCK, grid_of
#include <cublasLt.h>      // defines: cublasLtMatmul and its descriptors

/* The shape of the matmul that measures this device's speed, and whether that measurement means anything. */
#ifdef CUDA_ON_CPU
enum { RATE_ROWS = 64, RATE_COLS = 32, RATE_COUNTS = 0 };
#else
enum { RATE_ROWS = 8192, RATE_COLS = 4096, RATE_COUNTS = 1 };
#endif
static constexpr int MATMUL_TILE = 64;  // rows and columns of C that a block of the plain kernel computes
static constexpr int MATMUL_DEPTH = 16; // columns of A and rows of B that it holds in shared memory
enum { DX_DEPTH = INT32_MAX, DW_TOKENS = INT32_MAX }; // linear_matmul does not cut sums
static constexpr int CUDA_WORKSPACE_BYTES = 32 << 20; // for cuBLASLt: NVIDIA's recommendation for Hopper

// ---------------------------------------------------------------------------
// cuBLASLt

enum { MATMUL_CANDIDATES = 8 }; // of cuBLASLt's proposals, those that are tried

/* What cuBLASLt's proposals depend on. All int64_t: two keys can be compared as bytes. */
typedef struct {
    Matmul matmul;
    int64_t aligned[3]; // the alignment of A, B, C in bytes, at most 256
} MatmulKey;

typedef struct CudaMatmulEntry {
    MatmulKey key;
    int target; // multiprocessors that it may count on; 0: all
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulAlgo_t algorithms[MATMUL_CANDIDATES]; // (count) in the order in which they are tried
    int count;
    int now; // the number of the algorithm that computes; count: cuBLASLt has none for this matmul
    struct CudaMatmulEntry *next;
} CudaMatmulEntry;

typedef struct MatmulCache {
    int plain; // 1: every matmul is the plain kernel (tests)
    int say;   // this rank prints a note about the first shape that cuBLASLt refuses
    int target; // of the next matmul: see CudaMatmulEntry
    cublasLtHandle_t handle;
    void *workspace; // of this rank alone: needed for equal bits on each run (cuBLAS manual, Results Reproducibility)
    CudaMatmulEntry *entries; // made when a shape is first met
} MatmulCache;

static void cublas_check(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    cuda_check(cudaGetLastError(), what); // a kernel that failed before, of this rank or of another one on this GPU
    run_failure("cuBLASLt: %s failed with status %d", what, (int)status);
}

/* Describes an operand to cuBLASLt: a (rows, cols) matrix whose element (i, j) is at i * row + j * col. If its columns
 * are not contiguous, the transposed matrix is described and marked as to be transposed. */
static cublasLtMatrixLayout_t matmul_operand(CudaMatmulEntry *m, cublasLtMatmulDescAttributes_t which, int64_t rows,
                                             int64_t cols, int64_t row, int64_t col) {
    cublasLtMatrixLayout_t layout;
    cudaDataType_t type = FLOATX == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasOperation_t op = row == 1 && col >= rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublasStatus_t status;
    if (op == CUBLAS_OP_N) status = cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, col);
    else status = cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)cols, (uint64_t)rows, row);
    cublas_check(status, "describing a matrix");
    cublas_check(cublasLtMatmulDescSetAttribute(m->desc, which, &op, sizeof op), "describing a matmul");
    return layout;
}

/* Up to `most` algorithms for a matmul, the one that cuBLASLt expects to be fastest first; returns how many. Sums stay
 * in fp32 until the end: algorithms that split K and add the parts in the output's dtype are excluded. */
static int matmul_algorithms(MatmulCache *cache, const CudaMatmulEntry *m, cublasLtMatmulHeuristicResult_t *results,
                             int most) {
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const int64_t *of = m->key.aligned;
    const uint32_t aligned[3] = {(uint32_t)of[0], (uint32_t)of[1], (uint32_t)of[2]};
    const uint64_t bytes = CUDA_WORKSPACE_BYTES;
    cublasLtMatmulPreference_t preference;
    int found = 0;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference), "describing a choice");
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
            cublasLtMatmulPreferenceSetAttribute(preference, settings[i].what, settings[i].value, settings[i].size),
            "describing a choice");
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(cache->handle, m->desc, m->layout[0], m->layout[1], m->layout[2], m->layout[2],
                                       preference, most, results, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) cublas_check(status, "choosing an algorithm");
    cublasLtMatmulPreferenceDestroy(preference);
    return status == CUBLAS_STATUS_SUCCESS ? found : 0;
}

/* Describes a matmul to cuBLASLt, which may count on `target` multiprocessors; 0: on all. */
static CudaMatmulEntry matmul_describe(const MatmulKey *key, int target) {
    const Matmul *p = &key->matmul;
    CudaMatmulEntry m;
    memset(&m, 0, sizeof m);
    m.key = *key;
    m.target = target;
    cublas_check(cublasLtMatmulDescCreate(&m.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), // in fp32: no TF32
                 "describing a matmul");
    const cublasLtMatmulDescAttributes_t of_target = CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET;
    if (target)
        cublas_check(cublasLtMatmulDescSetAttribute(m.desc, of_target, &m.target, sizeof(int32_t)),
                     "describing a matmul");
    m.layout[0] = matmul_operand(&m, CUBLASLT_MATMUL_DESC_TRANSA, p->N, p->K, p->b_col, p->b_row);
    m.layout[1] = matmul_operand(&m, CUBLASLT_MATMUL_DESC_TRANSB, p->K, p->M, p->a_col, p->a_row);
    cublas_check(cublasLtMatrixLayoutCreate(&m.layout[2], p->c_float ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)p->N,
                                            (uint64_t)p->M, p->c_row),
                 "describing a matrix");
    return m;
}

static void matmul_forget(CudaMatmulEntry *m) {
    for (int i = 0; i < 3; i++) cublasLtMatrixLayoutDestroy(m->layout[i]);
    cublasLtMatmulDescDestroy(m->desc);
}

/* Adds cuBLASLt's proposals to a matmul's algorithms. */
static void matmul_propose(MatmulCache *cache, CudaMatmulEntry *m) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    int found = matmul_algorithms(cache, m, results, MATMUL_CANDIDATES);
    for (int i = 0; i < found; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) m->algorithms[m->count++] = results[i].algo;
}

static MatmulKey matmul_key(const Matmul *p, const void *a, const void *b, const void *c) {
    const uintptr_t at[3] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)c};
    MatmulKey key;
    key.matmul = *p;
    for (int i = 0; i < 3; i++) key.aligned[i] = (int64_t)((at[i] | 256) & (0 - (at[i] | 256))); // the lowest bit
    return key;
}

static CudaMatmulEntry *cuda_matmul_find(OpStream *on, const Matmul *p, const void *a, const void *b, const void *c) {
    MatmulCache *cache = on->matmuls;
    MatmulKey key = matmul_key(p, a, b, c);
    for (CudaMatmulEntry *m = cache->entries; m; m = m->next)
        if (!memcmp(&m->key, &key, sizeof key) && m->target == cache->target) return m;
    CudaMatmulEntry *m = (CudaMatmulEntry *)checked_malloc(sizeof *m);
    *m = matmul_describe(&key, cache->target);
    matmul_propose(cache, m);
    m->next = cache->entries;
    cache->entries = m;
    return m;
}

// ---------------------------------------------------------------------------
// the plain kernel

/* A block computes MATMUL_TILE x MATMUL_TILE elements of C, a thread every 16th row and column of them: 4 x 4. A and B
 * are read once per block, converted to fp32 in shared memory. Sums go over k in order. */
static __global__ void __launch_bounds__(BLOCK)
    plain_matmul_kernel(void *c, const floatX *a, const floatX *b, Matmul p, int across) {
    SHARED(float, as, MATMUL_DEPTH *(MATMUL_TILE + 1)); // one float more per row, against bank conflicts
    SHARED(float, bs, MATMUL_DEPTH *(MATMUL_TILE + 1));
    int64_t i0 = (int64_t)(blockIdx.x / (unsigned)across) * MATMUL_TILE;
    int64_t j0 = (int64_t)(blockIdx.x % (unsigned)across) * MATMUL_TILE;
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < p.K; k0 += MATMUL_DEPTH) {
        for (int e = (int)threadIdx.x; e < MATMUL_DEPTH * MATMUL_TILE; e += BLOCK) {
            // neighbouring threads read neighbouring elements, whichever of the strides is 1
            int ak = p.a_col == 1 ? e % MATMUL_DEPTH : e / MATMUL_TILE;
            int i = p.a_col == 1 ? e / MATMUL_DEPTH : e % MATMUL_TILE;
            int bk = p.b_col == 1 ? e / MATMUL_TILE : e % MATMUL_DEPTH;
            int j = p.b_col == 1 ? e % MATMUL_TILE : e / MATMUL_DEPTH;
            as[ak * (MATMUL_TILE + 1) + i] =
                i0 + i < p.M && k0 + ak < p.K ? to_float(a[(i0 + i) * p.a_row + (k0 + ak) * p.a_col]) : 0.0f;
            bs[bk * (MATMUL_TILE + 1) + j] =
                j0 + j < p.N && k0 + bk < p.K ? to_float(b[(k0 + bk) * p.b_row + (j0 + j) * p.b_col]) : 0.0f;
        }
        __syncthreads();
        UNROLL for (int k = 0; k < MATMUL_DEPTH; k++)
            UNROLL for (int r = 0; r < 4; r++)
                UNROLL for (int s = 0; s < 4; s++)
                    sum[r][s] = fmaf(as[k * (MATMUL_TILE + 1) + y + 16 * r], bs[k * (MATMUL_TILE + 1) + x + 16 * s],
                                     sum[r][s]);
        __syncthreads();
    }
    UNROLL for (int r = 0; r < 4; r++)
        UNROLL for (int s = 0; s < 4; s++) {
            int64_t i = i0 + y + 16 * r, j = j0 + x + 16 * s, at = i * p.c_row + j;
            if (i >= p.M || j >= p.N) continue;
            if (p.c_float) ((float *)c)[at] = p.accumulate ? ((float *)c)[at] + sum[r][s] : sum[r][s];
            else ((floatX *)c)[at] = from_float(p.accumulate ? to_float(((floatX *)c)[at]) + sum[r][s] : sum[r][s]);
        }
}

// ---------------------------------------------------------------------------
// one matmul, by either

/* One call of cuBLASLt, with the algorithm m->now. */
static cublasStatus_t matmul_call(OpStream *on, const CudaMatmulEntry *m, void *c, const void *a, const void *b) {
    MatmulCache *cache = on->matmuls;
    const float one = 1, beta = (float)m->key.matmul.accumulate;
    return cublasLtMatmul(cache->handle, m->desc, &one, b, m->layout[0], a, m->layout[1], &beta, c, m->layout[2], c,
                          m->layout[2], &m->algorithms[m->now], cache->workspace, CUDA_WORKSPACE_BYTES, on->stream);
}

/* Returns whether cuBLASLt computes it. It may refuse what it proposed, before anything runs, for some alignments and
 * odd shapes (PyTorch's pull request 92201): then the next proposal computes, now and from here on. A GPU that failed
 * refuses everything; the plain kernel's launch then reports that. */
static int cublas_matmul(OpStream *on, CudaMatmulEntry *m, void *c, const floatX *a, const floatX *b) {
    for (; m->now < m->count; m->now++) {
        if (matmul_call(on, m, c, a, b) == CUBLAS_STATUS_SUCCESS) return 1;
        cudaGetLastError(); // the check of the next launch would find it
    }
    return 0;
}

static void cuda_matmul(OpStream *on, const Matmul *p, void *c, const floatX *a, const floatX *b) {
    MatmulCache *cache = on->matmuls;
    if (p->M == 0 || p->N == 0) return;
    cache->target = on->left_to_nccl ? on->multiprocessors - on->left_to_nccl : 0;
    if (!cache->plain) {
        if (cublas_matmul(on, cuda_matmul_find(on, p, a, b, c), c, a, b)) return;
        if (cache->say)
            fprintf(stderr,
                    "note: cuBLASLt has no algorithm for (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64
                    "); such matmuls use a plain kernel, many times slower\n",
                    p->M, p->K, p->K, p->N);
        cache->say = 0;
    }
    int across = (int)blocks_of(p->N, MATMUL_TILE);
    KERNEL(on, plain_matmul_kernel, grid_of(across * blocks_of(p->M, MATMUL_TILE)), BLOCK, 0, c, a, b, *p, across);
}

static void matmul_open(OpStream *on, void *workspace, int say) {
    on->matmuls = (MatmulCache *)checked_malloc(sizeof *on->matmuls);
    on->matmuls->say = say;
    on->matmuls->workspace = workspace;
    cublas_check(cublasLtCreate(&on->matmuls->handle), "its start");
}

static void matmul_close(OpStream *on) {
    if (!on->matmuls) return;
    for (CudaMatmulEntry *m = on->matmuls->entries, *next; m; m = next) {
        next = m->next;
        matmul_forget(m);
        free(m);
    }
    cublasLtDestroy(on->matmuls->handle);
    free(on->matmuls);
    on->matmuls = NULL;
}

#endif
