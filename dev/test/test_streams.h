/* test_streams.h: GPUs beside each other, as CUDA on a CPU has them: both transports, streams that run in random order,
 * offload, the timeline, ranks that are lost. Part of test_llama3.cu.
 */
static void three_steps(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    for (int step = 1; step <= 3; step++) train_step(&o->trainer, step);
    close_rank(o);
}

static void test_strategies_of_gpus(const Transport *nccl) {
    static const struct {
        const char *model;
        int world, accum;
        const char *more;
    } layouts[] = {{"odd", 3, 2, ""},
                   {"odd", 2, 2, " --sharding shard_grad_op"},
                   {"tied", 2, 2, " --sharding no_shard"},
                   {"odd", 4, 1, " --dp-replicate 2 --slots 3"},
                   {"tied", 4, 2, " --dp-replicate 2 --sharding no_shard --accumulate local"},
                   {"odd", 2, 3, " --accumulate local --recompute full"},
                   {"odd", 2, 2, " --offload all --recompute selective"},
                   {"tied", 2, 2, " --offload optimizer --sharding no_shard"},
                   {"odd", 3, 1, " --deterministic --wrap size:9999"}};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        char more[128];
        if (FLOATX == DTYPE_BF16 && i % 3) continue; // a part of them
        if (i % 4 == 0 || strstr(layouts[i].more, "offload"))
            compare_layout(layouts[i].model, 0, layouts[i].world, layouts[i].accum, 1, &transport_threads,
                           layouts[i].more);
        snprintf(more, sizeof more, " --transport nccl%s", layouts[i].more);
        compare_layout(layouts[i].model, 0, layouts[i].world, layouts[i].accum, 1, nccl, more);
    }
    compare_layout("odd", 0, 1, 2, 1, &transport_threads, " --offload all");
    compare_layout("tied", 0, 3, 1, 1, &transport_threads, " --offload all --sharding no_shard");
}

/* Streams go on in another order under each seed, and odd seeds land copies early, even ones late. */
static void test_orders(void) {
    const Transport *nccl = transport_find("nccl");
    static const struct {
        int by_nccl;
        const char *more;
    } ways[] = {{0, ""},
                {1, " --transport nccl"},
                {1, " --transport nccl --offload all --sharding shard_grad_op --slots 3"},
                {0, " --offload all --sharding no_shard"}};
    StepBits first[20] = ZERO;
    uint64_t before = cuda_on_cpu.seed;
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 2;
    bits_steps = 6;
    compare_bits("odd", 0, 1, 1, &transport_threads, "", first, 1);
    for (int seed = 0; seed < 8; seed++) {
        char more[160];
        cuda_on_cpu.seed = (uint64_t)seed;
        snprintf(more, sizeof more, "%s --check-replicas %d", ways[seed % 4].more,
                 10 + seed); // the number tells the seeds apart
        compare_bits("odd", 0, 2, 1, ways[seed % 4].by_nccl ? nccl : &transport_threads, more, first, 0);
    }
    static const char *const adapted[] = {" --lora-rank 4 --base int8",
                                          " --lora-rank 4 --base int8:all --sharding shard_grad_op",
                                          " --lora-rank 4 --base " PRECISION_NAME " --wrap size:99999 --slots 3"};
    for (int i = 0; i < 3; i++) {
        compare_bits("odd", 0, 1, 1, &transport_threads, adapted[i], first, 1);
        for (int seed = i; seed < 8; seed += 3) {
            char more[160];
            cuda_on_cpu.seed = (uint64_t)seed;
            snprintf(more, sizeof more, "%s --transport nccl --check-replicas %d", adapted[i], 10 + seed);
            compare_bits("odd", 0, 2, 1, nccl, more, first, 0);
        }
    }
    static const struct {
        const char *more;
        int world;
    } meshes[] = {
        {" --tp 2 --pp 2", 4}, {" --pp 2", 2}, {" --cp 2 --recompute full", 2}, {" --tp 2 --pp 2 --lora-rank 3", 4}};
    cuda_on_cpu.devices = 4;
    bits_steps = 3;
    for (int i = 0; i < 4; i++)
        for (int seed = 0; seed < (i == 1 ? 16 : 8); seed++) { // their sums are made in another order than one rank's;
                                                               // what two stages do to each other is seldom seen
            char more[160];
            int by_nccl = seed % 4 != 2;
            cuda_on_cpu.seed = (uint64_t)seed;
            snprintf(more, sizeof more, "%s%s --check-replicas %d", meshes[i].more, by_nccl ? " --transport nccl" : "",
                     10 + seed);
            compare_bits("tied", 0, meshes[i].world, 1, by_nccl ? nccl : &transport_threads, more, first, !seed);
        }
    cuda_on_cpu.seed = before;
    cuda_on_cpu.devices = devices;
    bits_steps = 20;
}

typedef struct {
    int gathers, hidden, reductions, reduced_beside;
} Beside; // collectives of rank 0 on fsdp, and those that ran next to an op of the compute stream

static Beside read_beside(const char *path) {
    Beside b = ZERO;
    char *text = read_text_file(path);
    cJSON *root = cJSON_Parse(text), *list = cJSON_GetObjectItemCaseSensitive(root, "traceEvents"), *e, *o;
    cJSON_ArrayForEach(e, list) {
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "cat")),
                   *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "name"));
        int64_t lane = json_ns(e, "tid") / 1000 - STREAMS, start = json_ns(e, "ts"), end = start + json_ns(e, "dur"),
                beside = 0;
        if (!kind || strcmp(kind, "communication") || json_ns(e, "pid") || lane % AXES != AXIS_FSDP) continue;
        cJSON_ArrayForEach(o, list) {
            const char *of = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, "cat"));
            if (!of || strcmp(of, "op") || json_ns(o, "pid") || json_ns(o, "tid")) continue;
            int64_t from = json_ns(o, "ts"), to = from + json_ns(o, "dur");
            beside |= from < end && to > start;
        }
        int gather = !strncmp(name, "all_gather", 10);
        b.gathers += gather;
        b.hidden += gather && beside;
        b.reductions += !gather;
        b.reduced_beside += !gather && beside;
    }
    cJSON_Delete(root);
    free(text);
    return b;
}

/* The emulation's clock gives every op and copy a length, and lets streams go on beside each other. */
static void test_timeline_of_gpus(const Transport *transport) {
    char name[160], path[256], file[32];
    snprintf(file, sizeof file, "gpus-%s.json", transport->name);
    snprintf(path, sizeof path, "%s/%s", scratch_dir, file);
    Costs before = cuda_on_cpu.costs;
    cuda_on_cpu.costs.enqueue = 0.01;
    cuda_on_cpu.costs.launch = cuda_on_cpu.costs.product = 20; // a host that is ahead of its GPU
    TraceFound t = trace_run(file, 0, 2, 3, 0, transport);
    cuda_on_cpu.costs = before;
    snprintf(name, sizeof name,
             "--trace on GPUs over %s: every rank, op, step and exchange, and what lasts on a lane follows or nests",
             transport->name);
    CHECK(name,
          t.valid && t.ranks == 2 && t.ops == 3 * (int)traced_ops && t.steps == 6 &&
              t.fsdp == 6 * (int)traced_calls[0] && t.overlaps == 0,
          "%d ranks, %d ops of %d, %d exchanges of %d, %d of %d events overlap", t.ranks, t.ops, 3 * (int)traced_ops,
          t.fsdp, 6 * (int)traced_calls[0], t.overlaps, t.events);
    Beside b = read_beside(path);
    snprintf(name, sizeof name,
             "--trace on GPUs over %s: weights are gathered and gradients reduced while the compute stream computes",
             transport->name);
    double least = transport == &transport_threads
                       ? 2 / 3.0
                       : 0.5; // over NCCL an axis has one exchange at a time: a reduction may be behind a gather
    CHECK(name, b.hidden * 3 >= b.gathers * 2 && b.reduced_beside >= least * b.reductions && b.gathers && b.reductions,
          "%d of %d gathers, %d of %d reductions", b.hidden, b.gathers, b.reduced_beside, b.reductions);
}

/* A host that fills its GPU's queue is held in a call that knows no deadline: it stays a few blocks ahead, however many
 * there are. */
static void steps_alone(Job *j, int rank) { // start-up, which marks each buffer's end, does not count
    Opened *o = open_rank(j, rank);
    device_synchronize_all(&o->trainer.parallel.dev);
    comm_barrier(&o->trainer.parallel.comm, "queues are empty");
    if (rank == 0) cuda_on_cpu.deepest = 0;
    comm_barrier(&o->trainer.parallel.comm, "queues are watched");
    for (int step = 1; step <= 3; step++) train_step(&o->trainer, step);
    close_rank(o);
}

static void test_queues(const Transport *nccl) {
    static const struct {
        const char *more;
        int world;
    } ways[] = {{"", 1}, {" --transport nccl --recompute full", 2}, {" --offload optimizer --sharding no_shard", 2}};
    char path[256], arguments[512];
    snprintf(path, sizeof path, "%s/deep", scratch_dir);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/deep/config.json", scratch_dir);
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"model_type\":\"llama\",\"hidden_size\":16,\"num_hidden_layers\":48,\"num_attention_heads\":2,\"num_"
               "key_value_heads\":1,\"intermediate_size\":24,\"vocab_size\":64,\"max_position_embeddings\":64}");
    fclose(f);
    for (int i = 0; i < 3; i++) {
        char name[128];
        snprintf(arguments, sizeof arguments, "--model %s/deep --data %s --seq 16 --batch 1 --timeout 60%s",
                 scratch_dir, make_token_file("deep.tok", 3000, 64, 0), ways[i].more);
        Job *j = make_job(arguments, ways[i].world, i == 1 ? nccl : &transport_threads);
        launch(j, 0, steps_alone);
        end_job(j);
        snprintf(name, sizeof name, "48 blocks, %d rank%s%s: no queue of a GPU is ever full", ways[i].world,
                 ways[i].world > 1 ? "s" : "", ways[i].more);
        CHECK(name, cuda_on_cpu.deepest <= 500, "%zu operations in the fullest, <= 500 of about 1,000",
              cuda_on_cpu.deepest);
    }
}

// ---------------------------------------------------------------------------
// what can go wrong among GPUs

static void run_late_gpu(void *arguments) {
    launch(make_job((const char *)arguments, 4, transport_find("nccl")), 0, late_rank);
}

static void run_lost_gpu(void *arguments) {
    cuda_on_cpu.nccl_lose = "1:12";
    launch(make_job((const char *)arguments, 3, transport_find("nccl")), 0, three_steps);
}
static void run_broken_gpu(void *arguments) {
    cuda_on_cpu.nccl_error = "1:12";
    launch(make_job((const char *)arguments, 3, transport_find("nccl")), 0, three_steps);
}
static void run_shared_gpu(void *arguments) {
    cuda_on_cpu.devices = 2;
    launch(make_job((const char *)arguments, 3, transport_find("nccl")), 0, three_steps);
}
static void run_unsplit(void *arguments) {
    cuda_on_cpu_fail("ncclCommSplit", (cudaError_t)ncclSystemError, 2);
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
static void run_no_pinned(void *arguments) {
    cuda_on_cpu_fail("cudaHostAlloc", cudaErrorMemoryAllocation, 1);
    launch(make_job((const char *)arguments, 2, &transport_threads), 0, three_steps);
}

static void test_lost_gpus(void) {
    static const struct {
        const char *name;
        void (*run)(void *);
        const char *more;
        int code;
        const char *says[2];
    } cases[] = {{"a rank that computes for ever ends all, with exchanges of the others in their GPUs' queues",
                  run_late_gpu,
                  "",
                  2,
                  {" on fsdp (4 ranks)", "rank 2 has been running attention_backward"}},
                 {"a rank whose exchanges never arrive ends all, though NCCL says nothing",
                  run_lost_gpu,
                  "",
                  2,
                  {" waited 1.", " on fsdp (3 ranks)"}},
                 {"what NCCL finds broken ends all", run_broken_gpu, "", 2, {": NCCL ", "remote process exited"}},
                 {"more ranks than GPUs are refused over nccl",
                  run_shared_gpu,
                  "",
                  1,
                  {"3 ranks were started on a host with 2 GPUs", "--transport threads"}},
                 {"a group that NCCL cannot open is named",
                  run_unsplit,
                  "",
                  2,
                  {"NCCL could not split off fsdp", "NCCL_DEBUG=INFO"}},
                 {"--offload without room in the host's memory",
                  run_no_pinned,
                  " --offload optimizer",
                  1,
                  {"could not pin", "use more hosts"}}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        char arguments[512], said[4096];
        snprintf(arguments, sizeof arguments,
                 "--model %s/odd --data %s --seq 16 --batch 1 --timeout 1 --transport %s%s", fixture_dir,
                 make_token_file("lost.tok", 3000, 64, 0), i == 5 ? "threads" : "nccl", cases[i].more);
        double start = seconds_now();
        int code = child_says(cases[i].run, arguments, said, sizeof said);
        double took = seconds_now() - start;
        const char *line = sentence(said);
        CHECK(cases[i].name,
              code == cases[i].code && strstr(line, cases[i].says[0]) && strstr(line, cases[i].says[1]) && took < 12,
              "code %d after %.1f s: %s", code, took, line);
    }
}

static void test_streams(void) {
    const Transport *nccl = transport_find("nccl");
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 8;
    test_timeline_of_gpus(&transport_threads);
    test_timeline_of_gpus(nccl);
    test_queues(nccl);
    test_lost_gpus();
    test_strategies_of_gpus(nccl);
    cuda_on_cpu.devices = devices;
}
