/* attention.c: causal attention with grouped query heads, out = softmax(q k^T / sqrt(HD)) v, and its backward.
 *
 * Each visible pair of a query and a key takes 4 HD FLOPs (backward: 10 HD) and an exponential. NH query heads share
 * NKV key/value heads. T queries have T^2 scores but only T HD elements, so the scores are never stored: forward keeps
 * a running softmax over blocks of keys (Milakov & Gimelshein 2018), and backward recomputes the scores (Dao et al.
 * 2022). That leaves small matmuls and exponentials, which the steps below make fast.
 *
 * Queries are at consecutive positions from q_offset on. With context parallelism a rank has two halves of a sequence;
 * then queries from q_split on are at positions q_gap higher. The op also takes document boundaries, which mask more
 * scores; this page does not use them.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp attention.c -o attention -lm
 * with attention.h attention_backward.h attention_forward.h attention_shape.h page.h page_cpu.h lib/device/kernel.h
 * lib/ops/cpu/attention.h lib/ops/cpu/pairs.h lib/ops/cpu/tile.h lib/ops/cpu/vectors.h lib/ops/ops_common.h */
#include "../../lib/ops/cpu/attention.h"
#include "attention.h"

/* The state of versions 2 and 3: one query of one head. */
typedef struct {
    AttentionShape s;
    int64_t b, t, h, at, seen; // at: offset of its row in q, out, dout and dq; seen: how many keys it sees
    float scale, *lse;         // 1 / sqrt(HD); the query's element of lse
    float *row;                // (HD, rounded up to VL), zeros
    float *dk, *dv;            // (B,Tk,NKV,HD) sums in fp32, over the query heads that share a key/value head
} Query;

static void each_query(Case *c, void (*run)(Case *c, const Query *i)) {
    Query i;
    PageTensor *dk = page_find(c, "dk");
    i.s = shape_of(c);
    size_t bytes = (size_t)round_up(i.s.HD, VL) * sizeof(float);
    int64_t count = dk ? dk->rows * dk->cols : 0;
    i.scale = 1 / sqrtf((float)i.s.HD);
    i.row = (float *)page_scratch(c, bytes);
    i.dk = (float *)memset(page_scratch(c, (size_t)count * sizeof(float)), 0, (size_t)count * sizeof(float));
    i.dv = (float *)memset(page_scratch(c, (size_t)count * sizeof(float)), 0, (size_t)count * sizeof(float));
    for (i.b = 0; i.b < i.s.B; i.b++)
        for (i.h = 0; i.h < i.s.NH; i.h++)
            for (i.t = 0; i.t < i.s.Tq; i.t++) {
                i.at = q_at(&i.s, i.b, i.t, i.h);
                i.seen = keys_seen(&i.s, i.t);
                i.lse = F("lse") + l_at(&i.s, i.b, i.t, i.h);
                memset(i.row, 0, bytes);
                run(c, &i);
            }
    for (int64_t n = 0; n < count; n++) {
        X("dk")[n] = from_float(i.dk[n]);
        X("dv")[n] = from_float(i.dv[n]);
    }
}

static float dot(const floatX *a, const floatX *b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += to_float(a[i]) * to_float(b[i]);
    return sum;
}
static void axpy(float *a, float x, const floatX *b, int n) { // a += x b
    for (int i = 0; i < n; i++) a[i] += x * to_float(b[i]);
}
static inline float dot_vectors(const floatX *a, const floatX *b, int n) {
    vfloat sum = vsplat(0);
    for (int i = 0; i < n; i += VL) sum = vfma(load_x(a + i, n - i), load_x(b + i, n - i), sum);
    return vsum(sum);
}
static inline void axpy_vectors(float *a, float x, const floatX *b, int n) {
    for (int i = 0; i < n; i += VL)
        store_float(a + i, vfma(load_x(b + i, n - i), vsplat(x), load_float(a + i, n - i)), n - i);
}
static void forward_three_ops(Case *c) {
    AttentionShape s = shape_of(c);
    const floatX *q = X("q"), *k = X("k"), *v = X("v");
    float *scores = (float *)page_scratch(c, (size_t)s.Tq * (size_t)s.Tk * sizeof(float)),
          *sums = (float *)page_scratch(c, (size_t)s.HD * sizeof(float));
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.NH; h++) {
            for (int64_t t = 0; t < s.Tq; t++)
                for (int64_t j = 0; j < s.Tk; j++)
                    scores[t * s.Tk + j] =
                        j < keys_seen(&s, t)
                            ? dot(q + q_at(&s, b, t, h), k + k_at(&s, b, j, h), s.HD) / sqrtf((float)s.HD)
                            : -INFINITY;
            for (int64_t t = 0; t < s.Tq; t++) {
                float *row = scores + t * s.Tk, max = -INFINITY, sum = 0;
                for (int64_t j = 0; j < s.Tk; j++) max = fmaxf(max, row[j]);
                for (int64_t j = 0; j < s.Tk; j++) {
                    row[j] = max == -INFINITY ? 0 : expf(row[j] - max);
                    sum += row[j];
                }
                for (int64_t j = 0; j < s.Tk && sum > 0; j++) row[j] /= sum;
                F("lse")[l_at(&s, b, t, h)] = max + logf(sum);
            }
            for (int64_t t = 0; t < s.Tq; t++) {
                for (int d = 0; d < s.HD; d++) sums[d] = 0;
                for (int64_t j = 0; j < s.Tk; j++)
                    for (int d = 0; d < s.HD; d++) sums[d] += scores[t * s.Tk + j] * to_float(v[k_at(&s, b, j, h) + d]);
                for (int d = 0; d < s.HD; d++) X("out")[q_at(&s, b, t, h) + d] = from_float(sums[d]);
            }
        }
}

static void online_query(Case *c, const Query *i) {
    const floatX *q = X("q") + i->at, *k = X("k"), *v = X("v");
    float max = -INFINITY, sum = 0, *o = i->row;
    for (int64_t j = 0; j < i->seen; j++) {
        int64_t key = k_at(&i->s, i->b, j, i->h);
        float score = dot(q, k + key, i->s.HD) * i->scale, rescale = 1;
        if (score > max) {
            rescale = expf(max - score);
            max = score; // the sums so far are relative to the smaller maximum
        }
        float p = expf(score - max);
        sum = sum * rescale + p;
        for (int d = 0; d < i->s.HD; d++) o[d] = o[d] * rescale + p * to_float(v[key + d]);
    }
    for (int d = 0; d < i->s.HD; d++) X("out")[i->at + d] = from_float(sum > 0 ? o[d] / sum : 0);
    *i->lse = max + logf(sum);
}
static void forward_online(Case *c) { each_query(c, online_query); }

/* One step of the online softmax for one row: n scores (a multiple of VL) become exp(scale score - max so far), and
 * out (ld) and sum are rescaled to that max.
 *
 * `pair`, here and below, is the number of matmul operands in a 32-bit word: 1 (one fp32) or 2 (two adjacent bf16).
 * With 2 the exponentials overwrite the scores as bf16. They are half as long, so none overwrites a score that is
 * still to be read. */
static inline __attribute__((always_inline)) void online_step(float *scores, int64_t n, float scale, float *max,
                                                              float *sum, float *out, int64_t ld, const int pair) {
    vfloat m = vsplat(-INFINITY), total = vsplat(0);
    for (int64_t j = 0; j < n; j += VL) m = vmax(m, vload(scores + j));
    float largest = fmaxf(*max, vmax_lane(m) * scale),
          base = largest == -INFINITY ? 0 : largest; // no key seen yet: exp(-inf - 0) = 0
    for (int64_t j = 0; j < n; j += VL) {
        vfloat e = vexp(vfma(vload(scores + j), vsplat(scale), vsplat(-base)));
        if (pair == 2) operand_store(scores, j, e);
        else vstore(scores + j, e);
        total += e;
    }
    if (largest > *max) {
        float rescale = exp_float(*max - base);
        for (int64_t i = 0; i < ld; i += VL) vstore(out + i, vload(out + i) * rescale);
        *sum *= rescale;
    }
    *sum += vsum(total);
    *max = largest;
}
/* Stores a row's out and lse; for a query that sees no key out is 0 and lse -infinity. */
static void store_row(floatX *out, float *lse, const float *o, float max, float sum, int HD) {
    for (int d = 0; d < HD; d += VL) store_x(out + d, vload(o + d) * (sum > 0 ? 1 / sum : 0), HD - d);
    *lse = max + logf(sum);
}

static void vectors_query(Case *c, const Query *i) {
    const floatX *q = X("q") + i->at, *k = X("k"), *v = X("v");
    float max = -INFINITY, sum = 0, scores[FORWARD_KEYS];
    for (int64_t k0 = 0; k0 < i->seen; k0 += FORWARD_KEYS) {
        int64_t keys = min_i64(FORWARD_KEYS, i->seen - k0), n = round_up(keys, VL);
        for (int64_t j = 0; j < n; j++)
            scores[j] = j < keys ? dot_vectors(q, k + k_at(&i->s, i->b, k0 + j, i->h), i->s.HD) : -INFINITY;
        online_step(scores, n, i->scale, &max, &sum, i->row, round_up(i->s.HD, VL), 1);
        for (int64_t j = 0; j < keys; j++)
            axpy_vectors(i->row, scores[j], v + k_at(&i->s, i->b, k0 + j, i->h), i->s.HD);
    }
    store_row(X("out") + i->at, i->lse, i->row, max, sum, i->s.HD);
}
static void forward_vectors(Case *c) { each_query(c, vectors_query); }

/* The next three functions prepare operands of tile_matmul. This one converts the HD elements of `in` to fp32 and fills
 * out (width) up with zeros. If `in` is NULL, all of out becomes zero. */
static void widen(float *out, const floatX *in, int HD, int64_t width) {
    for (int64_t d = 0; d < width; d += VL) vstore(out + d, in && d < HD ? load_x(in + d, HD - d) : vsplat(0));
}
/* panel (HD, NR) = the columns of `count` rows in fp32; zeros for rows beyond. */
static void panel_of(float *panel, const floatX *in, int64_t stride, int64_t count, int HD) {
    for (int64_t d = 0; d < HD; d++)
        for (int64_t j = 0; j < NR; j++) panel[d * NR + j] = j < count ? to_float(in[j * stride + d]) : 0;
}
/* Transposes `count` rows of HD elements, `stride` elements apart, into panels of NR rows each; missing rows are zeros.
 * pair 1: panels (count / NR rounded up, HD, NR) in fp32.
 * pair 2: panels (count / NR rounded up, HD / 2 rounded up, NR) of words with two adjacent bf16 elements of a row. */
static inline __attribute__((always_inline)) void transposed(float *panels, const floatX *in, int64_t stride,
                                                             int64_t count, int HD, const int pair) {
    for (int64_t j = 0; j < count; j += NR)
        if (pair == 2) operand_panel(panels + j * blocks_of(HD, 2), in + j * stride, stride, count - j, HD);
        else panel_of(panels + j * HD, in + j * stride, stride, count - j, HD);
}
/* Copies `count` rows of HD elements, `stride` elements apart, and adds rows of zeros until there are `keys`.
 * pair 1: rows (keys, ld) in fp32.
 * pair 2: rows (keys / 2, ld) of words; row j interleaves the bf16 elements of rows 2j and 2j + 1. */
static inline __attribute__((always_inline)) void rows_of(float *rows, const floatX *in, int64_t stride, int64_t count,
                                                          int64_t keys, int HD, int64_t ld, const int pair) {
    for (int64_t j = 0; j < keys; j += pair)
        if (pair == 2) operand_rows(rows + j / 2 * ld, in + j * stride, stride, count - j, HD, ld);
        else widen(rows + j * ld, j < count ? in + j * stride : NULL, HD, ld);
}

/* `heads` query heads from h0 on share their keys. Their queries are the rows of one matrix: row r is query r / heads
 * of head h0 + r % heads. */
static inline __attribute__((always_inline)) void forward_tiles(Case *c, int heads, const int pair) {
    AttentionShape s = shape_of(c);
    int64_t keys = round_up(s.Tk, NR), depth = blocks_of(s.HD, pair), width = round_up(s.HD, VL),
            ld = width + VL; // one more vector, so that rows fall into other cache sets
    float *kt = (float *)page_scratch(c, (size_t)(keys * depth) * sizeof(float)),
          *vs = (float *)page_scratch(c, (size_t)(keys * ld) * sizeof(float));
    float *qs = (float *)page_scratch(c, (size_t)(MR * ld) * sizeof(float)),
          *os = (float *)page_scratch(c, (size_t)(MR * ld) * sizeof(float));
    float *scores = (float *)page_scratch(c, MR * FORWARD_KEYS * sizeof(float));
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h0 = 0; h0 < s.NH; h0 += heads) {
            transposed(kt, X("k") + k_at(&s, b, 0, h0), s.k_stride, s.Tk, s.HD, pair);
            rows_of(vs, X("v") + k_at(&s, b, 0, h0), s.v_stride, s.Tk, keys, s.HD, ld, pair);
            for (int64_t r0 = 0; r0 < (int64_t)s.Tq * heads; r0 += MR) {
                int64_t rows = min_i64(MR, (int64_t)s.Tq * heads - r0), end = keys_seen(&s, (r0 + rows - 1) / heads);
                float max[MR], sum[MR];
                for (int r = 0; r < MR; r++) {
                    const floatX *q = r < rows ? X("q") + q_at(&s, b, (r0 + r) / heads, h0 + (r0 + r) % heads) : NULL;
                    if (pair == 2) operand_row(qs + r * ld, q, s.HD, round_up(depth, VL));
                    else widen(qs + r * ld, q, s.HD, ld);
                    max[r] = -INFINITY;
                    sum[r] = 0;
                }
                memset(os, 0, (size_t)(MR * ld) * sizeof(float));
                for (int64_t k0 = 0; k0 < end; k0 += FORWARD_KEYS) {
                    int64_t n = round_up(min_i64(FORWARD_KEYS, end - k0), VL);
                    tile_matmul(scores, FORWARD_KEYS, qs, ld, 1, kt + k0 * depth, NR, depth, n, depth, 0, pair);
                    for (int r = 0; r < rows; r++) {
                        for (int64_t j = max_i64(0, keys_seen(&s, (r0 + r) / heads) - k0); j < n; j++)
                            scores[r * FORWARD_KEYS + j] = -INFINITY;
                        online_step(scores + r * FORWARD_KEYS, n, 1 / sqrtf((float)s.HD), &max[r], &sum[r], os + r * ld,
                                    ld, pair);
                    }
                    tile_matmul(os, ld, scores, FORWARD_KEYS, 1, vs + k0 / pair * ld, ld, 1, width, n / pair, 1, pair);
                }
                for (int r = 0; r < rows; r++) {
                    int64_t t = (r0 + r) / heads, h = h0 + (r0 + r) % heads;
                    store_row(X("out") + q_at(&s, b, t, h), F("lse") + l_at(&s, b, t, h), os + r * ld, max[r], sum[r],
                              s.HD);
                }
            }
        }
}
static void forward_heads(Case *c) { forward_tiles(c, 1, 1); }
static void forward_groups(Case *c) { forward_tiles(c, (int)(c->size[3] / c->size[4]), 1); }

#ifdef HAVE_PAIRS
static void forward_pairs(Case *c) { forward_tiles(c, (int)(c->size[3] / c->size[4]), 2); }
#define FORWARD_PAIRS                                                                                                  \
    {"6 pairs of bf16",                                                                                                \
     "Q and K stay bf16 and probabilities are rounded to it: one instruction multiplies two of them. For sums over "   \
     "keys, two rows of V are interleaved.",                                                                           \
     forward_pairs},
#define AND_PAIRS ", pairs of bf16"
#else
#define FORWARD_PAIRS
#define AND_PAIRS ""
#endif

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 three ops",
     "Scores, softmax, weighted sum, with all T x T scores of a head each time, although the mask drops almost half of "
     "them.",
     forward_three_ops},
    {"2 online softmax",
     "Key by key with the largest score so far; when it grows, the sums so far are rescaled. There is no T x T tensor, "
     "and masked keys cost nothing.",
     forward_online},
    {"3 vectors",
     "A block of keys at a time, so one rescaling per block, and exponentials and dot products by vectors. But each "
     "score is a sum over a vector's lanes, which costs more than its multiplications.",
     forward_vectors},
    {"4 a tile in registers",
     "K is transposed once per head, so that lanes are keys and no sum crosses lanes; several queries share each load "
     "of K and V.",
     forward_heads},
    {"5 grouped heads",
     "The query heads of one key/value head are rows of the same tiles: K and V are converted and transposed once for "
     "all of them. (With one head per group, as in bench-8m, nothing changes.)",
     forward_groups},
    FORWARD_PAIRS{
        "in use: threads",
        "Blocks of rows divided over threads, those that see most keys first, and a few heads at a time, so "
        "that their K and V stay in the cache. The softmax of a tile computes all rows' maxima first, so that "
        "no row waits for another's sum over lanes. Rows of K and V are prefetched.",
        forward_in_use}};
static void backward_five_matmuls(Case *c) {
    AttentionShape s = shape_of(c);
    const floatX *q = X("q"), *k = X("k"), *v = X("v"), *dout = X("dout");
    int64_t count = (int64_t)s.B * s.Tk * s.NKV * s.HD;
    size_t square = (size_t)s.Tq * (size_t)s.Tk * sizeof(float), bytes = (size_t)count * sizeof(float);
    float *P = (float *)page_scratch(c, square), *dS = (float *)page_scratch(c, square),
          *dq = (float *)page_scratch(c, (size_t)s.HD * sizeof(float));
    float *dk = (float *)memset(page_scratch(c, bytes), 0, bytes),
          *dv = (float *)memset(page_scratch(c, bytes), 0, bytes), scale = 1 / sqrtf((float)s.HD);
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.NH; h++) {
            for (int64_t t = 0; t < s.Tq; t++) {
                float sum = 0;
                for (int64_t j = 0; j < s.Tk; j++) {
                    float score = j < keys_seen(&s, t) ? dot(q + q_at(&s, b, t, h), k + k_at(&s, b, j, h), s.HD) * scale
                                                       : -INFINITY;
                    P[t * s.Tk + j] = score == -INFINITY ? 0 : expf(score - F("lse")[l_at(&s, b, t, h)]);
                    dS[t * s.Tk + j] = dot(dout + q_at(&s, b, t, h), v + k_at(&s, b, j, h), s.HD);
                    sum += P[t * s.Tk + j] * dS[t * s.Tk + j];
                }
                for (int64_t j = 0; j < s.Tk; j++)
                    dS[t * s.Tk + j] = P[t * s.Tk + j] * (dS[t * s.Tk + j] - sum) * scale;
            }
            for (int64_t j = 0; j < s.Tk; j++)
                for (int64_t t = 0; t < s.Tq; t++) {
                    axpy(dv + k_at(&s, b, j, h), P[t * s.Tk + j], dout + q_at(&s, b, t, h), s.HD);
                    axpy(dk + k_at(&s, b, j, h), dS[t * s.Tk + j], q + q_at(&s, b, t, h), s.HD);
                }
            for (int64_t t = 0; t < s.Tq; t++) {
                memset(dq, 0, (size_t)s.HD * sizeof(float));
                for (int64_t j = 0; j < s.Tk; j++) axpy(dq, dS[t * s.Tk + j], k + k_at(&s, b, j, h), s.HD);
                for (int d = 0; d < s.HD; d++) X("dq")[q_at(&s, b, t, h) + d] = from_float(dq[d]);
            }
        }
    for (int64_t n = 0; n < count; n++) {
        X("dk")[n] = from_float(dk[n]);
        X("dv")[n] = from_float(dv[n]);
    }
}

static void rows_query(Case *c, const Query *i) {
    const floatX *q = X("q") + i->at, *dout = X("dout") + i->at, *k = X("k"), *v = X("v");
    int HD = i->s.HD;
    float sum = dot(dout, X("out") + i->at, HD);
    for (int64_t j = 0; j < i->seen; j++) {
        int64_t key = k_at(&i->s, i->b, j, i->h);
        float p = expf(dot(q, k + key, HD) * i->scale - *i->lse), ds = p * (dot(dout, v + key, HD) - sum) * i->scale;
        axpy(i->dv + key, p, dout, HD);
        axpy(i->dk + key, ds, q, HD);
        axpy(i->row, ds, k + key, HD);
    }
    for (int d = 0; d < HD; d++) X("dq")[i->at + d] = from_float(i->row[d]);
}
static void backward_by_rows(Case *c) { each_query(c, rows_query); }

/* In place, for n keys of one row (n: a multiple of VL): the scores q k^T in p become P, and dP in ds becomes
 * dS * scale. scale is 1 / sqrt(HD). */
static inline void p_and_ds(float *p, float *ds, int64_t n, float scale, float lse, float sum) {
    float base = lse == -INFINITY ? 0 : lse; // no key seen: exp(-inf - 0) = 0
    for (int64_t j = 0; j < n; j += VL) {
        vfloat e = vexp(vfma(vload(p + j), vsplat(scale), vsplat(-base)));
        vstore(ds + j, e * ((vload(ds + j) - sum) * scale));
        vstore(p + j, e);
    }
}

static void vectors_backward_query(Case *c, const Query *i) {
    const floatX *q = X("q") + i->at, *dout = X("dout") + i->at, *k = X("k"), *v = X("v");
    int HD = i->s.HD;
    float sum = dot_vectors(dout, X("out") + i->at, HD), p[BACKWARD_KEYS], ds[BACKWARD_KEYS];
    for (int64_t k0 = 0; k0 < i->seen; k0 += BACKWARD_KEYS) {
        int64_t keys = min_i64(BACKWARD_KEYS, i->seen - k0);
        for (int64_t j = 0; j < round_up(keys, VL); j++) {
            int64_t key = k_at(&i->s, i->b, k0 + j, i->h);
            p[j] = j < keys ? dot_vectors(q, k + key, HD) : -INFINITY;
            ds[j] = j < keys ? dot_vectors(dout, v + key, HD) : 0;
        }
        p_and_ds(p, ds, round_up(keys, VL), i->scale, *i->lse, sum);
        for (int64_t j = 0; j < keys; j++) {
            int64_t key = k_at(&i->s, i->b, k0 + j, i->h);
            axpy_vectors(i->dv + key, p[j], dout, HD);
            axpy_vectors(i->dk + key, ds[j], q, HD);
            axpy_vectors(i->row, ds[j], k + key, HD);
        }
    }
    for (int d = 0; d < HD; d += VL) store_x(X("dq") + i->at + d, vload(i->row + d), HD - d);
}
static void backward_vectors(Case *c) { each_query(c, vectors_backward_query); }

/* What tiles of BACKWARD_ROWS rows and BACKWARD_KEYS keys need of a key/value head and of a block of rows. Rows are as
 * in forward_tiles: row i is query i / heads of head h0 + i % heads. */
typedef struct {
    AttentionShape s;
    int64_t heads, b, h0, ld; // ld: floats from one row of HD to the next
    float *kt, *vt;           // (keys / NR, HD, NR) panels: K and V transposed; keys: Tk rounded up to NR
    float *ks, *dk, *dv;      // (keys, ld) K, dK and dV of the key/value head
    int64_t r0, rows, padded; // the block's first row; padded: rows, a multiple of MR
    float *q, *dout, *dq;     // (BACKWARD_ROWS, ld)
    float *p, *ds;            // (BACKWARD_ROWS, BACKWARD_KEYS)
    float lse[BACKWARD_ROWS], sum[BACKWARD_ROWS];
} BackwardTiles;

static int64_t backward_q_at(const BackwardTiles *t, int64_t r) { // of row r of the block
    return q_at(&t->s, t->b, (t->r0 + r) / t->heads, t->h0 + (t->r0 + r) % t->heads);
}

static void backward_load_rows(Case *c, BackwardTiles *t) {
    for (int64_t r = 0; r < t->padded; r++) {
        int64_t i = t->r0 + r, at = backward_q_at(t, r);
        int inside = r < t->rows;
        widen(t->q + r * t->ld, inside ? X("q") + at : NULL, t->s.HD, t->ld);
        widen(t->dout + r * t->ld, inside ? X("dout") + at : NULL, t->s.HD, t->ld);
        t->sum[r] = inside ? dot_vectors(X("dout") + at, X("out") + at, t->s.HD) : 0;
        t->lse[r] = inside ? F("lse")[l_at(&t->s, t->b, i / t->heads, t->h0 + i % t->heads)] : -INFINITY;
    }
}

/* Adds to dQ, dK and dV what the block's rows and keys [k0, k0 + n) contribute. */
static void backward_tile(BackwardTiles *t, int64_t k0, int64_t n) {
    int64_t HD = t->s.HD, ld = t->ld, width = round_up(HD, VL);
    for (int64_t r = 0; r < t->padded; r += MR) {
        float *pr = t->p + r * BACKWARD_KEYS, *dsr = t->ds + r * BACKWARD_KEYS;
        tile_matmul(pr, BACKWARD_KEYS, t->q + r * ld, ld, 1, t->kt + k0 * HD, NR, HD, n, HD, 0, 1);
        tile_matmul(dsr, BACKWARD_KEYS, t->dout + r * ld, ld, 1, t->vt + k0 * HD, NR, HD, n, HD, 0, 1);
        for (int64_t x = 0; x < MR; x++) {
            int64_t seen = r + x < t->rows ? max_i64(0, keys_seen(&t->s, (t->r0 + r + x) / t->heads) - k0) : 0;
            for (int64_t j = seen; j < n; j++) pr[x * BACKWARD_KEYS + j] = -INFINITY;
            p_and_ds(pr + x * BACKWARD_KEYS, dsr + x * BACKWARD_KEYS, n, 1 / sqrtf((float)HD), t->lse[r + x],
                     t->sum[r + x]);
        }
        tile_matmul(t->dq + r * ld, ld, dsr, BACKWARD_KEYS, 1, t->ks + k0 * ld, ld, 1, width, n, 1, 1);
    }
    for (int64_t j = 0; j < n; j += MR) {
        float *dv = t->dv + (k0 + j) * ld, *dk = t->dk + (k0 + j) * ld;
        tile_matmul(dv, ld, t->p + j, 1, BACKWARD_KEYS, t->dout, ld, 1, width, t->padded, 1, 1);
        tile_matmul(dk, ld, t->ds + j, 1, BACKWARD_KEYS, t->q, ld, 1, width, t->padded, 1, 1);
    }
}

static void backward_store_row(floatX *to, const float *from, int64_t HD) {
    for (int64_t d = 0; d < HD; d += VL) store_x(to + d, vload(from + d), HD - d);
}

static void backward_tiles(Case *c, int heads) {
    BackwardTiles t;
    AttentionShape s = shape_of(c);
    int64_t keys = round_up(s.Tk, NR), ld = round_up(s.HD, VL) + VL, G = s.NH / s.NKV, all = (int64_t)s.Tq * heads;
    size_t wide = (size_t)(keys * ld) * sizeof(float), block = (size_t)(BACKWARD_ROWS * ld) * sizeof(float),
           square = BACKWARD_ROWS * BACKWARD_KEYS * sizeof(float);
    t.s = s;
    t.heads = heads;
    t.ld = ld;
    t.kt = (float *)page_scratch(c, wide);
    t.vt = (float *)page_scratch(c, wide);
    t.ks = (float *)page_scratch(c, wide);
    t.dk = (float *)page_scratch(c, wide);
    t.dv = (float *)page_scratch(c, wide);
    t.p = (float *)page_scratch(c, square);
    t.ds = (float *)page_scratch(c, square);
    t.q = (float *)page_scratch(c, block);
    t.dout = (float *)page_scratch(c, block);
    t.dq = (float *)page_scratch(c, block);
    for (int64_t i = 0; i < s.B * (s.NH / heads); i++) {
        t.b = i / (s.NH / heads);
        t.h0 = i % (s.NH / heads) * heads;
        int64_t at = k_at(&s, t.b, 0, t.h0);
        transposed(t.kt, X("k") + at, s.k_stride, s.Tk, s.HD, 1);
        transposed(t.vt, X("v") + at, s.v_stride, s.Tk, s.HD, 1);
        rows_of(t.ks, X("k") + at, s.k_stride, s.Tk, keys, s.HD, ld, 1);
        if (t.h0 % G == 0) {
            memset(t.dk, 0, wide);
            memset(t.dv, 0, wide);
        }
        // The last rows come first. They see the most keys, so each of their probabilities, and what it adds to dK and
        // dV, is small. A sum loses least to rounding if its small terms are added first.
        for (t.r0 = (all - 1) / BACKWARD_ROWS * BACKWARD_ROWS; t.r0 >= 0; t.r0 -= BACKWARD_ROWS) {
            t.rows = min_i64(BACKWARD_ROWS, all - t.r0);
            t.padded = round_up(t.rows, MR);
            int64_t end = keys_seen(&s, (t.r0 + t.rows - 1) / heads);
            backward_load_rows(c, &t);
            memset(t.dq, 0, block);
            for (int64_t k0 = 0; k0 < end; k0 += BACKWARD_KEYS)
                backward_tile(&t, k0, round_up(min_i64(BACKWARD_KEYS, end - k0), NR));
            for (int64_t r = 0; r < t.rows; r++)
                backward_store_row(X("dq") + backward_q_at(&t, r), t.dq + r * ld, s.HD);
        }
        for (int64_t j = 0; j < s.Tk && (t.h0 + heads) % G == 0; j++) {
            backward_store_row(X("dk") + k_at(&s, t.b, j, t.h0), t.dk + j * ld, s.HD);
            backward_store_row(X("dv") + k_at(&s, t.b, j, t.h0), t.dv + j * ld, s.HD);
        }
    }
}
static void backward_heads(Case *c) { backward_tiles(c, 1); }
static void backward_groups(Case *c) { backward_tiles(c, (int)(c->size[3] / c->size[4])); }

static void backward_one_thread(Case *c) {
    int threads = c->on->threads;
    c->on->threads = 1;
    backward_in_use(c);
    c->on->threads = threads;
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 five matmuls",
     "P and dS of a head are T x T tensors, whose elements the later matmuls load again; masked pairs are computed "
     "too.",
     backward_five_matmuls},
    {"2 by rows",
     "P comes from the scores and lse, which forward kept; D comes from dout and out, so dS needs no second pass over "
     "its row. Pair by pair, and only visible pairs.",
     backward_by_rows},
    {"3 vectors",
     "A block of keys of one row at a time, exponentials and dot products by vectors; dK and dV travel to the cache "
     "and back for each query.",
     backward_vectors},
    {"4 tiles in registers",
     "Tiles of 128 rows by 128 keys: their P and dS stay in the L1 or L2 cache, and all five matmuls work on tiles in "
     "registers, those of dK and dV summing over rows.",
     backward_heads},
    {"5 grouped heads",
     "The query heads of one key/value head are rows of the same tiles: K and V are prepared once for all of them, and "
     "longer sums are added to dK and dV.",
     backward_groups},
    {"6 as in use, one thread",
     "No matmul where no row of a tile sees a key; K and V transposed by vectors" AND_PAIRS ".", backward_one_thread},
    {"in use: threads",
     "Blocks of rows divided over threads. Those of one head add to dK and dV in a fixed order, each waiting for its "
     "turn: the same bits for any number of threads. Rows are prefetched.",
     backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
