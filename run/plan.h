/* plan.h: what a step will cost on every kind of rank, found by a dry run before any rank starts (--plan, plan.json). */
#ifndef PLAN_H
#define PLAN_H
#include "../fsdp.h"
#include "ledger.h"         // defines: expected_traffic, traffic_equal, json_add_traffic, json_add_flops_by_op
#include "../plan/replay.h" // defines: Replay, replay_run

// ---------------------------------------------------------------------------
// a plan: ranks that are alike, one of which was dry-run for all

struct Trainer;
typedef struct {
    int rank;                // the first of them
    struct Trainer *trainer; // its dry run, whose figures these are:
    const Device *dry_run;
    const Comm *comm;
    Traffic expected[AXES][COLLECTIVES];
} RankClass;

typedef enum {
    DRY_RUN_STAGES,
    DRY_RUN_PARTS,
    DRY_RUN_ALL
} DryRunKind; // one of each stage; of each stage and each part of tensor parallelism; every one

typedef struct {
    const Mesh *mesh;
    RankClass *classes; // (count), in the order of their first ranks
    int count;
    int *class_of; // (world)
    NameTable names;
    CommEvents *scripts;  // (num_scripts) what ranks ask of each other, that of many once
    uint64_t *hashes; // (num_scripts)
    int num_scripts;
    int *script_of;          // (world)
    DryRunKind dry_run_kind; // which ranks were dry-run
} Plan;

static int dry_runs_alike(const Device *a, const Comm *a_comm, const Device *b, const Comm *b_comm) {
    int alike = device_flops(a, 0) == device_flops(b, 0) && device_flops(a, 1) == device_flops(b, 1);
    for (int c = 0; c < MEM_CATEGORIES; c++) alike &= a->arenas[c].peak == b->arenas[c].peak;
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++)
        alike &= traffic_equal(a_comm->traffic_started[i / COLLECTIVES][i % COLLECTIVES],
                               b_comm->traffic_started[i / COLLECTIVES][i % COLLECTIVES]);
    return alike;
}

static const RankClass *plan_largest(const Plan *p) {
    const RankClass *largest = p->classes;
    for (int c = 1; c < p->count; c++)
        if (device_peak(p->classes[c].dry_run) > device_peak(largest->dry_run)) largest = &p->classes[c];
    return largest;
}

/* "0-3, 8-11, …": the numbers below n that are set, `most` runs of them. */
static void runs_print(FILE *f, const char *set, int n, int most) {
    int runs = 0;
    for (int i = 0, end; i < n; i = end + 1) {
        for (end = i; end < n && set[end]; end++) {}
        if (end == i) continue;
        if (runs++ == most) {
            fprintf(f, ", …");
            return;
        }
        fprintf(f, end - i > 1 ? "%s%d-%d" : "%s%d", runs > 1 ? ", " : "", i, end - 1);
    }
}

/* "pp 1-14, tp 0: ranks 128, 136, 144, … (1792)" */
static void class_print(FILE *f, const Plan *p, int class_index) {
    const Mesh *m = p->mesh;
    int pp = m->size[AXIS_PP], tp = m->size[AXIS_TP], stages = 0, parts = 0, ranks = 0;
    char *of_stage = (char *)checked_malloc((size_t)pp), *of_part = (char *)checked_malloc((size_t)tp),
         *of_rank = (char *)checked_malloc((size_t)m->world);
    for (int r = 0; r < m->world; r++)
        if (p->class_of[r] == class_index)
            of_rank[r] = of_stage[mesh_coordinate(m, r, AXIS_PP)] = of_part[mesh_coordinate(m, r, AXIS_TP)] = 1,
            ranks++;
    for (int i = 0; i < pp; i++) stages += of_stage[i];
    for (int i = 0; i < tp; i++) parts += of_part[i];
    int told = ranks == m->world / (pp * tp) * stages * parts &&
               (stages < pp || parts < tp); // all of those parts of all of those stages
    if (told && stages < pp) fprintf(f, "pp "), runs_print(f, of_stage, pp, pp);
    if (told && parts < tp) fprintf(f, stages < pp ? ", tp " : "tp "), runs_print(f, of_part, tp, tp);
    fprintf(f, ranks > 1 ? "%sranks " : "%srank ", told ? ": " : "");
    runs_print(f, of_rank, m->world, 4);
    if (ranks > 1) fprintf(f, " (%d)", ranks);
    fprintf(f, "\n");
    free(of_stage), free(of_part), free(of_rank);
}

// ---------------------------------------------------------------------------
// the plan for people, and as plan.json

static cJSON *class_json(const Plan *p, int class_index) {
    const RankClass *c = &p->classes[class_index];
    cJSON *json = cJSON_CreateObject(), *ranks = cJSON_AddArrayToObject(json, "ranks");
    for (int r = 0; r < p->mesh->world; r++)
        if (p->class_of[r] == class_index) cJSON_AddItemToArray(ranks, cJSON_CreateNumber(r));
    cJSON_AddStringToObject(json, "peak_when", c->dry_run->peak_when);
    json_add_integer(json, "in_files", (int64_t)device_arenas(c->dry_run, 1));
    cJSON *memory = cJSON_AddObjectToObject(json, "memory");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        json_add_integer(memory, mem_category_names[i], (int64_t)c->dry_run->arenas[i].peak);
    json_add_integer(json, "peak", (int64_t)device_peak(c->dry_run));
    json_add_flops_by_op(json, c->dry_run);
    json_add_traffic(json, c->expected, c->comm->traffic_started, NULL);
    return json;
}

static void class_table(FILE *f, const RankClass *c, int with_buffers) {
    const Device *dry_run = c->dry_run;
    if (with_buffers) fprintf(f, "  memory of a rank by buffer (bytes; of buffers that share a name, the largest)\n");
    for (int i = 0; i < dry_run->num_buffers && with_buffers; i++)
        fprintf(f, "    %-12s %-32s %6d x %16zu\n", mem_category_names[dry_run->buffers[i].category],
                dry_run->buffers[i].name, dry_run->buffers[i].count, dry_run->buffers[i].bytes);
    fprintf(f, "  memory of a rank by category\n");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "    %-45s %22zu%s\n", mem_category_names[i], dry_run->arenas[i].peak,
                dry_run->arenas[i].offloaded ? "  " OFFLOAD_PLACE : "");
    fprintf(f, "    %-45s %22zu  (%.2f GB), first in %s\n", "in all", device_peak(dry_run),
            (double)device_peak(dry_run) / 1e9, dry_run->peak_when);
    if (device_arenas(dry_run, 1))
        fprintf(f, "    %-45s %22zu  (%.2f GB)\n", "in files", device_arenas(dry_run, 1),
                (double)device_arenas(dry_run, 1) / 1e9);
    fprintf(f,
            "  arithmetic of a rank and step: %.6g FLOP (a product of M x N x K counts 2MNK, attention what the mask "
            "lets through)\n",
            device_flops(dry_run, 0));
    if (device_flops(dry_run, 1) > 0)
        fprintf(f, "  and of activations computed again: %.6g FLOP\n", device_flops(dry_run, 1));
    fprintf(f, "  communication of a rank per step%27s %20s\n", "expected", "dry run");
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++)
            if (c->expected[a][o].calls || c->comm->traffic_started[a][o].calls)
                fprintf(f, "    %-13s %-15s %4" PRId64 " calls %14" PRId64 " %20" PRId64 " bytes\n", axis_names[a],
                        collective_names[o], c->comm->traffic_started[a][o].calls, c->expected[a][o].bytes,
                        c->comm->traffic_started[a][o].bytes);
}

/* A class under the other; buffers of the one that needs the most memory. */
static void plan_print(FILE *f, const char *model, int threads, const TensorTable *t, const Plan *p,
                       const char *strategy, int64_t tokens_per_step) {
    const Mesh *m = p->mesh;
    fprintf(f,
            "%s: %.1f M parameters, %s, %d rank%s x %d thread%s: %s over %d, %d replica%s, %" PRId64 " tokens a step; ",
            model, (double)t->num_parameters / 1e6, PRECISION_NAME, m->world, m->world > 1 ? "s" : "", threads,
            threads > 1 ? "s" : "", strategy, mesh_group_size(m, AXIS_FSDP), m->size[AXIS_DP_REPLICATE],
            m->size[AXIS_DP_REPLICATE] > 1 ? "s" : "", tokens_per_step);
    if (p->count == 1) fprintf(f, "all ranks are alike\n");
    else fprintf(f, "%d kinds of ranks\n", p->count);
    for (int c = 0; c < p->count; c++) {
        if (p->count > 1) class_print(f, p, c);
        class_table(f, &p->classes[c], &p->classes[c] == plan_largest(p));
    }
}

// ---------------------------------------------------------------------------
// the rate of bare products

/* FLOP/s of this rank at a plain product of the model's kind, beside which a step's speed is shown. */
static double matmul_rate(Device *dev) {
    const int N = RATE_ROWS, C = RATE_COLS, times = 4;
    OpStat ops[OP_COUNT];
    double clock = dev->clock;
    int64_t events = dev->num_events;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    device_phase(dev, "measuring the product rate", NULL);
    memcpy(ops, dev->ops, sizeof ops);
    floatX *x = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C)),
           *w = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(C * C));
    floatX *y = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C));
    double best = 1e30;
    int most = dev->dry_run ? 0 : (N > C ? N : C) * C;
    floatX *numbers = (floatX *)checked_malloc(sizeof(floatX) * (size_t)most);
    for (int i = 0; i < most; i++) numbers[i] = from_float((float)(i % 17) - 8);
    device_write(dev, x, numbers, sizeof(floatX) * (size_t)(N * C));
    device_write(dev, w, numbers, sizeof(floatX) * (size_t)(C * C));
    free(numbers);
    for (int i = 0; i < times; i++) {
        device_synchronize(dev);
        double start = seconds_now();
        linear_forward(dev, y, x, w, N, C, C);
        device_synchronize(dev);
        best = fmin(best, seconds_now() - start);
    }
    memcpy(dev->ops, ops, sizeof ops); // no op of the step
    device_phase(dev, NULL, NULL);
    dev->clock = clock, timeline_truncate(dev, events);
    arena_release(dev, MEM_WORKSPACE, mark);
    return RATE_COUNTS ? 2.0 * N * C * C / best : 0;
}

#endif
