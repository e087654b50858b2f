/* rmsnorm.h: RMSNorm on the CPU, with the residual addition before it. The contracts are in lib/ops/ops.h.
 *
 * Threads share the rows. The weight's gradient is summed over fixed groups of rows, and then over the groups, so that
 * it does not depend on the number of threads. A single row, as in generation, is done by one thread.
 */
#ifndef CPU_RMSNORM_H
#define CPU_RMSNORM_H
#include "pairs.h" // defines: vpair, load_pair, store_pair

enum { NORM_ROWS = 32 }; // rows in one partial sum of the weight's gradient

static void cpu_rmsnorm_forward(OpStream *on, floatX *out, float *rstd, floatX *sum, const floatX *x,
                                const floatX *delta, const floatX *w, float eps, int N, int C) {
#pragma omp parallel for num_threads(on->threads) if (N > 1)
    for (int n = 0; n < N; n++) {
        int64_t row = (int64_t)n * C;
        const floatX *in = delta ? sum + row : x + row;
        vpair squares = pair_splat(0);
        for (int64_t i = 0; i < C; i += 2 * VL) {
            vpair v = load_pair(x + row + i, C - i);
            if (delta) // store_pair returns the rounded sum: whoever recomputes the norm from `sum` gets these bits
                v = store_pair(sum + row + i, pair_add(v, load_pair(delta + row + i, C - i)), C - i);
            squares = pair_fma(v, v, squares);
        }
        float scale = 1.0f / sqrtf(vsum(squares.a + squares.b) / (float)C + eps);
        rstd[n] = scale;
        for (int64_t i = 0; i < C; i += 2 * VL) {
            vpair v = load_pair(in + i, C - i);
            vpair weight = pair_scale(load_pair(w + i, C - i), scale);
            store_pair(out + row + i, pair_mul(v, weight), C - i);
        }
    }
}

/* Partial sums of dw: (blocks of NORM_ROWS rows, C up to a whole vpair). */
static size_t cpu_rmsnorm_backward_scratch(int N, int C) {
    return (size_t)blocks_of(N, NORM_ROWS) * (size_t)round_up(C, 2 * VL) * sizeof(float);
}

/* One row: with y = x rstd and g = dout w, dx = rstd (g - y mean(g y)) + dresidual, and dw += dout y. dw is stored as
 * vpairs, which in bf16 is another order of elements. */
static void rmsnorm_backward_row(floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x,
                                 float rstd, const floatX *w, int C) {
    vpair dot = pair_splat(0);
    for (int64_t i = 0; i < C; i += 2 * VL) {
        vpair y = pair_scale(load_pair(x + i, C - i), rstd);
        vpair d = load_pair(dout + i, C - i), weight = load_pair(w + i, C - i);
        dot = pair_fma(pair_mul(d, weight), y, dot);
        vstore(dw + i, vfma(d.a, y.a, vload(dw + i)));
        vstore(dw + i + VL, vfma(d.b, y.b, vload(dw + i + VL)));
    }
    vpair mean = pair_splat(-vsum(dot.a + dot.b) / (float)C); // negated: a subtraction becomes part of an FMA
    for (int64_t i = 0; i < C; i += 2 * VL) {
        vpair y = pair_scale(load_pair(x + i, C - i), rstd);
        vpair g = pair_rounded(pair_mul(load_pair(dout + i, C - i), load_pair(w + i, C - i)));
        vpair r = dresidual ? load_pair(dresidual + i, C - i) : pair_splat(0);
        g = pair_fma(y, mean, g);
        store_pair(dx + i, pair_fma(g, pair_splat(rstd), r), C - i);
    }
}

static void cpu_rmsnorm_backward(OpStream *on, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                                 const floatX *x, const float *rstd, const floatX *w, int N, int C, void *workspace) {
    int64_t blocks = blocks_of(N, NORM_ROWS), width = round_up(C, 2 * VL);
    float *partial = (float *)workspace; // (blocks, width)
#pragma omp parallel num_threads(on->threads)
    {
#pragma omp for
        for (int64_t b = 0; b < blocks; b++) {
            float *sums = partial + b * width;
            memset(sums, 0, (size_t)width * sizeof(float));
            for (int64_t n = b * NORM_ROWS; n < min_i64(N, (b + 1) * NORM_ROWS); n++)
                rmsnorm_backward_row(dx + n * C, sums, dout + n * C, dresidual ? dresidual + n * C : NULL, x + n * C,
                                     rstd[n], w, C);
        }
        int64_t columns = dw ? C : 0;
#pragma omp for
        for (int64_t i = 0; i < columns; i += 2 * VL) {
            vpair total = pair_splat(0);
            for (const float *sums = partial + i; sums < partial + blocks * width; sums += width)
                total = pair_add(total, pair_of(vload(sums), vload(sums + VL)));
            store_pair_float(dw + i, pair_add(total, load_pair_float(dw + i, C - i)), C - i);
        }
    }
}

#endif
