/* checkpoint_writer.h: writes checkpoints and exported models.
 *
 * FSDP units are unsharded one after the other, in the order of the files; each 4 MiB chunk of a file is filled,
 * written and checksummed by one rank. A caller may rely on: no rank holds more than one unsharded unit beyond its own
 * state; a checkpoint becomes visible by one rename, after all of its bytes are on the disk.
 */
#ifndef CHECKPOINT_WRITER_H
#define CHECKPOINT_WRITER_H
#include "checkpoint.h" // defines: Checkpoint, Progress, trainer_text
#include "config_json.h" // defines: config_write_json
#include "sharded_state.h" // defines: fsdp_gather_state, fsdp_release_state
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// save: units are gathered in the order of the files; chunks are filled by the ranks whose they are, and written by a
// thread

typedef struct Saver {
    Fsdp *f;
    const Options *opt;
    const Checkpoint *resume_from; // where the run goes on
    uint64_t base_fingerprint;     // the fingerprint of what adapters stand beside
    const char *tokenizer;         // its file, which goes along; NULL: none
    const Llama3Config *config;
    const TensorTable *whole; // the model, in the order of the files
    TensorTable *parts; // (stages, tp) what each rank has that splits the model with this one; NULL: it has all of it
    float *of_parts;    // (tp, largest padded unit) a unit's state of one kind, of all ranks that have parts of it
    Request passed;     // that on its way through the pipeline
    OutputFiles checkpoint, exported;
    char
        *buffers; // (num_buffers, FILE_CHUNK_BYTES) chunks on their way to the disk, on a page each; async: all of this
                  // rank's, a copy of its state
    int num_buffers;
    uint32_t *sums; // (chunks / ranks, rounded up) of this rank's chunks: rank, rank + ranks, …
    // the save in flight
    const OutputFiles *files; // NULL: none
    char dir[4096];           // where they are written, under names with this behind:
    const char *suffix;
    Progress progress;
    double start, held; // when it began; seconds in which training stood still for it
    int file;           // the place in the files that is filled next
    int64_t offset, chunk;
    int64_t own, filled, written; // this rank's chunks
    int done;                     // all of them are on the disk
    int64_t saved;                // the step of the newest checkpoint, written or in flight; -1: none
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t moved;
} Saver;

enum { CHUNKS_IN_FLIGHT = 4, PAGE_BYTES = 4096 };

static int64_t saver_share(const Saver *s, const OutputFiles *o) {
    return (o->chunks + s->f->comm->mesh.world - 1) / s->f->comm->mesh.world;
}

/* A unit of another stage is as long with its padding as it would be here. */
static int64_t unit_padded(const Fsdp *f, const Unit *u) {
    return round_up(u->size, (int64_t)TENSOR_ALIGN * f->ranks * f->replicas);
}

/* Where ranks split the model: what each has of it, and where a unit's parts come together. */
static void saver_parts(Saver *s, const Llama3Config *config) {
    ModelPart part = s->f->table->part;
    int64_t largest = 0;
    if (part.tp == 1 && part.pp == 1 && !part.tied_head_copy) return;
    s->parts = (TensorTable *)checked_malloc(sizeof(TensorTable) * (size_t)(part.pp * part.tp));
    for (part.pp_rank = 0; part.pp_rank < part.pp; part.pp_rank++)
        for (part.tp_rank = 0; part.tp_rank < part.tp; part.tp_rank++)
            table_open(&s->parts[part.pp_rank * part.tp + part.tp_rank], config, s->f->table->wrap, &part);
    for (int p = 0; p < part.pp; p++)
        for (int u = 0; u < s->parts[p * part.tp].num_units; u++)
            if (!s->parts[p * part.tp].units[u].frozen || s->f->sharding.merges_adapters)
                largest = max_i64(largest, unit_padded(s->f, &s->parts[p * part.tp].units[u]));
    s->of_parts = (float *)arena_alloc(s->f->dev, MEM_COMM, "a unit of all ranks that have parts of it",
                                       sizeof(float) * (size_t)(largest * part.tp));
}

/* Binds the saver; then checkpoint_prepare, export_prepare or both, and saver_allocate. */
static void saver_open(Saver *s, Fsdp *f, const Llama3Config *config, const TensorTable *whole, const Options *o) {
    memset(s, 0, sizeof *s);
    s->f = f;
    s->config = config;
    s->whole = whole;
    s->opt = o;
    s->saved = -1;
}

/* Lays out the files of checkpoints. The run resumes from `from`, where that has a directory. */
static void checkpoint_prepare(Saver *s, const Checkpoint *from) {
    const StateKind master[] = {STATE_MASTER}, moments[] = {STATE_EXP_AVG, STATE_EXP_AVG_SQ};
    int adapters = s->config->lora_rank > 0, first = adapters ? table_first_adapter(s->whole) : 0;
    s->resume_from = from;
    if (from->dir[0]) checkpoint_path(s->dir, sizeof s->dir, s->opt->out, from->progress.step);
    if (s->dir[0] && !access(s->dir, F_OK)) s->saved = from->progress.step; // it is not written a second time
    output_files_add(&s->checkpoint, s->whole, first, s->whole->num_tensors, adapters ? adapters_stem : "model", master,
                     1);
    output_files_add(&s->checkpoint, s->whole, first, s->whole->num_tensors, "optimizer", moments, 2);
}

/* Allocates what saving needs: buffers for a few chunks or, with --save-mode async, for all chunks that this rank
 * writes. */
static void saver_allocate(Saver *s) {
    int async = s->checkpoint.num_files && !strcmp(s->opt->save_mode, "async");
    int64_t share = max_i64(saver_share(s, &s->checkpoint), saver_share(s, &s->exported));
    if (!share) return;
    s->num_buffers = (int)min_i64(CHUNKS_IN_FLIGHT, share);
    if (async) s->num_buffers = (int)max_i64(s->num_buffers, saver_share(s, &s->checkpoint));
    saver_parts(s, s->config);
    size_t bytes = (size_t)s->num_buffers * FILE_CHUNK_BYTES;
    uintptr_t buffers = (uintptr_t)arena_alloc(s->f->dev, MEM_HOST, "chunks to be written", bytes + PAGE_BYTES);
    s->buffers = (char *)((buffers + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1));
    if (async && !s->f->dev->dry_run)
        memset(s->buffers, 0, bytes); // so that the first save does not wait for page faults
    s->sums = (uint32_t *)arena_alloc(s->f->dev, MEM_HOST, "checksums", sizeof(uint32_t) * (size_t)share);
}

static void saver_close(Saver *s) {
    const ModelPart *part = s->f ? &s->f->table->part : NULL;
    for (int i = 0; s->parts && i < part->pp * part->tp; i++) table_close(&s->parts[i]);
    free(s->parts);
    device_destroy_event(s->passed.arrived);
    output_files_close(&s->checkpoint);
    output_files_close(&s->exported);
}

static void out_path(const Saver *s, char *path, size_t size, int file, const char *suffix) {
    snprintf(path, size, "%s/%s%s", s->dir, s->files->files[file].name, suffix);
}

/* Gives back the room that the files took. Their names stay until the next run comes: other ranks may be about to open
 * them, and are not to blame. */
static void save_failed(const Saver *s, const char *what, const char *path, int reason) {
    char name[4096 + 128];
    for (int i = 0; s->files == &s->checkpoint && i < s->files->num_files; i++) {
        out_path(s, name, sizeof name, i, s->suffix);
        if (truncate(name, 0)) continue; // not made yet
    }
    user_error("cannot %s %s: %s%s", what, path, strerror(reason),
               s->files == &s->checkpoint ? "; the checkpoint before it is untouched" : "");
}

/* Past the page cache, which a model would push everything else out of; what does not end with a page, or cannot be
 * written so, through it. 0 or errno. */
static int chunk_write(int fd, const char *chunk, int64_t bytes, int64_t at) {
    int flags = fcntl(fd, F_GETFL), direct = flags & O_DIRECT;
    if (direct && bytes % PAGE_BYTES) fcntl(fd, F_SETFL, flags & ~O_DIRECT), direct = 0;
    for (int64_t done = 0; done < bytes;) {
        ssize_t wrote = pwrite(fd, chunk + done, (size_t)(bytes - done), at + done);
        if (wrote < 0 && errno == EINVAL && direct) fcntl(fd, F_SETFL, flags & ~O_DIRECT), direct = 0;
        else if (wrote <= 0 && errno != EINTR) return wrote ? errno : EIO;
        done += max_i64(0, wrote);
    }
    return 0;
}

/* A chunk's checksum is made by whoever has time: arithmetic waits for the chunks to be filled, or it goes on beside
 * the writer. */
static int saver_copies(const Saver *s) { return s->num_buffers >= s->own; }
static void chunk_sum(Saver *s, int64_t i, int64_t bytes) {
    s->sums[i] = (uint32_t)crc32(0, (const Bytef *)s->buffers + i % s->num_buffers * FILE_CHUNK_BYTES, (uInt)bytes);
}

/* Writes this rank's chunks in order, as they are filled; makes no call of the transport. */
static void *save_write(void *arg) {
    Saver *s = (Saver *)arg;
    char path[4096 + 128] = "";
    int world = s->f->comm->mesh.world, file = 0, fd = -1, failed;
    int64_t first = 0; // chunk of the file
    if (saver_copies(s)) setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 10);
    for (int64_t i = 0, id = s->f->comm->rank; i < s->own; i++, id += world) {
        for (; id >= first + output_file_chunks(&s->files->files[file]);
             first += output_file_chunks(&s->files->files[file++])) {
            if (fd >= 0 && (fsync(fd) || close(fd))) save_failed(s, "write", path, errno);
            fd = -1;
        }
        out_path(s, path, sizeof path, file, s->suffix);
        if (fd < 0) fd = open(path, O_WRONLY | O_CLOEXEC | O_DIRECT);
        if (fd < 0) fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0) save_failed(s, "open", path, errno); // as on a host that does not share the directory
        pthread_mutex_lock(&s->lock);
        while (s->filled <= i) pthread_cond_wait(&s->moved, &s->lock);
        pthread_mutex_unlock(&s->lock);
        int64_t at = (id - first) * FILE_CHUNK_BYTES,
                bytes = min_i64(FILE_CHUNK_BYTES, s->files->files[file].bytes - at);
        if (saver_copies(s)) chunk_sum(s, i, bytes);
        if ((failed = chunk_write(fd, s->buffers + i % s->num_buffers * FILE_CHUNK_BYTES, bytes, at)))
            save_failed(s, "write", path, failed);
        pthread_mutex_lock(&s->lock);
        s->written = i + 1;
        pthread_cond_broadcast(&s->moved);
        pthread_mutex_unlock(&s->lock);
    }
    if (fd >= 0 && (fsync(fd) || close(fd))) save_failed(s, "write", path, errno);
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Until the writer has room for a chunk, or, with `all`, has written all. */
static void save_await(Saver *s, int all) {
    pthread_mutex_lock(&s->lock);
    while (all ? s->written < s->own : s->filled - s->written >= s->num_buffers) {
        pthread_cond_wait(&s->moved, &s->lock);
        comm_alive(s->f->comm);
    }
    pthread_mutex_unlock(&s->lock);
}

/* Where the next of `bytes` bytes of the files belong, `n` of them, as many as lie in one chunk; NULL: it is another
 * rank's. save_filled must follow. */
static char *save_room(Saver *s, int64_t bytes, int64_t *n) {
    int64_t chunk = s->offset / FILE_CHUNK_BYTES, begin = chunk * FILE_CHUNK_BYTES;
    *n = min_i64(bytes, min_i64(begin + FILE_CHUNK_BYTES, s->files->files[s->file].bytes) - s->offset);
    if ((s->chunk + chunk) % s->f->comm->mesh.world != s->f->comm->rank) return NULL;
    if (s->offset == begin) save_await(s, 0);
    return s->buffers + s->filled % s->num_buffers * FILE_CHUNK_BYTES + (s->offset - begin);
}

/* Are any of the next bytes of the files this rank's? */
static int save_has_part(const Saver *s, int64_t bytes) {
    int mine = 0;
    for (int64_t c = s->offset / FILE_CHUNK_BYTES; c * FILE_CHUNK_BYTES < s->offset + bytes; c++)
        mine |= (s->chunk + c) % s->f->comm->mesh.world == s->f->comm->rank;
    return mine;
}

/* The next `n` bytes are there, `mine` or not. */
static void save_filled(Saver *s, int64_t n, int mine) {
    int64_t begin = s->offset / FILE_CHUNK_BYTES * FILE_CHUNK_BYTES,
            end = min_i64(begin + FILE_CHUNK_BYTES, s->files->files[s->file].bytes);
    s->offset += n;
    if (!mine || s->offset < end) return;
    if (!saver_copies(s)) chunk_sum(s, s->filled, end - begin);
    pthread_mutex_lock(&s->lock);
    s->filled++;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
}

/* The next bytes of the files, from the host's memory. */
static void save_put(Saver *s, const void *from, int64_t bytes) {
    for (int64_t done = 0, n; done < bytes; done += n) {
        char *to = save_room(s, bytes - done, &n);
        if (to) memcpy(to, (const char *)from + done, (size_t)n);
        save_filled(s, n, to != NULL);
    }
}

/* Unit `u` of stage `stage`, its state of one kind, of all ranks that have parts of it: (tp, padded). Through a
 * pipeline it goes from rank to rank, until all have it. */
static const float *unit_of_all(Saver *s, int stage, const Unit *u, StateKind kind) {
    Fsdp *f = s->f;
    const ModelPart *part = &f->table->part;
    int64_t padded = unit_padded(f, u);
    size_t bytes = sizeof(float) * (size_t)padded;
    if (stage == part->pp_rank) {
        FsdpUnit *mine = &f->units[u - s->parts[stage * part->tp].units];
        const float *state = fsdp_gather_state(f, mine, kind);
        all_gather_now(f->comm, AXIS_TP, u->name, state, s->of_parts, bytes);
        fsdp_release_state(f, state);
    }
    int passes = (part->pp_rank - stage + part->pp) % part->pp; // ranks that had it before this one
    for (int sends = 0; sends < 2 && part->pp > 1; sends++) {
        if (sends ? passes == part->pp - 1 : passes == 0) continue;
        point_start(f->comm, &s->passed, sends ? SEND : RECEIVE, AXIS_PP,
                    (part->pp_rank + (sends ? 1 : part->pp - 1)) % part->pp, "a unit to be written", s->of_parts,
                    bytes * (size_t)part->tp, DTYPE_BYTE);
        comm_wait(f->comm, &s->passed);
    }
    return s->of_parts;
}

/* Elements [first, first + count) of a whole tensor, to the host, from the parts (tp, padded) of its unit; `of`: the
 * first of the tables that tell where those are. */
static void save_read(const Saver *s, const TensorTable *of, int number, const float *unit, int64_t padded, float *out,
                      int64_t first, int64_t count) {
    const Tensor *t = &of->tensors[number];
    int64_t rows = t->row->split == SPLIT_COLUMNS ? t->whole_rows : 1,
            line = t->whole_rows * t->whole_cols / rows; // a line goes over all parts in turn
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t row = (first + done) / line, at = (first + done) % line, p = 0;
        while (at >= of[p].tensors[number].rows * of[p].tensors[number].cols / rows)
            at -= of[p].tensors[number].rows * of[p].tensors[number].cols / rows, p++;
        const Tensor *part = &of[p].tensors[number];
        int64_t has = part->rows * part->cols / rows;
        n = min_i64(count - done, has - at);
        device_read(s->f->dev, out + done, unit + p * padded + part->offset + row * has + at,
                    sizeof(float) * (size_t)n);
    }
}

/* A whole tensor as the files have it. */
static void save_tensor(Saver *s, const OutputTensor *t, const TensorTable *of, int number, const float *unit,
                        int64_t padded) {
    enum { AT_ONCE = 1 << 14 }; // elements: whole blocks
    float wide[AT_ONCE], scales[(int)AT_ONCE / (int)INT8_BLOCK];
    bf16 half[AT_ONCE];
    int8_t bytes[AT_ONCE];
    const void *from = t->scales             ? (void *)scales
                       : t->dtype == ST_I8   ? (void *)bytes
                       : t->dtype == ST_BF16 ? (void *)half
                                             : (void *)wide;
    int64_t elements = t->tensor->rows * t->tensor->cols, size = st_dtype_sizes[t->dtype];
    int as_it_is = t->dtype == ST_F32 && !t->scales && s->offset % size == 0; // from the device straight into a chunk
    for (int64_t at = 0, n; at < elements; at += n) {
        if (as_it_is) {
            char *to = save_room(s, (elements - at) * size, &n);
            if (to) save_read(s, of, number, unit, padded, (float *)(void *)to, at, n / size);
            save_filled(s, n, to != NULL);
            n /= size;
            continue;
        }
        n = min_i64(AT_ONCE, elements - at);
        int64_t length = (t->scales ? int8_blocks(n) : n) * size;
        int mine = save_has_part(s, length);
        if (mine) save_read(s, of, number, unit, padded, wide, at, n);
        for (int64_t i = 0; i < n && mine && from == half; i++) half[i] = float_to_bf16(wide[i]);
        for (int64_t b = 0; b < int8_blocks(n) && mine && (from == bytes || from == scales); b++) {
            scales[b] =
                quantize_int8_block(bytes + b * INT8_BLOCK, wide + b * INT8_BLOCK, min_i64(INT8_BLOCK, n - b * INT8_BLOCK));
            if (!isfinite(scales[b]))
                user_error("--export --dtype %s: tensor %s has values that are not finite, for which 8 bits have none: "
                           "look at the model's loss",
                           s->opt->dtype, t->tensor->name);
        }
        save_put(s, from, length);
    }
}

/* Of a tensor of the whole model: on which stage it is, and its number there. */
static int saver_find(const Saver *s, int index, int *number) {
    const ModelPart *part = &s->f->table->part;
    for (int stage = 0; stage < part->pp; stage++) {
        const TensorTable *t = &s->parts[stage * part->tp];
        for (*number = 0; *number < t->num_tensors; ++*number)
            if (t->tensors[*number].index == index && !t->tensors[*number].is_tied_copy) return stage;
    }
    return -1;
}

/* All bytes of all files, in order: unit after unit is gathered, and freed. */
static void save_stream(Saver *s) {
    const Unit *now = NULL;
    const float *whole = NULL;
    StateKind kind = STATES;
    for (s->file = 0, s->chunk = 0; s->file < s->files->num_files;
         s->chunk += output_file_chunks(&s->files->files[s->file++])) {
        const OutputFile *file = &s->files->files[s->file];
        s->offset = 0;
        save_put(s, file->header, file->header_bytes);
        for (int i = file->first; i < file->first + file->count; i++) {
            const OutputTensor *t = &s->files->tensors[i];
            int number = t->tensor->index, stage = s->parts ? saver_find(s, t->tensor->index, &number) : 0;
            const TensorTable *of = s->parts ? &s->parts[stage * s->f->table->part.tp] : s->f->table;
            const Unit *u = &of->units[of->tensors[number].unit];
            if (u != now || t->kind != kind) {
                if (now && !s->parts) fsdp_release_state(s->f, whole);
                whole = s->parts ? unit_of_all(s, stage, u, t->kind)
                                 : fsdp_gather_state(s->f, &s->f->units[u - of->units], t->kind);
                now = u, kind = t->kind;
            }
            save_tensor(s, t, of, number, whole, unit_padded(s->f, u));
            comm_alive(s->f->comm);
        }
    }
    if (now && !s->parts) fsdp_release_state(s->f, whole);
}

/* Rank 0 makes the files, each as long as it will be: a disk without room says so now. */
static void save_make_files(Saver *s) {
    char path[4096 + 128];
    if (s->files == &s->checkpoint && mkdir(s->dir, 0777))
        user_error("cannot make %s: %s; the checkpoint before it is untouched", s->dir, strerror(errno));
    for (int i = 0; i < s->files->num_files; i++) {
        out_path(s, path, sizeof path, i, s->suffix);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), failed = fd < 0;
#ifdef __linux__
        failed = failed || (fallocate(fd, 0, 0, s->files->files[i].bytes) && errno != EOPNOTSUPP && errno != ENOSYS);
#endif
        if (failed || ftruncate(fd, s->files->files[i].bytes)) save_failed(s, "make", path, errno);
        close(fd);
    }
}

/* Starts to write `files` into s->dir: returns once all of this rank's chunks are filled, and, unless they have buffers
 * of their own, written. */
static void save_start(Saver *s, const OutputFiles *files, const char *suffix) {
    Comm *comm = s->f->comm;
    s->files = files, s->suffix = suffix;
    s->own = files->chunks / comm->mesh.world + (comm->rank < files->chunks % comm->mesh.world);
    s->filled = s->written = s->done = 0;
    if (comm->rank == 0) save_make_files(s);
    comm_barrier(comm, "saving: files made");
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    if (pthread_create(&s->writer, NULL, save_write, s))
        run_failure("the thread that writes files could not be started");
    save_stream(s);
}

static int save_is_writing(Saver *s) { return s->files && !__atomic_load_n(&s->done, __ATOMIC_ACQUIRE); }

/* Until all ranks' chunks are on their disks. */
static void save_finish(Saver *s) {
    save_await(s, 1);
    pthread_join(s->writer, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->moved);
    comm_barrier(s->f->comm, "saving: chunks written");
}

/* What stands beside the weights in any directory: config.json, indices, the tokenizer. Written, and kept in `c` for
 * their checksums. */
static void save_companions(Saver *s, Companions *c) {
    static const char *const stems[] = {"model", "adapter_model", "optimizer"},
                             *const indices[] = {"model.safetensors.index.json", "adapter_model.safetensors.index.json",
                                                 "optimizer.safetensors.index.json"};
    int adapters = s->files->tensors[0].tensor->row->unit == UNIT_ADAPTERS;
    memset(c, 0, sizeof *c);
    CompanionFile *file = companion_add(c, adapters ? "adapter_config.json" : "config.json");
    FILE *f = open_memstream(&file->text, &file->length);
    if (!f) run_failure("out of memory");
    if (adapters) adapters_config_write(s->f->config, f);
    else config_write_json(s->f->config, s->files->dtype == ST_BF16 ? "bfloat16" : "float32", s->files->base, f);
    memory_file(f, &file->text, &file->length);
    for (int i = 0; i < 3; i++) {
        size_t length;
        char *text = output_files_index(s->files, stems[i], &length);
        if (!text) continue;
        file = companion_add(c, indices[i]);
        file->text = text, file->length = length;
    }
    if (s->tokenizer) {
        file = companion_add(c, "tokenizer.model");
        file->text = read_file(s->tokenizer, &file->length);
        if (!file->text) user_error("cannot read the tokenizer %s: %s", s->tokenizer, strerror(errno));
    }
    for (int i = 0; i < c->count; i++) write_new_file(s->dir, c->files[i].name, c->files[i].text, c->files[i].length);
}

static void companions_free(Companions *c) {
    for (int i = 0; i < c->count; i++) free(c->files[i].text);
}

/* The checkpoint becomes one, by its name: everything in it is on the disk before, and the name is before older ones
 * go. */
static void checkpoint_commit(Saver *s) {
    Comm *comm = s->f->comm;
    int world = comm->mesh.world;
    int64_t share = saver_share(s, s->files);
    Phase before = comm_phase(comm, PHASE_SAVING);
    double start = seconds_now();
    save_finish(s);
    uint32_t *all = (uint32_t *)checked_malloc(sizeof *all * (size_t)(share * world)),
             *sums = (uint32_t *)checked_malloc(sizeof *sums * (size_t)(s->files->chunks + 1));
    all_gather_now(comm, AXIS_WORLD, "saving: checksums", s->sums, all, sizeof *all * (size_t)share);
    for (int64_t id = 0; id < s->files->chunks; id++) sums[id] = all[id % world * share + id / world];
    if (comm->rank == 0) {
        Setting now[SETTINGS];
        Companions beside;
        char path[4096], *text, *whole;
        size_t length;
        int as_it_was = s->resume_from->dir[0] && s->resume_from->progress.step == s->progress.step,
            rows = settings_in_force(now, s->opt, &comm->mesh, s->progress.data_fingerprint, s->base_fingerprint);
        save_companions(s, &beside);
        text = trainer_text(&s->progress, as_it_was ? s->resume_from->settings : now,
                            as_it_was ? s->resume_from->num_settings : rows, s->files, sums, &beside,
                            &length); // those that made it
        whole = (char *)checked_malloc(length + 64);
        memcpy(whole, text, length);
        size_t more =
            (size_t)snprintf(whole + length, 64, ",\n\"crc32\":%lu}\n", crc32(0, (const Bytef *)text, (uInt)length));
        write_new_file(s->dir, "trainer.json", whole, length + more);
        sync_directory(s->dir);
        checkpoint_path(path, sizeof path, s->opt->out, s->progress.step);
        if (rename(s->dir, path)) save_failed(s, "rename to", path, errno);
        sync_directory(s->opt->out);
        update_latest_link(s->opt->out, s->progress.step);
        remove_old_checkpoints(s->opt->out, s->opt->keep);
        double end = seconds_now();
        printf("step %6" PRId64 " | saved %s, %.1f MB in %.2f s", s->progress.step, path,
               12e-6 * (double)s->whole->num_trained, end - s->start);
        if (!strcmp(s->opt->save_mode, "async"))
            printf(", in %.2f s of which training stood still", s->held + end - start);
        printf("\n");
        fflush(stdout);
        free(text), free(whole), companions_free(&beside);
    }
    free(all), free(sums);
    s->files = NULL;
    comm_barrier(comm, "saving: done");
    comm_phase(comm, before);
}

/* Saves all state. --save-mode async: returns when it is copied; it becomes a checkpoint by a later checkpoint_commit,
 * of all ranks alike. */
static void checkpoint_save(Saver *s, const Progress *at) {
    Comm *comm = s->f->comm;
    Phase before = comm_phase(comm, PHASE_SAVING);
    if (s->files) checkpoint_commit(s); // one at a time
    s->progress = *at, s->start = seconds_now(), s->saved = at->step;
    if (s->f->fingerprints) fsdp_check_replicas(s->f, at->step); // any of them may write
    uint64_t name = mix64((uint64_t)getpid() ^ (uint64_t)time(NULL) << 32 ^ (uint64_t)(seconds_now() * 1e9)),
             *names = (uint64_t *)checked_malloc(sizeof name * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, "saving: name", &name, names, sizeof name);
    snprintf(s->dir, sizeof s->dir, "%s/" SAVING "step-%0*" PRId64 "-%016" PRIx64, s->opt->out, STEP_DIGITS, at->step,
             names[0]);
    free(names);
    save_start(s, &s->checkpoint, "");
    s->held = seconds_now() - s->start;
    if (strcmp(s->opt->save_mode, "async")) checkpoint_commit(s);
    comm_phase(comm, before);
}

// ---------------------------------------------------------------------------
// signals: SIGUSR1 saves and goes on; SIGUSR2 and SIGTERM save and end. Ranks tell each other at the end of a step, so
// that all save the same

enum { SIGNAL_SAVE = 1, SIGNAL_END = 2 };
static volatile sig_atomic_t save_signals, end_signals; // how many came to this process so far

static void signal_count(int number) {
    if (number == SIGUSR1) save_signals = save_signals + 1;
    else end_signals = end_signals + 1;
}

static void signals_install(int terminates) {
    struct sigaction action = ZERO;
    action.sa_handler = signal_count;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    if (terminates) sigaction(SIGTERM, &action, NULL);
    signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error like any other
}
#endif
