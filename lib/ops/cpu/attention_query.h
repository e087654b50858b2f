/* attention_query.h: attention of a single query of each sequence on the CPU, as in generation, where the keys and
 * values of earlier tokens are in a cache. The contract is attention_forward's in lib/ops/ops.h.
 *
 * K and V are read once, where they are, for all query heads that share them. The keys are cut into blocks, which the
 * threads share: each block has a softmax of its own, and the blocks of a head are combined in their order (as in
 * FlashDecoding, Dao et al. 2023). So the result has the same bits for any number of threads.
 *
 * In a program that includes this file, attention_forward uses it for single queries; in others the general kernel.
 * On GPUs the file is empty, because attention_forward has a kernel for single queries there.
 */
#ifndef CPU_ATTENTION_QUERY_H
#define CPU_ATTENTION_QUERY_H
#ifndef USE_CUDA
#include "attention.h" // defines: query_attention, OpStream, AttentionShape, keys_seen
#include "matmul.h"    // defines: WORTH_THREADS
#include "vectors.h"   // defines: vfloat, load_x, store_x, vexp
#include <omp.h>

enum {
    QUERY_KEYS = 128, // in a block
    QUERY_HEADS = 4   // query heads for which a key is read at once
};

/* The layout of one call's work space. */
typedef struct {
    const AttentionShape *s;
    int G;     // query heads that share a key/value head
    int heads; // G rounded up to a multiple of QUERY_HEADS, with zero queries for the additional heads; 1 if G is 1
    int64_t groups; // B * NKV
    int64_t keys;   // visible to the query
    int64_t blocks; // of keys
    int64_t width;  // HD, rounded up to VL
    int64_t part;   // floats of a head's result for one block of keys: `width` outputs, the largest score, the sum
    float *parts;   // (groups, blocks, heads, part)
    float *local;   // (threads, local_floats) queries (heads, width) and scores (heads, QUERY_KEYS) of each thread
    int64_t local_floats;
} QueryAttention;

/* Lays out the work space from `workspace` on; NULL: only computes the size. Returns bytes. */
static size_t query_attention_layout(QueryAttention *a, const AttentionShape *s, int threads, float *workspace) {
    a->s = s;
    a->G = s->NH / s->NKV;
    a->heads = a->G == 1 ? 1 : (int)round_up(a->G, QUERY_HEADS);
    a->groups = (int64_t)s->B * s->NKV;
    a->keys = keys_seen(s, 0);
    a->blocks = blocks_of(a->keys, QUERY_KEYS);
    a->width = round_up(s->HD, VL);
    a->part = a->width + VL;
    a->local_floats = a->heads * (a->width + QUERY_KEYS);
    int64_t parts = a->groups * a->blocks * a->heads * a->part;
    a->parts = workspace;
    a->local = workspace ? workspace + parts : NULL;
    return (size_t)(parts + threads * a->local_floats) * sizeof(float);
}

/* scores[h * QUERY_KEYS] = q (heads, width) times one key, for QUERY_HEADS heads or a single one. */
static inline __attribute__((always_inline)) void score_key(float *scores, const float *q, int64_t width,
                                                            const floatX *k, int HD, const int heads) {
    vfloat sum[QUERY_HEADS] = ZERO;
    for (int64_t d = 0; d < HD; d += VL) {
        vfloat key = load_x(k + d, HD - d);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h] = vfma(vload(q + h * width + d), key, sum[h]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) scores[h * QUERY_KEYS] = vsum(sum[h]);
}

/* out[h * row + d] = the sum over `count` values of weights (heads, QUERY_KEYS) times v (HD), for QUERY_HEADS heads or
 * a single one. Values are `stride` elements apart. */
static inline __attribute__((always_inline)) void weighted_values(float *out, int64_t row, const float *weights,
                                                                  const floatX *v, int64_t stride, int64_t count,
                                                                  int HD, const int heads) {
    for (int64_t d = 0; d < HD; d += VL) {
        vfloat sum[QUERY_HEADS] = ZERO;
        for (int64_t j = 0; j < count; j++) {
            vfloat value = load_x(v + j * stride + d, HD - d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h] = vfma(vsplat(weights[h * QUERY_KEYS + j]), value, sum[h]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) vstore(out + h * row + d, sum[h]);
    }
}

/* The softmax's numerators of one head over a block of `count` keys, in place of the scores; the rest of the last
 * vector becomes 0. Stores the largest score and the sum in max_and_sum. */
static void block_softmax(float *scores, int64_t count, float scale, float *max_and_sum) {
    vfloat largest = vsplat(-INFINITY), total = vsplat(0);
    for (int64_t j = 0; j < count; j += VL) {
        vfloat x = load_fill(scores + j, count - j, -INFINITY) * scale;
        vstore(scores + j, x);
        largest = vmax(largest, x);
    }
    float max = vmax_lane(largest);
    float offset = max == -INFINITY ? 0.0f : max; // every score overflowed: exp(-inf - 0) = 0
    for (int64_t j = 0; j < count; j += VL) {
        vfloat e = vexp(vload(scores + j) - offset);
        vstore(scores + j, e);
        total += e;
    }
    max_and_sum[0] = max;
    max_and_sum[1] = vsum(total);
}

/* One block of keys for all heads of a group. */
static void query_block(const QueryAttention *a, const floatX *q, const floatX *k, const floatX *v, int64_t group,
                        int64_t block, float *local) {
    const AttentionShape *s = a->s;
    int64_t sequence = group / s->NKV, kv_head = group % s->NKV, first = block * QUERY_KEYS;
    int64_t count = min_i64(QUERY_KEYS, a->keys - first), key = sequence * s->Tk + first;
    const floatX *qs = q + sequence * s->q_stride + kv_head * a->G * s->HD;
    const floatX *ks = k + key * s->k_stride + kv_head * s->HD, *vs = v + key * s->v_stride + kv_head * s->HD;
    float *part = a->parts + (group * a->blocks + block) * a->heads * a->part;
    float *scores = local + a->heads * a->width;
    for (int h = 0; h < a->heads; h++)
        for (int64_t d = 0; d < a->width; d += VL)
            vstore(local + h * a->width + d, h < a->G && d < s->HD ? load_x(qs + h * s->HD + d, s->HD - d) : vsplat(0));
    for (int h = 0; h < a->heads; h += QUERY_HEADS) {
        float *of_head = scores + h * QUERY_KEYS;
        for (int64_t j = 0; j < count; j++)
            if (a->heads == 1) score_key(of_head + j, local, a->width, ks + j * s->k_stride, s->HD, 1);
            else score_key(of_head + j, local + h * a->width, a->width, ks + j * s->k_stride, s->HD, QUERY_HEADS);
    }
    for (int h = 0; h < a->heads; h++)
        block_softmax(scores + h * QUERY_KEYS, count, 1.0f / sqrtf((float)s->HD), part + h * a->part + a->width);
    if (a->heads == 1) weighted_values(part, a->part, scores, vs, s->v_stride, count, s->HD, 1);
    for (int h = 0; h < a->heads && a->heads > 1; h += QUERY_HEADS)
        weighted_values(part + h * a->part, a->part, scores + h * QUERY_KEYS, vs, s->v_stride, count, s->HD,
                        QUERY_HEADS);
}

/* Adds up the blocks of one head, each relative to the largest score of all. */
static void query_combine(const QueryAttention *a, floatX *out, float *lse, int64_t group, int h) {
    const AttentionShape *s = a->s;
    const float *parts = a->parts + (group * a->blocks * a->heads + h) * a->part;
    int64_t step = a->heads * a->part, head = group % s->NKV * a->G + h;
    floatX *o = out + group / s->NKV * s->o_stride + head * s->HD;
    float max = -INFINITY, sum = 0;
    for (int64_t b = 0; b < a->blocks; b++) max = fmaxf(max, parts[b * step + a->width]);
    float offset = max == -INFINITY ? 0.0f : max;
    for (int64_t b = 0; b < a->blocks; b++)
        sum = fmaf(parts[b * step + a->width + 1], exp_float(parts[b * step + a->width] - offset), sum);
    float inverse = sum > 0 ? 1.0f / sum : sum; // no key seen: 0; NaN stays NaN
    for (int64_t d = 0; d < s->HD; d += VL) {
        vfloat total = vsplat(0);
        for (int64_t b = 0; b < a->blocks; b++)
            total = vfma(vload(parts + b * step + d), vsplat(exp_float(parts[b * step + a->width] - offset)), total);
        store_x(o + d, total * inverse, s->HD - d);
    }
    lse[group * a->G + h] = sum == 0 ? -INFINITY : max + logf(sum);
}

static void query_attention_forward(OpStream *on, floatX *out, float *lse, const floatX *q, const floatX *k,
                                    const floatX *v, const AttentionShape *s, void *workspace) {
    QueryAttention a;
    query_attention_layout(&a, s, on->threads, (float *)workspace);
#pragma omp parallel num_threads(on->threads) if (a.groups * a.heads * a.keys * a.width >= WORTH_THREADS)
    {
        float *local = a.local + omp_get_thread_num() * a.local_floats;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a.groups * a.blocks; i++) query_block(&a, q, k, v, i / a.blocks, i % a.blocks, local);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a.groups * a.G; i++) query_combine(&a, out, lse, i / a.G, (int)(i % a.G));
    }
}

static size_t query_attention_scratch(const OpStream *on, const AttentionShape *s) {
    QueryAttention a;
    return query_attention_layout(&a, s, on->threads, NULL);
}

__attribute__((constructor)) static void query_attention_use(void) { // before main
    query_attention.scratch = query_attention_scratch;
    query_attention.forward = query_attention_forward;
}
#endif

#endif
