/* memory_check.h: refuses a run that needs more memory than there is, before any rank allocates. A dry run of the
 * rank has counted what it needs.
 */
#ifndef MEMORY_CHECK_H
#define MEMORY_CHECK_H
#include "../setup/job.h" // defines: Job, uses_nccl, transport_sums

/* Bytes that NCCL allocates on a rank's GPU. */
static double nccl_need(const Job *j, const Comm *dry_run) {
    return nccl_memory(&dry_run->mesh, dry_run->traffic_started, dry_run->dev->reductions_apart,
                       transport_sums(&j->run));
}

/* Bytes that all ranks on a device need of it, if each needs what this dry run needed. With NCCL a rank has a GPU of
 * its own, on which NCCL allocates, too. */
static double need_of_device(const Job *j, const Comm *dry_run) {
    double of_rank = (double)device_need(dry_run->dev);
    return uses_nccl(j) ? of_rank + nccl_need(j, dry_run) : of_rank * j->local_ranks;
}

static void check_memory(const Job *j, const Comm *dry_run) {
    double need = need_of_device(j, dry_run), have = j->available_memory, total = j->total_memory;
    char needs[256];
    if (uses_nccl(j)) {
        have = device_memory_with_total(dry_run->dev->gpu, &total);
        snprintf(needs, sizeof needs, "%s needs %.2f GB of memory on its GPU %d, %.2f GB of them for NCCL",
                 rank_name(dry_run->rank), need / 1e9, dry_run->dev->gpu, nccl_need(j, dry_run) / 1e9);
    } else {
        snprintf(needs, sizeof needs, "the run needs %.2f GB of memory on " DEVICE_NAME " for %d rank%s", need / 1e9,
                 j->local_ranks, j->local_ranks > 1 ? "s" : "");
    }
    char of_total[32] = "";
    if (have < total) snprintf(of_total, sizeof of_total, " of %.2f GB", total / 1e9);
    if (need > have)
        user_error("%s, but %.2f GB%s are free: %suse more hosts or GPUs, a smaller --batch, --seq or --logit-rows, "
                   "--recompute full, or a smaller model (plan_llama3 lists what needs how much)",
                   needs, have / 1e9, of_total,
                   need <= total ? "end other processes on the GPU (nvidia-smi lists them), or " : "");
    double pinned = (double)pinned_need(dry_run->dev) * j->local_ranks, pinnable = pinned_memory();
    if (pinned > pinnable)
        user_error("the run needs %.2f GB of pinned memory on this host for %d rank%s, but %.2f GB are free: use more "
                   "hosts, or offload less",
                   pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", pinnable / 1e9);
}

#endif
