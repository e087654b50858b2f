/* request_lines.h: what requests in lines of JSON have in common: texts, lists of ids, the "id" that answers repeat. */
#ifndef REQUEST_LINES_H
#define REQUEST_LINES_H
#include "../../lib/io/json.h" // defines: json_parse_object, json_member_text

/* A text of a line; NULL: it is absent. */
static const char *request_text(const cJSON *json, const char *where, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (item && !cJSON_IsString(item)) user_error("%s: \"%s\" must be a text in quotes", where, key);
    return item ? item->valuestring : NULL;
}

/* The list of token ids under `key`; refuses ids that the model's vocabulary does not have. */
static const cJSON *json_ids(const cJSON *json, const char *where, const char *key, int vocab_size) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, key), *item;
    if (!cJSON_IsArray(list)) user_error("%s: \"%s\" must be a list of token ids, as in [15, 7, 2]", where, key);
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsNumber(item))
            user_error("%s: \"%s\" holds something that is not a number, expected ids from 0 to %d", where, key,
                       vocab_size - 1);
        double id = item->valuedouble;
        if (!(id >= 0 && id < vocab_size) || id != floor(id))
            user_error("%s: \"%s\" holds %.10g, expected ids from 0 to %d", where, key, id, vocab_size - 1);
    }
    return list;
}

/* The value of "id" as it stands in the line, to be freed; NULL: there is none. */
static char *request_name(const char *line) {
    size_t length;
    const char *value = json_member_text(line, "id", &length);
    if (!value) return NULL;
    char *name = (char *)checked_malloc(length + 1);
    snprintf(name, length + 1, "%s", value);
    return name;
}

#endif
