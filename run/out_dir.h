/* out_dir.h: the directory under --out, and writing files so that they survive a crash.
 *
 * A caller may rely on: one run at a time owns --out; a file or directory that these functions made is on the disk when
 * they return; nothing that another run left is overwritten.
 */
#ifndef OUT_DIR_H
#define OUT_DIR_H
#include "../lib/device.h" // defines: user_error, min_i64, max_i64, read_file
#include <dirent.h>
#include <sys/file.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// files and directories that survive a crash

static void write_all(int fd, const char *path, const void *data, size_t n, int64_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t wrote = pwrite(fd, (const char *)data + done, n - done, at + (int64_t)done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) user_error("cannot write %s: %s", path, strerror(wrote ? errno : EIO));
        done += (size_t)wrote;
    }
}

static void sync_directory(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd)) user_error("cannot write directory %s to disk: %s", path, strerror(errno));
    close(fd);
}

/* A small file, new and on the disk. */
static void write_new_file(const char *dir, const char *name, const void *text, size_t length) {
    char path[4096 + 128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) user_error("cannot make %s: %s", path, strerror(errno));
    write_all(fd, path, text, length, 0);
    if (fsync(fd) || close(fd)) user_error("cannot write %s: %s", path, strerror(errno));
}

/* Makes every folder of `path`, as mkdir -p does, and writes its name to disk. 0 or errno. */
static int make_directories(const char *path) {
    char part[4096 + 4];
    for (size_t i = 1; i <= strlen(path) && i < 4096; i++) {
        if (path[i] != '/' && path[i]) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) == 0) {
            strcpy(part + i, "/..");
            int above = open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                failed = above >= 0 && fsync(above) ? errno : 0; // one that may not be read is not this user's
            if (above >= 0) close(above);
            if (failed) return failed;
        } else if (errno != EEXIST) return errno;
    }
    struct stat info;
    if (stat(path, &info)) return errno;
    return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

/* Removes a directory of files; what cannot be removed stays. */
static void remove_directory(const char *dir) {
    char path[4096 + 300];
    struct dirent *item;
    DIR *d = opendir(dir);
    while (d && (item = readdir(d))) {
        snprintf(path, sizeof path, "%s/%s", dir, item->d_name);
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, "..")) unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}
// ---------------------------------------------------------------------------
// the directory under --out: one run at a time, and the checkpoints in it

#define SAVING ".saving-"     // a checkpoint that is being written, and …
#define DELETING ".deleting-" // … one that is being removed: of a run that died, both are rubbish
enum { STEP_DIGITS = 8 };

/* The step of a checkpoint's name, step-NNNNNNNN; -1: it is no such name. */
static int64_t step_from_name(const char *name) {
    size_t digits = strlen(name) - 5;
    if (strncmp(name, "step-", 5) || digits < STEP_DIGITS || digits > 15 || strspn(name + 5, "0123456789") != digits)
        return -1;
    return strtoll(name + 5, NULL, 10);
}
static void checkpoint_path(char *path, size_t size, const char *out, int64_t step) {
    snprintf(path, size, "%s/step-%0*" PRId64, out, STEP_DIGITS, step);
}

/* The newest checkpoint in `out` before step `below`; -1: there is none. */
static int64_t newest_checkpoint(const char *out, int64_t below, int *count) {
    int64_t newest = -1;
    struct dirent *item;
    DIR *d = opendir(out);
    *count = 0;
    while (d && (item = readdir(d))) {
        int64_t step = step_from_name(item->d_name);
        if (step >= 0) ++*count;
        if (step < below) newest = max_i64(newest, step);
    }
    if (d) closedir(d);
    return newest;
}

/* `latest` points to a checkpoint: by a new link, renamed over the old one. */
static void update_latest_link(const char *out, int64_t step) {
    char link[4096 + 32], fresh[4096 + 32], target[64], now[64] = "";
    snprintf(target, sizeof target, "step-%0*" PRId64, STEP_DIGITS, step);
    snprintf(link, sizeof link, "%s/latest", out);
    snprintf(fresh, sizeof fresh, "%s/" SAVING "latest", out);
    if (readlink(link, now, sizeof now - 1) > 0 && !strcmp(now, target)) return;
    unlink(fresh);
    if (symlink(target, fresh) || rename(fresh, link)) user_error("cannot make %s: %s", link, strerror(errno));
    sync_directory(out);
}

static void remove_leftovers(const char *out) {
    char path[4096 + 300];
    struct dirent *item;
    DIR *d = opendir(out);
    while (d && (item = readdir(d))) {
        if (strncmp(item->d_name, SAVING, strlen(SAVING)) && strncmp(item->d_name, DELETING, strlen(DELETING)))
            continue;
        snprintf(path, sizeof path, "%s/%s", out, item->d_name);
        if (unlink(path)) remove_directory(path);
    }
    if (d) closedir(d);
}

/* Removes the oldest checkpoints but `keep`; 0: none. First by name, so that none is ever there in part. */
static void remove_old_checkpoints(const char *out, int keep) {
    char path[4096], gone[4096 + 32];
    int count;
    int64_t step = INT64_MAX;
    for (int i = 0; keep && (step = newest_checkpoint(out, step, &count)) >= 0; i++) {
        if (i < keep) continue;
        checkpoint_path(path, sizeof path, out, step);
        snprintf(gone, sizeof gone, "%s/" DELETING "%" PRId64, out, step);
        remove_directory(gone);
        if (rename(path, gone)) user_error("cannot remove the checkpoint %s: %s", path, strerror(errno));
        sync_directory(out);
        remove_directory(gone);
    }
}

/* Drops the lines of steps after `step` from a file of lines {"step":N,…}, and a last line without an end. */
static void truncate_after_step(const char *out, const char *name, int64_t step) {
    char path[4096], line[64], *at;
    snprintf(path, sizeof path, "%s/%s", out, name);
    size_t length;
    char *text = read_file(path, &length), *end = NULL;
    if (!text) return; // of a run that died before its first step
    for (at = text; at < text + length; at = end + 1) {
        end = (char *)memchr(at, '\n', (size_t)(text + length - at));
        if (!end) break;
        snprintf(line, sizeof line, "%.40s", at);
        const char *number = strstr(line, "\"step\":");
        if (number && strtoll(number + 7, NULL, 10) > step) break;
    }
    if (at < text + length && truncate(path, at - text))
        user_error("cannot cut %s back to step %" PRId64 ": %s", path, step, strerror(errno));
    free(text);
}

/* Claims --out for this run and makes it ready. `from`: the directory of the checkpoint it goes on from; "": it begins.
 * `resumes`: it may hold this run's earlier part. Returns the lock, which lasts as long as the process. */
static int out_directory_open(const char *out, const char *from, int64_t step, int resumes, int keep) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "config.txt",
                                        "layout.json",   "plan.json",     "ledger.json"};
    char path[4096], real[4096], parent[4096];
    int failed = make_directories(out), holds = 0, count;
    if (failed) user_error("cannot make --out %s: %s", out, strerror(failed));
    snprintf(path, sizeof path, "%s/lock", out);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0) user_error("cannot write into --out %s: %s", out, strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB))
        user_error(
            "--out %s: another run writes there now (it holds %s): choose another directory, or wait for its end", out,
            path);
    int64_t newest = newest_checkpoint(out, INT64_MAX, &count);
    for (int i = 0; i < (int)(sizeof names / sizeof *names) && !holds; i++) {
        snprintf(path, sizeof path, "%s/%s", out, names[i]);
        if (!access(path, F_OK)) holds = i + 1;
    }
    int same = resumes && (!from[0] || (realpath(from, real) && (*strrchr(real, '/') = 0, realpath(out, parent)) &&
                                        !strcmp(real, parent)));
    if ((holds || count) && !same)
        user_error("--out %s already holds a run (%s): choose another directory, remove that one, or go on from it "
                   "with --resume auto",
                   out, count ? "checkpoints" : names[holds - 1]);
    if (newest > step)
        user_error("--out %s holds step-%0*" PRId64 ", later than step %" PRId64
                   " of %s: remove it, choose another --out, or go on from it with --resume auto",
                   out, STEP_DIGITS, newest, step, from);
    remove_leftovers(out);
    if (newest >= 0) update_latest_link(out, newest);
    remove_old_checkpoints(out, keep); // a run that died may have had no time to
    truncate_after_step(out, "metrics.jsonl", step);
    truncate_after_step(out, "samples.jsonl", step);
    return lock;
}

#endif
