/* swiglu.h: tensors, definition and sizes of SwiGLU, for swiglu.c, swiglu.cu and mine/. */
#ifndef PAGE_SWIGLU_H
#define PAGE_SWIGLU_H
#include "page.h"

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) { // size: N, F
    int64_t N = c->size[0], F = c->size[1];
    reads(c, "gate_up", IN_X, N, 2 * F, 3);
    writes(c, "h", IN_X, N, F);
    c->flops = 5.0 * (double)(N * F);
    c->slots = (double)(EXP_SLOTS + DIVISION_SLOTS + 2) * (double)(N * F); // the 2: 1 + exp(-g), times up
}

static void extreme_gates(Case *c) { // for two elements of a row, exp() overflows or underflows
    for (int64_t n = 0; n < c->size[0]; n++)
        for (int i = 0; i < 2; i++) set_element(page_find(c, "gate_up"), n * 2 * c->size[1] + 5 + i, i ? 100 : -100);
}

static void forward_definition(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    const double *gate_up = D("gate_up");
    double *h = R("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            double g = gate_up[n * 2 * F + f], up = gate_up[n * 2 * F + F + f];
            h[n * F + f] = g / (1 + exp(-g)) * up;
        }
}

static void forward_in_use(Case *c) {
    IMPLEMENTATION(swiglu_forward)(c->on, X("h"), X("gate_up"), (int)c->size[0], (int)c->size[1]);
}

// ---------------------------------------------------------------------------
// backward. In place, as the training step does it: the gradient replaces gate and up.

static void backward_case(Case *c) { // size: N, F
    int64_t N = c->size[0], F = c->size[1];
    updates(c, "gate_up", IN_X, N, 2 * F, 3);
    reads(c, "dh", IN_X, N, F, 1);
    c->restore = 1; // the gradient has overwritten gate and up
    c->flops = 10.0 * (double)(N * F);
    // With s = sigmoid(g): 1 + exp(-g); silu = g s; 1 - silu; slope = s (1 - silu) + silu; d up; times slope; d silu
    c->slots = (double)(EXP_SLOTS + DIVISION_SLOTS + 7) * (double)(N * F);
}

static void backward_definition(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    const double *gate_up = D("gate_up"), *dh = D("dh");
    double *d_gate_up = R("gate_up");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            int64_t gate = n * 2 * F + f, up = gate + F;
            double g = gate_up[gate], d = dh[n * F + f], sigmoid = 1 / (1 + exp(-g));
            d_gate_up[gate] = d * gate_up[up] * sigmoid * (1 + g * (1 - sigmoid));
            d_gate_up[up] = d * g * sigmoid;
        }
}

static void backward_in_use(Case *c) {
    IMPLEMENTATION(swiglu_backward)(c->on, X("gate_up"), X("dh"), X("gate_up"), (int)c->size[0], (int)c->size[1]);
}

// ---------------------------------------------------------------------------
// the page

#define SIZES                                                                                                          \
    {                                                                                                                  \
        {"odd", {77, 1003}},                                                                                           \
            FOR_CPU({"bench-8m", {2048, 768}}, {"bench-125m", {1024, 2048}}, {"1B layer", {1024, 8192}})               \
                FOR_GPU({"even", {64, 1024}}, {"1B layer", {8192, 8192}}, {"8B layer", {8192, 14336}})                 \
    }
static const Op forward = {"swiglu_forward", forward_case, extreme_gates, forward_definition, forward_in_use, SIZES};
static const Op backward = {"swiglu_backward",   backward_case,   extreme_gates,
                            backward_definition, backward_in_use, SIZES};

#endif
