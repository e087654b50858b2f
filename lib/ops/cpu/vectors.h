/* vectors.h: vectors of VL floats, by GCC's vector extensions. Every loop over floats on the CPU is written in them.
 *
 * VL is 16 with AVX-512, 8 with AVX2, otherwise 4; only this file asks which. load_x and store_x convert between floatX
 * in memory and fp32 in registers. The tail of a row is a vector whose last lanes are filled with zeros, so it goes
 * through the same instructions as the rest: where a tensor is cut does not show in its bits.
 */
#ifndef VECTORS_H
#define VECTORS_H
#include "../../device/kernel.h" // defines: floatX, bf16, ZERO, OpStream
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifdef __NVCC__
#pragma nv_diag_suppress 1675 // nvcc passes "GCC unroll" to the host compiler, with a remark
#endif
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // also for the files that include this one: vectors stay within the program
#endif

// ---------------------------------------------------------------------------
// what differs between processors
//
// MR: rows of a matmul's register tile; MR x 2 vectors of sums fill about half of the registers.
// WIDEN, NARROW: 16-bit lanes to the low halves of 32-bit lanes, and back.

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512 1
enum { VL = 16, MR = 8 }; // 32 registers
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define NATIVE(op) _mm512_##op##_ps
#define WIDEN(h) (vuint) _mm512_cvtepu16_epi32((__m256i)(h))
#define NARROW(u) (vhalf) _mm512_cvtepi32_epi16((__m512i)(u))
#elif defined(__AVX2__) && defined(__FMA__)
enum { VL = 8, MR = 4 }; // 16 registers
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define NATIVE(op) _mm256_##op##_ps
#define WIDEN(h) (vuint) _mm256_cvtepu16_epi32((__m128i)(h))
#define NARROW(u) /* packus works within each 128-bit half; the permutation brings the two results together */         \
    (vhalf) _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(u), (__m256i)(u)), 0x08))
#else
#ifdef __aarch64__
#define NEON 1
enum { VL = 4, MR = 8 }; // 32 registers
#elif defined(PLANNED_VL) // a build for WebAssembly only plans the work space of another build's loops
enum { VL = PLANNED_VL, MR = PLANNED_MR };
#else
enum { VL = 4, MR = 4 };
#endif
#define LANE_NUMBERS 0, 1, 2, 3
#define WIDEN(h) __builtin_convertvector(h, vuint)
#define NARROW(u) __builtin_convertvector(u, vhalf)
#endif
enum { NR = 2 * VL }; // columns of a matmul's register tile: two vectors

typedef float vfloat __attribute__((vector_size(VL * 4)));
typedef int32_t vint __attribute__((vector_size(VL * 4)));
typedef uint32_t vuint __attribute__((vector_size(VL * 4)));
typedef uint16_t vhalf __attribute__((vector_size(VL * 2)));
typedef float vfloats __attribute__((vector_size(VL * 4), aligned(4))); // a vector in memory, at any float's address

// ---------------------------------------------------------------------------
// arithmetic

static inline vfloat vsplat(float s) {
    vfloat zero = ZERO;
    return s - zero;
}

/* a where the mask's lanes are all ones, b where they are zero. */
static inline vfloat vselect(vint mask, vfloat a, vfloat b) { return (vfloat)((mask & (vint)a) | (~mask & (vint)b)); }

/* Whether gcc fuses a * b + c into one rounding depends on the code around it. So that results do not, every product
 * that meets an addition says what it wants: vfma(a, b, c) is fused, vrounded(a * b) + c is not. */
#ifdef NATIVE
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return NATIVE(fmadd)(a, b, c); }
static inline vfloat vmax(vfloat a, vfloat b) { return NATIVE(max)(a, b); } // b if either is NaN
static inline vfloat vmin(vfloat a, vfloat b) { return NATIVE(min)(a, b); }
static inline vfloat vsqrt(vfloat a) { return NATIVE(sqrt)(a); }
#define VECTOR_OPERAND "+v"
#else
#ifdef NEON
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return vfmaq_f32(c, a, b); }
static inline vfloat vsqrt(vfloat a) { return vsqrtq_f32(a); }
#define VECTOR_OPERAND "+w"
#else
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return a * b + c; }
static inline vfloat vsqrt(vfloat a) {
    for (int i = 0; i < VL; i++) a[i] = sqrtf(a[i]);
    return a;
}
#define VECTOR_OPERAND "+m"
#endif
static inline vfloat vmax(vfloat a, vfloat b) { return vselect(a > b, a, b); }
static inline vfloat vmin(vfloat a, vfloat b) { return vselect(a < b, a, b); }
#endif
static inline vfloat vrounded(vfloat x) {
    __asm__("" : VECTOR_OPERAND(x)); // gcc cannot look through it
    return x;
}

/* Lane i of the result is lane `lane[i]` of a (0 … VL - 1) or of b (VL … 2 VL - 1). */
static inline vfloat vpick(vfloat a, vfloat b, vint lane) {
#ifdef __clang__
    vfloat x;
    for (int l = 0; l < VL; l++) x[l] = lane[l] < VL ? a[lane[l]] : b[lane[l] - VL];
    return x;
#else
    return __builtin_shuffle(a, b, lane);
#endif
}

/* Exchanges lanes whose numbers differ in the bit h only. */
static inline vfloat vswap(vfloat x, int h) {
    const vint lane = {LANE_NUMBERS};
    return vpick(x, x, lane ^ h);
}

/* The sum over all lanes: halves are added until one lane is left. */
static inline float vsum(vfloat x) {
#pragma GCC unroll 4
    for (int h = VL / 2; h; h /= 2) x += vswap(x, h);
    return x[0];
}

/* The largest lane. */
static inline float vmax_lane(vfloat x) {
#pragma GCC unroll 4
    for (int h = VL / 2; h; h /= 2) x = vmax(x, vswap(x, h));
    return x[0];
}

// ---------------------------------------------------------------------------
// memory
//
// Loads and stores take n, the number of elements that are left in the row: lanes from n on are zero when loaded and
// are not stored. AVX-512 has masks for that; elsewhere the tail is in functions of its own, out of the loop's way.

static inline vfloat vload(const float *p) { return *(const vfloats *)(const void *)p; }
static inline void vstore(float *p, vfloat x) { *(vfloats *)(void *)p = x; }

/* Stores past the caches, for tensors larger than they are. p is aligned to a whole vector. vstream_end comes before
 * other threads read what was stored. */
#ifdef NATIVE
static inline void vstream(float *p, vfloat x) { NATIVE(stream)(p, x); }
static inline void vstream_end(void) { _mm_sfence(); }
#else
static inline void vstream(float *p, vfloat x) { vstore(p, x); }
static inline void vstream_end(void) {}
#endif

#define WHOLE(n) __builtin_expect((n) >= VL, 1)
#ifdef AVX512
#define TAIL static inline
#define LANES(n) (__mmask16)((1u << (n)) - 1)
TAIL vfloat load_tail(const float *p, int64_t n, float fill) { return _mm512_mask_loadu_ps(vsplat(fill), LANES(n), p); }
TAIL void store_tail(float *p, vfloat x, int64_t n) { _mm512_mask_storeu_ps(p, LANES(n), x); }
TAIL vhalf load_tail_half(const void *p, int64_t n) { return (vhalf)_mm256_maskz_loadu_epi16(LANES(n), p); }
TAIL void store_tail_half(void *p, vhalf h, int64_t n) { _mm256_mask_storeu_epi16(p, LANES(n), (__m256i)h); }
#else
#define TAIL static __attribute__((noinline, cold, unused))
TAIL vfloat load_tail(const float *p, int64_t n, float fill) {
    vfloat x = vsplat(fill);
    memcpy(&x, p, (size_t)n * 4);
    return x;
}
TAIL void store_tail(float *p, vfloat x, int64_t n) { memcpy(p, &x, (size_t)n * 4); }
TAIL vhalf load_tail_half(const void *p, int64_t n) {
    vhalf h = ZERO;
    memcpy(&h, p, (size_t)n * 2);
    return h;
}
TAIL void store_tail_half(void *p, vhalf h, int64_t n) { memcpy(p, &h, (size_t)n * 2); }
#endif

/* Lanes from n on hold `fill`. */
static inline vfloat load_fill(const float *p, int64_t n, float fill) {
    return WHOLE(n) ? vload(p) : load_tail(p, n, fill);
}
static inline vfloat load_float(const float *p, int64_t n) { return load_fill(p, n, 0.0f); }
static inline void store_float(float *p, vfloat x, int64_t n) {
    if (WHOLE(n)) vstore(p, x);
    else store_tail(p, x, n);
}

/* bf16 bits in the low halves of 32-bit lanes. A bf16 is the upper half of an fp32, so shifting them up by 16 bits
 * converts them. */
static inline vuint load_bits(const bf16 *p, int64_t n) {
    vhalf h;
    if (WHOLE(n)) memcpy(&h, p, sizeof h);
    else h = load_tail_half(p, n);
    return WIDEN(h);
}
static inline vfloat load_bf16(const bf16 *p, int64_t n) { return (vfloat)(load_bits(p, n) << 16); }

/* Rounds to the nearest bf16, ties to even, as float_to_bf16 does. The AVX512_BF16 instruction differs in one point: it
 * turns denormals into 0. */
static inline vhalf vround(vfloat x) {
#ifdef __AVX512BF16__
    return (vhalf)_mm512_cvtneps_pbh(x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vhalf)vcvt_bf16_f32(x);
#else
    vuint u = (vuint)x, rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    vuint nan = (vuint)((vint)(u & 0x7FFFFFFFu) > 0x7F800000);
    return NARROW((nan & ((u >> 16) | 0x40u)) | (~nan & rounded));
#endif
}
static inline void store_bf16(bf16 *p, vfloat x, int64_t n) {
    vhalf h = vround(x);
    if (WHOLE(n)) memcpy(p, &h, sizeof h);
    else store_tail_half(p, h, n);
}

#ifdef PRECISION_BF16
static inline vfloat load_x(const floatX *p, int64_t n) { return load_bf16(p, n); }
static inline void store_x(floatX *p, vfloat x, int64_t n) { store_bf16(p, x, n); }
#else
static inline vfloat load_x(const floatX *p, int64_t n) { return load_float(p, n); }
static inline void store_x(floatX *p, vfloat x, int64_t n) { store_float(p, x, n); }
#endif

// ---------------------------------------------------------------------------
// functions

/* e^x within 1 ulp. x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r. e^r is a polynomial of degree 6 that begins
 * with 1 + r and has the least relative error among such (3e-9, by Lawson's iteration). 2^n is added to the exponent
 * bits. The result is exactly 0 below -87.33, where floats become denormal, and 2.4e38 above 88.37. */
static inline vfloat vexp(vfloat x) {
    const float round_bias = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vint too_low = x < -87.33f;
    x = vmin(vsplat(88.37f), x);
    vfloat biased = vfma(x, vsplat(1.44269504f), vsplat(round_bias)), n = biased - round_bias;
    vfloat r = vfma(n, vsplat(-0.693145752f), x); // ln 2 in two parts; n times the first, which is short, is exact
    r = vfma(n, vsplat(-1.42860677e-6f), r);
    static const float polynomial[7] = {0.00138145406f, 0.00836874545f, 0.0416683890f, 0.166665211f, 0.49999994f, 1, 1};
    vfloat p = vsplat(polynomial[0]);
#pragma GCC unroll 6
    for (int i = 1; i < 7; i++) p = vfma(p, r, vsplat(polynomial[i]));
    p = (vfloat)((vuint)p + ((vuint)biased << 23));
    return (vfloat)(~too_low & (vint)p);
}
static inline float exp_float(float x) { return vexp(vsplat(x))[0]; }

#endif
