/* checkpoint.h: what outlives a run: checkpoints, exported models, and the directory under --out.
 *
 * Owns: the saving and reading of all state, and who may write under --out. A caller may rely on: a checkpoint's bytes
 * depend on the state alone, never on the layout that wrote it; each 4 MiB chunk of a file is written by one rank and
 * has a checksum; nobody holds more than a unit above its state; a checkpoint is whole or it is not there, whenever the
 * run dies; what is read is held against its checksums; nothing that exists is overwritten.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H
#include "../lora.h"
#include "options.h"       // defines: Options, option_text
#include "../dataloader.h" // defines: Sampler, sampler_place
#include <aio.h>
#include <dirent.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <zlib.h> // defines: crc32

// ---------------------------------------------------------------------------
// files and directories that survive a crash

static void write_all(int fd, const char *path, const void *data, size_t n, int64_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t wrote = pwrite(fd, (const char *)data + done, n - done, at + (int64_t)done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) user_error("cannot write %s: %s", path, strerror(wrote ? errno : EIO));
        done += (size_t)wrote;
    }
}

static void sync_directory(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd)) user_error("cannot write directory %s to disk: %s", path, strerror(errno));
    close(fd);
}

/* A small file, new and on the disk. */
static void write_new_file(const char *dir, const char *name, const void *text, size_t length) {
    char path[4096 + 128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) user_error("cannot make %s: %s", path, strerror(errno));
    write_all(fd, path, text, length, 0);
    if (fsync(fd) || close(fd)) user_error("cannot write %s: %s", path, strerror(errno));
}

/* Makes every folder of `path`, as mkdir -p does, and writes its name to disk. 0 or errno. */
static int make_directories(const char *path) {
    char part[4096 + 4];
    for (size_t i = 1; i <= strlen(path) && i < 4096; i++) {
        if (path[i] != '/' && path[i]) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) == 0) {
            strcpy(part + i, "/..");
            int above = open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                failed = above >= 0 && fsync(above) ? errno : 0; // one that may not be read is not this user's
            if (above >= 0) close(above);
            if (failed) return failed;
        } else if (errno != EEXIST) return errno;
    }
    struct stat info;
    if (stat(path, &info)) return errno;
    return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

/* Removes a directory of files; what cannot be removed stays. */
static void remove_directory(const char *dir) {
    char path[4096 + 300];
    struct dirent *item;
    DIR *d = opendir(dir);
    while (d && (item = readdir(d))) {
        snprintf(path, sizeof path, "%s/%s", dir, item->d_name);
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, "..")) unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

/* All ranks have come here, and each did its part. */
static void comm_barrier(Comm *comm, const char *what) {
    int *all = (int *)checked_malloc(sizeof(int) * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, what, &comm->rank, all, sizeof(int));
    free(all);
}

// ---------------------------------------------------------------------------
// the directory under --out: one run at a time, and the checkpoints in it

#define SAVING ".saving-"     // a checkpoint that is being written, and …
#define DELETING ".deleting-" // … one that is being removed: of a run that died, both are rubbish
enum { STEP_DIGITS = 8 };

/* The step of a checkpoint's name, step-NNNNNNNN; -1: it is no such name. */
static int64_t step_from_name(const char *name) {
    size_t digits = strlen(name) - 5;
    if (strncmp(name, "step-", 5) || digits < STEP_DIGITS || digits > 15 || strspn(name + 5, "0123456789") != digits)
        return -1;
    return strtoll(name + 5, NULL, 10);
}
static void checkpoint_path(char *path, size_t size, const char *out, int64_t step) {
    snprintf(path, size, "%s/step-%0*" PRId64, out, STEP_DIGITS, step);
}

/* The newest checkpoint in `out` before step `below`; -1: there is none. */
static int64_t newest_checkpoint(const char *out, int64_t below, int *count) {
    int64_t newest = -1;
    struct dirent *item;
    DIR *d = opendir(out);
    *count = 0;
    while (d && (item = readdir(d))) {
        int64_t step = step_from_name(item->d_name);
        if (step >= 0) ++*count;
        if (step < below) newest = max_i64(newest, step);
    }
    if (d) closedir(d);
    return newest;
}

/* `latest` points to a checkpoint: by a new link, renamed over the old one. */
static void update_latest_link(const char *out, int64_t step) {
    char link[4096 + 32], fresh[4096 + 32], target[64], now[64] = "";
    snprintf(target, sizeof target, "step-%0*" PRId64, STEP_DIGITS, step);
    snprintf(link, sizeof link, "%s/latest", out);
    snprintf(fresh, sizeof fresh, "%s/" SAVING "latest", out);
    if (readlink(link, now, sizeof now - 1) > 0 && !strcmp(now, target)) return;
    unlink(fresh);
    if (symlink(target, fresh) || rename(fresh, link)) user_error("cannot make %s: %s", link, strerror(errno));
    sync_directory(out);
}

static void remove_leftovers(const char *out) {
    char path[4096 + 300];
    struct dirent *item;
    DIR *d = opendir(out);
    while (d && (item = readdir(d))) {
        if (strncmp(item->d_name, SAVING, strlen(SAVING)) && strncmp(item->d_name, DELETING, strlen(DELETING)))
            continue;
        snprintf(path, sizeof path, "%s/%s", out, item->d_name);
        if (unlink(path)) remove_directory(path);
    }
    if (d) closedir(d);
}

/* Removes the oldest checkpoints but `keep`; 0: none. First by name, so that none is ever there in part. */
static void remove_old_checkpoints(const char *out, int keep) {
    char path[4096], gone[4096 + 32];
    int count;
    int64_t step = INT64_MAX;
    for (int i = 0; keep && (step = newest_checkpoint(out, step, &count)) >= 0; i++) {
        if (i < keep) continue;
        checkpoint_path(path, sizeof path, out, step);
        snprintf(gone, sizeof gone, "%s/" DELETING "%" PRId64, out, step);
        remove_directory(gone);
        if (rename(path, gone)) user_error("cannot remove the checkpoint %s: %s", path, strerror(errno));
        sync_directory(out);
        remove_directory(gone);
    }
}

/* Drops the lines of steps after `step` from a file of lines {"step":N,…}, and a last line without an end. */
static void truncate_after_step(const char *out, const char *name, int64_t step) {
    char path[4096], line[64], *at;
    snprintf(path, sizeof path, "%s/%s", out, name);
    size_t length;
    char *text = read_file(path, &length), *end = NULL;
    if (!text) return; // of a run that died before its first step
    for (at = text; at < text + length; at = end + 1) {
        end = (char *)memchr(at, '\n', (size_t)(text + length - at));
        if (!end) break;
        snprintf(line, sizeof line, "%.40s", at);
        const char *number = strstr(line, "\"step\":");
        if (number && strtoll(number + 7, NULL, 10) > step) break;
    }
    if (at < text + length && truncate(path, at - text))
        user_error("cannot cut %s back to step %" PRId64 ": %s", path, step, strerror(errno));
    free(text);
}

/* Claims --out for this run and makes it ready. `from`: the directory of the checkpoint it goes on from; "": it begins.
 * `resumes`: it may hold this run's earlier part. Returns the lock, which lasts as long as the process. */
static int out_directory_open(const char *out, const char *from, int64_t step, int resumes, int keep) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "config.txt",
                                        "layout.json",   "plan.json",     "ledger.json"};
    char path[4096], real[4096], parent[4096];
    int failed = make_directories(out), holds = 0, count;
    if (failed) user_error("cannot make --out %s: %s", out, strerror(failed));
    snprintf(path, sizeof path, "%s/lock", out);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0) user_error("cannot write into --out %s: %s", out, strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB))
        user_error(
            "--out %s: another run writes there now (it holds %s): choose another directory, or wait for its end", out,
            path);
    int64_t newest = newest_checkpoint(out, INT64_MAX, &count);
    for (int i = 0; i < (int)(sizeof names / sizeof *names) && !holds; i++) {
        snprintf(path, sizeof path, "%s/%s", out, names[i]);
        if (!access(path, F_OK)) holds = i + 1;
    }
    int same = resumes && (!from[0] || (realpath(from, real) && (*strrchr(real, '/') = 0, realpath(out, parent)) &&
                                        !strcmp(real, parent)));
    if ((holds || count) && !same)
        user_error("--out %s already holds a run (%s): choose another directory, remove that one, or go on from it "
                   "with --resume auto",
                   out, count ? "checkpoints" : names[holds - 1]);
    if (newest > step)
        user_error("--out %s holds step-%0*" PRId64 ", later than step %" PRId64
                   " of %s: remove it, choose another --out, or go on from it with --resume auto",
                   out, STEP_DIGITS, newest, step, from);
    remove_leftovers(out);
    if (newest >= 0) update_latest_link(out, newest);
    remove_old_checkpoints(out, keep); // a run that died may have had no time to
    truncate_after_step(out, "metrics.jsonl", step);
    truncate_after_step(out, "samples.jsonl", step);
    return lock;
}

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
    else fsdp_set_base(f, fill_at_random, NULL, &f->seed);
    if (from->dir[0]) checkpoint_load(f, from);
    else if (trained) fsdp_set_state(f, STATE_MASTER, fill_from_files, trained);
    else fsdp_set_state(f, STATE_MASTER, fill_at_random, &f->seed);
}

// ---------------------------------------------------------------------------
// save: units are gathered in the order of the files; chunks are filled by the ranks whose they are, and written by a
// thread

typedef struct Saver {
    Fsdp *f;
    const Options *opt;
    const Checkpoint *resume_from; // where the run goes on
    uint64_t base_fingerprint;     // the fingerprint of what adapters stand beside
    const char *tokenizer;         // its file, which goes along; NULL: none
    const TensorTable *whole;      // the model, in the order of the files
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

/* What --dtype makes of weights: which are in 8 bits, and what the others are; beside some in 8 bits, what this build
 * computes in. */
static BaseKind export_base(const Options *o) {
    return !strcmp(o->dtype, "int8") ? BASE_INT8 : !strcmp(o->dtype, "int8:all") ? BASE_INT8_ALL : BASE_TRAINED;
}
static StDtype export_dtype(const Options *o) {
    return strcmp(export_base(o) > BASE_FROZEN ? PRECISION_NAME : o->dtype, "bf16") ? ST_F32 : ST_BF16;
}

/* What --export writes: the model, with --merge as adapters make it, or the adapters alone. */
static void export_files(OutputFiles *files, const TensorTable *whole, const Options *o) {
    const StateKind weights[] = {STATE_MASTER};
    int first = table_first_adapter(whole), alone = first < whole->num_tensors && !o->merge;
    files->base = export_base(o), files->dtype = export_dtype(o);
    output_files_add(files, whole, alone ? first : 0, alone ? whole->num_tensors : first,
                     alone ? adapters_stem : "model", weights, 1);
}

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
    if (part.tp == 1 && part.stages == 1 && !part.tied_apart) return;
    s->parts = (TensorTable *)checked_malloc(sizeof(TensorTable) * (size_t)(part.stages * part.tp));
    for (part.stage = 0; part.stage < part.stages; part.stage++)
        for (part.tp_rank = 0; part.tp_rank < part.tp; part.tp_rank++)
            table_open(&s->parts[part.stage * part.tp + part.tp_rank], config, s->f->table->wrap, &part);
    for (int p = 0; p < part.stages; p++)
        for (int u = 0; u < s->parts[p * part.tp].num_units; u++)
            if (!s->parts[p * part.tp].units[u].frozen || s->f->how.merges)
                largest = max_i64(largest, unit_padded(s->f, &s->parts[p * part.tp].units[u]));
    s->of_parts = (float *)arena_alloc(s->f->dev, MEM_COMM, "a unit of all ranks that have parts of it",
                                       sizeof(float) * (size_t)(largest * part.tp));
}

/* Books what saving needs: a few chunks, or, where they are written while the run goes on, a copy of what this rank
 * writes. */
static void saver_open(Saver *s, Fsdp *f, const Llama3Config *config, const TensorTable *whole, const Options *o,
                       const Checkpoint *from, const char *tokenizer, int trains, int exports) {
    const StateKind master[] = {STATE_MASTER}, moments[] = {STATE_EXP_AVG, STATE_EXP_AVG_SQ};
    memset(s, 0, sizeof *s);
    s->f = f, s->opt = o, s->resume_from = from, s->tokenizer = tokenizer, s->whole = whole, s->saved = -1;
    if (trains && from->dir[0]) checkpoint_path(s->dir, sizeof s->dir, o->out, from->progress.step);
    if (s->dir[0] && !access(s->dir, F_OK))
        s->saved = from->progress.step; // what is there already is not written again
    int adapters = config->lora_rank > 0, first = adapters ? table_first_adapter(whole) : 0;
    if (trains)
        output_files_add(&s->checkpoint, whole, first, whole->num_tensors, adapters ? adapters_stem : "model", master,
                         1),
            output_files_add(&s->checkpoint, whole, first, whole->num_tensors, "optimizer", moments, 2);
    if (exports) export_files(&s->exported, whole, o);
    int64_t share = max_i64(saver_share(s, &s->checkpoint), saver_share(s, &s->exported));
    s->num_buffers = (int)min_i64(CHUNKS_IN_FLIGHT, share);
    if (trains && !strcmp(o->save_mode, "async"))
        s->num_buffers = (int)max_i64(s->num_buffers, saver_share(s, &s->checkpoint));
    if (!share) return;
    saver_parts(s, config);
    uintptr_t buffers = (uintptr_t)arena_alloc(f->dev, MEM_HOST, "chunks to be written",
                                               (size_t)s->num_buffers * FILE_CHUNK_BYTES + PAGE_BYTES);
    s->buffers = (char *)((buffers + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1));
    if (!f->dev->walk && trains && !strcmp(o->save_mode, "async"))
        memset(s->buffers, 0,
               (size_t)s->num_buffers *
                   FILE_CHUNK_BYTES); // the first save shall not wait for the system to find its memory
    s->sums = (uint32_t *)arena_alloc(f->dev, MEM_HOST, "checksums", sizeof(uint32_t) * (size_t)share);
}

static void saver_close(Saver *s) {
    const ModelPart *part = s->f ? &s->f->table->part : NULL;
    for (int i = 0; s->parts && i < part->stages * part->tp; i++) table_close(&s->parts[i]);
    free(s->parts);
    device_forget_event(s->passed.arrived);
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
    if (stage == part->stage) {
        FsdpUnit *mine = &f->units[u - s->parts[stage * part->tp].units];
        const float *state = unit_state(f, mine, kind);
        all_gather_now(f->comm, AXIS_TP, u->name, state, s->of_parts, bytes);
        unit_state_free(f, state);
    }
    int passes = (part->stage - stage + part->stages) % part->stages; // ranks that had it before this one
    for (int sends = 0; sends < 2 && part->stages > 1; sends++) {
        if (sends ? passes == part->stages - 1 : passes == 0) continue;
        point_start(f->comm, &s->passed, sends ? SEND : RECEIVE, AXIS_PP,
                    (part->stage + (sends ? 1 : part->stages - 1)) % part->stages, "a unit to be written", s->of_parts,
                    bytes * (size_t)part->tp, DTYPE_BYTE);
        collective_wait(f->comm, &s->passed);
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
    float wide[AT_ONCE], scales[(int)AT_ONCE / (int)BASE_BLOCK];
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
        int64_t length = (t->scales ? blocks8(n) : n) * size;
        int mine = save_has_part(s, length);
        if (mine) save_read(s, of, number, unit, padded, wide, at, n);
        for (int64_t i = 0; i < n && mine && from == half; i++) half[i] = float_to_bf16(wide[i]);
        for (int64_t b = 0; b < blocks8(n) && mine && (from == bytes || from == scales); b++) {
            scales[b] =
                quantize_block(bytes + b * BASE_BLOCK, wide + b * BASE_BLOCK, min_i64(BASE_BLOCK, n - b * BASE_BLOCK));
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
    for (int stage = 0; stage < part->stages; stage++) {
        const TensorTable *t = &s->parts[stage * part->tp];
        for (*number = 0; *number < t->num_tensors; ++*number)
            if (t->tensors[*number].index == index && !t->tensors[*number].is_copy) return stage;
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
                if (now && !s->parts) unit_state_free(s->f, whole);
                whole = s->parts ? unit_of_all(s, stage, u, t->kind)
                                 : unit_state(s->f, &s->f->units[u - of->units], t->kind);
                now = u, kind = t->kind;
            }
            save_tensor(s, t, of, number, whole, unit_padded(s->f, u));
            comm_alive(s->f->comm);
        }
    }
    if (now && !s->parts) unit_state_free(s->f, whole);
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

// ---------------------------------------------------------------------------
// export: a Hugging Face directory of the weights

/* Checked before training starts, so that nothing is lost at its end, and nothing that is there. */
static void export_check(const char *dir, const TensorTable *table, const Options *o) {
    static const char *const names[] = {"model.safetensors",
                                        "model.safetensors.index.json",
                                        "adapter_model.safetensors",
                                        "adapter_config.json",
                                        "config.json",
                                        "tokenizer.model"};
    enum { NAMES = sizeof names / sizeof names[0] };
    char path[4096 + 128];
    OutputFiles files = ZERO;
    int failed = make_directories(dir);
    if (failed) user_error("cannot make --export %s: %s", dir, strerror(failed));
    export_files(&files, table, o);
    for (int i = 0; i < NAMES + files.num_files; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, i < NAMES ? names[i] : files.files[i - NAMES].name);
        if (!access(path, F_OK))
            user_error("%s exists already: choose another --export directory, or remove it first", path);
    }
    output_files_close(&files);
    if (access(dir, W_OK)) user_error("cannot write into --export %s: %s", dir, strerror(errno));
}

/* Writes config.json, the weights and, where there is one, the tokenizer's file into --export. */
static void model_export(Saver *s) {
    Comm *comm = s->f->comm;
    Phase before = comm_phase(comm, PHASE_SAVING);
    snprintf(s->dir, sizeof s->dir, "%s", s->opt->export_dir);
    save_start(s, &s->exported, ".part");
    save_finish(s);
    for (int i = 0; i < s->files->num_files && comm->rank == 0; i++) {
        char path[4096 + 128], temporary[4096 + 128];
        out_path(s, path, sizeof path, i, "");
        out_path(s, temporary, sizeof temporary, i, s->suffix);
        if (rename(temporary, path)) user_error("cannot rename %s: %s", temporary, strerror(errno));
    }
    Companions beside = ZERO;
    if (comm->rank == 0) save_companions(s, &beside), sync_directory(s->dir);
    companions_free(&beside);
    s->files = NULL;
    comm_barrier(comm, "export: done");
    comm_phase(comm, before);
}

#endif
