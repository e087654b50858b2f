/* test_kernels.h: each op against its definition in double precision, at odd sizes; equal bits for 1, 2 and 3
 * threads (CUDA: in three streams) and for every cut of a flat tensor; nothing written outside the outputs; a dry run
 * that counts the same.
 * Expects CHECK(name, condition, format, ...) and kernels.h. */
#ifndef TEST_KERNELS_H
#define TEST_KERNELS_H
#include "../../lib/cpu/vectors.h" // defines: VL, exp_float
#include "../../lib/ops.h"

// ---------------------------------------------------------------------------
// memory with guards, random numbers, errors

enum { GUARD = 256, MAX_TEST_BUFFERS = 512, TEST_THREADS = 3 };
static const double ROUNDING = sizeof(floatX) == 2 ? 3e-3 : 2e-6; // allowed |error| / |reference| of a floatX output
static const double ROUNDING_ROW = sizeof(floatX) == 2 ? 4e-3 : 1e-5; // half of the last of 8 bits is 3.9e-3

typedef struct {                  // one test's buffers and its worst figures
    Device dev[TEST_THREADS + 1]; // dev[t] computes with t threads
    char *blocks[MAX_TEST_BUFFERS];
    size_t bytes[MAX_TEST_BUFFERS];
    int num_blocks, overruns, cases, unequal;
    uint64_t random;
    double worst, worst_row;
    double row_floor; // a row of the reference counts as no smaller: where a result is a difference of larger numbers
    double bound, row_bound;   // of this test: what worst and worst_row may be
    uint64_t seed;             // where `random` begins in each test
    char shape[200], bad[600]; // of the case that runs; the first thing that was wrong, "" as long as nothing was
} KernelTest;

/* Memory that host and device both reach. */
#ifdef USE_CUDA
static const char *const TEST_DEVICES = "three streams";
static char *shared_alloc(size_t bytes) {
    void *p = NULL;
    cuda_check(cudaMallocManaged(&p, bytes, cudaMemAttachGlobal), "getting managed memory");
    return (char *)p;
}
static void shared_free(void *p) { cuda_check(cudaFree(p), "freeing managed memory"); }
#else
static const char *const TEST_DEVICES = "1, 2, 3 threads";
static char *shared_alloc(size_t bytes) { return (char *)checked_malloc(bytes); }
static void shared_free(void *p) { free(p); }
#endif

static void *test_alloc(KernelTest *t, int64_t bytes) {
    if (t->num_blocks == MAX_TEST_BUFFERS)
        run_failure("test_kernels.h: more than %d buffers in one test", MAX_TEST_BUFFERS);
    char *p = shared_alloc((size_t)bytes + 2 * GUARD);
    memset(p, 0xA5, (size_t)bytes + 2 * GUARD);
    t->blocks[t->num_blocks] = p;
    t->bytes[t->num_blocks++] = (size_t)bytes;
    return p + GUARD;
}

__attribute__((format(printf, 2, 3))) static void test_shape(KernelTest *t, const char *format,
                                                             ...) { // the case that comes
    va_list args;
    va_start(args, format);
    vsnprintf(t->shape, sizeof t->shape, format, args);
    va_end(args);
}
__attribute__((format(printf, 2, 3))) static void test_bad(KernelTest *t, const char *format,
                                                           ...) { // the first is told, with its case
    va_list args;
    if (t->bad[0]) return;
    int used = snprintf(t->bad, sizeof t->bad, "; first bad, of %s: ", t->shape);
    va_start(args, format);
    vsnprintf(t->bad + used, sizeof t->bad - (size_t)used, format, args);
    va_end(args);
}

/* What a failure ends with: the place, and the command that runs the same numbers where gdb and the sanitizers are. */
static const char *test_where(const KernelTest *t) {
    static char text[1100];
    if (!t->bad[0]) return "";
    int used = snprintf(text, sizeof text, "%s; seed %" PRIu64 "; replay: ", t->bad, t->seed);
#ifdef USE_CUDA
    const char *order = getenv("CUDA_ON_CPU_SEED");
    snprintf(text + used, sizeof text - (size_t)used,
             "make cuda-on-cpu && TEST_SEED=%" PRIu64 " CUDA_ON_CPU_SEED=%s build/cuda-on-cpu-" PRECISION_NAME
             "/test_llama3_cuda kernels",
             t->seed, order ? order : "0");
#else
    snprintf(text + used, sizeof text - (size_t)used,
             "TEST_SEED=%" PRIu64 " build/cpu-" PRECISION_NAME "/test_llama3 kernels", t->seed);
#endif
    return text;
}

static void test_free_all(KernelTest *t) {
    for (; t->num_blocks > 0; t->num_blocks--) {
        unsigned char *p = (unsigned char *)t->blocks[t->num_blocks - 1];
        size_t bytes = t->bytes[t->num_blocks - 1];
        for (size_t i = 0; i < GUARD; i++) {
            int before = p[i] != 0xA5, behind = p[GUARD + bytes + i] != 0xA5;
            t->overruns += before || behind;
            if (before) test_bad(t, "byte %zu before the %zu bytes of buffer %d", GUARD - i, bytes, t->num_blocks - 1);
            if (behind) test_bad(t, "byte %zu behind the %zu bytes of buffer %d", i, bytes, t->num_blocks - 1);
        }
        shared_free(p);
    }
}

static double test_random(KernelTest *t) { // uniform in (-1, 1)
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(t->random >> 11) / (double)(1LL << 52) - 1.0;
}
static float *test_floats(KernelTest *t, int64_t n, double scale) {
    float *p = (float *)test_alloc(t, n * 4);
    for (int64_t i = 0; i < n; i++) p[i] = (float)(scale * (test_random(t) + test_random(t)));
    return p;
}
static floatX *test_xs(KernelTest *t, int64_t n, double scale) {
    floatX *p = (floatX *)test_alloc(t, n * (int64_t)sizeof(floatX));
    for (int64_t i = 0; i < n; i++) p[i] = from_float((float)(scale * (test_random(t) + test_random(t))));
    return p;
}
static double *test_doubles(KernelTest *t, int64_t n) {
    double *p = (double *)test_alloc(t, n * 8);
    memset(p, 0, (size_t)n * 8);
    return p;
}
static void *test_copy(KernelTest *t, const void *from, int64_t bytes) {
    void *p = test_alloc(t, bytes);
    memcpy(p, from, (size_t)bytes);
    return p;
}

/* Errors of (rows, cols) against ref; `x` where is_x else `f`. A row is measured against at least a tenth of the
 * average row, and t->row_floor. */
#define test_compare(t, got, ...) test_compare_named(t, #got, got, __VA_ARGS__)
static void test_compare_named(KernelTest *t, const char *what, const void *got, int is_x, int64_t stride,
                               const double *ref, int64_t rows, int64_t cols) {
    double error = 0, norm = (double)rows * t->row_floor * t->row_floor, worst = 0, farthest = -1, far_y = 0;
    int64_t far = 0;
    for (int64_t i = 0; i < rows * cols; i++) norm += ref[i] * ref[i];
    for (int64_t r = 0; r < rows; r++) {
        double row_error = 0, row_norm = 1e-2 * norm / (double)rows + t->row_floor * t->row_floor, first_y = 0;
        int64_t first =
            -1; // in this row, if all of it is bad: the first that is farther off than the bound lets the average be
        for (int64_t c = 0; c < cols; c++) row_norm += ref[r * cols + c] * ref[r * cols + c];
        for (int64_t c = 0; c < cols; c++) {
            double y = is_x ? to_float(((const floatX *)got)[r * stride + c]) : ((const float *)got)[r * stride + c],
                   x = ref[r * cols + c], d = y - x;
            row_error += d * d;
            if (first < 0 && !(d * d * (double)cols <= t->row_bound * t->row_bound * row_norm)) {
                first = c;
                first_y = y;
            }
            if (!(fabs(d) <= farthest)) {
                farthest = fabs(d);
                far = r * cols + c;
                far_y = y;
            }
        }
        error += row_error;
        double e = row_error > 0 ? sqrt(row_error / row_norm) : row_error;
        worst = worst_of(worst, e);
        if (!(e <= t->row_bound) && first >= 0)
            test_bad(t, "%s, row %" PRId64 ", column %" PRId64 " is %.9g, expected %.9g", what, r, first, first_y,
                     ref[r * cols + first]);
    }
    double e = error > 0 ? sqrt(error / norm) : error;
    if (rows * cols >= 64) { // a few elements may all be rounded by almost half of the last place
        t->worst = worst_of(t->worst, e);
        if (!(e <= t->bound))
            test_bad(t, "%s as a whole; farthest off is row %" PRId64 ", column %" PRId64 ": %.9g, expected %.9g", what,
                     far / cols, far % cols, far_y, ref[far]);
    }
    t->worst_row = worst_of(t->worst_row, worst);
}
#define test_same(t, a, b, bytes) test_same_named(t, #a, a, b, bytes)
static void test_same_named(KernelTest *t, const char *what, const void *a, const void *b, int64_t bytes) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    int64_t i = 0;
    if (!memcmp(a, b, (size_t)bytes)) return;
    t->unequal++;
    while (p[i] == q[i]) i++;
    test_bad(t, "%s has other bits, byte %" PRId64 " of %" PRId64 " is %02x, not %02x", what, i, bytes, p[i], q[i]);
}

static void test_bounds(KernelTest *t, double bound, double row_bound) {
    t->bound = bound;
    t->row_bound = row_bound;
}
static void test_report(KernelTest *t, const char *name) {
    test_free_all(t);
    CHECK(name, t->worst <= t->bound && t->worst_row <= t->row_bound && !t->unequal && !t->overruns,
          "%d cases: error %.2g <= %.2g, worst row %.2g <= %.2g, %d differ between %s, %d bytes written outside%s",
          t->cases, t->worst, t->bound, t->worst_row, t->row_bound, t->unequal, TEST_DEVICES, t->overruns,
          test_where(t));
    t->cases = t->unequal = t->overruns = 0;
    t->worst = t->worst_row = 0;
    t->bad[0] = 0;
}

// ---------------------------------------------------------------------------
// ops by rows

static void test_embedding(KernelTest *t) {
    test_bounds(t, 2e-6, 1e-5);
    // N, C, V, percent that are one token, the table's first; the last: most tokens are the one before it
    const int sizes[][5] = {{1, 1, 17, 0, 0},        {65, 5, 3, 0, 0},      {200, 257, 17, 0, 0}, {3, 64, 1, 0, 0},
                            {1000, 40, 1000, 90, 0}, {1001, 9, 100, 50, 0}, {300, 24, 40, 0, 40}, {700, 40, 33, 80, 7},
                            {90, 5, 1, 30, 300},     {700, 16, 5, 90, 6}};
    for (int i = 0; i < 10; i++, t->cases++) {
        int N = sizes[i][0], C = sizes[i][1], V = sizes[i][2], low = sizes[i][4], all = low ? low + V + 20 : V,
            often = i == 9 ? low - 1 : low + V / 2;
        test_shape(t, "embedding (N %d, C %d, V %d from %d on)", N, C, V, low);
        floatX *embed = test_xs(t, V * C, 1), *dx = test_xs(t, N * C, 1), *first = NULL;
        float *start = test_floats(t, V * C, 1), *dfirst = NULL;
        int32_t *ids = (int32_t *)test_alloc(t, N * 4);
        for (int n = 0; n < N; n++) ids[n] = n % 7 == 6 ? -1 : (int32_t)(fabs(test_random(t)) * all);
        for (int n = 0; n < N && sizes[i][3]; n++) ids[n] = fabs(test_random(t)) * 100 < sizes[i][3] ? often : ids[n];
        if (low) {
            ids[0] = INT32_MAX;
            ids[1] = INT32_MIN;
            ids[2] = low - 1;
            ids[3] = low;
            ids[4] = low + V - 1;
            ids[5] = low + V;
        }
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            floatX *x = test_xs(t, N * C, 1);
            float *dembed = (float *)test_copy(t, start, V * C * 4);
            embedding_forward(&t->dev[threads], x, embed, ids, low, N, C, V);
            embedding_backward(&t->dev[threads], dembed, dx, ids, low, N, C, V);
            if (!first) {
                first = x;
                dfirst = dembed;
            }
            test_same(t, x, first, N * C * (int64_t)sizeof(floatX));
            test_same(t, dembed, dfirst, V * C * 4);
        }
        double *ref = test_doubles(t, N * C), *dref = test_doubles(t, V * C);
        for (int j = 0; j < V * C; j++) dref[j] = start[j];
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C && ids[n] >= low && ids[n] < low + (int64_t)V; c++) {
                ref[n * C + c] = to_float(embed[(ids[n] - low) * C + c]);
                dref[(ids[n] - low) * C + c] += to_float(dx[n * C + c]);
            }
        test_compare(t, first, 1, C, ref, N, C);
        test_compare(t, dfirst, 0, C, dref, V, C);
    }
    test_report(t, "embedding forward and backward follow their definition");
}

static void test_rmsnorm(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][2] = {{1, 1}, {3, 5}, {65, 64}, {200, 257}, {33, 768}, {35, 1027}, {3, 8200}};
    const float eps = 1e-5f;
    for (int i = 0; i < 14; i++, t->cases++) {
        int N = sizes[i / 2][0], C = sizes[i / 2][1], with_delta = i % 2, XS = (int)sizeof(floatX);
        test_shape(t, "rmsnorm (N %d, C %d%s)", N, C, with_delta ? ", with delta" : "");
        floatX *x = test_xs(t, N * C, 1), *delta = with_delta ? test_xs(t, N * C, 1) : NULL, *w = test_xs(t, C, 1),
               *dout = test_xs(t, N * C, 1);
        floatX *residual = with_delta ? test_xs(t, N * C, 1) : NULL, *in = (floatX *)test_copy(t, x, N * C * XS);
        for (int j = 0; j < N * C && delta; j++) in[j] = from_float(to_float(x[j]) + to_float(delta[j]));
        float *start = test_floats(t, C, 1), *first_dw = NULL, *first_rstd = NULL;
        floatX *first = NULL, *first_dx = NULL;
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            floatX *out = test_xs(t, N * C, 1), *sum = (floatX *)test_copy(t, x, N * C * XS),
                   *dx = test_xs(t, N * C, 1);
            float *rstd = test_floats(t, N, 1), *dw = (float *)test_copy(t, start, C * 4);
            rmsnorm_forward(&t->dev[threads], out, rstd, delta ? sum : NULL, threads == 2 && delta ? sum : x, delta, w,
                            eps, N, C);                                               // 2: in place
            if (residual && threads == 2) memcpy(dx, residual, (size_t)(N * C * XS)); // 2: dresidual is dx
            rmsnorm_backward(&t->dev[threads], dx, dw, dout, residual && threads == 2 ? dx : residual, in, rstd, w, N,
                             C);
            if (!first) {
                first = out;
                first_dx = dx;
                first_dw = dw;
                first_rstd = rstd;
            }
            test_same(t, out, first, N * C * XS);
            test_same(t, dx, first_dx, N * C * XS);
            test_same(t, dw, first_dw, C * 4);
            test_same(t, rstd, first_rstd, N * 4);
            if (delta) test_same(t, sum, in, N * C * XS);
        }
        double *ref = test_doubles(t, N * C), *dref = test_doubles(t, N * C), *dwref = test_doubles(t, C),
               *rref = test_doubles(t, N);
        for (int c = 0; c < C; c++) dwref[c] = start[c];
        for (int n = 0; n < N; n++) {
            double squares = 0, dot = 0;
            for (int c = 0; c < C; c++) squares += (double)to_float(in[n * C + c]) * to_float(in[n * C + c]);
            double r = rref[n] = 1 / sqrt(squares / C + eps);
            for (int c = 0; c < C; c++)
                dot += (double)to_float(dout[n * C + c]) * to_float(w[c]) * to_float(in[n * C + c]) * r;
            for (int c = 0; c < C; c++) {
                double y = to_float(in[n * C + c]) * r, d = to_float(dout[n * C + c]);
                ref[n * C + c] = y * to_float(w[c]);
                dwref[c] += d * y;
                dref[n * C + c] =
                    r * (d * to_float(w[c]) - y * dot / C) + (residual ? to_float(residual[n * C + c]) : 0);
            }
        }
        if (C > 1) test_compare(t, first_dx, 1, C, dref, N, C); // C = 1: dx is a difference of equals
        test_compare(t, first, 1, C, ref, N, C);
        test_compare(t, first_dw, 0, C, dwref, 1, C);
        test_compare(t, first_rstd, 0, 1, rref, N, 1);
    }
    test_report(t, "rmsnorm forward and backward follow their definition");
}

static void test_residual_add(KernelTest *t) {
    test_bounds(t, 0, 0);
    const int sizes[][2] = {{1, 1}, {3, 5}, {65, 64}, {20, 257}, {9, 1027}}, XS = (int)sizeof(floatX);
    for (int i = 0; i < 5; i++, t->cases++) {
        int N = sizes[i][0], C = sizes[i][1], count = N * C, cut = count / 3;
        test_shape(t, "residual_add (%d elements)", count);
        floatX *x = test_xs(t, count, 1), *delta = test_xs(t, count, 1), *w = test_xs(t, C, 1),
               *normed = test_xs(t, count, 1), *sum = test_xs(t, count, 1);
        rmsnorm_forward(&t->dev[1], normed, test_floats(t, N, 1), sum, x, delta, w, 1e-5f, N, C);
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            Device *dev = &t->dev[threads];
            floatX *out = test_xs(t, count, 1), *on_x = (floatX *)test_copy(t, x, count * XS),
                   *on_delta = (floatX *)test_copy(t, delta, count * XS), *in_two = test_xs(t, count, 1);
            residual_add(dev, out, x, delta, count);
            residual_add(dev, on_x, on_x, delta, count);
            residual_add(dev, on_delta, x, on_delta, count);
            residual_add(dev, in_two, x, delta, cut);
            residual_add(dev, in_two + cut, x + cut, delta + cut, count - cut);
            test_same(t, out, sum, count * XS);
            test_same(t, on_x, sum, count * XS);
            test_same(t, on_delta, sum, count * XS);
            test_same(t, in_two, sum, count * XS);
        }
    }
    test_report(t, "residual_add has the bits of rmsnorm_forward's sum, in place and wherever it is cut");
}

static void test_linear(KernelTest *t) {
    const int sizes[][4] = {{1, 1, 1, 0},     {3, 5, 7, 0},      {65, 257, 33, 3}, {1, 64, 17, 1},
                            {200, 80, 96, 0}, {1100, 24, 40, 8}, {2500, 9, 3, 0}}; // N, IC, OC, stride - OC
    for (int i = 0; i < 14; i++, t->cases++) {
        const int N = sizes[i / 2][0], IC = sizes[i / 2][1], OC = sizes[i / 2][2], stride = OC + sizes[i / 2][3],
                  accumulate = i % 2, XS = (int)sizeof(floatX);
        test_shape(t, "linear (N %d, IC %d, OC %d, stride %d%s)", N, IC, OC, stride, accumulate ? ", accumulated" : "");
        floatX *x = test_xs(t, N * IC, 1), *w = test_xs(t, OC * IC, 1), *dy = test_xs(t, N * stride, 1), *first = NULL,
               *first_dx = NULL;
        float *start = test_floats(t, OC * IC, 1), *first_logits = NULL, *first_dw = NULL;
        floatX *y_start = test_xs(t, N * stride, 1), *dx_start = test_xs(t, N * IC, 1), *dense = test_xs(t, N * OC, 1),
               *first_sum = NULL, *first_dsum = NULL; // what is added to
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            Device *dev = &t->dev[threads];
            floatX *y = test_xs(t, N * OC, 1), *dx = test_xs(t, N * IC, 1);
            float *logits = test_floats(t, N * OC, 1), *dw = (float *)test_copy(t, start, OC * IC * 4);
            linear_forward(dev, y, x, w, N, IC, OC);
            linear_forward_fp32(dev, logits, x, w, N, IC, OC);
            linear_backward_input(dev, dx, dy, stride, w, N, IC, OC);
            linear_backward_weight(dev, dw, dy, stride, x, N, IC, OC, accumulate);
            floatX *sum = (floatX *)test_copy(t, y_start, N * stride * XS),
                   *dsum = (floatX *)test_copy(t, dx_start, N * IC * XS);
            linear_forward_add(dev, sum, stride, x, w, N, IC, OC);
            linear_backward_input_add(dev, dsum, dense, w, N, IC, OC);
            if (!first) {
                first = y;
                first_dx = dx;
                first_logits = logits;
                first_dw = dw;
                first_sum = sum;
                first_dsum = dsum;
            }
            test_same(t, y, first, N * OC * XS);
            test_same(t, dx, first_dx, N * IC * XS);
            test_same(t, sum, first_sum, N * stride * XS);
            test_same(t, dsum, first_dsum, N * IC * XS);
            for (int n = 0; n < N; n++)
                test_same(t, sum + n * stride + OC, y_start + n * stride + OC, (stride - OC) * XS);
            test_same(t, logits, first_logits, N * OC * 4);
            test_same(t, dw, first_dw, OC * IC * 4);
        }
        double *yref = test_doubles(t, N * OC), *dxref = test_doubles(t, N * IC), *dwref = test_doubles(t, OC * IC),
               *sumref = test_doubles(t, N * OC), *dsumref = test_doubles(t, N * IC);
        for (int j = 0; j < N * OC; j++) sumref[j] = to_float(y_start[j / OC * stride + j % OC]);
        for (int j = 0; j < N * IC; j++) dsumref[j] = to_float(dx_start[j]);
        for (int j = 0; j < OC * IC && accumulate; j++) dwref[j] = start[j];
        for (int n = 0; n < N; n++)
            for (int o = 0; o < OC; o++)
                for (int c = 0; c < IC; c++) {
                    double xv = to_float(x[n * IC + c]), wv = to_float(w[o * IC + c]), d = to_float(dy[n * stride + o]);
                    yref[n * OC + o] += xv * wv;
                    sumref[n * OC + o] += xv * wv;
                    dsumref[n * IC + c] += to_float(dense[n * OC + o]) * wv;
                    dxref[n * IC + c] += d * wv;
                    dwref[o * IC + c] += d * xv;
                }
        test_compare(t, first, 1, OC, yref, N, OC);
        test_compare(t, first_dx, 1, IC, dxref, N, IC);
        test_compare(t, first_sum, 1, stride, sumref, N, OC);
        test_compare(t, first_dsum, 1, IC, dsumref, N, IC);
        test_compare(t, first_logits, 0, OC, yref, N, OC);
        test_compare(t, first_dw, 0, IC, dwref, OC, IC);
    }
}

static void test_linears(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    test_linear(t);
#ifdef USE_CUDA
    test_report(t, "linear (cuBLASLt) forward and backward follow their definition");
#else
    test_report(t, t->dev[1].matmuls->plain ? "linear (plain C) forward and backward follow their definition"
                                            : "linear (oneDNN) forward and backward follow their definition");
    int was = t->dev[1].matmuls->plain;
    for (int threads = 1; threads <= TEST_THREADS; threads++) t->dev[threads].matmuls->plain = 1;
    if (!was) {
        test_linear(t);
        test_report(t, "linear (plain C) forward and backward follow their definition");
    }
    for (int threads = 1; threads <= TEST_THREADS; threads++) t->dev[threads].matmuls->plain = was;
#endif
}

/* What is small beside adapters: a factor, blocks of 8 bits made wide, a matrix that adapters are added to. */
static void test_adapter_ops(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][3] = {{1, 1, 1}, {3, 5, 2}, {64, 64, 16}, {33, 129, 7}, {130, 1000, 5}},
              XS = (int)sizeof(floatX); // OC, IC, R
    for (int i = 0; i < 5; i++, t->cases++) {
        int OC = sizes[i][0], IC = sizes[i][1], R = sizes[i][2], count = OC * IC,
            blocks = (int)blocks_of(count, INT8_BLOCK);
        test_shape(t, "scale, dequantize, adapter_merge (OC %d, IC %d, rank %d)", OC, IC, R);
        floatX *x = test_xs(t, count, 1), *first = NULL, *first_wide = NULL;
        float *w = test_floats(t, count, 1), *a = test_floats(t, R * IC, 1), *b = test_floats(t, OC * R, 1),
              *scales = test_floats(t, blocks, 0.01), *first_w = NULL;
        int8_t *bytes = (int8_t *)test_alloc(t, count);
        for (int e = 0; e < count; e++) bytes[e] = (int8_t)((e * 37 + 11) % 255 - 127);
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            Device *dev = &t->dev[threads];
            floatX *scaled = (floatX *)test_copy(t, x, count * XS), *wide = test_xs(t, count, 1);
            float *merged = (float *)test_copy(t, w, count * 4);
            scale(dev, scaled, -1.7f, count);
            dequantize(dev, wide, bytes, scales, count);
            adapter_merge(dev, merged, a, b, 0.3f, R, IC, OC);
            if (!first) {
                first = scaled;
                first_wide = wide;
                first_w = merged;
            }
            test_same(t, scaled, first, count * XS);
            test_same(t, wide, first_wide, count * XS);
            test_same(t, merged, first_w, count * 4);
        }
        double *ref = test_doubles(t, count), *wide_ref = test_doubles(t, count), *w_ref = test_doubles(t, count);
        for (int e = 0; e < count; e++) {
            ref[e] = -1.7 * to_float(x[e]);
            wide_ref[e] = (double)bytes[e] * scales[e / INT8_BLOCK];
            w_ref[e] = w[e];
            for (int r = 0; r < R; r++) w_ref[e] += (double)0.3f * b[e / IC * R + r] * a[r * IC + e % IC];
        }
        test_compare(t, first, 1, IC, ref, OC, IC);
        test_compare(t, first_wide, 1, count, wide_ref, 1, count);
        test_compare(t, first_w, 0, IC, w_ref, OC, IC);
    }
    test_report(t, "scale, dequantize and adapter_merge follow their definition");
}

static void test_rope(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][5] = {{1, 1, 1, 2, 0},
                            {6, 3, 3, 64, 64},
                            {65, 65, 2, 80, 10},
                            {4, 2, 5, 128, 0},
                            {3, 1, 2, 14, 1}}; // N, T, heads, HD, stride - heads*HD
    for (int i = 0; i < 10; i++, t->cases++) {
        int N = sizes[i / 2][0], T = sizes[i / 2][1], heads = sizes[i / 2][2], HD = sizes[i / 2][3], width = heads * HD,
            stride = width + sizes[i / 2][4];
        int back = i % 2, half = HD / 2, XS = (int)sizeof(floatX);
        test_shape(t, "rope_%s (N %d, T %d, heads %d, HD %d, stride %d)", back ? "backward" : "forward", N, T, heads,
                   HD, stride);
        floatX *x = test_xs(t, N * stride, 1), *first = NULL;
        float *table = test_floats(t, 100 * HD, 1);
        int32_t *positions = (int32_t *)test_alloc(t, T * 4);
        for (int j = 0; j < T; j++) positions[j] = (j * 37 + 5) % 100;
        for (int p = 0; p < 100 * half; p++) {
            table[p / half * HD + p % half] = (float)cos(p * 0.7);
            table[p / half * HD + half + p % half] = (float)sin(p * 0.7);
        }
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            floatX *y = (floatX *)test_copy(t, x, N * stride * XS);
            (back ? rope_backward : rope_forward)(&t->dev[threads], y, stride, table, positions, N, T, heads, HD);
            if (!first) first = y;
            test_same(t, y, first, N * stride * XS);
        }
        double *ref = test_doubles(t, N * stride);
        for (int j = 0; j < N * stride; j++) ref[j] = to_float(x[j]); // what is beyond the heads stays
        for (int n = 0; n < N; n++)
            for (int h = 0; h < heads; h++)
                for (int j = 0; j < half; j++) {
                    const float *cs = table + positions[n % T] * HD + j;
                    int at = n * stride + h * HD + j;
                    double c = cs[0], s = back ? -cs[half] : cs[half], a = to_float(x[at]), b = to_float(x[at + half]);
                    ref[at] = a * c - b * s;
                    ref[at + half] = b * c + a * s;
                }
        test_compare(t, first, 1, stride, ref, N, stride);
    }
    test_report(t, "rope forward and backward follow their definition");
}

static void test_swiglu(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][2] = {{1, 1}, {3, 5}, {65, 64}, {20, 257}};
    for (int i = 0; i < 4; i++, t->cases++) {
        int N = sizes[i][0], F = sizes[i][1], XS = (int)sizeof(floatX);
        test_shape(t, "swiglu (N %d, F %d)", N, F);
        floatX *gu = test_xs(t, N * 2 * F, 6), *dh = test_xs(t, N * F, 1), *first = NULL, *first_d = NULL;
        if (F > 5) {
            gu[0] = from_float(-300.0f);
            gu[1] = from_float(300.0f);
        }
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            floatX *h = test_xs(t, N * F, 1),
                   *d = threads == 2 ? (floatX *)test_copy(t, gu, N * 2 * F * XS) : test_xs(t, N * 2 * F, 1);
            swiglu_forward(&t->dev[threads], h, gu, N, F);
            swiglu_backward(&t->dev[threads], d, dh, threads == 2 ? d : gu, N, F); // 2: in place
            if (!first) {
                first = h;
                first_d = d;
            }
            test_same(t, h, first, N * F * XS);
            test_same(t, d, first_d, N * 2 * F * XS);
        }
        double *ref = test_doubles(t, N * F), *dref = test_doubles(t, N * 2 * F);
        for (int n = 0; n < N; n++)
            for (int f = 0; f < F; f++) {
                double g = to_float(gu[n * 2 * F + f]), u = to_float(gu[n * 2 * F + F + f]),
                       d = to_float(dh[n * F + f]), s = 1 / (1 + exp(-g));
                ref[n * F + f] = g * s * u;
                dref[n * 2 * F + f] = d * u * s * (1 + g * (1 - s));
                dref[n * 2 * F + F + f] = d * g * s;
            }
        test_compare(t, first, 1, F, ref, N, F);
        test_compare(t, first_d, 1, 2 * F, dref, N, 2 * F);
    }
    test_report(t, "swiglu forward and backward follow their definition");
}

static void test_cross_entropy(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][2] = {{1, 1}, {3, 5}, {65, 17}, {20, 257}, {5, 1300}, {7, 4096}, {2, 5001}, {2, 70000}};
    const double scales[] = {1, 30, 5000}; // to logits of +-1e4
    double worst_loss = 0;
    int changed = 0, same_losses = 0;
    t->row_floor = 0.1; // a probability minus 1
    for (int i = 0; i < 24; i++, t->cases++) {
        int N = sizes[i / 3][0], V = sizes[i / 3][1], XS = (int)sizeof(floatX), stride = V * 4 / XS;
        test_shape(t, "cross_entropy (N %d, V %d, logits to %g)", N, V, scales[i % 3]);
        float *logits = test_floats(t, N * V, scales[i % 3]), *first_losses = NULL, *first = NULL;
        int32_t *targets = (int32_t *)test_alloc(t, N * 4);
        for (int n = 0; n < N; n++) targets[n] = n % 3 == 2 ? -1 - n : (int32_t)(fabs(test_random(t)) * V);
        for (int v = 0; v < 512 && V > 512; v++) { // row 0: probability 0 for a whole LOSS_BLOCK of the CPU's op
            logits[v] = -INFINITY;
            targets[0] = V - 1;
        }
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            float *losses = test_floats(t, N, 1), *kept = test_floats(t, N, 1),
                  *d = (float *)test_copy(t, logits, N * V * 4);
            cross_entropy(&t->dev[threads], kept, d, targets, N, V, 0);
            changed += memcmp(d, logits, (size_t)(N * V * 4)) != 0;
            cross_entropy(&t->dev[threads], losses, d, targets, N, V, 1);
            same_losses += memcmp(losses, kept, (size_t)N * 4) == 0;
            if (!first) {
                first = d;
                first_losses = losses;
            }
            for (int n = 0; n < N; n++)
                test_same(t, (floatX *)(void *)d + n * stride, (floatX *)(void *)first + n * stride, V * XS);
            test_same(t, losses, first_losses, N * 4);
        }
        double *ref = test_doubles(t, N * V);
        for (int n = 0; n < N; n++) {
            double max = -1e300, sum = 0, loss = 0;
            for (int v = 0; v < V; v++) max = fmax(max, logits[n * V + v]);
            for (int v = 0; v < V; v++) sum += exp(logits[n * V + v] - max);
            for (int v = 0; v < V && targets[n] >= 0; v++)
                ref[n * V + v] = exp(logits[n * V + v] - max) / sum - (v == targets[n]);
            if (targets[n] >= 0) loss = log(sum) + max - logits[n * V + targets[n]];
            double e = fabs(first_losses[n] - loss) / fmax(1, fabs(loss));
            if (!(e <= 2e-6)) test_bad(t, "the loss of row %d is %.9g, expected %.9g", n, first_losses[n], loss);
            worst_loss = worst_of(worst_loss, e);
        }
        if (V > 1) test_compare(t, first, 1, stride, ref, N, V);
    }
    CHECK("cross_entropy without gradient leaves the logits and gives the same losses",
          !changed && same_losses == 24 * TEST_THREADS, "%d changed, %d of %d equal", changed, same_losses,
          24 * TEST_THREADS);
    CHECK("cross_entropy losses follow their definition, logits to +-1e4", worst_loss <= 2e-6, "error %.2g <= 2e-6%s",
          worst_loss, test_where(t));
    test_report(t, "cross_entropy gradient follows its definition");
    t->row_floor = 0;
}

/* Each of `ranks` slices on its own, as the ranks that hold them have it. */
static void test_cross_entropy_slices(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][3] = {{2, 1, 1}, {3, 5, 2},    {20, 17, 5},  {20, 257, 3},
                            {9, 8, 8}, {5, 1300, 4}, {3, 5001, 8}, {2, 70000, 2}}; // N, V, ranks
    const double scales[] = {1, 30, 5000};                                         // to logits of +-1e4
    double worst_loss = 0;
    int changed = 0;
    t->row_floor = 0.1; // a probability minus 1
    for (int i = 0; i < 24; i++, t->cases++) {
        int N = sizes[i / 3][0], V = sizes[i / 3][1], ranks = sizes[i / 3][2], XS = (int)sizeof(floatX), cut[9];
        test_shape(t, "cross_entropy in slices (N %d, V %d, ranks %d, logits to %g)", N, V, ranks, scales[i % 3]);
        for (int r = 0; r <= ranks; r++)
            cut[r] = (int)max_i64(r, (int64_t)r * r * V / (ranks * ranks)); // no two of one width, if there is room
        float *logits = test_floats(t, N * V, scales[i % 3]), *joined = test_floats(t, N, 1), *first_losses = NULL;
        int32_t *targets = (int32_t *)test_alloc(t, N * 4);
        for (int n = 0; n < N; n++) {
            targets[n] = cut[n / 2 % ranks];
            if (n % 2) targets[n] = (int32_t)(fabs(test_random(t)) * V);
            if (n % 4 == 3) targets[n] = -1 - n;
        }
        for (int v = 0; v < cut[1] && ranks > 1; v++) {
            logits[v] = -INFINITY;
            targets[0] = V - 1; // row 0: a whole slice that cannot be
        }
        cross_entropy(&t->dev[1], joined, (float *)test_copy(t, logits, N * V * 4), targets, N, V, 0);
        double *ref = test_doubles(t, N * V);
        for (int n = 0; n < N; n++) {
            double max = -1e300, sum = 0;
            for (int v = 0; v < V; v++) max = fmax(max, logits[n * V + v]);
            for (int v = 0; v < V; v++) sum += exp(logits[n * V + v] - max);
            for (int v = 0; v < V && targets[n] >= 0; v++)
                ref[n * V + v] = exp(logits[n * V + v] - max) / sum - (v == targets[n]);
        }
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            float *parts = test_floats(t, ranks * N * 3, 1), *slices[8];
            for (int r = 0; r < ranks; r++) {
                int width = cut[r + 1] - cut[r];
                slices[r] = test_floats(t, N * width, 1);
                for (int n = 0; n < N; n++) memcpy(slices[r] + n * width, logits + n * V + cut[r], (size_t)width * 4);
                cross_entropy_part(&t->dev[threads], parts + r * N * 3, slices[r], targets, cut[r], N, width);
            }
            for (int r = 0; r < ranks; r++) {
                int width = cut[r + 1] - cut[r];
                float *kept = test_floats(t, N, 1), *losses = test_floats(t, N, 1),
                      *before = (float *)test_copy(t, slices[r], N * width * 4);
                double *slice_ref = test_doubles(t, N * width);
                cross_entropy_join(&t->dev[threads], kept, slices[r], parts, targets, ranks, cut[r], N, width, 0);
                changed += memcmp(slices[r], before, (size_t)(N * width) * 4) != 0;
                cross_entropy_join(&t->dev[threads], losses, slices[r], parts, targets, ranks, cut[r], N, width, 1);
                if (!first_losses) first_losses = losses;
                test_same(t, kept, first_losses, N * 4);
                test_same(t, losses, first_losses, N * 4);
                for (int n = 0; n < N; n++) memcpy(slice_ref + n * width, ref + n * V + cut[r], (size_t)width * 8);
                if (V > 1) test_compare(t, slices[r], 1, width * 4 / XS, slice_ref, N, width);
            }
        }
        for (int n = 0; n < N; n++) {
            double e = fabs(first_losses[n] - (double)joined[n]) / fmax(1, fabs(joined[n]));
            if (!(e <= 1e-6))
                test_bad(t, "the loss of row %d is %.9g in slices, %.9g joined", n, first_losses[n], joined[n]);
            worst_loss = worst_of(worst_loss, e);
        }
        test_free_all(t);
    }
    CHECK("cross_entropy in slices gives the losses of the whole, and leaves the logits where no gradient is wanted",
          worst_loss <= 1e-6 && !changed, "error %.2g <= 1e-6, %d changed%s", worst_loss, changed, test_where(t));
    test_report(t, "cross_entropy in slices: the same bits on every rank, the gradient of the whole");
    t->row_floor = 0;
}

// ---------------------------------------------------------------------------
// attention

/* docs 1: of random lengths; 2: some queries' match nothing; 3: a query has its key's, boundaries at and beside tiles'
 * edges, documents of one token. spare: unused keys behind the last sequence; 8: gaps between rows that tensor cores
 * take. */
typedef struct {
    int B, Tq, Tk, NH, NKV, HD, q_offset, docs, spare;
    double scale;
} AttentionCase;
typedef struct {
    AttentionCase all;
    int q_split, q_gap;
} ChunkCase;

static int test_sees(const AttentionShape *s, int b, int t, int key) {
    return key <= s->q_offset + (t < s->q_split ? t : t + s->q_gap) &&
           (!s->q_doc || s->q_doc[b * s->Tq + t] == s->k_doc[b * s->Tk + key]);
}

/* out, lse, dq, dk, dv by their definition; every array dense: (B,T,heads,HD). */
static void attention_reference(const AttentionShape *s, const double *q, const double *k, const double *v,
                                const double *dout, double *out, double *lse, double *dq, double *dk, double *dv,
                                double *p) {
    int HD = s->HD;
    for (int b = 0; b < s->B; b++)
        for (int h = 0; h < s->NH; h++)
            for (int t = 0; t < s->Tq; t++) {
                int64_t at = (((int64_t)b * s->Tq + t) * s->NH + h) * HD;
                double max = -INFINITY, sum = 0, D = 0;
                for (int j = 0; j < s->Tk; j++) {
                    const double *kj = k + (((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD;
                    p[j] = test_sees(s, b, t, j) ? 0 : -INFINITY;
                    for (int d = 0; d < HD && p[j] > -INFINITY; d++) p[j] += q[at + d] * kj[d] / sqrt(HD);
                    max = fmax(max, p[j]);
                }
                for (int j = 0; j < s->Tk; j++) sum += p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - max);
                lse[((int64_t)b * s->NH + h) * s->Tq + t] = sum > 0 ? max + log(sum) : -INFINITY;
                for (int j = 0; j < s->Tk; j++)
                    for (int d = 0; d < HD && p[j] > 0; d++)
                        out[at + d] +=
                            p[j] / sum * v[(((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD + d];
                for (int d = 0; d < HD; d++) D += out[at + d] * dout[at + d];
                for (int j = 0; j < s->Tk; j++) {
                    int64_t kat = (((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD;
                    double dp = 0;
                    if (p[j] == 0) continue;
                    for (int d = 0; d < HD; d++) dp += dout[at + d] * v[kat + d];
                    for (int d = 0; d < HD; d++) {
                        double ds = p[j] / sum * (dp - D) / sqrt(HD);
                        dq[at + d] += ds * k[kat + d];
                        dk[kat + d] += ds * q[at + d];
                        dv[kat + d] += p[j] / sum * dout[at + d];
                    }
                }
            }
}

static double *test_widen(KernelTest *t, const floatX *x, int B, int T, int64_t batch, int64_t stride,
                          int width) { // dense (B,T,width)
    double *y = test_doubles(t, (int64_t)B * T * width);
    for (int b = 0; b < B; b++)
        for (int n = 0; n < T; n++)
            for (int i = 0; i < width; i++)
                y[((int64_t)b * T + n) * width + i] = to_float(x[b * batch + n * stride + i]);
    return y;
}

static int32_t *test_documents(KernelTest *t, int B, int T, int nowhere) {
    int32_t *doc = (int32_t *)test_alloc(t, B * T * 4), id = 3;
    for (int i = 0; i < B * T; i++) {
        if (test_random(t) > 0.9) id++;
        int in_no_document = nowhere && i % 5 == 0;
        if (!in_no_document && i % T == 0) id = 3;
        doc[i] = in_no_document ? -7 : id;
    }
    return doc;
}

/* Those of all keys, and of queries where their own keys are. */
static int32_t *test_cut_documents(KernelTest *t, int B, int T) {
    const int lengths[] = {64, 64, 1,   1,   1, 61, 63,
                           1,  1,  127, 128, 1, 40}; // ends at 64, 128, 129, 130, 131, 192, 255, 256, 257, 384, …
    int32_t *doc = (int32_t *)test_alloc(t, B * T * 4);
    for (int b = 0; b < B; b++)
        for (int i = 0, id = 0, left = lengths[0]; i < T; i++, left--) {
            if (!left) left = lengths[++id % 13];
            doc[b * T + i] = id;
        }
    return doc;
}
static int32_t *test_documents_of_queries(KernelTest *t, const AttentionShape *s) {
    int32_t *doc = (int32_t *)test_alloc(t, s->B * s->Tq * 4);
    for (int b = 0; b < s->B; b++)
        for (int q = 0; q < s->Tq; q++) {
            int at = s->q_offset + q + (q >= s->q_split ? s->q_gap : 0);
            doc[b * s->Tq + q] = at >= 0 && at < s->Tk ? s->k_doc[b * s->Tk + at] : -1;
        }
    return doc;
}

static void test_attention_case(KernelTest *t, const AttentionCase *c, int q_split, int q_gap, double *worst_lse,
                                int *bad_empty) {
    const int XS = (int)sizeof(floatX), fused = c->Tq == c->Tk && !c->spare, kw = c->NKV * c->HD, qw = c->NH * c->HD;
    test_shape(t,
               "attention (B %d, Tq %d, Tk %d, NH %d, NKV %d, HD %d, q_offset %d, %d further from %d on, documents %d, "
               "spare %d)",
               c->B, c->Tq, c->Tk, c->NH, c->NKV, c->HD, c->q_offset, q_gap, q_split, c->docs, c->spare);
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = c->B;
    s.Tq = c->Tq;
    s.Tk = c->Tk;
    s.NH = c->NH;
    s.NKV = c->NKV;
    s.HD = c->HD;
    s.q_offset = c->q_offset;
    s.q_split = q_split;
    s.q_gap = q_gap;
    if (c->docs == 3) {
        s.k_doc = test_cut_documents(t, c->B, c->Tk);
        s.q_doc = test_documents_of_queries(t, &s);
    } else if (c->docs) {
        s.k_doc = test_documents(t, c->B, c->Tk, 0);
        s.q_doc = c->Tq == c->Tk && c->docs == 1 ? s.k_doc : test_documents(t, c->B, c->Tq, c->docs == 2);
    }
    int q_spare = c->spare == 8 ? 8 : 3, k_spare = c->spare == 8 ? 8 : 5;
    s.q_stride = fused ? qw + 2 * kw : qw + q_spare;
    s.k_stride = s.v_stride = fused ? qw + 2 * kw : kw + k_spare;
    s.o_stride = qw + c->spare;
    int64_t q_batch = c->Tq * s.q_stride, kv_batch = c->Tk * s.k_stride, N = (int64_t)c->B * c->Tq;
    int64_t q_size = c->B * q_batch, kv_size = fused ? 0 : c->B * (c->Tk + c->spare) * s.k_stride,
            total = q_size + 2 * kv_size;
    floatX *qkv = test_xs(t, total, c->scale), *q = qkv, *k = fused ? q + qw : q + q_size,
           *v = fused ? k + kw : k + kv_size;
    floatX *dout = test_xs(t, N * s.o_stride, 1), *first_out = NULL, *first_d = NULL;
    float *first_lse = NULL;
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        floatX *out = test_xs(t, N * s.o_stride, 1), *d = (floatX *)test_copy(t, qkv, total * XS);
        memset(out, 0, (size_t)(N * s.o_stride * XS)); // what lies between rows is compared below
        float *lse = test_floats(t, N * c->NH, 1);
        attention_forward(&t->dev[threads], out, lse, q, k, v, &s);
        attention_backward(&t->dev[threads], d, d + (k - q), d + (v - q), dout, out, lse, q, k, v, &s);
        if (!first_out) {
            first_out = out;
            first_lse = lse;
            first_d = d;
        }
        test_same(t, out, first_out, N * s.o_stride * XS);
        test_same(t, lse, first_lse, N * c->NH * 4);
        test_same(t, d, first_d, total * XS); // unused keys and gaps hold what they held
    }
    floatX *quick = (floatX *)test_copy(t, qkv, total * XS); // where the order of a sum may differ from run to run
    t->dev[1].deterministic = 0;
    attention_backward(&t->dev[1], quick, quick + (k - q), quick + (v - q), dout, first_out, first_lse, q, k, v, &s);
    t->dev[1].deterministic = 1;
    double *qd = test_widen(t, q, c->B, c->Tq, q_batch, s.q_stride, qw),
           *kd = test_widen(t, k, c->B, c->Tk, fused ? q_batch : kv_batch, s.k_stride, kw);
    double *vd = test_widen(t, v, c->B, c->Tk, fused ? q_batch : kv_batch, s.v_stride, kw),
           *dd = test_widen(t, dout, c->B, c->Tq, c->Tq * s.o_stride, s.o_stride, qw);
    double *out = test_doubles(t, N * qw), *lse = test_doubles(t, N * c->NH), *p = test_doubles(t, c->Tk);
    double *dq = test_doubles(t, N * qw), *dk = test_doubles(t, (int64_t)c->B * c->Tk * kw),
           *dv = test_doubles(t, (int64_t)c->B * c->Tk * kw);
    attention_reference(&s, qd, kd, vd, dd, out, lse, dq, dk, dv, p);
    test_compare(t, first_out, 1, s.o_stride, out, N, qw);
    for (int b = 0; b < c->B; b++) {
        test_compare(t, quick + b * q_batch, 1, s.q_stride, dq + (int64_t)b * c->Tq * qw, c->Tq, qw);
        test_compare(t, quick + (k - q) + b * (fused ? q_batch : kv_batch), 1, s.k_stride, dk + (int64_t)b * c->Tk * kw,
                     c->Tk, kw);
        test_compare(t, quick + (v - q) + b * (fused ? q_batch : kv_batch), 1, s.v_stride, dv + (int64_t)b * c->Tk * kw,
                     c->Tk, kw);
        test_compare(t, first_d + b * q_batch, 1, s.q_stride, dq + (int64_t)b * c->Tq * qw, c->Tq, qw);
        test_compare(t, first_d + (k - q) + b * (fused ? q_batch : kv_batch), 1, s.k_stride,
                     dk + (int64_t)b * c->Tk * kw, c->Tk, kw);
        test_compare(t, first_d + (v - q) + b * (fused ? q_batch : kv_batch), 1, s.v_stride,
                     dv + (int64_t)b * c->Tk * kw, c->Tk, kw);
    }
    for (int64_t i = 0; i < N * c->NH; i++) {
        double e = lse[i] == -INFINITY ? 0 : fabs(first_lse[i] - lse[i]) / fmax(1, fabs(lse[i]));
        if (lse[i] == -INFINITY) *bad_empty += first_lse[i] != -INFINITY;
        if (!(e <= 1e-6) || (lse[i] == -INFINITY && first_lse[i] != -INFINITY))
            test_bad(t, "lse[%" PRId64 "] is %.9g, expected %.9g", i, first_lse[i], lse[i]);
        *worst_lse = worst_of(*worst_lse, e);
    }
    test_free_all(t);
}

static void test_attention(KernelTest *t) {
    const AttentionCase cases[] = {
        // B   Tq   Tk NH NKV  HD  offset docs spare scale
        {1, 1, 1, 1, 1, 1, 0, 0, 0, 1},         {2, 3, 3, 4, 2, 7, 0, 0, 0, 1},
        {1, 65, 65, 3, 1, 64, 0, 0, 0, 1},      {2, 200, 200, 6, 2, 80, 0, 1, 0, 1},
        {1, 3, 200, 8, 2, 128, 197, 0, 0, 1},   {2, 1, 65, 12, 4, 64, 64, 0, 35, 1},
        {2, 65, 200, 2, 2, 7, -30, 0, 3, 1},    {1, 200, 65, 2, 1, 64, -70, 0, 0, 1},
        {1, 200, 200, 4, 4, 128, 0, 0, 0, 1},   {1, 300, 700, 3, 3, 64, 400, 1, 0, 1},
        {1, 65, 300, 2, 1, 16, 100, 2, 0, 1},   {2, 65, 65, 5, 5, 33, 0, 2, 1, 1},
        {1, 7, 9, 2, 1, 16, -100, 0, 0, 1},     {1, 600, 600, 2, 1, 16, 0, 0, 0, 1},
        {1, 40, 30, 2, 2, 8, 1000000, 0, 0, 1},
    };
    // Scores of some hundreds (the softmax picks one key), and a head of one element: gradients are differences of near
    // equals, and what is left of them is the rounding of out.
    const AttentionCase hard[] = {{1, 130, 130, 2, 1, 64, 0, 0, 0, 12}, {1, 65, 300, 2, 1, 1, 100, 2, 0, 1}};
    // More queries than keys and the reverse, whole tiles of queries that see nothing and of keys that nobody sees,
    // documents, groups.
    const AttentionCase tiles[] = {{1, 300, 65, 4, 2, 64, -140, 0, 8, 1},  {1, 300, 300, 2, 1, 128, -170, 1, 8, 1},
                                   {2, 70, 700, 2, 1, 64, 5, 1, 8, 1},     {2, 300, 300, 4, 1, 64, 0, 1, 8, 1},
                                   {1, 200, 333, 2, 2, 128, 133, 2, 8, 1}, {1, 3, 500, 4, 2, 128, 497, 0, 8, 1}};
    double worst_lse = 0;
    int bad_empty = 0;
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 6e-2
                                    : 2e-4); // the worst row: dq of rows that see a key or two, all of it rounding
    for (size_t i = 0; i < sizeof tiles / sizeof tiles[0]; i++, t->cases++)
        test_attention_case(t, &tiles[i], 0, 0, &worst_lse, &bad_empty);
    test_report(t, "attention over tiles of all kinds follows its definition");
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 2e-2 : 2e-4); // the worst row: first rows' dq, a difference of what was rounded:
                                                    // 0.010 to 0.013 by the processor; a lost tile is near 1
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++, t->cases++)
        test_attention_case(t, &cases[i], 0, 0, &worst_lse, &bad_empty);
    CHECK("attention: log-sum-exp follows its definition, -infinity for rows that see nothing",
          worst_lse <= 1e-6 && !bad_empty, "error %.2g <= 1e-6, %d wrong rows%s", worst_lse, bad_empty, test_where(t));
    test_report(t, "attention forward and backward follow their definition");
    test_bounds(t, sizeof(floatX) == 2 ? 2e-2 : 3e-5, sizeof(floatX) == 2 ? 1 : 1e-3);
    for (int i = 0; i < 2; i++, t->cases++) test_attention_case(t, &hard[i], 0, 0, &worst_lse, &bad_empty);
    test_report(t, "attention: one key takes all, heads of one element");
}

static void test_attention_chunks(KernelTest *t) {
    // Context parallelism: chunk c and chunk 2 CP - 1 - c of a sequence, c = 0, 1, CP - 1; chunks that are no whole
    // tiles; gaps beyond the last key, second chunks that are all or nothing, first ones that see nothing.
    const ChunkCase chunks[] = {
        {{1, 256, 512, 2, 1, 64, 0, 0, 8, 1}, 128, 256},  {{1, 256, 512, 2, 1, 64, 128, 3, 8, 1}, 128, 0},
        {{2, 128, 512, 2, 1, 64, 64, 3, 8, 1}, 64, 256},  {{1, 100, 400, 4, 2, 64, 50, 0, 8, 1}, 50, 200},
        {{1, 100, 400, 4, 1, 64, 100, 3, 8, 1}, 50, 100}, {{1, 256, 512, 2, 1, 128, 0, 3, 8, 1}, 128, 256},
        {{1, 134, 536, 2, 2, 128, 67, 0, 8, 1}, 67, 268}, {{1, 134, 536, 2, 1, 128, 67, 1, 8, 1}, 67, 268},
        {{2, 66, 264, 4, 2, 16, 33, 3, 0, 1}, 33, 132},   {{1, 66, 264, 2, 1, 80, 0, 0, 0, 1}, 33, 198},
        {{1, 200, 400, 3, 3, 33, 0, 3, 1, 1}, 100, 200},  {{1, 130, 300, 2, 1, 200, -70, 2, 0, 1}, 65, 300},
        {{1, 60, 200, 2, 1, 64, 0, 0, 8, 1}, 7, 1000},    {{1, 60, 200, 2, 1, 64, 5, 2, 8, 1}, 0, 130},
        {{1, 60, 200, 2, 1, 7, 5, 3, 3, 1}, 60, 130},     {{1, 70, 300, 2, 1, 64, -200, 3, 8, 1}, 69, 400}};
    double worst_lse = 0;
    int bad_empty = 0;
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6, sizeof(floatX) == 2 ? 6e-2 : 2e-4); // as over tiles
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++, t->cases++)
        test_attention_case(t, &chunks[i].all, chunks[i].q_split, chunks[i].q_gap, &worst_lse, &bad_empty);
    CHECK("attention of two chunks: log-sum-exp follows its definition", worst_lse <= 1e-6 && !bad_empty,
          "error %.2g <= 1e-6, %d wrong rows%s", worst_lse, bad_empty, test_where(t));
    test_report(t, "attention of two chunks of a sequence follows its definition");
}

// ---------------------------------------------------------------------------
// flat ops: definition, and cuts that change nothing

static void test_exp(KernelTest *t) {
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        float x = (float)(i < 200000 ? 87.0 * test_random(t) : test_random(t));
        union {
            float f;
            int32_t i;
        } ulp;
        ulp.f = (float)exp((double)x);
        double size = ulp.f;
        ulp.i++;
        size = ulp.f - size;
        worst = worst_of(worst, fabs(exp_float(x) - exp((double)x)) / size);
    }
    CHECK("exp is accurate", worst <= 1.5, "%.3f units in the last place <= 1.5", worst);
    CHECK("exp is exact at 0 and at the ends",
          exp_float(0) == 1 && exp_float(-88) == 0 && exp_float(-1e30f) == 0 && exp_float(-INFINITY) == 0 &&
              exp_float(1e30f) > 2e38f && exp_float(NAN) != exp_float(NAN),
          "exp(0) %g, exp(-88) %g, exp(-inf) %g, exp(1e30) %g", exp_float(0), exp_float(-88), exp_float(-INFINITY),
          exp_float(1e30f));
}

static void test_adamw(KernelTest *t) {
    test_bounds(t, 2e-6, 2e-6);
    const int64_t counts[] = {1, 15, 17, 256, 40000};
    const float lr = 1e-2f, b1 = 0.9f, b2 = 0.95f, eps = 1e-8f, wd = 0.1f, scale = 0.37f;
    for (int i = 0; i < 5; i++, t->cases++) {
        int64_t n = counts[i];
        test_shape(t, "adamw (%" PRId64 " elements)", n);
        float *p0 = test_floats(t, n, 1), *g0 = test_floats(t, n, 1), *first[3] = {NULL, NULL, NULL};
        double *ref[3] = {test_doubles(t, n), test_doubles(t, n), test_doubles(t, n)};
        for (int threads = 1; threads <= TEST_THREADS + 1; threads++) {
            float *state[3] = {(float *)test_copy(t, p0, n * 4), test_floats(t, n, 0), test_floats(t, n, 0)}; // p, m, v
            floatX *copy = sizeof(floatX) == 2 ? test_xs(t, n, 1) : NULL;
            for (int step = 1; step <= 3; step++) {
                int64_t cut = threads > TEST_THREADS ? n * step / 5 : 0; // the last round: cut in two at an odd place
                for (int part = 0; part < (threads > TEST_THREADS ? 2 : 1); part++) {
                    int64_t from = part ? cut : 0, size = threads > TEST_THREADS && !part ? cut : n - from;
                    adamw(&t->dev[threads > TEST_THREADS ? 1 : threads], state[0] + from, state[1] + from,
                          state[2] + from, g0 + from, copy ? copy + from : NULL, size, lr, b1, b2, eps, wd, scale,
                          step);
                }
            }
            for (int j = 0; j < 3; j++) {
                if (threads == 1) first[j] = state[j];
                test_same(t, state[j], first[j], n * 4);
            }
            for (int64_t j = 0; j < n && copy; j++)
                t->unequal += to_float(copy[j]) != to_float(from_float(state[0][j]));
        }
        for (int64_t j = 0; j < n; j++) {
            double p = p0[j], m = 0, v = 0, g = g0[j] * (double)scale;
            for (int step = 1; step <= 3; step++) {
                p *= 1 - (double)lr * wd;
                m = b1 * (double)m + (1 - (double)b1) * g;
                v = b2 * (double)v + (1 - (double)b2) * g * g;
                p -= lr / (1 - pow(b1, step)) * m / (sqrt(v) / sqrt(1 - pow(b2, step)) + eps);
            }
            ref[0][j] = p;
            ref[1][j] = m;
            ref[2][j] = v;
        }
        for (int j = 0; j < 3; j++) test_compare(t, first[j], 0, n, ref[j], 1, n);
    }
    test_report(t, "adamw follows PyTorch's definition, wherever the tensor is cut");
}

/* tree_sum is the binary tree, bit for bit, wherever the tensor is cut; casts round to nearest even. */
static void test_tree_sums(KernelTest *t, const float *pieces, int n, int64_t count, int64_t cut) {
    float *start = test_floats(t, count, 1), *level = test_floats(t, n * count, 1),
          *shifted = test_floats(t, n * (count - cut), 1);
    memcpy(level, pieces, (size_t)(n * count) * 4);
    for (int width = 1; width < n; width *= 2) // the tree, level by level
        for (int k = 0; k + width < n; k += 2 * width)
            for (int64_t j = 0; j < count; j++) level[k * count + j] += level[(k + width) * count + j];
    for (int k = 0; k < n; k++)
        memcpy(shifted + k * (count - cut), pieces + k * count + cut, (size_t)(count - cut) * 4);
    float *tail = test_floats(t, count - cut, 1), *with_start = test_floats(t, count, 1);
    for (int64_t j = 0; j < count; j++) with_start[j] = start[j] + level[j];
    tree_sum(&t->dev[1], tail, shifted, DTYPE_F32, n, count - cut, 0);
    test_same(t, tail, level + cut, (count - cut) * 4);
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        float *room = test_floats(t, count + VL, 1),
              *out = room + (VL - (uintptr_t)room / 4 % VL) % VL; // a whole vector: long sums stream
        float *sum = (float *)test_copy(t, start, count * 4), *in_place = (float *)test_copy(t, pieces, n * count * 4);
        bf16 *cast = (bf16 *)test_alloc(t, count * 2);
        tree_sum(&t->dev[threads], out, pieces, DTYPE_F32, n, count, 0);
        tree_sum(&t->dev[threads], sum, pieces, DTYPE_F32, n, count, 1);
        tree_sum(&t->dev[threads], in_place, in_place, DTYPE_F32, n, count, 0);
        cast_to_bf16(&t->dev[threads], cast, pieces, count);
        test_same(t, out, level, count * 4);
        test_same(t, in_place, level, count * 4);
        test_same(t, sum, with_start, count * 4);
        for (int64_t j = 0; j < count; j++)
            if (cast[j].bits != float_to_bf16(pieces[j]).bits) {
                t->unequal++;
                test_bad(t, "cast of element %" PRId64 " is %04x, expected %04x", j, cast[j].bits,
                         float_to_bf16(pieces[j]).bits);
            }
    }
}

/* squared_norm, exact_total and fingerprint. */
static void test_reductions(KernelTest *t, const float *pieces, int64_t count, double *worst_norm, int *inexact) {
    const ExactSum none = ZERO;
    double norm = 0, first = 0;
    for (int64_t j = 0; j < count; j++) norm += (double)pieces[j] * pieces[j];
    float *sizes = (float *)test_alloc(t, count * 4);
    ExactSum exact = ZERO, expected = ZERO;
    uint64_t *print = (uint64_t *)test_alloc(t, 8), expected_print = 0, word;
    for (int64_t j = 0; j < count; j++) {
        sizes[j] = fabsf(pieces[j]);
        exact_add(&exact, sizes[j]);
    }
    exact_merge(&expected, &exact);
    for (int64_t j = 0; j < count / 2; j++) {
        memcpy(&word, pieces + 2 * j, 8);
        expected_print += mix64(word + (uint64_t)j * 0x9E3779B97F4A7C15ull);
    }
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        ExactSum *squares = (ExactSum *)test_copy(t, &none, sizeof none),
                 *total = (ExactSum *)test_copy(t, &none, sizeof none), settled = ZERO, settled_total = ZERO;
        squared_norm(&t->dev[threads], squares, pieces, count);
        exact_total(&t->dev[threads], total, sizes, count);
        fingerprint(&t->dev[threads], print, pieces, count / 2 * 8);
        exact_merge(&settled, squares);
        exact_merge(&settled_total, total);
        *inexact += memcmp(&settled_total, &expected, sizeof expected) != 0 || *print != expected_print;
        double got = exact_value(&settled);
        if (threads == 1) first = got;
        t->unequal += got != first;
        *worst_norm = worst_of(*worst_norm, fabs(got - norm) / norm);
        if (!(fabs(got - norm) / norm <= 1e-6)) test_bad(t, "squared_norm is %.9g, expected %.9g", got, norm);
    }
}

#ifdef PRECISION_BF16
static void test_vector_rounding(void) {
    int wrong = 0;
    for (uint64_t bits = 0; bits < (1ull << 32); bits += 4093) { // all kinds of floats, NaN and infinity among them
        uint32_t u = (uint32_t)bits;
        float x;
        floatX y;
        memcpy(&x, &u, 4);
        store_x(&y, vsplat(x), 1);
        int denormal = !(u & 0x7F800000u); // AVX512_BF16 makes them 0 of their sign
        wrong += y.bits != float_to_bf16(x).bits && !(denormal && !(y.bits & 0x7FFF));
    }
    CHECK("vector rounding to bf16 equals float_to_bf16, denormals aside", !wrong, "%d differ", wrong);
}
#endif

static void test_flat(KernelTest *t) {
    test_bounds(t, 0, 0);
    const int64_t counts[] = {1, 31, 300, 40001, (1 << 20) + 5}; // the last is beyond STREAM_FLOATS
    double worst_norm = 0;
    int inexact = 0;
    for (int i = 0; i < 5; i++)
        for (int n = 1; n <= (i < 4 ? 9 : 2); n++, t->cases++) {
            int64_t count = counts[i];
            test_shape(t, "flat sums (%d pieces of %" PRId64 " elements)", n, count);
            float *pieces = test_floats(t, n * count, 1);
            test_tree_sums(t, pieces, n, count, i < 4 ? count / 3 : 1);
            test_reductions(t, pieces, count, &worst_norm, &inexact);
            test_free_all(t);
        }
    CHECK("squared_norm is accurate", worst_norm <= 1e-6, "error %.2g <= 1e-6%s", worst_norm, test_where(t));
    CHECK("exact_total is exact, and a fingerprint the sum of its mixed words", !inexact, "%d differ", inexact);
    test_report(t, "tree_sum is the binary tree, bit for bit, wherever the tensor is cut; casts round to nearest even");
#ifdef PRECISION_BF16
    test_vector_rounding();
#endif
}

static void test_sum_pieces(KernelTest *t) {
    test_bounds(t, 0, 0);
    const int64_t counts[] = {1, 31, 300, 4001}, XS = (int64_t)sizeof(floatX);
    for (int i = 0; i < 4; i++)
        for (int n = 1; n <= 20; n++, t->cases++) {
            int64_t count = counts[i], cut = count / 3;
            test_shape(t, "sum_pieces (%d pieces of %" PRId64 " elements)", n, count);
            floatX *pieces = test_xs(t, n * count, 1), *sum = test_xs(t, count, 1),
                   *shifted = test_xs(t, n * (count - cut), 1), *tail = test_xs(t, count - cut, 1);
            float *level = test_floats(t, n * count, 1);
            for (int64_t j = 0; j < n * count; j++) level[j] = to_float(pieces[j]);
            for (int width = 1; width < n; width *= 2) // the tree, level by level
                for (int k = 0; k + width < n; k += 2 * width)
                    for (int64_t j = 0; j < count; j++) level[k * count + j] += level[(k + width) * count + j];
            for (int64_t j = 0; j < count; j++) sum[j] = from_float(level[j]); // rounded once
            for (int k = 0; k < n; k++)
                memcpy(shifted + k * (count - cut), pieces + k * count + cut, (size_t)((count - cut) * XS));
            sum_pieces(&t->dev[1], tail, shifted, n, count - cut);
            test_same(t, tail, sum + cut, (count - cut) * XS);
            for (int threads = 1; threads <= TEST_THREADS; threads++) {
                floatX *out = test_xs(t, count, 1), *in_place = (floatX *)test_copy(t, pieces, n * count * XS);
                sum_pieces(&t->dev[threads], out, pieces, n, count);
                sum_pieces(&t->dev[threads], in_place, in_place, n, count);
                test_same(t, out, sum, count * XS);
                test_same(t, in_place, sum, count * XS);
                test_same(t, in_place + count, pieces + count, (n - 1) * count * XS);
            }
            test_free_all(t);
        }
    test_report(t, "sum_pieces is the binary tree in fp32, rounded once, wherever the tensor is cut");
}

// ---------------------------------------------------------------------------
// the dry run

/* Every op once. */
static void every_op(Device *dev, float *f, floatX *x, int32_t *ids) {
    const int N = 16, C = 40, V = 17;
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = 2;
    s.Tq = 8;
    s.Tk = 9;
    s.NH = 4;
    s.NKV = 2;
    s.HD = 10;
    s.q_offset = -2;
    s.q_stride = s.o_stride = 40;
    s.k_stride = s.v_stride = 20;
    const int64_t D = 2000; // distance between tensors
    embedding_forward(dev, x, x + D, ids, 0, N, C, V);
    embedding_backward(dev, f, x, ids, 0, N, C, V);
    rmsnorm_forward(dev, x, f, x + D, x + 2 * D, x + 3 * D, x + 4 * D, 1e-5f, N, C);
    rmsnorm_backward(dev, x, f, x + D, NULL, x + 2 * D, f + D, x + 4 * D, N, C);
    residual_add(dev, x, x + D, x + 2 * D, N * C);
    linear_forward(dev, x, x + D, x + 2 * D, N, C, V);
    linear_forward_fp32(dev, f, x + D, x + 2 * D, N, C, V);
    linear_backward_input(dev, x, x + D, C, x + 2 * D, N, C, V);
    linear_backward_weight(dev, f, x + D, C, x + 2 * D, N, C, V, 1);
    rope_forward(dev, x, 40, f, ids, N, 8, 2, 10);
    rope_backward(dev, x, 40, f, ids, N, 8, 2, 10);
    attention_forward(dev, x, f, x + D, x + 2 * D, x + 3 * D, &s);
    attention_backward(dev, x + 4 * D, x + 5 * D, x + 6 * D, x + 7 * D, x, f, x + D, x + 2 * D, x + 3 * D, &s);
    swiglu_forward(dev, x, x + D, N, C);
    swiglu_backward(dev, x + D, x, x + 3 * D, N, C);
    cross_entropy(dev, f, f + D, ids, N, V, 1);
    cross_entropy_part(dev, f + 2 * D, f + D, ids, 5, N, V);
    cross_entropy_join(dev, f, f + D, f + 2 * D, ids, 1, 5, N, V, 1);
    tree_sum(dev, f, f + D, DTYPE_F32, 3, 500, 1);
    sum_pieces(dev, x, x + D, 3, 500);
    squared_norm(dev, (ExactSum *)(void *)f, f + 1000, 1000);
    adamw(dev, f, f + D, f + 2 * D, f + 3 * D, x, 1000, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1);
    cast_to_bf16(dev, (bf16 *)(void *)x, f, 1000);
    exact_total(dev, (ExactSum *)(void *)f, f + 1000, 1000);
    fingerprint(dev, (uint64_t *)(void *)f, f + 1000, 4000);
    linear_forward_add(dev, x, V, x + D, x + 2 * D, N, C, V);
    linear_backward_input_add(dev, x, x + D, x + 2 * D, N, C, V);
    scale(dev, x, 0.5f, 500);
    dequantize(dev, x, (int8_t *)(void *)(x + D), f, 500);
    adapter_merge(dev, f, f + D, f + 2 * D, 0.5f, 3, 20, 30);
}

static void test_dry_run(KernelTest *t) {
    Device dry_run, real;
    float *f = test_floats(t, 20000, 0.1);
    floatX *x = test_xs(t, 20000, 0.1);
    int32_t *ids = (int32_t *)test_alloc(t, 64 * 4);
    for (int i = 0; i < 64; i++) ids[i] = i % 17;
    device_open_dry_run(&dry_run, 2, 0);
    ops_open(&dry_run, 1);
    size_t opened = dry_run.arenas[MEM_WORKSPACE].used;
    every_op(&dry_run, (float *)((uintptr_t)1 << 50), (floatX *)((uintptr_t)1 << 50),
             NULL); // addresses that nothing may touch
    device_open(&real, &dry_run, ".", 0);
    real.blocking = 1;
    ops_open(&real, 0);
    every_op(&real, f, x, ids);
    int differ = 0, unused = 0;
    for (int op = 0; op < OP_COUNT; op++) {
        unused += dry_run.ops[op].calls == 0;
        differ += dry_run.ops[op].calls != real.ops[op].calls || dry_run.ops[op].flops != real.ops[op].flops ||
                  dry_run.ops[op].bytes != real.ops[op].bytes;
    }
    int peaks = dry_run.arenas[MEM_WORKSPACE].peak == real.arenas[MEM_WORKSPACE].peak &&
                real.arenas[MEM_WORKSPACE].used == opened && dry_run.arenas[MEM_WORKSPACE].used == opened;
    CHECK("a dry run of every op touches nothing and counts what computing counts",
          !differ && !unused && peaks && device_flops(&dry_run, 0) > 0,
          "%d ops differ, %d had no dry run, %.0f FLOPs, workspace %zu bytes", differ, unused,
          device_flops(&dry_run, 0), dry_run.arenas[MEM_WORKSPACE].peak);
    double pairs = 0;
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = 1;
    s.NH = 1;
    s.NKV = 1;
    s.HD = 1;
    s.Tk = 9;
    int wrong = 0;
    for (s.Tq = 1; s.Tq < 15; s.Tq++)
        for (int i = 0; i < 40 * 36; i++, pairs = 0) {
            s.q_offset = i % 40 - 20;
            s.q_split = i / 40 % 6 * 3 - 1;
            s.q_gap = i / 240 * 4; // q_split -1 ... 14
            for (int q = 0; q < s.Tq; q++)
                for (int k = 0; k < s.Tk; k++) pairs += test_sees(&s, 0, q, k);
            wrong += pairs != attention_pairs(&s);
            for (int k = 0; k < s.Tk; k++) { // the first query that sees it, Tq: none
                int q = 0;
                while (q < s.Tq && !test_sees(&s, 0, q, k)) q++;
                wrong += min_i64(first_query(&s, k), s.Tq) != q;
            }
        }
    CHECK("attention counts visible pairs exactly, and finds the first query that sees a key", !wrong,
          "%d of %d shapes wrong", wrong, 14 * 40 * 36);
    ops_close(&real);
    device_close(&real);
    device_close(&dry_run);
    test_free_all(t);
}

static void test_kernels(void) {
    KernelTest t;
    memset(&t, 0, sizeof t);
    const char *seed = getenv("TEST_SEED");
    t.seed = seed ? strtoull(seed, NULL, 10) : 42;
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        Device dry_run;
        device_open_dry_run(&dry_run, threads, 0);
        dry_run.arenas[MEM_WORKSPACE].peak = 64 << 20;
        device_open(&t.dev[threads], &dry_run, ".", 0);
        t.dev[threads].deterministic = 1;
        t.dev[threads].blocking = 1; // the host reads what an op wrote
        ops_open(&t.dev[threads], 0);
    }
    static void (*const tests[])(KernelTest *) = {test_exp,          test_embedding,     test_rmsnorm,
                                                  test_residual_add, test_linears,       test_adapter_ops,
                                                  test_rope,         test_attention,     test_attention_chunks,
                                                  test_swiglu,       test_cross_entropy, test_cross_entropy_slices,
                                                  test_flat,         test_sum_pieces,    test_adamw,
                                                  test_dry_run};
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        t.random = t.seed;
        tests[i](&t); // its numbers are the same, whatever other tests draw
    }
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        ops_close(&t.dev[threads]);
        device_close(&t.dev[threads]);
    }
}
#endif
