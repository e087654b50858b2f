/* json.h: reads and writes JSON files with cJSON. A missing or unsuitable value is a user error that names the file,
 * the key and the range. */
#ifndef LIB_JSON_H
#define LIB_JSON_H
#include "base.h"
#include <cjson/cJSON.h> // defines: cJSON_Parse, cJSON_GetObjectItemCaseSensitive, …

static char *read_text_file(const char *path) {
    size_t length;
    return read_file(path, &length);
}

/* Reads a file that must hold a JSON object; `expected` says of what. NULL: it cannot be read, see errno. */
static cJSON *json_read_object(const char *path, const char *expected) {
    char *text = read_text_file(path);
    if (!text) return NULL;
    cJSON *json = cJSON_Parse(text);
    if (!cJSON_IsObject(json)) user_error("%s is not a JSON object: expected %s", path, expected);
    free(text);
    return json;
}

/* `fallback` is the value of a key that is absent or null; NAN: the key is required. */
static double json_number(const cJSON *json, const char *path, const char *key, double fallback, double low,
                          double high) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int present = item && !cJSON_IsNull(item);
    if (present && !cJSON_IsNumber(item)) user_error("%s: \"%s\" must be a number", path, key);
    if (!present && isnan(fallback))
        user_error("%s: \"%s\" is missing: expected a number from %.10g to %.10g", path, key, low, high);
    double x = present ? item->valuedouble : fallback;
    if (!(x >= low && x <= high)) user_error("%s: \"%s\" is %g, expected %.10g to %.10g", path, key, x, low, high);
    return x;
}

static int json_integer(const cJSON *json, const char *path, const char *key, double fallback, int low, int high) {
    double x = json_number(json, path, key, fallback, low, high);
    if (x != floor(x)) user_error("%s: \"%s\" is %g, expected a whole number", path, key, x);
    return (int)x;
}

/* NULL: the key is absent or null. */
static const cJSON *json_object(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item)) return NULL;
    if (!cJSON_IsObject(item)) user_error("%s: \"%s\" must be an object or null", path, key);
    return item;
}

static int json_flag(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (item && !cJSON_IsBool(item) && !cJSON_IsNull(item)) user_error("%s: \"%s\" must be true or false", path, key);
    return cJSON_IsTrue(item);
}

// ---------------------------------------------------------------------------
// writing

/* cJSON itself writes numbers above 10^15 with an exponent. */
static inline void json_add_integer(cJSON *object, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    cJSON_AddRawToObject(object, key, text);
}

/* A number in a printf format; null if it is not finite, since JSON has neither infinity nor NaN. */
static inline cJSON *json_real(const char *format, double value) {
    char text[64];
    if (!isfinite(value)) return cJSON_CreateNull();
    snprintf(text, sizeof text, format, value);
    return cJSON_CreateRaw(text);
}

static inline void json_add_flops(cJSON *object, const char *key, double flops) {
    cJSON_AddItemToObject(object, key, json_real("%.0f", flops));
}

/* The text of `root`, without line breaks unless `readable`; the caller frees it. Deletes `root`. */
static inline char *json_text(cJSON *root, int readable) {
    char *text = readable ? cJSON_Print(root) : cJSON_PrintUnformatted(root);
    if (!text) run_failure("out of memory while writing JSON");
    cJSON_Delete(root);
    return text;
}

/* Writes `root` as one line and deletes it. */
static inline void json_write_line(FILE *f, cJSON *root) {
    char *text = json_text(root, 0);
    fprintf(f, "%s\n", text);
    free(text);
}

/* A stream whose bytes are (length) `text` when text_stream_close has ended it; the caller frees them. */
static inline FILE *text_stream_open(char **text, size_t *length) {
    FILE *f = open_memstream(text, length);
    if (!f) run_failure("out of memory for a text");
    return f;
}
static inline void text_stream_close(FILE *f) {
    if (fclose(f)) run_failure("out of memory for a text");
}

#endif
