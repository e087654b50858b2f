/* history.h: the curves of a run in bounded memory, fed with the lines of metrics.jsonl.
 *
 * Steps fall into at most HISTORY_BUCKETS buckets of equally many steps. When they are full, neighbors are merged and
 * each bucket has twice the steps. A bucket keeps the least, mean and most of each curve, so that a spike of a single
 * step survives in a run of any length. A caller may rely on: adding a line takes constant time on average, and an
 * unsuitable line changes nothing but the count of such lines.
 */
#ifndef HISTORY_H
#define HISTORY_H
#include "../lib/json.h" // defines: cJSON
#include "../lib/mesh.h" // defines: Axis, axis_names

enum { HISTORY_BUCKETS = 512 };

/* The first two have lines of their own. */
typedef enum { CURVE_VALIDATION, CURVE_ACCURACY, CURVE_LOSS, CURVE_RATE, CURVE_LR, CURVE_NORM, CURVES } Curve;
static const char *const curve_keys[CURVES] = {"val_loss", "accuracy", "loss", "tokens_per_s", "lr", "grad_norm"};

/* What rank 0 does in a step: it computes, waits for communication over an axis, or waits for samples. */
typedef enum {
    TIME_COMPUTE,
    TIME_FSDP,
    TIME_DP_REPLICATE,
    TIME_TP,
    TIME_CP,
    TIME_PP,
    TIME_WORLD,
    TIME_OTHER, // waits without an axis: for offloaded state, and all of them in lines that do not list axes
    TIME_DATA,
    TIME_PARTS
} TimePart;
static const char *const time_keys[TIME_PARTS] = {"compute", "fsdp", "dp_replicate", "tp",  "cp",
                                                  "pp",      "world", "other",       "data"};

typedef struct {
    double least, most, sum;
    int64_t count; // values that are finite
} Spread;

typedef struct {
    int64_t last_step, steps; // the last step with a line; how many there are
    Spread curves[CURVES];
    double time[TIME_PARTS]; // seconds, summed over the steps
    int64_t skips, saves, resumes;
} HistoryBucket;

typedef struct {
    HistoryBucket buckets[HISTORY_BUCKETS];
    int count;
    int64_t first_step, last_step; // 0: no line so far
    int64_t stride;                // steps per bucket
    double last[CURVES];           // the newest finite values; NAN: none so far
    double best[CURVES];           // the lowest losses, and the steps at which they were reached
    int64_t best_step[CURVES];
    double seconds, matmul_share, mfu; // of the last step; the shares may be NAN
    double total_seconds; // of all steps
    int64_t tokens, skips, saves, resumes, last_save;
    int64_t outliers;   // of the skipped steps, those with an outlier
    int64_t unreadable; // lines that were left out
} History;

static History *history_open(void) {
    History *h = new_array(History, 1);
    h->stride = 1;
    for (int c = 0; c < CURVES; c++) h->last[c] = h->best[c] = NAN;
    return h;
}

// ---------------------------------------------------------------------------
// buckets

static void spread_add(Spread *s, double value) {
    s->least = s->count ? fmin(s->least, value) : value;
    s->most = s->count ? fmax(s->most, value) : value;
    s->sum += value;
    s->count++;
}

static void spread_merge(Spread *s, const Spread *other) {
    if (!other->count) return;
    s->least = s->count ? fmin(s->least, other->least) : other->least;
    s->most = s->count ? fmax(s->most, other->most) : other->most;
    s->sum += other->sum;
    s->count += other->count;
}

static double spread_mean(const Spread *s) { return s->count ? s->sum / (double)s->count : NAN; }

static void bucket_merge(HistoryBucket *b, const HistoryBucket *later) {
    b->last_step = max_i64(b->last_step, later->last_step);
    b->steps += later->steps;
    for (int c = 0; c < CURVES; c++) spread_merge(&b->curves[c], &later->curves[c]);
    for (int t = 0; t < TIME_PARTS; t++) b->time[t] += later->time[t];
    b->skips += later->skips;
    b->saves += later->saves;
    b->resumes += later->resumes;
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
    h->buckets[i].last_step = max_i64(h->buckets[i].last_step, step);
    return &h->buckets[i];
}

// ---------------------------------------------------------------------------
// lines

/* The number under a key, whether it was parsed or is about to be written; NAN: there is none. */
static double line_number(const cJSON *line, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, key);
    if (cJSON_IsNumber(item)) return item->valuedouble;
    return cJSON_IsRaw(item) ? strtod(item->valuestring, NULL) : NAN;
}

static void history_add_value(History *h, HistoryBucket *b, Curve curve, double value, int64_t step) {
    if (!isfinite(value)) return;
    spread_add(&b->curves[curve], value);
    h->last[curve] = value;
    if (value >= h->best[curve]) return;
    h->best[curve] = value;
    h->best_step[curve] = step;
}

/* Divides the seconds of a step. Clocks and rounding may let the waits exceed the step; then it has not computed. */
static void history_add_time(HistoryBucket *b, const cJSON *line) {
    const cJSON *axes = cJSON_GetObjectItemCaseSensitive(line, "wait_axis_s");
    double wait = line_number(line, "wait_s"), data = line_number(line, "data_wait_s"), known = 0;
    double seconds = line_number(line, "seconds");
    wait = isfinite(wait) ? fmax(0, wait) : 0;
    data = isfinite(data) ? fmax(0, data) : 0;
    for (int t = TIME_FSDP; t <= TIME_WORLD; t++) {
        double part = line_number(axes, time_keys[t]);
        if (!isfinite(part) || part < 0) continue;
        b->time[t] += part;
        known += part;
    }
    double other = wait - known;
    if (other > 1e-5) b->time[TIME_OTHER] += other; // less is rounding
    b->time[TIME_DATA] += data;
    if (isfinite(seconds)) b->time[TIME_COMPUTE] += fmax(0, seconds - fmax(wait, known) - data);
}

static void history_mark_save(History *h, int64_t step) {
    if (step <= h->last_save || !h->first_step || step < h->first_step) return;
    history_bucket(h, step)->saves++;
    h->saves++;
    h->last_save = step;
}

static void history_add_step(History *h, const cJSON *line, int64_t step) {
    HistoryBucket *b = history_bucket(h, step);
    double saved = line_number(line, "saved"), seconds = line_number(line, "seconds");
    b->steps++;
    for (int c = CURVE_LOSS; c < CURVES; c++)
        history_add_value(h, b, (Curve)c, line_number(line, curve_keys[c]), step);
    history_add_time(b, line);
    int skipped = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "skipped"));
    int resumed = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(line, "resumed"));
    b->skips += skipped;
    h->skips += skipped;
    b->resumes += resumed;
    h->resumes += resumed;
    h->seconds = isfinite(seconds) ? seconds : 0;
    h->total_seconds += h->seconds;
    h->matmul_share = line_number(line, "matmul_share");
    h->mfu = line_number(line, "mfu");
    double tokens = line_number(line, "tokens");
    if (tokens > 0 && tokens < 1e18) h->tokens = (int64_t)tokens;
    if (saved >= 1 && saved < (double)step) history_mark_save(h, (int64_t)saved);
    if (resumed) history_mark_save(h, step - 1); // by the checkpoint from which it was resumed
}

/* Adds a line of metrics.jsonl, or one that is about to be written there. `limit`: the last step that it may have. */
static void history_add_line(History *h, const cJSON *line, int64_t limit) {
    double number = line_number(line, "step");
    int is_outlier = cJSON_GetObjectItemCaseSensitive(line, "outlier") != NULL; // the step has a line of its own, too
    int is_step = !is_outlier && cJSON_GetObjectItemCaseSensitive(line, "loss") != NULL;
    int is_validation = cJSON_GetObjectItemCaseSensitive(line, "val_loss") != NULL;
    int is_accuracy = cJSON_GetObjectItemCaseSensitive(line, "accuracy") != NULL;
    int fits = number >= 1 && number <= (double)limit && number == floor(number);
    if (!fits || (int64_t)number < h->first_step || !(is_step || is_validation || is_accuracy || is_outlier)) {
        h->unreadable++;
        return;
    }
    int64_t step = (int64_t)number;
    if (is_outlier) {
        h->outliers++;
        return;
    }
    if (is_step) history_add_step(h, line, step);
    for (int c = CURVE_VALIDATION; c < CURVE_LOSS && !is_step; c++)
        history_add_value(h, history_bucket(h, step), (Curve)c, line_number(line, curve_keys[c]), step);
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
