/* test_attention.h: attention forward and backward against its definition: grouped heads, documents, tiles of all
 * kinds, and the two halves of a context-parallel rank's tokens. Part of test_llama3.cu. */

/* docs 1: of random lengths; 2: some queries' match nothing; 3: a query has its key's, boundaries at and beside tiles'
 * edges, documents of one token. spare: unused keys behind the last sequence; 8: gaps between rows that tensor cores
 * take. */
typedef struct {
    int B, Tq, Tk, NH, NKV, HD, q_offset, docs, spare;
    double scale;
} AttentionCase;
typedef struct {
    AttentionCase all;
    int q_split, q_gap;
} ChunkCase;

static int test_sees(const AttentionShape *s, int b, int t, int key) {
    return key <= s->q_offset + (t < s->q_split ? t : t + s->q_gap) &&
           (!s->q_doc || s->q_doc[b * s->Tq + t] == s->k_doc[b * s->Tk + key]);
}

/* out, lse, dq, dk, dv by their definition; every array dense: (B,T,heads,HD). */
static void attention_reference(const AttentionShape *s, const double *q, const double *k, const double *v,
                                const double *dout, double *out, double *lse, double *dq, double *dk, double *dv,
                                double *p) {
    int HD = s->HD;
    for (int b = 0; b < s->B; b++)
        for (int h = 0; h < s->NH; h++)
            for (int t = 0; t < s->Tq; t++) {
                int64_t at = (((int64_t)b * s->Tq + t) * s->NH + h) * HD;
                double max = -INFINITY, sum = 0, D = 0;
                for (int j = 0; j < s->Tk; j++) {
                    const double *kj = k + (((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD;
                    p[j] = test_sees(s, b, t, j) ? 0 : -INFINITY;
                    for (int d = 0; d < HD && p[j] > -INFINITY; d++) p[j] += q[at + d] * kj[d] / sqrt(HD);
                    max = fmax(max, p[j]);
                }
                for (int j = 0; j < s->Tk; j++) sum += p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - max);
                lse[((int64_t)b * s->NH + h) * s->Tq + t] = sum > 0 ? max + log(sum) : -INFINITY;
                for (int j = 0; j < s->Tk; j++)
                    for (int d = 0; d < HD && p[j] > 0; d++)
                        out[at + d] +=
                            p[j] / sum * v[(((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD + d];
                for (int d = 0; d < HD; d++) D += out[at + d] * dout[at + d];
                for (int j = 0; j < s->Tk; j++) {
                    int64_t kat = (((int64_t)b * s->Tk + j) * s->NKV + h / (s->NH / s->NKV)) * HD;
                    double dp = 0;
                    if (p[j] == 0) continue;
                    for (int d = 0; d < HD; d++) dp += dout[at + d] * v[kat + d];
                    for (int d = 0; d < HD; d++) {
                        double ds = p[j] / sum * (dp - D) / sqrt(HD);
                        dq[at + d] += ds * k[kat + d];
                        dk[kat + d] += ds * q[at + d];
                        dv[kat + d] += p[j] / sum * dout[at + d];
                    }
                }
            }
}

static double *test_widen(KernelTest *t, const floatX *x, int B, int T, int64_t batch, int64_t stride,
                          int width) { // dense (B,T,width)
    double *y = test_doubles(t, (int64_t)B * T * width);
    for (int b = 0; b < B; b++)
        for (int n = 0; n < T; n++)
            for (int i = 0; i < width; i++)
                y[((int64_t)b * T + n) * width + i] = to_float(x[b * batch + n * stride + i]);
    return y;
}

static int32_t *test_documents(KernelTest *t, int B, int T, int nowhere) {
    int32_t *doc = (int32_t *)test_alloc(t, B * T * 4), id = 3;
    for (int i = 0; i < B * T; i++) {
        if (test_random(t) > 0.9) id++;
        int in_no_document = nowhere && i % 5 == 0;
        if (!in_no_document && i % T == 0) id = 3;
        doc[i] = in_no_document ? -7 : id;
    }
    return doc;
}

/* Those of all keys, and of queries where their own keys are. */
static int32_t *test_cut_documents(KernelTest *t, int B, int T) {
    const int lengths[] = {64, 64, 1,   1,   1, 61, 63,
                           1,  1,  127, 128, 1, 40}; // ends at 64, 128, 129, 130, 131, 192, 255, 256, 257, 384, …
    int32_t *doc = (int32_t *)test_alloc(t, B * T * 4);
    for (int b = 0; b < B; b++)
        for (int i = 0, id = 0, left = lengths[0]; i < T; i++, left--) {
            if (!left) left = lengths[++id % 13];
            doc[b * T + i] = id;
        }
    return doc;
}
static int32_t *test_documents_of_queries(KernelTest *t, const AttentionShape *s) {
    int32_t *doc = (int32_t *)test_alloc(t, s->B * s->Tq * 4);
    for (int b = 0; b < s->B; b++)
        for (int q = 0; q < s->Tq; q++) {
            int at = s->q_offset + q + (q >= s->q_split ? s->q_gap : 0);
            doc[b * s->Tq + q] = at >= 0 && at < s->Tk ? s->k_doc[b * s->Tk + at] : -1;
        }
    return doc;
}

static void test_attention_case(KernelTest *t, const AttentionCase *c, int q_split, int q_gap, double *worst_lse,
                                int *bad_empty) {
    const int XS = (int)sizeof(floatX), fused = c->Tq == c->Tk && !c->spare, kw = c->NKV * c->HD, qw = c->NH * c->HD;
    test_shape(t,
               "attention (B %d, Tq %d, Tk %d, NH %d, NKV %d, HD %d, q_offset %d, %d further from %d on, documents %d, "
               "spare %d)",
               c->B, c->Tq, c->Tk, c->NH, c->NKV, c->HD, c->q_offset, q_gap, q_split, c->docs, c->spare);
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = c->B;
    s.Tq = c->Tq;
    s.Tk = c->Tk;
    s.NH = c->NH;
    s.NKV = c->NKV;
    s.HD = c->HD;
    s.q_offset = c->q_offset;
    s.q_split = q_split;
    s.q_gap = q_gap;
    if (c->docs == 3) {
        s.k_doc = test_cut_documents(t, c->B, c->Tk);
        s.q_doc = test_documents_of_queries(t, &s);
    } else if (c->docs) {
        s.k_doc = test_documents(t, c->B, c->Tk, 0);
        s.q_doc = c->Tq == c->Tk && c->docs == 1 ? s.k_doc : test_documents(t, c->B, c->Tq, c->docs == 2);
    }
    int q_spare = c->spare == 8 ? 8 : 3, k_spare = c->spare == 8 ? 8 : 5;
    s.q_stride = fused ? qw + 2 * kw : qw + q_spare;
    s.k_stride = s.v_stride = fused ? qw + 2 * kw : kw + k_spare;
    s.o_stride = qw + c->spare;
    int64_t q_batch = c->Tq * s.q_stride, kv_batch = c->Tk * s.k_stride, N = (int64_t)c->B * c->Tq;
    int64_t q_size = c->B * q_batch, kv_size = fused ? 0 : c->B * (c->Tk + c->spare) * s.k_stride,
            total = q_size + 2 * kv_size;
    floatX *qkv = test_xs(t, total, c->scale), *q = qkv, *k = fused ? q + qw : q + q_size,
           *v = fused ? k + kw : k + kv_size;
    floatX *dout = test_xs(t, N * s.o_stride, 1), *first_out = NULL, *first_d = NULL;
    float *first_lse = NULL;
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        floatX *out = test_xs(t, N * s.o_stride, 1), *d = (floatX *)test_copy(t, qkv, total * XS);
        memset(out, 0, (size_t)(N * s.o_stride * XS)); // what lies between rows is compared below
        float *lse = test_floats(t, N * c->NH, 1);
        attention_forward(&t->dev[threads], out, lse, q, k, v, &s);
        attention_backward(&t->dev[threads], d, d + (k - q), d + (v - q), dout, out, lse, q, k, v, &s);
        if (!first_out) {
            first_out = out;
            first_lse = lse;
            first_d = d;
        }
        test_same(t, out, first_out, N * s.o_stride * XS);
        test_same(t, lse, first_lse, N * c->NH * 4);
        test_same(t, d, first_d, total * XS); // unused keys and gaps hold what they held
    }
    floatX *quick = (floatX *)test_copy(t, qkv, total * XS); // where the order of a sum may differ from run to run
    t->dev[1].deterministic = 0;
    attention_backward(&t->dev[1], quick, quick + (k - q), quick + (v - q), dout, first_out, first_lse, q, k, v, &s);
    t->dev[1].deterministic = 1;
    double *qd = test_widen(t, q, c->B, c->Tq, q_batch, s.q_stride, qw),
           *kd = test_widen(t, k, c->B, c->Tk, fused ? q_batch : kv_batch, s.k_stride, kw);
    double *vd = test_widen(t, v, c->B, c->Tk, fused ? q_batch : kv_batch, s.v_stride, kw),
           *dd = test_widen(t, dout, c->B, c->Tq, c->Tq * s.o_stride, s.o_stride, qw);
    double *out = test_doubles(t, N * qw), *lse = test_doubles(t, N * c->NH), *p = test_doubles(t, c->Tk);
    double *dq = test_doubles(t, N * qw), *dk = test_doubles(t, (int64_t)c->B * c->Tk * kw),
           *dv = test_doubles(t, (int64_t)c->B * c->Tk * kw);
    attention_reference(&s, qd, kd, vd, dd, out, lse, dq, dk, dv, p);
    test_compare(t, first_out, 1, s.o_stride, out, N, qw);
    for (int b = 0; b < c->B; b++) {
        test_compare(t, quick + b * q_batch, 1, s.q_stride, dq + (int64_t)b * c->Tq * qw, c->Tq, qw);
        test_compare(t, quick + (k - q) + b * (fused ? q_batch : kv_batch), 1, s.k_stride, dk + (int64_t)b * c->Tk * kw,
                     c->Tk, kw);
        test_compare(t, quick + (v - q) + b * (fused ? q_batch : kv_batch), 1, s.v_stride, dv + (int64_t)b * c->Tk * kw,
                     c->Tk, kw);
        test_compare(t, first_d + b * q_batch, 1, s.q_stride, dq + (int64_t)b * c->Tq * qw, c->Tq, qw);
        test_compare(t, first_d + (k - q) + b * (fused ? q_batch : kv_batch), 1, s.k_stride,
                     dk + (int64_t)b * c->Tk * kw, c->Tk, kw);
        test_compare(t, first_d + (v - q) + b * (fused ? q_batch : kv_batch), 1, s.v_stride,
                     dv + (int64_t)b * c->Tk * kw, c->Tk, kw);
    }
    for (int64_t i = 0; i < N * c->NH; i++) {
        double e = lse[i] == -INFINITY ? 0 : fabs(first_lse[i] - lse[i]) / fmax(1, fabs(lse[i]));
        if (lse[i] == -INFINITY) *bad_empty += first_lse[i] != -INFINITY;
        if (!(e <= 1e-6) || (lse[i] == -INFINITY && first_lse[i] != -INFINITY))
            test_bad(t, "lse[%" PRId64 "] is %.9g, expected %.9g", i, first_lse[i], lse[i]);
        *worst_lse = worst_of(*worst_lse, e);
    }
    test_free_all(t);
}

static void test_attention(KernelTest *t) {
    const AttentionCase cases[] = {
        // B   Tq   Tk NH NKV  HD  offset docs spare scale
        {1, 1, 1, 1, 1, 1, 0, 0, 0, 1},         {2, 3, 3, 4, 2, 7, 0, 0, 0, 1},
        {1, 65, 65, 3, 1, 64, 0, 0, 0, 1},      {2, 200, 200, 6, 2, 80, 0, 1, 0, 1},
        {1, 3, 200, 8, 2, 128, 197, 0, 0, 1},   {2, 1, 65, 12, 4, 64, 64, 0, 35, 1},
        {2, 65, 200, 2, 2, 7, -30, 0, 3, 1},    {1, 200, 65, 2, 1, 64, -70, 0, 0, 1},
        {1, 200, 200, 4, 4, 128, 0, 0, 0, 1},   {1, 300, 700, 3, 3, 64, 400, 1, 0, 1},
        {1, 65, 300, 2, 1, 16, 100, 2, 0, 1},   {2, 65, 65, 5, 5, 33, 0, 2, 1, 1},
        {1, 7, 9, 2, 1, 16, -100, 0, 0, 1},     {1, 600, 600, 2, 1, 16, 0, 0, 0, 1},
        {1, 40, 30, 2, 2, 8, 1000000, 0, 0, 1},
    };
    // Scores of some hundreds (the softmax picks one key), and a head of one element: gradients are differences of near
    // equals, and what is left of them is the rounding of out.
    const AttentionCase hard[] = {{1, 130, 130, 2, 1, 64, 0, 0, 0, 12}, {1, 65, 300, 2, 1, 1, 100, 2, 0, 1}};
    // More queries than keys and the reverse, whole tiles of queries that see nothing and of keys that nobody sees,
    // documents, groups.
    const AttentionCase tiles[] = {{1, 300, 65, 4, 2, 64, -140, 0, 8, 1},  {1, 300, 300, 2, 1, 128, -170, 1, 8, 1},
                                   {2, 70, 700, 2, 1, 64, 5, 1, 8, 1},     {2, 300, 300, 4, 1, 64, 0, 1, 8, 1},
                                   {1, 200, 333, 2, 2, 128, 133, 2, 8, 1}, {1, 3, 500, 4, 2, 128, 497, 0, 8, 1}};
    double worst_lse = 0;
    int bad_empty = 0;
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 6e-2
                                    : 2e-4); // the worst row: dq of rows that see a key or two, all of it rounding
    for (size_t i = 0; i < sizeof tiles / sizeof tiles[0]; i++, t->cases++)
        test_attention_case(t, &tiles[i], 0, 0, &worst_lse, &bad_empty);
    test_report(t, "attention over tiles of all kinds follows its definition");
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 2e-2 : 2e-4); // the worst row: first rows' dq, a difference of what was rounded:
                                                    // 0.010 to 0.013 by the processor; a lost tile is near 1
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++, t->cases++)
        test_attention_case(t, &cases[i], 0, 0, &worst_lse, &bad_empty);
    CHECK("attention: log-sum-exp follows its definition, -infinity for rows that see nothing",
          worst_lse <= 1e-6 && !bad_empty, "error %.2g <= 1e-6, %d wrong rows%s", worst_lse, bad_empty, test_where(t));
    test_report(t, "attention forward and backward follow their definition");
    test_bounds(t, sizeof(floatX) == 2 ? 2e-2 : 3e-5, sizeof(floatX) == 2 ? 1 : 1e-3);
    for (int i = 0; i < 2; i++, t->cases++) test_attention_case(t, &hard[i], 0, 0, &worst_lse, &bad_empty);
    test_report(t, "attention: one key takes all, heads of one element");
}

static void test_attention_chunks(KernelTest *t) {
    // Context parallelism: chunk c and chunk 2 CP - 1 - c of a sequence, c = 0, 1, CP - 1; chunks that are no whole
    // tiles; gaps beyond the last key, second chunks that are all or nothing, first ones that see nothing.
    const ChunkCase chunks[] = {
        {{1, 256, 512, 2, 1, 64, 0, 0, 8, 1}, 128, 256},  {{1, 256, 512, 2, 1, 64, 128, 3, 8, 1}, 128, 0},
        {{2, 128, 512, 2, 1, 64, 64, 3, 8, 1}, 64, 256},  {{1, 100, 400, 4, 2, 64, 50, 0, 8, 1}, 50, 200},
        {{1, 100, 400, 4, 1, 64, 100, 3, 8, 1}, 50, 100}, {{1, 256, 512, 2, 1, 128, 0, 3, 8, 1}, 128, 256},
        {{1, 134, 536, 2, 2, 128, 67, 0, 8, 1}, 67, 268}, {{1, 134, 536, 2, 1, 128, 67, 1, 8, 1}, 67, 268},
        {{2, 66, 264, 4, 2, 16, 33, 3, 0, 1}, 33, 132},   {{1, 66, 264, 2, 1, 80, 0, 0, 0, 1}, 33, 198},
        {{1, 200, 400, 3, 3, 33, 0, 3, 1, 1}, 100, 200},  {{1, 130, 300, 2, 1, 200, -70, 2, 0, 1}, 65, 300},
        {{1, 60, 200, 2, 1, 64, 0, 0, 8, 1}, 7, 1000},    {{1, 60, 200, 2, 1, 64, 5, 2, 8, 1}, 0, 130},
        {{1, 60, 200, 2, 1, 7, 5, 3, 3, 1}, 60, 130},     {{1, 70, 300, 2, 1, 64, -200, 3, 8, 1}, 69, 400}};
    double worst_lse = 0;
    int bad_empty = 0;
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6, sizeof(floatX) == 2 ? 6e-2 : 2e-4); // as over tiles
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++, t->cases++)
        test_attention_case(t, &chunks[i].all, chunks[i].q_split, chunks[i].q_gap, &worst_lse, &bad_empty);
    CHECK("attention of two chunks: log-sum-exp follows its definition", worst_lse <= 1e-6 && !bad_empty,
          "error %.2g <= 1e-6, %d wrong rows%s", worst_lse, bad_empty, test_where(t));
    test_report(t, "attention of two chunks of a sequence follows its definition");
}
