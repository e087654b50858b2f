/* test_tokenizer_json.h: tokenizer.json is read as transformers reads it, and what this program writes gives the ids of
 * the tokenizer.model that it was made from; chat templates are found and rendered. Expected ids were found by hand, or
 * are those of the fixtures of test_tokenizer.h. Part of test_tokens_llama3.cu. */
#include "../../programs/shared/chat_template.h"

// ---------------------------------------------------------------------------
// a small tokenizer.json, some of which is replaced

#define JSON_ADDED                                                                                                     \
    JSON_TOKEN("261", "<|endoftext|>") "," JSON_TOKEN("262", "<|im_start|>") "," JSON_TOKEN("263", "<|im_end|>")
#define JSON_TOKENS "\"bc\":256,\"ab\":257,\"xyz\":258,\"\\u0120t\":259,\"\\\"\\\\\":260"
#define JSON_MERGES "\"a b\",\"b c\",\"\\u0120 t\",\"\\\" \\\\\""

/* The tokenizer as text: the 256 bytes have their own ids; of the two merges "ab" and "bc", the list begins with the
 * one that has the higher id; no merge leads to "xyz". In it the text `old` is replaced by `instead`. */
static char *test_json(const char *old, const char *instead) {
    uint16_t characters[256];
    byte_characters(characters);
    size_t length;
    char *text, *changed;
    FILE *f = text_stream_open(&text, &length);
    fprintf(f, "{\"version\":\"1.0\",\"truncation\":null,\"added_tokens\":[" JSON_ADDED "],\"normalizer\":null,"
               "\"pre_tokenizer\":" JSON_SPLIT ",\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\"},"
               "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"vocab\":{");
    for (int i = 0; i < 256; i++) fprintf(f, "\"\\u%04x\":%d,", characters[i], i);
    fprintf(f, JSON_TOKENS "},\"merges\":[" JSON_MERGES "]}}\n");
    text_stream_close(f);
    char *at = strstr(text, old);
    if (!at) run_failure("test: '%s' is not in the small tokenizer.json", old);
    f = text_stream_open(&changed, &length);
    fprintf(f, "%.*s%s%s", (int)(at - text), text, instead, at + strlen(old));
    text_stream_close(f);
    free(text);
    return changed;
}

static Tokenizer *open_test_json(const char *path, const char *old, const char *instead) {
    char *text = test_json(old, instead);
    return tokenizer_from_text(path, text, strlen(text));
}

static void expect_bad_json(const char *path, const char *name, const char *old, const char *instead,
                            const char *part) {
    char *text = test_json(old, instead);
    test_write(path, text, strlen(text));
    expect_user_error(name, test_open_tokenizer, path, part);
    free(text);
}

// ---------------------------------------------------------------------------
// reading

static void test_json_ids(const char *path) {
    Tokenizer *t = open_test_json(path, "1.0", "1.0");
    CHECK("tokenizer.json: sizes and ends follow from the file",
          t->n_base == 261 && t->vocab_size == 264 && t->eos == 261 && t->bos == 262 && t->eot == 263 &&
              t->num_merges == 4 && !t->num_missing,
          "n_base %d, vocab_size %d, eos %d, bos %d, eot %d", t->n_base, t->vocab_size, t->eos, t->bos, t->eot);
    expect_ids(t, "tokenizer.json: merges follow the list, not the ids", "abc", "257 99");
    expect_ids(t, "tokenizer.json: a token to which no merge leads is divided", "xyz", "120 121 122");
    expect_ids(t, "tokenizer.json: escaped characters are read", "a t\"\\", "97 259 260");
    expect_ids(t, "tokenizer.json: names of special tokens in text are text", "<|im", "60 124 105 109");
    expect_ids(t, "tokenizer.json: GPT-2's pre-tokenizer", "I'll don'T 12 x",
               "73 39 108 108 32 100 111 110 39 84 32 49 "
               "50 32 120");
    tokenizer_close(t);
    t = open_test_json(path, JSON_MERGES, "[\"b\",\"c\"],[\"a\",\"b\"],[\"\\u0120\",\"t\"]");
    expect_ids(t, "tokenizer.json: merges are also lists of two tokens", "abc t\"\\", "97 256 259 34 92");
    tokenizer_close(t);
    t = open_test_json(path, "\"unk_token\"", "\"ignore_merges\":true,\"unk_token\"");
    expect_ids(t, "tokenizer.json: with ignore_merges, a piece that is a token is not divided", "xyz xyz",
               "258 32 120 121 122");
    tokenizer_close(t);
    t = open_test_json(
        path, JSON_SPLIT,
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true}," JSON_SPLIT "]}");
    CHECK("tokenizer.json: SmolLM2's pre-tokenizer is known", t->expression == smollm2_split && !t->llama3, "%s",
          t->expression);
    tokenizer_close(t);
    t = open_test_json(path, "\"post_processor\":null",
                       "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":"
                       "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|im_start|>\",\"type_id\":0}},"
                       "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}]}"
                       "]}");
    expect_ids(t, "tokenizer.json: what a post-processor adds around a text is left out", "ab", "257");
    tokenizer_close(t);
}

/* Each thing that a file may need and this program lacks is named. */
static void test_json_unsupported(const char *path) {
    static const char *const cases[][3] = {
        {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "needs the model 'Unigram'"},
        {"\"type\":\"BPE\",", "", "needs the model '?'"},
        {"\"unk_token\"", "\"byte_fallback\":true,\"unk_token\"", "needs the model BPE with \"byte_fallback\""},
        {"\"dropout\":null", "\"dropout\":0.1", "needs the model BPE with \"dropout\""},
        {"\"unk_token\"", "\"end_of_word_suffix\":\"</w>\",\"unk_token\"",
         "needs the model BPE with \"end_of_word_suffix\""},
        {"\"unk_token\"", "\"continuing_subword_prefix\":\"##\",\"unk_token\"",
         "needs the model BPE with \"continuing_subword_prefix\""},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}", "needs the normalizer 'NFC'"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}",
         "needs the normalizer 'Lowercase'"},
        {JSON_SPLIT, "{\"type\":\"Metaspace\"}", "needs the pre-tokenizer 'Metaspace'"},
        {JSON_SPLIT, "null", "needs no pre-tokenizer"},
        {JSON_SPLIT, "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}",
         "needs the pre-tokenizer ByteLevel with \"add_prefix_space\": true"},
        {JSON_SPLIT,
         "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":false}," JSON_SPLIT "]}",
         "needs the pre-tokenizer Digits with \"individual_digits\": false"},
        {JSON_SPLIT,
         "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{L}+\"},"
         "\"behavior\":\"Isolated\",\"invert\":false}," JSON_SPLIT "]}",
         "needs the pre-tokenizer Split with the expression '\\p{L}+'"},
        {JSON_SPLIT, "{\"type\":\"Sequence\",\"pretokenizers\":[" JSON_SPLIT "," JSON_SPLIT "]}",
         "needs this combination of the pre-tokenizers"},
        {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}",
         "needs the post-processor 'BertProcessing'"},
        {"{\"type\":\"ByteLevel\"}", "{\"type\":\"WordPiece\"}", "needs the decoder 'WordPiece'"},
        {"\"special\":true", "\"special\":false", "needs the added token '<|endoftext|>' with \"special\": false"},
        {"\"lstrip\":false", "\"lstrip\":true", "needs the added token '<|endoftext|>' with \"lstrip\": true"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_bad_json(path, "tokenizer.json: what this program does not implement is refused by its name",
                        cases[i][0], cases[i][1], cases[i][2]);
}

static void test_json_malformed(const char *path) {
    static const char *const cases[][4] = {
        {"a token without an id", "\"bc\":256", "\"bc\":\"256\"", "the token 'bc' has no id"},
        {"an id beyond the vocabulary", "\"bc\":256", "\"bc\":300", "the token 'bc' has the id 300, expected 0 to 260"},
        {"an id that two tokens have", "\"bc\":256", "\"bc\":257", "the tokens 'bc' and 'ab' have the same id 257"},
        {"a token listed twice", "\"bc\":256", "\"ab\":256", "the key \"ab\" occurs twice"},
        {"a character that no byte has", "\"bc\":256", "\"b\\u4e2d\":256", "has a character that ByteLevel uses for"},
        {"a token that is empty", "\"bc\":256", "\"\":256", "the token '' (id 256)"},
        {"a vocabulary that is a list", "\"vocab\":{", "\"vocab\":[],\"no\":{", "\"model\" has no \"vocab\""},
        {"an added token with the id of another", "\"id\":261", "\"id\":256",
         "needs the added token '<|im_start|>' to have the id 262, behind a gap"},
        {"an added token behind a gap", "\"id\":263", "\"id\":264", "to have the id 264, behind a gap"},
        {"an added token listed twice", "<|im_end|>", "<|im_start|>", "the added token '<|im_start|>' is listed twice"},
        {"an added token that the vocabulary has", "<|im_end|>", "bc", "but the vocabulary has it as 256"},
        {"an added token without content", "<|im_end|>", "", "the added token with the id 263 has no \"content\""},
        {"a merge of one token", "\"a b\"", "\"ab\"", "merge 0 is 'ab', expected two tokens"},
        {"a merge of three tokens", "\"a b\"", "\"a b c\"", "merge 0 is 'a b c', expected two tokens"},
        {"a merge that is a number", "\"a b\"", "7", "merge 0 is 'no text'"},
        {"a merge of an unknown token", "\"a b\"", "\"a bcd\"", "merge 0 needs the token 'bcd'"},
        {"a merge that forms no token", "\"a b\"", "\"a c\"", "merge 0 forms the token 'ac'"},
        {"a merge given twice", "\"b c\"", "\"a b\"", "the merges 0 and 1 are the same, 'a' and 'b'"},
        {"a file without merges", "\"merges\":[", "\"none\":[", "\"model\" has no \"merges\""},
        {"an unknown token that is needed", "\"unk_token\":null,\"vocab\":{\"\\u0100\":0,",
         "\"unk_token\":\"bc\",\"vocab\":{\"zz\":0,", "needs the unknown token 'bc'"},
        {"no token that ends a document", "<|endoftext|>", "<|end|>", "does not say which token ends a document"},
        {"a zero character", "\"1.0\"", "\"1\\u0000\"", "has \\u0000 in a string"},
        {"text behind the end", "\n", "\n7\n", "after the end of the JSON object"},
        {"a file that is cut off", "\"merges\":[" JSON_MERGES "]}}", "\"merges\":[", "is not a JSON object"}};
    char name[128];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(name, sizeof name, "tokenizer.json: %s is refused", cases[i][0]);
        expect_bad_json(path, name, cases[i][1], cases[i][2], cases[i][3]);
    }
}

// ---------------------------------------------------------------------------
// writing

/* The tokenizer.json that is written of `t`, opened. */
static Tokenizer *json_of(const Tokenizer *t) {
    size_t length;
    char *text = tokenizer_json_text(t, &length);
    return tokenizer_from_text("written.json", text, length);
}

static int same_ids(const Tokenizer *a, const Tokenizer *b, const char *text, size_t n) {
    int32_t *ids[2] = {NULL, NULL};
    size_t capacity[2] = {0, 0};
    size_t count = tokenizer_encode(a, text, n, &ids[0], &capacity[0], 0);
    int same = tokenizer_encode(b, text, n, &ids[1], &capacity[1], 0) == count &&
               (!count || !memcmp(ids[0], ids[1], count * sizeof **ids));
    free(ids[0]);
    free(ids[1]);
    return same;
}

/* A tokenizer.model of the bytes and of random texts of few letters, in any order: many have tokens that no merges lead
 * to, and tokens before their parts. */
static Tokenizer *random_tokenizer(uint64_t *state) {
    char *text = (char *)checked_malloc(1 << 14), word[16];
    strcpy(text, "byte-level-bpe 1\n");
    char tokens[40][8];
    int count = 0, wanted = (int)(token_random(state) % 40);
    while (wanted-- > 0) {
        size_t n = 2 + token_random(state) % 5;
        int known = 0;
        for (size_t i = 0; i < n; i++) tokens[count][i] = (char)('a' + token_random(state) % 3);
        tokens[count][n] = 0;
        for (int i = 0; i < count; i++) known |= !strcmp(tokens[i], tokens[count]);
        count += !known;
    }
    size_t used = (size_t)sprintf(text,
                                  "byte-level-bpe 1\ntokens %d\nmissing 0\nbos -\neos <|endoftext|>\neot -\n"
                                  "split %s\nspecial <|endoftext|> 0\n",
                                  257 + count, smollm2_split);
    for (int i = 0; i < 256 + count; i++) {
        char byte = (char)i;
        if (i < 256) test_base64(&byte, 1, word);
        else test_base64(tokens[i - 256], strlen(tokens[i - 256]), word);
        used += (size_t)sprintf(text + used, "%s %d\n", word, i + 1);
    }
    return tokenizer_from_text("random.model", text, used);
}

static void test_json_random_tokenizers(void) {
    enum { TOKENIZERS = 400, TEXTS = 100 };
    uint64_t state = 81985529216486895u;
    int differ = 0, ignore_merges = 0;
    for (int i = 0; i < TOKENIZERS; i++) {
        Tokenizer *t = random_tokenizer(&state), *json = json_of(t);
        ignore_merges += json->num_merges < t->n_base - 256;
        for (int k = 0; k < TEXTS; k++) {
            char text[64];
            size_t n = token_random(&state) % sizeof text;
            for (size_t at = 0; at < n; at++) text[at] = (char)('a' + token_random(&state) % 3);
            differ += !same_ids(t, json, text, n);
        }
        tokenizer_close(t);
        tokenizer_close(json);
    }
    CHECK("tokenizer.json: one merge per token gives the ids of merging by the lowest id, whatever the tokens are",
          !differ && ignore_merges > TOKENIZERS / 4, "%d of %d texts differ; %d of %d tokenizers have unreached tokens",
          differ, TOKENIZERS * TEXTS, ignore_merges, (int)TOKENIZERS);
}

/* Opens `path`, a tokenizer.model, and replaces it by what is written of it. */
static Tokenizer *reopened(const char *path) {
    Tokenizer *t = tokenizer_open(path), *json = json_of(t);
    tokenizer_close(t);
    return json;
}

static void test_json_of_models(const char *path) {
    char learned[600];
    snprintf(learned, sizeof learned, "%s/tokenizer/tokens.txt", FIXTURES);
    Tokenizer *t = reopened(learned);
    test_tokenizer_cases("tokenizer.json: what is written of a tokenizer.model gives tiktoken's ids", CASE_MERGES, t);
    tokenizer_close(t);
    snprintf(learned, sizeof learned, "%s/tokenizer/smollm2_tokens.txt", FIXTURES);
    t = reopened(learned);
    test_own_cases("tokenizer.json: what is written with SmolLM2's splitting gives transformers' ids", CASE_MERGES, t);
    tokenizer_close(t);
    char *text = test_tokenizer_text(256 + TEST_TOKENS);
    test_write(path, text, strlen(text));
    free(text);
    t = reopened(path);
    test_tokenizer_splits(t);
    test_tokenizer_ids(t);
    test_tokenizer_round_trip(t);
    tokenizer_close(t);
    text = test_own_text();
    test_write(path, text, strlen(text));
    free(text);
    t = reopened(path);
    expect_ids(t, "tokenizer.json: a byte that has no token is left out", "\x04  \x04!\x04!", "34 34 35 35");
    tokenizer_close(t);
}

// ---------------------------------------------------------------------------
// one vocabulary in two formats

static int accepts(const Tokenizer *t, const Tokenizer *data) {
    uint8_t known[MOST_FINGERPRINTS][32];
    return fingerprint_is_among(data->fingerprint, known, tokenizer_fingerprints(t, known));
}

static void test_json_fingerprints(void) {
    for (int own = 0; own < 2; own++) {
        char *text = own ? test_own_text() : test_tokenizer_text(256 + TEST_TOKENS), *changed;
        size_t length;
        Tokenizer *model = tokenizer_from_text("a.model", text, strlen(text)), *json = json_of(model);
        CHECK("tokenizer.json: data of the same vocabulary in the other format is accepted",
              accepts(model, json) && accepts(json, model), "%s: %d and %d", own ? "with a header" : "Llama 3's",
              accepts(model, json), accepts(json, model));
        changed = tokenizer_json_text(model, &length);
        char *first = strstr(changed, "\"b c\""), *second = strstr(changed, "\"a b\"");
        memcpy(first, "\"a b\"", 5);
        memcpy(second, "\"b c\"", 5);
        Tokenizer *other = tokenizer_from_text("b.json", changed, length);
        CHECK("tokenizer.json: data of the same vocabulary with merges in another order is refused",
              !accepts(other, model) && !accepts(model, other), "%d and %d", accepts(other, model),
              accepts(model, other));
        tokenizer_close(model);
        tokenizer_close(json);
        tokenizer_close(other);
    }
}

// ---------------------------------------------------------------------------
// the files of a checkpoint, and chat templates

static const TokenizerFile *file_named(const TokenizerFiles *all, const char *name) {
    for (int i = 0; i < all->copies.count; i++)
        if (!strcmp(all->copies.files[i].name, name)) return &all->copies.files[i];
    return NULL;
}

static void test_json_files(const char *folder) {
    char path[600], config[600];
    char *text = test_tokenizer_text(256 + TEST_TOKENS);
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    snprintf(config, sizeof config, "%s/tokenizer_config.json", folder);
    test_write(path, text, strlen(text));
    TokenizerFiles files = ZERO, again = ZERO;
    Tokenizer *t = tokenizer_open(path);
    tokenizer_files_open(&files, path, text, strlen(text), t, NULL, NULL, 128);
    const TokenizerFile *own = file_named(&files, "tokenizer.model"),
                        *made = file_named(&files, "tokenizer_config.json"),
                        *generation = file_named(&files, "generation_config.json");
    CHECK("tokenizer files: a checkpoint gets the run's own file, tokenizer.json and both configurations",
          files.copies.count == 4 && own && own->length == strlen(text) && !memcmp(own->text, text, own->length) &&
              file_named(&files, "tokenizer.json") && made && generation,
          "%d files", files.copies.count);
    cJSON *json = cJSON_Parse(made->text);
    CHECK("tokenizer files: tokenizer_config.json names the ends of a document and the chat template",
          !strcmp(json_string_or(json_get(json, "eos_token"), ""), "<|end_of_text|>") &&
              !strcmp(json_string_or(json_get(json, "bos_token"), ""), "<|begin_of_text|>") &&
              chat_template_of_jinja(json_string_or(json_get(json, "chat_template"), "")) == &chat_templates[0],
          "%zu bytes", made->length);
    cJSON_Delete(json);
    char want[128];
    snprintf(want, sizeof want, "\"eos_token_id\": [%d, %d]", t->eos, t->eot);
    CHECK("tokenizer files: generation ends at the end of a document or of a turn", strstr(generation->text, want),
          "expected %s", want);
    test_write(config, "{\"eos_token\":\"x\"}", 17);
    tokenizer_files_open(&again, path, text, strlen(text), t, NULL, NULL, 128);
    made = file_named(&again, "tokenizer_config.json");
    CHECK("tokenizer files: a tokenizer_config.json next to the tokenizer is kept",
          again.copies.count == 5 && !strcmp(made->text, "{\"eos_token\":\"x\"}"), "%s", made->text);
    const TokenizerFile *jinja = file_named(&again, "chat_template.jinja");
    CHECK("tokenizer files: the chat template that the tokenizer_config.json lacks is beside it",
          jinja && chat_template_of_jinja(jinja->text) == &chat_templates[0], "%zu bytes", jinja ? jinja->length : 0);
    unlink(config);
    unlink(path);
    tokenizer_files_close(&files);
    tokenizer_files_close(&again);
    tokenizer_close(t);
    free(text);
}

typedef struct {
    const Tokenizer *t;
    const char *path;
} ChatTest;
static void test_find_template(void *arg) {
    ChatTest *test = (ChatTest *)arg;
    chat_template_find(test->t, test->path);
}

static void test_chat_found(const Tokenizer *t, const char *path) {
    char config[600], jinja[600], text[2000];
    ChatTest test = {t, path};
    path_beside(config, sizeof config, path, "tokenizer_config.json");
    path_beside(jinja, sizeof jinja, path, "chat_template.jinja");
    CHECK("chat template: without one, special tokens decide", chat_template_find(t, path) == &chat_templates[1], "%s",
          chat_template_find(t, path)->name);
    size_t n =
        (size_t)sprintf(text, "{\"chat_template\":[{\"name\":\"tools\",\"template\":\"x\"},{\"name\":\"default\","
                              "\"template\":");
    FILE *f = fmemopen(text + n, sizeof text - n, "w");
    json_write_string(f, chat_templates[2].jinja, strlen(chat_templates[2].jinja));
    fprintf(f, "}]}");
    fclose(f);
    test_write(config, text, strlen(text));
    CHECK("chat template: the one in tokenizer_config.json comes first, of several the default",
          chat_template_find(t, path) == &chat_templates[2], "%s", chat_template_find(t, path)->name);
    test_write(jinja, chat_templates[1].jinja, strlen(chat_templates[1].jinja));
    CHECK("chat template: chat_template.jinja comes before it", chat_template_find(t, path) == &chat_templates[1], "%s",
          chat_template_find(t, path)->name);
    test_write(jinja, chat_templates[0].jinja, strlen(chat_templates[0].jinja));
    expect_user_error("chat template: one whose special tokens are missing is refused", test_find_template, &test,
                      "does not have the special tokens of the chat template in");
    test_write(jinja, "{%- if tools %}\n{{ x }}", 22);
    expect_user_error("chat template: another one is refused by its first words", test_find_template, &test,
                      "chat_template.jinja has the chat template '{%- if tools %}…', which this program cannot render");
    unlink(jinja);
    static const char no_text[] = "{\"chat_template\":{\"default\":1}}";
    test_write(config, no_text, sizeof no_text - 1);
    expect_user_error("chat template: one that is no text is refused", test_find_template, &test,
                      "\"chat_template\" must be a text, or a list");
    unlink(config);
}

static void test_chat_rendered(const Tokenizer *t) {
    Chat c;
    char text[256] = "";
    chat_open(&c, t, &chat_templates[1]);
    chat_begin(&c, "user");
    chat_message(&c, "user", "ab", 2, 0);
    size_t prompt = c.count;
    chat_generation_prompt(&c);
    int special = 0, targets = 0;
    for (size_t i = 0; i < c.count; i++) {
        const char *bytes;
        size_t n = tokenizer_decode(t, c.ids[i], &bytes);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%.*s", (int)n, bytes);
        special += c.ids[i] >= 261;
        targets += c.mask[i];
    }
    CHECK("chat template: a message and what the answer follows",
          !strcmp(text, "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n") && special == 3 && !targets &&
              prompt < c.count,
          "%zu bytes, %d special tokens, %d targets", strlen(text), special, targets);
    chat_close(&c);
}

static void test_tokenizer_json(const char *folder) {
    char path[600];
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    test_json_ids(path);
    test_json_unsupported(path);
    test_json_malformed(path);
    test_json_random_tokenizers();
    test_json_of_models(path);
    test_json_fingerprints();
    test_json_files(folder);
    Tokenizer *t = open_test_json(path, "1.0", "1.0");
    test_chat_found(t, path);
    test_chat_rendered(t);
    tokenizer_close(t);
    unlink(path);
}
