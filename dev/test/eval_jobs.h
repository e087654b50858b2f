/* eval_jobs.h: jobs of eval_llama3, for tests whose command lines have --eval or --score, and their loss. */
#ifndef TEST_EVAL_JOBS_H
#define TEST_EVAL_JOBS_H
#include "jobs.h"

static int is_evaluation(int argc, char **argv) {
    return has_word(argv, argc, "--eval") || has_word(argv, argc, "--score");
}

static Job *evaluation_job(int argc, char **argv) {
    Evaluations *e = new_array(Evaluations, 1);
    e->program = eval_program;
    job_take_options(&e->job, program_options_parse(&e->program, &e->opt, argc, argv));
    e->job.purpose = eval_purpose();
    return &e->job;
}

static double eval_loss;
static int64_t eval_targets;

static void eval_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Evaluation e = evaluate(&o->trainer, &j->val, 0);
    if (rank == 0) {
        eval_loss = e.loss;
        eval_targets = e.targets;
    }
    close_rank(o);
}

#endif
