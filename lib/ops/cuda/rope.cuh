/* rope.cuh: rotary position embedding on NVIDIA GPUs. The contracts are in lib/ops/ops.h. */
#ifndef CUDA_ROPE_CUH
#define CUDA_ROPE_CUH
#include "vectors.cuh" // defines: fetch, unpack, load, store, KERNEL_BY_WIDTH

/* A block has one token, so that its angles are read once. A thread rotates W pairs of elements of one head, then of
 * another. It loads x first: the angles take two loads in a row, the token's position and then its row of the table. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    rope_kernel(floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int T, int heads, int HD,
                float direction) {
    int half = HD / 2, parts = half / W, units = heads * parts;
    ROLLED for (int begin = 0; begin < units; begin += (int)blockDim.x) {
        int u = begin + (int)threadIdx.x, i = u % parts * W;
        floatX *first = x + (int64_t)blockIdx.x * stride + (int64_t)(u / parts) * HD + i, *second = first + half;
        Waiting<W> pair[2];
        float c[W], s[W], x0[W], x1[W], y0[W], y1[W];
        if (u < units) {
            fetch(pair[0], first);
            fetch(pair[1], second);
        }
        issue_loads();
        if (u >= units) break;
        const float *table = cos_sin + (int64_t)positions[blockIdx.x % (unsigned)T] * HD; // cosines, then sines
        load(c, table + i);
        load(s, table + half + i);
        unpack(x0, pair[0]);
        unpack(x1, pair[1]);
        UNROLL for (int j = 0; j < W; j++) {
            s[j] *= direction;
            y0[j] = fmaf(x0[j], c[j], -__fmul_rn(x1[j], s[j]));
            y1[j] = fmaf(x1[j], c[j], __fmul_rn(x0[j], s[j]));
        }
        store(first, y0);
        store(second, y1);
    }
}
static void cuda_rope(OpStream *on, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                      int T, int heads, int HD, float direction) {
    int vectors = in_vectors(HD / 2, WIDE, x, cos_sin) && stride % WIDE == 0;
    int64_t units = (int64_t)heads * (HD / 2) / (vectors ? WIDE : 1);
    unsigned threads = threads_for(blocks_of(units, max_i64(1, blocks_of(units, BLOCK))), BLOCK); // in equal rounds
    if (N && heads && HD > 1)
        KERNEL_BY_WIDTH(on, vectors, WIDE, rope_kernel, (unsigned)N, threads, 0, x, stride, cos_sin, positions, T,
                        heads, HD, direction);
}

#endif
