/* history.h: the curves of a run in bounded memory, fed with the lines of metrics.jsonl.
 *
 * Steps fall into at most HISTORY_BUCKETS buckets of equally many steps. When they are full, neighbors are merged and
 * each bucket has twice the steps. A bucket keeps the least, mean and most of each curve, so that a spike of a single
 * step survives in a run of any length. A caller may rely on: adding a line takes constant time on average, and an
 * unsuitable line changes nothing but the count of such lines.
 */
#ifndef HISTORY_H
#define HISTORY_H
#include "../../lib/io/json.h" // defines: cJSON

enum { HISTORY_BUCKETS = 512 };

/* val_loss has lines of its own. From CURVE_COMPUTE on, a curve is a part of rank 0's seconds: it computes, waits for
 * communication over an axis, waits for something else (all waits, in lines without axes), or waits for samples. */
typedef enum {
    CURVE_VALIDATION,
    CURVE_LOSS,
    CURVE_RATE,
    CURVE_LR,
    CURVE_NORM,
    CURVE_SECONDS,
    CURVE_TOKENS,
    CURVE_SHARE,
    CURVE_MFU,
    CURVE_COMPUTE,
    CURVE_FSDP,
    CURVE_REPLICATE,
    CURVE_TP,
    CURVE_CP,
    CURVE_PP,
    CURVE_WORLD,
    CURVE_OTHER,
    CURVE_DATA,
    CURVES
} Curve;
static const char *const curve_keys[CURVES] = {
    "val_loss", "loss", "tokens_per_s", "lr", "grad_norm", "seconds", "tokens", "matmul_share", "mfu",
    "compute",  "fsdp", "dp_replicate", "tp", "cp",        "pp",      "world",  "other",        "data"};

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

static void bucket_merge(HistoryBucket *b, const HistoryBucket *later) {
    for (int k = 0; k < COUNTS; k++) b->counts[k] += later->counts[k];
    for (int c = 0; c < CURVES; c++) spread_merge(&b->curves[c], &later->curves[c]);
}

/* Halves the number of buckets. */
static void history_merge(History *h) {
    int kept = (h->count + 1) / 2;
    for (int i = 0; i < kept; i++) {
        HistoryBucket b = h->buckets[2 * i];
        if (2 * i + 1 < h->count) bucket_merge(&b, &h->buckets[2 * i + 1]);
        h->buckets[i] = b;
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

/* Divides the seconds of a step. Clocks and rounding may let the waits exceed the step; then it has not computed. */
static void history_add_time(History *h, const cJSON *line, int64_t step) {
    const cJSON *axes = cJSON_GetObjectItemCaseSensitive(line, "wait_axis_s");
    double wait = fmax(0, line_number(line, "wait_s")), data = fmax(0, line_number(line, "data_wait_s")), known = 0;
    for (int c = CURVE_FSDP; c <= CURVE_WORLD; c++) { // fmax is 0 where a number is missing
        double part = fmax(0, line_number(axes, curve_keys[c]));
        history_add_value(h, (Curve)c, part, step);
        known += part;
    }
    history_add_value(h, CURVE_OTHER, wait - known > 1e-5 ? wait - known : 0, step); // less is rounding
    history_add_value(h, CURVE_DATA, data, step);
    double computed = line_number(line, "seconds") - fmax(wait, known) - data;
    history_add_value(h, CURVE_COMPUTE, isfinite(computed) ? fmax(0, computed) : 0, step);
}

static void history_mark_save(History *h, int64_t step) {
    if (step <= h->last_save || !h->first_step || step < h->first_step) return;
    history_bucket(h, step)->counts[COUNT_SAVES]++;
    h->last_save = step;
}

static void history_add_step(History *h, const cJSON *line, int64_t step) {
    double saved = line_number(line, "saved");
    int resumed = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "resumed"));
    history_bucket(h, step)->counts[COUNT_STEPS]++;
    for (int c = CURVE_LOSS; c < CURVE_COMPUTE; c++)
        history_add_value(h, (Curve)c, line_number(line, curve_keys[c]), step);
    history_add_time(h, line, step);
    if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "skipped"))) history_bucket(h, step)->counts[COUNT_SKIPS]++;
    if (resumed) history_bucket(h, step)->counts[COUNT_RESUMES]++;
    if (saved >= 1 && saved < (double)step) history_mark_save(h, (int64_t)saved);
    if (resumed) history_mark_save(h, step - 1); // by the checkpoint from which it was resumed
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
    for (ssize_t length = getline(&text, &room, f); length > 0; length = getline(&text, &room, f)) {
        cJSON *line = cJSON_Parse(text);
        history_add_line(h, line, limit);
        cJSON_Delete(line);
    }
    free(text);
    fclose(f);
}

#endif
