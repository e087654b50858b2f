/* test.cu: what runs CUDA on a CPU, against plain computations; and errors planted in kernels, each of which must be
 * found. The tests are in the headers below.
 *
 * Every planted error runs in a child of its own, which must end as a failure that names the kernel. What no single run
 * can convict (an order that no event ensures) must give other bits under another seed.
 * The last line is `N passed, N failed`; the program ends with 1 when a check failed. See the Makefile beside it.
 */
#include "test_arithmetic.h"     // defines: test_arithmetic
#include "test_errors.h"         // defines: test_errors
#include "test_hopper.h"         // defines: test_hopper
#include "test_hopper_planted.h" // defines: planted_hopper
#include "test_lt.h"             // defines: test_lt
#include "test_planted.h"        // defines: test_planted
#include "test_primitives.h" // defines: run_product, test_warp, test_block, test_cached, test_fragments, test_product
#include "test_streams.h"    // defines: test_streams, test_clock, test_devices, test_ranks

// ---------------------------------------------------------------------------
// seeds

__global__ void row_sums(float *out, const float *x,
                         int columns) { // a block a row: lanes, then warps, in a fixed order
    SHARED(float, parts, 8);
    float sum = 0;
    for (int i = (int)threadIdx.x; i < columns; i += 256) sum += x[(int)blockIdx.x * columns + i];
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; i++) sum += parts[i];
        out[blockIdx.x] = sum;
    }
}

static uint64_t sums_and_product() {
    float *x = device_floats(37 * 1000, [](size_t i) { return sinf((float)i); }), *y = device_floats(37, nullptr);
    RUN(row_sums, 37, 256, 0, 0, y, x, 1000);
    std::vector<float> sums = host_floats(y, 37), c = run_product<true>(70, 72, 96);
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    return fingerprint(fingerprint(1, sums.data(), sums.size() * 4), c.data(), c.size() * 4);
}

static void test_seeds() {
    check(!different_bits(sums_and_product), "reductions and products: %d seeds give equal bits", SEEDS);
}

// ---------------------------------------------------------------------------

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_warp();
    test_block();
    test_cached();
    test_fragments();
    test_product();
    test_hopper();
    test_streams();
    test_clock();
    test_devices();
    test_ranks();
    test_errors();
    test_lt();
    test_arithmetic();
    test_seeds();
    planted_hopper();
    test_planted();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
