/* attention_mma.cu: attention on tensor cores by mma.sync, the third step after the two of attention.cu.
 *
 * In bf16, for heads of 64 or 128 elements, on GPUs of compute capability 8.0 or higher, after FlashAttention-2 (Dao
 * 2023). A block has a tile of queries (in backward, of keys) and goes over the keys (the queries); each warp loads
 * fragments from tiles in shared memory and multiplies by itself. Backward sums dq over blocks by atomic additions or,
 * in a fixed order, by a second kernel that computes S and dP again.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp attention_mma.cu -lcublasLt
 * with attention_backward.h attention_forward.h attention_shape.h page.cuh page.h page_rate.cuh lib/device/kernel.h
 * lib/ops/cuda/attention_common.cuh lib/ops/cuda/attention_fragments.cuh lib/ops/cuda/attention_mma.cuh
 * lib/ops/cuda/attention_prepare.cuh lib/ops/cuda/attention_softmax.cuh lib/ops/cuda/vectors.cuh
 * lib/ops/ops_common.h */
#define PRECISION_BF16 1 // as -DPRECISION_BF16 does
#include "../../lib/ops/cuda/attention_mma.cuh"
#include "attention_backward.h" // defines: backward_case, backward_prepare, backward_definition
#include "attention_forward.h"  // defines: forward_case, forward_definition
#include "page_rate.cuh"        // defines: page_rate_open

static void forward_mma(Case *c) {
    AttentionShape s = shape_of(c);
    AttentionCall a = attention_forward_call(&s, X("out"), F("lse"), X("q"), X("k"), X("v"), NULL);
    c->left_out = cuda_attention_support(s.HD) != ATTENTION_TENSOR_CORES;
    if (s.HD == 64) attention_forward_mma_launch<64>(c->on, &a);
    if (s.HD == 128) attention_forward_mma_launch<128>(c->on, &a);
}
static void compute_out_and_lse(Case *c) { forward_mma(c); }

static void backward_by_mma(Case *c, int deterministic) {
    AttentionShape s = shape_of(c);
    OpStream on = *c->on;
    on.deterministic = deterministic;
    void *workspace = page_scratch(c, cuda_attention_scratch(&on, &s, 1));
    AttentionCall a = attention_backward_call(&s, X("dq"), X("dk"), X("dv"), X("dout"), X("out"), F("lse"), X("q"),
                                              X("k"), X("v"), workspace);
    if (deterministic) a.dq_sums = NULL;
    c->left_out = cuda_attention_support(s.HD) != ATTENTION_TENSOR_CORES;
    if (s.HD == 64) attention_backward_mma_launch<64>(&on, &a);
    if (s.HD == 128) attention_backward_mma_launch<128>(&on, &a);
}
static void backward_mma(Case *c) { backward_by_mma(c, 0); }
static void backward_in_order(Case *c) { backward_by_mma(c, 1); }

static const Version forward_versions[PAGE_VERSIONS] = {
    {"3 mma.sync",
     "Both matmuls run on tensor cores. The probabilities stay in registers from one to the other, and the next keys "
     "are loaded meanwhile.",
     forward_mma}};

static const Version backward_versions[PAGE_VERSIONS] = {
    {"3 mma.sync",
     "On tensor cores. Blocks that own keys compute all five matmuls, and dq is summed in fp32 by atomic additions. "
     "Where there would be fewer than 256 blocks, the query heads of a group are divided over blocks, whose dk and dv "
     "are then added.",
     backward_mma},
    {"in use, deterministic",
     "The same without atomic additions: a second kernel, whose blocks own queries, computes S and dP again for dq.",
     backward_in_order}};

static const Op forward = {"attention_forward", forward_case, NULL, forward_definition, forward_mma,
                           ATTENTION_SIZES(64)};
static const Op backward = {"attention_backward", backward_case, backward_prepare, backward_definition, backward_mma,
                            ATTENTION_SIZES(64)};

PAGE_THAT_OPENS(page_rate_open, {&forward, forward_versions}, {&backward, backward_versions})
