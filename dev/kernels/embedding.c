/* embedding.c: row n of x is row ids[n] of the table. Backward: row n of dx is added to row ids[n] of the gradient.
 *
 * There is almost no arithmetic, and rows are read from anywhere in the table. The question of backward is which thread
 * may add: tokens repeat, and if two threads add to one row at once, an addition is lost or, with atomics, the order
 * changes from run to run. With tensor parallelism the table is a slice of the vocabulary, V tokens from `first` on;
 * tokens of other slices give a row of zeros and no gradient.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp embedding.c -o embedding -lm
 * with embedding.h page.h page_cpu.h lib/device/kernel.h lib/ops/cpu/layers.h lib/ops/cpu/pairs.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/layers.h"
#include "embedding.h"

static void forward_columns(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *embed = X("embed");
    const int32_t *ids = I("ids");
    floatX *x = X("x");
    for (int64_t i = 0; i < C; i++)
        for (int64_t n = 0; n < N; n++) {
            int64_t row = row_of(c, ids[n]);
            x[n * C + i] = row < 0 ? from_float(0) : embed[row * C + i];
        }
}

static void forward_rows(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *embed = X("embed");
    const int32_t *ids = I("ids");
    floatX *x = X("x");
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, ids[n]); i < C; i++)
            x[n * C + i] = row < 0 ? from_float(0) : embed[row * C + i];
}

static void forward_copies(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *embed = X("embed");
    const int32_t *ids = I("ids");
    floatX *x = X("x");
    for (int64_t n = 0; n < N; n++) {
        int64_t row = row_of(c, ids[n]);
        if (row < 0) memset(x + n * C, 0, (size_t)C * sizeof(floatX));
        else memcpy(x + n * C, embed + row * C, (size_t)C * sizeof(floatX));
    }
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 by columns",
     "One element of every token, then the next element of every token: each one comes from another cache line.",
     forward_columns},
    {"2 by rows",
     "A token's whole row at once: memory is read and written in order, except for the jump from row to row.",
     forward_rows},
    {"3 copies",
     "One check per row whether it is in this slice, then memcpy, which moves whole vectors whatever the element type.",
     forward_copies},
    {"in use: threads", "Rows divided over threads; copies need no order.", forward_in_use}};
static void backward_search(Case *c) {
    int64_t N = c->size[0], C = c->size[1], V = c->size[2];
    const floatX *dx = X("dx");
    const int32_t *ids = I("ids");
    float *dembed = F("dembed");
    for (int64_t v = 0; v < V; v++)
        for (int64_t n = 0; n < N; n++)
            for (int64_t i = 0; i < C && row_of(c, ids[n]) == v; i++) dembed[v * C + i] += to_float(dx[n * C + i]);
}

/* Elements [from, to) of every row. */
static void backward_part(Case *c, int64_t from, int64_t to) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *dx = X("dx");
    const int32_t *ids = I("ids");
    float *dembed = F("dembed");
    for (int64_t n = 0; n < N; n++) {
        int64_t row = row_of(c, ids[n]);
        if (row < 0) continue;
        float *out = dembed + row * C;
        for (int64_t i = from; i < to; i += VL)
            store_float(out + i, load_float(out + i, to - i) + load_x(dx + n * C + i, to - i), to - i);
    }
}
static void backward_scatter(Case *c) { backward_part(c, 0, c->size[1]); }

static void backward_atomic(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *dx = X("dx");
    const int32_t *ids = I("ids");
    float *dembed = F("dembed");
#pragma omp parallel for num_threads(c->on->threads)
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, ids[n]); i < C && row >= 0; i++) {
            float *to = dembed + row * C + i, d = to_float(dx[n * C + i]);
#pragma omp atomic
            *to += d;
        }
}

static void backward_columns(Case *c) {
    int64_t vectors = blocks_of(c->size[1], VL), threads = c->on->threads;
#pragma omp parallel for num_threads(c->on->threads)
    for (int64_t t = 0; t < threads; t++)
        backward_part(c, vectors * t / threads * VL, min_i64(vectors * (t + 1) / threads * VL, c->size[1]));
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 search",
     "Each row of the table searches all tokens for its own: no two threads add to the same row, but almost every "
     "comparison is in vain.",
     backward_search},
    {"2 scatter",
     "Each token adds its row, a vector at a time, to the row that its id names: every token is read once.",
     backward_scatter},
    {"3 atomic additions",
     "Tokens divided over threads. Two threads may add to the same row, so each element is added by an atomic "
     "compare-and-exchange: slower than one thread alone, and the order, hence the bits, changes from run to run.",
     backward_atomic},
    {"4 columns",
     "Columns divided over threads instead, with a scatter in each: the speed does not depend on the tokens, and the "
     "bits do not depend on the number of threads; but each thread reads short pieces of all rows.",
     backward_columns},
    {"in use: columns", "The op of lib/ops/cpu: version 4.", backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
