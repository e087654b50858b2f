/* trainer.h: what one rank trains with, and what is checked before and behind its first step.
 *
 * A caller may rely on: the same code allocates on a dry-run device and on a real one; after check_first_step the
 * traffic formula, the dry run and the measured traffic are equal, or the run has ended.
 */
#ifndef TRAINER_H
#define TRAINER_H
#include "../optimizer.h"        // defines: Optimizer
#include "../shared_gradients.h" // defines: SharedGradients
#include "job.h"                 // defines: Job, Options, Checkpoint, CheckpointWriter, Logger, Dataset, Loader, Tokenizer
#include "model.h"               // defines: Model, model_open
#include "parallel.h"            // defines: Parallel, sharding_of

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

typedef struct Trainer { // all that one rank trains with
    const Options *opt;
    const Llama3Config *whole_config;
    const TensorTable *whole_table; // of the whole model, without parallelism
    const Dataset *data, *val;
    const Checkpoint *resume_from;
    Model model;
    Parallel parallel;
    SharedGradients shared_gradients;
    Optimizer optimizer;
    Loader loader;
    CheckpointWriter writer;
    Logger logger;        // writes on rank 0 only
    Progress progress;    // how far the run has come; skipped steps had a gradient that was not finite
    ExactSum *sums;       // (SUMS) of the step so far, where ops add to them
    StepReport *reports;  // (world)
    RankFigures *figures; // (world) the same ranks' figures, side by side
    int64_t *samples;     // (world, accumulation, B) with --out: what the step consumes
    Request samples_told;
    int32_t *eval_inputs, *eval_targets, *eval_docs; // (B, T); documents NULL without --doc-mask
    char *eval_raw;                                  // 5·(T + 1) bytes
    double load_seconds;                             // in which all ranks had their weights
    int saves_asked;                                 // saves that signals asked for and that were done
    int writing; // by the last step's reports, a part of a checkpoint is not yet on the disk
} Trainer;

/* Allocates everything a rank needs, on a dry-run device or a real one. */
static void trainer_allocate(Trainer *trainer, const Job *j) {
    size_t tokens = sizeof(int32_t) * (size_t)j->opt.batch * (size_t)j->opt.seq,
           timeline = sizeof(Event) * (size_t)trainer->parallel.dev.max_events;
    if (j->task == DO_PLAN && timeline)
        trainer->parallel.dev.events =
            (Event *)checked_malloc(timeline); // of the dry run itself; the plan is of a run without
    else if (timeline && trainer->parallel.dev.dry_run)
        arena_alloc(&trainer->parallel.dev, MEM_HOST, "timeline", timeline);
    else if (timeline)
        trainer->parallel.dev.events = (Event *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "timeline", timeline);
    trainer->sums =
        (ExactSum *)arena_alloc(&trainer->parallel.dev, MEM_WORKSPACE, "sums of the step", sizeof(ExactSum) * SUMS);
    trainer->reports = (StepReport *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "step reports",
                                                 sizeof(StepReport) * (size_t)j->mesh.world);
    trainer->figures = (RankFigures *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "figures of all ranks",
                                                  sizeof(RankFigures) * (size_t)j->mesh.world);
    Sharding how = sharding_of(&j->opt);
    fsdp_open(&trainer->parallel.fsdp, &trainer->parallel.comm, &trainer->model.table, trainer->whole_config, &how,
              trainer->model.training);
    if (trainer->model.training) {
        shared_gradients_open(&trainer->shared_gradients, &trainer->parallel.fsdp);
        optimizer_open(&trainer->optimizer, &trainer->parallel.fsdp);
    }
    if (j->task != DO_EXPORT) {
        int T = j->opt.seq / j->mesh.size[AXIS_CP],
            cached = j->task == DO_GENERATE ? (int)j->prompt_length + j->opt.max_tokens : 0;
        Pipeline *pipeline = &trainer->parallel.pipeline;
        model_open(&trainer->model, &pipeline->schedule, j->opt.batch, T, cached);
        pipeline_open(pipeline, &trainer->parallel.comm,
                      sizeof(floatX) * (size_t)trainer->parallel.tp.tokens * (size_t)j->config.C);
    }
    trainer->model.loss_sum = &trainer->sums[SUM_LOSS];
    trainer->eval_inputs = (int32_t *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "token batches", tokens);
    trainer->eval_targets = (int32_t *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "token batches", tokens);
    if (j->opt.doc_mask)
        trainer->eval_docs = (int32_t *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "documents", tokens);
    trainer->eval_raw =
        (char *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "raw window", 5 * ((size_t)j->opt.seq + 1));
    int trains = j->task == DO_TRAIN || j->task == DO_PLAN,
        exports = j->opt.export_dir && (j->task == DO_TRAIN || j->task == DO_EXPORT);
    checkpoint_writer_open(&trainer->writer, &trainer->parallel.fsdp, trainer->whole_config, trainer->whole_table, &j->opt);
    trainer->writer.tokenizer = j->tokenizer_path[0] ? j->tokenizer_path : NULL;
    trainer->writer.base_fingerprint = j->base_fingerprint;
    if (trains && j->opt.out) checkpoint_prepare(&trainer->writer, &j->resume_from);
    if (exports) export_prepare(&trainer->writer);
    checkpoint_writer_allocate(&trainer->writer);
    if (!trainer->model.training) return;
    size_t samples = sizeof(int64_t) * (size_t)j->opt.accum * (size_t)j->opt.batch * (size_t)j->mesh.world;
    if (j->opt.out)
        trainer->samples = (int64_t *)arena_alloc(&trainer->parallel.dev, MEM_HOST, "samples of all ranks", samples);
    trainer->progress = j->resume_from.progress;
    trainer->progress.data_fingerprint = j->data.fingerprint;
    if (j->resume_from.data_changed) trainer->progress.epoch = trainer->progress.samples_in_epoch = 0;
    Sampler s = {j->data.windows,
                 (uint64_t)j->opt.seed,
                 !strcmp(j->opt.tail, "pad"),
                 trainer->parallel.mesh.size[AXIS_DP_SHARD],
                 trainer->parallel.mesh.size[AXIS_DP_REPLICATE],
                 mesh_coordinate(&trainer->parallel.mesh, trainer->parallel.rank, AXIS_DP_SHARD),
                 mesh_coordinate(&trainer->parallel.mesh, trainer->parallel.rank, AXIS_DP_REPLICATE),
                 j->opt.accum,
                 j->opt.batch,
                 how.accumulate_locally,
                 trainer->progress.step,
                 trainer->progress.epoch,
                 trainer->progress.samples_in_epoch};
    LoaderOptions options = {j->opt.seq,
                             j->opt.doc_mask,
                             trainer->parallel.mesh.size[AXIS_CP],
                             mesh_coordinate(&trainer->parallel.mesh, trainer->parallel.rank, AXIS_CP),
                             trainer->progress.step,
                             j->opt.steps,
                             j->opt.workers,
                             j->cores_per_rank};
    loader_open(&trainer->loader, &trainer->parallel.dev, &j->data, &s, &options);
}

static void trainer_close(Trainer *trainer) {
    if (trainer->model.training) loader_close(&trainer->loader, &trainer->parallel.dev);
    checkpoint_writer_close(&trainer->writer);
    if (!trainer->parallel.dev.dry_run) ops_close(&trainer->parallel.dev);
    if (trainer->parallel.dev.dry_run) free(trainer->parallel.dev.events);
    free(trainer->parallel.layout);
    free(trainer->parallel.hosts);
    pipeline_close(&trainer->parallel.pipeline);
    tp_close(&trainer->parallel.tp);
    cp_close(&trainer->parallel.cp);
    model_close(&trainer->model);
    optimizer_close(&trainer->optimizer);
    shared_gradients_close(&trainer->shared_gradients);
    fsdp_close(&trainer->parallel.fsdp);
    comm_close(&trainer->parallel.comm);
    device_close(&trainer->parallel.dev);
}

/* The schedule, tensors and configuration of `rank`; nothing is allocated on its device yet. */
static void trainer_bind(Trainer *trainer, const Job *j, int rank) {
    const Options *o = &j->opt;
    Parallel *p = &trainer->parallel;
    Model *m = &trainer->model;
    memset(trainer, 0, sizeof *trainer);
    trainer->opt = o;
    trainer->whole_config = &j->config;
    trainer->whole_table = &j->table;
    trainer->data = &j->data;
    trainer->val = &j->val;
    trainer->resume_from = &j->resume_from;
    p->mesh = j->mesh;
    p->rank = rank;
    ModelPart part = {j->mesh.size[AXIS_TP],
                      mesh_coordinate(&j->mesh, rank, AXIS_TP),
                      j->mesh.size[AXIS_PP],
                      mesh_coordinate(&j->mesh, rank, AXIS_PP),
                      o->pp_chunks,
                      o->pp_light_ends,
                      j->config.tied && (j->mesh.size[AXIS_PP] > 1 || o->deterministic)};
    schedule_open(&p->pipeline.schedule, part.pp, part.pp_rank, part.virtual_stages, o->accum);
    table_open(&m->table, &j->config, number_after_colon(o->wrap, "size"), &part);
    m->config = config_of_part(&j->config, &part);
    m->whole_config = &j->config;
    m->opt = o;
    m->training = j->task == DO_TRAIN || j->task == DO_PLAN;
    m->dev = &p->dev;
    m->comm = &p->comm;
    m->fsdp = &p->fsdp;
    m->tp = &p->tp;
    m->cp = &p->cp;
}

/* Which categories of memory live in the offloaded memory: bits by MemCategory. */
static unsigned offloaded(const Options *o) {
    unsigned optimizer = 1u << MEM_OPTIMIZER, all = optimizer | 1u << MEM_PARAMS | 1u << MEM_GRADS;
    return !strcmp(o->offload, "all") ? all : !strcmp(o->offload, "optimizer") ? optimizer : 0;
}

/* Refuses a run that needs more memory than there is, before any rank allocates. */
static void check_memory(const Job *j, const Device *dry_run) {
    int sharing = j->transport == j->host_transport ? j->local_ranks : 1; // with NCCL each rank has its own GPU
    double need = (double)device_need(dry_run) * sharing;
    if (need > j->available_memory)
        user_error("the run needs %.2f GB of memory on " DEVICE_NAME " for %d rank%s, but %.2f GB are free: use more "
                   "hosts or GPUs, a smaller --batch or --seq, --recompute full, or a smaller model (--plan lists what "
                   "needs how much)",
                   need / 1e9, sharing, sharing > 1 ? "s" : "", j->available_memory / 1e9);
    double pinned = (double)pinned_need(dry_run) * j->local_ranks, have = pinned_memory();
    if (pinned > have)
        user_error("the run needs %.2f GB of pinned memory on this host for %d rank%s, but %.2f GB are free: use more "
                   "hosts, or offload less",
                   pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", have / 1e9);
}

/* All ranks must have been started with the same options, data and checkpoint. */
static void check_agreement(Trainer *trainer) {
    char *text;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    options_write(trainer->opt, f);
    fclose(f);
    uint64_t mine = hash_bytes(hash_bytes(HASH_START, text, length), &trainer->data->fingerprint,
                               sizeof trainer->data->fingerprint) ^
                    trainer->resume_from->fingerprint;
    uint64_t *all = (uint64_t *)checked_malloc(sizeof mine * (size_t)trainer->parallel.mesh.world);
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "options and data", &mine, all, sizeof mine);
    for (int i = 1; i < trainer->parallel.mesh.world; i++)
        if (all[i] != all[0])
            user_error("rank %d was started with different options, data or checkpoint than rank 0: start all ranks "
                       "with the same command and the same files",
                       i);
    free(all);
    free(text);
}

/* Compares expected, dry-run and measured traffic, and dry-run and measured memory, after the first step of every rank.
 */
static void check_first_step(Trainer *trainer, const Trainer *dry_run) {
    const Parallel *p = &trainer->parallel, *dry = &dry_run->parallel;
    Ledger l = ZERO;
    expected_traffic(l.expected, trainer->whole_config, p->mesh.world, p->rank, trainer->opt, sizeof(StepReport));
    memcpy(l.dry_run, dry->comm.traffic_started, sizeof l.dry_run);
    memcpy(l.measured, p->comm.wire, sizeof l.measured);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        l.dry_run_memory[c] = dry->dev.arenas[c].peak;
        l.measured_memory[c] = p->dev.arenas[c].peak;
    }
    if (trainer->parallel.rank == 0 && trainer->opt->out) {
        FILE *f = logger_create(trainer->opt->out, "ledger.json");
        ledger_write(&l, &dry_run->parallel.dev, f);
        fclose(f);
    }
    ledger_check(&l, trainer->parallel.rank);
}

#endif
