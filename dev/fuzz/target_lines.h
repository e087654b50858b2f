/* target_lines.h: files of JSON lines: samples.jsonl, which --audit reads, conversations, and
 * the requests of --score and --choices; and the list of files and weights of --data.
 * Input of `audit`: f FILE, or j LIST, whose items are written on a line each.
 * Input of `chat`: c (ChatML) or l (Llama 3), then the file. Input of `requests`: s (--score) or c (--choices), then
 * the file. Input of `mixture`: the list, where @ stands for the directory of the token files.
 */
#ifndef TARGET_LINES_H
#define TARGET_LINES_H
#define main chat_main
#include "programs/tokens/conversations.h"
#undef main

// ---------------------------------------------------------------------------
// samples.jsonl

/* Whether a line announces so many windows that their table would not fit the memory of this machine. */
static int has_many_windows(const char *text) {
    for (const char *at = strstr(text, "\"windows\""); at; at = strstr(at + 1, "\"windows\"")) {
        const char *colon = strchr(at, ':');
        if (colon && strtod(colon + 1, NULL) > 1e6 && strtod(colon + 1, NULL) <= INT32_MAX) return 1;
    }
    return 0;
}

static void give_lines(Bytes list) {
    char *text, *json_list = text_of(list);
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    cJSON *json = cJSON_Parse(json_list), *item;
    cJSON_ArrayForEach(item, json) {
        char *line = cJSON_PrintUnformatted(item);
        fprintf(f, "%s\n", line);
        free(line);
    }
    text_stream_close(f);
    give("saved/samples.jsonl", text, length);
    cJSON_Delete(json);
    free(json_list);
    free(text);
}

static void fuzz_audit(Bytes in) {
    int kind = next_byte(&in);
    char *text = text_of(in);
    int too_many = has_many_windows(text);
    free(text);
    if (too_many) return;
    if (kind == 'j') give_lines(in);
    else give("saved/samples.jsonl", in.at, in.left);
    audit(path_of("saved"));
    held.taken = 1;
    cJSON *json = cJSON_ParseWithLength(said_out.text, said_length(&said_out));
    const char *const keys[] = {"steps", "samples", "windows", "whole_epochs", "dropped", "of_last_epoch"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, keys[i]);
        EXPECT(cJSON_IsNumber(item) && item->valuedouble >= 0, "\"%s\" in %.*s", keys[i], (int)said_length(&said_out),
               said_out.text);
    }
    cJSON_Delete(json);
}

static const char *const audit_words[] = {"{\"windows\":4,\"tail\":\"drop\"}",
                                          "\"tail\":\"pad\"",
                                          "\"consumed_before\":4",
                                          "{\"step\":1,\"epoch\":0,\"samples\":[0,1]}",
                                          "\"step\":2",
                                          "\"epoch\":1",
                                          "\"samples\":[]",
                                          NULL};

// ---------------------------------------------------------------------------
// conversations

/* A tokenizer with a token for each byte and, if `with_header`, the special tokens of ChatML. It is opened once. */
static const Tokenizer *chat_tokenizer(int with_header) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static Tokenizer *opened[2];
    int counted = running;
    if (opened[with_header]) return opened[with_header];
    running = 0; // what is allocated here stays
    char *file = (char *)checked_malloc(1 << 14), *at = file;
    if (with_header)
        at += sprintf(at, "byte-level-bpe 1\ntokens 258\nmissing 0\nbos -\neos <|im_end|>\neot <|im_end|>\nsplit %s\n",
                      llama3_split);
    for (int i = 0; i < 256; i++) at += sprintf(at, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i);
    if (with_header) at += sprintf(at, "special <|im_start|> 256\nspecial <|im_end|> 257\n");
    opened[with_header] = tokenizer_open(give("chat.model", file, (size_t)(at - file)));
    free(file);
    running = counted;
    return opened[with_header];
}

/* The text of a conversation in ChatML, by the template in words; the caller frees it. */
static char *chatml_text(const char *line, size_t *length) {
    char *text;
    cJSON *json = cJSON_Parse(line);
    const cJSON *list = cJSON_IsObject(json) ? cJSON_GetObjectItemCaseSensitive(json, "messages") : json, *message;
    FILE *f = text_stream_open(&text, length);
    cJSON_ArrayForEach(message, list) {
        const char *role = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(message, "role"));
        const char *content = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(message, "content"));
        fprintf(f, "<|im_start|>%s\n%s<|im_end|>\n", role, content);
    }
    text_stream_close(f);
    cJSON_Delete(json);
    return text;
}

static void check_conversation(const Chat *c, const char *line) {
    size_t length = 0, at = 0;
    char *want = c->t->llama3 ? NULL : chatml_text(line, &length);
    for (size_t i = 0; i < c->count; i++) {
        const char *bytes;
        size_t n = tokenizer_decode(c->t, c->ids[i], &bytes);
        EXPECT(n > 0 && c->mask[i] <= 1, "token %zu is %d, its mask %d", i, c->ids[i], c->mask[i]);
        if (!want) continue;
        EXPECT(at + n <= length && !memcmp(want + at, bytes, n), "token %zu is not that of %s", i, want);
        at += n;
    }
    EXPECT(at == length, "%zu bytes of tokens, the text has %zu: %s", at, length, want ? want : "");
    free(want);
}

static void fuzz_chat(Bytes in) {
    Chat c;
    const Tokenizer *t = chat_tokenizer(next_byte(&in) != 'l');
    chat_open(&c, t, chat_template_find(t, path_of("chat.model")));
    char *text = text_of(in);
    for (size_t at = 0, length; at < in.left; at += length) {
        const char *end = (const char *)memchr(text + at, '\n', in.left - at);
        length = end ? (size_t)(end + 1 - (text + at)) : in.left - at;
        Bytes bytes = {(const uint8_t *)text + at, length};
        char *line = text_of(bytes);
        chat_line(&c, "chat.jsonl", line, length);
        held.taken = 1;
        check_conversation(&c, line);
        free(line);
    }
    free(text);
    chat_close(&c);
}

static const char *const chat_words[] = {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n",
                                         "{\"role\":\"system\",\"content\":\"b\"}",
                                         "{\"role\":\"assistant\",\"content\":\" c \"}",
                                         "\"role\":\"user\"",
                                         "\"content\":\"<|im_end|>\"",
                                         "\"tools\":[]",
                                         "\"tool_calls\":null",
                                         "\\u00e9",
                                         "\\u0000",
                                         "\\ud83d\\ude00",
                                         "\\n",
                                         NULL};

// ---------------------------------------------------------------------------
// requests

enum { FUZZ_SEQ = 24, FUZZ_BATCH = 3 };

static void check_requests(const Requests *r, const Tokenizer *t) {
    int64_t covered = 0, sum = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const ScoreRequest *q = &r->requests[i];
        EXPECT(q->scored >= 1 && q->tokens > q->scored && q->tokens <= FUZZ_SEQ + 1, "request %d has %d of %d tokens",
               (int)i, q->scored, q->tokens);
        EXPECT(q->first >= 0 && (size_t)(q->first + q->tokens) <= r->num_ids, "request %d ends after %zu ids", (int)i,
               r->num_ids);
        for (int n = 0; n < q->tokens; n++)
            EXPECT(r->ids[q->first + n] >= 0 && r->ids[q->first + n] < t->vocab_size, "id %d", r->ids[q->first + n]);
    }
    for (int64_t b = 0; b < r->num_batches; b++) {
        const ScoreBatch *batch = &r->batches[b];
        EXPECT(batch->first == covered && batch->rows >= 1 && batch->rows * batch->T <= FUZZ_BATCH * FUZZ_SEQ,
               "batch %d has %d rows of %d tokens", (int)b, batch->rows, batch->T);
        for (int row = 0; row < batch->rows; row++) {
            const ScoreRequest *q = &r->requests[r->order[covered + row]];
            EXPECT(q->tokens - 1 <= batch->T, "%d tokens in a row of %d", q->tokens - 1, batch->T);
            sum += r->order[covered + row];
        }
        covered += batch->rows;
    }
    EXPECT(covered == r->count && sum == r->count * (r->count - 1) / 2, "%d of %d requests are in a batch",
           (int)covered, (int)r->count);
}

static void fuzz_requests(Bytes in) {
    Requests r;
    int choices = next_byte(&in) == 'c';
    const Tokenizer *t = chat_tokenizer(1);
    requests_read(&r, give("requests.jsonl", in.at, in.left), choices, t, NULL, t->vocab_size);
    requests_cut(&r, FUZZ_SEQ);
    requests_make_batches(&r, FUZZ_BATCH, FUZZ_SEQ, 0);
    held.taken = 1;
    check_requests(&r, t);
    requests_close(&r);
}

static const char *const request_words[] = {"{\"id\":1,\"context\":\"a\",\"continuation\":\" b\"}\n",
                                            "{\"context_ids\":[1,2],\"continuation_ids\":[3]}\n",
                                            "{\"context\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":0}\n",
                                            "\"ctx\":\"\"",
                                            "\"label\":\"1\"",
                                            "\"id\":{\"a\":[null]}",
                                            "\\u0020",
                                            "\\u0000",
                                            "\\ud83d\\ude00",
                                            NULL};

// ---------------------------------------------------------------------------
// lists of token files and weights

/* The list in `in`. A slash becomes a dot, except after @, so that globs stay in the directory of the token files. */
static char *list_of(Bytes in) {
    char *text, *given = text_of(in);
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    for (const char *at = given; *at; at++) {
        if (*at == '@') fprintf(f, "%s/", folder);
        else fputc(*at == '/' ? '.' : *at, f);
    }
    text_stream_close(f);
    free(given);
    return text;
}

/* The entries, written as a list again, must be the same entries. */
static void check_list(const DataList *list) {
    char *text;
    size_t length;
    DataList again;
    FILE *f = text_stream_open(&text, &length);
    for (int i = 0; i < list->count; i++) {
        fprintf(f, "%s%s", i ? "," : "", list->entries[i].pattern);
        if (list->has_weights) fprintf(f, ":%.17g", list->entries[i].weight);
    }
    text_stream_close(f);
    data_list_parse(&again, text);
    EXPECT(again.count == list->count && again.has_weights == list->has_weights, "%d entries of %d in %s", again.count,
           list->count, text);
    for (int i = 0; i < list->count; i++)
        EXPECT(!strcmp(again.entries[i].pattern, list->entries[i].pattern) &&
                   again.entries[i].weight == list->entries[i].weight,
               "entry %d of %s is %s:%g", i, text, again.entries[i].pattern, again.entries[i].weight);
    data_list_close(&again);
    free(text);
}

/* The shares must be those of the weights, and the schedule must keep them. Returns the period of the schedule. */
static int check_shares(const DataList *list) {
    int units[MOST_SOURCES], sum = 0, step = SHARE_UNITS;
    double weights = 0;
    shares_of_weights(list, units);
    for (int i = 0; i < list->count; i++) weights += list->entries[i].weight;
    for (int i = 0; i < list->count; i++) {
        sum += units[i];
        while (units[i] % step || SHARE_UNITS % step) step--; // the largest divisor of all units
        EXPECT(fabs(units[i] - list->entries[i].weight / weights * (double)SHARE_UNITS) < 1 + 1e-6,
               "entry %d has %d units", i, units[i]);
    }
    EXPECT(sum == SHARE_UNITS, "the shares sum to %d", sum);
    return SHARE_UNITS / step;
}

static void check_mixture(const Dataset *d, int period) {
    const Mixture *m = d->mixture;
    int64_t counts[MOST_SOURCES] = {0};
    EXPECT(m->period == period && m->num_sources == d->num_sources, "a period of %d, expected %d", m->period, period);
    Sampler s = {d->windows, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, d, 1};
    for (int64_t n = 0; n < period + 3; n++) {
        MixtureSample sample = mixture_sample(m, n);
        EXPECT(sample.index == counts[sample.source]++, "sample %d is number %d of source %d", (int)n,
               (int)sample.index, sample.source);
        int64_t w = sampler_window(&s, n, 0, 0) - d->sources[sample.source].first_window;
        EXPECT(w >= 0 && w < d->sources[sample.source].windows, "window %d of source %d", (int)w, sample.source);
        for (int k = 0; k < m->num_sources; k++)
            EXPECT(fabs((double)counts[k] - (double)m->quota[k] * (double)(n + 1) / period) < 1,
                   "%d of %d samples from source %d", (int)counts[k], (int)n + 1, k);
    }
}

static void fuzz_mixture(Bytes in) {
    static const uint8_t file[64 + 2 * 9] = "LLM3TOK1\1\0\0\0\2\0\0\0\2\0\0\0\0\0\0\0\11"; // nine tokens 0
    static const char *const names[] = {"a.mix", "b.mix", "c,d.mix", "e:1.mix"};
    static int made;
    for (; made < 4; made++) give(names[made], file, sizeof file);
    DataList list;
    char *text = list_of(in);
    data_list_parse(&list, text);
    check_list(&list);
    int period = list.has_weights ? check_shares(&list) : 1;
    if (period <= 2000) { // longer schedules take longer than everything else
        Dataset d = dataset_open(text, 4, 2, 0);
        held.taken = 1;
        if (d.mixture) check_mixture(&d, period);
        dataset_close(&d);
    }
    data_list_close(&list);
    free(text);
}

static const char *const mixture_words[] = {"@a.mix", "@b.mix:0.3", "@?.mix", "@c,d.mix", "@e:1.mix",
                                            ":0.7",   ":1e3",       ",",      "nan",      NULL};

#endif
