/* evaluation.h: eval_llama3's options and requests, which the ranks of a process share, and a rank's score buffers. */
#ifndef EVALUATION_H
#define EVALUATION_H
#include "../shared/model_tokenizer.h" // defines: ModelTokenizer, Program, Job, Trainer
#include "requests.h"                  // defines: Requests, MOST_SCORE_ROWS

typedef struct {
    const char *eval, *score, *choices;
} EvalOptions;

typedef struct {
    Job job; // first: a rank finds the Evaluations behind its job
    Program program;
    EvalOptions opt;
    ModelTokenizer text;
    Requests requests; // of --score or --choices; count 0: none
} Evaluations;

static const Evaluations *evaluations_of(const Trainer *trainer) { return (const Evaluations *)trainer->job; }

/* The score of one request. */
typedef struct {
    double logprob;    // log-probability of its continuation
    int64_t surprises; // tokens of the continuation that are not the most probable ones
} RequestScore;

typedef struct {
    Trainer *trainer;
    const Requests *requests;
    RequestScore *scores;       // of all requests
    RequestScore *batch_scores; // (1 + world, MOST_SCORE_ROWS) of a batch: this rank's, then those of every rank
    float *host_statistics;     // (tp, fp32_rows, 3) softmax statistics in host memory
} Scoring;

/* Allocates the memory for scores, on a dry-run device or a real one. */
static Scoring scoring_open(Trainer *trainer, const Requests *requests) {
    const Llama3 *m = &trainer->model;
    Device *dev = &trainer->parallel.dev;
    int64_t rows = m->table.head < 0 ? 0 : m->fp32_rows, batches = 1 + trainer->parallel.mesh.world;
    Scoring s = {trainer, requests, NULL, NULL, NULL};
    s.scores = arena_array(RequestScore, dev, MEM_HOST, "scores", requests->count);
    s.batch_scores = arena_array(RequestScore, dev, MEM_HOST, "scores of a batch", batches * MOST_SCORE_ROWS);
    s.host_statistics = arena_array(float, dev, MEM_HOST, "softmax statistics", 3 * rows * m->tp->size);
    return s;
}

#endif
