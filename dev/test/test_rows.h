/* test_rows.h: embedding, RMSNorm, residual_add, RoPE and SwiGLU against their definitions. Part of test_llama3.cu. */

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
