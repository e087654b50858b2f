/* test_cross_entropy.h: the loss, the z-loss and their gradient against their definition, over all logits and over
 * slices of the vocabulary, for logits in fp32 and in floatX. Part of test_llama3.cu. */

/* Rounds logits to their dtype, so that their definition has the same ones. */
static void round_logits(float *logits, int64_t count, Dtype dtype) {
    for (int64_t i = 0; i < count && dtype == DTYPE_BF16; i++) logits[i] = bf16_to_float(float_to_bf16(logits[i]));
}

/* A copy of columns [first, first + width) of logits (N, V), as an op takes them. Their padding is random. */
static Logits test_logits(KernelTest *t, const float *logits, int N, int V, int first, int width, Dtype dtype) {
    Logits copy = logits_fp32(NULL, width);
    if (dtype != DTYPE_F32) copy = logits_x(NULL, width);
    if (dtype == DTYPE_F32) copy.data = test_floats(t, N * copy.stride, 1);
    else copy.data = test_xs(t, N * copy.stride, 1);
    for (int n = 0; n < N; n++)
        for (int v = 0; v < width; v++) {
            float logit = logits[n * V + first + v];
            if (dtype == DTYPE_F32) ((float *)copy.data)[n * copy.stride + v] = logit;
            else ((floatX *)copy.data)[n * copy.stride + v] = from_float(logit);
        }
    return copy;
}
static int64_t logits_bytes(Logits logits, int N) { return N * logits.stride * (int64_t)dtype_size(logits.dtype); }

/* How many bytes of padding differ from those of the same logits before. */
static int changed_padding(Logits logits, const void *before, int N, int V) {
    int64_t size = (int64_t)dtype_size(logits.dtype), changed = 0;
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = (n * logits.stride + V) * size; i < (n + 1) * logits.stride * size; i++)
            changed += ((const char *)logits.data)[i] != ((const char *)before)[i];
    return (int)changed;
}

/* Compares the gradient (N, V) that the logits have become with its definition. */
static void compare_gradient(KernelTest *t, Logits gradient, const double *expected, int N, int V) {
    test_compare(t, gradient.data, gradient.dtype == FLOATX, gradient.stride, expected, N, V);
}

/* The gradient of the logits, (N, V): probabilities, minus 1 at the target, and with the z-loss z_weight · log²Z also
 * 2 z_weight log Z times the probabilities. `losses`: (2, N) losses and z-losses. Ignored rows have 0. */
static double *cross_entropy_reference(KernelTest *t, const float *logits, const int32_t *targets, double z_weight,
                                       int N, int V, double *losses) {
    double *gradient = test_doubles(t, N * V);
    memset(losses, 0, sizeof *losses * 2 * (size_t)N);
    for (int n = 0; n < N; n++) {
        const float *row = logits + n * V;
        double max = -1e300, sum = 0;
        if (targets[n] < 0) continue;
        for (int v = 0; v < V; v++) max = fmax(max, row[v]);
        for (int v = 0; v < V; v++) sum += exp(row[v] - max);
        double log_z = log(sum) + max;
        for (int v = 0; v < V; v++) {
            double probability = exp(row[v] - max) / sum;
            gradient[n * V + v] = probability - (v == targets[n]) + 2 * z_weight * log_z * probability;
        }
        losses[n] = log_z - row[targets[n]];
        losses[N + n] = z_weight * log_z * log_z;
    }
    return gradient;
}

/* Returns the largest relative error of the losses, (N). */
static double compare_losses(KernelTest *t, const float *losses, const double *expected, int N, double bound) {
    double worst = 0;
    for (int n = 0; n < N; n++) {
        double e = fabs(losses[n] - expected[n]) / fmax(1, fabs(expected[n]));
        if (!(e <= bound)) test_bad(t, "the loss of row %d is %.9g, expected %.9g", n, losses[n], expected[n]);
        worst = worst_of(worst, e);
    }
    return worst;
}

static const float z_weights[] = {0, 0.02f}; // 0: no z-loss

/* The bounds of gradients with the z-loss z_weights[z]. In bf16, a few elements may be most of a gradient with z-loss,
 * and each is off by up to half of bf16's last place, 0.0039. */
static void loss_bounds(KernelTest *t, int z, Dtype dtype) {
    if (dtype == DTYPE_F32) test_bounds(t, 2e-6, 1e-5);
    else test_bounds(t, z ? 4e-3 : ROUNDING, ROUNDING_ROW);
    t->row_floor = 0.1; // a probability minus 1
}

/* Reports the gradients of logits in this dtype with the z-loss z_weights[z]. */
static void loss_report(KernelTest *t, int z, Dtype dtype, const char *name) {
    char full[160];
    snprintf(full, sizeof full, "%s, %s logits%s", name, dtype_names[dtype], z ? ", with z-loss" : "");
    test_report(t, full);
    t->row_floor = 0;
}

/* The z-loss of weight z_weights[z], with its losses (N) after the others; these are 0 if there is none. */
static ZLoss z_loss_after(float *losses /* (2, N) */, int N, int z) {
    ZLoss z_loss = {z_weights[z], z ? losses + N : NULL};
    if (!z) memset(losses + N, 0, sizeof *losses * (size_t)N);
    return z_loss;
}

typedef struct {
    double loss, z_loss; // the largest errors
    int changed;         // gradients that were written though none was wanted, and bytes of padding
    int same;            // losses that were the same with z-loss and gradient as without
} LossErrors;

typedef struct {
    int N, V;
    double scale; // of the logits
    int z;        // of z_weights
    Dtype dtype;  // of the logits
} LossCase;

static void cross_entropy_case(KernelTest *t, LossCase c, LossErrors *e) {
    const int N = c.N, V = c.V;
    test_shape(t, "cross_entropy (N %d, V %d, %s logits to %g, z-loss %g)", N, V, dtype_names[c.dtype], c.scale,
               z_weights[c.z]);
    float *logits = test_floats(t, N * V, c.scale), *first_losses = NULL;
    int32_t *targets = (int32_t *)test_alloc(t, N * 4);
    for (int n = 0; n < N; n++) targets[n] = n % 3 == 2 ? -1 - n : (int32_t)(fabs(test_random(t)) * V);
    for (int v = 0; v < 512 && V > 512; v++) { // row 0: probability 0 for a whole LOSS_BLOCK of the CPU's op
        logits[v] = -INFINITY;
        targets[0] = V - 1;
    }
    round_logits(logits, N * V, c.dtype);
    Logits first = logits_fp32(NULL, V), before = test_logits(t, logits, N, V, 0, V, c.dtype);
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        float *losses = test_floats(t, 2 * N, 1), *kept = test_floats(t, N, 1);
        Logits d = before;
        d.data = test_copy(t, before.data, logits_bytes(before, N));
        cross_entropy(&t->dev[threads], kept, d, targets, no_z_loss, N, V, 0);
        e->changed += memcmp(d.data, before.data, (size_t)logits_bytes(d, N)) != 0;
        cross_entropy(&t->dev[threads], losses, d, targets, z_loss_after(losses, N, c.z), N, V, 1);
        e->same += memcmp(losses, kept, (size_t)N * 4) == 0;
        e->changed += changed_padding(d, before.data, N, V);
        if (!first.data) {
            first = d;
            first_losses = losses;
        }
        test_same(t, d.data, first.data, logits_bytes(d, N));
        test_same(t, losses, first_losses, 2 * N * 4);
    }
    double *losses = test_doubles(t, 2 * N),
           *ref = cross_entropy_reference(t, logits, targets, z_weights[c.z], N, V, losses);
    e->loss = worst_of(e->loss, compare_losses(t, first_losses, losses, N, 2e-6));
    e->z_loss = worst_of(e->z_loss, compare_losses(t, first_losses + N, losses + N, N, 4e-6));
    if (V > 1) compare_gradient(t, first, ref, N, V);
    test_free_all(t);
    t->cases++;
}

static void test_cross_entropy(KernelTest *t) {
    const int sizes[][2] = {{1, 1},    {3, 5},    {65, 17},   {20, 257},  {5, 1300},
                            {7, 4096}, {2, 5001}, {2, 70000}, {1, 130001}};
    const int cases = 3 * (int)(sizeof sizes / sizeof *sizes);
    const double scales[] = {1, 30, 5000}; // to logits of +-1e4
    LossErrors e = ZERO;
    int runs = 0;
    for (int z = 0; z < 4; z++) { // without and with z-loss, fp32 and floatX
        const Dtype dtype = z < 2 ? DTYPE_F32 : DTYPE_BF16;
        if (dtype > FLOATX) break;
        loss_bounds(t, z % 2, dtype);
        for (int i = 0; i < cases; i++, runs += TEST_THREADS) {
            const LossCase c = {sizes[i / 3][0], sizes[i / 3][1], scales[i % 3], z % 2, dtype};
            cross_entropy_case(t, c, &e);
        }
        loss_report(t, z % 2, dtype, "cross_entropy gradient follows its definition");
    }
    CHECK("cross_entropy without gradient leaves the logits, with it their padding, and with z-loss or without gives "
          "the same losses",
          !e.changed && e.same == runs, "%d changed, %d of %d equal", e.changed, e.same, runs);
    CHECK("z-losses follow their definition, logits to +-1e4, 0 where the target is masked", e.z_loss <= 4e-6,
          "error %.2g <= 4e-6%s", e.z_loss, test_where(t));
    CHECK("cross_entropy losses follow their definition, logits to +-1e4", e.loss <= 2e-6, "error %.2g <= 2e-6%s",
          e.loss, test_where(t));
}

enum { MOST_SLICES = 8 };
typedef struct { // logits of N rows, cut into slices of the vocabulary
    LossCase of;
    int ranks, cut[MOST_SLICES + 1];
    float *logits;    // (N, V)
    int32_t *targets; // (N)
} SliceCase;

static SliceCase slice_case(KernelTest *t, LossCase of, int ranks) {
    SliceCase c = {of, ranks, {0}, NULL, NULL};
    const int N = of.N, V = of.V;
    test_shape(t, "cross_entropy in slices (N %d, V %d, ranks %d, %s logits to %g, z-loss %g)", N, V, ranks,
               dtype_names[of.dtype], of.scale, z_weights[of.z]);
    for (int r = 0; r <= ranks; r++)
        c.cut[r] = (int)max_i64(r, (int64_t)r * r * V / (ranks * ranks)); // no two of one width, if there is room
    c.logits = test_floats(t, N * V, of.scale);
    round_logits(c.logits, N * V, of.dtype);
    c.targets = (int32_t *)test_alloc(t, N * 4);
    for (int n = 0; n < N; n++) {
        c.targets[n] = c.cut[n / 2 % ranks];
        if (n % 2) c.targets[n] = (int32_t)(fabs(test_random(t)) * V);
        if (n % 4 == 3) c.targets[n] = -1 - n;
    }
    for (int v = 0; v < c.cut[1] && ranks > 1; v++) {
        c.logits[v] = -INFINITY;
        c.targets[0] = V - 1; // row 0: a whole slice that cannot be
    }
    return c;
}

/* Each slice on its own, as the rank that holds it has it. Returns the losses and z-losses (2, N) of one of them; how
 * many slices changed where no gradient is wanted, and bytes of padding, are added to `changed`. */
static float *slice_losses(KernelTest *t, Device *dev, const SliceCase *c, const double *ref, int *changed) {
    const int N = c->of.N, V = c->of.V;
    float *parts = test_floats(t, c->ranks * N * 3, 1), *first = NULL;
    Logits slices[MOST_SLICES];
    for (int r = 0; r < c->ranks; r++) {
        int width = c->cut[r + 1] - c->cut[r];
        slices[r] = test_logits(t, c->logits, N, V, c->cut[r], width, c->of.dtype);
        cross_entropy_part(dev, parts + r * N * 3, slices[r], c->targets, c->cut[r], N, width);
    }
    for (int r = 0; r < c->ranks; r++) {
        int width = c->cut[r + 1] - c->cut[r];
        int64_t bytes = logits_bytes(slices[r], N);
        float *kept = test_floats(t, N, 1), *losses = test_floats(t, 2 * N, 1);
        void *before = test_copy(t, slices[r].data, bytes);
        double *slice_ref = test_doubles(t, N * width);
        ZLoss z = z_loss_after(losses, N, c->of.z);
        cross_entropy_join(dev, kept, slices[r], parts, c->targets, no_z_loss, c->ranks, c->cut[r], N, width, 0);
        *changed += memcmp(slices[r].data, before, (size_t)bytes) != 0;
        cross_entropy_join(dev, losses, slices[r], parts, c->targets, z, c->ranks, c->cut[r], N, width, 1);
        *changed += changed_padding(slices[r], before, N, width);
        if (!first) first = losses;
        test_same(t, kept, first, N * 4);
        test_same(t, losses, first, 2 * N * 4);
        for (int n = 0; n < N; n++) memcpy(slice_ref + n * width, ref + n * V + c->cut[r], (size_t)width * 8);
        if (V > 1) compare_gradient(t, slices[r], slice_ref, N, width);
    }
    return first;
}

static void cross_entropy_slices_case(KernelTest *t, LossCase of, int ranks, LossErrors *e) {
    SliceCase c = slice_case(t, of, ranks);
    const int N = of.N, V = of.V;
    float *whole = test_floats(t, 2 * N, 1), *first = NULL;
    cross_entropy(&t->dev[1], whole, test_logits(t, c.logits, N, V, 0, V, of.dtype), c.targets,
                  z_loss_after(whole, N, of.z), N, V, 0);
    double *expected = test_doubles(t, 2 * N),
           *ref = cross_entropy_reference(t, c.logits, c.targets, z_weights[of.z], N, V, expected);
    for (int n = 0; n < 2 * N; n++) expected[n] = whole[n];
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        float *losses = slice_losses(t, &t->dev[threads], &c, ref, &e->changed);
        if (!first) first = losses;
        test_same(t, losses, first, 2 * N * 4);
    }
    e->loss = worst_of(e->loss, compare_losses(t, first, expected, N, 1e-6));
    e->z_loss = worst_of(e->z_loss, compare_losses(t, first + N, expected + N, N, 2e-6));
    test_free_all(t);
    t->cases++;
}

static void test_cross_entropy_slices(KernelTest *t) {
    const int sizes[][3] = {{2, 1, 1}, {3, 5, 2},    {20, 17, 5},  {20, 257, 3},
                            {9, 8, 8}, {5, 1300, 4}, {3, 5001, 8}, {2, 70000, 2}}; // N, V, ranks
    const double scales[] = {1, 30, 5000};                                         // to logits of +-1e4
    LossErrors e = ZERO;
    for (int z = 0; z < 4; z++) { // without and with z-loss, fp32 and floatX
        const Dtype dtype = z < 2 ? DTYPE_F32 : DTYPE_BF16;
        if (dtype > FLOATX) break;
        loss_bounds(t, z % 2, dtype);
        for (int i = 0; i < 24; i++) {
            if (CUDA_BUILD && is_short && (i + z) % 4) continue;
            const LossCase c = {sizes[i / 3][0], sizes[i / 3][1], scales[i % 3], z % 2, dtype};
            cross_entropy_slices_case(t, c, sizes[i / 3][2], &e);
        }
        loss_report(t, z % 2, dtype, "cross_entropy in slices: the same bits on every rank, the gradient of the whole");
    }
    CHECK("z-losses in slices are those of the whole, 0 where the target is masked", e.z_loss <= 2e-6,
          "error %.2g <= 2e-6%s", e.z_loss, test_where(t));
    CHECK("cross_entropy in slices gives the losses of the whole, and leaves padding, and the logits where no gradient "
          "is wanted",
          e.loss <= 1e-6 && !e.changed, "error %.2g <= 1e-6, %d changed%s", e.loss, e.changed, test_where(t));
}
