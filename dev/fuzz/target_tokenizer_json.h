/* target_tokenizer_json.h: tokenizer.json, and the files that name a chat template.
 * Input of `tokenizer_json`: f FILE, or m MODEL, which gets the other parts of a good file around it; 0, a text to
 * encode. Input of `chat_template`: c and a tokenizer_config.json, or j and a chat_template.jinja. Follows
 * target_tokenizer.h.
 */
#ifndef TARGET_TOKENIZER_JSON_H
#define TARGET_TOKENIZER_JSON_H
#include "chat_tokenizer.h"

// ---------------------------------------------------------------------------
// tokenizer.json, read once more: by names, one after the other

enum { MOST_NAMES = 400, LONGEST_TEXT = 64 };

/* The id that "vocab" gives to the text of n bytes; -1: none. */
static int vocab_id(const cJSON *vocab, const char *text, size_t n) {
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        if (strlen(item->string) == n && !memcmp(item->string, text, n)) return item->valueint;
    }
    return -1;
}

/* What merge number `rank` makes of two ids; -1: it is another merge. */
static int named_merge(const cJSON *vocab, const cJSON *merge, int left, int right) {
    char both[256];
    const char *parts[2];
    size_t n[2];
    if (cJSON_IsString(merge)) {
        const char *space = strchr(merge->valuestring, ' ');
        parts[0] = merge->valuestring;
        n[0] = (size_t)(space - parts[0]);
        parts[1] = space + 1;
    } else {
        parts[0] = merge->child->valuestring;
        n[0] = strlen(parts[0]);
        parts[1] = merge->child->next->valuestring;
    }
    n[1] = strlen(parts[1]);
    if (vocab_id(vocab, parts[0], n[0]) != left || vocab_id(vocab, parts[1], n[1]) != right) return -1;
    if (n[0] + n[1] > sizeof both) return -1;
    memcpy(both, parts[0], n[0]);
    memcpy(both + n[0], parts[1], n[1]);
    return vocab_id(vocab, both, n[0] + n[1]);
}

/* BPE as tokenizer.json defines it: again and again, the first merge of the list that any neighbors have. Returns the
 * number of ids. */
static size_t named_encode(const Tokenizer *t, const cJSON *model, const char *piece, size_t n, int32_t *ids) {
    const cJSON *vocab = json_get(model, "vocab"), *merge;
    int32_t whole = token_find(t, piece, n);
    if (cJSON_IsTrue(json_get(model, "ignore_merges")) && whole != NO_TOKEN) {
        ids[0] = whole;
        return 1;
    }
    for (size_t i = 0; i < n; i++) ids[i] = t->byte_token[(uint8_t)piece[i]];
    for (int merged = 1; merged;) {
        merged = 0;
        cJSON_ArrayForEach(merge, json_get(model, "merges")) {
            for (size_t i = 0; i + 1 < n && !merged; i++) {
                int id = named_merge(vocab, merge, ids[i], ids[i + 1]);
                if (id < 0) continue;
                ids[i] = id;
                n--;
                for (size_t k = i + 1; k < n; k++) ids[k] = ids[k + 1];
                merged = 1;
            }
            if (merged) break;
        }
    }
    return n;
}

static void check_named(const Tokenizer *t, const cJSON *model) {
    static const char *const hex = "0123456789abcdef";
    const cJSON *item;
    int count = 0;
    cJSON_ArrayForEach(item, json_get(model, "vocab")) {
        const char *bytes;
        size_t n = tokenizer_decode(t, item->valueint, &bytes), at = 0;
        count++;
        if (is_special(t, item->valueint)) {
            EXPECT(n == strlen(item->string) && !memcmp(bytes, item->string, n), "special token %d", item->valueint);
            continue;
        }
        for (size_t i = 0; i < n; i++) { // a printable byte of ASCII is its own character, another one takes two bytes
            uint8_t byte = (uint8_t)bytes[i];
            int plain = byte > ' ' && byte <= '~';
            EXPECT(plain ? item->string[at] == bytes[i] : (item->string[at] & 0xE0) == 0xC0,
                   "token %d, byte %c%c, is '%s'", item->valueint, hex[byte >> 4], hex[byte & 15], item->string);
            at += plain ? 1 : 2;
        }
        EXPECT(!item->string[at], "token %d has %zu bytes, '%s'", item->valueint, n, item->string);
    }
    EXPECT(t->vocab_size >= count && t->n_base + t->num_special == t->vocab_size, "%d tokens, %d names", t->vocab_size,
           count);
}

static void check_named_encoding(const Tokenizer *t, const cJSON *model, const char *text, size_t length) {
    int32_t *ids = NULL, named[LONGEST_TEXT + 1];
    size_t capacity = 0, valid = plain_valid_length((const uint8_t *)text, length), at = 0, seen = 0, end;
    char piece[LONGEST_TEXT];
    if (valid > LONGEST_TEXT) return;
    size_t count = tokenizer_encode(t, text, valid, &ids, &capacity, 0);
    Splitter splitter = splitter_open(t->split, t->llama3, valid);
    for (; at < valid; at = end) {
        end = split_next(&splitter, text, valid, at);
        size_t left = without_missing(t, text + at, end - at, piece);
        size_t n = left ? named_encode(t, model, piece, left, named) : 0;
        EXPECT(seen + n <= count && (!n || !memcmp(named, ids + seen, n * sizeof *ids)),
               "the piece from byte %zu to %zu has other ids than the list of merges gives", at, end);
        seen += n;
    }
    EXPECT(seen == count, "%zu ids, expected %zu", count, seen);
    splitter_close(&splitter);
    free(ids);
}

/* If the same vocabulary fits the other format, data of either is taken, and both give the same ids. */
static void check_other_format(const Tokenizer *t, const char *text, size_t length) {
    uint8_t known[MOST_FINGERPRINTS][32];
    int32_t *ids[2] = {NULL, NULL};
    size_t capacity[2] = {0, 0}, size, n;
    if (tokenizer_fingerprints(t, known) < 2) return;
    char *model = tokenizer_model_text(t, &size);
    Tokenizer *same = tokenizer_from_model("again.model", model, size);
    EXPECT(!memcmp(same->fingerprint, known[1], 32), "the second fingerprint is not that of tokenizer.model");
    n = tokenizer_encode(t, text, length, &ids[0], &capacity[0], 0);
    EXPECT(tokenizer_encode(same, text, length, &ids[1], &capacity[1], 0) == n &&
               (!n || !memcmp(ids[0], ids[1], n * sizeof **ids)),
           "tokenizer.model gives other ids, though its data is taken");
    free(ids[0]);
    free(ids[1]);
    tokenizer_close(same);
}

static int has_many_tokens(const cJSON *root) {
    return cJSON_GetArraySize(json_get(json_get(root, "model"), "vocab")) > MOST_NAMES;
}

static void fuzz_tokenizer_json(Bytes in) {
    static const char around[2][512] = {
        "{\"added_tokens\":[],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":", "}"};
    int kind = next_byte(&in);
    char *file = text_of(up_to_zero(&in)), *text = text_of(in);
    size_t size = strlen(file) + sizeof around;
    char *all = (char *)checked_malloc(size);
    snprintf(all, size, "%s%s%s", kind == 'm' ? around[0] : "", file, kind == 'm' ? around[1] : "");
    if (kind == 'm') give("tokenizer_config.json", "{\"eos_token\":\"<e>\"}", 19);
    const char *path = give("tokenizer.json", all, strlen(all));
    Tokenizer *t = tokenizer_open(path);
    held.taken = 1;
    cJSON *root = cJSON_Parse(all);
    if (root && !has_many_tokens(root)) {
        check_named(t, json_get(root, "model"));
        check_named_encoding(t, json_get(root, "model"), text, in.left);
        check_other_format(t, text, in.left);
    }
    cJSON_Delete(root);
    tokenizer_close(t);
    free(file);
    free(text);
    free(all);
}

static const char *const tokenizer_json_words[] = {"\"model\":{\"type\":\"BPE\"}",
                                                   "\"type\":\"BPE\"",
                                                   "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}",
                                                   "\"merges\":[\"a b\"]",
                                                   "\"a b\"",
                                                   "[\"a\",\"b\"]",
                                                   "\"ab\":3",
                                                   "\"\\u0120\":4",
                                                   "\"ignore_merges\":true",
                                                   "\"unk_token\":\"a\"",
                                                   "\"byte_fallback\":true",
                                                   "\"dropout\":0",
                                                   "\"normalizer\":null",
                                                   "\"added_tokens\":[{\"id\":5,\"content\":\"<|endoftext|>\"}]",
                                                   "\"special\":true",
                                                   "\"lstrip\":true",
                                                   "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}",
                                                   "\"add_prefix_space\":false",
                                                   "\"use_regex\":false",
                                                   "{\"type\":\"Digits\",\"individual_digits\":true}",
                                                   "\"pretokenizers\":[]",
                                                   "\"type\":\"Sequence\"",
                                                   "\"decoder\":{\"type\":\"ByteLevel\"}",
                                                   "\"post_processor\":{\"type\":\"TemplateProcessing\"}",
                                                   "\\u0000",
                                                   "\\\"",
                                                   "\\u00e9",
                                                   NULL};

// ---------------------------------------------------------------------------
// the chat template

/* The text without white space, comments, and \n in two characters: what must be the same in equal templates. */
static char *without_spaces(const char *text) {
    char *out = (char *)checked_malloc(strlen(text) + 1), *to = out;
    for (; *text; text++) {
        const char *comment_end = strncmp(text, "{#", 2) ? NULL : strstr(text + 2, "#}");
        if (comment_end) text = comment_end + 1;
        else if (!strncmp(text, "\\n", 2)) text++;
        else if (!strchr(" \t\r\n-", *text)) *to++ = *text;
    }
    return out;
}

/* The template that a configuration names, read once more; NULL: none. */
static char *named_template(const char *config) {
    cJSON *root = cJSON_Parse(config);
    const cJSON *item = json_get(root, "chat_template"), *entry, *found = NULL;
    if (cJSON_IsString(item)) found = item;
    if (cJSON_IsArray(item) || cJSON_IsObject(item)) {
        cJSON_ArrayForEach(entry, item) {
            const cJSON *name = json_get(entry, "name"), *jinja = json_get(entry, "template");
            if (!found && cJSON_IsString(name) && cJSON_IsString(jinja) && !strcmp(name->valuestring, "default"))
                found = jinja;
        }
    }
    char *text = found ? without_spaces(found->valuestring) : NULL;
    cJSON_Delete(root);
    return text;
}

static void fuzz_chat_template(Bytes in) {
    int kind = next_byte(&in);
    const Tokenizer *t = chat_tokenizer(1);
    unlink(path_of("parts/chat_template.jinja"));
    unlink(path_of("parts/tokenizer_config.json"));
    give(kind == 'j' ? "parts/chat_template.jinja" : "parts/tokenizer_config.json", in.at, in.left);
    const ChatTemplate *form = chat_template_find(t, path_of("parts/chat.model"));
    held.taken = 1;
    char *text = text_of(in), *named = kind == 'j' ? without_spaces(text) : named_template(text);
    EXPECT(form >= chat_templates && form < chat_templates + CHAT_TEMPLATES, "no template of the table");
    char *known = form->jinja ? without_spaces(form->jinja) : NULL;
    EXPECT(!named ? form == &chat_templates[1] : !known || !strcmp(named, known), "the template '%s' is taken for '%s'",
           named ? named : "", form->name);
    free(known);
    free(named);
    free(text);
}

static const char *const chat_template_words[] = {"{\"chat_template\":\"{% for message in messages %}\"}",
                                                  "\"chat_template\":[{\"name\":\"default\",\"template\":\"x\"}]",
                                                  "\"chat_template\":null",
                                                  "\"name\":\"default\"",
                                                  "{% for message in messages %}",
                                                  "{{ '<|im_start|>assistant\\n' }}",
                                                  "{% endif %}",
                                                  "\\n",
                                                  NULL};

#endif
