/* simulate_streams.h: the time of a step on GPUs that communicate over NCCL: streams run side by side.
 *
 * simulate.h has found that the ranks fit together. Here each rank's ops, communication and waits keep the order of
 * their stream, and streams wait for each other where the program says so (StreamPoint). NCCL's rules: operations of
 * one communicator run one after the other, whatever their streams; with NCCL_LAUNCH_ORDER_IMPLICIT, which the program
 * sets, an operation begins only when all that its rank has started before have begun (NCCL 2.28, enqueue.cc); it
 * occupies its stream until it ends. A collective ends for all members at once, after the last of them has begun.
 * Collectives over world carry host memory and occupy no stream. The host is ahead of its GPU, and multiprocessors that
 * NCCL occupies slow nothing down. One rank of each part of the model is simulated: others with the same part do the
 * same at the same time. */
#ifndef SIMULATE_STREAMS_H
#define SIMULATE_STREAMS_H
#include "../../lib/comm/transport_nccl.h" // defines: nccl_communicator_of
#include "simulate.h"

typedef enum { DOES_START, DOES_WAIT, DOES_RECORD, DOES_WAIT_EVENT } StreamAction;

/* What a rank gives to one of its streams. */
typedef struct {
    StreamAction action;
    int stream;
    double compute;  // seconds of arithmetic of the stream before it
    int32_t number;  // of a communication event in the rank's list, or of an event that is recorded or waited for
    int32_t start;   // DOES_WAIT: the item that started what is waited for
    int32_t next;    // the next item of the stream; -1: none
    int line;        // DOES_START: its communicator
    int64_t ordinal; // DOES_START over NCCL: how many operations of NCCL the rank has started before
} StreamItem;

/* What a rank gives to its streams, in the program's order. Ranks whose lists are equal share it. */
typedef struct {
    const CommEvents *list;
    StreamItem *items; // (count)
    int32_t count, events;
    int32_t first[STREAMS], last[STREAMS]; // items; -1: none
} StreamProgram;

enum { SIM_LINES = (int)NCCL_LINKS + (int)NCCL_TURNS * (int)CHANNELS };

/* Messages with one peer in one direction. */
typedef struct {
    int peer; // if the rank receives, ~peer
    int messages;
} SimChannel;

typedef struct {
    const StreamProgram *program;
    int32_t at[STREAMS];      // the item that each stream is at; -1: it has ended
    int has_arrived[STREAMS]; // the arithmetic before that item is done
    double clock[STREAMS];    // seconds
    int axis[STREAMS];        // of the last communication on the stream; -1: none
    double *end;              // (items) when the communication was complete; NAN: it is not
    double *recorded;         // (events + 1) when an event was recorded; NAN: it was not
    int *recorded_axis;       // (events + 1) the axis of the recording stream
    int64_t begun;            // operations of NCCL
    double last_begin;
    int32_t open[SIM_LINES]; // the item that has begun last on each communicator; -1: none
    double begin[SIM_LINES]; // when it has
    int is_scheduled;
} StreamRank;

typedef struct {
    Simulation *s;
    Mesh mesh;               // of the simulated ranks: tp x pp
    StreamRank *ranks;       // (mesh.world)
    StreamProgram *programs; // (num_programs)
    int num_programs;
    SimGroup *groups; // (NCCL_LINKS, mesh.world) by first rank
    int *scheduled, num_scheduled;
} StreamSimulation;

/* The rank of the whole simulation that is simulated as rank `i`. */
static SimRank *rank_of_part(const StreamSimulation *t, int i) {
    int tp = t->mesh.size[AXIS_TP];
    return &t->s->ranks[i / tp * mesh_stride(&t->s->mesh, AXIS_PP) + i % tp];
}

// ---------------------------------------------------------------------------
// the items of a rank

static void program_add(StreamProgram *p, const StreamItem *item) {
    int32_t index = p->count++;
    p->items[index] = *item;
    p->items[index].next = -1;
    if (p->first[item->stream] < 0) p->first[item->stream] = index;
    else p->items[p->last[item->stream]].next = index;
    p->last[item->stream] = index;
}

/* The communicator of an event: of its collectives, or of the next message of a channel. */
static int line_of_event(const CommEvent *e, int reductions_apart, SimChannel *channels, int *num_channels) {
    if (e->collective < SEND) return nccl_communicator_of((Axis)e->axis, (StreamKind)e->stream, reductions_apart);
    int peer = e->collective == SEND ? e->peer : ~e->peer, i = 0;
    while (i < *num_channels && channels[i].peer != peer) i++;
    if (i == *num_channels) channels[(*num_channels)++].peer = peer; // simulate.h has counted them
    return (int)NCCL_LINKS + (int)NCCL_TURNS * i + channels[i].messages++ % NCCL_TURNS;
}

static StreamProgram stream_program_open(const CommEvents *list, int reductions_apart) {
    StreamProgram p = ZERO;
    int32_t started_by[COMM_EVENT_SLOTS];
    SimChannel channels[CHANNELS] = ZERO;
    int num_channels = 0;
    int64_t point = 0, ordinal = 0;
    p.list = list;
    p.events = list->recorder.streams.events;
    p.items = new_array(StreamItem, list->count + list->num_points);
    for (int i = 0; i < STREAMS; i++) p.first[i] = p.last[i] = -1;
    for (int64_t i = 0; i <= list->count; i++) {
        for (; point < list->num_points && list->points[point].at == i; point++) {
            const StreamPoint *from = &list->points[point];
            StreamItem item = ZERO;
            item.action = from->is_wait ? DOES_WAIT_EVENT : DOES_RECORD;
            item.stream = from->stream;
            item.compute = from->compute;
            item.number = from->event;
            program_add(&p, &item);
        }
        if (i == list->count) break;
        const CommEvent *e = &list->events[i];
        StreamItem item = ZERO;
        item.action = e->is_wait ? DOES_WAIT : DOES_START;
        item.stream = e->stream;
        item.compute = e->stream_compute;
        item.number = (int32_t)i;
        if (e->is_wait) item.start = started_by[e->slot];
        else {
            started_by[e->slot] = p.count;
            item.line = line_of_event(e, reductions_apart, channels, &num_channels);
            item.ordinal = ordinal;
            ordinal += e->axis != AXIS_WORLD;
        }
        program_add(&p, &item);
    }
    return p;
}

// ---------------------------------------------------------------------------
// communication

static const CommEvent *item_event(const StreamRank *r, int32_t item) {
    return &r->program->list->events[r->program->items[item].number];
}

static void stream_schedule(StreamSimulation *t, int rank) {
    if (t->ranks[rank].is_scheduled) return;
    t->ranks[rank].is_scheduled = 1;
    t->scheduled[t->num_scheduled++] = rank;
}

/* What a rank has begun last on a communicator took place from `start` to `end`. */
static void complete_open(StreamSimulation *t, int rank, int line, double start, double end) {
    StreamRank *r = &t->ranks[rank];
    EventTime *times = rank_of_part(t, rank)->times;
    r->end[r->open[line]] = end;
    if (times) {
        times[r->program->items[r->open[line]].number].start = start;
        times[r->program->items[r->open[line]].number].end = end;
    }
    stream_schedule(t, rank);
}

/* A rank has begun its part of a collective; the last member completes it for all. */
static void join_collective(StreamSimulation *t, int rank, int line, const CommEvent *e) {
    int group, key, size = mesh_group_size(&t->mesh, (Axis)e->axis);
    mesh_group(&t->mesh, rank, (Axis)e->axis, &group, &key);
    SimGroup *g = &t->groups[line * t->mesh.world + group];
    g->latest = fmax(g->arrived ? g->latest : 0, t->ranks[rank].begin[line]);
    if (++g->arrived < size) return;
    g->arrived = 0;
    double end = g->latest + event_seconds(t->s, e);
    for (int i = 0; i < size; i++)
        complete_open(t, mesh_group_member(&t->mesh, group, (Axis)e->axis, i), line, g->latest, end);
}

/* A rank has begun its end of a message, which is complete if the other end has begun too. */
static void join_message(StreamSimulation *t, int rank, int line, const CommEvent *e) {
    int mine = mesh_coordinate(&t->mesh, rank, (Axis)e->axis);
    int other = mesh_member(&t->mesh, rank, (Axis)e->axis, e->peer);
    StreamRank *o = &t->ranks[other];
    for (int l = NCCL_LINKS + (line - NCCL_LINKS) % NCCL_TURNS; l < SIM_LINES; l += NCCL_TURNS) {
        if (o->open[l] < 0 || !isnan(o->end[o->open[l]])) continue;
        const CommEvent *theirs = item_event(o, o->open[l]);
        if (theirs->collective == e->collective || theirs->axis != e->axis || theirs->peer != mine) continue;
        double start = fmax(t->ranks[rank].begin[line], o->begin[l]), end = start + event_seconds(t->s, e);
        complete_open(t, rank, line, start, end);
        complete_open(t, other, l, start, end);
        return;
    }
}

/* May the operation at the front of a stream begin? Then it does. */
static void try_to_begin(StreamSimulation *t, int rank, int stream) {
    StreamRank *r = &t->ranks[rank];
    int32_t index = r->at[stream];
    const StreamItem *item = &r->program->items[index];
    const CommEvent *e = item_event(r, index);
    int by_nccl = e->axis != AXIS_WORLD, line = item->line;
    if (r->open[line] == index) return; // it has begun
    if (r->open[line] >= 0 && isnan(r->end[r->open[line]])) return;
    if (by_nccl && item->ordinal != r->begun) return;
    double begin = r->clock[stream];
    if (r->open[line] >= 0) begin = fmax(begin, r->end[r->open[line]]);
    if (by_nccl) {
        begin = fmax(begin, r->last_begin);
        r->last_begin = begin;
        r->begun++;
    }
    r->open[line] = index;
    r->begin[line] = begin;
    if (e->collective < SEND) join_collective(t, rank, line, e);
    else join_message(t, rank, line, e);
}

// ---------------------------------------------------------------------------
// streams

/* The stream goes on at `end`. What the compute stream has waited until then counts for `axis`. */
static void stream_waits(StreamSimulation *t, int rank, int stream, double end, int axis) {
    StreamRank *r = &t->ranks[rank];
    if (end <= r->clock[stream]) return;
    if (stream == STREAM_COMPUTE && axis >= 0) rank_of_part(t, rank)->waited[axis] += end - r->clock[stream];
    r->clock[stream] = end;
}

/* The stream passes its next item, if that waits for nothing. Returns whether it does. */
static int stream_advance(StreamSimulation *t, int rank, int stream) {
    StreamRank *r = &t->ranks[rank];
    int32_t index = r->at[stream];
    if (index < 0) return 0;
    const StreamItem *item = &r->program->items[index];
    if (!r->has_arrived[stream]) r->clock[stream] += item->compute;
    r->has_arrived[stream] = 1;
    double before = r->clock[stream];
    if (item->action == DOES_START) {
        const CommEvent *e = item_event(r, index);
        if (isnan(r->end[index])) try_to_begin(t, rank, stream);
        int is_complete = !isnan(r->end[index]), has_begun = is_complete || r->open[item->line] == index;
        if (e->axis == AXIS_WORLD ? !has_begun : !is_complete) return 0;
        if (e->axis != AXIS_WORLD) {
            stream_waits(t, rank, stream, r->end[index], e->axis);
            r->axis[stream] = e->axis;
        }
    } else if (item->action == DOES_WAIT) {
        EventTime *times = rank_of_part(t, rank)->times;
        int axis = item_event(r, item->start)->axis;
        if (isnan(r->end[item->start])) return 0;
        stream_waits(t, rank, stream, r->end[item->start], axis);
        r->axis[stream] = axis;
        if (times) times[item->number].start = before;
        if (times) times[item->number].end = r->clock[stream];
    } else if (item->action == DOES_RECORD) {
        r->recorded[item->number] = r->clock[stream];
        r->recorded_axis[item->number] = r->axis[stream];
    } else {
        if (isnan(r->recorded[item->number])) return 0;
        stream_waits(t, rank, stream, r->recorded[item->number], r->recorded_axis[item->number]);
    }
    r->has_arrived[stream] = 0;
    r->at[stream] = item->next;
    return 1;
}

/* Runs a rank until all its streams wait for other ranks, or have ended. */
static void stream_rank_run(StreamSimulation *t, int rank) {
    for (int moves = 1; moves;) {
        moves = 0;
        for (int stream = 0; stream < STREAMS; stream++)
            while (stream_advance(t, rank, stream)) moves = 1;
    }
}

// ---------------------------------------------------------------------------
// the simulation

static void stream_rank_open(StreamRank *r, const StreamProgram *p) {
    memset(r, 0, sizeof *r);
    r->program = p;
    r->end = new_array(double, p->count);
    r->recorded = new_array(double, p->events + 1);
    r->recorded_axis = new_array(int, p->events + 1);
    for (int32_t i = 0; i < p->count; i++) r->end[i] = NAN;
    for (int32_t i = 0; i <= p->events; i++) r->recorded[i] = NAN;
    for (int i = 0; i < STREAMS; i++) r->at[i] = p->first[i];
    for (int i = 0; i < STREAMS; i++) r->axis[i] = -1;
    for (int i = 0; i < SIM_LINES; i++) r->open[i] = -1;
}

static void streams_open(StreamSimulation *t, Simulation *s, int reductions_apart) {
    int tp = s->mesh.size[AXIS_TP], pp = s->mesh.size[AXIS_PP];
    const Mesh parts = {tp * pp, {tp, 1, pp, 1, 1}};
    memset(t, 0, sizeof *t);
    t->s = s;
    t->mesh = parts;
    t->ranks = new_array(StreamRank, parts.world);
    t->programs = new_array(StreamProgram, parts.world);
    t->groups = new_array(SimGroup, (int)NCCL_LINKS * parts.world);
    t->scheduled = new_array(int, parts.world);
    for (int rank = 0; rank < parts.world; rank++) {
        SimRank *whole = rank_of_part(t, rank);
        int i = 0;
        while (i < t->num_programs && t->programs[i].list != whole->list) i++;
        if (i == t->num_programs) t->programs[t->num_programs++] = stream_program_open(whole->list, reductions_apart);
        stream_rank_open(&t->ranks[rank], &t->programs[i]);
        memset(whole->waited, 0, sizeof whole->waited);
    }
}

static void streams_close(StreamSimulation *t) {
    for (int rank = 0; rank < t->mesh.world; rank++) {
        free(t->ranks[rank].end);
        free(t->ranks[rank].recorded);
        free(t->ranks[rank].recorded_axis);
    }
    for (int i = 0; i < t->num_programs; i++) free(t->programs[i].items);
    free(t->ranks);
    free(t->programs);
    free(t->groups);
    free(t->scheduled);
}

/* Gives all ranks the times of the simulated ones. */
static void streams_share_times(const StreamSimulation *t) {
    Simulation *s = t->s;
    s->seconds = 0;
    for (int rank = 0; rank < t->mesh.world; rank++) {
        const StreamRank *r = &t->ranks[rank];
        rank_of_part(t, rank)->clock =
            r->clock[STREAM_COMPUTE] + r->program->list->recorder.streams.compute[STREAM_COMPUTE];
        s->seconds = fmax(s->seconds, rank_of_part(t, rank)->clock);
    }
    for (int rank = 0; rank < s->mesh.world; rank++) {
        int stage = mesh_coordinate(&s->mesh, rank, AXIS_PP);
        const SimRank *from = rank_of_part(t, stage * t->mesh.size[AXIS_TP] + mesh_coordinate(&s->mesh, rank, AXIS_TP));
        s->ranks[rank].clock = from->clock;
        memmove(s->ranks[rank].waited, from->waited, sizeof from->waited);
    }
}

/* Replaces the times of a simulation that has reached its end by those on GPUs. Returns 0 if streams wait for each
 * other for good; s->problem says which rank's. */
static int simulate_streams(Simulation *s, int reductions_apart) {
    StreamSimulation t;
    streams_open(&t, s, reductions_apart);
    for (int rank = t.mesh.world - 1; rank >= 0; rank--) stream_schedule(&t, rank);
    while (t.num_scheduled) {
        int rank = t.scheduled[--t.num_scheduled];
        t.ranks[rank].is_scheduled = 0;
        stream_rank_run(&t, rank);
    }
    for (int i = 0; i < t.mesh.world * (int)STREAMS && !s->problem.used; i++)
        if (t.ranks[i / STREAMS].at[i % STREAMS] >= 0)
            say(&s->problem,
                "rank %d: its stream '%s' waits forever, because of the order in which NCCL runs what was started",
                (int)(rank_of_part(&t, i / STREAMS) - s->ranks), stream_names[i % STREAMS]);
    streams_share_times(&t);
    streams_close(&t);
    return !s->problem.used;
}

#endif
