/* llama3.h: the Llama 3 family: configurations, presets, RoPE, the tensor table, initial weights.
 *
 * The tensor table has one row per tensor of the model: its name, shape, FSDP unit, how tensor parallelism splits it,
 * and its initialization. Initialization, sharding, AdamW, checkpoints, import, export, LoRA and the tests are loops
 * over this table; nothing knows a tensor by number. A caller may rely on: a table depends on the configuration, the
 * part of the model that a rank has and the wrapping of blocks into units, never on the data-parallel layout.
 */
#ifndef LLAMA3_H
#define LLAMA3_H
#include "lib/device/device.h"
#include "lib/ops/int8.h"

// ---------------------------------------------------------------------------
// configuration

/* How the model's own weights are kept. With LoRA (Hu et al. 2021) they are frozen, and each adapted matrix W (out, in)
 * gets two small trained ones, A (r, in) and B (out, r): y = W x + alpha / r · B A x. */
typedef enum {
    BASE_TRAINED,
    BASE_FROZEN,  // in the compute dtype
    BASE_INT8,    // the blocks' matrices in int8, the rest in the compute dtype
    BASE_INT8_ALL // every tensor in int8
} BaseKind;

typedef struct {
    const char *name;
    int V, C, L;        // vocabulary, width of the residual stream, blocks
    int NH, NKV, HD, F; // query heads, key/value heads, head dimension, width of the MLP
    int max_positions;  // longest sequence the model was trained for
    int tied;           // the head's weight is the embedding's
    float norm_eps;
    double rope_theta;
    double rope_factor;         // 1: no scaling; else Llama 3.1's scaling by wavelength, see rope_table
    double rope_low, rope_high; // low_freq_factor, high_freq_factor
    int rope_original;          // original_max_position_embeddings
    int T, B;                   // defaults of --seq and --batch
    BaseKind base;
    int lora_rank;         // 0: no adapters
    unsigned lora_targets; // bit i: lora_targets[i] is adapted
    double lora_alpha;
    int muon; // the blocks' matrices are trained with Muon, everything else with AdamW
} Llama3Config;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // presets have no adapters and no optimizer

/* From the models' own config.json. */
// clang-format off
static const Llama3Config llama3_presets[] = {
    //                     V      C    L   NH  NKV   HD      F positions tied  eps  theta  factor low high orig.   T  B
    {"tiny",            4096,   256,   6,   4,   2,  64,   768,   2048, 0, 1e-5f, 500000,  1,  1,  4,  8192,    256, 8},
    {"bench-8m",        4096,   288,   6,   6,   6,  48,   768,   2048, 0, 1e-5f, 500000,  1,  1,  4,  8192,    256, 8},
    {"bench-125m",     32000,   768,  12,  12,   4,  64,  2048,   2048, 0, 1e-5f, 500000,  1,  1,  4,  8192,    512, 2},
    {"llama3-8b",     128256,  4096,  32,  32,   8, 128, 14336,   8192, 0, 1e-5f, 500000,  1,  1,  4,  8192,   8192, 1},
    {"llama3-70b",    128256,  8192,  80,  64,   8, 128, 28672,   8192, 0, 1e-5f, 500000,  1,  1,  4,  8192,   8192, 1},
    {"llama3.1-8b",   128256,  4096,  32,  32,   8, 128, 14336, 131072, 0, 1e-5f, 500000,  8,  1,  4,  8192,   8192, 1},
    {"llama3.1-70b",  128256,  8192,  80,  64,   8, 128, 28672, 131072, 0, 1e-5f, 500000,  8,  1,  4,  8192,   8192, 1},
    {"llama3.1-405b", 128256, 16384, 126, 128,   8, 128, 53248, 131072, 0, 1e-5f, 500000,  8,  1,  4,  8192,   8192, 1},
    {"llama3.2-1b",   128256,  2048,  16,  32,   8,  64,  8192, 131072, 1, 1e-5f, 500000, 32,  1,  4,  8192,   8192, 1},
    {"llama3.2-3b",   128256,  3072,  28,  24,   8, 128,  8192, 131072, 1, 1e-5f, 500000, 32,  1,  4,  8192,   8192, 1},
};
// clang-format on
#pragma GCC diagnostic pop
enum { LLAMA3_PRESETS = sizeof llama3_presets / sizeof llama3_presets[0] };

static const Llama3Config *preset_find(const char *name) {
    for (int i = 0; i < LLAMA3_PRESETS; i++)
        if (!strcmp(name, llama3_presets[i].name)) return &llama3_presets[i];
    return NULL;
}

/* The frequency of pair i of a head's dimensions in RoPE, without scaling. */
static float rope_base_frequency(const Llama3Config *c, int i) {
    return 1.0f / powf((float)c->rope_theta, (float)(2 * i) / (float)c->HD);
}

/* The same with scaling, as _compute_llama3_parameters of transformers: frequencies with long wavelengths are divided
 * by the factor, short ones are kept, those between are interpolated. All arithmetic is fp32, as there. */
static float rope_frequency(const Llama3Config *c, int i) {
    float original = (float)c->rope_original, factor = (float)c->rope_factor;
    float longest_kept = (float)(c->rope_original / c->rope_high);
    float shortest_divided = (float)(c->rope_original / c->rope_low);
    float frequency = rope_base_frequency(c, i), wavelength = 2 * (float)M_PI / frequency;
    if (c->rope_factor == 1 || wavelength < longest_kept) return frequency;
    if (wavelength > shortest_divided) return frequency / factor;
    float smooth = (original / wavelength - (float)c->rope_low) / (float)(c->rope_high - c->rope_low);
    return (1 - smooth) * frequency / factor + smooth * frequency;
}

/* The cosines and sines of RoPE, (positions, 2, HD/2) in fp32. */
static void rope_table(float *cos_sin, const Llama3Config *c, int positions) {
    for (int i = 0; i < c->HD / 2; i++) {
        float frequency = rope_frequency(c, i);
        for (int t = 0; t < positions; t++) {
            float angle = (float)t * frequency;
            cos_sin[(int64_t)t * c->HD + i] = cosf(angle);
            cos_sin[(int64_t)t * c->HD + c->HD / 2 + i] = sinf(angle);
        }
    }
}

// ---------------------------------------------------------------------------
// the tensor table: one row per kind of weight

/* The kinds of FSDP units. UNIT_ADAPTERS: the adapters of as many blocks as a UNIT_BLOCK holds. */
typedef enum { UNIT_EMBED, UNIT_BLOCK, UNIT_HEAD, UNIT_ADAPTERS, UNIT_KINDS } UnitKind;

// clang-format off
typedef enum {
    W_EMBED, W_ATTN_NORM, W_Q, W_K, W_V, W_O, W_MLP_NORM, W_GATE, W_UP, W_DOWN, W_FINAL_NORM, W_HEAD,
    W_Q_A, W_Q_B, W_K_A, W_K_B, W_V_A, W_V_B, W_O_A, W_O_B, // LoRA's matrices A and B
    W_GATE_A, W_GATE_B, W_UP_A, W_UP_B, W_DOWN_A, W_DOWN_B,
    W_KINDS
} WeightKind;
// clang-format on

/* The sizes of weights, in the order of dim_size. */
typedef enum { DIM_ONE, DIM_V, DIM_C, DIM_Q, DIM_KV, DIM_F, DIM_R } Dim; // Q: NH·HD, KV: NKV·HD, R: LoRA's rank

/* How tensor parallelism splits a weight (rows, cols) = (outputs, inputs). Megatron-LM calls a split of the rows
 * column-parallel, because it writes y = x A with A (inputs, outputs). */
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS } Split;

typedef enum {
    INIT_ONES,
    INIT_NORMAL,   // standard deviation 0.02
    INIT_RESIDUAL, // 0.02 / sqrt(2 L), so that the residual stream's variance does not grow with depth (GPT-2)
    INIT_UNIFORM,  // within ±1 / sqrt(inputs), as PEFT initializes A
    INIT_ZEROS
} Init;

typedef struct {
    WeightKind kind;
    UnitKind unit;
    const char *name; // in Hugging Face's files, without .weight; %d is the block
    Dim rows, cols;
    Split split;
    int fused;        // follows the tensor above without a gap, so that one matmul uses both: Q, K, V; gate, up
    int weight_decay; // AdamW's weight decay applies
    Init init;
} TensorRow;

// clang-format off
#define LAYER "model.layers.%d."
static const TensorRow llama3_tensors[W_KINDS] = {
    // kind        unit        name                              rows     cols   split      fused decay initialization
    {W_EMBED,      UNIT_EMBED, "model.embed_tokens",             DIM_V,   DIM_C, SPLIT_ROWS,    0, 1, INIT_NORMAL},
    {W_ATTN_NORM,  UNIT_BLOCK, LAYER "input_layernorm",          DIM_ONE, DIM_C, SPLIT_NONE,    0, 0, INIT_ONES},
    {W_Q,          UNIT_BLOCK, LAYER "self_attn.q_proj",         DIM_Q,   DIM_C, SPLIT_ROWS,    0, 1, INIT_NORMAL},
    {W_K,          UNIT_BLOCK, LAYER "self_attn.k_proj",         DIM_KV,  DIM_C, SPLIT_ROWS,    1, 1, INIT_NORMAL},
    {W_V,          UNIT_BLOCK, LAYER "self_attn.v_proj",         DIM_KV,  DIM_C, SPLIT_ROWS,    1, 1, INIT_NORMAL},
    {W_O,          UNIT_BLOCK, LAYER "self_attn.o_proj",         DIM_C,   DIM_Q, SPLIT_COLUMNS, 0, 1, INIT_RESIDUAL},
    {W_MLP_NORM,   UNIT_BLOCK, LAYER "post_attention_layernorm", DIM_ONE, DIM_C, SPLIT_NONE,    0, 0, INIT_ONES},
    {W_GATE,       UNIT_BLOCK, LAYER "mlp.gate_proj",            DIM_F,   DIM_C, SPLIT_ROWS,    0, 1, INIT_NORMAL},
    {W_UP,         UNIT_BLOCK, LAYER "mlp.up_proj",              DIM_F,   DIM_C, SPLIT_ROWS,    1, 1, INIT_NORMAL},
    {W_DOWN,       UNIT_BLOCK, LAYER "mlp.down_proj",            DIM_C,   DIM_F, SPLIT_COLUMNS, 0, 1, INIT_RESIDUAL},
    {W_FINAL_NORM, UNIT_HEAD,  "model.norm",                     DIM_ONE, DIM_C, SPLIT_NONE,    0, 0, INIT_ONES},
    {W_HEAD,       UNIT_HEAD,  "lm_head",                        DIM_V,   DIM_C, SPLIT_ROWS,    0, 1, INIT_NORMAL},
    // LoRA, with PEFT's names. B is split like W's rows (outputs), A like W's columns (inputs).
#define ADAPTER(kind, name, out, in, split_a, split_b) \
    {kind##_A, UNIT_ADAPTERS, "base_model.model." LAYER name ".lora_A", DIM_R, in, split_a, 0, 1, INIT_UNIFORM}, \
    {kind##_B, UNIT_ADAPTERS, "base_model.model." LAYER name ".lora_B", out, DIM_R, split_b, 0, 1, INIT_ZEROS}
    ADAPTER(W_Q,    "self_attn.q_proj", DIM_Q,  DIM_C, SPLIT_NONE,    SPLIT_ROWS),
    ADAPTER(W_K,    "self_attn.k_proj", DIM_KV, DIM_C, SPLIT_NONE,    SPLIT_ROWS),
    ADAPTER(W_V,    "self_attn.v_proj", DIM_KV, DIM_C, SPLIT_NONE,    SPLIT_ROWS),
    ADAPTER(W_O,    "self_attn.o_proj", DIM_C,  DIM_Q, SPLIT_COLUMNS, SPLIT_NONE),
    ADAPTER(W_GATE, "mlp.gate_proj",    DIM_F,  DIM_C, SPLIT_NONE,    SPLIT_ROWS),
    ADAPTER(W_UP,   "mlp.up_proj",      DIM_F,  DIM_C, SPLIT_NONE,    SPLIT_ROWS),
    ADAPTER(W_DOWN, "mlp.down_proj",    DIM_C,  DIM_F, SPLIT_COLUMNS, SPLIT_NONE),
};
#undef ADAPTER
#undef LAYER

/* The matrices that LoRA may adapt, as --lora-targets and PEFT name them. */
static const struct {
    WeightKind kind;
    const char *name, *peft;
} lora_targets[] = {
    {W_Q, "q", "q_proj"}, {W_K, "k", "k_proj"}, {W_V, "v", "v_proj"}, {W_O, "o", "o_proj"},
    {W_GATE, "gate", "gate_proj"}, {W_UP, "up", "up_proj"}, {W_DOWN, "down", "down_proj"},
};
// clang-format on
enum { LORA_TARGETS = sizeof lora_targets / sizeof lora_targets[0] };

/* The index in lora_targets of a matrix, or of the matrix that an adapter belongs to; -1: LoRA cannot adapt it. */
static int lora_target(WeightKind kind) {
    if (kind >= W_Q_A) return ((int)kind - (int)W_Q_A) / 2; // A and B of each target, in the order of lora_targets
    for (int i = 0; i < LORA_TARGETS; i++)
        if (lora_targets[i].kind == kind) return i;
    return -1;
}
static WeightKind lora_a(WeightKind matrix) { return (WeightKind)((int)W_Q_A + 2 * lora_target(matrix)); }
static WeightKind lora_b(WeightKind matrix) { return (WeightKind)((int)W_Q_B + 2 * lora_target(matrix)); }
static int is_adapted(const Llama3Config *c, WeightKind kind) {
    return c->lora_rank && lora_target(kind) >= 0 && (c->lora_targets >> lora_target(kind) & 1);
}
static float adapter_scale(const Llama3Config *c) { return (float)(c->lora_alpha / c->lora_rank); }

/* Is a tensor stored in int8 (lib/ops/int8.h)? */
static int is_quantized(BaseKind base, const TensorRow *row) {
    if (row->unit == UNIT_ADAPTERS) return 0;
    return base == BASE_INT8_ALL || (base == BASE_INT8 && row->unit == UNIT_BLOCK && row->rows != DIM_ONE);
}

// ---------------------------------------------------------------------------
// the tensor table of one rank's part of the model

enum {
    TENSOR_ALIGN = 128, // tensors begin at multiples of so many elements in their unit: 256 bytes in bf16, 512 in fp32
    MAX_STAGES = 64     // virtual stages per rank
};

/* Which part of the model a rank has. Tensor parallelism gives it an equal part of each split weight. Pipeline
 * parallelism gives it the blocks of `virtual_stages` stages: virtual stage v of rank p is stage v * pp + p. */
typedef struct {
    int tp, tp_rank;
    int pp, pp_rank, virtual_stages;
    int light_ends;     // the first and the last stage have one block less, to balance embedding and head
    int tied_head_copy; // tied: the head is a unit of its own with a copy of the embedding (shared_gradients.h)
} ModelPart;

static const ModelPart WHOLE_MODEL = {1, 0, 1, 0, 1, 0, 0};

/* One rank's part of one tensor. */
typedef struct {
    char name[72];
    const TensorRow *row;
    int unit;                       // index into units
    int index;                      // among the whole model's tensors; a tied copy has the embedding's
    int is_tied_copy;               // the head's copy of the embedding: neither saved nor counted
    int is_frozen;                  // has a gradient, but is not updated in this period of a recipe
    int64_t frozen_steps;           // steps of earlier periods of the recipe in which it was frozen
    int64_t rows, cols;             // this rank's part of it
    int64_t first_row, first_col;   // where the part begins in the whole tensor
    int64_t whole_rows, whole_cols; // of the whole tensor
    int64_t offset;                 // first element within the unit
    int is_muon;                    // trained with Muon
    int is_quantized;               // stored in int8
    int64_t stored_at; // in a quantized unit: first element among its int8 elements, or among its unquantized ones
} Tensor;

/* Tensors that are sharded, gathered and updated together, in one flat buffer. */
typedef struct {
    UnitKind kind;
    char name[64];
    int first_tensor, end_tensor; // [first, end) in the table
    int first_block, num_blocks;  // embedding and head count as one block
    int64_t size;                 // elements, with the gaps between tensors; equal on all tp ranks
    int frozen;                   // not trained
    int64_t int8_blocks;          // in int8: blocks; 0: the unit is not quantized
    int64_t unquantized;          // in int8: elements of its tensors that are not quantized, such as norms
    int has_muon;                 // Muon trains its matrices
    int64_t adamw_elements;       // of its tensors that AdamW trains
    int64_t offsets[W_KINDS];     // of each kind of weight in the unit's first block; -1: it has none
    int64_t block_stride;         // elements from a block to the next one
} Unit;

/* Consecutive blocks that a pipeline rank computes: a virtual stage. Without --pp one stage has all blocks. */
typedef struct {
    int first_block, num_blocks;
    int first_unit; // of the first block
} Stage;

/* All tensors and units of one rank's part of the model, in the order of the forward pass, then the adapters. */
typedef struct {
    ModelPart part;
    Tensor *tensors;
    int num_tensors;
    Unit *units; // embedding, blocks, head, adapters, as far as this part has them
    int num_units;
    Stage stages[MAX_STAGES]; // (part.virtual_stages)
    int num_blocks;           // of all stages
    int embed, head;          // units, -1: another rank has it. Tied: the same unit, unless part.tied_head_copy
    int first_adapters;       // units of adapters are in the order of the units of blocks
    int64_t wrap;             // parameters that a unit of blocks has at least; 0: one block per unit
    int blocks_per_unit;      // the last unit of a stage may have fewer
    int64_t num_parameters;   // of this part, without gaps
    int64_t num_trained;
} TensorTable;

static int64_t dim_size(const Llama3Config *c, Dim d) {
    const int64_t sizes[] = {1, c->V, c->C, (int64_t)c->NH * c->HD, (int64_t)c->NKV * c->HD, c->F, c->lora_rank};
    return sizes[d];
}

/* The first of `whole` rows or columns that rank i of n has. Parts differ by at most one. */
static int64_t split_begin(int64_t whole, int n, int i) { return whole * i / n; }
static int64_t split_count(int64_t whole, int n, int i) {
    return split_begin(whole, n, i + 1) - split_begin(whole, n, i);
}

/* The configuration of a rank's part: its heads, its part of the MLP and of the vocabulary. */
static Llama3Config config_of_part(const Llama3Config *whole, const ModelPart *part) {
    Llama3Config c = *whole;
    c.NH /= part->tp;
    c.NKV /= part->tp;
    c.F = (int)split_count(whole->F, part->tp, part->tp_rank);
    c.V = (int)split_count(whole->V, part->tp, part->tp_rank);
    return c;
}

/* A tensor's number in the whole model's table: embedding, blocks, final norm, head, then the adapters block by block.
 * Tied: embedding and final norm are one unit, so the norm comes second. */
static int tensor_index(const Llama3Config *c, WeightKind kind, int block) {
    int per_block = W_DOWN - W_ATTN_NORM + 1, first_block = c->tied ? 2 : 1;
    int after_blocks = first_block + c->L * per_block, first_adapter = after_blocks + (c->tied ? 0 : 2);
    if (kind >= W_Q_A) {
        unsigned earlier = c->lora_targets & ((1u << lora_target(kind)) - 1);
        int is_b = ((int)kind - (int)W_Q_A) % 2;
        return first_adapter + 2 * (block * __builtin_popcount(c->lora_targets) + __builtin_popcount(earlier)) + is_b;
    }
    switch (kind) {
    case W_EMBED: return 0;
    case W_FINAL_NORM: return c->tied ? 1 : after_blocks;
    case W_HEAD: return c->tied ? 0 : after_blocks + 1;
    default: return first_block + block * per_block + (int)kind - (int)W_ATTN_NORM;
    }
}

/* Appends this rank's part of a tensor to a unit, which grows by the largest part of any tp rank. A fused tensor begins
 * at `end`, where the one above ends. Returns its own end. */
static int64_t table_add_tensor(TensorTable *t, const Llama3Config *c, const TensorRow *row, int unit, int block,
                                int64_t end) {
    Unit *u = &t->units[unit];
    Tensor *tensor = &t->tensors[t->num_tensors++];
    int tp = t->part.tp, tp_rank = t->part.tp_rank;
    tensor->rows = tensor->whole_rows = dim_size(c, row->rows);
    tensor->cols = tensor->whole_cols = dim_size(c, row->cols);
    int64_t room = tensor->rows * tensor->cols; // elements of the largest part
    if (row->split == SPLIT_ROWS) {
        tensor->first_row = split_begin(tensor->whole_rows, tp, tp_rank);
        tensor->rows = split_count(tensor->whole_rows, tp, tp_rank);
        room = blocks_of(tensor->whole_rows, tp) * tensor->cols;
    } else if (row->split == SPLIT_COLUMNS) {
        tensor->first_col = split_begin(tensor->whole_cols, tp, tp_rank);
        tensor->cols = split_count(tensor->whole_cols, tp, tp_rank);
        room = tensor->rows * blocks_of(tensor->whole_cols, tp);
    }
    int64_t elements = tensor->rows * tensor->cols;
    tensor->is_tied_copy = c->tied && row->kind == W_HEAD;
    snprintf(tensor->name, sizeof tensor->name, tensor->is_tied_copy ? llama3_tensors[W_EMBED].name : row->name, block);
    strcat(tensor->name, ".weight");
    tensor->row = row;
    tensor->unit = unit;
    tensor->index = tensor_index(c, row->kind, block);
    tensor->offset = row->fused ? end : round_up(u->size, TENSOR_ALIGN);
    if (u->offsets[row->kind] < 0) u->offsets[row->kind] = tensor->offset;
    u->size = (row->fused ? u->size : tensor->offset) + room;
    tensor->is_muon = c->muon && row->unit == UNIT_BLOCK && row->rows != DIM_ONE;
    u->has_muon |= tensor->is_muon;
    u->adamw_elements += tensor->is_muon ? 0 : elements;
    tensor->is_quantized = is_quantized(c->base, row);
    if (tensor->is_quantized) {
        tensor->stored_at = u->int8_blocks * INT8_BLOCK;
        u->int8_blocks += int8_blocks(room);
    } else {
        tensor->stored_at = u->unquantized;
        u->unquantized += round_up(room, TENSOR_ALIGN);
    }
    u->end_tensor = t->num_tensors;
    if (!tensor->is_tied_copy) t->num_parameters += elements;
    if (!tensor->is_tied_copy && !u->frozen) t->num_trained += elements;
    return tensor->offset + elements;
}

/* Does a unit of this kind have this weight? Tied without a copy, the final norm is in the embedding's unit. */
static int unit_has(const TensorTable *t, const Llama3Config *c, UnitKind kind, const TensorRow *row) {
    if (kind == UNIT_ADAPTERS) return is_adapted(c, row->kind) && row->unit == kind;
    if (c->tied && row->kind == W_HEAD) return 0; // added first, or not at all
    if (c->tied && !t->part.tied_head_copy && kind == UNIT_EMBED && row->kind == W_FINAL_NORM) return 1;
    return row->unit == kind;
}

/* Appends a unit with blocks [block, block + blocks), or with the embedding or the head. Returns its number. */
static int table_add_unit(TensorTable *t, const Llama3Config *c, UnitKind kind, int block, int blocks) {
    int unit = t->num_units++;
    Unit *u = &t->units[unit];
    int64_t end = 0;
    u->kind = kind;
    u->first_tensor = t->num_tensors;
    u->first_block = block;
    u->num_blocks = blocks;
    u->frozen = c->base != BASE_TRAINED && kind != UNIT_ADAPTERS;
    for (int k = 0; k < W_KINDS; k++) u->offsets[k] = -1;
    const char *prefix = kind == UNIT_ADAPTERS ? "adapters of " : "";
    if (kind == UNIT_EMBED || kind == UNIT_HEAD)
        snprintf(u->name, sizeof u->name, "%s", kind == UNIT_EMBED ? "embedding" : "head");
    else if (blocks == 1) snprintf(u->name, sizeof u->name, "%smodel.layers.%d", prefix, block);
    else snprintf(u->name, sizeof u->name, "%smodel.layers.%d-%d", prefix, block, block + blocks - 1);
    if (c->tied && kind == UNIT_HEAD) // the copy is at the same place in its unit as the embedding
        table_add_tensor(t, c, &llama3_tensors[W_HEAD], unit, 0, 0);
    for (int l = block; l < block + blocks; l++) {
        for (int k = 0; k < W_KINDS; k++)
            if (unit_has(t, c, kind, &llama3_tensors[k]))
                end = table_add_tensor(t, c, &llama3_tensors[k], unit, l, end);
        if (l == block) u->block_stride = round_up(u->size, TENSOR_ALIGN);
    }
    if (t->part.tied_head_copy && kind == UNIT_EMBED) // as large as the head with its norm, for equal shards
        u->size = round_up(u->size, TENSOR_ALIGN) + c->C;
    if (!u->int8_blocks) u->unquantized = 0;
    return unit;
}

static int64_t block_parameters(const Llama3Config *c) {
    int64_t sum = 0;
    for (int k = 0; k < W_KINDS; k++) {
        const TensorRow *row = &llama3_tensors[k];
        if (row->unit == UNIT_BLOCK) sum += dim_size(c, row->rows) * dim_size(c, row->cols);
    }
    return sum;
}

/* How many of L blocks stage s of `stages` has; *first is the first of them. The remainder goes to the stages before
 * the last one, which also has the head; the first one, which holds the most micro-batches at a time, is the last to
 * get some. light_ends: the first and last stage have one block less than an equal share (Llama 3 paper, section
 * 3.3.2). */
static int stage_blocks(int L, int stages, int light_ends, int s, int *first) {
    int light = light_ends && stages > 1, last = stages - 1;
    int share = (L + 2 * light) / stages, remainder = (L + 2 * light) % stages;
    int larger = last - remainder; // stages [larger, last) have one block more
    *first = s * share + (s > larger ? s - larger : 0) - (light && s > 0);
    return share + (s >= larger && s < last) - (light && (s == 0 || s == last));
}

/* Appends the units of one virtual stage's blocks, or of their adapters. */
static void table_add_stage(TensorTable *t, const Llama3Config *c, UnitKind kind, const Stage *stage) {
    int end = stage->first_block + stage->num_blocks;
    for (int l = stage->first_block; l < end; l += t->blocks_per_unit)
        table_add_unit(t, c, kind, l, (int)min_i64(t->blocks_per_unit, end - l));
}

/* `wrap`: so many blocks become one unit that it has at least this many parameters, as with PyTorch's
 * size_based_auto_wrap_policy; 0: each block is one unit. */
static void table_open(TensorTable *t, const Llama3Config *c, int64_t wrap, const ModelPart *part) {
    int stages = part->pp * part->virtual_stages, adapted = c->base != BASE_TRAINED;
    memset(t, 0, sizeof *t);
    t->part = *part;
    t->wrap = wrap;
    t->blocks_per_unit = (int)min_i64(c->L, max_i64(1, (wrap + block_parameters(c) - 1) / block_parameters(c)));
    for (int v = 0; v < part->virtual_stages; v++) {
        Stage *stage = &t->stages[v];
        int number = v * part->pp + part->pp_rank;
        stage->num_blocks = stage_blocks(c->L, stages, part->light_ends, number, &stage->first_block);
        t->num_blocks += stage->num_blocks;
    }
    int most_blocks = t->num_blocks + 2; // embedding and head have fewer tensors than a block
    t->tensors = new_array(Tensor, most_blocks * (adapted ? W_KINDS : W_Q_A));
    t->units = new_array(Unit, most_blocks * (adapted ? 2 : 1));
    t->embed = part->pp_rank == 0 ? table_add_unit(t, c, UNIT_EMBED, 0, 1) : -1;
    for (int v = 0; v < part->virtual_stages; v++) {
        t->stages[v].first_unit = t->num_units;
        table_add_stage(t, c, UNIT_BLOCK, &t->stages[v]);
    }
    if (part->pp_rank < part->pp - 1) t->head = -1;
    else if (c->tied && !part->tied_head_copy) t->head = t->embed;
    else t->head = table_add_unit(t, c, UNIT_HEAD, 0, 1);
    t->first_adapters = t->num_units;
    for (int v = 0; v < part->virtual_stages && c->lora_rank; v++) table_add_stage(t, c, UNIT_ADAPTERS, &t->stages[v]);
}

static void table_close(TensorTable *t) {
    free(t->tensors);
    free(t->units);
}

// ---------------------------------------------------------------------------
// looking things up

/* The unit of a block that this rank has, and the unit of its adapters. */
static int table_block_unit(const TensorTable *t, int block) {
    const Stage *stage = t->stages;
    while (block < stage->first_block || block >= stage->first_block + stage->num_blocks) stage++;
    return stage->first_unit + (block - stage->first_block) / t->blocks_per_unit;
}
static int table_block_adapters(const TensorTable *t, int block) {
    return t->first_adapters + table_block_unit(t, block) - t->stages[0].first_unit;
}

/* Are embedding and head one unit? */
static int table_is_tied(const TensorTable *t) { return t->embed >= 0 && t->embed == t->head; }

/* Does backward overwrite this gradient? Matrices: yes, by their first matmul of a micro-batch. Norms (one row) and an
 * untied embedding: no, backward adds to their gradients, so these are zeroed first. */
static int gradient_is_assigned(const TensorTable *table, const Tensor *t) {
    WeightKind kind = t->row->kind;
    int tied_head = kind == W_EMBED && table_is_tied(table); // the head's matmul writes it before the embedding adds
    return t->row->rows != DIM_ONE && (kind != W_EMBED || tied_head);
}

/* The first adapter's number: adapters come after all other tensors. num_tensors: there are none. */
static int table_first_adapter(const TensorTable *t) {
    return t->first_adapters < t->num_units ? t->units[t->first_adapters].first_tensor : t->num_tensors;
}

static const Tensor *table_find(const TensorTable *t, const char *name) {
    for (int i = 0; i < t->num_tensors; i++)
        if (!strcmp(t->tensors[i].name, name)) return &t->tensors[i];
    return NULL;
}

/* The longest run of elements from `at` of this rank's part on that is also contiguous in the whole tensor, where it
 * begins at *whole. Returns its length. */
static int64_t tensor_run(const Tensor *t, int64_t at, int64_t *whole) {
    int64_t row = at / t->cols, col = at % t->cols;
    *whole = (t->first_row + row) * t->whole_cols + t->first_col + col;
    return t->cols == t->whole_cols ? t->rows * t->cols - at : t->cols - col;
}

/* How many of the tensor's elements are among elements [begin, end) of its unit; *first is the first of them. */
static int64_t tensor_overlap(const Tensor *tensor, int64_t begin, int64_t end, int64_t *first) {
    int64_t from = max_i64(begin, tensor->offset), to = min_i64(end, tensor->offset + tensor->rows * tensor->cols);
    *first = from - tensor->offset;
    return max_i64(0, to - from);
}

// ---------------------------------------------------------------------------
// initial weights: a function of (seed, tensor, element), so every layout starts from the same model

/* One standard normal value from 64 random bits (Box and Muller 1958). */
static float normal_of_bits(uint64_t bits) {
    float u = ((float)(uint32_t)(bits >> 40) + 1.0f) * 0x1p-24f; // (0, 1]
    float angle = (float)(uint32_t)(bits & 0xFFFFFF) * (0x1p-24f * 2 * (float)M_PI);
    return sqrtf(-2.0f * logf(u)) * cosf(angle);
}

/* The initial values of elements [first, first + count) of the whole tensor. */
static void tensor_init(float *out, const Tensor *tensor, const Llama3Config *c, uint64_t seed, int64_t first,
                        int64_t count, int threads) {
    float std = tensor->row->init == INIT_RESIDUAL ? 0.02f / sqrtf(2.0f * (float)c->L) : 0.02f;
    uint64_t key = mix64(hash_bytes(HASH_START, tensor->name, strlen(tensor->name)) + seed * 0x9E3779B97F4A7C15ull);
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = mix64(key + (uint64_t)(first + i) * 0x9E3779B97F4A7C15ull);
        switch (tensor->row->init) {
        case INIT_ONES: out[i] = 1; break;
        case INIT_ZEROS: out[i] = 0; break;
        case INIT_UNIFORM: out[i] = ((float)(bits >> 40) * 0x1p-23f - 1) / sqrtf((float)tensor->whole_cols); break;
        default: out[i] = std * normal_of_bits(bits);
        }
    }
}

#endif
