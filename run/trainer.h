/* trainer.h: everything that one rank trains with, and the checks before and after its first step.
 *
 * A Trainer is bound to its rank (trainer_bind), then allocated on a dry-run device or on a real one by the same code
 * (trainer_allocate). A caller may rely on: after check_first_step the expected, dry-run and measured traffic are
 * equal, or the run has ended.
 */
#ifndef TRAINER_H
#define TRAINER_H
#include "../optimizer.h"      // defines: Optimizer
#include "checkpoint_writer.h" // defines: CheckpointWriter
#include "agreement.h"         // defines: check_agreement, check_shared_out
#include "shared_gradients.h"  // defines: SharedGradients
#include "ledger.h"            // defines: Ledger, ledger_check, expected_traffic
#include "layout.h"            // defines: layout_read_back
#include "job.h"               // defines: Job, Options, Checkpoint, CheckpointWriter, Logger, Loader
#include "model.h"             // defines: Model, model_open
#include "parallel.h"          // defines: Parallel, sharding_of
#include "step_report.h"       // defines: StepReports, StepReport

/* What a stage of a recipe hands to the next one. */
typedef struct {
    StateArenas state; // weights and moments
    Progress progress;
    int save_signals_seen, noted_lost_lines;
    int64_t saved; // see logger_open
} StageResult;

typedef struct Trainer {
    const Job *job;                // options, configuration and data, which all ranks of a process share
    const struct Trainer *dry_run; // this rank's dry run; NULL: this is the dry run
    Model model;
    Parallel parallel;
    SharedGradients shared_gradients;
    Optimizer optimizer;
    Loader loader;
    CheckpointWriter writer;
    Logger logger;        // writes on rank 0 only
    Progress progress;    // steps, samples, updates and skipped updates so far
    int noted_lost_lines; // rank 0 has said that standard output cannot be written

    StepReports reports;           // what the ranks tell each other at the end of a step
    int64_t saved_by_stage_before; // see logger_open
    int is_checked;                // traffic and memory of a step were compared with those of the dry run

    // evaluation
    StepBatch eval_batch; // one micro-batch
    char *eval_raw;       // (window_bytes) scratch space for reading a window

    double load_seconds; // from the start of loading to the moment when all ranks had their weights
} Trainer;

// ---------------------------------------------------------------------------
// allocation

static void timeline_open(Device *dev, const Job *j) {
    if (!dev->max_events) return;
    if (j->purpose.plans) { // not part of the planned memory
        dev->events = new_array(Event, dev->max_events);
        return;
    }
    Event *events = arena_array(Event, dev, MEM_HOST, "timeline", dev->max_events);
    if (!dev->dry_run) dev->events = events;
}

static void checkpoints_open(Trainer *trainer) {
    const Job *j = trainer->job;
    CheckpointWriter *w = &trainer->writer;
    checkpoint_writer_open(w, &trainer->parallel.fsdp, &j->table, &j->opt);
    w->recipe = &j->recipe;
    w->tokenizer = &j->tokenizer_files;
    w->base_model = j->base_model;
    w->base_fingerprint = j->base_fingerprint;
    if (job_trains(j) && j->opt.out) checkpoint_prepare(w, &j->resume_from);
    if (j->purpose.files) j->purpose.files(w, j);
    checkpoint_writer_allocate(w);
}

/* The data loader begins where the stage begins, or where the checkpoint ended. */
static void data_open(Trainer *trainer) {
    const Job *j = trainer->job;
    const Options *o = &j->opt;
    const Mesh *mesh = &trainer->parallel.mesh;
    Sampler s = job_sampler(j, trainer->parallel.rank);
    LoaderOptions options = ZERO;
    trainer->progress = j->start;
    outliers_continue(&trainer->progress.outliers, o->outlier_window);
    options.T = o->seq;
    options.document_ids = o->doc_mask;
    options.cp = mesh->size[AXIS_CP];
    options.cp_rank = mesh_coordinate(mesh, trainer->parallel.rank, AXIS_CP);
    options.first_step = j->start.step;
    options.end_step = stage_end_step(j);
    options.workers = o->workers;
    options.cores = j->cores_per_rank;
    loader_open(&trainer->loader, &trainer->parallel.dev, &j->data, &s, &options);
}

/* Allocates everything that this rank needs, on a dry-run device or a real one. */
static void trainer_allocate(Trainer *trainer) {
    const Job *j = trainer->job;
    const Options *o = &j->opt;
    Model *m = &trainer->model;
    Parallel *p = &trainer->parallel;
    Device *dev = &p->dev;
    timeline_open(dev, j);
    step_reports_open(&trainer->reports, &p->comm, o->z_loss > 0);
    Sharding sharding = sharding_of(o);
    sharding.writes_files |= j->purpose.files != NULL;
    sharding.merges_adapters = j->purpose.merges_adapters;
    if (job_streams_weights(j)) fsdp_bind(&p->fsdp, &p->comm, &m->table, &j->config, &sharding);
    else fsdp_open(&p->fsdp, &p->comm, &m->table, &j->config, &sharding, m->training);
    if (m->training) {
        shared_gradients_open(&trainer->shared_gradients, &p->fsdp);
        optimizer_open(&trainer->optimizer, &p->fsdp, (float)o->muon_momentum);
    }
    m->loss_sum = &trainer->reports.sums[SUM_LOSS];
    if (o->z_loss > 0 && m->training) m->z_loss_sum = &trainer->reports.sums[SUM_Z_LOSS];
    if (!j->purpose.converts) {
        model_open(m, &p->pipeline.schedule, o->batch, o->seq / j->mesh.size[AXIS_CP], j->purpose.cached_positions);
        pipeline_open(&p->pipeline, &p->comm, (int64_t)p->tp.tokens * m->config.C);
    }
    int cp = j->mesh.size[AXIS_CP];
    step_batch_open(&trainer->eval_batch, dev, o->batch, o->seq, cp, o->doc_mask);
    trainer->eval_raw = arena_array(char, dev, MEM_HOST, "raw window", window_bytes(o->seq, cp));
    checkpoints_open(trainer);
    if (!m->training) return;
    if (o->out || o->outlier_window) step_reports_name_samples(&trainer->reports, (int64_t)o->accum * o->batch);
    data_open(trainer);
}

static void trainer_close(Trainer *trainer) {
    Parallel *p = &trainer->parallel;
    logger_free(&trainer->logger);
    if (trainer->model.training) loader_close(&trainer->loader, &p->dev);
    device_destroy_event(trainer->eval_batch.fed);
    checkpoint_writer_close(&trainer->writer);
    if (!p->dev.dry_run) ops_close(&p->dev);
    if (p->dev.dry_run) free(p->dev.events);
    free(p->layout);
    pipeline_close(&p->pipeline);
    tp_close(&p->tp);
    cp_close(&p->cp);
    model_close(&trainer->model);
    shared_gradients_close(&trainer->shared_gradients);
    optimizer_close(&trainer->optimizer);
    fsdp_close(&p->fsdp);
    comm_close(&p->comm);
    device_close(&p->dev);
}

/* The schedule, tensors and configuration of `rank`; nothing is allocated on its device yet. */
static void trainer_bind(Trainer *trainer, const Job *j, int rank) {
    const Options *o = &j->opt;
    Parallel *p = &trainer->parallel;
    Model *m = &trainer->model;
    memset(trainer, 0, sizeof *trainer);
    trainer->job = j;
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
    table_freeze(&m->table, &j->recipe, j->stage);
    m->config = config_of_part(&j->config, &part);
    m->whole_config = &j->config;
    m->opt = o;
    m->training = job_trains(j);
    m->softmax_statistics = j->purpose.softmax_statistics;
    m->dev = &p->dev;
    m->fsdp = &p->fsdp;
    m->tp = &p->tp;
    m->cp = &p->cp;
}

// ---------------------------------------------------------------------------
// checks

/* The categories of memory that are offloaded, as bits by MemCategory. */
static unsigned offloaded(const Options *o) {
    unsigned optimizer = 1u << MEM_OPTIMIZER, all = optimizer | 1u << MEM_PARAMS | 1u << MEM_GRADS;
    if (!strcmp(o->offload, "all")) return all;
    return !strcmp(o->offload, "optimizer") ? optimizer : 0;
}

/* Bytes that NCCL allocates on a rank's GPU. */
static double nccl_need(const Job *j, const Parallel *dry) {
    return nccl_memory(&dry->mesh, dry->comm.traffic_started, dry->dev.reductions_apart, transport_sums(&j->opt));
}

/* Bytes that all ranks on a device need of it, if each needs what this dry run needed. With NCCL a rank has a GPU of
 * its own, on which NCCL allocates, too. */
static double need_of_device(const Job *j, const Parallel *dry) {
    double of_rank = (double)device_need(&dry->dev);
    return uses_nccl(j) ? of_rank + nccl_need(j, dry) : of_rank * j->local_ranks;
}

/* Refuses a run that needs more memory than there is, before any rank allocates. */
static void check_memory(const Job *j, const Parallel *dry) {
    double need = need_of_device(j, dry), have = j->available_memory, total = j->total_memory;
    char needs[256];
    if (uses_nccl(j)) {
        have = device_memory_with_total(dry->dev.gpu, &total);
        snprintf(needs, sizeof needs, "%s needs %.2f GB of memory on its GPU %d, %.2f GB of them for NCCL",
                 rank_name(dry->rank), need / 1e9, dry->dev.gpu, nccl_need(j, dry) / 1e9);
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
    double pinned = (double)pinned_need(&dry->dev) * j->local_ranks, pinnable = pinned_memory();
    if (pinned > pinnable)
        user_error("the run needs %.2f GB of pinned memory on this host for %d rank%s, but %.2f GB are free: use more "
                   "hosts, or offload less",
                   pinned / 1e9, j->local_ranks, j->local_ranks > 1 ? "s" : "", pinnable / 1e9);
}

/* Compares expected, dry-run and measured traffic, and dry-run and measured memory, after the first step that has
 * updated the weights: the update of Muon communicates, too. */
static void check_first_step(Trainer *trainer) {
    const Parallel *p = &trainer->parallel, *dry = &trainer->dry_run->parallel;
    const Options *o = &trainer->job->opt;
    Ledger l = ZERO;
    expected_traffic(l.traffic[EXPECTED], &trainer->job->config, p->mesh.world, p->rank, o, sizeof(StepReport));
    memcpy(l.traffic[DRY_RUN], dry->comm.traffic_started, sizeof l.traffic[DRY_RUN]);
    memcpy(l.traffic[MEASURED], p->comm.traffic_measured, sizeof l.traffic[MEASURED]);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        l.dry_run_memory[c] = dry->dev.arenas[c].peak;
        l.measured_memory[c] = p->dev.arenas[c].peak;
    }
    if (p->rank == 0 && o->out) {
        FILE *f = logger_create(o->out, "ledger.json");
        ledger_write(&l, &dry->dev, f);
        fclose(f);
    }
    ledger_check(&l, p->rank);
    trainer->is_checked = 1;
}

// ---------------------------------------------------------------------------
// start

/* Takes over what the stage before has left. */
static void trainer_continue(Trainer *trainer, const StageResult *before) {
    fsdp_refresh_copies(&trainer->parallel.fsdp);
    trainer->progress.updates = before->progress.updates;
    trainer->progress.skips = before->progress.skips;
    trainer->progress.samples = before->progress.samples;
    trainer->progress.tokens = before->progress.tokens;
    trainer->progress.outliers = before->progress.outliers;
    trainer->reports.save_signals_seen = before->save_signals_seen;
    trainer->noted_lost_lines = before->noted_lost_lines;
    trainer->saved_by_stage_before = before->saved;
}

/* Ends a stage, but for what the next one continues with. */
static StageResult trainer_end_stage(Trainer *trainer) {
    StageResult result = ZERO;
    device_synchronize_all(&trainer->parallel.dev);
    result.state = device_take_state(&trainer->parallel.dev);
    result.progress = trainer->progress;
    result.save_signals_seen = trainer->reports.save_signals_seen;
    result.noted_lost_lines = trainer->noted_lost_lines;
    result.saved = trainer->logger.saved;
    trainer_close(trainer);
    return result;
}

/* Opens what was dry-run before: the device, the communicators, and the weights in their shards. `before`: the stage
 * whose weights and moments it continues with; NULL: none. */
static void trainer_open(Trainer *trainer, const Trainer *dry_run, Job *j, int rank, const StageResult *before) {
    const Options *o = &j->opt;
    Parallel *p = &trainer->parallel;
    trainer_bind(trainer, j, rank);
    trainer->dry_run = dry_run;
    if (OFFLOAD_IN_PLACE && offloaded(o)) make_directories(o->out); // by each rank: hosts may not share the directory
    device_open_with_state(&p->dev, &dry_run->parallel.dev, o->out, rank, before ? &before->state : NULL);
    ops_open(&p->dev, rank == 0);
    comm_open(&p->comm, &p->dev, &j->mesh, rank, j->transport, j->host_transport, &j->thread_world, o->timeout);
    comm_connect(&p->comm, &dry_run->parallel.comm, transport_sums(o));
    if (o->out) comm_set_flight_directory(&p->comm, o->out);
    check_agreement(&p->comm, j);
    check_shared_out(&p->comm, o->out);
    p->layout = layout_read_back(&p->comm);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // from here on each process reports its own errors
    trainer_allocate(trainer);
    p->fsdp.seed = (uint64_t)o->seed;
    double start = seconds_now();
    if (before) trainer_continue(trainer, before);
    else if (!job_streams_weights(j))
        weights_load(&p->fsdp, j->has_weights ? &j->weights : NULL, o->adapters ? &j->adapters : NULL, &j->resume_from);
    comm_barrier(&p->comm, "start-up: weights are loaded"); // a slow disk must not count as waiting in the first step
    trainer->load_seconds = seconds_now() - start;
    comm_phase(&p->comm, PHASE_STEP);
}

#endif
