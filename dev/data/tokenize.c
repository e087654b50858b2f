/* tokenize.c: turns text into the token files that the program trains on and validates with.
 * Usage: tokenize --tokenizer F --out-train A.tok --out-val B.tok [--val-fraction 0.05] FILE|DIR...
 * A file is a document; <|end_of_text|> stands after each. Which text validates depends on the text alone: whole
 * documents where there are many, else chunks cut at paragraphs, spread evenly over the corpus. Neighbouring chunks
 * of one document that go to the same file are one stretch of text; where it breaks off, <|end_of_text|> says so.
 */
#include "corpus.h"

enum { CHUNK_MAX = 64 << 10, CHUNK_MIN = 1 << 10, VAL_CHUNKS = 16, VAL_DOCUMENTS = 20 };

typedef struct { // CONTRACT of token files: 64 bytes, little-endian, then tokens, then the mask where flagged
    char magic[8];
    uint32_t version, width, vocab_size, flags;
    uint64_t count;
    uint8_t tokenizer[32]; // SHA-256 of its file
} TokenHeader;

typedef struct {
    const char *path;
    FILE *file;
    const Tokenizer *t;
    uint32_t width; // bytes a token
    uint64_t count, bytes; // tokens and text bytes so far
} TokenWriter;

static void writer_header(const TokenWriter *w, uint32_t flags) {
    TokenHeader h = {{'L', 'L', 'M', '3', 'T', 'O', 'K', '1'}, 1, w->width, (uint32_t)w->t->vocab_size, flags, w->count, {0}};
    memcpy(h.tokenizer, w->t->fingerprint, sizeof h.tokenizer);
    rewind(w->file);
    fwrite(&h, sizeof h, 1, w->file);
}

static void writer_open(TokenWriter *w, const char *path, const Tokenizer *t) {
    w->path = path, w->t = t, w->width = t->vocab_size <= 65536 ? 2 : 4;
    w->file = output_open(path);
    writer_header(w, 0); // written again with the count
}

static void writer_close(TokenWriter *w) {
    writer_header(w, 0);
    output_close(w->file, w->path);
    printf("%s: %" PRIu64 " tokens from %.2f MB of text\n", w->path, w->count, (double)w->bytes / 1e6);
}

/* One stretch of text and its <|end_of_text|>. */
static void writer_add(TokenWriter *w, const char *text, size_t len, int32_t **ids, size_t *capacity) {
    size_t n = tokenizer_encode(w->t, text, len, ids, capacity, 0);
    for (size_t i = 0; i <= n; i++) {
        uint32_t id = (uint32_t)(i < n ? (*ids)[i] : w->t->eos);
        fwrite(&id, w->width, 1, w->file); // little-endian: the low bytes come first
    }
    w->count += n + 1, w->bytes += len;
}

/* The end of a chunk of about `size` bytes: after the last blank line of its second half, else line end, else blank, else character. */
static size_t chunk_end(const char *text, size_t len, size_t at, size_t size) {
    if (len - at <= size + size / 2) return len; // no crumbs at the end
    size_t end = at + size, least = at + size / 2;
    for (size_t i = end; i > least; i--) if (text[i - 1] == '\n' && text[i - 2] == '\n') return i;
    for (size_t i = end; i > least; i--) if (text[i - 1] == '\n') return i;
    for (size_t i = end; i > least; i--) if (text[i] == ' ') return i; // a blank belongs to the word behind it
    while ((text[end] & 0xC0) == 0x80) end--;
    return end;
}

typedef struct { double fraction; size_t chunk; uint64_t seen, chosen; } Chooser; // bytes so far, and of these for validation

/* Spreads validation evenly: a chunk is taken when that brings the chosen bytes closer to their share. */
static int choose(Chooser *c, size_t len) {
    double share = c->fraction * (double)(c->seen + len / 2);
    int val = c->fraction > 0 && (double)c->chosen + (double)len / 2 <= share;
    c->seen += len;
    c->chosen += val ? len : 0;
    return val;
}

static void add_document(const char *text, size_t len, Chooser *c, TokenWriter *train, TokenWriter *val, int32_t **ids, size_t *capacity) {
    size_t stretch = 0;
    int stretch_val = -1;
    for (size_t at = 0, end; at < len; at = end) {
        end = c->chunk ? chunk_end(text, len, at, c->chunk) : len;
        int is_val = choose(c, end - at);
        if (stretch_val >= 0 && is_val != stretch_val) {
            writer_add(stretch_val ? val : train, text + stretch, at - stretch, ids, capacity);
            stretch = at;
        }
        stretch_val = is_val;
    }
    writer_add(stretch_val ? val : train, text + stretch, len - stretch, ids, capacity);
}

/* Whole documents (0) where validation gets at least 20 of them and none that would be most of it, else chunks of this many bytes. */
static size_t chunk_size(const Corpus *corpus, double fraction) {
    double total = 0, largest = 0;
    size_t documents = 0;
    for (size_t d = 0; d < corpus->count; d++) {
        size_t len;
        char *text = document_read(&corpus->documents[d], &len);
        if (!text) continue;
        documents++, total += (double)len;
        if ((double)len > largest) largest = (double)len;
        free(text);
    }
    if (total == 0) user_error("%zu files were given, none with text in it; expected UTF-8 text", corpus->count);
    if ((double)documents * fraction >= VAL_DOCUMENTS && largest <= 0.25 * fraction * total) return 0;
    double chunk = total * fraction / VAL_CHUNKS;
    return chunk > CHUNK_MAX ? CHUNK_MAX : chunk < CHUNK_MIN ? CHUNK_MIN : (size_t)chunk;
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: tokenize --tokenizer FILE --out-train FILE --out-val FILE [--val-fraction 0.05] TEXT|FOLDER...";
    const char *tokenizer = NULL, *out_train = NULL, *out_val = NULL, *value;
    Corpus corpus = ZERO;
    Chooser chooser = {0.05, 0, 0, 0};
    for (int i = 1; i < argc; i++) {
        char *end;
        if ((value = option_value(argc, argv, &i, "--tokenizer"))) tokenizer = value;
        else if ((value = option_value(argc, argv, &i, "--out-train"))) out_train = value;
        else if ((value = option_value(argc, argv, &i, "--out-val"))) out_val = value;
        else if ((value = option_value(argc, argv, &i, "--val-fraction"))) {
            chooser.fraction = strtod(value, &end);
            if (end == value || *end || !(chooser.fraction > 0 && chooser.fraction <= 0.5))
                user_error("--val-fraction %s was given, expected a number above 0 and at most 0.5", value);
        } else if (!strncmp(argv[i], "--", 2)) user_error("unknown option %s; %s", argv[i], usage);
        else corpus_add_path(&corpus, argv[i]);
    }
    const char *missing = !tokenizer ? "--tokenizer" : !out_train ? "--out-train" : !out_val ? "--out-val" : !corpus.count ? "a text file" : NULL;
    if (missing) user_error("%s is missing; %s", missing, usage);
    Tokenizer *t = tokenizer_open(tokenizer);
    chooser.chunk = chunk_size(&corpus, chooser.fraction);
    TokenWriter train = ZERO, val = ZERO;
    writer_open(&train, out_train, t);
    writer_open(&val, out_val, t);
    int32_t *ids = NULL;
    size_t capacity = 0, passed = 0;
    for (size_t d = 0; d < corpus.count; d++) {
        size_t len;
        char *text = document_read(&corpus.documents[d], &len);
        if (text) add_document(text, len, &chooser, &train, &val, &ids, &capacity);
        else passed++;
        free(text);
    }
    if (passed) printf("%zu files that are empty or no UTF-8 text were passed over\n", passed);
    if (!val.count || !train.count) {
        output_discard(train.file, out_train);
        output_discard(val.file, out_val);
        user_error("%.1f KB of text are too few to split into training and validation; give at least about %d KB",
                   (double)chooser.seen / 1e3, (int)(CHUNK_MIN / chooser.fraction / 1000) + 1);
    }
    writer_close(&train);
    writer_close(&val);
    tokenizer_close(t);
    return 0;
}
