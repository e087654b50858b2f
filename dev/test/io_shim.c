/* io_shim.c: reads that return less than asked for or fail, and allocations that fail; for bad_input.sh and
 * allocations.sh.
 *
 * A library (cc -shared -fPIC) to be preloaded with LD_PRELOAD. HALVE_READS=1: each read of a regular file returns at
 * most half of what was asked for. FAIL_READ_AT=n, FAIL_READ_OF=END: the n-th read of files whose path ends with END
 * fails with EIO, or with EINTR if READ_ERROR=EINTR. FAIL_MALLOC_AT=n: the n-th allocation fails. IO_COUNTS=FILE: at
 * its end the process writes how many allocations it has made. Only allocations that the program, cJSON, PCRE2 and the
 * C library ask for count: MPI, OpenMP and oneDNN do not survive a failed one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RANGES = 32 };
static struct { uintptr_t begin, end; } ranges[MAX_RANGES]; // addresses of the code whose allocations count
static int num_ranges;
static int64_t allocations, reads, fail_malloc_at, fail_read_at;
static const char *fail_read_of = "";
static int halve_reads, read_error = EIO;

static int add_ranges(struct dl_phdr_info *info, size_t size, void *unused) {
    static const char *const libraries[] = {"/libcjson", "/libpcre2", "/libc.so"};
    int counts = !info->dlpi_name[0]; // the program itself
    (void)size;
    (void)unused;
    for (int i = 0; i < 3; i++) counts |= strstr(info->dlpi_name, libraries[i]) != NULL;
    for (int i = 0; counts && i < info->dlpi_phnum && num_ranges < MAX_RANGES; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_X)) continue;
        ranges[num_ranges].begin = info->dlpi_addr + segment->p_vaddr;
        ranges[num_ranges].end = ranges[num_ranges].begin + segment->p_memsz;
        num_ranges++;
    }
    return 0;
}

static int64_t number_of(const char *variable) {
    const char *text = getenv(variable);
    return text ? atoll(text) : 0;
}

__attribute__((constructor)) static void shim_open(void) {
    const char *error = getenv("READ_ERROR"), *of = getenv("FAIL_READ_OF");
    if (of) fail_read_of = of;
    dl_iterate_phdr(add_ranges, NULL);
    halve_reads = (int)number_of("HALVE_READS");
    fail_read_at = number_of("FAIL_READ_AT");
    fail_malloc_at = number_of("FAIL_MALLOC_AT");
    if (error && !strcmp(error, "EINTR")) read_error = EINTR;
    allocations = 0;
}

__attribute__((destructor)) static void shim_close(void) {
    char text[64];
    const char *path = getenv("IO_COUNTS");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    if (fd < 0) return;
    int length = snprintf(text, sizeof text, "%lld\n", (long long)allocations);
    if (write(fd, text, (size_t)length) != length) dprintf(2, "io_shim: cannot write %s\n", path);
    close(fd);
}

// ---------------------------------------------------------------------------
// allocations

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

/* Whether the allocation that the code at `caller` asks for is the one that fails. */
static int allocation_fails(const void *caller) {
    int counts = 0;
    for (int i = 0; i < num_ranges; i++)
        counts |= (uintptr_t)caller >= ranges[i].begin && (uintptr_t)caller < ranges[i].end;
    if (!counts || __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED) != fail_malloc_at) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) { return allocation_fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) {
    return allocation_fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}
void *realloc(void *p, size_t bytes) {
    return allocation_fails(__builtin_return_address(0)) ? NULL : __libc_realloc(p, bytes);
}

// ---------------------------------------------------------------------------
// reads

/* Whether this is the read that fails. */
static int read_fails(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = fail_read_at ? readlink(link, path, sizeof path) : 0, end = (ssize_t)strlen(fail_read_of);
    return length > 0 && length >= end && !memcmp(path + length - end, fail_read_of, (size_t)end) &&
           __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED) == fail_read_at;
}

/* How many bytes a read of `bytes` may return; -1: it fails. */
static ssize_t read_limit(int fd, size_t bytes) {
    struct stat info;
    if (fstat(fd, &info) || !S_ISREG(info.st_mode)) return (ssize_t)bytes;
    if (read_fails(fd)) {
        errno = read_error;
        return -1;
    }
    return halve_reads ? (ssize_t)((bytes + 1) / 2) : (ssize_t)bytes;
}

ssize_t read(int fd, void *buffer, size_t bytes) {
    static ssize_t (*real)(int, void *, size_t);
    ssize_t limit = read_limit(fd, bytes);
    if (!real) real = (ssize_t(*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    return limit < 0 ? -1 : real(fd, buffer, (size_t)limit);
}

ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    ssize_t limit = read_limit(fd, bytes);
    if (!real) real = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    return limit < 0 ? -1 : real(fd, buffer, (size_t)limit, offset);
}

ssize_t pread64(int fd, void *buffer, size_t bytes, off_t offset) { return pread(fd, buffer, bytes, offset); }
