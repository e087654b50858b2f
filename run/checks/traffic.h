/* traffic.h: the traffic formula: what one rank receives in one training step, from the options alone.
 *
 * This is the "expected" figure of ledger.json and plan.json, next to "dry_run" and "measured". It shares no code with
 * fsdp.h, the parallel headers or the mesh, because a prediction that shares code with the program cannot catch the
 * program's errors. At the end there is one function per axis. In a collective over n ranks, a rank receives n - 1
 * pieces, all but its own. A send counts what the rank sends.
 */
#ifndef TRAFFIC_H
#define TRAFFIC_H
#include "../../lib/comm/comm.h" // defines: Traffic, Axis, Collective
#include "../../lib/ops/ops.h"   // defines: LOGIT_ROWS, LOGITS
#include "../../llama3.h"        // defines: Llama3Config, TENSOR_ALIGN, int8_blocks, stage_blocks
#include "../setup/options.h"    // defines: Options

// ---------------------------------------------------------------------------
// one rank's part of the model

typedef struct {
    const Llama3Config *config; // of the whole model
    const RunSettings *options;
    int64_t tp, cp, pp, fsdp, replicas; // ranks of each axis; fsdp = dp_shard x cp
    int64_t pp_rank, fsdp_rank;
    int64_t has_block_0;       // 1 if this rank has the embedding and the first block
    int64_t is_first, is_last; // 1 if this rank's pipeline stages include the embedding, the head; else 0
    int64_t has_adapters;      // 1 with LoRA: the model is frozen, and only adapters have gradients
    int64_t micro_batches;     // per step
    int64_t tokens;            // of one micro-batch on this rank, after context parallelism
    int64_t blocks;            // transformer blocks of this rank, on all its virtual stages
    int64_t recomputed;        // those of them whose backward runs the whole forward again
    int64_t activation_bytes;  // of (tokens / tp, C): one rank's rows of the residual stream
} RankLayout;

typedef struct {            // this rank's FSDP units after the split by tp and pp, before sharding; padded elements
    int64_t block_units;    // units of blocks; with LoRA there are as many units of adapters
    int64_t end_units;      // units of the embedding and the head
    int64_t blocks, ends;   // elements of all units of blocks; of the embedding's and the head's
    int64_t adapters;       // elements of all units of adapters
    int64_t blocks_shard;   // bytes that each rank contributes when all units of blocks are all-gathered once
    int64_t ends_shard;     // the same for embedding and head
    int64_t tied;           // elements of the unit that holds embedding and head together
    int64_t largest;        // elements of the largest unit of blocks
    int64_t muon_blocks;    // blocks whose matrices this rank makes orthogonal
    int64_t gradient_units; // units that have a gradient: all of them, with LoRA only those of adapters
    int64_t gradient_bytes; // of these gradients, which are sent in fp32 or --reduce-dtype bf16
} UnitSizes;

static RankLayout rank_layout(const Llama3Config *c, int world, int rank, const RunSettings *run) {
    RankLayout l = ZERO;
    l.config = c;
    l.options = run;
    int64_t sizes[MESH_AXES] = {run->tp, run->cp, run->pp, run->dp_shard, run->dp_replicate}, given = 1;
    for (int a = 0; a < MESH_AXES; a++) given *= max_i64(1, sizes[a]);
    for (int a = 0; a < MESH_AXES; a++)
        if (!sizes[a]) sizes[a] = world / given; // auto
    l.tp = sizes[AXIS_TP];
    l.cp = sizes[AXIS_CP];
    l.pp = sizes[AXIS_PP];
    l.fsdp = sizes[AXIS_DP_SHARD] * l.cp;
    l.replicas = sizes[AXIS_DP_REPLICATE];
    l.pp_rank = rank / (l.tp * l.cp) % l.pp;
    int64_t shard_rank = rank / (l.tp * l.cp * l.pp) % sizes[AXIS_DP_SHARD];
    l.fsdp_rank = shard_rank * l.cp + rank / l.tp % l.cp;
    l.is_first = l.pp_rank == 0;
    l.is_last = l.pp_rank == l.pp - 1;
    l.has_adapters = c->base != BASE_TRAINED;
    l.micro_batches = run->accum;
    l.tokens = run->batch * (run->seq / l.cp);
    l.activation_bytes = (l.tokens + l.tp - 1) / l.tp * c->C * (int64_t)sizeof(floatX);
    int64_t every = run->recompute == RECOMPUTE_EVERY ? run->recompute_every : 0; // 0: no block is recomputed
    if (run->recompute == RECOMPUTE_FULL) every = 1;
    for (int v = 0; v < run->pp_chunks; v++) {
        int begin, stage = v * (int)l.pp + (int)l.pp_rank;
        int count = stage_blocks(c->L, (int)l.pp * run->pp_chunks, run->pp_light_ends, stage, &begin);
        l.blocks += count;
        l.has_block_0 |= stage == 0 && count > 0;
        for (int block = begin; block < begin + count; block++) l.recomputed += every && block % every == 0;
    }
    return l;
}

// ---------------------------------------------------------------------------
// sizes of units

static int64_t aligned(int64_t elements) { return round_up(elements, TENSOR_ALIGN); }

/* Bytes of one rank's shard of a frozen unit: blocks of 64 int8 weights with an fp32 scale each, and elements in the
 * compute dtype. */
static int64_t quantized_shard_bytes(int64_t blocks, int64_t elements, int64_t ranks) {
    return round_up(blocks, 4 * ranks) / ranks * (INT8_BLOCK + (int64_t)sizeof(float)) +
           round_up(elements, TENSOR_ALIGN * ranks) / ranks * (int64_t)sizeof(floatX);
}

typedef struct {
    int64_t elements;    // of the block's own tensors, each aligned
    int64_t adapters;    // of its adapters
    int64_t int8_blocks; // groups of 64 int8 weights with one scale, if the block is quantized
    int64_t unquantized; // elements of the norms, if they stay in the compute dtype
} BlockSize;

/* One transformer block after the split by tp: two norms (C), qkv, o, gate and up, down. LoRA adds A (rank, in) and
 * B (out, rank) to each target. */
static BlockSize block_size(const RankLayout *l) {
    const Llama3Config *c = l->config;
    BlockSize b = ZERO;
    int64_t C = c->C, F = (c->F + l->tp - 1) / l->tp;
    int64_t Q = c->NH / l->tp * c->HD, KV = c->NKV / l->tp * c->HD;
    const int64_t in[LORA_TARGETS] = {C, C, C, Q, C, C, F}, out[LORA_TARGETS] = {Q, KV, KV, C, F, F, C};
    b.elements = 2 * aligned(C) + aligned((Q + 2 * KV) * C) + aligned(C * Q) + aligned(2 * F * C) + aligned(C * F);
    for (int i = 0; i < LORA_TARGETS; i++) {
        b.int8_blocks += int8_blocks(in[i] * out[i]);
        if (l->has_adapters && c->lora_targets >> i & 1)
            b.adapters += aligned(c->lora_rank * in[i]) + aligned(out[i] * c->lora_rank);
    }
    if (c->base == BASE_INT8_ALL) b.int8_blocks += 2 * int8_blocks(C);
    else b.unquantized = 2 * aligned(C);
    return b;
}

/* --wrap size:N joins as many blocks to a unit as have N parameters together, within a virtual stage. Muon: the units
 * of all stages go to the fsdp ranks in turn; under no_shard each rank has all of them. */
static UnitSizes unit_sizes(const RankLayout *l) {
    const Llama3Config *c = l->config;
    const RunSettings *run = l->options;
    UnitSizes u = ZERO;
    BlockSize b = block_size(l);
    int64_t block_parameters = (2 * (c->NH / l->tp + c->NKV / l->tp) * c->HD * l->tp + 3 * c->F + 2) * (int64_t)c->C;
    int64_t joined = (run->wrap_size + block_parameters - 1) / block_parameters;
    joined = min_i64(c->L, max_i64(1, joined));
    int64_t pad = TENSOR_ALIGN * l->fsdp * l->replicas;
    for (int v = 0; v < run->pp_chunks; v++) {
        int begin, stage = v * (int)l->pp + (int)l->pp_rank;
        int64_t count = stage_blocks(c->L, (int)l->pp * run->pp_chunks, run->pp_light_ends, stage, &begin);
        for (int64_t done = 0; done < count; done += joined) {
            int64_t blocks = min_i64(joined, count - done), elements = round_up(blocks * b.elements, pad);
            int is_own = run->sharding == NO_SHARD || u.block_units % l->fsdp == l->fsdp_rank;
            u.block_units++;
            u.blocks += elements;
            u.largest = max_i64(u.largest, elements);
            u.adapters += round_up(blocks * b.adapters, pad);
            if (is_own) u.muon_blocks += blocks;
            if (c->base >= BASE_INT8)
                u.blocks_shard += quantized_shard_bytes(blocks * b.int8_blocks, blocks * b.unquantized, l->fsdp);
        }
    }
    if (c->base < BASE_INT8) u.blocks_shard = u.blocks / l->fsdp * (int64_t)sizeof(floatX);

    // The embedding (V, C) is on the first stage; the head (V, C) and the final norm (C) are on the last. A tied model
    // has one unit for both, unless a pipeline has its ends on different stages or --deterministic sums the gradients
    // of the two uses separately.
    int64_t VC = ((c->V + l->tp - 1) / l->tp) * (int64_t)c->C;
    int has_two_units = !c->tied || l->pp > 1 || run->deterministic, has_head_unit = l->is_last && has_two_units;
    u.tied = round_up(aligned(VC) + aligned(c->C), pad);
    u.end_units = l->is_first + has_head_unit;
    if (l->is_first) u.ends += c->tied ? u.tied : round_up(aligned(VC), pad);
    if (has_head_unit) u.ends += u.tied;
    u.ends_shard = u.ends / l->fsdp * (int64_t)sizeof(floatX);
    if (c->base == BASE_INT8_ALL) {
        int64_t embedding = int8_blocks(VC), head = int8_blocks(VC) + int8_blocks(c->C);
        u.ends_shard = l->is_first ? quantized_shard_bytes(has_two_units ? embedding : head, 0, l->fsdp) : 0;
        if (has_head_unit) u.ends_shard += quantized_shard_bytes(head, 0, l->fsdp);
    }
    u.gradient_units = l->has_adapters ? u.block_units : u.block_units + u.end_units;
    u.gradient_bytes = (run->reduce_dtype == REDUCE_BF16 ? 2 : 4) * (l->has_adapters ? u.adapters : u.blocks + u.ends);
    return u;
}

// ---------------------------------------------------------------------------
// one function per axis; each is called if there are several ranks on its axis

/* FSDP (Rajbhandari et al. 2020, section 7; PyTorch's FSDP notes). Weights, in the compute dtype or as int8: full_shard
 * all-gathers each unit of blocks twice per micro-batch (forward, backward), embedding and head once (the head stays
 * unsharded until its backward, the embedding's backward reads no weights; tied, they are one unit); shard_grad_op
 * all-gathers each unit once per step. Gradients: each unit is reduce-scattered once per micro-batch, or once per step
 * with --accumulate local. no_shard (DDP) gathers no weights; its all-reduce is a reduce-scatter and an all-gather.
 * Units of adapters are gathered together with their block's unit. Muon: for each n units of blocks, an all-to-all of
 * shards of momentum to the ranks that own the units, and one of the orthogonal matrices back. */
static void fsdp_traffic(Traffic out[COLLECTIVES], const RankLayout *l, const UnitSizes *u) {
    const RunSettings *run = l->options;
    int64_t k = l->micro_batches, n = l->fsdp, reductions = run->accumulate == ACCUMULATE_LOCALLY ? 1 : k;
    int64_t blocks_shard = u->blocks_shard + u->adapters / n * (int64_t)sizeof(floatX);
    int64_t block_gathers = run->sharding == FULL_SHARD ? 2 * k : 1; // per step, of each unit of blocks
    int64_t end_gathers = run->sharding == FULL_SHARD ? k : 1;
    Traffic reduce = {reductions * u->gradient_units, reductions * u->gradient_bytes / n * (n - 1)};
    Traffic gather = {block_gathers * u->block_units * (1 + l->has_adapters) + end_gathers * u->end_units,
                      (block_gathers * blocks_shard + end_gathers * u->ends_shard) * (n - 1)};
    out[ALL_GATHER] = run->sharding == NO_SHARD ? reduce : gather;
    out[REDUCE_SCATTER] = reduce;
    if (!uses_muon(run) || run->sharding == NO_SHARD) return;
    out[ALL_TO_ALL].calls = 2 * ((u->block_units + n - 1) / n);
    out[ALL_TO_ALL].bytes = out[ALL_TO_ALL].calls * (n - 1) * (u->largest / n) * (int64_t)sizeof(floatX);
}

/* Hybrid sharding (Zhao et al. 2023, section 3.2.2): once per step, replicas all-reduce their shard of each gradient:
 * a reduce-scatter and an all-gather of (replicas - 1) pieces of shard / replicas. */
static void replica_traffic(Traffic out[COLLECTIVES], const RankLayout *l, const UnitSizes *u) {
    Traffic reduce = {u->gradient_units, u->gradient_bytes / l->fsdp / l->replicas * (l->replicas - 1)};
    out[ALL_GATHER] = reduce;
    out[REDUCE_SCATTER] = reduce;
}

/* Tensor parallelism with sequence parallelism (Korthikanti et al. 2022, section 4.2.2), per micro-batch, in units of
 * (tokens / tp, C). A block's forward all-gathers 2 inputs and reduce-scatters 2 outputs; its backward all-gathers 2
 * output gradients and, again, the 2 inputs, and reduce-scatters 2 input gradients. A recomputed block uses the inputs
 * for both the recomputation and the gradients of weights, and reduce-scatters attention's output once more. Embedding
 * and head: one all-gather and one reduce-scatter each. The frozen embedding of a LoRA run has no backward: no
 * all-gather for it, and no gradient of the first block's input. The vocabulary-parallel loss all-gathers 3 floats per
 * token, in slices of --logit-rows tokens.
 * Once per step: gradients of what tp replicates are summed by an all-gather of fp32: the norms' in one call, or with
 * LoRA the unsplit half (rank, C) of each adapter, unit by unit. Muon: the ranks that own a block all-gather each of
 * its 7 matrices. */
static void tp_traffic(Traffic out[COLLECTIVES], const RankLayout *l, const UnitSizes *u) {
    const Llama3Config *c = l->config;
    int64_t k = l->micro_batches, others = l->tp - 1, V = (c->V + l->tp - 1) / l->tp;
    int64_t gathers = 6 * l->blocks + l->is_first * !l->has_adapters + l->is_last;
    int64_t scatters = 4 * l->blocks + l->recomputed + l->is_first + l->is_last - l->has_block_0 * l->has_adapters;
    int64_t rows = l->options->logit_rows;
    int64_t slice = min_i64(l->tokens, rows ? rows : max_i64(16, min_i64(LOGIT_ROWS, LOGITS / V & ~15)));
    int64_t loss_slices = l->is_last * ((l->tokens + slice - 1) / slice), loss_bytes = l->is_last * 12 * l->tokens;
    int64_t targets = __builtin_popcount(c->lora_targets);
    int64_t replicated =
        l->has_adapters ? targets * l->blocks * c->lora_rank * c->C : (2 * l->blocks + l->is_last) * c->C;
    int64_t replicated_calls = l->has_adapters ? u->block_units : replicated > 0;
    int64_t muon_blocks = uses_muon(l->options) ? u->muon_blocks : 0, F = (c->F + l->tp - 1) / l->tp;
    int64_t matrices = (2 * (c->NH + c->NKV) / l->tp * c->HD + 3 * F) * c->C; // elements of a block's 7 matrices
    out[ALL_GATHER].calls = k * (gathers + loss_slices) + replicated_calls + 7 * muon_blocks;
    out[ALL_GATHER].bytes = others * (k * (gathers * l->activation_bytes + loss_bytes) + 4 * replicated +
                                      muon_blocks * matrices * (int64_t)sizeof(floatX));
    out[REDUCE_SCATTER].calls = k * scatters;
    out[REDUCE_SCATTER].bytes = others * k * scatters * l->activation_bytes;
}

/* Context parallelism (Llama 3 paper, section 3.3.2): per micro-batch, a block's forward and its backward each
 * all-gather keys and values, (tokens, 2, NKV / tp, HD) of each rank, and backward reduce-scatters their gradients. A
 * recomputed block gathers them once more. */
static void cp_traffic(Traffic out[COLLECTIVES], const RankLayout *l) {
    const Llama3Config *c = l->config;
    int64_t k = l->micro_batches, gathers = k * (2 * l->blocks + l->recomputed), scatters = k * l->blocks;
    int64_t kv_bytes = l->tokens * 2 * (c->NKV / l->tp) * c->HD * (int64_t)sizeof(floatX);
    out[ALL_GATHER].calls = gathers;
    out[ALL_GATHER].bytes = (l->cp - 1) * gathers * kv_bytes;
    out[REDUCE_SCATTER].calls = scatters;
    out[REDUCE_SCATTER].bytes = (l->cp - 1) * scatters * kv_bytes;
}

/* Pipeline parallelism (Narayanan et al. 2021, section 2.2): per micro-batch and virtual stage, one send of the
 * activations to the next stage and one of their gradient to the previous one. The first stage has no previous, the
 * last no next. The two ends of a tied model send each other their shard of its gradient (fp32) once per step. */
static void pp_traffic(Traffic out[COLLECTIVES], const RankLayout *l, const UnitSizes *u) {
    int64_t messages = l->micro_batches * (2 * l->options->pp_chunks - l->is_first - l->is_last);
    int64_t tied_ends = l->config->tied && (l->is_first || l->is_last) && !l->has_adapters;
    int64_t tied_shard = u->tied / (l->options->sharding == NO_SHARD ? 1 : l->fsdp);
    Traffic each_way = {messages + tied_ends, messages * l->activation_bytes + tied_ends * tied_shard * 4};
    out[SEND] = each_way;
    out[RECEIVE] = each_way;
}

/* Once per step every rank tells all others its report (loss, gradient norm, hashes), with --out or --outlier-window
 * also which samples it consumed, 8 bytes each, and with --z-loss the sum of its z-losses. */
static void world_traffic(Traffic out[COLLECTIVES], const RankLayout *l, int world, int64_t report_bytes) {
    const RunSettings *run = l->options;
    int64_t samples_bytes = run->out || run->outlier_window ? (int64_t)sizeof(int64_t) * run->accum * run->batch : 0;
    int64_t z_loss_bytes = run->z_loss > 0 ? (int64_t)sizeof(ExactSum) : 0;
    out[ALL_GATHER].calls = 1 + (samples_bytes > 0) + (z_loss_bytes > 0);
    out[ALL_GATHER].bytes = (world - 1) * (report_bytes + samples_bytes + z_loss_bytes);
}

/* The traffic formula for one step of `rank`. `report_bytes`: the size of the report that ends a step. */
static void expected_traffic(Traffic expected[AXES][COLLECTIVES], const Llama3Config *config, int world, int rank,
                             const RunSettings *options, size_t report_bytes) {
    RankLayout layout = rank_layout(config, world, rank, options);
    UnitSizes units = unit_sizes(&layout);
    memset(expected, 0, sizeof(Traffic) * AXES * COLLECTIVES);
    if (layout.tp > 1) tp_traffic(expected[AXIS_TP], &layout, &units);
    if (layout.cp > 1) cp_traffic(expected[AXIS_CP], &layout);
    if (layout.pp > 1) pp_traffic(expected[AXIS_PP], &layout, &units);
    if (layout.fsdp > 1) fsdp_traffic(expected[AXIS_FSDP], &layout, &units);
    if (layout.replicas > 1) replica_traffic(expected[AXIS_DP_REPLICATE], &layout, &units);
    if (world > 1) world_traffic(expected[AXIS_WORLD], &layout, world, (int64_t)report_bytes);
}

#endif
