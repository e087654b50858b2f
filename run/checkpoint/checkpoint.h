/* checkpoint.h: the contents of a checkpoint, and resuming from one.
 *
 * A checkpoint is a Hugging Face directory with the weights in fp32, the optimizer's moments and trainer.json, which
 * holds the step, the options and a CRC-32 of each 4 MiB chunk of each file. A caller may rely on: checkpoints do not
 * depend on the parallel layout; every chunk is compared with its checksum before anything in it is used.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H
#include "../../dataloader.h"     // defines: Sampler, sampler_position
#include "../setup/config_json.h" // defines: config_from_json, config_write_json
#include "../setup/options.h"     // defines: Options, option_text; includes option_table.h: choice_index
#include "peft.h"                 // defines: adapters_open
#include "out_dir.h"              // defines: newest_checkpoint, checkpoint_path
#include "../setup/recipe.h"      // defines: Recipe, recipe_period_after, LearningRate
#include "../checks/outliers.h"   // defines: Outliers, outliers_read, outliers_write
#include "safetensors.h"          // defines: StFiles, st_read, OutputFiles
#include "sharded_state.h"        // defines: fsdp_set_state, fsdp_set_base, random_weights
#include <zlib.h>                 // defines: crc32

// ---------------------------------------------------------------------------
// trainer.json: the progress of the run, its options, and the checksums of the other files

typedef struct {
    int64_t step, updates, skips;    // finished steps: those that changed the weights, and those that were skipped
    int64_t samples, tokens;         // consumed by all ranks
    int64_t epoch, samples_in_epoch; // the current epoch, and how many samples of the last step's length it consumed
    const Dataset *data;             // the token files; NULL: none
    Outliers outliers;               // windows of --outlier-window
} Progress;

/* Samples that all ranks consume in a step. */
static int64_t samples_per_step(const RunSettings *run, const Mesh *mesh) {
    return (int64_t)mesh_data_ranks(mesh) * run->batch * run->accum;
}

/* Options that affect the training result; those of adapters come last. How the work is divided over ranks does not. */
static const char *const training_options[] = {
    "optimizer",   "muon-momentum", "seq",          "doc-mask",     "tail",         "steps",          "lr",
    "lr-schedule", "min-lr",        "warmup",       "lr-decay",     "weight-decay", "beta1",          "beta2",
    "eps",         "clip",          "seed",         "reduce-dtype", "z-loss",       "outlier-window", "outlier-z",
    "lora-rank",   "lora-alpha",    "lora-targets", "base"};
enum { TRAINING_OPTIONS = sizeof training_options / sizeof *training_options, ADAPTER_OPTIONS = 4 };

/* The key of a setting: "--seq" in the first period, "stage 2: --seq" in later ones. */
static const char *setting_name(char name[64], int period, const char *text) {
    if (period) snprintf(name, 64, "stage %d: %s", period + 1, text);
    else snprintf(name, 64, "%s", text);
    return name;
}

/* The inverse of setting_name. */
static const char *setting_without_period(const char *name, int *period) {
    int used = 0;
    *period = 1;
    if (sscanf(name, "stage %d: %n", period, &used) == 1 && used) name += used;
    --*period;
    return name;
}

static void setting_add(cJSON *settings, int period, const char *text, const char *value) {
    char name[64];
    cJSON_AddStringToObject(settings, setting_name(name, period, text), value);
}

static void setting_add_integer(cJSON *settings, int period, const char *text, int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRId64, value);
    setting_add(settings, period, text, digits);
}

/* The settings of a period. A later period has only those options that a recipe can change. */
static void settings_of_period(cJSON *settings, const Recipe *r, int period, const Mesh *mesh) {
    const RecipePeriod *p = &r->periods[period];
    int count = p->run.lora_rank ? TRAINING_OPTIONS : TRAINING_OPTIONS - ADAPTER_OPTIONS;
    char name[24], value[1024];
    for (int i = 0; i < count; i++) {
        const char *option = training_options[i];
        if (period && !is_period_option(option) && strcmp(option, "steps")) continue;
        if (!strcmp(option, "muon-momentum") && !uses_muon(&p->run)) continue;
        snprintf(name, sizeof name, "--%s", option);
        option_text(&p->run, option, value, sizeof value);
        if (strcmp(option, "steps")) setting_add(settings, period, name, value);
        else setting_add_integer(settings, period, name, p->rate.steps);
    }
    setting_add_integer(settings, period, "samples a step", samples_per_step(&p->run, mesh));
    if (!r->path) return;
    setting_add_integer(settings, period, "first step", p->first_step);
    setting_add_integer(settings, period, "first step of the learning-rate curve", p->rate.first_step);
    setting_add(settings, period, "frozen", period_frozen(p, value, sizeof value));
}

/* The settings of all steps up to `step`, as text, which must be the same when the run is resumed. `data`: of the
 * period that contains `step`; NULL: it is not open. `base`: fingerprint of the frozen model beneath the adapters. */
static cJSON *settings_in_force(const Recipe *r, int64_t step, const Mesh *mesh, const Dataset *data, uint64_t base) {
    int last = recipe_period_after(r, step - 1); // periods that have begun
    cJSON *settings = cJSON_CreateObject();
    char value[1024];
    for (int i = 0; i <= last; i++) settings_of_period(settings, r, i, mesh);
    snprintf(value, sizeof value, "%016" PRIx64, base);
    if (r->periods->run.lora_rank) setting_add(settings, 0, "base model", value);
    setting_add(settings, 0, "precision", PRECISION_NAME);
    if (r->path) setting_add_integer(settings, 0, "longest --seq", r->longest);
    if (!data) return settings;
    dataset_shares(data, value, sizeof value);
    if (data->mixture) setting_add(settings, last, "shares of --data", value);
    snprintf(value, sizeof value, "%016" PRIx64, data->fingerprint);
    setting_add(settings, last, "data", value);
    return settings;
}

static int64_t trainer_integer(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble) ||
        !(item->valuedouble >= 0 && item->valuedouble <= 9e15))
        user_error("%s: \"%s\" is missing or not a whole number: the file is damaged; resume from another checkpoint",
                   path, key);
    return (int64_t)item->valuedouble;
}

static uint32_t crc32_of(const char *bytes, int64_t length) {
    return (uint32_t)crc32(0, (const Bytef *)bytes, (uInt)length);
}

/* The length of a file chunk in a file of `length` bytes. */
static int64_t chunk_length(int64_t chunk, int64_t length) {
    return min_i64(FILE_CHUNK_BYTES, length - chunk * FILE_CHUNK_BYTES);
}

/* The small files next to the weights, such as config.json; rank 0 writes them from memory. */
typedef struct {
    char name[128];
    char *text; // (length)
    size_t length;
} CompanionFile;
typedef struct {
    CompanionFile files[16];
    int count;
} Companions;

static CompanionFile *companion_add(Companions *c, const char *name) {
    CompanionFile *file = &c->files[c->count++];
    snprintf(file->name, sizeof file->name, "%s", name);
    return file;
}

/* The text of trainer.json; its last line is the checksum of the lines before it. `settings` are deleted. `sums`: of
 * all chunks of `files`, file by file. */
static char *trainer_text(const Progress *at, cJSON *settings, const OutputFiles *files, const uint32_t *sums,
                          const Companions *companions, size_t *length) {
    char *text, *rows = json_text(settings, 0);
    FILE *f = text_stream_open(&text, length);
    fprintf(f,
            "{\n\"format\":1,\n\"step\":%" PRId64 ",\"updates\":%" PRId64 ",\"skips\":%" PRId64 ",\"samples\":%" PRId64
            ",\"tokens\":%" PRId64 ",\"epoch\":%" PRId64 ",\"samples_of_epoch\":%" PRId64,
            at->step, at->updates, at->skips, at->samples, at->tokens, at->epoch, at->samples_in_epoch);
    outliers_write(&at->outliers, f);
    fprintf(f, ",\n\"settings\":%s,\n\"chunk_bytes\":%d,\n\"files\":{", rows, FILE_CHUNK_BYTES);
    for (int i = 0; i < files->num_files + companions->count; i++) {
        const OutputFile *file = i < files->num_files ? &files->files[i] : NULL;
        const CompanionFile *small = file ? NULL : &companions->files[i - files->num_files];
        int64_t bytes = small ? (int64_t)small->length : file->bytes;
        fprintf(f, "%s\n\"%s\":{\"bytes\":%" PRId64 ",\"crc32\":[", i ? "," : "", small ? small->name : file->name,
                bytes);
        for (int64_t c = 0; c < chunks_of(bytes); c++)
            fprintf(f, "%s%u", c ? "," : "",
                    small ? crc32_of(small->text + c * FILE_CHUNK_BYTES, chunk_length(c, bytes))
                          : sums[file->first_chunk + c]);
        fprintf(f, "]}");
    }
    fprintf(f, "\n}");
    fflush(f); // sets `text` and `length`
    fprintf(f, ",\n\"crc32\":%u}\n", crc32_of(text, (int64_t)*length));
    text_stream_close(f);
    free(rows);
    return text;
}

/* (chunks) the checksums that trainer.json has for the file at `path`, which has `length` bytes. */
static uint32_t *expected_sums(const cJSON *files, const char *trainer, const char *path, int64_t length) {
    const char *name = strrchr(path, '/') + 1;
    const cJSON *file = cJSON_GetObjectItemCaseSensitive(files, name),
                *list = cJSON_GetObjectItemCaseSensitive(file, "crc32"), *item;
    if (!file)
        user_error("%s does not belong to this checkpoint: %s does not list it; resume from another checkpoint", path,
                   trainer);
    int64_t bytes = trainer_integer(file, trainer, "bytes"), n = 0;
    if (bytes != length)
        user_error("%s has %" PRId64 " bytes, but the checkpoint was written with %" PRId64
                   ": the file is truncated or damaged; resume from another checkpoint",
                   path, length, bytes);
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != chunks_of(bytes))
        user_error("%s: %s has %" PRId64 " chunks, but %d checksums: trainer.json is damaged; resume from another "
                   "checkpoint",
                   trainer, name, chunks_of(bytes), cJSON_GetArraySize(list));
    uint32_t *sums = (uint32_t *)checked_malloc(sizeof *sums * (size_t)(chunks_of(bytes) + 1));
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= UINT32_MAX))
            user_error("%s: checksum %" PRId64 " of %s is not a number from 0 to %u: trainer.json is damaged; resume "
                       "from another checkpoint",
                       trainer, n, name, UINT32_MAX);
        sums[n++] = (uint32_t)item->valuedouble;
    }
    return sums;
}

static void chunk_check(const char *path, int64_t chunk, const char *bytes, int64_t length, uint32_t wanted) {
    if (crc32_of(bytes, length) != wanted)
        user_error("%s is damaged: bytes %" PRId64 " to %" PRId64
                   " do not have the checksum in trainer.json; resume from another checkpoint",
                   path, chunk * FILE_CHUNK_BYTES, chunk * FILE_CHUNK_BYTES + length - 1);
}

/* All files that trainer.json lists must exist. The small ones are compared with their checksums now, the weights and
 * moments when they are read. */
static void companions_check(const char *dir, const cJSON *files, const char *trainer) {
    char path[4096 + 128];
    const cJSON *file;
    cJSON_ArrayForEach(file, files) {
        const char *ending = strstr(file->string, ".safetensors");
        size_t length;
        snprintf(path, sizeof path, "%s/%s", dir, file->string);
        if (strchr(file->string, '/'))
            user_error("%s: \"%s\" is not the name of a file in the same directory", trainer, file->string);
        if (access(path, R_OK))
            user_error("cannot read %s: %s; the checkpoint is incomplete, resume from another one", path,
                       strerror(errno));
        if (ending && !ending[strlen(".safetensors")]) continue;
        char *text = read_regular_file(path, &length);
        if (!text) user_error("cannot read %s: %s", path, strerror(errno));
        uint32_t *sums = expected_sums(files, trainer, path, (int64_t)length);
        for (int64_t c = 0; c < chunks_of((int64_t)length); c++)
            chunk_check(path, c, text + c * FILE_CHUNK_BYTES, chunk_length(c, (int64_t)length), sums[c]);
        free(sums);
        free(text);
    }
}

// ---------------------------------------------------------------------------
// resume

typedef struct {    // the checkpoint that a run resumes from
    char dir[4096]; // "": none
    Progress progress;
    StFiles weights, moments; // with checksums
    uint64_t fingerprint;     // of trainer.json
    cJSON *settings;          // of the run that wrote it
    int data_changed;         // --allow-changes: other data, so that samples_in_epoch has no meaning
    char *changes;            // --allow-changes: the settings that differ, as text; NULL: none
} Checkpoint;

/* The recorded value of a setting. An option that the checkpoint's program did not have had its default. */
static const char *setting_recorded(const cJSON *then, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(then, name);
    if (cJSON_IsString(item)) return item->valuestring;
    int period;
    const char *option = setting_without_period(name, &period);
    const OptionRow *row = strncmp(option, "--", 2) ? NULL : option_find(option + 2);
    return row && row->fallback ? row->fallback : "not recorded";
}

/* The settings that describe a learning-rate curve. */
static const char *const rate_settings[] = {
    "--steps", "--lr", "--lr-schedule", "--min-lr", "--warmup", "--lr-decay", "first step of the learning-rate curve"};
enum { RATE_SETTINGS = sizeof rate_settings / sizeof *rate_settings };

/* The learning-rate curve of a period in the run that wrote the checkpoint. Settings that are the same as now keep
 * their exact values, since a text has nine digits. */
static LearningRate rate_recorded(const cJSON *then, const cJSON *now, int period, const LearningRate *is) {
    LearningRate was = *is;
    int64_t *const integers[] = {&was.steps, NULL, NULL, NULL, &was.warmup, &was.decay, &was.first_step};
    double *const reals[] = {NULL, &was.peak, NULL, &was.minimum, NULL, NULL, NULL};
    char name[64];
    for (int i = 0; i < RATE_SETTINGS; i++) {
        const char *text = setting_recorded(then, setting_name(name, period, rate_settings[i]));
        const cJSON *same = cJSON_GetObjectItemCaseSensitive(now, name);
        if (!same || !strcmp(text, same->valuestring)) continue;
        if (integers[i]) *integers[i] = strtoll(text, NULL, 10);
        else if (reals[i]) *reals[i] = strtod(text, NULL);
        else was.shape = (RateShape)choice_index(text, strlen(text), RATE_SHAPE_NAMES);
    }
    const char *decay = setting_recorded(then, setting_name(name, period, "--lr-decay"));
    if (!strcmp(decay, "0")) was.decay = max_i64(1, was.steps / 10); // as recipe.h chooses it
    return was;
}

/* Is this a setting of a learning-rate curve whose finished steps, up to `step`, have unchanged rates? Only finished
 * steps are compared: a period may be given more or fewer tokens while their rates do not depend on that. */
static int is_same_rate(const cJSON *then, const cJSON *now, const Recipe *r, const char *name, int64_t step) {
    int period, is_same = 0;
    const char *text = setting_without_period(name, &period);
    for (int i = 0; i < RATE_SETTINGS; i++) is_same |= !strcmp(text, rate_settings[i]);
    if (!is_same) return 0;
    const RecipePeriod *p = &r->periods[period];
    LearningRate was = rate_recorded(then, now, period, &p->rate);
    for (int64_t t = p->first_step + 1; t <= min_i64(step, p->first_step + p->steps) && is_same; t++)
        is_same = learning_rate_at(&was, t) == learning_rate_at(&p->rate, t);
    return is_same;
}

/* May a recorded setting be missing in this run? `begins_data`: the data of the checkpoint is not open. */
static int setting_means_nothing(const char *name, const char *was, int begins_data) {
    int period;
    const char *option = setting_without_period(name, &period);
    const OptionRow *row = strncmp(option, "--", 2) ? NULL : option_find(option + 2);
    int is_default = !period && (!was[0] || !strcmp(was, "0") || (row && row->fallback && !strcmp(row->fallback, was)));
    return is_default || (begins_data && (!strcmp(option, "data") || !strcmp(option, "shares of --data")));
}

/* Compares the settings of this run with those of the checkpoint. Differences are an error without --allow-changes. */
static void settings_compare(Checkpoint *c, const cJSON *then, const RunSettings *run, const Recipe *r,
                             const Mesh *mesh, const Dataset *data, uint64_t base) {
    int64_t step = c->progress.step;
    const RecipePeriod *next = &r->periods[recipe_period_after(r, step)];
    int begins_data = step && next->first_step == step && next->begins_data; // `data` is other data than that of `step`
    cJSON *now = settings_in_force(r, step, mesh, begins_data ? NULL : data, base), *setting;
    char list[2048];
    int used = 0, room = (int)sizeof list;
    c->settings = cJSON_Duplicate(then, 1);
    cJSON_ArrayForEach(setting, now) {
        const char *name = setting->string, *is = setting->valuestring, *was = setting_recorded(then, name);
        if (!strcmp(was, is) || is_same_rate(then, now, r, name, step)) continue;
        if (!strcmp(name, "--optimizer")) // --allow-changes does not help: AdamW's moments are not Muon's momentum
            user_error("--resume %s: options that affect the training result have changed (--optimizer %s, was %s), "
                       "and the state of one optimizer cannot continue another's: give --optimizer %s, or start a new "
                       "run from these weights with --model %s",
                       c->dir, is, was, was, c->dir);
        int period;
        const char *option = setting_without_period(name, &period);
        if (!strcmp(option, "data") || !strcmp(option, "--seq") || !strcmp(option, "longest --seq"))
            c->data_changed = 1;
        if (used < room)
            used += snprintf(list + used, (size_t)(room - used), "%s%s %s, was %s", used ? "; " : "", name, is, was);
    }
    cJSON_ArrayForEach(setting, then) {
        const char *name = setting->string, *was = cJSON_GetStringValue(setting);
        if (!was || cJSON_GetObjectItemCaseSensitive(now, name) || setting_means_nothing(name, was, begins_data))
            continue;
        c->data_changed |= !strcmp(name, "longest --seq");
        if (used < room)
            used += snprintf(list + used, (size_t)(room - used), "%s%s not given, was %s", used ? "; " : "", name, was);
    }
    cJSON_Delete(now);
    if (used && !run->allow_changes)
        user_error("--resume %s: options that affect the training result have changed (%s): give the old values, or "
                   "add --allow-changes",
                   c->dir, list);
    if (used) c->changes = checked_strdup(list);
}

/* The checkpoint's config.json must describe this model. Both are printed and compared line by line. */
static void config_compare(const char *dir, const Llama3Config *mine, const char *model) {
    char path[4096 + 32], *text[2], *rest[2];
    size_t length;
    snprintf(path, sizeof path, "%s/config.json", dir);
    Llama3Config theirs = config_from_json(path);
    for (int i = 0; i < 2; i++) {
        FILE *f = text_stream_open(&text[i], &length);
        config_write_json(i ? &theirs : mine, "float32", BASE_TRAINED, &no_model_ids, f);
        text_stream_close(f);
        rest[i] = text[i];
    }
    while (rest[0] && rest[1]) {
        const char *wanted = strsep(&rest[0], "\n"), *found = strsep(&rest[1], "\n");
        if (strcmp(wanted, found))
            user_error("%s describes a different model than --model %s: %s, expected %s; remove --model, or resume "
                       "from another checkpoint",
                       path, model, found + strspn(found, " "), wanted + strspn(wanted, " "));
    }
    free(text[0]);
    free(text[1]);
}

/* The directory of the checkpoint that --resume means: a checkpoint, or the newest one of a run's directory. "" with
 * --resume auto and no checkpoint in --out yet. */
static void checkpoint_find(char dir[4096], const RunSettings *run) {
    char path[4096 + 32];
    int is_auto = !strcmp(run->resume, "auto");
    const char *given = is_auto ? run->out : run->resume;
    snprintf(dir, 4096, "%s", given);
    snprintf(path, sizeof path, "%s/trainer.json", given);
    if (!is_auto && entry_exists(path)) return;
    int64_t newest = newest_checkpoint(given, INT64_MAX);
    if (newest >= 0) checkpoint_path(dir, 4096, given, newest);
    else if (is_auto) dir[0] = 0;
    else
        user_error("--resume %s: no checkpoint found; expected a directory step-%0*d, a directory that holds such "
                   "directories, or auto",
                   given, STEP_DIGITS, 0);
}

/* Reads trainer.json. Its last line is the checksum of the text before it. */
static cJSON *trainer_read(const char *path, uint64_t *fingerprint) {
    static const char last_key[] = ",\n\"crc32\":";
    char expected[64] = "";
    size_t length;
    char *text = read_regular_file(path, &length), *last = NULL;
    if (!text) user_error("cannot read %s: %s", path, strerror(errno));
    for (char *at = strstr(text, last_key); at; at = strstr(at + 1, last_key)) last = at;
    if (last) snprintf(expected, sizeof expected, "%s%u}\n", last_key, crc32_of(text, last - text));
    if (!last || strcmp(expected, last))
        user_error("%s is damaged: its checksum does not match its text; resume from another checkpoint", path);
    *fingerprint = hash_bytes(HASH_START, text, length);
    cJSON *json = json_parse_object(text, length, path, "a checkpoint's trainer.json");
    json_refuse_duplicates(json, path);
    free(text);
    if (trainer_integer(json, path, "format") != 1 || trainer_integer(json, path, "chunk_bytes") != FILE_CHUNK_BYTES ||
        !json_object(json, path, "settings") || !json_object(json, path, "files"))
        user_error("%s was written by another version of this program: resume with that version", path);
    return json;
}

static Progress trainer_progress(const cJSON *json, const char *path) {
    Progress p = ZERO;
    p.step = trainer_integer(json, path, "step");
    p.updates = trainer_integer(json, path, "updates");
    p.skips = trainer_integer(json, path, "skips");
    p.samples = trainer_integer(json, path, "samples");
    p.epoch = trainer_integer(json, path, "epoch");
    p.samples_in_epoch = trainer_integer(json, path, "samples_of_epoch");
    outliers_read(&p.outliers, json, path);
    // A checkpoint without "tokens" is of a run of one period, all of whose steps had the same --seq.
    const cJSON *seq = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "settings"), "--seq");
    if (cJSON_GetObjectItemCaseSensitive(json, "tokens")) p.tokens = trainer_integer(json, path, "tokens");
    else if (cJSON_IsString(seq)) p.tokens = product_or_most(p.samples, max_i64(0, atoi(seq->valuestring)));
    if (p.tokens < 0 || p.tokens > (int64_t)9e15)
        user_error("%s: \"tokens\" is %" PRId64 ", expected 0 to 9e15: the file is damaged; resume from another "
                   "checkpoint",
                   path, p.tokens);
    return p;
}

/* The progress of the run that wrote the checkpoint in `dir`. */
static Progress checkpoint_progress(const char *dir) {
    char path[4096 + 32];
    uint64_t fingerprint;
    snprintf(path, sizeof path, "%s/trainer.json", dir);
    cJSON *json = trainer_read(path, &fingerprint);
    Progress p = trainer_progress(json, path);
    cJSON_Delete(json);
    return p;
}

/* Opens the checkpoint in c->dir: reads trainer.json and the headers of all files, and compares them with the options,
 * the model, the data and the fingerprint of the base model. */
static void checkpoint_open(Checkpoint *c, const RunSettings *run, const Recipe *r, const Mesh *mesh,
                            const Dataset *data, uint64_t base, const Llama3Config *config, const TensorTable *table) {
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/trainer.json", c->dir);
    cJSON *json = trainer_read(path, &c->fingerprint);
    const cJSON *files = json_object(json, path, "files");
    c->progress = trainer_progress(json, path);
    companions_check(c->dir, files, path);
    settings_compare(c, json_object(json, path, "settings"), run, r, mesh, data, base);
    if (config->lora_rank) adapters_open(&c->weights, c->dir, table);
    else {
        config_compare(c->dir, config, run->model);
        if (!model_weights_open(&c->weights, c->dir, table, BASE_TRAINED))
            user_error("%s has no model.safetensors: the checkpoint is incomplete, resume from another one", c->dir);
    }
    if (!st_open(&c->moments, c->dir, "optimizer"))
        user_error("%s has no optimizer.safetensors: the checkpoint is incomplete, resume from another one", c->dir);
    int first = config->lora_rank ? table_first_adapter(table) : 0;
    for (int kind = STATE_EXP_AVG; kind <= STATE_EXP_AVG_SQ; kind++)
        st_require_tensors(&c->moments, c->dir, table, first, table->num_tensors, (StateKind)kind);
    StFiles *opened[] = {&c->weights, &c->moments};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < opened[k]->num_files; i++) {
            StFile *file = &opened[k]->files[i];
            file->sums = expected_sums(files, path, file->path, file->bytes);
        }
    cJSON_Delete(json);
    if (c->progress.step > recipe_steps(r) && !r->path)
        user_error("--resume %s has finished step %" PRId64 ", but --steps is %d: use a larger --steps", c->dir,
                   c->progress.step, run->steps);
    if (c->progress.step > recipe_steps(r))
        user_error("--resume %s has finished step %" PRId64 ", but the stages of %s end after step %" PRId64
                   ": give a stage more tokens",
                   c->dir, c->progress.step, r->path, recipe_steps(r));
}

static void checkpoint_close(Checkpoint *c) {
    cJSON_Delete(c->settings);
    free(c->changes);
    st_close(&c->weights);
    st_close(&c->moments);
}

// ---------------------------------------------------------------------------
// reading state chunk by chunk, while the kernel reads the next chunk

typedef struct {
    const Checkpoint *checkpoint;
    const StFile *file;    // NULL: nothing was read yet
    int64_t chunk, length; // number of the current chunk in its file; its bytes
    char *bytes;           // (FILE_CHUNK_BYTES) the current chunk
} ChunkReader;

static void fill_from_checkpoint(void *reader, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                                 int64_t count) {
    ChunkReader *r = (ChunkReader *)reader;
    const Checkpoint *c = r->checkpoint;
    char name[128], *to = (char *)out;
    state_name(name, tensor, kind);
    const StTensor *t = st_find(kind == STATE_MASTER ? &c->weights : &c->moments, name);
    const StFile *file = t->file;
    int64_t at = t->begin + first * (int64_t)sizeof(float), end = at + count * (int64_t)sizeof(float);
    while (at < end) {
        int64_t chunk = at / FILE_CHUNK_BYTES, begin = chunk * FILE_CHUNK_BYTES;
        if (r->file != file || r->chunk != chunk) {
            r->file = file;
            r->chunk = chunk;
            r->length = read_bytes_at(file->fd, r->bytes, FILE_CHUNK_BYTES, begin);
            if (r->length <= 0)
                user_error("cannot read %s from byte %" PRId64 " on: %s", file->path, begin,
                           r->length ? strerror(errno) : "the file ends there");
            file_advance(file->fd, begin, FILE_CHUNK_BYTES); // drops what was read: the state needs the memory
            chunk_check(file->path, chunk, r->bytes, r->length, file->sums[chunk]);
        }
        int64_t n = min_i64(end, begin + r->length) - at;
        if (n <= 0)
            user_error("%s ends within tensor %s: it is truncated; resume from another checkpoint", file->path, name);
        memcpy(to, r->bytes + (at - begin), (size_t)n);
        at += n;
        to += n;
    }
}

// ---------------------------------------------------------------------------
// the weights that a run starts from

static void fill_from_files(void *files, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                            int64_t count) {
    const StTensor *t = st_find((const StFiles *)files, tensor->name);
    (void)kind;
    st_read(t, out, first, count);
    st_check_copy(t, out, first, count);
}

/* Reads int8 blocks as the files hold them. Returns 0 if the tensor is not int8 there. */
static int blocks_from_files(void *files, int8_t *out, float *scales, const Tensor *tensor, int64_t first,
                             int64_t count) {
    const StTensor *t = st_find((const StFiles *)files, tensor->name);
    if (t->dtype == ST_I8) st_read_quantized(t, out, scales, first, count);
    return t->dtype == ST_I8;
}

/* Sets the weights that a run starts from; each rank reads only its own ranges. The frozen base comes from the model's
 * files, or from the seed if `model` is NULL; what is trained from the checkpoint, from files, or from the seed. */
static void weights_load(Fsdp *f, StFiles *model, StFiles *adapters, const Checkpoint *from) {
    StFiles *trained = f->config->base == BASE_TRAINED ? model : adapters; // NULL: none
    if (model) fsdp_set_base(f, fill_from_files, blocks_from_files, model);
    else fsdp_set_base(f, random_weights, NULL, f);
    if (from->dir[0]) {
        ChunkReader r = {from, NULL, 0, 0, (char *)checked_malloc(FILE_CHUNK_BYTES)};
        fsdp_set_state(f, STATE_MASTER, fill_from_checkpoint, &r);
        fsdp_set_state(f, STATE_EXP_AVG, fill_from_checkpoint, &r);
        fsdp_set_state(f, STATE_EXP_AVG_SQ, fill_from_checkpoint, &r);
        free(r.bytes);
    } else if (trained) fsdp_set_state(f, STATE_MASTER, fill_from_files, trained);
    else fsdp_set_state(f, STATE_MASTER, random_weights, f);
}

#endif
