/* races.h: finds two threads of a block that touch the same byte of shared memory, one of them writing, with no barrier
 * between.
 *
 * The compiler calls a hook at every load and store: -fsanitize=thread when compiling, and not when linking, so that
 * the hooks below are what is called. Barriers order all threads of the block, __syncwarp the lanes of its mask; a
 * shuffle orders nothing, as CUDA has it. Each byte keeps its last writer and its last reader, so a race may be missed,
 * but what is reported is one.
 */
#ifndef CUDA_ON_CPU_RACES_H
#define CUDA_ON_CPU_RACES_H
#if CUDA_ON_CPU_RACES
#include <dlfcn.h>
#define CUDA_ON_CPU_HOOK extern "C" __attribute__((weak, used)) CUDA_ON_CPU_PLAIN

namespace emu {

struct Access {
    uint64_t phase;
    uint32_t time;
    int thread;
    const void *code;
};
struct Byte {
    Access write, read;
};

inline Byte shared_bytes[SHARED_ARENA];
inline uint64_t race_phase; // counts barriers, and blocks
inline uint32_t race_known[MAX_THREADS]
                          [WARP]; // up to which time of each lane of its warp a thread has seen; its own: its clock

CUDA_ON_CPU_PLAIN inline void races_after_barrier() { race_phase++; }

CUDA_ON_CPU_PLAIN inline void races_after_syncwarp(uint32_t mask) {
    uint32_t(*known)[WARP] = race_known + current->warp * WARP;
    uint32_t all[WARP] = {0};
    for (int i = 0; i < WARP; i++) {
        if (!(mask >> i & 1)) continue;
        known[i][i]++; // what it did before has a smaller time
        for (int j = 0; j < WARP; j++) all[j] = known[i][j] > all[j] ? known[i][j] : all[j];
    }
    for (int i = 0; i < WARP; i++)
        for (int j = 0; j < WARP && mask >> i & 1; j++) known[i][j] = all[j];
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
    const Thread *t = &threads[other.thread];
    current->at.file = nullptr;
    fail(nullptr,
         "%s byte %lld of shared array %s at %s, which %s %s at %s with no barrier between: put __syncthreads (or, in "
         "one warp, __syncwarp) there",
         write ? "writes" : "reads", (long long)((const char *)p - r->at), r->name, code_line(code).c_str(),
         thread_name(t).c_str(), other_wrote ? "wrote" : "read", code_line(other.code).c_str());
}

CUDA_ON_CPU_PLAIN inline void races_touch(const void *p, size_t bytes, bool write, const void *code) {
    if ((const char *)p < shared_arena || (const char *)p >= shared_arena + SHARED_ARENA || !on_device || !current)
        return;
    Thread *me = current;
    uint32_t *known = race_known[me->number];
    for (Byte *b = shared_bytes + ((const char *)p - shared_arena), *end = b + bytes; b < end; b++) {
        for (int writes = 1; writes >= !write; writes--) { // a write with both, a read with the last write
            const Access &a = writes ? b->write : b->read;
            if (a.phase != race_phase || a.thread == me->number) continue;
            if (a.thread / WARP != me->warp || known[a.thread % WARP] <= a.time) race(p, write, code, a, writes);
        }
        Access &mine = write ? b->write : b->read;
        mine.phase = race_phase;
        mine.time = known[me->lane];
        mine.thread = me->number;
        mine.code = code;
    }
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
