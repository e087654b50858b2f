/* squared_norm.h: tensors, definition and sizes of the squared norm, for squared_norm.c and squared_norm.cu. */
#ifndef PAGE_SQUARED_NORM_H
#define PAGE_SQUARED_NORM_H
#include "page.h"

static void norm_case(Case *c) { // size: count
    reads(c, "x", IN_FLOAT, c->size[0], 1, 1);
    writes(c, "total", IN_FLOAT, 1, 1);
    c->flops = 2.0 * (double)c->size[0];
    c->slots = (double)c->size[0];
}

static void norm_definition(Case *c) {
    const double *x = D("x");
    double total = 0;
    for (int64_t i = 0; i < c->size[0]; i++) total += x[i] * x[i];
    R("total")[0] = total;
}

static void norm_in_use(Case *c); // the page has it: an exact sum becomes a float

static const Op norm_op = {
    "squared_norm",
    norm_case,
    NULL,
    norm_definition,
    norm_in_use,
    {{"odd", {1003}},
     FOR_CPU({"bench-8m tensor", {82944}}, {"bench-125m block", {6292992}}, {"1B layer", {60821504}})
         FOR_GPU({"even", {12800}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

#endif
