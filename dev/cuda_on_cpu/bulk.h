/* bulk.h: TMA's copies of contiguous bytes, without a tensor map. */
#ifndef CUDA_ON_CPU_BULK_H
#define CUDA_ON_CPU_BULK_H

namespace emu {

struct BulkLoad : AsyncOp {
    char *shared;
    const char *global;
    size_t bytes;
    Mbarrier *barrier;
    uint64_t phase; // of the mbarrier, when it was started

    void run() override {
        std::vector<char> copy(global, global + bytes);
        for (size_t i = 0; i < bytes; i += 16) write_both_views(shared + i, copy.data() + i, 16);
        bytes_arrive(*barrier, phase, (long long)bytes, at, "ptx_bulk_load");
    }
};

inline void bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes, Place at, const void *code) {
    const char *what = "ptx_bulk_load";
    on_hopper(at, what);
    if (bytes <= 0 || bytes % 16) fail(&at, "%s: %d bytes: a positive multiple of 16 is expected", what, bytes);
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16)
        fail(&at, "%s from %p to %s: both must be aligned to 16 bytes", what, global, shared_name(shared).c_str());
    if (!shared_region(shared, (size_t)bytes))
        fail(&at, "%s: %d bytes from %s on are not in one array of the block's shared memory", what, bytes,
             shared_name(shared).c_str());
    check_range(what, global, (size_t)bytes, running->device, at);
    Mbarrier &b = begin_copy(shared, (size_t)bytes, barrier, at, what, code);
    auto load = std::make_unique<BulkLoad>();
    load->shared = (char *)shared;
    load->global = (const char *)global;
    load->bytes = (size_t)bytes;
    load->barrier = &b;
    load->phase = b.phase;
    start_async(std::move(load), at);
}

} // namespace emu

CUDA_ON_CPU_UNSEEN inline void ptx_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes,
                                             emu::Place at = emu::Place::here()) {
    emu::bulk_load(shared, global, barrier, bytes, at, __builtin_return_address(0));
}
#endif
