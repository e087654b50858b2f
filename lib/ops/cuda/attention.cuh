/* attention.cuh: attention on NVIDIA GPUs: which kernels a call needs, and their launches. The contracts are in
 * lib/ops/ops.h.
 *
 * In bf16, heads of 64 or 128 elements whose rows are aligned to 16 bytes run on tensor cores; everything else runs in
 * fp32 arithmetic, which for bf16 is slow. T x T scores are never stored. Every kernel gives the same bits on each run,
 * except dq on tensor cores, whose additions are in no fixed order unless on->deterministic.
 */
#ifndef CUDA_ATTENTION_CUH
#define CUDA_ATTENTION_CUH
#include "attention_common.cuh" // defines: AttentionCall, ATTENTION_KERNEL
#include "attention_hopper.cuh" // defines: attention_hopper_launch, hopper_map_encoder
#include "attention_mma.cuh"    // defines: attention_forward_mma, attention_backward_mma
#include "attention_plain.cuh"  // defines: attention_forward_plain, attention_backward_keys_plain

// ---------------------------------------------------------------------------
// before backward

/* Computes D and lse2 and zeroes dq_sums. A block has ATTENTION_PAD queries of a head; LANES threads share a row. HD /
 * 8 threads load 16 bytes each, AHEAD rows at a time; without vectors, a warp loads single elements. dq_sums is zeroed
 * first, because no load has to arrive for it. With fewer than 4 blocks per multiprocessor in __launch_bounds__, ptxas
 * splits the loads into several batches, here and in the rounding of dq. */
template <int LANES>
static __global__ void __launch_bounds__(256, 4) attention_backward_prepare(const AttentionCall a) {
    enum { ROWS = 256 / LANES, VECTORS = LANES < 32, AHEAD = VECTORS ? 4 : 1, W = VECTORS ? WIDE : 1 };
    static_assert(ATTENTION_PAD % (AHEAD * ROWS) == 0, "a block stays within its rows");
    const AttentionShape &s = a.s;
    const int lane = (int)threadIdx.x % LANES, tiles = a.padded / ATTENTION_PAD;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * ATTENTION_PAD;
    const int b = (int)blockIdx.x / s.NH / tiles;
    const int64_t first = ((int64_t)b * s.NH + h) * a.padded + t0;
    const int64_t lse_first = ((int64_t)b * s.NH + h) * s.Tq;
    const float4 zero = {0, 0, 0, 0};
    for (int i = (int)threadIdx.x; a.dq_sums && i < ATTENTION_PAD * s.HD / 4; i += 256)
        ((float4 *)(void *)(a.dq_sums + first * s.HD))[i] = zero;
    ROLLED for (int row = (int)threadIdx.x / LANES; row < ATTENTION_PAD; row += AHEAD * ROWS) {
        Waiting<W> x[AHEAD] = {}, y[AHEAD] = {};
        float lse[AHEAD], v[W], w[W];
        UNROLL for (int r = 0; r < AHEAD; r++) {
            const int t = t0 + row + r * ROWS;
            const int64_t at = ((int64_t)b * s.Tq + t) * s.o_stride + h * s.HD + lane * W;
            lse[r] = t < s.Tq ? a.lse_read[lse_first + t] : -INFINITY;
            if (t < s.Tq && VECTORS) fetch(x[r], a.dout + at);
            if (t < s.Tq && VECTORS) fetch(y[r], a.out_read + at);
        }
        issue_loads();
        UNROLL for (int r = 0; r < AHEAD; r++) {
            const int t = t0 + row + r * ROWS;
            const int64_t at = ((int64_t)b * s.Tq + t) * s.o_stride + h * s.HD;
            float sum = 0;
            unpack(v, x[r]);
            unpack(w, y[r]);
            UNROLL for (int j = 0; j < W && VECTORS; j++) sum = fmaf(v[j], w[j], sum);
            for (int d = lane; d < s.HD && t < s.Tq && !VECTORS; d += LANES)
                sum = fmaf(to_float(a.dout[at + d]), to_float(a.out_read[at + d]), sum);
            for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane) continue;
            a.D[first + row + r * ROWS] = sum;
            a.lse2[first + row + r * ROWS] = lse[r] == -INFINITY ? INFINITY : lse[r] * LOG2_E;
        }
    }
}

// ---------------------------------------------------------------------------
// the choice of kernels and the work space

typedef enum { ATTENTION_NONE, ATTENTION_PLAIN, ATTENTION_TENSOR_CORES } AttentionSupport;

/* Which kernels compute heads of HD elements. */
static AttentionSupport cuda_attention_support(int HD) {
    if (HD < 1 || HD > 256) return ATTENTION_NONE;
    return FLOATX == DTYPE_BF16 && (HD == 64 || HD == 128) ? ATTENTION_TENSOR_CORES : ATTENTION_PLAIN;
}

/* A block of backward has a tile of keys, and goes over all query heads that share them. Where that makes too few
 * blocks, the heads are split into equal parts with a block each, whose dk and dv are then added in order. The number
 * of parts decides bits, so it depends on the shape alone, and not on the GPU. */
static int attention_parts(const AttentionShape *s) {
    int group = s->NH / s->NKV, parts = 1;
    int64_t blocks = s->B * s->NKV * blocks_of(s->Tk, ATTENTION_PAD);
    if (cuda_attention_support(s->HD) != ATTENTION_TENSOR_CORES) return 1;
    while (parts < group && (group % parts || blocks * parts < ATTENTION_BLOCKS)) parts++;
    return parts;
}

/* Elements of part_sums. */
static int64_t attention_part_sums(const AttentionShape *s, int parts) {
    return parts > 1 ? parts * s->B * s->NKV * round_up(s->Tk, ATTENTION_PAD) * 2 * s->HD : 0;
}

static size_t cuda_attention_scratch(const OpStream *on, const AttentionShape *s, int backward) {
    int sums = cuda_attention_support(s->HD) == ATTENTION_TENSOR_CORES && !on->deterministic;
    int64_t rows = attention_rows(s) * (2 + (sums ? s->HD : 0));
    return backward ? (size_t)(rows + attention_part_sums(s, attention_parts(s))) * sizeof(float) : 0;
}

static AttentionCall attention_call(const AttentionShape *s, const floatX *q, const floatX *k, const floatX *v,
                                    float *workspace) {
    int64_t groups = (int64_t)s->B * s->NKV, bytes = (int64_t)s->Tk * s->HD * 2 * (int64_t)sizeof *k; // of K and V
    AttentionCall a;
    memset(&a, 0, sizeof a);
    a.s = *s;
    a.q = q;
    a.k = k;
    a.v = v;
    a.D = workspace;
    a.lse2 = workspace + attention_rows(s);
    a.parts = attention_parts(s);
    a.part_sums = a.parts > 1 ? workspace + 2 * attention_rows(s) : NULL;
    a.dq_sums = workspace + 2 * attention_rows(s) + attention_part_sums(s, a.parts);
    a.padded = (int)round_up(s->Tq, ATTENTION_PAD);
    a.section = (int)max_i64(1, min_i64(groups, ATTENTION_L2 / bytes));
    a.scale = 1.0f / sqrtf((float)s->HD);
    a.scale2 = a.scale * LOG2_E;
    return a;
}

/* Chooses the kernels of attention_hopper.cuh where they can run. Returns what keeps them from running on a GPU of
 * compute capability 9.0, in words; otherwise NULL. `scratch`: 4 bytes of the GPU's memory. */
static const char *attention_open(OpStream *on, int *scratch) {
#ifdef PRECISION_BF16
    int gpu = 0, major = 0, minor = 0, has_code = 0;
    const char *what = "asking for the GPU's compute capability";
    on->encode_tensor_map = NULL;
    on->hopper_attention = 0;
    cuda_check(cudaGetDevice(&gpu), what);
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu), what);
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu), what);
    if (major != 9 || minor != 0) return NULL;
    KERNEL(on, hopper_code_kernel, 1, 1, 0, scratch);
    cuda_check(cudaMemcpyAsync(&has_code, scratch, sizeof has_code, cudaMemcpyDeviceToHost, on->stream), what);
    cuda_check(cudaStreamSynchronize(on->stream), what);
    if (!has_code) return "this program was not compiled for sm_90a: build with make CUDA=1";
    on->encode_tensor_map = (void *)hopper_map_encoder();
    if (!on->encode_tensor_map)
        return "the NVIDIA driver has no tensor maps (cuTensorMapEncodeTiled): install one for CUDA 12 or newer";
    on->hopper_attention = 1;
#else
    (void)on;
    (void)scratch;
#endif
    return NULL;
}

// ---------------------------------------------------------------------------
// launches

#ifdef PRECISION_BF16
/* Whether tensor cores can compute this call: the head's size, and rows that are aligned to 16 bytes. */
static int attention_on_tensor_cores(const AttentionCall *a) {
    const AttentionShape *s = &a->s;
    const void *const tensors[9] = {a->q, a->k, a->v, a->out, a->out_read, a->dout, a->dq, a->dk, a->dv};
    uintptr_t bits = (uintptr_t)(s->q_stride | s->k_stride | s->v_stride | s->o_stride) * sizeof(bf16);
    for (int i = 0; i < 9; i++) bits |= (uintptr_t)tensors[i]; // NULL: not a tensor of this call
    return cuda_attention_support(s->HD) == ATTENTION_TENSOR_CORES && bits % 16 == 0;
}
template <int HD, int KEYS> static void attention_backward_mma_launch(OpStream *on, const AttentionCall *a) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape *s = &a->s;
    int64_t tiles = attention_blocks(s, s->NKV, s->Tk, KEYS), blocks = tiles * a->parts;
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 1>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL((attention_backward_round_dq<HD, KEYS>), attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                         Z::THREADS, 0, *a);
    } else {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 0>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL(attention_backward_queries_mma<HD>, attention_blocks(s, s->NH, s->Tq, 128), 128,
                         (2 * 128 * HD + 2 * 4096) * sizeof(bf16), *a);
    }
    if (a->part_sums) ATTENTION_KERNEL((attention_backward_join<HD, KEYS>), 2 * tiles, KEYS, 0, *a);
}
/* GPUs whose blocks can have only 99 KB of shared memory get smaller tiles in backward. */
template <int HD> static void attention_tensor_core_launch(OpStream *on, const AttentionCall *a) {
    if (!a->out)
        ATTENTION_KERNEL(attention_backward_prepare<HD / 8>, attention_rows(&a->s) / ATTENTION_PAD, 256, 0, *a);
    if (on->hopper_attention && a->s.Tk > 0) attention_hopper_launch<HD>(on, a);
    else if (a->out)
        ATTENTION_KERNEL(attention_forward_mma<HD>, attention_blocks(&a->s, a->s.NH, a->s.Tq, 128), 128,
                         (128 * HD + 2 * 8192) * sizeof(bf16), *a);
    else if (on->shared_limit >= Backward<HD, 128>::BYTES) attention_backward_mma_launch<HD, 128>(on, a);
    else attention_backward_mma_launch<HD, 64>(on, a);
}
#endif
template <int DIM> static void attention_plain_launch(OpStream *on, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    const AttentionShape *s = &a->s;
    if (a->out) {
        ATTENTION_KERNEL(attention_forward_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::FORWARD), PLAIN_THREADS,
                         Z::FORWARD_BYTES, *a);
        return;
    }
    ATTENTION_KERNEL(attention_backward_prepare<32>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    ATTENTION_KERNEL(attention_backward_keys_plain<DIM>, attention_blocks(s, s->NKV, s->Tk, Z::BACKWARD), PLAIN_THREADS,
                     Z::BACKWARD_BYTES, *a);
    ATTENTION_KERNEL(attention_backward_queries_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::BACKWARD),
                     PLAIN_THREADS, Z::BACKWARD_BYTES, *a);
}

/* Forward if the call has an output, otherwise backward. */
static void attention_launch(OpStream *on, AttentionCall *a) {
    int HD = a->s.HD;
    if (cuda_attention_support(HD) == ATTENTION_NONE)
        run_failure("attention: heads of %d elements reached the GPU; its kernels compute 1 to 256", HD);
    if (!a->s.B || !a->s.Tq) return;
#ifdef PRECISION_BF16
    if (attention_on_tensor_cores(a)) {
        if (on->deterministic) a->dq_sums = NULL;
        if (HD == 64) attention_tensor_core_launch<64>(on, a);
        else attention_tensor_core_launch<128>(on, a);
        return;
    }
#endif
    a->dq_sums = NULL;
    if (HD <= 64) attention_plain_launch<64>(on, a);
    else if (HD <= 128) attention_plain_launch<128>(on, a);
    else attention_plain_launch<256>(on, a);
}

static void cuda_attention_forward(OpStream *on, floatX *out, float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_call(s, q, k, v, (float *)workspace);
    a.out = out;
    a.lse = lse;
    attention_launch(on, &a);
}

static void cuda_attention_backward(OpStream *on, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                    const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                    const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_call(s, q, k, v, (float *)workspace);
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    a.dout = dout;
    a.out_read = out;
    a.lse_read = lse;
    attention_launch(on, &a);
}

#endif
