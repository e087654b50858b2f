/* ordered_sum.h: sums the gradients of a step's micro-batches, with --deterministic in an order that does not depend on
 * the layout. A gradient that consists of pieces from several ranks is first added as a binary tree (tree_sum). */
#ifndef ORDERED_SUM_H
#define ORDERED_SUM_H
#include "../ops/ops.h" // defines: tree_sum

typedef struct {
    int micro_batches;  // that are added in a step
    int as_tree;        // --deterministic: micro-batches are added as a binary tree, else one after the other
    int64_t count;      // elements
    float *partial[20]; // (count) [0] becomes the total; the others exist for the tree, of up to 2^20 micro-batches
} OrderedSum;

/* The tree needs few buffers, because equal neighbors are added at once (cascade summation). With 8 micro-batches, the
 * partial sums after each of them are:
 *
 *     0: [0]                   4: [0-3] [4]
 *     1: [0-1]                 5: [0-3] [4-5]
 *     2: [0-1] [2]             6: [0-3] [4-5] [6]
 *     3: [0-1] [2-3] = [0-3]   7: [0-3] [4-5] [6-7] = [0-3] [4-7] = [0-7] */

/* The index in `partial` of micro-batch m's sum: how many partial sums are complete before the pair that m belongs to,
 * which is the number of ones in the binary digits of m / 2. */
static int sums_before(int m) {
    int sums = 0;
    for (int size = 2; size <= m; size *= 2) sums += m / size % 2;
    return sums;
}

/* Where micro-batch m is added or, if *replace, written. In the tree an odd one is added to the even one before it. */
static float *sum_target(const OrderedSum *s, int m, int *replace) {
    *replace = s->as_tree ? m % 2 == 0 : m == 0;
    return s->partial[s->as_tree ? sums_before(m) : 0];
}

/* Adds micro-batch m: the sum of pieces (n, count). If `pieces` is the target, backward has put it there already. Then
 * the last two partial sums are added as long as both have equally many micro-batches (`size`); after the step's last
 * micro-batch all partial sums are added, from the right. */
static void sum_add(Device *dev, const OrderedSum *s, int m, const void *pieces, Dtype dtype, int n) {
    int replace, top = s->as_tree ? sums_before(m) : 0, is_last = m == s->micro_batches - 1;
    float *target = sum_target(s, m, &replace);
    if (pieces != target) tree_sum(dev, target, pieces, dtype, n, s->count, !replace);
    for (int size = 2; top > 0 && (is_last || (m + 1) % (2 * size) == 0); size *= 2) {
        tree_sum(dev, s->partial[top - 1], s->partial[top], DTYPE_F32, 1, s->count, 1);
        top--;
    }
}

static void sum_open(OrderedSum *s, Device *dev, float *total, int64_t count, int micro_batches, int as_tree) {
    const OrderedSum empty = {micro_batches, as_tree, count, {total}};
    *s = empty;
    for (int i = 1; as_tree && 1 << i < micro_batches; i++)
        s->partial[i] = arena_array(float, dev, MEM_WORKSPACE, "sums of micro-batches", count);
}

#endif
