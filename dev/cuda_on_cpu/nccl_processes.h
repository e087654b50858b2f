/* nccl_processes.h: emulates NCCL between processes, over MPI, for the way a program starts under mpirun or srun.
 *
 * nccl.h includes it instead of its emulation between threads if CUDA_ON_CPU_PROCESSES is defined. Each process is a
 * rank with one device. What a program does to meet is checked: all ranks must have one rank's unique id, and their
 * numbers must be the communicator's. A collective is an operation of its stream; those of a communicator run one after
 * the other. The checks of nccl.h that compare the calls of several ranks are not here, nor what this project does not
 * call.
 */
#ifndef CUDA_ON_CPU_NCCL_PROCESSES_H
#define CUDA_ON_CPU_NCCL_PROCESSES_H
#define OMPI_SKIP_MPICXX
#include <mpi.h>

struct ncclComm {
    MPI_Comm mpi;
    int rank, size, device, polls; // polls: so often ncclCommGetAsyncError says ncclInProgress yet
    std::string name;
    ncclConfig_t config;
    std::deque<const void *> order; // operations that are not over
};

namespace emu {

enum NcclMove { NCCL_GATHER, NCCL_SCATTER, NCCL_SEND, NCCL_RECV };
struct NcclPart {
    NcclMove move;
    const void *send;
    void *recv;
    size_t bytes;        // of a rank's part
    ncclDataType_t type; // of what is summed
    int peer;
    std::vector<char> out, in; // in host memory, as MPI sends and receives it
    MPI_Request request;
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

    void begin(NcclPart &p) {
        size_t n = p.bytes, all = n * (size_t)comm->size;
        int count = (int)n;
        const char *from = (const char *)p.send;
        if (p.move != NCCL_RECV) p.out.assign(from, from + (p.move == NCCL_SCATTER ? all : n));
        if (p.move != NCCL_SEND) p.in.resize(p.move == NCCL_RECV ? n : all);
        if (p.move == NCCL_GATHER)
            MPI_Iallgather(p.out.data(), count, MPI_BYTE, p.in.data(), count, MPI_BYTE, comm->mpi, &p.request);
        if (p.move == NCCL_SCATTER)
            MPI_Ialltoall(p.out.data(), count, MPI_BYTE, p.in.data(), count, MPI_BYTE, comm->mpi, &p.request);
        if (p.move == NCCL_SEND) MPI_Isend(p.out.data(), count, MPI_BYTE, p.peer, 0, comm->mpi, &p.request);
        if (p.move == NCCL_RECV) MPI_Irecv(p.in.data(), count, MPI_BYTE, p.peer, 0, comm->mpi, &p.request);
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
        for (NcclPart &p : parts) {
            int done = 1;
            PMPI_Test(&p.request, &done, MPI_STATUS_IGNORE);
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

inline thread_local std::vector<std::pair<ncclComm_t, NcclPart>> group_parts;
inline thread_local cudaStream_t group_stream;

inline ncclResult_t issue_parts() {
    while (!group_parts.empty()) {
        auto launch = std::make_shared<ProcessLaunch>();
        launch->comm = group_parts[0].first;
        for (auto &p : group_parts)
            if (p.first == launch->comm) launch->parts.push_back(p.second);
        std::erase_if(group_parts, [&](auto &p) { return p.first == launch->comm; });
        std::unique_lock<std::mutex> lock(machine().lock);
        launch->comm->order.push_back(launch.get());
        enqueue(group_stream, 0, nullptr).meets = launch;
    }
    return ncclSuccess;
}

inline ncclResult_t nccl_part(NcclMove move, const void *send, void *recv, size_t count, ncclDataType_t type, int peer,
                              ncclComm_t comm, cudaStream_t s) {
    group_parts.push_back({comm, NcclPart{move, send, recv, count * nccl_bytes(type), type, peer, {}, {}, {}}});
    group_stream = s;
    return group_depth ? ncclSuccess : issue_parts();
}

inline ncclResult_t made_of(MPI_Comm mpi, ncclComm_t *comm, const ncclConfig_t *config) {
    ncclComm_t c = new ncclComm();
    c->mpi = mpi;
    MPI_Comm_rank(mpi, &c->rank);
    MPI_Comm_size(mpi, &c->size);
    c->device = device_now;
    c->name = config->commName ? config->commName : "unnamed";
    c->config = *config;
    c->polls = config->blocking == 0 ? (int)choose(3) : 0;
    machine().polls = true;
    *comm = c;
    return config->blocking == 0 ? ncclInProgress : ncclSuccess;
}

} // namespace emu

/* A GPU goes on while its host waits for other hosts; here its queues do when the host polls MPI. */
extern "C" inline int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
    if (emu::machine().polls && !emu::group_depth) {
        std::unique_lock<std::mutex> lock(emu::machine().lock);
        emu::poll_one(lock);
    }
    return PMPI_Test(request, done, status);
}

// ---------------------------------------------------------------------------
// the API

inline const char *ncclGetErrorString(ncclResult_t e) { return e == ncclSuccess ? "no error" : "an error"; }
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
inline ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "CUDA on a CPU, %s, process %d", host, (int)getpid());
    return ncclSuccess;
}

/* Ranks that have the same id meet. */
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    MPI_Comm mpi;
    unsigned colour = 2166136261u;
    int size, me;
    for (char c : id.internal) colour = (colour ^ (unsigned char)c) * 16777619u;
    MPI_Comm_split(MPI_COMM_WORLD, (int)(colour >> 1), rank, &mpi);
    MPI_Comm_size(mpi, &size);
    MPI_Comm_rank(mpi, &me);
    if (strncmp(id.internal, "CUDA on a CPU, ", 15) || size != ranks || me != rank)
        emu::fail(
            nullptr,
            "ncclCommInitRankConfig: rank %d of %d has the id '%.60s', which %d ranks have: bring it from the rank "
            "that made it to all others",
            rank, ranks, id.internal, size);
    return emu::made_of(mpi, comm, config);
}
inline ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
    MPI_Comm mpi;
    MPI_Comm_split(parent->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    *child = nullptr;
    return mpi == MPI_COMM_NULL ? ncclSuccess : emu::made_of(mpi, child, config);
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    *state = comm && comm->polls-- > 0 ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    *count = comm->size;
    return ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm->order.empty())
        emu::fail(nullptr, "ncclCommDestroy of communicator '%s' with an operation in flight", comm->name.c_str());
    MPI_Comm_free(&comm->mpi);
    delete comm;
    return ncclSuccess;
}

inline ncclResult_t ncclMemAlloc(void **p, size_t bytes) {
    return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
inline ncclResult_t ncclMemFree(void *p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
inline ncclResult_t ncclCommRegister(ncclComm_t, void *p, size_t, void **handle) {
    *handle = p;
    return ncclSuccess;
}
inline ncclResult_t ncclCommDeregister(ncclComm_t, void *) { return ncclSuccess; }

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
inline ncclResult_t ncclGroupEnd() { return --emu::group_depth ? ncclSuccess : emu::issue_parts(); }
#endif
