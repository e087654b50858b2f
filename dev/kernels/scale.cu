/* scale.cu: a tensor times a number, x *= alpha / rank, as LoRA scales its hidden (N, rank).
 *
 * One multiplication for each element read and written, so memory bandwidth is the limit; LoRA's tensors are so small
 * that they are still in a cache, and what a call costs by itself counts, too.
 */
#include "page.h" // updates(): declares a tensor; the last argument scales its random values. X(name): its data in
                  // floatX. D(name), R(name): the definition's inputs and results in double. c->slots: arithmetic
                  // instructions × lanes of an ideal version. From lib/ops/cpu/vectors.h: VL, load_x, store_x

static const float SCALE_BY = 1.6f; // alpha 16, rank 10: no power of two, so that elements are rounded

static void scale_case(Case *c) { // size: count
    int64_t count = c->size[0];   // one element per row: each must meet the bound
    updates(c, "x", IN_X, count, 1, 1);
    c->flops = (double)count;
    c->slots = c->flops;
    c->restore = 1; // repeated calls would end at infinity
}

static void scale_definition(Case *c) {
    const double *x = D("x");
    double *out = R("x");
    for (int64_t i = 0; i < c->size[0]; i++)
        if (wanted(c, i, c->size[0], 1)) out[i] = x[i] * SCALE_BY;
}

static void scale_in_use(Case *c) { scale(c->dev, X("x"), SCALE_BY, c->size[0]); }

#ifndef USE_CUDA
static void scale_by_element(Case *c) {
    floatX *x = X("x");
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(to_float(x[i]) * SCALE_BY);
}

static void scale_vectors(Case *c) {
    floatX *x = X("x");
    int64_t count = c->size[0];
    for (int64_t i = 0; i < count; i += VL) store_x(x + i, load_x(x + i, count - i) * SCALE_BY, count - i);
}

static const Version op_versions[] = {
    {"1 by element", "An element is converted to fp32, multiplied and rounded. The compiler vectorizes the loop.",
     scale_by_element},
    {"2 vectors",
     "The vectors of lib/ops/cpu/vectors.h, which round to bf16 by the hardware's instruction, where there is one.",
     scale_vectors},
    {"in use: threads", "Vectors divided over threads.", scale_in_use},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "scale.cuh" // defines: op_versions
#endif

static const Op op = {"scale",
                      scale_case,
                      NULL,
                      scale_definition,
                      op_versions,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-125m hidden, rank 16", {16384}}, {"8B hidden, rank 16", {131072}}) FOR_GPU(
                           {"even", {4096}}, {"8B hidden, rank 16", {131072}}, {"8B hidden, rank 256", {2097152}})}};

PAGE(&op)
