/* shards.c PRESET TP PP FSDP REPLICAS BLOCK NAME: of the fsdp ranks of one tensor-parallel rank, prints how many keep
 * the fp32 master weights of some elements of a block's tensor; then how many elements its unit has, where the tensor
 * begins in it, and how many elements it has. */
#include "fsdp.h"

int main(int argc, char **argv) {
    if (argc != 8) return 1;
    const Llama3Config *config = preset_find(argv[1]);
    int tp = atoi(argv[2]), pp = atoi(argv[3]), ranks = atoi(argv[4]), block = atoi(argv[6]), holders = 0;
    Device dev;
    TensorTable table = ZERO;
    device_open_dry_run(&dev, 1, 0);
    for (int stage = 0; stage < pp && config; stage++) {
        ModelPart part = {tp, 0, pp, stage, 1, 0, 0};
        table_open(&table, config, 0, &part);
        if (block >= table.stages[0].first_block && block < table.stages[0].first_block + table.num_blocks) break;
        table_close(&table);
    }
    char name[128];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", block, argv[7]);
    for (int i = 0; i < table.num_tensors; i++) {
        const Tensor *t = &table.tensors[i];
        if (strcmp(t->name, name)) continue;
        FsdpUnit unit = ZERO;
        for (int rank = 0; rank < ranks; rank++) {
            Fsdp fsdp = ZERO;
            int64_t first;
            fsdp.dev = &dev;
            fsdp.config = config;
            fsdp.sharding.strategy = &strategies[SHARD_GRAD_OP];
            fsdp.ranks = ranks;
            fsdp.rank = rank;
            fsdp.replicas = atoi(argv[5]);
            unit_open(&fsdp, &unit, &table.units[t->unit], 0);
            holders += tensor_overlap(t, unit.state_begin, unit.state_begin + unit.state_count, &first) > 0;
        }
        printf("%d %" PRId64 " %" PRId64 " %" PRId64 "\n", holders, unit.padded, t->offset, t->rows * t->cols);
        return 0;
    }
    return 1;
}
