/* model.h: what this rank computes of the model: its configuration, its tensors, and the activations.
 *
 * A caller may rely on: model_open allocates every buffer that the forward and backward passes use; which activations
 * a block keeps follows --recompute.
 */
#ifndef MODEL_H
#define MODEL_H
#include "../fsdp.h"              // defines: Fsdp, Comm, Device, TensorTable
#include "../pipeline_parallel.h" // defines: Schedule
#include "options.h"              // defines: Options, number_after_colon

/* What a block keeps from forward to backward; the rest is computed again, in buffers that such blocks share. */
typedef enum { KEEP_INPUT, KEEP_PRODUCTS, KEEP_ALL } Keep;

/* What stands between a block's products has N = B·T rows and this rank's heads, QKV = (NH + 2·NKV)·HD, or this rank's
 * part of F. The residual stream and its norms have n rows: all, or with tensor parallelism this rank's, N / tp. */
typedef struct {      // of one block, what backward needs
    Keep keep;        //          kept by
    floatX *x;        // (n, C)       all       residual stream as the block reads it
    floatX *attn_in;  // (n, C)       KEEP_ALL  normed
    float *attn_rstd; // (n)          KEEP_ALL
    floatX *qkv;      // (N, QKV)     PRODUCTS  queries, keys, values, after the rotation (it is done in place: to do it
                      // again saves nothing)
    floatX *attn;     // (N, NH·HD)   PRODUCTS  attention's output
    float *lse;       // (B, NH, T)   PRODUCTS  log of the softmax's denominator
    floatX *mid;      // (n, C)       PRODUCTS  residual stream between attention and feed-forward
    floatX *ffn_in;   // (n, C)       KEEP_ALL  normed
    float *ffn_rstd;  // (n)          KEEP_ALL
    floatX *gate_up;  // (N, 2F)      PRODUCTS
    floatX *hidden;   // (N, F)       KEEP_ALL  silu(gate)·up
} BlockActivations;

typedef struct {
    const Options *opt;
    const Llama3Config *whole_config;
    Llama3Config config; // of this rank: its tensor-parallel share of the heads, of F and of the vocabulary
    TensorTable table;   // of this rank's tensors
    int training;        // activations are kept for backward
    const Mesh *mesh;
    int rank;
    Device *dev;
    Comm *comm;
    Fsdp *fsdp;
    ExactSum *loss_sum;       // of the step so far
    int B, T;                 // of the batch that is computed now; T: this rank's part of the sequence
    int past;                 // generation: tokens before this batch, whose keys and values are in the cache
    const Stage *chunk;       // whose blocks are computed now, …
    BlockActivations *blocks; // (saved) … and their activations, of this micro-batch
    int saved;                // blocks whose activations are kept: all of the chunk when training, else one
    BlockActivations *all;    // of all chunks and of all micro-batches that are under way at the same time
    int sets[MAX_STAGES];     // where in `all` those of a chunk begin
    BlockActivations again;   // where what is not kept is computed, and computed again; NULL where all blocks keep it
    floatX *branch;           // (n, C) what the last half-block adds to the residual stream
    floatX *final_x, *final_in;
    float *final_rstd;                   // the final norm's input, output, 1/rms
    float *logits;                       // (logit_rows, V) of this rank's part of the vocabulary
    int logit_rows;                      // that exist at a time
    float *losses;                       // (N)
    floatX *gathered, *partial, *pieces; // with tensor parallelism, (n·tp, C): all rows of the sequence; a product's
                                         // sums over this rank's part alone; those of all ranks for n rows
    float *loss_parts;               // … (1 + tp, logit_rows, 3) what each part of the vocabulary has of the softmax
    floatX *kv_mine, *kv_parts, *kv; // with context parallelism: keys and values of this rank (N, 2·NKV·HD), of all
                                     // ranks (cp, N, …), in the order of the sequence (B, T·cp, …)
    int32_t *ids, *targets;          // (N) of the batch that is computed now
    int32_t *docs, *own_docs; // (B, T·cp) its documents, and (N) those of this rank's tokens: the same without context
                              // parallelism; NULL without --doc-mask
    Request exchange;         // of tp or cp: arithmetic waits for each
    floatX *dx, *dnorm, *dqkv, *dattn, *dhidden; // gradients of: residual stream (n, C), a norm's output (n, C), …
    floatX *dkv;                                 // … of kv
    floatX *thin,
        *dthin;     // (N, rank) between the two matrices of an adapter, and its gradient; NULL: there are no adapters
    float *cos_sin; // (positions, 2, HD/2)
    int32_t *positions; // (positions) 0, 1, 2, …
    floatX *cache;      // generation: (L, positions, 2·NKV·HD) keys and values; else NULL
    float *next_logits; // generation: (V) where the host reads them
    int positions_max;
} Model;

static inline int qkv_width(const Llama3Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

/* n: rows of the residual stream on this rank. */
static inline int residual_rows(const Model *m) {
    int tp = m->mesh->size[AXIS_TP];
    return (m->B * m->T + tp - 1) / tp;
}

static floatX *activation(Model *m, const char *name, int64_t elements) {
    return (floatX *)arena_alloc(m->dev, MEM_ACTIVATIONS, name, sizeof(floatX) * (size_t)elements);
}

static float *activation_fp32(Model *m, const char *name, int64_t elements) {
    return (float *)arena_alloc(m->dev, MEM_ACTIVATIONS, name, sizeof(float) * (size_t)elements);
}

static Keep block_keeps(const Model *m, int l) {
    const char *what = m->opt->recompute;
    if (!m->training || !strcmp(what, "none")) return KEEP_ALL;
    if (!strcmp(what, "selective")) return KEEP_PRODUCTS;
    return !strcmp(what, "full") || l % number_after_colon(what, "every") == 0 ? KEEP_INPUT : KEEP_ALL;
}

/* Allocates what is kept from level `first` to level `last`; the others point to where `shared` has them. */
static void block_activations_open(Model *m, BlockActivations *a, int64_t N, Keep first, Keep last,
                                   const BlockActivations *shared) {
    const Llama3Config *c = &m->config;
    int64_t n = residual_rows(m);
    int products = first <= KEEP_PRODUCTS && last >= KEEP_PRODUCTS, all = last == KEEP_ALL;
    *a = *shared;
    a->keep = last;
    if (first == KEEP_INPUT) a->x = activation(m, "residual stream", n * c->C);
    if (all) a->attn_in = activation(m, "attention norm", n * c->C);
    if (all) a->attn_rstd = activation_fp32(m, "1/rms", n);
    if (products) a->qkv = activation(m, "queries, keys, values", N * qkv_width(c));
    if (products) a->attn = activation(m, "attention output", N * c->NH * c->HD);
    if (products) a->lse = activation_fp32(m, "softmax denominators", N * c->NH);
    if (products) a->mid = activation(m, "residual stream", n * c->C);
    if (all) a->ffn_in = activation(m, "feed-forward norm", n * c->C);
    if (all) a->ffn_rstd = activation_fp32(m, "1/rms", n);
    if (products) a->gate_up = activation(m, "gate and up", 2 * N * c->F);
    if (all) a->hidden = activation(m, "hidden", N * c->F);
}

/* Where this rank's tokens stand in the sequence: all of it, or chunks i and 2·cp - 1 - i of 2·cp, so that under the
 * causal mask all ranks have as much to do. Token t of `T` that it has. */
static int position_of(const Model *m, int t, int T) {
    int cp = m->mesh->size[AXIS_CP], i = mesh_coordinate(m->mesh, m->rank, AXIS_CP), chunk = T / 2;
    if (cp == 1) return t;
    return t < chunk ? i * chunk + t : (2 * cp - 1 - i) * chunk + t - chunk;
}

/* Blocks whose activations a chunk keeps. One without blocks (an end of a pipeline may have embedding or head alone)
 * has the residual stream of one. */
static inline int stage_sets(const Stage *chunk) { return chunk->num_blocks ? chunk->num_blocks : 1; }

/* From here on chunk `v` is computed, with its set `slot` of activations. */
static void model_enter(Model *m, int v, int slot) {
    m->chunk = &m->table.stages[v];
    m->saved = m->training ? stage_sets(m->chunk) : 1;
    m->blocks = m->all + m->sets[v] + (m->training ? slot * m->saved : 0);
}
static inline BlockActivations *block_activations(const Model *m, int l) {
    return &m->blocks[(l - m->chunk->first_block) % m->saved];
}

/* Buffers for batches of up to (B, T), T of this rank. `cached` > 0: keys and values of that many positions are kept.
 */
static void model_open(Model *m, const Schedule *schedule, int B, int T, int cached) {
    const Llama3Config *c = &m->config;
    int tp = m->mesh->size[AXIS_TP], cp = m->mesh->size[AXIS_CP];
    m->B = B, m->T = T, m->past = 0;
    int64_t N = (int64_t)B * T, Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD, n = residual_rows(m),
            whole = n * tp;
    const BlockActivations nothing = ZERO;
    Keep least = KEEP_ALL;
    int count = 0;
    for (int v = 0; v < m->table.part.virtual_stages; v++) {
        const Stage *chunk = &m->table.stages[v];
        m->sets[v] = m->training ? count : 0;
        count += m->training ? schedule->activation_sets[v] * stage_sets(chunk) : 0;
        for (int l = chunk->first_block; l < chunk->first_block + chunk->num_blocks; l++)
            least = (Keep)min_i64(least, block_keeps(m, l));
    }
    m->all = (BlockActivations *)checked_malloc(sizeof(BlockActivations) * (size_t)max_i64(1, count));
    if (least < KEEP_ALL) block_activations_open(m, &m->again, N, (Keep)(least + 1), KEEP_ALL, &nothing);
    if (!m->training) block_activations_open(m, m->all, N, KEEP_INPUT, KEEP_ALL, &nothing);
    for (int v = 0; v < m->table.part.virtual_stages && m->training; v++)
        for (int i = 0; i < schedule->activation_sets[v] * stage_sets(&m->table.stages[v]); i++)
            block_activations_open(m, &m->all[m->sets[v] + i], N, KEEP_INPUT,
                                   m->table.stages[v].num_blocks ? block_keeps(m, m->table.stages[v].first_block +
                                                                                      i % m->table.stages[v].num_blocks)
                                                                 : KEEP_INPUT,
                                   &m->again);
    model_enter(m, 0, 0);
    m->branch = activation(m, "branch", n * c->C);
    if (m->table.embed >= 0) m->ids = (int32_t *)activation_fp32(m, "token ids", N);
    if (m->opt->doc_mask) m->own_docs = m->docs = (int32_t *)activation_fp32(m, "documents", N * cp);
    if (m->opt->doc_mask && cp > 1) m->own_docs = (int32_t *)activation_fp32(m, "documents of this rank's tokens", N);
    if (tp > 1) {
        m->gathered = activation(m, "all rows", whole * c->C);
        m->partial = activation(m, "partial sums", whole * c->C);
        m->pieces = activation(m, "partial sums of all ranks", whole * c->C);
        device_zero(m->dev, m->partial,
                    sizeof(floatX) * (size_t)(whole * c->C)); // rows beyond N are zero, and stay so
    }
    if (m->table.head >= 0) {
        m->final_x = activation(m, "residual stream", n * c->C);
        m->final_in = activation(m, "final norm", n * c->C);
        m->final_rstd = activation_fp32(m, "1/rms", n);
        m->losses = activation_fp32(m, "losses", whole);
        m->targets = (int32_t *)activation_fp32(m, "targets", N);
        int V = (m->whole_config->V + tp - 1) / tp; // the most that a rank has: all go through as many chunks
        m->logit_rows = (int)min_i64(N, max_i64(16, min_i64(LOGIT_ROWS, (LOGITS / V) & ~15)));
        m->logits = activation_fp32(m, "logits", (int64_t)m->logit_rows * c->V);
        if (tp > 1) m->loss_parts = activation_fp32(m, "softmax parts", 3 * (int64_t)m->logit_rows * (1 + tp));
        device_zero(m->dev, m->losses, sizeof(float) * (size_t)whole); // as above
    }
    if (cp > 1) {
        m->kv_mine = activation(m, "keys and values", N * 2 * KV);
        m->kv_parts = activation(m, "keys and values of all ranks", N * cp * 2 * KV);
        m->kv = activation(m, "keys and values in order", N * cp * 2 * KV);
        if (m->training) m->dkv = activation(m, "d keys and values", N * cp * 2 * KV);
    }
    if (m->training) {
        m->dx = activation(m, "d residual stream", n * c->C);
        m->dnorm = activation(m, "d norm", n * c->C);
        m->dqkv = activation(m, "d queries, keys, values", N * qkv_width(c));
        m->dattn = activation(m, "d attention output", N * Q);
        m->dhidden = activation(m, "d hidden", N * c->F);
    }
    if (c->lora_rank) m->thin = activation(m, "between an adapter's matrices", N * c->lora_rank);
    if (c->lora_rank && m->training) m->dthin = activation(m, "between an adapter's matrices", N * c->lora_rank);
    m->positions_max = cached ? cached : T * cp;
    m->cos_sin = activation_fp32(m, "rotation table", (int64_t)m->positions_max * c->HD);
    m->positions = (int32_t *)activation_fp32(m, "positions", cached ? cached : T);
    if (cached) m->cache = activation(m, "keys and values", (int64_t)c->L * cached * 2 * c->NKV * c->HD);
    if (cached)
        m->next_logits = (float *)arena_alloc(m->dev, MEM_HOST, "next token's logits", sizeof(float) * (size_t)c->V);
    if (m->dev->dry_run) return;
    count = cached ? cached : T;
    size_t table = sizeof(float) * (size_t)m->positions_max * (size_t)c->HD;
    float *cos_sin = (float *)checked_malloc(table);
    int32_t *positions = (int32_t *)checked_malloc(sizeof(int32_t) * (size_t)count);
    rope_table(cos_sin, c, m->positions_max);
    for (int t = 0; t < count; t++) positions[t] = position_of(m, t, T);
    device_write(m->dev, m->cos_sin, cos_sin, table);
    device_write(m->dev, m->positions, positions, sizeof(int32_t) * (size_t)count);
    free(cos_sin);
    free(positions);
}

#endif
