/* requests.h: the requests of --score and the tasks of --choices, read from lines of JSON, as token ids.
 *
 * A request has a context and a continuation; its score is the log-probability of the continuation's tokens. A task of
 * --choices has one request for each of its endings. A text is split into tokens as by lm-evaluation-harness: spaces at
 * the end of the context belong to the continuation, and both are encoded together. If the context alone has n tokens,
 * the continuation is what follows the first n of them; the context keeps its own n. In front of a context is what the
 * tokenizer puts in front of a text; an empty one is that token alone or, if there is none, the end of a document, as
 * for generate_llama3. Names of special tokens are plain text. */
#ifndef REQUESTS_H
#define REQUESTS_H
#include "../../lib/io/input.h"      // defines: refuse_endless
#include "../../tokenizer.h"         // defines: Tokenizer, tokenizer_encode
#include "../shared/request_lines.h" // defines: request_text, request_name, json_ids
#include "../shared/text_input.h"    // defines: utf8_valid_length, length_without_space, with_room_for_one, …

typedef struct {
    int64_t first;    // its tokens are ids[first] to ids[first + tokens - 1]
    int tokens;       // of context and continuation
    int scored;       // of the continuation
    int line;         // of the file
    int ending_bytes; // --choices: bytes of the ending
    char *name;       // --score: the value of "id", as JSON; NULL: it has none
} ScoreRequest;

typedef struct {
    int64_t first; // its endings are requests[first] and the following ones
    int endings;
    int label; // the right one
} ChoiceTask;

/* `rows` requests that are computed together, order[first] and the following ones, each padded to T tokens. */
typedef struct {
    int64_t first;
    int rows, T;
} ScoreBatch;

typedef struct {
    const char *path;
    ScoreRequest *requests; // (count)
    int64_t count;
    ChoiceTask *tasks; // (num_tasks)
    int64_t num_tasks;
    int32_t *ids; // (num_ids)
    size_t num_ids;
    int64_t *order;      // (count) the requests, those with the most tokens first
    ScoreBatch *batches; // (num_batches)
    int64_t num_batches;
    int64_t num_cut; // requests whose context was too long
    uint64_t hash;   // of the file

    // while reading
    const Tokenizer *tokenizer; // NULL: there is none
    const char *why_none;       // the cause, while requests are read
    int vocab_size;             // of the model
    size_t ids_room, requests_room, tasks_room;
} Requests;

// ---------------------------------------------------------------------------
// one line

static void request_add_text(Requests *r, const char *text, size_t length) {
    r->num_ids = tokenizer_encode(r->tokenizer, text, length, &r->ids, &r->ids_room, r->num_ids);
}

static void request_add_id(Requests *r, int32_t id) {
    r->ids = (int32_t *)with_room_for_one(r->ids, r->num_ids, &r->ids_room, sizeof *r->ids);
    r->ids[r->num_ids++] = id;
}

/* Appends the ids of "context_ids" or "continuation_ids". Returns how many. */
static int request_add_ids(Requests *r, const cJSON *json, const char *where, const char *key) {
    const cJSON *item;
    size_t before = r->num_ids;
    cJSON_ArrayForEach(item, json_ids(json, where, key, r->vocab_size)) request_add_id(r, (int32_t)item->valuedouble);
    return (int)(r->num_ids - before);
}

/* Appends the tokens of a context and its continuation. Returns how many tokens the continuation has. */
static int request_add_texts(Requests *r, const char *where, const char *context, const char *continuation) {
    size_t length = length_without_space(context, strlen(context));
    if (!r->tokenizer)
        user_error("%s: texts need a tokenizer, and %s: give one with --tokenizer FILE, or give \"context_ids\" and "
                   "\"continuation_ids\"",
                   where, r->why_none);
    int32_t front = r->tokenizer->front;
    if (!length || front != NO_TOKEN) request_add_id(r, front != NO_TOKEN ? front : r->tokenizer->eos);
    size_t text = r->num_ids;
    request_add_text(r, context, length);
    size_t begin = r->num_ids, of_context = begin - text;
    size_t rest = strlen(context + length), added = strlen(continuation);
    char *whole = (char *)checked_malloc(length + rest + added + 1);
    memcpy(whole, context, length + rest);
    memcpy(whole + length + rest, continuation, added + 1);
    request_add_text(r, whole, length + rest + added);
    if (r->num_ids > begin + of_context) {
        r->num_ids -= of_context;
        memmove(r->ids + begin, r->ids + begin + of_context, (r->num_ids - begin) * sizeof *r->ids);
    } else { // a token spans the boundary, and none comes after it: each text is encoded by itself
        r->num_ids = begin;
        request_add_text(r, whole + length, rest + added);
    }
    free(whole);
    return (int)(r->num_ids - begin);
}

static ScoreRequest *request_add(Requests *r, int line) {
    r->requests =
        (ScoreRequest *)with_room_for_one(r->requests, (size_t)r->count, &r->requests_room, sizeof *r->requests);
    ScoreRequest *request = &r->requests[r->count++];
    memset(request, 0, sizeof *request);
    request->first = (int64_t)r->num_ids;
    request->line = line;
    return request;
}

/* All tokens from request->first on belong to the request, the last `scored` of them to its continuation. */
static void request_complete(const Requests *r, ScoreRequest *request, const char *where, int scored) {
    enum { MOST_TOKENS = 1 << 24 };
    size_t tokens = r->num_ids - (size_t)request->first;
    if (scored < 1) user_error("%s: the continuation has no tokens, expected at least one: remove the line", where);
    if (tokens > MOST_TOKENS)
        user_error("%s: %zu tokens, expected at most %d: shorten the context", where, tokens, (int)MOST_TOKENS);
    request->tokens = (int)tokens;
    request->scored = scored;
}

/* {"id": …, "context": "…", "continuation": "…"}, or with "context_ids" and "continuation_ids". `text`: the line. */
static void read_score_request(Requests *r, const char *text, const cJSON *json, const char *where, int line) {
    ScoreRequest *request = request_add(r, line);
    const char *context = request_text(json, where, "context");
    const char *continuation = request_text(json, where, "continuation");
    int scored, has_ids = cJSON_GetObjectItemCaseSensitive(json, "context_ids") ||
                          cJSON_GetObjectItemCaseSensitive(json, "continuation_ids");
    if (has_ids ? context || continuation : !context || !continuation)
        user_error("%s: expected \"context\" and \"continuation\", or \"context_ids\" and \"continuation_ids\"", where);
    if (has_ids) {
        if (!request_add_ids(r, json, where, "context_ids"))
            user_error("%s: \"context_ids\" is empty, but the first token has no probability without one before it: "
                       "begin with the token that ends or begins a document",
                       where);
        scored = request_add_ids(r, json, where, "continuation_ids");
    } else {
        scored = request_add_texts(r, where, context, continuation);
    }
    request_complete(r, request, where, scored);
    request->name = request_name(text);
}

/* The number of the right ending: HellaSwag's files have it as a number or, in some copies, as a text. */
static int read_label(const cJSON *json, const char *where, int endings) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, "label");
    const char *text = cJSON_IsString(item) ? item->valuestring : NULL;
    double label = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (text && text[0] && !text[strspn(text, "0123456789")]) label = strtod(text, NULL);
    if (!(label >= 0 && label < endings) || label != floor(label))
        user_error("%s: \"label\" must be the number of the right ending, from 0 to %d", where, endings - 1);
    return (int)label;
}

/* {"context": "…", "endings": ["…", …], "label": 0}; HellaSwag's own files call the context "ctx". A space comes
 * between the context and an ending unless one is there. */
static void read_choice_task(Requests *r, const cJSON *json, const char *where, int line) {
    const char *context = request_text(json, where, "context");
    const cJSON *endings = cJSON_GetObjectItemCaseSensitive(json, "endings"), *ending;
    if (!context) context = request_text(json, where, "ctx");
    if (!context || !cJSON_IsArray(endings) || cJSON_GetArraySize(endings) < 2)
        user_error("%s: expected \"context\", a text, and \"endings\", a list of at least two texts", where);
    r->tasks = (ChoiceTask *)with_room_for_one(r->tasks, (size_t)r->num_tasks, &r->tasks_room, sizeof *r->tasks);
    ChoiceTask *task = &r->tasks[r->num_tasks++];
    size_t length = strlen(context);
    int spaced = length && strchr(" \t\r\n", context[length - 1]);
    task->first = r->count;
    task->endings = cJSON_GetArraySize(endings);
    task->label = read_label(json, where, task->endings);
    cJSON_ArrayForEach(ending, endings) {
        if (!cJSON_IsString(ending) || !ending->valuestring[0])
            user_error("%s: \"endings\" must hold texts that are not empty", where);
        const char *text = ending->valuestring;
        char *continuation = (char *)checked_malloc(strlen(text) + 2);
        ScoreRequest *request = request_add(r, line);
        sprintf(continuation, "%s%s", spaced || text[0] == ' ' ? "" : " ", text);
        request_complete(r, request, where, request_add_texts(r, where, context, continuation));
        request->ending_bytes = (int)strlen(text);
        free(continuation);
    }
}

// ---------------------------------------------------------------------------
// all lines

/* Reads all requests, or with `choices` all tasks. `why_none`: the cause, if `tokenizer` is NULL. */
static void requests_read(Requests *r, const char *path, int choices, const Tokenizer *tokenizer, const char *why_none,
                          int vocab_size) {
    struct stat info;
    size_t length;
    char where[4200];
    int line = 0;
    memset(r, 0, sizeof *r);
    r->path = path;
    r->tokenizer = tokenizer;
    r->why_none = why_none;
    r->vocab_size = vocab_size;
    if (!stat(path, &info)) refuse_endless(path, &info, "a file of requests, one JSON object per line");
    char *text = read_file(path, &length);
    if (!text) user_error("cannot read %s: %s", path, strerror(errno));
    r->hash = hash_bytes(HASH_START, text, length);
    for (char *at = text, *end; at < text + length; at = end + 1) {
        end = (char *)memchr(at, '\n', (size_t)(text + length - at));
        if (!end) end = text + length; // the last line; read_file has put a NUL there
        *end = 0;
        line++;
        snprintf(where, sizeof where, "%s, line %d", path, line);
        if (!at[strspn(at, " \t\r")] && strlen(at) == (size_t)(end - at)) continue; // an empty line
        cJSON *json = json_parse_object(at, (size_t)(end - at), where, "one request per line");
        json_refuse_duplicates(json, where);
        if (utf8_valid_length(at, (size_t)(end - at)) < (size_t)(end - at))
            user_error("%s: invalid UTF-8 at byte %zu of the line; expected UTF-8", where,
                       utf8_valid_length(at, (size_t)(end - at)));
        if (json_has_zero_byte(at)) user_error("%s: found \\u0000 in a text, expected none: remove it", where);
        if (choices) read_choice_task(r, json, where, line);
        else read_score_request(r, at, json, where, line);
        cJSON_Delete(json);
    }
    free(text);
    r->why_none = NULL;
    if (!r->count) user_error("%s holds no requests: expected one JSON object per line", path);
}

/* The longest input of a request: its tokens but the last one. */
static int requests_longest(const Requests *r) {
    int longest = 0;
    for (int64_t i = 0; i < r->count; i++) longest = (int)max_i64(longest, r->requests[i].tokens - 1);
    return longest;
}

/* Cuts contexts on the left, as lm-evaluation-harness does, until every request fits in T tokens. */
static void requests_cut(Requests *r, int T) {
    for (int64_t i = 0; i < r->count; i++) {
        ScoreRequest *request = &r->requests[i];
        int excess = request->tokens - 1 - T;
        if (excess <= 0) continue;
        if (request->scored > T)
            user_error("%s, line %d: the continuation has %d tokens, and --seq is %d: use a larger --seq, or a shorter "
                       "continuation",
                       r->path, request->line, request->scored, T);
        request->first += excess;
        request->tokens -= excess;
        r->num_cut++;
    }
}

// ---------------------------------------------------------------------------
// batches

/* The most tokens first; requests of equal length in the order of the file. */
static int by_length(const void *a, const void *b) {
    const ScoreRequest *x = *(const ScoreRequest *const *)a, *y = *(const ScoreRequest *const *)b;
    if (x->tokens != y->tokens) return x->tokens < y->tokens ? 1 : -1;
    return (x > y) - (x < y);
}

enum { MOST_SCORE_ROWS = 256, SCORE_LENGTHS = 16 /* batches are padded to a multiple of so many tokens */ };

/* Divides the requests into batches of at most B · T tokens. They depend neither on the number of ranks nor on which
 * rank computes them, and so neither do the scores. With `same_shape` every batch is computed as B rows of T tokens,
 * because a context-parallel rank has fixed halves of T positions; else a batch of short requests has more rows. */
static void requests_make_batches(Requests *r, int B, int T, int same_shape) {
    const ScoreRequest **sorted = new_array(const ScoreRequest *, r->count);
    r->order = new_array(int64_t, r->count);
    r->batches = new_array(ScoreBatch, r->count);
    for (int64_t i = 0; i < r->count; i++) sorted[i] = &r->requests[i];
    qsort(sorted, (size_t)r->count, sizeof *sorted, by_length);
    for (int64_t i = 0; i < r->count; i++) r->order[i] = sorted[i] - r->requests;
    for (int64_t i = 0; i < r->count;) {
        ScoreBatch *batch = &r->batches[r->num_batches++];
        batch->first = i;
        batch->T = same_shape ? T : (int)min_i64(T, round_up(sorted[i]->tokens - 1, SCORE_LENGTHS));
        int rows = same_shape ? B : (int)((int64_t)B * T / batch->T);
        batch->rows = (int)min_i64(min_i64(rows, MOST_SCORE_ROWS), r->count - i);
        i += batch->rows;
    }
    free(sorted);
}

static void requests_close(Requests *r) {
    for (int64_t i = 0; i < r->count; i++) free(r->requests[i].name);
    free(r->requests);
    free(r->tasks);
    free(r->ids);
    free(r->order);
    free(r->batches);
}

#endif
