/* test_matmul.h: linear layers, forward and backward, by the matmul library and in plain C, and the ops of adapters and
 * of int8 weights, against their definitions. Part of test_llama3.cu. */

typedef struct {
    int N, IC, OC, stride, accumulate; // dy and sum: (N, OC) of rows `stride` apart
    floatX *x, *w, *dy, *dense;        // (N, IC), (OC, IC), (N, stride), (N, OC)
    floatX *sum_start, *dsum_start;    // (N, stride), (N, IC): what sum and dsum are added to
    float *dw_start;                   // (OC, IC): what dw is added to, or replaces
} LinearCase;
typedef struct {
    floatX *y, *dx, *sum, *dsum; // (N, OC), (N, IC), (N, stride), (N, IC)
    floatX *rows;                // (N, stride): y, its rows further apart
    float *logits, *dw;          // (N, OC), (OC, IC)
} LinearOutputs;

static LinearCase linear_case(KernelTest *t, int N, int IC, int OC, int stride, int accumulate) {
    LinearCase c = {N, IC, OC, stride, accumulate, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    test_shape(t, "linear (N %d, IC %d, OC %d, stride %d%s)", N, IC, OC, stride, accumulate ? ", accumulated" : "");
    c.x = test_xs(t, N * IC, 1);
    c.w = test_xs(t, OC * IC, 1);
    c.dy = test_xs(t, N * stride, 1);
    c.dw_start = test_floats(t, OC * IC, 1);
    c.sum_start = test_xs(t, N * stride, 1);
    c.dsum_start = test_xs(t, N * IC, 1);
    c.dense = test_xs(t, N * OC, 1);
    return c;
}

static LinearOutputs linear_outputs(KernelTest *t, Device *dev, const LinearCase *c) {
    const int N = c->N, IC = c->IC, OC = c->OC, XS = (int)sizeof(floatX);
    LinearOutputs o;
    o.y = test_xs(t, N * OC, 1);
    o.dx = test_xs(t, N * IC, 1);
    o.rows = (floatX *)test_copy(t, c->sum_start, N * c->stride * XS);
    o.logits = test_floats(t, N * OC, 1);
    o.dw = (float *)test_copy(t, c->dw_start, OC * IC * 4);
    o.sum = (floatX *)test_copy(t, c->sum_start, N * c->stride * XS);
    o.dsum = (floatX *)test_copy(t, c->dsum_start, N * IC * XS);
    linear_forward(dev, o.y, c->x, c->w, N, IC, OC);
    linear_forward_logits(dev, logits_fp32(o.logits, OC), c->x, c->w, N, IC, OC);
    const Logits rows = {o.rows, c->stride, FLOATX};
    linear_forward_logits(dev, rows, c->x, c->w, N, IC, OC);
    linear_backward_input(dev, o.dx, c->dy, c->stride, c->w, N, IC, OC);
    linear_backward_weight(dev, o.dw, c->dy, c->stride, c->x, N, IC, OC, c->accumulate);
    linear_forward_add(dev, o.sum, c->stride, c->x, c->w, N, IC, OC);
    linear_backward_input_add(dev, o.dsum, c->dense, c->w, N, IC, OC);
    return o;
}

#ifdef USE_CUDA
/* Prints how cuBLASLt computed the matmuls of a case that failed. */
static void linear_print_algorithms(const Device *dev, const LinearCase *c) {
    static const struct {
        cublasLtMatmulAlgoConfigAttributes_t what;
        const char *name;
    } settings[] = {{CUBLASLT_ALGO_CONFIG_ID, "algorithm"},
                    {CUBLASLT_ALGO_CONFIG_TILE_ID, "tile"},
                    {CUBLASLT_ALGO_CONFIG_STAGES_ID, "stages"},
                    {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, "split-K"},
                    {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, "reduction scheme"},
                    {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, "custom option"}};
    for (const CudaMatmulEntry *m = dev->on.matmuls->entries; m; m = m->next) {
        const Matmul *p = &m->key.matmul;
        int is_forward = p->M == c->N && p->N == c->OC, is_input = p->M == c->N && p->N == c->IC,
            is_weight = p->M == c->OC && p->N == c->IC;
        if (p->M * p->N * p->K != (int64_t)c->N * c->IC * c->OC || !(is_forward || is_input || is_weight)) continue;
        printf("  matmul M %" PRId64 ", N %" PRId64 ", K %" PRId64 ", C %s%s, row of %" PRId64 ", aligned %" PRId64
               " %" PRId64 " %" PRId64,
               p->M, p->N, p->K, p->c_float ? "fp32" : "bf16", p->accumulate ? " added to" : "", p->c_row,
               m->key.aligned[0], m->key.aligned[1], m->key.aligned[2]);
        if (m->now < m->count) printf(": proposal %d of %d", m->now + 1, m->count);
        else printf(": the plain kernel");
        for (size_t i = 0; i < sizeof settings / sizeof *settings && m->now < m->count; i++) {
            uint32_t value = 0;
            size_t written;
            cublas_check(cublasLtMatmulAlgoConfigGetAttribute(&m->algorithms[m->now], settings[i].what, &value,
                                                              sizeof value, &written),
                         "describing an algorithm");
            printf(", %s %" PRIu32, settings[i].name, value);
        }
        printf("\n");
    }
}
#endif

/* The sum that `got` is compared with. cuBLASLt may round a product to bf16 before it adds it
 * (dev/results/gpu-h200.md), so the sum may be wrong by that rounding error, half a unit in the product's last
 * place. */
static double linear_sum(double product, floatX start, floatX got) {
    const double sum = product + to_float(start), most = ldexp(1, ilogb(product) - 8);
    if (!CUDA_BUILD || FLOATX != DTYPE_BF16 || product == 0) return sum;
    return sum + fmax(-most, fmin(most, to_float(got) - sum));
}

static void linear_compare(KernelTest *t, const LinearCase *c, const LinearOutputs *o) {
#ifdef USE_CUDA
    int was_good = !t->bad[0];
#endif
    const int N = c->N, IC = c->IC, OC = c->OC;
    double *y = test_doubles(t, N * OC), *dx = test_doubles(t, N * IC), *dw = test_doubles(t, OC * IC),
           *sum = test_doubles(t, N * OC), *dsum = test_doubles(t, N * IC);
    for (int j = 0; j < OC * IC && c->accumulate; j++) dw[j] = c->dw_start[j];
    for (int n = 0; n < N; n++)
        for (int o_at = 0; o_at < OC; o_at++)
            for (int i = 0; i < IC; i++) {
                double x = to_float(c->x[n * IC + i]), w = to_float(c->w[o_at * IC + i]),
                       dy = to_float(c->dy[n * c->stride + o_at]);
                y[n * OC + o_at] += x * w;
                dsum[n * IC + i] += to_float(c->dense[n * OC + o_at]) * w;
                dx[n * IC + i] += dy * w;
                dw[o_at * IC + i] += dy * x;
            }
    for (int j = 0; j < N * OC; j++) {
        int at = j / OC * c->stride + j % OC;
        sum[j] = linear_sum(y[j], c->sum_start[at], o->sum[at]);
    }
    for (int j = 0; j < N * IC; j++) dsum[j] = linear_sum(dsum[j], c->dsum_start[j], o->dsum[j]);
    test_compare(t, o->y, 1, OC, y, N, OC);
    test_compare(t, o->rows, 1, c->stride, y, N, OC);
    test_compare(t, o->dx, 1, IC, dx, N, IC);
    test_compare(t, o->sum, 1, c->stride, sum, N, OC);
    test_compare(t, o->dsum, 1, IC, dsum, N, IC);
    test_compare(t, o->logits, 0, OC, y, N, OC);
    test_compare(t, o->dw, 0, IC, dw, OC, IC);
#ifdef USE_CUDA
    if (was_good && t->bad[0]) linear_print_algorithms(&t->dev[1], c);
#endif
}

static void test_linear(KernelTest *t) {
    const int sizes[][4] = {{1, 1, 1, 0},     {3, 5, 7, 0},      {65, 257, 33, 3}, {1, 64, 17, 1},
                            {200, 80, 96, 0}, {1100, 24, 40, 8}, {2500, 9, 3, 0}}; // N, IC, OC, stride - OC
    for (int i = 0; i < 14; i++, t->cases++) {
        const int N = sizes[i / 2][0], IC = sizes[i / 2][1], OC = sizes[i / 2][2], stride = OC + sizes[i / 2][3],
                  XS = (int)sizeof(floatX);
        LinearCase c = linear_case(t, N, IC, OC, stride, i % 2);
        LinearOutputs first = linear_outputs(t, &t->dev[1], &c);
        for (int threads = 2; threads <= TEST_THREADS; threads++) {
            LinearOutputs o = linear_outputs(t, &t->dev[threads], &c);
            test_same(t, o.y, first.y, N * OC * XS);
            test_same(t, o.rows, first.rows, N * stride * XS);
            test_same(t, o.dx, first.dx, N * IC * XS);
            test_same(t, o.sum, first.sum, N * stride * XS);
            test_same(t, o.dsum, first.dsum, N * IC * XS);
            test_same(t, o.logits, first.logits, N * OC * 4);
            test_same(t, o.dw, first.dw, OC * IC * 4);
        }
        for (int n = 0; n < N; n++) { // between rows nothing is written
            int64_t gap = n * stride + OC;
            test_same(t, first.sum + gap, c.sum_start + gap, (stride - OC) * XS);
            test_same(t, first.rows + gap, c.sum_start + gap, (stride - OC) * XS);
        }
        linear_compare(t, &c, &first);
    }
}

/* A linear layer of few rows reads each weight once for all of them, by code of its own (lib/ops/cpu/matmul.h). */
static void test_few_rows(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    const int sizes[][2] = {{1, 1},   {2, 5},    {15, 4},    {31, 6},   {32, 7},    {33, 9},
                            {64, 17}, {129, 33}, {255, 260}, {576, 67}, {1000, 99}, {1537, 130}}; // IC, OC
    enum { SIZES = sizeof sizes / sizeof *sizes, MOST_ROWS = 6, XS = (int)sizeof(floatX) };
    for (int i = 0; i < SIZES * MOST_ROWS; i++, t->cases++) {
        const int N = 1 + i % MOST_ROWS, IC = sizes[i / MOST_ROWS][0], OC = sizes[i / MOST_ROWS][1];
        LinearCase c = linear_case(t, N, IC, OC, OC + 3, i % 2);
        LinearOutputs first = linear_outputs(t, &t->dev[1], &c);
        for (int threads = 2; threads <= TEST_THREADS; threads++) {
            LinearOutputs o = linear_outputs(t, &t->dev[threads], &c);
            test_same(t, o.y, first.y, N * OC * XS);
            test_same(t, o.rows, first.rows, N * c.stride * XS);
            test_same(t, o.sum, first.sum, N * c.stride * XS);
            test_same(t, o.logits, first.logits, N * OC * 4);
        }
#ifndef USE_CUDA // cuBLASLt's bits depend on the number of rows
        float *alone = test_floats(t, OC, 1);
        for (int n = 0; n < N && N <= FEW_ROWS; n++) {
            linear_forward_logits(&t->dev[1], logits_fp32(alone, OC), c.x + n * IC, c.w, 1, IC, OC);
            test_same(t, alone, first.logits + n * OC, OC * 4);
        }
#endif
        linear_compare(t, &c, &first);
        test_free_all(t);
    }
    test_report(t, "linear layers of 1 to 6 rows follow their definition, each row as if it were alone");
}

#ifdef CUDA_ON_CPU
/* cuBLASLt may refuse its own proposals, and each refused one gives way to the next. The emulator proposes five, which
 * compute the same bits. */
static void test_refused_proposals(KernelTest *t) {
    const int N = 48, IC = 71, OC = 55; // a shape that no other test has: a refused proposal is not tried again
    Device *dev = &t->dev[1];
    LinearCase c = linear_case(t, N, IC, OC, OC, 0);
    LinearOutputs first = linear_outputs(t, dev, &c);
    int wrong = 0, entries = 0;
    for (unsigned refused = 0; refused <= 5; refused++, t->cases++) {
        cuda_on_cpu.refused_algorithms = (1u << refused) - 1; // all before this one
        LinearOutputs o = linear_outputs(t, dev, &c);
        for (CudaMatmulEntry *m = dev->on.matmuls->entries; m; m = m->next) {
            int is_here = m->key.matmul.M == N && m->key.matmul.K == IC;
            entries += is_here;
            wrong += is_here && m->now != (int)refused;
        }
        if (refused < 5) test_same(t, o.y, first.y, N * OC * (int)sizeof(floatX));
        else linear_compare(t, &c, &o);
    }
    cuda_on_cpu.refused_algorithms = 0;
    if (wrong || !entries) test_bad(t, "%d of %d matmuls compute with another proposal", wrong, entries);
    t->unequal += wrong || !entries;
    test_free_all(t);
}
#endif

static void test_linears(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    test_linear(t);
#ifdef USE_CUDA
    test_report(t, "linear (cuBLASLt) forward and backward follow their definition");
#ifdef CUDA_ON_CPU
    test_refused_proposals(t);
    test_report(t, "a matmul proposal that cuBLASLt refuses gives way to the next, the last one to the plain kernel");
#endif
#else
    test_report(t, t->dev[1].on.matmuls->plain ? "linear (plain C) forward and backward follow their definition"
                                            : "linear (oneDNN) forward and backward follow their definition");
    int was = t->dev[1].on.matmuls->plain;
    for (int threads = 1; threads <= TEST_THREADS; threads++) t->dev[threads].on.matmuls->plain = 1;
    if (!was) {
        test_linear(t);
        test_report(t, "linear (plain C) forward and backward follow their definition");
    }
    for (int threads = 1; threads <= TEST_THREADS; threads++) t->dev[threads].on.matmuls->plain = was;
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
