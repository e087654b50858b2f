/* cublasLt.h: emulates cuBLASLt's matmul: D = alpha op(A) op(B) + beta C.
 *
 * It reads the real descriptors (column-major, leading dimensions, types, transposes) and holds the caller to what was
 * promised: alignment, workspace, no overlap. What the library refuses it refuses, with a line on stderr that says why;
 * what would go wrong silently ends the process.
 * A caller may rely on: each element is summed in fp32 over k in order, by the same code whatever M, N and its
 * neighbours are, so its bits depend on its row, its column and C alone.
 */
#ifndef CUDA_ON_CPU_CUBLASLT_H
#define CUDA_ON_CPU_CUBLASLT_H
#include "cuda_runtime.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
    CUBLAS_COMPUTE_64F = 70
};
enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14,
    CUDA_R_8F_E4M3 = 28,
    CUDA_R_8F_E5M2 = 29
};
typedef cudaDataType_t cudaDataType;
enum cublasLtPointerMode_t { CUBLASLT_POINTER_MODE_HOST = 0, CUBLASLT_POINTER_MODE_DEVICE = 1 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1 };
enum cublasLtOrder_t { CUBLASLT_ORDER_COL = 0, CUBLASLT_ORDER_ROW = 1 };
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_COMPUTE_TYPE = 0,
    CUBLASLT_MATMUL_DESC_SCALE_TYPE = 1,
    CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_TRANSC = 5,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25
};
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_TYPE = 0,
    CUBLASLT_MATRIX_LAYOUT_ORDER = 1,
    CUBLASLT_MATRIX_LAYOUT_ROWS = 2,
    CUBLASLT_MATRIX_LAYOUT_COLS = 3,
    CUBLASLT_MATRIX_LAYOUT_LD = 4,
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
};
enum cublasLtReductionScheme_t { // how parts of a sum over k are added; here there are none
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

struct cublasLtContext {
    int device;
};
struct CublasLtDesc {
    int32_t compute, scale, pointer_mode, transposed[2], epilogue, sm_count;
    const float *scales[2]; // of A and B in fp8, on the device; NULL: 1
    int8_t fast_accum;      // of sums in fp8; the emulator's are the same
};
struct CublasLtLayout {
    int32_t type;
    uint64_t rows, columns;
    int64_t ld;
};
struct CublasLtPreference {
    uint64_t workspace;
    uint32_t alignment[4];
}; // bytes; of A, B, C, D
typedef cublasLtContext *cublasLtHandle_t;
typedef CublasLtDesc *cublasLtMatmulDesc_t;
typedef CublasLtLayout *cublasLtMatrixLayout_t;
typedef CublasLtPreference *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
}; // the problem's fingerprint, alignments of A, B, C, D, workspace, the proposal's number, its time in percent
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};

inline const char *cublasGetStatusName(cublasStatus_t s) {
    switch (s) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}
inline const char *cublasLtGetStatusName(cublasStatus_t s) { return cublasGetStatusName(s); }
inline const char *cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }
inline const char *cublasLtGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }

namespace emu {

__attribute__((format(printf, 3, 4))) inline cublasStatus_t refuse(Place at, cublasStatus_t status, const char *format,
                                                                   ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "CUDA on a CPU: %s:%d: cublasLt: %s: %s\n", at.file, at.line, cublasGetStatusName(status), text);
    return status;
}

/* The lock, and what a test injected; an error of the device that persists is the library's EXECUTION_FAILED. */
struct LtCall {
    std::unique_lock<std::mutex> lock;
    cublasStatus_t error;
    explicit LtCall(const char *api) : error(CUBLAS_STATUS_NOT_INITIALIZED) {
        if (in_forked_child()) return;
        lock = std::unique_lock<std::mutex>(machine().lock);
        error = (cublasStatus_t)Call::injected(api);
        if (machine().sticky) error = CUBLAS_STATUS_EXECUTION_FAILED;
    }
};

// ---------------------------------------------------------------------------
// The matmul computes two vectors of rows by 6 columns at a time, from operands converted to fp32.

enum { TILE_ROWS = 2 * LANES, TILE_COLUMNS = 6, COLUMNS_AT_ONCE = 42 * TILE_COLUMNS };

struct Matrix { // op(X): element (i, j) lies at i · row + j · column
    char *data;
    int type;
    int64_t row, column;
};

inline Matrix matrix(const void *data, const CublasLtLayout &l, int transposed) {
    return Matrix{(char *)data, l.type, transposed ? l.ld : 1, transposed ? 1 : l.ld};
}

inline bool is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

/* E5M2 is the upper half of an fp16, with infinities and NaN; E4M3 has a NaN of either sign and no infinity. */
inline float fp8_to_float(uint8_t x, int type) {
    int mantissa = type == CUDA_R_8F_E5M2 ? 2 : 3, bias = mantissa == 2 ? 15 : 7;
    int exponent = (x & 0x7F) >> mantissa, fraction = x & ((1 << mantissa) - 1);
    float sign = x & 0x80 ? -1.0f : 1.0f;
    if (mantissa == 2 && exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (mantissa == 3 && (x & 0x7F) == 0x7F) return NAN;
    if (exponent) fraction += 1 << mantissa;
    return sign * ldexpf((float)fraction, std::max(exponent, 1) - bias - mantissa);
}

inline float element(const Matrix &m, int64_t i, int64_t j) {
    int64_t at = i * m.row + j * m.column;
    if (m.type == CUDA_R_32F) return ((const float *)m.data)[at];
    if (is_fp8(m.type)) return fp8_to_float(((const uint8_t *)m.data)[at], m.type);
    return __uint_as_float((unsigned)((const unsigned short *)m.data)[at] << 16);
}

inline void set_element(const Matrix &m, int64_t i, int64_t j, float x) {
    int64_t at = i * m.row + j * m.column;
    if (m.type == CUDA_R_32F) ((float *)m.data)[at] = x;
    else {
        unsigned u = __float_as_uint(x);
        ((unsigned short *)m.data)[at] =
            (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFF : (unsigned short)((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
    }
}

/* `width` rows of op(X) from `first` on, side by side: packed[k · width + i]; zeros beyond `rows`. */
inline void pack(float *packed, const Matrix &m, int64_t first, int64_t rows, int width, int64_t depth) {
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < width; i++) packed[k * width + i] = first + i < rows ? element(m, first + i, k) : 0.0f;
}

/* Multiplies with the truncation of tensor cores. Only operands in bf16 use them. */
inline void multiply_tile_roughly(float (&sums)[TILE_COLUMNS][TILE_ROWS], const float *a, const float *b,
                                  int64_t depth) {
    memset(sums, 0, sizeof sums);
    for (int j = 0; j < TILE_COLUMNS; j++)
        for (int i = 0; i < TILE_ROWS; i += SUMS)
            tensor_core_sums(&sums[j][i], b + j, TILE_COLUMNS, a + i, TILE_ROWS, (int)depth);
}

__attribute__((no_sanitize("address", "undefined"))) inline void multiply_tile(float (&sums)[TILE_COLUMNS][TILE_ROWS],
                                                                               const float *a, const float *b,
                                                                               int64_t depth) {
    FloatV sum[TILE_COLUMNS][2] = {}, rows[2];
    for (int64_t k = 0; k < depth; k++) {
        memcpy(rows, a + k * TILE_ROWS, sizeof rows);
        for (int j = 0; j < TILE_COLUMNS; j++) {
            sum[j][0] += rows[0] * b[k * TILE_COLUMNS + j];
            sum[j][1] += rows[1] * b[k * TILE_COLUMNS + j];
        }
    }
    memcpy(sums, sum, sizeof sums);
}

/* The product is rounded to D's type before C is added, as cuBLASLt 13 does on an H200 (dev/results/gpu-h200.md). */
inline void multiply_matrices(const Matrix &a, const Matrix &b, const Matrix &c, const Matrix &d, int64_t M, int64_t N,
                              int64_t K, float alpha, float beta) {
    Matrix b_by_column = {b.data, b.type, b.column, b.row};
    std::vector<float> columns((size_t)(K * COLUMNS_AT_ONCE)), rows((size_t)(K * TILE_ROWS));
    float sums[TILE_COLUMNS][TILE_ROWS];
    for (int64_t n0 = 0; n0 < N; n0 += COLUMNS_AT_ONCE) {
        int64_t n1 = std::min(N, n0 + COLUMNS_AT_ONCE);
        for (int64_t n = n0; n < n1; n += TILE_COLUMNS)
            pack(&columns[(size_t)((n - n0) * K)], b_by_column, n, N, TILE_COLUMNS, K);
        for (int64_t m = 0; m < M; m += TILE_ROWS) {
            pack(rows.data(), a, m, M, TILE_ROWS, K);
            for (int64_t n = n0; n < n1; n += TILE_COLUMNS) {
                const float *tile = &columns[(size_t)((n - n0) * K)];
                if (cuda_on_cpu.rough && a.type == CUDA_R_16BF) multiply_tile_roughly(sums, rows.data(), tile, K);
                else multiply_tile(sums, rows.data(), tile, K);
                for (int64_t j = n; j < std::min(n1, n + TILE_COLUMNS); j++)
                    for (int64_t i = m; i < std::min(M, m + TILE_ROWS); i++) {
                        const float c_ij = beta != 0 ? element(c, i, j) : 0; // C may be D
                        set_element(d, i, j, alpha * sums[j - n][i - m]);
                        if (beta != 0) set_element(d, i, j, element(d, i, j) + beta * c_ij);
                    }
            }
        }
    }
}

// ---------------------------------------------------------------------------
// what the library demands of a problem

struct Problem {
    uint64_t M, N, K;
};

/* fp8 as Hopper has it (cuBLAS manual, "cublasLtMatmul()"): both operands are contiguous along K, which is A transposed
 * and B not; not E5M2 by E5M2; sizes are multiples of 16. The scales' addresses are multiples of 16, too, since CUDA
 * 12.9 (pytorch/pytorch pull request 159957). */
inline cublasStatus_t check_fp8(Place at, const CublasLtDesc *op, CublasLtLayout *const (&x)[4], const Problem &p) {
    if (!op->transposed[0] || op->transposed[1])
        return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "fp8 with transposes %d and %d: A must be transposed, B not",
                      op->transposed[0], op->transposed[1]);
    if (!is_fp8(x[1]->type) || (x[0]->type == CUDA_R_8F_E5M2 && x[1]->type == CUDA_R_8F_E5M2) ||
        x[2]->type != x[3]->type || (x[3]->type != CUDA_R_16BF && x[3]->type != CUDA_R_32F) ||
        op->compute != CUBLAS_COMPUTE_32F || op->scale != CUDA_R_32F)
        return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED,
                      "types A %d, B %d, C %d, D %d, compute %d: fp8 is E4M3 by E4M3 or by E5M2, C and D bf16 or fp32 "
                      "alike, sums in fp32",
                      x[0]->type, x[1]->type, x[2]->type, x[3]->type, op->compute);
    if (p.M % 16 || p.N % 16 || p.K % 16 || x[0]->ld % 16 || x[1]->ld % 16)
        return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED,
                      "fp8 of %llu by %llu by %llu: sizes and leading dimensions must be multiples of 16",
                      (unsigned long long)p.M, (unsigned long long)p.N, (unsigned long long)p.K);
    for (int i = 0; i < 2; i++)
        if ((uintptr_t)op->scales[i] % 16)
            return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED,
                          "the scale of %c is at %p: its address must be a multiple of 16", "AB"[i],
                          (const void *)op -> scales[i]);
    if (cuda_on_cpu.chip < 89) return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "sm_%d has no fp8", cuda_on_cpu.chip);
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t check_problem(Place at, const CublasLtDesc *op, CublasLtLayout *const (&x)[4],
                                    Problem *p) { // layouts of A, B, C, D
    if (!op || !x[0] || !x[1] || !x[2] || !x[3]) return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "a descriptor is NULL");
    for (int i = 0; i < 4; i++) {
        if (!x[i]->rows || !x[i]->columns)
            return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "%c is %llu by %llu", "ABCD"[i],
                          (unsigned long long)x[i] -> rows, (unsigned long long)x[i] -> columns);
        if (x[i]->ld < (int64_t)x[i]->rows)
            return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "%c has %llu rows, its leading dimension is %lld", "ABCD"[i],
                          (unsigned long long)x[i] -> rows, (long long)x[i] -> ld);
    }
    int ta = op->transposed[0], tb = op->transposed[1];
    *p = Problem{ta ? x[0]->columns : x[0]->rows, tb ? x[1]->rows : x[1]->columns, ta ? x[0]->rows : x[0]->columns};
    if ((tb ? x[1]->columns : x[1]->rows) != p->K)
        return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "op(A) has %llu columns, op(B) %llu rows",
                      (unsigned long long)p->K, (unsigned long long)(tb ? x[1]->columns : x[1]->rows));
    for (int i = 2; i < 4; i++)
        if (x[i]->rows != p->M || x[i]->columns != p->N)
            return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "%c is %llu by %llu, the product is %llu by %llu", "ABCD"[i],
                          (unsigned long long)x[i] -> rows, (unsigned long long)x[i] -> columns,
                          (unsigned long long)p -> M, (unsigned long long)p -> N);
    if (is_fp8(x[0]->type) || is_fp8(x[1]->type)) return check_fp8(at, op, x, *p);
    bool bf16 = x[0]->type == CUDA_R_16BF;
    bool compute =
        op->compute == CUBLAS_COMPUTE_32F || op->compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
        (!bf16 && (op->compute == CUBLAS_COMPUTE_32F_FAST_TF32 || op->compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
                   op->compute == CUBLAS_COMPUTE_32F_FAST_16F));
    if (x[1]->type != x[0]->type || x[3]->type != x[2]->type ||
        (x[2]->type != CUDA_R_32F && x[2]->type != CUDA_R_16BF) || (x[0]->type != CUDA_R_32F && !bf16) ||
        (!bf16 && x[2]->type != CUDA_R_32F) || !compute || op->scale != CUDA_R_32F)
        return refuse(at, CUBLAS_STATUS_NOT_SUPPORTED,
                      "types A %d, B %d, C %d, D %d, compute %d, scale %d: A and B alike, fp32 or bf16; C and D alike, "
                      "fp32, or bf16 as A; sums in fp32",
                      x[0]->type, x[1]->type, x[2]->type, x[3]->type, op->compute, op->scale);
    return CUBLAS_STATUS_SUCCESS;
}

inline uint64_t problem_hash(const CublasLtDesc *op, CublasLtLayout *const (&x)[4]) {
    uint64_t h = 0xCBF29CE484222325ull;
    auto mix = [&h](uint64_t v) {
        h = (h ^ v) * 0x100000001B3ull;
        h ^= h >> 29;
    };
    mix((uint64_t)op->compute);
    mix((uint64_t)op->transposed[0]);
    mix((uint64_t)op->transposed[1]);
    for (int i = 0; i < 4; i++) {
        mix((uint64_t)x[i]->type);
        mix(x[i]->rows);
        mix(x[i]->columns);
        mix((uint64_t)x[i]->ld);
    }
    return h;
}

inline size_t element_bytes(int type) {
    if (is_fp8(type)) return 1;
    return type == CUDA_R_32F ? 4 : 2;
}

inline size_t extent(const CublasLtLayout &l) { // bytes from the first element to behind the last
    return (size_t)(((int64_t)l.columns - 1) * l.ld + (int64_t)l.rows) * element_bytes(l.type);
}

} // namespace emu

// ---------------------------------------------------------------------------
// handles and descriptors

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
    *h = nullptr;
    emu::LtCall call("cublasLtCreate");
    if (call.error) return call.error;
    *h = new cublasLtContext{emu::device_now};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
    *d = nullptr;
    emu::LtCall call("cublasLtMatmulDescCreate");
    if (call.error) return call.error;
    *d = new CublasLtDesc{
        compute, scale, CUBLASLT_POINTER_MODE_HOST, {CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, 0, {}, 0};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
    *l = nullptr;
    emu::LtCall call("cublasLtMatrixLayoutCreate");
    if (call.error) return call.error;
    *l = new CublasLtLayout{type, rows, columns, ld};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = nullptr;
    emu::LtCall call("cublasLtMatmulPreferenceCreate");
    if (call.error) return call.error;
    *p = new CublasLtPreference{
        0, {256, 256, 256, 256}}; // pointers are taken to be aligned to 256 bytes unless said otherwise
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute,
                                                     const void *value, size_t bytes,
                                                     emu::Place at = emu::Place::here()) {
    int32_t v = 0;
    bool is_scale =
        attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER || attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER;
    size_t expected = is_scale ? sizeof(void *) : sizeof v;
    if (attribute == CUBLASLT_MATMUL_DESC_FAST_ACCUM) expected = 1;
    if (!d || !value || bytes != expected)
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a matmul has %zu bytes, given are %zu",
                           attribute, expected, bytes);
    if (is_scale) {
        memcpy(&d->scales[attribute - CUBLASLT_MATMUL_DESC_A_SCALE_POINTER], value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    memcpy(&v, value, bytes);
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: d->fast_accum = (int8_t)v; break;
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: d->compute = v; break;
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE: d->scale = v; break;
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        if (v != CUBLASLT_POINTER_MODE_HOST && v != CUBLASLT_POINTER_MODE_DEVICE)
            return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "pointer mode %d", v);
        d->pointer_mode = v;
        break;
    case CUBLASLT_MATMUL_DESC_TRANSA:
    case CUBLASLT_MATMUL_DESC_TRANSB:
        if (v < CUBLAS_OP_N || v > CUBLAS_OP_C) return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "operation %d", v);
        d->transposed[attribute - CUBLASLT_MATMUL_DESC_TRANSA] = v != CUBLAS_OP_N;
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        if (v != CUBLASLT_EPILOGUE_DEFAULT)
            return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "epilogue %d: the emulator has the default one alone",
                               v);
        break;
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        if (v < 0 || v > cuda_on_cpu.multiprocessors)
            return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "%d multiprocessors of %d", v,
                               cuda_on_cpu.multiprocessors);
        d->sm_count = v;
        break;
    default:
        return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "the emulator knows no attribute %d of a matmul",
                           attribute);
    }
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                       cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                       size_t bytes, emu::Place at = emu::Place::here()) {
    bool wide = attribute == CUBLASLT_MATRIX_LAYOUT_ROWS || attribute == CUBLASLT_MATRIX_LAYOUT_COLS ||
                attribute == CUBLASLT_MATRIX_LAYOUT_LD || attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    int32_t narrow;
    int64_t v;
    if (!l || !value || bytes != (wide ? 8 : 4))
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a matrix has %d bytes, given are %zu",
                           attribute, wide ? 8 : 4, bytes);
    if (wide) memcpy(&v, value, sizeof v);
    else {
        memcpy(&narrow, value, sizeof narrow);
        v = narrow;
    }
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: l->type = (int32_t)v; break;
    case CUBLASLT_MATRIX_LAYOUT_ROWS: l->rows = (uint64_t)v; break;
    case CUBLASLT_MATRIX_LAYOUT_COLS: l->columns = (uint64_t)v; break;
    case CUBLASLT_MATRIX_LAYOUT_LD: l->ld = v; break;
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        if (v != CUBLASLT_ORDER_COL)
            return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "order %lld: the emulator has columns alone",
                               (long long)v);
        break;
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        if (v != 1)
            return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "batches of %lld: the emulator has single matmuls only",
                               (long long)v);
        break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: break;
    default:
        return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "the emulator knows no attribute %d of a matrix",
                           attribute);
    }
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void *value, size_t bytes,
                                                           emu::Place at = emu::Place::here()) {
    bool wide = attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    if (!p || !value || bytes != (wide ? 8 : 4))
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a preference has %d bytes, given are %zu",
                           attribute, wide ? 8 : 4, bytes);
    if (wide) memcpy(&p->workspace, value, bytes);
    else if (attribute >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
             attribute <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
        memcpy(&p->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    else if (attribute != CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        return emu::refuse(at, CUBLAS_STATUS_NOT_SUPPORTED, "the emulator knows no attribute %d of a preference",
                           attribute);
    return CUBLAS_STATUS_SUCCESS;
}

// ---------------------------------------------------------------------------
// choosing and running

namespace emu {
enum { PROPOSALS = 5 };
/* The time of a proposal in percent of the first one's: some are faster, and which depends on the problem. */
inline uint64_t proposal_time(uint64_t problem, int i) { return i ? 70 + 10 * (problem >> (4 * i) & 7) : 100; }
} // namespace emu

/* Up to five: the first wants some workspace, the next half of it, the others none. */
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t op,
                                                     cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                                     cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                                     cublasLtMatmulPreference_t preference, int wanted,
                                                     cublasLtMatmulHeuristicResult_t *results, int *found,
                                                     emu::Place at = emu::Place::here()) {
    emu::LtCall call("cublasLtMatmulAlgoGetHeuristic");
    if (found) *found = 0;
    if (call.error) return call.error;
    if (!h || !preference || !results || !found || wanted < 1)
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "no handle, preference, or room for a result");
    CublasLtLayout *const x[4] = {A, B, C, D};
    emu::Problem p;
    if (cublasStatus_t e = emu::check_problem(at, op, x, &p)) return e;
    size_t workspace = std::min<size_t>(preference->workspace, 256 << 10) / 256 * 256;
    uint64_t problem = emu::problem_hash(op, x);
    const uint32_t *aligned = preference->alignment;
    for (int i = 0; i < wanted && i < emu::PROPOSALS; i++) {
        size_t bytes = i >= 2 ? 0 : workspace >> i;
        results[i] = cublasLtMatmulHeuristicResult_t();
        results[i].algo = cublasLtMatmulAlgo_t{{problem, aligned[0], aligned[1], aligned[2], aligned[3], bytes,
                                                (uint64_t)i, emu::proposal_time(problem, i)}};
        results[i].workspaceSize = bytes;
        results[i].wavesCount = 1;
        *found = i + 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* What an algorithm is. None of the emulator's splits K. */
enum cublasLtMatmulAlgoConfigAttributes_t {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3,
    CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION = 5,
    CUBLASLT_ALGO_CONFIG_STAGES_ID = 6
};
inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t attribute, void *value,
                                                           size_t bytes, size_t *written,
                                                           emu::Place at = emu::Place::here()) {
    if (!algo || !value || bytes != 4)
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "no algorithm, or a value that has not 4 bytes");
    uint32_t answer = attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    if (attribute == CUBLASLT_ALGO_CONFIG_ID) answer = (uint32_t)algo->data[6];
    memcpy(value, &answer, bytes);
    if (written) *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

namespace emu {
inline bool overlap(const void *a, size_t n, const void *b, size_t m) {
    return (const char *)a < (const char *)b + m && (const char *)b < (const char *)a + n;
}

/* Checks that A, B, C (unless NULL) and D are device memory, aligned as the algorithm was promised, and that the
 * workspace is as large as it wants. */
inline cublasStatus_t check_operands(Place at, CublasLtLayout *const x[4], const void *const pointers[4],
                                     const cublasLtMatmulAlgo_t *algo, const void *workspace, size_t workspace_bytes,
                                     int device) {
    for (int i = 0; i < 4; i++) {
        if (i == 2 && !pointers[i]) continue;
        std::string what = std::string("cublasLt: matrix ") + "ABCD"[i];
        uint64_t need = is_fp8(x[i]->type) ? 16 : element_bytes(x[i]->type);
        if (algo) need = algo->data[1 + i];
        check_range(what.c_str(), pointers[i], extent(*x[i]), device, at);
        if (need && (uintptr_t)pointers[i] % need)
            fail(&at,
                 "cublasLtMatmul: %c at %p is not aligned to %llu bytes, which the preference promised "
                 "(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%c_BYTES, 256 unless set)",
                 "ABCD"[i], pointers[i], (unsigned long long)need, "ABCD"[i]);
    }
    size_t wanted = algo ? algo->data[5] : 0;
    if (wanted > workspace_bytes)
        return refuse(at, CUBLAS_STATUS_INVALID_VALUE, "the algorithm wants %zu bytes of workspace, given are %zu",
                      wanted, workspace_bytes);
    if (workspace_bytes) {
        check_range("cublasLt: the workspace", workspace, workspace_bytes, device, at);
        if ((uintptr_t)workspace % 16)
            fail(&at, "cublasLtMatmul: the workspace at %p is not aligned to 16 bytes", workspace);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Fails if D overlaps an operand, other than a C in the same place, or if the workspace overlaps any of the four. */
inline void check_overlaps(Place at, CublasLtLayout *const x[4], const void *const pointers[4], const void *workspace,
                           size_t workspace_bytes) {
    const void *C = pointers[2], *D = pointers[3];
    for (int i = 0; i < 3; i++) {
        if (i == 2 && (!C || (C == D && x[2]->ld == x[3]->ld))) continue; // in place is allowed for C
        if (overlap(D, extent(*x[3]), pointers[i], extent(*x[i]))) fail(&at, "cublasLtMatmul: D overlaps %c", "ABC"[i]);
    }
    for (int i = 0; i < 4; i++)
        if (workspace_bytes && pointers[i] && overlap(workspace, workspace_bytes, pointers[i], extent(*x[i])))
            fail(&at, "cublasLtMatmul: the workspace overlaps %c", "ABCD"[i]);
}
} // namespace emu

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t op, const void *alpha, const void *A,
                                     cublasLtMatrixLayout_t Adesc, const void *B, cublasLtMatrixLayout_t Bdesc,
                                     const void *beta, const void *C, cublasLtMatrixLayout_t Cdesc, void *D,
                                     cublasLtMatrixLayout_t Ddesc, const cublasLtMatmulAlgo_t *algo, void *workspace,
                                     size_t workspace_bytes, cudaStream_t stream, emu::Place at = emu::Place::here()) {
    emu::LtCall call("cublasLtMatmul");
    if (call.error) return call.error;
    CublasLtLayout *const x[4] = {Adesc, Bdesc, Cdesc, Ddesc};
    const void *const pointers[4] = {A, B, C, D};
    emu::Problem p;
    if (!h || !alpha || !beta || !A || !B || !D)
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "the handle, alpha, beta, A, B or D is NULL");
    if (cublasStatus_t e = emu::check_problem(at, op, x, &p)) return e;
    bool on_device = op->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    if (!C && (on_device || *(const float *)beta != 0))
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "C is NULL, beta is not 0");
    cudaStream_t s = emu::stream_of(stream);
    if (!s) return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "no such stream");
    if (s->device != h->device)
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE, "the handle is of device %d, the stream of device %d",
                           h->device, s->device);
    if (algo && algo->data[0] != emu::problem_hash(op, x))
        return emu::refuse(at, CUBLAS_STATUS_INVALID_VALUE,
                           "the algorithm was chosen for other shapes, leading dimensions, types or transposes");
    if (cublasStatus_t e = emu::check_operands(at, x, pointers, algo, workspace, workspace_bytes, s->device)) return e;
    if (algo && cuda_on_cpu.refused_algorithms >> algo->data[6] & 1)
        return algo->data[6] % 2 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_INVALID_VALUE;
    size_t wanted = algo ? algo->data[5] : 0, extent_d = emu::extent(*Ddesc);
    emu::check_overlaps(at, x, pointers, workspace, wanted);
    emu::Matrix a = emu::matrix(A, *Adesc, op->transposed[0]), b = emu::matrix(B, *Bdesc, op->transposed[1]),
                c = emu::matrix(C, *Cdesc, 0), d = emu::matrix(D, *Ddesc, 0);
    const float *scale_a = op->scales[0], *scale_b = op->scales[1];
    if (emu::is_fp8(a.type) && scale_a) emu::check_range("cublasLt: the scale of A", scale_a, 4, s->device, at);
    if (emu::is_fp8(b.type) && scale_b) emu::check_range("cublasLt: the scale of B", scale_b, 4, s->device, at);
    float alpha_now = on_device ? 0 : *(const float *)alpha, beta_now = on_device ? 0 : *(const float *)beta;
    double flops = 2.0 * (double)p.M * (double)p.N * (double)p.K, relative = algo ? (double)algo->data[7] / 100 : 1;
    emu::enqueue(s, (cuda_on_cpu.costs.product + cuda_on_cpu.costs.flop * flops) * relative, [=] {
        emu::check_no_zone("cublasLt: matrix D", D, extent_d, at);
        if (wanted) memset(workspace, 0xFF, wanted);                 // nobody else may use it meanwhile
        float scale = emu::is_fp8(a.type) && scale_a ? *scale_a : 1; // read when the matmul runs
        if (emu::is_fp8(b.type) && scale_b) scale *= *scale_b;
        emu::multiply_matrices(a, b, c, d, (int64_t)p.M, (int64_t)p.N, (int64_t)p.K,
                               scale * (on_device ? *(const float *)alpha : alpha_now),
                               on_device ? *(const float *)beta : beta_now);
    });
    return CUBLAS_STATUS_SUCCESS;
}
#endif
