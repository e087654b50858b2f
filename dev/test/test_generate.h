/* test_generate.h: the text of generated tokens as it is printed, the choice of a token, prompts from a file, the
 * tokens that stop an answer, and the tokens of a conversation. Part of test_generate_llama3.cu. */

/* What is printed for `bytes`, in parts of `step` bytes as tokens may have them; `shown` receives it. */
static void test_printed(const char *bytes, size_t count, size_t step, int terminal, char *shown, size_t size) {
    char *text = NULL;
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    TextOutput out = {f, terminal, terminal, {0}, 0};
    for (size_t at = 0; at < count; at += step)
        text_output_bytes(&out, bytes + at, (size_t)min_i64((int64_t)step, (int64_t)(count - at)));
    text_output_end(&out);
    text_stream_close(f);
    snprintf(shown, size, "%s", text);
    free(text);
}

static void test_text_output(void) {
    static const struct {
        const char *name, *bytes, *terminal;
    } cases[] = {
        {"characters of 1 to 4 bytes", "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z",
         "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z"},
        {"an escape sequence", "\x1B[31mred\x07\x7F", "\xE2\x90\x9B[31mred\xE2\x90\x87\xE2\x90\xA1"},
        {"a carriage return, a line end and a tab", "a\rb\n\tc",
         "a\xE2\x90\x8D"
         "b\n\tc"},
        {"an 8-bit control sequence",
         "\xC2\x9B"
         "31m",
         "\xEF\xBF\xBD"
         "31m"},
        {"a bare 8-bit control byte",
         "\x9B"
         "31m",
         "\xEF\xBF\xBD"
         "31m"},
        {"an overlong escape", "\xC0\x9B\xE0\x80\x9B", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"a surrogate", "\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"a cut character at the end", "ab\xE2\x82", "ab\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"a cut character before a letter",
         "\xF0\x9F"
         "b",
         "\xEF\xBF\xBD\xEF\xBF\xBD"
         "b"},
        {"a cut character before another", "\xE2\x82\xC3\xA9", "\xEF\xBF\xBD\xEF\xBF\xBD\xC3\xA9"},
    };
    int wrong = 0, parts = 0;
    char first[128] = "";
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (size_t step = 1; step <= 4; step++, parts++) {
            char file[256], terminal[256];
            test_printed(cases[i].bytes, strlen(cases[i].bytes), step, 0, file, sizeof file);
            test_printed(cases[i].bytes, strlen(cases[i].bytes), step, 1, terminal, sizeof terminal);
            int bad = strcmp(file, cases[i].bytes) != 0 || strcmp(terminal, cases[i].terminal) != 0;
            if (bad && !wrong) snprintf(first, sizeof first, ", first: %s", cases[i].name);
            wrong += bad;
        }
    CHECK("printed text: a file receives the bytes, a terminal no control character and nothing that is no character",
          !wrong, "%d of %d cases wrong%s", wrong, parts, first);
    char *text = NULL;
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    TextOutput out = {f, 0, 0, {0}, 0};
    int whole = 1;
    text_output_bytes(&out, "a\xE2\x82", 3);
    whole &= !fflush(f) && length == 1;
    text_output_bytes(&out, "\xAC", 1);
    whole &= !fflush(f) && length == 4;
    text_stream_close(f);
    CHECK("printed text: a character is printed when its last byte has come, and not before", whole, "%zu bytes, %s",
          length, text);
    free(text);
}

static int by_likelihood(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return is_likelier(*y, *x) - is_likelier(*x, *y);
}

/* The definition of nucleus sampling, with a sorted vocabulary. Returns -1 where rounding may decide. */
static int32_t nucleus_by_sorting(const float *logits, int V, double temperature, double top_p, double u,
                                  Candidate *all) {
    double sum = 0, before = 0, nucleus = 0, largest = logits[0], at = 0;
    int n = 0;
    for (int v = 1; v < V; v++) largest = fmax(largest, logits[v]);
    for (int v = 0; v < V; v++) {
        all[v].p = (float)exp((logits[v] - largest) / temperature);
        all[v].id = v;
        sum += all[v].p;
    }
    qsort(all, (size_t)V, sizeof *all, by_likelihood);
    for (; n < V && (n == 0 || nucleus < top_p * sum); n++) {
        before = nucleus;
        nucleus += all[n].p;
    }
    if (fabs(nucleus - top_p * sum) < 1e-5 * sum || (n > 1 && fabs(before - top_p * sum) < 1e-5 * sum)) return -1;
    for (int i = 0; i < n; i++) {
        at += all[i].p / nucleus;
        if (fabs(at - u) < 1e-5) return -1;
        if (u < at) return all[i].id;
    }
    return -1;
}

static void test_sampling(void) {
    enum { MOST = 1003 };
    static float logits[MOST];
    static Candidate scratch[MOST], all[MOST];
    int wrong = 0, compared = 0;
    for (int i = 0; i < 2000; i++) {
        int V = 1 + (int)(mix64((uint64_t)i) % MOST);
        double temperature = 0.3 + 0.1 * (i % 13), top_p = i % 5 ? 0.05 + 0.09 * (i % 11) : 0.95;
        for (int v = 0; v < V; v++) logits[v] = (float)(12 * uniform_of_seed(7, (int64_t)i * MOST + v));
        double u = uniform_of_seed(3, i);
        int32_t expected = nucleus_by_sorting(logits, V, temperature, top_p, u, all);
        if (expected < 0) continue;
        compared++;
        const Sampling s = {temperature, top_p, 0, 1};
        wrong += sample_token(logits, V, &s, u, scratch) != expected;
    }
    CHECK("sampling: the nucleus by a heap is that of a sorted vocabulary", !wrong && compared > 1500,
          "%d of %d draws differ", wrong, compared);
}

static void test_read_prompts(void *path) {
    Tokenizer *t = tokenizer_open(scratch_path("prompts.model"));
    Prompts p = ZERO;
    p.vocab_size = t->vocab_size;
    p.defaults.max_tokens = 1;
    p.defaults.sampling.top_p = 1;
    prompts_read(&p, t, (const char *)path);
}

static void test_read_stop_tokens(void *model) { model_ids_read((const char *)model); }

static void write_text(const char *path, const char *text) { test_write(path, text, strlen(text)); }

static void test_prompts(const Tokenizer *t) {
    enum { LONG = 100000 };
    const char *path = strdup(scratch_path("prompts.txt"));
    static char text[LONG + 64];
    memset(text, 'x', LONG);
    strcpy(text + LONG, "\r\n\r\n\nbc bc\r\n\xC3\xA9");
    write_text(path, text);
    Prompts p = ZERO;
    prompts_read(&p, t, path);
    int right = p.count == 3 && p.longest == LONG && p.list[1].line == 4 && p.list[2].line == 5;
    right = right && p.list[1].length == 3 && p.list[1].ids[0] == 256 && p.list[1].ids[1] == ' ';
    right = right && p.list[2].length == 2 && p.list[2].ids[1] == 0xA9;
    right = right && !p.list[1].unprinted;
    CHECK("--prompts: a long line, empty lines, Windows' line ends, no end of the last line", right,
          "%d prompts, the longest of %d tokens", p.count, p.longest);
    prompts_close(&p);
    write_text(path, "\r\n\n");
    expect_user_error("--prompts of empty lines", test_read_prompts, path, "has no prompt");
    expect_user_error("--prompts that do not exist", test_read_prompts, "nowhere.txt", "cannot be opened");
    expect_user_error("--prompts that are a directory", test_read_prompts, "/tmp", "one prompt per line");
}

/* Requests as JSON lines, and what is put in front of a text. */
static void test_prompt_requests(const Tokenizer *t) {
    const char *path = strdup(scratch_path("requests.jsonl"));
    Tokenizer fronted = *t;
    Prompts p = ZERO;
    fronted.front = t->bos;
    p.vocab_size = t->vocab_size;
    p.defaults.max_tokens = 5;
    p.defaults.sampling.top_p = 0.9;
    write_text(path,
               UTF8_BYTE_ORDER_MARK "{\"id\": [1], \"prompt\": \"bc\", \"max_tokens\": 7, \"top_k\": 1}\n\n"
                                    "{\"prompt_ids\": [3, 300], \"seed\": 9, \"top_p\": 1}\n{\"prompt\": \"\"}\n");
    prompts_read(&p, &fronted, path);
    const Prompt *x = p.list;
    int right = p.count == 3 && x[0].length == 2 && x[0].ids[0] == t->bos && x[0].unprinted == 1 && p.most == 9;
    right = right && x[0].max_tokens == 7 && x[0].sampling.top_k == 1 && x[0].sampling.top_p == 0.9;
    right = right && x[0].is_request && !strcmp(x[0].name, "[1]") && !x[1].name && x[1].length == 2;
    right = right && x[1].ids[1] == 300 && !x[1].unprinted && x[1].sampling.seed == 9 && x[1].max_tokens == 5;
    right = right && x[2].length == 1 && x[2].ids[0] == t->bos;
    CHECK("--prompts FILE.jsonl: texts begin with the tokenizer's front, ids stay, each request has its own sampling",
          right, "%d requests", p.count);
    prompts_close(&p);
    write_text(path, "{\"prompt\": \"a\", \"typo\": 1}");
    expect_user_error("--prompts: an unknown key of a request", test_read_prompts, path, "line 1: the key \"typo\"");
    write_text(path, "{\"prompt_ids\": [1, 100000]}");
    expect_user_error("--prompts: an id beyond the vocabulary", test_read_prompts, path, "holds 100000, expected ids");
    write_text(path, "\xFF\xFEt\0h\0");
    expect_user_error("--prompts in UTF-16", test_read_prompts, path, "line 1: found invalid UTF-8 at byte 0");
}

static void test_stop_tokens(const Tokenizer *t) {
    const char *model = strdup(scratch_path("stopping"));
    const char *path = strdup(scratch_path("stopping/generation_config.json"));
    mkdir(model, 0755);
    write_text(path, "{\"eos_token_id\": [7, 9, 100000]}");
    StopTokens stop = model_ids_read(model).eos;
    int right = stop.count == 3 && is_stop_token(&stop, t, 7, 0) && is_stop_token(&stop, t, 9, 0);
    right = right && !is_stop_token(&stop, t, 8, 0) && is_stop_token(&stop, t, t->eos, 0) &&
            is_stop_token(&stop, t, t->eot, 0);
    right = right && is_stop_token(&stop, t, t->vocab_size, 0);
    right =
        right && is_stop_token(&stop, t, 7, 1) && !is_stop_token(&stop, t, t->eot, 1); // requests: only what is listed
    write_text(scratch_path("stopping/config.json"), "{\"eos_token_id\": 8}");
    stop = model_ids_read(model).eos;
    right = right && stop.count == 4 && stop.ids[0] == 8 && stop.ids[3] == 100000;
    write_text(path, "{\"eos_token_id\": null}");
    right = right && model_ids_read(model).eos.count == 1;
    CHECK("an answer stops at the tokenizer's and at the directory's end tokens, those of config.json first", right,
          "%d of both files", stop.count);
    write_text(path, "{\"eos_token_id\": [1, \"two\"]}");
    expect_user_error("an eos_token_id that is a word", test_read_stop_tokens, model, "has \"two\"; expected a token");
    write_text(path, "{\"eos_token_id\": -1}");
    expect_user_error("an eos_token_id that is negative", test_read_stop_tokens, model, "has -1; expected a token");
}

static void test_conversation(const Tokenizer *t) {
    const int32_t begin = t->n_base, open = begin + 6, close = begin + 7, end = begin + 9;
    const int32_t wanted[] = {begin, open, 'u', 's', 'e', 'r', close, '\n', '\n', '<', '|', 'e',
                              'o',   't',  '_', 'i', 'd', '|', '>',   end,  open, 'a', 's', 's',
                              'i',   's',  't', 'a', 'n', 't', close, '\n', '\n', 'o', 'k', end};
    Chat c, whole;
    const ChatTemplate *form = chat_template_of_tokens(t);
    chat_open(&c, t, form);
    chat_begin(&c, "user");
    chat_message(&c, "user", "<|eot_id|>", 10, 0); // plain text in a message
    chat_generation_prompt(&c);
    chat_token(&c, 'o', 1);
    chat_token(&c, 'k', 1);
    chat_turn_end(&c, 1);
    CHECK("a conversation has its template's tokens, and a message cannot write special ones",
          c.count == sizeof wanted / sizeof *wanted && !memcmp(c.ids, wanted, sizeof wanted), "%zu tokens", c.count);
    chat_open(&whole, t, form);
    chat_begin(&whole, "user");
    chat_message(&whole, "user", "<|eot_id|>", 10, 0);
    chat_message(&whole, "assistant", "ok", 2, 1);
    CHECK("an answer's tokens are those of the assistant's message",
          c.count == whole.count && !memcmp(c.ids, whole.ids, c.count * sizeof *c.ids), "%zu tokens", whole.count);
    chat_close(&c);
    chat_close(&whole);
}

/* The text of a conversation of messages (role, content), the last of them NULL. */
static const char *conversation_text(const Tokenizer *t, const ChatTemplate *form, const char *const *messages) {
    static char text[2048];
    Chat c;
    size_t used = 0;
    chat_open(&c, t, form);
    chat_begin(&c, messages[0]);
    for (int i = 0; messages[i]; i += 2) chat_message(&c, messages[i], messages[i + 1], strlen(messages[i + 1]), 0);
    for (size_t i = 0; i < c.count; i++) {
        const char *bytes;
        size_t n = tokenizer_decode(t, c.ids[i], &bytes);
        memcpy(text + used, bytes, n);
        used += n;
    }
    text[used] = 0;
    chat_close(&c);
    return text;
}

/* Templates whose system message begins with dates, and is there also if the conversation has none. */
static void test_dated_templates(const Tokenizer *t) {
    static const char start[] =
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
        "December 2023\nToday Date: ";
    const char *alone[] = {"user", "a", NULL}, *both[] = {"system", " be brief ", "user", "a", "system", "b", NULL};
    char wanted[1024], today[32];
    time_t now = time(NULL);
    strftime(today, sizeof today, "%d %b %Y", localtime(&now));
    for (int i = 3; i < 5; i++) {
        const char *date = i == 3 ? "26 Jul 2024" : today;
        snprintf(wanted, sizeof wanted, "%s%s\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>",
                 start, date);
        int right = !strcmp(conversation_text(t, &chat_templates[i], alone), wanted);
        snprintf(wanted, sizeof wanted,
                 "%s%s\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>"
                 "system<|end_header_id|>\n\nb<|eot_id|>",
                 start, date);
        right = right && !strcmp(conversation_text(t, &chat_templates[i], both), wanted);
        CHECK("a template with dates: in the first system message, which is always there, and in no other", right, "%s",
              chat_templates[i].name);
    }
}

/* White space that makes no difference to transformers' Jinja environment, and some that does. */
static void test_jinja_normal(void) {
    static const struct {
        const char *a, *b;
        int same;
    } cases[] = {{"{% if x %}a{% endif %}", "{% if x %}\na{% endif %}\n\n", 1},
                 {"{% if x %}a{% endif %}", "{%- if x -%}\r\n a\n\t{%- endif +%}", 1},
                 {"{{ 'a\n' }}", "{{'a\\n'}}", 1},
                 {"a{# don't say #}b", "ab", 1},
                 {"a{# don't #}b", "a", 0},
                 {"x\n{% if x %}y{% endif %}", "x\n  {% if x %}y{% endif %}", 1},
                 {"x{% if x %}y{% endif %}", "x  {% if x %}y{% endif %}", 0},
                 {"{{ x }}a", "{{ x }}\na", 0},
                 {"{% if x %}a", "{% if x +%}\na", 0},
                 {"{{ '%}' }}a", "{{ '%}\n' }}a", 0}};
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *a = jinja_normal(cases[i].a), *b = jinja_normal(cases[i].b);
        wrong += (strcmp(a, b) == 0) != cases[i].same;
        free(a);
        free(b);
    }
    CHECK("chat templates are compared without the white space that Jinja drops", !wrong, "%d of 10 pairs wrong",
          wrong);
}

static void test_generate(void) {
    const char *path = strdup(scratch_path("prompts.model"));
    write_text(path, test_tokenizer_text(256 + TEST_TOKENS));
    Tokenizer *t = tokenizer_open(path);
    test_text_output();
    test_sampling();
    test_prompts(t);
    test_prompt_requests(t);
    test_dated_templates(t);
    test_jinja_normal();
    test_stop_tokens(t);
    test_conversation(t);
    tokenizer_close(t);
}
