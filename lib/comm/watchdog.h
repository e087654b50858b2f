/* watchdog.h: the heartbeat table, which says what each rank is doing, and the sentence about a rank.
 *
 * A rank that waits cannot know for whom, and a rank that was stopped or killed says nothing. So each host has a
 * heartbeat table in shared memory, where each of its ranks writes what it is doing and which collectives it has
 * started. A rank whose wait has timed out (culprit.h), a rank that starts another collective than its neighbors, or
 * the monitor (monitor.h) reads the table and names the culprit in one sentence. The last collectives of each rank are
 * then written to OUT/flight. Ranks that are threads have a table in their process's memory and no monitor.
 */
#ifndef WATCHDOG_H
#define WATCHDOG_H
#include "../device/device.h" // defines: Activity, op_names
#include "mesh.h"             // defines: Axis, axis_names, mesh_group, Collective, collective_names, rank_name
#include <signal.h>

// ---------------------------------------------------------------------------
// the heartbeat table

typedef enum { RANK_STARTING, RANK_COMPUTING, RANK_WAITING, RANK_READING, RANK_ENDING, RANK_ENDED } RankState;

/* A wait in a step may last --timeout. Where one rank works long while others wait for it, the limit is a multiple.
 * Until the processes are connected, it is start_timeout. */
typedef enum { PHASE_CONNECT, PHASE_START, PHASE_STEP, PHASE_VALIDATION, PHASE_SAVING, PHASE_END, PHASES } Phase;
static const struct {
    const char *name;
    int limit; // in multiples of --timeout
} phases[PHASES] = {{"connecting", 0}, {"start-up", 4}, {"a step", 1},
                    {"validation", 4}, {"saving", 4},   {"the end of the run", 4}};

enum { FLIGHTS = 64 };          // collectives that are remembered on each line
enum { MAX_LOCAL_RANKS = 256 }; // ranks on one host
enum { CHANNELS = 8 };          // channels of one rank
enum { ASKING_HOSTS = 3 };      // the first hosts, which ask all others when a wait has timed out

/* A line is an ordered sequence of collectives or messages, numbered from 1: the collectives of a group have the line
 * of its axis, and the messages of a channel the line AXES + number of the channel. */
enum { LINES = (int)AXES + (int)CHANNELS };

typedef struct {
    int axis;
    int receives; // 1: this rank receives; 0: it sends
    int peer;     // the rank in the world at the other end
} ChannelEnd;

/* The lines of a rank, for comparison with those of other ranks. */
typedef struct {
    int rank;         // its number in the world
    int colour[AXES]; // of its groups, from 1; 0: not opened yet
    int num_channels; // written after the channel that it counts
    ChannelEnd channels[CHANNELS];
    uint64_t order[LINES]; // hash of everything that was started on a line; equal on all ranks that share the line
} RankLines;

/* The flight recorder's entry for one collective or message. */
typedef struct {
    int64_t number;  // on its line, from 1; 0: empty. Written last
    uint64_t order;  // hash of everything on the line up to this entry
    int64_t bytes;   // of one member's part, or of the message
    double started;  // seconds
    double finished; // 0: in flight
    int collective;
    char what[40];
    char pad[44]; // two cache lines
} FlightRecord;

/* What one rank tells the others on its host. */
typedef struct Heartbeat {
    int process;        // its process id; 0: not in the table yet. Written last
    uint64_t born;      // start time of the process, because process ids are reused
    uint64_t pid_space; // its namespace of process ids
    int state, phase;   // RankState, Phase
    double since;       // seconds: since when it is in this state
    Activity activity;  // the op
    int told_to_end;    // the signal by which its launcher ended it
    int wait_line;      // RANK_WAITING: for this collective
    int64_t wait_number;
    RankLines lines;
    char peer_names[CHANNELS][88]; // "rank 3 on host n2"; the monitor has no table of hosts
    int64_t started[LINES];        // collectives started on each line
    FlightRecord flights[LINES][FLIGHTS];
} Heartbeat;

/* One for each host; its ranks' heartbeats follow it in memory. */
typedef struct HeartbeatTable {
    int attached; // ranks in the table
    int expected; // ranks on this host, as the launcher says; 0: it does not say
    int world;
    int threads;                // the ranks are threads of one process
    int said;                   // exit code with which a rank or the monitor has reported a failure
    char unanswered[256];       // TCP connections that nobody has answered while ranks connect; see culprit.h
    int network_noted;          // the monitor has printed what this host's network looks like
    int flights_written;        // somebody writes OUT/flight
    int asker;                  // the rank of this host that asks the other hosts what they know, + 1; 0: none
    int times_asked;            // how often a rank of this host has asked the other hosts
    int answered[ASKING_HOSTS]; // the number of the last question of each of the first hosts that was answered
    Mesh mesh;                  // world 0: no rank has opened it yet
    double timeout;             // seconds
    double start_timeout;
    char host[64];  // this host's name
    char name[64];  // of the shared memory file
    char out[4096]; // --out; "": none
} HeartbeatTable;

/* The table that this process writes to when it ends, and its own record there. */
static struct {
    HeartbeatTable *table;
    Heartbeat *record;
    pid_t monitor; // which this process has started; 0: another one did
} own_heartbeat;

/* Ends the process by the signal, so that its parent sees which one it was. */
static inline void end_by_signal(int number) {
    if (own_heartbeat.record) own_heartbeat.record->told_to_end = number; // for the monitor this is no failure
    signal(number, SIG_DFL);
    raise(number);
}

static inline Heartbeat *heartbeat_at(HeartbeatTable *t, int i) { return (Heartbeat *)(t + 1) + i; }
static inline size_t heartbeats_bytes(int ranks) { return sizeof(HeartbeatTable) + sizeof(Heartbeat) * (size_t)ranks; }
static inline double phase_limit(const HeartbeatTable *t, int phase) {
    return phase == PHASE_CONNECT ? t->start_timeout : t->timeout * phases[phase].limit;
}

static inline void rank_state(Heartbeat *me, RankState state, double now) {
    if (!me) return; // a dry run
    me->state = state;
    me->since = now;
}

/* The rank waits since then for collective `number` on a line. */
static inline void rank_waits(Heartbeat *me, int line, int64_t number, double since) {
    me->wait_line = line;
    me->wait_number = number;
    rank_state(me, RANK_WAITING, since);
}

/* Writes down to which groups a rank belongs, and forgets what an earlier mesh left in its lines. */
static inline void heartbeat_groups(Heartbeat *k, const Mesh *mesh, int rank) {
    RankLines lines = ZERO;
    lines.rank = rank;
    for (int a = 0; a < AXES; a++) {
        int colour, key;
        mesh_group(mesh, rank, (Axis)a, &colour, &key);
        lines.colour[a] = colour + 1;
    }
    k->lines = lines;
}

/* A rank's record of collective `number` on a line; NULL: not started, or overwritten since. */
static inline FlightRecord *flight_of(Heartbeat *k, int line, int64_t number) {
    FlightRecord *e = &k->flights[line][number % FLIGHTS];
    return number && __atomic_load_n(&e->number, __ATOMIC_SEQ_CST) == number ? e : NULL;
}

static inline int is_channel(int line) { return line >= AXES; }

/* Must the other rank start what `me` starts on this line? */
static inline int shares_line(const RankLines *other, const RankLines *me, int line) {
    if (is_channel(line)) return other->rank == me->channels[line - AXES].peer;
    return other->colour[line] == me->colour[line];
}

/* The line of the other rank that corresponds to `line` of `me`: of a group the same, of a channel the other end. -1:
 * none, or not opened yet. */
static inline int line_of_other(const RankLines *other, const RankLines *me, int line) {
    if (!shares_line(other, me, line)) return -1;
    if (!is_channel(line)) return line;
    const ChannelEnd *mine = &me->channels[line - AXES];
    for (int i = 0; i < __atomic_load_n(&other->num_channels, __ATOMIC_SEQ_CST); i++) {
        const ChannelEnd *end = &other->channels[i];
        if (end->axis == mine->axis && end->peer == me->rank && end->receives != mine->receives) return AXES + i;
    }
    return -1;
}

/* The first line of `me` on which the other rank has not started the same collectives, or messages, in the same order;
 * -1: none. Nothing may be in flight between the two. A channel that only the other rank has opened is not a line of
 * `me`: call this a second time with the two exchanged. */
static inline int line_that_differs(const RankLines *other, const RankLines *me) {
    for (int line = 0; line < AXES + me->num_channels; line++) {
        int its = line_of_other(other, me, line);
        if (shares_line(other, me, line) && (its < 0 || other->order[its] != me->order[line])) return line;
    }
    return -1;
}

// ---------------------------------------------------------------------------
// what a rank is doing, in words

typedef struct {
    char *at;
    size_t size, used;
} Sentence;

__attribute__((format(printf, 2, 3))) static inline void say(Sentence *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->at + t->used, t->size - t->used, format, args);
    va_end(args);
    t->used = (size_t)min_i64((int64_t)t->used + n, (int64_t)t->size - 1);
}

/* Reads a process's state letter and start time from /proc. Returns 0 if there is no such process. */
static inline int process_stat(int process, uint64_t *born) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    line[n > 0 ? n : 0] = 0;
    const char *at = strrchr(line, ')'); // the name before it may contain anything
    char state = 0;
    if (!at || sscanf(at, ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
                      &state, born) != 2)
        return 0;
    return state;
}

static inline uint64_t process_space(void) {
    struct stat info;
    return stat("/proc/self/ns/pid", &info) ? 0 : (uint64_t)info.st_ino;
}

/* Adds a rank of this process to the table. */
static inline void heartbeat_init(Heartbeat *k, int rank) {
    int process = (int)getpid();
    k->lines.rank = rank;
    k->since = seconds_now();
    k->pid_space = process_space();
    process_stat(process, &k->born);
    __atomic_store_n(&k->process, process, __ATOMIC_RELEASE);
}

typedef enum { PROCESS_DIED, PROCESS_STOPPED, PROCESS_RUNS } ProcessState;

static inline ProcessState process_state(const Heartbeat *k) {
    uint64_t born = 0;
    if (k->pid_space != process_space()) return PROCESS_RUNS; // another namespace, where we cannot look
    int state = process_stat(k->process, &born);
    if (!state && access("/proc/self/stat", R_OK)) // without /proc it can only be seen whether a process exists
        return kill(k->process, 0) && errno == ESRCH ? PROCESS_DIED : PROCESS_RUNS;
    if (!state || born != k->born || state == 'Z' || state == 'X') return PROCESS_DIED;
    return state == 'T' || state == 't' ? PROCESS_STOPPED : PROCESS_RUNS;
}

/* "pp", "pp from rank 3" */
static inline void say_line(Sentence *t, const Heartbeat *k, int line) {
    if (!is_channel(line)) {
        say(t, "%s", axis_names[line]);
        return;
    }
    const ChannelEnd *c = &k->lines.channels[line - AXES];
    say(t, "%s %s %s", axis_names[c->axis], c->receives ? "from" : "to", k->peer_names[line - AXES]);
}

/* "all_gather #12 of 'embedding' on fsdp", "receive #3 of 'activations of micro-batch 2' on pp from rank 3" */
static inline void say_collective(Sentence *t, Heartbeat *k, int line, int64_t number) {
    const FlightRecord *e = flight_of(k, line, number);
    if (e) say(t, "%s #%" PRId64 " of '%s' on ", collective_names[e->collective], number, e->what);
    else say(t, "%s #%" PRId64 " on ", is_channel(line) ? "message" : "collective", number);
    say_line(t, k, line);
}

/* When a rank last changed its state or began or ended an op. */
static inline double last_sign(const Heartbeat *k) { return fmax(k->since, k->activity.since); }

/* "running adamw", "waiting for all_gather #12 of 'embedding' on fsdp" */
static inline void say_doing(Sentence *t, Heartbeat *k) {
    const Activity *a = &k->activity;
    switch (k->state) {
    case RANK_STARTING:
        say(t, k->phase == PHASE_CONNECT ? "connecting to the other ranks"
                                         : "starting (reading the data's headers, opening groups)");
        break;
    case RANK_READING: say(t, "reading data"); break;
    case RANK_ENDING: say(t, "ending"); break;
    case RANK_ENDED: say(t, "done"); break;
    case RANK_WAITING:
        say(t, "waiting for ");
        say_collective(t, k, k->wait_line, k->wait_number);
        break;
    default:
        if (k->phase == PHASE_SAVING) say(t, "writing");
        else if (k->phase == PHASE_START) say(t, "reading or initializing weights");
        else if (a->op >= OP_COUNT) say(t, "computing");
        else if (a->running) say(t, "running %s", op_names[a->op]);
        else say(t, "computing between ops, after %s", op_names[a->op]);
    }
}

/* "rank 2 on host b7 (process 77) is stopped. It was running adamw", "rank 2 has been running adamw for 61.2 s" */
static inline void say_rank(Sentence *t, const HeartbeatTable *table, Heartbeat *k, ProcessState process, double now) {
    say(t, "rank %d", k->lines.rank);
    if (!table->threads) say(t, " on host %s (process %d)", table->host, k->process);
    if (k->state == RANK_ENDED) {
        say(t, " has ended");
        return;
    }
    if (process == PROCESS_RUNS) {
        say(t, " has been ");
        say_doing(t, k);
        say(t, " for %.1f s", now - last_sign(k));
        return;
    }
    if (process == PROCESS_STOPPED) say(t, " is stopped");
    else say(t, " died: it crashed or was killed, possibly for lack of memory");
    say(t, ". It was ");
    say_doing(t, k);
}

/* "; its last collective was reduce_scatter #65 of 'embedding' on fsdp" */
static inline void say_last_collective(Sentence *t, Heartbeat *k, int line) {
    const char *kind = is_channel(line) ? "message" : "collective";
    if (flight_of(k, line, k->started[line])) {
        say(t, "; its last %s was ", kind);
        say_collective(t, k, line, k->started[line]);
    } else {
        say(t, "; it has started no %s on ", kind);
        say_line(t, k, line);
    }
}

// ---------------------------------------------------------------------------
// the flight files

/* Writes a line's last collectives as a table. */
static inline void write_flight_line(FILE *f, Heartbeat *k, int line, double now) {
    char name[512];
    Sentence t = {name, sizeof name, 0};
    if (!k->started[line]) return;
    say_line(&t, k, line);
    fprintf(f, "\n%s: %" PRId64 " %ss started; the last ones\n", name, k->started[line],
            is_channel(line) ? "message" : "collective");
    fprintf(f, "%10s  %-14s  %-32s %12s  %14s  %12s\n", "number", "collective", "of", "bytes", "started, s ago",
            "took, s");
    for (int64_t x = max_i64(1, k->started[line] - FLIGHTS + 1); x <= k->started[line]; x++) {
        const FlightRecord *e = flight_of(k, line, x);
        if (!e) continue;
        fprintf(f, "%10" PRId64 "  %-14s  %-32s %12" PRId64 "  %14.6f  ", x, collective_names[e->collective], e->what,
                e->bytes, now - e->started);
        if (e->finished > 0) fprintf(f, "%12.6f\n", e->finished - e->started);
        else fprintf(f, "%12s\n", "in flight");
    }
}

/* Writes OUT/flight/rank-N.txt for each rank of this host. */
static inline void heartbeats_write_flights(HeartbeatTable *table) {
    char path[4096 + 64], doing[512];
    if (!table->out[0] || __atomic_exchange_n(&table->flights_written, 1, __ATOMIC_SEQ_CST)) return;
    snprintf(path, sizeof path, "%s/flight", table->out);
    mkdir(path, 0777);
    for (int i = 0; i < __atomic_load_n(&table->attached, __ATOMIC_ACQUIRE); i++) {
        Heartbeat *k = heartbeat_at(table, i);
        Sentence t = {doing, sizeof doing, 0};
        double now = seconds_now();
        snprintf(path, sizeof path, "%s/flight/rank-%d.txt", table->out, k->lines.rank);
        FILE *f = fopen(path, "w");
        if (!f) continue; // the failure's own message matters more
        say_rank(&t, table, k, process_state(k), now);
        fprintf(f, "%s\none of %d ranks, on host %s, in %s\n", doing, table->world, table->host, phases[k->phase].name);
        for (int line = 0; line < LINES; line++) write_flight_line(f, k, line, now);
        fclose(f);
    }
}

static inline void heartbeats_last_words(int code) {
    if (code == 2 && own_heartbeat.table) heartbeats_write_flights(own_heartbeat.table);
}

// ---------------------------------------------------------------------------
// the order of collectives: all ranks of a group must start the same ones, and both ends of a channel the same messages

/* The other rank's record of what is number `number` on `line` of `me`; NULL: none. */
static inline const FlightRecord *flight_of_other(Heartbeat *other, const Heartbeat *me, int line, int64_t number) {
    int its = line_of_other(&other->lines, &me->lines, line);
    return its >= 0 ? flight_of(other, its, number) : NULL;
}

/* A rank of this host that has started something else than `me` as number `number` of a line, or before it; NULL: none
 * that is known. */
static inline Heartbeat *rank_that_differs(HeartbeatTable *table, Heartbeat *me, int line, int64_t number) {
    const FlightRecord *mine = flight_of(me, line, number);
    for (int i = 0; i < table->attached; i++) {
        const FlightRecord *other = flight_of_other(heartbeat_at(table, i), me, line, number);
        if (mine && other && other->order != mine->order) return heartbeat_at(table, i);
    }
    return NULL;
}

/* Waits up to 0.2 s for the other members to start the collective too: more of them show who differs. */
static inline void await_other_members(HeartbeatTable *table, const Heartbeat *me, int axis, int64_t number) {
    int missing = 1;
    for (int tries = 0; tries < 20 && missing; tries++) {
        usleep(10000);
        missing = 0;
        for (int i = 0; i < table->attached; i++) {
            const Heartbeat *k = heartbeat_at(table, i);
            missing += shares_line(&k->lines, &me->lines, axis) && k->started[axis] < number;
        }
    }
}

/* Says which ranks started what rank i started: "ranks 0, 2, 3 started all_gather of 'first' (4 bytes)". Returns how
 * many they are, or 0 if a rank before i is one of them and it has been said. */
static inline int say_who_started(Sentence *t, HeartbeatTable *table, int i, Heartbeat *me, int axis, int64_t number) {
    char ranks[2048];
    Sentence list = {ranks, sizeof ranks, 0};
    const FlightRecord *e = flight_of_other(heartbeat_at(table, i), me, axis, number);
    int count = 0;
    for (int p = 0; e && p < table->attached; p++) {
        const FlightRecord *other = flight_of_other(heartbeat_at(table, p), me, axis, number);
        if (!other || other->order != e->order) continue;
        if (p < i) return 0;
        say(&list, count++ ? ", %d" : " %d", heartbeat_at(table, p)->lines.rank);
    }
    if (!count) return 0;
    say(t, "%srank%s%s started %s of '%s' (%" PRId64 " bytes)", t->used ? "; " : "", count > 1 ? "s" : "", ranks,
        collective_names[e->collective], e->what, e->bytes);
    return count;
}

/* Another rank has started something else than `me` as number `number` of a line, or before it: ends the run, and names
 * the first difference: of a channel, what is sent and what is expected; of a group, what each rank started, and which
 * rank differs from all others. */
__attribute__((noreturn)) static inline void order_failed(HeartbeatTable *table, Heartbeat *me, int line,
                                                          int64_t number) {
    char text[2048];
    Sentence t = {text, sizeof text, 0};
    int odd = -1, num_odd = 0, most = 0;
    if (!is_channel(line)) await_other_members(table, me, line, number);
    while (rank_that_differs(table, me, line, number - 1)) number--;
    if (is_channel(line)) {
        const ChannelEnd *end = &me->lines.channels[line - AXES];
        Heartbeat *peer = rank_that_differs(table, me, line, number);
        const FlightRecord *mine = flight_of(me, line, number), *theirs = flight_of_other(peer, me, line, number);
        const FlightRecord *sent = end->receives ? theirs : mine, *expected = end->receives ? mine : theirs;
        int own = me->lines.rank;
        run_failure("message #%" PRId64 " from %s to %s on %s: '%s' (%" PRId64 " bytes) is sent, but '%s' "
                    "(%" PRId64 " bytes) is expected. Both ranks must send and receive the same messages in the same "
                    "order",
                    number, rank_name(end->receives ? end->peer : own), rank_name(end->receives ? own : end->peer),
                    axis_names[end->axis], sent->what, sent->bytes, expected->what, expected->bytes);
    }
    for (int i = 0; i < table->attached; i++) {
        int count = say_who_started(&t, table, i, me, line, number);
        if (count > most) most = count;
        if (count != 1) continue;
        odd = heartbeat_at(table, i)->lines.rank;
        num_odd++;
    }
    if (most > 1 && num_odd == 1) say(&t, "; only rank %d differs", odd);
    run_failure("collective #%" PRId64 " on %s: %s. All ranks of a group must start the same collectives in the same "
                "order",
                number, axis_names[line], text);
}

/* Adds what `me` starts next on a line to its flight records, and compares it with what the other ranks of this host
 * have started. The last to start finds a difference, before any byte has moved. */
static inline FlightRecord *flight_start(HeartbeatTable *table, Heartbeat *me, int line, Collective collective,
                                         const char *what, int64_t bytes, Dtype dtype) {
    int64_t number = me->started[line] + 1;
    int kind = is_channel(line) ? COLLECTIVES : collective; // one end of a channel sends, the other one receives
    FlightRecord *e = &me->flights[line][number % FLIGHTS];
    uint64_t *order = &me->lines.order[line], size_and_kind = (uint64_t)bytes << 8 | (uint64_t)((int)dtype << 4 | kind);
    char name[sizeof e->what] = ZERO;
    memcpy(name, what, strnlen(what, sizeof name - 1));
    memcpy(e->what, name, sizeof name);
    *order = hash_bytes(hash_bytes(*order, &size_and_kind, sizeof size_and_kind), name, sizeof name);
    e->order = *order;
    e->bytes = bytes;
    e->collective = collective;
    e->started = seconds_now();
    e->finished = 0;
    __atomic_store_n(&e->number, number, __ATOMIC_SEQ_CST); // if two ranks start at once, at least one sees the other
    __atomic_store_n(&me->started[line], number, __ATOMIC_RELAXED);
    if (rank_that_differs(table, me, line, number)) order_failed(table, me, line, number);
    return e;
}

// ---------------------------------------------------------------------------
// the table of ranks that are threads

static inline HeartbeatTable *heartbeats_open_threads(int ranks, double timeout) {
    size_t bytes = heartbeats_bytes(ranks);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) run_failure("out of memory: could not reserve %zu bytes for the heartbeat table", bytes);
    HeartbeatTable *table = (HeartbeatTable *)p;
    table->attached = ranks;
    table->world = ranks;
    table->threads = 1;
    table->timeout = timeout;
    gethostname(table->host, sizeof table->host - 1);
    for (int i = 0; i < ranks; i++) {
        heartbeat_init(heartbeat_at(table, i), i);
        heartbeat_at(table, i)->phase = PHASE_START;
    }
    return table;
}

#endif
