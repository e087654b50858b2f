/* pipeline_parallel.h: the messages between pipeline stages: activations forward, their gradients backward.
 *
 * pipeline_schedule.h says which micro-batch a rank computes when. A message is a micro-batch's residual stream,
 * (n, C), n = tokens of this rank. On GPUs each direction between two neighbours has two streams, and over NCCL two
 * communicators, that messages use in turn. One queue for all messages would be correct, but a late message would delay
 * the others: in a simulation of Llama 3 405B on 8,192 GPUs a step takes 14 % longer. With one for each direction, a
 * receive that is started early cannot begin before the previous one has ended, and NCCL begins no later collective
 * either: on 512 GPUs a step takes 29 % longer (dev/results/overlap.md).
 */
#ifndef PIPELINE_PARALLEL_H
#define PIPELINE_PARALLEL_H
#include "lib/comm/comm.h"
#include "pipeline_schedule.h"

typedef struct {
    floatX *data; // (n, C)
    Request request;
} PipelineMessage;

typedef char MessageName[48];

typedef struct {
    Schedule schedule;
    Comm *comm;
    int64_t message_elements;
    PipelineMessage *in[2];    // (schedule.receive_buffers[kind]) inputs of forwards and of backwards
    PipelineMessage out[2][2]; // outputs of each kind: one is written while the previous one is sent
    int receives_started;      // in this training step
    int turn[4];               // of each direction: which of its two streams the last message used
    int64_t sent[2];           // messages of each kind since the last training step; the parity chooses the buffer
    MessageName *names;        // (2 kinds, virtual stages, received or sent, micro-batches)
} Pipeline;

/* "activations 3 to stage 5" for micro-batch 3. Sender and receiver give a message the same name. */
static const char *message_name(Pipeline *p, const PipelineStep *step, int is_sent) {
    const Schedule *s = &p->schedule;
    int forward = step->kind == PIPE_FORWARD, to = stage_number(s, step->stage);
    int row = ((int)step->kind * s->virtual_stages + step->stage) * 2 + is_sent;
    char *name = p->names[row * s->micro_batches + step->micro_batch];
    if (is_sent) to += forward ? 1 : -1;
    snprintf(name, sizeof(MessageName), "%s %d to stage %d", forward ? "activations" : "gradients", step->micro_batch,
             to);
    return name;
}

/* The stream for the next message of a direction; `first` is the first of its two streams. */
static StreamKind next_stream(Pipeline *p, StreamKind first) {
    int *turn = &p->turn[first - STREAM_SEND_NEXT];
    *turn = !*turn;
    return *turn ? first : (StreamKind)(first - STREAM_SEND_NEXT + STREAM_SEND_NEXT_2);
}

static void pipeline_start_receive(Pipeline *p, const PipelineStep *step) {
    Device *dev = p->comm->dev;
    PipelineMessage *in = &p->in[step->kind][step->receive_buffer];
    StreamKind on = next_stream(p, step->kind == PIPE_FORWARD ? STREAM_RECEIVE_PREVIOUS : STREAM_RECEIVE_NEXT);
    device_wait_stream(dev, on, STREAM_COMPUTE); // until it has copied the buffer's previous message
    StreamKind before = device_set_stream(dev, on);
    receive_start(p->comm, &in->request, AXIS_PP, pipeline_source(&p->schedule, step), message_name(p, step, 0),
                  in->data, p->message_elements, FLOATX);
    device_set_stream(dev, before);
}

/* Before a step: starts the receives that the schedule wants to be under way by now. */
static void pipeline_start_receives(Pipeline *p, const PipelineStep *step) {
    const Schedule *s = &p->schedule;
    for (; p->receives_started < step->receives_started; p->receives_started++)
        pipeline_start_receive(p, &s->steps[s->receives[p->receives_started]]);
}

/* Waits for a step's input from the neighbouring stage and copies it to `to` (n, C). Does nothing if the input does not
 * come from another stage. */
static void pipeline_receive(Pipeline *p, const PipelineStep *step, floatX *to) {
    if (pipeline_source(&p->schedule, step) < 0) return;
    PipelineMessage *in = &p->in[step->kind][step->receive_buffer];
    comm_wait(p->comm, &in->request);
    device_copy(p->comm->dev, to, in->data, sizeof(floatX) * p->message_elements);
}

/* The message into which a step writes its output; pipeline_send sends it. Waits until the message before the previous
 * one, which used the same buffer, is sent. */
static PipelineMessage *pipeline_output(Pipeline *p, const PipelineStep *step) {
    PipelineMessage *out = &p->out[step->kind][p->sent[step->kind] % 2];
    p->sent[step->kind]++;
    comm_wait(p->comm, &out->request);
    return out;
}
static void pipeline_send(Pipeline *p, const PipelineStep *step, PipelineMessage *out) {
    Device *dev = p->comm->dev;
    StreamKind on = next_stream(p, step->kind == PIPE_FORWARD ? STREAM_SEND_NEXT : STREAM_SEND_PREVIOUS);
    device_wait_stream(dev, on, STREAM_COMPUTE);
    StreamKind before = device_set_stream(dev, on);
    send_start(p->comm, &out->request, AXIS_PP, pipeline_target(&p->schedule, step), message_name(p, step, 1),
               out->data, p->message_elements, FLOATX);
    device_set_stream(dev, before);
}

/* Ends a training step: waits until its last messages are sent. */
static void pipeline_finish(Pipeline *p) {
    for (int kind = 0; kind < 2; kind++) {
        for (int i = 0; i < 2; i++) comm_wait(p->comm, &p->out[kind][i].request);
        p->sent[kind] = 0;
    }
    p->receives_started = 0;
}

/* p->schedule is open. A pipeline of one rank needs no buffers. */
static void pipeline_open(Pipeline *p, Comm *comm, int64_t message_elements) {
    const Schedule *s = &p->schedule;
    Device *dev = comm->dev;
    p->comm = comm;
    p->message_elements = message_elements;
    for (int kind = 0; kind < 2; kind++) {
        p->in[kind] = new_array(PipelineMessage, s->receive_buffers[kind]);
        for (int i = 0; i < s->receive_buffers[kind]; i++)
            p->in[kind][i].data = arena_array(floatX, dev, MEM_ACTIVATIONS, "received from a stage", message_elements);
        for (int i = 0; i < 2 && s->pp > 1; i++)
            p->out[kind][i].data = arena_array(floatX, dev, MEM_ACTIVATIONS, "sent to a stage", message_elements);
    }
    int names = 4 * s->virtual_stages * s->micro_batches;
    if (s->pp > 1) p->names = arena_array(MessageName, dev, MEM_HOST, "names of messages", names);
    if (dev->dry_run) p->names = new_array(MessageName, names); // a dry run's arenas have no memory
}

static void pipeline_close(Pipeline *p) {
    for (int kind = 0; kind < 2; kind++) {
        for (int i = 0; p->in[kind] && i < p->schedule.receive_buffers[kind]; i++)
            request_close(&p->in[kind][i].request);
        for (int i = 0; i < 2; i++) request_close(&p->out[kind][i].request);
        free(p->in[kind]);
    }
    if (p->comm && p->comm->dev->dry_run) free(p->names);
    schedule_close(&p->schedule);
}

#endif
