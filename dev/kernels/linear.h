/* linear.h: tensors, definition and sizes of linear layers, for linear.c and linear.cu. */
#ifndef PAGE_LINEAR_H
#define PAGE_LINEAR_H
#include "page.h"

typedef struct {
    Matmul p;
    void *c;
    const floatX *a, *b;
} Work;

static Work work_of(Case *c) { // the name of its output says which of the three it is
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2], dy_stride = OC + c->size[3];
    PageTensor *y = page_find(c, "y"), *dx = page_find(c, "dx"), *dw = page_find(c, "dw");
    if (y) {
        Work forward = {{N, OC, IC, IC, 1, 1, IC, OC, y->storage == IN_FLOAT, 0}, y->data, X("x"), X("w")};
        return forward;
    }
    if (dx) {
        Work backward_input = {{N, IC, OC, dy_stride, 1, IC, 1, IC, 0, 0}, dx->data, X("dy"), X("w")};
        return backward_input;
    }
    Work backward_weight = {{OC, IC, N, 1, dy_stride, IC, 1, IC, 1, dw->role == UPDATED}, dw->data, X("dy"), X("x")};
    return backward_weight;
}

static void in_use(Case *c) { // long fp32 sums are cut, as linear_matmul in lib/ops/ops.h does
    Work w = work_of(c);
    int64_t end = w.p.K, depth = end;
    if (page_find(c, "dw")) depth = DW_TOKENS;
    else if (page_find(c, "dx") && FLOATX == DTYPE_F32) depth = DX_DEPTH;
    for (int64_t k = 0; k < end; k += depth) {
        w.p.K = min_i64(depth, end - k);
        IMPLEMENTATION(matmul)(c->on, &w.p, w.c, w.a + k * w.p.a_col, w.b + k * w.p.b_row);
        w.p.accumulate = 1;
    }
}

// ---------------------------------------------------------------------------
// forward

static void case_of(Case *c) {
    double work = 2.0 * (double)c->size[0] * (double)c->size[1] * (double)c->size[2];
    c->flops = c->matmul_flops = work;
}
static void forward_case(Case *c) { // size: N, IC, OC, 1: y is fp32, as logits are where no backward follows
    reads(c, "x", IN_X, c->size[0], c->size[1], 1);
    reads(c, "w", IN_X, c->size[2], c->size[1], 1);
    writes(c, "y", c->size[3] ? IN_FLOAT : IN_X, c->size[0], c->size[2]);
    case_of(c);
}

static void forward_definition(Case *c) {
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2];
    const double *x = D("x"), *w = D("w");
    double *y = R("y");
    for (int64_t n = 0; n < N; n++) {
        if (!wanted(c, n, N, 2.0 * (double)(IC * OC))) continue;
        for (int64_t o = 0; o < OC; o++) {
            double sum = 0;
            for (int64_t i = 0; i < IC; i++) sum += x[n * IC + i] * w[o * IC + i];
            y[n * OC + o] = sum;
        }
    }
}

// ---------------------------------------------------------------------------
// backward. Rows of dy may be further apart than they are long: the head's are padded to multiples of 16 bytes.

static void input_case(Case *c) { // size: N, IC, OC, elements behind each row of dy
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2];
    reads(c, "dy", IN_X, N, OC + c->size[3], 1)->touched = N * OC * (int64_t)sizeof(floatX);
    reads(c, "w", IN_X, OC, IC, 1);
    writes(c, "dx", IN_X, N, IC);
    case_of(c);
}

static void input_definition(Case *c) {
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2], stride = OC + c->size[3];
    const double *dy = D("dy"), *w = D("w");
    double *dx = R("dx");
    for (int64_t n = 0; n < N; n++) {
        if (!wanted(c, n, N, 2.0 * (double)(IC * OC))) continue;
        for (int64_t i = 0; i < IC; i++) dx[n * IC + i] = 0;
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) dx[n * IC + i] += dy[n * stride + o] * w[o * IC + i];
    }
}

static void weight_case(Case *c) { // size: N, IC, OC, elements behind each row of dy, 1: += into dw
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2];
    reads(c, "dy", IN_X, N, OC + c->size[3], 1)->touched = N * OC * (int64_t)sizeof(floatX);
    reads(c, "x", IN_X, N, IC, 1);
    if (c->size[4]) updates(c, "dw", IN_FLOAT, OC, IC, 1);
    else writes(c, "dw", IN_FLOAT, OC, IC);
    case_of(c);
}

static void weight_definition(Case *c) {
    int64_t N = c->size[0], IC = c->size[1], OC = c->size[2], stride = OC + c->size[3];
    const double *dy = D("dy"), *x = D("x");
    double *dw = R("dw");
    for (int64_t o = 0; o < OC; o++) {
        if (!wanted(c, o, OC, 2.0 * (double)(N * IC))) continue;
        for (int64_t i = 0; i < IC; i++) dw[o * IC + i] = c->size[4] ? D("dw")[o * IC + i] : 0;
        for (int64_t n = 0; n < N; n++)
            for (int64_t i = 0; i < IC; i++) dw[o * IC + i] += dy[n * stride + o] * x[n * IC + i];
    }
}

// ---------------------------------------------------------------------------
// the page

static const Op forward = {
    "linear_forward",
    forward_case,
    NULL,
    forward_definition,
    in_use,
    {{"odd", {131, 301, 277}},
     FOR_CPU({"bench-8m gate_up", {2048, 288, 1536}}, {"bench-125m qkv", {1024, 768, 1280}},
             {"bench-125m gate_up", {1024, 768, 4096}}, {"bench-125m down", {1024, 2048, 768}},
             {"bench-125m head", {1024, 768, 32000}}, {"1B layer gate_up", {1024, 2048, 16384}})
         FOR_GPU({"even", {192, 160, 136, 1}}, {"1B gate_up", {8192, 2048, 16384}}, {"1B down", {8192, 8192, 2048}},
                 {"8B gate_up", {8192, 4096, 28672}}, {"1B head, 2k tokens", {2048, 2048, 128256}})}};

static const Op input = {
    "linear_backward_input",
    input_case,
    NULL,
    input_definition,
    in_use,
    {{"odd", {131, 277, 301, 5}},
     FOR_CPU({"bench-8m gate_up", {2048, 288, 1536}}, {"bench-125m qkv", {1024, 768, 1280}},
             {"bench-125m gate_up", {1024, 768, 4096}}, {"bench-125m down", {1024, 2048, 768}},
             {"bench-125m head", {1024, 768, 32000}}, {"1B layer gate_up", {1024, 2048, 16384}})
         FOR_GPU({"even", {192, 136, 160, 8}}, {"1B gate_up", {8192, 2048, 16384}}, {"1B down", {8192, 8192, 2048}},
                 {"8B gate_up", {8192, 4096, 28672}}, {"1B head, 2k tokens", {2048, 2048, 128256}})}};

static const Op weight = {
    "linear_backward_weight",
    weight_case,
    NULL,
    weight_definition,
    in_use,
    {{"odd", {1030, 77, 139, 5, 1}},
     FOR_CPU({"bench-8m gate_up", {2048, 288, 1536}}, {"bench-125m qkv", {1024, 768, 1280}},
             {"bench-125m gate_up", {1024, 768, 4096}}, {"bench-125m down", {1024, 2048, 768}},
             {"bench-125m head", {1024, 768, 32000}}, {"1B layer gate_up", {1024, 2048, 16384}})
         FOR_GPU({"even", {192, 160, 136, 8}}, {"1B gate_up", {8192, 2048, 16384}}, {"1B down", {8192, 8192, 2048}},
                 {"8B gate_up", {8192, 4096, 28672}}, {"1B head, 2k tokens", {2048, 2048, 128256, 0, 1}})}};

#endif
