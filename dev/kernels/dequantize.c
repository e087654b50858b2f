/* dequantize.c: int8 weights converted for matmuls: each byte times the scale of its block of INT8_BLOCK elements.
 *
 * One byte is read and two or four are written, so memory bandwidth is the limit. In training this op runs after an
 * FSDP unit is unsharded. Blocks begin at multiples of INT8_BLOCK, so a vector never has two scales.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp dequantize.c -o dequantize -lm
 * with dequantize.h page.h page_cpu.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "dequantize.h"

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
    int threads = c->on->threads;
    c->on->threads = 1;
    dequantize_in_use(c);
    c->on->threads = threads;
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 by element", "A byte is converted and multiplied by its scale, which is looked up for each element.",
     dequantize_by_element},
    {"2 by block", "The scale is read once per block, and the compiler vectorizes the loop over the block.",
     dequantize_by_block},
    {"3 vectors",
     "A whole block is converted to fp32 by a loop of constant length, then scaled and rounded with the vectors of "
     "lib/ops/cpu/vectors.h: in bf16 by the hardware's instruction, where there is one.",
     dequantize_vectors},
    {"in use: threads", "Blocks divided over threads.", dequantize_in_use}};

PAGE({&op, op_versions})
