/* matmul.h: matmuls on the CPU: oneDNN's where it is installed and fast, otherwise a plain C matmul in register tiles;
 * linear layers of few rows have a loop of their own.
 *
 * A caller may rely on: the same bits for any number of threads.
 * oneDNN's matmul primitives are made once per shape and kept (ops_open, ops_close). The inner loop of the plain matmul
 * is in tile.h.
 */
#ifndef CPU_MATMUL_H
#define CPU_MATMUL_H
#include "../ops_common.h" // defines: Matmul
#include "tile.h"          // defines: tile_matmul, vdot_pairs; includes pairs.h: vpair, load_words
#include <omp.h>
#ifdef HAVE_ONEDNN
#include <dnnl.h>
#endif

enum {
    DX_DEPTH = 16384, // outputs in a partial sum of an fp32 dx: oneDNN is 20 % slower on longer ones
    DW_TOKENS = 1024, // tokens in a partial sum of dw: beyond this oneDNN's bits depend on the number of threads
    PLAIN_ROWS = 128, // block of C that the plain matmul computes at a time,
    PLAIN_COLS = 256,
    PLAIN_DEPTH = 256, // and the part of the sums for which A and B are packed
    PLAIN_PACK = PLAIN_ROWS * PLAIN_DEPTH + PLAIN_COLS * PLAIN_DEPTH + PLAIN_ROWS * PLAIN_COLS, // floats per thread
    RATE_ROWS = 512, // shape of the matmul that measures this device's speed
    RATE_COLS = 768,
    RATE_COUNTS = 1 // whether that measurement means anything
};

// ---------------------------------------------------------------------------
// the plain matmul
//
// Arm processors that have BFMMLA compute it in bf16. One BFMMLA multiplies a 2 x 4 block of A by a 4 x 2 block of B
// and adds the result to a 2 x 2 block of C: 16 multiply-adds, twice as many as BFDOT, which attention uses through
// vdot_pairs.

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
            for (int64_t i = k; i < k + 4; i++) *panel++ = j < count && i < depth ? in[j * row + i * col] : none;
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
#else
typedef float Packed; // what panels hold

/* panel (depth, width) = `count` vectors of `depth` floatX, converted to fp32; zeros for vectors beyond count. Vector j
 * begins at in + j * row, its elements are col apart. */
static void pack_panel(Packed *panel, int64_t width, const floatX *in, int64_t row, int64_t col, int64_t count,
                       int64_t depth) {
    count = min_i64(count, width);
    if (count < width) memset(panel, 0, (size_t)(width * depth) * sizeof(float));
    if (row == 1) { // both loop orders read memory in order
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < count; j++) panel[k * width + j] = to_float(in[j + k * col]);
    } else {
        for (int64_t j = 0; j < count; j++)
            for (int64_t k = 0; k < depth; k++) panel[k * width + j] = to_float(in[j * row + k * col]);
    }
}

/* c (MR, NR) = or += a (MR, depth) b (depth, NR), both packed. */
static inline void packed_tile(float *c, int64_t c_row, const Packed *a, const Packed *b, int64_t depth,
                               int accumulate) {
    tile_matmul(c, c_row, a, 1, MR, b, NR, 1, NR, depth, accumulate, 1);
}
#endif

/* The block of C that begins at (i0, j0). A and B are packed for PLAIN_DEPTH steps of the sums at a time, so that the
 * inner loop reads both in order and from the cache. cs (PLAIN_PACK) is memory for the sums of C, followed by the
 * packed A and B. */
static void plain_matmul_block(const Matmul *p, char *c, const floatX *a, const floatX *b, int64_t i0, int64_t j0,
                               float *cs) {
    Packed *as = (Packed *)(void *)(cs + PLAIN_ROWS * PLAIN_COLS), *bs = as + PLAIN_ROWS * PLAIN_DEPTH;
    int64_t rows = min_i64(PLAIN_ROWS, p->M - i0), cols = min_i64(PLAIN_COLS, p->N - j0);
    for (int64_t k0 = 0; k0 < p->K; k0 += PLAIN_DEPTH) {
        int64_t depth = min_i64(PLAIN_DEPTH, p->K - k0);
        for (int64_t i = 0; i < rows; i += MR)
            pack_panel(as + i * PLAIN_DEPTH, MR, a + (i0 + i) * p->a_row + k0 * p->a_col, p->a_row, p->a_col, rows - i,
                       depth);
        for (int64_t j = 0; j < cols; j += NR)
            pack_panel(bs + j * PLAIN_DEPTH, NR, b + (j0 + j) * p->b_col + k0 * p->b_row, p->b_col, p->b_row, cols - j,
                       depth);
        for (int64_t j = 0; j < cols; j += NR)
            for (int64_t i = 0; i < rows; i += MR)
                packed_tile(cs + i * PLAIN_COLS + j, PLAIN_COLS, as + i * PLAIN_DEPTH, bs + j * PLAIN_DEPTH, depth,
                            k0 > 0);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += VL) {
            int64_t at = (i0 + i) * p->c_row + j0 + j;
            vfloat x = vload(cs + i * PLAIN_COLS + j);
            if (p->c_float) {
                float *to = (float *)c + at;
                store_float(to, p->accumulate ? load_float(to, cols - j) + x : x, cols - j);
            } else {
                floatX *to = (floatX *)c + at;
                store_x(to, p->accumulate ? load_x(to, cols - j) + x : x, cols - j);
            }
        }
}

// ---------------------------------------------------------------------------
// linear layers of few rows, as in generation, where each new token is one row
//
// Such a matmul does so little arithmetic that reading the weights limits it. Each weight is read once, in order, for
// all rows together; the threads share the outputs. A caller may rely on: an output is a dot product whose order
// depends on nothing but its length, so it has the same bits for any number of threads and of other rows.

enum {
    FEW_ROWS = 4,            // at most; their sums, 2 vectors each, fit in the registers of any processor
    WORTH_THREADS = 1 << 15, // fewer multiplications than this take less time than waking the other threads
#ifdef HAVE_PAIRS
    DOT_STEP = 4 * (int)VL // elements that one step of a dot product multiplies
#else
    DOT_STEP = 2 * (int)VL
#endif
};

/* One step of a dot product, of whose vectors n elements are left. */
static inline vpair dot_step(const floatX *x, const floatX *w, int64_t n, vpair sum) {
#ifdef HAVE_PAIRS
    sum.a = vdot_pairs((vfloat)load_words(x, n), (vfloat)load_words(w, n), sum.a);
    if (n > 2 * VL)
        sum.b =
            vdot_pairs((vfloat)load_words(x + 2 * VL, n - 2 * VL), (vfloat)load_words(w + 2 * VL, n - 2 * VL), sum.b);
    return sum;
#else
    return pair_fma(load_pair(x, n), load_pair(w, n), sum);
#endif
}

/* Outputs begin … end - 1 of all `rows` rows. One output at a time, so that a thread reads its weights as one stream:
 * four rows of weights side by side were read at half the speed. */
static inline __attribute__((always_inline)) void few_rows_outputs(const Matmul *p, char *c, const floatX *a,
                                                                   const floatX *b, int64_t begin, int64_t end,
                                                                   const int rows) {
    for (int64_t o = begin; o < end; o++) {
        vpair sum[FEW_ROWS] = ZERO; // (rows) in registers, because all loops over it are unrolled
        const floatX *w = b + o * p->b_col;
        int64_t k = 0;
        for (; k + DOT_STEP <= p->K; k += DOT_STEP)
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) sum[m] = dot_step(a + m * p->a_row + k, w + k, DOT_STEP, sum[m]);
        for (int m = 0; m < rows && k < p->K; m++) sum[m] = dot_step(a + m * p->a_row + k, w + k, p->K - k, sum[m]);
        for (int m = 0; m < rows; m++) {
            float total = vsum(sum[m].a + sum[m].b), *c_float = (float *)(void *)c + m * p->c_row + o;
            floatX *c_x = (floatX *)(void *)c + m * p->c_row + o;
            if (p->c_float) *c_float = p->accumulate ? *c_float + total : total;
            else *c_x = from_float(p->accumulate ? to_float(*c_x) + total : total);
        }
    }
}

static void few_rows_matmul(OpStream *on, const Matmul *p, char *c, const floatX *a, const floatX *b) {
    int threads = p->N * p->K < WORTH_THREADS ? 1 : on->threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin = p->N * thread / threads, end = p->N * (thread + 1) / threads;
        if (p->M == 1) few_rows_outputs(p, c, a, b, begin, end, 1);
        else if (p->M == 2) few_rows_outputs(p, c, a, b, begin, end, 2);
        else if (p->M == 3) few_rows_outputs(p, c, a, b, begin, end, 3);
        else few_rows_outputs(p, c, a, b, begin, end, 4);
    }
}

// ---------------------------------------------------------------------------
// oneDNN

typedef struct MatmulCache {
    int plain;   // 1: every matmul is the plain one, because oneDNN is missing or not fast in floatX
    float *pack; // (threads, PLAIN_PACK) for the plain matmul, allocated when first used
    struct dnnl_engine *engine;
    struct dnnl_stream *stream;
    struct MatmulEntry *entries; // one per shape, made when it is first met
} MatmulCache;

#ifdef HAVE_ONEDNN
#if DNNL_VERSION_MAJOR >= 3 // memory descriptors are objects; in oneDNN 2 they are plain structs
#define DESC(d) (d)
#define DESC_INIT dnnl_memory_desc_create_with_strides
#define DESC_FREE(d) dnnl_memory_desc_destroy(d)
#define APPEND_SUM(post) dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef)
#else
#define DESC(d) (&(d))
#define DESC_INIT dnnl_memory_desc_init_by_strides
#define DESC_FREE(d) (void)(d)
#define APPEND_SUM(post) dnnl_post_ops_append_sum(post, 1.0f)
#endif

typedef struct MatmulEntry {
    Matmul matmul;
    dnnl_primitive_t primitive; // NULL: oneDNN has only its slow reference implementation for this shape
    dnnl_memory_t memory[3];    // A, B, C
    struct MatmulEntry *next;
} MatmulEntry;

/* Fills in the entry's primitive and memory objects. oneDNN keeps one scratchpad for all primitives of a thread, which
 * it allocates here and not during the step. */
static void matmul_create(MatmulCache *cache, MatmulEntry *entry) {
    const Matmul *p = &entry->matmul;
    dnnl_data_type_t x = FLOATX == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32, types[3] = {x, x, p->c_float ? dnnl_f32 : x};
    dnnl_dims_t sizes[3] = {{p->M, p->K}, {p->K, p->N}, {p->M, p->N}};
    dnnl_dims_t strides[3] = {{p->a_row, p->a_col}, {p->b_row, p->b_col}, {p->c_row, 1}};
    dnnl_memory_desc_t d[3];
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t post = NULL;
    dnnl_primitive_desc_t desc = NULL;
    const char *implementation = "ref";
    for (int i = 0; i < 3; i++)
        if (DESC_INIT(&d[i], 2, sizes[i], types[i], strides[i]) != dnnl_success) return;
    dnnl_primitive_attr_create(&attr);
    dnnl_post_ops_create(&post);
    if (p->accumulate) APPEND_SUM(post);
    dnnl_primitive_attr_set_post_ops(attr, post);
#if DNNL_VERSION_MAJOR >= 3
    dnnl_matmul_primitive_desc_create(&desc, cache->engine, d[0], d[1], NULL, d[2], attr);
#else
    dnnl_matmul_desc_t op;
    if (dnnl_matmul_desc_init(&op, &d[0], &d[1], NULL, &d[2]) == dnnl_success)
        dnnl_primitive_desc_create(&desc, &op, attr, cache->engine, NULL);
#endif
    if (desc) dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, &implementation);
    if (strncmp(implementation, "ref", 3)) dnnl_primitive_create(&entry->primitive, desc);
    for (int i = 0; i < 3; i++) {
        dnnl_memory_create(&entry->memory[i], DESC(d[i]), cache->engine, NULL);
        DESC_FREE(d[i]);
    }
    if (desc) dnnl_primitive_desc_destroy(desc);
    dnnl_post_ops_destroy(post);
    dnnl_primitive_attr_destroy(attr);
}

static MatmulEntry *matmul_find(MatmulCache *cache, const Matmul *p) {
    for (MatmulEntry *e = cache->entries; e; e = e->next)
        if (!memcmp(&e->matmul, p, sizeof *p)) return e;
    MatmulEntry *entry = (MatmulEntry *)checked_malloc(sizeof *entry);
    entry->matmul = *p;
    matmul_create(cache, entry);
    entry->next = cache->entries;
    cache->entries = entry;
    return entry;
}

/* Whether oneDNN's matmuls have the same bits for any number of threads. Its AVX-512 kernels do. Its older ones (AVX2
 * and SSE4.1) compute the edges of a thread's share in another order, so that small matmuls differ in the last bit. */
static int onednn_is_deterministic(void) {
#ifdef __x86_64__
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
#else
    return 0; // not known
#endif
}

/* Starts oneDNN. Returns NULL, or the reason why the plain matmul is used instead. */
static const char *onednn_open(const OpStream *on, MatmulCache *cache) {
    Matmul probe = {256, 256, 256, 256, 1, 1, 256, 256, 0, 0};
#if DNNL_VERSION_MAJOR < 3
    dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16); // oneDNN 2's AMX kernels crash: illegal instruction
#endif
    if (dnnl_engine_create(&cache->engine, dnnl_cpu, 0) != dnnl_success) return "oneDNN did not start";
    if (dnnl_stream_create(&cache->stream, cache->engine, dnnl_stream_default_flags) != dnnl_success)
        return "oneDNN did not start";
#if defined(PRECISION_BF16) && defined(__x86_64__)
    if (!__builtin_cpu_supports("avx512bf16")) return "this processor has no bf16 instructions"; // emulated: slower
#endif
    if (on->deterministic && !onednn_is_deterministic())
        return "on this processor the bits of oneDNN's matmuls depend on the number of threads";
    if (!matmul_find(cache, &probe)->primitive) return "oneDNN has no fast matmul in " PRECISION_NAME " here";
    return NULL;
}
#endif

// ---------------------------------------------------------------------------
// one matmul

static void cpu_matmul(OpStream *on, const Matmul *p, void *c, const floatX *a, const floatX *b) {
    MatmulCache *cache = on->matmuls;
    if (p->M <= FEW_ROWS && p->a_col == 1 && p->b_row == 1) { // rows and outputs' weights have adjacent elements
        few_rows_matmul(on, p, (char *)c, a, b);
        return;
    }
#ifdef HAVE_ONEDNN
    MatmulEntry *entry = cache->plain ? NULL : matmul_find(cache, p);
    if (entry && entry->primitive) {
        dnnl_memory_set_data_handle(entry->memory[0], (void *)(uintptr_t)a);
        dnnl_memory_set_data_handle(entry->memory[1], (void *)(uintptr_t)b);
        dnnl_memory_set_data_handle(entry->memory[2], c);
        dnnl_exec_arg_t args[3] = {
            {DNNL_ARG_SRC, entry->memory[0]}, {DNNL_ARG_WEIGHTS, entry->memory[1]}, {DNNL_ARG_DST, entry->memory[2]}};
        dnnl_status_t status = dnnl_primitive_execute(entry->primitive, cache->stream, 3, args);
        if (status != dnnl_success)
            run_failure("oneDNN: the matmul of (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64
                        ") failed with status %d",
                        p->M, p->K, p->K, p->N, status);
        return;
    }
#endif
    if (!cache->pack) cache->pack = (float *)checked_malloc((size_t)on->threads * PLAIN_PACK * sizeof(float));
    int64_t across = blocks_of(p->N, PLAIN_COLS), blocks = blocks_of(p->M, PLAIN_ROWS) * across;
#pragma omp parallel for num_threads(on->threads) schedule(dynamic)
    for (int64_t i = 0; i < blocks; i++)
        plain_matmul_block(p, (char *)c, a, b, i / across * PLAIN_ROWS, i % across * PLAIN_COLS,
                           cache->pack + (int64_t)omp_get_thread_num() * PLAIN_PACK);
}

static void cpu_require_head_size(int HD) { (void)HD; } // every size works
static size_t cpu_ops_workspace(void) { return 0; }

/* oneDNN takes the number of threads from the thread that calls it: hence once per rank, on the rank's own thread. */
static void cpu_ops_open(OpStream *on, void *workspace, int say) {
    (void)workspace;
    omp_set_num_threads(on->threads);
    on->matmuls = (MatmulCache *)checked_malloc(sizeof(MatmulCache));
#ifdef HAVE_ONEDNN
    const char *why = onednn_open(on, on->matmuls);
#else
    const char *why = "built without oneDNN";
#endif
    on->matmuls->plain = why != NULL;
#ifdef HAVE_BFMMLA
    (void)say; // on this processor, the program's own matmul is the one to use
#else
    if (why && say) fprintf(stderr, "note: matmuls are plain C, several times slower: %s\n", why);
#endif
}

static void cpu_ops_close(OpStream *on) {
    MatmulCache *cache = on->matmuls;
    if (!cache) return;
#ifdef HAVE_ONEDNN
    for (MatmulEntry *e = cache->entries, *next; e; e = next) {
        next = e->next;
        if (e->primitive) dnnl_primitive_destroy(e->primitive);
        for (int i = 0; i < 3; i++) dnnl_memory_destroy(e->memory[i]);
        free(e);
    }
    if (cache->stream) dnnl_stream_destroy(cache->stream);
    if (cache->engine) dnnl_engine_destroy(cache->engine);
#endif
    free(cache->pack);
    free(cache);
    on->matmuls = NULL;
}

#endif
