/* plan.h: what a training step costs on every kind of rank, found by dry runs, and plan.json.
 *
 * Ranks with the same memory, FLOPs and traffic form a class, and one dry run stands for all of them. train_llama3
 * writes plan.json; plan_llama3 also prints the classes and simulates the step of all ranks together.
 */
#ifndef PLAN_H
#define PLAN_H
#include "layout.h"       // defines: json_add_mesh, json_add_groups
#include "ledger.h"       // defines: Traffic, traffic_equal, json_add_traffic, json_add_flops_by_op
#include "../setup/job.h" // defines: Job, uses_nccl, transport_sums
#include "step_report.h"  // defines: StepReport

typedef struct {
    int first_rank;                        // the lowest rank of the class, whose dry run this is
    struct Trainer *trainer;               // the dry run, which belongs to whoever opened the plan
    const Device *dry_run;                 // its memory, FLOPs and timeline
    Traffic traffic[2][AXES][COLLECTIVES]; // EXPECTED, DRY_RUN
} RankClass;

typedef struct {
    const Job *job;
    const Mesh *mesh;
    RankClass *classes; // (count), ordered by their first ranks
    int count;
    int *class_of; // (world) index into classes
} Plan;

static UnitSizes unit_sizes_of_rank(const Plan *p, int rank) {
    RankLayout layout = rank_layout(&p->job->config, p->mesh->world, rank, &p->job->run);
    return unit_sizes(&layout);
}

/* The rank whose dry run stands for `rank`. Coordinates on other axes than pp and tp change only who a rank's peers
 * are. Tensor-parallel ranks differ where a size does not divide, by one row; with Muon the ranks of an fsdp group
 * differ if they do not own equally many blocks. */
static int plan_representative(const Plan *p, int rank) {
    const Mesh *mesh = p->mesh;
    int first = rank - mesh_coordinate(mesh, rank, AXIS_CP) * mesh_stride(mesh, AXIS_CP);
    first %= mesh_stride(mesh, AXIS_DP_SHARD);
    if (!uses_muon(&p->job->run)) return first;
    // A rank stands for another one of its fsdp group if both make equally many blocks orthogonal. The units are dealt
    // out in turn, so the ranks from units % n on have one unit less.
    int own = rank % mesh_stride(mesh, AXIS_DP_REPLICATE);
    UnitSizes mine = unit_sizes_of_rank(p, own);
    const int tried[] = {0, (int)(mine.block_units % mesh_group_size(mesh, AXIS_FSDP))};
    for (int i = 0; i < 2; i++) {
        int candidate = mesh_group_member(mesh, first, AXIS_FSDP, tried[i]);
        if (candidate <= own && unit_sizes_of_rank(p, candidate).muon_blocks == mine.muon_blocks) return candidate;
    }
    return own;
}

static int is_of_class(const RankClass *c, const Device *dev, const Comm *comm) {
    int equal = !memcmp(comm->traffic_started, c->traffic[DRY_RUN], sizeof comm->traffic_started);
    for (int recomputed = 0; recomputed < 2; recomputed++)
        equal &= device_flops(dev, recomputed) == device_flops(c->dry_run, recomputed);
    for (int i = 0; i < MEM_CATEGORIES; i++) equal &= dev->arenas[i].peak == c->dry_run->arenas[i].peak;
    return equal;
}

static void plan_begin(Plan *p, const Job *j) {
    memset(p, 0, sizeof *p);
    p->job = j;
    p->mesh = &j->mesh;
    p->class_of = new_array(int, j->mesh.world);
}

/* Puts `rank` into the class that its dry run fits, or makes it the first of a new class, which is returned; NULL:
 * there is no new one. */
static RankClass *plan_add(Plan *p, int rank, const Comm *dry_run) {
    const Job *j = p->job;
    int i = 0;
    while (i < p->count && !is_of_class(&p->classes[i], dry_run->dev, dry_run)) i++;
    p->class_of[rank] = i;
    if (i < p->count) return NULL;
    p->classes = (RankClass *)checked_realloc(p->classes, sizeof(RankClass) * (i + 1));
    RankClass *added = &p->classes[p->count++];
    added->first_rank = rank;
    added->dry_run = dry_run->dev;
    memcpy(added->traffic[DRY_RUN], dry_run->traffic_started, sizeof dry_run->traffic_started);
    expected_traffic(added->traffic[EXPECTED], &j->config, j->mesh.world, rank, &j->run, sizeof(StepReport));
    return added;
}

// ---------------------------------------------------------------------------
// plan.json

static cJSON *class_json(const Plan *p, int class_index) {
    const RankClass *c = &p->classes[class_index];
    cJSON *json = cJSON_CreateObject(), *ranks = cJSON_AddArrayToObject(json, "ranks");
    for (int r = 0; r < p->mesh->world; r++)
        if (p->class_of[r] == class_index) cJSON_AddItemToArray(ranks, cJSON_CreateNumber(r));
    cJSON_AddStringToObject(json, "peak_when", c->dry_run->rec.peak_when);
    json_add_integer(json, "in_files", (int64_t)device_arenas(c->dry_run, 1));
    cJSON *memory = cJSON_AddObjectToObject(json, "memory");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        json_add_integer(memory, mem_category_names[i], (int64_t)c->dry_run->arenas[i].peak);
    json_add_integer(json, "peak", (int64_t)device_peak(c->dry_run));
    json_add_flops_by_op(json, c->dry_run);
    cJSON *bytes = cJSON_AddObjectToObject(json, "op_bytes"); // that ops read and write
    for (int i = 0; i < OP_COUNT; i++)
        if (c->dry_run->rec.ops[i].calls) json_add_integer(bytes, op_names[i], llround(c->dry_run->rec.ops[i].bytes));
    json_add_traffic(json, c->traffic, 2);
    return json;
}

/* `estimate`: what plan_llama3 simulated, which this function takes over; NULL: null. */
static cJSON *plan_json(const Plan *p, int64_t tokens_per_step, cJSON *estimate) {
    const Mesh *mesh = p->mesh;
    int *leaders = new_array(int, AXES * mesh->world), key;
    cJSON *root = cJSON_CreateObject();
    json_add_mesh(root, mesh);
    json_add_integer(root, "tokens_per_step", tokens_per_step);
    cJSON *classes = cJSON_AddArrayToObject(root, "rank_classes");
    for (int c = 0; c < p->count; c++) cJSON_AddItemToArray(classes, class_json(p, c));
    for (int r = 0; r < mesh->world; r++)
        for (int a = 0; a < AXES; a++) mesh_group(mesh, r, (Axis)a, &leaders[r * AXES + a], &key);
    json_add_groups(root, mesh, leaders);
    cJSON_AddItemToObject(root, "estimate", estimate ? estimate : cJSON_CreateNull());
    free(leaders);
    return root;
}

/* Writes plan.json into --out, and frees `plan`. */
static void plan_write_file(const char *out, cJSON *plan) {
    FILE *f = out_file_create(out, "plan.json");
    json_write_line(f, plan);
    if (fclose(f)) user_error("cannot write plan.json in --out %s: %s", out, strerror(errno));
}

// ---------------------------------------------------------------------------
// memory: a run that needs more than there is is refused before any rank allocates

/* Bytes that NCCL allocates on a rank's GPU. */
static double nccl_need(const Job *j, const Comm *dry_run) {
    return nccl_memory(&dry_run->mesh, dry_run->traffic_started, dry_run->dev->reductions_apart,
                       transport_sums(&j->run));
}

/* Ends the run if memory is too small. Each rank is taken to need what this dry run needed. With NCCL a rank has a GPU
 * of its own, on which NCCL allocates, too; else all ranks of this host share the memory. */
static void check_memory(const Job *j, const Comm *dry_run) {
    double need = (double)device_need(dry_run->dev), have = j->available_memory, total = j->total_memory;
    char needs[256];
    if (uses_nccl(j)) {
        double of_nccl = nccl_need(j, dry_run);
        need += of_nccl;
        have = device_memory_with_total(dry_run->dev->gpu, &total);
        snprintf(needs, sizeof needs, "%s needs %.2f GB of memory on its GPU %d, %.2f GB of them for NCCL",
                 rank_name(dry_run->rank), need / 1e9, dry_run->dev->gpu, of_nccl / 1e9);
    } else {
        need *= j->local_ranks;
        snprintf(needs, sizeof needs, "the run needs %.2f GB of memory on " DEVICE_NAME " for %d rank%s", need / 1e9,
                 j->local_ranks, j->local_ranks > 1 ? "s" : "");
    }
    char of_total[32] = "";
    if (have < total) snprintf(of_total, sizeof of_total, " of %.2f GB", total / 1e9);
    if (need > have)
        user_error("%s, but %.2f GB%s are free: %suse more hosts or GPUs, a smaller --batch, --seq or --logit-rows, "
                   "--recompute full, or a smaller model (plan_llama3 lists what needs how much)",
                   needs, have / 1e9, of_total,
                   need <= total ? "end other processes on the GPU (nvidia-smi lists them), or " : "");
    double pinned = (double)pinned_need(dry_run->dev) * j->local_ranks, pinnable = pinned_memory();
    if (pinned > pinnable)
        user_error("the run needs %.2f GB of pinned memory on this host for %d rank%s, but %.2f GB are free: use more "
                   "hosts, or offload less",
                   pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", pinnable / 1e9);
}

#endif
