/* harness.h: what every test program is made of: checks, a folder for files, child processes whose messages are
 * checked, and groups of tests. Included after the program. */
#ifndef HARNESS_H
#define HARNESS_H
#include <sys/resource.h>
#include <sys/wait.h>

static int checks_passed, checks_failed;

static void check(int ok, const char *name, const char *format, ...) {
    va_list args;
    va_start(args, format);
    __atomic_fetch_add(ok ? &checks_passed : &checks_failed, 1, __ATOMIC_RELAXED);
    printf("%s %s: ", ok ? "pass" : "FAIL", name);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
}
#define CHECK(name, condition, ...) check((condition) != 0, name, __VA_ARGS__)

/* Seconds in which this thread has computed: what else the machine does is not counted. */
static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *read_text_file(const char *path) {
    size_t length;
    return read_regular_file(path, &length);
}

static void sha256_of_file(const char *path, uint8_t out[32]) {
    size_t len;
    char *text = read_file(path, &len);
    sha256(text, len, out);
    free(text);
}

/* The larger error; NaN is larger than all, and stays (fmax would lose it). */
static double worst_of(double a, double b) { return a >= b || a != a ? a : b; }

#define FIXTURES "dev/test/fixtures"
static char scratch_dir[64];

static const char *scratch_path(const char *name) {
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, 256, "%s/%s", scratch_dir, name);
    return p;
}

static void test_write(const char *path, const char *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) run_failure("test file %s could not be written", path);
}

static int files_equal(const char *a, const char *b) {
    FILE *x = fopen(a, "rb"), *y = fopen(b, "rb");
    int equal = x && y;
    for (int c = 0; equal && c != EOF;) {
        c = fgetc(x);
        equal = c == fgetc(y);
    }
    if (x) fclose(x);
    if (y) fclose(y);
    return equal;
}

static int count_of(const char *text, const char *part) {
    int n = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + strlen(part), part)) n++;
    return n;
}

// ---------------------------------------------------------------------------
// a child process, so that a test can check its exit code and its messages

typedef struct {
    void (*body)(void *);
    void *arg;
} Child;

static void *child_thread(void *arg) { // a thread of its own: OpenMP's threads of the main one did not survive the fork
    ((Child *)arg)->body(((Child *)arg)->arg);
    return NULL;
}

enum { SAID = 1 << 15 }; // room for what a child process prints, in bytes

/* Runs body(arg) in a child process and keeps what it prints in `said`. Returns its exit code, or -1 if it was killed
 * or printed too much for `size` bytes. */
static int child_says(void (*body)(void *), void *arg, char *said, size_t size) {
    int ends[2], status;
    if (pipe(ends)) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(600); // a check that hangs is a failure, not a hang of all tests
        dup2(ends[1], STDERR_FILENO);
        dup2(ends[1], STDOUT_FILENO);
        Child child = {body, arg};
        pthread_t thread;
        if (!pthread_create(&thread, NULL, child_thread, &child)) pthread_join(thread, NULL);
        fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used + 1 < size;) {
        got = read(ends[0], said + used, size - 1 - used);
        if (got > 0) used += (size_t)got;
    }
    said[used] = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    int is_cut = used + 1 == size;
    if (is_cut) printf("error: a child process printed more than its test has room for, %zu bytes\n", size);
    return WIFEXITED(status) && !is_cut ? WEXITSTATUS(status) : -1;
}

/* The first line of `said` that begins with "error: " or "failure: ", or "". Changes `said`. */
static const char *error_line(char *said) {
    for (char *line = strtok(said, "\n"); line; line = strtok(NULL, "\n"))
        if (!strncmp(line, "error: ", 7) || !strncmp(line, "failure: ", 9)) return line;
    return "";
}

/* How a child process ended: its exit code, its error line and how long it took. */
typedef struct {
    int code;
    double seconds;
    const char *said;
    char output[SAID];
} Ending;

static void end_run(Ending *e, void (*run)(void *), const void *argument) {
    double start = seconds_now();
    e->code = child_says(run, (void *)argument, e->output, sizeof e->output);
    e->seconds = seconds_now() - start;
    e->said = error_line(e->output);
}

/* Runs fn(arg) in a child: it must exit with code 1 after one line `error: ...` that contains `part`. */
static void expect_user_error(const char *name, void (*fn)(void *), const void *arg, const char *part) {
    char text[8192];
    int lines = 0, code = child_says(fn, (void *)arg, text, sizeof text);
    size_t len = strlen(text);
    for (size_t i = 0; i < len; i++) lines += text[i] == '\n';
    if (len && text[len - 1] == '\n') text[len - 1] = 0;
    CHECK(name, code == 1 && lines == 1 && !strncmp(text, "error: ", 7) && strstr(text, part),
          "exit %d, %d line(s): %.300s", code, lines, text);
}

// ---------------------------------------------------------------------------
// groups of tests

enum { IF_NAMED = 0, C_BUILD = 1, CUDA = 2, BOTH_BUILDS = C_BUILD | CUDA }; // builds in which a group runs by default
typedef struct {
    const char *name;
    void (*run)(void);
    int where;
} TestGroup;

static int is_short; // run only a part of the checks of each group

static int runs_here(const TestGroup *g) { return (g->where & (CUDA_BUILD ? CUDA : C_BUILD)) != 0; }

static void run_group(const TestGroup *g) {
    double start = seconds_now(), used = (double)clock() / CLOCKS_PER_SEC;
    g->run();
    printf("---- %s: %.1f s, this process computed for %.1f s\n", g->name, seconds_now() - start,
           (double)clock() / CLOCKS_PER_SEC - used);
}

static void open_scratch(void) {
    const char *place = getenv("TMPDIR") && strlen(getenv("TMPDIR")) < 40 ? getenv("TMPDIR") : "/tmp";
    snprintf(scratch_dir, sizeof scratch_dir, "%.40s/llama3-test-XXXXXX", place);
    if (!mkdtemp(scratch_dir)) user_error("cannot make the directory %s", scratch_dir);
}

/* Removes the files and prints the result. Returns the exit code. */
static int end_tests(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", scratch_dir);
    if (system(command)) printf("could not remove %s\n", scratch_dir);
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed > 0;
}

/* A whole main: `list` prints the names of the groups, `short` runs a part of each; otherwise the groups that are
 * named, or all of this build. Returns the exit code. */
static int run_tests(const TestGroup *groups, int count, int argc, char **argv) {
    is_short = argc == 2 && !strcmp(argv[1], "short");
    if (argc == 2 && !strcmp(argv[1], "list")) {
        for (int g = 0; g < count; g++)
            if (runs_here(&groups[g])) printf("%s\n", groups[g].name);
        return 0;
    }
    for (int i = 1; i < argc && !is_short; i++) { // a name that is no group's must not end as a run without faults
        int known = 0;
        for (int g = 0; g < count; g++) known |= !strcmp(argv[i], groups[g].name);
        if (!known) user_error("%s is not a group of tests; `%s list` prints their names", argv[i], argv[0]);
    }
    open_scratch();
    for (int g = 0; g < count; g++) {
        int wanted = (argc == 1 || is_short) && runs_here(&groups[g]);
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], groups[g].name);
        if (wanted) run_group(&groups[g]);
    }
    return end_tests();
}

#endif
