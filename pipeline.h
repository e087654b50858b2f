/* pipeline.h: pipeline schedules: who does what to which micro-batch, and in which order.
 *
 * The model's blocks are cut into S = P * V virtual stages; chunk v of rank p is stage v * P + p, so that an activation goes
 * round the ring of ranks, from stage s on rank s % P to s + 1, and its gradient back. Each rank follows a list of its own:
 * forwards until the pipeline is full (warm-up), then one forward and one backward in turn (1F1B), then the backwards that
 * are left. 3 ranks of one chunk each, 5 micro-batches:
 *
 *   rank 0   F0  F1  F2  .   .   B0  F3  B1  F4  B2  .   B3  .   B4       Narayanan et al. 2021, section 2.2;
 *   rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  .   B4  .        Llama 3 paper, section 3.3.2
 *   rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  .   .
 *
 * The dots are the bubble: the time in which P - 1 micro-batches pass a rank. V chunks a rank (interleaved 1F1B) make it
 * V times shorter, for V times the messages and more activations. The same list drives the program and its plan.
 * A caller may rely on: a chunk's backwards come in the order of micro-batches, as one rank alone would sum them; on the last
 * stage a backward follows its forward at once; between two ranks messages are awaited in the order in which they are sent,
 * so it is enough to receive in the order of the steps, and to wait for a send before the next one that way.
 */
#ifndef PIPELINE_H
#define PIPELINE_H
#include "device.h"

typedef enum { PIPE_FORWARD, PIPE_BACKWARD } PipeKind;

typedef struct {
    PipeKind kind;
    int micro, chunk;  // of the step's micro-batches; of this rank's chunks
    int slot;          // which of the chunk's sets of activations it fills, or uses up
} PipeStep;

typedef struct {
    int stages, stage; // ranks of the pipeline, P; which of them this one is
    int chunks;        // V
    int micros;        // k
    int count;         // 2 * k * V
    PipeStep *steps;   // (count) in this order
    int *slots;        // (chunks) sets of activations that are alive at the same time, at most
} Schedule;

static inline int virtual_stage(const Schedule *s, int chunk) { return chunk * s->stages + s->stage; }

/* The rank (of the pipeline) from which a step's input comes, and to which its output goes; -1: none: it is the tokens, or the loss. */
static inline int pipe_source(const Schedule *s, const PipeStep *step) {
    int at = virtual_stage(s, step->chunk), from = step->kind == PIPE_FORWARD ? at - 1 : at + 1;
    return from < 0 || from == s->stages * s->chunks ? -1 : from % s->stages;
}
static inline int pipe_target(const Schedule *s, const PipeStep *step) {
    int at = virtual_stage(s, step->chunk), to = step->kind == PIPE_FORWARD ? at + 1 : at - 1;
    return to < 0 || to == s->stages * s->chunks ? -1 : to % s->stages;
}

/* A rank's forwards are numbered over all its chunks: P micro-batches go through chunk 0, the same through chunk 1, …, then
 * the next P. Backwards likewise, from the last chunk to the first. */
static inline PipeStep pipe_step(const Schedule *s, PipeKind kind, int number) {
    int P = s->stages, turn = number / P % s->chunks;
    PipeStep step = {kind, number / (P * s->chunks) * P + number % P, kind == PIPE_FORWARD ? turn : s->chunks - 1 - turn, 0};
    return step;
}

/* Of several chunks the number of micro-batches must be a multiple of the stages: options are checked before. */
static void schedule_open(Schedule *s, int stages, int stage, int chunks, int micros) {
    if (chunks > 1 && micros % stages) run_failure("a schedule of %d micro-batches in %d chunks over %d stages: expected a multiple of the stages", micros, chunks, stages);
    memset(s, 0, sizeof *s);
    s->stages = stages, s->stage = stage, s->chunks = chunks, s->micros = micros;
    int n = micros * chunks, after = stages - stage - 1; // after: ranks behind this one
    /* Forwards before the first backward can arrive. With several chunks a rank goes ahead of the next one by two: while it
     * does the first, the other's backward is on its way (Megatron-LM's schedules have the same lengths). */
    int warm_up = (int)min_i64(n, chunks == 1 ? after : 2 * after + (chunks - 1) * stages);
    s->steps = (PipeStep *)checked_malloc(sizeof *s->steps * 2 * (size_t)n);
    s->slots = (int *)checked_malloc(sizeof *s->slots * (size_t)chunks);
    int *alive = (int *)checked_malloc(sizeof *alive * (size_t)chunks);
    for (int forward = 0, backward = 0; backward < n;) {
        int goes_forward = forward < n && forward - backward <= warm_up;
        PipeStep *step = &s->steps[s->count++];
        *step = goes_forward ? pipe_step(s, PIPE_FORWARD, forward++) : pipe_step(s, PIPE_BACKWARD, backward++);
        alive[step->chunk] += goes_forward ? 1 : -1;
        if (alive[step->chunk] > s->slots[step->chunk]) s->slots[step->chunk] = alive[step->chunk];
    }
    for (int i = 0; i < s->count; i++) s->steps[i].slot = s->steps[i].micro % s->slots[s->steps[i].chunk]; // they come and go in the order of micro-batches
    free(alive);
}

static void schedule_close(Schedule *s) {
    free(s->steps);
    free(s->slots);
    memset(s, 0, sizeof *s);
}

#endif
