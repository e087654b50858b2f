/* page_rate.cuh: measures the matmul rate of page.cuh by cuBLASLt, for a page whose kernels multiply by themselves. */
#ifndef PAGE_RATE_CUH
#define PAGE_RATE_CUH
#include "page.h"
#include <cublasLt.h> // defines: cublasLtMatmul and its descriptors

static __global__ void rate_operand_kernel(floatX *x, int64_t count) { // uniform in (-1, 1)
    int64_t i = thread_number();
    if (i < count) x[i] = from_float((float)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
}

/* FLOP/s of y (N, OC) = x (N, IC) w (OC, IC)^T, by the algorithm that cuBLASLt proposes first. Its matrices are
 * column-major: y^T = w x^T. */
static double cublas_rate(OpStream *on, cublasLtHandle_t cublas, int64_t N, int64_t IC, int64_t OC) {
    const int64_t rows[3] = {IC, IC, OC}, columns[3] = {OC, N, N}; // of w, x, y in memory
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const uint64_t bytes = 32 << 20; // of work space: NVIDIA's recommendation for Hopper
    const float one = 1, zero = 0;
    void *memory[4] = {NULL, NULL, NULL, page_alloc(bytes)};
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulDesc_t matmul;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t proposal;
    int found = 0;
    for (int i = 0; i < 3; i++) {
        int64_t count = rows[i] * columns[i];
        memory[i] = page_alloc((size_t)count * sizeof(floatX));
        KERNEL(on, rate_operand_kernel, blocks_for(count, 256), 256, 0, (floatX *)memory[i], count);
        cublasLtMatrixLayoutCreate(&layout[i], FLOATX == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F, (uint64_t)rows[i],
                                   (uint64_t)columns[i], rows[i]);
    }
    cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F); // not TF32
    cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulAlgoGetHeuristic(cublas, matmul, layout[0], layout[1], layout[2], layout[2], preference, 1, &proposal,
                                   &found);
    double seconds = page_timed_median(on, [&] {
        if (!found || cublasLtMatmul(cublas, matmul, &one, memory[0], layout[0], memory[1], layout[1], &zero, memory[2],
                                     layout[2], memory[2], layout[2], &proposal.algo, memory[3], bytes, on->stream))
            run_failure("cuBLASLt does not multiply (%" PRId64 ",%" PRId64 ") by (%" PRId64 ")", N, IC, OC);
    });
    for (void *data : memory) page_free(data);
    return 2 * (double)(N * IC * OC) / seconds;
}

static void page_rate_open(OpStream *on) {
    static const int64_t shapes[][2] = {
        {2048, 16384}, {8192, 2048}, {4096, 6144}, {4096, 28672}, {14336, 4096}}; // IC, OC of 1B and 8B layers
    cublasLtHandle_t cublas = NULL;
    if (!page_gpu.flush || page_gpu.matmul > 0) return; // this run does not time, or another page has measured the rate
    cublasLtCreate(&cublas);
    for (const auto &of : shapes) page_gpu.matmul = fmax(page_gpu.matmul, cublas_rate(on, cublas, 8192, of[0], of[1]));
    printf("\n%.1f TFLOP/s in the fastest matmul of %s.\n", page_gpu.matmul / 1e12, PRECISION_NAME);
}

#endif
