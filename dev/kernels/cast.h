/* cast.h: tensors, definition and sizes of the cast to bf16, for cast.c, cast.cu and mine/. */
#ifndef PAGE_CAST_H
#define PAGE_CAST_H
#include "page.h"

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
    IMPLEMENTATION(cast_to_bf16)(c->on, X("out"), F("in"), c->size[0]);
#else
    IMPLEMENTATION(tree_sum)(c->on, X("out"), F("in"), DTYPE_F32, 1, c->size[0], 0); // the sum of one piece
#endif
}

static const Op op = {"cast",
                      cast_case,
                      NULL,
                      cast_definition,
                      cast_in_use,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-8m tensor", {82944}}, {"bench-125m block", {6292992}}, {"1B layer", {60821504}})
                           FOR_GPU({"even", {4096}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

#endif
