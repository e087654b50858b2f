/* transport_nccl.h: collectives and messages of GPU memory over NCCL; threads or MPI carry what the host holds.
 *
 * A collective is enqueued on a stream, and the host does not wait for it; comm_watch_cuda.h checks the timeout.
 * Ranks that share a GPU, or groups whose members differ from the mesh, are found before the first collective. When the
 * run fails, the rank that reports it aborts its communicators, because a GPU that waits for a lost rank waits forever.
 */
#ifndef TRANSPORT_NCCL_H
#define TRANSPORT_NCCL_H
#include "comm.h"
#include <signal.h>
#include <sys/statvfs.h>

/* The axes with collectives of GPU memory. A communicator takes memory, so the other axes have none. On pp each
 * link, which is a direction to or from a neighbor, has NCCL_TURNS of them. */
static const Axis nccl_axes[] = {AXIS_TP, AXIS_CP, AXIS_FSDP, AXIS_DP_REPLICATE};
enum { NCCL_AXES = sizeof nccl_axes / sizeof nccl_axes[0] };

/* How many communicators a rank has for messages to its pipeline neighbors. With pp 2 both neighbors are the same rank,
 * so that there are only two links. */
static inline int nccl_link_communicators(const Mesh *mesh) {
    int pp = mesh->size[AXIS_PP], links = pp > 2 ? (int)LINKS : 2;
    return pp > 1 ? (int)NCCL_TURNS * links : 0;
}

/* How many communicators a rank has: one for each axis, one more for reductions over fsdp under full_shard, and those
 * of its links. */
static inline int nccl_communicators(const Mesh *mesh, int reductions_apart) {
    int count = nccl_link_communicators(mesh);
    for (int i = 0; i < NCCL_AXES; i++) count += mesh_group_size(mesh, nccl_axes[i]) > 1;
    return count + (reductions_apart && mesh_group_size(mesh, AXIS_FSDP) > 1);
}

/* The most multiprocessors that a communicator may occupy; NCCL_UNLIMITED, for cp: as many as NCCL chooses, since
 * nothing computes while cp's collectives run. Within a host 16 carry what NVLink can (Transformer Engine's
 * tensor-parallel overlap takes 16: initialize_ub in its pytorch/module/base.py); 20 suffice for NVLink and InfiniBand
 * together (DeepSeek-V3, arXiv 2412.19437, section 3.2.2). So with tp, whose collectives are the urgent ones, fsdp's
 * and the replicas' get 4 each; without it 8 each. A pipeline link gets 2: its messages are short, and a receive
 * occupies its multiprocessors until the message comes. Not measured on GPUs. NCCL_MAX_CTAS in the environment
 * overrides these limits. */
enum { NCCL_UNLIMITED = 0 };
static inline int nccl_multiprocessors(const Mesh *mesh, int communicator) {
    int has_tp = mesh->size[AXIS_TP] > 1;
    if (communicator >= NCCL_LINKS) return 2;
    if (communicator == AXIS_TP) return 16;
    if (communicator == AXIS_FSDP || communicator == AXIS_DP_REPLICATE || communicator == NCCL_REDUCTIONS)
        return has_tp ? 4 : 8;
    return NCCL_UNLIMITED;
}

/* Bytes that one communicator allocates, with `local` of its `size` members on a rank's own host. NCCL has one NCCL
 * channel for each multiprocessor that the communicator may occupy, and 24 for NCCL_UNLIMITED. A communicator takes 6
 * MiB, and an NCCL channel 8 MiB when the communicator opens, and for its ring 12 MiB, or 20 MiB between hosts. In
 * all-to-alls, whose number of NCCL channels is rounded up to a power of two, it takes 12 MiB for each peer on the
 * host, and 4 MiB that all other peers share. Derived from NCCL 2.26 to 2.30 (channel.cc, transport/p2p.cc,
 * transport/net.cc) for hosts with NVSwitch.
 */
static inline double nccl_communicator_memory(int multiprocessors, int size, int local, int has_rings, int has_pairs) {
    int channels = multiprocessors == NCCL_UNLIMITED ? 24 : multiprocessors, pair_channels = 1, spans = local < size;
    while (pair_channels < channels) pair_channels *= 2;
    double mib = 6 + 8 * channels;
    if (has_rings) mib += (spans ? 20 : 12) * channels;
    if (has_pairs) mib += (12 * (local - 1) + (spans ? 4 : 0)) * pair_channels;
    return mib * (1 << 20);
}

/* Bytes that NCCL allocates on a rank's GPU for a step with this traffic. `sums`: NCCL sums in the reduce-scatters over
 * fsdp and dp_replicate. Every other reduce-scatter is an all-to-all, which connects every pair of members. Every
 * communicator has a ring, because nccl_check_members all-gathers over it. Each host is assumed to have eight GPUs and
 * consecutive ranks. `traffic` NULL: assume no all-to-alls. */
static inline double nccl_memory(const Mesh *mesh, const Traffic traffic[AXES][COLLECTIVES], int reductions_apart,
                                 int sums) {
    enum { GPUS_OF_HOST = 8 };
    int of_link = nccl_multiprocessors(mesh, NCCL_LINKS), of_reductions = nccl_multiprocessors(mesh, NCCL_REDUCTIONS);
    double bytes = nccl_link_communicators(mesh) * nccl_communicator_memory(of_link, 2, 2, 0, 1);
    for (int i = 0; i < NCCL_AXES; i++) {
        Axis axis = nccl_axes[i];
        int size = mesh_group_size(mesh, axis), local = 0; // members of the group that are on one host
        int is_apart = axis == AXIS_FSDP && reductions_apart;
        if (size == 1) continue;
        while (local < size && mesh_group_member(mesh, 0, axis, local) < GPUS_OF_HOST) local++;
        int sums_by_nccl = sums && (axis == AXIS_FSDP || axis == AXIS_DP_REPLICATE);
        int scatters = traffic && traffic[axis][REDUCE_SCATTER].calls && !sums_by_nccl;
        int pairs = (traffic && traffic[axis][ALL_TO_ALL].calls) || (scatters && !is_apart);
        bytes += nccl_communicator_memory(nccl_multiprocessors(mesh, axis), size, local, 1, pairs);
        if (is_apart) bytes += nccl_communicator_memory(of_reductions, size, local, 1, scatters);
    }
    return bytes;
}

/* How many multiprocessors NCCL occupies while the matmuls of forward compute, or those of backward: forward prefetches
 * weights, and sends and receives pipeline messages; backward also reduces gradients and overlaps tensor-parallel
 * collectives. At most a quarter of all. */
static inline int nccl_beside_matmuls(const Mesh *mesh, int reductions_apart, int backward, int multiprocessors) {
    int count = 0, reduces = backward && mesh->size[AXIS_DP_REPLICATE] * mesh_group_size(mesh, AXIS_FSDP) > 1;
    if (mesh->size[AXIS_PP] > 1) count += 2 * nccl_multiprocessors(mesh, NCCL_LINKS); // a receive from each neighbor
    if (reductions_apart && mesh_group_size(mesh, AXIS_FSDP) > 1) count += nccl_multiprocessors(mesh, AXIS_FSDP);
    if (reduces) count += nccl_multiprocessors(mesh, NCCL_REDUCTIONS);
    if (backward && mesh->size[AXIS_TP] > 1) count += nccl_multiprocessors(mesh, AXIS_TP);
    return (int)min_i64(count, multiprocessors / 4);
}

/* The number of the communicator for a collective that is started on `stream`. */
static inline int nccl_communicator_of(Axis axis, StreamKind stream, int reductions_apart) {
    int reduces = axis == AXIS_FSDP && stream == STREAM_REDUCE;
    return reduces && reductions_apart ? (int)NCCL_REDUCTIONS : (int)axis;
}

/* Bytes that are free in /dev/shm. A system without /dev/shm shares memory in another way: INFINITY. */
static inline double shared_memory_free(void) {
    struct statvfs info;
    if (statvfs("/dev/shm", &info)) return errno == ENOENT ? INFINITY : 0;
    return (double)info.f_bavail * (double)info.f_frsize;
}

#ifdef HAVE_NCCL
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 27, 3)
#error "NCCL 2.27.3 or newer is needed: install a newer one, or build with HAVE_NCCL= for one GPU"
#endif

/* The axis of a rank's i-th communicator. */
static inline Axis nccl_axis(int i) {
    if (i == NCCL_REDUCTIONS) return AXIS_FSDP;
    return i < AXES ? (Axis)i : AXIS_PP;
}

// ---------------------------------------------------------------------------
// what a host must have

/* Bytes of /dev/shm that suffice for NCCL, by its user guide (Troubleshooting, Shared memory: --shm-size=1g). Docker
 * gives a container 64 MB. */
#define NCCL_SHARED_MEMORY 1e9

/* Says what will make communication slow or impossible on this host, although the run can start. */
static inline void nccl_note_host(int local_ranks) {
    int driver = 0;
    double shared = shared_memory_free();
    char where[96] = "";
    if (run_hosts.count > 1) snprintf(where, sizeof where, " of host %s", host_of_rank(process_end.process)->name);
    cuda_check(cudaDriverGetVersion(&driver), "asking for the driver's version"); // 12020 for CUDA 12.2
    // NCCL_LAUNCH_ORDER_IMPLICIT lets collectives overlap only from 12.3 on (getImplicitOrder in NCCL's src/enqueue.cc)
    if (driver && driver < 12030)
        fprintf(
            stderr,
            "note: the NVIDIA driver%s supports CUDA %d.%d, and before 12.3 NCCL runs one collective after the other, "
            "so that less communication overlaps with computation: update the driver\n",
            where, driver / 1000, driver % 1000 / 10);
    if (local_ranks > 1 && shared < NCCL_SHARED_MEMORY)
        fprintf(
            stderr,
            "note: /dev/shm%s has %.2f GB free. NCCL puts the buffers of GPUs without peer-to-peer access there, and "
            "fails if it is full; in a container, raise it to 1 GB: docker run --shm-size=1g\n",
            where, shared / 1e9);
}

static inline void nccl_check_host(int gpu, int local_rank, int local_ranks, const Transport *hosts) {
    char name[256];
    int gpus = device_count();
    device_model(gpu, name, sizeof name);
    if (strstr(name, " MIG "))
        user_error("the GPU is a MIG instance (%s), and NCCL cannot connect MIG instances: start one rank, let ranks "
                   "share the instance with --ranks N --transport threads, or turn MIG off (nvidia-smi -mig 0)",
                   name);
    int may_be_hidden = gpus == 1 && strcmp(hosts->name, "threads"); // launchers can show each rank its own
    if (local_ranks > gpus && !may_be_hidden)
        user_error("%d ranks were started on a host with %d GPU%s, but NCCL needs one GPU per rank: start at most as "
                   "many ranks per host as it has GPUs, or share one GPU with --ranks N --transport threads",
                   local_ranks, gpus, gpus == 1 ? "" : "s");
    if (local_rank == 0) nccl_note_host(local_ranks);
}

// ---------------------------------------------------------------------------
// errors and aborting

static __thread Comm *nccl_own; // this thread's rank, for nccl_abort
static int nccl_exit_code;      // of this process, which is ending

static inline void nccl_exit(int signal_number) {
    (void)signal_number;
    _exit(nccl_exit_code);
}

/* The abort has taken more than a second. Ends the other processes, which may take as long, and then this one. */
static inline void nccl_is_stuck(int signal_number) {
    signal(SIGALRM, nccl_exit);
    alarm(1);
    if (process_end.abort_all) process_end.abort_all(nccl_exit_code);
    nccl_exit(signal_number);
}

/* Aborts this rank's communicators. An abort waits until the other processes of this host have closed their
 * connections, which a stopped one never does, so it gets one second. The message has been printed before. */
static inline void nccl_abort(int code) {
    if (!nccl_own) return;
    nccl_exit_code = code;
    signal(SIGALRM, nccl_is_stuck);
    alarm(1);
    ncclGroupStart();
    for (int i = 0; i < NCCL_COMMUNICATORS; i++)
        if (nccl_own->nccl[i]) ncclCommAbort(nccl_own->nccl[i]);
    ncclGroupEnd();
    alarm(0);
}

/* What NCCL says about its last error; it keeps one text for all communicators. */
static inline const char *nccl_last_error(void) { return ncclGetLastError(NULL); }

/* Ends the run. If another process dies, NCCL may report the broken connection before the watchdog of that process's
 * host has named the process, so the watchdogs get two seconds. */
__attribute__((noreturn)) static inline void nccl_failed(Comm *comm, ncclResult_t error, const char *what,
                                                         const char *of) {
    double start = seconds_now();
    char hint[256] = "";
    while ((error == ncclRemoteError || error == ncclSystemError) && !comm->heartbeats->threads &&
           seconds_now() - start < 2) {
        if (comm->hosts->answer_hosts) comm->hosts->answer_hosts(comm);
        usleep(20000);
    }
    if (error == ncclUnhandledCudaError) snprintf(hint, sizeof hint, "; %s", gpu_memory_text());
    if (error == ncclSystemError && shared_memory_free() < NCCL_SHARED_MEMORY)
        snprintf(hint, sizeof hint, "; /dev/shm has %.0f MB free, NCCL may need 1 GB: docker run --shm-size=1g",
                 shared_memory_free() / 1e6);
    const char *said = nccl_last_error();
    run_failure("%s: NCCL could not %s %s: %s%s%s%s%s. %s run again with NCCL_DEBUG=INFO, which prints the cause",
                rank_name(comm->rank), what, of, ncclGetErrorString(error), *said ? " (" : "", said, *said ? ")" : "",
                hint, error == ncclRemoteError ? "Look for the rank that ended first, or" : "To find out why,");
}

/* Asks for the state of a communicator that does not block: ncclInProgress until its last call has ended. A call may
 * return ncclSuccess although it is in progress, as ncclCommFinalize does in a group. */
static inline ncclResult_t nccl_state(ncclComm_t c, ncclResult_t returned) {
    ncclResult_t state = returned;
    if (returned != ncclSuccess && returned != ncclInProgress) return returned;
    ncclResult_t asked = ncclCommGetAsyncError(c, &state);
    return asked == ncclSuccess ? state : asked;
}

/* Waits until a call on communicator `c` has ended. The error message reads "NCCL could not WHAT OF". The first
 * operation of a kind ends only when all members have called it, so meanwhile this rank waits for collective `number`
 * on a line of the heartbeat table, and answers other hosts that search for a culprit. */
static inline void nccl_check(Comm *comm, ncclComm_t c, ncclResult_t result, int line, int64_t number, const char *what,
                              const char *of) {
    double start = seconds_now();
    RankState before = (RankState)comm->heartbeat->state;
    for (result = nccl_state(c, result); result == ncclInProgress; result = nccl_state(c, result)) {
        double waited = seconds_now() - start;
        if (waited < 1e-3) {
            sched_yield();
            continue;
        }
        usleep(100);
        if (comm->hosts->answer_hosts) comm->hosts->answer_hosts(comm);
        if (waited > 0.5 && comm->heartbeat->state != RANK_WAITING) rank_waits(comm->heartbeat, line, number, start);
        if (waited > wait_limit(comm)) wait_expired(comm, line, number, waited);
    }
    if (result != ncclSuccess) nccl_failed(comm, result, what, of);
    if (comm->news) wait_recovered(comm);
    if (comm->heartbeat->state != (int)before) rank_state(comm->heartbeat, before, seconds_now());
}

/* nccl_check of a call that opens, describes or closes the communicator of an axis. The axis' last collective, in which
 * its members have received the identifiers, stands for the call in the heartbeat table. */
static inline void nccl_check_axis(Comm *comm, ncclComm_t c, ncclResult_t result, Axis axis, const char *what) {
    nccl_check(comm, c, result, (int)axis, comm->heartbeat->started[axis], what, axis_names[axis]);
}

/* Ends the run if a communicator has failed. NCCL does not report every lost rank; the watchdog finds the others. */
static inline void nccl_check_errors(Comm *comm) {
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        ncclComm_t c = comm->nccl[i];
        ncclResult_t state = c ? nccl_state(c, ncclSuccess) : ncclSuccess;
        if (state != ncclSuccess && state != ncclInProgress)
            nccl_failed(comm, state, "reach the members of", axis_names[nccl_axis(i)]);
    }
}

// ---------------------------------------------------------------------------
// opening

/* What could share a GPU: the GPU, and for NCCL's tests of several ranks on one GPU the host that a rank claims to be.
 */
typedef struct {
    cudaUUID_t uuid;
    char host[64];
} NcclPlace;

/* Each rank must have a GPU of its own. Otherwise NCCL would hang, or refuse to start. Ranks whose NCCL_HOSTID differs
 * are hosts of their own to NCCL, which then communicates by sockets. */
static inline void nccl_check_gpus(Comm *comm) {
    cudaDeviceProp gpu;
    NcclPlace mine = ZERO, *all = new_array(NcclPlace, comm->mesh.world);
    const char *host = getenv("NCCL_HOSTID"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    cuda_check(cudaGetDeviceProperties(&gpu, comm->dev->gpu), "asking for the GPU's properties");
    mine.uuid = gpu.uuid;
    snprintf(mine.host, sizeof mine.host, "%s", host ? host : "");
    all_gather_now(comm, AXIS_WORLD, "GPUs", &mine, all, sizeof mine);
    for (int i = 0; i < comm->rank; i++)
        if (!memcmp(&all[i], &mine, sizeof mine))
            user_error(
                "ranks %d and %d share one GPU (%s), but NCCL needs a GPU for each rank. This process sees it as "
                "GPU %d with CUDA_VISIBLE_DEVICES=%s: let the launcher show each rank its own GPU, start as many "
                "ranks on a host as it has GPUs, or share one with --ranks N --transport threads",
                i, comm->rank, gpu.name, comm->dev->gpu, visible ? visible : "(not set)");
    free(all);
}

static inline void nccl_check_installation(void) {
    int version = 0;
    ncclGetVersion(&version);
    if (version < NCCL_VERSION(2, 27, 3))
        user_error(
            "the installed NCCL is %d.%d.%d, but 2.27.3 or newer is needed, because older ones cannot open several "
            "communicators at the same time: install a newer NCCL",
            version / 10000, version % 10000 / 100, version % 100);
    if (getenv("NCCL_COMM_ID"))
        user_error("NCCL_COMM_ID is set, so that all communicators would use one address: unset it; the program "
                   "distributes an address for each communicator itself");
}

/* The members of communicator `c` tell each other who they are; they must be the group's. */
static inline void nccl_check_members(Comm *comm, ncclComm_t c, Group *g) {
    int size = 0, rank = -1, mine = comm->rank;
    const char *name = axis_names[g->axis];
    nccl_check_axis(comm, c, ncclCommCount(c, &size), g->axis, "count the members of");
    nccl_check_axis(comm, c, ncclCommUserRank(c, &rank), g->axis, "find this rank in");
    if (size != g->size || rank != g->rank)
        run_failure(
            "%s: NCCL's communicator of %s has %d members, of which this rank is number %d; expected %d members "
            "and number %d. This is an error of the program: please report it",
            rank_name(comm->rank), name, size, rank, g->size, g->rank);
    size_t bytes = sizeof(int) * (size_t)size;
    int *members = (int *)checked_malloc(bytes), *gpu_members = comm->members;
    device_write(comm->dev, gpu_members + rank, &mine, sizeof mine);
    ncclResult_t met = ncclAllGather(gpu_members + rank, gpu_members, 1, ncclInt32, c, comm->dev->on.stream);
    nccl_check_axis(comm, c, met, g->axis, "meet the members of");
    device_read(comm->dev, members, gpu_members, bytes);
    for (int i = 0; i < size; i++) {
        int expected = comm->hosts->group_member(comm, g, i);
        if (members[i] == expected) continue;
        run_failure(
            "%s: member %d of %s is rank %d in NCCL's communicator, and rank %d in that of %s. This is an error of "
            "the program: please report it",
            rank_name(comm->rank), i, name, members[i], expected, comm->hosts->name);
    }
    free(members);
}

/* Makes `count` identifiers of communicators if makes != 0, and returns those of all members of the axis:
 * (size, count). */
static inline ncclUniqueId *nccl_gather_ids(Comm *comm, Axis axis, int count, int makes) {
    ncclUniqueId *mine = new_array(ncclUniqueId, count),
                 *all = new_array(ncclUniqueId, count * comm->groups[axis].size);
    for (int i = 0; i < count && makes; i++)
        if (ncclGetUniqueId(&mine[i]) != ncclSuccess)
            run_failure("%s: NCCL found no network interface for meeting the other ranks (%s): NCCL_SOCKET_IFNAME, now "
                        "%s, selects one; NCCL_DEBUG=INFO gives details",
                        rank_name(comm->rank), nccl_last_error(),
                        getenv("NCCL_SOCKET_IFNAME") ? getenv("NCCL_SOCKET_IFNAME") : "unset");
    all_gather_now(comm, axis, "NCCL's identifiers", mine, all, sizeof *mine * (size_t)count);
    free(mine);
    return all;
}

/* Begins to open communicator `which`, and does not wait for its other members. */
static inline void nccl_begin(Comm *comm, int which, const ncclUniqueId *id, int size, int rank, const char *name) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int most = nccl_multiprocessors(&comm->mesh, which);
    config.blocking = 0;
    config.commName = name;
    config.maxCTAs = most == NCCL_UNLIMITED ? NCCL_CONFIG_UNDEF_INT : most;
    ncclResult_t begun = ncclCommInitRankConfig(&comm->nccl[which], size, *id, rank, &config);
    if (!comm->nccl[which]) nccl_failed(comm, begun, "open the communicator of", name);
}

/* The number of the communicator for the n-th message of a link. */
static inline int nccl_link(Link link, int64_t n) {
    return (int)NCCL_LINKS + (int)NCCL_TURNS * (int)link + (int)(n % NCCL_TURNS);
}

/* Begins to open the communicators of the links to the neighbors in the pipeline. The sender makes the identifiers and
 * is rank 0. Two ranks are each other's next and previous, and have the links to the next rank alone. */
static inline void nccl_begin_links(Comm *comm) {
    const Group *g = &comm->groups[AXIS_PP];
    int next = (g->rank + 1) % g->size, previous = (g->rank + g->size - 1) % g->size;
    int directions = g->size > 2 ? 2 : 1, count = directions * (int)NCCL_TURNS;
    ncclUniqueId *ids = nccl_gather_ids(comm, AXIS_PP, count, 1); // (size, directions, NCCL_TURNS)
    for (int i = 0; i < count; i++) {
        int to_next = i < (int)NCCL_TURNS;
        Link sends = to_next ? LINK_TO_NEXT : LINK_TO_PREVIOUS,
             receives = to_next ? LINK_FROM_PREVIOUS : LINK_FROM_NEXT;
        nccl_begin(comm, nccl_link(sends, i), &ids[g->rank * count + i], 2, 0, "pp");
        nccl_begin(comm, nccl_link(receives, i), &ids[(to_next ? previous : next) * count + i], 2, 1, "pp");
    }
    free(ids);
}

/* Begins to open the communicators of an axis. */
static inline void nccl_begin_axis(Comm *comm, Axis axis) {
    const Group *g = &comm->groups[axis];
    int is_apart = axis == AXIS_FSDP && comm->dev->reductions_apart;
    ncclUniqueId *ids = nccl_gather_ids(comm, axis, 1 + is_apart, g->rank == 0);
    nccl_begin(comm, (int)axis, &ids[0], g->size, g->rank, axis_names[axis]);
    if (is_apart) nccl_begin(comm, NCCL_REDUCTIONS, &ids[1], g->size, g->rank, "fsdp reductions");
    free(ids);
}

/* Registers the communication buffers, with which NVLink SHARP works in place. It needs equal buffers on all members,
 * which tp's ranks need not have, as their parts of the model differ; cp's collectives use none of these buffers.
 * Registration makes every collective wait for the hosts, and NVLink SHARP has too few slots for many communicators
 * (NVIDIA/nccl issue 2077), so it is off unless the user turns it on. */
static inline void nccl_register(Comm *comm, int which) {
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    const Arena *buffers = &comm->dev->arenas[MEM_COMM];
    Axis axis = nccl_axis(which);
    if (!nvls || !strcmp(nvls, "0") || (axis != AXIS_FSDP && axis != AXIS_DP_REPLICATE)) return;
    ncclComm_t c = comm->nccl[which];
    ncclResult_t registered = ncclCommRegister(c, buffers->base, buffers->reserved, &comm->registered[which]);
    nccl_check_axis(comm, c, registered, axis, "register the memory of");
}

/* Prints a note if a rank has more streams than a GPU has hardware queues. NCCL has two for each communicator, and one
 * more. */
static inline void nccl_note_streams(const Comm *comm) {
    enum { QUEUES = 32 };
    int communicators = nccl_communicators(&comm->mesh, comm->dev->reductions_apart);
    int own = __builtin_popcount(comm->dev->streams_used), all = own + 2 * communicators + 1;
    if (comm->rank == 0 && all > QUEUES)
        fprintf(
            stderr,
            "note: a rank has %d streams, %d of its own and %d of NCCL's %d communicators, but a GPU has %d hardware "
            "queues: streams that share a queue can wait for each other; fewer parallel axes need fewer streams\n",
            all, own, all - own, communicators, (int)QUEUES);
}

/* Opens the communicators of all axes and links at once. Each is opened from an identifier that the hosts all-gather,
 * so there is no communicator of all ranks, and no order in which ranks must open theirs. */
static inline void nccl_open(Comm *comm) {
    comm->free_before_nccl = device_memory(comm->dev->gpu);
    nccl_check_installation();
    nccl_check_gpus(comm);
    nccl_own = comm;
    process_end.abort_collectives = nccl_abort;
    for (int i = 0; i < NCCL_AXES; i++)
        if (comm->groups[nccl_axes[i]].size > 1) nccl_begin_axis(comm, nccl_axes[i]);
    if (comm->groups[AXIS_PP].size > 1) nccl_begin_links(comm);
    for (int i = 0; i < NCCL_COMMUNICATORS; i++)
        if (comm->nccl[i])
            nccl_check_axis(comm, comm->nccl[i], ncclInProgress, nccl_axis(i), "open the communicator of");
    for (int i = 0; i < NCCL_LINKS; i++) {
        if (!comm->nccl[i]) continue;
        nccl_check_members(comm, comm->nccl[i], &comm->groups[nccl_axis(i)]);
        nccl_register(comm, i);
    }
    nccl_note_streams(comm);
    // with --deterministic matmuls count on all multiprocessors: another number could select another algorithm and bits
    for (int backward = 0; backward < 2 && !comm->dev->on.deterministic; backward++)
        comm->dev->left_to_nccl[backward] =
            nccl_beside_matmuls(&comm->mesh, comm->dev->reductions_apart, backward, comm->dev->on.multiprocessors);
}

/* Closes all communicators; those that have failed are aborted. Closing may wait for other ranks without a limit, so
 * the heartbeat table says that this rank waits. */
static inline void nccl_close(Comm *comm) {
    int is_closing[NCCL_COMMUNICATORS] = ZERO;
    ncclGroupStart();
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        ncclComm_t c = comm->nccl[i];
        is_closing[i] = c && nccl_state(c, ncclSuccess) == ncclSuccess;
        if (!is_closing[i]) continue;
        if (i < NCCL_LINKS && comm->registered[i]) ncclCommDeregister(c, comm->registered[i]);
        ncclCommFinalize(c);
    }
    ncclGroupEnd();
    for (int i = 0; i < NCCL_COMMUNICATORS; i++)
        if (is_closing[i]) nccl_check_axis(comm, comm->nccl[i], ncclSuccess, nccl_axis(i), "close the communicator of");
    rank_waits(comm->heartbeat, AXIS_WORLD, comm->heartbeat->started[AXIS_WORLD], seconds_now());
    for (int i = 0; i < NCCL_COMMUNICATORS; i++) {
        if (is_closing[i]) ncclCommDestroy(comm->nccl[i]);
        else if (comm->nccl[i]) ncclCommAbort(comm->nccl[i]);
        comm->nccl[i] = NULL;
    }
    rank_state(comm->heartbeat, RANK_COMPUTING, seconds_now());
    nccl_own = NULL;
}

/* Gives a channel the communicator of its link. */
static inline void nccl_channel_open(Comm *comm, Channel *c) {
    const Group *g = &comm->groups[c->axis];
    int next = (g->rank + 1) % g->size, previous = (g->rank + g->size - 1) % g->size;
    int forward = c->peer == (c->receives ? previous : next), backward = c->peer == (c->receives ? next : previous);
    if (!forward && !backward)
        run_failure("%s: a message between members %d and %d of the %d of %s, but over NCCL only neighbors have a "
                    "communicator. This is an error of the program: please report it",
                    rank_name(comm->rank), g->rank, c->peer, g->size, axis_names[c->axis]);
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

static inline void nccl_start(Comm *comm, Request *r) {
    static const char *const starts[COLLECTIVES] = {"start the all_gather of", "start the reduce_scatter of",
                                                    "start the all_to_all of", "start the send of",
                                                    "start the receive of"};
    Group *g = r->group;
    cudaStream_t stream = comm->dev->on.stream;
    ncclDataType_t type = r->dtype == DTYPE_BF16 ? ncclBfloat16 : ncclFloat32; // of what NCCL sums
    size_t count = r->bytes / dtype_size(r->dtype);
    int which = nccl_communicator_of(g->axis, r->stream, comm->dev->reductions_apart);
    ncclComm_t c = r->channel ? r->channel->nccl[r->number % NCCL_TURNS] : comm->nccl[which];
    int size = 0;
    ncclResult_t result = ncclCommCount(c, &size);
    if (result != ncclSuccess) nccl_failed(comm, result, "count the members of", axis_names[g->axis]);
    note_moving(comm, r);
    if (r->collective == ALL_GATHER) result = ncclAllGather(r->send, r->recv, r->bytes, ncclUint8, c, stream);
    else if (r->collective == SEND) result = ncclSend(r->send, r->bytes, ncclUint8, 1, c, stream);
    else if (r->collective == RECEIVE) result = ncclRecv(r->recv, r->bytes, ncclUint8, 0, c, stream);
    else if (r->collective == REDUCE_SCATTER && r->summed)
        result = ncclReduceScatter(r->send, r->recv, count, type, ncclSum, c, stream);
    else result = nccl_all_to_all(r, c, size, stream);
    nccl_check(comm, c, result, r->line, r->number, starts[r->collective], r->what);
    traffic_count(comm->traffic_measured, r, size);
}

// ---------------------------------------------------------------------------
// the first use of everything

static const char nccl_connecting[] = "connecting before the first step";

/* One collective of the kind that the step has on this axis, in the memory for collectives, which nothing uses yet. If
 * a member has less than 256 bytes for each part, this is left out, and NCCL connects in the first step. */
static inline void nccl_connect_axis(Comm *comm, Axis axis, Collective kind, int sums) {
    enum { MOST = 64 << 20 }; // bytes: large enough for the algorithm that NCCL chooses for a block's weights
    Device *dev = comm->dev;
    const Arena *a = &dev->arenas[MEM_COMM];
    Request r = ZERO;
    int size = comm->groups[axis].size;
    int64_t mine = (int64_t)(a->reserved - a->used), *of_members = new_array(int64_t, size), room = MOST;
    all_gather_now(comm, axis, "memory for the first collective", &mine, of_members, sizeof mine);
    for (int i = 0; i < size; i++) room = min_i64(room, of_members[i]);
    free(of_members);
    size_t part = (size_t)(room / 2 / size) & ~(size_t)255, all = part * (size_t)size;
    char *send = a->base + a->used, *recv = send + all;
    if (!part) return;
    StreamKind before =
        device_set_stream(dev, kind == REDUCE_SCATTER && axis == AXIS_FSDP ? STREAM_REDUCE : STREAM_GATHER);
    if (kind == ALL_GATHER) all_gather_start(comm, &r, axis, nccl_connecting, send, recv, part, DTYPE_BYTE);
    else if (kind == ALL_TO_ALL) all_to_all_start(comm, &r, axis, nccl_connecting, send, recv, part, DTYPE_BYTE);
    else if (sums && (axis == AXIS_FSDP || axis == AXIS_DP_REPLICATE))
        reduce_scatter_start(comm, &r, axis, nccl_connecting, send, recv, part / sizeof(float), DTYPE_F32);
    else reduce_scatter_pieces_start(comm, &r, axis, nccl_connecting, send, recv, part / sizeof(float), DTYPE_F32);
    comm_wait(comm, &r);
    device_zero(dev, send, 2 * all); // buffers that are allocated here later must start at zero
    device_synchronize(dev);
    device_set_stream(dev, before);
    request_close(&r);
}

/* A message of each of a channel's communicators. */
static inline void nccl_connect_channel(Comm *comm, const Channel *c) {
    for (int i = 0; i < NCCL_TURNS; i++) {
        Request r = ZERO;
        if (c->receives) receive_start(comm, &r, (Axis)c->axis, c->peer, nccl_connecting, comm->members, 1, DTYPE_F32);
        else send_start(comm, &r, (Axis)c->axis, c->peer, nccl_connecting, comm->members, 1, DTYPE_F32);
        comm_wait(comm, &r);
        request_close(&r);
    }
}

/* Messages on the channels of the dry run. Even members send first and odd ones receive first, so that every receive
 * has a neighbor that is sending. */
static inline void nccl_connect_links(Comm *comm, const Comm *dry_run) {
    const Group *g = &comm->groups[AXIS_PP];
    int next = (g->rank + 1) % g->size;
    for (int half = 0; half < 4; half++) { // messages forward, then back; of each, half of the members send
        int is_back = half / 2, receives = (half + g->rank) % 2;
        for (int i = 0; i < dry_run->num_channels; i++) {
            const Channel *c = &dry_run->channels[i];
            int goes_forward = (c->peer == next) == !c->receives || g->size == 2;
            if (c->receives == receives && goes_forward == !is_back) nccl_connect_channel(comm, c);
        }
    }
}

/* NCCL connects the members of a communicator when they first use it, for each kind of operation. Hosts wait for each
 * other then, and NCCL allocates buffers. Every kind that the step has is used here once, so that its first step is
 * like the others, and so that the memory of all is known before it. */
static inline void nccl_connect(Comm *comm, const Comm *dry_run, int sums) {
    static const Collective kinds[] = {ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL};
    int64_t events = comm->dev->rec.num_events;
    for (int i = 0; i < NCCL_AXES; i++)
        for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++)
            if (dry_run->traffic_started[nccl_axes[i]][kinds[k]].calls)
                nccl_connect_axis(comm, nccl_axes[i], kinds[k], sums);
    if (comm->groups[AXIS_PP].size > 1) nccl_connect_links(comm, dry_run);
    device_synchronize(comm->dev);
    timeline_truncate(comm->dev, events);
    comm_clear_ledger(comm);
    comm->library_memory = fmax(0, comm->free_before_nccl - device_memory(comm->dev->gpu));
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
    nccl_connect,      // gpus_connect
    nccl_last_error,   // last_error
    nccl_channel_open, // channel_open
    NULL,              // ask_hosts: the transport of the hosts does
    NULL,              // answer_hosts
    nccl_check_host,   // check_host
};
#endif

#endif
