/* test_mesh_bits.h: with --deterministic every pipeline has the bits of one rank, in losses, norms and weights; with
 * tensor and context parallelism, which add in another order, its losses. Part of test_llama3.cu. */

enum { MESH_LOSSES = 50 }; // steps in which losses stay near; of the first 20 of them bits are compared

typedef struct {
    StepBits steps[MESH_LOSSES];
    float *weights;
    int64_t parameters;
} RunBits;

/* Steps of 8 micro-batches on `ranks` of them; leaves bits_of and bits_weights. */
static int64_t run_bits(int tied, int ranks, int data_ranks, const char *layout, int steps, int process,
                        const Transport *transport) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --batch 1 --accum %d --deterministic --lr 1e-3 --warmup 5 --steps %d "
             "--threads 1 --timeout 60%s",
             mesh_model(tied), make_token_file("mesh-bits.tok", 9000, 64, 7), 8 / data_ranks, MESH_LOSSES, layout);
    Job *j = make_job(arguments, ranks, transport);
    int64_t parameters = j->table.num_parameters;
    free(bits_weights);
    bits_weights = (float *)checked_malloc(sizeof(float) * (size_t)parameters);
    bits_steps = steps;
    launch(j, process, bits_body);
    end_job(j);
    bits_steps = 20;
    return parameters;
}

static const RunBits *one_ranks_bits(int tied) {
    static RunBits kept[2];
    RunBits *one = &kept[tied];
    if (one->weights) return one;
    one->parameters = run_bits(tied, 1, 1, "", MESH_LOSSES, 0, &transport_threads);
    memcpy(one->steps, bits_of, sizeof one->steps);
    one->weights = bits_weights;
    bits_weights = NULL;
    return one;
}

/* A pipeline of any kind: 20 steps. */
static void compare_pipeline_bits(int tied, int ranks, int data_ranks, const char *layout, int process,
                                  const Transport *transport) {
    char name[300];
    const RunBits *one = process == 0 ? one_ranks_bits(tied) : NULL;
    int equal = 0;
    int64_t differ = 0, n = run_bits(tied, ranks, data_ranks, layout, 20, process, transport);
    for (int i = 0; i < 20 && one; i++) equal += !memcmp(&bits_of[i], &one->steps[i], sizeof *bits_of);
    for (int64_t i = 0; i < n && one; i++) differ += bits_weights[i] != one->weights[i];
    free(bits_weights);
    bits_weights = NULL;
    snprintf(name, sizeof name, "%s, %d ranks over %s,%s: 20 deterministic steps have one rank's bits, and its weights",
             tied ? "tied" : "untied", ranks, transport->name, layout);
    if (one)
        CHECK(name, equal == 20 && !differ,
              "losses and norms of %d of 20 steps equal, the last loss %.9g; %" PRId64 " of %" PRId64 " weights differ",
              equal, bits_of[19].loss, differ, n);
}

/* Tensor and context parallelism: losses of 50 steps. */
static void compare_mesh_losses(int tied, int ranks, int data_ranks, const char *layout, int process,
                                const Transport *transport) {
    char name[300];
    const RunBits *one = process == 0 ? one_ranks_bits(tied) : NULL;
    double off = 0, bound = sizeof(floatX) == 4 ? 1e-5 : 2e-3;
    run_bits(tied, ranks, data_ranks, layout, MESH_LOSSES, process, transport);
    free(bits_weights);
    bits_weights = NULL;
    for (int i = 0; i < MESH_LOSSES && one; i++) off = worst_of(off, fabs(bits_of[i].loss / one->steps[i].loss - 1));
    snprintf(name, sizeof name, "%s, %d ranks over %s,%s: losses of %d steps of one rank", tied ? "tied" : "untied",
             ranks, transport->name, layout, MESH_LOSSES);
    if (one)
        CHECK(name, off <= bound, "off by %.2g at most, <= %.0e; from %.6f to %.6f", off, bound, one->steps[0].loss,
              one->steps[MESH_LOSSES - 1].loss);
}

static void test_mesh_bits(void) {
    static const struct {
        int tied, ranks, data_ranks;
        const char *layout;
    } pipelines[] = {
        {0, 2, 1, " --pp 2"},
        {1, 4, 1, " --pp 4 --pp-schedule interleaved --pp-light-ends"},
        {0, 3, 1, " --pp 3 --pp-light-ends --recompute full"},
        {0, 4, 2, " --pp 2 --dp-shard 2 --sharding full_shard --accumulate sharded --recompute selective"},
        {1, 8, 4, " --pp 2 --dp-shard 2 --dp-replicate 2 --recompute every:2"},
        {0, 8, 2, " --pp 4 --pp-schedule interleaved --dp-replicate 2 --sharding no_shard"},
        {1, 6, 2, " --pp 3 --dp-shard 2 --sharding full_shard"},
        {0, 8, 4,
         " --pp 2 --pp-schedule interleaved --dp-shard 2 --dp-replicate 2 --sharding no_shard --accumulate "
         "sharded"}}; // whose last micro-batch of one run comes before the others of the other run
    static const struct {
        int tied, ranks, data_ranks;
        const char *layout;
    } meshes[] = {{0, 2, 1, " --tp 2"},
                  {0, 2, 1, " --cp 2"},
                  {1, 4, 1, " --tp 4"},
                  {1, 4, 1, " --cp 4"},
                  {1, 8, 1, " --tp 2 --cp 2 --pp 2"},
                  {0, 8, 2, " --tp 2 --pp 2 --pp-schedule interleaved --dp-shard 2"}};
    int part = sizeof(floatX) == 4 ? 0 : 1; // of a short run, in each precision
    for (int i = 0; i < 8; i++)
        if (!is_short || i % 4 == part)
            compare_pipeline_bits(pipelines[i].tied, pipelines[i].ranks, pipelines[i].data_ranks, pipelines[i].layout,
                                  0, &transport_threads);
    for (int i = 0; i < 6; i++)
        if (!is_short || i % 4 == part)
            compare_mesh_losses(meshes[i].tied, meshes[i].ranks, meshes[i].data_ranks, meshes[i].layout, 0,
                                &transport_threads);
}

#ifdef HAVE_MPI
static void test_mesh_bits_mpi(int process, int world) {
    if (world == 2 || world == 4)
        compare_pipeline_bits(world == 4, world, 1,
                              world == 2 ? " --pp 2 --pp-light-ends" : " --pp 4 --pp-schedule interleaved", process,
                              &transport_mpi);
    if (world == 3) compare_pipeline_bits(1, 3, 1, " --pp 3", process, &transport_mpi);
    if (world == 8) compare_pipeline_bits(0, 8, 4, " --pp 2 --dp-shard 2 --dp-replicate 2", process, &transport_mpi);
    if (world == 4) compare_mesh_losses(1, 4, 1, " --tp 2 --cp 2", process, &transport_mpi);
}
#endif
