/* layers.h: embedding, RMSNorm, RoPE and SwiGLU on the CPU. The contracts are in lib/ops/ops.h.
 *
 * Threads share the rows of a tensor, except where a sum goes over rows: there they share the columns, or each takes
 * fixed groups of rows. So the result does not depend on the number of threads. A single row, as in generation, is
 * done before the other threads would have started.
 */
#ifndef CPU_LAYERS_H
#define CPU_LAYERS_H
#include "../../device/device.h" // defines: Device
#include "../ops_common.h"       // defines: slice_row, NORM_ROWS
#include "vectors.h"             // defines: vfloat, vpair, load_x, store_x, vexp

// ---------------------------------------------------------------------------
// embedding

static void cpu_embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int first, int N,
                                  int C, int V) {
#pragma omp parallel for num_threads(dev->threads) if (N > 1)
    for (int n = 0; n < N; n++) {
        int64_t row = slice_row(ids[n], first, V);
        floatX *out = x + (int64_t)n * C;
        if (row < 0) memset(out, 0, (size_t)C * sizeof *x);
        else memcpy(out, embed + row * C, (size_t)C * sizeof *x);
    }
}

static size_t cpu_embedding_backward_scratch(int N, int C) {
    (void)N;
    (void)C;
    return 0;
}

/* Each thread owns some columns of the whole table and goes over all tokens in order. So no two threads add to the same
 * element, and a token that fills half of the batch is still everybody's work. */
static void cpu_embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                                   int C, int V, void *workspace) {
    (void)workspace;
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t thread = 0; thread < dev->threads; thread++) {
        int64_t vectors = blocks_of(C, VL);
        int64_t begin = thread * vectors / dev->threads * VL;
        int64_t end = min_i64(C, (thread + 1) * vectors / dev->threads * VL);
        for (int n = 0; n < N; n++) {
            int64_t row = slice_row(ids[n], first, V);
            if (row < 0) continue;
            const floatX *in = dx + (int64_t)n * C;
            float *out = dembed + row * C;
            for (int64_t i = begin; i < end; i += VL)
                store_float(out + i, load_float(out + i, C - i) + load_x(in + i, C - i), C - i);
        }
    }
}

// ---------------------------------------------------------------------------
// RMSNorm

static void cpu_rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x,
                                const floatX *delta, const floatX *w, float eps, int N, int C) {
#pragma omp parallel for num_threads(dev->threads) if (N > 1)
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
            vpair weight = pair_scale(load_pair(w + i, C - i), vsplat(scale));
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
        vpair y = pair_scale(load_pair(x + i, C - i), vsplat(rstd));
        vpair d = load_pair(dout + i, C - i), weight = load_pair(w + i, C - i);
        dot = pair_fma(pair_mul(d, weight), y, dot);
        vstore(dw + i, vfma(d.a, y.a, vload(dw + i)));
        vstore(dw + i + VL, vfma(d.b, y.b, vload(dw + i + VL)));
    }
    vfloat mean = vsplat(-vsum(dot.a + dot.b) / (float)C); // negated: a subtraction becomes part of an FMA
    for (int64_t i = 0; i < C; i += 2 * VL) {
        vpair y = pair_scale(load_pair(x + i, C - i), vsplat(rstd));
        vpair g = pair_rounded(pair_mul(load_pair(dout + i, C - i), load_pair(w + i, C - i)));
        vpair r = dresidual ? load_pair(dresidual + i, C - i) : pair_splat(0);
        g.a = vfma(y.a, mean, g.a);
        g.b = vfma(y.b, mean, g.b);
        r.a = vfma(g.a, vsplat(rstd), r.a);
        r.b = vfma(g.b, vsplat(rstd), r.b);
        store_pair(dx + i, r, C - i);
    }
}

static void cpu_rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                                 const floatX *x, const float *rstd, const floatX *w, int N, int C, void *workspace) {
    int64_t blocks = blocks_of(N, NORM_ROWS), width = round_up(C, 2 * VL);
    float *partial = (float *)workspace; // (blocks, width)
#pragma omp parallel num_threads(dev->threads)
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
            for (int64_t b = 0; b < blocks; b++) {
                vpair sums = {vload(partial + b * width + i), vload(partial + b * width + i + VL)};
                total = pair_add(total, sums);
            }
            store_pair_float(dw + i, pair_add(total, load_pair_float(dw + i, C - i)), C - i);
        }
    }
}

static void cpu_residual_add(Device *dev, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += 2 * VL)
        store_pair(out + i, pair_add(load_pair(x + i, count - i), load_pair(delta + i, count - i)), count - i);
}

// ---------------------------------------------------------------------------
// RoPE

/* direction 1 rotates forward, -1 back. The angles of a token are read once for all its heads. */
static void cpu_rope(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                     int T, int heads, int HD, float direction) {
    int half = HD / 2;
#pragma omp parallel for num_threads(dev->threads) if (N > 1)
    for (int n = 0; n < N; n++) {
        const float *cosines = cos_sin + (int64_t)positions[n % T] * HD, *sines = cosines + half;
        for (int i = 0; i < half; i += 2 * VL) {
            vpair c = load_pair_float(cosines + i, half - i);
            vpair s = pair_scale(load_pair_float(sines + i, half - i), vsplat(direction));
            vpair minus_s = pair_scale(s, vsplat(-1));
            for (int h = 0; h < heads; h++) {
                floatX *first = x + n * stride + (int64_t)h * HD + i, *second = first + half;
                vpair x0 = load_pair(first, half - i), x1 = load_pair(second, half - i);
                vpair x1_sin = pair_rounded(pair_mul(x1, minus_s));
                vpair x0_sin = pair_rounded(pair_mul(x0, s));
                store_pair(first, pair_fma(x0, c, x1_sin), half - i);
                store_pair(second, pair_fma(x1, c, x0_sin), half - i);
            }
        }
    }
}

// ---------------------------------------------------------------------------
// SwiGLU

static inline vfloat sigmoid(vfloat x) { return vreciprocal(1.0f + vexp(-x)); }

static void cpu_swiglu_forward(Device *dev, floatX *h, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads) if (N > 1)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        for (int64_t i = 0; i < F; i += 2 * VL) {
            vpair g = load_pair(gate + i, F - i), u = load_pair(up + i, F - i);
            g.a *= sigmoid(g.a) * u.a;
            g.b *= sigmoid(g.b) * u.b;
            store_pair(h + (int64_t)n * F + i, g, F - i);
        }
    }
}

/* With dh = d: dup = d silu(gate), dgate = d up silu'(gate), where silu'(x) = s + x s (1 - s) and s = sigmoid(x).
 * gate and up become their gradients. */
static inline void swiglu_backward_vector(vfloat *gate, vfloat *up, vfloat d) {
    vfloat s = sigmoid(*gate);
    vfloat silu = vrounded(*gate * s);
    vfloat slope = vfma(s, 1.0f - silu, silu);
    *gate = d * *up * slope;
    *up = d * silu;
}

static void cpu_swiglu_backward(Device *dev, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        floatX *dgate = dgate_up + (int64_t)n * 2 * F, *dup = dgate + F;
        for (int64_t i = 0; i < F; i += 2 * VL) {
            vpair g = load_pair(gate + i, F - i), u = load_pair(up + i, F - i);
            vpair d = load_pair(dh + (int64_t)n * F + i, F - i);
            swiglu_backward_vector(&g.a, &u.a, d.a);
            swiglu_backward_vector(&g.b, &u.b, d.b);
            store_pair(dgate + i, g, F - i);
            store_pair(dup + i, u, F - i);
        }
    }
}

#endif
