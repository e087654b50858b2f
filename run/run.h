/* run.h: a rank's run from its job to its first step: what it allocates, the dry run before it, and what is checked.
 *
 * Included by train_llama3.cu behind the step and what else a rank does. A caller may rely on: what is dry-run is what
 * runs, by the same code; behind check_first_step law, dry run and wire are equal, or the run has ended.
 */

/* Allocates everything a rank needs, on a dry-run device or a real one. */
static void run_allocate(Run *r, const Job *j) {
    size_t tokens = sizeof(int32_t) * (size_t)j->opt.batch * (size_t)j->opt.seq,
           timeline = sizeof(Event) * (size_t)r->dev.max_events;
    if (j->task == DO_PLAN && timeline)
        r->dev.events = (Event *)checked_malloc(timeline); // of the dry run itself; the plan is of a run without
    else if (timeline && r->dev.dry_run) arena_alloc(&r->dev, MEM_HOST, "timeline", timeline);
    else if (timeline) r->dev.events = (Event *)arena_alloc(&r->dev, MEM_HOST, "timeline", timeline);
    r->sums = (ExactSum *)arena_alloc(&r->dev, MEM_WORKSPACE, "sums of the step", sizeof(ExactSum) * SUMS);
    r->reports =
        (StepReport *)arena_alloc(&r->dev, MEM_HOST, "step reports", sizeof(StepReport) * (size_t)j->mesh.world);
    r->figures = (RankFigures *)arena_alloc(&r->dev, MEM_HOST, "figures of all ranks",
                                            sizeof(RankFigures) * (size_t)j->mesh.world);
    Sharding how = sharding_of(&j->opt);
    fsdp_open(&r->fsdp, &r->comm, r->table, r->whole_config, &how, r->training);
    if (j->task != DO_EXPORT)
        model_open(r, j->opt.batch, j->opt.seq / r->mesh.size[AXIS_CP],
                   j->task == DO_GENERATE ? (int)j->prompt_length + j->opt.max_tokens : 0);
    r->eval_inputs = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "token batches", tokens);
    r->eval_targets = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "token batches", tokens);
    if (j->opt.doc_mask) r->eval_docs = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "documents", tokens);
    r->eval_raw = (char *)arena_alloc(&r->dev, MEM_HOST, "raw window", 5 * ((size_t)j->opt.seq + 1));
    int trains = j->task == DO_TRAIN || j->task == DO_PLAN,
        exports = j->opt.export_dir && (j->task == DO_TRAIN || j->task == DO_EXPORT);
    saver_open(&r->saver, &r->fsdp, r->whole_config, r->whole, &j->opt);
    r->saver.tokenizer = j->tokenizer_path[0] ? j->tokenizer_path : NULL;
    r->saver.base_fingerprint = j->base_fingerprint;
    if (trains && j->opt.out) checkpoint_prepare(&r->saver, &j->resume_from);
    if (exports) export_prepare(&r->saver);
    saver_allocate(&r->saver);
    if (!r->training) return;
    size_t samples = sizeof(int64_t) * (size_t)j->opt.accum * (size_t)j->opt.batch * (size_t)j->mesh.world;
    if (j->opt.out) r->samples = (int64_t *)arena_alloc(&r->dev, MEM_HOST, "samples of all ranks", samples);
    r->progress = j->resume_from.progress;
    r->progress.data_fingerprint = j->data.fingerprint;
    if (j->resume_from.data_changed) r->progress.epoch = r->progress.samples_in_epoch = 0;
    Sampler s = {j->data.windows,
                 (uint64_t)j->opt.seed,
                 !strcmp(j->opt.tail, "pad"),
                 r->mesh.size[AXIS_DP_SHARD],
                 r->mesh.size[AXIS_DP_REPLICATE],
                 mesh_coordinate(&r->mesh, r->rank, AXIS_DP_SHARD),
                 mesh_coordinate(&r->mesh, r->rank, AXIS_DP_REPLICATE),
                 j->opt.accum,
                 j->opt.batch,
                 how.accumulate_locally,
                 r->progress.step,
                 r->progress.epoch,
                 r->progress.samples_in_epoch};
    LoaderOptions options = {j->opt.seq,
                             j->opt.doc_mask,
                             r->mesh.size[AXIS_CP],
                             mesh_coordinate(&r->mesh, r->rank, AXIS_CP),
                             r->progress.step,
                             j->opt.steps,
                             j->opt.workers,
                             j->cores_per_rank};
    loader_open(&r->loader, &r->dev, &j->data, &s, &options);
}

static void run_close(Run *r) {
    if (r->training) loader_close(&r->loader, &r->dev);
    saver_close(&r->saver);
    if (!r->dev.dry_run) ops_close(&r->dev);
    if (r->dev.dry_run) free(r->dev.events);
    free(r->layout);
    free(r->hosts);
    free(r->model.all);
    pipeline_close(&r->pipe);
    device_forget_event(r->model.exchange.arrived);
    table_close(&r->part);
    fsdp_close(&r->fsdp);
    comm_close(&r->comm);
    device_close(&r->dev);
}

static void run_bind(Run *r, const Job *j, int rank) {
    memset(r, 0, sizeof *r);
    r->opt = &j->opt;
    r->whole_config = &j->config, r->whole = &j->table;
    r->config = &r->part_config, r->table = &r->part;
    r->data = &j->data;
    r->val = &j->val;
    r->resume_from = &j->resume_from;
    r->mesh = j->mesh;
    r->rank = rank;
    r->training = j->task == DO_TRAIN || j->task == DO_PLAN;
    const Options *o = &j->opt;
    ModelPart part = {j->mesh.size[AXIS_TP],
                      mesh_coordinate(&j->mesh, rank, AXIS_TP),
                      j->mesh.size[AXIS_PP],
                      mesh_coordinate(&j->mesh, rank, AXIS_PP),
                      o->pp_chunks,
                      o->pp_light_ends,
                      j->config.tied && (j->mesh.size[AXIS_PP] > 1 || o->deterministic)};
    schedule_open(&r->pipe.schedule, part.pp, part.pp_rank, part.virtual_stages, o->accum);
    table_open(&r->part, &j->config, number_after_colon(j->opt.wrap, "size"), &part);
    r->part_config = config_of_part(&j->config, &part);
}

/* Which categories of memory live in the slow tier: bits by MemCategory. */
static unsigned offloaded(const Options *o) {
    unsigned optimizer = 1u << MEM_OPTIMIZER, all = optimizer | 1u << MEM_PARAMS | 1u << MEM_GRADS;
    return !strcmp(o->offload, "all") ? all : !strcmp(o->offload, "optimizer") ? optimizer : 0;
}

/* One step of the rank with the arithmetic off: its memory, FLOPs and traffic; by a cluster's clock its time. */
static void dry_run_open_events(Run *r, const Job *j, int rank, int64_t max_events, Script *script) {
    int64_t targets;
    run_bind(r, j, rank);
    device_open_dry_run(&r->dev, j->threads_per_rank, offloaded(&j->opt));
    r->dev.deterministic = j->opt.deterministic;
    r->dev.gpu = job_gpu_of_rank(j, rank), r->dev.by_nccl = j->transport != j->host_transport;
    ops_open(&r->dev, 0);
    r->dev.max_events = max_events;
    comm_open_dry_run(&r->comm, &r->dev, &j->mesh, rank);
    run_allocate(r, j);
    fsdp_init_weights(&r->fsdp, 0);
    if (r->fsdp.fingerprints) fsdp_check_replicas(&r->fsdp, 0);
    memset(r->dev.ops, 0, sizeof r->dev.ops);
    r->dev.num_events = 0;
    if (j->opt.cluster) r->dev.rates = &j->cluster.rates; // from here on the clock runs
    r->comm.script = script;
    if (r->training) train_step(r, r->progress.step + 1);
    else if (j->task == DO_EVAL) evaluate(r, &j->val, 1, &targets);
    else if (j->task == DO_GENERATE) generate(r, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (script) script->rest = r->dev.clock - script->computed;
    if (r->training) matmul_rate(&r->dev);
}

/* With --trace twice: the first dry run counts the events of a step, which tells how large the timeline is. `script`:
 * where the rank's exchanges are noted; NULL: nowhere. */
static void dry_run_open(Run *r, const Job *j, int rank, Script *script) {
    dry_run_open_events(r, j, rank, 0, script);
    if (!j->opt.trace || script) return;
    int64_t of_step = r->dev.num_events + 2; // and a validation's, and a replica check's
    run_close(r);
    dry_run_open_events(r, j, rank, j->task == DO_PLAN ? of_step : min_i64(MAX_EVENTS, of_step * j->opt.steps), NULL);
}

static void check_memory(const Job *j, const Device *dry_run) {
    int sharing = j->transport == j->host_transport ? j->local_ranks : 1; // a device: all of this host, unless each has its own
    double need = (double)device_need(dry_run) * sharing;
    if (need > j->available_memory)
        user_error("%d rank%s of " DEVICE_NAME
                   " need %.2f GB, it has %.2f GB: use more of them, a smaller --batch or --seq, --recompute full, or "
                   "a smaller model (--plan shows what takes how much)",
                   sharing, sharing > 1 ? "s" : "", need / 1e9, j->available_memory / 1e9);
    double pinned = (double)pinned_need(dry_run) * j->local_ranks, have = pinned_memory();
    if (pinned > have)
        user_error("%.2f GB of this host's memory would be pinned by its %d rank%s, %.2f GB are free: use more hosts, "
                   "or offload less",
                   pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", have / 1e9);
}

/* All ranks were started alike, with the same data; tells which is not. */
static void check_agreement(Run *r) {
    char *text;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    options_write(r->opt, f);
    fclose(f);
    uint64_t mine =
        hash_bytes(hash_bytes(HASH_START, text, length), &r->data->fingerprint, sizeof r->data->fingerprint) ^
        r->resume_from->fingerprint;
    uint64_t *all = (uint64_t *)checked_malloc(sizeof mine * (size_t)r->mesh.world);
    all_gather_now(&r->comm, AXIS_WORLD, "options and data", &mine, all, sizeof mine);
    for (int i = 1; i < r->mesh.world; i++)
        if (all[i] != all[0])
            user_error("rank %d was started with other options, other data or another checkpoint than rank 0: start "
                       "all ranks alike",
                       i);
    free(all);
    free(text);
}

static void print_banner(const Job *j, const Run *r, const Run *dry_run) {
    size_t offloaded = device_arenas(&dry_run->dev, 1);
    flockfile(stdout); // whole lines: another rank may be about to end the run with a sentence of its own
    printf("%s: %.1f M parameters, %s, %d rank%s x %d thread%s over %s, %s over %d", j->opt.model,
           (double)j->table.num_parameters / 1e6, PRECISION_NAME, j->mesh.world, j->mesh.world > 1 ? "s" : "",
           j->threads_per_rank, j->threads_per_rank > 1 ? "s" : "", j->transport->name, j->opt.sharding, r->fsdp.ranks);
    if (r->fsdp.replicas > 1) printf(", %d replicas", r->fsdp.replicas);
    printf(": %.1f MB a rank", (double)device_peak(&dry_run->dev) / 1e6);
    if (offloaded)
        printf(" and %.1f MB " SLOW_TIER "%s", (double)offloaded / 1e6,
               SLOW_TIER_COMPUTES && is_in_memory(j->opt.out) ? ", but those lie in memory: --out is a tmpfs" : "");
    printf("\n");
    layout_print(&j->mesh, r->layout, r->hosts, stdout);
    if (r->comm.library_memory > 0)
        printf("beside what is planned, NCCL took %.1f MB of each GPU\n", r->comm.library_memory / 1e6);
    if (j->task == DO_TRAIN)
        printf("%" PRId64 " samples of %d tokens, read by %d worker%s a rank; a step takes %d x %d x %d = %" PRId64
               " of them; weights %s\n",
               j->data.windows, j->opt.seq, r->loader.num_workers, r->loader.num_workers > 1 ? "s" : "",
               mesh_data_ranks(&j->mesh), j->opt.accum, j->opt.batch, sampler_global_batch(&r->loader.sampler),
               j->has_weights   ? "read from the model's directory"
               : j->resume_from.dir[0] ? "of the checkpoint"
                                : "drawn at random");
    if (j->resume_from.dir[0])
        printf("goes on from %s, read in %.2f s: %" PRId64 " step%s, %" PRId64 " samples so far%s%s\n", j->resume_from.dir,
               r->load_seconds, j->resume_from.progress.step, j->resume_from.progress.step == 1 ? "" : "s", j->resume_from.progress.samples,
               j->resume_from.changes ? "; with changes: " : "", j->resume_from.changes ? j->resume_from.changes : "");
    fflush(stdout);
    funlockfile(stdout);
}

/* From the options alone: a mesh that was made of them wrongly (replicas flattened into one group, as it happened to
 * others) must not make the law. */
static void law_of(Traffic law[AXES][COLLECTIVES], const Llama3Config *c, int world, int rank, const Options *o) {
    Sharding how = sharding_of(o);
    law_of_step(law, c, world, rank, o, &how, sizeof(StepReport));
}

/* Law, dry run and wire, memory by the dry run and in use: after the first step, on every rank. */
static void check_first_step(Run *r, const Run *dry_run) {
    Ledger l = ZERO;
    law_of(l.law, r->whole_config, r->mesh.world, r->rank, r->opt);
    memcpy(l.dry_run, dry_run->comm.traffic_started, sizeof l.dry_run);
    memcpy(l.wire, r->comm.wire, sizeof l.wire);
    for (int c = 0; c < MEM_CATEGORIES; c++)
        l.dry_run_memory[c] = dry_run->dev.arenas[c].peak, l.measured[c] = r->dev.arenas[c].peak;
    if (r->rank == 0 && r->opt->out) {
        FILE *f = logger_create(r->opt->out, "ledger.json");
        ledger_write(&l, &dry_run->dev, f);
        fclose(f);
    }
    ledger_check(&l, r->rank);
}
