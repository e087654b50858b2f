/* launch.h: begins a program that runs ranks, and runs those of this process: a single one under mpirun, or all of them
 * as threads. */
#ifndef LAUNCH_H
#define LAUNCH_H
#include "job.h"      // defines: Job, Transport, LaunchInfo
#include "signals.h"  // defines: signals_install_for_start
#include "spinning.h" // defines: limit_spinning
#include "version.h"  // defines: print_version

/* Before the command line is read. Returns the number of this process among those that the launcher started. */
static int process_begin(char **argv) {
    if (!CUDA_BUILD) limit_spinning(argv);
    output_prepare();
    process_end.process = rank_of_launcher();
    process_end.quiet = 1; // every process checks the same input: until they are connected, the first one speaks
    return process_end.process;
}

/* Prints what --help or --version asks for, and returns whether one was given. `prints`: this process is the one that
 * prints. */
static int help_or_version(const Options *o, int prints) {
    if (prints && o->help) options_print_help(stdout, option_rows, OPTION_ROWS, NULL);
    else if (prints && o->version) print_version(stdout, "train_llama3");
    if (prints && (o->help || o->version)) finish_results();
    return o->help || o->version;
}

/* How long ranks on several hosts may take to connect, before they read anything: as long as other parts of the
 * start-up, but at most two minutes. */
static double seconds_to_connect(const Options *o) { return fmin(120, 4 * o->timeout); }

/* After the command line is read: connects the processes. `saves`: signals ask for a checkpoint. */
static LaunchInfo process_connect(const Options *o, int saves, double to_connect, int *argc, char ***argv) {
    device_prepare_process(launched_by_mpi() || o->ranks > 1);
    signals_install_for_start(saves, under_mpirun(), launched_by_mpi(), process_end.process == 0);
    return comm_start_process(argc, argv, o->timeout, to_connect);
}

typedef struct {
    Job *job;
    int rank;
    void (*body)(Job *, int);
} RankThread;

static void *rank_thread(void *arg) {
    RankThread *t = (RankThread *)arg;
    t->body(t->job, t->rank);
    return NULL;
}

/* Calls body(job, rank) for each rank of this process; `process`: this process's rank under mpirun. */
static void launch(Job *j, int process, void (*body)(Job *, int)) {
    int world = j->mesh.world;
    if (j->host_transport != &transport_threads || world == 1) {
        body(j, process);
        return;
    }
    pthread_t *threads = new_array(pthread_t, world);
    RankThread *args = new_array(RankThread, world);
    for (int i = 0; i < world; i++) {
        args[i].job = j;
        args[i].rank = i;
        args[i].body = body;
        if (thread_start(&threads[i], rank_thread, &args[i]))
            run_failure("the thread of rank %d could not be started: use fewer --ranks, or raise this account's limit "
                        "of threads (ulimit -u)",
                        i);
    }
    for (int i = 0; i < world; i++) pthread_join(threads[i], NULL);
    free(threads);
    free(args);
}

#endif
