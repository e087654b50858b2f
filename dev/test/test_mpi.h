/* test_mpi.h: data parallelism over MPI: one rank's gradients and bits, and memory as the operating system sees it.
 * Runs under mpirun. Part of test_llama3.cu. */

#ifdef HAVE_MPI
static double resident_bytes(void) {
    long pages = 0, size = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &size, &pages) != 2) pages = 0;
    if (f) fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

/* What the operating system sees against what the arenas say, for a model whose state is large beside the libraries. */
static void resident_body(Job *j, int rank) {
    double before = resident_bytes();
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    train_step(&o->trainer, 2);
    double grown = resident_bytes() - before, arenas = (double)device_peak(&o->trainer.parallel.dev);
    double state =
        (double)(o->trainer.parallel.dev.arenas[MEM_PARAMS].peak + o->trainer.parallel.dev.arenas[MEM_GRADS].peak +
                 o->trainer.parallel.dev.arenas[MEM_OPTIMIZER].peak);
    if (rank == 0) {
        CHECK("resident memory of a rank is what its arenas say", fabs(grown - arenas) <= 32e6,
              "%.1f MB resident, %.1f MB in arenas (%.1f MB of state), within 32 MB", grown / 1e6, arenas / 1e6,
              state / 1e6);
    }
    close_rank(o);
}

static void test_mpi(int process, int world) {
    char arguments[512];
    for (int tied = 0; tied < 2; tied++)
        for (int B = 1; B <= 2; B++)
            compare_layout(tied ? "tied" : "odd", process, world, 48 / world / B, B, &transport_mpi,
                           B == 2 && tied ? " --accumulate local" : "");
    for (int tied = 0; tied < 2 && 8 % world == 0; tied++) {
        StepBits first[20] = ZERO;
        if (process == 0) compare_bits(tied ? "tied" : "odd", 0, 1, 1, &transport_threads, "", first, 1);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi, "", first, 0);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi, " --accumulate local", first, 0);
        if (world % 2) continue;
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi,
                     " --dp-replicate 2 --sharding shard_grad_op", first, 0);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi,
                     tied ? " --sharding no_shard" : " --dp-replicate 2 --sharding no_shard --accumulate local", first,
                     0);
    }
    static const char *const adapted[] = {(" --lora-rank 4 --base " PRECISION_NAME), " --lora-rank 4 --base int8",
                                          " --lora-rank 4 --base int8:all --sharding shard_grad_op",
                                          " --lora-rank 4 --base int8 --dp-replicate 2"};
    for (int i = 0; i < 4 && 8 % world == 0; i++) {
        StepBits first[20] = ZERO;
        if (i == 3 && world % 2) continue;
        if (process == 0) compare_bits("odd", 0, 1, 1, &transport_threads, i == 3 ? adapted[1] : adapted[i], first, 1);
        compare_bits("odd", process, world, 1, &transport_mpi, adapted[i], first, 0);
    }
    for (int s = 0; s < STRATEGIES; s++) {
        snprintf(arguments, sizeof arguments,
                 "--model bench-8m --vocab-size 40000 --data %s --seq 64 --batch 1 --timeout 60 --sharding %s",
                 make_token_file("resident.tok", 6000, 64, 0), strategies[s].name);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, resident_body);
        end_job(j);
    }
}
#endif
