/* token_files.h: the files that --data, --val and --eval name, as one data set of samples, and how a sample is read.
 *
 * A sample is T + 1 consecutive tokens: T inputs and, one position later, T targets. Samples are shuffled in windows
 * of `pieces` consecutive samples each: 1, unless a recipe has later periods with longer sequences.
 * A caller may rely on this: every token is below the vocabulary size, and a data set never changes once it is open.
 */
#ifndef TOKEN_FILES_H
#define TOKEN_FILES_H
#include "mixture.h" // defines: DataList, Mixture; includes base.h

// ---------------------------------------------------------------------------
// token files (little-endian): a header, the tokens, and with TOKEN_FILE_MASKED a byte per token with bits of TokenByte

enum { TOKEN_FILE_MASKED = 1, TOKEN_FILE_WINDOW_SHIFT = 8, IGNORED_TARGET = -100 }; // -100: PyTorch's ignore_index
typedef enum { TOKEN_IS_TARGET = 1, TOKEN_ENDS_DOCUMENT = 2 /* in files of version 2 */ } TokenByte;
enum { TOKEN_FILE_WINDOW_MAX = (1 << 24) - 1 }; // the flags have 24 bits for the window
#define TOKEN_FILE_MAGIC "LLM3TOK1"

enum { TOKEN_FILE_VERSION = 2 };
enum { HEADER_FINGERPRINTS = 3 };     // room for the SHA-256 of the same tokenizer's files in other formats
enum { TOKEN_FILE_FIRST_BYTES = 64 }; // the header of version 1, with which that of version 2 begins
enum { NO_ID = -1 };                  // the value of tokenizer.h's NO_TOKEN

typedef struct {
    char magic[8];
    uint32_t version; // 1 or TOKEN_FILE_VERSION
    uint32_t width;   // bytes per token, 2 or 4
    uint32_t vocab_size;
    uint32_t flags;        // TOKEN_FILE_MASKED; from bit 8 on, tokens in a window of packed conversations, or 0
    uint64_t count;        // tokens
    uint8_t tokenizer[32]; // SHA-256 of the tokenizer's file; all zero: not known
    // what follows is in version 2; of a file of version 1 it is not known
    int32_t document_end;      // the token that ends documents, or NO_ID
    int32_t front;             // the token that the tokenizer puts in front of texts, or NO_ID
    uint64_t target_bytes;     // bytes of the text of all targets
    uint32_t num_fingerprints; // of the tokenizer's files in other formats, in `fingerprints`
    uint32_t zero;
    uint8_t fingerprints[HEADER_FINGERPRINTS][32];
    uint64_t zeros;
} TokenFileHeader;
static_assert(sizeof(TokenFileHeader) == 192, "the header has no padding");

static inline int64_t token_header_bytes(const TokenFileHeader *h) {
    return h->version == 1 ? (int64_t)TOKEN_FILE_FIRST_BYTES : (int64_t)sizeof *h;
}

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
    int number;    // index among the sources of the run, which seeds the shuffling of its windows
    int num_files;
    int64_t first_window, windows, tokens;
    int64_t used; // windows of it that earlier periods of the run have consumed
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
    int32_t document_end;    // the token that ends a document in files of version 1; NO_ID: not known
    int64_t targets;         // of data to evaluate on: how many there are, and the bytes of their text,
    int64_t target_bytes;    // or 0 if a file of version 1 does not say it
    uint64_t fingerprint;    // hash of all headers and of the mixture
} Dataset;

/* Opens a token file and checks its header. */
static TokenFile token_file_open(const char *path, int T, int vocab_size) {
    TokenFile f = ZERO;
    TokenFileHeader *h = &f.header;
    struct stat info;
    f.path = checked_strdup(path);
    f.fd = open_regular_file(path, &info);
    if (f.fd < 0) user_error("cannot read token file %s (%s): make one with dev/data/text.sh", path, strerror(errno));
    h->document_end = h->front = NO_ID;
    int64_t first = TOKEN_FILE_FIRST_BYTES, got = read_bytes_at(f.fd, h, first, 0);
    if (got < 0) user_error("cannot read token file %s: %s", path, strerror(errno));
    if (got != first || memcmp(h->magic, TOKEN_FILE_MAGIC, 8))
        user_error("%s is not a token file: expected it to begin with %s; make one with dev/data/text.sh", path,
                   TOKEN_FILE_MAGIC);
    int64_t rest = h->version == TOKEN_FILE_VERSION ? (int64_t)sizeof *h - first : 0;
    if (rest && read_bytes_at(f.fd, (char *)h + first, rest, first) != rest)
        user_error("%s is truncated within its header, expected one of %d bytes: copy it again or make it again with "
                   "dev/data/text.sh",
                   path, (int)sizeof *h);
    f.device = info.st_dev;
    f.inode = info.st_ino;
    if (h->version < 1 || h->version > TOKEN_FILE_VERSION)
        user_error("%s has token file version %u, expected 1 or %d: make it again with dev/data/text.sh", path,
                   h->version, (int)TOKEN_FILE_VERSION);
    if (h->num_fingerprints > HEADER_FINGERPRINTS)
        user_error("%s has %u further fingerprints of its tokenizer, expected at most %d: make it again with "
                   "dev/data/text.sh",
                   path, h->num_fingerprints, (int)HEADER_FINGERPRINTS);
    if ((h->width != 2 && h->width != 4) || (h->flags & 255 & ~(uint32_t)TOKEN_FILE_MASKED))
        user_error("%s: token width %u with flags %u, expected width 2 or 4 and flags 0 or 1: make it again with "
                   "dev/data/text.sh",
                   path, h->width, h->flags & 255);
    uint64_t bytes_per_token = h->width + (h->flags & TOKEN_FILE_MASKED ? 1u : 0u);
    if (h->count > UINT64_MAX / 8 || (uint64_t)(info.st_size - token_header_bytes(h)) != h->count * bytes_per_token)
        user_error("%s is truncated or damaged: its header announces %" PRIu64 " tokens of %" PRIu64
                   " bytes after the %" PRId64 " bytes of the header, but the file has %" PRId64
                   " bytes: copy it again or make it again with dev/data/text.sh",
                   path, h->count, bytes_per_token, token_header_bytes(h), (int64_t)info.st_size);
    if (h->vocab_size > (uint32_t)vocab_size)
        user_error("%s was made with a vocabulary of %u tokens, the model has %d: choose --vocab-size %u or another "
                   "--data",
                   path, h->vocab_size, vocab_size, h->vocab_size);
    uint32_t window = h->flags >> TOKEN_FILE_WINDOW_SHIFT;
    if (window && window != (uint32_t)T)
        user_error("%s has conversations packed into windows of %u tokens, --seq is %d: use --seq %u, or pack them "
                   "again with tokens_llama3 --conversations --pack %d",
                   path, window, T, window, T);
    return f;
}

// ---------------------------------------------------------------------------
// data sets

/* Does the file not say with which tokenizer it was made? */
static inline int token_file_lacks_tokenizer(const TokenFile *f) {
    static const uint8_t unknown[32] = {0};
    return !memcmp(f->header.tokenizer, unknown, sizeof unknown);
}

/* The byte of each token begins at this offset of a file that has them. */
static int64_t token_bytes_offset(const TokenFileHeader *h) {
    return token_header_bytes(h) + (int64_t)h->count * (int64_t)h->width;
}

/* Does a token's byte mark a target? In version 1 any value but 0 does; version 2 has the bits of TokenByte. */
static int token_is_target(const TokenFileHeader *h, char byte) {
    return h->version == 1 ? byte != 0 : byte & TOKEN_IS_TARGET;
}

/* How many targets the file has, but no more than `enough` need be counted. Its first token is none. */
static int64_t token_file_targets(const TokenFile *f, int64_t enough) {
    enum { BLOCK = 1 << 16 };
    int64_t count = (int64_t)f->header.count, targets = 0;
    if (!(f->header.flags & TOKEN_FILE_MASKED)) return max_i64(0, count - 1);
    char *block = (char *)checked_malloc(BLOCK);
    for (int64_t at = 1; at < count && targets < enough; at += BLOCK) {
        int64_t n = min_i64(BLOCK, count - at);
        if (read_bytes_at(f->fd, block, n, token_bytes_offset(&f->header) + at) != n)
            user_error("%s: its mask cannot be read: the file has changed since it was opened, or its disk fails; "
                       "restore it and start again",
                       f->path);
        for (int64_t i = 0; i < n; i++) targets += token_is_target(&f->header, block[i]);
    }
    free(block);
    return targets;
}

/* The files that a path or pattern stands for, in alphabetical order, to be freed one by one: a path that exists is
 * that file, whatever characters it has. Returns their number. */
static int pattern_expand(const char *pattern, char ***paths) {
    struct stat info;
    glob_t found = ZERO;
    int exists = !lstat(pattern, &info);
    if (!exists && glob(pattern, 0, NULL, &found) == GLOB_NOSPACE)
        run_failure("out of memory: could not list the files of %s", pattern);
    int count = exists ? 1 : (int)found.gl_pathc;
    *paths = new_array(char *, count);
    for (int i = 0; i < count; i++) (*paths)[i] = checked_strdup(exists ? pattern : found.gl_pathv[i]);
    globfree(&found);
    return count;
}

/* Opens the files that the source's pattern matches, in alphabetical order.
 * `partial`: the last window of a file may be shorter than T + 1 tokens; evaluation uses it to count every token. */
static void source_open(Dataset *d, DataSource *source, int partial) {
    char **paths;
    int64_t length = (int64_t)d->T * d->pieces; // of a window
    source->num_files = pattern_expand(source->pattern, &paths);
    if (!source->num_files)
        user_error("no token file at %s: make one with dev/data/kjv.sh or dev/data/text.sh", source->pattern);
    source->first_window = d->windows;
    d->files = (TokenFile *)checked_realloc(d->files, sizeof *d->files * (size_t)(d->num_files + source->num_files));
    for (int i = 0; i < source->num_files; i++) {
        TokenFile *f = &d->files[d->num_files++];
        *f = token_file_open(paths[i], d->T, d->vocab_size);
        free(paths[i]);
        int64_t targets = max_i64(0, (int64_t)f->header.count - 1); // every token but the file's first is a target
        f->windows = partial ? blocks_of(targets, length) : targets / length;
        f->first_window = d->windows;
        d->windows += f->windows;
        source->tokens += (int64_t)f->header.count;
        TokenFileHeader hashed = f->header;
        hashed.version = 1; // a file that was upgraded to version 2 is the same data
        d->fingerprint = hash_bytes(d->fingerprint, &hashed, TOKEN_FILE_FIRST_BYTES);
    }
    source->windows = d->windows - source->first_window;
    d->tokens += source->tokens;
    free(paths);
}

/* Gives the sources their shares, those of the weights in `list`. */
static void dataset_mix(Dataset *d, const DataList *list) {
    int units[MOST_SOURCES];
    for (int k = 0; k < d->num_sources; k++)
        if (!d->sources[k].windows)
            user_error("%s has no file with the %d tokens that a sample of --seq %d needs, but %" PRId64 " tokens in "
                       "all: use a shorter --seq or longer files, or remove this entry",
                       d->sources[k].pattern, d->T * d->pieces + 1, d->T * d->pieces, d->sources[k].tokens);
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
    d.document_end = NO_ID;
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
    for (int i = 1; i < d.num_files; i++) // a file that is listed twice, also under two names, would count twice
        for (int k = 0; k < i; k++)
            if (d.files[i].device == d.files[k].device && d.files[i].inode == d.files[k].inode)
                user_error("%s and %s are the same file, expected each token file once: change the globs, or remove "
                           "one",
                           d.files[k].path, d.files[i].path);
    if (!d.windows)
        user_error("%s has no file with the %d tokens that a sample of --seq %d needs, but %" PRId64
                   " tokens in all: use a shorter --seq or longer files",
                   text, partial ? 2 : T * pieces + 1, T * pieces, d.tokens);
    int says_bytes = partial;
    for (int i = 0; i < d.num_files && (partial || !d.targets); i++) {
        const TokenFileHeader *h = &d.files[i].header;
        d.targets += token_file_targets(&d.files[i], partial ? INT64_MAX : 1);
        d.target_bytes += (int64_t)h->target_bytes;
        says_bytes &= h->version > 1;
    }
    if (!says_bytes) d.target_bytes = 0;
    if (!d.targets)
        user_error("%s has no training target, so that no loss can be computed: its mask excludes every token; make it "
                   "again from conversations in which the assistant speaks",
                   text);
    if (list.has_weights && (list.count > 1 || always_mixes)) dataset_mix(&d, &list);
    data_list_close(&list);
    return d;
}

/* Opens the files like dataset_open_windows, with windows of one sample. */
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
    return (double)d->mixture->quota[source] / d->mixture->cycle;
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
    int64_t width = f->header.width, offset = token_header_bytes(&f->header) + first * width;
    if (read_bytes_at(f->fd, raw, n * width, offset) != n * width) return 0;
    if (!(f->header.flags & TOKEN_FILE_MASKED)) return 1;
    return read_bytes_at(f->fd, raw + n * width, n, token_bytes_offset(&f->header) + first) == n;
}

static uint32_t token_at(const char *raw, int64_t t, int width) {
    uint32_t token = 0;
    memcpy(&token, raw + t * width, width); // the file and the machine are little-endian
    return token;
}

/* Reads sample `index` to inputs (T) and targets (T), with `raw` (5·(T + 1) bytes) as scratch space; docs (T), unless
 * it is NULL, receives the number of documents that ended before each token, for --doc-mask. A token that ends a
 * document still belongs to it. Returns the number of targets, or -1 and a message in `error`. A sample past the last
 * one is padding: it has no targets. */
static int dataset_sample(const Dataset *d, int64_t index, int32_t *inputs, int32_t *targets, int32_t *docs, char *raw,
                          char *error, size_t error_size) {
    int64_t window = index / d->pieces, piece = index % d->pieces;
    for (int t = 0; t < d->T; t++) {
        inputs[t] = 0;
        targets[t] = IGNORED_TARGET;
        if (docs) docs[t] = 0;
    }
    if (window >= d->windows) return 0;
    const TokenFile *f = d->files;
    while (window >= f->first_window + f->windows) f++;
    int64_t first = ((window - f->first_window) * d->pieces + piece) * d->T;
    int64_t n = min_i64(d->T + 1, (int64_t)f->header.count - first);
    int width = (int)f->header.width, masked = f->header.flags & TOKEN_FILE_MASKED;
    int has_bits = masked && f->header.version > 1; // those of TokenByte
    int32_t document_end = f->header.version == 1 ? d->document_end : f->header.document_end, ended = 0;
    const char *bytes = raw + n * width; // (n) one for each token, if masked
    if (!token_file_read(f, first, n, raw)) {
        snprintf(error, error_size,
                 "%s: tokens %" PRId64 " to %" PRId64 " cannot be read: the file has changed since it was opened, or "
                 "its disk fails; restore it and start again",
                 f->path, first, first + n - 1);
        return -1;
    }
    int num_targets = 0;
    for (int t = 0; t < n; t++) {
        uint32_t token = token_at(raw, t, width);
        if (token >= (uint32_t)d->vocab_size) {
            snprintf(error, error_size,
                     "%s: token %" PRId64 " is %u, the vocabulary has %d: the file does not fit the model; make it "
                     "again with the model's tokenizer",
                     f->path, first + t, token, d->vocab_size);
            return -1;
        }
        if (t < d->T) inputs[t] = (int32_t)token;
        if (docs && t < d->T) docs[t] = ended;
        ended += has_bits ? (bytes[t] & TOKEN_ENDS_DOCUMENT) != 0 : (int32_t)token == document_end;
        if (t == 0 || (masked && !token_is_target(&f->header, bytes[t]))) continue;
        targets[t - 1] = (int32_t)token;
        num_targets++;
    }
    for (int64_t t = n; docs && t < d->T; t++) docs[t] = ended; // behind the file's last token
    return num_targets;
}

#endif
