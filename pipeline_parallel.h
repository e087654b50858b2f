/* pipeline_parallel.h: the messages between pipeline stages: activations forward, their gradients backward.
 *
 * pipeline_schedule.h says which micro-batch a rank computes when. A message is a micro-batch's residual stream, or its
 * gradient: (n, C), n = this rank's tokens. On GPUs each direction between two neighbours has two streams, and over
 * NCCL two communicators; successive messages alternate between them. One stream for all messages would be correct, but
 * a late message would delay the others: in a simulation of Llama 3 405B on 8,192 GPUs a step takes 14 % longer. With
 * one for each direction, a receive that is started early cannot begin before the previous receive has ended, and until
 * then NCCL begins no later collective: on 512 GPUs a step takes 29 % longer (dev/results/overlap.md).
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
    int64_t message_elements;  // n·C
    PipelineMessage *in[2];    // [kind] (schedule.receive_buffers[kind]) received inputs of forwards, and of backwards
    PipelineMessage out[2][2]; // [kind][buffer]: one output is written while the previous one is sent
    int receives_started;      // in this training step so far
    int turn[4];               // of sends and receives, for each neighbour: 1 if the last used the first stream
    int64_t sent[2];    // outputs of each kind since the last pipeline_finish; the parity chooses the buffer in `out`
    MessageName *names; // [kind][virtual stage][is_sent][micro-batch]
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

/* The stream for the next message to or from a neighbour. `first`: the first of the two that these messages use. */
static StreamKind next_stream(Pipeline *p, StreamKind first) {
    int *turn = &p->turn[first - STREAM_SEND_NEXT];
    *turn = !*turn;
    return *turn ? first : (StreamKind)(first - STREAM_SEND_NEXT + STREAM_SEND_NEXT_2);
}

static void pipeline_start_receive(Pipeline *p, const PipelineStep *step) {
    Device *dev = p->comm->dev;
    PipelineMessage *in = &p->in[step->kind][step->receive_buffer];
    StreamKind on = next_stream(p, step->kind == PIPE_FORWARD ? STREAM_RECEIVE_PREVIOUS : STREAM_RECEIVE_NEXT);
    device_wait_stream(dev, on, STREAM_COMPUTE); // which copies the previous message out of this buffer
    StreamKind before = device_set_stream(dev, on);
    receive_start(p->comm, &in->request, AXIS_PP, pipeline_source(&p->schedule, step), message_name(p, step, 0),
                  in->data, p->message_elements, FLOATX);
    device_set_stream(dev, before);
}

/* Called before each step of the schedule: starts the receives that the schedule places before this step. */
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

/* Returns the message into which a step writes its output, and which pipeline_send then sends. The two buffers of a
 * kind alternate, so this first waits until the buffer's last message is sent. */
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

/* p->schedule must be open already: its receive_buffers are allocated here. A pipeline of one rank has no buffers. */
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
