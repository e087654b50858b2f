/* kernels.h: every op of forward and backward, in C.
 *
 * Owns: the arithmetic of the CPU backend; its matrix products are in products.h.
 * The model calls the ops at the end of this file; each books its FLOPs and bytes, takes its scratch, and calls
 * BACKEND(op). So the cpu_* functions are the definition of each op, and a backend is a set of such functions:
 * kernels.cuh has those of NVIDIA GPUs. A caller may rely on: all tensors are row-major; arithmetic is fp32 whatever
 * floatX is; results have the same bits for any number of threads, and wherever a flat tensor is cut; a dry-run device
 * reads and writes nothing.
 */
#ifndef KERNELS_H
#define KERNELS_H
#include "device.h"      // defines: Device, floatX, op_begin, op_end, scratch, arena_release
#include "cpu/vectors.h" // defines: vfloat, vpair, load_x, store_x, vexp
#include <omp.h>
#include <sched.h>
#ifdef HAVE_ONEDNN
#include <dnnl.h>
#endif
#ifdef USE_CUDA
#define BACKEND(op) cuda_##op
#else
#define BACKEND(op) cpu_##op
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not call every op
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between static functions only
#endif

enum { // block sizes, all multiples of NR. Where a sum is cut at them they decide bits: fixed, whatever the threads.
    NORM_BLOCK = 128, // elements in a partial sum of squares: shards and units start at multiples of it
    NORM_ROWS = 32,   // rows in a partial sum of an RMSNorm's dw
    LOSS_BLOCK = 512, // logits in a partial sum of exponentials
    FORWARD_ROWS = 64,
    FORWARD_KEYS = 256, // attention: rows a thread takes at once, keys between two steps of the softmax
    BACKWARD_ROWS = 128,
    BACKWARD_KEYS = 128,
    BACKWARD_STRIPS = BACKWARD_ROWS / (int)MR,
    STRIP_SCORES = BACKWARD_KEYS * (int)MR,
    ITEM_SCORES = BACKWARD_KEYS * BACKWARD_ROWS / (int)PAIR,
    PAIRS_HELD = 4,         // (sequence, kv head) pairs a thread whose keys and values are packed at a time
    STREAM_FLOATS = 1 << 20 // a sum of so many goes past the caches
};

#include "cpu/matmul.h" // defines: Matmul, product, tile_matmul, cpu_linear_forward, cpu_ops_open

// ---------------------------------------------------------------------------
// by rows: embedding, RMSNorm, RoPE, SwiGLU, loss

/* The row of token `id` in a table of V rows that begins with token `first`; -1: it is not there. */
static inline BOTH int slice_row(int32_t id, int first, int V) {
    return id >= first && id - first < V ? id - first : -1;
}

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

/* The largest of a row of logits and the sum of the exponentials of what they are below it. The row comes from memory
 * once: a block's exponentials, which take the logits' place where `kept` is given (it is `logits`), are of what its
 * logits are below its own largest, until factors[block] brings them to one scale. */
static float exponentials_sum(const float *logits, float *kept, int64_t V, float *largest_logit,
                              float *factors /* (blocks, up to VL) */, float *sums /* as factors */) {
    int64_t blocks = blocks_of(V, LOSS_BLOCK);
    float max = -INFINITY;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = b * LOSS_BLOCK, end = min_i64(V, begin + LOSS_BLOCK);
        vfloat largest = vsplat(-INFINITY), sum = vsplat(0);
        for (int64_t i = begin; i < end; i += VL) largest = vmax(largest, load_fill(logits + i, V - i, -INFINITY));
        factors[b] = vmax_lane(largest);
        if (factors[b] > max) max = factors[b];
        float base = factors[b] == -INFINITY ? 0.0f : factors[b]; // nothing but -infinity: exp(-inf - 0) = 0
        for (int64_t i = begin; i < end; i += VL) {
            vfloat e = vexp(load_fill(logits + i, V - i, -INFINITY) - base);
            if (kept) store_float(kept + i, e, V - i);
            sum += e;
        }
        sums[b] = vsum(sum);
    }
    vfloat totals = vsplat(0);
    float base = max == -INFINITY ? 0.0f : max;
    for (int64_t b = 0; b < blocks; b += VL) {
        vfloat factor = vexp(load_fill(factors + b, blocks - b, -INFINITY) - base);
        totals += factor * load_float(sums + b, blocks - b);
        vstore(factors + b, factor);
    }
    *largest_logit = max;
    return vsum(totals);
}

/* Loss: -log softmax(logits)[target], and its gradient softmax(logits) - onehot(target) over the logits. */
static float cross_entropy_row(float *logits, int32_t target, int64_t V, int want_grad,
                               float *factors /* (blocks, up to VL) */, float *sums /* as factors */) {
    floatX *dlogits = (floatX *)(void *)logits; // never overtakes what is still to be read: floatX is no wider
    if (target < 0) {
        if (want_grad) memset(dlogits, 0, (size_t)V * sizeof(floatX));
        return 0.0f;
    }
    float target_logit = logits[target], max,
          total = exponentials_sum(logits, want_grad ? logits : NULL, V, &max, factors, sums), inverse = 1.0f / total;
    if (want_grad) {
        int64_t blocks = blocks_of(V, LOSS_BLOCK);
        float at_target = logits[target] * (factors[target / LOSS_BLOCK] * inverse) - 1.0f;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t begin = b * LOSS_BLOCK, end = min_i64(V, begin + LOSS_BLOCK);
            float factor = factors[b] * inverse;
            for (int64_t i = begin; i < end; i += VL)
                store_x(dlogits + i, load_float(logits + i, V - i) * factor, V - i);
        }
        dlogits[target] = from_float(at_target);
    }
    return (max - target_logit) + logf(total);
}

static int64_t loss_blocks(int64_t V) { return round_up(blocks_of(V, LOSS_BLOCK), VL); }
static size_t cpu_cross_entropy_scratch(const Device *dev, int64_t V) {
    return (size_t)(dev->threads * 2 * loss_blocks(V)) * sizeof(float);
}
static void cpu_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, int N, int V,
                              int want_grad, void *scratchpad) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8) // rows in a row: the processor reads ahead
    for (int n = 0; n < N; n++) {
        float *factors = (float *)scratchpad + omp_get_thread_num() * 2 * loss_blocks(V);
        losses[n] =
            cross_entropy_row(logits + (int64_t)n * V, targets[n], V, want_grad, factors, factors + loss_blocks(V));
    }
}

/* The same where each of several ranks has a slice of the vocabulary: what it knows of a row, and the row that all make
 * of it. */
typedef struct {
    float max, sum, target;
} LossPart; // largest logit; sum of exp(logit - max); the target's logit, -infinity where it is not here

static void cpu_cross_entropy_part(Device *dev, float *parts, const float *logits, const int32_t *targets, int first,
                                   int N, int V, void *scratchpad) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        float *factors = (float *)scratchpad + omp_get_thread_num() * 2 * loss_blocks(V);
        const float *row = logits + (int64_t)n * V;
        int at = slice_row(targets[n], first, V);
        LossPart part = {-INFINITY, 0, at < 0 ? -INFINITY : row[at]};
        if (targets[n] >= 0) part.sum = exponentials_sum(row, NULL, V, &part.max, factors, factors + loss_blocks(V));
        memcpy(parts + 3 * (int64_t)n, &part, sizeof part);
    }
}

/* One order and one arithmetic wherever it runs: all ranks get the same bits. */
static inline BOTH LossPart join_parts(const float *parts /* (ranks,N,3) */, int ranks, int64_t N, int64_t n) {
    LossPart all = {-INFINITY, 0, -INFINITY};
    for (int r = 0; r < ranks; r++) {
        const float *part = parts + 3 * (r * N + n);
        all.max = fmaxf(all.max, part[0]), all.target = fmaxf(all.target, part[2]);
    }
    for (int r = 0; r < ranks; r++) {
        const float *part = parts + 3 * (r * N + n);
        all.sum = fmaf(part[1], expf(part[0] - all.max), all.sum);
    }
    return all;
}

static void cpu_cross_entropy_join(Device *dev, float *losses, float *logits, const float *parts,
                                   const int32_t *targets, int ranks, int first, int N, int V, int want_grad) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 8)
    for (int n = 0; n < N; n++) {
        float *row = logits + (int64_t)n * V;
        floatX *dlogits = (floatX *)(void *)row;
        int at = slice_row(targets[n], first, V);
        LossPart all = join_parts(parts, ranks, N, n);
        float inverse = 1.0f / all.sum;
        losses[n] = targets[n] < 0 ? 0 : (all.max - all.target) + logf(all.sum);
        if (want_grad && targets[n] < 0) memset(dlogits, 0, (size_t)V * sizeof(floatX));
        if (!want_grad || targets[n] < 0) continue;
        float at_target = at < 0 ? 0 : exp_float(row[at] - all.max) * inverse - 1.0f;
        for (int64_t i = 0; i < V; i += VL)
            store_x(dlogits + i, vexp(load_float(row + i, V - i) - all.max) * inverse, V - i);
        if (at >= 0) dlogits[at] = from_float(at_target);
    }
}

// ---------------------------------------------------------------------------
// attention, never (T, T): blocks of keys with an online softmax (Milakov & Gimelshein 2018, Dao et al. 2022)
//
// The G = NH / NKV query heads of one key/value head are handled together: row r stands for query r / G of head
// kv * G + r % G, and each (sequence, kv head) has Tq * G rows. K and V are widened once per (sequence, kv head).

typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int q_offset;       // query t sees keys 0 ... q_offset + t (negative: that query sees nothing)
    int q_split, q_gap; // … and queries from q_split on stand q_gap positions further: context parallelism holds two
                        // chunks. 0: they do not
    const int32_t *q_doc, *k_doc; // (B,Tq), (B,Tk), or NULL: a query sees keys of its own document only
    int64_t q_stride, k_stride, v_stride, o_stride; // elements between tokens; heads are HD apart
} AttentionShape;

/* What attention's products take is 32 bits wide: a float, or in bf16, where the processor multiplies PAIR = 2 of them
 * at once, two neighbours along the sum. A row of queries is such a row as it lies in memory; where the sum goes over
 * rows (keys, or queries), two rows are interleaved. */
typedef struct { // what one call works with
    const AttentionShape *s;
    int G, backward;
    int64_t pairs,
        held; // B * NKV: (sequence, kv head); how many of them are worked on at a time, so that they stay in the cache
    int64_t rows;         // Tq * G
    int64_t keys, blocks; // Tk, rounded up to NR: what is beyond Tk holds zeros; how many times BACKWARD_KEYS that is
    int64_t depth;        // HD / PAIR, rounded up
    int64_t width, ld;    // HD, rounded up to VL; floats between rows: a vector more, against cache conflicts
    int64_t row;          // floats between rows that are operands as they lie
    float scale;          // 1 / sqrt(HD)
    float *kt, *vt; // (held, keys/NR, depth, NR): transposed, the right operands of Q K^T and, in backward, of dO V^T
    float *kv;      // (held, keys/PAIR, ld): V in forward, K in backward
    float *dk, *dv; // (held, keys, ld), in backward
    int *turn;      // (held, blocks), in backward: items that have added their share to dk and dv
    float *local;   // (threads, local_floats)
    int64_t local_floats;
} Attention;

/* What a thread works on in backward: rows r0 ... r0 + rows - 1 of one pair. */
typedef struct {
    float s[STRIP_SCORES], dp[STRIP_SCORES]; // of MR rows: scores; dP, then dS
    float p[ITEM_SCORES], ds[ITEM_SCORES];   // of all rows, PAIR interleaved: for dV and dK
    float lse[BACKWARD_ROWS], D[BACKWARD_ROWS];
    float *q, *dout;                // (BACKWARD_ROWS, row), behind this
    float *q_rows, *dout_rows;      // (BACKWARD_ROWS / PAIR, ld): the same, PAIR rows interleaved
    float *dq;                      // (BACKWARD_ROWS, ld)
    int64_t pair, r0, rows, padded; // padded: rows, up to MR
} __attribute__((aligned(64))) BackwardItem;

/* Lays the work space of one call out from `base`, which may be NULL to learn the size only. Returns bytes. */
static size_t attention_layout(Attention *a, const AttentionShape *s, int threads, int backward, void *base) {
    memset(a, 0, sizeof *a);
    a->s = s, a->backward = backward, a->G = s->NH / s->NKV;
    a->pairs = (int64_t)s->B * s->NKV, a->held = min_i64(a->pairs, PAIRS_HELD * threads),
    a->rows = (int64_t)s->Tq * a->G, a->keys = round_up(s->Tk, NR), a->blocks = blocks_of(a->keys, BACKWARD_KEYS);
    a->depth = blocks_of(s->HD, PAIR), a->width = round_up(s->HD, VL), a->ld = a->width + VL,
    a->row = PAIR == 1 ? a->ld : round_up(a->depth, VL), a->scale = 1.0f / sqrtf((float)s->HD);
    a->local_floats = backward ? (int64_t)(sizeof(BackwardItem) / sizeof(float)) + 5 * BACKWARD_ROWS * a->ld
                               : MR * (2 * a->ld + FORWARD_KEYS);
    int64_t panels = a->held * a->keys * a->depth, wide = a->held * a->keys * a->ld,
            floats = 0; // all are whole vectors
    const struct {
        float **part;
        int64_t floats;
    } parts[6] = {{&a->kt, panels},
                  {&a->kv, wide / PAIR},
                  {&a->local, threads * a->local_floats},
                  {&a->vt, backward * panels},
                  {&a->dk, backward * wide},
                  {&a->dv, backward * wide}};
    for (int i = 0; i < 6; floats += parts[i++].floats)
        if (base) *parts[i].part = (float *)base + floats;
    if (base) a->turn = (int *)(void *)((float *)base + floats);
    return (size_t)floats * sizeof(float) + (size_t)(backward * a->held * a->blocks) * sizeof(int);
}
static size_t cpu_attention_scratch(const Device *dev, const AttentionShape *s, int backward) {
    Attention a;
    return attention_layout(&a, s, dev->threads, backward, NULL);
}

/* Where row r of a pair stands in q, out and their gradients, and in lse; where a key stands in k or v. */
static inline int64_t row_at(const Attention *a, int64_t pair, int64_t r, int64_t stride) {
    return (pair / a->s->NKV * a->s->Tq + r / a->G) * stride + (pair % a->s->NKV * a->G + r % a->G) * a->s->HD;
}
static inline int64_t lse_at(const Attention *a, int64_t pair, int64_t r) {
    return (pair * a->G + r % a->G) * a->s->Tq + r / a->G;
}
static inline int64_t held_at(const Attention *a, int64_t pair, int64_t key) {
    return pair % a->held * a->keys + key;
} // where it stands in kt, kv, …
static inline int64_t key_at(const Attention *a, int64_t pair, int64_t key, int64_t stride) {
    return (pair / a->s->NKV * a->s->Tk + key) * stride + pair % a->s->NKV * a->s->HD;
}

/* VL operands of a row of which n elements are left: as they lie in memory, or widened. */
static inline vfloat operand_load(const floatX *in, int64_t n) {
#ifdef HAVE_PAIRS
    return (vfloat)_mm512_maskz_loadu_epi16(n >= 2 * VL ? ~0u : (1u << n) - 1, in);
#else
    return load_x(in, n);
#endif
}
/* out(length) = in(HD) as operands; zeros beyond, and for a row that does not exist (NULL). */
static void operand_row(float *out, const floatX *in, int HD, int64_t length) {
    for (int64_t i = 0; i < length; i += VL)
        vstore(out + i, in && i * PAIR < HD ? operand_load(in + i * PAIR, HD - i * PAIR) : vsplat(0));
}
/* out(length) = PAIR rows in(HD), `stride` apart and `count` of them left, interleaved; zeros beyond. */
static void operand_rows(float *out, const floatX *in, int64_t stride, int64_t count, int HD, int64_t length) {
#ifdef HAVE_PAIRS
    vuint none = ZERO;
    for (int64_t i = 0; i < length; i += VL) {
        vuint even = count > 0 && i < HD ? load_bits(in + i, HD - i) : none,
              odd = count > 1 && i < HD ? load_bits(in + stride + i, HD - i) : none;
        vstore(out + i, (vfloat)(even | odd << 16));
    }
#else
    (void)stride;
    operand_row(out, count > 0 ? in : NULL, HD, length);
#endif
}
/* Transposes VL x VL: in step h, lanes whose number has bit h change places with those of row i + h. */
static inline __attribute__((always_inline)) void transpose(vfloat *x) {
#pragma GCC unroll 4
    for (int h = 1; h < VL; h *= 2) {
        const vint lane = LANE_NUMBERS, upper = lane + (((lane & h) != 0) & (VL - h)), lower = upper + h;
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++)
            if (!(i & h)) {
                vfloat a = x[i], b = x[i + h];
                x[i] = vpick(a, b, upper), x[i + h] = vpick(a, b, lower);
            }
    }
}
/* panel(depth, NR) = the transposed of `count` rows in(HD), `stride` elements apart; zeros beyond. */
static void operand_panel(float *panel, const floatX *in, int64_t stride, int64_t count, int HD) {
    for (int64_t j = 0; j < NR; j += VL)
        for (int64_t d = 0; d < blocks_of(HD, PAIR); d += VL) {
            vfloat x[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                x[i] = j + i < count ? operand_load(in + (j + i) * stride + d * PAIR, HD - d * PAIR) : vsplat(0);
            transpose(x);
            for (int i = 0; i < VL && d + i < blocks_of(HD, PAIR); i++) vstore(panel + (d + i) * NR + j, x[i]);
        }
}
/* Stores x where a row of operands has its elements j ... j + VL - 1; in place of floats, too: it never overtakes what
 * is still to be read. */
static inline void operand_store(float *row, int64_t j, vfloat x) {
    if (PAIR == 1) vstore(row + j, x);
    else store_x((floatX *)(void *)row + j, x, VL);
}
static inline void operand_store_rows(float *out, const vfloat *x) { // (PAIR) rows, interleaved
#ifdef HAVE_PAIRS
    vstore(out, (vfloat)vround_pair(x[0], x[1]));
#else
    vstore(out, x[0]);
#endif
}

/* Asks for a row ahead of its use: a head's rows lie too far apart for the processor to guess the next. */
static inline void prefetch_row(const floatX *row, int HD) {
    for (int64_t d = 0; d < HD; d += 64 / (int64_t)sizeof *row) __builtin_prefetch(row + d); // bytes of a cache line
}

/* K and V of pairs first ... last - 1 as products take them; by all threads of a parallel region, like the two loops
 * that follow it. */
static void attention_pack(const Attention *a, const floatX *k, const floatX *v, int64_t first, int64_t last) {
    const AttentionShape *s = a->s;
    int64_t panels = a->keys / NR;
#pragma omp for
    for (int64_t i = first * panels; i < last * panels; i++) {
        int64_t pair = i / panels, key = i % panels * NR, count = min_i64(NR, s->Tk - key), at = held_at(a, pair, key);
        const floatX *kp = k + key_at(a, pair, key, s->k_stride), *vp = v + key_at(a, pair, key, s->v_stride),
                     *rows = a->backward ? kp : vp;
        int64_t stride = a->backward ? s->k_stride : s->v_stride;
        for (int64_t j = key + NR; j < min_i64(key + 2 * NR, s->Tk); j++)
            prefetch_row(k + key_at(a, pair, j, s->k_stride), s->HD),
                prefetch_row(v + key_at(a, pair, j, s->v_stride), s->HD);
        operand_panel(a->kt + at * a->depth, kp, s->k_stride, count, s->HD);
        for (int64_t j = 0; j < NR; j += PAIR)
            operand_rows(a->kv + (at + j) / PAIR * a->ld, rows + j * stride, stride, count - j, s->HD, a->ld);
        if (!a->backward) continue;
        operand_panel(a->vt + at * a->depth, vp, s->v_stride, count, s->HD);
        memset(a->dk + at * a->ld, 0, (size_t)(NR * a->ld) * sizeof(float));
        memset(a->dv + at * a->ld, 0, (size_t)(NR * a->ld) * sizeof(float));
        if (key == 0) memset(a->turn + pair % a->held * a->blocks, 0, (size_t)a->blocks * sizeof(int));
    }
}

/* Where query t stands among the keys. Never falls with t: so tiles that nobody sees lie together. And the first query,
 * at Tq or beyond if there is none, that stands at `key` or behind it. */
static inline BOTH int query_position(const AttentionShape *s, int t) {
    return s->q_offset + t + (t >= s->q_split ? s->q_gap : 0);
}
static inline BOTH int first_query(const AttentionShape *s, int key) {
    int t = key - s->q_offset, behind = t - s->q_gap; // in the first chunk; in the second
    t = t < s->q_split ? t : behind > s->q_split ? behind : s->q_split;
    return t > 0 ? t : 0;
}

/* How many keys query t sees by position alone, and row r, where rows beyond the last one see none. Never falls with t
 * or r. */
static inline BOTH int64_t keys_seen(const AttentionShape *s, int64_t t) {
    return max_i64(0, min_i64(s->Tk, query_position(s, (int)t) + (int64_t)1));
}
static inline int64_t visible_keys(const Attention *a, int64_t r) {
    return r >= a->rows ? 0 : keys_seen(a->s, r / a->G);
}

/* The first key that any of rows [r0, r1) shares a document with, down to a multiple of NR: earlier blocks are skipped.
 */
static int64_t first_key(const Attention *a, int64_t pair, int64_t r0, int64_t r1, int64_t end) {
    const AttentionShape *s = a->s;
    if (!s->q_doc) return 0;
    const int32_t *q_doc = s->q_doc + pair / s->NKV * s->Tq, *k_doc = s->k_doc + pair / s->NKV * s->Tk;
    for (int64_t key = 0; key < end; key += NR) {
        int any = 0, count = (int)min_i64(NR, end - key);
        for (int64_t t = r0 / a->G; t <= (r1 - 1) / a->G; t++)
            for (int j = 0; j < count; j++)
                any |= k_doc[key + j] == q_doc[t]; // no early exit: gcc makes vectors of this
        if (any) return key;
    }
    return end;
}

/* Scores of one row against keys k0 ... k0 + n - 1 (n a multiple of NR): what the row does not see becomes -infinity.
 */
static inline void mask_scores(const Attention *a, int64_t pair, int64_t r, float *scores, int64_t k0, int64_t n) {
    const AttentionShape *s = a->s;
    int64_t visible = max_i64(0, min_i64(n, visible_keys(a, r) - k0));
    const vint lane = LANE_NUMBERS;
    for (int64_t j = visible / VL * VL; j < n; j += VL)
        vstore(scores + j, vselect(lane < (int32_t)(visible - j), vload(scores + j), vsplat(-INFINITY)));
    if (!s->q_doc || !visible) return;
    const int32_t *k_doc = s->k_doc + pair / s->NKV * s->Tk + k0, doc = s->q_doc[pair / s->NKV * s->Tq + r / a->G];
    for (int64_t j = 0; j < visible; j++) scores[j] = k_doc[j] == doc ? scores[j] : -INFINITY;
}

/* One step of the online softmax of MR rows: scores(MR, n) become exp(scale * score - max so far), as operands; out(MR,
 * ld) and sum are brought to that maximum. Row after row within each part, so that no row waits for another's sum over
 * lanes. */
static inline void softmax_step(float *scores, int64_t n, float scale, float *max, float *sum, float *out, int64_t ld) {
    float base[MR], rescale[MR];
    for (int r = 0; r < MR; r++) {
        vfloat m = vsplat(-INFINITY);
        for (int64_t j = 0; j < n; j += VL) m = vmax(m, vload(scores + r * FORWARD_KEYS + j));
        float largest = vmax_lane(m) * scale, new_max = largest > max[r] ? largest : max[r];
        base[r] = new_max == -INFINITY ? 0.0f : new_max; // nothing seen yet: exp(-inf - 0) = 0
        rescale[r] = new_max == max[r] || max[r] == -INFINITY
                         ? 1.0f
                         : exp_float(max[r] - base[r]); // out and sum are 0 before the first
        max[r] = new_max;
    }
    for (int r = 0; r < MR; r++) {
        vfloat total = vsplat(0);
        for (int64_t j = 0; j < n; j += VL) {
            vfloat e = vexp(vfma(vload(scores + r * FORWARD_KEYS + j), vsplat(scale), vsplat(-base[r])));
            operand_store(scores + r * FORWARD_KEYS, j, e);
            total += e;
        }
        sum[r] = vfma(vsplat(sum[r]), vsplat(rescale[r]), vsplat(vsum(total)))[0];
        for (int64_t i = 0; i < ld && rescale[r] != 1.0f; i += VL)
            vstore(out + r * ld + i, vload(out + r * ld + i) * rescale[r]);
    }
}

/* MR rows from r0 on. local: out (MR, ld), scores (MR, FORWARD_KEYS), q (MR, row). */
static void attention_forward_strip(const Attention *a, floatX *out, float *lse, const floatX *q, int64_t pair,
                                    int64_t r0, float *local) {
    const AttentionShape *s = a->s;
    float *os = local, *scores = os + MR * a->ld, *qs = scores + MR * (int)FORWARD_KEYS, max[MR], sum[MR];
    int64_t rows = min_i64(MR, a->rows - r0), end = visible_keys(a, r0 + rows - 1);
    memset(os, 0, (size_t)(MR * a->ld) * sizeof *os);
    for (int r = 0; r < MR; r++) {
        operand_row(qs + r * a->row, r < rows ? q + row_at(a, pair, r0 + r, s->q_stride) : NULL, s->HD, a->row);
        max[r] = -INFINITY, sum[r] = 0;
    }
    for (int64_t k0 = first_key(a, pair, r0, r0 + rows, end); k0 < end; k0 += FORWARD_KEYS) {
        int64_t n = round_up(min_i64(FORWARD_KEYS, end - k0), VL), at = held_at(a, pair, k0);
        tile_matmul(scores, FORWARD_KEYS, qs, a->row, 1, a->kt + at * a->depth, NR, a->depth, n, a->depth, 0, PAIR);
        for (int r = 0; r < MR; r++) mask_scores(a, pair, r0 + r, scores + r * FORWARD_KEYS, k0, n);
        softmax_step(scores, n, a->scale, max, sum, os, a->ld);
        tile_matmul(os, a->ld, scores, FORWARD_KEYS, 1, a->kv + at / PAIR * a->ld, a->ld, 1, a->width, n / PAIR, 1,
                     PAIR);
    }
    for (int r = 0; r < rows; r++) {
        floatX *o = out + row_at(a, pair, r0 + r, s->o_stride);
        float inverse = sum[r] > 0 ? 1.0f / sum[r] : sum[r]; // nothing seen: 0; NaN stays NaN
        for (int64_t d = 0; d < s->HD; d += VL) store_x(o + d, vload(os + r * a->ld + d) * inverse, s->HD - d);
        lse[lse_at(a, pair, r0 + r)] = sum[r] == 0 ? -INFINITY : max[r] + logf(sum[r]);
    }
}

static void cpu_attention_forward(Device *dev, floatX *out, float *lse, const floatX *q, const floatX *k,
                                  const floatX *v, const AttentionShape *s, void *scratchpad) {
    Attention a;
    attention_layout(&a, s, dev->threads, 0, scratchpad);
    int64_t strips = blocks_of(a.rows, FORWARD_ROWS);
#pragma omp parallel num_threads(dev->threads)
    for (int64_t first = 0; first < a.pairs; first += a.held) {
        int64_t held = min_i64(a.held, a.pairs - first);
        attention_pack(&a, k, v, first, first + held);
#pragma omp for schedule(dynamic)
        for (int64_t i = strips * held - 1; i >= 0; i--) // late rows see most keys: first
            for (int64_t r = i / held * FORWARD_ROWS; r < min_i64(a.rows, (i / held + 1) * FORWARD_ROWS); r += MR)
                attention_forward_strip(&a, out, lse, q, first + i % held, r,
                                        a.local + omp_get_thread_num() * a.local_floats);
    }
}

/* Backward (Dao et al. 2022, appendix B.2): with P = exp(S - lse) and D = rowsum(dout * out),
 *   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD).
 * An item is BACKWARD_ROWS rows of one (sequence, kv head) and owns their dQ. dK and dV are shared between items,
 * which add to each block of keys in a fixed order: late rows first, each waiting for its turn. */
static void backward_item_load(const Attention *a, BackwardItem *it, const floatX *q, const floatX *dout,
                               const floatX *out, const float *lse) {
    const AttentionShape *s = a->s;
    memset(it->dq, 0, (size_t)(it->padded * a->ld) * sizeof(float));
    for (int64_t r = 0; r < it->padded; r++) {
        int exists = r < it->rows;
        if (r + MR < it->rows) {
            int64_t ahead = row_at(a, it->pair, it->r0 + r + MR, s->o_stride);
            prefetch_row(q + row_at(a, it->pair, it->r0 + r + MR, s->q_stride), s->HD),
                prefetch_row(dout + ahead, s->HD), prefetch_row(out + ahead, s->HD);
        }
        int64_t q_at = row_at(a, it->pair, it->r0 + r, s->q_stride), at = row_at(a, it->pair, it->r0 + r, s->o_stride);
        operand_row(it->q + r * a->row, exists ? q + q_at : NULL, s->HD, a->row);
        operand_row(it->dout + r * a->row, exists ? dout + at : NULL, s->HD, a->row);
        if (PAIR == 2 && r % 2 == 0) { // the rows' neighbour may be another head of the same token
            int64_t count = it->rows - r, next = r + (count > 1);
            operand_rows(it->q_rows + r / 2 * a->ld, q + q_at, row_at(a, it->pair, it->r0 + next, s->q_stride) - q_at,
                         count, s->HD, a->ld);
            operand_rows(it->dout_rows + r / 2 * a->ld, dout + at, row_at(a, it->pair, it->r0 + next, s->o_stride) - at,
                         count, s->HD, a->ld);
        }
        vfloat dot = vsplat(0);
        for (int64_t i = 0; exists && i < s->HD; i += VL)
            dot = vfma(load_x(out + at + i, s->HD - i), load_x(dout + at + i, s->HD - i), dot);
        it->D[r] = vsum(dot);
        it->lse[r] = exists ? lse[lse_at(a, it->pair, it->r0 + r)] : -INFINITY;
    }
}

/* S, dP, then P and dS of MR rows from r on, for n keys from k0 on (n a multiple of VL). dS takes the scale of S along.
 */
static void backward_scores(const Attention *a, BackwardItem *it, int64_t r, int64_t k0, int64_t n) {
    int64_t panels = held_at(a, it->pair, k0) * a->depth;
    tile_matmul(it->s, BACKWARD_KEYS, it->q + r * a->row, a->row, 1, a->kt + panels, NR, a->depth, n, a->depth, 0,
                 PAIR);
    tile_matmul(it->dp, BACKWARD_KEYS, it->dout + r * a->row, a->row, 1, a->vt + panels, NR, a->depth, n, a->depth, 0,
                 PAIR);
    for (int64_t i = 0; i < MR; i += PAIR) {
        float base[PAIR]; // -lse, or 0 where a row sees nothing: exp(-inf - 0) = 0
        for (int x = 0; x < PAIR; x++) {
            base[x] = it->lse[r + i + x] == -INFINITY ? 0 : -it->lse[r + i + x];
            mask_scores(a, it->pair, it->r0 + r + i + x, it->s + (i + x) * BACKWARD_KEYS, k0, n);
        }
        for (int64_t j = 0; j < n; j += VL) {
            vfloat p[PAIR], ds[PAIR];
            for (int x = 0; x < PAIR; x++) {
                float *dp = it->dp + (i + x) * BACKWARD_KEYS;
                p[x] = vexp(vfma(vload(it->s + (i + x) * BACKWARD_KEYS + j), vsplat(a->scale), vsplat(base[x])));
                ds[x] = p[x] * ((vload(dp + j) - it->D[r + i + x]) * a->scale);
                operand_store(dp, j, ds[x]);
            }
            operand_store_rows(it->p + (r + i) / PAIR * BACKWARD_KEYS + j, p);
            operand_store_rows(it->ds + (r + i) / PAIR * BACKWARD_KEYS + j, ds);
        }
    }
}

static void attention_backward_item(const Attention *a, BackwardItem *it, floatX *dq, int order) {
    const AttentionShape *s = a->s;
    int64_t end = visible_keys(a, it->r0 + it->rows - 1),
            begin = first_key(a, it->pair, it->r0, it->r0 + it->rows, end), ld = a->ld;
    int *turn = a->turn + it->pair % a->held * a->blocks;
    for (int64_t k0 = 0; k0 < end; k0 += BACKWARD_KEYS, turn++) {
        int64_t keys = min_i64(BACKWARD_KEYS, end - k0), base = held_at(a, it->pair, k0),
                seen[BACKWARD_STRIPS]; // seen: keys computed for each strip of MR rows
        for (int64_t r = 0; r < it->padded && k0 + keys > begin; r += MR) {
            int64_t n = max_i64(0, min_i64(keys, visible_keys(a, it->r0 + min_i64(r + MR, it->rows) - 1) - k0));
            seen[r / MR] = n = round_up(n, VL);
            backward_scores(a, it, r, k0, n);
            tile_matmul(it->dq + r * ld, ld, it->dp, BACKWARD_KEYS, 1, a->kv + base / PAIR * ld, ld, 1, a->width,
                         n / PAIR, 1, PAIR);
        }
        for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != order; spins++)
            if (spins > 1000) sched_yield();
        for (int64_t j = 0; j < keys && k0 + keys > begin; j += MR) {
            int64_t r = 0, at = (base + j) * ld; // the first rows may not see so far
            while (seen[r / MR] <= j) r += MR;
            int64_t from = r / PAIR * BACKWARD_KEYS + j, rows = r / PAIR * ld, depth = (it->padded - r) / PAIR;
            tile_matmul(a->dv + at, ld, it->p + from, 1, BACKWARD_KEYS, it->dout_rows + rows, ld, 1, a->width, depth,
                         1, PAIR);
            tile_matmul(a->dk + at, ld, it->ds + from, 1, BACKWARD_KEYS, it->q_rows + rows, ld, 1, a->width, depth, 1,
                         PAIR);
        }
        __atomic_store_n(turn, order + 1, __ATOMIC_RELEASE);
    }
    for (int64_t r = 0; r < it->rows; r++)
        for (int64_t d = 0; d < s->HD; d += VL)
            store_x(dq + row_at(a, it->pair, it->r0 + r, s->q_stride) + d, vload(it->dq + r * ld + d), s->HD - d);
}

static void cpu_attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                   const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *scratchpad) {
    Attention a;
    attention_layout(&a, s, dev->threads, 1, scratchpad);
    int64_t orders = blocks_of(a.rows, BACKWARD_ROWS);
#pragma omp parallel num_threads(dev->threads)
    for (int64_t first = 0; first < a.pairs; first += a.held) {
        int64_t held = min_i64(a.held, a.pairs - first);
        attention_pack(&a, k, v, first, first + held);
        // Items start in this order, so whoever waits, waits for an item that has started: no deadlock with any number
        // of threads.
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t i = 0; i < orders * held; i++) {
            BackwardItem *it = (BackwardItem *)(void *)(a.local + omp_get_thread_num() * a.local_floats);
            it->pair = first + i % held;
            it->r0 = (orders - 1 - i / held) * BACKWARD_ROWS;
            it->rows = min_i64(BACKWARD_ROWS, a.rows - it->r0), it->padded = round_up(it->rows, MR);
            it->q = (float *)(it + 1), it->dout = it->q + BACKWARD_ROWS * a.ld,
            it->dq = it->dout + BACKWARD_ROWS * a.ld;
            it->q_rows = PAIR == 1 ? it->q : it->dq + BACKWARD_ROWS * a.ld,
            it->dout_rows = PAIR == 1 ? it->dout : it->q_rows + BACKWARD_ROWS * a.ld;
            backward_item_load(&a, it, q, dout, out, lse);
            attention_backward_item(&a, it, dq, (int)(i / held));
        }
        int64_t panels = a.keys / NR;
#pragma omp for
        for (int64_t i = first * panels; i < (first + held) * panels; i++) {
            int64_t pair = i / panels, key = i % panels * NR, at = held_at(&a, pair, key) * a.ld,
                    count = min_i64(NR, s->Tk - key);
            floatX *dk_at = dk + key_at(&a, pair, key, s->k_stride), *dv_at = dv + key_at(&a, pair, key, s->v_stride);
            for (int64_t j = 0; j < count; j++, at += a.ld, dk_at += s->k_stride, dv_at += s->v_stride)
                for (int64_t d = 0; d < s->HD; d += VL) {
                    store_x(dk_at + d, vload(a.dk + at + d), s->HD - d);
                    store_x(dv_at + d, vload(a.dv + at + d), s->HD - d);
                }
        }
    }
}

// ---------------------------------------------------------------------------
// flat tensors: sums over pieces, norm, AdamW, cast

static inline vfloat load_piece(const void *pieces, Dtype dtype, int64_t at, int64_t n) {
    return dtype == DTYPE_BF16 ? load_bf16((const bf16 *)pieces + at, n) : load_float((const float *)pieces + at, n);
}

/* out is fp32 but in sum_pieces, where it is floatX as the pieces are; there is no `accumulate` there. */
static inline void tree_sum_of(Device *dev, void *out, Dtype out_dtype, const void *pieces, Dtype dtype, int n,
                               int64_t count, int accumulate) {
    float *sums = (float *)out;
    int past = out_dtype == DTYPE_F32 && !accumulate && out != pieces && count >= STREAM_FLOATS &&
               (uintptr_t)out % sizeof(vfloat) == 0; // the caches
#pragma omp parallel num_threads(dev->threads)
    {
#pragma omp for nowait
        for (int64_t i = 0; i < count; i += VL) {
            vfloat level[32]; // sums that wait for their right neighbour, widest first
            int waiting = 0;
            for (int k = 0; k < n; k++) {
                vfloat sum = load_piece(pieces, dtype, k * count + i, count - i);
                for (int bits = k; bits & 1; bits >>= 1) sum = level[--waiting] + sum;
                level[waiting++] = sum;
            }
            vfloat total = level[--waiting];
            while (waiting) total = level[--waiting] + total;
            if (accumulate) total = load_float(sums + i, count - i) + total;
            if (past && i + VL <= count) vstream(sums + i, total);
            else if (out_dtype == DTYPE_F32) store_float(sums + i, total, count - i);
            else store_bf16((bf16 *)out + i, total, count - i);
        }
        vstream_end();
    }
}

static void cpu_tree_sum(Device *dev, float *out, const void *pieces, Dtype dtype, int n, int64_t count,
                         int accumulate) {
    if (dtype == DTYPE_F32) tree_sum_of(dev, out, DTYPE_F32, pieces, DTYPE_F32, n, count, accumulate);
    else tree_sum_of(dev, out, DTYPE_F32, pieces, DTYPE_BF16, n, count, accumulate);
}
static void cpu_sum_pieces(Device *dev, floatX *out, const floatX *pieces, int n, int64_t count) {
    tree_sum_of(dev, out, FLOATX, pieces, FLOATX, n, count, 0);
}

static void cpu_exact_total(Device *dev, ExactSum *total, const float *x, int64_t count) {
    ExactSum sum = ZERO;
    (void)dev;
    for (int64_t i = 0; i < count; i++) exact_add(&sum, x[i]);
    exact_merge(total, &sum);
}

static void cpu_squared_norm(Device *dev, ExactSum *total, const float *x, int64_t count) {
#pragma omp parallel num_threads(dev->threads)
    {
        ExactSum sum = ZERO; // of this thread: exact, so it does not matter whose blocks are whose
#pragma omp for
        for (int64_t b = 0; b < count; b += NORM_BLOCK) {
            vfloat squares = vsplat(0);
            for (int64_t i = b; i < min_i64(count, b + NORM_BLOCK); i += VL) {
                vfloat v = load_float(x + i, count - i);
                squares = vfma(v, v, squares);
            }
            exact_add(&sum, vsum(squares));
        }
#pragma omp critical(squared_norm)
        exact_merge(total, &sum);
    }
}

/* PyTorch's AdamW: decay first, then p -= lr/(1-beta1^t) m / (sqrt(v)/sqrt(1-beta2^t) + eps). */
static void cpu_adamw(Device *dev, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr,
                      float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    float keep = (float)(1.0 - (double)lr * weight_decay), rate = (float)(lr / (1.0 - pow(beta1, step)));
    float root = (float)(1.0 / sqrt(1.0 - pow(beta2, step))), new1 = (float)(1.0 - beta1), new2 = (float)(1.0 - beta2);
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vfloat grad = vrounded(load_float(g + i, n) * grad_scale), m0 = load_float(m + i, n);
        vfloat m1 = vfma(grad - m0, vsplat(new1), m0);
        vfloat v1 = vfma(grad * new2, grad, vrounded(load_float(v + i, n) * beta2));
        vfloat update = m1 / vfma(vsqrt(v1), vsplat(root), vsplat(eps));
        vfloat p1 = vfma(update, vsplat(-rate), vrounded(load_float(p + i, n) * keep));
        store_float(m + i, m1, n);
        store_float(v + i, v1, n);
        store_float(p + i, p1, n);
        if (copy) store_x(copy + i, p1, n);
    }
}

static void cpu_scale(Device *dev, floatX *x, float by, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) store_x(x + i, load_x(x + i, count - i) * by, count - i);
}

static void cpu_dequantize(Device *dev, floatX *out, const int8_t *in, const float *scales, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t block = 0; block < blocks_of(count, INT8_BLOCK); block++) {
        int64_t at = block * INT8_BLOCK, n = min_i64(INT8_BLOCK, count - at);
        int8_t last[INT8_BLOCK] = {0};
        float wide[INT8_BLOCK];
        const int8_t *bytes = n == INT8_BLOCK ? in + at : (const int8_t *)memcpy(last, in + at, (size_t)n);
        for (int i = 0; i < INT8_BLOCK; i++) wide[i] = (float)bytes[i]; // of a known length: vectors without a rest
        for (int64_t i = 0; i < n; i += VL) store_x(out + at + i, vload(wide + i) * scales[block], n - i);
    }
}

/* Sums over the rank in order, then one rounding of the product with `by`. */
static void cpu_adapter_merge(Device *dev, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                              int64_t OC) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t o = 0; o < OC; o++)
        for (int64_t i = 0; i < IC; i += VL) {
            vfloat sum = vsplat(0);
            for (int64_t r = 0; r < R; r++) sum = vfma(load_float(a + r * IC + i, IC - i), vsplat(b[o * R + r]), sum);
            store_float(w + o * IC + i, vfma(sum, vsplat(by), load_float(w + o * IC + i, IC - i)), IC - i);
        }
}

static void cpu_cast_to_bf16(Device *dev, bf16 *out, const float *in, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) store_bf16(out + i, load_float(in + i, count - i), count - i);
}

/* A sum over words, each mixed with its place: the same in whatever order, so for any number of threads. */
static void cpu_fingerprint(Device *dev, uint64_t *total, const void *data, int64_t bytes) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(dev->threads) reduction(+ : sum)
    for (int64_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, (const char *)data + 8 * i, 8);
        sum += mix64(word + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    }
    *total = sum;
}

#ifdef USE_CUDA
#include "cuda/kernels.cuh" // defines: the same functions as cuda_*
#endif

#ifndef USE_CUDA
enum { LOGIT_ROWS = 1024, LOGITS = 1 << 25 };               // at a time: at most so many rows, and 128 MiB of them
enum { RATE_ROWS = 512, RATE_COLS = 768, RATE_COUNTS = 1 }; // of the product that measures what this device can do
#endif

// ---------------------------------------------------------------------------
// the ops: what the model calls. N = B*T rows. "=" and "+=" say what happens to an output; the rest is only read. All
// pointers are to the device's memory.

/* Ends the program where this machine, or no kernel, can compute a model with heads of HD elements. */
static void ops_require_head_size(int HD) { BACKEND(require_head_size)(HD); }

/* Once per rank, on the rank's own thread. */
static void ops_open(Device *dev, int say) { BACKEND(ops_open)(dev, say); }
static void ops_close(Device *dev) {
    if (!dev->dry_run) BACKEND(ops_close)(dev);
}

static const double XB = sizeof(floatX), FB = sizeof(float); // bytes an element
#define RUN_OP(kind, flops, bytes, call)                                                                               \
    if (op_begin(dev, kind, flops, bytes)) {                                                                           \
        BACKEND(call);                                                                                                 \
        op_end(dev);                                                                                                   \
    } // `call`: a call of the backend's function
#define RUN_OP_IN(space_name, space_bytes, kind, flops, bytes, call)                                                   \
    { /* the same with scratch, which `call` names `space` */                                                          \
        size_t mark = arena_mark(dev, MEM_WORKSPACE), need = space_bytes;                                              \
        void *space = need ? scratch(dev, space_name, need) : NULL;                                                    \
        RUN_OP(kind, flops, bytes, call)                                                                               \
        arena_release(dev, MEM_WORKSPACE, mark);                                                                       \
    }

/* The table has V rows of the vocabulary, from token `first` on. A row of x whose id is not among them is zero, and
 * gives no gradient. */
static void embedding_forward(Device *dev, floatX *x /* (N,C) = */, const floatX *embed /* (V,C) */,
                              const int32_t *ids /* (N) */, int first, int N, int C, int V) {
    RUN_OP(OP_EMBEDDING_FORWARD, 0, 2.0 * N * C * XB + FB * N, embedding_forward(dev, x, embed, ids, first, N, C, V))
}
static void embedding_backward(Device *dev, float *dembed /* (V,C) += */, const floatX *dx /* (N,C) */,
                               const int32_t *ids /* (N) */, int first, int N, int C, int V) {
    RUN_OP_IN("embedding backward", BACKEND(embedding_backward_scratch)(N, C), OP_EMBEDDING_BACKWARD, (double)N * C,
              (double)N * C * (XB + 2 * FB) + FB * N, embedding_backward(dev, dembed, dx, ids, first, N, C, V, space))
}

/* Normalises x, or x + delta, which it stores rounded in sum and reads back from there. sum may be x or delta. */
static void rmsnorm_forward(Device *dev, floatX *out /* (N,C) = */, float *rstd /* (N) =, for backward */,
                            floatX *sum /* (N,C) =, NULL when delta is */, const floatX *x /* (N,C) */,
                            const floatX *delta /* (N,C) or NULL */, const floatX *w /* (C) */, float eps, int N,
                            int C) {
    double bytes = (double)N * C * XB * (delta ? 4 : 2) + N * FB + C * XB;
    RUN_OP(OP_RMSNORM_FORWARD, 4.0 * N * C, bytes, rmsnorm_forward(dev, out, rstd, sum, x, delta, w, eps, N, C))
}
static void rmsnorm_backward(Device *dev, floatX *dx /* (N,C) = */, float *dw /* (C) +=; NULL: nobody asks */,
                             const floatX *dout /* (N,C) */,
                             const floatX *dresidual /* (N,C), added to dx; may be dx; or NULL */,
                             const floatX *x /* (N,C): what was normalised */, const float *rstd /* (N) */,
                             const floatX *w /* (C) */, int N, int C) {
    double bytes = (double)N * C * XB * (dresidual ? 4 : 3) + N * FB + C * (XB + 2 * FB);
    RUN_OP_IN("rmsnorm backward", BACKEND(rmsnorm_backward_scratch)(N, C), OP_RMSNORM_BACKWARD, 10.0 * N * C, bytes,
              rmsnorm_backward(dev, dx, dw, dout, dresidual, x, rstd, w, N, C, space))
}

/* Rounds as rmsnorm_forward rounds its sum: the same bits. out may be x or delta. */
static void residual_add(Device *dev, floatX *out /* (count) = */, const floatX *x /* (count) */,
                         const floatX *delta /* (count) */, int64_t count) {
    RUN_OP(OP_RESIDUAL_ADD, (double)count, 3.0 * (double)count * XB, residual_add(dev, out, x, delta, count))
}

static void linear_forward(Device *dev, floatX *y /* (N,OC) = x w^T */, const floatX *x /* (N,IC) */,
                           const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC + (double)N * OC) * XB;
    RUN_OP(OP_LINEAR_FORWARD, 2.0 * N * IC * OC, bytes, linear_forward(dev, y, FLOATX == DTYPE_F32, x, w, N, IC, OC))
}
static void linear_forward_fp32(Device *dev, float *y /* (N,OC) = x w^T: logits */, const floatX *x /* (N,IC) */,
                                const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC) * XB + (double)N * OC * FB;
    RUN_OP(OP_LINEAR_FORWARD, 2.0 * N * IC * OC, bytes, linear_forward(dev, y, 1, x, w, N, IC, OC))
}
static void linear_backward_input(Device *dev, floatX *dx /* (N,IC) = dy w */,
                                  const floatX *dy /* (N,OC), rows dy_stride elements apart */, int64_t dy_stride,
                                  const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC + (double)N * OC) * XB;
    RUN_OP(OP_LINEAR_BACKWARD_INPUT, 2.0 * N * IC * OC, bytes,
           linear_backward_input(dev, dx, dy, dy_stride, w, N, IC, OC))
}

/* What adapters add (Hu et al. 2021): thin products, whose x and dy have rows without gaps. */
static void linear_forward_add(Device *dev, floatX *y /* (N,OC) += x w^T, rows y_stride elements apart */,
                               int64_t y_stride, const floatX *x /* (N,IC) */, const floatX *w /* (OC,IC) */, int N,
                               int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC + 2.0 * N * OC) * XB;
    RUN_OP(OP_LINEAR_FORWARD, 2.0 * N * IC * OC, bytes, linear_forward_add(dev, y, y_stride, x, w, N, IC, OC))
}
static void linear_backward_input_add(Device *dev, floatX *dx /* (N,IC) += dy w */, const floatX *dy /* (N,OC) */,
                                      const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = (2.0 * N * IC + (double)OC * IC + (double)N * OC) * XB;
    RUN_OP(OP_LINEAR_BACKWARD_INPUT, 2.0 * N * IC * OC, bytes, linear_backward_input_add(dev, dx, dy, w, N, IC, OC))
}
static void scale(Device *dev, floatX *x /* (count) *= by */, float by, int64_t count) {
    RUN_OP(OP_SCALE, (double)count, 2.0 * (double)count * XB, scale(dev, x, by, count))
}

/* Weights of 8 bits: blocks of INT8_BLOCK elements, each with a scale of its own (llama3.h). */
static void dequantize(Device *dev, floatX *out /* (count) = */, const int8_t *in /* (count) */,
                       const float *scales /* (count / INT8_BLOCK, rounded up) */, int64_t count) {
    RUN_OP(OP_DEQUANTIZE, (double)count, (double)count * (1 + XB + FB / (double)INT8_BLOCK),
           dequantize(dev, out, in, scales, count))
}
static void adapter_merge(Device *dev, float *w /* (OC,IC) += by b a */, const float *a /* (R,IC) */,
                          const float *b /* (OC,R) */, float by, int R, int64_t IC, int64_t OC) {
    RUN_OP(OP_ADAPTER_MERGE, 2.0 * R * (double)IC * (double)OC,
           (2.0 * (double)IC * (double)OC + (double)R * (double)(IC + OC)) * FB,
           adapter_merge(dev, w, a, b, by, R, IC, OC))
}

static void linear_backward_weight(Device *dev, float *dw /* (OC,IC) = dy^T x; += where `accumulate` */,
                                   const floatX *dy /* (N,OC), rows dy_stride elements apart */, int64_t dy_stride,
                                   const floatX *x /* (N,IC) */, int N, int IC, int OC, int accumulate) {
    double bytes = (double)N * (IC + OC) * XB + (double)OC * IC * FB * (accumulate ? 2 : 1);
    RUN_OP(OP_LINEAR_BACKWARD_WEIGHT, 2.0 * N * IC * OC, bytes,
           linear_backward_weight(dev, dw, dy, dy_stride, x, N, IC, OC, accumulate))
}

/* Rotates, in place, the first `heads` heads of HD in each row; row n has position positions[n % T]. */
static void rope_forward(Device *dev, floatX *x /* (N, stride) */, int64_t stride,
                         const float *cos_sin /* (positions, 2, HD/2) */, const int32_t *positions /* (T) */, int N,
                         int T, int heads, int HD) {
    RUN_OP(OP_ROPE_FORWARD, 3.0 * N * heads * HD, 2.0 * N * heads * HD * XB,
           rope(dev, x, stride, cos_sin, positions, N, T, heads, HD, 1))
}
static void rope_backward(Device *dev, floatX *x /* (N, stride), rotated back */, int64_t stride, const float *cos_sin,
                          const int32_t *positions, int N, int T, int heads, int HD) {
    RUN_OP(OP_ROPE_BACKWARD, 3.0 * N * heads * HD, 2.0 * N * heads * HD * XB,
           rope(dev, x, stride, cos_sin, positions, N, T, heads, HD, -1))
}

/* (query, key) pairs visible by position, over all heads: documents are left out, since a plan does not know them. */
static double pairs_before(const AttentionShape *s, double position) { // of queries at all positions below it
    double within = fmax(0, fmin(position, s->Tk));
    return within * (within + 1) / 2 + fmax(0, position - s->Tk) * s->Tk;
}
static double attention_pairs(const AttentionShape *s) {
    int split = (int)max_i64(0, min_i64(s->q_split, s->Tq));
    double first = s->q_offset, second = first + split + s->q_gap;
    double pairs = pairs_before(s, first + split) - pairs_before(s, first) + pairs_before(s, second + s->Tq - split) -
                   pairs_before(s, second);
    return pairs * s->B * s->NH;
}
static double attention_bytes(const AttentionShape *s, int times) { // q, k, v and out, `times` times, and lse
    return times * 2.0 * s->B * s->HD * ((double)s->Tq * s->NH + (double)s->Tk * s->NKV) * XB +
           (double)s->B * s->NH * s->Tq * FB;
}

/* A row that sees nothing has out 0 and lse -INFINITY. */
static void attention_forward(Device *dev, floatX *out /* (B,Tq,NH,HD) = */,
                              float *lse /* (B,NH,Tq) = log of the sum of exponentials */,
                              const floatX *q /* (B,Tq,NH,HD) */, const floatX *k, const floatX *v /* (B,Tk,NKV,HD) */,
                              const AttentionShape *s) {
    RUN_OP_IN("attention", BACKEND(attention_scratch)(dev, s, 0), OP_ATTENTION_FORWARD,
              4.0 * s->HD * attention_pairs(s), attention_bytes(s, 1),
              attention_forward(dev, out, lse, q, k, v, s, space))
}
static void attention_backward(Device *dev, floatX *dq, floatX *dk,
                               floatX *dv /* =, laid out as q, k, v, and apart from them */,
                               const floatX *dout /* as out */, const floatX *out, const float *lse, const floatX *q,
                               const floatX *k, const floatX *v, const AttentionShape *s) {
    RUN_OP_IN("attention", BACKEND(attention_scratch)(dev, s, 1), OP_ATTENTION_BACKWARD,
              10.0 * s->HD * attention_pairs(s), attention_bytes(s, 2),
              attention_backward(dev, dq, dk, dv, dout, out, lse, q, k, v, s, space))
}

static void swiglu_forward(Device *dev, floatX *h /* (N,F) = */, const floatX *gate_up /* (N,2F): gate, then up */,
                           int N, int F) {
    RUN_OP(OP_SWIGLU_FORWARD, 5.0 * N * F, 3.0 * N * F * XB, swiglu_forward(dev, h, gate_up, N, F))
}
static void swiglu_backward(Device *dev, floatX *dgate_up /* (N,2F) =; may be gate_up */, const floatX *dh /* (N,F) */,
                            const floatX *gate_up /* (N,2F) */, int N, int F) {
    RUN_OP(OP_SWIGLU_BACKWARD, 10.0 * N * F, 5.0 * N * F * XB, swiglu_backward(dev, dgate_up, dh, gate_up, N, F))
}

/* With want_grad the logits become the gradient of the sum of losses: floatX, rows V * 4 / sizeof(floatX) elements
 * apart. */
static void cross_entropy(Device *dev, float *losses /* (N) =, 0 where the target is negative */,
                          float *logits /* (N,V) */, const int32_t *targets /* (N) */, int N, int V, int want_grad) {
    RUN_OP_IN("cross entropy", BACKEND(cross_entropy_scratch)(dev, V), OP_CROSS_ENTROPY, 4.0 * N * V,
              (double)N * V * (FB + (want_grad ? XB : 0)) + 2 * FB * N,
              cross_entropy(dev, losses, logits, targets, N, V, want_grad, space))
}

/* cross_entropy where ranks have slices of the vocabulary, this one V tokens from `first` on. All give their parts to
 * all, and join them: the losses have the same bits on every rank. */
static void cross_entropy_part(
    Device *dev, float *parts /* (N,3) = largest logit; sum of exp(logit - largest); the target's, or -INFINITY */,
    const float *logits /* (N,V) */, const int32_t *targets /* (N), of the whole vocabulary */, int first, int N,
    int V) {
    RUN_OP_IN("cross entropy", BACKEND(cross_entropy_scratch)(dev, V), OP_CROSS_ENTROPY, 3.0 * N * V,
              (double)N * V * FB + 4 * FB * N, cross_entropy_part(dev, parts, logits, targets, first, N, V, space))
}
static void cross_entropy_join(Device *dev, float *losses /* (N) = */, float *logits /* (N,V), as in cross_entropy */,
                               const float *parts /* (ranks,N,3), in the slices' order */,
                               const int32_t *targets /* (N) */, int ranks, int first, int N, int V, int want_grad) {
    RUN_OP(OP_CROSS_ENTROPY, 4.0 * ranks * N + (want_grad ? 3.0 * N * V : 0),
           (want_grad ? (double)N * V * (FB + XB) : 0) + (3.0 * ranks + 2) * FB * N,
           cross_entropy_join(dev, losses, logits, parts, targets, ranks, first, N, V, want_grad))
}

/* The sum is ((0+1)+(2+3))+... in fp32; out may be pieces. Of one piece it is a copy. */
static void tree_sum(Device *dev, float *out /* (count) = sum; += where `accumulate` */,
                     const void *pieces /* (n,count) of dtype */, Dtype dtype, int n, int64_t count, int accumulate) {
    double bytes = (double)count * ((1 + accumulate) * FB + n * (dtype == DTYPE_F32 ? FB : 2));
    RUN_OP(OP_TREE_SUM, (double)(n - 1 + accumulate) * count, bytes,
           tree_sum(dev, out, pieces, dtype, n, count, accumulate))
}

/* tree_sum for activations: the sum is rounded once, to floatX. out may be pieces. */
static void sum_pieces(Device *dev, floatX *out /* (count) = */, const floatX *pieces /* (n,count) */, int n,
                       int64_t count) {
    RUN_OP(OP_SUM_PIECES, (double)(n - 1) * (double)count, (double)count * (n + 1) * XB,
           sum_pieces(dev, out, pieces, n, count))
}

static void exact_total(Device *dev, ExactSum *total /* += */, const float *x /* (count), none negative */,
                        int64_t count) {
    RUN_OP(OP_EXACT_TOTAL, (double)count, (double)count * FB, exact_total(dev, total, x, count))
}

/* Sum of squares: fp32 within blocks of NORM_BLOCK elements from x on, exact over the blocks. */
static void squared_norm(Device *dev, ExactSum *total /* += */, const float *x /* (count) */, int64_t count) {
    RUN_OP(OP_SQUARED_NORM, 2.0 * (double)count, (double)count * FB, squared_norm(dev, total, x, count))
}

/* `grad_scale` folds in clipping and 1 / token count; `step` counts from 1. */
static void adamw(Device *dev, float *p, float *m, float *v /* (count) updated: parameters, first and second moment */,
                  const float *g /* (count) */, floatX *copy /* (count) = p rounded, or NULL */, int64_t count,
                  float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    double bytes = (double)count * (7 * FB + (copy ? XB : 0));
    RUN_OP(OP_ADAMW, 14.0 * (double)count, bytes,
           adamw(dev, p, m, v, g, copy, count, lr, beta1, beta2, eps, weight_decay, grad_scale, step))
}

static void cast_to_bf16(Device *dev, bf16 *out /* (count) = */, const float *in /* (count) */, int64_t count) {
    RUN_OP(OP_CAST, 0, (double)count * (2 + FB), cast_to_bf16(dev, out, in, count))
}

/* Tells whether two ranks hold the same bits. */
static void fingerprint(Device *dev, uint64_t *print /* = */, const void *data, int64_t bytes /* a multiple of 8 */) {
    RUN_OP(OP_FINGERPRINT, 0, (double)bytes, fingerprint(dev, print, data, bytes))
}

#pragma GCC diagnostic pop
#endif
