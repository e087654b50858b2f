/* train_llama3.cu: trains Llama 3 with fully sharded data parallelism and tensor, context and pipeline parallelism.
 *
 * Read it from top to bottom: one block forward and backward, embedding and head, a pipeline stage under FSDP, the
 * training step, the dry run, the training loop, plans, one rank, main. The programs that generate, evaluate and
 * convert include this file (programs/). Every piece of arithmetic is an op (lib/ops.h),
 * every communication a collective or a message (lib/comm.h), every buffer of the step comes from an arena
 * (lib/device.h). So the same code also runs as a dry run, without arithmetic or memory, which predicts the memory,
 * FLOPs and traffic of any rank.
 */
#include "lib/output.h"            // defines: finish_results, flush_results, note_lost_progress
#include "lib/device.h"            // defines: arena_alloc, device_phase, device_copy, device_open_dry_run
#include "lib/comm_open.h"         // defines: LaunchInfo, comm_start_process, comm_open
#include "lib/ops.h"               // defines: rmsnorm_forward, rope_forward, attention_forward, …
#include "llama3.h"                // defines: Llama3Config, TensorTable
#include "fsdp.h"                  // defines: Fsdp, fsdp_unshard, fsdp_reshard, fsdp_reduce_gradients
#include "run/shared_gradients.h"  // defines: sum_shared_gradients
#include "optimizer.h"             // defines: Optimizer, optimizer_step, learning_rate_at, clip_coefficient
#include "tensor_parallel.h"       // defines: tp_all_gather_tokens, tp_reduce_scatter_tokens, tp_cross_entropy
#include "context_parallel.h"      // defines: cp_all_gather_kv, cp_reduce_scatter_kv
#include "pipeline_parallel.h"     // defines: Pipeline, pipeline_receive, pipeline_send
#include "lora.h"                  // defines: lora_linear_forward, lora_linear_backward_input, lora_linear_backward_…
#include "dataloader.h"            // defines: Dataset, Loader, StepBatch, loader_next, read_window
#include "run/options.h"           // defines: Options, options_parse, options_write
#include "run/job.h"               // defines: Job, job_open: everything that is checked before ranks start
#include "run/model.h"             // defines: Model, BlockActivations: what forward and backward compute in
#include "run/weights.h"           // defines: BlockWeights, block_weights, head_weights, blocks_prefetch
#include "run/parallel.h"          // defines: Parallel: mesh, device, communicators, shards, pipeline
#include "run/trainer.h"           // defines: Trainer, trainer_allocate, trainer_open, trainer_end_stage, …
#include "run/step_report.h"       // defines: exchange_reports, sum_reports, judge_outliers, mean_z_loss, …
#include "run/checkpoint.h"        // defines: Checkpoint, weights_load
#include "run/checkpoint_writer.h" // defines: CheckpointWriter, checkpoint_save, checkpoint_commit
#include "run/signals.h"           // defines: signals_install, SIGNAL_SAVE, SIGNAL_END, EXIT_ENDED_EARLY
#include "run/plan.h"              // defines: Plan, plan_add, plan_write_file
#include "run/mfu.h"               // defines: matmul_rate
#include "run/logger.h"            // defines: Logger, StepStats, logger_step
#include "run/banner.h"            // defines: print_banner, print_stage; includes run/layout.h
#include "run/trace.h"             // defines: trace_write, trace_as_one_event
#include "run/launch.h"            // defines: process_begin, help_or_version, process_connect, launch

// ---------------------------------------------------------------------------
// a block, forward
//
// A block is RMSNorm, attention, RMSNorm, MLP, and each sublayer's output is added to the residual stream. The addition
// is fused into the following RMSNorm: a sublayer leaves its output in m->sublayer_out, and the next norm reads the
// stream once, adds it and stores the sum. Matmuls see all N = B·T tokens that this context-parallel rank has of the
// micro-batch; the residual stream has n of them, this tensor-parallel rank's share.

/* Attention of the normalized input a->attn_norm, into m->sublayer_out. */
static void attention_sublayer_forward(Model *m, int l, const BlockWeights *w, BlockActivations *a) {
    const Llama3Config *c = &m->config;
    int N = m->B * m->T;
    const floatX *x = tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
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
    const floatX *x = tp_all_gather_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
    lora_linear_forward(&m->lora, a->gate_up, x, &w->gate_up, m->B * m->T);
}

/* The MLP of the normalized input a->mlp_norm, down(silu(gate) · up), into m->sublayer_out. */
static void mlp_sublayer_forward(Model *m, const BlockWeights *w, BlockActivations *a) {
    int N = m->B * m->T;
    mlp_gate_up_forward(m, w, a);
    swiglu_forward(m->dev, a->swiglu, a->gate_up, N, m->config.F);
    floatX *partial = tp_partial(m->tp, m->sublayer_out);
    lora_linear_forward(&m->lora, partial, a->swiglu, &w->down, N);
    tp_reduce_scatter_tokens(m->tp, m->sublayer_out, "MLP output");
}

/* out = RMSNorm(x + added) · w; also stores the sum x + added. Without `added` (NULL) out = RMSNorm(x) · w. */
static void norm_forward(Model *m, floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *added,
                         const floatX *w) {
    rmsnorm_forward(m->dev, out, rstd, sum, x, added, w, m->config.norm_eps, m->tp->tokens, m->config.C);
}

/* Block l. The residual stream before it is the sum of the previous block's after_attention and m->sublayer_out; the
 * first block of a pipeline stage finds it in a->x already. */
static void block_forward(Model *m, int l) {
    BlockActivations *a = block_activations(m, l);
    int first = l == m->stage->first_block;
    const floatX *before = first ? a->x : block_activations(m, l - 1)->after_attention;
    const floatX *added = first ? NULL : m->sublayer_out;
    device_phase(m->dev, "forward", m->table.units[table_block_unit(&m->table, l)].name);
    const BlockWeights w = block_weights(m, l, NO_GRADIENTS);
    norm_forward(m, a->attn_norm, a->attn_rstd, first ? NULL : a->x, before, added, w.attn_norm);
    attention_sublayer_forward(m, l, &w, a);
    norm_forward(m, a->mlp_norm, a->mlp_rstd, a->after_attention, a->x, m->sublayer_out, w.mlp_norm);
    mlp_sublayer_forward(m, &w, a);
}

/* Activation checkpointing: recomputes what the block did not keep, into buffers that all such blocks share. The result
 * has the bits of the forward pass: there too, the norms were taken of the rounded residual stream, as stored. */
static void block_recompute(Model *m, int l, const BlockWeights *w, BlockActivations *a) {
    if (a->keep == KEEP_ALL) return;
    m->dev->recomputing = 1;
    norm_forward(m, a->attn_norm, a->attn_rstd, NULL, a->x, NULL, w->attn_norm);
    if (a->keep == KEEP_INPUT) {
        attention_sublayer_forward(m, l, w, a);
        norm_forward(m, a->mlp_norm, a->mlp_rstd, a->after_attention, a->x, m->sublayer_out, w->mlp_norm);
        mlp_gate_up_forward(m, w, a);
        tp_keep_tokens(m->tp); // backward finds the gathered input of the MLP and does not gather it again
    } else {
        norm_forward(m, a->mlp_norm, a->mlp_rstd, NULL, a->after_attention, NULL, w->mlp_norm);
    }
    swiglu_forward(m->dev, a->swiglu, a->gate_up, m->B * m->T, m->config.F);
    m->dev->recomputing = 0;
}

// ---------------------------------------------------------------------------
// a block, backward. Each function mirrors its forward and the norm before it, last line first. The gradients
// of weights come late: nothing waits for them, and tensor-parallel collectives of other gradients run meanwhile.
//
// m->d_x is the gradient of the residual stream. It is also that of a sublayer's output, since the output is added to
// the stream. A sublayer's backward reads it and writes m->d_norm, the gradient of its normalized input.

/* Adds to m->d_x what comes back through a norm: the residual stream feeds both the norm and the next sum. */
static void norm_backward(Model *m, float *d_w, const floatX *x, const float *rstd, const floatX *w) {
    rmsnorm_backward(m->dev, m->d_x, d_w, m->d_norm, m->d_x, x, rstd, w, m->tp->tokens, m->config.C);
}

static void mlp_sublayer_backward(Model *m, const BlockWeights *w, BlockActivations *a) {
    int N = m->B * m->T;
    const floatX *d_out = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d MLP output");
    tp_prefetch_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
    lora_linear_backward_input(&m->lora, m->d_swiglu, d_out, &w->down, N);
    floatX *d_gate_up = a->gate_up; // in place: nothing reads gate and up after this
    swiglu_backward(m->dev, d_gate_up, m->d_swiglu, a->gate_up, N, m->config.F);
    floatX *partial = tp_partial(m->tp, m->d_norm);
    lora_linear_backward_input(&m->lora, partial, d_gate_up, &w->gate_up, N);
    tp_reduce_scatter_start(m->tp, "d MLP input");
    lora_linear_backward_weight(&m->lora, d_out, a->swiglu, &w->down, N);
    tp_reduce_scatter_wait(m->tp, m->d_norm);
    norm_backward(m, w->d_mlp_norm, a->after_attention, a->mlp_rstd, w->mlp_norm);
    tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d attention output");
    const floatX *x = tp_all_gather_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
    lora_linear_backward_weight(&m->lora, d_gate_up, x, &w->gate_up, N);
}

/* Starts to gather m->d_x for what comes after block l in backward: block l - 1, or the embedding. */
static void prefetch_d_x(Model *m, int l) {
    int embeds = stage_embeds(m) && !m->table.units[m->table.embed].frozen;
    if (l > m->stage->first_block) tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d MLP output");
    else if (embeds) tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d embedding");
}

static void attention_sublayer_backward(Model *m, int l, const BlockWeights *w, BlockActivations *a) {
    const Llama3Config *c = &m->config;
    int N = m->B * m->T;
    const floatX *d_out = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d attention output");
    tp_prefetch_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
    lora_linear_backward_input(&m->lora, m->d_attn, d_out, &w->o, N);
    KeyValue kv = cp_all_gather_kv(m->cp, a->qkv);
    AttentionShape shape = attention_shape(m, &kv);
    floatX *dk = cp_key_gradient(m->cp, m->d_qkv), *dv = dk + (int64_t)c->NKV * c->HD;
    attention_backward(m->dev, m->d_qkv, dk, dv, m->d_attn, a->attn, a->lse, a->qkv, kv.k, kv.v, &shape);
    cp_reduce_scatter_kv(m->cp, m->d_qkv);
    rope_backward(m->dev, m->d_qkv, qkv_width(c), m->cos_sin, m->positions, N, m->T, c->NH + c->NKV, c->HD);
    floatX *partial = input_gradient_is_read(m, l) ? tp_partial(m->tp, m->d_norm) : NULL;
    lora_linear_backward_input(&m->lora, partial, m->d_qkv, &w->qkv, N);
    if (partial) tp_reduce_scatter_start(m->tp, "d attention input");
    lora_linear_backward_weight(&m->lora, d_out, a->attn, &w->o, N);
    if (partial) {
        tp_reduce_scatter_wait(m->tp, m->d_norm);
        norm_backward(m, w->d_attn_norm, a->x, a->attn_rstd, w->attn_norm);
        prefetch_d_x(m, l);
    }
    const floatX *x = tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
    lora_linear_backward_weight(&m->lora, m->d_qkv, x, &w->qkv, N);
}

/* Block l. m->d_x is the gradient of the residual stream after the block, and becomes the one before it, if needed. */
static void block_backward(Model *m, int l, int micro_batch) {
    BlockActivations *a = block_activations(m, l);
    device_phase(m->dev, "backward", m->table.units[table_block_unit(&m->table, l)].name);
    const BlockWeights w = block_weights(m, l, micro_batch);
    block_recompute(m, l, &w, a);
    mlp_sublayer_backward(m, &w, a);
    attention_sublayer_backward(m, l, &w, a);
}

// ---------------------------------------------------------------------------
// embedding and head

/* The embedding of m->ids (N), into the residual stream before the first block. */
static void embed_forward(Model *m) {
    const UnitTensors t = unit_tensors(m, m->table.embed, 0, NO_GRADIENTS);
    floatX *partial = tp_partial(m->tp, m->blocks[0].x);
    embedding_forward(m->dev, partial, weight_of(&t, W_EMBED), m->ids, m->tp->first_token_id, m->B * m->T, m->config.C,
                      m->config.V);
    tp_reduce_scatter_tokens(m->tp, m->blocks[0].x, "embedding");
}

static void embed_backward(Model *m, int micro_batch) {
    FsdpUnit *unit = fsdp_unit(m, m->table.embed);
    float *d_embed = fsdp_gradients(m->fsdp, unit, micro_batch) + unit->table_unit->offsets[W_EMBED];
    const floatX *d_x = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d embedding");
    embedding_backward(m->dev, d_embed, d_x, m->ids, m->tp->first_token_id, m->B * m->T, m->config.C, m->config.V);
}

/* The residual stream that the head reads. The final norm stores it; a stage without blocks has received it. */
static floatX *head_input(Model *m) { return m->stage->num_blocks ? m->final_x : m->blocks[0].x; }

/* The final RMSNorm. Returns its output for all tokens, (N, C). */
const floatX *final_norm_forward(Model *m, const HeadWeights *w) {
    floatX *x = head_input(m);
    if (m->stage->num_blocks)
        norm_forward(m, m->final_norm, m->final_rstd, x, m->blocks[m->num_activations - 1].after_attention,
                     m->sublayer_out, w->norm);
    else norm_forward(m, m->final_norm, m->final_rstd, NULL, x, NULL, w->norm);
    return tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, m->final_norm, "head input");
}

/* From m->logits, which hold the gradients of the logits of tokens [first, first + count). x is the output of the final
 * norm; d_final_norm is its gradient. */
static void head_chunk_backward(Model *m, const HeadWeights *w, floatX *d_final_norm /* (N,C) = */,
                                const floatX *x /* (N,C) */, int first, int count) {
    int C = m->config.C, V = m->config.V, accumulates = w->accumulates || first > 0;
    int64_t at = (int64_t)first * C, stride = logits_stride(V);
    const floatX *d_logits = (const floatX *)m->logits;
    linear_backward_input(m->dev, d_final_norm + at, d_logits, stride, w->head, count, C, V);
    if (w->d_head) linear_backward_weight(m->dev, w->d_head, d_logits, stride, x + at, count, C, V, accumulates);
}

/* Adds up the losses of this rank's n tokens: each tp rank has computed those of all N. */
static void sum_losses(const Model *m, ExactSum *sum, const float *losses /* (N) */) {
    exact_total(m->dev, sum, losses + (int64_t)m->tp->tokens * m->tp->rank, m->tp->tokens);
}

/* Final norm, logits and losses; unless `micro_batch` is NO_GRADIENTS also backward, into m->d_x. Logits are computed
 * in chunks of tokens, so that those of a long micro-batch never exist at once: each chunk goes backward before the
 * next one replaces it. Where backward follows, logits are rounded to floatX, as torch.autocast's linear layers round
 * them; evaluation has fp32 logits, and no z-loss. */
void head_loss(Model *m, int micro_batch) {
    int N = m->B * m->T, C = m->config.C, V = m->config.V, goes_backward = micro_batch != NO_GRADIENTS;
    int rows = goes_backward ? m->logit_rows : m->fp32_rows;
    device_phase(m->dev, "loss", m->table.units[m->table.head].name);
    const HeadWeights w = head_weights(m, micro_batch);
    const floatX *x = final_norm_forward(m, &w);
    floatX *d_final_norm = tp_partial(m->tp, m->d_norm); // (N, C) under tp: this rank's partial sums
    const ZLoss z = goes_backward ? m->z_loss : no_z_loss();
    const Logits logits = model_logits(m, goes_backward);
    for (int first = 0; first < N; first += rows) {
        int count = (int)min_i64(rows, N - first);
        linear_forward_logits(m->dev, logits, x + (int64_t)first * C, w.head, count, C, V);
        tp_cross_entropy(m->tp, m->losses + first, logits, m->targets + first, z_loss_from(z, first), count, V,
                         goes_backward);
        if (goes_backward) head_chunk_backward(m, &w, d_final_norm, x, first, count);
    }
    if (goes_backward) {
        tp_reduce_scatter_tokens(m->tp, m->d_norm, "d head input");
        rmsnorm_backward(m->dev, m->d_x, w.d_norm, m->d_norm, NULL, head_input(m), m->final_rstd, w.norm, m->tp->tokens,
                         C);
    }
    sum_losses(m, m->loss_sum, m->losses);
    if (z.losses) sum_losses(m, m->z_loss_sum, z.losses);
}

// ---------------------------------------------------------------------------
// the blocks of a pipeline stage with FSDP: each is unsharded before it computes and resharded after it

/* The unit after the stage's blocks. */
static int stage_end(const Model *m) {
    const Stage *stage = m->stage;
    if (!stage->num_blocks) return stage->first_unit;
    return table_block_unit(&m->table, stage->first_block + stage->num_blocks - 1) + 1;
}

/* While `unit` computes, the next --slots - 1 units of blocks are all-gathered; while the last unit of blocks computes,
 * the head. `unit` may also be the embedding, or first_unit - 1 if no unit of the stage computes yet. */
static void prefetch_forward(Model *m, int unit) {
    int last = stage_end(m) - 1, first = (int)max_i64(unit + 1, m->stage->first_unit);
    for (int next = first; next <= last && next < unit + m->opt->slots; next++) blocks_prefetch(m, next);
    if (unit == last && stage_has_loss(m)) fsdp_prefetch(m->fsdp, fsdp_unit(m, m->table.head));
}

/* Starts to unshard the units of blocks that backward needs after `unit`, which computes now or next, or is
 * stage_end(m) if no block computes yet. Called before a gradient is reduced: on a shared connection the all-gathers
 * would queue behind the reduction. */
static void prefetch_backward(Model *m, int unit) {
    for (int next = unit - 1; next >= m->stage->first_unit && next > unit - m->opt->slots; next--)
        blocks_prefetch(m, next);
}

static void stage_embed_forward(Model *m, ReshardPoint now) {
    FsdpUnit *embed = fsdp_unit(m, m->table.embed);
    device_phase(m->dev, "forward", embed->table_unit->name);
    fsdp_prefetch(m->fsdp, embed);
    prefetch_forward(m, m->table.embed);
    embed_forward(m);
    if (!table_is_tied(&m->table)) fsdp_reshard(m->fsdp, embed, now); // tied: the head needs it too
}

static void stage_embed_backward(Model *m, int micro_batch, ReshardPoint now) {
    FsdpUnit *embed = fsdp_unit(m, m->table.embed);
    device_phase(m->dev, "backward", embed->table_unit->name);
    if (!embed->table_unit->frozen) embed_backward(m, micro_batch);
    fsdp_reshard(m->fsdp, embed, now); // ZeRO-2, last micro-batch: frees it here
    if (!embed->table_unit->frozen) fsdp_reduce_gradients(m->fsdp, embed, micro_batch);
}

/* All blocks of the stage. The residual stream after the last one is the sum of its after_attention and
 * m->sublayer_out. */
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

/* All blocks of the stage in reverse order: m->d_x after the last one becomes m->d_x before the first. While a unit
 * computes, FSDP reduces the gradients of the unit that computed before it, unit + 1. */
static void stage_blocks_backward(Model *m, int micro_batch, ReshardPoint now) {
    const Stage *stage = m->stage;
    for (int l = stage->first_block + stage->num_blocks - 1; l >= stage->first_block; l--) {
        int unit = table_block_unit(&m->table, l);
        blocks_prefetch(m, unit);
        block_backward(m, l, micro_batch);
        if (l > m->table.units[unit].first_block) continue; // the unit has more blocks
        blocks_reshard(m, unit, now);
        prefetch_backward(m, unit - 1);
        FsdpUnit *adapters = adapters_of(m, unit), *trained = adapters ? adapters : fsdp_unit(m, unit);
        fsdp_reduce_gradients(m->fsdp, trained, micro_batch);
    }
}

// ---------------------------------------------------------------------------
// pipeline steps: one micro-batch through one stage, in the order of the schedule (pipeline_parallel.h). Without
// pipeline parallelism there is one stage, which embeds and computes the loss

/* Forward of a micro-batch through the stage: from its tokens, or the previous stage's output, to what the next stage
 * receives. The last stage leaves the residual stream to the head. */
static void stage_forward(Model *m, Pipeline *pipeline, const PipelineStep *step, const StepBatch *batch,
                          ReshardPoint now) {
    model_enter_stage(m, step->stage, step->activation_set);
    feed_micro_batch(m, batch, step->micro_batch);
    if (stage_embeds(m)) stage_embed_forward(m, now);
    else prefetch_forward(m, m->stage->first_unit - 1);
    pipeline_receive(pipeline, step, m->blocks[0].x);
    stage_blocks_forward(m, now);
    if (stage_has_loss(m)) return;
    PipelineMessage *out = pipeline_output(pipeline, step);
    if (m->stage->num_blocks)
        residual_add(m->dev, out->data, m->blocks[m->num_activations - 1].after_attention, m->sublayer_out,
                     (int64_t)m->tp->tokens * m->config.C);
    else device_copy(m->dev, out->data, m->blocks[0].x, sizeof(floatX) * pipeline->message_elements);
    pipeline_send(pipeline, step, out);
}

/* Backward of a micro-batch through the stage. Gradients are those of the SUM of its losses; the optimizer divides by
 * the number of targets in the step. */
static void stage_backward(Model *m, Pipeline *pipeline, const PipelineStep *step, const StepBatch *batch) {
    int last = step->micro_batch == pipeline->schedule.micro_batches - 1;
    ReshardPoint now = last ? AFTER_LAST_USE : AFTER_BACKWARD;
    model_enter_stage(m, step->stage, step->activation_set);
    if (pipeline->schedule.pp > 1) // another micro-batch may have overwritten its ids and targets
        feed_micro_batch(m, batch, step->micro_batch);
    int end = stage_end(m);
    prefetch_backward(m, end);
    if (stage_has_loss(m)) {
        // In the last stage's schedule, a backward directly follows its forward: the head's input is still there.
        FsdpUnit *head = fsdp_unit(m, m->table.head);
        head_loss(m, step->micro_batch);
        fsdp_reshard(m->fsdp, head, now);
        prefetch_backward(m, end - 1);
        if (!table_is_tied(&m->table) && !head->table_unit->frozen) // tied: the embedding adds to this gradient first
            fsdp_reduce_gradients(m->fsdp, head, step->micro_batch);
    }
    pipeline_receive(pipeline, step, m->d_x);
    stage_blocks_backward(m, step->micro_batch, now);
    if (stage_embeds(m)) {
        stage_embed_backward(m, step->micro_batch, now);
        return;
    }
    PipelineMessage *out = pipeline_output(pipeline, step);
    device_copy(m->dev, out->data, m->d_x, sizeof(floatX) * pipeline->message_elements);
    pipeline_send(pipeline, step, out);
}

/* All micro-batches of a step, forward and backward, in the order of the schedule. */
static void run_schedule(Model *m, Pipeline *pipeline, const StepBatch *batch) {
    const Schedule *s = &pipeline->schedule;
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep *step = &s->steps[i];
        pipeline_start_receives(pipeline, step);
        if (step->kind == PIPE_FORWARD) stage_forward(m, pipeline, step, batch, AFTER_FORWARD);
        else stage_backward(m, pipeline, step, batch);
    }
    pipeline_finish(pipeline);
}

/* Forward of the first micro-batch of `batch` alone, for evaluation and generation. The last stage leaves the residual
 * stream to the head. */
void model_forward(Model *m, Pipeline *pipeline, const StepBatch *batch) {
    for (int v = 0; v < m->table.part.virtual_stages; v++) {
        PipelineStep step = ZERO;
        step.kind = PIPE_FORWARD;
        step.stage = v;
        if (pipeline_source(&pipeline->schedule, &step) >= 0) pipeline_start_receive(pipeline, &step);
        stage_forward(m, pipeline, &step, batch, AFTER_LAST_USE);
    }
}

// ---------------------------------------------------------------------------
// one training step

/* This rank's samples of the next step. Starts to gather the sample numbers of all ranks, if samples.jsonl or a report
 * of an outlier is to name them. */
static StepBatch *next_batch(Trainer *trainer, double now) {
    Parallel *p = &trainer->parallel;
    rank_state(p->comm.heartbeat, RANK_READING, now);
    StepBatch *batch = loader_next(&trainer->loader, &p->dev, trainer->job->opt.timeout);
    rank_state(p->comm.heartbeat, RANK_COMPUTING, seconds_now());
    StepReports *r = &trainer->reports;
    if (r->samples)
        all_gather_start(&p->comm, &r->samples_gather, AXIS_WORLD, "samples", batch->windows, r->samples,
                         sizeof(int64_t) * r->samples_of_rank, DTYPE_BYTE);
    return batch;
}

/* What this rank tells all others of a step; exchange_reports adds the sums. */
static StepReport own_report(Trainer *trainer, const StepBatch *batch) {
    const Options *o = &trainer->job->opt;
    const Mesh *mesh = &trainer->parallel.mesh;
    StepReport mine = ZERO;
    mine.targets = mesh_counts_samples(mesh, trainer->parallel.rank) ? batch->num_targets : 0;
    mine.samples_hash = batch->samples_hash;
    mine.seeds = sampler_fingerprint(&trainer->loader.sampler) ^ mix64(trainer->parallel.fsdp.seed);
    mine.is_writing = is_writing(&trainer->writer);
    mine.figures.tokens = (int64_t)o->batch * o->seq * o->accum / mesh_stride(mesh, AXIS_DP_SHARD);
    return mine;
}

/* Updates this rank's shards with the clipped mean gradient. */
static void update_weights(Trainer *trainer, int64_t step, StepStats *s) {
    const Options *o = &trainer->job->opt;
    s->lr = learning_rate_at(&trainer->job->stage->rate, step);
    judge_outliers(&trainer->progress.outliers, o->outlier_window, s);
    if (s->skipped) {
        skip_update(&trainer->reports, &trainer->job->table, &trainer->progress, step, s);
        return;
    }
    if (skip_outlier(&trainer->reports, o, &trainer->progress, &trainer->logger, step, s)) return;
    if (!s->targets && !trainer->parallel.dev.dry_run) return; // every target is masked: there is nothing to learn
    AdamW adam = {(float)s->lr, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay};
    double clip = clip_coefficient(o->clip, s->grad_norm), mean = clip / (double)max_i64(1, s->targets);
    trainer->progress.updates++;
    optimizer_step(&trainer->optimizer, &adam, (float)mean, (int)trainer->progress.updates);
}

/* One training step: forward and backward of all micro-batches, the sum of their gradients over all ranks, and the
 * update of the weights. `step` counts from 1. */
static StepStats train_step(Trainer *trainer, int64_t step) {
    Parallel *p = &trainer->parallel;
    Device *dev = &p->dev;
    double start = seconds_now();
    comm_clear_ledger(&p->comm);
    int on_host = !is_timed(dev); // without a timeline nobody reads this span: the GPU need not measure it
    Span whole = span_begin(dev, EVENT_STEP, STREAM_COMPUTE, "step", NULL, (double)step, on_host);
    memory_events(dev); // the memory in use when the step begins, for the timeline
    StepBatch *batch = next_batch(trainer, start);
    step_reports_begin(&trainer->reports);
    run_schedule(&trainer->model, &p->pipeline, batch);
    device_record_event(dev, &batch->fed);
    fsdp_finish_gradients(&p->fsdp);
    device_phase(dev, "optimizer", NULL);
    sum_shared_gradients(&trainer->shared_gradients);
    comm_wait(&p->comm, &trainer->reports.samples_gather);
    StepReport mine = own_report(trainer, batch);
    exchange_reports(&trainer->reports, &p->fsdp, &mine, start);
    int64_t first_window = dev->dry_run ? 0 : batch->windows[0]; // the sample that an error message names
    loader_release(&trainer->loader, dev);

    StepStats s = sum_reports(&trainer->reports);
    s.z_loss = mean_z_loss(&trainer->reports, s.targets);
    check_reports(&trainer->reports, &trainer->loader.sampler, step, first_window);
    update_weights(trainer, step, &s);
    device_phase(dev, NULL, NULL);
    span_end(dev, whole, NULL, -1, 0);
    s.samples = sampler_global_batch(&trainer->loader.sampler);
    Progress *progress = &trainer->progress;
    progress->step = step;
    progress->samples += s.samples;
    progress->tokens += s.samples * trainer->job->opt.seq;
    if (!dev->dry_run) {
        int64_t before = sampler_position(&trainer->loader.sampler, step - 1, &progress->epoch);
        progress->samples_in_epoch = before + s.samples;
    }
    double wait = comm_wait_seconds(&p->comm), blocked = wait + p->comm.poll_seconds; // blocked by communication
    s.seconds = seconds_now() - start;
    s.data_wait_seconds = trainer->loader.wait_seconds;
    s.wait_seconds = wait;
    s.communication_seconds = p->comm.comm_seconds;
    s.overlap = s.communication_seconds > 0 ? fmax(0, 1 - blocked / s.communication_seconds) : 0;
    return s;
}

// ---------------------------------------------------------------------------
// validation, and the loss of eval_llama3

typedef struct {
    double loss;          // mean over all targets
    int64_t targets;      // tokens whose loss counts
    double bits_per_byte; // of their text; NAN: the files do not say how many bytes it has
} Evaluation;

/* Reads a micro-batch of windows, from `first` on; those past the end of the data have no targets. Returns the number
 * of targets. */
static int64_t read_eval_batch(Trainer *trainer, const Dataset *data, int64_t first) {
    const ContextParallel *cp = &trainer->parallel.cp;
    const Model *m = &trainer->model;
    StepBatch *batch = &trainer->eval_batch;
    int64_t num_targets = 0;
    device_synchronize_event(batch->fed);
    for (int b = 0; b < m->B; b++) {
        int n = read_window(data, cp->size, cp->rank, batch, b, first + b, trainer->eval_raw, batch->error);
        if (n < 0) user_error("%s", batch->error);
        num_targets += n;
    }
    return num_targets;
}

/* The loss on the first `max_batches` micro-batches of every rank; 0: on all windows. Every target counts once,
 * whatever the number of ranks. For some of the windows, bits per byte take a target's text to be as long as it is on
 * average in the files. */
static Evaluation evaluate(Trainer *trainer, const Dataset *data, int64_t max_batches) {
    Parallel *p = &trainer->parallel;
    Model *m = &trainer->model;
    int B = m->B, counts = mesh_counts_samples(&p->mesh, p->rank);
    int64_t round = (int64_t)B * mesh_data_ranks(&p->mesh), batches = (data->windows + round - 1) / round;
    StepReport mine = ZERO; // only its loss and targets are used
    ExactSum sum = ZERO;
    if (p->dev.dry_run) batches = 1;
    if (max_batches) batches = min_i64(batches, max_batches);
    Phase before = comm_phase(&p->comm, PHASE_VALIDATION);
    step_reports_begin(&trainer->reports);
    for (int64_t i = 0; i < batches; i++) {
        int64_t first = i * round + (int64_t)mesh_data_rank(&p->mesh, p->rank) * B;
        int64_t n = p->dev.dry_run ? 0 : read_eval_batch(trainer, data, first);
        if (counts) mine.targets += n;
        model_forward(m, &p->pipeline, &trainer->eval_batch);
        device_record_event(&p->dev, &trainer->eval_batch.fed);
        if (m->table.head < 0) continue;
        head_loss(m, NO_GRADIENTS);
        fsdp_reshard(m->fsdp, fsdp_unit(m, m->table.head), AFTER_LAST_USE);
    }
    device_phase(&p->dev, NULL, NULL);
    device_read(&p->dev, &sum, &trainer->reports.sums[SUM_LOSS], sizeof sum);
    exact_merge(&mine.loss, &sum);
    all_gather_now(&p->comm, AXIS_WORLD, "evaluation", &mine, trainer->reports.of_ranks, sizeof mine);
    comm_phase(&p->comm, before);
    StepStats total = sum_reports(&trainer->reports);
    double bits = total.loss * (double)total.targets / log(2.0);
    double bytes = (double)data->target_bytes * ((double)total.targets / (double)data->targets);
    Evaluation e = {total.loss, total.targets, bytes > 0 ? bits / bytes : NAN};
    return e;
}

// ---------------------------------------------------------------------------
// the dry run of a rank

static void dry_run_step(Trainer *trainer) { train_step(trainer, trainer->progress.step + 1); }
static Purpose training(void) {
    Purpose p = ZERO;
    p.program = "train_llama3";
    p.trains = 1;
    p.dry_run = dry_run_step;
    return p;
}

/* Runs one step (or the largest calls of a program that does not train) on a dry-run device: no
 * arithmetic, no memory. What the device and the communicators counted is the rank's memory, FLOPs and traffic; with
 * times of ops also its own. */
static void dry_run_once(Trainer *trainer, const Job *j, int rank, int64_t max_events, CommRecorder *recorder) {
    Parallel *p = &trainer->parallel;
    Device *dev = &p->dev;
    trainer_bind(trainer, j, rank);
    device_open_dry_run(dev, j->threads_per_rank, offloaded(&j->opt));
    dev->deterministic = j->opt.deterministic;
    dev->gpu = job_gpu_of_rank(j, rank);
    dev->by_nccl = uses_nccl(j);
    dev->reductions_apart = job_reductions_apart(j);
    ops_open(dev, 0);
    dev->max_events = max_events;
    comm_open_dry_run(&p->comm, dev, &j->mesh, rank);
    trainer_allocate(trainer);
    if (!job_streams_weights(j)) fsdp_init_weights(&p->fsdp, 0);
    if (p->fsdp.fingerprints) fsdp_check_replicas(&p->fsdp, 0);
    memset(dev->ops, 0, sizeof dev->ops); // start-up does not count
    dev->num_events = 0;
    dev->times = j->op_times; // from here on the clock runs
    p->comm.recorder = recorder;
    if (recorder && dev->times && dev->times->has_streams) dev->points = &recorder->points;
    if (j->purpose.dry_run) j->purpose.dry_run(trainer);
    dev->points = NULL;
    if (trainer->model.training) matmul_rate(dev); // measured after the first step: count its scratch memory
}

/* The dry run of `rank`. `recorder`: lists its communication; NULL: none. With --trace there are two dry
 * runs: the first one counts the events of a step, the second one reserves memory for the timeline of all steps, or of
 * as many as fit. */
static void dry_run_open(Trainer *trainer, const Job *j, int rank, CommRecorder *recorder) {
    dry_run_once(trainer, j, rank, 0, recorder);
    if (!j->opt.trace || recorder) return;
    int64_t per_step = trainer->parallel.dev.num_events + 4; // a validation, a replica check and a save
    int64_t of_run = min_i64(MAX_EVENTS, per_step * j->stage->steps);
    trainer_close(trainer);
    dry_run_once(trainer, j, rank, j->purpose.plans ? per_step : of_run, NULL);
}

// ---------------------------------------------------------------------------
// training

/* Saves a checkpoint when it is due, and makes an earlier one visible once all ranks have written it. All ranks decide
 * alike: they know the same reports. */
static void save_when_due(Trainer *trainer, int asked, int ends) {
    const Options *o = &trainer->job->opt;
    CheckpointWriter *writer = &trainer->writer;
    int64_t step = trainer->progress.step, events = trainer->parallel.dev.num_events;
    double start = seconds_now();
    int wanted = ends || asked & SIGNAL_SAVE || (o->save_every && step % o->save_every == 0);
    int due = wanted && writer->saved_step != step;
    // an earlier save is open: publish it if all ranks have written it, or if it cannot wait any longer
    if (writer->files && (due || ends || !trainer->reports.is_writing)) checkpoint_commit(writer);
    if (due && trainer->parallel.rank == 0) logger_sync(&trainer->logger, step);
    if (due) checkpoint_save(writer, &trainer->progress);
    if (ends && writer->files) checkpoint_commit(writer);
    after_save_check(&writer->after_save); // on rank 0 a command may have ended
    trace_as_one_event(&trainer->parallel.dev, events, "saving", start);
}

#ifndef REPLICA_CHECK_STEPS
#define REPLICA_CHECK_STEPS 100 // steps between two comparisons of the weights that replicas have in common
#endif
static void check_replicas_when_due(Trainer *trainer, int64_t step) {
    Parallel *p = &trainer->parallel;
    int64_t events = p->dev.num_events;
    double start = seconds_now();
    if (!p->fsdp.fingerprints || step % REPLICA_CHECK_STEPS) return;
    fsdp_check_replicas(&p->fsdp, step);
    trace_as_one_event(&p->dev, events, "replica check", start);
}

/* Every `every` steps, unless it is 0, and after the last step. */
static int is_due(int64_t step, int every, int64_t last) { return step >= last || (every && step % every == 0); }

/* After every --val-every steps and after the last one. */
static void validate_when_due(Trainer *trainer, int64_t step) {
    const Options *o = &trainer->job->opt;
    int64_t events = trainer->parallel.dev.num_events;
    double start = seconds_now();
    if (!trainer->job->val.num_files || !is_due(step, o->val_every, stage_end_step(trainer->job))) return;
    Evaluation e = evaluate(trainer, &trainer->job->val, o->val_batches);
    trace_as_one_event(&trainer->parallel.dev, events, "validation", start);
    if (!isfinite(e.loss))
        run_failure("step %" PRId64 ": the validation loss is %g, not finite: lower --lr, lengthen --warmup, or check "
                    "the data",
                    step, e.loss);
    if (trainer->parallel.rank == 0) logger_validation(&trainer->logger, step, e.loss, e.targets, e.bits_per_byte);
}

/* One step with everything that follows it but saving. `flops`: of a step of this rank; `rate`: FLOP/s of its matmuls,
 * measured after the first step. Returns what signals asked for. */
static int train_and_log(Trainer *trainer, int64_t step, double flops, double *rate) {
    int first = step == trainer->job->start.step + 1; // of the run, or of a stage
    int64_t updates = trainer->progress.updates;
    StepStats s = train_step(trainer, step);
    s.matmul_share = *rate > 0 ? flops / s.seconds / *rate : 0;
    s.mfu = job_mfu(trainer->job, s.seconds);
    int asked = signals_asked(&trainer->reports);
    if (first) *rate = matmul_rate(&trainer->parallel.dev);
    if (!trainer->is_checked && trainer->progress.updates > updates) check_first_step(trainer);
    if (trainer->parallel.rank == 0) {
        logger_step(&trainer->logger, step, &s, trainer->reports.figures);
        logger_samples(&trainer->logger, step, trainer->progress.epoch, trainer->reports.samples,
                       trainer->reports.samples_of_rank);
        note_lost_progress(&trainer->noted_lost_lines);
    }
    if (trainer->job->opt.trace) device_synchronize_all(&trainer->parallel.dev); // what follows is not part of the step
    check_replicas_when_due(trainer, step);
    validate_when_due(trainer, step);
    return asked;
}

/* --trace: writes the timeline of all ranks; `traced`: the last step of which it has all events. */
static void write_timeline(Trainer *trainer, int64_t traced) {
    const Options *o = &trainer->job->opt;
    trace_write(&trainer->parallel.comm, o->trace);
    if (trainer->parallel.rank) return;
    if (traced == stage_end_step(trainer->job)) printf("timeline of all steps: %s\n", o->trace);
    else
        printf("timeline of the first %" PRId64 " of %" PRId64 " steps: %s (it has room for %" PRId64
               " events per rank)\n",
               traced, stage_end_step(trainer->job), o->trace, trainer->parallel.dev.max_events);
}

/* Trains up to the end of the stage, or until a signal asks for the end. Returns 1 if the stage is complete. */
static int train(Trainer *trainer) {
    const Options *o = &trainer->job->opt;
    int64_t last = stage_end_step(trainer->job);
    Device *dev = &trainer->parallel.dev;
    Progress *progress = &trainer->progress;
    int64_t traced = 0;
    double flops = device_flops(&trainer->dry_run->parallel.dev, 0), rate = 0;
    int ends = progress->step == last, asked_to_end = 0;
    const Progress before = *progress;
    is_training = 1;                                  // from here on Ctrl-C saves a checkpoint
    timeline_truncate(dev, 0);                        // the timeline begins here
    if (ends && o->out) save_when_due(trainer, 0, 1); // nothing is left to train: save a copy under --out
    while (!ends) {
        int64_t events = dev->num_events;
        int asked = train_and_log(trainer, progress->step + 1, flops, &rate);
        // num_events counts on when the timeline is full: this step is in it entirely
        if (events < dev->num_events && dev->num_events <= dev->max_events) traced = progress->step;
        asked_to_end |= asked & SIGNAL_END;
        ends = progress->step == last || asked_to_end;
        if (ends) check_learned(&before, progress);
        if (asked && trainer->parallel.rank == 0) {
            printf("step %6" PRId64 " | a signal asked to save%s\n", progress->step,
                   asked & SIGNAL_END ? " and to end the run" : "");
            fflush(stdout); // launch scripts read this line
        }
        if (o->out) save_when_due(trainer, asked, ends);
    }
    is_training = 0;
    if (o->trace) write_timeline(trainer, traced);
    int is_stopped = asked_to_end && trainer->job->next; // before the recipe's next stage
    return progress->step == last && !is_stopped;
}

// ---------------------------------------------------------------------------
// plans

/* Adds a rank's dry run to the plan, which keeps it if it stands for a new class. */
static void plan_take(Plan *p, int rank, Trainer *dry_run) {
    RankClass *added = plan_add(p, rank, &dry_run->parallel.comm);
    if (added) added->trainer = dry_run;
    else {
        trainer_close(dry_run);
        free(dry_run);
    }
}

/* Dry-runs one rank of each kind; the other ranks share its figures. */
static void plan_open(Plan *p, const Job *j) {
    plan_begin(p, j);
    for (int rank = 0; rank < j->mesh.world; rank++) {
        int representative = plan_representative(p, rank);
        p->class_of[rank] = p->class_of[representative];
        if (representative < rank) continue;
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_once(dry_run, j, rank, 0, NULL);
        plan_take(p, rank, dry_run);
    }
}

static void plan_close(Plan *p) {
    for (int c = 0; c < p->count; c++) {
        trainer_close(p->classes[c].trainer);
        free(p->classes[c].trainer);
    }
    free(p->classes);
    free(p->class_of);
}

/* On a GPU, if a step has few tokens: names a larger batch, in the largest micro-batches for which there is memory. */
static void note_small_step(const Job *j) {
    int64_t samples = job_samples_of_full_step(j);
    double need = INFINITY;
    if (!samples) return;
    Job *larger = (Job *)checked_malloc(sizeof *larger);
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    *larger = *j;
    larger->opt.trace = NULL;
    for (int64_t batch = samples; batch && need > j->available_memory; batch /= 2) {
        larger->opt.batch = (int)batch;
        larger->opt.accum = (int)(samples / batch);
        dry_run_open(dry_run, larger, 0, NULL);
        need = need_of_device(j, &dry_run->parallel);
        trainer_close(dry_run);
    }
    if (need <= j->available_memory) print_larger_step(j, &larger->opt, need);
    free(dry_run);
    free(larger);
}

static void write_run_files(const Trainer *trainer) {
    const Job *j = trainer->job;
    Plan plan;
    FILE *f = logger_create(j->opt.out, "config.txt");
    options_write(&j->opt, f);
    if (fclose(f)) user_error("cannot write config.txt under %s: %s", j->opt.out, strerror(errno));
    f = logger_create(j->opt.out, "layout.json");
    layout_write(f, &j->mesh, trainer->parallel.layout);
    if (fclose(f)) user_error("cannot write layout.json under %s: %s", j->opt.out, strerror(errno));
    plan_open(&plan, j);
    plan_write_file(j->opt.out, &plan, samples_per_step(&j->opt, &j->mesh) * j->opt.seq, NULL, NULL, NULL);
    plan_close(&plan);
}

// ---------------------------------------------------------------------------
// one rank, from its dry run to its end

static int rank_train(Trainer *trainer) {
    const Job *j = trainer->job;
    int speaks = trainer->parallel.rank == 0;
    if (speaks) {
        const Parallel *p = &trainer->parallel, *dry = &trainer->dry_run->parallel;
        Banner banner = {&p->comm,          &dry->comm,           &p->fsdp, p->layout, &trainer->loader,
                         nccl_need(j, dry), trainer->load_seconds};
        print_banner(j, &banner);
        logger_open(&trainer->logger, &j->opt, &trainer->parallel.comm, &trainer->dry_run->parallel.dev,
                    &trainer->progress, j->resume_from.dir[0] != 0, trainer->saved_by_stage_before);
        note_small_step(j);
        logger_data(&trainer->logger, &j->data, trainer->progress.samples_in_epoch,
                    begins_later_stage(j) || j->resume_from.data_changed);
        if (j->opt.out) write_run_files(trainer);
    }
    int complete = train(trainer);
    loader_close(&trainer->loader, &trainer->parallel.dev);
    if (speaks) logger_loader(&trainer->loader);
    if (speaks) logger_close(&trainer->logger, !complete || !j->next);
    if (speaks) note_lost_progress(&trainer->noted_lost_lines);
    return complete;
}

/* Trains the stages of the recipe that follow j, which `trainer` has completed. Each is like a run that resumes at
 * the end of the stage before it, except that weights and moments stay where they are. `complete`: whether the last
 * stage that was trained is. */
static void train_later_stages(Trainer *trainer, Trainer *dry_run, Job *j, int *complete) {
    int rank = trainer->parallel.rank;
    while (*complete && j->next) {
        j = j->next;
        if (trainer->job->opt.after_save) wait_for_commands(&trainer->writer);
        comm_phase(&trainer->parallel.comm, PHASE_START); // the next stage opens everything again
        StageResult before = trainer_end_stage(trainer);
        trainer_close(dry_run);
        dry_run_open(dry_run, j, rank, NULL);
        trainer_open(trainer, dry_run, j, rank, &before);
        *complete = rank_train(trainer);
    }
}

/* Refuses a run if a later stage needs more memory than there is. */
static void check_memory_of_stages(Trainer *dry_run, const Job *j, int rank) {
    for (; j; j = j->next) {
        dry_run_open(dry_run, j, rank, NULL);
        check_memory(j, &dry_run->parallel);
        trainer_close(dry_run);
    }
}

/* Opens what this rank needs. */
static void rank_open(Trainer *trainer, Trainer *dry_run, Job *j, int rank) {
    int checks = rank == 0 || j->host_transport == &transport_threads || uses_nccl(j);
    if (checks) check_memory_of_stages(dry_run, j->next, rank);
    dry_run_open(dry_run, j, rank, NULL);
    // check_memory compares this rank's need, times the ranks that share its memory, with what is free. Ranks that are
    // threads all check: each allocates without waiting for the others, so it must have checked first. If ranks are
    // processes, only rank 0 checks its host, but with NCCL each rank checks its own GPU.
    if (checks) check_memory(j, &dry_run->parallel);
    if (rank == 0) job_check_outputs(j); // last, since it may create a directory
    trainer_open(trainer, dry_run, j, rank, NULL);
}

static void rank_main(Job *j, int rank) {
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer);
    rank_open(trainer, dry_run, j, rank);
    int complete = rank_train(trainer);
    train_later_stages(trainer, dry_run, j, &complete);
    if (!complete) __atomic_store_n(&j->ended_early, 1, __ATOMIC_RELAXED); // by all threads
    if (j->opt.after_save) wait_for_commands(&trainer->writer);
    trainer_close(trainer);
    trainer_close(dry_run);
    free(trainer);
    free(dry_run);
}

// ---------------------------------------------------------------------------
// main

#ifndef TESTING
int main(int argc, char **argv) {
    static Job job; // large for a small stack
    int process = process_begin(argv);
    job.opt = options_parse(argc, argv);
    job.purpose = training();
    if (help_or_version(&job.opt, process == 0)) return 0;
    int saves = options_train(&job.opt) && job.opt.out;
    if (options_train(&job.opt)) signal(SIGPIPE, SIG_IGN); // training continues when the reader of its output ends
    LaunchInfo started = process_connect(&job.opt, saves, seconds_to_connect(&job.opt), &argc, &argv);
    job_open(&job, &started);
    if (job.opt.out) signals_install(under_mpirun());
    launch(&job, started.rank, rank_main);
    job_close(&job);
    comm_end_process();
    return job.ended_early ? EXIT_ENDED_EARLY : 0;
}
#endif
