/* weights.h: the weights of a block and of the head by name, as the FSDP units hold them.
 *
 * A unit is one flat buffer with the tensors of a block (or several). Here its offsets become pointers with names:
 * block_weights waits until the block is unsharded and returns where each matrix lies, with its adapters and, for
 * backward, with the places of their gradients. Pointers to weights are valid until the unit is resharded, pointers to
 * gradients until fsdp_reduce_gradients.
 */
#ifndef WEIGHTS_H
#define WEIGHTS_H
#include "../lora.h" // defines: Linear, Adapter
#include "model.h"   // defines: Model, Fsdp, TensorTable

/* Shapes are those of this rank: with tensor parallelism NH, NKV, F and V are its share. Gradients are fp32, NULL for a
 * frozen weight and in forward. */
typedef struct {
    const floatX *attn_norm; // (C)
    Linear qkv;              // (QKV, C) queries, keys and values, fused into one matmul
    Linear o;                // (C, NH·HD)
    const floatX *mlp_norm;  // (C)
    Linear gate_up;          // (2F, C) gate and up, fused
    Linear down;             // (C, F)
    float *d_attn_norm;      // (C) backward adds to it
    float *d_mlp_norm;       // (C) backward adds to it
} BlockWeights;

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
static UnitTensors unit_tensors(Model *m, int unit, int block, int micro_batch) {
    FsdpUnit *u = fsdp_unit(m, unit);
    int64_t first = block * u->table_unit->block_stride;
    UnitTensors t = {fsdp_unshard(m->fsdp, u) + first, NULL, u->table_unit->offsets, 0};
    if (micro_batch != NO_GRADIENTS && !u->table_unit->frozen) {
        t.gradients = fsdp_gradients(m->fsdp, u, micro_batch) + first;
        t.accumulates = u->gradient_accumulates;
    }
    return t;
}
static const floatX *weight_of(const UnitTensors *t, WeightKind kind) { return t->weights + t->offsets[kind]; }
static float *gradient_of(const UnitTensors *t, WeightKind kind) {
    return t->gradients ? t->gradients + t->offsets[kind] : NULL;
}

/* A matrix and those that are fused to it, as one layer with their adapters. */
static Linear linear_layer(const Llama3Config *c, const UnitTensors *block, const UnitTensors *adapters,
                           WeightKind first) {
    Linear layer = ZERO;
    layer.w = weight_of(block, first);
    layer.d_w = gradient_of(block, first);
    layer.accumulates = block->accumulates || adapters->accumulates; // only one of the two is trained
    layer.IC = (int)dim_size(c, llama3_tensors[first].cols);
    for (int k = first; k == (int)first || llama3_tensors[k].fused; k++) {
        WeightKind kind = (WeightKind)k;
        int outputs = (int)dim_size(c, llama3_tensors[kind].rows);
        if (is_adapted(c, kind)) {
            Adapter *adapter = &layer.adapters[layer.num_adapters++];
            adapter->a = weight_of(adapters, lora_a(kind));
            adapter->b = weight_of(adapters, lora_b(kind));
            adapter->d_a = gradient_of(adapters, lora_a(kind));
            adapter->d_b = gradient_of(adapters, lora_b(kind));
            adapter->column = layer.OC;
            adapter->target = lora_target(kind);
            adapter->outputs = outputs;
        }
        layer.OC += outputs;
    }
    return layer;
}

/* The weights of block l, with gradients for `micro_batch` unless it is NO_GRADIENTS. */
static BlockWeights block_weights(Model *m, int l, int micro_batch) {
    const TensorTable *table = &m->table;
    const Llama3Config *c = &m->config;
    int in_unit = table_block_in_unit(table, l);
    UnitTensors block = unit_tensors(m, table_block_unit(table, l), in_unit, micro_batch), adapters = ZERO;
    if (c->lora_rank) adapters = unit_tensors(m, table_block_adapters(table, l), in_unit, micro_batch);
    BlockWeights w = ZERO;
    w.attn_norm = weight_of(&block, W_ATTN_NORM);
    w.qkv = linear_layer(c, &block, &adapters, W_Q);
    w.o = linear_layer(c, &block, &adapters, W_O);
    w.mlp_norm = weight_of(&block, W_MLP_NORM);
    w.gate_up = linear_layer(c, &block, &adapters, W_GATE);
    w.down = linear_layer(c, &block, &adapters, W_DOWN);
    w.d_attn_norm = gradient_of(&block, W_ATTN_NORM);
    w.d_mlp_norm = gradient_of(&block, W_MLP_NORM);
    return w;
}

static HeadWeights head_weights(Model *m, int micro_batch) {
    UnitTensors t = unit_tensors(m, m->table.head, 0, micro_batch);
    WeightKind head = table_is_tied(&m->table) ? W_EMBED : W_HEAD;
    HeadWeights w = {weight_of(&t, W_FINAL_NORM), weight_of(&t, head), gradient_of(&t, W_FINAL_NORM),
                     gradient_of(&t, head), t.accumulates};
    return w;
}

// ---------------------------------------------------------------------------
// units of blocks, with their adapters

/* The adapters of a unit of blocks; NULL: there are none. */
static FsdpUnit *adapters_of(Model *m, int unit) {
    int block = m->table.units[unit].first_block;
    return m->config.lora_rank ? fsdp_unit(m, table_block_adapters(&m->table, block)) : NULL;
}

/* Starts to unshard a unit of blocks and its adapters. */
static void blocks_prefetch(Model *m, int unit) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_prefetch(m->fsdp, fsdp_unit(m, unit));
    if (adapters) fsdp_prefetch(m->fsdp, adapters);
}
static void blocks_reshard(Model *m, int unit, ReshardPoint now) {
    FsdpUnit *adapters = adapters_of(m, unit);
    fsdp_reshard(m->fsdp, fsdp_unit(m, unit), now);
    if (adapters) fsdp_reshard(m->fsdp, adapters, now);
}

#endif
