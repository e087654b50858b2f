/* plan_print.h: a plan as text, the table of a recipe's periods, and what plan.json says of them. */
#ifndef PLAN_PRINT_H
#define PLAN_PRINT_H
#include "../shared/cluster.h" // defines: Cluster
#include "../shared/program.h" // defines: Plan, RankClass, Job, RecipePeriod, json_add_traffic, json_add_integer

/* The class that needs the most memory. */
static const RankClass *plan_largest(const Plan *p) {
    const RankClass *largest = p->classes;
    for (int c = 1; c < p->count; c++)
        if (device_peak(p->classes[c].dry_run) > device_peak(largest->dry_run)) largest = &p->classes[c];
    return largest;
}

/* Bytes that NCCL allocates on a rank of this class, if the ranks have GPUs, next to the arenas. */
static double class_nccl_memory(const Plan *p, const RankClass *c) {
    return nccl_memory(p->mesh, c->traffic[DRY_RUN], c->dry_run->reductions_apart, transport_sums(&p->job->run));
}

/* Prints which of `n` flags are set as ranges, "0-3, 8-11, …", at most `most` of them. */
static void print_ranges(FILE *f, const char *is_set, int n, int most) {
    int ranges = 0;
    for (int begin = 0, end; begin < n; begin = end + 1) {
        for (end = begin; end < n && is_set[end]; end++) {}
        if (end == begin) continue;
        if (ranges == most) {
            fprintf(f, ", …");
            return;
        }
        fprintf(f, end - begin > 1 ? "%s%d-%d" : "%s%d", ranges ? ", " : "", begin, end - 1);
        ranges++;
    }
}

static int count_set(const char *is_set, int n) {
    int count = 0;
    for (int i = 0; i < n; i++) count += is_set[i];
    return count;
}

/* Prints which ranks a class holds: "pp 1-14, tp 0: ranks 128, 136, 144, … (1792)". The pipeline stages and
 * tensor-parallel ranks are named if the class is all ranks with these coordinates. */
static void print_class_ranks(FILE *f, const Plan *p, int class_index) {
    const Mesh *mesh = p->mesh;
    int pp = mesh->size[AXIS_PP], tp = mesh->size[AXIS_TP];
    char *has_rank = new_array(char, mesh->world + pp + tp), *has_stage = has_rank + mesh->world;
    char *has_tp = has_stage + pp;
    for (int r = 0; r < mesh->world; r++) {
        if (p->class_of[r] != class_index) continue;
        has_rank[r] = 1;
        has_stage[mesh_coordinate(mesh, r, AXIS_PP)] = 1;
        has_tp[mesh_coordinate(mesh, r, AXIS_TP)] = 1;
    }
    int stages = count_set(has_stage, pp), tp_ranks = count_set(has_tp, tp), ranks = count_set(has_rank, mesh->world);
    int is_product = ranks == mesh->world / (pp * tp) * stages * tp_ranks;
    int names_stages = is_product && stages < pp, names_tp = is_product && tp_ranks < tp;
    if (names_stages) {
        fprintf(f, "pp ");
        print_ranges(f, has_stage, pp, pp);
    }
    if (names_tp) {
        fprintf(f, names_stages ? ", tp " : "tp ");
        print_ranges(f, has_tp, tp, tp);
    }
    fprintf(f, ranks > 1 ? "%sranks " : "%srank ", names_stages || names_tp ? ": " : "");
    print_ranges(f, has_rank, mesh->world, 4);
    if (ranks > 1) fprintf(f, " (%d)", ranks);
    fprintf(f, "\n");
    free(has_rank);
}

static void print_class_memory(FILE *f, const Device *dry_run, int with_buffers) {
    if (with_buffers) fprintf(f, "  memory per rank by buffer, in bytes (count x size of the largest of that name)\n");
    for (int i = 0; i < dry_run->rec.num_buffers && with_buffers; i++)
        fprintf(f, "    %-12s %-32s %6d x %16zu\n", mem_category_names[dry_run->rec.buffers[i].category],
                dry_run->rec.buffers[i].name, dry_run->rec.buffers[i].count, dry_run->rec.buffers[i].bytes);
    fprintf(f, "  memory per rank by category, in bytes\n");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "    %-45s %22zu%s\n", mem_category_names[i], dry_run->arenas[i].peak,
                dry_run->arenas[i].offloaded ? "  " OFFLOAD_PLACE : "");
    size_t peak = device_peak(dry_run), offloaded = device_arenas(dry_run, 1);
    fprintf(f, "    %-45s %22zu  (%.2f GB), first reached in: %s\n", "total", peak, (double)peak / 1e9,
            dry_run->rec.peak_when);
    if (offloaded)
        fprintf(f, "    %-45s %22zu  (%.2f GB)\n", "total " OFFLOAD_PLACE, offloaded, (double)offloaded / 1e9);
}

static void print_class(FILE *f, const Plan *p, const RankClass *c, int with_buffers) {
    double nccl = asks_nccl(&p->job->run) && p->mesh->world > 1 ? class_nccl_memory(p, c) : 0;
    print_class_memory(f, c->dry_run, with_buffers);
    if (nccl > 0) fprintf(f, "    %-45s %22.0f  (%.2f GB)\n", "NCCL, in addition, at most", nccl, nccl / 1e9);
    fprintf(f, "  FLOPs per rank and step: %.6g (a matmul M x N x K counts 2MNK; attention counts unmasked pairs)\n",
            device_flops(c->dry_run, 0));
    if (device_flops(c->dry_run, 1) > 0)
        fprintf(f, "  FLOPs of recomputed activations, in addition: %.6g\n", device_flops(c->dry_run, 1));
    fprintf(f, "  communication per rank and step, in bytes%16s %20s\n", "expected", "dry run");
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++) {
            Traffic expected = c->traffic[EXPECTED][a][o], dry_run = c->traffic[DRY_RUN][a][o];
            if (is_unused(expected) && is_unused(dry_run)) continue;
            fprintf(f, "    %-13s %-15s %4" PRId64 " calls %14" PRId64 " %20" PRId64 "\n", axis_names[a],
                    collective_names[o], dry_run.calls, expected.bytes, dry_run.bytes);
        }
}

/* Prints one class after the other; the one that needs the most memory with its buffers. */
static void plan_print(FILE *f, const Job *j, const Plan *p, int64_t tokens_per_step) {
    const Mesh *mesh = p->mesh;
    int replicas = mesh->size[AXIS_DP_REPLICATE];
    fprintf(f,
            "%s: %.1f M parameters, %s, %d rank%s x %d thread%s: %s over %d, %d replica%s, %" PRId64
            " tokens per step; ",
            j->run.model, (double)j->table.num_parameters / 1e6, PRECISION_NAME, mesh->world, plural(mesh->world),
            j->threads_per_rank, j->threads_per_rank > 1 ? "s" : "", strategies[j->run.sharding].name,
            mesh_group_size(mesh, AXIS_FSDP), replicas, replicas > 1 ? "s" : "", tokens_per_step);
    if (p->count == 1) fprintf(f, "all ranks have the same memory, FLOPs and traffic\n");
    else fprintf(f, "%d kinds of ranks, which differ in memory, FLOPs or traffic\n", p->count);
    for (int c = 0; c < p->count; c++) {
        if (p->count > 1) print_class_ranks(f, p, c);
        print_class(f, p, &p->classes[c], &p->classes[c] == plan_largest(p));
    }
}

// ---------------------------------------------------------------------------
// the periods of a recipe

/* The plan of one period: how long a step takes, and what memory it needs. */
typedef struct {
    double memory;       // bytes of the rank that needs the most
    double step_seconds; // 0: no cluster was given
    double mfu, flops;   // model FLOP/s per rank
} PeriodTime;

/* Prints the periods from j's on; `times` has one element for each of them. */
static void print_period_times(FILE *f, const Job *j, const Cluster *c, const PeriodTime *times) {
    double days = 0, tokens = 0;
    int all_fit = 1;
    fprintf(f, "%-6s %-20s %10s %12s %8s %8s %10s", "stage", "name", "steps", "tokens", "batch", "seq", "memory");
    if (c) fprintf(f, " %6s %10s %8s %8s %9s", "fits", "step", "MFU", "TFLOP/s", "days");
    fprintf(f, "\n");
    for (; j; j = j->next_period, times++) {
        const RecipePeriod *p = j->period;
        double period_days = (double)p->steps * times->step_seconds / 86400;
        days += period_days;
        tokens += (double)p->tokens;
        fprintf(f, "%-6d %-20s %10" PRId64 " %12.4g %8" PRId64 " %8d", (int)(p - j->recipe.periods) + 1,
                p->name[0] ? p->name : "-", p->steps, (double)p->tokens, period_batch(p, &j->mesh), j->run.seq);
        if (j->problem) fprintf(f, "  does not fit the layout: %s", j->problem);
        else fprintf(f, " %7.2f GB", times->memory / 1e9);
        if (c && !j->problem)
            fprintf(f, " %6s %8.4g s %6.1f %% %8.0f %9.2f", times->memory <= c->memory ? "yes" : "NO",
                    times->step_seconds, 100 * times->mfu, times->flops / 1e12, period_days);
        fprintf(f, "\n");
        all_fit &= !j->problem;
    }
    fprintf(f, "in all %.4g tokens", tokens);
    if (c) fprintf(f, ", %.2f days on %s%s", days, c->name, all_fit ? "" : ", without the stages that do not fit");
    fprintf(f, "\n");
}

/* What plan.json says of a period of a recipe. `p` NULL: the period does not fit the layout. `estimate`: what
 * plan_llama3 simulated, which this function takes over; NULL: left out. */
static cJSON *period_json(const Job *j, const Plan *p, cJSON *estimate) {
    const RecipePeriod *period = j->period;
    cJSON *json = cJSON_CreateObject();
    json_add_integer(json, "stage", period - j->recipe.periods + 1);
    if (period->name[0]) cJSON_AddStringToObject(json, "name", period->name);
    json_add_integer(json, "first_step", period->first_step + 1);
    json_add_integer(json, "steps", period->steps);
    json_add_integer(json, "tokens", period->tokens);
    json_add_integer(json, "batch", period_batch(period, &j->mesh));
    json_add_integer(json, "seq", j->run.seq);
    if (j->problem) cJSON_AddStringToObject(json, "problem", j->problem);
    if (!p) return json;
    const RankClass *largest = plan_largest(p);
    json_add_integer(json, "micro_batch", j->run.batch);
    json_add_integer(json, "accum", j->run.accum);
    cJSON *memory = cJSON_AddObjectToObject(json, "memory");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        json_add_integer(memory, mem_category_names[i], (int64_t)largest->dry_run->arenas[i].peak);
    json_add_integer(json, "peak", (int64_t)device_peak(largest->dry_run));
    json_add_flops_by_op(json, largest->dry_run);
    json_add_traffic(json, largest->traffic, 2);
    if (estimate) cJSON_AddItemToObject(json, "estimate", estimate);
    return json;
}

#endif
