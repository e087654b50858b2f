/* scale.c: a tensor times a number, x *= alpha / rank, as LoRA scales its hidden (N, rank).
 *
 * One multiplication for each element read and written, so memory bandwidth is the limit; LoRA's tensors are so small
 * that they are still in a cache, and what a call costs by itself counts, too.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp scale.c -o scale -lm
 * with page.h page_cpu.h scale.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "scale.h"

static void scale_by_element(Case *c) {
    floatX *x = X("x");
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(to_float(x[i]) * SCALE_BY);
}

static void scale_vectors(Case *c) {
    floatX *x = X("x");
    int64_t count = c->size[0];
    for (int64_t i = 0; i < count; i += VL) store_x(x + i, load_x(x + i, count - i) * SCALE_BY, count - i);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 by element", "An element is converted to fp32, multiplied and rounded. The compiler vectorizes the loop.",
     scale_by_element},
    {"2 vectors",
     "The vectors of lib/ops/cpu/vectors.h, which round to bf16 by the hardware's instruction, where there is one.",
     scale_vectors},
    {"in use: threads", "Vectors divided over threads.", scale_in_use}};

PAGE({&op, op_versions})
