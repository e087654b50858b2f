/* comm_events.h: the list of one rank's communication events in a step: where each collective or message starts, and
 * where the rank waits for it.
 *
 * A dry run records the list of every rank of a plan, and the simulation runs all lists against each other. A test
 * records the same list from a real run and compares the two, event by event. */
#ifndef COMM_EVENTS_H
#define COMM_EVENTS_H
#include "../../lib/comm/comm.h"  // defines: Comm, CommRecorder, Request, hash_bytes
#include "../shared/text_input.h" // defines: with_room_for_one

typedef struct {      // a table of strings, each stored once; its id is its index
    char **text;      // (count, capacity size / 2)
    int32_t *buckets; // (size) hash table with open addressing: id + 1; 0: empty
    int count, size;
} NameTable;

typedef struct {           // a collective or message starts, or the rank waits for one
    double compute_before; // seconds of arithmetic on the compute stream since the rank's previous event
    double stream_compute; // seconds of arithmetic on `stream` since its previous event or StreamPoint
    int64_t count;         // elements of one part (see request_set in comm.h)
    int32_t name, phase;   // ids in the name table: what is communicated; what the rank is doing
    int32_t peer;          // of a message: the member of the axis at the other end; of a collective -1
    uint8_t is_wait;
    uint8_t slot; // identifies the communication from its start to its wait; then the slot is reused
    uint8_t collective, axis, dtype;
    uint8_t stream;  // StreamKind: on which it runs, or that waits
    uint8_t zero[6]; // no padding, so that the event can be hashed as words
} CommEvent;

typedef struct {    // a stream records an event of the device, or waits for one
    int64_t at;     // elements of CommEvents.events before this point
    double compute; // seconds of arithmetic of the stream since its previous point or communication event
    int32_t event;  // the number of the event, from 1
    uint8_t stream; // StreamKind
    uint8_t is_wait;
    uint8_t zero[2]; // no padding, so that the point can be hashed as words
} StreamPoint;

typedef struct {
    CommRecorder recorder; // first: what it calls finds the list behind it
    CommEvent *events;     // (count, event_room)
    int64_t count;
    StreamPoint *points; // (num_points, point_room) of a GPU
    int64_t num_points;
    size_t event_room, point_room;
    NameTable *names;
    uint64_t slots_taken;                // bit set of the slots in use
    double compute_total, compute_after; // seconds of arithmetic up to the last event; after it
    const char *phase_name, *phase_of;   // the phase whose id is `phase`
    int32_t phase;
    uint64_t hash; // of the whole list, in a plan
} CommEvents;

enum { COMM_EVENT_SLOTS = 64 };

/* The bucket of `text`, or the empty bucket where it belongs. */
static int32_t *name_bucket(const NameTable *t, const char *text) {
    int slot = (int)(hash_bytes(HASH_START, text, strlen(text)) % (uint64_t)t->size);
    while (t->buckets[slot] && strcmp(t->text[t->buckets[slot] - 1], text)) slot = (slot + 1) % t->size;
    return &t->buckets[slot];
}

/* Doubles the table. */
static void name_table_grow(NameTable *t) {
    t->size = t->size ? 2 * t->size : 256;
    t->text = (char **)checked_realloc(t->text, sizeof(char *) * (size_t)t->size / 2);
    free(t->buckets);
    t->buckets = new_array(int32_t, t->size);
    for (int id = 0; id < t->count; id++) *name_bucket(t, t->text[id]) = id + 1;
}

/* The id of `text`, which is added if it is new. */
static int32_t name_id(NameTable *t, const char *text) {
    if (t->count * 2 >= t->size) name_table_grow(t);
    int32_t *slot = name_bucket(t, text);
    if (!*slot) {
        t->text[t->count] = checked_strdup(text);
        *slot = ++t->count;
    }
    return *slot - 1;
}

static void name_table_close(NameTable *t) {
    for (int i = 0; i < t->count; i++) free(t->text[i]);
    free(t->text);
    free(t->buckets);
    memset(t, 0, sizeof *t);
}

static void comm_events_add(CommEvents *e, const CommEvent *event) {
    e->events = (CommEvent *)with_room_for_one(e->events, (size_t)e->count, &e->event_room, sizeof *event);
    e->events[e->count++] = *event;
}

/* The name id of what the rank is doing: "forward of model.layers.3". */
static int32_t comm_events_phase(CommEvents *e, const Device *dev) {
    const char *of = dev->rec.phase_of;
    char text[200];
    if (e->phase >= 0 && e->phase_name == dev->rec.phase_name && e->phase_of == dev->rec.phase_of) return e->phase;
    e->phase_name = dev->rec.phase_name;
    e->phase_of = dev->rec.phase_of;
    snprintf(text, sizeof text, "%s%s%s", dev->rec.phase_name ? dev->rec.phase_name : "the step", of ? " of " : "",
             of ? of : "");
    e->phase = name_id(e->names, text);
    return e->phase;
}

/* Adds an event to the list: the request starts, or with is_wait the rank waits for it. The event also says how long
 * the rank has computed since the previous event. */
static void comm_events_record(Comm *comm, Request *r, int is_wait) {
    CommEvents *e = (CommEvents *)comm->recorder;
    if (!is_wait && !~e->slots_taken)
        run_failure("%s: more than %d collectives and messages are in flight at once", rank_name(comm->rank),
                    COMM_EVENT_SLOTS);
    int slot = is_wait ? r->event_slot - 1 : __builtin_ctzll(~e->slots_taken);
    CommEvent event = ZERO;
    event.compute_before = comm->dev->rec.clock - e->compute_total;
    event.count = (int64_t)(r->bytes / dtype_size(r->dtype));
    event.name = name_id(e->names, r->what);
    event.phase = comm_events_phase(e, comm->dev);
    event.peer = r->channel ? r->channel->peer : -1;
    event.is_wait = (uint8_t)is_wait;
    event.slot = (uint8_t)slot;
    event.collective = (uint8_t)r->collective;
    event.axis = (uint8_t)r->group->axis;
    event.dtype = (uint8_t)r->dtype;
    event.stream = (uint8_t)comm->dev->current_stream;
    event.stream_compute = e->recorder.streams.compute[event.stream]; // 0 if nobody records streams
    e->recorder.streams.compute[event.stream] = 0;
    e->slots_taken ^= 1ull << slot;
    r->event_slot = is_wait ? 0 : slot + 1;
    e->compute_total = comm->dev->rec.clock;
    comm_events_add(e, &event);
}

/* Adds a point of a stream to the list. */
static void comm_events_point(StreamRecorder *streams, StreamKind stream, int32_t event, int is_wait) {
    CommEvents *e = (CommEvents *)streams;
    e->points = (StreamPoint *)with_room_for_one(e->points, (size_t)e->num_points, &e->point_room, sizeof *e->points);
    StreamPoint point = {e->count, streams->compute[stream], event, (uint8_t)stream, (uint8_t)is_wait, {0, 0}};
    streams->compute[stream] = 0;
    e->points[e->num_points++] = point;
}

/* Empties the list and keeps its memory. */
static void comm_events_clear(CommEvents *e, NameTable *names) {
    CommEvents empty = ZERO;
    empty.recorder.record = comm_events_record;
    empty.recorder.streams.point = comm_events_point;
    empty.events = e->events;
    empty.event_room = e->event_room;
    empty.points = e->points;
    empty.point_room = e->point_room;
    empty.names = names;
    empty.phase = -1;
    *e = empty;
}

#endif
