/* attention_mma.cuh: attention by tensor cores, in bf16. */
#ifndef CUDA_ATTENTION_MMA_CUH
#define CUDA_ATTENTION_MMA_CUH
#include "attention_common.cuh" // defines: AttentionCall, attention_place

#ifdef PRECISION_BF16
// ---------------------------------------------------------------------------
// tiles for tensor cores
//
// A tile is rows of W bf16 in shared memory. Pieces of 16 bytes change places within their row, so that eight rows'
// pieces at one column lie in different banks: no conflicts for ldmatrix, nor for the words that lanes write.
//
// Accumulators c[m][n] are 16 x 8 blocks of a matrix, see ptx_mma_bf16; packed to bf16 they are w[m][n / 2], 16 x 16
// blocks as mma takes its left operand: so what one product gives can enter the next without leaving the registers.

/* The compiler would compute addresses of a loop ahead of it, and keep addresses from before a loop for after it: too
 * many registers. So these give what they say in a way that it cannot see through, and what depends on them is computed
 * anew. */
DEVICE unsigned thread_anew() {
    unsigned x = threadIdx.x;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}
DEVICE int lane_anew() { return (int)(thread_anew() % 32); }
DEVICE int anew(int x) { return __shfl_sync(~0u, x, 0); } // x, which all lanes have
template <int W> DEVICE int swizzled(int row, int piece) {
    return row * W + (piece ^ (W == 32 ? row / 2 % 4 : row % 8)) * 8;
}
DEVICE const uint32_t (&half_of(const uint32_t (&r)[4], int i))[2] { return *(const uint32_t(*)[2])(r + 2 * i); }

/* `rows` rows of HD from global memory, `stride` apart, on their way into a tile; zeros beyond `count` rows. */
template <int HD>
DEVICE void tile_load(bf16 *tile, const bf16 *from, int64_t stride, int rows, int count, int threads) {
    enum { PIECES = HD / 8 };
    unsigned thread = thread_anew();
    int row = (int)(thread / PIECES), piece = (int)(thread % PIECES);
    const bf16 *at = from + row * stride + piece * 8;
    bf16 *to = tile + swizzled<HD>(row, piece); // the swizzle is the same every eighth row
    UNROLL for (int i = 0; i < rows; i += threads / PIECES) ptx_cp_async(to + i * HD, at + i * stride, row + i < count);
}
/* And back: `rows` rows, of which `count` exist, by `threads` threads. */
template <int HD>
DEVICE void tile_store(bf16 *to, int64_t stride, const bf16 *tile, int rows, int count, int thread, int threads) {
    enum { PIECES = HD / 8 };
    int piece = thread % PIECES;
    UNROLL for (int row = thread / PIECES; row < rows; row += threads / PIECES) if (row < count) *
        (uint4 *)(void *)(to + row * stride + piece * 8) =
        *(const uint4 *)(const void *)(tile + swizzled<HD>(row, piece));
}

template <int M, int N> DEVICE void fill(float (&c)[M][N][4], float x) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = 0; e < 4; e++)
        c[m][n][e] = x;
}
/* c(16 M, 8 N) = a(16 M, HD) b(8 N, HD)^T, rows of two tiles */
template <int HD, int M, int N> DEVICE void mma_scores(float (&c)[M][N][4], const bf16 *a, const bf16 *b) {
    int lane = lane_anew(), a_at = swizzled<HD>(lane % 16, lane / 16),
        b_at = swizzled<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    fill(c, 0);
    UNROLL for (int k = 0; k < HD; k += 16) {
        uint32_t x[M][4], y[4];
        UNROLL for (int m = 0; m < M; m++) ptx_ldmatrix_x4(x[m], a + m * 16 * HD + (a_at ^ k));
        UNROLL for (int n = 0; n < N; n += 2) {
            ptx_ldmatrix_x4(y, b + n * 8 * HD + (b_at ^ k));
            UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], x[m], half_of(y, 0)),
                ptx_mma_bf16(c[m][n + 1], x[m], half_of(y, 1));
        }
    }
}
/* c(16 M, HD) += w(16 M, 16 K) b(16 K, HD): rows of a tile, weighted */
template <int HD, int M, int K>
DEVICE void mma_weighted(float (&c)[M][HD / 8][4], const uint32_t (&w)[M][K][4], const bf16 *b) {
    int lane = lane_anew(), at = swizzled<HD>(lane % 16, lane / 16);
    UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < HD / 8; n += 2) {
        uint32_t y[4];
        ptx_ldmatrix_x4_trans(y, b + k * 16 * HD + (at ^ n * 8));
        UNROLL for (int m = 0; m < M; m++) ptx_mma_bf16(c[m][n], w[m][k], half_of(y, 0)),
            ptx_mma_bf16(c[m][n + 1], w[m][k], half_of(y, 1));
    }
}
template <int M, int N> DEVICE void mma_pack(uint32_t (&w)[M][N / 2][4], const float (&c)[M][N][4], float scale) {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) UNROLL for (int half = 0; half < 2; half++)
        w[m][n / 2][n % 2 * 2 + half] = round_pair(c[m][n][2 * half] * scale, c[m][n][2 * half + 1] * scale);
}
/* Where this lane's word w[m][n / 2][n % 2 * 2 + half] is in a tile's rows from 0 on; at = mma_lane<W>(). */
template <int W> DEVICE int mma_lane() {
    int lane = lane_anew();
    return swizzled<W>(lane / 4, 0) + lane % 4 * 2;
}
template <int W> DEVICE uint32_t *mma_word(bf16 *tile, int at, int m, int n, int half) {
    return (uint32_t *)(void *)(tile + (m * 16 + half * 8) * W + (at ^ n * 8));
}
template <int W, int M, int K>
DEVICE void mma_store(bf16 *tile, const uint32_t (&w)[M][K][4], int column = 0 /* blocks of 8 */) {
    int at = mma_lane<W>() ^ column * 8;
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int i = 0; i < K * 4; i++) * mma_word<W>(tile, at, m, i / 2, i % 2) =
        w[m][i / 4][i % 4];
}
/* Scores of queries from t on (the rows, or the columns) and keys from j on that are not to be seen become -infinity.
 */
template <int KEYS_ARE_ROWS, int M, int N>
DEVICE void mma_mask(float (&c)[M][N][4], const AttentionShape &x, int t, int j) {
    int lane = lane_anew(), left = lane % 4 * 2; // this lane's first column
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int half = 0; half < 2; half++) {
        int row = m * 16 + half * 8 + lane / 4;
        int bound = KEYS_ARE_ROWS ? (j + row < x.Tk ? first_query(&x, j + row) - t : INT32_MAX) - left
                                  : min(x.Tk, query_position(&x, t + row) + 1) - j - left;
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 2; e++) if (KEYS_ARE_ROWS ? n * 8 + e < bound : n * 8 + e >= bound)
                c[m][n][2 * half + e] = -INFINITY;
        if (!x.q_doc) continue;
        const int32_t *columns = (KEYS_ARE_ROWS ? x.q_doc + t : x.k_doc + j) + left;
        int count = (KEYS_ARE_ROWS ? x.Tq - t : x.Tk - j) - left,
            doc = KEYS_ARE_ROWS ? x.k_doc[min(j + row, x.Tk - 1)] : x.q_doc[min(t + row, x.Tq - 1)];
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int e = 0; e < 2; e++) if (n * 8 + e < count && columns[n * 8 + e] != doc)
                c[m][n][2 * half + e] = -INFINITY;
    }
}

// ---------------------------------------------------------------------------
// forward by tensor cores
//
// A block has 128 queries of one head, each of its four warps 32 of them: Q in shared memory, O in registers. It goes
// over the keys, K and V through one tile each: V comes while Q K^T is computed, the next K during the softmax and P V.
// Each tile of keys is read by all warps: 8 HD FLOPs for each byte that a warp reads of them.

/* A step of the online softmax of 32 rows, in powers of two: c becomes exp2(c scale - base), o and sum follow base.
 * base is a row's largest score when it last moved, which it does only when one is 8 above it: P up to 256 is as exact,
 * and o is rarely multiplied. Sums are of this lane's columns. */
template <int N, int D>
DEVICE void softmax_step(float (&c)[2][N][4], float (&o)[2][D][4], float (&base)[2][2], float (&sum)[2][2],
                         float scale) {
    float rescale[2][2];
    bool any = false;
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int half = 0; half < 2; half++) {
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
        UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) c[m][n][e] =
            ptx_exp2(fmaf(c[m][n][e], scale, -from)),
                                                                                                total += c[m][n][e];
        sum[m][half] = fmaf(sum[m][half], rescale[m][half], total);
    }
    if (!__any_sync(~0u, any)) return;
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int n = 0; n < D; n++) UNROLL for (int e = 0; e < 4; e++)
        o[m][n][e] *= rescale[m][e / 2];
}

template <int HD> static __global__ void __launch_bounds__(128, 2) attention_forward_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 8192 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                               // (QUERIES, HD)
    bf16 *ks = qs + QUERIES * HD, *vs = ks + KEYS * HD; // (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32; // the first query of this block, of this warp
    const int end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1),
              warp_end = tw < s.Tq ? seen_by(x, min(tw + 32, s.Tq) - 1) : 0;
    const bf16 *q = a.q + ((int64_t)p.b * s.Tq + t0) * s.q_stride + p.h * HD;
    const bf16 *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * HD,
               *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * HD;
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
            if (masked) mma_mask<0>(c, sequence_of(s, anew(p.b)), tw, j);
            softmax_step(c, o, base, sum, a.scale2);
            mma_pack(w, c, 1);
            mma_weighted<HD>(o, w, vs);
        }
    }
    UNROLL for (int m = 0; m < 2; m++) UNROLL for (int half = 0; half < 2; half++) {
        float total = sum[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float inverse = total > 0 ? __fdividef(1.0f, total) : total; // nothing seen: 0; NaN stays NaN
        UNROLL for (int n = 0; n < HD / 8; n++) o[m][n][2 * half] *= inverse, o[m][n][2 * half + 1] *= inverse;
        int t = tw + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && t < s.Tq)
            a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] =
                total == 0 ? -INFINITY : (base[m][half] + __log2f(total)) * LN_2;
    }
    uint32_t w[2][HD / 16][4];
    bf16 *mine = qs + warp * 32 * HD; // only this warp has read these rows
    mma_pack(w, o, 1);
    __syncwarp();
    mma_store<HD>(mine, w);
    __syncwarp();
    tile_store<HD>(a.out + ((int64_t)anew(p.b) * s.Tq + tw) * s.o_stride + p.h * HD, s.o_stride, mine, 32, s.Tq - tw,
                   lane, 32);
}

// ---------------------------------------------------------------------------
// backward by tensor cores: with P = exp(S - lse) and D = rowsum(dout * out),
//   dV = P^T dO,  dP = dO V^T,  dS = P (dP - D),  dQ = dS K / sqrt(HD),  dK = dS^T Q / sqrt(HD)
//
// A block has KEYS keys of one head and goes over all queries that see them, of all query heads that share them,
// QUERIES at a time. Half of its warps own dV, the other half dK, each 32 keys' rows of it, in registers. The former
// compute S^T = K Q^T and from it P^T, the latter dP^T = V dO^T and dS^T: both have just what enters the product for
// their own sums as its left operand. P passes from the former to the latter in shared memory, where dS takes its place
// for dQ, which all compute, 32 x 32 elements each. Nobody waits for arithmetic alone: the dK of a step is computed at
// the start of the next, while others take exponentials, and dV while they form dS.

/* dQ is summed over blocks in fp32 by atomic additions, for which a tile lies as its warps hold it: x[4] of lane after
 * lane. */
DEVICE void dq_add(float *to /* of this warp's block of 16 x 8 */, const float (&x)[4]) {
    int lane = (int)threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
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
    static constexpr int K = 0, V = KEYS * HD;         // (KEYS, HD)
    static constexpr int Q = 2 * V, DO = Q + 2 * TILE; // (2, QUERIES, HD): of a step, and of the one before or after it
    static constexpr int P = DO + 2 * TILE;            // (KEYS, QUERIES): P^T, then dS^T
    static constexpr int LSE = P + KEYS * QUERIES;     // (2, QUERIES) floats, and as many for D
    static constexpr int BYTES = LSE * (int)sizeof(bf16) + 4 * QUERIES * (int)sizeof(float);
};
/* What a block works on. It lies in shared memory: what is needed once a step should not take registers. */
typedef struct {
    int b, kv, key, first, end, last_head;
} BackwardPlace; // first key; queries that may see it; the last query head of kv

/* Of the queries from t on of head h: Q, dO, lse2 and D. */
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
    int i = (int)thread_anew() * 4;
    if (i < Z::QUERIES) ptx_cp_async(rows + i, a.lse2 + row + i, true);
    else if (i < 2 * Z::QUERIES) ptx_cp_async(rows + Z::QUERIES + i, a.D + row + i - Z::QUERIES, true);
}

/* What the warps of one half do; each half has its own function, so that what the other one keeps takes no registers
 * here. */
template <int HD, int KEYS, int WITH_DQ, int OWNS_DK>
DEVICE void backward_half(const AttentionCall &a, bf16 *tiles, const BackwardPlace *p, int warp) {
    typedef Backward<HD, KEYS> Z;
    enum { QUERIES = Z::QUERIES, N = QUERIES / 8 };
    const AttentionShape &s = a.s;
    const int slice = warp % (KEYS / 32) * 32; // the first of this warp's keys
    bf16 *mine = tiles + (OWNS_DK ? Z::V : Z::K) + slice * HD, *ps = tiles + Z::P, *my_ps = ps + slice * QUERIES;
    int h = p->first < p->end ? p->last_head - s.NH / s.NKV + 1 : p->last_head + 1,
        t = p->first;         // a step: query head, first query
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
            if (s.q_doc || p->key + slice + 32 > query_position(&s, t) + 1 || p->key + KEYS > s.Tk)
                mma_mask<1>(c, sequence_of(s, p->b), t, p->key + slice);
            const int at = mma_lane<QUERIES>(), left = lane_anew() % 4 * 2;
            UNROLL for (int n = 0; n < N; n++) {
                float2 lse = *(const float2 *)(const void *)(rows + n * 8 + left);
                UNROLL for (int i = 0; i < 4; i++) {
                    const float *score = &c[i / 2][n][i % 2 * 2];
                    uint32_t two = round_pair(ptx_exp2(fmaf(score[0], a.scale2, -lse.x)),
                                              ptx_exp2(fmaf(score[1], a.scale2, -lse.y)));
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
                    two = round_pair(__uint_as_float(two << 16) * (dp[0] - D.x),
                                     __uint_as_float(two & 0xFFFF0000u) * (dp[1] - D.y));
                    w[i / 2][n / 2][n % 2 * 2 + i % 2] = two;
                    if (WITH_DQ) *word = two; // dS where this lane has read P
                }
            }
        }
        if (!WITH_DQ) continue;
        __syncthreads();  // dS is there
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
                UNROLL for (int m = 0; m < 2; m++) ptx_mma_bf16(d[m][n], y[m], half_of(z, 0)),
                    ptx_mma_bf16(d[m][n + 1], y[m], half_of(z, 1));
            }
        }
        float *dq = a.dq_sums + (int64_t)anew(row) * HD + anew(warp) * DQ_WARP;
        UNROLL for (int i = 0; i < 8; i++) dq_add(dq + i * DQ_BLOCK, d[i / 4][i % 4]);
    }
    uint32_t packed[2][HD / 16][4];
    mma_pack(packed, sums, OWNS_DK ? a.scale : 1);
    mma_store<HD>(tiles + (OWNS_DK ? Z::K : Z::V) + slice * HD, packed); // which are no longer read
}

template <int HD, int KEYS, int WITH_DQ>
static __global__ void __launch_bounds__(2 * KEYS, 1) attention_backward_mma(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    DYN_SHARED(bf16, tiles);
    SHARED(BackwardPlace, p, 1);
    const AttentionShape &s = a.s;
    const int warp = warp_of_block();
    {
        const AttentionPlace place = attention_place(a, (s.Tk + KEYS - 1) / KEYS, 1);
        const AttentionShape x = sequence_of(s, place.b);
        const int key = place.rank * KEYS, first = first_query(&s, key) / Z::QUERIES * Z::QUERIES, G = s.NH / s.NKV;
        const int end =
            documents_meet(x.k_doc, key, min(key + KEYS, s.Tk), x.q_doc, s.Tq - 1, min(first, s.Tq) - 1) + 1;
        if (threadIdx.x == 0)
            p->b = place.b, p->kv = place.kv, p->key = key, p->first = first, p->end = end,
            p->last_head = place.kv * G + G - 1;
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
    tile_store<HD>(a.dk + to * s.k_stride + p->kv * HD, s.k_stride, tiles + Z::K, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
    tile_store<HD>(a.dv + to * s.v_stride + p->kv * HD, s.v_stride, tiles + Z::V, KEYS, s.Tk - p->key, (int)threadIdx.x,
                   Z::THREADS);
}

/* dq = its sums, scaled and rounded: a tile a block, by as many warps as made it. */
template <int HD, int KEYS>
static __global__ void __launch_bounds__(2 * KEYS) attention_backward_round_dq(const AttentionCall a) {
    typedef Backward<HD, KEYS> Z;
    SHARED(bf16, tile, Z::TILE);
    const AttentionShape &s = a.s;
    const int warp = (int)threadIdx.x / 32, tiles = (s.Tq + Z::QUERIES - 1) / Z::QUERIES;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * Z::QUERIES,
              b = (int)blockIdx.x / s.NH / tiles;
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

/* dq in a fixed order: as the forward goes over the keys, with S and dP computed once more. */
template <int HD>
static __global__ void __launch_bounds__(128, 2) attention_backward_queries_mma(const AttentionCall a) {
    enum { QUERIES = 128, THREADS = 128, KEYS = 4096 / HD, N = KEYS / 8 };
    DYN_SHARED(bf16, qs);                                                          // (QUERIES, HD)
    bf16 *dos = qs + QUERIES * HD, *ks = dos + QUERIES * HD, *vs = ks + KEYS * HD; // (QUERIES, HD); (KEYS, HD)
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, warp = warp_of_block(), lane = (int)threadIdx.x % 32;
    const AttentionPlace p = attention_place(a, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.rank) * QUERIES, tw = t0 + warp * 32, end = seen_by(x, min(t0 + QUERIES, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    tile_load<HD>(qs, a.q + token * s.q_stride + p.h * HD, s.q_stride, QUERIES, s.Tq - t0, THREADS);
    tile_load<HD>(dos, a.dout + token * s.o_stride + p.h * HD, s.o_stride, QUERIES, s.Tq - t0, THREADS);
    ptx_cp_async_commit(); // here, since the loop may have no steps: only what is committed is waited for
    float sums[2][HD / 8][4];
    fill(sums, 0);
    for (int j = documents_meet(x.q_doc, t0, min(t0 + QUERIES, s.Tq), x.k_doc, 0, end) / KEYS * KEYS; j < end;
         j += KEYS) {
        float c[2][N][4], dp[2][N][4];
        uint32_t w[2][N / 2][4];
        __syncthreads(); // the last K and V are no longer read
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
        const int row = (anew(p.b) * s.NH + p.h) * a.padded + tw + lane_anew() / 4;
        UNROLL for (int i = 0; i < 4; i++) {
            float lse = a.lse2[row + i * 8], D = a.D[row + i * 8];
            UNROLL for (int n = 0; n < N; n++) UNROLL for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) c[i / 2][n][e] =
                ptx_exp2(fmaf(c[i / 2][n][e], a.scale2, -lse)) * (dp[i / 2][n][e] - D);
        }
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
    tile_store<HD>(a.dq + ((int64_t)anew(p.b) * s.Tq + tw) * s.q_stride + anew(p.h) * HD, s.q_stride, mine, 32,
                   s.Tq - tw, lane, 32);
}
#endif

#endif
