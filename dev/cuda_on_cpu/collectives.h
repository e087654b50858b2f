/* collectives.h: what ranks do together behind nccl.h: their communicators, calls that meet, data that moves.
 *
 * A call becomes a launch, an operation of its stream; calls that meet (the n-th collective of a communicator, the n-th
 * send and receive of a pair of ranks) are one exchange, which runs when the launch of each part has begun: it is the
 * head of its stream, and those before it on its device let it (launches_begin). A launch ends when all its exchanges
 * have run. Owns: the one Nccl of the process, under the machine's lock.
 */
#ifndef CUDA_ON_CPU_COLLECTIVES_H
#define CUDA_ON_CPU_COLLECTIVES_H

namespace emu {

enum NcclKind { NCCL_GATHER, NCCL_SCATTER, NCCL_REDUCE, NCCL_BROADCAST, NCCL_SEND, NCCL_RECV };

struct NcclCall { // as it was made
    const char *api;
    NcclKind kind;
    const void *send;
    void *recv;
    size_t count;
    int type, op, peer; // peer: the other rank, or the root
    ncclComm_t comm;
    cudaStream_t stream;
    Place at;
};

struct Team;
struct NcclLaunch;

struct Part {
    NcclCall call;
    int rank, device;
    NcclLaunch *launch;
    std::string text;
};

struct Collective { // a collective, or a send and its receive
    std::shared_ptr<Team> team;
    size_t wanted; // parts
    std::vector<Part> parts;
    bool moved, dead; // dead: a rank has aborted it
    double end;       // us, by the logical clock
    const Part *of_device(int device) const {
        for (const Part &p : parts)
            if (p.device == device) return &p;
        return nullptr;
    }
};

struct NcclLaunch : Rendezvous { // calls of one communicator that one rank issues together
    ncclComm_t comm;
    Team *team;
    cudaStream_t stream;
    bool lost = false, aborted = false, begun = false;
    double start = 0; // when it has begun: us, by the logical clock
    std::vector<std::shared_ptr<Collective>> collectives;
    ~NcclLaunch() override;
    bool can_go_on() override;
    bool go_on() override;
    std::string waits() const override;
};

struct NcclJob { // what a communicator is in the middle of
    const char *api;
    int polls;                  // so often ncclCommGetAsyncError says ncclInProgress yet
    std::function<bool()> over; // nothing: nobody else is waited for
    std::function<void()> then;
    std::vector<NcclCall> calls; // to be queued then
};

struct Team { // the ranks of one communicator
    std::string name;
    std::vector<ncclComm_t> members; // by rank; NULL: has not come yet, or has gone
    std::vector<int> devices;
    size_t joined;
    double clock;                                                // us: when the last one came
    std::map<uint64_t, std::shared_ptr<Collective>> collectives; // by number: those that some rank has yet to issue
    std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Collective>>>
        halves; // by sender, receiver, kind: those without the other
    struct Split {
        ncclComm_t child;
        int rank, color, key;
    };
    std::map<uint64_t, std::vector<Split>> splits;           // by number
    std::map<std::pair<int, int>, std::set<int>> connecting; // by connection: the ranks whose hosts have come to it
};

struct World {
    int rank, communicators;
    uint64_t calls;
}; // of a device: its rank in its first communicator, all its calls

struct Nccl { // under the machine's lock
    std::set<ncclComm_t> comms;
    std::map<std::string, std::shared_ptr<Team>> teams; // by unique id
    uint64_t ids;
    std::map<int, World> worlds; // by device
    std::map<int, std::vector<NcclLaunch *>>
        launches; // by device: those that are not over, in the order of the program
    std::map<std::pair<int, int>, std::vector<std::shared_ptr<Collective>>>
        issued; // by devices: what the first has issued, and the second has yet to
    std::map<std::pair<std::string, int>, uint64_t> received; // bytes, by name and rank
    bool ordered;                                             // NCCL_LAUNCH_ORDER_IMPLICIT
    char error[1024];
};
inline Nccl &nccl() {
    static Nccl *n = new Nccl();
    return *n;
}

inline thread_local std::vector<NcclCall> group_calls; // since ncclGroupStart
inline thread_local ncclResult_t group_error;          // of one of them: none is issued
inline thread_local std::vector<ncclComm_t> group_finalizes;
} // namespace emu

struct ncclComm {
    std::shared_ptr<emu::Team> team; // NULL: a split that not all have called yet
    int rank, device;
    bool blocking, finalizing;
    std::string name;
    ncclConfig_t config;
    ncclResult_t error;                // that ncclCommGetAsyncError says
    uint64_t collectives, splits;      // calls so far
    double over;                       // us, by the logical clock: when its last launch was
    std::shared_ptr<emu::NcclJob> job; // NULL: none
    std::map<void *, std::pair<char *, size_t>> registered;
    emu::NcclMemory memory;
    size_t taken;                            // bytes of its device's memory
    std::set<std::pair<int, int>> connected; // see connection_of
};

namespace emu {

__attribute__((format(printf, 2, 3))) inline ncclResult_t refuse(ncclResult_t e, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(nccl().error, sizeof nccl().error, format, args);
    va_end(args);
    return e;
}

inline ncclResult_t check_comm(ncclComm_t comm, const char *api, Place at,
                               bool anyhow = false) { // may it be used now; anyhow: in whatever state
    if (!comm) return refuse(ncclInvalidArgument, "%s: the communicator is NULL", api);
    if (!nccl().comms.count(comm)) fail(&at, "%s: no such communicator: it was aborted or destroyed", api);
    if (anyhow) return ncclSuccess;
    if (comm->job)
        fail(&at,
             "%s on communicator '%s', rank %d, while %s is still in progress there: ask ncclCommGetAsyncError until "
             "it says ncclSuccess",
             api, comm->name.c_str(), comm->rank, comm->job->api);
    if (comm->finalizing)
        fail(&at, "%s on communicator '%s', rank %d, after ncclCommFinalize", api, comm->name.c_str(), comm->rank);
    return comm->error;
}

struct NcclApi { // the lock; errors that a test injects, or that persist; what is wrong with the communicator
    std::unique_lock<std::mutex> lock;
    ncclResult_t error;
    explicit NcclApi(const char *api) : lock(machine().lock), error((ncclResult_t)Call::injected(api)) {
        catch_faults();
        if (machine().sticky) error = ncclUnhandledCudaError;
    }
    NcclApi(const char *api, ncclComm_t comm, Place at, bool anyhow = false) : NcclApi(api) {
        if (!error) error = check_comm(comm, api, at, anyhow);
    }
};

// ---------------------------------------------------------------------------
// types, sums, and what each kind of call moves

struct NcclType {
    const char *name;
    size_t bytes;
};
inline const NcclType *nccl_type(int t) { // NULL: not known here
    static const NcclType types[ncclNumTypes] = {{"int8", 1},  {"uint8", 1},   {"int32", 4}, {"uint32", 4},
                                                 {"int64", 8}, {"uint64", 8},  {},           {"float", 4},
                                                 {},           {"bfloat16", 2}};
    return t >= 0 && t < ncclNumTypes && types[t].bytes ? &types[t] : nullptr;
}

template <typename T> inline void combine(T *sum, const T *x, size_t count, int op) {
    for (size_t i = 0; i < count; i++) {
        if (op == ncclMax) sum[i] = sum[i] < x[i] ? x[i] : sum[i];
        else if constexpr (std::is_integral_v<T>) sum[i] = (T)((uint64_t)sum[i] + (uint64_t)x[i]);
        else sum[i] += x[i]; // bf16 is rounded at each hop
    }
}

inline void combine(void *sum, const void *x, size_t count, int type, int op) {
    switch (type) {
    case ncclInt8: return combine((int8_t *)sum, (const int8_t *)x, count, op);
    case ncclUint8: return combine((uint8_t *)sum, (const uint8_t *)x, count, op);
    case ncclInt32: return combine((int32_t *)sum, (const int32_t *)x, count, op);
    case ncclUint32: return combine((uint32_t *)sum, (const uint32_t *)x, count, op);
    case ncclInt64: return combine((int64_t *)sum, (const int64_t *)x, count, op);
    case ncclUint64: return combine((uint64_t *)sum, (const uint64_t *)x, count, op);
    case ncclFloat: return combine((float *)sum, (const float *)x, count, op);
    case ncclBfloat16: return combine((__nv_bfloat16 *)sum, (const __nv_bfloat16 *)x, count, op);
    }
}

inline size_t piece_of(const NcclCall &c) { return c.count * nccl_type(c.type)->bytes; }
inline size_t sent(const NcclCall &c) { // bytes of its source
    if (c.kind == NCCL_RECV || (c.kind == NCCL_BROADCAST && c.comm->rank != c.peer)) return 0;
    return piece_of(c) * (c.kind == NCCL_SCATTER ? c.comm->team->members.size() : 1);
}
inline size_t taken(const NcclCall &c) { // bytes of its destination
    if (c.kind == NCCL_SEND) return 0;
    return piece_of(c) * (c.kind == NCCL_GATHER ? c.comm->team->members.size() : 1);
}
inline size_t received(const Collective &x, const Part &p) { // bytes from others
    size_t ranks = x.team->members.size(), bytes = piece_of(p.call);
    if (p.call.kind == NCCL_GATHER || p.call.kind == NCCL_SCATTER) return (ranks - 1) * bytes;
    if (p.call.kind == NCCL_REDUCE) return 2 * (ranks - 1) * bytes / ranks;
    return p.call.kind != NCCL_SEND && p.call.peer != p.rank ? bytes : 0;
}

inline std::string describe(const NcclCall &c) {
    char text[512], more[64] = "";
    bool p2p = c.kind >= NCCL_SEND;
    if (p2p || c.kind == NCCL_BROADCAST) snprintf(more, sizeof more, ", %s %d", p2p ? "peer" : "root", c.peer);
    if (c.kind == NCCL_SCATTER || c.kind == NCCL_REDUCE)
        snprintf(more, sizeof more, ", %s", c.op == ncclSum ? "sum" : "max");
    snprintf(text, sizeof text, "%s (%zu of %s%s) on communicator '%s', rank %d, %.200s:%d", c.api, c.count,
             nccl_type(c.type)->name, more, c.comm->name.c_str(), c.comm->rank, c.at.file, c.at.line);
    return text;
}

/* What is registered lies at one place of it on all ranks: NCCL reaches into the others' by its own. */
inline void check_places(const Collective &x) {
    auto place = [](const Part &p, const void *buffer) {
        for (auto &r : p.call.comm->registered)
            if ((const char *)buffer >= r.second.first && (const char *)buffer < r.second.first + r.second.second)
                return (const char *)buffer - r.second.first;
        return (ptrdiff_t)-1;
    };
    const Part &first = x.parts[0];
    for (const Part &p : x.parts) {
        ptrdiff_t one = place(first, first.call.recv), other = place(p, p.call.recv);
        if (first.call.kind < NCCL_SEND && one != other)
            fail(nullptr,
                 "%s and %s: their destinations are at bytes %lld and %lld of what was registered (-1: outside), "
                 "expected the same",
                 first.text.c_str(), p.text.c_str(), (long long)one, (long long)other);
    }
}

/* All parts are there: data moves. Parts lie by rank; the send before its receive. */
inline void move_data(Collective &x) {
    const NcclCall &first = x.parts[0].call;
    size_t ranks = x.parts.size(), piece = piece_of(first), element = nccl_type(first.type)->bytes;
    if (!piece) return;
    for (const Part &p : x.parts) {
        if (sent(p.call)) check_no_zone(("the source of " + p.text).c_str(), p.call.send, sent(p.call), p.call.at);
        if (taken(p.call))
            check_no_zone(("the destination of " + p.text).c_str(), p.call.recv, taken(p.call), p.call.at);
    }
    if (first.kind == NCCL_SEND) memmove(x.parts[1].call.recv, first.send, piece);
    if (first.kind == NCCL_BROADCAST)
        for (const Part &p : x.parts) memmove(p.call.recv, x.parts[(size_t)first.peer].call.send, piece);
    if (first.kind == NCCL_GATHER)
        for (const Part &p : x.parts)
            for (size_t r = 0; r < ranks; r++)
                memmove((char *)p.call.recv + r * piece, x.parts[r].call.send, piece); // in place: the same
    if (first.kind != NCCL_SCATTER && first.kind != NCCL_REDUCE) return;
    size_t all = first.kind == NCCL_SCATTER ? first.count * ranks : first.count, share = (all + ranks - 1) / ranks;
    std::vector<char> sum(all * element);
    for (size_t r = 0; r < ranks; r++) { // the piece that ends its way around the ring at rank r
        size_t from = std::min(all, r * share), count = std::min(all, from + share) - from;
        for (size_t hop = 1; hop <= ranks && count; hop++) {
            const char *source = (const char *)x.parts[(r + hop) % ranks].call.send + from * element;
            if (hop == 1) memcpy(&sum[from * element], source, count * element);
            else combine(&sum[from * element], source, count, first.type, first.op);
        }
    }
    for (size_t r = 0; r < ranks; r++)
        memcpy(x.parts[r].call.recv, sum.data() + (first.kind == NCCL_SCATTER ? r * piece : 0), piece);
}

inline NcclLaunch::~NcclLaunch() { std::erase(nccl().launches[stream->device], this); }

/* As NCCL has it, launches of a device begin in the order of the program: of one communicator each when the one before
 * it is over, whatever their streams; of another, with NCCL_LAUNCH_ORDER_IMPLICIT, when that has begun. */
inline void launches_begin(int device) {
    std::vector<NcclLaunch *> &all = nccl().launches[device];
    double before = 0; // the start of the one before
    for (size_t i = 0; i < all.size(); i++) {
        NcclLaunch *l = all[i];
        if (l->aborted) continue;
        if (!l->begun) {
            bool may = is_free(l->stream) && l->stream->queue.front().meets.get() == l;
            for (size_t k = 0; k < i && may; k++) may = all[k]->comm != l->comm || all[k]->aborted;
            if (may) {
                l->begun = true;
                l->start = std::max({start_of(l->stream), l->comm->over, nccl().ordered ? before : 0});
            } else if (nccl().ordered) return;
        }
        before = l->start;
    }
}

inline bool can_move(const Collective &x) {
    if (x.dead || x.parts.size() < x.wanted) return false;
    for (const Part &p : x.parts) {
        if (!p.launch->begun) launches_begin(p.device);
        if (!p.launch->begun) return false;
    }
    return true;
}

/* Two launches that are heads of streams wait for nothing: both are in flight on one device. */
inline void check_alone(const Part &p) {
    for (cudaStream_t s : machine().streams) {
        if (nccl().ordered || s->device != p.device || s == p.launch->stream || !is_free(s)) continue;
        NcclLaunch *other = (NcclLaunch *)s->queue.front().meets.get();
        if (!other || other->team == p.launch->team || other->lost || other->aborted || other->collectives.empty())
            continue;
        fail(nullptr,
             "%s and %s are in flight at once: set NCCL_LAUNCH_ORDER_IMPLICIT=1 before the first communicator, or "
             "order them by an event",
             p.text.c_str(), other->collectives[0]->of_device(p.device)->text.c_str());
    }
}

inline bool NcclLaunch::can_go_on() {
    if (aborted) return true;
    bool all = !lost;
    for (auto &x : collectives) {
        if (!x->moved && can_move(*x)) return true;
        all &= x->moved;
    }
    return all;
}

inline bool NcclLaunch::go_on() {
    bool all = !lost;
    for (auto &x : collectives) {
        if (!aborted && !x->moved && can_move(*x)) {
            size_t most = 0;
            double start = 0;
            for (const Part &p : x->parts) {
                check_alone(p);
                most = std::max(most, received(*x, p));
                start = std::max(start, p.launch->start);
                nccl().received[{x->team->name, p.rank}] += received(*x, p);
            }
            check_places(*x);
            move_data(*x);
            x->moved = true;
            x->end = start + cuda_on_cpu.costs.collective + cuda_on_cpu.costs.exchanged_byte * (double)most;
        }
        all &= x->moved;
        if (x->moved) end = std::max(end, x->end);
    }
    if (all && !aborted) comm->over = end;
    return all || aborted;
}

inline std::string NcclLaunch::waits() const {
    if (lost) return "a call that is lost, as CUDA_ON_CPU_NCCL_LOSE or _ERROR says";
    for (auto &x : collectives)
        if (!x->moved)
            return x->of_device(stream->device)->text + " waits: of " + std::to_string(x->wanted) + " ranks " +
                   std::to_string(x->parts.size()) + " have made their call" +
                   (x->parts.size() < x->wanted ? "" : ", but other operations stand before it");
    return "a call that was aborted";
}

// ---------------------------------------------------------------------------
// calls: what each demands by itself, then with the other ranks' calls

inline ncclResult_t check_call(NcclCall &c) {
    const NcclType *type = nccl_type(c.type);
    size_t ranks = c.comm->team->members.size();
    if (!type || (c.op != ncclSum && c.op != ncclMax))
        return refuse(ncclInvalidArgument, "%s: type %d or reduction %d is not known here", c.api, c.type, c.op);
    if (c.peer < 0 || (size_t)c.peer >= ranks)
        return refuse(ncclInvalidArgument, "%s: rank %d of %zu", c.api, c.peer, ranks);
    if ((sent(c) && !c.send) || (taken(c) && !c.recv))
        return refuse(ncclInvalidArgument, "%s: a buffer is NULL", c.api);
    int now = device_now;
    if (!c.stream) device_now = c.comm->device;
    c.stream = stream_of(c.stream);
    device_now = now;
    std::string text = describe(c);
    if (!c.stream || c.stream->device != c.comm->device)
        fail(nullptr, "%s: its stream is none of device %d, the communicator's", text.c_str(), c.comm->device);
    const void *const buffers[2] = {c.send, c.recv};
    const size_t bytes[2] = {sent(c), taken(c)};
    for (int i = 0; i < 2; i++) {
        if (!bytes[i]) continue;
        check_range(((i ? "the destination of " : "the source of ") + text).c_str(), buffers[i], bytes[i],
                    c.comm->device, c.at, false);
        if ((uintptr_t)buffers[i] % type->bytes)
            fail(nullptr, "%s: %p is not aligned to the %zu bytes of an element", text.c_str(), buffers[i],
                 type->bytes);
    }
    const char *send = (const char *)c.send, *recv = (const char *)c.recv;
    if (!bytes[0] || !bytes[1] || send >= recv + bytes[1] || recv >= send + bytes[0]) return ncclSuccess;
    size_t mine = (size_t)c.comm->rank * piece_of(c), in_send = c.kind == NCCL_SCATTER ? mine : 0,
           in_recv = c.kind == NCCL_GATHER ? mine : 0;
    if (send + in_send != recv + in_recv)
        fail(nullptr,
             "%s: its buffers overlap, and not as in place: the source begins at byte %lld of the destination, in "
             "place it is %lld",
             text.c_str(), (long long)(send - recv), (long long)in_recv - (long long)in_send);
    return ncclSuccess;
}

/* The exchange that a call is part of: the n-th collective of its communicator, the n-th send of a pair of ranks. */
inline std::shared_ptr<Collective> collective_of(const NcclCall &c, NcclLaunch *launch) {
    std::shared_ptr<Team> team = c.comm->team;
    Part part = {c, c.comm->rank, c.comm->device, launch, describe(c)};
    std::shared_ptr<Collective> x;
    bool p2p = c.kind >= NCCL_SEND, send = c.kind == NCCL_SEND;
    uint64_t number = c.comm->collectives;
    if (p2p) {
        int from = send ? part.rank : c.peer, to = send ? c.peer : part.rank;
        auto &others = team->halves[{from, to, send ? NCCL_RECV : NCCL_SEND}];
        if (others.empty()) {
            x = std::make_shared<Collective>(Collective{team, 2, {}, false, false, 0});
            team->halves[{from, to, c.kind}].push_back(x);
        } else {
            x = others.front();
            others.pop_front();
        }
    } else {
        auto &slot = team->collectives[c.comm->collectives++];
        if (!slot) slot = std::make_shared<Collective>(Collective{team, team->members.size(), {}, false, false, 0});
        x = slot;
    }
    if (!x->parts.empty()) {
        const NcclCall &other = x->parts[0].call;
        bool same = c.count == other.count && c.type == other.type &&
                    (p2p || (c.kind == other.kind && c.op == other.op && c.peer == other.peer));
        if (!same) fail(nullptr, "%s meets %s: they should agree", part.text.c_str(), x->parts[0].text.c_str());
    }
    auto place = x->parts.begin();
    while (place != x->parts.end() && (p2p ? !send : place->rank < part.rank)) ++place;
    x->parts.insert(place, part);
    if (!p2p && x->parts.size() == x->wanted) team->collectives.erase(number);
    return x;
}

/* Does a rank launch them one after the other? Not where one group has both; collectives of one communicator meet by
 * their number. */
inline bool in_turn(const Collective &x, const Collective &y, int device) {
    const Part *a = x.of_device(device), *b = y.of_device(device);
    if (x.team != y.team) return true;
    return (x.parts[0].call.kind >= NCCL_SEND || y.parts[0].call.kind >= NCCL_SEND) &&
           (!a || !b || a->launch != b->launch);
}

/* Two ranks issue what both take part in in one order: else each waits for the other, on a GPU. */
inline void check_order(const NcclLaunch &launch) {
    auto text = [](const Collective &x, int device, int other) {
        return x.of_device(device) ? x.of_device(device)->text : "what meets " + x.of_device(other)->text;
    };
    // x before y here, y before x there
    auto wrong = [text](const Collective &x, const Collective &y, int me, int other) {
        fail(nullptr, "two ranks issue in two orders, on GPUs a deadlock: %s; then %s. But %s; then %s",
             text(x, me, other).c_str(), text(y, me, other).c_str(), text(y, other, me).c_str(),
             text(x, other, me).c_str());
    };
    int me = launch.stream->device;
    for (auto &x : launch.collectives)
        for (int other : x->team->devices) {
            const Part &p = x->parts[0];
            bool takes_part =
                p.call.kind < NCCL_SEND || x->team->devices[(size_t)p.call.peer] == other || p.device == other;
            if (other == me || !takes_part) continue;
            auto &mine = nccl().issued[{me, other}], &theirs = nccl().issued[{other, me}];
            auto it = std::find(theirs.begin(), theirs.end(), x);
            if (it == theirs.end()) {
                mine.push_back(x);
                continue;
            }
            for (auto y = theirs.begin(); y != it; ++y)
                if (in_turn(*x, **y, me) && in_turn(*x, **y, other)) wrong(*x, **y, me, other);
            for (auto &z : mine)
                if (in_turn(*z, *x, me) && in_turn(*z, *x, other)) wrong(*z, *x, me, other);
            theirs.erase(it);
        }
}

/* "RANK:N" of the two settings: has this rank of the world come to its N-th call? */
inline bool is_reached(const char *setting, const World &w) {
    int rank;
    unsigned long long n;
    if (!setting) return false;
    if (sscanf(setting, "%d:%llu", &rank, &n) != 2)
        fail(nullptr, "CUDA_ON_CPU_NCCL_LOSE or _ERROR is '%s', expected RANK:N", setting);
    return rank == w.rank && w.calls >= n;
}

inline void nccl_launch(const std::vector<NcclCall> &calls) { // those that were issued together
    std::vector<std::shared_ptr<NcclLaunch>> launches;
    for (const NcclCall &c : calls) {
        c.stream->unlaunched.clear();
        World &w = nccl().worlds[c.comm->device];
        w.calls++;
        bool broken = is_reached(cuda_on_cpu.nccl_error, w); // the other ranks of its communicators are told
        for (ncclComm_t other : nccl().comms)
            for (size_t r = 0; broken && other->team && r < other->team->members.size(); r++)
                if ((int)r != other->rank && other->team->members[r] && other->team->devices[r] == c.comm->device)
                    other->error =
                        refuse(ncclRemoteError, "Connection closed by remote peer gpu-%d<45678>", c.comm->device);
        std::shared_ptr<NcclLaunch> launch;
        for (auto &l : launches)
            if (l->comm == c.comm) launch = l;
        if (!launch) {
            launch = std::make_shared<NcclLaunch>();
            launch->comm = c.comm;
            launch->team = c.comm->team.get();
            launch->stream = c.stream;
            launches.push_back(launch);
        }
        if (launch->stream != c.stream)
            fail(nullptr, "%s: its group has another stream for this communicator: the emulator takes one",
                 describe(c).c_str());
        launch->lost |= broken || is_reached(cuda_on_cpu.nccl_lose, w); // never arrives
        if (broken) machine().changed.notify_all();
    }
    for (auto &l : launches) {
        for (const NcclCall &c : calls)
            if (l->comm == c.comm && !l->lost) l->collectives.push_back(collective_of(c, l.get()));
        for (auto &x : l->collectives) {
            const Part &p = x->parts[0];
            if (p.call.kind >= NCCL_SEND && p.call.peer == p.rank && x->parts.size() < 2)
                fail(nullptr, "%s: to itself, without the other half in the same group: it would wait for good",
                     p.text.c_str());
        }
        check_order(*l);
        nccl().launches[l->stream->device].push_back(l.get());
        enqueue(l->stream, 0, nullptr).meets = l;
    }
}

/* What a call needs its communicator's members to be connected by: the ring (-1, -1), or a pair of ranks. */
inline std::pair<int, int> connection_of(const NcclCall &c) {
    if (c.kind < NCCL_SEND) return {-1, -1};
    return {std::min(c.peer, c.comm->rank), std::max(c.peer, c.comm->rank)};
}

/* Comes to the connections that these calls use first, and takes their memory. ncclSuccess: all are there already;
 * ncclInProgress: the hosts of the other members have yet to come. */
inline ncclResult_t connect(const std::vector<NcclCall> &calls) {
    ncclResult_t e = ncclSuccess;
    for (const NcclCall &c : calls) {
        std::pair<int, int> way = connection_of(c);
        if (c.comm->team->members.size() == 1 || !c.comm->connected.insert(way).second) continue;
        bool itself = way.first >= 0 && way.first == way.second;
        if (itself) continue;
        size_t mib = way.first < 0 ? c.comm->memory.ring : c.comm->memory.pair;
        if (!nccl_takes(c.comm->device, mib, &c.comm->taken)) {
            c.comm->error = ncclUnhandledCudaError;
            return refuse(ncclUnhandledCudaError, "%s", memory_error);
        }
        c.comm->team->connecting[way].insert(c.comm->rank);
        e = ncclInProgress;
    }
    if (e) machine().changed.notify_all();
    return e;
}

inline bool all_connected(const std::vector<NcclCall> &calls) {
    for (const NcclCall &c : calls) {
        auto it = c.comm->team->connecting.find(connection_of(c));
        size_t wanted = c.kind < NCCL_SEND ? c.comm->team->members.size() : 2;
        if (it != c.comm->team->connecting.end() && it->second.size() < wanted) return false;
    }
    return true;
}

/* Queues calls now, or when ncclCommGetAsyncError has said so. */
inline ncclResult_t issue(std::unique_lock<std::mutex> &lock, const std::vector<NcclCall> &calls) {
    if (calls.empty()) return ncclSuccess;
    for (const NcclCall &c : calls)
        if (c.comm->blocking != calls[0].comm->blocking)
            return refuse(ncclInvalidArgument, "communicators that block and that do not are in one group");
    ncclResult_t connected = connect(calls);
    if (connected == ncclUnhandledCudaError) return connected;
    if (calls[0].comm->blocking && connected == ncclInProgress)
        run_until(
            lock, [&calls] { return calls[0].comm->error || all_connected(calls); }, true);
    if (!all_connected(calls) && calls[0].comm->blocking) return calls[0].comm->error;
    if (calls[0].comm->blocking || (!connected && !choose(2))) {
        nccl_launch(calls);
        return ncclSuccess;
    }
    auto job = std::make_shared<NcclJob>(NcclJob{calls[0].api, (int)choose(4), nullptr, nullptr, calls});
    if (connected) job->over = [calls] { return all_connected(calls); };
    job->then = [job = job.get()] {
        nccl_launch(job->calls);
        job->calls.clear();
    };
    for (const NcclCall &c : calls) {
        c.comm->job = job;
        check_launched(c.stream);
    }
    for (const NcclCall &c : calls) c.stream->unlaunched = describe(c);
    return ncclInProgress;
}

inline ncclResult_t nccl_call(NcclCall c) {
    NcclApi api(c.api, c.comm, c.at);
    ncclResult_t e = api.error ? api.error : check_call(c);
    if (!group_depth) return e ? e : issue(api.lock, {c});
    if (e) group_error = e;
    else group_calls.push_back(c);
    return e;
}

/* A call on a communicator that others must make too: waits for them, or leaves that to ncclCommGetAsyncError. */
inline ncclResult_t begin(NcclApi &api, ncclComm_t comm, const char *name, Place at, std::function<bool()> over,
                          std::function<void()> then) {
    if (group_depth) fail(&at, "%s inside a group: the emulator takes communication alone", name);
    machine().changed.notify_all();
    if (comm->blocking) {
        run_until(
            api.lock, [&] { return comm->error || over(); }, true);
        if (!comm->error) then();
        return comm->error;
    }
    comm->job = std::make_shared<NcclJob>(NcclJob{name, 1 + (int)choose(3), std::move(over), std::move(then), {}});
    return ncclInProgress;
}

inline const NcclLaunch *in_flight(ncclComm_t comm) { // NULL: none
    for (cudaStream_t s : machine().streams)
        for (const Op &op : s->queue)
            if (op.meets && ((NcclLaunch *)op.meets.get())->comm == comm) return (const NcclLaunch *)op.meets.get();
    return nullptr;
}

/* Begins to finalize the communicators of a group. */
inline ncclResult_t finalize_group(std::unique_lock<std::mutex> &lock) {
    std::vector<ncclComm_t> comms = std::move(group_finalizes);
    group_finalizes.clear();
    auto over = [comms] {
        bool all = true;
        for (ncclComm_t c : comms) {
            all &= !in_flight(c);
            for (ncclComm_t m : c->team->members) all &= !m || m->finalizing;
        }
        return all;
    };
    machine().changed.notify_all();
    if (comms[0]->blocking) {
        run_until(lock, over, true);
        return ncclSuccess;
    }
    auto job = std::make_shared<NcclJob>(NcclJob{"ncclCommFinalize", 1 + (int)choose(3), over, nullptr, {}});
    for (ncclComm_t c : comms) c->job = job;
    return ncclInProgress;
}

inline bool nccl_config(ncclConfig_t *to, const ncclConfig_t *config) { // false: not valid
    *to = NCCL_CONFIG_INITIALIZER;
    if (!config) return true;
    if (config->size != sizeof *config || config->magic != to->magic) return false;
    *to = *config;
    auto within = [](int v, int low, int high) { return v == NCCL_CONFIG_UNDEF_INT || (v >= low && v <= high); };
    return within(to->blocking, 0, 1) && within(to->splitShare, 0, 1) && within(to->minCTAs, 1, 64) &&
           within(to->maxCTAs, std::max(1, to->minCTAs), 64); // NCCL has 64 channels
}

inline ncclComm_t new_comm(const ncclConfig_t &config, int rank, int device) {
    const char *name = config.commName ? config.commName : "unnamed";
    ncclComm_t comm =
        new ncclComm{nullptr, rank,    device, config.blocking != 0,           false, name, config, ncclSuccess, 0, 0,
                     0,       nullptr, {},     nccl_memory_of(config.maxCTAs), 0,     {}};
    comm->config.commName = comm->name.c_str();
    if (nvls_fails()) comm->error = refuse(ncclUnhandledCudaError, "%s", nvls_error);
    else if (!nccl_takes(device, comm->memory.open, &comm->taken))
        comm->error = refuse(ncclUnhandledCudaError, "%s", memory_error);
    nccl().comms.insert(comm);
    World &w = nccl().worlds[device];
    if (!w.communicators++) {
        w.rank = rank;
        w.calls = 0;
    }
    return comm;
}

inline void join(std::shared_ptr<Team> team, ncclComm_t comm) {
    comm->team = team;
    if (!team->joined) team->name = comm->name;
    for (size_t r = 0; r < team->members.size(); r++)
        if (team->members[r] && team->devices[r] == comm->device) {
            refuse(ncclInvalidUsage,
                   "Duplicate GPU detected: ranks %zu and %d of communicator '%s' are both on device %d", r, comm->rank,
                   comm->name.c_str(), comm->device);
            comm->error = ncclInvalidUsage;
        }
    team->members[(size_t)comm->rank] = comm;
    team->devices[(size_t)comm->rank] = comm->device;
    team->joined++;
    team->clock = std::max(team->clock, host_clock);
    for (ncclComm_t m : team->members)
        if (m && comm->error) m->error = comm->error;
        else if (m && m->error) comm->error = m->error;
}

inline void drop_job(ncclComm_t comm) { // what it has yet to queue never will be
    if (!comm->job) return;
    std::erase_if(comm->job->calls, [comm](const NcclCall &c) {
        if (c.comm == comm) c.stream->unlaunched.clear();
        return c.comm == comm;
    });
    comm->job = nullptr;
}

/* The handle is no more; what this rank has queued of it ends without effect. */
inline void leave(ncclComm_t comm) {
    for (cudaStream_t s : machine().streams)
        for (Op &op : s->queue) {
            NcclLaunch *l = (NcclLaunch *)op.meets.get();
            if (!l || l->comm != comm) continue;
            l->aborted = true;
            for (auto &x : l->collectives) x->dead |= !x->moved;
        }
    drop_job(comm);
    for (auto &list : nccl().issued)
        if (list.first.first == comm->device || list.first.second == comm->device)
            std::erase_if(list.second, [comm](auto &x) { return x->team == comm->team; });
    if (comm->team) comm->team->members[(size_t)comm->rank] = nullptr;
    if (!--nccl().worlds[comm->device].communicators) nccl().worlds.erase(comm->device);
    nccl().comms.erase(comm);
    machine().used[comm->device] -= comm->taken;
    delete comm;
    machine().changed.notify_all();
}

} // namespace emu
#endif
