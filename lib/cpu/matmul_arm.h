/* matmul_arm.h: the inner loop of the plain bf16 matmul on Arm processors that have BFMMLA.
 *
 * One BFMMLA multiplies a 2 x 4 block of A by a 4 x 2 block of B and adds the result to a 2 x 2 block of C: 16
 * multiply-adds, twice as many as BFDOT, which attention uses through vdot_pairs.
 */
#ifndef CPU_MATMUL_ARM_H
#define CPU_MATMUL_ARM_H
#include "vectors.h" // defines: MR, NR, bf16, floatX, ZERO
#ifdef HAVE_BFMMLA

typedef bf16 Packed; // what panels hold

/* panel (ceil(depth / 4), width, 4) = `count` vectors of `depth` elements, four elements of each vector in turn; zeros
 * for vectors beyond count and for elements beyond depth. Vector j begins at in + j * row, with elements col
 * apart. */
static void pack_panel(Packed *panel, int64_t width, const floatX *in, int64_t row, int64_t col, int64_t count,
                       int64_t depth) {
    const bf16 none = ZERO;
    for (int64_t k = 0; k < depth; k += 4)
        for (int64_t j = 0; j < width; j++)
            for (int64_t i = k; i < k + 4; i++)
                *panel++ = j < count && i < depth ? in[j * row + i * col] : none;
}

/* Load and store a 2 x 2 block of C. */
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
    enum { ROW_PAIRS = MR / 2, COLUMN_PAIRS = NR / 2, REGISTER_ELEMENTS = 8 };
    float32x4_t sum[ROW_PAIRS][COLUMN_PAIRS];
    for (int i = 0; i < ROW_PAIRS; i++)
        for (int j = 0; j < COLUMN_PAIRS; j++)
            sum[i][j] = accumulate ? load_block(c + 2 * i * c_row + 2 * j, c_row) : vdupq_n_f32(0);
    for (int64_t k = 0; k < depth; k += 4) {
        bfloat16x8_t rows[ROW_PAIRS], columns[COLUMN_PAIRS];
        for (int i = 0; i < ROW_PAIRS; i++, a += REGISTER_ELEMENTS)
            rows[i] = vld1q_bf16((const bfloat16_t *)(const void *)a);
        for (int j = 0; j < COLUMN_PAIRS; j++, b += REGISTER_ELEMENTS)
            columns[j] = vld1q_bf16((const bfloat16_t *)(const void *)b);
#pragma GCC unroll 4
        for (int i = 0; i < ROW_PAIRS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < COLUMN_PAIRS; j++) sum[i][j] = vbfmmlaq_f32(sum[i][j], rows[i], columns[j]);
    }
    for (int i = 0; i < ROW_PAIRS; i++)
        for (int j = 0; j < COLUMN_PAIRS; j++) store_block(c + 2 * i * c_row + 2 * j, c_row, sum[i][j]);
}

#endif
#endif
