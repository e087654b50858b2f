/* embedding.h: tensors, definition and sizes of the embedding, for embedding.c, embedding.cu and mine/. */
#ifndef PAGE_EMBEDDING_H
#define PAGE_EMBEDDING_H
#include "page.h"

/* The token's row of the table; -1 if this slice does not have it. */
static int64_t row_of(const Case *c, int32_t id) { return slice_row(id, (int)c->size[5], (int)c->size[2]); }

/* Fills the ids: of 100 tokens, size[3] are the same one and size[4] are not in the table, which is the tensor `table`.
 * Sets what a call touches of it, and returns how many tokens are in it. */
static int64_t draw_ids(Case *c, const char *table) {
    int64_t N = c->size[0], V = c->size[2], first = c->size[5], rows = 0, present = 0;
    int32_t *ids = I("ids");
    char *seen = (char *)checked_malloc((size_t)V);
    for (int64_t n = 0; n < N; n++) {
        int64_t percent = (int64_t)(mix64((uint64_t)n + 1) % 100);
        ids[n] += (int32_t)first;
        if (percent < c->size[3]) ids[n] = (int32_t)(first + V / 2);
        else if (percent >= 100 - c->size[4]) ids[n] = (int32_t)(n % 2 ? first + V + n : first - 1 - n);
        int64_t row = row_of(c, ids[n]);
        if (row < 0) continue;
        present++;
        rows += !seen[row];
        seen[row] = 1;
    }
    free(seen);
    page_find(c, table)->touched = rows * (page_find(c, table)->touched / V);
    return present;
}

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) { // size: N, C, V, often, absent, first
    int64_t N = c->size[0], C = c->size[1], V = c->size[2];
    reads(c, "embed", IN_X, V, C, 1);
    reads(c, "ids", IN_INT, N, 1, (double)V);
    writes(c, "x", IN_X, N, C);
}

static void forward_prepare(Case *c) { draw_ids(c, "embed"); }

static void forward_definition(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const double *embed = D("embed"), *ids = D("ids");
    double *x = R("x");
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, (int32_t)ids[n]); i < C; i++)
            x[n * C + i] = row < 0 ? 0 : embed[row * C + i];
}

static void forward_in_use(Case *c) {
    IMPLEMENTATION(embedding_forward)
    (c->on, X("x"), X("embed"), I("ids"), (int)c->size[5], (int)c->size[0], (int)c->size[1], (int)c->size[2]);
}

// ---------------------------------------------------------------------------
// backward

static void backward_case(Case *c) { // size: N, C, V, often, absent, first
    int64_t N = c->size[0], C = c->size[1], V = c->size[2];
    updates(c, "dembed", IN_FLOAT, V, C, 0.7);
    reads(c, "dx", IN_X, N, C, 0.7);
    reads(c, "ids", IN_INT, N, 1, (double)V);
    c->flops = c->slots = (double)(N * C);
}

static void backward_prepare(Case *c) {
    page_find(c, "dx")->touched = draw_ids(c, "dembed") * c->size[1] * (int64_t)sizeof(floatX);
}

static void backward_definition(Case *c) {
    int64_t N = c->size[0], C = c->size[1], V = c->size[2];
    const double *dx = D("dx"), *ids = D("ids");
    double *dembed = R("dembed");
    memcpy(dembed, D("dembed"), (size_t)(V * C) * sizeof(double));
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, (int32_t)ids[n]); i < C && row >= 0; i++)
            dembed[row * C + i] += dx[n * C + i];
}

static void backward_in_use(Case *c) {
    int N = (int)c->size[0], C = (int)c->size[1];
    void *workspace = page_scratch(c, IMPLEMENTATION(embedding_backward_scratch)(N, C));
    IMPLEMENTATION(embedding_backward)
    (c->on, F("dembed"), X("dx"), I("ids"), (int)c->size[5], N, C, (int)c->size[2], workspace);
}

// ---------------------------------------------------------------------------
// the page

static const Op forward = {
    "embedding_forward",
    forward_case,
    forward_prepare,
    forward_definition,
    forward_in_use,
    {{"odd", {333, 301, 97, 0, 10, 40}},
     FOR_CPU({"bench-8m", {2048, 288, 4096}}, {"bench-125m", {1024, 768, 32000}},
             {"bench-125m, 90 % one token", {1024, 768, 32000, 90}}, {"1B layer", {1024, 2048, 128256}})
         FOR_GPU({"even", {128, 256, 61, 30}}, {"1B", {8192, 2048, 128256}}, {"8B", {8192, 4096, 128256}})}};

static const Op backward = {"embedding_backward",
                            backward_case,
                            backward_prepare,
                            backward_definition,
                            backward_in_use,
                            {{"odd", {333, 301, 97, 0, 10, 40}},
                             FOR_CPU({"bench-8m", {2048, 288, 4096}}, {"bench-125m", {1024, 768, 32000}},
                                     {"bench-125m, 90 % one token", {1024, 768, 32000, 90}},
                                     {"1B layer, 1 of 4 slices", {1024, 2048, 32064, 0, 75, 32064}})
                                 FOR_GPU({"even", {128, 256, 61, 30}}, {"1B", {8192, 2048, 128256}},
                                         {"1B, 90 % one token", {8192, 2048, 128256, 90}})}};

#endif
