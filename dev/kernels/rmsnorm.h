/* rmsnorm.h: tensors, definition and sizes of RMSNorm, for rmsnorm.c, rmsnorm.cu and mine/. */
#ifndef PAGE_RMSNORM_H
#define PAGE_RMSNORM_H
#include "page.h"

static const float EPS = 1e-5f;

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) { // size: N, C
    int64_t N = c->size[0], C = c->size[1];
    reads(c, "x", IN_X, N, C, 1);
    reads(c, "delta", IN_X, N, C, 1);
    reads(c, "w", IN_X, 1, C, 1);
    writes(c, "sum", IN_X, N, C);
    writes(c, "out", IN_X, N, C);
    writes(c, "rstd", IN_FLOAT, N, 1);
    c->flops = 4.0 * (double)(N * C); // as the op ledger counts: without x + delta
    c->slots = 4.0 * (double)(N * C); // x + delta; squares += its square, in one FMA; times rstd; times w
}

static void forward_prepare(Case *c) { // rows of different sizes: in the smallest, eps is larger than the mean square
    static const float sizes[] = {1, 0.1f, 0.01f, 0.001f};
    int64_t N = c->size[0], C = c->size[1];
    floatX *x = X("x"), *delta = X("delta");
    for (int64_t i = 0; i < N * C; i++) {
        x[i] = from_float(to_float(x[i]) * sizes[i / C % 4]);
        delta[i] = from_float(to_float(delta[i]) * sizes[i / C % 4]);
    }
}

static void forward_definition(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const double *x = D("x"), *delta = D("delta"), *w = D("w");
    double *sum = R("sum"), *out = R("out"), *rstd = R("rstd");
    for (int64_t n = 0; n < N; n++) {
        double squares = 0;
        for (int64_t i = n * C; i < (n + 1) * C; i++) {
            sum[i] = stored(c, x[i] + delta[i]);
            squares += sum[i] * sum[i];
        }
        rstd[n] = 1 / sqrt(squares / (double)C + (double)EPS);
        for (int64_t i = 0; i < C; i++) out[n * C + i] = w[i] * sum[n * C + i] * rstd[n];
    }
}

static void forward_in_use(Case *c) {
    IMPLEMENTATION(rmsnorm_forward)
    (c->on, X("out"), F("rstd"), X("sum"), X("x"), X("delta"), X("w"), EPS, (int)c->size[0], (int)c->size[1]);
}

// ---------------------------------------------------------------------------
// backward. With y = x rstd and g = dout w: dx = rstd (g - y mean(g y)) + the residual's gradient, dw += sum over rows
// of dout y. dx holds the residual's gradient before the call, as in the training step.

static void backward_case(Case *c) { // size: N, C
    int64_t N = c->size[0], C = c->size[1];
    reads(c, "dout", IN_X, N, C, 1);
    reads(c, "x", IN_X, N, C, 1);
    reads(c, "rstd", IN_FLOAT, N, 1, 1);
    reads(c, "w", IN_X, 1, C, 1);
    updates(c, "dx", IN_X, N, C, 1);
    updates(c, "dw", IN_FLOAT, 1, C, 1);
    c->flops = 10.0 * (double)(N * C);
    // An ideal version keeps y and g from its first pass; the versions below compute them again. Its first pass has
    // four operations: y = x rstd; g = dout w; dot += g y; dw += dout y. Its second pass has two: g - y mean; that
    // times rstd, plus dx. Each is one multiplication or one fused multiply-add.
    c->slots = 6.0 * (double)(N * C);
}

static void backward_prepare(Case *c) { // the rstd of x
    int64_t N = c->size[0], C = c->size[1];
    const floatX *x = X("x");
    for (int64_t n = 0; n < N; n++) {
        double squares = 0;
        for (int64_t i = n * C; i < (n + 1) * C; i++) squares += (double)to_float(x[i]) * to_float(x[i]);
        F("rstd")[n] = (float)(1 / sqrt(squares / (double)C + (double)EPS));
    }
}

static void backward_definition(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const double *dout = D("dout"), *x = D("x"), *rstd = D("rstd"), *w = D("w"), *residual = D("dx");
    double *dx = R("dx"), *dw = R("dw");
    memcpy(dw, D("dw"), (size_t)C * sizeof(double));
    for (int64_t n = 0; n < N; n++) {
        double dot = 0;
        for (int64_t i = 0; i < C; i++) {
            double y = x[n * C + i] * rstd[n];
            dot += dout[n * C + i] * w[i] * y;
            dw[i] += dout[n * C + i] * y;
        }
        for (int64_t i = 0; i < C; i++) {
            double y = x[n * C + i] * rstd[n], g = dout[n * C + i] * w[i];
            dx[n * C + i] = rstd[n] * (g - y * dot / (double)C) + residual[n * C + i];
        }
    }
}

static void backward_in_use(Case *c) {
    int N = (int)c->size[0], C = (int)c->size[1];
    void *workspace = page_scratch(c, IMPLEMENTATION(rmsnorm_backward_scratch)(N, C));
    IMPLEMENTATION(rmsnorm_backward)
    (c->on, X("dx"), F("dw"), X("dout"), X("dx"), X("x"), F("rstd"), X("w"), N, C, workspace);
}

// ---------------------------------------------------------------------------
// the page

#define RMSNORM_SIZES                                                                                                  \
    {                                                                                                                  \
        {"odd", {333, 301}},                                                                                           \
            FOR_CPU({"bench-8m", {2048, 288}}, {"bench-125m", {1024, 768}}, {"1B layer", {1024, 2048}})                \
                FOR_GPU({"even", {70, 512}}, {"1B layer", {8192, 2048}}, {"8B layer", {8192, 4096}})                   \
    }
static const Op forward = {"rmsnorm_forward",  forward_case,   forward_prepare,
                           forward_definition, forward_in_use, RMSNORM_SIZES};
static const Op backward = {"rmsnorm_backward",  backward_case,   backward_prepare,
                            backward_definition, backward_in_use, RMSNORM_SIZES};

#endif
