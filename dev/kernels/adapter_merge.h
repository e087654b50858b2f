/* adapter_merge.h: tensors, definition and sizes of adapter_merge, for adapter_merge.c, adapter_merge.cu and mine/. */
#ifndef PAGE_ADAPTER_MERGE_H
#define PAGE_ADAPTER_MERGE_H
#include "page.h"

static const float MERGE_BY = 1.6f;

static void merge_case(Case *c) { // size: OC, IC, R
    int64_t OC = c->size[0], IC = c->size[1], rank = c->size[2];
    reads(c, "a", IN_FLOAT, rank, IC, 1);
    reads(c, "b", IN_FLOAT, OC, rank, 1);
    updates(c, "w", IN_FLOAT, OC, IC, 1);
    c->flops = 2.0 * (double)(rank * OC * IC);
    c->slots = (double)((rank + 1) * OC * IC);
}

static void merge_definition(Case *c) {
    int64_t OC = c->size[0], IC = c->size[1], rank = c->size[2];
    const double *a = D("a"), *b = D("b"), *w = D("w");
    double *out = R("w");
    for (int64_t o = 0; o < OC; o++)
        for (int64_t i = 0; i < IC && wanted(c, o, OC, 2.0 * (double)(rank * IC)); i++) {
            double sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += b[o * rank + r] * a[r * IC + i];
            out[o * IC + i] = w[o * IC + i] + MERGE_BY * sum;
        }
}

static void merge_in_use(Case *c) {
    IMPLEMENTATION(adapter_merge)(c->on, F("w"), F("a"), F("b"), MERGE_BY, (int)c->size[2], c->size[1], c->size[0]);
}

static const Op op = {"adapter_merge",
                      merge_case,
                      NULL,
                      merge_definition,
                      merge_in_use,
                      {{"odd", {33, 129, 7}},
                       FOR_CPU({"bench-125m gate", {2048, 768, 16}}, {"1B o", {2048, 2048, 16}}) FOR_GPU(
                           {"even", {64, 128, 8}}, {"1B o", {2048, 2048, 16}}, {"8B down", {4096, 14336, 16}})}};

#endif
