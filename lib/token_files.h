/* token_files.h: the files that --data, --val and --eval name, as one data set of samples, and how a sample is read.
 *
 * A sample is T + 1 consecutive tokens: T inputs and, one position later, T targets. Samples are shuffled in windows
 * of `pieces` consecutive samples each: 1, unless a recipe has later stages with longer sequences.
 * A caller may rely on this: every token is below the vocabulary size, and a data set never changes once it is open.
 */
#ifndef TOKEN_FILES_H
#define TOKEN_FILES_H
#include "mixture.h" // defines: DataList, Mixture; includes base.h

// ---------------------------------------------------------------------------
// token files (little-endian): a header, the tokens, and with TOKEN_FILE_MASKED one byte per token: 0 = not a target

enum { TOKEN_FILE_MASKED = 1, TOKEN_FILE_WINDOW_SHIFT = 8, IGNORED_TARGET = -100 }; // -100: PyTorch's ignore_index
enum { TOKEN_FILE_WINDOW_MAX = (1 << 24) - 1 }; // the flags have 24 bits for the window
#define TOKEN_FILE_MAGIC "LLM3TOK1"

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t width; // bytes per token, 2 or 4
    uint32_t vocab_size;
    uint32_t flags;        // TOKEN_FILE_MASKED; from bit 8 on, tokens in a window of packed conversations, or 0
    uint64_t count;        // tokens
    uint8_t tokenizer[32]; // SHA-256 of the tokenizer's file
} TokenFileHeader;
static_assert(sizeof(TokenFileHeader) == 64, "the header has no padding");

typedef struct {
    char *path;
    int fd;
    TokenFileHeader header;
    dev_t device; // with `inode`, identifies the file under all its names
    ino_t inode;
    int64_t windows;      // windows in this file
    int64_t first_window; // windows in the files before it
} TokenFile;

/* The files of one entry of --data. */
typedef struct {
    char *pattern; // a path or a glob
    int number;    // among the sources of the run, on which the order of its windows depends
    int first_file, num_files;
    int64_t first_window, windows, tokens;
    int64_t used; // windows that the run has used of it before this mixture
} DataSource;

typedef struct {
    TokenFile *files; // (num_files)
    int num_files;
    DataSource *sources; // (num_sources)
    int num_sources;
    Mixture *mixture; // the schedule of the sources; NULL: they have no weights
    int T, vocab_size;
    int pieces;              // samples in a window
    int64_t windows, tokens; // in all files
    int32_t document_end;    // the token that ends a document; used by --doc-mask only
    uint64_t fingerprint;    // hash of all headers and of the mixture
} Dataset;

static void token_file_check(const TokenFile *f, int64_t bytes, int T, int vocab_size) {
    const TokenFileHeader *h = &f->header;
    if (h->version != 1)
        user_error("%s has token file version %u, expected 1: make it again with dev/data/text.sh", f->path,
                   h->version);
    if ((h->width != 2 && h->width != 4) || (h->flags & 255 & ~(uint32_t)TOKEN_FILE_MASKED))
        user_error("%s: token width %u with flags %u, expected width 2 or 4 and flags 0 or 1: make it again with "
                   "dev/data/text.sh",
                   f->path, h->width, h->flags & 255);
    uint64_t bytes_per_token = h->width + (h->flags & TOKEN_FILE_MASKED ? 1u : 0u);
    if (h->count > UINT64_MAX / 8 || (uint64_t)bytes != sizeof *h + h->count * bytes_per_token)
        user_error("%s is truncated or damaged: its header announces %" PRIu64 " tokens of %" PRIu64
                   " bytes after the 64 bytes of the header, but the file has %" PRId64
                   " bytes: copy it again or make it again with dev/data/text.sh",
                   f->path, h->count, bytes_per_token, bytes);
    if (h->vocab_size > (uint32_t)vocab_size)
        user_error(
            "%s was made with a vocabulary of %u tokens, the model has %d: choose --vocab-size %u or another --data",
            f->path, h->vocab_size, vocab_size, h->vocab_size);
    uint32_t window = h->flags >> TOKEN_FILE_WINDOW_SHIFT;
    if (window && window != (uint32_t)T)
        user_error("%s has conversations packed into windows of %u tokens, --seq is %d: use --seq %u, or pack them "
                   "again with build/data/chat --pack %d",
                   f->path, window, T, window, T);
}

static TokenFile token_file_open(const char *path, int T, int vocab_size) {
    TokenFile f = ZERO;
    struct stat info;
    f.path = checked_strdup(path);
    f.fd = open_regular_file(path, &info);
    if (f.fd < 0) user_error("cannot read token file %s (%s): make one with dev/data/text.sh", path, strerror(errno));
    int64_t got = read_bytes_at(f.fd, &f.header, sizeof f.header, 0);
    if (got < 0) user_error("cannot read token file %s: %s", path, strerror(errno));
    if (got != (int64_t)sizeof f.header || memcmp(f.header.magic, TOKEN_FILE_MAGIC, 8))
        user_error("%s is not a token file: expected it to begin with %s; make one with dev/data/text.sh", path,
                   TOKEN_FILE_MAGIC);
    f.device = info.st_dev;
    f.inode = info.st_ino;
    token_file_check(&f, (int64_t)info.st_size, T, vocab_size);
    return f;
}

// ---------------------------------------------------------------------------
// data sets

/* Opens the files that the source's pattern matches, in alphabetical order.
 * `partial`: the last window of a file may be shorter than T + 1 tokens; evaluation uses it to count every token. */
static void source_open(Dataset *d, DataSource *source, int partial) {
    glob_t found;
    int failed = glob(source->pattern, 0, NULL, &found);
    int64_t length = (int64_t)d->T * d->pieces; // of a window
    if (failed == GLOB_NOSPACE) run_failure("out of memory: could not list the files of %s", source->pattern);
    if (failed) user_error("no token file at %s: make one with dev/data/kjv.sh or dev/data/text.sh", source->pattern);
    source->first_file = d->num_files;
    source->num_files = (int)found.gl_pathc;
    source->first_window = d->windows;
    d->files = (TokenFile *)checked_realloc(d->files, sizeof *d->files * (size_t)(d->num_files + source->num_files));
    for (int i = 0; i < source->num_files; i++) {
        TokenFile *f = &d->files[d->num_files++];
        *f = token_file_open(found.gl_pathv[i], d->T, d->vocab_size);
        int64_t targets = max_i64(0, (int64_t)f->header.count - 1); // every token but the file's first is a target
        f->windows = partial ? blocks_of(targets, length) : targets / length;
        f->first_window = d->windows;
        d->windows += f->windows;
        source->tokens += (int64_t)f->header.count;
        d->fingerprint = hash_bytes(d->fingerprint, &f->header, sizeof f->header);
    }
    source->windows = d->windows - source->first_window;
    d->tokens += source->tokens;
    globfree(&found);
}

/* A file in two sources would count twice. */
static void sources_check_apart(const Dataset *d) {
    for (int k = 1; k < d->num_sources; k++)
        for (int i = d->sources[k].first_file; i < d->sources[k].first_file + d->sources[k].num_files; i++)
            for (int other = 0; other < d->sources[k].first_file; other++)
                if (d->files[i].device == d->files[other].device && d->files[i].inode == d->files[other].inode)
                    user_error("%s belongs to '%s' and, as %s, also to an earlier entry of the list: each token file "
                               "may be listed once; change the globs, or remove one",
                               d->files[i].path, d->sources[k].pattern, d->files[other].path);
}

/* Gives the sources their shares, those of the weights in `list`. */
static void dataset_mix(Dataset *d, const DataList *list) {
    int units[MOST_SOURCES];
    for (int k = 0; k < d->num_sources; k++)
        if (!d->sources[k].windows)
            user_error("%s holds %" PRId64 " tokens, a sample of --seq %d needs %d: use a shorter --seq, more text, or "
                       "leave it out",
                       d->sources[k].pattern, d->sources[k].tokens, d->T * d->pieces, d->T * d->pieces + 1);
    shares_of_weights(list, units);
    d->mixture = new_array(Mixture, 1);
    mixture_open(d->mixture, units, d->num_sources);
    d->fingerprint = hash_bytes(d->fingerprint, d->mixture->quota, sizeof d->mixture->quota);
    for (int k = 0; k < d->num_sources; k++)
        d->fingerprint = hash_bytes(d->fingerprint, &d->sources[k].num_files, sizeof d->sources[k].num_files);
}

/* Opens the files of a list (mixture.h): paths or globs, separated by commas, with weights or without. A window has
 * `pieces` samples of T tokens.
 * `partial`: windows may be shorter, as in source_open; weights are refused, because every token counts.
 * `always_mixes`: a single source with a weight is a mixture, too; otherwise it has epochs as one without a weight. */
static Dataset dataset_open_windows(const char *text, int T, int pieces, int vocab_size, int partial,
                                    int always_mixes) {
    Dataset d = ZERO;
    DataList list;
    data_list_parse(&list, text);
    d.num_sources = list.count;
    d.sources = new_array(DataSource, list.count);
    d.T = T;
    d.pieces = pieces;
    d.vocab_size = vocab_size;
    d.fingerprint = HASH_START;
    if (partial && list.has_weights)
        user_error("%s: found weights, but --val and --eval use every token once: remove the colons and what follows "
                   "them",
                   text);
    for (int k = 0; k < list.count; k++) {
        d.sources[k].pattern = checked_strdup(list.entries[k].pattern);
        d.sources[k].number = k;
        source_open(&d, &d.sources[k], partial);
    }
    sources_check_apart(&d);
    if (!d.windows)
        user_error("%s holds %" PRId64 " tokens, a sample of --seq %d needs %d: use a shorter --seq or more text", text,
                   d.tokens, T * pieces, partial ? 2 : T * pieces + 1);
    if (list.has_weights && (list.count > 1 || always_mixes)) dataset_mix(&d, &list);
    data_list_close(&list);
    return d;
}

/* The same with windows of one sample. */
static Dataset dataset_open(const char *text, int T, int vocab_size, int partial) {
    return dataset_open_windows(text, T, 1, vocab_size, partial, 0);
}

static int64_t dataset_samples(const Dataset *d) { return d->windows * d->pieces; }

static void dataset_close(Dataset *d) {
    for (int i = 0; i < d->num_files; i++) {
        close(d->files[i].fd);
        free(d->files[i].path);
    }
    for (int k = 0; k < d->num_sources; k++) free(d->sources[k].pattern);
    if (d->mixture) mixture_close(d->mixture);
    free(d->mixture);
    free(d->sources);
    free(d->files);
}

/* Windows that the run has used of a source after the first n windows of the mixture. */
static int64_t source_windows_used(const Dataset *d, int source, int64_t n) {
    return d->sources[source].used + mixture_count(d->mixture, source, n);
}

/* How many of the first n samples of the mixture come from a source. */
static int64_t mixture_samples(const Dataset *d, int source, int64_t n) {
    int64_t windows = n / d->pieces, begun = n % d->pieces; // samples of a window that is not complete
    int64_t whole = mixture_count(d->mixture, source, windows) * d->pieces;
    return begun && mixture_sample(d->mixture, windows).source == source ? whole + begun : whole;
}

static double source_share(const Dataset *d, int source) {
    return (double)d->mixture->quota[source] / d->mixture->period;
}

/* The shares of a mixture as text, such as "0.7, 0.3"; "" if the data set is not a mixture. */
static void dataset_shares(const Dataset *d, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int k = 0; d->mixture && k < d->num_sources && used < size; k++)
        used += (size_t)snprintf(text + used, size - used, "%s%.6g", k ? ", " : "", source_share(d, k));
}

/* Reads `n` tokens of a file, from token `first`, to `raw`, and their mask bytes behind them. Returns 0 on failure. */
static int token_file_read(const TokenFile *f, int64_t first, int64_t n, char *raw) {
    int64_t width = f->header.width;
    int64_t tokens_offset = (int64_t)sizeof(TokenFileHeader);
    int64_t mask_offset = tokens_offset + (int64_t)f->header.count * width;
    if (read_bytes_at(f->fd, raw, n * width, tokens_offset + first * width) != n * width) return 0;
    if (!(f->header.flags & TOKEN_FILE_MASKED)) return 1;
    return read_bytes_at(f->fd, raw + n * width, n, mask_offset + first) == n;
}

static uint32_t token_at(const char *raw, int64_t t, int width) {
    uint32_t token = 0;
    memcpy(&token, raw + t * width, width); // the file and the machine are little-endian
    return token;
}

/* Reads sample `index` to inputs (T) and targets (T), with `raw` (5·(T + 1) bytes) as scratch space. Returns the
 * number of targets, or -1 and a message in `error`. A sample past the last one is padding: it has no targets. */
static int dataset_sample(const Dataset *d, int64_t index, int32_t *inputs, int32_t *targets, char *raw, char *error,
                          size_t error_size) {
    int64_t window = index / d->pieces, piece = index % d->pieces;
    for (int t = 0; t < d->T; t++) {
        inputs[t] = 0;
        targets[t] = IGNORED_TARGET;
    }
    if (window >= d->windows) return 0;
    const TokenFile *f = d->files;
    while (window >= f->first_window + f->windows) f++;
    int64_t first = ((window - f->first_window) * d->pieces + piece) * d->T;
    int64_t n = min_i64(d->T + 1, (int64_t)f->header.count - first);
    int width = (int)f->header.width, masked = f->header.flags & TOKEN_FILE_MASKED;
    const char *mask = raw + n * width;
    if (!token_file_read(f, first, n, raw)) {
        snprintf(error, error_size,
                 "%s: tokens %" PRId64 " to %" PRId64
                 " cannot be read: the file has changed since it was opened, or its disk fails; restore it and start "
                 "again",
                 f->path, first, first + n - 1);
        return -1;
    }
    int num_targets = 0;
    for (int t = 0; t < n; t++) {
        uint32_t token = token_at(raw, t, width);
        if (token >= (uint32_t)d->vocab_size) {
            snprintf(error, error_size,
                     "%s: token %" PRId64
                     " is %u, the vocabulary has %d: the file does not fit the model; make it again with the model's "
                     "tokenizer",
                     f->path, first + t, token, d->vocab_size);
            return -1;
        }
        if (t < d->T) inputs[t] = (int32_t)token;
        if (t == 0 || (masked && !mask[t])) continue;
        targets[t - 1] = (int32_t)token;
        num_targets++;
    }
    return num_targets;
}

/* docs (T): the number of documents that ended before each token of the window, for --doc-mask. The token
 * `document_end` still belongs to the document that it ends. */
static void document_ids(int32_t *docs, const int32_t *inputs, int T, int32_t document_end) {
    int32_t ended = 0;
    for (int t = 0; t < T; t++) {
        docs[t] = ended;
        ended += inputs[t] == document_end;
    }
}

#endif
