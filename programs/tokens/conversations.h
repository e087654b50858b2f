/* conversations.h: turns conversations into token files with a loss mask, for instruction tuning.
 *
 * A line is a conversation, {"messages":[{"role":"system|user|assistant","content":"…"},…]} or only the list of
 * messages. It is rendered with the chat template next to the tokenizer or, if there is none, the one that its special
 * tokens belong to, and followed by the end-of-text token. Only what the assistant says, and the token that ends its
 * turn, are targets. Conversations follow one another, and samples are windows over all of them. With --pack, samples
 * consist of whole conversations (pack.h). Names of special tokens inside a message are plain text. One line is in
 * memory at a time, and what --pack collects. Existing files are not overwritten. */
#ifndef CONVERSATIONS_H
#define CONVERSATIONS_H
#include "../shared/chat_template.h" // defines: Chat, chat_template_find, chat_begin, chat_message
#include "pack.h"                    // defines: Packer, packer_add; includes corpus.h
#include "tokens_options.h"          // defines: TokensOptions
#include "../shared/text_input.h"    // defines: utf8_valid_length, json_has_zero_byte

// ---------------------------------------------------------------------------
// a line of JSON

#define CHAT_EXPECTED                                                                                                  \
    "expected one conversation per line, {\"messages\":[{\"role\":\"system|user|assistant\",\"content\":\"…\"},…]}"

/* Refuses a conversation. `at`: its file and line. */
__attribute__((noreturn, format(printf, 2, 3))) static void refuse(const char *at, const char *format, ...) {
    char found[512];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    user_error("%s: %s; " CHAT_EXPECTED, at, found);
}

/* null, an empty text, an empty list or an empty object. */
static int is_empty(const cJSON *item) {
    if (cJSON_IsString(item)) return !*item->valuestring;
    return cJSON_IsNull(item) || ((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child);
}

/* What is known of the keys by which data sets switch the loss of a message on or off. */
typedef struct {
    const char *key;
    int means_off; // its value true, or 1, switches the loss off
} LossKey;
static const LossKey loss_keys[] = {{"weight", 0},    {"loss_weight", 0}, {"loss_mask", 0}, {"loss", 0},  {"train", 0},
                                    {"trainable", 0}, {"training", 0},    {"masked", 1},    {"ignore", 1}};
enum { LOSS_KEYS = sizeof loss_keys / sizeof *loss_keys };

/* Refuses keys next to the messages that the templates here cannot render, because dropping them would change the
 * conversation. Other keys, such as an id or a source, are ignored. */
static void refuse_unrendered_keys(const char *at, const cJSON *conversation) {
    static const char *const keys[] = {"tools",         "functions", "documents", "system",
                                       "system_prompt", "images",    "videos",    "chat_template_kwargs"};
    for (int i = 0; i < 8; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(conversation, keys[i]);
        if (item && !is_empty(item))
            refuse(at, "\"%s\" cannot be rendered by the template: leave such conversations out", keys[i]);
    }
    for (int k = 0; k < LOSS_KEYS; k++)
        if (cJSON_GetObjectItemCaseSensitive(conversation, loss_keys[k].key))
            refuse(at, "\"%s\" beside the messages has no effect: put it into each message", loss_keys[k].key);
}

/* Is the message one that the model is trained to say? Refuses keys that would be dropped: they may change what the
 * message means. */
static int message_is_target(const char *at, const cJSON *message, int number, const char *role) {
    int is_assistant = !strcmp(role, "assistant"), is_on = 1, is_asked = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, message) {
        int k = 0;
        if (!strcmp(item->string, "role") || !strcmp(item->string, "content") || is_empty(item)) continue;
        while (k < LOSS_KEYS && strcmp(loss_keys[k].key, item->string)) k++;
        if (k == LOSS_KEYS)
            refuse(at,
                   "message %d has \"%s\", which cannot be rendered by the template: leave such conversations out, or "
                   "remove the key",
                   number, item->string);
        int is_true = cJSON_IsTrue(item) || (cJSON_IsNumber(item) && item->valuedouble == 1);
        if (!is_true && !cJSON_IsFalse(item) && !(cJSON_IsNumber(item) && item->valuedouble == 0))
            refuse(at, "message %d has a \"%s\" that is neither 0 or 1 nor true or false", number, item->string);
        is_on &= is_true != loss_keys[k].means_off;
        is_asked |= is_true != loss_keys[k].means_off;
    }
    if (is_asked && is_on && !is_assistant)
        refuse(at, "message %d asks for a loss on what the role '%s' says; only the assistant's messages are targets",
               number, role);
    return is_assistant && is_on;
}

static void refuse_bad_text(const char *at, const char *text, size_t len) {
    size_t valid = utf8_valid_length(text, len);
    if (valid < len) refuse(at, "invalid UTF-8 at byte %zu of the line", valid);
    if (memchr(text, 0, len)) refuse(at, "a zero byte in the line");
    if (json_has_zero_byte(text)) refuse(at, "\\u0000 in a string, which is not text");
}

/* Renders one line of `len` bytes, which ends with a NUL. */
static void chat_line(Chat *c, const char *at, const char *text, size_t len) {
    refuse_bad_text(at, text, len);
    const char *end = text;
    cJSON *json = cJSON_ParseWithOpts(text, &end, 1), *messages = json, *message;
    if (!json)
        refuse(at, "invalid JSON at byte %zu of the line, '%.*s'", (size_t)(end - text),
               (int)min_i64(24, (int64_t)strcspn(end, "\r\n")), end);
    if (cJSON_IsObject(json)) {
        messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
        refuse_unrendered_keys(at, json);
    }
    json_refuse_duplicates(json, at);
    if (!cJSON_IsArray(messages)) refuse(at, "there is no list of messages");
    if (!messages->child) refuse(at, "the conversation is empty");
    int number = 0;
    cJSON_ArrayForEach(message, messages) {
        const cJSON *role = cJSON_GetObjectItemCaseSensitive(message, "role"),
                    *content = cJSON_GetObjectItemCaseSensitive(message, "content");
        number++;
        if (!cJSON_IsObject(message)) refuse(at, "message %d is not an object", number);
        if (!cJSON_IsString(role)) refuse(at, "message %d has no \"role\" that is a string", number);
        if (strcmp(role->valuestring, "system") && strcmp(role->valuestring, "user") &&
            strcmp(role->valuestring, "assistant"))
            refuse(at, "message %d has the unknown role '%.40s'", number, role->valuestring);
        if (!cJSON_IsString(content)) refuse(at, "message %d has no \"content\" that is a string", number);
        int target = message_is_target(at, message, number, role->valuestring);
        if (number == 1) chat_begin(c, role->valuestring);
        chat_message(c, role->valuestring, content->valuestring, strlen(content->valuestring), target);
    }
    cJSON_Delete(json);
}

// ---------------------------------------------------------------------------
// outputs

typedef struct {
    TokenWriter writer; // path NULL: the output was not asked for
    Packer packer;      // T = 0: without --pack
} ChatOutput;

static void chat_output_open(ChatOutput *out, const char *path, const Chat *c, int64_t window) {
    if (!path) return;
    writer_open(&out->writer, path, c->t, 1);
    if (!c->form->begin || tokenizer_special(c->t, c->form->begin) != c->t->front) out->writer.front = NO_TOKEN;
    out->writer.window = (uint32_t)window;
    if (window) packer_open(&out->packer, &out->writer, window);
}

/* Writes the rendered conversation, followed by the token that ends it as a document. `bytes`: of its line of JSON. */
static void chat_output_write(ChatOutput *out, Chat *c, size_t bytes) {
    chat_token(c, c->t->eos, 0);
    c->mask[c->count - 1] = TOKEN_ENDS_DOCUMENT;
    out->writer.bytes += bytes;
    if (out->packer.T) {
        packer_add(&out->packer, c->ids, c->mask, c->count);
    } else {
        writer_narrow(&out->writer, c->ids, c->count);
        writer_write(&out->writer, c->ids, c->mask, c->count);
    }
}

static void print_packing(const Packer *p) {
    const char *path = p->w->path;
    int64_t tokens = (int64_t)p->w->count, windows = tokens / p->T;
    printf("%s: %" PRId64 " conversations in %" PRId64 " windows of %" PRId64 " tokens, %.2f %% of them padding; train "
           "with --seq %" PRId64 " --doc-mask\n",
           path, p->conversations, windows, p->T, 100.0 * (double)p->padding / (double)tokens, p->T);
    if (p->cut)
        printf("%s: %" PRId64 " conversations are longer than %" PRId64 " tokens and were cut at the ends of windows: "
               "tokens after a cut are trained without those before it\n",
               path, p->cut, p->T);
}

/* Writes conversations that wait to be packed; refuses an output without a target. `conversations`: of all inputs. */
static void chat_output_finish(ChatOutput *out, uint64_t conversations) {
    if (!out->writer.path) return;
    if (out->packer.T) packer_finish(&out->packer);
    if (!out->writer.targets)
        user_error("%" PRIu64
                   " conversations leave %s without a target; give more conversations in which the assistant speaks",
                   conversations, out->writer.path);
}

static void chat_output_close(ChatOutput *out) {
    if (!out->writer.path) return;
    writer_close(&out->writer);
    writer_print(&out->writer);
    if (out->packer.T) print_packing(&out->packer);
    packer_close(&out->packer);
}

/* Appends the conversations of a file, or of standard input; returns their number. */
static uint64_t chat_file(Chat *c, const char *path, ChatOutput *train, ChatOutput *val, ValidationSplit *split) {
    JsonLines lines;
    uint64_t conversations = 0;
    size_t length;
    lines_open(&lines, path, "messages");
    for (char *line = lines_next(&lines, &length); line; line = lines_next(&lines, &length)) {
        char at[4200];
        snprintf(at, sizeof at, "%s, line %" PRIu64, input_name(&lines.stream), lines.line);
        if (strspn(line, " \t\r") == length) continue;
        chat_line(c, at, line, length);
        chat_output_write(is_validation_document(split) ? val : train, c, length + 1);
        conversations++;
    }
    lines_close(&lines);
    return conversations;
}

/* Refuses outputs that would replace something. */
static void check_conversation_outputs(const TokensOptions *o) {
    const Output outputs[] = {{"--out-train", o->out_train}, {"--out-val", o->out_val}};
    refuse_same_outputs(&outputs[0], &outputs[1]);
    for (int i = 0; i < 2; i++) {
        refuse_replaced_input(&outputs[i], o->tokenizer);
        for (int f = 0; f < o->num_files; f++)
            if (strcmp(o->files[f], "-")) refuse_replaced_input(&outputs[i], o->files[f]);
        if (outputs[i].path && !access(outputs[i].path, F_OK))
            user_error("%s exists already: choose another name, or remove it first", outputs[i].path);
    }
}

/* Turns the conversations that the options name into one token file or two. */
static void tokenize_conversations(const TokensOptions *o) {
    check_conversation_outputs(o);
    Tokenizer *t = tokenizer_open(o->tokenizer);
    Chat c;
    chat_open(&c, t, chat_template_find(t, o->tokenizer));
    ChatOutput train = ZERO, val = ZERO;
    ValidationSplit split = {o->out_val ? o->val_fraction : 0, 0, 0};
    uint64_t conversations = 0;
    chat_output_open(&train, o->out_train, &c, o->pack);
    chat_output_open(&val, o->out_val, &c, o->pack);
    for (int i = 0; i < o->num_files; i++) conversations += chat_file(&c, o->files[i], &train, &val, &split);
    chat_output_finish(&train, conversations);
    chat_output_finish(&val, conversations);
    printf("%" PRIu64 " conversations, chat template: %s\n", conversations, c.form->name);
    chat_output_close(&train);
    chat_output_close(&val);
    tokenizer_files_write(o->out_train, o->tokenizer, t);
    chat_close(&c);
    tokenizer_close(t);
}

#endif
