/* tree_sum.h: tensors, definition and sizes of the tree sum, for tree_sum.c, tree_sum.cu and mine/. */
#ifndef PAGE_TREE_SUM_H
#define PAGE_TREE_SUM_H
#include "page.h"

static void sum_case(Case *c) { // size: n, count, accumulate (1: += the sum)
    int64_t n = c->size[0], count = c->size[1], accumulate = c->size[2];
    if (accumulate) updates(c, "out", IN_FLOAT, count, 1, 0.7); // one element per row: each must meet the bound
    else writes(c, "out", IN_FLOAT, count, 1);
    reads(c, "pieces", IN_FLOAT, n, count, 0.7); // 0.7: values of all 24 bits, whose sums are rounded
    c->flops = c->slots = (double)(n - 1 + accumulate) * (double)count;
    c->float_bound = 1e-30; // every bit must be equal
}

static double added(const Case *c, double a, double b) { return c->exactly ? a + b : (double)(float)(a + b); }

/* The sum of element i of pieces first ... first + width - 1, width a power of two; those from n on do not exist. */
static double tree(const Case *c, const double *pieces, int64_t i, int64_t first, int64_t width) {
    if (width == 1) return pieces[first * c->size[1] + i];
    int64_t middle = first + width / 2;
    double left = tree(c, pieces, i, first, width / 2);
    return middle < c->size[0] ? added(c, left, tree(c, pieces, i, middle, width / 2)) : left;
}
static int64_t tree_width(const Case *c) {
    int64_t width = 1;
    while (width < c->size[0]) width *= 2;
    return width;
}

static void sum_definition(Case *c) {
    int64_t n = c->size[0], count = c->size[1], width = tree_width(c);
    const double *pieces = D("pieces"), *before = c->size[2] ? D("out") : NULL;
    double *out = R("out");
    for (int64_t i = 0; i < count; i++) {
        if (!wanted(c, i, count, 10.0 * (double)n)) continue;
        double sum = tree(c, pieces, i, 0, width);
        out[i] = before ? added(c, before[i], sum) : sum;
    }
}

static void pieces_case(Case *c) { // size: n, count
    int64_t n = c->size[0], count = c->size[1];
    writes(c, "out", IN_X, count, 1);
    reads(c, "pieces", IN_X, n, count, 0.7);
    c->flops = c->slots = (double)(n - 1) * (double)count;
    c->bound = c->row_bound = c->float_bound = 1e-30; // every bit must be equal
}
static void pieces_definition(Case *c) {
    double *out = R("out");
    sum_definition(c);
    for (int64_t i = 0; i < c->size[1]; i++)
        if (memcmp(&out[i], &UNWRITTEN, 8)) out[i] = stored(c, out[i]);
}
static void pieces_in_use(Case *c) {
    IMPLEMENTATION(sum_pieces)(c->on, X("out"), X("pieces"), (int)c->size[0], c->size[1]);
}

static void sum_in_use(Case *c) {
    IMPLEMENTATION(tree_sum)(c->on, F("out"), F("pieces"), DTYPE_F32, (int)c->size[0], c->size[1], (int)c->size[2]);
}

static const Op op = {"tree_sum",
                      sum_case,
                      NULL,
                      sum_definition,
                      sum_in_use,
                      {{"odd", {7, 1003, 1}},
                       FOR_CPU({"bench-8m tensor, 8 ranks", {8, 10368}}, {"bench-125m block, 2 ranks", {2, 3146496}},
                               {"bench-125m block, 8 ranks", {8, 786624}}, {"bench-125m block, += 1", {1, 6292992, 1}},
                               {"1B layer, 8 ranks", {8, 7602688}})
                           FOR_GPU({"even", {5, 2048}}, {"1B layer, 2 ranks", {2, 30410752}},
                                   {"1B layer, 8 ranks", {8, 7602688}}, {"8B layer, 8 ranks, +=", {8, 27264000, 1}})}};

static const Op pieces = {"sum_pieces",
                          pieces_case,
                          NULL,
                          pieces_definition,
                          pieces_in_use,
                          {{"odd", {7, 1003}},
                           FOR_CPU({"1B activations, 2 ranks", {2, 2097152}}, {"1B activations, 8 ranks", {8, 524288}})
                               FOR_GPU({"even", {5, 2048}}, {"8B activations, 2 ranks", {2, 16777216}},
                                       {"8B activations, 8 ranks", {8, 4194304}})}};

#endif
