/* container.h: the CPU time and the memory that this process's control groups (cgroups, version 1 or 2) allow it.
 *
 * A container shows all cores and all memory of its host, but is throttled or killed beyond the limits of its groups.
 * A limit holds for a group and for all groups below it. Systems without control groups have no limits.
 */
#ifndef CONTAINER_H
#define CONTAINER_H
#include "base.h" // defines: min_i64, ZERO

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
        if (end == group + mount_length) return;
    }
}

/* Is `controller` one of "cpu,cpuacct"? */
static inline int names_controller(const char *list, const char *controller) {
    size_t n = strlen(controller);
    for (const char *at = list; *at; at += strspn(at, ",")) {
        size_t length = strcspn(at, ",\n");
        if (length == n && !strncmp(at, controller, n)) return 1;
        at += length;
        if (*at == '\n') return 0;
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
