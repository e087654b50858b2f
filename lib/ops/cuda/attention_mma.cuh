/* attention_mma.cuh: attention on tensor cores (mma.sync), in bf16, for heads of 64 or 128 elements.
 *
 * After FlashAttention-2 (Dao 2023). Forward: a block per tile of queries, which goes over the keys. Backward: a block
 * per tile of keys, which goes over the queries; dq is summed over blocks with atomic additions or, under
 * on->deterministic, computed by a second kernel in a fixed order.
 */
#ifndef CUDA_ATTENTION_MMA_CUH
#define CUDA_ATTENTION_MMA_CUH
#include "attention_fragments.cuh" // defines: mma_mask, mma_pack, mma_store, dq_add, attention_backward_join
#include "attention_prepare.cuh"   // defines: attention_backward_prepare
#include "attention_softmax.cuh"   // defines: softmax_weights, rescale_rows, forward_finish

#ifdef PRECISION_BF16
// ---------------------------------------------------------------------------
// PTX instructions, which GPUs have from compute capability 8.0 on

#ifndef CUDA_ON_CPU // the emulator has functions of the same names
/* Loads four blocks of 8 x 8 bf16 from shared memory into a warp's registers, in the layout of mma operands. Lanes 8 i
 * … 8 i + 7 pass the addresses of block i's rows, 16 bytes each. Lane l receives elements 2 (l % 4) and 2 (l % 4) + 1
 * of row l / 4 of each block; with _trans, of the transposed block. */
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

/* d (16, 8) += a (16, 16) b (16, 8), by a warp. Lane l has rows l / 4 and l / 4 + 8 of d, at columns 2 (l % 4) and
 * 2 (l % 4) + 1. */
DEVICE void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Starts a copy of 16 bytes from global to shared memory. If not `valid`, zeros are written and global is not read.
 * Copies are committed in groups; ptx_cp_async_wait<N> waits until at most N groups are in flight. */
DEVICE void ptx_cp_async(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void ptx_cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

// ---------------------------------------------------------------------------
// tiles and matmuls

DEVICE const uint32_t (&half_of(const uint32_t (&r)[4], int i))[2] { return *(const uint32_t(*)[2])(r + 2 * i); }

/* Starts copying `rows` rows of HD elements, `stride` apart, from global memory to a tile; zeros beyond `count` rows.
 * */
template <int HD>
DEVICE void tile_load(bf16 *tile, const bf16 *from, int64_t stride, int rows, int count, int threads) {
    enum { PIECES = HD / 8 };
    unsigned thread = opaque_thread();
    int row = (int)(thread / PIECES), piece = (int)(thread % PIECES);
    const bf16 *at = from + row * stride + piece * 8;
    bf16 *to = tile + swizzled<HD>(row, piece); // the permutation repeats every eighth row
    UNROLL for (int i = 0; i < rows; i += threads / PIECES) ptx_cp_async(to + i * HD, at + i * stride, row + i < count);
}

/* c (16 M, 8 N) = a (16 M, HD) b (8 N, HD)^T, both tiles: scores from queries and keys. */
template <int HD, int M, int N> DEVICE void mma_scores(float (&c)[M][N][4], const bf16 *a, const bf16 *b) {
    int lane = opaque_lane(), a_at = swizzled<HD>(lane % 16, lane / 16);
    int b_at = swizzled<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    fill(c, 0);
    UNROLL for (int k = 0; k < HD; k += 16) {
        uint32_t x[M][4], y[4];
        UNROLL for (int m = 0; m < M; m++) ptx_ldmatrix_x4(x[m], a + m * 16 * HD + (a_at ^ k));
        UNROLL for (int n = 0; n < N; n += 2) {
            ptx_ldmatrix_x4(y, b + n * 8 * HD + (b_at ^ k));
            UNROLL for (int m = 0; m < M; m++) {
                ptx_mma_bf16(c[m][n], x[m], half_of(y, 0));
                ptx_mma_bf16(c[m][n + 1], x[m], half_of(y, 1));
            }
        }
    }
}

/* c (16 M, HD) += w (16 M, 16 K) b (16 K, HD): a weighted sum of the rows of tile b; w is in registers. */
template <int HD, int M, int K>
DEVICE void mma_weighted(float (&c)[M][HD / 8][4], const uint32_t (&w)[M][K][4], const bf16 *b) {
    int lane = opaque_lane(), at = swizzled<HD>(lane % 16, lane / 16);
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int n = 0; n < HD / 8; n += 2) {
            uint32_t y[4];
            ptx_ldmatrix_x4_trans(y, b + k * 16 * HD + (at ^ n * 8));
            UNROLL for (int m = 0; m < M; m++) {
                ptx_mma_bf16(c[m][n], w[m][k], half_of(y, 0));
                ptx_mma_bf16(c[m][n + 1], w[m][k], half_of(y, 1));
            }
        }
}

// ---------------------------------------------------------------------------
// forward
//
// A block has 128 queries of one head, each of its four warps 32 of them: Q is in shared memory, O in registers. K and
// V go through one tile each: V arrives while Q K^T is computed, the next K during the softmax and P V. All warps read
// each tile of keys: 8 HD FLOPs for each byte that a warp reads.

template <int HD> static __global__ void __launch_bounds__(128, 2) attention_forward_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 8192 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                               // (QUERIES, HD)
    bf16 *ks = qs + QUERIES * HD, *vs = ks + KEYS * HD; // (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, (int)blockIdx.x, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.order) * QUERIES, tw = t0 + warp * 32; // first query of this block, of this warp
    const int end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1);
    const int warp_end = tw < s.Tq ? seen_by(x, min(tw + 32, s.Tq) - 1) : 0;
    const bf16 *q = a.q + ((int64_t)p.b * s.Tq + t0) * s.q_stride + p.h * HD;
    const bf16 *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * HD;
    const bf16 *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * HD;
    int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS;

    float o[2][HD / 8][4], base[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, sum[2][2] = {{0, 0}, {0, 0}};
    fill(o, 0);
    if (j < end) {
        tile_load<HD>(qs, q, s.q_stride, QUERIES, s.Tq - t0, THREADS);
        tile_load<HD>(ks, k + j * s.k_stride, s.k_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
    }
    for (; j < end; j += KEYS) {
        const bool works = j < warp_end, masked = s.q_doc || j + KEYS > seen_by(x, tw);
        float c[2][N][4];
        ptx_cp_async_wait<0>();
        __syncthreads(); // K has arrived, and nobody reads the previous V any more
        tile_load<HD>(vs, v + j * s.v_stride, s.v_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
        if (works) mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        ptx_cp_async_wait<0>();
        __syncthreads(); // V has arrived, and nobody reads K any more
        if (j + KEYS < end) {
            tile_load<HD>(ks, k + (j + KEYS) * s.k_stride, s.k_stride, KEYS, s.Tk - j - KEYS, THREADS);
            ptx_cp_async_commit();
        }
        if (works) {
            uint32_t w[2][N / 2][4];
            if (masked) mma_mask<0>(c, sequence_of(s, opaque(p.b)), tw, j);
            float rescale[2][2];
            if (__any_sync(~0u, softmax_weights(c, rescale, base, sum, a.scale2))) rescale_rows(o, rescale);
            mma_pack(w, c, 1);
            mma_weighted<HD>(o, w, vs);
        }
    }
    forward_finish<HD>(a, p, tw, lane, o, base, sum);
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows: they can hold its output
    mma_pack(w, o, 1);
    __syncwarp();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.out + ((int64_t)opaque(p.b) * s.Tq + tw) * s.o_stride + p.h * HD, s.o_stride, mine, 32, s.Tq - tw,
                   lane, 32);
}

// ---------------------------------------------------------------------------
// backward (the formulas are attention_backward's in lib/ops/ops.h)
//
// A block has KEYS keys of one head and goes over all queries that see them, of all query heads that share them,
// QUERIES at a time. Half of its warps own dV, the other half dK: each warp has 32 keys' rows of it in registers. The
// dV warps compute S^T = K Q^T and from it P^T, the dK warps dP^T = V dO^T and dS^T: both are in the layout of the left
// operand of the warps' own sums. P goes from the dV warps to the dK warps through shared memory, where dS then
// replaces it. From dS all warps compute dQ, 32 x 32 elements each. Arithmetic overlaps: a step's dK is computed at the
// start of the next step, while the dV warps take exponentials, and dV while the dK warps compute dS.

/* Sizes, and the offsets of the tiles in a block's shared memory, in bf16 elements. Q and dO have two slots: one for
 * this step's rows, one for the previous or the next step's. */
template <int HD, int KEYS> struct Backward {
    static constexpr int THREADS = 2 * KEYS, QUERIES = 64 * KEYS / HD, TILE = QUERIES * HD, QUERY_WARPS = QUERIES / 32;
    static constexpr int K = 0, V = KEYS * HD;         // (KEYS, HD)
    static constexpr int Q = 2 * V, DO = Q + 2 * TILE; // (2, QUERIES, HD)
    static constexpr int P = DO + 2 * TILE;            // (KEYS, QUERIES): P^T, then dS^T
    static constexpr int LSE = P + KEYS * QUERIES;     // (2, QUERIES) floats, and as many for D
    static constexpr int BYTES = LSE * (int)sizeof(bf16) + 4 * QUERIES * (int)sizeof(float);
};

/* What a block works on. In shared memory, because values that are needed once a step should not take registers. */
typedef struct {
    int b, kv, key;            // sequence, kv head, first key
    int first, end;            // the queries that may see the keys
    int first_head, last_head; // the query heads: those that share kv, or a part of them
    int64_t part_tile;         // the number of this block's tile in part_sums
} BackwardPlace;

/* Starts loading Q, dO, lse2 and D of the QUERIES queries from t on of head h. */
template <int HD, int KEYS>
DEVICE void backward_load(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int h, int t, int slot) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape &s = a.s;
    const int64_t token = (int64_t)p->b * s.Tq + t, row = ((int64_t)p->b * s.NH + h) * a.padded + t;
    tile_load<HD>(tiles + Z::Q + slot * Z::TILE, a.q + token * s.q_stride + h * HD, s.q_stride, Z::QUERIES, s.Tq - t,
                  Z::THREADS);
    tile_load<HD>(tiles + Z::DO + slot * Z::TILE, a.dout + token * s.o_stride + h * HD, s.o_stride, Z::QUERIES,
                  s.Tq - t, Z::THREADS);
    float *rows = (float *)(void *)(tiles + Z::LSE) + slot * Z::QUERIES;
    int i = (int)opaque_thread() * 4;
    if (i < Z::QUERIES) ptx_cp_async(rows + i, a.lse2 + row + i, true);
    else if (i < 2 * Z::QUERIES) ptx_cp_async(rows + Z::QUERIES + i, a.D + row + i - Z::QUERIES, true);
}

/* w = P^T = exp2(S^T scale2 - lse2) or, with OWNS_DK, dS^T = P^T (dP^T - D), from c and rows (lse2 or D). P^T is also
 * stored to shared memory, and, for dQ, dS^T where this lane has read P^T. */
template <int QUERIES, int WITH_DQ, int OWNS_DK, int N>
DEVICE void backward_weights(const AttentionCall &a, uint32_t (&w)[2][N / 2][4], bf16 *my_ps, const float (&c)[2][N][4],
                             const float *rows) {
    const int at = mma_lane<QUERIES>(), left = opaque_lane() % 4 * 2;
    UNROLL for (int n = 0; n < N; n++) {
        float2 row = *(const float2 *)(const void *)(rows + n * 8 + left);
        UNROLL for (int i = 0; i < 4; i++) {
            const float *x = &c[i / 2][n][i % 2 * 2];
            uint32_t *word = mma_word<QUERIES>(my_ps, at, i / 2, n, i % 2), two;
            if (OWNS_DK)
                two = round_pair(__uint_as_float(*word << 16) * (x[0] - row.x),
                                 __uint_as_float(*word & 0xFFFF0000u) * (x[1] - row.y));
            else two = round_pair(ptx_exp2(fmaf(x[0], a.scale2, -row.x)), ptx_exp2(fmaf(x[1], a.scale2, -row.y)));
            w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
            if (!OWNS_DK || WITH_DQ) *word = two;
        }
    }
}

/* Adds this warp's 32 queries x 32 elements of dS K to dq_sums, whose row `row` is the tile's first. */
template <int HD, int KEYS>
DEVICE void backward_dq(const AttentionCall &a, int row, const bf16 *ps, const bf16 *ks, int warp) {
    typedef Backward<HD, KEYS> Z;
    enum { QUERIES = Z::QUERIES };
    float d[2][4][4];
    const int lane = opaque_lane();
    const int p_at = swizzled<QUERIES>(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ warp % Z::QUERY_WARPS * 32;
    const int k_at = swizzled<HD>(lane % 16, lane / 16) ^ warp / Z::QUERY_WARPS * 32;
    fill(d, 0);
    UNROLL for (int k = 0; k < KEYS; k += 16) {
        uint32_t y[2][4], z[4];
        UNROLL for (int m = 0; m < 2; m++) ptx_ldmatrix_x4_trans(y[m], ps + k * QUERIES + (p_at ^ m * 16));
        UNROLL for (int n = 0; n < 4; n += 2) {
            ptx_ldmatrix_x4_trans(z, ks + k * HD + (k_at ^ n * 8));
            UNROLL for (int m = 0; m < 2; m++) {
                ptx_mma_bf16(d[m][n], y[m], half_of(z, 0));
                ptx_mma_bf16(d[m][n + 1], y[m], half_of(z, 1));
            }
        }
    }
    float *dq = a.dq_sums + (int64_t)opaque(row) * HD + opaque(warp) * DQ_WARP;
    UNROLL for (int i = 0; i < 8; i++) dq_add(dq + i * DQ_BLOCK, d[i / 4][i % 4]);
}

/* The work of one half of the warps. The halves are separate functions, so that what one of them keeps in registers
 * takes none in the other. A step is QUERIES queries, from t on, of query head h. */
template <int HD, int KEYS, int WITH_DQ, int OWNS_DK>
DEVICE void backward_half(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int warp) {
    typedef Backward<HD, KEYS> Z;
    enum { QUERIES = Z::QUERIES, N = QUERIES / 8 };
    const AttentionShape &s = a.s;
    const int slice = warp % (KEYS / 32) * 32; // the first of this warp's keys
    bf16 *mine = tiles + (OWNS_DK ? Z::V : Z::K) + slice * HD, *ps = tiles + Z::P, *my_ps = ps + slice * QUERIES;
    int h = p->first < p->end ? p->first_head : p->last_head + 1, t = p->first;
    float sums[2][HD / 8][4]; // dV or dK of 32 keys
    uint32_t w[2][N / 2][4];  // P^T or dS^T of 32 keys
    fill(sums, 0);
    for (int step = 0;; step++) {
        const int slot = step % 2, row = (p->b * s.NH + h) * a.padded + t;
        const float *rows = (const float *)(const void *)(tiles + Z::LSE) + (OWNS_DK * 2 + slot) * QUERIES; // lse2 or D
        float c[2][N][4];
        ptx_cp_async_wait<0>();
        __syncthreads(); // this step's rows have arrived, and nobody reads the previous dS any more
        if (OWNS_DK && step) mma_weighted<HD>(sums, w, tiles + Z::Q + (slot ^ 1) * Z::TILE);
        if (h > p->last_head) break;
        mma_scores<HD>(c, mine, tiles + (OWNS_DK ? Z::DO : Z::Q) + slot * Z::TILE);
        if (!OWNS_DK) {
            if (s.q_doc || p->key + slice + 32 > query_position(&s, t) + 1 || p->key + KEYS > s.Tk)
                mma_mask<1>(c, sequence_of(s, p->b), t, p->key + slice);
            backward_weights<QUERIES, WITH_DQ, 0>(a, w, my_ps, c, rows);
        }
        __syncthreads(); // P is complete, and nobody reads the previous step's rows any more
        t += QUERIES;
        if (t >= p->end) {
            h++;
            t = p->first;
        }
        if (h <= p->last_head) backward_load<HD, KEYS>(a, tiles, p, h, t, slot ^ 1);
        ptx_cp_async_commit();
        if (OWNS_DK) backward_weights<QUERIES, WITH_DQ, 1>(a, w, my_ps, c, rows);
        else mma_weighted<HD>(sums, w, tiles + Z::DO + slot * Z::TILE);
        if (!WITH_DQ) continue;
        __syncthreads(); // dS is complete
        backward_dq<HD, KEYS>(a, row, ps, tiles + Z::K, warp);
    }
    if (a.part_sums) {
        float *to = a.part_sums + (2 * p->part_tile + OWNS_DK) * KEYS * HD + slice * HD + opaque_lane() * 4;
        UNROLL for (int i = 0; i < HD / 4; i++) store(to + i * DQ_BLOCK, sums[i / (HD / 8)][i % (HD / 8)]);
        return;
    }
    uint32_t packed[2][HD / 16][4];
    mma_pack(packed, sums, OWNS_DK ? a.scale : 1);
    mma_store<HD>(tiles + (OWNS_DK ? Z::K : Z::V) + slice * HD, packed); // nobody reads K and V any more
}

template <int HD, int KEYS, int WITH_DQ>
static __global__ void __launch_bounds__(2 * KEYS, 1) attention_backward_mma(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    DYN_SHARED(bf16, tiles);
    SHARED(BackwardPlace, p, 1);
    const AttentionShape &s = a.s;
    const int warp = warp_of_block();
    {
        const int tiles_of_head = (s.Tk + KEYS - 1) / KEYS, G = s.NH / s.NKV, heads = G / a.parts;
        const AttentionPlace place = attention_place(a, (int)blockIdx.x, tiles_of_head, a.parts);
        const AttentionShape x = sequence_of(s, place.b);
        const int key = place.order * KEYS, first = first_query(&s, key) / Z::QUERIES * Z::QUERIES;
        const int part = place.h - place.kv * G;
        const int end =
            documents_meet(x.k_doc, key, min(key + KEYS, s.Tk), x.q_doc, s.Tq - 1, min(first, s.Tq) - 1) + 1;
        if (threadIdx.x == 0) {
            p->b = place.b;
            p->kv = place.kv;
            p->key = key;
            p->first = first;
            p->end = end;
            p->first_head = place.kv * G + part * heads;
            p->last_head = p->first_head + heads - 1;
            p->part_tile = (((int64_t)part * s.B + place.b) * s.NKV + place.kv) * tiles_of_head + place.order;
        }
    }
    __syncthreads();
    const int64_t token = (int64_t)p->b * s.Tk + p->key;
    tile_load<HD>(tiles + Z::K, a.k + token * s.k_stride + p->kv * HD, s.k_stride, KEYS, s.Tk - p->key, Z::THREADS);
    tile_load<HD>(tiles + Z::V, a.v + token * s.v_stride + p->kv * HD, s.v_stride, KEYS, s.Tk - p->key, Z::THREADS);
    if (p->first < p->end) backward_load<HD, KEYS>(a, tiles, p, p->first_head, p->first, 0);
    ptx_cp_async_commit();
    if (warp < KEYS / 32) backward_half<HD, KEYS, WITH_DQ, 0>(a, tiles, p, warp);
    else backward_half<HD, KEYS, WITH_DQ, 1>(a, tiles, p, warp);
    if (a.part_sums) return; // attention_backward_join writes dk and dv
    __syncthreads();
    const int64_t to = (int64_t)p->b * s.Tk + p->key;
    tile_store<HD>(a.dk + to * s.k_stride + p->kv * HD, s.k_stride, tiles + Z::K, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
    tile_store<HD>(a.dv + to * s.v_stride + p->kv * HD, s.v_stride, tiles + Z::V, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
}

/* dq = dq_sums / sqrt(HD), rounded. A block has a tile, with as many warps as computed it. */
template <int HD, int KEYS>
static __global__ void __launch_bounds__(2 * KEYS, 512 / KEYS) attention_backward_round_dq(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    SHARED(bf16, tile, Z::TILE);
    const AttentionShape &s = a.s;
    const int warp = (int)threadIdx.x / 32, tiles = (s.Tq + Z::QUERIES - 1) / Z::QUERIES;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * Z::QUERIES;
    const int b = (int)blockIdx.x / s.NH / tiles;
    const float *sums = a.dq_sums + (((int64_t)b * s.NH + h) * a.padded + t0) * HD + warp * DQ_WARP;
    float d[2][4][4];
    uint32_t w[2][2][4];
    UNROLL for (int i = 0; i < 8; i++) dq_get(sums + i * DQ_BLOCK, d[i / 4][i % 4]);
    mma_pack(w, d, a.scale);
    mma_store<HD>(tile + warp % Z::QUERY_WARPS * 32 * HD, w, warp / Z::QUERY_WARPS * 4);
    __syncthreads();
    tile_store<HD>(a.dq + ((int64_t)b * s.Tq + t0) * s.q_stride + h * HD, s.q_stride, tile, Z::QUERIES, s.Tq - t0,
                   (int)threadIdx.x, Z::THREADS);
}

/* dq in a fixed order of additions: a block has a tile of queries and goes over the keys, as in forward. It computes S
 * and dP a second time. */
template <int HD>
static __global__ void __launch_bounds__(128, 2) attention_backward_queries_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 4096 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                                                          // (QUERIES, HD)
    bf16 *dos = qs + QUERIES * HD, *ks = dos + QUERIES * HD, *vs = ks + KEYS * HD; // (QUERIES, HD); (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, (int)blockIdx.x, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.order) * QUERIES, tw = t0 + warp * 32, end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    tile_load<HD>(qs, a.q + token * s.q_stride + p.h * HD, s.q_stride, QUERIES, s.Tq - t0, THREADS);
    tile_load<HD>(dos, a.dout + token * s.o_stride + p.h * HD, s.o_stride, QUERIES, s.Tq - t0, THREADS);
    ptx_cp_async_commit(); // before the loop, which may have no steps: a wait covers committed groups only
    float sums[2][HD / 8][4];
    fill(sums, 0);
    int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS;
    for (; j < end; j += KEYS) {
        float c[2][N][4], dp[2][N][4];
        uint32_t w[2][N / 2][4];
        __syncthreads(); // nobody reads the previous K and V any more
        tile_load<HD>(ks, a.k + ((int64_t)p.b * s.Tk + j) * s.k_stride + p.kv * HD, s.k_stride, KEYS, s.Tk - j,
                      THREADS);
        tile_load<HD>(vs, a.v + ((int64_t)p.b * s.Tk + j) * s.v_stride + p.kv * HD, s.v_stride, KEYS, s.Tk - j,
                      THREADS);
        ptx_cp_async_commit();
        ptx_cp_async_wait<0>();
        __syncthreads();
        mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        mma_scores<HD>(dp, dos + warp * 32 * HD, vs);
        if (s.q_doc || j + KEYS > seen_by(x, tw)) mma_mask<0>(c, x, tw, j);
        const int row = (opaque(p.b) * s.NH + p.h) * a.padded + tw + opaque_lane() / 4;
        UNROLL for (int i = 0; i < 4; i++) {
            float lse = a.lse2[row + i * 8], D = a.D[row + i * 8];
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++)
                    c[i / 2][n][e] = ptx_exp2(fmaf(c[i / 2][n][e], a.scale2, -lse)) * (dp[i / 2][n][e] - D);
        }
        mma_pack(w, c, 1);
        mma_weighted<HD>(sums, w, ks);
    }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows: they can hold its output
    mma_pack(w, sums, a.scale);
    ptx_cp_async_wait<0>();
    __syncthreads();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.dq + ((int64_t)opaque(p.b) * s.Tq + tw) * s.q_stride + opaque(p.h) * HD, s.q_stride, mine, 32,
                   s.Tq - tw, lane, 32);
}
// ---------------------------------------------------------------------------
// launches

template <int HD> static void attention_forward_mma_launch(OpStream *on, const AttentionCall *a) {
    ATTENTION_KERNEL(attention_forward_mma<HD>, attention_blocks(&a->s, a->s.NH, a->s.Tq, 128), 128,
                     (128 * HD + 2 * 8192) * sizeof(bf16), *a);
}
template <int HD, int KEYS> static void attention_backward_mma_by_tiles(OpStream *on, const AttentionCall *a) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape *s = &a->s;
    int64_t tiles = attention_blocks(s, s->NKV, s->Tk, KEYS), blocks = tiles * a->parts;
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 1>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL((attention_backward_round_dq<HD, KEYS>), attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                         Z::THREADS, 0, *a);
    } else {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 0>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL(attention_backward_queries_mma<HD>, attention_blocks(s, s->NH, s->Tq, 128), 128,
                         (2 * 128 * HD + 2 * 4096) * sizeof(bf16), *a);
    }
    if (a->part_sums) ATTENTION_KERNEL((attention_backward_join<HD, KEYS>), 2 * tiles, KEYS, 0, *a);
}
/* GPUs whose blocks can have only 99 KB of shared memory get smaller tiles. */
template <int HD> static void attention_backward_mma_launch(OpStream *on, const AttentionCall *a) {
    ATTENTION_KERNEL(attention_backward_prepare<HD / 8>, attention_rows(&a->s) / ATTENTION_PAD, 256, 0, *a);
    if (on->shared_limit >= Backward<HD, 128>::BYTES) attention_backward_mma_by_tiles<HD, 128>(on, a);
    else attention_backward_mma_by_tiles<HD, 64>(on, a);
}
#endif

#endif
