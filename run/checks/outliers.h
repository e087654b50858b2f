/* outliers.h: steps whose loss or gradient norm is far above those of the steps before them (--outlier-window).
 *
 * A window holds the values of the last N steps, also of steps whose update was skipped, so that it adapts to a lasting
 * change of level. A value is judged before it enters the window. A caller may rely on: z-scores depend on the values
 * alone, so that a resumed run, which reads them from trainer.json, finds the outliers that the first run would have.
 */
#ifndef OUTLIERS_H
#define OUTLIERS_H
#include "../../lib/io/json.h" // defines: cJSON, json_object, json_integer

enum { MAX_OUTLIER_WINDOW = 256 };
#ifndef MOST_SKIPS
#define MOST_SKIPS 10 // steps whose loss or gradient norm is not finite, before the run ends
#endif
typedef enum { OUTLIER_LOSS, OUTLIER_NORM, OUTLIER_KINDS } OutlierKind;
static const char *const outlier_keys[OUTLIER_KINDS] = {"loss", "grad_norm"}; // in trainer.json and metrics.jsonl

typedef struct {
    int count;
    double values[MAX_OUTLIER_WINDOW]; // (count) the oldest first
} OutlierWindow;

typedef struct {
    OutlierWindow windows[OUTLIER_KINDS];
    int skipped; // steps whose update was skipped because of an outlier
} Outliers;

/* Keeps the newest `size` values. */
static void outlier_window_trim(OutlierWindow *w, int size) {
    int extra = w->count - size;
    if (extra <= 0) return;
    memmove(w->values, w->values + extra, sizeof *w->values * (size_t)size);
    w->count = size;
}

/* Adds a value to a window of `size` values; one that is not finite is left out. */
static void outlier_window_add(OutlierWindow *w, int size, double value) {
    if (!isfinite(value)) return;
    outlier_window_trim(w, size - 1);
    w->values[w->count++] = value;
}

/* How many standard deviations `value` is above the mean of a window of `size` values. 0 while the window is not full
 * or if all its values are equal, and for a value that is not finite. */
static double outlier_z_score(const OutlierWindow *w, int size, double value) {
    double sum = 0, squares = 0, least = INFINITY, most = -INFINITY;
    if (w->count < size || !isfinite(value)) return 0;
    for (int i = 0; i < size; i++) {
        sum += w->values[i];
        least = fmin(least, w->values[i]);
        most = fmax(most, w->values[i]);
    }
    if (least == most) return 0; // rounding would leave a tiny deviation
    double mean = sum / size;
    for (int i = 0; i < size; i++) squares += (w->values[i] - mean) * (w->values[i] - mean);
    return (value - mean) / sqrt(squares / size);
}

/* Keeps the newest `size` values of windows that come from a checkpoint; size 0 clears them. */
static void outliers_continue(Outliers *o, int size) {
    for (int k = 0; k < OUTLIER_KINDS; k++) outlier_window_trim(&o->windows[k], size);
    if (!size) o->skipped = 0;
}

// ---------------------------------------------------------------------------
// trainer.json: "outliers":{"skipped":N,"loss":[…],"grad_norm":[…]}, if there are any windows

static void outliers_write(const Outliers *o, FILE *f) {
    if (!o->windows[OUTLIER_LOSS].count && !o->windows[OUTLIER_NORM].count && !o->skipped) return;
    fprintf(f, ",\n\"outliers\":{\"skipped\":%d", o->skipped);
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        const OutlierWindow *w = &o->windows[k];
        fprintf(f, ",\n\"%s\":[", outlier_keys[k]);
        for (int i = 0; i < w->count; i++) fprintf(f, "%s%.17g", i ? "," : "", w->values[i]); // reads back as it was
        fprintf(f, "]");
    }
    fprintf(f, "}");
}

/* Checkpoints of runs without --outlier-window have none. */
static void outliers_read(Outliers *o, const cJSON *trainer, const char *path) {
    const cJSON *json = json_object(trainer, path, "outliers"), *item;
    if (!json) return;
    o->skipped = json_integer(json, path, "skipped", NAN, 0, INT32_MAX);
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        OutlierWindow *w = &o->windows[k];
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, outlier_keys[k]);
        int is_valid = cJSON_IsArray(list) && cJSON_GetArraySize(list) <= MAX_OUTLIER_WINDOW;
        for (item = is_valid ? list->child : NULL; item; item = item->next) {
            is_valid &= cJSON_IsNumber(item) && isfinite(item->valuedouble);
            w->values[w->count++] = item->valuedouble;
        }
        if (!is_valid)
            user_error("%s: \"%s\" of \"outliers\" is not a list of at most %d finite numbers: the file is damaged; "
                       "resume from another checkpoint",
                       path, outlier_keys[k], MAX_OUTLIER_WINDOW);
    }
}

#endif
