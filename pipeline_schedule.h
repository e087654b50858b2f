/* pipeline_schedule.h: which micro-batch each rank of a pipeline computes when: 1F1B and interleaved 1F1B.
 *
 * The model's blocks are cut into P * V stages for P ranks: virtual stage v of rank p is stage v * P + p. Activations
 * pass from rank to rank in a ring, gradients in the opposite direction. A caller may rely on: a stage's backwards come
 * in the order of micro-batches, so that gradients are added in the same order as on one rank; on the last stage each
 * backward directly follows its forward; and ranks cannot deadlock (see schedule_receives).
 */
#ifndef PIPELINE_SCHEDULE_H
#define PIPELINE_SCHEDULE_H
#include "lib/device/base.h"

/* Each rank runs forwards until the pipeline is full (warm-up), then alternates between one forward and one backward
 * (1F1B), then runs the remaining backwards (Narayanan et al. 2021, section 2.2; Llama 3 paper, section 3.3.2). With 3
 * ranks of one stage each, 5 micro-batches, and backwards drawn as long as forwards:
 *
 *   rank 0   F0  F1  F2  .   .   B0  F3  B1  F4  B2  .   B3  .   B4
 *   rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  .   B4  .
 *   rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  .   .
 *
 * The dots are the bubble: each rank idles for the time of P - 1 micro-batches. V stages per rank (interleaved 1F1B)
 * make the bubble V times shorter, but need at least V times as many messages and keep more activations alive. */
typedef enum { PIPE_FORWARD, PIPE_BACKWARD } PipelineStepKind;

typedef struct {
    PipelineStepKind kind;
    int micro_batch;
    int stage;            // which of this rank's virtual stages, from 0
    int activation_set;   // which of the stage's sets of activations a forward writes and its backward reads
    int receive_buffer;   // which of the receive buffers for this kind of step receives its input
    int receives_started; // how many of Schedule.receives must be started before this step
} PipelineStep;

typedef struct {
    int pp, pp_rank;
    int virtual_stages; // per rank
    int micro_batches;
    int num_steps;          // 2 * micro_batches * virtual_stages
    PipelineStep *steps;    // (num_steps) in the order of execution
    int *activation_sets;   // (virtual_stages) the most sets of activations that are alive at the same time
    int num_receives;       // in a training step
    int *receives;          // (num_receives) steps whose input another rank sends, in the order of starting to receive
    int receive_buffers[2]; // for forwards and for backwards: the most receives started whose step has not yet run
} Schedule;

/* The number, among all stages of the pipeline, of a virtual stage of this rank. */
static inline int stage_number(const Schedule *s, int virtual_stage) { return virtual_stage * s->pp + s->pp_rank; }

/* The pipeline rank that has a stage; -1: there is no such stage. */
static inline int rank_of_stage(const Schedule *s, int stage) {
    return stage < 0 || stage == s->pp * s->virtual_stages ? -1 : stage % s->pp;
}

/* The pipeline rank that sends a step's input; -1: the step begins with the tokens (forward) or the loss (backward). */
static inline int pipeline_source(const Schedule *s, const PipelineStep *step) {
    return rank_of_stage(s, stage_number(s, step->stage) + (step->kind == PIPE_FORWARD ? -1 : 1));
}

/* The pipeline rank that receives a step's output; -1: none does. */
static inline int pipeline_target(const Schedule *s, const PipelineStep *step) {
    return rank_of_stage(s, stage_number(s, step->stage) + (step->kind == PIPE_FORWARD ? 1 : -1));
}

/* A rank's forward or backward number n, from 0. Forwards: P micro-batches pass the rank's first stage, then the same P
 * pass its second, and so on to its last; then the next P. Backwards: the same, from the last stage to the first. */
static inline PipelineStep pipeline_step(const Schedule *s, PipelineStepKind kind, int n) {
    int P = s->pp, V = s->virtual_stages, stage = n / P % V;
    PipelineStep step = ZERO;
    step.kind = kind;
    step.micro_batch = n / (P * V) * P + n % P;
    step.stage = kind == PIPE_FORWARD ? stage : V - 1 - stage;
    return step;
}

/* How many forwards a rank runs before it alternates between forwards and backwards: one per later rank. With several
 * stages per rank: P on each of its stages but the last, and two per later rank, because one micro-batch's gradient is
 * in transit while the next one's is computed. Megatron-LM's warm-up phases are equally long. */
static inline int warm_up_forwards(const Schedule *s) {
    int later_ranks = s->pp - s->pp_rank - 1;
    int warm_up = s->virtual_stages == 1 ? later_ranks : 2 * later_ranks + (s->virtual_stages - 1) * s->pp;
    return (int)min_i64(s->micro_batches * s->virtual_stages, warm_up);
}

/* Orders a rank's steps: warm-up forwards, then forwards and backwards alternately, then the remaining backwards. */
static inline void order_steps(Schedule *s) {
    int forwards = s->micro_batches * s->virtual_stages, warm_up = warm_up_forwards(s);
    for (int forward = 0, backward = 0; backward < forwards; s->num_steps++) {
        int is_forward = forward < forwards && forward - backward <= warm_up;
        if (is_forward) s->steps[s->num_steps] = pipeline_step(s, PIPE_FORWARD, forward++);
        else s->steps[s->num_steps] = pipeline_step(s, PIPE_BACKWARD, backward++);
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
    // sets are freed in the order in which they were filled
    for (PipelineStep *step = s->steps; step < s->steps + s->num_steps; step++)
        step->activation_set = step->micro_batch % s->activation_sets[step->stage];
    free(alive);
}

static void schedule_close(Schedule *s) {
    free(s->steps);
    free(s->activation_sets);
    free(s->receives);
    memset(s, 0, sizeof *s);
}

/* Simulates all ranks, with 1 unit of time for a forward, 2 for a backward and 0 for a message. ends and arrivals
 * (num_steps) = when each step of this rank ends and when its input arrives. All ranks simulate the same times. */
static void schedule_simulate(const Schedule *s, int *ends, int *arrivals) {
    int P = s->pp, stages = P * s->virtual_stages, left = P * s->num_steps;
    Schedule *ranks = new_array(Schedule, P);
    int *next = new_array(int, P);                              // each rank's next step
    int *now = new_array(int, P);                               // when each rank's last step ended
    int *ended = new_array(int, 2 * s->micro_batches * stages); // [kind][micro-batch][stage] when; 0: not yet
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

typedef struct {
    int sent, sender; // when it is sent, in simulated time, and by which pipeline rank
    int step;         // of the receiver: the step whose input it is
} TimedMessage;

/* All messages of the pipeline have one order: by the time at which they are sent; at equal times, by the sender. */
static int by_time(const void *a, const void *b) {
    const TimedMessage *x = (const TimedMessage *)a, *y = (const TimedMessage *)b;
    return x->sent != y->sent ? x->sent - y->sent : x->sender - y->sender;
}

/* Decides when each receive is started, and into which buffer. Every rank starts its sends and receives in the order of
 * all messages, so no two ranks wait for each other, even if each rank's messages run one at a time. */
static void schedule_receives(Schedule *s) {
    int *ends = new_array(int, s->num_steps);
    int *arrivals = new_array(int, s->num_steps);
    TimedMessage *inputs = new_array(TimedMessage, s->num_steps); // (num_receives) that other ranks send to this one
    int started[2] = {0, 0}, used[2] = {0, 0}, numbered[2] = {0, 0}, next = 0; // by kind of step
    s->receives = new_array(int, s->num_steps);
    schedule_simulate(s, ends, arrivals);
    for (int i = 0; i < s->num_steps; i++) {
        const TimedMessage input = {arrivals[i], pipeline_source(s, &s->steps[i]), i};
        if (input.sender >= 0) inputs[s->num_receives++] = input;
    }
    qsort(inputs, (size_t)s->num_receives, sizeof *inputs, by_time);
    for (int i = 0; i < s->num_steps; i++) {
        PipelineStep *step = &s->steps[i];
        const TimedMessage output = {ends[i], s->pp_rank, -1}; // it is sent after the receives that come before it
        for (; next < s->num_receives && by_time(&inputs[next], &output) < 0; next++) {
            s->receives[next] = inputs[next].step;
            PipelineStepKind kind = s->steps[s->receives[next]].kind;
            started[kind]++;
            s->receive_buffers[kind] = (int)max_i64(s->receive_buffers[kind], started[kind] - used[kind]);
        }
        step->receives_started = next;
        used[step->kind] += pipeline_source(s, step) >= 0;
    }
    // inputs of one kind are used in the order in which they are received
    for (PipelineStep *step = s->steps; step < s->steps + s->num_steps; step++)
        if (pipeline_source(s, step) >= 0)
            step->receive_buffer = numbered[step->kind]++ % s->receive_buffers[step->kind];
    free(ends);
    free(arrivals);
    free(inputs);
}

/* The schedule of one rank. With several virtual stages, micro_batches must be a multiple of pp; job.h checks it. */
static void schedule_open(Schedule *s, int pp, int pp_rank, int virtual_stages, int micro_batches) {
    schedule_steps(s, pp, pp_rank, virtual_stages, micro_batches);
    schedule_receives(s);
}

#endif
