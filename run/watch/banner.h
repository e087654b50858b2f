/* banner.h: what a run prints before its first step: notes about its inputs; model, weights, ranks, memory, groups and
 * data. */
#ifndef BANNER_H
#define BANNER_H
#include "../setup/job.h"     // defines: Job, job_runs
#include "../checks/layout.h" // defines: layout_print

/* "1,234,567" */
static const char *with_commas(char text[32], int64_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%" PRId64, n), used = 0;
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0) text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = 0;
    return text;
}

/* Rank 0 says what of the inputs has no effect, or another one than may be expected. */
static void note_inputs(const Job *j) {
    const RunSettings *run = &j->run;
    const Dataset *sets[] = {&j->data, &j->val};
    if (j->weights.ignores_index)
        fprintf(stderr,
                "note: %s/model.safetensors.index.json names other files; they are not read, because there is "
                "a model.safetensors\n",
                run->model);
    for (int s = 0, noted = 0; s < 2; s++)
        for (int i = 0; i < sets[s]->num_files && j->tokenizer.count && !noted; i++) {
            noted = token_file_lacks_tokenizer(&sets[s]->files[i]);
            if (noted)
                fprintf(stderr, "note: %s does not say with which tokenizer it was made; %s is taken for it\n",
                        sets[s]->files[i].path, j->tokenizer.path);
        }
    if (!job_runs(j)) return;
    if (j->dropout > 0)
        fprintf(stderr, "note: %s/adapter_config.json has \"lora_dropout\" %g; this program trains without dropout\n",
                run->adapters, j->dropout);
    if (!run->recipe && run->steps < run->warmup)
        fprintf(stderr, "note: with --warmup %d and --steps %d the learning rate never reaches --lr %g\n", run->warmup,
                run->steps, run->lr);
}

static const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

/* The GPUs of rank 0's host that compute: "GPUs: 8 x NVIDIA H200". If a launcher shows each rank a GPU of its own, all
 * of them are taken to be like rank 0's. */
static void print_gpus(const Job *j) {
    char name[256], next[256];
    if (!CUDA_BUILD) return;
    int count = uses_nccl(j) ? j->local_ranks : 1, visible = device_count(), alike = 0;
    printf("GPU%s", plural(count));
    if (run_hosts.count > 1) printf(" of host %s", host_of_rank(0)->name);
    for (int i = 0; i < count; i += alike) {
        device_model(i % visible, name, sizeof name);
        for (alike = 1; i + alike < count; alike++) {
            device_model((i + alike) % visible, next, sizeof next);
            if (strcmp(next, name)) break;
        }
        printf("%s %d x %s", i ? "," : ":", alike, name);
    }
    if (j->local_ranks > count) printf(", shared by %d ranks", j->local_ranks);
    printf("\n");
}

static void print_ranks(const Job *j, const Fsdp *fsdp, const Device *dry_run, const int *layout, double nccl_need) {
    size_t offloaded = device_arenas(dry_run, 1);
    printf("ranks: %d x %d thread%s%s over %s, %s over %d", j->mesh.world, j->threads_per_rank,
           plural(j->threads_per_rank), j->threads_of_environment ? " (OMP_NUM_THREADS)" : "", j->transport->name,
           strategies[j->run.sharding].name, fsdp->ranks);
    if (fsdp->replicas > 1) printf(", %d replicas", fsdp->replicas);
    printf("\n");
    print_gpus(j);
    printf("memory per rank: %.1f MB", (double)device_peak(dry_run) / 1e6);
    if (offloaded) printf(" and %.1f MB " OFFLOAD_PLACE, (double)offloaded / 1e6);
    if (offloaded && OFFLOAD_IN_PLACE && is_in_memory(j->run.out))
        printf(", which is memory, too: --out is on a tmpfs; choose a directory on a disk");
    printf("\n");
    layout_print(&j->mesh, layout, stdout);
    double library = fsdp->comm->library_memory;
    if (library > 0)
        printf("NCCL allocated another %.1f MB on rank 0's GPU (expected: at most %.1f MB)\n", library / 1e6,
               nccl_need / 1e6);
}

/* The data, the sources of a mixture, and how often the run will have gone through each of them at its last step. */
static void print_data(const Job *j, const Loader *loader) {
    const RunSettings *run = &j->run;
    const Dataset *data = &j->data;
    int64_t epoch, end = sampler_position(&loader->sampler, period_end_step(j), &epoch) / data->pieces;
    char samples[32];
    printf("data: %s samples of %d tokens; a step takes %d data rank%s x %d micro-batch%s x %d = %" PRId64
           "; %d loader worker%s per rank\n",
           with_commas(samples, dataset_samples(data)), run->seq, mesh_data_ranks(&j->mesh),
           plural(mesh_data_ranks(&j->mesh)), run->accum, run->accum == 1 ? "" : "es", run->batch,
           sampler_global_batch(&loader->sampler), loader->num_workers, plural(loader->num_workers));
    for (int k = 0; data->mixture && k < data->num_sources; k++)
        printf("  %.4g %% from %s: %d file%s, %s samples; %.2f epochs by step %" PRId64 "\n",
               100 * source_share(data, k), data->sources[k].pattern, data->sources[k].num_files,
               plural(data->sources[k].num_files), with_commas(samples, data->sources[k].windows * data->pieces),
               (double)source_windows_used(data, k, end) / (double)data->sources[k].windows, period_end_step(j));
}

/* A period of a recipe: "stage 2 of 3 (long context): steps 1001 to 1500, 2.1e+09 tokens, …". */
static void print_period(const Job *j) {
    const Recipe *r = &j->recipe;
    const RecipePeriod *p = j->period;
    char tokens[32], frozen[1024];
    if (!r->path) return;
    printf("stage %d of %d%s%s%s: steps %" PRId64 " to %" PRId64 ", %s tokens; %" PRId64 " sequences of %d tokens a "
           "step; lr %s, %g to %g at its end\n",
           (int)(p - r->periods) + 1, r->count, p->name[0] ? " (" : "", p->name, p->name[0] ? ")" : "",
           p->first_step + 1, period_end_step(j), with_commas(tokens, p->tokens), period_batch(p, &j->mesh), j->run.seq,
           rate_shape_names[j->run.lr_schedule], learning_rate_at(&p->rate, p->first_step + 1),
           learning_rate_at(&p->rate, period_end_step(j)));
    if (p->num_frozen) printf("frozen: %s\n", period_frozen(p, frozen, sizeof frozen));
    if (j->problem) printf("this stage does not fit the layout: %s\n", j->problem);
}

/* `dry_run`, `nccl_need`: the rank's dry run, and the bytes that NCCL was expected to allocate. `layout`: see
 * layout_read_back. `load_seconds`: from the start of loading until all ranks had their weights. */
static void print_banner(const Job *j, const Fsdp *fsdp, const Device *dry_run, const int *layout, const Loader *loader,
                         double nccl_need, double load_seconds) {
    const Checkpoint *from = &j->resume_from;
    char step[32], samples[32];
    flockfile(stdout); // keeps the lines together, in case another rank ends the run with an error now
    print_period(j);
    if (!j->previous_period) {
        printf("model: %s, %.1f M parameters, %s\n", j->run.model, (double)j->table.num_parameters / 1e6,
               PRECISION_NAME);
        if (j->has_weights) printf("weights: read from %s\n", j->run.model);
        else if (from->dir[0]) printf("weights: read from the checkpoint\n");
        else printf("weights: random initialization (seed %d)\n", j->run.seed);
    }
    print_ranks(j, fsdp, dry_run, layout, nccl_need);
    if (job_runs(j)) print_data(j, loader);
    if (from->dir[0]) {
        printf("resumed from %s in %.2f s (step %s, %s samples)", from->dir, load_seconds,
               with_commas(step, from->progress.step), with_commas(samples, from->progress.samples));
        if (from->changes) printf("; changed since then: %s", from->changes);
        printf("\n");
    }
    fflush(stdout);
    funlockfile(stdout);
}

#endif
