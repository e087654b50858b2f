/* tile.h: the inner loop of matmuls on the CPU, that of attention too: sums of a tile of C in registers.
 *
 * An operand is fp32 or, where the processor multiplies bf16, a pair of bf16 in 32 bits.
 */
#ifndef CPU_TILE_H
#define CPU_TILE_H
#include "pairs.h" // defines: load_words, vround_pair; includes vectors.h: vfloat, VL, MR, NR, vload, vstore

// ---------------------------------------------------------------------------
// pairs of operands

/* PAIR: how many operands a 32-bit lane of a matmul holds. With AVX512_BF16 or Arm's BF16 it is 2 in bf16: one
 * instruction multiplies both and adds them to c. Otherwise a lane is one float. */
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
#define HAVE_PAIRS 1
enum { PAIR = 2 };
static inline vfloat vdot_pairs(vfloat a, vfloat b, vfloat c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#elif defined(PRECISION_BF16) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAVE_PAIRS 1
#define HAVE_BFMMLA 1
enum { PAIR = 2 };
static inline vfloat vdot_pairs(vfloat a, vfloat b, vfloat c) {
    return vbfdotq_f32(c, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#else
#ifdef PLANNED_PAIR // a build that only plans computes no sums (PLANNED_VL)
enum { PAIR = PLANNED_PAIR };
#else
enum { PAIR = 1 };
#endif
static inline vfloat vdot_pairs(vfloat a, vfloat b, vfloat c) { return a * b + c; }
#endif

// ---------------------------------------------------------------------------
// the register tile

/* c (MR, `vectors` vectors) = or += a (MR, K) b (K, …), with all sums in registers, over k in order. With `pair` 2 an
 * element of a or b is two bf16, 2k and 2k + 1 along the sum (PAIR). */
static inline __attribute__((always_inline)) void tile_columns(float *c, int64_t c_row, const float *a, int64_t a_row,
                                                               int64_t a_col, const float *b, int64_t b_row, int64_t K,
                                                               int accumulate, const int vectors, const int pair) {
    vfloat sum[MR][2]; // in registers, because all loops over it are unrolled
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
        for (int i = 0; i < vectors; i++) sum[r][i] = accumulate ? vload(c + r * c_row + i * VL) : vsplat(0);
    for (int64_t k = 0; k < K; k++) {
        vfloat bk[2];
        for (int i = 0; i < vectors; i++) {
            bk[i] = vload(b + i * VL);
#if defined(__AVX2__) && !defined(AVX512)
            __asm__("" : "+x"(bk[i])); // stays in a register: gcc would load it again for each row
#endif
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
            for (int i = 0; i < vectors; i++)
                sum[r][i] =
                    pair == 2 ? vdot_pairs(vsplat(a[r * a_row]), bk[i], sum[r][i]) : sum[r][i] + a[r * a_row] * bk[i];
        a += a_col;
        b += b_row;
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
        for (int i = 0; i < vectors; i++) vstore(c + r * c_row + i * VL, sum[r][i]);
}

/* c (MR, N) = or += a (MR, K) b (K, N). N is a multiple of VL. NR columns of b are adjacent; column j begins at
 * b + j * b_col: b_col is 1 for an ordinary matrix, K for one that is packed in panels of NR columns. */
static inline __attribute__((always_inline)) void tile_matmul(float *c, int64_t c_row, const float *a, int64_t a_row,
                                                              int64_t a_col, const float *b, int64_t b_row,
                                                              int64_t b_col, int64_t N, int64_t K, int accumulate,
                                                              const int pair) {
    int64_t j = 0;
    for (; j + VL < N; j += NR)
        tile_columns(c + j, c_row, a, a_row, a_col, b + j * b_col, b_row, K, accumulate, 2, pair);
    if (j < N) tile_columns(c + j, c_row, a, a_row, a_col, b + j * b_col, b_row, K, accumulate, 1, pair);
}

#endif
