/* adamw.cu: the steps of AdamW on a GPU.
 *
 * Each parameter moves 28 bytes of fp32, and 2 of a bf16 copy, for about twenty instructions. Memory bandwidth is the
 * limit by far, so each tensor must be read and written once. What all elements have in common is computed on the host,
 * in double precision.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp adamw.cu -o adamw
 * with adamw.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/adamw.cuh lib/ops/cuda/flat.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/adamw.cuh"
#include "adamw.h"

static __global__ void __launch_bounds__(256) decay_kernel(float *p, Factors f, int64_t count) {
    int64_t i = thread_number();
    if (i < count) p[i] *= f.keep;
}
static __global__ void __launch_bounds__(256) first_kernel(float *m, const float *g, int64_t count) {
    int64_t i = thread_number();
    if (i < count) m[i] = BETA1 * m[i] + (1 - BETA1) * (GRAD_SCALE * g[i]);
}
static __global__ void __launch_bounds__(256) second_kernel(float *v, const float *g, int64_t count) {
    int64_t i = thread_number();
    if (i < count) v[i] = BETA2 * v[i] + (1 - BETA2) * (GRAD_SCALE * g[i]) * (GRAD_SCALE * g[i]);
}
static __global__ void __launch_bounds__(256)
    update_kernel(float *p, const float *m, const float *v, Factors f, int64_t count) {
    int64_t i = thread_number();
    if (i < count) p[i] -= f.rate * m[i] / (sqrtf(v[i]) * f.root + EPS);
}
static __global__ void __launch_bounds__(256) copy_kernel(floatX *copy, const float *p, int64_t count) {
    int64_t i = thread_number();
    if (i < count) copy[i] = from_float(p[i]);
}
static void adamw_passes(Case *c) {
    int64_t count = c->size[0];
    unsigned blocks = blocks_for(count, 256);
    Factors f = factors(c);
    KERNEL(c->on, decay_kernel, blocks, 256, 0, F("p"), f, count);
    KERNEL(c->on, first_kernel, blocks, 256, 0, F("m"), F("g"), count);
    KERNEL(c->on, second_kernel, blocks, 256, 0, F("v"), F("g"), count);
    KERNEL(c->on, update_kernel, blocks, 256, 0, F("p"), F("m"), F("v"), f, count);
    KERNEL(c->on, copy_kernel, blocks, 256, 0, X("copy"), F("p"), count);
}

// Computes one element's step. adamw_kernel1 takes W elements per thread: 1, or the 4 floats of 16 bytes; a shorter
// tail is taken one by one.
static __device__ __forceinline__ void step_of(float *p, float *m, float *v, float g, Factors f) {
    float grad = g * GRAD_SCALE;
    *m += (1 - BETA1) * (grad - *m);
    *v = *v * BETA2 + grad * (1 - BETA2) * grad;
    *p = *p * f.keep - f.rate * *m / (sqrtf(*v) * f.root + EPS);
}
template <int W>
static __global__ void __launch_bounds__(256)
    adamw_kernel1(float *p, float *m, float *v, const float *g, floatX *copy, Factors f, int64_t count) {
    int64_t i = thread_number() * W;
    float p1[W], m1[W], v1[W], g1[W];
    if (i >= count) return;
    load_some(p1, p + i, count - i);
    load_some(m1, m + i, count - i);
    load_some(v1, v + i, count - i);
    load_some(g1, g + i, count - i);
    for (int j = 0; j < W; j++) step_of(&p1[j], &m1[j], &v1[j], g1[j], f);
    store_some(p + i, p1, count - i);
    store_some(m + i, m1, count - i);
    store_some(v + i, v1, count - i);
    store_some(copy + i, p1, count - i);
}
template <int W> static void adamw_one_pass(Case *c) {
    KERNEL(c->on, adamw_kernel1<W>, blocks_for(c->size[0], 256 * W), 256, 0, F("p"), F("m"), F("v"), F("g"), X("copy"),
           factors(c), c->size[0]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 five passes",
     "A kernel for each line of the formula, like separate tensor operations in PyTorch: p is read three times and "
     "written twice; m, v and g are read twice.",
     adamw_passes},
    {"2 one pass", "One thread computes all of an element's step and its copy: each tensor is read and written once.",
     adamw_one_pass<1>},
    {"3 vectors", "Loads of 16 bytes: each thread has four loads of four elements in flight.", adamw_one_pass<4>},
    {"in use", "The op of lib/ops/cuda.", adamw_in_use}};

PAGE({&op, op_versions})
