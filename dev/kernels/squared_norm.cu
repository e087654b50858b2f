/* squared_norm.cu: the sum of squares of a gradient, for clipping by its norm.
 *
 * Each element is read once and takes one multiply-add, so memory bandwidth is the limit. The difficulty is the sum. A
 * single fp32 accumulator stops growing at about 2^24 times what is added to it; and if the result depends on the order
 * of additions, it changes with the number of threads or ranks. So short blocks are summed in fp32, and the blocks'
 * sums in something wider.
 */
#include "page.h" // reads(), writes(): declare a tensor; the last argument of reads() scales its random values.
                  // F(name): its data in float. D(name), R(name): the definition's inputs and results in double.
                  // c->slots: arithmetic instructions × lanes of an ideal version. From lib/ops/cpu/vectors.h: vfloat,
                  // VL, vsplat, vfma, …

static void norm_case(Case *c) { // size: count
    reads(c, "x", IN_FLOAT, c->size[0], 1, 1);
    writes(c, "total", IN_FLOAT, 1, 1);
    c->flops = 2.0 * (double)c->size[0];
    c->slots = (double)c->size[0];
}

static void norm_definition(Case *c) {
    const double *x = D("x");
    double total = 0;
    for (int64_t i = 0; i < c->size[0]; i++) total += x[i] * x[i];
    R("total")[0] = total;
}

#ifndef USE_CUDA
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
#pragma omp parallel for num_threads(c->dev->threads) reduction(+ : total)
    for (int64_t b = 0; b < c->size[0]; b += NORM_BLOCK) total += block_sum(x + b, c->size[0] - b);
    F("total")[0] = (float)total;
}

static void norm_in_use(Case *c) {
    ExactSum total = ZERO;
    squared_norm(c->dev, &total, F("x"), c->size[0]);
    F("total")[0] = (float)exact_value(&total);
}

static const Version norm_versions[] = {
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
     norm_in_use},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "squared_norm.cuh" // defines: norm_versions
#endif

static const Op norm = {
    "squared_norm",
    norm_case,
    NULL,
    norm_definition,
    norm_versions,
    {{"odd", {1003}},
     FOR_CPU({"bench-8m tensor", {82944}}, {"bench-125m block", {6292992}}, {"1B layer", {60821504}})
         FOR_GPU({"even", {12800}}, {"1B layer", {60821504}}, {"8B layer", {218112000}})}};

PAGE(&norm)
