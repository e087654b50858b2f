/* attention_forward.h: tensors and definition of attention forward, for its pages. */
#ifndef PAGE_ATTENTION_FORWARD_H
#define PAGE_ATTENTION_FORWARD_H
#include "attention_shape.h" // defines: shape_of, pairs_of, q_at, k_at, l_at

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

#endif
