/* attention_shape.h: shapes, offsets and sizes of attention, for its pages. */
#ifndef PAGE_ATTENTION_SHAPE_H
#define PAGE_ATTENTION_SHAPE_H
#include "page.h"

static AttentionShape shape_of(const Case *c) { // size: B, Tq, Tk, NH, NKV, HD, q_offset, q_split, q_gap
    const int64_t *n = c->size;
    AttentionShape s = {(int)n[0], (int)n[1], (int)n[2], (int)n[3],   (int)n[4],   (int)n[5],   (int)n[6],  (int)n[7],
                        (int)n[8], NULL,      NULL,      n[3] * n[5], n[4] * n[5], n[4] * n[5], n[3] * n[5]};
    return s;
}
/* Visible (query, key) pairs of all heads. */
static double pairs_of(const AttentionShape *s) {
    double pairs = 0;
    for (int64_t t = 0; t < s->Tq; t++) pairs += (double)keys_seen(s, t);
    return pairs * s->B * s->NH;
}
/* The offset of a query's head in q, out, dout and dq. */
static BOTH int64_t q_at(const AttentionShape *s, int64_t b, int64_t t, int64_t h) {
    return ((b * s->Tq + t) * s->NH + h) * s->HD;
}
/* The offset of a key in k, v, dk and dv, in the key/value head that query head h attends to. */
static BOTH int64_t k_at(const AttentionShape *s, int64_t b, int64_t key, int64_t h) {
    return ((b * s->Tk + key) * s->NKV + h / (s->NH / s->NKV)) * s->HD;
}
/* The offset of a query's head in lse. */
static BOTH int64_t l_at(const AttentionShape *s, int64_t b, int64_t t, int64_t h) {
    return (b * s->NH + h) * s->Tq + t;
}

// B, Tq, Tk, NH, NKV, HD, q_offset, q_split, q_gap
#define ATTENTION_SIZES(HD)                                                                                            \
    {                                                                                                                  \
        {"odd", {2, 133, 301, 6, 2, HD, 60, 65, 108}},                                                                 \
            FOR_CPU({"bench-8m", {8, 256, 256, 6, 6, 48}}, {"bench-125m", {2, 512, 512, 12, 4, 64}},                   \
                    {"1B layer", {1, 1024, 1024, 32, 8, 64}}, {"long", {1, 4096, 4096, 4, 1, 64}},                     \
                    {"long, 1 of 2 ranks", {1, 2048, 4096, 4, 1, 64, 0, 1024, 2048}})                                  \
                FOR_GPU({"tiles", {1, 200, 200, 4, 1, 128}}, {"1B layer", {1, 8192, 8192, 32, 8, 64}},                 \
                        {"8B layer", {1, 8192, 8192, 32, 8, 128}})                                                     \
    }

#endif
