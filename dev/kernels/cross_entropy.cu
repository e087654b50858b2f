/* cross_entropy.cu: the loss of a row of logits, -log softmax(logits)[target], and its gradient,
 * softmax(logits) - onehot(target), which overwrites the logits.
 *
 * A row has tens of thousands of logits, each of which takes an exponential. Logits and gradient are floatX, as in
 * training; exponentials, their sum and the loss are fp32. A negative target is ignored: its loss and gradient are
 * zero. The largest logit is subtracted first, so that no exponential overflows; this does not change the softmax.
 *
 * The z-loss, weight · log²Z with Z the sum of exp(logit), keeps the softmax's denominator near 1 (Chowdhery et al.
 * 2022, section 5). Its gradient is 2 weight log Z · softmax(logits): the row's probabilities get one more factor, and
 * its cost is that of a few numbers per row.
 *
 * With tensor parallelism each rank has a slice of the vocabulary. It computes three numbers per row (largest logit,
 * sum of exponentials, target's logit), all ranks exchange them, and each combines them (Shoeybi et al. 2019).
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. F(name), I(name): its data in float or int32_t. D(name), R(name): the
                  // definition's inputs and results in double. c->slots: arithmetic instructions × lanes of an ideal
                  // version. From lib/ops/cpu/vectors.h: vfloat, VL, vsplat, vexp, …

static const float Z_WEIGHT = 1.0f / 128; // of the z-loss; a bf16 number

static void loss_case(Case *c) { // size: N, V
    int64_t N = c->size[0], V = c->size[1];
    updates(c, "logits", IN_X, N, V, 4);
    reads(c, "targets", IN_INT, N, 1, (double)V);
    writes(c, "losses", IN_FLOAT, N, 1);
    c->restore = 1; // the gradient has overwritten the logits
    c->flops = 4.0 * (double)(N * V);
    c->slots = (EXP_SLOTS + 3) * (double)(N * V); // minus the largest logit; the sum; times the sum's inverse
}

static void z_loss_case(Case *c) {
    loss_case(c);
    writes(c, "z_losses", IN_FLOAT, c->size[0], 1);
}

/* The z-loss of the case: none in those of cross-entropy alone. */
static ZLoss z_loss_of(Case *c) {
    ZLoss z = {Z_WEIGHT, NULL};
    if (page_find(c, "z_losses")) z.losses = F("z_losses");
    return z;
}

static int ignored(int64_t n) { return n % 8 == 3; }
static void loss_prepare(Case *c) {
    int64_t N = c->size[0], V = c->size[1], kept = 0;
    for (int64_t n = 0; n < N; n++) {
        if (ignored(n)) I("targets")[n] = (int32_t)(-1 - n);
        else kept++;
    }
    I("targets")[0] = 0;
    I("targets")[N - 1] = (int32_t)(V - 1);
    c->slots *= (double)kept / (double)N;
}

static void loss_definition(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        const double *logits = D("logits") + n * V;
        double *gradient = R("logits") + n * V, max = -INFINITY, sum = 0;
        int64_t target = (int64_t)D("targets")[n];
        for (int64_t i = 0; i < V; i++) max = fmax(max, logits[i]);
        for (int64_t i = 0; i < V; i++) sum += exp(logits[i] - max);
        double log_z = max + log(sum), factor = 1; // of the probabilities
        if (page_find(c, "z_losses")) {
            factor += 2 * (double)Z_WEIGHT * log_z;
            R("z_losses")[n] = target < 0 ? 0 : (double)Z_WEIGHT * log_z * log_z;
        }
        for (int64_t i = 0; i < V; i++)
            gradient[i] = target < 0 ? 0 : exp(logits[i] - max) / sum * factor - (i == target);
        R("losses")[n] = target < 0 ? 0 : max - logits[target] + log(sum);
    }
}

static Logits logits_of_case(Case *c) {
    Logits logits = {X("logits"), c->size[1], FLOATX};
    return logits;
}
static void loss_in_use(Case *c) {
    cross_entropy(c->dev, F("losses"), logits_of_case(c), I("targets"), z_loss_of(c), (int)c->size[0], (int)c->size[1],
                  1);
}
static void loss_in_slices(Case *c) { // all by one rank: their logits are copied apart, and the gradients together
    int64_t N = c->size[0], V = c->size[1], XS = (int64_t)sizeof(floatX), slices = min_i64(4, V);
    size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
    float *parts = (float *)scratch(c->dev, "parts", (size_t)(slices * N * 3) * sizeof(float));
    Logits apart[4];
    for (int r = 0; r < slices; r++) {
        int64_t first = V * r / slices, width = V * (r + 1) / slices - first, row = logits_stride(width) * XS;
        apart[r] = logits_x((floatX *)scratch(c->dev, "slice", (size_t)(N * row)), width);
        device_copy_rows(c->dev, apart[r].data, (size_t)row, X("logits") + first, (size_t)(V * XS),
                         (size_t)(width * XS), (int)N);
        cross_entropy_part(c->dev, parts + r * N * 3, apart[r], I("targets"), (int)first, (int)N, (int)width);
    }
    for (int r = 0; r < slices; r++) {
        int64_t first = V * r / slices, width = V * (r + 1) / slices - first;
        cross_entropy_join(c->dev, F("losses"), apart[r], parts, I("targets"), z_loss_of(c), (int)slices, (int)first,
                           (int)N, (int)width, 1);
        device_copy_rows(c->dev, X("logits") + first, (size_t)(V * XS), apart[r].data, (size_t)(apart[r].stride * XS),
                         (size_t)(width * XS), (int)N);
    }
    arena_release(c->dev, MEM_WORKSPACE, mark);
}

#ifndef USE_CUDA
/* Row n, or NULL if its target is negative: then its gradient is zero already. */
static floatX *row_of(Case *c, int64_t n) {
    floatX *logits = X("logits") + n * c->size[1];
    if (I("targets")[n] >= 0) return logits;
    memset(logits, 0, (size_t)c->size[1] * sizeof(floatX));
    F("losses")[n] = 0;
    return NULL;
}
static double logit(const floatX *logits, int64_t i) { return to_float(logits[i]); }

static void loss_double(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n); // the gradient takes their place
        if (!logits) continue;
        int32_t target = I("targets")[n];
        double max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < V; i++) max = fmax(max, logit(logits, i));
        for (int64_t i = 0; i < V; i++) sum += exp(logit(logits, i) - max);
        F("losses")[n] = (float)(log(sum) + max - logit(logits, target));
        for (int64_t i = 0; i < V; i++)
            logits[i] = from_float((float)(exp(logit(logits, i) - max) / sum - (i == target)));
    }
}

static void z_loss_double(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        F("z_losses")[n] = 0;
        if (!logits) continue;
        int32_t target = I("targets")[n];
        double max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < V; i++) max = fmax(max, logit(logits, i));
        for (int64_t i = 0; i < V; i++) sum += exp(logit(logits, i) - max);
        double log_z = log(sum) + max, factor = 1 + 2 * (double)Z_WEIGHT * log_z;
        F("losses")[n] = (float)(log_z - logit(logits, target));
        F("z_losses")[n] = (float)((double)Z_WEIGHT * log_z * log_z);
        for (int64_t i = 0; i < V; i++)
            logits[i] = from_float((float)(factor * exp(logit(logits, i) - max) / sum - (i == target)));
    }
}

static void loss_float(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        if (!logits) continue;
        int32_t target = I("targets")[n];
        float max = -INFINITY;
        double sum = 0;
        for (int64_t i = 0; i < V; i++) max = fmaxf(max, to_float(logits[i]));
        for (int64_t i = 0; i < V; i++) sum += (double)expf(to_float(logits[i]) - max);
        float inverse = (float)(1 / sum);
        F("losses")[n] = (float)log(sum) + (max - to_float(logits[target]));
        for (int64_t i = 0; i < V; i++)
            logits[i] = from_float(expf(to_float(logits[i]) - max) * inverse - (i == target));
    }
}

/* VL logits from i on; -infinity beyond the end of the row. */
static inline vfloat logits_at(const floatX *logits, int64_t i, int64_t V) {
#ifdef PRECISION_BF16
    return load_fill_bf16(logits + i, V - i, -INFINITY);
#else
    return load_fill(logits + i, V - i, -INFINITY);
#endif
}
/* The largest of logits [begin, end), in all lanes. */
static vfloat largest(const floatX *logits, int64_t begin, int64_t end) {
    vfloat max = vsplat(-INFINITY);
    for (int64_t i = begin; i < end; i += VL) max = vmax(max, logits_at(logits, i, end));
    return vsplat(vmax_lane(max));
}

static void loss_vectors(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        if (!logits) continue;
        int32_t target = I("targets")[n];
        float at_target = to_float(logits[target]);
        vfloat max = largest(logits, 0, V), sums = vsplat(0);
        for (int64_t i = 0; i < V; i += VL) sums += vexp(logits_at(logits, i, V) - max);
        float sum = vsum(sums), inverse = 1 / sum;
        for (int64_t i = 0; i < V; i += VL) store_x(logits + i, vexp(logits_at(logits, i, V) - max) * inverse, V - i);
        logits[target] = from_float(exp_float(at_target - max[0]) * inverse - 1);
        F("losses")[n] = logf(sum) + (max[0] - at_target);
    }
}

/* Where a row's fp32 exponentials wait: in fp32 the row itself. */
static float *exponentials_row(Case *c, floatX *logits) {
#ifdef PRECISION_BF16
    (void)logits;
    return (float *)scratch(c->dev, "exponentials", (size_t)c->size[1] * sizeof(float));
#else
    (void)c;
    return logits;
#endif
}

static void loss_kept(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        if (!logits) continue;
        size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
        int32_t target = I("targets")[n];
        float at_target = to_float(logits[target]), *kept = exponentials_row(c, logits);
        vfloat max = largest(logits, 0, V), sums = vsplat(0);
        for (int64_t i = 0; i < V; i += VL) {
            vfloat e = vexp(logits_at(logits, i, V) - max);
            store_float(kept + i, e, V - i);
            sums += e;
        }
        float sum = vsum(sums), inverse = 1 / sum, gradient_at_target = kept[target] * inverse - 1;
        for (int64_t i = 0; i < V; i += VL) store_x(logits + i, load_float(kept + i, V - i) * inverse, V - i);
        logits[target] = from_float(gradient_at_target);
        F("losses")[n] = logf(sum) + (max[0] - at_target);
        arena_release(c->dev, MEM_WORKSPACE, mark);
    }
}

static void loss_by_blocks(Case *c) {
    int64_t N = c->size[0], V = c->size[1], blocks = blocks_of(V, LOSS_BLOCK);
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        if (!logits) continue;
        size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
        float *maxima = (float *)scratch(c->dev, "maxima", (size_t)blocks * sizeof(float));
        int32_t target = I("targets")[n];
        float at_target = to_float(logits[target]), *kept = exponentials_row(c, logits), max = -INFINITY, sum = 0;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t begin = block * LOSS_BLOCK, end = min_i64(V, begin + LOSS_BLOCK);
            vfloat own = largest(logits, begin, end), sums = vsplat(0);
            for (int64_t i = begin; i < end; i += VL) {
                vfloat e = vexp(logits_at(logits, i, end) - own);
                store_float(kept + i, e, end - i);
                sums += e;
            }
            float larger = fmaxf(max, own[0]);
            sum = sum * exp_float(max - larger) + vsum(sums) * exp_float(own[0] - larger);
            max = larger;
            maxima[block] = own[0];
        }
        float gradient_at_target = exp_float(at_target - max) / sum - 1;
        for (int64_t block = 0; block < blocks; block++) {
            float factor = exp_float(maxima[block] - max) / sum;
            for (int64_t i = block * LOSS_BLOCK; i < min_i64(V, (block + 1) * LOSS_BLOCK); i += VL)
                store_x(logits + i, load_float(kept + i, V - i) * factor, V - i);
        }
        logits[target] = from_float(gradient_at_target);
        F("losses")[n] = logf(sum) + (max - at_target);
        arena_release(c->dev, MEM_WORKSPACE, mark);
    }
}

static const Version op_versions[] = {
    {"1 libm, double", "The formula: largest logit, sum, gradient, with two calls of exp() per logit.", loss_double},
    {"2 libm, float",
     "expf() instead. Only the sum stays in double: a float runs out of digits after tens of thousands of additions.",
     loss_float},
    {"3 vexp",
     "A vector of exponentials at a time. The target's gradient is corrected afterwards, so that no vector has to "
     "check whether it contains the target.",
     loss_vectors},
    {"4 exponentials kept",
     "Each exponential is computed once and stored in fp32 until the sum is known: in its logit's place or, in bf16, "
     "in a row of its own. A store costs less than an exponential.",
     loss_kept},
    {"5 blocks",
     "A block's largest logit, exponentials and sum while it is in the cache: the row comes from memory once, "
     "prefetched while the previous block is computed. Each block is scaled to the row's largest logit together with "
     "the gradient.",
     loss_by_blocks},
    {"in use: threads",
     "As 5, with rows divided over threads, and the blocks' factors and their weighted sum by vectors once all maxima "
     "are known. In bf16 the exponentials are computed a second time: a row of floats for each of many threads would "
     "take much of the memory that bf16 logits save.",
     loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here. A slice's logits are read a "
     "second time for the gradient, and its exponentials recomputed.",
     loss_in_slices},
    END_OF_VERSIONS};

static const Version z_loss_versions[] = {
    {"1 libm, double", "The formula: as for the loss alone, with a factor for the row's probabilities.", z_loss_double},
    {"in use: threads", "The same op as without z-loss. The factor multiplies the inverse of the row's sum.",
     loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here: each has log Z from the three "
     "numbers per row that all ranks know.",
     loss_in_slices},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "cross_entropy.cuh" // defines: op_versions, z_loss_versions
#endif

static const Op op = {
    "cross_entropy",
    loss_case,
    loss_prepare,
    loss_definition,
    op_versions,
    {{"odd", {37, 1003}},
     FOR_CPU({"bench-8m chunk", {1024, 4096}}, {"bench-125m chunk", {1024, 32000}}, {"1B chunk", {256, 128256}})
         FOR_GPU({"even", {24, 2048}}, {"chunk, small vocabulary", {2048, 32000}}, {"1B chunk", {2048, 128256}})}};

static const Op z_loss = {"z_loss",
                          z_loss_case,
                          loss_prepare,
                          loss_definition,
                          z_loss_versions,
                          {{"odd", {37, 1003}},
                           FOR_CPU({"bench-125m chunk", {1024, 32000}}, {"1B chunk", {256, 128256}})
                               FOR_GPU({"even", {24, 2048}}, {"1B chunk", {2048, 128256}})}};

PAGE(&op, &z_loss)
