/* muon.cu: the steps of Muon's elementwise ops on a GPU.
 *
 * A few instructions for each element that is read or written: all there is to gain is the number of bytes that one
 * load or store moves, and that nothing is read twice.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp muon.cu -o muon
 * with muon.h page.cuh page.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cuda/flat.cuh lib/ops/cuda/muon.cuh
 * lib/ops/cuda/squared_norm.cuh lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/muon.cuh"
#include "muon.h"

template <int W>
static __global__ void __launch_bounds__(256)
    momentum_kernel1(floatX *update, float *m, const float *g, int64_t count) {
    int64_t i = thread_number() * W;
    float m1[W], g1[W];
    if (i >= count) return;
    load_some(m1, m + i, count - i);
    load_some(g1, g + i, count - i);
    for (int j = 0; j < W; j++) {
        float grad = g1[j] * MUON_SCALE;
        m1[j] += (1 - MOMENTUM) * (grad - m1[j]);
        g1[j] = grad + MOMENTUM * (m1[j] - grad);
    }
    store_some(m + i, m1, count - i);
    store_some(update + i, g1, count - i);
}
template <int W> static void momentum_steps(Case *c) {
    KERNEL(c->on, momentum_kernel1<W>, blocks_for(c->size[0], 256 * W), 256, 0, X("update"), F("m"), F("g"),
           c->size[0]);
}

static __global__ void __launch_bounds__(256) norm_atomic_kernel(float *total, const floatX *x, int64_t count) {
    SHARED(float, sums, WARP);
    float sum = 0;
    for (int64_t i = thread_number(); i < count; i += (int64_t)gridDim.x * blockDim.x)
        sum += to_float(x[i]) * to_float(x[i]);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) atomicAdd(total, sum);
}
static __global__ void __launch_bounds__(256) divide_kernel(floatX *x, const float *total, int64_t count) {
    int64_t i = thread_number();
    if (i < count) x[i] = from_float(to_float(x[i]) / fmaxf(sqrtf(*total), 1e-7f));
}
static void normalize_atomic(Case *c) {
    float *total = (float *)page_scratch(c, sizeof(float));
    page_zero(c, total, sizeof(float));
    KERNEL(c->on, norm_atomic_kernel, 1024, 256, 0, total, X("x"), c->size[0]);
    KERNEL(c->on, divide_kernel, blocks_for(c->size[0], 256), 256, 0, X("x"), total, c->size[0]);
}

template <int W> static __global__ void __launch_bounds__(256) sum_kernel1(floatX *x, const float *y, int64_t count) {
    int64_t i = thread_number() * W;
    float x1[W], y1[W];
    if (i >= count) return;
    load_some(x1, x + i, count - i);
    load_some(y1, y + i, count - i);
    for (int j = 0; j < W; j++) x1[j] = WEIGHT_A * x1[j] + WEIGHT_B * y1[j];
    store_some(x + i, x1, count - i);
}
template <int W> static void sum_steps(Case *c) {
    KERNEL(c->on, sum_kernel1<W>, blocks_for(c->size[0], 256 * W), 256, 0, X("x"), F("y"), c->size[0]);
}

template <int W>
static __global__ void __launch_bounds__(256)
    muon_update_kernel1(float *p, floatX *copy, const floatX *direction, int64_t count) {
    int64_t i = thread_number() * W;
    float p1[W], d1[W];
    if (i >= count) return;
    load_some(p1, p + i, count - i);
    load_some(d1, direction + i, count - i);
    for (int j = 0; j < W; j++) p1[j] = p1[j] * (1 - MUON_LR * MUON_DECAY) - MUON_LR * ADJUST * d1[j];
    store_some(p + i, p1, count - i);
    store_some(copy + i, p1, count - i);
}
template <int W> static void update_steps(Case *c) {
    KERNEL(c->on, muon_update_kernel1<W>, blocks_for(c->size[0], 256 * W), 256, 0, F("p"), X("copy"), X("direction"),
           c->size[0]);
}

static const char an_element[] = "In bf16 a warp loads and stores 64 bytes at a time, half a cache line.";
static const char sixteen_bytes[] = "Loads of 16 bytes.";
static const char in_use[] = "The op of lib/ops/cuda: the same, and by element if a tensor is not aligned.";
static const Version momentum_versions[PAGE_VERSIONS] = {{"1 an element a thread", an_element, momentum_steps<1>},
                                                         {"2 sixteen bytes", sixteen_bytes, momentum_steps<4>},
                                                         {"in use", in_use, momentum_in_use}};
static const Version normalize_versions[PAGE_VERSIONS] = {
    {"1 atomic additions", "A sum per block, added by an atomic float addition: other bits on each run.",
     normalize_atomic},
    {"in use: exact", "An exact sum of fp32 sums of 128 squares, as in squared_norm.cuh: the same bits on each run.",
     normalize_in_use}};
static const Version sum_versions[PAGE_VERSIONS] = {{"1 an element a thread", an_element, sum_steps<1>},
                                                    {"2 sixteen bytes", sixteen_bytes, sum_steps<WIDE>},
                                                    {"in use", in_use, sum_in_use}};
static const Version update_versions[PAGE_VERSIONS] = {{"1 an element a thread", an_element, update_steps<1>},
                                                       {"2 sixteen bytes", sixteen_bytes, update_steps<4>},
                                                       {"in use", in_use, update_in_use}};

PAGE({&momentum_op, momentum_versions}, {&normalize_op, normalize_versions}, {&sum_op, sum_versions},
     {&update_op, update_versions})
