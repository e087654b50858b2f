/* page.h: the framework of the pages in this folder: cases, checks, the measured roofline, the table of times.
 *
 * A page is about one op, or an op and its backward. It has the plain definition in double precision, the naive
 * version, each step of optimization, and last the version in use; OP.cuh has the steps in CUDA. This file fills the
 * buffers, compares the definition with PyTorch's results (fixtures/OP.N.bin, by ../pytorch/make_kernel_fixtures.py)
 * and every version with the definition, measures the versions in turns, and prints.
 *
 *   OP [--check] [--rounds N] [--threads N] [--size WORD] [--markdown] [--fixtures DIR]
 *
 * The last line is `N passed, N failed` (on stderr with --markdown); the exit code is 1 when a check failed.
 */
#ifndef PAGE_H
#define PAGE_H
#include "../../lib/ops/cpu/vectors.h" // defines: vfloat, load_x, store_x, vexp
#include "../../lib/ops/ops.h"         // defines: Device, floatX, the ops in use
#include <omp.h>
#include <sys/resource.h>
#pragma GCC diagnostic ignored "-Wunused-function" // a page need not use all of this
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

// ---------------------------------------------------------------------------
// what a page declares

typedef enum { READ, WRITTEN, UPDATED } Role;             // UPDATED: read and written in place, as += is
typedef enum { IN_X, IN_FLOAT, IN_INT, IN_BYTE } Storage; // floatX, float, int32_t, int8_t
static inline int64_t storage_bytes(Storage s) {
    if (s == IN_X) return (int64_t)sizeof(floatX);
    return s == IN_BYTE ? 1 : 4;
}

typedef struct {
    const char *name;
    Role role;
    Storage storage;
    int64_t rows, cols;
    double scale;    // random values: a sum of two from (-scale, scale); IN_INT: 0 ... scale - 1; IN_BYTE: -127 ... 127
    int64_t touched; // bytes that one call reads or writes of it: all, unless the page says otherwise
    void *data;      // (rows, cols), in the device's arena
    void *host;      // (rows, cols), the host's copy of data; the same pointer on a CPU
    void *before;    // a copy of data, UPDATED only
    double *exact;   // (rows, cols): data in double precision; not WRITTEN
    double *result;  // (rows, cols): the definition's result; not READ
} PageTensor;

enum { PAGE_DIMS = 9, PAGE_TENSORS = 24, PAGE_VERSIONS = 12, PAGE_ROUNDS = 199 };

typedef struct { // one size of one op; the op's `declare` fills `tensors` and what follows
    const char *label;
    int64_t size[PAGE_DIMS];
    Device *dev;
    int on_host; // while `prepare` runs: X(), F(), I() and B() return the host's copies
    int exactly; // the definition runs on PyTorch's own inputs: nothing is rounded
    PageTensor tensors[PAGE_TENSORS];
    int num_tensors;
    double flops;        // as in the op ledger; the table's GFLOP/s
    double slots;        // arithmetic instructions of the best algorithm we know, times lanes (see SLOTS below)
    double matmul_flops; // FLOPs of matmuls, for which processors have dot-product instructions in bf16
    int restore; // before each call, untimed, UPDATED tensors get their first values back: repeated calls would change
                 // them too much
    double bound, row_bound; // largest ||error|| / ||definition|| of a floatX output; the same of a single row
    double float_bound;      // of an fp32 output; its rows: 10 times that
    int left_out;            // a version sets it that cannot compute this size on this device
} Case;

/* SLOTS: an addition, a multiplication or a fused multiply-add is one instruction in the FMA units and takes one slot,
 * 2 of the FLOPs that the peak counts. An exponential takes the 13 instructions of vexp without its masks. A division
 * or a square root takes 4: the processor's estimate and a Newton step. Conversions between bf16 and fp32, masks, loads
 * and stores run in other units and are not counted. */
enum { EXP_SLOTS = 13, DIVISION_SLOTS = 4 };

typedef struct {
    const char *name, *what;
    void (*run)(Case *c);
} Version; // `what`: one sentence, what changed and why
typedef struct {
    const char *label;
    int64_t size[PAGE_DIMS];
} Size;

typedef struct {
    const char *name;
    void (*declare)(Case *c); // from c->size: tensors, flops, slots
    void (*prepare)(Case *c); // or NULL: makes random inputs fit together (an rstd that belongs to its x)
    void (*define)(Case *c);  // from D() to R()
    const Version *versions;  // at most PAGE_VERSIONS, then END_OF_VERSIONS; in CUDA: those of OP.cuh
    Size sizes[8]; // --check runs the first CHECKED, which are small: one that no vector or tile divides; in CUDA also
                   // one of whole vectors and tiles
} Op;
#define END_OF_VERSIONS                                                                                                \
    { NULL, NULL, NULL }
#ifdef USE_CUDA // sizes that take a reasonable time on a CPU, and on a GPU
enum { CHECKED = 2 };
#define FOR_CPU(...)
#define FOR_GPU(...) __VA_ARGS__
#else
enum { CHECKED = 1 };
#define FOR_CPU(...) __VA_ARGS__
#define FOR_GPU(...)
#endif

static PageTensor *page_tensor(Case *c, const char *name, Role role, Storage storage, int64_t rows, int64_t cols,
                               double scale) {
    if (c->num_tensors == PAGE_TENSORS) run_failure("page.h: more than %d tensors", PAGE_TENSORS);
    PageTensor *t = &c->tensors[c->num_tensors++];
    memset(t, 0, sizeof *t);
    t->name = name;
    t->role = role;
    t->storage = storage;
    t->rows = rows;
    t->cols = cols;
    t->scale = scale;
    t->touched = rows * cols * storage_bytes(storage);
    return t;
}
/* These declare a tensor (rows, cols) of the case, which a call reads, writes or updates. Tensors that are read hold
 * random values between -2 scale and 2 scale (see PageTensor.scale for integers). */
static PageTensor *reads(Case *c, const char *name, Storage s, int64_t rows, int64_t cols, double scale) {
    return page_tensor(c, name, READ, s, rows, cols, scale);
}
static PageTensor *writes(Case *c, const char *name, Storage s, int64_t rows, int64_t cols) {
    return page_tensor(c, name, WRITTEN, s, rows, cols, 0);
}
static PageTensor *updates(Case *c, const char *name, Storage s, int64_t rows, int64_t cols, double scale) {
    return page_tensor(c, name, UPDATED, s, rows, cols, scale);
}

// ---------------------------------------------------------------------------
// how versions and definitions name tensors; the macros need a `Case *c` in scope

static PageTensor *page_find(Case *c, const char *name) {
    for (int i = 0; i < c->num_tensors; i++)
        if (!strcmp(c->tensors[i].name, name)) return &c->tensors[i];
    return NULL;
}
static void *page_data(Case *c, const char *name, Storage storage) {
    PageTensor *t = page_find(c, name);
    if (!t || t->storage != storage)
        run_failure("page: a version asks for tensor %s, which is not declared, or as another type", name);
    return c->on_host ? t->host : t->data;
}
static double *page_doubles(Case *c, const char *name, int result) {
    PageTensor *t = page_find(c, name);
    double *p = NULL;
    if (t) p = result ? t->result : t->exact;
    if (!p)
        run_failure("page: the definition %s tensor %s, which is not declared so", result ? "writes" : "reads", name);
    return p;
}
// the data of a tensor as floatX, float, int32_t and int8_t: for versions
#define X(name) ((floatX *)page_data(c, name, IN_X))
#define F(name) ((float *)page_data(c, name, IN_FLOAT))
#define I(name) ((int32_t *)page_data(c, name, IN_INT))
#define B(name) ((int8_t *)page_data(c, name, IN_BYTE))
// inputs and results in double precision: for the definition
#define D(name) ((const double *)page_doubles(c, name, 0))
#define R(name) page_doubles(c, name, 1)

/* x, rounded as floatX storage rounds a value that the op stores and reads back. */
static inline double stored(const Case *c, double x) { return c->exactly ? x : (double)to_float(from_float((float)x)); }

/* Whether the definition should compute part i of n, each of `flops`: where all would take long, it computes the first,
 * the last and some between, and leaves the rest of R() unwritten. Unwritten rows are not compared. */
static int wanted(const Case *c, int64_t i, int64_t n, double flops) {
    double keep = 2e8 / flops;
    return c->exactly || keep >= (double)n || i == 0 || i == n - 1 || (double)(mix64((uint64_t)i) % (uint64_t)n) < keep;
}
static const uint64_t UNWRITTEN = 0x7FF8DEAD0000BEEFull; // a NaN that no arithmetic produces
static int is_unwritten(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits == UNWRITTEN;
}

typedef struct {
    int check, rounds, threads;
    const char *size, *fixtures;
} PageOptions;

// ---------------------------------------------------------------------------
// checks

static struct { int passed, failed, markdown; } page_checks;

static void page_check(int ok, const char *op, const char *what, const char *format, ...) {
    va_list args;
    va_start(args, format);
    *(ok ? &page_checks.passed : &page_checks.failed) += 1;
    FILE *to = page_checks.markdown ? stderr : stdout;
    fprintf(to, "%s %s, %s, %s: ", ok ? "pass" : "FAIL", op, PRECISION_NAME, what);
    vfprintf(to, format, args);
    fprintf(to, "\n");
    va_end(args);
}

/* The largest error of one version, or of the definition, over all its cases. of_bound: its share of the bound. */
typedef struct {
    double error, of_bound;
    const char *tensor, *label;
    int64_t rows;
    int sizes, left_out; // cases compared, cases that the version cannot compute on this device
} Worst;

/* Returns ||got - ref|| / ||ref|| over all rows, and notes the largest share of a bound in w. The worst single row has
 * a bound of its own; its ||ref|| counts as at least about a tenth of an average row's. */
static double compare(const Case *c, const PageTensor *t, const double *torch, Worst *w) {
    double error = 0, norm = 0, worst = 0;
    int64_t rows = 0;
    int is_x = t->storage == IN_X;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t r = 0; r < t->rows; r++) {
            double row_error = 0, row_norm = 0;
            const double *ref = (torch ? torch : t->result) + r * t->cols;
            if (is_unwritten(ref[0])) continue;
            for (int64_t i = 0; i < t->cols; i++) {
                double y;
                if (torch) y = t->result[r * t->cols + i];
                else y = is_x ? to_float(((floatX *)t->host)[r * t->cols + i]) : ((float *)t->host)[r * t->cols + i];
                if (y == ref[i]) row_norm += isinf(y) ? 0 : y * y; // infinities may agree
                else {
                    row_error += (y - ref[i]) * (y - ref[i]);
                    row_norm += ref[i] * ref[i];
                }
            }
            if (pass == 0) {
                error += row_error;
                norm += row_norm;
                rows++;
            } else {
                double e = row_error == 0 ? 0 : sqrt(row_error / (row_norm + 1e-2 * norm / (double)rows));
                if (!(e <= worst) && !isnan(worst)) worst = e; // NaN counts as worst, and stays
            }
        }
    double e = error == 0 ? 0 : sqrt(error / norm);
    double bound = is_x ? c->bound : c->float_bound, row_bound = is_x ? c->row_bound : 10 * c->float_bound;
    double of_bound = torch ? e / 1e-12 : fmax(e / bound, worst / row_bound);
    if (!rows || isnan(e) || isnan(worst)) of_bound = INFINITY;
    if (of_bound >= w->of_bound) {
        w->error = e;
        w->of_bound = of_bound;
        w->tensor = t->name;
        w->label = c->label;
    }
    w->rows += rows;
    return e;
}

static size_t page_bytes(const PageTensor *t) { return (size_t)(t->rows * t->cols * storage_bytes(t->storage)); }

/* Every output of a version, which has just run, against the definition. Returns the largest error. */
static double compare_all(Case *c, Worst *w) {
    double worst = 0;
    for (int i = 0; i < c->num_tensors; i++)
        if (c->tensors[i].role != READ) {
            const PageTensor *t = &c->tensors[i];
            if (t->host != t->data) device_read(c->dev, t->host, t->data, page_bytes(t));
            double e = compare(c, t, NULL, w);
            if (!(e <= worst) && !isnan(worst)) worst = e;
        }
    w->sizes++;
    return worst;
}

// ---------------------------------------------------------------------------
// buffers of a case

static void case_open(Case *c, const Op *op, Device *dev, const char *label, const int64_t *size) {
    memset(c, 0, sizeof *c);
    c->dev = dev;
    c->label = label;
    memcpy(c->size, size, sizeof c->size);
    c->bound = FLOATX == DTYPE_BF16 ? 3e-3 : 5e-6;
    c->row_bound = FLOATX == DTYPE_BF16 ? 8e-3 : 5e-5;
    c->float_bound = 5e-6;
    op->declare(c);
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        size_t doubles = (size_t)(t->rows * t->cols) * sizeof(double);
        t->data = arena_alloc(dev, MEM_ACTIVATIONS, "a tensor of a page",
                              page_bytes(t)); // as in the training step: same pages, same alignment
#ifdef USE_CUDA
        c->on_host = 1;
        t->host = checked_malloc(page_bytes(t));
        t->before = t->role == UPDATED ? arena_alloc(dev, MEM_ACTIVATIONS, "a tensor of a page", page_bytes(t)) : NULL;
#else
        t->host = t->data;
        t->before = t->role == UPDATED ? checked_malloc(page_bytes(t)) : NULL;
#endif
        t->exact = t->role != WRITTEN ? (double *)checked_malloc(doubles) : NULL;
        t->result = t->role != READ ? (double *)checked_malloc(doubles) : NULL;
    }
}
static void case_free_doubles(Case *c) {
    for (int i = 0; i < c->num_tensors; i++) {
        free(c->tensors[i].exact);
        free(c->tensors[i].result);
        c->tensors[i].exact = c->tensors[i].result = NULL;
    }
}
static void case_close(Case *c) {
    case_free_doubles(c);
    for (int i = 0; i < c->num_tensors; i++)
        free(c->tensors[i].host != c->tensors[i].data ? c->tensors[i].host : c->tensors[i].before);
    arena_release(c->dev, MEM_ACTIVATIONS, 0);
}

/* Bytes that one call reads and writes. */
static double case_bytes(const Case *c) {
    double bytes = 0;
    for (int i = 0; i < c->num_tensors; i++)
        bytes += (double)c->tensors[i].touched * (c->tensors[i].role == UPDATED ? 2 : 1);
    return bytes;
}

static void set_element(PageTensor *t, int64_t i, double x) {
    if (t->storage == IN_X) ((floatX *)t->host)[i] = from_float((float)x);
    else if (t->storage == IN_FLOAT) ((float *)t->host)[i] = (float)x;
    else if (t->storage == IN_BYTE) ((int8_t *)t->host)[i] = (int8_t)x;
    else ((int32_t *)t->host)[i] = (int32_t)x;
}
static double get_element(const PageTensor *t, int64_t i) {
    if (t->storage == IN_X) return to_float(((floatX *)t->host)[i]);
    if (t->storage == IN_FLOAT) return ((float *)t->host)[i];
    return t->storage == IN_BYTE ? ((int8_t *)t->host)[i] : ((int32_t *)t->host)[i];
}
/* Copies all tensors from the host to the device, or back. Does nothing on a CPU, where both are the same memory. */
static void case_to_device(Case *c) {
    for (int i = 0; i < c->num_tensors; i++)
        if (c->tensors[i].host != c->tensors[i].data)
            device_write(c->dev, c->tensors[i].data, c->tensors[i].host, page_bytes(&c->tensors[i]));
    c->on_host = 0;
}
static void case_to_host(Case *c) {
    for (int i = 0; i < c->num_tensors; i++)
        if (c->tensors[i].host != c->tensors[i].data) {
            device_read(c->dev, c->tensors[i].host, c->tensors[i].data, page_bytes(&c->tensors[i]));
            c->on_host = 1;
        }
}

static void case_random(Case *c) {
    uint64_t state = 42;
    for (int k = 0; k < c->num_tensors; k++) {
        PageTensor *t = &c->tensors[k];
        for (int64_t i = 0; i < t->rows * t->cols && t->role != WRITTEN; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            double a = (double)(state >> 43) / (1 << 21),
                   b = (double)(state >> 22 & 0x1FFFFF) / (1 << 21); // two in [0, 1)
            double x = t->scale * 2 * (a + b - 1);
            if (t->storage == IN_INT) x = floor(a * t->scale);
            if (t->storage == IN_BYTE) x = floor(a * 255) - 127;
            set_element(t, i, x);
        }
    }
}

/* Runs the definition, into `result`: on the buffers' values (from_data), or on `exact` as it is. Copies the tensors
 * that versions will update to `before`. */
static void case_define(Case *c, const Op *op, int from_data) {
    c->exactly = !from_data;
    for (int k = 0; k < c->num_tensors; k++) {
        PageTensor *t = &c->tensors[k];
        int64_t n = t->rows * t->cols;
        for (int64_t i = 0; i < n && t->exact && from_data; i++) t->exact[i] = get_element(t, i);
        for (int64_t i = 0; i < n && t->result; i++) memcpy(&t->result[i], &UNWRITTEN, 8);
        if (t->before && from_data) device_copy(c->dev, t->before, t->data, page_bytes(t));
    }
    op->define(c);
}
static void case_restore(Case *c) {
    for (int i = 0; i < c->num_tensors; i++)
        if (c->tensors[i].before)
            device_copy(c->dev, c->tensors[i].data, c->tensors[i].before, page_bytes(&c->tensors[i]));
}
static void case_poison(Case *c) { // fills outputs with NaNs, so that an element left unwritten fails the check
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        if (t->role != WRITTEN) continue;
        memset(t->host, 0xFF, page_bytes(t));
        if (t->host != t->data) device_write(c->dev, t->data, t->host, page_bytes(t));
    }
}

// ---------------------------------------------------------------------------
// fixtures: lines `size …` and `NAME ROWS COLS`, an empty line, the values as doubles. An UPDATED tensor has NAME and
// NAME.out.

enum { FIXTURE_TENSORS = 2 * PAGE_TENSORS };
typedef struct {
    int64_t size[PAGE_DIMS];
    struct {
        char name[64];
        long rows, cols;
        double *values;
    } tensors[FIXTURE_TENSORS];
    int count;
} Fixture;

static int fixture_open(Fixture *f, const char *path) {
    char line[256], *at;
    FILE *file = fopen(path, "rb");
    memset(f, 0, sizeof *f);
    if (!file) return 0;
    if (!fgets(line, sizeof line, file) || strncmp(line, "size", 4))
        user_error("%s does not start with a line of sizes: make it again with make_kernel_fixtures.py", path);
    at = line + 4;
    for (int i = 0; i < PAGE_DIMS; i++) f->size[i] = strtoll(at, &at, 10);
    while (fgets(line, sizeof line, file) && line[0] != '\n') {
        if (f->count == FIXTURE_TENSORS || sscanf(line, "%63s %ld %ld", f->tensors[f->count].name,
                                                  &f->tensors[f->count].rows, &f->tensors[f->count].cols) != 3)
            user_error("%s: line \"%s\" names no tensor: make it again with make_kernel_fixtures.py", path, line);
        f->count++;
    }
    for (int i = 0; i < f->count; i++) {
        size_t n = (size_t)(f->tensors[i].rows * f->tensors[i].cols);
        f->tensors[i].values = (double *)checked_malloc(n * sizeof(double));
        if (fread(f->tensors[i].values, sizeof(double), n, file) != n)
            user_error("%s ends within tensor %s: make it again with make_kernel_fixtures.py", path,
                       f->tensors[i].name);
    }
    fclose(file);
    return 1;
}
static const double *fixture_find(const Fixture *f, const char *path, const PageTensor *t, const char *suffix) {
    char name[80];
    snprintf(name, sizeof name, "%s%s", t->name, suffix);
    for (int i = 0; i < f->count; i++)
        if (!strcmp(f->tensors[i].name, name)) {
            if (f->tensors[i].rows != t->rows || f->tensors[i].cols != t->cols)
                user_error("%s: tensor %s is %ld x %ld, the page has %" PRId64 " x %" PRId64, path, name,
                           f->tensors[i].rows, f->tensors[i].cols, t->rows, t->cols);
            return f->tensors[i].values;
        }
    user_error("%s has no tensor %s, which the page declares", path, name);
}
static void fixture_close(Fixture *f) {
    for (int i = 0; i < f->count; i++) free(f->tensors[i].values);
}

/* The definition, on PyTorch's inputs, gives PyTorch's figures. Leaves the inputs, rounded, in the buffers. */
static void case_fixture(Case *c, const Op *op, const Fixture *f, const char *path, Worst *w) {
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        if (t->exact) memcpy(t->exact, fixture_find(f, path, t, ""), (size_t)(t->rows * t->cols) * sizeof(double));
    }
    case_define(c, op, 0);
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        if (t->result) compare(c, t, fixture_find(f, path, t, t->role == UPDATED ? ".out" : ""), w);
        for (int64_t j = 0; j < t->rows * t->cols && t->exact; j++) set_element(t, j, t->exact[j]);
    }
    w->sizes++;
}

// ---------------------------------------------------------------------------
// times

static int page_by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
typedef struct {
    double at[PAGE_ROUNDS], total;
    int n;
} Times;
static double times_median(Times *t) {
    if (!t->n) return 0;
    qsort(t->at, (size_t)t->n, sizeof *t->at, page_by_value);
    return t->at[t->n / 2];
}

typedef struct {
    double seconds, memory, arithmetic, unrest;
} Roofline; // seconds: the larger of memory and arithmetic; unrest: how often per second a thread lost its core

#ifdef USE_CUDA
#include "page.cuh" // defines: the same for a GPU: rates_open, case_times, the units
#else

// ---------------------------------------------------------------------------
// the roofline, measured in the same run as the versions: no call is faster than its arithmetic at the processor's
// peak, nor than a loop that reads, writes and updates the same bytes of the same buffers and does nothing else. So a
// case that fits a cache is compared with that cache, not with memory.

/* FLOPs done from registers by one thread: ten chains, enough for two units with a latency of four. */
enum { PEAK_CHAINS = 10, PEAK_TURNS = 20000, PEAK_LANES = VL * PEAK_CHAINS * PEAK_TURNS };
#define PEAK_LOOP(vector, step)                                                                                        \
    vector sum[PEAK_CHAINS];                                                                                           \
    memset(sum, 0, sizeof sum);                                                                                        \
    __asm__ volatile("" : "+m"(sum)); /* equal chains, known to be equal, would be computed once */                    \
    for (int k = 0; k < PEAK_TURNS; k++) {                                                                             \
        _Pragma("GCC unroll 10") for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = step;                                  \
    }                                                                                                                  \
    __asm__ volatile("" : : "m"(sum));
static __attribute__((noinline)) double fma_turns(void) {
    vfloat a = vrounded(vsplat(0.5f)), b = vrounded(vsplat(1.0f));
    PEAK_LOOP(vfloat, vfma(sum[i], a, b))
    return 2 * (double)PEAK_LANES;
}
static __attribute__((noinline)) double matmul_turns(void) { // the inner loop of a matmul
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3F003F00), b = a;
    __asm__("" : "+v"(a), "+v"(b));
    PEAK_LOOP(__m512, _mm512_dpbf16_ps(sum[i], a, b))
    return 4 * (double)PEAK_LANES;
#else
    return fma_turns();
#endif
}
static double peak_rate(int threads, double (*turns)(void)) { // FLOP/s of all threads together, starting together
    double flops = 0, start = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
#pragma omp barrier
#pragma omp master
        start = seconds_now();
        flops += turns();
    }
    return flops / (seconds_now() - start);
}

static double best_peak(int threads, double (*turns)(void)) {
    double best = 0;
    for (int i = 0; i < 10; i++) best = fmax(best, peak_rate(threads, turns));
    return best;
}

/* Part [begin, end) of a tensor's bytes, both multiples of 64. */
static void stream_part(char *p, int64_t begin, int64_t end, Role role, int past_caches) {
    enum { STEP = sizeof(vint) };
    if (role == READ) {
        vint s0 = ZERO, s1 = ZERO, x;
        for (int64_t i = begin; i < end; i += 64) // integers: no bits are slow to add
            for (int64_t j = 0; j < 64; j += STEP) {
                memcpy(&x, p + i + j, STEP);
                if (j & STEP) s1 ^= x;
                else s0 ^= x;
            }
        s0 ^= s1;
        __asm__ volatile("" : : "m"(s0));
        return;
    }
    for (int64_t i = begin; i < end; i += STEP) {
        float *at = (float *)(void *)(p + i);
#ifdef NATIVE
        if (role == WRITTEN && past_caches) {
            NATIVE(stream)(at, vsplat(0));
            continue;
        }
#else
        (void)past_caches; // no such stores here: twice the same loop
#endif
        vstore(at, role == WRITTEN ? vsplat(0) : vrounded(vload(at)));
    }
}
static void stream(Case *c, int past_caches) {
    int64_t most = 0;
    for (int i = 0; i < c->num_tensors; i++) most = max_i64(most, c->tensors[i].touched);
    int64_t pieces = blocks_of(most, 4096);
#pragma omp parallel for num_threads(c->dev->threads)
    for (int64_t p = 0; p < pieces; p++)
        for (int i = 0; i < c->num_tensors; i++) {
            const PageTensor *t = &c->tensors[i];
            int64_t lines = t->touched / 64;
            stream_part((char *)t->data, lines * p / pieces * 64, lines * (p + 1) / pieces * 64, t->role, past_caches);
        }
}

// ---------------------------------------------------------------------------
// times: versions, streams and peaks take turns, so that whatever slows one slows all; medians over rounds

/* One turn: an untimed call, then as many calls as fit in a millisecond, each timed by itself, so that restoring
 * tensors between two calls is not counted. */
static void take_turn(Case *c, Times *t, void (*run)(Case *), int past_caches, double estimate) {
    if (t->n && t->total > 0.6) return; // 0.6 s of a slow version are enough
    int calls = (int)fmin(32, fmax(1, 1e-3 / estimate)), warm = estimate < 0.05;
    double spent = 0, start;
    for (int i = -warm; i < calls; i++) {
        if (c->restore) case_restore(c);
        start = seconds_now();
        if (run) run(c);
        else stream(c, past_caches);
        if (i >= 0) spent += seconds_now() - start;
    }
    t->at[t->n++] = spent / calls;
    t->total += spent;
}

static Roofline case_times(Case *c, const Op *op, const double *estimate, int rounds, double *seconds) {
    const int STREAMS = 2, PEAKS = 2;
    Times *t = (Times *)checked_malloc(sizeof(Times) * (size_t)(PAGE_VERSIONS + STREAMS)), *streams = t + PAGE_VERSIONS;
    static double peaks[2]; // FLOP/s of FMAs and of matmul instructions: the fastest of this run
    struct rusage before, after;
    double start = seconds_now();
    getrusage(RUSAGE_SELF, &before);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < STREAMS; i++) take_turn(c, &streams[i], NULL, i, r ? streams[i].at[r - 1] : 1e-3);
        for (int i = 0; i < PEAKS; i++)
            peaks[i] = fmax(peaks[i], peak_rate(c->dev->threads, i ? matmul_turns : fma_turns));
        for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++)
            if (estimate[v] > 0) take_turn(c, &t[v], op->versions[v].run, 0, estimate[v]);
    }
    getrusage(RUSAGE_SELF, &after);
    for (int v = 0; v < PAGE_VERSIONS; v++) seconds[v] = times_median(&t[v]);
    Roofline roof;
    roof.memory = fmin(times_median(&streams[0]), times_median(&streams[1]));
    roof.unrest = (double)(after.ru_nivcsw - before.ru_nivcsw) / (seconds_now() - start) / c->dev->threads;
    roof.arithmetic = 2 * c->slots / peaks[0] + c->matmul_flops / peaks[1];
    roof.seconds = fmax(roof.memory, roof.arithmetic);
    free(t);
    return roof;
}

static const double FLOPS_UNIT = 1e9;
static const char *const COLUMNS[3] = {"GFLOP/s", "of the roofline", "roofline"};
static size_t page_memory(MemCategory category) {
    return category == MEM_COMM ? 0 : (size_t)16 << 30;
} // bytes of an arena: address space, which takes memory only where it is touched

static void rates_open(Device *dev, const PageOptions *o) {
    (void)dev;
    printf(page_checks.markdown ? "\n%d threads, %d rounds, medians; peaks from registers: %.0f GFLOP/s in fused "
                                  "multiply-adds, %.0f GFLOP/s in matmuls of %s.\n"
                                : "%d threads, %d rounds, medians; peaks from registers: %.0f GFLOP/s in fused "
                                  "multiply-adds, %.0f GFLOP/s in matmuls of %s\n",
           o->threads, o->rounds, best_peak(o->threads, fma_turns) / 1e9, best_peak(o->threads, matmul_turns) / 1e9,
           PRECISION_NAME);
}
#endif

// ---------------------------------------------------------------------------
// the table

static void table_head(const Op *op) {
    if (page_checks.markdown) {
        printf("\n| %s, %s | version | ms | %s | GB/s | %s | error |\n|---|---|---:|---:|---:|---:|---:|\n", op->name,
               PRECISION_NAME, COLUMNS[0], COLUMNS[1]);
        return;
    }
    printf("\n%-34s %-26s %10s %9s %8s %16s %9s\n", op->name, "version", "ms", COLUMNS[0], "GB/s", COLUMNS[1], "error");
}
static void table_row(const char *label, const char *version, double seconds, double flops, double bytes,
                      const char *share, const char *error) {
    const char *format = page_checks.markdown ? "| %s | %s | %.*f | %.1f | %.1f | %s | %s |\n"
                                              : "%-34s %-26s %10.*f %9.1f %8.1f %16s %9s\n";
    int digits = seconds < 0.1 ? 3 : 1;
    if (seconds < 1e-3) digits = 4;
    printf(format, label, version, digits, 1e3 * seconds, flops / seconds / FLOPS_UNIT, bytes / seconds / 1e9, share,
           error);
}

static void case_print(const Case *c, const Op *op, const Roofline *roof, const double *seconds, const double *estimate,
                       const double *errors) {
    char label[128], share[32], error[32];
    int used = snprintf(label, sizeof label, "%s:", c->label), dims = PAGE_DIMS;
    while (dims > 1 && !c->size[dims - 1]) dims--;
    for (int i = 0; i < dims; i++) used += snprintf(label + used, sizeof label - (size_t)used, " %" PRId64, c->size[i]);
    double bytes = case_bytes(c);
    for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++) {
        if (!estimate[v]) continue; // cannot compute this size
        if (estimate[v] < 0) {
            printf(page_checks.markdown ? "| %s | %s | about %.0f s: left out | | | | |\n"
                                        : "%-34s %-26s about %.0f s: left out\n",
                   v ? "" : label, op->versions[v].name, -estimate[v]);
            continue;
        }
        snprintf(share, sizeof share, "%.0f %%", 100 * roof->seconds / seconds[v]);
        snprintf(error, sizeof error, "%.1e", errors[v]);
        table_row(v ? "" : label, op->versions[v].name, seconds[v], c->flops, bytes, share, error);
    }
    table_row("", COLUMNS[2], roof->seconds, c->flops, bytes, roof->memory > roof->arithmetic ? "memory" : "arithmetic",
              "");
    if (roof->unrest > 25)
        fprintf(stderr,
                "note: %s, %s: each thread lost its core %.0f times a second: other programs run, these times are not "
                "to be quoted\n",
                op->name, c->label, roof->unrest);
    fflush(stdout);
}

// ---------------------------------------------------------------------------
// a run

static PageOptions page_options(int argc, char **argv) {
    PageOptions o = {0, 15, omp_get_max_threads(), NULL,
                     access("fixtures", F_OK) ? "dev/kernels/fixtures" : "fixtures"};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--check")) o.check = 1;
        else if (!strcmp(argv[i], "--markdown")) page_checks.markdown = 1;
        else if (!strcmp(argv[i], "--rounds")) {
            o.rounds = atoi(value);
            i++;
        } else if (!strcmp(argv[i], "--threads")) {
            o.threads = atoi(value);
            i++;
        } else if (!strcmp(argv[i], "--size")) {
            o.size = value;
            i++;
        } else if (!strcmp(argv[i], "--fixtures")) {
            o.fixtures = value;
            i++;
        } else
            user_error(
                "%s: expected --check, --rounds N, --threads N, --size WORD (of a label), --markdown or --fixtures DIR",
                argv[i]);
    }
    if (o.rounds < 1 || o.rounds > PAGE_ROUNDS) user_error("--rounds is %d, expected 1 to %d", o.rounds, PAGE_ROUNDS);
    if (o.threads < 1) user_error("--threads is %d, expected at least 1", o.threads);
#ifdef CUDA_ON_CPU
    if (!o.check) fprintf(stderr, "not timed: kernels run on a processor; the checks alone\n");
    o.check = 1;
#endif
    return o;
}

/* Compares every version with the definition on the buffers' values. rate (versions): FLOPs and bytes per second in the
 * latest check of a case that is not tiny. A version that would take more than 2 s at that rate is left out, and its
 * estimate is negative; that of a version that cannot compute the size is 0. */
static void case_check(Case *c, const Op *op, double *rate, Worst *worst, double *estimate, double *errors) {
    double work = c->flops;
    for (int i = 0; i < c->num_tensors; i++) work += (double)c->tensors[i].touched;
    case_define(c, op, 1);
    for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++) {
        if (rate[v] > 0 && work / rate[v] > 2.0) {
            estimate[v] = -work / rate[v];
            continue;
        }
        case_restore(c);
        case_poison(c);
        device_synchronize(c->dev);
        double start = seconds_now();
        c->left_out = 0;
        op->versions[v].run(c);
        estimate[v] = 0;
        if (c->left_out) {
            worst[v].left_out++;
            continue;
        }
        device_synchronize(c->dev);
        estimate[v] = fmax(seconds_now() - start, 1e-9);
        if (work > 1e6) rate[v] = work / estimate[v];
        errors[v] = compare_all(c, &worst[v]);
    }
    case_free_doubles(c);
}

static void op_run(const Op *op, Device *dev, const PageOptions *o) {
    Worst worst[PAGE_VERSIONS], torch;
    double rate[PAGE_VERSIONS], estimate[PAGE_VERSIONS], errors[PAGE_VERSIONS], seconds[PAGE_VERSIONS];
    memset(worst, 0, sizeof worst);
    memset(&torch, 0, sizeof torch);
    memset(rate, 0, sizeof rate);
    Case *c = (Case *)checked_malloc(sizeof *c);
    Fixture *f = (Fixture *)checked_malloc(sizeof *f);
    char path[4096];
    for (int i = 1; snprintf(path, sizeof path, "%s/%s.%d.bin", o->fixtures, op->name, i), fixture_open(f, path); i++) {
        case_open(c, op, dev, "PyTorch's", f->size);
        case_fixture(c, op, f, path, &torch);
        case_to_device(c);
        case_check(c, op, rate, worst, estimate, errors);
        case_close(c);
        fixture_close(f);
    }
    page_check(torch.sizes > 0 && torch.of_bound <= 1, op->name, "the definition gives PyTorch's figures",
               "worst of %d fixtures %.1e <= 1e-12 (%s)", torch.sizes, torch.error,
               torch.tensor ? torch.tensor : "none");

    if (!o->check) {
        printf(page_checks.markdown ? "\n### %s, %s\n\n" : "\n%s, %s\n", op->name, PRECISION_NAME);
        for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++)
            printf(page_checks.markdown ? "- **%s**: %s\n" : "  %s: %s\n", op->versions[v].name, op->versions[v].what);
        table_head(op);
    }
    for (int i = 0; i < 8 && op->sizes[i].label; i++) {
        const Size *s = &op->sizes[i];
        if ((o->check && i >= CHECKED) || (o->size && !strstr(s->label, o->size))) continue;
        case_open(c, op, dev, s->label, s->size);
        case_random(c);
        if (op->prepare) op->prepare(c);
        case_to_device(c);
        case_check(c, op, rate, worst, estimate, errors);
        if (!o->check) {
            Roofline roof = case_times(c, op, estimate, o->rounds, seconds);
            case_print(c, op, &roof, seconds, estimate, errors);
        }
        case_close(c);
    }
    if (!o->check) printf("\n");
    for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++) {
        if (worst[v].left_out && !worst[v].sizes) {
            fprintf(stderr, "left out: %s, %s, %s: it computes none of these sizes on this device\n", op->name,
                    PRECISION_NAME, op->versions[v].name);
            continue;
        }
        page_check(worst[v].of_bound <= 1 && worst[v].sizes > 0, op->name, op->versions[v].name,
                   "worst of %d sizes %.1e, %.2f of its bound (%s, %s; %" PRId64 " rows compared)", worst[v].sizes,
                   worst[v].error, worst[v].of_bound, worst[v].tensor ? worst[v].tensor : "none",
                   worst[v].label ? worst[v].label : "none", worst[v].rows);
    }
    free(c);
    free(f);
}

/* main of a page. */
static int page_main(int argc, char **argv, const Op *const *ops, int count) {
    PageOptions o = page_options(argc, argv);
    Device dry_run, dev;
    device_open_dry_run(&dry_run, o.threads, 0);
    ops_open(&dry_run, 0); // counts the workspace of the matmul library
    static const MemCategory used[] = {MEM_WORKSPACE, MEM_ACTIVATIONS, MEM_COMM};
    for (int i = 0; i < 3; i++) dry_run.arenas[used[i]].peak += page_memory(used[i]);
#ifdef USE_CUDA
    device_count();
#endif
    device_open(&dev, &dry_run, ".", 0);
    ops_open(&dev, 1);
    if (!o.check) rates_open(&dev, &o);
    for (int i = 0; i < count; i++) op_run(ops[i], &dev, &o);
    ops_close(&dev);
    device_close(&dev);
    fprintf(page_checks.markdown ? stderr : stdout, "%d passed, %d failed\n", page_checks.passed, page_checks.failed);
    return page_checks.failed > 0;
}
#define PAGE(...)                                                                                                      \
    int main(int argc, char **argv) {                                                                                  \
        const Op *const ops[] = {__VA_ARGS__};                                                                         \
        return page_main(argc, argv, ops, (int)(sizeof ops / sizeof *ops));                                            \
    }

#endif
