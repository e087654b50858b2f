/* harness.h: the ground on which a fuzzer runs a program's readers, a million times in one process.
 *
 * Owns: what an execution is. The program's two error exits come back here instead of ending the process; whatever an
 * execution that ended so has left (memory, files, descriptors) is taken back; one that ends well has to leave nothing.
 * A target may rely on: its input lies in a file that the program opens by name; a broken promise of the program is
 * told to `finding`, beside what the sanitizers find themselves.
 * Stands before the program's source: it takes the place of a few functions that the program calls.
 */
#ifndef HARNESS_H
#define HARNESS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PCRE2_CODE_UNIT_WIDTH 8
#include <fcntl.h>
#include <omp.h>
#include <pcre2.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A promise was broken: the engine keeps the input that did it. */
__attribute__((noreturn, format(printf, 1, 2))) static void finding(const char *format, ...) {
    va_list args;
    va_start(args, format);
    dprintf(2, "finding: ");
    vdprintf(2, format, args);
    dprintf(2, "\n");
    va_end(args);
    abort();
}
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) finding(__VA_ARGS__);                                                                        \
    } while (0)

// ---------------------------------------------------------------------------
// what the program holds: memory (as the sanitizer sees it, libraries included), files, descriptors

enum { HELD_BLOCKS = 1 << 16, HELD_FILES = 64 };
static struct {
    int taken;           // the reader under test has accepted the input; what comes after it may still refuse
    const char *promise; // what the program has no reason to refuse now; NULL: it may
    int num_blocks, num_files, num_fds;
    const volatile void *blocks[HELD_BLOCKS];
    FILE *files[HELD_FILES];
    int fds[HELD_FILES];
} held;
static __thread int running; // an execution is under way; the engine's own threads have none

static void block_taken(const volatile void *p, size_t bytes) {
    (void)bytes;
    if (running && p && held.num_blocks < HELD_BLOCKS) held.blocks[held.num_blocks++] = p;
}
static void block_given(const volatile void *p) {
    int i = running ? held.num_blocks : 0;
    while (i > 0 && held.blocks[i - 1] != p) i--; // mostly one of the last
    if (i > 0) held.blocks[i - 1] = held.blocks[--held.num_blocks];
}

static FILE *program_fopen(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    if (f && held.num_files < HELD_FILES) held.files[held.num_files++] = f;
    return f;
}
static int program_fclose(FILE *f) {
    for (int i = 0; i < held.num_files; i++)
        if (held.files[i] == f) held.files[i] = held.files[--held.num_files];
    return fclose(f);
}
static int program_open(const char *path, int flags, ...) { // the targets make no files
    int fd = open(path, flags);
    if (fd >= 0 && held.num_fds < HELD_FILES) held.fds[held.num_fds++] = fd;
    return fd;
}
static void fd_given(int fd) {
    for (int i = 0; i < held.num_fds; i++)
        if (held.fds[i] == fd) held.fds[i] = held.fds[--held.num_fds];
}
static int program_close(int fd) {
    fd_given(fd);
    return close(fd);
}
static FILE *program_fdopen(int fd, const char *mode) {
    FILE *f = fdopen(fd, mode);
    if (!f) return NULL;
    fd_given(fd); // it belongs to the stream now
    if (held.num_files < HELD_FILES) held.files[held.num_files++] = f;
    return f;
}

static void take_back(void) {
    while (held.num_files) fclose(held.files[--held.num_files]); // first: they own blocks
    while (held.num_fds) close(held.fds[--held.num_fds]);
    running = 0;
    while (held.num_blocks) free((void *)(uintptr_t)held.blocks[--held.num_blocks]);
}

// ---------------------------------------------------------------------------
// what the program reads: files in a folder that is in memory where run.sh found such a place

static char folder[256];

static const char *path_of(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static const char *give(const char *name, const void *data, size_t size) {
    const char *path = path_of(name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || close(fd)) finding("cannot write %s", path);
    return path;
}

// ---------------------------------------------------------------------------
// what the program says

typedef struct {
    FILE *file;
    char text[1 << 16];
} Said;
static Said said_out, said_err;

static size_t said_length(Said *s) {
    fflush(s->file);
    return (size_t)ftell(s->file);
}

// ---------------------------------------------------------------------------
// how the program ends before its end

static jmp_buf program_ended;
static int program_code;

__attribute__((noreturn)) static void program_exit(int code) {
    program_code = code;
    longjmp(program_ended, 1);
}

/* Llama 3's expression for splitting text is the same in every execution, and compiling it takes longer than the rest:
 * the first one stays, and of others the last. Those may be such that they try for ever: they get little to try. */
static pcre2_code *split_once(PCRE2_SPTR pattern, size_t length, uint32_t options, int *error, size_t *at) {
    static pcre2_code *codes[2];
    static char *compiled[2];
    int counted = running, other = compiled[0] && strcmp(compiled[0], (const char *)pattern);
    running = 0; // what is taken here stays
    if (!codes[other] || strcmp(compiled[other], (const char *)pattern)) {
        char *limited = (char *)malloc(strlen((const char *)pattern) + 64);
        sprintf(limited, "%s%s", other ? "(*LIMIT_MATCH=20000)" : "", (const char *)pattern);
        pcre2_code_free(codes[other]);
        free(compiled[other]);
        codes[other] = pcre2_compile((PCRE2_SPTR)limited, length, options, error, at, NULL);
        if (codes[other])
            pcre2_jit_compile(codes[other], PCRE2_JIT_COMPLETE); // so that the program's own call takes nothing
        compiled[other] = strdup((const char *)pattern);
        free(limited);
    }
    running = counted;
    return codes[other];
}

#ifndef _OPENMP // the targets call no kernel: no threads
int omp_get_thread_num(void) { return 0; }
void omp_set_num_threads(int n) { (void)n; }
#endif

#define printf(...) fprintf(stdout, __VA_ARGS__)
#define fopen(path, mode) program_fopen(path, mode)
#define fdopen(fd, mode) program_fdopen(fd, mode)
#define fclose(f) program_fclose(f)
#define open(...) program_open(__VA_ARGS__)
#define close(fd) program_close(fd)
#define _exit(code) program_exit(code)
#undef stdout
#undef stderr
#define stdout said_out.file
#define stderr said_err.file
#undef pcre2_compile
#undef pcre2_code_free
#define pcre2_compile(pattern, length, options, error, at, context) split_once(pattern, length, options, error, at)
#define pcre2_code_free(code) ((void)(code))

#endif
