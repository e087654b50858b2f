/* plan_llama3.cu: plans a training run without running it: memory, traffic and, on the machines of a cluster file, the
 * time of a step, for any number of ranks on a laptop. It takes the options of train_llama3, and includes that program:
 * every rank is dry-run by the code that would train, and all ranks are simulated together.
 *
 *   plan_llama3 --model llama3-8b --world 64                                          memory and traffic
 *   plan_llama3 --model llama3-8b --world 64 --cluster dev/clusters/h100-8.json       and the time of a step
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --out DIR --trace FILE    plan.json, plan.html, a timeline
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --simulate stages         one rank of each stage: fast
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --search                  the fastest layouts
 *   plan_llama3 --model llama3-8b --world 64 --cluster FILE --mtbf 5000               what failures of hosts cost */
#include "plan/plan_options.h" // defines: Planning, plan_program, plan_purpose, plan_launch
#include "plan/plan_print.h"   // defines: plan_print, PeriodTime, print_period_times, period_json
#include "plan/simulate.h"     // defines: Simulation
#include "plan/estimate.h"     // defines: plan_simulate, estimate_of, print_estimate
#include "plan/alternatives.h" // defines: print_alternatives
#include "plan/goodput_plan.h" // defines: goodput_plan, print_goodput
#include "plan/search.h"       // defines: search_main
#include "plan/report.h"       // defines: report_write_file, write_simulated_trace

/* Plans a period, which is the whole run without --recipe. `periods`: a recipe's periods, to which this one is added;
 * NULL: there is none. The files under --out describe the last period that was planned, and plan.json lists all. */
static PeriodTime plan_one_layout(const Planning *of, Job *j, const Cluster *cluster, cJSON *periods) {
    const RunSettings *run = &j->run;
    int64_t tokens = samples_per_step(run, &j->mesh) * run->seq;
    Plan plan;
    EventLists events;
    Simulation simulation;
    Estimate estimate = ZERO;
    cJSON *goodput = NULL;
    char problem[8192];
    double start = seconds_now();
    int simulates_all = of->opt.simulate == SIMULATE_ALL;
    plan_dry_run(&plan, j, simulates_all ? DRY_RUN_ALL : DRY_RUN_STAGES, &events);
    if (!plan_simulate(&simulation, &plan, &events, cluster, cluster && (run->trace || run->out), problem,
                       sizeof problem))
        run_failure("the ranks of the plan do not fit together: %s", problem);
    print_period(j);
    plan_print(stdout, j, &plan, tokens);
    print_simulation(stdout, &events, &simulation, seconds_now() - start);
    if (cluster) {
        estimate = estimate_of(&plan, &events, cluster, &simulation, j);
        print_estimate(stdout, cluster, &plan, &estimate);
    }
    if (!periods && simulates_all) print_alternatives(stdout, j, &plan, cluster, cluster ? &estimate : NULL);
    if (of->opt.mtbf) {
        GoodputPlan with_failures = goodput_plan(of, j, cluster, estimate.step_seconds);
        goodput = print_goodput(stdout, &with_failures, run);
    }
    if (periods) cJSON_AddItemToArray(periods, period_json(j, &plan, cluster ? estimate_json(&estimate) : NULL));
    cJSON *listed = periods ? cJSON_Duplicate(periods, 1) : NULL;
    for (const Job *next = j->next_period; next && next->problem; next = next->next_period)
        cJSON_AddItemToArray(listed, period_json(next, NULL, NULL));
    if (run->out) {
        report_write_file(run->out, j, &plan, &simulation, cluster, &estimate, goodput);
        cJSON *json = plan_json(&plan, tokens, cluster ? estimate_json(&estimate) : NULL);
        if (goodput) cJSON_AddItemToObject(json, "goodput", goodput);
        if (listed) cJSON_AddItemToObject(json, "stages", listed);
        plan_write_file(run->out, json);
    } else {
        cJSON_Delete(goodput);
        cJSON_Delete(listed);
    }
    if (run->trace) write_simulated_trace(j, &simulation);
    PeriodTime time = {memory_needed(&plan, cluster), estimate.step_seconds, estimate.mfu,
                       cluster ? estimate.flops / estimate.step_seconds : 0};
    simulation_close(&simulation);
    event_lists_close(&events);
    plan_close(&plan);
    return time;
}

/* All periods of a recipe, and a table of them. */
static void plan_periods(Planning *of, const Cluster *cluster) {
    Job *j = &of->job;
    PeriodTime times[MOST_RECIPE_PERIODS] = ZERO;
    cJSON *periods = cJSON_CreateArray();
    int count = 0;
    for (Job *period = j; period; period = period->next_period, count++)
        if (!period->problem) times[count] = plan_one_layout(of, period, cluster, periods);
        else cJSON_AddItemToArray(periods, period_json(period, NULL, NULL));
    print_period_times(stdout, j, cluster, times);
    cJSON_Delete(periods);
}

/* Refuses options that a plan cannot honour. */
static void check_plan_options(const Planning *p) {
    const PlanOptions *o = &p->opt;
    const RunSettings *run = &p->job.run;
    if (o->search && !o->cluster)
        user_error("--search compares estimated step times, which need a cluster: add --cluster FILE (dev/clusters has "
                   "some), or remove --search");
    if (o->search && (run->out || run->trace))
        user_error("--search prints a list of layouts, and --%s describes a single one: remove one of them",
                   run->out ? "out" : "trace");
    if (o->search && program_given(&p->program, "simulate"))
        user_error("--simulate %s has no effect with --search, which simulates one rank of each pipeline stage of "
                   "every layout: remove --simulate",
                   o->simulate == SIMULATE_ALL ? "all" : "stages");
    if (run->trace && !o->cluster)
        user_error("--trace %s: an estimated timeline needs a cluster: add --cluster FILE (dev/clusters has some), or "
                   "remove --trace",
                   run->trace);
    if (o->mtbf && run->recipe)
        user_error("--mtbf simulates a run of equal steps, and the stages of --recipe %s differ: plan a stage with its "
                   "own options, without --recipe",
                   run->recipe);
}

static void plan_all(Planning *p, const Cluster *cluster) {
    Job *j = &p->job;
    for (Job *period = j; period && p->opt.search; period = period->next_period) {
        print_period(period);
        search_main(period, cluster);
    }
    if (p->opt.search) return;
    job_check_outputs(j);
    if (j->recipe.path) plan_periods(p, cluster);
    else plan_one_layout(p, j, cluster, NULL);
}

#ifndef TESTING_PROGRAM
/* Says what the plan of GPUs takes to be as on this machine, unless it is asked for. */
static void note_gpus(const RunSettings *run, const Cluster *c) {
    int in_fp32 = FLOATX == DTYPE_F32;
    if (!c->rates.times.has_streams || (asks_nccl(run) && !in_fp32)) return;
    fprintf(stderr, "note: %s describes GPUs%s%s\n", c->path,
            asks_nccl(run) ? "" : "; --transport nccl plans memory and communication as NCCL needs them",
            in_fp32 ? "; this build plans in fp32, and one of make PRECISION=bf16 in bf16" : "");
}

int main(int argc, char **argv) {
    static Planning p; // large for a small stack
    Cluster cluster;
    Job *j = &p.job;
    p.program = plan_program;
    if (!program_begin(&p.program, &p.opt, j, argc, argv)) return 0;
    check_plan_options(&p);
    check_goodput_options(&p);
    j->purpose = plan_purpose();
    LaunchInfo planned = plan_launch(j, p.opt.world);
    job_open(j, &planned);
    if (p.opt.cluster) {
        cluster_open(&cluster, p.opt.cluster, &j->mesh, j->run.threads, option_choice(&j->run, "transport"),
                     transport_sums(&j->run));
        for (Job *period = j; period; period = period->next_period) period->op_times = &cluster.rates.times;
        note_gpus(&j->run, &cluster);
    }
    plan_all(&p, p.opt.cluster ? &cluster : NULL);
    if (p.opt.cluster) cluster_close(&cluster);
    finish_results();
    job_close(j);
    return 0;
}
#endif
