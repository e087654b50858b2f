/* flat_tensors.h: ops on tensors as flat arrays, on the CPU: sums of ranks' pieces, norms, AdamW, Muon, casts, int8.
 *
 * The contracts are in lib/ops/ops.h. Each element, or each block of a fixed number of elements, is computed alone, so
 * the result does not depend on the number of threads or on where a tensor is cut.
 */
#ifndef CPU_FLAT_TENSORS_H
#define CPU_FLAT_TENSORS_H
#include "../../device/exact_sum.h" // defines: ExactSum
#include "vectors.h"                // defines: vfloat, load_float, store_float, vstream

enum { STREAM_FLOATS = 1 << 20 }; // sums of at least so many floats bypass the caches

// ---------------------------------------------------------------------------
// sums over pieces

static inline vfloat load_either(const void *x, Dtype dtype, int64_t at, int64_t n) {
    return dtype == DTYPE_BF16 ? load_bf16((const bf16 *)x + at, n) : load_float((const float *)x + at, n);
}

/* The sum of element i … i + VL - 1 of n pieces by a binary tree. tree[h] is the latest finished subtree of 2^h pieces:
 * piece k completes as many subtrees as k has trailing one bits. At the end, those of n's one bits are left. */
static inline vfloat tree_sum_vector(const void *pieces, Dtype dtype, int n, int64_t count, int64_t i) {
    vfloat tree[32];
    for (int k = 0; k < n; k++) {
        vfloat sum = load_either(pieces, dtype, k * count + i, count - i);
        int h = 0;
        for (; k >> h & 1; h++) sum = tree[h] + sum;
        tree[h] = sum;
    }
    int lowest = __builtin_ctz((unsigned)n);
    vfloat total = tree[lowest];
    for (int h = lowest + 1; n >> h; h++)
        if (n >> h & 1) total = tree[h] + total;
    return total;
}

/* out is fp32 or, without `accumulate`, bf16. */
static inline void tree_sum_of(OpStream *on, void *out, Dtype out_dtype, const void *pieces, Dtype dtype, int n,
                               int64_t count, int accumulate) {
    float *sums = (float *)out;
    int aligned = (uintptr_t)out % sizeof(vfloat) == 0;
    int stream = out_dtype == DTYPE_F32 && !accumulate && out != pieces && count >= STREAM_FLOATS && aligned;
#pragma omp parallel num_threads(on->threads)
    {
#pragma omp for nowait
        for (int64_t i = 0; i < count; i += VL) {
            vfloat total = tree_sum_vector(pieces, dtype, n, count, i);
            if (accumulate) total = load_float(sums + i, count - i) + total;
            if (stream && i + VL <= count) vstream(sums + i, total);
            else if (out_dtype == DTYPE_F32) store_float(sums + i, total, count - i);
            else store_bf16((bf16 *)out + i, total, count - i);
        }
        vstream_end();
    }
}

static void cpu_tree_sum(OpStream *on, float *out, const void *pieces, Dtype dtype, int n, int64_t count,
                         int accumulate) {
    // two calls with constant dtypes: each is compiled for its own
    if (dtype == DTYPE_F32) tree_sum_of(on, out, DTYPE_F32, pieces, DTYPE_F32, n, count, accumulate);
    else tree_sum_of(on, out, DTYPE_F32, pieces, DTYPE_BF16, n, count, accumulate);
}

static void cpu_sum_pieces(OpStream *on, floatX *out, const floatX *pieces, int n, int64_t count) {
    tree_sum_of(on, out, FLOATX, pieces, FLOATX, n, count, 0);
}

// ---------------------------------------------------------------------------
// gradient norm

static void cpu_exact_total(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    (void)on;
    ExactSum sum = ZERO;
    for (int64_t i = 0; i < count; i++) exact_add(&sum, x[i]);
    exact_merge(total, &sum);
}

/* Adds the squares of x (count) to *total. Each thread sums its blocks' sums of squares; these sums are exact, so it
 * does not matter which thread has which block. */
static void add_squares(OpStream *on, ExactSum *total, const void *x, Dtype dtype, int64_t count) {
#pragma omp parallel num_threads(on->threads)
    {
        ExactSum sum = ZERO;
#pragma omp for
        for (int64_t b = 0; b < count; b += NORM_BLOCK) {
            vfloat squares = vsplat(0);
            for (int64_t i = b; i < min_i64(count, b + NORM_BLOCK); i += VL) {
                vfloat v = load_either(x, dtype, i, count - i);
                squares = vfma(v, v, squares);
            }
            exact_add(&sum, vsum(squares));
        }
#pragma omp critical(add_squares)
        exact_merge(total, &sum);
    }
}

static void cpu_squared_norm(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    add_squares(on, total, x, DTYPE_F32, count);
}

// ---------------------------------------------------------------------------
// AdamW

static void cpu_adamw(OpStream *on, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr,
                      float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    float keep = (float)(1.0 - (double)lr * weight_decay);
    float rate = (float)(lr / (1.0 - pow(beta1, step)));      // lr with the first moment's bias correction
    float root = (float)(1.0 / sqrt(1.0 - pow(beta2, step))); // the second moment's, outside of the square root
    float new1 = (float)(1.0 - beta1), new2 = (float)(1.0 - beta2);
#pragma omp parallel for num_threads(on->threads)
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

// ---------------------------------------------------------------------------
// element by element

static void cpu_cast_to_bf16(OpStream *on, bf16 *out, const float *in, int64_t count) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += VL) store_bf16(out + i, load_float(in + i, count - i), count - i);
}

static void cpu_scale(OpStream *on, floatX *x, float by, int64_t count) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += VL) store_x(x + i, load_x(x + i, count - i) * by, count - i);
}

/* The last block may be shorter: it is copied to a whole one, so that every loop has a constant length. */
static void cpu_dequantize(OpStream *on, floatX *out, const int8_t *in, const float *scales, int64_t count) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t block = 0; block < blocks_of(count, INT8_BLOCK); block++) {
        int64_t at = block * INT8_BLOCK, n = min_i64(INT8_BLOCK, count - at);
        int8_t last[INT8_BLOCK] = {0};
        float values[INT8_BLOCK];
        const int8_t *bytes = in + at;
        if (n < INT8_BLOCK) {
            memcpy(last, bytes, (size_t)n);
            bytes = last;
        }
        for (int i = 0; i < INT8_BLOCK; i++) values[i] = (float)bytes[i];
        for (int64_t i = 0; i < n; i += VL) store_x(out + at + i, vload(values + i) * scales[block], n - i);
    }
}

enum { MERGE_ROWS = 4 }; // rows of w for which an element of a is read once

/* Sums over R in order, then adds the sum times `by` with one rounding. w (rows, IC), b (rows, R) */
static inline __attribute__((always_inline)) void adapter_merge_rows(float *w, const float *a, const float *b, float by,
                                                                     int R, int64_t IC, const int rows) {
    for (int64_t i = 0; i < IC; i += VL) {
        vfloat sum[MERGE_ROWS] = ZERO;
        for (int64_t r = 0; r < R; r++) {
            vfloat x = load_float(a + r * IC + i, IC - i);
            for (int k = 0; k < rows; k++) sum[k] = vfma(x, vsplat(b[k * R + r]), sum[k]);
        }
        for (int k = 0; k < rows; k++) {
            float *at = w + k * IC + i;
            store_float(at, vfma(sum[k], vsplat(by), load_float(at, IC - i)), IC - i);
        }
    }
}

static void cpu_adapter_merge(OpStream *on, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                              int64_t OC) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t o = 0; o < OC; o += MERGE_ROWS) {
        if (o + MERGE_ROWS <= OC) adapter_merge_rows(w + o * IC, a, b + o * R, by, R, IC, MERGE_ROWS);
        else
            for (int64_t k = o; k < OC; k++) adapter_merge_rows(w + k * IC, a, b + k * R, by, R, IC, 1);
    }
}

/* The sum over all 64-bit words, each hashed together with its index: a sum, so that any order gives the same hash. */
static void cpu_fingerprint(OpStream *on, uint64_t *hash, const void *data, int64_t bytes) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(on->threads) reduction(+ : sum)
    for (int64_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, (const char *)data + 8 * i, 8);
        sum += mix64(word + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    }
    *hash = sum;
}

// ---------------------------------------------------------------------------
// Muon's elementwise ops: momentum, normalization, weighted sums, update of the weights

static void cpu_muon_momentum(OpStream *on, floatX *update, float *m, const float *g, int64_t count, float momentum,
                              float grad_scale) {
    float new_part = (float)(1.0 - (double)momentum);
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vfloat grad = vrounded(load_float(g + i, n) * grad_scale), m0 = load_float(m + i, n);
        vfloat m1 = vfma(grad - m0, vsplat(new_part), m0);
        store_float(m + i, m1, n);
        store_x(update + i, vfma(m1 - grad, vsplat(momentum), grad), n);
    }
}

static size_t cpu_normalize_matrix_scratch(void) { return 0; }

static void cpu_normalize_matrix(OpStream *on, floatX *x, int64_t count, void *workspace) {
    ExactSum total = ZERO;
    (void)workspace;
    add_squares(on, &total, x, FLOATX, count);
    float norm = (float)sqrt(exact_value(&total)), by = 1.0f / fmaxf(norm, 1e-7f);
    if (isnan(norm)) by = norm; // fmaxf would ignore it
    cpu_scale(on, x, by, count);
}

static void cpu_weighted_sum(OpStream *on, floatX *x, float a, const float *y, float b, int64_t count) {
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += VL) {
        vfloat scaled = vrounded(load_float(y + i, count - i) * b);
        store_x(x + i, vfma(load_x(x + i, count - i), vsplat(a), scaled), count - i);
    }
}

static void cpu_muon_update(OpStream *on, float *p, floatX *copy, const floatX *direction, int64_t count, float lr,
                            float adjust, float weight_decay) {
    float keep = (float)(1.0 - (double)lr * weight_decay), rate = lr * adjust;
#pragma omp parallel for num_threads(on->threads)
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vfloat kept = vrounded(load_float(p + i, n) * keep);
        vfloat p1 = vfma(load_x(direction + i, n), vsplat(-rate), kept);
        store_float(p + i, p1, n);
        if (copy) store_x(copy + i, p1, n);
    }
}

#endif
