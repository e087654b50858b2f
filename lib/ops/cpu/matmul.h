/* matmul.h: matmuls on the CPU: oneDNN's where it is installed and fast, otherwise a plain C matmul in register tiles;
 * linear layers of few rows are those of few_rows.h.
 *
 * A caller may rely on: the same bits for any number of threads.
 * oneDNN's matmul primitives are made once per shape and kept (ops_open, ops_close). The tile of the plain matmul,
 * tile_matmul, is also the inner loop of attention.
 */
#ifndef CPU_MATMUL_H
#define CPU_MATMUL_H
#include "../../device/device.h" // defines: Device, run_failure, checked_malloc
#include "../ops_common.h"       // defines: Matmul
#include "few_rows.h"            // defines: has_few_rows, few_rows_matmul
#include "vectors.h"             // defines: vfloat, load_x, store_x, MR, NR
#include <omp.h>
#include <pthread.h>
#include <signal.h>
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
// the inner loop of the plain bf16 matmul on Arm processors that have BFMMLA
//
// One BFMMLA multiplies a 2 x 4 block of A by a 4 x 2 block of B and adds the result to a 2 x 2 block of C: 16
// multiply-adds, twice as many as BFDOT, which attention uses through vdot_pairs.

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

#endif

// ---------------------------------------------------------------------------
// the register tile

/* c (MR, `vectors` vectors) = or += a (MR, K) b (K, …), with all sums in registers, over k in order. With `pair` 2 an
 * element of a or b is two bf16, 2k and 2k + 1 along the sum (PAIR in vectors.h). */
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

// ---------------------------------------------------------------------------
// the plain matmul

#ifndef HAVE_BFMMLA
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
 * inner loop reads both in order and from the cache. */
static void plain_matmul_block(const Matmul *p, char *c, const floatX *a, const floatX *b, int64_t i0, int64_t j0,
                               float *pack) {
    float *cs = pack;
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
static const char *onednn_open(const Device *dev, MatmulCache *cache) {
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
    if (dev->deterministic && !onednn_is_deterministic())
        return "on this processor the bits of oneDNN's matmuls depend on the number of threads";
    if (!matmul_find(cache, &probe)->primitive) return "oneDNN has no fast matmul in " PRECISION_NAME " here";
    return NULL;
}
#endif

// ---------------------------------------------------------------------------
// one matmul

static void cpu_matmul(Device *dev, const Matmul *p, void *c, const floatX *a, const floatX *b) {
    MatmulCache *cache = dev->matmuls;
    if (has_few_rows(p)) {
        few_rows_matmul(dev, p, (char *)c, a, b);
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
    if (!cache->pack) cache->pack = (float *)checked_malloc((size_t)dev->threads * PLAIN_PACK * sizeof(float));
    int64_t across = blocks_of(p->N, PLAIN_COLS), blocks = blocks_of(p->M, PLAIN_ROWS) * across;
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic)
    for (int64_t i = 0; i < blocks; i++)
        plain_matmul_block(p, (char *)c, a, b, i / across * PLAIN_ROWS, i % across * PLAIN_COLS,
                           cache->pack + (int64_t)omp_get_thread_num() * PLAIN_PACK);
}

static void cpu_require_head_size(int HD) { (void)HD; } // every size works

static void *wait_for_lock(void *lock) {
    pthread_mutex_lock((pthread_mutex_t *)lock);
    pthread_mutex_unlock((pthread_mutex_t *)lock);
    return NULL;
}

/* Refuses more threads than this account may start. OpenMP's library would end the process without naming an option. */
static void require_threads(int count) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // all threads exist until it is unlocked
    pthread_t *threads = new_array(pthread_t, count);
    int started = 1, failed = 0; // the first is the calling one
    pthread_mutex_lock(&lock);
    while (started < count && !failed) {
        failed = pthread_create(&threads[started], NULL, wait_for_lock, &lock);
        started += !failed;
    }
    pthread_mutex_unlock(&lock);
    for (int i = 1; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
    if (failed)
        user_error("only %d of the %d threads that a rank computes with could be started: use a smaller --threads, or "
                   "raise this account's limit of threads (ulimit -u) or the container's (pids.max)",
                   started, count);
}

/* oneDNN's matmuls let the stack pointer point into a buffer on the heap for a while, so that the handler of a signal
 * would overwrite what lies below that buffer. So handlers have a stack of their own in the thread that calls oneDNN,
 * and its OpenMP threads, which start here, take no signals. */
static void keep_signals_off_stack(int threads) {
    enum { BYTES = 1 << 16 };
    static __thread int has_stack;
    stack_t own = ZERO;
    sigset_t all, before;
    int started = 0;
    if (has_stack) return;
    has_stack = 1;
    own.ss_sp = checked_malloc(BYTES); // until the thread ends
    own.ss_size = BYTES;
    if (sigaltstack(&own, NULL)) run_failure("no stack could be set for the handlers of signals: %s", strerror(errno));
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
#pragma omp parallel num_threads(threads) reduction(+ : started)
    started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)started;
}

/* oneDNN takes the number of threads from the thread that calls it: hence once per rank, on the rank's own thread. */
static void cpu_ops_open(Device *dev, int say) {
    if (dev->dry_run) return;
    require_threads(dev->threads);
    omp_set_num_threads(dev->threads);
    keep_signals_off_stack(dev->threads);
    dev->matmuls = (MatmulCache *)checked_malloc(sizeof(MatmulCache));
#ifdef HAVE_ONEDNN
    const char *why = onednn_open(dev, dev->matmuls);
#else
    const char *why = "built without oneDNN";
#endif
    dev->matmuls->plain = why != NULL;
#ifdef HAVE_BFMMLA
    (void)say; // on this processor, the program's own matmul is the one to use
#else
    if (why && say) fprintf(stderr, "note: matmuls are plain C, several times slower: %s\n", why);
#endif
}

static void cpu_ops_close(Device *dev) {
    MatmulCache *cache = dev->matmuls;
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
    dev->matmuls = NULL;
}

#endif
