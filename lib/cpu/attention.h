/* attention.h: attention on the CPU, never (T, T): blocks of keys with an online softmax (Milakov & Gimelshein 2018,
 * Dao et al. 2022). The contracts are in lib/ops.h. */
#ifndef CPU_ATTENTION_H
#define CPU_ATTENTION_H
#include "../ops_common.h" // defines: AttentionShape, keys_seen
#include "matmul.h"        // defines: tile_matmul
#include "vectors.h"       // defines: vfloat, PAIR, load_x, store_x, vexp
#include <omp.h>
#include <sched.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not call every op
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between static functions only
#endif

enum { // block sizes, all multiples of NR. Where a sum is cut at them they decide bits: fixed, whatever the threads.
    FORWARD_ROWS = 64,
    FORWARD_KEYS = 256, // attention: rows a thread takes at once, keys between two steps of the softmax
    BACKWARD_ROWS = 128,
    BACKWARD_KEYS = 128,
    BACKWARD_STRIPS = BACKWARD_ROWS / (int)MR,
    STRIP_SCORES = BACKWARD_KEYS * (int)MR,
    ITEM_SCORES = BACKWARD_KEYS * BACKWARD_ROWS / (int)PAIR,
    PAIRS_HELD = 4 // (sequence, kv head) pairs a thread whose keys and values are packed at a time
};

// The G = NH / NKV query heads of one key/value head are handled together: row r stands for query r / G of head
// kv * G + r % G, and each (sequence, kv head) has Tq * G rows. K and V are widened once per (sequence, kv head).

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

#pragma GCC diagnostic pop
#endif
