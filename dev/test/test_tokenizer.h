/* test_tokenizer.h: text is split and numbered as tiktoken (dev/pytorch/make_tokenizer_fixture.py) and transformers
 * (dev/pytorch/make_smollm2_fixture.py) do it: on a small tokenizer made here, and on those parts of Llama 3's and
 * SmolLM2's tokenizers that the fixtures' texts need. With LLAMA3_TOKENIZER or SMOLLM2_TOKENIZER, which name the files,
 * all of each. Part of test_tokens_llama3.cu. */
#include "../../programs/tokens/corpus.h" // defines: cut_open, cut_next

// ---------------------------------------------------------------------------
// splitting and ids

/* Pieces, each followed by '|', must be `want`. */
static int splits_into(const Tokenizer *t, const char *text, const char *want, char *got) {
    size_t len = strlen(text);
    Splitter splitter = splitter_open(t->split, t->llama3, len);
    *got = 0;
    for (size_t at = 0, end; at < len; at = end) {
        end = split_next(&splitter, text, len, at);
        sprintf(got + strlen(got), "%.*s|", (int)(end - at), text + at);
    }
    splitter_close(&splitter);
    return !strcmp(got, want);
}

static void test_tokenizer_splits(const Tokenizer *t) {
    static const char *const cases[][2] = {
        // each pair agrees with tiktoken
        {"Hello, world!", "Hello|,| world|!|"},
        {"I'll don'T we'REx", "I|'ll| don|'T| we|'RE|x|"},
        {"it'\xC5\xBF"
         "a",
         "it|'\xC5\xBF|a|"}, // U+017F, the long s, folds to s
        {"1234567 8", "123|456|7| |8|"},
        {"a  b   c", "a| | b|  | c|"},
        {"end   ", "end|   |"},
        {"x\n\n  y", "x|\n\n| | y|"},
        {" \t\r\n \n z", " \t\r\n \n| z|"},
        {"!!\r\n?", "!!\r\n|?|"},
        {"\xE4\xB8\xAD\xE6\x96\x87 \xD9\xA1\xD9\xA2",
         "\xE4\xB8\xAD\xE6\x96\x87| |\xD9\xA1\xD9\xA2|"}, // letters; Arabic digits
        {"a\xC2\xA0\xC2\xA0"
         "b",
         "a|\xC2\xA0|\xC2\xA0"
         "b|"}, // U+00A0 is white space
        {"\xE1\xA0\x8E\xE1\xA0\x8E"
         "b",
         "\xE1\xA0\x8E\xE1\xA0\x8E|b|"}, // U+180E is none
        {" \xF0\x9F\x98\x80\xF0\x9F\x98\x80", " \xF0\x9F\x98\x80\xF0\x9F\x98\x80|"},
        {"e\xCC\x81t\xC3\xA9", "e|\xCC\x81t\xC3\xA9|"}, // a combining accent is no letter
        {"a\xF0\xB1\x8D\x90", "a\xF0\xB1\x8D\x90|"},    // U+31350, a letter since Unicode 15
        {"<|eot_id|>", "<||eot|_id||>|"}};
    char got[256];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int same = splits_into(t, cases[i][0], cases[i][1], got);
        CHECK("tokenizer: text splits where tiktoken splits it", same, "case %zu: %s", i, got);
    }
}

static void expect_ids(const Tokenizer *t, const char *name, const char *text, const char *want) {
    int32_t *ids = NULL;
    size_t capacity = 0, n = tokenizer_encode(t, text, strlen(text), &ids, &capacity, 0);
    char got[512] = "";
    for (size_t i = 0; i < n && i < 40; i++) sprintf(got + strlen(got), "%s%d", i ? " " : "", ids[i]);
    CHECK(name, !strcmp(got, want), "ids %s, expected %s", got, want);
    free(ids);
}

static void test_tokenizer_ids(const Tokenizer *t) {
    expect_ids(t, "tokenizer: nothing has no ids", "", "");
    expect_ids(t, "tokenizer: a whole piece that is a token is not merged up", "xyz", "262");
    expect_ids(t, "tokenizer: the lowest rank merges first", "abcd", "258 100");
    expect_ids(t, "tokenizer: a low rank beats an earlier pair", "aab", "97 257");
    expect_ids(t, "tokenizer: of equal ranks the leftmost merges first", "aaaaa", "259 259 97");
    expect_ids(t, "tokenizer: a token without a way to it by merges stays apart", "xyzz", "120 121 122 122");
    expect_ids(t, "tokenizer: pieces do not merge across their borders", "d e the", "100 32 101 261");
    expect_ids(t, "tokenizer: names of special tokens in text are text", "<|eom_id|>",
               "60 124 101 111 109 95 105 100 124 62");
    expect_ids(t, "tokenizer: from the first byte that is no UTF-8, the rest is one piece (tiktoken's _encode_bytes)",
               "ab \xFF"
               "d e",
               "257 32 255 260 101");
    expect_ids(t, "tokenizer: the piece before such a byte is merged with it", "ab cd\xC3", "257 32 99 100 195");
    for (size_t i = 0; i < sizeof test_special / sizeof test_special[0]; i++) {
        int32_t want = t->n_base + atoi(test_special[i][1]);
        const char *bytes;
        size_t n = tokenizer_decode(t, want, &bytes);
        CHECK("tokenizer: special tokens have Llama 3.1's ids and decode to their names",
              n == strlen(test_special[i][0]) && !memcmp(bytes, test_special[i][0], n), "%d is '%.*s', expected %s",
              want, (int)n, bytes, test_special[i][0]);
    }
    const char *bytes;
    CHECK("tokenizer: sizes and ends follow from the file",
          t->n_base == 256 + TEST_TOKENS && t->vocab_size == t->n_base + 256 && t->bos == t->n_base &&
              t->eos == t->n_base + 1,
          "n_base %d, vocab_size %d, bos %d, eos %d", t->n_base, t->vocab_size, t->bos, t->eos);
    CHECK("tokenizer: unknown ids are answered, not guessed",
          !tokenizer_decode(t, -1, &bytes) && !bytes && !tokenizer_decode(t, t->vocab_size, &bytes) && !bytes,
          "-1 and %d have no bytes", t->vocab_size);
}

// ---------------------------------------------------------------------------
// there and back, speed, threads

static int comes_back(const Tokenizer *t, const char *text, size_t len, size_t *count) {
    int32_t *ids = NULL;
    size_t capacity = 0, at = 0, same = 1;
    *count = tokenizer_encode(t, text, len, &ids, &capacity, 0);
    for (size_t i = 0; i < *count && same; i++) {
        const char *bytes;
        size_t n = tokenizer_decode(t, ids[i], &bytes);
        same = n && at + n <= len && !memcmp(text + at, bytes, n);
        at += n;
    }
    free(ids);
    return same && at == len;
}

static uint64_t token_random(uint64_t *state) { // xorshift64 (Marsaglia 2003)
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void test_tokenizer_round_trip(const Tokenizer *t) {
    static const char *const parts[] = {"a",
                                        "ab",
                                        "abc",
                                        " ",
                                        "  ",
                                        "\n",
                                        "\t",
                                        "'s",
                                        "12",
                                        "\xC3\xA9",
                                        "\xE4\xB8\xAD",
                                        "\xF0\x9F\x98\x80",
                                        " the",
                                        "\xC3",
                                        "\xE4\xB8",
                                        "\xED\xA0\x80",
                                        "\xC0\xAF",
                                        "\xF5",
                                        "\x80",
                                        "\xF4\x90\x80\x80",
                                        "\xE0\x80\x80",
                                        "<|eot_id|>",
                                        "\r\n",
                                        "\xE2\x80\xA8"};
    uint64_t state = 88172645463325252u;
    char text[256];
    size_t count, lost = 0, tried = 0;
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    lost += !comes_back(t, text, 256, &count);
    tried++;
    for (int i = 0; i < 3000; i++) {
        size_t len = token_random(&state) % 256;
        for (size_t j = 0; j < len; j++) text[j] = (char)token_random(&state);
        lost += !comes_back(t, text, len, &count);
        tried++;
        for (len = 0; len < 200;) {
            const char *part = parts[token_random(&state) % (sizeof parts / sizeof parts[0])];
            memcpy(text + len, part, strlen(part));
            len += strlen(part);
            if (token_random(&state) % 16 == 0) break;
        }
        lost += !comes_back(t, text, len, &count);
        tried++;
    }
    CHECK("tokenizer: any bytes come back, UTF-8 or not", lost == 0, "%zu of %zu texts differ", lost, tried);
}

#ifdef __SANITIZE_ADDRESS__
#define TEST_PIECE_SECONDS 5 // checked memory is slow
#else
#define TEST_PIECE_SECONDS 1
#endif
static void test_tokenizer_long_pieces(const Tokenizer *t) {
    static const char *const kinds[] = {"letters", "one letter", "blanks", "punctuation", "no UTF-8"};
    size_t len = 1 << 20, count;
    char *text = (char *)checked_malloc(len);
    uint64_t state = 1;
    for (int kind = 0; kind < 5; kind++) {
        for (size_t i = 0; i < len; i++) {
            text[i] = " a -"[kind % 4];
            if (kind == 0) text[i] = (char)('a' + token_random(&state) % 4);
            if (kind == 4) text[i] = (char)(0x80 + i % 64);
        }
        double started = processor_seconds();
        int same = comes_back(t, text, len, &count);
        double seconds = processor_seconds() - started;
        CHECK("tokenizer: a piece of 1 MiB without a place to split takes less than a second",
              same && seconds < TEST_PIECE_SECONDS, "%s: %.2f s < %d s, %zu ids", kinds[kind], seconds,
              TEST_PIECE_SECONDS, count);
    }
    free(text);
}

/* PCRE2 retries a match at every blank of a run, and gives up after 10 million retries unless it is told otherwise. */
static void test_tokenizer_blanks(const Tokenizer *t) {
    static const char *const cases[][2] = {{"spaces", " "}, {"no-break spaces", "\xC2\xA0"}, {"tabs", "\t"}};
    enum { BLANKS = 12000000 };
    char *text = (char *)checked_malloc(2 * BLANKS + 1);
    for (int c = 0; c < 3; c++) {
        size_t size = strlen(cases[c][1]), len = size * BLANKS;
        for (size_t i = 0; i < len; i++) text[i] = cases[c][1][i % size];
        text[len] = 'x';
        Splitter splitter = splitter_open(t->split, t->llama3, len + 1);
        size_t end = split_next(&splitter, text, len + 1, 0);
        splitter_close(&splitter);
        CHECK("tokenizer: 12 million blanks before a word are one piece, but for the last", end == len - size,
              "%s: the piece ends at byte %zu, expected %zu", cases[c][0], end, len - size);
    }
    free(text);
}

typedef struct {
    const Tokenizer *t;
    int32_t *ids;
    size_t capacity, count;
} TestEncode;

static void *test_encode_thread(void *arg) {
    TestEncode *e = (TestEncode *)arg;
    for (int i = 0; i < 2000; i++)
        e->count = tokenizer_encode(e->t, "the abc of the 12345 xyz, don't\n", 32, &e->ids, &e->capacity, e->count);
    return NULL;
}

static void test_tokenizer_threads(const Tokenizer *t) {
    enum { THREADS = 4 };
    TestEncode e[THREADS];
    pthread_t threads[THREADS];
    int equal = 1;
    for (int i = 0; i < THREADS; i++) {
        memset(&e[i], 0, sizeof e[i]);
        e[i].t = t;
        if (pthread_create(&threads[i], NULL, test_encode_thread, &e[i])) run_failure("test: no thread");
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 1; i < THREADS; i++)
        equal &= e[i].count == e[0].count && !memcmp(e[i].ids, e[0].ids, e[0].count * sizeof *e[0].ids);
    CHECK("tokenizer: threads that share one give equal ids", equal && e[0].count % 2000 == 0,
          "%d threads, %zu ids each", (int)THREADS, e[0].count);
    for (int i = 0; i < THREADS; i++) free(e[i].ids);
}

// ---------------------------------------------------------------------------
// tiktoken's ids

/* A tokenizer in which any two bytes are a token: its ids tell where a text was split. */
static void test_pairs_tokenizer(const char *path) {
    FILE *f = fopen(path, "w");
    for (int i = -256; i < 1 << 16 && f; i++) { // i < 0: a byte alone
        char bytes[2] = {(char)(i < 0 ? i + 256 : i >> 8), (char)i}, word[8];
        test_base64(bytes, i < 0 ? 1 : 2, word);
        fprintf(f, "%s %d\n", word, i + 256);
    }
    if (!f || fclose(f)) run_failure("test file %s could not be written", path);
}

typedef enum { CASE_PIECES, CASE_MERGES, CASE_IDS } CaseCheck; // of `pairs`, of tokens.txt, of Llama 3's tokenizer

/* Is what tiktoken gave, behind a text in cases.txt, what t gives? Two hashes, then ids. */
static int case_agrees(CaseCheck kind, const int32_t *ids, size_t count, const char *wanted) {
    char *at, *end;
    uint64_t pieces = strtoull(wanted, &at, 16), merges = strtoull(at, &at, 16);
    if (kind != CASE_IDS)
        return (kind == CASE_PIECES ? pieces : merges) == hash_bytes(HASH_START, ids, count * sizeof *ids);
    for (size_t i = 0; i < count; i++, at = end)
        if (strtol(at, &end, 10) != ids[i] || end == at) return 0;
    return !at[strspn(at, " ")];
}

/* cases.txt, a line a text: name, base64 of its bytes, hashes, ids. */
static void test_tokenizer_cases(const char *name, CaseCheck kind, const Tokenizer *t) {
    char file[600], wrong[256] = "";
    int texts = 0, differ = 0, lost = 0;
    snprintf(file, sizeof file, "%s/tokenizer/cases.txt", FIXTURES);
    char *all = read_text_file(file), *bytes = (char *)checked_malloc(strlen(all));
    int32_t *ids = NULL;
    size_t capacity = 0, back;
    for (char *line = strtok(all, "\n"); line; line = strtok(NULL, "\n"), texts++) {
        char *text = strchr(line, ' ') + 1, *wanted = strchr(text, ' ');
        size_t len = base64_decode(text, (size_t)(wanted - text), bytes);
        size_t count = tokenizer_encode(t, bytes, len, &ids, &capacity, 0);
        if (!case_agrees(kind, ids, count, wanted) && !differ++)
            snprintf(wrong, sizeof wrong, "; the first is %.*s", (int)(text - line), line);
        lost += !comes_back(t, bytes, len, &back);
    }
    CHECK(name, texts > 400 && !differ && !lost, "%d of %d texts differ, %d do not come back%s", differ, texts, lost,
          wrong);
    free(all);
    free(bytes);
    free(ids);
}

// clang-format off
static const char *const cut_parts[] = { // of random texts
    "'", "'s", "'l", "l", "'re", "e", " ", " ", "  ", "\n", "\r\n", "\t", "a", "the", " and", "ing", "7", "12", "3456",
    "!", "--", ".\n", "(", "_", "\xC3\xA9", "e\xCC\x81", "\xE4\xB8\xAD", "\xE3\x80\x82", "\xE3\x80\x80", "\xC2\xA0",
    "\xE2\x80\xA8", "\xC2\x85", "\xF0\x9F\x98\x80", "\xE0\xA4\x95\xE0\xA4\xBF", "\xD9\xA3", "\xC5\xBF", "\xE2\x85\xA7"};
// clang-format on
enum { CUT_PARTS = sizeof cut_parts / sizeof *cut_parts };

/* Cuts random texts at every place that cut_next names, and elsewhere, which must show. */
static void test_tokenizer_cuts(const Tokenizer *t) {
    pcre2_code *cut = cut_open();
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    uint64_t state = 2463534242u;
    size_t cuts = 0, wrong = 0, elsewhere = 0, shown = 0, capacity[2] = {0, 0};
    int32_t *ids[2] = {NULL, NULL};
    for (int i = 0; i < 4000; i++) {
        char text[256];
        size_t len = 0, next = 0;
        for (size_t n = 1 + token_random(&state) % 24; n; n--)
            len += (size_t)sprintf(text + len, "%s", cut_parts[token_random(&state) % CUT_PARTS]);
        size_t whole = tokenizer_encode(t, text, len, &ids[0], &capacity[0], 0);
        for (size_t at = 1; at < len; at++) {
            if ((text[at] & 0xC0) == 0x80) continue;
            if (next < at) next = cut_next(cut, match, text, len, next);
            if (!next) next = len;
            size_t n = tokenizer_encode(t, text, at, &ids[1], &capacity[1], 0);
            n = tokenizer_encode(t, text + at, len - at, &ids[1], &capacity[1], n);
            int same = n == whole && !memcmp(ids[0], ids[1], n * sizeof **ids);
            if (at == next) {
                cuts++;
                wrong += !same;
            } else {
                elsewhere++;
                shown += !same;
            }
        }
    }
    CHECK("tokenizer: text cut behind a word or number has the tokens of the whole",
          wrong == 0 && cuts > 10000 && shown > elsewhere / 4, "%zu of %zu cuts change tokens, %zu of %zu elsewhere",
          wrong, cuts, shown, elsewhere);
    pcre2_code_free(cut);
    pcre2_match_data_free(match);
    free(ids[0]);
    free(ids[1]);
}

static void test_tokenizer_tiktoken(const char *path) {
    test_pairs_tokenizer(path);
    Tokenizer *t = tokenizer_open(path);
    test_tokenizer_cases("tokenizer: text splits where tiktoken splits it, by the ids of pairs of bytes", CASE_PIECES,
                         t);
    test_tokenizer_cuts(t);
    tokenizer_close(t);
    char learned[600];
    snprintf(learned, sizeof learned, "%s/tokenizer/tokens.txt", FIXTURES);
    t = tokenizer_open(learned);
    test_tokenizer_cases("tokenizer: ids equal tiktoken's: scripts, code, blanks, broken UTF-8", CASE_MERGES, t);
    tokenizer_close(t);
    path = getenv("LLAMA3_TOKENIZER");
    if (!path || !*path) {
        printf("Llama 3's own tokenizer.model is not at hand (LLAMA3_TOKENIZER): its ids are left out\n");
        return;
    }
    t = tokenizer_open(path);
    test_tokenizer_cases("tokenizer: ids equal tiktoken's with Llama 3's own tokenizer", CASE_IDS, t);
    test_tokenizer_long_pieces(t);
    tokenizer_close(t);
}

// ---------------------------------------------------------------------------
// files of byte-level BPE, split as SmolLM2 splits

static void test_own_encode(void *path) { // an expression may still give no piece
    Tokenizer *t = tokenizer_open((const char *)path);
    int32_t *ids = NULL;
    size_t capacity = 0;
    tokenizer_encode(t, "abc def", 7, &ids, &capacity, 0);
}

static void test_own_ids(const char *path) {
    char *text = test_own_text(), got[256];
    test_write(path, text, strlen(text));
    free(text);
    Tokenizer *t = tokenizer_open(path);
    static const char *const cases[][2] = {
        // each pair agrees with the package tokenizers
        {"I'll don'T we'REx", "I|'ll| don|'|T| we|'|REx|"}, // endings in small letters alone
        {"1234567 8", "1|2|3|4|5|6|7| |8|"},
        {"a  12  b   3 c", "a|  |1|2| | b|   |3| c|"}, // blanks before a number stay together
        {"x\n\n  y", "x|\n\n | y|"},
        {"!!\r\n?", "!!|\r|\n|?|"},
        {"(x) ...7", "(|x|)| ...|7|"},
        {"a\xC2\xA0\xC2\xA0"
         "b",
         "a|\xC2\xA0|\xC2\xA0|b|"},
        {"e\xCC\x81t", "e|\xCC\x81|t|"},
        {"a\xF0\xB1\x8D\x90", "a\xF0\xB1\x8D\x90|"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int same = splits_into(t, cases[i][0], cases[i][1], got);
        CHECK("byte-level BPE: text splits by the file's expression", same, "case %zu: %s", i, got);
    }
    // ids: 3 special, the bytes but 0x04 (a byte b above it has b + 2), then the tokens from 258 on
    expect_ids(t, "byte-level BPE: ids do not start at 0 behind special tokens", "abcd", "260 102");
    expect_ids(t, "byte-level BPE: a byte that has no token is left out", "\x04  \x04!\x04!", "34 34 35 35");
    expect_ids(t, "byte-level BPE: of what has no token, nothing is left", "\x04\x04", "");
    expect_ids(t, "byte-level BPE: names of special tokens in text are text", "<|im", "62 126 107 111");
    expect_ids(t,
               "byte-level BPE: from the first byte that is no UTF-8, the rest is one piece; neighbours of what is "
               "left out merge",
               "ab \xFF"
               "ab\x04"
               "c",
               "259 34 257 260");
    CHECK("byte-level BPE: sizes and ends follow from the file",
          t->n_base == 255 + TEST_TOKENS && t->vocab_size == 258 + TEST_TOKENS && t->eos == 0 && t->bos == 1 &&
              t->eot == 2 && t->num_missing == 1,
          "n_base %d, vocab_size %d, eos %d, bos %d, eot %d", t->n_base, t->vocab_size, t->eos, t->bos, t->eot);
    CHECK("byte-level BPE: special tokens are found by name, others are not",
          tokenizer_special(t, "<|im_end|>") == 2 && tokenizer_special(t, "<|im_en") == NO_TOKEN &&
              tokenizer_special(t, "abc") == NO_TOKEN && tokenizer_ends(t, 0) && tokenizer_ends(t, 2) &&
              !tokenizer_ends(t, 1),
          "%d", tokenizer_special(t, "<|im_end|>"));
    tokenizer_close(t);
    char *no_piece = test_own_text(), *split = strstr(no_piece, "split "), *rest = strchr(split, '\n');
    memcpy(split, "split [abc ]+", 13);
    memmove(split + 13, rest, strlen(rest) + 1);
    test_write(path, no_piece, strlen(no_piece));
    expect_user_error("byte-level BPE: an expression that leaves text over ends with a sentence", test_own_encode, path,
                      "no piece at byte 4 of a text of 7 bytes");
    free(no_piece);
}

/* Any two bytes are a token, as in test_pairs_tokenizer. */
static void test_own_pairs(const char *path) {
    FILE *f = fopen(path, "w");
    if (f)
        fprintf(f, "byte-level-bpe 1\ntokens %d\nmissing 0\nbos -\neos <|endoftext|>\neot -\n" TEST_SPLIT TEST_SPECIAL,
                OWN_SPECIAL + 256 + (1 << 16));
    for (int i = -256; i < 1 << 16 && f; i++) {
        char bytes[2] = {(char)(i < 0 ? i + 256 : i >> 8), (char)i}, word[8];
        test_base64(bytes, i < 0 ? 1 : 2, word);
        fprintf(f, "%s %d\n", word, OWN_SPECIAL + 256 + i);
    }
    if (!f || fclose(f)) run_failure("test file %s could not be written", path);
}

/* smollm2_cases.txt, a line a text of cases.txt that is UTF-8: name, hashes of the ids of pairs, of smollm2_tokens.txt,
 * of SmolLM2's. */
static void test_own_cases(const char *name, CaseCheck kind, const Tokenizer *t) {
    char file[600], wrong[64] = "", *texts_end, *wanted_end;
    int texts = 0, differ = 0;
    snprintf(file, sizeof file, "%s/tokenizer/cases.txt", FIXTURES);
    char *texts_all = read_text_file(file), *bytes = (char *)checked_malloc(strlen(texts_all));
    snprintf(file, sizeof file, "%s/tokenizer/smollm2_cases.txt", FIXTURES);
    char *wanted_all = read_text_file(file), *line = strtok_r(texts_all, "\n", &texts_end);
    int32_t *ids = NULL;
    size_t capacity = 0;
    for (char *wanted = strtok_r(wanted_all, "\n", &wanted_end); wanted;
         wanted = strtok_r(NULL, "\n", &wanted_end), texts++) {
        size_t width = (size_t)(strchr(wanted, ' ') + 1 - wanted); // of the name and its blank
        uint64_t hash = strtoull(wanted + width + 17 * (size_t)kind, NULL, 16);
        while (line && strncmp(line, wanted, width)) line = strtok_r(NULL, "\n", &texts_end);
        if (!line) run_failure("%s: the text %.*s is not in cases.txt: make both anew", file, (int)width, wanted);
        size_t count = tokenizer_encode(t, bytes, base64_decode(line + width, strcspn(line + width, " "), bytes), &ids,
                                        &capacity, 0);
        if (hash_bytes(HASH_START, ids, count * sizeof *ids) != hash && !differ++)
            snprintf(wrong, sizeof wrong, "; the first is %.*s", (int)width, wanted);
    }
    CHECK(name, texts > 200 && !differ, "%d of %d texts differ%s", differ, texts, wrong);
    free(texts_all);
    free(wanted_all);
    free(bytes);
    free(ids);
}

static void test_own_tokenizer(const char *path) {
    char learned[600];
    test_own_malformed(path);
    test_own_ids(path);
    test_own_pairs(path);
    Tokenizer *t = tokenizer_open(path);
    test_own_cases("byte-level BPE: text splits where transformers splits it for SmolLM2, by the ids of pairs of bytes",
                   CASE_PIECES, t);
    test_tokenizer_round_trip(t);
    test_tokenizer_long_pieces(t);
    test_tokenizer_blanks(t);
    tokenizer_close(t);
    snprintf(learned, sizeof learned, "%s/tokenizer/smollm2_tokens.txt", FIXTURES);
    t = tokenizer_open(learned);
    test_own_cases("byte-level BPE: ids equal transformers': scripts, code, blanks, bytes without a token", CASE_MERGES,
                   t);
    tokenizer_close(t);
    path = getenv("SMOLLM2_TOKENIZER");
    if (!path || !*path) {
        printf("SmolLM2's own tokenizer.model is not at hand (SMOLLM2_TOKENIZER): its ids are left out\n");
        return;
    }
    t = tokenizer_open(path);
    test_own_cases("byte-level BPE: ids equal transformers' with SmolLM2's own tokenizer", CASE_IDS, t);
    tokenizer_close(t);
}

#include "test_tokenizer_json.h"

static void test_sha256(const char *path) {
    static const struct {
        const char *text, *hex;
    } cases[] = {// FIPS 180-2, appendix B; the empty message and one million a from the same series
                 {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                 {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
                 {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
                 {NULL, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    char *million = (char *)checked_malloc(1000000), hex[65];
    memset(million, 'a', 1000000);
    for (size_t i = 0; i < 4; i++) {
        uint8_t out[32];
        if (cases[i].text) test_write(path, cases[i].text, strlen(cases[i].text));
        else test_write(path, million, 1000000);
        sha256_of_file(path, out);
        for (int j = 0; j < 32; j++) sprintf(hex + 2 * j, "%02x", out[j]);
        CHECK("SHA-256 of a file agrees with the standard's examples", !strcmp(hex, cases[i].hex), "case %zu: %.16s", i,
              hex);
    }
    free(million);
}

static void test_tokenizer(void) {
    const char *tmp = getenv("TMPDIR");
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s/llama3-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(folder)) run_failure("test: no temporary folder %s: %s", folder, strerror(errno));
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    test_sha256(path);
    test_tokenizer_malformed(path);
    char *text = test_tokenizer_text(256 + TEST_TOKENS);
    test_write(path, text, strlen(text));
    free(text);
    uint8_t fingerprint[32];
    sha256_of_file(path, fingerprint);
    Tokenizer *t = tokenizer_open(path);
    CHECK("tokenizer: the fingerprint is the file's SHA-256", !memcmp(fingerprint, t->fingerprint, 32), "%02x%02x...",
          t->fingerprint[0], t->fingerprint[1]);
    test_tokenizer_splits(t);
    test_tokenizer_ids(t);
    test_tokenizer_round_trip(t);
    test_tokenizer_long_pieces(t);
    test_tokenizer_blanks(t);
    test_tokenizer_threads(t);
    tokenizer_close(t);
    test_tokenizer_tiktoken(path);
    test_own_tokenizer(path);
    unlink(path);
    test_tokenizer_json(folder);
    rmdir(folder);
}
