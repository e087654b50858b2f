/* model_ids.h: the ids of special tokens that a model's directory names: those that begin and end a text, and padding.
 *
 * A caller may rely on: what config.json and generation_config.json of --model say is read here once, and is in every
 * checkpoint and export.
 */
#ifndef MODEL_IDS_H
#define MODEL_IDS_H
#include "../../lib/io/json.h"        // defines: json_read_object, json_member_text, json_text
#include "../../lib/io/token_files.h" // defines: NO_ID

enum { MOST_STOP_TOKENS = 32 };
typedef struct {
    int32_t ids[MOST_STOP_TOKENS]; // (count)
    int count;
} StopTokens;

typedef struct {
    int32_t bos, pad; // NO_ID: unknown
    StopTokens eos;   // generation ends at each of them
} ModelIds;

// ---------------------------------------------------------------------------
// reading

static void stop_token_add(StopTokens *stop, int32_t id) {
    for (int i = 0; i < stop->count; i++)
        if (stop->ids[i] == id) return;
    if (stop->count == MOST_STOP_TOKENS)
        user_error(
            "more than %d token ids end a text in \"eos_token_id\" of config.json and generation_config.json and in "
            "the chat template: remove some from these files",
            (int)MOST_STOP_TOKENS);
    stop->ids[stop->count++] = id;
}

/* A token's id. One beyond the vocabulary is never generated. */
static int32_t json_id(const cJSON *item, const char *path, const char *key) {
    double id = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (id >= 0 && id <= INT32_MAX && id == floor(id)) return (int32_t)id;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" has %s; expected a token's id, or null%s", path, key, given ? given : "?",
               strcmp(key, "eos_token_id") ? "" : ", or a list of ids");
}

/* Adds the ids of "eos_token_id". */
static void stop_tokens_add(StopTokens *stop, const cJSON *json, const char *path) {
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id"), *item;
    if (cJSON_IsArray(ids)) {
        cJSON_ArrayForEach(item, ids) stop_token_add(stop, json_id(item, path, "eos_token_id"));
    } else if (ids && !cJSON_IsNull(ids)) {
        stop_token_add(stop, json_id(ids, path, "eos_token_id"));
    }
}

/* Sets an id that is still unknown. Some files have -1 where there is no token. */
static void model_id_read(int32_t *id, const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int is_none = !item || cJSON_IsNull(item) || (cJSON_IsNumber(item) && item->valuedouble == -1);
    if (*id == NO_ID && !is_none) *id = json_id(item, path, key);
}

static const ModelIds no_model_ids = {NO_ID, NO_ID, {{0}, 0}};

/* The ids that the files of a model's directory name; NULL: a preset, which has none. A missing file has none. */
static ModelIds model_ids_read(const char *model) {
    static const char *const names[] = {"config.json", "generation_config.json"};
    ModelIds ids = no_model_ids;
    for (int i = 0; i < 2 && model; i++) {
        char path[4096 + 32];
        snprintf(path, sizeof path, "%s/%s", model, names[i]);
        if (!entry_exists(path)) continue;
        cJSON *json = json_read_object(path, "a JSON object");
        if (!json) user_error("%s cannot be read: %s; expected a JSON object", path, strerror(errno));
        model_id_read(&ids.bos, json, path, "bos_token_id");
        model_id_read(&ids.pad, json, path, "pad_token_id");
        stop_tokens_add(&ids.eos, json, path);
        cJSON_Delete(json);
    }
    return ids;
}

// ---------------------------------------------------------------------------
// writing

static cJSON *json_of_id(int32_t id) { return id == NO_ID ? cJSON_CreateNull() : cJSON_CreateNumber(id); }

/* One id as a number, several as a list. */
static cJSON *json_of_stop_tokens(const StopTokens *stop) {
    if (stop->count <= 1) return json_of_id(stop->count ? stop->ids[0] : NO_ID);
    return cJSON_CreateIntArray(stop->ids, stop->count);
}

/* Writes the three keys of config.json, each followed by a comma. */
static void model_ids_write(const ModelIds *ids, FILE *f) {
    const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    cJSON *values[] = {json_of_id(ids->bos), json_of_stop_tokens(&ids->eos), json_of_id(ids->pad)};
    for (int i = 0; i < 3; i++) {
        char *text = json_text(values[i], 0);
        fprintf(f, "  \"%s\": %s,\n", keys[i], text);
        free(text);
    }
}

/* The text (length) of generation_config.json: the model's own, `text`, with "eos_token_id" replaced unless it lists
 * exactly ids->eos, or a new one if `text` is NULL. Frees `text`; the caller frees the result. */
static char *generation_config_text(const ModelIds *ids, char *text, size_t *length) {
    if (!text) {
        char *eos = json_text(json_of_stop_tokens(&ids->eos), 1);
        FILE *f = text_stream_open(&text, length);
        fprintf(f, "{\n");
        if (ids->bos != NO_ID) fprintf(f, "  \"bos_token_id\": %d,\n", ids->bos);
        fprintf(f, "  \"eos_token_id\": %s\n}\n", eos);
        text_stream_close(f);
        free(eos);
        return text;
    }
    cJSON *json = cJSON_Parse(text);
    StopTokens given = {{0}, 0};
    stop_tokens_add(&given, json, "generation_config.json");
    int has_all = given.count == ids->eos.count && !memcmp(given.ids, ids->eos.ids, sizeof *given.ids * given.count);
    if (has_all) {
        cJSON_Delete(json);
        return text;
    }
    // The rest stays as it is: printed again, 2.0 would be 2, which transformers refuses for some keys.
    size_t value_length = 0;
    const char *value = json_member_text(text, "eos_token_id", &value_length), *first = strchr(text, '{') + 1;
    char *eos = json_text(json_of_stop_tokens(&ids->eos), 0), *changed;
    FILE *f = text_stream_open(&changed, length);
    if (value) fprintf(f, "%.*s%s%s", (int)(value - text), text, eos, value + value_length);
    else fprintf(f, "%.*s\n  \"eos_token_id\": %s%s%s", (int)(first - text), text, eos, json->child ? "," : "", first);
    text_stream_close(f);
    cJSON_Delete(json);
    free(eos);
    free(text);
    return changed;
}

#endif
