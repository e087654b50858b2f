/* comm.h: ranks and what they exchange: groups of the mesh, the collectives.
 *
 * Owns: every exchange between ranks (named, counted, with a deadline; watchdog.h says who is
 * to blame when it passes), and the transports: `threads` (ranks are threads of this process), `mpi` (ranks are
 * processes), and `nccl` for what lies in GPUs' memory, beside one of these two for what the host holds. A caller may
 * rely on: the members of a group start its collectives in one order, or the run ends; a finished request's buffers are
 * free again; no wait is longer than the timeout; on a dry-run device a collective is booked and nothing else happens.
 */
#ifndef COMM_H
#define COMM_H
#include "device.h"
#include "mesh.h" // defines: Axis, Mesh, mesh_open, mesh_coordinate, mesh_group_size
#include <sched.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h> // defines: MPI_Iallgather, MPI_Ialltoall, MPI_Test, …
#endif

// ---------------------------------------------------------------------------
// groups, requests, the ledger

// a reduce-scatter travels as an all-to-all; fsdp.h sums. A send and the receive it meets are a message of two members
typedef enum { ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE, COLLECTIVES } Collective;
static const char *const collective_names[COLLECTIVES] = {"all_gather", "reduce_scatter", "send", "receive"};
#include "watchdog.h" // defines: Board, BoardRank, flight_start, message_start, say_culprits, board_join

typedef struct {
    int64_t calls, bytes;
} Traffic;          // bytes that one rank receives from others; of sends, those that it sends
#include "comm_events.h" // defines: CommEvents, CommEvent, NameTable, comm_events_add

typedef struct {
    Axis axis;
    int size, rank;        // members, and which of them this rank is
    int64_t next_sequence; // collectives started so far
    uint64_t order;        // hash of all of them: the same on all members
    BoardRank *beside[2];  // members on this host that this rank's exchanges are held against; NULL: none
    struct ThreadGroup *threads;
#ifdef HAVE_MPI
    MPI_Comm mpi;
#endif
#ifdef HAVE_NCCL
    ncclComm_t nccl;  // NULL: nothing of GPUs travels over this axis
    void *registered; // its handle of the memory that is exchanged; NULL: as it comes
#endif
} Group;

/* One end of the messages between two members: they match in the order in which they are sent and awaited, whatever
 * travels the other way, to others, or as collectives. */
typedef struct Channel {
    int axis, receives;       // receives: 0: it sends
    int peer, peer_rank;      // the member at the other end, and its rank in the world
    int line;                 // on the board
    int64_t next_sequence;    // messages started so far
    uint64_t order;           // hash of all of them: the same at both ends
    BoardRank *beside;        // the other end's rank; NULL: on another host
    struct ThreadSlot *slots; // threads: (THREAD_SLOTS) NULL: not used yet
#ifdef HAVE_NCCL
    ncclComm_t nccl; // of the two alone: what goes this way waits for nothing else
#endif
} Channel;

typedef enum { LINK_TO_NEXT, LINK_FROM_PREVIOUS, LINK_TO_PREVIOUS, LINK_FROM_NEXT, LINKS } Link; // of a pipeline's ring

typedef struct Request {
    int active;
    Collective collective;
    Group *group;
    Channel *channel; // of a message; NULL: a collective
    const char *what; // the unit or value exchanged
    const char *send; // all_gather, send: (bytes); reduce_scatter: (size, bytes), part p goes to member p
    char *recv;       // (size, bytes), part p came from member p; receive: (bytes)
    size_t bytes;
    Dtype dtype;    // of the elements
    int event_slot; // its slot in the list of communication events + 1; 0: not recorded, or waited for
    double started; // seconds
    Span span;
    int row;          // its axis' other exchanges in flight have other rows
    int line;         // on the board: of its group, or its channel; …
    int64_t sequence; // … the how manieth there, from 0
    Flight *flight;   // what the board remembers of it
    int of_device;    // what is exchanged lies in the device's memory
    int summed;       // nccl: of a reduce-scatter comes the sum, by NCCL's own order; (bytes) into recv
    StreamKind on;    // … and travels on this stream
    int enqueued;     // the stream has all of it: `arrived` tells others when it has come
    DeviceEvent arrived;
    int next; // threads: parts copied so far
#ifdef HAVE_MPI
    MPI_Request mpi;
#endif
} Request;

enum { MAX_IN_FLIGHT = 32 };

typedef struct Comm Comm;
typedef struct Transport {
    const char *name;
    void (*group_open)(Comm *, Group *, int colour, int key);
    int (*group_member)(Comm *, Group *, int i); // world rank of member i, read back from the transport
    void (*start)(Comm *, Request *);
    int (*test)(Comm *, Request *); // 1: complete, or, on a GPU, all of it is in its stream
    BoardRank *(*record)(Comm *);   // where this rank writes what it does
    void (*gpus_open)(Comm *),
        (*gpus_close)(Comm *); // when all groups are there, and before they go; NULL: nothing to do
} Transport;

struct Comm {
    Device *dev;
    const Transport *transport; // of what lies in the device's memory
    const Transport *hosts;     // of what the host holds, and of the ranks themselves; the same, but with nccl
    Mesh mesh;
    int rank; // in the world
    Group groups[AXES];
    Channel channels[CHANNELS]; // (num_channels) opened when first used
    int num_channels;
    Traffic traffic_started[AXES][COLLECTIVES]; // by this program, before the transport is called: the dry run
    Traffic wire[AXES][COLLECTIVES];   // where the transport moves bytes, by the transport's own group size
    Request *in_flight[MAX_IN_FLIGHT];
    int num_in_flight;
    CommEvents *events;      // where this rank's collectives and messages are recorded; NULL: nowhere
    Board *board;            // of this host
    BoardRank *self;         // this rank's record there; NULL: a dry run
    double timeout;          // seconds
    double library_memory;   // bytes of the GPU that NCCL took for itself
    int64_t progress;        // while the host waits for the GPU: how much that had done, …
    double progress_at;      // … and since when there was no more
    double exchange_seconds; // in which an exchange was in flight (of a GPU: of all its exchanges together, from their
                             // turn in their stream on); of these arithmetic did not hide …
    double wait_seconds;     // … those spent waiting for exchanges, of a GPU by its compute stream, …
    double poll_seconds;     // … and those spent moving bytes between ops
    double in_flight_since;
    struct ThreadWorld *thread_world;
#ifdef HAVE_NCCL
    ncclComm_t nccl;         // of all ranks: the groups' are split from it
    ncclComm_t links[LINKS]; // NULL: there is no such neighbour, or of two ranks it is the other one
    int *members;            // (world) of the device: who is in a group, told over it
#endif
};

/* The timeline's lane of an exchange: one for each axis, and one more for each that is in flight beside it. */
static inline int comm_lane(const Request *r) { return (int)STREAMS + (int)r->group->axis + r->row * (int)AXES; }

/* Bytes that it brings from others; of a send, those it takes to one. */
static inline double bytes_moved(const Request *r) { return (double)r->bytes * (r->channel ? 1 : r->group->size - 1); }

/* From here on it is in flight, as the timeline has it. */
static void request_begin(Comm *comm, Request *r) {
    r->span = span_begin(comm->dev, EVENT_COMM, comm_lane(r), collective_names[r->collective], r->what, bytes_moved(r),
                         !r->of_device);
}

// ---------------------------------------------------------------------------
// transport: threads. A member posts where its data lies; the others, or the one that receives it, copy it out when
// they test or wait.

enum { THREAD_SLOTS = 64 };
static_assert((int)THREAD_SLOTS > (int)MAX_IN_FLIGHT, "a slot is reused only after its collective completed");

typedef struct ThreadSlot {
    int64_t posted; // sequence + 1 of the exchange whose data is at `send`
    const char *send;
    int64_t done; // sequence + 1 of the collective that this member has read from everybody; of the message that was
                  // received
    DeviceEvent ready, copied; // on this member's stream: what it sends is there; it has read from everybody (of a
                               // message, on the receiver's)
    char pad[24];              // a cache line each
} ThreadSlot;

typedef struct ThreadGroup {
    Axis axis;
    int colour, size;
    int *members;          // (size) world ranks, each written by its own thread
    ThreadSlot *slots;     // (THREAD_SLOTS, size)
    ThreadSlot **messages; // (size, size) from, to: (THREAD_SLOTS), NULL until it is used
    struct ThreadGroup *next;
} ThreadGroup;

typedef struct ThreadWorld {
    pthread_mutex_t lock;
    ThreadGroup *groups;
    Board *board;
} ThreadWorld;

static void threads_group_open(Comm *comm, Group *g, int colour, int key) {
    ThreadWorld *w = comm->thread_world;
    pthread_mutex_lock(&w->lock);
    ThreadGroup *t = w->groups;
    while (t && (t->axis != g->axis || t->colour != colour)) t = t->next;
    if (!t) {
        t = (ThreadGroup *)checked_malloc(sizeof *t);
        t->axis = g->axis, t->colour = colour, t->size = g->size;
        t->members = (int *)checked_malloc(sizeof(int) * (size_t)g->size);
        t->slots = (ThreadSlot *)checked_malloc(sizeof(ThreadSlot) * THREAD_SLOTS * (size_t)g->size);
        t->messages = (ThreadSlot **)checked_malloc(sizeof(ThreadSlot *) * (size_t)g->size * (size_t)g->size);
        t->next = w->groups;
        w->groups = t;
    }
    pthread_mutex_unlock(&w->lock);
    __atomic_store_n(&t->members[key], comm->rank, __ATOMIC_RELEASE);
    g->threads = t;
    g->rank = key;
}

static int threads_group_member(Comm *comm, Group *g, int i) {
    (void)comm;
    return __atomic_load_n(&g->threads->members[i], __ATOMIC_ACQUIRE);
}

static inline ThreadSlot *thread_slots(Request *r) {
    return &r->group->threads->slots[(r->sequence % THREAD_SLOTS) * r->group->threads->size];
}

/* Of a channel both ends have the same. */
static ThreadSlot *message_slot(Comm *comm, Request *r) {
    Channel *c = r->channel;
    Group *g = r->group;
    if (!c->slots) {
        int from = r->collective == SEND ? g->rank : c->peer, to = r->collective == SEND ? c->peer : g->rank;
        ThreadSlot **shared = &g->threads->messages[from * g->size + to];
        pthread_mutex_lock(&comm->thread_world->lock);
        if (!*shared) *shared = (ThreadSlot *)checked_malloc(sizeof(ThreadSlot) * THREAD_SLOTS);
        c->slots = *shared;
        pthread_mutex_unlock(&comm->thread_world->lock);
    }
    return &c->slots[r->sequence % THREAD_SLOTS];
}

static void threads_start_message(Comm *comm, Request *r) {
    ThreadSlot *slot = message_slot(comm, r);
    Traffic *wire = &comm->wire[r->group->axis][r->collective];
    wire->calls++;
    if (!r->of_device) request_begin(comm, r);
    if (r->collective == RECEIVE) return;
    wire->bytes += (int64_t)r->bytes;
    slot->send = r->send;
    if (r->of_device) device_record_event(comm->dev, &slot->ready);
    __atomic_store_n(&slot->posted, r->sequence + 1, __ATOMIC_RELEASE);
}

static int threads_test_message(Comm *comm, Request *r) {
    ThreadSlot *slot = message_slot(comm, r);
    int sends = r->collective == SEND;
    if (__atomic_load_n(sends ? &slot->done : &slot->posted, __ATOMIC_ACQUIRE) != r->sequence + 1) return 0;
    if (r->of_device) request_begin(comm, r);
    if (r->of_device) device_wait_event(comm->dev, sends ? slot->copied : slot->ready);
    if (sends) return 1;
    if (r->of_device)
        device_copy(comm->dev, r->recv, slot->send, r->bytes), device_record_event(comm->dev, &slot->copied);
    else memcpy(r->recv, slot->send, r->bytes);
    comm->wire[r->group->axis][RECEIVE].bytes += (int64_t)r->bytes;
    __atomic_store_n(&slot->done, r->sequence + 1, __ATOMIC_RELEASE);
    return 1;
}

static void threads_start(Comm *comm, Request *r) {
    if (r->channel) {
        threads_start_message(comm, r);
        return;
    }
    ThreadSlot *mine = &thread_slots(r)[r->group->rank];
    r->next = 0;
    mine->send = r->send;
    if (r->of_device) device_record_event(comm->dev, &mine->ready);
    else request_begin(comm, r);
    __atomic_store_n(&mine->posted, r->sequence + 1, __ATOMIC_RELEASE);
    comm->wire[r->group->axis][r->collective].calls++;
}

static int threads_test(Comm *comm, Request *r) {
    if (r->channel) return threads_test_message(comm, r);
    ThreadSlot *slots = thread_slots(r);
    int n = r->group->threads->size, me = r->group->rank;
    while (r->next < n) {
        int p = (me + r->next) % n; // each starts with its own part, so that not all read from one
        if (__atomic_load_n(&slots[p].posted, __ATOMIC_ACQUIRE) != r->sequence + 1) return 0;
        const char *from = slots[p].send + (r->collective == REDUCE_SCATTER ? (size_t)me * r->bytes : 0);
        char *to = r->recv + (size_t)p * r->bytes;
        if (r->of_device && !r->next) request_begin(comm, r);
        if (r->of_device) device_wait_event(comm->dev, slots[p].ready);
        if (to == from) {
        } // a gather in place has its own part
        else if (r->of_device)
            device_copy(comm->dev, to, from, r->bytes);
        else memcpy(to, from, r->bytes);
        if (p != me) comm->wire[r->group->axis][r->collective].bytes += (int64_t)r->bytes;
        if (++r->next < n) continue;
        if (r->of_device) device_record_event(comm->dev, &slots[me].copied);
        __atomic_store_n(&slots[me].done, r->sequence + 1, __ATOMIC_RELEASE);
    }
    for (int p = 0; p < n; p++) // the others may still read what we sent
        if (__atomic_load_n(&slots[p].done, __ATOMIC_ACQUIRE) < r->sequence + 1) return 0;
    for (int p = 0; p < n && r->of_device; p++)
        device_wait_event(comm->dev, slots[p].copied); // and on the GPU they may for longer
    return 1;
}

static void record_groups(BoardRank *k, const Mesh *mesh, int rank) {
    for (int a = 0; a < AXES; a++) {
        int key;
        mesh_group(mesh, rank, (Axis)a, &k->colour[a], &key);
        k->colour[a]++;
    }
}

static BoardRank *threads_record(Comm *comm) {
    ThreadWorld *w = comm->thread_world;
    rank_state(process_watch.record, RANK_ENDED,
               seconds_now()); // a process that a launcher started: from here on its threads watch each other
    pthread_mutex_lock(&w->lock);
    if (!w->board) {
        w->board = board_open_threads(comm->mesh.world, comm->timeout);
        for (int i = 0; i < comm->mesh.world; i++) record_groups(board_rank(w->board, i), &comm->mesh, i);
        if (!process_watch.table) process_watch.table = w->board, process_end.last_words = board_last_words;
    }
    pthread_mutex_unlock(&w->lock);
    comm->board = w->board;
    return board_rank(w->board, comm->rank);
}

static void thread_world_close(ThreadWorld *w) {
    while (w->groups) {
        ThreadGroup *g = w->groups;
        w->groups = g->next;
        for (int i = 0; i < THREAD_SLOTS * g->size; i++)
            device_destroy_event(g->slots[i].ready), device_destroy_event(g->slots[i].copied);
        for (int p = 0; p < g->size * g->size; p++) {
            for (int i = 0; i < THREAD_SLOTS && g->messages[p]; i++)
                device_destroy_event(g->messages[p][i].ready), device_destroy_event(g->messages[p][i].copied);
            free(g->messages[p]);
        }
        free(g->messages);
        free(g->members);
        free(g->slots);
        free(g);
    }
    if (!w->board) return;
    if (process_watch.table == w->board) process_watch.table = NULL;
    munmap(w->board, board_bytes(w->board->capacity));
    w->board = NULL;
}

static const Transport transport_threads = {
    "threads", threads_group_open, threads_group_member, threads_start, threads_test, threads_record, NULL, NULL};

// ---------------------------------------------------------------------------
// transport: mpi

#ifdef HAVE_MPI
static void mpi_group_open(Comm *comm, Group *g, int colour, int key) {
    (void)comm;
    MPI_Comm_split(MPI_COMM_WORLD, colour, key, &g->mpi);
    MPI_Comm_rank(g->mpi, &g->rank);
    MPI_Comm_size(g->mpi, &g->size);
}

static int mpi_group_member(Comm *comm, Group *g, int i) {
    (void)comm;
    int world_rank;
    MPI_Group group, world;
    MPI_Comm_group(g->mpi, &group);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_translate_ranks(group, 1, &i, world, &world_rank);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    return world_rank;
}

static void mpi_start(Comm *comm, Request *r) {
    // MPI counts are int: large parts travel as multiples of the alignment that all shards have
    enum { CHUNK = 256 };
    MPI_Datatype type = MPI_BYTE;
    size_t count = r->bytes;
    if (r->bytes > INT32_MAX) {
        if (r->bytes % CHUNK || r->bytes / CHUNK > INT32_MAX)
            run_failure("%s: a part of %zu bytes cannot be sent", r->what, r->bytes);
        MPI_Type_contiguous(CHUNK, MPI_BYTE, &type);
        MPI_Type_commit(&type);
        count = r->bytes / CHUNK;
    }
    const void *send = r->send == r->recv + (size_t)r->group->rank * r->bytes
                           ? MPI_IN_PLACE
                           : r->send; // of a gather: it lies where it belongs
    int error = MPI_SUCCESS, n = (int)count;
    MPI_Comm on = r->group->mpi;
    switch (r->collective) {
    case ALL_GATHER: error = MPI_Iallgather(send, n, type, r->recv, n, type, on, &r->mpi); break;
    case REDUCE_SCATTER: error = MPI_Ialltoall(r->send, n, type, r->recv, n, type, on, &r->mpi); break;
    case SEND: error = MPI_Isend(r->send, n, type, r->channel->peer, 0, on, &r->mpi); break;
    case RECEIVE: error = MPI_Irecv(r->recv, n, type, r->channel->peer, 0, on, &r->mpi); break;
    case COLLECTIVES: break;
    }
    request_begin(comm, r);
    if (error != MPI_SUCCESS)
        run_failure("rank %d: MPI refused %s of %s (code %d)", comm->rank, collective_names[r->collective], r->what,
                    error);
    if (type != MPI_BYTE) MPI_Type_free(&type);
    int size;
    MPI_Comm_size(r->group->mpi, &size);
    Traffic *wire = &comm->wire[r->group->axis][r->collective];
    wire->calls++;
    wire->bytes += (r->channel ? 1 : (int64_t)(size - 1)) * (int64_t)r->bytes;
}

/* From another host may come what no board compared. */
static void mpi_check_received(const Comm *comm, const Request *r, const MPI_Status *status, int error) {
    MPI_Count bytes = 0;
    int kind = MPI_SUCCESS;
    MPI_Error_class(error, &kind);
    if (kind == MPI_SUCCESS) MPI_Get_elements_x(status, MPI_BYTE, &bytes);
    if (kind == MPI_SUCCESS ? (size_t)bytes != r->bytes : kind == MPI_ERR_TRUNCATE)
        run_failure("rank %d: message %" PRId64 " from member %d of %s has %s than the %zu bytes of '%s', which is "
                                                "awaited. Both must take the same messages in the same order",
                    comm->rank, r->sequence + 1, r->channel->peer, axis_names[r->group->axis],
                    kind == MPI_SUCCESS ? "fewer" : "more", r->bytes, r->what);
}

static int mpi_test(Comm *comm, Request *r) {
    int complete = 0;
    MPI_Status status;
    int error = MPI_Test(&r->mpi, &complete, &status);
    if (r->collective == RECEIVE && (complete || error != MPI_SUCCESS)) mpi_check_received(comm, r, &status, error);
    if (error != MPI_SUCCESS)
        run_failure("rank %d: MPI lost %s of %s (code %d)", comm->rank, collective_names[r->collective], r->what,
                    error);
    return complete;
}

/* On the board since before MPI started. What an earlier mesh left there is forgotten; nobody reads it before all have
 * opened the new one. */
static BoardRank *mpi_record(Comm *comm) {
    BoardRank *me = process_watch.record;
    me->num_channels = 0;
    memset(me->started, 0, sizeof me->started);
    memset(me->flights, 0, sizeof me->flights);
    rank_state(me, RANK_COMPUTING, seconds_now());
    record_groups(me, &comm->mesh, comm->rank);
    comm->board = process_watch.table;
    return me;
}

static const Transport transport_mpi = {"mpi", mpi_group_open, mpi_group_member, mpi_start, mpi_test, mpi_record, NULL,
                                        NULL};

static void mpi_abort_all(int code) { MPI_Abort(MPI_COMM_WORLD, code); }
#endif

/* Was this process started by mpirun, mpiexec or srun? */
static int launched_by_mpi(void) { return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK"); }

/* mpirun forwards SIGUSR1 and SIGUSR2; after SIGTERM it kills within a second. srun leaves time. */
static int under_mpirun(void) { return !!getenv("OMPI_COMM_WORLD_SIZE"); }

/* This process's rank as its launcher tells it, before MPI is up; 0 without one. */
static int rank_of_launcher(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    for (int i = 0; i < 3; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
}

typedef struct {
    int rank, world;    // of the process; how many were started
    int local, on_host; // which one of this host; how many are there
    int on_cores; // that share its cores: all of these, or, where the launcher binds each to its own, itself alone
} Started;

/* Initialises MPI when a launcher started us. */
static Started comm_start_process(int *argc, char ***argv, double timeout) {
    Started s = {0, 1, 0, 1, 1};
    if (!launched_by_mpi()) return s;
#ifdef HAVE_MPI
    const char *size = getenv("OMPI_COMM_WORLD_SIZE"), *local = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (size && local && !strcmp(size, local)) { // one host: skip the search for network hardware, 0.2 s
        setenv("OMPI_MCA_pml", "ob1", 0);
        setenv("OMPI_MCA_btl", "self,vader", 0);
    }
    board_join(timeout, rank_of_launcher(), size ? atoi(size) : 0);
    int provided;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &s.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &s.world);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, s.rank, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &s.local);
    MPI_Comm_size(host, &s.on_host);
    cpu_set_t mine = ZERO, *all = (cpu_set_t *)checked_malloc(sizeof mine * (size_t)s.on_host);
    sched_getaffinity(0, sizeof mine, &mine);
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, host);
    for (int i = s.on_cores = 0; i < s.on_host; i++) s.on_cores += CPU_EQUAL(&mine, &all[i]);
    free(all);
    MPI_Comm_free(&host);
    unlink(process_watch.table->name); // all of this host have it: nothing stays behind, however the run ends
    process_watch.record->rank = s.rank;
    process_watch.table->world = s.world;
    process_end.abort_all = mpi_abort_all;
#else
    (void)argc, (void)argv, (void)timeout;
    user_error("started by mpirun or srun, but this build has no MPI: install Open MPI (make deps) and build again, or "
               "use --ranks N without mpirun");
#endif
    return s;
}

static void comm_end_process(void) {
#ifdef HAVE_MPI
    int initialized;
    MPI_Initialized(&initialized);
    if (!initialized) return;
    rank_state(process_watch.record, RANK_ENDING, seconds_now());
    process_watch.record->phase = PHASE_END;
    MPI_Finalize();
    rank_state(process_watch.record, RANK_ENDED, seconds_now());
#endif
}

// ---------------------------------------------------------------------------
// the collectives

static void comm_poll(void *arg);

/* All of it is in the stream that is chosen, or, where the host moves bytes, done. */
static void request_end(Comm *comm, Request *r) {
    double *seconds = r->span.begun ? &comm->exchange_seconds : NULL; // the host's: comm_progress
    r->active = 0;
    if (!r->span.begun) r->flight->finished = seconds_now();
    span_end(comm->dev, r->span, seconds, r->line, r->sequence + 1);
    if (!r->of_device) return;
    device_record_event(comm->dev, &r->arrived);
    r->enqueued = 1;
}

static const Transport *transport_of(const Comm *comm, const Request *r) {
    return r->of_device ? comm->transport : comm->hosts;
}

/* What travels on one stream goes in the order in which it was started. */
static void comm_progress(Comm *comm) {
    int kept = 0, busy[STREAMS] = ZERO;
    for (int i = 0; i < comm->num_in_flight; i++) {
        Request *r = comm->in_flight[i];
        if (!r->active || (CUDA_BUILD && r->of_device && busy[r->on])) continue;
        StreamKind before = device_set_stream(comm->dev, r->on);
        if (transport_of(comm, r)->test(comm, r)) request_end(comm, r);
        else busy[r->on] = 1;
        device_set_stream(comm->dev, before);
    }
    for (int i = 0; i < comm->num_in_flight; i++)
        if (comm->in_flight[i]->active) comm->in_flight[kept++] = comm->in_flight[i];
    if (comm->num_in_flight && !kept && !CUDA_BUILD) comm->exchange_seconds += seconds_now() - comm->in_flight_since;
    comm->num_in_flight = kept;
    comm->dev->poll = kept ? comm_poll : NULL;
}

static void comm_poll(void *arg) { // called between ops: non-blocking exchanges progress only when somebody looks
    Comm *comm = (Comm *)arg;
    double start = seconds_now();
    comm_progress(comm);
    if (!CUDA_BUILD) comm->poll_seconds += seconds_now() - start; // a GPU computes meanwhile
}

/* The GPU has come to the end of an exchange. */
static void comm_arrived(void *arg, int line, int64_t number, double start, double end) {
    Flight *flight = flight_of(((Comm *)arg)->self, line, number);
    if (flight) flight->started = start, flight->finished = end;
}

/* What this rank waits for with `r` is no exchange: what the chosen stream has been given so far. */
static void request_enqueued(Comm *comm, Request *r, const char *what) {
    r->what = what;
    r->of_device = r->enqueued = !comm->dev->dry_run;
    device_record_event(comm->dev, &r->arrived);
}

/* The name id of what the rank is doing: "forward of model.layers.3". */
static int32_t comm_events_phase(CommEvents *e, const Device *dev) {
    char text[200];
    if (e->phase >= 0 && e->phase_name == dev->phase_name && e->phase_of == dev->phase_of) return e->phase;
    e->phase_name = dev->phase_name;
    e->phase_of = dev->phase_of;
    snprintf(text, sizeof text, "%s%s%s", dev->phase_name ? dev->phase_name : "the step", dev->phase_of ? " of " : "",
             dev->phase_of ? dev->phase_of : "");
    e->phase = name_id(e->names, text);
    return e->phase;
}

/* Adds an event, with the arithmetic since the previous one. */
static void comm_record(Comm *comm, CommEvent event) {
    CommEvents *e = comm->events;
    event.compute_before = comm->dev->clock - e->compute_total;
    event.phase = comm_events_phase(e, comm->dev);
    e->compute_total = comm->dev->clock;
    comm_events_add(e, &event);
}

static void comm_record_start(Comm *comm, Request *r) {
    CommEvents *e = comm->events;
    if (!~e->slots_taken)
        run_failure("rank %d: more than %d collectives and messages are under way at once", comm->rank,
                    COMM_EVENT_SLOTS);
    int slot = __builtin_ctzll(~e->slots_taken);
    CommEvent event = ZERO;
    event.count = (int64_t)(r->bytes / dtype_size(r->dtype));
    event.name = name_id(e->names, r->what);
    event.peer = r->channel ? r->channel->peer : -1;
    event.slot = (uint8_t)slot;
    event.collective = (uint8_t)r->collective;
    event.axis = (uint8_t)r->group->axis;
    event.dtype = (uint8_t)r->dtype;
    e->slots_taken |= 1ull << slot;
    r->event_slot = slot + 1;
    comm_record(comm, event);
}

static void comm_record_wait(Comm *comm, Request *r) {
    CommEvent event = ZERO;
    event.name = -1;
    event.peer = -1;
    event.is_wait = 1;
    event.slot = (uint8_t)(r->event_slot - 1);
    comm->events->slots_taken &= ~(1ull << event.slot);
    r->event_slot = 0;
    comm_record(comm, event);
}

/* What is exchanged is known: books it, and starts it, or in a dry run says when it will be over. */
static void request_start(Comm *comm, Request *r) {
    Group *g = r->group;
    Channel *c = r->channel;
    Axis axis = g->axis;
    comm->traffic_started[axis][r->collective].calls++;
    comm->traffic_started[axis][r->collective].bytes += (int64_t)bytes_moved(r);
    if (comm->num_in_flight == MAX_IN_FLIGHT)
        run_failure("rank %d: more than %d exchanges in flight", comm->rank, MAX_IN_FLIGHT);
    r->active = 1;
    r->on = comm->dev->current_stream;
    r->line = c ? c->line : (int)axis;
    r->sequence = c ? c->next_sequence++ : g->next_sequence++;
    r->started = device_now(comm->dev);
    r->row = 0;
    if (comm->events) comm_record_start(comm, r);
    if (comm->dev->dry_run) { // how long it takes the replay of all ranks knows
        if (c) r->row = c->line - AXES + 1;
        event_add(comm->dev, EVENT_COMM, comm_lane(r), collective_names[r->collective], r->what, r->started, r->started,
                  bytes_moved(r));
        return;
    }
    if (CUDA_BUILD && r->of_device)
        r->row = r->on >= STREAM_SEND_NEXT ? (int)r->on - STREAM_SEND_NEXT
                                           : r->on == STREAM_REDUCE; // one after the other on each stream
    for (int i = 0; i < comm->num_in_flight; i++)                    // else the lowest row that none of the axis has
        if (!(CUDA_BUILD && r->of_device) && comm->in_flight[i]->group == g && comm->in_flight[i]->row == r->row)
            r->row++, i = -1;
    if (!comm->num_in_flight) comm->in_flight_since = r->started;
    r->flight = c ? message_start(comm->self, c->beside, c->line, r->collective, r->what, r->bytes, r->dtype, &c->order,
                                  r->started)
                  : flight_start(comm->board, comm->self, g->beside, axis, r->collective, r->what, r->bytes, r->dtype,
                                 &g->order, r->started);
    r->span.begun = NULL, r->span.event = -1;
    transport_of(comm, r)->start(comm, r);
    comm->in_flight[comm->num_in_flight++] = r;
    comm->dev->poll = comm_poll;
    if (CUDA_BUILD && r->of_device) comm_progress(comm); // into its stream, before what comes next there
}

/* Starts `collective` on this rank's group of `axis`; a member's part has `count` elements. A group of one copies at
 * once. On a GPU it travels on the chosen stream; the stream that is chosen when it is waited for waits. */
static void collective_start(Comm *comm, Request *r, Collective collective, Axis axis, const char *what,
                             const void *send, void *recv, size_t count, Dtype dtype) {
    Group *g = &comm->groups[axis];
    size_t bytes = count * dtype_size(dtype);
    if (r->active)
        run_failure("rank %d: %s of %s started while its request is in flight", comm->rank,
                    collective_names[collective], what);
    r->collective = collective;
    r->group = g;
    r->channel = NULL;
    r->what = what;
    r->send = (const char *)send;
    r->recv = (char *)recv;
    r->bytes = bytes;
    r->dtype = dtype;
    r->of_device = is_of_device(comm->dev, send);
    if (g->size > 1) {
        request_start(comm, r);
        return;
    }
    if (send != recv && r->of_device) device_copy(comm->dev, recv, send, bytes);
    else if (send != recv && !comm->dev->dry_run) memcpy(recv, send, bytes);
    if (r->of_device) request_enqueued(comm, r, what);
}

/* The ring's link between a rank and a neighbour; of two ranks either is the other's next. */
static inline Link link_of(const Group *g, int peer, int receives) {
    int forward = receives ? (peer + 1) % g->size == g->rank : (g->rank + 1) % g->size == peer,
        backward = receives ? (g->rank + 1) % g->size == peer : (peer + 1) % g->size == g->rank;
    if (!forward && !backward)
        run_failure("a message between members %d and %d of the %d of %s: over NCCL only neighbours have messages",
                    g->rank, peer, g->size, axis_names[g->axis]);
    return forward ? (receives ? LINK_FROM_PREVIOUS : LINK_TO_NEXT) : receives ? LINK_FROM_NEXT : LINK_TO_PREVIOUS;
}

/* This rank's end of the messages to, or from, a member of `axis`. */
static Channel *channel_of(Comm *comm, Axis axis, int peer, int receives) {
    int i = 0, k = comm->num_channels;
    while (i < k && (comm->channels[i].axis != (int)axis || comm->channels[i].peer != peer ||
                     comm->channels[i].receives != receives))
        i++;
    Channel *c = &comm->channels[i];
    if (i < k) return c;
    if (k == CHANNELS) run_failure("rank %d: messages to or from more than %d others", comm->rank, CHANNELS);
    comm->num_channels++;
    c->axis = (int)axis, c->peer = peer, c->receives = receives;
    c->line = AXES + i;
    c->order = HASH_START;
    c->peer_rank = mesh_member(&comm->mesh, comm->rank, axis, peer);
#ifdef HAVE_NCCL
    if (comm->nccl) c->nccl = comm->links[link_of(&comm->groups[axis], peer, receives)];
#endif
    if (comm->self)
        channel_beside(comm->board, comm->self, (int)axis, receives, c->peer_rank, &c->beside); // else a dry run
    return c;
}

/* Starts a message to, or from, member `peer` of this rank's group of `axis`: SEND or RECEIVE of `count` elements at
 * `buffer`. The n-th that one sends to another is the n-th that this one awaits from it, whatever travels the other
 * way, with others, or as a collective; both call it the same, or the run ends: so `what` says which one it is (what,
 * and of which micro-batch). It stays where it is as long as the timeline. A send is waited for before its buffer is
 * written again. On a GPU it travels on the chosen stream, one after the other there, and over NCCL between neighbours
 * of the ring alone. */
static inline void point_start(Comm *comm, Request *r, Collective send_or_receive, Axis axis, int peer,
                               const char *what, void *buffer, size_t count, Dtype dtype) {
    Group *g = &comm->groups[axis];
    size_t bytes = count * dtype_size(dtype);
    if (r->active)
        run_failure("rank %d: %s of %s started while its request is in flight", comm->rank,
                    collective_names[send_or_receive], what);
    if (send_or_receive != SEND && send_or_receive != RECEIVE)
        run_failure("rank %d: %s of %s is no message between two ranks", comm->rank, collective_names[send_or_receive],
                    what);
    if (peer < 0 || peer >= g->size || peer == g->rank || !bytes)
        run_failure("rank %d: %s of %zu bytes of %s with member %d of the %d of %s, of which it is member %d: expected "
                    "another one, and at least a byte",
                    comm->rank, collective_names[send_or_receive], bytes, what, peer, g->size, axis_names[axis],
                    g->rank);
    r->collective = send_or_receive;
    r->group = g;
    r->channel = channel_of(comm, axis, peer, send_or_receive == RECEIVE);
    r->what = what;
    r->send = r->recv = (char *)buffer;
    r->bytes = bytes;
    r->dtype = dtype;
    r->of_device = is_of_device(comm->dev, buffer);
    request_start(comm, r);
}

/* What the ends of this rank's channels have seen so far, for a comparison across hosts: */
typedef struct {
    int peer, receives, axis;
    uint32_t order;
} ChannelOrder; // peer: in the world; -1: no channel

static inline void channel_orders(const Comm *comm, ChannelOrder orders[CHANNELS]) {
    for (int i = 0; i < CHANNELS; i++) {
        const Channel *c = &comm->channels[i];
        ChannelOrder o = {i < comm->num_channels ? c->peer_rank : -1, c->receives, c->axis, (uint32_t)(c->order >> 32)};
        orders[i] = o;
    }
}

/* Do ranks `a` and `b`, which told of theirs when no message was on its way, differ in what one sent and the other
 * received? Over which axis; -1: no. */
static inline int channels_differ(int a, const ChannelOrder of_a[CHANNELS], int b, const ChannelOrder of_b[CHANNELS]) {
    for (int i = 0; i < 2 * CHANNELS; i++) {
        const ChannelOrder *one = i < CHANNELS ? &of_a[i] : &of_b[i - CHANNELS], *others = i < CHANNELS ? of_b : of_a;
        int met = one->peer != (i < CHANNELS ? b : a);
        for (int k = 0; k < CHANNELS && !met; k++)
            met = others[k].peer == (i < CHANNELS ? a : b) && others[k].axis == one->axis &&
                  others[k].receives != one->receives && others[k].order == one->order;
        if (!met) return one->axis;
    }
    return -1;
}

/* A wait is past its limit: says who is to blame, and ends the run. Where that is not certain, the other hosts may say
 * so first. */
static void wait_expired(Comm *comm, int line, int64_t number, double waited) {
    char culprits[2048], name[160];
    Sentence t = {culprits, sizeof culprits, 0}, exchange = {name, sizeof name, 0};
    int phase = comm->self->phase, times = phases[phase].limit, local = comm->board->attached == comm->mesh.world;
    double limit = comm->timeout * times;
    int certain = say_culprits(&t, comm->board, comm->self, line, number, limit);
    if (!certain && !local && waited < limit + 1.8)
        return; // a monitor speaks half a second late, and a launcher may take a second to end a run
    if (times > 1) say(&t, "; in %s a wait may last %d x --timeout", phases[phase].name, times);
    say_exchange(&exchange, comm->self, line, number);
    if (is_channel(line)) say(&exchange, " (message %" PRId64 ")", number);
    else say(&exchange, " (%d ranks, exchange %" PRId64 " of this group)", comm->groups[line].size, number);
    run_failure("rank %d waited %.1f s for %s; %s. Look there first; --timeout sets the limit", comm->rank, waited,
                name, culprits);
}

/* The host lets exchanges progress until all of this one is done, or with its stream. */
static void collective_finish(Comm *comm, Request *r) {
    double start = seconds_now(), now = start;
    double limit = comm->timeout * phases[comm->self->phase].limit;
    comm->self->wait_line = r->line, comm->self->wait_number = r->sequence + 1;
    rank_state(comm->self, RANK_WAITING, start);
    for (int spins = 0; comm_progress(comm), r->active; spins++) {
        sched_yield();
        if (spins > 2000) usleep(20);
        if (spins % 64) continue;
        now = seconds_now();
        if (now - start > limit) wait_expired(comm, r->line, r->sequence + 1, now - start);
    }
    rank_state(comm->self, RANK_COMPUTING, seconds_now());
}

/* Returns when the collective is complete; on a GPU the chosen stream waits, and the host only until all of it is in
 * its stream. This is the waiting that arithmetic does not hide. A CPU waits whichever stream is chosen, because its
 * streams are names only; of a GPU's streams only the compute stream counts. */
static void comm_wait(Comm *comm, Request *r) {
    Device *dev = comm->dev;
    if (r->event_slot) comm_record_wait(comm, r);
    if (!r->active && !r->enqueued) return;
    if (dev->dry_run) {
        r->active = 0;
        event_add(dev, EVENT_WAIT, STREAM_COMPUTE, "wait", r->what, dev->clock, dev->clock, 0);
        return;
    }
    int counts = CUDA_BUILD ? dev->current_stream == STREAM_COMPUTE : r->active;
    Span span = ZERO;
    if (counts) span = span_begin(dev, EVENT_WAIT, STREAM_COMPUTE, "wait", r->what, 0, !r->of_device);
    if (r->active) collective_finish(comm, r);
    if (r->of_device) device_wait_event(dev, r->arrived);
    r->enqueued = 0;
    if (counts) span_end(dev, span, &comm->wait_seconds, -1, 0);
}

/* The chosen stream, not the host, waits for an event of another one; that of the compute stream counts as waiting.
 * `what` it is for. */
static void comm_wait_event(Comm *comm, DeviceEvent event, const char *what) {
    int counts = CUDA_BUILD && (event || comm->dev->dry_run) && comm->dev->current_stream == STREAM_COMPUTE;
    Span span = ZERO;
    if (counts) span = span_begin(comm->dev, EVENT_WAIT, STREAM_COMPUTE, "wait", what, 0, 0);
    device_wait_event(comm->dev, event);
    if (counts) span_end(comm->dev, span, &comm->wait_seconds, -1, 0);
}

/* What the run does now sets the limit of its waits. Returns what it did before. */
static Phase comm_phase(Comm *comm, Phase phase) {
    Phase before = PHASE_START;
    if (!comm->self) return before; // a dry run
    before = (Phase)comm->self->phase;
    comm->self->phase = phase;
    rank_state(comm->self, (RankState)comm->self->state, seconds_now());
    return before;
}

/* Where ranks' last exchanges are left when the run fails. */
static void comm_leave_flights(Comm *comm, const char *out) {
    if (comm->self == board_rank(comm->board, 0)) snprintf(comm->board->out, sizeof comm->board->out, "%s", out);
}

/* Long work outside of ops goes on; between two of these calls the limit counts. */
static void comm_alive(Comm *comm) {
    if (comm->self) rank_state(comm->self, (RankState)comm->self->state, seconds_now());
}

/* Everybody's `send` (bytes) into `recv` (size, bytes), at once. */
static void all_gather_now(Comm *comm, Axis axis, const char *what, const void *send, void *recv, size_t bytes) {
    Request r = ZERO;
    collective_start(comm, &r, ALL_GATHER, axis, what, send, recv, bytes, DTYPE_BYTE);
    comm_wait(comm, &r);
    device_destroy_event(r.arrived);
}

/* Returns when all ranks have called it. `what` names the place in error messages and in the timeline. */
static void comm_barrier(Comm *comm, const char *what) {
    int *ranks = (int *)checked_malloc(sizeof(int) * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, what, &comm->rank, ranks, sizeof(int));
    free(ranks);
}

/* This rank's clock minus rank 0's, in seconds, and the largest error of that: whatever rank 0 sent was sent before it
 * came here, and whatever it saw of ours was seen after it left. Each round says when the one before was seen. */
static double comm_clock_offset(Comm *comm, double *error) {
    typedef struct {
        double sent, seen;
    } Beat; // by the sender's clock
    Beat mine = ZERO, *all = (Beat *)checked_malloc(sizeof mine * (size_t)comm->mesh.world);
    double low = -INFINITY, high = INFINITY;
    for (int round = 0; round < 16; round++) {
        double before = mine.sent;
        mine.sent = seconds_now();
        all_gather_now(comm, AXIS_WORLD, "clocks", &mine, all, sizeof mine);
        mine.seen = seconds_now();
        if (round) low = fmax(low, before - all[0].seen);
        high = fmin(high, mine.seen - all[0].sent);
    }
    *error = comm->rank ? (high - low) / 2 : 0;
    free(all);
    return comm->rank ? (low + high) / 2 : 0;
}

#include "transport_nccl.h" // defines: transport_nccl, nccl_look, nccl_communicators

/* The host waits for the GPU, or (waited = 0) has done so. A span that ends now and then is a sign that it goes on;
 * else an exchange keeps it, or a kernel. */
static void comm_watch(void *arg, double waited) {
    Comm *comm = (Comm *)arg;
    double now = seconds_now(), limit = comm->timeout * phases[comm->self->phase].limit;
    const OpenSpan *open = NULL;
    int64_t settled = waited > 0 ? device_settled(comm->dev, &open) : -1;
#ifdef HAVE_NCCL
    nccl_look(comm);
#endif
    if (settled != comm->progress) {
        rank_state(comm->self, RANK_COMPUTING, comm->progress_at = now);
        comm->progress = settled;
    }
    if (open && now - comm->progress_at > 0.5 && comm->self->state != RANK_WAITING) {
        comm->self->wait_line = open->line, comm->self->wait_number = open->number;
        rank_state(comm->self, RANK_WAITING, comm->progress_at);
    }
    if (settled < 0 || now - comm->progress_at < limit) return;
    if (open) wait_expired(comm, open->line, open->number, now - comm->progress_at);
    else
        run_failure("rank %d waited %.1f s for its GPU, which is in no exchange: a kernel does not end; --timeout sets "
                    "the limit",
                    comm->rank, now - comm->progress_at);
}

/* NULL: this build does not have it. */
static const Transport *transport_find(const char *name) {
    static const Transport *const built[] = {
        &transport_threads,
#ifdef HAVE_MPI
        &transport_mpi,
#endif
#ifdef HAVE_NCCL
        &transport_nccl,
#endif
    };
    for (int i = 0; i < (int)(sizeof built / sizeof *built); i++)
        if (!strcmp(built[i]->name, name)) return built[i];
    return NULL;
}

/* For a dry run: groups are known by their sizes alone. */
static void comm_open_dry_run(Comm *comm, Device *dev, const Mesh *mesh, int rank) {
    memset(comm, 0, sizeof *comm);
    comm->dev = dev;
    comm->mesh = *mesh;
    comm->rank = rank;
    for (int a = 0; a < AXES; a++) {
        int colour;
        comm->groups[a].axis = (Axis)a;
        comm->groups[a].order = HASH_START;
        comm->groups[a].size = mesh_group_size(mesh, (Axis)a);
        mesh_group(mesh, rank, (Axis)a, &colour, &comm->groups[a].rank);
    }
    if (!dev->by_nccl || mesh->world == 1) return;
    int *members = (int *)arena_alloc(dev, MEM_COMM, "members of a group", sizeof(int) * (size_t)mesh->world);
#ifdef HAVE_NCCL
    comm->members = members;
#endif
    (void)members;
}

static void comm_open(Comm *comm, Device *dev, const Mesh *mesh, int rank, const Transport *transport,
                      const Transport *hosts, ThreadWorld *threads, double timeout) {
    comm_open_dry_run(comm, dev, mesh, rank);
    comm->transport = transport;
    comm->hosts = hosts;
    comm->thread_world = threads;
    comm->timeout = timeout;
    comm->progress = -1;
    comm->self = hosts->record(comm);
    comm->self->now.op = OP_COUNT; // none yet
    dev->activity = &comm->self->now;
    dev->comm_finished = comm_arrived;
    dev->watch = mesh->world > 1 || !comm->board->threads ? comm_watch
                                                          : NULL; // others wait for this rank, or a monitor watches it
    dev->poll_arg = comm;
    for (int a = 0; a < AXES; a++) {
        int colour, key;
        Group *g = &comm->groups[a];
        mesh_group(mesh, rank, (Axis)a, &colour, &key);
        hosts->group_open(comm, g, colour, key);
        if (g->size != mesh_group_size(mesh, (Axis)a) || g->rank != key)
            run_failure("rank %d: group %s has %d members and this rank is its %d, expected %d and %d", rank,
                        axis_names[a], g->size, g->rank, mesh_group_size(mesh, (Axis)a), key);
    }
    for (int a = 0; a < AXES; a++)
        if (comm->groups[a].size > 1) board_beside(comm->board, comm->self, a, comm->groups[a].beside);
    if (transport->gpus_open && mesh->world > 1) transport->gpus_open(comm);
}

static void comm_close(Comm *comm) {
    if (comm->transport && comm->transport->gpus_close && comm->mesh.world > 1) comm->transport->gpus_close(comm);
}

static void comm_clear_ledger(Comm *comm) {
    memset(comm->traffic_started, 0, sizeof comm->traffic_started);
    memset(comm->wire, 0, sizeof comm->wire);
}

#endif
