/* cast.c: fp32 rounded to floatX: to the nearest bf16, ties to even; in fp32 a copy.
 *
 * A bf16 is the upper half of an fp32, so rounding adds to the lower half and lets the carry reach the upper half. Four
 * bytes are read and two written: once several elements are converted at a time, memory bandwidth is the limit. All
 * versions must give the definition's bits.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp cast.c -o cast -lm
 * with cast.h page.h page_cpu.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "cast.h"

static void cast_by_value(Case *c) {
    const float *in = F("in");
    floatX *out = X("out");
    for (int64_t i = 0; i < c->size[0]; i++)
        out[i] = from_float(
            (float)nearest(in[i], FLOATX == DTYPE_BF16 ? 8 : 24)); // already rounded: from_float changes no bit
}

static void cast_scalar(Case *c) {
    const float *in = F("in");
    floatX *out = X("out");
    for (int64_t i = 0; i < c->size[0]; i++) out[i] = from_float(in[i]);
}

static inline void store_rounded(floatX *out, vfloat x, int64_t n) {
#ifdef PRECISION_BF16
    vuint u = (vuint)x, rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16,
          nan = (vuint)((vint)(u & 0x7FFFFFFFu) > 0x7F800000);
    vhalf half = NARROW((nan & ((u >> 16) | 0x40u)) | (~nan & rounded));
    if (WHOLE(n)) memcpy(out, &half, sizeof half);
    else store_tail_half(out, half, n);
#else
    store_float(out, x, n);
#endif
}
static void cast_integers(Case *c) {
    int64_t count = c->size[0];
    const float *in = F("in");
    floatX *out = X("out");
    for (int64_t i = 0; i < count; i += VL) store_rounded(out + i, load_float(in + i, count - i), count - i);
}

static void cast_instruction(Case *c) {
    int64_t count = c->size[0];
    const float *in = F("in");
    floatX *out = X("out");
    for (int64_t i = 0; i < count; i += VL) store_x(out + i, load_float(in + i, count - i), count - i);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 by value",
     "The number is split into fraction and exponent, and the fraction is rounded: three function calls per element.",
     cast_by_value},
    {"2 by bits",
     "Half of the last kept bit is added to the bits, a little less if that would round a tie to odd; the carry does "
     "the rest. The compiler vectorizes this.",
     cast_scalar},
    {"3 vectors",
     "The same integer arithmetic on the vectors of lib/ops/cpu/vectors.h, with a mask for NaN: no faster where the "
     "compiler vectorized the loop, but not left to it.",
     cast_integers},
    {"4 the instruction",
     "Processors with AVX512_BF16 round by one instruction instead of nine; elsewhere nothing changes.",
     cast_instruction},
    {"in use: threads", "Vectors divided over threads.", cast_in_use}};

PAGE({&op, op_versions})
