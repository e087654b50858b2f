/* output.h: results on standard output. Whoever prints a result calls finish_results before exit code 0, so that a full
 * disk or a closed stream never looks like success. Progress lines of a training run are not results: when they cannot
 * be written, note_lost_progress says so once, and training continues.
 */
#ifndef OUTPUT_H
#define OUTPUT_H
#include "../device/base.h" // defines: user_error; includes the headers of POSIX
#include <signal.h>

/* Called first in main. A file that exceeds the size limit becomes an error like any other. Standard streams that were
 * closed when the program started are occupied: the next file it opens would take their number, and what is printed
 * would end up in that file. Writing to them still fails. */
static inline void output_prepare(void) {
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) // open takes the lowest number that is free
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/* `error`: errno of the write that failed; 0: an earlier one failed, and errno has changed since. */
__attribute__((noreturn)) static inline void results_lost(int error) {
    const char *reason = error ? strerror(error) : "an earlier write failed";
    if (error == EBADF) reason = "it is closed";
    user_error("standard output cannot be written: %s; what was printed is incomplete: free space there, or send the "
               "output elsewhere",
               reason);
}

/* Ends the run if the last write to standard output failed. Called directly after it, while errno has the reason. */
static inline void check_results(void) {
    if (ferror(stdout)) results_lost(errno);
}

/* Writes out what has been printed so far, or ends the run. */
static inline void flush_results(void) {
    int error = fflush(stdout) ? errno : 0;
    if (error || ferror(stdout)) results_lost(error);
}

/* Writes out what has been printed, before exit code 0. Some file systems, such as NFS, report a full disk only when a
 * file is closed. */
static inline void finish_results(void) {
    flush_results();
    int copy = dup(STDOUT_FILENO);
    if (copy >= 0 && close(copy)) results_lost(errno);
}

/* Says once that progress lines could not be written. Only one thread calls it. */
static inline void note_lost_progress(void) {
    static int noted;
    if (!fflush(stdout) && !ferror(stdout)) return;
    if (!noted)
        fprintf(stderr, "note: standard output is full or closed: progress lines are lost, and training continues\n");
    noted = 1;
    clearerr(stdout);
}

// ---------------------------------------------------------------------------
// files in an output directory

/* Opens `name` in the directory `out`, or the run ends. */
static inline FILE *out_file_open(const char *out, const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", out, name);
    FILE *f = fopen(path, mode);
    if (!f || fseek(f, 0, SEEK_END)) user_error("cannot write %s: %s", path, strerror(errno));
    return f; // ftell must give the size: without fseek, musl gives 0 for a file opened to append
}
static inline FILE *out_file_create(const char *out, const char *name) { return out_file_open(out, name, "w"); }

#endif
