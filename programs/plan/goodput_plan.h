/* goodput_plan.h: the goodput of a plan: step and save times from options or a cluster, the simulated table on standard
 * output, and "goodput" in plan.json. */
#ifndef GOODPUT_PLAN_H
#define GOODPUT_PLAN_H
#include "../shared/cluster.h" // defines: Cluster, collective_seconds
#include "goodput.h"           // defines: GoodputInput, Goodput, simulate_goodput, best_interval
#include "plan_options.h"      // defines: Planning, PlanOptions, Job

// ---------------------------------------------------------------------------
// what is simulated

/* Refuses what cannot be simulated for lack of a figure. */
static void check_goodput_options(const Planning *p) {
    const PlanOptions *o = &p->opt;
    static const char *const needs_mtbf[] = {"hosts",    "spares",       "repair",       "detect",
                                             "relaunch", "step-seconds", "save-seconds", "pause-seconds"};
    for (int i = 0; i < 8 && !o->mtbf; i++)
        if (program_given(&p->program, needs_mtbf[i]))
            user_error("--%s has no effect without --mtbf: add --mtbf, or remove --%s", needs_mtbf[i], needs_mtbf[i]);
    if (!o->mtbf) return;
    if (o->search)
        user_error("--mtbf simulates failures of one layout, and --search compares many: remove one of them");
    if (!o->cluster && !o->step_seconds)
        user_error("--mtbf needs the time of a step: add --step-seconds X, or --cluster FILE to estimate it");
    if (!o->cluster && !o->hosts)
        user_error("--mtbf is the time between failures of one host: add --hosts N, or --cluster FILE, which says how "
                   "many ranks a host has");
    if (!o->cluster && !program_given(&p->program, "save-seconds"))
        user_error("--mtbf needs the time of a save: add --save-seconds X, or --cluster FILE to estimate it");
    if (program_given(&p->program, "pause-seconds") && program_given(&p->program, "save-seconds") &&
        o->pause_seconds > o->save_seconds)
        user_error(
            "--pause-seconds %g exceeds --save-seconds %g: expected at most as much, because the pause is a part "
            "of the save",
            o->pause_seconds, o->save_seconds);
}

/* Bytes of a checkpoint: fp32 weights and both moments of all trained parameters. */
static double checkpoint_bytes(const Job *j) { return 3.0 * sizeof(float) * (double)j->table.num_trained; }

/* About how long a save stops training: until every rank has received all that is written (checkpoint_writer.h). Each
 * unit is all-gathered over fsdp, then over tp; then every pipeline stage receives it and sends it on. */
static double gather_seconds(const Job *j, const Cluster *c) {
    const Mesh *mesh = &j->mesh;
    double bytes = checkpoint_bytes(j), seconds = 0;
    int shards = mesh_group_size(mesh, AXIS_FSDP), tp = mesh->size[AXIS_TP], pp = mesh->size[AXIS_PP];
    if (j->run.sharding == NO_SHARD) shards = 1;
    if (shards > 1)
        seconds += collective_seconds(&c->collectives[AXIS_FSDP][ALL_GATHER], bytes / tp * (shards - 1) / shards);
    if (tp > 1) seconds += collective_seconds(&c->collectives[AXIS_TP][ALL_GATHER], bytes * (tp - 1) / tp);
    if (pp > 1) seconds += 2 * collective_seconds(&c->collectives[AXIS_PP][RECEIVE], bytes * (pp - 1) / pp);
    return seconds;
}

typedef struct {
    GoodputInput in;
    double bytes;         // of a save
    double gather, write; // of an estimated save: seconds until all ranks have received it, and to write it
    int save_measured;    // --save-seconds was given
    int pause_known;      // in.pause is given or estimated, so that async saves can be simulated
} GoodputPlan;

/* `cluster` NULL: the options give all figures. `step_seconds`: the estimate. */
static GoodputPlan goodput_plan(const Planning *of, const Job *j, const Cluster *cluster, double step_seconds) {
    const PlanOptions *o = &of->opt;
    GoodputPlan p = ZERO;
    GoodputInput *in = &p.in;
    int measured_pause = program_given(&of->program, "pause-seconds");
    in->hosts = o->hosts ? o->hosts : (int)blocks_of(j->mesh.world, cluster->ranks_per_host);
    in->spares = o->spares;
    in->host_mtbf = 3600 * o->mtbf;
    in->repair = 3600 * o->repair;
    in->detect = program_given(&of->program, "detect") ? o->detect : j->run.timeout;
    in->relaunch = o->relaunch;
    in->step = o->step_seconds ? o->step_seconds : step_seconds;
    in->steps = j->run.steps;
    in->seed = (uint64_t)j->run.seed;
    p.bytes = checkpoint_bytes(j);
    p.gather = cluster ? gather_seconds(j, cluster) : 0;
    p.save_measured = program_given(&of->program, "save-seconds");
    p.pause_known = cluster || measured_pause;
    if (!p.save_measured && cluster->storage <= 0)
        user_error(
            "--cluster %s lacks \"storage_bytes_per_s\", from which --mtbf estimates the time of a save: add it, "
            "or --save-seconds X",
            o->cluster);
    p.write = p.save_measured ? 0 : p.bytes / cluster->storage;
    in->save = p.save_measured ? o->save_seconds : fmax(p.gather, p.write); // a unit is written once it is gathered
    in->pause = fmin(measured_pause ? o->pause_seconds : p.gather, in->save);
    return p;
}

// ---------------------------------------------------------------------------
// printed, and in plan.json

/* Simulates runs, prints them as a row of the table and adds it to `rows`. */
static Goodput goodput_row(FILE *f, cJSON *rows, const GoodputInput *in, int is_async, int64_t interval,
                           const char *which) {
    Goodput g = simulate_goodput(in, is_async, interval);
    double wall = wall_seconds(&g);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "save_mode", is_async ? "async" : "sync");
    cJSON_AddStringToObject(row, "interval", which);
    cJSON_AddNumberToObject(row, "save_every", (double)interval);
    cJSON_AddNumberToObject(row, "spares", in->spares);
    cJSON_AddNumberToObject(row, "goodput", goodput_of(&g));
    cJSON_AddNumberToObject(row, "standard_error", g.standard_error);
    cJSON_AddNumberToObject(row, "interruptions", g.failures / g.runs);
    fprintf(f, "    %-5s  %-12s %9" PRId64 " %7d %8.2f +- %.2f %%", is_async ? "async" : "sync", which, interval,
            in->spares, 100 * goodput_of(&g), 100 * g.standard_error);
    cJSON *lost = cJSON_AddObjectToObject(row, "lost");
    for (int i = 0; i < LOST_CAUSES; i++) {
        cJSON_AddNumberToObject(lost, lost_names[i], g.lost[i] / wall);
        fprintf(f, "%10.2f %%", 100 * g.lost[i] / wall);
    }
    if (g.unfinished) fprintf(f, "  %d of %d simulated runs were given up", g.unfinished, g.runs);
    fprintf(f, "\n");
    cJSON_AddItemToArray(rows, row);
    return g;
}

static void print_goodput_input(FILE *f, const GoodputPlan *p) {
    const GoodputInput *in = &p->in;
    fprintf(f,
            "  goodput, simulated with failing hosts: the part of the wall-clock time that advances training\n"
            "    %d host%s with an MTBF of %.6g h each: MTBF of the run %.4g h; %.4g failures expected in %" PRId64
            " steps of %.4g s (%.4g days)\n",
            in->hosts, in->hosts > 1 ? "s" : "", in->host_mtbf / 3600, run_mtbf(in) / 3600, expected_failures(in),
            in->steps, in->step, (double)in->steps * in->step / 86400);
    fprintf(f, "    a save of %.4g GB takes %.4g s", p->bytes / 1e9, in->save);
    if (!p->save_measured)
        fprintf(f, " (estimate: %.4g s until every rank has received what is written, and %.4g s to write it)",
                p->gather, p->write);
    if (p->pause_known) fprintf(f, "; with --save-mode async it stops training for %.4g s", in->pause);
    fprintf(
        f,
        "\n    after a failure: %.4g s until it is noticed, %.4g s to relaunch; a failed host is back after %.4g h\n",
        in->detect, in->relaunch, in->repair / 3600);
    fprintf(f, "    Young-Daly interval sqrt(2 x cost of a save x MTBF of the run): sync %.4g s",
            young_daly_seconds(in, 0));
    if (p->pause_known) fprintf(f, ", async %.4g s", young_daly_seconds(in, 1));
    fprintf(f, "\n");
}

/* Rows for the interval of --save-every, for Young and Daly's and for the best one. Returns the best. */
static int64_t goodput_rows(FILE *f, cJSON *rows, const GoodputInput *in, int is_async, int save_every) {
    int64_t best = best_interval(in, is_async);
    if (save_every) goodput_row(f, rows, in, is_async, min_i64(save_every, in->steps), "--save-every");
    goodput_row(f, rows, in, is_async, steps_of_seconds(in, young_daly_seconds(in, is_async)), "Young-Daly");
    goodput_row(f, rows, in, is_async, best, "best");
    return best;
}

/* Rows for 0, 1, 2, 4, … spares and for the given number, until no time is lost waiting for hosts. */
static void spares_rows(FILE *f, cJSON *rows, const GoodputInput *given, int is_async, int64_t interval) {
    GoodputInput in = *given;
    for (int spares = 0, next = 0; spares <= 1 << 20; spares = next) {
        in.spares = spares;
        Goodput g = goodput_row(f, rows, &in, is_async, interval, "with spares");
        if (spares >= given->spares && g.lost[LOST_WAITING] < 1e-4 * wall_seconds(&g)) return;
        next = spares ? 2 * spares : 1;
        if (spares < given->spares && next > given->spares) next = given->spares;
    }
}

/* Prints the table. Returns the same figures for plan.json. */
static cJSON *print_goodput(FILE *f, const GoodputPlan *p, const RunSettings *run) {
    const GoodputInput *in = &p->in;
    int is_async = run->save_mode == SAVE_ASYNC;
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "run_mtbf_s", run_mtbf(in));
    cJSON_AddNumberToObject(json, "failures_expected", expected_failures(in));
    cJSON_AddNumberToObject(json, "hosts", in->hosts);
    cJSON_AddNumberToObject(json, "step_s", in->step);
    cJSON_AddNumberToObject(json, "save_s", in->save);
    if (p->pause_known) cJSON_AddNumberToObject(json, "pause_s", in->pause);
    cJSON_AddNumberToObject(json, "young_daly_sync_s", young_daly_seconds(in, 0));
    cJSON *rows = cJSON_AddArrayToObject(json, "rows");
    print_goodput_input(f, p);
    fprintf(f, "    %-5s  %-12s %9s %7s %18s", "saves", "interval", "steps", "spares", "goodput");
    for (int i = 0; i < LOST_CAUSES; i++) fprintf(f, "%12s", lost_names[i]);
    fprintf(f, "\n");
    int64_t best = goodput_rows(f, rows, in, 0, run->save_every);
    if (p->pause_known) {
        int64_t best_async = goodput_rows(f, rows, in, 1, run->save_every);
        best = is_async ? best_async : best;
    } else {
        fprintf(f, "    async saves are not simulated: add --pause-seconds X, for how long one stops training\n");
    }
    int64_t interval = run->save_every ? min_i64(run->save_every, in->steps) : best;
    spares_rows(f, rows, in, is_async && p->pause_known, interval);
    return json;
}

#endif
