/* tree_sum.cu: the sum of n pieces, element by element, as a binary tree, ((0+1)+(2+3))+…: how ranks' gradients are
 * added.
 *
 * Addition in fp32 is not associative, so the program has to choose an order. From left to right, one more rank changes
 * every rounding. In a tree, two ranks that each add up their half give the same bits as one rank that has both halves.
 * The definition here rounds every sum to fp32, and versions must give its bits; a sum from left to right would fail.
 * sum_pieces is the same tree for activations: pieces and sum are floatX, and the sum is rounded once.
 */
#include "page.h" // reads(), writes(), updates(): declare a tensor; the last argument of reads() and updates() scales
                  // its random values. X(name), F(name): its data in floatX or float. D(name), R(name): the
                  // definition's inputs and results in double. c->slots: arithmetic instructions × lanes of an ideal
                  // version. From lib/ops/cpu/vectors.h: vfloat, VL, load_float, …

static void sum_case(Case *c) { // size: n, count, accumulate (1: += the sum)
    int64_t n = c->size[0], count = c->size[1], accumulate = c->size[2];
    if (accumulate) updates(c, "out", IN_FLOAT, count, 1, 0.7); // one element per row: each must meet the bound
    else writes(c, "out", IN_FLOAT, count, 1);
    reads(c, "pieces", IN_FLOAT, n, count, 0.7); // 0.7: values of all 24 bits, whose sums are rounded
    c->flops = c->slots = (double)(n - 1 + accumulate) * (double)count;
    c->float_bound = 1e-30; // every bit must be equal
}

static double added(const Case *c, double a, double b) { return c->exactly ? a + b : (double)(float)(a + b); }

/* The sum of element i of pieces first ... first + width - 1, width a power of two; those from n on do not exist. */
static double tree(const Case *c, const double *pieces, int64_t i, int64_t first, int64_t width) {
    if (width == 1) return pieces[first * c->size[1] + i];
    int64_t middle = first + width / 2;
    double left = tree(c, pieces, i, first, width / 2);
    return middle < c->size[0] ? added(c, left, tree(c, pieces, i, middle, width / 2)) : left;
}
static int64_t tree_width(const Case *c) {
    int64_t width = 1;
    while (width < c->size[0]) width *= 2;
    return width;
}

static void sum_definition(Case *c) {
    int64_t n = c->size[0], count = c->size[1], width = tree_width(c);
    const double *pieces = D("pieces"), *before = c->size[2] ? D("out") : NULL;
    double *out = R("out");
    for (int64_t i = 0; i < count; i++) {
        if (!wanted(c, i, count, 10.0 * (double)n)) continue;
        double sum = tree(c, pieces, i, 0, width);
        out[i] = before ? added(c, before[i], sum) : sum;
    }
}

static void pieces_case(Case *c) { // size: n, count
    int64_t n = c->size[0], count = c->size[1];
    writes(c, "out", IN_X, count, 1);
    reads(c, "pieces", IN_X, n, count, 0.7);
    c->flops = c->slots = (double)(n - 1) * (double)count;
    c->bound = c->row_bound = c->float_bound = 1e-30; // every bit must be equal
}
static void pieces_definition(Case *c) {
    sum_definition(c);
    for (int64_t i = 0; i < c->size[1]; i++) R("out")[i] = stored(c, R("out")[i]);
}
static void pieces_in_use(Case *c) { sum_pieces(c->dev, X("out"), X("pieces"), (int)c->size[0], c->size[1]); }

static void sum_in_use(Case *c) {
    tree_sum(c->dev, F("out"), F("pieces"), DTYPE_F32, (int)c->size[0], c->size[1], (int)c->size[2]);
}

#ifndef USE_CUDA
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
    size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
    float *sums = (float *)scratch(c->dev, "sums", (size_t)(n * count) * sizeof(float));
    memcpy(sums, F("pieces"), (size_t)(n * count) * sizeof(float));
    for (int64_t width = 1; width < n; width *= 2)
        for (int64_t k = 0; k + width < n; k += 2 * width)
            for (int64_t i = 0; i < count; i++) sums[k * count + i] += sums[(k + width) * count + i];
    for (int64_t i = 0; i < count; i++) out[i] = c->size[2] ? out[i] + sums[i] : sums[i];
    arena_release(c->dev, MEM_WORKSPACE, mark);
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

static const Version op_versions[] = {
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
     sum_in_use},
    END_OF_VERSIONS};

static void pieces_recursive(Case *c) {
    int64_t n = c->size[0], count = c->size[1], width = tree_width(c);
    size_t mark = arena_mark(c->dev, MEM_WORKSPACE);
    float *wide = (float *)scratch(c->dev, "pieces", (size_t)(n * count) * sizeof(float));
    for (int64_t i = 0; i < n * count; i++) wide[i] = to_float(X("pieces")[i]);
    for (int64_t i = 0; i < count; i++) X("out")[i] = from_float(tree_of_floats(wide + i, n, count, 0, width));
    arena_release(c->dev, MEM_WORKSPACE, mark);
}

static const Version pieces_versions[] = {
    {"1 in fp32, recursive", "The pieces converted to fp32, then version 1 of tree_sum, then rounded.",
     pieces_recursive},
    {"in use: threads", "As tree_sum in use, with the conversions on the way.", pieces_in_use},
    END_OF_VERSIONS};
#endif

#ifdef USE_CUDA
#include "tree_sum.cuh" // defines: op_versions, pieces_versions
#endif

static const Op op = {"tree_sum",
                      sum_case,
                      NULL,
                      sum_definition,
                      op_versions,
                      {{"odd", {7, 1003, 1}},
                       FOR_CPU({"bench-8m tensor, 8 ranks", {8, 10368}}, {"bench-125m block, 2 ranks", {2, 3146496}},
                               {"bench-125m block, 8 ranks", {8, 786624}}, {"bench-125m block, += 1", {1, 6292992, 1}},
                               {"1B layer, 8 ranks", {8, 7602688}})
                           FOR_GPU({"even", {5, 2048}}, {"1B layer, 2 ranks", {2, 30410752}},
                                   {"1B layer, 8 ranks", {8, 7602688}}, {"8B layer, 8 ranks, +=", {8, 27264000, 1}})}};

static const Op pieces = {"sum_pieces",
                          pieces_case,
                          NULL,
                          pieces_definition,
                          pieces_versions,
                          {{"odd", {7, 1003}},
                           FOR_CPU({"1B activations, 2 ranks", {2, 2097152}}, {"1B activations, 8 ranks", {8, 524288}})
                               FOR_GPU({"even", {5, 2048}}, {"8B activations, 2 ranks", {2, 16777216}},
                                       {"8B activations, 8 ranks", {8, 4194304}})}};

PAGE(&op, &pieces)
