/* rank_figures.h: how fast each rank is and what it waits for, and the summary of all ranks. */
#ifndef RANK_FIGURES_H
#define RANK_FIGURES_H
#include "../../lib/device/base.h"

typedef struct {         // of one rank: in one step, or summed over steps
    double seconds;      // from the start of the step to its report, which comes before the optimizer
    double wait_seconds; // waiting for other ranks
    int64_t tokens;
    int64_t memory; // peak bytes of all arenas in memory
} RankFigures;

/* What is reported of a rank: in metrics.jsonl, and all but the seconds in the table at the end of a run. */
enum { RANK_RATE, RANK_COMPUTE, RANK_WAIT, RANK_MEMORY, RANK_SECONDS, RANK_COLUMNS };
static const struct {
    const char *name, *format;
} rank_columns[RANK_COLUMNS] = {
    {"tokens_per_s", "%.1f"}, {"compute_s", "%.6f"}, {"wait_s", "%.6f"}, {"memory", "%.0f"}, {"seconds", "%.6f"}};

static void rank_row(const RankFigures *r, double row[RANK_COLUMNS]) {
    row[RANK_RATE] = (double)r->tokens / r->seconds;
    row[RANK_COMPUTE] = fmax(0, r->seconds - r->wait_seconds);
    row[RANK_WAIT] = r->wait_seconds;
    row[RANK_MEMORY] = (double)r->memory;
    row[RANK_SECONDS] = r->seconds;
}

typedef struct {
    double least[RANK_COLUMNS], mean[RANK_COLUMNS], most[RANK_COLUMNS];
    int slowest; // the rank that computed longest
    double lead; // its time of computing relative to the mean
} RankSummary;

static RankSummary rank_summary(const RankFigures *ranks, int world) {
    RankSummary all = ZERO;
    double row[RANK_COLUMNS];
    for (int i = 0; i < world; i++) {
        rank_row(&ranks[i], row);
        if (row[RANK_COMPUTE] > all.most[RANK_COMPUTE]) all.slowest = i;
        for (int k = 0; k < RANK_COLUMNS; k++) {
            all.least[k] = i ? fmin(all.least[k], row[k]) : row[k];
            all.mean[k] += row[k] / world;
            all.most[k] = fmax(all.most[k], row[k]);
        }
    }
    all.lead = all.mean[RANK_COMPUTE] > 0 ? all.most[RANK_COMPUTE] / all.mean[RANK_COMPUTE] : 1;
    return all;
}

#endif
