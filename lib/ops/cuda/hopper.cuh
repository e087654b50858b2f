/* hopper.cuh: instructions that only GPUs of compute capability 9.0 have: mbarriers, copies of tensor boxes by the
 * Tensor Memory Accelerator (TMA), wgmma, register reallocation; and the shared-memory layout that wgmma and TMA agree
 * on.
 *
 * References: PTX ISA, chapters "mbarrier", "Asynchronous copy" and "Asynchronous Warpgroup Level Matrix Instructions".
 * The emulator in dev/cuda_on_cpu has functions of the same names.
 */
#ifndef CUDA_HOPPER_CUH
#define CUDA_HOPPER_CUH
#include "attention_common.cuh" // defines: ptx_shared
#include <cuda.h>               // defines: CUtensorMap

/* Whether kernels of this compilation may use the instructions: nvcc compiles for several architectures, one at a time.
 */
#if defined(CUDA_ON_CPU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif

#ifndef CUDA_ON_CPU
// ---------------------------------------------------------------------------
// mbarriers: 8 bytes of shared memory each. A phase ends when all expected arrivals and all expected bytes have come;
// phases alternate between parity 0 and 1, beginning with 0

DEVICE void ptx_mbarrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_shared(barrier)), "r"(arrivals) : "memory");
}
/* One thread calls it after it has initialized mbarriers, before __syncthreads, so that TMA sees them too. */
DEVICE void ptx_mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void ptx_mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx_shared(barrier)) : "memory");
}
/* Arrives, and announces copies of this many bytes, which the phase then waits for. */
DEVICE void ptx_mbarrier_arrive_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx_shared(barrier)), "r"(bytes)
                 : "memory");
}
/* Waits until the phase of this parity has ended. On a barrier whose first phase has not ended, parity 1 returns at
 * once. */
DEVICE void ptx_mbarrier_wait(uint64_t *barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "retry:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@ended bra done;\n"
                 "bra retry;\n"
                 "done:\n"
                 "}" ::"r"(ptx_shared(barrier)),
                 "r"(parity)
                 : "memory");
}

// ---------------------------------------------------------------------------
// TMA: copies a box of a tensor of four dimensions, innermost first; elements outside the tensor are zeros in a load,
// and left alone in a store

/* One thread starts it. When all bytes have arrived, they count for the barrier's phase. */
DEVICE void ptx_tma_load(void *shared, const CUtensorMap *map, uint64_t *barrier, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(ptx_shared(shared)),
                 "l"(map), "r"(ptx_shared(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}
/* `bytes` contiguous bytes, a multiple of 16, from a multiple of 16. */
DEVICE void ptx_bulk_load(void *shared, const void *global, uint64_t *barrier, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(
                     ptx_shared(shared)),
                 "l"(global), "r"(ptx_shared(barrier)), "r"(bytes)
                 : "memory");
}
/* Stores are committed in groups by the thread that started them, as with cp.async. */
DEVICE void ptx_tma_store(const CUtensorMap *map, const void *shared, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(ptx_shared(shared)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}
DEVICE void ptx_tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Waits until at most N groups still read shared memory. */
template <int N> DEVICE void ptx_tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Called by threads that have stored to shared memory by ordinary instructions, before the barrier after which wgmma
 * or TMA reads it. */
DEVICE void ptx_fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------------------
// barriers of a part of a block, and registers

/* Barriers 1 to 15 (0 is __syncthreads). `threads`: how many take part, those that wait and those that only arrive. */
DEVICE void ptx_barrier_sync(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void ptx_barrier_arrive(int barrier, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* Every warp of a warpgroup calls it. Afterwards each thread has N registers: dec frees some, inc waits until there are
 * enough. */
template <int N> DEVICE void ptx_setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void ptx_setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

/* Stores four blocks of 8 x 8 bf16 from a warp's registers to shared memory: the reverse of ptx_ldmatrix_x4. */
DEVICE void ptx_stmatrix_x4(void *shared_row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(ptx_shared(shared_row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---------------------------------------------------------------------------
// wgmma: d (64, N) = or += a (64, 16) b (16, N), by the four warps of a warpgroup. Warp w has rows 16 w … 16 w + 15
// of d, which are N / 8 blocks of 16 x 8 in the layout of ptx_mma_bf16: d[4 n + i] is element i of block n.
//
// It is asynchronous: neither d nor the operands may be touched until ptx_wgmma_wait has returned. ptx_wgmma_fence
// comes before the first one, and again after the program has touched d or a's registers.

DEVICE void ptx_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void ptx_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most N committed groups are pending. */
template <int N> DEVICE void ptx_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
/* Keeps the compiler from moving uses of these registers across a wait or a fence (CUTLASS: warpgroup_fence_operand).
 * To the compiler a wgmma is over where it was started. Call it after a wait and before a fence. */
template <int R> DEVICE void ptx_wgmma_settle(float (&d)[R]) {
    UNROLL for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> DEVICE void ptx_wgmma_settle(uint32_t (&a)[R]) {
    UNROLL for (int i = 0; i < R; i++) asm volatile("" : "+r"(a[i])::"memory");
}

#define WGMMA_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "                       \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_8(c, i)                                                                                                  \
    c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define WGMMA_32_OPERANDS(c) WGMMA_8(c, 0), WGMMA_8(c, 8), WGMMA_8(c, 16), WGMMA_8(c, 24)
#define WGMMA_64                                                                                                       \
    WGMMA_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                      \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_64_OPERANDS(c)                                                                                           \
    WGMMA_32_OPERANDS(c), WGMMA_8(c, 32), WGMMA_8(c, 40), WGMMA_8(c, 48), WGMMA_8(c, 56)
/* d is "+f", read and written, or "=f", only written: then its former registers have no meaning to the compiler, which
 * would otherwise see them written by other instructions while earlier wgmma run, and run one wgmma after the other. */
#define WGMMA_ASM(N, R, a, b, majors, p, d, ...)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\n"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 "                                            \
                 "{" WGMMA_##R "}, " a ", " b ", p, 1, 1, " majors ";\n}"                                              \
                 : WGMMA_##R##_OPERANDS(d)                                                                             \
                 : __VA_ARGS__)

/* Operands in shared memory: a and b are descriptors (wgmma_descriptor). Without TRANSPOSED_A, rows of a are contiguous
 * in k; with it, columns of a are contiguous. Without TRANSPOSED_B, columns of b are contiguous in k; with it, rows. */
template <int TRANSPOSED_A, int TRANSPOSED_B, int R>
DEVICE void ptx_wgmma(float (&d)[R] /* N / 2 */, uint64_t a, uint64_t b, int accumulate) {
#define OPERANDS "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B)
    static_assert(R == 32 || R == 64, "wgmma is written out for N = 64 and 128");
    if constexpr (R == 32) {
        if (accumulate) WGMMA_ASM("64", 32, "%32", "%33", "%34, %35", "1", "+f", OPERANDS);
        else WGMMA_ASM("64", 32, "%32", "%33", "%34, %35", "0", "=f", OPERANDS);
    } else {
        if (accumulate) WGMMA_ASM("128", 64, "%64", "%65", "%66, %67", "1", "+f", OPERANDS);
        else WGMMA_ASM("128", 64, "%64", "%65", "%66, %67", "0", "=f", OPERANDS);
    }
#undef OPERANDS
}
/* a in registers, in the layout of ptx_mma_bf16's left operand: warp w has rows 16 w … 16 w + 15. */
template <int TRANSPOSED_B, int R>
DEVICE void ptx_wgmma(float (&d)[R] /* N / 2 */, const uint32_t (&a)[4], uint64_t b, int accumulate) {
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED_B)
    static_assert(R == 32 || R == 64, "wgmma is written out for N = 64 and 128");
    if constexpr (R == 32) {
        if (accumulate) WGMMA_ASM("64", 32, "{%32, %33, %34, %35}", "%36", "%37", "1", "+f", OPERANDS);
        else WGMMA_ASM("64", 32, "{%32, %33, %34, %35}", "%36", "%37", "0", "=f", OPERANDS);
    } else {
        if (accumulate) WGMMA_ASM("128", 64, "{%64, %65, %66, %67}", "%68", "%69", "1", "+f", OPERANDS);
        else WGMMA_ASM("128", 64, "{%64, %65, %66, %67}", "%68", "%69", "0", "=f", OPERANDS);
    }
#undef OPERANDS
}
#undef WGMMA_ASM
#undef WGMMA_32
#undef WGMMA_32_OPERANDS
#undef WGMMA_64
#undef WGMMA_64_OPERANDS
#undef WGMMA_8
#endif

// ---------------------------------------------------------------------------
// tiles in shared memory, as TMA writes and wgmma reads them
//
// A tile of bf16 is panels of 64 columns, one after the other; a panel's row has 128 bytes. The 16-byte pieces of a row
// are permuted as CU_TENSOR_MAP_SWIZZLE_128B does: bits 4 to 6 of the address are XORed with bits 7 to 9. So panels
// start at multiples of 1,024 bytes.

enum { PANEL = 64, PANEL_BYTES = PANEL * 2 }; // columns of a panel, bytes of its rows

/* The first multiple of 1,024 bytes of dynamic shared memory: a kernel asks for PANEL_SLACK bytes more than it uses. */
enum { PANEL_SLACK = 1008 }; // enough for any start at a multiple of 16 bytes
DEVICE bf16 *first_panel(bf16 *shared) {
    return (bf16 *)(void *)((char *)shared + (0 - (unsigned)__cvta_generic_to_shared(shared)) % 1024);
}

/* The offset in bytes of (row, column) in a tile of `rows` rows. */
DEVICE int panel_offset(int rows, int row, int column) {
    int at = row * PANEL_BYTES + column % PANEL * 2;
    return column / PANEL * rows * PANEL_BYTES + (at ^ (at >> 7 & 7) << 4);
}

/* The matrix descriptor of an operand of wgmma that begins at `tile`, in a panel of 128-byte rows. If rows are
 * contiguous in k, `across` is not used, because 16 k are within a panel. Otherwise k goes over the panel's rows, and
 * `across` is the number of bytes from one panel to the next (PTX ISA: leading dimension byte offset). */
DEVICE uint64_t wgmma_descriptor(const void *tile, int across) {
    const uint64_t swizzle_128 = 1, eight_rows = 8 * PANEL_BYTES;
    return (uint64_t)(__cvta_generic_to_shared(tile) & 0x3FFFF) >> 4 | (uint64_t)(across & 0x3FFFF) >> 4 << 16 |
           eight_rows >> 4 << 32 | swizzle_128 << 62;
}

#endif
