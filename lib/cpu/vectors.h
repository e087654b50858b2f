/* vectors.h: what loops over floats are written in: vectors of VL floats, by GCC's vector extensions.
 *
 * A tail is a vector whose last lanes are filled, so that it goes through the same instructions as the body: that is
 * what makes cuts of a tensor invisible in its bits. load_x and store_x widen and round floatX; a vpair is twice as
 * long and, in bf16, cheaper to widen. VL is 16, 8 or 4 by what the processor has; nothing else in the program asks for
 * that.
 */
#ifndef VECTORS_H
#define VECTORS_H
#include "../device.h" // defines: floatX, ZERO
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#ifdef __NVCC__
#pragma nv_diag_suppress 1675 // nvcc hands "GCC unroll" through, but remarks on it
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not use all of them
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between static functions only
#endif

// MR: rows of a tile, as many as leave MR x 2 vectors of sums in registers. WIDEN, NARROW: bf16's 16 bits to fp32 lanes
// and back.
enum {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512 1
    VL = 16,
    MR = 8, // 32 registers
#define LANE_NUMBERS                                                                                                   \
    { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }
#define NATIVE(op) _mm512_##op##_ps
#define WIDEN(h) (vuint) _mm512_cvtepu16_epi32((__m256i)(h))
#define NARROW(u) (vhalf) _mm512_cvtepi32_epi16((__m512i)(u))
#elif defined(__AVX2__) && defined(__FMA__)
    VL = 8,
    MR = 4, // 16 registers
#define LANE_NUMBERS                                                                                                   \
    { 0, 1, 2, 3, 4, 5, 6, 7 }
#define NATIVE(op) _mm256_##op##_ps
#define WIDEN(h) (vuint) _mm256_cvtepu16_epi32((__m128i)(h))
#define NARROW(u)                                                                                                      \
    (vhalf) _mm256_castsi256_si128(                                                                                    \
        _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(u), (__m256i)(u)), 0x08)) // packus: within each half
#else
    VL = 4,
    MR = 4,
#define LANE_NUMBERS                                                                                                   \
    { 0, 1, 2, 3 }
#define WIDEN(h) __builtin_convertvector(h, vuint)
#define NARROW(u) __builtin_convertvector(u, vhalf)
#endif
    NR = 2 * VL // floats of a pair of vectors
};
typedef float vfloat __attribute__((vector_size(VL * 4)));
typedef int32_t vint __attribute__((vector_size(VL * 4)));
typedef uint32_t vuint __attribute__((vector_size(VL * 4)));
typedef uint16_t vhalf __attribute__((vector_size(VL * 2)));
static inline vfloat vsplat(float s) {
    vfloat zero = ZERO;
    return s - zero;
}
static inline vfloat vselect(vint mask, vfloat a, vfloat b) { return (vfloat)((mask & (vint)a) | (~mask & (vint)b)); }

/* Whether gcc fuses a*b + c depends on the code around it (on which side of a branch the product landed, on who else
 * uses it). Where a product meets an addition we say which we want: vfma(a, b, c) is fused, vrounded(a * b) is not. */
#ifdef NATIVE
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return NATIVE(fmadd)(a, b, c); }
static inline vfloat vmax(vfloat a, vfloat b) { return NATIVE(max)(a, b); } // b where either is not a number
static inline vfloat vmin(vfloat a, vfloat b) { return NATIVE(min)(a, b); }
static inline vfloat vsqrt(vfloat a) { return NATIVE(sqrt)(a); }
static inline vfloat vrounded(vfloat x) {
    __asm__("" : "+v"(x));
    return x;
} // in a register
#else
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return a * b + c; }
static inline vfloat vmax(vfloat a, vfloat b) { return vselect(a > b, a, b); }
static inline vfloat vmin(vfloat a, vfloat b) { return vselect(a < b, a, b); }
static inline vfloat vsqrt(vfloat a) {
    for (int i = 0; i < VL; i++) a[i] = sqrtf(a[i]);
    return a;
}
static inline vfloat vrounded(vfloat x) {
    __asm__("" : "+m"(x));
    return x;
}
#endif
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
#define HAVE_PAIRS 1
enum { PAIR = 2 }; // c + sum of the products of two bf16 in each lane of a and b
static inline vfloat vdot_pairs(vfloat a, vfloat b, vfloat c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
enum { PAIR = 1 };
static inline vfloat vdot_pairs(vfloat a, vfloat b, vfloat c) { return a * b + c; }
#endif
typedef float vfloats __attribute__((
    vector_size(VL * 4), aligned(4))); // in memory; as floats, so that the compiler knows what a store leaves alone
static inline vfloat vload(const float *p) { return *(const vfloats *)(const void *)p; }
static inline void vstore(float *p, vfloat x) { *(vfloats *)(void *)p = x; }
#ifdef NATIVE // vstream: past the caches, for what is larger than they are; p is a multiple of a vector. vstream_end:
              // before others read it
static inline void vstream(float *p, vfloat x) { NATIVE(stream)(p, x); }
static inline void vstream_end(void) { _mm_sfence(); }
#else
static inline void vstream(float *p, vfloat x) { vstore(p, x); }
static inline void vstream_end(void) {}
#endif
static inline vfloat vpick(vfloat a, vfloat b, vint lane) { // lanes of a (from 0 on) and b (from VL on)
#ifdef __clang__
    vfloat x;
    for (int l = 0; l < VL; l++) x[l] = lane[l] < VL ? a[lane[l]] : b[lane[l] - VL];
    return x;
#else
    return __builtin_shuffle(a, b, lane);
#endif
}
static inline vfloat vswap(vfloat x, int h) {
    const vint lane = LANE_NUMBERS;
    return vpick(x, x, lane ^ h);
} // lanes whose numbers differ in bit h
static inline float vsum(vfloat x) { // by halves
#pragma GCC unroll 4
    for (int h = VL / 2; h; h /= 2) x += vswap(x, h);
    return x[0];
}
static inline float vmax_lane(vfloat x) {
#pragma GCC unroll 4
    for (int h = VL / 2; h; h /= 2) x = vmax(x, vswap(x, h));
    return x[0];
}

/* Up to VL elements; lanes from n on hold `fill` (or 0). Without masks the ragged ends are kept out of line, so that
 * the loops stay in registers. */
#define WHOLE(n) __builtin_expect((n) >= VL, 1)
#ifdef AVX512
#define RAGGED static inline
#define LANES(n) (__mmask16)((1u << (n)) - 1)
RAGGED vfloat load_ragged(const float *p, int64_t n, float fill) {
    return _mm512_mask_loadu_ps(vsplat(fill), LANES(n), p);
}
RAGGED void store_ragged(float *p, vfloat x, int64_t n) { _mm512_mask_storeu_ps(p, LANES(n), x); }
RAGGED vhalf load_ragged_half(const void *p, int64_t n) { return (vhalf)_mm256_maskz_loadu_epi16(LANES(n), p); }
RAGGED void store_ragged_half(void *p, vhalf h, int64_t n) { _mm256_mask_storeu_epi16(p, LANES(n), (__m256i)h); }
RAGGED vuint load_ragged_bits(const void *p, int64_t n) { return (vuint)_mm512_maskz_loadu_epi16((1u << n) - 1, p); }
RAGGED void store_ragged_bits(void *p, vuint bits, int64_t n) {
    _mm512_mask_storeu_epi16(p, (1u << n) - 1, (__m512i)bits);
}
#else
#define RAGGED static __attribute__((noinline, cold))
RAGGED vfloat load_ragged(const float *p, int64_t n, float fill) {
    vfloat x = vsplat(fill);
    memcpy(&x, p, (size_t)n * 4);
    return x;
}
RAGGED void store_ragged(float *p, vfloat x, int64_t n) { memcpy(p, &x, (size_t)n * 4); }
RAGGED vhalf load_ragged_half(const void *p, int64_t n) {
    vhalf h = ZERO;
    memcpy(&h, p, (size_t)n * 2);
    return h;
}
RAGGED void store_ragged_half(void *p, vhalf h, int64_t n) { memcpy(p, &h, (size_t)n * 2); }
RAGGED vuint load_ragged_bits(const void *p, int64_t n) {
    vuint bits = ZERO;
    memcpy(&bits, p, (size_t)n * 2);
    return bits;
}
RAGGED void store_ragged_bits(void *p, vuint bits, int64_t n) { memcpy(p, &bits, (size_t)n * 2); }
#endif
static inline vfloat load_fill(const float *p, int64_t n, float fill) {
    return WHOLE(n) ? vload(p) : load_ragged(p, n, fill);
}
static inline vfloat load_float(const float *p, int64_t n) { return load_fill(p, n, 0.0f); }
static inline void store_float(float *p, vfloat x, int64_t n) { WHOLE(n) ? vstore(p, x) : store_ragged(p, x, n); }
static inline vuint load_bits(const bf16 *p, int64_t n) { // in the lower halves
    vhalf h;
    if (WHOLE(n)) memcpy(&h, p, sizeof h);
    else h = load_ragged_half(p, n);
    return WIDEN(h);
}
static inline vfloat load_bf16(const bf16 *p, int64_t n) {
    return (vfloat)(load_bits(p, n) << 16);
} // an fp32's upper half
static inline vhalf vround(vfloat x) { // as float_to_bf16 does; the processor's own instruction makes 0 of denormals
#ifdef __AVX512BF16__
    return (vhalf)_mm512_cvtneps_pbh(x);
#else
    vuint u = (vuint)x, rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    vuint nan = (vuint)((vint)(u & 0x7FFFFFFFu) > 0x7F800000);
    return NARROW((nan & ((u >> 16) | 0x40u)) | (~nan & rounded));
#endif
}
static inline void store_bf16(bf16 *p, vfloat x, int64_t n) {
    vhalf h = vround(x);
    if (WHOLE(n)) memcpy(p, &h, sizeof h);
    else store_ragged_half(p, h, n);
}
#ifdef PRECISION_BF16
static inline vfloat load_x(const floatX *p, int64_t n) { return load_bf16(p, n); }
static inline void store_x(floatX *p, vfloat x, int64_t n) { store_bf16(p, x, n); }
#else
static inline vfloat load_x(const floatX *p, int64_t n) { return load_float(p, n); }
static inline void store_x(floatX *p, vfloat x, int64_t n) { store_float(p, x, n); }
#endif

/* 2 VL elements at once, for loops that mostly widen and round. In bf16 they are the even and the odd ones: one
 * instruction widens each half of the 32 bits that two of them share, where neighbours in two vectors take two. */
typedef struct {
    vfloat a, b;
} vpair;
static inline vfloat load_some(const float *p, int64_t n) { return n > 0 ? load_float(p, n) : vsplat(0); }
static inline void store_some(float *p, vfloat x, int64_t n) {
    if (n > 0) store_float(p, x, n);
}
#ifdef PRECISION_BF16
static inline vuint vround_pair(vfloat even, vfloat odd) { // rounded, interleaved
#ifdef __AVX512BF16__
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vuint)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
    return WIDEN(vround(even)) | WIDEN(vround(odd)) << 16;
#endif
}
static inline vpair widen_pair(vuint bits) {
    vpair x = {(vfloat)(bits << 16), (vfloat)(bits & 0xFFFF0000u)};
    return x;
}
static inline vpair load_pair(const floatX *p, int64_t n) {
    vuint bits = ZERO;
    if (__builtin_expect(n >= 2 * VL, 1)) memcpy(&bits, p, sizeof bits);
    else bits = load_ragged_bits(p, n);
    return widen_pair(bits);
}
static inline vpair store_pair(floatX *p, vpair x, int64_t n) { // returns what is stored
    vuint bits = vround_pair(x.a, x.b);
    if (__builtin_expect(n >= 2 * VL, 1)) memcpy(p, &bits, sizeof bits);
    else store_ragged_bits(p, bits, n);
    return widen_pair(bits);
}
static inline vpair load_pair_float(const float *p, int64_t n) {
    const vint lane = LANE_NUMBERS;
    vfloat first = load_some(p, n), second = load_some(p + VL, n - VL);
    vpair x = {vpick(first, second, lane * 2), vpick(first, second, lane * 2 + 1)};
    return x;
}
static inline void store_pair_float(float *p, vpair x, int64_t n) {
    const vint lane = LANE_NUMBERS,
               order = lane / 2 + (lane & 1) * (int)VL; // cuda_bf16.h has operators of its own for what is no int
    store_some(p, vpick(x.a, x.b, order), n);
    store_some(p + VL, vpick(x.a, x.b, order + VL / 2), n - VL);
}
#else
static inline vpair load_pair_float(const float *p, int64_t n) {
    vpair x = {load_some(p, n), load_some(p + VL, n - VL)};
    return x;
}
static inline void store_pair_float(float *p, vpair x, int64_t n) {
    store_some(p, x.a, n), store_some(p + VL, x.b, n - VL);
}
static inline vpair load_pair(const floatX *p, int64_t n) { return load_pair_float(p, n); }
static inline vpair store_pair(floatX *p, vpair x, int64_t n) {
    store_pair_float(p, x, n);
    return x;
}
#endif

/* e^x within 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2; e^r by the polynomial of degree 6, with 1 + r as it begins, whose
 * largest relative error is least (3e-9; Lawson's iteration); 2^n by adding n to the exponent. Exactly 0 below -87.33,
 * where floats lose bits; 2.4e38 above 88.37. */
static inline vfloat vexp(vfloat x) {
    const float round_bias = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vint too_low = x < -87.33f;
    x = vmin(vsplat(88.37f), x);
    vfloat biased = vfma(x, vsplat(1.44269504f), vsplat(round_bias)), n = biased - round_bias;
    vfloat r = vfma(n, vsplat(-0.693145752f), x); // ln 2 in two parts, the first short enough that n times it is exact
    r = vfma(n, vsplat(-1.42860677e-6f), r);
    static const float polynomial[7] = {0.00138145406f, 0.00836874545f, 0.0416683890f, 0.166665211f, 0.49999994f, 1, 1};
    vfloat p = vsplat(polynomial[0]);
#pragma GCC unroll 6
    for (int i = 1; i < 7; i++) p = vfma(p, r, vsplat(polynomial[i]));
    p = (vfloat)((vuint)p + ((vuint)biased << 23));
    return (vfloat)(~too_low & (vint)p);
}
static inline vfloat vreciprocal(vfloat x) { // within 1 ulp; a Newton step is half as dear as a division
#ifdef AVX512
    vfloat y = _mm512_rcp14_ps(x);
    return vfma(y, vfma(-x, y, vsplat(1)), y);
#else
    return 1.0f / x;
#endif
}
static inline float exp_float(float x) { return vexp(vsplat(x))[0]; }

#pragma GCC diagnostic pop
#endif
