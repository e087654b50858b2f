/* parallel.h: everything of a rank that depends on the layout: its place in the mesh, its device, its communicators,
 * its shards of the model, and its part in tensor, context and pipeline parallelism.
 */
#ifndef PARALLEL_H
#define PARALLEL_H
#include "../fsdp.h"              // defines: Fsdp, Comm, Mesh, Device
#include "../context_parallel.h"  // defines: ContextParallel
#include "../pipeline_parallel.h" // defines: Pipeline
#include "../tensor_parallel.h"   // defines: TensorParallel
#include "options.h"              // defines: Options

typedef struct {
    Mesh mesh;
    int rank;
    Device dev;
    Comm comm;
    Fsdp fsdp;
    TensorParallel tp;
    ContextParallel cp;
    Pipeline pipeline;
    int *layout; // (world, AXES) the first member of each rank's groups, as the communicators report it
} Parallel;

static int asks_nccl(const Options *o) { return o->transport && !strcmp(o->transport, "nccl"); }

/* Does the transport sum gradients while it reduces them? NCCL does, in an order of its own. */
static int transport_sums(const Options *o) { return asks_nccl(o) && !o->deterministic; }

/* How the options shard the model. */
static Sharding sharding_of(const Options *o) {
    Sharding s = ZERO;
    s.strategy = strategy_find(o->sharding);
    s.slots = o->slots;
    s.micro_batches = o->accum;
    s.accumulate_locally = !strcmp(o->accumulate, "local");
    s.deterministic = o->deterministic;
    s.check_replicas = 1;
    s.writes_files = o->out != NULL;
    s.reduce_dtype = strcmp(o->reduce_dtype, "bf16") ? DTYPE_F32 : DTYPE_BF16;
    s.transport_sums = transport_sums(o);
    return s;
}

#endif
