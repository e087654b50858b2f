/* host.c: what the planner's C library asks of an operating system, for WebAssembly: files in memory, a clock, and
 * memory that grows.
 *
 * The page puts in the files that the program will read (host_put), starts the program with its arguments (host_start),
 * and afterwards takes out what it has written (host_get): its files, /stdout and /stderr. A caller may rely on:
 * nothing of an earlier run is left, because each run has an instance of its own. A system call that is not here stops
 * the run with its name (run.js).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <wasi/api.h>

#define EXPORT(name) __attribute__((used, export_name(#name)))

__attribute__((import_module("page"), import_name("seconds"))) double page_seconds(void);

int main(int argc, char **argv);

// ---------------------------------------------------------------------------
// files

enum { MAX_FILES = 64, MAX_OPEN = 64, MAX_PATH = 256 };

typedef struct {
    char path[MAX_PATH]; // "": this entry is free
    int is_directory;
    char *bytes; // (size), with room for more
    size_t size, room;
} File;

typedef struct {
    File *file; // NULL: this descriptor is free
    int64_t at; // where the next read or write begins
    int appends;
} OpenFile;

static File files[MAX_FILES];
static OpenFile open_files[MAX_OPEN];

/* The path from the root, without a leading slash, "." or "..". The root itself is ".". */
static void plain_path(char plain[MAX_PATH], const char *path) {
    size_t n = 0;
    for (size_t length; *path; path += length) {
        path += strspn(path, "/");
        length = strcspn(path, "/");
        if (length == 2 && !strncmp(path, "..", 2)) {
            while (n && plain[n] != '/') n--;
        } else if (length && strncmp(path, ".", length) && n + length + 2 < MAX_PATH) {
            if (n) plain[n++] = '/';
            memcpy(plain + n, path, length);
            n += length;
        }
        plain[n] = 0;
    }
    if (!n) strcpy(plain, ".");
}

/* The entry of a path; NULL: there is none. `adds`: makes one. */
static File *file_find(const char *path, int adds) {
    char plain[MAX_PATH];
    plain_path(plain, path);
    for (int i = 0; i < MAX_FILES; i++)
        if (files[i].path[0] && !strcmp(files[i].path, plain)) return &files[i];
    for (int i = 0; i < MAX_FILES && adds; i++) {
        if (files[i].path[0]) continue;
        files[i].size = 0;
        files[i].is_directory = 0;
        strcpy(files[i].path, plain);
        return &files[i];
    }
    return NULL;
}

static void file_write(File *f, const void *bytes, size_t count, int64_t at) {
    size_t end = (size_t)at + count;
    if (end > f->room) {
        f->room = 2 * end + 4096;
        f->bytes = (char *)realloc(f->bytes, f->room);
        if (!f->bytes) abort();
    }
    if ((size_t)at > f->size) memset(f->bytes + f->size, 0, (size_t)at - f->size);
    memcpy(f->bytes + at, bytes, count);
    if (end > f->size) f->size = end;
}

static size_t file_read(const File *f, void *bytes, size_t count, int64_t at) {
    size_t left = (size_t)at < f->size ? f->size - (size_t)at : 0, n = count < left ? count : left;
    if (n) memcpy(bytes, f->bytes + at, n);
    return n;
}

static OpenFile *descriptor(long fd) {
    int is_open = fd >= 0 && fd < MAX_OPEN && open_files[fd].file;
    return is_open ? &open_files[fd] : NULL;
}

static long open_file(File *f, int appends) {
    for (int fd = 0; fd < MAX_OPEN; fd++) {
        if (open_files[fd].file) continue;
        open_files[fd].file = f;
        open_files[fd].at = 0;
        open_files[fd].appends = appends;
        return fd;
    }
    return -EMFILE;
}

// ---------------------------------------------------------------------------
// calls of the C library: files by path

long __syscall_open(long path, long flags, ...) {
    File *f = file_find((const char *)path, 0);
    if (!f && !(flags & O_CREAT)) return -ENOENT;
    if (f && (flags & O_CREAT) && (flags & O_EXCL)) return -EEXIST;
    if (f && f->is_directory && (flags & O_ACCMODE) != O_RDONLY) return -EISDIR;
    if (!f) f = file_find((const char *)path, 1);
    if (!f) return -ENOSPC;
    if (flags & O_TRUNC) f->size = 0;
    return open_file(f, !!(flags & O_APPEND));
}

static long file_stat(const File *f, struct stat *s) {
    if (!f) return -ENOENT;
    memset(s, 0, sizeof *s);
    s->st_mode = f->is_directory ? S_IFDIR | 0755 : S_IFREG | 0644;
    s->st_size = (off_t)f->size;
    s->st_nlink = 1;
    s->st_ino = (ino_t)(f - files + 1);
    s->st_blksize = 4096;
    return 0;
}

long __syscall_stat64(long path, long buffer) {
    return file_stat(file_find((const char *)path, 0), (struct stat *)buffer);
}
long __syscall_lstat64(long path, long buffer) { return __syscall_stat64(path, buffer); }
long __syscall_fstatat64(long dir, long path, long buffer, long flags) {
    (void)dir;
    (void)flags;
    return __syscall_stat64(path, buffer);
}

long __syscall_faccessat(long dir, long path, long mode, long flags) {
    (void)dir;
    (void)mode;
    (void)flags;
    return file_find((const char *)path, 0) ? 0 : -ENOENT;
}

long __syscall_mkdir(long path, long mode) {
    (void)mode;
    if (file_find((const char *)path, 0)) return -EEXIST;
    File *f = file_find((const char *)path, 1);
    if (!f) return -ENOSPC;
    f->is_directory = 1;
    return 0;
}

long __syscall_unlink(long path) {
    File *f = file_find((const char *)path, 0);
    if (!f) return -ENOENT;
    f->path[0] = 0; // the entry may be reused at once: the program does not read a file that it has removed
    return 0;
}

// ---------------------------------------------------------------------------
// calls of the C library: open files

__wasi_errno_t __wasi_fd_write(__wasi_fd_t fd, const __wasi_ciovec_t *parts, size_t count, __wasi_size_t *wrote) {
    OpenFile *o = descriptor((long)fd);
    if (!o) return __WASI_ERRNO_BADF;
    *wrote = 0;
    for (size_t i = 0; i < count; i++) {
        if (o->appends) o->at = (int64_t)o->file->size;
        file_write(o->file, parts[i].buf, parts[i].buf_len, o->at);
        o->at += (int64_t)parts[i].buf_len;
        *wrote += parts[i].buf_len;
    }
    return __WASI_ERRNO_SUCCESS;
}

__wasi_errno_t __wasi_fd_pread(__wasi_fd_t fd, const __wasi_iovec_t *parts, size_t count, __wasi_filesize_t at,
                               __wasi_size_t *read) {
    OpenFile *o = descriptor((long)fd);
    if (!o) return __WASI_ERRNO_BADF;
    if (o->file->is_directory) return __WASI_ERRNO_ISDIR;
    *read = 0;
    for (size_t i = 0; i < count; i++)
        *read += file_read(o->file, parts[i].buf, parts[i].buf_len, (int64_t)(at + *read));
    return __WASI_ERRNO_SUCCESS;
}

__wasi_errno_t __wasi_fd_read(__wasi_fd_t fd, const __wasi_iovec_t *parts, size_t count, __wasi_size_t *read) {
    OpenFile *o = descriptor((long)fd);
    __wasi_errno_t failed = __wasi_fd_pread(fd, parts, count, o ? (__wasi_filesize_t)o->at : 0, read);
    if (!failed) o->at += (int64_t)*read;
    return failed;
}

__wasi_errno_t __wasi_fd_seek(__wasi_fd_t fd, __wasi_filedelta_t offset, __wasi_whence_t whence,
                              __wasi_filesize_t *at) {
    OpenFile *o = descriptor((long)fd);
    if (!o) return __WASI_ERRNO_BADF;
    int64_t from = 0;
    if (whence == __WASI_WHENCE_CUR) from = o->at;
    if (whence == __WASI_WHENCE_END) from = (int64_t)o->file->size;
    if (from + offset < 0) return __WASI_ERRNO_INVAL;
    o->at = from + offset;
    *at = (__wasi_filesize_t)o->at;
    return __WASI_ERRNO_SUCCESS;
}

__wasi_errno_t __wasi_fd_close(__wasi_fd_t fd) {
    OpenFile *o = descriptor((long)fd);
    if (!o) return __WASI_ERRNO_BADF;
    o->file = NULL;
    return __WASI_ERRNO_SUCCESS;
}

__wasi_errno_t __wasi_fd_sync(__wasi_fd_t fd) {
    return descriptor((long)fd) ? __WASI_ERRNO_SUCCESS : __WASI_ERRNO_BADF;
}

long __syscall_fstat64(long fd, long buffer) {
    OpenFile *o = descriptor(fd);
    return o ? file_stat(o->file, (struct stat *)buffer) : -EBADF;
}

/* The names in a directory, as many as fit into the buffer; at the end, none. */
long __syscall_getdents64(long fd, long buffer, long size) {
    OpenFile *o = descriptor(fd);
    if (!o) return -EBADF;
    size_t length = strlen(o->file->path), used = 0;
    for (; o->at < MAX_FILES; o->at++) {
        const File *f = &files[o->at];
        if (strncmp(f->path, o->file->path, length) || f->path[length] != '/') continue;
        if (strchr(f->path + length + 1, '/')) continue;
        if (used + sizeof(struct dirent) > (size_t)size) break;
        struct dirent *d = (struct dirent *)(buffer + (long)used);
        memset(d, 0, sizeof *d);
        d->d_ino = (ino_t)(o->at + 1);
        d->d_reclen = sizeof *d;
        d->d_type = f->is_directory ? DT_DIR : DT_REG;
        strcpy(d->d_name, f->path + length + 1);
        used += sizeof *d;
    }
    return (long)used;
}

long __syscall_dup(long fd) {
    OpenFile *o = descriptor(fd);
    return o ? open_file(o->file, o->appends) : -EBADF;
}

long __syscall_fcntl64(long fd, long command, ...) {
    (void)command; // descriptors have no flags that matter to one process
    return descriptor(fd) ? 0 : -EBADF;
}

long __syscall_ioctl(long fd, long request, ...) {
    (void)fd;
    (void)request;
    return -ENOTTY;
}

int flock(int fd, int operation) {
    (void)operation; // there is no other process
    return descriptor(fd) ? 0 : -1;
}

// ---------------------------------------------------------------------------
// time, memory, and the process

int clock_gettime(clockid_t clock, struct timespec *t) {
    double seconds = page_seconds();
    (void)clock;
    t->tv_sec = (time_t)seconds;
    t->tv_nsec = (long)(1e9 * (seconds - (double)t->tv_sec));
    return 0;
}

long __syscall_getrusage(long who, long buffer) {
    struct rusage *used = (struct rusage *)buffer;
    (void)who;
    memset(used, 0, sizeof *used);
    used->ru_maxrss = (long)(__builtin_wasm_memory_size(0) << 16 >> 10); // KiB
    return 0;
}

size_t emscripten_get_heap_max(void) { return (size_t)1 << 32; }

int emscripten_resize_heap(size_t bytes) {
    size_t have = __builtin_wasm_memory_size(0) << 16, more = bytes > have ? bytes - have : 0;
    return __builtin_wasm_memory_grow(0, (more + 65535) >> 16) != (size_t)-1;
}

/* For copies of 512 bytes and more; with -mbulk-memory this is one instruction. */
void *emscripten_memcpy_big(void *to, const void *from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }

__wasi_errno_t __wasi_environ_sizes_get(__wasi_size_t *count, __wasi_size_t *bytes) {
    *count = *bytes = 0;
    return __WASI_ERRNO_SUCCESS;
}

__wasi_errno_t __wasi_environ_get(uint8_t **variables, uint8_t *text) {
    (void)variables;
    (void)text;
    return __WASI_ERRNO_SUCCESS;
}

// ---------------------------------------------------------------------------
// comparisons of long double, which printf and strtod use: those of emscripten 3.1's compiler-rt return 64 bits, where
// its compiler expects 32

typedef union {
    long double value;
    struct {
        uint64_t low, high; // IEEE binary128
    } bits;
} Quad;

static int quad_is_nan(Quad q) {
    uint64_t high = q.bits.high & INT64_MAX, infinity = 0x7FFF000000000000u;
    return high > infinity || (high == infinity && q.bits.low);
}

/* A number whose order is that of the values; +0 and -0 are equal. */
static __int128 quad_order(Quad q) {
    __int128 magnitude = (__int128)(q.bits.high & INT64_MAX) << 64 | q.bits.low;
    return q.bits.high >> 63 ? -magnitude : magnitude;
}

/* -1, 0 or 1; `unordered` if one of them is not a number. */
static int quad_compare(long double a, long double b, int unordered) {
    Quad x = {a}, y = {b};
    __int128 first = quad_order(x), second = quad_order(y);
    if (quad_is_nan(x) || quad_is_nan(y)) return unordered;
    return (first > second) - (first < second);
}

int __eqtf2(long double a, long double b) { return quad_compare(a, b, 1); }
int __netf2(long double a, long double b) { return quad_compare(a, b, 1); }
int __letf2(long double a, long double b) { return quad_compare(a, b, 1); }
int __lttf2(long double a, long double b) { return quad_compare(a, b, 1); }
int __getf2(long double a, long double b) { return quad_compare(a, b, -1); }
int __gttf2(long double a, long double b) { return quad_compare(a, b, -1); }
int __unordtf2(long double a, long double b) {
    Quad x = {a}, y = {b};
    return quad_is_nan(x) || quad_is_nan(y);
}

// ---------------------------------------------------------------------------
// calls of the page; addresses are below 4 GB, so that they are numbers in JavaScript, too

/* Memory for what the page passes. */
EXPORT(host_room) uint32_t host_room(uint32_t bytes) { return (uint32_t)(uintptr_t)calloc(1, bytes); }

/* A file with `size` bytes that the page has written to memory. */
EXPORT(host_put) void host_put(uint32_t path, uint32_t bytes, uint32_t size) {
    File *f = file_find((const char *)(uintptr_t)path, 1);
    if (!f) abort();
    f->size = 0;
    file_write(f, (const void *)(uintptr_t)bytes, size, 0);
}

/* Where the bytes of a file are; 0: there is no such file. */
EXPORT(host_get) uint32_t host_get(uint32_t path) {
    const File *f = file_find((const char *)(uintptr_t)path, 0);
    return f ? (uint32_t)(uintptr_t)f->bytes : 0;
}

EXPORT(host_size) uint32_t host_size(uint32_t path) {
    const File *f = file_find((const char *)(uintptr_t)path, 0);
    return f ? (uint32_t)f->size : 0;
}

/* Runs the program. `arguments`: (count) texts, one after the other, each with a NUL at its end. It does not return:
 * the program ends with proc_exit, which the page imports. */
EXPORT(host_start) void host_start(uint32_t arguments, uint32_t count) {
    static const char *const streams[] = {"/stdin", "/stdout", "/stderr"};
    char **argv = (char **)calloc(count + 1, sizeof *argv), *at = (char *)(uintptr_t)arguments;
    for (uint32_t i = 0; i < count; i++, at += strlen(at) + 1) argv[i] = at;
    file_find("/", 1)->is_directory = 1;
    for (int i = 0; i < 3; i++) open_file(file_find(streams[i], 1), 1);
    int code = main((int)count, argv);
    fflush(NULL);
    _exit(code);
}
