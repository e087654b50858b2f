/* attention_backward.h: tensors and definition of attention backward, for its pages. */
#ifndef PAGE_ATTENTION_BACKWARD_H
#define PAGE_ATTENTION_BACKWARD_H
#include "attention_shape.h" // defines: shape_of, pairs_of, q_at, k_at, l_at

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

static void compute_out_and_lse(Case *c); // each page's: out and lse of q, k and v

static void backward_prepare(Case *c) {
    static const char *const outputs[] = {"out", "lse"};
    case_to_device(c);
    compute_out_and_lse(c);
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

#endif
