/* checkpoint.h: what a checkpoint is, and how a run resumes from one.
 *
 * A checkpoint is a Hugging Face directory with the weights in fp32, plus the optimizer's moments and trainer.json:
 * step, options, and a CRC-32 of each 4 MiB chunk of each file. A caller may rely on: checkpoints do not depend on the
 * parallel layout; every file is compared with its checksums before anything of it is used.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H
#include "../dataloader.h" // defines: Sampler, sampler_position
#include "options.h"       // defines: Options, option_text
#include "peft.h"          // defines: adapters_open
#include "out_dir.h"       // defines: newest_checkpoint, checkpoint_path
#include "safetensors.h"   // defines: StFiles, st_read, OutputFiles
#include "sharded_state.h" // defines: fsdp_set_state, fsdp_set_base, random_weights
#include <aio.h>
#include <zlib.h> // defines: crc32
#include <fcntl.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// trainer.json: where a run stands, under which options, and the checksums of the files beside it

typedef struct {
    int64_t step, updates, skips;    // so far; steps that changed the weights, that did not
    int64_t samples;                 // consumed so far, by all ranks
    int64_t epoch, samples_in_epoch; // of these, the last ones' epoch, and how many in it
    uint64_t data_fingerprint;       // of the token files
} Progress;

/* What a step consumes, whatever divides it among ranks. */
static int64_t samples_per_step(const Options *o, const Mesh *mesh) {
    return (int64_t)mesh_data_ranks(mesh) * o->batch * o->accum;
}

/* The options that change what is computed; how it is divided among ranks does not. */
static const char *const training_options[] = {"seq",    "doc-mask", "tail",         "steps",       "lr",
                                               "min-lr", "warmup",   "weight-decay", "beta1",       "beta2",
                                               "eps",    "clip",     "seed",         "reduce-dtype"};
static const char *const adapter_options[] = {"lora-rank", "lora-alpha", "lora-targets",
                                              "base"}; // … and, where there are adapters, these
enum {
    TRAINING_OPTIONS = sizeof training_options / sizeof training_options[0],
    ADAPTER_OPTIONS = sizeof adapter_options / sizeof adapter_options[0],
    SETTINGS = TRAINING_OPTIONS + ADAPTER_OPTIONS + 4
};

/* What must be as it was, to go on: rows of a name and its value. */
typedef struct {
    char name[24], value[64];
} Setting;
/* Returns how many. `base`: the fingerprint of what adapters stand beside. */
static int settings_in_force(Setting rows[SETTINGS], const Options *o, const Mesh *mesh, uint64_t data, uint64_t base) {
    int count = o->lora_rank ? TRAINING_OPTIONS + ADAPTER_OPTIONS : TRAINING_OPTIONS;
    for (int i = 0; i < count; i++) {
        const char *name = i < TRAINING_OPTIONS ? training_options[i] : adapter_options[i - TRAINING_OPTIONS];
        snprintf(rows[i].name, sizeof rows[i].name, "--%s", name);
        option_text(o, name, rows[i].value, sizeof rows[i].value);
        if (!strcmp(name, "steps") && o->min_lr == o->lr)
            snprintf(rows[i].value, sizeof rows[i].value, "any"); // only the schedule knows them
    }
    Setting *more = rows + count;
    if (o->lora_rank)
        snprintf(more->name, sizeof more->name, "base model"),
            snprintf(more->value, sizeof more->value, "%016" PRIx64, base), more++, count++;
    snprintf(more[0].name, sizeof more->name, "samples a step"),
        snprintf(more[0].value, sizeof more->value, "%" PRId64, samples_per_step(o, mesh));
    snprintf(more[1].name, sizeof more->name, "precision"), snprintf(more[1].value, sizeof more->value, PRECISION_NAME);
    snprintf(more[2].name, sizeof more->name, "data"), snprintf(more[2].value, sizeof more->value, "%016" PRIx64, data);
    return count + 3;
}

static int64_t trainer_integer(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble) ||
        !(item->valuedouble >= 0 && item->valuedouble <= 9e15))
        user_error("%s: \"%s\" is missing or no whole number: the file is damaged", path, key);
    return (int64_t)item->valuedouble;
}

static uint32_t *chunk_sums(const char *text, size_t length) {
    uint32_t *sums = (uint32_t *)checked_malloc(sizeof *sums * (length / FILE_CHUNK_BYTES + 1));
    for (size_t at = 0; at < length; at += FILE_CHUNK_BYTES)
        sums[at / FILE_CHUNK_BYTES] =
            (uint32_t)crc32(0, (const Bytef *)text + at, (uInt)min_i64(FILE_CHUNK_BYTES, (int64_t)(length - at)));
    return sums;
}

/* The small files beside the weights, which rank 0 has in memory. */
typedef struct {
    const char *name;
    char *text;
    size_t length;
} CompanionFile;
typedef struct {
    CompanionFile files[8];
    int count;
} Companions;

static CompanionFile *companion_add(Companions *c, const char *name) {
    c->files[c->count].name = name;
    return &c->files[c->count++];
}

static void trainer_file(FILE *f, int first, const char *name, int64_t bytes, const uint32_t *sums, int64_t chunks) {
    fprintf(f, "%s\n\"%s\":{\"bytes\":%" PRId64 ",\"crc32\":[", first ? "" : ",", name, bytes);
    for (int64_t c = 0; c < chunks; c++) fprintf(f, "%s%u", c ? "," : "", sums[c]);
    fprintf(f, "]}");
}

/* The text of trainer.json but for its last line, the text's own checksum. `sums`: of all chunks of `files`, file by
 * file. */
static char *trainer_text(const Progress *at, const Setting *rows, int num_rows, const OutputFiles *files,
                          const uint32_t *sums, const Companions *beside, size_t *length) {
    char *text;
    FILE *f = open_memstream(&text, length);
    if (!f) run_failure("out of memory");
    fprintf(f,
            "{\n\"format\":1,\n\"step\":%" PRId64 ",\"updates\":%" PRId64 ",\"skips\":%" PRId64 ",\"samples\":%" PRId64
            ",\"epoch\":%" PRId64 ",\"samples_of_epoch\":%" PRId64 ",\n\"settings\":{",
            at->step, at->updates, at->skips, at->samples, at->epoch, at->samples_in_epoch);
    for (int i = 0; i < num_rows; i++) fprintf(f, "%s\"%s\":\"%s\"", i ? "," : "", rows[i].name, rows[i].value);
    fprintf(f, "},\n\"chunk_bytes\":%d,\n\"files\":{", FILE_CHUNK_BYTES);
    for (int i = 0; i < files->num_files; sums += output_file_chunks(&files->files[i++]))
        trainer_file(f, i == 0, files->files[i].name, files->files[i].bytes, sums,
                     output_file_chunks(&files->files[i]));
    for (int i = 0; i < beside->count; i++) {
        uint32_t *of_file = chunk_sums(beside->files[i].text, beside->files[i].length);
        trainer_file(f, 0, beside->files[i].name, (int64_t)beside->files[i].length, of_file,
                     chunks_of((int64_t)beside->files[i].length));
        free(of_file);
    }
    fprintf(f, "\n}");
    return memory_file(f, &text, length);
}

/* The checksums of a file of `length` bytes, as trainer.json has them. */
static uint32_t *file_sums(const cJSON *files, const char *trainer, const char *path, int64_t length) {
    const char *name = strrchr(path, '/') + 1;
    const cJSON *file = cJSON_GetObjectItemCaseSensitive(files, name),
                *list = cJSON_GetObjectItemCaseSensitive(file, "crc32"), *item;
    if (!file) user_error("%s is no file of this checkpoint: %s does not list it", path, trainer);
    int64_t bytes = trainer_integer(file, trainer, "bytes"), n = 0;
    if (bytes != length)
        user_error("%s has %" PRId64 " bytes, %" PRId64 " were written: it is truncated or damaged", path, length,
                   bytes);
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != chunks_of(bytes))
        user_error("%s: %s has %" PRId64 " chunks and %d checksums: the file is damaged", trainer, name,
                   chunks_of(bytes), cJSON_GetArraySize(list));
    uint32_t *sums = (uint32_t *)checked_malloc(sizeof *sums * (size_t)(chunks_of(bytes) + 1));
    cJSON_ArrayForEach(item, list) sums[n++] = (uint32_t)item->valuedouble;
    return sums;
}

static void chunk_check(const char *path, int64_t chunk, const char *bytes, int64_t length, uint32_t wanted) {
    if ((uint32_t)crc32(0, (const Bytef *)bytes, (uInt)length) != wanted)
        user_error("%s is damaged: bytes %" PRId64 " to %" PRId64
                   " do not have the checksum that trainer.json has; take another checkpoint",
                   path, chunk * FILE_CHUNK_BYTES, chunk * FILE_CHUNK_BYTES + length - 1);
}

/* All files that the checkpoint lists are there; those beside the weights are as they were written. */
static void companions_check(const char *dir, const cJSON *files, const char *trainer) {
    char path[4096 + 128];
    const cJSON *file;
    cJSON_ArrayForEach(file, files) {
        const char *ending = strstr(file->string, ".safetensors");
        size_t length;
        snprintf(path, sizeof path, "%s/%s", dir, file->string);
        if (strchr(file->string, '/')) user_error("%s: \"%s\" names no file beside it", trainer, file->string);
        if (access(path, R_OK)) user_error("cannot read %s: %s; the checkpoint is not whole", path, strerror(errno));
        if (ending && !ending[12]) continue; // read later, chunk by chunk
        char *text = read_file(path, &length);
        if (!text) user_error("cannot read %s: %s", path, strerror(errno));
        uint32_t *sums = file_sums(files, trainer, path, (int64_t)length);
        for (int64_t c = 0; c < chunks_of((int64_t)length); c++)
            chunk_check(path, c, text + c * FILE_CHUNK_BYTES,
                        min_i64(FILE_CHUNK_BYTES, (int64_t)length - c * FILE_CHUNK_BYTES), sums[c]);
        free(sums), free(text);
    }
}

// ---------------------------------------------------------------------------
// resume

typedef struct {    // a checkpoint that a run goes on from
    char dir[4096]; // "": none
    Progress progress;
    StFiles weights, moments;
    uint32_t **weight_sums, **moment_sums; // of each file its chunks' CRC-32
    uint64_t fingerprint;                  // of trainer.json
    Setting settings[SETTINGS];
    int num_settings;
    int data_changed; // --allow-changes: its place in the data means nothing here
    char *changes;    // --allow-changes: what is not as it was; NULL: all is
} Checkpoint;

/* Which of the settings are not those of the checkpoint: refused, or told. */
static void settings_compare(Checkpoint *c, const cJSON *then, const Options *o, const Mesh *mesh, uint64_t data,
                             uint64_t base) {
    Setting now[SETTINGS];
    char list[2048];
    int used = 0, room = (int)sizeof list;
    c->num_settings = settings_in_force(now, o, mesh, data, base);
    for (int i = 0; i < c->num_settings; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(then, now[i].name);
        const char *was = cJSON_IsString(item) ? item->valuestring : "not told";
        c->settings[i] = now[i];
        snprintf(c->settings[i].value, sizeof c->settings[i].value, "%s", was);
        if (!strcmp(was, now[i].value)) continue;
        if (!strcmp(now[i].name, "data") || !strcmp(now[i].name, "--seq")) c->data_changed = 1; // other windows
        if (used < room)
            used += snprintf(list + used, (size_t)(room - used), "%s%s %s, was %s", used ? "; " : "", now[i].name,
                             now[i].value, was);
    }
    if (used && !o->allow_changes)
        user_error("--resume %s: this run would compute something else than the one that wrote it (%s): give the old "
                   "values, or add --allow-changes",
                   c->dir, list);
    if (used) c->changes = strdup(list);
}

/* The checkpoint's config.json must describe this model. */
static void config_compare(const char *dir, const Llama3Config *mine, const char *model) {
    char path[4096 + 32], *text[2], *line[2], *state[2];
    size_t length;
    snprintf(path, sizeof path, "%s/config.json", dir);
    Llama3Config there = config_from_json(path);
    for (int i = 0; i < 2; i++) {
        FILE *f = open_memstream(&text[i], &length);
        if (!f) run_failure("out of memory");
        config_write_json(i ? &there : mine, "float32", BASE_TRAINED, f);
        memory_file(f, &text[i], &length);
        line[i] = strtok_r(text[i], "\n", &state[i]);
    }
    while (line[0] && line[1]) {
        if (strcmp(line[0], line[1]))
            user_error("%s describes another model than --model %s: %s, expected %s", path, model,
                       line[1] + strspn(line[1], " "), line[0] + strspn(line[0], " "));
        for (int i = 0; i < 2; i++) line[i] = strtok_r(NULL, "\n", &state[i]);
    }
    free(text[0]), free(text[1]);
}

/* Where --resume points: "" with `auto` and no checkpoint in --out yet. A run's directory stands for its newest. */
static void checkpoint_find(char dir[4096], const Options *o) {
    char path[4096 + 32];
    int count, automatic = !strcmp(o->resume, "auto");
    const char *of = automatic ? o->out : o->resume;
    snprintf(dir, 4096, "%s", of);
    snprintf(path, sizeof path, "%s/trainer.json", of);
    if (!automatic && !access(path, F_OK)) return;
    int64_t newest = newest_checkpoint(of, INT64_MAX, &count);
    if (newest >= 0) checkpoint_path(dir, 4096, of, newest);
    else if (automatic) dir[0] = 0;
    else
        user_error("--resume %s: no checkpoint there; expected a directory step-%0*d, one that holds such, or auto", of,
                   STEP_DIGITS, 0);
}

static uint32_t **sums_of_files(const StFiles *s, const cJSON *files, const char *trainer) {
    uint32_t **sums = (uint32_t **)checked_malloc(sizeof *sums * (size_t)(s->num_files + 1));
    for (int i = 0; i < s->num_files; i++) {
        struct stat info;
        if (fstat(s->fds[i], &info)) user_error("cannot read %s: %s", s->paths[i], strerror(errno));
        sums[i] = file_sums(files, trainer, s->paths[i], info.st_size);
    }
    return sums;
}

/* c->dir is found: reads its trainer.json and the headers of all files, and holds them against model, options and data
 * (its fingerprint). */
static void checkpoint_open(Checkpoint *c, const Options *o, const Mesh *mesh, uint64_t data, uint64_t base,
                            const Llama3Config *config, const TensorTable *table) {
    char path[4096 + 32], own[64];
    size_t length;
    snprintf(path, sizeof path, "%s/trainer.json", c->dir);
    char *text = read_file(path, &length), *last = NULL;
    if (!text) user_error("--resume %s: cannot read %s: %s", o->resume, path, strerror(errno));
    for (char *at = text; (at = strstr(at, ",\n\"crc32\":")); at++) last = at;
    if (last) snprintf(own, sizeof own, ",\n\"crc32\":%lu}\n", crc32(0, (const Bytef *)text, (uInt)(last - text)));
    if (!last || strcmp(own, last)) user_error("%s is damaged: its checksum is not that of its text", path);
    c->fingerprint = hash_bytes(HASH_START, text, length);
    cJSON *json = cJSON_Parse(text);
    const cJSON *settings = json_object(json, path, "settings"), *files = json_object(json, path, "files");
    if (trainer_integer(json, path, "format") != 1 || trainer_integer(json, path, "chunk_bytes") != FILE_CHUNK_BYTES ||
        !settings || !files)
        user_error("%s: another version of this program wrote it", path);
    c->progress.step = trainer_integer(json, path, "step"),
    c->progress.updates = trainer_integer(json, path, "updates"),
    c->progress.skips = trainer_integer(json, path, "skips");
    c->progress.samples = trainer_integer(json, path, "samples"),
    c->progress.epoch = trainer_integer(json, path, "epoch"),
    c->progress.samples_in_epoch = trainer_integer(json, path, "samples_of_epoch");
    companions_check(c->dir, files, path);
    settings_compare(c, settings, o, mesh, data, base);
    if (config->lora_rank) adapters_open(&c->weights, c->dir, table);
    else {
        config_compare(c->dir, config, o->model);
        if (!model_weights_open(&c->weights, c->dir, table, BASE_TRAINED))
            user_error("%s has no model.safetensors", c->dir);
    }
    if (!st_open(&c->moments, c->dir, "optimizer")) user_error("%s has no optimizer.safetensors", c->dir);
    for (int i = config->lora_rank ? table_first_adapter(table) : 0; i < table->num_tensors; i++)
        st_require_tensor(&c->moments, c->dir, &table->tensors[i], out_suffixes[STATE_EXP_AVG]),
            st_require_tensor(&c->moments, c->dir, &table->tensors[i], out_suffixes[STATE_EXP_AVG_SQ]);
    c->weight_sums = sums_of_files(&c->weights, files, path), c->moment_sums = sums_of_files(&c->moments, files, path);
    cJSON_Delete(json);
    free(text);
    if (c->progress.step > o->steps)
        user_error("%s stands at step %" PRId64 ", further than --steps %d", c->dir, c->progress.step, o->steps);
}

static void checkpoint_close(Checkpoint *c) {
    for (int i = 0; i < c->weights.num_files && c->dir[0]; i++) free(c->weight_sums[i]);
    for (int i = 0; i < c->moments.num_files && c->dir[0]; i++) free(c->moment_sums[i]);
    free(c->weight_sums), free(c->moment_sums), free(c->changes);
    st_close(&c->weights), st_close(&c->moments);
}

typedef struct { // of one rank: the chunk that was read last, and the one behind it on its way
    const Checkpoint *resume_from;
    const StFiles *of;   // NULL: none yet
    int file, coming;    // coming: `next` is under way, into bytes[1]
    int64_t chunk, have; // which of its file; its bytes
    char *bytes[2];      // (FILE_CHUNK_BYTES)
    struct aiocb next;
} ChunkReader;

/* What the next chunk's reading yields: its bytes, or -1 and errno. */
static int64_t chunk_arrives(ChunkReader *r) {
    const struct aiocb *const waits[] = {&r->next};
    while (aio_error(&r->next) == EINPROGRESS) aio_suspend(waits, 1, NULL);
    r->coming = 0;
    errno = aio_error(&r->next);
    return aio_return(&r->next);
}

/* Chunk `chunk` of a file into bytes[0], checked; the disk goes on with the next one meanwhile. */
static void chunk_read(ChunkReader *r, const StFiles *of, int file, int64_t chunk) {
    if (r->of == of && r->file == file && r->chunk == chunk) return;
    uint32_t wanted =
        (of == &r->resume_from->weights ? r->resume_from->weight_sums : r->resume_from->moment_sums)[file][chunk];
    int64_t at = chunk * FILE_CHUNK_BYTES, came = r->coming ? chunk_arrives(r) : 0;
    if (r->of == of && r->file == file && r->chunk + 1 == chunk && came > 0) {
        char *read = r->bytes[1];
        r->bytes[1] = r->bytes[0], r->bytes[0] = read;
    } else {
        came = pread(of->fds[file], r->bytes[0], FILE_CHUNK_BYTES, at);
    }
    if (came <= 0)
        user_error("%s cannot be read from byte %" PRId64 " on: %s", of->paths[file], at,
                   came ? strerror(errno) : "it ends there");
    r->of = of, r->file = file, r->chunk = chunk, r->have = came;
    posix_fadvise(of->fds[file], at, FILE_CHUNK_BYTES, POSIX_FADV_DONTNEED); // pages are dear while state is filled
    memset(&r->next, 0, sizeof r->next);
    r->next.aio_fildes = of->fds[file], r->next.aio_offset = at + FILE_CHUNK_BYTES, r->next.aio_buf = r->bytes[1],
    r->next.aio_nbytes = FILE_CHUNK_BYTES;
    r->coming = came == FILE_CHUNK_BYTES && aio_read(&r->next) == 0;
    chunk_check(of->paths[file], chunk, r->bytes[0], came, wanted);
}

static void fill_from_checkpoint(const Fsdp *f, void *reader, StateKind kind, float *out, const Tensor *tensor,
                                 int64_t first, int64_t count) {
    ChunkReader *r = (ChunkReader *)reader;
    const StFiles *of = kind == STATE_MASTER ? &r->resume_from->weights : &r->resume_from->moments;
    char name[96], *to = (char *)out;
    (void)f;
    snprintf(name, sizeof name, "%s%s", tensor->name, out_suffixes[kind]);
    const StTensor *t = st_find(of, name);
    int64_t at = t->begin + first * (int64_t)sizeof(float), end = at + count * (int64_t)sizeof(float);
    while (at < end) {
        chunk_read(r, of, t->file, at / FILE_CHUNK_BYTES);
        int64_t skip = at % FILE_CHUNK_BYTES, n = min_i64(end - at, r->have - skip);
        if (n <= 0) user_error("%s ends within tensor %s", t->path, name);
        memcpy(to, r->bytes[0] + skip, (size_t)n);
        at += n, to += n;
    }
}

/* All of this rank's state, as it was. */
static void checkpoint_load(Fsdp *f, const Checkpoint *c) {
    ChunkReader r = ZERO;
    r.resume_from = c;
    for (int i = 0; i < 2; i++) r.bytes[i] = (char *)checked_malloc(FILE_CHUNK_BYTES);
    fsdp_set_state(f, STATE_MASTER, fill_from_checkpoint, &r);
    fsdp_set_state(f, STATE_EXP_AVG, fill_from_checkpoint, &r);
    fsdp_set_state(f, STATE_EXP_AVG_SQ, fill_from_checkpoint, &r);
    if (r.coming) chunk_arrives(&r);
    for (int i = 0; i < 2; i++) free(r.bytes[i]);
}

static void fill_from_files(const Fsdp *f, void *files, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                            int64_t count) {
    (void)f, (void)kind;
    st_read(st_find((const StFiles *)files, tensor->name), out, first, count);
}
static int blocks_from_files(void *files, int8_t *out, float *scales, const Tensor *tensor, int64_t first,
                             int64_t count) {
    const StTensor *t = st_find((const StFiles *)files, tensor->name);
    if (t->dtype == ST_I8) st_read_quantized(t, out, scales, first, count);
    return t->dtype == ST_I8;
}

/* The weights that a run begins with, each rank its own ranges: of a Hugging Face directory, or NULL, by the seed;
 * adapters of files of their own, or by the seed; or what is trained as a checkpoint has it. */
static void weights_load(Fsdp *f, StFiles *model, StFiles *adapters, const Checkpoint *from) {
    StFiles *trained = f->config->base == BASE_TRAINED ? model : adapters;
    if (model) fsdp_set_base(f, fill_from_files, blocks_from_files, model);
    else fsdp_set_base(f, random_weights, NULL, &f->seed);
    if (from->dir[0]) checkpoint_load(f, from);
    else if (trained) fsdp_set_state(f, STATE_MASTER, fill_from_files, trained);
    else fsdp_set_state(f, STATE_MASTER, random_weights, &f->seed);
}

#endif
