/* rmsnorm.cu: RMSNorm (Zhang & Sennrich 2019, equation 4), out = w x / sqrt(mean(x^2) + eps), and its backward.
 *
 * An element takes a few FLOPs, so memory bandwidth is the limit and the work is to move each element once. Forward
 * also does the residual addition, since x + delta is what it normalizes.
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. X(name), F(name): its data in floatX or float. D(name), R(name): the
                  // definition's inputs and results in double. c->slots: arithmetic instructions × lanes of an ideal
                  // version. From lib/ops/cpu/vectors.h: vfloat, VL, vsplat, vfma, …

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

static void forward_prepare(Case *c) { // rows of different sizes: in the smallest, eps is as large as the mean square
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
    rmsnorm_forward(c->dev, X("out"), F("rstd"), X("sum"), X("x"), X("delta"), X("w"), EPS, (int)c->size[0],
                    (int)c->size[1]);
}

#ifndef USE_CUDA
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

static void forward_vectors(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *x = X("x"), *delta = X("delta"), *w = X("w");
    floatX *sum = X("sum"), *out = X("out");
    float *rstd = F("rstd");
    for (int64_t i = 0; i < N * C; i += VL)
        store_x(sum + i, load_x(x + i, N * C - i) + load_x(delta + i, N * C - i), N * C - i);
    for (int64_t n = 0; n < N; n++) {
        const floatX *row = sum + n * C;
        vfloat squares = vsplat(0);
        for (int64_t i = 0; i < C; i += VL) squares = vfma(load_x(row + i, C - i), load_x(row + i, C - i), squares);
        rstd[n] = 1.0f / sqrtf(vsum(squares) / (float)C + EPS);
        for (int64_t i = 0; i < C; i += VL)
            store_x(out + n * C + i, load_x(row + i, C - i) * rstd[n] * load_x(w + i, C - i), C - i);
    }
}

static void forward_fused(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    const floatX *x = X("x"), *delta = X("delta"), *w = X("w");
    floatX *sum = X("sum"), *out = X("out");
    float *rstd = F("rstd");
    for (int64_t n = 0; n < N; n++) {
        floatX *row = sum + n * C;
        vfloat squares = vsplat(0);
        for (int64_t i = 0; i < C; i += VL) {
            store_x(row + i, load_x(x + n * C + i, C - i) + load_x(delta + n * C + i, C - i), C - i);
            vfloat v = load_x(row + i, C - i); // as stored: backward reads these bits
            squares = vfma(v, v, squares);
        }
        rstd[n] = 1.0f / sqrtf(vsum(squares) / (float)C + EPS);
        for (int64_t i = 0; i < C; i += VL)
            store_x(out + n * C + i, load_x(row + i, C - i) * rstd[n] * load_x(w + i, C - i), C - i);
    }
}

static const Version forward_versions[] = {
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
     forward_in_use},
    END_OF_VERSIONS};
#endif

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
    rmsnorm_backward(c->dev, X("dx"), F("dw"), X("dout"), X("dx"), X("x"), F("rstd"), X("w"), (int)c->size[0],
                     (int)c->size[1]);
}

#ifndef USE_CUDA
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
    int64_t N = c->size[0], C = c->size[1], threads = c->dev->threads;
    size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
    float *own = (float *)scratch(c->dev, "dw of threads", (size_t)(threads * C) * sizeof(float)), *dw = F("dw");
    memset(own, 0, (size_t)(threads * C) * sizeof(float));
#pragma omp parallel for num_threads(c->dev->threads)
    for (int64_t t = 0; t < threads; t++) backward_rows(c, own + t * C, N * t / threads, N * (t + 1) / threads);
    for (int64_t t = 0; t < threads; t++)
        for (int64_t i = 0; i < C; i++) dw[i] += own[t * C + i];
    arena_release(c->dev, MEM_WORKSPACE, mark);
}

static const Version backward_versions[] = {
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
     backward_in_use},
    END_OF_VERSIONS};
#endif

// ---------------------------------------------------------------------------
// the page

#ifdef USE_CUDA
#include "rmsnorm.cuh" // defines: forward_versions, backward_versions
#endif

static const Op forward = {"rmsnorm_forward",
                           forward_case,
                           forward_prepare,
                           forward_definition,
                           forward_versions,
                           {{"odd", {333, 301}},
                            FOR_CPU({"bench-8m", {2048, 288}}, {"bench-125m", {1024, 768}}, {"1B layer", {1024, 2048}})
                                FOR_GPU({"even", {70, 512}}, {"1B layer", {8192, 2048}}, {"8B layer", {8192, 4096}})}};

static const Op backward = {"rmsnorm_backward",
                            backward_case,
                            backward_prepare,
                            backward_definition,
                            backward_versions,
                            {{"odd", {333, 301}},
                             FOR_CPU({"bench-8m", {2048, 288}}, {"bench-125m", {1024, 768}}, {"1B layer", {1024, 2048}})
                                 FOR_GPU({"even", {70, 512}}, {"1B layer", {8192, 2048}}, {"8B layer", {8192, 4096}})}};

PAGE(&forward, &backward)
