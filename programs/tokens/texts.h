/* texts.h: turns text into the token files that the trainer trains on and validates with.
 *
 * A text file is a document, and each line of a .jsonl file holds one; - reads JSON lines from standard input. Files
 * may be compressed (.gz, .zst). Each document begins with what the tokenizer puts in front of a text, if it does that,
 * and is followed by <|end_of_text|>. Which text is for validation depends on
 * the text only: whole documents if there are many or if they are JSON lines, otherwise paragraphs of about the same
 * size, spread evenly over the corpus. Consecutive paragraphs of a document for the same output form one section,
 * which also ends with <|end_of_text|>. Threads encode slices of sections and write them in order, so the output is the
 * same for any number of threads and any slice size. Text files may be larger than memory, one line of JSON may not.
 * With a tokenizer that is not of Llama 3's format, text cannot be sliced, and each thread holds a whole section. Bytes
 * without a token are skipped and counted. An interrupted run is continued by the same command. */
#ifndef TEXTS_H
#define TEXTS_H
#include "corpus.h"
#include "tokens_options.h" // defines: TokensOptions
#include <omp.h>            // defines: omp_set_num_threads
#include <pthread.h>
#include <sys/resource.h>

enum {
    PARAGRAPH_MAX = 64 << 10, // bytes
    PARAGRAPH_MIN = 1 << 10,  // bytes
    VAL_PARAGRAPHS = 16,      // how many paragraphs validation gets at least
    VAL_DOCUMENTS = 20        // how many documents it gets at least, if it gets whole documents
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
 * and none dominates it, or because the lengths of JSON lines are not known beforehand. */
static size_t paragraph_size(const Corpus *corpus, double fraction) {
    double total = (double)corpus->len, largest = 0;
    if (corpus->json_lines) return 0;
    for (size_t d = 0; d < corpus->count; d++) largest = fmax(largest, (double)corpus->files[d].len);
    if ((double)corpus->count * fraction >= (double)VAL_DOCUMENTS && largest <= 0.25 * fraction * total) return 0;
    return (size_t)fmin(PARAGRAPH_MAX, fmax(PARAGRAPH_MIN, total * fraction / (double)VAL_PARAGRAPHS));
}

// ---------------------------------------------------------------------------
// the corpus in slices

/* A place between two documents, from which an interrupted run continues. */
typedef struct {
    uint64_t file;         // the file of the next document
    uint64_t line, offset; // JSON lines: how many lines precede it, and the bytes up to their end; 0: it is the first
    uint32_t sum;          // CRC-32 of these bytes
    uint64_t documents;    // so far
    uint64_t empty;        // JSON lines without text so far
    ValidationSplit split;
} Position;

typedef struct {
    char *text;
    size_t len, room;
    int val;    // for validation
    int begins; // the first slice of its section
    int ends;   // the last one
    int ends_document;
    Position after; // its document, valid if it ends one
} Slice;

typedef struct {
    Corpus corpus;
    ValidationSplit split;
    const char *field;         // of JSON lines
    size_t paragraph;          // bytes; 0: whole documents
    size_t slice;              // bytes
    size_t next_file;          // the next file to open
    InputStream stream;        // the current text file
    JsonLines lines;           // the current file of JSON lines; at most one of the two is open
    uint64_t size_before;      // bytes of the files before the current one
    uint64_t documents, empty; // documents so far; JSON lines whose text is empty, which are skipped
    uint64_t left;             // bytes of the current text file that have not been read
    char *text;                // (room) bytes read and not yet handed out
    size_t have, room;
    size_t section;  // bytes at the start of `text` known to be in the current section
    size_t ahead;    // bytes after them that are in the next section; 0: its first paragraph has not been reached
    int val;         // the current section is for validation
    int is_inside;   // a slice of it has been handed out
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
    text_read(&r->stream, &r->corpus.files[r->next_file - 1], r->text + r->have, have - r->have);
    r->left -= have - r->have;
    r->have = have;
}

/* Reads one paragraph. If it goes to the other output, the section ends before it. */
static void reader_paragraph(Reader *r) {
    size_t size = r->paragraph ? r->paragraph : (size_t)PARAGRAPH_MAX;
    reader_fill(r, r->section + size + size / 2 + 1);
    size_t len = paragraph_end(r->text, r->have + r->left, r->section, size) - r->section;
    int val = r->paragraph ? is_validation_paragraph(&r->split, len) : r->val;
    if (r->section && val != r->val) {
        r->ahead = len;
        return;
    }
    r->val = val;
    r->section += len;
}

/* Opens the next file. Returns 0 when there is none. */
static int reader_next_file(Reader *r) {
    stream_close(&r->stream);
    if (r->next_file) r->size_before += r->corpus.files[r->next_file - 1].size;
    if (r->next_file == r->corpus.count) return 0;
    const InputFile *f = &r->corpus.files[r->next_file++];
    if (f->is_json_lines) lines_open(&r->lines, f->path, r->field);
    else text_open(&r->stream, f);
    return 1;
}

/* Reads the next document of JSON lines as a whole. Returns 0 when the file has no more. */
static int reader_next_line(Reader *r) {
    size_t len = 0;
    while (!len) {
        if (!lines_next_document(&r->lines, &r->text, &r->room, &len)) {
            lines_close(&r->lines);
            return 0;
        }
        r->empty += !len;
    }
    r->have = len;
    return 1;
}

/* Begins the next document. Returns 0 when there is none. */
static int reader_next_document(Reader *r) {
    while (!r->lines.stream.file || !reader_next_line(r)) {
        if (!reader_next_file(r)) return 0;
        if (r->lines.stream.file) continue;
        r->left = r->corpus.files[r->next_file - 1].len;
        break;
    }
    if (!r->paragraph) r->val = is_validation_document(&r->split);
    r->documents++;
    return 1;
}

/* The place before the next document. */
static Position reader_position(const Reader *r) {
    Position p = {r->next_file, 0, 0, 0, r->documents, r->empty, r->split};
    if (!r->lines.stream.file) return p;
    p.file--;
    p.line = r->lines.line;
    p.offset = r->lines.offset;
    p.sum = r->lines.sum;
    return p;
}

static void reader_continue(Reader *r, const Position *p) {
    for (; r->next_file < p->file; r->next_file++) r->size_before += r->corpus.files[r->next_file].size;
    if (r->next_file) r->size_before -= r->corpus.files[r->next_file - 1].size; // reader_next_file adds it
    r->split = p->split;
    r->documents = p->documents;
    r->empty = p->empty;
    if (!p->line) return;
    reader_next_file(r);
    lines_skip(&r->lines, p->line, p->offset, p->sum);
}

/* Bytes of all files that have been read, as they are in the file system. */
static uint64_t reader_consumed(const Reader *r) {
    return r->size_before + r->stream.consumed + r->lines.stream.consumed;
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
    s->begins = !r->is_inside;
    s->ends = !cut;
    r->is_inside = !s->ends;
    s->len = cut ? cut : r->section;
    if (s->len > s->room) {
        s->room = s->len + s->len / 2;
        s->text = (char *)grown(s->text, s->room);
    }
    memcpy(s->text, r->text, s->len);
    r->have -= s->len;
    memmove(r->text, r->text + s->len, r->have);
    r->section -= s->len;
    s->ends_document = !r->have && !r->left;
    if (s->ends_document) s->after = reader_position(r);
    if (s->ends) {
        r->val = !r->val;
        r->section = r->ahead;
        r->ahead = 0;
    }
    return 1;
}

// ---------------------------------------------------------------------------
// the state of an unfinished run, from which the same command continues it

/* What has been written when the state is saved. */
typedef struct {
    Position after;
    uint64_t train, val, train_bytes, val_bytes; // tokens of the outputs, bytes of their text
    uint64_t train_target_bytes, val_target_bytes;
    uint64_t skipped; // bytes without a token
} Saved;

typedef struct {
    char *path;              // of --out-train, with .state
    uint64_t identity;       // hash of the command and of the input files
    double every, next_save; // seconds
} State;

static uint64_t hash_text(uint64_t h, const char *text) { return hash_bytes(h, text, strlen(text) + 1); }

/* Everything that the outputs depend on. */
static uint64_t state_identity(const TokensOptions *o, const Tokenizer *t, const Reader *r) {
    uint64_t h = hash_bytes(hash_bytes(HASH_START, t->fingerprint, sizeof t->fingerprint), &t->front, sizeof t->front);
    h = hash_text(hash_text(hash_text(h, r->field), o->out_train), o->out_val);
    h = hash_bytes(h, &r->split.fraction, sizeof r->split.fraction);
    for (size_t i = 0; i < r->corpus.count; i++) {
        const InputFile *f = &r->corpus.files[i];
        h = hash_text(h, f->path);
        h = hash_bytes(h, &f->size, sizeof f->size);
        h = hash_bytes(h, &f->changed, sizeof f->changed);
    }
    return h;
}

/* The contents of PATH.state, of which this program is the only reader. */
typedef struct {
    char magic[8];
    uint64_t identity;
    Saved saved;
    uint64_t hash; // of everything before it
} StateFile;
#define STATE_MAGIC "LLM3STA4"

/* Reads PATH.state. Returns 0 if it is missing or damaged. */
static int state_read(const char *path, StateFile *state) {
    size_t length;
    char *bytes = read_regular_file(path, &length);
    int is_whole = bytes && length == sizeof *state;
    if (is_whole) memcpy(state, bytes, sizeof *state);
    free(bytes);
    return is_whole && !memcmp(state->magic, STATE_MAGIC, sizeof state->magic) &&
           state->hash == hash_bytes(HASH_START, state, offsetof(StateFile, hash));
}

/* Whether PATH.partial is a file that has its first `count` tokens. */
static int partial_has(const char *path, const Tokenizer *t, uint64_t count) {
    char *partial = path_with(path, ".partial");
    struct stat info;
    int has = !lstat(partial, &info) && S_ISREG(info.st_mode) &&
              (uint64_t)info.st_size >= sizeof(TokenFileHeader) + count * token_width(t);
    free(partial);
    return has;
}

/* Returns 1 if a run of this command was interrupted and can be continued, with what it had saved. What another
 * command has left is refused: it may be hours of work. */
static int state_open(State *s, const TokensOptions *o, const Tokenizer *t, const Reader *r, Saved *saved) {
    StateFile state;
    s->path = path_with(o->out_train, ".state");
    s->identity = state_identity(o, t, r);
    s->every = o->save_seconds;
    s->next_save = seconds_now() + s->every;
    int found = !access(s->path, F_OK), is_whole = state_read(s->path, &state);
    if (is_whole && state.identity != s->identity)
        user_error(
            "%s belongs to an interrupted run with other options, or with inputs that have changed since: repeat "
            "its command to continue it, or remove the file to start over",
            s->path);
    int fits =
        is_whole && partial_has(o->out_train, t, state.saved.train) && partial_has(o->out_val, t, state.saved.val);
    if (fits) *saved = state.saved;
    if (found && !fits) printf("starting over: %s, or an output that it describes, is damaged or missing\n", s->path);
    if (!fits) unlink(s->path);
    outputs_are_resumable = fits;
    return fits;
}

/* Writes the state; the outputs that it describes are on the disk already. */
static void state_save(State *s, const Saved *saved) {
    char *partial = path_with(s->path, ".partial");
    FILE *f = create_file(partial, "wbx");
    StateFile state;
    memset(&state, 0, sizeof state); // also the padding, which is part of the hash
    memcpy(state.magic, STATE_MAGIC, sizeof state.magic);
    state.identity = s->identity;
    memcpy(&state.saved, saved, sizeof state.saved);
    state.hash = hash_bytes(HASH_START, &state, offsetof(StateFile, hash));
    fwrite(&state, sizeof state, 1, f);
    int failed = fflush(f) || fsync(fileno(f));
    if (fclose(f) || failed || rename(partial, s->path))
        user_error("%s could not be written completely: %s; is the disk full?", s->path, strerror(errno));
    free(partial);
    outputs_are_resumable = 1;
    s->next_save = seconds_now() + s->every;
}

// ---------------------------------------------------------------------------
// progress on standard error: a line that is rewritten on a terminal, otherwise a line every 30 s

typedef struct {
    int is_terminal, is_shown;
    double started, last;             // seconds
    uint64_t bytes, tokens, consumed; // when the run started
} TextProgress;

static void progress_open(TextProgress *p, uint64_t bytes, uint64_t tokens, uint64_t consumed) {
    p->is_terminal = isatty(STDERR_FILENO);
    p->started = p->last = seconds_now();
    p->bytes = bytes;
    p->tokens = tokens;
    p->consumed = consumed;
}

/* `bytes` of text and `tokens` so far; `consumed` bytes of `size` in all input files, 0 if that is not known. */
static void progress_show(TextProgress *p, double now, uint64_t bytes, uint64_t tokens, uint64_t consumed,
                          uint64_t size) {
    if (now - p->last < (p->is_terminal ? 0.2 : 30)) return;
    double seconds = now - p->started, left = 0;
    p->last = now;
    p->is_shown = 1;
    if (size && consumed > p->consumed) {
        double done = fmin(1, (double)consumed / (double)size);
        left = seconds * ((double)size - (double)consumed) / (double)(consumed - p->consumed);
        int filled = (int)(20 * done);
        fprintf(stderr, "[%.*s%*s] %3.0f %% | ", filled, "####################", 20 - filled, "", 100 * done);
    }
    fprintf(stderr, "%.1f MB | %.1f MB/s | %.2f M tokens/s", (double)bytes / 1e6,
            (double)(bytes - p->bytes) / 1e6 / seconds, (double)(tokens - p->tokens) / 1e6 / seconds);
    if (left > 0) fprintf(stderr, " | %.0f:%02.0f left", floor(left / 60), floor(fmod(left, 60)));
    fprintf(stderr, p->is_terminal ? "\033[K\r" : "\n"); // what is printed next overwrites the line
}

// ---------------------------------------------------------------------------
// threads

typedef struct {
    const Tokenizer *t;
    Reader reader;
    TokenWriter train, val;
    State state;
    TextProgress progress;
    uint64_t taken, written; // slices
    uint64_t skipped;        // bytes without a token
    pthread_mutex_t lock;    // protects everything above except t
    pthread_cond_t turn;     // `written` has increased
} TextJob;

static uint64_t text_job_bytes(const TextJob *j) { return j->train.bytes + j->val.bytes; }

/* After a slice has been written: shows the progress, and saves the state if it is time to. */
static void text_job_report(TextJob *j, const Slice *s) {
    double now = seconds_now();
    progress_show(&j->progress, now, text_job_bytes(j), j->train.count + j->val.count, reader_consumed(&j->reader),
                  j->reader.corpus.size);
    if (!s->ends_document || now < j->state.next_save) return;
    Saved saved = {s->after,     j->train.count,        j->val.count,        j->train.bytes,
                   j->val.bytes, j->train.target_bytes, j->val.target_bytes, j->skipped};
    writer_sync(&j->train);
    writer_sync(&j->val);
    state_save(&j->state, &saved);
}

/* What each thread does: take a slice, encode it, wait until all slices before it are written, write it. */
static void tokenize_slices(TextJob *j) {
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
        if (s.begins && w->front != NO_TOKEN) writer_write(w, &w->front, NULL, 1);
        writer_write(w, ids, NULL, n);
        if (s.ends) writer_write(w, &j->t->eos, NULL, 1);
        w->bytes += s.len;
        j->skipped += skipped;
        j->written++;
        text_job_report(j, &s);
        pthread_cond_broadcast(&j->turn);
        pthread_mutex_unlock(&j->lock);
    }
    free(s.text);
    free(ids);
}

/* Checks that the documents are text, and refuses outputs that would replace an input. */
static void check_files(const TokensOptions *o, Corpus *corpus) {
    const Output train = {"--out-train", o->out_train}, val = {"--out-val", o->out_val};
    refuse_same_outputs(&train, &val);
    refuse_replaced_input(&train, o->tokenizer);
    refuse_replaced_input(&val, o->tokenizer);
    refuse_replaced_documents(&train, corpus, 1);
    refuse_replaced_documents(&val, corpus, 1);
    corpus_check(corpus, o->field);
    refuse_replaced_documents(&train, corpus, 0);
    refuse_replaced_documents(&val, corpus, 0);
}

/* Opens the outputs: new ones, or those of an interrupted run of the same command, which it continues. */
static void text_job_open_outputs(TextJob *j, const TokensOptions *o) {
    Saved saved;
    if (!state_open(&j->state, o, j->t, &j->reader, &saved)) {
        writer_open(&j->train, o->out_train, j->t, 0);
        writer_open(&j->val, o->out_val, j->t, 0);
        return;
    }
    printf("continuing after %" PRIu64 " documents, which an interrupted run has tokenized\n", saved.after.documents);
    writer_resume(&j->train, o->out_train, j->t, saved.train);
    writer_resume(&j->val, o->out_val, j->t, saved.val);
    j->train.bytes = saved.train_bytes;
    j->val.bytes = saved.val_bytes;
    j->train.target_bytes = saved.train_target_bytes;
    j->val.target_bytes = saved.val_target_bytes;
    j->skipped = saved.skipped;
    reader_continue(&j->reader, &saved.after);
}

static void print_skipped(const TextJob *j) {
    const Reader *r = &j->reader;
    if (j->t->front != NO_TOKEN) {
        printf("each document begins with ");
        print_token(j->t, j->t->front, stdout);
        printf(", which the tokenizer puts in front of a text\n");
    }
    if (j->skipped) printf("%" PRIu64 " bytes were skipped: this tokenizer has no token for them\n", j->skipped);
    if (r->empty) printf("%" PRIu64 " lines were skipped: their text is empty\n", r->empty);
    if (r->corpus.skipped) printf("%zu files were skipped: they are empty or not UTF-8 text\n", r->corpus.skipped);
    if (r->corpus.links) printf("%zu symbolic links to folders, or to nothing, were not followed\n", r->corpus.links);
}

/* One of the outputs would be empty. */
static void refuse_too_little(TextJob *j) {
    const Reader *r = &j->reader;
    outputs_are_resumable = 0; // continuing would end here again
    unlink(j->state.path);
    if (r->corpus.json_lines)
        user_error("%" PRIu64 " documents are too few to give whole ones to both training and validation: give more "
                   "documents, or a larger --val-fraction",
                   r->documents);
    user_error("%.1f KB of text are too few to split into training and validation; give at least about %d KB",
               (double)text_job_bytes(j) / 1e3, (int)((double)PARAGRAPH_MIN / r->split.fraction / 1000) + 1);
}

static void reader_open(Reader *r, const TokensOptions *o) {
    r->split.fraction = o->val_fraction;
    r->slice = (size_t)o->slice;
    r->field = o->field;
    for (int i = 0; i < o->num_files; i++) corpus_add_path(&r->corpus, o->files[i]);
}

/* Turns the texts that the options name into two token files. */
static void tokenize_texts(const TokensOptions *o) {
    TextJob j = ZERO;
    Reader *r = &j.reader;
    if (o->threads) omp_set_num_threads(o->threads);
    reader_open(r, o);
    double started = seconds_now();
    Tokenizer *t = tokenizer_open(o->tokenizer);
    check_files(o, &r->corpus);
    r->paragraph = paragraph_size(&r->corpus, r->split.fraction);
    r->cut = t->llama3 ? cut_open() : NULL;
    r->match = pcre2_match_data_create(1, NULL);
    j.t = t;
    pthread_mutex_init(&j.lock, NULL);
    pthread_cond_init(&j.turn, NULL);
    text_job_open_outputs(&j, o);
    uint64_t bytes_before = text_job_bytes(&j);
    progress_open(&j.progress, bytes_before, j.train.count + j.val.count, reader_consumed(r));
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    {
        threads++;
        tokenize_slices(&j);
    }
    if (j.progress.is_terminal && j.progress.is_shown) fprintf(stderr, "\n");
    print_skipped(&j);
    if (!j.val.count || !j.train.count) refuse_too_little(&j);
    writer_close(&j.train);
    writer_print(&j.train);
    writer_close(&j.val);
    writer_print(&j.val);
    unlink(j.state.path);
    free(j.state.path);
    tokenizer_files_write(o->out_train, o->tokenizer, t);
    double megabytes = (double)(text_job_bytes(&j) - bytes_before) / 1e6, seconds = seconds_now() - started;
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    printf("%.2f MB in %.2f s on %d threads: %.1f MB/s with at most %ld MB of memory\n", megabytes, seconds, threads,
           megabytes / seconds, use.ru_maxrss / 1000);
    if (r->cut) pcre2_code_free(r->cut);
    pcre2_match_data_free(r->match);
    tokenizer_close(t);
}

#endif
