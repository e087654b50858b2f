/* attention.h: tensors, definition and sizes of attention, for attention.c and attention.cu. */
#ifndef PAGE_ATTENTION_H
#define PAGE_ATTENTION_H
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

// ---------------------------------------------------------------------------
// forward

static void forward_case(Case *c) {
    AttentionShape s = shape_of(c);
    reads(c, "q", IN_X, s.B * s.Tq, s.NH * s.HD, 1);
    reads(c, "k", IN_X, s.B * s.Tk, s.NKV * s.HD, 1);
    reads(c, "v", IN_X, s.B * s.Tk, s.NKV * s.HD, 1);
    writes(c, "out", IN_X, s.B * s.Tq, s.NH * s.HD);
    writes(c, "lse", IN_FLOAT, s.B * s.NH * s.Tq, 1);
    c->flops = c->matmul_flops = 4.0 * s.HD * pairs_of(&s);
    // besides the exponential: one FMA that scales and subtracts the largest score, and one addition to the sum
    c->slots = (EXP_SLOTS + 2) * pairs_of(&s);
    if (FLOATX == DTYPE_BF16) {
        c->bound = 6e-3;
        c->row_bound = 16e-3; // probabilities are rounded too, as operands of a bf16 matmul
    }
}

static void forward_definition(Case *c) {
    AttentionShape s = shape_of(c);
    const double *q = D("q"), *k = D("k"), *v = D("v");
    double *out = R("out"), *lse = R("lse"), *p = (double *)checked_malloc((size_t)s.Tk * sizeof(double));
    for (int64_t n = 0; n < s.B * s.Tq; n++) {
        int64_t b = n / s.Tq, t = n % s.Tq, seen = keys_seen(&s, t);
        if (!wanted(c, n, s.B * s.Tq, 4.0 * (double)(s.NH * seen * s.HD))) continue;
        for (int64_t h = 0; h < s.NH; h++) {
            double max = -INFINITY, sum = 0, *o = out + q_at(&s, b, t, h);
            for (int64_t j = 0; j < seen; j++) {
                p[j] = 0;
                for (int64_t d = 0; d < s.HD; d++)
                    p[j] += q[q_at(&s, b, t, h) + d] * k[k_at(&s, b, j, h) + d] / sqrt(s.HD);
                max = fmax(max, p[j]);
            }
            for (int64_t d = 0; d < s.HD; d++) o[d] = 0; // stays 0 if a query sees no key
            for (int64_t j = 0; j < seen; j++) sum += exp(p[j] - max);
            for (int64_t j = 0; j < seen; j++)
                for (int64_t d = 0; d < s.HD; d++) o[d] += exp(p[j] - max) / sum * v[k_at(&s, b, j, h) + d];
            lse[l_at(&s, b, t, h)] = max + log(sum);
        }
    }
    free(p);
}

static void forward_in_use(Case *c) {
    AttentionShape s = shape_of(c);
    void *workspace = page_scratch(c, IMPLEMENTATION(attention_scratch)(c->on, &s, 0));
    IMPLEMENTATION(attention_forward)(c->on, X("out"), F("lse"), X("q"), X("k"), X("v"), &s, workspace);
}

// ---------------------------------------------------------------------------
// backward (Dao et al. 2022, appendix B.2). With P = exp(S - lse) and D = rowsum(dout out), which is rowsum(P dP):
//   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD)
// The code multiplies dS by 1 / sqrt(HD) at once: its `ds` is dS / sqrt(HD).

static void backward_case(Case *c) {
    AttentionShape s = shape_of(c);
    static const char *const of_queries[] = {"q", "dout", "out"}, *const of_keys[] = {"k", "v"};
    for (int i = 0; i < 3; i++) reads(c, of_queries[i], IN_X, s.B * s.Tq, s.NH * s.HD, 1);
    for (int i = 0; i < 2; i++) reads(c, of_keys[i], IN_X, s.B * s.Tk, s.NKV * s.HD, 1);
    reads(c, "lse", IN_FLOAT, s.B * s.NH * s.Tq, 1, 1);
    writes(c, "dq", IN_X, s.B * s.Tq, s.NH * s.HD);
    for (int i = 0; i < 2; i++) writes(c, i == 0 ? "dk" : "dv", IN_X, s.B * s.Tk, s.NKV * s.HD);
    c->flops = c->matmul_flops = 10.0 * s.HD * pairs_of(&s);
    // besides the exponential: one FMA that scales and subtracts lse, dP - D, and the multiplication by P
    c->slots = (EXP_SLOTS + 3) * pairs_of(&s);
    if (FLOATX == DTYPE_BF16) {
        c->bound = 6e-3;
        c->row_bound = 16e-3; // P and dS are rounded too, as operands of bf16 matmuls
    }
}

static void backward_prepare(Case *c) { // out and lse of q, k and v
    static const char *const outputs[] = {"out", "lse"};
    case_to_device(c);
    forward_in_use(c);
    page_wait(c->on);
    for (int i = 0; i < 2 && CUDA_BUILD; i++)
        page_copy(page_find(c, outputs[i])->host, page_find(c, outputs[i])->data, page_bytes(page_find(c, outputs[i])));
    c->on_host = 1;
}

/* *p = P and *ds = dS / sqrt(HD) of one query and one key. */
static void pair_definition(Case *c, const AttentionShape *s, int64_t b, int64_t t, int64_t h, int64_t j, double *p,
                            double *ds) {
    const double *q = D("q") + q_at(s, b, t, h), *out = D("out") + q_at(s, b, t, h),
                 *dout = D("dout") + q_at(s, b, t, h);
    const double *k = D("k") + k_at(s, b, j, h), *v = D("v") + k_at(s, b, j, h);
    double score = 0, dp = 0, sum = 0;
    for (int64_t d = 0; d < s->HD; d++) {
        score += q[d] * k[d] / sqrt(s->HD);
        dp += dout[d] * v[d];
        sum += dout[d] * out[d];
    }
    *p = exp(score - D("lse")[l_at(s, b, t, h)]);
    *ds = *p * (dp - sum) / sqrt(s->HD);
}

static void backward_definition(Case *c) {
    AttentionShape s = shape_of(c);
    double *dq = R("dq"), *dk = R("dk"), *dv = R("dv"), p, ds, pair_flops = 10.0 * (double)s.HD * (double)s.NH;
    for (int64_t n = 0; n < s.B * s.Tq; n++) {
        int64_t b = n / s.Tq, t = n % s.Tq;
        if (!wanted(c, n, s.B * s.Tq, pair_flops * (double)s.Tk)) continue;
        for (int64_t i = 0; i < s.NH * s.HD; i++) dq[n * s.NH * s.HD + i] = 0;
        for (int64_t h = 0; h < s.NH; h++)
            for (int64_t j = 0; j < keys_seen(&s, t); j++) {
                pair_definition(c, &s, b, t, h, j, &p, &ds);
                for (int64_t d = 0; d < s.HD; d++) dq[q_at(&s, b, t, h) + d] += ds * D("k")[k_at(&s, b, j, h) + d];
            }
    }
    for (int64_t n = 0; n < s.B * s.Tk; n++) {
        int64_t b = n / s.Tk, j = n % s.Tk;
        if (!wanted(c, n, s.B * s.Tk, pair_flops * (double)s.Tq)) continue;
        for (int64_t i = 0; i < s.NKV * s.HD; i++) dk[n * s.NKV * s.HD + i] = dv[n * s.NKV * s.HD + i] = 0;
        for (int64_t h = 0; h < s.NH; h++)
            for (int64_t t = 0; t < s.Tq; t++) {
                if (j >= keys_seen(&s, t)) continue;
                pair_definition(c, &s, b, t, h, j, &p, &ds);
                for (int64_t d = 0; d < s.HD; d++) {
                    dk[k_at(&s, b, j, h) + d] += ds * D("q")[q_at(&s, b, t, h) + d];
                    dv[k_at(&s, b, j, h) + d] += p * D("dout")[q_at(&s, b, t, h) + d];
                }
            }
    }
}

static void backward_in_use(Case *c) {
    AttentionShape s = shape_of(c);
    void *workspace = page_scratch(c, IMPLEMENTATION(attention_scratch)(c->on, &s, 1));
    IMPLEMENTATION(attention_backward)
    (c->on, X("dq"), X("dk"), X("dv"), X("dout"), X("out"), F("lse"), X("q"), X("k"), X("v"), &s, workspace);
}

// ---------------------------------------------------------------------------
// the page

// B, Tq, Tk, NH, NKV, HD, q_offset, q_split, q_gap
#define SIZES                                                                                                          \
    {                                                                                                                  \
        {"odd", {2, 133, 301, 6, 2, 50, 60, 65, 108}},                                                                 \
            FOR_CPU({"bench-8m", {8, 256, 256, 6, 6, 48}}, {"bench-125m", {2, 512, 512, 12, 4, 64}},                   \
                    {"1B layer", {1, 1024, 1024, 32, 8, 64}}, {"long", {1, 4096, 4096, 4, 1, 64}},                     \
                    {"long, 1 of 2 ranks", {1, 2048, 4096, 4, 1, 64, 0, 1024, 2048}})                                  \
                FOR_GPU({"tiles", {1, 200, 200, 4, 1, 128}}, {"1B layer", {1, 8192, 8192, 32, 8, 64}},                 \
                        {"8B layer", {1, 8192, 8192, 32, 8, 128}})                                                     \
    }

static const Op forward = {"attention_forward", forward_case, NULL, forward_definition, forward_in_use, SIZES};
static const Op backward = {"attention_backward", backward_case,   backward_prepare,
                            backward_definition,  backward_in_use, SIZES};

#endif
