/* test_muon.h: Muon's updates equal PyTorch's (dev/pytorch/make_muon_fixture.py); they do not depend on the layout;
 * runs have the expected traffic and memory, and resume on any layout. Part of test_llama3.cu. */

// ---------------------------------------------------------------------------
// three updates against PyTorch's

static AdamW muon_test_update(float grad_scale, int step) {
    AdamW a = {0.02f, 0.9f, 0.95f, 1e-8f, 0.1f, grad_scale, step, step};
    return a;
}

/* Puts the fixture's gradients of a step in place of the program's. */
static void set_fixture_gradients(Trainer *trainer, const StFiles *s, int step) {
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        char name[128];
        int64_t n;
        snprintf(name, sizeof name, "grad.%d.%s", step, t->name);
        float *grad = fixture_tensor(s, name, &n);
        device_write(&trainer->parallel.dev, trainer->parallel.fsdp.units[t->unit].grad + t->offset, grad,
                     sizeof(float) * (size_t)n);
        free(grad);
    }
}

/* How far the changes of the weights in a step are from the fixture's: the worst tensor that Muon trains, or the worst
 * of the others. In bf16 of Muon's in units of 1.5 times PyTorch's own error. */
static Worst compare_changes(Trainer *trainer, const StFiles *s, int step, float *const *before, int of_muon) {
    Worst worst = ZERO;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        char name[128];
        int64_t n;
        if (t->is_muon != of_muon) continue;
        snprintf(name, sizeof name, "change.%d.%s", step, t->name);
        const float *master = trainer->parallel.fsdp.units[t->unit].master + t->offset;
        float *want = fixture_tensor(s, name, &n), *have = floats_on_host(&trainer->parallel.dev, master, n);
        for (int64_t k = 0; k < n; k++) have[k] -= before[i][k];
        double error = norm_of_difference(have, want, 1, n) / norm_of(want, n);
        if (of_muon && sizeof(floatX) == 2) {
            snprintf(name, sizeof name, "bf16.error.%s", t->name);
            float *torch_error = fixture_tensor(s, name, NULL);
            error /= 1.5 * (double)torch_error[0];
            free(torch_error);
        }
        if (!(error < worst.error)) snprintf(worst.name, sizeof worst.name, "%s", t->name);
        worst.error = worst_of(worst.error, error);
        free(want);
        free(have);
    }
    return worst;
}

static void test_muon_fixture(void) {
    char arguments[512], path[512], name[128];
    StFiles expected = ZERO;
    float *before[16];
    snprintf(path, sizeof path, "%s/muon/expected.safetensors", FIXTURES);
    st_add_file(&expected, path);
    float *scales = fixture_tensor(&expected, "scales", NULL);
    snprintf(arguments, sizeof arguments, "--model %s/muon --data %s --seq 16 --batch 1 --optimizer muon", FIXTURES,
             make_token_file("small.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 1, &transport_threads);
    Opened *o = open_rank(j, 0);
    Trainer *trainer = &o->trainer;
    const TensorTable *table = &trainer->model.table;
    Fsdp *fsdp = &trainer->parallel.fsdp;
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < table->num_tensors; i++) {
            const Tensor *t = &table->tensors[i];
            before[i] = floats_on_host(fsdp->dev, fsdp->units[t->unit].master + t->offset, t->rows * t->cols);
        }
        set_fixture_gradients(trainer, &expected, step);
        const AdamW update = muon_test_update(scales[step - 1], step);
        optimizer_step(&trainer->optimizer, &update);
        Worst muon = compare_changes(trainer, &expected, step, before, 1);
        Worst others = compare_changes(trainer, &expected, step, before, 0);
        snprintf(name, sizeof name, "step %d: Muon changes square, wide and tall matrices as PyTorch does", step);
        if (sizeof(floatX) == 4) CHECK(name, muon.error <= 1e-5, "worst %.2g <= 1e-5 (%s)", muon.error, muon.name);
        else CHECK(name, muon.error <= 1, "%.2f of 1.5 x PyTorch's error in bf16 (%s)", muon.error, muon.name);
        snprintf(name, sizeof name, "step %d: with Muon, AdamW changes embedding, head and norms as PyTorch does",
                 step);
        CHECK(name, others.error <= 1e-5, "worst %.2g <= 1e-5 (%s)", others.error, others.name);
        for (int i = 0; i < table->num_tensors; i++) free(before[i]);
    }
    free(scales);
    close_rank(o);
    end_job(j);
    st_close(&expected);
}

/* With --optimizer muon:0 nothing remains of earlier gradients: the momentum is the last gradient, clipped. */
static void test_muon_without_momentum(void) {
    const float clip = 0.5f;
    char arguments[512];
    StFiles gradients = ZERO;
    snprintf(arguments, sizeof arguments, "%s/muon/expected.safetensors", FIXTURES);
    st_add_file(&gradients, arguments);
    snprintf(arguments, sizeof arguments, "--model %s/muon --data %s --seq 16 --batch 1 --optimizer muon:0", FIXTURES,
             make_token_file("small.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 1, &transport_threads);
    Opened *o = open_rank(j, 0);
    Trainer *trainer = &o->trainer;
    Worst worst = ZERO;
    for (int step = 1; step <= 2; step++) {
        set_fixture_gradients(trainer, &gradients, step);
        const AdamW update = muon_test_update(clip, step);
        optimizer_step(&trainer->optimizer, &update);
    }
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        char name[128];
        int64_t n;
        if (!t->is_muon) continue;
        snprintf(name, sizeof name, "grad.2.%s", t->name);
        const float *exp_avg = trainer->parallel.fsdp.units[t->unit].exp_avg + t->offset;
        float *want = fixture_tensor(&gradients, name, &n), *have = floats_on_host(&trainer->parallel.dev, exp_avg, n);
        for (int64_t k = 0; k < n; k++) want[k] *= clip;
        double error = norm_of_difference(have, want, 1, n) / norm_of(want, n);
        if (!(error < worst.error)) snprintf(worst.name, sizeof worst.name, "%s", t->name);
        worst.error = worst_of(worst.error, error);
        free(want);
        free(have);
    }
    CHECK("--optimizer muon:0: the momentum is the last gradient", worst.name[0] && worst.error <= 1e-6,
          "worst %.2g <= 1e-6 (%s)", worst.error, worst.name);
    close_rank(o);
    end_job(j);
    st_close(&gradients);
}

// ---------------------------------------------------------------------------
// updates of given gradients do not depend on the layout

static float *muon_weights; // (num_parameters) after three updates
static int64_t muon_padding, muon_bytes_off;

/* A gradient that depends on the tensor, the element and the step alone. */
static void set_gradients(Trainer *trainer, int step) {
    ShardPiece p;
    for (int i = 0; next_state_piece(&trainer->parallel.fsdp, &i, &p);) {
        float *grad = (float *)checked_malloc(sizeof(float) * (size_t)p.count);
        for (int64_t at = 0, run, whole; at < p.count; at += run) {
            run = min_i64(p.count - at, tensor_run(p.tensor, p.first + at, &whole));
            for (int64_t k = 0; k < run; k++) {
                uint64_t bits = mix64((uint64_t)(whole + k) * 1000 + (uint64_t)p.tensor->index * 10 + (uint64_t)step);
                grad[at + k] = (float)(bits >> 40) * 0x1p-23f - 1;
            }
        }
        device_write(&trainer->parallel.dev, p.unit->grad + p.at, grad, sizeof(float) * (size_t)p.count);
        free(grad);
    }
}

/* Bytes of optimizer state beyond 4 per element, padding included, and 4 more of everything but a block's matrices. */
static int64_t muon_state_excess(const Trainer *trainer) {
    const Fsdp *fsdp = &trainer->parallel.fsdp;
    const Device *dev = &trainer->parallel.dev;
    int64_t bytes = (int64_t)dev->arenas[MEM_OPTIMIZER].used;
    for (int i = 0; i < dev->rec.num_buffers; i++)
        if (dev->rec.buffers[i].category == MEM_OPTIMIZER) bytes -= dev->rec.buffers[i].count * RED_ZONE;
    for (int u = 0; u < fsdp->table->num_units; u++) {
        const FsdpUnit *unit = &fsdp->units[u];
        int64_t adamw = unit->state_count, norms = 2 * unit->table_unit->num_blocks * trainer->job->config.C;
        if (unit->table_unit->kind == UNIT_BLOCK) adamw = min_i64(adamw, norms);
        bytes -= round_up(4 * unit->state_count, 256) + round_up(4 * adamw, 256);
    }
    return bytes;
}

static void muon_updates_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    for (int step = 1; step <= 3; step++) {
        set_gradients(trainer, step);
        poison_pools(&trainer->parallel.fsdp);
        const AdamW update = muon_test_update(0.5f, step);
        optimizer_step(&trainer->optimizer, &update);
    }
    collect_state(trainer, STATE_MASTER, muon_weights);
    __atomic_fetch_add(&muon_padding, count_touched_padding(&trainer->parallel.fsdp), __ATOMIC_RELAXED);
    int64_t excess = muon_state_excess(trainer);
    __atomic_fetch_add(&muon_bytes_off, excess < 0 ? -excess : excess, __ATOMIC_RELAXED);
    close_rank(o);
}

/* Three updates on `ranks` ranks; leaves muon_weights, and returns their number. */
static int64_t run_muon_updates(int tied, int ranks, const char *layout) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --batch 1 --threads 1 --timeout 60 --optimizer muon%s", mesh_model(tied),
             make_token_file("muon.tok", 9000, 64, 7), layout);
    Job *j = make_job(arguments, ranks, &transport_threads);
    int64_t n = j->table.num_parameters;
    free(muon_weights);
    muon_weights = (float *)checked_malloc(sizeof(float) * (size_t)n);
    muon_padding = muon_bytes_off = 0;
    launch(j, 0, muon_updates_body);
    end_job(j);
    return n;
}

static void test_muon_layouts(void) {
    static const struct {
        int ranks;
        const char *layout;
    } layouts[] = {{2, ""},
                   {3, ""},
                   {4, " --sharding shard_grad_op"},
                   {8, ""},                   // more ranks than blocks
                   {4, " --wrap size:40000"}, // units of 3, 3 and 2 blocks
                   {4, " --dp-replicate 2"},
                   {2, " --sharding no_shard"},
                   {3, " --cp 3 --seq 12"},
                   {4, " --pp 2 --dp-shard 2"},
                   {4, " --pp 2 --pp-schedule interleaved --accum 2 --dp-shard 2 --sharding full_shard"},
                   {2, " --tp 2"},
                   {4, " --tp 4 --sharding no_shard"},
                   {6, " --tp 2 --wrap size:40000"},
                   {16, " --tp 2 --cp 2 --pp 2 --dp-shard 2"},
                   {2, " --offload all --out "}};
    for (int tied = 0; tied < (CUDA_BUILD ? 1 : 2); tied++) {
        int64_t n = run_muon_updates(tied, 1, "");
        float *one = muon_weights;
        muon_weights = NULL;
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            char name[256], layout[256];
            int64_t differ = 0;
            if (is_short && i % 2 != (size_t)tied) continue;
            if (CUDA_BUILD && i % 6 != 4) continue;
            int needs_out = strstr(layouts[i].layout, "--out ") != NULL;
            snprintf(layout, sizeof layout, "%s%s", layouts[i].layout, needs_out ? scratch_path("muon-offload") : "");
            run_muon_updates(tied, layouts[i].ranks, layout);
            for (int64_t k = 0; k < n; k++) differ += memcmp(&muon_weights[k], &one[k], sizeof(float)) != 0;
            snprintf(name, sizeof name, "%s, %d ranks%s: Muon's updates have one rank's bits", tied ? "tied" : "untied",
                     layouts[i].ranks, layouts[i].layout);
            CHECK(name, !differ && !muon_padding && !muon_bytes_off,
                  "%" PRId64 " of %" PRId64 " weights differ; %" PRId64 " elements of padding touched; optimizer state "
                  "is off by %" PRId64 " bytes",
                  differ, n, muon_padding, muon_bytes_off);
        }
        free(one);
    }
}

// ---------------------------------------------------------------------------
// whole steps: expected, dry-run and measured traffic, losses, resuming

enum { MUON_STEPS = CUDA_BUILD ? 2 : 4 };
static double muon_losses[MUON_STEPS];

static void muon_steps_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
#ifdef HAVE_MPI
    memset(profiled, 0, sizeof profiled);
    num_profiled = 0;
#endif
    for (int step = 1; step <= MUON_STEPS; step++) {
        StepStats s = train_step(&o->trainer, step);
        if (rank == 0) muon_losses[step - 1] = s.loss;
        if (step > 1) continue;
        check_profiled_traffic(&o->trainer);
        matmul_rate(&o->trainer.parallel.dev);
        check_first_step(&o->trainer); // expected = dry run = measured on every rank, or the test ends here
    }
    if (muon_weights) collect_state(&o->trainer, STATE_MASTER, muon_weights);
    close_rank(o);
}

/* Four steps of 8 micro-batches; leaves muon_losses and muon_weights. */
static int64_t run_muon_steps(int process, int ranks, int data_ranks, const char *layout, const Transport *transport) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --batch 1 --accum %d --deterministic --lr 1e-2 --warmup 0 --steps %d "
             "--threads 1 --timeout 60 --optimizer muon%s",
             mesh_model(0), make_token_file("muon.tok", 9000, 64, 7), 8 / data_ranks, MUON_STEPS, layout);
    Job *j = make_job(arguments, ranks, transport);
    int64_t n = j->table.num_parameters;
    free(muon_weights);
    muon_weights = (float *)checked_malloc(sizeof(float) * (size_t)n);
    launch(j, process, muon_steps_body);
    end_job(j);
    return n;
}

typedef struct {
    double losses[MUON_STEPS];
    float *weights;
} MuonRun;

static MuonRun one_ranks_muon(void) {
    MuonRun one;
    run_muon_steps(0, 1, 1, "", &transport_threads);
    memcpy(one.losses, muon_losses, sizeof one.losses);
    one.weights = muon_weights;
    muon_weights = NULL;
    return one;
}

/* `bits`: the layout adds in the order of one rank, and must have its bits. Otherwise losses are near. */
static void compare_muon_steps(const MuonRun *one, int process, int ranks, int data_ranks, const char *layout, int bits,
                               const Transport *transport) {
    char name[300];
    int64_t differ = 0, n = run_muon_steps(process, ranks, data_ranks, layout, transport);
    double off = 0, bound = sizeof(floatX) == 4 ? 2e-5 : 2e-3;
    if (process) return;
    for (int i = 0; i < MUON_STEPS; i++) off = worst_of(off, fabs(muon_losses[i] / one->losses[i] - 1));
    for (int64_t i = 0; i < n; i++) differ += memcmp(&muon_weights[i], &one->weights[i], sizeof(float)) != 0;
    snprintf(name, sizeof name, "Muon, %d ranks over %s,%s: %s of one rank in %d steps, expected = dry run = measured",
             ranks, transport->name, layout, bits ? "the bits" : "losses", MUON_STEPS);
    CHECK(name, bits ? !differ && off == 0 : off <= bound,
          "losses off by %.2g <= %.0e, %" PRId64 " of %" PRId64 " weights differ, losses %.6f to %.6f", off,
          bits ? 0 : bound, differ, n, one->losses[0], one->losses[MUON_STEPS - 1]);
}

#ifdef CUDA_ON_CPU
/* Emulated GPUs with streams in another order under each seed, over both transports. */
static void test_muon_orders(const MuonRun *one) {
    static const struct {
        int by_nccl, ranks, data_ranks, bits;
        const char *layout;
    } ways[] = {{1, 2, 2, 1, " --transport nccl"},
                {0, 2, 2, 1, " --offload all"},
                {1, 2, 2, 1, " --transport nccl --offload all --sharding shard_grad_op --wrap size:30000"},
                {1, 4, 2, 0, " --transport nccl --tp 2 --dp-shard 2"}};
    const Transport *nccl = transport_find("nccl");
    uint64_t before = cuda_on_cpu.seed;
    int devices = cuda_on_cpu.devices;
    for (int i = 0; i < 4; i++) {
        if (is_short && i % 2) continue;
        cuda_on_cpu.seed = (uint64_t)i;
        cuda_on_cpu.devices = ways[i].ranks;
        compare_muon_steps(one, 0, ways[i].ranks, ways[i].data_ranks, ways[i].layout, ways[i].bits,
                           ways[i].by_nccl ? nccl : &transport_threads);
    }
    cuda_on_cpu.seed = before;
    cuda_on_cpu.devices = devices;
}
#endif

static void test_muon_steps(void) {
    static const struct {
        int ranks, data_ranks;
        const char *layout;
        int bits;
    } layouts[] = {{2, 2, "", 1},
                   {8, 4, " --pp 2 --dp-shard 2 --dp-replicate 2 --sharding full_shard", 1},
                   {4, 4, " --wrap size:40000 --sharding shard_grad_op", 1},
                   {2, 2, " --sharding no_shard", 1},
                   {4, 2, " --tp 2 --dp-shard 2 --accumulate local", 0},
                   {16, 2, " --tp 2 --cp 2 --pp 2 --dp-shard 2", 0}};
    MuonRun one = one_ranks_muon();
    int count = sizeof layouts / sizeof *layouts;
    for (int i = 0; i < count; i++)
        if (!CUDA_BUILD || i == 4 || (i == 0 && !is_short))
            compare_muon_steps(&one, 0, layouts[i].ranks, layouts[i].data_ranks, layouts[i].layout, layouts[i].bits,
                               &transport_threads);
#ifdef CUDA_ON_CPU
    test_muon_orders(&one);
#endif
    free(one.weights);
}

#ifdef HAVE_MPI
static void test_muon_mpi(int process, int processes) {
    MuonRun one = ZERO;
    if (!process) one = one_ranks_muon();
    if (processes <= 4 && processes != 3)
        compare_muon_steps(&one, process, processes, processes, "", 1, &transport_mpi);
    if (processes == 4) compare_muon_steps(&one, process, 4, 2, " --tp 2 --dp-shard 2", 0, &transport_mpi);
    if (processes == 8) compare_muon_steps(&one, process, 8, 2, " --tp 2 --pp 2 --dp-shard 2", 0, &transport_mpi);
    free(one.weights);
}
#endif

/* One rank saves after 2 of 4 steps; other layouts resume from there and end with its files. */
static void test_muon_resume(void) {
    static const SavingLayout layouts[] = {{2, " --optimizer muon", 0},
                                           {4, " --optimizer muon --dp-replicate 2 --wrap size:30000", 0},
                                           {2, " --optimizer muon --sharding no_shard --save-mode async", 0},
                                           {4, " --optimizer muon --pp 2 --dp-shard 2", 2}};
    char model[320], said[SAID], path[320];
    const char *data = strdup(make_token_file("checkpoints.tok", 3000, 64, 0));
    snprintf(model, sizeof model, "%s --optimizer muon", small_model(0));
    const char *reference = saved_run(0, "muon-saved", model, data);
    for (int i = 0; i < 4; i++)
        if (!is_short || i % 2) goes_on(0, &layouts[i], small_model(0), data, reference);

    StFiles moments = ZERO;
    int momenta = 0, first = 0, second = 0;
    snprintf(path, sizeof path, "%s/step-00000004/optimizer.safetensors", reference);
    st_add_file(&moments, path);
    for (int i = 0; i < moments.count; i++) {
        const char *name = moments.tensors[i].name;
        momenta += strstr(name, "_proj.weight.momentum_buffer") != NULL;
        first += strstr(name, ".exp_avg") != NULL && !strstr(name, ".exp_avg_sq");
        second += strstr(name, ".exp_avg_sq") != NULL;
    }
    CHECK("a checkpoint has the momentum of Muon's matrices and both moments of all other tensors",
          momenta == 35 && first == 13 && second == 13 && moments.count == 61,
          "%d, %d and %d of %d tensors, expected 35, 13 and 13 of 61", momenta, first, second, moments.count);
    st_close(&moments);

    int code = run_whole(said, 1,
                         "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --deterministic --batch 1 "
                         "--accum 8 --resume %s/step-00000002 --allow-changes --out %s",
                         small_model(0), data, reference, scratch_path("muon-refused"));
    const char *last = error_line(said);
    CHECK("a run of AdamW does not resume from a checkpoint of Muon",
          code == 1 && strstr(last, "--optimizer adamw, was muon"), "code %d: %s", code, last);
}

static void test_muon(void) {
    test_muon_fixture();
    test_muon_without_momentum();
    test_muon_layouts();
    test_muon_steps();
    if (!CUDA_BUILD) test_muon_resume();
}
