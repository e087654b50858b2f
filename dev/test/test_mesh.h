/* Layouts of tensor, context and pipeline parallelism that planted faults, MPI and GPUs are tried on. Part of
 * test_llama3.cu. */

/* One for each way to split a model. */
static void test_mesh_faults(void) {
    static const char *const of_faults[] = {"--tp 2 --dp-shard 2 --sharding shard_grad_op",
                                            "--cp 2 --sharding shard_grad_op",
                                            "--pp 2 --sharding shard_grad_op --accumulate local tied"};
    for (int i = 0; i < 3; i++) compare_text(of_faults[i], &transport_threads);
}

#ifdef HAVE_MPI
static int mpi_ranks;

/* Layouts of mpi_ranks ranks. */
static int layout_allowed_on_mpi(const int *v) {
    int is_decided = v[LAYOUT_REPLICATE] != UNDECIDED; // the last option that changes the number of ranks
    int fits = is_decided ? layout_ranks(v) == mpi_ranks : mpi_ranks % layout_ranks(v) == 0;
    return fits && layout_allowed(v);
}

/* The first layouts that all pairs of options need on as many processes as there are, with MPI's own witness of what is
 * communicated. */
static void test_layouts_mpi(int process, int world) {
    enum { LAYOUTS = 16 };
    static Pairs p;
    char name[700], over[720];
    mpi_ranks = world;
    layouts_open(&p, layout_allowed_on_mpi);
    for (int i = 0; i < LAYOUTS && pairs_add(&p); i++) {
        Difference d = try_layout(p.chosen[i], name, sizeof name, process, &transport_mpi);
        snprintf(over, sizeof over, "over mpi: %s", name);
        if (process == 0) check_layout(over, p.chosen[i], &d);
    }
}
#endif

#ifdef CUDA_ON_CPU
/* GPUs that a processor plays take their time: a few layouts that have every axis, over both transports. */
static void test_mesh_of_gpus(void) {
    static const struct {
        const char *transport, *layout;
    } of_gpus[] = {
        {"nccl", "--tp 2 --cp 2 --pp 2 --pp-schedule interleaved --pp-chunks 2 --accumulate local --doc-mask tied"},
        {"threads", "--tp 2 --cp 2 --pp 2 --accumulate local --sharding shard_grad_op --recompute every:2 --doc-mask "
                    "tied"},
        {"nccl", "--cp 2 --dp-replicate 2 --accum 2 --recompute selective --sharding no_shard --doc-mask tied"},
        {"nccl", "--tp 2 --pp 2 --dp-shard 2 --accum 2 --accumulate local --recompute full --sharding shard_grad_op "
                 "tied"},
        {"nccl", "--pp 4 --accumulate local tied"},
        {"nccl", "--cp 4 --recompute selective --doc-mask"}};
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 8;
    for (int i = 0; i < (int)(sizeof of_gpus / sizeof *of_gpus); i++)
        compare_text(of_gpus[i].layout, transport_find(of_gpus[i].transport));
    cuda_on_cpu.devices = devices;
}
#endif
