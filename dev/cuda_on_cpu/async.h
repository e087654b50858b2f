/* async.h: what runs beside the threads of a block on GPUs of compute capability 9.0: copies by TMA, and wgmma.
 *
 * An asynchronous operation happens when it is started, at some later switch of threads, or only when nobody can go on
 * without it, by the seed (landing() of ptx.h). TMA and wgmma see shared memory through the async proxy: a copy of it,
 * which gets what ordinary stores have written when a thread executes ptx_fence_proxy_async. What they read must be the
 * same in both: otherwise a fence is missing, or somebody has written too early.
 * Owns: the operations that have not happened, and the async proxy's view of shared memory.
 */
#ifndef CUDA_ON_CPU_ASYNC_H
#define CUDA_ON_CPU_ASYNC_H

namespace emu {

enum { HOPPER = 90, WARPGROUP = 128, MAX_WARPGROUPS = MAX_WARPS / 4 };

inline bool hopper_used; // in the block that runs

/* Every instruction of compute capability 9.0 begins with this. */
inline Thread *on_hopper(Place at, const char *what) {
    if (!current) fail(&at, "%s is for kernels, not for host code", what);
    if (chip_limits().chip != HOPPER)
        fail(&at, "%s needs compute capability 9.0, but the chip is sm_%d: launch another kernel there", what,
             cuda_on_cpu.chip);
    hopper_used = true;
    return current;
}

// ---------------------------------------------------------------------------
// shared memory as the async proxy sees it

alignas(1024) inline char async_view[SHARED_ARENA]; // byte by byte beside shared_arena
inline bool async_used;                             // in the block that runs

/* Which warp (its number + 1; 0: none) has stored 16 bytes by stmatrix last, and what: another warp's fence does not
 * cover them. They have been overwritten since if their bytes are others. */
inline uint8_t stored_by[SHARED_ARENA / 16];
alignas(16) inline char stored[SHARED_ARENA];

inline void use_async() { // what threads have written before is not in it
    if (async_used) return;
    memset(async_view, SHARED_POISON, sizeof async_view);
    memset(stored_by, 0, sizeof stored_by);
    async_used = true;
}

inline char *in_async_view(const void *p) { return async_view + ((const char *)p - shared_arena); }

/* The array in which all of these bytes lie; NULL: there is none. */
inline const SharedRegion *shared_region(const void *p, size_t bytes) {
    for (int i = 0; i < block.num_regions; i++) {
        const SharedRegion *r = &block.regions[i];
        if ((const char *)p >= r->at && (const char *)p + bytes <= r->at + r->bytes) return r;
    }
    return nullptr;
}

inline std::string shared_name(const void *p) {
    const SharedRegion *r = shared_region(p, 1);
    char text[300];
    if (r)
        snprintf(text, sizeof text, "byte %lld of shared array %.200s", (long long)((const char *)p - r->at), r->name);
    else snprintf(text, sizeof text, "address %p", p);
    return text;
}

CUDA_ON_CPU_UNSEEN inline void publish(const char *from, size_t bytes) {
#if CUDA_ON_CPU_RACES // only what the thread that executes the fence has written or seen
    for (size_t i = 0; i < bytes; i++)
        if (from[i] != *in_async_view(from + i) && races_may_publish(from + i)) *in_async_view(from + i) = from[i];
#else
    for (size_t i = (size_t)(from - shared_arena), end = i + bytes; i < end;) {
        const size_t next = std::min(i / 16 * 16 + 16, end);
        const int warp = stored_by[i / 16] - 1;
        if (warp < 0 || warp == current->warp || memcmp(stored + i, shared_arena + i, next - i))
            memcpy(async_view + i, shared_arena + i, next - i);
        i = next;
    }
#endif
}

/* After a warp has stored 16 bytes. */
CUDA_ON_CPU_UNSEEN inline void remember_stored(const void *p, int warp) {
    const size_t at = (size_t)((const char *)p - shared_arena);
    stored_by[at / 16] = (uint8_t)(warp + 1);
    memcpy(stored + at, p, 16);
}

/* What differs between the two views is published, in pieces that mostly do not. */
CUDA_ON_CPU_UNSEEN inline void fence_async() {
    enum : size_t { PIECE = 2048 };
    for (int i = 0; i < block.num_regions; i++)
        for (size_t from = 0; from < block.regions[i].bytes; from += PIECE) {
            const char *p = block.regions[i].at + from;
            size_t bytes = std::min<size_t>(PIECE, block.regions[i].bytes - from);
            if (memcmp(p, in_async_view(p), bytes)) publish(p, bytes);
        }
}

CUDA_ON_CPU_UNSEEN inline void write_both_views(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    memcpy(in_async_view(to), from, bytes);
}

CUDA_ON_CPU_UNSEEN inline void poison_both_views(void *to, size_t bytes) {
    memset(to, SHARED_POISON, bytes);
    memset(in_async_view(to), SHARED_POISON, bytes);
}

/* Reads through the async proxy. */
CUDA_ON_CPU_UNSEEN inline void read_async(void *to, const void *from, size_t bytes, Place at, const char *what) {
    const char *seen = in_async_view(from), *real = (const char *)from;
    memcpy(to, seen, bytes);
    if (!memcmp(seen, real, bytes)) return;
    size_t i = 0;
    while (seen[i] == real[i]) i++;
    fail(&at,
         "%s reads %s, which an ordinary store has written: the thread that stores must execute ptx_fence_proxy_async "
         "before the barrier, and may not store before %s has read",
         what, shared_name(real + i).c_str(), what);
}

// ---------------------------------------------------------------------------
// operations that have been started and have not happened

struct AsyncOp {
    Thread *thread; // that started it
    Place at;
    int queue; // operations of the same queue happen in their order; negative: in any order
    virtual void run() = 0;
    virtual ~AsyncOp() = default;
};

inline std::vector<std::unique_ptr<AsyncOp>> async_ops; // in the order in which they were started

inline void run_async(size_t i) {
    std::unique_ptr<AsyncOp> op = std::move(async_ops[i]);
    async_ops.erase(async_ops.begin() + (long)i);
    async_pending = (int)async_ops.size();
    Thread *now = current;
    set_current(op->thread); // for messages
    op->run();
    if (now) set_current(now);
}

inline bool first_of_queue(size_t i) {
    for (size_t j = 0; j < i && async_ops[i]->queue >= 0; j++)
        if (async_ops[j]->queue == async_ops[i]->queue) return false;
    return true;
}

/* One of those that may happen now, at random. */
inline bool async_run_one() {
    size_t count = async_ops.size(), first = count ? choose((uint32_t)count) : 0;
    for (size_t n = 0; n < count; n++) {
        size_t i = (first + n) % count;
        if (!first_of_queue(i)) continue;
        run_async(i);
        return true;
    }
    return false;
}

inline void async_sometimes() {
    if (landing() == LANDS_ANY_TIME && choose(8) == 0) async_run_one();
}

/* Those of a queue, in their order, until `enough` says so. */
template <typename F> inline void run_queue(int queue, F enough) {
    for (size_t i = 0; i < async_ops.size() && !enough();)
        if (async_ops[i]->queue == queue) run_async(i);
        else i++;
}

inline void start_async(std::unique_ptr<AsyncOp> op, Place at, int queue = -1) {
    op->thread = current;
    op->at = at;
    op->queue = queue;
    async_ops.push_back(std::move(op));
    async_pending = (int)async_ops.size();
    if (landing() == LANDS_AT_ISSUE) run_async(async_ops.size() - 1);
    else if (landing() == LANDS_ANY_TIME && choose(4) == 0 && first_of_queue(async_ops.size() - 1))
        run_async(async_ops.size() - 1);
}

} // namespace emu

inline void ptx_fence_proxy_async(emu::Place at = emu::Place::here()) {
    emu::on_hopper(at, "ptx_fence_proxy_async");
    emu::use_async();
    emu::fence_async();
}
#endif
