/* adapter_merge.c: a LoRA adapter merged into its weight (Hu et al. 2021, section 4.1), w += by b a with w (OC, IC),
 * b (OC, R), a (R, IC) and by = alpha / R. All are fp32.
 *
 * R is small: 2 R FLOPs for each element of w, which is read and written once, and whose sum of R terms stays in a
 * register. The op runs once for each weight when a model is exported.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp adapter_merge.c -o adapter_merge -lm
 * with adapter_merge.h page.h page_cpu.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "adapter_merge.h"

static void merge_dot_products(Case *c) {
    int64_t OC = c->size[0], IC = c->size[1], rank = c->size[2];
    const float *a = F("a"), *b = F("b");
    float *w = F("w");
    for (int64_t o = 0; o < OC; o++)
        for (int64_t i = 0; i < IC; i++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += b[o * rank + r] * a[r * IC + i];
            w[o * IC + i] += MERGE_BY * sum;
        }
}

static void merge_rows(Case *c) {
    int64_t OC = c->size[0], IC = c->size[1], rank = c->size[2];
    const float *b = F("b");
    for (int64_t o = 0; o < OC; o++)
        for (int64_t r = 0; r < rank; r++) {
            const float *a = F("a") + r * IC;
            float *w = F("w") + o * IC, by = MERGE_BY * b[o * rank + r];
            for (int64_t i = 0; i < IC; i++) w[i] += by * a[i];
        }
}

static void merge_vectors(Case *c) {
    int64_t OC = c->size[0], IC = c->size[1], rank = c->size[2];
    const float *a = F("a"), *b = F("b");
    for (int64_t o = 0; o < OC; o++)
        for (int64_t i = 0; i < IC; i += VL) {
            float *at = F("w") + o * IC + i;
            vfloat sum = vsplat(0);
            for (int64_t r = 0; r < rank; r++)
                sum = vfma(load_float(a + r * IC + i, IC - i), vsplat(b[o * rank + r]), sum);
            store_float(at, vfma(sum, vsplat(MERGE_BY), load_float(at, IC - i)), IC - i);
        }
}

static void merge_four_rows(Case *c) {
    int threads = c->on->threads;
    c->on->threads = 1;
    merge_in_use(c);
    c->on->threads = threads;
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 dot products", "Element by element, a row of b times a column of a, whose elements are IC apart.",
     merge_dot_products},
    {"2 by rows",
     "Rows of a are added to a row of w, so memory is read in its order and the compiler vectorizes the loop; but w is "
     "read, rounded and written R times.",
     merge_rows},
    {"3 vectors",
     "A vector of sums stays in a register over all R, and w is read and written once. But the R vectors of a are "
     "loaded for each row of w; if IC is a power of two, they compete for one set of the L1 cache.",
     merge_vectors},
    {"4 four rows", "Sums of four rows of w stay in registers, so a loaded vector of a serves four rows.",
     merge_four_rows},
    {"in use: threads", "Rows of w divided over threads.", merge_in_use}};

PAGE({&op, op_versions})
