/* evaluate.h: the loss on a token file, for validation during training and for --eval. */
#ifndef EVALUATE_H
#define EVALUATE_H
#include "../lib/json.h" // defines: json_add_integer, json_real, json_write_line
#include "forward.h"     // defines: model_forward, head_loss
#include "step_report.h" // defines: Trainer, StepReport, sum_reports

typedef struct {
    double loss;          // mean over all targets
    int64_t targets;      // tokens whose loss counts
    double bits_per_byte; // of their text; NAN: there is no tokenizer that could say how many bytes it has
} Evaluation;

/* Reads a micro-batch of windows, from `first` on; those past the end of the data have no targets. Returns the number
 * of targets, and adds the bytes of their text to *bytes. */
static int64_t read_eval_batch(Trainer *trainer, const Dataset *data, int64_t first, int64_t *bytes) {
    const ContextParallel *cp = &trainer->parallel.cp;
    const Model *m = &trainer->model;
    const uint16_t *token_bytes = trainer->job->token_bytes;
    StepBatch *batch = &trainer->eval_batch;
    int64_t num_targets = 0;
    device_synchronize_event(batch->fed);
    for (int b = 0; b < m->B; b++) {
        int n = read_window(data, cp->size, cp->rank, batch, b, first + b, trainer->eval_raw, batch->error);
        if (n < 0) user_error("%s", batch->error);
        num_targets += n;
    }
    for (int64_t i = 0; i < (int64_t)m->B * m->T && token_bytes; i++)
        if (batch->targets[i] >= 0) *bytes += token_bytes[batch->targets[i]];
    return num_targets;
}

/* The loss on the first `max_batches` micro-batches of every rank; 0: on all windows. Every target counts once,
 * whatever the number of ranks. */
static Evaluation evaluate(Trainer *trainer, const Dataset *data, int64_t max_batches) {
    Parallel *p = &trainer->parallel;
    Model *m = &trainer->model;
    int B = m->B, counts = mesh_counts_samples(&p->mesh, p->rank);
    // the ranks of tp and pp read the same targets
    int counts_bytes = !mesh_coordinate(&p->mesh, p->rank, AXIS_TP) && !mesh_coordinate(&p->mesh, p->rank, AXIS_PP);
    int64_t round = (int64_t)B * mesh_data_ranks(&p->mesh), batches = (data->windows + round - 1) / round, bytes = 0;
    StepReport mine = ZERO; // only its loss, targets and bytes are used
    ExactSum sum = ZERO;
    if (p->dev.dry_run) batches = 1;
    if (max_batches) batches = min_i64(batches, max_batches);
    Phase before = comm_phase(&p->comm, PHASE_VALIDATION);
    device_zero(&p->dev, trainer->sums, sums_bytes(trainer));
    for (int64_t i = 0; i < batches; i++) {
        int64_t first = i * round + (int64_t)mesh_data_rank(&p->mesh, p->rank) * B;
        int64_t n = p->dev.dry_run ? 0 : read_eval_batch(trainer, data, first, &bytes);
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
    if (counts_bytes) mine.target_bytes = bytes;
    all_gather_now(&p->comm, AXIS_WORLD, "evaluation", &mine, trainer->reports, sizeof mine);
    comm_phase(&p->comm, before);
    StepStats total = sum_reports(trainer);
    double bits = total.loss * (double)total.targets / log(2.0);
    Evaluation e = {total.loss, total.targets, total.target_bytes ? bits / (double)total.target_bytes : NAN};
    return e;
}

/* --eval: one line of JSON. */
static void print_evaluation(Trainer *trainer) {
    const Job *j = trainer->job;
    Evaluation e = evaluate(trainer, &j->val, 0);
    if (!isfinite(e.loss))
        user_error("the loss of %s on %s is %g, expected a finite number: check that the weights are those of this "
                   "model",
                   j->opt.model, j->opt.eval, e.loss);
    if (trainer->parallel.rank) return;
    cJSON *line = cJSON_CreateObject();
    json_add_name(line, "file", j->opt.eval);
    json_add_integer(line, "tokens", e.targets);
    cJSON_AddItemToObject(line, "loss", json_real("%.9g", e.loss));
    cJSON_AddItemToObject(line, "perplexity", json_real("%.9g", exp(fmin(e.loss, 709)))); // JSON has no infinity
    if (isfinite(e.bits_per_byte)) cJSON_AddItemToObject(line, "bits_per_byte", json_real("%.9g", e.bits_per_byte));
    json_write_line(stdout, line);
}

#endif
