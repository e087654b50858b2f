/* vectors.cuh: what all CUDA kernels share: vectors of elements in registers, sums over warps and blocks, launches. */
#ifndef CUDA_VECTORS_CUH
#define CUDA_VECTORS_CUH
#include "../device.h" // defines: floatX, bf16, KERNEL, SHARED

// elements that a thread loads at once, of floatX and of floats; macros, so that messages name a kernel with its width
#ifdef PRECISION_BF16
#define WIDE 8
#else
#define WIDE 4
#endif
#define FLAT 4
static constexpr int WARP = 32;
static constexpr int BLOCK = 256;      // threads in a block, unless a kernel says otherwise
static constexpr int MAX_BLOCK = 1024; // threads that a block can have
static constexpr int SUM_LANES = 8;    // threads that share the rows of a sum over rows

// ---------------------------------------------------------------------------
// vectors in registers; sums over warps and blocks

static inline __device__ float widen(float x) { return x; }
static inline __device__ float widen(bf16 x) { return bf16_to_float(x); }
static inline __device__ void narrow(float *p, float x) { *p = x; }
static inline __device__ void narrow(bf16 *p, float x) { *p = float_to_bf16(x); }

static inline __device__ uint32_t round_pair(float low, float high) { // to bf16, in one instruction
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* W elements at p, which is a multiple of their bytes (of 16, if they are more). W = 1: at any place.
 * ONCE: nobody comes back for them soon, so they leave the caches first. */
template <int W, bool ONCE = false> static __device__ __forceinline__ void load(float (&v)[W], const float *p) {
    if constexpr (W == 1) v[0] = *p;
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 x = ONCE ? __ldcs((const float4 *)(p + i)) : *(const float4 *)(p + i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
}
template <int W, bool ONCE = false> static __device__ __forceinline__ void load(float (&v)[W], const bf16 *p) {
    if constexpr (W == 1) v[0] = bf16_to_float(*p);
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) { // 8 at once where there are as many
            uint32_t u[4];
            if (W % 8 == 0 && i % 8) continue;
            if (W % 8 == 0) {
                uint4 x = ONCE ? __ldcs((const uint4 *)(p + i)) : *(const uint4 *)(p + i);
                u[0] = x.x, u[1] = x.y, u[2] = x.z, u[3] = x.w;
            } else {
                uint2 x = ONCE ? __ldcs((const uint2 *)(p + i)) : *(const uint2 *)(p + i);
                u[0] = x.x, u[1] = x.y;
            }
#pragma unroll
            for (int j = 0; j < (W % 8 ? 2 : 4); j++)
                v[i + 2 * j] = __uint_as_float(u[j] << 16), v[i + 2 * j + 1] = __uint_as_float(u[j] & 0xFFFF0000u);
        }
}
#ifdef CUDA_ON_CPU
template <class T> static inline void store_vector(T *p, T x) { __stwb(p, x); }
#else // left to the compiler, a vector may become four stores
static __device__ __forceinline__ void store_vector(uint2 *p, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}
static __device__ __forceinline__ void store_vector(uint4 *p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
static __device__ __forceinline__ void store_vector(float4 *p, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}
#endif
template <int W, bool ONCE = false> static __device__ __forceinline__ void store(float *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = v[0];
    else
#pragma unroll
        for (int i = 0; i < W; i += 4) {
            float4 x = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
            if (ONCE) __stcs((float4 *)(p + i), x);
            else store_vector((float4 *)(p + i), x);
        }
}
template <int W, bool ONCE = false> static __device__ __forceinline__ void store(bf16 *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = float_to_bf16(v[0]);
    else if constexpr (W == 4) {
        uint2 x = make_uint2(round_pair(v[0], v[1]), round_pair(v[2], v[3]));
        if (ONCE) __stcs((uint2 *)p, x);
        else store_vector((uint2 *)p, x);
    } else {
        static_assert(W == 8, "1, 4 or 8 elements");
        uint4 x =
            make_uint4(round_pair(v[0], v[1]), round_pair(v[2], v[3]), round_pair(v[4], v[5]), round_pair(v[6], v[7]));
        if (ONCE) __stcs((uint4 *)p, x);
        else store_vector((uint4 *)p, x);
    }
}
template <int W> static __device__ __forceinline__ void store_shared(float *p, const float (&v)[W]) {
    if constexpr (W == 1) *p = v[0];
    else *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
}
/* The same where only n of the elements may exist; those beyond are 0. */
template <int W, bool ONCE, class T>
static __device__ __forceinline__ void load_some(float (&v)[W], const T *p, int64_t n) {
    if (n >= W) load<W, ONCE>(v, p);
    else
#pragma unroll
        for (int j = 0; j < W; j++) v[j] = j < n ? widen(p[j]) : 0.0f;
}
template <int W, bool ONCE, class T>
static __device__ __forceinline__ void store_some(T *p, const float (&v)[W], int64_t n) {
    if (n >= W) store<W, ONCE>(p, v);
    else
#pragma unroll
        for (int j = 0; j < W; j++)
            if (j < n) narrow(p + j, v[j]);
}

template <class T> static __device__ __forceinline__ T warp_sum(T x) { // on all lanes; the order is that of the halves
#pragma unroll
    for (int h = WARP / 2; h; h /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, h);
    return x;
}
static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int h = WARP / 2; h; h /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, h));
    return x;
}
/* On all threads of a block of whole warps. `sums` (WARP) is shared memory that no thread still reads. */
static __device__ __forceinline__ float block_sum(float x, float *sums) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
}

/* out[column ...] += the sum of n rows of `in`, `width` apart, by a block of (WARP, SUM_LANES) threads: each has W
 * columns and every SUM_LANES-th row; then the lanes are added in their order. `sums` (SUM_LANES * WARP * W) is shared
 * memory. */
template <int W>
static __device__ __forceinline__ void add_rows(float *out, const float *in, int64_t n, int width, float *sums) {
    int column = ((int)blockIdx.y * WARP + (int)threadIdx.x) * W;
    float sum[W] = {}, v[W];
    if (column < width)
#pragma unroll 4
        for (int64_t k = threadIdx.y; k < n; k += SUM_LANES) {
            load(v, in + k * width + column);
            for (int j = 0; j < W; j++) sum[j] += v[j];
        }
    store_shared(sums + ((int)threadIdx.y * WARP + (int)threadIdx.x) * W, sum);
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    for (int lane = 1; lane < SUM_LANES; lane++) {
        load(v, sums + (lane * WARP + (int)threadIdx.x) * W);
        for (int j = 0; j < W; j++) sum[j] += v[j];
    }
    load(v, out + column);
    for (int j = 0; j < W; j++) v[j] += sum[j];
    store(out + column, v);
}

/* Do rows of `length` elements that begin at these addresses begin and end with vectors of `width` elements, at most 16
 * bytes? */
static int in_vectors(int64_t length, int width, const void *a, const void *b = NULL, const void *c = NULL,
                      const void *d = NULL, const void *e = NULL) {
    return length % width == 0 && ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e) % 16 == 0;
}
/* Launches kernel<W>, W = `wide` or 1. `grid` and `block` are expressions of W. */
#define KERNEL_BY_WIDTH(dev, vectors, wide, kernel, grid, block, shared_bytes, ...)                                    \
    do {                                                                                                               \
        if (vectors) {                                                                                                 \
            const int W = wide;                                                                                        \
            (void)W;                                                                                                   \
            KERNEL(dev, (kernel<wide>), grid, block, shared_bytes, __VA_ARGS__);                                       \
        } else {                                                                                                       \
            const int W = 1;                                                                                           \
            (void)W;                                                                                                   \
            KERNEL(dev, (kernel<1>), grid, block, shared_bytes, __VA_ARGS__);                                          \
        }                                                                                                              \
    } while (0)
/* Whole warps, at most `most` threads, for `count` things of which each takes one. */
static unsigned threads_for(int64_t count, int64_t most) { return (unsigned)min_i64(most, round_up(count, WARP)); }
static unsigned grid_of(int64_t blocks) {
    if (blocks > INT32_MAX) run_failure("a kernel would need %" PRId64 " blocks: a grid has at most 2^31 - 1", blocks);
    return (unsigned)blocks;
}

#endif
