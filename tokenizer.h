/* tokenizer.h: text to token ids and back.
 *
 * Owns: the reading of Llama 3's `tokenizer.model` (a line a token: base64 of its bytes, a blank, its rank) and of
 * files of other byte-level BPE tokenizers (below), the splitting of text by a regular expression (through PCRE2),
 * byte-pair merging, special tokens, and SHA-256, by which token files name their tokenizer.
 * A caller may rely on: ids equal to tiktoken's, or transformers'; any bytes come back from their ids as they were,
 * but those for which a file of the other kind says to have no token; time n log n in the longest piece; an open
 * Tokenizer is never written to, so any number of threads may use one.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include "lib/device.h" // defines: hash_bytes, user_error, run_failure, checked_malloc, min_i64
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h> // defines: pcre2_compile, pcre2_jit_compile, pcre2_match
#include <sys/stat.h>

enum { NUM_SPECIAL_TOKENS = 256, SPECIAL_ROOM = 40 /* bytes of a name, at most */, NO_TOKEN = -1 };

typedef struct {
    uint32_t hash;
    int32_t id;
} TokenSlot; // id NO_TOKEN: an empty slot

typedef struct Tokenizer {
    int32_t n_base;          // tokens with bytes of their own, of which that with the lowest id merges first
    int32_t num_special;     // tokens that no text has: Llama 3's come behind the base ones
    int32_t vocab_size;      // n_base + num_special
    int32_t bos, eos, eot;   // a document begins, ends; a turn in a conversation ends, NO_TOKEN: never
    int llama3;              // it is of Llama 3's kind
    uint8_t fingerprint[32]; // SHA-256 of the file
    uint8_t missing[256];    // the bytes that no token has
    int num_missing;
    int32_t *special; // (num_special) their ids, rising
    char *bytes;      // all tokens' bytes, one after the other; a special one's are its name
    uint64_t *start;  // (vocab_size + 1): token i is bytes[start[i] .. start[i + 1])
    size_t longest;   // bytes of the longest base token: no longer string need be looked up
    TokenSlot *slots; // (slot_mask + 1) open addressing, base tokens by their bytes
    uint32_t slot_mask;
    pcre2_code *split; // the regular expression
} Tokenizer;

// ---------------------------------------------------------------------------
// reading a file, and its SHA-256 (FIPS 180-4)

/* What every message about a file of another kind ends with. */
#define TOKENIZER_WANTED                                                                                               \
    "expected Llama 3's tokenizer.model (in Meta's releases original/tokenizer.model; of your own from "               \
    "dev/data/train_tokenizer)"                                                                                        \
    " or what dev/data/smollm2.py writes"
enum { SHA256_ROOM = 72 }; // bytes behind a text that sha256 may write to

/* The whole file, with SHA256_ROOM behind it. */
static inline char *tokenizer_read_file(const char *path, size_t *len) {
    struct stat info;
    FILE *f = fopen(path, "rb");
    if (!f) user_error("tokenizer %s cannot be opened: %s; " TOKENIZER_WANTED, path, strerror(errno));
    if (fstat(fileno(f), &info) || !S_ISREG(info.st_mode))
        user_error("tokenizer %s is not a file; " TOKENIZER_WANTED, path);
    if (info.st_size > 1 << 28)
        user_error("tokenizer %s has %lld bytes; " TOKENIZER_WANTED ", a few million bytes", path,
                   (long long)info.st_size);
    char *text = (char *)checked_malloc((size_t)info.st_size + SHA256_ROOM);
    *len = fread(text, 1, (size_t)info.st_size, f);
    if (*len != (size_t)info.st_size)
        user_error("tokenizer %s: %zu of %lld bytes could be read; copy the file again", path, *len,
                   (long long)info.st_size);
    fclose(f);
    return text;
}

static inline uint32_t sha256_rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }
static inline void sha256_block(uint32_t h[8], const uint8_t p[64]) {
    static const uint32_t k[64] = {
        // section 4.2.2: fractions of the cube roots of the first 64 primes
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8]; // the message schedule; a..h of section 6.2.2
    memcpy(v, h, sizeof v);
    for (int t = 0; t < 64; t++) {
        if (t < 16)
            w[t] = (uint32_t)p[4 * t] << 24 | (uint32_t)p[4 * t + 1] << 16 | (uint32_t)p[4 * t + 2] << 8 | p[4 * t + 3];
        else
            w[t] = w[t - 16] + w[t - 7] +
                   (sha256_rotate(w[t - 15], 7) ^ sha256_rotate(w[t - 15], 18) ^ w[t - 15] >> 3) +
                   (sha256_rotate(w[t - 2], 17) ^ sha256_rotate(w[t - 2], 19) ^ w[t - 2] >> 10);
        uint32_t sum1 = sha256_rotate(v[4], 6) ^ sha256_rotate(v[4], 11) ^ sha256_rotate(v[4], 25);
        uint32_t sum0 = sha256_rotate(v[0], 2) ^ sha256_rotate(v[0], 13) ^ sha256_rotate(v[0], 22);
        uint32_t t1 = v[7] + sum1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[t] + w[t];
        uint32_t t2 = sum0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1, v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

/* Of text and, written behind it, a one bit, zeros to a whole block, and the length in bits in 8 bytes (section 5.1.1).
 */
static inline void sha256(char *text, size_t len, uint8_t out[32]) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t end = (len + 8) / 64 * 64 + 64; // from len + 9 to len + SHA256_ROOM
    memset(text + len, 0, end - len);
    text[len] = (char)0x80;
    for (int i = 0; i < 8; i++) text[end - 8 + i] = (char)((uint64_t)len * 8 >> (56 - 8 * i));
    for (size_t at = 0; at < end; at += 64) sha256_block(h, (const uint8_t *)text + at);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}
static inline void sha256_of_file(const char *path, uint8_t out[32]) {
    size_t len;
    char *text = tokenizer_read_file(path, &len);
    sha256(text, len, out);
    free(text);
}

// ---------------------------------------------------------------------------
// splitting text into the pieces within which tokens merge

/* The classes as Rust's regex crate has them, which tiktoken uses. \s is the Unicode property White_Space: PCRE2's
 * own \s takes U+180E too (a blank until Unicode 6.3). \p{L} and \p{N} are those of Unicode 16: PCRE2 before 10.45
 * knows fewer, so the letters and numbers assigned since Unicode 14 are listed. */
#define BLANK                                                                                                          \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define LETTER                                                                                                         \
    "\\p{L}"                                                                                                           \
    "\\x{1c89}\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d65}\\x{10d6f}-"    \
    "\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}\\x{11240}"                                                              \
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}\\x{11bc0}-\\x{"      \
    "11be0}\\x{11f02}\\x{11f04}-\\x{11f10}"                                                                            \
    "\\x{11f12}-\\x{11f33}\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}\\x{16d40}-\\x{"    \
    "16d6c}\\x{18cff}\\x{1b132}\\x{1b155}"                                                                             \
    "\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{"     \
    "2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBER                                                                                                         \
    "\\p{N}"                                                                                                           \
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}\\x{16130}-\\x{16139}\\x{"    \
    "16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}"                                                                           \
    "\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"

static inline pcre2_code *expression_compile(const char *pattern, uint32_t options, int *error, size_t *at) {
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | options, error, at, NULL);
    if (code) pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where there is no JIT, pcre2_match interprets
    return code;
}
static inline pcre2_code *expression_open(const char *pattern, uint32_t options) {
    int error;
    size_t at;
    pcre2_code *code = expression_compile(pattern, options, &error, &at);
    if (!code)
        run_failure("PCRE2 refuses an expression at character %zu (error %d); expected a build with Unicode: install "
                    "libpcre2-dev",
                    at, error);
    return code;
}

/* Llama 3's expression (llama-models, models/llama3/tokenizer.py) alternative by alternative. Where what follows
 * cannot match what a repetition gave back, the repetition is possessive: the same pieces without the retries. */
static inline pcre2_code *split_open(void) {
    return expression_open("(?i:'s|'t|'re|'ve|'m|'ll|'d)" // an English ending
                           "|(?:\\x{20}|[^\\r\\n" LETTER NUMBER "])?+[" LETTER
                           "]++" // a word, with one character before it: mostly a blank, so that is tried first
                           "|[" NUMBER "]{1,3}+" // up to three digits
                           "|\\x{20}?+[^" BLANK LETTER NUMBER
                           "]++[\\r\\n]*+"                 // punctuation, with the line ends after it
                           "|[" BLANK "]*[\\r\\n]+"        // blank lines
                           "|[" BLANK "]+(?![^" BLANK "])" // blanks, but for the one that goes with the next word
                           "|[" BLANK "]+",
                           PCRE2_ANCHORED);
}

static inline int is_ascii_letter(char c) { return (uint8_t)((c | 32) - 'a') < 26; }

enum { EXPRESSION_ROOM = 1000 /* characters of a file's expression, at most */ };

/* A file's expression with the classes above, into `out` (EXPRESSION_ROOM / 2 * sizeof LETTER will do). Only what every
 * engine reads alike is taken: returns where something else stands, or NULL. */
static inline const char *expression_translate(const char *from, char *out) {
    enum { CLASSES = 4 };
    static const struct {
        const char *escape, *alone, *in_brackets;
    } classes[CLASSES] = {{"\\p{L}", "[" LETTER "]", LETTER},
                          {"\\p{N}", "[" NUMBER "]", NUMBER},
                          {"\\s", "[" BLANK "]", BLANK},
                          {"\\S", "[^" BLANK "]", NULL}};
    for (int in_brackets = 0; *from;) {
        int i = 0, escape = *from == '\\';
        while (i < CLASSES && strncmp(from, classes[i].escape, strlen(classes[i].escape))) i++;
        if (i < CLASSES) {
            const char *to = in_brackets ? classes[i].in_brackets : classes[i].alone;
            if (!to) return from;
            out = stpcpy(out, to), from += strlen(classes[i].escape);
            continue;
        }
        if (escape &&
            (!from[1] || (!strchr("rnt", from[1]) && (is_ascii_letter(from[1]) || (from[1] >= '0' && from[1] <= '9')))))
            return from;
        if ((in_brackets && *from == '[') || !strncmp(from, "[]", 2) || !strncmp(from, "[^]", 3)) return from;
        if (*from == '[' || (in_brackets && *from == ']')) in_brackets = *from == '[';
        if (escape) *out++ = *from++;
        *out++ = *from++;
    }
    *out = 0;
    return NULL;
}

/* The expression that line `number` of a tokenizer's file gives. */
static inline pcre2_code *split_open_own(const char *path, int number, const char *expression) {
    size_t length = strlen(expression), at;
    uint32_t empty = 0;
    int error;
    if (length > EXPRESSION_ROOM)
        user_error("tokenizer %s, line %d: found an expression of %zu characters, expected at most %d", path, number,
                   length, (int)EXPRESSION_ROOM);
    char *pattern = (char *)checked_malloc((length / 2 + 1) * sizeof "[" LETTER "]");
    const char *other = expression_translate(expression, pattern);
    if (other)
        user_error("tokenizer %s, line %d: found '%.8s' in the expression, expected \\p{L} \\p{N} \\s \\S \\r \\n \\t "
                   "or a sign behind a backslash, and in brackets neither \\S nor brackets",
                   path, number, other);
    pcre2_code *code = expression_compile(pattern, PCRE2_ANCHORED, &error, &at);
    if (!code) {
        PCRE2_UCHAR why[128] = "";
        pcre2_get_error_message(error, why, sizeof why);
        user_error("tokenizer %s, line %d: found an expression that PCRE2 refuses (%s), expected a regular one", path,
                   number, (const char *)why);
    }
    pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty)
        user_error("tokenizer %s, line %d: found an expression that also matches nothing, expected a character at "
                   "least in every match",
                   path, number);
    free(pattern);
    return code;
}

/* How many leading bytes of text are whole, valid UTF-8 (the table of RFC 3629, section 4: neither overlong forms nor
 * surrogates). */
static inline size_t utf8_valid_length(const char *text, size_t len) {
    const uint8_t *p = (const uint8_t *)text;
    size_t i = 0;
    for (size_t n; i < len; i += n) {
        for (uint64_t eight; p[i] < 0x80 && len - i > 8 && (memcpy(&eight, p + i, 8), !(eight & 0x8080808080808080u));)
            i += 8; // ASCII, the most of most texts
        uint8_t c = p[i],
                low = c == 0xE0   ? 0xA0
                      : c == 0xF0 ? 0x90
                                  : 0x80,
                high = c == 0xED   ? 0x9F
                       : c == 0xF4 ? 0x8F
                                   : 0xBF; // of the second byte
        n = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
        if (n == 0 || n > len - i || (n > 1 && (p[i + 1] < low || p[i + 1] > high))) break;
        if ((n > 2 && p[i + 2] >> 6 != 2) || (n > 3 && p[i + 3] >> 6 != 2)) break;
    }
    return i;
}

/* The end of the piece that starts at `at` in `len` bytes of valid UTF-8. Every character starts a piece of some kind.
 */
static inline size_t split_next(const pcre2_code *split, int llama3, pcre2_match_data *match, const char *text,
                                size_t len, size_t at) {
    uint8_t c = (uint8_t)text[at];
    if (llama3 && c < 0x80 && c != '\'' && c != '\r' && c != '\n' &&
        (c < '0' || c > '9')) { // an ASCII word needs no PCRE2: twice the speed on English
        size_t word = at + !is_ascii_letter(text[at]), end = word;
        while (end < len && is_ascii_letter(text[end])) end++;
        if (end > word && (end == len || (uint8_t)text[end] < 0x80)) return end;
    }
    int rc = pcre2_match(split, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, match, NULL);
    if (rc <= 0 &&
        rc != PCRE2_ERROR_NOMATCH) // the JIT's stack is small: the interpreter takes its memory from the heap
        rc = pcre2_match(split, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, NULL);
    if (rc <= 0 && llama3)
        run_failure("PCRE2 gave up (error %d) at byte %zu of a text of %zu bytes; expected a match at every character",
                    rc, at, len);
    size_t end = rc > 0 ? pcre2_get_ovector_pointer(match)[1] : at;
    if (end <= at)
        user_error("the expression in the tokenizer's file gives no piece at byte %zu of a text of %zu bytes (PCRE2: "
                   "%d), expected one at every character; mend it",
                   at, len, rc);
    return end;
}

// ---------------------------------------------------------------------------
// opening a tokenizer.model

static inline uint32_t token_hash(const char *p, size_t n) { // the fold brings the upper bits into the slot number
    uint64_t h = hash_bytes(HASH_START, p, n);
    return (uint32_t)(h ^ h >> 32);
}
static inline size_t token_length(const Tokenizer *t, int32_t id) { return (size_t)(t->start[id + 1] - t->start[id]); }

/* The slot that holds these bytes, or the empty one where they would go. */
static inline TokenSlot *token_slot(const Tokenizer *t, const char *p, size_t n) {
    uint32_t hash = token_hash(p, n);
    TokenSlot *s = &t->slots[hash & t->slot_mask];
    while (s->id != NO_TOKEN &&
           (s->hash != hash || token_length(t, s->id) != n || memcmp(t->bytes + t->start[s->id], p, n)))
        s = &t->slots[(s - t->slots + 1) & t->slot_mask];
    return s;
}

/* The id of the base token with these bytes, or NO_TOKEN. */
static inline int32_t token_find(const Tokenizer *t, const char *p, size_t n) {
    return n > t->longest ? NO_TOKEN : token_slot(t, p, n)->id;
}

/* Decodes n characters of base64 (RFC 4648, padded) into out; the number of bytes, or 0 where it is none. */
static inline size_t base64_decode(const char *p, size_t n, char *out) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t size = 0, padding = n < 4 || p[n - 1] != '=' ? 0 : p[n - 2] != '=' ? 1 : 2;
    uint32_t bits = 0;
    if (n % 4) return 0;
    for (size_t i = 0; i < n; i++) {
        const char *digit = i < n - padding ? (const char *)memchr(alphabet, p[i], 64) : alphabet;
        if (!digit) return 0;
        bits = bits << 6 | (uint32_t)(digit - alphabet);
        for (int j = 16; i % 4 == 3 && j >= 0; j -= 8) out[size++] = (char)(bits >> j);
    }
    return size - padding;
}

typedef struct {
    const char *path;
    char *at, *end;
    int number;
} TokenizerLines; // what is left; the number of the line before

/* The next line, ended by a zero where its end was; NULL behind the last. An empty file has one empty line. */
static inline char *tokenizer_line(TokenizerLines *in) {
    char *line = in->at;
    if (in->number && line > in->end) return NULL;
    char *end = (char *)memchr(line, '\n', (size_t)(in->end - line));
    if (!end) end = in->end;
    *end = 0, in->at = end + 1, in->number++;
    return line;
}

/* A token's line, `base64 SP rank`, or in a file of the other kind also `special SP name SP id`. Ids count up from 0.
 */
static inline void tokenizer_read_token(Tokenizer *t, const TokenizerLines *in, const char *line, int32_t id) {
    static const char mark[] = "special ";
    enum { MARK = (int)sizeof mark - 1 };
    char tail[16], *bytes = t->bytes + t->start[id];
    const char *what = t->llama3 ? "rank" : "id";
    int len = (int)strlen(line), shown = len < 80 ? len : 80, width = len - snprintf(tail, sizeof tail, " %d", id),
        special = !t->llama3 && !strncmp(line, mark, MARK);
    size_t n = 0;
    if (width > 0 && !strcmp(line + width, tail)) {
        if (!special) n = base64_decode(line, (size_t)width, bytes);
        else if (width > MARK && !memchr(line + MARK, ' ', (size_t)(width - MARK)))
            memcpy(bytes, line + MARK, n = (size_t)(width - MARK));
    }
    if (!n)
        user_error("tokenizer %s, line %d: found '%.*s', expected %s %d (they count up from 0) behind a token's bytes "
                   "in base64 and one blank%s; copy the file again",
                   in->path, in->number, shown, line, what, id,
                   t->llama3 ? "" : ", or behind the word special and a name without blanks");
    t->start[id + 1] = t->start[id] + n;
    if (special) {
        t->special[t->num_special++] = id;
        return;
    }
    t->n_base++;
    if (n > t->longest) t->longest = n;
    TokenSlot *slot = token_slot(t, bytes, n);
    if (slot->id != NO_TOKEN)
        user_error(
            "tokenizer %s, line %d: found '%.*s', the token of line %d again, expected each once; copy the file again",
            in->path, in->number, shown, line, in->number - (id - slot->id));
    slot->hash = token_hash(bytes, n), slot->id = id;
}

/* The 256 special tokens behind the base ones, by the names and in the places of Llama 3.1's release. */
static inline void tokenizer_add_special(Tokenizer *t) {
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
    const int num_named = (int)(sizeof named / sizeof named[0]),
              reserved = 3; // the first reserved ones are named above
    for (int i = 0; i < NUM_SPECIAL_TOKENS; i++) {
        uint64_t *start = t->start + t->n_base + i;
        const char *format = i < num_named ? named[i] : "<|reserved_special_token_%d|>";
        start[1] = start[0] + (uint64_t)snprintf(t->bytes + *start, SPECIAL_ROOM, format, i - num_named + reserved);
        t->special[t->num_special++] = t->n_base + i;
    }
}

/* The id of a special token, or NO_TOKEN. */
static inline int32_t tokenizer_special(const Tokenizer *t, const char *name) {
    for (int i = 0; i < t->num_special; i++) {
        int32_t id = t->special[i];
        if (token_length(t, id) == strlen(name) && !memcmp(t->bytes + t->start[id], name, strlen(name))) return id;
    }
    return NO_TOKEN;
}

/* A file of the other kind, for tokenizers of byte-level BPE in which merging by the lowest id gives what their list of
 * merges gives (dev/data/smollm2.py says when). It starts with these lines, each a word, a blank, and
 *     byte-level-bpe  1, the version
 *     tokens          how many lines of tokens follow
 *     missing         how many of the 256 bytes no token has: text is encoded as if they were not in it
 *     bos, eos, eot   the name of the special token with which a document begins, a document ends, a turn in a
 * conversation ends; - where there is none split           the expression whose matches, one behind the other, are the
 * pieces of a text */
typedef enum {
    HEAD_VERSION,
    HEAD_TOKENS,
    HEAD_MISSING,
    HEAD_BOS,
    HEAD_EOS,
    HEAD_EOT,
    HEAD_SPLIT,
    NUM_HEAD
} TokenizerHead;
static const char *const tokenizer_head[NUM_HEAD] = {"byte-level-bpe", "tokens", "missing", "bos", "eos", "eot",
                                                     "split"};

static inline int tokenizer_is_own(const char *text) {
    return !strncmp(text, tokenizer_head[0], strlen(tokenizer_head[0]));
}

/* The values of the first lines. */
static inline void tokenizer_read_head(TokenizerLines *in, const char *values[NUM_HEAD]) {
    for (int i = 0; i < NUM_HEAD; i++) {
        const char *line = tokenizer_line(in), *word = tokenizer_head[i];
        size_t n = strlen(word);
        if (!line || strncmp(line, word, n) || line[n] != ' ' || !line[n + 1])
            user_error(
                "tokenizer %s, line %d: found '%.80s', expected '%s', a blank and its value; make the file again",
                in->path, i + 1, line ? line : "", word);
        values[i] = line + n + 1;
    }
    if (strcmp(values[HEAD_VERSION], "1"))
        user_error("tokenizer %s, line 1: found version '%.20s', expected 1; make the file again", in->path,
                   values[HEAD_VERSION]);
}

static inline int tokenizer_head_number(const char *path, TokenizerHead which, const char *value) {
    char *end;
    long n = strtol(value, &end, 10);
    if (*value < '0' || *value > '9' || *end || n > 1 << 28)
        user_error("tokenizer %s, line %d: found '%s %.20s', expected a number", path, which + 1, tokenizer_head[which],
                   value);
    return (int)n;
}

static inline int32_t tokenizer_head_special(const Tokenizer *t, const char *path, TokenizerHead which,
                                             const char *value) {
    int32_t id = tokenizer_special(t, value);
    if (id == NO_TOKEN && (strcmp(value, "-") || which == HEAD_EOS))
        user_error("tokenizer %s, line %d: found '%s %.80s', expected the name of a special token among those below; "
                   "make the file again",
                   path, which + 1, tokenizer_head[which], value);
    return id;
}

/* What the first lines say, once all tokens are known. */
static inline void tokenizer_take_head(Tokenizer *t, const char *path, const char *const values[NUM_HEAD]) {
    int tokens = tokenizer_head_number(path, HEAD_TOKENS, values[HEAD_TOKENS]),
        missing = tokenizer_head_number(path, HEAD_MISSING, values[HEAD_MISSING]);
    if (t->n_base + t->num_special != tokens)
        user_error("tokenizer %s has %d lines of tokens, its line %d says %d; copy the file again", path,
                   t->n_base + t->num_special, HEAD_TOKENS + 1, tokens);
    if (t->num_missing != missing)
        user_error("tokenizer %s has no token for %d single bytes, its line %d says %d; copy the file again", path,
                   t->num_missing, HEAD_MISSING + 1, missing);
    t->bos = tokenizer_head_special(t, path, HEAD_BOS, values[HEAD_BOS]);
    t->eos = tokenizer_head_special(t, path, HEAD_EOS, values[HEAD_EOS]);
    t->eot = tokenizer_head_special(t, path, HEAD_EOT, values[HEAD_EOT]);
    t->split = split_open_own(path, HEAD_SPLIT + 1, values[HEAD_SPLIT]);
}

static inline Tokenizer *tokenizer_open(const char *path) {
    Tokenizer *t = (Tokenizer *)checked_malloc(sizeof *t);
    size_t len, lines = 1, slots = 1;
    char *text = tokenizer_read_file(path, &len), *line;
    const char *head[NUM_HEAD];
    sha256(text, len, t->fingerprint);
    if (!len) user_error("tokenizer %s has 0 bytes; " TOKENIZER_WANTED, path);
    if (text[0] == '{')
        user_error("tokenizer %s is JSON, perhaps Hugging Face's tokenizer.json; " TOKENIZER_WANTED, path);
    while (len && text[len - 1] == '\n') len--;
    for (size_t i = 0; i < len; lines += text[i++] == '\n')
        if (text[i] != '\n' && (text[i] < ' ' || text[i] > '~')) // before single lines are looked at
            user_error("tokenizer %s, line %zu: found the byte 0x%02x (SentencePiece? line ends of "
                       "Windows?); " TOKENIZER_WANTED,
                       path, lines, (uint8_t)text[i]);
    while (slots < 2 * lines) slots *= 2; // at most half full
    t->slot_mask = (uint32_t)(slots - 1);
    t->slots = (TokenSlot *)checked_malloc(slots * sizeof *t->slots);
    for (size_t i = 0; i < slots; i++) t->slots[i].id = NO_TOKEN;
    t->start = (uint64_t *)checked_malloc((lines + NUM_SPECIAL_TOKENS + 1) * sizeof *t->start);
    t->special = (int32_t *)checked_malloc((lines + NUM_SPECIAL_TOKENS) * sizeof *t->special);
    t->bytes = (char *)checked_malloc(len + NUM_SPECIAL_TOKENS * SPECIAL_ROOM);
    TokenizerLines in = {path, text, text + len, 0};
    t->llama3 = !tokenizer_is_own(text);
    if (!t->llama3) tokenizer_read_head(&in, head);
    for (int32_t id = 0; (line = tokenizer_line(&in)); id++) tokenizer_read_token(t, &in, line, id);
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        t->num_missing += t->missing[i] = token_find(t, &byte, 1) == NO_TOKEN;
        if (t->llama3 && t->missing[i])
            user_error(
                "tokenizer %s has no token for the single byte 0x%02x, expected all 256 bytes; copy the file again",
                path, i);
    }
    if (t->llama3) {
        tokenizer_add_special(t);
        t->bos = tokenizer_special(t, "<|begin_of_text|>"), t->eos = tokenizer_special(t, "<|end_of_text|>"),
        t->eot = tokenizer_special(t, "<|eot_id|>");
        t->split = split_open();
    } else tokenizer_take_head(t, path, head);
    t->vocab_size = t->n_base + t->num_special;
    free(text);
    return t;
}

/* Whether what is generated ends with this token. */
static inline int tokenizer_ends(const Tokenizer *t, int32_t id) { return id == t->eos || id == t->eot; }

static inline void tokenizer_close(Tokenizer *t) {
    pcre2_code_free(t->split);
    free(t->slots), free(t->start), free(t->special), free(t->bytes), free(t);
}

/* *bytes points at the token's bytes inside the tokenizer (not ended by a zero); returns how many. A special token
 * gives its name. An id outside 0 .. vocab_size - 1 gives 0, which no token has. */
static inline size_t tokenizer_decode(const Tokenizer *t, int32_t id, const char **bytes) {
    *bytes = NULL;
    if (id < 0 || id >= t->vocab_size) return 0;
    *bytes = t->bytes + t->start[id];
    return token_length(t, id);
}

// ---------------------------------------------------------------------------
// encoding

typedef struct {
    uint32_t next, prev; // first bytes of the neighbours
    int32_t rank;        // of this part joined with the next, NO_TOKEN where that is no token
} TokenPart;

/* Where the ids go, and what merging one piece needs: grown to the longest piece, freed with the call. */
typedef struct {
    const Tokenizer *t;
    int32_t **ids;
    size_t *capacity, used;
    size_t room;      // the piece length that the arrays below hold
    char *kept;       // (room) of a piece the bytes that tokens have
    TokenPart *parts; // (room + 1) of a piece, as a list; each stands at its first byte
    uint64_t *heap;   // (3 room) rank << 32 | first byte, smallest on top; entries that `rank` denies are stale
    size_t heap_size;
} Encoder;

static inline void *grown(void *p, size_t bytes) {
    p = realloc(p, bytes);
    if (!p) run_failure("out of memory: %zu bytes for tokens could not be had", bytes);
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
    for (; i && e->heap[(i - 1) / 2] > key; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = key;
}
static inline uint64_t heap_pop(Encoder *e) {
    uint64_t top = e->heap[0], last = e->heap[--e->heap_size];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < e->heap_size) {
        if (child + 1 < e->heap_size && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[i] = e->heap[child], i = child;
    }
    e->heap[i] = last;
    return top;
}

/* Notes what the part at `i` would become if joined with the next one. */
static inline void encoder_consider(Encoder *e, const char *piece, size_t n, uint32_t i) {
    TokenPart *part = &e->parts[i];
    part->rank = part->next >= n ? NO_TOKEN : token_find(e->t, piece + i, e->parts[part->next].next - i);
    if (part->rank != NO_TOKEN) heap_push(e, (uint64_t)part->rank << 32 | i);
}

static inline void encoder_room(Encoder *e, size_t n) {
    if (n >= UINT32_MAX)
        user_error("a piece of %zu bytes without a place to split was given, expected less than 4 GiB; cut the text "
                   "into documents",
                   n);
    if (n <= e->room) return;
    e->room = n < 256 ? 256 : n;
    e->parts = (TokenPart *)grown(e->parts, (e->room + 1) * sizeof *e->parts);
    e->heap = (uint64_t *)grown(e->heap, 3 * e->room * sizeof *e->heap);
    e->kept = (char *)grown(e->kept, e->room);
}

/* The piece without the bytes that no token has: what is left stands side by side and merges, as in transformers. */
static inline const char *encoder_keep(Encoder *e, const char *piece, size_t *n) {
    size_t known = 0, kept = 0;
    while (known < *n && !e->t->missing[(uint8_t)piece[known]]) known++;
    if (known == *n) return piece;
    encoder_room(e, *n);
    for (size_t i = 0; i < *n; i++)
        if (!e->t->missing[(uint8_t)piece[i]]) e->kept[kept++] = piece[i];
    *n = kept;
    return e->kept;
}

/* Byte-pair encoding: starting from single bytes, the adjacent pair of lowest rank is joined, the leftmost where
 * several have it, until no pair is a token. A join pushes two pairs at most, so 3n heap entries suffice. */
static inline void encode_piece(Encoder *e, const char *piece, size_t n) {
    if (e->t->num_missing) piece = encoder_keep(e, piece, &n);
    int32_t whole = token_find(e->t, piece, n);
    if (whole != NO_TOKEN) {
        encoder_emit(e, whole);
        return;
    }
    encoder_room(e, n);
    TokenPart *parts = e->parts;
    e->heap_size = 0;
    for (uint32_t i = 0; i <= n; i++) parts[i].next = i + 1, parts[i].prev = i - 1;
    for (uint32_t i = 0; i < n; i++) encoder_consider(e, piece, n, i);
    while (e->heap_size) {
        uint64_t key = heap_pop(e);
        uint32_t i = (uint32_t)key, joined = parts[i].next;
        if (parts[i].rank != (int32_t)(key >> 32)) continue;
        parts[joined].rank = NO_TOKEN; // the part here is gone
        parts[i].next = parts[joined].next, parts[parts[i].next].prev = i;
        encoder_consider(e, piece, n, i);
        if (i) encoder_consider(e, piece, n, parts[i].prev);
    }
    for (uint32_t i = 0; i < n; i = parts[i].next) encoder_emit(e, token_find(e->t, piece + i, parts[i].next - i));
}

static inline int token_is_blank(const Tokenizer *t, int32_t id) {
    for (uint64_t i = t->start[id]; i < t->start[id + 1]; i++)
        if (!memchr(" \n\t", t->bytes[i], 3)) return 0;
    return 1;
}

/* Bytes that are not UTF-8 cannot be split. As tiktoken's _encode_bytes does: the last piece before them (with all
 * blanks before it, if it starts with a blank token) and everything from there to the end are merged as one piece. */
static inline void encode_rest(Encoder *e, const char *text, size_t len, size_t valid, size_t first_id,
                               size_t last_piece_id) {
    const Tokenizer *t = e->t;
    size_t keep = last_piece_id, at = valid;
    if (!t->llama3) {
        encode_piece(e, text + at, len - at);
        return;
    } // others take text alone: here the rest is a piece
    if (keep < e->used && token_is_blank(t, (*e->ids)[keep]))
        while (keep > first_id && token_is_blank(t, (*e->ids)[keep - 1])) keep--;
    for (size_t i = keep; i < e->used; i++) at -= token_length(t, (*e->ids)[i]);
    e->used = keep;
    encode_piece(e, text + at, len - at);
}

/* Appends the ids of `text` (any bytes; names of special tokens in it are plain text) behind the `used` ids that
 * *ids holds already, growing it with realloc; *ids may be NULL at first. Returns the new count. */
static inline size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t len, int32_t **ids, size_t *capacity,
                                      size_t used) {
    Encoder e = {t, ids, capacity, used, 0, NULL, NULL, NULL, 0};
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (!match) run_failure("out of memory: PCRE2's match data could not be had");
    size_t valid = utf8_valid_length(text, len), last_piece_id = used;
    for (size_t at = 0, end; at < valid; at = end) {
        end = split_next(t->split, t->llama3, match, text, valid, at);
        last_piece_id = e.used;
        encode_piece(&e, text + at, end - at);
    }
    if (valid < len) encode_rest(&e, text, len, valid, used, last_piece_id);
    pcre2_match_data_free(match), free(e.kept), free(e.parts), free(e.heap);
    return e.used;
}

// ---------------------------------------------------------------------------
// --encode and --decode

static void print_token(const Tokenizer *t, int32_t id, FILE *f) {
    const char *text;
    size_t length = tokenizer_decode(t, id, &text);
    fwrite(text, 1, length, f);
}

/* Ids are checked as a whole before the first is printed. */
static void decode_ids(const Tokenizer *t, const char *path, const char *text, size_t length) {
    static const char blanks[] = " \t\r\n";
    for (int print = 0; print < 2; print++)
        for (const char *at = text + strspn(text, blanks); at < text + length; at += strspn(at, blanks)) {
            char *end;
            long id = strtol(at, &end, 10);
            if (end == at || !strchr(blanks, *end))
                user_error("%s: found '%.*s', expected token ids, one a line", path,
                           (int)min_i64(20, (int64_t)strcspn(at, blanks)), at);
            if (id < 0 || id >= t->vocab_size)
                user_error("%s: id %ld is outside the tokenizer's 0 to %d", path, id, t->vocab_size - 1);
            if (print) print_token(t, (int32_t)id, stdout);
            at = end;
        }
}

/* --encode and --decode: the tokenizer alone. */
static void tokenizer_tool(const char *file, const char *encode, const char *decode) {
    const char *path = encode ? encode : decode;
    if (encode && decode) user_error("--encode and --decode are done one at a time: leave one out");
    if (!file) user_error("--%s needs --tokenizer FILE", encode ? "encode" : "decode");
    Tokenizer *t = tokenizer_open(file);
    size_t length, capacity = 0;
    int32_t *ids = NULL;
    char *text = read_file(path, &length);
    if (!text) user_error("cannot read %s: %s", path, strerror(errno));
    size_t count = encode ? tokenizer_encode(t, text, length, &ids, &capacity, 0) : 0;
    for (size_t i = 0; i < count; i++) printf("%d\n", ids[i]);
    if (decode) decode_ids(t, path, text, length);
    free(ids);
    free(text);
    tokenizer_close(t);
}

#endif
