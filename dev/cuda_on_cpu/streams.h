/* streams.h: the runtime API: device memory, queues, launches, and their checks.
 *
 * Every asynchronous operation is queued, and runs only when something is waited for; which of the streams' heads runs
 * next is chosen by the seed. So what was not ordered by an event happens in another order under another seed.
 * Owns: the one Machine of the process, with its lock. Ranks that are threads enqueue side by side; operations run one
 * at a time, on a thread that waits. Device memory cannot be touched while no operation runs (CudaOnCpu.protect).
 */
#ifndef CUDA_ON_CPU_STREAMS_H
#define CUDA_ON_CPU_STREAMS_H

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *);
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaMemAttachGlobal = 1 };
enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 }; // of streams

namespace emu {

struct Mark {
    bool done;
    double time;
}; // one record of an event; by the logical clock, in us

struct Rendezvous { // an operation that takes part in others' of other streams (nccl.h)
    double end = 0; // by the logical clock, in us
    virtual ~Rendezvous() = default;
    virtual bool can_go_on() = 0;          // asked while it is the head of its stream
    virtual bool go_on() = 0;              // does what it can; true: it is over
    virtual std::string waits() const = 0; // who waits, and for how much
};

struct Op {
    uint64_t order;            // of all operations ever queued
    double queued, lasts;      // by the logical clock, in us: when the host had queued it; its duration
    std::function<void()> run; // nothing: an event to record or to wait for
    std::shared_ptr<Mark> record, awaits;
    std::shared_ptr<Rendezvous> meets;
    bool on_host; // a function of the host
};

struct Memory { // what one cudaMalloc, cudaMallocHost or cudaMallocManaged gave
    size_t bytes;
    cudaMemoryType type;
    int device;
    char *mapping;         // with guards around it, and around them what nobody may touch
    size_t mapped, before; // bytes of all; of what nobody may touch before it
    size_t counted;        // bytes of the device's memory
    const char *name;      // for messages
    bool reachable;        // pinned and mapped: kernels may be given it
    bool nccl;             // by ncclMemAlloc
};

struct Failure {
    std::string api;
    int code;
    int after;
};

struct Call;
} // namespace emu

struct CUstream_st {
    int device;
    bool blocking; // waits for the default stream, and that one for it
    bool busy;     // its head is a host function, and runs
    int priority;  // LEAST_PRIORITY … GREATEST_PRIORITY, which is likelier to run first
    uint32_t rank; // the highest runs next
    std::deque<emu::Op> queue;
    double clock;           // us: when its last operation ended
    std::string unlaunched; // an NCCL call that has yet to queue its operation; empty: none
};

struct CUevent_st {
    int device;
    bool timing;
    std::shared_ptr<emu::Mark> last; // the newest record; NULL: none yet
};

namespace emu {

enum { MAX_DEVICES = 64 };
enum : size_t { GUARD_BYTES = 256, FILL_AT_MOST = 1ull << 30 };
enum : uint32_t { ZONE_PATTERN = 0xFFA5FFA5u }; // a NaN in fp32 and in bf16

struct Machine {
    std::mutex lock;
    std::condition_variable changed; // a host function has ended, or there is more to do
    std::map<char *, Memory> memory;
    std::map<char *, size_t> zones; // red zones by address
    std::set<cudaStream_t> streams;
    std::set<cudaEvent_t> events;
    CUstream_st *default_stream[MAX_DEVICES];
    size_t used[MAX_DEVICES]; // bytes of each device
    uint64_t orders;
    int open;    // device memory may be touched: so many want it
    bool closed; // it is out of reach
    std::map<std::pair<int, const void *>, int>
        dynamic_shared;                           // what cudaFuncSetAttribute allowed, by device and kernel
    std::map<const void *, size_t> static_shared; // bytes that a kernel was seen to have
    std::vector<Failure> failures;                // to be injected
    cudaError_t sticky;
    std::set<std::pair<int, const void *>> loaded; // kernels, by device
    bool eager;                                    // CUDA_MODULE_LOADING=EAGER
    bool polls;                                    // other processes take part, which tell nobody
};

inline Machine *new_machine() {
    Machine *m = new Machine(); // never destroyed: operations may be queued when the process ends
    char api[64];
    int code, after, length;
    const char *loading = getenv("CUDA_MODULE_LOADING");
    m->eager = loading && !strcmp(loading, "EAGER");
    for (const char *at = cuda_on_cpu.failures; at && *at; at += length + (at[length] == ',')) {
        if (sscanf(at, "%63[A-Za-z]:%d:%d%n", api, &code, &after, &length) != 3)
            fail(nullptr, "CUDA_ON_CPU_FAIL: found '%s', expected call:code:nth", at);
        m->failures.push_back(Failure{api, code, after});
    }
    return m;
}
inline Machine &machine() {
    static Machine *m = new_machine();
    return *m;
}

inline thread_local int device_now;
inline thread_local cudaError_t last_error;
inline thread_local std::string launch_error; // of a launch that was refused, until somebody asks
inline thread_local bool in_host_function;
inline thread_local double host_clock; // us: the logical clock of this thread
inline thread_local int group_depth;   // of ncclGroupStart

inline double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---------------------------------------------------------------------------
// memory: who owns an address; who may touch it now; zones that nobody may

inline std::map<char *, Memory>::iterator find_memory(const void *p) { // one byte behind the end counts as inside
    Machine &m = machine();
    auto it = m.memory.upper_bound((char *)p);
    if (it == m.memory.begin()) return m.memory.end();
    --it;
    return (char *)p <= it->first + it->second.bytes ? it : m.memory.end();
}

inline std::map<char *, Memory>::iterator mapping_of(const void *p) { // the same, guards and pages around it included
    Machine &m = machine();
    auto it = m.memory.begin();
    while (it != m.memory.end() &&
           ((char *)p < it->second.mapping || (char *)p >= it->second.mapping + it->second.mapped))
        ++it;
    return it;
}

inline cudaMemoryType memory_type(const void *p) {
    auto it = find_memory(p);
    return it == machine().memory.end() ? cudaMemoryTypeUnregistered : it->second.type;
}

inline const char *memory_name(const void *p) {
    auto it = find_memory(p);
    return it == machine().memory.end() ? "pageable host memory" : it->second.name;
}

inline bool is_device(cudaMemoryType t) { return t == cudaMemoryTypeDevice || t == cudaMemoryTypeManaged; }

inline void protect(const Memory &m, int access) {
    if (m.type == cudaMemoryTypeDevice && mprotect(m.mapping + m.before, m.mapped - m.before - PAGE, access))
        fail(nullptr, "mprotect of device memory failed");
}

inline void open_memory() { // for operations, under the lock
    Machine &m = machine();
    if (!m.open++ && m.closed)
        for (auto &it : m.memory) protect(it.second, PROT_READ | PROT_WRITE);
}

inline void close_memory() {
    Machine &m = machine();
    if (--m.open) return;
    m.closed = cuda_on_cpu.protect;
    if (m.closed)
        for (auto &it : m.memory) protect(it.second, PROT_NONE);
}

inline unsigned char zone_byte(const char *p) { return (unsigned char)(ZONE_PATTERN >> ((uintptr_t)p & 3) * 8); }

__attribute__((no_sanitize("address"))) inline void check_zones(const char *after, const Place *at) {
    for (auto &z : machine().zones)
        for (const char *p = z.first, *end = p + z.second; p < end; p++) {
            while ((uintptr_t)p % 8 == 0 && p + 8 <= end && *(const uint64_t *)p == ZONE_PATTERN * 0x100000001ull)
                p += 8;
            if (p < end && (unsigned char)*p != zone_byte(p)) {
                auto owner = mapping_of(p);
                fail(at,
                     "%s wrote over a red zone: byte %zu of the zone's %zu, which is byte %lld of an allocation of %zu "
                     "bytes. Build with -fsanitize=address "
                     "to be told the line",
                     after, (size_t)(p - z.first), z.second, (long long)(p - owner->first), owner->second.bytes);
            }
        }
}

__attribute__((no_sanitize("address"))) inline void add_zone(char *p, size_t bytes) { // under the lock
    open_memory();
    unpoison(p, bytes);
    for (size_t i = 0; i < bytes; i++) p[i] = (char)zone_byte(p + i);
    poison(p, bytes);
    close_memory();
    machine().zones[p] = bytes;
}

inline void forget_zones(char *from, size_t bytes) { // under the lock
    Machine &m = machine();
    for (auto it = m.zones.lower_bound(from); it != m.zones.end() && it->first < from + bytes; it = m.zones.erase(it))
        unpoison(it->first, it->second);
}

/* A mapping: pages that nobody may touch, a guard, the memory, a guard up to the page's end, a page that nobody may
 * touch. */
inline cudaError_t allocate(void **out, size_t bytes, const char *name, cudaMemoryType type, size_t counted,
                            size_t before = PAGE) {
    Machine &m = machine();
    *out = nullptr;
    if (m.used[device_now] + counted + cuda_on_cpu.held > cuda_on_cpu.memory) return cudaErrorMemoryAllocation;
    size_t inner = (GUARD_BYTES + bytes + GUARD_BYTES + PAGE - 1) / PAGE * PAGE, mapped = before + inner + PAGE;
    char *p = (char *)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
    if (mprotect(p + before, inner, PROT_READ | PROT_WRITE)) fail(nullptr, "mprotect of %zu bytes failed", inner);
    madvise(p + before, inner, MADV_HUGEPAGE); // mprotect takes its time by the number of pages
    char *memory = p + before + GUARD_BYTES;
    if (type != cudaMemoryTypeHost && counted)
        memset(memory, 0xFF, bytes < FILL_AT_MOST ? bytes : FILL_AT_MOST); // a NaN: nobody may rely on zeros
    open_memory();
    m.memory[memory] = Memory{bytes, type, device_now, p, mapped, before, counted, name, false, false};
    m.used[device_now] += counted;
    add_zone(p + before, GUARD_BYTES);
    add_zone(memory + bytes, (size_t)(p + before + inner - (memory + bytes)));
    close_memory();
    *out = memory;
    return cudaSuccess;
}

inline cudaError_t release(void *p, bool host, bool nccl = false) {
    Machine &m = machine();
    auto it = m.memory.find((char *)p);
    if (it == m.memory.end() || (it->second.type == cudaMemoryTypeHost) != host || it->second.nccl != nccl)
        return cudaErrorInvalidValue;
    open_memory();
    check_zones("an operation", nullptr);
    close_memory();
    forget_zones(it->second.mapping, it->second.mapped);
    m.used[it->second.device] -= it->second.counted;
    munmap(it->second.mapping, it->second.mapped);
    m.memory.erase(it);
    return cudaSuccess;
}

/* An operation touches bytes from p on: they must lie in one allocation, or (host) in none. What a device works on lies
 * on that device, or is mapped; copies reach any device. */
enum { ON_HOST = -2, ON_ANY_DEVICE = -1 };
inline void check_range(const char *what, const void *p, size_t bytes, int device, Place at, bool mapped = true) {
    auto it = find_memory(p);
    cudaMemoryType type = it == machine().memory.end() ? cudaMemoryTypeUnregistered : it->second.type;
    mapped = mapped && device >= 0 && type == cudaMemoryTypeHost && it->second.reachable;
    if (device == ON_HOST ? type == cudaMemoryTypeDevice : !is_device(type) && !mapped)
        fail(&at, "%s should be %s memory, but %p is %s", what, device == ON_HOST ? "host" : "device", p,
             memory_name(p));
    if (type == cudaMemoryTypeUnregistered) return;
    if (device >= 0 && type == cudaMemoryTypeDevice && it->second.device != device)
        fail(&at, "%s at %p is memory of device %d, used by device %d: copy it there first", what, p, it->second.device,
             device);
    size_t offset = (size_t)((const char *)p - it->first);
    if (offset + bytes > it->second.bytes)
        fail(&at, "%s of %zu bytes begins at byte %zu of an allocation of %zu bytes", what, bytes, offset,
             it->second.bytes);
}

/* When the operation runs, no red zone may lie there. */
inline void check_no_zone(const char *what, const void *p, size_t bytes, Place at) {
    auto &zones = machine().zones;
    auto z = zones.upper_bound((char *)p);
    if (z != zones.begin() && std::prev(z)->first + std::prev(z)->second > (const char *)p) --z;
    if (z != zones.end() && z->first < (const char *)p + bytes)
        fail(&at, "%s of %zu bytes runs over the red zone at its byte %lld", what, bytes,
             (long long)(z->first - (const char *)p));
}

// ---------------------------------------------------------------------------
// faults of the processor are told with the kernel, or with the memory that the host touched

inline struct sigaction fault_before[2]; // SIGSEGV, SIGBUS

inline void on_fault(int signal, siginfo_t *info, void *context) {
    char *p = (char *)info->si_addr;
    auto it = mapping_of(p); // without the lock: this is the end
    if (it != machine().memory.end()) {
        long long byte = p - it->first;
        if (on_device) fail(nullptr, "touched byte %lld of an allocation of %zu bytes", byte, it->second.bytes);
        fail(nullptr,
             "host code touched byte %lld of an allocation of %zu bytes of device memory: copy it with cudaMemcpyAsync "
             "first",
             byte, it->second.bytes);
    }
    if (on_device && current) {
        const Fiber *f = current->fiber;
        if (f && p < (const char *)f->stack && p >= (const char *)f->stack - PAGE)
            fail(nullptr, "its stack of %zu bytes is full", STACK_BYTES);
        if (info->si_code == SI_KERNEL) fail(nullptr, "used a misaligned vector, or an address that cannot be");
        fail(nullptr, "illegal address %p", (void *)p);
    }
    sigaction(signal, &fault_before[signal == SIGBUS], nullptr); // not ours: again, for whom it concerns
    (void)context;
}

inline void catch_faults() {
    static bool done;
#if CUDA_ON_CPU_ASAN
    if (!done)
        __asan_set_error_report_callback([](const char *) {
            fprintf(stderr, "CUDA on a CPU: %sAddressSanitizer's report stands above\n", where(nullptr).c_str());
        });
    done = true;
    return; // its report has the address
#endif
    static thread_local char *stack;
    if (!stack) { // a kernel's stack may be full
        stack_t s = {};
        s.ss_size = 64 << 10;
        s.ss_sp = stack = (char *)malloc(s.ss_size);
        sigaltstack(&s, nullptr);
    }
    if (done) return;
    done = true;
    struct sigaction a = {};
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &a, &fault_before[0]);
    sigaction(SIGBUS, &a, &fault_before[1]);
}

} // namespace emu

/* UndefinedBehaviorSanitizer calls this, and then prints its report: in a kernel, that is the end (fibers.h). */
extern "C" __attribute__((weak, used, visibility("default"))) void __ubsan_on_report(void);
extern "C" __attribute__((weak, used, visibility("default"))) void __ubsan_on_report(void) {
    emu::undefined_behavior = emu::on_device;
}

namespace emu {

// ---------------------------------------------------------------------------
// every call of the API: the lock, errors that persist, errors that a test injects

inline bool persists(int e) {
    return e == cudaErrorECCUncorrectable || e == cudaErrorIllegalAddress || e == cudaErrorLaunchTimeout ||
           e == cudaErrorAssert || (e >= cudaErrorHardwareStackError && e <= cudaErrorLaunchFailure);
}

inline std::atomic<pid_t> opened_by{0}; // the process whose calls CUDA answers; 0: none has called it yet

/* CUDA does not work in a child that was forked after its parent had called CUDA. */
inline bool in_forked_child() {
    pid_t opener = 0, self = getpid();
    return !opened_by.compare_exchange_strong(opener, self) && opener != self;
}

struct Call {
    std::unique_lock<std::mutex> lock;
    cudaError_t error; // what to return at once; cudaSuccess: go on

    explicit Call(const char *api) : error(cudaSuccess) {
        if (in_forked_child()) { // before the lock, which a thread of the parent may hold
            error = last_error = cudaErrorInitializationError;
            return;
        }
        if (on_device) fail(nullptr, "%s called from a kernel", api);
        if (!launch_error.empty())
            fail(nullptr, "%s is called, but nobody has asked cudaGetLastError about a launch that was refused: %s",
                 api, launch_error.c_str());
        if (in_host_function) {
            error = cudaErrorNotPermitted;
            return;
        }
        lock = std::unique_lock<std::mutex>(machine().lock);
        catch_faults();
        error = (cudaError_t)injected(api);
        if (persists(error)) machine().sticky = error;
        if (machine().sticky) error = machine().sticky;
        if (error) last_error = error;
    }
    cudaError_t give(cudaError_t e) {
        if (e) last_error = e;
        return e;
    }
    static int injected(const char *api) {
        Machine &m = machine();
        for (size_t i = 0; i < m.failures.size(); i++) {
            Failure &f = m.failures[i];
            if (f.api != api || --f.after > 0) continue;
            int code = f.code;
            m.failures.erase(m.failures.begin() + (long)i);
            return code;
        }
        return 0;
    }
};

// ---------------------------------------------------------------------------
// queues

inline uint32_t draw_rank(int priority) { // the more urgent a stream, the oftener it draws
    uint32_t rank = (uint32_t)random_bits();
    for (; priority < LEAST_PRIORITY; priority++) rank = std::max(rank, (uint32_t)random_bits());
    return rank;
}

inline cudaStream_t new_stream(int device, bool blocking, int priority = LEAST_PRIORITY) {
    cudaStream_t s = new CUstream_st{device, blocking, false, priority, draw_rank(priority), {}, host_clock, ""};
    machine().streams.insert(s);
    return s;
}

/* The stream behind a handle; NULL where there is none. */
inline cudaStream_t stream_of(cudaStream_t s) {
    Machine &m = machine();
    if (s) return m.streams.count(s) ? s : nullptr;
    if (!m.default_stream[device_now]) m.default_stream[device_now] = new_stream(device_now, true);
    return m.default_stream[device_now];
}

inline void check_launched(cudaStream_t s) { // NCCL's own thread may queue it before what comes now, or after
    if (!s->unlaunched.empty())
        fail(nullptr,
             "a stream is used again while %s is still in progress there: ask ncclCommGetAsyncError until it says "
             "ncclSuccess",
             s->unlaunched.c_str());
}

constexpr double NO_OPERATION = -1; // lasts so long: the emulator's own

/* `lasts`: us by the logical clock. */
inline Op &enqueue(cudaStream_t s, double lasts, std::function<void()> run) {
    check_launched(s);
    if (lasts != NO_OPERATION) host_clock += cuda_on_cpu.costs.enqueue;
    if (s->queue.empty()) s->rank = draw_rank(s->priority);
    s->queue.push_back(
        Op{machine().orders++, host_clock, std::max(lasts, 0.0), std::move(run), nullptr, nullptr, nullptr, false});
    cuda_on_cpu.deepest = std::max(cuda_on_cpu.deepest, s->queue.size());
    machine().changed.notify_all();
    return s->queue.back();
}

inline bool wait_for_each_other(cudaStream_t a,
                                cudaStream_t b) { // the default stream, and another that is not non-blocking
    cudaStream_t first = machine().default_stream[a->device];
    return a != b && a->blocking && b->blocking && a->device == b->device && (a == first || b == first);
}

/* Nothing before it keeps a stream's head from running; a head that meets others may still have to wait for them. */
inline bool is_free(cudaStream_t s) {
    if (s->busy || s->queue.empty()) return false;
    const Op &op = s->queue.front();
    if (op.awaits && !op.awaits->done) return false;
    if (!s->blocking) return true;
    for (cudaStream_t other : machine().streams) // the default stream waits for all that are no younger
        if (wait_for_each_other(s, other) && !other->queue.empty() && other->queue.front().order < op.order)
            return false;
    return true;
}

inline bool is_ready(cudaStream_t s) {
    if (!is_free(s)) return false;
    Rendezvous *meets = s->queue.front().meets.get();
    return !meets || machine().sticky || meets->can_go_on();
}

/* When the head of a free stream starts, by the logical clock. */
inline double start_of(cudaStream_t s) {
    const Op &op = s->queue.front();
    double start = std::max(s->clock, op.queued);
    if (op.awaits) start = std::max(start, op.awaits->time);
    for (cudaStream_t other : machine().streams)
        if (wait_for_each_other(s, other)) start = std::max(start, other->clock);
    return start;
}

/* Runs one operation, chosen among the heads of streams; false: none can run now. Streams keep their rank for a while,
 * so that one gets far ahead of another; seed 0 runs operations in the order in which they were queued. */
inline bool run_one() {
    Machine &m = machine();
    cudaStream_t best = nullptr;
    for (cudaStream_t s : m.streams) {
        if (!is_ready(s)) continue;
        if (cuda_on_cpu.seed && choose(16) == 0) s->rank = draw_rank(s->priority);
        if (!best || (cuda_on_cpu.seed ? s->rank > best->rank : s->queue.front().order < best->queue.front().order))
            best = s;
    }
    if (!best) return false;
    Op &op = best->queue.front();
    double start = start_of(best);
    if (op.on_host) { // on a thread of its own, as it may wait for what other ranks have yet to enqueue
        best->busy = true;
        best->clock = start + op.lasts;
        std::thread([best, run = op.run] {
            in_host_function = true;
            run();
            std::unique_lock<std::mutex> guard(machine().lock);
            best->busy = false;
            best->queue.pop_front();
            machine().changed.notify_all();
        }).detach();
        return true;
    }
    if (op.meets && !m.sticky) {
        if (!op.meets->go_on()) return true;
        best->clock = std::max(start, op.meets->end);
    } else {
        if (op.run && !m.sticky) op.run();
        best->clock = start + op.lasts;
    }
    if (op.record) {
        op.record->done = true;
        op.record->time = best->clock;
    }
    best->queue.pop_front();
    return true;
}

inline void before_waiting() {
    if (group_depth) fail(nullptr, "the host waits inside a group of NCCL calls: ncclGroupEnd is missing");
}

/* Who asks lets some operations run, so that who polls gets there; and lets others, when nothing can run. */
inline void poll_one(std::unique_lock<std::mutex> &lock) {
    before_waiting();
    bool ready = false;
    for (cudaStream_t s : machine().streams) ready |= is_ready(s);
    if (ready) {
        open_memory();
        for (uint32_t times = 1 + choose(64); times && run_one();) times--;
        close_memory();
        return;
    }
    lock.unlock();
    sched_yield();
    lock.lock();
}

inline void tell_of_waiting() { // nothing is wrong yet: others may be slow
    for (cudaStream_t s : machine().streams)
        if (!s->queue.empty() && s->queue.front().meets)
            fprintf(stderr, "CUDA on a CPU: for 30 seconds nothing could run: %s\n",
                    s->queue.front().meets->waits().c_str());
}

/* `others`: it is for other threads of the host to make it true, by calls that have yet to come. */
inline void run_until(std::unique_lock<std::mutex> &lock, const std::function<bool()> &done, bool others = false) {
    before_waiting();
    open_memory();
    while (!done())
        if (!run_one()) {
            bool may_change = others;
            for (cudaStream_t s : machine().streams)
                may_change |= s->busy || (!s->queue.empty() && s->queue.front().meets);
            if (!may_change) fail(nullptr, "every stream waits for another");
            close_memory(); // host code runs meanwhile
            if (machine().polls) {
                lock.unlock();
                usleep(50);
                lock.lock();
            } else if (machine().changed.wait_for(lock, std::chrono::seconds(30)) == std::cv_status::timeout)
                tell_of_waiting();
            open_memory();
        }
    close_memory();
}

inline void host_reaches(double time) { host_clock = std::max(host_clock, time); }

inline void finish(std::unique_lock<std::mutex> &lock, cudaStream_t s) {
    check_launched(s);
    run_until(lock, [s] { return s->queue.empty(); });
    host_reaches(s->clock);
}

inline void finish_all(std::unique_lock<std::mutex> &lock, int device) {
    for (cudaStream_t s : machine().streams)
        if (s->device == device) check_launched(s);
    run_until(lock, [device] {
        for (cudaStream_t s : machine().streams)
            if (s->device == device && !s->queue.empty()) return false;
        return true;
    });
    for (cudaStream_t s : machine().streams)
        if (s->device == device) host_reaches(s->clock);
}

// ---------------------------------------------------------------------------
// launches

inline std::string plain_name(const char *text) { // without the parentheses around it, nor spaces
    std::string s;
    for (; *text; text++)
        if (*text != ' ') s += *text;
    if (s.size() > 2 && s[0] == '(' && s[s.size() - 1] == ')') s = s.substr(1, s.size() - 2);
    return s;
}

inline int registers_of(const std::string &kernel) { // 0: not known
    static std::string read;
    static std::map<std::string, int> table;
    if (!cuda_on_cpu.registers) return 0;
    if (read != cuda_on_cpu.registers) {
        read = cuda_on_cpu.registers;
        table.clear();
        FILE *f = fopen(read.c_str(), "r");
        if (!f) fail(nullptr, "table of registers %s cannot be read", read.c_str());
        char line[1024];
        while (fgets(line, sizeof line, f)) {
            char *end = line + strcspn(line, "#\n");
            *end = 0;
            while (end > line && (end[-1] == ' ' || end[-1] == '\t')) *--end = 0;
            char *number = strrchr(line, ' ');
            if (!number) continue;
            *number = 0;
            table[plain_name(line)] = atoi(number + 1);
        }
        fclose(f);
    }
    auto it = table.find(kernel);
    return it == table.end() ? 0 : it->second;
}

/* As a GPU refuses it: the code, and the reason for people. */
inline cudaError_t check_launch(Launch &l, std::string *why) {
    const Limits &chip = chip_limits();
    char text[256] = "";
    cudaError_t e = cudaErrorInvalidConfiguration;
    uint64_t count = (uint64_t)l.block.x * l.block.y * l.block.z;
    auto allowed = machine().dynamic_shared.find({l.device, l.function});
    size_t most = allowed == machine().dynamic_shared.end() ? STATIC_SHARED_LIMIT : (size_t)allowed->second;
    l.opted_in = allowed != machine().dynamic_shared.end();
    int registers = registers_of(l.name);
    uint64_t taken = (uint64_t)((registers * WARP + 255) / 256 * 256) * ((count + WARP - 1) / WARP);
    if (!l.grid.x || !l.grid.y || !l.grid.z || !count)
        snprintf(text, sizeof text, "grid (%u, %u, %u) of blocks (%u, %u, %u) is empty", l.grid.x, l.grid.y, l.grid.z,
                 l.block.x, l.block.y, l.block.z);
    else if (l.grid.x > 0x7FFFFFFFu || l.grid.y > 65535 || l.grid.z > 65535)
        snprintf(text, sizeof text, "grid (%u, %u, %u) is over (2147483647, 65535, 65535)", l.grid.x, l.grid.y,
                 l.grid.z);
    else if (count > MAX_THREADS || l.block.x > 1024 || l.block.y > 1024 || l.block.z > 64)
        snprintf(text, sizeof text, "block (%u, %u, %u) is over 1024 threads, or 64 in z", l.block.x, l.block.y,
                 l.block.z);
    else if (l.shared > most || l.shared > chip.shared) {
        e = cudaErrorInvalidValue;
        snprintf(text, sizeof text,
                 "%zu bytes of dynamic shared memory: %zu are allowed on this device; "
                 "cudaFuncSetAttribute raises that up to %zu on sm_%d",
                 l.shared, most, chip.shared, chip.chip);
    } else if (taken > 65536) {
        e = cudaErrorLaunchOutOfResources;
        snprintf(text, sizeof text, "%llu threads of %d registers take %llu of 65536 registers",
                 (unsigned long long)count, registers, (unsigned long long)taken);
    } else return cudaSuccess;
    *why = text;
    return e;
}

template <typename P> inline void check_argument(const Launch &l, const P &argument, int number) {
    if constexpr (std::is_pointer_v<P>) {
        if (argument)
            check_range(("kernel " + l.name + ", argument " + std::to_string(number)).c_str(), (const void *)argument,
                        0, l.device, l.at);
    } else {
        (void)l;
        (void)argument;
        (void)number;
    }
}

inline void run_launch(const Launch &l) {
    size_t &seen = machine().static_shared[l.function];
    l.static_bytes = seen;
    run_grid(&l);
    if (seen < block.static_bytes) seen = block.static_bytes;
    check_zones(("kernel " + l.name).c_str(), &l.at);
}

template <typename... P> struct KernelCall : Body {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
    KernelCall(void (*k)(P...), const P &...a) : kernel(k), arguments(a...) {}
    template <size_t... I> __forceinline__ void call(std::index_sequence<I...>) const {
        kernel(std::get<I>(arguments)...);
    }
    void run() const override { call(std::index_sequence_for<P...>()); }
    size_t bytes() const override { return sizeof *this; }
};

/* A kernel's first launch on a device loads it, unless all are loaded at the start, and loading may wait for the
 * device: not behind an operation that waits for other ranks. */
inline void check_loaded(const Launch &l) {
    Machine &m = machine();
    if (!m.loaded.insert({l.device, l.function}).second || m.eager) return;
    for (cudaStream_t s : m.streams)
        for (const Op &op : s->queue)
            if (s->device == l.device && op.meets)
                fail(&l.at,
                     "kernel %s is launched for the first time while a collective is queued on its device: loading it "
                     "may wait for the collective. Set CUDA_MODULE_LOADING=EAGER before CUDA starts, or launch it "
                     "before",
                     l.name.c_str());
}

/* Arguments are copied when the kernel is enqueued, converted as in a call of it. */
template <typename... P>
inline void launch(const char *name, Place at, void (*kernel)(P...), dim3 grid, dim3 threads_of_block, size_t shared,
                   cudaStream_t stream, std::type_identity_t<P>... arguments) {
    Call call("LAUNCH");
    cudaStream_t s = call.error ? nullptr : stream_of(stream);
    if (s && s->device != device_now) s = nullptr;
    auto l = std::make_shared<Launch>(
        Launch{plain_name(name), at, (const void *)kernel, grid, threads_of_block, shared, device_now, false, nullptr});
    std::string why = "the error is injected, or persists";
    cudaError_t e = call.error;
    if (!e) e = s ? check_launch(*l, &why) : cudaErrorInvalidResourceHandle;
    if (e) {
        call.give(e);
        launch_error = "kernel " + l->name + ", " + at.file + ":" + std::to_string(at.line) + ": " +
                       (s || call.error ? why : "no such stream on this device");
        fprintf(stderr, "CUDA on a CPU: %s\n", launch_error.c_str());
        return;
    }
    check_loaded(*l);
    int number = 0;
    (check_argument<P>(*l, arguments, ++number), ...);
    l->body = std::make_shared<KernelCall<P...>>(kernel, arguments...);
    double count = (double)grid.x * grid.y * grid.z * threads_of_block.x * threads_of_block.y * threads_of_block.z;
    enqueue(s, cuda_on_cpu.costs.launch + count * cuda_on_cpu.costs.thread, [l] { run_launch(*l); });
}

} // namespace emu

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                         \
    emu::launch(#kernel, emu::Place{__FILE__, __LINE__}, kernel, grid, block, shared_bytes,                            \
                stream __VA_OPT__(, ) __VA_ARGS__)

// ---------------------------------------------------------------------------
// for tests

/* The after-th call of `api` (its name; LAUNCH for launches) from now on returns `code`. Codes that persist on a GPU
 * (cudaErrorIllegalAddress and its kin) then come out of every later call. cuBLASLt's status codes go the same way. */
inline void cuda_on_cpu_fail(const char *api, cudaError_t code, int after) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::machine().failures.push_back(emu::Failure{api, (int)code, after});
}

/* Nobody may write `bytes` from p on, inside device memory: NaNs, looked at after every kernel. At once; or, given a
 * stream, from here on in its order. */
inline void cuda_on_cpu_red_zone(void *p, size_t bytes) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::add_zone((char *)p, bytes);
}
inline void cuda_on_cpu_red_zone(void *p, size_t bytes, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::enqueue(emu::stream_of(stream), emu::NO_OPERATION, [p, bytes] { emu::add_zone((char *)p, bytes); });
}
inline void cuda_on_cpu_forget_zones(void *from, size_t bytes) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::forget_zones((char *)from, bytes);
}
inline void cuda_on_cpu_forget_zones(void *from, size_t bytes, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::enqueue(emu::stream_of(stream), emu::NO_OPERATION, [from, bytes] { emu::forget_zones((char *)from, bytes); });
}

/* From here on in the stream's order the bytes are no numbers. */
inline void cuda_on_cpu_poison(void *from, size_t bytes, cudaStream_t stream, emu::Place at = emu::Place::here()) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    emu::enqueue(emu::stream_of(stream), emu::NO_OPERATION, [from, bytes, at] {
        emu::check_no_zone("the memory of cuda_on_cpu_poison", from, bytes, at);
        memset(from, 0xFF, bytes);
    });
}

/* Device memory of any size that takes no more than what is touched of it: for offsets beyond 2^31. cudaFree ends it.
 */
inline void *cuda_on_cpu_sparse(size_t bytes) {
    std::unique_lock<std::mutex> lock(emu::machine().lock);
    void *p;
    emu::allocate(&p, bytes, "device memory", cudaMemoryTypeDevice, 0,
                  16ull << 30); // negative offsets fall into what nobody may touch
    return p;
}

#define CUDA_ON_CPU_CALL(name)                                                                                         \
    emu::Call call(name);                                                                                              \
    if (call.error) return call.error

// ---------------------------------------------------------------------------
// the API: errors, devices

inline cudaError_t cudaGetLastError() {
    emu::launch_error.clear();
    cudaError_t e = emu::machine().sticky ? emu::machine().sticky : emu::last_error;
    emu::last_error = cudaSuccess;
    return e;
}

inline cudaError_t cudaPeekAtLastError() {
    emu::launch_error.clear();
    return emu::machine().sticky ? emu::machine().sticky : emu::last_error;
}

namespace emu {
/* The numbers of the devices that the program sees. A number that is no device hides those after it, as in CUDA. */
inline std::vector<int> visible_devices() {
    std::vector<int> numbers;
    const char *list = cuda_on_cpu.visible;
    for (int i = 0; i < cuda_on_cpu.devices && !list; i++) numbers.push_back(i);
    for (char *end; list && *list; list = *end ? end + 1 : end) {
        long number = strtol(list, &end, 10);
        if (end == list || number < 0 || number >= cuda_on_cpu.devices) break;
        numbers.push_back((int)number);
    }
    return numbers;
}
} // namespace emu

inline cudaError_t cudaGetDeviceCount(int *count) {
    emu::Call call("cudaGetDeviceCount");
    *count = 0;
    if (call.error) return call.error;
    *count = (int)emu::visible_devices().size();
    return *count ? cudaSuccess : call.give(cudaErrorNoDevice);
}

inline cudaError_t cudaSetDevice(int device) {
    CUDA_ON_CPU_CALL("cudaSetDevice");
    if (device < 0 || device >= (int)emu::visible_devices().size() || device >= emu::MAX_DEVICES)
        return call.give(cudaErrorInvalidDevice);
    emu::device_now = device;
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int *device) {
    emu::Call call("cudaGetDevice");
    *device = emu::device_now;
    return call.error;
}

struct cudaUUID_t {
    char bytes[16];
};
struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid; // host and device
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin,
        reservedSharedMemPerBlock;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor, l2CacheSize;
    int integrated, unifiedAddressing, managedMemory, concurrentManagedAccess, concurrentKernels, asyncEngineCount,
        ECCEnabled;
    int pciDomainID, pciBusID, pciDeviceID;
};

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    *p = cudaDeviceProp();
    CUDA_ON_CPU_CALL("cudaGetDeviceProperties");
    const std::vector<int> visible = emu::visible_devices();
    if (device < 0 || device >= (int)visible.size()) return call.give(cudaErrorInvalidDevice);
    const emu::Limits &chip = emu::chip_limits();
    if (cuda_on_cpu.name) snprintf(p->name, sizeof p->name, "%s", cuda_on_cpu.name);
    else snprintf(p->name, sizeof p->name, "CUDA on a CPU (sm_%d)", chip.chip);
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "%08x %u", (unsigned)std::hash<std::string>()(host),
             (unsigned)visible[(size_t)device] % 1000);
    p->totalGlobalMem = cuda_on_cpu.memory;
    p->sharedMemPerBlock = emu::STATIC_SHARED_LIMIT;
    p->sharedMemPerBlockOptin = chip.shared;
    p->sharedMemPerMultiprocessor = chip.shared_of_sm;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = emu::WARP;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7FFFFFFF;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = chip.chip / 10;
    p->minor = chip.chip % 10;
    p->multiProcessorCount = cuda_on_cpu.multiprocessors;
    p->maxThreadsPerMultiProcessor = chip.threads_of_sm;
    p->maxBlocksPerMultiProcessor = chip.blocks_of_sm;
    p->l2CacheSize = 50 << 20;
    p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = p->concurrentKernels = 1;
    p->asyncEngineCount = 2;
    p->pciBusID = visible[(size_t)device];
    return cudaSuccess;
}

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMaxRegistersPerBlock = 12,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82,
    cudaDevAttrManagedMemory = 83,
    cudaDevAttrConcurrentManagedAccess = 89,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106
};

inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    *value = 0;
    cudaDeviceProp p;
    if (cudaError_t e = cudaGetDeviceProperties(&p, device)) return e;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    default: return emu::last_error = cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int *version) {
    emu::Call call("cudaDriverGetVersion");
    *version = cuda_on_cpu.driver;
    return call.error;
}

inline cudaError_t cudaRuntimeGetVersion(int *version) {
    emu::Call call("cudaRuntimeGetVersion");
    *version = cuda_on_cpu.runtime;
    return call.error;
}

inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = *free_bytes = 0;
    CUDA_ON_CPU_CALL("cudaMemGetInfo");
    *total = cuda_on_cpu.memory;
    *free_bytes = cuda_on_cpu.memory - cuda_on_cpu.held - emu::machine().used[emu::device_now];
    return cudaSuccess;
}

// ---------------------------------------------------------------------------
// the API: memory

inline cudaError_t cuda_on_cpu_allocate(const char *api, void **p, size_t bytes, cudaMemoryType type,
                                        bool mapped = false) {
    static const char *const names[] = {"", "pinned host memory", "device memory", "managed memory"};
    emu::Call call(api);
    *p = nullptr;
    if (call.error || !bytes) return call.error;
    cudaError_t e = emu::allocate(p, bytes, mapped ? "mapped pinned memory" : names[type], type,
                                  type == cudaMemoryTypeHost ? 0 : bytes);
    if (!e) emu::machine().memory[(char *)*p].reachable = mapped;
    return call.give(e);
}

template <typename T> inline cudaError_t cudaMalloc(T **p, size_t bytes) {
    return cuda_on_cpu_allocate("cudaMalloc", (void **)p, bytes, cudaMemoryTypeDevice);
}
template <typename T> inline cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned flags = cudaHostAllocDefault) {
    return cuda_on_cpu_allocate("cudaMallocHost", (void **)p, bytes, cudaMemoryTypeHost, flags & cudaHostAllocMapped);
}
template <typename T> inline cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned flags) {
    return cuda_on_cpu_allocate("cudaHostAlloc", (void **)p, bytes, cudaMemoryTypeHost, flags & cudaHostAllocMapped);
}
template <typename T> inline cudaError_t cudaMallocManaged(T **p, size_t bytes, unsigned = cudaMemAttachGlobal) {
    return cuda_on_cpu_allocate("cudaMallocManaged", (void **)p, bytes, cudaMemoryTypeManaged);
}

inline cudaError_t cudaHostGetDevicePointer(void **device, void *p, unsigned) { // one address for both
    *device = nullptr;
    CUDA_ON_CPU_CALL("cudaHostGetDevicePointer");
    auto it = emu::find_memory(p);
    if (it == emu::machine().memory.end() || !it->second.reachable) return call.give(cudaErrorInvalidValue);
    *device = p;
    return cudaSuccess;
}

inline cudaError_t cuda_on_cpu_release(const char *api, void *p,
                                       bool host) { // waits for all that its device has queued
    emu::Call call(api);
    if (call.error || !p) return call.error;
    auto it = emu::find_memory(p);
    emu::finish_all(call.lock, it == emu::machine().memory.end() || host ? emu::device_now : it->second.device);
    return call.give(emu::release(p, host));
}
inline cudaError_t cudaFree(void *p) { return cuda_on_cpu_release("cudaFree", p, false); }
inline cudaError_t cudaFreeHost(void *p) { return cuda_on_cpu_release("cudaFreeHost", p, true); }

namespace emu {

/* A copy of `height` rows of `width` bytes. Its pageable source is read now, its pinned or device source when it runs.
 */
inline cudaError_t copy(const char *api, Place at, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                        size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream, bool blocking) {
    Call call(api);
    if (call.error) return call.error;
    cudaStream_t s = stream_of(stream);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    if ((unsigned)kind > cudaMemcpyDefault) return call.give(cudaErrorInvalidMemcpyDirection);
    if (height > 1 && (width > to_pitch || width > from_pitch)) return call.give(cudaErrorInvalidPitchValue);
    if (!width || !height) return cudaSuccess;
    if (!to || !from) return call.give(cudaErrorInvalidValue);
    bool to_device = is_device(memory_type(to)), from_device = is_device(memory_type(from));
    if (kind != cudaMemcpyDefault) {
        to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    }
    std::string to_what = std::string("the destination of ") + api, from_what = std::string("the source of ") + api;
    check_range(to_what.c_str(), to, (height - 1) * to_pitch + width, to_device ? ON_ANY_DEVICE : ON_HOST, at);
    check_range(from_what.c_str(), from, (height - 1) * from_pitch + width, from_device ? ON_ANY_DEVICE : ON_HOST, at);
    std::shared_ptr<std::vector<char>> staged;
    if (memory_type(from) == cudaMemoryTypeUnregistered) {
        staged = std::make_shared<std::vector<char>>(width * height);
        for (size_t i = 0; i < height; i++)
            memcpy(staged->data() + i * width, (const char *)from + i * from_pitch, width);
        from = staged->data();
        from_pitch = width;
    }
    enqueue(s, cuda_on_cpu.costs.copy + cuda_on_cpu.costs.byte * (double)(width * height), [=] {
        check_no_zone(to_what.c_str(), to, (height - 1) * to_pitch + width, at);
        if (!staged) check_no_zone(from_what.c_str(), from, (height - 1) * from_pitch + width, at);
        if (width == to_pitch && width == from_pitch) memmove(to, from, width * height);
        else
            for (size_t i = 0; i < height; i++)
                memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    });
    if (blocking || memory_type(to) == cudaMemoryTypeUnregistered)
        finish(call.lock, s); // pageable: the call returns when it is done
    return cudaSuccess;
}

inline cudaError_t set(const char *api, Place at, void *p, int value, size_t bytes, cudaStream_t stream) {
    Call call(api);
    if (call.error) return call.error;
    cudaStream_t s = stream_of(stream);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    if (!bytes) return cudaSuccess;
    std::string what = std::string("the memory of ") + api;
    check_range(what.c_str(), p, bytes, s->device, at);
    enqueue(s, cuda_on_cpu.costs.copy + cuda_on_cpu.costs.byte * (double)bytes, [=] {
        check_no_zone(what.c_str(), p, bytes, at);
        memset(p, value, bytes);
    });
    return cudaSuccess;
}

} // namespace emu

inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                              emu::Place at = emu::Place::here()) {
    return emu::copy("cudaMemcpy", at, to, bytes, from, bytes, bytes, 1, kind, nullptr, true);
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t s = nullptr, emu::Place at = emu::Place::here()) {
    return emu::copy("cudaMemcpyAsync", at, to, bytes, from, bytes, bytes, 1, kind, s, false);
}
inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t s = nullptr,
                                     emu::Place at = emu::Place::here()) {
    return emu::copy("cudaMemcpy2DAsync", at, to, to_pitch, from, from_pitch, width, height, kind, s, false);
}
inline cudaError_t cudaMemset(void *p, int value, size_t bytes, emu::Place at = emu::Place::here()) {
    return emu::set("cudaMemset", at, p, value, bytes, nullptr);
}
inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s = nullptr,
                                   emu::Place at = emu::Place::here()) {
    return emu::set("cudaMemsetAsync", at, p, value, bytes, s);
}

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    *a = cudaPointerAttributes{cudaMemoryTypeUnregistered, -1, nullptr, (void *)p};
    CUDA_ON_CPU_CALL("cudaPointerGetAttributes");
    auto it = emu::find_memory(p);
    if (it == emu::machine().memory.end()) return cudaSuccess;
    *a = cudaPointerAttributes{it->second.type, it->second.device, (void *)p,
                               it->second.type == cudaMemoryTypeDevice ? nullptr : (void *)p};
    return cudaSuccess;
}

// ---------------------------------------------------------------------------
// the API: kernels

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};

template <typename F> inline cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute attribute, int value) {
    CUDA_ON_CPU_CALL("cudaFuncSetAttribute");
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0) return call.give(cudaErrorInvalidValue);
    if ((size_t)value + emu::machine().static_shared[(const void *)kernel] > emu::chip_limits().shared)
        return call.give(cudaErrorInvalidValue);
    emu::machine().dynamic_shared[{emu::device_now, (const void *)kernel}] = value;
    return cudaSuccess;
}

template <typename F>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a,
                                         F *kernel) { // static shared memory: what was seen so far
    *a = cudaFuncAttributes();
    CUDA_ON_CPU_CALL("cudaFuncGetAttributes");
    auto allowed = emu::machine().dynamic_shared.find({emu::device_now, (const void *)kernel});
    a->sharedSizeBytes = emu::machine().static_shared[(const void *)kernel];
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = a->binaryVersion = emu::chip_limits().chip;
    a->maxDynamicSharedSizeBytes =
        allowed == emu::machine().dynamic_shared.end() ? (int)emu::STATIC_SHARED_LIMIT : allowed->second;
    return cudaSuccess;
}

template <typename F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *kernel, int threads,
                                                                 size_t shared) { // registers are not known
    *blocks = 0;
    CUDA_ON_CPU_CALL("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    const emu::Limits &chip = emu::chip_limits();
    if (threads < 1 || threads > emu::MAX_THREADS) return call.give(cudaErrorInvalidValue);
    size_t bytes = shared + emu::machine().static_shared[(const void *)kernel] + 1024; // each block reserves 1 KB
    *blocks = std::min(std::min(chip.blocks_of_sm, chip.threads_of_sm / ((threads + 31) / 32 * 32)),
                       (int)(chip.shared_of_sm / bytes));
    return cudaSuccess;
}
#endif
