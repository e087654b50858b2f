/* dequantize.h: tensors, definition and sizes of dequantization, for dequantize.c, dequantize.cu and mine/. */
#ifndef PAGE_DEQUANTIZE_H
#define PAGE_DEQUANTIZE_H
#include "page.h"

static void dequantize_case(Case *c) { // size: count
    int64_t count = c->size[0];        // one element per row: each must meet the bound
    reads(c, "in", IN_BYTE, count, 1, 1);
    reads(c, "scales", IN_FLOAT, blocks_of(count, INT8_BLOCK), 1, 1);
    writes(c, "out", IN_X, count, 1);
    c->flops = (double)count;
    c->slots = c->flops;
}

static void dequantize_definition(Case *c) {
    const double *in = D("in"), *scales = D("scales");
    double *out = R("out");
    for (int64_t i = 0; i < c->size[0]; i++)
        if (wanted(c, i, c->size[0], 1)) out[i] = in[i] * scales[i / INT8_BLOCK];
}

static void dequantize_in_use(Case *c) {
    IMPLEMENTATION(dequantize)(c->on, X("out"), B("in"), F("scales"), c->size[0]);
}

static const Op op = {"dequantize",
                      dequantize_case,
                      NULL,
                      dequantize_definition,
                      dequantize_in_use,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-125m matrix", {1572864}}, {"1B matrix", {16777216}}, {"8B matrix", {58720256}})
                           FOR_GPU({"even", {4096}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

#endif
