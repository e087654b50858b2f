/* attention_hopper_backward.cuh: attention backward for GPUs of compute capability 9.0, in bf16, heads of 64 or 128.
 *
 * A block has 128 keys of one head and goes over all queries that see them, of all query heads that share them. Another
 * kernel computes dq in a fixed order of additions, for on->deterministic.
 */
#ifndef CUDA_ATTENTION_HOPPER_BACKWARD_CUH
#define CUDA_ATTENTION_HOPPER_BACKWARD_CUH
#include "attention_hopper_common.cuh" // defines: HopperCall, ForwardTile, wgmma_scores, wgmma_weighted
#include "attention_prepare.cuh"       // defines: attention_backward_prepare

#ifdef PRECISION_BF16
// ---------------------------------------------------------------------------
// dK, dV, and sums of dQ
//
// Queries are taken QUERIES at a time. Consumer g owns dK and dV of keys 64 g … 64 g + 63. It computes P^T and dS^T,
// which stay in its registers as the left operands of dV += P^T dO and dK += dS^T Q. dS^T also goes to shared memory,
// from which both consumers compute dQ = dS K, each one half. The next scores are exponentiated while dP is computed,
// dS while dV is, and dQ is added to the sums while dK is computed.

template <int HD> struct HopperBackward {
    static constexpr int KEYS = 64 * HOPPER_CONSUMERS, QUERIES = 8192 / HD, N = QUERIES / 8, TILE = QUERIES * HD;
    static constexpr int K = 0, V = KEYS * HD;                     // (KEYS, HD), offsets in bf16 elements
    static constexpr int Q = 2 * V, DO = Q + HOPPER_STAGES * TILE; // (stages, QUERIES, HD)
    static constexpr int DS = DO + HOPPER_STAGES * TILE;           // (2, KEYS, QUERIES): of this step, of the previous
    static constexpr int ROWS = DS + 2 * KEYS * QUERIES;           // (2, stages, QUERIES) floats: lse2, D
    static constexpr int BYTES =
        ROWS * (int)sizeof(bf16) + 2 * HOPPER_STAGES * QUERIES * (int)sizeof(float) + PANEL_SLACK;
    static constexpr int DQ_COLUMNS = HD == 128 ? 64 : 0; // consumer 1's half of dQ begins at this column
    static constexpr int DQ_ROWS = HD == 128 ? 0 : 64;    // and at this row
};

typedef struct {
    HopperPipeline q, dout; // each with the row of lse2 or D
    uint64_t kv_full;
} BackwardBarriers;

/* The work of a block: `steps` tiles of QUERIES queries, of one query head after the other. */
typedef struct {
    int b, kv, key; // sequence, kv head, first key
    int first;      // the first query of a head's first tile
    int tiles;      // tiles of a head
    int head;       // the first query head
    int steps;
    int64_t part_tile; // the number of this block's tile in part_sums
} HopperBackwardPlace;

template <int HD> DEVICE HopperBackwardPlace hopper_backward_place(const AttentionCall &a) {
    typedef HopperBackward<HD> Z;
    const AttentionShape &s = a.s;
    const int tiles_of_head = (s.Tk + Z::KEYS - 1) / Z::KEYS, G = s.NH / s.NKV, heads = G / a.parts;
    const AttentionPlace place = attention_place(a, (int)blockIdx.x, tiles_of_head, a.parts);
    const AttentionShape x = sequence_of(s, place.b);
    const int key = place.order * Z::KEYS, first = first_query(&s, key) / Z::QUERIES * Z::QUERIES;
    const int end = documents_meet(x.k_doc, key, min(key + Z::KEYS, s.Tk), x.q_doc, s.Tq - 1, min(first, s.Tq) - 1) + 1;
    const int tiles = max(0, (end - first + Z::QUERIES - 1) / Z::QUERIES), part = place.h - place.kv * G;
    const int64_t part_tile = (((int64_t)part * s.B + place.b) * s.NKV + place.kv) * tiles_of_head + place.order;
    return {place.b, place.kv, key, first, tiles, place.kv * G + part * heads, tiles * heads, part_tile};
}

/* One thread starts all loads of the block. */
template <int HD>
DEVICE void backward_produce(const HopperCall &h, const HopperBackwardPlace &p, bf16 *tiles,
                             BackwardBarriers *barriers) {
    typedef HopperBackward<HD> Z;
    enum { BYTES = (int)(Z::TILE * sizeof(bf16) + Z::QUERIES * sizeof(float)) };
    const AttentionCall &a = h.call;
    float *lse2 = (float *)(void *)(tiles + Z::ROWS), *D = lse2 + HOPPER_STAGES * Z::QUERIES;
    if (!p.steps) return;
    ptx_mbarrier_arrive_expect(&barriers->kv_full, 2 * Z::KEYS * HD * (int)sizeof(bf16));
    hopper_load<HD>(tiles + Z::K, &h.k, &barriers->kv_full, Z::KEYS, p.kv, p.key, p.b);
    hopper_load<HD>(tiles + Z::V, &h.v, &barriers->kv_full, Z::KEYS, p.kv, p.key, p.b);
    for (int n = 0; n < p.steps; n++) {
        const int head = p.head + n / p.tiles, t = p.first + n % p.tiles * Z::QUERIES, stage = n % HOPPER_STAGES;
        const int64_t row = ((int64_t)p.b * a.s.NH + head) * a.padded + t;
        uint64_t *full = pipeline_acquire(&barriers->q, n, BYTES);
        hopper_load<HD>(tiles + Z::Q + stage * Z::TILE, &h.q, full, Z::QUERIES, head, t, p.b);
        ptx_bulk_load(lse2 + stage * Z::QUERIES, a.lse2 + row, full, Z::QUERIES * (int)sizeof(float));
        full = pipeline_acquire(&barriers->dout, n, BYTES);
        hopper_load<HD>(tiles + Z::DO + stage * Z::TILE, &h.dout, full, Z::QUERIES, head, t, p.b);
        ptx_bulk_load(D + stage * Z::QUERIES, a.D + row, full, Z::QUERIES * (int)sizeof(float));
    }
}

/* c = P^T = exp2(S^T scale2 - lse2). */
template <int N> DEVICE void backward_probabilities(float (&c)[1][N][4], const float *lse2, float scale2) {
    UNROLL for (int n = 0; n < N; n++) {
        const float2 row = *(const float2 *)(const void *)(lse2 + n * 8 + opaque_lane() % 4 * 2);
        UNROLL for (int e = 0; e < 4; e++) c[0][n][e] = ptx_exp2(fmaf(c[0][n][e], scale2, e % 2 ? -row.y : -row.x));
    }
}
/* dp = dS^T = P^T (dP^T - D), from dp = dP^T. P^T is read in fp32: its bf16 registers belong to the wgmma of dV until
 * that has been waited for (PTX ISA, wgmma.wait_group). */
template <int N>
DEVICE void backward_d_scores(float (&dp)[1][N][4], const float (&p)[1][N][4], const float *D) {
    UNROLL for (int n = 0; n < N; n++) {
        const float2 row = *(const float2 *)(const void *)(D + n * 8 + opaque_lane() % 4 * 2);
        UNROLL for (int e = 0; e < 4; e++) dp[0][n][e] = p[0][n][e] * (dp[0][n][e] - (e % 2 ? row.y : row.x));
    }
}

/* Starts consumer g's half of dQ = dS K, from all keys. */
template <int HD> DEVICE void backward_dq_start(float (&dq)[1][8][4], const bf16 *ds, const bf16 *ks, int g) {
    typedef HopperBackward<HD> Z;
    const uint64_t x = wgmma_descriptor(ds + g * Z::DQ_ROWS / PANEL * Z::KEYS * PANEL, 0);
    const uint64_t y = wgmma_descriptor(ks + g * Z::DQ_COLUMNS / PANEL * Z::KEYS * PANEL, 0);
    ptx_wgmma_fence();
    UNROLL for (int k = 0; k < Z::KEYS; k += 16) {
        const uint64_t at = k * PANEL_BYTES / 16;
        ptx_wgmma<1, 1>(accumulator(dq), x + at, y + at, k > 0);
    }
    ptx_wgmma_commit();
}

/* Consumer g's work: dK and dV of its 64 keys, not yet scaled. */
template <int HD, int WITH_DQ>
DEVICE void backward_steps(const AttentionCall &a, const HopperBackwardPlace &p, bf16 *tiles,
                           BackwardBarriers *barriers, int g, float (&dk)[1][HD / 8][4], float (&dv)[1][HD / 8][4]) {
    typedef HopperBackward<HD> Z;
    enum { N = Z::N };
    const int warp = warp_of_block() % 4, key = p.key + g * 64;
    const bf16 *ks = tiles + Z::K, *my_ks = ks + g * 64 * PANEL, *my_vs = tiles + Z::V + g * 64 * PANEL;
    const float *lse2 = (const float *)(const void *)(tiles + Z::ROWS), *D = lse2 + HOPPER_STAGES * Z::QUERIES;
    float c[1][N][4], dp[1][N][4], dq[1][8][4];
    uint32_t w_p[1][N / 2][4], w_ds[1][N / 2][4];
    if (p.steps) ptx_mbarrier_wait(&barriers->kv_full, 0);
    ROLLED for (int n = 0; n < p.steps; n++) {
        const int stage = n % HOPPER_STAGES, t = p.first + n % p.tiles * Z::QUERIES;
        const bf16 *qs = tiles + Z::Q + stage * Z::TILE, *dos = tiles + Z::DO + stage * Z::TILE;
        bf16 *ds = tiles + Z::DS + n % 2 * Z::KEYS * Z::QUERIES;
        pipeline_wait(&barriers->q, n);
        wgmma_scores<HD>(c, my_ks, Z::KEYS, qs, Z::QUERIES);
        pipeline_wait(&barriers->dout, n);
        wgmma_scores<HD>(dp, my_vs, Z::KEYS, dos, Z::QUERIES);
        wgmma_finish<1>(c);
        if (a.s.q_doc || key + 64 > query_position(&a.s, t) + 1 || p.key + Z::KEYS > a.s.Tk)
            mma_mask<1>(c, sequence_of(a.s, p.b), t, key + warp * 16);
        backward_probabilities(c, lse2 + stage * Z::QUERIES, a.scale2);
        if (HD == 128) { // dS is computed while dV is
            mma_pack(w_p, c, 1);
            wgmma_weighted<HD>(dv, w_p, dos);
            wgmma_finish<1>(dp);
            backward_d_scores(dp, c, D + stage * Z::QUERIES);
            mma_pack(w_ds, dp, 1);
        } else { // tiles of more queries: not enough registers for P in fp32 beside the wgmma of dV
            wgmma_finish<0>(dp);
            backward_d_scores(dp, c, D + stage * Z::QUERIES);
            mma_pack(w_ds, dp, 1);
            mma_pack(w_p, c, 1);
            wgmma_weighted<HD>(dv, w_p, dos);
        }
        if (WITH_DQ) {
            hopper_store(ds + g * 64 * PANEL, Z::KEYS, w_ds, warp);
            ptx_fence_proxy_async();
            ptx_barrier_sync(HOPPER_BOTH, 128 * HOPPER_CONSUMERS); // dS is complete; the dS before it has been read
            backward_dq_start<HD>(dq, ds, ks, g);
        }
        wgmma_weighted<HD>(dk, w_ds, qs);
        ptx_wgmma_wait<1>(); // dV and dQ are done; dK may still run
        pipeline_release(&barriers->dout, n);
        if (WITH_DQ) {
            ptx_wgmma_settle(accumulator(dq));
            const int64_t row = ((int64_t)p.b * a.s.NH + p.head + n / p.tiles) * a.padded + t;
            float *sums = a.dq_sums + row * HD + (g * 4 + warp) * DQ_WARP;
            UNROLL for (int i = 0; i < 8; i++) dq_add(sums + i * DQ_BLOCK, dq[0][i]); // while dK is computed
        }
        wgmma_finish<0>(dk);
        pipeline_release(&barriers->q, n);
    }
    ptx_wgmma_settle(accumulator(dv));
}

/* Stores dk or dv of the warp's 16 keys, of one part of the query heads, where attention_backward_join adds the
 * parts. */
template <int HD>
DEVICE void part_store(const AttentionCall &a, const HopperBackwardPlace &p, int g, int is_dk,
                       const float (&sums)[1][HD / 8][4]) {
    const int warp = g * 4 + warp_of_block() % 4;
    float *to = a.part_sums + ((2 * p.part_tile + is_dk) * HopperBackward<HD>::KEYS + warp * 16) * HD;
    UNROLL for (int n = 0; n < HD / 8; n++) store(to + n * DQ_BLOCK + opaque_lane() * 4, sums[0][n]);
}

template <int HD, int WITH_DQ>
DEVICE void backward_consume(const HopperCall &h, const HopperBackwardPlace &p, bf16 *tiles, BackwardBarriers *barriers,
                             int g) {
    typedef HopperBackward<HD> Z;
    float dk[1][HD / 8][4], dv[1][HD / 8][4];
    uint32_t w[1][HD / 16][4];
    bf16 *my_dk = tiles + Z::K + g * 64 * HD, *my_dv = tiles + Z::V + g * 64 * HD; // in place of keys and values
    fill(dk, 0);
    fill(dv, 0);
    backward_steps<HD, WITH_DQ>(h.call, p, tiles, barriers, g, dk, dv);
    if (h.call.part_sums) {
        part_store<HD>(h.call, p, g, 0, dv);
        part_store<HD>(h.call, p, g, 1, dk);
        return;
    }
    ptx_barrier_sync(HOPPER_BOTH, 128 * HOPPER_CONSUMERS); // nobody reads keys and values any more
    mma_pack(w, dk, h.call.scale);
    hopper_write<HD>(&h.dk, my_dk, 64, w, g, p.kv, p.key + g * 64, p.b);
    mma_pack(w, dv, 1);
    hopper_write<HD>(&h.dv, my_dv, 64, w, g, p.kv, p.key + g * 64, p.b);
    if (threadIdx.x % 128 == 0) ptx_tma_store_wait_read<0>();
}

template <int HD, int WITH_DQ>
static __global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_backward_hopper(const __grid_constant__ HopperCall h) {
#if HOPPER_CODE
    DYN_SHARED(bf16, memory);
    bf16 *tiles = first_panel(memory);
    SHARED(BackwardBarriers, barriers, 1);
    const int group = warp_of_block() / 4;
    const HopperBackwardPlace p = hopper_backward_place<HD>(h.call);
    if (threadIdx.x == 0) {
        pipeline_init(&barriers->q);
        pipeline_init(&barriers->dout);
        ptx_mbarrier_init(&barriers->kv_full, 1);
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    if (group == 0) {
        ptx_setmaxnreg_dec<HOPPER_PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) backward_produce<HD>(h, p, tiles, barriers);
    } else {
        ptx_setmaxnreg_inc<HOPPER_CONSUMER_REGISTERS>();
        backward_consume<HD, WITH_DQ>(h, p, tiles, barriers, group - 1);
    }
#endif
}

/* dq = dq_sums / sqrt(HD), rounded. A block has a tile, whose warps hold what the consumers' warps have added. */
template <int HD>
static __global__ void __launch_bounds__(128 * HOPPER_CONSUMERS, 4)
    attention_backward_round_dq_hopper(const AttentionCall a) {
    typedef HopperBackward<HD> Z;
    enum { THREADS = 128 * HOPPER_CONSUMERS };
    SHARED(bf16, tile, Z::TILE);
    const AttentionShape &s = a.s;
    const int warp = (int)threadIdx.x / 32, g = warp / 4, tiles = (s.Tq + Z::QUERIES - 1) / Z::QUERIES;
    const int h = (int)blockIdx.x % s.NH, t0 = (int)blockIdx.x / s.NH % tiles * Z::QUERIES;
    const int b = (int)blockIdx.x / s.NH / tiles;
    const float *sums = a.dq_sums + (((int64_t)b * s.NH + h) * a.padded + t0) * HD + warp * DQ_WARP;
    float dq[1][8][4];
    uint32_t w[1][4][4];
    UNROLL for (int i = 0; i < 8; i++) dq_get(sums + i * DQ_BLOCK, dq[0][i]);
    mma_pack(w, dq, a.scale);
    mma_store<HD>(tile + (g * Z::DQ_ROWS + warp % 4 * 16) * HD, w, g * Z::DQ_COLUMNS / 8);
    __syncthreads();
    tile_store<HD>(a.dq + ((int64_t)b * s.Tq + t0) * s.q_stride + h * HD, s.q_stride, tile, Z::QUERIES, s.Tq - t0,
                   (int)threadIdx.x, THREADS);
}

// ---------------------------------------------------------------------------
// dq in a fixed order of additions
//
// A block has a tile of 128 queries, consumer g its rows 64 g … 64 g + 63, and goes over the keys, as in forward. It
// computes S and dP a second time; dS is the left operand of dQ += dS K.

template <int HD> struct HopperQueries {
    static constexpr int QUERIES = 64 * HOPPER_CONSUMERS, KEYS = 64, N = KEYS / 8, TILE = KEYS * HD;
    static constexpr int Q = 0, DO = QUERIES * HD, K = 2 * DO, V = K + HOPPER_STAGES * TILE; // in bf16 elements
    static constexpr int BYTES = (V + HOPPER_STAGES * TILE) * (int)sizeof(bf16) + PANEL_SLACK;
};

/* One thread starts all loads of the block. */
template <int HD>
DEVICE void queries_produce(const HopperCall &h, const ForwardTile &tile, bf16 *tiles, ForwardBarriers *barriers) {
    typedef HopperQueries<HD> Z;
    enum { BYTES = Z::TILE * sizeof(bf16) };
    const AttentionPlace &p = tile.place;
    if (tile.first_key >= tile.end) return;
    ptx_mbarrier_arrive_expect(&barriers->q_full, 2 * Z::QUERIES * HD * (int)sizeof(bf16));
    hopper_load<HD>(tiles + Z::Q, &h.q, &barriers->q_full, Z::QUERIES, p.h, tile.t0, p.b);
    hopper_load<HD>(tiles + Z::DO, &h.dout, &barriers->q_full, Z::QUERIES, p.h, tile.t0, p.b);
    for (int j = tile.first_key, n = 0; j < tile.end; j += Z::KEYS, n++) {
        const int at = n % HOPPER_STAGES * Z::TILE;
        hopper_load<HD>(tiles + Z::K + at, &h.k, pipeline_acquire(&barriers->k, n, BYTES), Z::KEYS, p.kv, j, p.b);
        hopper_load<HD>(tiles + Z::V + at, &h.v, pipeline_acquire(&barriers->v, n, BYTES), Z::KEYS, p.kv, j, p.b);
    }
}

/* dq (64, HD), not yet scaled, of consumer g's queries; tw is the warp's first query. */
template <int HD>
DEVICE void queries_steps(const AttentionCall &a, const ForwardTile &tile, const bf16 *tiles, ForwardBarriers *barriers,
                          int g, int tw, float (&dq)[1][HD / 8][4]) {
    typedef HopperQueries<HD> Z;
    enum { N = Z::N };
    const AttentionPlace &p = tile.place;
    const bf16 *qs = tiles + Z::Q + g * 64 * PANEL, *dos = tiles + Z::DO + g * 64 * PANEL;
    const int64_t row = ((int64_t)p.b * a.s.NH + p.h) * a.padded + tw + opaque_lane() / 4;
    const float lse2[2] = {a.lse2[row], a.lse2[row + 8]}, D[2] = {a.D[row], a.D[row + 8]};
    float c[1][N][4], dp[1][N][4];
    uint32_t w[1][N / 2][4];
    if (tile.first_key < tile.end) ptx_mbarrier_wait(&barriers->q_full, 0);
    ROLLED for (int j = tile.first_key, n = 0; j < tile.end; j += Z::KEYS, n++) {
        const bf16 *ks = tiles + Z::K + n % HOPPER_STAGES * Z::TILE, *vs = tiles + Z::V + n % HOPPER_STAGES * Z::TILE;
        pipeline_wait(&barriers->k, n);
        wgmma_scores<HD>(c, qs, Z::QUERIES, ks, Z::KEYS);
        pipeline_wait(&barriers->v, n);
        wgmma_scores<HD>(dp, dos, Z::QUERIES, vs, Z::KEYS);
        wgmma_finish<1>(c);
        if (a.s.q_doc || j + Z::KEYS > seen_by(a.s, tw)) mma_mask<0>(c, sequence_of(a.s, p.b), tw, j);
        UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) c[0][i][e] =
            ptx_exp2(fmaf(c[0][i][e], a.scale2, -lse2[e / 2]));
        wgmma_finish<0>(dp);
        pipeline_release(&barriers->v, n);
        UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) c[0][i][e] *= dp[0][i][e] - D[e / 2];
        mma_pack(w, c, 1);
        wgmma_weighted<HD>(dq, w, ks);
        wgmma_finish<0>(dq);
        pipeline_release(&barriers->k, n);
    }
}

template <int HD>
static __global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_backward_queries_hopper(const __grid_constant__ HopperCall h) {
#if HOPPER_CODE
    typedef HopperQueries<HD> Z;
    DYN_SHARED(bf16, memory);
    bf16 *tiles = first_panel(memory);
    SHARED(ForwardBarriers, barriers, 1);
    const int warp = warp_of_block(), group = warp / 4;
    ForwardTile tile;
    forward_tile<Z::KEYS>(&tile, h.call, 0);
    if (threadIdx.x == 0) forward_barriers_init(barriers);
    __syncthreads();
    if (group == 0) {
        ptx_setmaxnreg_dec<HOPPER_PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) queries_produce<HD>(h, tile, tiles, barriers);
        return;
    }
    ptx_setmaxnreg_inc<HOPPER_CONSUMER_REGISTERS>();
    const int g = group - 1, t = tile.t0 + g * 64;
    bf16 *my_dq = tiles + Z::Q + g * 64 * PANEL; // in place of the queries
    float dq[1][HD / 8][4];
    uint32_t w[1][HD / 16][4];
    fill(dq, 0);
    queries_steps<HD>(h.call, tile, tiles, barriers, g, t + warp % 4 * 16, dq);
    mma_pack(w, dq, h.call.scale);
    ptx_barrier_sync(HOPPER_CONSUMER + g, 128); // no warp reads its queries any more
    hopper_write<HD>(&h.dq, my_dq, Z::QUERIES, w, g, tile.place.h, t, tile.place.b);
    if (threadIdx.x % 128 == 0) ptx_tma_store_wait_read<0>();
#endif
}

// ---------------------------------------------------------------------------
// launches

/* dk, dv, and dq in a fixed order of additions. */
template <int HD> static void attention_backward_hopper_in_order(OpStream *on, HopperCall *h, int64_t blocks) {
    typedef HopperQueries<HD> Z;
    const AttentionCall *a = &h->call;
    const AttentionShape *s = &a->s;
    ATTENTION_KERNEL((attention_backward_hopper<HD, 0>), blocks, HOPPER_THREADS, HopperBackward<HD>::BYTES, *h);
    h->q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h->dout = hopper_map(on, a->dout, s, s->Tq, s->NH, s->o_stride, Z::QUERIES);
    h->k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h->v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h->dq = hopper_map(on, a->dq, s, s->Tq, s->NH, s->q_stride, 64);
    ATTENTION_KERNEL(attention_backward_queries_hopper<HD>, attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                     HOPPER_THREADS, Z::BYTES, *h);
}

template <int HD> static void attention_backward_hopper_launch(OpStream *on, const AttentionCall *a) {
    typedef HopperBackward<HD> Z;
    const AttentionShape *s = &a->s;
    HopperCall h;
    memset((void *)&h, 0, sizeof h);
    h.call = *a;
    ATTENTION_KERNEL(attention_backward_prepare<HD / 8>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    int64_t tiles = attention_blocks(s, s->NKV, s->Tk, Z::KEYS), blocks = tiles * a->parts;
    h.q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h.dout = hopper_map(on, a->dout, s, s->Tq, s->NH, s->o_stride, Z::QUERIES);
    h.k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h.v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h.dk = hopper_map(on, a->dk, s, s->Tk, s->NKV, s->k_stride, 64);
    h.dv = hopper_map(on, a->dv, s, s->Tk, s->NKV, s->v_stride, 64);
    if (a->dq_sums) {
        ATTENTION_KERNEL((attention_backward_hopper<HD, 1>), blocks, HOPPER_THREADS, Z::BYTES, h);
        ATTENTION_KERNEL(attention_backward_round_dq_hopper<HD>, attention_blocks(s, s->NH, s->Tq, Z::QUERIES),
                         128 * HOPPER_CONSUMERS, 0, *a);
    } else {
        attention_backward_hopper_in_order<HD>(on, &h, blocks);
    }
    if (a->part_sums) ATTENTION_KERNEL((attention_backward_join<HD, Z::KEYS>), 2 * tiles, Z::KEYS, 0, *a);
}
#endif

#endif
