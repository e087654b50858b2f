/* chat.c: turns conversations into token files with a loss mask, for instruction tuning.
 * Usage: chat --tokenizer F --out-train A.tok [--out-val B.tok [--val-fraction 0.05]] JSONL...
 *
 * A line is a conversation, {"messages":[{"role":"system|user|assistant","content":"…"},…]} or only the list of
 * messages. It is rendered with the chat template that the tokenizer's special tokens belong to, and followed by the
 * end-of-text token. Only what the assistant says, and the token that ends its turn, are targets. Conversations are
 * packed: samples are windows over all of them, one after the other. Names of special tokens inside a message are plain
 * text. Only one line is in memory at a time. Existing files are not overwritten.
 */
#include "corpus.h"
#include <cjson/cJSON.h> // defines: cJSON_ParseWithOpts, cJSON_GetObjectItemCaseSensitive, …

/* A turn is rendered as: open, the role, close (if any), `before_content`, the content, end, `after_turn`. */
typedef struct {
    const char *name;
    const char *begin, *open, *close, *end; // names of special tokens; NULL: the template has none
    const char *before_content, *after_turn;
    int trims;          // white space around the content is removed
    const char *system; // the system message if the conversation has none; NULL: there is no default
} Template;

static const Template templates[] = {
    {"Llama 3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", 1, NULL},
    {"ChatML as in SmolLM2-Instruct", NULL, "<|im_start|>", NULL, "<|im_end|>", "\n", "\n", 0,
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
};
enum { TEMPLATES = sizeof templates / sizeof templates[0] };

/* One conversation as tokens, and buffers that grow to the longest one. */
typedef struct {
    const Tokenizer *t;
    const Template *form;
    int32_t *ids;  // (count) tokens
    uint8_t *mask; // (count) 1: a target
    size_t count, ids_room, mask_room;
    char *text; // (text_room) what is encoded at once
    size_t text_room;
    pcre2_code *space; // matches one white-space character
    pcre2_match_data *match;
} Chat;

// ---------------------------------------------------------------------------
// the template

/* The first template whose special tokens the tokenizer has. */
static const Template *template_find(const Tokenizer *t, const char *path) {
    for (int i = 0; i < TEMPLATES; i++) {
        const char *const names[] = {templates[i].begin, templates[i].open, templates[i].close, templates[i].end};
        int missing = 0;
        for (int n = 0; n < 4; n++) missing += names[n] && tokenizer_special(t, names[n]) == NO_TOKEN;
        if (!missing) return &templates[i];
    }
    user_error("tokenizer %s does not have the special tokens of a chat template, expected <|start_header_id|>, "
               "<|end_header_id|>, <|eot_id|> (Llama 3) or "
               "<|im_start|>, <|im_end|> (ChatML); use the tokenizer of an instruction-tuned model",
               path);
}

static void chat_mask(Chat *c, size_t first, int target) {
    if (c->count > c->mask_room) {
        c->mask_room = c->count + c->count / 2 + 1024;
        c->mask = (uint8_t *)grown(c->mask, c->mask_room);
    }
    for (size_t i = first; i < c->count; i++) c->mask[i] = (uint8_t)target;
}

static void chat_special(Chat *c, const char *name, int target) {
    if (!name) return;
    if (c->count >= c->ids_room) {
        c->ids_room = c->count + c->count / 2 + 1024;
        c->ids = (int32_t *)grown(c->ids, c->ids_room * sizeof *c->ids);
    }
    c->ids[c->count++] = tokenizer_special(c->t, name);
    chat_mask(c, c->count - 1, target);
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

/* The length of the white-space character at `at`; 0 if it is another character. */
static size_t space_at(const Chat *c, const char *text, size_t len, size_t at) {
    int rc = pcre2_match(c->space, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, c->match, NULL);
    return rc > 0 ? pcre2_get_ovector_pointer(c->match)[1] - at : 0;
}

/* Removes white space at both ends of the content. */
static const char *chat_trim(const Chat *c, const char *content, size_t *len) {
    while (*len) {
        size_t n = space_at(c, content, *len, 0);
        if (!n) break;
        content += n;
        *len -= n;
    }
    while (*len) {
        size_t last = *len - 1; // the first byte of the last character
        while (((uint8_t)content[last] & 0xC0) == 0x80) last--;
        if (!space_at(c, content, *len, last)) break;
        *len = last;
    }
    return content;
}

static void chat_turn(Chat *c, const char *role, const char *content, size_t len) {
    const Template *form = c->form;
    int target = !strcmp(role, "assistant");
    if (form->trims) content = chat_trim(c, content, &len);
    chat_special(c, form->open, 0);
    if (form->close) {
        chat_text(c, role, "", 0, 0);
        chat_special(c, form->close, 0);
        chat_text(c, form->before_content, content, len, target);
    } else {
        char head[32];
        snprintf(head, sizeof head, "%s%s", role, form->before_content);
        chat_text(c, head, content, len, target);
    }
    chat_special(c, form->end, target);
    if (*form->after_turn) chat_text(c, form->after_turn, "", 0, 0);
}

// ---------------------------------------------------------------------------
// a line of JSON

typedef struct {
    const char *path;
    uint64_t line;
} Place;

#define CHAT_EXPECTED                                                                                                  \
    "expected one conversation per line, {\"messages\":[{\"role\":\"system|user|assistant\",\"content\":\"…\"},…]}"

__attribute__((noreturn, format(printf, 2, 3))) static void refuse(const Place *at, const char *format, ...) {
    char found[512];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    user_error("%s, line %" PRIu64 ": %s; " CHAT_EXPECTED, at->path, at->line, found);
}

/* Refuses what the templates here cannot render, instead of dropping it. */
static void refuse_tools(const Place *at, const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (item && !cJSON_IsNull(item) && !(cJSON_IsArray(item) && !item->child))
        refuse(at, "\"%s\" cannot be rendered by the template: leave such conversations out", key);
}

static void refuse_bad_text(const Place *at, const char *text, size_t len) {
    size_t valid = utf8_valid_length(text, len);
    if (valid < len) refuse(at, "invalid UTF-8 at byte %zu of the line", valid);
    if (memchr(text, 0, len)) refuse(at, "a zero byte in the line");
    for (const char *p = strchr(text, '\\'); p && p[1]; p = strchr(p + 2, '\\')) // cJSON would end the string there
        if (!strncmp(p, "\\u0000", 6)) refuse(at, "\\u0000 in a string, which is not text");
}

/* Renders one line of `len` bytes, which ends with a NUL. */
static void chat_line(Chat *c, const Place *at, const char *text, size_t len) {
    refuse_bad_text(at, text, len);
    const char *end = text;
    cJSON *json = cJSON_ParseWithOpts(text, &end, 1), *messages = json, *message;
    if (!json)
        refuse(at, "invalid JSON at byte %zu of the line, '%.*s'", (size_t)(end - text),
               (int)min_i64(24, (int64_t)strcspn(end, "\r\n")), end);
    if (cJSON_IsObject(json)) {
        messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
        refuse_tools(at, json, "tools");
    }
    if (!cJSON_IsArray(messages)) refuse(at, "there is no list of messages");
    if (!messages->child) refuse(at, "the conversation is empty");
    c->count = 0;
    chat_special(c, c->form->begin, 0);
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
        refuse_tools(at, message, "tool_calls");
        if (number == 1 && c->form->system && strcmp(role->valuestring, "system"))
            chat_turn(c, "system", c->form->system, strlen(c->form->system));
        chat_turn(c, role->valuestring, content->valuestring, strlen(content->valuestring));
    }
    cJSON_Delete(json);
}

// ---------------------------------------------------------------------------

/* Appends the conversations of a file; returns their number. */
static uint64_t chat_file(Chat *c, const char *path, TokenWriter *train, TokenWriter *val, ValidationSplit *split) {
    FILE *f = input_open(path, "a file of JSON lines");
    char *line = NULL;
    size_t room = 0;
    uint64_t conversations = 0;
    Place at = {path, 0};
    if (!f) user_error("%s cannot be opened: %s; expected a file of JSON lines", path, strerror(errno));
    for (;;) {
        ssize_t len = getline(&line, &room, f);
        if (len < 0) break;
        at.line++;
        if (strspn(line, " \t\r\n") == (size_t)len) continue;
        chat_line(c, &at, line, (size_t)len);
        TokenWriter *w = is_validation(split, (size_t)len) ? val : train;
        size_t n = c->count;
        writer_narrow(w, c->ids, n);
        writer_write(w, c->ids, c->mask, n);
        writer_write(w, &c->t->eos, (const uint8_t *)"", 1); // mask 0: not a target
        w->bytes += (uint64_t)len;
        conversations++;
    }
    if (ferror(f) || !feof(f))
        user_error("%s cannot be read: %s; expected a file of JSON lines", path, strerror(errno));
    fclose(f);
    free(line);
    return conversations;
}

static void refuse_existing(const char *path) {
    if (!access(path, F_OK)) user_error("%s exists already: choose another name, or remove it first", path);
}

typedef struct {
    const char *tokenizer, **files; // files: (num_files)
    int num_files;
    Output train, val; // val.path NULL: no validation
    double fraction;   // of the text that is for validation; 0: the option was not given
} Arguments;

static Arguments arguments_parse(int argc, char **argv) {
    static const char usage[] = "usage: chat --tokenizer FILE --out-train FILE [--out-val FILE [--val-fraction 0.05]] "
                                "JSONL...; conversations are packed: samples are windows "
                                "over all of them, one after the other, and only the assistant's tokens are targets";
    Arguments a = {NULL, new_array(const char *, argc), 0, {"--out-train", NULL}, {"--out-val", NULL}, 0};
    const char *value;
    for (int i = 1; i < argc; i++) {
        if (option_value(argc, argv, &i, "--tokenizer", &a.tokenizer)) continue;
        if (option_value(argc, argv, &i, "--out-train", &a.train.path)) continue;
        if (option_value(argc, argv, &i, "--out-val", &a.val.path)) continue;
        if (option_value(argc, argv, &i, "--val-fraction", &value)) {
            a.fraction = fraction_option(value);
        } else if (!strcmp(argv[i], "--help")) {
            puts(usage);
            finish_results();
            exit(0);
        } else if (!strncmp(argv[i], "--", 2)) {
            user_error("unknown option %s; %s", argv[i], usage);
        } else {
            a.files[a.num_files++] = argv[i];
        }
    }
    if (!a.tokenizer) user_error("--tokenizer is missing; %s", usage);
    if (!a.train.path) user_error("--out-train is missing; %s", usage);
    if (a.fraction > 0 && !a.val.path) user_error("--out-val is missing; %s", usage);
    if (!a.num_files) user_error("a file of conversations is missing; %s", usage);
    return a;
}

/* Refuses outputs that would replace something. */
static void check_outputs(const Arguments *a) {
    const Output *outputs[] = {&a->train, &a->val};
    refuse_same_outputs(&a->train, &a->val);
    for (int i = 0; i < 2; i++) {
        refuse_replaced_input(outputs[i], a->tokenizer);
        for (int f = 0; f < a->num_files; f++) refuse_replaced_input(outputs[i], a->files[f]);
        if (outputs[i]->path) refuse_existing(outputs[i]->path);
    }
}

int main(int argc, char **argv) {
    output_prepare();
    Arguments a = arguments_parse(argc, argv);
    check_outputs(&a);
    Tokenizer *t = tokenizer_open(a.tokenizer);
    Chat c = ZERO;
    c.t = t;
    c.form = template_find(t, a.tokenizer);
    // what Python's strip() removes, which the templates' trim filter calls
    c.space = expression_open("[" SPACES "\\x{1c}-\\x{1f}]", PCRE2_ANCHORED);
    c.match = pcre2_match_data_create(1, NULL);
    TokenWriter train = ZERO, val = ZERO;
    ValidationSplit split = {a.fraction > 0 ? a.fraction : 0.05, 0, 0};
    if (!a.val.path) split.fraction = 0;
    uint64_t conversations = 0;
    writer_open(&train, a.train.path, t, 1);
    if (a.val.path) writer_open(&val, a.val.path, t, 1);
    for (int i = 0; i < a.num_files; i++) conversations += chat_file(&c, a.files[i], &train, &val, &split);
    if (!train.targets || (a.val.path && !val.targets))
        user_error("%" PRIu64
                   " conversations leave %s without a target; give more conversations in which the assistant speaks",
                   conversations, train.targets ? a.val.path : a.train.path);
    printf("%" PRIu64 " conversations, chat template: %s\n", conversations, c.form->name);
    writer_close(&train);
    if (a.val.path) writer_close(&val);
    pcre2_code_free(c.space);
    pcre2_match_data_free(c.match);
    free(c.ids);
    free(c.mask);
    free(c.text);
    free(a.files);
    tokenizer_close(t);
    finish_results();
    return 0;
}
