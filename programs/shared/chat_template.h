/* chat_template.h: renders conversations into token ids by the chat template of a tokenizer.
 *
 * transformers' chat templates are programs in Jinja. This program knows some of them by their text and renders them in
 * C; any other is refused by its first words. A caller may rely on: ids equal those of apply_chat_template, except that
 * names of special tokens inside a message are plain text here. */
#ifndef CHAT_TEMPLATE_H
#define CHAT_TEMPLATE_H
#include "tokenizer_json.h" // defines: Tokenizer, tokenizer_encode, path_beside
#include "text_input.h"     // defines: space_length, length_without_space, with_room_for_one
#include <time.h>           // defines: strftime

/* A turn is rendered as: open, the role, close (if any), `before_content`, the content, end, `after_turn`. */
typedef struct {
    const char *name;
    const char *begin, *open, *close, *end; // names of special tokens; NULL: the template has none
    const char *before_content, *after_turn;
    int trims;                // white space around the content is removed
    const char *system;       // the system message if the conversation has none; NULL: there is no default
    const char *system_start; // strftime's format of what each conversation's system message begins with; NULL: nothing
    const char *jinja;        // the template's text; NULL: only `sha256` identifies it
    const char *sha256;       // SHA-256 of its normal form in hexadecimal; NULL: `jinja` identifies it
} ChatTemplate;

// clang-format off
static const ChatTemplate chat_templates[] = {
    {"Llama 3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", 1, NULL,
     NULL,
     "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
     "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
     "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
     "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}", NULL},
    {"ChatML", NULL, "<|im_start|>", NULL, "<|im_end|>", "\n", "\n", 0, NULL, NULL,
     "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
     "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", NULL},
    {"ChatML as in SmolLM2-Instruct", NULL, "<|im_start|>", NULL, "<|im_end|>", "\n", "\n", 0,
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face", NULL,
     "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
     "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", NULL},
    {"Llama 3.1 and 3.3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", 1,
     NULL, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n", NULL,
     "8271aaead2adbc9737d1a08ba22ea6c98ec3c3b26db44a996ac3cc1a7ce3c69a"},
    {"Llama 3.2", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", 1, NULL,
     "Cutting Knowledge Date: December 2023\nToday Date: %d %b %Y\n\n", NULL,
     "f8215a7337cee588f7dfdfcf0dad0a135a63246b0d8c610136636989716db4ec"},
};
// clang-format on
enum { HEAD_BYTES = 160 /* of what comes before the content of a turn */ };
enum { CHAT_TEMPLATES = sizeof chat_templates / sizeof chat_templates[0] };

// ---------------------------------------------------------------------------
// which template a tokenizer has

static int chat_template_fits(const ChatTemplate *form, const Tokenizer *t) {
    const char *const names[] = {form->begin, form->open, form->close, form->end};
    for (int i = 0; i < 4; i++)
        if (names[i] && tokenizer_special(t, names[i]) == NO_TOKEN) return 0;
    return 1;
}

/* The first template whose special tokens the tokenizer has, or NULL. */
static const ChatTemplate *chat_template_of_tokens(const Tokenizer *t) {
    for (int i = 0; i < CHAT_TEMPLATES; i++)
        if (chat_template_fits(&chat_templates[i], t)) return &chat_templates[i];
    return NULL;
}

/* Copies a Jinja tag, from its "{%" or "{{" on, to `out`, without the signs and the white space at its ends; a line end
 * in it becomes the two characters \n, which mean the same in a string. Returns what follows the tag in the text. */
static const char *jinja_tag(FILE *out, const char *tag) {
    char close = tag[1] == '{' ? '}' : tag[1], quote = 0;
    const char *begin = tag + 2 + (tag[2] == '-' || tag[2] == '+'), *end = begin;
    while (*end && (quote || end[0] != close || end[1] != '}')) {
        if (quote && *end == '\\' && end[1]) end++;
        else if (close != '#' && (quote ? *end == quote : *end == '\'' || *end == '"')) quote = quote ? 0 : *end;
        end++;
    }
    const char *after = *end ? end + 2 : end;
    char sign = end > begin && (end[-1] == '-' || (end[-1] == '+' && close != '}')) ? end[-1] : 0;
    if (sign) end--;
    while (begin < end && strchr(" \t\n", *begin)) begin++;
    while (end > begin && strchr(" \t\n", end[-1])) end--;
    if (close != '#') { // a comment has no effect
        fprintf(out, "{%c", tag[1]);
        for (; begin < end; begin++) {
            if (*begin == '\n') fputs("\\n", out);
            else fputc(*begin, out);
        }
        fprintf(out, "%c}", close);
    }
    if (sign == '-') after += strspn(after, " \t\n");
    else if (!sign && close != '}' && *after == '\n') after++; // trim_blocks
    return after;
}

/* The normal form of a template, which has the same effect: white space that transformers' Jinja environment drops, by
 * trim_blocks, lstrip_blocks and minus signs, is left out, and so are comments. The caller frees it. */
static char *jinja_normal(const char *jinja) {
    char *source = checked_strdup(jinja), *text, *to = source;
    size_t length;
    for (const char *c = jinja; *c; c++) { // all line ends are LF, and one at the end is dropped
        if (*c == '\r' && c[1] == '\n') continue;
        *to++ = *c == '\r' ? '\n' : *c;
    }
    if (to > source && to[-1] == '\n') to--;
    *to = 0;
    FILE *out = text_stream_open(&text, &length);
    for (const char *at = source; *at;) {
        const char *tag = at;
        while (*tag && !(tag[0] == '{' && (tag[1] == '{' || tag[1] == '%' || tag[1] == '#'))) tag++;
        const char *end = tag;
        if (*tag && tag[2] == '-') {
            while (end > at && strchr(" \t\n", end[-1])) end--;
        } else if (*tag && tag[1] != '{' && tag[2] != '+') { // lstrip_blocks
            while (end > at && strchr(" \t", end[-1])) end--;
            if (end > at ? end[-1] != '\n' : at > source && at[-1] != '\n') end = tag;
        }
        fwrite(at, 1, (size_t)(end - at), out);
        at = *tag ? jinja_tag(out, tag) : tag;
    }
    text_stream_close(out);
    free(source);
    return text;
}

static const ChatTemplate *chat_template_of_jinja(const char *jinja) {
    const ChatTemplate *found = NULL;
    char *text = jinja_normal(jinja), sum[65];
    uint8_t bytes[32];
    sha256(text, strlen(text), bytes);
    for (int i = 0; i < 32; i++) sprintf(sum + 2 * i, "%02x", bytes[i]);
    for (int i = 0; i < CHAT_TEMPLATES && !found; i++) {
        const ChatTemplate *form = &chat_templates[i];
        char *known = form->jinja ? jinja_normal(form->jinja) : NULL;
        if (known ? !strcmp(known, text) : !strcmp(form->sha256, sum)) found = form;
        free(known);
    }
    free(text);
    return found;
}

/* The template in "chat_template" of a tokenizer_config.json: a text or, if there are several, the one that is named
 * "default". NULL: there is none. `may_be_odd`: anything else counts as none, and is not refused. */
static const char *chat_template_in_config(const cJSON *config, const char *path, int may_be_odd) {
    const cJSON *item = json_get(config, "chat_template"), *entry;
    if (json_is_absent(item)) return NULL;
    if (cJSON_IsString(item)) return item->valuestring;
    cJSON_ArrayForEach(entry, item) {
        const char *name = json_string_or(json_get(entry, "name"), "");
        const char *jinja = json_string_or(json_get(entry, "template"), NULL);
        if (!strcmp(name, "default") && jinja) return jinja;
    }
    if (may_be_odd) return NULL;
    user_error("%s: \"chat_template\" must be a text, or a list with one that is named \"default\"", path);
}

/* The text of the chat template next to the tokenizer's file, which the caller frees; NULL: there is none. `source`
 * (4096) receives the path of the file that has it. */
static char *chat_template_beside(const char *tokenizer_path, char *source, int may_be_odd) {
    static const char *const files[] = {"additional_chat_templates/default.jinja", "chat_template.jinja"};
    for (int i = 0; i < 2; i++) {
        path_beside(source, 4096, tokenizer_path, files[i]);
        if (!entry_exists(source)) continue;
        size_t length;
        char *text = read_regular_file(source, &length);
        if (!text) user_error("cannot read %s: %s", source, strerror(errno));
        return text;
    }
    path_beside(source, 4096, tokenizer_path, "tokenizer_config.json");
    if (!entry_exists(source)) return NULL;
    cJSON *config = json_read_object(source, "a Hugging Face tokenizer_config.json");
    if (!config) user_error("cannot read %s: %s", source, strerror(errno));
    const char *jinja = chat_template_in_config(config, source, may_be_odd);
    char *text = jinja ? checked_strdup(jinja) : NULL;
    cJSON_Delete(config);
    return text;
}

/* A template of Llama 3 begins with bos_token: with the token that the files next to the tokenizer `path` name, or, in
 * those of Llama 3.1 to 3.3, with nothing if they name none. Without such files it is <|begin_of_text|>. */
static inline const ChatTemplate *chat_template_with_begin(const ChatTemplate *form, const Tokenizer *t,
                                                           const char *path) {
    char config[4096], map[4096], *begin = special_name_beside(path, "bos_token");
    path_beside(config, sizeof config, path, "tokenizer_config.json");
    path_beside(map, sizeof map, path, "special_tokens_map.json");
    int has_files = entry_exists(config) || entry_exists(map);
    if (!form->begin || !has_files || (begin && !strcmp(begin, form->begin))) {
        free(begin);
        return form;
    }
    if (!begin && form->jinja)
        user_error("%s names no \"bos_token\", with which the chat template begins: add \"bos_token\": \"%s\"", config,
                   form->begin);
    if (begin && tokenizer_special(t, begin) == NO_TOKEN)
        user_error("%s: \"bos_token\" is '%s', expected a special token of %s", config, begin, path);
    ChatTemplate *changed = new_array(ChatTemplate, 1);
    *changed = *form;
    changed->begin = begin;
    return changed;
}

/* The template of the tokenizer that was read from the file `path`: the one in its directory or, if there is none, the
 * one that the names of its special tokens belong to. */
static inline const ChatTemplate *chat_template_find(const Tokenizer *t, const char *path) {
    char source[4096];
    char *jinja = chat_template_beside(path, source, 0);
    const ChatTemplate *form = jinja ? chat_template_of_jinja(jinja) : chat_template_of_tokens(t);
    if (jinja && !form)
        user_error(
            "%s has the chat template '%.*s…', which this program cannot render; expected that of Llama 3 to "
            "3.3, of SmolLM2 or plain ChatML: use a tokenizer with one of these, or remove the template from that "
            "file to use the one that the special tokens belong to",
            source, (int)min_i64(60, (int64_t)strcspn(jinja, "\r\n")), jinja);
    int has_template = jinja != NULL;
    free(jinja);
    if (has_template && !chat_template_fits(form, t))
        user_error("tokenizer %s does not have the special tokens of the chat template in %s: that file may belong to "
                   "another tokenizer; put each tokenizer into a directory of its own",
                   path, source);
    if (!form || !chat_template_fits(form, t))
        user_error("tokenizer %s does not have the special tokens of a chat template, expected <|begin_of_text|>, "
                   "<|start_header_id|>, <|end_header_id|>, <|eot_id|> (Llama 3) or <|im_start|>, <|im_end|> (ChatML); "
                   "use the tokenizer of an instruction-tuned model",
                   path);
    return has_template ? chat_template_with_begin(form, t, path) : form;
}

// ---------------------------------------------------------------------------
// rendering

/* One conversation as tokens, and buffers that grow to the longest one. */
typedef struct {
    const Tokenizer *t;
    const ChatTemplate *form;
    int32_t *ids;  // (count) tokens
    uint8_t *mask; // (count) bits of TokenByte (lib/io/token_files.h)
    size_t count, ids_room, mask_room;
    int turns;  // rendered so far
    char *text; // (text_room) what is encoded at once
    size_t text_room;
} Chat;

static inline void chat_open(Chat *c, const Tokenizer *t, const ChatTemplate *form) {
    memset(c, 0, sizeof *c);
    c->t = t;
    c->form = form;
}

static inline void chat_close(Chat *c) {
    free(c->ids);
    free(c->mask);
    free(c->text);
}

static void chat_mask(Chat *c, size_t first, int target) {
    if (c->count > c->mask_room) {
        c->mask_room = c->count + c->count / 2 + 1024;
        c->mask = (uint8_t *)grown(c->mask, c->mask_room);
    }
    for (size_t i = first; i < c->count; i++) c->mask[i] = (uint8_t)target;
}

static void chat_token(Chat *c, int32_t id, int target) {
    c->ids = (int32_t *)with_room_for_one(c->ids, c->count, &c->ids_room, sizeof *c->ids);
    c->ids[c->count++] = id;
    chat_mask(c, c->count - 1, target);
}

static void chat_special(Chat *c, const char *name, int target) {
    if (name) chat_token(c, tokenizer_special(c->t, name), target);
}

/* Encodes `head` and `content` as one text, because a token may contain bytes of both. Such a token is a target if the
 * content is. */
static void chat_text(Chat *c, const char *head, const char *content, size_t len, int target) {
    size_t head_len = strlen(head), first = c->count, at = 0;
    if (head_len + len > c->text_room) {
        c->text_room = 2 * (head_len + len) + 1024;
        c->text = (char *)grown(c->text, c->text_room);
    }
    memcpy(c->text, head, head_len);
    memcpy(c->text + head_len, content, len);
    c->count = tokenizer_encode(c->t, c->text, head_len + len, &c->ids, &c->ids_room, c->count);
    chat_mask(c, first, 0);
    for (size_t i = first; i < c->count; i++) {
        at += token_length(c->t, c->ids[i]);
        c->mask[i] = (uint8_t)(target && at > head_len);
    }
}

/* Removes white space at both ends of the content, as the templates' trim filter does. */
static const char *chat_trim(const char *content, size_t *len) {
    while (*len) {
        size_t n = space_length(content, *len);
        if (!n) break;
        content += n;
        *len -= n;
    }
    *len = length_without_space(content, *len);
    return content;
}

/* The tokens before the content of a turn. If the role and the content are encoded as one text, the role is left for
 * chat_message: `head` (HEAD_BYTES) receives what belongs in front of the content. */
static void chat_header(Chat *c, const char *role, char *head) {
    const ChatTemplate *form = c->form;
    chat_special(c, form->open, 0);
    if (form->close) {
        chat_text(c, role, "", 0, 0);
        chat_special(c, form->close, 0);
    }
    snprintf(head, HEAD_BYTES, "%s%s", form->close ? "" : role, form->before_content);
}

/* Ends a turn, after its content. */
static void chat_turn_end(Chat *c, int target) {
    chat_special(c, c->form->end, target);
    if (*c->form->after_turn) chat_text(c, c->form->after_turn, "", 0, 0);
}

/* Adds a message. Its content (len) must be valid UTF-8; `role` is system, user or assistant. `target`: the model is
 * trained to say it. */
static void chat_message(Chat *c, const char *role, const char *content, size_t len, int target) {
    char head[HEAD_BYTES];
    if (c->form->trims) content = chat_trim(content, &len);
    chat_header(c, role, head);
    if (!c->turns++ && c->form->system_start && !strcmp(role, "system")) {
        time_t now = time(NULL);
        size_t used = strlen(head);
        if (!strftime(head + used, sizeof head - used, c->form->system_start, localtime(&now)))
            run_failure("the date in the system message of %s is too long", c->form->name);
    }
    chat_text(c, head, content, len, target);
    chat_turn_end(c, target);
}

/* Starts a conversation whose first message is of `first_role`: what comes before that message. */
static inline void chat_begin(Chat *c, const char *first_role) {
    const char *system = c->form->system ? c->form->system : "";
    c->count = 0;
    c->turns = 0;
    chat_special(c, c->form->begin, 0);
    if ((c->form->system || c->form->system_start) && strcmp(first_role, "system"))
        chat_message(c, "system", system, strlen(system), 0);
}

/* Adds the header after which the assistant's answer begins (add_generation_prompt of apply_chat_template). */
static inline void chat_generation_prompt(Chat *c) {
    char head[HEAD_BYTES];
    chat_header(c, "assistant", head);
    chat_text(c, head, "", 0, 0);
}

#endif
