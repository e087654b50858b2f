/* fp8.h: the formats E4M3 and E5M2 (Micikevicius et al. 2022, arXiv 2209.05433) and a tensor's scale, defined.
 *
 * bench_gpu fp8 measures matmuls with them; the program does not use them. Values are rounded to the nearest, ties to
 * even, and saturate: what is too large becomes the largest finite value, with its sign. NaN stays NaN. A caller may
 * rely on: x NaN or infinite anywhere in a tensor makes all of its elements NaN, by the scale.
 */
#ifndef FP8_H
#define FP8_H
#include "../../lib/device/base.h" // defines: BOTH
#include <math.h>
#include <string.h>

typedef struct {
    int mantissa, bias; // bits of the mantissa, bias of the exponent
    float largest;      // 1.75 times a power of two
    int top;            // that power
} Fp8Format;
static const Fp8Format E4M3 = {3, 7, 448, 8}, E5M2 = {2, 15, 57344, 15};
enum { FP8_NAN = 0x7F };

static inline BOTH uint32_t fp8_magnitude(float x) { // the bits of |x|: in the order of magnitudes, NaN above infinity
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7FFFFFFFu;
}

static inline BOTH uint8_t fp8_round(float x, Fp8Format f) {
    uint32_t bits = fp8_magnitude(x), sign = signbit(x) ? 0x80 : 0, shift = 23 - (uint32_t)f.mantissa;
    if (bits > 0x7F800000u) return FP8_NAN;
    float size = fminf(fabsf(x), f.largest);
    if ((int)(bits >> 23) - 127 < 1 - f.bias) // below the normal numbers: multiples of 2^(1 - bias - mantissa)
        return (uint8_t)(sign | (uint32_t)rintf(ldexpf(size, f.bias - 1 + f.mantissa)));
    bits = fp8_magnitude(size);
    bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1); // a carry reaches the exponent
    return (uint8_t)(sign | ((bits >> shift) - ((127u - (uint32_t)f.bias) << f.mantissa)));
}

static inline BOTH float fp8_value(uint8_t x, Fp8Format f) {
    int exponent = (x & 0x7F) >> f.mantissa, fraction = x & ((1 << f.mantissa) - 1), special = f.mantissa == 2;
    float size = exponent ? ldexpf((float)(fraction + (1 << f.mantissa)), exponent - f.bias - f.mantissa)
                          : ldexpf((float)fraction, 1 - f.bias - f.mantissa);
    if (special && exponent == 31) size = fraction ? NAN : INFINITY; // E4M3 has no infinity, and one NaN
    if (!special && (x & 0x7F) == FP8_NAN) size = NAN;
    return x & 0x80 ? -size : size;
}

/* The scale of a tensor whose largest |x| is amax: x is stored as fp8_round(x * scale). The largest power of two with
 * amax * scale <= largest, so that dividing by it is exact, but at most 2^126. 1 if amax is 0 or subnormal; NaN if amax
 * is infinite or NaN. */
static inline BOTH float fp8_scale(float amax, Fp8Format f) {
    int exponent = (int)(fp8_magnitude(amax) >> 23), above = (fp8_magnitude(amax) & 0x7FFFFFu) > 0x600000u; // 1.75
    int power = f.top - (exponent - 127) - above;
    if (exponent == 255) return NAN;
    if (exponent == 0) return 1;
    return ldexpf(1, power < 126 ? power : 126);
}
#endif
