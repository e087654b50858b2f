/* swiglu.c: SwiGLU (Shazeer 2020), h = silu(gate) up with silu(x) = x sigmoid(x), and its backward.
 *
 * An element takes one exponential and three memory transfers (backward: five). With libm's exponential, arithmetic is
 * the limit; with a vector of exponentials at a time, memory bandwidth nearly is.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp swiglu.c -o swiglu -lm
 * with page.h page_cpu.h swiglu.h lib/device/kernel.h lib/ops/cpu/layers.h lib/ops/cpu/pairs.h lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/layers.h"
#include "swiglu.h"

static void forward_libm_double(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up"), *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), up = to_float(gate_up[n * 2 * F + F + f]);
            h[n * F + f] = from_float((float)(g / (1 + exp(-g)) * up));
        }
}

static void forward_libm_float(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up"), *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), up = to_float(gate_up[n * 2 * F + F + f]);
            h[n * F + f] = from_float(g / (1.0f + expf(-g)) * up);
        }
}

static void forward_vectors(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up"), *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f += VL) {
            vfloat g = load_x(gate_up + n * 2 * F + f, F - f), up = load_x(gate_up + n * 2 * F + F + f, F - f);
            store_x(h + n * F + f, g / (1.0f + vexp(-g)) * up, F - f);
        }
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 libm, double", "The formula with exp(): every element is converted to double and takes a function call.",
     forward_libm_double},
    {"2 libm, float", "expf() instead: half the digits, which is all that is stored, in less than half the time.",
     forward_libm_float},
    {"3 vexp", "A polynomial for a whole vector at a time: no call, no table, and divisions of whole vectors too.",
     forward_vectors},
    {"in use: threads",
     "Rows divided over threads; besides, two vectors at a time, and a reciprocal of three instructions (vreciprocal) "
     "in place of the division. The bits do not depend on the number of threads.",
     forward_in_use}};
static void backward_two_ops(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up");
    const floatX *dh = X("dh");
    float *dsilu = (float *)page_scratch(c, (size_t)(N * F) * sizeof(float));
    for (int64_t n = 0; n < N; n++) // h = silu up
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), d = to_float(dh[n * F + f]);
            dsilu[n * F + f] = d * to_float(gate_up[n * 2 * F + F + f]);
            gate_up[n * 2 * F + F + f] = from_float(d * g / (1.0f + expf(-g)));
        }
    for (int64_t n = 0; n < N; n++) // silu = gate sigmoid(gate)
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), sigmoid = 1.0f / (1.0f + expf(-g));
            gate_up[n * 2 * F + f] = from_float(dsilu[n * F + f] * sigmoid * (1.0f + g * (1.0f - sigmoid)));
        }
}

static void backward_one_pass(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up");
    const floatX *dh = X("dh");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            floatX *gate = gate_up + n * 2 * F + f, *up = gate + F;
            float g = to_float(*gate), d = to_float(dh[n * F + f]), sigmoid = 1.0f / (1.0f + expf(-g));
            *gate = from_float(d * to_float(*up) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
            *up = from_float(d * g * sigmoid);
        }
}

static void backward_vectors(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up");
    const floatX *dh = X("dh");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f += VL) {
            floatX *gate = gate_up + n * 2 * F + f, *up = gate + F;
            vfloat g = load_x(gate, F - f), u = load_x(up, F - f), d = load_x(dh + n * F + f, F - f);
            vfloat sigmoid = 1.0f / (1.0f + vexp(-g)), silu = g * sigmoid;
            store_x(gate, d * u * vfma(sigmoid, 1.0f - silu, silu), F - f);
            store_x(up, d * silu, F - f);
        }
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 two ops",
     "The backward of silu times up, then silu's, as automatic differentiation would do it: two exponentials per "
     "element, and a tensor in between.",
     backward_two_ops},
    {"2 one pass", "Both gradients from one sigmoid: half the exponentials, and no tensor in between.",
     backward_one_pass},
    {"3 vexp",
     "Vectors; given silu = g sigmoid, its derivative sigmoid (1 + g (1 - sigmoid)) is a subtraction and one fused "
     "instruction: sigmoid (1 - silu) + silu.",
     backward_vectors},
    {"in use: threads", "Rows divided over threads, two vectors at a time, and vreciprocal.", backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
