/* step_report.h: what the ranks tell each other at the end of a step, and what they conclude from it.
 *
 * Every rank all-gathers its StepReport. From the same reports each rank computes the same loss and gradient norm, and
 * so decides alike whether to update the weights. A caller may rely on: after check_reports all ranks have started the
 * same collectives in the same order, and ranks that must train on different samples did.
 */
#ifndef STEP_REPORT_H
#define STEP_REPORT_H
#include "../../optimizer.h"  // defines: gradient_squared_norm, Fsdp, ShardPiece
#include "../watch/logger.h"  // defines: Logger, StepStats, RankFigures, Progress, logger_outlier
#include "outliers.h"         // defines: OutlierKind, outlier_z_score
#include "../watch/signals.h" // defines: save_signals, end_signals

/* What each rank tells all others at the end of a step */
typedef struct {
    ExactSum loss;                 // sum over this rank's tokens
    ExactSum squared_norm;         // of the gradient elements that this rank owns
    int64_t targets;               // positions with a loss; 0 if another rank counts the same ones
    int64_t bad_tensor;            // the first tensor whose gradient is not finite; -1: none
    uint64_t seeds;                // hash of the sampler and of the seed of the weights
    uint64_t samples_hash;         // hash of the samples that this rank trained on, and of their tokens
    RankLines lines;               // hashes of the collectives and messages that it started
    int save_signals, end_signals; // signals that its process has received so far
    int is_writing;                // its part of a checkpoint is not on the disk yet
    RankFigures figures;
} StepReport;

enum { SUM_LOSS, SUM_SQUARED_NORM, SUM_Z_LOSS, SUMS };

typedef struct { // exchange_reports fills it in
    Comm *comm;
    ExactSum *sums;          // (SUMS, without --z-loss one fewer) of the step so far, in device memory
    StepReport *of_ranks;    // (world)
    RankFigures *figures;    // (world) the figures in of_ranks
    ExactSum *z_losses;      // (world) sums of all ranks' z-losses; NULL without --z-loss
    Request z_loss_gather;   // the all-gather of z_losses
    int64_t *samples;        // (world, samples_of_rank) the samples of all ranks; NULL: no report names them
    int64_t samples_of_rank; // samples of each rank in a step
    Request samples_gather;  // the all-gather of `samples`, in flight during the step
    int save_signals_seen;   // signals that asked for a checkpoint and were obeyed
    int is_writing;          // some rank's part of a checkpoint is not on the disk yet
} ReportExchange;

static void step_reports_open(ReportExchange *r, Comm *comm, int has_z_loss) {
    Device *dev = comm->dev;
    int world = comm->mesh.world;
    r->comm = comm;
    r->sums = arena_array(ExactSum, dev, MEM_WORKSPACE, "sums of the step", has_z_loss ? SUMS : SUM_Z_LOSS);
    r->of_ranks = arena_array(StepReport, dev, MEM_HOST, "step reports", world);
    r->figures = arena_array(RankFigures, dev, MEM_HOST, "figures of all ranks", world);
    if (has_z_loss) r->z_losses = arena_array(ExactSum, dev, MEM_HOST, "z-losses of all ranks", world);
}

/* From now on the reports name the samples of all ranks, of which each has `samples_of_rank` in a step. */
static void step_reports_name_samples(ReportExchange *r, int64_t samples_of_rank) {
    int64_t count = samples_of_rank * r->comm->mesh.world;
    r->samples_of_rank = samples_of_rank;
    r->samples = arena_array(int64_t, r->comm->dev, MEM_HOST, "samples of all ranks", count);
}

/* Before the first micro-batch of a step, or of an evaluation. */
static void step_reports_begin(ReportExchange *r) {
    device_zero(r->comm->dev, r->sums, sizeof(ExactSum) * (r->z_losses ? SUMS : SUM_Z_LOSS));
}

/* Index, in the whole model, of the first tensor with an element of the gradient that is not finite, among those that
 * this rank owns; -1: there is none. */
static int64_t first_bad_tensor(Fsdp *fsdp) {
    enum { CHUNK = 1 << 14 };
    float *values = new_array(float, CHUNK);
    ShardPiece p;
    int64_t bad = -1;
    for (int i = 0; bad < 0 && next_unique_piece(fsdp, &i, &p);) {
        if (p.tensor->is_frozen) continue; // the gradient norm leaves it out
        for (int64_t done = 0; done < p.count && bad < 0; done += CHUNK) {
            int64_t n = min_i64(CHUNK, p.count - done);
            device_read(fsdp->dev, values, p.unit->grad + p.at + done, sizeof(float) * n);
            for (int64_t e = 0; e < n; e++)
                if (!isfinite(values[e])) bad = p.tensor->index;
        }
    }
    free(values);
    return bad;
}

/* Completes this rank's report, of which the caller has filled in targets, samples and tokens, and all-gathers those of
 * all ranks. Reading the sums from the device waits until all of the step's arithmetic is done: the only place in a
 * step where the host needs results of the device. `start`: when the step started. */
static void exchange_reports(ReportExchange *r, Fsdp *fsdp, StepReport *mine, double start) {
    Comm *comm = r->comm;
    ExactSum sums[SUMS] = ZERO, z_loss = ZERO;
    device_read(comm->dev, sums, r->sums, sizeof(ExactSum) * (r->z_losses ? SUMS : SUM_Z_LOSS));
    exact_merge(&z_loss, &sums[SUM_Z_LOSS]);
    if (r->z_losses)
        all_gather_start(comm, &r->z_loss_gather, AXIS_WORLD, "z-losses", &z_loss, r->z_losses, sizeof z_loss,
                         DTYPE_BYTE);
    exact_merge(&mine->loss, &sums[SUM_LOSS]);
    exact_merge(&mine->squared_norm, &sums[SUM_SQUARED_NORM]);
    mine->bad_tensor = mine->squared_norm.not_finite ? first_bad_tensor(fsdp) : -1;
    mine->save_signals = save_signals;
    mine->end_signals = end_signals;
    if (comm->heartbeat) mine->lines = comm->heartbeat->lines;
    mine->figures.seconds = seconds_now() - start;
    mine->figures.wait_seconds = comm_wait_seconds(comm);
    mine->figures.memory = (int64_t)device_peak(comm->dev);
    all_gather_now(comm, AXIS_WORLD, "step report", mine, r->of_ranks, sizeof *mine);
    comm_wait(comm, &r->z_loss_gather);
}

/* Loss, gradient norm and z-loss (0 without --z-loss) of the step: sums over all ranks and micro-batches, divided once
 * by the number of targets. */
static StepStats sum_reports(const ReportExchange *r) {
    StepStats s = ZERO;
    ExactSum loss = ZERO, squared_norm = ZERO, z_loss = ZERO;
    for (int i = 0; i < r->comm->mesh.world && !r->comm->dev->dry_run; i++) {
        const StepReport *report = &r->of_ranks[i];
        exact_merge(&loss, &report->loss);
        exact_merge(&squared_norm, &report->squared_norm);
        if (r->z_losses) exact_merge(&z_loss, &r->z_losses[i]);
        s.targets += report->targets;
        r->figures[i] = report->figures;
    }
    double targets = (double)max_i64(1, s.targets);
    s.loss = exact_value(&loss) / targets;
    s.grad_norm = sqrt(exact_value(&squared_norm)) / targets;
    s.z_loss = exact_value(&z_loss) / targets;
    s.skipped = !isfinite(s.loss) || !isfinite(s.grad_norm);
    return s;
}

// ---------------------------------------------------------------------------
// checks

/* Did all ranks of each group start the same collectives in the same order, and both ends of each connection the same
 * messages? Each rank compares itself with the ranks before it. On one host this is compared as they start, too. */
static void check_orders(const ReportExchange *r, int64_t step) {
    const int rank = r->comm->rank;
    const RankLines *mine = &r->of_ranks[rank].lines;
    for (int i = 0; i < rank; i++) {
        const RankLines *other = &r->of_ranks[i].lines;
        int line = line_that_differs(other, mine), is_mine = line >= 0;
        if (!is_mine) line = line_that_differs(mine, other); // a connection that only the other rank has opened
        const ChannelEnd *channels = is_mine ? mine->channels : other->channels;
        if (line >= AXES)
            run_failure("step %" PRId64 ": the messages that %s and %s sent each other over %s are not those that "
                        "the other one received",
                        step, rank_name(other->rank), rank_name(rank), axis_names[channels[line - AXES].axis]);
        if (line >= 0)
            run_failure("step %" PRId64 ": %s and %s did not start the same collectives over %s in the same order",
                        step, rank_name(other->rank), rank_name(rank), axis_names[line]);
    }
}

/* Ranks that share a data-parallel coordinate must have trained on the same samples, all others on different ones.
 * Each rank compares itself with the ranks before it. `first_sample`: the first of this rank's samples. */
static void check_samples(const ReportExchange *r, const Sampler *sampler, int64_t step, int64_t first_sample) {
    const Mesh *mesh = &r->comm->mesh;
    const int rank = r->comm->rank;
    const StepReport *all = r->of_ranks, *mine = &all[rank];
    for (int i = 0; i < rank; i++) {
        int same_data = mesh_data_rank(mesh, i) == mesh_data_rank(mesh, rank);
        int same_samples = mine->samples_hash == all[i].samples_hash;
        if (same_samples && !same_data && !sampler_may_repeat(sampler, step - 1))
            run_failure("step %" PRId64 ": %s and %s train on the same samples (both start with window %" PRId64
                        "), but data-parallel ranks must train on different ones",
                        step, rank_name(i), rank_name(rank), first_sample);
        if (same_data && !same_samples)
            run_failure("step %" PRId64 ": %s and %s hold parts of the same replica of the model, but they train on "
                        "different samples, or their files hold different tokens (rank %d starts with window %" PRId64
                        ")",
                        step, rank_name(i), rank_name(rank), rank, first_sample);
    }
}

static void check_reports(const ReportExchange *r, const Sampler *sampler, int64_t step, int64_t first_sample) {
    int rank = r->comm->rank;
    if (r->comm->dev->dry_run) return;
    check_orders(r, step);
    if (r->of_ranks[rank].seeds != r->of_ranks[0].seeds)
        run_failure("step %" PRId64 ": %s shuffles samples or initializes weights with a different seed than rank 0",
                    step, rank_name(rank));
    check_samples(r, sampler, step, first_sample);
}

/* The loss or the gradient norm is not finite. All ranks know the same sums, so all of them skip the update; after
 * MOST_SKIPS such steps the run ends. */
static void report_skip(const ReportExchange *r, const TensorTable *table, Progress *progress, int64_t step,
                        const StepStats *s) {
    char cause[300] = "";
    Sentence t = {cause, sizeof cause, 0};
    int owner = -1, source = -1;
    for (int i = r->comm->mesh.world - 1; i >= 0; i--) {
        int64_t bad = r->of_ranks[i].bad_tensor;
        if (bad >= 0 && (owner < 0 || bad <= r->of_ranks[owner].bad_tensor)) owner = i;
        if (r->of_ranks[i].loss.not_finite) source = i;
    }
    if (owner >= 0)
        say(&t, "first in the gradient of %s, in the shard of %s", table->tensors[r->of_ranks[owner].bad_tensor].name,
            rank_name(owner));
    else
        say(&t, "every gradient element is finite, but %s",
            isfinite(s->loss) ? "some of their squares are not" : "the loss is not");
    if (source >= 0) say(&t, "; the loss of %s is not finite", rank_name(source));
    progress->skips++;
    if (progress->skips > MOST_SKIPS)
        run_failure("step %" PRId64 ": loss %g and gradient norm %g are not both finite (%s), and %d steps were "
                    "skipped before it: lower --lr, lengthen --warmup, or check the data",
                    step, s->loss, s->grad_norm, cause, MOST_SKIPS);
    if (r->comm->rank) return;
    printf("step %6" PRId64 " | update skipped (%" PRId64 " of at most %d): loss %g and gradient norm %g are not both "
           "finite (%s)\n",
           step, progress->skips, MOST_SKIPS, s->loss, s->grad_norm, cause);
    fflush(stdout);
}

/* Computes the z-scores of this step's loss and gradient norm among the last `size` steps, --outlier-window, and then
 * appends both to their windows. */
static void judge_outliers(Outliers *outliers, int size, StepStats *s) {
    const double values[OUTLIER_KINDS] = {s->loss, s->grad_norm};
    if (!size || !s->targets) return; // without a target there is no loss
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        OutlierWindow *window = &outliers->windows[k];
        s->z_scores[k] = outlier_z_score(window, size, values[k]);
        outlier_window_add(window, size, values[k]);
    }
}

/* Lists up to 8 samples of each of up to 4 data-parallel ranks. */
static void say_samples(const ReportExchange *r, Sentence *t) {
    enum { RANKS = 4, SAMPLES = 8 };
    const Mesh *mesh = &r->comm->mesh;
    int64_t count = r->samples_of_rank;
    int ranks = 0;
    for (int rank = 0; rank < mesh->world; rank++) {
        if (!mesh_counts_samples(mesh, rank)) continue;
        ranks++;
        if (ranks > RANKS) continue;
        say(t, "%s rank %d", ranks > 1 ? ";" : "", rank);
        for (int64_t i = 0; i < count && i < SAMPLES; i++)
            say(t, "%s %" PRId64, i ? "," : ":", r->samples[rank * count + i]);
        if (count > SAMPLES) say(t, " and %" PRId64 " more", count - SAMPLES);
    }
    if (ranks > RANKS) say(t, "; and those of %d more ranks", ranks - RANKS);
}

/* Returns 1 and reports the step if its loss or its gradient norm is an outlier. The caller then skips the update. The
 * learning-rate schedule still advances, and such steps do not count for MOST_SKIPS. All ranks know the same sums and
 * decide alike. */
static int skip_outlier(const ReportExchange *r, const RunSettings *run, Progress *progress, const Logger *logger,
                        int64_t step, StepStats *s) {
    const double *z = s->z_scores;
    OutlierKind kind = z[OUTLIER_LOSS] >= z[OUTLIER_NORM] ? OUTLIER_LOSS : OUTLIER_NORM;
    char samples[1024] = "";
    Sentence t = {samples, sizeof samples, 0};
    if (!(z[kind] > run->outlier_z)) return 0;
    s->skipped = 1;
    progress->outliers.skipped++;
    if (r->comm->rank) return 1;
    logger_outlier(logger, step, s, kind);
    say_samples(r, &t);
    printf("step %6" PRId64 " | update skipped (outlier %d): loss %g is %.1f and gradient norm %g is %.1f standard "
           "deviations above the mean of the last %d steps (limit: %g); inspect the samples of%s\n",
           step, progress->outliers.skipped, s->loss, z[OUTLIER_LOSS], s->grad_norm, z[OUTLIER_NORM],
           run->outlier_window, run->outlier_z, samples);
    fflush(stdout);
    return 1;
}

/* A run that has skipped every update has failed, unless all of these steps were outliers. */
static void check_learned(const Progress *before, const Progress *now) {
    int64_t skips = now->skips - before->skips, outliers = now->outliers.skipped - before->outliers.skipped;
    if (skips && now->updates == before->updates)
        run_failure("the updates of all %" PRId64 " steps were skipped: the loss or the gradient norm was not finite "
                    "in %" PRId64 " of them and an outlier in %" PRId64 "; nothing was learned and nothing is saved; "
                    "lower --lr, lengthen --warmup, or check the data",
                    skips + outliers, skips, outliers);
}

/* What signals ask for and has not been done yet: SIGNAL_SAVE, SIGNAL_END. Processes receive a signal that mpirun
 * forwards to all at different moments, so the reports are counted, not this process's own signals. */
static int signals_asked(ReportExchange *r) {
    int to_save = 0, to_end = 0;
    r->is_writing = 0;
    for (int i = 0; i < r->comm->mesh.world; i++) {
        const StepReport *report = &r->of_ranks[i];
        to_save = (int)max_i64(to_save, report->save_signals);
        to_end |= report->end_signals;
        r->is_writing |= report->is_writing;
    }
    int asked = (to_save > r->save_signals_seen ? SIGNAL_SAVE : 0) | (to_end ? SIGNAL_END : 0);
    r->save_signals_seen = to_save;
    return asked;
}

#endif
