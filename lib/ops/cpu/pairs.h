/* pairs.h: pairs of vectors, 2 VL elements, for loops that mostly convert floatX.
 *
 * In fp32, a is the first VL elements and b the next. In bf16, a has the even and b the odd elements: two neighbors
 * share 32 bits, and one shift or mask converts one of them, where vectors of adjacent elements take two instructions.
 */
#ifndef CPU_PAIRS_H
#define CPU_PAIRS_H
#include "vectors.h" // defines: vfloat, VL, vpick, load_float, store_float, vround

typedef struct {
    vfloat a, b;
} vpair;

static inline vpair pair_of(vfloat a, vfloat b) {
    vpair pair = {a, b};
    return pair;
}
static inline vpair pair_splat(float s) { return pair_of(vsplat(s), vsplat(s)); }
static inline vpair pair_add(vpair x, vpair y) { return pair_of(x.a + y.a, x.b + y.b); }
static inline vpair pair_mul(vpair x, vpair y) { return pair_of(x.a * y.a, x.b * y.b); }
static inline vpair pair_scale(vpair x, float s) { return pair_of(x.a * s, x.b * s); }
static inline vpair pair_fma(vpair x, vpair y, vpair z) { return pair_of(vfma(x.a, y.a, z.a), vfma(x.b, y.b, z.b)); }
static inline vpair pair_rounded(vpair x) { return pair_of(vrounded(x.a), vrounded(x.b)); }

/* A vector that may lie wholly beyond the end of the row. */
static inline vfloat load_some(const float *p, int64_t n) { return n > 0 ? load_float(p, n) : vsplat(0); }
static inline void store_some(float *p, vfloat x, int64_t n) {
    if (n > 0) store_float(p, x, n);
}

/* n of the 2 VL 16-bit elements that a vector of 32-bit lanes holds; the others are zero, and are not stored. */
#ifdef AVX512
TAIL vuint load_tail_bits(const void *p, int64_t n) { return (vuint)_mm512_maskz_loadu_epi16((1u << n) - 1, p); }
TAIL void store_tail_bits(void *p, vuint bits, int64_t n) { _mm512_mask_storeu_epi16(p, (1u << n) - 1, (__m512i)bits); }
#else
TAIL vuint load_tail_bits(const void *p, int64_t n) {
    vuint bits = ZERO;
    memcpy(&bits, p, (size_t)n * 2);
    return bits;
}
TAIL void store_tail_bits(void *p, vuint bits, int64_t n) { memcpy(p, &bits, (size_t)n * 2); }
#endif

#ifdef PRECISION_BF16
/* Rounds both vectors and interleaves them: element 2 i is lane i of `even`, element 2 i + 1 lane i of `odd`. */
static inline vuint vround_pair(vfloat even, vfloat odd) {
#ifdef __AVX512BF16__
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vuint)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
    return WIDEN(vround(even)) | WIDEN(vround(odd)) << 16;
#endif
}
static inline vpair widen_pair(vuint bits) { return pair_of((vfloat)(bits << 16), (vfloat)(bits & 0xFFFF0000u)); }
/* 2 VL bf16, two in each 32-bit lane; zeros from n on. */
static inline vuint load_words(const bf16 *p, int64_t n) {
    vuint words;
    if (__builtin_expect(n >= 2 * VL, 1)) memcpy(&words, p, sizeof words);
    else words = load_tail_bits(p, n);
    return words;
}
static inline vpair load_pair(const floatX *p, int64_t n) { return widen_pair(load_words(p, n)); }
/* Returns what was stored: x rounded to floatX. */
static inline vpair store_pair(floatX *p, vpair x, int64_t n) {
    vuint bits = vround_pair(x.a, x.b);
    if (__builtin_expect(n >= 2 * VL, 1)) memcpy(p, &bits, sizeof bits);
    else store_tail_bits(p, bits, n);
    return widen_pair(bits);
}
static inline vpair load_pair_float(const float *p, int64_t n) {
    const vint lane = {LANE_NUMBERS};
    vfloat first = load_some(p, n), second = load_some(p + VL, n - VL);
    return pair_of(vpick(first, second, lane * 2), vpick(first, second, lane * 2 + 1));
}
static inline void store_pair_float(float *p, vpair x, int64_t n) {
    // (int): cuda_bf16.h overloads * for an enumerator
    const vint lane = {LANE_NUMBERS}, order = lane / 2 + (lane & 1) * (int)VL;
    store_some(p, vpick(x.a, x.b, order), n);
    store_some(p + VL, vpick(x.a, x.b, order + VL / 2), n - VL);
}
#else
static inline vpair load_pair_float(const float *p, int64_t n) {
    return pair_of(load_some(p, n), load_some(p + VL, n - VL));
}
static inline void store_pair_float(float *p, vpair x, int64_t n) {
    store_some(p, x.a, n);
    store_some(p + VL, x.b, n - VL);
}
static inline vpair load_pair(const floatX *p, int64_t n) { return load_pair_float(p, n); }
static inline vpair store_pair(floatX *p, vpair x, int64_t n) {
    store_pair_float(p, x, n);
    return x;
}
#endif

#endif
