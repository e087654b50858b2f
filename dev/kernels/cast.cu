/* cast.cu: fp32 rounded to floatX: to the nearest bf16, ties to even; in fp32 a copy.
 *
 * A bf16 is the upper half of an fp32, so rounding adds to the lower half and lets the carry reach the upper half. Four
 * bytes are read and two written: once several elements are converted at a time, memory bandwidth is the limit. All
 * versions must give the definition's bits.
 */
#include "page.h" // reads(), writes(): declare a tensor; the last argument of reads() scales its random values.
                  // X(name), F(name): its data in floatX or float. D(name), R(name): the definition's inputs and
                  // results in double. c->slots: arithmetic instructions × lanes of an ideal version. From
                  // lib/ops/cpu/vectors.h: vfloat, VL, load_float, …

static void cast_case(Case *c) { // size: count, significant bits of PyTorch's figures (8: bf16, 24: fp32)
    int64_t count = c->size[0];  // one element per row: each must meet the bound
    reads(c, "in", IN_FLOAT, count, 1, 1);
    writes(c, "out", IN_X, count, 1);
    c->bound = c->row_bound = 1e-30; // every bit must be equal
}

/* x to the nearest number of `bits` significant bits, infinity where it leaves fp32's range of exponents. */
static double nearest(double x, int bits) {
    int exponent;
    double fraction = frexp(x, &exponent),
           y = ldexp(rint(ldexp(fraction, bits)), exponent - bits); // rint rounds ties to even
    return fabs(y) < ldexp(1, 128) ? y : copysign(INFINITY, x);
}

static void cast_definition(Case *c) {
    int bits = FLOATX == DTYPE_BF16 ? 8 : 24;
    if (c->exactly) bits = (int)c->size[1];
    const double *in = D("in");
    double *out = R("out");
    for (int64_t i = 0; i < c->size[0]; i++)
        if (wanted(c, i, c->size[0], 30)) out[i] = nearest(in[i], bits);
}

static void cast_in_use(Case *c) {
#ifdef PRECISION_BF16
    cast_to_bf16(c->dev, X("out"), F("in"), c->size[0]);
#else
    tree_sum(c->dev, X("out"), F("in"), DTYPE_F32, 1, c->size[0], 0); // the sum of one piece
#endif
}

#ifndef USE_CUDA
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

static const Version op_versions[] = {
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
    {"in use: threads", "Vectors divided over threads.", cast_in_use},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "cast.cuh" // defines: op_versions
#endif

static const Op op = {"cast",
                      cast_case,
                      NULL,
                      cast_definition,
                      op_versions,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-8m tensor", {82944}}, {"bench-125m block", {6292992}}, {"1B layer", {60821504}})
                           FOR_GPU({"even", {4096}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

PAGE(&op)
