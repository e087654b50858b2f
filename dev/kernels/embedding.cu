/* embedding.cu: row n of x is row ids[n] of the table. Backward: row n of dx is added to row ids[n] of the gradient.
 *
 * There is almost no arithmetic, and rows are read from anywhere in the table. The question of backward is which thread
 * may add: tokens repeat, and if two threads add to one row at once, an addition is lost or, with atomics, the order
 * changes from run to run. With tensor parallelism the table is a slice of the vocabulary, V tokens from `first` on;
 * tokens of other slices give a row of zeros and no gradient.
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. X(name), F(name), I(name): its data in floatX, float, int32_t. D(name), R(name):
                  // the definition's inputs and results in double. c->slots: arithmetic instructions × lanes of an
                  // ideal version. From lib/ops/cpu/vectors.h: VL, load_x, load_float, …

/* The token's row of the table; -1 if this slice does not have it. */
static int64_t row_of(const Case *c, int32_t id) { return slice_row(id, (int)c->size[5], (int)c->size[2]); }

/* Fills the ids: of 100 tokens, `often` are the same one and `absent` are not in the table. Counts the rows of the
 * table and the tokens that a call touches. */
static void draw_ids(Case *c, int often, int absent, int64_t *rows, int64_t *present) {
    int64_t N = c->size[0], V = c->size[2], first = c->size[5];
    int32_t *ids = I("ids");
    char *seen = (char *)checked_malloc((size_t)V);
    *rows = *present = 0;
    for (int64_t n = 0; n < N; n++) {
        int64_t percent = (int64_t)(mix64((uint64_t)n + 1) % 100);
        ids[n] += (int32_t)first;
        if (percent < often) ids[n] = (int32_t)(first + V / 2);
        else if (percent >= 100 - absent) ids[n] = (int32_t)(n % 2 ? first + V + n : first - 1 - n);
        int64_t row = row_of(c, ids[n]);
        if (row >= 0) {
            ++*present;
            *rows += !seen[row];
            seen[row] = 1;
        }
    }
    free(seen);
}

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) { // size: N, C, V, often, absent, first
    int64_t N = c->size[0], C = c->size[1], V = c->size[2];
    reads(c, "embed", IN_X, V, C, 1);
    reads(c, "ids", IN_INT, N, 1, (double)V);
    writes(c, "x", IN_X, N, C);
}

static void forward_prepare(Case *c) {
    int64_t rows, present;
    draw_ids(c, (int)c->size[3], (int)c->size[4], &rows, &present);
    page_find(c, "embed")->touched = rows * c->size[1] * (int64_t)sizeof(floatX);
}

static void forward_definition(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const double *embed = D("embed"), *ids = D("ids");
    double *x = R("x");
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, (int32_t)ids[n]); i < C; i++)
            x[n * C + i] = row < 0 ? 0 : embed[row * C + i];
}

static void forward_in_use(Case *c) {
    embedding_forward(c->dev, X("x"), X("embed"), I("ids"), (int)c->size[5], (int)c->size[0], (int)c->size[1],
                      (int)c->size[2]);
}

#ifndef USE_CUDA
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

static const Version forward_versions[] = {
    {"1 by columns",
     "One element of every token, then the next element of every token: each one comes from another cache line.",
     forward_columns},
    {"2 by rows",
     "A token's whole row at once: memory is read and written in order, except for the jump from row to row.",
     forward_rows},
    {"3 copies",
     "One check per row whether it is in this slice, then memcpy, which moves whole vectors whatever the element type.",
     forward_copies},
    {"in use: threads", "Rows divided over threads; copies need no order.", forward_in_use},
    END_OF_VERSIONS};
#endif

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
    int64_t rows, present, C = c->size[1];
    draw_ids(c, (int)c->size[3], (int)c->size[4], &rows, &present);
    page_find(c, "dembed")->touched = rows * C * (int64_t)sizeof(float);
    page_find(c, "dx")->touched = present * C * (int64_t)sizeof(floatX);
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
    embedding_backward(c->dev, F("dembed"), X("dx"), I("ids"), (int)c->size[5], (int)c->size[0], (int)c->size[1],
                       (int)c->size[2]);
}

#ifndef USE_CUDA
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
#pragma omp parallel for num_threads(c->dev->threads)
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0, row = row_of(c, ids[n]); i < C && row >= 0; i++) {
            float *to = dembed + row * C + i, d = to_float(dx[n * C + i]);
#pragma omp atomic
            *to += d;
        }
}

static void backward_columns(Case *c) {
    int64_t vectors = blocks_of(c->size[1], VL), threads = c->dev->threads;
#pragma omp parallel for num_threads(c->dev->threads)
    for (int64_t t = 0; t < threads; t++)
        backward_part(c, vectors * t / threads * VL, min_i64(vectors * (t + 1) / threads * VL, c->size[1]));
}

static const Version backward_versions[] = {
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
    {"in use: columns", "The op of lib/ops/cpu: version 4.", backward_in_use},
    END_OF_VERSIONS};
#endif

// ---------------------------------------------------------------------------
// the page

#ifdef USE_CUDA
#include "embedding.cuh" // defines: forward_versions, backward_versions
#endif

static const Op forward = {
    "embedding_forward",
    forward_case,
    forward_prepare,
    forward_definition,
    forward_versions,
    {{"odd", {333, 301, 97, 0, 10, 40}},
     FOR_CPU({"bench-8m", {2048, 288, 4096}}, {"bench-125m", {1024, 768, 32000}},
             {"bench-125m, 90 % one token", {1024, 768, 32000, 90}}, {"1B layer", {1024, 2048, 128256}})
         FOR_GPU({"even", {128, 256, 61, 30}}, {"1B", {8192, 2048, 128256}}, {"8B", {8192, 4096, 128256}})}};

static const Op backward = {"embedding_backward",
                            backward_case,
                            backward_prepare,
                            backward_definition,
                            backward_versions,
                            {{"odd", {333, 301, 97, 0, 10, 40}},
                             FOR_CPU({"bench-8m", {2048, 288, 4096}}, {"bench-125m", {1024, 768, 32000}},
                                     {"bench-125m, 90 % one token", {1024, 768, 32000, 90}},
                                     {"1B layer, 1 of 4 slices", {1024, 2048, 32064, 0, 75, 32064}})
                                 FOR_GPU({"even", {128, 256, 61, 30}}, {"1B", {8192, 2048, 128256}},
                                         {"1B, 90 % one token", {8192, 2048, 128256, 90}})}};

PAGE(&forward, &backward)
