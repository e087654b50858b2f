/* page.h: what the pages in this folder share: tensors with random values, comparison with a definition in double
 * precision, times next to a roofline. page_cpu.h and page.cuh measure times on a CPU and on a GPU.
 *
 * A page OP.c or OP.cu is about one op, or an op and its backward: it has the naive version, each step of optimization,
 * and last the version in use, that of lib/ops. OP.h has what both share: tensors, definition and sizes.
 *
 *   OP [--check] [--rounds N] [--threads N] [--size WORD (of a label)]
 *
 * It checks every version and prints a table in Markdown of their times; with --check it only checks, on small sizes.
 * The last line is `N passed, N failed`, and the exit code is 1 when a check failed.
 *
 * To try a version: write `static void mine(Case *c)`, which gets tensors by X("x") and its threads by c->on->threads,
 * add it to the list of versions, and compile by the line at the top of the page; -DPRECISION_BF16: in bf16. */
#ifndef PAGE_H
#define PAGE_H
#include "../../lib/device/kernel.h" // defines: floatX, OpStream, checked_malloc, mix64, IMPLEMENTATION
#include <omp.h>
#include <stdarg.h>
#pragma GCC diagnostic ignored "-Wunused-function" // a page need not use all of this

// ---------------------------------------------------------------------------
// what a page declares

typedef enum { READ, WRITTEN, UPDATED } Role;             // UPDATED: read and written in place, as += is
typedef enum { IN_X, IN_FLOAT, IN_INT, IN_BYTE } Storage; // floatX, float, int32_t, int8_t

typedef struct {
    const char *name;
    Role role;
    Storage storage;
    int64_t rows, cols;
    double scale;    // random values: a sum of two from (-scale, scale); IN_INT: 0 ... scale - 1; IN_BYTE: -127 ... 127
    int64_t touched; // bytes that one call reads or writes of it: all, unless the page says otherwise
    void *data;      // (rows, cols) for the versions, in the GPU's memory on a GPU; then GUARD bytes to be left alone
    void *host;      // (rows, cols) the host's copy of data; on a CPU the same pointer
    void *before;    // a copy of data, UPDATED only
    double *exact;   // (rows, cols) data in double precision; not WRITTEN
    double *result;  // (rows, cols) the definition's result; not READ
} PageTensor;

enum { PAGE_DIMS = 9, PAGE_TENSORS = 24, PAGE_VERSIONS = 12, PAGE_ROUNDS = 199, PAGE_SCRATCH = 64, GUARD = 64 };
enum { CHECKED = CUDA_BUILD ? 2 : 1 }; // sizes that --check runs

typedef struct { // one size of one op; the op's `declare` fills `tensors` and what follows
    const char *label;
    int64_t size[PAGE_DIMS];
    OpStream *on; // for the versions: on->threads, on->stream
    int on_host;  // X(), F(), I() and B() return the host's copies
    int exactly;  // the definition runs on PyTorch's own inputs, in double: stored() rounds nothing
    PageTensor tensors[PAGE_TENSORS];
    int num_tensors;
    double flops;                // of one call; the table's GFLOP/s
    double slots;                // arithmetic instructions of the best algorithm we know, times lanes (see EXP_SLOTS)
    double matmul_flops;         // FLOPs of matmuls, for which processors have dot-product instructions in bf16
    int restore;                 // UPDATED tensors get their first values back before each call, untimed
    double bound, row_bound;     // largest ||error|| / ||definition|| of a floatX output; the same of a single row
    double float_bound;          // of an fp32 output; its rows: 10 times that
    int left_out;                // a version sets it that cannot compute this size on this device
    void *scratch[PAGE_SCRATCH]; // (scratch_bytes) what page_scratch gave out, kept for the next call
    size_t scratch_bytes[PAGE_SCRATCH];
    int scratch_used; // since the call began
} Case;

/* Slots: arithmetic takes at least 2 slots / peak seconds. An addition, a multiplication or a fused multiply-add is
 * one; an exponential 13, the instructions of vexp without its masks; a division or a square root 4, the processor's
 * estimate and a Newton step. Conversions, masks, loads and stores run in other units and are not counted. */
enum { EXP_SLOTS = 13, DIVISION_SLOTS = 4 };

typedef struct {
    const char *name;
    void (*declare)(Case *c); // from c->size: tensors, flops, slots
    void (*prepare)(Case *c); // or NULL: makes random inputs fit together (an rstd that belongs to its x)
    void (*define)(Case *c);  // from D() to R()
    void (*in_use)(Case *c);  // the implementation of lib/ops
    struct {
        const char *label;
        int64_t size[PAGE_DIMS];
    } sizes[8]; // --check runs the first CHECKED: one that no vector or tile divides; on a GPU also one of whole ones
} Op;
typedef struct {
    const char *name, *what; // `what`: one sentence, what changed and why
    void (*run)(Case *c);
} Version;
typedef struct {
    const Op *op;
    const Version *versions; // (PAGE_VERSIONS) up to the first without a `run`
} PageOp;

// ---------------------------------------------------------------------------
// errors and memory

#ifndef BASE_H // with lib/device/base.h, as in libraries of mine/, these exist
#define PAGE_ERROR(name, code)                                                                                         \
    static inline void name(const char *format, ...) {                                                                 \
        va_list args;                                                                                                  \
        va_start(args, format);                                                                                        \
        vfprintf(stderr, format, args);                                                                                \
        fprintf(stderr, "\n");                                                                                         \
        exit(code);                                                                                                    \
    }
PAGE_ERROR(user_error, 1)
PAGE_ERROR(run_failure, 2)
#endif

static void *page_alloc(size_t bytes); // of the device, zeroed; page_cpu.h and page.cuh define these
static void page_free(void *data);     // or NULL
static void page_copy(void *to, const void *from, size_t bytes); // between the device and the host, or on either
static void page_wait(const OpStream *on);                       // until all calls are done

/* Memory for a version, valid until its call ends. A part of it is freed by setting c->scratch_used back. */
static void *page_scratch(Case *c, size_t bytes) {
    int i = c->scratch_used++;
    if (i == PAGE_SCRATCH) run_failure("page.h: more than %d buffers for one call", PAGE_SCRATCH);
    if (c->scratch_bytes[i] >= bytes) return c->scratch[i];
    page_free(c->scratch[i]);
    c->scratch[i] = page_alloc(bytes);
    c->scratch_bytes[i] = bytes;
    return c->scratch[i];
}

// ---------------------------------------------------------------------------
// tensors

static size_t page_bytes(const PageTensor *t) {
    static const size_t sizes[] = {sizeof(floatX), sizeof(float), sizeof(int32_t), sizeof(int8_t)};
    return (size_t)(t->rows * t->cols) * sizes[t->storage];
}
static size_t guarded_bytes(const PageTensor *t) { return page_bytes(t) + (t->role == READ ? 0 : GUARD); }
static PageTensor *page_tensor(Case *c, const char *name, Role role, Storage storage, int64_t rows, int64_t cols,
                               double scale) {
    PageTensor t = {name, role, storage, rows, cols, scale, 0, 0, 0, 0, 0, 0};
    if (c->num_tensors == PAGE_TENSORS) run_failure("page.h: more than %d tensors", PAGE_TENSORS);
    t.touched = (int64_t)page_bytes(&t);
    c->tensors[c->num_tensors] = t;
    return &c->tensors[c->num_tensors++];
}
/* These declare a tensor (rows, cols) of the case, which a call reads, writes or updates. Tensors that are read hold
 * random values between -2 scale and 2 scale (see PageTensor.scale for integers). */
#define reads(c, name, storage, rows, cols, scale) page_tensor(c, name, READ, storage, rows, cols, scale)
#define writes(c, name, storage, rows, cols) page_tensor(c, name, WRITTEN, storage, rows, cols, 0)
#define updates(c, name, storage, rows, cols, scale) page_tensor(c, name, UPDATED, storage, rows, cols, scale)

static PageTensor *page_find(Case *c, const char *name) {
    for (int i = 0; i < c->num_tensors; i++)
        if (!strcmp(c->tensors[i].name, name)) return &c->tensors[i];
    return NULL;
}
static void *page_data(Case *c, const char *name, Storage storage) {
    PageTensor *t = page_find(c, name);
    if (!t || t->storage != storage) run_failure("page: tensor %s is not declared, or as another type", name);
    return c->on_host ? t->host : t->data;
}
static double *page_doubles(Case *c, const char *name, int is_result) {
    PageTensor *t = page_find(c, name);
    if (!t || t->role == (is_result ? READ : WRITTEN)) run_failure("page: no such tensor for the definition: %s", name);
    return is_result ? t->result : t->exact;
}
/* For versions, the data of a tensor as floatX, float, int32_t and int8_t; for the definition, inputs and results in
 * double precision. These need a `Case *c` in scope. */
#define X(name) ((floatX *)page_data(c, name, IN_X))
#define F(name) ((float *)page_data(c, name, IN_FLOAT))
#define I(name) ((int32_t *)page_data(c, name, IN_INT))
#define B(name) ((int8_t *)page_data(c, name, IN_BYTE))
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

// ---------------------------------------------------------------------------
// a case: its buffers, and what they hold

static void case_open(Case *c, const Op *op, OpStream *on, const char *label, const int64_t *size) {
    memset(c, 0, sizeof *c);
    c->on = on;
    c->label = label;
    memcpy(c->size, size, sizeof c->size);
    c->bound = FLOATX == DTYPE_BF16 ? 3e-3 : 5e-6;
    c->row_bound = FLOATX == DTYPE_BF16 ? 8e-3 : 5e-5;
    c->float_bound = 5e-6;
    op->declare(c);
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
        t->data = page_alloc(guarded_bytes(t));
        t->host = CUDA_BUILD ? checked_malloc(guarded_bytes(t)) : t->data;
        t->before = t->role == UPDATED ? page_alloc(guarded_bytes(t)) : NULL;
        t->exact = new_array(double, t->role == WRITTEN ? 0 : t->rows * t->cols);
        t->result = new_array(double, t->role == READ ? 0 : t->rows * t->cols);
    }
    c->on_host = 1;
}
static void case_close(Case *c) {
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
        if (t->host != t->data) free(t->host);
        page_free(t->before);
        page_free(t->data);
        free(t->exact);
        free(t->result);
    }
    for (int i = 0; i < PAGE_SCRATCH; i++) page_free(c->scratch[i]);
}

static void case_random(Case *c) {
    uint64_t state = 42;
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++)
        for (int64_t i = 0; i < t->rows * t->cols && t->role != WRITTEN; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            double a = (double)(state >> 43) / (1 << 21), b = (double)(state >> 22 & 0x1FFFFF) / (1 << 21); // in [0, 1)
            double integer = floor(a * (t->storage == IN_BYTE ? 255 : t->scale)) - (t->storage == IN_BYTE ? 127 : 0);
            set_element(t, i, t->storage <= IN_FLOAT ? t->scale * 2 * (a + b - 1) : integer);
        }
}

/* Bytes that one call reads and writes. */
static double case_bytes(const Case *c) {
    double bytes = 0;
    for (int i = 0; i < c->num_tensors; i++)
        bytes += (double)c->tensors[i].touched * (c->tensors[i].role == UPDATED ? 2 : 1);
    return bytes;
}

/* Copies all tensors from the host to the device, and what versions will update apart. */
static void case_to_device(Case *c) {
    c->on_host = 0;
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
        if (CUDA_BUILD) page_copy(t->data, t->host, page_bytes(t));
        if (t->before) page_copy(t->before, t->host, page_bytes(t));
    }
}

/* Runs the definition, into `result`: on the buffers' values (from_data), or on `exact` as it is. */
static void case_define(Case *c, const Op *op, int from_data) {
    c->exactly = !from_data;
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++)
        for (int64_t i = 0; i < t->rows * t->cols; i++) {
            if (t->role != WRITTEN && from_data) t->exact[i] = get_element(t, i);
            if (t->role != READ) memcpy(&t->result[i], &UNWRITTEN, 8);
        }
    op->define(c);
}
/* Comes before each call: the scratch memory of the last one can be used again, and tensors are restored if the case
 * wants that. With `checks` they always are, and outputs are NaN: what is left unwritten fails. */
static void case_restore(Case *c, int checks) {
    c->scratch_used = 0;
    for (PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
        if (t->before && (checks || c->restore)) page_copy(t->data, t->before, guarded_bytes(t));
        if (t->role != WRITTEN || !checks) continue;
        memset(t->host, 0xFF, guarded_bytes(t));
        if (CUDA_BUILD) page_copy(t->data, t->host, guarded_bytes(t));
    }
}

// ---------------------------------------------------------------------------
// checks

static int page_checks[2], page_sizes; // failed, passed; sizes that were run
static int page_counted(int ok) {
    page_checks[ok]++;
    return ok;
}
#define page_check(ok, op, what, format, ...)                                                                          \
    printf("%s %s, " PRECISION_NAME ", %s: " format "\n", page_counted(ok) ? "pass" : "FAIL", op, what, __VA_ARGS__)

typedef struct {            // the largest error of one version, or of the definition, over all its cases
    double error, of_bound; // its share of the bound
    const char *tensor, *label;
    int64_t rows, sizes; // compared
} Worst;

/* Returns ||got - ref|| / ||ref|| over all rows, and notes the largest share of a bound in w. The worst single row has
 * a bound of its own; its ||ref|| counts as at least about a tenth of an average row's. */
static double compare(const Case *c, const PageTensor *t, const double *torch, Worst *w) {
    double error = 0, norm = 0, worst = 0;
    int64_t rows = 0;
    const uint8_t *guard = (const uint8_t *)t->host + page_bytes(t);
    int past_end = !torch && (guard[0] != (t->role == WRITTEN ? 0xFF : 0) || memcmp(guard, guard + 1, GUARD - 1));
    for (int pass = 0; pass < 2; pass++)
        for (int64_t r = 0; r < t->rows; r++) {
            double row_error = 0, row_norm = 0;
            const double *ref = (torch ? torch : t->result) + r * t->cols;
            if (!memcmp(ref, &UNWRITTEN, 8)) continue;
            for (int64_t i = 0; i < t->cols; i++) {
                double y = torch ? t->result[r * t->cols + i] : get_element(t, r * t->cols + i);
                double e = y == ref[i] ? 0 : y - ref[i]; // infinities may agree
                row_error += e * e;
                row_norm += isinf(ref[i]) ? 0 : ref[i] * ref[i];
            }
            error += pass ? 0 : row_error;
            norm += pass ? 0 : row_norm;
            rows += !pass;
            double e = row_error == 0 ? 0 : sqrt(row_error / (row_norm + 1e-2 * norm / (double)rows));
            if (pass && !(e <= worst) && !isnan(worst)) worst = e; // NaN counts as worst, and stays
        }
    double e = error == 0 ? 0 : sqrt(error / norm), of_bound = fmax(e / c->float_bound, worst / (10 * c->float_bound));
    if (t->storage == IN_X) of_bound = fmax(e / c->bound, worst / c->row_bound);
    if (torch) of_bound = e / 1e-12;
    if (!rows || isnan(e) || isnan(worst) || past_end) of_bound = INFINITY;
    const Worst now = {e, of_bound, t->name, past_end ? "written past its end" : c->label, w->rows + rows, w->sizes};
    if (of_bound >= w->of_bound) *w = now;
    w->rows = now.rows;
    return e;
}

/* Compares every version with the definition on the buffers' values. rate (versions): FLOPs and bytes per second in the
 * latest check of a case that is not tiny. A version that would take more than 2 s at that rate is left out, and its
 * estimate is negative; that of a version that cannot compute the size is 0. */
static void case_check(Case *c, const PageOp *page, double *rate, Worst *worst, double *estimate, double *errors) {
    double work = c->flops + case_bytes(c);
    case_define(c, page->op, 1);
    for (int v = 0; v < PAGE_VERSIONS && page->versions[v].run; v++) {
        estimate[v] = rate[v] > 0 && work / rate[v] > 2.0 ? -work / rate[v] : 0;
        if (estimate[v] < 0) continue;
        case_restore(c, 1);
        c->left_out = 0;
        double start = omp_get_wtime();
        page->versions[v].run(c);
        page_wait(c->on);
        if (c->left_out) continue;
        estimate[v] = fmax(omp_get_wtime() - start, 1e-9);
        if (work > 1e6) rate[v] = work / estimate[v];
        worst[v].sizes++;
        errors[v] = 0;
        for (const PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
            if (t->role == READ) continue;
            if (CUDA_BUILD) page_copy(t->host, t->data, guarded_bytes(t));
            double e = compare(c, t, NULL, &worst[v]);
            if (!(e <= errors[v]) && !isnan(errors[v])) errors[v] = e;
        }
    }
}

// ---------------------------------------------------------------------------
// times, and a whole run

typedef struct {
    int check, rounds;
    const char *size;
} PageOptions;
typedef struct {
    double at[PAGE_ROUNDS], total;
    int n;
} Times;
static int page_by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double times_median(Times *t) {
    qsort(t->at, (size_t)t->n, sizeof *t->at, page_by_value);
    return t->n ? t->at[t->n / 2] : 0;
}

typedef struct {
    double memory, arithmetic; // seconds; the larger one is the roofline
} Roofline;

#ifdef PAGE_FIXTURES // the checks of this repository compare the definition with PyTorch's figures
#include "page_fixtures.h"
#endif
#ifdef USE_CUDA
#include "page.cuh" // defines: page_open, case_times, FOR_CPU, FOR_GPU, the units
#else
#include "page_cpu.h" // defines the same for a CPU
#endif

static void table_row(const Case *c, const char *label, const char *version, double seconds, const char *share,
                      double error) {
    printf("| %-34s | %-26s | %10.*f | %9.1f | %8.1f | %16s | %9.1e |\n", label, version, seconds < 1e-3 ? 4 : 2,
           1e3 * seconds, c->flops / seconds / FLOPS_UNIT, case_bytes(c) / seconds / 1e9, share, error);
}

static void case_print(const Case *c, const PageOp *page, Roofline roof, const double *seconds, const double *estimate,
                       const double *errors) {
    char label[128], share[32];
    double limit = fmax(roof.memory, roof.arithmetic);
    int used = snprintf(label, sizeof label, "%s:", c->label), dims = PAGE_DIMS;
    while (dims > 1 && !c->size[dims - 1]) dims--;
    for (int i = 0; i < dims; i++) used += snprintf(label + used, sizeof label - (size_t)used, " %" PRId64, c->size[i]);
    for (int v = 0; v < PAGE_VERSIONS && page->versions[v].run; v++) {
        const char *name = page->versions[v].name, *where = v ? "" : label;
        if (estimate[v] < 0) printf("| %s | %s | about %.0f s: left out | | | | |\n", where, name, -estimate[v]);
        if (estimate[v] <= 0) continue;
        snprintf(share, sizeof share, "%.0f %%", 100 * limit / seconds[v]);
        table_row(c, where, name, seconds[v], share, errors[v]);
    }
    table_row(c, "", COLUMNS[2], limit, roof.memory > roof.arithmetic ? "memory" : "arithmetic", 0);
    fflush(stdout);
}

static void op_run(const PageOp *page, OpStream *on, const PageOptions *o) {
    const Op *op = page->op;
    Worst worst[PAGE_VERSIONS] = ZERO;
    double rate[PAGE_VERSIONS] = ZERO, estimate[PAGE_VERSIONS], errors[PAGE_VERSIONS], seconds[PAGE_VERSIONS];
    Case *c = new_array(Case, 1);
#ifdef PAGE_FIXTURES
    fixtures_check(c, page, on, rate, worst);
#endif
    if (!o->check) {
        printf("\n### %s, %s\n\n", op->name, PRECISION_NAME);
        for (const Version *v = page->versions; v < page->versions + PAGE_VERSIONS && v->run; v++)
            printf("- **%s**: %s\n", v->name, v->what);
        printf("\n| %s, %s | version | ms | %s | GB/s | %s | error |\n|---|---|---:|---:|---:|---:|---:|\n", op->name,
               PRECISION_NAME, COLUMNS[0], COLUMNS[1]);
    }
    for (int i = 0; i < 8 && op->sizes[i].label; i++) {
        if ((o->check && i >= CHECKED) || !strstr(op->sizes[i].label, o->size)) continue;
        case_open(c, op, on, op->sizes[i].label, op->sizes[i].size);
        case_random(c);
        if (op->prepare) op->prepare(c);
        case_to_device(c);
        case_check(c, page, rate, worst, estimate, errors);
        if (!o->check) {
            Roofline roof = case_times(c, page->versions, estimate, o->rounds, seconds);
            case_print(c, page, roof, seconds, estimate, errors);
        }
        case_close(c);
        page_sizes++;
    }
    free(c);
    if (!o->check) printf("\n");
    for (int v = 0; v < PAGE_VERSIONS && page->versions[v].run; v++) {
        const Worst *w = &worst[v];
        const char *name = page->versions[v].name;
        if (!w->sizes) fprintf(stderr, "left out: %s, %s: it computed none of the sizes\n", op->name, name);
        else
            page_check(w->of_bound <= 1, op->name, name,
                       "worst of %" PRId64 " sizes %.1e, %.2f of its bound (%s, %s; %" PRId64 " rows compared)",
                       w->sizes, w->error, w->of_bound, w->tensor, w->label, w->rows);
    }
}

/* main of a page. `open` prepares what the ops need, such as a library; NULL: nothing. */
static int page_main(int argc, char **argv, void (*open)(OpStream *on), const PageOp *ops, int count) {
    PageOptions o = {0, 15, ""};
    OpStream on = ZERO;
    on.threads = omp_get_max_threads();
    on.deterministic = 1;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int is_check = !strcmp(argv[i], "--check");
        o.check |= is_check;
        if (!strcmp(argv[i], "--rounds")) o.rounds = atoi(value);
        else if (!strcmp(argv[i], "--threads")) on.threads = atoi(value);
        else if (!strcmp(argv[i], "--size")) o.size = value;
        else if (!is_check)
            user_error("%s: expected --check, --rounds N, --threads N or --size WORD (of a label)", argv[i]);
        i += !is_check;
    }
    if (o.rounds < 1 || o.rounds > PAGE_ROUNDS) user_error("--rounds is %d, expected 1 to %d", o.rounds, PAGE_ROUNDS);
    if (on.threads < 1) user_error("--threads is %d, expected at least 1", on.threads);
    page_open(&on, &o);
    if (open) open(&on);
    for (int i = 0; i < count; i++) op_run(&ops[i], &on, &o);
    if (!page_sizes)
        user_error("--size %s: expected a word of a size's label, such as \"%s\"", o.size, ops->op->sizes[0].label);
    printf("%d passed, %d failed\n", page_checks[1], page_checks[0]);
    return page_checks[0] > 0;
}
#define PAGE_THAT_OPENS(open, ...)                                                                                     \
    int main(int argc, char **argv) {                                                                                  \
        static const PageOp ops[] = {__VA_ARGS__};                                                                     \
        return page_main(argc, argv, open, ops, (int)(sizeof ops / sizeof *ops));                                      \
    }
#define PAGE(...) PAGE_THAT_OPENS(NULL, __VA_ARGS__)

#endif
