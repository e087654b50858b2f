/* test_muon_ops.h: Muon's ops and the Newton-Schulz iterations against their definitions, in matrices that are square,
 * wide and tall. Part of test_llama3.cu. */

static void test_muon_momentum(KernelTest *t) {
    const int64_t counts[] = {1, 15, 17, 256, 40000};
    const float momentum = 0.95f, scales[] = {0.37f, 1.0f, 0.25f};
    test_bounds(t, ROUNDING, ROUNDING);
    for (int i = 0; i < 5; i++, t->cases++) {
        int64_t n = counts[i], cut = n / 3;
        float *g = test_floats(t, n, 1), *first_m = NULL;
        floatX *first = NULL;
        double *m = test_doubles(t, n), *u = test_doubles(t, n);
        test_shape(t, "muon_momentum (%" PRId64 " elements)", n);
        for (int round = 1; round <= TEST_THREADS + 1; round++) { // the last round: cut in two at an odd place
            float *state = test_floats(t, n, 0);
            floatX *update = test_xs(t, n, 1);
            int is_cut = round > TEST_THREADS;
            Device *dev = &t->dev[is_cut ? 1 : round];
            for (int step = 0; step < 3; step++)
                for (int part = 0; part <= is_cut; part++) {
                    int64_t from = part ? cut : 0, end = is_cut && !part ? cut : n;
                    muon_momentum(dev, update + from, state + from, g + from, end - from, momentum, scales[step]);
                }
            if (round == 1) {
                first = update;
                first_m = state;
            }
            test_same(t, update, first, n * (int64_t)sizeof(floatX));
            test_same(t, state, first_m, n * 4);
        }
        for (int64_t j = 0; j < n; j++)
            for (int step = 0; step < 3; step++) {
                double s = (double)scales[step] * g[j];
                m[j] = (double)momentum * m[j] + (1 - (double)momentum) * s;
                u[j] = (1 - (double)momentum) * s + (double)momentum * m[j];
            }
        test_compare(t, first, 1, n, u, 1, n);
        test_bounds(t, 2e-6, 2e-6);
        test_compare(t, first_m, 0, n, m, 1, n);
        test_bounds(t, ROUNDING, ROUNDING);
    }
    test_report(t, "muon_momentum is Nesterov's momentum as in torch.optim.Muon, wherever the tensor is cut");
}

static void test_muon_update(KernelTest *t) {
    const int64_t counts[] = {1, 15, 17, 256, 40000};
    const float lr = 1e-2f, adjust = 1.7f, decay = 0.1f;
    test_bounds(t, 2e-6, 2e-6);
    for (int i = 0; i < 5; i++, t->cases++) {
        int64_t n = counts[i], cut = n / 3;
        float *p0 = test_floats(t, n, 1), *first = NULL;
        floatX *direction = test_xs(t, n, 1);
        double *ref = test_doubles(t, n);
        test_shape(t, "muon_update (%" PRId64 " elements)", n);
        for (int round = 1; round <= TEST_THREADS + 1; round++) {
            float *p = (float *)test_copy(t, p0, n * 4);
            floatX *copy = sizeof(floatX) == 2 ? test_xs(t, n, 1) : NULL;
            int is_cut = round > TEST_THREADS;
            for (int part = 0; part <= is_cut; part++) {
                int64_t from = part ? cut : 0, end = is_cut && !part ? cut : n;
                muon_update(&t->dev[is_cut ? 1 : round], p + from, copy ? copy + from : NULL, direction + from,
                            end - from, lr, adjust, decay);
            }
            if (round == 1) first = p;
            test_same(t, p, first, n * 4);
            for (int64_t j = 0; j < n && copy; j++) t->unequal += to_float(copy[j]) != to_float(from_float(p[j]));
        }
        for (int64_t j = 0; j < n; j++)
            ref[j] = (1 - (double)lr * decay) * p0[j] - (double)lr * adjust * to_float(direction[j]);
        test_compare(t, first, 0, n, ref, 1, n);
    }
    test_report(t, "muon_update decays and adds the direction, wherever the tensor is cut");
}

/* The smaller Gram matrix of x (rows, cols), (m, m). */
static double *gram_of(KernelTest *t, const double *x, int rows, int cols) {
    int m = rows < cols ? rows : cols, is_tall = rows > cols;
    double *g = test_doubles(t, m * m);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < m; j++)
            for (int k = 0; k < (is_tall ? rows : cols); k++)
                g[i * m + j] += is_tall ? x[k * cols + i] * x[k * cols + j] : x[i * cols + k] * x[j * cols + k];
    return g;
}

/* s x, or x s if x is tall. */
static double *symmetric_product_of(KernelTest *t, const double *s, const double *x, int rows, int cols) {
    int m = rows < cols ? rows : cols, is_tall = rows > cols;
    double *y = test_doubles(t, rows * cols);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            for (int k = 0; k < m; k++)
                y[i * cols + j] += is_tall ? x[i * cols + k] * s[k * m + j] : s[i * m + k] * x[k * cols + j];
    return y;
}

static double *doubles_of(KernelTest *t, const floatX *x, int64_t n) {
    double *d = test_doubles(t, n);
    for (int64_t i = 0; i < n; i++) d[i] = to_float(x[i]);
    return d;
}

static void normalize_doubles(double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= fmax(sqrt(sum), 1e-7);
}

static const int matrix_sizes[][2] = {{1, 1}, {5, 5}, {3, 40}, {40, 3}, {65, 33}, {33, 65}, {1, 70}, {1100, 9}};
enum { MATRIX_SIZES = sizeof matrix_sizes / sizeof *matrix_sizes };

/* Each op alone. */
static void test_matrix_ops(KernelTest *t) {
    test_bounds(t, ROUNDING, ROUNDING_ROW);
    for (int i = 0; i < MATRIX_SIZES; i++, t->cases++) {
        int rows = matrix_sizes[i][0], cols = matrix_sizes[i][1], m = rows < cols ? rows : cols, n = rows * cols;
        const int64_t XS = (int64_t)sizeof(floatX);
        floatX *x = test_xs(t, n, 1), *first[3] = {NULL, NULL, NULL};
        float *z = test_floats(t, n, 1), *first_y = NULL;
        double *dx = doubles_of(t, x, n), *sum = test_doubles(t, n);
        test_shape(t, "matrix ops (%d x %d)", rows, cols);
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            Device *dev = &t->dev[threads];
            floatX *out[3] = {test_xs(t, m * m, 1), (floatX *)test_copy(t, x, n * XS),
                              (floatX *)test_copy(t, x, n * XS)};
            float *y = test_floats(t, n, 1);
            gram_matrix(dev, out[0], x, rows, cols);
            symmetric_matmul(dev, y, threads == 1 ? out[0] : first[0], x, rows, cols);
            normalize_matrix(dev, out[1], n);
            weighted_sum(dev, out[2], 1.25f, z, -0.7f, n);
            for (int k = 0; k < 3; k++) {
                if (threads == 1) first[k] = out[k];
                test_same(t, out[k], first[k], (k ? n : m * m) * XS);
            }
            if (threads == 1) first_y = y;
            test_same(t, y, first_y, n * 4);
        }
        double *g = doubles_of(t, first[0], m * m); // symmetric: its transpose would give the same product
        for (int j = 0; j < n; j++) sum[j] = 1.25 * dx[j] - (double)0.7f * z[j];
        test_compare(t, first[0], 1, m, gram_of(t, dx, rows, cols), m, m);
        test_compare(t, first_y, 0, cols, symmetric_product_of(t, g, dx, rows, cols), rows, cols);
        test_compare(t, first[2], 1, n, sum, 1, n);
        normalize_doubles(dx, n);
        test_compare(t, first[1], 1, n, dx, 1, n);
    }
    test_report(t, "Gram matrices, products with symmetric ones, normalized matrices and weighted sums are as defined");
}

/* All of Newton-Schulz; a matrix of zeros stays zero. */
static void test_newton_schulz(KernelTest *t) {
    double bound = sizeof(floatX) == 2 ? 5e-2 : 2e-5, wrong = 0;
    test_bounds(t, bound, 10 * bound);
    for (int i = 0; i < MATRIX_SIZES; i++, t->cases++) {
        int rows = matrix_sizes[i][0], cols = matrix_sizes[i][1], m = rows < cols ? rows : cols, n = rows * cols;
        floatX *x = test_xs(t, n, 3), *first = NULL;
        double *dx = doubles_of(t, x, n);
        test_shape(t, "newton_schulz (%d x %d)", rows, cols);
        for (int threads = 1; threads <= TEST_THREADS; threads++) {
            floatX *out = (floatX *)test_copy(t, x, n * (int64_t)sizeof(floatX)), *zeros = test_xs(t, n, 0);
            newton_schulz(&t->dev[threads], out, rows, cols);
            newton_schulz(&t->dev[threads], zeros, rows, cols);
            for (int j = 0; j < n; j++) wrong += to_float(zeros[j]) != 0;
            if (threads == 1) first = out;
            test_same(t, out, first, n * (int64_t)sizeof(floatX));
        }
        normalize_doubles(dx, n);
        for (int k = 0; k < 5; k++) {
            double *g = gram_of(t, dx, rows, cols), *square = gram_of(t, g, m, m);
            for (int j = 0; j < m * m; j++) g[j] = -4.7750 * g[j] + 2.0315 * square[j];
            double *product = symmetric_product_of(t, g, dx, rows, cols);
            for (int j = 0; j < n; j++) dx[j] = 3.4445 * dx[j] + product[j];
        }
        test_compare(t, first, 1, cols, dx, rows, cols);
    }
    CHECK("Newton-Schulz leaves a matrix of zeros", wrong == 0, "%.0f elements are not zero", wrong);
    test_report(t, "Newton-Schulz of square, wide and tall matrices is as defined");
}

static void test_muon_ops(KernelTest *t) {
    test_muon_momentum(t);
    test_muon_update(t);
    test_matrix_ops(t);
    test_newton_schulz(t);
}
