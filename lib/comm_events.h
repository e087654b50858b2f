/* comm_events.h: the list of one rank's communication events in a step: where each collective or message starts, and
 * where the rank waits for it.
 *
 * A dry run records the list of every rank of a plan; plan_llama3 runs all lists against each other. A test records
 * the same list from a real run and compares the two, event by event.
 */
#ifndef COMM_EVENTS_H
#define COMM_EVENTS_H
#include "device.h" // defines: hash_bytes, new_array, run_failure

/* A reduce-scatter delivers the parts of all members side by side, as an all-to-all does, and the caller adds them in
 * its own order. A send and a receive are the two ends of a message. */
typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE, COLLECTIVES } Collective;
static const char *const collective_names[COLLECTIVES] = {"all_gather", "reduce_scatter", "all_to_all", "send",
                                                          "receive"};

typedef struct {
    int64_t calls;
    int64_t bytes; // that one rank receives from other ranks; of sends, bytes that it sends
} Traffic;

typedef struct {    // a table of strings, each stored once; its id is its index
    char **text;    // (count, capacity size / 2)
    int32_t *slots; // (size) hash table with open addressing: id + 1; 0: empty
    int count, size;
} NameTable;

typedef struct {           // a collective or message starts, or the rank waits for one
    double compute_before; // seconds of arithmetic since the previous event, by the dry run's clock
    double stream_compute; // of them, or of earlier ones, those of this stream since its previous event or point
    int64_t count;         // elements of one part (see request_set in comm.h)
    int32_t name, phase;   // ids in the name table: what is communicated; what the rank is doing
    int32_t peer;          // of a message: the member of the axis at the other end; of a collective -1
    uint8_t is_wait;
    uint8_t slot; // identifies the communication from its start to its wait; then the slot is reused
    uint8_t collective, axis, dtype;
    uint8_t stream;  // StreamKind: on which it runs, or that waits
    uint8_t zero[6]; // no padding, so that the event can be hashed as words
} CommEvent;

typedef struct {
    CommEvent *events; // (count, capacity)
    int64_t count, capacity;
    NameTable *names;
    uint64_t slots_taken;                // bit set of the slots in use
    double compute_total, compute_after; // seconds of arithmetic up to the last event; after it
    const char *phase_name, *phase_of;   // the phase whose id is `phase`
    int32_t phase;
    StreamPoints points; // where streams wait for each other; empty unless the dry run lists them
    uint64_t hash;       // of the whole list, in a plan
} CommEvents;

enum { COMM_EVENT_SLOTS = 64 };

/* The place of `text` in the hash table, or the empty place where it belongs. */
static inline int32_t *name_slot(const NameTable *t, const char *text) {
    int slot = (int)(hash_bytes(HASH_START, text, strlen(text)) % (uint64_t)t->size);
    while (t->slots[slot] && strcmp(t->text[t->slots[slot] - 1], text)) slot = (slot + 1) % t->size;
    return &t->slots[slot];
}

/* Doubles the table. */
static inline void name_table_grow(NameTable *t) {
    t->size = t->size ? 2 * t->size : 256;
    t->text = (char **)checked_realloc(t->text, sizeof(char *) * (size_t)t->size / 2);
    free(t->slots);
    t->slots = new_array(int32_t, t->size);
    for (int id = 0; id < t->count; id++) *name_slot(t, t->text[id]) = id + 1;
}

/* The id of `text`, which is added if it is new. */
static inline int32_t name_id(NameTable *t, const char *text) {
    if (t->count * 2 >= t->size) name_table_grow(t);
    int32_t *slot = name_slot(t, text);
    if (!*slot) {
        t->text[t->count] = checked_strdup(text);
        *slot = ++t->count;
    }
    return *slot - 1;
}

static inline void name_table_close(NameTable *t) {
    for (int i = 0; i < t->count; i++) free(t->text[i]);
    free(t->text);
    free(t->slots);
    memset(t, 0, sizeof *t);
}

/* Empties the list and keeps its memory. */
static inline void comm_events_clear(CommEvents *e, NameTable *names) {
    CommEvents empty = ZERO;
    empty.events = e->events;
    empty.capacity = e->capacity;
    empty.points.points = e->points.points;
    empty.points.capacity = e->points.capacity;
    empty.names = names;
    empty.phase = -1;
    *e = empty;
}

static inline void comm_events_add(CommEvents *e, const CommEvent *event) {
    if (e->count == e->capacity) {
        e->capacity = e->capacity ? 2 * e->capacity : 1024;
        e->events = (CommEvent *)checked_realloc(e->events, sizeof *event * (size_t)e->capacity);
    }
    e->events[e->count++] = *event;
}

#endif
