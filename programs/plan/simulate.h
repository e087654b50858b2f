/* simulate.h: runs the communication events of all ranks against each other, in one process.
 *
 * A collective begins when all members of its group have reached it; they must agree in kind, dtype, count and name. A
 * message begins when its sender and its receiver have (sends are synchronous). A rank reaches its collectives in the
 * order in which it started them, over whatever axis, as NCCL requires, and its messages with another rank in order per
 * direction. A deadlock is reported as a cycle of ranks that wait for each other. With a cluster's rates, the
 * simulation also yields the time of the step. A caller may rely on: the result does not depend on the order in which
 * ranks are processed; nothing is allocated per event. */
#ifndef SIMULATE_H
#define SIMULATE_H
#include "../../lib/comm/comm.h" // defines: Mesh, Sentence, say
#include "comm_events.h"         // defines: CommEvents
#include "../shared/cluster.h"   // defines: CollectiveRate, collective_seconds

typedef struct { // what a rank has started and not yet completed, in order: a list of slots
    int first, last, count;
    int arrived; // the rank has reached its first entry and waits there for the others
} SimQueue;

enum { COLLECTIVE_QUEUE, SIM_QUEUES = 1 + CHANNELS }; // a rank's queues: its collectives; then one per channel

typedef struct {
    double start, end; // seconds since the step began
} EventTime;

typedef struct {
    const CommEvents *list;
    int64_t next;                          // index of the event that the rank is at
    int waiting_slot;                      // -1: it does not wait, or its step has ended
    int is_scheduled;                      // it is in the simulation's list of ranks to process
    uint64_t incomplete;                   // bit set of the slots that are not complete
    int64_t started_by[COMM_EVENT_SLOTS];  // the event that started what is in the slot
    double started_at[COMM_EVENT_SLOTS];   // seconds
    double completed_at[COMM_EVENT_SLOTS]; // seconds
    int next_in_queue[COMM_EVENT_SLOTS];   // the slot behind it in its queue
    SimQueue queues[SIM_QUEUES];
    int channel_peer[SIM_QUEUES], num_channels; // the member at the other end; if the rank receives from it, ~member
    double channel_free_at[SIM_QUEUES];         // when the channel's last message was complete
    double clock;                               // seconds
    double waited[AXES];                        // of them, seconds of waiting for an axis
    EventTime *times;                           // (list->count) when each event took place; NULL: not recorded
} SimRank;

typedef struct {             // the next collective of a group
    int arrived, first_rank; // members that have reached it; the first of them
    int64_t begun;           // collectives that have begun before
    double latest;           // when the latest of those members reached it
    double free_at;          // when the previous collective was complete
} SimGroup;

typedef struct {
    Mesh mesh;                                  // of the simulated ranks
    const Mesh *whole_mesh;                     // whose group sizes give the bytes that a rank receives
    const CollectiveRate (*rates)[COLLECTIVES]; // NULL: communication takes no time
    SimRank *ranks;                             // (world)
    int *group_of;                              // (world, AXES) the first rank of each rank's group
    SimGroup *groups;                           // (AXES, world) by first rank
    int *scheduled, num_scheduled;              // (world) ranks to process
    int ended;                                  // ranks whose step has ended
    double seconds;                             // of the step: until the last rank has ended
    Sentence problem;                           // why the ranks do not fit together; empty: they do
} Simulation;

// ---------------------------------------------------------------------------
// sentences

static const char *event_name(const CommEvents *list, int32_t id) { return id < 0 ? "?" : list->names->text[id]; }

/* "all_gather of 'attention's input' (262144 x bf16) over tp in forward of model.layers.3" */
static void say_event(Sentence *t, const CommEvents *list, const CommEvent *e) {
    say(t, "%s of '%s' (%" PRId64 " x %s) over %s in %s", collective_names[e->collective], event_name(list, e->name),
        e->count, dtype_names[e->dtype], axis_names[e->axis], event_name(list, e->phase));
}

/* "rank 17 (tp 1, cp 2)": the coordinates on axes of more than one rank. */
static void say_mesh_rank(Sentence *t, const Mesh *mesh, int rank) {
    int said = 0;
    say(t, "rank %d", rank);
    for (int a = 0; a < MESH_AXES; a++) {
        if (mesh->size[a] == 1) continue;
        say(t, "%s%s %d", said++ ? ", " : " (", axis_names[a], mesh_coordinate(mesh, rank, (Axis)a));
    }
    if (said) say(t, ")");
}

/* "rank 17 (tp 1) started send of …" */
static void say_started(Simulation *s, int rank, const CommEvent *e) {
    say_mesh_rank(&s->problem, &s->mesh, rank);
    say(&s->problem, " started ");
    say_event(&s->problem, s->ranks[rank].list, e);
}

static int events_match(const CommEvents *a, const CommEvent *x, const CommEvents *b, const CommEvent *y) {
    return x->count == y->count && x->dtype == y->dtype && x->axis == y->axis &&
           (a->names == b->names ? x->name == y->name : !strcmp(event_name(a, x->name), event_name(b, y->name)));
}

/* The event that starts collective `number` over `axis`, counted from 0; NULL: there are fewer. */
static const CommEvent *find_collective(const CommEvents *list, int axis, int64_t number) {
    for (int64_t i = 0; i < list->count; i++) {
        const CommEvent *e = &list->events[i];
        if (!e->is_wait && e->axis == axis && e->collective < SEND && number-- == 0) return e;
    }
    return NULL;
}

/* Does `rank` start the same collective `number` as `event` of `list`? */
static int starts_same(const Simulation *s, int rank, int64_t number, const CommEvents *list, const CommEvent *event) {
    const CommEvent *e = find_collective(s->ranks[rank].list, event->axis, number);
    return e && e->collective == event->collective && events_match(list, event, s->ranks[rank].list, e);
}

/* Members of a group do not agree on their next collective: says what most of them start, and who starts another. */
static void say_disagreement(Simulation *s, int axis, int group) {
    const SimGroup *g = &s->groups[axis * s->mesh.world + group];
    int size = mesh_group_size(&s->mesh, (Axis)axis), majority = 0, votes = 0;
    for (int i = 0; i < size && votes * 2 <= size; i++) {
        int rank = mesh_group_member(&s->mesh, group, (Axis)axis, i), same = 0;
        const CommEvents *list = s->ranks[rank].list;
        const CommEvent *event = find_collective(list, axis, g->begun);
        for (int k = 0; k < size && event; k++)
            same += starts_same(s, mesh_group_member(&s->mesh, group, (Axis)axis, k), g->begun, list, event);
        if (same <= votes) continue;
        votes = same;
        majority = rank;
    }
    const CommEvents *list = s->ranks[majority].list;
    const CommEvent *event = find_collective(list, axis, g->begun);
    say(&s->problem, "collective %" PRId64 " over %s: %d of %d members start ", g->begun + 1, axis_names[axis], votes,
        size);
    say_event(&s->problem, list, event);
    int most_named = 4;
    for (int k = 0; k < size && most_named > 0; k++) {
        int rank = mesh_group_member(&s->mesh, group, (Axis)axis, k);
        if (starts_same(s, rank, g->begun, list, event)) continue;
        const CommEvent *other = find_collective(s->ranks[rank].list, axis, g->begun);
        say(&s->problem, "; ");
        say_mesh_rank(&s->problem, &s->mesh, rank);
        say(&s->problem, " starts ");
        if (other) say_event(&s->problem, s->ranks[rank].list, other);
        else say(&s->problem, "no further one");
        most_named--;
    }
}

// ---------------------------------------------------------------------------
// collectives and messages

static void sim_schedule(Simulation *s, int rank) {
    if (s->ranks[rank].is_scheduled) return;
    s->ranks[rank].is_scheduled = 1;
    s->scheduled[s->num_scheduled++] = rank;
}

static const CommEvent *queue_front(const SimRank *r, const SimQueue *q) {
    return &r->list->events[r->started_by[q->first]];
}

/* Seconds of a collective or message, by the cluster's rates. */
static double event_seconds(const Simulation *s, const CommEvent *e) {
    double others = e->collective < SEND ? mesh_group_size(s->whole_mesh, (Axis)e->axis) - 1 : 1;
    double bytes = (double)e->count * (double)dtype_size((Dtype)e->dtype) * others;
    return s->rates ? collective_seconds(&s->rates[e->axis][e->collective], bytes) : 0;
}

/* The front of a rank's queue took place from `start` to `end`. */
static void complete_front(Simulation *s, int rank, int queue, double start, double end) {
    SimRank *r = &s->ranks[rank];
    SimQueue *q = &r->queues[queue];
    int slot = q->first;
    if (r->times) {
        r->times[r->started_by[slot]].start = start;
        r->times[r->started_by[slot]].end = end;
    }
    r->completed_at[slot] = end;
    r->incomplete &= ~(1ull << slot);
    q->first = r->next_in_queue[slot];
    q->count--;
    q->arrived = 0;
    if (q->count || r->waiting_slot == slot) sim_schedule(s, rank);
}

/* A rank reaches the collective at the front of its queue. The last member to reach it completes it for all. */
static void arrive_at_collective(Simulation *s, int rank) {
    SimRank *r = &s->ranks[rank];
    SimQueue *q = &r->queues[COLLECTIVE_QUEUE];
    const CommEvent *event = queue_front(r, q);
    int axis = event->axis, group = s->group_of[rank * AXES + axis], size = mesh_group_size(&s->mesh, (Axis)axis);
    SimGroup *g = &s->groups[axis * s->mesh.world + group];
    q->arrived = 1;
    if (!g->arrived) {
        g->first_rank = rank;
        g->latest = g->free_at;
    } else {
        const SimRank *first = &s->ranks[g->first_rank];
        const CommEvent *theirs = queue_front(first, &first->queues[COLLECTIVE_QUEUE]);
        if (theirs->collective != event->collective || !events_match(r->list, event, first->list, theirs)) {
            say_disagreement(s, axis, group);
            return;
        }
    }
    g->latest = fmax(g->latest, r->started_at[q->first]);
    if (++g->arrived < size) return;
    double start = g->latest, end = start + event_seconds(s, event);
    g->free_at = end;
    g->arrived = 0;
    g->begun++;
    for (int i = 0; i < size; i++)
        complete_front(s, mesh_group_member(&s->mesh, group, (Axis)axis, i), COLLECTIVE_QUEUE, start, end);
}

/* The queue that an event belongs to. A channel gets its queue when it is first used. */
static int queue_of(SimRank *r, const CommEvent *e) {
    if (e->collective < SEND) return COLLECTIVE_QUEUE;
    int peer = e->collective == SEND ? e->peer : ~e->peer, q = 1;
    while (q <= r->num_channels && r->channel_peer[q] != peer) q++;
    if (q == SIM_QUEUES)
        run_failure("a rank has more than %d channels; each rank it sends to takes one, and each rank it receives "
                    "from: raise CHANNELS in lib/comm/watchdog.h",
                    CHANNELS);
    if (q > r->num_channels) {
        r->num_channels = q;
        r->channel_peer[q] = peer;
    }
    return q;
}

/* Where `rank` has the other end of messages that `member` of its group sends or receives; 0: it has started none. */
static int queue_of_other_end(const SimRank *r, int member, int member_sends) {
    int q = 1, peer = member_sends ? ~member : member;
    while (q <= r->num_channels && r->channel_peer[q] != peer) q++;
    return q <= r->num_channels && r->queues[q].count ? q : 0;
}

/* Completes the message at the front of a channel if its other end has started it too. */
static void meet_message(Simulation *s, int rank, int queue) {
    SimRank *r = &s->ranks[rank];
    const CommEvent *event = queue_front(r, &r->queues[queue]);
    int sends = event->collective == SEND, group = s->group_of[rank * AXES + event->axis];
    int other = mesh_group_member(&s->mesh, group, (Axis)event->axis, event->peer);
    SimRank *o = &s->ranks[other];
    int other_queue = queue_of_other_end(o, mesh_coordinate(&s->mesh, rank, (Axis)event->axis), sends);
    if (!other_queue) return;
    const CommEvent *theirs = queue_front(o, &o->queues[other_queue]);
    if (!events_match(r->list, event, o->list, theirs)) {
        say_started(s, sends ? rank : other, sends ? event : theirs);
        say(&s->problem, ", but at the other end ");
        say_started(s, sends ? other : rank, sends ? theirs : event);
        return;
    }
    double both = fmax(r->started_at[event->slot], o->started_at[theirs->slot]);
    double start = fmax(both, r->channel_free_at[queue]), end = start + event_seconds(s, event);
    r->channel_free_at[queue] = end;
    o->channel_free_at[other_queue] = end;
    complete_front(s, rank, queue, start, end);
    complete_front(s, other, other_queue, start, end);
}

/* Ends the rank's wait if what it waits for is complete. Returns whether it goes on. */
static int end_wait(SimRank *r) {
    int slot = r->waiting_slot;
    if (r->incomplete >> slot & 1) return 0;
    double start = r->clock;
    r->clock = fmax(start, r->completed_at[slot]);
    r->waited[r->list->events[r->started_by[slot]].axis] += r->clock - start;
    if (r->times) {
        r->times[r->next].start = start;
        r->times[r->next].end = r->clock;
    }
    r->waiting_slot = -1;
    r->next++;
    return 1;
}

static void start_event(SimRank *r, const CommEvent *e) {
    SimQueue *q = &r->queues[queue_of(r, e)];
    int slot = e->slot;
    r->started_by[slot] = r->next++;
    r->started_at[slot] = r->clock;
    r->incomplete |= 1ull << slot;
    if (q->count++) r->next_in_queue[q->last] = slot;
    else q->first = slot;
    q->last = slot;
}

/* Runs a rank up to its next wait for something that is not complete. */
static void run_rank(Simulation *s, int rank) {
    SimRank *r = &s->ranks[rank];
    while (r->next <= r->list->count) {
        if (r->waiting_slot >= 0 && !end_wait(r)) return;
        if (r->next == r->list->count) {
            r->next++; // the step has ended
            s->ended++;
            r->clock += r->list->compute_after;
            return;
        }
        const CommEvent *e = &r->list->events[r->next];
        r->clock += e->compute_before;
        if (e->is_wait) r->waiting_slot = e->slot;
        else start_event(r, e);
    }
}

// ---------------------------------------------------------------------------
// deadlocks

static int has_ended(const SimRank *r) { return r->waiting_slot < 0 && r->next > r->list->count; }

/* Is the rank at the front of its queue of collectives, one over `axis`, and waits there for the others? */
static int has_arrived(const SimRank *r, int axis) {
    const SimQueue *q = &r->queues[COLLECTIVE_QUEUE];
    return q->arrived && queue_front(r, q)->axis == axis;
}

/* Why does `rank` not reach a collective over `axis` (-1: a message) that others wait for? If it has started that one,
 * because of the front of its queue; else because of what it waits for itself. Sets `obstacle` to that event and
 * returns a rank that has not reached it; -1: `rank` has ended. */
static int find_obstacle(const Simulation *s, int rank, int axis, const CommEvent **obstacle) {
    SimRank *r = &s->ranks[rank];
    const SimQueue *q = &r->queues[COLLECTIVE_QUEUE];
    int has_started = 0;
    for (int i = 0, slot = q->first; i < q->count; i++, slot = r->next_in_queue[slot])
        has_started |= r->list->events[r->started_by[slot]].axis == axis;
    if (!has_started && r->waiting_slot < 0) return -1;
    if (!has_started) q = &r->queues[queue_of(r, &r->list->events[r->started_by[r->waiting_slot]])];
    const CommEvent *event = queue_front(r, q);
    *obstacle = event;
    int group = s->group_of[rank * AXES + event->axis], i = 0;
    if (event->collective >= SEND) return mesh_group_member(&s->mesh, group, (Axis)event->axis, event->peer);
    while (has_arrived(&s->ranks[mesh_group_member(&s->mesh, group, (Axis)event->axis, i)], event->axis)) i++;
    return mesh_group_member(&s->mesh, group, (Axis)event->axis, i);
}

/* Follows who waits for whom until a rank comes up again or has ended, then names the ranks of that cycle. */
static void say_deadlock(Simulation *s) {
    enum { MAX_PATH = 64, MAX_NAMED = 8 };
    int path[MAX_PATH], length = 0, rank = 0, axis = -1, named = 0, cycle_left = 0;
    while (s->ranks[rank].waiting_slot < 0) rank++;
    say(&s->problem, "%d of %d ranks wait forever", s->mesh.world - s->ended, s->mesh.world);
    for (int i = 0; i < 2 * MAX_PATH; i++) {
        for (int k = 0; k < length && k < MAX_PATH && !cycle_left; k++)
            if (path[k] == rank) cycle_left = length - k;
        if (length < MAX_PATH) path[length] = rank;
        length++;
        const CommEvent *obstacle = NULL;
        int next = find_obstacle(s, rank, axis, &obstacle);
        if (next < 0 && !named) say(&s->problem, ": the step of rank %d has ended", rank);
        if (next < 0) return;
        axis = obstacle->collective < SEND ? obstacle->axis : -1;
        int ends = has_ended(&s->ranks[next]);
        if ((cycle_left || ends) && named < MAX_NAMED) {
            say(&s->problem, named++ ? "; " : ": ");
            say_started(s, rank, obstacle);
            say(&s->problem,
                ends ? ", which rank %d never reaches: its step has ended" : ", which rank %d has not reached", next);
        }
        if (ends || (cycle_left && --cycle_left == 0)) return;
        rank = next;
    }
}

// ---------------------------------------------------------------------------
// the simulation

/* `lists`: (mesh->world) one list of events per rank. `problem` (size): filled if the ranks do not fit together. */
static void simulation_open(Simulation *s, const Mesh *mesh, const CommEvents *const *lists, const Mesh *whole_mesh,
                            const CollectiveRate (*rates)[COLLECTIVES], char *problem, size_t size) {
    size_t world = (size_t)mesh->world;
    memset(s, 0, sizeof *s);
    s->mesh = *mesh;
    s->whole_mesh = whole_mesh;
    s->rates = rates;
    s->ranks = (SimRank *)checked_malloc(sizeof(SimRank) * world);
    s->group_of = (int *)checked_malloc(sizeof(int) * world * AXES);
    s->groups = (SimGroup *)checked_malloc(sizeof(SimGroup) * world * AXES);
    s->scheduled = (int *)checked_malloc(sizeof(int) * world);
    for (int r = 0; r < mesh->world; r++) {
        int key;
        s->ranks[r].list = lists[r];
        s->ranks[r].waiting_slot = -1;
        for (int a = 0; a < AXES; a++) mesh_group(mesh, r, (Axis)a, &s->group_of[r * AXES + a], &key);
    }
    problem[0] = 0;
    s->problem.at = problem;
    s->problem.size = size;
}

/* Runs all ranks to the end of the step. Returns 0 if they do not fit together; s->problem says why. */
static int simulation_run(Simulation *s) {
    for (int r = s->mesh.world - 1; r >= 0; r--) sim_schedule(s, r);
    while (s->num_scheduled && !s->problem.used) {
        int rank = s->scheduled[--s->num_scheduled];
        SimRank *r = &s->ranks[rank];
        r->is_scheduled = 0;
        run_rank(s, rank);
        const SimQueue *collectives = &r->queues[COLLECTIVE_QUEUE];
        if (collectives->count && !collectives->arrived) arrive_at_collective(s, rank);
        for (int q = 1; q <= r->num_channels && !s->problem.used; q++)
            if (r->queues[q].count) meet_message(s, rank, q);
    }
    if (!s->problem.used && s->ended < s->mesh.world) say_deadlock(s);
    for (int r = 0; r < s->mesh.world; r++) s->seconds = fmax(s->seconds, s->ranks[r].clock);
    return !s->problem.used;
}

/* Moves the timeline of the dry run of simulated rank `rank`, whose clock knows only arithmetic, to simulated times.
 * Its collectives, messages and waits are the events of the rank's list, in the same order. */
static void simulated_timeline(const Simulation *s, int rank, Device *dry_run) {
    const EventTime *time = s->ranks[rank].times;
    Event *step = NULL, *phase = NULL;
    double nows[STREAMS] = ZERO; // of each stream; on a CPU there is one
    for (int64_t i = 0; i < min_i64(dry_run->rec.num_events, dry_run->rec.max_events); i++) {
        Event *e = &dry_run->rec.events[i];
        double seconds = e->end - e->start;
        if (e->kind == EVENT_COMM) {
            e->start = time->start;
            e->end = time->end;
            time++;
            continue;
        }
        double *now = &nows[e->lane];
        e->start = *now;
        if (e->kind == EVENT_OP) *now += seconds;
        if (e->kind == EVENT_WAIT) *now = fmax(*now, (time++)->end);
        e->end = *now;
        if (e->kind == EVENT_STEP) step = e;
        if (e->kind == EVENT_PHASE && phase) phase->end = e->end;
        if (e->kind == EVENT_PHASE) phase = e;
    }
    if (step) step->end = nows[STREAM_COMPUTE];
    if (phase) phase->end = nows[STREAM_COMPUTE];
}

static void simulation_close(Simulation *s) {
    for (int r = 0; r < s->mesh.world; r++) free(s->ranks[r].times);
    free(s->ranks);
    free(s->group_of);
    free(s->groups);
    free(s->scheduled);
}

#endif
