/* kernels.h: every op of forward and backward, in C.
 *
 * Owns: the arithmetic of the CPU backend and its cache of matrix products (kernels_open, kernels_close).
 * The model calls the ops at the end of this file; each books its FLOPs and bytes, takes its scratch, and calls
 * BACKEND(op). So the cpu_* functions are the definition of each op, and a backend is a set of such functions.
 * A caller may rely on: all tensors are row-major; arithmetic is fp32 whatever floatX is; results have the same
 * bits for any number of threads, and wherever a flat tensor is cut; a walking device reads and writes nothing.
 */
#ifndef KERNELS_H
#define KERNELS_H
#include "device.h" // defines: Device, floatX, op_begin, op_end, scratch, arena_release
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <sched.h>
#ifdef HAVE_ONEDNN
#include <dnnl.h>
#endif
#ifndef BACKEND
#define BACKEND(op) cpu_##op
#endif
#ifdef __NVCC__
#pragma nv_diag_suppress 1675 // nvcc hands "GCC unroll" through, but remarks on it
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not call every op
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between static functions only
#endif

// ---------------------------------------------------------------------------
// vectors: VL floats, by GCC's vector extensions. A tail is a vector whose last lanes are filled, so that it
// goes through the same instructions as the body: that is what makes cuts of a tensor invisible in its bits.

enum {
#if defined(__AVX512F__)
    VL = 16, MR = 8, // 32 registers: 8 rows x 2 vectors of sums
#elif defined(__AVX2__) && defined(__FMA__)
    VL = 8, MR = 4,  // 16 registers: 4 rows x 2 vectors; more would spill
#else
    VL = 4, MR = 4,
#endif
    NR = 2 * VL,
    // Block sizes, all multiples of NR. Where a sum is cut at them they decide bits: fixed, whatever the threads.
    CHUNK = 1 << 14,      // elements a thread takes at once in flat loops
    NORM_BLOCK = 128,     // elements in a partial sum of squares: shards and units start at multiples of it
    NORM_ROWS = 32,       // rows in a partial sum of an RMSNorm's dw
    LOSS_BLOCK = 512,     // logits in a partial sum of exponentials
    DX_DEPTH = 16384,     // outputs in a partial sum of an fp32 dX: oneDNN is 20 % slower on longer ones
    DW_TOKENS = 1024,     // tokens in a partial sum of a dW: beyond this oneDNN's bits depend on the threads
    FORWARD_ROWS = 64, FORWARD_KEYS = 256,   // attention: rows a thread takes at once, keys between two steps of the softmax
    BACKWARD_ROWS = 128, BACKWARD_KEYS = 128,
    PLAIN_ROWS = 128, PLAIN_COLS = 256, PLAIN_DEPTH = 256, // the plain product
    PLAIN_PACK = PLAIN_ROWS * PLAIN_DEPTH + PLAIN_COLS * PLAIN_DEPTH + PLAIN_ROWS * PLAIN_COLS
};
typedef float vfloat __attribute__((vector_size(VL * 4)));
typedef int32_t vint __attribute__((vector_size(VL * 4)));
typedef uint32_t vuint __attribute__((vector_size(VL * 4)));
typedef uint16_t vhalf __attribute__((vector_size(VL * 2)));

static inline vfloat vsplat(float s) { vfloat zero = ZERO; return s - zero; }
static inline vfloat vselect(vint mask, vfloat a, vfloat b) { return (vfloat)((mask & (vint)a) | (~mask & (vint)b)); }

/* Whether gcc fuses a*b + c depends on the code around it (on which side of a branch the product landed, on who else
 * uses it). Where a product meets an addition we say which we want: vfma(a, b, c) is fused, vrounded(a * b) is not.
 * widen and narrow are bf16's upper halves to fp32 lanes and back. */
#if defined(__AVX512F__)
#define IN_REGISTER "+v"
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vfloat vsqrt(vfloat a) { return (vfloat)_mm512_sqrt_ps((__m512)a); }
static inline vuint widen(vhalf h) { return (vuint)_mm512_cvtepu16_epi32((__m256i)h); }
static inline vhalf narrow(vuint u) { return (vhalf)_mm512_cvtepi32_epi16((__m512i)u); }
#elif defined(__AVX2__) && defined(__FMA__)
#define IN_REGISTER "+x"
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vfloat vsqrt(vfloat a) { return (vfloat)_mm256_sqrt_ps((__m256)a); }
static inline vuint widen(vhalf h) { return (vuint)_mm256_cvtepu16_epi32((__m128i)h); }
static inline vhalf narrow(vuint u) {
    __m256i packed = _mm256_packus_epi32((__m256i)u, (__m256i)u); // within each half
    return (vhalf)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
#define IN_REGISTER "+m"
static inline vfloat vfma(vfloat a, vfloat b, vfloat c) { return a * b + c; }
static inline vfloat vmax(vfloat a, vfloat b) { return vselect(a > b, a, b); }
static inline vfloat vsqrt(vfloat a) {
    for (int i = 0; i < VL; i++) a[i] = sqrtf(a[i]);
    return a;
}
static inline vuint widen(vhalf h) { return __builtin_convertvector(h, vuint); }
static inline vhalf narrow(vuint u) { return __builtin_convertvector(u, vhalf); }
#endif
static inline vfloat vrounded(vfloat x) { __asm__("" : IN_REGISTER(x)); return x; }

static inline vfloat vload(const float *p) { vfloat x; memcpy(&x, p, sizeof x); return x; }
static inline void vstore(float *p, vfloat x) { memcpy(p, &x, sizeof x); }
static inline float vsum(vfloat x) { // by halves
    float s[VL];
    vstore(s, x);
    if (VL > 8) for (int i = 0; i < 8; i++) s[i] += s[i + VL / 2];
    if (VL > 4) for (int i = 0; i < 4; i++) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline float vmax_lane(vfloat x) {
    float s[VL], m = -INFINITY;
    vstore(s, x);
    if (VL > 8) for (int i = 0; i < 8; i++) s[i] = s[i] > s[i + VL / 2] ? s[i] : s[i + VL / 2];
    for (int i = 0; i < (VL > 8 ? 8 : VL); i++) m = s[i] > m ? s[i] : m;
    return m;
}

/* Up to VL elements; lanes from n on hold `fill` (or 0). The ragged ends are kept out of line, so that the loops stay in registers. */
#define RAGGED static __attribute__((noinline, cold))
#define WHOLE(n) __builtin_expect((n) >= VL, 1)
RAGGED vfloat load_ragged(const float *p, int64_t n, float fill) {
    vfloat x = vsplat(fill);
    for (int i = 0; i < (int)n; i++) x[i] = p[i];
    return x;
}
RAGGED void store_ragged(float *p, vfloat x, int64_t n) {
    for (int i = 0; i < (int)n; i++) p[i] = x[i];
}
static inline vfloat load_fill(const float *p, int64_t n, float fill) { return WHOLE(n) ? vload(p) : load_ragged(p, n, fill); }
static inline vfloat load_float(const float *p, int64_t n) { return load_fill(p, n, 0.0f); }
static inline void store_float(float *p, vfloat x, int64_t n) {
    if (WHOLE(n)) vstore(p, x);
    else store_ragged(p, x, n);
}

#ifdef PRECISION_BF16
RAGGED vhalf load_ragged_x(const floatX *p, int64_t n) {
    vhalf h = ZERO;
    for (int i = 0; i < (int)n; i++) h[i] = p[i].bits;
    return h;
}
RAGGED void store_ragged_x(floatX *p, vhalf h, int64_t n) {
    for (int i = 0; i < (int)n; i++) p[i].bits = h[i];
}
static inline vfloat load_x(const floatX *p, int64_t n) {
    vhalf h;
    if (WHOLE(n)) memcpy(&h, p, sizeof h);
    else h = load_ragged_x(p, n);
    return (vfloat)(widen(h) << 16);
}
static inline void store_x(floatX *p, vfloat x, int64_t n) { // rounds as float_to_bf16 does
    vuint u = (vuint)x;
    vuint rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    vuint nan = (vuint)((vint)(u & 0x7FFFFFFFu) > 0x7F800000);
    vhalf h = narrow((nan & ((u >> 16) | 0x40u)) | (~nan & rounded));
    if (WHOLE(n)) memcpy(p, &h, sizeof h);
    else store_ragged_x(p, h, n);
}
#else
static inline vfloat load_x(const floatX *p, int64_t n) { return load_float(p, n); }
static inline void store_x(floatX *p, vfloat x, int64_t n) { store_float(p, x, n); }
#endif

/* e^x within 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (the remainder is
 * below 2^-27), 2^n by adding n to the exponent. Exactly 0 below -87.33, where floats lose bits; 2.4e38 above 88.37. */
static inline vfloat vexp(vfloat x) {
    const float round_bias = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vint too_low = x < -87.33f, too_high = x > 88.37f;
    x = vselect(too_high, vsplat(88.37f), x);
    vfloat biased = vfma(x, vsplat(1.44269504f), vsplat(round_bias)), n = biased - round_bias;
    vfloat r = vfma(n, vsplat(-0.693145752f), x); // ln 2 in two parts, the first short enough that n times it is exact
    r = vfma(n, vsplat(-1.42860677e-6f), r);
    vfloat p = vfma(r, vsplat(1.0f / 5040), vsplat(1.0f / 720));
    p = vfma(p, r, vsplat(1.0f / 120));
    p = vfma(p, r, vsplat(1.0f / 24));
    p = vfma(p, r, vsplat(1.0f / 6));
    p = vfma(p, r, vsplat(0.5f));
    p = vfma(p, r, vsplat(1.0f));
    p = vfma(p, r, vsplat(1.0f));
    p = (vfloat)((vuint)p + ((vuint)biased << 23));
    return (vfloat)(~too_low & (vint)p);
}
static inline float exp_float(float x) { return vexp(vsplat(x))[0]; }

static inline int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

// ---------------------------------------------------------------------------
// matrix products: C(M,N) = or += A(M,K) B(K,N), any strides

/* The inner loop of attention and of the plain product: c(MR,NR) = or += a(MR,K) b(K,NR), sums over k in order. */
static inline __attribute__((always_inline)) void tile_product(
    float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t b_row, int64_t K, int accumulate) {
    vfloat sum0[MR], sum1[MR]; // registers, once the loops over r are unrolled
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
        sum0[r] = accumulate ? vload(c + r * c_row) : vsplat(0);
        sum1[r] = accumulate ? vload(c + r * c_row + VL) : vsplat(0);
    }
    for (int64_t k = 0; k < K; k++, a += a_col, b += b_row) {
        vfloat b0 = vload(b), b1 = vload(b + VL);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            vfloat ar = vsplat(a[r * a_row]);
            sum0[r] += ar * b0;
            sum1[r] += ar * b1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
        vstore(c + r * c_row, sum0[r]);
        vstore(c + r * c_row + VL, sum1[r]);
    }
}

/* Widens the vectors in(j * row), `depth` elements col apart each, into panel(depth, width); `count` of them exist, the rest are zero. */
static void pack_panel(float *panel, int64_t width, const floatX *in, int64_t row, int64_t col, int64_t count, int64_t depth) {
    count = min_i64(count, width);
    if (count < width) memset(panel, 0, (size_t)(width * depth) * sizeof(float));
    if (row == 1) // both ways read memory in order
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < count; j++) panel[k * width + j] = to_float(in[j + k * col]);
    else
        for (int64_t j = 0; j < count; j++)
            for (int64_t k = 0; k < depth; k++) panel[k * width + j] = to_float(in[j * row + k * col]);
}

typedef struct { // int64_t throughout: no padding, so two can be compared as bytes
    int64_t M, N, K;
    int64_t a_row, a_col, b_row, b_col, c_row; // elements between neighbours
    int64_t c_float;                           // 1: C is fp32, 0: C is floatX (as A and B are)
    int64_t accumulate;                        // 1: += (fp32 C only)
} Product;

#ifdef HAVE_ONEDNN
typedef struct { Product product; dnnl_primitive_t primitive; dnnl_memory_t a, b, c, scratchpad; } MatmulEntry;
#endif

typedef struct MatmulCache {
    int plain;  // 1: no library, or the library has no fast product for floatX
    float *pack; // threads x PLAIN_PACK, for the plain product, had when first needed
#ifdef HAVE_ONEDNN
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    MatmulEntry *entries;
    int count, capacity;
    void *scratchpad; // of the largest product: products of one rank run one after the other
    size_t scratchpad_bytes;
#endif
} MatmulCache;

/* One block of C: A and B are widened and packed piece by piece; every sum goes over k in order. */
static void plain_product_block(const Product *p, char *c, const floatX *a, const floatX *b, int64_t i0, int64_t j0, float *pack) {
    float *as = pack, *bs = as + PLAIN_ROWS * PLAIN_DEPTH, *cs = bs + PLAIN_COLS * PLAIN_DEPTH;
    int64_t rows = min_i64(PLAIN_ROWS, p->M - i0), cols = min_i64(PLAIN_COLS, p->N - j0);
    for (int64_t k0 = 0; k0 < p->K; k0 += PLAIN_DEPTH) {
        int64_t depth = min_i64(PLAIN_DEPTH, p->K - k0);
        for (int64_t i = 0; i < rows; i += MR) pack_panel(as + i * PLAIN_DEPTH, MR, a + (i0 + i) * p->a_row + k0 * p->a_col, p->a_row, p->a_col, rows - i, depth);
        for (int64_t j = 0; j < cols; j += NR) pack_panel(bs + j * PLAIN_DEPTH, NR, b + (j0 + j) * p->b_col + k0 * p->b_row, p->b_col, p->b_row, cols - j, depth);
        for (int64_t j = 0; j < cols; j += NR)
            for (int64_t i = 0; i < rows; i += MR)
                tile_product(cs + i * PLAIN_COLS + j, PLAIN_COLS, as + i * PLAIN_DEPTH, 1, MR, bs + j * PLAIN_DEPTH, NR, depth, k0 > 0);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += VL) {
            int64_t at = (i0 + i) * p->c_row + j0 + j;
            vfloat x = vload(cs + i * PLAIN_COLS + j);
            if (!p->c_float) store_x((floatX *)c + at, x, cols - j);
            else store_float((float *)c + at, p->accumulate ? load_float((float *)c + at, cols - j) + x : x, cols - j);
        }
}

static void plain_product(Device *dev, const Product *p, void *c, const floatX *a, const floatX *b) {
    MatmulCache *cache = dev->matmuls;
    if (!cache->pack) cache->pack = (float *)checked_malloc((size_t)dev->threads * PLAIN_PACK * sizeof(float));
    int64_t across = (p->N + PLAIN_COLS - 1) / PLAIN_COLS, blocks = (p->M + PLAIN_ROWS - 1) / PLAIN_ROWS * across;
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic)
    for (int64_t i = 0; i < blocks; i++)
        plain_product_block(p, (char *)c, a, b, i / across * PLAIN_ROWS, i % across * PLAIN_COLS, cache->pack + (int64_t)omp_get_thread_num() * PLAIN_PACK);
}

#ifdef HAVE_ONEDNN
/* oneDNN 2 has memory descriptors as plain structs, oneDNN 3 as objects of its own. */
static int memory_desc(dnnl_memory_desc_t *d, int64_t rows, int64_t cols, int64_t row, int64_t col, dnnl_data_type_t type) {
    dnnl_dims_t dims = {rows, cols}, strides = {row, col};
#if DNNL_VERSION_MAJOR >= 3
#define DESC(d) (d)
#define DESC_FREE(d) dnnl_memory_desc_destroy(d)
    return dnnl_memory_desc_create_with_strides(d, 2, dims, type, strides) == dnnl_success;
#else
#define DESC(d) (&(d))
#define DESC_FREE(d) (void)(d)
    return dnnl_memory_desc_init_by_strides(d, 2, dims, type, strides) == dnnl_success;
#endif
}

/* The library's plan for one product; entry->primitive stays NULL where it has none that is worth using. */
static void matmul_create(MatmulCache *cache, MatmulEntry *entry) {
    const Product *p = &entry->product;
    dnnl_data_type_t x = FLOATX == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32;
    dnnl_memory_desc_t a, b, c;
    if (!memory_desc(&a, p->M, p->K, p->a_row, p->a_col, x) || !memory_desc(&b, p->K, p->N, p->b_row, p->b_col, x) ||
        !memory_desc(&c, p->M, p->N, p->c_row, 1, p->c_float ? dnnl_f32 : x)) return;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t post = NULL;
    dnnl_primitive_attr_create(&attr);
    dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user); // ours: no allocation in the step
    dnnl_post_ops_create(&post);
    dnnl_primitive_desc_t plan = NULL;
#if DNNL_VERSION_MAJOR >= 3
    if (p->accumulate) dnnl_post_ops_append_sum(post, 1.0f, 0, dnnl_data_type_undef);
    dnnl_primitive_attr_set_post_ops(attr, post);
    dnnl_status_t status = dnnl_matmul_primitive_desc_create(&plan, cache->engine, a, b, NULL, c, attr);
#else
    if (p->accumulate) dnnl_post_ops_append_sum(post, 1.0f);
    dnnl_primitive_attr_set_post_ops(attr, post);
    dnnl_matmul_desc_t op;
    dnnl_status_t status = dnnl_matmul_desc_init(&op, &a, &b, NULL, &c);
    if (status == dnnl_success) status = dnnl_primitive_desc_create(&plan, &op, attr, cache->engine, NULL);
#endif
    const char *how = "";
    if (status == dnnl_success) dnnl_primitive_desc_query(plan, dnnl_query_impl_info_str, 0, &how);
    if (status == dnnl_success && strncmp(how, "ref", 3) && dnnl_primitive_create(&entry->primitive, plan) == dnnl_success) {
        size_t bytes = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(plan, dnnl_query_scratchpad_md, 0));
        if (bytes > cache->scratchpad_bytes) {
            free(cache->scratchpad);
            cache->scratchpad = NULL;
            if (posix_memalign(&cache->scratchpad, 4096, bytes)) run_failure("out of memory: %zu bytes for oneDNN's scratchpad could not be had", bytes);
            cache->scratchpad_bytes = bytes;
        }
        dnnl_memory_create(&entry->a, DESC(a), cache->engine, NULL);
        dnnl_memory_create(&entry->b, DESC(b), cache->engine, NULL);
        dnnl_memory_create(&entry->c, DESC(c), cache->engine, NULL);
        dnnl_memory_create(&entry->scratchpad, dnnl_primitive_desc_query_md(plan, dnnl_query_scratchpad_md, 0), cache->engine, NULL);
    }
    if (plan) dnnl_primitive_desc_destroy(plan);
    dnnl_post_ops_destroy(post);
    dnnl_primitive_attr_destroy(attr);
    DESC_FREE(a);
    DESC_FREE(b);
    DESC_FREE(c);
}

static MatmulEntry *matmul_find(MatmulCache *cache, const Product *p) {
    for (int i = 0; i < cache->count; i++)
        if (!memcmp(&cache->entries[i].product, p, sizeof *p)) return &cache->entries[i];
    if (cache->count == cache->capacity) {
        cache->capacity = cache->capacity ? 2 * cache->capacity : 32;
        cache->entries = (MatmulEntry *)realloc(cache->entries, (size_t)cache->capacity * sizeof *cache->entries);
        if (!cache->entries) run_failure("out of memory: the table of %d matrix products could not be had", cache->capacity);
    }
    MatmulEntry *entry = &cache->entries[cache->count++];
    memset(entry, 0, sizeof *entry);
    entry->product = *p;
    matmul_create(cache, entry);
    return entry;
}

static int library_product(Device *dev, const Product *p, void *c, const floatX *a, const floatX *b) {
    MatmulEntry *entry = matmul_find(dev->matmuls, p);
    if (!entry->primitive) return 0;
    dnnl_memory_set_data_handle(entry->a, (void *)(uintptr_t)a);
    dnnl_memory_set_data_handle(entry->b, (void *)(uintptr_t)b);
    dnnl_memory_set_data_handle(entry->c, c);
    dnnl_memory_set_data_handle(entry->scratchpad, dev->matmuls->scratchpad);
    dnnl_exec_arg_t args[4] = {{DNNL_ARG_SRC, entry->a}, {DNNL_ARG_WEIGHTS, entry->b}, {DNNL_ARG_DST, entry->c}, {DNNL_ARG_SCRATCHPAD, entry->scratchpad}};
    dnnl_status_t status = dnnl_primitive_execute(entry->primitive, dev->matmuls->stream, 4, args);
    if (status != dnnl_success) run_failure("oneDNN: a product of (%" PRId64 ",%" PRId64 ") by (%" PRId64 ",%" PRId64 ") failed with status %d", p->M, p->K, p->K, p->N, (int)status);
    return 1;
}
#endif

static void product(Device *dev, const Product *p, void *c, const floatX *a, const floatX *b) {
#ifdef HAVE_ONEDNN
    if (!dev->matmuls->plain && library_product(dev, p, c, a, b)) return;
#endif
    plain_product(dev, p, c, a, b);
}

/* Once per rank, on the rank's own thread: the library's threads are a property of the thread that calls it. */
static void kernels_open(Device *dev, int say) {
    if (dev->walk) return;
    omp_set_num_threads(dev->threads);
    MatmulCache *cache = dev->matmuls = (MatmulCache *)checked_malloc(sizeof(MatmulCache));
    const char *why = "built without oneDNN";
#ifdef HAVE_ONEDNN
    why = NULL;
    if (dnnl_engine_create(&cache->engine, dnnl_cpu, 0) != dnnl_success || dnnl_stream_create(&cache->stream, cache->engine, dnnl_stream_default_flags) != dnnl_success)
        why = "oneDNN did not start";
#if defined(PRECISION_BF16) && defined(__x86_64__)
    else if (!__builtin_cpu_supports("avx512bf16")) why = "this processor has no bf16 instructions"; // the library would emulate them, slower
#endif
    else {
        Product probe = {256, 256, 256, 256, 1, 1, 256, 256, 0, 0};
        if (!matmul_find(cache, &probe)->primitive) why = "oneDNN has no fast product for " PRECISION_NAME " here";
    }
#endif
    cache->plain = why != NULL;
    if (why && say) fprintf(stderr, "matrix products: plain C, %s\n", why);
}

static void kernels_close(Device *dev) {
    MatmulCache *cache = dev->matmuls;
    if (!cache) return;
#ifdef HAVE_ONEDNN
    for (int i = 0; i < cache->count; i++) {
        MatmulEntry *e = &cache->entries[i];
        if (!e->primitive) continue;
        dnnl_primitive_destroy(e->primitive);
        dnnl_memory_destroy(e->a);
        dnnl_memory_destroy(e->b);
        dnnl_memory_destroy(e->c);
        dnnl_memory_destroy(e->scratchpad);
    }
    free(cache->entries);
    free(cache->scratchpad);
    if (cache->stream) dnnl_stream_destroy(cache->stream);
    if (cache->engine) dnnl_engine_destroy(cache->engine);
#endif
    free(cache->pack);
    free(cache);
    dev->matmuls = NULL;
}

static void cpu_linear_forward(Device *dev, floatX *y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    Product p = {N, OC, IC, IC, 1, 1, IC, OC, FLOATX == DTYPE_F32, 0};
    product(dev, &p, y, x, w);
}

static void cpu_linear_forward_fp32(Device *dev, float *y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    Product p = {N, OC, IC, IC, 1, 1, IC, OC, 1, 0};
    product(dev, &p, y, x, w);
}

static void cpu_linear_backward_input(Device *dev, floatX *dx, const floatX *dy, int64_t dy_stride, const floatX *w, int N, int IC, int OC) {
    int64_t depth = FLOATX == DTYPE_F32 ? DX_DEPTH : OC; // bf16 sums must not be rounded on the way
    for (int64_t o = 0; o < OC; o += depth) {
        Product p = {N, IC, min_i64(depth, OC - o), dy_stride, 1, IC, 1, IC, FLOATX == DTYPE_F32, o > 0};
        product(dev, &p, dx, dy + o, w + o * IC);
    }
}

static void cpu_linear_backward_weight(Device *dev, float *dw, const floatX *dy, int64_t dy_stride, const floatX *x, int N, int IC, int OC, int accumulate) {
    for (int n = 0; n < N; n += DW_TOKENS) {
        Product p = {OC, IC, min_i64(DW_TOKENS, N - n), 1, dy_stride, IC, 1, IC, 1, accumulate || n > 0};
        product(dev, &p, dw, dy + n * dy_stride, x + (int64_t)n * IC);
    }
}

// ---------------------------------------------------------------------------
// embedding

static void cpu_embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int N, int C) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        if (ids[n] < 0) memset(x + (int64_t)n * C, 0, (size_t)C * sizeof *x);
        else memcpy(x + (int64_t)n * C, embed + (int64_t)ids[n] * C, (size_t)C * sizeof *x);
    }
}

/* Rows of dembed belong to threads, so each row is summed by one thread, over n in order. */
static void cpu_embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int N, int C) {
#pragma omp parallel for num_threads(dev->threads)
    for (int owner = 0; owner < dev->threads; owner++)
        for (int n = 0; n < N; n++) {
            if (ids[n] < 0 || ids[n] % dev->threads != owner) continue;
            float *row = dembed + (int64_t)ids[n] * C;
            for (int64_t i = 0; i < C; i += VL)
                store_float(row + i, load_float(row + i, C - i) + load_x(dx + (int64_t)n * C + i, C - i), C - i);
        }
}

// ---------------------------------------------------------------------------
// RMSNorm (Zhang & Sennrich 2019, eq. 4): out = w x / sqrt(mean(x^2) + eps)

static void cpu_rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w, float eps, int N, int C) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        int64_t row = (int64_t)n * C;
        const floatX *in = delta ? sum + row : x + row; // the rounded sum: recomputing it elsewhere gives these bits
        vfloat squares = vsplat(0);
        for (int64_t i = 0; i < C; i += VL) {
            if (delta) store_x(sum + row + i, load_x(x + row + i, C - i) + load_x(delta + row + i, C - i), C - i);
            vfloat v = load_x(in + i, C - i);
            squares = vfma(v, v, squares);
        }
        float scale = 1.0f / sqrtf(vsum(squares) / (float)C + eps);
        rstd[n] = scale;
        for (int64_t i = 0; i < C; i += VL)
            store_x(out + row + i, load_x(in + i, C - i) * scale * load_x(w + i, C - i), C - i);
    }
}

static size_t cpu_rmsnorm_backward_scratch(int N, int C) { return (size_t)((N + NORM_ROWS - 1) / NORM_ROWS) * (size_t)C * sizeof(float); }

/* With y = x rstd and g = dout w: dx = rstd (g - y mean(g y)), dw = sum over rows of dout y. */
static void rmsnorm_backward_row(floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x, float rstd, const floatX *w, int C) {
    vfloat dot = vsplat(0);
    for (int64_t i = 0; i < C; i += VL) {
        vfloat y = load_x(x + i, C - i) * rstd, d = load_x(dout + i, C - i);
        vfloat g = d * load_x(w + i, C - i);
        dot = vfma(g, y, dot);
        store_float(dw + i, vfma(d, y, load_float(dw + i, C - i)), C - i);
    }
    float mean = vsum(dot) / (float)C;
    for (int64_t i = 0; i < C; i += VL) {
        vfloat y = load_x(x + i, C - i) * rstd, g = vrounded(load_x(dout + i, C - i) * load_x(w + i, C - i));
        vfloat d = vrounded(vfma(y, vsplat(-mean), g) * rstd);
        if (dresidual) d += load_x(dresidual + i, C - i);
        store_x(dx + i, d, C - i);
    }
}

static void cpu_rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x, const float *rstd,
                                 const floatX *w, int N, int C, void *scratchpad) {
    float *partial = (float *)scratchpad; // (blocks, C)
    int blocks = (N + NORM_ROWS - 1) / NORM_ROWS;
#pragma omp parallel for num_threads(dev->threads)
    for (int b = 0; b < blocks; b++) {
        memset(partial + (int64_t)b * C, 0, (size_t)C * sizeof(float));
        for (int64_t n = (int64_t)b * NORM_ROWS; n < min_i64(N, ((int64_t)b + 1) * NORM_ROWS); n++)
            rmsnorm_backward_row(dx + n * C, partial + (int64_t)b * C, dout + n * C, dresidual ? dresidual + n * C : NULL, x + n * C, rstd[n], w, C);
    }
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < C; i += VL) {
        vfloat total = vsplat(0);
        for (int b = 0; b < blocks; b++) total += load_float(partial + (int64_t)b * C + i, C - i);
        store_float(dw + i, load_float(dw + i, C - i) + total, C - i);
    }
}

// ---------------------------------------------------------------------------
// RoPE (Su et al. 2021), Hugging Face's half-split pairing: element i turns with element i + HD/2

static void rope(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads, int HD, float direction) {
    int half = HD / 2;
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const float *table = cos_sin + (int64_t)positions[n % T] * half * 2; // (half, 2)
        for (int i = 0; i < half; i += VL) {
            vfloat c = vsplat(0), s = vsplat(0);
            for (int l = 0; l < VL && i + l < half; l++) c[l] = table[2 * (i + l)], s[l] = direction * table[2 * (i + l) + 1];
            for (int h = 0; h < heads; h++) {
                floatX *first = x + n * stride + (int64_t)h * HD + i, *second = first + half;
                vfloat a = load_x(first, half - i), b = load_x(second, half - i);
                store_x(first, vfma(a, c, vrounded(b * -s)), half - i);
                store_x(second, vfma(b, c, vrounded(a * s)), half - i);
            }
        }
    }
}
static void cpu_rope_forward(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads, int HD) {
    rope(dev, x, stride, cos_sin, positions, N, T, heads, HD, 1.0f);
}
static void cpu_rope_backward(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads, int HD) {
    rope(dev, x, stride, cos_sin, positions, N, T, heads, HD, -1.0f); // a rotation's transpose turns the other way
}

// ---------------------------------------------------------------------------
// attention, never (T, T): blocks of keys with an online softmax (Milakov & Gimelshein 2018, Dao et al. 2022)
//
// The G = NH / NKV query heads of one key/value head are handled together: row r stands for query r / G of head
// kv * G + r % G, and each (sequence, kv head) has Tq * G rows. K and V are widened once per (sequence, kv head).

typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int q_offset;                 // query t sees keys 0 ... q_offset + t (negative: that query sees nothing)
    const int32_t *q_doc, *k_doc; // (B,Tq), (B,Tk), or NULL: a query sees keys of its own document only
    int64_t q_stride, k_stride, v_stride, o_stride; // elements between tokens; heads are HD apart
    int64_t q_batch, kv_batch;    // elements between sequences of q, and of k and v; 0: Tq * q_stride, Tk * k_stride, Tk * v_stride
} AttentionShape;

typedef struct {
    const AttentionShape *s;
    int G;
    int64_t rows;              // Tq * G
    int64_t keys;              // Tk, rounded up to NR: what is beyond Tk holds zeros
    int64_t ld;                // floats between widened rows: HD rounded up to NR, plus a vector against cache conflicts
    float *kt, *vt;            // (B*NKV, keys/NR, HD, NR): transposed, the right operands of Q K^T and dO V^T
    float *k, *v;              // (B*NKV, keys, ld)
    float *dk, *dv;            // (B*NKV, keys, ld)
    int *turn;                 // (B*NKV, key blocks): items that have added their share to dk and dv
    float *local;              // (threads, local_floats)
    int64_t local_floats;
} Attention;

static inline int64_t or_else(int64_t stride, int64_t otherwise) { return stride ? stride : otherwise; }

/* Lays the work space of one call out from `base`, which may be NULL to learn the size only. Returns bytes. */
static size_t attention_layout(Attention *a, const AttentionShape *s, int threads, int backward, void *base) {
    memset(a, 0, sizeof *a);
    a->s = s;
    a->G = s->NH / s->NKV;
    a->rows = (int64_t)s->Tq * a->G;
    a->keys = round_up(s->Tk, NR);
    a->ld = round_up(s->HD, NR) + VL;
    int64_t pairs = (int64_t)s->B * s->NKV, panels = pairs * round_up(a->keys * s->HD, 64), rows = pairs * a->keys * a->ld;
    int64_t blocks = (a->keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS;
    if (backward) a->local_floats = 3 * BACKWARD_ROWS * a->ld + 2 * BACKWARD_ROWS * BACKWARD_KEYS + round_up(2 * BACKWARD_ROWS, 64);
    else a->local_floats = 2 * MR * a->ld + MR * FORWARD_KEYS;
    a->local_floats = round_up(a->local_floats, 64);
    int64_t floats = 0;
    float *start = (float *)base;
#define TAKE(field, count) if (base) a->field = start + floats; floats += round_up(count, 64)
    TAKE(kt, panels);
    if (backward) {
        TAKE(vt, panels);
        TAKE(k, rows);
        TAKE(dk, rows);
        TAKE(dv, rows);
    } else { TAKE(v, rows); }
    TAKE(local, threads * a->local_floats);
#undef TAKE
    if (base) a->turn = (int *)(void *)(start + floats);
    return (size_t)floats * sizeof(float) + (backward ? (size_t)(pairs * blocks) * sizeof(int) : 0);
}

static size_t cpu_attention_scratch(const Device *dev, const AttentionShape *s, int backward) {
    Attention a;
    return attention_layout(&a, s, dev->threads, backward, NULL);
}

/* out(n, ld) = scale * in(count, HD), fp32; rows beyond `count` and columns beyond HD are zero. */
static void widen_row(float *out, const floatX *in, int HD, int64_t ld, float scale) {
    int64_t i = 0;
    for (; in && i < HD; i += VL) vstore(out + i, load_x(in + i, HD - i) * scale);
    for (; i < ld; i += VL) vstore(out + i, vsplat(0));
}

static void attention_pack(Device *dev, Attention *a, const floatX *k, const floatX *v) {
    const AttentionShape *s = a->s;
    int64_t panels = a->keys / NR, pairs = (int64_t)s->B * s->NKV;
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < pairs * panels; i++) {
        int64_t pair = i / panels, key = i % panels * NR, count = min_i64(NR, s->Tk - key), b = pair / s->NKV, head = pair % s->NKV;
        int64_t panel = pair * round_up(a->keys * s->HD, 64) + key * s->HD;
        const floatX *kp = k + b * or_else(s->kv_batch, s->Tk * s->k_stride) + key * s->k_stride + head * s->HD;
        const floatX *vp = v + b * or_else(s->kv_batch, s->Tk * s->v_stride) + key * s->v_stride + head * s->HD;
        pack_panel(a->kt + panel, NR, kp, s->k_stride, 1, count, s->HD);
        if (a->vt) pack_panel(a->vt + panel, NR, vp, s->v_stride, 1, count, s->HD);
        for (int64_t j = 0; j < NR; j++) {
            int64_t at = (pair * a->keys + key + j) * a->ld;
            if (a->k) widen_row(a->k + at, j < count ? kp + j * s->k_stride : NULL, s->HD, a->ld, 1.0f);
            if (a->v) widen_row(a->v + at, j < count ? vp + j * s->v_stride : NULL, s->HD, a->ld, 1.0f);
            if (a->dk) memset(a->dk + at, 0, (size_t)a->ld * sizeof(float)), memset(a->dv + at, 0, (size_t)a->ld * sizeof(float));
        }
    }
}

typedef struct { int64_t b, kv, pair, head, t; } AttentionRow;
static inline AttentionRow attention_row(const Attention *a, int64_t pair, int64_t r) {
    AttentionRow row = {pair / a->s->NKV, pair % a->s->NKV, pair, pair % a->s->NKV * a->G + r % a->G, r / a->G};
    return row;
}
static inline int64_t q_at(const AttentionShape *s, AttentionRow r) { return r.b * or_else(s->q_batch, s->Tq * s->q_stride) + r.t * s->q_stride + r.head * s->HD; }
static inline int64_t o_at(const AttentionShape *s, AttentionRow r) { return (r.b * s->Tq + r.t) * s->o_stride + r.head * s->HD; }
static inline int64_t lse_at(const AttentionShape *s, AttentionRow r) { return (r.b * s->NH + r.head) * s->Tq + r.t; }

/* How many keys row r sees by position alone: 0 for rows beyond the last one. Never falls with r. */
static inline int64_t visible_keys(const Attention *a, int64_t r) {
    return r >= a->rows ? 0 : max_i64(0, min_i64(a->s->Tk, (int64_t)a->s->q_offset + r / a->G + 1));
}

/* The first key that any of rows [r0, r1) shares a document with, down to a multiple of NR: earlier blocks are skipped. */
static int64_t first_key(const Attention *a, int64_t pair, int64_t r0, int64_t r1, int64_t end) {
    const AttentionShape *s = a->s;
    if (!s->q_doc) return 0;
    const int32_t *q_doc = s->q_doc + pair / s->NKV * s->Tq, *k_doc = s->k_doc + pair / s->NKV * s->Tk;
    for (int64_t key = 0; key < end; key += NR) {
        int any = 0, count = (int)min_i64(NR, end - key);
        for (int64_t t = r0 / a->G; t <= (r1 - 1) / a->G; t++)
            for (int j = 0; j < count; j++) any |= k_doc[key + j] == q_doc[t]; // no early exit: gcc makes vectors of this
        if (any) return key;
    }
    return end;
}

/* Scores of one row against keys k0 ... k0 + n - 1 (n a multiple of NR): what the row does not see becomes -infinity. */
static inline void mask_scores(const Attention *a, AttentionRow row, int64_t visible, float *scores, int64_t k0, int64_t n) {
    for (int64_t j = max_i64(0, visible - k0); j < n; j++) scores[j] = -INFINITY;
    if (!a->s->q_doc || visible <= k0) return;
    const int32_t *k_doc = a->s->k_doc + row.b * a->s->Tk + k0;
    int32_t doc = a->s->q_doc[row.b * a->s->Tq + row.t];
    int64_t count = min_i64(n, visible - k0);
    for (int64_t j = 0; j < count; j++) scores[j] = k_doc[j] == doc ? scores[j] : -INFINITY;
}

/* One step of the online softmax of one row: scores(n) become exp(score - max so far); out(ld) and sum are brought to that maximum. */
static inline void softmax_step(float *scores, int64_t n, float *max, float *sum, float *out, int64_t ld) {
    vfloat m = vsplat(*max);
    for (int64_t j = 0; j < n; j += VL) m = vmax(m, vload(scores + j));
    float new_max = vmax_lane(m), base = new_max == -INFINITY ? 0.0f : new_max; // nothing seen yet: exp(-inf - 0) = 0
    vfloat total = vsplat(0);
    for (int64_t j = 0; j < n; j += VL) {
        vfloat e = vexp(vload(scores + j) - base);
        vstore(scores + j, e);
        total += e;
    }
    float rescale = new_max == *max ? 1.0f : exp_float(*max - base);
    for (int64_t i = 0; i < ld && rescale != 1.0f; i += VL) vstore(out + i, vload(out + i) * rescale);
    *sum = *sum * rescale + vsum(total);
    *max = new_max;
}

/* MR rows from r0 on. local: q (MR, ld), out (MR, ld), scores (MR, FORWARD_KEYS). */
static void attention_forward_strip(const Attention *a, floatX *out, float *lse, const floatX *q, int64_t pair, int64_t r0, float *local) {
    const AttentionShape *s = a->s;
    float *qs = local, *os = qs + MR * a->ld, *scores = os + MR * a->ld, max[MR], sum[MR];
    int64_t rows = min_i64(MR, a->rows - r0), end = visible_keys(a, r0 + rows - 1);
    for (int r = 0; r < MR; r++) {
        widen_row(qs + r * a->ld, r < rows ? q + q_at(s, attention_row(a, pair, r0 + r)) : NULL, s->HD, a->ld, 1.0f / sqrtf((float)s->HD));
        widen_row(os + r * a->ld, NULL, s->HD, a->ld, 0);
        max[r] = -INFINITY;
        sum[r] = 0;
    }
    const float *kt = a->kt + pair * round_up(a->keys * s->HD, 64), *v = a->v + pair * a->keys * a->ld;
    for (int64_t k0 = first_key(a, pair, r0, r0 + rows, end); k0 < end; k0 += FORWARD_KEYS) {
        int64_t n = min_i64(FORWARD_KEYS, end - k0), padded = round_up(n, NR);
        for (int64_t j = 0; j < padded; j += NR)
            tile_product(scores + j, FORWARD_KEYS, qs, a->ld, 1, kt + (k0 + j) * s->HD, NR, s->HD, 0);
        for (int r = 0; r < MR; r++) {
            mask_scores(a, attention_row(a, pair, r0 + r), visible_keys(a, r0 + r), scores + r * FORWARD_KEYS, k0, padded);
            softmax_step(scores + r * FORWARD_KEYS, padded, &max[r], &sum[r], os + r * a->ld, a->ld);
        }
        for (int64_t d = 0; d < s->HD; d += NR)
            tile_product(os + d, a->ld, scores, FORWARD_KEYS, 1, v + k0 * a->ld + d, a->ld, n, 1);
    }
    for (int r = 0; r < rows; r++) {
        AttentionRow row = attention_row(a, pair, r0 + r);
        float inverse = sum[r] > 0 ? 1.0f / sum[r] : sum[r]; // nothing seen: 0; NaN stays NaN
        for (int64_t d = 0; d < s->HD; d += VL) store_x(out + o_at(s, row) + d, vload(os + r * a->ld + d) * inverse, s->HD - d);
        lse[lse_at(s, row)] = sum[r] == 0 ? -INFINITY : max[r] + logf(sum[r]);
    }
}

static void cpu_attention_forward(Device *dev, floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s, void *scratchpad) {
    Attention a;
    attention_layout(&a, s, dev->threads, 0, scratchpad);
    attention_pack(dev, &a, k, v);
    int64_t pairs = (int64_t)s->B * s->NKV, items = (a.rows + FORWARD_ROWS - 1) / FORWARD_ROWS * pairs;
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic)
    for (int64_t i = items - 1; i >= 0; i--) { // late rows see most keys: first
        float *local = a.local + omp_get_thread_num() * a.local_floats;
        for (int64_t r = i / pairs * FORWARD_ROWS; r < min_i64(a.rows, (i / pairs + 1) * FORWARD_ROWS); r += MR)
            attention_forward_strip(&a, out, lse, q, i % pairs, r, local);
    }
}

/* Backward (Dao et al. 2022, appendix B.2): with P = exp(S - lse) and D = rowsum(dout * out),
 *   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD).
 * An item is BACKWARD_ROWS rows of one (sequence, kv head) and owns their dQ. dK and dV are shared between items,
 * which add to each block of keys in a fixed order: late rows first, each waiting for its turn. */
typedef struct {
    float *q, *dout, *dq; // (BACKWARD_ROWS, ld); q times 1/sqrt(HD)
    float *p, *ds;        // (BACKWARD_ROWS, BACKWARD_KEYS)
    float *lse, *D;       // (BACKWARD_ROWS)
    int64_t pair, r0, rows, padded; // padded: rows, up to MR
} BackwardItem;

static void backward_item_load(const Attention *a, BackwardItem *it, const floatX *q, const floatX *dout, const floatX *out, const float *lse) {
    const AttentionShape *s = a->s;
    for (int64_t r = 0; r < it->padded; r++) {
        int exists = r < it->rows;
        AttentionRow row = attention_row(a, it->pair, it->r0 + r);
        const floatX *o = out + o_at(s, row), *d = dout + o_at(s, row);
        widen_row(it->q + r * a->ld, exists ? q + q_at(s, row) : NULL, s->HD, a->ld, 1.0f / sqrtf((float)s->HD));
        widen_row(it->dout + r * a->ld, exists ? d : NULL, s->HD, a->ld, 1.0f);
        widen_row(it->dq + r * a->ld, NULL, s->HD, a->ld, 0);
        vfloat dot = vsplat(0);
        for (int64_t i = 0; exists && i < s->HD; i += VL) dot = vfma(load_x(o + i, s->HD - i), load_x(d + i, s->HD - i), dot);
        it->D[r] = vsum(dot);
        it->lse[r] = exists ? lse[lse_at(s, row)] : -INFINITY;
    }
}

/* S, dP, then P and dS of MR rows from r on, for n keys from k0 on (n a multiple of NR). */
static void backward_scores(const Attention *a, BackwardItem *it, int64_t r, int64_t k0, int64_t n) {
    const AttentionShape *s = a->s;
    int64_t panels = it->pair * round_up(a->keys * s->HD, 64) + k0 * s->HD;
    float *p = it->p + r * BACKWARD_KEYS, *ds = it->ds + r * BACKWARD_KEYS;
    for (int64_t j = 0; j < n; j += NR) {
        tile_product(p + j, BACKWARD_KEYS, it->q + r * a->ld, a->ld, 1, a->kt + panels + j * s->HD, NR, s->HD, 0);
        tile_product(ds + j, BACKWARD_KEYS, it->dout + r * a->ld, a->ld, 1, a->vt + panels + j * s->HD, NR, s->HD, 0);
    }
    for (int64_t i = 0; i < MR; i++, p += BACKWARD_KEYS, ds += BACKWARD_KEYS) {
        float lse = it->lse[r + i], D = it->D[r + i];
        int64_t visible = lse == -INFINITY ? 0 : visible_keys(a, it->r0 + r + i);
        mask_scores(a, attention_row(a, it->pair, it->r0 + r + i), visible, p, k0, n);
        if (lse == -INFINITY) lse = 0; // sees nothing: exp(-inf - 0) = 0
        for (int64_t j = 0; j < n; j += VL) {
            vfloat e = vexp(vload(p + j) - lse);
            vstore(p + j, e);
            vstore(ds + j, e * (vload(ds + j) - D));
        }
    }
}

static inline void wait_turn(const int *turn, int order) {
    for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != order; spins++)
        if (spins > 1000) sched_yield();
}

static void attention_backward_item(const Attention *a, BackwardItem *it, floatX *dq, int order) {
    const AttentionShape *s = a->s;
    int64_t end = visible_keys(a, it->r0 + it->rows - 1), begin = first_key(a, it->pair, it->r0, it->r0 + it->rows, end);
    int64_t blocks = (a->keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS, base = it->pair * a->keys;
    int *turn = a->turn + it->pair * blocks;
    for (int64_t k0 = 0; k0 < end; k0 += BACKWARD_KEYS, turn++) {
        int64_t keys = min_i64(BACKWARD_KEYS, end - k0), seen[BACKWARD_ROWS / MR]; // seen: keys computed for each strip of MR rows
        for (int64_t r = 0; r < it->padded && k0 + keys > begin; r += MR) {
            int64_t n = max_i64(0, min_i64(keys, visible_keys(a, it->r0 + min_i64(r + MR, it->rows) - 1) - k0));
            seen[r / MR] = round_up(n, NR);
            backward_scores(a, it, r, k0, seen[r / MR]);
            for (int64_t d = 0; d < s->HD; d += NR)
                tile_product(it->dq + r * a->ld + d, a->ld, it->ds + r * BACKWARD_KEYS, BACKWARD_KEYS, 1, a->k + (base + k0) * a->ld + d, a->ld, n, 1);
        }
        wait_turn(turn, order);
        for (int64_t j = 0; j < keys && k0 + keys > begin; j += MR) {
            int64_t r = 0; // the first rows may not see so far
            while (seen[r / MR] <= j) r += MR;
            for (int64_t d = 0; d < s->HD; d += NR) {
                int64_t at = (base + k0 + j) * a->ld + d;
                tile_product(a->dv + at, a->ld, it->p + r * BACKWARD_KEYS + j, 1, BACKWARD_KEYS, it->dout + r * a->ld + d, a->ld, it->padded - r, 1);
                tile_product(a->dk + at, a->ld, it->ds + r * BACKWARD_KEYS + j, 1, BACKWARD_KEYS, it->q + r * a->ld + d, a->ld, it->padded - r, 1);
            }
        }
        __atomic_store_n(turn, order + 1, __ATOMIC_RELEASE);
    }
    for (int64_t r = 0; r < it->rows; r++)
        for (int64_t d = 0; d < s->HD; d += VL)
            store_x(dq + q_at(s, attention_row(a, it->pair, it->r0 + r)) + d, vload(it->dq + r * a->ld + d) * (1.0f / sqrtf((float)s->HD)), s->HD - d);
}

static void cpu_attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out, const float *lse,
                                   const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s, void *scratchpad) {
    Attention a;
    attention_layout(&a, s, dev->threads, 1, scratchpad);
    attention_pack(dev, &a, k, v);
    int64_t pairs = (int64_t)s->B * s->NKV, orders = (a.rows + BACKWARD_ROWS - 1) / BACKWARD_ROWS;
    memset(a.turn, 0, (size_t)(pairs * ((a.keys + BACKWARD_KEYS - 1) / BACKWARD_KEYS)) * sizeof(int));
    // Items start in this order, so whoever waits, waits for an item that has started: no deadlock with any number of threads.
#pragma omp parallel for num_threads(dev->threads) schedule(monotonic : dynamic, 1)
    for (int64_t i = 0; i < orders * pairs; i++) {
        BackwardItem it;
        it.pair = i % pairs;
        it.r0 = (orders - 1 - i / pairs) * BACKWARD_ROWS;
        it.rows = min_i64(BACKWARD_ROWS, a.rows - it.r0);
        it.padded = round_up(it.rows, MR);
        it.q = a.local + omp_get_thread_num() * a.local_floats;
        it.dout = it.q + BACKWARD_ROWS * a.ld;
        it.dq = it.dout + BACKWARD_ROWS * a.ld;
        it.p = it.dq + BACKWARD_ROWS * a.ld;
        it.ds = it.p + BACKWARD_ROWS * BACKWARD_KEYS;
        it.lse = it.ds + BACKWARD_ROWS * BACKWARD_KEYS;
        it.D = it.lse + BACKWARD_ROWS;
        backward_item_load(&a, &it, q, dout, out, lse);
        attention_backward_item(&a, &it, dq, (int)(i / pairs));
    }
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < pairs * s->Tk; i++) {
        int64_t pair = i / s->Tk, key = i % s->Tk, at = (pair * a.keys + key) * a.ld, head = pair % s->NKV * s->HD, b = pair / s->NKV;
        floatX *dk_row = dk + b * or_else(s->kv_batch, s->Tk * s->k_stride) + key * s->k_stride + head;
        floatX *dv_row = dv + b * or_else(s->kv_batch, s->Tk * s->v_stride) + key * s->v_stride + head;
        for (int64_t d = 0; d < s->HD; d += VL) {
            store_x(dk_row + d, vload(a.dk + at + d), s->HD - d);
            store_x(dv_row + d, vload(a.dv + at + d), s->HD - d);
        }
    }
}

// ---------------------------------------------------------------------------
// SwiGLU (Shazeer 2020): h = gate * sigmoid(gate) * up

static void cpu_swiglu_forward(Device *dev, floatX *h, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        for (int64_t i = 0; i < F; i += VL) {
            vfloat g = load_x(gate + i, F - i);
            store_x(h + (int64_t)n * F + i, g / (1.0f + vexp(-g)) * load_x(up + i, F - i), F - i);
        }
    }
}

static void cpu_swiglu_backward(Device *dev, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
#pragma omp parallel for num_threads(dev->threads)
    for (int n = 0; n < N; n++) {
        const floatX *gate = gate_up + (int64_t)n * 2 * F, *up = gate + F;
        floatX *dgate = dgate_up + (int64_t)n * 2 * F, *dup = dgate + F;
        for (int64_t i = 0; i < F; i += VL) {
            vfloat g = load_x(gate + i, F - i), u = load_x(up + i, F - i), d = load_x(dh + (int64_t)n * F + i, F - i);
            vfloat sigmoid = 1.0f / (1.0f + vexp(-g)), silu = vrounded(g * sigmoid);
            vfloat slope = vfma(sigmoid, 1.0f - silu, silu); // d silu / d gate
            store_x(dgate + i, d * u * slope, F - i);
            store_x(dup + i, d * silu, F - i);
        }
    }
}

// ---------------------------------------------------------------------------
// loss: -log softmax(logits)[target], and its gradient softmax(logits) - onehot(target) over the logits

static float cross_entropy_row(float *logits, int32_t target, int64_t V, int want_grad) {
    floatX *dlogits = (floatX *)(void *)logits; // never overtakes what is still to be read: floatX is no wider
    if (target < 0) {
        if (want_grad) memset(dlogits, 0, (size_t)V * sizeof(floatX));
        return 0.0f;
    }
    float target_logit = logits[target], total = 0;
    vfloat m = vsplat(-INFINITY);
    for (int64_t i = 0; i < V; i += VL) m = vmax(m, load_fill(logits + i, V - i, -INFINITY));
    float max = vmax_lane(m);
    for (int64_t block = 0; block < V; block += LOSS_BLOCK) {
        vfloat sum = vsplat(0);
        for (int64_t i = block; i < min_i64(V, block + LOSS_BLOCK); i += VL) {
            vfloat e = vexp(load_fill(logits + i, V - i, -INFINITY) - max);
            if (want_grad) store_float(logits + i, e, V - i);
            sum += e;
        }
        total += vsum(sum);
    }
    if (want_grad) {
        float inverse = 1.0f / total, at_target = logits[target] * inverse - 1.0f;
        for (int64_t i = 0; i < V; i += VL) store_x(dlogits + i, load_float(logits + i, V - i) * inverse, V - i);
        dlogits[target] = from_float(at_target);
    }
    return (max - target_logit) + logf(total);
}

static void cpu_cross_entropy(Device *dev, float *losses, float *logits, const int32_t *targets, int N, int V, int want_grad) {
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic)
    for (int n = 0; n < N; n++) losses[n] = cross_entropy_row(logits + (int64_t)n * V, targets[n], V, want_grad);
}

// ---------------------------------------------------------------------------
// flat tensors: sums over pieces, norm, AdamW, cast

static void cpu_tree_sum(Device *dev, float *out, const float *pieces, int n, int64_t count, int accumulate) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t c = 0; c < chunks_of(count); c++)
        for (int64_t i = c * CHUNK; i < min_i64(count, (c + 1) * CHUNK); i += VL) {
            vfloat level[32]; // sums that wait for their right neighbour, widest first
            int waiting = 0;
            for (int k = 0; k < n; k++) {
                vfloat sum = load_float(pieces + k * count + i, count - i);
                for (int bits = k; bits & 1; bits >>= 1) sum = level[--waiting] + sum;
                level[waiting++] = sum;
            }
            vfloat total = level[--waiting];
            while (waiting) total = level[--waiting] + total;
            store_float(out + i, accumulate ? load_float(out + i, count - i) + total : total, count - i);
        }
}

static size_t cpu_squared_norm_scratch(int64_t count) { return (size_t)((count + NORM_BLOCK - 1) / NORM_BLOCK) * sizeof(float); }

static void cpu_squared_norm(Device *dev, ExactSum *total, const float *x, int64_t count, void *scratchpad) {
    float *sums = (float *)scratchpad; // one a block
    int64_t blocks = (count + NORM_BLOCK - 1) / NORM_BLOCK;
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t b = 0; b < blocks; b++) {
        vfloat sum = vsplat(0);
        for (int64_t i = b * NORM_BLOCK; i < min_i64(count, (b + 1) * NORM_BLOCK); i += VL) {
            vfloat v = load_float(x + i, count - i);
            sum = vfma(v, v, sum);
        }
        sums[b] = vsum(sum);
    }
    for (int64_t b = 0; b < blocks; b++) exact_add(total, sums[b]);
}

/* PyTorch's AdamW: decay first, then p -= lr/(1-beta1^t) m / (sqrt(v)/sqrt(1-beta2^t) + eps). */
static void cpu_adamw(Device *dev, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr, float beta1, float beta2,
                      float eps, float weight_decay, float grad_scale, int step) {
    float keep = (float)(1.0 - (double)lr * weight_decay), rate = (float)(lr / (1.0 - pow(beta1, step)));
    float root = (float)(1.0 / sqrt(1.0 - pow(beta2, step))), new1 = (float)(1.0 - beta1), new2 = (float)(1.0 - beta2);
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t c = 0; c < chunks_of(count); c++)
        for (int64_t i = c * CHUNK; i < min_i64(count, (c + 1) * CHUNK); i += VL) {
            int64_t n = count - i;
            vfloat grad = vrounded(load_float(g + i, n) * grad_scale), m0 = load_float(m + i, n);
            vfloat m1 = vfma(grad - m0, vsplat(new1), m0);
            vfloat v1 = vfma(grad * new2, grad, vrounded(load_float(v + i, n) * beta2));
            vfloat update = m1 / vfma(vsqrt(v1), vsplat(root), vsplat(eps));
            vfloat p1 = vfma(update, vsplat(-rate), vrounded(load_float(p + i, n) * keep));
            store_float(m + i, m1, n);
            store_float(v + i, v1, n);
            store_float(p + i, p1, n);
            if (copy) store_x(copy + i, p1, n);
        }
}

static void cpu_cast_to_floatx(Device *dev, floatX *out, const float *in, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t c = 0; c < chunks_of(count); c++)
        for (int64_t i = c * CHUNK; i < min_i64(count, (c + 1) * CHUNK); i += VL) store_x(out + i, load_float(in + i, count - i), count - i);
}

// ---------------------------------------------------------------------------
// the ops: what the model calls. N = B*T rows. "=" and "+=" say what happens to an output; the rest is only read.

static const double XB = sizeof(floatX), FB = sizeof(float); // bytes an element
#define RUN_OP(kind, flops, bytes, call) if (op_begin(dev, kind, flops, bytes)) { BACKEND(call); op_end(dev); } // `call`: a call of the backend's function

/* A row of x is zero where its id is negative, and gives no gradient: a slice of the vocabulary needs that. */
static void embedding_forward(Device *dev, floatX *x /* (N,C) = */, const floatX *embed /* (V,C) */, const int32_t *ids /* (N) */, int N, int C) {
    RUN_OP(OP_EMBEDDING_FORWARD, 0, 2.0 * N * C * XB + FB * N, embedding_forward(dev, x, embed, ids, N, C))
}

static void embedding_backward(Device *dev, float *dembed /* (V,C) += */, const floatX *dx /* (N,C) */, const int32_t *ids /* (N) */, int N, int C) {
    RUN_OP(OP_EMBEDDING_BACKWARD, (double)N * C, (double)N * C * (XB + 2 * FB) + FB * N, embedding_backward(dev, dembed, dx, ids, N, C))
}

/* Normalises x, or x + delta, which it stores rounded in sum and reads back from there. sum may be x or delta. */
static void rmsnorm_forward(Device *dev, floatX *out /* (N,C) = */, float *rstd /* (N) =, for backward */, floatX *sum /* (N,C) =, NULL when delta is */,
                            const floatX *x /* (N,C) */, const floatX *delta /* (N,C) or NULL */, const floatX *w /* (C) */, float eps, int N, int C) {
    double bytes = (double)N * C * XB * (delta ? 4 : 2) + N * FB + C * XB;
    RUN_OP(OP_RMSNORM_FORWARD, 4.0 * N * C, bytes, rmsnorm_forward(dev, out, rstd, sum, x, delta, w, eps, N, C))
}

static void rmsnorm_backward(Device *dev, floatX *dx /* (N,C) = */, float *dw /* (C) += */, const floatX *dout /* (N,C) */,
                             const floatX *dresidual /* (N,C), added to dx; may be dx; or NULL */, const floatX *x /* (N,C): what was normalised */,
                             const float *rstd /* (N) */, const floatX *w /* (C) */, int N, int C) {
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *space = scratch(dev, "rmsnorm backward", BACKEND(rmsnorm_backward_scratch)(N, C));
    double bytes = (double)N * C * XB * (dresidual ? 4 : 3) + N * FB + C * (XB + 2 * FB);
    RUN_OP(OP_RMSNORM_BACKWARD, 10.0 * N * C, bytes, rmsnorm_backward(dev, dx, dw, dout, dresidual, x, rstd, w, N, C, space))
    arena_release(dev, MEM_WORKSPACE, mark);
}

static void linear_forward(Device *dev, floatX *y /* (N,OC) = x w^T */, const floatX *x /* (N,IC) */, const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC + (double)N * OC) * XB;
    RUN_OP(OP_LINEAR_FORWARD, 2.0 * N * IC * OC, bytes, linear_forward(dev, y, x, w, N, IC, OC))
}

static void linear_forward_fp32(Device *dev, float *y /* (N,OC) = x w^T: logits */, const floatX *x /* (N,IC) */, const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC) * XB + (double)N * OC * FB;
    RUN_OP(OP_LINEAR_FORWARD, 2.0 * N * IC * OC, bytes, linear_forward_fp32(dev, y, x, w, N, IC, OC))
}

static void linear_backward_input(Device *dev, floatX *dx /* (N,IC) = dy w */, const floatX *dy /* (N,OC), rows dy_stride elements apart */, int64_t dy_stride,
                                  const floatX *w /* (OC,IC) */, int N, int IC, int OC) {
    double bytes = ((double)N * IC + (double)OC * IC + (double)N * OC) * XB;
    RUN_OP(OP_LINEAR_BACKWARD_INPUT, 2.0 * N * IC * OC, bytes, linear_backward_input(dev, dx, dy, dy_stride, w, N, IC, OC))
}

/* Summed in chunks of DW_TOKENS tokens, each rounded to fp32 and then added. */
static void linear_backward_weight(Device *dev, float *dw /* (OC,IC) = dy^T x; += where `accumulate` */, const floatX *dy /* (N,OC), rows dy_stride elements apart */,
                                   int64_t dy_stride, const floatX *x /* (N,IC) */, int N, int IC, int OC, int accumulate) {
    double bytes = (double)N * (IC + OC) * XB + (double)OC * IC * FB * (accumulate ? 2 : 1);
    RUN_OP(OP_LINEAR_BACKWARD_WEIGHT, 2.0 * N * IC * OC, bytes, linear_backward_weight(dev, dw, dy, dy_stride, x, N, IC, OC, accumulate))
}

/* Rotates, in place, the first `heads` heads of HD in each row; row n has position positions[n % T]. */
static void rope_forward(Device *dev, floatX *x /* (N, stride) */, int64_t stride, const float *cos_sin /* (positions, HD/2, 2) */, const int32_t *positions /* (T) */,
                         int N, int T, int heads, int HD) {
    RUN_OP(OP_ROPE_FORWARD, 3.0 * N * heads * HD, 2.0 * N * heads * HD * XB, rope_forward(dev, x, stride, cos_sin, positions, N, T, heads, HD))
}

static void rope_backward(Device *dev, floatX *x /* (N, stride), rotated back */, int64_t stride, const float *cos_sin, const int32_t *positions,
                          int N, int T, int heads, int HD) {
    RUN_OP(OP_ROPE_BACKWARD, 3.0 * N * heads * HD, 2.0 * N * heads * HD * XB, rope_backward(dev, x, stride, cos_sin, positions, N, T, heads, HD))
}

/* (query, key) pairs visible by position, over all heads: documents are left out, since a plan does not know them. */
static double attention_pairs(const AttentionShape *s) {
    double first = (double)max_i64(0, s->q_offset), last = (double)max_i64(0, (int64_t)s->q_offset + s->Tq), Tk = s->Tk;
    double upto_first = first <= Tk ? first * (first + 1) / 2 : Tk * (Tk + 1) / 2 + (first - Tk) * Tk; // sum of min(i, Tk), i = 1 ... first
    double upto_last = last <= Tk ? last * (last + 1) / 2 : Tk * (Tk + 1) / 2 + (last - Tk) * Tk;
    return (upto_last - upto_first) * s->B * s->NH;
}
static double attention_bytes(const AttentionShape *s, int times) { // q, k, v and out, `times` times, and lse
    return times * 2.0 * s->B * s->HD * ((double)s->Tq * s->NH + (double)s->Tk * s->NKV) * XB + (double)s->B * s->NH * s->Tq * FB;
}

/* A row that sees nothing has out 0 and lse -INFINITY. */
static void attention_forward(Device *dev, floatX *out /* (B,Tq,NH,HD) = */, float *lse /* (B,NH,Tq) = log of the sum of exponentials */,
                              const floatX *q /* (B,Tq,NH,HD) */, const floatX *k, const floatX *v /* (B,Tk,NKV,HD) */, const AttentionShape *s) {
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *space = scratch(dev, "attention", BACKEND(attention_scratch)(dev, s, 0));
    RUN_OP(OP_ATTENTION_FORWARD, 4.0 * s->HD * attention_pairs(s), attention_bytes(s, 1), attention_forward(dev, out, lse, q, k, v, s, space))
    arena_release(dev, MEM_WORKSPACE, mark);
}

static void attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv /* =, laid out as q, k, v, which they may be */, const floatX *dout /* as out */,
                               const floatX *out, const float *lse, const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s) {
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *space = scratch(dev, "attention", BACKEND(attention_scratch)(dev, s, 1));
    RUN_OP(OP_ATTENTION_BACKWARD, 10.0 * s->HD * attention_pairs(s), attention_bytes(s, 2), attention_backward(dev, dq, dk, dv, dout, out, lse, q, k, v, s, space))
    arena_release(dev, MEM_WORKSPACE, mark);
}

static void swiglu_forward(Device *dev, floatX *h /* (N,F) = */, const floatX *gate_up /* (N,2F): gate, then up */, int N, int F) {
    RUN_OP(OP_SWIGLU_FORWARD, 5.0 * N * F, 3.0 * N * F * XB, swiglu_forward(dev, h, gate_up, N, F))
}

static void swiglu_backward(Device *dev, floatX *dgate_up /* (N,2F) =; may be gate_up */, const floatX *dh /* (N,F) */, const floatX *gate_up /* (N,2F) */, int N, int F) {
    RUN_OP(OP_SWIGLU_BACKWARD, 10.0 * N * F, 5.0 * N * F * XB, swiglu_backward(dev, dgate_up, dh, gate_up, N, F))
}

/* With want_grad the logits become the gradient of the sum of losses: floatX, rows V * 4 / sizeof(floatX) elements apart. */
static void cross_entropy(Device *dev, float *losses /* (N) =, 0 where the target is negative */, float *logits /* (N,V) */, const int32_t *targets /* (N) */,
                          int N, int V, int want_grad) {
    RUN_OP(OP_CROSS_ENTROPY, 4.0 * N * V, (double)N * V * (FB + (want_grad ? XB : 0)) + 2 * FB * N, cross_entropy(dev, losses, logits, targets, N, V, want_grad))
}

/* The sum is ((0+1)+(2+3))+...; out may be pieces. */
static void tree_sum(Device *dev, float *out /* (count) = sum; += where `accumulate` */, const float *pieces /* (n,count) */, int n, int64_t count, int accumulate) {
    double more = accumulate ? 1 : 0;
    RUN_OP(OP_TREE_SUM, (n - 1 + more) * (double)count, (n + 1 + more) * (double)count * FB, tree_sum(dev, out, pieces, n, count, accumulate))
}

/* Sum of squares: fp32 within blocks of NORM_BLOCK elements from x on, exact over the blocks. Nothing in a walk. */
static void squared_norm(Device *dev, ExactSum *total /* += */, const float *x /* (count) */, int64_t count) {
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *space = scratch(dev, "norm blocks", BACKEND(squared_norm_scratch)(count));
    RUN_OP(OP_SQUARED_NORM, 2.0 * (double)count, (double)count * FB, squared_norm(dev, total, x, count, space))
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* `grad_scale` folds in clipping and 1 / token count; `step` counts from 1. */
static void adamw(Device *dev, float *p, float *m, float *v /* (count) updated: parameters, first and second moment */, const float *g /* (count) */,
                  floatX *copy /* (count) = p rounded, or NULL */, int64_t count, float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    double bytes = (double)count * (7 * FB + (copy ? XB : 0));
    RUN_OP(OP_ADAMW, 14.0 * (double)count, bytes, adamw(dev, p, m, v, g, copy, count, lr, beta1, beta2, eps, weight_decay, grad_scale, step))
}

static void cast_to_floatx(Device *dev, floatX *out /* (count) = */, const float *in /* (count) */, int64_t count) {
    RUN_OP(OP_CAST, 0, (double)count * (XB + FB), cast_to_floatx(dev, out, in, count))
}

#undef RUN_OP
#pragma GCC diagnostic pop
#endif
