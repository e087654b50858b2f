/* merge.h: gathers the units of a frozen model with the adapters' update added to its weights (--merge). */
#ifndef MERGE_H
#define MERGE_H
#include "../../run/checkpoint/sharded_state.h" // defines: gather_trained, fsdp_release_state

/* Adds alpha / r · B A to the weights (padded) of a unit of blocks. */
static void merge_adapters(Fsdp *fsdp, const FsdpUnit *u, float *weights) {
    const TensorTable *table = fsdp->table;
    const Llama3Config *c = fsdp->config;
    const Unit *unit = u->table_unit;
    FsdpUnit *adapters = &fsdp->units[table_block_adapters(table, unit->first_block)];
    const float *gathered = gather_trained(fsdp, adapters, STATE_MASTER);
    for (int i = unit->first_tensor; i < unit->end_tensor; i++) {
        const Tensor *w = &table->tensors[i];
        WeightKind kind = w->row->kind;
        if (!is_adapted(c, kind)) continue;
        int64_t block = (w->offset - unit->offsets[kind]) / unit->block_stride; // within the unit
        const float *of_block = gathered + block * adapters->table_unit->block_stride;
        adapter_merge(fsdp->dev, weights + w->offset, of_block + adapters->table_unit->offsets[lora_a(kind)],
                      of_block + adapters->table_unit->offsets[lora_b(kind)], adapter_scale(c), c->lora_rank, w->cols,
                      w->rows);
    }
    fsdp_release_state(fsdp, gathered);
}

/* gather_trained for any unit. Of a frozen one: its weights in fp32, with its adapters merged in. */
static const float *gather_merged(Fsdp *fsdp, FsdpUnit *u, StateKind kind) {
    if (!u->table_unit->frozen) return gather_trained(fsdp, u, kind);
    float *whole = (float *)pool_take(fsdp, POOL_GRADIENTS, u);
    tree_sum(fsdp->dev, whole, fsdp_unshard(fsdp, u), FLOATX, 1, u->padded, 0); // converts to fp32
    fsdp_reshard(fsdp, u, AFTER_LAST_USE);
    if (u->table_unit->kind == UNIT_BLOCK && fsdp->config->lora_rank) merge_adapters(fsdp, u, whole);
    return whole;
}

#endif
