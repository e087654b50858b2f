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

/* Two ranks as threads gather on their GPUs, and rank 0 overwrites what it sent as soon as its stream may: an event
 * must make it wait for rank 1's copy. In many rounds, the host lets rank 0's GPU finish before rank 1's begins. */
static struct {
    pthread_barrier_t both;
    int wrong; // elements that rank 1 received after they were overwritten
} early_overwrite;

static void early_overwrite_body(Job *j, int rank) {
    enum { COUNT = 16, ROUNDS = 64 };
    Opened *o = open_rank(j, rank);
    Device *dev = &o->trainer.parallel.dev;
    const FsdpUnit *u = &o->trainer.parallel.fsdp.units[0];
    float *sent = u->exp_avg, *gathered = u->exp_avg_sq, pattern[COUNT];
    for (int round = 1; round <= ROUNDS; round++) {
        for (int i = 0; i < COUNT; i++) pattern[i] = (float)round;
        device_write(dev, sent, pattern, sizeof pattern);
        device_synchronize_all(dev);
        all_gather_now(&o->trainer.parallel.comm, AXIS_FSDP, "test", sent, gathered, sizeof pattern);
        device_zero(dev, sent, sizeof pattern);
        pthread_barrier_wait(&early_overwrite.both);
        if (rank == 0) device_synchronize(dev);
        pthread_barrier_wait(&early_overwrite.both);
        float *have = floats_on_host(dev, gathered, 2 * COUNT);
        for (int i = 0; i < COUNT && rank == 1; i++) early_overwrite.wrong += have[i] != pattern[i];
        free(have);
    }
    close_rank(o);
}

static void test_early_overwrite(void) {
    char arguments[512];
    early_overwrite.wrong = 0;
    pthread_barrier_init(&early_overwrite.both, NULL, 2);
    snprintf(arguments, sizeof arguments, "--model %s --data %s --seq 16 --batch 1", small_model(0),
             make_token_file("small.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 2, &transport_threads);
    launch(j, 0, early_overwrite_body);
    end_job(j);
    pthread_barrier_destroy(&early_overwrite.both);
    CHECK("a rank overwrites what it sent only after the other rank's GPU has copied it", !early_overwrite.wrong,
          "%d elements were lost", early_overwrite.wrong);
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
    test_early_overwrite();
    bits_steps = 6;
    compare_bits("odd", 0, 1, 1, &transport_threads, "", first, 1);
    for (int seed = 0; seed < 8; seed++) {
        char more[160];
        cuda_on_cpu.seed = (uint64_t)seed;
        snprintf(more, sizeof more, "%s --timeout %d", ways[seed % 4].more,
                 100 + seed); // the number tells the seeds apart
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
            snprintf(more, sizeof more, "%s --transport nccl --timeout %d", adapted[i], 100 + seed);
            compare_bits("odd", 0, 2, 1, nccl, more, first, 0);
        }
    }
    cuda_on_cpu.seed = before;
    cuda_on_cpu.devices = devices;
    bits_steps = 20;
}

/* The same with tensor parallelism and pipelines, whose sums are made in another order than one rank's. What two stages
 * do to each other is seldom seen: more seeds. */
static void test_mesh_orders(void) {
    const Transport *nccl = transport_find("nccl");
    StepBits first[20] = ZERO;
    uint64_t before = cuda_on_cpu.seed;
    int devices = cuda_on_cpu.devices;
    static const struct {
        const char *more;
        int world, seeds;
    } meshes[] = {{" --tp 2 --pp 2", 4, 8},
                  {" --pp 2", 2, 16},
                  {" --cp 2 --recompute full", 2, 8},
                  {" --tp 2 --pp 2 --lora-rank 3", 4, 8},
                  {" --tp 2 --dp-shard 2 --recompute every:2", 4, 8}};
    cuda_on_cpu.devices = 4;
    bits_steps = 3;
    for (int i = 0; i < 5; i++)
        for (int seed = 0; seed < (is_short ? 4 : meshes[i].seeds); seed++) {
            char more[160];
            int by_nccl = seed % 4 != 2;
            cuda_on_cpu.seed = (uint64_t)seed;
            snprintf(more, sizeof more, "%s%s --timeout %d", meshes[i].more, by_nccl ? " --transport nccl" : "",
                     100 + seed);
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
    cuda_on_cpu.costs.exchanged_byte = 2e-3; // a reduction lasts longer than the clearing of the next gradient
    cuda_on_cpu.costs.byte = 1e-3;
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
    CHECK(name, b.hidden * 3 >= b.gathers * 2 && b.reduced_beside * 3 >= b.reductions * 2 && b.gathers && b.reductions,
          "%d of %d gathers, %d of %d reductions", b.hidden, b.gathers, b.reduced_beside, b.reductions);
}

// ---------------------------------------------------------------------------
// what runs beside what, by the emulator's clock

typedef struct {
    char name[80];
    int lane;
    int64_t start, end, bytes; // ns
} Traced;

enum { MOST_TRACED = 4096 };

/* The ops and the communication of rank 0 in a timeline, in the order in which the rank started them. */
static int read_traced(const char *path, Traced *events) {
    char *text = read_text_file(path);
    cJSON *root = cJSON_Parse(text), *e;
    int count = 0;
    cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(root, "traceEvents")) {
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "cat"));
        if (!kind || (strcmp(kind, "op") && strcmp(kind, "communication")) || json_ns(e, "pid")) continue;
        if (count == MOST_TRACED) break;
        Traced *t = &events[count++];
        snprintf(t->name, sizeof t->name, "%s", cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "name")));
        t->lane = (int)(json_ns(e, "tid") / 1000);
        t->start = json_ns(e, "ts");
        t->end = t->start + json_ns(e, "dur");
        const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(e, "args"), "bytes");
        t->bytes = bytes ? (int64_t)bytes->valuedouble : 0;
    }
    cJSON_Delete(root);
    free(text);
    return count;
}

/* Three steps over NCCL of a model of six blocks, as a timeline. `byte`: microseconds of a collective per byte. */
static int trace_blocks(const char *file, const char *more, int world, double byte, Traced *events) {
    char path[256], config[256], arguments[1024];
    Costs before = cuda_on_cpu.costs;
    snprintf(config, sizeof config, "%s/six", scratch_dir);
    mkdir(config, 0777);
    snprintf(config, sizeof config, "%s/six/config.json", scratch_dir);
    FILE *f = fopen(config, "w");
    fprintf(f, "{\"model_type\":\"llama\",\"hidden_size\":32,\"num_hidden_layers\":6,\"num_attention_heads\":4,\"num_"
               "key_value_heads\":2,\"intermediate_size\":48,\"vocab_size\":64,\"max_position_embeddings\":64}");
    fclose(f);
    snprintf(path, sizeof path, "%s/%s", scratch_dir, file);
    snprintf(arguments, sizeof arguments,
             "--model %s/six --data %s --seq 16 --batch 2 --steps 3 --timeout 60 --transport nccl --trace %s%s",
             scratch_dir, make_token_file("six.tok", 6000, 64, 0), path, more);
    cuda_on_cpu.costs.enqueue = 0.01; // a host that is ahead of its GPU
    cuda_on_cpu.costs.launch = cuda_on_cpu.costs.product = 20;
    cuda_on_cpu.costs.exchanged_byte = byte;
    traced_room = 0;
    Job *j = make_job(arguments, world, transport_find("nccl"));
    unlink(path);
    launch(j, 0, trace_body);
    end_job(j);
    int count = read_traced(path, events);
    cuda_on_cpu.costs = before;
    return count;
}

/* When a collective has begun to move data: its duration by the emulator's costs before its end. */
static double begun_at(const Traced *t, double byte) {
    return (double)t->end - 1e3 * (cuda_on_cpu.costs.collective + byte * (double)t->bytes);
}

static void test_reductions_apart(void) {
    static Traced events[MOST_TRACED];
    const double byte = 0.02; // a block's gather takes about as long as its backward
    int count = trace_blocks("apart.json", "", 2, byte, events), reductions = 0, beside = 0;
    for (int i = 0; i < count; i++) {
        const Traced *reduction = &events[i], *gather = NULL;
        int block;
        if (sscanf(reduction->name, "reduce_scatter: model.layers.%d", &block) != 1 || block < 2) continue;
        for (int k = 0; k < i; k++) {
            int gathered;
            if (sscanf(events[k].name, "all_gather: model.layers.%d", &gathered) == 1 && gathered == block - 2)
                gather = &events[k];
        }
        reductions++;
        beside += gather && begun_at(reduction, byte) < (double)gather->end;
    }
    CHECK("over NCCL the reduce-scatter of block l begins before the all-gather of block l - 2 has ended",
          reductions == 3 * 4 && beside == reductions, "%d of %d", beside, reductions);
}

/* How many of the communications of that name run beside an op of that name on the compute stream. */
static int count_beside(const Traced *events, int count, const char *communication, const char *op) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        int beside = 0;
        if (strcmp(events[i].name, communication)) continue;
        for (int k = 0; k < count; k++)
            beside |= events[k].lane == STREAM_COMPUTE && !strcmp(events[k].name, op) &&
                      events[k].start < events[i].end && events[k].end > events[i].start;
        found += beside;
    }
    return found;
}

static void test_tensor_parallel_beside(void) {
    static Traced events[MOST_TRACED];
    static const struct {
        const char *communication, *op;
        int of_blocks; // in a step of six blocks
    } pairs[] = {{"reduce_scatter: d MLP input", "linear_backward_weight", 6},
                 {"reduce_scatter: d attention input", "linear_backward_weight", 6},
                 {"all_gather: d attention output", "linear_backward_weight", 6},
                 {"all_gather: d MLP output", "linear_backward_weight", 5}, // not after the head
                 {"all_gather: MLP input", "linear_backward_input", 6},
                 {"all_gather: attention input", "attention_backward", 6}};
    int count = trace_blocks("beside.json", " --tp 2", 2, 0.02, events);
    for (int i = 0; i < (int)(sizeof pairs / sizeof *pairs); i++) {
        char name[160];
        int found = count_beside(events, count, pairs[i].communication, pairs[i].op);
        snprintf(name, sizeof name, "tensor parallelism: the %s of a block runs beside %s", pairs[i].communication,
                 pairs[i].op);
        CHECK(name, found == 3 * pairs[i].of_blocks, "%d of %d", found, 3 * pairs[i].of_blocks);
    }
}

/* The settings of NCCL's communicators and of the matmuls that run beside them, on one rank of a layout. */
static int limits_seen[4]; // multiprocessors of tp's, fsdp's and its reductions' communicators; targets of matmuls
static void see_limits(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    const Comm *comm = &o->trainer.parallel.comm;
    const Device *dev = &o->trainer.parallel.dev;
    for (int i = 0; i < 3 && rank == 0; i++) {
        static const int communicators[3] = {AXIS_TP, AXIS_FSDP, NCCL_REDUCTIONS};
        ncclComm_t c = comm->nccl[communicators[i]];
        limits_seen[i] = c ? c->config.maxCTAs : 0;
    }
    limits_seen[3] = rank ? limits_seen[3] : 0;
    for (const CudaMatmulEntry *m = dev->on.matmuls->entries; m && rank == 0; m = m->next)
        limits_seen[3] |= 1 << (m->target ? cuda_on_cpu.multiprocessors - m->target : 0) / 4; // in fours
    close_rank(o);
}

static void test_limits(void) {
    static const struct {
        const char *more;
        int world, limits[4];
    } layouts[] = {{"", 2, {0, 8, 8, 1 << 2 | 1 << 4}}, // forward leaves 8 to the gathers, backward 16
                   {" --tp 2 --dp-shard 2", 4, {16, 4, 4, 1 << 1 | 1 << 6}}, // 4; 16 + 4 + 4
                   {" --tp 2", 2, {16, 0, 0, 1 << 0 | 1 << 4}},              // nothing; 16
                   {" --sharding no_shard", 2, {0, 8, 0, 1 << 0 | 1 << 2}},
                   {" --deterministic", 2, {0, 8, 8, 1 << 0}}}; // equal bits need equal algorithms
    int multiprocessors = cuda_on_cpu.multiprocessors;
    cuda_on_cpu.multiprocessors = 132;
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        char arguments[512], name[160];
        snprintf(arguments, sizeof arguments, "--model %s --data %s --seq 16 --batch 1 --timeout 60 --transport nccl%s",
                 mesh_model(0), make_token_file("limits.tok", 3000, 64, 0), layouts[i].more);
        Job *j = make_job(arguments, layouts[i].world, transport_find("nccl"));
        launch(j, 0, see_limits);
        end_job(j);
        snprintf(name, sizeof name, "%d GPUs%s: what NCCL may occupy, matmuls beside it do not count on",
                 layouts[i].world, layouts[i].more);
        CHECK(name, !memcmp(limits_seen, layouts[i].limits, sizeof limits_seen),
              "tp %d, fsdp %d, reductions %d of 132; left by matmuls, in fours: bits %#x", limits_seen[0],
              limits_seen[1], limits_seen[2], limits_seen[3]);
    }
    cuda_on_cpu.multiprocessors = multiprocessors;
}

/* NCCL's memory on one rank: what it had allocated before the first step, what the plan expected at most, and what the
 * step allocated in addition; its streams and the rank's own. */
static double memory_of_nccl[3];
static int streams_of_rank;
static void see_memory(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    const Parallel *p = &o->trainer.parallel;
    double before = device_memory(p->dev.gpu);
    for (int step = 1; step <= 2; step++) train_step(&o->trainer, step);
    device_synchronize_all(&o->trainer.parallel.dev);
    if (rank == 0) {
        memory_of_nccl[0] = p->comm.library_memory;
        memory_of_nccl[1] = nccl_memory(&p->mesh, o->dry_run.parallel.comm.traffic_started, p->dev.reductions_apart,
                                        transport_sums(&j->run));
        memory_of_nccl[2] = before - device_memory(p->dev.gpu);
        streams_of_rank = __builtin_popcount(p->dev.streams_used);
    }
    close_rank(o);
}

static void test_memory_of_nccl(void) {
    static const struct {
        const char *more;
        int world, streams;
    } layouts[] = {{"", 2, 3}, // compute, gather, reduce
                   {" --deterministic", 4, 3},
                   {" --deterministic --dp-replicate 2", 4, 3},
                   {" --tp 2 --dp-shard 2", 4, 4},
                   {" --cp 2", 2, 3},
                   {" --pp 2 --accum 2", 2, 7}, // messages each way, in turns of two
                   {" --pp 4 --accum 4", 4, 7},
                   {" --optimizer muon", 2, 3}};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        char arguments[512], name[160];
        snprintf(arguments, sizeof arguments, "--model %s --data %s --seq 16 --batch 1 --timeout 60 --transport nccl%s",
                 mesh_model(0), make_token_file("memory.tok", 3000, 64, 0), layouts[i].more);
        Job *j = make_job(arguments, layouts[i].world, transport_find("nccl"));
        launch(j, 0, see_memory);
        end_job(j);
        const double *m = memory_of_nccl;
        snprintf(name, sizeof name, "%d GPUs%s: NCCL's memory is allocated before the first step, and within the plan",
                 layouts[i].world, layouts[i].more);
        CHECK(name, m[0] <= m[1] && m[0] > 0.6 * m[1] && m[2] == 0, "%.0f MiB, planned %.0f; in the steps another %.0f",
              m[0] / (1 << 20), m[1] / (1 << 20), m[2] / (1 << 20));
        snprintf(name, sizeof name, "%d GPUs%s: a rank has only the streams that it uses", layouts[i].world,
                 layouts[i].more);
        CHECK(name, streams_of_rank == layouts[i].streams, "%d, expected %d", streams_of_rank, layouts[i].streams);
    }
}

enum { SETTINGS = 4 };
static void prepare_again(void *arg) {
    static const char *const names[SETTINGS] = {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
                                                "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_NVLS_ENABLE"};
    for (int i = 0; i < SETTINGS; i++) unsetenv(names[i]);
    if (arg) setenv(names[0], "4", 1);
    if (arg) setenv(names[3], "1", 1);
    device_prepare_process(1);
    for (int i = 0; i < SETTINGS; i++) printf("%s ", getenv(names[i]) ? getenv(names[i]) : "none");
}
static void test_settings(void) {
    char said[2][256];
    int asked = 1;
    child_says(prepare_again, NULL, said[0], sizeof said[0]);
    child_says(prepare_again, &asked, said[1], sizeof said[1]);
    CHECK(
        "CUDA gets 32 hardware queues and kernels loaded at the start, NCCL no NVLink SHARP, and what the user has set "
        "stays",
        !strcmp(said[0], "32 EAGER 1 0 ") && !strcmp(said[1], "4 EAGER 1 1 "), "'%s', '%s'", said[0], said[1]);
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
static void run_unopened(void *arguments) {
    cuda_on_cpu_fail("ncclCommInitRankConfig", (cudaError_t)ncclSystemError, 2);
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
static void run_old_nccl(void *arguments) {
    cuda_on_cpu.nccl_version = 22702;
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
static void run_one_address(void *arguments) {
    setenv("NCCL_COMM_ID", "10.0.0.1:4000", 1);
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
static void run_nvls(void *arguments) {
    setenv("NCCL_NVLS_ENABLE", "1", 1);
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
/* The plan's formula counts 166 MiB for each of fsdp's two communicators. */
static void run_too_small_for_nccl(void *arguments) {
    cuda_on_cpu.memory = 300 << 20;
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, rank_main);
}
/* Another program takes memory between the check and NCCL's allocation. */
static void run_without_room(void *arguments) {
    cuda_on_cpu.memory = 200 << 20;
    launch(make_job((const char *)arguments, 2, transport_find("nccl")), 0, three_steps);
}
static void run_no_pinned(void *arguments) {
    cuda_on_cpu_fail("cudaHostAlloc", cudaErrorMemoryAllocation, 1);
    launch(make_job((const char *)arguments, 2, &transport_threads), 0, three_steps);
}

static const struct {
    const char *name;
    void (*run)(void *);
    const char *more;
    int code;
    const char *says[2];
} lost_gpus[] = {
    {"a rank that computes for ever ends all, with exchanges of the others in their GPUs' queues",
     run_late_gpu,
     "",
     2,
     {" on fsdp (4 ranks)", "rank 2 has been running attention_backward"}},
    {"a rank whose exchanges never arrive ends all, though NCCL says nothing",
     run_lost_gpu,
     "",
     2,
     {" waited 1.", " on fsdp (3 ranks)"}},
    {"what NCCL finds broken ends all, with the other rank's address",
     run_broken_gpu,
     "",
     2,
     {"remote process exited", "Connection closed by remote peer"}},
    {"more ranks than GPUs are refused over nccl",
     run_shared_gpu,
     "",
     1,
     {"3 ranks were started on a host with 2 GPUs", "--transport threads"}},
    {"a group that NCCL cannot open is named",
     run_unopened,
     "",
     2,
     {"NCCL could not open the communicator of fsdp", "NCCL_DEBUG=INFO"}},
    {"an NCCL that is too old is refused",
     run_old_nccl,
     "",
     1,
     {"the installed NCCL is 2.27.2, but 2.27.3 or newer is needed", "install a newer NCCL"}},
    {"one address for all communicators is refused", run_one_address, "", 1, {"NCCL_COMM_ID is set", "unset it"}},
    {"NVLink SHARP that the user turns on and the switch has no slot for is named",
     run_nvls,
     "",
     2,
     {"NCCL could not open the communicator of fsdp", "NVLink SHARP"}},
    {"a GPU without room for NCCL's communicators is refused, with its number",
     run_too_small_for_nccl,
     "",
     1,
     {" of memory on its GPU ", "0.35 GB of them for NCCL, but 0.31 GB are free"}},
    {"communicators that find no memory say how much is free",
     run_without_room,
     "",
     2,
     {"out of memory", "GB are free"}},
    {"--offload without room in the host's memory",
     run_no_pinned,
     " --offload optimizer",
     1,
     {"could not pin", "use more hosts"}}};

static void test_lost_gpus(void) {
    for (int i = 0; i < (int)(sizeof lost_gpus / sizeof *lost_gpus); i++) {
        char arguments[512], said[SAID];
        snprintf(arguments, sizeof arguments,
                 "--model %s/odd --data %s --seq 16 --batch 1 --timeout 1 --transport %s%s", FIXTURES,
                 make_token_file("lost.tok", 3000, 64, 0), strstr(lost_gpus[i].more, "offload") ? "threads" : "nccl",
                 lost_gpus[i].more);
        emu::opened_by = 0; // the child stands for a process of its own, in which CUDA works
        double start = seconds_now();
        int code = child_says(lost_gpus[i].run, arguments, said, sizeof said);
        double took = seconds_now() - start;
        const char *line = error_line(said);
        CHECK(lost_gpus[i].name,
              code == lost_gpus[i].code && strstr(line, lost_gpus[i].says[0]) && strstr(line, lost_gpus[i].says[1]) &&
                  took < 12,
              "code %d after %.1f s: %s", code, took, line);
    }
}

static void test_streams(void) {
    const Transport *nccl = transport_find("nccl");
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 8;
    test_timeline_of_gpus(&transport_threads);
    test_timeline_of_gpus(nccl);
    test_settings();
    test_limits();
    test_memory_of_nccl();
    test_reductions_apart();
    test_tensor_parallel_beside();
    test_queues(nccl);
    test_lost_gpus();
    test_strategies_of_gpus(nccl);
    cuda_on_cpu.devices = devices;
}
