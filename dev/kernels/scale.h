/* scale.h: tensors, definition and sizes of scaling, for scale.c, scale.cu and mine/. */
#ifndef PAGE_SCALE_H
#define PAGE_SCALE_H
#include "page.h"

static const float SCALE_BY = 1.6f; // alpha 16, rank 10: no power of two, so that elements are rounded

static void scale_case(Case *c) { // size: count
    int64_t count = c->size[0];   // one element per row: each must meet the bound
    updates(c, "x", IN_X, count, 1, 1);
    c->flops = (double)count;
    c->slots = c->flops;
    c->restore = 1; // repeated calls would end at infinity
}

static void scale_definition(Case *c) {
    const double *x = D("x");
    double *out = R("x");
    for (int64_t i = 0; i < c->size[0]; i++)
        if (wanted(c, i, c->size[0], 1)) out[i] = x[i] * SCALE_BY;
}

static void scale_in_use(Case *c) { IMPLEMENTATION(scale)(c->on, X("x"), SCALE_BY, c->size[0]); }

static const Op op = {"scale",
                      scale_case,
                      NULL,
                      scale_definition,
                      scale_in_use,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-125m hidden, rank 16", {16384}}, {"8B hidden, rank 16", {131072}}) FOR_GPU(
                           {"even", {4096}}, {"8B hidden, rank 16", {131072}}, {"8B hidden, rank 256", {2097152}})}};

#endif
