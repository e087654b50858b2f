/* exact_sum.h: sums of fp32 values without rounding, whose result does not depend on the order of additions. */
#ifndef EXACT_SUM_H
#define EXACT_SUM_H
#include "kernel.h" // defines: BOTH

enum { NORM_BLOCK = 128 }; // squares in one rounded partial sum; shards and FSDP units start at multiples of it

/* A fixed-point number with room for 2^42 of the largest fp32 values: digit i counts units of 2^(32 i - 149). A digit
 * may take 2^31 additions before exact_merge has to propagate its carry. */
enum { EXACT_DIGITS = 10 };
typedef struct {
    uint64_t digit[EXACT_DIGITS];
    uint64_t not_finite; // how many of the values were infinite or NaN
} ExactSum;

/* Splits x >= 0 into `low` units of digit i and `high` units of digit i + 1. Returns i, or -1 if x is not finite. */
static inline BOTH int exact_digits(float x, uint64_t *low, uint64_t *high) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 23 & 255);
    int shift = exponent ? exponent - 1 : 0;
    uint32_t implicit_bit = exponent ? 0x800000u : 0;
    uint64_t mantissa = (uint64_t)((bits & 0x7FFFFF) | implicit_bit) << (shift % 32);
    *low = exponent == 255 ? 0 : (uint32_t)mantissa;
    *high = exponent == 255 ? 0 : mantissa >> 32;
    return exponent == 255 ? -1 : shift / 32;
}

static inline void exact_add(ExactSum *s, float x) {
    uint64_t low, high;
    int i = exact_digits(x, &low, &high);
    if (i < 0) {
        s->not_finite++;
        return;
    }
    s->digit[i] += low;
    s->digit[i + 1] += high;
}

static inline void exact_merge(ExactSum *s, const ExactSum *other) {
    uint64_t carry = 0;
    for (int i = 0; i < EXACT_DIGITS; i++) {
        s->digit[i] += other->digit[i] + carry;
        carry = i + 1 < EXACT_DIGITS ? s->digit[i] >> 32 : 0;
        s->digit[i] -= carry << 32;
    }
    s->not_finite += other->not_finite;
}

static inline double exact_value(const ExactSum *s) {
    double x = s->not_finite ? NAN : 0;
    for (int i = EXACT_DIGITS - 1; i >= 0; i--) x += ldexp((double)s->digit[i], 32 * i - 149);
    return x;
}

#endif
