/* estimate.h: the dry runs of all ranks, their simulation, and the time of a step on a cluster.
 *
 * A caller may rely on: nothing that the run would allocate is allocated; every rank is dry-run by the program's own
 * code. */
#ifndef ESTIMATE_H
#define ESTIMATE_H
#include "dry_runs.h"   // defines: EventLists, DryRunKind, Plan, Job
#include "plan_print.h" // defines: plan_largest, class_nccl_memory
#include "../shared/cluster.h"
#include "simulate_streams.h"
#include <sys/resource.h> // defines: getrusage

typedef struct {
    double step_seconds, tokens_per_second; // of all ranks together
    // seconds of the mean rank:
    double compute;             // arithmetic
    double waited[AXES];        // waiting for communication over an axis
    double communication[AXES]; // communication over an axis, overlapped with arithmetic or not
    double ops[OP_COUNT];       // each op
    double most_compute;        // arithmetic of the rank that has the most
    int most_compute_rank;
    // FLOPs of the mean rank and step:
    double flops;                // matmuls, and attention over the unmasked pairs
    double recomputed;           // of activation checkpointing, in addition
    double full_attention_flops; // if attention saw all keys and its backward cost twice its forward
    double mfu;                  // flops / step_seconds / peak
} Estimate;

// ---------------------------------------------------------------------------
// simulating a plan

/* With fewer dry runs than ranks, one rank of each part of the model is simulated: others with the same part do the
 * same at the same time, so that its collectives take as long. */
static Mesh simulated_mesh(const Plan *p, DryRunKind kind) {
    int tp = kind == DRY_RUN_SHARDS ? p->mesh->size[AXIS_TP] : 1, pp = p->mesh->size[AXIS_PP];
    Mesh parts = {tp * pp, {tp, 1, pp, 1, 1}};
    return kind == DRY_RUN_ALL ? *p->mesh : parts;
}

/* The rank of the plan that is simulated as rank `i`. */
static int simulated_rank(const Plan *p, DryRunKind kind, int i) {
    int tp = kind == DRY_RUN_SHARDS ? p->mesh->size[AXIS_TP] : 1;
    return kind == DRY_RUN_ALL ? i : i / tp * mesh_stride(p->mesh, AXIS_PP) + i % tp;
}

/* Simulates a step. `records_times`: of the first rank of each pipeline stage. Returns 0 if the ranks do not fit
 * together; `problem` (size) says why. */
static int plan_simulate(Simulation *s, const Plan *p, const EventLists *events, const Cluster *c, int records_times,
                         char *problem, size_t size) {
    Mesh mesh = simulated_mesh(p, events->kind);
    const CommEvents **lists = (const CommEvents **)checked_malloc(sizeof *lists * (size_t)mesh.world);
    for (int i = 0; i < mesh.world; i++) lists[i] = &events->lists[events->list_of[simulated_rank(p, events->kind, i)]];
    simulation_open(s, &mesh, lists, p->mesh, c ? c->collectives : NULL, problem, size);
    free(lists);
    for (int stage = 0; stage < mesh.size[AXIS_PP] && records_times; stage++) {
        SimRank *r = &s->ranks[stage * mesh_stride(&mesh, AXIS_PP)];
        r->times = (EventTime *)checked_malloc(sizeof(EventTime) * (size_t)r->list->count);
    }
    if (!simulation_run(s)) return 0;
    return c && c->rates.times.has_streams ? simulate_streams(s, job_reductions_apart(p->job)) : 1;
}

/* Adds seconds of communication of each axis: of what a rank receives. Ranks that share a list are counted at once. */
static void add_communication(Estimate *e, const Simulation *s, const EventLists *events) {
    for (int i = 0; i < events->count; i++) {
        const CommEvents *list = &events->lists[i];
        double seconds[AXES] = ZERO, ranks = 0;
        for (int r = 0; r < s->mesh.world; r++) ranks += s->ranks[r].list == list;
        for (int64_t k = 0; k < list->count && ranks > 0; k++) {
            const CommEvent *event = &list->events[k];
            if (!event->is_wait && event->collective != SEND) seconds[event->axis] += event_seconds(s, event);
        }
        for (int a = 0; a < AXES; a++) e->communication[a] += ranks / s->mesh.world * seconds[a];
    }
}

/* FLOPs of attention as many papers count them: over all T keys instead of (T + 1) / 2 on average, and backward as
 * twice forward (Chowdhery et al. 2022, appendix B). `T`: tokens of a sequence. */
static double full_attention_flops(const Device *dry_run, int T) {
    const OpStat *ops = dry_run->rec.ops;
    double forward = ops[OP_ATTENTION_FORWARD].flops - ops[OP_ATTENTION_FORWARD].recomputed;
    double backward = ops[OP_ATTENTION_BACKWARD].flops;
    return device_flops(dry_run, 0) - forward - backward + 3 * forward * 2 * T / (T + 1.0);
}

/* What a simulation that reached its end says about the step. */
static Estimate estimate_of(const Plan *p, const EventLists *events, const Cluster *c, const Simulation *s,
                            const Job *j) {
    Estimate e = ZERO;
    double share = 1.0 / s->mesh.world, tokens = (double)samples_per_step(&j->run, &j->mesh) * j->run.seq;
    e.step_seconds = s->seconds;
    e.tokens_per_second = tokens / e.step_seconds;
    for (int i = 0; i < s->mesh.world; i++) {
        const SimRank *r = &s->ranks[i];
        const Device *dry_run = p->classes[p->class_of[simulated_rank(p, events->kind, i)]].dry_run;
        double compute = r->clock;
        for (int a = 0; a < AXES; a++) {
            compute -= r->waited[a];
            e.waited[a] += share * r->waited[a];
        }
        e.compute += share * compute;
        if (compute > e.most_compute * (1 + 1e-9)) {
            e.most_compute = compute;
            e.most_compute_rank = simulated_rank(p, events->kind, i);
        }
        for (int o = 0; o < OP_COUNT; o++) e.ops[o] += share * dry_run->rec.ops[o].seconds;
        e.flops += share * device_flops(dry_run, 0);
        e.recomputed += share * device_flops(dry_run, 1);
        e.full_attention_flops += share * full_attention_flops(dry_run, j->run.seq);
    }
    add_communication(&e, s, events);
    e.mfu = e.flops / e.step_seconds / c->peak;
    return e;
}

/* Communication that arithmetic does not hide. */
static double exposed_seconds(const Estimate *e) {
    double sum = 0;
    for (int a = 0; a < AXES; a++) sum += e->waited[a];
    return sum;
}

/* Do the planned ranks have GPUs, which communicate over NCCL? `c` NULL: no cluster is known. */
static int plans_nccl(const Job *j, const Cluster *c) {
    return asks_nccl(&j->run) || (c && c->rates.times.has_streams);
}

/* Bytes that NCCL allocates on the rank that needs the most memory. */
static double plan_nccl_memory(const Plan *p, const Cluster *c) {
    return plans_nccl(p->job, c) ? class_nccl_memory(p, plan_largest(p)) : 0;
}

/* Bytes of the rank that needs the most memory, with what NCCL takes. `c` NULL: no cluster is known. */
static double memory_needed(const Plan *p, const Cluster *c) {
    return (double)device_peak(plan_largest(p)->dry_run) + plan_nccl_memory(p, c);
}

/* Bytes that a rank receives over an axis per step, of the class that receives the most. */
static double axis_bytes(const Plan *p, int axis) {
    double most = 0;
    for (int k = 0; k < p->count; k++) {
        const Traffic *t = p->classes[k].traffic[DRY_RUN][axis];
        int64_t received = t[ALL_GATHER].bytes + t[REDUCE_SCATTER].bytes + t[ALL_TO_ALL].bytes + t[RECEIVE].bytes;
        most = fmax(most, (double)received);
    }
    return most;
}

// ---------------------------------------------------------------------------
// printed

/* What was simulated, and that the ranks fit together. */
static void print_simulation(FILE *f, const EventLists *lists, const Simulation *s, double seconds) {
    int64_t events = 0, collectives = 0;
    struct rusage used;
    if (s->mesh.world == 1) return;
    for (int i = 0; i < s->mesh.world; i++) events += s->ranks[i].list->count;
    for (int i = 0; i < s->mesh.world * (int)AXES; i++) collectives += s->groups[i].begun;
    getrusage(RUSAGE_SELF, &used); // ru_maxrss is in KiB
    fprintf(f,
            "  %d ranks dry-run and simulated in %.2f s and %.0f MB: %" PRId64 " events (%d distinct list%s), %" PRId64
            " collectives; all members of each collective agree, and every send meets its receive\n",
            s->mesh.world, seconds, (double)used.ru_maxrss * 1024 / 1e6, events, lists->count,
            lists->count > 1 ? "s" : "", collectives);
}

/* How the groups of each axis are placed on hosts and racks, and what they carry. */
static void print_groups(FILE *f, const Cluster *c, const Plan *p) {
    const Mesh *mesh = p->mesh;
    for (int a = 0; a < AXES; a++) {
        int ranks = mesh_group_size(mesh, (Axis)a);
        if (ranks == 1 || a == AXIS_DP_SHARD) continue; // dp_shard has no traffic of its own: fsdp includes it
        int groups = mesh->world / ranks, hosts = group_spans(mesh, (Axis)a, c->ranks_per_host);
        fprintf(f, "    %-13s %6d group%s of %5d ranks on %4d host%s", axis_names[a], groups, groups > 1 ? "s" : " ",
                ranks, hosts, hosts > 1 ? "s" : "");
        if (c->hosts_per_rack)
            fprintf(f, " in %4d racks", group_spans(mesh, (Axis)a, c->ranks_per_host * c->hosts_per_rack));
        fprintf(f, ": a rank receives %10.3f GB per step %s\n", axis_bytes(p, a) / 1e9,
                hosts > 1 ? "across hosts" : "within its host");
    }
}

static void print_rates(FILE *f, const Cluster *c, const Estimate *e) {
    double per_second = 1e-12 / e->step_seconds;
    fprintf(f, "    TFLOP/s per rank: %.1f (attention over unmasked pairs, its backward 2.5 times its forward)",
            per_second * e->flops);
    if (e->recomputed > 0)
        fprintf(f, "; %.1f with recomputation (HFU %.1f %%)", per_second * (e->flops + e->recomputed),
                1e14 * per_second * (e->flops + e->recomputed) / c->peak);
    fprintf(f, "; %.1f (attention over all keys, backward twice its forward, as in Chowdhery et al. 2022)\n",
            per_second * e->full_attention_flops);
}

static void print_estimated_memory(FILE *f, const Cluster *c, const Plan *p) {
    double need = memory_needed(p, c), nccl = plan_nccl_memory(p, c);
    int communicators = nccl_communicators(p->mesh, job_reductions_apart(p->job));
    if (c->memory <= 0) return;
    fprintf(f, "    memory: %.2f of %.2f GB per rank%s", need / 1e9, c->memory / 1e9,
            need > c->memory ? ": does not fit" : "");
    if (nccl > 0) fprintf(f, "; %.2f GB of it for NCCL's %d communicators", nccl / 1e9, communicators);
    fprintf(f, "\n");
}

static void print_estimate(FILE *f, const Cluster *c, const Plan *p, const Estimate *e) {
    fprintf(
        f,
        "  estimated step time %.4g s: mean rank computes %.4g s and waits %.4g s for communication; %.0f tokens/s; "
        "MFU %.1f %% of %.4g FLOP/s per rank\n",
        e->step_seconds, e->compute, exposed_seconds(e), e->tokens_per_second, 100 * e->mfu, c->peak);
    print_rates(f, c, e);
    fprintf(f, "    cluster: %s; %d rank%s per host; an op has the rate of the nearest listed shape, or %.4g bytes/s\n",
            c->name, c->ranks_per_host, c->ranks_per_host > 1 ? "s" : "", c->rates.memory);
    print_estimated_memory(f, c, p);
    print_groups(f, c, p);
    if (e->most_compute > 1.001 * e->compute)
        fprintf(f, "    rank %d computes longest: %.4g s, %.1f %% more than the mean\n", e->most_compute_rank,
                e->most_compute, 100 * (e->most_compute / e->compute - 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0.005 * e->step_seconds)
            fprintf(f, "    %-24s %10.4g s  %5.1f %%\n", op_names[i], e->ops[i], 100 * e->ops[i] / e->step_seconds);
    for (int a = 0; a < AXES; a++) {
        if (e->communication[a] <= 0) continue;
        const char *remark = "";
        if (a == AXIS_PP) remark = "; waiting includes the pipeline bubble";
        if (a == AXIS_WORLD && p->mesh->size[AXIS_PP] > 1)
            remark = "; waiting includes that stages end at different times";
        fprintf(f, "    communication over %-13s %7.4g s, of which waited %.4g s  (rate of: %s)%s\n", axis_names[a],
                e->communication[a], e->waited[a], c->collectives[a][ALL_GATHER].source, remark);
    }
}

// ---------------------------------------------------------------------------
// plan.json

static cJSON *estimate_json(const Estimate *e) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "step_s", e->step_seconds);
    cJSON_AddNumberToObject(json, "tokens_per_s", e->tokens_per_second);
    cJSON_AddNumberToObject(json, "mfu", e->mfu);
    cJSON *rates = cJSON_AddObjectToObject(json, "flops_per_s");
    cJSON_AddNumberToObject(rates, "causal_attention", e->flops / e->step_seconds);
    cJSON_AddNumberToObject(rates, "with_recomputation", (e->flops + e->recomputed) / e->step_seconds);
    cJSON_AddNumberToObject(rates, "full_attention", e->full_attention_flops / e->step_seconds);
    cJSON_AddNumberToObject(json, "compute_s", e->compute);
    cJSON_AddNumberToObject(json, "exposed_s", exposed_seconds(e));
    cJSON *waited = cJSON_AddObjectToObject(json, "waited_s");
    cJSON *communication = cJSON_AddObjectToObject(json, "communication_s");
    for (int a = 0; a < AXES; a++) {
        if (e->communication[a] <= 0) continue;
        cJSON_AddNumberToObject(waited, axis_names[a], e->waited[a]);
        cJSON_AddNumberToObject(communication, axis_names[a], e->communication[a]);
    }
    cJSON *ops = cJSON_AddObjectToObject(json, "ops");
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0) cJSON_AddNumberToObject(ops, op_names[i], e->ops[i]);
    return json;
}

#endif
