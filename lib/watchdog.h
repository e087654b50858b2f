/* watchdog.h: who is missing. A board on each host that its ranks write on, and a monitor that reads it.
 *
 * A rank that waits cannot know for whom, and one that is stopped or killed says nothing. So every rank writes on its
 * host's board what it does now and which exchanges it has started: plain stores into shared memory. Whoever finds
 * something wrong names the culprit in one sentence and leaves the last exchanges of this host's ranks under
 * OUT/flight: a rank at its deadline; a rank that starts another exchange than the one beside it, or awaits another
 * message than it is sent; or the monitor, a process forked before MPI starts, which sees who cannot speak: killed,
 * stopped, stuck in MPI_Init or on a disk.
 * Ranks as threads have a board in their process's memory and no monitor. comm.h includes this and names the axes.
 */
#ifndef WATCHDOG_H
#define WATCHDOG_H
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/mman.h>

typedef enum { RANK_STARTING, RANK_COMPUTING, RANK_WAITING, RANK_READING, RANK_ENDING, RANK_ENDED } RankState;

/* A wait in a step may last --timeout; what takes long on one rank, while the others wait for it, has a longer limit.
 */
typedef enum { PHASE_START, PHASE_STEP, PHASE_VALIDATION, PHASE_SAVING, PHASE_END, PHASES } Phase;
static const struct {
    const char *name;
    int limit;
} phases[PHASES] = { // in times of --timeout
    {"start-up", 4},
    {"a step", 1},
    {"validation", 4},
    {"saving", 4},
    {"the end of the run", 4}};

enum { FLIGHTS = 64, BOARD_RANKS = 256 }; // exchanges remembered a line; ranks of a host, at most

/* A line is what exchanges are numbered along: of a group its collectives, named by their axis; of messages a channel,
 * from one rank to another over an axis, of which sender and receiver each have an end. */
enum { CHANNELS = 8, LINES = AXES + CHANNELS }; // CHANNELS: ends that a rank has at most

typedef struct {
    int axis, receives, peer;
} ChannelEnd; // receives: 0: it sends; peer: the rank, in the world, at the other end

typedef struct {
    int64_t number;           // the how manieth exchange of its line, from 1; 0: none. Written last
    uint64_t order;           // hash of all of the line up to this one
    int64_t bytes;            // of one member's part, or of the message
    double started, finished; // seconds; finished 0: in flight
    int collective;
    char unit[40];
    char pad[44]; // two cache lines
} Flight;

typedef struct BoardRank {
    int process;          // its number; written last: then the rank is on the board
    int rank;             // in the world
    uint64_t born, space; // start time and namespace of the process: numbers are used again
    int state, phase;
    double since; // seconds: when the state began
    Activity now; // the op
    int told;     // its launcher told it to end
    int wait_line;
    int64_t wait_number;           // RANK_WAITING: for which exchange
    int colour[AXES];              // of its groups, from 1; 0: not opened
    int num_channels;              // written after the end it counts
    ChannelEnd channels[CHANNELS]; // lines from AXES on
    int64_t started[LINES];        // exchanges started on each
    Flight flights[LINES][FLIGHTS];
} BoardRank;

typedef struct Board {
    int attached, capacity; // ranks that are on it, that fit
    int expected;           // ranks of this host, as the launcher tells; 0: it does not
    int world;
    int threads;             // the ranks are threads of one process
    int said;                // exit code: a rank of this host has told why the run ends
    int flown;               // somebody writes the flight files
    double timeout;          // seconds
    char host[64], name[64]; // of this host, of the segment
    char out[4096];          // --out; "": none
} Board;

/* Where this process writes what it does, and what it shares with the other processes of its host. */
static struct {
    Board *table;
    BoardRank *record;
} process_watch;

static inline BoardRank *board_rank(Board *b, int i) { return (BoardRank *)(b + 1) + i; }
static inline size_t board_bytes(int ranks) { return sizeof(Board) + sizeof(BoardRank) * (size_t)ranks; }
static inline double phase_limit(const Board *b, int phase) { return b->timeout * phases[phase].limit; }

static inline void rank_state(BoardRank *me, RankState state, double now) {
    if (!me) return; // a dry run
    me->state = state;
    me->since = now;
}

/* Where rank `k` remembers exchange `number` of a line; NULL: not started, or too long ago. */
static inline Flight *flight_of(BoardRank *k, int line, int64_t number) {
    Flight *e = &k->flights[line][number % FLIGHTS];
    return number && __atomic_load_n(&e->number, __ATOMIC_SEQ_CST) == number ? e : NULL;
}

/* The line of `k` that meets line `line` of `me`: of its group the same, of a channel the other end. -1: none, or not
 * yet. */
static int line_beside(const BoardRank *k, const BoardRank *me, int line) {
    if (line < AXES) return k->colour[line] == me->colour[line] ? line : -1;
    const ChannelEnd *mine = &me->channels[line - AXES];
    for (int i = 0; k->rank == mine->peer && i < __atomic_load_n(&k->num_channels, __ATOMIC_SEQ_CST); i++)
        if (k->channels[i].axis == mine->axis && k->channels[i].peer == me->rank &&
            k->channels[i].receives != mine->receives)
            return AXES + i;
    return -1;
}

// ---------------------------------------------------------------------------
// what a rank does, in words

typedef struct {
    char *at;
    size_t size, used;
} Sentence;

__attribute__((format(printf, 2, 3))) static void say(Sentence *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->at + t->used, t->size - t->used, format, args);
    va_end(args);
    t->used = (size_t)min_i64((int64_t)t->used + n, (int64_t)t->size - 1);
}

/* The state letter of a process and when it started, from /proc; 0: there is none. */
static int process_stat(int process, uint64_t *born) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char state = 0;
    ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0) close(fd);
    line[n > 0 ? n : 0] = 0;
    char *at = strrchr(line, ')'); // the name before it may hold anything
    if (!at || sscanf(at, ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
                      &state, born) != 2)
        return 0;
    return state;
}

static uint64_t process_space(void) {
    struct stat info;
    return stat("/proc/self/ns/pid", &info) ? 0 : (uint64_t)info.st_ino;
}

typedef enum { PROCESS_GONE, PROCESS_STOPPED, PROCESS_RUNS } ProcessState;

static ProcessState process_state(const BoardRank *k) {
    uint64_t born = 0;
    if (k->space != process_space()) return PROCESS_RUNS; // of another namespace: nothing is known of it
    int state = process_stat(k->process, &born);
    if (!state || born != k->born || state == 'Z' || state == 'X') return PROCESS_GONE;
    return state == 'T' || state == 't' ? PROCESS_STOPPED : PROCESS_RUNS;
}

static int is_channel(int line) { return line >= AXES; }

/* "pp", "pp from rank 3" */
static void say_line(Sentence *t, const BoardRank *k, int line) {
    if (line < AXES) {
        say(t, "%s", axis_names[line]);
        return;
    }
    const ChannelEnd *c = &k->channels[line - AXES];
    say(t, "%s %s rank %d", axis_names[c->axis], c->receives ? "from" : "to", c->peer);
}

/* "all_gather of 'embedding' over fsdp", "receive of 'activations of micro-batch 2' over pp from rank 3" */
static void say_exchange(Sentence *t, BoardRank *k, int line, int64_t number) {
    const Flight *e = flight_of(k, line, number);
    if (e) say(t, "%s of '%s' over ", collective_names[e->collective], e->unit);
    else say(t, "exchange %" PRId64 " over ", number);
    say_line(t, k, line);
}

static double last_sign(const BoardRank *k) { return fmax(k->since, k->now.since); }

static void say_doing(Sentence *t, BoardRank *k) {
    static const char *const names[] = {"starting", "computing", "waiting", "reading data", "ending", "done"};
    const char *instead = k->phase == PHASE_SAVING  ? "writing"
                          : k->phase == PHASE_START ? "reading or drawing weights"
                                                    : NULL;
    say(t, "%s", k->state == RANK_COMPUTING && instead ? instead : names[k->state]);
    if (k->state == RANK_STARTING) say(t, " (finding the other ranks, reading the data's heads, opening groups)");
    if (k->state == RANK_WAITING) say(t, " for "), say_exchange(t, k, k->wait_line, k->wait_number);
    if (k->state == RANK_COMPUTING && !instead && k->now.op < OP_COUNT)
        say(t, k->now.running ? " (%s)" : " (between ops, after %s)", op_names[k->now.op]);
}

/* "rank 2 (process 77) is stopped; it was computing (adamw)", "… has been computing for 61.2 s (attention_backward)" */
static void say_rank(Sentence *t, Board *b, BoardRank *k, ProcessState process, double now) {
    say(t, "rank %d", k->rank);
    if (!b->threads) say(t, " (process %d)", k->process);
    if (k->state == RANK_ENDED) say(t, " has ended");
    else if (process == PROCESS_RUNS) say(t, " has been "), say_doing(t, k), say(t, " for %.1f s", now - last_sign(k));
    else {
        say(t, process == PROCESS_STOPPED ? " is stopped" : " is gone: killed, perhaps for want of memory, or crashed");
        say(t, "; it was "), say_doing(t, k);
    }
}

static void say_last_exchange(Sentence *t, BoardRank *k, int line) {
    int64_t last = k->started[line];
    const Flight *e = flight_of(k, line, last);
    say(t, e ? "; its last exchange over " : "; it has started no exchange over ");
    say_line(t, k, line);
    if (e) say(t, " was %" PRId64 ": %s of '%s'", last, collective_names[e->collective], e->unit);
}

/* Who of this host keeps `me` from finishing an exchange. Suspected in this order: who is gone or stopped; who does not
 * wait, though it has not started this exchange or has not stirred for half the limit; who waits elsewhere and has not
 * started it, and may in turn wait for another host. Returns whether the blame is certain. */
static int say_culprits(Sentence *t, Board *b, BoardRank *me, int line, int64_t number, double limit) {
    int named = 0, certain = 0, n = __atomic_load_n(&b->attached, __ATOMIC_ACQUIRE);
    double now = seconds_now();
    for (int suspicion = 0; suspicion < 3 && !named; suspicion++)
        for (int i = 0; i < n; i++) {
            BoardRank *k = board_rank(b, i);
            if (k == me || !k->process) continue;
            ProcessState process = process_state(k);
            int its = line_beside(k, me, line),
                taken_part = its >= 0 && __atomic_load_n(&k->started[its], __ATOMIC_RELAXED) >= number;
            int behind = !taken_part && (its >= 0 || (is_channel(line) && k->rank == me->channels[line - AXES].peer));
            int busy = k->state != RANK_WAITING && (behind || now - last_sign(k) > limit / 2);
            if ((process != PROCESS_RUNS ? 0 : busy ? 1 : behind ? 2 : 3) != suspicion || named++ >= 4) continue;
            certain = suspicion < 2;
            say(t, "%s", named > 1 ? ", " : "");
            say_rank(t, b, k, process, now);
            if (behind && its >= 0) say_last_exchange(t, k, its);
            else if (behind)
                say(t, "; it has %s rank %d nothing", me->channels[line - AXES].receives ? "sent" : "received from",
                    me->rank);
        }
    if (named > 4) say(t, ", and %d more", named - 4);
    if (!named)
        say(t,
            n == b->world ? "all %d ranks are waiting" : "all %d ranks of host %s are waiting: look at the other hosts",
            n, b->host);
    return certain;
}

/* One file a rank of this host. */
static void board_write_flights(Board *b) {
    char path[4096 + 64], doing[512];
    if (!b->out[0] || __atomic_exchange_n(&b->flown, 1, __ATOMIC_SEQ_CST)) return;
    snprintf(path, sizeof path, "%s/flight", b->out);
    mkdir(path, 0777);
    for (int i = 0; i < __atomic_load_n(&b->attached, __ATOMIC_ACQUIRE); i++) {
        BoardRank *k = board_rank(b, i);
        Sentence t = {doing, sizeof doing, 0};
        double now = seconds_now();
        snprintf(path, sizeof path, "%s/flight/rank-%d.txt", b->out, k->rank);
        FILE *f = fopen(path, "w");
        if (!f) continue; // the sentence matters more
        say_rank(&t, b, k, process_state(k), now);
        fprintf(f, "%s\nof %d ranks, on %s, in %s\n", doing, b->world, b->host, phases[k->phase].name);
        for (int a = 0; a < LINES; a++) {
            if (!k->started[a]) continue;
            t.used = 0, say_line(&t, k, a);
            fprintf(f, "\n%s: %" PRId64 " exchanges started; the last ones\n%10s  %-14s  %-32s %12s  %14s  %12s\n",
                    doing, k->started[a], "exchange", "collective", "unit", "bytes", "started, s ago", "took, s");
            for (int64_t x = max_i64(1, k->started[a] - FLIGHTS + 1); x <= k->started[a]; x++) {
                const Flight *e = flight_of(k, a, x);
                if (!e) continue;
                fprintf(f, "%10" PRId64 "  %-14s  %-32s %12" PRId64 "  %14.6f  ", x, collective_names[e->collective],
                        e->unit, e->bytes, now - e->started);
                if (e->finished > 0) fprintf(f, "%12.6f\n", e->finished - e->started);
                else fprintf(f, "%12s\n", "in flight");
            }
        }
        fclose(f);
    }
}

static void board_last_words(int code) {
    if (code == 2 && process_watch.table) board_write_flights(process_watch.table);
}

// ---------------------------------------------------------------------------
// exchanges on the board

/* Two ranks of this host that are beside `me` in its group, in a ring: if no rank differs from those beside it, none
 * differ. */
static void board_beside(Board *b, BoardRank *me, int axis, BoardRank *beside[2]) {
    int n = b->attached, at = (int)(me - board_rank(b, 0));
    for (int side = 0; side < 2; side++)
        for (int i = 1; i < n && !beside[side]; i++) {
            BoardRank *k = board_rank(b, (at + (side ? n - i : i)) % n);
            if (k->colour[axis] == me->colour[axis]) beside[side] = k;
        }
}

/* Have ranks of this group started different exchanges as their `number`-th? */
static int flights_part(Board *b, BoardRank *me, int axis, int64_t number) {
    const Flight *first = NULL;
    for (int i = 0; i < b->attached; i++) {
        BoardRank *k = board_rank(b, i);
        const Flight *e = k->colour[axis] == me->colour[axis] ? flight_of(k, axis, number) : NULL;
        if (e && first && e->order != first->order) return 1;
        if (e) first = e;
    }
    return 0;
}

/* Ranks of `me`'s group part at exchange `number`, or before: names the first one, what each started, and who is alone
 * with it. */
__attribute__((noreturn)) static void flights_differ(Board *b, BoardRank *me, int axis, int64_t number) {
    char text[2048];
    Sentence t = {text, sizeof text, 0};
    int kinds = 0, odd = -1, most = 0, second = 0, missing = 1;
    for (int tries = 0; tries < 20 && missing;
         tries++) { // the others may be on their way: more of them make clear who is odd
        usleep(10000);
        missing = 0;
        for (int i = 0; i < b->attached; i++)
            missing += board_rank(b, i)->colour[axis] == me->colour[axis] && board_rank(b, i)->started[axis] < number;
    }
    while (number > 1 && flights_part(b, me, axis, number - 1)) number--;
    for (int i = 0; i < b->attached; i++) {
        BoardRank *k = board_rank(b, i);
        const Flight *e = k->colour[axis] == me->colour[axis] ? flight_of(k, axis, number) : NULL;
        int seen = 0, count = 0;
        for (int pass = 0; e && !seen && pass < 2; pass++) // count those that did the same, then name them
            for (int p = 0; p < b->attached; p++) {
                BoardRank *other = board_rank(b, p);
                const Flight *o = other->colour[axis] == me->colour[axis] ? flight_of(other, axis, number) : NULL;
                if (!o || o->order != e->order) continue;
                seen |= p < i; // told already
                if (!seen && pass == 0) count++;
                if (!seen && pass == 1)
                    say(&t, "%s%d",
                        p > i   ? ", "
                        : kinds ? (count > 1 ? "; ranks " : "; rank ")
                                : (count > 1 ? "ranks " : "rank "),
                        other->rank);
            }
        if (!e || seen) continue;
        say(&t, " started %s of '%s' (%" PRId64 " bytes)", collective_names[e->collective], e->unit, e->bytes);
        kinds++;
        if (count > most) second = most, most = count;
        else if (count > second) second = count;
        if (count == 1) odd = odd == -1 ? k->rank : -2;
    }
    if (most > 1 && odd >= 0) say(&t, "; rank %d is the odd one", odd);
    run_failure("exchange %" PRId64 " of %s: %s. All ranks of a group must start the same exchanges in the same order",
                number, axis_names[axis], text);
}

/* Another end of a channel of `me`; who has the other one, if this host does. */
static void channel_beside(Board *b, BoardRank *me, int axis, int receives, int peer, BoardRank **beside) {
    ChannelEnd end = {axis, receives, peer};
    me->channels[me->num_channels] = end;
    __atomic_store_n(&me->num_channels, me->num_channels + 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < b->attached; i++)
        if (board_rank(b, i)->rank == peer) *beside = board_rank(b, i);
}

/* Notes that `me` starts its next exchange on a line. `order`: that of the line so far, and then with this exchange;
 * `kind` is what others must have started there too. */
static inline Flight *flight_note(BoardRank *me, int line, int kind, int collective, const char *what, size_t bytes,
                                  int dtype, uint64_t *order, double now) {
    int64_t number = me->started[line] + 1;
    Flight *e = &me->flights[line][number % FLIGHTS];
    uint64_t words[sizeof e->unit / 8] = ZERO, h = (*order ^ ((uint64_t)bytes << 8 | (uint64_t)(dtype << 4 | kind))) *
                                                   0x100000001B3ull;
    memcpy(words, what, strnlen(what, sizeof words - 1));
    for (size_t i = 0; i < sizeof words / 8; i++)
        h = ((h ^ h >> 29) ^ words[i]) * 0x9E3779B97F4A7C15ull; // each step can be undone: no single difference is lost
    memcpy(e->unit, words, sizeof words);
    e->order = *order = h;
    e->bytes = (int64_t)bytes;
    e->collective = collective;
    e->started = now;
    e->finished = 0;
    __atomic_store_n(&e->number, number, __ATOMIC_SEQ_CST); // of two that start at once, at least one sees the other
    __atomic_store_n(&me->started[line], number, __ATOMIC_RELAXED);
    return e;
}

/* … a collective, and holds it against those of the ranks beside it. */
static inline Flight *flight_start(Board *b, BoardRank *me, BoardRank *const beside[2], int axis, int collective,
                                   const char *what, size_t bytes, int dtype, uint64_t *order, double now) {
    Flight *e = flight_note(me, axis, collective, collective, what, bytes, dtype, order, now);
    uint64_t h = *order;
    for (int side = 0; side < 2 && beside[side]; side++) {
        const Flight *other = flight_of(beside[side], axis, e->number);
        if (other && other->order != h) flights_differ(b, me, axis, e->number);
    }
    return e;
}

/* … a send, or a receive, and holds it against what the rank at the other end has started; NULL: it is on another host.
 * Of the two that start a message the later one finds what differs, before any byte of it has moved. */
static inline Flight *message_start(BoardRank *me, BoardRank *peer, int line, int collective, const char *what,
                                    size_t bytes, int dtype, uint64_t *order, double now) {
    Flight *e = flight_note(me, line, COLLECTIVES, collective, what, bytes, dtype, order, now);
    int64_t number = e->number;
    int its = peer ? line_beside(peer, me, line) : -1;
    const Flight *other = its >= 0 ? flight_of(peer, its, number) : NULL;
    if (!other || other->order == e->order) return e;
    for (int parted = 1; parted && number > 1; number -= parted) { // the first that differs
        const Flight *a = flight_of(me, line, number - 1), *z = flight_of(peer, its, number - 1);
        parted = a && z && a->order != z->order;
    }
    const Flight *ours = flight_of(me, line, number), *theirs = flight_of(peer, its, number);
    const ChannelEnd *end = &me->channels[line - AXES];
    const Flight *sent = end->receives ? theirs : ours, *awaited = end->receives ? ours : theirs;
    run_failure("message %" PRId64 " from rank %d to rank %d over %s: '%s' (%" PRId64 " bytes) is sent, '%s' (%" PRId64
                " bytes) is awaited. Both must take the same messages in the same order",
                number, end->receives ? end->peer : me->rank, end->receives ? me->rank : end->peer,
                axis_names[end->axis], sent->unit, sent->bytes, awaited->unit, awaited->bytes);
}

// ---------------------------------------------------------------------------
// a board in this process's memory

static Board *board_open_threads(int ranks, double timeout) {
    void *p =
        mmap(NULL, board_bytes(ranks), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        run_failure("out of memory: %zu bytes to note what ranks do could not be had", board_bytes(ranks));
    Board *b = (Board *)p;
    b->attached = b->capacity = b->expected = b->world = ranks;
    b->threads = 1;
    b->timeout = timeout;
    gethostname(b->host, sizeof b->host - 1);
    for (int i = 0; i < ranks; i++) {
        BoardRank *k = board_rank(b, i);
        k->rank = i, k->process = (int)getpid(), k->space = process_space(), k->since = seconds_now();
        process_stat(k->process, &k->born);
    }
    return b;
}

// ---------------------------------------------------------------------------
// a board of processes, and the monitor

#ifdef HAVE_MPI
/* A sentence of the monitor's; false: a rank has spoken already. */
static int monitor_says(Board *b, const char *text) {
    char line[4096];
    int none = 0, n = snprintf(line, sizeof line, "failure: %s\n", text);
    if (!__atomic_compare_exchange_n(&b->said, &none, 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
    if (write(STDERR_FILENO, line, (size_t)min_i64(n, sizeof line - 1)) < 0)
        return 1; // nobody listens: end the ranks all the same
    return 1;
}

/* Sends every rank of this host that is still there a signal. */
static void monitor_signals(Board *b, int signal_number) {
    for (int i = 0; i < b->attached; i++) {
        BoardRank *k = board_rank(b, i);
        if (k->process && k->space == process_space() && process_state(k) != PROCESS_GONE)
            kill(k->process, signal_number);
    }
}

/* Looks at all ranks of this host; says who is lost, or late. Returns how many may still go on. */
static int monitor_look(Board *b) {
    char text[3072];
    Sentence t = {text, sizeof text, 0};
    double now = seconds_now();
    int n = __atomic_load_n(&b->attached, __ATOMIC_ACQUIRE), alive = 0, lost = 0, present = 0;
    BoardRank *late = NULL, *stopped = NULL;
    for (int i = 0; i < n; i++) {
        BoardRank *k = board_rank(b, i);
        if (!__atomic_load_n(&k->process, __ATOMIC_ACQUIRE)) {
            alive++;
            continue;
        } // about to write its record
        present++;
        ProcessState process = process_state(k);
        if (__atomic_load_n(&k->state, __ATOMIC_ACQUIRE) == RANK_ENDED) continue;
        alive += process != PROCESS_GONE;
        if (process == PROCESS_STOPPED) stopped = k;
        if (process == PROCESS_GONE && !k->told && lost++ < 4) {
            say(&t, "%s", lost > 1 ? ", " : "");
            say_rank(&t, b, k, process, now);
            if (k->started[AXIS_FSDP]) say_last_exchange(&t, k, AXIS_FSDP);
        }
        double grace =
            process == PROCESS_RUNS && k->state == RANK_WAITING ? 2.5 : 0.5; // who waits watches its own deadline
        if (process != PROCESS_GONE && now - last_sign(k) > phase_limit(b, k->phase) + grace && !late) late = k;
    }
    if (__atomic_load_n(&b->said, __ATOMIC_SEQ_CST) || (!lost && !late)) return alive;
    if (lost > 4) say(&t, ", and %d more", lost - 4);
    if (!lost) {
        double limit = phase_limit(b, late->phase);
        say(&t, "no sign of life for %.1f s in %s: ", now - last_sign(late), phases[late->phase].name);
        say_rank(&t, b, late, process_state(late), now);
        if (stopped && stopped != late) say(&t, "; "), say_rank(&t, b, stopped, PROCESS_STOPPED, now);
        else if (late->phase == PHASE_START && b->expected > present)
            say(&t, "; %d of this host's %d ranks never started this program", b->expected - present, b->expected);
        else if (late->state == RANK_WAITING && late != stopped)
            say(&t, "; "), say_culprits(&t, b, late, late->wait_line, late->wait_number, limit);
        say(&t, ". The limit here is %.6g s (%d x --timeout)", limit, phases[late->phase].limit);
    }
    if (monitor_says(b, text)) {
        board_write_flights(b);
        monitor_signals(b, SIGTERM); // they end with 2, and their launcher ends the others
        monitor_signals(b, SIGCONT);
    }
    return alive;
}

__attribute__((noreturn)) static void monitor(Board *b) {
    double said_at = 0;
    int null = open("/dev/null", O_RDWR);
    setsid(); // its launcher ends the ranks' process groups
    signal(SIGPIPE, SIG_IGN);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO); // launchers wait until nobody holds their pipes
    for (int fd = 3; fd < 256; fd++) close(fd);
    while (monitor_look(b)) {
        usleep(20000);
        if (!said_at && __atomic_load_n(&b->said, __ATOMIC_SEQ_CST)) said_at = seconds_now();
        if (said_at && seconds_now() - said_at > 2) monitor_signals(b, SIGKILL); // nobody is left behind
    }
    int ended = 1;
    for (int i = 0; i < b->attached; i++) ended &= board_rank(b, i)->state == RANK_ENDED;
    if (!ended && b->said != 1) board_write_flights(b); // ended from outside: another host may have failed
    unlink(b->name);                                    // where start-up did not get so far
    _exit(0);
}

/* A launcher tells its processes to end: so the monitor does not count them as lost. */
static void told_to_end(int signal_number) {
    process_watch.record->told = signal_number;
    if (process_watch.table->said) _exit(process_watch.table->said);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* Maps this host's board, made by whichever rank comes first. All ranks that one launcher started on this host find the
 * same name, and nobody else does. */
static void board_join(double timeout, int rank, int world) {
    static const char *const job[] = {"PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_ess_base_jobid",
                                      "SLURM_JOB_ID",   "SLURM_STEP_ID",    "PMI_JOBID"};
    static const char *const local_size[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
    char name[64];
    uint64_t h = HASH_START;
    int known = 0;
    for (int i = 0; i < 6; i++)
        if (getenv(job[i])) h = hash_bytes(h, getenv(job[i]), strlen(getenv(job[i])) + 1), known = 1;
    if (!known) h = (uint64_t)getppid(); // the launcher
    snprintf(name, sizeof name, "%s/llama3-%d-%016" PRIx64, access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
             (int)getuid(), mix64(h));
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int failed = fd < 0 || ftruncate(fd, (off_t)board_bytes(BOARD_RANKS))
                     ? errno
                     : posix_fallocate(fd, 0, sizeof(Board)); // pages that are there: no SIGBUS where memory is short
    void *p = failed ? MAP_FAILED : mmap(NULL, board_bytes(BOARD_RANKS), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        user_error("cannot share %s between the ranks of this host (%s): make room there", name,
                   strerror(failed ? failed : errno));
    Board *b = (Board *)p;
    int i = __atomic_fetch_add(&b->attached, 1, __ATOMIC_SEQ_CST);
    if (i >= BOARD_RANKS)
        __atomic_fetch_sub(&b->attached, 1, __ATOMIC_SEQ_CST),
            user_error("more than %d ranks were started on this host: start at most %d", BOARD_RANKS, BOARD_RANKS);
    failed = posix_fallocate(fd, (off_t)board_bytes(i), sizeof(BoardRank));
    if (failed)
        user_error("cannot share %s between the ranks of this host (%s): make room there", name, strerror(failed));
    close(fd);
    BoardRank *me = board_rank(b, i);
    me->rank = rank;
    me->state = RANK_STARTING, me->phase = PHASE_START, me->since = seconds_now();
    me->space = process_space();
    process_stat((int)getpid(), &me->born);
    process_watch.table = b, process_watch.record = me, process_end.said = &b->said;
    process_end.last_words = board_last_words;
    if (i == 0) {
        b->capacity = BOARD_RANKS;
        b->world = world;
        b->timeout = timeout;
        gethostname(b->host, sizeof b->host - 1);
        snprintf(b->name, sizeof b->name, "%s", name);
        for (int k = 0; k < 2; k++)
            if (getenv(local_size[k])) b->expected = atoi(getenv(local_size[k]));
    }
    __atomic_store_n(&me->process, (int)getpid(), __ATOMIC_RELEASE);
    if (i == 0) {
        pid_t pid = fork();
        if (pid < 0)
            run_failure("the process that watches over this host's ranks could not be started (%s)", strerror(errno));
        if (pid == 0) monitor(b);
    }
    signal(SIGTERM, told_to_end);
    signal(SIGINT, told_to_end);
    signal(SIGHUP, told_to_end);
}
#endif

#endif
