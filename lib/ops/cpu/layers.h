/* layers.h: embedding, residual addition, RoPE and SwiGLU on the CPU. The contracts are in lib/ops/ops.h.
 *
 * Threads share the rows of a tensor, except where a sum goes over rows: there they share the columns. So the result
 * does not depend on the number of threads. A single row, as in generation, is done by one thread.
 */
#ifndef CPU_LAYERS_H
#define CPU_LAYERS_H
#include "pairs.h" // defines: vpair, load_pair, store_pair; includes vectors.h: vfloat, load_x, store_x, vexp

// ---------------------------------------------------------------------------
// embedding

static void cpu_embedding_forward(OpStream *on, floatX *x, const floatX *embed, const int32_t *ids, int first, int N,
                                  int C, int V) {
#pragma omp parallel for num_threads(on->threads) if (N > 1)
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
static void cpu_embedding_backward(OpStream *on, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                                   int C, int V, void *workspace) {
    (void)workspace;
#pragma omp parallel for num_threads(on->threads)
    for (int64_t thread = 0; thread < on->threads; thread++) {
        int64_t vectors = blocks_of(C, VL);
        int64_t begin = thread * vectors / on->threads * VL;
        int64_t end = min_i64(C, (thread + 1) * vectors / on->threads * VL);
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
// residual addition

static void cpu_residual_add(OpStream *on, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += 2 * VL)
        store_pair(out + i, pair_add(load_pair(x + i, count - i), load_pair(delta + i, count - i)), count - i);
}

// ---------------------------------------------------------------------------
// RoPE

/* direction 1 rotates forward, -1 back. The angles of a token are read once for all its heads. */
static void cpu_rope(OpStream *on, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                     int T, int heads, int HD, float direction) {
    int half = HD / 2;
#pragma omp parallel for num_threads(on->threads) if (N > 1)
    for (int n = 0; n < N; n++) {
        const float *cosines = cos_sin + (int64_t)positions[n % T] * HD, *sines = cosines + half;
        for (int i = 0; i < half; i += 2 * VL) {
            vpair c = load_pair_float(cosines + i, half - i);
            vpair s = pair_scale(load_pair_float(sines + i, half - i), direction);
            vpair minus_s = pair_scale(s, -1);
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

/* 1 / x within 1 ulp: an approximation and a Newton step take half the time of a division. */
static inline vfloat vreciprocal(vfloat x) {
#ifdef AVX512
    vfloat y = _mm512_rcp14_ps(x);
    return vfma(y, vfma(-x, y, vsplat(1)), y);
#else
    return 1.0f / x;
#endif
}
static inline vfloat sigmoid(vfloat x) { return vreciprocal(1.0f + vexp(-x)); }

static void cpu_swiglu_forward(OpStream *on, floatX *h, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(on->threads) if (N > 1)
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

static void cpu_swiglu_backward(OpStream *on, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(on->threads)
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
