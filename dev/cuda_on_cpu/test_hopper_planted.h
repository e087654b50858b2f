/* test_hopper_planted.h: errors planted in kernels for compute capability 9.0; each must be found: by a sentence, or by
 * wrong values under one of eight seeds. */
#ifndef TEST_HOPPER_PLANTED_H
#define TEST_HOPPER_PLANTED_H
#include "test_hopper.h" // defines: stages_product, images_product, map_of

/* Ends the process as a failure does if the result is not the right one under some seed. */
template <typename F> static void wrong_values(const char *kernel, const std::vector<float> &right, F run) {
    int wrong = 0;
    for (int i = 0; i < SEEDS; i++) {
        cuda_on_cpu.seed = (uint64_t)i;
        std::vector<float> got = run();
        wrong += memcmp(got.data(), right.data(), right.size() * 4) != 0;
    }
    if (!wrong) return;
    fprintf(stderr, "CUDA on a CPU: kernel %s: wrong values under %d of %d seeds\n", kernel, wrong, SEEDS);
    _exit(3);
}

template <Mistake WRONG> static void run_wrong_stages() {
    const Product p = {64, 64, 448};
    wrong_values("stages_product", run_stages_product<64, false, true>(p),
                 [p] { return run_stages_product<64, false, true, WRONG>(p); });
}

static void planted_stages() {
    planted("14: consumers wait for an mbarrier's phase with the wrong parity", "kernel stages_product",
            run_wrong_stages<WRONG_PARITY>);
    planted("14: a stage is loaded again before the consumers have freed it", "kernel stages_product",
            run_wrong_stages<STAGE_REUSED>);
    planted("14: a stage is freed before wgmma has ended", "kernel stages_product", run_wrong_stages<FREED_EARLY>);
    planted("14: too few bytes are announced",
            "kernel stages_product|byte", // at the load that comes too late, at the next phase, or as a race
            run_wrong_stages<TOO_FEW_BYTES>);
    planted("14: d is read before ptx_wgmma_wait", "kernel stages_product: wrong values", run_wrong_stages<READ_EARLY>);
    planted("14: no ptx_wgmma_fence", "kernel stages_product|ptx_wgmma_fence must come before the first one",
            run_wrong_stages<NO_FENCE>);
    planted("14: a descriptor without a swizzle", "kernel stages_product: wrong values",
            run_wrong_stages<WRONG_DESCRIPTOR>);
    planted("14: a tensor map without a swizzle", "kernel stages_product: wrong values", [] {
        const Product p = {64, 64, 448};
        wrong_values("stages_product", run_stages_product<64, false, true>(p),
                     [p] { return run_stages_product<64, false, true>(p, CU_TENSOR_MAP_SWIZZLE_NONE); });
    });
}

// ---------------------------------------------------------------------------
// mbarriers, named barriers, registers

enum BarrierMistake {
    NOT_INITIALIZED,
    TOO_MANY_ARRIVALS,
    INITIALIZED_TWICE,
    MISALIGNED,
    NOT_SHARED,
    OVERWRITTEN,
    NEVER_ENDS,
    COUNTS_DIFFER,
    ARRIVES_TWICE,
    NO_ARRIVAL,
    BARRIER_ZERO,
    ARRIVALS_LEFT,
    TOO_MANY_REGISTERS,
    FEWER_REGISTERS_TAKEN
};

template <BarrierMistake WRONG> __global__ void wrong_barrier(uint64_t *global) {
    SHARED(uint64_t, barriers, 4);
    uint64_t *barrier = barriers;
    const bool first = threadIdx.x == 0;
    if (WRONG == MISALIGNED) barrier = (uint64_t *)((char *)barriers + 4);
    if (WRONG == NOT_SHARED) barrier = global;
    if (first && WRONG != NOT_INITIALIZED) ptx_mbarrier_init(barrier, WRONG == TOO_MANY_ARRIVALS ? 2 : 1);
    if (first && WRONG == INITIALIZED_TWICE) ptx_mbarrier_init(barrier, 1);
    if (first && WRONG == OVERWRITTEN) barriers[0] = 7;
    __syncthreads();
    if (WRONG == NEVER_ENDS) ptx_mbarrier_wait(barrier, 0);
    if (WRONG == TOO_MANY_ARRIVALS && threadIdx.x < 3) ptx_mbarrier_arrive_expect(barrier, 64);
    if (first) ptx_mbarrier_arrive(barrier);
    if (WRONG == COUNTS_DIFFER) ptx_barrier_sync(1, threadIdx.x < 32 ? 64 : 128);
    if (WRONG == ARRIVES_TWICE && threadIdx.x < 32)
        for (int i = 0; i < 2; i++) ptx_barrier_arrive(1, 128);
    if (WRONG == NO_ARRIVAL && threadIdx.x >= 32) ptx_barrier_sync(3, 128);
    if (WRONG == ARRIVALS_LEFT && threadIdx.x < 32) ptx_barrier_arrive(1, 128);
    if (WRONG == BARRIER_ZERO) ptx_barrier_sync(0, 128);
    if (WRONG == TOO_MANY_REGISTERS) ptx_setmaxnreg_inc<256>();
    if (WRONG == FEWER_REGISTERS_TAKEN) ptx_setmaxnreg_inc<24>();
}

template <BarrierMistake WRONG> static void run_wrong_barrier() {
    uint64_t *d;
    MUST(cudaMalloc(&d, 64));
    RUN(wrong_barrier<WRONG>, 1, 384, 0, 0, d);
    cudaDeviceSynchronize();
}

static void planted_parts() {
    planted("14: an mbarrier that is not initialized",
            "kernel wrong_barrier|thread (|byte 0 of shared array barriers is no mbarrier yet",
            run_wrong_barrier<NOT_INITIALIZED>);
    planted("14: an arrival more than the mbarrier expects",
            "kernel wrong_barrier|one arrival too many for the mbarrier at byte 0 of shared array barriers",
            run_wrong_barrier<TOO_MANY_ARRIVALS>);
    planted("14: an mbarrier is initialized again", "kernel wrong_barrier|ptx_mbarrier_init: in use is the mbarrier",
            run_wrong_barrier<INITIALIZED_TWICE>);
    planted("14: an mbarrier at a multiple of 4 bytes", "kernel wrong_barrier|not aligned to 8 bytes",
            run_wrong_barrier<MISALIGNED>);
    planted("14: an mbarrier in global memory", "kernel wrong_barrier|not in the block's shared memory",
            run_wrong_barrier<NOT_SHARED>);
    planted("14: a store over an mbarrier", "kernel wrong_barrier|has written over the mbarrier",
            run_wrong_barrier<OVERWRITTEN>);
    planted("14: an mbarrier that nobody arrives at",
            "kernel wrong_barrier|waits in ptx_mbarrier_wait for parity 0 of the mbarrier at byte 0 of shared array "
            "barriers, whose phase 0 lacks 1 of 1 arrivals and 0 bytes, for good",
            run_wrong_barrier<NEVER_ENDS>);
    planted("14: two counts at a named barrier", "kernel wrong_barrier|barrier 1 for |came there in ptx_barrier_sync",
            run_wrong_barrier<COUNTS_DIFFER>);
    planted("14: a second arrival before the first has ended", "kernel wrong_barrier|comes to barrier 1 again",
            run_wrong_barrier<ARRIVES_TWICE>);
    planted(
        "14: a named barrier with too few threads",
        "kernel wrong_barrier|waits in ptx_barrier_sync for barrier 3, where 32 of 128 threads are missing, for good",
        run_wrong_barrier<NO_ARRIVAL>);
    planted("14: arrivals that nobody waits for",
            "kernel wrong_barrier|the block ends while 96 of 128 threads are missing at barrier 1",
            run_wrong_barrier<ARRIVALS_LEFT>);
    planted("14: named barrier 0", "kernel wrong_barrier|barrier 0, expected 1 to 15", run_wrong_barrier<BARRIER_ZERO>);
    planted(
        "14: registers that no warpgroup gives up",
        "kernel wrong_barrier|waits in ptx_setmaxnreg_inc<256>, for which 0 registers of a block are free, for good",
        run_wrong_barrier<TOO_MANY_REGISTERS>);
    planted("14: fewer registers are taken than there are",
            "kernel wrong_barrier|ptx_setmaxnreg_inc<24>: each thread of", run_wrong_barrier<FEWER_REGISTERS_TAKEN>);
}

// ---------------------------------------------------------------------------
// TMA

enum CopyMistake {
    RIGHT_COPY,
    NO_INIT_FENCE,
    MAP_COPIED,
    NO_MAP,
    BOX_MISALIGNED,
    BOX_OVERRUNS,
    NOT_PUBLISHED,
    SOURCE_REUSED,
    NOT_COMMITTED,
    STORE_NOT_AWAITED,
    LOAD_NOT_AWAITED
};

/* Loads a box of (8, 64), adds 1 by ordinary stores, and stores it again. */
template <CopyMistake WRONG>
__global__ void wrong_copy(const __grid_constant__ CUtensorMap map, const char *other_map) {
    DYN_SHARED(bf16, box);
    SHARED(uint64_t, arrived, 1);
    CUtensorMap copy(map);
    const CUtensorMap *m = &map;
    if (WRONG == MAP_COPIED) m = &copy;
    if (WRONG == NO_MAP) m = (const CUtensorMap *)other_map;
    box += (-(int)ptx_shared(box) & 1023) / 2;
    if (WRONG == BOX_MISALIGNED) box += 32;
    if (WRONG == BOX_OVERRUNS) box += 1024;
    if (threadIdx.x == 0) {
        ptx_mbarrier_init(arrived, 1);
        if (WRONG != NO_INIT_FENCE) ptx_mbarrier_init_fence();
        ptx_mbarrier_arrive_expect(arrived, 1024);
        ptx_tma_load(box, m, arrived, 0, 0, 0, 0);
    }
    if (WRONG == LOAD_NOT_AWAITED) return;
    __syncthreads();
    ptx_mbarrier_wait(arrived, 0);
    for (int i = 0; i < 8; i++) box[threadIdx.x * 8 + i] = bf16((float)box[threadIdx.x * 8 + i] + 1);
    if (WRONG != NOT_PUBLISHED) ptx_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx_tma_store(m, box, 0, 0, 0, 0);
        if (WRONG != NOT_COMMITTED) ptx_tma_store_commit();
        if (WRONG == SOURCE_REUSED) box[0] = bf16(5.0f);
        if (WRONG != STORE_NOT_AWAITED) ptx_tma_store_wait_read<0>();
    }
}

template <CopyMistake WRONG> static std::vector<float> run_copy() {
    bf16 *x = device_bf16(16 * 64, small_floats(16 * 64, 0));
    std::vector<bf16> h(16 * 64);
    RUN(wrong_copy<WRONG>, 1, 64, 2048, 0, map_of(x, 1, 16, 64, 64, 8, 64), (const char *)x);
    MUST(cudaMemcpy(h.data(), x, h.size() * 2, cudaMemcpyDeviceToHost));
    MUST(cudaFree(x));
    return std::vector<float>(h.begin(), h.end());
}

template <CopyMistake WRONG> static void run_wrong_copy() {
    wrong_values("wrong_copy", run_copy<RIGHT_COPY>(), run_copy<WRONG>);
}

static void planted_copies() {
    planted("14: an mbarrier that TMA does not see",
            "kernel wrong_copy|TMA does not see the mbarrier at byte 0 of shared array arrived",
            run_wrong_copy<NO_INIT_FENCE>);
    planted("14: a tensor map that the kernel has copied", "kernel wrong_copy|is a copy that the kernel has made",
            run_wrong_copy<MAP_COPIED>);
    planted("14: no tensor map", "kernel wrong_copy|there is no tensor map at", run_wrong_copy<NO_MAP>);
    planted("14: a box at a multiple of 64 bytes", "kernel wrong_copy|is not at a multiple of 128 bytes",
            run_wrong_copy<BOX_MISALIGNED>);
    planted("14: a box beyond shared memory", "kernel wrong_copy|the box's 1024 bytes from|are not in one array",
            run_wrong_copy<BOX_OVERRUNS>);
    planted("14: no ptx_fence_proxy_async before a TMA store",
            "kernel wrong_copy|ptx_tma_store reads byte |which an ordinary store has written",
            run_wrong_copy<NOT_PUBLISHED>);
    planted("14: the source of a TMA store is written before it has been read", "kernel wrong_copy|",
            run_wrong_copy<SOURCE_REUSED>);
    planted("14: a TMA store that is not committed", "kernel wrong_copy|ends after a ptx_tma_store",
            run_wrong_copy<NOT_COMMITTED>);
    planted("14: a thread ends before its TMA store has read", "kernel wrong_copy|ends while a ptx_tma_store",
            run_wrong_copy<STORE_NOT_AWAITED>);
    planted("14: a block ends before a TMA load has come", "kernel wrong_copy|the block ends before this has happened",
            run_wrong_copy<LOAD_NOT_AWAITED>);
    planted("14: a tensor that is longer than its memory",
            "kernel wrong_copy|the tensor of ptx_tma_load of 4096 bytes begins at byte 0 of an allocation of 2048", [] {
                bf16 *x = device_bf16(16 * 64, {});
                RUN(wrong_copy<RIGHT_COPY>, 1, 64, 2048, 0, map_of(x, 1, 32, 64, 64, 8, 64), (const char *)x);
                cudaDeviceSynchronize();
            });
    planted("14: a tensor in host memory", "kernel wrong_copy|the tensor of ptx_tma_load should be device memory", [] {
        alignas(16) static bf16 x[16 * 64];
        RUN(wrong_copy<RIGHT_COPY>, 1, 64, 2048, 0, map_of(x, 1, 16, 64, 64, 8, 64), nullptr);
        cudaDeviceSynchronize();
    });
}

// ---------------------------------------------------------------------------
// wgmma

enum WgmmaMistake {
    RIGHT_WGMMA,
    D_WRITTEN,      // while in flight
    A_WRITTEN,      // while in flight
    D_NOT_FENCED,   // written between two wgmma
    A_NOT_FENCED,   // the same
    NO_WAIT,        // the thread ends
    NOT_ALL_GROUPS, // waits for one group too few
    ONE_WARP,
    ONE_HALF,
    TWO_DESCRIPTORS,
    BASE_OFFSET,
    OUTSIDE
};

/* d = 2 (a b), a in registers, b (16, 64) a panel in shared memory. */
template <WgmmaMistake WRONG> __global__ void wrong_wgmma(float *out, const uint4 *b) {
    DYN_SHARED(uint4, panel);
    const int t = (int)threadIdx.x;
    panel = (uint4 *)((char *)panel + (-(int)ptx_shared(panel) & 1023));
    panel[t] = b[t];
    ptx_fence_proxy_async();
    __syncthreads();
    if (WRONG == ONE_WARP && t >= 32) return;
    if (WRONG == ONE_HALF && t % 32 >= 16) __syncthreads();
    float d[32];
    uint32_t a[4];
    for (int i = 0; i < 4; i++) a[i] = 0x3F803F80u * (uint32_t)(t % 7 > i); // 1 or 0
    char *tile = (char *)panel;
    if (WRONG == OUTSIDE) tile += 4096;
    if (WRONG == BASE_OFFSET) tile += 128;
    if (WRONG == TWO_DESCRIPTORS && t == 77) tile += 16;
    const uint64_t descriptor = describe(tile, 2048, 1024, 1);
    ptx_wgmma_fence();
    ptx_wgmma<1>(d, a, descriptor, 0);
    ptx_wgmma_commit();
    if (WRONG == D_WRITTEN) d[3] = 1;
    if (WRONG == A_WRITTEN) a[t % 4] ^= 0x3F80;
    if (WRONG != NO_WAIT) ptx_wgmma_wait<0>();
    if (WRONG == D_NOT_FENCED && t == 5) d[7] += 3;
    if (WRONG == A_NOT_FENCED && t == 127) a[2] ^= 0x3F80;
    ptx_wgmma<1>(d, a, descriptor, 1);
    ptx_wgmma_commit();
    if (WRONG == NOT_ALL_GROUPS) ptx_wgmma_wait<1>();
    else if (WRONG != NO_WAIT) ptx_wgmma_wait<0>();
    write_tile(out, d, 0, 0, 64, 64);
    if (WRONG == NOT_ALL_GROUPS) ptx_wgmma_wait<0>();
}

template <WgmmaMistake WRONG> static std::vector<float> run_wgmma() {
    bf16 *b = device_bf16(16 * 64, small_floats(16 * 64, 0));
    float *d = device_floats(64 * 64, nullptr);
    RUN(wrong_wgmma<WRONG>, 1, 128, 4096, 0, d, (const uint4 *)b);
    std::vector<float> h = host_floats(d, 64 * 64);
    MUST(cudaFree(b));
    MUST(cudaFree(d));
    return h;
}

template <WgmmaMistake WRONG> static void run_wrong_wgmma() {
    wrong_values("wrong_wgmma", run_wgmma<RIGHT_WGMMA>(), run_wgmma<WRONG>);
}

template <WgmmaMistake WRONG> static void run_late_wgmma() { // wgmma happen when they are waited for
    cuda_on_cpu.seed = 1;
    run_wgmma<WRONG>();
}

static void planted_wgmma() {
    planted("14: d is written while a wgmma works on it",
            "kernel wrong_wgmma|register 3 of d of thread |has been written before it has ended",
            run_late_wgmma<D_WRITTEN>);
    planted("14: a's registers are written while a wgmma reads them",
            "kernel wrong_wgmma|a's registers of thread |have changed before it has ended", run_late_wgmma<A_WRITTEN>);
    planted("14: d is written between two wgmma, without a fence",
            "kernel wrong_wgmma|register 7 of d of thread 5 of the warpgroup|since the last ptx_wgmma_fence",
            run_wrong_wgmma<D_NOT_FENCED>);
    planted("14: a's registers are written between two wgmma, without a fence",
            "kernel wrong_wgmma|register 2 of a of thread 127 of the warpgroup|since the last ptx_wgmma_fence",
            run_wrong_wgmma<A_NOT_FENCED>);
    planted("14: no ptx_wgmma_wait", "kernel wrong_wgmma|", run_wrong_wgmma<NO_WAIT>);
    planted("14: ptx_wgmma_wait for one group too few", "kernel wrong_wgmma: wrong values",
            run_wrong_wgmma<NOT_ALL_GROUPS>);
    planted("14: wgmma by one warp", "kernel wrong_wgmma|ptx_wgmma is for all threads of warpgroup 0",
            run_wrong_wgmma<ONE_WARP>);
    planted("14: half of each warp is elsewhere", "kernel wrong_wgmma|ptx_wgmma_fence|for good",
            run_wrong_wgmma<ONE_HALF>);
    planted("14: wgmma with two descriptors", "kernel wrong_wgmma|threads 0 and 77 of the warpgroup give different",
            run_wrong_wgmma<TWO_DESCRIPTORS>);
    planted("14: an operand that begins within the swizzle's pattern", "kernel wrong_wgmma|base offset 0: the pattern",
            run_wrong_wgmma<BASE_OFFSET>);
    planted("14: an operand outside shared memory", "kernel wrong_wgmma|outside the block's shared memory",
            run_wrong_wgmma<OUTSIDE>);
    planted("14: wgmma in a block of two warps", "kernel wrong_wgmma|the block's 64 threads end within warpgroup 0",
            [] {
                RUN(wrong_wgmma<RIGHT_WGMMA>, 1, 64, 4096, 0, device_floats(4096, small),
                    (const uint4 *)device_bf16(1024, {}));
                cudaDeviceSynchronize();
            });
    planted("14: no ptx_fence_proxy_async before wgmma",
            "kernel images_product|ptx_wgmma reads byte |which an ordinary store has written", [] {
                const CanonicalLayout c = {"", true, 3, 16, 1024};
                auto a = (uint4 *)image_of(c, 64, 0), b = (uint4 *)image_of(c, 128, 501);
                RUN((images_product<0, 0, false>), 1, 128, 2 * IMAGE + 1024, 0, device_floats(64 * 128, nullptr), a, b,
                    fields_of(c), fields_of(c));
                cudaDeviceSynchronize();
            });
    planted("14: wgmma on another chip", "kernel wrong_wgmma|needs compute capability 9.0, but the chip is sm_80", [] {
        cuda_on_cpu.chip = 80;
        run_wgmma<RIGHT_WGMMA>();
    });
}

// ---------------------------------------------------------------------------
// hand-offs between threads; some mistakes are found with races.h only

enum HandOff {
    RIGHT_HAND_OFF,
    LANES_READ_ON, // lane 0 frees the tile while other lanes of its warp may still read it
    NO_BARRIER,    // between stores and wgmma of other warps
    ONE_WARP_FENCES,
    BY_STMATRIX, // right
    BY_STMATRIX_ONE_WARP_FENCES
};

/* Consumers add up three tiles of (4, 32) that a producer copies to the same place. */
template <HandOff WRONG> __global__ void tiles_summed(float *out, const float *tiles) {
    SHARED(float4, tile, 32);
    SHARED(uint64_t, full, 1);
    SHARED(uint64_t, empty, 1);
    const int t = (int)threadIdx.x;
    if (t == 0) {
        ptx_mbarrier_init(full, 1);
        ptx_mbarrier_init(empty, 4);
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 3; i++) {
        if (t == 128) {
            ptx_mbarrier_wait(empty, (i & 1) ^ 1);
            ptx_mbarrier_arrive_expect(full, 512);
            ptx_bulk_load(tile, tiles + i * 128, full, 512);
        }
        if (t >= 128) continue;
        ptx_mbarrier_wait(full, i & 1);
        sum += ((float *)tile)[t];
        if (WRONG != LANES_READ_ON) __syncwarp();
        if (t % 32 == 0) ptx_mbarrier_arrive(empty);
    }
    if (t < 128) out[t] = sum;
}

/* All warps store a part of b, then multiply. */
template <HandOff WRONG> __global__ void stored_and_multiplied(float *out, const uint4 *b) {
    DYN_SHARED(uint4, panel);
    const int t = (int)threadIdx.x;
    panel = (uint4 *)((char *)panel + (-(int)ptx_shared(panel) & 1023));
    const uint32_t ones[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80}; // all that is in b
    if (WRONG >= BY_STMATRIX) ptx_stmatrix_x4(&panel[t], ones);
    else panel[t] = b[t];
    if (WRONG == BY_STMATRIX_ONE_WARP_FENCES) ptx_barrier_sync(1, 128); // so that all have stored
    if ((WRONG != ONE_WARP_FENCES && WRONG != BY_STMATRIX_ONE_WARP_FENCES) || t < 32) ptx_fence_proxy_async();
    if (WRONG != NO_BARRIER) ptx_barrier_sync(1, 128);
    float d[32];
    ptx_wgmma_fence();
    ptx_wgmma<1>(d, ones, describe(panel, 2048, 1024, 1), 0);
    ptx_wgmma_commit();
    ptx_wgmma_wait<0>();
    write_tile(out, d, 0, 0, 64, 64);
}

template <HandOff WRONG> static int run_tiles_summed() {
    float *x = device_floats(384, small), *y = device_floats(128, nullptr);
    RUN(tiles_summed<WRONG>, 1, 160, 0, 0, y, x);
    std::vector<float> h = host_floats(y, 128);
    int wrong = 0;
    for (size_t i = 0; i < 128; i++) wrong += !(h[i] == small(i) + small(i + 128) + small(i + 256));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    return wrong;
}

template <HandOff WRONG> static int run_stored() {
    bf16 *b = device_bf16(16 * 64, std::vector<float>(16 * 64, 1.0f));
    float *d = device_floats(64 * 64, nullptr);
    RUN(stored_and_multiplied<WRONG>, 1, 128, 4096, 0, d, (const uint4 *)b);
    std::vector<float> h = host_floats(d, 64 * 64);
    MUST(cudaFree(b));
    MUST(cudaFree(d));
    return (int)std::count_if(h.begin(), h.end(), [](float x) { return x != 16; });
}

static void planted_hand_offs() {
    int wrong = 0;
    for (cuda_on_cpu.seed = 0; cuda_on_cpu.seed < SEEDS; cuda_on_cpu.seed++)
        wrong += run_tiles_summed<RIGHT_HAND_OFF>() + run_stored<RIGHT_HAND_OFF>() + run_stored<BY_STMATRIX>();
    cuda_on_cpu.seed = 1;
    check(!wrong, "tiles by bulk copies, and stores before wgmma: %d elements differ under %d seeds", wrong, SEEDS);
    if (!CUDA_ON_CPU_RACES) { // races.h knows that the warp has seen what the others stored
        planted("14: only one of four warps that execute stmatrix executes ptx_fence_proxy_async",
                "kernel stored_and_multiplied|ptx_wgmma reads byte |which an ordinary store has written",
                [] { run_stored<BY_STMATRIX_ONE_WARP_FENCES>(); });
        return;
    }
    planted("14: lane 0 frees a tile that other lanes still read, as a race",
            "kernel tiles_summed|writes byte |of shared array tile|no barrier between",
            [] { run_tiles_summed<LANES_READ_ON>(); });
    planted("14: no barrier between stores and wgmma of other warps, as a race",
            "kernel stored_and_multiplied|reads byte |of shared array DYN_SHARED|no barrier between",
            [] { run_stored<NO_BARRIER>(); });
    planted("14: only one of four warps that store executes ptx_fence_proxy_async",
            "kernel stored_and_multiplied|ptx_wgmma reads byte |which an ordinary store has written",
            [] { run_stored<ONE_WARP_FENCES>(); });
}

static void planted_hopper() {
    planted_stages();
    planted_parts();
    planted_copies();
    planted_wgmma();
    planted_hand_offs();
}
#endif
