/* attention.cuh: attention on NVIDIA GPUs: which kernels compute a call. The contracts are in lib/ops/ops.h.
 *
 * In bf16, heads of 64 or 128 elements whose rows are aligned to 16 bytes run on tensor cores; everything else runs in
 * fp32 arithmetic, which for bf16 is slow. T x T scores are never stored. Every kernel gives the same bits on each run,
 * except dq on tensor cores, whose additions are in no fixed order unless on->deterministic.
 */
#ifndef CUDA_ATTENTION_CUH
#define CUDA_ATTENTION_CUH
#include "attention_common.cuh"          // defines: AttentionCall, attention_call, cuda_attention_support
#include "attention_hopper.cuh"          // defines: attention_open
#include "attention_hopper_backward.cuh" // defines: attention_backward_hopper_launch
#include "attention_hopper_forward.cuh"  // defines: attention_forward_hopper_launch
#include "attention_mma.cuh"             // defines: attention_forward_mma_launch, attention_backward_mma_launch
#include "attention_plain.cuh"           // defines: attention_plain

#ifdef PRECISION_BF16
/* Whether tensor cores can compute this call: the head's size, and rows that are aligned to 16 bytes. */
static int attention_on_tensor_cores(const AttentionCall *a) {
    const AttentionShape *s = &a->s;
    const void *const tensors[9] = {a->q, a->k, a->v, a->out, a->out_read, a->dout, a->dq, a->dk, a->dv};
    uintptr_t bits = (uintptr_t)(s->q_stride | s->k_stride | s->v_stride | s->o_stride) * sizeof(bf16);
    for (int i = 0; i < 9; i++) bits |= (uintptr_t)tensors[i]; // NULL: not a tensor of this call
    return cuda_attention_support(s->HD) == ATTENTION_TENSOR_CORES && bits % 16 == 0;
}
template <int HD> static void attention_tensor_core_launch(OpStream *on, const AttentionCall *a) {
    const int by_wgmma = on->hopper_attention && a->s.Tk > 0;
    if (a->out && by_wgmma) attention_forward_hopper_launch<HD>(on, a);
    else if (a->out) attention_forward_mma_launch<HD>(on, a);
    else if (by_wgmma) attention_backward_hopper_launch<HD>(on, a);
    else attention_backward_mma_launch<HD>(on, a);
}
#endif

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
    attention_plain(on, a);
}

static void cuda_attention_forward(OpStream *on, floatX *out, float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_forward_call(s, out, lse, q, k, v, workspace);
    attention_launch(on, &a);
}

static void cuda_attention_backward(OpStream *on, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                    const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                    const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_backward_call(s, dq, dk, dv, dout, out, lse, q, k, v, workspace);
    attention_launch(on, &a);
}

#endif
