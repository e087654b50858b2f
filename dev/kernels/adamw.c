/* adamw.c: one step of AdamW (Loshchilov & Hutter 2019, algorithm 2), in the order of PyTorch's torch.optim.AdamW:
 *   p -= lr weight_decay p;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
 *   p -= lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps);  copy = p, rounded to floatX
 *
 * Each parameter takes a square root and a division, but also seven transfers of fp32 and one of floatX. The step is
 * limited by memory bandwidth, so what counts is how often each tensor is read and written.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp adamw.c -o adamw -lm
 * with adamw.h page.h page_cpu.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "adamw.h"

static void copy_pass(Case *c) {
    const float *p = F("p");
    floatX *copy = X("copy");
    for (int64_t i = 0; i < c->size[0]; i += VL) store_x(copy + i, load_float(p + i, c->size[0] - i), c->size[0] - i);
}

static void adamw_passes(Case *c) {
    int64_t count = c->size[0];
    float *p = F("p"), *m = F("m"), *v = F("v");
    const float *g = F("g");
    Factors f = factors(c);
    for (int64_t i = 0; i < count; i++) p[i] *= f.keep;
    for (int64_t i = 0; i < count; i++) m[i] = BETA1 * m[i] + (1 - BETA1) * (GRAD_SCALE * g[i]);
    for (int64_t i = 0; i < count; i++) v[i] = BETA2 * v[i] + (1 - BETA2) * (GRAD_SCALE * g[i]) * (GRAD_SCALE * g[i]);
    for (int64_t i = 0; i < count; i++) p[i] -= f.rate * m[i] / (sqrtf(v[i]) * f.root + EPS);
    copy_pass(c);
}

static void adamw_one_pass(Case *c) {
    int64_t count = c->size[0];
    float *p = F("p"), *m = F("m"), *v = F("v");
    const float *g = F("g");
    Factors f = factors(c);
    for (int64_t i = 0; i < count; i++) {
        float grad = g[i] * GRAD_SCALE;
        m[i] = BETA1 * m[i] + (1 - BETA1) * grad;
        v[i] = BETA2 * v[i] + (1 - BETA2) * grad * grad;
        p[i] = p[i] * f.keep - f.rate * m[i] / (sqrtf(v[i]) * f.root + EPS);
    }
    copy_pass(c);
}

/* A vector, n elements of which exist. Returns the new p. */
static inline vfloat step_vector(const Factors *f, float *p, float *m, float *v, const float *g, int64_t n) {
    vfloat grad = load_float(g, n) * GRAD_SCALE, m0 = load_float(m, n), m1 = vfma(grad - m0, vsplat(1 - BETA1), m0);
    vfloat v1 = vfma(grad * (1 - BETA2), grad, load_float(v, n) * BETA2);
    vfloat p1 = vfma(m1 / vfma(vsqrt(v1), vsplat(f->root), vsplat(EPS)), vsplat(-f->rate), load_float(p, n) * f->keep);
    store_float(m, m1, n);
    store_float(v, v1, n);
    store_float(p, p1, n);
    return p1;
}

static void adamw_vectors(Case *c) {
    int64_t count = c->size[0];
    float *p = F("p"), *m = F("m"), *v = F("v");
    const float *g = F("g");
    Factors f = factors(c);
    for (int64_t i = 0; i < count; i += VL) step_vector(&f, p + i, m + i, v + i, g + i, count - i);
    copy_pass(c);
}

static void adamw_with_copy(Case *c) {
    int64_t count = c->size[0];
    float *p = F("p"), *m = F("m"), *v = F("v");
    const float *g = F("g");
    floatX *copy = X("copy");
    Factors f = factors(c);
    for (int64_t i = 0; i < count; i += VL)
        store_x(copy + i, step_vector(&f, p + i, m + i, v + i, g + i, count - i), count - i);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 five passes",
     "The formula line by line: decay, m, v, update, copy. p travels to memory and back twice and is read a third "
     "time; the other tensors also move more than once.",
     adamw_passes},
    {"2 one pass",
     "All five lines for one element while it is in registers: each tensor is read and written once, and p is read "
     "once more for the copy.",
     adamw_one_pass},
    {"3 vectors",
     "Square roots and divisions of whole vectors, without checks for overlapping tensors; m is updated by one fused "
     "(1 - beta1) (g - m).",
     adamw_vectors},
    {"4 the copy too", "The copy is rounded from the register instead of by a pass of its own: p is not read again.",
     adamw_with_copy},
    {"in use: threads",
     "Vectors divided over threads. Elements are independent, so neither the number of threads nor the shards change "
     "the bits.",
     adamw_in_use}};

PAGE({&op, op_versions})
