/* target_audit.h: samples.jsonl, which --audit reads, and conversations.
 * Input of `audit`: f FILE, or j LIST, whose items are written on a line each.
 * Input of `chat`: c (ChatML) or l (Llama 3), then the file.
 */
#ifndef TARGET_AUDIT_H
#define TARGET_AUDIT_H
#include "chat_tokenizer.h"

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

#endif
