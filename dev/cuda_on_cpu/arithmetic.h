/* arithmetic.h: adds the errors of GPU arithmetic that a CPU does not have (CUDA_ON_CPU_ROUGH=1 or 2).
 *
 * Without it, exponentials are the C library's and tensor cores add in fp32 one by one, so that results are closer to
 * the definition than a GPU's. With 1, approximate functions err by up to the maximum that NVIDIA states, by a hash of
 * the result; with 2, always upwards by that maximum, which does not average out. In both, tensor cores add as those of
 * the V100 do, the coarsest (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 2021).
 * The same operands give the same result wherever and whenever they meet.
 */
#ifndef CUDA_ON_CPU_ARITHMETIC_H
#define CUDA_ON_CPU_ARITHMETIC_H
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace emu {

/* x with a relative error of at most `most`. */
inline float approximate(float x, double most) {
    if (!cuda_on_cpu.rough || !isfinite(x) || fabsf(x) < FLT_MIN) return x;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    double error = cuda_on_cpu.rough == 2 ? 1 : (double)(bits ^ bits >> 16) / 2147483648.0 - 1; // -1 to 1
    return (float)((double)x * (1 + most * error));
}

constexpr double ULP = 0x1p-23; // relative, at most

/* ex2.approx: 2^-22 (PTX ISA); exactly 1 at 0. */
inline float approximate_exp2(float x) { return x == 0 ? 1.0f : approximate(exp2f(x), 2 * ULP); }

/* __expf: 2 + floor(|1.173 x|) units in the last place (CUDA C++ Programming Guide, intrinsic functions). */
inline float approximate_exp(float x) {
    return x == 0 ? 1.0f : approximate(expf(x), (2 + floor(fabs(1.173 * x))) * ULP);
}

enum { SUMS = 4 }; // that are computed at once
typedef double DoubleS __attribute__((vector_size(SUMS * 8)));
typedef int64_t Int64S __attribute__((vector_size(SUMS * 8)));
typedef float FloatS __attribute__((vector_size(SUMS * 4)));
typedef int32_t Int32S __attribute__((vector_size(SUMS * 4)));

/* c[j] += sum of a[k * a_step] * b[k * b_step + j], j from 0 to 3, as a tensor core adds: in blocks of 4 exact products
 * and c. Each term is aligned to the largest and truncated to 24 bits; the sum is truncated, too. All four sums are
 * computed at once, by the bits of their exponents, because this takes most of the time of the tests that use it. */
CUDA_ON_CPU_UNSEEN inline void tensor_core_sums(float *c, const float *a, int a_step, const float *b, int b_step,
                                                int count) {
    constexpr int BLOCK = 4, FRACTION = 52, BIAS = 1023; // of a double
    FloatS sums, row;
    memcpy(&sums, c, sizeof sums);
    for (int first = 0; first < count; first += BLOCK) {
        DoubleS terms[BLOCK + 1] = {__builtin_convertvector(sums, DoubleS)};
        for (int k = first; k < first + BLOCK && k < count; k++) {
            memcpy(&row, b + k * b_step, sizeof row);
            terms[k - first + 1] = (double)a[k * a_step] * __builtin_convertvector(row, DoubleS);
        }
        Int64S largest = {}; // of the terms without their signs, whose bits have the order of their values
        for (const DoubleS &t : terms) {
            Int64S magnitude = (Int64S)t & INT64_MAX;
            largest = magnitude > largest ? magnitude : largest;
        }
        const Int64S exponent = largest >> FRACTION; // with the bias; no term is subnormal as a double
        const DoubleS unit = (DoubleS)((exponent - 23) << FRACTION);
        const DoubleS per_unit = (DoubleS)((2 * BIAS + 23 - exponent) << FRACTION);
        Int32S in_units = {};
        DoubleS exact = {};
        for (const DoubleS &t : terms) {
            in_units += __builtin_convertvector(t * per_unit, Int32S);
            exact += t;
        }
        const DoubleS sum = __builtin_convertvector(in_units, DoubleS) * unit;
        FloatS truncated = __builtin_convertvector(sum, FloatS);
        const DoubleS rounded = __builtin_convertvector(truncated, DoubleS);
        const Int64S away = ((Int64S)rounded & INT64_MAX) > ((Int64S)sum & INT64_MAX); // -1: rounded up, else 0
        truncated = (FloatS)((Int32S)truncated + __builtin_convertvector(away, Int32S));
        const Int32S is_finite = __builtin_convertvector(exponent <= 2 * BIAS, Int32S);
        const Int32S is_zero = __builtin_convertvector(largest == 0, Int32S);
        truncated = is_finite ? truncated : __builtin_convertvector(exact, FloatS);
        sums = is_zero ? sums : truncated;
    }
    memcpy(c, &sums, sizeof sums);
}

} // namespace emu
#endif
