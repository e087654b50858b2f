/* attention_softmax.cuh: the online softmax of attention forward, on fragments of scores (attention_fragments.cuh). The
 * kernels by mma.sync and those by wgmma share it.
 */
#ifndef CUDA_ATTENTION_SOFTMAX_CUH
#define CUDA_ATTENTION_SOFTMAX_CUH
#include "attention_common.cuh" // defines: AttentionCall, AttentionPlace, ptx_exp2, LN_2

#ifdef PRECISION_BF16
/* The online softmax of a tile of scores, in powers of two: c becomes exp2(c scale - base). base is the row's largest
 * score at the time it was last changed. It changes only when a score exceeds it by 8, since P up to 2^8 is as
 * accurate; so the output is rarely rescaled. Returns whether a row of this lane has to be, by `rescale`. `sum` is of
 * this lane's columns only. */
template <int M, int N>
DEVICE bool softmax_weights(float (&c)[M][N][4], float (&rescale)[M][2], float (&base)[M][2], float (&sum)[M][2],
                            float scale) {
    bool any = false;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            float top = -INFINITY;
            UNROLL for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(c[m][n][2 * half], c[m][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)); // four lanes have the row's columns
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
            bool moves = top > base[m][half] + 8;
            rescale[m][half] = moves ? ptx_exp2(base[m][half] - top) : 1.0f; // 0 the first time
            if (moves) base[m][half] = top;
            any |= moves;
            float from = base[m][half] == -INFINITY ? 0.0f : base[m][half]; // no key seen yet: exp2(-inf - 0) = 0
            float total = 0;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) {
                    c[m][n][e] = ptx_exp2(fmaf(c[m][n][e], scale, -from));
                    total += c[m][n][e];
                }
            sum[m][half] = fmaf(sum[m][half], rescale[m][half], total);
        }
    return any;
}

template <int M, int D> DEVICE void rescale_rows(float (&o)[M][D][4], const float (&rescale)[M][2]) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < D; n++)
            UNROLL for (int e = 0; e < 4; e++) o[m][n][e] *= rescale[m][e / 2];
}

/* Divides o by the row sums and stores lse; tw is the warp's first query. */
template <int HD, int M>
DEVICE void forward_finish(const AttentionCall &a, const AttentionPlace &p, int tw, int lane, float (&o)[M][HD / 8][4],
                           const float (&base)[M][2], const float (&sum)[M][2]) {
    const AttentionShape &s = a.s;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float inverse = total > 0 ? __fdividef(1.0f, total) : total; // no key seen: 0; NaN stays NaN
            UNROLL for (int n = 0; n < HD / 8; n++) {
                o[m][n][2 * half] *= inverse;
                o[m][n][2 * half + 1] *= inverse;
            }
            int t = tw + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && t < s.Tq)
                a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] =
                    total == 0 ? -INFINITY : (base[m][half] + __log2f(total)) * LN_2;
        }
}
#endif

#endif
