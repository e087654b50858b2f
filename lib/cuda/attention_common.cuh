/* attention_common.cuh: what all attention kernels on NVIDIA GPUs share. */
#ifndef CUDA_ATTENTION_COMMON_CUH
#define CUDA_ATTENTION_COMMON_CUH
#include "../ops_common.h" // defines: AttentionShape, query_position, first_query
#include "vectors.cuh"     // defines: round_pair

// ---------------------------------------------------------------------------
// attention
/* After FlashAttention-2 (Dao 2023). In bf16, heads of 64 or 128 elements whose rows lie at multiples of 16 bytes go to
 * tensor cores (*_mma); all else, and fp32, to *_plain: fp32 arithmetic, heads of up to 256 elements; correct, and for
 * bf16 slow. No (T, T) tensor; K and V are read once for the query heads that share them, where caches allow. The same
 * bits on each run, but for dq of tensor cores, whose order of additions is open unless dev->deterministic. */
#define UNROLL _Pragma("unroll") // arrays stand in registers only if each index is known
#define ROLLED _Pragma("unroll 1")
#define DEVICE static __device__ __forceinline__

// ---------------------------------------------------------------------------
// PTX: what C++ has no words for

#ifndef CUDA_ON_CPU // which has these as functions of its own
DEVICE uint32_t ptx_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Blocks of 8 x 8 bf16 from shared memory into the registers of a warp, as mma wants them. Lanes 8 i ... 8 i + 7 give
 * the rows of block i, 16 bytes each; lane l gets elements 2 (l % 4) and the next of row l / 4 of each block, _trans:
 * of the transposed block. */
DEVICE void ptx_ldmatrix_x4(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(shared_row))
                 : "memory");
}
DEVICE void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(shared_row))
                 : "memory");
}
/* d(16,8) += a(16,16) b(16,8). Lane l has d at rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. */
DEVICE void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* 16 bytes, on their way until ptx_cp_async_wait; zeros where they are not valid, and then global is not read. */
DEVICE void ptx_cp_async(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void ptx_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
} // until at most N groups are on their way
DEVICE float ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---------------------------------------------------------------------------
// what all attention kernels share

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f; // exp(x) = exp2(x LOG2_E): the GPU has exp2
enum {
    ATTENTION_PAD = 128,    // queries: rows of the scratch's tensors are multiples of it
    ATTENTION_L2 = 16 << 20 // bytes of K and V that are worked on at a time: they should stay in the L2 cache
};

/* This thread's warp. The compiler should know that all its lanes have the same: what follows from it needs no register
 * a lane. */
DEVICE int warp_of_block() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

typedef struct { // a call, as its kernels get it
    AttentionShape s;
    const floatX *q, *k, *v, *dout, *out_read;
    const float *lse_read;
    floatX *out, *dq, *dk, *dv;
    float *lse;
    float *D,
        *lse2; // (B,NH,padded): rowsum(dout * out); lse LOG2_E, infinity where a row sees nothing or does not exist
    float *dq_sums;      // (B,NH,padded,HD), each tile of queries as the warps hold it (dq_add)
    int padded;          // Tq, up to ATTENTION_PAD
    int section;         // (sequence, kv head) pairs worked on at a time
    float scale, scale2; // 1 / sqrt(HD); the same LOG2_E
} AttentionCall;

/* Blocks start in this order: `section` pairs after each other; within them the tiles with most work first, so that
 * none of these begins last; of one tile all `heads` heads, which share K and V. */
typedef struct {
    int b, kv, h, rank;
} AttentionPlace; // rank: of the tile, 0 has most work
DEVICE AttentionPlace attention_place(const AttentionCall &a, int tiles, int heads) {
    int held = a.section * tiles * heads, i = (int)blockIdx.x % held, first = (int)blockIdx.x / held * a.section;
    int n = min(a.section, a.s.B * a.s.NKV - first), pair = first + i / heads % n;
    AttentionPlace p;
    p.b = pair / a.s.NKV, p.kv = pair % a.s.NKV, p.h = p.kv * (a.s.NH / a.s.NKV) + i % heads, p.rank = i / heads / n;
    return p;
}

/* The shape as sequence b alone has it: its own documents. What its query t sees: keys, by position; and this key? */
DEVICE AttentionShape sequence_of(const AttentionShape &s, int b) {
    AttentionShape x = s;
    x.q_doc = s.q_doc ? s.q_doc + (int64_t)b * s.Tq : NULL, x.k_doc = s.q_doc ? s.k_doc + (int64_t)b * s.Tk : NULL;
    return x;
}
DEVICE int seen_by(const AttentionShape &x, int t) {
    return t < x.Tq ? max(0, min(x.Tk, query_position(&x, t) + 1)) : 0;
}
DEVICE bool sees(const AttentionShape &x, int t, int key) {
    return key < seen_by(x, t) && (!x.q_doc || x.q_doc[t] == x.k_doc[key]);
}

/* Queries or keys `mine` ... mine_end - 1 have some documents. Going through the others' documents from `from` towards
 * `to` (which is not among them), up or down: where may one of these be met first? To within 32; `to`: nowhere. By all
 * lanes of a warp. What is skipped so would all be masked. */
DEVICE int documents_meet(const int32_t *mine_doc, int mine, int mine_end, const int32_t *doc, int from, int to) {
    int lane = (int)(threadIdx.x % 32), low = INT32_MAX, high = INT32_MIN, step = from < to ? 1 : -1;
    if (!mine_doc) return from;
    ROLLED for (int i = mine + lane; i < mine_end; i += 32) low = min(low, mine_doc[i]), high = max(high, mine_doc[i]);
    ROLLED for (int d = 16; d; d /= 2) low = min(low, __shfl_xor_sync(~0u, low, d)),
                                       high = max(high, __shfl_xor_sync(~0u, high, d));
    ROLLED for (int left = (to - from) * step; left > 0;
                left -= 32, from += 32 * step) if (__any_sync(~0u, lane < left && low <= doc[from + lane * step] &&
                                                                       doc[from + lane * step] <= high)) return from;
    return to;
}

#endif
