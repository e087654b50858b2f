/* score.h: log-probabilities of the requests of --score and --choices (requests.h).
 *
 * The ranks divide the batches among them: each data-parallel rank computes one in turn, and after each turn all ranks
 * know its scores. A caller may rely on: with --deterministic a score has the same bits on any number of FSDP ranks. */
#ifndef SCORE_H
#define SCORE_H
#include "../../lib/io/json.h"   // defines: json_add_integer, json_real, json_write_line
#include "../../lib/io/output.h" // defines: check_results
#include "evaluation.h"          // defines: Scoring, RequestScore, Requests, ScoreBatch, Trainer

// ---------------------------------------------------------------------------
// one batch

/* Fills trainer->eval_batch with a batch's requests, padded to T tokens. Only the tokens of continuations are targets.
 */
static void read_score_batch(Trainer *trainer, const Requests *r, const ScoreBatch *batch) {
    const ContextParallel *cp = &trainer->parallel.cp;
    const Llama3 *m = &trainer->model;
    StepBatch *out = &trainer->eval_batch;
    int T = batch->T, own = T / cp->size;
    int32_t *inputs = new_array(int32_t, T), *targets = new_array(int32_t, T);
    device_synchronize_event(out->fed);
    for (int b = 0; b < m->B; b++) {
        for (int t = 0; t < T; t++) {
            inputs[t] = 0;
            targets[t] = -1;
        }
        if (b < batch->rows) {
            const ScoreRequest *request = &r->requests[r->order[batch->first + b]];
            int count = request->tokens - 1; // the last token is only a target
            memcpy(inputs, r->ids + request->first, sizeof(int32_t) * (size_t)count);
            for (int t = count - request->scored; t < count; t++) targets[t] = r->ids[request->first + t + 1];
        }
        if (cp->size > 1) {
            cp_select_halves(inputs, inputs, T, cp->size, cp->rank);
            cp_select_halves(targets, targets, T, cp->size, cp->rank);
        }
        memcpy(out->inputs + (int64_t)b * own, inputs, sizeof(int32_t) * (size_t)own);
        memcpy(out->targets + (int64_t)b * own, targets, sizeof(int32_t) * (size_t)own);
    }
    if (out->docs) memset(out->docs, 0, sizeof(int32_t) * (size_t)m->B * (size_t)T); // a request is one document
    if (out->own_docs) memset(out->own_docs, 0, sizeof(int32_t) * (size_t)m->B * (size_t)own);
    free(inputs);
    free(targets);
}

/* Adds to `scores` (rows of the batch) the log-probabilities of this rank's tokens [first, first + count), whose
 * softmax statistics are in s->host_statistics. */
static void add_scores(const Scoring *s, RequestScore *scores, int first, int count) {
    const Trainer *trainer = s->trainer;
    const Llama3 *m = &trainer->model;
    for (int i = 0; i < count; i++) {
        int n = first + i;
        if (trainer->eval_batch.targets[n] < 0) continue;
        RequestScore *score = &scores[n / m->T];
        LossPart all = join_parts(s->host_statistics, m->tp->size, count, i);
        score->logprob += (double)all.target - (double)all.max - log((double)all.sum);
        score->surprises += all.target < all.max; // another token is more probable
    }
}

/* Like head_loss in train_llama3.cu, but reads each token's softmax statistics instead of its loss, and adds them to
 * `scores`. */
static void score_head(Scoring *s, RequestScore *scores) {
    Llama3 *m = &s->trainer->model;
    int N = m->B * m->T, C = m->config.C, V = m->config.V;
    device_phase(m->dev, "loss", m->table.units[m->table.head].name);
    const HeadWeights w = head_weights(m, NO_GRADIENTS);
    const floatX *x = final_norm_forward(m, &w);
    const Logits logits = model_logits(m, 0);
    for (int first = 0; first < N; first += m->fp32_rows) {
        int count = (int)min_i64(m->fp32_rows, N - first);
        linear_forward_logits(m->dev, logits, x + (int64_t)first * C, w.head, count, C, V);
        const float *statistics = tp_softmax_statistics(m->tp, logits, m->targets + first, count, V);
        if (m->tp->rank) continue; // all tp ranks know the same statistics
        device_read(m->dev, s->host_statistics, statistics, sizeof(float) * 3 * (size_t)(m->tp->size * count));
        if (!m->dev->dry_run) add_scores(s, scores, first, count);
    }
    fsdp_reshard(m->fsdp, fsdp_unit(m, m->table.head), AFTER_LAST_USE);
}

// ---------------------------------------------------------------------------
// all batches

/* Computes the scores of batch `index` and all-gathers those of all ranks. If there is no such batch, the rank computes
 * an empty one, because the others wait for its collectives. */
static void score_batch(Scoring *s, int64_t index) {
    Trainer *trainer = s->trainer;
    const Requests *r = s->requests;
    const ScoreBatch empty = {0, 0, r->batches[r->num_batches - 1].T};
    const ScoreBatch *batch = index < r->num_batches ? &r->batches[index] : &empty;
    Parallel *p = &trainer->parallel;
    Llama3 *m = &trainer->model;
    RequestScore *mine = s->batch_scores;
    size_t bytes = sizeof *mine * MOST_SCORE_ROWS;
    int least_rows = p->cp.size > 1 ? trainer->job->run.batch : 1;
    model_set_tokens(m, (int)max_i64(least_rows, batch->rows), batch->T / p->cp.size, 0);
    if (!p->dev.dry_run) {
        memset(mine, 0, bytes);
        read_score_batch(trainer, r, batch);
    }
    model_forward(m, &p->pipeline, &trainer->eval_batch);
    device_record_event(&p->dev, &trainer->eval_batch.fed);
    if (m->table.head >= 0) score_head(s, mine);
    all_gather_now(&p->comm, AXIS_WORLD, "scores", mine, mine + MOST_SCORE_ROWS, bytes);
}

/* Adds up what all ranks computed in a turn, whose first batch is `first`. */
static void merge_scores(Scoring *s, int64_t first) {
    const Requests *r = s->requests;
    const Mesh *mesh = &s->trainer->parallel.mesh;
    for (int rank = 0; rank < mesh->world; rank++) {
        int64_t index = first + mesh_data_rank(mesh, rank);
        const RequestScore *of_rank = s->batch_scores + (int64_t)(1 + rank) * MOST_SCORE_ROWS;
        if (index >= r->num_batches) continue;
        const ScoreBatch *batch = &r->batches[index];
        for (int b = 0; b < batch->rows; b++) {
            RequestScore *score = &s->scores[r->order[batch->first + b]];
            score->logprob += of_rank[b].logprob;
            score->surprises += of_rank[b].surprises;
        }
    }
}

/* The scores of all requests, in s->scores, on every rank. A dry run computes the first, largest batch of a length. */
static void score_requests(Scoring *s) {
    Trainer *trainer = s->trainer;
    const Requests *r = s->requests;
    Parallel *p = &trainer->parallel;
    Llama3 *m = &trainer->model;
    int B = m->B, T = m->T, data_ranks = mesh_data_ranks(&p->mesh), data_rank = mesh_data_rank(&p->mesh, p->rank);
    Phase before = comm_phase(&p->comm, PHASE_VALIDATION);
    for (int64_t i = 0; i < r->num_batches && p->dev.dry_run; i++)
        if (i == 0 || r->batches[i].T != r->batches[i - 1].T) score_batch(s, i);
    if (!p->dev.dry_run) memset(s->scores, 0, sizeof *s->scores * (size_t)r->count);
    for (int64_t first = 0; first < r->num_batches && !p->dev.dry_run; first += data_ranks) {
        score_batch(s, first + data_rank);
        merge_scores(s, first);
    }
    device_phase(&p->dev, NULL, NULL);
    comm_phase(&p->comm, before);
    model_set_tokens(m, B, T, 0);
}

// ---------------------------------------------------------------------------
// results

/* Scores all requests, and refuses scores that are not finite. */
static void score_all(Scoring *s) {
    const Requests *r = s->requests;
    const RunSettings *run = &s->trainer->job->run;
    if (s->trainer->parallel.rank == 0 && r->num_cut)
        fprintf(stderr,
                "note: %" PRId64 " of %" PRId64 " requests are longer than --seq %d: their contexts begin later\n",
                r->num_cut, r->count, run->seq);
    score_requests(s);
    for (int64_t i = 0; i < r->count; i++)
        if (!isfinite(s->scores[i].logprob))
            user_error("%s, line %d: the log-probability is %g, expected a finite number: check that the weights of %s "
                       "are those of this model",
                       r->path, r->requests[i].line, s->scores[i].logprob, run->model);
}

/* --score: one line of JSON for each request, in the order of the file. */
static void print_scores(const Scoring *s) {
    for (int64_t i = 0; i < s->requests->count; i++) {
        const ScoreRequest *request = &s->requests->requests[i];
        cJSON *line = cJSON_CreateObject();
        if (request->name) cJSON_AddRawToObject(line, "id", request->name);
        cJSON_AddItemToObject(line, "logprob", json_real("%.9g", s->scores[i].logprob));
        json_add_integer(line, "tokens", request->scored);
        cJSON_AddBoolToObject(line, "greedy", !s->scores[i].surprises);
        json_write_line(stdout, line);
        check_results();
    }
}

typedef struct {
    double plain, normalized;
} Accuracy;

/* The part of the tasks whose right ending scores highest; `normalized`: per byte. Of equal scores the first counts. */
static Accuracy accuracy_of_scores(const Requests *r, const RequestScore *scores) {
    int64_t right = 0, right_per_byte = 0;
    for (int64_t i = 0; i < r->num_tasks; i++) {
        const ChoiceTask *task = &r->tasks[i];
        int best = 0, best_per_byte = 0;
        const RequestScore *of_task = scores + task->first;
        const ScoreRequest *endings = r->requests + task->first;
        for (int e = 1; e < task->endings; e++) {
            if (of_task[e].logprob > of_task[best].logprob) best = e;
            if (of_task[e].logprob / endings[e].ending_bytes >
                of_task[best_per_byte].logprob / endings[best_per_byte].ending_bytes)
                best_per_byte = e;
        }
        right += best == task->label;
        right_per_byte += best_per_byte == task->label;
    }
    Accuracy a = {(double)right / (double)r->num_tasks, (double)right_per_byte / (double)r->num_tasks};
    return a;
}

/* --choices: one line of JSON. */
static void print_accuracy(const Scoring *s) {
    Accuracy a = accuracy_of_scores(s->requests, s->scores);
    cJSON *line = cJSON_CreateObject();
    json_add_integer(line, "tasks", s->requests->num_tasks);
    cJSON_AddItemToObject(line, "accuracy", json_real("%.9g", a.plain));
    cJSON_AddItemToObject(line, "accuracy_norm", json_real("%.9g", a.normalized));
    json_write_line(stdout, line);
}

#endif
