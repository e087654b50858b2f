/* launch.h: begins a program that runs ranks, and runs those of this process: one under mpirun, or all as threads. */
#ifndef LAUNCH_H
#define LAUNCH_H
#include "../../lib/io/output.h" // defines: output_prepare
#include "job.h"                 // defines: Job, Transport, LaunchInfo
#include "../watch/signals.h"    // defines: signals_install_for_start
#include "version.h"             // defines: print_version
#include <limits.h>
#include <omp.h>

// ---------------------------------------------------------------------------
// how long OpenMP's threads spin at a barrier before they sleep
//
// By default, a waiting thread spins for some milliseconds, which is the fastest way to wait as long as every thread
// has a core of its own. When another program needs one of the cores, spinning threads occupy the core that the thread
// they wait for needs, and a step takes three times as long. The limits below were chosen by the measurements in
// dev/results/busy-cpu.md.

#define GNU_SPINS "2000"      // spins of GNU's library, of a few dozen cycles each
#define LLVM_MILLISECONDS "0" // how long a thread of LLVM's library spins

/* limit_spinning is called first in main. A setting that the user has made is left alone, and the program's own is
 * removed from the environment afterwards: the programs that this one starts must not inherit it. */

#ifdef __clang__
static void limit_spinning(char **argv) {
    (void)argv;
    if (getenv("OMP_WAIT_POLICY") || getenv("KMP_BLOCKTIME")) return;
    setenv("KMP_BLOCKTIME", LLVM_MILLISECONDS, 1);
    omp_get_max_threads(); // LLVM's library reads its settings when it is first called
    unsetenv("KMP_BLOCKTIME");
}
#elif defined(LINUX)
#include <elf.h>
#include <link.h>

extern const ElfW(Ehdr) __ehdr_start; // the linker's name for the header of this program in memory

/* GNU's library reads its settings while it is loaded, so the program sets them and then starts itself again with
 * execv, which keeps the process ID. Where that fails, threads spin for the library's time. */
static void limit_spinning(char **argv) {
    static const char started_again[] = "LLAMA3_STARTED_AGAIN";
    char program[PATH_MAX];
    if (!getenv(started_again)) {
        if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
        ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
        if (length <= 0) return;
        program[length] = 0;
        // After `ld.so PROGRAM`, /proc/self/exe is the loader and not this program.
        ElfW(Ehdr) header;
        int fd = open(program, O_RDONLY | O_CLOEXEC);
        int is_own = fd >= 0 && read(fd, &header, sizeof header) == sizeof header &&
                     !memcmp(&header, &__ehdr_start, sizeof header);
        if (fd >= 0) close(fd);
        if (!is_own) return;
        setenv("GOMP_SPINCOUNT", GNU_SPINS, 1);
        setenv(started_again, "1", 1);
        execv(program, argv);
    }
    unsetenv(started_again);
    unsetenv("GOMP_SPINCOUNT");
}
#else
static void limit_spinning(char **argv) { (void)argv; }
#endif

// ---------------------------------------------------------------------------
// the start of a program

/* Before the command line is read. */
static void process_begin(char **argv) {
    if (!CUDA_BUILD) limit_spinning(argv);
    output_prepare();
    process_end.process = rank_of_launcher();
    process_end.quiet = 1; // every process checks the same input: until they are connected, the first one speaks
}

/* Prints what --help (see options_print_help) or --version asks for, and returns whether one was given. */
static int help_or_version(const RunSettings *run, const char *program, const OptionRow *own, int count,
                           const char *takes) {
    int prints = process_end.process == 0;
    if (prints && run->help) options_print_help(own, count, takes, run->help);
    else if (prints && run->version) print_version(program);
    if (prints && (run->help || run->version)) finish_results();
    return run->help != NULL || run->version;
}

/* How long ranks on several hosts may take to connect: as long as other parts of the start, at most two minutes. */
static double seconds_to_connect(const RunSettings *run) { return fmin(120, 4 * run->timeout); }

/* After the command line is read: connects the processes. `saves`: signals ask for a checkpoint. */
static LaunchInfo process_connect(const RunSettings *run, int saves, double to_connect, int *argc, char ***argv) {
    device_prepare_process(launched_by_mpi() || run->ranks > 1);
    signals_install_for_start(saves, under_mpirun(), launched_by_mpi(), process_end.process == 0);
    return comm_start_process(argc, argv, run->timeout, to_connect);
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
        RankThread rank = {j, i, body};
        args[i] = rank;
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
