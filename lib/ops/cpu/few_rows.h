/* few_rows.h: linear layers of few rows on the CPU, as in generation, where each new token is one row.
 *
 * Such a matmul does so little arithmetic that reading the weights limits it. Each weight is read once, in order, for
 * all rows together; the threads share the outputs. A caller may rely on: an output is a dot product whose order
 * depends on nothing but its length, so it has the same bits for any number of threads and of other rows.
 */
#ifndef FEW_ROWS_H
#define FEW_ROWS_H
#include "../../device/device.h" // defines: Device
#include "../ops_common.h"       // defines: Matmul
#include "vectors.h"             // defines: vpair, load_pair, load_words, vdot_pairs, vsum
#include <omp.h>

enum {
    FEW_ROWS = 4,            // at most; their sums, 2 vectors each, fit in the registers of any processor
    WORTH_THREADS = 1 << 15, // fewer multiplications than this take less time than waking the other threads
#ifdef HAVE_PAIRS
    DOT_STEP = 4 * (int)VL // elements that one step of a dot product multiplies
#else
    DOT_STEP = 2 * (int)VL
#endif
};

/* One step of a dot product, of whose vectors n elements are left. */
static inline vpair dot_step(const floatX *x, const floatX *w, int64_t n, vpair sum) {
#ifdef HAVE_PAIRS
    sum.a = vdot_pairs((vfloat)load_words(x, n), (vfloat)load_words(w, n), sum.a);
    if (n > 2 * VL)
        sum.b =
            vdot_pairs((vfloat)load_words(x + 2 * VL, n - 2 * VL), (vfloat)load_words(w + 2 * VL, n - 2 * VL), sum.b);
    return sum;
#else
    return pair_fma(load_pair(x, n), load_pair(w, n), sum);
#endif
}

static inline void few_rows_store(const Matmul *p, char *c, int64_t m, int64_t o, float sum) {
    int64_t at = m * p->c_row + o;
    if (p->c_float) {
        float *to = (float *)(void *)c + at;
        *to = p->accumulate ? *to + sum : sum;
    } else {
        floatX *to = (floatX *)(void *)c + at;
        *to = from_float(p->accumulate ? to_float(*to) + sum : sum);
    }
}

/* Outputs begin … end - 1 of all `rows` rows. One output at a time, so that a thread reads its weights as one stream:
 * four rows of weights side by side were read at half the speed. */
static inline __attribute__((always_inline)) void few_rows_outputs(const Matmul *p, char *c, const floatX *a,
                                                                   const floatX *b, int64_t begin, int64_t end,
                                                                   const int rows) {
    for (int64_t o = begin; o < end; o++) {
        vpair sum[FEW_ROWS]; // (rows) in registers, because all loops over it are unrolled
        const floatX *w = b + o * p->b_col;
        int64_t k = 0;
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) sum[m] = pair_splat(0);
        for (; k + DOT_STEP <= p->K; k += DOT_STEP)
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) sum[m] = dot_step(a + m * p->a_row + k, w + k, DOT_STEP, sum[m]);
        for (int m = 0; m < rows && k < p->K; m++) sum[m] = dot_step(a + m * p->a_row + k, w + k, p->K - k, sum[m]);
        for (int m = 0; m < rows; m++) few_rows_store(p, c, m, o, vsum(sum[m].a + sum[m].b));
    }
}

/* Is this matmul a linear layer of few rows? The elements of a row and of an output's weights must be adjacent. */
static inline int has_few_rows(const Matmul *p) { return p->M <= FEW_ROWS && p->a_col == 1 && p->b_row == 1; }

static void few_rows_matmul(Device *dev, const Matmul *p, char *c, const floatX *a, const floatX *b) {
    int threads = p->N * p->K < WORTH_THREADS ? 1 : dev->threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin = p->N * thread / threads, end = p->N * (thread + 1) / threads;
        if (p->M == 1) few_rows_outputs(p, c, a, b, begin, end, 1);
        else if (p->M == 2) few_rows_outputs(p, c, a, b, begin, end, 2);
        else if (p->M == 3) few_rows_outputs(p, c, a, b, begin, end, 3);
        else few_rows_outputs(p, c, a, b, begin, end, 4);
    }
}

#endif
