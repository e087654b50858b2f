/* cross_entropy.cu: the steps of the loss on a GPU.
 *
 * A block has a row: in bf16 a quarter of a megabyte of logits for Llama 3's vocabulary. One pass for the largest
 * logit, one for the sum and one for the gradient read it three times; once is enough if the row fits on the
 * multiprocessor. The gradient takes the place of the logits: each thread overwrites what it has read itself.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp cross_entropy.cu -o cross_entropy
 * with cross_entropy.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/cross_entropy.cuh lib/ops/cuda/vectors.cuh
 * lib/ops/logits.h */
#include "../../lib/ops/cuda/cross_entropy.cuh"
#include "cross_entropy.h"

/* Gradient of a row from its largest logit and the inverse of its sum, W elements a thread and step. */
template <int W>
static __device__ void gradient_of(floatX *logits, int32_t target, int64_t V, float max, float inverse) {
    float v[W] = {};
    for (int64_t i = threadIdx.x * W; i < V; i += blockDim.x * W) {
        load<true>(v, logits + i);
        for (int j = 0; j < W; j++) v[j] = expf(v[j] - max) * inverse - (i + j == target);
        store(logits + i, v);
    }
}
/* A row without a target: its gradient is zero, and the block is done. */
static __device__ bool ignored_row(float *losses, floatX *logits, int32_t target, int64_t V) {
    if (target >= 0) return false;
    for (int64_t i = threadIdx.x; i < V; i += blockDim.x) logits[i] = from_float(0);
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return true;
}
static __device__ float block_largest(float x, float *sums) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(sums[threadIdx.x % WARP % (blockDim.x / WARP)]);
}

// z_losses: NULL without z-loss.
static __global__ void __launch_bounds__(256)
    loss_kernel1(float *losses, float *z_losses, floatX *logits, const int32_t *targets, int64_t V) {
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    floatX *row = logits + blockIdx.x * V;
    float largest = -INFINITY, sum = 0;
    int32_t target = targets[blockIdx.x];
    if (z_losses && threadIdx.x == 0) z_losses[blockIdx.x] = 0;
    if (ignored_row(losses, row, target, V)) return;
    float target_logit = widen(row[target]); // before the first barrier, after which the gradient overwrites it
    for (int64_t i = threadIdx.x; i < V; i += blockDim.x) largest = fmaxf(largest, widen(row[i]));
    float max = block_largest(largest, maxima);
    for (int64_t i = threadIdx.x; i < V; i += blockDim.x) sum += expf(widen(row[i]) - max);
    float total = block_sum(sum, sums), log_z = logf(total) + max;
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = logf(total) + (max - target_logit);
        if (z_losses) z_losses[blockIdx.x] = Z_WEIGHT * log_z * log_z;
    }
    gradient_of<1>(row, target, V, max, (z_losses ? 1 + 2 * Z_WEIGHT * log_z : 1) / total);
}
static void loss_three_passes(Case *c) {
    KERNEL(c->on, loss_kernel1, (unsigned)c->size[0], 256, 0, F("losses"), z_loss_of(c).losses, X("logits"),
           I("targets"), c->size[1]);
}

// One pass for both: a thread's sum is relative to its own largest logit so far, and is rescaled when that grows.
template <int W>
static __global__ void __launch_bounds__(512)
    loss_kernel2(float *losses, floatX *logits, const int32_t *targets, int64_t V) {
    SHARED(float, maxima, WARP);
    SHARED(float, sums, WARP);
    floatX *row = logits + blockIdx.x * V;
    float largest = -INFINITY, sum = 0, v[W];
    int32_t target = targets[blockIdx.x];
    if (ignored_row(losses, row, target, V)) return;
    float target_logit = widen(row[target]); // before the first barrier, after which the gradient overwrites it
    for (int64_t i = threadIdx.x * W; i < V; i += blockDim.x * W) {
        float before = largest;
        load(v, row + i);
        for (int j = 0; j < W; j++) largest = fmaxf(largest, v[j]);
        if (largest > before) sum *= expf(before - largest);
        for (int j = 0; j < W && largest > -INFINITY; j++) sum += expf(v[j] - largest);
    }
    float max = block_largest(largest, maxima);
    float total = block_sum(largest > -INFINITY ? sum * expf(largest - max) : 0, sums);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) + (max - target_logit);
    gradient_of<W>(row, target, V, max, 1 / total);
}
static void loss_online(Case *c) {
    KERNEL_BY_WIDTH(c->on, c->size[1] % WIDE == 0, WIDE, loss_kernel2, (unsigned)c->size[0], 512, 0, F("losses"),
                    X("logits"), I("targets"), c->size[1]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 three passes",
     "A block per row, one element per thread at a time: largest logit, sum, gradient. The row is read three times.",
     loss_three_passes},
    {"2 online, vectors",
     "Largest logit and sum in one pass (Milakov & Gimelshein 2018), with loads of 16 bytes: the row is read twice.",
     loss_online},
    {"in use",
     "The op of lib/ops/cuda: the end of the row stays in shared memory, which in bf16 holds 115,712 logits on an "
     "H100; "
     "the beginning of a longer row is still in the L2 cache. So memory is read once.",
     loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here. A slice's logits are read a "
     "second time for the gradient.",
     loss_in_slices}};

static const Version z_loss_versions[PAGE_VERSIONS] = {
    {"1 three passes", "As for the loss alone, with a factor for the row's probabilities.", loss_three_passes},
    {"in use", "The same op as without z-loss. The factor multiplies the inverse of the row's sum.", loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here: each has log Z from the three "
     "numbers per row that all ranks know.",
     loss_in_slices}};

static void loss_open(OpStream *on) { cross_entropy_open(on); }
PAGE_THAT_OPENS(loss_open, {&op, op_versions}, {&z_loss, z_loss_versions})
