/* prompts.h: what --prompt and --prompts continue, and how the next token is chosen.
 *
 * A prompt is the text of --prompt, a line of --prompts FILE, or the "prompt" or "prompt_ids" of a JSON object in a
 * line of --prompts FILE.jsonl. The object may override the options with "max_tokens", "temperature", "top_p", "top_k"
 * and "seed". A text follows the token that the tokenizer puts in front of texts, such as <|begin_of_text|>. An empty
 * prompt is that token or, if there is none, the one that ends documents. Names of special tokens are plain text. */
#ifndef PROMPTS_H
#define PROMPTS_H
#include "../../lib/io/input.h"          // defines: input_open
#include "../../run/setup/config_json.h" // defines: StopTokens
#include "../../tokenizer.h"             // defines: Tokenizer, tokenizer_encode
#include "../shared/request_lines.h"     // defines: json_ids, request_text, request_name
#include "../shared/text_input.h"        // defines: UTF8_BYTE_ORDER_MARK, utf8_valid_length, json_has_zero_byte

typedef struct {
    double temperature; // 0: always take the most probable token
    double top_p;       // sample from the most probable tokens that together have this probability
    int top_k;          // sample from this many of the most probable tokens; 0: from all
    uint64_t seed;
} Sampling;

typedef struct {
    int32_t *ids; // (length) at least one
    size_t length;
    int unprinted;  // tokens at its beginning that were added to the user's text
    int line;       // of --prompts; 0: the prompt of --prompt
    int is_request; // a line of JSON: so is its answer
    char *name;     // the value of "id", as JSON; NULL: it has none
    int max_tokens; // of the answer
    Sampling sampling;
} Prompt;

typedef struct {
    Prompt *list; // (count)
    int count;
    size_t room;     // capacity of the list
    int longest;     // tokens of the longest prompt
    int most;        // tokens of a prompt and its answer
    int vocab_size;  // of the model
    Prompt defaults; // max_tokens and sampling, unless a request has others
} Prompts;

static Prompt *prompts_append(Prompts *p, int line) {
    p->list = (Prompt *)with_room_for_one(p->list, (size_t)p->count, &p->room, sizeof *p->list);
    Prompt *prompt = &p->list[p->count++];
    *prompt = p->defaults;
    prompt->line = line;
    return prompt;
}

static void prompt_complete(Prompts *p, const Prompt *prompt) {
    p->longest = (int)max_i64(p->longest, (int64_t)prompt->length);
    p->most = (int)max_i64(p->most, (int64_t)prompt->length + prompt->max_tokens);
}

/* Sets the tokens of a text. */
static void prompt_set_text(Prompt *prompt, const Tokenizer *t, const char *text, size_t length) {
    size_t capacity = length + 1;
    prompt->ids = new_array(int32_t, capacity);
    if (t->front != NO_TOKEN || !length) { // an empty prompt: the model starts a new document
        prompt->ids[prompt->length++] = t->front != NO_TOKEN ? t->front : t->eos;
        prompt->unprinted = 1;
    }
    prompt->length = tokenizer_encode(t, text, length, &prompt->ids, &capacity, prompt->length);
}

static void prompts_add(Prompts *p, const Tokenizer *t, const char *text, size_t length, int line) {
    Prompt *prompt = prompts_append(p, line);
    prompt_set_text(prompt, t, text, length);
    prompt_complete(p, prompt);
}

/* Adds a line of --prompts FILE.jsonl. */
static void prompts_add_request(Prompts *p, const Tokenizer *t, const char *text, size_t length, const char *where,
                                int line) {
    static const char *const keys[] = {"id",          "prompt", "prompt_ids", "max_tokens",
                                       "temperature", "top_p",  "top_k",      "seed"};
    enum { KEYS = sizeof keys / sizeof *keys };
    cJSON *json = json_parse_object(text, length, where, "one request per line");
    json_refuse_duplicates(json, where);
    if (json_has_zero_byte(text)) user_error("%s: found \\u0000 in a text, expected none: remove it", where);
    const cJSON *item;
    const char *prompt_text = request_text(json, where, "prompt");
    int has_ids = cJSON_GetObjectItemCaseSensitive(json, "prompt_ids") != NULL;
    cJSON_ArrayForEach(item, json) {
        int known = 0;
        while (known < KEYS && strcmp(keys[known], item->string)) known++;
        if (known == KEYS)
            user_error(
                "%s: the key \"%s\" is unknown; expected id, prompt or prompt_ids, max_tokens, temperature, top_p, "
                "top_k, seed",
                where, item->string);
    }
    if (!prompt_text == !has_ids)
        user_error("%s: found %s \"prompt\" and \"prompt_ids\", expected one of them", where,
                   has_ids ? "both" : "neither");
    Prompt *prompt = prompts_append(p, line);
    Sampling *s = &prompt->sampling;
    prompt->is_request = 1;
    prompt->max_tokens = json_integer(json, where, "max_tokens", prompt->max_tokens, 1, 1 << 20);
    s->temperature = json_number(json, where, "temperature", s->temperature, 0, 100);
    s->top_p = json_number(json, where, "top_p", s->top_p, 1e-6, 1);
    s->top_k = json_integer(json, where, "top_k", 0, 0, INT32_MAX);
    s->seed = (uint64_t)json_whole_number(json, where, "seed", (double)s->seed, 0, 0x1p53);
    prompt->name = request_name(text);
    if (prompt_text) prompt_set_text(prompt, t, prompt_text, strlen(prompt_text));
    else {
        const cJSON *ids = json_ids(json, where, "prompt_ids", p->vocab_size);
        prompt->ids = new_array(int32_t, cJSON_GetArraySize(ids) + 1);
        cJSON_ArrayForEach(item, ids) prompt->ids[prompt->length++] = (int32_t)item->valuedouble;
        if (!prompt->length) user_error("%s: \"prompt_ids\" is empty, expected at least one id", where);
    }
    prompt_complete(p, prompt);
    cJSON_Delete(json);
}

/* Do the files of this name hold JSON lines? */
static int is_json_lines_name(const char *path) {
    static const char *const ends[] = {".jsonl", ".json", ".ndjson", ".jsonlines", ".jl"};
    size_t n = strlen(path);
    for (int i = 0; i < 5; i++)
        if (n > strlen(ends[i]) && !strcasecmp(path + n - strlen(ends[i]), ends[i])) return 1;
    return 0;
}

/* Adds the lines of a file, without their ends, which may be those of Windows. Empty lines are skipped. */
static void prompts_read(Prompts *p, const Tokenizer *t, const char *path) {
    size_t room = 0;
    int is_json = is_json_lines_name(path), before = p->count;
    const char *expected = is_json ? "a file of JSON lines, a request each" : "a text file with one prompt per line";
    FILE *f = input_open(path, expected);
    char *text = NULL, where[4200];
    if (!f) user_error("--prompts %s cannot be opened: %s; expected %s", path, strerror(errno), expected);
    for (int line = 1;; line++) {
        ssize_t got = getline(&text, &room, f);
        if (got < 0) break;
        size_t length = (size_t)got, skipped = line == 1 && !strncmp(text, UTF8_BYTE_ORDER_MARK, 3) ? 3 : 0;
        if (text[length - 1] == '\n') length--;
        if (length && text[length - 1] == '\r') length--;
        text[length] = 0;
        size_t valid = utf8_valid_length(text, length);
        snprintf(where, sizeof where, "--prompts %s, line %d", path, line);
        if (valid < length || strlen(text) < length)
            user_error("%s: found %s at byte %zu, expected %s in UTF-8", where,
                       valid < length ? "invalid UTF-8" : "a NUL", valid < length ? valid : strlen(text), expected);
        if (length == skipped) continue;
        if (is_json) prompts_add_request(p, t, text + skipped, length - skipped, where, line);
        else prompts_add(p, t, text + skipped, length - skipped, line);
    }
    if (ferror(f) || !feof(f))
        user_error("--prompts %s cannot be read: %s; expected %s", path, strerror(errno), expected);
    if (p->count == before) user_error("--prompts %s has no prompt; expected %s that is not empty", path, expected);
    fclose(f);
    free(text);
}

static void prompts_close(Prompts *p) {
    for (int i = 0; i < p->count; i++) {
        free(p->list[i].ids);
        free(p->list[i].name);
    }
    free(p->list);
}

/* Does generation end with this token? An id without a token ends it, too: there is nothing to print. The answer to a
 * request ends, as in transformers, only at the tokens that the model's files list, if they list any. */
static int is_stop_token(const StopTokens *stop, const Tokenizer *t, int32_t id, int of_request) {
    for (int i = 0; i < stop->count; i++)
        if (stop->ids[i] == id) return 1;
    int is_listed_only = of_request && stop->count;
    return (!is_listed_only && tokenizer_ends(t, id)) || id >= t->vocab_size;
}

#endif
