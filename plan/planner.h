/* planner.h: --plan. Every rank of a layout dry-run, all of them replayed, and what that tells of the run before it is
 * started.
 *
 * Included by train_llama3.cu behind dry_run_open, the dry run of one rank. A caller may rely on: nothing is allocated
 * of what the run would allocate, and nothing of the layout is left out: each rank is dry-run by the program's own
 * code.
 */
#include <sys/resource.h> // defines: getrusage

// ---------------------------------------------------------------------------
// the dry run of all ranks

static uint64_t script_hash(const CommEvents *s) {
    uint64_t h = HASH_START;
    for (int64_t i = 0; i < s->count; i++) {
        const CommEvent *l = &s->events[i];
        uint64_t computed, words[4];
        memcpy(&computed, &l->compute_before, sizeof computed);
        words[0] = computed, words[1] = (uint64_t)l->count,
        words[2] = (uint64_t)(uint32_t)l->name << 32 | (uint32_t)l->phase;
        words[3] = (uint64_t)(uint32_t)l->peer << 32 | (uint64_t)l->dtype << 24 |
                   (uint64_t)(l->slot << 1 | l->is_wait) << 16 | (uint64_t)l->collective << 8 | l->axis;
        for (int w = 0; w < 4; w++) h = ((h ^ h >> 29) ^ words[w]) * 0x9E3779B97F4A7C15ull;
    }
    return h;
}

/* Keeps what `rank` asks of others: as that of another rank, where that is the same. */
static void plan_keep_script(Plan *p, int rank, const CommEvents *s) {
    uint64_t hash = script_hash(s);
    int k = 0;
    while (k < p->num_scripts && (p->hashes[k] != hash || p->scripts[k].count != s->count)) k++;
    p->script_of[rank] = k;
    if (k < p->num_scripts) return;
    p->scripts = (CommEvents *)realloc(p->scripts, sizeof *p->scripts * (size_t)(k + 1));
    p->hashes = (uint64_t *)realloc(p->hashes, sizeof hash * (size_t)(k + 1));
    if (!p->scripts || !p->hashes) run_failure("out of memory");
    CommEvents *own = &p->scripts[p->num_scripts++];
    *own = *s, p->hashes[k] = hash;
    own->capacity = s->count, own->events = (CommEvent *)checked_malloc(sizeof(CommEvent) * (size_t)s->count);
    if (s->count) memcpy(own->events, s->events, sizeof(CommEvent) * (size_t)s->count);
}

/* Makes a dry run of every rank, or one for all that have the same part of the model: of each stage and of each part of
 * tensor parallelism. Other coordinates change nothing but who a rank's peers are. Parts differ where sizes do not
 * divide, and then by a row; to compare layouts one of each stage is enough. */
static void plan_open(Plan *p, const Job *j, DryRunKind kind) {
    int world = j->mesh.world;
    CommEvents script = ZERO;
    memset(p, 0, sizeof *p);
    p->mesh = &j->mesh, p->dry_run_kind = kind;
    p->class_of = (int *)checked_malloc(sizeof(int) * (size_t)world);
    p->script_of = (int *)checked_malloc(sizeof(int) * (size_t)world);
    for (int rank = 0; rank < world; rank++) {
        int alike = rank - mesh_coordinate(&j->mesh, rank, AXIS_CP) * mesh_stride(&j->mesh, AXIS_CP), c = 0;
        alike %= mesh_stride(&j->mesh, AXIS_DP_SHARD); // of the same part
        if (kind == DRY_RUN_STAGES) alike -= mesh_coordinate(&j->mesh, alike, AXIS_TP);
        if (kind != DRY_RUN_ALL && alike < rank) {
            p->class_of[rank] = p->class_of[alike], p->script_of[rank] = p->script_of[alike];
            continue;
        }
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        comm_events_clear(&script, &p->names);
        dry_run_open(dry_run, j, rank, &script);
        plan_keep_script(p, rank, &script);
        while (c < p->count && !dry_runs_alike(&dry_run->parallel.dev, &dry_run->parallel.comm, p->classes[c].dry_run,
                                               p->classes[c].comm))
            c++;
        p->class_of[rank] = c;
        if (c < p->count) {
            trainer_close(dry_run), free(dry_run);
            continue;
        }
        p->classes = (RankClass *)realloc(p->classes, sizeof(RankClass) * (size_t)(c + 1));
        if (!p->classes) run_failure("out of memory");
        RankClass *fresh = &p->classes[p->count++];
        fresh->rank = rank, fresh->trainer = dry_run, fresh->dry_run = &dry_run->parallel.dev,
        fresh->comm = &dry_run->parallel.comm;
        expected_traffic(fresh->expected, &j->config, world, rank, &j->opt, sizeof(StepReport));
    }
    free(script.events);
}

static void plan_close(Plan *p) {
    for (int c = 0; c < p->count; c++) trainer_close(p->classes[c].trainer), free(p->classes[c].trainer);
    for (int s = 0; s < p->num_scripts; s++) free(p->scripts[s].events);
    name_table_close(&p->names);
    free(p->classes), free(p->class_of), free(p->scripts), free(p->hashes), free(p->script_of);
}

// ---------------------------------------------------------------------------
// the replay of a plan's ranks, and by a cluster's clock the estimate of a step

/* Which rank the i-th to play is: where not all were dry-run, one plays for others. */
static int replay_rank(const Plan *p, int i) {
    int parts = p->dry_run_kind == DRY_RUN_PARTS ? p->mesh->size[AXIS_TP] : 1;
    return p->dry_run_kind == DRY_RUN_ALL ? i : i / parts * mesh_stride(p->mesh, AXIS_PP) + i % parts;
}

/* Every rank plays, where every one was dry-run; else one for each part of the model: with others that do the same its
 * exchanges take the same time. `problem` (size) says what is wrong where 0 is returned. `timed`: it is kept when the
 * exchanges of each stage's first rank took place. */
static int plan_replay(Replay *r, const Plan *p, const Cluster *c, char *problem, size_t size, int timed) {
    int parts = p->dry_run_kind == DRY_RUN_PARTS ? p->mesh->size[AXIS_TP] : 1,
        of_parts = parts * p->mesh->size[AXIS_PP];
    Mesh mesh = {of_parts, {parts, 1, p->mesh->size[AXIS_PP], 1, 1}};
    if (p->dry_run_kind == DRY_RUN_ALL) mesh = *p->mesh;
    const CommEvents **scripts = (const CommEvents **)checked_malloc(sizeof *scripts * (size_t)mesh.world);
    for (int i = 0; i < mesh.world; i++) scripts[i] = &p->scripts[p->script_of[replay_rank(p, i)]];
    replay_open(r, &mesh, scripts, p->mesh, c ? c->exchange : NULL, problem, size);
    free(scripts);
    for (int stage = 0; stage < mesh.size[AXIS_PP] && timed; stage++) {
        Actor *a = &r->actors[stage * mesh_stride(&mesh, AXIS_PP)];
        a->times = (LineTime *)checked_malloc(sizeof(LineTime) * (size_t)a->script->count);
    }
    return replay_run(r);
}

/* What was played, and that it fits. */
static void replay_print(FILE *f, const Plan *p, const Replay *r, double seconds) {
    int64_t lines = 0, exchanges = 0;
    if (r->mesh->world == 1) return;
    for (int i = 0; i < r->mesh->world; i++) lines += r->actors[i].script->count;
    for (int i = 0; i < r->mesh->world * (int)AXES; i++) exchanges += r->groups[i].number;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used); // in KiB
    fprintf(f,
            "  %d ranks walked and replayed in %.2f s and %.0f MB: %" PRId64
            " events (%d lists of them), every one of %" PRId64
            " collectives begins with all its members alike, every send meets its receive\n",
            r->mesh->world, seconds, (double)used.ru_maxrss * 1024 / 1e6, lines, p->num_scripts, exchanges);
}

typedef struct {
    double step, tokens; // seconds; tokens/s of all ranks
    // of the mean rank, seconds:
    double compute, waited[AXES], exchange[AXES]; // of which arithmetic; waits for exchanges; exchanges, hidden or not
    double ops[OP_COUNT];
    double most;               // arithmetic of the rank that has the most …
    int most_rank;             // … which one
    double flops, again, full; // FLOPs of the mean rank: of the step; computed again; of the step if attention saw all
                               // keys and its backward took twice its forward
    double mfu;                // flops a second, of the peak
} Estimate;

/* By a replay that went to its end. T: tokens of a sequence. */
static Estimate estimate_of(const Plan *p, const Cluster *c, const Replay *r, int64_t tokens_per_step, int T) {
    Estimate e = ZERO;
    e.step = r->seconds, e.tokens = (double)tokens_per_step / e.step;
    double share = 1.0 / r->mesh->world;
    for (int i = 0; i < r->mesh->world; i++) {
        const Actor *a = &r->actors[i];
        double computed = a->clock;
        for (int x = 0; x < AXES; x++) computed -= a->waited[x], e.waited[x] += share * a->waited[x];
        e.compute += share * computed;
        if (computed > e.most * (1 + 1e-9)) e.most = computed, e.most_rank = replay_rank(p, i);
        const Device *dry_run = p->classes[p->class_of[replay_rank(p, i)]].dry_run;
        for (int o = 0; o < OP_COUNT; o++) e.ops[o] += share * dry_run->ops[o].seconds;
        double attention[2] = {dry_run->ops[OP_ATTENTION_FORWARD].flops - dry_run->ops[OP_ATTENTION_FORWARD].recomputed,
                               dry_run->ops[OP_ATTENTION_BACKWARD].flops};
        e.flops += share * device_flops(dry_run, 0), e.again += share * device_flops(dry_run, 1);
        e.full +=
            share * (device_flops(dry_run, 0) - attention[0] - attention[1] + 3 * attention[0] * 2 * T / (T + 1.0));
    }
    for (int s = 0; s < p->num_scripts; s++) {
        double seconds[AXES] = ZERO, players = 0;
        for (int i = 0; i < r->mesh->world; i++) players += r->actors[i].script == &p->scripts[s];
        for (int64_t l = 0; l < p->scripts[s].count && players > 0; l++) {
            const CommEvent *line = &p->scripts[s].events[l];
            if (!line->is_wait && line->collective != SEND)
                seconds[line->axis] += line_seconds(r, line); // as with bytes: of what comes
        }
        for (int x = 0; x < AXES; x++) e.exchange[x] += players * share * seconds[x];
    }
    e.mfu = e.flops / e.step / c->peak;
    return e;
}

// ---------------------------------------------------------------------------
// where groups lie, and what else could be chosen

/* What a rank receives over an axis in a step, of the kind of ranks that receives most. */
static double axis_bytes(const Plan *p, int axis) {
    double bytes = 0;
    for (int k = 0; k < p->count; k++) {
        const Traffic *t = p->classes[k].comm->traffic_started[axis];
        bytes = fmax(bytes, (double)(t[ALL_GATHER].bytes + t[REDUCE_SCATTER].bytes + t[RECEIVE].bytes));
    }
    return bytes;
}

static void groups_print(FILE *f, const Cluster *c, const Plan *p) {
    const Mesh *m = p->mesh;
    for (int a = 0; a < AXES; a++) {
        int ranks = mesh_group_size(m, (Axis)a), hosts;
        if (ranks == 1 || a == AXIS_DP_SHARD) continue; // which is a part of fsdp
        hosts = group_spans(m, (Axis)a, c->ranks_per_host);
        fprintf(f, "    %-13s %6d group%s of %5d rank%s on %4d host%s", axis_names[a], m->world / ranks,
                m->world / ranks > 1 ? "s" : " ", ranks, ranks > 1 ? "s" : "", hosts, hosts > 1 ? "s" : "");
        if (c->hosts_per_rack)
            fprintf(f, " in %4d racks", group_spans(m, (Axis)a, c->ranks_per_host * c->hosts_per_rack));
        fprintf(f, ": a rank receives %10.3f GB a step %s\n", axis_bytes(p, a) / 1e9,
                hosts > 1 ? "across hosts" : "within its host");
    }
}

static double memory_needed(const Plan *p, const Cluster *c) {
    return (double)device_peak(plan_largest(p)->dry_run) + (c ? c->communicator * nccl_communicators(p->mesh) : 0);
}

typedef struct {
    char what[160];  // how it differs, as it would be typed
    Options opt;     // with a number for every axis
    double products; // as many times as fast; 1: as the cluster has them
    double memory;   // bytes of the rank with most
    Estimate e;      // with a cluster
} Trial;

static Mesh mesh_of_options(const Options *o, int world) {
    Mesh m = {world, {o->tp, o->cp, o->pp, o->dp_shard, o->dp_replicate}};
    return m;
}

/* One of each stage of `j`, which is laid out as the trial wants it, dry-run and replayed. */
static void trial_run(Trial *t, const Job *j, const Cluster *c) {
    char problem[1024];
    Plan p;
    Replay r;
    plan_open(&p, j, DRY_RUN_STAGES);
    t->memory = memory_needed(&p, c);
    if (!plan_replay(&r, &p, c, problem, sizeof problem, 0))
        run_failure("the plan's ranks do not fit each other: %s", problem);
    if (c) t->e = estimate_of(&p, c, &r, samples_per_step(&j->opt, &j->mesh) * j->opt.seq, j->opt.seq);
    replay_close(&r);
    plan_close(&p);
}

/* A trial that differs from `base` in options. 0: the model does not divide so. */
static int trial_beside(Trial *t, const Job *base) {
    char problem[1024];
    Job j = *base;
    j.opt = t->opt, j.mesh = mesh_of_options(&t->opt, base->mesh.world);
    if (j.config.lora_rank) j.config.base = base_kind(j.opt.base);
    if (!job_layout_fits(&j, problem, sizeof problem)) return 0;
    if (j.opt.cluster) cluster_open(&j.cluster, j.opt.cluster, &j.mesh, j.opt.threads, j.opt.transport);
    for (int i = 0; i < j.cluster.rates.count && j.opt.cluster; i++)
        j.cluster.ops[i].rate *=
            j.cluster.ops[i].op == OP_ATTENTION_FORWARD || j.cluster.ops[i].op == OP_ATTENTION_BACKWARD ? 1
                                                                                                        : t->products;
    trial_run(t, &j, j.opt.cluster ? &j.cluster : NULL);
    if (j.opt.cluster) cluster_close(&j.cluster);
    return 1;
}

enum { MOST_TRIALS = 32 };

/* One thing at a time chosen otherwise. Returns how many there are. */
static int trials_around(Trial *trials, const Job *j) {
    static const char *const recompute[] = {"none", "selective", "full"},
                             *const sharding[] = {"full_shard", "shard_grad_op"},
                             *const accumulate[] = {"sharded", "local"},
                             *const bases[] = {PRECISION_NAME, "int8", "int8:all"};
    const Options *o = &j->opt;
    Trial base;
    int n = 0, pp = j->mesh.size[AXIS_PP];
    memset(&base, 0, sizeof base);
    base.opt = *o, base.products = 1;
    base.opt.tp = j->mesh.size[AXIS_TP], base.opt.cp = j->mesh.size[AXIS_CP], base.opt.pp = pp,
    base.opt.dp_shard = j->mesh.size[AXIS_DP_SHARD], base.opt.dp_replicate = j->mesh.size[AXIS_DP_REPLICATE];
#define TRY(valid, change, ...)                                                                                        \
    if (valid) {                                                                                                       \
        trials[n] = base;                                                                                              \
        change;                                                                                                        \
        snprintf(trials[n].what, sizeof trials[n].what, __VA_ARGS__);                                                  \
        n += trial_beside(&trials[n], j);                                                                              \
    }
    for (int i = 0; i < 3; i++)
        TRY(strcmp(o->recompute, recompute[i]), trials[n].opt.recompute = recompute[i], "--recompute %s", recompute[i])
    for (int v = 1; v <= 16 && pp > 1; v *= 2)
        TRY(v != o->pp_chunks && v <= MAX_STAGES,
            (trials[n].opt.pp_chunks = v, trials[n].opt.pp_schedule = v > 1 ? "interleaved" : "1f1b"),
            v > 1 ? "--pp-schedule interleaved --pp-chunks %d" : "--pp-schedule 1f1b", v)
    for (int i = 0; i < 2; i++)
        TRY(mesh_group_size(&j->mesh, AXIS_FSDP) > 1 && strcmp(o->sharding, sharding[i]),
            trials[n].opt.sharding = sharding[i], "--sharding %s", sharding[i])
    for (int i = 0; i < 2; i++)
        TRY(o->accum > 1 && strcmp(o->accumulate, accumulate[i]), trials[n].opt.accumulate = accumulate[i],
            "--accumulate %s", accumulate[i])
    TRY(o->accum % 2 == 0, trials[n].opt.accum = o->accum / 2, "--accum %d", o->accum / 2)
    TRY(o->accum <= 1 << 15, trials[n].opt.accum = o->accum * 2, "--accum %d", o->accum * 2)
    TRY(o->batch % 2 == 0, (trials[n].opt.batch = o->batch / 2, trials[n].opt.accum = o->accum * 2),
        "--batch %d --accum %d", o->batch / 2, o->accum * 2)
    TRY(o->seq % (4 * j->mesh.size[AXIS_CP]) == 0, trials[n].opt.seq = o->seq / 2, "--seq %d", o->seq / 2)
    for (int i = 0; i < 3; i++)
        TRY(j->config.lora_rank && j->stored_base <= BASE_FROZEN && strcmp(o->base, bases[i]),
            trials[n].opt.base = bases[i], "--base %s", bases[i])
    for (int i = 0; i < 2; i++)
        TRY(o->cluster, trials[n].products = i ? 1.1 : 1 / 1.1, "products %s by a tenth", i ? "faster" : "slower")
#undef TRY
    return n;
}

/* The longest sequence whose rank with most memory has at most `bytes`, in steps that the mesh divides; 0: not even
 * one. */
static int longest_seq(const Job *j, const char *recompute, double bytes) {
    Trial t;
    int step = 256 * (int)max_i64(1, j->mesh.size[AXIS_CP] / 128), low = 0,
        high = j->config.max_positions / step; // low fits, high + 1 is too long
    memset(&t, 0, sizeof t);
    while (low < high) {
        int middle = (low + high + 1) / 2;
        t.opt = j->opt, t.products = 1;
        t.opt.recompute = recompute, t.opt.seq = middle * step, t.opt.cluster = NULL;
        t.opt.tp = j->mesh.size[AXIS_TP], t.opt.cp = j->mesh.size[AXIS_CP], t.opt.pp = j->mesh.size[AXIS_PP],
        t.opt.dp_shard = j->mesh.size[AXIS_DP_SHARD], t.opt.dp_replicate = j->mesh.size[AXIS_DP_REPLICATE];
        if (trial_beside(&t, j) && t.memory <= bytes) low = middle;
        else high = middle - 1;
    }
    return low * step;
}

static void longest_print(FILE *f, const Job *j, double bytes) {
    static const char *const recompute[] = {"none", "selective", "full"};
    int longest[3], any = 0;
    for (int i = 0; i < 3; i++) any |= longest[i] = longest_seq(j, recompute[i], bytes);
    if (any)
        fprintf(f,
                "  longest --seq in %.0f GB a rank, with --batch %d: %d with --recompute none, %d selective, %d full\n",
                bytes / 1e9, j->opt.batch, longest[0], longest[1], longest[2]);
    else
        fprintf(f,
                "  no --seq fits in %.0f GB a rank: more ranks, or --base int8 with adapters, make each rank's part of "
                "the weights smaller\n",
                bytes / 1e9);
}

/* What memory and time become, one thing at a time; and where there is too little memory, which of these needs less. */
static void trials_print(FILE *f, const Job *j, const Plan *p, const Estimate *e) {
    static const double sizes[] = {24e9, 40e9, 48e9, 80e9, 96e9, 141e9, 192e9};
    const Cluster *c = e ? &j->cluster : NULL;
    Trial *trials = (Trial *)checked_malloc(sizeof *trials * MOST_TRIALS), *best = NULL;
    double need = memory_needed(p, c), have = c ? c->memory : 0;
    int n = trials_around(trials, j);
    if (n)
        fprintf(f, "  if one thing were chosen otherwise%s\n",
                e ? " (memory of the rank with most, step, tokens a second)" : " (memory of the rank with most)");
    for (int i = 0; i < n; i++) {
        Trial *t = &trials[i];
        fprintf(f, "    %-40s %9.2f GB", t->what, t->memory / 1e9);
        fprintf(f, e ? "  %10.4g s  %+6.1f %%\n" : "\n", t->e.step, e ? 100 * (t->e.tokens / e->tokens - 1) : 0);
        if (t->products == 1 && t->memory <= have && need > have && (!best || t->e.tokens > best->e.tokens)) best = t;
    }
    if (have > 0 && need > have && best)
        fprintf(f, "  %.2f GB a rank do not fit in %.2f GB: %s needs %.2f GB\n", need / 1e9, have / 1e9, best->what,
                best->memory / 1e9);
    else if (have > 0 && need > have)
        fprintf(f,
                "  %.2f GB a rank do not fit in %.2f GB, nor would they with one of these: split the model over more "
                "ranks (--tp, --pp, --cp), or choose several of them\n",
                need / 1e9, have / 1e9);
    if (have > 0 && j->config.lora_rank) longest_print(f, j, have - c->communicator * nccl_communicators(p->mesh));
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes) && !c && need > 16e9;
         s++) { // of GPUs, where no cluster is named
        if (need <= sizes[s]) {
            fprintf(f, "  GPUs of %.0f GB hold it\n", sizes[s] / 1e9);
            if (j->config.lora_rank) longest_print(f, j, sizes[s]);
            break;
        }
        if (j->config.lora_rank && sizes[s] == 80e9) longest_print(f, j, sizes[s]);
        for (int i = 0; i < n; i++)
            if (trials[i].memory <= sizes[s] && trials[i].memory > (s ? sizes[s - 1] : 0))
                fprintf(f, "  GPUs of %.0f GB do not hold its %.2f GB; with %s they do: %.2f GB\n", sizes[s] / 1e9,
                        need / 1e9, trials[i].what, trials[i].memory / 1e9);
    }
    free(trials);
}

// ---------------------------------------------------------------------------
// the search: all ways to lay the run out, the fastest that fit

enum { BEST = 10 };

typedef struct {
    Job job; // of the mesh that is tried
    const Options *given;
    Trial best[BEST]; // (count) the fastest first
    int count, tried, dry_runs;
    int all;          // none is left out because the traffic formula says that it is slower
    double sequences; // of a step
    double fastest,
        arithmetic; // FLOP/s of the fastest op; seconds of arithmetic that no layout is without; 0: not known yet
} Search;

/* Memory that a layout cannot do without: weights, their gradients and AdamW's moments of this rank's part. */
static double least_memory(const Job *j, const Options *o) {
    double parameters = (double)j->table.num_trained / (o->tp * o->pp),
           frozen = (double)(j->table.num_parameters - j->table.num_trained) / (o->tp * o->pp) *
                    (j->config.base >= BASE_INT8 ? 1 : sizeof(floatX)),
           shards = (double)o->dp_shard * o->cp, full = !strcmp(o->sharding, "full_shard");
    return frozen / shards + parameters * (16 / shards + (full ? 0 : sizeof(floatX)) +
                                           (!strcmp(o->accumulate, "local") && o->accum > 1 ? 4 : 0));
}

/* Seconds that a step cannot do without, by the traffic formula: arithmetic, with the exchanges of tp and cp, for which it waits,
 * and the pipeline's bubble; or what travels over fsdp. */
static double least_seconds(const Search *s) {
    const Job *j = &s->job;
    Traffic expected[AXES][COLLECTIVES];
    double seconds[AXES] = ZERO;
    expected_traffic(expected, &j->config, j->mesh.world, 0, &j->opt, sizeof(StepReport));
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < SEND; o++) {
            double calls = (double)expected[a][o].calls, bytes = (double)expected[a][o].bytes;
            if (calls > 0) seconds[a] += calls * exchange_seconds(&j->cluster.exchange[a][o], bytes / calls);
        }
    double busy = s->arithmetic + seconds[AXIS_TP] + seconds[AXIS_CP];
    return fmax(busy * (1 + (double)(j->opt.pp - 1) / j->opt.pp_chunks / j->opt.accum), seconds[AXIS_FSDP]);
}

/* Tries a layout; of those that fit in memory the fastest are kept. Activations are computed again only where they must
 * be. */
static void search_try(Search *s, const Options *o) {
    static const char *const recompute[] = {"none", "selective", "full"};
    Job *j = &s->job;
    int given = option_given(s->given, "recompute");
    char problem[1024];
    for (int i = 0; i < (given ? 1 : 3); i++) {
        Trial t;
        double have = j->cluster.memory - j->cluster.communicator * nccl_communicators(&j->mesh), of_first = 0;
        memset(&t, 0, sizeof t);
        t.opt = *o, t.products = 1;
        if (!given) t.opt.recompute = recompute[i];
        j->opt = t.opt;
        s->tried++;
        if (least_memory(j, o) > have || !job_layout_fits(j, problem, sizeof problem)) return;
        if (s->count == BEST && !s->all && 0.98 * least_seconds(s) > s->best[BEST - 1].e.step)
            return;      // nor would it be among them. 2 %: padding's arithmetic differs from layout to layout
        if (o->pp > 1) { // the first stage, whose memory is mostly the largest, tells of many that they do not fit
            Trainer *first = (Trainer *)checked_malloc(sizeof *first);
            dry_run_open(first, j, 0, NULL);
            of_first = (double)device_peak(&first->parallel.dev);
            trainer_close(first), free(first);
        }
        if (of_first > have) continue;
        trial_run(&t, j, &j->cluster);
        for (int r = 0; r < j->cluster.rates.count && !s->dry_runs; r++)
            s->fastest = fmax(s->fastest, j->cluster.ops[r].rate);
        s->dry_runs++, s->arithmetic = t.e.flops / s->fastest; // of every layout the same but for padding
        if (t.memory > j->cluster.memory) continue;
        if (s->count == BEST && t.e.step >= s->best[BEST - 1].e.step) return;
        int at = s->count < BEST ? s->count++ : BEST - 1;
        for (; at > 0 && s->best[at - 1].e.step > t.e.step; at--) s->best[at] = s->best[at - 1];
        s->best[at] = t;
        return;
    }
}

/* The mesh is chosen: pipeline schedule, micro-batch and sharding are left. */
static void search_schedules(Search *s, Options o) {
    const Options *given = s->given;
    const Llama3Config *c = &s->job.config;
    int64_t data_ranks = (int64_t)o.dp_shard * o.dp_replicate;
    for (o.pp_chunks = 1; o.pp_chunks <= (o.pp > 1 ? MAX_STAGES : 1); o.pp_chunks *= 2)
        for (o.batch = 1; data_ranks * o.batch <= s->sequences; o.batch *= 2) {
            int runs = o.pp * o.pp_chunks, fixed = option_given(given, "pp-light-ends");
            if (fmod(s->sequences, (double)(data_ranks * o.batch)) != 0 || (int64_t)o.batch * o.seq > 1 << 30) continue;
            o.accum = (int)(s->sequences / (double)(data_ranks * o.batch));
            o.pp_schedule = o.pp_chunks > 1 ? "interleaved" : "1f1b";
            if ((option_given(given, "pp-chunks") || option_given(given, "pp-schedule")) &&
                o.pp_chunks != given->pp_chunks)
                continue;
            if (!fixed) o.pp_light_ends = o.pp > 1 && c->L % runs && (c->L + 2) % runs == 0;
            for (int full = 0; full < 2; full++) {
                if (!option_given(given, "sharding")) o.sharding = full ? "full_shard" : "shard_grad_op";
                if (!option_given(given, "accumulate")) o.accumulate = full || o.accum == 1 ? "sharded" : "local";
                if (full && (option_given(given, "sharding") || o.dp_shard * o.cp == 1)) continue;
                search_try(s, &o);
            }
        }
}

/* Every mesh of the world. Tensor parallelism stays within a host. */
static void search_run(Search *s, const Job *j) {
    const Options *given = &j->opt;
    Options o = *given;
    int world = j->mesh.world,
        fixed[MESH_AXES] = {option_given(given, "tp"), option_given(given, "cp"), option_given(given, "pp"),
                            option_given(given, "dp-shard") && given->dp_shard, option_given(given, "dp-replicate")};
    s->job = *j, s->given = given, s->sequences = (double)samples_per_step(given, &j->mesh);
    for (o.pp = 1; o.pp <= world && o.pp <= j->config.L + 2; o.pp++)
        for (o.tp = 1; o.tp <= j->cluster.ranks_per_host && o.tp * o.pp <= world; o.tp++)
            for (o.cp = 1; (int64_t)o.tp * o.cp * o.pp <= world && 2 * o.cp <= o.seq; o.cp++)
                for (o.dp_replicate = 1; (int64_t)o.tp * o.cp * o.pp * o.dp_replicate <= world; o.dp_replicate *= 2) {
                    int64_t of_replica = (int64_t)o.tp * o.cp * o.pp * o.dp_replicate;
                    int wanted = world % of_replica == 0 && o.seq % (2 * o.cp) == 0 && j->config.NKV % o.tp == 0 &&
                                 j->config.NH % o.tp == 0;
                    o.dp_shard = (int)(world / of_replica);
                    Mesh mesh = mesh_of_options(&o, world);
                    for (int a = 0; a < MESH_AXES; a++) wanted &= !fixed[a] || mesh.size[a] == j->mesh.size[a];
                    if (!wanted) continue;
                    s->job.mesh = mesh;
                    cluster_open(&s->job.cluster, given->cluster, &mesh, given->threads, given->transport);
                    search_schedules(s, o);
                    cluster_close(&s->job.cluster);
                }
}

static void search_print(FILE *f, const Search *s, double seconds) {
    const Job *j = &s->job;
    fprintf(
        f,
        "%s, %d ranks on %s, %.0f sequences of %d tokens a step: %d layouts, of which %d had to be walked, in %.1f s\n",
        s->given->model, j->mesh.world, j->cluster.name, s->sequences, s->given->seq, s->tried, s->dry_runs, seconds);
    if (!s->count) {
        fprintf(f, "none fits in %.2f GB a rank: use more ranks, a shorter --seq, or a smaller step\n",
                j->cluster.memory / 1e9);
        return;
    }
    fprintf(f, "%5s %4s %4s %9s %13s %7s %6s %6s %14s %11s %10s %10s %12s %6s\n", "tp", "cp", "pp", "dp-shard",
            "dp-replicate", "chunks", "batch", "accum", "sharding", "recompute", "memory", "step", "tokens/s", "MFU");
    for (int i = 0; i < s->count; i++) {
        const Trial *t = &s->best[i];
        const Options *b = &t->opt;
        fprintf(f, "%5d %4d %4d %9d %13d %7d %6d %6d %14s %11s %7.2f GB %8.4g s %12.0f %4.1f %%\n", b->tp, b->cp, b->pp,
                b->dp_shard, b->dp_replicate, b->pp_chunks, b->batch, b->accum, b->sharding, b->recompute,
                t->memory / 1e9, t->e.step, t->e.tokens, 100 * t->e.mfu);
    }
    const Options *b = &s->best[0].opt;
    fprintf(f,
            "the first one: --tp %d --cp %d --pp %d --dp-shard %d --dp-replicate %d --batch %d --accum %d --sharding "
            "%s --accumulate %s --recompute %s",
            b->tp, b->cp, b->pp, b->dp_shard, b->dp_replicate, b->batch, b->accum, b->sharding, b->accumulate,
            b->recompute);
    if (b->pp_chunks > 1) fprintf(f, " --pp-schedule interleaved --pp-chunks %d", b->pp_chunks);
    fprintf(f, "%s\n", b->pp_light_ends ? " --pp-light-ends" : "");
}

static void plan_search(const Job *j) {
    Search *s = (Search *)checked_malloc(sizeof *s);
    double start = seconds_now();
    if (j->cluster.memory <= 0)
        user_error("--cluster %s does not say how much memory a rank has (memory_bytes_per_host), without which "
                   "--search cannot tell what fits",
                   j->opt.cluster);
    search_run(s, j);
    search_print(stdout, s, seconds_now() - start);
    free(s);
}

// ---------------------------------------------------------------------------
// for people, and as files

static double exposed_of(const Estimate *e) {
    double sum = 0;
    for (int a = 0; a < AXES; a++) sum += e->waited[a];
    return sum;
}

static void json_add_estimate(cJSON *root, const Estimate *e) {
    cJSON *json = cJSON_AddObjectToObject(root, "estimate");
    cJSON_AddNumberToObject(json, "step_s", e->step);
    cJSON_AddNumberToObject(json, "tokens_per_s", e->tokens);
    cJSON_AddNumberToObject(json, "mfu", e->mfu);
    cJSON *rates = cJSON_AddObjectToObject(json, "flops_per_s");
    cJSON_AddNumberToObject(rates, "causal_attention", e->flops / e->step);
    cJSON_AddNumberToObject(rates, "with_recomputation", (e->flops + e->again) / e->step);
    cJSON_AddNumberToObject(rates, "full_attention", e->full / e->step);
    cJSON_AddNumberToObject(json, "compute_s", e->compute);
    cJSON_AddNumberToObject(json, "exposed_s", exposed_of(e));
    cJSON *waited = cJSON_AddObjectToObject(json, "waited_s"), *busy = cJSON_AddObjectToObject(json, "communication_s");
    for (int a = 0; a < AXES; a++) {
        if (e->exchange[a] <= 0) continue;
        cJSON_AddNumberToObject(waited, axis_names[a], e->waited[a]);
        cJSON_AddNumberToObject(busy, axis_names[a], e->exchange[a]);
    }
    cJSON *ops = cJSON_AddObjectToObject(json, "ops");
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0) cJSON_AddNumberToObject(ops, op_names[i], e->ops[i]);
}

static void estimate_print(FILE *f, const Cluster *c, const Plan *p, const Estimate *e) {
    double need = memory_needed(p, c), T = 1e-12 / e->step;
    fprintf(f,
            "  estimated step %.4g s: %.4g s arithmetic, %.4g s waiting for exchanges, of the mean rank; %.0f "
            "tokens/s; MFU %.1f %% of %.4g FLOP/s a rank\n",
            e->step, e->compute, exposed_of(e), e->tokens, 100 * e->mfu, c->peak);
    fprintf(f, "    TFLOP/s a rank: %.1f (attention as the mask lets it through, its backward 2.5 times its forward)",
            T * e->flops);
    if (e->again > 0)
        fprintf(f, "; %.1f with what is computed again (HFU %.1f %%)", T * (e->flops + e->again),
                1e14 * T * (e->flops + e->again) / c->peak);
    fprintf(f, "; %.1f (attention over all keys, backward twice its forward, as in Chowdhery et al. 2022)\n",
            T * e->full);
    fprintf(f, "    on %s: %d rank%s a host; an op has its nearest listed shape's rate, at most %.4g bytes/s\n",
            c->name, c->ranks_per_host, c->ranks_per_host > 1 ? "s" : "", c->rates.memory);
    if (c->memory > 0)
        fprintf(f, "    memory: %.2f of %.2f GB a rank%s", need / 1e9, c->memory / 1e9,
                need > c->memory ? ": does not fit" : "");
    if (c->memory > 0 && c->communicator > 0)
        fprintf(f, "; %.2f GB of it for NCCL's %d communicators", c->communicator * nccl_communicators(p->mesh) / 1e9,
                nccl_communicators(p->mesh));
    if (c->memory > 0) fprintf(f, "\n");
    groups_print(f, c, p);
    if (e->most > 1.001 * e->compute)
        fprintf(f, "    most arithmetic: rank %d, %.4g s, %.1f %% more than the mean\n", e->most_rank, e->most,
                100 * (e->most / e->compute - 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0.005 * e->step)
            fprintf(f, "    %-24s %10.4g s  %5.1f %%\n", op_names[i], e->ops[i], 100 * e->ops[i] / e->step);
    for (int a = 0; a < AXES; a++)
        if (e->exchange[a] > 0)
            fprintf(f, "    exchange over %-13s %7.4g s, %.4g s waited for  (as %s)%s\n", axis_names[a], e->exchange[a],
                    e->waited[a], c->exchange[a][ALL_GATHER].of,
                    a == AXIS_PP                                    ? "; the pipeline's bubble is in it"
                    : a == AXIS_WORLD && p->mesh->size[AXIS_PP] > 1 ? "; and what the stages end apart"
                                                                    : "");
}

/* `estimate` NULL: there is none. */
static void plan_write(FILE *f, const Plan *p, int64_t tokens_per_step, const Estimate *estimate) {
    const Mesh *m = p->mesh;
    int *leaders = (int *)checked_malloc(sizeof(int) * AXES * (size_t)m->world), key;
    cJSON *root = cJSON_CreateObject();
    json_add_mesh(root, m);
    json_add_integer(root, "tokens_per_step", tokens_per_step);
    cJSON *classes = cJSON_AddArrayToObject(root, "rank_classes");
    for (int c = 0; c < p->count; c++) cJSON_AddItemToArray(classes, class_json(p, c));
    for (int r = 0; r < m->world; r++)
        for (int a = 0; a < AXES; a++) mesh_group(m, r, (Axis)a, &leaders[r * AXES + a], &key);
    json_add_groups(root, m, leaders);
    if (estimate) json_add_estimate(root, estimate);
    else cJSON_AddNullToObject(root, "estimate");
    json_write_line(f, root);
    free(leaders);
}

#include "plan_page.h" // defines: page_write

static void write_page(const Job *j, const Plan *p, const Replay *r, const Estimate *estimate) {
    FILE *f = logger_create(j->opt.out, "plan.html");
    page_write(f, j->opt.model, p, r, estimate ? &j->cluster : NULL, estimate,
               samples_per_step(&j->opt, &j->mesh) * j->opt.seq);
    if (fclose(f)) user_error("cannot write plan.html under %s: %s", j->opt.out, strerror(errno));
}

/* Under --out as plan.json. `estimate` NULL: there is none. */
static void write_plan(const Job *j, const Plan *p, const Estimate *estimate) {
    FILE *f = logger_create(j->opt.out, "plan.json");
    plan_write(f, p, samples_per_step(&j->opt, &j->mesh) * j->opt.seq, estimate);
    if (fclose(f)) user_error("cannot write plan.json under %s: %s", j->opt.out, strerror(errno));
}

/* The timeline that the replay found, of the first rank of each stage. */
static void write_planned_trace(const Job *j, const Replay *replay) {
    FILE *f = fopen(j->opt.trace, "w");
    if (!f) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
    fputs(trace_header, f);
    for (int stage = 0; stage < j->mesh.size[AXIS_PP]; stage++) {
        int rank = stage * mesh_stride(&j->mesh, AXIS_PP);
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_open(dry_run, j, rank, NULL);
        replay_times(replay, rank, &dry_run->parallel.dev);
        trace_write_events(f, &dry_run->parallel.dev, rank, 0, 0);
        trainer_close(dry_run), free(dry_run);
    }
    fputs(trace_footer, f);
    if (fclose(f)) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
}

static void plan_main(Job *j) {
    const Cluster *cluster = j->opt.cluster ? &j->cluster : NULL;
    int64_t tokens = samples_per_step(&j->opt, &j->mesh) * j->opt.seq;
    Plan plan;
    Replay replay;
    Estimate estimate = ZERO;
    char problem[8192];
    double start = seconds_now();
    if (j->opt.search) {
        plan_search(j);
        return;
    }
    job_check_outputs(j);
    plan_open(&plan, j, DRY_RUN_ALL);
    if (!plan_replay(&replay, &plan, cluster, problem, sizeof problem, cluster && (j->opt.trace || j->opt.out)))
        run_failure("the plan's ranks do not fit each other: %s", problem);
    plan_print(stdout, j->opt.model, j->threads_per_rank, &j->table, &plan, j->opt.sharding, tokens);
    replay_print(stdout, &plan, &replay, seconds_now() - start);
    if (cluster)
        estimate = estimate_of(&plan, cluster, &replay, tokens, j->opt.seq),
        estimate_print(stdout, cluster, &plan, &estimate);
    trials_print(stdout, j, &plan, cluster ? &estimate : NULL);
    if (j->opt.out)
        write_plan(j, &plan, cluster ? &estimate : NULL), write_page(j, &plan, &replay, cluster ? &estimate : NULL);
    if (j->opt.trace) write_planned_trace(j, &replay);
    replay_close(&replay);
    plan_close(&plan);
}
