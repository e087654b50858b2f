/* test_ranks.h: any number of ranks computes the gradients, losses and norms of one rank, with the memory and the
 * traffic that are expected. Offers collect() and compare_layout() to the tests of other layouts. Part of
 * test_llama3.cu. */

static float *collected; // all gradients of the model, tensors one after the other, before the optimizer
static double collected_losses[3], collected_norm; // of all three steps; of the first
enum { COLLECT_STEPS = 3 };
static int64_t padding_touched, state_bytes, state_expected, steady_allocations, shared_differ;
static int64_t tree_sums, gradient_buffers; // in a step of rank 0; in its pool

/* Fills the pools' buffers with garbage before use, so that a forgotten wait for a gather, or padding that is not
 * cleared, shows. */
static void poison_pools(Fsdp *f) {
    for (int pool = 0; pool < POOLS; pool++)
        for (int i = 0; i < f->pools[pool].count; i++) {
            PoolBuffer *buffer = &f->pools[pool].buffers[i];
            size_t bytes = 0, element = pool == POOL_GRADIENTS ? sizeof(float) : sizeof(floatX);
            for (int u = 0; u < f->table->num_units; u++) {
                size_t of_unit = pool_bytes((PoolKind)pool, &f->units[u]);
                if ((int)f->units[u].table_unit->kind == buffer->kind && of_unit > bytes) bytes = of_unit;
            }
            char *garbage = (char *)checked_malloc(bytes);
            for (size_t at = 0; at + element <= bytes; at += element) {
                float large = 1e3f;
                floatX wrong = from_float(3.0f);
                memcpy(garbage + at, pool == POOL_GRADIENTS ? (const void *)&large : &wrong, element);
            }
            device_write(f->dev, buffer->memory, garbage, bytes);
            free(garbage);
        }
}

/* Elements of this rank's shards that belong to no tensor and are not zero. */
static int64_t count_touched_padding(const Fsdp *f) {
    int64_t touched = 0;
    for (int u = 0; u < f->table->num_units; u++) {
        const FsdpUnit *unit = &f->units[u];
        if (unit->table_unit->frozen) continue;
        char *owned = (char *)checked_malloc((size_t)unit->state_count);
        ShardPiece p;
        for (int i = 0; next_state_piece(f, &i, &p);)
            if (p.unit == unit) memset(owned + p.at, 1, (size_t)p.count);
        const float *state[4] = {unit->master, unit->grad, unit->exp_avg, unit->exp_avg_sq};
        for (int k = 0; k < (unit->table_unit->has_muon ? 3 : 4); k++) { // there exp_avg_sq has no padding
            float *have = floats_on_host(f->dev, state[k], unit->state_count);
            for (int64_t e = 0; e < unit->state_count; e++) touched += !owned[e] && have[e] != 0;
            free(have);
        }
        free(owned);
    }
    return touched;
}

/* What this rank owns of a kind of state, to its place in the whole model's: (num_parameters). */
static void collect_state(Trainer *trainer, StateKind kind, float *all) {
    ShardPiece p;
    for (int i = 0; next_unique_piece(&trainer->parallel.fsdp, &i, &p);) {
        int64_t begin = 0, whole, run;
        for (int t = 0; t < p.tensor->index; t++)
            begin += trainer->job->table.tensors[t].rows * trainer->job->table.tensors[t].cols;
        for (int64_t at = 0; at < p.count; at += run) {
            run = min_i64(p.count - at, tensor_run(p.tensor, p.first + at, &whole));
            device_read(&trainer->parallel.dev, all + begin + whole, (float *)state_of(p.unit, kind) + p.at + at,
                        sizeof(float) * (size_t)run);
        }
    }
#ifdef HAVE_MPI
    if (trainer->parallel.comm.transport == &transport_mpi)
        MPI_Allreduce(MPI_IN_PLACE, all, (int)trainer->job->table.num_parameters, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
}

/* What several ranks have the whole gradient of, has the same bits on each: norms over tp, a tied weight on the first
 * and the last stage. */
static void compare_shared_gradients(Trainer *trainer) {
    uint64_t mine[2] = {HASH_START, HASH_START},
             *all = (uint64_t *)checked_malloc(sizeof mine * (size_t)trainer->parallel.mesh.world);
    ShardPiece p;
    for (int i = 0; next_state_piece(&trainer->parallel.fsdp, &i, &p);) {
        int is_norm = p.tensor->row->split == SPLIT_NONE;
        int is_tied = p.tensor->index == 0 && trainer->model.table.part.tied_head_copy;
        if (!is_norm && !is_tied) continue;
        int shared = is_norm ? 0 : 1;
        float *have = floats_on_host(&trainer->parallel.dev, p.unit->grad + p.at, p.count);
        mine[shared] = hash_bytes(mine[shared], have, sizeof(float) * (size_t)p.count);
        free(have);
    }
    int stages = trainer->parallel.mesh.size[AXIS_PP];
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "hashes", mine, all, sizeof mine);
    for (int i = 0; i < trainer->parallel.rank; i++) {
        const Mesh *mesh = &trainer->parallel.mesh;
        if (i / mesh->size[AXIS_TP] == trainer->parallel.rank / mesh->size[AXIS_TP])
            __atomic_fetch_add(&shared_differ, all[2 * i] != mine[0], __ATOMIC_RELAXED);
        if (trainer->model.table.part.tied_head_copy && mesh_coordinate(mesh, i, AXIS_PP) == 0 &&
            mesh_member(mesh, i, AXIS_PP, stages - 1) == trainer->parallel.rank)
            __atomic_fetch_add(&shared_differ, all[2 * i + 1] != mine[1], __ATOMIC_RELAXED);
    }
    free(all);
}

static int64_t frozen_changed;

/* The hash of all frozen weights. */
static uint64_t frozen_hash(const Fsdp *f) {
    uint64_t hash = HASH_START;
    for (int u = 0; u < f->table->num_units; u++) {
        size_t bytes = sharded_bytes(f, &f->units[u]);
        if (!f->units[u].table_unit->frozen) continue;
        void *have = on_host(f->dev, f->units[u].sharded_weights, bytes);
        hash = hash_bytes(hash, have, bytes);
        free(have);
    }
    return hash;
}

/* What MPI's profiling interface saw of the first step, against the traffic formula. */
static void check_profiled_traffic(const Trainer *trainer) {
#ifdef HAVE_MPI
    Traffic expected[AXES][COLLECTIVES];
    if (trainer->parallel.comm.transport != &transport_mpi) return;
    expected_traffic(expected, &trainer->job->config, trainer->parallel.mesh.world, trainer->parallel.rank,
                     &trainer->job->run, sizeof(StepReport));
    for (int a = 0; a < AXES; a++)
        for (int op = 0; op < COLLECTIVES; op++) {
            int c = 0;
            while (c < num_profiled && profiled[c].comm != trainer->parallel.comm.groups[a].mpi) c++;
            Traffic none = {0, 0}, seen = c < num_profiled ? profiled[c].of[op] : none;
            if (op == ALL_TO_ALL) continue; // MPI sees it as a reduce-scatter
            if (op == REDUCE_SCATTER) {
                expected[a][op].calls += expected[a][ALL_TO_ALL].calls;
                expected[a][op].bytes += expected[a][ALL_TO_ALL].bytes;
            }
            if (!traffic_equal(expected[a][op], seen))
                run_failure("over %s MPI's profiling interface saw %" PRId64 " calls and %" PRId64
                            " bytes of %s, expected %" PRId64 " and %" PRId64,
                            axis_names[a], seen.calls, seen.bytes, collective_names[op], expected[a][op].calls,
                            expected[a][op].bytes);
        }
#else
    (void)trainer;
#endif
}

/* Bytes of weights, gradients and optimizer state that this rank should hold. */
static int64_t expected_state_bytes(const Trainer *trainer) {
    const Device *dev = &trainer->parallel.dev;
    const Fsdp *fsdp = &trainer->parallel.fsdp;
    const RunSettings *opt = &trainer->job->run;
    int sharded = opt->sharding != NO_SHARD;
    // local accumulation adds an unsharded gradient
    int local = opt->accumulate == ACCUMULATE_LOCALLY && opt->accum > 1 && fsdp->ranks > 1 && sharded;
    // an offloaded bf16 copy of the weights lies with the master weights
    int copy_bytes = sizeof(floatX) == 2 && opt->offload == OFFLOAD_ALL ? 2 : 0;
    int64_t bytes = 0;
    for (int i = 0; i < dev->rec.num_buffers; i++)
        if (dev->rec.buffers[i].category <= MEM_OPTIMIZER) bytes += dev->rec.buffers[i].count * RED_ZONE;
    for (int u = 0; u < trainer->model.table.num_units; u++) {
        int64_t padded = fsdp->units[u].padded;
        if (trainer->model.table.units[u].frozen) bytes += round_up((int64_t)sharded_bytes(fsdp, &fsdp->units[u]), 256);
        else bytes += (16 + copy_bytes) * padded / (sharded ? fsdp->ranks : 1) + (local ? 4 * padded : 0);
        // Muon's matrices have no second moment
        bytes -= 4 * fsdp->units[u].state_count - round_up(4 * fsdp->units[u].adamw_count, 256);
    }
    return bytes;
}

static void ranks_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    Fsdp *fsdp = &trainer->parallel.fsdp;
    poison_pools(fsdp);
    uint64_t frozen = frozen_hash(fsdp);
#ifdef HAVE_MPI
    memset(profiled, 0, sizeof profiled);
    num_profiled = 0;
#endif
    // with several threads, those of other ranks may be anywhere in their step
    int alone = trainer->parallel.mesh.world == 1 || j->transport != &transport_threads;
    const int64_t *counter = alone ? &allocations : &own_allocations;
    for (int step = 1; step <= COLLECT_STEPS; step++) {
        int64_t before = *counter;
        StepStats s = train_step(trainer, step);
        if (rank == 0) collected_losses[step - 1] = s.loss;
        if (rank == 0 && step == 1) collected_norm = s.grad_norm;
        if (step == 3) __atomic_fetch_add(&steady_allocations, *counter - before, __ATOMIC_RELAXED);
        if (step > 1) continue;
        if (rank == 0) tree_sums = trainer->parallel.dev.rec.ops[OP_TREE_SUM].calls;
        if (rank == 0) gradient_buffers = fsdp->pools[POOL_GRADIENTS].count;
        check_profiled_traffic(trainer);
        matmul_rate(&trainer->parallel.dev);
        check_first_step(trainer); // expected = dry run = measured, or the test ends here
        collect_state(trainer, STATE_GRAD, collected);
        compare_shared_gradients(trainer);
    }
    __atomic_fetch_add(&padding_touched, count_touched_padding(fsdp), __ATOMIC_RELAXED);
    __atomic_fetch_add(&frozen_changed, frozen_hash(fsdp) != frozen, __ATOMIC_RELAXED);
    if (rank == 0) {
        const Arena *arenas = trainer->parallel.dev.arenas;
        state_bytes = (int64_t)(arenas[MEM_PARAMS].peak + arenas[MEM_GRADS].peak + arenas[MEM_OPTIMIZER].peak);
        state_expected = expected_state_bytes(trainer);
    }
    close_rank(o);
}

/* Runs three steps; leaves gradients of the first, losses of all, and the witnesses' figures. */
static int64_t collect(const char *arguments, int process, int world, const Transport *transport) {
    Job *j = make_job(arguments, world, transport);
    int64_t n = j->table.num_parameters;
    free(collected);
    collected = (float *)checked_malloc(sizeof(float) * (size_t)n);
    padding_touched = steady_allocations = shared_differ = frozen_changed = 0;
    launch(j, process, ranks_body);
    end_job(j);
    return n;
}

typedef struct {
    float *grads;
    double losses[3], norm;
} OneRank; // gradients of the first of three steps, losses of all, norm of the first

static OneRank collect_one_rank(const char *arguments) {
    OneRank one;
    collect(arguments, 0, 1, &transport_threads);
    one.grads = collected;
    one.norm = collected_norm;
    memcpy(one.losses, collected_losses, sizeof one.losses);
    collected = NULL;
    return one;
}

typedef struct {
    double error, ratio, loss, norm;
    int64_t padding, allocations, bytes;
} Difference; // worst of all tensors; bytes: of state that should not be there

/* What the last collect() differs in from one rank; `model`: its directory. */
static Difference difference_from(const OneRank *one, const char *model) {
    Difference d = ZERO;
    TensorTable t;
    Llama3Config c = config_load(model);
    table_open(&t, &c, 0, &WHOLE_MODEL);
    int64_t at = 0;
    for (int i = 0; i < t.num_tensors; i++) {
        int64_t m = t.tensors[i].rows * t.tensors[i].cols;
        double size = fmax(norm_of(one->grads + at, m), 1e-20);
        d.error = worst_of(d.error, norm_of_difference(collected + at, one->grads + at, 1, m) / size);
        d.ratio = worst_of(d.ratio, fabs(norm_of(collected + at, m) / size - 1));
        at += m;
    }
    for (int i = 0; i < COLLECT_STEPS; i++) d.loss = worst_of(d.loss, fabs(collected_losses[i] / one->losses[i] - 1));
    d.norm = fabs(collected_norm / one->norm - 1);
    d.padding = padding_touched;
    d.allocations = steady_allocations;
    d.bytes = state_bytes - state_expected;
    table_close(&t);
    return d;
}

/* ranks × accum × B samples of one step, against one rank that takes them one at a time. */
static void compare_layout(const char *model, int process, int world, int accum, int B, const Transport *transport,
                           const char *more) {
    char arguments[1024], layout[200], name[400], path[300];
    const char *common = "--seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60";
    const char *data = make_token_file("ranks.tok", 6000, 64, 7);
    OneRank one = ZERO;
    snprintf(path, sizeof path, "%s/%s", FIXTURES, model);
    snprintf(arguments, sizeof arguments, "--model %s --data %s %s --threads 1 --batch 1 --accum %d", path, data,
             common, world * accum * B);
    if (process == 0) one = collect_one_rank(arguments); // the first process compares
    snprintf(arguments, sizeof arguments, "--model %s --data %s %s --batch %d --accum %d %s", path, data, common, B,
             accum, more);
    int64_t n = collect(arguments, process, world, transport);
    if (process != 0) return;
    Difference d = difference_from(&one, path);
    double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    snprintf(layout, sizeof layout, "%s, %d ranks x accum %d x B %d over %s%s", model, world, accum, B, transport->name,
             more);
    snprintf(name, sizeof name, "%s: gradients of one rank", layout);
    CHECK(name, d.error <= bound && d.ratio <= bound,
          "worst tensor of %" PRId64 " parameters %.2g, norm ratio off by %.2g, <= %.0e", n, d.error, d.ratio, bound);
    snprintf(name, sizeof name, "%s: losses of three steps of one rank", layout);
    CHECK(name, d.loss <= (sizeof(floatX) == 4 ? 1e-5 : 3e-3), "off by %.2g", d.loss);
    snprintf(name, sizeof name, "%s: gradient norm of one rank", layout);
    CHECK(name, d.norm <= bound, "ratio off by %.2g", d.norm);
    snprintf(name, sizeof name,
             "%s: padding stays zero, state is 16 bytes a padded parameter over ranks, no allocation in a step",
             layout);
    CHECK(name, d.padding == 0 && d.bytes == 0 && d.allocations == 0,
          "%" PRId64 " touched, %" PRId64 " of %" PRId64 " bytes, %" PRId64 " allocations", d.padding, state_bytes,
          state_expected, d.allocations);
    free(one.grads);
}

/* Micro-batches whose matmuls add to the step's sum, against --deterministic, which adds up separate gradients. */
static void compare_accumulation(const char *model, int world, const char *more) {
    char arguments[1024], path[300], name[300];
    const char *data = make_token_file("ranks.tok", 6000, 64, 7);
    snprintf(path, sizeof path, "%s/%s", FIXTURES, model);
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 2 --accum "
             "5 %s --deterministic",
             path, data, more);
    collect(arguments, 0, world, &transport_threads);
    OneRank separate = {collected, {collected_losses[0], collected_losses[1], collected_losses[2]}, collected_norm};
    int64_t separate_sums = tree_sums;
    collected = NULL;
    *strstr(arguments, "--deterministic") = 0;
    int64_t n = collect(arguments, 0, world, &transport_threads);
    Difference d = ZERO;
    if (!strstr(more, "--lora-rank")) d = difference_from(&separate, path); // its table has no adapters
    d.norm = fabs(collected_norm / separate.norm - 1);
    double loss = fabs(collected_losses[2] / separate.losses[2] - 1), loss_bound = sizeof(floatX) == 4 ? 1e-5 : 3e-3;
    double bound = 1e-5;
    snprintf(name, sizeof name, "%s, %d ranks%s: gradients that matmuls accumulate are those of separate sums", model,
             world, more);
    CHECK(name, d.error <= bound && d.norm <= bound && loss <= loss_bound && padding_touched == 0,
          "worst tensor of %" PRId64 " parameters %.2g, norm %.2g, <= %.0e; third loss %.2g <= %.0e; %" PRId64
          " elements of padding",
          n, d.error, d.norm, bound, loss, loss_bound, padding_touched);
    snprintf(name, sizeof name, "%s, %d ranks%s: no buffer for a micro-batch's gradient, no pass that adds it", model,
             world, more);
    // several ranks still sum what arrives, once per unit and step
    CHECK(name, gradient_buffers == 0 && tree_sums < (world == 1 ? 1 : separate_sums / 4),
          "%" PRId64 " buffers, %" PRId64 " sums instead of %" PRId64, gradient_buffers, tree_sums, separate_sums);
    free(separate.grads);
}

static void test_accumulation(void) {
    compare_accumulation("odd", 1, "");
    compare_accumulation("tied", 1, " --recompute full --wrap size:40000");
    compare_accumulation("odd", 1, " --lora-rank 3");
    compare_accumulation("odd", 3, " --accumulate local");
    compare_accumulation("tied", 2, " --accumulate local --sharding no_shard");
}

static void test_ranks(void) {
    static const int worlds[] = {1, 2, 3, 4, 8};
    for (int tied = 0; tied < 2; tied++)
        for (int B = 1; B <= 2; B++)
            for (int w = 0; w < 5; w++)
                compare_layout(tied ? "tied" : "odd", 0, worlds[w], 48 / worlds[w] / B, B, &transport_threads, "");
    compare_layout("odd", 0, 3, 1, 1, &transport_threads, "");
    compare_layout("odd", 0, 8, 1, 2, &transport_threads, "");
    compare_layout("base", 0, 2, 1, 2, &transport_threads, " --slots 3");
    compare_layout("odd", 0, 3, 4, 1, &transport_threads, " --accumulate local");
    compare_layout("tied", 0, 2, 3, 2, &transport_threads, " --accumulate local");
    compare_layout("odd", 0, 2, 1, 2, &transport_threads, " --accumulate local");
    test_accumulation();
}

/* The layouts that planted faults are tried on. */
static void test_faults(void) {
    compare_layout("odd", 0, 3, 2, 2, &transport_threads, "");
    compare_layout("odd", 0, 4, 1, 1, &transport_threads, "");
    compare_layout("odd", 0, 2, 2, 1, &transport_threads, " --accumulate local");
    compare_layout("odd", 0, 4, 2, 1, &transport_threads, " --dp-replicate 2 --recompute full");
    compare_layout("odd", 0, 3, 2, 1, &transport_threads, " --sharding no_shard");
    compare_layout("odd", 0, 2, 2, 1, &transport_threads, " --sharding shard_grad_op --recompute selective");
    compare_accumulation("odd", 1, "");
    compare_accumulation("odd", 3, " --accumulate local");
}
