/* mbarrier.h: what parts of a block wait for: mbarriers (PTX ISA, section "Parallel Synchronization and Communication
 * Instructions: mbarrier"), named barriers, and registers that other warpgroups give up.
 *
 * An mbarrier's state is kept here. Its 8 bytes of shared memory hold a word computed from the state, so that a store
 * over them is found when the mbarrier is used next. A block begins without mbarriers.
 */
#ifndef CUDA_ON_CPU_MBARRIER_H
#define CUDA_ON_CPU_MBARRIER_H

namespace emu {

// ---------------------------------------------------------------------------
// mbarriers

enum { MAX_MBARRIER_COUNT = (1 << 20) - 1 }; // arrivals of a phase; bytes that are announced and have not come

struct Mbarrier {
    uint64_t *at;
    int expected, pending; // arrivals of a phase; those missing in this phase
    int64_t bytes;         // announced, and not yet come
    uint64_t phase;        // how many have ended; its parity is that of the phase that has not
    int initializer;       // thread
    bool fenced;           // TMA may see it
    std::vector<Thread *> waiting;
    RaceClock arrived, seen; // of those that have arrived in this phase; in the last one
};

inline std::deque<Mbarrier> mbarriers; // those of the block

inline uint64_t mbarrier_word(const Mbarrier &m) {
    uint64_t x = (uint64_t)m.pending << 32 ^ (uint64_t)m.bytes ^ m.phase << 52 ^ (uint64_t)(uintptr_t)m.at << 16;
    return x * 0x9E3779B97F4A7C15ull | 1;
}
CUDA_ON_CPU_UNSEEN inline void write_mbarrier(const Mbarrier &m) {
    uint64_t word = mbarrier_word(m);
    write_both_views(m.at, &word, sizeof word);
}
CUDA_ON_CPU_UNSEEN inline bool is_overwritten(const Mbarrier &m) {
    uint64_t word = mbarrier_word(m);
    return memcmp(m.at, &word, sizeof word) != 0;
}

inline std::string mbarrier_state(const Mbarrier &m) {
    char text[200];
    snprintf(text, sizeof text, "the mbarrier at %.100s, whose phase %llu lacks %d of %d arrivals and %lld bytes",
             shared_name(m.at).c_str(), (unsigned long long)m.phase, m.pending, m.expected, (long long)m.bytes);
    return text;
}

inline void check_mbarrier_address(const uint64_t *p, Place at, const char *what) {
    on_hopper(at, what);
    use_async();
    if ((uintptr_t)p % 8) fail(&at, "%s: the mbarrier's address %p is not aligned to 8 bytes", what, (const void *)p);
    if (!shared_region(p, 8))
        fail(&at, "%s: the mbarrier's address %p is not in the block's shared memory", what, (const void *)p);
}

inline Mbarrier &find_mbarrier(const uint64_t *p, Place at, const char *what) {
    check_mbarrier_address(p, at, what);
    for (Mbarrier &m : mbarriers) {
        if (m.at != p) continue;
        if (is_overwritten(m))
            fail(&at, "%s: an ordinary store or a copy has written over the mbarrier at %s", what,
                 shared_name(p).c_str());
        return m;
    }
    fail(&at, "%s: %s is no mbarrier yet: ptx_mbarrier_init must come first, and a barrier between threads", what,
         shared_name(p).c_str());
}

/* After arrivals and bytes have been counted. */
inline void may_end_phase(Mbarrier &m, Place at, const char *what) {
    if (!m.pending && m.bytes < 0)
        fail(&at,
             "%s: %lld bytes more than were announced have come to the mbarrier at %s by the end of its phase %llu",
             what, (long long)-m.bytes, shared_name(m.at).c_str(), (unsigned long long)m.phase);
    if (!m.pending && !m.bytes) {
        m.phase++;
        m.pending = m.expected;
        m.seen = m.arrived;
        m.arrived = RaceClock();
        for (Thread *t : m.waiting) block.ready[t->warp] |= 1u << t->lane;
        m.waiting.clear();
    }
    write_mbarrier(m);
}

inline void mbarrier_init(uint64_t *p, int arrivals, Place at) {
    const char *what = "ptx_mbarrier_init";
    check_mbarrier_address(p, at, what);
    if (arrivals < 1 || arrivals > MAX_MBARRIER_COUNT)
        fail(&at, "%s with %d arrivals: expected 1 to %d", what, arrivals, (int)MAX_MBARRIER_COUNT);
    for (const Mbarrier &m : mbarriers)
        if (m.at == p) fail(&at, "%s: in use is %s", what, mbarrier_state(m).c_str());
    mbarriers.push_back(Mbarrier{p, arrivals, arrivals, 0, 0, current->number, false, {}, {}, {}});
    write_mbarrier(mbarriers.back());
}

inline void mbarrier_arrive(const uint64_t *p, int bytes, Place at, const char *what) {
    Mbarrier &m = find_mbarrier(p, at, what);
    if (!m.pending) fail(&at, "%s: one arrival too many for %s", what, mbarrier_state(m).c_str());
    if (bytes < 0 || m.bytes + bytes > MAX_MBARRIER_COUNT)
        fail(&at, "%s announces %d bytes: a phase has at most %d", what, bytes, (int)MAX_MBARRIER_COUNT);
    races_release(&m.arrived);
    m.bytes += bytes;
    m.pending--;
    may_end_phase(m, at, what);
    if (m.pending == m.expected) yield(at, what);
}

inline void mbarrier_wait(const uint64_t *p, int parity, Place at) {
    const char *what = "ptx_mbarrier_wait";
    Mbarrier *m = &find_mbarrier(p, at, what);
    if (parity != 0 && parity != 1) fail(&at, "%s for parity %d: expected 0 or 1", what, parity);
    while ((int)(m->phase & 1) == parity) { // this phase has not ended
        m->waiting.push_back(current);
        current->waits_on = m;
        current->parity = parity;
        wait(at, what, 0);
        current->waits_on = nullptr;
        find_mbarrier(p, at, what);
    }
    races_acquire(m->seen);
}

// ---------------------------------------------------------------------------
// named barriers

enum { NAMED_BARRIERS = 16 };

struct NamedBarrier {
    int threads, arrived; // how many take part, by the first of them; how many have come
    Place at;
    const char *what;
    const Thread *first;
    uint32_t came[MAX_WARPS]; // lanes
    std::vector<Thread *> waiting;
    RaceClock clock, seen; // of those that have come this time; of those that came the last time
};

inline NamedBarrier named_barriers[NAMED_BARRIERS];

inline void check_named_barrier(int id, int threads, Place at, const char *what) {
    on_hopper(at, what);
    if (id < 1 || id >= NAMED_BARRIERS) fail(&at, "%s: barrier %d, expected 1 to 15 (0 is __syncthreads)", what, id);
    if (threads < WARP || threads % WARP || threads > (block.threads + WARP - 1) / WARP * WARP)
        fail(&at, "%s: barrier %d for %d threads, expected a multiple of 32 and at most the block's %d", what, id,
             threads, block.threads);
}

inline void come_to_named_barrier(int id, int threads, bool waits, Place at, const char *what) {
    check_named_barrier(id, threads, at, what);
    NamedBarrier &b = named_barriers[id];
    Thread *me = current;
    if (!b.arrived) {
        b.threads = threads;
        b.at = at;
        b.what = what;
        b.first = me;
    } else if (b.threads != threads)
        fail(&at, "%s: barrier %d for %d threads, but %s came there in %s at %s:%d for %d", what, id, threads,
             thread_name(b.first).c_str(), b.what, b.at.file, b.at.line, b.threads);
    if (b.came[me->warp] >> me->lane & 1)
        fail(&at, "%s: comes to barrier %d again, where %d of %d threads are still missing", what, id,
             b.threads - b.arrived, b.threads);
    b.came[me->warp] |= 1u << me->lane;
    races_release(&b.clock);
    if (++b.arrived == b.threads) {
        b.arrived = 0;
        b.seen = b.clock;
        b.clock = RaceClock();
        memset(b.came, 0, sizeof b.came);
        for (Thread *t : b.waiting) block.ready[t->warp] |= 1u << t->lane;
        b.waiting.clear();
        yield(at, what);
    } else if (waits) {
        b.waiting.push_back(me);
        me->waits_on = &b;
        wait(at, what, 0);
        me->waits_on = nullptr;
    }
    if (waits) races_acquire(b.seen);
}

// ---------------------------------------------------------------------------
// meetings of a warpgroup: all 128 threads of four warps

struct WarpgroupMeeting {
    int arrived;
    Place at;
    const char *what;
    void *of[WARPGROUP]; // operands, on the stacks of those that wait
};

inline WarpgroupMeeting warpgroup_meetings[MAX_WARPGROUPS];

inline int warpgroup_of(const Thread *t) { return t->warp / 4; }
inline std::string warpgroup_name(int group) {
    return "warpgroup " + std::to_string(group) + " (warps " + std::to_string(4 * group) + " to " +
           std::to_string(4 * group + 3) + ")";
}

/* The last to come does `work` for all of them; the first number is that of the warpgroup. */
inline void warpgroup_meet(Place at, const char *what, void *mine, void (*work)(int group, void *const *of)) {
    Thread *me = on_hopper(at, what);
    const int group = warpgroup_of(me);
    if (block.threads < (group + 1) * WARPGROUP)
        fail(&at, "%s is for four warps, 4 n to 4 n + 3, but the block's %d threads end within %s", what, block.threads,
             warpgroup_name(group).c_str());
    for (int w = 4 * group; w < 4 * group + 4; w++)
        if (warps[w].ended)
            fail(&at, "%s is for all threads of %s, but lanes 0x%08x of warp %d have ended", what,
                 warpgroup_name(group).c_str(), warps[w].ended, w);
    WarpgroupMeeting &m = warpgroup_meetings[group];
    if (!m.arrived) {
        m.at = at;
        m.what = what;
    } else if (!(m.at == at) || m.what != what)
        fail(&at, "comes to %s while %d threads of %s wait in %s at %s:%d: all of them must come to the same place",
             what, m.arrived, warpgroup_name(group).c_str(), m.what, m.at.file, m.at.line);
    m.of[me->number % WARPGROUP] = mine;
    if (++m.arrived < WARPGROUP) {
        wait(at, what, 0);
        return;
    }
    m.arrived = 0;
    me->at = at;
    work(group, m.of);
    for (int w = 4 * group; w < 4 * group + 4; w++) block.ready[w] |= 0xFFFFFFFFu;
    block.ready[me->warp] &= ~(1u << me->lane);
}

// ---------------------------------------------------------------------------
// registers: setmaxnreg

struct RegisterPool {
    int free;                   // registers of the block that no thread has; negative: the launch's are not known yet
    int of[MAX_WARPGROUPS];     // registers of a thread
    int wanted[MAX_WARPGROUPS]; // 0: none
    std::vector<Thread *> waiting;
};
inline RegisterPool register_pool = {-1, {}, {}, {}};

inline int registers_of(const std::string &kernel); // by the table (streams.h); 0: not known

/* As many as the kernel was compiled for; if that is not known, as many as the block's threads can have. */
inline void count_registers() {
    RegisterPool &pool = register_pool;
    if (pool.free >= 0) return;
    int registers = registers_of(running->name);
    if (!registers) registers = std::min(65536 / block.threads, 255) / 8 * 8;
    pool.free = 0;
    for (int &of : pool.of) of = registers;
}

inline void grant_registers() {
    RegisterPool &pool = register_pool;
    for (int g = 0; g < MAX_WARPGROUPS; g++) {
        int more = (pool.wanted[g] - pool.of[g]) * WARPGROUP;
        if (!pool.wanted[g] || more > pool.free) continue;
        pool.free -= more;
        pool.of[g] = pool.wanted[g];
        pool.wanted[g] = 0;
        for (Thread *t : pool.waiting)
            if (warpgroup_of(t) == g) block.ready[t->warp] |= 1u << t->lane;
        std::erase_if(pool.waiting, [g](Thread *t) { return warpgroup_of(t) == g; });
    }
}

inline void change_registers(int count, bool take, Place at, const char *what) {
    struct Change {
        int count;
        bool take;
        Place at;
        const char *what;
    } mine = {count, take, at, what};
    warpgroup_meet(at, what, &mine, [](int group, void *const *of) {
        const Change &c = *(const Change *)of[0];
        RegisterPool &pool = register_pool;
        count_registers();
        if (c.take ? c.count < pool.of[group] : c.count > pool.of[group])
            fail(&c.at, "%s<%d>: each thread of %s has %d registers", c.what, c.count, warpgroup_name(group).c_str(),
                 pool.of[group]);
        pool.wanted[group] = c.count;
        grant_registers();
    });
    while (register_pool.wanted[warpgroup_of(current)]) {
        register_pool.waiting.push_back(current);
        current->waits_on = &register_pool;
        wait(at, what, 0);
        current->waits_on = nullptr;
    }
}

// ---------------------------------------------------------------------------
// for fibers.h

inline std::string waits_for(const Thread *t) {
    char text[300];
    for (const Mbarrier &m : mbarriers) {
        if (t->waits_on != &m) continue;
        snprintf(text, sizeof text, "%s for parity %d of %.200s,", t->waits, t->parity, mbarrier_state(m).c_str());
        return text;
    }
    for (int i = 0; i < NAMED_BARRIERS; i++) {
        const NamedBarrier &b = named_barriers[i];
        if (t->waits_on != &b) continue;
        snprintf(text, sizeof text, "%s for barrier %d, where %d of %d threads are missing,", t->waits, i,
                 b.threads - b.arrived, b.threads);
        return text;
    }
    if (t->waits_on == &register_pool) {
        snprintf(text, sizeof text, "%s<%d>, for which %d registers of a block are free,", t->waits,
                 register_pool.wanted[warpgroup_of(t)], register_pool.free);
        return text;
    }
    return t->waits;
}

inline void begin_block_barriers() {
    mbarriers.clear();
    for (NamedBarrier &b : named_barriers) b = NamedBarrier();
    for (WarpgroupMeeting &m : warpgroup_meetings) m.arrived = 0;
    register_pool = RegisterPool{-1, {}, {}, {}};
}

inline void end_block_barriers() {
    for (int i = 0; i < NAMED_BARRIERS; i++)
        if (named_barriers[i].arrived)
            fail(&named_barriers[i].at,
                 "the block ends while %d of %d threads are missing at barrier %d: arrivals and waits do not match",
                 named_barriers[i].threads - named_barriers[i].arrived, named_barriers[i].threads, i);
}

} // namespace emu

inline void ptx_mbarrier_init(uint64_t *barrier, int arrivals, emu::Place at = emu::Place::here()) {
    emu::mbarrier_init(barrier, arrivals, at);
}
inline void ptx_mbarrier_init_fence(emu::Place at = emu::Place::here()) {
    emu::on_hopper(at, "ptx_mbarrier_init_fence");
    for (emu::Mbarrier &m : emu::mbarriers) m.fenced |= m.initializer == emu::current->number;
    ptx_fence_proxy_async(at);
}
inline void ptx_mbarrier_arrive(uint64_t *barrier, emu::Place at = emu::Place::here()) {
    emu::mbarrier_arrive(barrier, 0, at, "ptx_mbarrier_arrive");
}
inline void ptx_mbarrier_arrive_expect(uint64_t *barrier, int bytes, emu::Place at = emu::Place::here()) {
    emu::mbarrier_arrive(barrier, bytes, at, "ptx_mbarrier_arrive_expect");
}
inline void ptx_mbarrier_wait(uint64_t *barrier, int parity, emu::Place at = emu::Place::here()) {
    emu::mbarrier_wait(barrier, parity, at);
}

inline void ptx_barrier_sync(int barrier, int threads, emu::Place at = emu::Place::here()) {
    emu::come_to_named_barrier(barrier, threads, true, at, "ptx_barrier_sync");
}
inline void ptx_barrier_arrive(int barrier, int threads, emu::Place at = emu::Place::here()) {
    emu::come_to_named_barrier(barrier, threads, false, at, "ptx_barrier_arrive");
}

template <int N> inline void ptx_setmaxnreg_dec(emu::Place at = emu::Place::here()) {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg: a multiple of 8 from 24 to 256");
    emu::change_registers(N, false, at, "ptx_setmaxnreg_dec");
}
template <int N> inline void ptx_setmaxnreg_inc(emu::Place at = emu::Place::here()) {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg: a multiple of 8 from 24 to 256");
    emu::change_registers(N, true, at, "ptx_setmaxnreg_inc");
}
#endif
