/* rope.h: tensors, definition and sizes of RoPE, for rope.c, rope.cu and mine/. */
#ifndef PAGE_ROPE_H
#define PAGE_ROPE_H
#include "page.h"

static const double THETA = 500000; // Llama 3's

static void rope_case(Case *c) { // size: N, T, heads, HD, stride, direction (1: forward, -1: backward)
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4];
    updates(c, "x", IN_X, N, stride, 1)->touched =
        N * heads * HD * (int64_t)sizeof(floatX); // a row ends with the value heads, which are not rotated
    reads(c, "cos_sin", IN_FLOAT, T, HD, 1);
    reads(c, "positions", IN_INT, 1, T, (double)T);
    c->flops = 3.0 * (double)(N * heads * HD);
    c->slots = 2.0 * (double)(N * heads * HD); // a multiplication and an FMA
}

static double angle_of(int64_t position, int64_t i, int64_t HD) {
    return (double)position * pow(THETA, -2.0 * (double)i / (double)HD);
}

static void rope_prepare(Case *c) { // the table of THETA
    int64_t T = c->size[1], HD = c->size[3], half = HD / 2;
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            F("cos_sin")[t * HD + i] = (float)cos(angle_of(t, i, HD));
            F("cos_sin")[t * HD + half + i] = (float)sin(angle_of(t, i, HD));
        }
}

static void rope_definition(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const double *x = D("x"), *cos_sin = D("cos_sin"), *positions = D("positions");
    double *out = R("x"), direction = (double)c->size[5];
    memcpy(out, x, (size_t)(N * stride) * sizeof(double));
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < half; i++) {
                const double *table = cos_sin + (int64_t)positions[n % T] * HD + i, *a = x + n * stride + h * HD + i,
                             *b = a + half;
                double cosine = table[0], sine = direction * table[half];
                out[a - x] = *a * cosine - *b * sine;
                out[b - x] = *b * cosine + *a * sine;
            }
}

static void rope_in_use(Case *c) {
    int N = (int)c->size[0], T = (int)c->size[1], heads = (int)c->size[2], HD = (int)c->size[3];
    IMPLEMENTATION(rope)
    (c->on, X("x"), c->size[4], F("cos_sin"), I("positions"), N, T, heads, HD, c->size[5] > 0 ? 1.0f : -1.0f);
}

static const Op rope = {
    "rope",
    rope_case,
    rope_prepare,
    rope_definition,
    rope_in_use,
    {{"odd", {65, 13, 3, 38, 133, 1}},
     FOR_CPU({"bench-8m", {2048, 256, 12, 48, 18 * 48, 1}}, {"bench-125m", {1024, 512, 16, 64, 20 * 64, 1}},
             {"1B layer", {1024, 1024, 40, 64, 48 * 64, 1}}, {"1B layer, backward", {1024, 1024, 40, 64, 48 * 64, -1}})
         FOR_GPU({"even", {66, 33, 5, 64, 7 * 64, -1}}, {"1B layer", {8192, 8192, 40, 64, 48 * 64, 1}},
                 {"8B layer", {8192, 8192, 40, 128, 48 * 128, 1}},
                 {"8B layer, backward", {8192, 8192, 40, 128, 48 * 128, -1}})}};

#endif
