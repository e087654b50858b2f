/* test_tokenizer_files.h: damaged tokenizer files of both kinds are refused with a sentence that names the line. Offers
 * a small tokenizer of each kind to the other tests of tokenizers. Part of test_tokens_llama3.cu. */

// ---------------------------------------------------------------------------
// a tokenizer of the 256 bytes and a few tokens more

static const char *const test_tokens[] = {"bc", "ab", "abc", "aa", "d ", " the", "xyz", "  "}; // ids 256, 257, ...
enum { TEST_TOKENS = (int)(sizeof test_tokens / sizeof test_tokens[0]) };
static const char *const test_special[][2] = { // the first eleven and the last, of Llama 3.1's release
    {"<|begin_of_text|>", "0"},
    {"<|end_of_text|>", "1"},
    {"<|reserved_special_token_0|>", "2"},
    {"<|reserved_special_token_1|>", "3"},
    {"<|finetune_right_pad_id|>", "4"},
    {"<|reserved_special_token_2|>", "5"},
    {"<|start_header_id|>", "6"},
    {"<|end_header_id|>", "7"},
    {"<|eom_id|>", "8"},
    {"<|eot_id|>", "9"},
    {"<|python_tag|>", "10"},
    {"<|reserved_special_token_3|>", "11"},
    {"<|reserved_special_token_247|>", "255"}};

/* Parts of a tokenizer.json. */
#define JSON_SPLIT "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"
#define JSON_TOKEN(id, name)                                                                                           \
    "{\"id\":" id ",\"content\":\"" name                                                                               \
    "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}"

static void test_base64(const char *bytes, size_t n, char *out) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = 0;
        for (size_t j = 0; j < 3; j++) bits = bits << 8 | (i + j < n ? (uint8_t)bytes[i + j] : 0);
        for (size_t j = 0; j < 4; j++) *out++ = i + j > n ? '=' : alphabet[bits >> (18 - 6 * j) & 63];
    }
    *out = 0;
}

/* The small tokenizer's file as text; `lines` of it. */
static char *test_tokenizer_text(int lines) {
    char *text = (char *)checked_malloc((size_t)lines * 32 + 1), *p = text, word[64];
    for (int i = 0; i < lines; i++) {
        char byte = (char)i;
        if (i < 256) test_base64(&byte, 1, word);
        else test_base64(test_tokens[i - 256], strlen(test_tokens[i - 256]), word);
        p += sprintf(p, "%s %d\n", word, i);
    }
    return text;
}

static void test_open_tokenizer(void *path) { tokenizer_close(tokenizer_open((const char *)path)); }

/* Writes `good`, which this frees, with line `line` (from 1) replaced, and expects it to be refused. */
static void expect_bad_line(const char *path, const char *name, char *good, int line, const char *instead,
                            const char *part) {
    char *bad = (char *)checked_malloc(strlen(good) + 4096), *at = good;
    for (int i = 1; i < line; i++) at = strchr(at, '\n') + 1;
    sprintf(bad, "%.*s%s%s", (int)(at - good), good, instead, strchr(at, '\n') + 1);
    test_write(path, bad, strlen(bad));
    expect_user_error(name, test_open_tokenizer, path, part);
    free(good);
    free(bad);
}

static void expect_bad_tokenizer(const char *path, const char *name, int line, const char *instead, const char *part) {
    expect_bad_line(path, name, test_tokenizer_text(256 + TEST_TOKENS), line, instead, part);
}

static void test_tokenizer_malformed(const char *path) {
    char *cut = test_tokenizer_text(200);
    expect_user_error("tokenizer: a missing file is refused", test_open_tokenizer, "/nowhere/tokenizer.model",
                      "/nowhere/tokenizer.model");
    expect_user_error("tokenizer: a folder is refused", test_open_tokenizer, "/", "is a directory");
    test_write(path, "", 0);
    expect_user_error("tokenizer: an empty file is refused", test_open_tokenizer, path, "0 bytes");
    test_write(path, "\n\n\n", 3);
    expect_user_error("tokenizer: empty lines alone are refused", test_open_tokenizer, path, "line 1");
    test_write(path, cut, strlen(cut));
    expect_user_error("tokenizer: a file cut at a line's end is refused", test_open_tokenizer, path, "0xc8");
    test_write(path, cut, strlen(cut) - 3);
    expect_user_error("tokenizer: a file cut inside a line is refused", test_open_tokenizer, path, "line 200");
    expect_bad_tokenizer(path, "tokenizer: lines behind a JSON object are refused", 1, "{\"model\": {}}\n",
                         "after the end of the JSON object");
    expect_bad_tokenizer(path, "tokenizer: binary bytes are refused", 3, "\x12\x07\n", "line 3");
    expect_bad_tokenizer(path, "tokenizer: line ends of Windows are refused", 9, "CA== 8\r\n",
                         "line 9: found the byte 0x0d");
    expect_bad_tokenizer(path, "tokenizer: a line without a rank is refused", 12, "Cw==\n", "line 12: found 'Cw=='");
    expect_bad_tokenizer(path, "tokenizer: two blanks are refused", 12, "Cw==  11\n", "expected rank 11");
    expect_bad_tokenizer(path, "tokenizer: a rank left out is refused", 12, "Cw== 12\n", "expected rank 11");
    expect_bad_tokenizer(path, "tokenizer: a rank that is no number is refused", 12, "Cw== x\n", "line 12");
    expect_bad_tokenizer(path, "tokenizer: a negative rank is refused", 12, "Cw== -1\n", "line 12");
    expect_bad_tokenizer(path, "tokenizer: a rank beyond 64 bits is refused", 12, "Cw== 18446744073709551627\n",
                         "line 12");
    expect_bad_tokenizer(path, "tokenizer: base64 without padding is refused", 12, "Cw 11\n", "base64");
    expect_bad_tokenizer(path, "tokenizer: padding inside base64 is refused", 12, "C=w= 11\n", "base64");
    expect_bad_tokenizer(path, "tokenizer: a token without bytes is refused", 12, " 11\n", "base64");
    expect_bad_tokenizer(path, "tokenizer: padding alone is refused", 12, "==== 11\n", "base64");
    expect_bad_tokenizer(path, "tokenizer: a token given twice is refused", 12, "Cg== 11\n",
                         "the token of line 11 again");
    expect_bad_tokenizer(path, "tokenizer: a byte without a token is refused", 256, "enp6 255\n", "0xff");
    free(cut);
}

// ---------------------------------------------------------------------------
// files of byte-level BPE with an expression of their own: SmolLM2's

#define TEST_SPLIT "split \\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\\p{L}++| ?[^\\s\\p{L}\\p{N}]++|\\s+(?![^\\s\\p{N}])|\\s+\n"
#define TEST_SPECIAL "special <|endoftext|> 0\nspecial <|im_start|> 1\nspecial <|im_end|> 2\n"
enum { OWN_HEAD = 7, OWN_SPECIAL = 3 }; // lines

/* The small tokenizer as a file of this kind: without the byte 0x04, behind special tokens. */
static char *test_own_text(void) {
    char *text = (char *)checked_malloc(1 << 14), *p = text, word[64];
    p += sprintf(
        p,
        "byte-level-bpe 1\ntokens %d\nmissing 1\nbos <|im_start|>\neos <|endoftext|>\neot <|im_end|>\n" TEST_SPLIT
            TEST_SPECIAL,
        OWN_SPECIAL + 255 + TEST_TOKENS);
    for (int i = 0, id = OWN_SPECIAL; i < 256 + TEST_TOKENS; i++) {
        char byte = (char)i;
        if (i == 4) continue;
        if (i < 256) test_base64(&byte, 1, word);
        else test_base64(test_tokens[i - 256], strlen(test_tokens[i - 256]), word);
        p += sprintf(p, "%s %d\n", word, id++);
    }
    return text;
}

static void expect_bad_own(const char *path, const char *name, int line, const char *instead, const char *part) {
    expect_bad_line(path, name, test_own_text(), line, instead, part);
}

static void test_own_malformed(const char *path) {
    char *cut = test_own_text(), long_split[1100];
    test_write(path, cut, strlen(cut) - 8);
    expect_user_error("byte-level BPE: a file cut inside a line is refused", test_open_tokenizer, path, "line 273");
    *strchr(cut + strlen(cut) - 20, '\n') = 0;
    test_write(path, cut, strlen(cut));
    expect_user_error("byte-level BPE: a file cut at a line's end is refused", test_open_tokenizer, path,
                      "264 lines of tokens, its line 2 says 266");
    strchr(cut, '\n')[1] = 0;
    test_write(path, cut, strlen(cut));
    expect_user_error("byte-level BPE: a first line alone is refused", test_open_tokenizer, path,
                      "line 2: found '', expected 'tokens'");
    snprintf(long_split, sizeof long_split, "split %01030d\n", 7);
    expect_bad_own(path, "byte-level BPE: another version is refused", 1, "byte-level-bpe 2\n",
                   "found version '2', expected 1");
    expect_bad_own(path, "byte-level BPE: a first line that is left out is refused", 4, "",
                   "line 4: found 'eos <|endoftext|>', expected 'bos'");
    expect_bad_own(path, "byte-level BPE: a value that is left out is refused", 3, "missing\n",
                   "line 3: found 'missing'");
    expect_bad_own(path, "byte-level BPE: a number that is none is refused", 2, "tokens -1\n",
                   "line 2: found 'tokens -1', expected a number");
    expect_bad_own(path, "byte-level BPE: a byte without a token is refused, unless the file says so", 3, "missing 0\n",
                   "no token for 1 single bytes, its line 3 says 0");
    expect_bad_own(path, "byte-level BPE: an end that no special token has is refused", 6, "eot <|eot_id|>\n",
                   "line 6: found 'eot <|eot_id|>', expected the name");
    expect_bad_own(path, "byte-level BPE: documents without an end are refused", 5, "eos -\n", "line 5: found 'eos -'");
    expect_bad_own(path, "byte-level BPE: a broken expression is refused", 7, "split (a|b\n",
                   "line 7: found an expression that PCRE2 refuses (missing closing parenthesis");
    expect_bad_own(path, "byte-level BPE: an expression that matches nothing is refused", 7, "split a*\n",
                   "line 7: found an expression that also matches the empty string");
    expect_bad_own(path, "byte-level BPE: escapes on which engines differ are refused", 7, "split \\w+|.\n",
                   "line 7: found '\\w+|.' in the expression");
    expect_bad_own(path, "byte-level BPE: \\S inside brackets is refused", 7, "split [\\S]|.\n",
                   "line 7: found '\\S]|.'");
    expect_bad_own(path, "byte-level BPE: brackets inside brackets are refused", 7, "split [a[b]]|.\n",
                   "line 7: found '[b]]|.'");
    expect_bad_own(path, "byte-level BPE: a backslash at the end is refused", 7, "split a\\\n", "line 7: found '\\'");
    expect_bad_own(path, "byte-level BPE: an expression without end is refused", 7, long_split,
                   "found an expression of 1030 characters, expected at most 1000");
    expect_bad_own(path, "byte-level BPE: an id left out is refused", 12, "AQ== 5\n",
                   "line 12: found 'AQ== 5', expected id 4");
    expect_bad_own(path, "byte-level BPE: a special token without a name is refused", 9, "special 1\n",
                   "line 9: found 'special 1', expected id 1");
    expect_bad_own(path, "byte-level BPE: a special token's name has no blanks", 9, "special a b 1\n",
                   "line 9: found 'special a b 1', expected id 1");
    expect_bad_own(path, "byte-level BPE: a token given twice is refused", 14, "AQ== 6\n",
                   "line 14: found 'AQ== 6', the token of line 12 again");
    free(cut);
}
