/* attention_hopper_backward.cu: attention backward on Hopper GPUs (H100, H200), steps 4 and 5 after attention_mma.cu.
 *
 * In bf16, for heads of 64 or 128 elements, by wgmma and TMA, after FlashAttention-3 (Shah et al. 2024): a producer
 * warp loads tiles ahead, and two warpgroups compute (attention_hopper_forward.cu introduces both).
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=sm_90a -DUSE_CUDA -Xcompiler -fopenmp attention_hopper_backward.cu -lcublasLt
 * with attention_backward.h attention_shape.h page.cuh page.h page_rate.cuh lib/device/kernel.h
 * lib/ops/cuda/attention_common.cuh lib/ops/cuda/attention_fragments.cuh lib/ops/cuda/attention_hopper.cuh
 * lib/ops/cuda/attention_hopper_backward.cuh lib/ops/cuda/attention_hopper_common.cuh
 * lib/ops/cuda/attention_prepare.cuh lib/ops/cuda/hopper.cuh lib/ops/cuda/vectors.cuh lib/ops/ops_common.h */
#define PRECISION_BF16 1 // as -DPRECISION_BF16 does
#include "../../lib/ops/cuda/attention_hopper_backward.cuh"
#include "attention_backward.h" // defines: backward_case, backward_prepare, backward_definition
#include "page_rate.cuh"        // defines: page_rate_open

/* out and lse, which backward reads, simply: a warp per query of a head, with HD / 32 elements in each lane. */
static __global__ void __launch_bounds__(256)
    out_and_lse_kernel(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v, AttentionShape s) {
    int64_t row = thread_number() / WARP, h = row % s.NH, t = row / s.NH % s.Tq, b = row / s.NH / s.Tq;
    int64_t lane = threadIdx.x % WARP, at = q_at(&s, b, t, h) + lane, count = s.HD / WARP;
    float o[4] = {}, max = -INFINITY, sum = 0; // heads of up to 128 elements
    if (b >= s.B) return;
    for (int64_t j = 0; j < keys_seen(&s, t); j++) {
        int64_t key = k_at(&s, b, j, h) + lane;
        float dot = 0, before = max;
        for (int i = 0; i < count; i++) dot += to_float(q[at + i * WARP]) * to_float(k[key + i * WARP]);
        float score = warp_sum(dot) / sqrtf((float)s.HD);
        max = fmaxf(max, score);
        float rescale = expf(before - max), p = expf(score - max);
        sum = sum * rescale + p;
        for (int i = 0; i < count; i++) o[i] = o[i] * rescale + p * to_float(v[key + i * WARP]);
    }
    for (int i = 0; i < count; i++) out[at + i * WARP] = from_float(sum > 0 ? o[i] / sum : 0);
    if (lane == 0) lse[l_at(&s, b, t, h)] = max + logf(sum);
}
static void compute_out_and_lse(Case *c) {
    AttentionShape s = shape_of(c);
    KERNEL(c->on, out_and_lse_kernel, blocks_for((int64_t)s.B * s.Tq * s.NH * WARP, 256), 256, 0, X("out"), F("lse"),
           X("q"), X("k"), X("v"), s);
}

static void backward_by_wgmma(Case *c, int deterministic) {
    AttentionShape s = shape_of(c);
    OpStream on = *c->on;
    on.deterministic = deterministic;
    void *workspace = page_scratch(c, cuda_attention_scratch(&on, &s, 1));
    AttentionCall a = attention_backward_call(&s, X("dq"), X("dk"), X("dv"), X("dout"), X("out"), F("lse"), X("q"),
                                              X("k"), X("v"), workspace);
    if (deterministic) a.dq_sums = NULL;
    c->left_out = cuda_attention_support(s.HD) != ATTENTION_TENSOR_CORES || !on.encode_tensor_map;
    if (c->left_out) return;
    if (s.HD == 64) attention_backward_hopper_launch<64>(&on, &a);
    else attention_backward_hopper_launch<128>(&on, &a);
}
static void backward_wgmma_twice(Case *c) { backward_by_wgmma(c, 1); }
static void backward_wgmma(Case *c) { backward_by_wgmma(c, 0); }

static const Version backward_versions[PAGE_VERSIONS] = {
    {"4 wgmma, twice",
     "As the second step (attention.cu), in a fixed order of additions, but by wgmma on tiles that a producer warp "
     "loads by TMA. P and dS are the left operands of the next matmuls, from registers.",
     backward_wgmma_twice},
    {"5 wgmma",
     "Five matmuls: dS goes to shared memory, where both consumers read it as the transposed operand of dQ, which is "
     "summed by atomic additions of 16 bytes while dK is computed.",
     backward_wgmma}};

static const Op backward = {"attention_backward", backward_case, backward_prepare, backward_definition, backward_wgmma,
                            ATTENTION_SIZES(64)};

static void hopper_page_open(OpStream *on) {
    const char *missing = attention_open(on, (int *)page_alloc(sizeof(int)));
    if (missing) fprintf(stderr, "note: the kernels for Hopper cannot run: %s\n", missing);
    page_rate_open(on);
}

PAGE_THAT_OPENS(hopper_page_open, {&backward, backward_versions})
