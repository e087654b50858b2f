/* comm_open.h: how ranks start and end: the launcher (mpirun, srun or none), transports by name, and opening a Comm.
 */
#ifndef COMM_OPEN_H
#define COMM_OPEN_H
#include "comm.h"
#include "monitor.h"
#include "transport_mpi.h"
#include "transport_nccl.h"
#include "transport_threads.h"
#include <sys/wait.h>
#ifdef USE_CUDA
#include "comm_watch_cuda.h" // defines: comm_watch, comm_finished
#endif

// ---------------------------------------------------------------------------
// the launcher

/* Was this process started by mpirun, mpiexec or srun? */
static inline int launched_by_mpi(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
}

/* Was this process started by Open MPI's mpirun? It kills its processes within a second after SIGTERM, too early for a
 * checkpoint, and forwards SIGUSR1 and SIGUSR2; srun leaves more time after SIGTERM. */
static inline int under_mpirun(void) { return getenv("OMPI_COMM_WORLD_SIZE") != NULL; }

/* This process's rank as its launcher gives it, before MPI has started; 0 without a launcher. */
static inline int rank_of_launcher(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"};
    return number_in_environment(names, 4, 0);
}

/* How many processes the launcher has started, as it says; 1 without a launcher. */
static inline int processes_of_launcher(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    return number_in_environment(names, 3, 1);
}

/* Refuses to start if MPI did not connect the processes that the launcher has started: each of them would train alone,
 * and all would write the same files. */
static inline void check_launch(int connected) {
    int started = processes_of_launcher();
    if (started <= connected) return;
    if (rank_of_launcher()) { // the first process reports it
        if (own_heartbeat.record) own_heartbeat.record->told_to_end = SIGTERM;
        sleep(2);
        _exit(1);
    }
    user_error("the launcher started %d processes, but MPI connected only %d of them, so each would train a model of "
               "its own: with Slurm use srun --mpi=pmix (srun --mpi=list shows what is installed), or mpirun",
               started, connected);
}

/* How this process was started. */
typedef struct {
    int rank, world;    // of the process; number of processes
    int local, on_host; // its number on this host; number of processes on this host
    int on_cores;       // processes that share its cores: all on this host, or 1 if the launcher binds each to its own
} LaunchInfo;

#ifdef HAVE_MPI
static inline void mpi_abort_all(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

/* Fills in run_hosts. `host`: the processes of this host. Hosts may have the same name; what tells them apart is the
 * first rank in `host`, or the heartbeat table. */
static inline void find_hosts(const LaunchInfo *l, MPI_Comm host) {
    RunHost mine = ZERO, *all = new_array(RunHost, l->world);
    const char *table = own_heartbeat.table->name;
    gethostname(mine.name, sizeof mine.name - 1);
    mine.first_rank = l->rank;
    MPI_Bcast(&mine.first_rank, 1, MPI_INT, 0, host);
    mine.id = hash_bytes(mix64((uint64_t)mine.first_rank + 1), table, strlen(table));
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, MPI_COMM_WORLD);
    run_hosts.of_rank = new_array(int, l->world);
    run_hosts.hosts = all; // overwritten from its beginning: the hosts so far are at most as many as the ranks so far
    for (int i = 0; i < l->world; i++) {
        int h = 0;
        while (h < run_hosts.count && run_hosts.hosts[h].id != all[i].id) h++;
        if (h == run_hosts.count) {
            run_hosts.hosts[h] = all[i];
            run_hosts.hosts[h].first_rank = i;
            run_hosts.count++;
        }
        run_hosts.hosts[h].ranks++;
        run_hosts.of_rank[i] = h;
    }
    if (run_hosts.of_rank[l->rank]) process_end.host = host_of_rank(l->rank)->name;
}
#endif

/* Initializes MPI if a launcher started this process. */
static inline LaunchInfo comm_start_process(int *argc, char ***argv, double timeout, double start_timeout) {
    LaunchInfo l = {0, 1, 0, 1, 1};
    if (!launched_by_mpi()) { // all ranks are threads of this process
        check_launch(1);
        run_hosts.hosts = new_array(RunHost, 1);
        gethostname(run_hosts.hosts[0].name, sizeof run_hosts.hosts[0].name - 1);
        run_hosts.count = 1;
        return l;
    }
#ifdef HAVE_MPI
    const char *size = getenv("OMPI_COMM_WORLD_SIZE"), *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (size && local && !strcmp(size, local)) { // one host: do not search for network hardware, which takes 0.2 s
        setenv("OMPI_MCA_pml", "ob1", 0);
        setenv("OMPI_MCA_btl", "self,vader", 0);
    }
    heartbeats_join(timeout, start_timeout, rank_of_launcher(), size ? atoi(size) : 0);
    int provided;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &l.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &l.world);
    check_launch(l.world);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm host; // the processes of this host
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, l.rank, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &l.local);
    MPI_Comm_size(host, &l.on_host);
    CoreSet mine = core_set_of_process(), *all = new_array(CoreSet, l.on_host);
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, host);
    l.on_cores = 0;
    for (int i = 0; i < l.on_host; i++) l.on_cores += !memcmp(&mine, &all[i], sizeof mine);
    free(all);
    find_hosts(&l, host);
    MPI_Comm_free(&host);
    unlink(own_heartbeat.table->name); // all ranks of this host have opened it, and nothing must stay behind
    own_heartbeat.record->lines.rank = l.rank;
    rank_state(own_heartbeat.record, RANK_STARTING, seconds_now());
    __atomic_store_n(&own_heartbeat.record->phase, (int)PHASE_START, __ATOMIC_RELEASE);
    own_heartbeat.table->world = l.world;
    process_end.abort_all = mpi_abort_all;
#else
    (void)argc;
    (void)argv;
    (void)timeout;
    (void)start_timeout;
    user_error("started by mpirun or srun, but this build has no MPI: install Open MPI (make deps) and build again, or "
               "use --ranks N without mpirun");
#endif
    return l;
}

static inline void comm_end_process(void) {
#ifdef HAVE_MPI
    int initialized;
    MPI_Initialized(&initialized);
    if (!initialized) return;
    rank_state(own_heartbeat.record, RANK_ENDING, seconds_now());
    own_heartbeat.record->phase = PHASE_END;
    MPI_Finalize();
    rank_state(own_heartbeat.record, RANK_ENDED, seconds_now());
    // The monitor ends when all ranks of its host have. The process that started it waits for that, so that no zombie
    // stays where process 1 does not reap orphans, as in some containers.
    for (int i = 0; i < 100 && own_heartbeat.monitor; i++) {
        if (waitpid(own_heartbeat.monitor, NULL, WNOHANG)) break;
        usleep(10000);
    }
#endif
}

// ---------------------------------------------------------------------------
// opening and closing a Comm

/* The transport of that name; NULL: this build does not have it. */
static inline const Transport *transport_find(const char *name) {
    static const Transport *const built[] = {
        &transport_threads,
#ifdef HAVE_MPI
        &transport_mpi,
#endif
#ifdef HAVE_NCCL
        &transport_nccl,
#endif
    };
    for (int i = 0; i < (int)(sizeof built / sizeof *built); i++)
        if (!strcmp(built[i]->name, name)) return built[i];
    return NULL;
}

/* Opens all groups of a rank. `hosts` carries host memory and `transport` device memory; they differ with NCCL only.
 * `threads` is shared by ranks that are threads. */
static inline void comm_open(Comm *comm, Device *dev, const Mesh *mesh, int rank, const Transport *transport,
                             const Transport *hosts, ThreadWorld *threads, double timeout) {
    comm_open_dry_run(comm, dev, mesh, rank);
    comm->transport = transport;
    comm->hosts = hosts;
    comm->thread_world = threads;
    comm->timeout = timeout;
    comm->gpu_progress = -1;
    comm->heartbeat = hosts->heartbeat_open(comm);
    comm->heartbeat->activity.op = OP_COUNT; // no op yet
    dev->rec.activity = &comm->heartbeat->activity;
    dev->poll_arg = comm;
#ifdef USE_CUDA
    dev->rec.comm_finished = comm_finished;
    if (mesh->world > 1 || !comm->heartbeats->threads) dev->watch = comm_watch; // for other ranks, or for a monitor
#endif
    for (int a = 0; a < AXES; a++) {
        Group *g = &comm->groups[a];
        int expected = g->size, key = g->rank;
        hosts->group_open(comm, g, comm->heartbeat->lines.colour[a]);
        if (g->size != expected || g->rank != key)
            run_failure("%s: the group of %s has %d members, of which this rank is number %d; expected %d and %d",
                        rank_name(rank), axis_names[a], g->size, g->rank, expected, key);
    }
    if (transport->gpus_open && mesh->world > 1) transport->gpus_open(comm);
}

/* Runs each kind of collective and message that `dry_run` counted once. `sums`: the transport sums gradients. */
static inline void comm_connect(Comm *comm, const Comm *dry_run, int sums) {
    if (comm->transport->gpus_connect && comm->mesh.world > 1) comm->transport->gpus_connect(comm, dry_run, sums);
}

static inline void comm_close(Comm *comm) {
    if (comm->transport && comm->transport->gpus_close && comm->mesh.world > 1) comm->transport->gpus_close(comm);
}

#endif
