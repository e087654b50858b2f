/* system.h: what only Linux has, and what is done instead on other POSIX systems (macOS, the BSDs).
 *
 * Every other file uses calls that all these systems have, or the functions below. -DONLY_POSIX builds the code for
 * other systems on Linux, so that tests can run it; glibc then hides the functions that need _GNU_SOURCE (kernel.h).
 */
#ifndef SYSTEM_H
#define SYSTEM_H
#include "kernel.h" // first: it chooses which calls the C library declares
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef LINUX
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#endif

// Flags that some systems lack. Without O_DIRECT, writes go through the page cache; without MAP_NORESERVE, reserved
// memory may count against the system's limit; without MADV_HUGEPAGE, large buffers have pages of the usual size.
#if !defined(LINUX) && !defined(O_DIRECT)
#define O_DIRECT 0
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif
#ifndef MADV_HUGEPAGE
#define MADV_HUGEPAGE MADV_NORMAL
#endif

// ---------------------------------------------------------------------------
// cores

/* The cores that a process may run on, as bits. Without Linux's call it may run on all of them. */
typedef struct {
    uint8_t bits[128];
} CoreSet;

static inline CoreSet core_set_of_process(void) {
    CoreSet set = ZERO;
#ifdef LINUX
    if (!sched_getaffinity(0, sizeof set, (cpu_set_t *)(void *)&set)) return set;
#endif
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (long i = 0; i < (cores < 1 ? 1 : cores) && i < 8 * (long)sizeof set; i++)
        set.bits[i / 8] = (uint8_t)(set.bits[i / 8] | 1u << i % 8);
    return set;
}

static inline int core_set_count(const CoreSet *set) {
    int count = 0;
    for (size_t i = 0; i < sizeof *set; i++) count += __builtin_popcount(set->bits[i]);
    return count;
}

/* Lets other threads of this machine go first. On other systems it does nothing: there, a priority is the process's. */
static inline void lower_priority_of_thread(void) {
#ifdef LINUX
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 10);
#endif
}

// ---------------------------------------------------------------------------
// memory and files

/* Is this directory on a tmpfs or ramfs? Offloading to files there saves no memory. Elsewhere than on Linux, 0. */
static inline int is_in_memory(const char *dir) {
#ifdef LINUX
    const uint32_t tmpfs = 0x01021994u, ramfs = 0x858458F6u; // from the kernel's magic.h
    struct statfs info;
    return !statfs(dir, &info) && ((uint32_t)info.f_type == tmpfs || (uint32_t)info.f_type == ramfs);
#else
    (void)dir;
    return 0;
#endif
}

/* Reserves bytes `from` to `from + bytes` of a file, which are written through a mapping: a full disk is reported here,
 * and not as a SIGBUS later. Returns 0 or errno. Where the system or the file system cannot reserve, zeros are written
 * beyond the file's end, and what lies before its end is not reserved. */
static inline int reserve_file(int fd, int64_t from, int64_t bytes) {
#ifdef LINUX
    int failed;
    do failed = posix_fallocate(fd, (off_t)from, (off_t)bytes);
    while (failed == EINTR);
    if (failed != EOPNOTSUPP && failed != EINVAL) return failed; // musl returns these where glibc writes zeros
#endif
    static const char zeros[1 << 16] = {0};
    off_t at = lseek(fd, 0, SEEK_END);
    while (at >= 0 && at < from + bytes) {
        int64_t left = from + bytes - at, part = left < (int64_t)sizeof zeros ? left : (int64_t)sizeof zeros;
        ssize_t wrote = pwrite(fd, zeros, (size_t)part, at);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return wrote ? errno : EIO;
        at += wrote;
    }
    return at < 0 ? errno : 0;
}

/* Takes disk space for a new file, where the system and the file system can. Returns 0 or errno. */
static inline int reserve_blocks(int fd, int64_t bytes) {
#ifdef LINUX
    return fallocate(fd, 0, 0, (off_t)bytes) ? errno : 0;
#else
    (void)fd;
    (void)bytes;
    return 0;
#endif
}

/* Drops a part of a file from the page cache, and reads the next part of the same length ahead. */
static inline void file_advance(int fd, int64_t at, int64_t bytes) {
#ifdef LINUX
    posix_fadvise(fd, (off_t)at, (off_t)bytes, POSIX_FADV_DONTNEED);
    posix_fadvise(fd, (off_t)(at + bytes), (off_t)bytes, POSIX_FADV_WILLNEED);
#else
    (void)fd;
    (void)at;
    (void)bytes;
#endif
}

// ---------------------------------------------------------------------------
// waiting until a moment

/* The clock for deadlines that are passed to pthread_cond_timedwait, for a variable from cond_init_timed. It is
 * monotonic, so that setting the wall clock does not move a deadline; macOS has only the wall clock for this. */
#if defined(__APPLE__) || defined(ONLY_POSIX)
#define COND_CLOCK CLOCK_REALTIME
#else
#define COND_CLOCK CLOCK_MONOTONIC
#endif

static inline void cond_init_timed(pthread_cond_t *changed) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, COND_CLOCK);
#endif
    pthread_cond_init(changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

// ---------------------------------------------------------------------------
// control groups (cgroups, version 1 or 2)

/* The CPU time and the memory that its control groups allow this process. A container shows all cores and all memory of
 * its host, but is throttled or killed beyond these limits. A limit holds for a group and for all groups below it.
 * Systems without control groups have no limits. */
typedef struct {
    double cpus;   // CPU seconds per second; INFINITY: no limit
    double memory; // bytes that are still free; INFINITY: no limit
} ContainerLimits;

/* Reads a file of a control group. Returns 0 if it has none of this name. */
static inline int group_file(char text[4096], const char *group, const char *name) {
    char path[8192];
    if (snprintf(path, sizeof path, "%s/%s", group, name) >= (int)sizeof path) return 0;
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    text[fread(text, 1, 4095, f)] = 0;
    fclose(f);
    return 1;
}

/* The number in a file of a group, or behind `word` in one that lists numbers by name; INFINITY: none ("max"). */
static inline double group_number(const char *group, const char *name, const char *word) {
    char text[4096];
    double x = INFINITY;
    if (!group_file(text, group, name)) return INFINITY;
    const char *at = word ? strstr(text, word) : text;
    if (!at || sscanf(at + (word ? strlen(word) : 0), "%lf", &x) != 1) return INFINITY;
    return x;
}

/* Takes the limits of one group into account. */
static inline void apply_group(ContainerLimits *limits, const char *group) {
    char text[4096];
    double quota = INFINITY, period = INFINITY;
    if (!group_file(text, group, "cpu.max") || sscanf(text, "%lf %lf", &quota, &period) != 2) { // version 1, or "max"
        quota = group_number(group, "cpu.cfs_quota_us", NULL);
        period = group_number(group, "cpu.cfs_period_us", NULL);
    }
    if (quota > 0 && isfinite(quota) && isfinite(period)) limits->cpus = fmin(limits->cpus, quota / period);
    double bytes = group_number(group, "memory.max", NULL);
    double used = group_number(group, "memory.stat", "anon "); // what cannot be dropped like the page cache
    if (!isfinite(bytes)) {
        bytes = group_number(group, "memory.limit_in_bytes", NULL);
        used = group_number(group, "memory.stat", "total_rss ");
    }
    if (isfinite(bytes)) limits->memory = fmin(limits->memory, fmax(0, bytes - (isfinite(used) ? used : 0)));
}

/* Takes a hierarchy into account: the group `path` below `mount`, and all above it. */
static inline void apply_groups(ContainerLimits *limits, const char *mount, const char *path) {
    char group[8192];
    int mount_length = (int)strlen(mount);
    snprintf(group, sizeof group, "%s%s", mount, path);
    for (char *end = group + strlen(group); end && end >= group + mount_length; end = strrchr(group, '/')) {
        *end = 0;
        apply_group(limits, group);
    }
}

/* Is `controller` one of "cpu,cpuacct"? */
static inline int names_controller(const char *list, const char *controller) {
    while (*list && *list != '\n') {
        size_t length = strcspn(list, ",\n");
        if (length == strlen(controller) && !strncmp(list, controller, length)) return 1;
        list += length + (list[length] == ',');
    }
    return 0;
}

/* The group of this process in a hierarchy, as `groups` (/proc/self/cgroup) lists it: lines of number:controllers:path.
 * `controller` "": the hierarchy of version 2. Returns 0 if there is none. */
static inline int find_group(char path[4096], const char *groups, const char *controller) {
    char line[8192];
    int found = 0;
    FILE *f = fopen(groups, "r");
    while (f && !found && fgets(line, sizeof line, f)) {
        char *list = strchr(line, ':'), *at = list ? strchr(list + 1, ':') : NULL;
        if (!at) continue;
        *at = 0; // ends the list of controllers
        found = *controller ? names_controller(list + 1, controller) : !list[1];
        if (found) snprintf(path, 4096, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
    }
    if (f) fclose(f);
    return found;
}

/* The limits that hold for this process. `groups` and `mounts` are /proc/self/cgroup and /proc/self/mountinfo. */
static inline ContainerLimits container_limits_of(const char *groups, const char *mounts) {
    static const char *const controllers[] = {"cpu", "memory"};
    ContainerLimits limits = {INFINITY, INFINITY};
    char line[8192], root[4096], mount[4096], type[64], options[4096], path[4096];
    FILE *f = fopen(mounts, "r");
    while (f && fgets(line, sizeof line, f)) {
        const char *after = strstr(line, " - "); // optional fields end there
        if (!after || sscanf(line, "%*s %*s %*s %4095s %4095s", root, mount) != 2) continue;
        if (sscanf(after, " - %63s %*s %4095s", type, options) != 2) continue;
        int is_newer = !strcmp(type, "cgroup2");
        if (!is_newer && strcmp(type, "cgroup")) continue;
        for (int i = 0; i < (is_newer ? 1 : 2); i++) {
            if (!is_newer && !names_controller(options, controllers[i])) continue;
            if (!find_group(path, groups, is_newer ? "" : controllers[i])) continue;
            // a container may see only its own part of the hierarchy, and the path from the host's root
            size_t skip = strcmp(root, "/") && !strncmp(path, root, strlen(root)) ? strlen(root) : 0;
            apply_groups(&limits, mount, strcmp(path + skip, "/") ? path + skip : "");
        }
    }
    if (f) fclose(f);
    return limits;
}

static inline ContainerLimits container_limits(void) {
    return container_limits_of("/proc/self/cgroup", "/proc/self/mountinfo");
}

#endif
