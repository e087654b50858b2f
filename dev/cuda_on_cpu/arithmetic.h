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
#include <limits.h>
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

inline float toward_zero(double x) {
    float f = (float)x;
    return fabs((double)f) > fabs(x) ? nextafterf(f, 0) : f;
}

/* c + sum of a[k * a_step] * b[k * b_step], as a tensor core adds: in blocks of 4 exact products and c. Each term is
 * aligned to the largest and truncated to 24 bits; the sum is truncated, too. */
inline float tensor_core_sum(float c, const float *a, int a_step, const float *b, int b_step, int count) {
    enum { BLOCK = 4 };
    for (int first = 0; first < count; first += BLOCK) {
        double terms[BLOCK + 1] = {c};
        int top = INT_MIN, finite = isfinite(c);
        for (int k = 0; k < BLOCK && first + k < count; k++)
            terms[k + 1] = (double)a[(first + k) * a_step] * (double)b[(first + k) * b_step];
        for (double t : terms) {
            finite &= isfinite(t);
            if (t != 0 && isfinite(t) && ilogb(t) > top) top = ilogb(t);
        }
        if (!finite) {
            for (int k = 1; k <= BLOCK; k++) c = (float)((double)c + terms[k]);
        } else if (top != INT_MIN) {
            double unit = ldexp(1, top - 23), sum = 0;
            for (double t : terms) sum += trunc(t / unit) * unit;
            c = toward_zero(sum);
        }
    }
    return c;
}

} // namespace emu
#endif
