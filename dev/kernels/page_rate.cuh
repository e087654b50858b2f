/* page_rate.cuh: measures the matmul rate of page.cuh, by which pages divide: that of cuBLASLt for y (N, OC) = x
 * (N, IC) w (OC, IC)^T. Its matrices are column-major: y^T = w x^T. */
#ifndef PAGE_RATE_CUH
#define PAGE_RATE_CUH
#include "page.h"
#include <cublasLt.h> // defines: cublasLtMatmul and its descriptors

static __global__ void rate_operand_kernel(floatX *x, int64_t count) { // uniform in (-1, 1)
    int64_t i = thread_number();
    if (i < count) x[i] = from_float((float)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
}

static void page_rate_open(OpStream *on) {
    static const int64_t N = 8192, most = 28672, shapes[][2] = {
        {2048, 16384}, {8192, 2048}, {4096, 6144}, {4096, most}, {14336, 4096}}; // IC, OC of 1B and 8B layers
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const uint64_t bytes = 32 << 20; // of work space: NVIDIA's recommendation for Hopper
    const float one = 1, zero = 0;
    void *memory[4]; // w, x, y, and the work space
    cublasLtHandle_t cublas;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulPreference_t preference;
    if (!page_gpu.flush || page_gpu.matmul > 0) return; // this run does not time, or another page has measured the rate
    for (void *&data : memory) {
        data = page_alloc((size_t)(N * most) * sizeof(floatX));
        KERNEL(on, rate_operand_kernel, blocks_for(N * most, 256), 256, 0, (floatX *)data, N * most);
    }
    cublasLtCreate(&cublas);
    cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F); // not TF32
    cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    for (const auto &of : shapes) {
        const int64_t rows[3] = {of[0], of[0], of[1]}, columns[3] = {of[1], N, N};
        cublasLtMatmulHeuristicResult_t proposal = ZERO;
        int found; // 0: there is no proposal, and the matmul fails
        for (int i = 0; i < 3; i++)
            cublasLtMatrixLayoutCreate(&layout[i], FLOATX == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F, (uint64_t)rows[i],
                                       (uint64_t)columns[i], rows[i]);
        cublasLtMatmulAlgoGetHeuristic(cublas, matmul, layout[0], layout[1], layout[2], layout[2], preference, 1,
                                       &proposal, &found);
        double seconds = page_timed_median(on, [&] {
            if (cublasLtMatmul(cublas, matmul, &one, memory[0], layout[0], memory[1], layout[1], &zero, memory[2],
                               layout[2], memory[2], layout[2], &proposal.algo, memory[3], bytes, on->stream))
                run_failure("cuBLASLt does not multiply %" PRId64 " by %" PRId64 " columns", of[0], of[1]);
        });
        page_gpu.matmul = fmax(page_gpu.matmul, 2 * (double)(N * of[0] * of[1]) / seconds);
    }
    for (void *data : memory) page_free(data);
    printf("\n%.1f TFLOP/s in the fastest matmul of %s.\n", page_gpu.matmul / 1e12, PRECISION_NAME);
}

#endif
