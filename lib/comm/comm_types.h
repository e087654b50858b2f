/* comm_types.h: what a rank knows about communication: its groups, channels, requests and what is recorded of them, and
 * the transport's interface.
 *
 * comm.h starts and waits for collectives and messages. transport_threads.h, transport_mpi.h and transport_nccl.h move
 * the bytes; comm_open.h chooses one and opens the groups.
 */
#ifndef COMM_TYPES_H
#define COMM_TYPES_H
#include "../device/device.h" // defines: Device, DeviceEvent, Span, StreamKind
#include "mesh.h"             // defines: Axis, Mesh, Collective, Traffic
#include "culprit.h"          // defines: WorldNews, HeartbeatTable, Heartbeat, FlightRecord
#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif
#ifdef HAVE_NCCL
#include <nccl.h>
#endif

/* The neighbors of a rank in a pipeline, which is a ring. */
typedef enum { LINK_TO_NEXT, LINK_FROM_PREVIOUS, LINK_TO_PREVIOUS, LINK_FROM_NEXT, LINKS } Link;

/* A rank's communicators of NCCL, by their numbers: that of each axis; another one for reductions over fsdp; then two
 * for each link of the pipeline. NCCL runs the operations of a communicator one after the other, and until one has
 * begun, no later one of the rank begins. With one communicator for fsdp, a gradient's reduce-scatter would wait for
 * the all-gather of the weights that backward needs next, and with one for a link, a receive for the one before it. */
enum { NCCL_REDUCTIONS = AXES, NCCL_LINKS, NCCL_TURNS = 2 };
enum { NCCL_COMMUNICATORS = (int)NCCL_LINKS + (int)NCCL_TURNS * (int)LINKS };

/* The ranks of one axis that share all other coordinates, as this rank sees them. */
typedef struct {
    Axis axis;
    int size, rank; // number of members; which of them this rank is
    struct ThreadGroup *threads;
#ifdef HAVE_MPI
    MPI_Comm mpi;
#endif
} Group;

/* One end of the messages from one member of a group to another. The n-th send matches the n-th receive, whatever else
 * either rank communicates. */
typedef struct Channel {
    int axis;
    int receives;                // 1: this rank receives; 0: it sends
    int peer, peer_rank;         // the other end: its number in the group, its rank in the world
    int line;                    // AXES + its number among this rank's channels; see Request.line
    struct ThreadGroup *threads; // NULL until the first message
#ifdef HAVE_NCCL
    ncclComm_t nccl[NCCL_TURNS]; // communicators of these two ranks, which messages use in turn
#endif
} Channel;

/* A collective, send or receive, from its start to its wait. Set to zero before its first use. */
typedef struct Request {
    int active; // started, and the transport is not done with it
    Collective collective;
    Group *group;
    Channel *channel; // of a send or receive; NULL: a collective
    const char *what; // the name of what is communicated
    const char *send; // all_gather, send: (bytes); the others: (size, bytes), part p goes to member p
    char *recv;       // (size, bytes), part p is from member p; receive: (bytes)
    size_t bytes;
    Dtype dtype;
    int event_slot; // Comm.recorder's; 0: it was not recorded
    Span span;
    int lane;       // its row in the timeline, among the rows of its axis: see free_lane
    int line;       // the ordered sequence in which the watchdog counts it: the group's axis, or the channel's line
    int64_t number; // it is the n-th request on that line; counted from 1
    FlightRecord *record;
    int on_device;     // its buffers are memory of the device
    int summed;        // of a reduce-scatter: NCCL adds the pieces, and recv is (bytes)
    StreamKind stream; // of the device, on which it runs
    int enqueued;      // the stream has all of it; `arrived` is recorded after it
    DeviceEvent arrived;
    int parts_copied; // threads: parts that this rank has copied
#ifdef HAVE_MPI
    MPI_Request mpi;
#endif
} Request;

enum { MAX_IN_FLIGHT = 32 };

typedef struct Comm Comm;

/* Moves bytes between ranks. */
typedef struct Transport {
    const char *name;
    void (*group_open)(Comm *, Group *, int colour); // g->rank is this rank's place in it
    int (*group_member)(Comm *, Group *, int i);     // world rank of member i, as the transport itself reports it
    void (*start)(Comm *, Request *);
    int (*test)(Comm *, Request *); // 1: complete; of a GPU: all of it is in its stream. NULL: as soon as it is started
    Heartbeat *(*heartbeat_open)(Comm *);                        // this rank's record in the heartbeat table
    void (*gpus_open)(Comm *);                                   // after the groups are open; NULL: nothing to do
    void (*gpus_close)(Comm *);                                  // before the groups close
    void (*gpus_connect)(Comm *, const Comm *dry_run, int sums); // see comm_connect; NULL: nothing to do
    const char *(*last_error)(void);                             // text of its library's last error; NULL: none
    void (*channel_open)(Comm *, Channel *);                     // NULL: nothing to do
    int (*ask_hosts)(Comm *);                                    // see mpi_ask_hosts; NULL: all ranks are on one host
    void (*answer_hosts)(Comm *);                                // see mpi_answer_hosts
    /* Refuses GPUs of this host that it cannot connect; NULL: nothing to do. `hosts`: the transport of host memory. */
    void (*check_host)(int gpu, int local_rank, int local_ranks, const struct Transport *hosts);
} Transport;

/* What a rank waits for: communication over an axis, or a copy of its own, such as that of offloaded state. */
enum { WAIT_OWN_COPY = AXES, WAIT_CAUSES };

/* Lists what a rank starts and waits for, to simulate it. */
typedef struct CommRecorder {
    StreamRecorder streams;                                // first: what it calls finds this struct around it
    void (*record)(struct Comm *, Request *, int is_wait); // the request starts, or the rank waits for it
} CommRecorder;

struct Comm {
    Device *dev;
    const Transport *transport; // of device memory
    const Transport *hosts;     // of host memory, and of the groups; equal to `transport` except with NCCL
    Mesh mesh;
    int rank; // its number in the world
    Group groups[AXES];
    Channel channels[CHANNELS]; // (num_channels) opened when first used
    int num_channels;

    Traffic traffic_started[AXES][COLLECTIVES];  // as the program started it; in a dry run, the prediction
    Traffic traffic_measured[AXES][COLLECTIVES]; // counted by the transport, with MPI's or NCCL's group sizes

    Request *in_flight[MAX_IN_FLIGHT];
    int num_in_flight;
    CommRecorder *recorder; // NULL: none

    HeartbeatTable *heartbeats; // of this host
    Heartbeat *heartbeat;       // this rank's record in it; NULL: a dry run
    double timeout;             // seconds
    int64_t gpu_progress;       // how many spans the GPU had finished when the host last looked while waiting for it
    double gpu_progress_at;     // seconds: since when that has not changed

    double comm_seconds;              // in which a collective was in flight; of a GPU: their durations in their streams
    double wait_seconds[WAIT_CAUSES]; // in which this rank, or the compute stream of its GPU, waited, by cause
    double poll_seconds;              // in which this rank moved bytes between ops
    double in_flight_since;           // seconds

    RankNews *news;     // (world) what is known of all ranks, once a wait has timed out; NULL: none has
    int question;       // the number of this rank's last question to the other hosts
    double answered_at; // seconds: when it last looked for questions of other hosts

    double free_before_nccl; // bytes of the GPU's memory that were free before NCCL allocated its own
    double library_memory;   // bytes that NCCL allocated, by the time of the first step

    struct ThreadWorld *thread_world;
    int *members; // (world) memory of the GPU, for nccl_check_members; NULL without NCCL
#ifdef HAVE_NCCL
    // NULL where there is none. With two stages, the next and the previous one are the same rank, which needs only the
    // links TO_NEXT and FROM_PREVIOUS.
    ncclComm_t nccl[NCCL_COMMUNICATORS];
    void *registered[NCCL_LINKS]; // NCCL's handles of the communication buffers; NULL: not registered
#endif
};

/* The timeline's lane: one or more for each axis; see Request.lane. */
static inline int comm_lane(const Request *r) { return (int)STREAMS + (int)r->group->axis + r->lane * (int)AXES; }

/* Bytes that this rank receives from others in a group of `size` members; of a send, bytes that it sends. */
static inline int64_t request_traffic(const Request *r, int size) {
    return (int64_t)r->bytes * (r->channel ? 1 : size - 1);
}

/* Counts a request whose group has `size` members. */
static inline void traffic_count(Traffic traffic[AXES][COLLECTIVES], const Request *r, int size) {
    Traffic *t = &traffic[r->group->axis][r->collective];
    t->calls++;
    t->bytes += request_traffic(r, size);
}

/* A copy by this rank, of memory of the device or of the host. */
static inline void request_copy(Comm *comm, const Request *r, void *to, const void *from) {
    if (to == from) return; // this rank's own part of an in-place all-gather
    if (r->on_device) device_copy(comm->dev, to, from, r->bytes);
    else if (!comm->dev->dry_run) memcpy(to, from, r->bytes);
}

/* Seconds that a wait may last in this phase of the run. */
static inline double wait_limit(const Comm *comm) { return comm->timeout * phases[comm->heartbeat->phase].limit; }

// ---------------------------------------------------------------------------
// what is recorded of a request: its traffic, its bar in the timeline, its flight record, and the time spent waiting

/* Chooses the request's row in the timeline, among the rows of its axis (comm_lane converts it to a row of the whole
 * timeline), so that requests that overlap are drawn in different rows. GPU memory: the row follows from the stream, 0
 * to 7 for the streams of pipeline messages, 1 for STREAM_REDUCE, 0 for the others. Other memory: the first row
 * that no request in flight on this axis has. */
static inline int free_lane(const Comm *comm, const Request *r) {
    if (CUDA_BUILD && r->on_device)
        return r->stream >= STREAM_SEND_NEXT ? (int)r->stream - STREAM_SEND_NEXT : r->stream == STREAM_REDUCE;
    for (int lane = 0;; lane++) {
        int taken = 0;
        for (int i = 0; i < comm->num_in_flight; i++)
            taken |= comm->in_flight[i]->group == r->group && comm->in_flight[i]->lane == lane;
        if (!taken) return lane;
    }
}

/* The program starts the request. */
static inline void note_started(Comm *comm, Request *r) {
    Device *dev = comm->dev;
    double now = device_now(dev);
    traffic_count(comm->traffic_started, r, r->group->size);
    if (comm->recorder) comm->recorder->record(comm, r, 0);
    if (dev->dry_run) { // its duration is known only to the simulation of all ranks
        // each channel has a row; collectives of an axis are in row 0, of a GPU those of STREAM_REDUCE in row 1
        r->lane = r->channel ? r->line - AXES + 1 : stream_lane(dev) == STREAM_REDUCE;
        event_add(dev, EVENT_COMM, comm_lane(r), collective_names[r->collective], r->what, now, now,
                  (double)request_traffic(r, r->group->size));
        return;
    }
    r->lane = free_lane(comm, r);
    if (!comm->num_in_flight) comm->in_flight_since = now;
    r->record =
        flight_start(comm->heartbeats, comm->heartbeat, r->line, r->collective, r->what, (int64_t)r->bytes, r->dtype);
    r->number = r->record->number;
    r->span.begun = NULL;
    r->span.event = -1;
}

/* The transport begins to move the request's bytes. */
static inline void note_moving(Comm *comm, Request *r) {
    r->span = span_begin(comm->dev, EVENT_COMM, comm_lane(r), collective_names[r->collective], r->what,
                         (double)request_traffic(r, r->group->size), !r->on_device);
}

/* The transport has nothing left to do for the request: its bytes have been sent or have arrived, or they will have
 * when the GPU's stream comes to this point. */
static inline void note_arrived(Comm *comm, Request *r) {
    int is_timed_by_gpu = r->span.begun != NULL;
    if (!is_timed_by_gpu) r->record->finished = seconds_now();
    span_end(comm->dev, r->span, is_timed_by_gpu ? &comm->comm_seconds : NULL, r->line, r->number);
}

/* A wait begins; its time counts as waiting only if `counts` is set. Returns what note_waited needs at its end. */
static inline Span note_wait(Comm *comm, const char *what, int counts, int on_host) {
    Span uncounted = {0, -1, NULL};
    return counts ? span_begin(comm->dev, EVENT_WAIT, stream_lane(comm->dev), "wait", what, 0, on_host) : uncounted;
}
static inline void note_waited(Comm *comm, Span wait, int cause) {
    if (wait.event >= 0) span_end(comm->dev, wait, &comm->wait_seconds[cause], -1, 0);
}

#endif
