/* test_flat.h: ops over flat tensors: exp, AdamW, sums over ranks, norms and fingerprints follow their definitions,
 * wherever a tensor is cut. Part of test_llama3.cu. */

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
