/* pipeline.h: pipeline schedules: who does what to which micro-batch, and in which order.
 *
 * The model's blocks are cut into S = P * V virtual stages; chunk v of rank p is stage v * P + p, so that an activation
 * goes round the ring of ranks, from stage s on rank s % P to s + 1, and its gradient back. Each rank follows a list of
 * its own: forwards until the pipeline is full (warm-up), then one forward and one backward in turn (1F1B), then the
 * backwards that are left. 3 ranks of one chunk each, 5 micro-batches:
 *
 *   rank 0   F0  F1  F2  .   .   B0  F3  B1  F4  B2  .   B3  .   B4       Narayanan et al. 2021, section 2.2;
 *   rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  .   B4  .        Llama 3 paper, section 3.3.2
 *   rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  .   .
 *
 * The dots are the bubble: the time in which P - 1 micro-batches pass a rank. V chunks a rank (interleaved 1F1B) make
 * it V times shorter, for V times the messages and more activations. The same list drives the program and its plan. A
 * caller may rely on: a chunk's backwards come in the order of micro-batches, as one rank alone would sum them; on the
 * last stage a backward follows its forward at once; if each rank starts its receives when the schedule says, before
 * its steps, and its sends after them, then all ranks start their messages in one order, so that even where a rank's
 * messages go one after the other and each waits for its other end, no two ranks wait for each other. They would wait
 * in vain, though: what comes late holds up what could go. On GPUs each way between two neighbours has a stream, and
 * over NCCL a communicator, of its own; by the replay (replay.h) a step of Llama 3 405B on 8,192 GPUs would else take
 * 14 % longer.
 */
#ifndef PIPELINE_H
#define PIPELINE_H
#include "lib/comm.h"

typedef enum { PIPE_FORWARD, PIPE_BACKWARD } PipelineStepKind;

typedef struct {
    PipelineStepKind kind;
    int micro_batch, stage; // of the step's micro-batches; of this rank's chunks
    int activation_set;     // which of the chunk's sets of activations it fills, or uses up
    int receive_buffer;     // where its input is received, of buffers[kind]
    int receives_started;   // so many of the schedule's receives have been started when it begins
} PipelineStep;

typedef struct {
    int pp, pp_rank;      // ranks of the pipeline, P; which of them this one is
    int virtual_stages;   // V
    int micro_batches;    // k
    int num_steps;        // 2 * k * V
    PipelineStep *steps;  // (count) in this order
    int *activation_sets; // (chunks) sets of activations that are alive at the same time, at most
    int num_receives;
    int *receives; // (num_receives) the steps whose inputs come from other ranks, in the order in which to start
                   // receiving them
    int receive_buffers[2]; // inputs of forwards, and of backwards, that are received and not used up, at most
} Schedule;

static inline int virtual_stage(const Schedule *s, int chunk) { return chunk * s->pp + s->pp_rank; }

/* The rank (of the pipeline) from which a step's input comes, and to which its output goes; -1: none: it is the tokens,
 * or the loss. */
static inline int pipeline_source(const Schedule *s, const PipelineStep *step) {
    int at = virtual_stage(s, step->stage), from = step->kind == PIPE_FORWARD ? at - 1 : at + 1;
    return from < 0 || from == s->pp * s->virtual_stages ? -1 : from % s->pp;
}
static inline int pipeline_target(const Schedule *s, const PipelineStep *step) {
    int at = virtual_stage(s, step->stage), to = step->kind == PIPE_FORWARD ? at + 1 : at - 1;
    return to < 0 || to == s->pp * s->virtual_stages ? -1 : to % s->pp;
}

/* A rank's forwards are numbered over all its chunks: P micro-batches go through chunk 0, the same through chunk 1, …,
 * then the next P. Backwards likewise, from the last chunk to the first. */
static inline PipelineStep pipeline_step(const Schedule *s, PipelineStepKind kind, int number) {
    int P = s->pp, turn = number / P % s->virtual_stages;
    PipelineStep step = {kind,
                         number / (P * s->virtual_stages) * P + number % P,
                         kind == PIPE_FORWARD ? turn : s->virtual_stages - 1 - turn,
                         0,
                         0,
                         0};
    return step;
}

/* The steps of one rank, and how many sets of activations each chunk needs. */
static void schedule_steps(Schedule *s) {
    int n = s->micro_batches * s->virtual_stages, after = s->pp - s->pp_rank - 1; // after: ranks behind this one
    /* Forwards before the first backward can arrive. With several chunks a rank goes ahead of the next one by two:
     * while it does the first, the other's backward is on its way (Megatron-LM's schedules have the same lengths). */
    int warm_up = (int)min_i64(n, s->virtual_stages == 1 ? after : 2 * after + (s->virtual_stages - 1) * s->pp);
    s->steps = (PipelineStep *)checked_malloc(sizeof *s->steps * 2 * (size_t)n);
    s->activation_sets = (int *)checked_malloc(sizeof *s->activation_sets * (size_t)s->virtual_stages);
    int *alive = (int *)checked_malloc(sizeof *alive * (size_t)s->virtual_stages);
    for (int forward = 0, backward = 0; backward < n;) {
        int goes_forward = forward < n && forward - backward <= warm_up;
        PipelineStep *step = &s->steps[s->num_steps++];
        *step = goes_forward ? pipeline_step(s, PIPE_FORWARD, forward++) : pipeline_step(s, PIPE_BACKWARD, backward++);
        alive[step->stage] += goes_forward ? 1 : -1;
        if (alive[step->stage] > s->activation_sets[step->stage]) s->activation_sets[step->stage] = alive[step->stage];
    }
    for (int i = 0; i < s->num_steps; i++)
        s->steps[i].activation_set =
            s->steps[i].micro_batch %
            s->activation_sets[s->steps[i].stage]; // they come and go in the order of micro-batches
    free(alive);
}

static void schedule_close(Schedule *s) {
    free(s->steps);
    free(s->activation_sets);
    free(s->receives);
    memset(s, 0, sizeof *s);
}

/* When each step of this rank would end (count), and its input be there (count), if a backward took twice as long as a
 * forward and a message no time: a replay of all ranks, which each of them does alike. */
static void schedule_replay(const Schedule *s, int *ends, int *arrives) {
    int P = s->pp, S = P * s->virtual_stages, left = P * s->num_steps;
    Schedule *all = (Schedule *)checked_malloc(sizeof *all * (size_t)P);
    int *at = (int *)checked_malloc(sizeof *at * (size_t)P), *now = (int *)checked_malloc(sizeof *now * (size_t)P);
    int *done = (int *)checked_malloc(sizeof *done * 2 * (size_t)s->micro_batches *
                                      (size_t)S); // (kind, micro, virtual stage) when; 0: not yet
    for (int p = 0; p < P; p++) {
        all[p].pp = P, all[p].pp_rank = p, all[p].virtual_stages = s->virtual_stages,
        all[p].micro_batches = s->micro_batches;
        schedule_steps(&all[p]);
    }
    while (left)
        for (int p = 0; p < P; p++)
            for (; at[p] < s->num_steps; at[p]++, left--) {
                const PipelineStep *step = &all[p].steps[at[p]];
                int stage = virtual_stage(&all[p], step->stage), backward = step->kind == PIPE_BACKWARD;
                int *mine = &done[(step->kind * s->micro_batches + step->micro_batch) * S + stage], arrived = 0;
                if (pipeline_source(&all[p], step) >= 0 && !(arrived = mine[backward ? 1 : -1]))
                    break; // of the stage next to it
                now[p] = (int)max_i64(now[p], arrived) + (backward ? 2 : 1);
                *mine = now[p];
                if (p == s->pp_rank) ends[at[p]] = now[p], arrives[at[p]] = arrived;
            }
    for (int p = 0; p < P; p++) schedule_close(&all[p]);
    free(all);
    free(at);
    free(now);
    free(done);
}

static int by_time(const void *a, const void *b) {
    return *(const int64_t *)a < *(const int64_t *)b ? -1 : *(const int64_t *)a > *(const int64_t *)b;
}

/* Of several chunks the number of micro-batches must be a multiple of the stages: options are checked before. */
static void schedule_open(Schedule *s, int stages, int stage, int chunks, int micros) {
    if (chunks > 1 && micros % stages)
        run_failure("a schedule of %d micro-batches in %d chunks over %d stages: expected a multiple of the stages",
                    micros, chunks, stages);
    memset(s, 0, sizeof *s);
    s->pp = stages, s->pp_rank = stage, s->virtual_stages = chunks, s->micro_batches = micros;
    schedule_steps(s);
    /* The one order of all messages is that of the times at which they are made, in the replay; of the same time, of
     * their senders. */
    int *ends = (int *)checked_malloc(sizeof *ends * (size_t)s->num_steps),
        *arrives = (int *)checked_malloc(sizeof *arrives * (size_t)s->num_steps);
    int64_t *order = (int64_t *)checked_malloc(sizeof *order * (size_t)s->num_steps); // (time, sender, step)
    s->receives = (int *)checked_malloc(sizeof *s->receives * (size_t)s->num_steps);
    schedule_replay(s, ends, arrives);
    for (int i = 0; i < s->num_steps; i++) {
        int from = pipeline_source(s, &s->steps[i]);
        if (from >= 0) order[s->num_receives++] = ((int64_t)arrives[i] * stages + from) * s->num_steps + i;
    }
    qsort(order, (size_t)s->num_receives, sizeof *order, by_time);
    int started[2] = {0, 0}, used[2] = {0, 0};
    for (int i = 0, next = 0; i < s->num_steps; i++) {
        PipelineStep *step = &s->steps[i];
        for (; next < s->num_receives && order[next] < ((int64_t)ends[i] * stages + stage) * s->num_steps;
             next++) { // before what this step sends
            s->receives[next] = (int)(order[next] % s->num_steps);
            int kind = s->steps[s->receives[next]].kind;
            s->receive_buffers[kind] = (int)max_i64(s->receive_buffers[kind], ++started[kind] - used[kind]);
        }
        step->receives_started = next;
        used[step->kind] += pipeline_source(s, step) >= 0;
    }
    for (int i = 0, taken[2] = {0, 0}; i < s->num_steps; i++) // those of a kind come and go in the order of the steps
        if (pipeline_source(s, &s->steps[i]) >= 0)
            s->steps[i].receive_buffer = taken[s->steps[i].kind]++ % s->receive_buffers[s->steps[i].kind];
    free(ends);
    free(arrives);
    free(order);
}

// ---------------------------------------------------------------------------
// what passes from stage to stage

typedef struct {
    floatX *data;
    Request request;
} PipelineMessage; // (n, C) on its way between stages
typedef char MessageName[48];

typedef struct {
    Schedule schedule;
    Comm *comm;
    size_t message_bytes; // of a parcel
    PipelineMessage
        *in[2]; // (schedule.buffers[kind]) inputs of forwards and of backwards that are here, or on their way
    PipelineMessage out[2][2]; // of each kind of output one is made while the one before goes
    int receives_started;      // receives of the step so far
    int64_t sent[2];
    MessageName *names; // (2 kinds, chunks, 2: received, sent, micro-batches)
} Pipeline;

/* "activations 3 to stage 5", of micro-batch 3: both ends call it the same. */
static const char *message_name(Pipeline *p, const PipelineStep *step, int sent) {
    const Schedule *s = &p->schedule;
    int at = virtual_stage(s, step->stage) + (!sent ? 0 : step->kind == PIPE_FORWARD ? 1 : -1);
    const char *what = step->kind == PIPE_FORWARD ? "activations" : "gradients";
    char *name = p->names[(((int)step->kind * s->virtual_stages + step->stage) * 2 + sent) * s->micro_batches +
                          step->micro_batch];
    snprintf(name, sizeof(MessageName), "%s %d to stage %d", what, step->micro_batch, at);
    return name;
}

/* Starts to receive a step's input. */
static void pipeline_start_receive(Pipeline *p, const PipelineStep *step) {
    Device *dev = p->comm->dev;
    PipelineMessage *in = &p->in[step->kind][step->receive_buffer];
    StreamKind on = step->kind == PIPE_FORWARD ? STREAM_RECEIVE_PREVIOUS : STREAM_RECEIVE_NEXT, before;
    device_wait_stream(dev, on, STREAM_COMPUTE); // which has read what was there before
    before = device_set_stream(dev, on);
    point_start(p->comm, &in->request, RECEIVE, AXIS_PP, pipeline_source(&p->schedule, step), message_name(p, step, 0),
                in->data, p->message_bytes / sizeof(floatX), FLOATX);
    device_set_stream(dev, before);
}

/* Before a step: receives that the schedule wants under way by now. */
static void pipeline_start_receives(Pipeline *p, const PipelineStep *step) {
    for (; p->receives_started < step->receives_started; p->receives_started++)
        pipeline_start_receive(p, &p->schedule.steps[p->schedule.receives[p->receives_started]]);
}

/* A step's input, from the stage before (backward: behind) this one, into `to`. */
static void pipeline_receive(Pipeline *p, const PipelineStep *step, floatX *to) {
    if (pipeline_source(&p->schedule, step) < 0) return;
    PipelineMessage *in = &p->in[step->kind][step->receive_buffer];
    comm_wait(p->comm, &in->request);
    device_copy(p->comm->dev, to, in->data, p->message_bytes);
}

/* A buffer for a step's output, and then its departure. */
static PipelineMessage *pipeline_output(Pipeline *p, const PipelineStep *step) {
    PipelineMessage *out = &p->out[step->kind][p->sent[step->kind]++ % 2];
    comm_wait(p->comm, &out->request); // the one before the last has left
    return out;
}
static void pipeline_send(Pipeline *p, const PipelineStep *step, PipelineMessage *out) {
    Device *dev = p->comm->dev;
    StreamKind on = step->kind == PIPE_FORWARD ? STREAM_SEND_NEXT : STREAM_SEND_PREVIOUS, before;
    device_wait_stream(dev, on, STREAM_COMPUTE);
    before = device_set_stream(dev, on);
    point_start(p->comm, &out->request, SEND, AXIS_PP, pipeline_target(&p->schedule, step), message_name(p, step, 1),
                out->data, p->message_bytes / sizeof(floatX), FLOATX);
    device_set_stream(dev, before);
}

/* The step's last sends have left. */
static void pipeline_finish(Pipeline *p) {
    for (int i = 0; i < 4; i++) comm_wait(p->comm, &p->out[i / 2][i % 2].request);
    p->receives_started = 0, p->sent[PIPE_FORWARD] = p->sent[PIPE_BACKWARD] = 0; // each step is the first one again
}

/* Behind schedule_open, which says how many buffers it takes; a pipeline of one stage has none. */
static void pipeline_open(Pipeline *p, Comm *comm, size_t bytes) {
    const Schedule *s = &p->schedule;
    p->comm = comm, p->message_bytes = bytes;
    for (int kind = 0; kind < 2; kind++) {
        p->in[kind] = (PipelineMessage *)checked_malloc(sizeof(PipelineMessage) * (size_t)s->receive_buffers[kind]);
        for (int i = 0; i < s->receive_buffers[kind]; i++)
            p->in[kind][i].data = (floatX *)arena_alloc(comm->dev, MEM_ACTIVATIONS, "on its way from a stage", bytes);
        for (int i = 0; i < 2 && s->pp > 1; i++)
            p->out[kind][i].data = (floatX *)arena_alloc(comm->dev, MEM_ACTIVATIONS, "on its way to a stage", bytes);
    }
    size_t names = sizeof(MessageName) * 4 * (size_t)(s->virtual_stages * s->micro_batches);
    if (s->pp > 1) p->names = (MessageName *)arena_alloc(comm->dev, MEM_HOST, "names of messages", names);
    if (comm->dev->dry_run) p->names = (MessageName *)checked_malloc(names); // whose arenas nobody can write to
}

static void pipeline_close(Pipeline *p) {
    for (int kind = 0; kind < 2; kind++) {
        for (int i = 0; p->in[kind] && i < p->schedule.receive_buffers[kind]; i++)
            device_destroy_event(p->in[kind][i].request.arrived);
        for (int i = 0; i < 2; i++) device_destroy_event(p->out[kind][i].request.arrived);
        free(p->in[kind]);
    }
    if (p->comm && p->comm->dev->dry_run) free(p->names);
    schedule_close(&p->schedule);
}

#endif
