/* tokenizer.h: text to token ids and back, by byte-level byte-pair encoding (BPE).
 *
 * Reads two formats. Llama 3's `tokenizer.model` has one line per token: base64 of its bytes, a space, its rank.
 * The tokenizers of other models come as a text file with a header, described above tokenizer_header_words.
 * Text is split into pieces by a regular expression (PCRE2), and each piece is merged into tokens by itself.
 * A caller may rely on this: ids equal those of tiktoken and transformers; decoding gives back the encoded bytes
 * (except bytes for which a tokenizer has no token); the time is n log n in the longest piece; an open Tokenizer
 * is never written to, so any number of threads may share it.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include "lib/base.h" // defines: hash_bytes, user_error, run_failure, new_array, min_i64
#include "lib/sha256.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h> // defines: pcre2_compile, pcre2_jit_compile, pcre2_match

enum { NUM_SPECIAL_TOKENS = 256, SPECIAL_NAME_BYTES = 40 /* at most */, NO_TOKEN = -1 };

/* A slot of the hash table from bytes to base tokens. */
typedef struct {
    uint32_t hash;
    int32_t id; // NO_TOKEN: the slot is empty
} TokenSlot;

typedef struct Tokenizer {
    int32_t n_base;          // base tokens: those that text is encoded to; a lower id merges first
    int32_t num_special;     // special tokens, such as <|end_of_text|>; text is never encoded to them
    int32_t vocab_size;      // n_base + num_special
    int32_t bos, eos, eot;   // begin of document, end of document, end of a conversation's turn; or NO_TOKEN
    int llama3;              // 1: Llama 3's format, whose special tokens follow its base tokens
    uint8_t fingerprint[32]; // SHA-256 of the file
    uint8_t missing[256];    // 1: no token has this byte
    int num_missing;
    int32_t *special; // (num_special) ids of the special tokens, ascending
    char *bytes;      // the bytes of all tokens, one after the other; those of a special token are its name
    uint64_t *start;  // (vocab_size + 1) token i is bytes[start[i] .. start[i + 1])
    size_t longest;   // bytes of the longest base token
    TokenSlot *slots; // (slot_mask + 1) hash table with open addressing
    uint32_t slot_mask;
    pcre2_code *split; // the regular expression that matches one piece
} Tokenizer;

// ---------------------------------------------------------------------------
// the regular expression that splits text into pieces

/* Character classes as in Rust's regex crate, which tiktoken uses, for use inside [...]. \s is the Unicode property
 * White_Space; PCRE2's own \s also contains U+180E. \p{L} and \p{N} are those of Unicode 16; PCRE2 before 10.45 has
 * older tables, so the letters and numbers assigned since Unicode 14 are listed. */
#define SPACES                                                                                                         \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define LETTERS                                                                                                        \
    "\\p{L}"                                                                                                           \
    "\\x{1c89}\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d65}"               \
    "\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}\\x{11240}\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}"          \
    "\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}"          \
    "\\x{11f12}-\\x{11f33}\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"                   \
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}"                    \
    "\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBERS                                                                                                        \
    "\\p{N}"                                                                                                           \
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}\\x{16130}-\\x{16139}"        \
    "\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"

/* Llama 3's expression (llama-models, models/llama3/tokenizer.py), one alternative per line. A repetition is possessive
 * (++, *+) where giving characters back could not help the rest of the pattern: the pieces are the same, without
 * retries. */
// clang-format off
static const char llama3_split[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)"                      // an English contraction
    "|(?: |[^\\r\\n\\p{L}\\p{N}])?+\\p{L}++"            // a word, with one character before it
    "|\\p{N}{1,3}+"                                     // up to three digits
    "| ?+[^\\s\\p{L}\\p{N}]++[\\r\\n]*+"                // punctuation, with the line ends after it
    "|\\s*[\\r\\n]+"                                    // empty lines
    "|\\s+(?!\\S)"                                      // spaces, except the one before a word
    "|\\s+";
// clang-format on

static inline int is_ascii_letter(char c) { return (uint8_t)((c | 32) - 'a') < 26; }
static inline int is_ascii_digit(char c) { return c >= '0' && c <= '9'; }

enum { EXPRESSION_LENGTH = 1000 /* characters of a file's expression, at most */ };

/* Translates an expression, Llama 3's or that of a file, to PCRE2: replaces \p{L}, \p{N}, \s and \S by the classes
 * above. Only syntax that every engine reads alike is accepted: returns NULL, or where other syntax begins. `out` needs
 * EXPRESSION_LENGTH / 2 times the size of the longest class. */
static const char *expression_translate(const char *from, char *out) {
    enum { CLASSES = 4 };
    static const struct {
        const char *escape, *alone, *in_brackets;
    } classes[CLASSES] = {{"\\p{L}", "[" LETTERS "]", LETTERS},
                          {"\\p{N}", "[" NUMBERS "]", NUMBERS},
                          {"\\s", "[" SPACES "]", SPACES},
                          {"\\S", "[^" SPACES "]", NULL}};
    int in_brackets = 0;
    while (*from) {
        int class_index = 0;
        while (class_index < CLASSES && strncmp(from, classes[class_index].escape, strlen(classes[class_index].escape)))
            class_index++;
        if (class_index < CLASSES) {
            const char *to = in_brackets ? classes[class_index].in_brackets : classes[class_index].alone;
            if (!to) return from;
            out = stpcpy(out, to);
            from += strlen(classes[class_index].escape);
            continue;
        }
        int escaped = *from == '\\';
        if (escaped && !from[1]) return from;
        if (escaped && !strchr("rnt", from[1]) && (is_ascii_letter(from[1]) || is_ascii_digit(from[1]))) return from;
        if ((in_brackets && *from == '[') || !strncmp(from, "[]", 2) || !strncmp(from, "[^]", 3)) return from;
        if (*from == '[') in_brackets = 1;
        if (*from == ']') in_brackets = 0;
        if (escaped) *out++ = *from++;
        *out++ = *from++;
    }
    *out = 0;
    return NULL;
}

/* Compiles llama3_split, or the expression that line `number` of a tokenizer's file gives. */
static pcre2_code *split_open(const char *path, int number, const char *expression) {
    size_t length = strlen(expression), at;
    uint32_t matches_empty = 0;
    int error;
    if (length > EXPRESSION_LENGTH)
        user_error("tokenizer %s, line %d: found an expression of %zu characters, expected at most %d", path, number,
                   length, (int)EXPRESSION_LENGTH);
    char *pattern = new_array(char, (length / 2 + 1) * sizeof "[" LETTERS "]");
    const char *other = expression_translate(expression, pattern);
    if (other)
        user_error("tokenizer %s, line %d: found '%.8s' in the expression, expected \\p{L} \\p{N} \\s \\S \\r \\n \\t "
                   "or an escaped punctuation character, and inside brackets neither \\S nor brackets",
                   path, number, other);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED,
                                     &error, &at, NULL);
    if (!code && expression == llama3_split)
        run_failure("PCRE2 refuses an expression at character %zu (error %d); expected a build with Unicode: install "
                    "libpcre2-dev",
                    at, error);
    if (!code) {
        PCRE2_UCHAR why[128] = "";
        pcre2_get_error_message(error, why, sizeof why);
        user_error("tokenizer %s, line %d: found an expression that PCRE2 refuses (%s), expected a regular expression",
                   path, number, (const char *)why);
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // without a JIT, pcre2_match interprets the pattern
    pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
    if (matches_empty)
        user_error("tokenizer %s, line %d: found an expression that also matches the empty string, expected at least "
                   "one character in every match",
                   path, number);
    free(pattern);
    return code;
}

/* The end of the ASCII word at `at`, with the one character that may precede it; 0 if PCRE2 has to decide. */
static inline size_t split_ascii_word(const char *text, size_t len, size_t at) {
    char c = text[at];
    if ((uint8_t)c >= 0x80 || c == '\'' || c == '\r' || c == '\n' || is_ascii_digit(c)) return 0;
    size_t word = at + !is_ascii_letter(c), end = word;
    while (end < len && is_ascii_letter(text[end])) end++;
    return end > word && (end == len || (uint8_t)text[end] < 0x80) ? end : 0;
}

/* Splits one text at a time. */
typedef struct {
    const pcre2_code *split;
    int llama3; // the expression is llama3_split
    pcre2_match_data *match;
    pcre2_match_context *limits;
} Splitter;

/* For texts of at most `len` bytes. PCRE2 limits how often a match may be retried, to 10 million times by default. A
 * run of blanks is retried once for each of them, so the limit grows with the text. */
static Splitter splitter_open(const pcre2_code *split, int llama3, size_t len) {
    Splitter s = {split, llama3, pcre2_match_data_create(1, NULL), pcre2_match_context_create(NULL)};
    if (!s.match || !s.limits) run_failure("out of memory: cannot allocate PCRE2's match data");
    size_t retries = len < UINT32_MAX / 8 ? 10000000 + 4 * len : UINT32_MAX;
    pcre2_set_match_limit(s.limits, (uint32_t)retries);
    return s;
}

static void splitter_close(Splitter *s) {
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->limits);
}

/* The end of the piece that starts at byte `at` of `len` bytes of valid UTF-8. */
static inline size_t split_next(const Splitter *s, const char *text, size_t len, size_t at) {
    size_t word_end = s->llama3 ? split_ascii_word(text, len, at) : 0; // twice as fast on English as PCRE2 alone
    if (word_end) return word_end;
    int rc = pcre2_match(s->split, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, s->match, s->limits);
    if (rc <= 0 && rc != PCRE2_ERROR_NOMATCH) // the JIT's stack may be too small; the interpreter uses the heap
        rc = pcre2_match(s->split, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match, s->limits);
    if (rc <= 0 && s->llama3)
        run_failure("PCRE2 gave up (error %d) at byte %zu of a text of %zu bytes; expected a match at every character",
                    rc, at, len);
    size_t end = rc > 0 ? pcre2_get_ovector_pointer(s->match)[1] : at;
    if (end <= at)
        user_error("the expression in the tokenizer's file matches no piece at byte %zu of a text of %zu bytes (PCRE2: "
                   "%d), expected a match at every character: correct its `split` line",
                   at, len, rc);
    return end;
}

/* The number of leading bytes of `text` that are complete, valid UTF-8: PCRE2 checks this before it matches. */
static size_t text_valid_length(const pcre2_code *split, pcre2_match_data *match, const char *text, size_t len) {
    int rc = pcre2_match(split, (PCRE2_SPTR)text, len, 0, 0, match, NULL);
    int is_valid = rc > PCRE2_ERROR_UTF8_ERR1 || rc < PCRE2_ERROR_UTF8_ERR21;
    return is_valid ? len : pcre2_get_startchar(match);
}

// ---------------------------------------------------------------------------
// the token table

static inline uint32_t token_hash(const char *p, size_t n) {
    uint64_t h = hash_bytes(HASH_START, p, n);
    return (uint32_t)(h ^ h >> 32); // slots are chosen by the low bits, so fold the high ones in
}
static inline size_t token_length(const Tokenizer *t, int32_t id) { return (size_t)(t->start[id + 1] - t->start[id]); }

/* The slot that holds these bytes, or the empty slot where they belong. */
static inline TokenSlot *token_slot(const Tokenizer *t, const char *p, size_t n) {
    uint32_t hash = token_hash(p, n), i = hash & t->slot_mask;
    while (t->slots[i].id != NO_TOKEN) {
        const TokenSlot *s = &t->slots[i];
        if (s->hash == hash && token_length(t, s->id) == n && !memcmp(t->bytes + t->start[s->id], p, n)) break;
        i = (i + 1) & t->slot_mask;
    }
    return &t->slots[i];
}

/* The id of the base token with these bytes, or NO_TOKEN. */
static inline int32_t token_find(const Tokenizer *t, const char *p, size_t n) {
    return n > t->longest ? NO_TOKEN : token_slot(t, p, n)->id;
}

/* The id of a special token, or NO_TOKEN. */
static int32_t tokenizer_special(const Tokenizer *t, const char *name) {
    for (int i = 0; i < t->num_special; i++) {
        int32_t id = t->special[i];
        if (token_length(t, id) == strlen(name) && !memcmp(t->bytes + t->start[id], name, strlen(name))) return id;
    }
    return NO_TOKEN;
}

/* Appends the 256 special tokens of Llama 3.1, with the names and in the order of its release. */
static void tokenizer_add_special(Tokenizer *t) {
    static const char *const named[] = {"<|begin_of_text|>",
                                        "<|end_of_text|>",
                                        "<|reserved_special_token_0|>",
                                        "<|reserved_special_token_1|>",
                                        "<|finetune_right_pad_id|>",
                                        "<|reserved_special_token_2|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|eom_id|>",
                                        "<|eot_id|>",
                                        "<|python_tag|>"};
    const int num_named = (int)(sizeof named / sizeof named[0]);
    const int reserved = 3; // reserved tokens among those named above
    for (int i = 0; i < NUM_SPECIAL_TOKENS; i++) {
        uint64_t *start = t->start + t->n_base + i;
        const char *format = i < num_named ? named[i] : "<|reserved_special_token_%d|>";
        int n = snprintf(t->bytes + *start, SPECIAL_NAME_BYTES, format, i - num_named + reserved);
        start[1] = start[0] + (uint64_t)n;
        t->special[t->num_special++] = t->n_base + i;
    }
}

// ---------------------------------------------------------------------------
// reading a tokenizer's file

/* The end of every message about a file of another kind. */
#define TOKENIZER_EXPECTED                                                                                             \
    "expected Llama 3's tokenizer.model (original/tokenizer.model in Meta's releases, or made by "                     \
    "dev/data/train_tokenizer) or a file written by dev/data/smollm2.py"

static char *tokenizer_read_file(const char *path, size_t *len) {
    struct stat info;
    int fd = open_regular_file(path, &info);
    if (fd < 0) user_error("tokenizer %s cannot be opened: %s; " TOKENIZER_EXPECTED, path, strerror(errno));
    if (info.st_size > 1 << 28)
        user_error("tokenizer %s has %lld bytes; " TOKENIZER_EXPECTED ", a few million bytes", path,
                   (long long)info.st_size);
    char *text = read_to_end(fd, len);
    if (!text) user_error("tokenizer %s cannot be read: %s; copy the file again", path, strerror(errno));
    if (*len != (size_t)info.st_size)
        user_error("tokenizer %s: %zu of %lld bytes could be read; copy the file again", path, *len,
                   (long long)info.st_size);
    return text;
}

/* Decodes n characters of base64 (RFC 4648, with padding) to `out`. Returns the number of bytes, or 0 if it is not
 * base64. */
static size_t base64_decode(const char *p, size_t n, char *out) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (n == 0 || n % 4) return 0;
    size_t size = 0, padding = 0;
    while (padding < 2 && p[n - 1 - padding] == '=') padding++;
    uint32_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        const char *digit = i < n - padding ? (const char *)memchr(alphabet, p[i], 64) : alphabet;
        if (!digit) return 0;
        bits = bits << 6 | (uint32_t)(digit - alphabet);
        for (int shift = 16; i % 4 == 3 && shift >= 0; shift -= 8) out[size++] = (char)(bits >> shift);
    }
    return size - padding;
}

/* A file being read line by line. */
typedef struct {
    const char *path;
    char *at, *end; // the text that is left
    int number;     // of the last line read, from 1
} TokenizerLines;

/* The next line, ended by a NUL in place of its newline; NULL after the last. An empty file has one empty line. */
static char *tokenizer_line(TokenizerLines *in) {
    char *line = in->at;
    if (in->number && line > in->end) return NULL;
    char *end = (char *)memchr(line, '\n', in->end - line);
    if (!end) end = in->end;
    *end = 0;
    in->at = end + 1;
    in->number++;
    return line;
}

/* Copies the bytes of the token on `line` to `bytes`, and returns their number; 0 if the line is malformed.
 * A line is `base64 id` or, in the format with a header, also `special name id`; ids count up from 0. */
static size_t token_line_parse(const char *line, int32_t id, int may_be_special, int *special, char *bytes) {
    static const char mark[] = "special ";
    enum { MARK = (int)sizeof mark - 1 };
    char expected_end[16];
    int width = (int)strlen(line) - snprintf(expected_end, sizeof expected_end, " %d", id);
    *special = may_be_special && !strncmp(line, mark, MARK);
    if (width <= 0 || strcmp(line + width, expected_end)) return 0;
    if (!*special) return base64_decode(line, width, bytes);
    if (width <= MARK || memchr(line + MARK, ' ', width - MARK)) return 0;
    memcpy(bytes, line + MARK, width - MARK);
    return width - MARK;
}

static void tokenizer_read_token(Tokenizer *t, const TokenizerLines *in, const char *line, int32_t id) {
    char *bytes = t->bytes + t->start[id];
    int special;
    size_t n = token_line_parse(line, id, !t->llama3, &special, bytes);
    if (!n)
        user_error("tokenizer %s, line %d: found '%.80s', expected %s %d (they count up from 0) after a token's bytes "
                   "in base64 and one space%s; copy the file again",
                   in->path, in->number, line, t->llama3 ? "rank" : "id", id,
                   t->llama3 ? "" : ", or after the word special and a name without spaces");
    t->start[id + 1] = t->start[id] + n;
    if (special) {
        t->special[t->num_special++] = id;
        return;
    }
    t->n_base++;
    if (n > t->longest) t->longest = n;
    TokenSlot *slot = token_slot(t, bytes, n);
    if (slot->id != NO_TOKEN)
        user_error("tokenizer %s, line %d: found '%.80s', the token of line %d again, expected each token once; copy "
                   "the file again",
                   in->path, in->number, line, in->number - (id - slot->id));
    slot->hash = token_hash(bytes, n);
    slot->id = id;
}

/* The format with a header is for byte-level BPE tokenizers in which merging by the lowest id gives the same result as
 * their list of merges (dev/data/smollm2.py checks this). The header's lines each hold a word, a space and a value:
 *     byte-level-bpe  the version of the format, 1
 *     tokens          the number of token lines that follow
 *     missing         how many of the 256 bytes have no token; encoding skips them
 *     bos, eos, eot   special tokens that begin a document, end a document, end a conversation's turn; - for none
 *     split           the expression whose successive matches are the pieces of a text */
typedef enum {
    HEADER_VERSION,
    HEADER_TOKENS,
    HEADER_MISSING,
    HEADER_BOS,
    HEADER_EOS,
    HEADER_EOT,
    HEADER_SPLIT,
    NUM_HEADER_LINES
} TokenizerHeader;
static const char *const tokenizer_header_words[NUM_HEADER_LINES] = {
    "byte-level-bpe", "tokens", "missing", "bos", "eos", "eot", "split"};

static void tokenizer_read_header(TokenizerLines *in, const char *values[NUM_HEADER_LINES]) {
    for (int i = 0; i < NUM_HEADER_LINES; i++) {
        const char *line = tokenizer_line(in), *word = tokenizer_header_words[i];
        size_t n = strlen(word);
        if (!line || strncmp(line, word, n) || line[n] != ' ' || !line[n + 1])
            user_error(
                "tokenizer %s, line %d: found '%.80s', expected '%s', a space and its value; make the file again",
                in->path, i + 1, line ? line : "", word);
        values[i] = line + n + 1;
    }
    if (strcmp(values[HEADER_VERSION], "1"))
        user_error("tokenizer %s, line 1: found version '%.20s', expected 1; make the file again", in->path,
                   values[HEADER_VERSION]);
}

static int tokenizer_header_number(const char *path, TokenizerHeader which, const char *value) {
    char *end;
    long n = strtol(value, &end, 10);
    if (!is_ascii_digit(*value) || *end || n > 1 << 28)
        user_error("tokenizer %s, line %d: found '%s %.20s', expected a number; make the file again", path, which + 1,
                   tokenizer_header_words[which], value);
    return (int)n;
}

static int32_t tokenizer_header_special(const Tokenizer *t, const char *path, TokenizerHeader which,
                                        const char *value) {
    int32_t id = tokenizer_special(t, value);
    if (id == NO_TOKEN && (strcmp(value, "-") || which == HEADER_EOS))
        user_error("tokenizer %s, line %d: found '%s %.80s', expected the name of one of the file's special tokens; "
                   "make the file again",
                   path, which + 1, tokenizer_header_words[which], value);
    return id;
}

static void tokenizer_check_counts(const Tokenizer *t, const char *path, const char *const values[NUM_HEADER_LINES]) {
    int tokens = tokenizer_header_number(path, HEADER_TOKENS, values[HEADER_TOKENS]);
    int missing = tokenizer_header_number(path, HEADER_MISSING, values[HEADER_MISSING]);
    if (t->n_base + t->num_special != tokens)
        user_error("tokenizer %s has %d lines of tokens, its line %d says %d; copy the file again", path,
                   t->n_base + t->num_special, HEADER_TOKENS + 1, tokens);
    if (t->num_missing != missing)
        user_error("tokenizer %s has no token for %d single bytes, its line %d says %d; copy the file again", path,
                   t->num_missing, HEADER_MISSING + 1, missing);
}

/* Refuses files of other kinds by what they contain, before any line is parsed. Returns the number of lines. */
static size_t tokenizer_check_text(const char *path, const char *text, size_t len) {
    size_t lines = 1;
    if (!len) user_error("tokenizer %s has 0 bytes; " TOKENIZER_EXPECTED, path);
    if (text[0] == '{')
        user_error("tokenizer %s is JSON, perhaps Hugging Face's tokenizer.json; " TOKENIZER_EXPECTED, path);
    for (size_t i = 0; i < len; i++) {
        if (text[i] != '\n' && (text[i] < ' ' || text[i] > '~'))
            user_error("tokenizer %s, line %zu: found the byte 0x%02x (perhaps a SentencePiece model, or Windows line "
                       "ends); " TOKENIZER_EXPECTED,
                       path, lines, (uint8_t)text[i]);
        lines += text[i] == '\n';
    }
    return lines;
}

static void tokenizer_allocate(Tokenizer *t, size_t lines, size_t len) {
    size_t slots = 1;
    while (slots < 2 * lines) slots *= 2; // at most half full
    t->slot_mask = (uint32_t)(slots - 1);
    t->slots = new_array(TokenSlot, slots);
    for (size_t i = 0; i < slots; i++) t->slots[i].id = NO_TOKEN;
    t->start = new_array(uint64_t, lines + NUM_SPECIAL_TOKENS + 1);
    t->special = new_array(int32_t, lines + NUM_SPECIAL_TOKENS);
    t->bytes = new_array(char, len + NUM_SPECIAL_TOKENS * SPECIAL_NAME_BYTES);
}

static void tokenizer_find_missing_bytes(Tokenizer *t, const char *path) {
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        t->missing[i] = token_find(t, &byte, 1) == NO_TOKEN;
        t->num_missing += t->missing[i];
        if (t->llama3 && t->missing[i])
            user_error(
                "tokenizer %s has no token for the single byte 0x%02x, expected all 256 bytes; copy the file again",
                path, i);
    }
}

/* `text` (len, and a NUL): the contents of the file `path`, which errors name; frees it. */
static Tokenizer *tokenizer_from_text(const char *path, char *text, size_t len) {
    Tokenizer *t = new_array(Tokenizer, 1);
    const char *header[NUM_HEADER_LINES]; // of Llama 3's format, which has none: what it would say
    header[HEADER_BOS] = "<|begin_of_text|>";
    header[HEADER_EOS] = "<|end_of_text|>";
    header[HEADER_EOT] = "<|eot_id|>";
    header[HEADER_SPLIT] = llama3_split;
    sha256(text, len, t->fingerprint);
    size_t text_len = len;
    while (text_len > 1 && text[text_len - 1] == '\n') text_len--; // the last line may lack its newline
    size_t lines = tokenizer_check_text(path, text, text_len);
    tokenizer_allocate(t, lines, len);
    TokenizerLines in = {path, text, text + text_len, 0};
    t->llama3 = strncmp(text, tokenizer_header_words[0], strlen(tokenizer_header_words[0])) != 0;
    if (!t->llama3) tokenizer_read_header(&in, header);
    int32_t id = 0;
    for (const char *line = tokenizer_line(&in); line; line = tokenizer_line(&in))
        tokenizer_read_token(t, &in, line, id++);
    tokenizer_find_missing_bytes(t, path);
    if (t->llama3) tokenizer_add_special(t);
    else tokenizer_check_counts(t, path, header);
    t->bos = tokenizer_header_special(t, path, HEADER_BOS, header[HEADER_BOS]);
    t->eos = tokenizer_header_special(t, path, HEADER_EOS, header[HEADER_EOS]);
    t->eot = tokenizer_header_special(t, path, HEADER_EOT, header[HEADER_EOT]);
    t->split = split_open(path, HEADER_SPLIT + 1, header[HEADER_SPLIT]);
    t->vocab_size = t->n_base + t->num_special;
    free(text);
    return t;
}

static Tokenizer *tokenizer_open(const char *path) {
    size_t len;
    char *text = tokenizer_read_file(path, &len);
    return tokenizer_from_text(path, text, len);
}

static void tokenizer_close(Tokenizer *t) {
    pcre2_code_free(t->split);
    free(t->slots);
    free(t->start);
    free(t->special);
    free(t->bytes);
    free(t);
}

/* Whether generation stops after this token. */
static int tokenizer_ends(const Tokenizer *t, int32_t id) { return id == t->eos || id == t->eot; }

/* Points *bytes at the token's bytes inside the tokenizer (not NUL-terminated) and returns their number. A special
 * token gives its name. An id outside 0 .. vocab_size - 1 gives 0, which no token has. */
static size_t tokenizer_decode(const Tokenizer *t, int32_t id, const char **bytes) {
    *bytes = NULL;
    if (id < 0 || id >= t->vocab_size) return 0;
    *bytes = t->bytes + t->start[id];
    return token_length(t, id);
}

static void print_token(const Tokenizer *t, int32_t id, FILE *f) {
    const char *text;
    size_t length = tokenizer_decode(t, id, &text);
    fwrite(text, 1, length, f);
}

// ---------------------------------------------------------------------------
// encoding: each piece is merged by byte-pair encoding

/* A run of bytes of the piece that is one token so far. Parts are stored at the index of their first byte. */
typedef struct {
    uint32_t next, prev; // first bytes of the neighbouring parts
    int32_t rank;        // id of the token that this part and the next would form, or NO_TOKEN
} TokenPart;

typedef struct {
    const Tokenizer *t;
    int32_t **ids; // the result, grown with realloc
    size_t *capacity, used;
    size_t max_piece; // bytes of the longest piece that the arrays below can hold
    char *kept;       // (max_piece) the piece without the bytes that have no token
    TokenPart *parts; // (max_piece + 1)
    uint64_t *heap;   // (3 max_piece) rank << 32 | first byte, the smallest on top; an entry is stale if the part at
                      // this byte has another rank by now
    size_t heap_size;
} Encoder;

static void *grown(void *p, size_t bytes) {
    p = realloc(p, bytes);
    if (!p) run_failure("out of memory: cannot allocate %zu bytes for tokens", bytes);
    return p;
}
static inline void encoder_emit(Encoder *e, int32_t id) {
    if (e->used >= *e->capacity) {
        *e->capacity = e->used + e->used / 2 + 1024;
        *e->ids = (int32_t *)grown(*e->ids, *e->capacity * sizeof **e->ids);
    }
    (*e->ids)[e->used++] = id;
}

static inline void heap_push(Encoder *e, uint64_t key) {
    size_t i = e->heap_size++;
    while (i && e->heap[(i - 1) / 2] > key) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = key;
}
static inline uint64_t heap_pop(Encoder *e) {
    uint64_t top = e->heap[0], last = e->heap[--e->heap_size];
    size_t i = 0;
    for (size_t child = 1; child < e->heap_size; child = 2 * i + 1) {
        if (child + 1 < e->heap_size && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return top;
}

/* Looks up which token the part at byte i and its neighbour would form, and adds the merge to the heap. */
static inline void encoder_consider(Encoder *e, const char *piece, size_t n, uint32_t i) {
    TokenPart *part = &e->parts[i];
    part->rank = part->next >= n ? NO_TOKEN : token_find(e->t, piece + i, e->parts[part->next].next - i);
    if (part->rank != NO_TOKEN) heap_push(e, (uint64_t)part->rank << 32 | i);
}

static inline void encoder_reserve(Encoder *e, size_t n) {
    if (n >= UINT32_MAX)
        user_error("a piece of %zu bytes without a place to split was given, expected less than 4 GiB; cut the text "
                   "into documents",
                   n);
    if (n <= e->max_piece) return;
    e->max_piece = n < 256 ? 256 : n;
    e->parts = (TokenPart *)grown(e->parts, (e->max_piece + 1) * sizeof *e->parts);
    e->heap = (uint64_t *)grown(e->heap, 3 * e->max_piece * sizeof *e->heap);
    e->kept = (char *)grown(e->kept, e->max_piece);
}

/* Removes the bytes that have no token. As in transformers, the bytes around them become neighbours and may merge. */
static inline const char *encoder_skip_missing(Encoder *e, const char *piece, size_t *n) {
    size_t known = 0, kept = 0;
    while (known < *n && !e->t->missing[(uint8_t)piece[known]]) known++;
    if (known == *n) return piece;
    encoder_reserve(e, *n);
    for (size_t i = 0; i < *n; i++)
        if (!e->t->missing[(uint8_t)piece[i]]) e->kept[kept++] = piece[i];
    *n = kept;
    return e->kept;
}

/* Byte-pair encoding of one piece: starts from single bytes and merges the adjacent pair with the lowest rank, the
 * leftmost of equals, until no pair forms a token. A merge adds at most two pairs, so 3n heap entries suffice. */
static inline void encode_piece(Encoder *e, const char *piece, size_t n) {
    if (e->t->num_missing) piece = encoder_skip_missing(e, piece, &n);
    int32_t whole = token_find(e->t, piece, n);
    if (whole != NO_TOKEN) {
        encoder_emit(e, whole);
        return;
    }
    encoder_reserve(e, n);
    TokenPart *parts = e->parts;
    e->heap_size = 0;
    for (uint32_t i = 0; i <= n; i++) {
        parts[i].next = i + 1;
        parts[i].prev = i - 1;
    }
    for (uint32_t i = 0; i < n; i++) encoder_consider(e, piece, n, i);
    while (e->heap_size) {
        uint64_t key = heap_pop(e);
        uint32_t i = (uint32_t)key, merged = parts[i].next;
        if (parts[i].rank != (int32_t)(key >> 32)) continue; // a stale entry
        parts[merged].rank = NO_TOKEN;                       // this part no longer exists
        parts[i].next = parts[merged].next;
        parts[parts[i].next].prev = i;
        encoder_consider(e, piece, n, i);
        if (i) encoder_consider(e, piece, n, parts[i].prev);
    }
    for (uint32_t i = 0; i < n; i = parts[i].next) encoder_emit(e, token_find(e->t, piece + i, parts[i].next - i));
}

static inline int token_is_space(const Tokenizer *t, int32_t id) {
    for (uint64_t i = t->start[id]; i < t->start[id + 1]; i++)
        if (!memchr(" \n\t", t->bytes[i], 3)) return 0;
    return 1;
}

/* Encodes the text from its first byte that is not UTF-8, at `valid`: the expression cannot split it, so it is one
 * piece. In Llama 3's format this piece begins earlier, as in tiktoken's _encode_bytes: with the last piece before it,
 * and with all white-space tokens before that if it starts with one. `first_id` and `last_piece_id` index *e->ids. */
static void encode_rest(Encoder *e, const char *text, size_t len, size_t valid, size_t first_id, size_t last_piece_id) {
    const Tokenizer *t = e->t;
    size_t keep = last_piece_id, at = valid;
    if (!t->llama3) {
        encode_piece(e, text + at, len - at);
        return;
    }
    if (keep < e->used && token_is_space(t, (*e->ids)[keep]))
        while (keep > first_id && token_is_space(t, (*e->ids)[keep - 1])) keep--;
    for (size_t i = keep; i < e->used; i++) at -= token_length(t, (*e->ids)[i]);
    e->used = keep;
    encode_piece(e, text + at, len - at);
}

/* Appends the ids of `text` (any bytes; names of special tokens in it are plain text) after the `used` ids that *ids
 * already holds, growing it with realloc; *ids may be NULL at first. Returns the new count. */
static size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t len, int32_t **ids, size_t *capacity,
                               size_t used) {
    Encoder e = {t, ids, capacity, used, 0, NULL, NULL, NULL, 0};
    Splitter splitter = splitter_open(t->split, t->llama3, len);
    size_t valid = text_valid_length(t->split, splitter.match, text, len), last_piece_id = used;
    for (size_t at = 0, end; at < valid; at = end) {
        end = split_next(&splitter, text, valid, at);
        last_piece_id = e.used;
        encode_piece(&e, text + at, end - at);
    }
    if (valid < len) encode_rest(&e, text, len, valid, used, last_piece_id);
    splitter_close(&splitter);
    free(e.kept);
    free(e.parts);
    free(e.heap);
    return e.used;
}

#endif
