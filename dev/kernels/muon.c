/* muon.c: the elementwise ops of Muon (Jordan et al. 2024), in the order of PyTorch's torch.optim.Muon: momentum, the
 * matrix divided by its norm, the weighted sums of the Newton-Schulz iterations, and the update of the weights:
 *   m += (1 - mu) (g - m);  u = g + mu (m - g);  x = u / max(||u||, 1e-7);  x = a x + b y
 *   p = (1 - lr weight_decay) p - lr adjust x
 *
 * All of them are limited by memory bandwidth. The iterations' matmuls are those of linear.cu.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp muon.c -o muon -lm
 * with muon.h page.h page_cpu.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "muon.h"

static void momentum_by_element(Case *c) {
    float *m = F("m");
    const float *g = F("g");
    floatX *update = X("update");
    for (int64_t i = 0; i < c->size[0]; i++) {
        float grad = g[i] * MUON_SCALE;
        m[i] += (1 - MOMENTUM) * (grad - m[i]);
        update[i] = from_float(grad + MOMENTUM * (m[i] - grad));
    }
}

static void normalize_in_double(Case *c) {
    floatX *x = X("x");
    double sum = 0;
    for (int64_t i = 0; i < c->size[0]; i++) sum += (double)to_float(x[i]) * (double)to_float(x[i]);
    float by = 1.0f / (float)fmax(sqrt(sum), 1e-7);
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(to_float(x[i]) * by);
}

static void sum_by_element(Case *c) {
    floatX *x = X("x");
    const float *y = F("y");
    for (int64_t i = 0; i < c->size[0]; i++) x[i] = from_float(WEIGHT_A * to_float(x[i]) + WEIGHT_B * y[i]);
}

static void update_by_element(Case *c) {
    float *p = F("p"), keep = (float)(1.0 - (double)MUON_LR * (double)MUON_DECAY), rate = MUON_LR * ADJUST;
    floatX *copy = X("copy");
    const floatX *direction = X("direction");
    for (int64_t i = 0; i < c->size[0]; i++) {
        p[i] = p[i] * keep - rate * to_float(direction[i]);
        copy[i] = from_float(p[i]);
    }
}

static const char by_element[] = "The formula, an element at a time. The compiler vectorizes the loop.";
static const char threads[] = "Vectors divided over threads; the bits do not depend on their number.";
static const Version momentum_versions[PAGE_VERSIONS] = {{"1 by element", by_element, momentum_by_element},
                                                         {"in use: threads", threads, momentum_in_use}};
static const Version normalize_versions[PAGE_VERSIONS] = {
    {"1 double", "The squares are summed in double, each addition waits for the one before it.", normalize_in_double},
    {"in use: exact", "Blocks of 128 squares in fp32, added up exactly as in squared_norm.cu, by all threads.",
     normalize_in_use}};
static const Version sum_versions[PAGE_VERSIONS] = {{"1 by element", by_element, sum_by_element},
                                                    {"in use: threads", threads, sum_in_use}};
static const Version update_versions[PAGE_VERSIONS] = {{"1 by element", by_element, update_by_element},
                                                       {"in use: threads", threads, update_in_use}};

PAGE({&momentum_op, momentum_versions}, {&normalize_op, normalize_versions}, {&sum_op, sum_versions},
     {&update_op, update_versions})
