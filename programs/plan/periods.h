/* periods.h: the table of a recipe's periods: how long each takes, and whether the layout fits in memory in each. */
#ifndef PLAN_PERIODS_H
#define PLAN_PERIODS_H
#include "../shared/cluster.h" // defines: Cluster
#include "../shared/program.h" // defines: Job, RecipePeriod, samples_per_step, with_commas

/* The plan of one period. */
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

#endif
