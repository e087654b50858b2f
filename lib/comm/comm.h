/* comm.h: collectives and messages between ranks: start one, compute, wait for it.
 *
 * Each has a name for error messages and the timeline, and is counted in the traffic ledger. A wait beyond the limit of
 * the run's phase (`phases` in watchdog.h, 1 or 4 times --timeout) ends the run and names the rank that is to blame.
 * All members of a group start its collectives in the same order, or the run ends. After the wait the buffers may be
 * reused. In a dry run a collective is counted and recorded, and no bytes move. On a GPU, a collective of device memory
 * runs on the stream that was current at its start, and the stream that is current at comm_wait waits for it; for a
 * collective of host memory the host waits. comm_open.h opens a Comm. A request after its start is in these states:
 *
 *                 between CPUs, or host memory       memory of a GPU
 *     active      the transport moves bytes          NCCL has not yet enqueued all of it
 *     enqueued    all bytes have arrived             all of it is in the stream that was current at its start
 *     neither     comm_wait has returned             the stream that was current at comm_wait waits for it
 */
#ifndef COMM_H
#define COMM_H
#include "progress.h" // defines: comm_progress, request_poll_until_done; includes comm_types.h: Comm, Group, Request

// ---------------------------------------------------------------------------
// start

/* Starts a request whose buffers are known, unless this is a dry run. `c`: of a message; else NULL. */
static inline void request_start(Comm *comm, Request *r, Collective collective, Group *g, Channel *c) {
    if (comm->num_in_flight == MAX_IN_FLIGHT)
        run_failure("%s: more than %d collectives and messages are in flight at once", rank_name(comm->rank),
                    MAX_IN_FLIGHT);
    r->collective = collective;
    r->group = g;
    r->channel = c;
    r->line = c ? c->line : (int)g->axis; // a group's collectives have the line of its axis
    r->stream = comm->dev->current_stream;
    r->active = 1;
    note_started(comm, r);
    if (comm->dev->dry_run) return;
    (r->on_device ? comm->transport : comm->hosts)->start(comm, r);
    comm->in_flight[comm->num_in_flight++] = r;
    comm->dev->poll = comm_poll;
    // NCCL has enqueued the collective: this records r->arrived in the stream before anything later is enqueued there
    if (CUDA_BUILD && r->on_device) comm_progress(comm);
}

/* Prepares a request. `count`: elements of a message, or of what a member sends in an all-gather, sends to each member
 * in an all-to-all, or receives from a reduce-scatter. */
static inline void request_set(Comm *comm, Request *r, const char *what, const void *send, void *recv, size_t count,
                               Dtype dtype) {
    if (r->active)
        run_failure("%s: '%s' is started while its request is in flight for '%s'", rank_name(comm->rank), what,
                    r->what);
    r->what = what;
    r->send = (const char *)send;
    r->recv = (char *)recv;
    r->bytes = count * dtype_size(dtype);
    r->dtype = dtype;
    r->on_device = is_of_device(comm->dev, send);
}

/* A request that completes when the current stream has done everything that it was given so far. */
static inline void request_follow_stream(Comm *comm, Request *r, const char *what) {
    r->what = what;
    r->on_device = !comm->dev->dry_run;
    r->enqueued = !comm->dev->dry_run;
    device_record_event(comm->dev, &r->arrived);
}

static inline void collective_start(Comm *comm, Request *r, Collective collective, Axis axis) {
    Group *g = &comm->groups[axis];
    if (g->size > 1) {
        request_start(comm, r, collective, g, NULL);
        return;
    }
    request_copy(comm, r, r->recv, r->send); // what a group of one sends is what it receives
    if (r->on_device) request_follow_stream(comm, r, r->what);
}

/* Starts an all-gather over this rank's group of an axis: each member's send (count) arrives in recv (size, count). */
static inline void all_gather_start(Comm *comm, Request *r, Axis axis, const char *what, const void *send, void *recv,
                                    size_t count, Dtype dtype) {
    request_set(comm, r, what, send, recv, count, dtype);
    collective_start(comm, r, ALL_GATHER, axis);
}

/* Starts the all-to-all of a reduce-scatter of send (size, count): piece p of recv (size, count) is member p's
 * contribution to this rank's part of the sum, and the caller adds the pieces. */
static inline void reduce_scatter_pieces_start(Comm *comm, Request *r, Axis axis, const char *what, const void *send,
                                               void *recv, size_t count, Dtype dtype) {
    request_set(comm, r, what, send, recv, count, dtype);
    r->summed = 0;
    collective_start(comm, r, REDUCE_SCATTER, axis);
}

/* Starts a reduce-scatter of send (size, count) in which NCCL adds the pieces, in its own order and in `dtype`: recv
 * (count) is this rank's part of the sum. */
static inline void reduce_scatter_start(Comm *comm, Request *r, Axis axis, const char *what, const void *send,
                                        void *recv, size_t count, Dtype dtype) {
    request_set(comm, r, what, send, recv, count, dtype);
    r->summed = 1;
    collective_start(comm, r, REDUCE_SCATTER, axis);
}

/* Starts an all-to-all: part p of send (size, count) goes to member p; part p of recv (size, count) comes from it. */
static inline void all_to_all_start(Comm *comm, Request *r, Axis axis, const char *what, const void *send, void *recv,
                                    size_t count, Dtype dtype) {
    request_set(comm, r, what, send, recv, count, dtype);
    collective_start(comm, r, ALL_TO_ALL, axis);
}

/* This rank's end of the messages to or from a member of `axis`. */
static inline Channel *channel_of(Comm *comm, Axis axis, int peer, int receives) {
    int i = comm->num_channels;
    Channel *c = comm->channels;
    for (; c < comm->channels + i; c++)
        if (c->axis == (int)axis && c->peer == peer && c->receives == receives) return c;
    if (i == CHANNELS)
        run_failure("%s: more than %d channels; every axis, other rank and direction that it uses needs one: "
                    "raise CHANNELS in lib/comm/watchdog.h",
                    rank_name(comm->rank), CHANNELS);
    comm->num_channels++;
    c->axis = (int)axis;
    c->peer = peer;
    c->receives = receives;
    c->line = AXES + i;
    c->peer_rank = mesh_member(&comm->mesh, comm->rank, axis, peer);
    if (!comm->heartbeat) return c; // a dry run
    if (comm->transport->channel_open) comm->transport->channel_open(comm, c);
    RankLines *lines = &comm->heartbeat->lines;
    ChannelEnd end = {c->axis, receives, c->peer_rank};
    snprintf(comm->heartbeat->peer_names[i], sizeof comm->heartbeat->peer_names[i], "%s", rank_name(c->peer_rank));
    lines->channels[i] = end;
    __atomic_store_n(&lines->num_channels, comm->num_channels, __ATOMIC_SEQ_CST);
    return c;
}

static inline void message_start(Comm *comm, Request *r, Collective collective, Axis axis, int peer) {
    Group *g = &comm->groups[axis];
    if (peer < 0 || peer >= g->size || peer == g->rank || !r->bytes)
        run_failure("%s: %s of '%s', %zu bytes, with member %d of its %s group: expected at least 1 byte, and a "
                    "member from 0 to %d other than this rank, which is member %d",
                    rank_name(comm->rank), collective_names[collective], r->what, r->bytes, peer, axis_names[axis],
                    g->size - 1, g->rank);
    request_start(comm, r, collective, g, channel_of(comm, axis, peer, collective == RECEIVE));
}

/* Starts to send buffer (count) to member `peer` of this rank's group of `axis`. The n-th send matches the peer's n-th
 * receive from this rank, whatever else either communicates. Both must use the same name, or the run ends, so the name
 * says what is sent and for which micro-batch; the string must outlive the timeline. Wait before writing to the buffer
 * again. NCCL sends only between neighboring stages, on AXIS_PP. */
static inline void send_start(Comm *comm, Request *r, Axis axis, int peer, const char *what, void *buffer, size_t count,
                              Dtype dtype) {
    request_set(comm, r, what, buffer, buffer, count, dtype);
    message_start(comm, r, SEND, axis, peer);
}

/* Starts to receive buffer (count) from member `peer`; see send_start. */
static inline void receive_start(Comm *comm, Request *r, Axis axis, int peer, const char *what, void *buffer,
                                 size_t count, Dtype dtype) {
    request_set(comm, r, what, buffer, buffer, count, dtype);
    message_start(comm, r, RECEIVE, axis, peer);
}

// ---------------------------------------------------------------------------
// wait

/* Waits for a request; one that was not started since its last wait returns at once. On a GPU the host waits only while
 * the request is active, and the current stream for the rest. The time counts as waiting (communication that is not
 * overlapped): on a CPU always, since the rank's one thread waits; on a GPU if the current stream is STREAM_COMPUTE. */
static inline void comm_wait(Comm *comm, Request *r) {
    Device *dev = comm->dev;
    if (r->event_slot) comm->recorder->record(comm, r, 1);
    if (!r->active && !r->enqueued) return;
    int counts = CUDA_BUILD ? dev->current_stream == STREAM_COMPUTE : r->active;
    int cause = r->group ? (int)r->group->axis : WAIT_OWN_COPY; // without a group: request_follow_stream
    Span wait = note_wait(comm, r->what, counts || dev->dry_run, !r->on_device);
    if (dev->dry_run) {
        r->active = 0;
        return;
    }
    if (r->active) request_poll_until_done(comm, r);
    if (r->on_device) device_wait_event(dev, r->arrived);
    r->enqueued = 0;
    note_waited(comm, wait, cause);
}

/* The current stream waits for an event of another stream. `what` says in the timeline what the event stands for. The
 * compute stream's time counts as waiting for `cause`, an axis or WAIT_OWN_COPY. */
static inline void comm_wait_event(Comm *comm, DeviceEvent event, const char *what, int cause) {
    Device *dev = comm->dev;
    int counts = CUDA_BUILD && (event || dev->dry_run) && dev->current_stream == STREAM_COMPUTE;
    Span wait = note_wait(comm, what, counts, 0);
    device_wait_event(dev, event);
    note_waited(comm, wait, cause);
}

/* The seconds of all waits since comm_clear_ledger. */
static inline double comm_wait_seconds(const Comm *comm) {
    double sum = 0;
    for (int cause = 0; cause < WAIT_CAUSES; cause++) sum += comm->wait_seconds[cause];
    return sum;
}

/* Frees what a request holds; it is not in flight. */
static inline void request_close(Request *r) { device_destroy_event(r->arrived); }

// ---------------------------------------------------------------------------
// collectives that are started and waited for at once: host memory is complete on return, device memory once the
// current stream gets there

/* All-gathers send (bytes) of every member into recv (size, bytes). */
static inline void all_gather_now(Comm *comm, Axis axis, const char *what, const void *send, void *recv, size_t bytes) {
    Request r = ZERO;
    all_gather_start(comm, &r, axis, what, send, recv, bytes, DTYPE_BYTE);
    comm_wait(comm, &r);
    request_close(&r);
}

/* Returns when all ranks have called it. */
static inline void comm_barrier(Comm *comm, const char *what) {
    int *ranks = new_array(int, comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, what, &comm->rank, ranks, sizeof(int));
    free(ranks);
}

/* A random number of rank 0 that all ranks receive. It names files that no other run may have. */
static inline uint64_t comm_random_name(Comm *comm, const char *what) {
    uint64_t name = mix64((uint64_t)getpid() ^ (uint64_t)time(NULL) << 32 ^ (uint64_t)(seconds_now() * 1e9));
    uint64_t *names = new_array(uint64_t, comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, what, &name, names, sizeof name);
    name = names[0];
    free(names);
    return name;
}

/* This rank's clock minus rank 0's, in seconds, and the largest error of that. The difference is bounded from both
 * sides, as in NTP: this rank's receive time minus rank 0's send time is an upper bound, this rank's send time minus
 * rank 0's receive time a lower one. Each round also carries the receive time of the round before. The best bounds of
 * 16 rounds count. */
static inline double comm_clock_offset(Comm *comm, double *error) {
    typedef struct {
        double sent, received; // by this member's clock: of this round, of the previous one
    } Times;
    Times mine = ZERO, *all = new_array(Times, comm->mesh.world);
    double low = -INFINITY, high = INFINITY;
    for (int round = 0; round < 16; round++) {
        double before = mine.sent;
        mine.sent = seconds_now();
        all_gather_now(comm, AXIS_WORLD, "clocks", &mine, all, sizeof mine);
        mine.received = seconds_now();
        if (round) low = fmax(low, before - all[0].received);
        high = fmin(high, mine.received - all[0].sent);
    }
    free(all);
    *error = comm->rank ? (high - low) / 2 : 0;
    return comm->rank ? (low + high) / 2 : 0;
}

// ---------------------------------------------------------------------------
// what the watchdog and the reports of a step need

/* Gives a sign of life during long work outside of ops. The monitor's limit starts again with each call. */
static inline void comm_alive(Comm *comm) {
    if (comm->heartbeat) comm->heartbeat->since = seconds_now();
}

/* Sets the phase of the run, and with it the limit of its waits. Returns the previous phase. */
static inline Phase comm_phase(Comm *comm, Phase phase) {
    if (!comm->heartbeat) return PHASE_START; // a dry run
    Phase before = (Phase)comm->heartbeat->phase;
    comm_alive(comm); // before the phase: the monitor may look in between
    __atomic_store_n(&comm->heartbeat->phase, (int)phase, __ATOMIC_RELEASE);
    return before;
}

/* If the run fails, the last collectives of each rank are written below `out`. All ranks call it; the first one in each
 * host's heartbeat table stores the path there. */
static inline void comm_set_flight_directory(Comm *comm, const char *out) {
    HeartbeatTable *table = comm->heartbeats;
    if (comm->heartbeat == heartbeat_at(table, 0)) snprintf(table->out, sizeof table->out, "%s", out);
}

/* The traffic and the times of communication count from here on. */
static inline void comm_clear_ledger(Comm *comm) {
    comm->comm_seconds = comm->poll_seconds = 0;
    memset(comm->wait_seconds, 0, sizeof comm->wait_seconds);
    memset(comm->traffic_started, 0, sizeof comm->traffic_started);
    memset(comm->traffic_measured, 0, sizeof comm->traffic_measured);
}

// ---------------------------------------------------------------------------
// opening, as far as it needs no transport

/* Fills in the sizes of the groups and this rank's place in them. In a dry run that is all: such a Comm counts its
 * traffic and moves no bytes. comm_open calls it for real runs too, and then opens the transport. */
static inline void comm_open_dry_run(Comm *comm, Device *dev, const Mesh *mesh, int rank) {
    memset(comm, 0, sizeof *comm);
    comm->dev = dev;
    comm->mesh = *mesh;
    comm->rank = rank;
    for (int a = 0; a < AXES; a++) {
        int colour;
        Group *g = &comm->groups[a];
        g->axis = (Axis)a;
        g->size = mesh_group_size(mesh, (Axis)a);
        mesh_group(mesh, rank, (Axis)a, &colour, &g->rank);
    }
    if (dev->by_nccl && mesh->world > 1) // in a dry run too, so that the predicted memory includes it
        comm->members = (int *)arena_alloc(dev, MEM_COMM, "members of a group", sizeof(int) * (size_t)mesh->world);
}

#endif
