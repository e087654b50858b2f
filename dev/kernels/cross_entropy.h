/* cross_entropy.h: tensors, definition and sizes of cross-entropy, for cross_entropy.c, cross_entropy.cu and mine/. */
#ifndef PAGE_CROSS_ENTROPY_H
#define PAGE_CROSS_ENTROPY_H
#include "page.h"

static const float Z_WEIGHT = 1.0f / 128; // of the z-loss; a bf16 number

static void loss_case(Case *c) { // size: N, V
    int64_t N = c->size[0], V = c->size[1];
    updates(c, "logits", IN_X, N, V, 4);
    reads(c, "targets", IN_INT, N, 1, (double)V);
    writes(c, "losses", IN_FLOAT, N, 1);
    c->restore = 1; // the gradient has overwritten the logits
    c->flops = 4.0 * (double)(N * V);
    c->slots = (EXP_SLOTS + 3) * (double)(N * V); // minus the largest logit; the sum; times the sum's inverse
}

static void z_loss_case(Case *c) {
    loss_case(c);
    writes(c, "z_losses", IN_FLOAT, c->size[0], 1);
}

/* The z-loss of the case: none in those of cross-entropy alone. */
static ZLoss z_loss_of(Case *c) {
    ZLoss z = {Z_WEIGHT, NULL};
    if (page_find(c, "z_losses")) z.losses = F("z_losses");
    return z;
}

static void loss_prepare(Case *c) {
    int64_t N = c->size[0], V = c->size[1], kept = 0;
    for (int64_t n = 0; n < N; n++) {
        if (n % 8 == 3) I("targets")[n] = (int32_t)(-1 - n);
        else kept++;
    }
    I("targets")[0] = 0;
    I("targets")[N - 1] = (int32_t)(V - 1);
    c->slots *= (double)kept / (double)N;
}

static void loss_definition(Case *c) {
    int64_t N = c->size[0], V = c->size[1];
    for (int64_t n = 0; n < N; n++) {
        const double *logits = D("logits") + n * V;
        double *gradient = R("logits") + n * V, max = -INFINITY, sum = 0;
        int64_t target = (int64_t)D("targets")[n];
        for (int64_t i = 0; i < V; i++) max = fmax(max, logits[i]);
        for (int64_t i = 0; i < V; i++) sum += exp(logits[i] - max);
        double log_z = max + log(sum), factor = 1; // of the probabilities
        if (page_find(c, "z_losses")) {
            factor += 2 * (double)Z_WEIGHT * log_z;
            R("z_losses")[n] = target < 0 ? 0 : (double)Z_WEIGHT * log_z * log_z;
        }
        for (int64_t i = 0; i < V; i++)
            gradient[i] = target < 0 ? 0 : exp(logits[i] - max) / sum * factor - (i == target);
        R("losses")[n] = target < 0 ? 0 : max - logits[target] + log(sum);
    }
}

/* The logits from token `first` of the vocabulary on. */
static Logits logits_of_case(Case *c, int64_t first) {
    Logits logits = {X("logits") + first, c->size[1], FLOATX};
    return logits;
}
static void loss_in_use(Case *c) {
    int N = (int)c->size[0], V = (int)c->size[1];
    void *workspace = page_scratch(c, IMPLEMENTATION(cross_entropy_scratch)(c->on, V));
    IMPLEMENTATION(cross_entropy)
    (c->on, F("losses"), logits_of_case(c, 0), I("targets"), z_loss_of(c), N, V, 1, workspace);
}
static void loss_in_slices(Case *c) { // what four ranks compute, each on its columns of the logits
    int N = (int)c->size[0], V = (int)c->size[1], slices = (int)min_i64(4, V);
    void *workspace = page_scratch(c, IMPLEMENTATION(cross_entropy_scratch)(c->on, V));
    float *parts = (float *)page_scratch(c, (size_t)slices * (size_t)N * 3 * sizeof(float));
    for (int r = 0, first = 0, width; r < slices; r++, first += width) {
        width = V * (r + 1) / slices - first;
        IMPLEMENTATION(cross_entropy_part)
        (c->on, parts + r * N * 3, logits_of_case(c, first), I("targets"), first, N, width, workspace);
    }
    for (int r = 0, first = 0, width; r < slices; r++, first += width) {
        width = V * (r + 1) / slices - first;
        IMPLEMENTATION(cross_entropy_join)
        (c->on, F("losses"), logits_of_case(c, first), parts, I("targets"), z_loss_of(c), slices, first, N, width, 1);
    }
}

#define LOSS_SIZES                                                                                                     \
    {                                                                                                                  \
        {"odd", {37, 1003}}, FOR_CPU({"bench-8m chunk", {1024, 4096}}, {"bench-125m chunk", {1024, 32000}},            \
                                     {"1B chunk", {256, 128256}})                                                      \
                                 FOR_GPU({"even", {24, 2048}}, {"chunk, small vocabulary", {2048, 32000}},             \
                                         {"1B chunk", {2048, 128256}})                                                 \
    }
static const Op op = {"cross_entropy", loss_case, loss_prepare, loss_definition, loss_in_use, LOSS_SIZES};
static const Op z_loss = {"z_loss", z_loss_case, loss_prepare, loss_definition, loss_in_use, LOSS_SIZES};

#endif
