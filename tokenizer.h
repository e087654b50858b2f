/* tokenizer.h: text to token ids and back, by byte-level byte-pair encoding (BPE).
 *
 * programs/shared/tokenizer_model.h reads Llama 3's tokenizer.model and a text format for other tokenizers;
 * programs/shared/tokenizer_json.h reads tokenizer.json, and opens a file of any of these formats.
 * Text is split into pieces by a regular expression (PCRE2), and each piece is merged into tokens by itself.
 * A caller may rely on this: ids equal those of tiktoken and transformers; decoding gives back the encoded bytes
 * (except bytes for which a tokenizer has no token); the time is n log n in the longest piece; an open Tokenizer
 * is never written to, so any number of threads may share it.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include "lib/device/base.h" // defines: hash_bytes, user_error, run_failure, new_array, min_i64
#include "lib/io/sha256.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h> // defines: pcre2_compile, pcre2_jit_compile, pcre2_match

enum { NUM_SPECIAL_TOKENS = 256, SPECIAL_NAME_BYTES = 40 /* at most */, NO_TOKEN = -1 };

/* A slot of the hash table from bytes to base tokens. */
typedef struct {
    uint32_t hash;
    int32_t id; // NO_TOKEN: the slot is empty
} TokenSlot;

/* A slot of the hash table of a tokenizer.json's merges. */
typedef struct {
    int32_t left, right; // ids of adjacent tokens; left NO_TOKEN: the slot is empty
    int32_t rank;        // position in the file's list of merges; a lower rank merges first
} MergeSlot;

typedef struct Tokenizer {
    int32_t n_base;          // base tokens: those that text is encoded to
    int32_t num_special;     // special tokens, such as <|end_of_text|>; text is never encoded to them
    int32_t vocab_size;      // n_base + num_special
    int32_t bos, eos, eot;   // begin of document, end of document, end of a conversation's turn; or NO_TOKEN
    int llama3;              // 1: text is split by Llama 3's expression
    int has_header;          // 1: the file is a tokenizer.model with a header
    int32_t front;           // what the post-processor of a tokenizer.json puts in front of a text, or NO_TOKEN
    uint8_t fingerprint[32]; // SHA-256 of the file
    uint8_t missing[256];    // 1: no token has this byte
    int num_missing;
    int32_t *special; // (num_special) ids of the special tokens, ascending
    char *bytes;      // the bytes of all tokens, one after the other; those of a special token are its name
    uint64_t *start;  // (vocab_size + 1) token i is bytes[start[i] .. start[i + 1])
    size_t longest;   // bytes of the longest base token
    TokenSlot *slots; // (slot_mask + 1) hash table with open addressing
    uint32_t slot_mask;
    pcre2_code *split;      // the regular expression that matches one piece
    const char *expression; // llama3_split, smollm2_split or gpt2_split, from which `split` was compiled; NULL: another
    int32_t byte_token[256]; // ids of the single bytes, or NO_TOKEN
    // of a tokenizer.json; otherwise any two adjacent tokens merge whose bytes form a token, the lowest id first
    MergeSlot *merges;     // (merge_mask + 1) hash table with open addressing; NULL: the other formats
    int32_t *merge_result; // (num_merges) id of the token that each merge forms
    int32_t num_merges;
    uint32_t merge_mask;
    uint8_t *is_divided; // (vocab_size) 1: a piece with this token's bytes is divided nevertheless, because the merges
                         // do not lead to the token; NULL: no piece is
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
/* GPT-2's (transformers, models/gpt2/tokenization_gpt2.py), which ByteLevel of a tokenizer.json has. */
static const char gpt2_split[] = "'(?:s|t|re|ve|m|ll|d)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s+(?!\\S)|\\s+";

/* Digits, which makes each digit a piece, and then GPT-2's for the text between digits. That text ends before a number,
 * so the last space before a number stays with the others. SmolLM2 splits in this way. */
static const char smollm2_split[] = "\\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\\p{L}++| ?[^\\s\\p{L}\\p{N}]++"
                                    "|\\s+(?![^\\s\\p{N}])|\\s+";
// clang-format on

/* Compiles an expression of this program's own. */
static inline pcre2_code *expression_open(const char *pattern, uint32_t options) {
    int error;
    size_t at;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | options, &error, &at, NULL);
    if (!code)
        run_failure("PCRE2 refuses an expression at character %zu (error %d); expected a build with Unicode: install "
                    "libpcre2-dev",
                    at, error);
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    return code;
}

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

static inline uint32_t merge_hash(int32_t left, int32_t right) {
    return (uint32_t)(mix64((uint64_t)(uint32_t)left << 32 | (uint32_t)right));
}

/* The slot that holds this merge, or the empty slot where it belongs. */
static inline MergeSlot *merge_slot(const Tokenizer *t, int32_t left, int32_t right) {
    uint32_t i = merge_hash(left, right) & t->merge_mask;
    while (t->merges[i].left != NO_TOKEN && (t->merges[i].left != left || t->merges[i].right != right))
        i = (i + 1) & t->merge_mask;
    return &t->merges[i];
}

/* The id of a special token, or NO_TOKEN. */
static int32_t tokenizer_special(const Tokenizer *t, const char *name) {
    for (int i = 0; i < t->num_special; i++) {
        int32_t id = t->special[i];
        if (token_length(t, id) == strlen(name) && !memcmp(t->bytes + t->start[id], name, strlen(name))) return id;
    }
    return NO_TOKEN;
}

// ---------------------------------------------------------------------------
// closing, and decoding

static void tokenizer_close(Tokenizer *t) {
    pcre2_code_free(t->split);
    free(t->slots);
    free(t->start);
    free(t->special);
    free(t->bytes);
    free(t->merges);
    free(t->merge_result);
    free(t->is_divided);
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
    int32_t id;          // the token that this part is
    int32_t rank;        // of the merge with the next part, or NO_TOKEN; in a tokenizer.model, the id that it forms
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
    int32_t without; // a token that no merge may form; NO_TOKEN: none
} Encoder;

/* Appends ids after the `used` ones that *ids already holds. */
static Encoder encoder_open(const Tokenizer *t, int32_t **ids, size_t *capacity, size_t used) {
    Encoder e = {t, ids, capacity, used, 0, NULL, NULL, NULL, 0, NO_TOKEN};
    return e;
}

static void encoder_close(Encoder *e) {
    free(e->kept);
    free(e->parts);
    free(e->heap);
}

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

/* The rank of the merge of the part at byte i with the next one, or NO_TOKEN. */
static inline int32_t encoder_rank(const Encoder *e, const char *piece, uint32_t i) {
    const Tokenizer *t = e->t;
    uint32_t next = e->parts[i].next;
    if (!t->merges) {
        int32_t id = token_find(t, piece + i, e->parts[next].next - i);
        return id == e->without ? NO_TOKEN : id;
    }
    const MergeSlot *slot = merge_slot(t, e->parts[i].id, e->parts[next].id);
    return slot->left == NO_TOKEN ? NO_TOKEN : slot->rank;
}

/* Looks up the merge of the part at byte i with its neighbor, and adds it to the heap. */
static inline void encoder_consider(Encoder *e, const char *piece, size_t n, uint32_t i) {
    TokenPart *part = &e->parts[i];
    part->rank = part->next >= n ? NO_TOKEN : encoder_rank(e, piece, i);
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

/* Byte-pair encoding of one piece: starts from single bytes and applies the merge with the lowest rank, the leftmost of
 * equals, until none is left. A merge adds at most two pairs, so 3n heap entries suffice. */
static inline void encode_by_merges(Encoder *e, const char *piece, size_t n) {
    encoder_reserve(e, n);
    TokenPart *parts = e->parts;
    e->heap_size = 0;
    for (uint32_t i = 0; i <= n; i++) {
        parts[i].next = i + 1;
        parts[i].prev = i - 1;
        if (i < n) parts[i].id = e->t->byte_token[(uint8_t)piece[i]];
    }
    for (uint32_t i = 0; i < n; i++) encoder_consider(e, piece, n, i);
    while (e->heap_size) {
        uint64_t key = heap_pop(e);
        uint32_t i = (uint32_t)key, merged = parts[i].next;
        int32_t rank = parts[i].rank;
        if (rank != (int32_t)(key >> 32)) continue; // a stale entry
        parts[i].id = e->t->merges ? e->t->merge_result[rank] : rank;
        parts[merged].rank = NO_TOKEN; // this part no longer exists
        parts[i].next = parts[merged].next;
        parts[parts[i].next].prev = i;
        encoder_consider(e, piece, n, i);
        if (i) encoder_consider(e, piece, n, parts[i].prev);
    }
    for (uint32_t i = 0; i < n; i = parts[i].next) encoder_emit(e, parts[i].id);
}

static inline void encode_piece(Encoder *e, const char *piece, size_t n) {
    if (e->t->num_missing) piece = encoder_skip_missing(e, piece, &n);
    int32_t whole = token_find(e->t, piece, n);
    if (whole != NO_TOKEN && !(e->t->is_divided && e->t->is_divided[whole])) encoder_emit(e, whole);
    else encode_by_merges(e, piece, n);
}

static inline int token_is_space(const Tokenizer *t, int32_t id) {
    for (uint64_t i = t->start[id]; i < t->start[id + 1]; i++)
        if (!memchr(" \n\t", t->bytes[i], 3)) return 0;
    return 1;
}

/* Encodes the text from its first byte that is not UTF-8, at `valid`: the expression cannot split it, so it is one
 * piece. With Llama 3's expression this piece begins earlier, as in tiktoken's _encode_bytes: with the last piece
 * before it, and with all white-space tokens before that if it starts with one. `first_id` and `last_piece_id` index
 * *e->ids. */
static void encode_rest(Encoder *e, const char *text, size_t len, size_t valid, size_t first_id, size_t last_piece_id) {
    const Tokenizer *t = e->t;
    size_t keep = last_piece_id, at = valid;
    if (!t->llama3 || t->num_missing) {
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
    Encoder e = encoder_open(t, ids, capacity, used);
    Splitter splitter = splitter_open(t->split, t->llama3, len);
    size_t valid = text_valid_length(t->split, splitter.match, text, len), last_piece_id = used;
    for (size_t at = 0, end; at < valid; at = end) {
        end = split_next(&splitter, text, valid, at);
        last_piece_id = e.used;
        encode_piece(&e, text + at, end - at);
    }
    if (valid < len) encode_rest(&e, text, len, valid, used, last_piece_id);
    splitter_close(&splitter);
    encoder_close(&e);
    return e.used;
}

#endif
