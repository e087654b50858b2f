/* attention_hopper_forward.cu: attention forward on Hopper GPUs (H100, H200), steps 4 and 5 after attention_mma.cu.
 *
 * In bf16, for heads of 64 or 128 elements, after FlashAttention-3 (Shah et al. 2024). Tensor cores of compute
 * capability 9.0 read tiles of shared memory, which TMA has loaded, and multiply for four warps at once (wgmma).
 * Step 4 waits for each load and each matmul; step 5, in use, computes while both run.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=sm_90a -DUSE_CUDA -Xcompiler -fopenmp attention_hopper_forward.cu -lcublasLt
 * with attention_forward.h attention_shape.h page.cuh page.h page_rate.cuh lib/device/kernel.h
 * lib/ops/cuda/attention_common.cuh lib/ops/cuda/attention_fragments.cuh lib/ops/cuda/attention_hopper.cuh
 * lib/ops/cuda/attention_hopper_common.cuh lib/ops/cuda/attention_hopper_forward.cuh lib/ops/cuda/attention_softmax.cuh
 * lib/ops/cuda/hopper.cuh lib/ops/cuda/vectors.cuh lib/ops/ops_common.h */
#define PRECISION_BF16 1 // as -DPRECISION_BF16 does
#include "../../lib/ops/cuda/attention_hopper_forward.cuh"
#include "attention_forward.h" // defines: forward_case, forward_definition
#include "page_rate.cuh"       // defines: page_rate_open

// ---------------------------------------------------------------------------
// step 4

/* 64 queries of one head by one warpgroup, 128 keys at a time: it waits for each tile, then for each matmul. */
template <int HD> static __global__ void __launch_bounds__(128) wgmma_kernel(const __grid_constant__ HopperCall h) {
#if HOPPER_CODE
    enum { QUERIES = 64, KEYS = 128, N = KEYS / 8 };
    DYN_SHARED(bf16, memory);
    SHARED(uint64_t, full, 1); // an mbarrier: the tiles' bytes have arrived
    bf16 *qs = first_panel(memory), *ks = qs + QUERIES * HD, *vs = ks + KEYS * HD;
    const AttentionShape &s = h.call.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, thread = (int)threadIdx.x, warp = thread / 32;
    const AttentionPlace p = attention_place(h.call, (int)blockIdx.x, tiles, s.NH / s.NKV);
    const int t0 = (tiles - 1 - p.order) * QUERIES, end = seen_by(s, min(t0 + QUERIES, s.Tq) - 1);
    float o[1][HD / 8][4], base[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {{0, 0}}, rescale[1][2], c[1][N][4];
    uint32_t w[1][N / 2][4], rounded[1][HD / 16][4];
    fill(o, 0);
    if (thread == 0) {
        ptx_mbarrier_init(full, 1);
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    for (int j = 0; j < end; j += KEYS) {
        if (thread == 0) {
            ptx_mbarrier_arrive_expect(full, (2 * KEYS + (j ? 0 : QUERIES)) * HD * (int)sizeof(bf16));
            if (!j) hopper_load<HD>(qs, &h.q, full, QUERIES, p.h, t0, p.b);
            hopper_load<HD>(ks, &h.k, full, KEYS, p.kv, j, p.b);
            hopper_load<HD>(vs, &h.v, full, KEYS, p.kv, j, p.b);
        }
        ptx_mbarrier_wait(full, j / KEYS % 2);
        wgmma_scores<HD>(c, qs, QUERIES, ks, KEYS);
        wgmma_finish<0>(c);
        mma_mask<0>(c, s, t0 + warp * 16, j);
        softmax_weights(c, rescale, base, sum, h.call.scale2);
        rescale_rows(o, rescale);
        mma_pack(w, c, 1);
        wgmma_weighted<HD>(o, w, vs);
        wgmma_finish<0>(o);
        __syncthreads(); // no warp reads keys and values any more
    }
    forward_finish<HD>(h.call, p, t0 + warp * 16, thread % 32, o, base, sum);
    mma_pack(rounded, o, 1);
    hopper_write<HD>(&h.out, qs, QUERIES, rounded, 0, p.h, t0, p.b); // in place of the queries
    if (thread == 0) ptx_tma_store_wait_read<0>();
#endif
}
template <int HD> static void forward_wgmma_launch(OpStream *on, const AttentionCall *a) {
    const AttentionShape *s = &a->s;
    HopperCall h = ZERO;
    h.call = *a;
    h.q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, 64);
    h.k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, 128);
    h.v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, 128);
    h.out = hopper_map(on, a->out, s, s->Tq, s->NH, s->o_stride, 64);
    ATTENTION_KERNEL(wgmma_kernel<HD>, attention_blocks(s, s->NH, s->Tq, 64), 128,
                     (64 + 2 * 128) * HD * sizeof(bf16) + PANEL_SLACK, h);
}

// ---------------------------------------------------------------------------
// the versions

/* The arguments of a call. Says in c->left_out whether this GPU has no wgmma, or not for heads of this size. */
static AttentionCall forward_call(Case *c, const AttentionShape *s) {
    AttentionCall a = attention_forward_call(s, X("out"), F("lse"), X("q"), X("k"), X("v"), NULL);
    c->left_out = cuda_attention_support(s->HD) != ATTENTION_TENSOR_CORES || !c->on->encode_tensor_map;
    return a;
}
static void forward_wgmma(Case *c) {
    AttentionShape s = shape_of(c);
    AttentionCall a = forward_call(c, &s);
    if (c->left_out) return;
    if (s.HD == 64) forward_wgmma_launch<64>(c->on, &a);
    else forward_wgmma_launch<128>(c->on, &a);
}
static void forward_producer(Case *c) {
    AttentionShape s = shape_of(c);
    AttentionCall a = forward_call(c, &s);
    if (c->left_out) return;
    if (s.HD == 64) attention_forward_hopper_launch<64>(c->on, &a);
    else attention_forward_hopper_launch<128>(c->on, &a);
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"4 wgmma",
     "Four warps multiply 64 queries by tiles in shared memory, which TMA has loaded: no operand but the probabilities "
     "passes through registers. Each step waits for the one before it.",
     forward_wgmma},
    {"5 producer, two consumers",
     "A warp loads tiles ahead, and two warpgroups take turns: one computes exponentials while the tensor cores work "
     "for the other. A block computes several tiles, so that its next loads overlap with its output.",
     forward_producer}};

static const Op forward = {"attention_forward", forward_case, NULL, forward_definition, forward_producer,
                           ATTENTION_SIZES(64)};

static void hopper_page_open(OpStream *on) {
    const char *missing = attention_open(on, (int *)page_alloc(sizeof(int)));
    if (missing) fprintf(stderr, "note: the kernels for Hopper cannot run: %s\n", missing);
    page_rate_open(on);
}

PAGE_THAT_OPENS(hopper_page_open, {&forward, forward_versions})
