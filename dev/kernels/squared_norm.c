/* squared_norm.c: the sum of squares of a gradient, for clipping by its norm.
 *
 * Each element is read once and takes one multiply-add, so memory bandwidth is the limit. The difficulty is the sum. A
 * single fp32 accumulator stops growing at about 2^24 times what is added to it; and if the result depends on the order
 * of additions, it changes with the number of threads or ranks. So short blocks are summed in fp32, and the blocks'
 * sums in something wider.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp squared_norm.c -o squared_norm -lm
 * with page.h page_cpu.h squared_norm.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "squared_norm.h"

static void norm_double(Case *c) {
    const float *x = F("x");
    double total = 0;
    for (int64_t i = 0; i < c->size[0]; i++) total += (double)x[i] * (double)x[i];
    F("total")[0] = (float)total;
}

static void norm_blocks(Case *c) {
    const float *x = F("x");
    double total = 0;
    for (int64_t b = 0; b < c->size[0]; b += NORM_BLOCK) {
        float sum = 0;
        for (int64_t i = b; i < min_i64(c->size[0], b + NORM_BLOCK); i++) sum += x[i] * x[i];
        total += sum;
    }
    F("total")[0] = (float)total;
}

/* One block, as the op in use sums it. */
static inline float block_sum(const float *x, int64_t n) {
    vfloat sum = vsplat(0);
    for (int64_t i = 0; i < min_i64(n, NORM_BLOCK); i += VL) {
        vfloat v = load_float(x + i, n - i);
        sum = vfma(v, v, sum);
    }
    return vsum(sum);
}

static void norm_vectors(Case *c) {
    const float *x = F("x");
    double total = 0;
    for (int64_t b = 0; b < c->size[0]; b += NORM_BLOCK) total += block_sum(x + b, c->size[0] - b);
    F("total")[0] = (float)total;
}

static void norm_threads(Case *c) {
    const float *x = F("x");
    double total = 0;
#pragma omp parallel for num_threads(c->on->threads) reduction(+ : total)
    for (int64_t b = 0; b < c->size[0]; b += NORM_BLOCK) total += block_sum(x + b, c->size[0] - b);
    F("total")[0] = (float)total;
}

static void norm_in_use(Case *c) {
    ExactSum total = ZERO;
    IMPLEMENTATION(squared_norm)(c->on, &total, F("x"), c->size[0]);
    F("total")[0] = (float)exact_value(&total);
}

static const Version norm_versions[PAGE_VERSIONS] = {
    {"1 double", "The definition: each element is converted to double and waits for the sum of all before it.",
     norm_double},
    {"2 blocks",
     "128 squares in fp32, the blocks' sums in double: no conversions, but the additions still wait for each other.",
     norm_blocks},
    {"3 vectors",
     "As many partial sums in a block as lanes: the chain of additions is that many times shorter, and blocks overlap.",
     norm_vectors},
    {"4 threads",
     "Blocks divided over threads, each with a double: as fast as memory, but the last bits depend on the number of "
     "threads.",
     norm_threads},
    {"in use: exact",
     "Each thread has a fixed-point sum that is wide enough for every float. Integer sums do not depend on the order "
     "of additions, so the bits depend neither on threads nor on ranks.",
     norm_in_use}};

PAGE({&norm_op, norm_versions})
