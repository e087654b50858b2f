/* base.h: what every other file but the ops builds on: small helpers, files, and the two ways to end a run early.
 *
 * user_error ends all ranks with exit code 1 and run_failure with 2; each prints one line, even if several ranks fail.
 */
#ifndef BASE_H
#define BASE_H
#include "system.h"    // what only Linux has; includes the headers of POSIX
#include "exact_sum.h" // defines: ExactSum; includes kernel.h: bf16, floatX, Dtype, small helpers, OpStream
#include <stdarg.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// small helpers

static const char *const dtype_names[] = {"fp32", "bf16", "bytes"}; // of Dtype

/* A fingerprint of n bytes, continuing from `h`: FNV-1a with 64 bits. Each step is invertible, so that a single
 * difference is never lost. */
#define HASH_START 0xCBF29CE484222325ull
static inline uint64_t hash_bytes(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001B3ull;
    return h;
}

/* The number in the first of these variables of the environment that is set; `otherwise` if none is. */
static inline int number_in_environment(const char *const names[], int count, int otherwise) {
    for (int i = 0; i < count; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return otherwise;
}

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The length of the UTF-8 character at p, of which `left` bytes exist; 0 if it is not valid (the table of RFC 3629,
 * section 4: neither overlong forms nor surrogates). */
static inline size_t utf8_character_length(const uint8_t *p, size_t left) {
    uint8_t c = p[0], second_min = 0x80, second_max = 0xBF;
    if (c < 0x80) return 1;
    if (c < 0xC2 || c > 0xF4) return 0;
    size_t n = 2;
    if (c >= 0xE0) n = 3;
    if (c >= 0xF0) n = 4;
    if (c == 0xE0) second_min = 0xA0;
    if (c == 0xED) second_max = 0x9F;
    if (c == 0xF0) second_min = 0x90;
    if (c == 0xF4) second_max = 0x8F;
    if (n > left || p[1] < second_min || p[1] > second_max) return 0;
    for (size_t i = 2; i < n; i++)
        if (p[i] >> 6 != 2) return 0;
    return n;
}

/* Replaces control characters by blanks: a line with names from files stays one line, and a terminal is not given
 * commands. They are C0 and DEL in ASCII, and C1: U+0080 to U+009F in UTF-8, or single bytes 0x80 to 0x9F that are not
 * part of a valid character. */
static inline void blank_control_characters(char *text, size_t length) {
    uint8_t *p = (uint8_t *)text;
    for (size_t i = 0, n; i < length; i += n) {
        size_t valid = utf8_character_length(p + i, length - i);
        int is_c0 = p[i] < ' ' || p[i] == 127;
        int is_c1 = valid == 2 ? p[i] == 0xC2 && p[i + 1] < 0xA0 : !valid && p[i] < 0xA0;
        n = valid ? valid : 1;
        if (is_c0 || is_c1) memset(p + i, ' ', n);
    }
}

// ---------------------------------------------------------------------------
// the two ways to end a run early

/* How this process ends. Besides watchdog.h's record of this process these are the only mutable globals: a process ends
 * once, whichever of its ranks finds the reason. */
static struct {
    int process;      // number of this process among those that the launcher started
    int quiet;        // all processes check the same input now: only one of them reports an error
    int reported;     // an error has been printed
    const char *host; // named in errors; NULL: all processes are on one host, or this one is on the first of them
    int *said; // shared by the processes of a host: exit code of the one that reported an error; NULL: one process
    void (*last_words)(int code);        // writes files for a post-mortem, after the error line
    void (*abort_collectives)(int code); // aborts this rank's collectives on the GPU; if that hangs, ends the process
    void (*abort_all)(int code);         // ends the other processes
} process_end;

/* All ranks often find the same error at once. Each process waits for its turn to report it; the first one's exit ends
 * the others while they wait. If only one process finds it, for example a file missing on one host, its turn comes. */
__attribute__((noreturn)) static inline void end_process(int code, const char *prefix, const char *format,
                                                         va_list args) {
    useconds_t turn = (useconds_t)min_i64(10, process_end.process);
    if (turn && (code == 1 || process_end.quiet)) usleep((process_end.quiet ? 2000000 : 0) + 300000 * turn);
    if (__atomic_exchange_n(&process_end.reported, 1, __ATOMIC_SEQ_CST))
        for (;;) pause(); // another thread is ending this process
    int none = 0;
    if (process_end.said &&
        !__atomic_compare_exchange_n(process_end.said, &none, code, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        sleep(1);
        _exit(none); // another process of this host has reported an error
    }
    char line[4096];
    int used = snprintf(line, sizeof line, "%s", prefix);
    if (code == 1 && process_end.host)
        used += snprintf(line + used, sizeof line - (size_t)used, "on host %s: ", process_end.host);
    used += vsnprintf(line + used, sizeof line - (size_t)used - 1, format, args);
    if (used > (int)sizeof line - 2) used = (int)sizeof line - 2;
    blank_control_characters(line, (size_t)used);
    line[used++] = '\n';
    fflush(stdout);
    fwrite(line, 1, (size_t)used, stderr);
    fflush(stderr);
    if (process_end.last_words) process_end.last_words(code);
    if (process_end.abort_collectives) process_end.abort_collectives(code);
    if (process_end.abort_all) process_end.abort_all(code);
    _exit(code);
}

/* Ends the run for a reason that the user can fix. The message says what was given, what was expected and what to do.
 * Exit code 1. */
static inline void user_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    end_process(1, "error: ", format, args);
}

/* Ends the run because it failed: a timeout, a lost rank, a device error, an unequal ledger. Exit code 2. */
static inline void run_failure(const char *format, ...) {
    va_list args;
    va_start(args, format);
    end_process(2, "failure: ", format, args);
}

// ---------------------------------------------------------------------------
// memory and files of the host

/* Calls realloc, and ends the run if there is no memory. */
static inline void *checked_realloc(void *p, size_t bytes) {
    p = realloc(p, bytes);
    if (!p) run_failure("out of memory: could not allocate %zu bytes on the host", bytes);
    return p;
}

/* Returns a copy of `text`, and ends the run if there is no memory. */
static inline char *checked_strdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    return (char *)memcpy(checked_malloc(bytes), text, bytes);
}

/* The path of `name` in the directory of the file `path`. */
static inline void path_beside(char *out, size_t size, const char *path, const char *name) {
    const char *slash = strrchr(path, '/');
    snprintf(out, size, "%.*s%s", slash ? (int)(slash + 1 - path) : 0, path, name);
}

/* Whether the directory has an entry of this name. An entry that cannot be reached is an error: if it counted as
 * absent, the run would silently go without the user's file. */
static inline int entry_exists(const char *path) {
    struct stat info;
    char target[1024];
    if (lstat(path, &info)) {
        if (errno == ENOENT || errno == ENOTDIR) return 0;
        user_error("cannot look for %s: %s; make its directory accessible", path, strerror(errno));
    }
    if (!S_ISLNK(info.st_mode) || !stat(path, &info)) return 1;
    int reason = errno, length = (int)readlink(path, target, sizeof target);
    user_error("%s is a symbolic link to %.*s, which cannot be reached (%s): make that file accessible; if this is a "
               "copy of a Hugging Face cache snapshot, copy it again with cp -rL, which copies files instead of links",
               path, length > 0 ? length : 0, target, strerror(reason));
}

static inline const char *file_kind(mode_t mode) {
    if (S_ISREG(mode)) return "a regular file";
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Reads `bytes` bytes of a file from `offset` on. One system call may return fewer: after a signal, on network file
 * systems, or above 2 GB. Returns how many bytes the file has there, at most `bytes`, or -1 with errno set. */
static inline int64_t read_bytes_at(int fd, void *buffer, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, (char *)buffer + done, (size_t)(bytes - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += got;
    }
    return done;
}

/* Refuses the text that Git puts in place of a large file until Git LFS has fetched it. */
static inline void refuse_lfs_pointer(int fd, const char *path) {
    static const char begins[] = "version https://git-lfs.github.com/spec/";
    char start[sizeof begins - 1];
    int64_t got = read_bytes_at(fd, start, sizeof start, 0);
    if (got < 0 && errno == EIO)
        user_error("cannot read %s (%s): check the disk, or copy the file", path, strerror(errno));
    if (got == (int64_t)sizeof start && !memcmp(start, begins, sizeof start)) // a pipe cannot be read at a place
        user_error("%s is a Git LFS pointer, which only names the file that belongs here: run git lfs pull in its "
                   "repository, or copy the file itself",
                   path);
}

/* Opens a regular file for reading. Anything else is an error, because reading from a pipe or a device may never end.
 * If the file cannot be opened, the result is -1 and errno is set. */
static inline int open_regular_file(const char *path, struct stat *info) {
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), reason = errno; // O_NONBLOCK: a pipe may have no writer
    int known = fd < 0 ? entry_exists(path) && !stat(path, info) : !fstat(fd, info);
    if (known && !S_ISREG(info->st_mode))
        user_error("%s is %s, expected a regular file: give the path of a file, and save what a pipe or a device "
                   "delivers to a file first",
                   path, file_kind(info->st_mode));
    if (fd >= 0) refuse_lfs_pointer(fd, path);
    else errno = reason;
    return fd;
}

/* Reads until the end of a file or pipe, and closes it. A NUL follows the `length` bytes, and the caller frees them. On
 * an error the result is NULL, errno is set, and the length is 0. */
static inline char *read_to_end(int fd, size_t *length) {
    size_t capacity = 1 << 16, used = 0;
    char *text = (char *)checked_malloc(capacity);
    int reason = 0;
    for (;;) {
        ssize_t got = read(fd, text + used, capacity - used - 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) reason = errno; // a directory opens like a file, but cannot be read
        if (got <= 0) break;
        used += (size_t)got;
        if (capacity - used > 1) continue;
        capacity *= 2;
        text = (char *)checked_realloc(text, capacity);
    }
    close(fd);
    *length = reason ? 0 : used;
    text[used] = 0;
    if (!reason) return text;
    free(text);
    errno = reason;
    return NULL;
}

/* Opens a file or pipe and reads it like read_to_end. */
static inline char *read_file(const char *path, size_t *length) {
    *length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    refuse_lfs_pointer(fd, path);
    return read_to_end(fd, length);
}

/* Opens a regular file and reads it like read_to_end. It may have at most 1 GiB, which is far more than any text that
 * this program reads whole. */
static inline char *read_regular_file(const char *path, size_t *length) {
    struct stat info;
    *length = 0;
    int fd = open_regular_file(path, &info);
    if (fd < 0) return NULL;
    if (info.st_size > 1 << 30)
        user_error("%s has %lld bytes, expected at most 1 GiB: check that this is the right file", path,
                   (long long)info.st_size);
    return read_to_end(fd, length);
}

/* Replaces the file `name` in `folder` as a whole by (length) text, unless it has this text already. It is on disk some
 * time later. Returns 0 or errno. */
static inline int replace_text_file(const char *folder, const char *name, const char *text, size_t length) {
    char path[4096 + 16], written[4096 + 32];
    size_t old_length;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(written, sizeof written, "%s/.%s.part", folder, name);
    char *old = read_regular_file(path, &old_length);
    int is_equal = old && old_length == length && !memcmp(old, text, length);
    free(old);
    if (is_equal) return 0;
    FILE *f = fopen(written, "w");
    if (!f) return errno;
    fwrite(text, 1, length, f);
    int failed = fflush(f) || ferror(f) ? errno : 0;
    if (fclose(f) && !failed) failed = errno;
    if (!failed && rename(written, path)) failed = errno;
    if (failed) unlink(written);
    return failed;
}

// ---------------------------------------------------------------------------
// threads

/* Stack size of every thread. The default would be that of `ulimit -s`, or 128 KB with musl. */
enum { THREAD_STACK_BYTES = 8 << 20 };

/* Returns 0, or the error number. */
static inline int thread_start(pthread_t *thread, void *(*body)(void *), void *argument) {
    pthread_attr_t attributes;
    int failed = pthread_attr_init(&attributes);
    if (failed) return failed;
    pthread_attr_setstacksize(&attributes, THREAD_STACK_BYTES);
    failed = pthread_create(thread, &attributes, body, argument);
    pthread_attr_destroy(&attributes);
    return failed;
}

#endif
