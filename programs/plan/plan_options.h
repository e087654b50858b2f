/* plan_options.h: the options that plan_llama3 has beside those of a training run. */
#ifndef PLAN_OPTIONS_H
#define PLAN_OPTIONS_H
#include "../shared/program.h" // defines: Program, OptionRow, Job, Purpose, LaunchInfo

enum { SIMULATE_ALL, SIMULATE_STAGES };

typedef struct {
    const char *cluster;
    int simulate, plan, world, search, hosts, spares;
    double mtbf, repair, detect, relaunch, step_seconds, save_seconds, pause_seconds; // mtbf, repair: hours
} PlanOptions;

typedef struct {
    Job job; // what is planned
    Program program;
    PlanOptions opt;
} Planning;

#define FIELD(f) offsetof(PlanOptions, f)
static const OptionRow plan_options[] = {
    GROUP("what is planned"),
    INT("world", world, 0, 1 << 20, "N", "0", "the number of ranks; 0: as many as --ranks says, or 1"),
    TEXT("cluster", cluster, "FILE", NULL,
         "estimate the time of a step on the machines that FILE describes (examples in dev/clusters and dev/results); "
         "with --out, also write plan.html"),
    CHOICE(
        "simulate", simulate, "all|stages", "all",
        "all: dry-run and simulate every rank; stages: only one rank of each pipeline stage, which is much faster, "
        "but prints no alternative options and ignores that tensor-parallel ranks differ by a row where --tp does not "
        "divide a size"),
    FLAG("search", search,
         "with --cluster: list the fastest layouts that fit in memory and train as many sequences per step as these "
         "options; options of "
         "the mesh, pipeline, sharding and recomputation that are given stay fixed"),
    FLAG("plan", plan, "accepted in commands of earlier versions; has no effect"),
    GROUP("failures of hosts"),
    REAL("mtbf", mtbf, 1e-6, 1e12, "HOURS", NULL,
         "simulate failures over the run of --steps steps: mean time between failures of one host; prints the best "
         "interval between checkpoints and the part of the time that trains"),
    INT("hosts", hosts, 1, 1 << 20, "N", NULL, "hosts of the run, instead of those of the cluster file"),
    INT("spares", spares, 0, 1 << 20, "N", "0", "hosts that replace failed ones"),
    REAL("repair", repair, 0, 1e6, "HOURS", "4", "until a failed host is back"),
    REAL("detect", detect, 0, 1e6, "SECONDS", NULL,
         "until a failure is noticed and the run has ended (default: --timeout)"),
    REAL("relaunch", relaunch, 0, 1e6, "SECONDS", "120",
         "from starting the run again until it trains, with reading the checkpoint"),
    REAL("step-seconds", step_seconds, 1e-9, 1e6, "X", NULL,
         "measured time of a step, instead of the cluster file's estimate"),
    REAL("save-seconds", save_seconds, 0, 1e6, "X", NULL,
         "measured time of a save, which a run prints, instead of an estimate"),
    REAL("pause-seconds", pause_seconds, 0, 1e6, "X", NULL,
         "for how long a save stops training with --save-mode async, which a run prints"),
};
#undef FIELD
static const Program plan_program = {
    "plan_llama3", NULL, plan_options, sizeof plan_options / sizeof *plan_options, {0}};

static Purpose plan_purpose(void) {
    Purpose p = training();
    p.program = plan_program.name;
    p.plans = 1;
    return p;
}

/* How the planned run would be started: chooses its transport, as if GPUs that are not here were on another machine.
 * `world`: --world; 0: the ranks of --ranks. */
static LaunchInfo plan_launch(Job *j, int world) {
    RunSettings *run = &j->run;
    int ranks_here = (int)max_i64(1, run->ranks), shares_gpu = ranks_here > 1 && device_count_or_none() == 1;
    LaunchInfo planned = {0, world ? world : ranks_here, 0, ranks_here, ranks_here};
    if (CUDA_BUILD && run->transport == TRANSPORT_AUTO && !shares_gpu) run->transport = TRANSPORT_NCCL;
    return planned;
}

#endif
