/* plan_llama3.cu: plans a training run without running it: memory, traffic and, on the machines of a cluster file, the
 * time of a step, for any number of ranks on a laptop. It takes the options of train_llama3, and includes that program:
 * every rank is dry-run by the code that would train, and all ranks are simulated together.
 *
 *   plan_llama3 --model llama3-8b --world 64                                          memory and traffic
 *   plan_llama3 --model llama3-8b --world 64 --cluster dev/clusters/h100-8.json       and the time of a step
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --out DIR --trace FILE    plan.json, plan.html, a timeline
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --simulate stages         one rank of each stage: fast
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --search                  the fastest layouts
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --mtbf 5000               what failures of hosts cost
 */
#include "../programs/trainer.h"        // defines: the training program
#include "../run/cluster.h" // defines: Cluster, cluster_open
#include "simulate.h"       // defines: Simulation
#include "estimate.h"       // defines: plan_simulate, estimate_of, print_estimate
#include "alternatives.h"   // defines: print_alternatives
#include "goodput_plan.h"   // defines: goodput_plan, print_goodput
#include "search.h"         // defines: search_main
#include "report.h"         // defines: report_write_file, write_simulated_trace
#include "stages.h"         // defines: StageTime, print_stage_times

/* Plans a stage, which is the whole run without --recipe. `stages`: a recipe's stages, to which this one is added;
 * NULL: there is none. The files under --out describe the last stage that was planned, and plan.json lists all. */
static StageTime plan_one_layout(Job *j, const Cluster *cluster, cJSON *stages) {
    const Options *o = &j->opt;
    int64_t tokens = samples_per_step(o, &j->mesh) * o->seq;
    Plan plan;
    EventLists events;
    Simulation simulation;
    Estimate estimate = ZERO;
    cJSON *goodput = NULL;
    char problem[8192];
    double start = seconds_now();
    int simulates_all = !strcmp(o->simulate, "all");
    plan_open(&plan, j, simulates_all ? DRY_RUN_ALL : DRY_RUN_STAGES, &events);
    if (!plan_simulate(&simulation, &plan, &events, cluster, cluster && (o->trace || o->out), problem, sizeof problem))
        run_failure("the ranks of the plan do not fit together: %s", problem);
    print_stage(j);
    plan_print(stdout, j, &plan, tokens);
    print_simulation(stdout, &events, &simulation, seconds_now() - start);
    if (cluster) {
        estimate = estimate_of(&plan, &events, cluster, &simulation, j);
        print_estimate(stdout, cluster, &plan, &estimate);
    }
    if (!stages && simulates_all) print_alternatives(stdout, j, &plan, cluster, cluster ? &estimate : NULL);
    if (o->mtbf) {
        GoodputPlan with_failures = goodput_plan(j, cluster, estimate.step_seconds);
        goodput = print_goodput(stdout, &with_failures, o);
    }
    if (stages) cJSON_AddItemToArray(stages, stage_json(j, &plan, cluster ? estimate_json(&estimate) : NULL));
    cJSON *listed = stages ? cJSON_Duplicate(stages, 1) : NULL;
    for (const Job *s = j->next; s && s->problem; s = s->next) cJSON_AddItemToArray(listed, stage_json(s, NULL, NULL));
    if (o->out) {
        report_write_file(o->out, j, &plan, &simulation, cluster, &estimate, goodput);
        plan_write_file(o->out, &plan, tokens, cluster ? estimate_json(&estimate) : NULL, goodput, listed);
    } else {
        cJSON_Delete(goodput);
        cJSON_Delete(listed);
    }
    if (o->trace) write_simulated_trace(j, &simulation);
    StageTime time = {memory_needed(&plan, cluster), estimate.step_seconds, estimate.mfu,
                      cluster ? estimate.flops / estimate.step_seconds : 0};
    simulation_close(&simulation);
    event_lists_close(&events);
    plan_close(&plan);
    return time;
}

/* All stages of a recipe, and a table of them. */
static void plan_stages(Job *j, const Cluster *cluster) {
    StageTime times[MOST_RECIPE_STAGES];
    cJSON *stages = cJSON_CreateArray();
    int count = 0;
    memset(times, 0, sizeof times);
    for (Job *s = j; s; s = s->next, count++)
        if (!s->problem) times[count] = plan_one_layout(s, cluster, stages);
        else cJSON_AddItemToArray(stages, stage_json(s, NULL, NULL));
    print_stage_times(stdout, j, cluster, times);
    cJSON_Delete(stages);
}

/* Refuses options that a plan cannot honour. */
static void check_plan_options(const Options *o) {
    static const char *const others[] = {"eval", "score",  "choices", "choices-every", "generate", "prompts",
                                         "chat", "export"};
    for (int i = 0; i < (int)(sizeof others / sizeof *others); i++)
        if (option_given(o, others[i]))
            user_error("--%s is an option of train_llama3; plan_llama3 plans training: remove it", others[i]);
    if (o->search && !o->cluster)
        user_error("--search compares estimated step times, which need a cluster: add --cluster FILE (dev/clusters has "
                   "some), or remove --search");
    if (o->search && (o->out || o->trace))
        user_error("--search prints a list of layouts, and --%s describes a single one: remove one of them",
                   o->out ? "out" : "trace");
    if (o->search && option_given(o, "simulate"))
        user_error("--simulate %s has no effect with --search, which simulates one rank of each pipeline stage of "
                   "every layout: remove --simulate",
                   o->simulate);
    if (o->trace && !o->cluster)
        user_error("--trace %s: an estimated timeline needs a cluster: add --cluster FILE (dev/clusters has some), or "
                   "remove --trace",
                   o->trace);
}

int main(int argc, char **argv) {
    static Job job; // large for a small stack
    Cluster cluster;
    output_prepare();
    job.opt = options_parse(argc, argv);
    if (help_or_version(&job.opt, 1, PLAN_LLAMA3)) return 0;
    check_plan_options(&job.opt);
    check_goodput_options(&job.opt);
    job.opt.plan = 1;
    job.opt.program = PLAN_LLAMA3;
    LaunchInfo started = {0, 1, 0, 1, 1};
    job_open(&job, &started);
    if (job.opt.cluster) {
        cluster_open(&cluster, job.opt.cluster, &job.mesh, job.opt.threads, job.opt.transport,
                     transport_sums(&job.opt));
        job.op_rates = &cluster.rates;
    }
    for (Job *s = &job; s; s = s->next) s->op_rates = job.op_rates;
    if (job.opt.search) {
        for (Job *s = &job; s; s = s->next) {
            print_stage(s);
            search_main(s, &cluster);
        }
    } else {
        job_check_outputs(&job);
        if (job.recipe.path) plan_stages(&job, job.opt.cluster ? &cluster : NULL);
        else plan_one_layout(&job, job.opt.cluster ? &cluster : NULL, NULL);
    }
    if (job.opt.cluster) cluster_close(&cluster);
    finish_results();
    job_close(&job);
    return 0;
}
