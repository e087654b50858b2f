/* train_llama3.cu: trains Llama 3 with fully sharded data parallelism. Reads from top to bottom:
 * the model (block forward, block backward), one training step, evaluation, generation, main. Options: options.h.
 *
 * Every piece of arithmetic is an op (kernels.h), every exchange a collective (comm.h, through fsdp.h), every
 * buffer comes from an arena (device.h). So the same code trains, and, on a walking device, tells the memory,
 * FLOPs and traffic of any rank before anything is allocated.
 */
#include "device.h"     // defines: floatX, Device, arena_alloc, user_error, run_failure
#include "comm.h"       // defines: Mesh, Comm, all_gather_now, comm_open
#include "llama3.h"     // defines: Llama3Config, TensorTable, rope_table
#include "kernels.h"    // defines: the ops: linear_forward, attention_backward, adamw, …
#include "fsdp.h"       // defines: Fsdp, unit_gather, unit_free, unit_reduce
#include "options.h"    // defines: Options, options_parse, options_print, number_behind
#include "dataloader.h" // defines: Dataset, Sampler, Loader
#include "tokenizer.h"  // defines: Tokenizer, tokenizer_encode, tokenizer_decode
#include "safetensors.h" // defines: StFiles, model_files_open
#include "checkpoint.h" // defines: checkpoint_save, checkpoint_open, checkpoint_load, model_load, model_export, out_open
#include "plan.h"       // defines: law_of_step, Ledger, ledger_check, Cluster, plan_print
#include "logger.h"     // defines: Logger, logger_step, layout_write, trace_write

/* How the options shard the model: what fsdp.h and the law go by. */
static Sharding sharding_of(const Options *o) {
    Sharding s = ZERO;
    s.strategy = strategy_find(o->sharding);
    s.slots = o->slots;
    s.accumulation = o->accum;
    s.local = !strcmp(o->accumulate, "local");
    s.deterministic = o->deterministic;
    s.check_replicas = o->check_replicas;
    s.saves = o->out || o->export_dir;
    s.reduce_dtype = strcmp(o->reduce_dtype, "bf16") ? DTYPE_F32 : DTYPE_BF16;
    s.summed = o->transport && !strcmp(o->transport, "nccl") && !o->deterministic;
    return s;
}

// ---------------------------------------------------------------------------
// the model: its activations, and the run that everything hangs on

/* What a block keeps from forward to backward; the rest is computed again, in buffers that such blocks share. */
typedef enum { KEEP_INPUT, KEEP_PRODUCTS, KEEP_ALL } Keep;

typedef struct {        // of one block, what backward needs; N = B·T rows, QKV = (NH + 2·NKV)·HD
    Keep keep;          //          kept by
    floatX *x;          // (N, C)       all       residual stream as the block reads it
    floatX *attn_in;    // (N, C)       KEEP_ALL  normed
    float *attn_rstd;   // (N)          KEEP_ALL
    floatX *qkv;        // (N, QKV)     PRODUCTS  queries, keys, values, after the rotation (it is done in place: to do it again saves nothing)
    floatX *attn;       // (N, NH·HD)   PRODUCTS  attention's output
    float *lse;         // (B, NH, T)   PRODUCTS  log of the softmax's denominator
    floatX *mid;        // (N, C)       PRODUCTS  residual stream between attention and feed-forward
    floatX *ffn_in;     // (N, C)       KEEP_ALL  normed
    float *ffn_rstd;    // (N)          KEEP_ALL
    floatX *gate_up;    // (N, 2F)      PRODUCTS
    floatX *hidden;     // (N, F)       KEEP_ALL  silu(gate)·up
} BlockActivations;

typedef struct {
    int B, T;                  // of the batch that is computed now
    int past;                  // generation: tokens before this batch, whose keys and values are in the cache
    int saved;                 // blocks whose activations are kept: all when training, else one
    BlockActivations *blocks;  // (saved)
    BlockActivations again;    // where what is not kept is computed, and computed again; NULL where all blocks keep it
    floatX *branch;            // (N, C) what the last half-block adds to the residual stream
    floatX *final_x, *final_in; float *final_rstd; // the final norm's input, output, 1/rms
    float *logits;             // (chunk, V)
    int chunk;                 // rows of logits that exist at a time
    float *losses;             // (N)
    int32_t *ids, *targets;    // (N) of the batch that is computed now
    int32_t *docs;             // (B, T) its documents; NULL without --doc-mask
    floatX *dx, *dnorm, *dqkv, *dattn, *dhidden; // gradients of: residual stream (N, C), a norm's output (N, C), …
    float *cos_sin;            // (positions, 2, HD/2)
    int32_t *positions;        // (positions) 0, 1, 2, …
    floatX *cache;             // generation: (L, positions, 2·NKV·HD) keys and values; else NULL
    float *next_logits;        // generation: (V) where the host reads them
    int positions_max;
} Model;

typedef struct {               // what each rank tells all others at the end of a step; the only exchange beside FSDP's
    ExactSum loss, squared_norm; // of all its tokens, of its part of the gradient
    int64_t targets;           // positions that count
    int64_t bad_tensor;        // the first of this rank whose gradient is not finite; -1: none
    uint64_t setup;            // of what all ranks began with: the shuffle, the seed of the weights
    uint64_t samples_hash;     // of the samples' indices
    uint32_t order[AXES];      // of each group's collectives so far
    int to_save, to_end;       // signals that its process was sent so far
    int writing;               // its part of a checkpoint is not yet on the disk
    RankFigures figures;
} StepReport;

enum { SUM_LOSS, SUM_SQUARED_NORM, SUMS };

typedef struct Run {           // one per rank
    const Options *opt;
    const Llama3Config *config;
    const TensorTable *table;
    const Dataset *data, *val;
    const Checkpoint *from;
    Mesh mesh;
    int rank, training;
    Device dev;
    Comm comm;
    Fsdp fsdp;
    Model model;
    Loader loader;
    Saver saver;
    ExactSum *sums;            // (SUMS) of the step so far, where ops add to them
    StepReport *reports;       // (world)
    RankFigures *figures;      // (world) the same ranks' figures, side by side
    int64_t *samples;          // (world, accumulation, B) with --out: what the step consumes
    Request samples_told;
    int32_t *eval_inputs, *eval_targets, *eval_docs; // (B, T); documents NULL without --doc-mask
    char *eval_raw;            // 5·(T + 1) bytes
    int *layout, *hosts;       // (world, AXES) leaders of all groups, read back from the transport; (world) on which host each is
    double load_seconds;       // in which all ranks had their weights
    int saves_asked, writing;  // by signals, and done; by the last step's reports, a part of a checkpoint is not yet on the disk
    Progress at;               // how far the run has come; skipped steps had a gradient that was not finite
    Logger log;                // rank 0
} Run;

static inline int qkv_width(const Llama3Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

static floatX *activation(Run *r, const char *name, int64_t elements) {
    return (floatX *)arena_alloc(&r->dev, MEM_ACTIVATIONS, name, sizeof(floatX) * (size_t)elements);
}

static float *activation_fp32(Run *r, const char *name, int64_t elements) {
    return (float *)arena_alloc(&r->dev, MEM_ACTIVATIONS, name, sizeof(float) * (size_t)elements);
}

static Keep block_keeps(const Run *r, int l) {
    const char *what = r->opt->recompute;
    if (!r->training || !strcmp(what, "none")) return KEEP_ALL;
    if (!strcmp(what, "selective")) return KEEP_PRODUCTS;
    return !strcmp(what, "full") || l % number_behind(what, "every") == 0 ? KEEP_INPUT : KEEP_ALL;
}

/* Allocates what is kept from level `first` to level `last`; the others point to where `shared` has them. */
static void block_activations_open(Run *r, BlockActivations *a, int64_t N, Keep first, Keep last, const BlockActivations *shared) {
    const Llama3Config *c = r->config;
    int products = first <= KEEP_PRODUCTS && last >= KEEP_PRODUCTS, all = last == KEEP_ALL;
    *a = *shared;
    a->keep = last;
    if (first == KEEP_INPUT) a->x = activation(r, "residual stream", N * c->C);
    if (all) a->attn_in = activation(r, "attention norm", N * c->C);
    if (all) a->attn_rstd = activation_fp32(r, "1/rms", N);
    if (products) a->qkv = activation(r, "queries, keys, values", N * qkv_width(c));
    if (products) a->attn = activation(r, "attention output", N * c->NH * c->HD);
    if (products) a->lse = activation_fp32(r, "softmax denominators", N * c->NH);
    if (products) a->mid = activation(r, "residual stream", N * c->C);
    if (all) a->ffn_in = activation(r, "feed-forward norm", N * c->C);
    if (all) a->ffn_rstd = activation_fp32(r, "1/rms", N);
    if (products) a->gate_up = activation(r, "gate and up", 2 * N * c->F);
    if (all) a->hidden = activation(r, "hidden", N * c->F);
}

/* Buffers for batches of up to (B, T). `cached` > 0: keys and values of that many positions are kept. */
static void model_open(Run *r, int B, int T, int cached) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    int64_t N = (int64_t)B * T, Q = (int64_t)c->NH * c->HD;
    m->B = B, m->T = T, m->past = 0;
    m->saved = r->training ? c->L : 1;
    m->blocks = (BlockActivations *)checked_malloc(sizeof(BlockActivations) * (size_t)m->saved);
    const BlockActivations nothing = ZERO;
    Keep least = block_keeps(r, 0); // by any block: of every:N the first is one that is computed again
    if (least < KEEP_ALL) block_activations_open(r, &m->again, N, (Keep)(least + 1), KEEP_ALL, &nothing);
    for (int l = 0; l < m->saved; l++) block_activations_open(r, &m->blocks[l], N, KEEP_INPUT, block_keeps(r, l), &m->again);
    m->branch = activation(r, "branch", N * c->C);
    m->final_x = activation(r, "residual stream", N * c->C);
    m->final_in = activation(r, "final norm", N * c->C);
    m->final_rstd = activation_fp32(r, "1/rms", N);
    m->losses = activation_fp32(r, "losses", N);
    m->ids = (int32_t *)activation_fp32(r, "token ids", N);
    m->targets = (int32_t *)activation_fp32(r, "targets", N);
    if (r->opt->doc_mask) m->docs = (int32_t *)activation_fp32(r, "documents", N);
    m->chunk = (int)min_i64(N, max_i64(16, min_i64(LOGIT_ROWS, (LOGITS / c->V) & ~15)));
    m->logits = activation_fp32(r, "logits", (int64_t)m->chunk * c->V);
    if (r->training) {
        m->dx = activation(r, "d residual stream", N * c->C);
        m->dnorm = activation(r, "d norm", N * c->C);
        m->dqkv = activation(r, "d queries, keys, values", N * qkv_width(c));
        m->dattn = activation(r, "d attention output", N * Q);
        m->dhidden = activation(r, "d hidden", N * c->F);
    }
    m->positions_max = cached ? cached : T;
    m->cos_sin = activation_fp32(r, "rotation table", (int64_t)m->positions_max * c->HD);
    m->positions = (int32_t *)activation_fp32(r, "positions", m->positions_max);
    if (cached) m->cache = activation(r, "keys and values", (int64_t)c->L * cached * 2 * c->NKV * c->HD);
    if (cached) m->next_logits = (float *)arena_alloc(&r->dev, MEM_HOST, "next token's logits", sizeof(float) * (size_t)c->V);
    if (r->dev.walk) return;
    size_t count = (size_t)m->positions_max, table = sizeof(float) * count * (size_t)c->HD;
    float *cos_sin = (float *)checked_malloc(table);
    int32_t *positions = (int32_t *)checked_malloc(sizeof(int32_t) * count);
    rope_table(cos_sin, c, m->positions_max);
    for (int t = 0; t < m->positions_max; t++) positions[t] = t;
    device_write(&r->dev, m->cos_sin, cos_sin, table);
    device_write(&r->dev, m->positions, positions, sizeof(int32_t) * count);
    free(cos_sin);
    free(positions);
}

// ---------------------------------------------------------------------------
// one block, forward and backward

/* Self-attention over the batch itself, or with a cache over all tokens so far. Positions run on through documents (Llama 3 paper, section 3.2). */
static AttentionShape attention_shape(const Run *r, int tokens_seen) {
    const Llama3Config *c = r->config;
    const Model *m = &r->model;
    AttentionShape s = ZERO;
    s.B = m->B, s.Tq = m->T, s.Tk = tokens_seen, s.NH = c->NH, s.NKV = c->NKV, s.HD = c->HD;
    s.q_offset = tokens_seen - m->T;
    s.q_stride = qkv_width(c);
    s.k_stride = s.v_stride = m->cache ? 2 * c->NKV * c->HD : qkv_width(c);
    s.o_stride = c->NH * c->HD;
    s.q_doc = s.k_doc = m->docs;
    return s;
}

/* Attention of block l from a->qkv into a->attn. In generation the new keys and values join the cache first. */
static void block_attention(Run *r, int l, BlockActivations *a) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    const floatX *k = a->qkv + Q, *v = k + KV;
    if (m->cache) {
        floatX *cached = m->cache + (int64_t)l * m->positions_max * 2 * KV;
        size_t bytes = sizeof(floatX) * (size_t)(2 * KV);
        device_copy_rows(&r->dev, cached + m->past * 2 * KV, bytes, a->qkv + Q, sizeof(floatX) * (size_t)(Q + 2 * KV), bytes, m->T);
        k = cached, v = cached + KV;
    }
    AttentionShape shape = attention_shape(r, m->past + m->T);
    attention_forward(&r->dev, a->attn, a->lse, a->qkv, k, v, &shape);
}

/* Block l. The residual stream comes in as a sum, x + branch, that the first norm forms on its way.
 * `again`: in backward, from a->x on, as much as was not kept; bits are the same, since norms read the stored stream. */
static void block_forward(Run *r, int l, int again) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    BlockActivations *a = &m->blocks[l % m->saved], *before = &m->blocks[(l + m->saved - 1) % m->saved];
    FsdpUnit *unit = &r->fsdp.units[table_block_unit(r->table, l)];
    if (!again) device_phase(dev, "forward", unit->unit->name);
    const floatX *w = unit_weights(&r->fsdp, unit) + table_block_offset(r->table, l);
    const int64_t *at = unit->unit->where;
    int N = m->B * m->T, Q = c->NH * c->HD, QKV = qkv_width(c), products = !again || a->keep < KEEP_PRODUCTS;

    if (l == 0 || again) rmsnorm_forward(dev, a->attn_in, a->attn_rstd, NULL, a->x, NULL, w + at[W_ATTN_NORM], c->norm_eps, N, c->C);
    else rmsnorm_forward(dev, a->attn_in, a->attn_rstd, a->x, before->mid, m->branch, w + at[W_ATTN_NORM], c->norm_eps, N, c->C);
    if (products) {
        linear_forward(dev, a->qkv, a->attn_in, w + at[W_Q], N, c->C, QKV); // Q, K and V are one product
        rope_forward(dev, a->qkv, QKV, m->cos_sin, m->positions + m->past, N, m->T, c->NH + c->NKV, c->HD);
        block_attention(r, l, a);
        linear_forward(dev, m->branch, a->attn, w + at[W_O], N, Q, c->C);
    }

    if (products) rmsnorm_forward(dev, a->ffn_in, a->ffn_rstd, a->mid, a->x, m->branch, w + at[W_FFN_NORM], c->norm_eps, N, c->C);
    else rmsnorm_forward(dev, a->ffn_in, a->ffn_rstd, NULL, a->mid, NULL, w + at[W_FFN_NORM], c->norm_eps, N, c->C);
    if (products) linear_forward(dev, a->gate_up, a->ffn_in, w + at[W_GATE], N, c->C, 2 * c->F); // gate and up are one product
    swiglu_forward(dev, a->hidden, a->gate_up, N, c->F);
    if (!again) linear_forward(dev, m->branch, a->hidden, w + at[W_DOWN], N, c->F, c->C);
}

/* m->dx comes in as the gradient of the residual stream behind block l and leaves as that before it. */
static void block_backward(Run *r, int l, int micro) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    BlockActivations *a = &m->blocks[l];
    FsdpUnit *unit = &r->fsdp.units[table_block_unit(r->table, l)];
    device_phase(dev, "backward", unit->unit->name);
    const floatX *w = unit_weights(&r->fsdp, unit) + table_block_offset(r->table, l);
    float *dw = unit_gradients(&r->fsdp, unit, micro) + table_block_offset(r->table, l);
    const int64_t *at = unit->unit->where;
    int N = m->B * m->T, Q = c->NH * c->HD, KV = c->NKV * c->HD, QKV = qkv_width(c);
    AttentionShape shape = attention_shape(r, m->T);
    dev->again = 1;
    if (a->keep < KEEP_ALL) block_forward(r, l, 1);
    dev->again = 0;

    linear_backward_input(dev, m->dhidden, m->dx, c->C, w + at[W_DOWN], N, c->F, c->C);
    linear_backward_weight(dev, dw + at[W_DOWN], m->dx, c->C, a->hidden, N, c->F, c->C, 0);
    swiglu_backward(dev, a->gate_up, m->dhidden, a->gate_up, N, c->F); // in place: the gradient replaces gate and up
    linear_backward_input(dev, m->dnorm, a->gate_up, 2 * c->F, w + at[W_GATE], N, c->C, 2 * c->F);
    linear_backward_weight(dev, dw + at[W_GATE], a->gate_up, 2 * c->F, a->ffn_in, N, c->C, 2 * c->F, 0);
    rmsnorm_backward(dev, m->dx, dw + at[W_FFN_NORM], m->dnorm, m->dx, a->mid, a->ffn_rstd, w + at[W_FFN_NORM], N, c->C);

    linear_backward_input(dev, m->dattn, m->dx, c->C, w + at[W_O], N, Q, c->C);
    linear_backward_weight(dev, dw + at[W_O], m->dx, c->C, a->attn, N, Q, c->C, 0);
    attention_backward(dev, m->dqkv, m->dqkv + Q, m->dqkv + Q + KV, m->dattn, a->attn, a->lse, a->qkv, a->qkv + Q, a->qkv + Q + KV, &shape);
    rope_backward(dev, m->dqkv, QKV, m->cos_sin, m->positions, N, m->T, c->NH + c->NKV, c->HD);
    linear_backward_input(dev, m->dnorm, m->dqkv, QKV, w + at[W_Q], N, c->C, QKV);
    linear_backward_weight(dev, dw + at[W_Q], m->dqkv, QKV, a->attn_in, N, c->C, QKV, 0);
    rmsnorm_backward(dev, m->dx, dw + at[W_ATTN_NORM], m->dnorm, m->dx, a->x, a->attn_rstd, w + at[W_ATTN_NORM], N, c->C);
}

// ---------------------------------------------------------------------------
// the whole model: embedding, blocks, head and loss

/* Gathers what comes next while a unit computes: as many units of blocks as slots allow, then the head. */
static void prefetch_forward(Run *r, int unit) {
    int last = table_block_unit(r->table, r->config->L - 1);
    for (int next = unit + 1; next <= last && next < unit + r->opt->slots; next++) unit_prefetch(&r->fsdp, &r->fsdp.units[next]);
    if (unit == last) unit_prefetch(&r->fsdp, &r->fsdp.units[table_head_unit(r->table)]);
}

static void prefetch_backward(Run *r, int unit) {
    for (int next = unit - 1; next >= table_block_unit(r->table, 0) && next > unit - r->opt->slots; next--) unit_prefetch(&r->fsdp, &r->fsdp.units[next]);
}

/* The batch's ids (B, T) to the residual stream behind the last block: last block's `mid` + branch. */
static void blocks_forward(Run *r, Pass pass) {
    Fsdp *f = &r->fsdp;
    FsdpUnit *embed = &f->units[0];
    int N = r->model.B * r->model.T;
    device_phase(&r->dev, "forward", embed->unit->name);
    unit_gather(f, embed);
    prefetch_forward(r, 0);
    embedding_forward(&r->dev, r->model.blocks[0].x, unit_weights(f, embed) + embed->unit->where[W_EMBED], r->model.ids, N, r->config->C);
    if (table_head_unit(r->table) != 0) unit_free(f, embed, pass); // tied: it is the head as well and stays
    for (int l = 0; l < r->config->L; l++) {
        int unit = table_block_unit(r->table, l);
        FsdpUnit *blocks = &f->units[unit];
        unit_gather(f, blocks);
        prefetch_forward(r, unit);
        block_forward(r, l, 0);
        if (l == blocks->unit->block + blocks->unit->blocks - 1) unit_free(f, blocks, pass);
    }
}

/* Final norm, logits and losses of N rows, a chunk of rows at a time: never all logits at once. With
 * `backward` also the gradients: logits become dlogits where they lie, m->dx leaves as the gradient of the residual stream. */
static void head_loss(Run *r, int micro, int backward) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    FsdpUnit *unit = &r->fsdp.units[table_head_unit(r->table)];
    const int64_t *at = unit->unit->where;
    int64_t head = at[table_head_unit(r->table) == 0 ? W_EMBED : W_HEAD];
    device_phase(dev, "loss", unit->unit->name);
    const floatX *w = unit_weights(&r->fsdp, unit);
    float *dw = backward ? unit_gradients(&r->fsdp, unit, micro) : NULL;
    int N = m->B * m->T;

    rmsnorm_forward(dev, m->final_in, m->final_rstd, m->final_x, m->blocks[m->saved - 1].mid, m->branch, w + at[W_FINAL_NORM], c->norm_eps, N, c->C);
    for (int row = 0; row < N; row += m->chunk) {
        int n = (int)min_i64(m->chunk, N - row);
        floatX *in = m->final_in + (int64_t)row * c->C, *dlogits = (floatX *)m->logits;
        int64_t stride = (int64_t)c->V * (int64_t)(sizeof(float) / sizeof(floatX)); // dlogits lie at the start of their row of logits
        linear_forward_fp32(dev, m->logits, in, w + head, n, c->C, c->V);
        cross_entropy(dev, m->losses + row, m->logits, m->targets + row, n, c->V, backward);
        if (!backward) continue;
        linear_backward_input(dev, m->dnorm + (int64_t)row * c->C, dlogits, stride, w + head, n, c->C, c->V);
        linear_backward_weight(dev, dw + head, dlogits, stride, in, n, c->C, c->V, row > 0);
    }
    if (backward) rmsnorm_backward(dev, m->dx, dw + at[W_FINAL_NORM], m->dnorm, NULL, m->final_x, m->final_rstd, w + at[W_FINAL_NORM], N, c->C);
    exact_total(dev, &r->sums[SUM_LOSS], m->losses, N);
}

/* Forward and backward of one micro-batch; gradients of the SUM of its losses go out to their shards, unit by
 * unit, while the next unit computes. The losses are added to the step's sum. */
static void micro_step(Run *r, const int32_t *inputs, const int32_t *targets, const int32_t *docs, int micro) {
    Fsdp *f = &r->fsdp;
    FsdpUnit *embed = &f->units[0], *head = &f->units[table_head_unit(r->table)];
    int last = table_block_unit(r->table, r->config->L - 1);
    Pass pass = micro == r->opt->accum - 1 ? PASS_LAST : PASS_BACKWARD;
    size_t bytes = sizeof(int32_t) * (size_t)r->model.B * (size_t)r->model.T;
    device_feed(&r->dev, r->model.ids, inputs, bytes);
    device_feed(&r->dev, r->model.targets, targets, bytes);
    if (r->model.docs) device_feed(&r->dev, r->model.docs, docs, bytes);
    blocks_forward(r, PASS_FORWARD);
    prefetch_backward(r, last + 1);
    head_loss(r, micro, 1);
    unit_free(f, head, pass);
    prefetch_backward(r, last); // before a reduction, behind which it would wait where they share a way
    if (head != embed) unit_reduce(f, head, micro); // tied: the embedding adds to it first
    for (int l = r->config->L - 1; l >= 0; l--) {
        int unit = table_block_unit(r->table, l);
        FsdpUnit *blocks = &f->units[unit];
        unit_gather(f, blocks);
        block_backward(r, l, micro);
        if (l > blocks->unit->block) continue; // the unit has more blocks
        unit_free(f, blocks, pass);
        prefetch_backward(r, unit - 1);
        unit_reduce(f, blocks, micro);
    }
    device_phase(&r->dev, "backward", embed->unit->name);
    float *dembed = unit_gradients(f, embed, micro) + embed->unit->where[W_EMBED];
    embedding_backward(&r->dev, dembed, r->model.dx, r->model.ids, r->model.B * r->model.T, r->config->C);
    unit_free(f, embed, pass); // ZeRO-2 kept it
    unit_reduce(f, embed, micro);
}

// ---------------------------------------------------------------------------
// one training step

/* Linear warm-up to --lr, then a cosine down to --min-lr at the last step (Llama 3 paper, section 3.4.1). */
static double learning_rate(const Options *o, int64_t step) { // step counts from 1
    if (step <= o->warmup) return o->lr * (double)step / o->warmup;
    double through = o->steps > o->warmup ? (double)(step - o->warmup) / (o->steps - o->warmup) : 1;
    return o->min_lr + 0.5 * (1 + cos(M_PI * fmin(through, 1))) * (o->lr - o->min_lr);
}

/* All ranks have told of their step: same exchanges in the same order as rank 0? other samples than those before it? */
static void check_reports(const Run *r, int64_t step, int64_t first_sample) {
    const StepReport *all = r->reports, *mine = &all[r->rank];
    int distinct = sampler_global_batch(&r->loader.sampler) <= r->data->windows; // else padding repeats samples within a step
    for (int a = 0; a < AXES; a++)
        for (int i = 0; i < r->rank; i++) // on one host exchanges were compared as they started; this also compares hosts
            if (mine->order[a] != all[i].order[a] && mesh_together(&r->mesh, r->rank, i, (Axis)a))
                run_failure("step %" PRId64 ": ranks %d and %d did not start the same exchanges over %s in the same order", step, i, r->rank, axis_names[a]);
    if (mine->setup != all[0].setup) run_failure("step %" PRId64 ": rank %d shuffles samples or draws weights from another seed than rank 0", step, r->rank);
    for (int i = 0; i < r->rank && distinct; i++)
        if (mine->samples_hash == all[i].samples_hash)
            run_failure("step %" PRId64 ": ranks %d and %d train on the same samples (both start with window %" PRId64 "); data-parallel ranks must differ",
                        step, i, r->rank, first_sample);
}

/* The first tensor with a gradient that is not finite, of what this rank owns; -1: there is none. */
static int64_t first_bad_tensor(Run *r) {
    enum { CHUNK = 1 << 14 };
    float chunk[CHUNK];
    ShardPiece p;
    for (int i = 0; owned_next(&r->fsdp, &i, &p);)
        for (int64_t done = 0; done < p.count; done += CHUNK) {
            int64_t n = min_i64(CHUNK, p.count - done);
            device_read(&r->dev, chunk, p.unit->grad + p.at + done, sizeof(float) * (size_t)n);
            for (int64_t e = 0; e < n; e++)
                if (!isfinite(chunk[e])) return p.tensor - r->table->tensors;
        }
    return -1;
}

/* Tells all ranks of this rank's part of the step, and hears of theirs. Here the host waits for the device: the only time in a step. */
static void exchange_reports(Run *r, const StepBatch *batch, double start, double waited_before) {
    StepReport mine = ZERO;
    ExactSum sums[SUMS] = ZERO;
    fsdp_squared_norm(&r->fsdp, &r->sums[SUM_SQUARED_NORM]);
    device_read(&r->dev, sums, r->sums, sizeof sums);
    exact_merge(&mine.loss, &sums[SUM_LOSS]);
    exact_merge(&mine.squared_norm, &sums[SUM_SQUARED_NORM]);
    mine.bad_tensor = mine.squared_norm.not_finite ? first_bad_tensor(r) : -1;
    mine.targets = batch->num_targets;
    mine.samples_hash = batch->samples_hash;
    mine.setup = sampler_fingerprint(&r->loader.sampler) ^ mix64(r->fsdp.seed);
    mine.to_save = signals_to_save, mine.to_end = signals_to_end;
    mine.writing = save_is_writing(&r->saver);
    for (int a = 0; a < AXES; a++) mine.order[a] = (uint32_t)(r->comm.groups[a].order >> 32);
    mine.figures.seconds = seconds_now() - start;
    mine.figures.wait_seconds = r->comm.wait_seconds - waited_before;
    mine.figures.tokens = (int64_t)r->opt->batch * r->opt->seq * r->opt->accum;
    mine.figures.memory = (int64_t)device_peak(&r->dev);
    all_gather_now(&r->comm, AXIS_WORLD, "step report", &mine, r->reports, sizeof mine);
}

/* Loss and gradient norm are means over all targets of the step, of all ranks and micro-batches: sums of all, divided once. */
static StepStats sum_reports(const Run *r) {
    StepStats s = ZERO;
    ExactSum loss = ZERO, squared_norm = ZERO;
    for (int i = 0; i < r->mesh.world && !r->dev.walk; i++) {
        const StepReport *report = &r->reports[i];
        exact_merge(&loss, &report->loss);
        exact_merge(&squared_norm, &report->squared_norm);
        s.targets += report->targets;
        r->figures[i] = report->figures;
    }
    s.loss = exact_value(&loss) / (double)max_i64(1, s.targets);
    s.grad_norm = sqrt(exact_value(&squared_norm)) / (double)max_i64(1, s.targets);
    s.skipped = !isfinite(s.loss) || !isfinite(s.grad_norm);
    return s;
}

/* Loss or gradient is not finite: every rank has the same sums, so all skip the update alike. Too many such steps end the run. */
static void step_skip(Run *r, int64_t step, const StepStats *s) {
    char where[300];
    int owner = -1, source = -1, used = 0;
    for (int i = r->mesh.world - 1; i >= 0; i--) {
        int64_t bad = r->reports[i].bad_tensor;
        if (bad >= 0 && (owner < 0 || bad <= r->reports[owner].bad_tensor)) owner = i;
        if (r->reports[i].loss.not_finite) source = i;
    }
    if (owner >= 0) used = snprintf(where, sizeof where, "first in the gradient of %s, in the part of the sum that rank %d owns", r->table->tensors[r->reports[owner].bad_tensor].name, owner);
    else used = snprintf(where, sizeof where, "each gradient is finite, %s not", isfinite(s->loss) ? "but the squares of some are" : "the loss is");
    if (source >= 0) snprintf(where + used, sizeof where - (size_t)used, "; the loss of rank %d itself is not", source);
    if (++r->at.skips > r->opt->max_skips)
        run_failure("step %" PRId64 ": loss %g, gradient norm %g: not finite (%s), and --max-skips %d allows no more of them: lower --lr, lengthen --warmup, or look at the data",
                    step, s->loss, s->grad_norm, where, r->opt->max_skips);
    if (r->rank) return;
    printf("step %6" PRId64 " | skipped, %" PRId64 " of at most %d: loss %g, gradient norm %g: not finite (%s)\n", step, r->at.skips, r->opt->max_skips, s->loss, s->grad_norm, where);
    fflush(stdout);
}

static StepStats train_step(Run *r, int64_t step) { // step counts from 1
    const Options *o = r->opt;
    double start = seconds_now(), waited = r->comm.wait_seconds, exchanged = r->comm.exchange_seconds, polled = r->comm.poll_seconds;
    comm_clear_ledger(&r->comm);
    Span whole = span_begin(&r->dev, EVENT_STEP, STREAM_COMPUTE, "step", NULL, (double)step, !is_timed(&r->dev));
    rank_state(r->comm.self, RANK_READING, start);
    StepBatch *batch = loader_next(&r->loader, &r->dev, o->timeout);
    rank_state(r->comm.self, RANK_COMPUTING, seconds_now());
    if (r->samples) collective_start(&r->comm, &r->samples_told, ALL_GATHER, AXIS_WORLD, "samples", batch->windows, r->samples, sizeof(int64_t) * (size_t)r->loader.samples);
    device_zero(&r->dev, r->sums, sizeof *r->sums * SUMS);
    int64_t tokens = (int64_t)o->batch * o->seq;
    for (int micro = 0; micro < o->accum; micro++)
        micro_step(r, batch->inputs + micro * tokens, batch->targets + micro * tokens, batch->docs ? batch->docs + micro * tokens : NULL, micro);
    device_record(&r->dev, &batch->fed);
    reductions_finish(&r->fsdp);
    device_phase(&r->dev, "optimizer", NULL);
    collective_wait(&r->comm, &r->samples_told);
    exchange_reports(r, batch, start, waited);
    int64_t first_sample = r->dev.walk ? 0 : batch->windows[0];
    loader_release(&r->loader, &r->dev);

    StepStats s = sum_reports(r);
    if (!r->dev.walk) check_reports(r, step, first_sample);
    double clip = o->clip > 0 ? fmin(1.0, o->clip / (s.grad_norm + 1e-6)) : 1.0; // torch.nn.utils.clip_grad_norm_
    s.lr = learning_rate(o, step);
    AdamW adam = {(float)s.lr, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay};
    if (s.skipped) step_skip(r, step, &s);
    else if (s.targets || r->dev.walk) fsdp_adamw(&r->fsdp, &adam, (float)(clip / (double)max_i64(1, s.targets)), (int)++r->at.updates);
    device_phase(&r->dev, NULL, NULL);
    span_end(&r->dev, whole, NULL, -1, 0);
    s.samples = sampler_global_batch(&r->loader.sampler);
    r->at.step = step;
    r->at.samples += s.samples;
    if (!r->dev.walk) r->at.within = sampler_place(&r->loader.sampler, step - 1, &r->at.epoch) + s.samples;
    s.data_wait_seconds = r->loader.wait_seconds;
    s.wait_seconds = r->comm.wait_seconds - waited;
    s.exchange_seconds = r->comm.exchange_seconds - exchanged;
    s.overlap = s.exchange_seconds > 0 ? fmax(0, 1 - (s.wait_seconds + r->comm.poll_seconds - polled) / s.exchange_seconds) : 0;
    s.seconds = seconds_now() - start;
    return s;
}

// ---------------------------------------------------------------------------
// evaluation and generation

/* Mean loss over the first `max_batches` micro-batches of every rank (0: over all windows). Every target counts
 * once whatever the number of ranks: windows past the end have none. */
static double evaluate(Run *r, const Dataset *data, int64_t max_batches, int64_t *num_targets) {
    StepReport mine = ZERO; // its sums are all that is told here
    int B = r->opt->batch, T = r->opt->seq, world = r->mesh.world;
    size_t bytes = sizeof(int32_t) * (size_t)B * (size_t)T;
    ExactSum sum = ZERO;
    Phase before = comm_phase(&r->comm, PHASE_VALIDATION);
    device_zero(&r->dev, r->sums, sizeof *r->sums * SUMS);
    int64_t batches = r->dev.walk ? 1 : (data->windows + (int64_t)B * world - 1) / ((int64_t)B * world);
    if (max_batches) batches = min_i64(batches, max_batches);
    for (int64_t i = 0; i < batches; i++) {
        char error[1024];
        for (int b = 0; b < B && !r->dev.walk; b++) {
            int64_t at = (int64_t)b * T;
            int n = window_fill(data, (i * world + r->rank) * B + b, r->eval_inputs + at, r->eval_targets + at, r->eval_docs ? r->eval_docs + at : NULL, r->eval_raw, error, sizeof error);
            if (n < 0) user_error("%s", error);
            mine.targets += n;
        }
        device_write(&r->dev, r->model.ids, r->eval_inputs, bytes);
        device_write(&r->dev, r->model.targets, r->eval_targets, bytes);
        if (r->model.docs) device_write(&r->dev, r->model.docs, r->eval_docs, bytes);
        blocks_forward(r, PASS_LAST);
        head_loss(r, 0, 0);
        unit_free(&r->fsdp, &r->fsdp.units[table_head_unit(r->table)], PASS_LAST);
    }
    device_phase(&r->dev, NULL, NULL);
    device_read(&r->dev, &sum, &r->sums[SUM_LOSS], sizeof sum);
    exact_merge(&mine.loss, &sum);
    all_gather_now(&r->comm, AXIS_WORLD, "evaluation", &mine, r->reports, sizeof mine);
    comm_phase(&r->comm, before);
    ExactSum loss = ZERO;
    *num_targets = 0;
    for (int i = 0; i < world && !r->dev.walk; i++) {
        exact_merge(&loss, &r->reports[i].loss);
        *num_targets += r->reports[i].targets;
    }
    return exact_value(&loss) / (double)max_i64(1, *num_targets);
}

/* Logits (V), on the host, of the token after the given ones; `past` tokens came before and are in the cache. */
static const float *next_token_logits(Run *r, const int32_t *ids, int count, int past) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    m->T = count, m->past = past;
    device_write(&r->dev, m->ids, ids, sizeof(int32_t) * (size_t)count);
    blocks_forward(r, PASS_LAST);
    FsdpUnit *head = &r->fsdp.units[table_head_unit(r->table)];
    const int64_t *at = head->unit->where;
    const floatX *w = unit_weights(&r->fsdp, head);
    rmsnorm_forward(&r->dev, m->final_in, m->final_rstd, m->final_x, m->blocks[m->saved - 1].mid, m->branch, w + at[W_FINAL_NORM], c->norm_eps, count, c->C);
    linear_forward_fp32(&r->dev, m->logits, m->final_in + (int64_t)(count - 1) * c->C, w + at[head->unit->kind == UNIT_HEAD ? W_HEAD : W_EMBED], 1, c->C, c->V);
    unit_free(&r->fsdp, head, PASS_LAST);
    device_read(&r->dev, m->next_logits, m->logits, sizeof(float) * (size_t)c->V);
    return m->next_logits;
}

typedef struct { float p; int32_t id; } Candidate;

static int by_probability(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p < y->p ? 1 : x->p > y->p ? -1 : (x->id > y->id) - (x->id < y->id);
}

/* One token by temperature and nucleus sampling (Holtzman et al. 2020); `u` is uniform in [0, 1). */
static int32_t sample_token(const float *logits, int V, double temperature, double top_p, double u, Candidate *scratch) {
    float largest = logits[0];
    double sum = 0, kept = 0;
    for (int v = 1; v < V; v++) largest = logits[v] > largest ? logits[v] : largest;
    for (int v = 0; v < V; v++) {
        scratch[v].id = v;
        scratch[v].p = temperature > 0 ? expf((logits[v] - largest) / (float)temperature) : logits[v] == largest;
        sum += scratch[v].p;
    }
    qsort(scratch, (size_t)V, sizeof *scratch, by_probability);
    int n = 0;
    while (n < V && (n == 0 || kept < top_p * sum)) kept += scratch[n++].p;
    if (temperature == 0) n = 1, kept = scratch[0].p;
    for (int i = 0; i < n; i++)
        if ((u -= scratch[i].p / kept) < 0) return scratch[i].id;
    return scratch[n - 1].id;
}

/* Continues the prompt `ids`; all ranks compute it, rank 0 prints it. */
static void generate(Run *r, const Tokenizer *tokenizer, const int32_t *ids, int count) {
    int V = r->config->V;
    if (r->dev.walk) { // the two shapes that need the most memory
        next_token_logits(r, ids, count, 0);
        next_token_logits(r, ids, 1, count + r->opt->max_tokens - 1);
        return;
    }
    Candidate *scratch = (Candidate *)checked_malloc(sizeof(Candidate) * (size_t)V);
    const float *logits = next_token_logits(r, ids, count, 0);
    for (int i = 0; i < count && r->rank == 0; i++) print_token(tokenizer, ids[i], stdout);
    for (int i = 0; i < r->opt->max_tokens; i++) {
        double u = (double)(mix64((uint64_t)r->opt->seed * 0x9E3779B97F4A7C15ull + (uint64_t)i) >> 11) * 0x1p-53;
        int32_t id = sample_token(logits, V, r->opt->temperature, r->opt->top_p, u, scratch);
        if (r->mesh.world > 1) { // all go on with rank 0's: GPUs that differ may differ in the last bits
            all_gather_now(&r->comm, AXIS_WORLD, "next token", &id, r->reports, sizeof id);
            memcpy(&id, r->reports, sizeof id);
        }
        if (tokenizer_ends(tokenizer, id) || id >= tokenizer->vocab_size) break;
        if (r->rank == 0) print_token(tokenizer, id, stdout), fflush(stdout);
        if (i + 1 < r->opt->max_tokens) logits = next_token_logits(r, &id, 1, count + i);
    }
    if (r->rank == 0) printf("\n");
    free(scratch);
}

// ---------------------------------------------------------------------------
// a job: what all ranks of a process share and only read

typedef enum { DO_TRAIN, DO_EVAL, DO_GENERATE, DO_EXPORT, DO_PLAN } Task;

typedef struct {
    Options opt;
    Task task;
    Llama3Config config;
    TensorTable table;
    Mesh mesh;
    Dataset data, val;         // num_files 0: none
    StFiles weights;
    Checkpoint from;           // dir "": the run begins
    int lock;                  // of --out
    int has_weights, threads, cores; // threads and cores of a rank
    int local, local_ranks;    // of this process among those of its host; ranks of this host
    double memory;             // bytes that ranks find, before the first takes any
    char tokenizer_path[4096]; // "": none found
    Tokenizer *tokenizer;
    int32_t *prompt;           // ids
    size_t prompt_length;
    const Transport *transport, *hosts; // of what devices exchange, of what hosts do; another one with nccl alone
    ThreadWorld thread_world;
    Cluster cluster;           // --plan --cluster
} Job;

/* --tokenizer, else tokenizer.model beside the data, else beside the model; "" when there is none. */
static void job_find_tokenizer(Job *j) {
    const Options *o = &j->opt;
    const char *beside = o->data ? o->data : o->eval;
    if (o->tokenizer) {
        snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%s", o->tokenizer);
        return;
    }
    if (beside) {
        const char *slash = strrchr(beside, '/');
        snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%.*stokenizer.model", slash ? (int)(slash + 1 - beside) : 0, beside);
        if (!access(j->tokenizer_path, R_OK)) return;
    }
    snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%s/tokenizer.model", o->model);
    if (access(j->tokenizer_path, R_OK)) j->tokenizer_path[0] = 0;
}

static void check_tokenizer_of(const Job *j, const Dataset *d) {
    uint8_t print[32];
    if (!j->tokenizer_path[0] || !d->num_files) return;
    sha256_of_file(j->tokenizer_path, print);
    for (int i = 0; i < d->num_files; i++)
        if (memcmp(print, d->files[i].header.tokenizer, 32))
            user_error("%s was made with another tokenizer than %s: give the right one with --tokenizer, or make the token file again",
                       d->files[i].path, j->tokenizer_path);
}

/* Cores a rank: this host's divided by its ranks. A launcher that binds has divided already. */
static int job_cores(int sharing) {
    cpu_set_t allowed;
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&allowed);
    return (int)max_i64(1, cores / sharing);
}

/* Reads the tokenizer, without which `what` cannot be done. */
static void job_read_tokenizer(Job *j, const char *what) {
    if (!j->tokenizer_path[0]) user_error("%s needs a tokenizer: none beside %s, give one with --tokenizer", what, j->opt.data ? j->opt.data : j->opt.eval ? j->opt.eval : j->opt.model);
    j->tokenizer = tokenizer_open(j->tokenizer_path);
    if (j->tokenizer->vocab_size > j->config.V) user_error("%s has %d tokens, the model %d: they do not belong together", j->tokenizer_path, j->tokenizer->vocab_size, j->config.V);
}

/* Encodes the prompt; generation computes one sequence of its length, then token after token. */
static void job_prompt(Job *j) {
    Options *o = &j->opt;
    size_t capacity = 0;
    job_read_tokenizer(j, "--generate");
    Tokenizer *t = j->tokenizer;
    j->prompt_length = tokenizer_encode(t, o->generate, strlen(o->generate), &j->prompt, &capacity, 0);
    if (!j->prompt_length) { // nothing to go on: a document begins
        free(j->prompt);
        j->prompt = (int32_t *)checked_malloc(sizeof(int32_t));
        j->prompt[j->prompt_length++] = t->eos;
    }
    o->batch = 1, o->seq = (int)j->prompt_length;
    if (o->seq + o->max_tokens > j->config.max_positions)
        user_error("the prompt's %d tokens and --max-tokens %d are more than the model's %d positions", o->seq, o->max_tokens, j->config.max_positions);
}

/* What is to be done. One thing at a time: an option that would do nothing is refused. */
static Task job_task(const Options *o) {
    Task task = o->plan ? DO_PLAN : o->eval ? DO_EVAL : o->generate ? DO_GENERATE : o->export_dir && !o->data ? DO_EXPORT : DO_TRAIN;
    const char *name = o->plan ? "plan" : o->eval ? "eval" : "generate";
    int alone = task == DO_PLAN || task == DO_EVAL || task == DO_GENERATE;
    if (alone && !!o->plan + !!o->eval + !!o->generate + !!o->export_dir > 1) user_error("--%s is done alone: leave the others of --plan, --eval, --generate, --export out", name);
    if (o->out && task != DO_TRAIN && task != DO_PLAN) user_error("--out %s: only training and --plan write there; leave it out", o->out);
    if (o->doc_mask && task == DO_GENERATE) user_error("--doc-mask keeps documents apart, and a prompt is one document: leave it out");
    if (o->doc_mask && task == DO_EXPORT) user_error("--doc-mask is about training and evaluation, and this is neither: leave it out");
    if (o->resume && task != DO_TRAIN) user_error("--resume %s goes on with training, and this is none: leave it out (a checkpoint is a --model DIR too)", o->resume);
    if (o->cluster && !o->plan) user_error("--cluster %s belongs to --plan, which estimates a step's time by it: add --plan, or leave it out", o->cluster);
    if (o->trace && task != DO_TRAIN && !o->cluster) user_error("--trace %s: training has a timeline, and --plan with --cluster; leave it out", o->trace);
    return task;
}

/* A plan may be of any size, but its figures are 64-bit integers: the tokens of a step, and the bytes that a rank
 * receives, each unit gathered twice and reduced once a micro-batch. */
static void job_check_figures(const Job *j, int world) {
    const Options *o = &j->opt;
    double elements = 0, tokens = (double)world * o->batch * o->seq * o->accum;
    for (int u = 0; u < j->table.num_units; u++) elements += (double)j->table.units[u].size + (double)TENSOR_ALIGN * world;
    double bytes = 3.0 * sizeof(float) * elements * o->accum;
    if (tokens > 0x1p62 || bytes > 0x1p62)
        user_error("a step of %.3g tokens, in which a rank receives up to %.3g bytes, is more than can be counted: use fewer ranks, a smaller --accum, --batch or --seq, or a smaller model", tokens, bytes);
}

/* Which of this host's GPUs a rank has: with nccl each its own; else all share the first, also where there are more. */
static int job_gpu(const Job *j, int rank) { return j->transport == j->hosts ? 0 : device_of(j->hosts == &transport_threads ? rank : j->local); }

/* Everything that can be refused is refused here, before ranks start. */
static void job_prepare(Job *j, int world, int local_ranks, int sharing) {
    static const struct { const char *option, *other; } needs[] = {{"val-every", "val"}, {"val-batches", "val"}, {"dtype", "export"}, {"save-every", "out"}, {"save-mode", "out"}, {"keep", "out"}, {"allow-changes", "resume"}, {"temperature", "generate"}, {"top-p", "generate"}, {"max-tokens", "generate"}};
    Options *o = &j->opt;
    j->task = job_task(o);
    if (SLOW_TIER_COMPUTES && strcmp(o->offload, "none") && j->task == DO_TRAIN && !o->out) user_error("--offload %s keeps state in files under --out: give --out DIR, on a disk with room for it", o->offload);
    if ((strcmp(o->offload, "none") || strcmp(o->recompute, "none")) && j->task != DO_TRAIN && j->task != DO_PLAN)
        user_error("--%s is about training, and this is none: leave it out", strcmp(o->offload, "none") ? "offload" : "recompute");
    for (int i = 0; i < (int)(sizeof needs / sizeof *needs); i++)
        if (option_given(o, needs[i].option) && !option_given(o, needs[i].other)) user_error("--%s does nothing without --%s: add that, or leave it out", needs[i].option, needs[i].other);
    if (j->transport != j->hosts && !strcmp(o->offload, "all") && (o->dp_replicate != 1 || !strcmp(o->sharding, "no_shard") || (!strcmp(o->accumulate, "local") && o->accum > 1)))
        user_error("--offload all keeps gradients in the host's memory, where NCCL cannot sum them over replicas, for no_shard or once a step: use --offload optimizer, or full_shard or shard_grad_op without --dp-replicate and --accumulate local");
    int gpus = j->transport != j->hosts ? device_count() : INT32_MAX;
    if (local_ranks > gpus && (gpus > 1 || j->hosts == &transport_threads)) // else a launcher may show each rank its own alone
        user_error("%d ranks on a host that has %d GPU%s, and NCCL wants one for each: start as many ranks on a host as it has GPUs, or share one with --ranks N --transport threads", local_ranks, gpus, gpus > 1 ? "s" : "");
    if (o->resume && !strcmp(o->resume, "auto") && !o->out) user_error("--resume auto looks for checkpoints in --out: add --out DIR, or say which one to resume");
    if (o->resume) checkpoint_find(j->from.dir, o);
    if (o->resume && j->from.dir[0] && !option_given(o, "model")) o->model = j->from.dir;
    j->config = config_of_model(o->model);
    if (j->task != DO_PLAN) kernels_require(j->config.HD), j->memory = device_memory(job_gpu(j, 0));
    if (o->vocab_size) j->config.V = o->vocab_size;
    if (!o->seq) o->seq = j->config.T;
    if (!o->batch) o->batch = j->config.B;
    if (o->seq > j->config.max_positions) user_error("--seq %d is longer than the %d positions that %s is made for", o->seq, j->config.max_positions, o->model);
    if ((int64_t)o->batch * o->seq > 1 << 30)
        user_error("--batch %d x --seq %d = %" PRId64 " tokens a micro-batch, expected at most %d: use a smaller --batch, and --accum", o->batch, o->seq, (int64_t)o->batch * o->seq, 1 << 30);
    j->mesh = mesh_open(world, o->dp_shard, o->dp_replicate, j->task == DO_PLAN);
    j->local_ranks = local_ranks;
    j->cores = job_cores(sharing);
    j->threads = o->threads ? o->threads : j->cores;
    table_open(&j->table, &j->config, number_behind(o->wrap, "size"));
    job_check_figures(j, world);
    if (o->cluster) cluster_open(&j->cluster, o->cluster, &j->mesh, o->threads, o->transport);
    if (j->task == DO_PLAN) return;
    if (j->task == DO_TRAIN && !o->data) user_error("--data is missing: token files to train on (make demo shows the way, --help lists what else there is)");
    j->has_weights = !preset_find(o->model) && !j->from.dir[0] && model_files_open(&j->weights, o->model, &j->table);
    if (!j->has_weights && j->task != DO_TRAIN)
        user_error("%s has no weights: --%s needs --model DIR with a model.safetensors (train with --export DIR to make one)", o->model,
                   j->task == DO_EVAL ? "eval" : j->task == DO_GENERATE ? "generate" : "export");
    job_find_tokenizer(j);
    if (j->task == DO_TRAIN) {
        j->data = dataset_open(o->data, o->seq, j->config.V, 0);
        int64_t per_step = (int64_t)world * o->batch * o->accum;
        if (!strcmp(o->tail, "drop") && j->data.windows < per_step)
            user_error("%s holds %" PRId64 " samples of --seq %d, one step takes %d ranks x batch %d x accum %d = %" PRId64 ": use less of these, more text, or --tail pad",
                       o->data, j->data.windows, o->seq, world, o->batch, o->accum, per_step);
        check_tokenizer_of(j, &j->data);
        if (j->from.dir[0]) checkpoint_open(&j->from, o, world, j->data.fingerprint, &j->config, &j->table);
    }
    if (o->eval || (o->val && j->task == DO_TRAIN)) j->val = dataset_open(o->eval ? o->eval : o->val, o->seq, j->config.V, 1);
    check_tokenizer_of(j, &j->val);
    if (o->doc_mask) job_read_tokenizer(j, "--doc-mask, which parts documents where a token ends them,"), j->data.document_end = j->val.document_end = j->tokenizer->eos;
    if (j->task == DO_GENERATE) job_prompt(j);
}

/* What may leave a trace on disk, checked last, by rank 0. */
static void job_check_outputs(Job *j) {
    if (j->opt.out) j->lock = out_open(j->opt.out, j->from.dir, j->from.at.step, !!j->opt.resume, j->opt.keep);
    if (j->opt.trace) trace_check(j->opt.trace);
    if (j->opt.export_dir && (j->task == DO_TRAIN || j->task == DO_EXPORT)) export_check(j->opt.export_dir, &j->table, export_dtype(&j->opt));
}

// ---------------------------------------------------------------------------
// a rank: walked first, then run

/* Allocates everything a rank needs, on a walking device or a real one. */
static void run_allocate(Run *r, const Job *j) {
    size_t tokens = sizeof(int32_t) * (size_t)j->opt.batch * (size_t)j->opt.seq, timeline = sizeof(Event) * (size_t)r->dev.max_events;
    if (j->task == DO_PLAN && timeline) r->dev.events = (Event *)checked_malloc(timeline); // of the walk itself; the plan is of a run without
    else if (timeline && r->dev.walk) arena_alloc(&r->dev, MEM_HOST, "timeline", timeline);
    else if (timeline) r->dev.events = (Event *)arena_alloc(&r->dev, MEM_HOST, "timeline", timeline);
    r->sums = (ExactSum *)arena_alloc(&r->dev, MEM_WORKSPACE, "sums of the step", sizeof(ExactSum) * SUMS);
    r->reports = (StepReport *)arena_alloc(&r->dev, MEM_HOST, "step reports", sizeof(StepReport) * (size_t)j->mesh.world);
    r->figures = (RankFigures *)arena_alloc(&r->dev, MEM_HOST, "figures of all ranks", sizeof(RankFigures) * (size_t)j->mesh.world);
    Sharding how = sharding_of(&j->opt);
    fsdp_open(&r->fsdp, &r->comm, r->table, r->config, &how, r->training);
    if (j->task != DO_EXPORT) model_open(r, j->opt.batch, j->opt.seq, j->task == DO_GENERATE ? (int)j->prompt_length + j->opt.max_tokens : 0);
    r->eval_inputs = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "token batches", tokens);
    r->eval_targets = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "token batches", tokens);
    if (j->opt.doc_mask) r->eval_docs = (int32_t *)arena_alloc(&r->dev, MEM_HOST, "documents", tokens);
    r->eval_raw = (char *)arena_alloc(&r->dev, MEM_HOST, "raw window", 5 * ((size_t)j->opt.seq + 1));
    int trains = j->task == DO_TRAIN || j->task == DO_PLAN, exports = j->opt.export_dir && (j->task == DO_TRAIN || j->task == DO_EXPORT);
    saver_open(&r->saver, &r->fsdp, &j->opt, &j->from, j->tokenizer_path[0] ? j->tokenizer_path : NULL, trains && j->opt.out, exports);
    if (!r->training) return;
    size_t samples = sizeof(int64_t) * (size_t)j->opt.accum * (size_t)j->opt.batch * (size_t)j->mesh.world;
    if (j->opt.out) r->samples = (int64_t *)arena_alloc(&r->dev, MEM_HOST, "samples of all ranks", samples);
    r->at = j->from.at;
    r->at.data = j->data.fingerprint;
    if (j->from.other_data) r->at.epoch = r->at.within = 0;
    Sampler s = {j->data.windows, (uint64_t)j->opt.seed, !strcmp(j->opt.tail, "pad"), r->mesh.size[AXIS_DP_SHARD], r->mesh.size[AXIS_DP_REPLICATE],
                 mesh_coordinate(&r->mesh, r->rank, AXIS_DP_SHARD), mesh_coordinate(&r->mesh, r->rank, AXIS_DP_REPLICATE), j->opt.accum, j->opt.batch, how.local,
                 r->at.step, r->at.epoch, r->at.within};
    loader_open(&r->loader, &r->dev, &j->data, &s, j->opt.seq, j->opt.doc_mask, r->at.step, j->opt.steps, j->opt.workers, j->cores);
}

static void run_close(Run *r) {
    if (r->training) loader_close(&r->loader, &r->dev);
    saver_close(&r->saver);
    if (!r->dev.walk) kernels_close(&r->dev);
    if (r->dev.walk) free(r->dev.events);
    free(r->layout);
    free(r->hosts);
    free(r->model.blocks);
    fsdp_close(&r->fsdp);
    comm_close(&r->comm);
    device_close(&r->dev);
}

static void run_bind(Run *r, const Job *j, int rank) {
    memset(r, 0, sizeof *r);
    r->opt = &j->opt;
    r->config = &j->config;
    r->table = &j->table;
    r->data = &j->data;
    r->val = &j->val;
    r->from = &j->from;
    r->mesh = j->mesh;
    r->rank = rank;
    r->training = j->task == DO_TRAIN || j->task == DO_PLAN;
}

/* Which categories of memory live in the slow tier: bits by MemCategory. */
static unsigned offloaded(const Options *o) {
    unsigned optimizer = 1u << MEM_OPTIMIZER, all = optimizer | 1u << MEM_PARAMS | 1u << MEM_GRADS;
    return !strcmp(o->offload, "all") ? all : !strcmp(o->offload, "optimizer") ? optimizer : 0;
}

/* One step of the rank with the arithmetic off: its memory, FLOPs and traffic; by a cluster's clock its time. */
static void run_walk_events(Run *r, const Job *j, int rank, int64_t max_events) {
    int64_t targets;
    run_bind(r, j, rank);
    device_open_walk(&r->dev, j->threads, offloaded(&j->opt));
    r->dev.deterministic = j->opt.deterministic;
    r->dev.gpu = job_gpu(j, rank), r->dev.by_nccl = j->transport != j->hosts;
    kernels_open(&r->dev, 0);
    r->dev.max_events = max_events;
    comm_open_walk(&r->comm, &r->dev, &j->mesh, rank);
    run_allocate(r, j);
    fsdp_init_weights(&r->fsdp, 0);
    if (r->fsdp.fingerprints) fsdp_check_replicas(&r->fsdp, 0);
    memset(r->dev.ops, 0, sizeof r->dev.ops);
    r->dev.num_events = 0;
    if (j->opt.cluster) r->dev.rates = &j->cluster.rates, r->comm.rates = j->cluster.exchange; // from here on the clock runs
    if (r->training) train_step(r, r->at.step + 1);
    else if (j->task == DO_EVAL) evaluate(r, &j->val, 1, &targets);
    else if (j->task == DO_GENERATE) generate(r, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (r->training) product_rate(&r->dev);
}

/* With --trace twice: the first walk counts the events of a step, which tells how large the timeline is. */
static void run_walk(Run *r, const Job *j, int rank) {
    run_walk_events(r, j, rank, 0);
    if (!j->opt.trace) return;
    int64_t of_step = r->dev.num_events + 2; // and a validation's, and a replica check's
    run_close(r);
    run_walk_events(r, j, rank, j->task == DO_PLAN ? of_step : min_i64(MAX_EVENTS, of_step * j->opt.steps));
}

static void check_memory(const Job *j, const Device *walked) {
    int sharing = j->transport == j->hosts ? j->local_ranks : 1; // a device: all of this host, unless each has its own
    double need = (double)device_need(walked) * sharing;
    if (need > j->memory)
        user_error("%d rank%s of " DEVICE_NAME " need %.2f GB, it has %.2f GB: use more of them, a smaller --batch or --seq, --recompute full, or a smaller model (--plan shows what takes how much)",
                   sharing, sharing > 1 ? "s" : "", need / 1e9, j->memory / 1e9);
    double pinned = (double)pinned_need(walked) * j->local_ranks, have = pinned_memory();
    if (pinned > have) user_error("%.2f GB of this host's memory would be pinned by its %d rank%s, %.2f GB are free: use more hosts, or offload less", pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", have / 1e9);
}

/* All ranks were started alike, with the same data; tells which is not. */
static void check_agreement(Run *r) {
    char *text;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    options_print(r->opt, f, 1);
    fclose(f);
    uint64_t mine = hash_bytes(hash_bytes(HASH_START, text, length), &r->data->fingerprint, sizeof r->data->fingerprint) ^ r->from->fingerprint;
    uint64_t *all = (uint64_t *)checked_malloc(sizeof mine * (size_t)r->mesh.world);
    all_gather_now(&r->comm, AXIS_WORLD, "options and data", &mine, all, sizeof mine);
    for (int i = 1; i < r->mesh.world; i++)
        if (all[i] != all[0]) user_error("rank %d was started with other options, other data or another checkpoint than rank 0: start all ranks alike", i);
    free(all);
    free(text);
}

static void print_banner(const Job *j, const Run *r, const Run *walked) {
    size_t offloaded = device_arenas(&walked->dev, 1);
    flockfile(stdout); // whole lines: another rank may be about to end the run with a sentence of its own
    printf("%s: %.1f M parameters, %s, %d rank%s x %d thread%s over %s, %s over %d", j->opt.model, (double)j->table.num_parameters / 1e6,
           PRECISION_NAME, j->mesh.world, j->mesh.world > 1 ? "s" : "", j->threads, j->threads > 1 ? "s" : "", j->transport->name, j->opt.sharding, r->fsdp.ranks);
    if (r->fsdp.replicas > 1) printf(", %d replicas", r->fsdp.replicas);
    printf(": %.1f MB a rank", (double)device_peak(&walked->dev) / 1e6);
    if (offloaded) printf(" and %.1f MB " SLOW_TIER "%s", (double)offloaded / 1e6, SLOW_TIER_COMPUTES && is_in_memory(j->opt.out) ? ", but those lie in memory: --out is a tmpfs" : "");
    printf("\n");
    layout_print(&j->mesh, r->layout, r->hosts, stdout);
    if (r->comm.library_memory > 0) printf("beside what is planned, NCCL took %.1f MB of each GPU\n", r->comm.library_memory / 1e6);
    if (j->task == DO_TRAIN)
        printf("%" PRId64 " samples of %d tokens, read by %d worker%s a rank; a step takes %d x %d x %d = %" PRId64 " of them; weights %s\n", j->data.windows, j->opt.seq,
               r->loader.num_workers, r->loader.num_workers > 1 ? "s" : "", j->mesh.world, j->opt.accum, j->opt.batch,
               sampler_global_batch(&r->loader.sampler), j->has_weights ? "read from the model's directory" : j->from.dir[0] ? "of the checkpoint" : "drawn at random");
    if (j->from.dir[0]) printf("goes on from %s, read in %.2f s: %" PRId64 " step%s, %" PRId64 " samples so far%s%s\n", j->from.dir, r->load_seconds, j->from.at.step, j->from.at.step == 1 ? "" : "s", j->from.at.samples, j->from.changes ? "; with changes: " : "", j->from.changes ? j->from.changes : "");
    fflush(stdout);
    funlockfile(stdout);
}

/* From the options alone: a mesh that was made of them wrongly (replicas flattened into one group, as it happened to others) must not make the law. */
static void law_of(Traffic law[AXES][COLLECTIVES], const Llama3Config *c, int world, const Options *o) {
    Sharding how = sharding_of(o);
    int shard = o->dp_shard ? o->dp_shard : world / o->dp_replicate;
    law_of_step(law, c, world, shard, world / shard, &how, number_behind(o->wrap, "size"), sizeof(StepReport), o->out ? (int64_t)sizeof(int64_t) * o->accum * o->batch : 0);
}

/* Law, walk and wire, memory walked and used: after the first step, on every rank. */
static void check_first_step(Run *r, const Run *walked) {
    Ledger l = ZERO;
    law_of(l.law, r->config, r->mesh.world, r->opt);
    memcpy(l.walk, walked->comm.booked, sizeof l.walk);
    memcpy(l.wire, r->comm.wire, sizeof l.wire);
    for (int c = 0; c < MEM_CATEGORIES; c++) l.walked[c] = walked->dev.arenas[c].peak, l.measured[c] = r->dev.arenas[c].peak;
    if (r->rank == 0 && r->opt->out) {
        FILE *f = logger_create(r->opt->out, "ledger.json");
        ledger_write(&l, &walked->dev, f);
        fclose(f);
    }
    ledger_check(&l, r->rank);
}

/* Saves what has come due, and lets an earlier checkpoint that is written become one. All ranks know the same. */
static void save_when_due(Run *r, int asked, int ends) {
    const Options *o = r->opt;
    int64_t step = r->at.step, events = r->dev.num_events;
    double start = seconds_now();
    int due = r->saver.saved != step && (ends || (asked & SIGNAL_SAVE) || (o->save_every && step % o->save_every == 0));
    if (r->saver.files && (due || ends || !r->writing)) checkpoint_commit(&r->saver);
    if (due && r->rank == 0) logger_sync(&r->log);
    if (due) checkpoint_save(&r->saver, &r->at);
    if (ends && r->saver.files) checkpoint_commit(&r->saver);
    logger_aside(&r->dev, events, "saving", start);
}

/* What signals ask for that was not acted on yet: of a signal that mpirun hands to all, each process hears in its own time. Notes who still writes. */
static int signals_asked(Run *r) {
    int to_save = 0, to_end = 0;
    r->writing = 0;
    for (int i = 0; i < r->mesh.world; i++) {
        const StepReport *report = &r->reports[i];
        to_save = to_save > report->to_save ? to_save : report->to_save, to_end |= report->to_end, r->writing |= report->writing;
    }
    int asked = (to_save > r->saves_asked ? SIGNAL_SAVE : 0) | (to_end ? SIGNAL_END : 0);
    r->saves_asked = to_save;
    return asked;
}

/* One step and all that stands around it. Returns what signals asked for. */
static int train_and_log(Run *r, const Run *walked, int64_t step, double flops, double *rate) {
    const Options *o = r->opt;
    int first = step == r->from->at.step + 1, asked;
    int64_t targets, events;
    StepStats s = train_step(r, step);
    s.mfu = *rate > 0 ? flops / s.seconds / *rate : 0;
    asked = signals_asked(r);
    if (first) *rate = product_rate(&r->dev);
    if (first) check_first_step(r, walked);
    if (r->rank == 0) logger_step(&r->log, step, o->steps, &s, r->figures, o->seq, &r->dev, &r->comm);
    if (r->rank == 0) logger_samples(&r->log, step, r->at.epoch, r->samples, s.samples);
    if (o->trace) device_finish(&r->dev); // what follows is no part of the step
    events = r->dev.num_events;
    double start = seconds_now();
    if (r->fsdp.fingerprints && o->check_replicas && step % o->check_replicas == 0) fsdp_check_replicas(&r->fsdp, step), logger_aside(&r->dev, events, "replica check", start);
    if (!r->val->num_files || (step < o->steps && (!o->val_every || step % o->val_every))) return asked;
    events = r->dev.num_events, start = seconds_now();
    double loss = evaluate(r, r->val, o->val_batches, &targets);
    logger_aside(&r->dev, events, "validation", start);
    if (!isfinite(loss)) run_failure("step %" PRId64 ": validation loss %g: not finite; lower --lr, lengthen --warmup, or look at the data", step, loss);
    if (r->rank == 0) logger_validation(&r->log, step, loss, targets);
    return asked;
}

/* From the step behind the last one to --steps, or to the one in which a signal asks for the end. Returns whether it came to --steps. */
static int train(Run *r, const Run *walked) {
    int64_t last = r->opt->steps, traced = 0;
    double flops = device_flops(&walked->dev, 0), rate = 0; // FLOP/s
    int ends = r->at.step == last;
    events_drop(&r->dev, 0); // the timeline begins here
    if (ends && r->opt->out) save_when_due(r, 0, 1); // nothing is left to train: a copy in --out
    while (!ends) {
        int64_t before = r->dev.num_events;
        int asked = train_and_log(r, walked, r->at.step + 1, flops, &rate);
        if (before < r->dev.num_events && r->dev.num_events <= r->dev.max_events) traced = r->at.step;
        ends = r->at.step == last || asked & SIGNAL_END;
        if (asked && r->rank == 0) printf("step %6" PRId64 " | a signal asks to save%s\n", r->at.step, asked & SIGNAL_END ? ", and to end" : "");
        if (r->opt->out) save_when_due(r, asked, ends);
    }
    if (r->opt->trace) {
        trace_write(&r->comm, r->opt->trace);
        if (r->rank == 0 && traced == last) printf("timeline of all steps: %s\n", r->opt->trace);
        if (r->rank == 0 && traced < last) printf("timeline of the first %" PRId64 " of %" PRId64 " steps: %s (it has room for %" PRId64 " events a rank)\n", traced, last, r->opt->trace, r->dev.max_events);
    }
    return r->at.step == last;
}

/* Tells the plan as a table, and under --out as plan.json. */
static void write_plan(const Job *j, const Run *walked, int table) {
    Traffic law[AXES][COLLECTIVES];
    int64_t tokens = (int64_t)j->opt.batch * j->opt.seq * j->opt.accum * j->mesh.world;
    law_of(law, &j->config, j->mesh.world, &j->opt);
    const Cluster *cluster = j->opt.cluster ? &j->cluster : NULL;
    if (table) plan_print(stdout, j->opt.model, j->threads, &j->table, &j->mesh, j->opt.sharding, &walked->dev, law, &walked->comm, tokens, cluster);
    if (!j->opt.out) return;
    FILE *f = logger_create(j->opt.out, "plan.json");
    plan_write(f, &j->mesh, &walked->dev, law, &walked->comm, tokens, cluster);
    if (fclose(f)) user_error("cannot write plan.json under %s: %s", j->opt.out, strerror(errno));
}

/* The timeline that the plan estimates, of the rank that was walked. */
static void write_planned_trace(const Job *j, const Run *walked) {
    FILE *f = fopen(j->opt.trace, "w");
    if (!f) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
    fputs(trace_head, f);
    trace_events(f, &walked->dev, walked->rank, 0, 0);
    fputs(trace_tail, f);
    if (fclose(f)) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
}

static void write_run_files(const Job *j, const Run *r, const Run *walked) {
    FILE *f = logger_create(j->opt.out, "config.txt");
    options_print(r->opt, f, 1);
    if (fclose(f)) user_error("cannot write config.txt under %s: %s", j->opt.out, strerror(errno));
    layout_write(j->opt.out, &j->mesh, r->layout);
    write_plan(j, walked, 0);
}

/* Opens for real what was walked: device, groups, shards, weights. */
static void rank_open(Run *r, const Run *walked, Job *j, int rank) {
    run_bind(r, j, rank);
    if (SLOW_TIER_COMPUTES && offloaded(&j->opt)) make_directories(j->opt.out); // by each rank: they may be on different hosts
    device_open(&r->dev, &walked->dev, j->opt.out, rank);
    kernels_open(&r->dev, rank == 0);
    comm_open(&r->comm, &r->dev, &j->mesh, rank, j->transport, j->hosts, &j->thread_world, j->opt.timeout);
    if (j->opt.out) comm_leave_flights(&r->comm, j->opt.out);
    check_agreement(r);
    r->layout = layout_read_back(&r->comm);
    r->hosts = hosts_read_back(&r->comm);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // by every rank, and they may be threads
    run_allocate(r, j);
    r->fsdp.seed = (uint64_t)j->opt.seed;
    double start = seconds_now();
    if (j->from.dir[0]) checkpoint_load(&r->fsdp, &j->from);
    else if (j->has_weights) model_load(&r->fsdp, &j->weights);
    else fsdp_init_weights(&r->fsdp, (uint64_t)j->opt.seed);
    ranks_meet(&r->comm, "start-up: weights are in place"); // a slow disk is start-up's, not the first step's
    r->load_seconds = seconds_now() - start;
    comm_phase(&r->comm, PHASE_STEP);
}

static int rank_train(Run *r, const Run *walked, const Job *j) {
    if (r->rank == 0) {
        print_banner(j, r, walked);
        logger_open(&r->log, j->opt.out, j->mesh.world, &r->at);
        logger_data(&r->log, r->data, j->opt.tail, r->at.within, j->from.other_data);
        if (j->opt.out) write_run_files(j, r, walked);
    }
    int whole = train(r, walked);
    loader_close(&r->loader, &r->dev);
    if (r->rank == 0) logger_loader(&r->loader), logger_close(&r->log);
    return whole;
}

static void rank_eval(Run *r, const Job *j) {
    int64_t targets;
    double loss = evaluate(r, &j->val, 0, &targets);
    if (!isfinite(loss)) user_error("the loss of %s on %s is %g, not finite: look at the weights", j->opt.model, j->opt.eval, loss);
    cJSON *name = cJSON_CreateString(j->opt.eval); // escaped as JSON wants it
    char *quoted = cJSON_PrintUnformatted(name);
    if (r->rank == 0)
        printf("{\"file\":%s,\"tokens\":%" PRId64 ",\"loss\":%.9g,\"perplexity\":%.9g}\n", quoted, targets, loss, exp(fmin(loss, 709))); // JSON has no infinity
    free(quoted);
    cJSON_Delete(name);
}

static void rank_main(Job *j, int rank) {
    Run *walked = (Run *)checked_malloc(sizeof *walked), *r = (Run *)checked_malloc(sizeof *r);
    run_walk(walked, j, rank);
    if (rank == 0 || j->hosts == &transport_threads) check_memory(j, &walked->dev); // before any rank takes memory that others are to have
    if (rank == 0) job_check_outputs(j); // the last thing that can refuse, since it may leave a directory behind
    rank_open(r, walked, j, rank);
    int whole = j->task == DO_EXPORT;
    if (j->task == DO_TRAIN) whole = rank_train(r, walked, j);
    if (j->task == DO_EVAL) rank_eval(r, j);
    if (j->task == DO_GENERATE) generate(r, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (j->opt.export_dir && whole) model_export(&r->saver);
    else if (j->opt.export_dir && r->rank == 0) printf("not exported: the run ended at step %" PRId64 " of %d; --resume goes on, and exports at its end\n", r->at.step, j->opt.steps);
    run_close(r);
    run_close(walked);
    free(r);
    free(walked);
}

// ---------------------------------------------------------------------------
// main

/* The transports and the number of ranks, from how the program was started. Returns the world's size. */
static int choose_transport(Job *j, int processes) {
    Options *o = &j->opt;
    const char *asked = o->transport;
    int mpi = launched_by_mpi() && !(asked && !strcmp(asked, "threads"));
    if (o->plan && CUDA_BUILD && !asked && !o->ranks) o->transport = "nccl"; // as it would be started
    if (o->plan) return o->world ? o->world : o->ranks ? o->ranks : processes;
    if (o->world) user_error("--world belongs to --plan; ranks are started with mpirun -np N, or with --ranks N");
    if (asked && !strcmp(asked, "mpi") && !mpi) user_error("--transport mpi: start with mpirun -np N ./train_llama3 …, or srun");
    if (!mpi && processes > 1) user_error("--transport threads runs all ranks in one process, but %d were started: use --ranks N without mpirun", processes);
    if (mpi && o->ranks && o->ranks != processes) user_error("--ranks %d, but mpirun started %d: leave --ranks out%s", o->ranks, processes, processes == 1 ? ", or add --transport threads to have them in this process" : "");
    if (CUDA_BUILD && asked && !strcmp(asked, "mpi")) user_error("--transport mpi moves what hosts hold, and these ranks compute on GPUs: leave it out, or use ./train_llama3");
    if (!CUDA_BUILD && asked && !strcmp(asked, "nccl")) user_error("--transport nccl moves what GPUs hold, and these ranks compute on processors: leave it out, or use ./train_llama3_cuda");
    if (CUDA_BUILD && mpi && processes > 1 && !asked) o->transport = "nccl";
    j->hosts = mpi ? transport_find("mpi") : &transport_threads;
    j->transport = o->transport ? transport_find(o->transport) : j->hosts;
    if (j->transport != j->hosts) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0); // several communicators a GPU, whose kernels would else wait for each other crosswise
    if (!j->transport) user_error("--transport %s: this build has no NCCL: install it beside the CUDA toolkit and build again, or share one GPU with --ranks N --transport threads", o->transport);
    return mpi ? processes : o->ranks ? o->ranks : 1;
}

typedef struct { Job *job; int rank; void (*body)(Job *, int); } RankThread;

static void *rank_thread(void *arg) {
    RankThread *t = (RankThread *)arg;
    t->body(t->job, t->rank);
    return NULL;
}

/* Runs `body` (rank_main) for the job's ranks: this process's one, or all of them as threads. */
static void launch(Job *j, int process, void (*body)(Job *, int)) {
    int world = j->mesh.world;
    if (j->hosts != &transport_threads || world == 1) {
        body(j, process);
        return;
    }
    pthread_t *threads = (pthread_t *)checked_malloc(sizeof(pthread_t) * (size_t)world);
    RankThread *args = (RankThread *)checked_malloc(sizeof(RankThread) * (size_t)world);
    for (int i = 0; i < world; i++) {
        args[i].job = j, args[i].rank = i, args[i].body = body;
        if (pthread_create(&threads[i], NULL, rank_thread, &args[i])) run_failure("the thread of rank %d could not be started", i);
    }
    for (int i = 0; i < world; i++) pthread_join(threads[i], NULL);
    free(threads);
    free(args);
}

static void job_open(Job *j, const Started *s) {
    int world = choose_transport(j, s->world), threads = j->hosts == &transport_threads ? world : j->opt.plan && j->opt.ranks ? j->opt.ranks : 0;
    j->local = s->local;
    job_prepare(j, world, threads ? threads : s->on_host, threads ? threads : s->on_cores);
    pthread_mutex_init(&j->thread_world.lock, NULL);
}

static void job_close(Job *j) {
    if (j->data.num_files) dataset_close(&j->data);
    if (j->val.num_files) dataset_close(&j->val);
    if (j->has_weights) st_close(&j->weights);
    if (j->from.dir[0]) checkpoint_close(&j->from);
    if (j->lock > 0) close(j->lock);
    if (j->tokenizer) tokenizer_close(j->tokenizer);
    thread_world_close(&j->thread_world);
    table_close(&j->table);
    free(j->prompt);
    free(j->cluster.ops);
}

#ifndef TESTING
int main(int argc, char **argv) {
    int process = rank_of_launcher();
    process_end.process = process;
    process_end.quiet = 1; // all processes check the same input: until ranks have met, the first speaks
    Job job = ZERO;
    job.opt = options_parse(argc, argv);
    if (job.opt.help && process == 0) options_print(&job.opt, stdout, 0);
    if (job.opt.help) return 0;
    if (job.opt.encode || job.opt.decode) {
        if (process == 0) tokenizer_tool(job.opt.tokenizer, job.opt.encode, job.opt.decode);
        return 0;
    }
    if (job.opt.audit) {
        if (!job.opt.out) user_error("--audit reads what a run left in --out: add --out DIR");
        if (process == 0) audit(job.opt.out);
        return 0;
    }
    Started started = comm_start_process(&argc, &argv, job.opt.timeout);
    job_open(&job, &started);
    if (job.opt.out && job.task == DO_TRAIN) signals_take(!under_mpirun());
    if (job.task == DO_PLAN) {
        Run walked;
        if (process == 0) job_check_outputs(&job);
        run_walk(&walked, &job, 0);
        if (process == 0) write_plan(&job, &walked, 1);
        if (process == 0 && job.opt.trace) write_planned_trace(&job, &walked);
        run_close(&walked);
    } else {
        launch(&job, started.rank, rank_main);
    }
    job_close(&job);
    comm_end_process();
    return 0;
}
#endif
