/* model.h: the part of the model that this rank computes, and the buffers it computes in.
 *
 * model_open allocates everything that the forward and backward passes of train_llama3.cu use. A caller may rely on:
 * which activations a block keeps from forward to backward follows --recompute; all others share one set of buffers.
 */
#ifndef MODEL_H
#define MODEL_H
#include "../context_parallel.h"  // defines: ContextParallel
#include "../dataloader.h"        // defines: StepBatch
#include "../fsdp.h"              // defines: Fsdp, Comm, Device, TensorTable, Stage
#include "../lora.h"              // defines: Lora
#include "../pipeline_parallel.h" // defines: Schedule
#include "../tensor_parallel.h"   // defines: TensorParallel
#include "options.h"              // defines: Options, number_after_colon

/* What a block keeps from forward to backward: the residual stream it read (--recompute full); also the outputs of its
 * matmuls and of attention (selective); or everything (none). Backward recomputes the rest (activation checkpointing,
 * Chen et al. 2016; selective: Korthikanti et al. 2022, section 5). */
typedef enum { KEEP_INPUT, KEEP_MATMULS, KEEP_ALL } Keep;

/* One block's activations. A micro-batch has N = B·T tokens on this context-parallel rank. Activations between matmuls
 * are of all N and of this tensor-parallel rank's heads and part of F; QKV = (NH + 2·NKV)·HD is the width of a token's
 * queries, keys and values. The residual stream and the norms are of n tokens: N, or this tensor-parallel rank's share
 * of them. The middle column says from which Keep on each is kept. */
typedef struct {
    Keep keep;
    floatX *x;               // (n, C)       KEEP_INPUT    residual stream before the block
    floatX *attn_norm;       // (n, C)       KEEP_ALL      normalized input of attention
    float *attn_rstd;        // (n)          KEEP_ALL      1 / rms of x
    floatX *qkv;             // (N, QKV)     KEEP_MATMULS  queries, keys, values; rotated in place
    floatX *attn;            // (N, NH·HD)   KEEP_MATMULS  output of attention
    float *lse;              // (B, NH, T)   KEEP_MATMULS  log of the softmax's denominator
    floatX *after_attention; // (n, C)       KEEP_MATMULS  residual stream after attention
    floatX *mlp_norm;        // (n, C)       KEEP_ALL      normalized input of the MLP
    float *mlp_rstd;         // (n)          KEEP_ALL      1 / rms of after_attention
    floatX *gate_up;         // (N, 2F)      KEEP_MATMULS
    floatX *swiglu;          // (N, F)       KEEP_ALL      silu(gate) · up
} BlockActivations;

typedef struct {
    const Options *opt;
    const Llama3Config *whole_config;
    Llama3Config config; // of this rank: its tensor-parallel share of the heads, of F and of the vocabulary
    TensorTable table;   // this rank's tensors
    int training;        // activations are kept for backward
    int softmax_statistics; // of logits are read
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
    const Stage *stage;          // the virtual stage that is computed
    BlockActivations *blocks;    // (num_activations) of the stage's blocks, for the current micro-batch
    int num_activations;         // when training one for each block of the stage, else 1, which each block overwrites
    BlockActivations *sets;      // the activations of all virtual stages and micro-batches in flight
    int first_set[MAX_STAGES];   // where those of each virtual stage begin in `sets`
    BlockActivations recomputed; // buffers for what blocks do not keep, shared by all of them

    // forward
    floatX *sublayer_out; // (n, C) output of the last sublayer; the next RMSNorm adds it to the residual stream
    floatX *final_x;      // (n, C) residual stream after the last block
    floatX *final_norm;   // (n, C) its final norm
    float *final_rstd;    // (n)
    void *logits;         // of a chunk: (logit_rows, stride) floatX in training, else (fp32_rows, V) fp32
    int logit_rows;       // tokens in a chunk that goes backward; its gradients overwrite the logits
    int fp32_rows;        // tokens in a chunk of fp32 logits, in the same memory
    float *losses;        // (n·tp)
    ExactSum *loss_sum;   // sum over this rank's tokens and the micro-batches of the step so far
    ZLoss z_loss;         // its losses: (n·tp), NULL without --z-loss
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
} Model;

static inline int qkv_width(const Llama3Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

/* The logits of a chunk: floatX of m->logit_rows tokens if it goes backward, otherwise fp32 of m->fp32_rows tokens. */
static inline Logits model_logits(const Model *m, int goes_backward) {
    int V = m->config.V;
    return goes_backward ? logits_x((floatX *)m->logits, V) : logits_fp32((float *)m->logits, V);
}

static inline FsdpUnit *fsdp_unit(const Model *m, int unit) { return &m->fsdp->units[unit]; }

// ---------------------------------------------------------------------------
// the current virtual stage

/* How many BlockActivations a micro-batch takes on a stage: one for each block; on a stage without blocks (embedding or
 * head alone) one, for the residual stream. */
static inline int activations_of_stage(const Stage *stage) { return stage->num_blocks ? stage->num_blocks : 1; }

/* From now on virtual stage v is computed. `set`: which of its sets of activations, one for each micro-batch in flight,
 * is used. */
static void model_enter_stage(Model *m, int v, int set) {
    m->stage = &m->table.stages[v];
    m->num_activations = m->training ? activations_of_stage(m->stage) : 1;
    m->blocks = m->sets + m->first_set[v] + (m->training ? set * m->num_activations : 0);
}

static inline BlockActivations *block_activations(const Model *m, int l) {
    return &m->blocks[(l - m->stage->first_block) % m->num_activations];
}

/* Does the current stage embed the tokens? Does it compute the loss? */
static int stage_embeds(const Model *m) { return m->table.embed >= 0 && m->stage == m->table.stages; }
static int stage_has_loss(const Model *m) {
    return m->table.head >= 0 && m->stage == &m->table.stages[m->table.part.virtual_stages - 1];
}

/* Does anything read the gradient of block l's input? A frozen embedding does not. */
static int input_gradient_is_read(const Model *m, int l) {
    return l > 0 || m->table.embed < 0 || !m->table.units[m->table.embed].frozen;
}

/* From now on micro-batches have B sequences, of which this rank computes T tokens each, after `past` cached ones. */
static void model_set_tokens(Model *m, int B, int T, int past) {
    m->B = B;
    m->T = T;
    m->past = past;
    tp_set_tokens(m->tp, B * T);
    cp_set_tokens(m->cp, B, T);
}

// ---------------------------------------------------------------------------
// what attention reads

/* Causal self-attention of this rank's queries to `kv`. --doc-mask keeps it within a document, but positions count on
 * through documents (Llama 3 paper, section 3.2). */
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

/* Generation only: appends the new tokens' keys and values to block l's cache and returns those of all tokens so far.
 */
static KeyValue kv_cache_append(Model *m, int l, const floatX *qkv /* (N,QKV) */) {
    const Llama3Config *c = &m->config;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    size_t row = sizeof(floatX) * 2 * KV, qkv_row = sizeof(floatX) * (Q + 2 * KV);
    floatX *cache = m->kv_cache + (int64_t)l * m->num_positions * 2 * KV;
    device_copy_rows(m->dev, cache + m->past * 2 * KV, row, qkv + Q, qkv_row, row, m->T);
    KeyValue kv = {cache, cache + KV, 2 * KV, m->past + m->T};
    return kv;
}

// ---------------------------------------------------------------------------
// a micro-batch

/* Copies to the device what the current stage needs of a micro-batch of `batch`, which is in host memory. Generation
 * has no targets. */
static void feed_micro_batch(Model *m, const StepBatch *batch, int micro_batch) {
    int64_t N = (int64_t)m->B * m->T, at = micro_batch * N;
    size_t bytes = sizeof(int32_t) * N;
    if (stage_embeds(m)) device_feed(m->dev, m->ids, batch->inputs + at, bytes);
    if (batch->targets && stage_has_loss(m)) device_feed(m->dev, m->targets, batch->targets + at, bytes);
    if (!batch->docs) return;
    device_feed(m->dev, m->docs, batch->docs + at * m->cp->size, bytes * (size_t)m->cp->size);
    if (m->own_docs != m->docs) device_feed(m->dev, m->own_docs, batch->own_docs + at, bytes);
}

// ---------------------------------------------------------------------------
// allocation

static floatX *activation(Model *m, const char *name, int64_t elements) {
    return arena_array(floatX, m->dev, MEM_ACTIVATIONS, name, elements);
}
static float *activation_fp32(Model *m, const char *name, int64_t elements) {
    return arena_array(float, m->dev, MEM_ACTIVATIONS, name, elements);
}
static int32_t *activation_int32(Model *m, const char *name, int64_t elements) {
    return arena_array(int32_t, m->dev, MEM_ACTIVATIONS, name, elements);
}

static Keep block_keeps(const Model *m, int l) {
    const char *recompute = m->opt->recompute;
    if (!m->training || !strcmp(recompute, "none")) return KEEP_ALL;
    if (!strcmp(recompute, "selective")) return KEEP_MATMULS;
    if (!strcmp(recompute, "full")) return KEEP_INPUT;
    return l % number_after_colon(recompute, "every") ? KEEP_ALL : KEEP_INPUT; // blocks 0, K, 2K, …
}

/* Allocates the buffers whose level is in [first, last]; the others are taken from `shared`. */
static void block_activations_open(Model *m, BlockActivations *a, Keep first, Keep last,
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
        a->after_attention = activation(m, "residual stream", n * c->C);
        a->gate_up = activation(m, "gate and up", 2 * N * c->F);
    }
    if (last < KEEP_ALL) return;
    a->attn_norm = activation(m, "attention norm", n * c->C);
    a->attn_rstd = activation_fp32(m, "1/rms", n);
    a->mlp_norm = activation(m, "MLP norm", n * c->C);
    a->mlp_rstd = activation_fp32(m, "1/rms", n);
    a->swiglu = activation(m, "SwiGLU output", N * c->F);
}

/* All sets of block activations: for training one for each block and micro-batch in flight, else a single one. */
static void blocks_open(Model *m, const Schedule *schedule) {
    const BlockActivations nothing = ZERO;
    int stages = m->table.part.virtual_stages, count = m->training ? 0 : 1;
    Keep least = KEEP_ALL;
    for (int v = 0; v < stages && m->training; v++) {
        const Stage *stage = &m->table.stages[v];
        m->first_set[v] = count;
        count += schedule->activation_sets[v] * activations_of_stage(stage);
        for (int l = stage->first_block; l < stage->first_block + stage->num_blocks; l++)
            least = (Keep)min_i64(least, block_keeps(m, l));
    }
    m->sets = new_array(BlockActivations, count);
    if (least < KEEP_ALL) block_activations_open(m, &m->recomputed, (Keep)(least + 1), KEEP_ALL, &nothing);
    if (!m->training) block_activations_open(m, m->sets, KEEP_INPUT, KEEP_ALL, &nothing);
    for (int v = 0; v < stages && m->training; v++) {
        const Stage *stage = &m->table.stages[v];
        for (int i = 0; i < schedule->activation_sets[v] * activations_of_stage(stage); i++) {
            Keep keep = stage->num_blocks ? block_keeps(m, stage->first_block + i % stage->num_blocks) : KEEP_INPUT;
            block_activations_open(m, &m->sets[m->first_set[v] + i], KEEP_INPUT, keep, &m->recomputed);
        }
    }
    model_enter_stage(m, 0, 0);
}

/* Tokens whose logits exist at the same time; every tp rank has the same numbers, whatever its part of the vocabulary.
 * In a bf16 build that trains, the memory of floatX logits has room for half as many in fp32. */
static void logits_open(Model *m) {
    int V = (m->whole_config->V + m->tp->size - 1) / m->tp->size;
    int64_t rows = m->opt->logit_rows;
    if (!rows) rows = max_i64(16, min_i64(LOGIT_ROWS, (LOGITS / V) & ~15));
    m->logit_rows = m->fp32_rows = (int)min_i64(m->B * m->T, rows);
    int64_t bytes = 0;
    if (m->training) {
        m->fp32_rows = (int)max_i64(1, m->logit_rows * (int64_t)sizeof(floatX) / (int64_t)sizeof(float));
        bytes = m->logit_rows * logits_stride(m->config.V) * (int64_t)sizeof(floatX);
    }
    bytes = max_i64(bytes, m->fp32_rows * (int64_t)m->config.V * (int64_t)sizeof(float));
    m->logits = arena_alloc(m->dev, MEM_ACTIVATIONS, "logits", (size_t)bytes);
}

static void head_open(Model *m) {
    const Llama3Config *c = &m->config;
    int64_t n = m->tp->tokens, all = n * m->tp->size;
    m->final_x = activation(m, "residual stream", n * c->C);
    m->final_norm = activation(m, "final norm", n * c->C);
    m->final_rstd = activation_fp32(m, "1/rms", n);
    m->losses = activation_fp32(m, "losses", all);
    m->targets = activation_int32(m, "targets", (int64_t)m->B * m->T);
    logits_open(m);
    device_zero(m->dev, m->losses, sizeof(float) * all); // those beyond N stay zero
    if (m->training && m->opt->z_loss > 0) {
        m->z_loss.weight = (float)m->opt->z_loss;
        m->z_loss.losses = activation_fp32(m, "z-losses", all);
        device_zero(m->dev, m->z_loss.losses, sizeof(float) * all);
    }
    tp_open_loss(m->tp, m->logit_rows, m->softmax_statistics);
}

/* The rotation of every position, and the positions of this rank's tokens. */
static void positions_open(Model *m, int count) {
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
static void model_open(Model *m, const Schedule *schedule, int B, int T, int cached) {
    const Llama3Config *c = &m->config;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD, N = (int64_t)B * T;
    int first_token_id = (int)split_begin(m->whole_config->V, m->table.part.tp, m->table.part.tp_rank);
    tp_open(m->tp, m->fsdp->comm, (int)N, c->C, first_token_id, m->training);
    cp_open(m->cp, m->fsdp->comm, B, T, Q, KV, m->training);
    model_set_tokens(m, B, T, 0);
    int64_t n = m->tp->tokens;
    blocks_open(m, schedule);
    m->sublayer_out = activation(m, "sublayer output", n * c->C);
    if (m->table.embed >= 0) m->ids = activation_int32(m, "token ids", N);
    if (m->opt->doc_mask) m->docs = activation_int32(m, "documents", N * m->cp->size);
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
    lora_open(&m->lora, m->dev, c, N, m->training);
    m->num_positions = cached ? cached : T * m->cp->size;
    positions_open(m, cached ? cached : T);
    if (!cached) return;
    m->kv_cache = activation(m, "cached keys and values", (int64_t)c->L * cached * 2 * KV);
    m->next_logits = arena_array(float, m->dev, MEM_HOST, "next token's logits", c->V);
}

static void model_close(Model *m) {
    free(m->sets);
    table_close(&m->table);
}

#endif
