/* races.h: finds two threads of a block that touch the same byte of shared memory, one of them writing, with no barrier
 * between.
 *
 * The compiler calls a hook at every load and store: -fsanitize=thread when compiling, and not when linking, so that
 * the hooks below are what is called. Barriers order all threads of the block, __syncwarp the lanes of its mask,
 * mbarriers and named barriers those that wait after those that have arrived; a shuffle orders nothing, as CUDA has it.
 * Each byte keeps its last writer and its last reader, so a race may be missed, but what is reported is one.
 *
 * The wgmma of a warpgroup read shared memory as if they were one more thread, which knows what all four warps know. A
 * TMA copy counts as an access by the thread that starts it, at that time; the waiters of its mbarrier come after it.
 */
#ifndef CUDA_ON_CPU_RACES_H
#define CUDA_ON_CPU_RACES_H
#if CUDA_ON_CPU_RACES
#include <dlfcn.h>
#define CUDA_ON_CPU_HOOK extern "C" __attribute__((weak, used)) CUDA_ON_CPU_PLAIN

namespace emu {

enum { RACE_THREADS = MAX_THREADS + MAX_WARPS / 4 }; // threads, then the wgmma of each warpgroup

struct Access {
    uint64_t phase;
    uint32_t time;
    int thread; // below RACE_THREADS
    const void *code;
};
struct Byte {
    Access write, read;
};

inline Byte shared_bytes[SHARED_ARENA];
inline uint64_t race_phase; // counts barriers, and blocks
/* Up to which time of each other thread a thread has seen what it did; its own: its clock. Of other warps it sees
 * nothing unless `race_wide`: then barriers of parts of a block have been used. */
inline uint32_t race_known[RACE_THREADS][RACE_THREADS];
inline bool race_wide;

CUDA_ON_CPU_PLAIN inline void races_after_barrier() { race_phase++; }

CUDA_ON_CPU_PLAIN inline void see(uint32_t *known, const uint32_t *other, int from, int end) {
    for (int i = from; i < end; i++) known[i] = other[i] > known[i] ? other[i] : known[i];
}

CUDA_ON_CPU_PLAIN inline void races_after_syncwarp(uint32_t mask) {
    static uint32_t all[RACE_THREADS];
    const int first = current->warp * WARP, from = race_wide ? 0 : first, end = race_wide ? RACE_THREADS : first + WARP;
    memset(all + from, 0, (size_t)(end - from) * 4);
    for (int i = first; i < first + WARP; i++) {
        if (!(mask >> (i - first) & 1)) continue;
        race_known[i][i]++; // what it did before has a smaller time
        see(all, race_known[i], from, end);
    }
    for (int i = first; i < first + WARP; i++)
        if (mask >> (i - first) & 1) memcpy(race_known[i] + from, all + from, (size_t)(end - from) * 4);
}

CUDA_ON_CPU_PLAIN inline void races_release(RaceClock *clock) {
    race_wide = true;
    clock->seen.resize(RACE_THREADS);
    race_known[current->number][current->number]++;
    see(clock->seen.data(), race_known[current->number], 0, RACE_THREADS);
}

CUDA_ON_CPU_PLAIN inline void races_acquire(const RaceClock &clock) {
    if (!clock.seen.empty()) see(race_known[current->number], clock.seen.data(), 0, RACE_THREADS);
}

/* The wgmma of a warpgroup see what each of its warps has seen, that is, one of the warp's lanes. */
CUDA_ON_CPU_PLAIN inline void races_wgmma_starts(int group) {
    static uint32_t warp[RACE_THREADS];
    const int me = MAX_THREADS + group;
    race_wide = true;
    for (int w = 0; w < 4; w++) {
        memset(warp, 0, sizeof warp);
        for (int i = (4 * group + w) * WARP; i < (4 * group + w + 1) * WARP; i++) {
            race_known[i][i]++;
            see(warp, race_known[i], 0, RACE_THREADS);
        }
        uint32_t *known = race_known[me];
        for (int i = 0; i < RACE_THREADS; i++)
            if (i != me) known[i] = !w || warp[i] < known[i] ? warp[i] : known[i];
    }
}

inline uint32_t races_wgmma_time(int group) { return ++race_known[MAX_THREADS + group][MAX_THREADS + group]; }

inline void races_wgmma_ended(int group, uint32_t time) {
    uint32_t &known = race_known[current->number][MAX_THREADS + group];
    if (known < time) known = time;
}

inline std::string code_line(const void *code) { // file:line of an instruction, by addr2line where there is one
    Dl_info info;
    char command[600], line[300] = "";
    if (!dladdr(code, &info) || !info.dli_fname) return "?";
    snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
             (size_t)((const char *)code - 1 - (const char *)info.dli_fbase));
    FILE *f = popen(command, "r");
    if (f && fgets(line, sizeof line, f)) line[strcspn(line, " \n")] = 0;
    if (f) pclose(f);
    return *line ? line : command;
}

inline void race(const void *p, bool write, const void *code, const Access &other, bool other_wrote) {
    const SharedRegion *r = block.regions;
    while (r + 1 < block.regions + block.num_regions && (const char *)p >= r[1].at) r++;
    char wgmma[64];
    snprintf(wgmma, sizeof wgmma, "a wgmma of warpgroup %d", other.thread - MAX_THREADS);
    current->at.file = nullptr;
    fail(nullptr,
         "%s byte %lld of shared array %s at %s, which %s %s at %s with no barrier between: put one there "
         "(__syncthreads, an mbarrier, a named barrier; in one warp __syncwarp)",
         write ? "writes" : "reads", (long long)((const char *)p - r->at), r->name, code_line(code).c_str(),
         other.thread < MAX_THREADS ? thread_name(&threads[other.thread]).c_str() : wgmma,
         other_wrote ? "wrote" : "read", code_line(other.code).c_str());
}

/* Thread `me`, or the wgmma of a warpgroup, touches bytes of the arena. */
CUDA_ON_CPU_PLAIN inline void races_touch_by(int me, const char *p, size_t bytes, bool write, const void *code) {
    uint32_t *known = race_known[me];
    for (Byte *b = shared_bytes + (p - shared_arena), *end = b + bytes; b < end; b++) {
        for (int writes = 1; writes >= !write; writes--) { // a write with both, a read with the last write
            const Access &a = writes ? b->write : b->read;
            if (a.phase != race_phase || a.thread == me) continue;
            if (known[a.thread] <= a.time) race(shared_arena + (b - shared_bytes), write, code, a, writes);
        }
        Access &mine = write ? b->write : b->read;
        mine.phase = race_phase;
        mine.time = known[me];
        mine.thread = me;
        mine.code = code;
    }
}

CUDA_ON_CPU_PLAIN inline void races_touch(const void *p, size_t bytes, bool write, const void *code) {
    if ((const char *)p < shared_arena || (const char *)p >= shared_arena + SHARED_ARENA || !on_device || !current)
        return;
    races_touch_by(current->number, (const char *)p, bytes, write, code);
}

inline void races_wgmma_reads(int group, const void *p, size_t bytes, const void *code) {
    races_touch_by(MAX_THREADS + group, (const char *)p, bytes, false, code);
}

/* A fence of the current thread covers what was written to this byte: it has seen who wrote. */
CUDA_ON_CPU_PLAIN inline bool races_may_publish(const char *p) {
    const Access &a = shared_bytes[p - shared_arena].write;
    return a.phase != race_phase || a.thread == current->number || race_known[current->number][a.thread] > a.time;
}

} // namespace emu

#define CUDA_ON_CPU_HOOKS(n)                                                                                           \
    CUDA_ON_CPU_HOOK void __tsan_read##n(void *p) { emu::races_touch(p, n, false, __builtin_return_address(0)); }      \
    CUDA_ON_CPU_HOOK void __tsan_write##n(void *p) { emu::races_touch(p, n, true, __builtin_return_address(0)); }      \
    CUDA_ON_CPU_HOOK void __tsan_unaligned_read##n(void *p) {                                                          \
        emu::races_touch(p, n, false, __builtin_return_address(0));                                                    \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK void __tsan_unaligned_write##n(void *p) {                                                         \
        emu::races_touch(p, n, true, __builtin_return_address(0));                                                     \
    }
CUDA_ON_CPU_HOOKS(1)
CUDA_ON_CPU_HOOKS(2)
CUDA_ON_CPU_HOOKS(4)
CUDA_ON_CPU_HOOKS(8)
CUDA_ON_CPU_HOOKS(16)
CUDA_ON_CPU_HOOK void __tsan_read_range(void *p, size_t n) {
    emu::races_touch(p, n, false, __builtin_return_address(0));
}
CUDA_ON_CPU_HOOK void __tsan_write_range(void *p, size_t n) {
    emu::races_touch(p, n, true, __builtin_return_address(0));
}
CUDA_ON_CPU_HOOK void __tsan_init() {}
CUDA_ON_CPU_HOOK void __tsan_func_entry(void *) {}
CUDA_ON_CPU_HOOK void __tsan_func_exit() {}
CUDA_ON_CPU_HOOK void __tsan_vptr_read(void *) {}
CUDA_ON_CPU_HOOK void __tsan_vptr_update(void *, void *) {}
CUDA_ON_CPU_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define CUDA_ON_CPU_ATOMICS(bits, T)                                                                                   \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_load(const volatile T *p, int) {                                          \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                   \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK void __tsan_atomic##bits##_store(volatile T *p, T x, int) {                                       \
        __atomic_store_n(p, x, __ATOMIC_SEQ_CST);                                                                      \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_exchange(volatile T *p, T x, int) {                                       \
        return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_fetch_add(volatile T *p, T x, int) {                                      \
        return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_fetch_sub(volatile T *p, T x, int) {                                      \
        return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_fetch_or(volatile T *p, T x, int) {                                       \
        return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);                                                              \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK T __tsan_atomic##bits##_fetch_and(volatile T *p, T x, int) {                                      \
        return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *e, T x, int, int) {           \
        return __atomic_compare_exchange_n(p, e, x, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                            \
    }                                                                                                                  \
    CUDA_ON_CPU_HOOK int __tsan_atomic##bits##_compare_exchange_weak(volatile T *p, T *e, T x, int, int) {             \
        return __atomic_compare_exchange_n(p, e, x, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                            \
    }
CUDA_ON_CPU_ATOMICS(8, unsigned char)
CUDA_ON_CPU_ATOMICS(16, unsigned short)
CUDA_ON_CPU_ATOMICS(32, unsigned)
CUDA_ON_CPU_ATOMICS(64, unsigned long)
#undef CUDA_ON_CPU_ATOMICS
#undef CUDA_ON_CPU_HOOKS
#undef CUDA_ON_CPU_HOOK
#endif
#endif
