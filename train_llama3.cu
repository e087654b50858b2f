/* train_llama3.cu: trains Llama 3 with fully sharded data parallelism, and tensor, context and pipeline parallelism
 * over it. Reads from top to bottom: the model (block forward, block backward), one training step, evaluation,
 * generation, main. Options: options.h.
 *
 * Every piece of arithmetic is an op (kernels.h), every exchange a collective or a message (comm.h), every
 * buffer comes from an arena (device.h). So the same code trains, and, on a dry-run device, tells the memory,
 * FLOPs and traffic of any rank before anything is allocated.
 */
#include "lib/device.h"            // defines: floatX, Device, arena_alloc, user_error, run_failure
#include "lib/comm.h"              // defines: Mesh (mesh.h), Comm, all_gather_now, comm_open
#include "llama3.h"                // defines: Llama3Config, TensorTable, rope_table
#include "lib/ops.h"               // defines: the ops: linear_forward, attention_backward, adamw, …
#include "fsdp.h"                  // defines: Fsdp, fsdp_unshard, fsdp_reshard, fsdp_reduce_gradients
#include "optimizer.h"             // defines: Optimizer, optimizer_step, learning_rate_at, clip_coefficient
#include "lora.h"                  // defines: lora_linear_forward, lora_linear_backward
#include "tensor_parallel.h"       // defines: tp_all_gather_tokens, tp_reduce_scatter_tokens, tp_cross_entropy
#include "context_parallel.h"      // defines: cp_all_gather_kv, cp_reduce_scatter_kv
#include "pipeline_parallel.h"     // defines: Schedule, PipelineStep, pipeline_source, pipeline_target
#include "shared_gradients.h"      // defines: sum_shared_gradients
#include "run/options.h"           // defines: Options, options_parse, options_write, number_after_colon
#include "dataloader.h"            // defines: Dataset, Sampler, Loader
#include "tokenizer.h"             // defines: Tokenizer, tokenizer_encode, tokenizer_decode
#include "run/safetensors.h"       // defines: StFiles, model_weights_open
#include "run/out_dir.h"           // defines: out_directory_open, make_directories
#include "run/checkpoint.h"        // defines: Checkpoint, checkpoint_open, weights_load
#include "run/checkpoint_writer.h" // defines: CheckpointWriter, checkpoint_save, signals_install
#include "run/export.h"            // defines: model_export
#include "run/plan.h"              // defines: law_of_step, Ledger, ledger_check, Cluster, Plan, plan_print
#include "run/logger.h"            // defines: Logger, logger_step
#include "run/trace.h"             // defines: trace_write
#include "run/audit.h"             // defines: audit
#include "run/encode.h"            // defines: encode_or_decode
#include "run/weights.h"           // defines: BlockWeights, HeadWeights, block_weights, head_weights
#include "run/banner.h"            // defines: print_banner, layout_read_back, layout_write
#include "run/trainer.h"           // defines: Trainer, Model, Parallel, trainer_allocate, trainer_close, StepReport

// ---------------------------------------------------------------------------
// a block, forward. N = B·T tokens stand between matmuls; the residual stream has n of them, this tp rank's share

/* Causal self-attention of this rank's queries to `kv`. Positions continue through documents (Llama 3 paper, section
 * 3.2). */
static AttentionShape attention_shape(const Model *m, const KeyValue *kv) {
    const Llama3Config *c = &m->config;
    AttentionShape s = ZERO;
    s.B = m->B;
    s.Tq = m->T;
    s.Tk = kv->tokens;
    s.NH = c->NH;
    s.NKV = c->NKV;
    s.HD = c->HD;
    s.q_stride = qkv_width(c);
    s.k_stride = s.v_stride = kv->stride;
    s.o_stride = c->NH * c->HD;
    s.q_doc = m->own_docs;
    s.k_doc = m->docs;
    s.q_offset = m->past;
    if (m->cp->size > 1) { // this rank's queries are two halves, the second of which continues after a gap
        s.q_offset = cp_position(m->cp, 0, m->T);
        s.q_split = m->T / 2;
        s.q_gap = cp_position(m->cp, s.q_split, m->T) - s.q_split - s.q_offset;
    }
    return s;
}

/* Generation: appends the new tokens' keys and values to block l's cache, and returns those of all tokens so far. */
static KeyValue kv_cache_append(Model *m, int l, const floatX *qkv /* (N,QKV) */) {
    const Llama3Config *c = &m->config;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    size_t row = sizeof(floatX) * (size_t)(2 * KV), qkv_row = sizeof(floatX) * (size_t)(Q + 2 * KV);
    floatX *cache = m->kv_cache + (int64_t)l * m->num_positions * 2 * KV;
    device_copy_rows(m->dev, cache + m->past * 2 * KV, row, qkv + Q, qkv_row, row, m->T);
    KeyValue kv = {cache, cache + KV, 2 * KV, m->past + m->T};
    return kv;
}

/* a->attn_norm to m->sublayer_out, which the next RMSNorm adds to the residual stream. */
static void attention_sublayer_forward(Model *m, int l, const BlockWeights *w, BlockActivations *a) {
    const Llama3Config *c = &m->config;
    int N = m->B * m->T;
    const floatX *x = tp_all_gather_tokens(m->tp, a->attn_norm, "attention input");
    lora_linear_forward(&m->lora, a->qkv, x, &w->qkv, N);
    rope_forward(m->dev, a->qkv, qkv_width(c), m->cos_sin, m->positions + m->past, N, m->T, c->NH + c->NKV, c->HD);
    KeyValue kv = m->kv_cache ? kv_cache_append(m, l, a->qkv) : cp_all_gather_kv(m->cp, a->qkv);
    AttentionShape shape = attention_shape(m, &kv);
    attention_forward(m->dev, a->attn, a->lse, a->qkv, kv.k, kv.v, &shape);
    floatX *partial = tp_partial(m->tp, m->sublayer_out);
    lora_linear_forward(&m->lora, partial, a->attn, &w->o, N);
    tp_reduce_scatter_tokens(m->tp, m->sublayer_out, "attention output");
}

static void mlp_gate_up_forward(Model *m, const BlockWeights *w, BlockActivations *a) {
    const floatX *x = tp_all_gather_tokens(m->tp, a->mlp_norm, "MLP input");
    lora_linear_forward(&m->lora, a->gate_up, x, &w->gate_up, m->B * m->T);
}

/* a->mlp_norm to m->sublayer_out, which the next RMSNorm adds to the residual stream. */
static void mlp_forward(Model *m, const BlockWeights *w, BlockActivations *a) {
    int N = m->B * m->T;
    mlp_gate_up_forward(m, w, a);
    swiglu_forward(m->dev, a->swiglu, a->gate_up, N, m->config.F);
    floatX *partial = tp_partial(m->tp, m->sublayer_out);
    lora_linear_forward(&m->lora, partial, a->swiglu, &w->down, N);
    tp_reduce_scatter_tokens(m->tp, m->sublayer_out, "MLP output");
}

/* out = RMSNorm(stream), where stream = x + added is stored too; added NULL: stream is x itself. */
static void norm_forward(Model *m, floatX *out, float *rstd, floatX *stream, const floatX *x, const floatX *added,
                         const floatX *w) {
    rmsnorm_forward(m->dev, out, rstd, stream, x, added, w, m->config.norm_eps, m->tp->tokens, m->config.C);
}

/* Block l: from the previous block's residual stream, which is after_attention + sublayer_out of that block, to its
 * own. The first block of a stage finds the whole stream in a->x. */
static void block_forward(Model *m, int l) {
    BlockActivations *a = block_activations(m, l);
    device_phase(m->dev, "forward", m->table.units[table_block_unit(&m->table, l)].name);
    const BlockWeights w = block_weights(m, l, NO_GRADIENTS);
    if (l == m->stage->first_block) norm_forward(m, a->attn_norm, a->attn_rstd, NULL, a->x, NULL, w.attn_norm);
    else
        norm_forward(m, a->attn_norm, a->attn_rstd, a->x, block_activations(m, l - 1)->after_attention, m->sublayer_out,
                     w.attn_norm);
    attention_sublayer_forward(m, l, &w, a);
    norm_forward(m, a->mlp_norm, a->mlp_rstd, a->after_attention, a->x, m->sublayer_out, w.mlp_norm);
    mlp_forward(m, &w, a);
}

/* Activation checkpointing: recomputes what the block did not keep, into buffers that all such blocks share. The bits
 * are those of the forward pass, since the norms read the stored residual stream. */
static void block_recompute(Model *m, int l, const BlockWeights *w, BlockActivations *a) {
    if (a->keep == KEEP_ALL) return;
    m->dev->recomputing = 1;
    norm_forward(m, a->attn_norm, a->attn_rstd, NULL, a->x, NULL, w->attn_norm);
    if (a->keep == KEEP_INPUT) {
        attention_sublayer_forward(m, l, w, a);
        norm_forward(m, a->mlp_norm, a->mlp_rstd, a->after_attention, a->x, m->sublayer_out, w->mlp_norm);
        mlp_gate_up_forward(m, w, a);
    } else {
        norm_forward(m, a->mlp_norm, a->mlp_rstd, NULL, a->after_attention, NULL, w->mlp_norm);
    }
    swiglu_forward(m->dev, a->swiglu, a->gate_up, m->B * m->T, m->config.F);
    m->dev->recomputing = 0;
}

// ---------------------------------------------------------------------------
// a block, backward: each function mirrors its forward, last line first

/* m->d_x, the gradient of the MLP's output, to m->d_norm, that of its normalized input. */
static void mlp_backward(Model *m, const BlockWeights *w, BlockActivations *a) {
    int N = m->B * m->T;
    const floatX *d_out = tp_all_gather_tokens(m->tp, m->d_x, "d MLP output");
    lora_linear_backward(&m->lora, m->d_swiglu, d_out, a->swiglu, &w->down, N);
    floatX *d_gate_up = a->gate_up; // in place: nothing reads gate and up after this
    swiglu_backward(m->dev, d_gate_up, m->d_swiglu, a->gate_up, N, m->config.F);
    const floatX *x = tp_all_gather_tokens(m->tp, a->mlp_norm, "MLP input");
    floatX *partial = tp_partial(m->tp, m->d_norm);
    lora_linear_backward(&m->lora, partial, d_gate_up, x, &w->gate_up, N);
    tp_reduce_scatter_tokens(m->tp, m->d_norm, "d MLP input");
}

/* m->d_x, the gradient of attention's output, to m->d_norm, that of its normalized input. */
static void attention_sublayer_backward(Model *m, const BlockWeights *w, BlockActivations *a) {
    const Llama3Config *c = &m->config;
    int N = m->B * m->T;
    const floatX *d_out = tp_all_gather_tokens(m->tp, m->d_x, "d attention output");
    lora_linear_backward(&m->lora, m->d_attn, d_out, a->attn, &w->o, N);
    KeyValue kv = cp_all_gather_kv(m->cp, a->qkv);
    AttentionShape shape = attention_shape(m, &kv);
    floatX *dk = cp_key_gradient(m->cp, m->d_qkv), *dv = dk + (int64_t)c->NKV * c->HD;
    attention_backward(m->dev, m->d_qkv, dk, dv, m->d_attn, a->attn, a->lse, a->qkv, kv.k, kv.v, &shape);
    cp_reduce_scatter_kv(m->cp, m->d_qkv);
    rope_backward(m->dev, m->d_qkv, qkv_width(c), m->cos_sin, m->positions, N, m->T, c->NH + c->NKV, c->HD);
    const floatX *x = tp_all_gather_tokens(m->tp, a->attn_norm, "attention input");
    floatX *partial = tp_partial(m->tp, m->d_norm);
    lora_linear_backward(&m->lora, partial, m->d_qkv, x, &w->qkv, N);
    tp_reduce_scatter_tokens(m->tp, m->d_norm, "d attention input");
}

/* Adds the gradient through a norm, from m->d_norm, to m->d_x: the residual stream feeds both the norm and the sum. */
static void norm_backward(Model *m, float *d_w, const floatX *x, const float *rstd, const floatX *w) {
    rmsnorm_backward(m->dev, m->d_x, d_w, m->d_norm, m->d_x, x, rstd, w, m->tp->tokens, m->config.C);
}

/* Block l: m->d_x, the gradient of the residual stream after the block, becomes that before it. */
static void block_backward(Model *m, int l, int micro_batch) {
    BlockActivations *a = block_activations(m, l);
    device_phase(m->dev, "backward", m->table.units[table_block_unit(&m->table, l)].name);
    const BlockWeights w = block_weights(m, l, micro_batch);
    block_recompute(m, l, &w, a);
    mlp_backward(m, &w, a);
    norm_backward(m, w.d_mlp_norm, a->after_attention, a->mlp_rstd, w.mlp_norm);
    attention_sublayer_backward(m, &w, a);
    norm_backward(m, w.d_attn_norm, a->x, a->attn_rstd, w.attn_norm);
}

// ---------------------------------------------------------------------------
// embedding and head

/* m->ids (N) to the residual stream before the stage's first block. */
static void embed_forward(Model *m) {
    FsdpUnit *unit = &m->fsdp->units[m->table.embed];
    const UnitTensors t = unit_tensors(m->fsdp, unit, 0, NO_GRADIENTS);
    floatX *partial = tp_partial(m->tp, m->blocks[0].x);
    embedding_forward(m->dev, partial, weight_of(&t, W_EMBED), m->ids, m->tp->first_vocabulary, m->B * m->T,
                      m->config.C, m->config.V);
    tp_reduce_scatter_tokens(m->tp, m->blocks[0].x, "embedding");
}

static void embed_backward(Model *m, int micro_batch) {
    FsdpUnit *unit = &m->fsdp->units[m->table.embed];
    float *d_embed = fsdp_gradients(m->fsdp, unit, micro_batch) + unit->unit->offsets[W_EMBED];
    const floatX *d_x = tp_all_gather_tokens(m->tp, m->d_x, "d embedding");
    embedding_backward(m->dev, d_embed, d_x, m->ids, m->tp->first_vocabulary, m->B * m->T, m->config.C, m->config.V);
}

/* The residual stream that the head reads: of a stage without blocks its input. */
static floatX *head_input(Model *m) { return m->stage->num_blocks ? m->final_x : m->blocks[0].x; }

/* Returns the final norm of all tokens, (N, C), from the residual stream after the last block. */
static const floatX *final_norm_forward(Model *m, const HeadWeights *w) {
    floatX *x = head_input(m);
    if (m->stage->num_blocks)
        norm_forward(m, m->final_norm, m->final_rstd, x, m->blocks[m->num_kept - 1].after_attention, m->sublayer_out,
                     w->norm);
    else norm_forward(m, m->final_norm, m->final_rstd, NULL, x, NULL, w->norm);
    return tp_all_gather_tokens(m->tp, m->final_norm, "head input");
}

/* Logits and losses of tokens [first, first + count). With `with_gradients` m->logits become their own gradients. */
static void head_chunk_forward(Model *m, const HeadWeights *w, const floatX *x /* (N,C) */, int first, int count,
                               int with_gradients) {
    int C = m->config.C, V = m->config.V;
    linear_forward_fp32(m->dev, m->logits, x + (int64_t)first * C, w->head, count, C, V);
    tp_cross_entropy(m->tp, m->losses + first, m->logits, m->targets + first, count, V, with_gradients);
}

static void head_chunk_backward(Model *m, const HeadWeights *w, floatX *d_x /* (N,C) */, const floatX *x, int first,
                                int count) {
    int C = m->config.C, V = m->config.V;
    int64_t at = (int64_t)first * C, stride = (int64_t)V * (int64_t)(sizeof(float) / sizeof(floatX));
    const floatX *d_logits = (const floatX *)m->logits; // each row lies at the start of its row of logits
    linear_backward_input(m->dev, d_x + at, d_logits, stride, w->head, count, C, V);
    if (w->d_head) linear_backward_weight(m->dev, w->d_head, d_logits, stride, x + at, count, C, V, first > 0);
}

/* Adds the losses of this rank's tokens to those of the step; all tp ranks know the losses of all N tokens. */
static void add_losses(Model *m) {
    exact_total(m->dev, m->loss_sum, m->losses + (int64_t)m->tp->tokens * m->tp->rank, m->tp->tokens);
}

/* The losses of a micro-batch, a chunk of tokens at a time: the logits of all tokens never exist at once. */
static void head_forward(Model *m) {
    int N = m->B * m->T;
    device_phase(m->dev, "loss", m->table.units[m->table.head].name);
    const HeadWeights w = head_weights(m, NO_GRADIENTS);
    const floatX *x = final_norm_forward(m, &w);
    for (int first = 0; first < N; first += m->logit_rows)
        head_chunk_forward(m, &w, x, first, (int)min_i64(m->logit_rows, N - first), 0);
    add_losses(m);
}

/* The same with gradients, into m->d_x. Each chunk goes backward while its logits are there. */
static void head_forward_backward(Model *m, int micro_batch) {
    int N = m->B * m->T;
    device_phase(m->dev, "loss", m->table.units[m->table.head].name);
    const HeadWeights w = head_weights(m, micro_batch);
    const floatX *x = final_norm_forward(m, &w);
    floatX *partial = tp_partial(m->tp, m->d_norm);
    for (int first = 0; first < N; first += m->logit_rows) {
        int count = (int)min_i64(m->logit_rows, N - first);
        head_chunk_forward(m, &w, x, first, count, 1);
        head_chunk_backward(m, &w, partial, x, first, count);
    }
    tp_reduce_scatter_tokens(m->tp, m->d_norm, "d head input");
    rmsnorm_backward(m->dev, m->d_x, w.d_norm, m->d_norm, NULL, head_input(m), m->final_rstd, w.norm, m->tp->tokens,
                     m->config.C);
    add_losses(m);
}

// ---------------------------------------------------------------------------
// the blocks of a pipeline stage with FSDP: each is unsharded before it computes and resharded after it

/* The adapters of a unit of blocks; NULL: there are none. */
static FsdpUnit *adapters_of(Model *m, int unit) {
    int block = m->table.units[unit].first_block;
    return m->config.lora_rank ? &m->fsdp->units[table_block_adapters(&m->table, block)] : NULL;
}

/* Starts to unshard a unit of blocks and its adapters. */
static void blocks_prefetch(Model *m, int unit) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_prefetch(m->fsdp, &m->fsdp->units[unit]);
    if (adapters) fsdp_prefetch(m->fsdp, adapters);
}
static void blocks_reshard(Model *m, int unit, ReshardPoint now) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_reshard(m->fsdp, &m->fsdp->units[unit], now);
    if (adapters) fsdp_reshard(m->fsdp, adapters, now);
}

/* The unit after the stage's blocks. */
static int stage_end(const Model *m) {
    const Stage *stage = m->stage;
    if (!stage->num_blocks) return stage->first_unit;
    return table_block_unit(&m->table, stage->first_block + stage->num_blocks - 1) + 1;
}

/* While `unit` computes, FSDP all-gathers the following units: of blocks as many as --slots allows, then the head. */
static void prefetch_forward(Model *m, int unit) {
    int last = stage_end(m) - 1, first = (int)max_i64(unit + 1, m->stage->first_unit);
    for (int next = first; next <= last && next < unit + m->opt->slots; next++) blocks_prefetch(m, next);
    if (unit == last && stage_has_loss(m)) fsdp_prefetch(m->fsdp, &m->fsdp->units[m->table.head]);
}
static void prefetch_backward(Model *m, int unit) {
    for (int next = unit - 1; next >= m->stage->first_unit && next > unit - m->opt->slots; next--)
        blocks_prefetch(m, next);
}

static void stage_embed_forward(Model *m, ReshardPoint now) {
    FsdpUnit *embed = &m->fsdp->units[m->table.embed];
    device_phase(m->dev, "forward", embed->unit->name);
    fsdp_prefetch(m->fsdp, embed);
    prefetch_forward(m, m->table.embed);
    embed_forward(m);
    if (!table_is_tied(&m->table)) fsdp_reshard(m->fsdp, embed, now); // tied: the head needs it too
}

static void stage_embed_backward(Model *m, int micro_batch, ReshardPoint now) {
    FsdpUnit *embed = &m->fsdp->units[m->table.embed];
    device_phase(m->dev, "backward", embed->unit->name);
    if (!embed->unit->frozen) embed_backward(m, micro_batch);
    fsdp_reshard(m->fsdp, embed, now); // under ZeRO-2 it is unsharded until here
    if (!embed->unit->frozen) fsdp_reduce_gradients(m->fsdp, embed, micro_batch);
}

/* From the first block's x to the residual stream after the last block: its after_attention + sublayer_out. */
static void stage_blocks_forward(Model *m, ReshardPoint now) {
    const Stage *stage = m->stage;
    for (int l = stage->first_block; l < stage->first_block + stage->num_blocks; l++) {
        int unit = table_block_unit(&m->table, l);
        const Unit *blocks = &m->table.units[unit];
        blocks_prefetch(m, unit);
        prefetch_forward(m, unit);
        block_forward(m, l);
        if (l == blocks->first_block + blocks->num_blocks - 1) blocks_reshard(m, unit, now);
    }
}

/* From m->d_x after the stage's last block to m->d_x before its first. The gradients of a unit are reduced to their
 * shards while the next unit computes. */
static void stage_blocks_backward(Model *m, int micro_batch, ReshardPoint now) {
    const Stage *stage = m->stage;
    for (int l = stage->first_block + stage->num_blocks - 1; l >= stage->first_block; l--) {
        int unit = table_block_unit(&m->table, l);
        blocks_prefetch(m, unit);
        block_backward(m, l, micro_batch);
        if (l > m->table.units[unit].first_block) continue; // the unit has more blocks
        blocks_reshard(m, unit, now);
        prefetch_backward(m, unit - 1);
        FsdpUnit *trained = adapters_of(m, unit) ? adapters_of(m, unit) : &m->fsdp->units[unit];
        fsdp_reduce_gradients(m->fsdp, trained, micro_batch);
    }
}

// ---------------------------------------------------------------------------
// the steps of the pipeline's schedule (pipeline_parallel.h); one rank is a pipeline of one stage

typedef struct {
    const int32_t *inputs, *targets; // (B, T)
    const int32_t *docs;             // (B, T·cp); NULL without --doc-mask
    const int32_t *own_docs;         // (B, T)
} MicroBatch;                        // in host memory; NULL: the device has it already

static MicroBatch micro_batch_of(const Model *m, const StepBatch *batch, int micro_batch) {
    int64_t at = (int64_t)micro_batch * m->B * m->T;
    MicroBatch b = {batch->inputs + at, batch->targets + at, NULL, NULL};
    if (batch->docs) b.docs = batch->docs + at * m->cp->size;
    if (batch->docs) b.own_docs = batch->own_docs + at;
    return b;
}

/* Copies to the device what the current stage needs of a micro-batch. In a pipeline it is copied again for backward:
 * other micro-batches have come in between. */
static void feed_micro_batch(Model *m, const MicroBatch *b) {
    size_t bytes = sizeof(int32_t) * (size_t)m->B * (size_t)m->T;
    if (b->inputs && stage_embeds(m)) device_feed(m->dev, m->ids, b->inputs, bytes);
    if (b->targets && stage_has_loss(m)) device_feed(m->dev, m->targets, b->targets, bytes);
    if (b->docs) device_feed(m->dev, m->docs, b->docs, bytes * (size_t)m->cp->size);
    if (b->docs && m->own_docs != m->docs) device_feed(m->dev, m->own_docs, b->own_docs, bytes);
}

/* A micro-batch through this rank's stage, from its tokens or the previous stage's output to the next stage's input. The
 * last stage stops before the head. */
static void stage_forward(Model *m, Pipeline *pipeline, const PipelineStep *step, const MicroBatch *batch,
                          ReshardPoint now) {
    model_enter_stage(m, step->stage, step->activation_set);
    feed_micro_batch(m, batch);
    if (stage_embeds(m)) stage_embed_forward(m, now);
    else prefetch_forward(m, m->stage->first_unit - 1);
    pipeline_receive(pipeline, step, m->blocks[0].x);
    stage_blocks_forward(m, now);
    if (stage_has_loss(m)) return;
    PipelineMessage *out = pipeline_output(pipeline, step);
    if (m->stage->num_blocks)
        residual_add(m->dev, out->data, m->blocks[m->num_kept - 1].after_attention, m->sublayer_out,
                     (int64_t)m->tp->tokens * m->config.C);
    else device_copy(m->dev, out->data, m->blocks[0].x, pipeline->message_bytes);
    pipeline_send(pipeline, step, out);
}

/* The micro-batch's way back: gradients of the SUM of its losses, not of their mean. */
static void stage_backward(Model *m, Pipeline *pipeline, const PipelineStep *step, const MicroBatch *batch) {
    int last = step->micro_batch == pipeline->schedule.micro_batches - 1;
    ReshardPoint now = last ? AFTER_LAST_USE : AFTER_BACKWARD;
    model_enter_stage(m, step->stage, step->activation_set);
    if (pipeline->schedule.pp > 1) feed_micro_batch(m, batch); // else it is still there
    int end = stage_end(m);
    prefetch_backward(m, end);
    if (stage_has_loss(m)) { // its forward was the previous step
        FsdpUnit *head = &m->fsdp->units[m->table.head];
        head_forward_backward(m, step->micro_batch);
        fsdp_reshard(m->fsdp, head, now);
        prefetch_backward(m, end - 1); // before the reduction, behind which it would wait on a shared connection
        if (!table_is_tied(&m->table) && !head->unit->frozen) // tied: the embedding adds to this gradient first
            fsdp_reduce_gradients(m->fsdp, head, step->micro_batch);
    }
    pipeline_receive(pipeline, step, m->d_x);
    stage_blocks_backward(m, step->micro_batch, now);
    if (stage_embeds(m)) {
        stage_embed_backward(m, step->micro_batch, now);
        return;
    }
    PipelineMessage *out = pipeline_output(pipeline, step);
    device_copy(m->dev, out->data, m->d_x, pipeline->message_bytes);
    pipeline_send(pipeline, step, out);
}

/* All micro-batches of a step, forward and backward, in the order of the schedule. */
static void run_schedule(Model *m, Pipeline *pipeline, const StepBatch *batch) {
    const Schedule *s = &pipeline->schedule;
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep *step = &s->steps[i];
        MicroBatch micro_batch = micro_batch_of(m, batch, step->micro_batch);
        pipeline_start_receives(pipeline, step);
        if (step->kind == PIPE_FORWARD) stage_forward(m, pipeline, step, &micro_batch, AFTER_FORWARD);
        else stage_backward(m, pipeline, step, &micro_batch);
    }
    pipeline_finish(pipeline);
}

/* Forward only, of the micro-batch that is on the device; the last stage stops before the head. */
static void model_forward(Model *m, Pipeline *pipeline) {
    const MicroBatch on_device = ZERO;
    for (int v = 0; v < m->table.part.virtual_stages; v++) {
        PipelineStep step = {PIPE_FORWARD, 0, v, 0, 0, 0};
        if (pipeline_source(&pipeline->schedule, &step) >= 0) pipeline_start_receive(pipeline, &step);
        stage_forward(m, pipeline, &step, &on_device, AFTER_LAST_USE);
    }
}

// ---------------------------------------------------------------------------
// one training step

/* All ranks have told of their step: same exchanges in the same order as rank 0? other samples than those before it? */
static void check_reports(const Trainer *trainer, int64_t step, int64_t first_sample) {
    const StepReport *all = trainer->reports, *mine = &all[trainer->parallel.rank];
    int distinct = sampler_global_batch(&trainer->loader.sampler) <=
                   trainer->data->windows; // else padding repeats samples within a step
    for (int a = 0; a < AXES; a++)
        for (int i = 0; i < trainer->parallel.rank;
             i++) // on one host exchanges were compared as they started; this also compares hosts
            if (mine->order[a] != all[i].order[a] &&
                mesh_together(&trainer->parallel.mesh, trainer->parallel.rank, i, (Axis)a))
                run_failure("step %" PRId64
                            ": ranks %d and %d did not start the same exchanges over %s in the same order",
                            step, i, trainer->parallel.rank, axis_names[a]);
    for (int i = 0; i < trainer->parallel.rank; i++) {
        int axis = channels_differ(i, all[i].channels, trainer->parallel.rank, mine->channels);
        if (axis >= 0)
            run_failure("step %" PRId64 ": what ranks %d and %d sent each other over %s is not what they awaited", step,
                        i, trainer->parallel.rank, axis_names[axis]);
    }
    if (mine->setup != all[0].setup)
        run_failure("step %" PRId64 ": rank %d shuffles samples or draws weights from another seed than rank 0", step,
                    trainer->parallel.rank);
    for (int i = 0; i < trainer->parallel.rank; i++) {
        int share = mesh_data_rank(&trainer->parallel.mesh, i) ==
                    mesh_data_rank(&trainer->parallel.mesh, trainer->parallel.rank),
            same = mine->samples_hash == all[i].samples_hash;
        if (same && !share && distinct)
            run_failure("step %" PRId64 ": ranks %d and %d train on the same samples (both start with window %" PRId64
                        "); data-parallel ranks must differ",
                        step, i, trainer->parallel.rank, first_sample);
        if (share && !same)
            run_failure("step %" PRId64 ": ranks %d and %d have parts of the same model for the same samples, but "
                        "train on different ones (rank %d starts with window %" PRId64 ")",
                        step, i, trainer->parallel.rank, trainer->parallel.rank, first_sample);
    }
}

/* The first tensor with a gradient that is not finite, of what this rank owns; -1: there is none. */
static int64_t first_bad_tensor(Trainer *trainer) {
    enum { CHUNK = 1 << 14 };
    float chunk[CHUNK];
    ShardPiece p;
    for (int i = 0; next_unique_piece(&trainer->parallel.fsdp, &i, &p);)
        for (int64_t done = 0; done < p.count; done += CHUNK) {
            int64_t n = min_i64(CHUNK, p.count - done);
            device_read(&trainer->parallel.dev, chunk, p.unit->grad + p.at + done, sizeof(float) * (size_t)n);
            for (int64_t e = 0; e < n; e++)
                if (!isfinite(chunk[e])) return p.tensor->index;
        }
    return -1;
}

/* Tells all ranks of this rank's part of the step, and hears of theirs. Here the host waits for the device: the only
 * time in a step. */
static void exchange_reports(Trainer *trainer, const StepBatch *batch, double start, double waited_before) {
    StepReport mine = ZERO;
    ExactSum sums[SUMS] = ZERO;
    gradient_squared_norm(&trainer->parallel.fsdp, &trainer->sums[SUM_SQUARED_NORM]);
    device_read(&trainer->parallel.dev, sums, trainer->sums, sizeof sums);
    exact_merge(&mine.loss, &sums[SUM_LOSS]);
    exact_merge(&mine.squared_norm, &sums[SUM_SQUARED_NORM]);
    mine.bad_tensor = mine.squared_norm.not_finite ? first_bad_tensor(trainer) : -1;
    mine.targets = mesh_tells_samples(&trainer->parallel.mesh, trainer->parallel.rank)
                       ? batch->num_targets
                       : 0; // of those that share them, one counts
    mine.samples_hash = batch->samples_hash;
    mine.setup = sampler_fingerprint(&trainer->loader.sampler) ^ mix64(trainer->parallel.fsdp.seed);
    mine.to_save = save_signals, mine.to_end = end_signals;
    mine.writing = is_writing(&trainer->writer);
    for (int a = 0; a < AXES; a++) mine.order[a] = (uint32_t)(trainer->parallel.comm.groups[a].order >> 32);
    channel_orders(&trainer->parallel.comm, mine.channels);
    mine.figures.seconds = seconds_now() - start;
    mine.figures.wait_seconds = trainer->parallel.comm.wait_seconds - waited_before;
    mine.figures.tokens = (int64_t)trainer->opt->batch * trainer->opt->seq * trainer->opt->accum /
                          mesh_stride(&trainer->parallel.mesh, AXIS_DP_SHARD); // its part of those that it shares
    mine.figures.memory = (int64_t)device_peak(&trainer->parallel.dev);
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "step report", &mine, trainer->reports, sizeof mine);
}

/* Loss and gradient norm are means over all targets of the step, of all ranks and micro-batches: sums of all, divided
 * once. */
static StepStats sum_reports(const Trainer *trainer) {
    StepStats s = ZERO;
    ExactSum loss = ZERO, squared_norm = ZERO;
    for (int i = 0; i < trainer->parallel.mesh.world && !trainer->parallel.dev.dry_run; i++) {
        const StepReport *report = &trainer->reports[i];
        exact_merge(&loss, &report->loss);
        exact_merge(&squared_norm, &report->squared_norm);
        s.targets += report->targets;
        trainer->figures[i] = report->figures;
    }
    s.loss = exact_value(&loss) / (double)max_i64(1, s.targets);
    s.grad_norm = sqrt(exact_value(&squared_norm)) / (double)max_i64(1, s.targets);
    s.skipped = !isfinite(s.loss) || !isfinite(s.grad_norm);
    return s;
}

/* Loss or gradient is not finite: every rank has the same sums, so all skip the update alike. Too many such steps end
 * the run. */
static void step_skip(Trainer *trainer, int64_t step, const StepStats *s) {
    char where[300];
    int owner = -1, source = -1, used = 0;
    for (int i = trainer->parallel.mesh.world - 1; i >= 0; i--) {
        int64_t bad = trainer->reports[i].bad_tensor;
        if (bad >= 0 && (owner < 0 || bad <= trainer->reports[owner].bad_tensor)) owner = i;
        if (trainer->reports[i].loss.not_finite) source = i;
    }
    if (owner >= 0)
        used = snprintf(where, sizeof where, "first in the gradient of %s, in the part of the sum that rank %d owns",
                        trainer->whole_table->tensors[trainer->reports[owner].bad_tensor].name, owner);
    else
        used = snprintf(where, sizeof where, "each gradient is finite, %s not",
                        isfinite(s->loss) ? "but the squares of some are" : "the loss is");
    if (source >= 0) snprintf(where + used, sizeof where - (size_t)used, "; the loss of rank %d itself is not", source);
    if (++trainer->progress.skips > trainer->opt->max_skips)
        run_failure("step %" PRId64 ": loss %g, gradient norm %g: not finite (%s), and --max-skips %d allows no more "
                    "of them: lower --lr, lengthen --warmup, or look at the data",
                    step, s->loss, s->grad_norm, where, trainer->opt->max_skips);
    if (trainer->parallel.rank) return;
    printf("step %6" PRId64 " | skipped, %" PRId64 " of at most %d: loss %g, gradient norm %g: not finite (%s)\n", step,
           trainer->progress.skips, trainer->opt->max_skips, s->loss, s->grad_norm, where);
    fflush(stdout);
}

static StepStats train_step(Trainer *trainer, int64_t step) { // step counts from 1
    const Options *o = trainer->opt;
    double start = seconds_now(), waited = trainer->parallel.comm.wait_seconds,
           exchanged = trainer->parallel.comm.exchange_seconds, polled = trainer->parallel.comm.poll_seconds;
    comm_clear_ledger(&trainer->parallel.comm);
    Span whole = span_begin(&trainer->parallel.dev, EVENT_STEP, STREAM_COMPUTE, "step", NULL, (double)step,
                            !is_timed(&trainer->parallel.dev));
    rank_state(trainer->parallel.comm.self, RANK_READING, start);
    StepBatch *batch = loader_next(&trainer->loader, &trainer->parallel.dev, o->timeout);
    rank_state(trainer->parallel.comm.self, RANK_COMPUTING, seconds_now());
    if (trainer->samples)
        collective_start(&trainer->parallel.comm, &trainer->samples_told, ALL_GATHER, AXIS_WORLD, "samples",
                         batch->windows, trainer->samples, sizeof(int64_t) * (size_t)trainer->loader.samples,
                         DTYPE_BYTE);
    device_zero(&trainer->parallel.dev, trainer->sums, sizeof *trainer->sums * SUMS);
    run_schedule(&trainer->model, &trainer->parallel.pipeline, batch);
    device_record_event(&trainer->parallel.dev, &batch->fed);
    fsdp_finish_gradients(&trainer->parallel.fsdp);
    device_phase(&trainer->parallel.dev, "optimizer", NULL);
    sum_shared_gradients(&trainer->shared_gradients);
    comm_wait(&trainer->parallel.comm, &trainer->samples_told);
    exchange_reports(trainer, batch, start, waited);
    int64_t first_sample = trainer->parallel.dev.dry_run ? 0 : batch->windows[0];
    loader_release(&trainer->loader, &trainer->parallel.dev);

    StepStats s = sum_reports(trainer);
    if (!trainer->parallel.dev.dry_run) check_reports(trainer, step, first_sample);
    const LearningRate rate = {o->lr, o->min_lr, o->warmup, o->steps};
    double clip = clip_coefficient(o->clip, s.grad_norm);
    s.lr = learning_rate_at(&rate, step);
    AdamW adam = {(float)s.lr, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay};
    if (s.skipped) step_skip(trainer, step, &s);
    else if (s.targets || trainer->parallel.dev.dry_run)
        optimizer_step(&trainer->optimizer, &adam, (float)(clip / (double)max_i64(1, s.targets)),
                       (int)++trainer->progress.updates);
    device_phase(&trainer->parallel.dev, NULL, NULL);
    span_end(&trainer->parallel.dev, whole, NULL, -1, 0);
    s.samples = sampler_global_batch(&trainer->loader.sampler);
    trainer->progress.step = step;
    trainer->progress.samples += s.samples;
    if (!trainer->parallel.dev.dry_run)
        trainer->progress.samples_in_epoch =
            sampler_position(&trainer->loader.sampler, step - 1, &trainer->progress.epoch) + s.samples;
    s.data_wait_seconds = trainer->loader.wait_seconds;
    s.wait_seconds = trainer->parallel.comm.wait_seconds - waited;
    s.communication_seconds = trainer->parallel.comm.exchange_seconds - exchanged;
    double blocked = s.wait_seconds + trainer->parallel.comm.poll_seconds - polled;
    s.overlap = s.communication_seconds > 0 ? fmax(0, 1 - blocked / s.communication_seconds) : 0;
    s.seconds = seconds_now() - start;
    return s;
}

// ---------------------------------------------------------------------------
// evaluation and generation

/* Mean loss over the first `max_batches` micro-batches of every rank (0: over all windows). Every target counts
 * once whatever the number of ranks: windows past the end have none. */
static double evaluate(Trainer *trainer, const Dataset *data, int64_t max_batches, int64_t *num_targets) {
    StepReport mine = ZERO; // its sums are all that is told here
    int B = trainer->opt->batch, T = trainer->opt->seq, cp = trainer->parallel.mesh.size[AXIS_CP],
        cp_rank = mesh_coordinate(&trainer->parallel.mesh, trainer->parallel.rank, AXIS_CP),
        ranks = mesh_data_ranks(&trainer->parallel.mesh);
    size_t bytes = sizeof(int32_t) * (size_t)B * (size_t)(T / cp);
    ExactSum sum = ZERO;
    Phase before = comm_phase(&trainer->parallel.comm, PHASE_VALIDATION);
    device_zero(&trainer->parallel.dev, trainer->sums, sizeof *trainer->sums * SUMS);
    int64_t batches =
        trainer->parallel.dev.dry_run ? 1 : (data->windows + (int64_t)B * ranks - 1) / ((int64_t)B * ranks);
    if (max_batches) batches = min_i64(batches, max_batches);
    for (int64_t i = 0; i < batches; i++) {
        char error[1024];
        for (int b = 0; b < B && !trainer->parallel.dev.dry_run; b++) {
            int32_t *inputs = trainer->eval_inputs + (int64_t)b * T, *targets = trainer->eval_targets + (int64_t)b * T;
            int n = dataset_window(
                data, (i * ranks + mesh_data_rank(&trainer->parallel.mesh, trainer->parallel.rank)) * B + b, inputs,
                targets, trainer->eval_raw, error, sizeof error);
            if (n < 0) user_error("%s", error);
            if (mesh_tells_samples(&trainer->parallel.mesh, trainer->parallel.rank)) mine.targets += n;
            if (trainer->eval_docs) document_ids(trainer->eval_docs + (int64_t)b * T, inputs, T, data->document_end);
            cp_select_halves(trainer->eval_inputs + (int64_t)b * (T / cp), inputs, T, cp, cp_rank),
                cp_select_halves(trainer->eval_targets + (int64_t)b * (T / cp), targets, T, cp, cp_rank);
        }
        if (trainer->model.table.embed >= 0)
            device_write(&trainer->parallel.dev, trainer->model.ids, trainer->eval_inputs, bytes);
        if (trainer->model.docs)
            device_write(&trainer->parallel.dev, trainer->model.docs, trainer->eval_docs, bytes * (size_t)cp);
        for (int b = 0; b < B && trainer->model.own_docs != trainer->model.docs; b++)
            cp_select_halves(trainer->eval_docs + (int64_t)b * (T / cp), trainer->eval_docs + (int64_t)b * T, T, cp,
                             cp_rank);
        if (trainer->model.own_docs != trainer->model.docs)
            device_write(&trainer->parallel.dev, trainer->model.own_docs, trainer->eval_docs, bytes);
        model_forward(&trainer->model, &trainer->parallel.pipeline);
        if (trainer->model.table.head < 0) continue;
        device_write(&trainer->parallel.dev, trainer->model.targets, trainer->eval_targets, bytes);
        head_forward(&trainer->model);
        fsdp_reshard(&trainer->parallel.fsdp, &trainer->parallel.fsdp.units[trainer->model.table.head], AFTER_LAST_USE);
    }
    device_phase(&trainer->parallel.dev, NULL, NULL);
    device_read(&trainer->parallel.dev, &sum, &trainer->sums[SUM_LOSS], sizeof sum);
    exact_merge(&mine.loss, &sum);
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "evaluation", &mine, trainer->reports, sizeof mine);
    comm_phase(&trainer->parallel.comm, before);
    ExactSum loss = ZERO;
    *num_targets = 0;
    for (int i = 0; i < trainer->parallel.mesh.world && !trainer->parallel.dev.dry_run; i++) {
        exact_merge(&loss, &trainer->reports[i].loss);
        *num_targets += trainer->reports[i].targets;
    }
    return exact_value(&loss) / (double)max_i64(1, *num_targets);
}

#include "run/generate.h" // defines: generate

// ---------------------------------------------------------------------------
// a rank: dry-run first, then run

/* One step of the rank with the arithmetic off: its memory, FLOPs and traffic; by a cluster's clock its time. */
static void dry_run_open_events(Trainer *trainer, const Job *j, int rank, int64_t max_events, CommEvents *events) {
    int64_t targets;
    trainer_bind(trainer, j, rank);
    device_open_dry_run(&trainer->parallel.dev, j->threads_per_rank, offloaded(&j->opt));
    trainer->parallel.dev.deterministic = j->opt.deterministic;
    trainer->parallel.dev.gpu = job_gpu_of_rank(j, rank),
    trainer->parallel.dev.by_nccl = j->transport != j->host_transport;
    ops_open(&trainer->parallel.dev, 0);
    trainer->parallel.dev.max_events = max_events;
    comm_open_dry_run(&trainer->parallel.comm, &trainer->parallel.dev, &j->mesh, rank);
    trainer_allocate(trainer, j);
    fsdp_init_weights(&trainer->parallel.fsdp, 0);
    if (trainer->parallel.fsdp.fingerprints) fsdp_check_replicas(&trainer->parallel.fsdp, 0);
    memset(trainer->parallel.dev.ops, 0, sizeof trainer->parallel.dev.ops);
    trainer->parallel.dev.num_events = 0;
    if (j->opt.cluster) trainer->parallel.dev.rates = &j->cluster.rates; // from here on the clock runs
    trainer->parallel.comm.events = events;
    if (trainer->model.training) train_step(trainer, trainer->progress.step + 1);
    else if (j->task == DO_EVAL) evaluate(trainer, &j->val, 1, &targets);
    else if (j->task == DO_GENERATE) generate(trainer, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (events) events->compute_after = trainer->parallel.dev.clock - events->compute_total;
    if (trainer->model.training) matmul_rate(&trainer->parallel.dev);
}

/* With --trace twice: the first dry run counts the events of a step, which tells how large the timeline is. `events`:
 * where the rank's exchanges are noted; NULL: nowhere. */
static void dry_run_open(Trainer *trainer, const Job *j, int rank, CommEvents *events) {
    dry_run_open_events(trainer, j, rank, 0, events);
    if (!j->opt.trace || events) return;
    int64_t of_step = trainer->parallel.dev.num_events + 2; // and a validation's, and a replica check's
    trainer_close(trainer);
    dry_run_open_events(trainer, j, rank, j->task == DO_PLAN ? of_step : min_i64(MAX_EVENTS, of_step * j->opt.steps),
                        NULL);
}

/* Saves what has come due, and lets an earlier checkpoint that is written become one. All ranks know the same. */
static void save_when_due(Trainer *trainer, int asked, int ends) {
    const Options *o = trainer->opt;
    int64_t step = trainer->progress.step, events = trainer->parallel.dev.num_events;
    double start = seconds_now();
    int is_save_step = o->save_every && step % o->save_every == 0;
    int due = trainer->writer.saved_step != step && (ends || (asked & SIGNAL_SAVE) || is_save_step);
    if (trainer->writer.files && (due || ends || !trainer->writing)) checkpoint_commit(&trainer->writer);
    if (due && trainer->parallel.rank == 0) logger_sync(&trainer->logger);
    if (due) checkpoint_save(&trainer->writer, &trainer->progress);
    if (ends && trainer->writer.files) checkpoint_commit(&trainer->writer);
    trace_as_one_event(&trainer->parallel.dev, events, "saving", start);
}

/* What signals ask for that was not acted on yet: of a signal that mpirun hands to all, each process hears in its own
 * time. Notes who still writes. */
static int signals_asked(Trainer *trainer) {
    int to_save = 0, to_end = 0;
    trainer->writing = 0;
    for (int i = 0; i < trainer->parallel.mesh.world; i++) {
        const StepReport *report = &trainer->reports[i];
        to_save = to_save > report->to_save ? to_save : report->to_save, to_end |= report->to_end,
        trainer->writing |= report->writing;
    }
    int asked = (to_save > trainer->saves_asked ? SIGNAL_SAVE : 0) | (to_end ? SIGNAL_END : 0);
    trainer->saves_asked = to_save;
    return asked;
}

/* One step and all that stands around it. Returns what signals asked for. */
static int train_and_log(Trainer *trainer, const Trainer *dry_run, int64_t step, double flops, double *rate) {
    const Options *o = trainer->opt;
    int first = step == trainer->resume_from->progress.step + 1, asked;
    int64_t targets, events;
    StepStats s = train_step(trainer, step);
    s.mfu = *rate > 0 ? flops / s.seconds / *rate : 0;
    asked = signals_asked(trainer);
    if (first) *rate = matmul_rate(&trainer->parallel.dev);
    if (first) check_first_step(trainer, dry_run);
    if (trainer->parallel.rank == 0) {
        const StepPlace at = {step, o->steps, o->seq};
        logger_step(&trainer->logger, at, &s, trainer->figures, &trainer->parallel.dev, &trainer->parallel.comm);
        logger_samples(&trainer->logger, step, trainer->progress.epoch, trainer->samples, trainer->loader.samples,
                       &trainer->parallel.mesh);
    }
    if (o->trace) device_synchronize_all(&trainer->parallel.dev); // what follows is no part of the step
    events = trainer->parallel.dev.num_events;
    double start = seconds_now();
    if (trainer->parallel.fsdp.fingerprints && o->check_replicas && step % o->check_replicas == 0)
        fsdp_check_replicas(&trainer->parallel.fsdp, step),
            trace_as_one_event(&trainer->parallel.dev, events, "replica check", start);
    if (!trainer->val->num_files || (step < o->steps && (!o->val_every || step % o->val_every))) return asked;
    events = trainer->parallel.dev.num_events, start = seconds_now();
    double loss = evaluate(trainer, trainer->val, o->val_batches, &targets);
    trace_as_one_event(&trainer->parallel.dev, events, "validation", start);
    if (!isfinite(loss))
        run_failure("step %" PRId64
                    ": validation loss %g: not finite; lower --lr, lengthen --warmup, or look at the data",
                    step, loss);
    if (trainer->parallel.rank == 0) logger_validation(&trainer->logger, step, loss, targets);
    return asked;
}

/* From the step behind the last one to --steps, or to the one in which a signal asks for the end. Returns whether it
 * came to --steps. */
static int train(Trainer *trainer, const Trainer *dry_run) {
    int64_t last = trainer->opt->steps, traced = 0;
    double flops = device_flops(&dry_run->parallel.dev, 0), rate = 0; // FLOP/s
    int ends = trainer->progress.step == last;
    timeline_truncate(&trainer->parallel.dev, 0);                      // the timeline begins here
    if (ends && trainer->opt->out) save_when_due(trainer, 0, 1); // nothing is left to train: a copy in --out
    while (!ends) {
        int64_t before = trainer->parallel.dev.num_events;
        int asked = train_and_log(trainer, dry_run, trainer->progress.step + 1, flops, &rate);
        if (before < trainer->parallel.dev.num_events &&
            trainer->parallel.dev.num_events <= trainer->parallel.dev.max_events)
            traced = trainer->progress.step;
        ends = trainer->progress.step == last || asked & SIGNAL_END;
        if (asked && trainer->parallel.rank == 0)
            printf("step %6" PRId64 " | a signal asks to save%s\n", trainer->progress.step,
                   asked & SIGNAL_END ? ", and to end" : "");
        if (trainer->opt->out) save_when_due(trainer, asked, ends);
    }
    if (trainer->opt->trace) {
        trace_write(&trainer->parallel.comm, trainer->opt->trace);
        if (trainer->parallel.rank == 0 && traced == last) printf("timeline of all steps: %s\n", trainer->opt->trace);
        if (trainer->parallel.rank == 0 && traced < last)
            printf("timeline of the first %" PRId64 " of %" PRId64 " steps: %s (it has room for %" PRId64
                   " events a rank)\n",
                   traced, last, trainer->opt->trace, trainer->parallel.dev.max_events);
    }
    return trainer->progress.step == last;
}

#include "plan/planner.h" // defines: Plan's dry runs and replay: plan_open, plan_main, write_plan

static void write_run_files(const Job *j, const Trainer *trainer) {
    Plan plan;
    FILE *f = logger_create(j->opt.out, "config.txt");
    options_write(trainer->opt, f);
    if (fclose(f)) user_error("cannot write config.txt under %s: %s", j->opt.out, strerror(errno));
    f = logger_create(j->opt.out, "layout.json");
    layout_write(f, &j->mesh, trainer->parallel.layout);
    if (fclose(f)) user_error("cannot write layout.json under %s: %s", j->opt.out, strerror(errno));
    plan_open(&plan, j, DRY_RUN_PARTS);
    write_plan(j, &plan, NULL);
    plan_close(&plan);
}

/* Opens for real what was dry-run: device, groups, shards, weights. */
static void trainer_open(Trainer *trainer, const Trainer *dry_run, Job *j, int rank) {
    trainer_bind(trainer, j, rank);
    if (OFFLOAD_IN_PLACE && offloaded(&j->opt))
        make_directories(j->opt.out); // by each rank: they may be on different hosts
    device_open(&trainer->parallel.dev, &dry_run->parallel.dev, j->opt.out, rank);
    ops_open(&trainer->parallel.dev, rank == 0);
    comm_open(&trainer->parallel.comm, &trainer->parallel.dev, &j->mesh, rank, j->transport, j->host_transport,
              &j->thread_world, j->opt.timeout);
    if (j->opt.out) comm_leave_flights(&trainer->parallel.comm, j->opt.out);
    check_agreement(trainer);
    trainer->parallel.layout = layout_read_back(&trainer->parallel.comm);
    trainer->parallel.hosts = hosts_read_back(&trainer->parallel.comm);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // by every rank, and they may be threads
    trainer_allocate(trainer, j);
    trainer->parallel.fsdp.seed = (uint64_t)j->opt.seed;
    double start = seconds_now();
    weights_load(&trainer->parallel.fsdp, j->has_weights ? &j->weights : NULL, j->opt.adapters ? &j->adapters : NULL,
                 &j->resume_from);
    comm_barrier(&trainer->parallel.comm,
                 "start-up: weights are in place"); // a slow disk is start-up's, not the first step's
    trainer->load_seconds = seconds_now() - start;
    comm_phase(&trainer->parallel.comm, PHASE_STEP);
}

static int rank_train(Trainer *trainer, const Trainer *dry_run, const Job *j) {
    if (trainer->parallel.rank == 0) {
        print_banner(j, trainer, dry_run);
        logger_open(&trainer->logger, j->opt.out, j->mesh.world, &trainer->progress);
        logger_data(&trainer->logger, trainer->data, j->opt.tail, trainer->progress.samples_in_epoch,
                    j->resume_from.data_changed);
        if (j->opt.out) write_run_files(j, trainer);
    }
    int whole = train(trainer, dry_run);
    loader_close(&trainer->loader, &trainer->parallel.dev);
    if (trainer->parallel.rank == 0) logger_loader(&trainer->loader), logger_close(&trainer->logger);
    return whole;
}

static void rank_eval(Trainer *trainer, const Job *j) {
    int64_t targets;
    double loss = evaluate(trainer, &j->val, 0, &targets);
    if (!isfinite(loss))
        user_error("the loss of %s on %s is %g, not finite: look at the weights", j->opt.model, j->opt.eval, loss);
    cJSON *name = cJSON_CreateString(j->opt.eval); // escaped as JSON wants it
    char *quoted = cJSON_PrintUnformatted(name);
    if (trainer->parallel.rank == 0)
        printf("{\"file\":%s,\"tokens\":%" PRId64 ",\"loss\":%.9g,\"perplexity\":%.9g}\n", quoted, targets, loss,
               exp(fmin(loss, 709))); // JSON has no infinity
    free(quoted);
    cJSON_Delete(name);
}

static void rank_main(Job *j, int rank) {
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer);
    dry_run_open(dry_run, j, rank, NULL);
    if (rank == 0 || j->host_transport == &transport_threads)
        check_memory(j, &dry_run->parallel.dev); // before any rank takes memory that others are to have
    if (rank == 0) job_check_outputs(j); // the last thing that can refuse, since it may leave a directory behind
    trainer_open(trainer, dry_run, j, rank);
    int whole = j->task == DO_EXPORT;
    if (j->task == DO_TRAIN) whole = rank_train(trainer, dry_run, j);
    if (j->task == DO_EVAL) rank_eval(trainer, j);
    if (j->task == DO_GENERATE) generate(trainer, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (j->opt.export_dir && whole) model_export(&trainer->writer);
    else if (j->opt.export_dir && trainer->parallel.rank == 0)
        printf("not exported: the run ended at step %" PRId64 " of %d; --resume goes on, and exports at its end\n",
               trainer->progress.step, j->opt.steps);
    trainer_close(trainer);
    trainer_close(dry_run);
    free(trainer);
    free(dry_run);
}

// ---------------------------------------------------------------------------
// main

typedef struct {
    Job *job;
    int rank;
    void (*body)(Job *, int);
} RankThread;

static void *rank_thread(void *arg) {
    RankThread *t = (RankThread *)arg;
    t->body(t->job, t->rank);
    return NULL;
}

/* Runs `body` (rank_main) for the job's ranks: this process's one, or all of them as threads. */
static void launch(Job *j, int process, void (*body)(Job *, int)) {
    int world = j->mesh.world;
    if (j->host_transport != &transport_threads || world == 1) {
        body(j, process);
        return;
    }
    pthread_t *threads = (pthread_t *)checked_malloc(sizeof(pthread_t) * (size_t)world);
    RankThread *args = (RankThread *)checked_malloc(sizeof(RankThread) * (size_t)world);
    for (int i = 0; i < world; i++) {
        args[i].job = j, args[i].rank = i, args[i].body = body;
        if (pthread_create(&threads[i], NULL, rank_thread, &args[i]))
            run_failure("the thread of rank %d could not be started", i);
    }
    for (int i = 0; i < world; i++) pthread_join(threads[i], NULL);
    free(threads);
    free(args);
}

#ifndef TESTING
int main(int argc, char **argv) {
    int process = rank_of_launcher();
    process_end.process = process;
    process_end.quiet = 1; // all processes check the same input: until ranks have met, the first speaks
    Job job = ZERO;
    job.opt = options_parse(argc, argv);
    if (job.opt.help && process == 0) options_print_help(stdout);
    if (job.opt.help) return 0;
    if (job.opt.encode || job.opt.decode) {
        if (process == 0) encode_or_decode(job.opt.tokenizer, job.opt.encode, job.opt.decode);
        return 0;
    }
    if (job.opt.audit) {
        if (!job.opt.out) user_error("--audit reads what a run left in --out: add --out DIR");
        if (process == 0) audit(job.opt.out);
        return 0;
    }
    Started started = comm_start_process(&argc, &argv, job.opt.timeout);
    job_open(&job, &started);
    if (job.opt.out && job.task == DO_TRAIN) signals_install(!under_mpirun());
    if (job.task == DO_PLAN) {
        if (process == 0) plan_main(&job);
    } else {
        launch(&job, started.rank, rank_main);
    }
    job_close(&job);
    comm_end_process();
    return 0;
}
#endif
