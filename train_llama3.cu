/* train_llama3.cu: trains Llama 3 with fully sharded data parallelism and tensor, context and pipeline parallelism.
 *
 * Read it from top to bottom, or from train_step: it calls stage_forward and stage_backward, these
 * stage_blocks_forward and stage_blocks_backward, and these block_forward and block_backward. After the step come
 * validation, memory, opening a rank, the dry run, the training loop and main. Programs that generate, evaluate or
 * convert include this file (programs/). Every piece of arithmetic is an op (lib/ops/ops.h), every communication is in
 * lib/comm/comm.h, every buffer comes from an arena (lib/device/device.h). So the same code also runs as a dry run,
 * without arithmetic or memory, which predicts the memory, FLOPs and traffic of any rank.
 */
#include "lib/io/output.h"      // defines: finish_results, flush_results, note_lost_progress
#include "lib/device/device.h"  // defines: floatX (bf16 or fp32), Device, ExactSum (in any order), Span, arena_alloc
#include "lib/comm/comm_open.h" // defines: Mesh, Comm (groups of ranks), LaunchInfo, comm_open
#include "lib/ops/ops.h"        // defines: each op; Logits, ZLoss, AttentionShape; LOGIT_ROWS, LOGITS (defaults)
#include "llama3.h" // defines: Llama3Config, WeightKind, TensorTable, its Units (what FSDP shards at once), Stage
#include "fsdp.h"   // defines: Fsdp, FsdpUnit (a Unit's buffers), ReshardPoint (when they may be freed)
#include "shared_gradients.h"       // defines: sum_shared_gradients
#include "optimizer.h"              // defines: AdamW (its settings), Optimizer, learning_rate_at, clip_coefficient
#include "tensor_parallel.h"        // defines: TensorParallel (its tokens are n), TpBuffer, tp_all_gather_tokens, …
#include "context_parallel.h"       // defines: ContextParallel, KeyValue, cp_all_gather_kv, cp_reduce_scatter_kv
#include "pipeline_parallel.h"      // defines: Schedule, its PipelineSteps (a forward or backward each), Pipeline
#include "lora.h"                   // defines: Linear (a layer's weights, adapters and gradients), Adapter, Lora
#include "dataloader.h"             // defines: Dataset, Loader, StepBatch, loader_next, read_sample
#include "run/setup/options.h"      // defines: Options, RunSettings, RECOMPUTE_NONE, …, options_parse
#include "run/setup/job.h"          // defines: Job, job_open: everything that is checked before ranks start
#include "run/setup/agreement.h"    // defines: check_agreement, check_shared_out
#include "run/checks/ledger.h"      // defines: Ledger, ledger_check: expected, dry-run and measured traffic
#include "run/checks/step_report.h" // defines: StepReport (what ranks tell each other), exchange_reports, …
#include "run/checkpoint/checkpoint.h"        // defines: Checkpoint, Progress, weights_load
#include "run/checkpoint/checkpoint_writer.h" // defines: CheckpointWriter, checkpoint_save, checkpoint_commit
#include "run/checks/replica_check.h"         // defines: fsdp_check_replicas, REPLICA_CHECK_STEPS
#include "run/watch/signals.h"                // defines: signals_install, SIGNAL_SAVE, SIGNAL_END, EXIT_ENDED_EARLY
#include "run/checks/plan.h"                  // defines: Plan, plan_add, plan_json, check_memory
#include "run/checks/mfu.h"                   // defines: matmul_rate
#include "run/watch/logger.h"                 // defines: StepStats (a step as its line of metrics has it), Logger
#include "run/watch/banner.h"                 // defines: print_banner, print_period; includes run/checks/layout.h
#include "run/watch/trace.h"                  // defines: trace_write, trace_as_one_event
#include "run/setup/launch.h"                 // defines: process_begin, help_or_version, process_connect, launch

// ---------------------------------------------------------------------------
// the part of the model that this rank computes

/* What a block keeps from forward to backward: the residual stream it read (--recompute full); everything but norms and
 * SwiGLU (selective); or everything (none). Backward recomputes the rest (activation checkpointing, Chen et al. 2016;
 * selective: Korthikanti et al. 2022, section 5). */
typedef enum { KEEP_INPUT, KEEP_MATMULS, KEEP_ALL } Keep;

/* One block's activations. A rank has N = B·T tokens of a micro-batch: T tokens of each of B sequences, whose length is
 * T·cp. The model has hidden size C and L blocks; this tensor-parallel rank has NH query and NKV key/value
 * heads of HD elements, F columns of the MLP and V rows of the vocabulary. Attention and the MLP compute all N tokens
 * for these parts; QKV = (NH + 2·NKV)·HD is the width of a token's queries, keys, values. Norms and the residual
 * stream are of n tokens: N, or this rank's share of them over tp. The middle column: the least Keep that keeps it. */
typedef struct {
    Keep keep;
    floatX *x;         // (n, C)       KEEP_INPUT    residual stream before attention, which the block reads
    floatX *attn_norm; // (n, C)       KEEP_ALL      normalized input of attention
    float *attn_rstd;  // (n)          KEEP_ALL      1 / rms of x
    floatX *qkv;       // (N, QKV)     KEEP_MATMULS  queries, keys, values; rotated in place
    floatX *attn;      // (N, NH·HD)   KEEP_MATMULS  output of attention
    float *lse;        // (B, NH, T)   KEEP_MATMULS  log of the softmax's denominator
    floatX *h;         // (n, C)       KEEP_MATMULS  residual stream after attention, which the MLP reads
    floatX *mlp_norm;  // (n, C)       KEEP_ALL      normalized input of the MLP
    float *mlp_rstd;   // (n)          KEEP_ALL      1 / rms of h
    floatX *gate_up;   // (N, 2F)      KEEP_MATMULS
    floatX *swiglu;    // (N, F)       KEEP_ALL      silu(gate) · up
} BlockActivations;

/* A block's weights. Gradients are fp32, NULL for a frozen weight and in forward. */
typedef struct {
    const floatX *attn_norm; // (C)
    Linear qkv;              // (QKV, C) queries, keys and values, fused into one matmul
    Linear o;                // (C, NH·HD)
    const floatX *mlp_norm;  // (C)
    Linear gate_up;          // (2F, C) gate and up, fused
    Linear down;             // (C, F)
    float *d_attn_norm;      // (C) backward adds to it; fsdp_gradients has cleared it
    float *d_mlp_norm;       // (C) the same
} BlockWeights;

typedef struct {
    const RunSettings *run; // of which the model reads --recompute, --slots, --doc-mask, --logit-rows and --z-loss
    Llama3Config config;    // of this rank: its tensor-parallel share of the heads, of F and of the vocabulary
    TensorTable table;      // this rank's tensors
    BlockWeights shapes;    // of every block's weights, without addresses; block_weights adds those
    int training;           // activations are kept for backward
    int softmax_statistics; // largest logit and sum of exponentials are kept for each token
    Device *dev;
    Fsdp *fsdp;
    TensorParallel *tp;
    ContextParallel *cp;

    // what is computed now
    int B, T;                    // sequences of the micro-batch; this rank's tokens of each
    int past;                    // generation: tokens before these, whose keys and values are in the cache
    int32_t *ids, *targets;      // (N)
    int32_t *docs;               // (B, T·cp) each token's document; NULL without --doc-mask
    int32_t *own_docs;           // (N) the same of this rank's tokens: `docs` itself if cp = 1
    const Stage *stage;          // the part of a pipeline that is computed: without --pp the whole model
    BlockActivations *blocks;    // (num_activations) of the stage's blocks, for the current micro-batch
    int num_activations;         // in training, one for each block of the stage; else 1, which each block overwrites
    BlockActivations *in_flight; // of all virtual stages and micro-batches that are in flight
    int stage_begin[MAX_STAGES]; // where those of each virtual stage begin in `in_flight`
    BlockActivations recomputed; // buffers for what blocks do not keep, shared by all of them

    // forward
    floatX *sublayer_out; // (n, C) output of attention or the MLP, until the next norm has added it
    floatX *final_x;      // (n, C) residual stream after the last block
    floatX *final_norm;   // (n, C) its final norm
    float *final_rstd;    // (n)
    void *logits;         // of a chunk: (logit_rows, stride) floatX if it goes backward, else (fp32_rows, V) fp32
    int logit_rows;       // tokens in a chunk that goes backward; its gradients overwrite the logits
    int fp32_rows;        // tokens in a chunk of fp32 logits, in the same memory
    float *losses;        // (n·tp), which is N, rounded up to a multiple of tp; those beyond N stay 0
    ExactSum *loss_sum;   // sum over this rank's tokens and the micro-batches of the step so far
    ZLoss z_loss;         // z_loss.losses: (n·tp), NULL without --z-loss
    ExactSum *z_loss_sum; // as loss_sum; NULL without --z-loss
    Lora lora;            // buffers of the adapters
    float *cos_sin;       // (num_positions, 2, HD/2) rotary embedding
    int32_t *positions;   // (T; with a cache num_positions) of this rank's tokens in the sequence
    int num_positions;    // of a whole sequence
    floatX *kv_cache;     // generation: (L, num_positions, 2·NKV·HD) keys and values; else NULL
    float *next_logits;   // generation: (V) in host memory

    // backward: gradients of
    floatX *d_x;      // (n, C) the residual stream
    floatX *d_norm;   // (n, C) a norm's output
    floatX *d_qkv;    // (N, QKV) queries, keys, values
    floatX *d_attn;   // (N, NH·HD) attention's output
    floatX *d_swiglu; // (N, F)
} Llama3;

static inline int qkv_width(const Llama3Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

/* The logits of a chunk: floatX of m->logit_rows tokens if it goes backward, otherwise fp32 of m->fp32_rows tokens. */
static inline Logits model_logits(const Llama3 *m, int goes_backward) {
    int V = m->config.V;
    return goes_backward ? logits_x((floatX *)m->logits, V) : logits_fp32((float *)m->logits, V);
}

static inline FsdpUnit *fsdp_unit(const Llama3 *m, int unit) { return &m->fsdp->units[unit]; }

// ---------------------------------------------------------------------------
// the weights of a block and of the head by name
//
// An FSDP unit is one flat buffer with the tensors of a block (or several), at offsets that are known at set-up.
// block_weights waits until the block is unsharded and adds its address to them, for backward also that of its
// gradient. Pointers to weights are valid until the unit is resharded, pointers to gradients until
// fsdp_reduce_gradients.

typedef struct {
    const floatX *norm; // (C)
    const floatX *head; // (V, C) the embedding itself if they are tied
    float *d_norm;      // (C) backward adds to it
    float *d_head;      // (V, C) backward overwrites it, or adds to it
    int accumulates;    // backward adds to d_head: it holds the sum of earlier micro-batches
} HeadWeights;

enum { NO_GRADIENTS = -1 }; // in place of a micro-batch: forward only

/* The tensors of one block within an unsharded unit. */
typedef struct {
    const floatX *weights;  // from the block's first element on
    float *gradients;       // the same of the full-size gradient; NULL: frozen, or forward
    const int64_t *offsets; // (W_KINDS) of each kind of tensor
    int accumulates;        // the gradients are sums of earlier micro-batches, and backward adds to them
} UnitTensors;

/* Waits until the unit is unsharded. `block`: the block's number within the unit. */
static UnitTensors unit_tensors(Llama3 *m, int unit, int block, int micro_batch) {
    FsdpUnit *u = fsdp_unit(m, unit);
    int64_t first = block * u->table_unit->block_stride;
    UnitTensors t = {fsdp_unshard(m->fsdp, u) + first, NULL, u->table_unit->offsets, 0};
    if (micro_batch != NO_GRADIENTS && !u->table_unit->frozen) {
        t.gradients = fsdp_gradients(m->fsdp, u, micro_batch) + first;
        t.accumulates = u->adds_to_gradient;
    }
    return t;
}
static const floatX *weight_of(const UnitTensors *t, WeightKind kind) { return t->weights + t->offsets[kind]; }
static float *gradient_of(const UnitTensors *t, WeightKind kind) {
    return t->gradients ? t->gradients + t->offsets[kind] : NULL;
}

/* Sets the addresses of a layer's matrices, which follow one another without a gap, and of their adapters. */
static void linear_bind(Linear *layer, const UnitTensors *block, const UnitTensors *adapters) {
    layer->w = weight_of(block, layer->matrix);
    layer->d_w = gradient_of(block, layer->matrix);
    layer->accumulates = block->accumulates || adapters->accumulates; // one of the two is trained
    for (int i = 0; i < layer->num_adapters; i++) {
        Adapter *adapter = &layer->adapters[i];
        adapter->a = weight_of(adapters, lora_a(adapter->matrix));
        adapter->b = weight_of(adapters, lora_b(adapter->matrix));
        adapter->d_a = gradient_of(adapters, lora_a(adapter->matrix));
        adapter->d_b = gradient_of(adapters, lora_b(adapter->matrix));
    }
}

/* The weights of block l, with gradients for `micro_batch` unless it is NO_GRADIENTS. */
static BlockWeights block_weights(Llama3 *m, int l, int micro_batch) {
    int unit = table_block_unit(&m->table, l), in_unit = l - m->table.units[unit].first_block;
    UnitTensors block = unit_tensors(m, unit, in_unit, micro_batch), adapters = ZERO;
    if (m->lora.r) adapters = unit_tensors(m, table_block_adapters(&m->table, l), in_unit, micro_batch);
    BlockWeights w = m->shapes;
    w.attn_norm = weight_of(&block, W_ATTN_NORM);
    linear_bind(&w.qkv, &block, &adapters);
    linear_bind(&w.o, &block, &adapters);
    w.mlp_norm = weight_of(&block, W_MLP_NORM);
    linear_bind(&w.gate_up, &block, &adapters);
    linear_bind(&w.down, &block, &adapters);
    w.d_attn_norm = gradient_of(&block, W_ATTN_NORM);
    w.d_mlp_norm = gradient_of(&block, W_MLP_NORM);
    return w;
}

static HeadWeights head_weights(Llama3 *m, int micro_batch) {
    UnitTensors t = unit_tensors(m, m->table.head, 0, micro_batch);
    WeightKind head = table_is_tied(&m->table) ? W_EMBED : W_HEAD;
    HeadWeights w = {weight_of(&t, W_FINAL_NORM), weight_of(&t, head), gradient_of(&t, W_FINAL_NORM),
                     gradient_of(&t, head), t.accumulates};
    return w;
}

// ---------------------------------------------------------------------------
// the current virtual stage

/* How many BlockActivations a micro-batch takes on a stage: one for each block; on a stage without blocks (embedding or
 * head alone) one, for the residual stream. */
static inline int activations_of_stage(const Stage *stage) { return stage->num_blocks ? stage->num_blocks : 1; }

/* From now on virtual stage v is computed. `set`: which of the stage's activations are used; each micro-batch in flight
 * has a set. */
static void model_enter_stage(Llama3 *m, int v, int set) {
    m->stage = &m->table.stages[v];
    m->num_activations = m->training ? activations_of_stage(m->stage) : 1;
    m->blocks = m->in_flight + m->stage_begin[v] + (m->training ? set * m->num_activations : 0);
}

static inline BlockActivations *block_activations(const Llama3 *m, int l) {
    return &m->blocks[(l - m->stage->first_block) % m->num_activations];
}

/* Does the current stage embed the tokens? Does it compute the loss? */
static int stage_embeds(const Llama3 *m) { return m->table.embed >= 0 && m->stage == &m->table.stages[0]; }
static int stage_has_loss(const Llama3 *m) {
    return m->table.head >= 0 && m->stage == &m->table.stages[m->table.part.virtual_stages - 1];
}

/* From now on micro-batches have B sequences, of which this rank computes T tokens each, after `past` cached ones. */
static void model_set_tokens(Llama3 *m, int B, int T, int past) {
    m->B = B;
    m->T = T;
    m->past = past;
    tp_set_tokens(m->tp, B * T);
    m->cp->B = B;
    m->cp->T = T;
}

// ---------------------------------------------------------------------------
// what attention reads

/* Self-attention of this rank's queries to `kv`. The causal mask follows from the queries' positions (query_position
 * in lib/ops/ops_common.h): query t is at position q_offset + t, and from query q_split on at q_offset + t + q_gap.
 * --doc-mask keeps attention within a document, but positions count on through documents (Llama 3 paper, 3.2). */
static AttentionShape attention_shape(const Llama3 *m, const KeyValue *kv) {
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
    // Context-parallel rank i has parts i and 2·cp - 1 - i of the sequence: under the causal mask all have equal work.
    if (m->cp->size > 1) {
        s.q_offset = cp_position(m->cp, 0, m->T);
        s.q_split = m->T / 2;
        s.q_gap = cp_position(m->cp, s.q_split, m->T) - s.q_split - s.q_offset;
    }
    return s;
}

/* Generation, B = 1: appends the new tokens' keys and values to block l's cache and returns those of all so far. */
static KeyValue kv_cache_append(Llama3 *m, int l, const floatX *qkv /* (N,QKV) */) {
    const Llama3Config *c = &m->config;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    size_t row = sizeof(floatX) * 2 * KV, qkv_row = sizeof(floatX) * (Q + 2 * KV);
    floatX *cache = m->kv_cache + (int64_t)l * m->num_positions * 2 * KV;
    device_copy_rows(m->dev, cache + m->past * 2 * KV, row, qkv + Q, qkv_row, row, m->T);
    KeyValue kv = {cache, cache + KV, 2 * KV, m->past + m->T};
    return kv;
}

// ---------------------------------------------------------------------------
// a block: h = x + attention(RMSNorm(x)), and the next block's x = h + MLP(RMSNorm(h))
//
// The residual stream of n tokens (this tensor-parallel rank's share) is written twice in a block: as a->h after
// attention, and after the MLP as a->x of the next block, or m->final_x after the last one. Each of these additions is
// fused with the norm that follows it, so that the stream is read and written once for both: until then the sublayer's
// output lies in m->sublayer_out. Matmuls see all N = B·T tokens that this context-parallel rank has. Under tensor
// parallelism the last matmul of a sublayer writes partial sums of N tokens to a buffer of their own (tp_partial), and
// tp_reduce_scatter_tokens makes this rank's n tokens of the output of them; otherwise both buffers are the same.

/* out = RMSNorm(x) · w. */
static void norm_forward(Llama3 *m, floatX *out, float *rstd, const floatX *x, const floatX *w) {
    rmsnorm_forward(m->dev, out, rstd, NULL, x, NULL, w, m->config.norm_eps, m->tp->tokens, m->config.C);
}

/* x = before + m->sublayer_out, the residual stream with a sublayer's output, and out = RMSNorm(x) · w. */
static void add_and_norm_forward(Llama3 *m, floatX *out, float *rstd, floatX *x, const floatX *before,
                                 const floatX *w) {
    rmsnorm_forward(m->dev, out, rstd, x, before, m->sublayer_out, w, m->config.norm_eps, m->tp->tokens, m->config.C);
}

/* Block l. It ends with the MLP's output in m->sublayer_out, which the next norm adds to the residual stream.
 * `recomputes`: backward asks for what the block did not keep (a->keep). Norms read the residual stream as it is
 * stored, so recomputation gives forward's bits. It leaves out the MLP's output, which backward does not read. */
static void block_forward(Llama3 *m, int l, const BlockWeights *w, int recomputes) {
    const Llama3Config *c = &m->config;
    BlockActivations *a = block_activations(m, l);
    int N = m->B * m->T, is_first = l == m->stage->first_block; // x is the embedding, or was received
    if (is_first || recomputes) norm_forward(m, a->attn_norm, a->attn_rstd, a->x, w->attn_norm);
    else add_and_norm_forward(m, a->attn_norm, a->attn_rstd, a->x, block_activations(m, l - 1)->h, w->attn_norm);
    if (!recomputes || a->keep == KEEP_INPUT) {
        const floatX *x = tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
        lora_linear_forward(&m->lora, a->qkv, x, &w->qkv, N);
        rope_forward(m->dev, a->qkv, qkv_width(c), m->cos_sin, m->positions + m->past, N, m->T, c->NH + c->NKV, c->HD);
        KeyValue kv = m->kv_cache ? kv_cache_append(m, l, a->qkv) : cp_all_gather_kv(m->cp, a->qkv);
        AttentionShape shape = attention_shape(m, &kv);
        attention_forward(m->dev, a->attn, a->lse, a->qkv, kv.k, kv.v, &shape);
        floatX *partial = tp_partial(m->tp, m->sublayer_out);
        lora_linear_forward(&m->lora, partial, a->attn, &w->o, N);
        tp_reduce_scatter_tokens(m->tp, m->sublayer_out, partial, "attention output");

        add_and_norm_forward(m, a->mlp_norm, a->mlp_rstd, a->h, a->x, w->mlp_norm);
        x = tp_all_gather_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
        lora_linear_forward(&m->lora, a->gate_up, x, &w->gate_up, N);
    } else {
        norm_forward(m, a->mlp_norm, a->mlp_rstd, a->h, w->mlp_norm);
    }
    swiglu_forward(m->dev, a->swiglu, a->gate_up, N, c->F);
    if (recomputes) return;
    floatX *partial = tp_partial(m->tp, m->sublayer_out);
    lora_linear_forward(&m->lora, partial, a->swiglu, &w->down, N);
    tp_reduce_scatter_tokens(m->tp, m->sublayer_out, partial, "MLP output");
}

/* Adds to m->d_x what comes back through a norm: the residual stream feeds both the norm and the next sum. The op reads
 * m->d_x as the gradient of the sum, and writes m->d_x. */
static void norm_backward(Llama3 *m, float *d_w, const floatX *x, const float *rstd, const floatX *w) {
    rmsnorm_backward(m->dev, m->d_x, d_w, m->d_norm, m->d_x, x, rstd, w, m->tp->tokens, m->config.C);
}

/* Block l: the lines of block_forward from the last to the first. m->d_x is the gradient of the residual stream after
 * the block and becomes the one before it, if that is needed. It is also the gradient of each sublayer's output, since
 * the output is added to the stream; m->d_norm is that of the sublayer's normalized input. Only weight gradients
 * are not in mirrored order: nothing waits for them, so they are computed while a tensor-parallel collective runs. */
static void block_backward(Llama3 *m, int l, const BlockWeights *w) {
    const Llama3Config *c = &m->config;
    BlockActivations *a = block_activations(m, l);
    int N = m->B * m->T;
    if (a->keep < KEEP_ALL) { // activation checkpointing, into buffers that all such blocks share
        m->dev->recomputing = 1;
        block_forward(m, l, w, 1);
        m->dev->recomputing = 0;
        if (a->keep == KEEP_INPUT) tp_keep_tokens(m->tp); // block_forward has gathered both inputs again
    }

    const floatX *d_out = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d MLP output");
    tp_prefetch_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
    lora_linear_backward_input(&m->lora, m->d_swiglu, d_out, &w->down, N);
    floatX *d_gate_up = a->gate_up; // in place: nothing reads gate and up after this
    swiglu_backward(m->dev, d_gate_up, m->d_swiglu, a->gate_up, N, c->F);
    floatX *partial = tp_partial(m->tp, m->d_norm);
    lora_linear_backward_input(&m->lora, partial, d_gate_up, &w->gate_up, N);
    tp_reduce_scatter_start(m->tp, partial, "d MLP input");
    // Before norm_backward changes m->d_x: without tensor parallelism d_out is m->d_x.
    lora_linear_backward_weight(&m->lora, d_out, a->swiglu, &w->down, N);
    tp_reduce_scatter_wait(m->tp, m->d_norm);
    norm_backward(m, w->d_mlp_norm, a->h, a->mlp_rstd, w->mlp_norm);
    tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d attention output");
    const floatX *x = tp_all_gather_tokens(m->tp, TP_MLP_INPUT, a->mlp_norm, "MLP input");
    lora_linear_backward_weight(&m->lora, d_gate_up, x, &w->gate_up, N);

    d_out = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d attention output");
    tp_prefetch_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
    lora_linear_backward_input(&m->lora, m->d_attn, d_out, &w->o, N);
    KeyValue kv = cp_all_gather_kv(m->cp, a->qkv);
    AttentionShape shape = attention_shape(m, &kv);
    floatX *dk = cp_key_gradient(m->cp, m->d_qkv), *dv = dk + (int64_t)c->NKV * c->HD;
    attention_backward(m->dev, m->d_qkv, dk, dv, m->d_attn, a->attn, a->lse, a->qkv, kv.k, kv.v, &shape);
    cp_reduce_scatter_kv(m->cp, m->d_qkv);
    rope_backward(m->dev, m->d_qkv, qkv_width(c), m->cos_sin, m->positions, N, m->T, c->NH + c->NKV, c->HD);
    // Nothing reads the gradient of the first block's input if this rank has the embedding and it is frozen.
    int is_read = l > 0 || m->table.embed < 0 || !m->table.units[m->table.embed].frozen;
    lora_linear_backward_input(&m->lora, is_read ? partial : NULL, m->d_qkv, &w->qkv, N);
    if (is_read) tp_reduce_scatter_start(m->tp, partial, "d attention input");
    lora_linear_backward_weight(&m->lora, d_out, a->attn, &w->o, N);
    if (is_read) {
        tp_reduce_scatter_wait(m->tp, m->d_norm);
        norm_backward(m, w->d_attn_norm, a->x, a->attn_rstd, w->attn_norm);
        // Starts to gather m->d_x for what reads it next: the block before this one, or the embedding.
        if (l > m->stage->first_block) tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d MLP output");
        else if (stage_embeds(m)) tp_prefetch_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d embedding");
    }
    x = tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, a->attn_norm, "attention input");
    lora_linear_backward_weight(&m->lora, m->d_qkv, x, &w->qkv, N);
}

// ---------------------------------------------------------------------------
// the head and the loss

/* The residual stream that the head reads. The final norm stores it; a stage without blocks has received it. */
static floatX *head_input(Llama3 *m) { return m->stage->num_blocks ? m->final_x : m->blocks[0].x; }

/* The final RMSNorm. Returns its output for all tokens, (N, C). */
const floatX *final_norm_forward(Llama3 *m, const HeadWeights *w) {
    floatX *x = head_input(m);
    if (m->stage->num_blocks)
        add_and_norm_forward(m, m->final_norm, m->final_rstd, x, m->blocks[m->num_activations - 1].h, w->norm);
    else norm_forward(m, m->final_norm, m->final_rstd, x, w->norm);
    return tp_all_gather_tokens(m->tp, TP_ATTENTION_INPUT, m->final_norm, "head input"); // in attention's buffer
}

/* Adds up the losses of this rank's n tokens: each tp rank has computed those of all N. */
static void sum_losses(const Llama3 *m, ExactSum *sum, const float *losses /* (n·tp) */) {
    exact_total(m->dev, sum, losses + (int64_t)m->tp->tokens * m->tp->rank, m->tp->tokens);
}

/* Final norm, logits and losses; unless `micro_batch` is NO_GRADIENTS also backward, into m->d_x. Logits are computed
 * in chunks of tokens, so that those of a long micro-batch never exist at once: each chunk goes backward before the
 * next one replaces it. Where backward follows, logits are rounded to floatX, as torch.autocast's linear layers round
 * them; evaluation has fp32 logits, and no z-loss. */
void head_loss(Llama3 *m, int micro_batch) {
    int N = m->B * m->T, C = m->config.C, V = m->config.V, goes_backward = micro_batch != NO_GRADIENTS;
    int rows = goes_backward ? m->logit_rows : m->fp32_rows;
    device_phase(m->dev, "loss", m->table.units[m->table.head].name);
    const HeadWeights w = head_weights(m, micro_batch);
    const floatX *x = final_norm_forward(m, &w);
    floatX *d_final_norm = tp_partial(m->tp, m->d_norm); // (N, C)
    const ZLoss z = goes_backward ? m->z_loss : no_z_loss;
    const Logits logits = model_logits(m, goes_backward);
    for (int first = 0; first < N; first += rows) {
        int count = (int)min_i64(rows, N - first), accumulates = w.accumulates || first > 0;
        const floatX *x_chunk = x + (int64_t)first * C; // (count, C)
        linear_forward_logits(m->dev, logits, x_chunk, w.head, count, C, V);
        tp_cross_entropy(m->tp, m->losses + first, logits, m->targets + first, z_loss_from(z, first), count, V,
                         goes_backward);
        if (!goes_backward) continue;
        const floatX *d_logits = (const floatX *)m->logits; // tp_cross_entropy has replaced the logits
        int64_t stride = logits_stride(V);
        linear_backward_input(m->dev, d_final_norm + (int64_t)first * C, d_logits, stride, w.head, count, C, V);
        if (w.d_head) linear_backward_weight(m->dev, w.d_head, d_logits, stride, x_chunk, count, C, V, accumulates);
    }
    if (goes_backward) {
        tp_reduce_scatter_tokens(m->tp, m->d_norm, d_final_norm, "d head input");
        rmsnorm_backward(m->dev, m->d_x, w.d_norm, m->d_norm, NULL, head_input(m), m->final_rstd, w.norm, m->tp->tokens,
                         C);
    }
    sum_losses(m, m->loss_sum, m->losses);
    if (z.losses) sum_losses(m, m->z_loss_sum, z.losses);
}

// ---------------------------------------------------------------------------
// units of blocks, with their adapters

/* The adapters of a unit of blocks; NULL: there are none. */
static FsdpUnit *adapters_of(Llama3 *m, int unit) {
    int block = m->table.units[unit].first_block;
    return m->config.lora_rank ? fsdp_unit(m, table_block_adapters(&m->table, block)) : NULL;
}

/* Starts to unshard a unit of blocks and its adapters. */
static void blocks_prefetch(Llama3 *m, int unit) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_prefetch(m->fsdp, fsdp_unit(m, unit));
    if (adapters) fsdp_prefetch(m->fsdp, adapters);
}
static void blocks_reshard(Llama3 *m, int unit, ReshardPoint point) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_reshard(m->fsdp, fsdp_unit(m, unit), point);
    if (adapters) fsdp_reshard(m->fsdp, adapters, point);
}

// ---------------------------------------------------------------------------
// the blocks of a pipeline stage with FSDP: each is unsharded before it computes and resharded after it

/* The unit after the stage's blocks. */
static int stage_end(const Llama3 *m) {
    const Stage *stage = m->stage;
    if (!stage->num_blocks) return stage->first_unit;
    return table_block_unit(&m->table, stage->first_block + stage->num_blocks - 1) + 1;
}

/* Starts the all-gathers that run while a unit computes: of `slots - 1` units of blocks, from `next` on, which is the
 * unit after the one that computes. If no unit of blocks is left, the head is gathered. */
static void prefetch_forward(Llama3 *m, int next) {
    int end = stage_end(m);
    for (int unit = next; unit < end && unit < next + m->run->slots - 1; unit++) blocks_prefetch(m, unit);
    if (next == end && stage_has_loss(m)) fsdp_prefetch(m->fsdp, fsdp_unit(m, m->table.head));
}

/* The same in backward, from `next` down. Backward calls this before it starts to reduce the gradient of the unit that
 * it has just computed: on a connection that both share, the all-gathers would queue behind the reduction. */
static void prefetch_backward(Llama3 *m, int next) {
    for (int unit = next; unit >= m->stage->first_unit && unit > next - (m->run->slots - 1); unit--)
        blocks_prefetch(m, unit);
}

/* The embedding of m->ids (N), into the residual stream before the first block. */
static void stage_embed_forward(Llama3 *m, ReshardPoint point) {
    FsdpUnit *embed = fsdp_unit(m, m->table.embed);
    device_phase(m->dev, "forward", embed->table_unit->name);
    fsdp_prefetch(m->fsdp, embed);
    prefetch_forward(m, m->stage->first_unit);
    const UnitTensors t = unit_tensors(m, m->table.embed, 0, NO_GRADIENTS);
    floatX *x = tp_partial(m->tp, m->blocks[0].x); // zero where another tp rank has the token's row
    embedding_forward(m->dev, x, weight_of(&t, W_EMBED), m->ids, m->tp->first_token_id, m->B * m->T, m->config.C,
                      m->config.V);
    tp_reduce_scatter_tokens(m->tp, m->blocks[0].x, x, "embedding");
    if (!table_is_tied(&m->table)) fsdp_reshard(m->fsdp, embed, point); // tied: the head needs it too
}

static void stage_embed_backward(Llama3 *m, int micro_batch, ReshardPoint point) {
    FsdpUnit *embed = fsdp_unit(m, m->table.embed);
    int is_trained = !embed->table_unit->frozen;
    device_phase(m->dev, "backward", embed->table_unit->name);
    if (is_trained) {
        float *d_embed = fsdp_gradients(m->fsdp, embed, micro_batch) + embed->table_unit->offsets[W_EMBED];
        const floatX *d_x = tp_all_gather_tokens(m->tp, TP_D_OUTPUT, m->d_x, "d embedding");
        embedding_backward(m->dev, d_embed, d_x, m->ids, m->tp->first_token_id, m->B * m->T, m->config.C, m->config.V);
    }
    fsdp_reshard(m->fsdp, embed, point); // shard_grad_op frees it here, after the last micro-batch
    if (is_trained) fsdp_reduce_gradients(m->fsdp, embed, micro_batch);
}

/* All blocks of the stage. The residual stream after the last one is the sum of its h and m->sublayer_out. */
static void stage_blocks_forward(Llama3 *m, ReshardPoint point) {
    const Stage *stage = m->stage;
    for (int l = stage->first_block; l < stage->first_block + stage->num_blocks; l++) {
        int unit = table_block_unit(&m->table, l);
        const Unit *u = &m->table.units[unit];
        blocks_prefetch(m, unit);
        prefetch_forward(m, unit + 1);
        device_phase(m->dev, "forward", u->name);
        const BlockWeights w = block_weights(m, l, NO_GRADIENTS);
        block_forward(m, l, &w, 0);
        if (l == u->first_block + u->num_blocks - 1) blocks_reshard(m, unit, point);
    }
}

/* All blocks of the stage from the last to the first: m->d_x is the gradient of what the last one wrote, and becomes
 * that of what the first one read. While a unit computes, FSDP reduces the gradients of the one after it. */
static void stage_blocks_backward(Llama3 *m, int micro_batch, ReshardPoint point) {
    const Stage *stage = m->stage;
    for (int l = stage->first_block + stage->num_blocks - 1; l >= stage->first_block; l--) {
        int unit = table_block_unit(&m->table, l);
        blocks_prefetch(m, unit);
        device_phase(m->dev, "backward", m->table.units[unit].name);
        const BlockWeights w = block_weights(m, l, micro_batch);
        block_backward(m, l, &w);
        if (l > m->table.units[unit].first_block) continue; // the unit has more blocks
        blocks_reshard(m, unit, point);
        prefetch_backward(m, unit - 2); // unit - 1 computes next
        FsdpUnit *adapters = adapters_of(m, unit);
        FsdpUnit *trained = adapters ? adapters : fsdp_unit(m, unit); // with adapters, the blocks are frozen
        fsdp_reduce_gradients(m->fsdp, trained, micro_batch);
    }
}

// ---------------------------------------------------------------------------
// a micro-batch

/* Copies to the device what the current stage needs of a micro-batch of `batch`, which is in host memory. Generation
 * has no targets. */
static void feed_micro_batch(Llama3 *m, const StepBatch *batch, int micro_batch) {
    int64_t N = (int64_t)m->B * m->T, at = micro_batch * N;
    size_t bytes = sizeof(int32_t) * N;
    if (stage_embeds(m)) device_feed(m->dev, m->ids, batch->inputs + at, bytes);
    if (batch->targets && stage_has_loss(m)) device_feed(m->dev, m->targets, batch->targets + at, bytes);
    if (!batch->docs) return;
    device_feed(m->dev, m->docs, batch->docs + at * m->cp->size, bytes * (size_t)m->cp->size);
    if (m->own_docs != m->docs) device_feed(m->dev, m->own_docs, batch->own_docs + at, bytes);
}

// ---------------------------------------------------------------------------
// pipeline steps: one micro-batch through one stage, in the order of the schedule (pipeline_schedule.h). Without --pp
// there is one stage, which embeds, computes all blocks, and computes the loss.

/* Forward of a micro-batch through the stage: from its tokens, or the previous stage's output, to what the next stage
 * receives. The last stage leaves the residual stream to the head. */
static void stage_forward(Llama3 *m, Pipeline *pipeline, const PipelineStep *step, const StepBatch *batch,
                          ReshardPoint point) {
    model_enter_stage(m, step->stage, step->activation_set);
    feed_micro_batch(m, batch, step->micro_batch);
    if (stage_embeds(m)) stage_embed_forward(m, point);
    else prefetch_forward(m, m->stage->first_unit);
    pipeline_receive(pipeline, step, m->blocks[0].x);
    stage_blocks_forward(m, point);
    if (stage_has_loss(m)) return; // stage_backward computes the head, forward and backward
    PipelineMessage *out = pipeline_output(pipeline, step);
    if (m->stage->num_blocks)
        residual_add(m->dev, out->data, m->blocks[m->num_activations - 1].h, m->sublayer_out,
                     (int64_t)m->tp->tokens * m->config.C);
    else device_copy(m->dev, out->data, m->blocks[0].x, sizeof(floatX) * pipeline->message_elements);
    pipeline_send(pipeline, step, out);
}

/* Backward of a micro-batch through the stage. Gradients are those of the SUM of its losses; update_weights divides by
 * the number of targets in the step. */
static void stage_backward(Llama3 *m, Pipeline *pipeline, const PipelineStep *step, const StepBatch *batch) {
    int last = step->micro_batch == pipeline->schedule.micro_batches - 1;
    ReshardPoint point = last ? AFTER_LAST_USE : AFTER_BACKWARD;
    model_enter_stage(m, step->stage, step->activation_set);
    if (pipeline->schedule.pp > 1) // another micro-batch may have overwritten its ids and targets
        feed_micro_batch(m, batch, step->micro_batch);
    int end = stage_end(m);
    prefetch_backward(m, end - 1); // while the loss computes
    if (stage_has_loss(m)) {
        // In the last stage's schedule, a backward directly follows its forward: the head's input is still there.
        FsdpUnit *head = fsdp_unit(m, m->table.head);
        head_loss(m, step->micro_batch);
        fsdp_reshard(m->fsdp, head, point);
        prefetch_backward(m, end - 2);                              // end - 1 computes next
        if (!table_is_tied(&m->table) && !head->table_unit->frozen) // tied: the embedding adds to this gradient first
            fsdp_reduce_gradients(m->fsdp, head, step->micro_batch);
    } else prefetch_backward(m, end - 2);
    pipeline_receive(pipeline, step, m->d_x);
    stage_blocks_backward(m, step->micro_batch, point);
    if (stage_embeds(m)) {
        stage_embed_backward(m, step->micro_batch, point);
        return;
    }
    PipelineMessage *out = pipeline_output(pipeline, step);
    device_copy(m->dev, out->data, m->d_x, sizeof(floatX) * pipeline->message_elements);
    pipeline_send(pipeline, step, out);
}

/* Forward of the first micro-batch of `batch` alone, for evaluation and generation. The last stage leaves the residual
 * stream to the head. */
void model_forward(Llama3 *m, Pipeline *pipeline, const StepBatch *batch) {
    for (int v = 0; v < m->table.part.virtual_stages; v++) {
        PipelineStep step = ZERO;
        step.kind = PIPE_FORWARD;
        step.stage = v;
        if (pipeline_source(&pipeline->schedule, &step) >= 0) pipeline_start_receive(pipeline, &step);
        stage_forward(m, pipeline, &step, batch, AFTER_LAST_USE);
    }
}

// ---------------------------------------------------------------------------
// a rank: its place in the mesh, its device and communicators, its shards and everything that it trains with
//
// A Trainer is bound to its rank (trainer_bind), then allocated on a dry-run device or on a real one by the same code
// (trainer_allocate).

typedef struct {
    Mesh mesh; // sizes of the axes
    int rank;
    Device dev;
    Comm comm; // its groups of ranks, and their collectives
    Fsdp fsdp;
    TensorParallel tp;
    ContextParallel cp;
    Pipeline pipeline;
    int *layout; // (world, AXES) the first member of each rank's groups, as the communicators report it
} Parallel;

/* What a period of a recipe hands to the next one. A period is what the recipe's file calls a stage: here that word is
 * a pipeline's. */
typedef struct {
    StateArenas state; // weights and moments
    Progress progress;
    int save_signals_seen;
    int64_t saved; // step of a checkpoint that no line of metrics.jsonl has named yet; 0: none
} PeriodResult;

typedef struct Trainer {
    const Job *job;                // options, configuration and data, which all ranks of a process share
    const struct Trainer *dry_run; // this rank's dry run; NULL: this is the dry run
    Llama3 model;
    Parallel parallel;
    SharedGradients shared_gradients; // of norms over tp, and of a tied embedding over pp
    Optimizer optimizer;
    Loader loader;
    CheckpointWriter writer;
    Logger logger;     // writes on rank 0 only
    Progress progress; // steps, samples, updates and skipped updates so far

    ReportExchange reports;           // the ranks' reports of a step, and sums of losses and of squared gradients
    int64_t saved_by_previous_period; // PeriodResult.saved of the recipe's period before this one
    int is_checked;                   // traffic and memory of a step were compared with those of the dry run

    // evaluation
    StepBatch eval_batch; // one micro-batch
    char *eval_raw;       // (sample_bytes) scratch space for reading a sample

    double load_seconds; // from the start of loading to the moment when all ranks had their weights
} Trainer;

// ---------------------------------------------------------------------------
// one training step

/* This rank's samples of the next step. Starts to gather the sample numbers of all ranks, if samples.jsonl or a report
 * of an outlier is to name them. */
static StepBatch *next_batch(Trainer *trainer, double now) {
    Parallel *p = &trainer->parallel;
    rank_state(p->comm.heartbeat, RANK_READING, now);
    StepBatch *batch = loader_next(&trainer->loader, &p->dev, trainer->job->run.timeout);
    rank_state(p->comm.heartbeat, RANK_COMPUTING, seconds_now());
    ReportExchange *r = &trainer->reports;
    if (r->samples)
        all_gather_start(&p->comm, &r->samples_gather, AXIS_WORLD, "samples", batch->samples, r->samples,
                         sizeof(int64_t) * r->samples_of_rank, DTYPE_BYTE);
    return batch;
}

/* What this rank tells all others of a step; exchange_reports adds the sums. */
static StepReport own_report(Trainer *trainer, const StepBatch *batch) {
    const RunSettings *run = &trainer->job->run;
    const Mesh *mesh = &trainer->parallel.mesh;
    StepReport mine = ZERO;
    mine.targets = mesh_counts_samples(mesh, trainer->parallel.rank) ? batch->num_targets : 0;
    mine.samples_hash = batch->samples_hash;
    mine.seeds = sampler_fingerprint(&trainer->loader.sampler) ^ mix64(trainer->parallel.fsdp.seed);
    mine.is_writing = is_writing(&trainer->writer);
    int sharing = mesh_stride(mesh, AXIS_DP_SHARD); // tp · cp · pp ranks that compute the same samples together
    mine.figures.tokens = (int64_t)run->batch * run->seq * run->accum / sharing;
    return mine;
}

/* Updates this rank's shards with the clipped mean gradient. */
static void update_weights(Trainer *trainer, int64_t step, StepStats *s) {
    const RunSettings *run = &trainer->job->run;
    s->lr = learning_rate_at(&trainer->job->period->rate, step); // of this period of the recipe
    judge_outliers(&trainer->progress.outliers, run->outlier_window, s);
    if (s->skipped) { // loss or gradient norm is not finite
        report_skip(&trainer->reports, &trainer->job->table, &trainer->progress, step, s);
        return;
    }
    if (skip_outlier(&trainer->reports, run, &trainer->progress, &trainer->logger, step, s)) return;
    if (!s->targets && !trainer->parallel.dev.dry_run) return; // nothing to learn; a dry run has no targets
    AdamW a = {(float)s->lr, (float)run->beta1, (float)run->beta2, (float)run->eps, (float)run->weight_decay, 0, 0, 0};
    a.grad_scale = (float)(clip_coefficient(run->clip, s->grad_norm) / (double)max_i64(1, s->targets));
    trainer->progress.updates++;
    a.updates = (int)trainer->progress.updates;
    a.step = (int)step;
    optimizer_step(&trainer->optimizer, &a);
}

/* The step `whole` ends: counts its samples, and fills in how long it took and waited. */
static void step_end(Trainer *trainer, int64_t step, Span whole, StepStats *s) {
    Parallel *p = &trainer->parallel;
    Progress *progress = &trainer->progress;
    const Sampler *sampler = &trainer->loader.sampler;
    device_phase(&p->dev, NULL, NULL);
    span_end(&p->dev, whole, NULL, -1, 0);
    s->samples = sampler_global_batch(sampler);
    progress->step = step;
    progress->samples += s->samples;
    progress->tokens += s->samples * trainer->job->run.seq;
    if (!p->dev.dry_run)
        progress->samples_in_epoch = s->samples + sampler_position(sampler, step - 1, &progress->epoch);
    s->seconds = seconds_now() - whole.start;
    s->data_wait_seconds = trainer->loader.wait_seconds;
    s->wait_seconds = comm_wait_seconds(&p->comm);
    s->communication_seconds = p->comm.comm_seconds;
    double blocked = s->wait_seconds + p->comm.poll_seconds; // by communication
    s->overlap = s->communication_seconds > 0 ? fmax(0, 1 - blocked / s->communication_seconds) : 0;
}

/* One training step: forward and backward of all micro-batches, the sum of their gradients over all ranks, and the
 * update of the weights. `step` counts from 1. */
static StepStats train_step(Trainer *trainer, int64_t step) {
    Parallel *p = &trainer->parallel;
    comm_clear_ledger(&p->comm);
    Span whole = step_begin(&p->dev, step);
    StepBatch *batch = next_batch(trainer, whole.start);
    step_reports_begin(&trainer->reports);
    const Schedule *schedule = &p->pipeline.schedule; // without --pp: F0 B0 F1 B1 … of the micro-batches
    for (int i = 0; i < schedule->num_steps; i++) {
        const PipelineStep *now = &schedule->steps[i];
        pipeline_start_receives(&p->pipeline, now);
        if (now->kind == PIPE_FORWARD) stage_forward(&trainer->model, &p->pipeline, now, batch, AFTER_FORWARD);
        else stage_backward(&trainer->model, &p->pipeline, now, batch);
    }
    pipeline_finish(&p->pipeline);
    device_record_event(&p->dev, &batch->fed); // after it the loader may refill the batch
    fsdp_finish_gradients(&p->fsdp);
    device_phase(&p->dev, "optimizer", NULL);
    sum_shared_gradients(&trainer->shared_gradients);
    comm_wait(&p->comm, &trainer->reports.samples_gather);
    StepReport mine = own_report(trainer, batch);
    gradient_squared_norm(&p->fsdp, &trainer->reports.sums[SUM_SQUARED_NORM]); // of the elements that this rank owns
    // Losses, norm and checks of all ranks in one all-gather. Only here does the host wait for a GPU.
    exchange_reports(&trainer->reports, &p->fsdp, &mine, whole.start);
    int64_t first_sample = p->dev.dry_run ? 0 : batch->samples[0]; // an error message names it
    loader_release(&trainer->loader, &p->dev);
    StepStats s = sum_reports(&trainer->reports);
    check_reports(&trainer->reports, &trainer->loader.sampler, step, first_sample);
    update_weights(trainer, step, &s);
    step_end(trainer, step, whole, &s);
    return s;
}

// ---------------------------------------------------------------------------
// validation, and the loss of eval_llama3

typedef struct {
    double loss;          // mean over all targets
    int64_t targets;      // tokens whose loss counts
    double bits_per_byte; // of their text; NAN: the files do not say how many bytes it has
} Evaluation;

/* The loss on the first `max_batches` micro-batches of every rank; 0: on all samples. Every target counts once,
 * whatever the number of ranks. With max_batches, bits per byte use the whole files' average of bytes per target. */
static Evaluation evaluate(Trainer *trainer, const Dataset *data, int64_t max_batches) {
    Parallel *p = &trainer->parallel;
    Llama3 *m = &trainer->model;
    StepBatch *batch = &trainer->eval_batch;
    int B = m->B, counts = mesh_counts_samples(&p->mesh, p->rank);
    int64_t round = (int64_t)B * mesh_data_ranks(&p->mesh), batches = blocks_of(dataset_samples(data), round);
    StepReport mine = ZERO; // only its loss and targets are used
    ExactSum sum = ZERO;
    if (p->dev.dry_run) batches = 1;
    if (max_batches) batches = min_i64(batches, max_batches);
    Phase before = comm_phase(&p->comm, PHASE_VALIDATION);
    step_reports_begin(&trainer->reports);
    for (int64_t i = 0; i < batches; i++) {
        int64_t first = i * round + (int64_t)mesh_data_rank(&p->mesh, p->rank) * B;
        device_synchronize_event(batch->fed);
        for (int b = 0; b < B && !p->dev.dry_run; b++) { // samples past the end of the data have no targets
            int n = read_sample(data, p->cp.size, p->cp.rank, batch, b, first + b, trainer->eval_raw, batch->error);
            if (n < 0) user_error("%s", batch->error);
            if (counts) mine.targets += n;
        }
        model_forward(m, &p->pipeline, batch);
        device_record_event(&p->dev, &batch->fed);
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
// the memory of the model

static floatX *activation(Llama3 *m, const char *name, int64_t elements) {
    return arena_array(floatX, m->dev, MEM_ACTIVATIONS, name, elements);
}
static float *activation_fp32(Llama3 *m, const char *name, int64_t elements) {
    return arena_array(float, m->dev, MEM_ACTIVATIONS, name, elements);
}
static int32_t *activation_int32(Llama3 *m, const char *name, int64_t elements) {
    return arena_array(int32_t, m->dev, MEM_ACTIVATIONS, name, elements);
}

static Keep block_keeps(const Llama3 *m, int l) {
    const RunSettings *run = m->run;
    if (!m->training || run->recompute == RECOMPUTE_NONE) return KEEP_ALL;
    if (run->recompute == RECOMPUTE_SELECTIVE) return KEEP_MATMULS;
    if (run->recompute == RECOMPUTE_FULL) return KEEP_INPUT;
    return l % run->recompute_every ? KEEP_ALL : KEEP_INPUT; // blocks 0, K, 2K, …
}

/* Allocates a block's buffers whose Keep (the middle column of BlockActivations) is in [first, last]; the others are
 * those of `shared`. */
static void block_activations_open(Llama3 *m, BlockActivations *a, Keep first, Keep last,
                                   const BlockActivations *shared) {
    const Llama3Config *c = &m->config;
    int64_t n = m->tp->tokens, N = (int64_t)m->B * m->T;
    *a = *shared;
    a->keep = last;
    if (first == KEEP_INPUT) a->x = activation(m, "residual stream", n * c->C);
    if (first <= KEEP_MATMULS && last >= KEEP_MATMULS) {
        a->qkv = activation(m, "queries, keys, values", N * qkv_width(c));
        a->attn = activation(m, "attention output", N * c->NH * c->HD);
        a->lse = activation_fp32(m, "softmax denominators", N * c->NH);
        a->h = activation(m, "residual stream", n * c->C);
        a->gate_up = activation(m, "gate and up", 2 * N * c->F);
    }
    if (last < KEEP_ALL) return;
    a->attn_norm = activation(m, "attention norm", n * c->C);
    a->attn_rstd = activation_fp32(m, "1/rms", n);
    a->mlp_norm = activation(m, "MLP norm", n * c->C);
    a->mlp_rstd = activation_fp32(m, "1/rms", n);
    a->swiglu = activation(m, "SwiGLU output", N * c->F);
}

/* In training each micro-batch in flight has a set of BlockActivations, one for each block; else there is only one. */
static void blocks_open(Llama3 *m, const Schedule *schedule) {
    const BlockActivations nothing = ZERO;
    int stages = m->table.part.virtual_stages, count = m->training ? 0 : 1;
    Keep least = KEEP_ALL;
    for (int v = 0; v < stages && m->training; v++) {
        const Stage *stage = &m->table.stages[v];
        m->stage_begin[v] = count;
        count += schedule->activation_sets[v] * activations_of_stage(stage);
        for (int l = stage->first_block; l < stage->first_block + stage->num_blocks; l++)
            least = (Keep)min_i64(least, block_keeps(m, l));
    }
    m->in_flight = new_array(BlockActivations, count);
    if (least < KEEP_ALL) // what at least one block does not keep
        block_activations_open(m, &m->recomputed, (Keep)(least + 1), KEEP_ALL, &nothing);
    if (!m->training) block_activations_open(m, m->in_flight, KEEP_INPUT, KEEP_ALL, &nothing);
    for (int v = 0; v < stages && m->training; v++) {
        const Stage *stage = &m->table.stages[v];
        for (int i = 0; i < schedule->activation_sets[v] * activations_of_stage(stage); i++) {
            Keep keep = stage->num_blocks ? block_keeps(m, stage->first_block + i % stage->num_blocks) : KEEP_INPUT;
            block_activations_open(m, &m->in_flight[m->stage_begin[v] + i], KEEP_INPUT, keep, &m->recomputed);
        }
    }
    model_enter_stage(m, 0, 0);
}

static void head_open(Llama3 *m) {
    const Llama3Config *c = &m->config;
    int64_t n = m->tp->tokens, all = n * m->tp->size;
    m->final_x = activation(m, "residual stream", n * c->C);
    m->final_norm = activation(m, "final norm", n * c->C);
    m->final_rstd = activation_fp32(m, "1/rms", n);
    m->losses = activation_fp32(m, "losses", all);
    m->targets = activation_int32(m, "targets", (int64_t)m->B * m->T);
    // How many tokens' logits exist at the same time: equally many on each tp rank, whatever its part of the
    // vocabulary. The buffer holds floatX logits of that many, or fp32 logits of half as many in a bf16 build.
    int64_t largest_V = (m->fsdp->config->V + m->tp->size - 1) / m->tp->size; // of any tp rank
    int64_t rows = m->run->logit_rows, bytes = 0;
    if (!rows) rows = max_i64(16, min_i64(LOGIT_ROWS, (LOGITS / largest_V) & ~15));
    m->logit_rows = m->fp32_rows = (int)min_i64(m->B * m->T, rows);
    if (m->training) {
        m->fp32_rows = (int)max_i64(1, m->logit_rows * (int64_t)sizeof(floatX) / (int64_t)sizeof(float));
        bytes = m->logit_rows * logits_stride(c->V) * (int64_t)sizeof(floatX);
    }
    bytes = max_i64(bytes, m->fp32_rows * (int64_t)c->V * (int64_t)sizeof(float));
    m->logits = arena_alloc(m->dev, MEM_ACTIVATIONS, "logits", (size_t)bytes);
    device_zero(m->dev, m->losses, sizeof(float) * all); // those beyond N stay zero
    if (m->training && m->run->z_loss > 0) {
        m->z_loss.weight = (float)m->run->z_loss;
        m->z_loss.losses = activation_fp32(m, "z-losses", all);
        device_zero(m->dev, m->z_loss.losses, sizeof(float) * all);
    }
    tp_open_loss(m->tp, m->logit_rows, m->softmax_statistics);
}

/* The rotation of every position, and the positions of this rank's tokens. */
static void positions_open(Llama3 *m, int count) {
    const Llama3Config *c = &m->config;
    m->cos_sin = activation_fp32(m, "rotation table", (int64_t)m->num_positions * c->HD);
    m->positions = activation_int32(m, "positions", count);
    if (m->dev->dry_run) return;
    size_t table = sizeof(float) * m->num_positions * c->HD;
    float *cos_sin = (float *)checked_malloc(table);
    int32_t *positions = new_array(int32_t, count);
    rope_table(cos_sin, c, m->num_positions);
    for (int t = 0; t < count; t++) positions[t] = cp_position(m->cp, t, m->T);
    device_write(m->dev, m->cos_sin, cos_sin, table);
    device_write(m->dev, m->positions, positions, sizeof(int32_t) * count);
    free(cos_sin);
    free(positions);
}

/* Buffers for micro-batches of B sequences, of which this rank has T tokens each. cached > 0: generation, with a cache
 * for the keys and values of that many positions. */
static void model_open(Llama3 *m, const Schedule *schedule, int B, int T, int cached) {
    const Llama3Config *c = &m->config;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD, N = (int64_t)B * T;
    int first_token_id = (int)split_begin(m->fsdp->config->V, m->table.part.tp, m->table.part.tp_rank);
    tp_open(m->tp, m->fsdp->comm, (int)N, c->C, first_token_id, m->training);
    cp_open(m->cp, m->fsdp->comm, B, T, Q, KV, m->training);
    model_set_tokens(m, B, T, 0);
    int64_t n = m->tp->tokens;
    blocks_open(m, schedule);
    m->sublayer_out = activation(m, "sublayer output", n * c->C);
    if (m->table.embed >= 0) m->ids = activation_int32(m, "token ids", N);
    if (m->run->doc_mask) m->docs = activation_int32(m, "documents", N * m->cp->size);
    m->own_docs = m->docs;
    if (m->docs && m->cp->size > 1) m->own_docs = activation_int32(m, "documents of this rank's tokens", N);
    if (m->table.head >= 0) head_open(m);
    if (m->training) {
        m->d_x = activation(m, "d residual stream", n * c->C);
        m->d_norm = activation(m, "d norm", n * c->C);
        m->d_qkv = activation(m, "d queries, keys, values", N * qkv_width(c));
        m->d_attn = activation(m, "d attention output", N * Q);
        m->d_swiglu = activation(m, "d SwiGLU output", N * c->F);
    }
    m->shapes.qkv = linear_layer(c, W_Q);
    m->shapes.o = linear_layer(c, W_O);
    m->shapes.gate_up = linear_layer(c, W_GATE);
    m->shapes.down = linear_layer(c, W_DOWN);
    lora_open(&m->lora, m->dev, c, N, m->training);
    m->num_positions = cached ? cached : T * m->cp->size;
    positions_open(m, cached ? cached : T);
    if (!cached) return;
    m->kv_cache = activation(m, "cached keys and values", (int64_t)c->L * cached * 2 * KV);
    m->next_logits = arena_array(float, m->dev, MEM_HOST, "next token's logits", c->V);
}

// ---------------------------------------------------------------------------
// opening and closing a rank

/* The data loader begins where the period begins, or where the checkpoint ended. */
static void data_open(Trainer *trainer) {
    const Job *j = trainer->job;
    const RunSettings *run = &j->run;
    Sampler s = job_sampler(j, trainer->parallel.rank);
    LoaderOptions options = ZERO;
    trainer->progress = j->start;
    outliers_continue(&trainer->progress.outliers, run->outlier_window);
    options.T = run->seq;
    options.document_ids = run->doc_mask;
    options.cp = trainer->parallel.cp.size;
    options.cp_rank = trainer->parallel.cp.rank;
    options.first_step = j->start.step;
    options.end_step = period_end_step(j);
    options.workers = run->workers;
    options.cores = j->cores_per_rank;
    loader_open(&trainer->loader, &trainer->parallel.dev, &j->data, &s, &options);
}

/* Allocates everything that this rank needs, on a dry-run device or a real one. */
static void trainer_allocate(Trainer *trainer) {
    const Job *j = trainer->job;
    const RunSettings *run = &j->run;
    Llama3 *m = &trainer->model;
    Parallel *p = &trainer->parallel;
    Device *dev = &p->dev;
    if (dev->rec.max_events && j->purpose.plans) // the plan's timeline is not part of the planned memory
        dev->rec.events = new_array(Event, dev->rec.max_events);
    else if (dev->rec.max_events) {
        Event *events = arena_array(Event, dev, MEM_HOST, "timeline", dev->rec.max_events);
        if (!dev->dry_run) dev->rec.events = events;
    }
    step_reports_open(&trainer->reports, &p->comm, run->z_loss > 0);
    Sharding sharding = sharding_of(run);
    sharding.writes_files |= j->purpose.files != NULL;
    sharding.merges_adapters = j->purpose.merges_adapters;
    if (job_streams_weights(j)) fsdp_bind(&p->fsdp, &p->comm, &m->table, &j->config, &sharding);
    else fsdp_open(&p->fsdp, &p->comm, &m->table, &j->config, &sharding, m->training);
    if (m->training) {
        replica_check_open(&p->fsdp);
        shared_gradients_open(&trainer->shared_gradients, &p->fsdp);
        optimizer_open(&trainer->optimizer, &p->fsdp, (float)run->muon_momentum);
    }
    m->loss_sum = &trainer->reports.sums[SUM_LOSS];
    if (run->z_loss > 0 && m->training) m->z_loss_sum = &trainer->reports.sums[SUM_Z_LOSS];
    if (!j->purpose.converts) {
        model_open(m, &p->pipeline.schedule, run->batch, run->seq / j->mesh.size[AXIS_CP], j->purpose.cached_positions);
        pipeline_open(&p->pipeline, &p->comm, (int64_t)p->tp.tokens * m->config.C);
    }
    int cp = j->mesh.size[AXIS_CP];
    step_batch_open(&trainer->eval_batch, dev, run->batch, run->seq, cp, run->doc_mask);
    trainer->eval_raw = arena_array(char, dev, MEM_HOST, "raw window", sample_bytes(run->seq, cp));
    CheckpointWriter *w = &trainer->writer;
    checkpoint_writer_open(w, &p->fsdp, run);
    w->recipe = &j->recipe;
    w->tokenizer = &j->tokenizer_files;
    w->base_model = j->base_model;
    w->base_fingerprint = j->base_fingerprint;
    if (m->training && run->out) checkpoint_prepare(w, &j->table, &j->resume_from);
    if (j->purpose.files) j->purpose.files(w, j);
    checkpoint_writer_allocate(w);
    if (!m->training) return;
    if (run->out || run->outlier_window) step_reports_name_samples(&trainer->reports, (int64_t)run->accum * run->batch);
    data_open(trainer);
}

static void trainer_close(Trainer *trainer) {
    Parallel *p = &trainer->parallel;
    logger_free(&trainer->logger);
    if (trainer->model.training) loader_close(&trainer->loader, &p->dev);
    device_destroy_event(trainer->eval_batch.fed);
    for (int i = 0; i < LOADER_DEPTH && !p->dev.dry_run; i++) device_destroy_event(trainer->loader.ring[i].fed);
    checkpoint_writer_close(&trainer->writer);
    if (!p->dev.dry_run) ops_close(&p->dev);
    if (p->dev.dry_run) free(p->dev.rec.events);
    free(p->layout);
    pipeline_close(&p->pipeline);
    tp_close(&p->tp);
    request_close(&p->cp.request);
    free(trainer->model.in_flight);
    table_close(&trainer->model.table);
    shared_gradients_close(&trainer->shared_gradients);
    optimizer_close(&trainer->optimizer);
    fsdp_close(&p->fsdp);
    comm_close(&p->comm);
    device_close(&p->dev);
}

/* The schedule, tensors and configuration of `rank`; nothing is allocated on its device yet. */
static void trainer_bind(Trainer *trainer, const Job *j, int rank) {
    const RunSettings *run = &j->run;
    Parallel *p = &trainer->parallel;
    Llama3 *m = &trainer->model;
    memset(trainer, 0, sizeof *trainer);
    trainer->job = j;
    p->mesh = j->mesh;
    p->rank = rank;
    ModelPart part = {j->mesh.size[AXIS_TP],
                      mesh_coordinate(&j->mesh, rank, AXIS_TP),
                      j->mesh.size[AXIS_PP],
                      mesh_coordinate(&j->mesh, rank, AXIS_PP),
                      run->pp_chunks,
                      run->pp_light_ends,
                      j->config.tied && (j->mesh.size[AXIS_PP] > 1 || run->deterministic)};
    schedule_open(&p->pipeline.schedule, part.pp, part.pp_rank, part.virtual_stages, run->accum);
    table_open(&m->table, &j->config, run->wrap_size, &part);
    table_freeze(&m->table, &j->recipe, j->period);
    m->config = config_of_part(&j->config, &part);
    m->run = run;
    m->training = j->purpose.trains;
    m->softmax_statistics = j->purpose.softmax_statistics;
    m->dev = &p->dev;
    m->fsdp = &p->fsdp;
    m->tp = &p->tp;
    m->cp = &p->cp;
}

/* Ends a period, but for what the next one continues with. */
static PeriodResult trainer_end_period(Trainer *trainer) {
    PeriodResult result = ZERO;
    device_synchronize_all(&trainer->parallel.dev);
    result.state = device_take_state(&trainer->parallel.dev);
    result.progress = trainer->progress;
    result.save_signals_seen = trainer->reports.save_signals_seen;
    result.saved = trainer->logger.saved;
    trainer_close(trainer);
    return result;
}

/* Opens what was dry-run before: the device, the communicators, and the weights in their shards. `before`: the period
 * whose weights and moments it continues with; NULL: none. */
static void trainer_open(Trainer *trainer, const Trainer *dry_run, Job *j, int rank, const PeriodResult *before) {
    const RunSettings *run = &j->run;
    Parallel *p = &trainer->parallel;
    trainer_bind(trainer, j, rank);
    trainer->dry_run = dry_run;
    if (OFFLOAD_IN_PLACE && offloaded(run))
        make_directories(run->out); // by each rank: hosts may not share the directory
    device_open(&p->dev, &dry_run->parallel.dev, run->out, rank, before ? &before->state : NULL);
    ops_open(&p->dev, rank == 0);
    comm_open(&p->comm, &p->dev, &j->mesh, rank, j->transport, j->host_transport, &j->thread_world, run->timeout);
    comm_connect(&p->comm, &dry_run->parallel.comm, transport_sums(run));
    if (run->out) comm_set_flight_directory(&p->comm, run->out);
    check_agreement(&p->comm, j);
    check_shared_out(&p->comm, run->out);
    p->layout = layout_read_back(&p->comm);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // from here on each process reports its own errors
    trainer_allocate(trainer);
    p->fsdp.seed = (uint64_t)run->seed;
    double start = seconds_now();
    if (before) {
        fsdp_refresh_copies(&p->fsdp);
        trainer->progress.updates = before->progress.updates;
        trainer->progress.skips = before->progress.skips;
        trainer->progress.samples = before->progress.samples;
        trainer->progress.tokens = before->progress.tokens;
        trainer->progress.outliers = before->progress.outliers;
        trainer->reports.save_signals_seen = before->save_signals_seen;
        trainer->saved_by_previous_period = before->saved;
    } else if (!job_streams_weights(j))
        weights_load(&p->fsdp, j->has_weights ? &j->weights : NULL, run->adapters ? &j->adapters : NULL,
                     &j->resume_from);
    comm_barrier(&p->comm, "start-up: weights are loaded"); // a slow disk must not count as waiting in the first step
    trainer->load_seconds = seconds_now() - start;
    comm_phase(&p->comm, PHASE_STEP);
}

// ---------------------------------------------------------------------------
// the check after the first step

/* Compares expected, dry-run and measured traffic, and dry-run and measured memory, after the first step that has
 * updated the weights: the update of Muon communicates, too. */
static void check_first_step(Trainer *trainer) {
    const Parallel *p = &trainer->parallel, *dry = &trainer->dry_run->parallel;
    const RunSettings *run = &trainer->job->run;
    Ledger l = ZERO;
    expected_traffic(l.traffic[EXPECTED], &trainer->job->config, p->mesh.world, p->rank, run, sizeof(StepReport));
    memcpy(l.traffic[DRY_RUN], dry->comm.traffic_started, sizeof l.traffic[DRY_RUN]);
    memcpy(l.traffic[MEASURED], p->comm.traffic_measured, sizeof l.traffic[MEASURED]);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        l.dry_run_memory[c] = dry->dev.arenas[c].peak;
        l.measured_memory[c] = p->dev.arenas[c].peak;
    }
    if (p->rank == 0 && run->out) {
        FILE *f = out_file_create(run->out, "ledger.json");
        ledger_write(&l, &dry->dev, f);
        fclose(f);
    }
    ledger_check(&l, p->rank);
    trainer->is_checked = 1;
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
    device_open_dry_run(dev, j->threads_per_rank, offloaded(&j->run));
    dev->on.deterministic = j->run.deterministic;
    dev->gpu = job_gpu_of_rank(j, rank);
    dev->by_nccl = uses_nccl(j);
    dev->reductions_apart = job_reductions_apart(j);
    ops_open(dev, 0);
    dev->rec.max_events = max_events;
    comm_open_dry_run(&p->comm, dev, &j->mesh, rank);
    trainer_allocate(trainer);
    if (!job_streams_weights(j)) weights_load(&p->fsdp, NULL, NULL, &j->resume_from); // reads nothing
    if (p->fsdp.fingerprints) fsdp_check_replicas(&p->fsdp, 0);
    memset(dev->rec.ops, 0, sizeof dev->rec.ops); // start-up does not count
    dev->rec.num_events = 0;
    dev->rec.times = j->op_times; // from here on the clock runs
    p->comm.recorder = recorder;
    if (recorder && dev->rec.times && dev->rec.times->has_streams) dev->rec.stream_recorder = &recorder->streams;
    if (j->purpose.dry_run) j->purpose.dry_run(trainer);
    dev->rec.stream_recorder = NULL;
    if (trainer->model.training) matmul_rate(dev); // measured after the first step: count its scratch memory
}

/* The dry run of `rank`. `recorder`: lists its communication; NULL: none. With --trace there are two dry
 * runs: the first one counts the events of a step, the second one reserves memory for the timeline of all steps, or of
 * as many as fit. */
static void dry_run_open(Trainer *trainer, const Job *j, int rank, CommRecorder *recorder) {
    dry_run_once(trainer, j, rank, 0, recorder);
    if (!j->run.trace || recorder) return;
    int64_t per_step = trainer->parallel.dev.rec.num_events + 4; // a validation, a replica check and a save
    int64_t of_run = min_i64(MAX_EVENTS, per_step * j->period->steps);
    trainer_close(trainer);
    dry_run_once(trainer, j, rank, j->purpose.plans ? per_step : of_run, NULL);
}

// ---------------------------------------------------------------------------
// what follows a step

/* Saves a checkpoint when it is due, and makes an earlier one visible once all ranks have written it. All ranks decide
 * alike: they know the same reports. */
static void save_when_due(Trainer *trainer, int asked, int ends) {
    const RunSettings *run = &trainer->job->run;
    CheckpointWriter *writer = &trainer->writer;
    int64_t step = trainer->progress.step, events = trainer->parallel.dev.rec.num_events;
    double start = seconds_now();
    int wanted = ends || asked & SIGNAL_SAVE || (run->save_every && step % run->save_every == 0);
    int due = wanted && writer->saved_step != step;
    // an earlier save is open: publish it if all ranks have written it, or if it cannot wait any longer
    if (writer->is_open && (due || ends || !trainer->reports.is_writing)) checkpoint_commit(writer);
    if (due && trainer->parallel.rank == 0) logger_sync(&trainer->logger, step);
    if (due) checkpoint_save(writer, &trainer->progress);
    if (ends && writer->is_open) checkpoint_commit(writer);
    after_save_check(&writer->after_save); // on rank 0 a command may have ended
    trace_as_one_event(&trainer->parallel.dev, events, "saving", start);
}

/* After every --val-every steps, unless that is 0, and after the last one. */
static void validate_when_due(Trainer *trainer, int64_t step) {
    const RunSettings *run = &trainer->job->run;
    int64_t events = trainer->parallel.dev.rec.num_events;
    double start = seconds_now();
    int is_due = step >= period_end_step(trainer->job) || (run->val_every && step % run->val_every == 0);
    if (!trainer->job->val.num_files || !is_due) return;
    Evaluation e = evaluate(trainer, &trainer->job->val, run->val_batches);
    trace_as_one_event(&trainer->parallel.dev, events, "validation", start);
    if (!isfinite(e.loss))
        run_failure("step %" PRId64 ": the validation loss is %g, not finite: lower --lr, lengthen --warmup, or check "
                    "the data",
                    step, e.loss);
    if (trainer->parallel.rank == 0) logger_validation(&trainer->logger, step, e.loss, e.targets, e.bits_per_byte);
}

/* What follows a step, but saving. `has_updated`: the step has updated the weights; `flops`: of a step of this rank;
 * `rate`: FLOP/s of its matmuls, measured after the first step. */
static void after_step(Trainer *trainer, StepStats *s, int has_updated, double flops, double *rate) {
    int64_t step = trainer->progress.step;
    Parallel *p = &trainer->parallel;
    s->matmul_share = *rate > 0 ? flops / s->seconds / *rate : 0;
    s->mfu = job_mfu(trainer->job, s->seconds);
    if (step == trainer->job->start.step + 1) *rate = matmul_rate(&p->dev); // of the run, or of a period
    if (!trainer->is_checked && has_updated) check_first_step(trainer);
    if (p->rank == 0) {
        logger_step(&trainer->logger, step, s, trainer->reports.figures);
        logger_samples(&trainer->logger, step, trainer->progress.epoch, trainer->reports.samples,
                       trainer->reports.samples_of_rank);
        note_lost_progress();
    }
    if (trainer->job->run.trace) device_synchronize_all(&p->dev); // what follows is not part of the step
    if (p->fsdp.fingerprints && step % REPLICA_CHECK_STEPS == 0) {
        int64_t events = p->dev.rec.num_events;
        double start = seconds_now();
        fsdp_check_replicas(&p->fsdp, step);
        trace_as_one_event(&p->dev, events, "replica check", start);
    }
    validate_when_due(trainer, step);
}

/* --trace: writes the timeline of all ranks; `traced`: the last step of which it has all events. */
static void write_timeline(Trainer *trainer, int64_t traced) {
    const RunSettings *run = &trainer->job->run;
    trace_write(&trainer->parallel.comm, run->trace);
    if (trainer->parallel.rank) return;
    if (traced == period_end_step(trainer->job)) printf("timeline of all steps: %s\n", run->trace);
    else
        printf("timeline of the first %" PRId64 " of %" PRId64 " steps: %s (it has room for %" PRId64
               " events per rank)\n",
               traced, period_end_step(trainer->job), run->trace, trainer->parallel.dev.rec.max_events);
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

static void plan_close(Plan *p) {
    for (int c = 0; c < p->count; c++) {
        trainer_close(p->classes[c].trainer);
        free(p->classes[c].trainer);
    }
    free(p->classes);
    free(p->class_of);
}

/* config.txt, layout.json and plan.json under --out. */
static void write_run_files(const Trainer *trainer) {
    const Job *j = trainer->job;
    FILE *f = out_file_create(j->run.out, "config.txt");
    options_write(j->options, &j->run, f);
    if (fclose(f)) user_error("cannot write config.txt under %s: %s", j->run.out, strerror(errno));
    f = out_file_create(j->run.out, "layout.json");
    layout_write(f, &j->mesh, trainer->parallel.layout);
    if (fclose(f)) user_error("cannot write layout.json under %s: %s", j->run.out, strerror(errno));
    Plan plan;
    plan_begin(&plan, j);
    for (int rank = 0; rank < j->mesh.world; rank++) { // one dry run for each class of ranks
        int representative = plan_representative(&plan, rank);
        plan.class_of[rank] = plan.class_of[representative];
        if (representative < rank) continue;
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_once(dry_run, j, rank, 0, NULL);
        plan_take(&plan, rank, dry_run);
    }
    plan_write_file(j->run.out, plan_json(&plan, samples_per_step(&j->run, &j->mesh) * j->run.seq, NULL));
    plan_close(&plan);
}

// ---------------------------------------------------------------------------
// the training loop

/* Rank 0 prints the banner, and opens and writes the files of the run. */
static void report_start(Trainer *trainer) {
    const Job *j = trainer->job;
    const Parallel *p = &trainer->parallel, *dry = &trainer->dry_run->parallel;
    print_banner(j, &p->fsdp, &dry->dev, p->layout, &trainer->loader, nccl_need(j, &dry->comm), trainer->load_seconds);
    logger_open(&trainer->logger, j->options, &j->run, &p->comm, &dry->dev, &trainer->progress,
                j->resume_from.dir[0] != 0, trainer->saved_by_previous_period);
    logger_data(&trainer->logger, &j->data, trainer->progress.samples_in_epoch,
                begins_later_period(j) || j->resume_from.data_changed);
    if (j->run.out) write_run_files(trainer);
}

/* Trains up to the end of the period, or until a signal asks for the end. Returns 1 if the period is complete. */
static int train(Trainer *trainer) {
    const RunSettings *run = &trainer->job->run;
    int64_t last = period_end_step(trainer->job);
    Device *dev = &trainer->parallel.dev;
    Progress *progress = &trainer->progress;
    int64_t traced = 0;
    double flops = device_flops(&trainer->dry_run->parallel.dev, 0), rate = 0;
    int ends = progress->step == last, asked_to_end = 0, speaks = trainer->parallel.rank == 0;
    const Progress before = *progress;
    if (speaks) report_start(trainer);
    is_training = 1;                                    // from here on Ctrl-C saves a checkpoint
    timeline_truncate(dev, 0);                          // the timeline begins here
    if (ends && run->out) save_when_due(trainer, 0, 1); // nothing is left to train: save a copy under --out
    while (!ends) {
        int64_t events = dev->rec.num_events, updates = progress->updates;
        StepStats s = train_step(trainer, progress->step + 1);
        int asked = signals_asked(&trainer->reports);
        after_step(trainer, &s, progress->updates > updates, flops, &rate);
        // num_events counts on when the timeline is full: this step is in it entirely
        if (events < dev->rec.num_events && dev->rec.num_events <= dev->rec.max_events) traced = progress->step;
        asked_to_end |= asked & SIGNAL_END;
        ends = progress->step == last || asked_to_end;
        if (ends) check_learned(&before, progress);
        if (asked && speaks) {
            printf("step %6" PRId64 " | a signal asked to save%s\n", progress->step,
                   asked & SIGNAL_END ? " and to end the run" : "");
            fflush(stdout); // launch scripts read this line
        }
        if (run->out) save_when_due(trainer, asked, ends);
    }
    is_training = 0;
    if (run->trace) write_timeline(trainer, traced);
    loader_close(&trainer->loader, dev);
    int is_stopped = asked_to_end && trainer->job->next_period; // before the recipe's next period
    int is_complete = progress->step == last && !is_stopped;
    if (!speaks) return is_complete;
    logger_loader(&trainer->loader);
    logger_close(&trainer->logger, !is_complete || !trainer->job->next_period);
    note_lost_progress();
    return is_complete;
}

// ---------------------------------------------------------------------------
// one rank, from its dry run to its end

/* Opens what this rank needs, unless this or a later period needs more memory than there is. */
static void rank_open(Trainer *trainer, Trainer *dry_run, Job *j, int rank) {
    int checks = rank == 0 || j->host_transport == &transport_threads || uses_nccl(j);
    for (const Job *later = j->next_period; checks && later; later = later->next_period) {
        dry_run_open(dry_run, later, rank, NULL);
        check_memory(later, &dry_run->parallel.comm);
        trainer_close(dry_run);
    }
    dry_run_open(dry_run, j, rank, NULL);
    // check_memory compares this rank's need, times the ranks that share its memory, with what is free. Ranks that are
    // threads all check: each allocates without waiting for the others, so it must have checked first. If ranks are
    // processes, only rank 0 checks its host, but with NCCL each rank checks its own GPU.
    if (checks) check_memory(j, &dry_run->parallel.comm);
    if (rank == 0) job_check_outputs(j); // last, since it may create a directory
    if (rank == 0) note_inputs(j);
    trainer_open(trainer, dry_run, j, rank, NULL);
}

static void rank_main(Job *j, int rank) {
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer);
    rank_open(trainer, dry_run, j, rank);
    int complete = train(trainer);
    // A later period of the recipe is like a run that resumes at the end of the period before it, except that weights
    // and moments stay where they are.
    for (Job *later = j->next_period; complete && later; later = later->next_period) {
        if (trainer->job->run.after_save) wait_for_commands(&trainer->writer);
        comm_phase(&trainer->parallel.comm, PHASE_START); // the period opens everything again
        PeriodResult before = trainer_end_period(trainer);
        trainer_close(dry_run);
        dry_run_open(dry_run, later, rank, NULL);
        trainer_open(trainer, dry_run, later, rank, &before);
        complete = train(trainer);
    }
    if (!complete) __atomic_store_n(&j->ended_early, 1, __ATOMIC_RELAXED); // by all threads
    if (j->run.after_save) wait_for_commands(&trainer->writer);
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
    process_begin(argv);
    job_take_options(&job, options_parse(argc, argv));
    job.purpose = training();
    if (help_or_version(&job.run, "train_llama3", option_rows, 0, NULL)) return 0;
    signal(SIGPIPE, SIG_IGN); // training continues when the reader of its output ends
    LaunchInfo started = process_connect(&job.run, job.run.out != NULL, seconds_to_connect(&job.run), &argc, &argv);
    job_open(&job, &started);
    if (job.run.out) signals_install(under_mpirun());
    launch(&job, started.rank, rank_main);
    job_close(&job);
    comm_end_process();
    return job.ended_early ? EXIT_ENDED_EARLY : 0;
}
#endif
