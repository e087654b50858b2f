/* swiglu.cu: SwiGLU (Shazeer 2020), h = silu(gate) up with silu(x) = x sigmoid(x), and its backward.
 *
 * An element takes one exponential and three memory transfers (backward: five). With libm's exponential arithmetic is
 * the limit; with sixteen exponentials at a time memory bandwidth nearly is.
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. X(name): its data in floatX. D(name), R(name): the definition's inputs and
                  // results in double. c->slots: arithmetic instructions × lanes of an ideal version. From
                  // lib/ops/cpu/vectors.h: vfloat, VL, vfma, vexp, …

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) { // size: N, F
    int64_t N = c->size[0], F = c->size[1];
    reads(c, "gate_up", IN_X, N, 2 * F, 3);
    writes(c, "h", IN_X, N, F);
    c->flops = 5.0 * (double)(N * F);
    c->slots = (double)(EXP_SLOTS + DIVISION_SLOTS + 2) * (double)(N * F); // the 2: 1 + exp(-g), times up
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

static void forward_in_use(Case *c) { swiglu_forward(c->dev, X("h"), X("gate_up"), (int)c->size[0], (int)c->size[1]); }

#ifndef USE_CUDA
static void forward_libm_double(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    const floatX *gate_up = X("gate_up");
    floatX *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), up = to_float(gate_up[n * 2 * F + F + f]);
            h[n * F + f] = from_float((float)(g / (1 + exp(-g)) * up));
        }
}

static void forward_libm_float(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    const floatX *gate_up = X("gate_up");
    floatX *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            float g = to_float(gate_up[n * 2 * F + f]), up = to_float(gate_up[n * 2 * F + F + f]);
            h[n * F + f] = from_float(g / (1.0f + expf(-g)) * up);
        }
}

static void forward_vectors(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    const floatX *gate_up = X("gate_up");
    floatX *h = X("h");
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f += VL) {
            vfloat g = load_x(gate_up + n * 2 * F + f, F - f), up = load_x(gate_up + n * 2 * F + F + f, F - f);
            store_x(h + n * F + f, g / (1.0f + vexp(-g)) * up, F - f);
        }
}

static const Version forward_versions[] = {
    {"1 libm, double", "The formula with exp(): every element is converted to double and takes a function call.",
     forward_libm_double},
    {"2 libm, float", "expf() instead: half the digits, which is all that is stored, in less than half the time.",
     forward_libm_float},
    {"3 vexp", "A polynomial for a whole vector at a time: no call, no table, and divisions of whole vectors too.",
     forward_vectors},
    {"in use: threads",
     "Rows divided over threads, two vectors at a time (vpair). Each row is computed by the same instructions, so the "
     "bits do not depend on the number of threads.",
     forward_in_use},
    END_OF_VERSIONS};
#endif

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
    swiglu_backward(c->dev, X("gate_up"), X("dh"), X("gate_up"), (int)c->size[0], (int)c->size[1]);
}

#ifndef USE_CUDA
static void backward_two_ops(Case *c) {
    int64_t N = c->size[0], F = c->size[1];
    floatX *gate_up = X("gate_up");
    const floatX *dh = X("dh");
    size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
    float *dsilu = (float *)scratch(c->dev, "dsilu", (size_t)(N * F) * sizeof(float));
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
    arena_release(c->dev, MEM_WORKSPACE, mark);
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

static const Version backward_versions[] = {
    {"1 two ops",
     "The backward of silu times up, then silu's, as automatic differentiation would do it: two exponentials per "
     "element, and a tensor in between.",
     backward_two_ops},
    {"2 one pass", "Both gradients from one sigmoid: half the exponentials, and no tensor in between.",
     backward_one_pass},
    {"3 vexp",
     "Vectors; given silu, its derivative sigmoid (1 + g (1 - sigmoid)) is a subtraction and one fused instruction: "
     "sigmoid (1 - silu) + silu.",
     backward_vectors},
    {"in use: threads", "Rows divided over threads, two vectors at a time (vpair).", backward_in_use},
    END_OF_VERSIONS};
#endif

// ---------------------------------------------------------------------------
// the page

#ifdef USE_CUDA
#include "swiglu.cuh" // defines: forward_versions, backward_versions
#endif

static const Op forward = {
    "swiglu_forward",
    forward_case,
    NULL,
    forward_definition,
    forward_versions,
    {{"odd", {77, 1003}},
     FOR_CPU({"bench-8m", {2048, 768}}, {"bench-125m", {1024, 2048}}, {"1B layer", {1024, 8192}})
         FOR_GPU({"even", {64, 1024}}, {"1B layer", {8192, 8192}}, {"8B layer", {8192, 14336}})}};

static const Op backward = {
    "swiglu_backward",
    backward_case,
    NULL,
    backward_definition,
    backward_versions,
    {{"odd", {77, 1003}},
     FOR_CPU({"bench-8m", {2048, 768}}, {"bench-125m", {1024, 2048}}, {"1B layer", {1024, 8192}})
         FOR_GPU({"even", {64, 1024}}, {"1B layer", {8192, 8192}}, {"8B layer", {8192, 14336}})}};

PAGE(&forward, &backward)
