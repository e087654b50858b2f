/* cross_entropy.c: the loss of a row of logits, -log softmax(logits)[target], and its gradient,
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
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp cross_entropy.c -o cross_entropy -lm
 * with cross_entropy.h page.h page_cpu.h lib/device/kernel.h lib/ops/cpu/cross_entropy.h lib/ops/cpu/vectors.h
 * lib/ops/logits.h */
#include "../../lib/ops/cpu/cross_entropy.h"
#include "cross_entropy.h"

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
    return load_logits_bf16(logits + i, V - i);
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
    return (float *)page_scratch(c, (size_t)c->size[1] * sizeof(float));
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
        int mark = c->scratch_used;
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
        c->scratch_used = mark;
    }
}

static void loss_by_blocks(Case *c) {
    int64_t N = c->size[0], V = c->size[1], blocks = blocks_of(V, LOSS_BLOCK);
    for (int64_t n = 0; n < N; n++) {
        floatX *logits = row_of(c, n);
        if (!logits) continue;
        int mark = c->scratch_used;
        float *maxima = (float *)page_scratch(c, (size_t)blocks * sizeof(float));
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
        c->scratch_used = mark;
    }
}

static const Version op_versions[PAGE_VERSIONS] = {
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
     loss_in_slices}};

static const Version z_loss_versions[PAGE_VERSIONS] = {
    {"1 libm, double", "The formula: as for the loss alone, with a factor for the row's probabilities.", z_loss_double},
    {"in use: threads", "The same op as without z-loss. The factor multiplies the inverse of the row's sum.",
     loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here: each has log Z from the three "
     "numbers per row that all ranks know.",
     loss_in_slices}};

PAGE({&op, op_versions}, {&z_loss, z_loss_versions})
