/* intrinsics.h: what device code calls: barriers, warp operations, atomics, cached loads and stores, bits, fast maths.
 *
 * Every operation that waits takes the place in the source where it is called, by a default argument.
 */
#ifndef CUDA_ON_CPU_INTRINSICS_H
#define CUDA_ON_CPU_INTRINSICS_H

// ---------------------------------------------------------------------------
// barriers

inline void __syncthreads(emu::Place at = emu::Place::here()) { emu::block_barrier(0, at, "__syncthreads"); }
inline int __syncthreads_count(int predicate, emu::Place at = emu::Place::here()) {
    return emu::block_barrier(predicate, at, "__syncthreads_count");
}
inline int __syncthreads_or(int predicate, emu::Place at = emu::Place::here()) {
    return emu::block_barrier(predicate, at, "__syncthreads_or") > 0;
}
inline int __syncthreads_and(int predicate, emu::Place at = emu::Place::here()) {
    return emu::block_barrier(predicate, at, "__syncthreads_and") == emu::block.threads;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, emu::Place at = emu::Place::here()) {
    if (mask == 0xFFFFFFFFu && emu::current)
        mask = emu::warps[emu::current->warp].exist; // a full mask is all there are
    emu::warp_meet(mask, at, "__syncwarp", nullptr, nullptr);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __trap(emu::Place at = emu::Place::here()) { emu::fail(&at, "__trap"); }

// ---------------------------------------------------------------------------
// warp operations

namespace emu {

template <typename T> struct Shuffle {
    T value;
    int source;
    T got;
};

template <typename T> inline T shuffle(unsigned mask, T value, int source, Place at, const char *what) {
    Shuffle<T> mine = {value, source, value};
    warp_meet(mask, at, what, &mine, [](void *const *lane, uint32_t of) {
        for (int i = 0; i < WARP; i++) {
            if (!(of >> i & 1)) continue;
            Shuffle<T> *s = (Shuffle<T> *)lane[i];
            if (!(of >> s->source & 1))
                fail(nullptr, "a shuffle with mask 0x%08x: lane %d reads from lane %d, which is not in it", of, i,
                     s->source);
            s->got = ((Shuffle<T> *)lane[s->source])->value;
        }
    });
    return mine.got;
}

inline int lane_now() { return current ? current->lane : 0; }
inline int clamped(int source, int first, int end) { return source < first || source >= end ? lane_now() : source; }

struct Vote {
    int predicate;
    uint32_t votes;
};

inline uint32_t vote(unsigned mask, int predicate, Place at, const char *what) {
    Vote mine = {predicate, 0};
    warp_meet(mask, at, what, &mine, [](void *const *lane, uint32_t of) {
        uint32_t votes = 0;
        for (int i = 0; i < WARP; i++)
            if (of >> i & 1 && ((Vote *)lane[i])->predicate) votes |= 1u << i;
        for (int i = 0; i < WARP; i++)
            if (of >> i & 1) ((Vote *)lane[i])->votes = votes;
    });
    return mine.votes;
}

} // namespace emu

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, emu::Place at = emu::Place::here()) {
    return emu::shuffle(mask, value, (emu::lane_now() & ~(width - 1)) | (source & (width - 1)), at, "__shfl_sync");
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, emu::Place at = emu::Place::here()) {
    int first = emu::lane_now() & ~(width - 1);
    return emu::shuffle(mask, value, emu::clamped(emu::lane_now() - (int)delta, first, first + width), at,
                        "__shfl_up_sync");
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, emu::Place at = emu::Place::here()) {
    int first = emu::lane_now() & ~(width - 1);
    return emu::shuffle(mask, value, emu::clamped(emu::lane_now() + (int)delta, first, first + width), at,
                        "__shfl_down_sync");
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, emu::Place at = emu::Place::here()) {
    int first = emu::lane_now() & ~(width - 1);
    return emu::shuffle(mask, value, emu::clamped(emu::lane_now() ^ bits, 0, first + width), at, "__shfl_xor_sync");
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emu::Place at = emu::Place::here()) {
    return emu::vote(mask, predicate, at, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate, emu::Place at = emu::Place::here()) {
    return emu::vote(mask, predicate, at, "__any_sync") != 0;
}
inline int __all_sync(unsigned mask, int predicate, emu::Place at = emu::Place::here()) {
    return emu::vote(mask, predicate, at, "__all_sync") == mask;
}

// ---------------------------------------------------------------------------
// atomics: threads of a grid run one at a time, so these are plain

#define CUDA_ON_CPU_ATOMIC(T, name, result)                                                                            \
    CUDA_ON_CPU_UNSEEN inline T name(T *p, T x) {                                                                      \
        T old = *p;                                                                                                    \
        *p = (result);                                                                                                 \
        return old;                                                                                                    \
    }
#define CUDA_ON_CPU_ATOMICS(T)                                                                                         \
    CUDA_ON_CPU_ATOMIC(T, atomicAdd, old + x)                                                                          \
    CUDA_ON_CPU_ATOMIC(T, atomicExch, x)                                                                               \
    CUDA_ON_CPU_ATOMIC(T, atomicMax, old > x ? old : x) CUDA_ON_CPU_ATOMIC(T, atomicMin, old < x ? old : x)            \
        CUDA_ON_CPU_ATOMIC(T, atomicOr, old | x) CUDA_ON_CPU_ATOMIC(T, atomicAnd, old &x)                              \
            CUDA_ON_CPU_ATOMIC(T, atomicXor, old ^ x) CUDA_ON_CPU_UNSEEN inline T                                      \
            atomicCAS(T *p, T expected, T x) {                                                                         \
        T old = *p;                                                                                                    \
        if (old == expected) *p = x;                                                                                   \
        return old;                                                                                                    \
    }
CUDA_ON_CPU_ATOMICS(unsigned)
CUDA_ON_CPU_ATOMICS(unsigned long long)
CUDA_ON_CPU_ATOMICS(int)
CUDA_ON_CPU_ATOMIC(int, atomicSub, old - x)
CUDA_ON_CPU_ATOMIC(unsigned, atomicSub, old - x)
CUDA_ON_CPU_ATOMIC(unsigned, atomicInc, old >= x ? 0 : old + 1)
CUDA_ON_CPU_ATOMIC(float, atomicAdd, old + x)
CUDA_ON_CPU_ATOMIC(float, atomicExch, x)
CUDA_ON_CPU_ATOMIC(double, atomicAdd, old + x)
#undef CUDA_ON_CPU_ATOMICS
#undef CUDA_ON_CPU_ATOMIC

// ---------------------------------------------------------------------------
// loads and stores that say how to be cached: whole vectors, so their alignment is checked

namespace emu {
template <typename T> inline const T *aligned(const T *p, Place at, const char *what) {
    if ((uintptr_t)p % sizeof(T))
        fail(&at, "%s of %zu bytes at %p, which is not aligned to them", what, sizeof(T), (const void *)p);
    return p;
}
} // namespace emu

template <typename T> inline T __ldg(const T *p, emu::Place at = emu::Place::here()) {
    return *emu::aligned(p, at, "__ldg");
}
template <typename T> inline T __ldcs(const T *p, emu::Place at = emu::Place::here()) {
    return *emu::aligned(p, at, "__ldcs");
}
template <typename T> inline T __ldcg(const T *p, emu::Place at = emu::Place::here()) {
    return *emu::aligned(p, at, "__ldcg");
}
template <typename T> inline T __ldca(const T *p, emu::Place at = emu::Place::here()) {
    return *emu::aligned(p, at, "__ldca");
}
template <typename T> inline void __stcs(T *p, std::type_identity_t<T> x, emu::Place at = emu::Place::here()) {
    emu::aligned(p, at, "__stcs");
    *p = x;
}
template <typename T> inline void __stcg(T *p, std::type_identity_t<T> x, emu::Place at = emu::Place::here()) {
    emu::aligned(p, at, "__stcg");
    *p = x;
}
template <typename T> inline void __stwb(T *p, std::type_identity_t<T> x, emu::Place at = emu::Place::here()) {
    emu::aligned(p, at, "__stwb");
    *p = x;
}

inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)((const char *)p - emu::shared_arena); }
inline unsigned __isShared(const void *p) { return emu::in_shared(p, 0); }

// ---------------------------------------------------------------------------
// bits

template <typename To, typename From> inline To cuda_on_cpu_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return cuda_on_cpu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu_bits<float>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu_bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu_bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
inline int __mul24(int a, int b) { return (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (n & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (n & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(bytes >> (select >> 4 * i & 7) * 8) & 0xFF;
        if (select >> 4 * i & 8) byte = byte & 0x80 ? 0xFF : 0;
        r |= byte << 8 * i;
    }
    return r;
}

// ---------------------------------------------------------------------------
// maths: what C's library lacks. __expf and its like are names of the C library's own, so they are macros here

#define __expf(x) emu::approximate_exp(x)
#define __exp10f(x) ::powf(10.0f, x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __log10f(x) ::log10f(x)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)
#define __tanf(x) ::tanf(x)
#define __powf(x, y) ::powf(x, y)
#define __sincosf(x, s, c) ::sincosf(x, s, c)
inline float rsqrtf(float x) { return emu::approximate(1.0f / sqrtf(x), 2 * emu::ULP); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return emu::approximate(a / b, 2 * emu::ULP); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; } // NaN gives 0
// a product or a sum that the compiler may not fuse with another
inline float __fmul_rn(float a, float b) {
    volatile float r = a * b;
    return r;
}
inline float __fadd_rn(float a, float b) {
    volatile float r = a + b;
    return r;
}
inline float __fsub_rn(float a, float b) {
    volatile float r = a - b;
    return r;
}
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
inline unsigned __float2uint_rz(float x) { return (unsigned)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline long long clock64() { return (long long)(emu::now() * 1e9); }

#define CUDA_ON_CPU_MIN_MAX(T)                                                                                         \
    inline T min(T a, T b) { return a < b ? a : b; }                                                                   \
    inline T max(T a, T b) { return a > b ? a : b; }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#endif
