/* signals.h: what signals do to a run.
 *
 * While a run trains with --out, SIGUSR1 saves a checkpoint; SIGUSR2, SIGTERM, SIGINT (Ctrl-C) and SIGHUP save one and
 * end the run with exit code 75; a second SIGINT ends it at once. Ranks tell each other in the step report, so that all
 * save after the same step. Before training, such a run ends with 75 at once. Tasks without a checkpoint to save print
 * a note and end by the signal itself, as shells expect. Under mpirun, which kills its ranks a second after SIGTERM,
 * only SIGUSR1 and SIGUSR2 are handled here. A signal that the parent process had ignored stays ignored (nohup).
 */
#ifndef SIGNALS_H
#define SIGNALS_H
#include "../../lib/comm/watchdog.h" // defines: own_heartbeat, end_by_signal
#include <signal.h>

enum { SIGNAL_SAVE = 1, SIGNAL_END = 2 };
enum { EXIT_ENDED_EARLY = 75 }; // EX_TEMPFAIL of sysexits.h: the same command can be run again, with --resume

static volatile sig_atomic_t save_signals, end_signals; // received by this process so far
static volatile sig_atomic_t interrupts;                // SIGINT among them
static volatile sig_atomic_t is_training;               // from the first step to the last save
static int prints_about_signals;                        // this process is the first of its launcher

/* Prints from a signal handler, where printf must not be called. */
static void signal_print(const char *text) {
    if (prints_about_signals && write(STDERR_FILENO, text, strlen(text)) < 0) return; // stderr has no reader any longer
}

static void signal_count(int number) {
    int failed = own_heartbeat.table ? own_heartbeat.table->said : 0;
    if (failed) _exit(failed); // a failure was reported, and now the monitor or the launcher ends this process
    if (number == SIGUSR1) save_signals = save_signals + 1;
    else end_signals = end_signals + 1;
    if (number != SIGINT || !is_training) return;
    interrupts = interrupts + 1;
    if (interrupts == 1)
        signal_print(
            "\nnote: the run saves a checkpoint after this step and ends; press Ctrl-C again to end it at once, "
            "without saving\n");
    else end_by_signal(number);
}

/* Before training there is nothing to save: a signal that asks for the end ends the process at once. */
static void signal_ends_start(int number) {
    signal_count(number);
    if (!end_signals) return;
    signal_print("note: ended by a signal before training began; nothing was saved\n");
    if (own_heartbeat.record) own_heartbeat.record->told_to_end = number;
    _exit(EXIT_ENDED_EARLY);
}

static void signal_ends_unsaved(int number) {
    signal_print(number == SIGINT ? "\nnote: ended by SIGINT (Ctrl-C); nothing was saved\n"
                                  : "note: ended by a signal; nothing was saved\n");
    end_by_signal(number);
}

/* Handles signals that ask for a checkpoint, if `saving`, and signals that only ask for the end, if `ending`.
 * SA_ONSTACK: not on the stack of a thread that computes (lib/ops/cpu/matmul.h). */
static void signals_handle(void (*handler)(int), int saving, int ending) {
    static const int signals[] = {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP}; // the first two ask for a checkpoint
    struct sigaction action = ZERO, now;
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    for (int i = saving ? 0 : 2; i < (ending ? 5 : 2); i++) {
        sigaction(signals[i], NULL, &now);
        if (now.sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL);
    }
}

/* At the start of the program. `saves`: it will train with --out; `is_first`: the first process of the launcher. */
static void signals_install_for_start(int saves, int under_mpirun, int has_launcher, int is_first) {
    prints_about_signals = is_first;
    if (saves) signals_handle(signal_ends_start, 1, !under_mpirun);
    else if (!has_launcher) signals_handle(signal_ends_unsaved, 0, 1); // with one, lib/comm/monitor.h handles them
}

/* When a run with --out is about to train. */
static void signals_install(int under_mpirun) { signals_handle(signal_count, 1, !under_mpirun); }

#endif
