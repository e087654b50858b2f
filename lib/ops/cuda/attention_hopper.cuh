/* attention_hopper.cuh: launches of the attention kernels for GPUs of compute capability 9.0 (H100, H200).
 *
 * After FlashAttention-3 (Shah et al. 2024). A block has two consumer warpgroups, which compute by wgmma, and one
 * producer warp, which loads tiles by TMA. They synchronize by mbarriers: a stage of shared memory is full when its
 * bytes have arrived, and empty when all warps of the consumers have read it. The formulas are those of
 * attention_mma.cuh, whose mask and softmax these kernels use.
 */
#ifndef CUDA_ATTENTION_HOPPER_CUH
#define CUDA_ATTENTION_HOPPER_CUH
#include "attention_hopper_backward.cuh" // defines: attention_backward_hopper, attention_backward_queries_hopper
#include "attention_hopper_forward.cuh"  // defines: attention_forward_hopper
#include <cudaTypedefs.h>                // defines: PFN_cuTensorMapEncodeTiled_v12000
#if !defined(CUDA_ON_CPU) && CUDART_VERSION < 12050
#error "The CUDA build needs CUDA toolkit 12.5 or newer"
#endif

#ifdef PRECISION_BF16
/* Asks the driver for its function that makes tensor maps; NULL if it has none. */
static PFN_cuTensorMapEncodeTiled_v12000 hopper_map_encoder(void) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) cudaGetLastError(); // else the next launch would report it
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)function
                                                                        : NULL;
}

/* Tells the host whether this program has the kernels' code for its GPU: built for compute_90 instead of compute_90a
 * they are empty. */
static __global__ void __launch_bounds__(1) hopper_code_kernel(int *has_code) { *has_code = HOPPER_CODE; }

/* Describes x (B, T, heads, HD), whose tokens are `stride` elements apart, to TMA, in boxes of `rows` tokens. */
static CUtensorMap hopper_map(const OpStream *on, const bf16 *x, const AttentionShape *s, int T, int heads,
                              int64_t stride, int rows) {
    CUtensorMap map = ZERO;
    const cuuint64_t sizes[4] = {(cuuint64_t)s->HD, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)s->B};
    const cuuint64_t bytes = sizeof *x, strides[3] = {s->HD * bytes, stride * bytes, T * stride * bytes};
    const cuuint32_t box[4] = {PANEL, 1, (cuuint32_t)rows, 1}, every[4] = {1, 1, 1, 1};
    if (!x) return map; // no tensor of this call
    CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)on->encode_tensor_map)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)x, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        run_failure("attention: the driver refused to describe a tensor of %d sequences, %d tokens %" PRId64
                    " elements apart, %d heads of %d to TMA, with error %d",
                    s->B, T, stride, heads, s->HD, (int)result);
    return map;
}

template <int HD> static void attention_hopper_forward_launch(OpStream *on, HopperCall *h) {
    typedef HopperForward<HD> Z;
    const AttentionCall *a = &h->call;
    const AttentionShape *s = &a->s;
    h->q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h->k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h->v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h->out = hopper_map(on, a->out, s, s->Tq, s->NH, s->o_stride, 64);
    int64_t tiles = attention_blocks(s, s->NH, s->Tq, Z::QUERIES);
    int64_t most = on->multiprocessors - on->left_to_nccl;
    ATTENTION_KERNEL(attention_forward_hopper<HD>, min_i64(tiles, most), HOPPER_THREADS, Z::BYTES, *h);
}

/* dk, dv, and dq in a fixed order of additions. */
template <int HD> static void attention_hopper_backward_in_order(OpStream *on, HopperCall *h, int64_t blocks) {
    typedef HopperQueries<HD> Z;
    const AttentionCall *a = &h->call;
    const AttentionShape *s = &a->s;
    ATTENTION_KERNEL((attention_backward_hopper<HD, 0>), blocks, HOPPER_THREADS, HopperBackward<HD>::BYTES, *h);
    h->q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h->dout = hopper_map(on, a->dout, s, s->Tq, s->NH, s->o_stride, Z::QUERIES);
    h->k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h->v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h->dq = hopper_map(on, a->dq, s, s->Tq, s->NH, s->q_stride, 64);
    ATTENTION_KERNEL(attention_backward_queries_hopper<HD>, attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                     HOPPER_THREADS, Z::BYTES, *h);
}

template <int HD> static void attention_hopper_backward_launch(OpStream *on, HopperCall *h) {
    typedef HopperBackward<HD> Z;
    const AttentionCall *a = &h->call;
    const AttentionShape *s = &a->s;
    int64_t tiles = attention_blocks(s, s->NKV, s->Tk, Z::KEYS), blocks = tiles * a->parts;
    h->q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h->dout = hopper_map(on, a->dout, s, s->Tq, s->NH, s->o_stride, Z::QUERIES);
    h->k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h->v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h->dk = hopper_map(on, a->dk, s, s->Tk, s->NKV, s->k_stride, 64);
    h->dv = hopper_map(on, a->dv, s, s->Tk, s->NKV, s->v_stride, 64);
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_hopper<HD, 1>), blocks, HOPPER_THREADS, Z::BYTES, *h);
        ATTENTION_KERNEL(attention_backward_round_dq_hopper<HD>, attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                         128 * HOPPER_CONSUMERS, 0, *a);
    } else {
        attention_hopper_backward_in_order<HD>(on, h, blocks);
    }
    if (a->part_sums) ATTENTION_KERNEL((attention_backward_join<HD, Z::KEYS>), 2 * tiles, Z::KEYS, 0, *a);
}

/* Forward if the call has an output, otherwise backward, after attention_backward_prepare. */
template <int HD> static void attention_hopper_launch(OpStream *on, const AttentionCall *a) {
    HopperCall h;
    memset((void *)&h, 0, sizeof h);
    h.call = *a;
    if (a->out) attention_hopper_forward_launch<HD>(on, &h);
    else attention_hopper_backward_launch<HD>(on, &h);
}
#endif

#endif
