/* linear.c: a linear layer, y = x w^T with w (OC, IC) as in PyTorch's nn.Linear, and its two backward matmuls,
 * dx = dy w and dw += dy^T x.
 *
 * N IC + OC IC + N OC elements take 2 N IC OC FLOPs, so memory bandwidth need not be the limit. Each step brings that
 * closer: what was loaded is used many times before it is evicted, first by a tile of sums in registers, then by blocks
 * that fit the caches. All three are one matmul, C (M, N) = A (M, K) B (K, N), with different strides: in forward
 * memory is contiguous along the sum, in backward along the rows of B and C.
 *
 *   cc -O3 -march=native -ffp-contract=fast -fno-math-errno -fopenmp linear.c -o linear -lm
 * with linear.h page.h page_cpu.h lib/device/kernel.h lib/ops/cpu/matmul.h lib/ops/cpu/pairs.h lib/ops/cpu/tile.h
 * lib/ops/cpu/vectors.h lib/ops/ops_common.h */
#include "../../lib/ops/cpu/matmul.h"
#include "linear.h"

/* C[i][j ...] = or += sums of the full K; floatX or fp32. */
static inline void put(const Work *w, int64_t i, int64_t j, float sum) {
    float *c = (float *)w->c + i * w->p.c_row + j;
    if (w->p.c_float) *c = w->p.accumulate ? *c + sum : sum;
    else ((floatX *)w->c)[i * w->p.c_row + j] = from_float(sum);
}
static inline void put_vector(const Work *w, int64_t i, int64_t j, vfloat sum) {
    int64_t n = w->p.N - j;
    float *c = (float *)w->c + i * w->p.c_row + j;
    if (w->p.c_float) store_float(c, w->p.accumulate ? load_float(c, n) + sum : sum, n);
    else store_x((floatX *)w->c + i * w->p.c_row + j, sum, n);
}

// ---------------------------------------------------------------------------
// the steps

static void triple_loop(Case *c) {
    Work w = work_of(c);
    for (int64_t i = 0; i < w.p.M; i++)
        for (int64_t j = 0; j < w.p.N; j++) {
            float sum = 0;
            for (int64_t k = 0; k < w.p.K; k++)
                sum += to_float(w.a[i * w.p.a_row + k * w.p.a_col]) * to_float(w.b[k * w.p.b_row + j * w.p.b_col]);
            put(&w, i, j, sum);
        }
}

/* Both operands are contiguous along the sum: dot products of vectors. */
static void dot_products(Case *c) {
    Work w = work_of(c);
    for (int64_t i = 0; i < w.p.M; i++)
        for (int64_t j = 0; j < w.p.N; j++) {
            vfloat sum = vsplat(0);
            for (int64_t k = 0; k < w.p.K; k += VL)
                sum = vfma(load_x(w.a + i * w.p.a_row + k, w.p.K - k), load_x(w.b + j * w.p.b_col + k, w.p.K - k), sum);
            put(&w, i, j, vsum(sum));
        }
}

/* Rows of B and C are contiguous: a row of C is a sum of rows of B. */
static void sums_of_rows(Case *c) {
    Work w = work_of(c);
    size_t bytes = (size_t)round_up(w.p.N, VL) * sizeof(float);
    float *row = (float *)page_scratch(c, bytes);
    for (int64_t i = 0; i < w.p.M; i++) {
        memset(row, 0, bytes);
        for (int64_t k = 0; k < w.p.K; k++) {
            vfloat a = vsplat(to_float(w.a[i * w.p.a_row + k * w.p.a_col]));
            for (int64_t j = 0; j < w.p.N; j += VL)
                vstore(row + j, vfma(a, load_x(w.b + k * w.p.b_row + j, w.p.N - j), vload(row + j)));
        }
        for (int64_t j = 0; j < w.p.N; j += VL) put_vector(&w, i, j, vload(row + j));
    }
}

/* dot_products and sums_of_rows with a tile of sums in registers. Rows beyond the last repeat it and are not stored. */
enum { DOTS = MR / 2 };
static void dot_tiles(Case *c) {
    Work w = work_of(c);
    for (int64_t j = 0; j < w.p.N; j += DOTS)
        for (int64_t i = 0; i < w.p.M; i += DOTS) {
            const floatX *a[DOTS], *b[DOTS];
            vfloat sum[DOTS][DOTS] = ZERO;
            for (int r = 0; r < DOTS; r++) {
                a[r] = w.a + min_i64(i + r, w.p.M - 1) * w.p.a_row;
                b[r] = w.b + min_i64(j + r, w.p.N - 1) * w.p.b_col;
            }
            for (int64_t k = 0; k < w.p.K; k += VL) {
                vfloat bk[DOTS];
#pragma GCC unroll 8
                for (int s = 0; s < DOTS; s++) bk[s] = load_x(b[s] + k, w.p.K - k);
#pragma GCC unroll 8
                for (int r = 0; r < DOTS; r++) {
                    vfloat ak = load_x(a[r] + k, w.p.K - k);
#pragma GCC unroll 8
                    for (int s = 0; s < DOTS; s++) sum[r][s] = vfma(ak, bk[s], sum[r][s]);
                }
            }
            for (int r = 0; r < min_i64(DOTS, w.p.M - i); r++)
                for (int s = 0; s < min_i64(DOTS, w.p.N - j); s++) put(&w, i + r, j + s, vsum(sum[r][s]));
        }
}
static void row_tiles(Case *c) {
    Work w = work_of(c);
    for (int64_t j = 0; j < w.p.N; j += NR)
        for (int64_t i = 0; i < w.p.M; i += MR) {
            const floatX *a[MR], *b = w.b + j;
            vfloat sum[MR][2] = ZERO;
            int64_t left = min_i64(VL, w.p.N - j),
                    right = max_i64(0, min_i64(VL, w.p.N - j - VL)); // columns of the tile's two vectors
            for (int r = 0; r < MR; r++) a[r] = w.a + min_i64(i + r, w.p.M - 1) * w.p.a_row;
            for (int64_t k = 0; k < w.p.K; k++, b += w.p.b_row) {
                vfloat b0 = load_x(b, left), b1 = load_x(b + VL, right);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) {
                    vfloat ak = vsplat(to_float(a[r][k * w.p.a_col]));
                    sum[r][0] = vfma(ak, b0, sum[r][0]);
                    sum[r][1] = vfma(ak, b1, sum[r][1]);
                }
            }
            for (int r = 0; r < min_i64(MR, w.p.M - i); r++) {
                put_vector(&w, i + r, j, sum[r][0]);
                if (right) put_vector(&w, i + r, j + VL, sum[r][1]);
            }
        }
}

/* panel (depth / 2, width): as pack_panel, but each 32-bit word holds two bf16, adjacent along the sum. */
static void pack_pairs(float *panel, int64_t width, const floatX *in, int64_t row, int64_t col, int64_t count,
                       int64_t depth) {
    memset(panel, 0, (size_t)(width * blocks_of(depth, 2)) * sizeof(float));
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t j = 0; j < min_i64(count, width); j++) {
            floatX both[2] = {in[j * row + k * col], k + 1 < depth ? in[j * row + (k + 1) * col] : from_float(0)};
            memcpy(&panel[k / 2 * width + j], both, sizeof(float));
        }
}

/* Block number `block` of C. Pieces of A and B are copied into panels, in the order in which a tile reads
 * them. */
static inline __attribute__((always_inline)) void packed_block(const Work *w, int64_t block, float *space,
                                                               const int pair) {
    void (*pack)(float *, int64_t, const floatX *, int64_t, int64_t, int64_t, int64_t) =
        pair == 2 ? pack_pairs : pack_panel;
    float *as = space, *bs = as + PLAIN_ROWS * PLAIN_DEPTH, *sums = bs + PLAIN_COLS * PLAIN_DEPTH;
    int64_t across = blocks_of(w->p.N, PLAIN_COLS), i0 = block / across * PLAIN_ROWS, j0 = block % across * PLAIN_COLS;
    int64_t rows = min_i64(PLAIN_ROWS, w->p.M - i0), cols = min_i64(PLAIN_COLS, w->p.N - j0);
    for (int64_t k0 = 0; k0 < w->p.K; k0 += PLAIN_DEPTH * pair) {
        int64_t elements = min_i64(PLAIN_DEPTH * pair, w->p.K - k0), depth = blocks_of(elements, pair);
        for (int64_t i = 0; i < rows; i += MR)
            pack(as + i * PLAIN_DEPTH, MR, w->a + (i0 + i) * w->p.a_row + k0 * w->p.a_col, w->p.a_row, w->p.a_col,
                 rows - i, elements);
        for (int64_t j = 0; j < cols; j += NR)
            pack(bs + j * PLAIN_DEPTH, NR, w->b + (j0 + j) * w->p.b_col + k0 * w->p.b_row, w->p.b_col, w->p.b_row,
                 cols - j, elements);
        for (int64_t j = 0; j < cols; j += NR) // a panel of B stays in the L1 cache while the panels of A pass
            for (int64_t i = 0; i < rows; i += MR)
                tile_matmul(sums + i * PLAIN_COLS + j, PLAIN_COLS, as + i * PLAIN_DEPTH, 1, MR, bs + j * PLAIN_DEPTH,
                            NR, 1, NR, depth, k0 > 0, pair);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += VL) put_vector(w, i0 + i, j0 + j, vload(sums + i * PLAIN_COLS + j));
}
static int64_t blocks_in(const Work *w) { return blocks_of(w->p.M, PLAIN_ROWS) * blocks_of(w->p.N, PLAIN_COLS); }

static void packed(Case *c) {
    Work w = work_of(c);
    float *space = (float *)page_scratch(c, PLAIN_PACK * sizeof(float));
    for (int64_t i = 0; i < blocks_in(&w); i++) packed_block(&w, i, space, 1);
}
static void packed_pairs(Case *c) {
    Work w = work_of(c);
    float *space = (float *)page_scratch(c, (size_t)c->on->threads * PLAIN_PACK * sizeof(float));
#pragma omp parallel for num_threads(c->on->threads) schedule(dynamic)
    for (int64_t i = 0; i < blocks_in(&w); i++) packed_block(&w, i, space + omp_get_thread_num() * PLAIN_PACK, 2);
}

static void plain(Case *c) {
    int was = c->on->matmuls->plain;
    c->on->matmuls->plain = 1;
    in_use(c);
    c->on->matmuls->plain = was;
}

#define PACKED                                                                                                         \
    {                                                                                                                  \
        "4 panels",                                                                                                    \
            "Blocks of A and B are first copied into panels: the tile reads both from front to back, from the "        \
            "nearest "                                                                                                 \
            "caches, and each element is converted to fp32 once per block instead of once per tile.",                  \
            packed                                                                                                     \
    }
#define PLAIN                                                                                                          \
    {                                                                                                                  \
        "5 threads",                                                                                                   \
            "Blocks divided over threads: the plain matmul of lib/ops/cpu, in use without oneDNN and, in bf16, on "    \
            "processors "                                                                                              \
            "without bf16 instructions.",                                                                              \
            plain                                                                                                      \
    }
#ifdef HAVE_PAIRS
#define PAIRS                                                                                                          \
    {"6 pairs of bf16",                                                                                                \
     "Panels hold bf16 as they are, two neighbours along the sum in 32 bits, which one instruction multiplies and "    \
     "adds: nothing is converted, and a sum takes half as many steps.",                                                \
     packed_pairs},
#else
#define PAIRS
#endif
static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 triple loop",
     "The formula: each sum is one chain of additions, each waiting for the previous one, and all of w is read for "
     "each row of x.",
     triple_loop},
    {"2 vectors",
     "x and w are contiguous along the sum, so a vector multiplies VL elements of it: as many partial sums as lanes.",
     dot_products},
    {"3 a tile in registers",
     "Several rows of x by several rows of w at once: each vector that is loaded enters several FMAs, and several "
     "chains of additions run side by side.",
     dot_tiles},
    PACKED,
    PLAIN,
    PAIRS{"in use: oneDNN",
          "The same ideas, with code that oneDNN generates for the shape when it is first met, prefetching, and blocks "
          "fitted to the caches; the code is kept.",
          in_use}};
static const Version input_versions[PAGE_VERSIONS] = {
    {"1 triple loop",
     "The formula: a sum goes down a column of w, which uses one element of each cache line it touches.", triple_loop},
    {"2 by rows",
     "The loops in another order: a row of dx is a sum of rows of w, so w is read in order, by vectors; but each "
     "FMA loads and stores its sum.",
     sums_of_rows},
    {"3 a tile in registers",
     "The sums of several rows by two vectors stay in registers until they are complete. w is read once for that many "
     "rows, but down a narrow strip, from one row to the next, which suits the caches badly.",
     row_tiles},
    PACKED,
    PLAIN,
    PAIRS{"in use: oneDNN",
          "As in forward. In fp32, sums over more than 16,384 outputs (the head's) are computed in several parts, "
          "which is faster.",
          in_use}};
static const Version weight_versions[PAGE_VERSIONS] = {
    {"1 triple loop", "The formula: the sum is over tokens, so it goes down a column of dy and a column of x.",
     triple_loop},
    {"2 by rows",
     "A row of dw is a sum of rows of x; only dy is still read down its columns, one element for each row of x.",
     sums_of_rows},
    {"3 a tile in registers",
     "Several rows of dw by two vectors stay in registers over all tokens. But elements of a dy column that are a "
     "power of two apart compete for a few places of the cache, and alone this version can lose to 2.",
     row_tiles},
    PACKED,
    PLAIN,
    PAIRS{"in use: oneDNN",
          "As in forward, for at most 1,024 tokens at a time, each part added in fp32: longer sums oneDNN divides "
          "among threads, and then the bits depend on how many there are.",
          in_use}};

static void linear_open(OpStream *on) { cpu_ops_open(on, NULL, 1); }

PAGE_THAT_OPENS(linear_open, {&forward, forward_versions}, {&input, input_versions}, {&weight, weight_versions})
