/* checkpoint_writer.h: writes checkpoints and exported models.
 *
 * FSDP units are gathered one after the other, in the order of the files. Each 4 MiB chunk of a file belongs to one
 * rank, which fills it, checksums it and writes it in a thread. A caller may rely on: a rank gathers one unit at a time
 * (with --save-mode async it also buffers its chunks of all files); a checkpoint becomes visible by one rename, after
 * all its bytes are on disk.
 */
#ifndef CHECKPOINT_WRITER_H
#define CHECKPOINT_WRITER_H
#include "after_save.h"                // defines: AfterSave
#include "checkpoint.h"                // defines: Checkpoint, Progress, trainer_text
#include "sharded_state.h"             // defines: gather_trained, fsdp_release_state
#include "../checks/replica_check.h"   // defines: fsdp_check_replicas
#include "../watch/signals.h"          // defines: end_signals
#include "../setup/tokenizer_copies.h" // defines: TokenizerCopies

/* A tensor in a gathered unit. */
typedef struct {
    const TensorTable *tables; // (tp) of the ranks whose parts were gathered
    int number;                // of the tensor in these tables
    const float *unit;         // (tp, padded)
    int64_t padded;
} GatheredTensor;

struct CheckpointWriter;

/* Produces bytes [begin, end) of a tensor at `out` in another dtype or row order than a checkpoint has. */
typedef void (*PutTensor)(const struct CheckpointWriter *, const OutputTensor *, const GatheredTensor *, char *out,
                          int64_t begin, int64_t end);

typedef struct CheckpointWriter {
    Fsdp *fsdp;
    const RunSettings *run;
    const Recipe *recipe;
    const Checkpoint *resume_from;    // the run resumed from it; dir "": a new run; NULL: no checkpoints are written
    uint64_t base_fingerprint;        // of the frozen model beneath the adapters
    const TokenizerCopies *tokenizer; // the files that are written next to the weights
    const char *base_model;           // of adapters: its path or name
    GatherState gather;               // gather_trained, or what also merges adapters; NULL: no rank holds the weights
    PutTensor put_tensor;             // NULL: fp32 in the order of the model, as in a checkpoint
    const void *conversion;           // what put_tensor needs, if it is not NULL
    TensorTable *parts;               // (pp, tp) the tables of the ranks that have different parts of the model
    float *gathered;      // (tp, largest padded unit) one kind of state of a unit, from all tensor-parallel ranks;
                          // NULL: the model is not split
    Request relay;        // of `gathered`, from one pipeline stage to the next
    OutputFiles files;    // of a checkpoint, or of an export
    AfterSave after_save; // rank 0 runs its commands
    char *buffers;        // (num_buffers, FILE_CHUNK_BYTES) chunks on their way to the disk, each on a page boundary
    int num_buffers;
    uint32_t *sums; // (chunks of this rank) their CRC-32; chunk i of all files belongs to rank i mod world
    // one write of these files
    int is_open;         // it has started, and the checkpoint or export is not complete
    char dir[4096 + 64]; // gets its final name when all files are complete
    Progress progress;
    double start, paused;         // when the write began; seconds for which it stopped training
    int64_t own, filled, written; // chunks of this rank: all, filled so far, written so far
    int done;                     // all of them are on disk; set by the thread
    int64_t saved_step;           // the newest checkpoint, complete or being written; -1: none
    pthread_t thread;
    pthread_mutex_t lock; // guards filled and written
    pthread_cond_t changed;
} CheckpointWriter;

enum { CHUNKS_IN_FLIGHT = 4, PAGE_BYTES = 4096 };

// ---------------------------------------------------------------------------
// opening and closing

/* A unit's size with padding, also of a unit that only another stage has. */
static int64_t unit_padded(const Fsdp *f, const Unit *u) {
    return round_up(u->size, (int64_t)TENSOR_ALIGN * f->ranks * f->replicas);
}

/* Binds the writer; then checkpoint_prepare or export_files, and checkpoint_writer_allocate. */
static void checkpoint_writer_open(CheckpointWriter *w, Fsdp *fsdp, const RunSettings *run) {
    memset(w, 0, sizeof *w);
    w->fsdp = fsdp;
    w->run = run;
    w->saved_step = -1;
    w->gather = gather_trained;
    w->after_save.run = run;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
}

/* Lays out the files of checkpoints: the trained weights, and the moments. `whole`: all tensors of the model. */
static void checkpoint_prepare(CheckpointWriter *w, const TensorTable *whole, const Checkpoint *from) {
    int adapters = w->fsdp->config->lora_rank > 0, first = adapters ? table_first_adapter(whole) : 0;
    int end = whole->num_tensors;
    w->resume_from = from;
    if (from->dir[0]) {
        char path[4096];
        checkpoint_path(path, sizeof path, w->run->out, from->progress.step);
        if (!access(path, F_OK)) w->saved_step = from->progress.step; // --out has the checkpoint of this step already
    }
    output_files_add(&w->files, whole, first, end, adapters ? adapters_stem : "model", STATE_MASTER, STATE_MASTER);
    output_files_add(&w->files, whole, first, end, "optimizer", STATE_EXP_AVG, STATE_EXP_AVG_SQ);
}

/* Opens the tables of all parts of the model. Allocates a buffer for a unit of several parts, and buffers for a few
 * chunks or, with --save-mode async, for all chunks of this rank. */
static void checkpoint_writer_allocate(CheckpointWriter *w) {
    const Fsdp *f = w->fsdp;
    ModelPart part = f->table->part;
    int async = w->run->save_mode == SAVE_ASYNC;
    int64_t largest = 0, share = blocks_of(w->files.chunks, f->comm->mesh.world); // the most chunks that a rank has
    if (!share) return;
    w->parts = (TensorTable *)checked_malloc(sizeof(TensorTable) * (size_t)(part.pp * part.tp));
    for (part.pp_rank = 0; part.pp_rank < part.pp; part.pp_rank++) {
        TensorTable *tables = &w->parts[part.pp_rank * part.tp];
        for (part.tp_rank = 0; part.tp_rank < part.tp; part.tp_rank++)
            table_open(&tables[part.tp_rank], f->config, f->table->wrap, &part);
        for (int u = 0; u < tables->num_units; u++)
            if (!tables->units[u].frozen || f->sharding.merges_adapters)
                largest = max_i64(largest, unit_padded(f, &tables->units[u]));
    }
    if (w->gather && (part.tp > 1 || part.pp > 1 || part.tied_head_copy))
        w->gathered = (float *)arena_alloc(f->dev, MEM_COMM, "a unit of all ranks that have parts of it",
                                           sizeof(float) * (size_t)(largest * part.tp));
    w->num_buffers = (int)(async ? share : min_i64(CHUNKS_IN_FLIGHT, share));
    size_t bytes = (size_t)w->num_buffers * FILE_CHUNK_BYTES;
    uintptr_t buffers = (uintptr_t)arena_alloc(f->dev, MEM_HOST, "chunks to be written", bytes + PAGE_BYTES);
    w->buffers = (char *)((buffers + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1));
    if (async && !f->dev->dry_run) memset(w->buffers, 0, bytes); // so that the first save does not wait for page faults
    w->sums = (uint32_t *)arena_alloc(f->dev, MEM_HOST, "checksums", sizeof(uint32_t) * (size_t)share);
}

static void checkpoint_writer_close(CheckpointWriter *w) {
    const ModelPart *part = w->fsdp ? &w->fsdp->table->part : NULL;
    for (int i = 0; w->parts && i < part->pp * part->tp; i++) table_close(&w->parts[i]);
    free(w->parts);
    request_close(&w->relay);
    output_files_close(&w->files);
}

// ---------------------------------------------------------------------------
// the thread that writes this rank's chunks. It makes no call of the transport

/* Ends the run with an error. The files are truncated first, so that they free the disk; their names stay until the
 * next run, because other ranks may be about to open them. */
static void write_failed(const CheckpointWriter *w, const char *what, const char *path, int reason) {
    char name[4096 + 256];
    for (int i = 0; i < w->files.num_files; i++) {
        snprintf(name, sizeof name, "%s/%s", w->dir, w->files.files[i].name);
        if (truncate(name, 0)) continue; // it was not created yet
    }
    user_error("cannot %s %s: %s%s", what, path, strerror(reason),
               w->resume_from ? "; the previous checkpoint is intact" : "");
}

/* Does each chunk of this rank have a buffer of its own, so that the rank need not wait while they are written? Then
 * the thread computes the checksums; otherwise the rank itself does, since it would be idle until a buffer is free. */
static int writes_in_background(const CheckpointWriter *w) { return w->num_buffers >= w->own; }

/* Counts another chunk as filled or written, and wakes the thread that waits for it. */
static void count_chunk(CheckpointWriter *w, int64_t *counter) {
    pthread_mutex_lock(&w->lock);
    ++*counter;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* The first of this rank's chunks in a file, counted from the file's first chunk. */
static int64_t first_own_chunk(const CheckpointWriter *w, const OutputFile *file) {
    int64_t world = w->fsdp->comm->mesh.world;
    return (w->fsdp->comm->rank - file->first_chunk % world + world) % world;
}

/* Writes this rank's chunks of one file, as they are filled. O_DIRECT writes them past the page cache, since a model
 * would displace everything else from it. A chunk that is no multiple of a page, or goes to a file system without
 * O_DIRECT, is written through the cache. */
static void write_file(CheckpointWriter *w, int number) {
    const OutputFile *file = &w->files.files[number];
    int64_t chunk = first_own_chunk(w, file);
    char path[4096 + 256];
    if (chunk >= file->chunks) return;
    snprintf(path, sizeof path, "%s/%s", w->dir, file->name);
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0) fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) write_failed(w, "open", path, errno); // for example on a host that does not share the directory
    for (; chunk < file->chunks; chunk += w->fsdp->comm->mesh.world) {
        int64_t i = w->written, bytes = chunk_length(chunk, file->bytes), at = chunk * FILE_CHUNK_BYTES;
        const char *buffer = w->buffers + i % w->num_buffers * FILE_CHUNK_BYTES;
        pthread_mutex_lock(&w->lock);
        while (w->filled <= i) pthread_cond_wait(&w->changed, &w->lock);
        pthread_mutex_unlock(&w->lock);
        if (writes_in_background(w)) w->sums[i] = crc32_of(buffer, bytes);
        if (bytes % PAGE_BYTES) fcntl(fd, F_SETFL, 0); // clears O_DIRECT
        int failed = write_bytes(fd, buffer, (size_t)bytes, at);
        if (failed == EINVAL) {
            fcntl(fd, F_SETFL, 0);
            failed = write_bytes(fd, buffer, (size_t)bytes, at);
        }
        if (failed) write_failed(w, "write", path, failed);
        count_chunk(w, &w->written);
    }
    if (fsync(fd) || close(fd)) write_failed(w, "write", path, errno);
}

static void *writer_thread(void *arg) {
    CheckpointWriter *w = (CheckpointWriter *)arg;
    if (writes_in_background(w)) lower_priority_of_thread(); // training has the higher priority
    for (int i = 0; i < w->files.num_files; i++) write_file(w, i);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// ---------------------------------------------------------------------------
// producing the bytes of all files in order. Every rank passes over all of them and stores those of its own chunks

/* Waits until the thread has written `count` chunks. */
static void wait_for_thread(CheckpointWriter *w, int64_t count) {
    pthread_mutex_lock(&w->lock);
    while (w->written < count) {
        pthread_cond_wait(&w->changed, &w->lock);
        comm_alive(w->fsdp->comm);
    }
    pthread_mutex_unlock(&w->lock);
}

/* Returns one kind of state of a unit, all-gathered over the fsdp ranks of its pipeline stage. With tensor or pipeline
 * parallelism it is (tp, padded): also all-gathered over the tensor-parallel ranks, and then sent from stage to stage
 * until every stage has it. */
static const float *gather_parts(CheckpointWriter *w, int stage, const Unit *u, StateKind kind) {
    Fsdp *f = w->fsdp;
    const ModelPart *part = &f->table->part;
    size_t bytes = sizeof(float) * (size_t)unit_padded(f, u);
    if (stage == part->pp_rank) {
        FsdpUnit *mine = &f->units[u - w->parts[stage * part->tp].units];
        const float *state = w->gather(f, mine, kind);
        if (!w->gathered) return state;
        all_gather_now(f->comm, AXIS_TP, u->name, state, w->gathered, bytes);
        fsdp_release_state(f, state);
    }
    int distance = (part->pp_rank - stage + part->pp) % part->pp; // how many stages receive the unit before this one
    int next = (part->pp_rank + 1) % part->pp, previous = (part->pp_rank + part->pp - 1) % part->pp;
    if (distance > 0) {
        receive_start(f->comm, &w->relay, AXIS_PP, previous, "a unit to be written", w->gathered,
                      bytes * (size_t)part->tp, DTYPE_BYTE);
        comm_wait(f->comm, &w->relay);
    }
    if (distance < part->pp - 1) {
        send_start(f->comm, &w->relay, AXIS_PP, next, "a unit to be written", w->gathered, bytes * (size_t)part->tp,
                   DTYPE_BYTE);
        comm_wait(f->comm, &w->relay);
    }
    return w->gathered;
}

/* Copies elements [first, first + count) of the whole tensor to host memory, `out` (count). In a tensor that is
 * split by columns, every row consists of one piece from each part. Otherwise the parts simply follow each other, and
 * the whole tensor is treated as one row. */
static void read_elements(const CheckpointWriter *w, const GatheredTensor *g, float *out, int64_t first,
                          int64_t count) {
    const Tensor *t = &g->tables->tensors[g->number];
    int64_t rows = t->row->split == SPLIT_COLUMNS ? t->whole_rows : 1;
    int64_t row_length = t->whole_rows * t->whole_cols / rows;
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t row = (first + done) / row_length, at = (first + done) % row_length, p = 0;
        const Tensor *part = t;
        while (at >= part->rows * part->cols / rows) {
            at -= part->rows * part->cols / rows;
            p++;
            part = &g->tables[p].tensors[g->number];
        }
        int64_t piece = part->rows * part->cols / rows;
        n = min_i64(count - done, piece - at);
        device_read(w->fsdp->dev, out + done, g->unit + p * g->padded + part->offset + row * piece + at,
                    sizeof(float) * (size_t)n);
    }
}

/* Produces the next `bytes` bytes of a file, which begin at `from`: those of tensor t or, if it is NULL, `given`. Every
 * rank passes over all of them and stores those in its own chunks. */
static void put_bytes(CheckpointWriter *w, const OutputFile *file, int64_t from, int64_t bytes, const char *given,
                      const OutputTensor *t, const GatheredTensor *g) {
    const int64_t world = w->fsdp->comm->mesh.world, size = sizeof(float);
    for (int64_t chunk = first_own_chunk(w, file); chunk * FILE_CHUNK_BYTES < from + bytes; chunk += world) {
        int64_t first = chunk * FILE_CHUNK_BYTES, length = chunk_length(chunk, file->bytes);
        int64_t begin = max_i64(first, from) - from, end = min_i64(first + length, from + bytes) - from;
        if (end <= begin) continue;
        // A new chunk takes over the buffer of chunk `filled - num_buffers`: wait until that one is written.
        if (first >= from) wait_for_thread(w, w->filled - w->num_buffers + 1);
        char *buffer = w->buffers + w->filled % w->num_buffers * FILE_CHUNK_BYTES;
        char *out = buffer + (from + begin - first);
        if (!t) memcpy(out, given + begin, (size_t)(end - begin));
        else if (w->put_tensor) w->put_tensor(w, t, g, out, begin, end);
        else read_elements(w, g, (float *)(void *)out, begin / size, (end - begin) / size); // no element is divided
        if (from + end < first + length) continue;
        if (!writes_in_background(w)) w->sums[w->filled] = crc32_of(buffer, length);
        count_chunk(w, &w->filled);
    }
}

/* The pipeline stage that has a tensor of the whole model, and its number in that stage's tables. */
static int find_stage(const CheckpointWriter *w, int index, int *number) {
    const ModelPart *part = &w->fsdp->table->part;
    for (int stage = 0; stage < part->pp; stage++) {
        const TensorTable *t = &w->parts[stage * part->tp];
        for (*number = 0; *number < t->num_tensors; ++*number)
            if (t->tensors[*number].index == index && !t->tensors[*number].is_tied_copy) return stage;
    }
    return -1;
}

/* Produces the bytes of all files. A unit is gathered when its first tensor comes, and released after its last one. */
static void put_files(CheckpointWriter *w) {
    static const char zeros[GGUF_ALIGN] = {0};
    Fsdp *f = w->fsdp;
    const Unit *unit = NULL;
    const float *state = NULL; // of `unit`, gathered
    StateKind kind = STATES;
    for (int n = 0; n < w->files.num_files; n++) {
        const OutputFile *file = &w->files.files[n];
        int64_t at = file->header_bytes;
        put_bytes(w, file, 0, at, file->header, NULL, NULL);
        for (int i = file->first; i < file->first + file->count; i++) {
            const OutputTensor *t = &w->files.tensors[i];
            int number = 0, stage = find_stage(w, t->tensor->index, &number);
            const TensorTable *tables = &w->parts[stage * f->table->part.tp];
            const Unit *u = &tables->units[tables->tensors[number].unit];
            if (w->gather && (u != unit || t->kind != kind)) {
                if (unit && !w->gathered) fsdp_release_state(f, state);
                state = gather_parts(w, stage, u, t->kind);
                unit = u;
                kind = t->kind;
            }
            const GatheredTensor gathered = {tables, number, state, unit_padded(f, u)};
            put_bytes(w, file, at, t->bytes, NULL, t, &gathered);
            put_bytes(w, file, at + t->bytes, t->padding, zeros, NULL, NULL);
            at += t->bytes + t->padding;
            comm_alive(f->comm);
        }
    }
    if (unit && !w->gathered) fsdp_release_state(f, state);
}

// ---------------------------------------------------------------------------
// one write of all files: write_start, then write_finish

/* Starts to write the files into the directory w->dir, which is empty. Rank 0 creates them in their final size, so that
 * a full disk is noticed at once. Returns when all chunks of this rank have been filled. If there are fewer buffers
 * than chunks, at most `num_buffers` chunks are then still to be written. */
static void write_start(CheckpointWriter *w) {
    Comm *comm = w->fsdp->comm;
    char path[4096 + 256];
    w->is_open = 1;
    w->own = w->files.chunks / comm->mesh.world + (comm->rank < w->files.chunks % comm->mesh.world);
    w->filled = 0;
    w->written = 0;
    w->done = 0;
    for (int i = 0; comm->rank == 0 && i < w->files.num_files; i++) {
        const OutputFile *file = &w->files.files[i];
        snprintf(path, sizeof path, "%s/%s", w->dir, file->name);
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0) write_failed(w, "create", path, errno);
        int full = reserve_blocks(fd, file->bytes);
        if (full && !is_unsupported(full)) write_failed(w, "create", path, full);
        if (ftruncate(fd, file->bytes)) write_failed(w, "create", path, errno);
        close(fd);
    }
    comm_barrier(comm, "saving: files created");
    if (thread_start(&w->thread, writer_thread, w)) run_failure("cannot start the thread that writes files");
    put_files(w);
}

static int is_writing(CheckpointWriter *w) { return w->is_open && !__atomic_load_n(&w->done, __ATOMIC_ACQUIRE); }

/* Waits until the chunks of all ranks are on disk. */
static void write_finish(CheckpointWriter *w) {
    wait_for_thread(w, w->own);
    pthread_join(w->thread, NULL);
    comm_barrier(w->fsdp->comm, "saving: chunks written");
}

/* Writes the small files next to the weights: config.json, indices and the tokenizer's files. They stay in `c`, for
 * their checksums. */
static void write_companions(CheckpointWriter *w, Companions *c) {
    int adapters = w->files.tensors[0].tensor->row->unit == UNIT_ADAPTERS;
    memset(c, 0, sizeof *c);
    CompanionFile *file = companion_add(c, adapters ? "adapter_config.json" : "config.json");
    FILE *f = text_stream_open(&file->text, &file->length);
    const ModelIds *ids = w->tokenizer ? &w->tokenizer->ids : &no_model_ids;
    if (adapters) adapters_config_write(w->fsdp->config, w->base_model, f);
    else config_write_json(w->fsdp->config, torch_dtype_names[w->files.dtype], w->files.base, ids, f);
    text_stream_close(f);
    for (int i = 0; i < w->files.num_files; i += w->files.files[i].parts) {
        const OutputFile *first = &w->files.files[i];
        if (first->parts == 1) continue;
        file = companion_add(c, first->name);
        strcpy(strchr(file->name, '-'), ".safetensors.index.json");
        file->text = output_files_index(&w->files, i);
        file->length = strlen(file->text);
    }
    for (int i = 0; w->tokenizer && i < w->tokenizer->count; i++) {
        const TokenizerFile *from = &w->tokenizer->files[i];
        if (from->is_redundant && !w->resume_from) continue;
        file = companion_add(c, from->name);
        file->text = (char *)checked_malloc(from->length + 1);
        file->length = from->length;
        memcpy(file->text, from->text, file->length);
    }
    for (int i = c->count - 1; i >= 0; i--) // config.json comes last: without it an export is not complete
        write_new_file(w->dir, c->files[i].name, c->files[i].text, c->files[i].length);
}

static void companions_free(Companions *c) {
    for (int i = 0; i < c->count; i++) free(c->files[i].text);
}

// ---------------------------------------------------------------------------
// checkpoints

/* Rank 0 makes the checkpoint visible. Everything in it is on disk before it gets its name, and its name is on disk
 * before older checkpoints are removed. */
static void publish_checkpoint(CheckpointWriter *w, const uint32_t *sums) {
    const char *out = w->run->out;
    const Checkpoint *from = w->resume_from;
    char path[4096];
    Companions companions;
    size_t length;
    double start = seconds_now(), bytes = 0;
    for (int i = 0; i < w->files.num_files; i++) bytes += (double)w->files.files[i].bytes;
    write_companions(w, &companions);
    // A checkpoint of the step that the run resumed from keeps the settings of the run that computed it.
    int same_step = from->dir[0] && from->progress.step == w->progress.step;
    cJSON *settings = same_step ? cJSON_Duplicate(from->settings, 1)
                                : settings_in_force(w->recipe, w->progress.step, &w->fsdp->comm->mesh, w->progress.data,
                                                    w->base_fingerprint);
    char *text = trainer_text(&w->progress, settings, &w->files, sums, &companions, &length);
    write_new_file(w->dir, "trainer.json", text, length);
    free(text);
    sync_directory(w->dir);
    checkpoint_path(path, sizeof path, out, w->progress.step);
    if (rename(w->dir, path))
        user_error("cannot rename the complete checkpoint %s to %s: %s; rename it yourself, and resume from it", w->dir,
                   path, strerror(errno));
    sync_directory(out);
    update_latest_link(out, w->progress.step);
    after_save_check(&w->after_save);
    remove_old_checkpoints(out, w->run->keep, after_save_step(&w->after_save));
    w->paused += seconds_now() - start;
    printf("step %6" PRId64 " | saved %s, %.1f MB in %.2f s", w->progress.step, path, 1e-6 * bytes,
           seconds_now() - w->start);
    if (w->run->save_mode == SAVE_ASYNC) printf("; training paused for %.2f s", w->paused);
    printf("\n");
    fflush(stdout);
    companions_free(&companions);
    after_save_add(&w->after_save, w->progress.step);
}

/* Waits until the files are written, and makes them a checkpoint. */
static void checkpoint_commit(CheckpointWriter *w) {
    Comm *comm = w->fsdp->comm;
    Phase before = comm_phase(comm, PHASE_SAVING);
    double start = seconds_now();
    write_finish(w);
    int64_t world = comm->mesh.world, share = blocks_of(w->files.chunks, world); // the most chunks that a rank has
    uint32_t *all = (uint32_t *)checked_malloc(sizeof *all * (size_t)(share * world));
    uint32_t *sums = (uint32_t *)checked_malloc(sizeof *sums * (size_t)(w->files.chunks + 1));
    all_gather_now(comm, AXIS_WORLD, "saving: checksums", w->sums, all, sizeof *sums * (size_t)share);
    for (int64_t chunk = 0; chunk < w->files.chunks; chunk++) sums[chunk] = all[chunk % world * share + chunk / world];
    free(all);
    w->paused += seconds_now() - start;
    if (comm->rank == 0) publish_checkpoint(w, sums);
    free(sums);
    w->is_open = 0;
    comm_barrier(comm, "saving: done");
    comm_phase(comm, before);
}

/* Saves the state of all ranks, when no other save is open. With --save-mode async it returns when the state is copied;
 * a later checkpoint_commit of all ranks makes it a checkpoint. */
static void checkpoint_save(CheckpointWriter *w, const Progress *at) {
    Comm *comm = w->fsdp->comm;
    Phase before = comm_phase(comm, PHASE_SAVING);
    w->progress = *at;
    w->start = seconds_now();
    w->saved_step = at->step;
    if (w->fsdp->fingerprints) fsdp_check_replicas(w->fsdp, at->step); // the files mix chunks of all replicas
    snprintf(w->dir, sizeof w->dir, "%s/" SAVING "step-%0*" PRId64 "-%016" PRIx64, w->run->out, STEP_DIGITS, at->step,
             comm_random_name(comm, "saving: name"));
    if (comm->rank == 0 && mkdir(w->dir, 0777))
        user_error("cannot create %s: %s; the previous checkpoint is intact", w->dir, strerror(errno));
    write_start(w);
    w->paused = seconds_now() - w->start;
    if (w->run->save_mode != SAVE_ASYNC) checkpoint_commit(w);
    comm_phase(comm, before);
}

// ---------------------------------------------------------------------------
// the end of the run

/* At the end of the run: waits for the last commands of --after-save, or until rank 0 receives another signal to end.
 * All ranks wait, because a launcher kills the others when one exits with 75 (EXIT_ENDED_EARLY). They all-gather ten
 * times a second, so that the watchdog does not report them as lost. */
static void wait_for_commands(CheckpointWriter *w) {
    Comm *comm = w->fsdp->comm;
    AfterSave *a = &w->after_save;
    Phase before = comm_phase(comm, PHASE_SAVING);
    int ends = end_signals, wait, *waits = new_array(int, comm->mesh.world);
    after_save_check(a);
    if (a->process) printf("waiting for the command of --after-save\n");
    fflush(stdout);
    do {
        wait = a->process && end_signals == ends;
        all_gather_now(comm, AXIS_WORLD, "waiting for --after-save", &wait, waits, sizeof wait);
        if (waits[0]) usleep(100000);
        after_save_check(a);
    } while (waits[0]);
    if (a->process)
        fprintf(stderr,
                "note: a signal ended the wait for the command of --after-save; it continues as process %d, and the "
                "command was not started for %" PRId64 " more checkpoints\n",
                (int)a->process, a->saved - a->started);
    // --keep also applies to the checkpoint that the last command used
    if (a->saved && !a->process) remove_old_checkpoints(w->run->out, w->run->keep, -1);
    free(a->steps);
    a->steps = NULL;
    a->saved = a->started = 0;
    free(waits);
    comm_phase(comm, before);
}
#endif
