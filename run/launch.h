/* launch.h: begins a program that runs ranks, and runs those of this process: a single one under mpirun, or all of them
 * as threads. */
#ifndef LAUNCH_H
#define LAUNCH_H
#include "job.h"      // defines: Job, Transport, options_parse
#include "spinning.h" // defines: limit_spinning

/* Reads the command line into j->opt. Returns the number of this process among those that the launcher started. */
static int process_begin(Job *j, int argc, char **argv, Program program) {
    if (!CUDA_BUILD) limit_spinning(argv);
    output_prepare();
    process_end.process = rank_of_launcher();
    process_end.quiet = 1; // every process checks the same input: until they are connected, the first one speaks
    j->opt = options_parse(argc, argv);
    j->opt.program = program;
    device_prepare_process(launched_by_mpi() || j->opt.ranks > 1);
    return process_end.process;
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
