/* muon.h: tensors, definition and sizes of Muon's ops, for muon.c, muon.cu and mine/. */
#ifndef PAGE_MUON_H
#define PAGE_MUON_H
#include "page.h"

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
    IMPLEMENTATION(muon_momentum)(c->on, X("update"), F("m"), F("g"), c->size[0], MOMENTUM, MUON_SCALE);
}

// ---------------------------------------------------------------------------
// normalization. Its row is the whole matrix: an element that is almost zero is not compared with itself

static void normalize_case(Case *c) { // size: count
    updates(c, "x", IN_X, 1, c->size[0], 1);
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

static void normalize_in_use(Case *c) {
    void *workspace = page_scratch(c, IMPLEMENTATION(normalize_matrix_scratch)());
    IMPLEMENTATION(normalize_matrix)(c->on, X("x"), c->size[0], workspace);
}

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

static void sum_in_use(Case *c) { IMPLEMENTATION(weighted_sum)(c->on, X("x"), WEIGHT_A, F("y"), WEIGHT_B, c->size[0]); }

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
    IMPLEMENTATION(muon_update)(c->on, F("p"), X("copy"), X("direction"), c->size[0], MUON_LR, ADJUST, MUON_DECAY);
}

#define MUON_SIZES                                                                                                     \
    {                                                                                                                  \
        {"odd", {1003}}, FOR_CPU({"bench-125m matrix", {1572864}}, {"1B matrix", {16777216}})                          \
                             FOR_GPU({"even", {12800}}, {"8B matrix", {58720256}})                                     \
    }

static const Op momentum_op = {"muon_momentum", momentum_case, NULL, momentum_definition, momentum_in_use, MUON_SIZES};
static const Op normalize_op = {"normalize_matrix",   normalize_case,   NULL,
                                normalize_definition, normalize_in_use, MUON_SIZES};
static const Op sum_op = {"weighted_sum", sum_case, NULL, sum_definition, sum_in_use, MUON_SIZES};
static const Op update_op = {"muon_update", update_case, NULL, update_definition, update_in_use, MUON_SIZES};

#endif
