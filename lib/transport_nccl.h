/* nccl.h: the transport between GPUs.
 *
 * Included by comm.h behind the collectives. A caller may rely on: exchanges are enqueued, and the host waits for none
 * of them, but watches (comm_watch); a GPU or a member that is not as it should be is named before the first exchange;
 * a communicator that is stuck is aborted.
 */

/* The axes over which GPUs have collectives. A communicator of NCCL's takes memory, so beside these there are those of
 * a pipeline's links alone. */
static const Axis nccl_axes[] = {AXIS_TP, AXIS_CP, AXIS_FSDP, AXIS_DP_REPLICATE};

/* How many communicators a rank has: of all ranks, of each axis, of the links to its neighbours; a plan counts their
 * memory. */
static inline int nccl_communicators(const Mesh *m) {
    int count = m->world > 1, pp = m->size[AXIS_PP];
    for (size_t i = 0; i < sizeof nccl_axes / sizeof *nccl_axes; i++) count += mesh_group_size(m, nccl_axes[i]) > 1;
    return count + (pp > 2 ? LINKS : pp == 2 ? 2 : 0);
}

#ifdef HAVE_NCCL
enum { NCCL_AXES = sizeof nccl_axes / sizeof nccl_axes[0], NCCL_COMMUNICATORS = NCCL_AXES + LINKS };

/* The i-th of this rank's communicators, which may be NULL, and of which axis it is. */
static ncclComm_t *nccl_communicator(Comm *comm, int i, Axis *axis) {
    *axis = i < NCCL_AXES ? nccl_axes[i] : AXIS_PP;
    return i < NCCL_AXES ? &comm->groups[nccl_axes[i]].nccl : &comm->links[i - NCCL_AXES];
}

/* This thread's rank. Whoever ends the process stops its own: a GPU that waits for a lost rank waits for good. */
static __thread Comm *nccl_own;

static void nccl_is_stuck(int signal_number) {
    (void)signal_number;
    if (process_end.abort_all) process_end.abort_all(2);
    _exit(2);
}

static void nccl_abort(void) {
    if (!nccl_own) return;
    signal(SIGALRM, nccl_is_stuck); // an abort that waits for the GPU, as it may
    alarm(1);
    ncclGroupStart(); // so that all are told before the first is waited for
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        Axis axis;
        ncclComm_t c = *nccl_communicator(nccl_own, i, &axis);
        if (c) ncclCommAbort(c);
    }
    if (nccl_own->nccl) ncclCommAbort(nccl_own->nccl);
    ncclGroupEnd();
    alarm(0);
}

/* A call on communicator `c` has come to its end: those here do not block, and are at work until they say otherwise. */
static void nccl_check(Comm *comm, ncclComm_t c, ncclResult_t result, const char *what, const char *of) {
    double start = seconds_now();
    RankState before = (RankState)comm->self->state;
    for (int spins = 0; result == ncclInProgress; spins++) {
        if (ncclCommGetAsyncError(c, &result) != ncclSuccess) result = ncclSystemError;
        if (result != ncclInProgress) break;
        if (spins > 1000) usleep(100);
        double waited = seconds_now() - start;
        if (waited > 0.5 && comm->self->state != RANK_WAITING) { // the first exchanges of a group connect its members
            comm->self->wait_line = AXIS_WORLD, comm->self->wait_number = comm->groups[AXIS_WORLD].next_sequence + 1;
            for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
                Axis axis;
                if (*nccl_communicator(comm, i, &axis) == c)
                    comm->self->wait_line = axis, comm->self->wait_number = comm->groups[axis].next_sequence;
            }
            rank_state(comm->self, RANK_WAITING, start);
        }
        if (waited > comm->timeout * phases[comm->self->phase].limit)
            run_failure("rank %d: NCCL was at work for %.1f s to %s %s: look at the other ranks; NCCL_DEBUG=INFO says "
                        "more, --timeout sets the limit",
                        comm->rank, waited, what, of);
    }
    if (comm->self->state != (int)before) rank_state(comm->self, before, seconds_now());
    if (result != ncclSuccess)
        run_failure("rank %d: NCCL could not %s %s: %s (%s). NCCL_DEBUG=INFO says more", comm->rank, what, of,
                    ncclGetErrorString(result), c ? ncclGetLastError(c) : "no communicator");
}

/* Every rank has a GPU of its own: NCCL would hang, or refuse in words that name no rank. */
static void nccl_check_gpus(Comm *comm) {
    cudaDeviceProp mine;
    cuda_check(cudaGetDeviceProperties(&mine, comm->dev->gpu), "asking what GPU this is");
    cudaUUID_t *all = (cudaUUID_t *)checked_malloc(sizeof mine.uuid * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, "GPUs", &mine.uuid, all, sizeof mine.uuid);
    for (int i = 0; i < comm->rank; i++)
        if (!memcmp(&all[i], &mine.uuid, sizeof mine.uuid))
            user_error("ranks %d and %d share one GPU (%s, number %d of its host), and NCCL wants a GPU for each: "
                       "start as many ranks on a host as it has GPUs, or share one with --ranks N --transport threads",
                       i, comm->rank, mine.name, comm->dev->gpu);
    free(all);
}

/* The members of a group, as its communicator has them: they tell each other who they are. */
static void nccl_check_members(Comm *comm, Group *g) {
    int size = 0, rank = -1, mine = comm->rank;
    ncclCommCount(g->nccl, &size);
    ncclCommUserRank(g->nccl, &rank);
    if (size != g->size || rank != g->rank)
        run_failure("rank %d: NCCL's group of %s has %d members and this rank is its %d, expected %d and %d",
                    comm->rank, axis_names[g->axis], size, rank, g->size, g->rank);
    size_t bytes = sizeof(int) * (size_t)size;
    int *near = (int *)checked_malloc(bytes), *all = comm->members;
    device_write(comm->dev, all + rank, &mine, sizeof mine);
    nccl_check(comm, g->nccl, ncclAllGather(all + rank, all, 1, ncclInt32, g->nccl, comm->dev->stream),
               "meet the members of", axis_names[g->axis]);
    device_read(comm->dev, near, all, bytes);
    for (int i = 0; i < size; i++)
        if (near[i] != comm->hosts->group_member(comm, g, i))
            run_failure("rank %d: member %d of %s is rank %d to NCCL, and rank %d to %s", comm->rank, i,
                        axis_names[g->axis], near[i], comm->hosts->group_member(comm, g, i), comm->hosts->name);
    free(near);
}

/* A communicator for each way between neighbours of a pipeline. Links that share no rank are split off together: 0-1,
 * 2-3, …; 1-2, 3-4, …; of an odd number the last one's to the first. */
static void nccl_open_links(Comm *comm, ncclConfig_t *config) {
    const Group *g = &comm->groups[AXIS_PP];
    int P = g->size, me = g->rank, previous = (me + P - 1) % P;
    config->commName = "pp";
    for (int turn = 0; turn < (P == 1 ? 0 : 2 + P % 2); turn++)
        for (int back = 0; back < (P > 2 ? 2 : 1); back++) { // of two, one is the next of the other either way
            int starts = turn == (P % 2 && me == P - 1 ? 2 : me % 2),
                ends = turn == (P % 2 && previous == P - 1 ? 2 : previous % 2);
            Link link = starts ? (back ? LINK_FROM_NEXT : LINK_TO_NEXT) : back ? LINK_TO_PREVIOUS : LINK_FROM_PREVIOUS;
            int colour = starts || ends ? mesh_member(&comm->mesh, comm->rank, AXIS_PP, starts ? me : previous)
                                        : NCCL_SPLIT_NOCOLOR;
            ncclComm_t none = NULL, *made = starts || ends ? &comm->links[link] : &none;
            nccl_check(comm, comm->nccl, ncclCommSplit(comm->nccl, colour, starts != back ? 0 : 1, made, config),
                       "split off", "a link of pp"); // who sends is the first
            if (starts || ends) nccl_check(comm, *made, ncclInProgress, "open", "a link of pp");
        }
}

/* One communicator of all ranks, and from it one for each axis; all ranks split in the same order. */
static void nccl_open(Comm *comm) {
    ncclUniqueId mine = ZERO, *all = (ncclUniqueId *)checked_malloc(sizeof mine * (size_t)comm->mesh.world);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    Arena *exchanged = &comm->dev->arenas[MEM_COMM];
    config.blocking = 0;
    double before = device_memory(comm->dev->gpu);
    int version = 0;
    ncclGetVersion(&version);
    if (version < 22600)
        user_error("NCCL is of version %d.%d, 2.26 or newer is expected, which lets several groups share a GPU safely: "
                   "install a newer one",
                   version / 10000, version % 10000 / 100);
    nccl_check_gpus(comm);
    if (comm->rank == 0 && ncclGetUniqueId(&mine) != ncclSuccess)
        run_failure("rank 0: NCCL has no network interface to meet the other ranks on: NCCL_SOCKET_IFNAME names one, "
                    "NCCL_DEBUG=INFO says more");
    all_gather_now(comm, AXIS_WORLD, "NCCL's identity", &mine, all, sizeof mine);
    nccl_own = comm, process_end.abort_collectives = nccl_abort;
    ncclResult_t begun = ncclCommInitRankConfig(&comm->nccl, comm->mesh.world, all[0], comm->rank, &config);
    nccl_check(comm, comm->nccl, begun, "open the group of", "all ranks");
    free(all);
    for (int i = 0; i < NCCL_AXES; i++) {
        int colour, key;
        Group *g = &comm->groups[nccl_axes[i]];
        if (g->size == 1) continue;
        mesh_group(&comm->mesh, comm->rank, g->axis, &colour, &key);
        config.commName = axis_names[g->axis];
        nccl_check(comm, comm->nccl, ncclCommSplit(comm->nccl, colour, key, &g->nccl, &config), "split off",
                   axis_names[g->axis]);
        nccl_check(comm, g->nccl, ncclInProgress, "open the group of", axis_names[g->axis]);
        nccl_check_members(comm, g);
        if (g->axis < AXIS_DP_SHARD)
            continue; // NCCL wants what it knows at the same place on all members: ranks of tp and pp have other parts
                      // of the model
        nccl_check(comm, g->nccl, ncclCommRegister(g->nccl, exchanged->base, exchanged->reserved, &g->registered),
                   "register the memory of", axis_names[g->axis]);
    }
    nccl_open_links(comm, &config);
    comm->library_memory =
        fmax(0, before - device_memory(comm->dev->gpu)); // of what is beyond the plan the largest part
}

static void nccl_close(Comm *comm) {
    for (int step = 0; step < 2;
         step++) // all of them begin to close before the first is waited for: neighbours have theirs in another order
        for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
            Axis axis;
            ncclComm_t *c = nccl_communicator(comm, i, &axis);
            if (!*c) continue;
            if (step == 0) {
                if (i < NCCL_AXES && comm->groups[axis].registered)
                    ncclCommDeregister(*c, comm->groups[axis].registered);
                ncclCommFinalize(*c);
                continue;
            }
            nccl_check(comm, *c, ncclInProgress, "close the group of", axis_names[axis]);
            ncclCommDestroy(*c), *c = NULL;
        }
    nccl_check(comm, comm->nccl, ncclCommFinalize(comm->nccl), "close the group of", "all ranks");
    ncclCommDestroy(comm->nccl), comm->nccl = NULL, nccl_own = NULL;
}

/* Everybody's parts come apart, as from an all-to-all, and fsdp.h sums them in its order; or NCCL sums them on the way.
 */
static void nccl_start(Comm *comm, Request *r) {
    Group *g = r->group;
    cudaStream_t stream = comm->dev->stream;
    ncclComm_t c = r->channel ? r->channel->nccl : g->nccl;
    int size = 0;
    ncclResult_t result = ncclCommCount(c, &size);
    if (result != ncclSuccess) nccl_check(comm, c, result, "count the members of", axis_names[g->axis]);
    request_begin(comm, r);
    if (r->collective == ALL_GATHER) result = ncclAllGather(r->send, r->recv, r->bytes, ncclUint8, c, stream);
    else if (r->collective == SEND)
        result = ncclSend(r->send, r->bytes, ncclUint8, 1, c, stream); // of a link the first member sends to the second
    else if (r->collective == RECEIVE) result = ncclRecv(r->recv, r->bytes, ncclUint8, 0, c, stream);
    else if (r->summed) {
        int half = r->dtype == DTYPE_BF16;
        result = ncclReduceScatter(r->send, r->recv, r->bytes / (half ? sizeof(bf16) : sizeof(float)),
                                   half ? ncclBfloat16 : ncclFloat32, ncclSum, c, stream);
    } else {
        ncclGroupStart();
        for (int p = 0; p < size; p++) {
            ncclSend(r->send + (size_t)p * r->bytes, r->bytes, ncclUint8, p, c, stream);
            ncclRecv(r->recv + (size_t)p * r->bytes, r->bytes, ncclUint8, p, c, stream);
        }
        result = ncclGroupEnd();
    }
    static const char *const starts[COLLECTIVES] = {"start the all_gather of", "start the reduce_scatter of",
                                                    "start the send of", "start the receive of"};
    nccl_check(comm, c, result, starts[r->collective], r->what);
    comm->wire[g->axis][r->collective].calls++;
    comm->wire[g->axis][r->collective].bytes += (r->channel ? 1 : (int64_t)(size - 1)) * (int64_t)r->bytes;
}

static int nccl_test(Comm *comm, Request *r) { return (void)comm, (void)r, 1; } // the stream has all of it

static const Transport transport_nccl = {"nccl",    NULL, NULL,      nccl_start,
                                         nccl_test, NULL, nccl_open, nccl_close}; // groups are the hosts' transport's

/* Has a communicator failed? A rank that is lost need not show there. */
static void nccl_look(Comm *comm) {
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        Axis axis;
        ncclComm_t c = *nccl_communicator(comm, i, &axis);
        ncclResult_t state = ncclSuccess;
        if (c) ncclCommGetAsyncError(c, &state);
        if (state != ncclSuccess && state != ncclInProgress)
            run_failure(
                "rank %d: NCCL lost the group of %s: %s (%s). Look at the other ranks; NCCL_DEBUG=INFO says more",
                comm->rank, axis_names[axis], ncclGetErrorString(state), ncclGetLastError(c));
    }
}
#endif
