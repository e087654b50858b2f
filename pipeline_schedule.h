/* pipeline_schedule.h: which micro-batch each rank of a pipeline computes when: 1F1B and interleaved 1F1B.
 *
 * The model's blocks are cut into P * V stages for P ranks: virtual stage v of rank p is stage v * P + p, so an
 * activation passes from rank to rank in a ring, and its gradient the other way. A caller may rely on: a stage's
 * backwards come in the order of micro-batches, so that their sum has the same bits as on one rank; on the last stage a
 * backward follows its forward at once; and no two ranks wait for each other (see schedule_open).
 */
#ifndef PIPELINE_SCHEDULE_H
#define PIPELINE_SCHEDULE_H
#include "lib/device/base.h"

/* Each rank runs forwards until the pipeline is full (warm-up), then one forward and one backward in turn (1F1B), then
 * the remaining backwards. 3 ranks with one stage each, 5 micro-batches:
 *
 *   rank 0   F0  F1  F2  .   .   B0  F3  B1  F4  B2  .   B3  .   B4       Narayanan et al. 2021, section 2.2;
 *   rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  .   B4  .        Llama 3 paper, section 3.3.2
 *   rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  .   .
 *
 * The dots are the bubble, the time of P - 1 micro-batches on a rank. With V stages per rank (interleaved 1F1B) it is V
 * times shorter, but there are V times as many messages, and more activations are alive. */
typedef enum { PIPE_FORWARD, PIPE_BACKWARD } PipelineStepKind;

typedef struct {
    PipelineStepKind kind;
    int micro_batch;
    int stage;            // which of this rank's virtual stages, from 0
    int activation_set;   // which of the stage's sets of activations it fills, or uses up
    int receive_buffer;   // which of the receive buffers of its kind has its input
    int receives_started; // how many of the schedule's receives must be started before it
} PipelineStep;

typedef struct {
    int pp, pp_rank;
    int virtual_stages; // per rank
    int micro_batches;
    int num_steps;          // 2 * micro_batches * virtual_stages
    PipelineStep *steps;    // (num_steps) in the order of execution
    int *activation_sets;   // (virtual_stages) how many sets of activations are alive at the same time, at most
    int num_receives;       //
    int *receives;          // (num_receives) steps with an input from another rank, in the order of starting to receive
    int receive_buffers[2]; // of forwards and of backwards: how many inputs are received and not yet used, at most
} Schedule;

/* The number of one of this rank's virtual stages among all stages of the pipeline. */
static inline int stage_number(const Schedule *s, int virtual_stage) { return virtual_stage * s->pp + s->pp_rank; }

/* The pipeline rank that has a stage; -1: there is no such stage. */
static inline int rank_of_stage(const Schedule *s, int stage) {
    return stage < 0 || stage == s->pp * s->virtual_stages ? -1 : stage % s->pp;
}

/* The pipeline rank that sends a step's input; -1: the input is the tokens, or the loss. */
static inline int pipeline_source(const Schedule *s, const PipelineStep *step) {
    return rank_of_stage(s, stage_number(s, step->stage) + (step->kind == PIPE_FORWARD ? -1 : 1));
}

/* The pipeline rank that receives a step's output; -1: none does. */
static inline int pipeline_target(const Schedule *s, const PipelineStep *step) {
    return rank_of_stage(s, stage_number(s, step->stage) + (step->kind == PIPE_FORWARD ? 1 : -1));
}

/* A rank's n-th forward: P micro-batches pass its first stage, then its second one, up to the last; then the next P
 * micro-batches. Backwards likewise, from the last stage to the first. */
static inline PipelineStep pipeline_step(const Schedule *s, PipelineStepKind kind, int n) {
    int P = s->pp, V = s->virtual_stages, stage = n / P % V;
    PipelineStep step = ZERO;
    step.kind = kind;
    step.micro_batch = n / (P * V) * P + n % P;
    step.stage = kind == PIPE_FORWARD ? stage : V - 1 - stage;
    return step;
}

/* How many forwards a rank runs before it alternates between a forward and a backward: one per later rank. With several
 * stages per rank it is two per later rank, because the gradient of one micro-batch is on its way while the next one's
 * is computed, and all forwards of the stages before the last. Megatron-LM's schedules are equally long. */
static inline int warm_up_forwards(const Schedule *s) {
    int later_ranks = s->pp - s->pp_rank - 1;
    int warm_up = s->virtual_stages == 1 ? later_ranks : 2 * later_ranks + (s->virtual_stages - 1) * s->pp;
    return (int)min_i64(s->micro_batches * s->virtual_stages, warm_up);
}

/* The order of a rank's steps: the forwards of the warm-up, then a forward and a backward in turn, then the backwards
 * that are left. */
static inline void order_steps(Schedule *s) {
    int forwards = s->micro_batches * s->virtual_stages, warm_up = warm_up_forwards(s);
    for (int forward = 0, backward = 0; backward < forwards; s->num_steps++) {
        int is_forward = forward < forwards && forward - backward <= warm_up;
        s->steps[s->num_steps] =
            is_forward ? pipeline_step(s, PIPE_FORWARD, forward) : pipeline_step(s, PIPE_BACKWARD, backward);
        forward += is_forward;
        backward += !is_forward;
    }
}

/* The steps of one rank, and how many sets of activations each stage needs. */
static void schedule_steps(Schedule *s, int pp, int pp_rank, int virtual_stages, int micro_batches) {
    memset(s, 0, sizeof *s);
    s->pp = pp;
    s->pp_rank = pp_rank;
    s->virtual_stages = virtual_stages;
    s->micro_batches = micro_batches;
    s->steps = new_array(PipelineStep, 2 * micro_batches * virtual_stages);
    s->activation_sets = new_array(int, s->virtual_stages);
    order_steps(s);
    int *alive = new_array(int, s->virtual_stages);
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep step = s->steps[i];
        alive[step.stage] += step.kind == PIPE_FORWARD ? 1 : -1;
        s->activation_sets[step.stage] = (int)max_i64(alive[step.stage], s->activation_sets[step.stage]);
    }
    for (int i = 0; i < s->num_steps; i++) { // micro-batches end in the order in which they began
        PipelineStep *step = &s->steps[i];
        step->activation_set = step->micro_batch % s->activation_sets[step->stage];
    }
    free(alive);
}

static void schedule_close(Schedule *s) {
    free(s->steps);
    free(s->activation_sets);
    free(s->receives);
    memset(s, 0, sizeof *s);
}

/* Simulates all ranks, where a forward takes 1, a backward 2 and a message 0: when each step of this rank ends, and
 * when its input arrives, both (num_steps). Every rank gets the same result for the same step. */
static void schedule_simulate(const Schedule *s, int *ends, int *arrivals) {
    int P = s->pp, stages = P * s->virtual_stages, left = P * s->num_steps;
    Schedule *ranks = new_array(Schedule, P);
    int *next = new_array(int, P);                              // step of each rank
    int *now = new_array(int, P);                               // time on each rank
    int *ended = new_array(int, 2 * s->micro_batches * stages); // 0: not yet
    for (int p = 0; p < P; p++) schedule_steps(&ranks[p], P, p, s->virtual_stages, s->micro_batches);
    while (left)
        for (int p = 0; p < P; p++)
            for (; next[p] < s->num_steps; next[p]++, left--) {
                const PipelineStep *step = &ranks[p].steps[next[p]];
                int backward = step->kind == PIPE_BACKWARD, stage = stage_number(&ranks[p], step->stage);
                int *end = &ended[(step->kind * s->micro_batches + step->micro_batch) * stages + stage];
                int has_source = pipeline_source(&ranks[p], step) >= 0;
                int arrival = has_source ? end[backward ? 1 : -1] : 0; // when the neighbouring stage has ended
                if (has_source && !arrival) break;
                now[p] = (int)max_i64(now[p], arrival) + (backward ? 2 : 1);
                *end = now[p];
                if (p != s->pp_rank) continue;
                ends[next[p]] = now[p];
                arrivals[next[p]] = arrival;
            }
    for (int p = 0; p < P; p++) schedule_close(&ranks[p]);
    free(ranks);
    free(next);
    free(now);
    free(ended);
}

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Decides when each receive is started, and into which buffer. All messages of the pipeline have one order, that of the
 * simulated times at which they are sent, then of the senders. A rank starts its receives and its sends in this order,
 * so even if its messages run strictly one after the other, no two ranks wait for each other. */
static void schedule_receives(Schedule *s) {
    int *ends = new_array(int, s->num_steps);
    int *arrivals = new_array(int, s->num_steps);
    int64_t *order = new_array(int64_t, s->num_steps);                         // (time, sender, step)
    int started[2] = {0, 0}, used[2] = {0, 0}, numbered[2] = {0, 0}, next = 0; // by kind of step
    s->receives = new_array(int, s->num_steps);
    schedule_simulate(s, ends, arrivals);
    for (int i = 0; i < s->num_steps; i++) {
        int from = pipeline_source(s, &s->steps[i]);
        if (from >= 0) order[s->num_receives++] = ((int64_t)arrivals[i] * s->pp + from) * s->num_steps + i;
    }
    qsort(order, (size_t)s->num_receives, sizeof *order, by_time);
    for (int i = 0; i < s->num_steps; i++) {
        PipelineStep *step = &s->steps[i];
        int64_t sends = ((int64_t)ends[i] * s->pp + s->pp_rank) * s->num_steps; // this step's place in the order
        for (; next < s->num_receives && order[next] < sends; next++) {
            s->receives[next] = (int)(order[next] % s->num_steps);
            PipelineStepKind kind = s->steps[s->receives[next]].kind;
            started[kind]++;
            s->receive_buffers[kind] = (int)max_i64(s->receive_buffers[kind], started[kind] - used[kind]);
        }
        step->receives_started = next;
        used[step->kind] += pipeline_source(s, step) >= 0;
    }
    for (int i = 0; i < s->num_steps; i++) { // inputs of one kind are used in the order in which they are received
        PipelineStep *step = &s->steps[i];
        if (pipeline_source(s, step) < 0) continue;
        step->receive_buffer = numbered[step->kind] % s->receive_buffers[step->kind];
        numbered[step->kind]++;
    }
    free(ends);
    free(arrivals);
    free(order);
}

/* The schedule of one rank. With several virtual stages micro_batches is a multiple of pp, as job.h checks. */
static void schedule_open(Schedule *s, int pp, int pp_rank, int virtual_stages, int micro_batches) {
    schedule_steps(s, pp, pp_rank, virtual_stages, micro_batches);
    schedule_receives(s);
}

#endif
