/* run_data.h: OUT/run.html, a page about the run, and OUT/run-data.js, the numbers that it draws.
 *
 * The page (dev/pages) never changes. Rank 0 rewrites the numbers at most every PAGE_SECONDS and at the end, each time
 * into another file that is then renamed: whenever a run is killed, complete files are there. Between two times lies at
 * least PAGE_SHARE times the time that writing takes. Files that cannot be written are reported once, and training
 * continues.
 *
 * Curves have bounded memory: steps fall into at most HISTORY_BUCKETS buckets. When they are full, neighbors are merged
 * and each has twice the steps. A bucket keeps the least, mean and most of each curve, so that a spike of a single step
 * survives. A caller may rely on: an unsuitable line of metrics.jsonl changes nothing but the count of such lines.
 */
#ifndef RUN_DATA_H
#define RUN_DATA_H
#include "../setup/options.h"  // defines: Options, RunSettings
#include "../../lib/io/json.h" // defines: cJSON

// ---------------------------------------------------------------------------
// curves

enum { HISTORY_BUCKETS = 512 };

/* val_loss has lines of its own. From CURVE_COMPUTE on, a curve is a part of rank 0's seconds: it computes, waits for
 * communication over an axis, waits for something else (all waits, in lines without axes), or waits for samples. */
// clang-format off
typedef enum {
    CURVE_VALIDATION, CURVE_LOSS, CURVE_RATE, CURVE_LR, CURVE_NORM, CURVE_SECONDS, CURVE_TOKENS, CURVE_SHARE, CURVE_MFU,
    CURVE_COMPUTE, CURVE_FSDP, CURVE_REPLICATE, CURVE_TP, CURVE_CP, CURVE_PP, CURVE_WORLD, CURVE_OTHER, CURVE_DATA,
    CURVES
} Curve;
static const char *const curve_keys[CURVES] = {
    "val_loss", "loss", "tokens_per_s", "lr", "grad_norm", "seconds", "tokens", "matmul_share", "mfu",
    "compute", "fsdp", "dp_replicate", "tp", "cp", "pp", "world", "other", "data"};
// clang-format on

enum { COUNT_STEPS, COUNT_SKIPS, COUNT_SAVES, COUNT_RESUMES, COUNTS };
static const char *const count_keys[COUNTS] = {"steps", "skips", "saves", "resumes"};

typedef struct {
    double least, most, sum;
    int64_t count; // values that are finite
} Spread;

typedef struct {
    int64_t counts[COUNTS];
    Spread curves[CURVES];
} HistoryBucket;

typedef struct {
    HistoryBucket buckets[HISTORY_BUCKETS];
    int count;
    int64_t first_step, last_step; // 0: no line so far
    int64_t stride, last_save;     // steps per bucket; the newest step that was saved
    double last[CURVES];           // the newest finite values; NAN: none so far
    double best[CURVES];           // the lowest values, and the steps at which they were reached
    int64_t best_step[CURVES];
    int64_t outliers, unreadable; // of the skipped steps, those with an outlier; lines that were left out
} History;

static History *history_open(void) {
    History *h = new_array(History, 1);
    h->stride = 1;
    for (int c = 0; c < CURVES; c++) h->last[c] = h->best[c] = NAN;
    return h;
}

static void spread_merge(Spread *s, const Spread *other) {
    if (!other->count) return;
    s->least = s->count ? fmin(s->least, other->least) : other->least;
    s->most = s->count ? fmax(s->most, other->most) : other->most;
    s->sum += other->sum;
    s->count += other->count;
}

/* Halves the number of buckets. */
static void history_merge(History *h) {
    int kept = (h->count + 1) / 2;
    for (int i = 0; i < kept; i++) {
        HistoryBucket *b = &h->buckets[i];
        const HistoryBucket *later = &h->buckets[2 * i + 1];
        *b = h->buckets[2 * i];
        if (2 * i + 1 == h->count) break; // the last of an odd number
        for (int k = 0; k < COUNTS; k++) b->counts[k] += later->counts[k];
        for (int c = 0; c < CURVES; c++) spread_merge(&b->curves[c], &later->curves[c]);
    }
    memset(h->buckets + kept, 0, sizeof *h->buckets * (size_t)(HISTORY_BUCKETS - kept));
    h->count = kept;
    h->stride *= 2;
}

static HistoryBucket *history_bucket(History *h, int64_t step) {
    if (!h->first_step) h->first_step = step;
    while ((step - h->first_step) / h->stride >= HISTORY_BUCKETS) history_merge(h);
    int i = (int)((step - h->first_step) / h->stride);
    h->count = (int)max_i64(h->count, i + 1);
    h->last_step = max_i64(h->last_step, step);
    return &h->buckets[i];
}

/* The number under a key, whether it was parsed or is about to be written; NAN: there is none. */
static double line_number(const cJSON *line, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, key);
    if (cJSON_IsNumber(item)) return item->valuedouble;
    return cJSON_IsRaw(item) ? strtod(item->valuestring, NULL) : NAN;
}

static int line_has(const cJSON *line, const char *key) { return cJSON_GetObjectItemCaseSensitive(line, key) != NULL; }

static void history_add_value(History *h, Curve curve, double value, int64_t step) {
    if (!isfinite(value)) return;
    const Spread one = {value, value, value, 1};
    spread_merge(&history_bucket(h, step)->curves[curve], &one);
    h->last[curve] = value;
    if (value >= h->best[curve]) return;
    h->best[curve] = value;
    h->best_step[curve] = step;
}

static void history_mark_save(History *h, int64_t step) {
    if (step <= h->last_save || !h->first_step || step < h->first_step) return;
    history_bucket(h, step)->counts[COUNT_SAVES]++;
    h->last_save = step;
}

static void history_add_step(History *h, const cJSON *line, int64_t step) {
    const cJSON *axes = cJSON_GetObjectItemCaseSensitive(line, "wait_axis_s");
    double wait = fmax(0, line_number(line, "wait_s")), data = fmax(0, line_number(line, "data_wait_s")), known = 0;
    double saved = line_number(line, "saved");
    int resumed = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "resumed"));
    history_bucket(h, step)->counts[COUNT_STEPS]++;
    for (int c = CURVE_LOSS; c < CURVE_COMPUTE; c++)
        history_add_value(h, (Curve)c, line_number(line, curve_keys[c]), step);
    for (int c = CURVE_FSDP; c <= CURVE_WORLD; c++) { // fmax is 0 where a number is missing
        double part = fmax(0, line_number(axes, curve_keys[c]));
        history_add_value(h, (Curve)c, part, step);
        known += part;
    }
    history_add_value(h, CURVE_OTHER, wait - known > 1e-5 ? wait - known : 0, step); // a smaller difference is rounding
    history_add_value(h, CURVE_DATA, data, step);
    // Clocks and rounding may let the waits exceed the step. Then it has not computed.
    double computed = line_number(line, "seconds") - fmax(wait, known) - data;
    history_add_value(h, CURVE_COMPUTE, isfinite(computed) ? fmax(0, computed) : 0, step);
    if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "skipped"))) history_bucket(h, step)->counts[COUNT_SKIPS]++;
    if (resumed) history_bucket(h, step)->counts[COUNT_RESUMES]++;
    if (saved >= 1 && saved < (double)step) history_mark_save(h, (int64_t)saved);
    if (resumed) history_mark_save(h, step - 1); // the checkpoint from which the run was resumed is of that step
}

/* Adds a line of metrics.jsonl, or one that is about to be written there. `limit`: the last step that it may have. A
 * line with "accuracy", which earlier versions wrote, is accepted and adds nothing. */
static void history_add_line(History *h, const cJSON *line, int64_t limit) {
    double step = line_number(line, "step");
    int is_outlier = line_has(line, "outlier"); // the step has a line of its own, too
    int is_step = !is_outlier && line_has(line, "loss"), is_validation = line_has(line, "val_loss");
    int fits = step >= 1 && step <= (double)limit && step == floor(step) && (int64_t)step >= h->first_step;
    if (!fits || !(is_step || is_validation || is_outlier || line_has(line, "accuracy"))) {
        h->unreadable++;
        return;
    }
    h->outliers += is_outlier;
    if (is_step) history_add_step(h, line, (int64_t)step);
    else if (is_validation) history_add_value(h, CURVE_VALIDATION, line_number(line, "val_loss"), (int64_t)step);
}

/* Adds what an earlier start of this run has written, up to step `limit`. Whatever is not a whole line of a run, such
 * as the torn last line of a run that was killed, is counted and left out. */
static void history_read(History *h, const char *path, int64_t limit) {
    char *text = NULL;
    size_t room = 0;
    FILE *f = fopen(path, "r");
    if (!f) return;
    while (getline(&text, &room, f) > 0) {
        cJSON *line = cJSON_Parse(text);
        history_add_line(h, line, limit);
        cJSON_Delete(line);
    }
    free(text);
    fclose(f);
}

// ---------------------------------------------------------------------------
// what is reported of each rank

typedef struct {         // of one rank: in one step, or summed over steps
    double seconds;      // from the start of the step to its report, which comes before the optimizer
    double wait_seconds; // waiting for other ranks
    int64_t tokens;
    int64_t memory; // peak bytes of all arenas in memory
} RankFigures;

/* What is reported of a rank: in metrics.jsonl, and all but the seconds in the table at the end of a run. */
enum { RANK_RATE, RANK_COMPUTE, RANK_WAIT, RANK_MEMORY, RANK_SECONDS, RANK_COLUMNS };
static const struct {
    const char *name, *format;
} rank_columns[RANK_COLUMNS] = {
    {"tokens_per_s", "%.1f"}, {"compute_s", "%.6f"}, {"wait_s", "%.6f"}, {"memory", "%.0f"}, {"seconds", "%.6f"}};

static void rank_row(const RankFigures *r, double row[RANK_COLUMNS]) {
    row[RANK_RATE] = (double)r->tokens / r->seconds;
    row[RANK_COMPUTE] = fmax(0, r->seconds - r->wait_seconds);
    row[RANK_WAIT] = r->wait_seconds;
    row[RANK_MEMORY] = (double)r->memory;
    row[RANK_SECONDS] = r->seconds;
}

typedef struct {
    double least[RANK_COLUMNS], mean[RANK_COLUMNS], most[RANK_COLUMNS];
    int slowest; // the rank that computed longest
    double lead; // its time of computing relative to the mean
} RankSummary;

static RankSummary rank_summary(const RankFigures *ranks, int world) {
    RankSummary all = ZERO;
    double row[RANK_COLUMNS];
    for (int i = 0; i < world; i++) {
        rank_row(&ranks[i], row);
        if (row[RANK_COMPUTE] > all.most[RANK_COMPUTE]) all.slowest = i;
        for (int k = 0; k < RANK_COLUMNS; k++) {
            all.least[k] = i ? fmin(all.least[k], row[k]) : row[k];
            all.mean[k] += row[k] / world;
            all.most[k] = fmax(all.most[k], row[k]);
        }
    }
    all.lead = all.mean[RANK_COMPUTE] > 0 ? all.most[RANK_COMPUTE] / all.mean[RANK_COMPUTE] : 1;
    return all;
}

extern const char run_html[]; // from the object that the Makefile makes of dev/pages

static const double PAGE_SECONDS = 5, PAGE_SHARE = 500;

typedef struct {
    const Options *options;
    const RunSettings *run;
    const Comm *comm;
    History *history;
    RankFigures *ranks;                        // (world) sums over the steps since this start
    int64_t steps;                             // since this start
    const Device *planned;                     // rank 0's dry run, whose memory plan.json has, too
    double started, next_write, write_seconds; // seconds_now; spent on writing so far
    int has_ended, noted_failure;
} RunData;

/* "counts" and "values" have an entry for each bucket: a number, or [mean, least, most] of several steps, or null.
 * "last": the newest value; "best": the lowest, at "best_step". */
static void write_curves(FILE *f, const History *h) {
    fprintf(f, "\"counts\":{");
    for (int k = 0; k < COUNTS; k++) {
        fprintf(f, "%s\"%s\":[", k ? "],\n" : "", count_keys[k]);
        for (int i = 0; i < h->count; i++) fprintf(f, "%s%" PRId64, i ? "," : "", h->buckets[i].counts[k]);
    }
    fprintf(f, "]},\n\"curves\":{");
    for (int c = 0; c < CURVES; c++) {
        fprintf(f, "%s\"%s\":{\"last\":", c ? "]},\n" : "", curve_keys[c]);
        json_write_real(f, h->last[c]);
        fprintf(f, ",\"best\":");
        json_write_real(f, h->best[c]);
        fprintf(f, ",\"best_step\":%" PRId64 ",\"values\":[", h->best_step[c]);
        for (int i = 0; i < h->count; i++) {
            const Spread *s = &h->buckets[i].curves[c];
            double mean = s->count ? s->sum / (double)s->count : NAN;
            fputs(i ? "," : "", f);
            if (s->count > 1) fprintf(f, "[%.9g,%.9g,%.9g]", mean, s->least, s->most);
            else json_write_real(f, mean);
        }
    }
    fprintf(f, "]}},\n");
}

/* Memory by category of rank 0; of each rank its host, and sums since this start in the order of rank_columns. */
static void write_memory_and_ranks(FILE *f, const RunData *d) {
    int world = d->comm->mesh.world;
    double row[RANK_COLUMNS];
    fputs("\"memory\":[", f);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        const Arena *a = &d->comm->dev->arenas[c];
        fprintf(f, "%s{\"category\":\"%s\",\"place\":\"%s\",\"peak\":%" PRId64 ",\"planned\":%" PRId64 "}",
                c ? "," : "", mem_category_names[c], a->offloaded ? OFFLOAD_PLACE : "", (int64_t)a->peak,
                (int64_t)d->planned->arenas[c].peak);
    }
    fprintf(f, "],\n\"ranks\":[");
    for (int i = 0; i < world && d->steps && world > 1; i++) {
        const char *host = run_hosts.count > 1 ? host_of_rank(i)->name : "";
        rank_row(&d->ranks[i], row);
        fputs(i ? ",\n[" : "[", f);
        json_write_script_string(f, host, strlen(host));
        for (int k = 0; k < RANK_COLUMNS; k++) {
            fputc(',', f);
            json_write_real(f, row[k]);
        }
        fputc(']', f);
    }
    fprintf(f, "],\n");
}

/* The end of after-save.log, to which a command such as `generate_llama3` writes samples. */
static void write_after_save(FILE *f, const RunData *d) {
    char path[4096], text[4000];
    snprintf(path, sizeof path, "%s/after-save.log", d->run->out);
    if (!d->run->after_save) return;                        // the file may be there from an earlier start
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); // a pipe of this name must not stop training
    FILE *log = fd < 0 ? NULL : fdopen(fd, "r");
    if (!log) return;
    int is_cut = !fseek(log, -(long)sizeof text, SEEK_END);
    if (!is_cut) rewind(log);
    size_t length = fread(text, 1, sizeof text, log);
    fclose(log);
    fprintf(f, "\"after_save_is_cut\":%d,\"after_save\":", is_cut);
    json_write_script_string(f, text, length);
    fprintf(f, ",\n");
}

static void run_data_print(FILE *f, const RunData *d) {
    const History *h = d->history;
    char axes[160], value[4096];
    mesh_print(axes, sizeof axes, d->comm->mesh.size, 1);
    fprintf(f,
            "var run_data = {\"has_ended\":%d,\"written\":%" PRId64 ",\"world\":%d,\"steps\":%d,\"first_step\":"
            "%" PRId64 ",\"last_step\":%" PRId64 ",\"stride\":%" PRId64 ",\"outliers\":%" PRId64 ",\"unreadable\":"
            "%" PRId64 ",\"most_skips\":%d,\"elapsed\":%.6g,\"elapsed_steps\":%" PRId64 ",\"write_seconds\":%.3g,\n"
            "\"precision\":\"" PRECISION_NAME "\",\"mesh\":\"%s\",",
            d->has_ended, (int64_t)time(NULL), d->comm->mesh.world, d->run->steps, h->first_step, h->last_step,
            h->stride, h->outliers, h->unreadable, MOST_SKIPS, seconds_now() - d->started, d->steps, d->write_seconds,
            axes);
    write_curves(f, h);
    write_memory_and_ranks(f, d);
    write_after_save(f, d);
    // "options" has a row for each option in force: [name, value, whether it was given, whether it is a flag].
    fprintf(f, "\"options\":[");
    for (int i = 0, n = 0; i < OPTION_ROWS; i++) {
        if (!option_as_text(d->run, &option_rows[i], value, sizeof value)) continue;
        fprintf(f, "%s[\"%s\",", n++ ? ",\n" : "", option_rows[i].name);
        json_write_script_string(f, value, strlen(value));
        fprintf(f, ",%d,%d]", !!d->options->given[i], option_rows[i].kind == OPT_FLAG);
    }
    fprintf(f, "]};\n");
}

/* Writes both files if they are due, or at the end. */
static void run_data_write(RunData *d) {
    double start = seconds_now();
    char *text;
    size_t length;
    if (!d->history || !d->history->first_step || (!d->has_ended && start < d->next_write)) return;
    FILE *f = text_stream_open(&text, &length);
    run_data_print(f, d);
    text_stream_close(f);
    int failed = replace_text_file(d->run->out, "run.html", run_html, strlen(run_html));
    if (!failed) failed = replace_text_file(d->run->out, "run-data.js", text, length);
    free(text);
    if (failed && !d->noted_failure)
        fprintf(stderr,
                "note: cannot write run.html and run-data.js in %s: %s; training continues, and they are "
                "written again when that is possible\n",
                d->run->out, strerror(failed));
    d->noted_failure |= !!failed;
    double now = seconds_now();
    d->write_seconds += now - start;
    d->next_write = now + fmax(PAGE_SECONDS, PAGE_SHARE * (now - start));
}

/* `planned`: rank 0's dry run. `steps_before`: the step that the run resumes from, whose history is read from
 * metrics.jsonl; 0: a new run. */
static void run_data_open(RunData *d, const Options *o, const RunSettings *run, const Comm *comm, const Device *planned,
                          int64_t steps_before) {
    char path[4096];
    memset(d, 0, sizeof *d);
    d->options = o;
    d->run = run;
    d->comm = comm;
    d->planned = planned;
    d->started = seconds_now();
    if (!run->out) return;
    d->history = history_open();
    (void)replace_text_file(run->out, "run.html", run_html, strlen(run_html)); // run_data_write reports a failure
    snprintf(path, sizeof path, "%s/metrics.jsonl", run->out);
    if (steps_before) history_read(d->history, path, steps_before);
}

#endif
