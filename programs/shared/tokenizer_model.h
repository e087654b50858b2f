/* tokenizer_model.h: reads tokenizer.model, a text file that lists the tokens of byte-level BPE by their bytes.
 *
 * Llama 3's format has one line per token: base64 of its bytes, a space, its rank. The other one has a header, which is
 * described above tokenizer_header_words. Neither lists merges: any two adjacent tokens merge whose bytes form a token,
 * and the token with the lowest id is formed first. A malformed line is refused with its number. */
#ifndef TOKENIZER_MODEL_H
#define TOKENIZER_MODEL_H
#include "../../tokenizer.h" // defines: Tokenizer, token_slot, split_open
#include "text_input.h"      // defines: UTF8_BYTE_ORDER_MARK

static inline int is_special_token(const Tokenizer *t, int32_t id) {
    int low = 0, high = t->num_special; // where the first special token from `id` on is
    while (low < high) {
        int middle = (low + high) / 2;
        if (t->special[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low < t->num_special && t->special[low] == id;
}

/* The name of special token i of the 256 that Llama 3.1 has, in the order of its release. */
static void llama3_special_name(int i, char name[SPECIAL_NAME_BYTES]) {
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
    if (i < num_named) snprintf(name, SPECIAL_NAME_BYTES, "%s", named[i]);
    else snprintf(name, SPECIAL_NAME_BYTES, "<|reserved_special_token_%d|>", i - num_named + reserved);
}

static void tokenizer_add_special(Tokenizer *t) {
    for (int i = 0; i < NUM_SPECIAL_TOKENS; i++) {
        uint64_t *start = t->start + t->n_base + i;
        llama3_special_name(i, t->bytes + *start);
        start[1] = start[0] + strlen(t->bytes + *start);
        t->special[t->num_special++] = t->n_base + i;
    }
}

// ---------------------------------------------------------------------------
// the table of tokens

/* Room for as many tokens as a file has `lines`, with `len` bytes in all, and for Llama 3's special tokens. */
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

/* Adds the base token `id`, whose n bytes are in their place already. */
static void tokenizer_add_base(Tokenizer *t, int32_t id, size_t n) {
    const char *bytes = t->bytes + t->start[id];
    TokenSlot *slot = token_slot(t, bytes, n);
    slot->hash = token_hash(bytes, n);
    slot->id = id;
    t->start[id + 1] = t->start[id] + n;
    t->n_base++;
    if (n > t->longest) t->longest = n;
}

// ---------------------------------------------------------------------------
// reading a tokenizer's file

/* The end of every message about a file of another kind. */
#define TOKENIZER_EXPECTED                                                                                             \
    "expected a tokenizer.json, Llama 3's tokenizer.model (original/tokenizer.model in Meta's releases, or made by "   \
    "tokens_llama3 --train-tokenizer) or a file written by dev/data/smollm2.py"

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

/* Refuses a file that is a tokenizer of no kind, so that it is not even copied. `text`: its `len` bytes and a NUL. */
static inline void tokenizer_refuse_damaged(const char *path, const char *text, size_t len) {
    if (!strncmp(text, UTF8_BYTE_ORDER_MARK, 3))
        user_error("tokenizer %s begins with a byte-order mark, which no tokenizer's file has: remove the first three "
                   "bytes (tail -c +4)",
                   path);
    if (!len) user_error("tokenizer %s has 0 bytes; " TOKENIZER_EXPECTED, path);
}

/* Decodes n characters of base64 (RFC 4648, padded) to `out`. Returns the number of bytes; 0: it is not base64. */
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

/* Writes a token's line: its n bytes in base64, a space, its id. */
static inline void token_line_write(FILE *f, const char *bytes, size_t n, int32_t id) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *p = (const uint8_t *)bytes;
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) | (i + 2 < n ? p[i + 2] : 0);
        fputc(alphabet[bits >> 18], f);
        fputc(alphabet[bits >> 12 & 63], f);
        fputc(i + 1 < n ? alphabet[bits >> 6 & 63] : '=', f);
        fputc(i + 2 < n ? alphabet[bits & 63] : '=', f);
    }
    fprintf(f, " %d\n", id);
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
    size_t n = token_line_parse(line, id, t->has_header, &special, bytes);
    if (!n)
        user_error("tokenizer %s, line %d: found '%.80s', expected %s %d (they count up from 0) after a token's bytes "
                   "in base64 and one space%s; copy the file again",
                   in->path, in->number, line, t->has_header ? "id" : "rank", id,
                   t->has_header ? ", or after the word special and a name without spaces" : "");
    if (special) {
        t->start[id + 1] = t->start[id] + n;
        t->special[t->num_special++] = id;
        return;
    }
    int32_t same = token_find(t, bytes, n);
    if (same != NO_TOKEN)
        user_error("tokenizer %s, line %d: found '%.80s', the token of line %d again, expected each token once; copy "
                   "the file again",
                   in->path, in->number, line, in->number - (id - same));
    tokenizer_add_base(t, id, n);
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
    for (size_t i = 0; i < len; i++) {
        if (text[i] != '\n' && (text[i] < ' ' || text[i] > '~'))
            user_error("tokenizer %s, line %zu: found the byte 0x%02x (perhaps a SentencePiece model, or Windows line "
                       "ends); " TOKENIZER_EXPECTED,
                       path, lines, (uint8_t)text[i]);
        lines += text[i] == '\n';
    }
    return lines;
}

static void tokenizer_find_bytes(Tokenizer *t) {
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        t->byte_token[i] = token_find(t, &byte, 1);
        t->missing[i] = t->byte_token[i] == NO_TOKEN;
        t->num_missing += t->missing[i];
    }
}

static void tokenizer_refuse_missing_bytes(const Tokenizer *t, const char *path) {
    for (int i = 0; i < 256; i++)
        if (t->missing[i])
            user_error(
                "tokenizer %s has no token for the single byte 0x%02x, expected all 256 bytes; copy the file again",
                path, i);
}

/* `text` (len, and a NUL): the contents of the tokenizer.model `path`, which errors name; frees it. */
static Tokenizer *tokenizer_from_model(const char *path, char *text, size_t len) {
    Tokenizer *t = new_array(Tokenizer, 1);
    const char *header[NUM_HEADER_LINES]; // of Llama 3's format, which has none: what it would say
    header[HEADER_BOS] = "<|begin_of_text|>";
    header[HEADER_EOS] = "<|end_of_text|>";
    header[HEADER_EOT] = "<|eot_id|>";
    header[HEADER_SPLIT] = llama3_split;
    t->front = NO_TOKEN; // tokenizer_from_text sets it where a file beside this one says so
    sha256(text, len, t->fingerprint);
    size_t text_len = len;
    while (text_len > 1 && text[text_len - 1] == '\n') text_len--; // the last line may lack its newline
    size_t lines = tokenizer_check_text(path, text, text_len);
    tokenizer_allocate(t, lines, len);
    TokenizerLines in = {path, text, text + text_len, 0};
    t->has_header = !strncmp(text, tokenizer_header_words[0], strlen(tokenizer_header_words[0]));
    t->llama3 = !t->has_header;
    if (t->has_header) tokenizer_read_header(&in, header);
    int32_t id = 0;
    for (const char *line = tokenizer_line(&in); line; line = tokenizer_line(&in))
        tokenizer_read_token(t, &in, line, id++);
    tokenizer_find_bytes(t);
    if (t->has_header) tokenizer_check_counts(t, path, header);
    else tokenizer_refuse_missing_bytes(t, path);
    if (!t->has_header) tokenizer_add_special(t);
    t->bos = tokenizer_header_special(t, path, HEADER_BOS, header[HEADER_BOS]);
    t->eos = tokenizer_header_special(t, path, HEADER_EOS, header[HEADER_EOS]);
    t->eot = tokenizer_header_special(t, path, HEADER_EOT, header[HEADER_EOT]);
    t->split = split_open(path, HEADER_SPLIT + 1, header[HEADER_SPLIT]);
    if (t->llama3) t->expression = llama3_split;
    else if (!strcmp(header[HEADER_SPLIT], smollm2_split)) t->expression = smollm2_split;
    t->vocab_size = t->n_base + t->num_special;
    free(text);
    return t;
}

#endif
