/* matmul_arm.h: the inner loop of the plain bf16 matmul on Arm processors that have BFMMLA.
 *
 * One BFMMLA adds the products of two rows of A and two columns of B, over four steps of the sum, to a 2 x 2 block of
 * C: 16 products, twice as many as BFDOT, which attention uses through vdot_pairs.
 */
#ifndef CPU_MATMUL_ARM_H
#define CPU_MATMUL_ARM_H
#include "vectors.h" // defines: MR, NR, bf16
#ifdef HAVE_BFMMLA

typedef bf16 Packed; // what panels hold

/* panel (depth / 4, width, 4) = `count` vectors of `depth` elements, in groups of four steps; zeros for vectors beyond
 * count and for steps beyond depth. Vector j begins at in + j * row, its elements are col apart. */
static void pack_panel(Packed *panel, int64_t width, const floatX *in, int64_t row, int64_t col, int64_t count,
                       int64_t depth) {
    const bf16 none = ZERO;
    for (int64_t k = 0; k < depth; k += 4)
        for (int64_t j = 0; j < width; j++)
            for (int64_t i = k; i < k + 4; i++)
                *panel++ = j < count && i < depth ? in[j * row + i * col] : none;
}

/* Elements 0 and 1 of two neighbouring rows. */
static inline float32x4_t load_block(const float *c, int64_t c_row) {
    return vcombine_f32(vld1_f32(c), vld1_f32(c + c_row));
}
static inline void store_block(float *c, int64_t c_row, float32x4_t block) {
    vst1_f32(c, vget_low_f32(block));
    vst1_f32(c + c_row, vget_high_f32(block));
}

/* c (MR, NR) = or += a (MR, depth) b (depth, NR), both packed. */
static inline void packed_tile(float *c, int64_t c_row, const Packed *a, const Packed *b, int64_t depth,
                               int accumulate) {
    enum { A = MR / 2, B = NR / 2, PAIR_OF_VECTORS = 8 }; // pairs of rows, pairs of columns, elements in a register
    float32x4_t sum[A][B];
    for (int i = 0; i < A; i++)
        for (int j = 0; j < B; j++)
            sum[i][j] = accumulate ? load_block(c + 2 * i * c_row + 2 * j, c_row) : vdupq_n_f32(0);
    for (int64_t k = 0; k < depth; k += 4) {
        bfloat16x8_t rows[A], columns[B];
        for (int i = 0; i < A; i++, a += PAIR_OF_VECTORS) rows[i] = vld1q_bf16((const bfloat16_t *)(const void *)a);
        for (int j = 0; j < B; j++, b += PAIR_OF_VECTORS) columns[j] = vld1q_bf16((const bfloat16_t *)(const void *)b);
#pragma GCC unroll 4
        for (int i = 0; i < A; i++)
#pragma GCC unroll 4
            for (int j = 0; j < B; j++) sum[i][j] = vbfmmlaq_f32(sum[i][j], rows[i], columns[j]);
    }
    for (int i = 0; i < A; i++)
        for (int j = 0; j < B; j++) store_block(c + 2 * i * c_row + 2 * j, c_row, sum[i][j]);
}

#endif
#endif
