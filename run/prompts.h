/* prompts.h: what --generate continues, and the tokens at which it stops.
 *
 * Prompts are the text of --generate and the lines of --prompts. Generation stops at the tokenizer's tokens that end a
 * text or a turn, and at those that the model's directory names: "eos_token_id" in its config.json and
 * generation_config.json.
 */
#ifndef PROMPTS_H
#define PROMPTS_H
#include "../lib/input.h" // defines: input_open
#include "../lib/json.h"  // defines: json_read_object
#include "../tokenizer.h" // defines: Tokenizer, tokenizer_encode

typedef struct {
    int32_t *ids; // (length) at least one
    size_t length;
    int line; // of --prompts; 0: the prompt of --generate
} Prompt;

typedef struct {
    Prompt *list; // (count)
    int count;
    size_t room; // capacity of the list
    int longest; // tokens
} Prompts;

enum { MOST_STOP_TOKENS = 32 };
typedef struct {
    int32_t ids[MOST_STOP_TOKENS]; // (count)
    int count;
} StopTokens;

static void prompts_add(Prompts *p, const Tokenizer *t, const char *text, size_t length, int line) {
    Prompt prompt = {NULL, 0, line};
    size_t capacity = 0;
    prompt.length = tokenizer_encode(t, text, length, &prompt.ids, &capacity, 0);
    if (!prompt.length) { // an empty prompt: the model starts a new document
        free(prompt.ids);
        prompt.ids = new_array(int32_t, 1);
        prompt.ids[prompt.length++] = t->eos;
    }
    p->list = (Prompt *)with_room_for_one(p->list, (size_t)p->count, &p->room, sizeof *p->list);
    p->list[p->count++] = prompt;
    p->longest = (int)max_i64(p->longest, (int64_t)prompt.length);
}

/* Adds the lines of a file, without their ends, which may be those of Windows. Empty lines are skipped. */
static void prompts_read(Prompts *p, const Tokenizer *t, const char *path) {
    const char *expected = "a text file with one prompt per line";
    FILE *f = input_open(path, expected);
    char *text = NULL;
    size_t room = 0;
    int before = p->count;
    if (!f) user_error("--prompts %s cannot be opened: %s; expected %s", path, strerror(errno), expected);
    for (int line = 1;; line++) {
        ssize_t length = getline(&text, &room, f);
        if (length < 0) break;
        if (length && text[length - 1] == '\n') length--;
        if (length && text[length - 1] == '\r') length--;
        if (length) prompts_add(p, t, text, (size_t)length, line);
    }
    if (ferror(f) || !feof(f))
        user_error("--prompts %s cannot be read: %s; expected %s", path, strerror(errno), expected);
    if (p->count == before) user_error("--prompts %s has no prompt; expected %s that is not empty", path, expected);
    fclose(f);
    free(text);
}

static void prompts_close(Prompts *p) {
    for (int i = 0; i < p->count; i++) free(p->list[i].ids);
    free(p->list);
}

/* Adds one id of "eos_token_id". An id beyond the vocabulary is never generated. */
static void stop_token_add(StopTokens *stop, const cJSON *item, const char *path) {
    double id = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(id >= 0 && id <= INT32_MAX && id == floor(id)) || stop->count == MOST_STOP_TOKENS) {
        char *given = cJSON_PrintUnformatted(item);
        user_error("%s: \"eos_token_id\" has %s; expected a token's id, or a list of them, at most %d in all", path,
                   given ? given : "?", (int)MOST_STOP_TOKENS);
    }
    stop->ids[stop->count++] = (int32_t)id;
}

/* Adds the ids of "eos_token_id" in the file `name` of the model's directory. A missing file adds none. */
static void stop_tokens_read(StopTokens *stop, const char *model, const char *name) {
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/%s", model, name);
    if (!entry_exists(path)) return;
    cJSON *json = json_read_object(path, "a JSON object");
    if (!json) user_error("%s cannot be read: %s; expected a JSON object", path, strerror(errno));
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id"), *item;
    if (cJSON_IsArray(ids)) {
        cJSON_ArrayForEach(item, ids) stop_token_add(stop, item, path);
    } else if (ids && !cJSON_IsNull(ids)) {
        stop_token_add(stop, ids, path);
    }
    cJSON_Delete(json);
}

/* Does generation end with this token? An id without a token ends it, too: there is nothing to print. */
static int is_stop_token(const StopTokens *stop, const Tokenizer *t, int32_t id) {
    for (int i = 0; i < stop->count; i++)
        if (stop->ids[i] == id) return 1;
    return tokenizer_ends(t, id) || id >= t->vocab_size;
}

#endif
