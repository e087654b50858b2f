/* tokenize.c: turns text into the token files that the program trains on and validates with.
 * Usage: tokenize --tokenizer F --out-train A.tok --out-val B.tok [--val-fraction 0.05] [--threads N] FILE|DIR...
 *
 * A file is a document and is followed by <|end_of_text|>. Which text is for validation depends on the text only: whole
 * documents if there are many, otherwise paragraphs of about the same size, spread evenly over the corpus. Consecutive
 * paragraphs of a document that go to the same output form one section, which also ends with <|end_of_text|>.
 * Threads encode slices of sections and write them in order, so the output is the same for any number of threads and
 * any slice size, and the text may be larger than memory. With a tokenizer that is not of Llama 3's format, text cannot
 * be sliced, and each thread holds a whole section. Bytes without a token are skipped and counted.
 */
#include "corpus.h"
#include <omp.h> // defines: omp_set_num_threads
#include <pthread.h>
#include <sys/resource.h>

enum {
    PARAGRAPH_MAX = 64 << 10, // bytes
    PARAGRAPH_MIN = 1 << 10,  // bytes
    VAL_PARAGRAPHS = 16,      // how many paragraphs validation gets at least
    VAL_DOCUMENTS = 20,       // how many documents it gets at least, if it gets whole documents
    SLICE = 256 << 10         // bytes
};

// ---------------------------------------------------------------------------
// which text is for validation

/* The end of a paragraph of about `size` bytes: in its second half, after the last empty line, else the last line end,
 * else before the last space, else between two characters. */
static size_t paragraph_end(const char *text, size_t len, size_t at, size_t size) {
    if (len - at <= size + size / 2) return len; // the last paragraph is never a short one
    size_t end = at + size, least = at + size / 2;
    for (size_t i = end; i > least; i--)
        if (text[i - 1] == '\n' && text[i - 2] == '\n') return i;
    for (size_t i = end; i > least; i--)
        if (text[i - 1] == '\n') return i;
    for (size_t i = end; i > least; i--)
        if (text[i] == ' ') return i; // a space belongs to the word after it
    while ((text[end] & 0xC0) == 0x80) end--;
    return end;
}

/* The size of paragraphs in bytes; 0: the text is divided by whole documents, because validation gets enough of them
 * and none dominates it. */
static size_t paragraph_size(const Corpus *corpus, double fraction) {
    double total = (double)corpus->len, largest = 0;
    for (size_t d = 0; d < corpus->count; d++) largest = fmax(largest, (double)corpus->documents[d].len);
    if ((double)corpus->count * fraction >= VAL_DOCUMENTS && largest <= 0.25 * fraction * total) return 0;
    return (size_t)fmin(PARAGRAPH_MAX, fmax(PARAGRAPH_MIN, total * fraction / VAL_PARAGRAPHS));
}

// ---------------------------------------------------------------------------
// the corpus in slices

typedef struct {
    char *text;
    size_t len, room;
    int val;  // for validation
    int ends; // the last slice of its section
} Slice;

typedef struct {
    Corpus corpus;
    ValidationSplit split;
    size_t paragraph; // bytes; 0: whole documents
    size_t slice;     // bytes
    size_t document;  // the next document to open
    FILE *file;       // the current document
    uint64_t left;    // bytes of it that have not been read
    char *text;       // (room) bytes read and not yet handed out
    size_t have, room;
    size_t section;  // bytes at the start of `text` known to be in the current section
    size_t ahead;    // bytes after them that are in the next section; 0: its first paragraph has not been reached
    int val;         // the current section is for validation
    pcre2_code *cut; // finds places to cut; NULL: not Llama 3's expression, text must not be cut
    pcre2_match_data *match;
} Reader;

/* Reads until `have` bytes are there, or the document ends. */
static void reader_fill(Reader *r, size_t have) {
    if (have > r->have + r->left) have = r->have + r->left;
    if (have > r->room) {
        r->room = have + have / 2;
        r->text = (char *)grown(r->text, r->room);
    }
    if (have <= r->have) return;
    document_read(&r->corpus.documents[r->document - 1], r->file, r->text + r->have, have - r->have);
    r->left -= have - r->have;
    r->have = have;
}

/* Reads one paragraph. If it goes to the other output, the section ends before it. */
static void reader_paragraph(Reader *r) {
    size_t size = r->paragraph ? r->paragraph : PARAGRAPH_MAX;
    reader_fill(r, r->section + size + size / 2 + 1);
    size_t len = paragraph_end(r->text, r->have + r->left, r->section, size) - r->section;
    int val = r->paragraph ? is_validation(&r->split, len) : r->val;
    if (r->section && val != r->val) {
        r->ahead = len;
        return;
    }
    r->val = val;
    r->section += len;
}

/* Opens the next document. Returns 0 when there is none. */
static int reader_next_document(Reader *r) {
    if (r->file) fclose(r->file);
    r->file = NULL;
    if (r->document == r->corpus.count) return 0;
    const Document *d = &r->corpus.documents[r->document++];
    r->file = document_open(d);
    r->left = d->len;
    if (!r->paragraph) r->val = is_validation(&r->split, d->len);
    return 1;
}

/* The next slice of the corpus; returns 0 when there is none. A slice grows until there is a place to cut. */
static int reader_next(Reader *r, Slice *s) {
    size_t cut = 0;
    if (!r->have && !r->left && !reader_next_document(r)) return 0;
    while (!cut && !r->ahead && r->section < r->have + r->left) {
        size_t paragraph = r->section;
        reader_paragraph(r);
        if (r->cut && r->section >= r->slice) cut = cut_next(r->cut, r->match, r->text, r->section, paragraph);
    }
    s->val = r->val;
    s->ends = !cut;
    s->len = cut ? cut : r->section;
    if (s->len > s->room) {
        s->room = s->len + s->len / 2;
        s->text = (char *)grown(s->text, s->room);
    }
    memcpy(s->text, r->text, s->len);
    r->have -= s->len;
    memmove(r->text, r->text + s->len, r->have);
    r->section -= s->len;
    if (s->ends) {
        r->val = !r->val;
        r->section = r->ahead;
        r->ahead = 0;
    }
    return 1;
}

// ---------------------------------------------------------------------------
// threads

typedef struct {
    const Tokenizer *t;
    Reader reader;
    TokenWriter train, val;
    uint64_t taken, written; // slices
    uint64_t skipped;        // bytes without a token
    pthread_mutex_t lock;    // protects everything above except t
    pthread_cond_t turn;     // `written` has increased
} Job;

/* What each thread does: take a slice, encode it, wait until all slices before it are written, write it. */
static void tokenize_slices(Job *j) {
    Slice s = ZERO;
    int32_t *ids = NULL;
    size_t capacity = 0;
    for (;;) {
        pthread_mutex_lock(&j->lock);
        int more = reader_next(&j->reader, &s);
        uint64_t turn = j->taken++;
        pthread_mutex_unlock(&j->lock);
        if (!more) break;
        TokenWriter *w = s.val ? &j->val : &j->train;
        uint64_t skipped = 0;
        for (size_t i = 0; j->t->num_missing && i < s.len; i++) skipped += j->t->missing[(uint8_t)s.text[i]];
        size_t n = tokenizer_encode(j->t, s.text, s.len, &ids, &capacity, 0);
        writer_narrow(w, ids, n);
        pthread_mutex_lock(&j->lock);
        while (j->written != turn) pthread_cond_wait(&j->turn, &j->lock);
        writer_write(w, ids, NULL, n);
        if (s.ends) writer_write(w, &j->t->eos, NULL, 1);
        w->bytes += s.len;
        j->skipped += skipped;
        j->written++;
        pthread_cond_broadcast(&j->turn);
        pthread_mutex_unlock(&j->lock);
    }
    free(s.text);
    free(ids);
}

static long number_option(const char *name, const char *value, long least, long most) {
    char *end;
    long n = strtol(value, &end, 10);
    if (end == value || *end || n < least || n > most)
        user_error("%s %s was given, expected a number from %ld to %ld", name, value, least, most);
    return n;
}

typedef struct {
    const char *tokenizer;
    Output train, val;
} Arguments;

/* Parses the options into the result, the reader and OpenMP, and adds the documents to the reader's corpus. */
static Arguments arguments_parse(Reader *r, int argc, char **argv) {
    static const char usage[] = "usage: tokenize --tokenizer FILE --out-train FILE --out-val FILE [--val-fraction "
                                "0.05] [--threads N] TEXT|FOLDER...";
    Arguments a = {NULL, {"--out-train", NULL}, {"--out-val", NULL}};
    const char *value;
    r->split.fraction = 0.05;
    r->slice = SLICE;
    for (int i = 1; i < argc; i++) {
        if (option_value(argc, argv, &i, "--tokenizer", &a.tokenizer)) continue;
        if (option_value(argc, argv, &i, "--out-train", &a.train.path)) continue;
        if (option_value(argc, argv, &i, "--out-val", &a.val.path)) continue;
        if (option_value(argc, argv, &i, "--val-fraction", &value)) r->split.fraction = fraction_option(value);
        else if (option_value(argc, argv, &i, "--threads", &value))
            omp_set_num_threads((int)number_option("--threads", value, 1, 1024));
        else if (option_value(argc, argv, &i, "--slice", &value))
            r->slice = (size_t)number_option("--slice", value, 1, 1 << 30); // for tests: about so many bytes
        else if (!strncmp(argv[i], "--", 2)) user_error("unknown option %s; %s", argv[i], usage);
        else corpus_add_path(&r->corpus, argv[i]);
    }
    if (!a.tokenizer) user_error("--tokenizer is missing; %s", usage);
    if (!a.train.path) user_error("--out-train is missing; %s", usage);
    if (!a.val.path) user_error("--out-val is missing; %s", usage);
    if (!r->corpus.count) user_error("a text file is missing; %s", usage);
    return a;
}

/* Checks that the documents are text, and refuses outputs that would replace an input. */
static void check_files(const Arguments *a, Corpus *corpus) {
    refuse_same_outputs(&a->train, &a->val);
    refuse_replaced_input(&a->train, a->tokenizer);
    refuse_replaced_input(&a->val, a->tokenizer);
    refuse_replaced_documents(&a->train, corpus, 1);
    refuse_replaced_documents(&a->val, corpus, 1);
    corpus_check(corpus);
    refuse_replaced_documents(&a->train, corpus, 0);
    refuse_replaced_documents(&a->val, corpus, 0);
}

int main(int argc, char **argv) {
    output_prepare();
    Job j = ZERO;
    Reader *r = &j.reader;
    Arguments a = arguments_parse(r, argc, argv);
    double started = seconds_now();
    Tokenizer *t = tokenizer_open(a.tokenizer);
    check_files(&a, &r->corpus);
    r->paragraph = paragraph_size(&r->corpus, r->split.fraction);
    r->cut = t->llama3 ? cut_open() : NULL;
    r->match = pcre2_match_data_create(1, NULL);
    j.t = t;
    pthread_mutex_init(&j.lock, NULL);
    pthread_cond_init(&j.turn, NULL);
    writer_open(&j.train, a.train.path, t, 0);
    writer_open(&j.val, a.val.path, t, 0);
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    {
        threads++;
        tokenize_slices(&j);
    }
    if (j.skipped) printf("%" PRIu64 " bytes were skipped: this tokenizer has no token for them\n", j.skipped);
    if (r->corpus.skipped) printf("%zu files were skipped: they are empty or not UTF-8 text\n", r->corpus.skipped);
    if (!j.val.count || !j.train.count)
        user_error("%.1f KB of text are too few to split into training and validation; give at least about %d KB",
                   (double)r->corpus.len / 1e3, (int)(PARAGRAPH_MIN / r->split.fraction / 1000) + 1);
    writer_close(&j.train);
    writer_print(&j.train);
    writer_close(&j.val);
    writer_print(&j.val);
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    printf("%.2f MB in %.2f s on %d threads: %.1f MB/s with at most %ld MB of memory\n", (double)r->corpus.len / 1e6,
           seconds_now() - started, threads, (double)r->corpus.len / 1e6 / (seconds_now() - started),
           use.ru_maxrss / 1000);
    if (r->cut) pcre2_code_free(r->cut);
    pcre2_match_data_free(r->match);
    tokenizer_close(t);
    finish_results();
    return 0;
}
