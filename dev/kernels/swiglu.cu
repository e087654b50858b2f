/* swiglu.cu: the steps of SwiGLU on a GPU.
 *
 * A GPU has arithmetic to spare here: loads hide an exponential and a division. What counts is that each byte is moved
 * once and that enough bytes are in flight: memory answers after about 600 ns, so an H100 reaches its 3 TB/s only with
 * about 2 MB requested at any time, 15 KB for each multiprocessor.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp swiglu.cu -o swiglu
 * with page.cuh page.h swiglu.h lib/device/kernel.h lib/ops/cuda/swiglu.cuh lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/swiglu.cuh"
#include "swiglu.h"

// ---------------------------------------------------------------------------
// forward

static __device__ __forceinline__ float silu_of(float g) { return g / (1.0f + expf(-g)); }

// Each block has 256 elements of one row, one per thread: two loads and a store of 2 or 4 bytes.
static __global__ void __launch_bounds__(256)
    forward_kernel1(floatX *h /* (N,F) */, const floatX *gate_up /* (N,2F) */, int64_t F) {
    int64_t n = blockIdx.x / blocks_of(F, 256), f = blockIdx.x % blocks_of(F, 256) * 256 + threadIdx.x;
    if (f >= F) return;
    float g = to_float(gate_up[n * 2 * F + f]), up = to_float(gate_up[n * 2 * F + F + f]);
    h[n * F + f] = from_float(silu_of(g) * up);
}
static void forward_elements(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    KERNEL(c->on, forward_kernel1, (unsigned)(N * blocks_of(F, 256)), 256, 0, X("h"), X("gate_up"), F);
}

// As kernel 1, with W elements per thread: 16 bytes per load, or W = 1 if F is not a multiple of WIDE, since then not
// all rows are aligned to 16 bytes.
template <int W>
static __global__ void __launch_bounds__(256) forward_kernel2(floatX *h, const floatX *gate_up, int64_t F) {
    int64_t across = blocks_of(F, 256 * W), n = blockIdx.x / across, f = (blockIdx.x % across * 256 + threadIdx.x) * W;
    float g[W], up[W];
    if (f >= F) return;
    load(g, gate_up + n * 2 * F + f);
    load(up, gate_up + n * 2 * F + F + f);
    for (int i = 0; i < W; i++) g[i] = silu_of(g[i]) * up[i];
    store(h + n * F + f, g);
}
static void forward_vectors(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    // W is WIDE if F is a multiple of it, else 1
    KERNEL_BY_WIDTH(c->on, F % WIDE == 0, WIDE, forward_kernel2, (unsigned)(N * blocks_of(F, 256 * W)), 256, 0, X("h"),
                    X("gate_up"), F);
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 an element a thread",
     "Adjacent threads take adjacent elements, so a warp's loads have no gaps: 64 bytes in bf16. But a thread has only "
     "4 bytes in flight (bf16), and the 2,048 threads that a multiprocessor can hold have 8 KB.",
     forward_elements},
    {"2 vectors",
     "Loads of 16 bytes: in bf16 the same bytes with an eighth of the instructions, and eight times as many in flight.",
     forward_vectors},
    {"in use", "The op of lib/ops/cuda, with the GPU's fast exponential and division.", forward_in_use}};

// ---------------------------------------------------------------------------
// backward, in place

// Two kernels with dsilu (N, F) between them, as automatic differentiation has it: the backward of h = silu up, then
// that of silu = gate sigmoid(gate).
static __global__ void __launch_bounds__(256)
    product_kernel(float *dsilu, floatX *gate_up, const floatX *dh, int64_t F, int64_t count) {
    int64_t i = thread_number();
    if (i >= count) return;
    floatX *gate = gate_up + i / F * 2 * F + i % F, *up = gate + F;
    float d = to_float(dh[i]);
    dsilu[i] = d * to_float(*up);
    *up = from_float(d * silu_of(to_float(*gate)));
}
static __global__ void __launch_bounds__(256)
    silu_kernel(floatX *gate_up, const float *dsilu, int64_t F, int64_t count) {
    int64_t i = thread_number();
    if (i >= count) return;
    floatX *gate = gate_up + i / F * 2 * F + i % F;
    float g = to_float(*gate), sigmoid = 1.0f / (1.0f + expf(-g));
    *gate = from_float(dsilu[i] * sigmoid * (1.0f + g * (1.0f - sigmoid)));
}
static void backward_two_ops(Case *c) {
    int64_t count = c->size[0] * c->size[1];
    float *dsilu = (float *)page_scratch(c, (size_t)count * sizeof(float));
    KERNEL(c->on, product_kernel, blocks_for(count, 256), 256, 0, dsilu, X("gate_up"), X("dh"), c->size[1], count);
    KERNEL(c->on, silu_kernel, blocks_for(count, 256), 256, 0, X("gate_up"), dsilu, c->size[1], count);
}

static __device__ __forceinline__ void both_gradients(float *gate, float *up, float d) {
    float sigmoid = 1.0f / (1.0f + expf(-*gate)), silu = *gate * sigmoid;
    *gate = d * *up * (sigmoid * (1.0f - silu) + silu);
    *up = d * silu;
}
static __global__ void __launch_bounds__(256)
    backward_kernel(floatX *gate_up, const floatX *dh, int64_t F, int64_t count) {
    int64_t i = thread_number();
    if (i >= count) return;
    floatX *gate = gate_up + i / F * 2 * F + i % F, *up = gate + F;
    float g = to_float(*gate), u = to_float(*up);
    both_gradients(&g, &u, to_float(dh[i]));
    *gate = from_float(g);
    *up = from_float(u);
}
static void backward_one_pass(Case *c) {
    int64_t count = c->size[0] * c->size[1];
    KERNEL(c->on, backward_kernel, blocks_for(count, 256), 256, 0, X("gate_up"), X("dh"), c->size[1], count);
}

template <int W>
static __global__ void __launch_bounds__(256) backward_vectors_kernel(floatX *gate_up, const floatX *dh, int64_t F) {
    int64_t across = blocks_of(F, 256 * W), n = blockIdx.x / across, f = (blockIdx.x % across * 256 + threadIdx.x) * W;
    floatX *gate = gate_up + n * 2 * F + f, *up = gate + F;
    float g[W], u[W], d[W];
    if (f >= F) return;
    load(g, gate);
    load(u, up);
    load(d, dh + n * F + f);
    for (int i = 0; i < W; i++) both_gradients(&g[i], &u[i], d[i]);
    store(gate, g);
    store(up, u);
}
static void backward_vectors(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    KERNEL_BY_WIDTH(c->on, F % WIDE == 0, WIDE, backward_vectors_kernel, (unsigned)(N * blocks_of(F, 256 * W)), 256, 0,
                    X("gate_up"), X("dh"), F);
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 two ops",
     "The backward of silu times up, then silu's, as automatic differentiation would do it: an fp32 tensor travels to "
     "memory and back in between.",
     backward_two_ops},
    {"2 one pass", "Both gradients from one sigmoid; each element is read and written once.", backward_one_pass},
    {"3 vectors",
     "Loads and stores of 16 bytes, and the division that finds row and column once per thread instead of once per "
     "element.",
     backward_vectors},
    {"in use", "The op of lib/ops/cuda, with the GPU's fast exponential and division.", backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
