/* vectors.cuh: what the CUDA kernels share: vectors of elements in registers, sums over warps and blocks, launches.
 *
 * A caller may rely on: every kernel in lib/ops/cuda gives the same bits on each run, except attention's dq on tensor
 * cores without on->deterministic. Launchers, the functions cuda_<op>, never wait for the GPU.
 */
#ifndef CUDA_VECTORS_CUH
#define CUDA_VECTORS_CUH
#include "../../device/kernel.h" // defines: floatX, bf16, OpStream, run_failure

/* Elements that a thread loads at once: WIDE of floatX (16 bytes), FLAT of fp32. Macros, so that a kernel's name in an
 * error message shows its width. */
#ifdef PRECISION_BF16
#define WIDE 8
#else
#define WIDE 4
#endif
#define FLAT 4
#define UNROLL _Pragma("unroll") // an array stays in registers only if all its indices are known when compiling
#define ROLLED _Pragma("unroll 1")
#define DEVICE static __device__ __forceinline__
static constexpr int WARP = 32;
static constexpr int BLOCK = 256;      // threads in a block, unless a kernel says otherwise
static constexpr int MAX_BLOCK = 1024; // threads that a block can have

// ---------------------------------------------------------------------------
// conversions

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return bf16_to_float(x); }
DEVICE void narrow(float *p, float x) { *p = x; }
DEVICE void narrow(bf16 *p, float x) { *p = float_to_bf16(x); }

/* Two floats, rounded to bf16 by one instruction; `low` is in the lower 16 bits. */
DEVICE uint32_t round_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// ---------------------------------------------------------------------------
// loads and stores of W elements
//
// The address is a multiple of the vector's bytes (of 16, if it is longer). W = 1 works at any address. ONCE marks data
// that is not used again soon: it is evicted from the caches first.

/* W elements in their format in memory: in bf16, data that waits for its use takes half the registers of W floats. */
template <int W, class T = floatX> struct Waiting {
    uint32_t words[W == 1 ? 1 : W * (int)sizeof(T) / 4]; // W = 1: the element as fp32
};
template <bool ONCE = false, int W, class T> DEVICE void fetch(Waiting<W, T> &v, const T *p) {
    if constexpr (W == 1) {
        v.words[0] = __float_as_uint(widen(*p));
    } else if constexpr (sizeof v == sizeof(uint2)) {
        uint2 x = ONCE ? __ldcs((const uint2 *)p) : *(const uint2 *)p;
        memcpy(v.words, &x, sizeof x);
    } else {
        static_assert(sizeof v == sizeof(uint4), "1 element, 8 bytes or 16");
        uint4 x = ONCE ? __ldcs((const uint4 *)p) : *(const uint4 *)p;
        memcpy(v.words, &x, sizeof x);
    }
}
/* A bf16 is the upper half of an fp32: a word of two is split by a shift and a mask. */
template <int W, class T> DEVICE void unpack(float (&v)[W], const Waiting<W, T> &from) {
    UNROLL for (int j = 0; j < W; j++) {
        if (W == 1 || sizeof(T) == sizeof(float)) v[j] = __uint_as_float(from.words[j]);
        else v[j] = __uint_as_float(j % 2 ? from.words[j / 2] & 0xFFFF0000u : from.words[j / 2] << 16);
    }
}
template <bool ONCE = false, int W> DEVICE void load(float (&v)[W], const bf16 *p) {
    Waiting<W, bf16> x;
    fetch<ONCE>(x, p);
    unpack(v, x);
}
template <bool ONCE = false, int W> DEVICE void load(float (&v)[W], const float *p) {
    if constexpr (W == 1) {
        v[0] = *p;
    } else {
        UNROLL for (int i = 0; i < W; i += 4) {
            float4 x = ONCE ? __ldcs((const float4 *)(p + i)) : *(const float4 *)(p + i);
            memcpy(v + i, &x, sizeof x);
        }
    }
}
/* Loads that come before this call are issued before what follows it. Otherwise ptxas moves a load down to where its
 * result is needed, and a thread waits for memory with nothing else under way. It moves no load over a warp barrier.
 * dev/test/loads.py checks where loads are. */
DEVICE void issue_loads() { __syncwarp(); }

/* One store instruction. Left to itself, the compiler may split a vector into four. */
#ifdef CUDA_ON_CPU
template <class T> static inline void store_vector(T *p, T x) { __stwb(p, x); }
#else
DEVICE void store_vector(uint2 *p, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void store_vector(uint4 *p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
DEVICE void store_vector(float4 *p, float4 x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}
#endif

template <bool ONCE = false, int W> DEVICE void store(float *p, const float (&v)[W]) {
    if constexpr (W == 1) {
        *p = v[0];
    } else {
        UNROLL for (int i = 0; i < W; i += 4) {
            float4 x = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
            if (ONCE) __stcs((float4 *)(p + i), x);
            else store_vector((float4 *)(p + i), x);
        }
    }
}
template <bool ONCE = false, int W> DEVICE void store(bf16 *p, const float (&v)[W]) {
    if constexpr (W == 1) {
        *p = float_to_bf16(v[0]);
    } else if constexpr (W == 4) {
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

// ---------------------------------------------------------------------------
// sums over warps and blocks; their order is fixed

/* The sum over a warp, on all of its lanes. */
template <class T> DEVICE T warp_sum(T x) {
    UNROLL for (int h = WARP / 2; h; h /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, h);
    return x;
}
DEVICE float warp_max(float x) {
    UNROLL for (int h = WARP / 2; h; h /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, h));
    return x;
}

/* The sum over a block of whole warps, on all its threads. sums (WARP) is shared memory that no thread still reads. */
DEVICE float block_sum(float x, float *sums) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
}

// ---------------------------------------------------------------------------
// launches

/* Ends the run with an error unless `error` is cudaSuccess: the program's is in device_cuda.h, a page has its own. */
static inline void cuda_check(cudaError_t error, const char *what);

#ifndef CUDA_ON_CPU // dev/cuda_on_cpu implements these three itself
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                         \
    (kernel)<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count] // a fixed number of elements
#define DYN_SHARED(type, name)                                                                                         \
    extern __shared__ __align__(128) char dynamic_shared_memory[];                                                     \
    type *name = (type *)dynamic_shared_memory // as many bytes as the launch gives
#endif
/* Launches a kernel, whose name is in parentheses if it contains commas. A launch that fails ends the run. */
#define KERNEL(on, kernel, grid, block, shared_bytes, ...)                                                             \
    do {                                                                                                               \
        LAUNCH(kernel, grid, block, shared_bytes, (on)->stream, __VA_ARGS__);                                          \
        cuda_check(cudaGetLastError(), "the launch of " #kernel);                                                      \
    } while (0)

/* Whether rows of `length` elements that begin at these addresses consist of whole, aligned vectors of `width` elements
 * (at most 16 bytes). NULL stands for a tensor that is not there. */
static int in_vectors(int64_t length, int width, const void *a, const void *b = NULL, const void *c = NULL,
                      const void *d = NULL, const void *e = NULL) {
    return length % width == 0 && ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e) % 16 == 0;
}

/* Launches kernel<W> with W = `wide` if `vectors`, otherwise with W = 1. grid and block are expressions of W. */
#define KERNEL_BY_WIDTH(on, vectors, wide, kernel, grid, block, shared_bytes, ...)                                    \
    do {                                                                                                               \
        if (vectors) {                                                                                                 \
            [[maybe_unused]] const int W = wide;                                                                       \
            KERNEL(on, (kernel<wide>), grid, block, shared_bytes, __VA_ARGS__);                                        \
        } else {                                                                                                       \
            [[maybe_unused]] const int W = 1;                                                                          \
            KERNEL(on, (kernel<1>), grid, block, shared_bytes, __VA_ARGS__);                                           \
        }                                                                                                              \
    } while (0)

/* Threads for `count` items of one thread each: whole warps, at most `most`. */
static unsigned threads_for(int64_t count, int64_t most) { return (unsigned)min_i64(most, round_up(count, WARP)); }

static unsigned grid_of(int64_t blocks) {
    if (blocks > INT32_MAX)
        run_failure("a CUDA kernel needs %" PRId64 " blocks; a grid has at most 2^31 - 1: use a smaller --batch or "
                    "--seq, or more ranks",
                    blocks);
    return (unsigned)blocks;
}

#endif
