/* tokenize.c: turns text into the token files that the program trains on and validates with.
 * Usage: tokenize --tokenizer F --out-train A.tok --out-val B.tok [--val-fraction 0.05] [--threads N] FILE|DIR...
 * A file is a document; <|end_of_text|> stands after each. Which text validates depends on the text alone: whole
 * documents where there are many, else chunks cut at paragraphs, spread evenly over the corpus. Neighbouring chunks
 * of one document that go to the same file are one stretch of text; where it breaks off, <|end_of_text|> says so.
 * Threads take slices of stretches in turn and write in turn: the files are the same for any number of threads and
 * any size of slice, and text may be larger than memory, which holds a few slices a thread. Text for another tokenizer
 * than Llama 3's kind is not sliced: memory holds a stretch a thread. Bytes that no token has are left out, and
 * counted.
 */
#include "corpus.h"
#include <omp.h> // defines: omp_set_num_threads
#include <sys/resource.h>

enum { CHUNK_MAX = 64 << 10, CHUNK_MIN = 1 << 10, VAL_CHUNKS = 16, VAL_DOCUMENTS = 20, SLICE = 256 << 10 /* bytes */ };

// ---------------------------------------------------------------------------
// which text validates

/* The end of a chunk of about `size` bytes: after the last blank line of its second half, else line end, else blank,
 * else character. */
static size_t chunk_end(const char *text, size_t len, size_t at, size_t size) {
    if (len - at <= size + size / 2) return len; // no crumbs at the end
    size_t end = at + size, least = at + size / 2;
    for (size_t i = end; i > least; i--)
        if (text[i - 1] == '\n' && text[i - 2] == '\n') return i;
    for (size_t i = end; i > least; i--)
        if (text[i - 1] == '\n') return i;
    for (size_t i = end; i > least; i--)
        if (text[i] == ' ') return i; // a blank belongs to the word behind it
    while ((text[end] & 0xC0) == 0x80) end--;
    return end;
}

/* Whole documents (0) where validation gets at least 20 of them and none that would be most of it, else chunks of this
 * many bytes. */
static size_t chunk_size(const Corpus *corpus, double fraction) {
    double total = (double)corpus->len, largest = 0;
    for (size_t d = 0; d < corpus->count; d++) largest = fmax(largest, (double)corpus->documents[d].len);
    if ((double)corpus->count * fraction >= VAL_DOCUMENTS && largest <= 0.25 * fraction * total) return 0;
    double chunk = total * fraction / VAL_CHUNKS;
    return chunk > CHUNK_MAX ? CHUNK_MAX : chunk < CHUNK_MIN ? CHUNK_MIN : (size_t)chunk;
}

// ---------------------------------------------------------------------------
// the corpus in slices

typedef struct {
    char *text;
    size_t len, room;
    int val, ends;
} Slice; // val: for validation; ends: the last of its stretch

typedef struct {
    Corpus corpus;
    Chooser chooser;
    size_t chunk, slice; // bytes; chunk 0: whole documents
    size_t document;     // the next one to open
    FILE *file;          // the one before it
    uint64_t left;       // bytes of it that are still to be read
    char *text;          // (room) the window: bytes read and not handed out yet
    size_t have, room;
    size_t stretch,
        ahead; // bytes of the window in this stretch as far as it is known; in the first chunk of the next, 0: not met
    int val;   // where this stretch goes
    pcre2_code *cut; // NULL: another expression than Llama 3's splits the text, and it is cut nowhere
    pcre2_match_data *match;
} Reader;

static void reader_fill(Reader *r, size_t have) { // or the whole rest
    if (have > r->have + r->left) have = r->have + r->left;
    if (have > r->room) r->text = (char *)grown(r->text, r->room = have + have / 2);
    if (have <= r->have) return;
    document_read(&r->corpus.documents[r->document - 1], r->file, r->text + r->have, have - r->have);
    r->left -= have - r->have, r->have = have;
}

/* Reads one chunk on. The stretch ends before it if it goes to the other file. */
static void reader_chunk(Reader *r) {
    size_t size = r->chunk ? r->chunk : CHUNK_MAX;
    reader_fill(r, r->stretch + size + size / 2 + 1);
    size_t len = chunk_end(r->text, r->have + r->left, r->stretch, size) - r->stretch;
    int val = r->chunk ? choose(&r->chooser, len) : r->val;
    if (r->stretch && val != r->val) r->ahead = len;
    else r->val = val, r->stretch += len;
}

/* The next slice of the corpus, in order; 0 when there is none. It grows until there is a place to cut. */
static int reader_next(Reader *r, Slice *s) {
    size_t cut = 0;
    if (!r->have && !r->left) {
        if (r->file) fclose(r->file);
        r->file = NULL;
        if (r->document == r->corpus.count) return 0;
        const Document *d = &r->corpus.documents[r->document++];
        r->file = document_open(d), r->left = d->len;
        if (!r->chunk) r->val = choose(&r->chooser, d->len);
    }
    while (!cut && !r->ahead && r->stretch < r->have + r->left) {
        size_t chunk = r->stretch;
        reader_chunk(r);
        if (r->cut && r->stretch >= r->slice) cut = cut_next(r->cut, r->match, r->text, r->stretch, chunk);
    }
    s->val = r->val, s->ends = !cut, s->len = cut ? cut : r->stretch;
    if (s->len > s->room) s->text = (char *)grown(s->text, s->room = s->len + s->len / 2);
    memcpy(s->text, r->text, s->len);
    memmove(r->text, r->text + s->len, r->have -= s->len);
    r->stretch -= s->len;
    if (s->ends) r->val = !r->val, r->stretch = r->ahead, r->ahead = 0;
    return 1;
}

// ---------------------------------------------------------------------------
// threads

typedef struct {
    const Tokenizer *t;
    Reader reader;
    TokenWriter train, val;
    uint64_t taken, written; // slices
    uint64_t left_out;       // bytes that no token has
    pthread_mutex_t lock;    // of all above but t
    pthread_cond_t turn;     // `written` has grown
} Job;

/* What a thread does: takes a slice, encodes it beside the others, waits until all slices before it are written. */
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
        uint64_t left_out = 0;
        for (size_t i = 0; j->t->num_missing && i < s.len; i++) left_out += j->t->missing[(uint8_t)s.text[i]];
        size_t n = tokenizer_encode(j->t, s.text, s.len, &ids, &capacity, 0);
        writer_narrow(w, ids, n);
        pthread_mutex_lock(&j->lock);
        while (j->written != turn) pthread_cond_wait(&j->turn, &j->lock);
        writer_write(w, ids, NULL, n);
        if (s.ends) writer_write(w, &j->t->eos, NULL, 1);
        w->bytes += s.len, j->left_out += left_out, j->written++;
        pthread_cond_broadcast(&j->turn);
        pthread_mutex_unlock(&j->lock);
    }
    free(s.text), free(ids);
}

static long number_option(const char *name, const char *value, long least, long most) {
    char *end;
    long n = strtol(value, &end, 10);
    if (end == value || *end || n < least || n > most)
        user_error("%s %s was given, expected a number from %ld to %ld", name, value, least, most);
    return n;
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: tokenize --tokenizer FILE --out-train FILE --out-val FILE [--val-fraction "
                                "0.05] [--threads N] TEXT|FOLDER...";
    const char *tokenizer = NULL, *out_train = NULL, *out_val = NULL, *value;
    Job j = ZERO;
    Reader *r = &j.reader;
    r->chooser.fraction = 0.05, r->slice = SLICE;
    for (int i = 1; i < argc; i++) {
        if ((value = option_value(argc, argv, &i, "--tokenizer"))) tokenizer = value;
        else if ((value = option_value(argc, argv, &i, "--out-train"))) out_train = value;
        else if ((value = option_value(argc, argv, &i, "--out-val"))) out_val = value;
        else if ((value = option_value(argc, argv, &i, "--val-fraction"))) r->chooser.fraction = fraction_option(value);
        else if ((value = option_value(argc, argv, &i, "--threads")))
            omp_set_num_threads((int)number_option("--threads", value, 1, 1024));
        else if ((value = option_value(argc, argv, &i, "--slice")))
            r->slice = (size_t)number_option("--slice", value, 1, 1 << 30); // for tests: bytes, about
        else if (!strncmp(argv[i], "--", 2)) user_error("unknown option %s; %s", argv[i], usage);
        else corpus_add_path(&r->corpus, argv[i]);
    }
    const char *missing = !tokenizer         ? "--tokenizer"
                          : !out_train       ? "--out-train"
                          : !out_val         ? "--out-val"
                          : !r->corpus.count ? "a text file"
                                             : NULL;
    if (missing) user_error("%s is missing; %s", missing, usage);
    double started = seconds_now();
    Tokenizer *t = tokenizer_open(tokenizer);
    corpus_check(&r->corpus);
    r->chunk = chunk_size(&r->corpus, r->chooser.fraction);
    r->cut = t->llama3 ? cut_open() : NULL, r->match = pcre2_match_data_create(1, NULL);
    j.t = t;
    pthread_mutex_init(&j.lock, NULL), pthread_cond_init(&j.turn, NULL);
    writer_open(&j.train, out_train, t, 0);
    writer_open(&j.val, out_val, t, 0);
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads++, tokenize_slices(&j);
    if (j.left_out) printf("%" PRIu64 " bytes were left out: this tokenizer has no token for them\n", j.left_out);
    if (r->corpus.passed) printf("%zu files that are empty or no UTF-8 text were passed over\n", r->corpus.passed);
    if (!j.val.count || !j.train.count)
        user_error("%.1f KB of text are too few to split into training and validation; give at least about %d KB",
                   (double)r->corpus.len / 1e3, (int)(CHUNK_MIN / r->chooser.fraction / 1000) + 1);
    writer_close(&j.train);
    writer_close(&j.val);
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    printf("%.2f MB in %.2f s on %d threads: %.1f MB/s with at most %ld MB of memory\n", (double)r->corpus.len / 1e6,
           seconds_now() - started, threads, (double)r->corpus.len / 1e6 / (seconds_now() - started),
           use.ru_maxrss / 1000);
    if (r->cut) pcre2_code_free(r->cut);
    pcre2_match_data_free(r->match);
    tokenizer_close(t);
    return 0;
}
