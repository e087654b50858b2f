/* one_rank.h: a job on one rank, opened as by the program, for measurements. A file that includes this one includes
 * train_llama3.cu first. */
#ifndef ONE_RANK_H
#define ONE_RANK_H

typedef struct {
    Job *job;
    Trainer trainer, dry_run;
} OneRank;

/* Opens a job whose options and purpose are set. */
static OneRank *one_rank_open(Job *j) {
    OneRank *o = (OneRank *)checked_malloc(sizeof *o);
    o->job = j;
    j->transport = j->host_transport = &transport_threads;
    job_prepare(j, 1, 1, 1);
    dry_run_open(&o->dry_run, j, 0, NULL);
    trainer_open(&o->trainer, &o->dry_run, j, 0, NULL);
    return o;
}

static void one_rank_close(OneRank *o) {
    trainer_close(&o->trainer);
    trainer_close(&o->dry_run);
    job_close(o->job);
    free(o);
}

#endif
