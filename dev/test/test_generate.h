/* test_generate.h: the text of generated tokens as it is printed, the choice of a token, prompts from a file, the
 * tokens that stop an answer, and the tokens of a conversation. Part of test_llama3.cu. */

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
        wrong += sample_token(logits, V, temperature, top_p, u, scratch) != expected;
    }
    CHECK("sampling: the nucleus by a heap is that of a sorted vocabulary", !wrong && compared > 1500,
          "%d of %d draws differ", wrong, compared);
}

static void test_read_prompts(void *path) {
    Tokenizer *t = tokenizer_open(scratch_path("prompts.model"));
    Prompts p = ZERO;
    prompts_read(&p, t, (const char *)path);
}

static void test_read_stop_tokens(void *model) {
    StopTokens stop = ZERO;
    stop_tokens_read(&stop, (const char *)model, "generation_config.json");
}

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
    CHECK("--prompts: a long line, empty lines, Windows' line ends, no end of the last line", right,
          "%d prompts, the longest of %d tokens", p.count, p.longest);
    prompts_close(&p);
    write_text(path, "\r\n\n");
    expect_user_error("--prompts of empty lines", test_read_prompts, path, "has no prompt");
    expect_user_error("--prompts that do not exist", test_read_prompts, "nowhere.txt", "cannot be opened");
    expect_user_error("--prompts that are a directory", test_read_prompts, "/tmp", "one prompt per line");
}

static void test_stop_tokens(const Tokenizer *t) {
    const char *model = strdup(scratch_path("stopping"));
    const char *path = strdup(scratch_path("stopping/generation_config.json"));
    mkdir(model, 0755);
    StopTokens stop = ZERO;
    write_text(path, "{\"eos_token_id\": [7, 9, 100000]}");
    stop_tokens_read(&stop, model, "generation_config.json");
    stop_tokens_read(&stop, model, "config.json"); // there is none
    int right = stop.count == 3 && is_stop_token(&stop, t, 7) && is_stop_token(&stop, t, 9);
    right = right && !is_stop_token(&stop, t, 8) && is_stop_token(&stop, t, t->eos) && is_stop_token(&stop, t, t->eot);
    right = right && is_stop_token(&stop, t, t->vocab_size);
    write_text(path, "{\"eos_token_id\": 8}");
    stop_tokens_read(&stop, model, "generation_config.json");
    right = right && is_stop_token(&stop, t, 8);
    write_text(path, "{\"eos_token_id\": null}");
    stop_tokens_read(&stop, model, "generation_config.json");
    CHECK("an answer stops at the tokenizer's and at the directory's end tokens", right && stop.count == 4,
          "%d of the directory", stop.count);
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
    chat_message(&c, "user", "<|eot_id|>", 10); // plain text in a message
    chat_generation_prompt(&c);
    chat_token(&c, 'o', 1);
    chat_token(&c, 'k', 1);
    chat_turn_end(&c, 1);
    CHECK("a conversation has its template's tokens, and a message cannot write special ones",
          c.count == sizeof wanted / sizeof *wanted && !memcmp(c.ids, wanted, sizeof wanted), "%zu tokens", c.count);
    chat_open(&whole, t, form);
    chat_begin(&whole, "user");
    chat_message(&whole, "user", "<|eot_id|>", 10);
    chat_message(&whole, "assistant", "ok", 2);
    CHECK("an answer's tokens are those of the assistant's message",
          c.count == whole.count && !memcmp(c.ids, whole.ids, c.count * sizeof *c.ids), "%zu tokens", whole.count);
    chat_close(&c);
    chat_close(&whole);
}

static void test_generate(void) {
    const char *path = strdup(scratch_path("prompts.model"));
    write_text(path, test_tokenizer_text(256 + TEST_TOKENS));
    Tokenizer *t = tokenizer_open(path);
    test_text_output();
    test_sampling();
    test_prompts(t);
    test_stop_tokens(t);
    test_conversation(t);
    tokenizer_close(t);
}
