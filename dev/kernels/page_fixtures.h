/* page_fixtures.h: the definition of an op gives PyTorch's figures, on PyTorch's own inputs. fixtures/OP.N.bin are by
 * ../pytorch/make_kernel_fixtures.py: lines `size …` and `NAME ROWS COLS`, an empty line, the values as doubles. An
 * UPDATED tensor has NAME and NAME.out. Compiled with -DPAGE_FIXTURES, as the Makefile does; a page needs none of it.
 */
#ifndef PAGE_FIXTURES_H
#define PAGE_FIXTURES_H
#include <unistd.h>

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
        f->tensors[i].values = new_array(double, n);
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

/* Compares the definition on PyTorch's inputs with PyTorch's results. Leaves the inputs, rounded, in the buffers. */
static void case_fixture(Case *c, const Op *op, const Fixture *f, const char *path, Worst *w) {
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        if (t->role != WRITTEN)
            memcpy(t->exact, fixture_find(f, path, t, ""), (size_t)(t->rows * t->cols) * sizeof(double));
    }
    case_define(c, op, 0);
    for (int i = 0; i < c->num_tensors; i++) {
        PageTensor *t = &c->tensors[i];
        if (t->role != READ) compare(c, t, fixture_find(f, path, t, t->role == UPDATED ? ".out" : ""), w);
        for (int64_t j = 0; j < t->rows * t->cols && t->role != WRITTEN; j++) set_element(t, j, t->exact[j]);
    }
    w->sizes++;
}

/* The definition, and every version, on all fixtures of an op. */
static void fixtures_check(Case *c, const PageOp *page, OpStream *on, double *rate, Worst *worst) {
    double estimate[PAGE_VERSIONS], errors[PAGE_VERSIONS];
    const char *folder = access("fixtures", F_OK) ? "dev/kernels/fixtures" : "fixtures";
    const Op *op = page->op;
    char path[4096];
    Worst torch = ZERO;
    Fixture *f = new_array(Fixture, 1);
    for (int i = 1; snprintf(path, sizeof path, "%s/%s.%d.bin", folder, op->name, i), fixture_open(f, path); i++) {
        case_open(c, op, on, "PyTorch's", f->size);
        case_fixture(c, op, f, path, &torch);
        case_to_device(c);
        case_check(c, page, rate, worst, estimate, errors);
        case_close(c);
        for (int k = 0; k < f->count; k++) free(f->tensors[k].values);
    }
    free(f);
    page_check(torch.sizes > 0 && torch.of_bound <= 1, op->name, "the definition gives PyTorch's figures",
               "worst of %" PRId64 " fixtures %.1e <= 1e-12 (%s)", torch.sizes, torch.error,
               torch.tensor ? torch.tensor : "none");
}

#endif
