/* json.h: reads and writes JSON files with cJSON. A missing or unsuitable value is a user error that names the file,
 * the key and the range. */
#ifndef LIB_JSON_H
#define LIB_JSON_H
#include "../device/base.h"
#include <cjson/cJSON.h> // defines: cJSON_Parse, cJSON_GetObjectItemCaseSensitive, …

/* cJSON reports a failed allocation as if the text were not JSON; so its allocations must not fail. This runs before
 * main, since the tests and the tools have a main of their own. */
__attribute__((constructor)) static void json_set_allocator(void) {
    cJSON_Hooks hooks = {checked_malloc, free};
    cJSON_InitHooks(&hooks);
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Refuses objects that hold a key twice, at any depth: readers disagree on which of the two values is valid. */
static void json_refuse_duplicates(const cJSON *json, const char *path) {
    const cJSON *item;
    cJSON_ArrayForEach(item, json) json_refuse_duplicates(item, path);
    int count = 0, size = cJSON_GetArraySize(json); // of an object, its members
    if (!cJSON_IsObject(json) || size < 2) return;
    const char **keys = new_array(const char *, size);
    cJSON_ArrayForEach(item, json) keys[count++] = item->string;
    qsort(keys, (size_t)count, sizeof *keys, by_text);
    for (int i = 1; i < count; i++)
        if (!strcmp(keys[i - 1], keys[i]))
            user_error("%s: the key \"%s\" occurs twice in one object: remove the one that is wrong", path, keys[i]);
    free(keys);
}

/* Parses (length) `text`, which ends with a NUL and must be one JSON object; `expected` says of what. `path` is named
 * in errors. An object with duplicate keys is not refused here. */
static cJSON *json_parse_object(const char *text, size_t length, const char *path, const char *expected) {
    const char *end = NULL;
    if (strlen(text) < length)
        user_error("%s is not a JSON object: byte %zu is NUL; expected %s", path, strlen(text), expected);
    cJSON *json = cJSON_ParseWithOpts(text, &end, 0);
    if (!cJSON_IsObject(json)) user_error("%s is not a JSON object: expected %s", path, expected);
    end += strspn(end, " \t\r\n");
    if (*end)
        user_error("%s: found '%.*s' after the end of the JSON object, expected nothing more: remove it", path,
                   (int)min_i64(20, (int64_t)strcspn(end, "\r\n")), end);
    return json;
}

/* Reads a file that must hold a JSON object; `expected` says of what. NULL: it cannot be read, see errno. */
static cJSON *json_read_object(const char *path, const char *expected) {
    size_t length;
    char *text = read_regular_file(path, &length);
    if (!text) return NULL;
    cJSON *json = json_parse_object(text, length, path, expected);
    json_refuse_duplicates(json, path);
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

static int64_t json_whole_number(const cJSON *json, const char *path, const char *key, double fallback, double low,
                                 double high) {
    double x = json_number(json, path, key, fallback, low, high);
    if (x != floor(x)) user_error("%s: \"%s\" is %g, expected a whole number", path, key, x);
    return (int64_t)x;
}

static int json_integer(const cJSON *json, const char *path, const char *key, double fallback, int low, int high) {
    return (int)json_whole_number(json, path, key, fallback, low, high);
}

/* Returns the object that is the value of a key; NULL: the key is absent or null. */
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

/* Writes (length) UTF-8 as a JSON string. */
static inline void json_write_string(FILE *f, const char *text, size_t length) {
    fputc('"', f);
    for (size_t i = 0; i < length; i++) {
        uint8_t c = (uint8_t)text[i];
        if (c < 0x20) fprintf(f, "\\u%04x", c);
        else if (c == '"' || c == '\\') fprintf(f, "\\%c", c);
        else fputc(c, f);
    }
    fputc('"', f);
}

/* What follows the string of valid JSON that begins at `quote`. */
static inline const char *json_after_string(const char *quote) {
    const char *at = quote + 1;
    while (*at && *at != '"') at += at[0] == '\\' && at[1] ? 2 : 1;
    return *at ? at + 1 : at;
}

/* The value of a member as it stands in `object`, the text of a valid JSON object, and its length; NULL: there is no
 * such member. cJSON does not keep this text, and rounds numbers to 15 digits when it prints them. */
static inline const char *json_member_text(const char *object, const char *name, size_t *length) {
    const char *at = object + strcspn(object, "{");
    if (*at) at++;
    for (;;) {
        at += strspn(at, " \t\r\n,");
        if (*at != '"') return NULL;
        const char *key = at + 1;
        at = json_after_string(at);
        int is_wanted = (size_t)(at - 1 - key) == strlen(name) && !memcmp(key, name, strlen(name));
        at += strspn(at, " \t\r\n:");
        const char *value = at, *end = at; // `end`: behind its last character that is no white space
        int depth = 0;
        while (*at && (depth || (*at != ',' && *at != '}'))) {
            depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
            int is_space = strchr(" \t\r\n", *at) != NULL;
            at = *at == '"' ? json_after_string(at) : at + 1;
            if (!is_space) end = at;
        }
        *length = (size_t)(end - value);
        if (is_wanted) return value;
    }
}

/* A copy of `text`, to be freed, with U+FFFD for each byte that is no UTF-8: names of files may have any bytes, JSON
 * may not. */
static inline char *valid_utf8(const char *text) {
    size_t length = strlen(text), used = 0;
    char *valid = (char *)checked_malloc(3 * length + 1);
    for (size_t i = 0, n; i < length; i += n ? n : 1) {
        n = utf8_character_length((const uint8_t *)text + i, length - i);
        memcpy(valid + used, n ? text + i : "\xEF\xBF\xBD", n ? n : 3);
        used += n ? n : 3;
    }
    return valid;
}

static inline void json_add_name(cJSON *object, const char *key, const char *name) {
    char *valid = valid_utf8(name);
    cJSON_AddStringToObject(object, key, valid);
    free(valid);
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

/* The code point of a valid UTF-8 character of (length) bytes. */
static inline uint32_t utf8_code(const uint8_t *p, size_t length) {
    uint32_t code = length == 1 ? p[0] : p[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) code = code << 6 | (p[i] & 0x3Fu);
    return code;
}

/* Writes (length) bytes of UTF-8 for a script in HTML: control characters, '<', the characters of `escaped` and all
 * beyond ASCII as \u and four digits, so that no text ends a script element or acts in a terminal. Bytes that are not
 * UTF-8 become U+FFFD. */
static inline void json_write_inert(FILE *f, const char *text, size_t length, const char *escaped) {
    const uint8_t *p = (const uint8_t *)text, *end = p + length;
    while (p < end) {
        size_t size = utf8_character_length(p, (size_t)(end - p));
        uint32_t code = size ? utf8_code(p, size) : 0xFFFD;
        int is_plain = code >= 0x20 && code < 0x7F && code != '<' && !strchr(escaped, (int)code);
        if (is_plain) fputc((int)code, f);
        else if (code <= 0xFFFF) fprintf(f, "\\u%04x", code);
        else fprintf(f, "\\u%04x\\u%04x", 0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)); // a pair of UTF-16
        p += size ? size : 1;
    }
}

/* Writes (length) bytes as a JSON string for a script in HTML. */
static inline void json_write_script_string(FILE *f, const char *text, size_t length) {
    fputc('"', f);
    json_write_inert(f, text, length, "\"\\");
    fputc('"', f);
}

/* Writes a number with 9 significant digits; null if it is not finite. */
static inline void json_write_real(FILE *f, double value) {
    if (isfinite(value)) fprintf(f, "%.9g", value);
    else fputs("null", f);
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
