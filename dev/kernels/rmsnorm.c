/* rmsnorm.c: RMSNorm (Zhang & Sennrich 2019, equation 4), out = w x / sqrt(mean(x^2) + eps), and its backward.
 *
 * An element takes a few FLOPs, so memory bandwidth is the limit and the work is to move each element once. Forward
 * also does the residual addition, since x + delta is what it normalizes.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp rmsnorm.c -o rmsnorm -lm
 * with page.h page_cpu.h rmsnorm.h lib/device/kernel.h lib/ops/cpu/pairs.h lib/ops/cpu/rmsnorm.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/rmsnorm.h"
#include "rmsnorm.h"

static void forward_scalar(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *x = X("x"), *delta = X("delta"), *w = X("w");
    floatX *sum = X("sum"), *out = X("out");
    float *rstd = F("rstd");
    for (int64_t i = 0; i < N * C; i++) sum[i] = from_float(to_float(x[i]) + to_float(delta[i]));
    for (int64_t n = 0; n < N; n++) {
        float squares = 0;
        for (int64_t i = n * C; i < (n + 1) * C; i++) squares += to_float(sum[i]) * to_float(sum[i]);
        rstd[n] = 1.0f / sqrtf(squares / (float)C + EPS);
        for (int64_t i = 0; i < C; i++)
            out[n * C + i] = from_float(to_float(sum[n * C + i]) * rstd[n] * to_float(w[i]));
    }
}

/* sum (n) = x + delta */
static void add_vectors(floatX *sum, const floatX *x, const floatX *delta, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) store_x(sum + i, load_x(x + i, n - i) + load_x(delta + i, n - i), n - i);
}
/* out (C) = the norm of a row. The squares are those of the sum as it is stored: backward reads these bits. */
static float norm_vectors(floatX *out, const floatX *row, const floatX *w, int64_t C) {
    vfloat squares = vsplat(0);
    for (int64_t i = 0; i < C; i += VL) squares = vfma(load_x(row + i, C - i), load_x(row + i, C - i), squares);
    float rstd = 1.0f / sqrtf(vsum(squares) / (float)C + EPS);
    for (int64_t i = 0; i < C; i += VL) store_x(out + i, load_x(row + i, C - i) * rstd * load_x(w + i, C - i), C - i);
    return rstd;
}
static void forward_vectors(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    floatX *sum = X("sum");
    add_vectors(sum, X("x"), X("delta"), N * C);
    for (int64_t n = 0; n < N; n++) F("rstd")[n] = norm_vectors(X("out") + n * C, sum + n * C, X("w"), C);
}
static void forward_fused(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *row = X("sum") + n * C;
        add_vectors(row, X("x") + n * C, X("delta") + n * C, C);
        F("rstd")[n] = norm_vectors(X("out") + n * C, row, X("w"), C);
    }
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 scalar",
     "Two ops, one element at a time; each sum of squares is one chain of additions, four cycles per element.",
     forward_scalar},
    {"2 vectors",
     "A vector at a time: as many partial sums as lanes, so the chain of additions is that many times shorter.",
     forward_vectors},
    {"3 fused addition",
     "A row is added, summed and scaled before the next one: the sum is read back from the L1 cache, not from memory.",
     forward_fused},
    {"in use: threads",
     "Rows divided over threads: no sum crosses rows, so the bits do not depend on the number of threads. Each step "
     "takes two vectors (vpair): two shorter chains of additions, and in bf16 fewer instructions to convert.",
     forward_in_use}};
static void backward_scalar(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *dout = X("dout"), *x = X("x"), *w = X("w");
    const float *rstd = F("rstd");
    floatX *dx = X("dx");
    float *dw = F("dw");
    for (int64_t i = 0; i < C; i++) {
        float sum = 0;
        for (int64_t n = 0; n < N; n++) sum += to_float(dout[n * C + i]) * to_float(x[n * C + i]) * rstd[n];
        dw[i] += sum;
    }
    for (int64_t n = 0; n < N; n++) {
        float dot = 0;
        for (int64_t i = 0; i < C; i++)
            dot += to_float(dout[n * C + i]) * to_float(w[i]) * to_float(x[n * C + i]) * rstd[n];
        for (int64_t i = 0; i < C; i++) {
            float y = to_float(x[n * C + i]) * rstd[n], g = to_float(dout[n * C + i]) * to_float(w[i]);
            dx[n * C + i] = from_float(rstd[n] * (g - y * dot / (float)C) + to_float(dx[n * C + i]));
        }
    }
}

static void backward_by_rows(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *dout = X("dout"), *x = X("x"), *w = X("w");
    const float *rstd = F("rstd");
    floatX *dx = X("dx");
    float *dw = F("dw");
    for (int64_t n = 0; n < N; n++) {
        float dot = 0;
        for (int64_t i = 0; i < C; i++) {
            float y = to_float(x[n * C + i]) * rstd[n], d = to_float(dout[n * C + i]);
            dot += d * to_float(w[i]) * y;
            dw[i] += d * y;
        }
        float mean = dot / (float)C;
        for (int64_t i = 0; i < C; i++) {
            float y = to_float(x[n * C + i]) * rstd[n], g = to_float(dout[n * C + i]) * to_float(w[i]);
            dx[n * C + i] = from_float(rstd[n] * (g - y * mean) + to_float(dx[n * C + i]));
        }
    }
}

/* Rows [from, to); adds their dw to dw (C). */
static void backward_rows(Case *c, float *dw, int64_t from, int64_t to) {
    int64_t C = c->size[1];
    const floatX *dout = X("dout"), *x = X("x"), *w = X("w");
    const float *rstd = F("rstd");
    floatX *dx = X("dx");
    for (int64_t n = from; n < to; n++) {
        vfloat dot = vsplat(0);
        for (int64_t i = 0; i < C; i += VL) {
            vfloat y = load_x(x + n * C + i, C - i) * rstd[n], d = load_x(dout + n * C + i, C - i);
            dot = vfma(d * load_x(w + i, C - i), y, dot);
            store_float(dw + i, vfma(d, y, load_float(dw + i, C - i)), C - i);
        }
        float mean = vsum(dot) / (float)C;
        for (int64_t i = 0; i < C; i += VL) {
            vfloat y = load_x(x + n * C + i, C - i) * rstd[n],
                   g = load_x(dout + n * C + i, C - i) * load_x(w + i, C - i);
            store_x(dx + n * C + i, vfma(vfma(y, vsplat(-mean), g), vsplat(rstd[n]), load_x(dx + n * C + i, C - i)),
                    C - i);
        }
    }
}
static void backward_vectors(Case *c) { backward_rows(c, F("dw"), 0, c->size[0]); }

static void backward_threads(Case *c) {
    int64_t N = c->size[0], C = c->size[1], threads = c->on->threads;
    float *own = (float *)page_scratch(c, (size_t)(threads * C) * sizeof(float)), *dw = F("dw");
    memset(own, 0, (size_t)(threads * C) * sizeof(float));
#pragma omp parallel for num_threads(c->on->threads)
    for (int64_t t = 0; t < threads; t++) backward_rows(c, own + t * C, N * t / threads, N * (t + 1) / threads);
    for (int64_t t = 0; t < threads; t++)
        for (int64_t i = 0; i < C; i++) dw[i] += own[t * C + i];
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 scalar",
     "The two formulas, one after the other. dw is summed down columns, which uses one element of each cache line it "
     "touches.",
     backward_scalar},
    {"2 by rows", "dw is added to row by row, while the row is in the cache: memory is read in order, once.",
     backward_by_rows},
    {"3 vectors", "A vector at a time: the dot product is no longer one chain of additions.", backward_vectors},
    {"4 threads",
     "Rows divided over threads, each with a dw of its own, added up at the end. Fast, but the bits of dw depend on "
     "the number of threads.",
     backward_threads},
    {"in use: blocks of rows",
     "A dw for every 32 rows instead, added up in order: the same bits for any number of threads. Each step takes two "
     "vectors (vpair), as in forward.",
     backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
