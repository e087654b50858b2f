/* adamw.h: tensors, definition and sizes of AdamW, for adamw.c, adamw.cu and mine/. */
#ifndef PAGE_ADAMW_H
#define PAGE_ADAMW_H
#include "page.h"

static const float LR = 3e-4f, BETA1 = 0.9f, BETA2 = 0.95f, EPS = 1e-8f, WEIGHT_DECAY = 0.1f;
static const float GRAD_SCALE = 0.37f; // clipping, and one over the number of tokens

static void adamw_case(Case *c) { // size: count, step
    int64_t count = c->size[0];   // one element per row: each must meet the bound
    updates(c, "p", IN_FLOAT, count, 1, 1);
    updates(c, "m", IN_FLOAT, count, 1, 1);
    updates(c, "v", IN_FLOAT, count, 1, 1);
    reads(c, "g", IN_FLOAT, count, 1, 1);
    writes(c, "copy", IN_X, count, 1);
    c->flops = 14.0 * (double)count;
    // g scaled; m: 2; v: 3; the denominator; p: 2; and a square root and a division
    c->slots = (double)(2 * DIVISION_SLOTS + 9) * (double)count;
}

typedef struct {
    float keep, rate, root;
} Factors; // the same for all elements, computed in double
static Factors factors(const Case *c) {
    double step = (double)c->size[1];
    Factors f = {(float)(1.0 - (double)LR * (double)WEIGHT_DECAY),
                 (float)((double)LR / (1.0 - pow((double)BETA1, step))),
                 (float)(1.0 / sqrt(1.0 - pow((double)BETA2, step)))};
    return f;
}

static void adamw_prepare(Case *c) {
    for (int64_t i = 0; i < c->size[0]; i++) F("v")[i] = fabsf(F("v")[i]); // a mean of squares
}

static void adamw_definition(Case *c) {
    const double *p0 = D("p"), *m0 = D("m"), *v0 = D("v"), *g0 = D("g");
    double *p = R("p"), *m = R("m"), *v = R("v"), *copy = R("copy");
    double lr = (double)LR, beta1 = (double)BETA1, beta2 = (double)BETA2, step = (double)c->size[1];
    for (int64_t i = 0; i < c->size[0]; i++) {
        double g = g0[i] * (double)GRAD_SCALE;
        m[i] = beta1 * m0[i] + (1 - beta1) * g;
        v[i] = beta2 * v0[i] + (1 - beta2) * g * g;
        p[i] = p0[i] - lr * (double)WEIGHT_DECAY * p0[i];
        p[i] -= lr / (1 - pow(beta1, step)) * m[i] / (sqrt(v[i]) / sqrt(1 - pow(beta2, step)) + (double)EPS);
        copy[i] = p[i];
    }
}

static void adamw_in_use(Case *c) {
    IMPLEMENTATION(adamw)
    (c->on, F("p"), F("m"), F("v"), F("g"), X("copy"), c->size[0], LR, BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_SCALE,
     (int)c->size[1]);
}

static const Op op = {"adamw",
                      adamw_case,
                      adamw_prepare,
                      adamw_definition,
                      adamw_in_use,
                      {{"odd", {1003, 3}},
                       FOR_CPU({"bench-8m tensor", {82944, 100}}, {"bench-125m block", {6292992, 100}},
                               {"1B layer, 1 of 2 shards", {30410752, 100}})
                           FOR_GPU({"even", {4096, 100}}, {"1B layer", {60821504, 100}})}};

#endif
