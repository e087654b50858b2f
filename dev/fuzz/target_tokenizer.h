/* target_tokenizer.h: tokenizer.model, text to ids and back.
 * Input: f FILE 0 TEXT; e N LINES 0 TEXT, where the lines of all but N of the 256 bytes come first; or v and tokens,
 * each behind its length, 0, TEXT; or o N EXPRESSION 0 and the same tokens, which go into a file of the other kind that
 * lacks N of the bytes. The text is encoded; behind f and e it is then read as ids.
 */
#ifndef TARGET_TOKENIZER_H
#define TARGET_TOKENIZER_H

enum { MOST_TOKENS = 64, LONGEST_TOKEN = 32 };

static size_t base64_line(const uint8_t *bytes, size_t n, int rank, char *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *p = out;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits =
            (uint32_t)bytes[i] << 16 | (i + 1 < n ? bytes[i + 1] : 0u) << 8 | (i + 2 < n ? bytes[i + 2] : 0u);
        for (size_t j = 0; j < 4; j++) *p++ = i + j > n ? '=' : digits[bits >> (18 - 6 * j) & 63];
    }
    return (size_t)(p - out) + (size_t)sprintf(p, " %d\n", rank);
}

/* The lines of the bytes, in an order that is not theirs: `count` of 256. */
static size_t byte_lines(char *out, int count) {
    static char lines[256][16]; // made once
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        uint8_t byte = (uint8_t)(i ^ 0x55);
        if (!lines[i][0]) base64_line(&byte, 1, i, lines[i]);
        used += (size_t)(stpcpy(out + used, lines[i]) - (out + used));
    }
    return used;
}

/* Byte-pair encoding as it is defined: again and again all neighbours are looked at. Returns the number of ids. */
static size_t plain_encode(const Tokenizer *t, const char *piece, size_t n, int32_t *ids) {
    size_t ends[LONGEST_TOKEN * 4], parts = n;
    ids[0] = token_find(t, piece, n);
    if (ids[0] != NO_TOKEN) return 1;
    for (size_t i = 0; i < n; i++) {
        ends[i] = i + 1;
        ids[i] = token_find(t, piece + i, 1);
    }
    for (;;) {
        size_t best = parts;
        int32_t lowest = INT32_MAX;
        for (size_t i = 0, start = 0; i + 1 < parts; start = ends[i++]) {
            int32_t id = token_find(t, piece + start, ends[i + 1] - start);
            if (id != NO_TOKEN && id < lowest) {
                lowest = id;
                best = i;
            }
        }
        if (best == parts) return parts;
        ids[best] = lowest;
        ends[best] = ends[best + 1];
        parts--;
        for (size_t i = best + 1; i < parts; i++) {
            ids[i] = ids[i + 1];
            ends[i] = ends[i + 1];
        }
    }
}

/* UTF-8 as RFC 3629 has it, by code points: how many leading bytes are whole and valid. */
static size_t plain_valid_length(const uint8_t *p, size_t length) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000}; // code point of so many bytes
    size_t at = 0;
    for (size_t n; at < length; at += n) {
        uint32_t code = p[at];
        n = 0;
        if (code < 0x80) n = 1;
        else if (code >> 5 == 6) n = 2;
        else if (code >> 4 == 14) n = 3;
        else if (code >> 3 == 30) n = 4;
        if (!n || n > length - at) break;
        if (n > 1) code &= 0x7Fu >> n;
        size_t i = 1;
        for (; i < n && p[at + i] >> 6 == 2; i++) code = code << 6 | (p[at + i] & 63);
        if (i < n || code < least[n] || code > 0x10FFFF || code >> 11 == 27) break; // 27: surrogates
    }
    return at;
}

static int is_special(const Tokenizer *t, int32_t id) {
    int found = 0;
    for (int i = 0; i < t->num_special; i++) found |= t->special[i] == id;
    return found;
}

/* What of a text can be given back: all but the bytes that no token has. */
static size_t without_missing(const Tokenizer *t, const char *text, size_t length, char *out) {
    size_t n = 0;
    for (size_t i = 0; i < length; i++)
        if (!t->missing[(uint8_t)text[i]]) out[n++] = text[i];
    return n;
}

/* The pieces of valid text one by one, each as the expression alone gives it and, where plain_encode has room, with the
 * ids of plain merging. */
static void check_merges(const Tokenizer *t, const char *text, size_t length, const int32_t *ids, size_t count) {
    Splitter splitter = splitter_open(t->split, t->llama3, length);
    pcre2_match_data *match = splitter.match;
    int32_t plain[LONGEST_TOKEN * 4];
    char piece[LONGEST_TOKEN * 4];
    size_t seen = 0, at = 0, end = 0;
    for (; at < length; at = end) {
        end = split_next(&splitter, text, length, at);
        int rc = pcre2_match(t->split, (PCRE2_SPTR)text, length, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, NULL);
        EXPECT((rc < 0 && !t->llama3) || (rc > 0 && end == pcre2_get_ovector_pointer(match)[1] && end > at),
               "a piece from byte %zu to %zu, by the expression to %zu", at, end, pcre2_get_ovector_pointer(match)[1]);
        if (end - at > sizeof plain / sizeof plain[0]) break;
        size_t left = without_missing(t, text + at, end - at, piece),
               n = left ? plain_encode(t, piece, left, plain) : 0;
        EXPECT(seen + n <= count && (!n || !memcmp(plain, ids + seen, n * sizeof *ids)),
               "the piece from byte %zu to %zu has other ids than plain merging gives", at, end);
        seen += n;
    }
    EXPECT(at < length || seen == count, "%zu ids, expected %zu", count, seen);
    splitter_close(&splitter);
}

static void check_encoding(const Tokenizer *t, const char *text, size_t length) {
    int32_t *ids = NULL;
    size_t capacity = 0, at = 0, used = 0, count = tokenizer_encode(t, text, length, &ids, &capacity, 0);
    char *lines = (char *)checked_malloc(12 * count + 1), *kept = (char *)checked_malloc(length + 1);
    size_t left = without_missing(t, text, length, kept);
    for (size_t i = 0; i < count; i++) {
        const char *bytes;
        size_t n = tokenizer_decode(t, ids[i], &bytes);
        EXPECT(n && !is_special(t, ids[i]) && n <= left - at && !memcmp(bytes, kept + at, n),
               "id %d of %d, at byte %zu, is not the text", ids[i], t->vocab_size, at);
        at += n;
        used += (size_t)sprintf(lines + used, "%d\n", ids[i]);
    }
    EXPECT(at == left, "the ids give %zu bytes of %zu", at, left);
    size_t valid = plain_valid_length((const uint8_t *)text, length);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    size_t found = text_valid_length(t->split, match, text, length);
    pcre2_match_data_free(match);
    EXPECT(found == valid, "%zu bytes of %zu are valid UTF-8, not %zu", valid, length, found);
    if (valid == length) check_merges(t, text, length, ids, count);
    size_t twice = tokenizer_encode(t, text, length, &ids, &capacity, count);
    EXPECT(twice == 2 * count && (!count || !memcmp(ids, ids + count, count * sizeof *ids)),
           "%zu ids behind the first %zu: not the same again", twice - count, count);
    decode_ids(t, "ids", lines, used);
    EXPECT(said_length(&said_out) == left && !memcmp(said_out.text, kept, left),
           "--decode gives %zu bytes, expected the %zu that were encoded", said_length(&said_out), left);
    free(lines);
    free(ids);
    free(kept);
}

static void check_vocabulary(const Tokenizer *t) {
    const char *bytes;
    EXPECT(t->vocab_size == t->n_base + t->num_special && is_special(t, t->eos),
           "%d tokens and %d with the special ones", t->n_base, t->vocab_size);
    EXPECT(!t->llama3 ||
               (t->n_base >= 256 && t->num_special == NUM_SPECIAL_TOKENS && t->eos == t->n_base + 1 && !t->num_missing),
           "%d tokens, %d special", t->n_base, t->num_special);
    for (int32_t id = t->llama3 ? 250 : 0; id < t->vocab_size; id++) { // Llama 3's before these are single bytes
        size_t n = tokenizer_decode(t, id, &bytes);
        EXPECT(n > 0 && (is_special(t, id) || token_find(t, bytes, n) == id), "token %d of %zu bytes is not found", id,
               n);
    }
    EXPECT(!tokenizer_decode(t, -1, &bytes) && !tokenizer_decode(t, t->vocab_size, &bytes),
           "an id outside the vocabulary has bytes");
}

enum { MOST_LINES = 256 * 16 + MOST_TOKENS * (LONGEST_TOKEN * 2 + 16) }; // bytes

/* The length of the next token's bytes, which follow it; 0: there is none. */
static size_t next_length(Bytes *in) {
    size_t n = (size_t)next_byte(in);
    return n >= 2 && n <= LONGEST_TOKEN && n <= in->left ? n : 0;
}

/* The tokenizer of a vocabulary that the input spells out; its tokens have to come back. */
static Tokenizer *open_vocabulary(Bytes *in) {
    struct {
        const uint8_t *bytes;
        size_t n;
    } tokens[MOST_TOKENS];
    char lines[MOST_LINES];
    size_t used = byte_lines(lines, 256);
    int count = 0;
    for (size_t n = next_length(in); n && count < MOST_TOKENS; n = next_length(in)) {
        int known = 0;
        for (int i = 0; i < count; i++) known |= tokens[i].n == n && !memcmp(tokens[i].bytes, in->at, n);
        if (!known) {
            used += base64_line(in->at, n, 256 + count, lines + used);
            tokens[count].bytes = in->at;
            tokens[count++].n = n;
        }
        in->at += n;
        in->left -= n;
    }
    held.promise = "a good tokenizer.model";
    Tokenizer *t = tokenizer_open(give("tokenizer.model", lines, used));
    held.promise = NULL;
    EXPECT(t->n_base == 256 + count, "%d tokens, the file has %d", t->n_base, 256 + count);
    for (int i = 0; i < t->n_base; i++) {
        const char *bytes;
        uint8_t byte = (uint8_t)(i ^ 0x55);
        size_t n = tokenizer_decode(t, i, &bytes);
        EXPECT(n == (i < 256 ? 1 : tokens[i - 256].n) && !memcmp(bytes, i < 256 ? &byte : tokens[i - 256].bytes, n),
               "token %d is another than in the file", i);
    }
    return t;
}

/* The same as a file of the other kind, behind an expression of any kind and one special token, without some of the
 * bytes. */
static Tokenizer *open_other(Bytes *in) {
    struct {
        const uint8_t *bytes;
        size_t n;
    } tokens[MOST_TOKENS];
    char lines[MOST_LINES + 1024];
    int missing = next_byte(in), left = 256 - missing, count = 0;
    Bytes expression = up_to_zero(in);
    for (size_t n = next_length(in); n && count < MOST_TOKENS; n = next_length(in)) {
        int known = 0;
        for (int i = 0; i < count; i++) known |= tokens[i].n == n && !memcmp(tokens[i].bytes, in->at, n);
        for (size_t i = 0; i < n; i++)
            known |= (in->at[i] ^ 0x55) >= left; // a token of bytes that are missing: none such
        if (!known) {
            tokens[count].bytes = in->at;
            tokens[count++].n = n;
        }
        in->at += n;
        in->left -= n;
    }
    size_t used = (size_t)snprintf(
        lines, 1024,
        "byte-level-bpe 1\ntokens %d\nmissing %d\nbos -\neos <|end|>\neot -\nsplit %.*s\nspecial <|end|> 0\n",
        1 + left + count, missing, (int)min_i64((int64_t)expression.left, 400),
        expression.left ? (const char *)expression.at : "");
    for (int i = 0; i < left + count; i++) {
        uint8_t byte = (uint8_t)(i ^ 0x55);
        used += base64_line(i < left ? &byte : tokens[i - left].bytes, i < left ? 1 : tokens[i - left].n, 1 + i,
                            lines + used);
    }
    Tokenizer *t = tokenizer_open(give("tokenizer.model", lines, used));
    EXPECT(t->n_base == left + count && t->num_missing == missing && t->eos == 0,
           "%d tokens of %d, %d bytes missing of %d", t->n_base, left + count, t->num_missing, missing);
    return t;
}

/* Checks that writing the tokens as a file again gives the same file. The base64 digit before a = may differ in the
 * bits that encode nothing. */
static void check_lines(const Tokenizer *t, const char *lines, size_t size) {
    const char *at = lines, *bytes;
    char line[MOST_LINES + 16];
    for (int i = 0; i < NUM_HEADER_LINES && t->has_header; i++) at = strchr(at, '\n') + 1;
    for (int32_t id = 0, last = !t->has_header ? t->n_base : t->vocab_size; id < last; id++) {
        size_t length = tokenizer_decode(t, id, &bytes), digits = (length + 2) / 3 * 4;
        int special = is_special(t, id);
        size_t n = special ? (size_t)sprintf(line, "special %.*s %d\n", (int)length, bytes, id)
                           : base64_line((const uint8_t *)bytes, length, id, line);
        if (length % 3 && !special) line[digits - (length % 3 == 1 ? 3 : 2)] = at[digits - (length % 3 == 1 ? 3 : 2)];
        if (id == last - 1 && n > (size_t)(lines + size - at)) n--; // the last may lack its end
        EXPECT(n <= (size_t)(lines + size - at) && !memcmp(at, line, n),
               "line %d is '%.*s', of its token it would be '%.*s'", id + 1, (int)n, at, (int)n, line);
        at += n;
    }
    EXPECT(strspn(at, "\n") == (size_t)(lines + size - at), "lines behind the last token's");
}

static Tokenizer *open_lines(Bytes *in, int kind) {
    char lines[MOST_LINES];
    size_t before = kind == 'e' ? byte_lines(lines, 256 - next_byte(in)) : 0;
    Bytes file = up_to_zero(in);
    size_t n = (size_t)min_i64((int64_t)file.left, (int64_t)(sizeof lines - before - 1));
    if (n) memcpy(lines + before, file.at, n);
    lines[before + n] = 0;
    Tokenizer *t = tokenizer_open(give("tokenizer.model", lines, before + n));
    check_lines(t, lines, before + n);
    return t;
}

static void fuzz_tokenizer(Bytes in) {
    int kind = next_byte(&in);
    Tokenizer *t;
    if (kind == 'v') t = open_vocabulary(&in);
    else if (kind == 'o') t = open_other(&in);
    else t = open_lines(&in, kind);
    held.taken = 1;
    char *text = text_of(in);
    check_vocabulary(t);
    check_encoding(t, text, in.left);
    if (kind != 'v' && kind != 'o') decode_ids(t, "ids", text, in.left);
    free(text);
    tokenizer_close(t);
}

static const char *const tokenizer_words[] = {" 256\n",       " 257\n",
                                              " 258\n",       "IHRoZQ==",
                                              "YWI=",         "AAAA",
                                              "'ll",          "\r\n",
                                              "\xc2\x85",     "\xe3\x80\x80",
                                              "\xed\xa0\x80", "\xf0\x9f\x98\x80",
                                              "2147483648",   "byte-level-bpe 1\n",
                                              "tokens ",      "missing ",
                                              "bos -\n",      "eos ",
                                              "eot ",         "split ",
                                              "special ",     "\\p{L}",
                                              "\\p{N}",       "\\s",
                                              "\\S",          "(?!",
                                              "(?:",          "[^",
                                              "++",           NULL};

#endif
