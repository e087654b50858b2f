/* test_matmul.h: linear layers, forward and backward, by the matmul library and in plain C, and the ops of adapters and
 * of int8 weights, against their definitions. Part of test_llama3.cu. */

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
