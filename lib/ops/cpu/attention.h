/* attention.h: attention on the CPU, without a (T, T) tensor. The contracts are in lib/ops/ops.h.
 *
 * Keys are visited in blocks with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). The G = NH / NKV
 * query heads that share a key/value head form a group with it; a group has Tq * G rows of queries, row r being query r
 * / G of the group's head r % G. So K and V are prepared once per group and serve all its heads.
 */
#ifndef CPU_ATTENTION_H
#define CPU_ATTENTION_H
#include "../ops_common.h" // defines: AttentionShape, keys_seen
#include "tile.h"          // defines: tile_matmul, PAIR; includes vectors.h: vfloat, MR, NR, load_x, store_x, vexp
#include <omp.h>
#include <sched.h>

/* Block sizes, all multiples of NR. Sums are cut at them, so they never depend on the number of threads. */
enum {
    FORWARD_ROWS = 64,   // rows that a thread takes at once
    FORWARD_KEYS = 256,  // keys between two steps of the online softmax
    BACKWARD_ROWS = 128, // rows and keys of a tile of scores in backward
    BACKWARD_KEYS = 128,
    SCORED_KEYS = (int)MR > (int)VL ? MR : VL,               // a strip's scores are for a multiple of so many keys
    BACKWARD_STRIPS = BACKWARD_ROWS / (int)MR,               // a strip is MR rows, the register tile of a matmul
    STRIP_SCORES = BACKWARD_KEYS * (int)MR,                  // 32-bit words of a strip's scores
    TILE_SCORES = BACKWARD_KEYS * BACKWARD_ROWS / (int)PAIR, // and of a tile's, when PAIR operands share a word
    GROUPS_PER_THREAD = 4                                    // groups whose prepared K and V are in the cache at a time
};

/* The layout of one call's work space.
 *
 * Matmul operands are 32-bit words: a float or, with PAIR = 2, two bf16 that are adjacent along the sum. Where the sum
 * goes over the elements of a head, a row of floatX in memory already is a row of such words. Where it goes over rows
 * (keys or queries), PAIR rows are interleaved. */
typedef struct {
    const AttentionShape *s;
    int G; // query heads of a group
    int backward;
    int64_t groups;   // B * NKV
    int64_t resident; // groups that are worked on at a time
    int64_t rows;     // Tq * G
    int64_t keys;     // Tk, rounded up to NR; K and V are zero beyond Tk
    int64_t blocks;   // keys / BACKWARD_KEYS, rounded up
    int64_t depth;    // words of a head: HD / PAIR, rounded up
    int64_t width;    // HD, rounded up to VL
    int64_t ld;       // floats between rows of fp32: width and one vector, so that rows fall into other cache sets
    int64_t row;      // floats between rows of words
    float scale;      // 1 / sqrt(HD)
    float *kt, *vt;   // (resident, keys / NR, depth, NR) K and V transposed, in panels of NR keys; vt: backward only
    float *kv;        // (resident, keys / PAIR, ld) rows of V in forward, of K in backward, PAIR interleaved
    float *dk, *dv;   // (resident, keys, ld) sums, in backward
    int *turn;        // (resident, blocks) in backward: work items that have added to a block of dk and dv
    float *local;     // (threads, local_floats) each thread's own memory
    int64_t local_floats;
} Attention;

/* A work item of backward: up to BACKWARD_ROWS rows of a group. The buffers that pointers name follow the struct. */
typedef struct {
    float s[STRIP_SCORES], dp[STRIP_SCORES]; // of one strip: scores; dP, then dS
    float p[TILE_SCORES], ds[TILE_SCORES];   // of all rows, PAIR rows interleaved: operands of dV and dK
    float lse[BACKWARD_ROWS], D[BACKWARD_ROWS];
    float *q, *dout;           // (BACKWARD_ROWS, row)
    float *q_rows, *dout_rows; // (BACKWARD_ROWS / PAIR, ld) the same, PAIR rows interleaved
    float *dq;                 // (BACKWARD_ROWS, ld)
    int64_t group, first_row, rows;
    int64_t padded; // rows, rounded up to MR
} __attribute__((aligned(64))) BackwardItem;

// ---------------------------------------------------------------------------
// work space

/* Lays out one call's work space from `base` on. With base NULL it only computes the size. Returns bytes. */
static size_t attention_layout(Attention *a, const AttentionShape *s, int threads, int backward, void *base) {
    memset(a, 0, sizeof *a);
    a->s = s;
    a->backward = backward;
    a->G = s->NH / s->NKV;
    a->groups = (int64_t)s->B * s->NKV;
    a->resident = min_i64(a->groups, GROUPS_PER_THREAD * threads);
    a->rows = (int64_t)s->Tq * a->G;
    a->keys = round_up(s->Tk, NR);
    a->blocks = blocks_of(a->keys, BACKWARD_KEYS);
    a->depth = blocks_of(s->HD, PAIR);
    a->width = round_up(s->HD, VL);
    a->ld = a->width + VL;
    a->row = PAIR == 1 ? a->ld : round_up(a->depth, VL);
    a->scale = 1.0f / sqrtf((float)s->HD);
    a->local_floats = backward ? (int64_t)(sizeof(BackwardItem) / sizeof(float)) + 5 * BACKWARD_ROWS * a->ld
                               : MR * (2 * a->ld + FORWARD_KEYS);
    int64_t panels = a->resident * a->keys * a->depth, sums = a->resident * a->keys * a->ld;
    const struct {
        float **buffer;
        int64_t floats; // a multiple of VL
    } buffers[6] = {{&a->kt, panels},
                    {&a->kv, sums / PAIR},
                    {&a->local, threads * a->local_floats},
                    {&a->vt, backward * panels},
                    {&a->dk, backward * sums},
                    {&a->dv, backward * sums}};
    int64_t floats = 0;
    for (int i = 0; i < 6; i++) {
        if (base) *buffers[i].buffer = (float *)base + floats;
        floats += buffers[i].floats;
    }
    if (base) a->turn = (int *)(void *)((float *)base + floats);
    return (size_t)floats * sizeof(float) + (size_t)(backward * a->resident * a->blocks) * sizeof(int);
}

static_assert((int)NR % (int)SCORED_KEYS == 0, "keys are padded to a multiple of NR only");

/* Attention of a single query of each sequence, in a program that includes attention_query.h to generate faster. */
static struct {
    size_t (*scratch)(const OpStream *, const AttentionShape *);
    void (*forward)(OpStream *, floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                    const AttentionShape *, void *workspace);
} query_attention;

/* Is that what computes the op? Document boundaries are left to this file. */
static inline int is_single_query(const AttentionShape *s) {
    return query_attention.forward && s->Tq == 1 && !s->q_doc;
}

static size_t cpu_attention_scratch(const OpStream *on, const AttentionShape *s, int backward) {
    Attention a;
    if (is_single_query(s) && !backward) return query_attention.scratch(on, s);
    return attention_layout(&a, s, on->threads, backward, NULL);
}

/* Offsets: of a group's row r in q, out and their gradients; of the row in lse; of a key in k, v and their gradients;
 * and of a key among the resident groups' prepared keys. */
static inline int64_t row_at(const Attention *a, int64_t group, int64_t r, int64_t stride) {
    int64_t token = group / a->s->NKV * a->s->Tq + r / a->G, head = group % a->s->NKV * a->G + r % a->G;
    return token * stride + head * a->s->HD;
}
static inline int64_t lse_at(const Attention *a, int64_t group, int64_t r) {
    return (group * a->G + r % a->G) * a->s->Tq + r / a->G;
}
static inline int64_t key_at(const Attention *a, int64_t group, int64_t key, int64_t stride) {
    return (group / a->s->NKV * a->s->Tk + key) * stride + group % a->s->NKV * a->s->HD;
}
static inline int64_t resident_key(const Attention *a, int64_t group, int64_t key) {
    return group % a->resident * a->keys + key;
}

// ---------------------------------------------------------------------------
// operands of matmuls

/* VL words of a row of which n elements are left: bf16 as they are in memory, or floats. */
static inline vfloat operand_load(const floatX *in, int64_t n) {
#ifdef HAVE_PAIRS
    return (vfloat)load_words(in, n);
#else
    return load_x(in, n);
#endif
}

/* out (length words) = in (HD), then zeros; zeros only if in is NULL, for a row that does not exist. */
static void operand_row(float *out, const floatX *in, int HD, int64_t length) {
    for (int64_t i = 0; i < length; i += VL)
        vstore(out + i, in && i * PAIR < HD ? operand_load(in + i * PAIR, HD - i * PAIR) : vsplat(0));
}

/* out (length words) = PAIR rows of HD elements, interleaved. `count` of the rows exist, `stride` elements apart; the
 * others and the elements beyond HD are zeros. */
static void operand_rows(float *out, const floatX *in, int64_t stride, int64_t count, int HD, int64_t length) {
#ifdef HAVE_PAIRS
    vuint none = ZERO;
    for (int64_t i = 0; i < length; i += VL) {
        vuint even = count > 0 && i < HD ? load_bits(in + i, HD - i) : none;
        vuint odd = count > 1 && i < HD ? load_bits(in + stride + i, HD - i) : none;
        vstore(out + i, (vfloat)(even | odd << 16));
    }
#else
    (void)stride;
    operand_row(out, count > 0 ? in : NULL, HD, length);
#endif
}

/* Transposes VL x VL words in registers: step h exchanges bit h of the lane number with bit h of the row number. */
static inline __attribute__((always_inline)) void transpose(vfloat *x) {
#pragma GCC unroll 4
    for (int h = 1; h < VL; h *= 2) {
        const vint lane = {LANE_NUMBERS}, upper = lane + (((lane & h) != 0) & (VL - h)), lower = upper + h;
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++)
            if (!(i & h)) {
                vfloat a = x[i], b = x[i + h];
                x[i] = vpick(a, b, upper);
                x[i + h] = vpick(a, b, lower);
            }
    }
}

/* panel (depth, NR) = `count` rows of HD elements transposed, `stride` elements apart; zeros for rows beyond count. */
static void operand_panel(float *panel, const floatX *in, int64_t stride, int64_t count, int HD) {
    int64_t depth = blocks_of(HD, PAIR);
    for (int64_t j = 0; j < NR; j += VL)
        for (int64_t d = 0; d < depth; d += VL) {
            vfloat x[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                x[i] = j + i < count ? operand_load(in + (j + i) * stride + d * PAIR, HD - d * PAIR) : vsplat(0);
            transpose(x);
            for (int i = 0; i < VL && d + i < depth; i++) vstore(panel + (d + i) * NR + j, x[i]);
        }
}

/* Stores x as elements j … j + VL - 1 of a row of operands. The row may overwrite the floats that x came from: it is no
 * longer than they are, so it never reaches floats that are still to be read. */
static inline void operand_store(float *row, int64_t j, vfloat x) {
    if (PAIR == 1) vstore(row + j, x);
    else store_x((floatX *)(void *)row + j, x, VL);
}

/* Stores PAIR rows x[], interleaved. */
static inline void operand_store_rows(float *out, const vfloat *x) {
#ifdef HAVE_PAIRS
    vstore(out, (vfloat)vround_pair(x[0], x[1]));
#else
    vstore(out, x[0]);
#endif
}

/* Rows of a head are too far apart for the hardware's prefetcher. */
static inline void prefetch_row(const floatX *row, int HD) {
    int cache_line = 64 / (int)sizeof *row;
    for (int64_t d = 0; d < HD; d += cache_line) __builtin_prefetch(row + d);
}

/* Prepares K and V of groups first … last - 1. Called by all threads of a parallel region, which share the work. */
static void attention_pack(const Attention *a, const floatX *k, const floatX *v, int64_t first, int64_t last) {
    const AttentionShape *s = a->s;
    int64_t panels = a->keys / NR;
#pragma omp for
    for (int64_t i = first * panels; i < last * panels; i++) {
        int64_t group = i / panels, key = i % panels * NR, count = min_i64(NR, s->Tk - key);
        int64_t at = resident_key(a, group, key);
        const floatX *kp = k + key_at(a, group, key, s->k_stride), *vp = v + key_at(a, group, key, s->v_stride);
        for (int64_t j = key + NR; j < min_i64(key + 2 * NR, s->Tk); j++) {
            prefetch_row(k + key_at(a, group, j, s->k_stride), s->HD);
            prefetch_row(v + key_at(a, group, j, s->v_stride), s->HD);
        }
        operand_panel(a->kt + at * a->depth, kp, s->k_stride, count, s->HD);
        const floatX *rows = a->backward ? kp : vp;
        int64_t stride = a->backward ? s->k_stride : s->v_stride;
        for (int64_t j = 0; j < NR; j += PAIR)
            operand_rows(a->kv + (at + j) / PAIR * a->ld, rows + j * stride, stride, count - j, s->HD, a->ld);
        if (!a->backward) continue;
        operand_panel(a->vt + at * a->depth, vp, s->v_stride, count, s->HD);
        memset(a->dk + at * a->ld, 0, (size_t)(NR * a->ld) * sizeof(float));
        memset(a->dv + at * a->ld, 0, (size_t)(NR * a->ld) * sizeof(float));
        if (key == 0) memset(a->turn + group % a->resident * a->blocks, 0, (size_t)a->blocks * sizeof(int));
    }
}

// ---------------------------------------------------------------------------
// the mask

/* How many keys a group's row r sees by position; 0 for rows beyond the last. It never decreases with r. */
static inline int64_t visible_keys(const Attention *a, int64_t r) {
    return r >= a->rows ? 0 : keys_seen(a->s, r / a->G);
}

/* The first key below `end` that shares a document with any of rows [r0, r1), rounded down to a multiple of NR; `end`
 * if there is none. Blocks of keys before it are skipped. */
static int64_t first_key(const Attention *a, int64_t group, int64_t r0, int64_t r1, int64_t end) {
    const AttentionShape *s = a->s;
    if (!s->q_doc) return 0;
    const int32_t *q_doc = s->q_doc + group / s->NKV * s->Tq, *k_doc = s->k_doc + group / s->NKV * s->Tk;
    for (int64_t key = 0; key < end; key += NR) {
        int any = 0, count = (int)min_i64(NR, end - key);
        for (int64_t t = r0 / a->G; t <= (r1 - 1) / a->G; t++)
            for (int j = 0; j < count; j++) any |= k_doc[key + j] == q_doc[t]; // no early exit: gcc vectorizes this
        if (any) return key;
    }
    return end;
}

/* Masks the scores of one row against keys k0 … k0 + n - 1 (n a multiple of VL): -infinity where the row does not see
 * the key. */
static inline void mask_scores(const Attention *a, int64_t group, int64_t r, float *scores, int64_t k0, int64_t n) {
    const AttentionShape *s = a->s;
    int64_t visible = max_i64(0, min_i64(n, visible_keys(a, r) - k0));
    const vint lane = {LANE_NUMBERS};
    for (int64_t j = visible / VL * VL; j < n; j += VL)
        vstore(scores + j, vselect(lane < (int32_t)(visible - j), vload(scores + j), vsplat(-INFINITY)));
    if (!s->q_doc || !visible) return;
    const int32_t *k_doc = s->k_doc + group / s->NKV * s->Tk + k0, doc = s->q_doc[group / s->NKV * s->Tq + r / a->G];
    for (int64_t j = 0; j < visible; j++) scores[j] = k_doc[j] == doc ? scores[j] : -INFINITY;
}

// ---------------------------------------------------------------------------
// forward

/* One step of the online softmax, for MR rows and n more keys. With m the largest scaled score of a row so far:
 *   scores (MR, FORWARD_KEYS) become exp(scale * score - m), as operands of the matmul with V;
 *   out (MR, ld) and sum (MR), which are relative to the previous m, are rescaled to the new one.
 * All maxima are computed first, so that no row waits for the reduction over lanes of the row before it. */
static inline void softmax_step(float *scores, int64_t n, float scale, float *max, float *sum, float *out, int64_t ld) {
    float base[MR], rescale[MR];
    for (int r = 0; r < MR; r++) {
        vfloat m = vsplat(-INFINITY);
        for (int64_t j = 0; j < n; j += VL) m = vmax(m, vload(scores + r * FORWARD_KEYS + j));
        float largest = vmax_lane(m) * scale, new_max = largest > max[r] ? largest : max[r];
        base[r] = new_max == -INFINITY ? 0.0f : new_max;          // no key seen yet: exp(-inf - 0) = 0
        int unchanged = new_max == max[r] || max[r] == -INFINITY; // before the first key, out and sum are 0
        rescale[r] = unchanged ? 1.0f : exp_float(max[r] - base[r]);
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
        if (rescale[r] == 1.0f) continue;
        for (int64_t i = 0; i < ld; i += VL) vstore(out + r * ld + i, vload(out + r * ld + i) * rescale[r]);
    }
}

/* One strip: MR rows from r0 on. local: out (MR, ld), scores (MR, FORWARD_KEYS), q (MR, row). */
static void attention_forward_strip(const Attention *a, floatX *out, float *lse, const floatX *q, int64_t group,
                                    int64_t r0, float *local) {
    const AttentionShape *s = a->s;
    float *os = local, *scores = os + MR * a->ld, *qs = scores + MR * (int)FORWARD_KEYS, max[MR], sum[MR];
    int64_t rows = min_i64(MR, a->rows - r0), end = visible_keys(a, r0 + rows - 1);
    memset(os, 0, (size_t)(MR * a->ld) * sizeof *os);
    for (int r = 0; r < MR; r++) {
        operand_row(qs + r * a->row, r < rows ? q + row_at(a, group, r0 + r, s->q_stride) : NULL, s->HD, a->row);
        max[r] = -INFINITY;
        sum[r] = 0;
    }
    for (int64_t k0 = first_key(a, group, r0, r0 + rows, end); k0 < end; k0 += FORWARD_KEYS) {
        int64_t n = round_up(min_i64(FORWARD_KEYS, end - k0), VL), at = resident_key(a, group, k0);
        tile_matmul(scores, FORWARD_KEYS, qs, a->row, 1, a->kt + at * a->depth, NR, a->depth, n, a->depth, 0, PAIR);
        for (int r = 0; r < MR; r++) mask_scores(a, group, r0 + r, scores + r * FORWARD_KEYS, k0, n);
        softmax_step(scores, n, a->scale, max, sum, os, a->ld);
        tile_matmul(os, a->ld, scores, FORWARD_KEYS, 1, a->kv + at / PAIR * a->ld, a->ld, 1, a->width, n / PAIR, 1,
                    PAIR);
    }
    for (int r = 0; r < rows; r++) {
        floatX *o = out + row_at(a, group, r0 + r, s->o_stride);
        float inverse = sum[r] > 0 ? 1.0f / sum[r] : sum[r]; // no key seen: 0; NaN stays NaN
        for (int64_t d = 0; d < s->HD; d += VL) store_x(o + d, vload(os + r * a->ld + d) * inverse, s->HD - d);
        lse[lse_at(a, group, r0 + r)] = sum[r] == 0 ? -INFINITY : max[r] + logf(sum[r]);
    }
}

static void cpu_attention_forward(OpStream *on, floatX *out, float *lse, const floatX *q, const floatX *k,
                                  const floatX *v, const AttentionShape *s, void *workspace) {
    Attention a;
    if (is_single_query(s)) {
        query_attention.forward(on, out, lse, q, k, v, s, workspace);
        return;
    }
    attention_layout(&a, s, on->threads, 0, workspace);
    int64_t tiles = blocks_of(a.rows, FORWARD_ROWS);
#pragma omp parallel num_threads(on->threads)
    for (int64_t first = 0; first < a.groups; first += a.resident) {
        int64_t resident = min_i64(a.resident, a.groups - first);
        attention_pack(&a, k, v, first, first + resident);
#pragma omp for schedule(dynamic)
        for (int64_t i = tiles * resident - 1; i >= 0; i--) { // from the end: the last rows see the most keys
            int64_t row = i / resident * FORWARD_ROWS, end = min_i64(a.rows, row + FORWARD_ROWS);
            float *local = a.local + omp_get_thread_num() * a.local_floats;
            for (int64_t r = row; r < end; r += MR)
                attention_forward_strip(&a, out, lse, q, first + i % resident, r, local);
        }
    }
}

// ---------------------------------------------------------------------------
// backward
//
// A work item owns the dQ of its rows. Items of a group add to the same dK and dV: to each block of keys in a fixed
// order, the last rows first, each item waiting for its turn. So the sums have the same bits for any number of threads.

/* Begins the item of a group's rows from first_row on: loads their q, dout and lse, and computes
 * D = rowsum(dout * out). */
static void backward_item_load(const Attention *a, BackwardItem *it, int64_t group, int64_t first_row, const floatX *q,
                               const floatX *dout, const floatX *out, const float *lse) {
    const AttentionShape *s = a->s;
    int64_t buffer = BACKWARD_ROWS * a->ld;
    it->group = group;
    it->first_row = first_row;
    it->rows = min_i64(BACKWARD_ROWS, a->rows - first_row);
    it->padded = round_up(it->rows, MR);
    it->q = (float *)(it + 1);
    it->dout = it->q + buffer;
    it->dq = it->dout + buffer;
    it->q_rows = PAIR == 1 ? it->q : it->dq + buffer;
    it->dout_rows = PAIR == 1 ? it->dout : it->q_rows + buffer;
    memset(it->dq, 0, (size_t)(it->padded * a->ld) * sizeof(float));
    for (int64_t r = 0; r < it->padded; r++) {
        int64_t row = first_row + r, exists = r < it->rows;
        int64_t q_at = row_at(a, group, row, s->q_stride), at = row_at(a, group, row, s->o_stride);
        if (r + MR < it->rows) {
            int64_t ahead = row_at(a, group, row + MR, s->o_stride);
            prefetch_row(q + row_at(a, group, row + MR, s->q_stride), s->HD);
            prefetch_row(dout + ahead, s->HD);
            prefetch_row(out + ahead, s->HD);
        }
        operand_row(it->q + r * a->row, exists ? q + q_at : NULL, s->HD, a->row);
        operand_row(it->dout + r * a->row, exists ? dout + at : NULL, s->HD, a->row);
        if (PAIR == 2 && r % 2 == 0) { // the next row may be the next token's first head: its distance varies
            int64_t count = it->rows - r, next = row + (count > 1);
            int64_t q_step = row_at(a, group, next, s->q_stride) - q_at;
            int64_t dout_step = row_at(a, group, next, s->o_stride) - at;
            operand_rows(it->q_rows + r / 2 * a->ld, q + q_at, q_step, count, s->HD, a->ld);
            operand_rows(it->dout_rows + r / 2 * a->ld, dout + at, dout_step, count, s->HD, a->ld);
        }
        vfloat dot = vsplat(0);
        for (int64_t i = 0; exists && i < s->HD; i += VL)
            dot = vfma(load_x(out + at + i, s->HD - i), load_x(dout + at + i, s->HD - i), dot);
        it->D[r] = vsum(dot);
        it->lse[r] = exists ? lse[lse_at(a, group, row)] : -INFINITY;
    }
}

/* S and dP of the strip that begins with row r, for n keys from k0 on (a multiple of SCORED_KEYS); then
 * P = exp(S - lse) and dS = P (dP - D), multiplied by 1 / sqrt(HD) here, once for both dQ and dK. */
static void backward_scores(const Attention *a, BackwardItem *it, int64_t r, int64_t k0, int64_t n) {
    int64_t panels = resident_key(a, it->group, k0) * a->depth;
    tile_matmul(it->s, BACKWARD_KEYS, it->q + r * a->row, a->row, 1, a->kt + panels, NR, a->depth, n, a->depth, 0,
                PAIR);
    tile_matmul(it->dp, BACKWARD_KEYS, it->dout + r * a->row, a->row, 1, a->vt + panels, NR, a->depth, n, a->depth, 0,
                PAIR);
    for (int64_t i = 0; i < MR; i += PAIR) {
        float base[PAIR]; // -lse, or 0 where a row sees no key: exp(-inf - 0) = 0
        for (int x = 0; x < PAIR; x++) {
            base[x] = it->lse[r + i + x] == -INFINITY ? 0 : -it->lse[r + i + x];
            mask_scores(a, it->group, it->first_row + r + i + x, it->s + (i + x) * BACKWARD_KEYS, k0, n);
        }
        for (int64_t j = 0; j < n; j += VL) {
            vfloat p[PAIR], ds[PAIR];
            for (int x = 0; x < PAIR; x++) {
                float *s = it->s + (i + x) * BACKWARD_KEYS, *dp = it->dp + (i + x) * BACKWARD_KEYS;
                p[x] = vexp(vfma(vload(s + j), vsplat(a->scale), vsplat(base[x])));
                ds[x] = p[x] * ((vload(dp + j) - it->D[r + i + x]) * a->scale);
                operand_store(dp, j, ds[x]);
            }
            operand_store_rows(it->p + (r + i) / PAIR * BACKWARD_KEYS + j, p);
            operand_store_rows(it->ds + (r + i) / PAIR * BACKWARD_KEYS + j, ds);
        }
    }
}

/* dV += P^T dO and dK += dS^T Q for `keys` keys, whose first is resident key `base`. computed[] says for how many keys
 * each strip has scores; the first strips may not see the later keys. */
static void backward_add_keys(const Attention *a, BackwardItem *it, int64_t base, int64_t keys,
                              const int64_t *computed) {
    int64_t ld = a->ld;
    for (int64_t j = 0; j < keys; j += MR) {
        int64_t r = 0, at = (base + j) * ld;
        while (computed[r / MR] <= j) r += MR;
        int64_t scores = r / PAIR * BACKWARD_KEYS + j, rows = r / PAIR * ld, depth = (it->padded - r) / PAIR;
        tile_matmul(a->dv + at, ld, it->p + scores, 1, BACKWARD_KEYS, it->dout_rows + rows, ld, 1, a->width, depth, 1,
                    PAIR);
        tile_matmul(a->dk + at, ld, it->ds + scores, 1, BACKWARD_KEYS, it->q_rows + rows, ld, 1, a->width, depth, 1,
                    PAIR);
    }
}

/* `order`: how many items of this group add to dK and dV before this one. */
static void attention_backward_item(const Attention *a, BackwardItem *it, floatX *dq, int order) {
    const AttentionShape *s = a->s;
    int64_t last_row = it->first_row + it->rows - 1, end = visible_keys(a, last_row), ld = a->ld;
    int64_t begin = first_key(a, it->group, it->first_row, last_row + 1, end);
    int *turn = a->turn + it->group % a->resident * a->blocks;
    for (int64_t k0 = 0; k0 < end; k0 += BACKWARD_KEYS, turn++) {
        int64_t keys = min_i64(BACKWARD_KEYS, end - k0), base = resident_key(a, it->group, k0);
        int64_t computed[BACKWARD_STRIPS];
        int visible = k0 + keys > begin; // not a block of another document
        for (int64_t r = 0; r < it->padded && visible; r += MR) {
            int64_t strip_end = visible_keys(a, it->first_row + min_i64(r + MR, it->rows) - 1);
            int64_t n = round_up(max_i64(0, min_i64(keys, strip_end - k0)), SCORED_KEYS);
            computed[r / MR] = n;
            backward_scores(a, it, r, k0, n);
            tile_matmul(it->dq + r * ld, ld, it->dp, BACKWARD_KEYS, 1, a->kv + base / PAIR * ld, ld, 1, a->width,
                        n / PAIR, 1, PAIR);
        }
        for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != order; spins++)
            if (spins > 1000) sched_yield();
        if (visible) backward_add_keys(a, it, base, keys, computed);
        __atomic_store_n(turn, order + 1, __ATOMIC_RELEASE);
    }
    for (int64_t r = 0; r < it->rows; r++) {
        floatX *to = dq + row_at(a, it->group, it->first_row + r, s->q_stride);
        for (int64_t d = 0; d < s->HD; d += VL) store_x(to + d, vload(it->dq + r * ld + d), s->HD - d);
    }
}

/* Rounds the finished sums of dK and dV of groups first … last - 1. Called by all threads of a parallel region. */
static void backward_store_keys(const Attention *a, floatX *dk, floatX *dv, int64_t first, int64_t last) {
    const AttentionShape *s = a->s;
    int64_t Tk = s->Tk;
#pragma omp for
    for (int64_t i = first * Tk; i < last * Tk; i++) {
        int64_t group = i / Tk, key = i % Tk, at = resident_key(a, group, key) * a->ld;
        floatX *dk_row = dk + key_at(a, group, key, s->k_stride), *dv_row = dv + key_at(a, group, key, s->v_stride);
        for (int64_t d = 0; d < s->HD; d += VL) {
            store_x(dk_row + d, vload(a->dk + at + d), s->HD - d);
            store_x(dv_row + d, vload(a->dv + at + d), s->HD - d);
        }
    }
}

static void cpu_attention_backward(OpStream *on, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                   const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *workspace) {
    Attention a;
    attention_layout(&a, s, on->threads, 1, workspace);
    int64_t tiles = blocks_of(a.rows, BACKWARD_ROWS);
#pragma omp parallel num_threads(on->threads)
    for (int64_t first = 0; first < a.groups; first += a.resident) {
        int64_t resident = min_i64(a.resident, a.groups - first);
        attention_pack(&a, k, v, first, first + resident);
        // Items start in the order of this loop, and each waits only for items that started before it: no deadlock,
        // whatever the number of threads.
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t i = 0; i < tiles * resident; i++) {
            BackwardItem *it = (BackwardItem *)(void *)(a.local + omp_get_thread_num() * a.local_floats);
            int64_t order = i / resident;
            backward_item_load(&a, it, first + i % resident, (tiles - 1 - order) * BACKWARD_ROWS, q, dout, out, lse);
            attention_backward_item(&a, it, dq, (int)order);
        }
        backward_store_keys(&a, dk, dv, first, first + resident);
    }
}

#endif
