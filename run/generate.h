/* generate.h: choosing the next token from its logits. */
#ifndef GENERATE_H
#define GENERATE_H
#include "trainer.h" // defines: Trainer, all_gather_now
#include <float.h>   // defines: FLT_MIN

typedef struct {
    float p; // probability, up to a common factor
    int32_t id;
} Candidate;

/* Most probable first; of equal ones the smaller id first. */
static int by_probability(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    if (x->p != y->p) return x->p < y->p ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Uniform in [0, 1), a function of the seed and the number of the token: the same on every rank. */
static double uniform_of_seed(uint64_t seed, int64_t number) {
    return (double)(mix64(seed * 0x9E3779B97F4A7C15ull + (uint64_t)number) >> 11) * 0x1p-53;
}

/* Samples with temperature from the nucleus: the fewest most probable tokens with a total probability of at least top_p
 * (Holtzman et al. 2020). Temperature 0 takes the most probable token, and so does one that is less than the smallest
 * normal fp32 number, by which one cannot divide. `u` is uniform in [0, 1). */
static int32_t sample_token(const float *logits /* (V) */, int V, double temperature, double top_p, double u,
                            Candidate *scratch /* (V) */) {
    float largest = logits[0], divisor = (float)temperature;
    int is_greedy = divisor < FLT_MIN;
    double sum = 0, nucleus = 0;
    int n = 0; // tokens in the nucleus
    for (int v = 1; v < V; v++) largest = logits[v] > largest ? logits[v] : largest;
    for (int v = 0; v < V; v++) {
        scratch[v].id = v;
        scratch[v].p = is_greedy ? logits[v] == largest : expf((logits[v] - largest) / divisor);
        sum += scratch[v].p;
    }
    qsort(scratch, (size_t)V, sizeof *scratch, by_probability);
    while (n < V && (n == 0 || nucleus < top_p * sum)) nucleus += scratch[n++].p;
    if (is_greedy) {
        n = 1;
        nucleus = scratch[0].p;
    }
    for (int i = 0; i < n; i++) {
        u -= scratch[i].p / nucleus;
        if (u < 0) return scratch[i].id;
    }
    return scratch[n - 1].id;
}

/* The id that rank 0 sampled, on every rank: GPUs of different kinds may differ in the last bits of the logits. */
static int32_t id_of_rank_0(Trainer *trainer, int32_t id) {
    Parallel *p = &trainer->parallel;
    if (p->mesh.world == 1) return id;
    all_gather_now(&p->comm, AXIS_WORLD, "next token", &id, trainer->reports, sizeof id);
    memcpy(&id, trainer->reports, sizeof id);
    return id;
}

#endif
