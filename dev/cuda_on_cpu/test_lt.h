/* test_lt.h: cuBLASLt against plain sums, and what it refuses. */
#ifndef TEST_LT_H
#define TEST_LT_H
#include "test_primitives.h" // defines: device_bf16
#include <cublasLt.h>

static float index_value(size_t i) { return (float)i; }

struct Lt { // one product, column-major
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    Lt(int M, int N, int K, int ta, int tb, cudaDataType_t in, cudaDataType_t out, int pad, uint32_t alignment) {
        MUST(cublasLtCreate(&handle));
        MUST(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        int32_t t[2] = {ta, tb};
        MUST(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t[0], 4));
        MUST(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &t[1], 4));
        MUST(cublasLtMatrixLayoutCreate(&a, in, (uint64_t)(ta ? K : M), (uint64_t)(ta ? M : K), (ta ? K : M) + pad));
        MUST(cublasLtMatrixLayoutCreate(&b, in, (uint64_t)(tb ? N : K), (uint64_t)(tb ? K : N), (tb ? N : K) + pad));
        MUST(cublasLtMatrixLayoutCreate(&c, out, (uint64_t)M, (uint64_t)N, M + pad));
        MUST(cublasLtMatmulPreferenceCreate(&preference));
        size_t workspace = 1 << 16;
        MUST(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                  sizeof workspace));
        for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++)
            MUST(cublasLtMatmulPreferenceSetAttribute(preference, (cublasLtMatmulPreferenceAttributes_t)i, &alignment,
                                                      4));
        int found = 0;
        MUST(cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, c, c, preference, 1, &best, &found));
        if (found != 1) must(1, "no algorithm");
    }
    ~Lt() {
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtMatrixLayoutDestroy(c);
        cublasLtMatrixLayoutDestroy(b);
        cublasLtMatrixLayoutDestroy(a);
        cublasLtMatmulDescDestroy(op);
        cublasLtDestroy(handle);
    }
    cublasStatus_t run(float alpha, const void *A, const void *B, float beta, const void *C, void *D, void *workspace,
                       size_t bytes) {
        return cublasLtMatmul(handle, op, &alpha, A, a, B, b, &beta, C, c, D, c, &best.algo, workspace, bytes, 0);
    }
};

static std::vector<float> run_lt(int M, int N, int K, int ta, int tb, bool bf16_in, bool bf16_out, float beta,
                                 double *worst) {
    int pad = 3, size_a = ((ta ? K : M) + pad) * (ta ? M : K), size_b = ((tb ? N : K) + pad) * (tb ? K : N),
        size_c = (M + pad) * N;
    void *a = bf16_in ? (void *)device_bf16((size_t)size_a) : device_floats((size_t)size_a, small),
         *b = bf16_in ? (void *)device_bf16((size_t)size_b) : device_floats((size_t)size_b, small), *workspace;
    void *c = bf16_out ? (void *)device_bf16((size_t)size_c) : device_floats((size_t)size_c, small);
    MUST(cudaMalloc(&workspace, 1 << 16));
    {
        Lt lt(M, N, K, ta, tb, bf16_in ? CUDA_R_16BF : CUDA_R_32F, bf16_out ? CUDA_R_16BF : CUDA_R_32F, pad, 256);
        MUST(lt.run(0.5f, a, b, beta, c, c, workspace, 1 << 16));
    }
    std::vector<float> h((size_t)size_c);
    if (bf16_out) {
        std::vector<__nv_bfloat16> raw((size_t)size_c);
        MUST(cudaMemcpy(raw.data(), c, raw.size() * 2, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < raw.size(); i++) h[i] = __bfloat162float(raw[i]);
    } else h = host_floats((float *)c, (size_t)size_c);
    for (int j = 0; j < N; j++)
        for (int i = 0; i < M + pad; i++) {
            double x = 0;
            size_t at = (size_t)(j * (M + pad) + i);
            if (i >= M) x = small(at); // between columns nothing is touched
            else {
                for (int k = 0; k < K; k++)
                    x += (double)small((size_t)(ta ? i * (K + pad) + k : k * (M + pad) + i)) *
                         small((size_t)(tb ? k * (N + pad) + j : j * (K + pad) + k));
                x *= 0.5;
                if (bf16_out) x = __bfloat162float(__float2bfloat16((float)x)); // the product is rounded on its own
                x += beta * small(at);
            }
            if (bf16_out) x = __bfloat162float(__float2bfloat16((float)x));
            *worst = fmax(*worst, fabs(x - h[at]));
        }
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    MUST(cudaFree(workspace));
    return h;
}

static void test_lt_sums() {
    for (int i = 0; i < 12; i++) {
        double worst = 0;
        int M = 1 + i * 13 % 50, N = 260 - i * 23, K = 5 + i * 7;
        run_lt(M, N, K, i & 1, i >> 1 & 1, i % 3 > 0, i % 3 == 2, i & 4 ? 1.0f : 0.0f, &worst);
        check(worst == 0, "cublasLtMatmul (%d, %d, %d), transposes %d %d, %s into %s: off by %g (sums are exact)", M, N,
              K, i & 1, i >> 1 & 1, i % 3 ? "bf16" : "fp32", i % 3 == 2 ? "bf16" : "fp32", worst);
    }
}

static void test_lt_refusals() {
    double ignored = 0;
    float *x = device_floats(64 * 64, nullptr), *y = device_floats(64 * 64, index_value),
          *workspace = device_floats(1 << 14, nullptr);
    Lt lt(16, 16, 16, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
    MUST(lt.run(1, y, y + 512, 0, x, x, workspace, 1 << 16)); // beta 0: C is not read, though it is NaN
    for (float f : host_floats(x, 256)) ignored += f;
    check(ignored == ignored, "beta 0 does not read C");
    check(lt.run(1, y, y + 512, 0, x, x, workspace, 16) == CUBLAS_STATUS_INVALID_VALUE,
          "too small a workspace is refused");
    Lt wide(16, 16, 32, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
    lt.best = wide.best;
    check(lt.run(1, y, y + 512, 0, x, x, workspace, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE,
          "an algorithm for another shape is refused");
    cublasLtMatrixLayout_t thin;
    int found = 0;
    MUST(cublasLtMatrixLayoutCreate(&thin, CUDA_R_32F, 16, 16, 15));
    check(cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.op, thin, lt.b, lt.c, lt.c, lt.preference, 1, &lt.best,
                                         &found) == CUBLAS_STATUS_INVALID_VALUE &&
              !found,
          "a leading dimension below the rows is refused");
    cublasLtMatrixLayoutDestroy(thin);
    cuda_on_cpu_fail("cublasLtMatmul", (cudaError_t)CUBLAS_STATUS_EXECUTION_FAILED, 1);
    check(wide.run(1, y, y + 512, 0, x, x, workspace, 1 << 16) == CUBLAS_STATUS_EXECUTION_FAILED,
          "a failure of the library, injected");
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFree(workspace));
}

/* An element's bits depend on its row and its column alone: corners of a large matmul are small matmuls. */
static void test_lt_parts() {
    static const int N = 300, M = 100, K = 777;
    float *a = device_floats((size_t)(M * K), [](size_t i) { return sinf((float)i); }),
          *b = device_floats((size_t)(K * N), [](size_t i) { return cosf((float)i); }),
          *c = device_floats((size_t)(M * N), nullptr), *workspace = device_floats(1 << 14, nullptr);
    Lt whole(M, N, K, 1, 0, CUDA_R_32F, CUDA_R_32F, 0, 4);
    MUST(whole.run(1, a, b, 0, c, c, workspace, 1 << 16));
    std::vector<float> large = host_floats(c, (size_t)(M * N));
    int bad = 0;
    for (int m = 1; m < M; m += 33) {
        int n = 3 * m - 1;
        Lt part(m, n, K, 1, 0, CUDA_R_32F, CUDA_R_32F, 0, 4);
        MUST(part.run(1, a + (M - m) * K, b + (N - n) * K, 0, c, c, workspace, 1 << 16));
        std::vector<float> small_one = host_floats(c, (size_t)(m * n));
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++)
                bad += memcmp(&small_one[(size_t)(j * m + i)], &large[(size_t)((N - n + j) * M + M - m + i)], 4) != 0;
    }
    check(!bad, "parts of a product have the bits of the whole: %d differ", bad);
    double start = emu::now();
    for (int i = 0; i < 4; i++) MUST(whole.run(1, a, b, 0, c, c, workspace, 1 << 16));
    MUST(cudaDeviceSynchronize());
    check(1, "  ... at %.2f GFLOP/s", 4 * 2e-9 * M * N * K / (emu::now() - start));
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    MUST(cudaFree(workspace));
}

static uint8_t *device_codes(size_t n, const uint8_t (&codes)[5]) { // 5 divides no size: rows differ
    std::vector<uint8_t> all(n);
    uint8_t *x;
    for (size_t i = 0; i < n; i++) all[i] = codes[i % 5];
    MUST(cudaMalloc((void **)&x, n));
    MUST(cudaMemcpy(x, all.data(), n, cudaMemcpyHostToDevice));
    return x;
}

/* fp8: E4M3 by E5M2, scaled, added to fp32; and what Hopper refuses. */
static void test_lt_fp8() {
    enum { M = 32, N = 16, K = 48 };
    const uint8_t e4m3[5] = {0x38, 0x40, 0xBC, 0x01, 0x7E}, e5m2[5] = {0x3C, 0xC0, 0x34, 0x42, 0x7B};
    const float as[5] = {1, 2, -1.5f, 0x1p-9f, 448}, bs[5] = {1, -2, 0.25f, 3, 57344};
    uint8_t *a = device_codes(M * K, e4m3), *b = device_codes(N * K, e5m2);
    float *c = device_floats(M * N, index_value), *workspace = device_floats(1 << 14, nullptr),
          *scales = device_floats(5, [](size_t i) { return i ? 4.0f : 0.5f; }), *scale_b = scales + 4;
    Lt lt(M, N, K, 1, 0, CUDA_R_8F_E4M3, CUDA_R_32F, 0, 256);
    const int32_t e5m2_type = CUDA_R_8F_E5M2, plain = CUBLAS_OP_N;
    const int8_t fast = 1;
    int found = 0, bad = 0;
    auto again = [&] {
        return cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.op, lt.a, lt.b, lt.c, lt.c, lt.preference, 1, &lt.best,
                                              &found);
    };
    MUST(cublasLtMatrixLayoutSetAttribute(lt.b, CUBLASLT_MATRIX_LAYOUT_TYPE, &e5m2_type, 4));
    MUST(cublasLtMatmulDescSetAttribute(lt.op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales, sizeof scales));
    MUST(cublasLtMatmulDescSetAttribute(lt.op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale_b, sizeof scale_b));
    MUST(cublasLtMatmulDescSetAttribute(lt.op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, 1));
    MUST(again());
    MUST(lt.run(1, a, b, 1, c, c, workspace, 1 << 16));
    std::vector<float> got = host_floats(c, M * N);
    for (int j = 0; j < N; j++)
        for (int i = 0; i < M; i++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += (double)as[(i * K + k) % 5] * bs[(j * K + k) % 5];
            double want = 2 * sum + j * M + i; // the scales are 0.5 and 4
            bad += !(fabs(got[(size_t)(j * M + i)] - want) <= 1e-6 * fabs(want) + 8);
        }
    check(!bad, "fp8: E4M3 by E5M2, with scales, added to fp32: %d of %d differ", bad, M * N);
    MUST(cublasLtMatrixLayoutSetAttribute(lt.a, CUBLASLT_MATRIX_LAYOUT_TYPE, &e5m2_type, 4));
    check(again() == CUBLAS_STATUS_NOT_SUPPORTED, "E5M2 by E5M2 is refused");
    Lt square(32, 32, 32, 1, 0, CUDA_R_8F_E4M3, CUDA_R_16BF, 0, 256);
    Lt odd(32, 32, 24, 1, 0, CUDA_R_16BF, CUDA_R_16BF, 0, 256);
    MUST(cublasLtMatmulDescSetAttribute(square.op, CUBLASLT_MATMUL_DESC_TRANSA, &plain, 4));
    check(cublasLtMatmulAlgoGetHeuristic(square.handle, square.op, square.a, square.b, square.c, square.c,
                                         square.preference, 1, &lt.best, &found) == CUBLAS_STATUS_NOT_SUPPORTED,
          "fp8 whose A is not transposed is refused");
    const int32_t e4m3_type = CUDA_R_8F_E4M3;
    MUST(cublasLtMatrixLayoutSetAttribute(odd.a, CUBLASLT_MATRIX_LAYOUT_TYPE, &e4m3_type, 4));
    MUST(cublasLtMatrixLayoutSetAttribute(odd.b, CUBLASLT_MATRIX_LAYOUT_TYPE, &e4m3_type, 4));
    check(cublasLtMatmulAlgoGetHeuristic(odd.handle, odd.op, odd.a, odd.b, odd.c, odd.c, odd.preference, 1, &lt.best,
                                         &found) == CUBLAS_STATUS_NOT_SUPPORTED,
          "fp8 with sums of 24 elements is refused");
    for (void *p : {(void *)a, (void *)b, (void *)c, (void *)workspace, (void *)scales}) MUST(cudaFree(p));
}

static void test_lt() {
    test_lt_fp8();
    test_lt_sums();
    test_lt_refusals();
    test_lt_parts();
}
#endif
