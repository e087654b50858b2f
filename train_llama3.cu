/* train_llama3.cu: trains Llama 3 with fully sharded data parallelism, and tensor, context and pipeline parallelism
 * over it. Reads from top to bottom: the model (block forward, block backward), one training step, evaluation,
 * generation, main. Options: options.h.
 *
 * Every piece of arithmetic is an op (kernels.h), every exchange a collective or a message (comm.h), every
 * buffer comes from an arena (device.h). So the same code trains, and, on a dry-run device, tells the memory,
 * FLOPs and traffic of any rank before anything is allocated.
 */
#include "lib/device.h"        // defines: floatX, Device, arena_alloc, user_error, run_failure
#include "lib/comm.h"          // defines: Mesh (mesh.h), Comm, all_gather_now, comm_open
#include "llama3.h"            // defines: Llama3Config, TensorTable, rope_table
#include "lib/ops.h"           // defines: the ops: linear_forward, attention_backward, adamw, …
#include "fsdp.h"              // defines: Fsdp, fsdp_prefetch, fsdp_reshard, fsdp_reduce_gradients
#include "pipeline_parallel.h" // defines: Schedule, PipelineStep, pipeline_source, pipeline_target
#include "run/options.h"       // defines: Options, options_parse, options_write, number_after_colon
#include "dataloader.h"        // defines: Dataset, Sampler, Loader
#include "tokenizer.h"         // defines: Tokenizer, tokenizer_encode, tokenizer_decode
#include "run/safetensors.h"   // defines: StFiles, model_weights_open
#include "run/out_dir.h"       // defines: out_directory_open, make_directories
#include "run/checkpoint.h"    // defines: Checkpoint, checkpoint_open, weights_load
#include "run/checkpoint_writer.h" // defines: Saver, checkpoint_save, signals_install
#include "run/export.h"        // defines: model_export
#include "run/plan.h"          // defines: law_of_step, Ledger, ledger_check, Cluster, Plan, plan_print
#include "run/logger.h"        // defines: Logger, logger_step, layout_write
#include "run/trace.h"         // defines: trace_write
#include "run/audit.h"         // defines: audit
#include "run/job.h"           // defines: Job, job_prepare: all that is refused before ranks start

/* How the options shard the model: what fsdp.h and the law go by. */
static Sharding sharding_of(const Options *o) {
    Sharding s = ZERO;
    s.strategy = strategy_find(o->sharding);
    s.slots = o->slots;
    s.micro_batches = o->accum;
    s.accumulate_locally = !strcmp(o->accumulate, "local");
    s.deterministic = o->deterministic;
    s.check_replicas = o->check_replicas;
    s.writes_files = o->out || o->export_dir;
    s.merges_adapters = o->merge;
    s.reduce_dtype = strcmp(o->reduce_dtype, "bf16") ? DTYPE_F32 : DTYPE_BF16;
    s.transport_sums = o->transport && !strcmp(o->transport, "nccl") && !o->deterministic;
    return s;
}

// ---------------------------------------------------------------------------
// the model: its activations, and the run that everything hangs on

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
    int B, T;                 // of the batch that is computed now; T: this rank's part of the sequence
    int past;                 // generation: tokens before this batch, whose keys and values are in the cache
    const Stage *chunk;  // whose blocks are computed now, …
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

typedef struct { // what each rank tells all others at the end of a step; the only exchange beside FSDP's
    ExactSum loss, squared_norm;     // of all its tokens, of its part of the gradient
    int64_t targets;                 // positions that count
    int64_t bad_tensor;              // the first of this rank whose gradient is not finite; -1: none
    uint64_t setup;                  // of what all ranks began with: the shuffle, the seed of the weights
    uint64_t samples_hash;           // of the samples' indices
    uint32_t order[AXES];            // of each group's collectives so far
    ChannelOrder channels[CHANNELS]; // of the messages with each other rank
    int to_save, to_end;             // signals that its process was sent so far
    int writing;                     // its part of a checkpoint is not yet on the disk
    RankFigures figures;
} StepReport;

enum { SUM_LOSS, SUM_SQUARED_NORM, SUMS };

typedef struct Run { // one per rank
    const Options *opt;
    const Llama3Config *whole_config;
    const TensorTable *whole; // the model
    Llama3Config part_config;
    TensorTable part;
    const Llama3Config
        *config; // of this rank's part: heads, feed-forward and vocabulary that tensor parallelism leaves it
    const TensorTable *table;
    const Dataset *data, *val;
    const Checkpoint *resume_from;
    Mesh mesh;
    int rank, training;
    Device dev;
    Comm comm;
    Fsdp fsdp;
    Model model;
    Pipeline pipe;
    Loader loader;
    Saver saver;
    ExactSum *sums;       // (SUMS) of the step so far, where ops add to them
    StepReport *reports;  // (world)
    RankFigures *figures; // (world) the same ranks' figures, side by side
    int64_t *samples;     // (world, accumulation, B) with --out: what the step consumes
    Request samples_told;
    int32_t *eval_inputs, *eval_targets, *eval_docs; // (B, T); documents NULL without --doc-mask
    char *eval_raw;                                  // 5·(T + 1) bytes
    int *layout,
        *hosts; // (world, AXES) leaders of all groups, read back from the transport; (world) on which host each is
    double load_seconds; // in which all ranks had their weights
    int saves_asked,
        writing; // by signals, and done; by the last step's reports, a part of a checkpoint is not yet on the disk
    Progress progress; // how far the run has come; skipped steps had a gradient that was not finite
    Logger log;  // rank 0
} Run;

static inline int qkv_width(const Llama3Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

/* n: rows of the residual stream on this rank. */
static inline int residual_rows(const Run *r) {
    int tp = r->mesh.size[AXIS_TP];
    return (r->model.B * r->model.T + tp - 1) / tp;
}

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
    return !strcmp(what, "full") || l % number_after_colon(what, "every") == 0 ? KEEP_INPUT : KEEP_ALL;
}

/* Allocates what is kept from level `first` to level `last`; the others point to where `shared` has them. */
static void block_activations_open(Run *r, BlockActivations *a, int64_t N, Keep first, Keep last,
                                   const BlockActivations *shared) {
    const Llama3Config *c = r->config;
    int64_t n = residual_rows(r);
    int products = first <= KEEP_PRODUCTS && last >= KEEP_PRODUCTS, all = last == KEEP_ALL;
    *a = *shared;
    a->keep = last;
    if (first == KEEP_INPUT) a->x = activation(r, "residual stream", n * c->C);
    if (all) a->attn_in = activation(r, "attention norm", n * c->C);
    if (all) a->attn_rstd = activation_fp32(r, "1/rms", n);
    if (products) a->qkv = activation(r, "queries, keys, values", N * qkv_width(c));
    if (products) a->attn = activation(r, "attention output", N * c->NH * c->HD);
    if (products) a->lse = activation_fp32(r, "softmax denominators", N * c->NH);
    if (products) a->mid = activation(r, "residual stream", n * c->C);
    if (all) a->ffn_in = activation(r, "feed-forward norm", n * c->C);
    if (all) a->ffn_rstd = activation_fp32(r, "1/rms", n);
    if (products) a->gate_up = activation(r, "gate and up", 2 * N * c->F);
    if (all) a->hidden = activation(r, "hidden", N * c->F);
}

/* Where this rank's tokens stand in the sequence: all of it, or chunks i and 2·cp - 1 - i of 2·cp, so that under the
 * causal mask all ranks have as much to do. Token t of `T` that it has. */
static int position_of(const Run *r, int t, int T) {
    int cp = r->mesh.size[AXIS_CP], i = mesh_coordinate(&r->mesh, r->rank, AXIS_CP), chunk = T / 2;
    if (cp == 1) return t;
    return t < chunk ? i * chunk + t : (2 * cp - 1 - i) * chunk + t - chunk;
}

/* Blocks whose activations a chunk keeps. One without blocks (an end of a pipeline may have embedding or head alone)
 * has the residual stream of one. */
static inline int stage_sets(const Stage *chunk) { return chunk->num_blocks ? chunk->num_blocks : 1; }

/* From here on chunk `v` is computed, with its set `slot` of activations. */
static void model_enter(Run *r, int v, int slot) {
    Model *m = &r->model;
    m->chunk = &r->table->stages[v];
    m->saved = r->training ? stage_sets(m->chunk) : 1;
    m->blocks = m->all + m->sets[v] + (r->training ? slot * m->saved : 0);
}
static inline BlockActivations *block_activations(const Model *m, int l) {
    return &m->blocks[(l - m->chunk->first_block) % m->saved];
}

/* Buffers for batches of up to (B, T), T of this rank. `cached` > 0: keys and values of that many positions are kept.
 */
static void model_open(Run *r, int B, int T, int cached) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    int tp = r->mesh.size[AXIS_TP], cp = r->mesh.size[AXIS_CP];
    m->B = B, m->T = T, m->past = 0;
    int64_t N = (int64_t)B * T, Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD, n = residual_rows(r),
            whole = n * tp;
    const BlockActivations nothing = ZERO;
    Keep least = KEEP_ALL;
    int count = 0;
    for (int v = 0; v < r->table->part.virtual_stages; v++) {
        const Stage *chunk = &r->table->stages[v];
        m->sets[v] = r->training ? count : 0;
        count += r->training ? r->pipe.schedule.activation_sets[v] * stage_sets(chunk) : 0;
        for (int l = chunk->first_block; l < chunk->first_block + chunk->num_blocks; l++)
            least = (Keep)min_i64(least, block_keeps(r, l));
    }
    m->all = (BlockActivations *)checked_malloc(sizeof(BlockActivations) * (size_t)max_i64(1, count));
    if (least < KEEP_ALL) block_activations_open(r, &m->again, N, (Keep)(least + 1), KEEP_ALL, &nothing);
    if (!r->training) block_activations_open(r, m->all, N, KEEP_INPUT, KEEP_ALL, &nothing);
    for (int v = 0; v < r->table->part.virtual_stages && r->training; v++)
        for (int i = 0; i < r->pipe.schedule.activation_sets[v] * stage_sets(&r->table->stages[v]); i++)
            block_activations_open(r, &m->all[m->sets[v] + i], N, KEEP_INPUT,
                                   r->table->stages[v].num_blocks
                                       ? block_keeps(r, r->table->stages[v].first_block + i % r->table->stages[v].num_blocks)
                                       : KEEP_INPUT,
                                   &m->again);
    model_enter(r, 0, 0);
    m->branch = activation(r, "branch", n * c->C);
    if (r->table->embed >= 0) m->ids = (int32_t *)activation_fp32(r, "token ids", N);
    if (r->opt->doc_mask) m->own_docs = m->docs = (int32_t *)activation_fp32(r, "documents", N * cp);
    if (r->opt->doc_mask && cp > 1) m->own_docs = (int32_t *)activation_fp32(r, "documents of this rank's tokens", N);
    if (tp > 1) {
        m->gathered = activation(r, "all rows", whole * c->C);
        m->partial = activation(r, "partial sums", whole * c->C);
        m->pieces = activation(r, "partial sums of all ranks", whole * c->C);
        device_zero(&r->dev, m->partial,
                    sizeof(floatX) * (size_t)(whole * c->C)); // rows beyond N are zero, and stay so
    }
    if (r->table->head >= 0) {
        m->final_x = activation(r, "residual stream", n * c->C);
        m->final_in = activation(r, "final norm", n * c->C);
        m->final_rstd = activation_fp32(r, "1/rms", n);
        m->losses = activation_fp32(r, "losses", whole);
        m->targets = (int32_t *)activation_fp32(r, "targets", N);
        int V = (r->whole_config->V + tp - 1) / tp; // the most that a rank has: all go through as many chunks
        m->logit_rows = (int)min_i64(N, max_i64(16, min_i64(LOGIT_ROWS, (LOGITS / V) & ~15)));
        m->logits = activation_fp32(r, "logits", (int64_t)m->logit_rows * c->V);
        if (tp > 1) m->loss_parts = activation_fp32(r, "softmax parts", 3 * (int64_t)m->logit_rows * (1 + tp));
        device_zero(&r->dev, m->losses, sizeof(float) * (size_t)whole); // as above
    }
    if (cp > 1) {
        m->kv_mine = activation(r, "keys and values", N * 2 * KV);
        m->kv_parts = activation(r, "keys and values of all ranks", N * cp * 2 * KV);
        m->kv = activation(r, "keys and values in order", N * cp * 2 * KV);
        if (r->training) m->dkv = activation(r, "d keys and values", N * cp * 2 * KV);
    }
    if (r->training) {
        m->dx = activation(r, "d residual stream", n * c->C);
        m->dnorm = activation(r, "d norm", n * c->C);
        m->dqkv = activation(r, "d queries, keys, values", N * qkv_width(c));
        m->dattn = activation(r, "d attention output", N * Q);
        m->dhidden = activation(r, "d hidden", N * c->F);
    }
    if (c->lora_rank) m->thin = activation(r, "between an adapter's matrices", N * c->lora_rank);
    if (c->lora_rank && r->training) m->dthin = activation(r, "between an adapter's matrices", N * c->lora_rank);
    pipeline_open(&r->pipe, &r->comm, sizeof(floatX) * (size_t)(n * c->C));
    m->positions_max = cached ? cached : T * cp;
    m->cos_sin = activation_fp32(r, "rotation table", (int64_t)m->positions_max * c->HD);
    m->positions = (int32_t *)activation_fp32(r, "positions", cached ? cached : T);
    if (cached) m->cache = activation(r, "keys and values", (int64_t)c->L * cached * 2 * c->NKV * c->HD);
    if (cached)
        m->next_logits = (float *)arena_alloc(&r->dev, MEM_HOST, "next token's logits", sizeof(float) * (size_t)c->V);
    if (r->dev.dry_run) return;
    count = cached ? cached : T;
    size_t table = sizeof(float) * (size_t)m->positions_max * (size_t)c->HD;
    float *cos_sin = (float *)checked_malloc(table);
    int32_t *positions = (int32_t *)checked_malloc(sizeof(int32_t) * (size_t)count);
    rope_table(cos_sin, c, m->positions_max);
    for (int t = 0; t < count; t++) positions[t] = position_of(r, t, T);
    device_write(&r->dev, m->cos_sin, cos_sin, table);
    device_write(&r->dev, m->positions, positions, sizeof(int32_t) * (size_t)count);
    free(cos_sin);
    free(positions);
}

// ---------------------------------------------------------------------------
// tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022): between products each
// rank of `tp` has its rows of the residual stream. Before a product that is split by columns they are gathered; one
// that is split by rows leaves partial sums, of which each rank gets the total of its rows. On one rank nothing moves:
// the rows are all there are

/* An exchange that arithmetic waits for. */
static void exchange(Run *r, Collective collective, Axis axis, const char *what, const void *send, void *recv,
                     size_t count, Dtype dtype) {
    collective_start(&r->comm, &r->model.exchange, collective, axis, what, send, recv, count, dtype);
    collective_wait(&r->comm, &r->model.exchange);
}

/* All rows, (n·tp, C), of this rank's (n, C); valid until the next call. */
static const floatX *rows_gather(Run *r, const floatX *rows, const char *what) {
    if (r->mesh.size[AXIS_TP] == 1) return rows;
    exchange(r, ALL_GATHER, AXIS_TP, what, rows, r->model.gathered, (size_t)residual_rows(r) * (size_t)r->config->C,
             FLOATX);
    return r->model.gathered;
}

/* Where a product leaves what rows_reduce makes the sum of: (N, C). */
static floatX *rows_partial(Run *r, floatX *rows) { return r->mesh.size[AXIS_TP] == 1 ? rows : r->model.partial; }

/* This rank's rows (n, C) of the sum over all tp ranks: a reduce-scatter, made of an all-to-all and a sum in a fixed
 * order. */
static void rows_reduce(Run *r, floatX *rows, const char *what) {
    int64_t count = (int64_t)residual_rows(r) * r->config->C;
    if (r->mesh.size[AXIS_TP] == 1) return;
    exchange(r, REDUCE_SCATTER, AXIS_TP, what, r->model.partial, r->model.pieces, (size_t)count, FLOATX);
    sum_pieces(&r->dev, rows, r->model.pieces, r->mesh.size[AXIS_TP], count);
}

// ---------------------------------------------------------------------------
// context parallelism (Llama 3 paper, section 3.3.2): each rank of `cp` has two chunks of every sequence, and for
// attention the keys and values of all

enum { KV_TO_SEQUENCE, KV_TO_RANKS };

/* Between the order of ranks, (cp, B, 2 chunks), and that of the sequence, (B, 2·cp chunks): rank i has chunks i and
 * 2·cp - 1 - i. */
static void kv_reorder(Run *r, floatX *to, const floatX *from, int direction) {
    const Llama3Config *c = r->config;
    int cp = r->mesh.size[AXIS_CP], B = r->model.B;
    size_t chunk = sizeof(floatX) * (size_t)(r->model.T / 2) * 2 * (size_t)c->NKV * (size_t)c->HD, of_rank = 2 * chunk,
           of_sequence = of_rank * (size_t)cp; // bytes
    for (int i = 0; i < cp; i++)
        for (int half = 0; half < 2; half++) {
            size_t ranks = (size_t)i * (size_t)B * of_rank + (size_t)half * chunk,
                   sequence = (size_t)(half ? 2 * cp - 1 - i : i) * chunk;
            if (direction == KV_TO_SEQUENCE)
                device_copy_rows(&r->dev, (char *)to + sequence, of_sequence, (const char *)from + ranks, of_rank,
                                 chunk, B);
            else
                device_copy_rows(&r->dev, (char *)to + ranks, of_rank, (const char *)from + sequence, of_sequence,
                                 chunk, B);
        }
}

/* Keys and values of the whole sequence, (B, T·cp, 2·NKV·HD), from all ranks' rows of queries, keys, values. */
static const floatX *kv_gather(Run *r, const floatX *qkv) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    size_t bytes = sizeof(floatX) * 2 * (size_t)c->NKV * (size_t)c->HD, N = (size_t)m->B * (size_t)m->T;
    device_copy_rows(&r->dev, m->kv_mine, bytes, qkv + (int64_t)c->NH * c->HD, sizeof(floatX) * (size_t)qkv_width(c),
                     bytes, (int)N);
    exchange(r, ALL_GATHER, AXIS_CP, "keys and values", m->kv_mine, m->kv_parts, bytes / sizeof(floatX) * N, FLOATX);
    kv_reorder(r, m->kv, m->kv_parts, KV_TO_SEQUENCE);
    return m->kv;
}

/* The gradients of this rank's keys and values, summed over the queries of all ranks, to their columns of dqkv. */
static void kv_reduce(Run *r, floatX *dqkv) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    size_t bytes = sizeof(floatX) * 2 * (size_t)c->NKV * (size_t)c->HD, N = (size_t)m->B * (size_t)m->T;
    kv_reorder(r, m->kv_parts, m->dkv, KV_TO_RANKS);
    exchange(r, REDUCE_SCATTER, AXIS_CP, "gradients of keys and values", m->kv_parts, m->kv, bytes / sizeof(floatX) * N,
             FLOATX);
    sum_pieces(&r->dev, m->kv_mine, m->kv, r->mesh.size[AXIS_CP], (int64_t)(bytes / sizeof(floatX) * N));
    device_copy_rows(&r->dev, dqkv + (int64_t)c->NH * c->HD, sizeof(floatX) * (size_t)qkv_width(c), m->kv_mine, bytes,
                     bytes, (int)N);
}

// ---------------------------------------------------------------------------
// a block's weights, and the products with them: of some matrices that stand one below the other (queries, keys,
// values; gate, up) it is one

typedef struct {
    const floatX *w, *adapters;      // of its unit, from this block's on, and of their adapters'; NULL: it has none
    float *dw, *dadapters;           // their gradients; NULL: frozen, or there are none
    const int64_t *at, *adapters_at; // where each kind of weight lies there
} BlockWeights;

/* Waits for their arrival. micro < 0: gradients are not asked for. */
static BlockWeights block_weights(Run *r, int l, int micro) {
    const TensorTable *t = r->table;
    FsdpUnit *unit = &r->fsdp.units[table_block_unit(t, l)];
    BlockWeights b = ZERO;
    b.w = fsdp_unshard(&r->fsdp, unit) + table_block_offset(t, l), b.at = unit->unit->offsets;
    if (micro >= 0 && !unit->unit->frozen) b.dw = fsdp_gradients(&r->fsdp, unit, micro) + table_block_offset(t, l);
    if (!r->config->lora_rank) return b;
    FsdpUnit *adapters = &r->fsdp.units[table_block_adapters(t, l)];
    b.adapters = fsdp_unshard(&r->fsdp, adapters) + table_adapters_offset(t, l), b.adapters_at = adapters->unit->offsets;
    if (micro >= 0) b.dadapters = fsdp_gradients(&r->fsdp, adapters, micro) + table_adapters_offset(t, l);
    return b;
}
static float *norm_gradient(const BlockWeights *b, WeightKind kind) { return b->dw ? b->dw + b->at[kind] : NULL; }

/* The rows of a matrix on this rank: as many outputs it has. */
static int outputs_of(const Run *r, WeightKind kind) {
    const Llama3Config *c = r->config;
    return kind == W_Q                      ? c->NH * c->HD
           : kind == W_K || kind == W_V     ? c->NKV * c->HD
           : kind == W_GATE || kind == W_UP ? c->F
                                            : c->C;
}

/* What a product that begins with the matrix `kind` has behind that one. */
static int product_last(WeightKind kind) { return kind == W_Q ? W_V : kind == W_GATE ? W_UP : kind; }

/* An adapter's thin rows, alpha / rank · A x, (N, rank). */
static const floatX *adapter_thin(Run *r, const BlockWeights *b, WeightKind kind, const floatX *x, int N, int IC) {
    const Llama3Config *c = r->config;
    linear_forward(&r->dev, r->model.thin, x, b->adapters + b->adapters_at[lora_a(kind)], N, IC, c->lora_rank);
    scale(&r->dev, r->model.thin, adapter_scale(c), (int64_t)N * c->lora_rank);
    return r->model.thin;
}

/* y (N, OC) = x (N, IC) times the matrices from `kind` on, with what their adapters add. */
static void product_forward(Run *r, const BlockWeights *b, WeightKind kind, floatX *y, const floatX *x, int N, int IC,
                            int OC) {
    linear_forward(&r->dev, y, x, b->w + b->at[kind], N, IC, OC);
    int64_t column = 0;
    for (int k = kind; k <= product_last(kind); column += outputs_of(r, (WeightKind)k++))
        if (is_adapted(r->config, (WeightKind)k))
            linear_forward_add(&r->dev, y + column, OC, adapter_thin(r, b, (WeightKind)k, x, N, IC),
                               b->adapters + b->adapters_at[lora_b((WeightKind)k)], N, r->config->lora_rank,
                               outputs_of(r, (WeightKind)k));
}

/* From dy (N, OC): dx (N, IC), and the gradients of the matrices from `kind` on, or of their adapters. */
static void product_backward(Run *r, const BlockWeights *b, WeightKind kind, floatX *dx, const floatX *dy,
                             const floatX *x, int N, int IC, int OC) {
    const Llama3Config *c = r->config;
    int64_t column = 0;
    linear_backward_input(&r->dev, dx, dy, OC, b->w + b->at[kind], N, IC, OC);
    if (b->dw) linear_backward_weight(&r->dev, b->dw + b->at[kind], dy, OC, x, N, IC, OC, 0);
    for (int k = kind; k <= product_last(kind); column += outputs_of(r, (WeightKind)k++)) {
        if (!is_adapted(c, (WeightKind)k)) continue;
        int64_t a = b->adapters_at[lora_a((WeightKind)k)], at_b = b->adapters_at[lora_b((WeightKind)k)];
        int R = c->lora_rank, outputs = outputs_of(r, (WeightKind)k);
        linear_backward_weight(&r->dev, b->dadapters + at_b, dy + column, OC,
                               adapter_thin(r, b, (WeightKind)k, x, N, IC), N, R, outputs, 0);
        linear_backward_input(&r->dev, r->model.dthin, dy + column, OC, b->adapters + at_b, N, R, outputs);
        scale(&r->dev, r->model.dthin, adapter_scale(c), (int64_t)N * R);
        linear_backward_weight(&r->dev, b->dadapters + a, r->model.dthin, R, x, N, IC, R, 0);
        linear_backward_input_add(&r->dev, dx, r->model.dthin, b->adapters + a, N, IC, R);
    }
}

// ---------------------------------------------------------------------------
// one block, forward and backward

/* Self-attention over the batch itself, or with a cache over all tokens so far. Positions run on through documents
 * (Llama 3 paper, section 3.2). */
static AttentionShape attention_shape(const Run *r, int tokens_seen) {
    const Llama3Config *c = r->config;
    const Model *m = &r->model;
    int cp = r->mesh.size[AXIS_CP];
    AttentionShape s = ZERO;
    s.B = m->B, s.Tq = m->T, s.Tk = tokens_seen, s.NH = c->NH, s.NKV = c->NKV, s.HD = c->HD;
    s.q_offset = tokens_seen - m->T;
    s.q_stride = qkv_width(c);
    s.k_stride = s.v_stride = m->cache || cp > 1 ? 2 * c->NKV * c->HD : qkv_width(c);
    s.o_stride = c->NH * c->HD;
    s.q_doc = m->own_docs, s.k_doc = m->docs;
    if (cp > 1) { // this rank's two chunks of the queries, all keys
        s.Tk = m->T * cp, s.q_offset = position_of(r, 0, m->T), s.q_split = m->T / 2;
        s.q_gap = position_of(r, s.q_split, m->T) - s.q_split - s.q_offset;
    }
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
        device_copy_rows(&r->dev, cached + m->past * 2 * KV, bytes, a->qkv + Q, sizeof(floatX) * (size_t)(Q + 2 * KV),
                         bytes, m->T);
        k = cached, v = cached + KV;
    }
    if (r->mesh.size[AXIS_CP] > 1) k = kv_gather(r, a->qkv), v = k + KV;
    AttentionShape shape = attention_shape(r, m->past + m->T);
    attention_forward(&r->dev, a->attn, a->lse, a->qkv, k, v, &shape);
}

/* From m->dattn to m->dqkv, of queries, keys and values as they were before the rotation. */
static void block_attention_backward(Run *r, const BlockActivations *a) {
    const Llama3Config *c = r->config;
    Model *m = &r->model;
    int64_t Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    AttentionShape shape = attention_shape(r, m->T);
    const floatX *k = a->qkv + Q;
    floatX *dk = m->dqkv + Q;
    if (r->mesh.size[AXIS_CP] > 1) k = kv_gather(r, a->qkv), dk = m->dkv;
    attention_backward(&r->dev, m->dqkv, dk, dk + KV, m->dattn, a->attn, a->lse, a->qkv, k, k + KV, &shape);
    if (r->mesh.size[AXIS_CP] > 1) kv_reduce(r, m->dqkv);
    rope_backward(&r->dev, m->dqkv, qkv_width(c), m->cos_sin, m->positions, m->B * m->T, m->T, c->NH + c->NKV, c->HD);
}

/* Block l. The residual stream comes in as a sum, x + branch, that the first norm forms on its way; of a chunk's first
 * block as x. `again`: in backward, from a->x on, as much as was not kept; bits are the same, since norms read the
 * stored stream. */
static void block_forward(Run *r, int l, int again) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    BlockActivations *a = block_activations(m, l);
    int first = l == m->chunk->first_block;
    if (!again) device_phase(dev, "forward", r->table->units[table_block_unit(r->table, l)].name);
    const BlockWeights b = block_weights(r, l, -1);
    const floatX *w = b.w;
    const int64_t *at = b.at;
    int N = m->B * m->T, n = residual_rows(r), Q = c->NH * c->HD, QKV = qkv_width(c),
        products = !again || a->keep < KEEP_PRODUCTS;

    if (first || again)
        rmsnorm_forward(dev, a->attn_in, a->attn_rstd, NULL, a->x, NULL, w + at[W_ATTN_NORM], c->norm_eps, n, c->C);
    else
        rmsnorm_forward(dev, a->attn_in, a->attn_rstd, a->x, block_activations(m, l + m->saved - 1)->mid, m->branch,
                        w + at[W_ATTN_NORM], c->norm_eps, n, c->C);
    if (products) {
        const floatX *attn_in = rows_gather(r, a->attn_in, "attention's input");
        product_forward(r, &b, W_Q, a->qkv, attn_in, N, c->C, QKV); // Q, K and V are one product
        rope_forward(dev, a->qkv, QKV, m->cos_sin, m->positions + m->past, N, m->T, c->NH + c->NKV, c->HD);
        block_attention(r, l, a);
        product_forward(r, &b, W_O, rows_partial(r, m->branch), a->attn, N, Q, c->C);
        rows_reduce(r, m->branch, "attention's output");
    }

    if (products)
        rmsnorm_forward(dev, a->ffn_in, a->ffn_rstd, a->mid, a->x, m->branch, w + at[W_FFN_NORM], c->norm_eps, n, c->C);
    else rmsnorm_forward(dev, a->ffn_in, a->ffn_rstd, NULL, a->mid, NULL, w + at[W_FFN_NORM], c->norm_eps, n, c->C);
    if (products) {
        const floatX *ffn_in = rows_gather(r, a->ffn_in, "feed-forward's input");
        product_forward(r, &b, W_GATE, a->gate_up, ffn_in, N, c->C, 2 * c->F); // gate and up are one product
    }
    swiglu_forward(dev, a->hidden, a->gate_up, N, c->F);
    if (again) return;
    product_forward(r, &b, W_DOWN, rows_partial(r, m->branch), a->hidden, N, c->F, c->C);
    rows_reduce(r, m->branch, "feed-forward's output");
}

/* m->dx comes in as the gradient of the residual stream behind block l and leaves as that before it. */
static void block_backward(Run *r, int l, int micro) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    BlockActivations *a = block_activations(m, l);
    device_phase(dev, "backward", r->table->units[table_block_unit(r->table, l)].name);
    const BlockWeights b = block_weights(r, l, micro);
    const floatX *w = b.w;
    const int64_t *at = b.at;
    int N = m->B * m->T, n = residual_rows(r), Q = c->NH * c->HD, QKV = qkv_width(c);
    dev->again = 1;
    if (a->keep < KEEP_ALL) block_forward(r, l, 1);
    dev->again = 0;

    const floatX *dx = rows_gather(r, m->dx, "d feed-forward's output");
    product_backward(r, &b, W_DOWN, m->dhidden, dx, a->hidden, N, c->F, c->C);
    swiglu_backward(dev, a->gate_up, m->dhidden, a->gate_up, N, c->F); // in place: the gradient replaces gate and up
    product_backward(r, &b, W_GATE, rows_partial(r, m->dnorm), a->gate_up,
                     rows_gather(r, a->ffn_in, "feed-forward's input"), N, c->C, 2 * c->F);
    rows_reduce(r, m->dnorm, "d feed-forward's input");
    rmsnorm_backward(dev, m->dx, norm_gradient(&b, W_FFN_NORM), m->dnorm, m->dx, a->mid, a->ffn_rstd,
                     w + at[W_FFN_NORM], n, c->C);

    dx = rows_gather(r, m->dx, "d attention's output");
    product_backward(r, &b, W_O, m->dattn, dx, a->attn, N, Q, c->C);
    block_attention_backward(r, a);
    product_backward(r, &b, W_Q, rows_partial(r, m->dnorm), m->dqkv, rows_gather(r, a->attn_in, "attention's input"), N,
                     c->C, QKV);
    rows_reduce(r, m->dnorm, "d attention's input");
    rmsnorm_backward(dev, m->dx, norm_gradient(&b, W_ATTN_NORM), m->dnorm, m->dx, a->x, a->attn_rstd,
                     w + at[W_ATTN_NORM], n, c->C);
}

// ---------------------------------------------------------------------------
// the whole model: embedding, blocks, head and loss

/* Of the chunk that is computed now: do the tokens come in, does the loss come out? */
static int reads_tokens(const Run *r) { return r->table->embed >= 0 && r->model.chunk == r->table->stages; }
static int computes_loss(const Run *r) {
    return r->table->head >= 0 && r->model.chunk == &r->table->stages[r->table->part.virtual_stages - 1];
}

/* The unit behind the chunk's blocks. */
static int stage_end(const Run *r) {
    const Stage *chunk = r->model.chunk;
    return chunk->num_blocks ? table_block_unit(r->table, chunk->first_block + chunk->num_blocks - 1) + 1 : chunk->first_unit;
}

/* The adapters of a unit of blocks; NULL: it has none. */
static FsdpUnit *adapters_of(Run *r, int unit) {
    const Unit *u = &r->table->units[unit];
    return r->config->lora_rank ? &r->fsdp.units[table_block_adapters(r->table, u->first_block)] : NULL;
}

/* A unit of blocks, with its adapters. */
static void blocks_gather(Run *r, int unit) {
    fsdp_prefetch(&r->fsdp, &r->fsdp.units[unit]);
    if (adapters_of(r, unit)) fsdp_prefetch(&r->fsdp, adapters_of(r, unit));
}
static void blocks_prefetch(Run *r, int unit) {
    fsdp_prefetch(&r->fsdp, &r->fsdp.units[unit]);
    if (adapters_of(r, unit)) fsdp_prefetch(&r->fsdp, adapters_of(r, unit));
}
static void blocks_free(Run *r, int unit, ReshardPoint pass) {
    fsdp_reshard(&r->fsdp, &r->fsdp.units[unit], pass);
    if (adapters_of(r, unit)) fsdp_reshard(&r->fsdp, adapters_of(r, unit), pass);
}

/* Gathers what comes next while a unit of the chunk computes: as many units of blocks as slots allow, then the head. */
static void prefetch_forward(Run *r, int unit) {
    const Stage *chunk = r->model.chunk;
    int last = stage_end(r) - 1;
    for (int next = max_i64(unit + 1, chunk->first_unit); next <= last && next < unit + r->opt->slots; next++)
        blocks_prefetch(r, next);
    if (unit == last && computes_loss(r)) fsdp_prefetch(&r->fsdp, &r->fsdp.units[r->table->head]);
}

static void prefetch_backward(Run *r, int unit) {
    for (int next = unit - 1; next >= r->model.chunk->first_unit && next > unit - r->opt->slots; next--)
        blocks_prefetch(r, next);
}

/* The first token of this rank's part of the vocabulary. */
static int vocabulary_begin(const Run *r) {
    return (int)split_begin(r->whole_config->V, r->mesh.size[AXIS_TP], mesh_coordinate(&r->mesh, r->rank, AXIS_TP));
}

/* The batch's ids (B, T) to the residual stream of the first block. */
static void embed_forward(Run *r, ReshardPoint pass) {
    Model *m = &r->model;
    FsdpUnit *embed = &r->fsdp.units[r->table->embed];
    device_phase(&r->dev, "forward", embed->unit->name);
    fsdp_prefetch(&r->fsdp, embed);
    prefetch_forward(r, r->table->embed);
    const floatX *w = fsdp_unshard(&r->fsdp, embed) + embed->unit->offsets[W_EMBED];
    embedding_forward(&r->dev, rows_partial(r, m->blocks[0].x), w, m->ids, vocabulary_begin(r), m->B * m->T,
                      r->config->C, r->config->V);
    rows_reduce(r, m->blocks[0].x, "embedding");
    if (!table_is_tied(r->table)) fsdp_reshard(&r->fsdp, embed, pass); // tied: it is the head as well and stays
}

/* From m->dx, the gradient of the residual stream before the first block. */
static void embed_backward(Run *r, int micro, ReshardPoint pass) {
    Model *m = &r->model;
    FsdpUnit *embed = &r->fsdp.units[r->table->embed];
    device_phase(&r->dev, "backward", embed->unit->name);
    if (embed->unit->frozen) {
        fsdp_reshard(&r->fsdp, embed, pass); // ZeRO-2 kept it
        return;
    }
    float *dembed = fsdp_gradients(&r->fsdp, embed, micro) + embed->unit->offsets[W_EMBED];
    embedding_backward(&r->dev, dembed, rows_gather(r, m->dx, "d embedding"), m->ids, vocabulary_begin(r), m->B * m->T,
                       r->config->C, r->config->V);
    fsdp_reshard(&r->fsdp, embed, pass); // ZeRO-2 kept it
    fsdp_reduce_gradients(&r->fsdp, embed, micro);
}

/* The chunk's blocks, from the first one's x to the residual stream behind the last one: its `mid` + branch. */
static void blocks_forward(Run *r, ReshardPoint pass) {
    const Stage *chunk = r->model.chunk;
    for (int l = chunk->first_block; l < chunk->first_block + chunk->num_blocks; l++) {
        int unit = table_block_unit(r->table, l);
        const Unit *blocks = &r->table->units[unit];
        blocks_gather(r, unit);
        prefetch_forward(r, unit);
        block_forward(r, l, 0);
        if (l == blocks->first_block + blocks->num_blocks - 1) blocks_free(r, unit, pass);
    }
}

/* From m->dx behind the chunk's last block to m->dx before its first. Gradients go out to their shards, unit by unit,
 * while the next unit computes. */
static void blocks_backward(Run *r, int micro, ReshardPoint pass) {
    const Stage *chunk = r->model.chunk;
    for (int l = chunk->first_block + chunk->num_blocks - 1; l >= chunk->first_block; l--) {
        int unit = table_block_unit(r->table, l);
        blocks_gather(r, unit);
        block_backward(r, l, micro);
        if (l > r->table->units[unit].first_block) continue; // the unit has more blocks
        blocks_free(r, unit, pass);
        prefetch_backward(r, unit - 1);
        FsdpUnit *trained = adapters_of(r, unit) ? adapters_of(r, unit) : &r->fsdp.units[unit];
        fsdp_reduce_gradients(&r->fsdp, trained, micro);
    }
}

/* Losses of n rows from their logits, which with `backward` become dlogits. Of a vocabulary that is split each rank
 * tells its part of the softmax: the largest logit, the sum of exponentials, the target's logit. */
static void chunk_loss(Run *r, int row, int n, int backward) {
    Model *m = &r->model;
    int tp = r->mesh.size[AXIS_TP], V = r->config->V, first = vocabulary_begin(r);
    if (tp == 1) {
        cross_entropy(&r->dev, m->losses + row, m->logits, m->targets + row, n, V, backward);
        return;
    }
    float *mine = m->loss_parts, *all = mine + 3 * (int64_t)n; // (n, 3), (tp, n, 3)
    cross_entropy_part(&r->dev, mine, m->logits, m->targets + row, first, n, V);
    exchange(r, ALL_GATHER, AXIS_TP, "softmax parts", mine, all, 3 * (size_t)n, DTYPE_F32);
    cross_entropy_join(&r->dev, m->losses + row, m->logits, all, m->targets + row, tp, first, n, V, backward);
}

/* Final norm, logits and losses of N rows, a chunk of rows at a time: never all logits at once. With
 * `backward` also the gradients: logits become dlogits where they lie, m->dx leaves as the gradient of the residual
 * stream. */
static void head_loss(Run *r, int micro, int backward) {
    const Llama3Config *c = r->config;
    Device *dev = &r->dev;
    Model *m = &r->model;
    FsdpUnit *unit = &r->fsdp.units[r->table->head];
    const int64_t *at = unit->unit->offsets;
    int64_t head = at[table_is_tied(r->table) ? W_EMBED : W_HEAD];
    device_phase(dev, "loss", unit->unit->name);
    const floatX *w = fsdp_unshard(&r->fsdp, unit);
    float *dw = backward && !unit->unit->frozen ? fsdp_gradients(&r->fsdp, unit, micro) : NULL;
    int N = m->B * m->T, n = residual_rows(r), begin = n * mesh_coordinate(&r->mesh, r->rank, AXIS_TP);

    floatX *final_x = m->chunk->num_blocks ? m->final_x : m->blocks[0].x;
    if (m->chunk->num_blocks)
        rmsnorm_forward(dev, m->final_in, m->final_rstd, final_x, m->blocks[m->saved - 1].mid, m->branch,
                        w + at[W_FINAL_NORM], c->norm_eps, n, c->C);
    else
        rmsnorm_forward(dev, m->final_in, m->final_rstd, NULL, final_x, NULL, w + at[W_FINAL_NORM], c->norm_eps, n,
                        c->C);
    const floatX *final_in = rows_gather(r, m->final_in, "head's input");
    floatX *dnorm = backward ? rows_partial(r, m->dnorm) : NULL;
    for (int row = 0; row < N; row += m->logit_rows) {
        int rows = (int)min_i64(m->logit_rows, N - row);
        const floatX *in = final_in + (int64_t)row * c->C, *dlogits = (floatX *)m->logits;
        int64_t stride = (int64_t)c->V *
                         (int64_t)(sizeof(float) / sizeof(floatX)); // dlogits lie at the start of their row of logits
        linear_forward_fp32(dev, m->logits, in, w + head, rows, c->C, c->V);
        chunk_loss(r, row, rows, backward);
        if (!backward) continue;
        linear_backward_input(dev, dnorm + (int64_t)row * c->C, dlogits, stride, w + head, rows, c->C, c->V);
        if (dw) linear_backward_weight(dev, dw + head, dlogits, stride, in, rows, c->C, c->V, row > 0);
    }
    if (backward) {
        rows_reduce(r, m->dnorm, "d head's input");
        rmsnorm_backward(dev, m->dx, dw ? dw + at[W_FINAL_NORM] : NULL, m->dnorm, NULL, final_x, m->final_rstd,
                         w + at[W_FINAL_NORM], n, c->C);
    }
    exact_total(dev, &r->sums[SUM_LOSS], m->losses + begin, n); // of its rows: all tp ranks know all losses
}

// ---------------------------------------------------------------------------
// pipeline parallelism: the steps of the schedule (pipeline.h). One rank is a pipeline of one stage

typedef struct {
    const int32_t *inputs, *targets, *docs, *own_docs;
} MicroBatch; // where the host has them; NULL: the device has them already, or there are none

static MicroBatch micro_batch(const Run *r, const StepBatch *batch, int micro) {
    int64_t at = (int64_t)micro * r->model.B * r->model.T;
    MicroBatch b = {batch->inputs + at, batch->targets + at,
                    batch->docs ? batch->docs + at * r->mesh.size[AXIS_CP] : NULL,
                    batch->docs ? batch->own_docs + at : NULL};
    return b;
}

/* What the chunk that is computed now needs of a micro-batch: others may have come since. */
static void feed_micro_batch(Run *r, const MicroBatch *b) {
    Model *m = &r->model;
    size_t bytes = sizeof(int32_t) * (size_t)m->B * (size_t)m->T;
    if (b->inputs && reads_tokens(r)) device_feed(&r->dev, m->ids, b->inputs, bytes);
    if (b->targets && computes_loss(r)) device_feed(&r->dev, m->targets, b->targets, bytes);
    if (b->docs) device_feed(&r->dev, m->docs, b->docs, bytes * (size_t)r->mesh.size[AXIS_CP]);
    if (b->docs && m->own_docs != m->docs) device_feed(&r->dev, m->own_docs, b->own_docs, bytes);
}

/* A micro-batch through this rank's chunk: from its tokens, or what the stage before it sends, to what the next one
 * gets, or, at the last stage, with the blocks' output where head_loss finds it. */
static void stage_forward(Run *r, const PipelineStep *step, const MicroBatch *batch, ReshardPoint pass) {
    Model *m = &r->model;
    model_enter(r, step->stage, step->activation_set);
    feed_micro_batch(r, batch);
    if (reads_tokens(r)) embed_forward(r, pass);
    else prefetch_forward(r, m->chunk->first_unit - 1);
    pipeline_receive(&r->pipe, step, m->blocks[0].x);
    blocks_forward(r, pass);
    if (computes_loss(r)) return;
    PipelineMessage *out = pipeline_output(&r->pipe, step);
    if (m->chunk->num_blocks)
        residual_add(&r->dev, out->data, m->blocks[m->saved - 1].mid, m->branch,
                     (int64_t)residual_rows(r) * r->config->C);
    else device_copy(&r->dev, out->data, m->blocks[0].x, r->pipe.message_bytes);
    pipeline_send(&r->pipe, step, out);
}

/* The micro-batch's way back: gradients of the SUM of its losses. */
static void stage_backward(Run *r, const PipelineStep *step, const MicroBatch *batch) {
    Model *m = &r->model;
    Fsdp *f = &r->fsdp;
    ReshardPoint pass = step->micro_batch == r->opt->accum - 1 ? AFTER_LAST_USE : AFTER_BACKWARD;
    model_enter(r, step->stage, step->activation_set);
    if (r->pipe.schedule.pp > 1) feed_micro_batch(r, batch); // else it is there
    int end = stage_end(r);
    prefetch_backward(r, end);
    if (computes_loss(r)) { // its forward was the step before
        FsdpUnit *head = &f->units[r->table->head];
        head_loss(r, step->micro_batch, 1);
        fsdp_reshard(f, head, pass);
        prefetch_backward(r, end - 1); // before a reduction, behind which it would wait where they share a way
        if (!table_is_tied(r->table) && !head->unit->frozen)
            fsdp_reduce_gradients(f, head, step->micro_batch); // tied: the embedding adds to it first
    }
    pipeline_receive(&r->pipe, step, m->dx);
    blocks_backward(r, step->micro_batch, pass);
    if (reads_tokens(r)) {
        embed_backward(r, step->micro_batch, pass);
        return;
    }
    PipelineMessage *out = pipeline_output(&r->pipe, step);
    device_copy(&r->dev, out->data, m->dx, r->pipe.message_bytes);
    pipeline_send(&r->pipe, step, out);
}

/* All micro-batches of a step, forward and backward, in the order of the schedule. */
static void run_schedule(Run *r, const StepBatch *batch) {
    const Schedule *s = &r->pipe.schedule;
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep *step = &s->steps[i];
        MicroBatch micro = micro_batch(r, batch, step->micro_batch);
        pipeline_start_receives(&r->pipe, step);
        if (step->kind == PIPE_FORWARD) stage_forward(r, step, &micro, AFTER_FORWARD);
        else stage_backward(r, step, &micro);
    }
    pipeline_finish(&r->pipe);
}

/* Forward of the batch that the model's ids and documents are of; leaves the loss's input at the last stage. */
static void forward_only(Run *r, ReshardPoint pass) {
    const MicroBatch there = ZERO;
    for (int v = 0; v < r->table->part.virtual_stages; v++) {
        PipelineStep step = {PIPE_FORWARD, 0, v, 0, 0, 0};
        if (pipeline_source(&r->pipe.schedule, &step) >= 0) pipeline_start_receive(&r->pipe, &step);
        stage_forward(r, &step, &there, pass);
    }
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
    int distinct =
        sampler_global_batch(&r->loader.sampler) <= r->data->windows; // else padding repeats samples within a step
    for (int a = 0; a < AXES; a++)
        for (int i = 0; i < r->rank;
             i++) // on one host exchanges were compared as they started; this also compares hosts
            if (mine->order[a] != all[i].order[a] && mesh_together(&r->mesh, r->rank, i, (Axis)a))
                run_failure("step %" PRId64
                            ": ranks %d and %d did not start the same exchanges over %s in the same order",
                            step, i, r->rank, axis_names[a]);
    for (int i = 0; i < r->rank; i++) {
        int axis = channels_differ(i, all[i].channels, r->rank, mine->channels);
        if (axis >= 0)
            run_failure("step %" PRId64 ": what ranks %d and %d sent each other over %s is not what they awaited", step,
                        i, r->rank, axis_names[axis]);
    }
    if (mine->setup != all[0].setup)
        run_failure("step %" PRId64 ": rank %d shuffles samples or draws weights from another seed than rank 0", step,
                    r->rank);
    for (int i = 0; i < r->rank; i++) {
        int share = mesh_data_rank(&r->mesh, i) == mesh_data_rank(&r->mesh, r->rank),
            same = mine->samples_hash == all[i].samples_hash;
        if (same && !share && distinct)
            run_failure("step %" PRId64 ": ranks %d and %d train on the same samples (both start with window %" PRId64
                        "); data-parallel ranks must differ",
                        step, i, r->rank, first_sample);
        if (share && !same)
            run_failure("step %" PRId64 ": ranks %d and %d have parts of the same model for the same samples, but "
                                        "train on different ones (rank %d starts with window %" PRId64 ")",
                        step, i, r->rank, r->rank, first_sample);
    }
}

/* The first tensor with a gradient that is not finite, of what this rank owns; -1: there is none. */
static int64_t first_bad_tensor(Run *r) {
    enum { CHUNK = 1 << 14 };
    float chunk[CHUNK];
    ShardPiece p;
    for (int i = 0; next_unique_piece(&r->fsdp, &i, &p);)
        for (int64_t done = 0; done < p.count; done += CHUNK) {
            int64_t n = min_i64(CHUNK, p.count - done);
            device_read(&r->dev, chunk, p.unit->grad + p.at + done, sizeof(float) * (size_t)n);
            for (int64_t e = 0; e < n; e++)
                if (!isfinite(chunk[e])) return p.tensor->index;
        }
    return -1;
}

/* Tells all ranks of this rank's part of the step, and hears of theirs. Here the host waits for the device: the only
 * time in a step. */
static void exchange_reports(Run *r, const StepBatch *batch, double start, double waited_before) {
    StepReport mine = ZERO;
    ExactSum sums[SUMS] = ZERO;
    fsdp_squared_norm(&r->fsdp, &r->sums[SUM_SQUARED_NORM]);
    device_read(&r->dev, sums, r->sums, sizeof sums);
    exact_merge(&mine.loss, &sums[SUM_LOSS]);
    exact_merge(&mine.squared_norm, &sums[SUM_SQUARED_NORM]);
    mine.bad_tensor = mine.squared_norm.not_finite ? first_bad_tensor(r) : -1;
    mine.targets =
        mesh_tells_samples(&r->mesh, r->rank) ? batch->num_targets : 0; // of those that share them, one counts
    mine.samples_hash = batch->samples_hash;
    mine.setup = sampler_fingerprint(&r->loader.sampler) ^ mix64(r->fsdp.seed);
    mine.to_save = save_signals, mine.to_end = end_signals;
    mine.writing = save_is_writing(&r->saver);
    for (int a = 0; a < AXES; a++) mine.order[a] = (uint32_t)(r->comm.groups[a].order >> 32);
    channel_orders(&r->comm, mine.channels);
    mine.figures.seconds = seconds_now() - start;
    mine.figures.wait_seconds = r->comm.wait_seconds - waited_before;
    mine.figures.tokens = (int64_t)r->opt->batch * r->opt->seq * r->opt->accum /
                          mesh_stride(&r->mesh, AXIS_DP_SHARD); // its part of those that it shares
    mine.figures.memory = (int64_t)device_peak(&r->dev);
    all_gather_now(&r->comm, AXIS_WORLD, "step report", &mine, r->reports, sizeof mine);
}

/* Loss and gradient norm are means over all targets of the step, of all ranks and micro-batches: sums of all, divided
 * once. */
static StepStats sum_reports(const Run *r) {
    StepStats s = ZERO;
    ExactSum loss = ZERO, squared_norm = ZERO;
    for (int i = 0; i < r->mesh.world && !r->dev.dry_run; i++) {
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

/* Loss or gradient is not finite: every rank has the same sums, so all skip the update alike. Too many such steps end
 * the run. */
static void step_skip(Run *r, int64_t step, const StepStats *s) {
    char where[300];
    int owner = -1, source = -1, used = 0;
    for (int i = r->mesh.world - 1; i >= 0; i--) {
        int64_t bad = r->reports[i].bad_tensor;
        if (bad >= 0 && (owner < 0 || bad <= r->reports[owner].bad_tensor)) owner = i;
        if (r->reports[i].loss.not_finite) source = i;
    }
    if (owner >= 0)
        used = snprintf(where, sizeof where, "first in the gradient of %s, in the part of the sum that rank %d owns",
                        r->whole->tensors[r->reports[owner].bad_tensor].name, owner);
    else
        used = snprintf(where, sizeof where, "each gradient is finite, %s not",
                        isfinite(s->loss) ? "but the squares of some are" : "the loss is");
    if (source >= 0) snprintf(where + used, sizeof where - (size_t)used, "; the loss of rank %d itself is not", source);
    if (++r->progress.skips > r->opt->max_skips)
        run_failure("step %" PRId64 ": loss %g, gradient norm %g: not finite (%s), and --max-skips %d allows no more "
                                    "of them: lower --lr, lengthen --warmup, or look at the data",
                    step, s->loss, s->grad_norm, where, r->opt->max_skips);
    if (r->rank) return;
    printf("step %6" PRId64 " | skipped, %" PRId64 " of at most %d: loss %g, gradient norm %g: not finite (%s)\n", step,
           r->progress.skips, r->opt->max_skips, s->loss, s->grad_norm, where);
    fflush(stdout);
}

static StepStats train_step(Run *r, int64_t step) { // step counts from 1
    const Options *o = r->opt;
    double start = seconds_now(), waited = r->comm.wait_seconds, exchanged = r->comm.exchange_seconds,
           polled = r->comm.poll_seconds;
    comm_clear_ledger(&r->comm);
    Span whole = span_begin(&r->dev, EVENT_STEP, STREAM_COMPUTE, "step", NULL, (double)step, !is_timed(&r->dev));
    rank_state(r->comm.self, RANK_READING, start);
    StepBatch *batch = loader_next(&r->loader, &r->dev, o->timeout);
    rank_state(r->comm.self, RANK_COMPUTING, seconds_now());
    if (r->samples)
        collective_start(&r->comm, &r->samples_told, ALL_GATHER, AXIS_WORLD, "samples", batch->windows, r->samples,
                         sizeof(int64_t) * (size_t)r->loader.samples, DTYPE_BYTE);
    device_zero(&r->dev, r->sums, sizeof *r->sums * SUMS);
    run_schedule(r, batch);
    device_record(&r->dev, &batch->fed);
    fsdp_finish_gradients(&r->fsdp);
    device_phase(&r->dev, "optimizer", NULL);
    fsdp_sum_tp_replicated(&r->fsdp);
    fsdp_sum_tied_embedding(&r->fsdp);
    collective_wait(&r->comm, &r->samples_told);
    exchange_reports(r, batch, start, waited);
    int64_t first_sample = r->dev.dry_run ? 0 : batch->windows[0];
    loader_release(&r->loader, &r->dev);

    StepStats s = sum_reports(r);
    if (!r->dev.dry_run) check_reports(r, step, first_sample);
    double clip = o->clip > 0 ? fmin(1.0, o->clip / (s.grad_norm + 1e-6)) : 1.0; // torch.nn.utils.clip_grad_norm_
    s.lr = learning_rate(o, step);
    AdamW adam = {(float)s.lr, (float)o->beta1, (float)o->beta2, (float)o->eps, (float)o->weight_decay};
    if (s.skipped) step_skip(r, step, &s);
    else if (s.targets || r->dev.dry_run)
        fsdp_adamw(&r->fsdp, &adam, (float)(clip / (double)max_i64(1, s.targets)), (int)++r->progress.updates);
    device_phase(&r->dev, NULL, NULL);
    span_end(&r->dev, whole, NULL, -1, 0);
    s.samples = sampler_global_batch(&r->loader.sampler);
    r->progress.step = step;
    r->progress.samples += s.samples;
    if (!r->dev.dry_run) r->progress.samples_in_epoch = sampler_position(&r->loader.sampler, step - 1, &r->progress.epoch) + s.samples;
    s.data_wait_seconds = r->loader.wait_seconds;
    s.wait_seconds = r->comm.wait_seconds - waited;
    s.exchange_seconds = r->comm.exchange_seconds - exchanged;
    s.overlap =
        s.exchange_seconds > 0 ? fmax(0, 1 - (s.wait_seconds + r->comm.poll_seconds - polled) / s.exchange_seconds) : 0;
    s.seconds = seconds_now() - start;
    return s;
}

// ---------------------------------------------------------------------------
// evaluation and generation

/* Mean loss over the first `max_batches` micro-batches of every rank (0: over all windows). Every target counts
 * once whatever the number of ranks: windows past the end have none. */
static double evaluate(Run *r, const Dataset *data, int64_t max_batches, int64_t *num_targets) {
    StepReport mine = ZERO; // its sums are all that is told here
    int B = r->opt->batch, T = r->opt->seq, cp = r->mesh.size[AXIS_CP],
        cp_rank = mesh_coordinate(&r->mesh, r->rank, AXIS_CP), ranks = mesh_data_ranks(&r->mesh);
    size_t bytes = sizeof(int32_t) * (size_t)B * (size_t)(T / cp);
    ExactSum sum = ZERO;
    Phase before = comm_phase(&r->comm, PHASE_VALIDATION);
    device_zero(&r->dev, r->sums, sizeof *r->sums * SUMS);
    int64_t batches = r->dev.dry_run ? 1 : (data->windows + (int64_t)B * ranks - 1) / ((int64_t)B * ranks);
    if (max_batches) batches = min_i64(batches, max_batches);
    for (int64_t i = 0; i < batches; i++) {
        char error[1024];
        for (int b = 0; b < B && !r->dev.dry_run; b++) {
            int32_t *inputs = r->eval_inputs + (int64_t)b * T, *targets = r->eval_targets + (int64_t)b * T;
            int n = dataset_window(data, (i * ranks + mesh_data_rank(&r->mesh, r->rank)) * B + b, inputs, targets,
                                   r->eval_raw, error, sizeof error);
            if (n < 0) user_error("%s", error);
            if (mesh_tells_samples(&r->mesh, r->rank)) mine.targets += n;
            if (r->eval_docs) document_ids(r->eval_docs + (int64_t)b * T, inputs, T, data->document_end);
            cp_select_halves(r->eval_inputs + (int64_t)b * (T / cp), inputs, T, cp, cp_rank),
                cp_select_halves(r->eval_targets + (int64_t)b * (T / cp), targets, T, cp, cp_rank);
        }
        if (r->table->embed >= 0) device_write(&r->dev, r->model.ids, r->eval_inputs, bytes);
        if (r->model.docs) device_write(&r->dev, r->model.docs, r->eval_docs, bytes * (size_t)cp);
        for (int b = 0; b < B && r->model.own_docs != r->model.docs; b++)
            cp_select_halves(r->eval_docs + (int64_t)b * (T / cp), r->eval_docs + (int64_t)b * T, T, cp, cp_rank);
        if (r->model.own_docs != r->model.docs) device_write(&r->dev, r->model.own_docs, r->eval_docs, bytes);
        forward_only(r, AFTER_LAST_USE);
        if (r->table->head < 0) continue;
        device_write(&r->dev, r->model.targets, r->eval_targets, bytes);
        head_loss(r, 0, 0);
        fsdp_reshard(&r->fsdp, &r->fsdp.units[r->table->head], AFTER_LAST_USE);
    }
    device_phase(&r->dev, NULL, NULL);
    device_read(&r->dev, &sum, &r->sums[SUM_LOSS], sizeof sum);
    exact_merge(&mine.loss, &sum);
    all_gather_now(&r->comm, AXIS_WORLD, "evaluation", &mine, r->reports, sizeof mine);
    comm_phase(&r->comm, before);
    ExactSum loss = ZERO;
    *num_targets = 0;
    for (int i = 0; i < r->mesh.world && !r->dev.dry_run; i++) {
        exact_merge(&loss, &r->reports[i].loss);
        *num_targets += r->reports[i].targets;
    }
    return exact_value(&loss) / (double)max_i64(1, *num_targets);
}

#include "run/generate.h" // defines: generate

// ---------------------------------------------------------------------------
// a rank: dry-run first, then run

#include "run/run.h" // defines: run_allocate, run_bind, dry_run_open, check_memory, check_agreement, check_first_step

/* Saves what has come due, and lets an earlier checkpoint that is written become one. All ranks know the same. */
static void save_when_due(Run *r, int asked, int ends) {
    const Options *o = r->opt;
    int64_t step = r->progress.step, events = r->dev.num_events;
    double start = seconds_now();
    int due = r->saver.saved != step && (ends || (asked & SIGNAL_SAVE) || (o->save_every && step % o->save_every == 0));
    if (r->saver.files && (due || ends || !r->writing)) checkpoint_commit(&r->saver);
    if (due && r->rank == 0) logger_sync(&r->log);
    if (due) checkpoint_save(&r->saver, &r->progress);
    if (ends && r->saver.files) checkpoint_commit(&r->saver);
    trace_as_one_event(&r->dev, events, "saving", start);
}

/* What signals ask for that was not acted on yet: of a signal that mpirun hands to all, each process hears in its own
 * time. Notes who still writes. */
static int signals_asked(Run *r) {
    int to_save = 0, to_end = 0;
    r->writing = 0;
    for (int i = 0; i < r->mesh.world; i++) {
        const StepReport *report = &r->reports[i];
        to_save = to_save > report->to_save ? to_save : report->to_save, to_end |= report->to_end,
        r->writing |= report->writing;
    }
    int asked = (to_save > r->saves_asked ? SIGNAL_SAVE : 0) | (to_end ? SIGNAL_END : 0);
    r->saves_asked = to_save;
    return asked;
}

/* One step and all that stands around it. Returns what signals asked for. */
static int train_and_log(Run *r, const Run *dry_run, int64_t step, double flops, double *rate) {
    const Options *o = r->opt;
    int first = step == r->resume_from->progress.step + 1, asked;
    int64_t targets, events;
    StepStats s = train_step(r, step);
    s.mfu = *rate > 0 ? flops / s.seconds / *rate : 0;
    asked = signals_asked(r);
    if (first) *rate = matmul_rate(&r->dev);
    if (first) check_first_step(r, dry_run);
    if (r->rank == 0) logger_step(&r->log, step, o->steps, &s, r->figures, o->seq, &r->dev, &r->comm);
    if (r->rank == 0) logger_samples(&r->log, step, r->progress.epoch, r->samples, r->loader.samples, &r->mesh);
    if (o->trace) device_finish(&r->dev); // what follows is no part of the step
    events = r->dev.num_events;
    double start = seconds_now();
    if (r->fsdp.fingerprints && o->check_replicas && step % o->check_replicas == 0)
        fsdp_check_replicas(&r->fsdp, step), trace_as_one_event(&r->dev, events, "replica check", start);
    if (!r->val->num_files || (step < o->steps && (!o->val_every || step % o->val_every))) return asked;
    events = r->dev.num_events, start = seconds_now();
    double loss = evaluate(r, r->val, o->val_batches, &targets);
    trace_as_one_event(&r->dev, events, "validation", start);
    if (!isfinite(loss))
        run_failure("step %" PRId64
                    ": validation loss %g: not finite; lower --lr, lengthen --warmup, or look at the data",
                    step, loss);
    if (r->rank == 0) logger_validation(&r->log, step, loss, targets);
    return asked;
}

/* From the step behind the last one to --steps, or to the one in which a signal asks for the end. Returns whether it
 * came to --steps. */
static int train(Run *r, const Run *dry_run) {
    int64_t last = r->opt->steps, traced = 0;
    double flops = device_flops(&dry_run->dev, 0), rate = 0; // FLOP/s
    int ends = r->progress.step == last;
    events_drop(&r->dev, 0);                         // the timeline begins here
    if (ends && r->opt->out) save_when_due(r, 0, 1); // nothing is left to train: a copy in --out
    while (!ends) {
        int64_t before = r->dev.num_events;
        int asked = train_and_log(r, dry_run, r->progress.step + 1, flops, &rate);
        if (before < r->dev.num_events && r->dev.num_events <= r->dev.max_events) traced = r->progress.step;
        ends = r->progress.step == last || asked & SIGNAL_END;
        if (asked && r->rank == 0)
            printf("step %6" PRId64 " | a signal asks to save%s\n", r->progress.step,
                   asked & SIGNAL_END ? ", and to end" : "");
        if (r->opt->out) save_when_due(r, asked, ends);
    }
    if (r->opt->trace) {
        trace_write(&r->comm, r->opt->trace);
        if (r->rank == 0 && traced == last) printf("timeline of all steps: %s\n", r->opt->trace);
        if (r->rank == 0 && traced < last)
            printf("timeline of the first %" PRId64 " of %" PRId64 " steps: %s (it has room for %" PRId64
                   " events a rank)\n",
                   traced, last, r->opt->trace, r->dev.max_events);
    }
    return r->progress.step == last;
}

#include "plan/planner.h" // defines: Plan's dry runs and replay: plan_open, plan_main, write_plan

static void write_run_files(const Job *j, const Run *r) {
    Plan plan;
    FILE *f = logger_create(j->opt.out, "config.txt");
    options_write(r->opt, f);
    if (fclose(f)) user_error("cannot write config.txt under %s: %s", j->opt.out, strerror(errno));
    layout_write(j->opt.out, &j->mesh, r->layout);
    plan_open(&plan, j, DRY_RUN_PARTS);
    write_plan(j, &plan, NULL);
    plan_close(&plan);
}

/* Opens for real what was dry-run: device, groups, shards, weights. */
static void rank_open(Run *r, const Run *dry_run, Job *j, int rank) {
    run_bind(r, j, rank);
    if (SLOW_TIER_COMPUTES && offloaded(&j->opt))
        make_directories(j->opt.out); // by each rank: they may be on different hosts
    device_open(&r->dev, &dry_run->dev, j->opt.out, rank);
    ops_open(&r->dev, rank == 0);
    comm_open(&r->comm, &r->dev, &j->mesh, rank, j->transport, j->host_transport, &j->thread_world, j->opt.timeout);
    if (j->opt.out) comm_leave_flights(&r->comm, j->opt.out);
    check_agreement(r);
    r->layout = layout_read_back(&r->comm);
    r->hosts = hosts_read_back(&r->comm);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // by every rank, and they may be threads
    run_allocate(r, j);
    r->fsdp.seed = (uint64_t)j->opt.seed;
    double start = seconds_now();
    weights_load(&r->fsdp, j->has_weights ? &j->weights : NULL, j->opt.adapters ? &j->adapters : NULL, &j->resume_from);
    comm_barrier(&r->comm, "start-up: weights are in place"); // a slow disk is start-up's, not the first step's
    r->load_seconds = seconds_now() - start;
    comm_phase(&r->comm, PHASE_STEP);
}

static int rank_train(Run *r, const Run *dry_run, const Job *j) {
    if (r->rank == 0) {
        print_banner(j, r, dry_run);
        logger_open(&r->log, j->opt.out, j->mesh.world, &r->progress);
        logger_data(&r->log, r->data, j->opt.tail, r->progress.samples_in_epoch, j->resume_from.data_changed);
        if (j->opt.out) write_run_files(j, r);
    }
    int whole = train(r, dry_run);
    loader_close(&r->loader, &r->dev);
    if (r->rank == 0) logger_loader(&r->loader), logger_close(&r->log);
    return whole;
}

static void rank_eval(Run *r, const Job *j) {
    int64_t targets;
    double loss = evaluate(r, &j->val, 0, &targets);
    if (!isfinite(loss))
        user_error("the loss of %s on %s is %g, not finite: look at the weights", j->opt.model, j->opt.eval, loss);
    cJSON *name = cJSON_CreateString(j->opt.eval); // escaped as JSON wants it
    char *quoted = cJSON_PrintUnformatted(name);
    if (r->rank == 0)
        printf("{\"file\":%s,\"tokens\":%" PRId64 ",\"loss\":%.9g,\"perplexity\":%.9g}\n", quoted, targets, loss,
               exp(fmin(loss, 709))); // JSON has no infinity
    free(quoted);
    cJSON_Delete(name);
}

static void rank_main(Job *j, int rank) {
    Run *dry_run = (Run *)checked_malloc(sizeof *dry_run), *r = (Run *)checked_malloc(sizeof *r);
    dry_run_open(dry_run, j, rank, NULL);
    if (rank == 0 || j->host_transport == &transport_threads)
        check_memory(j, &dry_run->dev);  // before any rank takes memory that others are to have
    if (rank == 0) job_check_outputs(j); // the last thing that can refuse, since it may leave a directory behind
    rank_open(r, dry_run, j, rank);
    int whole = j->task == DO_EXPORT;
    if (j->task == DO_TRAIN) whole = rank_train(r, dry_run, j);
    if (j->task == DO_EVAL) rank_eval(r, j);
    if (j->task == DO_GENERATE) generate(r, j->tokenizer, j->prompt, (int)j->prompt_length);
    if (j->opt.export_dir && whole) model_export(&r->saver);
    else if (j->opt.export_dir && r->rank == 0)
        printf("not exported: the run ended at step %" PRId64 " of %d; --resume goes on, and exports at its end\n",
               r->progress.step, j->opt.steps);
    run_close(r);
    run_close(dry_run);
    free(r);
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
