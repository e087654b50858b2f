/* replica_check.h: compares 64-bit fingerprints of the weights that several ranks hold: replicas of the sharded model,
 * or all ranks under no_shard. Silent memory corruption may show nowhere else. */
#ifndef REPLICA_CHECK_H
#define REPLICA_CHECK_H
#include "../../fsdp.h" // defines: Fsdp, sharded_bytes

#ifndef REPLICA_CHECK_STEPS
#define REPLICA_CHECK_STEPS 100 // steps between two comparisons
#endif

/* Do the ranks of this rank's group of `axis` hold the same weights? Replicas do, and the fsdp group under no_shard. */
static int is_replicated_over(const Fsdp *fsdp, Axis axis) {
    if (fsdp->comm->groups[axis].size == 1) return 0;
    return axis == AXIS_DP_REPLICATE || (axis == AXIS_FSDP && !fsdp->sharding.strategy->sharded);
}

/* Allocates if there are replicas. */
static void replica_check_open(Fsdp *fsdp) {
    int64_t units = fsdp->table->num_units;
    int copies = (is_replicated_over(fsdp, AXIS_DP_REPLICATE) ? fsdp->replicas : 0) +
                 (is_replicated_over(fsdp, AXIS_FSDP) ? fsdp->ranks : 0);
    if (!copies) return;
    fsdp->local_fingerprints = arena_array(uint64_t, fsdp->dev, MEM_WORKSPACE, "fingerprints of the weights", units);
    fsdp->fingerprints = arena_array(uint64_t, fsdp->dev, MEM_HOST, "fingerprints of all ranks", units * (1 + copies));
}

/* Ends the run if the weights of two replicas differ. */
static void fsdp_check_replicas(Fsdp *fsdp, int64_t step) {
    Comm *comm = fsdp->comm;
    int units = fsdp->table->num_units;
    uint64_t *mine = fsdp->fingerprints, *all = mine + units;
    for (int i = 0; i < units; i++) {
        const FsdpUnit *u = &fsdp->units[i];
        int frozen = u->table_unit->frozen;
        int64_t bytes = frozen ? (int64_t)sharded_bytes(fsdp, u) : u->state_count * (int64_t)sizeof(float);
        const void *weights = frozen ? (const void *)u->sharded_weights : u->master;
        fingerprint(fsdp->dev, fsdp->local_fingerprints + i, weights, bytes);
    }
    device_read(fsdp->dev, mine, fsdp->local_fingerprints, sizeof(uint64_t) * units);
    for (Axis axis = AXIS_TP; axis < AXES; axis = (Axis)(axis + 1)) {
        Group *g = &comm->groups[axis];
        if (!is_replicated_over(fsdp, axis)) continue;
        all_gather_now(comm, axis, "replica check", mine, all, sizeof(uint64_t) * units);
        for (int i = 0; i < units * g->size && !fsdp->dev->dry_run; i++)
            if (all[i] != all[i % units])
                run_failure("step %" PRId64 ": %s and %s are replicas in the %s group, but their weights of %s "
                            "differ: the memory of one of them, or the transport, is faulty",
                            step, rank_name(comm->hosts->group_member(comm, g, 0)),
                            rank_name(comm->hosts->group_member(comm, g, i / units)), axis_names[axis],
                            fsdp->table->units[i % units].name);
    }
}

#endif
