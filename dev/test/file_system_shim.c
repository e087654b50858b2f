/* file_system_shim.c: a file system that lacks what WITHOUT lists, or is slow, for hard_places.sh and hosts.sh.
 *
 * As a library (cc -shared -fPIC), preloaded into the program. WITHOUT is a list of words: flock, symlink, dirsync,
 * fallocate, direct (O_DIRECT), hardlink, whole (each write ends after half of its bytes), or shm (/dev/shm is as small
 * as Docker makes it). HOLD is a part of a path: before such a file gets its final name, the program creates the file
 * ./held and waits until the test removes it. PACE is a file with the number of a step: while it exists, each
 * checkpoint of this step or a later one takes two seconds longer, so that the run cannot end before the test has done
 * to it what it wants.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static int lacks(const char *word) {
    const char *list = getenv("WITHOUT");
    return list && strstr(list, word) != NULL;
}

static int refuse(int error) {
    errno = error;
    return -1;
}

/* Called before a file or directory gets another name. */
static void hold(const char *from) {
    const char *part = getenv("HOLD");
    if (!part || !strstr(from, part)) return;
    close((int)syscall(SYS_openat, AT_FDCWD, "held", O_CREAT | O_WRONLY, 0666));
    while (!access("held", F_OK)) usleep(1000);
}

/* Called before a file or directory gets the name `to`. */
static void pace(const char *to) {
    const char *file = getenv("PACE"), *name = strstr(to, "/step-");
    FILE *f = file && name ? fopen(file, "r") : NULL;
    long first;
    if (!f) return;
    if (fscanf(f, "%ld", &first) == 1 && atol(name + strlen("/step-")) >= first) sleep(2);
    fclose(f);
}

int rename(const char *from, const char *to) {
    hold(from);
    pace(to);
    return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int flock(int fd, int operation) {
    if (lacks("flock")) return refuse(ENOSYS);
    return (int)syscall(SYS_flock, fd, operation);
}

int symlink(const char *target, const char *path) {
    if (lacks("symlink")) return refuse(EPERM);
    return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
}

int link(const char *from, const char *to) {
    hold(from);
    if (lacks("hardlink")) return refuse(EPERM);
    return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int fsync(int fd) {
    struct stat info;
    if (lacks("dirsync") && !fstat(fd, &info) && S_ISDIR(info.st_mode)) return refuse(EINVAL);
    return (int)syscall(SYS_fsync, fd);
}

int fallocate(int fd, int mode, off_t from, off_t bytes) {
    if (lacks("fallocate")) return refuse(EOPNOTSUPP);
    return (int)syscall(SYS_fallocate, fd, mode, from, bytes);
}

/* as musl has it: glibc's would write zeros */
int posix_fallocate(int fd, off_t from, off_t bytes) {
    if (lacks("fallocate")) return EOPNOTSUPP;
    return syscall(SYS_fallocate, fd, 0, from, bytes) ? errno : 0;
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    int mode = flags & O_CREAT ? va_arg(arguments, int) : 0;
    va_end(arguments);
    if (flags & O_DIRECT && lacks("direct")) return refuse(EINVAL);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) {
    if (lacks("whole") && count > 1) count /= 2;
    return syscall(SYS_pwrite64, fd, bytes, count, at);
}

int statvfs(const char *path, struct statvfs *info) {
    int (*real)(const char *, struct statvfs *) = (int (*)(const char *, struct statvfs *))dlsym(RTLD_NEXT, "statvfs");
    int result = real(path, info);
    if (!result && lacks("shm") && !strcmp(path, "/dev/shm")) info->f_bavail = (64 << 20) / info->f_frsize;
    return result;
}
