/* transport_nccl.h: collectives and messages of GPU memory over NCCL; threads or MPI carry what the host holds.
 *
 * A collective is enqueued on a stream, and the host does not wait for it; comm_watch (comm_open.h) checks the timeout.
 * Ranks that share a GPU, or groups whose members differ from the mesh, are found before the first collective. When the
 * run fails, this process's communicators are aborted, because a GPU that waits for a lost rank waits forever.
 */
#ifndef TRANSPORT_NCCL_H
#define TRANSPORT_NCCL_H
#include "comm.h"
#include <signal.h>

/* The axes with collectives of GPU memory. A communicator takes memory, so the other axes have none. On pp each
 * link, which is a direction to or from a neighbor, has NCCL_TURNS of them. */
static const Axis nccl_axes[] = {AXIS_TP, AXIS_CP, AXIS_FSDP, AXIS_DP_REPLICATE};

/* The communicators of a rank's links to its neighbors in a pipeline; two ranks are each other's next and previous. */
static inline int nccl_links(const Mesh *m) {
    int pp = m->size[AXIS_PP], links = pp > 2 ? (int)LINKS : 2;
    return pp > 1 ? (int)NCCL_TURNS * links : 0;
}

/* How many communicators a rank has: of all ranks, of each axis, for reductions over fsdp if they have their own, of
 * the links to its neighbors. --plan counts their memory. */
static inline int nccl_communicators(const Mesh *m, int reductions_apart) {
    int count = (m->world > 1) + nccl_links(m);
    for (size_t i = 0; i < sizeof nccl_axes / sizeof *nccl_axes; i++) count += mesh_group_size(m, nccl_axes[i]) > 1;
    return count + (reductions_apart && mesh_group_size(m, AXIS_FSDP) > 1);
}

/* The most multiprocessors that a communicator may occupy; NCCL_UNLIMITED: as many as NCCL chooses, since nothing
 * computes meanwhile. Within a host 16 carry what NVLink can (Transformer Engine's tensor-parallel overlap takes 16:
 * initialize_ub in its pytorch/module/base.py); 20 suffice for NVLink and InfiniBand together (DeepSeek-V3, arXiv
 * 2412.19437, section 3.2.2). So with tp, whose collectives are the urgent ones, fsdp's and the replicas' get 4 each;
 * without it 8 each. A pipeline's messages are short, and a receive spins until its message comes. Not measured on
 * GPUs. NCCL_MAX_CTAS in the environment overrides these limits. */
enum { NCCL_UNLIMITED = 0 };
static inline int nccl_multiprocessors(const Mesh *m, int communicator) {
    int has_tp = m->size[AXIS_TP] > 1;
    if (communicator >= NCCL_LINKS) return 2;
    if (communicator == AXIS_TP) return 16;
    if (communicator == AXIS_FSDP || communicator == AXIS_DP_REPLICATE || communicator == NCCL_REDUCTIONS)
        return has_tp ? 4 : 8;
    return NCCL_UNLIMITED;
}

/* Bytes that a rank's communicators take, if one without a limit takes `bytes` for 24 multiprocessors: each has its
 * channel, with buffers. */
static inline double nccl_memory(const Mesh *m, int reductions_apart, double bytes) {
    double channels = 24 * (m->world > 1) + nccl_links(m) * nccl_multiprocessors(m, NCCL_LINKS);
    for (size_t i = 0; i < sizeof nccl_axes / sizeof *nccl_axes; i++) {
        int limit = nccl_multiprocessors(m, nccl_axes[i]);
        if (mesh_group_size(m, nccl_axes[i]) > 1) channels += limit == NCCL_UNLIMITED ? 24 : limit;
    }
    if (reductions_apart && mesh_group_size(m, AXIS_FSDP) > 1) channels += nccl_multiprocessors(m, NCCL_REDUCTIONS);
    return bytes / 24 * channels;
}

/* How many multiprocessors NCCL occupies while the matmuls of forward compute, or those of backward: forward prefetches
 * weights and exchanges messages with other stages, backward also reduces gradients and hides tp's collectives. At most
 * a quarter of all. */
static inline int nccl_beside_matmuls(const Mesh *m, int reductions_apart, int backward, int multiprocessors) {
    int count = 0, reduces = backward && mesh_group_size(m, AXIS_DP_REPLICATE) * mesh_group_size(m, AXIS_FSDP) > 1;
    if (m->size[AXIS_PP] > 1) count += 2 * nccl_multiprocessors(m, NCCL_LINKS); // a receive from each neighbor
    if (reductions_apart && mesh_group_size(m, AXIS_FSDP) > 1) count += nccl_multiprocessors(m, AXIS_FSDP);
    if (reduces) count += nccl_multiprocessors(m, NCCL_REDUCTIONS);
    if (backward && m->size[AXIS_TP] > 1) count += nccl_multiprocessors(m, AXIS_TP);
    return (int)min_i64(count, multiprocessors / 4);
}

/* The number of the communicator for a collective that is started on `stream`. */
static inline int nccl_communicator_of(Axis axis, StreamKind stream, int reductions_apart) {
    int reduces = axis == AXIS_FSDP && stream == STREAM_REDUCE;
    return reduces && reductions_apart ? (int)NCCL_REDUCTIONS : (int)axis;
}

#ifdef HAVE_NCCL
enum { NCCL_AXES = sizeof nccl_axes / sizeof nccl_axes[0] };

/* The axis of a rank's i-th communicator. */
static inline Axis nccl_axis(int i) {
    if (i == NCCL_REDUCTIONS) return AXIS_FSDP;
    return i < AXES ? (Axis)i : AXIS_PP;
}

// ---------------------------------------------------------------------------
// errors and aborting

static __thread Comm *nccl_own; // this thread's rank, for nccl_abort

static inline void nccl_is_stuck(int signal_number) {
    (void)signal_number;
    if (process_end.abort_all) process_end.abort_all(2);
    _exit(2);
}

/* Aborts this rank's communicators, as one group, so that all are told before the first is waited for. An abort may
 * itself wait for the GPU, so it gets one second. */
static inline void nccl_abort(void) {
    if (!nccl_own) return;
    signal(SIGALRM, nccl_is_stuck);
    alarm(1);
    ncclGroupStart();
    for (int i = 0; i < NCCL_COMMUNICATORS; i++)
        if (nccl_own->nccl[i]) ncclCommAbort(nccl_own->nccl[i]);
    ncclGroupEnd();
    alarm(0);
}

/* NCCL is still connecting the members of a communicator: tells the watchdog for which collective this rank waits. On
 * an axis that has been started, so it has its number (0 while the axis is being opened). The communicator of all ranks
 * is opened between two collectives on world, so the next one's number stands for it. */
static inline void nccl_note_waiting(Comm *comm, ncclComm_t c, double since) {
    Axis axis = AXIS_WORLD;
    for (int i = 0; i < NCCL_COMMUNICATORS; i++)
        if (comm->nccl[i] == c) axis = nccl_axis(i);
    int64_t number = comm->heartbeat->started[axis] + (axis == AXIS_WORLD);
    rank_waits(comm->heartbeat, (int)axis, number, since);
}

/* Waits until a call on communicator `c`, which does not block, has ended. `what` was called `of` what, in words. */
static inline void nccl_check(Comm *comm, ncclComm_t c, ncclResult_t result, const char *what, const char *of) {
    double start = seconds_now();
    RankState before = (RankState)comm->heartbeat->state;
    for (int spins = 0; result == ncclInProgress; spins++) {
        if (ncclCommGetAsyncError(c, &result) != ncclSuccess) result = ncclSystemError;
        if (result != ncclInProgress) break;
        if (spins > 1000) usleep(100);
        double waited = seconds_now() - start;
        if (waited > 0.5 && comm->heartbeat->state != RANK_WAITING) nccl_note_waiting(comm, c, start);
        if (waited > wait_limit(comm))
            run_failure("%s: NCCL took longer than %.1f s to %s %s: look at the other ranks; NCCL_DEBUG=INFO "
                        "gives details, --timeout sets the limit",
                        rank_name(comm->rank), waited, what, of);
    }
    if (comm->heartbeat->state != (int)before) rank_state(comm->heartbeat, before, seconds_now());
    if (result != ncclSuccess)
        run_failure("%s: NCCL could not %s %s: %s (%s). NCCL_DEBUG=INFO gives details", rank_name(comm->rank), what, of,
                    ncclGetErrorString(result), c ? ncclGetLastError(c) : "no communicator");
}

/* Ends the run if a communicator has failed. A rank that is lost need not show up here. */
static inline void nccl_check_errors(Comm *comm) {
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        ncclComm_t c = comm->nccl[i];
        ncclResult_t state = ncclSuccess;
        if (c) ncclCommGetAsyncError(c, &state);
        if (state != ncclSuccess && state != ncclInProgress)
            run_failure("%s: NCCL lost the group of %s: %s (%s). Look at the other ranks; NCCL_DEBUG=INFO gives "
                        "details",
                        rank_name(comm->rank), axis_names[nccl_axis(i)], ncclGetErrorString(state),
                        ncclGetLastError(c));
    }
}

// ---------------------------------------------------------------------------
// opening

/* Each rank must have a GPU of its own. Otherwise NCCL would hang, or refuse without naming a rank. */
static inline void nccl_check_gpus(Comm *comm) {
    cudaDeviceProp mine;
    cuda_check(cudaGetDeviceProperties(&mine, comm->dev->gpu), "asking for the GPU's properties");
    cudaUUID_t *all = new_array(cudaUUID_t, comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, "GPUs", &mine.uuid, all, sizeof mine.uuid);
    for (int i = 0; i < comm->rank; i++)
        if (!memcmp(&all[i], &mine.uuid, sizeof mine.uuid))
            user_error("ranks %d and %d share one GPU (%s, number %d of its host), but NCCL needs a GPU for each rank: "
                       "start as many ranks on a host as it has GPUs, or share one with --ranks N --transport threads",
                       i, comm->rank, mine.name, comm->dev->gpu);
    free(all);
}

/* The members of communicator `c` tell each other who they are; they must be the group's. */
static inline void nccl_check_members(Comm *comm, ncclComm_t c, Group *g) {
    int size = 0, rank = -1, mine = comm->rank;
    ncclCommCount(c, &size);
    ncclCommUserRank(c, &rank);
    if (size != g->size || rank != g->rank)
        run_failure("%s: NCCL's group of %s has %d members, of which this rank is number %d; expected %d and %d",
                    rank_name(comm->rank), axis_names[g->axis], size, rank, g->size, g->rank);
    size_t bytes = sizeof(int) * (size_t)size;
    int *members = (int *)checked_malloc(bytes), *gpu_members = comm->members;
    device_write(comm->dev, gpu_members + rank, &mine, sizeof mine);
    nccl_check(comm, c, ncclAllGather(gpu_members + rank, gpu_members, 1, ncclInt32, c, comm->dev->stream),
               "meet the members of", axis_names[g->axis]);
    device_read(comm->dev, members, gpu_members, bytes);
    for (int i = 0; i < size; i++) {
        int expected = comm->hosts->group_member(comm, g, i);
        if (members[i] == expected) continue;
        run_failure("%s: member %d of %s is rank %d to NCCL, and rank %d to %s", rank_name(comm->rank), i,
                    axis_names[g->axis], members[i], expected, comm->hosts->name);
    }
    free(members);
}

/* Limits the multiprocessors of the next communicator. */
static inline void nccl_limit(const Comm *comm, int communicator, ncclConfig_t *config) {
    int most = nccl_multiprocessors(&comm->mesh, communicator);
    config->maxCTAs = most == NCCL_UNLIMITED ? NCCL_CONFIG_UNDEF_INT : most;
}

/* The number of the communicator for the n-th message of a link. */
static inline int nccl_link(Link link, int64_t n) {
    return (int)NCCL_LINKS + (int)NCCL_TURNS * (int)link + (int)(n % NCCL_TURNS);
}

/* Opens two communicators for each direction between neighbors of the pipeline. All ranks must call ncclCommSplit
 * together, and one call can split off several links if they share no rank. So the links are opened in turns: turn 0
 * has the links 0-1, 2-3, and so on, turn 1 has 1-2, 3-4, and so on, and with an odd number of ranks turn 2 has the
 * link from the last rank to the first. In a link the sender is rank 0. */
static inline void nccl_open_links(Comm *comm, ncclConfig_t *config) {
    const Group *g = &comm->groups[AXIS_PP];
    int P = g->size, me = g->rank, previous = (me + P - 1) % P;
    int turns = P == 1 ? 0 : 2 + P % 2, directions = P > 2 ? 2 : 1; // two ranks are each other's next
    int my_turn = P % 2 && me == P - 1 ? 2 : me % 2;
    int turn_of_previous = P % 2 && previous == P - 1 ? 2 : previous % 2;
    ncclComm_t all = comm->nccl[AXIS_WORLD];
    config->commName = "pp";
    nccl_limit(comm, NCCL_LINKS, config);
    for (int turn = 0; turn < turns; turn++)
        for (int i = 0; i < directions * NCCL_TURNS; i++) {
            int back = i / NCCL_TURNS, to_next = turn == my_turn, takes_part = to_next || turn == turn_of_previous;
            Link forward = to_next ? LINK_TO_NEXT : LINK_FROM_PREVIOUS;
            Link backward = to_next ? LINK_FROM_NEXT : LINK_TO_PREVIOUS;
            Link link = back ? backward : forward;
            ncclComm_t none = NULL, *made = takes_part ? &comm->nccl[nccl_link(link, i)] : &none;
            int colour = NCCL_SPLIT_NOCOLOR, key = to_next != back ? 0 : 1;
            if (takes_part) colour = mesh_member(&comm->mesh, comm->rank, AXIS_PP, to_next ? me : previous);
            nccl_check(comm, all, ncclCommSplit(all, colour, key, made, config), "split off", "a link of pp");
            if (takes_part) nccl_check(comm, *made, ncclInProgress, "open", "a link of pp");
        }
}

/* Splits communicator `which` off that of all ranks, and registers the communication buffers with it. Registration
 * needs equal buffers on all members, which tp's ranks need not have, as their parts of the model differ. cp's
 * collectives use none of these buffers. So neither is registered. */
static inline void nccl_open_group(Comm *comm, int which, ncclConfig_t *config) {
    Group *g = &comm->groups[nccl_axis(which)];
    int colour = comm->heartbeat->lines.colour[g->axis];
    const Arena *buffers = &comm->dev->arenas[MEM_COMM];
    nccl_limit(comm, which, config);
    config->commName = which == NCCL_REDUCTIONS ? "fsdp reductions" : axis_names[g->axis];
    ncclComm_t all = comm->nccl[AXIS_WORLD], *made = &comm->nccl[which];
    nccl_check(comm, all, ncclCommSplit(all, colour, g->rank, made, config), "split off", config->commName);
    nccl_check(comm, *made, ncclInProgress, "open the group of", config->commName);
    nccl_check_members(comm, *made, g);
    if (g->axis < AXIS_DP_SHARD) return; // tp, cp
    ncclResult_t registered = ncclCommRegister(*made, buffers->base, buffers->reserved, &comm->registered[which]);
    nccl_check(comm, *made, registered, "register the memory of", config->commName);
}

/* Opens one communicator of all ranks, and from it one for each axis and link. All ranks split in the same order. */
static inline void nccl_open(Comm *comm) {
    ncclUniqueId mine = ZERO, *all = new_array(ncclUniqueId, comm->mesh.world);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.splitShare = 0; // communicators that shared their resources could not run side by side
    double free_before = device_memory(comm->dev->gpu);
    int version = 0;
    ncclGetVersion(&version);
    if (version < 22600)
        user_error("NCCL has version %d.%d, but 2.26 or newer is needed, where several groups can share a GPU safely: "
                   "install a newer one",
                   version / 10000, version % 10000 / 100);
    nccl_check_gpus(comm);
    if (comm->rank == 0 && ncclGetUniqueId(&mine) != ncclSuccess)
        run_failure("rank 0: NCCL found no network interface for meeting the other ranks: NCCL_SOCKET_IFNAME selects "
                    "one, NCCL_DEBUG=INFO gives details");
    all_gather_now(comm, AXIS_WORLD, "NCCL's identity", &mine, all, sizeof mine);
    nccl_own = comm;
    process_end.abort_collectives = nccl_abort;
    ncclComm_t *made = &comm->nccl[AXIS_WORLD];
    ncclResult_t begun = ncclCommInitRankConfig(made, comm->mesh.world, all[0], comm->rank, &config);
    nccl_check(comm, *made, begun, "open the group of", "all ranks");
    free(all);
    for (int i = 0; i < NCCL_AXES; i++)
        if (comm->groups[nccl_axes[i]].size > 1) nccl_open_group(comm, nccl_axes[i], &config);
    if (comm->dev->reductions_apart && comm->groups[AXIS_FSDP].size > 1)
        nccl_open_group(comm, NCCL_REDUCTIONS, &config);
    nccl_open_links(comm, &config);
    // another number may mean another algorithm, and other bits than those of a layout with other communicators
    for (int backward = 0; backward < 2 && !comm->dev->deterministic; backward++)
        comm->dev->left_to_nccl[backward] =
            nccl_beside_matmuls(&comm->mesh, comm->dev->reductions_apart, backward, comm->dev->multiprocessors);
    comm->library_memory = fmax(0, free_before - device_memory(comm->dev->gpu));
}

/* Closes all communicators. All begin to close before the first is waited for: neighbors wait in another order. */
static inline void nccl_close(Comm *comm) {
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        ncclComm_t c = comm->nccl[i];
        if (!c) continue;
        if (i < NCCL_LINKS && comm->registered[i]) ncclCommDeregister(c, comm->registered[i]);
        ncclCommFinalize(c);
    }
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        ncclComm_t c = comm->nccl[i];
        if (!c) continue;
        nccl_check(comm, c, ncclInProgress, "close the group of", axis_names[nccl_axis(i)]);
        ncclCommDestroy(c);
        comm->nccl[i] = NULL;
    }
    nccl_own = NULL;
}

/* Gives a channel the communicator of its link. */
static inline void nccl_channel_open(Comm *comm, Channel *c) {
    const Group *g = &comm->groups[c->axis];
    int next = (g->rank + 1) % g->size, previous = (g->rank + g->size - 1) % g->size;
    int forward = c->peer == (c->receives ? previous : next), backward = c->peer == (c->receives ? next : previous);
    if (!forward && !backward)
        run_failure("a message between members %d and %d of the %d of %s: NCCL carries messages only between neighbors",
                    g->rank, c->peer, g->size, axis_names[c->axis]);
    Link link = c->receives ? LINK_FROM_PREVIOUS : LINK_TO_NEXT;
    if (!forward) link = c->receives ? LINK_FROM_NEXT : LINK_TO_PREVIOUS;
    for (int i = 0; i < NCCL_TURNS; i++) c->nccl[i] = comm->nccl[nccl_link(link, i)];
}

// ---------------------------------------------------------------------------
// collectives and messages

/* Sends a part to each member and receives one from each. The caller of a reduce-scatter adds them in its own order. */
static inline ncclResult_t nccl_all_to_all(Request *r, ncclComm_t c, int size, cudaStream_t stream) {
    ncclGroupStart();
    for (int p = 0; p < size; p++) {
        ncclSend(r->send + (size_t)p * r->bytes, r->bytes, ncclUint8, p, c, stream);
        ncclRecv(r->recv + (size_t)p * r->bytes, r->bytes, ncclUint8, p, c, stream);
    }
    return ncclGroupEnd();
}

/* NCCL adds, in its own order. */
static inline ncclResult_t nccl_reduce_scatter(Request *r, ncclComm_t c, cudaStream_t stream) {
    ncclDataType_t type = r->dtype == DTYPE_BF16 ? ncclBfloat16 : ncclFloat32;
    return ncclReduceScatter(r->send, r->recv, r->bytes / dtype_size(r->dtype), type, ncclSum, c, stream);
}

static inline void nccl_start(Comm *comm, Request *r) {
    static const char *const starts[COLLECTIVES] = {"start the all_gather of", "start the reduce_scatter of",
                                                    "start the all_to_all of", "start the send of",
                                                    "start the receive of"};
    Group *g = r->group;
    cudaStream_t stream = comm->dev->stream;
    int which = nccl_communicator_of(g->axis, r->stream, comm->dev->reductions_apart);
    ncclComm_t c = r->channel ? r->channel->nccl[r->number % NCCL_TURNS] : comm->nccl[which];
    int size = 0;
    ncclResult_t result = ncclCommCount(c, &size);
    if (result != ncclSuccess) nccl_check(comm, c, result, "count the members of", axis_names[g->axis]);
    request_begin(comm, r);
    if (r->collective == ALL_GATHER) result = ncclAllGather(r->send, r->recv, r->bytes, ncclUint8, c, stream);
    else if (r->collective == SEND) result = ncclSend(r->send, r->bytes, ncclUint8, 1, c, stream);
    else if (r->collective == RECEIVE) result = ncclRecv(r->recv, r->bytes, ncclUint8, 0, c, stream);
    else if (r->collective == REDUCE_SCATTER && r->summed) result = nccl_reduce_scatter(r, c, stream);
    else result = nccl_all_to_all(r, c, size, stream);
    nccl_check(comm, c, result, starts[r->collective], r->what);
    traffic_count(comm->traffic_measured, r, size);
}

/* Groups are opened by the transport of the hosts. */
static const Transport transport_nccl = {
    "nccl",
    NULL, // group_open
    NULL, // group_member
    nccl_start,
    NULL,              // test
    NULL,              // heartbeat_open
    nccl_open,         // gpus_open
    nccl_close,        // gpus_close
    nccl_channel_open, // channel_open
    NULL,              // ask_hosts: the transport of the hosts does
    NULL,              // answer_hosts
};
#endif

#endif
