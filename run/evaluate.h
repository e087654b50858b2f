/* evaluate.h: the loss on token files, for validation and for eval_llama3. */
#ifndef EVALUATE_H
#define EVALUATE_H
#include "forward.h"     // defines: model_forward, head_loss
#include "step_report.h" // defines: Trainer, StepReport, sum_reports

typedef struct {
    double loss;          // mean over all targets
    int64_t targets;      // tokens whose loss counts
    double bits_per_byte; // of their text; NAN: the files do not say how many bytes it has
} Evaluation;

/* Reads a micro-batch of windows, from `first` on; those past the end of the data have no targets. Returns the number
 * of targets. */
static int64_t read_eval_batch(Trainer *trainer, const Dataset *data, int64_t first) {
    const ContextParallel *cp = &trainer->parallel.cp;
    const Model *m = &trainer->model;
    StepBatch *batch = &trainer->eval_batch;
    int64_t num_targets = 0;
    device_synchronize_event(batch->fed);
    for (int b = 0; b < m->B; b++) {
        int n = read_window(data, cp->size, cp->rank, batch, b, first + b, trainer->eval_raw, batch->error);
        if (n < 0) user_error("%s", batch->error);
        num_targets += n;
    }
    return num_targets;
}

/* The loss on the first `max_batches` micro-batches of every rank; 0: on all windows. Every target counts once,
 * whatever the number of ranks. For some of the windows, bits per byte take a target's text to be as long as it is on
 * average in the files. */
static Evaluation evaluate(Trainer *trainer, const Dataset *data, int64_t max_batches) {
    Parallel *p = &trainer->parallel;
    Model *m = &trainer->model;
    int B = m->B, counts = mesh_counts_samples(&p->mesh, p->rank);
    int64_t round = (int64_t)B * mesh_data_ranks(&p->mesh), batches = (data->windows + round - 1) / round;
    StepReport mine = ZERO; // only its loss and targets are used
    ExactSum sum = ZERO;
    if (p->dev.dry_run) batches = 1;
    if (max_batches) batches = min_i64(batches, max_batches);
    Phase before = comm_phase(&p->comm, PHASE_VALIDATION);
    device_zero(&p->dev, trainer->sums, sums_bytes(trainer));
    for (int64_t i = 0; i < batches; i++) {
        int64_t first = i * round + (int64_t)mesh_data_rank(&p->mesh, p->rank) * B;
        int64_t n = p->dev.dry_run ? 0 : read_eval_batch(trainer, data, first);
        if (counts) mine.targets += n;
        model_forward(m, &p->pipeline, &trainer->eval_batch);
        device_record_event(&p->dev, &trainer->eval_batch.fed);
        if (m->table.head < 0) continue;
        head_loss(m, NO_GRADIENTS);
        fsdp_reshard(m->fsdp, fsdp_unit(m, m->table.head), AFTER_LAST_USE);
    }
    device_phase(&p->dev, NULL, NULL);
    device_read(&p->dev, &sum, &trainer->sums[SUM_LOSS], sizeof sum);
    exact_merge(&mine.loss, &sum);
    all_gather_now(&p->comm, AXIS_WORLD, "evaluation", &mine, trainer->reports, sizeof mine);
    comm_phase(&p->comm, before);
    StepStats total = sum_reports(trainer);
    double bits = total.loss * (double)total.targets / log(2.0);
    double bytes = (double)data->target_bytes * ((double)total.targets / (double)data->targets);
    Evaluation e = {total.loss, total.targets, bytes > 0 ? bits / bytes : NAN};
    return e;
}

#endif
