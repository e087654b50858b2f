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

/* The loss of a row, whose target is not negative. The gradient takes the place of the logits. */
typedef float (*LossOfRow)(Case *c, floatX *logits, int32_t target);

static void loss_of_rows(Case *c, LossOfRow loss_of_row) {
    for (int64_t n = 0; n < c->size[0]; n++) {
        int64_t V = c->size[1];
        floatX *logits = X("logits") + n * V;
        int32_t target = I("targets")[n];
        if (target < 0) memset(logits, 0, (size_t)V * sizeof(floatX));
        if (z_loss_of(c).losses) F("z_losses")[n] = 0;
        F("losses")[n] = target < 0 ? 0 : loss_of_row(c, logits, target);
        c->scratch_used = 0; // the next row has the same scratch memory
    }
}

static float double_row(Case *c, floatX *logits, int32_t target) {
    int64_t V = c->size[1];
    double max = -INFINITY, sum = 0, factor = 1, at_target = to_float(logits[target]);
    for (int64_t i = 0; i < V; i++) max = fmax(max, to_float(logits[i]));
    for (int64_t i = 0; i < V; i++) sum += exp(to_float(logits[i]) - max);
    double log_z = log(sum) + max;
    if (z_loss_of(c).losses) {
        factor = 1 + 2 * (double)Z_WEIGHT * log_z;
        F("z_losses")[(logits - X("logits")) / V] = (float)((double)Z_WEIGHT * log_z * log_z);
    }
    for (int64_t i = 0; i < V; i++)
        logits[i] = from_float((float)(factor * exp(to_float(logits[i]) - max) / sum - (i == target)));
    return (float)(log_z - at_target);
}
static void loss_double(Case *c) { loss_of_rows(c, double_row); }

static float float_row(Case *c, floatX *logits, int32_t target) {
    int64_t V = c->size[1];
    float max = -INFINITY, at_target = to_float(logits[target]);
    double sum = 0;
    for (int64_t i = 0; i < V; i++) max = fmaxf(max, to_float(logits[i]));
    for (int64_t i = 0; i < V; i++) sum += (double)expf(to_float(logits[i]) - max);
    float inverse = (float)(1 / sum);
    for (int64_t i = 0; i < V; i++) logits[i] = from_float(expf(to_float(logits[i]) - max) * inverse - (i == target));
    return (float)log(sum) + (max - at_target);
}
static void loss_float(Case *c) { loss_of_rows(c, float_row); }

/* VL logits from i on; -infinity beyond the end of the row. */
static inline vfloat logits_at(floatX *logits, int64_t i, int64_t V) {
    LogitRow row = {logits, V, FLOATX == DTYPE_F32};
    return load_logits(row, i);
}
/* The largest of logits [begin, end), in all lanes. */
static vfloat largest(floatX *logits, int64_t begin, int64_t end) {
    vfloat max = vsplat(-INFINITY);
    for (int64_t i = begin; i < end; i += VL) max = vmax(max, logits_at(logits, i, end));
    return vsplat(vmax_lane(max));
}

static float vectors_row(Case *c, floatX *logits, int32_t target) {
    int64_t V = c->size[1];
    float at_target = to_float(logits[target]);
    vfloat max = largest(logits, 0, V), sums = vsplat(0);
    for (int64_t i = 0; i < V; i += VL) sums += vexp(logits_at(logits, i, V) - max);
    float sum = vsum(sums), inverse = 1 / sum;
    for (int64_t i = 0; i < V; i += VL) store_x(logits + i, vexp(logits_at(logits, i, V) - max) * inverse, V - i);
    logits[target] = from_float(exp_float(at_target - max[0]) * inverse - 1);
    return logf(sum) + (max[0] - at_target);
}
static void loss_vectors(Case *c) { loss_of_rows(c, vectors_row); }

/* Where a row's fp32 exponentials wait: in fp32 the row itself. */
static float *exponentials_row(Case *c, floatX *logits) {
    if (FLOATX == DTYPE_F32) return (float *)(void *)logits;
    return (float *)page_scratch(c, (size_t)c->size[1] * sizeof(float));
}

static float kept_row(Case *c, floatX *logits, int32_t target) {
    int64_t V = c->size[1];
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
    return logf(sum) + (max[0] - at_target);
}
static void loss_kept(Case *c) { loss_of_rows(c, kept_row); }

static float blocks_row(Case *c, floatX *logits, int32_t target) {
    int64_t V = c->size[1], blocks = blocks_of(V, LOSS_BLOCK);
    float *maxima = (float *)page_scratch(c, (size_t)blocks * sizeof(float)), *kept = exponentials_row(c, logits);
    float at_target = to_float(logits[target]), max = -INFINITY, sum = 0;
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
    return logf(sum) + (max - at_target);
}
static void loss_by_blocks(Case *c) { loss_of_rows(c, blocks_row); }

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
    {"1 libm, double", "The formula: as for the loss alone, with a factor for the row's probabilities.", loss_double},
    {"in use: threads", "The same op as without z-loss. The factor multiplies the inverse of the row's sum.",
     loss_in_use},
    {"in use: 4 slices",
     "What four ranks compute that share the vocabulary, and the copies it takes here: each has log Z from the three "
     "numbers per row that all ranks know.",
     loss_in_slices}};

PAGE({&op, op_versions}, {&z_loss, z_loss_versions})
