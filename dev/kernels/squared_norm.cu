/* squared_norm.cu: the steps of the sum of squares on a GPU.
 *
 * Thousands of threads each have a sum, and one number must result. Atomic additions of floats happen in an order that
 * changes from run to run. A second kernel has a fixed order, but another one as soon as ranks cut the tensor
 * elsewhere. Additions of integers give the same sum in any order.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp squared_norm.cu -o squared_norm
 * with page.cuh page.h squared_norm.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cuda/flat.cuh
 * lib/ops/cuda/squared_norm.cuh lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/squared_norm.cuh"
#include "squared_norm.h"

enum { NORM_GRID = 1024 }; // blocks: several for each multiprocessor of any GPU

// Thread i sums the squares of vectors i, i + threads, i + 2 threads, …; then each warp is summed, then the block.
template <int W> static __device__ float squares_of(const float *x, int64_t count, float *sums) {
    float sum = 0, v[W];
    for (int64_t i = thread_number() * W; i < count; i += (int64_t)gridDim.x * blockDim.x * W) {
        load_some<true>(v, x + i, count - i);
        for (int j = 0; j < W; j++) sum += v[j] * v[j];
    }
    return block_sum(sum, sums);
}
template <int W>
static __global__ void __launch_bounds__(256) norm_kernel1(float *total, const float *x, int64_t count) {
    SHARED(float, sums, WARP);
    float sum = squares_of<W>(x, count, sums);
    if (threadIdx.x == 0) atomicAdd(total, sum);
}
template <int W> static void norm_atomic(Case *c) {
    page_zero(c, F("total"), sizeof(float));
    KERNEL(c->on, norm_kernel1<W>, NORM_GRID, 256, 0, F("total"), F("x"), c->size[0]);
}

static __global__ void __launch_bounds__(256) norm_kernel2(float *partial, const float *x, int64_t count) {
    SHARED(float, sums, WARP);
    float sum = squares_of<FLAT>(x, count, sums);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
static __global__ void __launch_bounds__(NORM_GRID) norm_kernel3(float *total, const float *partial) { // one block
    SHARED(float, sums, WARP);
    float sum = block_sum(partial[threadIdx.x], sums);
    if (threadIdx.x == 0) *total = sum;
}
static void norm_two_stages(Case *c) {
    float *partial = (float *)page_scratch(c, NORM_GRID * sizeof(float));
    KERNEL(c->on, norm_kernel2, NORM_GRID, 256, 0, partial, F("x"), c->size[0]);
    KERNEL(c->on, norm_kernel3, 1, NORM_GRID, 0, F("total"), partial);
}

// Converts the exact sum to the float that the page compares. The program does so on the host (exact_value).
static __global__ void value_kernel(float *total, const ExactSum *sum) {
    double x = 0;
    for (int i = EXACT_DIGITS - 1; i >= 0; i--) x += ldexp((double)sum->digit[i], 32 * i - 149);
    *total = (float)x;
}
static void norm_in_use(Case *c) {
    ExactSum *sum = (ExactSum *)page_scratch(c, sizeof(ExactSum));
    page_zero(c, sum, sizeof(ExactSum));
    IMPLEMENTATION(squared_norm)(c->on, sum, F("x"), c->size[0]);
    KERNEL(c->on, value_kernel, 1, 1, 0, F("total"), sum);
}

static const Version norm_versions[PAGE_VERSIONS] = {
    {"1 atomic additions",
     "A sum per thread, then per block, then one atomic float addition per block: other bits on each run.",
     norm_atomic<1>},
    {"2 vectors", "Loads of 16 bytes.", norm_atomic<FLAT>},
    {"3 two stages",
     "The sums of 1,024 blocks go to memory and a second kernel adds them up: the same bits on each run, for the same "
     "tensor on the same number of ranks.",
     norm_two_stages},
    {"in use: exact",
     "fp32 sums of 128 elements, added as integers to a fixed-point number that is wide enough for every float: "
     "atomics again, and yet the same bits on each run and for any number of ranks. A warp loads four blocks before it "
     "adds up the first.",
     norm_in_use}};

PAGE({&norm_op, norm_versions})
