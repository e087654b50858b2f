/* test_buffers.h: what the tests of ops share: buffers with guards around them, random numbers, and the comparison of
 * results with a reference in double precision and between numbers of threads. Part of test_llama3.cu. */
#include "../../lib/ops/cpu/vectors.h" // defines: VL, exp_float
#include "../../lib/ops/ops.h"

enum { GUARD = 256, MAX_TEST_BUFFERS = 512, TEST_THREADS = 3 };
static const double ROUNDING = sizeof(floatX) == 2 ? 3e-3 : 2e-6; // allowed |error| / |reference| of a floatX output
static const double ROUNDING_ROW = sizeof(floatX) == 2 ? 4e-3 : 1e-5; // half of the last of 8 bits is 3.9e-3

typedef struct {                  // one test's buffers and its worst figures
    Device dev[TEST_THREADS + 1]; // dev[t] computes with t threads
    char *blocks[MAX_TEST_BUFFERS];
    size_t bytes[MAX_TEST_BUFFERS];
    int num_blocks, overruns, cases, unequal;
    uint64_t random;
    double worst, worst_row;
    double row_floor; // a row of the reference counts as no smaller: where a result is a difference of larger numbers
    double bound, row_bound;   // of this test: what worst and worst_row may be
    uint64_t seed;             // where `random` begins in each test
    const char *variant;       // of the kernels under test, as a suffix of a test's name; NULL: the usual ones
    char shape[200], bad[600]; // of the case that runs; the first thing that was wrong, "" as long as nothing was
} KernelTest;

/* Memory that host and device both reach. */
#ifdef USE_CUDA
static const char *const TEST_DEVICES = "three streams";
static int no_managed_memory; // some virtual machines refuse it: then pinned memory of the host, which is slower
static char *shared_alloc(size_t bytes) {
    void *p = NULL;
    int managed = !no_managed_memory;
    if (managed) cuda_check(cudaDeviceGetAttribute(&managed, cudaDevAttrManagedMemory, 0), "asking for managed memory");
    cudaError_t refused = managed ? cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) : cudaErrorNotSupported;
    if (!refused) return (char *)p;
    if (!no_managed_memory) {
        printf("note: no managed memory (%s): the tests of ops use pinned memory\n", cudaGetErrorString(refused));
        cudaGetLastError(); // otherwise the next launch would report this error
        no_managed_memory = 1;
    }
    cuda_check(cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "getting pinned memory");
    return (char *)p;
}
static void shared_free(void *p) {
    cudaPointerAttributes kind;
    cuda_check(cudaPointerGetAttributes(&kind, p), "asking for the kind of memory");
    cuda_check(kind.type == cudaMemoryTypeHost ? cudaFreeHost(p) : cudaFree(p), "freeing memory of a test");
}
#else
static const char *const TEST_DEVICES = "1, 2, 3 threads";
static char *shared_alloc(size_t bytes) { return (char *)checked_malloc(bytes); }
static void shared_free(void *p) { free(p); }
#endif

static void *test_alloc(KernelTest *t, int64_t bytes) {
    if (t->num_blocks == MAX_TEST_BUFFERS)
        run_failure("more than %d buffers in one test of an op", MAX_TEST_BUFFERS);
    char *p = shared_alloc((size_t)bytes + 2 * GUARD);
    memset(p, 0xA5, (size_t)bytes + 2 * GUARD);
    t->blocks[t->num_blocks] = p;
    t->bytes[t->num_blocks++] = (size_t)bytes;
    return p + GUARD;
}

__attribute__((format(printf, 2, 3))) static void test_shape(KernelTest *t, const char *format,
                                                             ...) { // the case that comes
    va_list args;
    va_start(args, format);
    vsnprintf(t->shape, sizeof t->shape, format, args);
    va_end(args);
}
__attribute__((format(printf, 2, 3))) static void test_bad(KernelTest *t, const char *format,
                                                           ...) { // the first is told, with its case
    va_list args;
    if (t->bad[0]) return;
    int used = snprintf(t->bad, sizeof t->bad, "; first bad, of %s: ", t->shape);
    va_start(args, format);
    vsnprintf(t->bad + used, sizeof t->bad - (size_t)used, format, args);
    va_end(args);
}

/* What a failure ends with: the place, and the command that runs the same numbers where gdb and the sanitizers are. */
static const char *test_where(const KernelTest *t) {
    static char text[1100];
    if (!t->bad[0]) return "";
    int used = snprintf(text, sizeof text, "%s; seed %" PRIu64 "; replay: ", t->bad, t->seed);
#ifdef USE_CUDA
    const char *order = getenv("CUDA_ON_CPU_SEED");
    snprintf(text + used, sizeof text - (size_t)used,
             "make cuda-on-cpu && TEST_SEED=%" PRIu64 " CUDA_ON_CPU_SEED=%s build/cuda-on-cpu-" PRECISION_NAME
             "/test_llama3_cuda kernels",
             t->seed, order ? order : "0");
#else
    snprintf(text + used, sizeof text - (size_t)used,
             "TEST_SEED=%" PRIu64 " build/cpu-" PRECISION_NAME "/test_llama3 kernels", t->seed);
#endif
    return text;
}

static void test_free_all(KernelTest *t) {
    for (; t->num_blocks > 0; t->num_blocks--) {
        unsigned char *p = (unsigned char *)t->blocks[t->num_blocks - 1];
        size_t bytes = t->bytes[t->num_blocks - 1];
        for (size_t i = 0; i < GUARD; i++) {
            int before = p[i] != 0xA5, behind = p[GUARD + bytes + i] != 0xA5;
            t->overruns += before || behind;
            if (before) test_bad(t, "byte %zu before the %zu bytes of buffer %d", GUARD - i, bytes, t->num_blocks - 1);
            if (behind) test_bad(t, "byte %zu behind the %zu bytes of buffer %d", i, bytes, t->num_blocks - 1);
        }
        shared_free(p);
    }
}

static double test_random(KernelTest *t) { // uniform in (-1, 1)
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(t->random >> 11) / (double)(1LL << 52) - 1.0;
}
static float *test_floats(KernelTest *t, int64_t n, double scale) {
    float *p = (float *)test_alloc(t, n * 4);
    for (int64_t i = 0; i < n; i++) p[i] = (float)(scale * (test_random(t) + test_random(t)));
    return p;
}
static floatX *test_xs(KernelTest *t, int64_t n, double scale) {
    floatX *p = (floatX *)test_alloc(t, n * (int64_t)sizeof(floatX));
    for (int64_t i = 0; i < n; i++) p[i] = from_float((float)(scale * (test_random(t) + test_random(t))));
    return p;
}
static double *test_doubles(KernelTest *t, int64_t n) {
    double *p = (double *)test_alloc(t, n * 8);
    memset(p, 0, (size_t)n * 8);
    return p;
}
static void *test_copy(KernelTest *t, const void *from, int64_t bytes) {
    void *p = test_alloc(t, bytes);
    memcpy(p, from, (size_t)bytes);
    return p;
}

/* Errors of (rows, cols) against ref; `x` where is_x else `f`. A row is measured against at least a tenth of the
 * average row, and t->row_floor. */
#define test_compare(t, got, ...) test_compare_named(t, #got, got, __VA_ARGS__)
static void test_compare_named(KernelTest *t, const char *what, const void *got, int is_x, int64_t stride,
                               const double *ref, int64_t rows, int64_t cols) {
    double error = 0, norm = (double)rows * t->row_floor * t->row_floor, worst = 0, farthest = -1, far_y = 0;
    int64_t far = 0;
    for (int64_t i = 0; i < rows * cols; i++) norm += ref[i] * ref[i];
    for (int64_t r = 0; r < rows; r++) {
        double row_error = 0, row_norm = 1e-2 * norm / (double)rows + t->row_floor * t->row_floor, first_y = 0;
        int64_t first =
            -1; // in this row, if all of it is bad: the first that is farther off than the bound lets the average be
        for (int64_t c = 0; c < cols; c++) row_norm += ref[r * cols + c] * ref[r * cols + c];
        for (int64_t c = 0; c < cols; c++) {
            double y = is_x ? to_float(((const floatX *)got)[r * stride + c]) : ((const float *)got)[r * stride + c],
                   x = ref[r * cols + c], d = y - x;
            row_error += d * d;
            if (first < 0 && !(d * d * (double)cols <= t->row_bound * t->row_bound * row_norm)) {
                first = c;
                first_y = y;
            }
            if (!(fabs(d) <= farthest)) {
                farthest = fabs(d);
                far = r * cols + c;
                far_y = y;
            }
        }
        error += row_error;
        double e = row_error > 0 ? sqrt(row_error / row_norm) : row_error;
        worst = worst_of(worst, e);
        if (!(e <= t->row_bound) && first >= 0)
            test_bad(t, "%s, row %" PRId64 ", column %" PRId64 " is %.9g, expected %.9g", what, r, first, first_y,
                     ref[r * cols + first]);
    }
    double e = error > 0 ? sqrt(error / norm) : error;
    if (rows * cols >= 64) { // a few elements may all be rounded by almost half of the last place
        t->worst = worst_of(t->worst, e);
        if (!(e <= t->bound))
            test_bad(t, "%s as a whole; farthest off is row %" PRId64 ", column %" PRId64 ": %.9g, expected %.9g", what,
                     far / cols, far % cols, far_y, ref[far]);
    }
    t->worst_row = worst_of(t->worst_row, worst);
}
#define test_same(t, a, b, bytes) test_same_named(t, #a, a, b, bytes)
static void test_same_named(KernelTest *t, const char *what, const void *a, const void *b, int64_t bytes) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    int64_t i = 0;
    if (!memcmp(a, b, (size_t)bytes)) return;
    t->unequal++;
    while (p[i] == q[i]) i++;
    test_bad(t, "%s has other bits, byte %" PRId64 " of %" PRId64 " is %02x, not %02x", what, i, bytes, p[i], q[i]);
}

static void test_bounds(KernelTest *t, double bound, double row_bound) {
    t->bound = bound;
    t->row_bound = row_bound;
}
static void test_report(KernelTest *t, const char *name) {
    char full[200];
    test_free_all(t);
    snprintf(full, sizeof full, "%s%s", name, t->variant ? t->variant : "");
    CHECK(full, t->worst <= t->bound && t->worst_row <= t->row_bound && !t->unequal && !t->overruns,
          "%d cases: error %.2g <= %.2g, worst row %.2g <= %.2g, %d differ between %s, %d bytes written outside%s",
          t->cases, t->worst, t->bound, t->worst_row, t->row_bound, t->unequal, TEST_DEVICES, t->overruns,
          test_where(t));
    t->cases = t->unequal = t->overruns = 0;
    t->worst = t->worst_row = 0;
    t->bad[0] = 0;
}
