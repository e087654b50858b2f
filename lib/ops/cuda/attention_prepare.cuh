/* attention_prepare.cuh: the kernel that runs before attention's backward kernels on NVIDIA GPUs. */
#ifndef CUDA_ATTENTION_PREPARE_CUH
#define CUDA_ATTENTION_PREPARE_CUH
#include "attention_common.cuh" // defines: AttentionCall, ATTENTION_PAD

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

#endif
