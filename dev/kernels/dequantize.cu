/* dequantize.cu: int8 weights converted for matmuls: each byte times the scale of its block of INT8_BLOCK elements.
 *
 * One byte is read and two or four are written, so memory bandwidth is the limit. In training this op runs after an
 * FSDP unit is unsharded. Blocks begin at multiples of INT8_BLOCK, so a vector never has two scales.
 */
#include "page.h" // reads(), writes(): declare a tensor; the last argument of reads() scales its random values.
                  // X(name), F(name), B(name): its data in floatX, float, int8_t. D(name), R(name): the definition's
                  // inputs and results in double. c->slots: arithmetic instructions × lanes of an ideal version.

static void dequantize_case(Case *c) { // size: count
    int64_t count = c->size[0];        // one element per row: each must meet the bound
    reads(c, "in", IN_BYTE, count, 1, 1);
    reads(c, "scales", IN_FLOAT, blocks_of(count, INT8_BLOCK), 1, 1);
    writes(c, "out", IN_X, count, 1);
    c->flops = (double)count;
    c->slots = c->flops;
}

static void dequantize_definition(Case *c) {
    const double *in = D("in"), *scales = D("scales");
    double *out = R("out");
    for (int64_t i = 0; i < c->size[0]; i++)
        if (wanted(c, i, c->size[0], 1)) out[i] = in[i] * scales[i / INT8_BLOCK];
}

static void dequantize_in_use(Case *c) { dequantize(c->dev, X("out"), B("in"), F("scales"), c->size[0]); }

#ifndef USE_CUDA
static void dequantize_by_element(Case *c) {
    const int8_t *in = B("in");
    const float *scales = F("scales");
    floatX *out = X("out");
    for (int64_t i = 0; i < c->size[0]; i++) out[i] = from_float((float)in[i] * scales[i / INT8_BLOCK]);
}

static void dequantize_by_block(Case *c) {
    const int8_t *in = B("in");
    const float *scales = F("scales");
    floatX *out = X("out");
    int64_t count = c->size[0];
    for (int64_t block = 0; block < blocks_of(count, INT8_BLOCK); block++) {
        int64_t at = block * INT8_BLOCK, n = min_i64(INT8_BLOCK, count - at);
        float scale = scales[block];
        for (int64_t i = 0; i < n; i++) out[at + i] = from_float((float)in[at + i] * scale);
    }
}

static void dequantize_vectors(Case *c) {
    int threads = c->dev->threads;
    c->dev->threads = 1;
    dequantize_in_use(c);
    c->dev->threads = threads;
}

static const Version op_versions[] = {
    {"1 by element", "A byte is converted and multiplied by its scale, which is looked up for each element.",
     dequantize_by_element},
    {"2 by block", "The scale is read once per block, and the compiler vectorizes the loop over the block.",
     dequantize_by_block},
    {"3 vectors",
     "A whole block is converted to fp32 by a loop of constant length, then scaled and rounded with the vectors of "
     "lib/ops/cpu/vectors.h: in bf16 by the hardware's instruction, where there is one.",
     dequantize_vectors},
    {"in use: threads", "Blocks divided over threads.", dequantize_in_use},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "dequantize.cuh" // defines: op_versions
#endif

static const Op op = {"dequantize",
                      dequantize_case,
                      NULL,
                      dequantize_definition,
                      op_versions,
                      {{"odd", {1003}},
                       FOR_CPU({"bench-125m matrix", {1572864}}, {"1B matrix", {16777216}}, {"8B matrix", {58720256}})
                           FOR_GPU({"even", {4096}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

PAGE(&op)
