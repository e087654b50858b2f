/* nccl_processes.h: emulates NCCL between processes, over MPI, for the way a program starts under mpirun or srun.
 *
 * nccl.h includes it instead of its emulation between threads if CUDA_ON_CPU_PROCESSES is defined. Each process is a
 * rank with one device. It imitates NCCL's inconvenient behaviour: every call stays in progress for a while; the first
 * operation of a kind waits until all members have started it; destroying and aborting wait for the other processes of
 * the host; if a process dies, ranks on other hosts (NCCL_HOSTID) get ncclRemoteError and ranks on its own host get
 * nothing. It has no checks between ranks, and only the calls that this project uses.
 */
#ifndef CUDA_ON_CPU_NCCL_PROCESSES_H
#define CUDA_ON_CPU_NCCL_PROCESSES_H
#define OMPI_SKIP_MPICXX
#include <csignal>
#include <memory>
#include <mpi.h>
#include <sys/stat.h>

namespace emu {

struct NcclMember { // of a communicator, as its process introduces itself
    int rank, world, process;
    uint64_t processes; // which namespace of processes it is in
    cudaUUID_t gpu;
    char host[64];
};

struct NcclJob {                // what a communicator is in the middle of
    int polls;                  // so often ncclCommGetAsyncError says ncclInProgress yet
    std::function<bool()> over; // whether the other processes have come
    std::function<void()> then;
};

enum NcclMessage { NCCL_HELLO, NCCL_MEMBERS, NCCL_CAME, NCCL_DATA, NCCL_CLOSED, NCCL_MESSAGES }; // added to a tag

inline char nccl_error_text[256];

} // namespace emu

struct ncclComm {
    int rank, size, device, tag;
    std::string name;
    ncclResult_t error;
    std::vector<emu::NcclMember> members, hellos; // empty until all have come; those that the creator has heard of
    std::shared_ptr<emu::NcclJob> job;            // NULL: none
    std::deque<const void *> order;               // operations that are not over
    std::set<int> connected;                      // connections that this rank has come to: -1 the ring, or a rank
    std::set<std::pair<int, int>> came;           // connections and the ranks that have come to them
    std::set<int> closed;                         // ranks that have closed their connections
    emu::NcclMemory memory;
    size_t taken; // bytes of the device's memory
};

namespace emu {

inline std::set<ncclComm_t> &nccl_comms() {
    static std::set<ncclComm_t> *all = new std::set<ncclComm_t>();
    return *all;
}

inline ncclResult_t refuse(ncclResult_t e, const char *text, const char *more = "") {
    snprintf(nccl_error_text, sizeof nccl_error_text, "%s%s", text, more);
    return e;
}

// ---------------------------------------------------------------------------
// messages between the processes, which arrive whichever communicator is asked

template <typename T> inline void tell(ncclComm_t comm, int world, NcclMessage kind, const std::vector<T> &what) {
    auto *kept = new std::vector<T>(what); // it may be on its way until the process ends
    MPI_Request sent;
    MPI_Isend(kept->data(), (int)(kept->size() * sizeof(T)), MPI_BYTE, world, comm->tag + (int)kind, MPI_COMM_WORLD,
              &sent);
    MPI_Request_free(&sent);
}

template <typename T> inline std::vector<T> hear(ncclComm_t comm, NcclMessage kind) { // empty: nothing has come
    int has_come = 0, bytes = 0;
    MPI_Status from;
    std::vector<T> what;
    MPI_Iprobe(MPI_ANY_SOURCE, comm->tag + (int)kind, MPI_COMM_WORLD, &has_come, &from);
    if (!has_come) return what;
    MPI_Get_count(&from, MPI_BYTE, &bytes);
    what.resize((size_t)bytes / sizeof(T));
    MPI_Recv(what.data(), bytes, MPI_BYTE, from.MPI_SOURCE, comm->tag + (int)kind, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return what;
}

/* The members of a communicator have met. Two of them on one GPU of one host are an error. */
inline void have_met(ncclComm_t comm, std::vector<NcclMember> members) {
    comm->members.resize((size_t)comm->size);
    for (const NcclMember &m : members) comm->members[(size_t)m.rank] = m;
    for (const NcclMember &m : members)
        for (const NcclMember &other : members)
            if (m.rank < other.rank && !memcmp(&m.gpu, &other.gpu, sizeof m.gpu) && !strcmp(m.host, other.host))
                comm->error = refuse(ncclInvalidUsage, "Duplicate GPU detected on host ", m.host);
}

inline void hear_all() {
    for (ncclComm_t comm : nccl_comms()) {
        std::vector<NcclMember> member = hear<NcclMember>(comm, NCCL_HELLO);
        for (; !member.empty(); member = hear<NcclMember>(comm, NCCL_HELLO)) {
            comm->hellos.push_back(member[0]);
            if (comm->hellos.size() < (size_t)comm->size) continue;
            for (const NcclMember &m : comm->hellos) tell(comm, m.world, NCCL_MEMBERS, comm->hellos);
        }
        if (comm->members.empty()) {
            std::vector<NcclMember> all = hear<NcclMember>(comm, NCCL_MEMBERS);
            if (!all.empty()) have_met(comm, all);
        }
        std::vector<int> came = hear<int>(comm, NCCL_CAME), closed = hear<int>(comm, NCCL_CLOSED);
        for (; !came.empty(); came = hear<int>(comm, NCCL_CAME)) comm->came.insert({came[0], came[1]});
        for (; !closed.empty(); closed = hear<int>(comm, NCCL_CLOSED)) comm->closed.insert(closed[0]);
    }
}

inline uint64_t process_namespace() {
    struct stat it;
    return stat("/proc/self/ns/pid", &it) ? 0 : (uint64_t)it.st_ino;
}

/* A process that this one cannot see, because its host has process numbers of its own, counts as alive. */
inline bool is_dead(const NcclMember &m) {
    char path[64], state = 'Z';
    if (m.processes != process_namespace()) return false;
    snprintf(path, sizeof path, "/proc/%d/stat", m.process);
    if (FILE *f = fopen(path, "r")) {
        if (fscanf(f, "%*d %*[^)]) %c", &state) != 1) state = 'Z';
        fclose(f);
    }
    return state == 'Z' || state == 'X';
}

inline bool is_local(ncclComm_t comm, const NcclMember &m) {
    return !strcmp(m.host, comm->members[(size_t)comm->rank].host);
}

/* A connection over the network breaks when the process at its other end dies; memory of one host says nothing. */
inline void check_connections(ncclComm_t comm) {
    char peer[96];
    for (const NcclMember &m : comm->members) {
        if (is_local(comm, m) || !is_dead(m) || comm->closed.count(m.rank)) continue;
        snprintf(peer, sizeof peer, "%s<%d>", m.host, 40000 + m.rank);
        comm->error = refuse(ncclRemoteError, "Connection closed by remote peer ", peer);
    }
}

/* Closes this process's connections to the others, once. */
inline void close_connections(ncclComm_t comm) {
    if (!comm->closed.insert(comm->rank).second) return;
    for (const NcclMember &m : comm->members)
        if (m.rank != comm->rank) tell(comm, m.world, NCCL_CLOSED, std::vector<int>{comm->rank});
}

/* Waits, without a limit, until the other processes of this host have closed their connections, or are dead. */
inline void wait_for_local(ncclComm_t comm) {
    close_connections(comm);
    for (const NcclMember &m : comm->members)
        while (m.rank != comm->rank && is_local(comm, m) && !comm->closed.count(m.rank) && !is_dead(m)) {
            hear_all();
            usleep(100);
        }
}

inline void forget(ncclComm_t comm) {
    machine().used[comm->device] -= comm->taken;
    nccl_comms().erase(comm);
    delete comm;
}

// ---------------------------------------------------------------------------
// operations of streams

enum NcclMove { NCCL_GATHER, NCCL_SCATTER, NCCL_SEND, NCCL_RECV };
struct NcclPart {
    NcclMove move;
    const void *send;
    void *recv;
    size_t bytes;        // of a rank's part
    ncclDataType_t type; // of what is summed
    int peer;
    std::vector<char> out, in; // in host memory, as MPI sends and receives it
    std::vector<MPI_Request> requests;
};

inline size_t nccl_bytes(ncclDataType_t type) {
    if (type == ncclBfloat16) return 2;
    return type == ncclUint8 || type == ncclInt8 ? 1 : 4;
}

/* sum (count) = the sum of the ranks' parts (ranks, count), in the order of ranks. */
template <typename T> inline void add_parts(T *sum, const T *parts, size_t count, int ranks) {
    for (size_t i = 0; i < count; i++) {
        sum[i] = parts[i];
        for (int r = 1; r < ranks; r++) sum[i] = T(float(sum[i]) + float(parts[(size_t)r * count + i]));
    }
}

struct ProcessLaunch : Rendezvous { // calls of one communicator that are issued together
    ncclComm_t comm;
    std::vector<NcclPart> parts;
    bool begun = false, over = false;

    /* Part p of what is sent goes to member p, and part p of what is received comes from it. */
    void exchange(NcclPart &p, int member, size_t from, size_t to) {
        int n = (int)p.bytes, tag = comm->tag + (int)NCCL_DATA, world = comm->members[(size_t)member].world;
        MPI_Request r[2];
        if (p.move != NCCL_SEND) MPI_Irecv(p.in.data() + to, n, MPI_BYTE, world, tag, MPI_COMM_WORLD, &r[0]);
        if (p.move != NCCL_RECV) MPI_Isend(p.out.data() + from, n, MPI_BYTE, world, tag, MPI_COMM_WORLD, &r[1]);
        if (p.move != NCCL_SEND) p.requests.push_back(r[0]);
        if (p.move != NCCL_RECV) p.requests.push_back(r[1]);
    }
    void begin(NcclPart &p) {
        size_t n = p.bytes, all = n * (size_t)comm->size;
        const char *from = (const char *)p.send;
        if (p.move != NCCL_RECV) p.out.assign(from, from + (p.move == NCCL_SCATTER ? all : n));
        if (p.move != NCCL_SEND) p.in.resize(p.move == NCCL_RECV ? n : all);
        if (p.move == NCCL_SEND || p.move == NCCL_RECV) exchange(p, p.peer, 0, 0);
        for (int m = 0; m < comm->size && (p.move == NCCL_GATHER || p.move == NCCL_SCATTER); m++)
            exchange(p, m, p.move == NCCL_SCATTER ? (size_t)m * n : 0, (size_t)m * n);
    }
    void end_part(NcclPart &p) {
        size_t count = p.bytes / nccl_bytes(p.type);
        if (p.move == NCCL_SCATTER && p.type == ncclBfloat16)
            add_parts((__nv_bfloat16 *)p.recv, (const __nv_bfloat16 *)p.in.data(), count, comm->size);
        else if (p.move == NCCL_SCATTER) add_parts((float *)p.recv, (const float *)p.in.data(), count, comm->size);
        else if (!p.in.empty()) memcpy(p.recv, p.in.data(), p.in.size());
    }
    bool can_go_on() override {
        if (!begun) return comm->order.front() == this;
        int all = 1;
        for (NcclPart &p : parts)
            for (MPI_Request &r : p.requests) {
                int done = 1;
                PMPI_Test(&r, &done, MPI_STATUS_IGNORE);
                all &= done;
            }
        return over = all;
    }
    bool go_on() override {
        if (!begun) {
            begun = true;
            for (NcclPart &p : parts) begin(p);
            return false;
        }
        if (!over) return false;
        for (NcclPart &p : parts) end_part(p);
        comm->order.pop_front();
        return true;
    }
    std::string waits() const override { return "an operation of communicator '" + comm->name + "' waits"; }
};

// ---------------------------------------------------------------------------
// calls

inline thread_local std::vector<std::pair<ncclComm_t, NcclPart>> group_parts;
inline thread_local std::vector<ncclComm_t> group_finalizes;
inline thread_local cudaStream_t group_stream;

typedef std::vector<std::pair<ncclComm_t, NcclPart>> NcclParts;

inline void queue_parts(NcclParts parts, cudaStream_t stream) {
    while (!parts.empty()) {
        auto launch = std::make_shared<ProcessLaunch>();
        launch->comm = parts[0].first;
        for (auto &p : parts)
            if (p.first == launch->comm) launch->parts.push_back(p.second);
        std::erase_if(parts, [&](auto &p) { return p.first == launch->comm; });
        launch->comm->order.push_back(launch.get());
        enqueue(stream, 0, nullptr).meets = launch;
    }
}

inline int connection_of(const NcclPart &p) { return p.move == NCCL_GATHER || p.move == NCCL_SCATTER ? -1 : p.peer; }

/* Comes to the connections that these calls are the first to use. Returns whether there are any. */
inline ncclResult_t connect(const NcclParts &parts) {
    ncclResult_t e = ncclSuccess;
    for (auto &p : parts) {
        ncclComm_t c = p.first;
        int way = connection_of(p.second);
        if (way == c->rank || c->size == 1 || !c->connected.insert(way).second) continue;
        if (!nccl_takes(c->device, way < 0 ? c->memory.ring : c->memory.pair, &c->taken))
            return c->error = refuse(ncclUnhandledCudaError, memory_error);
        for (const NcclMember &m : c->members)
            if (m.rank != c->rank && (way < 0 || way == m.rank))
                tell(c, m.world, NCCL_CAME, std::vector<int>{way < 0 ? -1 : c->rank, c->rank});
        e = ncclInProgress;
    }
    return e;
}

inline bool all_connected(const NcclParts &parts) {
    for (auto &p : parts) {
        int way = connection_of(p.second);
        for (const NcclMember &m : p.first->members)
            if (m.rank != p.first->rank && (way < 0 || way == m.rank) && !p.first->came.count({way, m.rank}))
                return false;
    }
    return true;
}

/* CUDA_ON_CPU_NCCL_SIGNAL=RANK:N:SIGNAL: that rank of the world sends itself a signal at its N-th operation, or with 0
 * when it opens its first communicator. */
inline void raise_signal(int now) {
    static int world = -1, operations;
    int rank, n, signal_number;
    const char *s = getenv("CUDA_ON_CPU_NCCL_SIGNAL");
    if (world < 0) MPI_Comm_rank(MPI_COMM_WORLD, &world);
    operations += now;
    if (s && sscanf(s, "%d:%d:%d", &rank, &n, &signal_number) == 3 && rank == world && operations == n)
        raise(signal_number);
}

inline ncclResult_t issue_parts() {
    NcclParts parts = std::move(group_parts);
    group_parts.clear();
    if (parts.empty()) return ncclSuccess;
    raise_signal(1);
    ncclResult_t connected = connect(parts);
    if (connected == ncclUnhandledCudaError) return connected;
    cudaStream_t stream = group_stream;
    auto job = std::make_shared<NcclJob>(NcclJob{(int)choose(4), [parts] { return all_connected(parts); },
                                                 [parts, stream] { queue_parts(parts, stream); }});
    for (auto &p : parts) p.first->job = job;
    return ncclInProgress;
}

inline ncclResult_t finalize_group() {
    std::vector<ncclComm_t> comms = std::move(group_finalizes);
    group_finalizes.clear();
    auto job = std::make_shared<NcclJob>(NcclJob{1 + (int)choose(3),
                                                 [comms] {
                                                     bool all = true;
                                                     for (ncclComm_t c : comms) all &= c->order.empty();
                                                     return all;
                                                 },
                                                 [comms] {
                                                     for (ncclComm_t c : comms) close_connections(c);
                                                 }});
    for (ncclComm_t c : comms) c->job = job;
    return ncclInProgress;
}

/* May a call use the communicator now? A call while another is in progress is an error that stays. */
inline ncclResult_t check_comm(ncclComm_t comm, const char *api) {
    ncclResult_t injected = (ncclResult_t)Call::injected(api);
    if (injected) return injected;
    if (!comm) return refuse(ncclInvalidArgument, api, ": the communicator is NULL");
    if (comm->job)
        comm->error = refuse(ncclInvalidArgument,
                             "Attempt to use communicator before the previous operation returned ncclSuccess: ", api);
    return comm->error;
}

inline ncclResult_t nccl_part(NcclMove move, const void *send, void *recv, size_t count, ncclDataType_t type, int peer,
                              ncclComm_t comm, cudaStream_t s) {
    static const char *const names[] = {"ncclAllGather", "ncclReduceScatter", "ncclSend", "ncclRecv"};
    std::unique_lock<std::mutex> lock(machine().lock);
    if (ncclResult_t e = check_comm(comm, names[move])) return e;
    group_parts.push_back({comm, NcclPart{move, send, recv, count * nccl_bytes(type), type, peer, {}, {}, {}}});
    group_stream = s;
    return group_depth ? ncclSuccess : issue_parts();
}

} // namespace emu

/* A GPU goes on while its host waits for other hosts; here its queues do when the host polls MPI. */
extern "C" inline int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
    if (emu::machine().polls && !emu::group_depth) {
        std::unique_lock<std::mutex> lock(emu::machine().lock);
        emu::hear_all();
        emu::poll_one(lock);
    }
    return PMPI_Test(request, done, status);
}

// ---------------------------------------------------------------------------
// the API

inline const char *ncclGetLastError(ncclComm_t) { return emu::nccl_error_text; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    char host[64] = "";
    int world;
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    gethostname(host, sizeof host - 1);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "CUDA on a CPU, rank %d, number %d, %s, process %d", world, made++,
             host, (int)getpid());
    return ncclSuccess;
}

/* Ranks that have the same id meet at the process that made it. */
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    cudaDeviceProp gpu;
    cudaGetDeviceProperties(&gpu, emu::device_now);
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    unsigned hash = 2166136261u;
    int creator = -1;
    *comm = nullptr;
    if (ncclResult_t injected = (ncclResult_t)emu::Call::injected("ncclCommInitRankConfig")) return injected;
    emu::raise_signal(0);
    if (config->blocking) emu::fail(nullptr, "ncclCommInitRankConfig: between processes no communicator blocks here");
    if (sscanf(id.internal, "CUDA on a CPU, rank %d", &creator) != 1)
        emu::fail(nullptr,
                  "ncclCommInitRankConfig: rank %d has an id that is not ncclGetUniqueId's: bring it from the "
                  "rank that made it",
                  rank);
    for (char c : id.internal) hash = (hash ^ (unsigned char)c) * 16777619u;
    ncclComm_t c = new ncclComm{rank,
                                ranks,
                                emu::device_now,
                                1000 + (int)(hash % (1u << 24)) * emu::NCCL_MESSAGES,
                                config->commName ? config->commName : "unnamed",
                                ncclSuccess,
                                {},
                                {},
                                nullptr,
                                {},
                                {},
                                {},
                                {},
                                emu::nccl_memory_of(config->maxCTAs),
                                0};
    emu::NcclMember me = {rank, 0, (int)getpid(), emu::process_namespace(), gpu.uuid, ""};
    const char *host = getenv("NCCL_HOSTID");
    MPI_Comm_rank(MPI_COMM_WORLD, &me.world);
    if (host) snprintf(me.host, sizeof me.host, "%s", host);
    else gethostname(me.host, sizeof me.host - 1);
    if (emu::nvls_fails()) c->error = emu::refuse(ncclUnhandledCudaError, emu::nvls_error);
    else if (!emu::nccl_takes(c->device, c->memory.open, &c->taken))
        c->error = emu::refuse(ncclUnhandledCudaError, emu::memory_error);
    emu::machine().polls = true;
    emu::nccl_comms().insert(c);
    emu::tell(c, creator, emu::NCCL_HELLO, std::vector<emu::NcclMember>{me});
    c->job = std::make_shared<emu::NcclJob>(
        emu::NcclJob{1 + (int)emu::choose(3), [c] { return !c->members.empty(); }, [] {}});
    *comm = c;
    return ncclInProgress;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    if (!comm) return emu::refuse(ncclInvalidArgument, "ncclCommGetAsyncError: the communicator is NULL");
    emu::hear_all();
    if (!comm->error) emu::check_connections(comm);
    std::shared_ptr<emu::NcclJob> job = comm->job;
    *state = comm->error;
    if (comm->error) return ncclSuccess;
    if (job && (!job->over() || job->polls-- > 0)) {
        if (!emu::group_depth) emu::poll_one(lock);
        *state = ncclInProgress;
        return ncclSuccess;
    }
    comm->job = nullptr;
    if (job && job->then) {
        auto then = std::move(job->then);
        job->then = nullptr;
        then();
    }
    return ncclSuccess;
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    if (ncclResult_t e = emu::check_comm(comm, "ncclCommCount")) return e;
    *count = comm->size;
    return ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    if (ncclResult_t e = emu::check_comm(comm, "ncclCommUserRank")) return e;
    *rank = comm->rank;
    return ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (ncclResult_t e = emu::check_comm(comm, "ncclCommFinalize")) return e;
    emu::group_finalizes.push_back(comm);
    return emu::group_depth ? ncclSuccess : emu::finalize_group();
}
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclInvalidArgument;
    if (!comm->members.empty()) emu::wait_for_local(comm);
    emu::nccl_comms().erase(comm); // what it has queued stays, and so does the handle
    return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (ncclResult_t e = emu::check_comm(comm, "ncclCommDestroy"))
        emu::fail(nullptr, "ncclCommDestroy of communicator '%s' in state %d: abort it instead",
                  comm ? comm->name.c_str() : "NULL", (int)e);
    if (!comm->order.empty())
        emu::fail(nullptr, "ncclCommDestroy of communicator '%s' with an operation in flight", comm->name.c_str());
    emu::wait_for_local(comm);
    emu::forget(comm);
    return ncclSuccess;
}

inline ncclResult_t ncclMemAlloc(void **p, size_t bytes) {
    return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
inline ncclResult_t ncclMemFree(void *p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
inline ncclResult_t ncclCommRegister(ncclComm_t comm, void *p, size_t, void **handle) {
    *handle = p;
    return emu::check_comm(comm, "ncclCommRegister");
}
inline ncclResult_t ncclCommDeregister(ncclComm_t comm, void *) { return emu::check_comm(comm, "ncclCommDeregister"); }

inline ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t s) {
    return emu::nccl_part(emu::NCCL_GATHER, send, recv, count, type, 0, comm, s);
}
inline ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t,
                                      ncclComm_t comm, cudaStream_t s) {
    return emu::nccl_part(emu::NCCL_SCATTER, send, recv, count, type, 0, comm, s);
}
inline ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t s) {
    return emu::nccl_part(emu::NCCL_SEND, send, nullptr, count, type, peer, comm, s);
}
inline ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
    return emu::nccl_part(emu::NCCL_RECV, nullptr, recv, count, type, peer, comm, s);
}
inline ncclResult_t ncclGroupStart() {
    emu::group_depth++;
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    if (--emu::group_depth) return ncclSuccess;
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    return emu::group_finalizes.empty() ? emu::issue_parts() : emu::finalize_group();
}
#endif
