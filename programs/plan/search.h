/* search.h: --search: every layout of the ranks on a cluster, and the fastest that fit in memory. */
#ifndef SEARCH_H
#define SEARCH_H
#include "alternatives.h" // defines: Layout, layout_simulate, mesh_of_options

enum { BEST = 10 };

typedef struct {
    Job job;           // of the mesh that is being tried
    const char *path;  // of the cluster file
    Cluster cluster;   // its rates
    const Job *given;  // as the user laid it out
    Layout best[BEST]; // (count) fastest first
    int count, tried, dry_runs;
    int keeps_slow;       // do not leave out layouts that the traffic formula shows to be slower; for tests
    double sequences;     // per step, the same for all layouts
    double fastest_op;    // FLOP/s of the fastest op
    double least_compute; // seconds of arithmetic that no layout can avoid; 0: not known yet
} Search;

/* Memory that a layout cannot do without: weights, gradients and optimizer state of this rank's part, 16 bytes per
 * trained parameter, with Muon at least 12, and the copies that its sharding keeps. */
static double least_memory(const Job *j, const RunSettings *run) {
    double split = (double)run->tp * run->pp, shards = (double)run->dp_shard * run->cp;
    double trained = (double)j->table.num_trained / split;
    double frozen = (double)(j->table.num_parameters - j->table.num_trained) / split;
    double bytes_per_frozen = j->config.base >= BASE_INT8 ? 1 : sizeof(floatX);
    double unsharded = run->sharding == FULL_SHARD ? 0 : sizeof(floatX);
    if (run->accumulate == ACCUMULATE_LOCALLY && run->accum > 1) unsharded += 4;
    return frozen * bytes_per_frozen / shards + trained * ((uses_muon(run) ? 12 : 16) / shards + unsharded);
}

/* Seconds that a step cannot do without, by the traffic formula: arithmetic and the communication of tp and cp, which
 * it waits for, times the pipeline bubble; or the traffic over fsdp, if that is longer. */
static double least_seconds(const Search *s) {
    const Job *j = &s->job;
    Traffic expected[AXES][COLLECTIVES];
    double seconds[AXES] = ZERO;
    expected_traffic(expected, &j->config, j->mesh.world, 0, &j->run, sizeof(StepReport));
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < SEND; o++) {
            double calls = (double)expected[a][o].calls, bytes = (double)expected[a][o].bytes;
            if (calls > 0) seconds[a] += calls * collective_seconds(&s->cluster.collectives[a][o], bytes / calls);
        }
    double busy = s->least_compute + seconds[AXIS_TP] + seconds[AXIS_CP];
    double bubble = (double)(j->run.pp - 1) / j->run.pp_chunks / j->run.accum;
    return fmax(busy * (1 + bubble), seconds[AXIS_FSDP]);
}

/* Memory of the first pipeline stage, which usually needs the most: cheaper than simulating all stages. */
static double first_stage_memory(const Job *j) {
    Trainer *first = (Trainer *)checked_malloc(sizeof *first);
    dry_run_open(first, j, 0, NULL);
    double bytes = (double)device_peak(&first->parallel.dev);
    trainer_close(first);
    free(first);
    return bytes;
}

/* Adds a layout to the best ones, if it is among them. */
static void search_keep(Search *s, const Layout *c) {
    double step = c->estimate.step_seconds;
    if (s->count == BEST && step >= s->best[BEST - 1].estimate.step_seconds) return;
    int at = s->count < BEST ? s->count++ : BEST - 1;
    for (; at > 0 && s->best[at - 1].estimate.step_seconds > step; at--) s->best[at] = s->best[at - 1];
    s->best[at] = *c;
}

typedef enum { TRY_MORE_RECOMPUTATION, TRIED } TryResult;

/* Tries the layout s->job, whose rates are s->cluster. */
static TryResult search_try_one(Search *s, Layout *c) {
    Job *j = &s->job;
    char problem[1024];
    double memory = s->cluster.memory;
    // all-to-alls are not known before the dry run, so this subtracts the least that NCCL allocates
    if (plans_nccl(j, &s->cluster)) memory -= nccl_memory(&j->mesh, NULL, job_reductions_apart(j), 1);
    s->tried++;
    if (least_memory(j, &c->run) > memory || !job_layout_fits(j, problem, sizeof problem)) return TRIED;
    // 2 %: with its padding, a layout's arithmetic differs a little from another's
    int is_too_slow = s->count == BEST && 0.98 * least_seconds(s) > s->best[BEST - 1].estimate.step_seconds;
    if (is_too_slow && !s->keeps_slow) return TRIED;
    if (c->run.pp > 1 && first_stage_memory(j) > memory) return TRY_MORE_RECOMPUTATION;
    layout_simulate(c, j, &s->cluster);
    for (int r = 0; r < s->cluster.rates.count && !s->dry_runs; r++)
        s->fastest_op = fmax(s->fastest_op, s->cluster.rates.ops[r].rate);
    s->dry_runs++;
    s->least_compute = c->estimate.flops / s->fastest_op;
    if (c->memory > s->cluster.memory) return TRY_MORE_RECOMPUTATION;
    search_keep(s, c);
    return TRIED;
}

/* Tries a layout with as little recomputation as fits in memory, unless --recompute was given. */
static void search_try(Search *s, const RunSettings *run) {
    static const int recompute[] = {RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL};
    int is_given = option_given(s->given->options, "recompute");
    for (int i = 0; i < (is_given ? 1 : 3); i++) {
        Layout c = ZERO;
        c.run = *run;
        c.matmul_speed = 1;
        if (!is_given) c.run.recompute = recompute[i];
        s->job.run = c.run;
        if (search_try_one(s, &c) == TRIED) return;
    }
}

/* Tries sharding and accumulation for a mesh, schedule and micro-batch: what was given, else both common choices. */
static void search_shardings(Search *s, RunSettings run) {
    const Options *given = s->given->options;
    int sharding_given = option_given(given, "sharding"), accumulate_given = option_given(given, "accumulate");
    for (int full = 0; full < 2; full++) {
        if (full && (sharding_given || run.dp_shard * run.cp == 1)) continue;
        if (!sharding_given) run.sharding = full ? FULL_SHARD : SHARD_GRAD_OP;
        if (!accumulate_given) run.accumulate = full || run.accum == 1 ? ACCUMULATE_SHARDED : ACCUMULATE_LOCALLY;
        search_try(s, &run);
    }
}

/* Tries every pipeline schedule and micro-batch for a mesh. */
static void search_schedules(Search *s, RunSettings run) {
    const Options *given = s->given->options;
    const Llama3Config *c = &s->job.config;
    int64_t data_ranks = (int64_t)run.dp_shard * run.dp_replicate;
    int schedule_given = option_given(given, "pp-chunks") || option_given(given, "pp-schedule");
    int most_chunks = run.pp > 1 ? MAX_STAGES : 1;
    for (run.pp_chunks = 1; run.pp_chunks <= most_chunks; run.pp_chunks *= 2) {
        if (schedule_given && run.pp_chunks != s->given->run.pp_chunks) continue;
        for (run.batch = 1; data_ranks * run.batch <= s->sequences; run.batch *= 2) {
            double per_micro_batch = (double)(data_ranks * run.batch);
            if (fmod(s->sequences, per_micro_batch) != 0 || (int64_t)run.batch * run.seq > 1 << 30) continue;
            int stages = run.pp * run.pp_chunks;
            run.accum = (int)(s->sequences / per_micro_batch);
            run.pp_schedule = run.pp_chunks > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
            if (!option_given(given, "pp-light-ends"))
                run.pp_light_ends = run.pp > 1 && c->L % stages && (c->L + 2) % stages == 0;
            search_shardings(s, run);
        }
    }
}

/* Does the model divide by this mesh, and does it agree with the axes that were given? */
static int mesh_is_wanted(const Search *s, const RunSettings *run) {
    const Job *given = s->given;
    const Options *g = s->given->options;
    int is_given[MESH_AXES] = {option_given(g, "tp"), option_given(g, "cp"), option_given(g, "pp"),
                               option_given(g, "dp-shard") && s->given->run.dp_shard, option_given(g, "dp-replicate")};
    Mesh mesh = mesh_of_options(run, given->mesh.world);
    int wanted = run->seq % (2 * run->cp) == 0 && given->config.NKV % run->tp == 0 && given->config.NH % run->tp == 0;
    for (int a = 0; a < MESH_AXES; a++) wanted &= !is_given[a] || mesh.size[a] == given->mesh.size[a];
    return wanted;
}

static void search_mesh(Search *s, RunSettings *run) {
    int64_t replica = (int64_t)run->tp * run->cp * run->pp * run->dp_replicate;
    int world = s->given->mesh.world;
    if (world % replica) return;
    run->dp_shard = (int)(world / replica);
    if (!mesh_is_wanted(s, run)) return;
    s->job.mesh = mesh_of_options(run, world);
    cluster_open(&s->cluster, s->path, &s->job.mesh, run->threads, option_choice(run, "transport"),
                 transport_sums(run));
    s->job.op_times = &s->cluster.rates.times;
    search_schedules(s, *run);
    cluster_close(&s->cluster);
}

/* Tries every mesh of the ranks. Tensor parallelism stays within a host of the cluster `c`. */
static void search_run(Search *s, const Job *j, const Cluster *c) {
    RunSettings run = j->run;
    int world = j->mesh.world;
    s->job = *j;
    s->path = c->path;
    s->given = j;
    s->sequences = (double)period_batch(j->period, &j->mesh);
    for (run.pp = 1; run.pp <= world && run.pp <= j->config.L + 2; run.pp++)
        for (run.tp = 1; run.tp <= c->ranks_per_host && run.tp * run.pp <= world; run.tp++)
            for (run.cp = 1; (int64_t)run.tp * run.cp * run.pp <= world && 2 * run.cp <= run.seq; run.cp++)
                for (run.dp_replicate = 1; (int64_t)run.tp * run.cp * run.pp * run.dp_replicate <= world;
                     run.dp_replicate *= 2)
                    search_mesh(s, &run);
}

static void search_print(FILE *f, const Search *s, const Cluster *c, double seconds) {
    fprintf(
        f,
        "%s, %d ranks on %s, %.0f sequences of %d tokens per step: %d layouts, of which %d were dry-run, in %.1f s\n",
        s->given->run.model, s->job.mesh.world, c->name, s->sequences, s->given->run.seq, s->tried, s->dry_runs,
        seconds);
    if (!s->count) {
        fprintf(f, "none fits in %.2f GB per rank: use more ranks, a shorter --seq, or fewer sequences per step\n",
                c->memory / 1e9);
        return;
    }
    fprintf(f, "%5s %4s %4s %9s %13s %7s %6s %6s %14s %11s %10s %10s %12s %6s\n", "tp", "cp", "pp", "dp-shard",
            "dp-replicate", "chunks", "batch", "accum", "sharding", "recompute", "memory", "step", "tokens/s", "MFU");
    for (int i = 0; i < s->count; i++) {
        const Layout *b = &s->best[i];
        const RunSettings *run = &b->run;
        fprintf(f, "%5d %4d %4d %9d %13d %7d %6d %6d %14s %11s %7.2f GB %8.4g s %12.0f %4.1f %%\n", run->tp, run->cp,
                run->pp, run->dp_shard, run->dp_replicate, run->pp_chunks, run->batch, run->accum,
                strategies[run->sharding].name, option_choice(run, "recompute"), b->memory / 1e9,
                b->estimate.step_seconds, b->estimate.tokens_per_second, 100 * b->estimate.mfu);
    }
    const RunSettings *run = &s->best[0].run;
    fprintf(f,
            "options of the fastest: --tp %d --cp %d --pp %d --dp-shard %d --dp-replicate %d --batch %d --accum %d "
            "--sharding %s --accumulate %s --recompute %s",
            run->tp, run->cp, run->pp, run->dp_shard, run->dp_replicate, run->batch, run->accum,
            strategies[run->sharding].name, run->accumulate == ACCUMULATE_LOCALLY ? "local" : "sharded",
            option_choice(run, "recompute"));
    if (run->pp_chunks > 1) fprintf(f, " --pp-schedule interleaved --pp-chunks %d", run->pp_chunks);
    fprintf(f, "%s\n", run->pp_light_ends ? " --pp-light-ends" : "");
}

/* `c`: the cluster of the options as given. */
static void search_main(const Job *j, const Cluster *c) {
    Search *s = (Search *)checked_malloc(sizeof *s);
    double start = seconds_now();
    if (c->memory <= 0)
        user_error("--cluster %s lacks memory_bytes_per_host, so that --search cannot tell what fits: add it", c->path);
    search_run(s, j, c);
    search_print(stdout, s, c, seconds_now() - start);
    free(s);
}

#endif
