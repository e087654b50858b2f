/* kernels_attention.cuh: attention on an NVIDIA GPU, forward and backward, after FlashAttention-2 (Dao 2023).
 *
 * Owns: the PTX that tensor cores need, two kinds of kernels, and the choice between them. In bf16, heads of 64 or 128
 * elements whose rows lie at multiples of 16 bytes go to tensor cores (*_mma); all else, and fp32, to *_plain: fp32
 * arithmetic, heads of up to 256 elements; correct, and for bf16 slow. cuda_attention_has tells which.
 * A caller may rely on: no (T, T) tensor; K and V are read once for the query heads that share them, where caches allow;
 * the same bits on each run, but for dq of tensor cores, whose order of additions is open unless dev->deterministic.
 */
#ifndef KERNELS_ATTENTION_CUH
#define KERNELS_ATTENTION_CUH

#define UNROLL _Pragma("unroll") // arrays stand in registers only if each index is known
#define ROLLED _Pragma("unroll 1")
#define DEVICE static __device__ __forceinline__

// ---------------------------------------------------------------------------
// PTX: what C++ has no words for

#ifndef CUDA_ON_CPU // which has these as functions of its own
DEVICE uint32_t ptx_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Blocks of 8 x 8 bf16 from shared memory into the registers of a warp, as mma wants them. Lanes 8 i ... 8 i + 7 give the
 * rows of block i, 16 bytes each; lane l gets elements 2 (l % 4) and the next of row l / 4 of each block, _trans: of the
 * transposed block. */
DEVICE void ptx_ldmatrix_x4(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(ptx_shared(shared_row)) : "memory");
}
DEVICE void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(ptx_shared(shared_row)) : "memory");
}
/* d(16,8) += a(16,16) b(16,8). Lane l has d at rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. */
DEVICE void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* 16 bytes, on their way until ptx_cp_async_wait; zeros where they are not valid, and then global is not read. */
DEVICE void ptx_cp_async(void *shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void ptx_cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); } // until at most N groups are on their way
DEVICE float ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

DEVICE uint32_t pack_bf16(float low, float high) { // two in a register, round to nearest even
#ifdef __CUDA_ARCH__
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return (uint32_t)float_to_bf16(low).bits | (uint32_t)float_to_bf16(high).bits << 16;
#endif
}

// ---------------------------------------------------------------------------
// what all attention kernels share

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f; // exp(x) = exp2(x LOG2_E): the GPU has exp2
enum {
    ATTENTION_PAD = 128,       // queries: rows of the scratch's tensors are multiples of it
    ATTENTION_L2 = 16 << 20    // bytes of K and V that are worked on at a time: they should stay in the L2 cache
};

/* This thread's warp. The compiler should know that all its lanes have the same: what follows from it needs no register a lane. */
DEVICE int warp_of_block() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

typedef struct { // a call, as its kernels get it
    AttentionShape s;
    const floatX *q, *k, *v, *dout, *out_read;
    const float *lse_read;
    floatX *out, *dq, *dk, *dv;
    float *lse;
    float *D, *lse2; // (B,NH,padded): rowsum(dout * out); lse LOG2_E, infinity where a row sees nothing or does not exist
    float *dq_sums;  // (B,NH,padded,HD), each tile of queries as the warps hold it (dq_add)
    int padded;      // Tq, up to ATTENTION_PAD
    int section;     // (sequence, kv head) pairs worked on at a time
    float scale, scale2; // 1 / sqrt(HD); the same LOG2_E
} AttentionCall;

/* Blocks start in this order: `section` pairs after each other; within them the tiles with most work first, so that none
 * of these begins last; of one tile all `heads` heads, which share K and V. */
typedef struct { int b, kv, h, rank; } AttentionPlace; // rank: of the tile, 0 has most work
DEVICE AttentionPlace attention_place(const AttentionCall &a, int tiles, int heads) {
    int held = a.section * tiles * heads, i = (int)blockIdx.x % held, first = (int)blockIdx.x / held * a.section;
    int n = min(a.section, a.s.B * a.s.NKV - first), pair = first + i / heads % n;
    AttentionPlace p;
    p.b = pair / a.s.NKV, p.kv = pair % a.s.NKV, p.h = p.kv * (a.s.NH / a.s.NKV) + i % heads, p.rank = i / heads / n;
    return p;
}

typedef struct { int Tq, Tk, offset; const int32_t *q_doc, *k_doc; } Sight; // of one sequence; q_doc NULL: no documents
DEVICE Sight sight_of(const AttentionShape &s, int b) {
    Sight x;
    x.Tq = s.Tq, x.Tk = s.Tk, x.offset = s.q_offset;
    x.q_doc = s.q_doc ? s.q_doc + (int64_t)b * s.Tq : NULL, x.k_doc = s.q_doc ? s.k_doc + (int64_t)b * s.Tk : NULL;
    return x;
}
DEVICE int seen_by(const Sight &x, int t) { return t < x.Tq ? max(0, min(x.Tk, x.offset + t + 1)) : 0; } // keys, by position
DEVICE bool sees(const Sight &x, int t, int key) { return key < seen_by(x, t) && (!x.q_doc || x.q_doc[t] == x.k_doc[key]); }

/* Queries or keys `mine` ... mine_end - 1 have some documents. Going through the others' documents from `from` towards `to`
 * (which is not among them), up or down: where may one of these be met first? To within 32; `to`: nowhere. By all lanes of
 * a warp. What is skipped so would all be masked. */
DEVICE int documents_meet(const int32_t *mine_doc, int mine, int mine_end, const int32_t *doc, int from, int to) {
    int lane = (int)(threadIdx.x % 32), low = INT32_MAX, high = INT32_MIN, step = from < to ? 1 : -1;
    if (!mine_doc) return from;
    ROLLED for (int i = mine + lane; i < mine_end; i += 32) low = min(low, mine_doc[i]), high = max(high, mine_doc[i]);
    ROLLED for (int d = 16; d; d /= 2) low = min(low, __shfl_xor_sync(~0u, low, d)), high = max(high, __shfl_xor_sync(~0u, high, d));
    ROLLED for (int left = (to - from) * step; left > 0; left -= 32, from += 32 * step)
        if (__any_sync(~0u, lane < left && low <= doc[from + lane * step] && doc[from + lane * step] <= high)) return from;
    return to;
}

#ifdef PRECISION_BF16
// ---------------------------------------------------------------------------
// tiles for tensor cores
//
// A tile is rows of W bf16 in shared memory. Pieces of 16 bytes change places within their row, so that eight rows' pieces
// at one column lie in different banks: no conflicts for ldmatrix, nor for the words that lanes write.
//
// Accumulators c[m][n] are 16 x 8 blocks of a matrix, see ptx_mma_bf16; packed to bf16 they are w[m][n / 2], 16 x 16 blocks
// as mma takes its left operand: so what one product gives can enter the next without leaving the registers.

/* The compiler would compute addresses of a loop ahead of it, and keep addresses from before a loop for after it: too many
 * registers. So these give what they say in a way that it cannot see through, and what depends on them is computed anew. */
DEVICE unsigned thread_anew() {
    unsigned x = threadIdx.x;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}
DEVICE int lane_anew() { return (int)(thread_anew() % 32); }
DEVICE int anew(int x) { return __shfl_sync(~0u, x, 0); } // x, which all lanes have
template <int W> DEVICE int swizzled(int row, int piece) { return row * W + (piece ^ (W == 32 ? row / 2 % 4 : row % 8)) * 8; }
DEVICE const uint32_t (&half_of(const uint32_t (&r)[4], int i))[2] { return *(const uint32_t (*)[2])(r + 2 * i); }

/* `rows` rows of HD from global memory, `stride` apart, on their way into a tile; zeros beyond `count` rows. */
template <int HD> DEVICE void tile_load(bf16 *tile, const bf16 *from, int64_t stride, int rows, int count, int threads) {
    enum { PIECES = HD / 8 };
    unsigned thread = thread_anew();
    int row = (int)(thread / PIECES), piece = (int)(thread % PIECES);
    const bf16 *at = from + row * stride + piece * 8;
    bf16 *to = tile + swizzled<HD>(row, piece); // the swizzle is the same every eighth row
    UNROLL for (int i = 0; i < rows; i += threads / PIECES) ptx_cp_async(to + i * HD, at + i * stride, row + i < count);
}
/* And back: `rows` rows, of which `count` exist, by `threads` threads. */
template <int HD> DEVICE void tile_store(bf16 *to, int64_t stride, const bf16 *tile, int rows, int count, int thread, int threads) {
    enum { PIECES = HD / 8 };
    int piece = thread % PIECES;
    UNROLL for (int row = thread / PIECES; row < rows; row += threads / PIECES)
        if (row < count) *(uint4 *)(void *)(to + row * stride + piece * 8) = *(const uint4 *)(const void *)(tile + swizzled<HD>(row, piece));
}

template <int M, int N> DEVICE void fill(float (&c)[M][N][4], float x) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 4; e++) c[m][n][e] = x;
}
/* c(16 M, 8 N) = a(16 M, HD) b(8 N, HD)^T, rows of two tiles */
template <int HD, int M, int N> DEVICE void mma_scores(float (&c)[M][N][4], const bf16 *a, const bf16 *b) {
    int lane = lane_anew(), a_at = swizzled<HD>(lane % 16, lane / 16), b_at = swizzled<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    fill(c, 0);
    UNROLL for (int k = 0; k < HD; k += 16) {
        uint32_t x[M][4], y[4];
        UNROLL for (int m = 0; m < M; m++) ptx_ldmatrix_x4(x[m], a + m * 16 * HD + (a_at ^ k));
        UNROLL for (int n = 0; n < N; n += 2) {
            ptx_ldmatrix_x4(y, b + n * 8 * HD + (b_at ^ k));
            UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], x[m], half_of(y, 0)), ptx_mma_bf16(c[m][n + 1], x[m], half_of(y, 1));
        }
    }
}
/* c(16 M, HD) += w(16 M, 16 K) b(16 K, HD): rows of a tile, weighted */
template <int HD, int M, int K> DEVICE void mma_weighted(float (&c)[M][HD / 8][4], const uint32_t (&w)[M][K][4], const bf16 *b) {
    int lane = lane_anew(), at = swizzled<HD>(lane % 16, lane / 16);
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int n = 0; n < HD / 8; n += 2) {
            uint32_t y[4];
            ptx_ldmatrix_x4_trans(y, b + k * 16 * HD + (at ^ n * 8));
            UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], w[m][k], half_of(y, 0)), ptx_mma_bf16(c[m][n + 1], w[m][k], half_of(y, 1));
        }
}
template <int M, int N> DEVICE void mma_pack(uint32_t (&w)[M][N / 2][4], const float (&c)[M][N][4], float scale) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int half = 0; half < 2; half++)
                w[m][n / 2][n % 2 * 2 + half] = pack_bf16(c[m][n][2 * half] * scale, c[m][n][2 * half + 1] * scale);
}
/* Where this lane's word w[m][n / 2][n % 2 * 2 + half] is in a tile's rows from 0 on; at = mma_lane<W>(). */
template <int W> DEVICE int mma_lane() {
    int lane = lane_anew();
    return swizzled<W>(lane / 4, 0) + lane % 4 * 2;
}
template <int W> DEVICE uint32_t *mma_word(bf16 *tile, int at, int m, int n, int half) { return (uint32_t *)(void *)(tile + (m * 16 + half * 8) * W + (at ^ n * 8)); }
template <int W, int M, int K> DEVICE void mma_store(bf16 *tile, const uint32_t (&w)[M][K][4], int column = 0 /* blocks of 8 */) {
    int at = mma_lane<W>() ^ column * 8;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int i = 0; i < K * 4; i++) *mma_word<W>(tile, at, m, i / 2, i % 2) = w[m][i / 4][i % 4];
}
/* Scores of queries from t on (the rows, or the columns) and keys from j on that are not to be seen become -infinity. */
template <int KEYS_ARE_ROWS, int M, int N> DEVICE void mma_mask(float (&c)[M][N][4], const Sight &x, int t, int j) {
    int lane = lane_anew(), left = lane % 4 * 2; // this lane's first column
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            int row = m * 16 + half * 8 + lane / 4;
            int bound = KEYS_ARE_ROWS ? (j + row < x.Tk ? j + row - x.offset - t : INT32_MAX) - left : min(x.Tk, x.offset + t + row + 1) - j - left;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 0; e < 2; e++)
                    if (KEYS_ARE_ROWS ? n * 8 + e < bound : n * 8 + e >= bound) c[m][n][2 * half + e] = -INFINITY;
            if (!x.q_doc) continue;
            const int32_t *columns = (KEYS_ARE_ROWS ? x.q_doc + t : x.k_doc + j) + left;
            int count = (KEYS_ARE_ROWS ? x.Tq - t : x.Tk - j) - left, doc = KEYS_ARE_ROWS ? x.k_doc[min(j + row, x.Tk - 1)] : x.q_doc[min(t + row, x.Tq - 1)];
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 0; e < 2; e++)
                    if (n * 8 + e < count && columns[n * 8 + e] != doc) c[m][n][2 * half + e] = -INFINITY;
        }
}

// ---------------------------------------------------------------------------
// forward by tensor cores
//
// A block has 128 queries of one head, each of its four warps 32 of them: Q in shared memory, O in registers. It goes over
// the keys, K and V through one tile each: V comes while Q K^T is computed, the next K during the softmax and P V.
// Each tile of keys is read by all warps: 8 HD FLOPs for each byte that a warp reads of them.

/* A step of the online softmax of 32 rows, in powers of two: c becomes exp2(c scale - base), o and sum follow base. base is
 * a row's largest score when it last moved, which it does only when one is 8 above it: P up to 256 is as exact, and o is
 * rarely multiplied. Sums are of this lane's columns. */
template <int N, int D> DEVICE void softmax_step(float (&c)[2][N][4], float (&o)[2][D][4], float (&base)[2][2], float (&sum)[2][2], float scale) {
    float rescale[2][2];
    bool any = false;
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            float top = -INFINITY;
            UNROLL for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(c[m][n][2 * half], c[m][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)); // the four lanes of a row
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
            bool moves = top > base[m][half] + 8;
            rescale[m][half] = moves ? ptx_exp2(base[m][half] - top) : 1.0f; // 0 for the first
            if (moves) base[m][half] = top;
            any |= moves;
            float from = base[m][half] == -INFINITY ? 0.0f : base[m][half]; // nothing seen yet: exp2(-inf - 0) = 0
            float total = 0;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) c[m][n][e] = ptx_exp2(fmaf(c[m][n][e], scale, -from)), total += c[m][n][e];
            sum[m][half] = fmaf(sum[m][half], rescale[m][half], total);
        }
    if (!__any_sync(~0u, any)) return;
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int n = 0; n < D; n++)
            UNROLL for (int e = 0; e < 4; e++) o[m][n][e] *= rescale[m][e / 2];
}

template <int HD> static __global__ void __launch_bounds__(128, 2) attention_forward_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 8192 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs); // (QUERIES, HD)
    bf16 *ks = qs + QUERIES * HD, *vs = ks + KEYS * HD; // (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const Sight x = sight_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32; // the first query of this block, of this warp
    const int end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1), warp_end = tw < s.Tq ? seen_by(x, min(tw + 32, s.Tq) - 1) : 0;
    const bf16 *q = a.q + ((int64_t)p.b * s.Tq + t0) * s.q_stride + p.h * HD;
    const bf16 *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * HD, *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * HD;
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
        __syncthreads(); // K is there, and V no longer read
        tile_load<HD>(vs, v + j * s.v_stride, s.v_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
        if (works) mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        ptx_cp_async_wait<0>();
        __syncthreads(); // V is there, and K no longer read
        if (j + KEYS < end) {
            tile_load<HD>(ks, k + (j + KEYS) * s.k_stride, s.k_stride, KEYS, s.Tk - j - KEYS, THREADS);
            ptx_cp_async_commit();
        }
        if (works) {
            uint32_t w[2][N / 2][4];
            if (masked) mma_mask<0>(c, x, tw, j);
            softmax_step(c, o, base, sum, a.scale2);
            mma_pack(w, c, 1);
            mma_weighted<HD>(o, w, vs);
        }
    }
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float inverse = total > 0 ? __fdividef(1.0f, total) : total; // nothing seen: 0; NaN stays NaN
            UNROLL for (int n = 0; n < HD / 8; n++) o[m][n][2 * half] *= inverse, o[m][n][2 * half + 1] *= inverse;
            int t = tw + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && t < s.Tq) a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] = total == 0 ? -INFINITY : (base[m][half] + __log2f(total)) * LN_2;
        }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows
    mma_pack(w, o, 1);
    __syncwarp();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.out + ((int64_t)anew(p.b) * s.Tq + tw) * s.o_stride + p.h * HD, s.o_stride, mine, 32, s.Tq - tw, lane, 32);
}

// ---------------------------------------------------------------------------
// backward by tensor cores: with P = exp(S - lse) and D = rowsum(dout * out),
//   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD)
//
// A block has KEYS keys of one head and goes over all queries that see them, of all query heads that share them, QUERIES at
// a time. Half of its warps own dV, the other half dK, each 32 keys' rows of it, in registers. The former compute
// S^T = K Q^T and from it P^T, the latter dP^T = V dO^T and dS^T: both have just what enters the product for their own sums
// as its left operand. P passes from the former to the latter in shared memory, where dS takes its place for dQ, which all
// compute, 32 x 32 elements each. Nobody waits for arithmetic alone: the dK of a step is computed at the start of the next,
// while others take exponentials, and dV while they form dS.

/* dQ is summed over blocks in fp32 by atomic additions, for which a tile lies as its warps hold it: x[4] of lane after lane. */
DEVICE void dq_add(float *to /* of this warp's block of 16 x 8 */, const float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
    UNROLL for (int e = 0; e < 4; e++) atomicAdd(to + 32 * e + lane, x[e]); // lanes side by side
#endif
}
DEVICE void dq_get(const float *from, float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    float4 y = *(const float4 *)(const void *)(from + 4 * lane);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
#else
    UNROLL for (int e = 0; e < 4; e++) x[e] = from[32 * e + lane];
#endif
}
enum { DQ_WARP = 32 * 32, DQ_BLOCK = 16 * 8 }; // elements of dQ that a warp has of a tile, as [2][4] blocks

template <int HD, int KEYS> struct Backward { // sizes, and where tiles are in a block's shared memory: elements of bf16
    static constexpr int THREADS = 2 * KEYS, QUERIES = 64 * KEYS / HD, TILE = QUERIES * HD, QUERY_WARPS = QUERIES / 32;
    static constexpr int K = 0, V = KEYS * HD;            // (KEYS, HD)
    static constexpr int Q = 2 * V, DO = Q + 2 * TILE;    // (2, QUERIES, HD): of a step, and of the one before or after it
    static constexpr int P = DO + 2 * TILE;               // (KEYS, QUERIES): P^T, then dS^T
    static constexpr int LSE = P + KEYS * QUERIES;        // (2, QUERIES) floats, and as many for D
    static constexpr int BYTES = LSE * (int)sizeof(bf16) + 4 * QUERIES * (int)sizeof(float);
};
/* What a block works on. It lies in shared memory: what is needed once a step should not take registers. */
typedef struct { int b, kv, key, first, end, last_head; } BackwardPlace; // first key; queries that may see it; the last query head of kv

/* Of the queries from t on of head h: Q, dO, lse2 and D. */
template <int HD, int KEYS> DEVICE void backward_load(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int h, int t, int slot) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape &s = a.s;
    const int64_t token = (int64_t)p->b * s.Tq + t, row = ((int64_t)p->b * s.NH + h) * a.padded + t;
    tile_load<HD>(tiles + Z::Q + slot * Z::TILE, a.q + token * s.q_stride + h * HD, s.q_stride, Z::QUERIES, s.Tq - t, Z::THREADS);
    tile_load<HD>(tiles + Z::DO + slot * Z::TILE, a.dout + token * s.o_stride + h * HD, s.o_stride, Z::QUERIES, s.Tq - t, Z::THREADS);
    float *rows = (float *)(void *)(tiles + Z::LSE) + slot * Z::QUERIES;
    int i = (int)thread_anew() * 4;
    if (i < Z::QUERIES) ptx_cp_async(rows + i, a.lse2 + row + i, true);
    else if (i < 2 * Z::QUERIES) ptx_cp_async(rows + Z::QUERIES + i, a.D + row + i - Z::QUERIES, true);
}

/* What the warps of one half do; each half has its own function, so that what the other one keeps takes no registers here. */
template <int HD, int KEYS, int WITH_DQ, int OWNS_DK> DEVICE void backward_half(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int warp) {
    typedef Backward<HD, KEYS> Z;
    enum { QUERIES = Z::QUERIES, N = QUERIES / 8 };
    const AttentionShape &s = a.s;
    const int slice = warp % (KEYS / 32) * 32; // the first of this warp's keys
    bf16 *mine = tiles + (OWNS_DK ? Z::V : Z::K) + slice * HD, *ps = tiles + Z::P, *my_ps = ps + slice * QUERIES;
    int h = p->first < p->end ? p->last_head - s.NH / s.NKV + 1 : p->last_head + 1, t = p->first; // a step: query head, first query
    float sums[2][HD / 8][4]; // dV or dK of 32 keys
    uint32_t w[2][N / 2][4];  // P^T or dS^T of 32 keys
    fill(sums, 0);
    for (int step = 0;; step++) {
        const int slot = step % 2, row = (p->b * s.NH + h) * a.padded + t;
        const float *rows = (const float *)(const void *)(tiles + Z::LSE) + (OWNS_DK * 2 + slot) * QUERIES; // lse2 or D
        float c[2][N][4];
        ptx_cp_async_wait<0>();
        __syncthreads(); // this step's rows are there, dS of the last is no longer read
        if (OWNS_DK && step) mma_weighted<HD>(sums, w, tiles + Z::Q + (slot ^ 1) * Z::TILE);
        if (h > p->last_head) break;
        mma_scores<HD>(c, mine, tiles + (OWNS_DK ? Z::DO : Z::Q) + slot * Z::TILE);
        if (!OWNS_DK) {
            if (s.q_doc || p->key + slice + 32 > s.q_offset + t + 1 || p->key + KEYS > s.Tk) mma_mask<1>(c, sight_of(s, p->b), t, p->key + slice);
            const int at = mma_lane<QUERIES>(), left = lane_anew() % 4 * 2;
            UNROLL for (int n = 0; n < N; n++) {
                float2 lse = *(const float2 *)(const void *)(rows + n * 8 + left);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float *score = &c[i / 2][n][i % 2 * 2];
                    uint32_t two = pack_bf16(ptx_exp2(fmaf(score[0], a.scale2, -lse.x)), ptx_exp2(fmaf(score[1], a.scale2, -lse.y)));
                    *mma_word<QUERIES>(my_ps, at, i / 2, n, i % 2) = w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
                }
            }
        }
        __syncthreads(); // P is there, rows of the last step are no longer read
        t += QUERIES;
        if (t >= p->end) h++, t = p->first;
        if (h <= p->last_head) backward_load<HD, KEYS>(a, tiles, p, h, t, slot ^ 1);
        ptx_cp_async_commit();
        if (!OWNS_DK) mma_weighted<HD>(sums, w, tiles + Z::DO + slot * Z::TILE);
        else {
            const int at = mma_lane<QUERIES>(), left = lane_anew() % 4 * 2;
            UNROLL for (int n = 0; n < N; n++) {
                float2 D = *(const float2 *)(const void *)(rows + n * 8 + left);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float *dp = &c[i / 2][n][i % 2 * 2];
                    uint32_t *word = mma_word<QUERIES>(my_ps, at, i / 2, n, i % 2), two = *word;
                    two = pack_bf16(__uint_as_float(two << 16) * (dp[0] - D.x), __uint_as_float(two & 0xFFFF0000u) * (dp[1] - D.y));
                    w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
                    if (WITH_DQ) *word = two; // dS where this lane has read P
                }
            }
        }
        if (!WITH_DQ) continue;
        __syncthreads(); // dS is there
        float d[2][4][4]; // 32 queries, 32 elements of the head
        const int lane = lane_anew();
        const int p_at = swizzled<QUERIES>(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ warp % Z::QUERY_WARPS * 32;
        const int k_at = swizzled<HD>(lane % 16, lane / 16) ^ warp / Z::QUERY_WARPS * 32;
        fill(d, 0);
        UNROLL for (int k = 0; k < KEYS; k += 16) {
            uint32_t y[2][4], z[4];
            UNROLL for (int m = 0; m < 2; m++) ptx_ldmatrix_x4_trans(y[m], ps + k * QUERIES + (p_at ^ m * 16));
            UNROLL for (int n = 0; n < 4; n += 2) {
                ptx_ldmatrix_x4_trans(z, tiles + Z::K + k * HD + (k_at ^ n * 8));
                UNROLL for (int m = 0; m < 2; m++) ptx_mma_bf16(d[m][n], y[m], half_of(z, 0)), ptx_mma_bf16(d[m][n + 1], y[m], half_of(z, 1));
            }
        }
        float *dq = a.dq_sums + (int64_t)row * HD + warp * DQ_WARP;
        UNROLL for (int i = 0; i < 8; i++) dq_add(dq + i * DQ_BLOCK, d[i / 4][i % 4]);
    }
    uint32_t packed[2][HD / 16][4];
    mma_pack(packed, sums, OWNS_DK ? a.scale : 1);
    mma_store<HD>(tiles + (OWNS_DK ? Z::K : Z::V) + slice * HD, packed); // which are no longer read
}

template <int HD, int KEYS, int WITH_DQ> static __global__ void __launch_bounds__(2 * KEYS, 1) attention_backward_mma(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    DYN_SHARED(bf16, tiles);
    SHARED(BackwardPlace, p, 1);
    const AttentionShape &s = a.s;
    const int warp = warp_of_block();
    {
        const AttentionPlace place = attention_place(a, (s.Tk + KEYS - 1) / KEYS, 1);
        const Sight x = sight_of(s, place.b);
        const int key = place.rank * KEYS, first = max(0, key - s.q_offset) / Z::QUERIES * Z::QUERIES, G = s.NH / s.NKV;
        const int end = documents_meet(x.k_doc, key, min(key + KEYS, s.Tk), x.q_doc, s.Tq - 1, first - 1) + 1;
        if (threadIdx.x == 0) p->b = place.b, p->kv = place.kv, p->key = key, p->first = first, p->end = end, p->last_head = place.kv * G + G - 1;
    }
    __syncthreads();
    const int64_t token = (int64_t)p->b * s.Tk + p->key;
    tile_load<HD>(tiles + Z::K, a.k + token * s.k_stride + p->kv * HD, s.k_stride, KEYS, s.Tk - p->key, Z::THREADS);
    tile_load<HD>(tiles + Z::V, a.v + token * s.v_stride + p->kv * HD, s.v_stride, KEYS, s.Tk - p->key, Z::THREADS);
    if (p->first < p->end) backward_load<HD, KEYS>(a, tiles, p, p->last_head - s.NH / s.NKV + 1, p->first, 0);
    ptx_cp_async_commit();
    if (warp < KEYS / 32) backward_half<HD, KEYS, WITH_DQ, 0>(a, tiles, p, warp);
    else backward_half<HD, KEYS, WITH_DQ, 1>(a, tiles, p, warp);
    __syncthreads();
    const int64_t to = (int64_t)p->b * s.Tk + p->key;
    tile_store<HD>(a.dk + to * s.k_stride + p->kv * HD, s.k_stride, tiles + Z::K, KEYS, s.Tk - p->key, (int)threadIdx.x, Z::THREADS);
    tile_store<HD>(a.dv + to * s.v_stride + p->kv * HD, s.v_stride, tiles + Z::V, KEYS, s.Tk - p->key, (int)threadIdx.x, Z::THREADS);
}

/* dq = its sums, scaled and rounded: a tile a block, by as many warps as made it. */
template <int HD, int KEYS> static __global__ void __launch_bounds__(2 * KEYS) attention_backward_round_dq(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    SHARED(bf16, tile, Z::TILE);
    const AttentionShape &s = a.s;
    const int warp = (int)threadIdx.x / 32, tiles = (s.Tq + Z::QUERIES - 1) / Z::QUERIES;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * Z::QUERIES, b = (int)blockIdx.x / s.NH / tiles;
    const float *sums = a.dq_sums + (((int64_t)b * s.NH + h) * a.padded + t0) * HD + warp * DQ_WARP;
    float d[2][4][4];
    uint32_t w[2][2][4];
    UNROLL for (int i = 0; i < 8; i++) dq_get(sums + i * DQ_BLOCK, d[i / 4][i % 4]);
    mma_pack(w, d, a.scale);
    mma_store<HD>(tile + warp % Z::QUERY_WARPS * 32 * HD, w, warp / Z::QUERY_WARPS * 4);
    __syncthreads();
    tile_store<HD>(a.dq + ((int64_t)b * s.Tq + t0) * s.q_stride + h * HD, s.q_stride, tile, Z::QUERIES, s.Tq - t0, (int)threadIdx.x, Z::THREADS);
}

/* dq in a fixed order: as the forward goes over the keys, with S and dP computed once more. */
template <int HD> static __global__ void __launch_bounds__(128, 2) attention_backward_queries_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 4096 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs); // (QUERIES, HD)
    bf16 *dos = qs + QUERIES * HD, *ks = dos + QUERIES * HD, *vs = ks + KEYS * HD; // (QUERIES, HD); (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const Sight x = sight_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32, end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + p.h) * a.padded + tw + lane / 4;
    tile_load<HD>(qs, a.q + token * s.q_stride + p.h * HD, s.q_stride, QUERIES, s.Tq - t0, THREADS);
    tile_load<HD>(dos, a.dout + token * s.o_stride + p.h * HD, s.o_stride, QUERIES, s.Tq - t0, THREADS);
    float sums[2][HD / 8][4], lse[2][2], D[2][2];
    UNROLL for (int i = 0; i < 4; i++) lse[i / 2][i % 2] = a.lse2[row + i * 8], D[i / 2][i % 2] = a.D[row + i * 8];
    fill(sums, 0);
    for (int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS; j < end; j += KEYS) {
        float c[2][N][4], dp[2][N][4];
        uint32_t w[2][N / 2][4];
        __syncthreads(); // the last K and V are no longer read
        tile_load<HD>(ks, a.k + ((int64_t)p.b * s.Tk + j) * s.k_stride + p.kv * HD, s.k_stride, KEYS, s.Tk - j, THREADS);
        tile_load<HD>(vs, a.v + ((int64_t)p.b * s.Tk + j) * s.v_stride + p.kv * HD, s.v_stride, KEYS, s.Tk - j, THREADS);
        ptx_cp_async_commit();
        ptx_cp_async_wait<0>();
        __syncthreads();
        mma_scores<HD>(c, qs + warp * 32 * HD, ks);
        mma_scores<HD>(dp, dos + warp * 32 * HD, vs);
        if (s.q_doc || j + KEYS > seen_by(x, tw)) mma_mask<0>(c, x, tw, j);
        UNROLL for (int m = 0; m < 2; m++)
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int e = 0; e < 4; e++) c[m][n][e] = ptx_exp2(fmaf(c[m][n][e], a.scale2, -lse[m][e / 2])) * (dp[m][n][e] - D[m][e / 2]);
        mma_pack(w, c, 1);
        mma_weighted<HD>(sums, w, ks);
    }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows
    mma_pack(w, sums, a.scale);
    ptx_cp_async_wait<0>();
    __syncthreads();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.dq + ((int64_t)anew(p.b) * s.Tq + tw) * s.q_stride + p.h * HD, s.q_stride, mine, 32, s.Tq - tw, lane, 32);
}
#endif

// ---------------------------------------------------------------------------
// any head: fp32 arithmetic, 256 threads
//
// Tiles are TILE rows of DIM floats in shared memory, DIM being HD or the next of 64, 128, 256, zeros between them; four
// floats more a row, so that rows lie in different banks. Thread 16 y + x has rows y + 16 i and columns x + 16 j of a matrix
// of scores, and of a sum of rows the elements 4 x + 64 j and the three behind them.

enum { PLAIN_THREADS = 256 };
template <int DIM> struct PlainSizes { // bytes fit the 99 KB that each GPU has
    static constexpr int LD = DIM + 4, FORWARD = DIM == 256 ? 32 : 64 /* TILE */, BACKWARD = 4096 / DIM;
    static constexpr int FORWARD_BYTES = (2 * FORWARD * LD + FORWARD * (FORWARD + 4)) * 4, BACKWARD_BYTES = (4 * BACKWARD * LD + BACKWARD * (BACKWARD + 4)) * 4;
};

DEVICE float4 plain_get(const floatX *x, int n) { // four elements, of which n are left
    float4 y = {0, 0, 0, 0};
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) return *(const float4 *)(const void *)x;
#endif
    if (n > 0) y.x = to_float(x[0]);
    if (n > 1) y.y = to_float(x[1]);
    if (n > 2) y.z = to_float(x[2]);
    if (n > 3) y.w = to_float(x[3]);
    return y;
}
DEVICE void plain_put(floatX *x, int n, float4 y, float scale) {
    y.x *= scale, y.y *= scale, y.z *= scale, y.w *= scale;
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) { *(float4 *)(void *)x = y; return; }
#endif
    if (n > 0) x[0] = from_float(y.x);
    if (n > 1) x[1] = from_float(y.y);
    if (n > 2) x[2] = from_float(y.z);
    if (n > 3) x[3] = from_float(y.w);
}
template <int DIM, int TILE> DEVICE void plain_load(float *tile, const floatX *from, int64_t stride, int count, int HD) {
    for (int i = (int)threadIdx.x; i < TILE * DIM / 4; i += PLAIN_THREADS) {
        int row = i / (DIM / 4), d = i % (DIM / 4) * 4;
        *(float4 *)(void *)(tile + row * (DIM + 4) + d) = plain_get(from + row * stride + d, row < count ? HD - d : 0);
    }
}
/* Rows y + 16 i of a sum. */
template <int DIM, int R> DEVICE void plain_store(floatX *to, int64_t stride, const float4 (&c)[R][DIM / 64], const float (&scale)[R], int count, int HD) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < DIM / 64; j++)
            if (y + 16 * i < count) plain_put(to + (y + 16 * i) * stride + 4 * x + 64 * j, HD - 4 * x - 64 * j, c[i][j], scale[i]);
}
DEVICE float plain_dot(float4 a, float4 b, float sum) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum)))); }
/* c = a b^T, rows of two tiles */
template <int DIM, int R> DEVICE void plain_scores(float (&c)[R][R], const float *a, const float *b) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < R; j++) c[i][j] = 0;
    for (int d = 0; d < DIM; d += 4) {
        float4 u[R], v[R];
        UNROLL for (int i = 0; i < R; i++) {
            u[i] = *(const float4 *)(const void *)(a + (y + 16 * i) * (DIM + 4) + d);
            v[i] = *(const float4 *)(const void *)(b + (x + 16 * i) * (DIM + 4) + d);
        }
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int j = 0; j < R; j++) c[i][j] = plain_dot(u[i], v[j], c[i][j]);
    }
}
/* c += w b: w is in shared memory, for all threads to read; so c becomes w first. */
template <int DIM, int R> DEVICE void plain_weighted(float4 (&sums)[R][DIM / 64], const float (&c)[R][R], float *w, const float *b) {
    enum { TILE = 16 * R, LD = TILE + 4 };
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < R; j++) w[(y + 16 * i) * LD + x + 16 * j] = c[i][j];
    __syncthreads();
    for (int k = 0; k < TILE; k += 4) {
        float4 u[R];
        UNROLL for (int i = 0; i < R; i++) u[i] = *(const float4 *)(const void *)(w + (y + 16 * i) * LD + k);
        UNROLL for (int e = 0; e < 4; e++)
            UNROLL for (int j = 0; j < DIM / 64; j++) {
                float4 v = *(const float4 *)(const void *)(b + (k + e) * (DIM + 4) + 4 * x + 64 * j);
                UNROLL for (int i = 0; i < R; i++) {
                    float f = e == 0 ? u[i].x : e == 1 ? u[i].y : e == 2 ? u[i].z : u[i].w;
                    sums[i][j].x = fmaf(f, v.x, sums[i][j].x), sums[i][j].y = fmaf(f, v.y, sums[i][j].y);
                    sums[i][j].z = fmaf(f, v.z, sums[i][j].z), sums[i][j].w = fmaf(f, v.w, sums[i][j].w);
                }
            }
    }
    __syncthreads(); // w and b may be written again
}
template <int DIM, int R> DEVICE void plain_zero(float4 (&sums)[R][DIM / 64]) {
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < DIM / 64; j++) sums[i][j].x = sums[i][j].y = sums[i][j].z = sums[i][j].w = 0;
}

template <int DIM> static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_forward_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::FORWARD, R = TILE / 16 };
    DYN_SHARED(float, qs);
    float *kvs = qs + TILE * Z::LD, *ws = kvs + TILE * Z::LD; // K, then V; P
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const Sight sight = sight_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * TILE, end = seen_by(sight, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    const floatX *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * s.HD, *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * s.HD;
    float4 o[R][DIM / 64];
    float base[R], sum[R];
    plain_zero<DIM>(o);
    UNROLL for (int i = 0; i < R; i++) base[i] = -INFINITY, sum[i] = 0;
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        float c[R][R];
        plain_load<DIM, TILE>(kvs, k + j0 * s.k_stride, s.k_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, kvs);
        __syncthreads();
        plain_load<DIM, TILE>(kvs, v + j0 * s.v_stride, s.v_stride, s.Tk - j0, s.HD);
        UNROLL for (int i = 0; i < R; i++) {
            float top = -INFINITY;
            UNROLL for (int j = 0; j < R; j++) {
                c[i][j] = sees(sight, t0 + y + 16 * i, j0 + x + 16 * j) ? c[i][j] * a.scale2 : -INFINITY;
                top = fmaxf(top, c[i][j]);
            }
            for (int d = 8; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); // the 16 threads of a row
            top = fmaxf(top, base[i]);
            float from = top == -INFINITY ? 0.0f : top, rescale = ptx_exp2(base[i] - from), total = 0; // nothing seen yet: exp2(-inf - 0) = 0
            base[i] = top;
            UNROLL for (int j = 0; j < R; j++) c[i][j] = ptx_exp2(c[i][j] - from), total += c[i][j];
            sum[i] = fmaf(sum[i], rescale, total);
            UNROLL for (int j = 0; j < DIM / 64; j++) o[i][j].x *= rescale, o[i][j].y *= rescale, o[i][j].z *= rescale, o[i][j].w *= rescale;
        }
        plain_weighted<DIM>(o, c, ws, kvs);
    }
    float inverse[R];
    UNROLL for (int i = 0; i < R; i++) {
        for (int d = 8; d; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
        inverse[i] = sum[i] > 0 ? 1.0f / sum[i] : sum[i]; // nothing seen: 0; NaN stays NaN
        int t = t0 + y + 16 * i;
        if (x == 0 && t < s.Tq) a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] = sum[i] == 0 ? -INFINITY : (base[i] + log2f(sum[i])) * LN_2;
    }
    plain_store<DIM>(a.out + token * s.o_stride + p.h * s.HD, s.o_stride, o, inverse, s.Tq - t0, s.HD);
}

/* A block has a tile of keys, and goes over the queries that see them, of all query heads that share them. */
template <int DIM> static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_keys_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const AttentionPlace p = attention_place(a, (s.Tk + TILE - 1) / TILE, 1);
    const Sight sight = sight_of(s, p.b);
    const int j0 = p.rank * TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16, G = s.NH / s.NKV;
    const int64_t key = (int64_t)p.b * s.Tk + j0;
    float4 dk[R][DIM / 64], dv[R][DIM / 64];
    plain_zero<DIM>(dk), plain_zero<DIM>(dv);
    plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
    plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
    for (int g = 0; g < G; g++)
        for (int t0 = max(0, j0 - s.q_offset) / TILE * TILE; t0 < s.Tq; t0 += TILE) {
            const int h = p.kv * G + g;
            const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + h) * a.padded + t0;
            float c[R][R], dp[R][R]; // keys by queries
            plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + h * s.HD, s.q_stride, s.Tq - t0, s.HD);
            plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + h * s.HD, s.o_stride, s.Tq - t0, s.HD);
            __syncthreads();
            plain_scores<DIM>(c, ks, qs);
            plain_scores<DIM>(dp, vs, dos);
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int j = 0; j < R; j++) {
                    int t = x + 16 * j;
                    c[i][j] = sees(sight, t0 + t, j0 + y + 16 * i) ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) : 0;
                    dp[i][j] = c[i][j] * (dp[i][j] - a.D[row + t]);
                }
            plain_weighted<DIM>(dv, c, ws, dos);
            plain_weighted<DIM>(dk, dp, ws, qs);
        }
    float one[R], scale[R];
    UNROLL for (int i = 0; i < R; i++) one[i] = 1, scale[i] = a.scale;
    plain_store<DIM>(a.dk + key * s.k_stride + p.kv * s.HD, s.k_stride, dk, scale, s.Tk - j0, s.HD);
    plain_store<DIM>(a.dv + key * s.v_stride + p.kv * s.HD, s.v_stride, dv, one, s.Tk - j0, s.HD);
}

template <int DIM> static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_queries_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const Sight sight = sight_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * TILE, end = seen_by(sight, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + p.h) * a.padded + t0;
    float4 dq[R][DIM / 64];
    plain_zero<DIM>(dq);
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + p.h * s.HD, s.o_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int64_t key = (int64_t)p.b * s.Tk + j0;
        float c[R][R], dp[R][R]; // queries by keys
        plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
        plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, ks);
        plain_scores<DIM>(dp, dos, vs);
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int j = 0; j < R; j++) {
                int t = y + 16 * i;
                c[i][j] = sees(sight, t0 + t, j0 + x + 16 * j) ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) * (dp[i][j] - a.D[row + t]) : 0;
            }
        plain_weighted<DIM>(dq, c, ws, ks);
    }
    float scale[R];
    UNROLL for (int i = 0; i < R; i++) scale[i] = a.scale;
    plain_store<DIM>(a.dq + token * s.q_stride + p.h * s.HD, s.q_stride, dq, scale, s.Tq - t0, s.HD);
}

// ---------------------------------------------------------------------------
// launches

/* D, lse2 and zeros in dq_sums, for ATTENTION_PAD queries of a head a block. LANES threads a row: HD / 8 with 16-byte loads, or a warp. */
template <int LANES> static __global__ void __launch_bounds__(256) attention_backward_prepare(const AttentionCall a) {
    const AttentionShape &s = a.s;
    const int lane = (int)threadIdx.x % LANES, tiles = a.padded / ATTENTION_PAD;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * ATTENTION_PAD, b = (int)blockIdx.x / s.NH / tiles;
    const int64_t first = ((int64_t)b * s.NH + h) * a.padded + t0;
    for (int row = (int)threadIdx.x / LANES; row < ATTENTION_PAD; row += 256 / LANES) {
        const int t = t0 + row, exists = t < s.Tq;
        const floatX *x = a.dout + ((int64_t)b * s.Tq + t) * s.o_stride + h * s.HD, *y = a.out_read + (x - a.dout);
        float sum = 0;
        if (exists && LANES < 32) {
            uint4 u = *(const uint4 *)(const void *)(x + lane * 8), v = *(const uint4 *)(const void *)(y + lane * 8);
            const uint32_t us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int i = 0; i < 4; i++) {
                sum = fmaf(__uint_as_float(us[i] << 16), __uint_as_float(vs[i] << 16), sum);
                sum = fmaf(__uint_as_float(us[i] & 0xFFFF0000u), __uint_as_float(vs[i] & 0xFFFF0000u), sum);
            }
        } else if (exists)
            for (int d = lane; d < s.HD; d += LANES) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
        for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane) continue;
        float lse = exists ? a.lse_read[((int64_t)b * s.NH + h) * s.Tq + t] : -INFINITY;
        a.D[first + row] = sum, a.lse2[first + row] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
    }
    const float4 zero = {0, 0, 0, 0};
    for (int i = (int)threadIdx.x; a.dq_sums && i < ATTENTION_PAD * s.HD / 4; i += 256) ((float4 *)(void *)(a.dq_sums + first * s.HD))[i] = zero;
}

#define ATTENTION_KERNEL(kernel, blocks, threads, bytes, a) do { \
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)), "shared memory for " #kernel); \
    KERNEL(dev, kernel, (unsigned)(blocks), (unsigned)(threads), (size_t)(bytes), a); \
} while (0)

/* 0: heads of HD elements cannot be had; 1: by plain arithmetic, which in bf16 is slow; 2: by tensor cores. */
static int cuda_attention_has(int HD) { return HD < 1 || HD > 256 ? 0 : FLOATX == DTYPE_BF16 && (HD == 64 || HD == 128) ? 2 : 1; }

static int64_t attention_rows(const AttentionShape *s) { return (int64_t)s->B * s->NH * round_up(s->Tq, ATTENTION_PAD); } // of D, lse2 and dq_sums

static size_t cuda_attention_scratch(const Device *dev, const AttentionShape *s, int backward) {
    int sums = cuda_attention_has(s->HD) == 2 && !dev->deterministic;
    return backward ? (size_t)(attention_rows(s) * (2 + (sums ? s->HD : 0))) * sizeof(float) : 0;
}

static AttentionCall attention_call(const AttentionShape *s, const floatX *q, const floatX *k, const floatX *v, float *space) {
    AttentionCall a;
    memset(&a, 0, sizeof a);
    a.s = *s, a.q = q, a.k = k, a.v = v, a.D = space, a.lse2 = space + attention_rows(s), a.dq_sums = space + 2 * attention_rows(s);
    a.padded = (int)round_up(s->Tq, ATTENTION_PAD), a.scale = 1.0f / sqrtf((float)s->HD), a.scale2 = a.scale * LOG2_E;
    a.section = (int)max_i64(1, min_i64((int64_t)s->B * s->NKV, ATTENTION_L2 / ((int64_t)s->Tk * s->HD * 2 * (int64_t)sizeof *k)));
    return a;
}
static int64_t attention_blocks(const AttentionShape *s, int heads, int T, int tile) { return (int64_t)s->B * heads * ((T + tile - 1) / tile); }

#ifdef PRECISION_BF16
/* Do rows, at these pointers and these strides apart, lie as tensor cores take them? */
static int attention_mma(const AttentionShape *s, const void *const *pointers, int count) {
    uintptr_t bits = (uintptr_t)(s->q_stride | s->k_stride | s->v_stride | s->o_stride) * sizeof(bf16);
    for (int i = 0; i < count; i++) bits |= (uintptr_t)pointers[i];
    return cuda_attention_has(s->HD) == 2 && bits % 16 == 0;
}
template <int HD> static void attention_forward_launch(Device *dev, const AttentionCall *a) {
    ATTENTION_KERNEL(attention_forward_mma<HD>, attention_blocks(&a->s, a->s.NH, a->s.Tq, 128), 128, (128 * HD + 2 * 8192) * sizeof(bf16), *a);
}
template <int HD, int KEYS> static void attention_backward_launch(Device *dev, const AttentionCall *a) {
    typedef Backward<HD, KEYS> Z;
    const AttentionShape *s = &a->s;
    int64_t blocks = attention_blocks(s, s->NKV, s->Tk, KEYS);
    ATTENTION_KERNEL(attention_backward_prepare<HD / 8>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 1>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL((attention_backward_round_dq<HD, KEYS>), attention_blocks(s, s->NH, s->Tq, Z::QUERIES), Z::THREADS, 0, *a);
    } else {
        ATTENTION_KERNEL((attention_backward_mma<HD, KEYS, 0>), blocks, Z::THREADS, Z::BYTES, *a);
        ATTENTION_KERNEL(attention_backward_queries_mma<HD>, attention_blocks(s, s->NH, s->Tq, 128), 128, (2 * 128 * HD + 2 * 4096) * sizeof(bf16), *a);
    }
}
/* GPUs with 99 KB of shared memory a block get smaller tiles. */
template <int HD> static void attention_backward_launch(Device *dev, const AttentionCall *a) {
    if (dev->shared_limit >= Backward<HD, 128>::BYTES) attention_backward_launch<HD, 128>(dev, a);
    else attention_backward_launch<HD, 64>(dev, a);
}
#endif
template <int DIM> static void attention_forward_plain_launch(Device *dev, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    ATTENTION_KERNEL(attention_forward_plain<DIM>, attention_blocks(&a->s, a->s.NH, a->s.Tq, Z::FORWARD), PLAIN_THREADS, Z::FORWARD_BYTES, *a);
}
template <int DIM> static void attention_backward_plain_launch(Device *dev, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    const AttentionShape *s = &a->s;
    ATTENTION_KERNEL(attention_backward_prepare<32>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    ATTENTION_KERNEL(attention_backward_keys_plain<DIM>, attention_blocks(s, s->NKV, s->Tk, Z::BACKWARD), PLAIN_THREADS, Z::BACKWARD_BYTES, *a);
    ATTENTION_KERNEL(attention_backward_queries_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::BACKWARD), PLAIN_THREADS, Z::BACKWARD_BYTES, *a);
}

static void attention_refuse(const AttentionShape *s) {
    if (!cuda_attention_has(s->HD)) run_failure("attention: heads of %d elements reached the GPU, whose kernels take 1 to 256", s->HD);
}

static void cuda_attention_forward(Device *dev, floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s, void *scratchpad) {
    AttentionCall a = attention_call(s, q, k, v, (float *)scratchpad);
    a.out = out, a.lse = lse;
    attention_refuse(s);
    if (!s->B || !s->Tq) return;
#ifdef PRECISION_BF16
    const void *const pointers[] = {out, q, k, v};
    if (attention_mma(s, pointers, 4)) {
        if (s->HD == 64) attention_forward_launch<64>(dev, &a);
        else attention_forward_launch<128>(dev, &a);
        return;
    }
#endif
    if (s->HD <= 64) attention_forward_plain_launch<64>(dev, &a);
    else if (s->HD <= 128) attention_forward_plain_launch<128>(dev, &a);
    else attention_forward_plain_launch<256>(dev, &a);
}

static void cuda_attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out, const float *lse,
                                    const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s, void *scratchpad) {
    AttentionCall a = attention_call(s, q, k, v, (float *)scratchpad);
    a.dq = dq, a.dk = dk, a.dv = dv, a.dout = dout, a.out_read = out, a.lse_read = lse;
    attention_refuse(s);
    if (!s->B || !s->Tq) return;
#ifdef PRECISION_BF16
    const void *const pointers[] = {dq, dk, dv, dout, out, q, k, v};
    if (attention_mma(s, pointers, 8)) {
        if (dev->deterministic) a.dq_sums = NULL;
        if (s->HD == 64) attention_backward_launch<64>(dev, &a);
        else attention_backward_launch<128>(dev, &a);
        return;
    }
#endif
    a.dq_sums = NULL;
    if (s->HD <= 64) attention_backward_plain_launch<64>(dev, &a);
    else if (s->HD <= 128) attention_backward_plain_launch<128>(dev, &a);
    else attention_backward_plain_launch<256>(dev, &a);
}
#endif
