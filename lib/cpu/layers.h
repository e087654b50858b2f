/* layers.h: embedding, RMSNorm, RoPE and SwiGLU on the CPU. The contracts are in lib/ops.h. */
#ifndef CPU_LAYERS_H
#define CPU_LAYERS_H
#include "../ops_common.h" // defines: slice_row, NORM_ROWS
#include "vectors.h"       // defines: vfloat, vpair, load_x, store_x, vexp

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not call every op
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between static functions only
#endif

static void cpu_embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int first, int N,
                                  int C, int V) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        int64_t row = slice_row(ids[n], first, V);
        if (row < 0) memset(x + (int64_t)n * C, 0, (size_t)C * sizeof *x);
        else memcpy(x + (int64_t)n * C, embed + row * C, (size_t)C * sizeof *x);
    }
}

static size_t cpu_embedding_backward_scratch(int N, int C) { return (void)N, (void)C, 0; }
/* Columns belong to threads, so each element is summed by one thread, over n in order, and one frequent token is
 * everybody's work. */
static void cpu_embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                                   int C, int V, void *scratchpad) {
    (void)scratchpad;
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t part = 0; part < dev->threads; part++) {
        int64_t vectors = blocks_of(C, VL), begin = part * vectors / dev->threads * VL,
                end = min_i64(C, (part + 1) * vectors / dev->threads * VL);
        for (int n = 0; n < N; n++) {
            int64_t row = slice_row(ids[n], first, V);
            float *out = dembed + row * C;
            for (int64_t i = begin; i < end && row >= 0; i += VL)
                store_float(out + i, load_float(out + i, C - i) + load_x(dx + (int64_t)n * C + i, C - i), C - i);
        }
    }
}

/* RMSNorm (Zhang & Sennrich 2019, eq. 4): out = w x / sqrt(mean(x^2) + eps) */
static void cpu_rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x,
                                const floatX *delta, const floatX *w, float eps, int N, int C) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        int64_t row = (int64_t)n * C;
        const floatX *in = delta ? sum + row : x + row; // the rounded sum: recomputing it elsewhere gives these bits
        vpair squares = {vsplat(0), vsplat(0)};
        for (int64_t i = 0; i < C; i += 2 * VL) {
            vpair v = load_pair(x + row + i, C - i);
            if (delta) {
                vpair d = load_pair(delta + row + i, C - i);
                v.a += d.a, v.b += d.b;
                v = store_pair(sum + row + i, v, C - i);
            }
            squares.a = vfma(v.a, v.a, squares.a), squares.b = vfma(v.b, v.b, squares.b);
        }
        float scale = 1.0f / sqrtf(vsum(squares.a + squares.b) / (float)C + eps);
        rstd[n] = scale;
        for (int64_t i = 0; i < C; i += 2 * VL) {
            vpair v = load_pair(in + i, C - i), weight = load_pair(w + i, C - i);
            v.a *= scale * weight.a, v.b *= scale * weight.b;
            store_pair(out + row + i, v, C - i);
        }
    }
}

static size_t cpu_rmsnorm_backward_scratch(int N, int C) {
    return (size_t)blocks_of(N, NORM_ROWS) * (size_t)round_up(C, 2 * VL) * sizeof(float);
}

/* With y = x rstd and g = dout w: dx = rstd (g - y mean(g y)), dw = sum over rows of dout y (kept in pairs). */
static void rmsnorm_backward_row(floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x,
                                 float rstd, const floatX *w, int C) {
    vpair dot = {vsplat(0), vsplat(0)};
    for (int64_t i = 0; i < C; i += 2 * VL) {
        vpair y = load_pair(x + i, C - i), d = load_pair(dout + i, C - i), weight = load_pair(w + i, C - i);
        y.a *= rstd, y.b *= rstd;
        dot.a = vfma(d.a * weight.a, y.a, dot.a), dot.b = vfma(d.b * weight.b, y.b, dot.b);
        vstore(dw + i, vfma(d.a, y.a, vload(dw + i)));
        vstore(dw + i + VL, vfma(d.b, y.b, vload(dw + i + VL)));
    }
    vfloat mean = vsplat(-vsum(dot.a + dot.b) / (float)C);
    for (int64_t i = 0; i < C; i += 2 * VL) {
        vpair y = load_pair(x + i, C - i), g = load_pair(dout + i, C - i), weight = load_pair(w + i, C - i),
              r = {vsplat(0), vsplat(0)};
        if (dresidual) r = load_pair(dresidual + i, C - i);
        g.a = vfma(y.a * rstd, mean, vrounded(g.a * weight.a)), g.b = vfma(y.b * rstd, mean, vrounded(g.b * weight.b));
        r.a = vfma(g.a, vsplat(rstd), r.a), r.b = vfma(g.b, vsplat(rstd), r.b);
        store_pair(dx + i, r, C - i);
    }
}
static void cpu_rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                                 const floatX *x, const float *rstd, const floatX *w, int N, int C, void *scratchpad) {
    float *partial = (float *)scratchpad; // (blocks, width)
    int64_t blocks = blocks_of(N, NORM_ROWS), width = round_up(C, 2 * VL);
#pragma omp parallel num_threads(dev->threads)
    {
#pragma omp for
        for (int64_t b = 0; b < blocks; b++) {
            memset(partial + b * width, 0, (size_t)width * sizeof(float));
            for (int64_t n = b * NORM_ROWS; n < min_i64(N, (b + 1) * NORM_ROWS); n++)
                rmsnorm_backward_row(dx + n * C, partial + b * width, dout + n * C,
                                     dresidual ? dresidual + n * C : NULL, x + n * C, rstd[n], w, C);
        }
#pragma omp for
        for (int64_t i = 0; i < (dw ? C : 0); i += 2 * VL) {
            vpair total = {vsplat(0), vsplat(0)}, before = load_pair_float(dw + i, C - i);
            for (int64_t b = 0; b < blocks; b++)
                total.a += vload(partial + b * width + i), total.b += vload(partial + b * width + i + VL);
            total.a += before.a, total.b += before.b;
            store_pair_float(dw + i, total, C - i);
        }
    }
}

static void cpu_residual_add(Device *dev, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += 2 * VL) {
        vpair v = load_pair(x + i, count - i), d = load_pair(delta + i, count - i);
        v.a += d.a, v.b += d.b;
        store_pair(out + i, v, count - i);
    }
}

/* RoPE (Su et al. 2021), Hugging Face's half-split pairing: element i turns with element i + HD/2. direction 1:
 * forward; -1: backward, since a rotation's transpose turns the other way. */
static void cpu_rope(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                     int T, int heads, int HD, float direction) {
    int half = HD / 2;
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const float *table = cos_sin + (int64_t)positions[n % T] * HD; // cosines, then sines
        for (int i = 0; i < half; i += 2 * VL) {
            vpair c = load_pair_float(table + i, half - i), s = load_pair_float(table + half + i, half - i);
            s.a *= direction, s.b *= direction;
            for (int h = 0; h < heads; h++) {
                floatX *first = x + n * stride + (int64_t)h * HD + i, *second = first + half;
                vpair x0 = load_pair(first, half - i), x1 = load_pair(second, half - i);
                vpair y0 = {vfma(x0.a, c.a, vrounded(x1.a * -s.a)), vfma(x0.b, c.b, vrounded(x1.b * -s.b))};
                vpair y1 = {vfma(x1.a, c.a, vrounded(x0.a * s.a)), vfma(x1.b, c.b, vrounded(x0.b * s.b))};
                store_pair(first, y0, half - i);
                store_pair(second, y1, half - i);
            }
        }
    }
}

/* SwiGLU (Shazeer 2020): h = gate * sigmoid(gate) * up */
static inline vfloat sigmoid(vfloat x) { return vreciprocal(1.0f + vexp(-x)); }

static void cpu_swiglu_forward(Device *dev, floatX *h, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        for (int64_t i = 0; i < F; i += 2 * VL) {
            vpair g = load_pair(gate + i, F - i), u = load_pair(up + i, F - i);
            g.a *= sigmoid(g.a) * u.a, g.b *= sigmoid(g.b) * u.b;
            store_pair(h + (int64_t)n * F + i, g, F - i);
        }
    }
}

static inline void swiglu_backward_vector(vfloat *g, vfloat *u, vfloat d) { // gate and up become their gradients
    vfloat s = sigmoid(*g), silu = vrounded(*g * s), slope = vfma(s, 1.0f - silu, silu); // d silu / d gate
    *g = d * *u * slope, *u = d * silu;
}
static void cpu_swiglu_backward(Device *dev, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        floatX *dgate = dgate_up + (int64_t)n * 2 * F, *dup = dgate + F;
        for (int64_t i = 0; i < F; i += 2 * VL) {
            vpair g = load_pair(gate + i, F - i), u = load_pair(up + i, F - i),
                  d = load_pair(dh + (int64_t)n * F + i, F - i);
            swiglu_backward_vector(&g.a, &u.a, d.a);
            swiglu_backward_vector(&g.b, &u.b, d.b);
            store_pair(dgate + i, g, F - i);
            store_pair(dup + i, u, F - i);
        }
    }
}

#pragma GCC diagnostic pop
#endif
