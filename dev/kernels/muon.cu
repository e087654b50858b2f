/* muon.cu: the elementwise ops of Muon (Jordan et al. 2024), in the order of PyTorch's torch.optim.Muon: momentum, the
 * matrix divided by its norm, the weighted sums of the Newton-Schulz iterations, and the update of the weights:
 *   m += (1 - mu) (g - m);  u = g + mu (m - g);  x = u / max(||u||, 1e-7);  x = a x + b y
 *   p = (1 - lr weight_decay) p - lr adjust x
 *
 * All of them are limited by memory bandwidth. The iterations' matmuls are those of linear.cu.
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. X(name), F(name): its data in floatX or float. D(name), R(name): the
                  // definition's inputs and results in double. c->slots: arithmetic instructions × lanes of an ideal
                  // version. From lib/ops/cpu/vectors.h: vfloat, VL, vsplat, vfma, …

static const float MOMENTUM = 0.95f, MUON_LR = 3e-4f, ADJUST = 5.5f, MUON_DECAY = 0.1f;
static const float MUON_SCALE = 0.37f; // clipping, and one over the number of tokens
static const float WEIGHT_A = 3.4445f, WEIGHT_B = -1.25f;

// ---------------------------------------------------------------------------
// momentum

static void momentum_case(Case *c) { // size: count
    int64_t count = c->size[0];
    writes(c, "update", IN_X, count, 1);
    updates(c, "m", IN_FLOAT, count, 1, 1);
    reads(c, "g", IN_FLOAT, count, 1, 1);
    c->flops = 7.0 * (double)count;
    c->slots = 5.0 * (double)count; // g scaled, two differences, two fused
    c->restore = 1;
}

static void momentum_definition(Case *c) {
    const double *m0 = D("m"), *g0 = D("g");
    double *m = R("m"), *update = R("update"), mu = (double)MOMENTUM;
    for (int64_t i = 0; i < c->size[0]; i++) {
        double g = g0[i] * (double)MUON_SCALE;
        m[i] = mu * m0[i] + (1 - mu) * g;
        update[i] = (1 - mu) * g + mu * m[i];
    }
}

static void momentum_in_use(Case *c) {
    muon_momentum(c->dev, X("update"), F("m"), F("g"), c->size[0], MOMENTUM, MUON_SCALE);
}

// ---------------------------------------------------------------------------
// normalization. Its row is the whole matrix: an element that is almost zero is not compared with itself

static void normalize_case(Case *c) { // size: count
    updates(c, "x", IN_X, 1, c->size[0], 1);
    c->tensors[0].touched *= 2; // it is read, then read and written
    c->flops = 3.0 * (double)c->size[0];
    c->slots = 2.0 * (double)c->size[0];
    c->restore = 1;
}

static void normalize_definition(Case *c) {
    const double *x = D("x");
    double *out = R("x"), sum = 0;
    for (int64_t i = 0; i < c->size[0]; i++) sum += x[i] * x[i];
    for (int64_t i = 0; i < c->size[0]; i++) out[i] = x[i] / fmax(sqrt(sum), 1e-7);
}

static void normalize_in_use(Case *c) { normalize_matrix(c->dev, X("x"), c->size[0]); }

// ---------------------------------------------------------------------------
// weighted sum

static void sum_case(Case *c) { // size: count
    updates(c, "x", IN_X, 1, c->size[0], 1);
    reads(c, "y", IN_FLOAT, 1, c->size[0], 1);
    c->flops = 3.0 * (double)c->size[0];
    c->slots = 2.0 * (double)c->size[0];
    c->restore = 1;
}

static void sum_definition(Case *c) {
    const double *x = D("x"), *y = D("y");
    double *out = R("x");
    for (int64_t i = 0; i < c->size[0]; i++) out[i] = (double)WEIGHT_A * x[i] + (double)WEIGHT_B * y[i];
}

static void sum_in_use(Case *c) { weighted_sum(c->dev, X("x"), WEIGHT_A, F("y"), WEIGHT_B, c->size[0]); }

// ---------------------------------------------------------------------------
// update

static void update_case(Case *c) { // size: count
    int64_t count = c->size[0];
    updates(c, "p", IN_FLOAT, count, 1, 1);
    writes(c, "copy", IN_X, count, 1);
    reads(c, "direction", IN_X, count, 1, 1);
    c->flops = 3.0 * (double)count;
    c->slots = 2.0 * (double)count;
    c->restore = 1;
}

static void update_definition(Case *c) {
    const double *p0 = D("p"), *direction = D("direction");
    double *p = R("p"), *copy = R("copy"), lr = (double)MUON_LR;
    for (int64_t i = 0; i < c->size[0]; i++) {
        p[i] = (1 - lr * (double)MUON_DECAY) * p0[i] - lr * (double)ADJUST * direction[i];
        copy[i] = p[i];
    }
}

static void update_in_use(Case *c) {
    muon_update(c->dev, F("p"), X("copy"), X("direction"), c->size[0], MUON_LR, ADJUST, MUON_DECAY);
}

#ifndef USE_CUDA
static void momentum_by_element(Case *c) {
    float *m = F("m");
    const float *g = F("g");
    floatX *update = X("update");
    for (int64_t i = 0; i < c->size[0]; i++) {
        float grad = g[i] * MUON_SCALE;
        m[i] += (1 - MOMENTUM) * (grad - m[i]);
        update[i] = from_float(grad + MOMENTUM * (m[i] - grad));
    }
}

static void normalize_in_double(Case *c) {
    floatX *x = X("x");
    double sum = 0;
    for (int64_t i = 0; i < c->size[0]; i++) sum += (double)to_float(x[i]) * (double)to_float(x[i]);
    float by = 1.0f / (float)fmax(sqrt(sum), 1e-7);
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(to_float(x[i]) * by);
}

static void sum_by_element(Case *c) {
    floatX *x = X("x");
    const float *y = F("y");
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(WEIGHT_A * to_float(x[i]) + WEIGHT_B * y[i]);
}

static void update_by_element(Case *c) {
    float *p = F("p"), keep = (float)(1.0 - (double)MUON_LR * (double)MUON_DECAY), rate = MUON_LR * ADJUST;
    floatX *copy = X("copy");
    const floatX *direction = X("direction");
    for (int64_t i = 0; i < c->size[0]; i++) {
        p[i] = p[i] * keep - rate * to_float(direction[i]);
        copy[i] = from_float(p[i]);
    }
}

static const char by_element[] = "The formula, an element at a time. The compiler vectorizes the loop.";
static const char threads[] = "Vectors divided over threads; the bits do not depend on their number.";
static const Version momentum_versions[] = {
    {"1 by element", by_element, momentum_by_element}, {"in use: threads", threads, momentum_in_use}, END_OF_VERSIONS};
static const Version normalize_versions[] = {
    {"1 double", "The squares are summed in double, each addition waits for the one before it.", normalize_in_double},
    {"in use: exact", "Blocks of 128 squares in fp32, added up exactly as in squared_norm.cu, by all threads.",
     normalize_in_use},
    END_OF_VERSIONS};
static const Version sum_versions[] = {
    {"1 by element", by_element, sum_by_element}, {"in use: threads", threads, sum_in_use}, END_OF_VERSIONS};
static const Version update_versions[] = {
    {"1 by element", by_element, update_by_element}, {"in use: threads", threads, update_in_use}, END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "muon.cuh" // defines: momentum_versions, normalize_versions, sum_versions, update_versions
#endif

#define MUON_SIZES                                                                                                     \
    {                                                                                                                  \
        {"odd", {1003}}, FOR_CPU({"bench-125m matrix", {1572864}}, {"1B matrix", {16777216}})                          \
                             FOR_GPU({"even", {12800}}, {"8B matrix", {58720256}})                                     \
    }
static const Op momentum_op = {"muon_momentum",     momentum_case,     NULL,
                               momentum_definition, momentum_versions, MUON_SIZES};
static const Op normalize_op = {"normalize_matrix",   normalize_case,     NULL,
                                normalize_definition, normalize_versions, MUON_SIZES};
static const Op sum_op = {"weighted_sum", sum_case, NULL, sum_definition, sum_versions, MUON_SIZES};
static const Op update_op = {"muon_update", update_case, NULL, update_definition, update_versions, MUON_SIZES};

PAGE(&momentum_op, &normalize_op, &sum_op, &update_op)
