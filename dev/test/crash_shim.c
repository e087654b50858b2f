/* crash_shim.c: a file system that loses what was not synced, for dev/test/checkpoints.sh.
 *
 * As a library (cc -shared -fPIC), preloaded into every process of a run, it counts the calls that change what lies
 * under CRASH_ROOT, of all processes together, and keeps in CRASH_STATE what a loss of power would leave: of a file its
 * bytes at its last fsync, of a directory its names at its last fsync. A name leads to an inode, so a renamed directory
 * takes its synced names along. CRASH_AT=n: in place of the n-th call (a write: after half of it) all processes die by
 * SIGKILL. ERROR_AT=n: the n-th call fails, with EIO. As a program (cc -DTOOL) it builds what would be found then, and
 * has a saver to try all this on. Of stdio it counts fopen, fflush and fclose; the writes themselves it need not see,
 * since bytes last by fsync alone. Not seen: mmap, copy_file_range, mkstemp; a file that nobody was seen making ends
 * the run. Nothing is written to the disk by fsync here.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_INODES = 1 << 16, MAX_PROCESSES = 64, LONG_PATH = PATH_MAX + 300 }; // a path, and a name behind it
_Static_assert(sizeof(long) == 8, "offsets go to system calls in one register");

/* CRASH_STATE/shared, mapped by all. Beside it: ID.data and ID.names, what lasts of inode ID; calls, one line a counted
 * call. */
typedef struct {
    pthread_mutex_t lock;
    int64_t calls, die_at, fail_at;
    int dead, processes;
    pid_t process[MAX_PROCESSES];
    int inodes;                  // ids given so far; 0 is the root's
    uint64_t number[MAX_INODES]; // of an id, as the file system has it; it gives a number again, so the last id counts
} State;

static State *state;
static char folder[PATH_MAX]; // CRASH_STATE

static _Noreturn void broken(const char *what, const char *path) {
    dprintf(2, "crash shim: %s %s: %s\n", what, path, strerror(errno));
    if (state) state->dead = 1;
    kill(getpid(), SIGKILL);
    abort();
}

static int id_of(uint64_t number) {
    for (int id = state->inodes - 1; id >= 0; id--)
        if (state->number[id] == number) return id;
    return -1;
}

static char *state_path(char *path, int id, const char *kind) {
    snprintf(path, LONG_PATH, "%s/%d.%s", folder, id, kind);
    return path;
}

// ---------------------------------------------------------------- what lasts
static char kind_of_file(const struct stat *info) {
    if (S_ISDIR(info->st_mode)) return 'd';
    return S_ISLNK(info->st_mode) ? 'l' : 'f';
}

#ifndef TOOL
static char root[LONG_PATH]; // CRASH_ROOT, resolved

static int id_new(uint64_t number) {
    if (state->inodes == MAX_INODES) broken("more files than it has room for", root);
    state->number[state->inodes] = number;
    return state->inodes++;
}

static int sys_open(int at, const char *path, int flags) {
    return (int)syscall(SYS_openat, at, path, flags | O_CLOEXEC, 0666);
}

static void sys_write(int fd, const char *data, size_t n, const char *path) {
    for (size_t done = 0; done < n;) {
        long wrote = syscall(SYS_write, fd, data + done, n - done);
        if (wrote <= 0) broken("cannot write", path);
        done += (size_t)wrote;
    }
}

/* The bytes of the file that is open as `from` last. */
static void keep_data(int id, const char *name) {
    char path[LONG_PATH], buffer[1 << 16];
    int from = sys_open(AT_FDCWD, name, O_RDONLY),
        to = sys_open(AT_FDCWD, state_path(path, id, "data"), O_WRONLY | O_CREAT | O_TRUNC);
    long n;
    if (from < 0 || to < 0) broken("cannot keep", name);
    for (n = 1; n > 0;) {
        n = syscall(SYS_read, from, buffer, sizeof buffer);
        if (n > 0) sys_write(to, buffer, (size_t)n, path);
    }
    syscall(SYS_close, from);
    syscall(SYS_close, to);
}

/* The names in directory `name` last: lines of id, kind and name, of a symbolic link also its target. `all`: what is in
 * it lasts, too. */
static void keep_names(int id, const char *name, int all) {
    char path[LONG_PATH], inner[LONG_PATH], line[3 * LONG_PATH];
    int to = sys_open(AT_FDCWD, state_path(path, id, "names"), O_WRONLY | O_CREAT | O_TRUNC);
    DIR *d = opendir(name);
    if (to < 0 || !d) broken("cannot keep", name);
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        struct stat info;
        char target[PATH_MAX] = "";
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%s/%s", name, e->d_name);
        if (lstat(inner, &info)) continue; // gone since
        char kind = kind_of_file(&info);
        int of = all ? id_new(info.st_ino) : id_of(info.st_ino);
        if (of < 0) broken("nobody was seen making", inner);
        if (kind == 'l' && readlink(inner, target, sizeof target - 1) < 0) broken("cannot read", inner);
        sys_write(to, line, (size_t)snprintf(line, sizeof line, "%d %c %s\t%s\n", of, kind, e->d_name, target), path);
        if (all && kind == 'd') keep_names(of, inner, 1);
        if (all && kind == 'f') keep_data(of, inner);
    }
    closedir(d);
    syscall(SYS_close, to);
}

// ---------------------------------------------------------------- counting, and dying
static void begin(const char *at) {
    char path[LONG_PATH];
    pthread_mutexattr_t shared;
    struct stat info;
    if (!getenv("CRASH_STATE") || !realpath(at, root) || !realpath(getenv("CRASH_STATE"), folder))
        broken("cannot find CRASH_ROOT or CRASH_STATE", at);
    snprintf(path, sizeof path, "%s/shared", folder);
    int fd = sys_open(AT_FDCWD, path, O_RDWR | O_CREAT);
    if (fd < 0 || flock(fd, LOCK_EX) || fstat(fd, &info)) broken("cannot open", path);
    int first = info.st_size == 0;
    if (first && syscall(SYS_ftruncate, fd, sizeof(State))) broken("cannot make", path);
    State *s = (State *)mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) broken("cannot map", path);
    state = s;
    if (first) {
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&state->lock, &shared);
        state->die_at = getenv("CRASH_AT") ? atoll(getenv("CRASH_AT")) : 0;
        state->fail_at = getenv("ERROR_AT") ? atoll(getenv("ERROR_AT")) : 0;
        if (stat(root, &info)) broken("cannot find", root);
        keep_names(id_new(info.st_ino), root, 1); // what was there before the first process came lasts
    }
    if (state->processes == MAX_PROCESSES) broken("more processes than it has room for", root);
    state->process[state->processes++] = getpid();
    flock(fd, LOCK_UN);
    syscall(SYS_close, fd);
}

__attribute__((constructor)) static void preloaded(void) {
    if (getenv("CRASH_ROOT")) begin(getenv("CRASH_ROOT"));
}

static void die(void) {
    state->dead = 1;
    for (int i = 0; i < state->processes; i++)
        if (state->process[i] != getpid()) kill(state->process[i], SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* A counted call starts: until leave() no other does. 0: it fails; of a machine that is off (a process that outlived
 * the others asks), all do. `last`: all are to die. */
static int enter(const char *call, const char *path, int *last) {
    char line[3 * LONG_PATH], name[LONG_PATH];
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) pthread_mutex_consistent(&state->lock);
    if (state->dead) {
        pthread_mutex_unlock(&state->lock);
        errno = EIO;
        return 0;
    }
    *last = ++state->calls == state->die_at;
    snprintf(name, sizeof name, "%s/calls", folder);
    int log = sys_open(AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND);
    if (log < 0) broken("cannot open", name);
    sys_write(log, line,
              (size_t)snprintf(line, sizeof line, "%ld %s %s\n", (long)state->calls, call, path + strlen(root)), name);
    syscall(SYS_close, log);
    if (state->calls != state->fail_at) return 1;
    pthread_mutex_unlock(&state->lock);
    errno = EIO;
    return 0;
}

static void leave(void) { pthread_mutex_unlock(&state->lock); }

static int inside(const char *path) {
    size_t n = strlen(root);
    return !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

/* Is what is open as `fd` under the root? Its path now, whatever it was opened as. */
static int fd_inside(int fd, char *path) {
    char link[64];
    if (!state) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return inside(path);
}

/* Is the name `path` under the root? Its directory is resolved, the name itself is not. */
static int path_inside(int at, const char *path, char *whole) {
    char parent[PATH_MAX];
    if (!state || !path) return 0;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t start = n;
    while (start && path[start - 1] != '/') start--;
    if (n >= PATH_MAX) return 0;
    snprintf(parent, sizeof parent, "%.*s", start ? (int)start : 1, start ? path : ".");
    int fd = sys_open(at, parent, O_PATH | O_DIRECTORY);
    if (fd < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
    syscall(SYS_close, fd);
    if (length < 0) return 0;
    snprintf(whole + length, PATH_MAX - (size_t)length, "/%.*s", (int)(n - start), path + start);
    return inside(whole);
}

static void made(const char *path) {
    struct stat info;
    if (lstat(path, &info)) broken("cannot find what was made", path);
    id_new(info.st_ino);
}

/* System call `number`, counted where `ours`. `makes`: the name that it makes, if it did not exist. */
static long counted(int ours, const char *name, const char *path, const char *makes, long number, long a, long b,
                    long c, long d, long e) {
    struct stat info;
    int last;
    if (!ours) return syscall(number, a, b, c, d, e);
    if (!enter(name, path, &last)) return -1;
    if (last) die();
    int existed = !makes || !lstat(makes, &info);
    long result = syscall(number, a, b, c, d, e);
    int error = errno;
    if (result >= 0 && !existed) made(makes);
    leave();
    errno = error;
    return result;
}

// ---------------------------------------------------------------- the calls
static int opened(int at, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    int ours = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE && path_inside(at, path, whole);
    return (int)counted(ours, "open", whole, whole, SYS_openat, at, (long)path, flags, (long)mode, 0);
}
static mode_t mode_of(int flags, va_list more) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(more, int) : 0;
}
#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list m;                                                                                                     \
        va_start(m, flags);                                                                                            \
        mode_t mode = mode_of(flags, m);                                                                               \
        va_end(m);                                                                                                     \
        return opened(AT_FDCWD, path, flags, mode);                                                                    \
    }
#define OPENAT(name)                                                                                                   \
    int name(int at, const char *path, int flags, ...) {                                                               \
        va_list m;                                                                                                     \
        va_start(m, flags);                                                                                            \
        mode_t mode = mode_of(flags, m);                                                                               \
        va_end(m);                                                                                                     \
        return opened(at, path, flags, mode);                                                                          \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) int creat(const char *path, mode_t mode) {
    return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* A write of n bytes; the last call writes half of them. */
static ssize_t written(const char *name, int fd, long number, const void *data, size_t n, off_t at) {
    char path[PATH_MAX];
    int last;
    if (!fd_inside(fd, path)) return syscall(number, fd, data, n, at);
    if (!enter(name, path, &last)) return -1;
    ssize_t wrote = syscall(number, fd, data, last ? n / 2 : n, at);
    int error = errno;
    if (last) die();
    leave();
    errno = error;
    return wrote;
}
ssize_t write(int fd, const void *data, size_t n) { return written("write", fd, SYS_write, data, n, 0); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    return written("pwrite", fd, SYS_pwrite64, data, n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return pwrite(fd, data, n, at); }
ssize_t writev(int fd, const struct iovec *parts,
               int count) { // to the root's files in as many calls as parts: short writes are allowed
    char path[PATH_MAX];
    return fd_inside(fd, path) && count ? write(fd, parts[0].iov_base, parts[0].iov_len)
                                        : syscall(SYS_writev, fd, parts, count);
}

static int synced(const char *name, int fd, long number) {
    char path[PATH_MAX];
    struct stat info;
    int last;
    if (!fd_inside(fd, path)) return (int)syscall(number, fd);
    if (fstat(fd, &info)) return -1;
    if (!enter(name, path, &last)) return -1;
    if (last) die();
    int id = id_of(info.st_ino);
    if (id < 0) broken("nobody was seen making", path);
    snprintf(path, sizeof path, "/proc/self/fd/%d",
             fd); // also a file that has no name any more, or may be written only
    if (S_ISDIR(info.st_mode)) keep_names(id, path, 0);
    else keep_data(id, path);
    leave();
    return 0;
}
int fsync(int fd) { return synced("fsync", fd, SYS_fsync); }
int fdatasync(int fd) { return synced("fdatasync", fd, SYS_fdatasync); }

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    char whole[PATH_MAX], whole_to[PATH_MAX], both[2 * PATH_MAX];
    int ours = path_inside(at, from, whole) | path_inside(to_at, to, whole_to);
    if (ours) snprintf(both, sizeof both, "%s to %s", whole, whole_to + strlen(root));
    return (int)counted(ours, "rename", both, NULL, SYS_renameat2, at, (long)from, to_at, (long)to, flags);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int to_at, const char *to) { return renameat2(at, from, to_at, to, 0); }

int linkat(int at, const char *from, int to_at, const char *to, int flags) {
    char whole[PATH_MAX];
    return (int)counted(path_inside(to_at, to, whole), "link", whole, NULL, SYS_linkat, at, (long)from, to_at, (long)to,
                        flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlinkat(const char *target, int at, const char *path) {
    char whole[PATH_MAX];
    return (int)counted(path_inside(at, path, whole), "symlink", whole, whole, SYS_symlinkat, (long)target, at,
                        (long)path, 0, 0);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

int unlinkat(int at, const char *path, int flags) {
    char whole[PATH_MAX];
    return (int)counted(path_inside(at, path, whole), flags & AT_REMOVEDIR ? "rmdir" : "unlink", whole, NULL,
                        SYS_unlinkat, at, (long)path, flags, 0, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    struct stat info;
    return unlinkat(AT_FDCWD, path, !lstat(path, &info) && S_ISDIR(info.st_mode) ? AT_REMOVEDIR : 0);
}

int mkdirat(int at, const char *path, mode_t mode) {
    char whole[PATH_MAX];
    return (int)counted(path_inside(at, path, whole), "mkdir", whole, whole, SYS_mkdirat, at, (long)path, (long)mode, 0,
                        0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    return (int)counted(fd_inside(fd, path), "ftruncate", path, NULL, SYS_ftruncate, fd, size, 0, 0, 0);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    char path[PATH_MAX];
    return (int)counted(path_inside(AT_FDCWD, name, path), "truncate", path, NULL, SYS_truncate, (long)name, size, 0, 0,
                        0);
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
    char path[PATH_MAX];
    return (int)counted(fd_inside(fd, path), "fallocate", path, NULL, SYS_fallocate, fd, mode, at, size, 0);
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return fallocate(fd, 0, at, size) ? errno : 0; }
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }

static FILE *opened_stream(const char *symbol, const char *path, const char *mode) {
    FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, symbol);
    char whole[PATH_MAX];
    struct stat info;
    int last;
    if (mode[0] == 'r' || !path_inside(AT_FDCWD, path, whole)) return real(path, mode);
    if (!enter("fopen", whole, &last)) return NULL;
    if (last) die();
    int existed = !lstat(whole, &info);
    FILE *f = real(path, mode);
    int error = errno;
    if (f && !existed) made(whole);
    leave();
    errno = error;
    return f;
}
FILE *fopen(const char *path, const char *mode) { return opened_stream("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return opened_stream("fopen64", path, mode); }

/* fflush and fclose of a stream that may write. */
static int flushed(const char *symbol, FILE *f) {
    int (*real)(FILE *) = (int (*)(FILE *))dlsym(RTLD_NEXT, symbol);
    char path[PATH_MAX];
    int last;
    if (!f || fileno(f) < 0 || (fcntl(fileno(f), F_GETFL) & O_ACCMODE) == O_RDONLY || !fd_inside(fileno(f), path))
        return real(f);
    if (!enter(symbol, path, &last)) {
        if (!strcmp(symbol, "fclose")) real(f);
        errno = EIO;
        return EOF;
    }
    if (last) die();
    int result = real(f), error = errno;
    leave();
    errno = error;
    return result;
}
int fflush(FILE *f) { return flushed("fflush", f); }
int fclose(FILE *f) { return flushed("fclose", f); }

#else
// ---------------------------------------------------------------- rebuild STATE ROOT DEST NAMES DATA [SEED]
/* What a disk may hold after the crash. Names: as synced; all that there were (a journal wrote them by itself); mixed,
 * each by SEED. Bytes that were not synced: empty (the file is as it was synced); half, they are there up to half of
 * the file, behind it is what was synced; zeros, the file is as long as it was, with zeros. */
typedef struct {
    int id;
    char kind;
    char name[256], target[PATH_MAX];
} Entry;
typedef struct {
    Entry *entries;
    int count;
} Names;
static char *now_at[MAX_INODES]; // the path of an inode at the crash; NULL: it has none
static const char *names_mode, *data_mode;
static uint64_t seed;

static void add(Names *n, const Entry *e) {
    n->entries = (Entry *)realloc(n->entries, sizeof(Entry) * (size_t)(n->count + 1));
    if (!n->entries) broken("out of memory for", e->name);
    n->entries[n->count++] = *e;
}

static Names names_synced(int id) {
    Names n = {0};
    Entry e;
    char path[LONG_PATH], line[2 * LONG_PATH];
    FILE *f = fopen(state_path(path, id, "names"), "r");
    while (f && fgets(line, sizeof line, f)) { // none: never synced, nothing in it lasts
        int at;
        char *tab = strchr(line, '\t');
        if (!tab || sscanf(line, "%d %c %n", &e.id, &e.kind, &at) != 2) broken("cannot understand", path);
        snprintf(e.name, sizeof e.name, "%.*s", (int)(tab - line) - at, line + at);
        snprintf(e.target, sizeof e.target, "%.*s", (int)strcspn(tab + 1, "\n"), tab + 1);
        add(&n, &e);
    }
    if (f) fclose(f);
    return n;
}

static Names names_now(const char *path) {
    Names n = {0};
    DIR *d = path ? opendir(path) : NULL;
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        char inner[LONG_PATH];
        struct stat info;
        Entry entry = {0};
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%s/%s", path, e->d_name);
        if (lstat(inner, &info)) broken("cannot find", inner);
        entry.id = id_of(info.st_ino);
        if (entry.id < 0) broken("nobody was seen making", inner);
        entry.kind = kind_of_file(&info);
        snprintf(entry.name, sizeof entry.name, "%s", e->d_name);
        if (entry.kind == 'l' && readlink(inner, entry.target, sizeof entry.target - 1) < 0)
            broken("cannot read", inner);
        add(&n, &entry);
    }
    if (d) closedir(d);
    return n;
}

static void find_all(const char *path) { // where each inode is now
    Names n = names_now(path);
    for (int i = 0; i < n.count; i++) {
        char inner[LONG_PATH];
        snprintf(inner, sizeof inner, "%s/%s", path, n.entries[i].name);
        now_at[n.entries[i].id] = strdup(inner);
        if (n.entries[i].kind == 'd') find_all(inner);
    }
    free(n.entries);
}

static uint64_t hash(uint64_t h, const char *text) { // FNV-1a
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h ^ h >> 29;
}

static char *bytes_of(const char *path, size_t *size) { // NULL: there is no such file
    struct stat info;
    FILE *f = path ? fopen(path, "r") : NULL;
    *size = 0;
    if (!f) return NULL;
    if (fstat(fileno(f), &info)) broken("cannot read", path);
    char *bytes = (char *)malloc((size_t)info.st_size + 1);
    if (!bytes || fread(bytes, 1, (size_t)info.st_size, f) != (size_t)info.st_size) broken("cannot read", path);
    *size = (size_t)info.st_size;
    fclose(f);
    return bytes;
}

static void build_file(int id, const char *to) {
    char path[LONG_PATH];
    size_t had = 0, has = 0;
    char *kept = bytes_of(state_path(path, id, "data"), &had), *now = bytes_of(now_at[id], &has);
    size_t size = has / 2 > had ? has / 2 : had;
    if (!strcmp(data_mode, "zeros")) size = has;
    if (!strcmp(data_mode, "empty") || !now) size = had;
    char *bytes = (char *)calloc(size + 1, 1);
    if (!bytes) broken("out of memory for", to);
    if (kept) memcpy(bytes, kept, had < size ? had : size);
    if (now && !strcmp(data_mode, "half")) memcpy(bytes, now, has / 2);
    FILE *f = fopen(to, "w");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f)) broken("cannot write", to);
    free(kept);
    free(now);
    free(bytes);
}

static void build_directory(int id, const char *to) {
    Names synced = names_synced(id), now = names_now(now_at[id]);
    if (mkdir(to, 0777)) broken("cannot make", to);
    for (int pass = 0; pass < 2; pass++) {
        const Names *names = pass ? &now : &synced;
        for (int i = 0; i < names->count; i++) {
            const Entry *e = &names->entries[i];
            char path[LONG_PATH];
            int of_now = !strcmp(names_mode, "all") ||
                         (!strcmp(names_mode, "mixed") && hash(seed * 0x9e3779b97f4a7c15u + (uint64_t)id, e->name) & 1);
            if (of_now != pass) continue; // this name is as the other list has it, or not there
            snprintf(path, sizeof path, "%s/%s", to, e->name);
            if (e->kind == 'd') build_directory(e->id, path);
            else if (e->kind == 'f') build_file(e->id, path);
            else if (symlink(e->target, path)) broken("cannot make", path);
        }
    }
    free(synced.entries);
    free(now.entries);
}

static int rebuild(char **arg) {
    char path[LONG_PATH];
    snprintf(folder, sizeof folder, "%s", arg[0]);
    snprintf(path, sizeof path, "%s/shared", folder);
    int fd = open(path, O_RDONLY);
    State *s = fd < 0 ? (State *)MAP_FAILED : (State *)mmap(NULL, sizeof(State), PROT_READ, MAP_PRIVATE, fd, 0);
    if (s == MAP_FAILED) broken("cannot read", path);
    state = s;
    names_mode = arg[3];
    data_mode = arg[4];
    seed = arg[5] ? (uint64_t)atoll(arg[5]) : 0;
    now_at[0] = arg[1];
    find_all(arg[1]);
    build_directory(0, arg[2]);
    return 0;
}

// ---------------------------------------------------------------- save DIR HOW
/* A saver to try the library on: DIR/current is made again three times, each told on stdout once it should last. HOW:
 * in-place; rename, of a file that is not synced; file, which is synced and the directory is not; whole, as it should
 * be. */
static int save(const char *dir, const char *how) {
    char bytes[1000], path[LONG_PATH], temporary[LONG_PATH];
    snprintf(path, sizeof path, "%s/current", dir);
    snprintf(temporary, sizeof temporary, "%s/.saving", dir);
    for (int version = 1; version <= 3; version++) {
        int in_place = !strcmp(how, "in-place"), syncs = !strcmp(how, "file") || !strcmp(how, "whole");
        int fd = open(in_place ? path : temporary, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        memset(bytes, '0' + version, sizeof bytes);
        if (fd < 0 || write(fd, bytes, 500) != 500 || pwrite(fd, bytes + 500, 500, 500) != 500)
            broken("cannot write", dir);
        if ((syncs && fsync(fd)) || close(fd)) broken("cannot write", dir);
        if (!in_place && rename(temporary, path)) broken("cannot rename", temporary);
        int syncs_directory = !strcmp(how, "whole");
        if (syncs_directory) fd = open(dir, O_RDONLY | O_DIRECTORY);
        if (syncs_directory && (fd < 0 || fsync(fd) || close(fd))) broken("cannot sync", dir);
        dprintf(1, "saved %d\n", version);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc >= 7 && !strcmp(argv[1], "rebuild")) return rebuild(argv + 2);
    if (argc == 4 && !strcmp(argv[1], "save")) return save(argv[2], argv[3]);
    fprintf(stderr, "usage: crash_tool rebuild STATE ROOT DEST synced|all|mixed empty|half|zeros [SEED]; crash_tool "
                    "save DIR in-place|rename|file|whole\n");
    return 1;
}
#endif
