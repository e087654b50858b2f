/* alternatives.h: what memory and step time become if one option of a plan changes, and which change makes it fit. */
#ifndef ALTERNATIVES_H
#define ALTERNATIVES_H
#include "estimate.h" // defines: Estimate, plan_simulate, estimate_of, memory_needed

typedef struct {
    char change[160];    // how it differs from the plan, as options
    RunSettings run;     // with a number for every axis of the mesh
    double matmul_speed; // relative to the cluster's matmuls
    double memory;       // bytes of the rank that needs the most
    const char *cluster; // the file with its rates; NULL: memory only
    Estimate estimate;   // with a cluster only
} Layout;

static Mesh mesh_of_options(const RunSettings *run, int world) {
    Mesh mesh = {world, {run->tp, run->cp, run->pp, run->dp_shard, run->dp_replicate}};
    return mesh;
}

/* The options of `j` with the mesh that follows from them in numbers. */
static Layout layout_of(const Job *j, const char *cluster) {
    Layout c = ZERO;
    c.run = j->run;
    c.matmul_speed = 1;
    c.cluster = cluster;
    c.run.tp = j->mesh.size[AXIS_TP];
    c.run.cp = j->mesh.size[AXIS_CP];
    c.run.pp = j->mesh.size[AXIS_PP];
    c.run.dp_shard = j->mesh.size[AXIS_DP_SHARD];
    c.run.dp_replicate = j->mesh.size[AXIS_DP_REPLICATE];
    return c;
}

/* Simulates one rank of each pipeline stage of `j`, which is laid out so. `cluster` NULL: memory only. */
static void layout_simulate(Layout *c, const Job *j, const Cluster *cluster) {
    char problem[1024];
    Plan plan;
    EventLists events;
    Simulation simulation;
    plan_dry_run(&plan, j, DRY_RUN_STAGES, &events);
    c->memory = memory_needed(&plan, cluster);
    if (!plan_simulate(&simulation, &plan, &events, cluster, 0, problem, sizeof problem))
        run_failure("the ranks of the plan do not fit together: %s", problem);
    if (cluster) c->estimate = estimate_of(&plan, &events, cluster, &simulation, j);
    simulation_close(&simulation);
    event_lists_close(&events);
    plan_close(&plan);
}

/* Lays `base` out with the options of `c` and simulates it. Returns 0 if the model cannot be divided so. */
static int layout_try(Layout *c, const Job *base) {
    char problem[1024];
    Cluster cluster;
    Job j = *base;
    j.run = c->run;
    j.mesh = mesh_of_options(&c->run, base->mesh.world);
    if (j.config.lora_rank) j.config.base = base_kind(j.run.base);
    if (!job_layout_fits(&j, problem, sizeof problem)) return 0;
    j.op_times = NULL;
    if (!c->cluster) {
        layout_simulate(c, &j, NULL);
        return 1;
    }
    cluster_open(&cluster, c->cluster, &j.mesh, j.run.threads, option_choice(&j.run, "transport"),
                 transport_sums(&j.run));
    for (int i = 0; i < cluster.rates.count; i++) {
        OpRate *r = &cluster.rates.ops[i];
        if (r->op != OP_ATTENTION_FORWARD && r->op != OP_ATTENTION_BACKWARD) r->rate *= c->matmul_speed;
    }
    j.op_times = &cluster.rates.times;
    layout_simulate(c, &j, &cluster);
    cluster_close(&cluster);
    return 1;
}

// ---------------------------------------------------------------------------
// one change at a time

typedef struct {
    const Job *job;
    Layout base;  // the plan itself
    Layout *list; // (count) that the model can be divided into
    int count;
} Alternatives;

enum { MAX_ALTERNATIVES = 32 };

/* A copy of the plan to be changed; add_alternative tries it. */
static Layout *next_alternative(Alternatives *a) {
    Layout *next = &a->list[a->count];
    *next = a->base;
    return next;
}

__attribute__((format(printf, 2, 3))) static void add_alternative(Alternatives *a, const char *format, ...) {
    Layout *c = &a->list[a->count];
    va_list args;
    va_start(args, format);
    vsnprintf(c->change, sizeof c->change, format, args);
    va_end(args);
    a->count += layout_try(c, a->job);
}

/* Tries each other of these values of an option. */
static void add_other_values(Alternatives *a, const char *option, const char *const *values, int n) {
    char present[64];
    option_text(&a->base.run, option, present, sizeof present);
    for (int i = 0; i < n; i++) {
        if (!strcmp(values[i], present)) continue;
        option_set(&next_alternative(a)->run, option_find(option), option, values[i]);
        add_alternative(a, "--%s %s", option, values[i]);
    }
}

static void add_other_schedules(Alternatives *a) {
    for (int v = 1; v <= 16 && v <= MAX_STAGES; v *= 2) {
        if (v == a->base.run.pp_chunks) continue;
        Layout *c = next_alternative(a);
        c->run.pp_chunks = v;
        c->run.pp_schedule = v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
        if (v > 1) add_alternative(a, "--pp-schedule interleaved --pp-chunks %d", v);
        else add_alternative(a, "--pp-schedule 1f1b");
    }
}

static void add_other_batches(Alternatives *a) {
    const RunSettings *run = &a->base.run;
    int accums[2] = {run->accum % 2 ? 0 : run->accum / 2, run->accum <= 1 << 15 ? run->accum * 2 : 0};
    for (int i = 0; i < 2; i++) {
        if (!accums[i]) continue;
        next_alternative(a)->run.accum = accums[i];
        add_alternative(a, "--accum %d", accums[i]);
    }
    if (run->batch % 2 == 0) {
        Layout *c = next_alternative(a);
        c->run.batch = run->batch / 2;
        c->run.accum = run->accum * 2;
        add_alternative(a, "--batch %d --accum %d", c->run.batch, c->run.accum);
    }
    if (run->seq % (4 * run->cp) == 0) {
        next_alternative(a)->run.seq = run->seq / 2;
        add_alternative(a, "--seq %d", run->seq / 2);
    }
}

/* Changes one option at a time. The caller frees a->list. */
static void alternatives_open(Alternatives *a, const Job *j, const char *cluster) {
    static const char *const recompute[] = {"none", "selective", "full"};
    static const char *const sharding[] = {"full_shard", "shard_grad_op"}, *const accumulate[] = {"sharded", "local"};
    static const char *const bases[] = {PRECISION_NAME, "int8", "int8:all"};
    const RunSettings *run = &j->run;
    a->job = j;
    a->base = layout_of(j, cluster);
    a->list = (Layout *)checked_malloc(sizeof *a->list * MAX_ALTERNATIVES);
    a->count = 0;
    add_other_values(a, "recompute", recompute, 3);
    if (a->base.run.pp > 1) add_other_schedules(a);
    if (mesh_group_size(&j->mesh, AXIS_FSDP) > 1) add_other_values(a, "sharding", sharding, 2);
    if (run->accum > 1) add_other_values(a, "accumulate", accumulate, 2);
    add_other_batches(a);
    if (j->config.lora_rank && j->stored_base <= BASE_FROZEN) add_other_values(a, "base", bases, 3);
    for (int faster = 0; faster < 2 && cluster; faster++) {
        next_alternative(a)->matmul_speed = faster ? 1.1 : 1 / 1.1;
        add_alternative(a, "matmuls 10 %% %s", faster ? "faster" : "slower");
    }
}

// ---------------------------------------------------------------------------
// printed

/* The longest --seq, in steps that the mesh divides, with which no rank needs more than `bytes`; 0: none fits. */
static int longest_seq(const Job *j, int recompute, double bytes) {
    int step = 256 * (int)max_i64(1, j->mesh.size[AXIS_CP] / 128);
    int fits = 0, too_long = j->config.max_positions / step + 1;
    while (too_long - fits > 1) {
        int middle = (fits + too_long) / 2;
        Layout c = layout_of(j, NULL);
        c.run.recompute = recompute;
        c.run.seq = middle * step;
        if (layout_try(&c, j) && c.memory <= bytes) fits = middle;
        else too_long = middle;
    }
    return fits * step;
}

static void print_longest_seq(FILE *f, const Job *j, double bytes) {
    int none = longest_seq(j, RECOMPUTE_NONE, bytes), selective = longest_seq(j, RECOMPUTE_SELECTIVE, bytes);
    int full = longest_seq(j, RECOMPUTE_FULL, bytes);
    if (none || selective || full)
        fprintf(f,
                "  longest --seq in %.0f GB per rank with --batch %d: %d with --recompute none, %d with selective, %d "
                "with full\n",
                bytes / 1e9, j->run.batch, none, selective, full);
    else
        fprintf(f,
                "  no --seq fits in %.0f GB per rank: use more ranks, or --base int8 with adapters, so that each rank "
                "holds less of the weights\n",
                bytes / 1e9);
}

/* The plan does not fit in the cluster's memory: names the fastest single change that makes it fit. */
static void print_fitting_change(FILE *f, const Alternatives *a, double need, double memory) {
    const Layout *best = NULL;
    for (int i = 0; i < a->count; i++) {
        const Layout *c = &a->list[i];
        if (c->matmul_speed != 1 || c->memory > memory) continue;
        if (!best || c->estimate.tokens_per_second > best->estimate.tokens_per_second) best = c;
    }
    fprintf(f, "  %.2f GB per rank do not fit in %.2f GB", need / 1e9, memory / 1e9);
    if (best) fprintf(f, ": with %s the plan needs %.2f GB\n", best->change, best->memory / 1e9);
    else
        fprintf(f,
                ", and no single change above makes them fit: split the model over more ranks (--tp, --pp, --cp), or "
                "combine several changes\n");
}

/* Without a cluster: which common GPU sizes hold the plan, as it is or with one change. */
static void print_gpu_sizes(FILE *f, const Alternatives *a, double need) {
    static const double sizes[] = {24e9, 40e9, 48e9, 80e9, 96e9, 141e9, 192e9};
    const Job *j = a->job;
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++) {
        double smaller = s ? sizes[s - 1] : 0;
        if (need <= sizes[s]) {
            fprintf(f, "  GPUs of %.0f GB hold it\n", sizes[s] / 1e9);
            if (j->config.lora_rank) print_longest_seq(f, j, sizes[s]);
            return;
        }
        if (j->config.lora_rank && sizes[s] == 80e9) print_longest_seq(f, j, sizes[s]);
        for (int i = 0; i < a->count; i++)
            if (a->list[i].memory <= sizes[s] && a->list[i].memory > smaller)
                fprintf(f, "  GPUs of %.0f GB hold it with %s: %.2f GB instead of %.2f GB\n", sizes[s] / 1e9,
                        a->list[i].change, a->list[i].memory / 1e9, need / 1e9);
    }
}

/* `cluster` and `estimate` NULL: memory only. */
static void print_alternatives(FILE *f, const Job *j, const Plan *p, const Cluster *cluster, const Estimate *estimate) {
    Alternatives a;
    double need = memory_needed(p, cluster), memory = cluster ? cluster->memory : 0;
    alternatives_open(&a, j, cluster ? cluster->path : NULL);
    if (a.count)
        fprintf(f, "  with one change: memory of the rank that needs the most%s\n",
                estimate ? ", step time, tokens per second" : "");
    for (int i = 0; i < a.count; i++) {
        const Layout *c = &a.list[i];
        fprintf(f, "    %-40s %9.2f GB", c->change, c->memory / 1e9);
        if (estimate)
            fprintf(f, "  %10.4g s  %+6.1f %%", c->estimate.step_seconds,
                    100 * (c->estimate.tokens_per_second / estimate->tokens_per_second - 1));
        fprintf(f, "\n");
    }
    if (memory > 0 && need > memory) print_fitting_change(f, &a, need, memory);
    if (memory > 0 && j->config.lora_rank) print_longest_seq(f, j, memory - plan_nccl_memory(p, cluster));
    if (!cluster && need > 16e9) print_gpu_sizes(f, &a, need);
    free(a.list);
}

#endif
