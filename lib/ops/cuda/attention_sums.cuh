/* attention_sums.cuh: sums over blocks in attention backward on tensor cores: of dq, and of the parts of dk and dv. The
 * kernels by mma.sync and those by wgmma share them.
 */
#ifndef CUDA_ATTENTION_SUMS_CUH
#define CUDA_ATTENTION_SUMS_CUH
#include "attention_fragments.cuh" // defines: mma_pack, mma_store, tile_store

#ifdef PRECISION_BF16
/* dQ is summed over blocks in fp32 by atomic additions. A tile of these sums is stored as the warps hold it: the four
 * elements of lane after lane of a 16 x 8 block, and block after block. */
DEVICE void dq_add(float *to, const float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    UNROLL for (int e = 0; e < 4; e++) atomicAdd(to + 32 * e + lane, x[e]); // adjacent lanes, adjacent addresses
#endif
}
DEVICE void dq_get(const float *from, float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    load(x, from + 4 * lane);
#else
    UNROLL for (int e = 0; e < 4; e++) x[e] = from[32 * e + lane];
#endif
}
enum { DQ_WARP = 32 * 32, DQ_BLOCK = 16 * 8 }; // a warp's elements of a tile of dQ, as [2][4] blocks of DQ_BLOCK

/* dk or dv of a tile: the sum over the parts, in order, rounded. A block has as many warps as computed the tile. */
template <int HD, int KEYS>
static __global__ void __launch_bounds__(KEYS) attention_backward_join(const AttentionCall a) {
    SHARED(bf16, tile, KEYS *HD);
    const AttentionShape &s = a.s;
    const int is_dk = (int)blockIdx.x % 2, tiles = (s.Tk + KEYS - 1) / KEYS, slice = (int)threadIdx.x / 32 * 32;
    const int i = (int)blockIdx.x / 2, key = i % tiles * KEYS, kv = i / tiles % s.NKV, b = i / tiles / s.NKV;
    const int64_t part_size = (int64_t)s.B * s.NKV * tiles * 2 * KEYS * HD;
    const float *from = a.part_sums + (int64_t)blockIdx.x * KEYS * HD + slice * HD + (int)threadIdx.x % 32 * 4;
    float sums[2][HD / 8][4], x[4];
    uint32_t packed[2][HD / 16][4];
    fill(sums, 0);
    ROLLED for (int part = 0; part < a.parts; part++, from += part_size)
        UNROLL for (int n = 0; n < HD / 4; n++) {
            load(x, from + n * DQ_BLOCK);
            UNROLL for (int e = 0; e < 4; e++) sums[n / (HD / 8)][n % (HD / 8)][e] += x[e];
        }
    mma_pack(packed, sums, is_dk ? a.scale : 1);
    mma_store<HD>(tile + slice * HD, packed);
    __syncthreads();
    floatX *out = is_dk ? a.dk + ((int64_t)b * s.Tk + key) * s.k_stride : a.dv + ((int64_t)b * s.Tk + key) * s.v_stride;
    tile_store<HD>(out + kv * HD, is_dk ? s.k_stride : s.v_stride, tile, KEYS, s.Tk - key, (int)threadIdx.x, KEYS);
}
#endif

#endif
