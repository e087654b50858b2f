/* transport_threads.h: ranks as threads of one process.
 *
 * Each member of a group posts the address of its data; the others, or the receiver of a message, copy it when they
 * test or wait. A reduce-scatter leaves the parts of all members side by side, as an all-to-all does. With GPUs the
 * copies go to a stream, and events say when the data is ready and when it has been copied.
 */
#ifndef TRANSPORT_THREADS_H
#define TRANSPORT_THREADS_H
#include "comm_types.h"
#include <pthread.h>
#include <sys/mman.h>

enum { THREAD_SLOTS = 64 };
static_assert((int)THREAD_SLOTS > (int)MAX_IN_FLIGHT, "a slot is reused only after its collective is complete");

/* Where one member posts one collective, or a sender its message. Collective n uses slot n % THREAD_SLOTS. */
typedef struct ThreadSlot {
    int64_t posted; // sequence + 1 of the collective whose data is at `send`
    const char *send;
    int64_t done;       // sequence + 1 of the collective from which this member has copied everything; of a message:
                        // which the receiver has copied
    DeviceEvent ready;  // on a GPU: the data is at `send`
    DeviceEvent copied; // on a GPU: everything has been copied
    char pad[24];       // one cache line each
} ThreadSlot;

typedef struct ThreadGroup {
    Axis axis;
    int colour, size;
    int *members;          // (size) ranks in the world, each written by its own thread
    ThreadSlot *slots;     // (THREAD_SLOTS, size)
    ThreadSlot **messages; // (size, size) from, to: (THREAD_SLOTS), or NULL until used
    struct ThreadGroup *next;
} ThreadGroup;

/* What the threads of one run share. */
typedef struct ThreadWorld {
    pthread_mutex_t lock;
    ThreadGroup *groups;
    HeartbeatTable *heartbeats;
} ThreadWorld;

// ---------------------------------------------------------------------------
// groups

static inline ThreadGroup *thread_group_create(Axis axis, int colour, int size) {
    size_t n = (size_t)size;
    ThreadGroup *t = (ThreadGroup *)checked_malloc(sizeof *t);
    t->axis = axis;
    t->colour = colour;
    t->size = size;
    t->members = (int *)checked_malloc(sizeof(int) * n);
    t->slots = (ThreadSlot *)checked_malloc(sizeof(ThreadSlot) * THREAD_SLOTS * n);
    t->messages = (ThreadSlot **)checked_malloc(sizeof(ThreadSlot *) * n * n);
    return t;
}

static inline void threads_group_open(Comm *comm, Group *g, int colour, int key) {
    ThreadWorld *w = comm->thread_world;
    pthread_mutex_lock(&w->lock);
    ThreadGroup *t = w->groups;
    while (t && (t->axis != g->axis || t->colour != colour)) t = t->next;
    if (!t) {
        t = thread_group_create(g->axis, colour, g->size);
        t->next = w->groups;
        w->groups = t;
    }
    pthread_mutex_unlock(&w->lock);
    __atomic_store_n(&t->members[key], comm->rank, __ATOMIC_RELEASE);
    g->threads = t;
    g->rank = key;
}

static inline int threads_group_member(Comm *comm, Group *g, int i) {
    (void)comm;
    return __atomic_load_n(&g->threads->members[i], __ATOMIC_ACQUIRE);
}

/* The first thread makes the heartbeat table of all. Under a launcher this process also has a record in its host's
 * shared table, which its threads do not update: it signs off there, or the monitor would end the run for its silence.
 * */
static inline Heartbeat *threads_heartbeat_open(Comm *comm) {
    ThreadWorld *w = comm->thread_world;
    rank_state(own_heartbeat.record, RANK_ENDED, seconds_now());
    pthread_mutex_lock(&w->lock);
    if (!w->heartbeats) {
        w->heartbeats = heartbeats_open_threads(comm->mesh.world, comm->timeout);
        for (int i = 0; i < comm->mesh.world; i++) heartbeat_groups(heartbeat_at(w->heartbeats, i), &comm->mesh, i);
        if (!own_heartbeat.table) {
            own_heartbeat.table = w->heartbeats;
            process_end.last_words = heartbeats_last_words;
        }
    }
    pthread_mutex_unlock(&w->lock);
    comm->heartbeats = w->heartbeats;
    return heartbeat_at(w->heartbeats, comm->rank);
}

static inline void thread_slots_destroy_events(ThreadSlot *slots, int count) {
    for (int i = 0; slots && i < count; i++) {
        device_destroy_event(slots[i].ready);
        device_destroy_event(slots[i].copied);
    }
}

static inline void thread_world_close(ThreadWorld *w) {
    while (w->groups) {
        ThreadGroup *g = w->groups;
        w->groups = g->next;
        thread_slots_destroy_events(g->slots, THREAD_SLOTS * g->size);
        for (int p = 0; p < g->size * g->size; p++) {
            thread_slots_destroy_events(g->messages[p], THREAD_SLOTS);
            free(g->messages[p]);
        }
        free(g->messages);
        free(g->members);
        free(g->slots);
        free(g);
    }
    if (!w->heartbeats) return;
    if (own_heartbeat.table == w->heartbeats) own_heartbeat.table = NULL;
    munmap(w->heartbeats, heartbeats_bytes(w->heartbeats->capacity));
    w->heartbeats = NULL;
}

// ---------------------------------------------------------------------------
// messages between two members

/* The slot of a message, which is the same at both ends. */
static inline ThreadSlot *message_slot(Comm *comm, Request *r) {
    Channel *c = r->channel;
    Group *g = r->group;
    if (!c->slots) {
        int from = c->receives ? c->peer : g->rank, to = c->receives ? g->rank : c->peer;
        ThreadSlot **shared = &g->threads->messages[from * g->size + to];
        pthread_mutex_lock(&comm->thread_world->lock);
        if (!*shared) *shared = (ThreadSlot *)checked_malloc(sizeof(ThreadSlot) * THREAD_SLOTS);
        c->slots = *shared;
        pthread_mutex_unlock(&comm->thread_world->lock);
    }
    return &c->slots[r->sequence % THREAD_SLOTS];
}

static inline void threads_start_message(Comm *comm, Request *r) {
    ThreadSlot *slot = message_slot(comm, r);
    Traffic *measured = &comm->traffic_measured[r->group->axis][r->collective];
    measured->calls++;
    if (!r->on_device) request_begin(comm, r);
    if (r->collective == RECEIVE) return;
    measured->bytes += (int64_t)r->bytes;
    slot->send = r->send;
    if (r->on_device) device_record_event(comm->dev, &slot->ready);
    __atomic_store_n(&slot->posted, r->sequence + 1, __ATOMIC_RELEASE);
}

static inline int threads_test_send(Comm *comm, Request *r) {
    ThreadSlot *slot = message_slot(comm, r);
    if (__atomic_load_n(&slot->done, __ATOMIC_ACQUIRE) != r->sequence + 1) return 0;
    if (r->on_device) {
        request_begin(comm, r);
        device_wait_event(comm->dev, slot->copied);
    }
    return 1;
}

static inline int threads_test_receive(Comm *comm, Request *r) {
    ThreadSlot *slot = message_slot(comm, r);
    if (__atomic_load_n(&slot->posted, __ATOMIC_ACQUIRE) != r->sequence + 1) return 0;
    if (r->on_device) {
        request_begin(comm, r);
        device_wait_event(comm->dev, slot->ready);
        device_copy(comm->dev, r->recv, slot->send, r->bytes);
        device_record_event(comm->dev, &slot->copied);
    } else memcpy(r->recv, slot->send, r->bytes);
    comm->traffic_measured[r->group->axis][RECEIVE].bytes += (int64_t)r->bytes;
    __atomic_store_n(&slot->done, r->sequence + 1, __ATOMIC_RELEASE);
    return 1;
}

// ---------------------------------------------------------------------------
// collectives

/* (size) the slots of all members for this collective. */
static inline ThreadSlot *collective_slots(Request *r) {
    ThreadGroup *t = r->group->threads;
    return &t->slots[(r->sequence % THREAD_SLOTS) * t->size];
}

static inline void threads_start(Comm *comm, Request *r) {
    if (r->channel) {
        threads_start_message(comm, r);
        return;
    }
    ThreadSlot *mine = &collective_slots(r)[r->group->rank];
    r->parts_copied = 0;
    mine->send = r->send;
    if (r->on_device) device_record_event(comm->dev, &mine->ready);
    else request_begin(comm, r);
    __atomic_store_n(&mine->posted, r->sequence + 1, __ATOMIC_RELEASE);
    comm->traffic_measured[r->group->axis][r->collective].calls++;
}

/* Copies member p's part. */
static inline void threads_copy_part(Comm *comm, Request *r, const ThreadSlot *slot, int p) {
    int me = r->group->rank;
    const char *from = slot->send + (r->collective == REDUCE_SCATTER ? (size_t)me * r->bytes : 0);
    char *to = r->recv + (size_t)p * r->bytes;
    if (r->on_device) device_wait_event(comm->dev, slot->ready);
    if (to != from) { // equal: this rank's own part of an in-place all-gather
        if (r->on_device) device_copy(comm->dev, to, from, r->bytes);
        else memcpy(to, from, r->bytes);
    }
    if (p != me) comm->traffic_measured[r->group->axis][r->collective].bytes += (int64_t)r->bytes;
}

static inline int threads_test(Comm *comm, Request *r) {
    if (r->channel) return r->channel->receives ? threads_test_receive(comm, r) : threads_test_send(comm, r);
    ThreadSlot *slots = collective_slots(r);
    int n = r->group->threads->size, me = r->group->rank;
    while (r->parts_copied < n) {
        int p = (me + r->parts_copied) % n; // each rank starts at another member, so that not all read the same memory
        if (__atomic_load_n(&slots[p].posted, __ATOMIC_ACQUIRE) != r->sequence + 1) return 0;
        if (r->on_device && !r->parts_copied) request_begin(comm, r);
        threads_copy_part(comm, r, &slots[p], p);
        if (++r->parts_copied < n) continue;
        if (r->on_device) device_record_event(comm->dev, &slots[me].copied);
        __atomic_store_n(&slots[me].done, r->sequence + 1, __ATOMIC_RELEASE);
    }
    for (int p = 0; p < n; p++) // others may still be reading what this rank sent
        if (__atomic_load_n(&slots[p].done, __ATOMIC_ACQUIRE) < r->sequence + 1) return 0;
    for (int p = 0; p < n && r->on_device; p++) // and their GPUs even longer
        device_wait_event(comm->dev, slots[p].copied);
    return 1;
}

static const Transport transport_threads = {
    "threads", threads_group_open, threads_group_member, threads_start, threads_test, threads_heartbeat_open,
    NULL, // gpus_open
    NULL, // gpus_close
    NULL, // channel_open
};

#endif
