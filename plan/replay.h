/* replay.h: the scripts of all ranks of a plan, played against each other.
 *
 * Every rank of any world in one process: those that ask the same of others share a script, and each rank is a place in
 * its own. A collective begins when all members of its group have come to it, and its members must agree in kind,
 * dtype, count and name; a message when its sender and its receiver have (sends are synchronous). Each rank comes to
 * its collectives in the order in which it started them, over whatever axis, as NCCL wants it, and to its messages with
 * another rank likewise, each way by itself. Ranks that wait for each other are told as a cycle. With a cluster's rates
 * the same replay is the step's timeline. A caller may rely on: the result does not depend on the order in which ranks
 * are looked at; nothing is allocated for a line.
 */
#ifndef REPLAY_H
#define REPLAY_H
#include "../lib/comm.h"

enum { SLOTS = 64 };

typedef struct { // what a rank has started and not come to, by its slots
    int first, last, count;
    int came; // the first has come to its group
} Queue;

enum {
    COLLECTIVE_QUEUE,
    QUEUES = 1 + CHANNELS
}; // of a rank: its collectives', and one for each of its channels (comm.h)

typedef struct {
    const CommEvents *script;
    int64_t at;                          // the line that it has come to
    int waits_for;                       // the slot; -1: it has ended, or goes on
    int listed;                          // it is to be looked at
    uint64_t pending;                    // slots whose exchange is not complete
    int64_t line[SLOTS];                 // of the exchange in each slot,
    double when[SLOTS], complete[SLOTS]; // … when it started, and was complete; seconds
    int behind[SLOTS];                   // … and the slot behind it in its queue
    Queue queue[QUEUES];
    int peer[QUEUES], channels; // of a channel: the member at the other end, or, negative, ~ of one that is received
                                // from; how many there are
    double free_at[QUEUES];     // of a channel: when its last message was complete
    double clock;               // seconds
    double waited[AXES];        // of them, those that it waited for an exchange over an axis
    struct LineTime *times; // (lines of the script) when each exchange, and each wait, took place; NULL: nobody asks
} Actor;

typedef struct LineTime {
    double start, end;
} LineTime;

typedef struct {        // the collective that a group is to begin next
    int arrived, first; // members; the rank that came first
    int64_t number;     // collectives that have begun
    double latest, free_at;
} Gathering;

typedef struct {
    Mesh playing, *mesh;                      // whose ranks play
    const ExchangeRate (*rates)[COLLECTIVES]; // NULL: there is no clock
    const Mesh *whole;                        // of whose groups exchanges take the time
    Actor *actors;                            // (world)
    int *colour;                              // (world, AXES)
    Gathering *groups;                        // (AXES, world) by colour
    int *list, listed;                        // (world) ranks to be looked at
    int ended;
    double seconds;   // of the step: the last rank's
    Sentence problem; // what is wrong; empty: nothing
} Replay;

static const char *script_text(const CommEvents *s, int32_t name) { return name < 0 ? "?" : s->names->text[name]; }

/* "all_gather of 'attention's input' (262144 x bf16) over tp in forward of model.layers.3" */
static void say_script_line(Sentence *t, const CommEvents *s, const CommEvent *line) {
    say(t, "%s of '%s' (%" PRId64 " x %s) over %s in %s", collective_names[line->collective],
        script_text(s, line->name), line->count, dtype_names[line->dtype], axis_names[line->axis],
        script_text(s, line->phase));
}

/* "rank 17 (tp 1, cp 2)", with those of its coordinates that are not of an axis of one. */
static void say_place(Sentence *t, const Mesh *m, int rank) {
    const char *comma = " (";
    say(t, "rank %d", rank);
    for (int a = 0; a < MESH_AXES; a++)
        if (m->size[a] > 1) say(t, "%s%s %d", comma, axis_names[a], mesh_coordinate(m, rank, (Axis)a)), comma = ", ";
    if (comma[0] == ',') say(t, ")");
}

static int lines_alike(const CommEvents *a, const CommEvent *x, const CommEvents *b, const CommEvent *y) {
    return x->count == y->count && x->dtype == y->dtype && x->axis == y->axis &&
           (a->names == b->names ? x->name == y->name : !strcmp(script_text(a, x->name), script_text(b, y->name)));
}

/* The how manieth line of a script that starts a collective over `axis` (0: the first); NULL: there are fewer. */
static const CommEvent *script_collective(const CommEvents *s, int axis, int64_t number) {
    for (int64_t i = 0; i < s->count; i++) {
        const CommEvent *line = &s->events[i];
        if (!line->is_wait && line->axis == axis && line->collective < SEND && number-- == 0) return line;
    }
    return NULL;
}

/* Members of a group do not agree: says what most of them do, and who does otherwise. */
static void collectives_differ(Replay *p, int axis, int colour) {
    const Gathering *g = &p->groups[axis * p->mesh->world + colour];
    int size = mesh_group_size(p->mesh, (Axis)axis), best = 0, votes = 0, told = 0;
    for (int i = 0; i < size && votes * 2 <= size; i++) {
        int like = 0;
        const CommEvents *a = p->actors[mesh_group_member(p->mesh, colour, (Axis)axis, i)].script;
        const CommEvent *x = script_collective(a, axis, g->number);
        for (int k = 0; k < size && x; k++) {
            const CommEvents *b = p->actors[mesh_group_member(p->mesh, colour, (Axis)axis, k)].script;
            const CommEvent *y = script_collective(b, axis, g->number);
            like += y && y->collective == x->collective && lines_alike(a, x, b, y);
        }
        if (like > votes) votes = like, best = i;
    }
    const CommEvents *a = p->actors[mesh_group_member(p->mesh, colour, (Axis)axis, best)].script;
    const CommEvent *x = script_collective(a, axis, g->number);
    say(&p->problem, "exchange %" PRId64 " over %s: %d of %d members start ", g->number + 1, axis_names[axis], votes,
        size);
    say_script_line(&p->problem, a, x);
    for (int k = 0; k < size && told < 4; k++) {
        int rank = mesh_group_member(p->mesh, colour, (Axis)axis, k);
        const CommEvents *b = p->actors[rank].script;
        const CommEvent *y = script_collective(b, axis, g->number);
        if (y && y->collective == x->collective && lines_alike(a, x, b, y)) continue;
        say(&p->problem, "; "), say_place(&p->problem, p->mesh, rank), say(&p->problem, " starts ");
        if (y) say_script_line(&p->problem, b, y);
        else say(&p->problem, "none");
        told++;
    }
}

static void replay_look(Replay *p, int rank) {
    if (p->actors[rank].listed) return;
    p->actors[rank].listed = 1;
    p->list[p->listed++] = rank;
}

static const CommEvent *queue_first(const Actor *a, const Queue *q) { return &a->script->events[a->line[q->first]]; }

/* The first of a rank's queue has taken place. */
static void exchange_complete(Replay *p, int rank, int queue, double start, double end) {
    Actor *a = &p->actors[rank];
    Queue *q = &a->queue[queue];
    int slot = q->first;
    LineTime took = {start, end};
    if (a->times) a->times[a->line[slot]] = took;
    a->complete[slot] = end;
    a->pending &= ~(1ull << slot);
    q->first = a->behind[slot], q->count--, q->came = 0;
    if (q->count || a->waits_for == slot) replay_look(p, rank);
}

static double line_seconds(const Replay *p, const CommEvent *line) {
    double others = line->collective < SEND ? mesh_group_size(p->whole, (Axis)line->axis) - 1 : 1;
    return p->rates ? exchange_seconds(&p->rates[line->axis][line->collective],
                                       (double)line->count * (double)dtype_size((Dtype)line->dtype) * others)
                    : 0;
}

/* A rank comes to the collective that is first in its queue. The last member to come completes it for all. */
static void collective_arrive(Replay *p, int rank) {
    Actor *a = &p->actors[rank];
    Queue *q = &a->queue[COLLECTIVE_QUEUE];
    const CommEvent *line = queue_first(a, q);
    int colour = p->colour[rank * AXES + line->axis], size = mesh_group_size(p->mesh, (Axis)line->axis);
    Gathering *g = &p->groups[line->axis * p->mesh->world + colour];
    q->came = 1;
    if (!g->arrived) g->first = rank, g->latest = g->free_at;
    else {
        const Actor *other = &p->actors[g->first];
        const CommEvent *its = queue_first(other, &other->queue[COLLECTIVE_QUEUE]);
        if (its->collective != line->collective || !lines_alike(a->script, line, other->script, its)) {
            collectives_differ(p, line->axis, colour);
            return;
        }
    }
    g->latest = fmax(g->latest, a->when[q->first]);
    if (++g->arrived < size) return;
    double start = g->latest, end = start + line_seconds(p, line);
    int axis = line->axis;
    g->free_at = end, g->arrived = 0, g->number++;
    for (int i = 0; i < size; i++)
        exchange_complete(p, mesh_group_member(p->mesh, colour, (Axis)axis, i), COLLECTIVE_QUEUE, start, end);
}

/* Which queue an exchange of a rank is of. */
static int queue_of(Actor *a, const CommEvent *line) {
    if (line->collective < SEND) return COLLECTIVE_QUEUE;
    int other = line->collective == SEND ? line->peer : ~line->peer, q = 1;
    while (q <= a->channels && a->peer[q] != other) q++;
    if (q == QUEUES) run_failure("a rank has messages with more than %d others", CHANNELS);
    if (q > a->channels) a->peer[a->channels = q] = other;
    return q;
}

/* The first message of a channel: has its other end started its own? */
static void message_meet(Replay *p, int rank, int queue) {
    Actor *a = &p->actors[rank];
    const CommEvent *line = queue_first(a, &a->queue[queue]);
    int sends = line->collective == SEND, colour = p->colour[rank * AXES + line->axis],
        peer = mesh_group_member(p->mesh, colour, (Axis)line->axis, line->peer),
        member = mesh_coordinate(p->mesh, rank, (Axis)line->axis), its_queue = 1;
    Actor *b = &p->actors[peer];
    while (its_queue <= b->channels && b->peer[its_queue] != (sends ? ~member : member)) its_queue++;
    if (its_queue > b->channels || !b->queue[its_queue].count) return;
    const CommEvent *its = queue_first(b, &b->queue[its_queue]);
    if (!lines_alike(a->script, line, b->script, its)) {
        int ends[2] = {sends ? rank : peer, sends ? peer : rank};
        for (int i = 0; i < 2; i++) {
            say(&p->problem, i ? ", and at its other end " : ""), say_place(&p->problem, p->mesh, ends[i]),
                say(&p->problem, " has started ");
            say_script_line(&p->problem, p->actors[ends[i]].script, ends[i] == rank ? line : its);
        }
        return;
    }
    double start = fmax(fmax(a->when[line->slot], b->when[its->slot]), a->free_at[queue]),
           end = start + line_seconds(p, line);
    a->free_at[queue] = b->free_at[its_queue] = end;
    exchange_complete(p, rank, queue, start, end);
    exchange_complete(p, peer, its_queue, start, end);
}

/* A rank goes on, up to a wait for what is not complete. */
static void actor_goes_on(Replay *p, int rank) {
    Actor *a = &p->actors[rank];
    const CommEvents *s = a->script;
    while (a->at <= s->count) {
        if (a->waits_for >= 0) {
            int slot = a->waits_for, axis = s->events[a->line[slot]].axis;
            if (a->pending >> slot & 1) return;
            double start = a->clock;
            a->clock = fmax(start, a->complete[slot]);
            a->waited[axis] += a->clock - start;
            if (a->times) a->times[a->at].start = start, a->times[a->at].end = a->clock;
            a->waits_for = -1, a->at++;
        }
        if (a->at == s->count) { // the step is over
            a->at++, p->ended++;
            a->clock += s->compute_after;
            return;
        }
        const CommEvent *line = &s->events[a->at];
        a->clock += line->compute_before;
        if (line->is_wait) {
            a->waits_for = line->slot;
            continue;
        }
        Queue *q = &a->queue[queue_of(a, line)];
        int slot = line->slot;
        a->line[slot] = a->at++, a->when[slot] = a->clock;
        a->pending |= 1ull << slot;
        *(q->count++ ? &a->behind[q->last] : &q->first) = slot;
        q->last = slot;
    }
}

// ---------------------------------------------------------------------------
// nobody can go on

/* Why does `rank` not come to a collective over `axis` (-1: to a message) that others have come to? Because of the
 * first of its queue, if it has started that one, or else of what it waits for itself. Returns who has not come to this
 * `obstacle`; -1: the rank has ended. */
static int stands_behind(const Replay *p, int rank, int axis, const CommEvent **obstacle) {
    Actor *a = &p->actors[rank];
    const Queue *q = &a->queue[COLLECTIVE_QUEUE];
    int started = 0;
    for (int i = 0, slot = q->first; i < q->count; i++, slot = a->behind[slot])
        started |= a->script->events[a->line[slot]].axis == axis;
    if (!started && a->waits_for < 0) return -1;
    if (!started) q = &a->queue[queue_of(a, &a->script->events[a->line[a->waits_for]])];
    const CommEvent *line = *obstacle = queue_first(a, q);
    int colour = p->colour[rank * AXES + line->axis];
    if (line->collective >= SEND) return mesh_group_member(p->mesh, colour, (Axis)line->axis, line->peer);
    for (int i = 0;; i++) { // one of the group has not come
        int member = mesh_group_member(p->mesh, colour, (Axis)line->axis, i);
        const Actor *b = &p->actors[member];
        const Queue *its = &b->queue[COLLECTIVE_QUEUE];
        if (!its->came || queue_first(b, its)->axis != line->axis) return member;
    }
}

/* Follows who waits for whom until somebody comes up again, or has ended; then tells of that round alone. */
static void say_cycle(Replay *p) {
    enum { MOST = 64, TOLD = 8 };
    int path[MOST], n = 0, rank = 0, axis = -1, told = 0, again = 0;
    const CommEvent *line = NULL;
    while (p->actors[rank].waits_for < 0) rank++; // somebody waits: not all have ended
    say(&p->problem, "%d of %d ranks wait for ever", p->mesh->world - p->ended, p->mesh->world);
    for (int i = 0; i < 2 * MOST; i++) {
        if (n < MOST) path[n] = rank;
        for (int k = 0; k < n && k < MOST && !again; k++)
            again = path[k] == rank ? n - k : 0; // so many ranks in the round
        n++;
        int next = stands_behind(p, rank, axis, &line);
        if (next < 0 && !told) say(&p->problem, ": rank %d's step has ended", rank);
        if (next < 0) return;
        axis = line->collective < SEND ? line->axis : -1;
        int ends = p->actors[next].waits_for < 0 && p->actors[next].at > p->actors[next].script->count;
        if ((again || ends) && told < TOLD) {
            say(&p->problem, "%s", told++ ? "; " : ": "), say_place(&p->problem, p->mesh, rank),
                say(&p->problem, " has started "), say_script_line(&p->problem, p->actors[rank].script, line);
            say(&p->problem,
                ends ? ", to which rank %d does not come: its step has ended" : ", to which rank %d has not come",
                next);
        }
        if (ends || (again && --again == 0)) return;
        rank = next;
    }
}

// ---------------------------------------------------------------------------
// the replay

static void replay_open(Replay *p, const Mesh *mesh, const CommEvents *const *scripts, const Mesh *whole,
                        const ExchangeRate (*rates)[COLLECTIVES], char *problem, size_t size) {
    size_t world = (size_t)mesh->world;
    memset(p, 0, sizeof *p);
    p->playing = *mesh, p->mesh = &p->playing, p->whole = whole, p->rates = rates;
    p->actors = (Actor *)checked_malloc(sizeof(Actor) * world);
    p->colour = (int *)checked_malloc(sizeof(int) * world * AXES);
    p->groups = (Gathering *)checked_malloc(sizeof(Gathering) * world * AXES);
    p->list = (int *)checked_malloc(sizeof(int) * world);
    for (int r = 0; r < mesh->world; r++) {
        int key;
        p->actors[r].script = scripts[r], p->actors[r].waits_for = -1;
        for (int a = 0; a < AXES; a++) mesh_group(mesh, r, (Axis)a, &p->colour[r * AXES + a], &key);
    }
    problem[0] = 0;
    p->problem.at = problem, p->problem.size = size;
}

/* Plays all scripts to their ends. 0: they do not fit each other, as p->problem says. */
static int replay_run(Replay *p) {
    for (int r = p->mesh->world - 1; r >= 0; r--) replay_look(p, r);
    while (p->listed && !p->problem.used) {
        int rank = p->list[--p->listed];
        Actor *a = &p->actors[rank];
        a->listed = 0;
        actor_goes_on(p, rank);
        if (a->queue[COLLECTIVE_QUEUE].count && !a->queue[COLLECTIVE_QUEUE].came) collective_arrive(p, rank);
        for (int q = 1; q <= a->channels && !p->problem.used; q++)
            if (a->queue[q].count) message_meet(p, rank, q);
    }
    if (!p->problem.used && p->ended < p->mesh->world) say_cycle(p);
    for (int r = 0; r < p->mesh->world; r++) p->seconds = fmax(p->seconds, p->actors[r].clock);
    return !p->problem.used;
}

/* Puts a rank's dry-run timeline, whose clock knows arithmetic alone, on the clock of the replay, which was asked for
 * the rank's times. Exchanges and waits are the lines of its script, in their order. */
static void replay_times(const Replay *p, int rank, Device *dry_run) {
    const Actor *a = &p->actors[rank];
    Event *step = NULL, *phase = NULL;
    double now = 0;
    int64_t line = 0;
    for (int64_t i = 0; i < min_i64(dry_run->num_events, dry_run->max_events); i++) {
        Event *e = &dry_run->events[i];
        double took = e->end - e->start;
        if (e->kind == EVENT_COMM) {
            e->start = a->times[line].start, e->end = a->times[line].end, line++;
            continue;
        }
        e->start = now;
        if (e->kind == EVENT_OP) now += took;
        if (e->kind == EVENT_WAIT) now = fmax(now, a->times[line++].end);
        e->end = now;
        if (e->kind == EVENT_STEP) step = e;
        if (e->kind == EVENT_PHASE && phase) phase->end = now;
        if (e->kind == EVENT_PHASE) phase = e;
    }
    if (step) step->end = now;
    if (phase) phase->end = now;
}

static void replay_close(Replay *p) {
    for (int r = 0; r < p->mesh->world; r++) free(p->actors[r].times);
    free(p->actors), free(p->colour), free(p->groups), free(p->list);
}

#endif
