/* fibers.h: runs one block of CUDA threads after the other on one CPU thread.
 *
 * A CUDA thread is a fiber: it runs until it waits (at a barrier, or in a warp operation for the lanes that its mask
 * names), then another one that is ready is chosen, at random by the seed. A stack that a thread has left runs the next
 * thread that has not begun, so a kernel that never waits never switches stacks.
 * The last to arrive does the work of a warp operation for all lanes: each has left a pointer to its operands.
 * Owns: stacks, the block that runs, its shared memory. One grid runs at a time in a process (streams.h holds the
 * lock).
 */
#ifndef CUDA_ON_CPU_FIBERS_H
#define CUDA_ON_CPU_FIBERS_H
#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

enum { WARP = 32, MAX_WARPS = 32, MAX_THREADS = WARP * MAX_WARPS, MAX_REGIONS = 64 };
enum : size_t { STACK_BYTES = CUDA_ON_CPU_ASAN ? 512 << 10 : 128 << 10, PAGE = 4096 };

// ---------------------------------------------------------------------------
// stacks, and the switch from one to another

struct Fiber {
#ifdef CUDA_ON_CPU_UCONTEXT
    ucontext_t context;
#else
    void *stopped_at = nullptr; // stack pointer; the registers that a call preserves lie there
#endif
    const void *stack = nullptr; // lowest address above the guard page
    size_t bytes = 0;
    void *fake = nullptr; // AddressSanitizer's own
};

#ifndef CUDA_ON_CPU_UCONTEXT
__attribute__((naked, noinline)) inline void switch_stacks(
    void **, void *) { // rdi: where to leave our stack pointer, rsi: theirs
    __asm__("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
            "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
            "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
#endif

inline Fiber outside;         // the CPU thread's own stack, while a block runs
inline Fiber *left, *entered; // of the switch under way

__forceinline__ void arrived(Fiber *me) {
#if CUDA_ON_CPU_ASAN
    __sanitizer_finish_switch_fiber(me->fake, &left->stack, &left->bytes);
#else
    (void)me;
#endif
}

__forceinline__ void switch_fiber(Fiber *from, Fiber *to) {
    left = from;
    entered = to;
#if CUDA_ON_CPU_ASAN
    __sanitizer_start_switch_fiber(&from->fake, to->stack, to->bytes);
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    switch_stacks(&from->stopped_at, to->stopped_at);
#endif
    arrived(from);
}

inline void fiber_main();

inline Fiber fibers[MAX_THREADS]; // stacks are made when they are needed first, and kept
inline Fiber *spare[MAX_THREADS]; // those stopped at the end of fiber_main's loop
inline int num_fibers, num_spare;

inline Fiber *free_fiber() {
    if (num_spare) return spare[--num_spare];
    char *p = (char *)mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail(nullptr, "no memory for the stack of a thread");
    mprotect(p, PAGE, PROT_NONE);
    Fiber *f = &fibers[num_fibers++];
    f->stack = p + PAGE;
    f->bytes = STACK_BYTES;
    size_t used =
        STACK_BYTES - (size_t)(num_fibers % 16) * 320; // else all stacks' ends fall into the same lines of the cache
#ifdef CUDA_ON_CPU_UCONTEXT
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = p + PAGE;
    f->context.uc_stack.ss_size = used & ~(size_t)63;
    makecontext(&f->context, fiber_main, 0);
#else
    void **top = (void **)(p + PAGE + (used & ~(size_t)63));
    *--top = nullptr;            // where fiber_main would return to: debuggers stop here
    *--top = (void *)fiber_main; // what the first switch returns to
    f->stopped_at = top -= 6;    // rbp, rbx, r12 to r15: zero
#endif
    return f;
}

// ---------------------------------------------------------------------------
// the grid that runs, its block, its warps, its threads

struct Body { // the kernel with its arguments
    virtual void run() const = 0;
    virtual size_t bytes() const = 0; // of the object, which holds the arguments
    virtual ~Body() {}
};

struct Launch {
    std::string name;
    Place at;
    const void *function;
    dim3 grid, block;
    size_t shared; // bytes of dynamic shared memory
    int device;
    bool opted_in; // to more shared memory than 48 KB
    std::shared_ptr<Body> body;
    mutable size_t static_bytes = 0; // of shared memory, as far as blocks have declared any
};

struct Copy {
    void *to;
    const void *from;
    bool valid;
    unsigned group;
}; // 16 bytes, by cp.async

struct Thread {
    uint3 index;
    int number, warp, lane;
    Fiber *fiber;             // NULL: has not begun
    const char *waits;        // in what; NULL: does not wait
    Place at;                 // where it stands
    uint32_t mask;            // for which lanes; 0: for the block
    std::vector<Copy> copies; // cp.async under way, the oldest first
    unsigned group;           // of copies, that is open
    const void *waits_on;     // an mbarrier (mbarrier.h); NULL: none
    int parity;               // of the phase that it waits for there
};

struct Meeting { // a warp operation that some of its lanes have reached
    uint32_t mask, arrived;
    Place at;
    const char *what;
    void *lane[WARP]; // operands, on the stacks of those that wait
};

/* Operations that run beside the threads (async.h): how many there are; runs one of them, or says that there is none;
 * what a thread waits for, in words; what may not be left over when a thread or a block ends. */
inline int async_pending;
inline bool async_run_one();
inline void async_sometimes();
inline std::string waits_for(const Thread *t);
inline void async_end_thread();
inline void async_begin_block();
inline void async_end_block();

struct Warp {
    uint32_t exist, ended; // lanes
    int num_meetings;
    Meeting meetings[WARP];
};

struct SharedRegion {
    char *at;
    size_t bytes;
    const char *name;
};

struct Block {
    int threads, warps, ended;
    int warp_now;              // whose lanes are preferred, by odd seeds
    uint32_t ready[MAX_WARPS]; // lanes that may run
    int waiting;               // threads at the block's barrier
    Place barrier;
    const char *barrier_what;
    int first_waiting, sum, result; // of the predicates of __syncthreads_or, _and, _count
    uint64_t serial;                // of all blocks ever run: static shared memory is handed out again in each
    char *shared_end;               // of what is handed out
    size_t static_bytes;
    int num_regions;
    SharedRegion regions[MAX_REGIONS]; // the dynamic part, then static arrays
};

inline thread_local bool on_device; // this CPU thread runs the kernel
inline const Launch *running;       // NULL: no kernel runs
inline Thread *current;             // NULL: no thread runs
inline Thread *const threads =
    new Thread[MAX_THREADS]; // never destroyed: other CPU threads may run when the process ends
inline Warp warps[MAX_WARPS];
inline Block block;

inline std::string where(const Place *at) {
    char text[1024] = "";
    if (!on_device || !running) {
        if (at) snprintf(text, sizeof text, "%.300s:%d: ", at->file, at->line);
        return text;
    }
    int used = snprintf(text, sizeof text, "kernel %.300s, ", running->name.c_str());
    if (at) used += snprintf(text + used, sizeof text - (size_t)used, "%.200s:%d", at->file, at->line);
    else
        used += snprintf(text + used, sizeof text - (size_t)used, "launched at %.200s:%d", running->at.file,
                         running->at.line);
    if (!at && current && current->at.file)
        used += snprintf(text + used, sizeof text - (size_t)used, ", last seen at %.200s:%d", current->at.file,
                         current->at.line);
    if (current)
        used += snprintf(text + used, sizeof text - (size_t)used, ", block (%u, %u, %u), thread (%u, %u, %u)",
                         blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    snprintf(text + used, sizeof text - (size_t)used, ": ");
    return text;
}

inline bool undefined_behavior; // of the current thread, as a sanitizer says (streams.h)

__forceinline__ void check_behavior() {
    if (undefined_behavior) fail(nullptr, "UndefinedBehaviorSanitizer's report stands above");
}

__forceinline__ void set_current(Thread *t) {
    current = t;
    threadIdx = t->index;
}

/* One of those that may run; it no longer counts as ready. Odd seeds stay with a warp as long as one of its lanes may
 * run, even ones jump; seed 0 takes the first. */
__forceinline__ Thread *pick() {
    int w = block.warp_now;
    if (!(cuda_on_cpu.seed & 1) || !block.ready[w]) {
        w = (int)choose((uint32_t)block.warps);
        for (int tries = 0; !block.ready[w]; w = w + 1 == block.warps ? 0 : w + 1)
            if (tries++ == block.warps) return nullptr;
        block.warp_now = w;
    }
    uint32_t set = block.ready[w], turn = choose(WARP);
    uint32_t turned = turn ? set >> turn | set << (WARP - turn) : set;
    int lane = (int)((turn + (uint32_t)__builtin_ctz(turned)) % WARP);
    block.ready[w] &= ~(1u << lane);
    return &threads[w * WARP + lane];
}

inline std::string thread_name(const Thread *t) {
    char text[64];
    snprintf(text, sizeof text, "thread (%u, %u, %u)", t->index.x, t->index.y, t->index.z);
    return text;
}

/* Nobody may run and not all have ended: says who waits for whom. */
__attribute__((noreturn)) inline void deadlock() {
    Thread *one = nullptr, *other = nullptr;
    for (int i = 0; i < block.threads; i++) {
        Thread *t = &threads[i];
        if (!t->waits) continue;
        if (!one) one = t;
        else if (!other && !(t->at == one->at)) other = t;
    }
    set_current(one);
    if (other)
        fail(&one->at,
             "waits in %s for good: %s waits in %s at %s:%d. Every thread that is waited for must come to the same "
             "place",
             waits_for(one).c_str(), thread_name(other).c_str(), waits_for(other).c_str(), other->at.file,
             other->at.line);
    if (!one->mask) fail(&one->at, "waits in %s for good", waits_for(one).c_str());
    fail(&one->at, "waits in %s for good (lanes 0x%08x)", one->waits, one->mask);
}

/* One of those that may run, once asynchronous operations have made one ready if nobody was; NULL: nobody is. */
inline Thread *pick_or_land() {
    if (async_pending) async_sometimes();
    Thread *t = pick();
    while (!t && block.ended < block.threads && async_pending && async_run_one()) t = pick();
    return t;
}

/* Stops the current thread until whoever comes last makes it ready. */
inline void wait(Place at, const char *what, uint32_t mask) {
    Thread *me = current;
    check_behavior();
    me->at = at;
    me->waits = what;
    me->mask = mask;
    Thread *next = pick_or_land();
    if (!next) deadlock();
    if (next == me) { // an asynchronous operation has made it ready
        me->waits = nullptr;
        return;
    }
    Fiber *to = next->fiber;
    if (!to) to = free_fiber(); // has not begun: on a stack of its own
    set_current(next);
    switch_fiber(me->fiber, to);
    me->waits = nullptr;
}

/* Lets another thread run, perhaps. */
inline void yield(Place at, const char *what) {
    if (!choose(2)) return;
    block.ready[current->warp] |= 1u << current->lane;
    wait(at, what, 0);
}

inline void end_thread() {
    Thread *t = current;
    check_behavior();
    Warp *w = &warps[t->warp];
    if (block.waiting)
        fail(&block.barrier, "ends while %s waits in %s: let every thread of the block reach it, and return after it",
             thread_name(&threads[block.first_waiting]).c_str(), block.barrier_what);
    for (int i = 0; i < w->num_meetings; i++)
        if (w->meetings[i].mask >> t->lane & 1)
            fail(&w->meetings[i].at,
                 "ends while lanes 0x%08x wait for it in %s with mask 0x%08x: let it take part, or leave it out of the "
                 "mask",
                 w->meetings[i].arrived, w->meetings[i].what, w->meetings[i].mask);
    w->ended |= 1u << t->lane;
    block.ended++;
    async_end_thread();
    if (!t->copies.empty())
        fail(nullptr, "ends while a cp.async of it is on its way, which may yet write over what has come to its place: "
                      "commit it, and wait for it");
}

/* What a stack runs: threads that have not begun, one after the other. It never returns: it stops until there are more.
 */
inline void fiber_main() {
    Fiber *me = entered;
    arrived(me);
    for (;;) {
        Thread *t = current;
        while (t && !t->fiber) {
            t->fiber = me;
            set_current(t);
            running->body->run();
            end_thread();
            t = pick_or_land();
        }
        spare[num_spare++] = me;
        if (t) set_current(t);
        switch_fiber(me, t ? t->fiber : &outside);
    }
}

#if CUDA_ON_CPU_RACES // races.h
struct RaceClock {    // what threads had done when they came to a barrier of a part of the block
    std::vector<uint32_t> seen;
};
inline void races_after_barrier();
inline void races_after_syncwarp(uint32_t mask);
inline void races_touch(const void *p, size_t bytes, bool write, const void *code);
inline void races_release(RaceClock *clock);
inline void races_acquire(const RaceClock &clock);
inline void races_wgmma_starts(int group);
inline void races_wgmma_reads(int group, const void *p, size_t bytes, const void *code);
inline uint32_t races_wgmma_time(int group);
inline void races_wgmma_ended(int group, uint32_t time);
inline bool races_may_publish(const char *p);
#else
struct RaceClock {};
inline void races_after_barrier() {}
inline void races_after_syncwarp(uint32_t) {}
inline void races_touch(const void *, size_t, bool, const void *) {}
inline void races_release(RaceClock *) {}
inline void races_acquire(const RaceClock &) {}
inline void races_wgmma_starts(int) {}
inline void races_wgmma_reads(int, const void *, size_t, const void *) {}
inline uint32_t races_wgmma_time(int) { return 0; }
inline void races_wgmma_ended(int, uint32_t) {}
#endif

/* All threads of the block come here; `predicate` of all is counted. */
inline int block_barrier(int predicate, Place at, const char *what) {
    Thread *me = current;
    if (!me) fail(&at, "%s is for kernels, not for host code", what);
    if (block.ended)
        fail(&at, "waits in %s, but %d threads of the block have ended: let every thread reach it", what, block.ended);
    if (!block.waiting) {
        block.barrier = at;
        block.barrier_what = what;
        block.first_waiting = me->number;
    } else if (!(block.barrier == at) || block.barrier_what != what)
        fail(&at, "comes to %s while %s waits in %s at %s:%d: all threads of a block must come to the same barrier",
             what, thread_name(&threads[block.first_waiting]).c_str(), block.barrier_what, block.barrier.file,
             block.barrier.line);
    block.sum += predicate != 0;
    if (++block.waiting < block.threads) wait(at, what, 0);
    else {
        block.result = block.sum;
        block.sum = block.waiting = 0;
        races_after_barrier();
        for (int w = 0; w < block.warps; w++) block.ready[w] = warps[w].exist;
        block.ready[me->warp] &= ~(1u << me->lane);
    }
    return block.result; // the next barrier ends, and sets it, only when all have come there
}

/* The lanes of `mask` come here, each with its operands; the last one does `work` on all of them. */
inline void warp_meet(uint32_t mask, Place at, const char *what, void *mine,
                      void (*work)(void *const *lane, uint32_t mask)) {
    Thread *me = current;
    if (!me) fail(&at, "%s is for kernels, not for host code", what);
    Warp *w = &warps[me->warp];
    if (!(mask >> me->lane & 1))
        fail(&at, "%s with mask 0x%08x, which leaves out lane %d that calls it", what, mask, me->lane);
    if (mask & ~w->exist)
        fail(&at, "%s with mask 0x%08x names lanes that do not exist: the warp has lanes 0x%08x", what, mask, w->exist);
    if (mask & w->ended)
        fail(&at,
             "%s with mask 0x%08x waits for lanes 0x%08x, which have ended: keep them, or leave them out of the mask",
             what, mask, mask & w->ended);
    Meeting *m = w->meetings, *end = m + w->num_meetings;
    while (m < end && m->mask != mask) m++;
    if (m == end) {
        w->num_meetings++;
        m->mask = mask;
        m->arrived = 0;
        m->at = at;
        m->what = what;
    } else if (!(m->at == at) || m->what != what)
        fail(&at,
             "comes to %s while lanes 0x%08x wait for it in %s at %s:%d: all lanes of a mask must come to the same "
             "operation",
             what, m->arrived, m->what, m->at.file, m->at.line);
    m->lane[me->lane] = mine;
    m->arrived |= 1u << me->lane;
    if (m->arrived != mask) {
        wait(at, what, mask);
        return;
    }
    me->at = at;
    if (work) work(m->lane, mask);
    else races_after_syncwarp(mask);
    if (m != end - 1 && w->num_meetings > 1) *m = w->meetings[w->num_meetings - 1];
    w->num_meetings--;
    block.ready[me->warp] |= mask & ~(1u << me->lane);
}

// ---------------------------------------------------------------------------
// shared memory: one arena; first the dynamic part, then the static arrays in the order in which they are reached

enum : size_t { SHARED_ARENA = 512 << 10, SHARED_GUARD = 128, STATIC_SHARED_LIMIT = 48 << 10 };
enum : size_t { SHARED_FIRST = 1024 }; // address of what a kernel has: CUDA reserves what is before it
enum : unsigned char { SHARED_POISON = 0xFF, GUARD_BYTE = 0xA5 };

alignas(1024) inline char shared_arena[SHARED_ARENA]; // address 0 of shared memory is its first byte

inline void poison(const void *p, size_t bytes) {
#if CUDA_ON_CPU_ASAN
    __asan_poison_memory_region(p, bytes);
#else
    (void)p;
    (void)bytes;
#endif
}

inline void unpoison(const void *p, size_t bytes) {
#if CUDA_ON_CPU_ASAN
    __asan_unpoison_memory_region(p, bytes);
#else
    (void)p;
    (void)bytes;
#endif
}

inline char *hand_out_shared(size_t bytes, size_t alignment, const char *name) {
    char *p = (char *)(((uintptr_t)block.shared_end + alignment - 1) & ~(uintptr_t)(alignment - 1));
    if (p + bytes + SHARED_GUARD > shared_arena + SHARED_ARENA || block.num_regions == MAX_REGIONS)
        fail(nullptr, "shared array %s of %zu bytes does not fit: there are %d already", name, bytes,
             block.num_regions);
    unpoison(p, bytes + SHARED_GUARD);
    memset(p, SHARED_POISON, bytes);
    memset(p + bytes, GUARD_BYTE, SHARED_GUARD);
    poison(p + bytes, SHARED_GUARD);
    block.regions[block.num_regions++] = SharedRegion{p, bytes, name};
    block.shared_end = p + bytes + SHARED_GUARD;
    return p;
}

struct SharedSite {
    uint64_t serial;
    char *at;
}; // one SHARED in the source: where its array lies in the block that runs

inline void *static_shared(SharedSite *site, size_t bytes, size_t alignment, const char *name, Place at) {
    if (!current) fail(&at, "shared array %s in host code", name);
    if (site->serial != block.serial) {
        current->at = at;
        block.static_bytes += (bytes + 15) / 16 * 16;
        if (block.static_bytes > STATIC_SHARED_LIMIT)
            fail(&at,
                 "with shared array %s the kernel has %zu bytes of static shared memory, the limit is 49152: use "
                 "DYN_SHARED",
                 name, block.static_bytes);
        if (!running->opted_in && block.static_bytes + running->shared > STATIC_SHARED_LIMIT)
            fail(&at,
                 "with shared array %s a block needs %zu bytes of shared memory, %zu of them dynamic: over 49152 wants "
                 "cudaFuncSetAttribute",
                 name, block.static_bytes + running->shared, running->shared);
        if (block.static_bytes + running->shared > chip_limits().shared)
            fail(&at,
                 "with shared array %s a block needs %zu bytes of shared memory, %zu of them dynamic; sm_%d has %zu",
                 name, block.static_bytes + running->shared, running->shared, cuda_on_cpu.chip, chip_limits().shared);
        site->serial = block.serial;
        site->at = hand_out_shared(bytes, alignment < 16 ? 16 : alignment, name);
    }
    return site->at;
}

inline void *dynamic_shared(Place at) {
    if (!current) fail(&at, "dynamic shared memory in host code");
    return block.regions[0].at;
}

inline bool in_shared(const void *p, size_t bytes) {
    return (const char *)p >= shared_arena && (const char *)p + bytes <= block.shared_end;
}

__attribute__((no_sanitize("address"))) inline void check_shared_guards() {
    for (int n = 0; n < block.num_regions; n++) {
        const SharedRegion &r = block.regions[n];
        for (size_t i = 0; i < SHARED_GUARD; i++)
            if ((unsigned char)r.at[r.bytes + i] != GUARD_BYTE)
                fail(nullptr, "block (%u, %u, %u) wrote behind shared array %s of %zu bytes, at byte %zu", blockIdx.x,
                     blockIdx.y, blockIdx.z, r.name, r.bytes, r.bytes + i);
    }
}

// ---------------------------------------------------------------------------
// a block, a grid

inline void run_block() {
    block.ended = block.waiting = block.sum = block.warp_now = 0;
    block.serial++;
    races_after_barrier();
    block.static_bytes = 0;
    block.num_regions = 0;
    poison(shared_arena, SHARED_ARENA);
    block.shared_end = shared_arena + SHARED_FIRST + (running->static_bytes + 127) / 128 * 128;
    hand_out_shared(running->shared, 128, "DYN_SHARED"); // CUDA puts static arrays before it
    async_begin_block();
    for (int w = 0; w < block.warps; w++) {
        warps[w].ended = 0;
        warps[w].num_meetings = 0;
        block.ready[w] = warps[w].exist;
    }
    for (int i = 0; i < block.threads; i++) {
        threads[i].fiber = nullptr;
        threads[i].waits = nullptr;
        threads[i].at.file = nullptr;
        threads[i].group = 0;
        threads[i].waits_on = nullptr;
    }
    set_current(pick());
    switch_fiber(&outside, free_fiber());
    if (block.ended < block.threads) deadlock();
    async_end_block();
    current = nullptr;
    check_shared_guards();
    if (running->static_bytes < block.static_bytes) running->static_bytes = block.static_bytes;
}

inline void run_grid(const Launch *launch) {
    running = launch;
    on_device = true;
    gridDim = launch->grid;
    blockDim = launch->block;
    block.threads = (int)(blockDim.x * blockDim.y * blockDim.z);
    block.warps = (block.threads + WARP - 1) / WARP;
    for (int i = 0; i < block.threads; i++) {
        unsigned n = (unsigned)i;
        threads[i].index = make_uint3(n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y);
        threads[i].number = i;
        threads[i].warp = i / WARP;
        threads[i].lane = i % WARP;
    }
    for (int w = 0; w < block.warps; w++) {
        int lanes = block.threads - w * WARP;
        warps[w].exist = lanes >= WARP ? 0xFFFFFFFFu : (1u << lanes) - 1;
    }
    // blocks in the order first, first + step, …: all of them once, since step and their number have no common divisor
    uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z, at = 0, step = 1;
    if (cuda_on_cpu.seed && blocks > 1) {
        at = random_bits() % blocks;
        do step = 1 + random_bits() % (blocks - 1);
        while (std::gcd(step, blocks) != 1);
    }
    for (uint64_t i = 0; i < blocks; i++, at = at + step < blocks ? at + step : at + step - blocks) {
        blockIdx = make_uint3((unsigned)(at % gridDim.x), (unsigned)(at / gridDim.x % gridDim.y),
                              (unsigned)(at / gridDim.x / gridDim.y));
        run_block();
    }
    running = nullptr;
    on_device = false;
}

} // namespace emu

/* A static shared array `type name[count]`, and the block's dynamic shared memory as `type *name`. */
#define SHARED(type, name, count)                                                                                      \
    static emu::SharedSite name##_site;                                                                                \
    type(&name)[count] = *reinterpret_cast<type(*)[count]>(                                                            \
        emu::static_shared(&name##_site, sizeof(type[count]), alignof(type), #name, emu::Place{__FILE__, __LINE__}))
#define DYN_SHARED(type, name)                                                                                         \
    type *name = reinterpret_cast<type *>(emu::dynamic_shared(emu::Place{__FILE__, __LINE__}))
#endif
