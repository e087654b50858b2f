/* nccl.h: emulates NCCL 2.28.9: ranks are threads of one process, each with its own device.
 *
 * A collective is an operation of its stream, and meets those of the other ranks: when each is the head of its stream,
 * data moves; then each ends, in an order by the seed. A send meets its receive likewise. The first operation of a kind
 * on a communicator connects its members, for which their hosts meet, and takes memory. Whatever the library leaves
 * open is left to the seed: how long a communicator that does not block is in progress, whether a call is, and when it
 * is queued then. Sums go around the ring, and begin at another rank for each piece. A caller may rely on: what would
 * deadlock, or be wrong silently (README.md lists it), ends the process with a line that names the call and the other
 * rank's call.
 */
#ifndef CUDA_ON_CPU_NCCL_H
#define CUDA_ON_CPU_NCCL_H
#include "cuda_bf16.h"
#include "cuda_runtime.h"
#include <limits.h>

enum { NCCL_MAJOR = 2, NCCL_MINOR = 28, NCCL_PATCH = 9 };
#define NCCL_VERSION(x, y, z) ((x)*10000 + (y)*100 + (z))
#ifdef CUDA_ON_CPU_NCCL_HEADER // a build with the header of another version
#define NCCL_VERSION_CODE CUDA_ON_CPU_NCCL_HEADER
#else
#define NCCL_VERSION_CODE 22809
#endif
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR (-1)

typedef struct ncclComm *ncclComm_t;
struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
};
enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
};
enum ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 };
enum ncclDataType_t {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclNumTypes = 12
};
struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
};
#define NCCL_CONFIG_INITIALIZER                                                                                        \
    {                                                                                                                  \
        sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, INT_MIN, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN,        \
            INT_MIN, NULL, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN                                        \
    }

inline const char *ncclGetErrorString(ncclResult_t e) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)e < ncclNumResults ? texts[e] : "unknown result code";
}

namespace emu { // what both emulations have

/* MiB that a communicator takes with so many channels, as NCCL allocates on a host with NVSwitch: at once; for its
 * ring; for the connection of a pair. */
struct NcclMemory {
    size_t open, ring, pair;
};
inline NcclMemory nccl_memory_of(int most_channels) {
    size_t channels = most_channels == NCCL_CONFIG_UNDEF_INT ? 24 : (size_t)most_channels, pair_channels = 1;
    while (pair_channels < channels) pair_channels *= 2;
    return {(6 + choose(3)) * channels + 4 + choose(3), 12 * channels, 12 * pair_channels};
}

/* Takes MiB of the memory of a device; false: it has no room. */
inline bool nccl_takes(int device, size_t mib, size_t *taken) {
    size_t bytes = mib << 20, &used = machine().used[device];
    if (used + bytes > cuda_on_cpu.memory) return false;
    used += bytes;
    *taken += bytes;
    return true;
}

/* NVLink SHARP needs a multicast object for each communicator, and this switch has no slot for one. */
inline bool nvls_fails() {
    const char *s = getenv("NCCL_NVLS_ENABLE");
    return !cuda_on_cpu.nvls && !(s && !strcmp(s, "0"));
}
inline const char *const nvls_error = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152";
inline const char *const memory_error = "Cuda failure 2 'out of memory'";
} // namespace emu

inline ncclResult_t ncclGetVersion(int *version) {
    *version = cuda_on_cpu.nccl_version ? cuda_on_cpu.nccl_version : NCCL_VERSION_CODE;
    return ncclSuccess;
}

#ifdef CUDA_ON_CPU_PROCESSES
#include "nccl_processes.h"
#else
#include "collectives.h"

// ---------------------------------------------------------------------------
// the API: communicators

inline const char *ncclGetLastError(ncclComm_t) { return emu::nccl().error; }

inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    emu::NcclApi api("ncclGetUniqueId");
    memset(id, 0, sizeof *id);
    if (api.error) return api.error;
    snprintf(id->internal, sizeof id->internal, "CUDA on a CPU, communicator %llu",
             (unsigned long long)++emu::nccl().ids);
    emu::nccl().teams[id->internal] = nullptr;
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config,
                                           emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommInitRankConfig");
    *comm = nullptr;
    emu::Nccl &n = emu::nccl();
    ncclConfig_t own;
    if (api.error) return api.error;
    if (!emu::nccl_config(&own, config) || ranks < 1 || rank < 0 || rank >= ranks)
        return emu::refuse(ncclInvalidArgument, "ncclCommInitRankConfig: rank %d of %d, or its config", rank, ranks);
    id.internal[NCCL_UNIQUE_ID_BYTES - 1] = 0;
    auto it = n.teams.find(id.internal);
    if (it == n.teams.end())
        emu::fail(&at,
                  "ncclCommInitRankConfig: rank %d has an id that is not ncclGetUniqueId's: bring it from the rank "
                  "that made it",
                  rank);
    if (!it->second)
        it->second = std::make_shared<emu::Team>(emu::Team{
            "", std::vector<ncclComm_t>((size_t)ranks), std::vector<int>((size_t)ranks, -1), 0, 0, {}, {}, {}, {}});
    std::shared_ptr<emu::Team> team = it->second;
    if (team->members.size() != (size_t)ranks || team->devices[(size_t)rank] >= 0)
        emu::fail(&at,
                  "ncclCommInitRankConfig: rank %d of %d, but another call with this id had that rank, or other "
                  "numbers: %zu ranks",
                  rank, ranks, team->members.size());
    if (n.comms.empty()) {
        const char *s = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
        n.ordered = s && !strcmp(s, "1");
    }
    ncclComm_t made = emu::new_comm(own, rank, emu::device_now);
    emu::join(team, made);
    ncclResult_t e = emu::begin(
        api, made, "ncclCommInitRankConfig", at, [team] { return team->joined == team->members.size(); },
        [team] { emu::host_reaches(team->clock); });
    if (e == ncclSuccess || e == ncclInProgress) *comm = made;
    else emu::leave(made);
    return e;
}

/* *child is NULL until the parent is no longer in progress. For a parent that does not block the call is ncclSuccess
 * nevertheless, as in NCCL 2.26 to 2.30; by the seed it is ncclInProgress, since NCCL may change that. */
inline ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *child, ncclConfig_t *config,
                                  emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommSplit", parent, at);
    *child = nullptr;
    ncclConfig_t own;
    if (api.error) return api.error;
    if (!emu::nccl_config(&own, config ? config : &parent->config) || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
        return emu::refuse(ncclInvalidArgument, "ncclCommSplit: color %d, or its config", color);
    std::shared_ptr<emu::Team> team = parent->team;
    ncclComm_t made = color == NCCL_SPLIT_NOCOLOR ? nullptr : emu::new_comm(own, -1, parent->device);
    uint64_t number = parent->splits++;
    std::vector<emu::Team::Split> &all = team->splits[number];
    all.push_back(emu::Team::Split{made, parent->rank, color, key});
    team->clock = std::max(team->clock, emu::host_clock);
    if (all.size() == team->members.size()) {
        std::sort(all.begin(), all.end(), [](const emu::Team::Split &a, const emu::Team::Split &b) {
            return std::tie(a.color, a.key, a.rank) < std::tie(b.color, b.key, b.rank);
        });
        for (size_t i = 0, end; i < all.size(); i = end) {
            for (end = i; end < all.size() && all[end].color == all[i].color; end++) {}
            auto part = std::make_shared<emu::Team>(
                emu::Team{"", std::vector<ncclComm_t>(end - i), std::vector<int>(end - i, -1), 0, 0, {}, {}, {}, {}});
            for (size_t k = i; k < end && all[k].child; k++) {
                all[k].child->rank = (int)(k - i);
                emu::join(part, all[k].child);
            }
        }
    }
    ncclResult_t e = emu::begin(
        api, parent, "ncclCommSplit", at,
        [team, number] { return team->splits[number].size() == team->members.size(); },
        [team, child, made] {
            *child = made;
            emu::host_reaches(team->clock);
        });
    return e == ncclInProgress && emu::choose(8) ? ncclSuccess : e;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommGetAsyncError", comm, at, true);
    if (api.error) return api.error;
    std::shared_ptr<emu::NcclJob> job = comm->job;
    if (job && !comm->error && ((job->over && !job->over()) || job->polls-- > 0)) {
        emu::poll_one(api.lock);
        *state = ncclInProgress;
        return ncclSuccess;
    }
    if (comm->error) emu::drop_job(comm);
    comm->job = nullptr;
    if (job && job->then && !comm->error) {
        auto then = std::move(job->then);
        job->then = nullptr;
        then();
    }
    *state = comm->error;
    return ncclSuccess;
}

/* All that is queued has ended, and all other ranks have called it, or gone. In a group it begins at the group's end,
 * and ends when those of all its communicators have ended. */
inline ncclResult_t ncclCommFinalize(ncclComm_t comm, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommFinalize", comm, at);
    if (api.error) return api.error;
    comm->finalizing = true;
    emu::group_finalizes.push_back(comm);
    return emu::group_depth ? ncclSuccess : emu::finalize_group(api.lock);
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommDestroy", comm, at, true);
    if (api.error) return api.error;
    comm->finalizing = false; // it may have been, and be over
    emu::check_comm(comm, "ncclCommDestroy", at);
    if (const emu::NcclLaunch *l = emu::in_flight(comm))
        emu::fail(&at,
                  "ncclCommDestroy of communicator '%s', rank %d, while %s is in flight: wait for its stream, or abort",
                  comm->name.c_str(), comm->rank,
                  l->collectives.empty() ? "a call" : l->collectives[0]->of_device(comm->device)->text.c_str());
    emu::leave(comm);
    return ncclSuccess;
}

inline ncclResult_t ncclCommAbort(ncclComm_t comm, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommAbort", comm, at, true);
    if (!api.error) emu::leave(comm);
    return api.error;
}

#define CUDA_ON_CPU_NCCL(name, value)                                                                                  \
    inline ncclResult_t name(ncclComm_t comm, int *out, emu::Place at = emu::Place::here()) {                          \
        emu::NcclApi api(#name, comm, at);                                                                             \
        if (!api.error) *out = (value);                                                                                \
        return api.error;                                                                                              \
    }
CUDA_ON_CPU_NCCL(ncclCommCount, (int)comm->team->members.size())
CUDA_ON_CPU_NCCL(ncclCommUserRank, comm->rank)
CUDA_ON_CPU_NCCL(ncclCommCuDevice, comm->device)
#undef CUDA_ON_CPU_NCCL

// ---------------------------------------------------------------------------
// the API: memory

inline ncclResult_t ncclMemAlloc(void **p, size_t bytes) {
    emu::NcclApi api("ncclMemAlloc");
    *p = nullptr;
    if (api.error || !bytes) return api.error;
    if (emu::allocate(p, bytes, "device memory", cudaMemoryTypeDevice, bytes))
        return emu::refuse(ncclUnhandledCudaError, "ncclMemAlloc: %zu bytes: out of memory", bytes);
    emu::machine().memory[(char *)*p].nccl = true;
    return ncclSuccess;
}

/* Waits for nothing: what is queued, or registered, must be over. */
inline ncclResult_t ncclMemFree(void *p, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclMemFree");
    auto it = emu::find_memory(p);
    if (api.error || !p) return api.error;
    if (it == emu::machine().memory.end() || it->first != p || !it->second.nccl)
        emu::fail(&at, "ncclMemFree: %p is none of ncclMemAlloc's, but %s", p, emu::memory_name(p));
    for (cudaStream_t s : emu::machine().streams)
        if (s->device == it->second.device && !s->queue.empty())
            emu::fail(&at, "ncclMemFree while operations of device %d are queued: it does not wait for them",
                      s->device);
    for (ncclComm_t comm : emu::nccl().comms)
        for (auto &r : comm->registered)
            if (r.second.first >= it->first && r.second.first <= it->first + it->second.bytes)
                emu::fail(&at, "ncclMemFree of memory that is registered with communicator '%s', rank %d",
                          comm->name.c_str(), comm->rank);
    emu::release(p, false, true);
    return ncclSuccess;
}

inline ncclResult_t ncclCommRegister(ncclComm_t comm, void *p, size_t bytes, void **handle,
                                     emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommRegister", comm, at);
    *handle = nullptr;
    if (api.error) return api.error;
    if (!p || !bytes) return emu::refuse(ncclInvalidArgument, "ncclCommRegister: nothing to register");
    emu::check_range("the memory of ncclCommRegister", p, bytes, comm->device, at, false);
    *handle = malloc(1); // a value that nobody else has
    comm->registered[*handle] = {(char *)p, bytes};
    return ncclSuccess;
}

inline ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle, emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclCommDeregister", comm, at);
    if (api.error) return api.error;
    if (!comm->registered.erase(handle))
        emu::fail(&at, "ncclCommDeregister: communicator '%s', rank %d, has registered no such handle",
                  comm->name.c_str(), comm->rank);
    free(handle);
    return ncclSuccess;
}

// ---------------------------------------------------------------------------
// the API: communication

inline ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t s, emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclAllGather", emu::NCCL_GATHER, send, recv, count, type, ncclSum, 0, comm, s, at});
}
inline ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t s, emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclReduceScatter", emu::NCCL_SCATTER, send, recv, count, type, op, 0, comm, s, at});
}
inline ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t s, emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclAllReduce", emu::NCCL_REDUCE, send, recv, count, type, op, 0, comm, s, at});
}
inline ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t s, emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclBroadcast", emu::NCCL_BROADCAST, send, recv, count, type, ncclSum, root, comm, s, at});
}
inline ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t s, emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclSend", emu::NCCL_SEND, send, nullptr, count, type, ncclSum, peer, comm, s, at});
}
inline ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s,
                             emu::Place at = emu::Place::here()) {
    return emu::nccl_call(
        emu::NcclCall{"ncclRecv", emu::NCCL_RECV, nullptr, recv, count, type, ncclSum, peer, comm, s, at});
}

inline ncclResult_t ncclGroupStart() {
    emu::NcclApi api("ncclGroupStart");
    if (!api.error) emu::group_depth++;
    return api.error;
}

inline ncclResult_t ncclGroupEnd(emu::Place at = emu::Place::here()) {
    emu::NcclApi api("ncclGroupEnd");
    if (!emu::group_depth) emu::fail(&at, "ncclGroupEnd without ncclGroupStart");
    if (--emu::group_depth) return api.error;
    std::vector<emu::NcclCall> calls = std::move(emu::group_calls);
    if (!emu::group_finalizes.empty()) {
        if (!calls.empty()) emu::fail(&at, "a group that communicates and finalizes: the emulator takes either");
        return emu::finalize_group(api.lock);
    }
    ncclResult_t e = api.error ? api.error : emu::group_error;
    emu::group_calls.clear();
    emu::group_error = ncclSuccess;
    return e ? e : emu::issue(api.lock, calls);
}

// ---------------------------------------------------------------------------
// for tests

/* Bytes that a rank (-1: all) of the communicators of that name has received from others. */
inline uint64_t cuda_on_cpu_nccl_bytes(const char *name, int rank = -1) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    uint64_t sum = 0;
    for (auto &r : emu::nccl().received)
        if (r.first.first == name && (rank < 0 || r.first.second == rank)) sum += r.second;
    return sum;
}
#endif // between threads
#endif
