/* tree_sum.c: the sum of n pieces, element by element, as a binary tree, ((0+1)+(2+3))+…: how ranks' gradients are
 * added.
 *
 * Addition in fp32 is not associative, so the program has to choose an order. From left to right, one more rank changes
 * every rounding. In a tree, two ranks that each add up their half give the same bits as one rank that has both halves.
 * The definition here rounds every sum to fp32, and versions must give its bits; a sum from left to right would fail.
 * sum_pieces is the same tree for activations: pieces and sum are floatX, and the sum is rounded once.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp tree_sum.c -o tree_sum -lm
 * with page.h page_cpu.h tree_sum.h lib/device/exact_sum.h lib/device/kernel.h lib/ops/cpu/flat_tensors.h
 * lib/ops/cpu/vectors.h */
#include "../../lib/ops/cpu/flat_tensors.h"
#include "tree_sum.h"

static float tree_of_floats(const float *pieces, int64_t n, int64_t count, int64_t first, int64_t width) {
    if (width == 1) return pieces[first * count];
    int64_t middle = first + width / 2;
    float left = tree_of_floats(pieces, n, count, first, width / 2);
    return middle < n ? left + tree_of_floats(pieces, n, count, middle, width / 2) : left;
}

static void sum_recursive(Case *c) {
    int64_t n = c->size[0], count = c->size[1], width = tree_width(c);
    const float *pieces = F("pieces");
    float *out = F("out");
    for (int64_t i = 0; i < count; i++) {
        float sum = tree_of_floats(pieces + i, n, count, 0, width);
        out[i] = c->size[2] ? out[i] + sum : sum;
    }
}

static void sum_levels(Case *c) {
    int64_t n = c->size[0], count = c->size[1];
    float *out = F("out");
    float *sums = (float *)page_scratch(c, (size_t)(n * count) * sizeof(float));
    memcpy(sums, F("pieces"), (size_t)(n * count) * sizeof(float));
    for (int64_t width = 1; width < n; width *= 2)
        for (int64_t k = 0; k + width < n; k += 2 * width)
            for (int64_t i = 0; i < count; i++) sums[k * count + i] += sums[(k + width) * count + i];
    for (int64_t i = 0; i < count; i++) out[i] = c->size[2] ? out[i] + sums[i] : sums[i];
}

static void sum_one_pass(Case *c) {
    int64_t n = c->size[0], count = c->size[1];
    const float *pieces = F("pieces");
    float *out = F("out");
    for (int64_t i = 0; i < count; i += VL) {
        vfloat waits[64]; // widest first
        int waiting = 0;
        for (int64_t k = 0; k < n; k++) {
            vfloat sum = load_float(pieces + k * count + i, count - i);
            for (int64_t bits = k; bits & 1; bits >>= 1) sum = waits[--waiting] + sum;
            waits[waiting++] = sum;
        }
        vfloat total = waits[--waiting];
        while (waiting) total = waits[--waiting] + total;
        store_float(out + i, c->size[2] ? load_float(out + i, count - i) + total : total, count - i);
    }
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 recursive", "The tree as it is written, for one element after the other: more function calls than additions.",
     sum_recursive},
    {"2 level by level",
     "All pairs, then all pairs of pairs, over whole pieces: plain loops that the compiler vectorizes, but every level "
     "travels to memory and back, and the pieces must be copied.",
     sum_levels},
    {"3 one pass",
     "Vectors of the pieces from left to right. Finished left halves wait on a small stack for their right half, like "
     "the 1 bits of a binary counter: each piece is read once and nothing else moves. With single elements the stack "
     "would cost more than it saves.",
     sum_one_pass},
    {"in use: threads",
     "Vectors divided over threads; each element has its own tree. A long sum bypasses the caches: what is overwritten "
     "need not be loaded.",
     sum_in_use}};

static void pieces_recursive(Case *c) {
    int64_t n = c->size[0], count = c->size[1], width = tree_width(c);
    float *wide = (float *)page_scratch(c, (size_t)(n * count) * sizeof(float));
    for (int64_t i = 0; i < n * count; i++) wide[i] = to_float(X("pieces")[i]);
    for (int64_t i = 0; i < count; i++) X("out")[i] = from_float(tree_of_floats(wide + i, n, count, 0, width));
}

static const Version pieces_versions[PAGE_VERSIONS] = {
    {"1 in fp32, recursive", "The pieces converted to fp32, then version 1 of tree_sum, then rounded.",
     pieces_recursive},
    {"in use: threads", "As tree_sum in use, with the conversions on the way.", pieces_in_use}};

PAGE({&op, op_versions}, {&pieces, pieces_versions})
