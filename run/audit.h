/* audit.h: --audit checks in OUT/samples.jsonl that a run consumed every window of its data exactly once per epoch.
 *
 * The run writes a line that describes its data (how many windows, and what happens to the tail of an epoch), then one
 * line per step with the windows that the step consumed. Lines continue across resumes and changes of the number of
 * ranks. `audit` reads them and prints one line of JSON; a window consumed twice or never is an error.
 */
#ifndef AUDIT_H
#define AUDIT_H
#include "../lib/device.h"
#include "../lib/json.h" // defines: cJSON_ParseWithOpts, cJSON_GetObjectItemCaseSensitive, …

typedef struct {
    const char *path;         // OUT/samples.jsonl
    int64_t line;             // number of the current line, from 1
    int64_t windows;          // in the data; 0 until a line says so
    int pad;                  // --tail pad: the last step of an epoch may repeat windows; 0: the tail is dropped
    int32_t *consumed_by;     // (windows) the step of this epoch that consumed each window; 0: none yet
    int64_t epoch;            // the current one; -1 before its first step
    int64_t consumed;         // samples of the current epoch so far
    int64_t repeated;         // those of them that had been consumed before in this epoch
    int starts_mid_epoch;     // the current epoch began in another file, so its missing windows are no error
    int64_t step_samples;     // samples of the last step
    int64_t first_step, step; // the first and the last step read
    int64_t steps, samples, whole_epochs, dropped; // totals over the file
} Audit;

/* Ends an epoch. With --tail drop, fewer windows than one step needs may be left over. */
static void audit_end_epoch(Audit *a) {
    int64_t missing = a->starts_mid_epoch ? 0 : a->windows - (a->consumed - a->repeated);
    if (missing && (a->pad || missing >= a->step_samples))
        user_error("%s: epoch %" PRId64 " ended at step %" PRId64 ", but %" PRId64 " of its %" PRId64
                   " windows were never consumed: these runs did not train on all of the data",
                   a->path, a->epoch, a->step, missing, a->windows);
    a->whole_epochs += !a->starts_mid_epoch;
    a->dropped += missing;
    a->consumed = 0;
    a->repeated = 0;
    a->starts_mid_epoch = 0;
    a->epoch++;
    memset(a->consumed_by, 0, sizeof *a->consumed_by * a->windows);
}

/* The line that describes the data of the steps after it. */
static void audit_data(Audit *a, const cJSON *windows, const cJSON *tail, const cJSON *consumed_before) {
    a->pad = !strcmp(tail->valuestring, "pad");
    if (!(windows->valuedouble >= 1 && windows->valuedouble <= INT32_MAX))
        user_error("%s, line %" PRId64 ": found %g windows, expected 1 to %d: the file is damaged", a->path, a->line,
                   windows->valuedouble, INT32_MAX);
    a->windows = (int64_t)windows->valuedouble;
    free(a->consumed_by);
    a->consumed_by = new_array(int32_t, a->windows);
    a->epoch = -1;
    a->consumed = 0;
    a->repeated = 0;
    a->starts_mid_epoch = cJSON_GetNumberValue(consumed_before) > 0;
}

static void audit_sample(Audit *a, const cJSON *sample) {
    if (!cJSON_IsNumber(sample) || !(sample->valuedouble >= 0 && sample->valuedouble < (double)a->windows))
        user_error("%s: step %" PRId64 " consumed window %g, expected 0 to %" PRId64 ": the file is damaged", a->path,
                   a->step, sample->valuedouble, a->windows - 1);
    int64_t w = (int64_t)sample->valuedouble;
    if (a->consumed_by[w] && !a->pad)
        user_error("%s: step %" PRId64 " consumed window %" PRId64 " of epoch %" PRId64
                   " a second time; step %d had consumed it before",
                   a->path, a->step, w, a->epoch, a->consumed_by[w]);
    if (a->consumed_by[w]) a->repeated++;
    else a->consumed_by[w] = (int32_t)a->step;
    a->consumed++;
    a->samples++;
}

/* The line of a step: its number, its epoch and the windows that it consumed. */
static void audit_step(Audit *a, int64_t step, int64_t epoch, const cJSON *samples) {
    if (a->steps && step != a->step + 1)
        user_error("%s, line %" PRId64 ": step %" PRId64 " follows step %" PRId64
                   ": the steps between them are missing",
                   a->path, a->line, step, a->step);
    if (!a->steps) a->first_step = step;
    if (a->epoch < 0) a->epoch = epoch;
    else if (epoch == a->epoch + 1) audit_end_epoch(a);
    if (epoch != a->epoch)
        user_error("%s, line %" PRId64 ": step %" PRId64 " belongs to epoch %" PRId64 ", expected epoch %" PRId64,
                   a->path, a->line, step, epoch, a->epoch);
    if (a->repeated)
        user_error("%s: epoch %" PRId64 " continues at step %" PRId64 ", although step %" PRId64
                   " had already repeated windows as only an epoch's last step may",
                   a->path, epoch, step, a->step);
    a->step = step;
    a->step_samples = cJSON_GetArraySize(samples);
    a->steps++;
    const cJSON *sample;
    cJSON_ArrayForEach(sample, samples) audit_sample(a, sample);
}

/* Whether an item is a number that an int32_t can hold. */
static int audit_is_count(const cJSON *item, int low) {
    return cJSON_IsNumber(item) && item->valuedouble >= low && item->valuedouble <= INT32_MAX;
}

static void audit_line(Audit *a, const char *text) {
    const char *end;
    cJSON *json = cJSON_ParseWithOpts(text, &end, 1); // 1: nothing may follow on the line
    const cJSON *windows = cJSON_GetObjectItemCaseSensitive(json, "windows");
    const cJSON *tail = cJSON_GetObjectItemCaseSensitive(json, "tail");
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(json, "step");
    const cJSON *epoch = cJSON_GetObjectItemCaseSensitive(json, "epoch");
    const cJSON *samples = cJSON_GetObjectItemCaseSensitive(json, "samples");
    if (cJSON_IsNumber(windows) && cJSON_IsString(tail))
        audit_data(a, windows, tail, cJSON_GetObjectItemCaseSensitive(json, "consumed_before"));
    else if (a->windows && audit_is_count(step, 1) && audit_is_count(epoch, 0) && cJSON_IsArray(samples))
        audit_step(a, (int64_t)step->valuedouble, (int64_t)epoch->valuedouble, samples);
    else
        user_error("%s, line %" PRId64 ": expected a description of the data or a step with its samples: the file is "
                   "damaged",
                   a->path, a->line);
    cJSON_Delete(json);
}

static void audit(const char *out) {
    if (!out) user_error("--audit reads what a run left in --out: add --out DIR");
    char path[4096], *text = NULL;
    size_t capacity = 0;
    Audit a = ZERO;
    snprintf(path, sizeof path, "%s/samples.jsonl", out);
    a.path = path;
    struct stat info;
    int fd = open_regular_file(path, &info);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    if (!f) user_error("--audit: cannot read %s (%s): expected --out DIR of a run that trained", path, strerror(errno));
    while (getline(&text, &capacity, f) > 0) {
        a.line++;
        audit_line(&a, text);
    }
    if (!feof(f)) user_error("--audit: cannot read %s after line %" PRId64 ": %s", path, a.line, strerror(errno));
    if (!a.steps) user_error("--audit: %s contains no steps: expected --out DIR of a run that trained", path);
    int64_t left = a.windows - (a.consumed - a.repeated);
    if (!left || (!a.pad && left < a.step_samples)) audit_end_epoch(&a);
    printf("{\"file\":\"%s\",\"first_step\":%" PRId64 ",\"steps\":%" PRId64 ",\"samples\":%" PRId64
           ",\"windows\":%" PRId64 ",\"whole_epochs\":%" PRId64 ",\"dropped\":%" PRId64 ",\"last_epoch\":%" PRId64
           ",\"of_last_epoch\":%" PRId64 "}\n",
           path, a.first_step, a.steps, a.samples, a.windows, a.whole_epochs, a.dropped, a.epoch, a.consumed);
    fclose(f);
    free(text);
    free(a.consumed_by);
}

#endif
