/* test_waiting.h: the waiting that a step reports is the waiting that MPI's profiling interface sees.
 *
 * Process 1 sleeps before it starts each of its collectives, so that process 0 mostly waits. The witness knows nothing
 * of the program's own clocks: it adds up the time between two calls of MPI_Test of which the first found its request
 * incomplete, unless the thread computed in between. Both figures are of the same step, so a loaded machine changes
 * both alike.
 */
#ifdef HAVE_MPI
static const double longest_poll = 1e-4; // seconds of processor time: a poll takes less, computing takes more
static struct {
    int incomplete; // the last MPI_Test found its request incomplete
    double at, cpu; // when it was called, in seconds of the clock and of this thread's processor time
    double seconds; // in which this process waited, so far
} witness;

int MPI_Test(MPI_Request *request, int *complete, MPI_Status *status) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    double now = seconds_now(), cpu = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    if (witness.incomplete && cpu - witness.cpu < longest_poll) witness.seconds += now - witness.at;
    witness.at = now;
    witness.cpu = cpu;
    int error = PMPI_Test(request, complete, status);
    witness.incomplete = !*complete;
    return error;
}

/* The step of three in which the reported waiting comes closest to the witness. */
static void waiting_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    double reported = 0, seen = 0, off = INFINITY;
    train_step(&o->trainer, 1); // connects the processes
    profile_delay_us = rank == 1 ? 5000 : 0;
    for (int step = 2; step <= 4; step++) {
        double before = witness.seconds;
        StepStats s = train_step(&o->trainer, step);
        double waited = witness.seconds - before;
        if (fabs(s.wait_seconds / waited - 1) >= off) continue;
        off = fabs(s.wait_seconds / waited - 1);
        reported = s.wait_seconds;
        seen = waited;
    }
    profile_delay_us = 0;
    if (rank == 0) {
        char name[256], layout[160];
        mesh_print(layout, sizeof layout, j->mesh.size, 1);
        snprintf(name, sizeof name, "the reported waiting is what MPI's profiling interface sees: %s", layout);
        CHECK(name, off <= 0.15 && seen >= 0.010,
              "%.1f ms reported, %.1f ms seen: off by %.1f %%, <= 15 %%, of at least 10 ms", 1e3 * reported, 1e3 * seen,
              100 * off);
    }
    close_rank(o);
}

static void test_waiting(int process, int world) {
    static const char *const kinds[] = {"", " --dp-replicate 2", " --tp 2", " --pp 2"};
    char arguments[512];
    for (int i = 0; i < 4 && world == 2; i++) {
        snprintf(arguments, sizeof arguments,
                 "--model %s/tied --data %s --seq 16 --batch 1 --accum 4 --steps 4 --timeout 60%s", fixture_dir,
                 make_token_file("waiting.tok", 6000, 64, 0), kinds[i]);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, waiting_body);
        end_job(j);
    }
}
#endif
