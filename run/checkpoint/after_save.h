/* after_save.h: runs the command of --after-save for each checkpoint, on rank 0.
 *
 * Commands run while training continues, one at a time, in the order of the checkpoints. A caller may rely on: a
 * command that fails is reported and has no other effect; a command has its own process group and no open file of this
 * process, so that neither the launcher's signals reach it nor the launcher waits for it. The checkpoint of a running
 * command must not be removed: after_save_step returns its step.
 */
#ifndef AFTER_SAVE_H
#define AFTER_SAVE_H
#include "../setup/options.h" // defines: RunSettings
#include "out_dir.h"          // defines: checkpoint_path, remove_old_checkpoints
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

typedef struct AfterSave {
    const RunSettings *run; // its --after-save, --out and --keep
    pid_t process;          // runs the command for steps[started - 1]; 0: none runs
    int64_t *steps;         // (saved) steps of the checkpoints of this run
    int64_t saved, started;
} AfterSave;

/* The step of the checkpoint that a command is using; -1: none runs. */
static int64_t after_save_step(const AfterSave *a) { return a->process ? a->steps[a->started - 1] : -1; }

/* The environment without the variables of launchers: a command may start this program, which would otherwise try to
 * join this run, and dev/launch/supervise ends all processes that carry LLAMA3_RUN. Open MPI's settings (OMPI_MCA_) go,
 * too, because mpirun passes a rank's own among them. The array is allocated, its strings are not. */
static char **environment_without_launcher(void) {
    static const char *const prefixes[] = {"OMPI_COMM_", "OMPI_MCA_", "PMIX_", "PMI_", "SLURM_STEP_", "LLAMA3_RUN="};
    int64_t count = 0, kept = 0;
    while (environ[count]) count++;
    char **variables = new_array(char *, count + 1);
    for (int64_t i = 0; i < count; i++) {
        int is_launchers = 0;
        for (int k = 0; k < (int)(sizeof prefixes / sizeof *prefixes); k++)
            is_launchers |= !strncmp(environ[i], prefixes[k], strlen(prefixes[k]));
        if (!is_launchers) variables[kept++] = environ[i];
    }
    variables[kept] = NULL;
    return variables;
}

/* Starts sh with the command, "$1" = path, and OUT/after-save.log as its output. Returns 0 or errno. A fork would copy
 * the page tables of the whole model, and is unsafe while other threads compute; posix_spawn has neither problem. */
static int after_save_spawn(AfterSave *a, char *path) {
    char log[4096], shell[] = "/bin/sh", flag[] = "-c", name[] = "sh";
    char *const arguments[] = {name, flag, (char *)(uintptr_t)a->run->after_save, name, path, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    snprintf(log, sizeof log, "%s/after-save.log", a->run->out);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return errno;
    dprintf(fd, "%s:\n", path);
    // MPI's files, among others, must not stay open in the command
    int64_t most = sysconf(_SC_OPEN_MAX), end = most < 0 ? 1 << 16 : min_i64(most, 1 << 16); // -1: no limit
    for (int other = STDERR_FILENO + 1; other < end; other++) {
        int flags = fcntl(other, F_GETFD);
        if (flags >= 0) fcntl(other, F_SETFD, flags | FD_CLOEXEC);
    }
    sigemptyset(&none);
    sigfillset(&all);
    sigdelset(&all, SIGKILL);
    sigdelset(&all, SIGSTOP);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, fd, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, fd, STDERR_FILENO);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setpgroup(&attributes, 0); // a group of its own: mpirun sends signals to the group of a rank
    char **variables = environment_without_launcher();
    int failed = posix_spawn(&a->process, shell, &files, &attributes, arguments, variables);
    if (failed) a->process = 0;
    free(variables);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    close(fd);
    return failed;
}

/* If the running command has ended, reports a failure and starts the command for the oldest checkpoint for which it has
 * not run. Checkpoints that --keep has already removed are skipped with a note. Never waits. */
static void after_save_check(AfterSave *a) {
    char path[4096], absolute[PATH_MAX], how[64];
    int status = 0;
    pid_t ended = a->process ? waitpid(a->process, &status, WNOHANG) : 0;
    if (ended > 0 && status) {
        if (WIFEXITED(status)) snprintf(how, sizeof how, "with exit code %d", WEXITSTATUS(status));
        else snprintf(how, sizeof how, "by signal %d", WTERMSIG(status));
        checkpoint_path(path, sizeof path, a->run->out, a->steps[a->started - 1]);
        fprintf(stderr,
                "note: --after-save failed for %s: the command ended %s; its output is at the end of "
                "%s/after-save.log\n",
                path, how, a->run->out);
    }
    if (ended) a->process = 0; // -1: its exit code is lost, because this process was started with SIGCHLD ignored
    while (!a->process && a->started < a->saved) {
        checkpoint_path(path, sizeof path, a->run->out, a->steps[a->started++]);
        if (access(path, F_OK)) {
            fprintf(stderr,
                    "note: --after-save was not run for %s: the commands before it took so long that --keep %d removed "
                    "this checkpoint first\n",
                    path, a->run->keep);
            continue;
        }
        int failed = after_save_spawn(a, realpath(path, absolute) ? absolute : path);
        if (failed) fprintf(stderr, "note: --after-save could not be started for %s: %s\n", path, strerror(failed));
    }
}

/* A checkpoint is complete and visible: its command starts now, or when the commands before it have ended. */
static void after_save_add(AfterSave *a, int64_t step) {
    if (!a->run->after_save) return;
    a->steps = (int64_t *)checked_realloc(a->steps, sizeof *a->steps * (size_t)(a->saved + 1));
    a->steps[a->saved++] = step;
    after_save_check(a);
}

#endif
