/* audit.h: --audit checks in OUT/samples.jsonl that a run consumed every window of its data exactly once per epoch.
 *
 * The run writes a line that describes its data (how many windows, and what happens to the tail of an epoch), then one
 * line per step with the windows that the step consumed. Lines continue across resumes and changes of the number of
 * ranks. `audit` reads them and prints one line of JSON; a window consumed twice or never is an error. In a mixture
 * this holds for the epochs of each source, and after each step every source must have given its share of the samples.
 */
#ifndef AUDIT_H
#define AUDIT_H
#include "../../lib/device/device.h"
#include "../../lib/io/json.h"    // defines: cJSON_ParseWithOpts, cJSON_GetObjectItemCaseSensitive, …
#include "../../lib/io/mixture.h" // defines: MOST_SOURCES, SHARE_UNITS

/* A source of a mixture. Its windows follow those of the sources before it. */
typedef struct {
    char name[256]; // as it was given to --data
    int64_t first_window, windows;
    int64_t units;    // its share of the samples, in millionths
    int64_t used;     // samples that the run consumed of it before this mixture began
    int64_t before;   // samples of the mixture consumed before the first step of the file
    int64_t consumed; // samples consumed since then
    int64_t complete; // epochs since then in which every window was found
} AuditSource;

typedef struct {
    const char *path;     // OUT/samples.jsonl
    int64_t line;         // number of the current line, from 1
    char place[4200];     // "PATH, line N", for messages about it
    char data[20];        // hash of the data
    int64_t windows;      // samples in the data; 0 until a line says so
    int64_t seq;          // tokens of a sample
    int64_t pieces;       // consecutive samples that are shuffled together, and belong to the same source
    int pad;              // --tail pad: the last step of an epoch may repeat windows; 0: the tail is dropped
    int32_t *consumed_by; // (windows) the step of this epoch that consumed each window; 0: none yet
    int num_sources;      // sources of the mixture; 0: the data is not a mixture
    AuditSource sources[MOST_SOURCES];
    int32_t *times;           // (windows) of a mixture: how often each window was consumed
    int64_t epoch;            // the current one; -1 before its first step
    int64_t before;           // samples of the current epoch that were consumed before the first line
    int64_t consumed;         // samples of the current epoch since then
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
    a->before = 0;
    a->consumed = 0;
    a->repeated = 0;
    a->starts_mid_epoch = 0;
    a->epoch++;
    memset(a->consumed_by, 0, sizeof *a->consumed_by * a->windows);
}

// ---------------------------------------------------------------------------
// mixtures: a source goes through its epochs independently of the others, and ends them within steps

/* The list of sources in the line that describes the data. */
static void audit_sources(Audit *a, const cJSON *list) {
    const cJSON *row;
    int64_t windows = 0, units = 0;
    memset(a->sources, 0, sizeof a->sources);
    a->num_sources = 0;
    if (cJSON_GetArraySize(list) > MOST_SOURCES)
        user_error("%s: found %d sources, expected at most %d: the file is damaged", a->place, cJSON_GetArraySize(list),
                   MOST_SOURCES);
    cJSON_ArrayForEach(row, list) {
        AuditSource *source = &a->sources[a->num_sources++];
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, "data"));
        snprintf(source->name, sizeof source->name, "%s", name ? name : "?");
        source->first_window = windows;
        source->windows = (int64_t)json_number(row, a->place, "windows", NAN, 1, INT32_MAX);
        source->units = llround(json_number(row, a->place, "share", NAN, 0, 1) * (double)SHARE_UNITS);
        source->before = (int64_t)json_number(row, a->place, "consumed_before", NAN, 0, 1e11);
        source->used = (int64_t)json_number(row, a->place, "used_before", 0, 0, 1e11);
        windows += source->windows;
        units += source->units;
    }
    if (a->num_sources && (windows != a->windows || units != SHARE_UNITS))
        user_error("%s: the sources have %" PRId64 " windows and %" PRId64
                   " millionths of the samples, expected %" PRId64 " and %d: the file is damaged",
                   a->place, windows, units, a->windows, SHARE_UNITS);
    free(a->times);
    a->times = a->num_sources ? new_array(int32_t, a->windows) : NULL;
}

/* Every window of a source must have been consumed in each of its whole epochs. */
static void audit_whole_epochs(Audit *a, AuditSource *source) {
    int64_t first = source->used + source->before; // sample
    int64_t ended = (first + source->consumed) / source->windows, complete = ended - blocks_of(first, source->windows);
    if (complete <= source->complete) return;
    for (int64_t w = source->first_window; w < source->first_window + source->windows; w++)
        if (a->times[w] < complete)
            user_error("%s: epoch %" PRId64 " of '%s' ended at step %" PRId64 ", but its window %" PRId64
                       " was not consumed: these runs did not train on all of the data",
                       a->path, ended - 1, source->name, a->step, w);
    source->complete = complete;
}

/* After a step, a source must have given its share of all samples of the mixture, rounded up or down. */
static void audit_share(const Audit *a, const AuditSource *source) {
    int64_t all = 0, given = source->before + source->consumed;
    for (int k = 0; k < a->num_sources; k++) all += a->sources[k].before + a->sources[k].consumed;
    int64_t off = llabs(given * SHARE_UNITS - source->units * all); // in millionths of a sample, below 9e18 here
    if (off >= SHARE_UNITS * a->pieces)
        user_error("%s: after step %" PRId64 ", %" PRId64 " of %" PRId64 " samples came from '%s', but its share is "
                   "%.1f: a rank did not follow the mixture's schedule",
                   a->path, a->step, given, all, source->name,
                   (double)source->units / (double)SHARE_UNITS * (double)all);
}

/* The source that a window belongs to. */
static AuditSource *audit_source_of(Audit *a, int64_t window) {
    int k = 0;
    while (window >= a->sources[k].first_window + a->sources[k].windows) k++;
    return &a->sources[k];
}

/* The samples of a step of a mixture, which `audit_sample` has counted. */
static void audit_mixture_step(Audit *a, const cJSON *samples) {
    const cJSON *sample;
    for (int k = 0; k < a->num_sources; k++) audit_share(a, &a->sources[k]);
    cJSON_ArrayForEach(sample, samples) {
        int64_t w = (int64_t)sample->valuedouble;
        const AuditSource *source = audit_source_of(a, w);
        int64_t first = source->used + source->before; // sample
        int64_t begun = blocks_of(first + source->consumed, source->windows);
        int64_t most = begun - first / source->windows; // epochs that these runs had a part in
        if (a->times[w] > most)
            user_error("%s: step %" PRId64 " consumed window %" PRId64 " of '%s' a second time in an epoch", a->path,
                       a->step, w, source->name);
    }
    for (int k = 0; k < a->num_sources; k++) audit_whole_epochs(a, &a->sources[k]);
}

// ---------------------------------------------------------------------------
// the lines

/* From now on samples are `ratio` times as long. Of each new sample, all old ones must have been consumed equally
 * often: otherwise the next steps would repeat a part of it, or leave it out. */
static void audit_join_samples(Audit *a, int64_t ratio) {
    int32_t *counts = a->num_sources ? a->times : a->consumed_by;
    for (int64_t w = 0; w < a->windows / ratio; w++) {
        const int32_t *parts = counts + w * ratio;
        for (int64_t i = 1; i < ratio; i++) {
            int differs = a->num_sources ? parts[i] != parts[0] : (parts[i] != 0) != (parts[0] != 0);
            if (differs)
                user_error("%s: samples become %" PRId64 " times as long, and of the new sample %" PRId64
                           " only a part was consumed before: tokens are repeated or left out",
                           a->place, ratio, w);
        }
        counts[w] = counts[w * ratio];
    }
    a->windows /= ratio;
    a->before /= ratio;
    a->consumed /= ratio;
    a->seq *= ratio;
    a->pieces /= ratio;
    for (int k = 0; k < a->num_sources; k++) {
        AuditSource *source = &a->sources[k];
        source->first_window /= ratio;
        source->windows /= ratio;
        source->used /= ratio;
        source->before /= ratio;
        source->consumed /= ratio;
    }
}

/* Does the line describe the data of the steps before it, in samples of the same length or of longer ones? Then its
 * steps must begin where these have ended. */
static int audit_continues(const Audit *a, const cJSON *line, int64_t windows, int64_t seq, int64_t pieces,
                           int64_t consumed_before) {
    const char *data = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(line, "data"));
    int64_t ended = (a->before + a->consumed) * a->seq; // token of the epoch, or of the mixture
    if (!a->windows || !data || strcmp(data, a->data) || !a->seq || seq < a->seq || seq % a->seq) return 0;
    if (a->windows * a->seq != windows * seq || a->pieces * a->seq != pieces * seq || !consumed_before) return 0;
    if (ended != consumed_before * seq)
        user_error("%s: the steps after it begin at token %" PRId64 " of the data, and those before it have ended at "
                   "token %" PRId64 ": tokens are repeated or left out",
                   a->place, consumed_before * seq, ended);
    return !a->starts_mid_epoch;
}

/* The line that describes the data of the steps after it. */
static void audit_data(Audit *a, const cJSON *line) {
    const cJSON *windows = cJSON_GetObjectItemCaseSensitive(line, "windows");
    const cJSON *tail = cJSON_GetObjectItemCaseSensitive(line, "tail");
    a->pad = !strcmp(tail->valuestring, "pad");
    if (!(windows->valuedouble >= 1 && windows->valuedouble <= INT32_MAX))
        user_error("%s: found %g windows, expected 1 to %d: the file is damaged", a->place, windows->valuedouble,
                   INT32_MAX);
    int64_t seq = (int64_t)json_number(line, a->place, "seq", 0, 0, INT32_MAX);
    int64_t pieces = (int64_t)json_number(line, a->place, "pieces", 1, 1, INT32_MAX);
    int64_t count = (int64_t)windows->valuedouble;
    int64_t before = (int64_t)json_number(line, a->place, "consumed_before", 0, 0, 1e15);
    const char *data = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(line, "data"));
    if (audit_continues(a, line, count, seq, pieces, before)) {
        if (seq > a->seq) audit_join_samples(a, seq / a->seq);
        return;
    }
    snprintf(a->data, sizeof a->data, "%s", data ? data : "");
    a->seq = seq;
    a->pieces = pieces;
    a->windows = count;
    free(a->consumed_by);
    a->consumed_by = new_array(int32_t, a->windows);
    a->epoch = -1;
    a->before = before;
    a->consumed = 0;
    a->repeated = 0;
    a->starts_mid_epoch = before > 0;
    audit_sources(a, cJSON_GetObjectItemCaseSensitive(line, "sources"));
}

static void audit_sample(Audit *a, const cJSON *sample) {
    if (!cJSON_IsNumber(sample) || !(sample->valuedouble >= 0 && sample->valuedouble < (double)a->windows))
        user_error("%s: step %" PRId64 " consumed window %g, expected 0 to %" PRId64 ": the file is damaged", a->path,
                   a->step, sample->valuedouble, a->windows - 1);
    int64_t w = (int64_t)sample->valuedouble;
    a->consumed++;
    a->samples++;
    if (a->num_sources) {
        audit_source_of(a, w)->consumed++;
        a->times[w]++;
        return;
    }
    if (a->consumed_by[w] && !a->pad)
        user_error("%s: step %" PRId64 " consumed window %" PRId64 " of epoch %" PRId64
                   " a second time; step %d had consumed it before",
                   a->path, a->step, w, a->epoch, a->consumed_by[w]);
    if (a->consumed_by[w]) a->repeated++;
    else a->consumed_by[w] = (int32_t)a->step;
}

/* The line of a step: its number, its epoch and the windows that it consumed. */
static void audit_step(Audit *a, int64_t step, int64_t epoch, const cJSON *samples) {
    if (a->steps && step != a->step + 1)
        user_error("%s: step %" PRId64 " follows step %" PRId64 ": the steps between them are missing", a->place, step,
                   a->step);
    if (!a->steps) a->first_step = step;
    if (a->epoch < 0) a->epoch = epoch;
    else if (epoch == a->epoch + 1) audit_end_epoch(a);
    if (epoch != a->epoch)
        user_error("%s: step %" PRId64 " belongs to epoch %" PRId64 ", expected epoch %" PRId64, a->place, step, epoch,
                   a->epoch);
    if (a->repeated)
        user_error("%s: epoch %" PRId64 " continues at step %" PRId64 ", although step %" PRId64
                   " had already repeated windows as only an epoch's last step may",
                   a->path, epoch, step, a->step);
    a->step = step;
    a->step_samples = cJSON_GetArraySize(samples);
    a->steps++;
    const cJSON *sample;
    cJSON_ArrayForEach(sample, samples) audit_sample(a, sample);
    if (a->num_sources) audit_mixture_step(a, samples);
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
    if (cJSON_IsNumber(windows) && cJSON_IsString(tail)) audit_data(a, json);
    else if (a->windows && audit_is_count(step, 1) && audit_is_count(epoch, 0) && cJSON_IsArray(samples))
        audit_step(a, (int64_t)step->valuedouble, (int64_t)epoch->valuedouble, samples);
    else user_error("%s: expected a description of the data or a step with its samples: the file is damaged", a->place);
    cJSON_Delete(json);
}

/* Prints the line of JSON. A mixture has completed as many epochs as its slowest source. */
static void audit_print(Audit *a) {
    int64_t left = a->windows - (a->consumed - a->repeated);
    if (!a->num_sources && (!left || (!a->pad && left < a->step_samples))) audit_end_epoch(a);
    for (int k = 0; k < a->num_sources; k++)
        if (!k || a->sources[k].complete < a->whole_epochs) a->whole_epochs = a->sources[k].complete;
    char *name = valid_utf8(a->path);
    printf("{\"file\":");
    json_write_string(stdout, name, strlen(name));
    free(name);
    printf(",\"first_step\":%" PRId64 ",\"steps\":%" PRId64 ",\"samples\":%" PRId64 ",\"windows\":%" PRId64
           ",\"whole_epochs\":%" PRId64 ",\"dropped\":%" PRId64 ",\"last_epoch\":%" PRId64
           ",\"of_last_epoch\":%" PRId64,
           a->first_step, a->steps, a->samples, a->windows, a->whole_epochs, a->dropped, a->epoch, a->consumed);
    for (int k = 0; k < a->num_sources; k++)
        printf("%s{\"samples\":%" PRId64 ",\"share\":%.6f,\"whole_epochs\":%" PRId64 "}", k ? "," : ",\"sources\":[",
               a->sources[k].consumed, (double)a->sources[k].units / (double)SHARE_UNITS, a->sources[k].complete);
    printf("%s}\n", a->num_sources ? "]" : "");
}

static void audit(const char *out) {
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
        snprintf(a.place, sizeof a.place, "%s, line %" PRId64, path, ++a.line);
        audit_line(&a, text);
    }
    if (!feof(f)) user_error("--audit: cannot read %s after line %" PRId64 ": %s", path, a.line, strerror(errno));
    if (!a.steps) user_error("--audit: %s contains no steps: expected --out DIR of a run that trained", path);
    audit_print(&a);
    fclose(f);
    free(text);
    free(a.consumed_by);
    free(a.times);
}

#endif
