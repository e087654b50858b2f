/* tma.h: the Tensor Memory Accelerator: tensor maps as the driver makes them, and copies of their boxes between global
 * and shared memory.
 *
 * A load poisons its destination when it is started. Its bytes count for the mbarrier when it happens (async.h). A
 * store reads shared memory when it happens, at the latest when its thread waits for it.
 */
#ifndef CUDA_ON_CPU_TMA_H
#define CUDA_ON_CPU_TMA_H

// ---------------------------------------------------------------------------
// the driver API

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef enum cudaError_enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NOT_SUPPORTED = 801
} CUresult;

typedef enum CUtensorMapDataType_enum {
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_UINT16,
    CU_TENSOR_MAP_DATA_TYPE_UINT32,
    CU_TENSOR_MAP_DATA_TYPE_INT32,
    CU_TENSOR_MAP_DATA_TYPE_UINT64,
    CU_TENSOR_MAP_DATA_TYPE_INT64,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
} CUtensorMapDataType;
typedef enum CUtensorMapInterleave_enum {
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    CU_TENSOR_MAP_INTERLEAVE_16B,
    CU_TENSOR_MAP_INTERLEAVE_32B
} CUtensorMapInterleave;
typedef enum CUtensorMapSwizzle_enum {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
} CUtensorMapSwizzle;
typedef enum CUtensorMapL2promotion_enum {
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B
} CUtensorMapL2promotion;
typedef enum CUtensorMapFloatOOBfill_enum {
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
} CUtensorMapFloatOOBfill;

struct CUtensorMap_st;
namespace emu {
inline void tensor_map_is_copied(CUtensorMap_st *to, const CUtensorMap_st *from);
}

/* 128 bytes that only the driver and TMA understand. A copy that a kernel makes is in local memory, where TMA does not
 * find it: the copy knows that. */
typedef struct alignas(128) CUtensorMap_st {
    cuuint64_t opaque[16];
    CUtensorMap_st() = default;
    CUtensorMap_st(const CUtensorMap_st &from) { emu::tensor_map_is_copied(this, &from); }
    CUtensorMap_st &operator=(const CUtensorMap_st &from) {
        emu::tensor_map_is_copied(this, &from);
        return *this;
    }
} CUtensorMap;

namespace emu {

enum : uint32_t { TENSOR_MAP = 0x7E450A9D, LOCAL_TENSOR_MAP = 0x10CA17E5 };
enum { MAX_RANK = 5, MAX_BOX = 256 };

struct TensorMap { // what is in the 128 bytes
    uint32_t kind; // TENSOR_MAP; LOCAL_TENSOR_MAP: a copy that a kernel has made
    uint8_t rank, element_bytes, swizzle, interleave, fill, steps[MAX_RANK];
    uint16_t box[MAX_RANK];     // elements, innermost first
    uint32_t dims[MAX_RANK];    // elements - 1
    uint64_t strides[MAX_RANK]; // bytes; of the innermost: of an element
    char *address;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline void tensor_map_is_copied(CUtensorMap_st *to, const CUtensorMap_st *from) {
    memcpy((void *)to, (const void *)from, sizeof to->opaque);
    if (!current || !on_device) return;
    const char *body = (const char *)running->body.get(), *p = (const char *)from;
    if (p >= body && p < body + running->body->bytes()) return; // the kernel's parameter is made
    const uint32_t local = LOCAL_TENSOR_MAP;
    memcpy((void *)to, &local, sizeof local);
}

/* Bytes of an element; 0: no such type. */
inline int element_bytes(CUtensorMapDataType type) {
    static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    return (unsigned)type < sizeof bytes / sizeof *bytes ? bytes[type] : 0;
}

inline int swizzle_bytes(int swizzle) { return swizzle ? 16 << swizzle : 0; } // 32, 64, 128

/* What the driver requires (cuda.h of CUDA 13.0, cuTensorMapEncodeTiled). */
inline bool encode_tensor_map(TensorMap *m, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                              const cuuint32_t *steps) {
    const unsigned address = m->interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16;
    if (!m->element_bytes || m->rank < 1 || m->rank > MAX_RANK || (m->interleave && m->rank < 3)) return false;
    if (!m->address || (uintptr_t)m->address % address) return false;
    m->strides[0] = m->element_bytes;
    for (int i = 0; i < m->rank; i++) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > MAX_BOX) return false;
        if (steps[i] < 1 || steps[i] > 8) return false;
        if (i && (strides[i - 1] % address || strides[i - 1] >= 1ull << 40)) return false;
        if (i) m->strides[i] = strides[i - 1];
        m->dims[i] = (uint32_t)(dims[i] - 1);
        m->box[i] = (uint16_t)box[i];
        m->steps[i] = (uint8_t)steps[i];
    }
    const int inner = (int)box[0] * m->element_bytes;
    if (m->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE)
        return inner % 16 == 0 && (!m->swizzle || inner <= swizzle_bytes(m->swizzle));
    return m->interleave != CU_TENSOR_MAP_INTERLEAVE_32B || m->swizzle == CU_TENSOR_MAP_SWIZZLE_32B;
}

inline CUresult tensor_map_encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
    if (on_device) fail(nullptr, "cuTensorMapEncodeTiled called from a kernel");
    {
        std::unique_lock<std::mutex> lock(machine().lock);
        if (int code = Call::injected("cuTensorMapEncodeTiled")) return (CUresult)code;
    }
    if (!map || (uintptr_t)map % 64 || !dims || !box || !steps || (!strides && rank > 1) || rank > MAX_RANK)
        return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)interleave > CU_TENSOR_MAP_INTERLEAVE_32B || (unsigned)swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
        (unsigned)promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
        (unsigned)fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA || chip_limits().chip != HOPPER)
        return CUDA_ERROR_INVALID_VALUE;
    TensorMap m = {};
    m.kind = TENSOR_MAP;
    m.rank = (uint8_t)rank;
    m.element_bytes = (uint8_t)element_bytes(type);
    m.swizzle = (uint8_t)swizzle;
    m.interleave = (uint8_t)interleave;
    m.fill = (uint8_t)fill;
    m.address = (char *)address;
    if (!encode_tensor_map(&m, dims, strides, box, steps)) return CUDA_ERROR_INVALID_VALUE;
    memset((void *)map, 0, sizeof *map);
    memcpy((void *)map, &m, sizeof m);
    return CUDA_SUCCESS;
}

} // namespace emu

typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
typedef PFN_cuTensorMapEncodeTiled_v12000 PFN_cuTensorMapEncodeTiled;

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2
};
enum { cudaEnableDefault = 0, cudaEnableLegacyStream = 1, cudaEnablePerThreadDefaultStream = 2 };

inline cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult *status = nullptr) {
    cudaDriverEntryPointQueryResult unused;
    if (!status) status = &unused;
    emu::Call call("cudaGetDriverEntryPointByVersion");
    if (call.error) return call.error;
    if (!symbol || !function || flags > cudaEnablePerThreadDefaultStream || version > (unsigned)cuda_on_cpu.driver)
        return call.give(cudaErrorInvalidValue);
    *function = nullptr;
    *status = cudaDriverEntryPointSymbolNotFound;
    if (strcmp(symbol, "cuTensorMapEncodeTiled") || !cuda_on_cpu.tensor_maps || cuda_on_cpu.driver < 12000)
        return cudaSuccess;
    *status = version < 12000 ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
    if (version >= 12000) *function = (void *)emu::tensor_map_encode_tiled;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------
// boxes

namespace emu {

/* Address bits [4:6] are XORed with bits [7:9] for 128-byte swizzle, [4:5] with [7:8] for 64, [4] with [7] for 32. */
inline uint32_t swizzled(uint32_t address, int bytes) {
    return bytes ? address ^ ((address >> 7 & (uint32_t)(bytes / 16 - 1)) << 4) : address;
}

inline const TensorMap &find_tensor_map(const CUtensorMap *map, Place at, const char *what) {
    on_hopper(at, what);
    use_async();
    const TensorMap &m = *(const TensorMap *)map;
    if ((uintptr_t)map % 64) fail(&at, "%s: the tensor map's address %p is not aligned to 64 bytes", what, (void *)map);
    if (m.kind == LOCAL_TENSOR_MAP || in_shared(map, 1))
        fail(&at,
             "%s: the tensor map at %p is a copy that the kernel has made: TMA needs the __grid_constant__ parameter "
             "itself, or one in __constant__ or device memory",
             what, (void *)map);
    if (m.kind != TENSOR_MAP) fail(&at, "%s: there is no tensor map at %p", what, (void *)map);
    return m;
}

inline size_t box_bytes(const TensorMap &m) {
    size_t bytes = m.element_bytes;
    for (int i = 0; i < m.rank; i++) bytes *= m.box[i];
    return bytes;
}

/* What the emulator cannot do, and where the tensor and the box's shared memory must lie. */
inline void check_box(const TensorMap &m, const void *shared, Place at, const char *what) {
    const int width = swizzle_bytes(m.swizzle), inner = m.box[0] * m.element_bytes;
    if (m.rank != 4) fail(&at, "%s: the tensor map has %d dimensions, the instruction 4", what, m.rank);
    for (int i = 1; i < m.rank; i++)
        if (m.steps[i] != 1) fail(&at, "%s: element strides other than 1 are not emulated", what);
    if (m.interleave || m.fill) fail(&at, "%s: interleaved layouts and NaN fills are not emulated", what);
    if (width && inner != width)
        fail(&at, "%s: boxes of %d bytes within a swizzle of %d bytes are not emulated: make them as wide", what, inner,
             width);
    if ((uintptr_t)shared % 128)
        fail(&at, "%s: %s is not at a multiple of 128 bytes in shared memory", what, shared_name(shared).c_str());
    if (!shared_region(shared, box_bytes(m)))
        fail(&at, "%s: the box's %zu bytes from %s on are not in one array of the block's shared memory", what,
             box_bytes(m), shared_name(shared).c_str());
    size_t bytes = m.element_bytes;
    for (int i = 0; i < m.rank; i++) bytes += m.dims[i] * m.strides[i];
    check_range((std::string("the tensor of ") + what).c_str(), m.address, bytes, running->device, at);
}

struct Box {
    TensorMap map;
    char *shared;
    int from[4]; // coordinates of the first element, innermost first
};

/* Calls row(offset in shared memory of its first byte, its first byte in the tensor, bytes before the tensor's begin,
 * bytes within it) for each row of the box; rows outside have none within. */
template <typename F> inline void for_rows(const Box &b, F row) {
    const TensorMap &m = b.map;
    const int64_t inner = m.box[0] * m.element_bytes, size = (int64_t)m.dims[0] * m.element_bytes + m.element_bytes;
    const int64_t first = (int64_t)b.from[0] * m.element_bytes;
    const int64_t before = std::clamp<int64_t>(-first, 0, inner), within = std::clamp<int64_t>(size - first, 0, inner);
    int64_t offset = 0;
    for (int k = 0; k < m.box[3]; k++)
        for (int j = 0; j < m.box[2]; j++)
            for (int i = 0; i < m.box[1]; i++, offset += inner) {
                const int64_t at[] = {(int64_t)b.from[1] + i, (int64_t)b.from[2] + j, (int64_t)b.from[3] + k};
                bool inside = within > before;
                int64_t address = first;
                for (int d = 0; d < 3; d++) {
                    inside &= at[d] >= 0 && at[d] <= m.dims[d + 1];
                    address += at[d] * (int64_t)m.strides[d + 1];
                }
                row(offset, address, before, inside ? within - before : 0);
            }
}

/* A row's byte in shared memory, at an offset in the box: its 16-byte pieces are permuted. */
inline char *swizzled_byte(const Box &b, int64_t offset) {
    const uint32_t address = (uint32_t)(b.shared - shared_arena) + (uint32_t)offset;
    return shared_arena + swizzled(address, swizzle_bytes(b.map.swizzle));
}

/* The bytes of a copy count for the phase of the mbarrier in which it was started. */
inline void bytes_arrive(const Mbarrier &barrier, uint64_t phase, long long bytes, Place at, const char *what) {
    Mbarrier &m = find_mbarrier(barrier.at, at, what);
    if (m.phase != phase || (!m.pending && bytes > m.bytes))
        fail(&at,
             "%s: phase %llu of the mbarrier at %s ends before these %lld bytes have come: announce all bytes with "
             "ptx_mbarrier_arrive_expect",
             what, (unsigned long long)phase, shared_name(m.at).c_str(), bytes);
    m.bytes -= bytes;
    may_end_phase(m, at, what);
}

struct TmaLoad : AsyncOp {
    Box box;
    Mbarrier *barrier;
    uint64_t phase; // of the mbarrier, when it was started

    void run() override {
        alignas(16) char line[MAX_BOX * 8];
        const int64_t inner = box.map.box[0] * box.map.element_bytes;
        for_rows(box, [&](int64_t offset, int64_t address, int64_t before, int64_t within) {
            memset(line, 0, (size_t)inner);
            if (within > 0) memcpy(line + before, box.map.address + address + before, (size_t)within);
            for (int64_t i = 0; i < inner; i += 16) write_both_views(swizzled_byte(box, offset + i), line + i, 16);
        });
        bytes_arrive(*barrier, phase, (long long)box_bytes(box.map), at, "ptx_tma_load");
    }
};

struct TmaStore : AsyncOp {
    Box box;

    void run() override {
        alignas(16) char line[MAX_BOX * 8];
        for_rows(box, [&](int64_t offset, int64_t address, int64_t before, int64_t within) {
            if (within <= 0) return;
            for (int64_t i = before / 16 * 16; i < before + within; i += 16)
                read_async(line + i, swizzled_byte(box, offset + i), 16, at, "ptx_tma_store");
            memcpy(box.map.address + address + before, line + before, (size_t)within);
        });
    }
};

/* A copy to shared memory begins, which will count for the mbarrier. */
inline Mbarrier &begin_copy(void *shared, size_t bytes, uint64_t *barrier, Place at, const char *what,
                            const void *code) {
    Mbarrier &b = find_mbarrier(barrier, at, what);
    if (!b.fenced)
        fail(&at,
             "%s: TMA does not see the mbarrier at %s: the thread that initializes it must execute "
             "ptx_mbarrier_init_fence",
             what, shared_name(barrier).c_str());
    races_touch(shared, bytes, true, code);
    races_release(&b.arrived); // who waits for the phase comes after the copy
    poison_both_views(shared, bytes);
    return b;
}

inline void tma_load(void *shared, const CUtensorMap *map, uint64_t *barrier, const int (&from)[4], Place at,
                     const void *code) {
    const char *what = "ptx_tma_load";
    const TensorMap &m = find_tensor_map(map, at, what);
    check_box(m, shared, at, what);
    Mbarrier &b = begin_copy(shared, box_bytes(m), barrier, at, what, code);
    auto load = std::make_unique<TmaLoad>();
    load->box = Box{m, (char *)shared, {from[0], from[1], from[2], from[3]}};
    load->barrier = &b;
    load->phase = b.phase;
    start_async(std::move(load), at);
}

// ---------------------------------------------------------------------------
// stores of a thread are in groups, which are waited for

struct StoreGroup {
    int open, unread;        // stores that have not been committed; groups that have not been waited for
    std::vector<int> queues; // of the groups, the oldest first, and last the open one
};
enum { FIRST_STORE_QUEUE = 1 << 10 };          // queues of the warpgroups' wgmma have lower numbers
inline std::map<int, StoreGroup> store_groups; // by thread
inline int store_queues;                       // handed out in this block

inline StoreGroup &stores_of(const Thread *t) {
    StoreGroup &g = store_groups[t->number];
    if (g.queues.empty()) g.queues.push_back(FIRST_STORE_QUEUE + store_queues++);
    return g;
}

inline void tma_store(const CUtensorMap *map, const void *shared, const int (&from)[4], Place at, const void *code) {
    const char *what = "ptx_tma_store";
    const TensorMap &m = find_tensor_map(map, at, what);
    check_box(m, shared, at, what);
    races_touch(shared, box_bytes(m), false, code);
    StoreGroup &g = stores_of(current);
    g.open++;
    auto store = std::make_unique<TmaStore>();
    store->box = Box{m, (char *)shared, {from[0], from[1], from[2], from[3]}};
    start_async(std::move(store), at, g.queues.back());
}

inline void commit_stores(Place at) {
    StoreGroup &g = stores_of(on_hopper(at, "ptx_tma_store_commit"));
    g.open = 0;
    g.queues.push_back(FIRST_STORE_QUEUE + store_queues++);
}

inline void wait_for_stores(int keep, Place at) {
    StoreGroup &g = stores_of(on_hopper(at, "ptx_tma_store_wait_read"));
    while ((int)g.queues.size() - 1 > keep) {
        run_queue(g.queues.front(), [] { return false; });
        g.queues.erase(g.queues.begin());
    }
}

// ---------------------------------------------------------------------------
// for fibers.h

inline void async_end_thread() {
    if (!hopper_used) return;
    for (auto &op : async_ops)
        if (op->queue >= 0 && op->queue == current->warp / 4)
            fail(&op->at, "ends while this wgmma of its warpgroup has not: ptx_wgmma_commit, and wait for it");
    auto g = store_groups.find(current->number);
    if (g == store_groups.end()) return;
    if (g->second.open)
        fail(nullptr, "ends after a ptx_tma_store that it has not committed: ptx_tma_store_commit, and wait for it");
    if (g->second.queues.size() > 1)
        fail(nullptr, "ends while a ptx_tma_store of it may still read shared memory: ptx_tma_store_wait_read<0>");
}

inline void async_end_block() {
    if (!hopper_used) return;
    if (!async_ops.empty()) {
        set_current(async_ops[0]->thread);
        fail(&async_ops[0]->at, "the block ends before this has happened: wait for it");
    }
    end_block_barriers();
}

inline void begin_wgmma();

inline void async_begin_block() {
    if (!hopper_used) return;
    hopper_used = async_used = false;
    async_ops.clear();
    async_pending = 0;
    store_groups.clear();
    store_queues = 0;
    begin_block_barriers();
    begin_wgmma();
}

} // namespace emu

CUDA_ON_CPU_UNSEEN inline void ptx_tma_load(void *shared, const CUtensorMap *map, uint64_t *barrier, int x0, int x1,
                                            int x2, int x3, emu::Place at = emu::Place::here()) {
    emu::tma_load(shared, map, barrier, {x0, x1, x2, x3}, at, __builtin_return_address(0));
}
CUDA_ON_CPU_UNSEEN inline void ptx_tma_store(const CUtensorMap *map, const void *shared, int x0, int x1, int x2, int x3,
                                             emu::Place at = emu::Place::here()) {
    emu::tma_store(map, shared, {x0, x1, x2, x3}, at, __builtin_return_address(0));
}
inline void ptx_tma_store_commit(emu::Place at = emu::Place::here()) { emu::commit_stores(at); }
template <int N> inline void ptx_tma_store_wait_read(emu::Place at = emu::Place::here()) {
    emu::wait_for_stores(N, at);
}
#endif
