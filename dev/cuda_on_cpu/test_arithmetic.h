/* test_arithmetic.h: CUDA_ON_CPU_ROUGH: errors are as large as a GPU's may be, and no larger; tensor cores truncate. */
#ifndef TEST_ARITHMETIC_H
#define TEST_ARITHMETIC_H
#include "test.h"

__global__ void approximations(float *out, const float *x, int n) { // (4, n)
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    out[i] = ptx_exp2(x[i]);
    out[n + i] = __expf(x[i]);
    out[2 * n + i] = rsqrtf(fabsf(x[i]) + 0.1f);
    out[3 * n + i] = __fdividef(x[i], 3.0f);
}

/* The largest error of each function for x in [-10, 10), as a share of what it may be. */
static void largest_errors(double (&most)[4], int rough) {
    enum { N = 4096 };
    float *x = device_floats(N, [](size_t i) { return (float)i / 204.8f - 10; }), *out = device_floats(4 * N, nullptr);
    cuda_on_cpu.rough = rough;
    RUN(approximations, N / 256, 256, 0, 0, out, x, (int)N);
    std::vector<float> in = host_floats(x, N), y = host_floats(out, 4 * N);
    cuda_on_cpu.rough = 0;
    for (double &m : most) m = 0;
    for (int i = 0; i < N; i++) {
        double v = in[(size_t)i];
        const double want[4] = {exp2(v), exp(v), 1 / sqrt((double)(fabsf(in[(size_t)i]) + 0.1f)), v / 3},
                     may[4] = {0x1p-22, (2 + floor(fabs(1.173 * v))) * 0x1p-23, 0x1p-22, 0x1p-22};
        for (int f = 0; f < 4; f++)
            if (want[f] != 0)
                most[f] = std::max(most[f], fabs(y[(size_t)(f * N + i)] / want[f] - 1) / (may[f] + 0x1p-23));
    }
    MUST(cudaFree(x));
    MUST(cudaFree(out));
}

/* c + the products of these numbers and 1, computed as each of the four sums, which must be equal. */
static float tensor_core_adds(float c, std::vector<float> numbers) {
    float sums[emu::SUMS], ones[emu::SUMS];
    std::fill_n(sums, emu::SUMS, c);
    std::fill_n(ones, emu::SUMS, 1.0f);
    emu::tensor_core_sums(sums, numbers.data(), 1, ones, 0, (int)numbers.size());
    for (float sum : sums)
        if (sum != sums[0]) return NAN;
    return sums[0];
}

static void test_arithmetic() {
    double most[4];
    for (int rough = 0; rough < 3; rough++) {
        largest_errors(most, rough);
        double least = *std::min_element(most, most + 4), largest = *std::max_element(most, most + 4);
        check(rough ? least > 0.4 && largest <= 1 : largest < 0.7,
              "approximate functions, rough %d: errors of %.2f to %.2f of what is allowed", rough, least, largest);
    }
    cuda_on_cpu.rough = 1;
    check(emu::approximate_exp2(0) == 1 && emu::approximate_exp(0) == 1, "an exponential of 0 is exactly 1");
    const float half = 0x1p-24f;
    check(tensor_core_adds(1, {half, half, half, half}) == 1, "a tensor core truncates small products");
    check(tensor_core_adds(0, {half, half, half, half}) == 4 * half, "it keeps them beside products of their size");
    check(tensor_core_adds(0, {1, -half}) == 1, "it truncates toward zero, also what is negative");
    const float below_two = 2 - 2 * half; // three of them take 25 bits
    check(tensor_core_adds(-below_two, {-below_two, -below_two}) == -(6 - 8 * half),
          "it truncates a negative sum, too");
    check(tensor_core_adds(0, {INFINITY, 1, 2, 3}) == INFINITY, "it keeps infinities");
    check(tensor_core_adds(2, {1, 1, 1}) == 5, "it adds a part of a block");
    check(tensor_core_adds(-3, {0, 0, 0, 0, 0}) == -3 && tensor_core_adds(0, {0, 0}) == 0, "it adds zeros");
    cuda_on_cpu.rough = 0;
}
#endif
