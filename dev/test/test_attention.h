/* test_attention.h: attention forward and backward against its definition: grouped heads, documents, tiles of all
 * kinds, and the two halves of a context-parallel rank's tokens. Part of test_llama3.cu. */
#include "../../lib/ops/cpu/attention_query.h" // computes attention of single queries

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

/* In double precision; every array is dense: (B, T, heads, HD), lse (B, NH, Tq), p (Tk). */
typedef struct {
    double *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv, *p;
} AttentionReference;

/* One query of one head: out, lse, dq, and what it adds to dk and dv, by their definition. */
static void attention_reference_row(const AttentionShape *s, const AttentionReference *r, int b, int h, int t) {
    const int HD = s->HD, kv_head = h / (s->NH / s->NKV);
    const int64_t at = (((int64_t)b * s->Tq + t) * s->NH + h) * HD, step = (int64_t)s->NKV * HD,
                  keys = ((int64_t)b * s->Tk * s->NKV + kv_head) * HD; // of key 0
    double *p = r->p, max = -INFINITY, sum = 0, D = 0;
    for (int j = 0; j < s->Tk; j++) {
        p[j] = test_sees(s, b, t, j) ? 0 : -INFINITY;
        for (int d = 0; d < HD && p[j] > -INFINITY; d++) p[j] += r->q[at + d] * r->k[keys + j * step + d] / sqrt(HD);
        max = fmax(max, p[j]);
    }
    for (int j = 0; j < s->Tk; j++) {
        p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - max);
        sum += p[j];
    }
    r->lse[((int64_t)b * s->NH + h) * s->Tq + t] = sum > 0 ? max + log(sum) : -INFINITY;
    for (int j = 0; j < s->Tk; j++)
        for (int d = 0; d < HD && p[j] > 0; d++) r->out[at + d] += p[j] / sum * r->v[keys + j * step + d];
    for (int d = 0; d < HD; d++) D += r->out[at + d] * r->dout[at + d];
    for (int j = 0; j < s->Tk; j++) {
        const int64_t key = keys + j * step;
        double dp = 0;
        if (p[j] == 0) continue;
        for (int d = 0; d < HD; d++) dp += r->dout[at + d] * r->v[key + d];
        double ds = p[j] / sum * (dp - D) / sqrt(HD);
        for (int d = 0; d < HD; d++) {
            r->dq[at + d] += ds * r->k[key + d];
            r->dk[key + d] += ds * r->q[at + d];
            r->dv[key + d] += p[j] / sum * r->dout[at + d];
        }
    }
}

static void attention_reference(const AttentionShape *s, const AttentionReference *r) {
    for (int b = 0; b < s->B; b++)
        for (int h = 0; h < s->NH; h++)
            for (int t = 0; t < s->Tq; t++) attention_reference_row(s, r, b, h, t);
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

/* Where a case's tensors lie: as many queries as keys share rows of q, k and v, as after a fused projection. k and v:
 * elements from q on; batches: from one sequence to the next; total: of all three. */
typedef struct {
    int fused;
    int64_t k, v, q_batch, kv_batch, total;
} AttentionLayout;

static AttentionLayout test_attention_layout(const AttentionCase *c, AttentionShape *s) {
    AttentionLayout l;
    const int kw = c->NKV * c->HD, qw = c->NH * c->HD, q_spare = c->spare == 8 ? 8 : 3, k_spare = c->spare == 8 ? 8 : 5;
    l.fused = c->Tq == c->Tk && !c->spare;
    s->q_stride = l.fused ? qw + 2 * kw : qw + q_spare;
    s->k_stride = s->v_stride = l.fused ? qw + 2 * kw : kw + k_spare;
    s->o_stride = qw + c->spare;
    l.q_batch = c->Tq * s->q_stride;
    l.kv_batch = c->Tk * s->k_stride;
    int64_t q_size = c->B * l.q_batch, kv_size = l.fused ? 0 : c->B * (c->Tk + c->spare) * s->k_stride;
    l.k = l.fused ? qw : q_size;
    l.v = l.k + (l.fused ? kw : kv_size);
    l.total = q_size + 2 * kv_size;
    return l;
}

static AttentionShape test_attention_shape(KernelTest *t, const AttentionCase *c, int q_split, int q_gap) {
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
    return s;
}

/* dq, dk and dv, which lie in `d` as q, k and v do; each sequence on its own. */
static void attention_compare_gradients(KernelTest *t, const AttentionShape *s, const AttentionLayout *l,
                                        const floatX *d, const AttentionReference *r) {
    const int qw = s->NH * s->HD, kw = s->NKV * s->HD;
    for (int b = 0; b < s->B; b++) {
        const floatX *dq = d + b * l->q_batch, *dk = d + l->k + b * l->kv_batch, *dv = d + l->v + b * l->kv_batch;
        test_compare(t, dq, 1, s->q_stride, r->dq + (int64_t)b * s->Tq * qw, s->Tq, qw);
        test_compare(t, dk, 1, s->k_stride, r->dk + (int64_t)b * s->Tk * kw, s->Tk, kw);
        test_compare(t, dv, 1, s->v_stride, r->dv + (int64_t)b * s->Tk * kw, s->Tk, kw);
    }
}

/* Returns the largest relative error, and counts rows that see nothing and have another lse than -infinity. */
static double attention_compare_lse(KernelTest *t, const float *got, const double *lse, int64_t rows, int *bad_empty) {
    double worst = 0;
    for (int64_t i = 0; i < rows; i++) {
        int sees_nothing = lse[i] == -INFINITY, bad = sees_nothing && got[i] != -INFINITY;
        double e = sees_nothing ? 0 : fabs(got[i] - lse[i]) / fmax(1, fabs(lse[i]));
        if (!(e <= 1e-6) || bad) test_bad(t, "lse[%" PRId64 "] is %.9g, expected %.9g", i, got[i], lse[i]);
        *bad_empty += bad;
        worst = worst_of(worst, e);
    }
    return worst;
}

static void test_attention_case(KernelTest *t, const AttentionCase *c, int q_split, int q_gap, double *worst_lse,
                                int *bad_empty) {
    const int XS = (int)sizeof(floatX), kw = c->NKV * c->HD, qw = c->NH * c->HD;
    AttentionShape s = test_attention_shape(t, c, q_split, q_gap);
    AttentionLayout l = test_attention_layout(c, &s);
    int64_t N = (int64_t)c->B * c->Tq, keys = (int64_t)c->B * c->Tk;
    floatX *q = test_xs(t, l.total, c->scale), *k = q + l.k, *v = q + l.v, *dout = test_xs(t, N * s.o_stride, 1);
    floatX *first_out = NULL, *first_d = NULL;
    float *first_lse = NULL;
    int last = CUDA_BUILD && is_short ? 1 : TEST_THREADS; // `short` leaves it to other ops to run in several streams
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        floatX *out = test_xs(t, N * s.o_stride, 1), *d = (floatX *)test_copy(t, q, l.total * XS);
        memset(out, 0, (size_t)(N * s.o_stride * XS)); // what lies between rows is compared below
        float *lse = test_floats(t, N * c->NH, 1);
        if (threads > last) continue; // later cases have the same random numbers nevertheless
        attention_forward(&t->dev[threads], out, lse, q, k, v, &s);
        attention_backward(&t->dev[threads], d, d + l.k, d + l.v, dout, out, lse, q, k, v, &s);
        if (!first_out) {
            first_out = out;
            first_lse = lse;
            first_d = d;
        }
        test_same(t, out, first_out, N * s.o_stride * XS);
        test_same(t, lse, first_lse, N * c->NH * 4);
        test_same(t, d, first_d, l.total * XS); // unused keys and gaps hold what they held
    }
    floatX *quick = (floatX *)test_copy(t, q, l.total * XS); // where the order of a sum may differ from run to run
    t->dev[1].on.deterministic = 0;
    attention_backward(&t->dev[1], quick, quick + l.k, quick + l.v, dout, first_out, first_lse, q, k, v, &s);
    t->dev[1].on.deterministic = 1;
    AttentionReference r;
    r.q = test_widen(t, q, c->B, c->Tq, l.q_batch, s.q_stride, qw);
    r.k = test_widen(t, k, c->B, c->Tk, l.kv_batch, s.k_stride, kw);
    r.v = test_widen(t, v, c->B, c->Tk, l.kv_batch, s.v_stride, kw);
    r.dout = test_widen(t, dout, c->B, c->Tq, c->Tq * s.o_stride, s.o_stride, qw);
    r.out = test_doubles(t, N * qw);
    r.lse = test_doubles(t, N * c->NH);
    r.dq = test_doubles(t, N * qw);
    r.dk = test_doubles(t, keys * kw);
    r.dv = test_doubles(t, keys * kw);
    r.p = test_doubles(t, c->Tk);
    attention_reference(&s, &r);
    test_compare(t, first_out, 1, s.o_stride, r.out, N, qw);
    attention_compare_gradients(t, &s, &l, quick, &r);
    attention_compare_gradients(t, &s, &l, first_d, &r);
    *worst_lse = worst_of(*worst_lse, attention_compare_lse(t, first_lse, r.lse, N * c->NH, bad_empty));
    test_free_all(t);
}

/* In the emulator `short` leaves out what takes longest, except the first case. */
static void test_attention_cases(KernelTest *t, const AttentionCase *cases, size_t count, double *worst_lse,
                                 int *bad_empty) {
    for (size_t i = 0; i < count; i++) {
        const AttentionCase *c = &cases[i];
        double work = (double)c->B * c->NH * c->Tq * c->Tk * c->HD;
        if (i && CUDA_BUILD && is_short && work > 2.5e7) continue;
        test_attention_case(t, c, 0, 0, worst_lse, bad_empty);
        t->cases++;
    }
}

static void test_lse_report(KernelTest *t, const char *name, double worst, int bad_empty) {
    char full[200];
    snprintf(full, sizeof full, "%s%s", name, t->variant ? t->variant : "");
    CHECK(full, worst <= 1e-6 && !bad_empty, "error %.2g <= 1e-6, %d wrong rows%s", worst, bad_empty, test_where(t));
}

#ifndef USE_CUDA
/* Attention as programs compute it that do not include attention_query.h. */
static void test_single_queries(KernelTest *t, const AttentionCase *cases, size_t count, double *worst_lse,
                                int *bad_empty) {
    query_attention.forward = NULL;
    for (size_t i = 0; i < count; i++)
        if (cases[i].Tq == 1) test_attention_cases(t, &cases[i], 1, worst_lse, bad_empty);
    query_attention_use();
    test_report(t, "attention of a single query follows its definition, computed as for many");
}
#endif

static void test_attention(KernelTest *t) {
    const AttentionCase cases[] = {
        // B   Tq   Tk NH NKV  HD  offset docs spare scale
        {1, 1, 1, 1, 1, 1, 0, 0, 0, 1},        {2, 3, 3, 4, 2, 7, 0, 0, 0, 1},
        {1, 65, 65, 3, 1, 64, 0, 0, 0, 1},     {2, 200, 200, 6, 2, 80, 0, 1, 0, 1},
        {1, 3, 200, 8, 2, 128, 197, 0, 0, 1},  {2, 1, 65, 12, 4, 64, 64, 0, 35, 1},
        {1, 1, 300, 9, 3, 64, 299, 0, 0, 1},   {2, 1, 129, 8, 8, 80, 128, 0, 0, 1},
        {1, 1, 700, 10, 2, 96, 650, 0, 3, 1},  {2, 65, 200, 2, 2, 7, -30, 0, 3, 1},
        {1, 200, 65, 2, 1, 64, -70, 0, 0, 1},  {1, 200, 200, 4, 4, 128, 0, 0, 0, 1},
        {1, 300, 700, 3, 3, 64, 400, 1, 0, 1}, {1, 65, 300, 2, 1, 16, 100, 2, 0, 1},
        {2, 65, 65, 5, 5, 33, 0, 2, 1, 1},     {1, 7, 9, 2, 1, 16, -100, 0, 0, 1},
        {1, 600, 600, 2, 1, 16, 0, 0, 0, 1},   {1, 40, 30, 2, 2, 8, 1000000, 0, 0, 1},
    };
    // Scores of some hundreds (the softmax picks one key), and a head of one element: gradients are differences of near
    // equals, and what is left of them is the rounding of out.
    const AttentionCase hard[] = {{1, 130, 130, 2, 1, 64, 0, 0, 0, 12}, {1, 65, 300, 2, 1, 1, 100, 2, 0, 1}};
    // More queries than keys and the reverse, whole tiles of queries that see nothing and of keys that nobody sees,
    // documents, groups.
    const AttentionCase tiles[] = {{1, 300, 65, 4, 2, 64, -140, 0, 8, 1},  {1, 300, 300, 2, 1, 128, -170, 1, 8, 1},
                                   {2, 70, 700, 2, 1, 64, 5, 1, 8, 1},     {2, 300, 300, 4, 1, 64, 0, 1, 8, 1},
                                   {1, 200, 333, 2, 2, 128, 133, 2, 8, 1}, {1, 3, 500, 4, 2, 128, 497, 0, 8, 1}};
    // Backward on tensor cores has a block for all query heads of a group (first and last case), or for half of them.
    const AttentionCase parts[] = {{32, 9, 300, 8, 4, 64, 291, 0, 8, 1},
                                   {8, 20, 500, 16, 4, 64, 480, 1, 8, 1},
                                   {15, 7, 400, 18, 6, 128, 393, 0, 8, 1}};
    double worst_lse = 0;
    int bad_empty = 0;
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 6e-2
                                    : 2e-4); // the worst row: dq of rows that see a key or two, all of it rounding
    test_attention_cases(t, tiles, sizeof tiles / sizeof *tiles, &worst_lse, &bad_empty);
    test_report(t, "attention over tiles of all kinds follows its definition");
    if (!(CUDA_BUILD && is_short)) { // in the emulator a quarter of all time
        test_attention_cases(t, parts, sizeof parts / sizeof *parts, &worst_lse, &bad_empty);
        test_report(t, "attention with its query heads divided over blocks follows its definition");
    }
    test_bounds(t, sizeof(floatX) == 2 ? 6e-3 : 2e-6,
                sizeof(floatX) == 2 ? 2e-2 : 2e-4); // the worst row: first rows' dq, a difference of what was rounded:
                                                    // 0.010 to 0.013 by the processor; a lost tile is near 1
    test_attention_cases(t, cases, sizeof cases / sizeof *cases, &worst_lse, &bad_empty);
    test_lse_report(t, "attention: log-sum-exp follows its definition, -infinity for rows that see nothing", worst_lse,
                    bad_empty);
    test_report(t, "attention forward and backward follow their definition");
#ifndef USE_CUDA
    test_single_queries(t, cases, sizeof cases / sizeof *cases, &worst_lse, &bad_empty);
#endif
    // In fp32, a score of some hundreds is rounded by up to 2^-24 of itself, as are its 64 partial sums, whose order a
    // GPU's compiler chooses.
    const double fp32_bound = CUDA_BUILD ? 6e-5 : 3e-5;
    test_bounds(t, sizeof(floatX) == 2 ? 2e-2 : fp32_bound, sizeof(floatX) == 2 ? 1 : 1e-3);
    test_attention_cases(t, hard, sizeof hard / sizeof *hard, &worst_lse, &bad_empty);
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
    test_lse_report(t, "attention of two chunks: log-sum-exp follows its definition", worst_lse, bad_empty);
    test_report(t, "attention of two chunks of a sequence follows its definition");
}

#if defined(USE_CUDA) && defined(PRECISION_BF16)
/* The same cases through the kernels for GPUs of compute capability 9.0; heads of other sizes are not theirs. */
static void test_attention_hopper(KernelTest *t, void (*run)(KernelTest *)) {
    if (!t->dev[1].on.encode_tensor_map) {
        printf("not run: attention by wgmma and TMA, which need a GPU of compute capability 9.0\n");
        return;
    }
#ifdef CUDA_ON_CPU
    int *scratch = (int *)test_floats(t, 1, 1);
    cuda_on_cpu.tensor_maps = 0;
    const char *missing = attention_open(&t->dev[1].on, scratch);
    CHECK("a driver without tensor maps is named, and attention keeps to mma.sync",
          missing && strstr(missing, "no tensor maps") && strstr(missing, "CUDA 12") && !t->dev[1].on.hopper_attention,
          "%s", missing ? missing : "no word of it");
    cuda_on_cpu.tensor_maps = 1;
    missing = attention_open(&t->dev[1].on, scratch);
    CHECK("a GPU of compute capability 9.0 computes attention by wgmma and TMA",
          !missing && t->dev[1].on.hopper_attention, "%s", missing ? missing : "chosen when the ops are opened");
    test_free_all(t);
    t->random = t->seed; // the same numbers as without this check
#endif
    t->variant = ", by wgmma and TMA";
    for (int i = 1; i <= TEST_THREADS; i++) t->dev[i].on.hopper_attention = 1;
    run(t);
    for (int i = 1; i <= TEST_THREADS; i++) t->dev[i].on.hopper_attention = 0;
    t->variant = NULL;
}
/* The bits of forward and of the deterministic backward do not depend on the order in which a GPU does what it may do
 * in any order. The emulator has another order for each seed; a GPU is asked eight times. */
static void test_attention_orders(KernelTest *t) {
    const AttentionCase cases[] = {{1, 300, 300, 4, 2, 64, 0, 1, 8, 1}, {1, 300, 420, 2, 1, 128, 120, 0, 8, 1}};
#ifdef CUDA_ON_CPU
    const uint64_t seed = cuda_on_cpu.seed;
#endif
    test_bounds(t, 0, 0);
    for (int i = 0; i < 2; i++, t->cases++) {
        const AttentionCase *c = &cases[i];
        AttentionShape s = test_attention_shape(t, c, 0, 0);
        AttentionLayout l = test_attention_layout(c, &s);
        const int64_t N = (int64_t)c->B * c->Tq, outs = N * s.o_stride, XS = sizeof(floatX);
        floatX *q = test_xs(t, l.total, c->scale), *dout = test_xs(t, outs, 1), *first_out = NULL, *first_d = NULL;
        for (int order = 0; order < 8; order++) {
#ifdef CUDA_ON_CPU
            cuda_on_cpu.seed = (uint64_t)order;
#endif
            floatX *out = test_xs(t, outs, 1), *d = (floatX *)test_copy(t, q, l.total * XS);
            float *lse = test_floats(t, N * c->NH, 1);
            memset(out, 0, (size_t)(outs * XS)); // what lies between rows is compared below
            attention_forward(&t->dev[1], out, lse, q, q + l.k, q + l.v, &s);
            attention_backward(&t->dev[1], d, d + l.k, d + l.v, dout, out, lse, q, q + l.k, q + l.v, &s);
            if (!order) {
                first_out = out;
                first_d = d;
            }
            test_same(t, out, first_out, outs * XS);
            test_same(t, d, first_d, l.total * XS);
        }
        test_free_all(t);
    }
#ifdef CUDA_ON_CPU
    cuda_on_cpu.seed = seed;
#endif
    test_report(t, "attention has the same bits in eight orders of what is asynchronous");
}

static void test_attention_wgmma(KernelTest *t) { test_attention_hopper(t, test_attention); }
static void test_attention_wgmma_chunks(KernelTest *t) { test_attention_hopper(t, test_attention_chunks); }
static void test_attention_wgmma_orders(KernelTest *t) { test_attention_hopper(t, test_attention_orders); }
#endif
