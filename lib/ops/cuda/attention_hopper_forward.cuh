/* attention_hopper_forward.cuh: attention forward for GPUs of compute capability 9.0, in bf16, heads of 64 or 128.
 *
 * A block computes one tile of 128 queries after the other, consumer g its rows 64 g … 64 g + 63. In each step of the
 * loop a consumer starts Q K^T of this tile of keys and P V of the previous one, and computes the softmax of this one
 * while P V runs. The consumers take turns in starting matmuls (FlashAttention-3's ping-pong scheduling), so that one
 * computes exponentials while the tensor cores work for the other.
 */
#ifndef CUDA_ATTENTION_HOPPER_FORWARD_CUH
#define CUDA_ATTENTION_HOPPER_FORWARD_CUH
#include "attention_hopper_common.cuh" // defines: HopperCall, ForwardTile, wgmma_scores, wgmma_weighted
#include "attention_softmax.cuh"       // defines: softmax_weights, rescale_rows, forward_finish

#ifdef PRECISION_BF16
template <int HD> struct HopperForward {
    static constexpr int QUERIES = 64 * HOPPER_CONSUMERS, KEYS = 128, N = KEYS / 8;
    static constexpr int Q = 0, K = QUERIES * HD, V = K + HOPPER_STAGES * KEYS * HD; // offsets in bf16 elements
    static constexpr int OUT = V + HOPPER_STAGES * KEYS * HD,
                         BYTES = (OUT + QUERIES * HD) * (int)sizeof(bf16) + PANEL_SLACK;
};

/* Starts loading a tile of queries and all keys and values that it needs, in the order in which they are used: the n-th
 * keys and values on, the q-th queries. One thread. Returns the next n. */
template <int HD>
DEVICE int forward_load(const HopperCall &h, bf16 *tiles, ForwardBarriers *barriers, const ForwardTile &tile, int n,
                        int q) {
    typedef HopperForward<HD> Z;
    enum { TILE = Z::KEYS * HD, BYTES = TILE * sizeof(bf16) };
    const AttentionPlace &p = tile.place;
    bf16 *ks = tiles + Z::K, *vs = tiles + Z::V;
    ptx_mbarrier_wait(&barriers->q_empty, (q + 1) % 2);
    ptx_mbarrier_arrive_expect(&barriers->q_full, Z::QUERIES * HD * (int)sizeof(bf16));
    hopper_load<HD>(tiles + Z::Q, &h.q, &barriers->q_full, Z::QUERIES, p.h, tile.t0, p.b);
    for (int j = tile.first_key; j < tile.end + Z::KEYS; j += Z::KEYS, n++) {
        if (j < tile.end) {
            uint64_t *full = pipeline_acquire(&barriers->k, n, BYTES);
            hopper_load<HD>(ks + n % HOPPER_STAGES * TILE, &h.k, full, Z::KEYS, p.kv, j, p.b);
        }
        if (j > tile.first_key) { // the values of the keys before these
            uint64_t *full = pipeline_acquire(&barriers->v, n - 1, BYTES);
            hopper_load<HD>(vs + (n - 1) % HOPPER_STAGES * TILE, &h.v, full, Z::KEYS, p.kv, j - Z::KEYS, p.b);
        }
    }
    return n - 1;
}

/* One warp; its first lane starts the loads. */
template <int HD> DEVICE void forward_produce(const HopperCall &h, bf16 *tiles, ForwardBarriers *barriers) {
    ForwardTile tile;
    for (int i = 0, n = 0, q = 0; forward_tile<HopperForward<HD>::KEYS>(&tile, h.call, i); i++) {
        if (tile.first_key >= tile.end) continue;
        if (threadIdx.x == 0) n = forward_load<HD>(h, tiles, barriers, tile, n, q);
        q++;
    }
}

/* What a thread of a consumer keeps of its rows of a tile of queries. */
template <int HD> struct ForwardRows { float o[1][HD / 8][4], base[1][2], sum[1][2]; };

/* c (64, KEYS) becomes the weights of keys j … for the consumer's queries. Returns whether the output of some row of
 * the warp has to be rescaled. tw is the warp's first query. */
template <int N, int HD>
DEVICE bool forward_weights(const AttentionCall &a, float (&c)[1][N][4], float (&rescale)[1][2], ForwardRows<HD> &rows,
                            int b, int tw, int j) {
    if (a.s.q_doc || j + 8 * N > seen_by(a.s, tw)) mma_mask<0>(c, sequence_of(a.s, b), tw, j);
    const bool any = softmax_weights(c, rescale, rows.base, rows.sum, a.scale2);
    // The vote depends on the sums. So the compiler must finish the exponentials before the caller's branch.
    return __any_sync(~0u, any || !(rows.sum[0][0] + rows.sum[0][1] >= 0));
}

/* All keys and values of a tile of queries, the n-th of the pipelines on. Returns the next n. */
template <int HD>
DEVICE int forward_steps(const AttentionCall &a, const bf16 *tiles, ForwardBarriers *barriers, const ForwardTile &tile,
                         ForwardRows<HD> &rows, int g, int n) {
    typedef HopperForward<HD> Z;
    enum { TILE = Z::KEYS * HD, KEYS = Z::KEYS };
    const bf16 *qs = tiles + Z::Q + g * 64 * PANEL, *ks = tiles + Z::K, *vs = tiles + Z::V;
    const int tw = tile.t0 + g * 64 + warp_of_block() % 4 * 16, b = tile.place.b;
    float c[1][Z::N][4], rescale[1][2];
    uint32_t w[1][Z::N / 2][4];
    pipeline_wait(&barriers->k, n);
    wgmma_scores<HD>(c, qs, Z::QUERIES, ks + n % HOPPER_STAGES * TILE, KEYS);
    wgmma_finish<0>(c);
    pipeline_release(&barriers->k, n);
    forward_weights(a, c, rescale, rows, b, tw, tile.first_key); // no output yet that would be rescaled
    mma_pack(w, c, 1);
    ROLLED for (int j = tile.first_key + KEYS; j < tile.end; j += KEYS) {
        pipeline_wait(&barriers->k, n + 1);
        ptx_barrier_sync(HOPPER_TURN + g, 128 * HOPPER_CONSUMERS);
        wgmma_scores<HD>(c, qs, Z::QUERIES, ks + (n + 1) % HOPPER_STAGES * TILE, KEYS);
        pipeline_wait(&barriers->v, n);
        wgmma_weighted<HD>(rows.o, w, vs + n % HOPPER_STAGES * TILE);
        ptx_barrier_arrive(HOPPER_TURN + 1 - g, 128 * HOPPER_CONSUMERS);
        wgmma_finish<1>(c);
        pipeline_release(&barriers->k, n + 1);
        if (forward_weights(a, c, rescale, rows, b, tw, j)) { // a wait in each branch: see forward_weights
            wgmma_finish<0>(rows.o);
            rescale_rows(rows.o, rescale);
        } else {
            wgmma_finish<0>(rows.o);
        }
        pipeline_release(&barriers->v, n);
        mma_pack(w, c, 1);
        n++;
    }
    pipeline_wait(&barriers->v, n);
    wgmma_weighted<HD>(rows.o, w, vs + n % HOPPER_STAGES * TILE);
    wgmma_finish<0>(rows.o);
    pipeline_release(&barriers->v, n);
    return n + 1;
}

/* Consumer g: its 64 rows of all of this block's tiles. */
template <int HD> DEVICE void forward_consume(const HopperCall &h, bf16 *tiles, ForwardBarriers *barriers, int g) {
    typedef HopperForward<HD> Z;
    const int warp = warp_of_block() % 4, thread = (int)threadIdx.x % 128;
    bf16 *out = tiles + Z::OUT + g * 64 * HD;
    ForwardTile tile;
    if (g == 1) ptx_barrier_arrive(HOPPER_TURN, 128 * HOPPER_CONSUMERS); // consumer 0 begins
    for (int i = 0, n = 0, q = 0; forward_tile<HopperForward<HD>::KEYS>(&tile, h.call, i); i++) {
        ForwardRows<HD> rows;
        uint32_t w[1][HD / 16][4];
        fill(rows.o, 0);
        for (int half = 0; half < 2; half++) {
            rows.base[0][half] = -INFINITY;
            rows.sum[0][half] = 0;
        }
        if (tile.first_key < tile.end) {
            ptx_mbarrier_wait(&barriers->q_full, q++ % 2);
            n = forward_steps<HD>(h.call, tiles, barriers, tile, rows, g, n);
            if (thread % 32 == 0) ptx_mbarrier_arrive(&barriers->q_empty);
        }
        const int t = tile.t0 + g * 64;
        forward_finish<HD>(h.call, tile.place, t + warp * 16, thread % 32, rows.o, rows.base, rows.sum);
        mma_pack(w, rows.o, 1);
        if (thread == 0) ptx_tma_store_wait_read<0>(); // the previous tile's output has left `out`
        ptx_barrier_sync(HOPPER_CONSUMER + g, 128);
        hopper_write<HD>(&h.out, out, 64, w, g, tile.place.h, t, tile.place.b);
    }
    if (g == 0) ptx_barrier_sync(HOPPER_TURN, 128 * HOPPER_CONSUMERS); // the turn that consumer 1 has given last
    if (thread == 0) ptx_tma_store_wait_read<0>();
}

template <int HD>
static __global__ void __launch_bounds__(HOPPER_THREADS, 1)
    attention_forward_hopper(const __grid_constant__ HopperCall h) {
#if HOPPER_CODE
    DYN_SHARED(bf16, memory);
    bf16 *tiles = first_panel(memory);
    SHARED(ForwardBarriers, barriers, 1);
    const int group = warp_of_block() / 4;
    if (threadIdx.x == 0) forward_barriers_init(barriers);
    __syncthreads();
    if (group == 0) {
        ptx_setmaxnreg_dec<HOPPER_PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) forward_produce<HD>(h, tiles, barriers);
    } else {
        ptx_setmaxnreg_inc<HOPPER_CONSUMER_REGISTERS>();
        forward_consume<HD>(h, tiles, barriers, group - 1);
    }
#endif
}

template <int HD> static void attention_forward_hopper_launch(OpStream *on, const AttentionCall *a) {
    typedef HopperForward<HD> Z;
    const AttentionShape *s = &a->s;
    HopperCall h;
    memset((void *)&h, 0, sizeof h);
    h.call = *a;
    h.q = hopper_map(on, a->q, s, s->Tq, s->NH, s->q_stride, Z::QUERIES);
    h.k = hopper_map(on, a->k, s, s->Tk, s->NKV, s->k_stride, Z::KEYS);
    h.v = hopper_map(on, a->v, s, s->Tk, s->NKV, s->v_stride, Z::KEYS);
    h.out = hopper_map(on, a->out, s, s->Tq, s->NH, s->o_stride, 64);
    int64_t tiles = attention_blocks(s, s->NH, s->Tq, Z::QUERIES);
    int64_t most = on->multiprocessors - on->left_to_nccl;
    ATTENTION_KERNEL(attention_forward_hopper<HD>, min_i64(tiles, most), HOPPER_THREADS, Z::BYTES, h);
}
#endif

#endif
