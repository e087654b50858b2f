/* transport_threads.h: ranks as threads of one process.
 *
 * Each member of a group posts the address of its data; the others, or the receiver of a message, copy it when they
 * test or wait. A reduce-scatter leaves the parts of all members side by side, as an all-to-all does. With GPUs the
 * copies go to a stream, and events say when the data is ready and when it has been copied.
 */
#ifndef TRANSPORT_THREADS_H
#define TRANSPORT_THREADS_H
#include "comm_types.h"

enum { THREAD_SLOTS = 64 };
static_assert((int)THREAD_SLOTS > (int)MAX_IN_FLIGHT, "a slot is reused only after its collective is complete");

/* Where one member posts one collective, or a sender its message. Number n uses slot n % THREAD_SLOTS. */
typedef struct ThreadSlot {
    int64_t posted; // number of the collective whose data is at `send`
    const char *send;
    int64_t done;       // number of the collective from which this member has copied everything; of a message: which
                        // the receiver has copied
    DeviceEvent ready;  // on a GPU: the data is at `send`
    DeviceEvent copied; // on a GPU: everything has been copied
    char pad[24];       // one cache line each
} ThreadSlot;

/* What the members of a group share, or the two ends of a channel, where only the sender posts. */
typedef struct ThreadGroup {
    int id[3];    // of a group: its axis, its colour, -1; of a channel: its axis, the ranks of its sender and receiver
    int size;     // members that post
    int *members; // (size) the members' ranks in the world; each thread writes its own. A channel has none
    ThreadSlot *slots; // (THREAD_SLOTS, size)
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

/* The group of that id, which whichever thread comes first creates. */
static inline ThreadGroup *thread_group(ThreadWorld *w, int axis, int from, int to, int size) {
    const int id[] = {axis, from, to};
    pthread_mutex_lock(&w->lock);
    ThreadGroup *t = w->groups;
    while (t && memcmp(t->id, id, sizeof id)) t = t->next;
    if (!t) {
        t = new_array(ThreadGroup, 1);
        memcpy(t->id, id, sizeof id);
        t->size = size;
        t->members = new_array(int, size);
        t->slots = new_array(ThreadSlot, THREAD_SLOTS * size);
        t->next = w->groups;
        w->groups = t;
    }
    pthread_mutex_unlock(&w->lock);
    return t;
}

static inline void threads_group_open(Comm *comm, Group *g, int colour) {
    g->threads = thread_group(comm->thread_world, (int)g->axis, colour, -1, g->size);
    __atomic_store_n(&g->threads->members[g->rank], comm->rank, __ATOMIC_RELEASE);
}

static inline int threads_group_member(Comm *comm, Group *g, int i) {
    (void)comm;
    return __atomic_load_n(&g->threads->members[i], __ATOMIC_ACQUIRE);
}

/* The first thread makes the heartbeat table of all. Under a launcher this process also has a record in its host's
 * shared table, which its threads do not update: it signs off there, or the monitor would end the run for its
 * silence. */
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

static inline void thread_world_close(ThreadWorld *w) {
    while (w->groups) {
        ThreadGroup *g = w->groups;
        w->groups = g->next;
        for (int i = 0; i < THREAD_SLOTS * g->size; i++) {
            device_destroy_event(g->slots[i].ready);
            device_destroy_event(g->slots[i].copied);
        }
        free(g->members);
        free(g->slots);
        free(g);
    }
    if (!w->heartbeats) return;
    if (own_heartbeat.table == w->heartbeats) own_heartbeat.table = NULL;
    munmap(w->heartbeats, heartbeats_bytes(w->heartbeats->attached));
    w->heartbeats = NULL;
}

// ---------------------------------------------------------------------------
// collectives and messages

/* Where the members of the request's group, or the sender of its message, post it. *me: this rank's slot there. */
static inline ThreadSlot *thread_slots(Comm *comm, Request *r, int *size, int *me) {
    Channel *c = r->channel;
    if (c && !c->threads)
        c->threads = thread_group(comm->thread_world, c->axis, c->receives ? c->peer_rank : comm->rank,
                                  c->receives ? comm->rank : c->peer_rank, 1);
    ThreadGroup *t = c ? c->threads : r->group->threads;
    *size = t->size;
    *me = c ? 0 : r->group->rank;
    return &t->slots[(r->number % THREAD_SLOTS) * t->size];
}

static inline void threads_start(Comm *comm, Request *r) {
    int size, me;
    ThreadSlot *mine = thread_slots(comm, r, &size, &me) + me;
    Traffic *measured = &comm->traffic_measured[r->group->axis][r->collective];
    measured->calls++;
    r->parts_copied = 0;
    if (!r->on_device) note_moving(comm, r);
    if (r->collective == RECEIVE) return;
    if (r->collective == SEND) measured->bytes += (int64_t)r->bytes;
    mine->send = r->send;
    if (r->on_device) device_record_event(comm->dev, &mine->ready);
    __atomic_store_n(&mine->posted, r->number, __ATOMIC_RELEASE);
}

/* Copies what the members, this rank first, or the sender of a message have posted for this rank so far. On a GPU a
 * request begins when it enqueues something. */
static inline int threads_test(Comm *comm, Request *r) {
    int size, me;
    ThreadSlot *slots = thread_slots(comm, r, &size, &me);
    int parts = r->collective == SEND ? 0 : size;
    // in an all-gather, all members get the same bytes from a member
    int sends_parts = r->collective == REDUCE_SCATTER || r->collective == ALL_TO_ALL;
    while (r->parts_copied < parts) {
        int p = (me + r->parts_copied) % size; // ranks begin with different parts: not all read the same memory
        if (__atomic_load_n(&slots[p].posted, __ATOMIC_ACQUIRE) != r->number) return 0;
        if (r->span.event < 0) note_moving(comm, r);
        if (r->on_device) device_wait_event(comm->dev, slots[p].ready);
        const char *from = slots[p].send + (sends_parts ? (size_t)me * r->bytes : 0);
        request_copy(comm, r, r->recv + (size_t)p * r->bytes, from);
        if (r->channel || p != me) comm->traffic_measured[r->group->axis][r->collective].bytes += (int64_t)r->bytes;
        if (++r->parts_copied < parts) continue;
        if (r->on_device) device_record_event(comm->dev, &slots[me].copied);
        __atomic_store_n(&slots[me].done, r->number, __ATOMIC_RELEASE);
    }
    for (int p = 0; p < size; p++) // as long as a member is not done, it may still read this rank's buffer
        if (__atomic_load_n(&slots[p].done, __ATOMIC_ACQUIRE) < r->number) return 0;
    if (r->span.event < 0) note_moving(comm, r);
    for (int p = 0; p < size && r->on_device; p++) // a member's GPU may still read it after its thread is done
        device_wait_event(comm->dev, slots[p].copied);
    return 1;
}

static const Transport transport_threads = {
    "threads", threads_group_open, threads_group_member, threads_start, threads_test, threads_heartbeat_open,
    NULL, // gpus_open
    NULL, // gpus_close
    NULL, // gpus_connect
    NULL, // last_error
    NULL, // channel_open
    NULL, // ask_hosts
    NULL, // answer_hosts
    NULL, // check_host
};

#endif
