/* attention_hopper_common.cuh: what the attention kernels for GPUs of compute capability 9.0 share: the pipeline
 * between a block's producer warp and consumer warpgroups, and tiles and matmuls of a warpgroup.
 *
 * After FlashAttention-3 (Shah et al. 2024). A block has two consumer warpgroups, which compute by wgmma, and one
 * producer warp, which loads tiles by TMA. They synchronize by mbarriers: a stage of shared memory is full when its
 * bytes have arrived, and empty when all warps of the consumers have read it.
 */
#ifndef CUDA_ATTENTION_HOPPER_COMMON_CUH
#define CUDA_ATTENTION_HOPPER_COMMON_CUH
#include "attention_fragments.cuh" // defines: mma_mask, mma_pack, dq_add, attention_backward_join
#include "attention_hopper.cuh"    // defines: hopper_map
#include "hopper.cuh"              // defines: ptx_wgmma, ptx_tma_load, ptx_mbarrier_wait, wgmma_descriptor

#ifdef PRECISION_BF16
enum {
    HOPPER_CONSUMERS = 2,                          // warpgroups
    HOPPER_THREADS = 128 * (1 + HOPPER_CONSUMERS), // the producer's warpgroup is the first
    HOPPER_STAGES = 2,
    // barriers of ptx_barrier_sync
    HOPPER_BOTH = 1,     // all consumers
    HOPPER_TURN = 2,     // + g: it is consumer g's turn to start matmuls
    HOPPER_CONSUMER = 4, // + g: the warps of consumer g
    HOPPER_PRODUCER_REGISTERS = 24,
    HOPPER_CONSUMER_REGISTERS = 240
};

/* The arguments of the kernels. A map describes a tensor to TMA: (B, T, heads, HD), in boxes of some tokens of a head
 * and 64 of its elements. */
typedef struct {
    AttentionCall call;
    CUtensorMap q, k, v, out, dout, dq, dk, dv;
} HopperCall;

// ---------------------------------------------------------------------------
// pipelines
//
// The n-th tile that goes through a pipeline is in stage n % 2. `full` and `empty` have one mbarrier for each stage.

typedef struct {
    uint64_t full[HOPPER_STAGES], empty[HOPPER_STAGES];
} HopperPipeline;

DEVICE void pipeline_init(HopperPipeline *p) {
    for (int i = 0; i < HOPPER_STAGES; i++) {
        ptx_mbarrier_init(&p->full[i], 1);
        ptx_mbarrier_init(&p->empty[i], 4 * HOPPER_CONSUMERS); // an arrival of each warp
    }
}
/* The producer waits until tile n's stage is empty, and announces its bytes. Returns the mbarrier for the loads. */
DEVICE uint64_t *pipeline_acquire(HopperPipeline *p, int n, int bytes) {
    ptx_mbarrier_wait(&p->empty[n % HOPPER_STAGES], (n / HOPPER_STAGES + 1) % 2);
    ptx_mbarrier_arrive_expect(&p->full[n % HOPPER_STAGES], bytes);
    return &p->full[n % HOPPER_STAGES];
}
DEVICE void pipeline_wait(HopperPipeline *p, int n) {
    ptx_mbarrier_wait(&p->full[n % HOPPER_STAGES], n / HOPPER_STAGES % 2);
}
/* A consumer's warp no longer reads tile n. */
DEVICE void pipeline_release(HopperPipeline *p, int n) {
    __syncwarp(); // lane 0 speaks for what all lanes have read
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&p->empty[n % HOPPER_STAGES]);
}

// ---------------------------------------------------------------------------
// tiles and matmuls of a warpgroup

/* Starts loading `rows` tokens of a head, from token t on, into a tile. */
template <int HD>
DEVICE void hopper_load(bf16 *tile, const CUtensorMap *map, uint64_t *full, int rows, int head, int t, int b) {
    UNROLL for (int d = 0; d < HD; d += PANEL) ptx_tma_load(tile + d * rows, map, full, d, head, t, b);
}

/* The registers of a 64 x 8 N accumulator, as ptx_wgmma wants them. */
template <int N> DEVICE float (&accumulator(float (&c)[1][N][4]))[4 * N] { return *(float(*)[4 * N]) c; }

/* Starts c (64, 8 N) = a (64, HD) b (8 N, HD)^T, both tiles of a_rows and b_rows rows: scores of queries and keys. */
template <int HD, int N>
DEVICE void wgmma_scores(float (&c)[1][N][4], const bf16 *a, int a_rows, const bf16 *b, int b_rows) {
    const uint64_t x = wgmma_descriptor(a, 0), y = wgmma_descriptor(b, 0);
    ptx_wgmma_fence();
    UNROLL for (int k = 0; k < HD; k += 16) {
        const uint64_t panel = k / PANEL * PANEL_BYTES / 16, within = k % PANEL * 2 / 16; // in units of 16 bytes
        ptx_wgmma<0, 0>(accumulator(c), x + panel * a_rows + within, y + panel * b_rows + within, k > 0);
    }
    ptx_wgmma_commit();
}

/* Starts c (64, HD) += w (64, 16 K) b (16 K, HD): a weighted sum of the rows of tile b; w is in registers. */
template <int HD, int K>
DEVICE void wgmma_weighted(float (&c)[1][HD / 8][4], uint32_t (&w)[1][K][4], const bf16 *b) {
    const uint64_t y = wgmma_descriptor(b, 16 * K * PANEL_BYTES);
    ptx_wgmma_settle(accumulator(c));
    UNROLL for (int k = 0; k < K; k++) ptx_wgmma_settle(w[0][k]);
    ptx_wgmma_fence();
    UNROLL for (int k = 0; k < K; k++) ptx_wgmma<1>(accumulator(c), w[0][k], y + k * 16 * PANEL_BYTES / 16, 1);
    ptx_wgmma_commit();
}
template <int PENDING, int N> DEVICE void wgmma_finish(float (&c)[1][N][4]) {
    ptx_wgmma_wait<PENDING>();
    ptx_wgmma_settle(accumulator(c));
}

/* Stores w (64, 16 K), the warps' rows of it, to a tile of `rows` rows. `warp` is the warp's number in its
 * warpgroup. */
template <int K> DEVICE void hopper_store(bf16 *tile, int rows, const uint32_t (&w)[1][K][4], int warp) {
    const int lane = opaque_lane(), row = warp * 16 + lane % 16;
    UNROLL for (int k = 0; k < K; k++)
        ptx_stmatrix_x4((char *)tile + panel_offset(rows, row, k * 16 + lane / 16 * 8), w[0][k]);
}

/* Consumer g writes w (64, HD) to tokens t … t + 63 of a head, through its 64 rows of a tile of `rows` rows, which
 * nothing may read any more. Tokens from the tensor's end on are left out. The consumer's first thread has to wait
 * until TMA has read the tile. */
template <int HD>
DEVICE void hopper_write(const CUtensorMap *map, bf16 *tile, int rows, const uint32_t (&w)[1][HD / 16][4], int g,
                         int head, int t, int b) {
    hopper_store(tile, rows, w, warp_of_block() % 4);
    ptx_fence_proxy_async();
    ptx_barrier_sync(HOPPER_CONSUMER + g, 128);
    if (threadIdx.x % 128) return;
    UNROLL for (int d = 0; d < HD; d += PANEL) ptx_tma_store(map, tile + d * rows, d, head, t, b);
    ptx_tma_store_commit();
}

// ---------------------------------------------------------------------------
// tiles of queries: of forward, and of dq in a fixed order of additions

typedef struct {
    HopperPipeline k, v;
    uint64_t q_full, q_empty;
} ForwardBarriers;

DEVICE void forward_barriers_init(ForwardBarriers *barriers) {
    pipeline_init(&barriers->k);
    pipeline_init(&barriers->v);
    ptx_mbarrier_init(&barriers->q_full, 1);
    ptx_mbarrier_init(&barriers->q_empty, 4 * HOPPER_CONSUMERS);
    ptx_mbarrier_init_fence();
}

/* A tile of queries: keys from first_key to end are those that some of them may see. */
typedef struct {
    AttentionPlace place;
    int t0, first_key, end;
} ForwardTile;

/* The i-th tile of this block; keys are taken KEYS at a time. The order of blocks is reversed in every second round, so
 * that the block with the largest tile of one round gets the smallest of the next. Returns false if there is no i-th
 * tile. */
template <int KEYS> DEVICE bool forward_tile(ForwardTile *tile, const AttentionCall &a, int i) {
    enum { QUERIES = 64 * HOPPER_CONSUMERS };
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + QUERIES - 1) / QUERIES, blocks = (int)gridDim.x;
    const int number = i * blocks + (i % 2 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x);
    if (number >= s.B * s.NH * tiles) return false;
    tile->place = attention_place(a, number, tiles, s.NH / s.NKV);
    const AttentionShape x = sequence_of(s, tile->place.b);
    const int t0 = (tiles - 1 - tile->place.order) * QUERIES, last = min(t0 + QUERIES, s.Tq);
    tile->t0 = t0;
    tile->end = seen_by(x, last - 1);
    tile->first_key = documents_meet(x.q_doc, t0, last, x.k_doc, 0, tile->end) / KEYS * KEYS;
    return true;
}
#endif

#endif
