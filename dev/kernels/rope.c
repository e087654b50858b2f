/* rope.c: rotary position embedding (Su et al. 2021, equation 34), in place, forward and backward.
 *
 * Element i of a head rotates with element i + HD/2 by the angle position * THETA^(-2i / HD): Hugging Face's pairing. A
 * rotation's transpose is the rotation by the opposite angle, so backward is the same loop with the sine negated.
 * Computing sines is expensive; with a table of them only moving the heads takes time.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp rope.c -o rope -lm
 * with page.h page_cpu.h rope.h lib/device/kernel.h lib/ops/cpu/layers.h lib/ops/cpu/pairs.h lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/layers.h"
#include "rope.h"

static inline void turn(floatX *first, floatX *second, float cosine, float sine) {
    float a = to_float(*first), b = to_float(*second);
    *first = from_float(a * cosine - b * sine);
    *second = from_float(b * cosine + a * sine);
}

static void rope_functions(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const int32_t *positions = I("positions");
    floatX *x = X("x");
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < half; i++) {
                floatX *first = x + n * stride + h * HD + i;
                double angle = angle_of(positions[n % T], i, HD);
                turn(first, first + half, (float)cos(angle), (float)(sin(angle) * (double)c->size[5]));
            }
}

static void rope_once_a_token(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const int32_t *positions = I("positions");
    floatX *x = X("x");
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < half; i++) {
            double angle = angle_of(positions[n % T], i, HD);
            float cosine = (float)cos(angle), sine = (float)(sin(angle) * (double)c->size[5]);
            for (int64_t h = 0; h < heads; h++) {
                floatX *first = x + n * stride + h * HD + i;
                turn(first, first + half, cosine, sine);
            }
        }
}

static void rope_table(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const int32_t *positions = I("positions");
    const float *cos_sin = F("cos_sin");
    floatX *x = X("x");
    float direction = (float)c->size[5];
    for (int64_t n = 0; n < N; n++) {
        const float *cosines = cos_sin + positions[n % T] * HD, *sines = cosines + half;
        for (int64_t h = 0; h < heads; h++) {
            floatX *first = x + n * stride + h * HD, *second = first + half;
            for (int64_t i = 0; i < half; i++) turn(first + i, second + i, cosines[i], sines[i] * direction);
        }
    }
}

static inline void turn_vectors(floatX *first, floatX *second, vfloat cosine, vfloat sine, int64_t n) {
    vfloat a = load_x(first, n), b = load_x(second, n);
    store_x(first, vfma(a, cosine, b * -sine), n);
    store_x(second, vfma(b, cosine, a * sine), n);
}

static void rope_vectors(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const int32_t *positions = I("positions");
    const float *cos_sin = F("cos_sin");
    floatX *x = X("x");
    float direction = (float)c->size[5];
    for (int64_t n = 0; n < N; n++) {
        const float *cosines = cos_sin + positions[n % T] * HD, *sines = cosines + half;
        for (int64_t h = 0; h < heads; h++) {
            floatX *first = x + n * stride + h * HD, *second = first + half;
            for (int64_t i = 0; i < half; i += VL)
                turn_vectors(first + i, second + i, load_float(cosines + i, half - i),
                             load_float(sines + i, half - i) * direction, half - i);
        }
    }
}

static void rope_heads_inside(Case *c) {
    int64_t N = c->size[0], T = c->size[1], heads = c->size[2], HD = c->size[3], stride = c->size[4], half = HD / 2;
    const int32_t *positions = I("positions");
    const float *cos_sin = F("cos_sin");
    floatX *x = X("x");
    float direction = (float)c->size[5];
    for (int64_t n = 0; n < N; n++) {
        const float *cosines = cos_sin + positions[n % T] * HD, *sines = cosines + half;
        for (int64_t i = 0; i < half; i += VL) {
            vfloat cosine = load_float(cosines + i, half - i), sine = load_float(sines + i, half - i) * direction;
            floatX *first = x + n * stride + i;
            for (int64_t h = 0; h < heads; h++)
                turn_vectors(first + h * HD, first + h * HD + half, cosine, sine, half - i);
        }
    }
}

static const Version rope_versions[PAGE_VERSIONS] = {
    {"1 pow, cos and sin",
     "The formula for each pair of each head. In double: at position 1,000 a float's angle has lost three of its seven "
     "digits.",
     rope_functions},
    {"2 once a token", "All heads of a token rotate by the same angles: they are computed once for all of them.",
     rope_once_a_token},
    {"3 a table",
     "The same positions occur in every sequence, layer and step: a table, computed once, removes the functions from "
     "the step.",
     rope_table},
    {"4 vectors",
     "The table has all cosines of a position, then all sines, as a head has its halves: four vectors are loaded and "
     "none needs shuffling.",
     rope_vectors},
    {"5 heads inside",
     "The table's vectors are loaded, and the sine given its sign, once for all heads of a token. Where half a head "
     "ends within a vector (HD 48), no head's load waits any more for the masked store before it, which it overlaps.",
     rope_heads_inside},
    {"in use: threads", "Rows divided over threads, two vectors at a time (vpair).", rope_in_use}};

PAGE({&rope, rope_versions})
