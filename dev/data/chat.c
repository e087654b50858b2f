/* chat.c: turns conversations into token files with a loss mask, for fine-tuning on instructions.
 * Usage: chat --tokenizer F --out-train A.tok [--out-val B.tok [--val-fraction 0.05]] JSONL...
 * A line is a conversation, {"messages":[{"role":"system|user|assistant","content":"…"},…]} or the list of messages
 * alone. It is written through the chat template that the tokenizer's special tokens belong to, with the end-of-text
 * token behind it. Targets are what the assistant says and the token that ends its turn; nothing else is. Samples are
 * windows over these conversations one behind the other, as over text: they are packed, none starts a window.
 * Names of special tokens in what is said are plain text. Memory holds one line. Nothing that exists is overwritten.
 */
#include "corpus.h"
#include <cjson/cJSON.h> // defines: cJSON_ParseWithOpts, cJSON_GetObjectItemCaseSensitive, …

/* A turn is: open, the role, close (or none), `between`, the content, end, `behind`. */
typedef struct {
    const char *name;
    const char *begin, *open, *close, *end; // names of special tokens; NULL: the template has none
    const char *between, *behind;
    int trims;          // blanks around the content go
    const char *system; // what the system says where the first message is another's; NULL: nothing
} Template;

static const Template templates[] = {
    {"Llama 3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", 1, NULL},
    {"ChatML, as SmolLM2-Instruct has it", NULL, "<|im_start|>", NULL, "<|im_end|>", "\n", "\n", 0,
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
};
enum { TEMPLATES = sizeof templates / sizeof templates[0] };

/* A conversation as tokens, and what rendering it needs; all grows to the longest one. */
typedef struct {
    const Tokenizer *t;
    const Template *form;
    int32_t *ids;  // (count) tokens
    uint8_t *mask; // (count) 1: a target
    size_t count, ids_room, mask_room;
    char *text; // of one encoding
    size_t text_room;
    pcre2_code *blank; // one blank character
    pcre2_match_data *match;
} Chat;

// ---------------------------------------------------------------------------
// the template

/* The first template all of whose special tokens the tokenizer has. */
static const Template *template_find(const Tokenizer *t, const char *path) {
    for (int i = 0; i < TEMPLATES; i++) {
        const char *const names[] = {templates[i].begin, templates[i].open, templates[i].close, templates[i].end};
        int missing = 0;
        for (int n = 0; n < 4; n++) missing += names[n] && tokenizer_special(t, names[n]) == NO_TOKEN;
        if (!missing) return &templates[i];
    }
    user_error("tokenizer %s has the special tokens of no chat template, expected <|start_header_id|>, "
               "<|end_header_id|>, <|eot_id|> (Llama 3) or "
               "<|im_start|>, <|im_end|> (ChatML); take the tokenizer of an instruction-tuned model",
               path);
}

static void chat_mask(Chat *c, size_t first, int target) {
    if (c->count > c->mask_room) c->mask = (uint8_t *)grown(c->mask, c->mask_room = c->count + c->count / 2 + 1024);
    for (size_t i = first; i < c->count; i++) c->mask[i] = (uint8_t)target;
}

static void chat_special(Chat *c, const char *name, int target) {
    if (!name) return;
    if (c->count >= c->ids_room)
        c->ids = (int32_t *)grown(c->ids, (c->ids_room = c->count + c->count / 2 + 1024) * sizeof *c->ids);
    c->ids[c->count++] = tokenizer_special(c->t, name);
    chat_mask(c, c->count - 1, target);
}

/* `head` and `content` as one text, as they are between two special tokens: a token may hold bytes of both. It is a
 * target like the content's. */
static void chat_text(Chat *c, const char *head, const char *content, size_t len, int target) {
    size_t head_len = strlen(head), first = c->count, at = 0;
    if (head_len + len > c->text_room) c->text = (char *)grown(c->text, c->text_room = 2 * (head_len + len) + 1024);
    memcpy(c->text, head, head_len);
    memcpy(c->text + head_len, content, len);
    c->count = tokenizer_encode(c->t, c->text, head_len + len, &c->ids, &c->ids_room, c->count);
    chat_mask(c, first, 0);
    for (size_t i = first; i < c->count; i++) {
        at += token_length(c->t, c->ids[i]);
        c->mask[i] = (uint8_t)(target && at > head_len);
    }
}

/* Bytes of the blank character that starts at `at`; 0: it is another. */
static size_t blank_at(const Chat *c, const char *text, size_t len, size_t at) {
    int rc = pcre2_match(c->blank, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, c->match, NULL);
    return rc > 0 ? pcre2_get_ovector_pointer(c->match)[1] - at : 0;
}

static void chat_turn(Chat *c, const char *role, const char *content, size_t len) {
    const Template *form = c->form;
    int target = !strcmp(role, "assistant");
    for (size_t n; form->trims && len && (n = blank_at(c, content, len, 0)) > 0;) content += n, len -= n;
    for (size_t last; form->trims && len; len = last) {
        for (last = len - 1; ((uint8_t)content[last] & 0xC0) == 0x80;) last--; // the last character's first byte
        if (!blank_at(c, content, len, last)) break;
    }
    chat_special(c, form->open, 0);
    if (form->close) {
        chat_text(c, role, "", 0, 0);
        chat_special(c, form->close, 0);
        chat_text(c, form->between, content, len, target);
    } else {
        char head[32];
        snprintf(head, sizeof head, "%s%s", role, form->between);
        chat_text(c, head, content, len, target);
    }
    chat_special(c, form->end, target);
    if (*form->behind) chat_text(c, form->behind, "", 0, 0);
}

// ---------------------------------------------------------------------------
// a line of JSON

typedef struct {
    const char *path;
    uint64_t line;
} Place;

#define CHAT_WANTED                                                                                                    \
    "expected one conversation a line, {\"messages\":[{\"role\":\"system|user|assistant\",\"content\":\"…\"},…]}"

__attribute__((noreturn, format(printf, 2, 3))) static void refuse(const Place *at, const char *format, ...) {
    char found[512];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    user_error("%s, line %" PRIu64 ": %s; " CHAT_WANTED, at->path, at->line, found);
}

/* What no template here writes must not get lost. */
static void refuse_tools(const Place *at, const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (item && !cJSON_IsNull(item) && !(cJSON_IsArray(item) && !item->child))
        refuse(at, "\"%s\" cannot be written by the template: leave such conversations out", key);
}

static void refuse_bad_text(const Place *at, const char *text, size_t len) {
    size_t valid = utf8_valid_length(text, len);
    if (valid < len) refuse(at, "no UTF-8 at byte %zu of the line", valid);
    if (memchr(text, 0, len)) refuse(at, "a zero byte in the line");
    for (const char *p = text; (p = strchr(p, '\\')) && p[1]; p += 2) // cJSON would end the string there
        if (!strncmp(p, "\\u0000", 6)) refuse(at, "\\u0000 in a string, which is not text");
}

/* Renders one line of len bytes and a zero. */
static void chat_line(Chat *c, const Place *at, const char *text, size_t len) {
    refuse_bad_text(at, text, len);
    const char *end = text;
    cJSON *json = cJSON_ParseWithOpts(text, &end, 1), *messages = json, *message;
    if (!json)
        refuse(at, "no JSON at byte %zu of the line, '%.*s'", (size_t)(end - text),
               (int)min_i64(24, (int64_t)strcspn(end, "\r\n")), end);
    if (cJSON_IsObject(json))
        messages = cJSON_GetObjectItemCaseSensitive(json, "messages"), refuse_tools(at, json, "tools");
    if (!cJSON_IsArray(messages)) refuse(at, "there is no list of messages");
    if (!messages->child) refuse(at, "the conversation is empty");
    c->count = 0;
    chat_special(c, c->form->begin, 0);
    int number = 0;
    cJSON_ArrayForEach(message, messages) {
        const cJSON *role = cJSON_GetObjectItemCaseSensitive(message, "role"),
                    *content = cJSON_GetObjectItemCaseSensitive(message, "content");
        number++;
        if (!cJSON_IsObject(message)) refuse(at, "message %d is no object", number);
        if (!cJSON_IsString(role)) refuse(at, "message %d has no \"role\" that is a string", number);
        if (strcmp(role->valuestring, "system") && strcmp(role->valuestring, "user") &&
            strcmp(role->valuestring, "assistant"))
            refuse(at, "message %d is of the unknown role '%.40s'", number, role->valuestring);
        if (!cJSON_IsString(content)) refuse(at, "message %d has no \"content\" that is a string", number);
        refuse_tools(at, message, "tool_calls");
        if (number == 1 && c->form->system && strcmp(role->valuestring, "system"))
            chat_turn(c, "system", c->form->system, strlen(c->form->system));
        chat_turn(c, role->valuestring, content->valuestring, strlen(content->valuestring));
    }
    cJSON_Delete(json);
}

// ---------------------------------------------------------------------------

/* Appends the conversations of a file; returns how many. */
static uint64_t chat_file(Chat *c, const char *path, TokenWriter *train, TokenWriter *val, Chooser *chooser) {
    FILE *f = fopen(path, "rb");
    char *line = NULL;
    size_t room = 0;
    uint64_t conversations = 0;
    Place at = {path, 0};
    if (!f) user_error("%s cannot be opened: %s; expected a file of JSON lines", path, strerror(errno));
    for (ssize_t len; (len = getline(&line, &room, f)) >= 0;) {
        at.line++;
        if (strspn(line, " \t\r\n") == (size_t)len) continue;
        chat_line(c, &at, line, (size_t)len);
        TokenWriter *w = choose(chooser, (size_t)len) ? val : train;
        size_t n = c->count;
        writer_narrow(w, c->ids, n);
        writer_write(w, c->ids, c->mask, n);
        writer_write(w, &c->t->eos, (const uint8_t *)"", 1); // a zero: no target
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

int main(int argc, char **argv) {
    static const char usage[] = "usage: chat --tokenizer FILE --out-train FILE [--out-val FILE [--val-fraction 0.05]] "
                                "JSONL...; conversations are packed: samples are windows "
                                "over all of them one behind the other, and only the assistant's tokens are targets";
    const char *tokenizer = NULL, *out_train = NULL, *out_val = NULL, *value,
               **files = (const char **)checked_malloc((size_t)argc * sizeof *files);
    int num_files = 0;
    double fraction = 0;
    for (int i = 1; i < argc; i++) {
        if ((value = option_value(argc, argv, &i, "--tokenizer"))) tokenizer = value;
        else if ((value = option_value(argc, argv, &i, "--out-train"))) out_train = value;
        else if ((value = option_value(argc, argv, &i, "--out-val"))) out_val = value;
        else if ((value = option_value(argc, argv, &i, "--val-fraction"))) fraction = fraction_option(value);
        else if (!strcmp(argv[i], "--help")) return puts(usage) < 0;
        else if (!strncmp(argv[i], "--", 2)) user_error("unknown option %s; %s", argv[i], usage);
        else files[num_files++] = argv[i];
    }
    const char *missing = !tokenizer                 ? "--tokenizer"
                          : !out_train               ? "--out-train"
                          : fraction > 0 && !out_val ? "--out-val"
                          : !num_files               ? "a file of conversations"
                                                     : NULL;
    if (missing) user_error("%s is missing; %s", missing, usage);
    if (out_val && !strcmp(out_train, out_val))
        user_error("--out-train and --out-val are both %s, expected two files", out_val);
    refuse_existing(out_train);
    if (out_val) refuse_existing(out_val);

    Tokenizer *t = tokenizer_open(tokenizer);
    Chat c = ZERO;
    c.t = t, c.form = template_find(t, tokenizer);
    c.blank = expression_open("[" SPACES "\\x{1c}-\\x{1f}]",
                              PCRE2_ANCHORED); // what Python's strip takes, as the template's trim does
    c.match = pcre2_match_data_create(1, NULL);
    TokenWriter train = ZERO, val = ZERO;
    Chooser chooser = {out_val ? fraction > 0 ? fraction : 0.05 : 0, 0, 0};
    uint64_t conversations = 0;
    writer_open(&train, out_train, t, 1);
    if (out_val) writer_open(&val, out_val, t, 1);
    for (int i = 0; i < num_files; i++) conversations += chat_file(&c, files[i], &train, &val, &chooser);
    if (!train.targets || (out_val && !val.targets))
        user_error("%" PRIu64 " conversations leave %s without a word of the assistant; give more of them",
                   conversations, train.targets ? out_val : out_train);
    printf("%" PRIu64 " conversations, template of %s\n", conversations, c.form->name);
    writer_close(&train);
    if (out_val) writer_close(&val);
    pcre2_code_free(c.blank), pcre2_match_data_free(c.match);
    free(c.ids), free(c.mask), free(c.text), free(files);
    tokenizer_close(t);
    return 0;
}
