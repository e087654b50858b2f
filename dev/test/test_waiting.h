/* test_waiting.h: the waiting that a step reports is the waiting that MPI's profiling interface sees.
 *
 * The witness knows nothing of the program's own clocks: it adds up the time between two calls of MPI_Test of which the
 * first found its request incomplete, unless the thread computed in between. Both figures are of the same step, so a
 * loaded machine changes both alike. In test_waiting, process 1 sleeps before it starts each of its collectives, so
 * that process 0 mostly waits. test_waiting_network is for processes on hosts with a slow network (dev/test/hosts.sh).
 */
#ifdef HAVE_MPI
static const double longest_poll = 1e-4; // seconds of processor time: a poll takes less, computing takes more
static struct {
    int incomplete; // the last MPI_Test found its request incomplete
    double at;      // when it was called, in seconds
    double cpu;     // this thread's processor time when it returned
    double seconds; // in which this process waited, so far
    double polling; // in calls of MPI_Test outside of waits, so far
} witness;

int MPI_Test(MPI_Request *request, int *complete, MPI_Status *status) {
    double start = seconds_now();
    int waits = witness.incomplete && processor_seconds() - witness.cpu < longest_poll;
    int error = PMPI_Test(request, complete, status);
    double end = seconds_now();
    if (waits) witness.seconds += (*complete ? end : start) - witness.at;
    else witness.polling += end - start;
    witness.at = start;
    witness.cpu = processor_seconds();
    witness.incomplete = !*complete;
    if (*complete && --in_flight.count == 0) in_flight.seconds += end - in_flight.since;
    return error;
}

/* Adds the last step's waiting to (AXES) `waits`. */
static void add_waits(double *waits, const Comm *comm) {
    for (int a = 0; a < AXES; a++) waits[a] += comm->wait_seconds[a];
}

/* Two ranks have one axis of size 2: only there, and among all ranks, can they wait. */
static void check_waits_of_axes(const Mesh *mesh, const double *waits /* (AXES) */) {
    char name[256], layout[160];
    double used = 0, others = 0;
    for (int a = 0; a < AXES; a++) {
        if (mesh_group_size(mesh, (Axis)a) == 1) others += waits[a];
        else if (a != AXIS_WORLD) used += waits[a];
    }
    mesh_print(layout, sizeof layout, mesh->size, 1);
    snprintf(name, sizeof name, "waiting is counted for the axis that is waited for: %s", layout);
    CHECK(name, used >= 0.010 && others == 0, "%.1f ms of the axis with two ranks, %.1f ms of others, %.1f ms of all",
          1e3 * used, 1e3 * others, 1e3 * waits[AXIS_WORLD]);
}

/* The step of three or, on a busy machine, of up to 20 in which the reported waiting comes closest to the witness. If
 * another program has the core while a rank computes, the witness takes that for waiting. */
static void waiting_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Comm *comm = &o->trainer.parallel.comm;
    double reported = 0, seen = 0, off = INFINITY, waits[AXES] = ZERO;
    int is_close[2] = ZERO;     // of both ranks; that of rank 0 counts
    train_step(&o->trainer, 1); // connects the processes
    profile_delay_us = rank == 1 ? 5000 : 0;
    for (int step = 2; step <= 4 || (step <= 20 && !is_close[0]); step++) {
        double before = witness.seconds;
        StepStats s = train_step(&o->trainer, step);
        double waited = witness.seconds - before;
        add_waits(waits, comm);
        if (fabs(s.wait_seconds / waited - 1) < off) {
            off = fabs(s.wait_seconds / waited - 1);
            reported = s.wait_seconds;
            seen = waited;
        }
        int mine = off <= 0.05 && seen >= 0.010;
        all_gather_now(comm, AXIS_WORLD, "is the waiting close", &mine, is_close, sizeof mine);
    }
    profile_delay_us = 0;
    if (rank == 0) {
        char name[256], layout[160];
        mesh_print(layout, sizeof layout, j->mesh.size, 1);
        snprintf(name, sizeof name, "the reported waiting is what MPI's profiling interface sees: %s", layout);
        CHECK(name, off <= 0.05 && seen >= 0.010,
              "%.1f ms reported, %.1f ms seen: off by %.1f %%, <= 5 %%, of at least 10 ms", 1e3 * reported, 1e3 * seen,
              100 * off);
        check_waits_of_axes(&j->mesh, waits);
    }
    close_rank(o);
}

static void test_waiting(int process, int world) {
    static const char *const kinds[] = {"", " --dp-replicate 2", " --tp 2", " --pp 2"};
    char arguments[512];
    for (int i = 0; i < 4 && world == 2; i++) {
        snprintf(arguments, sizeof arguments,
                 "--model %s/tied --data %s --seq 16 --batch 1 --accum 4 --steps 20 --timeout 60%s", FIXTURES,
                 make_token_file("waiting.tok", 6000, 64, 0), kinds[i]);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, waiting_body);
        end_job(j);
    }
}

// ---------------------------------------------------------------------------
// on a slow network

/* What a rank's step reports, or what the witness saw of it. */
typedef struct {
    double wait, computing; // seconds
    double overlap;         // share of the time with communication in flight in which the rank computed
} Waiting;

/* How far what the ranks report of a step is from what the witness saw, at the rank where it is furthest. */
typedef struct {
    double wait, computing; // relative
    double overlap;         // difference
    double slowest;         // how much less the reported slowest rank computed than the one that computed longest
} WaitingError;

static WaitingError waiting_error(const Waiting (*all)[2], int world) {
    WaitingError e = ZERO;
    double most = 0;
    int slowest = 0;
    for (int i = 0; i < world; i++) {
        const Waiting *reported = &all[i][0], *seen = &all[i][1];
        e.wait = fmax(e.wait, fabs(reported->wait / seen->wait - 1));
        e.computing = fmax(e.computing, fabs(reported->computing / seen->computing - 1));
        e.overlap = fmax(e.overlap, fabs(reported->overlap - seen->overlap));
        if (reported->computing > all[slowest][0].computing) slowest = i;
        most = fmax(most, seen->computing);
    }
    e.slowest = 1 - all[slowest][1].computing / most;
    return e;
}

/* Trains five steps, and keeps for each figure the step in which it is closest to the witness. */
static void network_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Waiting both[2], (*all)[2] = (Waiting(*)[2])checked_malloc(sizeof both * (size_t)j->mesh.world);
    WaitingError least = {INFINITY, INFINITY, INFINITY, INFINITY};
    train_step(&o->trainer, 1); // connects the processes
    for (int step = 2; step <= 6; step++) {
        double wait = witness.seconds, polling = witness.polling, flight = in_flight.seconds;
        StepStats s = train_step(&o->trainer, step);
        wait = witness.seconds - wait;
        polling = witness.polling - polling;
        flight = in_flight.seconds - flight;
        both[0].wait = s.wait_seconds;
        both[0].computing = s.seconds - s.wait_seconds;
        both[0].overlap = s.overlap;
        both[1].wait = wait;
        both[1].computing = s.seconds - wait;
        both[1].overlap = fmax(0, 1 - (wait + polling) / flight);
        all_gather_now(&o->trainer.parallel.comm, AXIS_WORLD, "waiting", both, all, sizeof both);
        WaitingError e = waiting_error(all, j->mesh.world);
        least.wait = fmin(least.wait, e.wait);
        least.computing = fmin(least.computing, e.computing);
        least.overlap = fmin(least.overlap, e.overlap);
        least.slowest = fmin(least.slowest, e.slowest);
    }
    if (rank == 0) {
        char layout[160];
        mesh_print(layout, sizeof layout, j->mesh.size, 1);
        printf("%s: rank 0 waited %.3f s (seen: %.3f), computed %.3f s (%.3f), overlapped %.3f (%.3f)\n", layout,
               all[0][0].wait, all[0][1].wait, all[0][0].computing, all[0][1].computing, all[0][0].overlap,
               all[0][1].overlap);
        CHECK("on a slow network every rank's waiting is what MPI's profiling interface sees", least.wait <= 0.05,
              "%s: off by %.1f %%, <= 5 %%", layout, 100 * least.wait);
        CHECK("on a slow network every rank's overlapped share is what it sees", least.overlap <= 0.05,
              "%s: off by %.3f, <= 0.05", layout, least.overlap);
        CHECK("on a slow network every rank's computing, and the slowest rank, are what it sees",
              least.computing <= 0.05 && least.slowest <= 0.05, "%s: off by %.1f %% and %.1f %%, <= 5 %%", layout,
              100 * least.computing, 100 * least.slowest);
    }
    free(all);
    close_rank(o);
}

static void test_waiting_network(int process, int world) {
    static const char *const kinds[] = {"--sharding full_shard", "--sharding no_shard", "--dp-shard 1 --dp-replicate 2",
                                        "--pp 2 --accum 4 --batch 2", "--tp 2 --batch 4"};
    char arguments[512];
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds) && world == 2; i++) {
        snprintf(arguments, sizeof arguments, "--model tiny --data %s --seq 256 --batch 8 --steps 6 --timeout 60 %s",
                 make_token_file("network.tok", 200000, 4096, 0), kinds[i]);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, network_body);
        end_job(j);
    }
}
#endif
