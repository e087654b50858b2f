/* test_cross_entropy.h: the loss and its gradient against their definition, over all logits and over slices of the
 * vocabulary. Part of test_llama3.cu. */

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
