/* step_report.h: what the ranks tell each other at the end of a step, and what they conclude from it.
 *
 * Every rank all-gathers its StepReport. From the same reports each rank computes the same loss and gradient norm, and
 * so decides alike whether to update the weights. A caller may rely on: after check_reports all ranks have started the
 * same collectives in the same order, and ranks that must train on different samples did.
 */
#ifndef STEP_REPORT_H
#define STEP_REPORT_H
#include "trainer.h" // defines: Trainer, StepReport, SUM_LOSS, SUM_SQUARED_NORM

/* Index, in the whole model, of the first tensor with an element of the gradient that is not finite, among those that
 * this rank owns; -1: there is none. */
static int64_t first_bad_tensor(Trainer *trainer) {
    enum { CHUNK = 1 << 14 };
    float *values = new_array(float, CHUNK);
    ShardPiece p;
    int64_t bad = -1;
    for (int i = 0; bad < 0 && next_unique_piece(&trainer->parallel.fsdp, &i, &p);) {
        if (p.tensor->is_frozen) continue; // the gradient norm leaves it out
        for (int64_t done = 0; done < p.count && bad < 0; done += CHUNK) {
            int64_t n = min_i64(CHUNK, p.count - done);
            device_read(&trainer->parallel.dev, values, p.unit->grad + p.at + done, sizeof(float) * n);
            for (int64_t e = 0; e < n; e++)
                if (!isfinite(values[e])) bad = p.tensor->index;
        }
    }
    free(values);
    return bad;
}

/* All-gathers the reports of all ranks. Reading the sums from the device waits until all of the step's arithmetic is
 * done: the only place in a step where the host needs results of the device. `start`: when the step started. */
static void exchange_reports(Trainer *trainer, const StepBatch *batch, double start) {
    Parallel *p = &trainer->parallel;
    const Options *o = &trainer->job->opt;
    StepReport report = ZERO;
    ExactSum sums[SUMS] = ZERO, z_loss = ZERO;
    gradient_squared_norm(&p->fsdp, &trainer->sums[SUM_SQUARED_NORM]);
    device_read(&p->dev, sums, trainer->sums, sums_bytes(trainer));
    exact_merge(&z_loss, &sums[SUM_Z_LOSS]);
    if (trainer->z_losses)
        all_gather_start(&p->comm, &trainer->z_loss_gather, AXIS_WORLD, "z-losses", &z_loss, trainer->z_losses,
                         sizeof z_loss, DTYPE_BYTE);
    exact_merge(&report.loss, &sums[SUM_LOSS]);
    exact_merge(&report.squared_norm, &sums[SUM_SQUARED_NORM]);
    report.bad_tensor = report.squared_norm.not_finite ? first_bad_tensor(trainer) : -1;
    report.targets = mesh_counts_samples(&p->mesh, p->rank) ? batch->num_targets : 0;
    report.samples_hash = batch->samples_hash;
    report.seeds = sampler_fingerprint(&trainer->loader.sampler) ^ mix64(p->fsdp.seed);
    report.save_signals = save_signals;
    report.end_signals = end_signals;
    report.is_writing = is_writing(&trainer->writer);
    if (p->comm.heartbeat) report.lines = p->comm.heartbeat->lines;
    report.figures.seconds = seconds_now() - start;
    report.figures.wait_seconds = comm_wait_seconds(&p->comm);
    report.figures.tokens = (int64_t)o->batch * o->seq * o->accum / mesh_stride(&p->mesh, AXIS_DP_SHARD);
    report.figures.memory = (int64_t)device_peak(&p->dev);
    all_gather_now(&p->comm, AXIS_WORLD, "step report", &report, trainer->reports, sizeof report);
    comm_wait(&p->comm, &trainer->z_loss_gather);
}

/* Loss and gradient norm of the step: sums over all ranks and micro-batches, divided once by the number of targets. */
static StepStats sum_reports(const Trainer *trainer) {
    StepStats s = ZERO;
    ExactSum loss = ZERO, squared_norm = ZERO;
    for (int i = 0; i < trainer->parallel.mesh.world && !trainer->parallel.dev.dry_run; i++) {
        const StepReport *report = &trainer->reports[i];
        exact_merge(&loss, &report->loss);
        exact_merge(&squared_norm, &report->squared_norm);
        s.targets += report->targets;
        trainer->figures[i] = report->figures;
    }
    s.loss = exact_value(&loss) / (double)max_i64(1, s.targets);
    s.grad_norm = sqrt(exact_value(&squared_norm)) / (double)max_i64(1, s.targets);
    s.skipped = !isfinite(s.loss) || !isfinite(s.grad_norm);
    return s;
}

/* The mean z-loss of the step's targets, added up like the loss; 0 without --z-loss. */
static double mean_z_loss(const Trainer *trainer, int64_t targets) {
    ExactSum sum = ZERO;
    if (!trainer->z_losses || trainer->parallel.dev.dry_run) return 0;
    for (int i = 0; i < trainer->parallel.mesh.world; i++) exact_merge(&sum, &trainer->z_losses[i]);
    return exact_value(&sum) / (double)max_i64(1, targets);
}

// ---------------------------------------------------------------------------
// checks

/* Did all ranks of each group start the same collectives in the same order, and did both ends of each connection start
 * the same messages? On one host collectives are compared as they start; this compares hosts too. */
static void check_orders(const Trainer *trainer, int64_t step) {
    const Parallel *p = &trainer->parallel;
    const StepReport *all = trainer->reports;
    const RankLines *mine = &all[p->rank].lines;
    for (int i = 0; i < 2 * p->rank; i++) {
        const RankLines *other = &all[i / 2].lines, *a = i % 2 ? mine : other, *b = i % 2 ? other : mine;
        int line = line_that_differs(a, b);
        if (line >= AXES)
            run_failure("step %" PRId64 ": the messages that %s and %s sent each other over %s are not those that "
                        "the other one received",
                        step, rank_name(other->rank), rank_name(p->rank), axis_names[b->channels[line - AXES].axis]);
        if (line >= 0)
            run_failure("step %" PRId64 ": %s and %s did not start the same collectives over %s in the same order",
                        step, rank_name(other->rank), rank_name(p->rank), axis_names[line]);
    }
}

/* Ranks that share a data-parallel coordinate must have trained on the same samples, all others on different ones.
 * `first_window`: the first of this rank's samples. */
static void check_samples(const Trainer *trainer, int64_t step, int64_t first_window) {
    const Parallel *p = &trainer->parallel;
    const StepReport *all = trainer->reports, *mine = &all[p->rank];
    for (int i = 0; i < p->rank; i++) {
        int same_data = mesh_data_rank(&p->mesh, i) == mesh_data_rank(&p->mesh, p->rank);
        int same_samples = mine->samples_hash == all[i].samples_hash;
        if (same_samples && !same_data && !sampler_may_repeat(&trainer->loader.sampler, step - 1))
            run_failure("step %" PRId64 ": %s and %s train on the same samples (both start with window %" PRId64
                        "), but data-parallel ranks must train on different ones",
                        step, rank_name(i), rank_name(p->rank), first_window);
        if (same_data && !same_samples)
            run_failure("step %" PRId64 ": %s and %s hold parts of the same replica of the model, but they train on "
                        "different samples, or their files hold different tokens (rank %d starts with window %" PRId64
                        ")",
                        step, rank_name(i), rank_name(p->rank), p->rank, first_window);
    }
}

static void check_reports(const Trainer *trainer, int64_t step, int64_t first_window) {
    int rank = trainer->parallel.rank;
    if (trainer->parallel.dev.dry_run) return;
    check_orders(trainer, step);
    if (trainer->reports[rank].seeds != trainer->reports[0].seeds)
        run_failure("step %" PRId64 ": %s shuffles samples or initializes weights with a different seed than rank 0",
                    step, rank_name(rank));
    check_samples(trainer, step, first_window);
}

/* The loss or the gradient norm is not finite. All ranks know the same sums, so all of them skip the update; after
 * MOST_SKIPS such steps the run ends. */
static void skip_update(Trainer *trainer, int64_t step, const StepStats *s) {
    char cause[300];
    int owner = -1, source = -1, used = 0;
    for (int i = trainer->parallel.mesh.world - 1; i >= 0; i--) {
        int64_t bad = trainer->reports[i].bad_tensor;
        if (bad >= 0 && (owner < 0 || bad <= trainer->reports[owner].bad_tensor)) owner = i;
        if (trainer->reports[i].loss.not_finite) source = i;
    }
    if (owner >= 0)
        used = snprintf(cause, sizeof cause, "first in the gradient of %s, in the shard of %s",
                        trainer->job->table.tensors[trainer->reports[owner].bad_tensor].name, rank_name(owner));
    else
        used = snprintf(cause, sizeof cause, "every gradient element is finite, but %s",
                        isfinite(s->loss) ? "some of their squares are not" : "the loss is not");
    if (source >= 0)
        snprintf(cause + used, sizeof cause - (size_t)used, "; the loss of %s is not finite", rank_name(source));
    trainer->progress.skips++;
    if (trainer->progress.skips > MOST_SKIPS)
        run_failure("step %" PRId64 ": loss %g and gradient norm %g are not both finite (%s), and %d steps were "
                    "skipped before it: lower --lr, lengthen --warmup, or check the data",
                    step, s->loss, s->grad_norm, cause, MOST_SKIPS);
    if (trainer->parallel.rank) return;
    printf("step %6" PRId64 " | update skipped (%" PRId64 " of at most %d): loss %g and gradient norm %g are not both "
           "finite (%s)\n",
           step, trainer->progress.skips, MOST_SKIPS, s->loss, s->grad_norm, cause);
    fflush(stdout);
}

/* Computes the z-scores of this step's loss and gradient norm among the last --outlier-window steps, and then appends
 * both to their windows. */
static void judge_outliers(Trainer *trainer, StepStats *s) {
    const double values[OUTLIER_KINDS] = {s->loss, s->grad_norm};
    int size = trainer->job->opt.outlier_window;
    if (!size || !s->targets) return; // without a target there is no loss
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        OutlierWindow *window = &trainer->progress.outliers.windows[k];
        s->z_scores[k] = outlier_z_score(window, size, values[k]);
        outlier_window_add(window, size, values[k]);
    }
}

/* Lists up to 8 samples of each of up to 4 data-parallel ranks. */
static void say_samples(const Trainer *trainer, Sentence *t) {
    enum { RANKS = 4, SAMPLES = 8 };
    const Mesh *mesh = &trainer->parallel.mesh;
    int64_t count = trainer->loader.samples;
    int ranks = 0;
    for (int rank = 0; rank < mesh->world; rank++) {
        if (!mesh_counts_samples(mesh, rank)) continue;
        ranks++;
        if (ranks > RANKS) continue;
        say(t, "%s rank %d", ranks > 1 ? ";" : "", rank);
        for (int64_t i = 0; i < count && i < SAMPLES; i++)
            say(t, "%s %" PRId64, i ? "," : ":", trainer->samples[rank * count + i]);
        if (count > SAMPLES) say(t, " and %" PRId64 " more", count - SAMPLES);
    }
    if (ranks > RANKS) say(t, "; and those of %d more ranks", ranks - RANKS);
}

/* Returns 1 and reports the step if its loss or its gradient norm is an outlier. The caller then skips the update. The
 * learning-rate schedule still advances, and such steps do not count for MOST_SKIPS. All ranks know the same sums and
 * decide alike. */
static int skip_outlier(Trainer *trainer, int64_t step, StepStats *s) {
    const Options *o = &trainer->job->opt;
    const double *z = s->z_scores;
    OutlierKind kind = z[OUTLIER_LOSS] >= z[OUTLIER_NORM] ? OUTLIER_LOSS : OUTLIER_NORM;
    char samples[1024] = "";
    Sentence t = {samples, sizeof samples, 0};
    if (!(z[kind] > o->outlier_z)) return 0;
    s->skipped = 1;
    trainer->progress.outliers.skipped++;
    if (trainer->parallel.rank) return 1;
    logger_outlier(&trainer->logger, step, s, kind);
    say_samples(trainer, &t);
    printf("step %6" PRId64 " | update skipped (outlier %d): loss %g is %.1f and gradient norm %g is %.1f standard "
           "deviations above the mean of the last %d steps (limit: %g); inspect the samples of%s\n",
           step, trainer->progress.outliers.skipped, s->loss, z[OUTLIER_LOSS], s->grad_norm, z[OUTLIER_NORM],
           o->outlier_window, o->outlier_z, samples);
    fflush(stdout);
    return 1;
}

/* A run that has skipped every update has failed, unless all of these steps were outliers. */
static void check_learned(const Progress *before, const Progress *now) {
    int64_t skips = now->skips - before->skips, outliers = now->outliers.skipped - before->outliers.skipped;
    if (skips && now->updates == before->updates)
        run_failure(
            "the updates of all %" PRId64 " steps were skipped: the loss or the gradient norm was not finite in "
            "%" PRId64 " of them and an outlier in %" PRId64 "; nothing was learned and nothing is saved; lower "
            "--lr, lengthen --warmup, or check the data",
            skips + outliers, skips, outliers);
}

/* What signals ask for and has not been done yet: SIGNAL_SAVE, SIGNAL_END. Processes receive a signal that mpirun
 * forwards to all at different moments, so the reports are counted, not this process's own signals. */
static int signals_asked(Trainer *trainer) {
    int to_save = 0, to_end = 0;
    trainer->is_writing = 0;
    for (int i = 0; i < trainer->parallel.mesh.world; i++) {
        const StepReport *report = &trainer->reports[i];
        to_save = (int)max_i64(to_save, report->save_signals);
        to_end |= report->end_signals;
        trainer->is_writing |= report->is_writing;
    }
    int asked = (to_save > trainer->save_signals_seen ? SIGNAL_SAVE : 0) | (to_end ? SIGNAL_END : 0);
    trainer->save_signals_seen = to_save;
    return asked;
}

#endif
