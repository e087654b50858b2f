/* out_dir.h: the directory of --out, and file operations that survive a crash.
 *
 * A caller may rely on: one run at a time owns --out; a file or directory that these functions create is on disk when
 * they return; files of other runs are never overwritten. On a file system that lacks locks, symbolic links or syncing
 * directories, a note says which of this no longer holds.
 */
#ifndef OUT_DIR_H
#define OUT_DIR_H
#include "../../lib/device/device.h" // defines: user_error, min_i64, max_i64, read_file
#include <dirent.h>
#include <sys/file.h>

// ---------------------------------------------------------------------------
// file operations that survive a crash

/* Writes n bytes at offset `at` of a file. Returns 0 or errno. */
static int write_bytes(int fd, const void *data, size_t n, int64_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t wrote = pwrite(fd, (const char *)data + done, n - done, at + (int64_t)done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return wrote ? errno : EIO;
        done += (size_t)wrote;
    }
    return 0;
}

/* Writes n bytes like write_bytes; if that fails, ends the program with an error that names `path`. */
static void write_all(int fd, const char *path, const void *data, size_t n, int64_t at) {
    int failed = write_bytes(fd, data, n, at);
    if (failed) user_error("cannot write %s: %s", path, strerror(failed));
}

/* Does this errno say that the file system lacks an operation, and not that the operation failed? */
static int is_unsupported(int error) {
    return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == ENOTTY || error == EPERM;
}

/* Makes the names of the files in a directory durable. Returns 0 or errno. */
static int sync_names(const char *path) {
    static int noted;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), failed = 0;
    if (fd < 0) return errno;
    if (fsync(fd)) failed = errno;
    close(fd);
    if (!is_unsupported(failed)) return failed;
    if (!noted)
        fprintf(stderr,
                "note: the file system of %s cannot sync directories (%s): a loss of power may take the "
                "newest files with it\n",
                path, strerror(failed));
    noted = 1;
    return 0;
}

static void sync_directory(const char *path) {
    int failed = sync_names(path);
    if (failed) user_error("cannot sync the directory %s to disk: %s", path, strerror(failed));
}

/* Gives a complete file its name, unless a file of that name has appeared meanwhile. Returns 0 or errno. */
static int publish_file(const char *temporary, const char *path) {
    if (!link(temporary, path)) return unlink(temporary) ? errno : 0;
    if (!is_unsupported(errno)) return errno;
    if (!access(path, F_OK)) return EEXIST; // without hard links, a file that is created from here on is overwritten
    return rename(temporary, path) ? errno : 0;
}

/* Creates a small file that must not exist yet, and waits until it is on disk. */
static void write_new_file(const char *dir, const char *name, const void *text, size_t length) {
    char path[4096 + 128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) user_error("cannot create %s: %s", path, strerror(errno));
    write_all(fd, path, text, length, 0);
    if (fsync(fd) || close(fd)) user_error("cannot write %s: %s", path, strerror(errno));
}

/* Creates a directory and its parents, as mkdir -p does, and syncs their names to disk. Returns 0 or errno. */
static int make_directories(const char *path) {
    char part[4096 + 4];
    for (size_t i = 1; i <= strlen(path) && i < 4096; i++) {
        if (path[i] != '/' && path[i]) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) == 0) {
            strcpy(part + i, "/..");
            int failed = sync_names(part);
            if (failed && failed != EACCES) return failed; // another user's directory cannot be opened
        } else if (errno != EEXIST) return errno;
    }
    struct stat info;
    if (stat(path, &info)) return errno;
    return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

/* Removes a directory and the files in it, as far as permissions allow. */
static void remove_directory(const char *dir) {
    char path[4096 + 300];
    DIR *d = opendir(dir);
    for (struct dirent *item = d ? readdir(d) : NULL; item; item = readdir(d)) {
        snprintf(path, sizeof path, "%s/%s", dir, item->d_name);
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, "..")) unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

// ---------------------------------------------------------------------------
// the checkpoints under --out, and the claim of one run on the directory

// Prefixes of checkpoints that are being written or removed. The next run deletes what a crashed run left of them.
#define SAVING ".saving-"
#define DELETING ".deleting-"
enum { STEP_DIGITS = 8 };

/* The step in a checkpoint's name, step-NNNNNNNN; -1 for any other name. If it has more than eight digits, the first is
 * not 0. */
static int64_t step_from_name(const char *name) {
    if (strncmp(name, "step-", 5)) return -1;
    size_t digits = strlen(name) - 5;
    int is_longer = digits > STEP_DIGITS && name[5] == '0';
    if (digits < STEP_DIGITS || digits > 15 || is_longer || strspn(name + 5, "0123456789") != digits) return -1;
    return strtoll(name + 5, NULL, 10);
}

static void checkpoint_path(char *path, size_t size, const char *out, int64_t step) {
    snprintf(path, size, "%s/step-%0*" PRId64, out, STEP_DIGITS, step);
}

/* Whether a directory has an entry or cannot be listed. */
static int has_entries(const char *dir) {
    DIR *d = opendir(dir);
    int found = !d;
    for (struct dirent *item = d ? readdir(d) : NULL; item && !found; item = readdir(d))
        found = strcmp(item->d_name, ".") && strcmp(item->d_name, "..");
    if (d) closedir(d);
    return found;
}

/* The step of the newest checkpoint in `out` before step `below`, or -1. An empty directory, which a save would
 * replace, is none; one whose files cannot be read counts, so that it is reported instead of passed over. */
static int64_t newest_checkpoint(const char *out, int64_t below) {
    char path[4096 + 300];
    int64_t newest = -1;
    DIR *d = opendir(out);
    if (!d && errno != ENOENT && errno != ENOTDIR)
        user_error("cannot look for checkpoints in %s: %s; make the directory readable", out, strerror(errno));
    for (struct dirent *item = d ? readdir(d) : NULL; item; item = readdir(d)) {
        int64_t step = step_from_name(item->d_name);
        if (step >= below || step <= newest) continue;
        snprintf(path, sizeof path, "%s/%s", out, item->d_name);
        if (has_entries(path)) newest = step;
    }
    if (d) closedir(d);
    return newest;
}

/* Points the link `latest` to a checkpoint: a new link is renamed over the old one, so that there always is one. */
static void update_latest_link(const char *out, int64_t step) {
    char link[4096 + 32], fresh[4096 + 32], target[64], now[64] = "";
    snprintf(target, sizeof target, "step-%0*" PRId64, STEP_DIGITS, step);
    snprintf(link, sizeof link, "%s/latest", out);
    snprintf(fresh, sizeof fresh, "%s/" SAVING "latest", out);
    if (readlink(link, now, sizeof now - 1) > 0 && !strcmp(now, target)) return;
    unlink(fresh);
    int failed = symlink(target, fresh) ? errno : 0;
    if (is_unsupported(failed)) {
        static int noted;
        if (!noted)
            fprintf(stderr,
                    "note: the file system of %s has no symbolic links (%s), so there is no %s; --resume auto "
                    "finds the newest checkpoint without it\n",
                    out, strerror(failed), link);
        noted = 1;
        return;
    }
    if (failed || rename(fresh, link))
        user_error("cannot create the link %s: %s", link, strerror(failed ? failed : errno));
    sync_directory(out);
}

/* Is it the name of a checkpoint that is being written or removed? Others that begin alike may be the user's. */
static int is_leftover(const char *name) {
    static const char digits[] = "0123456789", hexadecimal[] = "0123456789abcdef";
    if (!strcmp(name, SAVING "latest")) return 1;
    if (!strncmp(name, DELETING, strlen(DELETING))) {
        const char *step = name + strlen(DELETING);
        return *step && !step[strspn(step, digits)];
    }
    if (strncmp(name, SAVING "step-", strlen(SAVING "step-"))) return 0;
    const char *step = name + strlen(SAVING "step-"), *random = step + strspn(step, digits);
    return random > step && *random == '-' && strspn(random + 1, hexadecimal) == 16 && !random[17];
}

/* Removes checkpoints that a crashed run was writing or removing. */
static void remove_leftovers(const char *out) {
    char path[4096 + 300];
    DIR *d = opendir(out);
    for (struct dirent *item = d ? readdir(d) : NULL; item; item = readdir(d)) {
        if (!is_leftover(item->d_name)) continue;
        snprintf(path, sizeof path, "%s/%s", out, item->d_name);
        if (unlink(path)) remove_directory(path);
    }
    if (d) closedir(d);
}

/* Removes all but the newest `keep` checkpoints (0: keeps all) and the one of step `used`, which a command reads (-1:
 * none). Each is renamed first, so that no incomplete directory ever has a checkpoint's name. */
static void remove_old_checkpoints(const char *out, int keep, int64_t used) {
    char path[4096], renamed[4096 + 32];
    int64_t step = INT64_MAX;
    for (int i = 0; keep && step >= 0; i++) {
        step = newest_checkpoint(out, step);
        if (step < 0 || i < keep || step == used) continue;
        checkpoint_path(path, sizeof path, out, step);
        snprintf(renamed, sizeof renamed, "%s/" DELETING "%" PRId64, out, step);
        remove_directory(renamed);
        if (rename(path, renamed)) user_error("cannot remove the old checkpoint %s: %s", path, strerror(errno));
        sync_directory(out);
        remove_directory(renamed);
    }
}

/* Cuts a file of JSON lines, {"step":N,…}, off after step `step`, together with an incomplete last line. Lines
 * without a step, which describe the steps after them, are kept only if such a step is. */
static void truncate_after_step(const char *out, const char *name, int64_t step) {
    char path[4096], *line = NULL;
    size_t room = 0;
    ssize_t length;
    int64_t kept = 0, described = 0; // bytes up to the last step; and with the descriptions after it
    snprintf(path, sizeof path, "%s/%s", out, name);
    FILE *f = fopen(path, "r");
    if (!f) return; // the run crashed before its first step
    for (length = getline(&line, &room, f); length > 0; length = getline(&line, &room, f)) {
        const char *number = strstr(line, "\"step\":");
        if (line[length - 1] != '\n' || (number && strtoll(number + 7, NULL, 10) > step)) break;
        described += length;
        if (number) kept = described;
    }
    int is_to_cut = kept < described || length > 0;
    if (is_to_cut && truncate(path, kept))
        user_error("cannot truncate %s after step %" PRId64 ": %s", path, step, strerror(errno));
    fclose(f);
    free(line);
}

/* Takes the lock that only one run can hold; the kernel releases it when the process ends. Returns its descriptor. */
static int out_directory_lock(const char *out) {
    char path[4096];
    snprintf(path, sizeof path, "%s/lock", out);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0) user_error("cannot write to --out %s: %s", out, strerror(errno));
    if (!flock(lock, LOCK_EX | LOCK_NB)) return lock;
    if (errno == EWOULDBLOCK)
        user_error("--out %s is in use: another run holds %s; choose another directory, or wait until that run ends",
                   out, path);
    if (!is_unsupported(errno) && errno != ENOLCK) user_error("cannot lock %s: %s", path, strerror(errno));
    fprintf(stderr, "note: the file system of --out %s has no locks (%s): make sure that no other run writes there\n",
            out, strerror(errno));
    return lock;
}

/* The name of a file that shows that a run has used `out`; NULL: there is none. A run that failed before its first step
 * leaves an empty metrics.jsonl, and does not count. */
static const char *find_run_file(const char *out) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "config.txt",
                                        "layout.json",   "plan.json",     "ledger.json"};
    char path[4096];
    struct stat info;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        snprintf(path, sizeof path, "%s/%s", out, names[i]);
        if (!stat(path, &info)) return i || info.st_size ? names[i] : NULL;
    }
    return NULL;
}

/* Is the checkpoint `dir` one of those in `out`? */
static int is_checkpoint_of(const char *dir, const char *out) {
    char real_dir[4096], real_out[4096];
    if (!realpath(dir, real_dir) || !realpath(out, real_out)) return 0;
    *strrchr(real_dir, '/') = 0;
    return !strcmp(real_dir, real_out);
}

/* Claims --out for this run and prepares it. `from`: the checkpoint that the run resumes from ("": a new run), taken
 * after `step`. `resumes`: --resume was given. Returns the lock. */
static int out_directory_open(const char *out, const char *from, int64_t step, int resumes, int keep) {
    int failed = make_directories(out);
    if (failed) user_error("cannot create the directory --out %s: %s", out, strerror(failed));
    int lock = out_directory_lock(out);
    int64_t newest = newest_checkpoint(out, INT64_MAX);
    const char *file = newest >= 0 ? "checkpoints" : find_run_file(out);
    if (file && !(resumes && (!from[0] || is_checkpoint_of(from, out))))
        user_error("--out %s already holds a run (%s): choose another directory, remove this one, or continue the run "
                   "with --resume auto",
                   out, file);
    if (newest > step)
        user_error("--out %s holds step-%0*" PRId64 ", which is newer than %s (step %" PRId64
                   "): remove it, choose another --out, or resume from it with --resume auto",
                   out, STEP_DIGITS, newest, from, step);
    remove_leftovers(out);
    if (newest >= 0) update_latest_link(out, newest);
    remove_old_checkpoints(out, keep, -1); // a crash may have prevented it
    truncate_after_step(out, "metrics.jsonl", step);
    truncate_after_step(out, "samples.jsonl", step);
    return lock;
}

#endif
