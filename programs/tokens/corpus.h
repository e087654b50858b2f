/* corpus.h: what the tasks of tokens_llama3 share: input files, places where text may be cut, output files and token
 * files.
 *
 * A text file is a document; a file of JSON lines holds one on each line (json_lines.h). JSON lines are files named
 * *.jsonl, *.ndjson or *.jsonlines, and those named *.json or *.jl whose first line is an object with the text. Both
 * kinds may be compressed. A file that the user names must be one of these. In folders, hidden files, token files,
 * tokenizers, links to folders and everything that is not UTF-8 text are skipped; a file with several names there is
 * read once. Text files may be larger than memory: corpus_check reads each one through a small buffer and records its
 * length, and the tasks then read it piece by piece. */
#ifndef CORPUS_H
#define CORPUS_H
#include "../../lib/io/input.h"        // defines: input_open
#include "../../lib/io/output.h"       // defines: output_prepare, finish_results
#include "../../lib/io/token_files.h"  // defines: TokenFileHeader
#include "../shared/tokenizer_files.h" // defines: Tokenizer, TokenizerFiles, tokenizer_fingerprints
#include "json_lines.h"           // defines: JsonLines, lines_next; InputStream, stream_open, stream_read, ends_with
#include "../shared/text_input.h" // defines: UTF8_BYTE_ORDER_MARK, utf8_valid_length, with_room_for_one
#include <dirent.h>
#include <sys/file.h> // defines: flock

typedef struct {
    char *path;
    int named;         // named by the user, not found in a folder
    int is_json_lines; // JSON lines, or standard input
    int has_mark;      // a text file begins with a byte-order mark, which is no part of its text
    dev_t device;      // with `inode`, identifies the file under all its names
    ino_t inode;
    uint64_t len;    // bytes of a text file, decompressed; 0 for JSON lines, which are read only once
    uint64_t size;   // bytes of the file
    int64_t changed; // when it was last changed, in s since 1970
} InputFile;
typedef struct {
    InputFile *files;
    size_t count, capacity;
    size_t json_lines; // how many files are JSON lines
    size_t skipped;    // files that corpus_check skipped
    size_t links;      // symbolic links to folders, or to nothing, that were not followed
    uint64_t len;      // bytes of all text files, decompressed
    uint64_t size;     // bytes of all files; 0: not known
} Corpus;

static inline void corpus_add(Corpus *c, const char *path, int named) {
    c->files = (InputFile *)with_room_for_one(c->files, c->count, &c->capacity, sizeof *c->files);
    InputFile *f = &c->files[c->count++];
    memset(f, 0, sizeof *f);
    f->path = checked_strdup(path);
    f->named = named;
    f->is_json_lines = named_with(path, ".jsonl") || named_with(path, ".ndjson") || named_with(path, ".jsonlines") ||
                       !strcmp(path, "-");
}

/* What text.sh and model directories have next to texts. */
static inline int is_tokenizer_file(const char *name) {
    static const char *const names[] = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json",
                                        "chat_template.jinja"};
    int is_one = 0;
    for (int i = 0; i < 4; i++) is_one |= !strcmp(name, names[i]);
    return is_one;
}

/* Adds all files below a folder, sorted by name, so that the same folder gives the same tokens on every machine. */
static inline void corpus_walk(Corpus *c, const char *folder) {
    struct dirent **entries;
    int n = scandir(folder, &entries, NULL, alphasort); // no setlocale here: alphasort compares bytes
    if (n < 0)
        user_error("folder %s cannot be read: %s; expected a readable folder of text files", folder, strerror(errno));
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        char *path = (char *)checked_malloc(strlen(folder) + strlen(name) + 2);
        struct stat info;
        sprintf(path, "%s/%s", folder, name);
        if (name[0] != '.' && !ends_with(name, ".tok") && !is_tokenizer_file(name) && !lstat(path, &info)) {
            int is_link = S_ISLNK(info.st_mode), is_broken = is_link && stat(path, &info);
            int is_folder = !is_broken && S_ISDIR(info.st_mode);
            c->links += is_broken || (is_link && is_folder); // links to folders could form a cycle
            if (is_folder && !is_link) corpus_walk(c, path);
            else if (!is_broken && S_ISREG(info.st_mode) && info.st_size) corpus_add(c, path, 0);
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
}

static inline void corpus_add_path(Corpus *c, const char *path) {
    struct stat info;
    if (!strcmp(path, "-")) {
        corpus_add(c, path, 1);
        return;
    }
    if (stat(path, &info))
        user_error("%s cannot be found: %s; expected a text file or a folder of them", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) {
        corpus_walk(c, path);
        return;
    }
    refuse_other_compression(path);
    corpus_add(c, path, 1);
}

/* Opens a text file, which corpus_check reads once and the caller a second time. */
static inline void text_open(InputStream *s, const InputFile *file) {
    struct stat info;
    stream_open(s, file->path);
    if (fstat(fileno(s->file), &info) || !S_ISREG(info.st_mode))
        user_error("%s is not a regular file, but it is read twice: write the text to a file first, or pipe JSON lines "
                   "to tokens_llama3 with - as the file's name",
                   file->path);
    char mark[3];
    if (file->has_mark) stream_read(s, mark, sizeof mark);
}

/* Reads the next n bytes of a text file, which corpus_check has seen. */
static inline void text_read(InputStream *s, const InputFile *file, char *text, size_t n) {
    size_t got = stream_read(s, text, n);
    if (got != n)
        user_error("%s ended %zu bytes early, expected %" PRIu64 " bytes: it became shorter while it was read; repeat "
                   "the command when nothing writes to it",
                   file->path, n - got, file->len);
}

/* The text file's length in bytes, without a byte-order mark; 0 if it is to be skipped because it is not text. */
static inline uint64_t text_length(InputFile *file, char *buffer, size_t room) {
    InputStream s;
    uint64_t len = 0;
    size_t have = 0; // bytes in the buffer
    text_open(&s, file);
    for (;;) {
        size_t n = stream_read(&s, buffer + have, room - have);
        have += n;
        if (!have) break;
        if (!len && !file->has_mark && have >= 3 && !memcmp(buffer, UTF8_BYTE_ORDER_MARK, 3)) {
            file->has_mark = 1;
            have -= 3;
            memmove(buffer, buffer + 3, have);
            if (!have && n) continue;
        }
        size_t valid = utf8_valid_length(buffer, have);
        const char *zero = (const char *)memchr(buffer, 0, valid);
        if (zero || have - valid > 3 || !n) { // up to 3 bytes may be the beginning of a character that continues
            if (file->named)
                user_error("%s is not text: %s at byte %" PRIu64 "; expected UTF-8 (iconv -f %s -t utf-8 converts it)",
                           file->path, zero ? "a zero byte" : "invalid UTF-8",
                           len + (zero ? (uint64_t)(zero - buffer) : valid),
                           !len && !valid && (uint8_t)buffer[0] >= 0xFE ? "utf-16" : "latin1");
            stream_close(&s);
            return 0;
        }
        len += valid;
        have -= valid;
        memmove(buffer, buffer + valid, have);
    }
    stream_close(&s);
    return len;
}

/* Whether a file whose name leaves it open holds JSON lines: its first line that is not blank is an object with
 * `field`. Refuses a list of objects. */
static inline int holds_json_lines(const char *path, const char *field) {
    int holds = 0, is_list = 0;
    if (!named_with(path, ".json") && !named_with(path, ".jl")) return 0;
    JsonLines lines;
    size_t length;
    lines_open(&lines, path, field);
    for (char *line = lines_next(&lines, &length); line; line = lines_next(&lines, &length)) {
        const char *text = line;
        if (!strncmp(text, UTF8_BYTE_ORDER_MARK, 3)) text += 3;
        text += strspn(text, " \t\r");
        if (!is_list && *text == '[') {
            is_list = 1;
            text += 1 + strspn(text + 1, " \t\r");
        }
        if (!*text) continue;
        if (is_list && *text == '{')
            user_error(
                "%s is one list of objects, expected JSON lines, an object on each line: jq -c '.[]' %s >FILE.jsonl "
                "converts it",
                path, path);
        cJSON *json = is_list ? NULL : cJSON_ParseWithOpts(text, NULL, 1);
        holds = cJSON_IsObject(json) && cJSON_GetObjectItemCaseSensitive(json, field);
        cJSON_Delete(json);
        break;
    }
    lines_close(&lines);
    return holds;
}

static inline int by_file(const void *a, const void *b) {
    const InputFile *x = *(const InputFile *const *)a, *y = *(const InputFile *const *)b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode) return x->inode < y->inode ? -1 : 1;
    if (x->named != y->named) return x->named ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Removes files found in a folder that are listed under another name already. The name that the user gave is kept. */
static inline void corpus_remove_repeated(Corpus *c) {
    const InputFile **order = new_array(const InputFile *, c->count);
    uint8_t *repeated = new_array(uint8_t, c->count);
    size_t kept = 0;
    for (size_t i = 0; i < c->count; i++) {
        struct stat info;
        order[i] = &c->files[i];
        if (!strcmp(c->files[i].path, "-") || stat(c->files[i].path, &info)) continue;
        c->files[i].device = info.st_dev;
        c->files[i].inode = info.st_ino;
    }
    qsort(order, c->count, sizeof *order, by_file);
    for (size_t i = 1; i < c->count; i++)
        if (order[i]->inode && order[i]->inode == order[i - 1]->inode && order[i]->device == order[i - 1]->device)
            repeated[order[i] - c->files] = !order[i]->named;
    for (size_t i = 0; i < c->count; i++) {
        if (repeated[i]) free(c->files[i].path);
        else c->files[kept++] = c->files[i];
    }
    c->count = kept;
    free(order);
    free(repeated);
}

/* Keeps the files that are text or JSON lines with the text in `field`, and records the lengths of the text files. */
static inline void corpus_check(Corpus *c, const char *field) {
    enum { ROOM = 1 << 20 };
    char *buffer = (char *)checked_malloc(ROOM);
    corpus_remove_repeated(c);
    size_t given = c->count;
    int has_standard_input = 0;
    c->count = 0;
    for (size_t i = 0; i < given; i++) {
        InputFile f = c->files[i];
        struct stat info;
        if (!f.is_json_lines) f.is_json_lines = holds_json_lines(f.path, field);
        if (!f.is_json_lines) f.len = text_length(&f, buffer, ROOM);
        c->json_lines += (size_t)f.is_json_lines;
        if (!strcmp(f.path, "-")) has_standard_input = 1;
        else if (!stat(f.path, &info)) {
            f.size = (uint64_t)info.st_size;
            f.changed = (int64_t)info.st_mtime;
        }
        if (f.len || f.is_json_lines) {
            c->files[c->count++] = f;
            c->len += f.len;
            c->size += f.size;
        } else free(f.path);
    }
    free(buffer);
    if (has_standard_input) c->size = 0; // the size of all inputs is not known
    c->skipped = given - c->count;
    if (!c->count) user_error("%zu files were given, none with text in it; expected UTF-8 text", given);
}

/* Matches the places where text may be cut without changing its tokens: after a letter or number that is followed by
 * another character. Each alternative of llama3_split either ends with letters or numbers or contains none,
 * so a piece always ends there, whatever precedes or follows. And no alternative looks back, or ahead beyond the first
 * character that is not white space. */
static inline pcre2_code *cut_open(void) {
    return expression_open("[" LETTERS NUMBERS "](?=[^" LETTERS NUMBERS "])", 0);
}

/* The first such place in text[from .. len), or 0 if there is none. `from` is the start of a character. */
static inline size_t cut_next(const pcre2_code *cut, pcre2_match_data *match, const char *text, size_t len,
                              size_t from) {
    int rc = pcre2_match(cut, (PCRE2_SPTR)text + from, len - from, 0, 0, match, NULL);
    return rc > 0 ? from + pcre2_get_ovector_pointer(match)[1] : 0;
}

/* Output is written to PATH.partial, which is renamed to PATH when it is complete, or removed if there is an error. */
static char *unfinished_outputs[4]; // their PATH.partial; NULL: an empty entry
static int outputs_are_resumable;   // 1: they stay after an error, because the next run continues them
static inline void outputs_discard(int code) {
    (void)code;
    if (outputs_are_resumable) return;
    for (size_t i = 0; i < sizeof unfinished_outputs / sizeof unfinished_outputs[0]; i++)
        if (unfinished_outputs[i]) unlink(unfinished_outputs[i]);
}

static inline char *path_with(const char *path, const char *end) {
    char *longer = (char *)checked_malloc(strlen(path) + strlen(end) + 1);
    return strcat(strcpy(longer, path), end);
}

/* A new, empty file. A file of this name is removed first, because it could be a link to another one. */
static inline FILE *create_file(const char *path, const char *mode) {
    struct stat info;
    if (!lstat(path, &info) && !S_ISDIR(info.st_mode)) unlink(path);
    FILE *f = fopen(path, mode);
    if (!f)
        user_error("%s cannot be written: %s; expected a folder that exists and may be written to", path,
                   strerror(errno));
    return f;
}

/* Locks an output, which its run holds until it ends. */
static inline void output_lock(int fd, const char *partial) {
    if (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) // file systems without locks: nothing is refused
        user_error("%s is being written by another run: wait until it ends, or choose another name for the output",
                   partial);
}

/* Refuses the output of a run that is still going on. */
static inline void refuse_locked(const char *partial) {
    struct stat info;
    int fd = lstat(partial, &info) || !S_ISREG(info.st_mode) ? -1 : open(partial, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    output_lock(fd, partial);
    close(fd);
}

/* `resume`: continues PATH.partial, which must exist, instead of creating it. */
static inline FILE *output_open(const char *path, int resume) {
    char *partial = path_with(path, ".partial"), **slot = unfinished_outputs;
    struct stat info;
    if (!stat(path, &info) && S_ISDIR(info.st_mode)) user_error("%s is a folder, expected the name of a file", path);
    refuse_locked(partial);
    FILE *f = resume ? fopen(partial, "r+b") : create_file(partial, "wbx");
    if (!f) user_error("%s cannot be written: %s; expected the file of an interrupted run", partial, strerror(errno));
    output_lock(fileno(f), partial);
    while (*slot) slot++; // no tool writes four files
    *slot = partial;
    process_end.last_words = outputs_discard;
    return f;
}

static inline void output_close(FILE *f, const char *path) {
    char *partial = path_with(path, ".partial"), **slot = unfinished_outputs;
    int failed = fflush(f) || ferror(f) || fsync(fileno(f));
    if (fclose(f) || failed || rename(partial, path))
        user_error("%s could not be written completely: %s; is the disk full?", path, strerror(errno));
    while (!*slot || strcmp(*slot, partial)) slot++;
    free(*slot);
    free(partial);
    *slot = NULL;
}

// ---------------------------------------------------------------------------
// outputs must not replace inputs

typedef struct {
    const char *option, *path; // path NULL: the option was not given
} Output;

/* The ends of the names that an output is written under, one after the other. */
static const char *const output_ends[] = {"", ".partial", ".mask.partial", ".state", ".state.partial"};
enum { OUTPUT_ENDS = sizeof output_ends / sizeof output_ends[0] };

/* Whether both paths lead to the same existing file: by another spelling, a symbolic link or a hard link. */
static inline int is_same_file(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Whether both paths are the same name in the same folder. The file need not exist. */
static inline int is_same_name(const char *a, const char *b) {
    char folders[2][4096];
    const char *names[] = {a, b};
    for (int i = 0; i < 2; i++) {
        const char *slash = strrchr(names[i], '/');
        path_beside(folders[i], sizeof folders[i], names[i], ".");
        if (slash) names[i] = slash + 1;
    }
    return !strcmp(names[0], names[1]) && is_same_file(folders[0], folders[1]);
}

/* Refuses an output that would replace this input. */
static inline void refuse_replaced_input(const Output *out, const char *input) {
    for (int i = 0; i < OUTPUT_ENDS && out->path; i++) {
        char *path = path_with(out->path, output_ends[i]);
        if (is_same_file(path, input))
            user_error("%s %s would overwrite the input %s: choose another name for the output", out->option, out->path,
                       input);
        free(path);
    }
}

/* Refuses two outputs that would overwrite each other. */
static inline void refuse_same_outputs(const Output *a, const Output *b) {
    for (int i = 0; i < OUTPUT_ENDS * OUTPUT_ENDS && a->path && b->path; i++) {
        char *x = path_with(a->path, output_ends[i / OUTPUT_ENDS]);
        char *y = path_with(b->path, output_ends[i % OUTPUT_ENDS]);
        if (is_same_name(x, y))
            user_error("%s %s and %s %s would overwrite each other: choose two names", a->option, a->path, b->option,
                       b->path);
        free(x);
        free(y);
    }
}

/* Refuses an output that would replace an input document. `only_named`: compares only with the files that the user
 * named, for a call before corpus_check. After it only text is left, so that the output of an earlier run in a folder
 * may be replaced. */
static inline void refuse_replaced_documents(const Output *out, const Corpus *c, int only_named) {
    for (size_t i = 0; i < c->count; i++)
        if (c->files[i].named || !only_named) refuse_replaced_input(out, c->files[i].path);
}

// ---------------------------------------------------------------------------
// token files

typedef struct {
    const char *path;
    FILE *file;
    FILE *mask; // one byte per token, in an unnamed file until the number of tokens is known; NULL: no mask
    const Tokenizer *t;
    int32_t front;                  // the token that documents begin with, or NO_TOKEN
    uint64_t target_bytes;          // of the text of all targets
    uint32_t width;                 // bytes per token
    uint32_t window;                // tokens of a window that conversations are packed into; 0: not packed
    uint8_t *is_special;            // (vocab_size)
    uint64_t count, targets, bytes; // so far: tokens, tokens that are targets, bytes of text
} TokenWriter;

/* Writes the header; until the file is complete, only its place matters. */
static inline void writer_header(const TokenWriter *w, int is_complete) {
    TokenFileHeader h = ZERO;
    static uint8_t known[MOST_FINGERPRINTS][32]; // the same for both outputs
    static int count;
    if (is_complete && !count) count = tokenizer_fingerprints(w->t, known);
    memcpy(h.magic, TOKEN_FILE_MAGIC, sizeof h.magic);
    h.version = TOKEN_FILE_VERSION;
    h.width = w->width;
    h.vocab_size = (uint32_t)w->t->vocab_size;
    h.flags = (w->mask ? (uint32_t)TOKEN_FILE_MASKED : 0) | w->window << TOKEN_FILE_WINDOW_SHIFT;
    h.count = w->count;
    h.document_end = w->t->eos;
    h.front = w->front;
    h.target_bytes = w->target_bytes;
    memcpy(h.tokenizer, w->t->fingerprint, sizeof h.tokenizer);
    if (is_complete) h.num_fingerprints = (uint32_t)count - 1;
    memcpy(h.fingerprints, known[1], 32 * (size_t)h.num_fingerprints);
    rewind(w->file);
    fwrite(&h, sizeof h, 1, w->file);
}

static inline uint32_t token_width(const Tokenizer *t) { return t->vocab_size <= 65536 ? 2 : 4; }

static inline void writer_begin(TokenWriter *w, const char *path, const Tokenizer *t, int resume) {
    w->path = path;
    w->t = t;
    w->front = t->front;
    w->width = token_width(t);
    w->is_special = new_array(uint8_t, t->vocab_size);
    for (int i = 0; i < t->num_special; i++) w->is_special[t->special[i]] = 1;
    w->file = output_open(path, resume);
}

static inline void writer_open(TokenWriter *w, const char *path, const Tokenizer *t, int masked) {
    writer_begin(w, path, t, 0);
    if (masked) {
        char *name = path_with(path, ".mask.partial");
        w->mask = create_file(name, "w+bx");
        unlink(name);
        free(name);
    }
    writer_header(w, 0); // writer_close writes it again
}

/* Continues an unfinished file without a mask after its first `count` tokens; what follows them is removed. */
static inline void writer_resume(TokenWriter *w, const char *path, const Tokenizer *t, uint64_t count) {
    writer_begin(w, path, t, 1);
    w->count = count;
    off_t end = (off_t)(sizeof(TokenFileHeader) + count * w->width);
    if (ftruncate(fileno(w->file), end) || fseeko(w->file, end, SEEK_SET))
        user_error("%s.partial cannot be continued: %s; remove it to start over", path, strerror(errno));
}

/* Waits until the tokens so far are on the disk. */
static inline void writer_sync(TokenWriter *w) {
    if (fflush(w->file) || fsync(fileno(w->file)))
        user_error("%s.partial cannot be written to: %s; is the disk full?", w->path, strerror(errno));
}

/* Converts ids to the width that the file has, in place. */
static inline void writer_narrow(const TokenWriter *w, int32_t *ids, size_t n) {
    for (size_t i = 0; i < n && w->width == 2; i++)
        memcpy((char *)ids + 2 * i, &ids[i], 2); // little-endian: the low bytes come first
}

/* Counts the targets among n tokens, and the bytes of their text. A file's first token is no target. */
static inline void writer_count(TokenWriter *w, const int32_t *tokens, const uint8_t *mask, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t id = token_at((const char *)tokens, (int64_t)i, (int)w->width);
        int is_target = (!mask || mask[i] & TOKEN_IS_TARGET) && w->count + i > 0;
        w->targets += is_target;
        if (is_target && id < (uint32_t)w->t->vocab_size && !w->is_special[id])
            w->target_bytes += token_length(w->t, (int32_t)id);
    }
}

/* Appends n tokens that writer_narrow has converted. mask: (n) bits of TokenByte; NULL for a file without a mask. */
static inline void writer_write(TokenWriter *w, const int32_t *tokens, const uint8_t *mask, size_t n) {
    if (fwrite(tokens, w->width, n, w->file) != n || (mask && fwrite(mask, 1, n, w->mask) != n))
        user_error("%s.partial cannot be written to: %s; is the disk full?", w->path, strerror(errno));
    writer_count(w, tokens, mask, n);
    w->count += n;
}

static inline void writer_close(TokenWriter *w) {
    char buffer[1 << 16];
    if (w->mask) rewind(w->mask);
    while (w->mask) {
        size_t n = fread(buffer, 1, sizeof buffer, w->mask);
        if (!n) break;
        fwrite(buffer, 1, n, w->file); // output_close checks for errors
    }
    if (w->mask &&
        (ferror(w->mask) || (uint64_t)ftello(w->file) != sizeof(TokenFileHeader) + w->count * (w->width + 1)))
        user_error("the mask of %s could not be written completely: %s; is the disk full?", w->path, strerror(errno));
    writer_header(w, 1);
    free(w->is_special);
    if (w->mask) fclose(w->mask);
    output_close(w->file, w->path);
}

/* Prints what a closed file holds. */
static inline void writer_print(const TokenWriter *w) {
    if (w->mask)
        printf("%s: %" PRIu64 " tokens, %" PRIu64 " of them targets, from %.2f MB of conversations\n", w->path,
               w->count, w->targets, (double)w->bytes / 1e6);
    else printf("%s: %" PRIu64 " tokens from %.2f MB of text\n", w->path, w->count, (double)w->bytes / 1e6);
}

// ---------------------------------------------------------------------------
// the tokenizer's files next to the token files, which training copies into checkpoints

/* Does the file `path` exist with other contents than `file`? */
static inline int is_other_file(const char *path, const TokenizerFile *file) {
    size_t length;
    char *text = entry_exists(path) ? read_regular_file(path, &length) : NULL;
    int differs = text && (length != file->length || memcmp(text, file->text, length));
    free(text);
    return differs;
}

/* Writes the files of the tokenizer `t`, which was read from `path`, next to the token file `out`. What exists is kept:
 * if it is of another tokenizer, none is written. */
static inline void tokenizer_files_write(const char *out, const char *path, const Tokenizer *t) {
    char name[4096];
    size_t length;
    TokenizerFiles files = ZERO;
    char *text = tokenizer_read_file(path, &length);
    tokenizer_files_open(&files, path, text, length, t, NULL, NULL, 0);
    const TokenizerCopies *all = &files.copies;
    int is_taken = 0;
    for (int i = 0; i < all->count && !is_taken; i++) {
        path_beside(name, sizeof name, out, all->files[i].name);
        is_taken = strcmp(all->files[i].name, "generation_config.json") && is_other_file(name, &all->files[i]);
    }
    if (is_taken)
        fprintf(stderr,
                "note: %s is not of the tokenizer %s, whose files are therefore not written next to %s: train with "
                "--tokenizer %s\n",
                name, path, out, path);
    for (int i = 0; i < all->count && !is_taken; i++) {
        path_beside(name, sizeof name, out, all->files[i].name);
        if (entry_exists(name)) continue;
        FILE *f = create_file(name, "wbx");
        fwrite(all->files[i].text, 1, all->files[i].length, f);
        if (fclose(f)) user_error("%s could not be written: %s; is the disk full?", name, strerror(errno));
    }
    tokenizer_files_close(&files);
    free(text);
}

/* Decides which text is for validation: documents, or paragraphs where there are few documents. */
typedef struct {
    double fraction;       // of the text that is for validation
    uint64_t seen, chosen; // documents, or bytes of paragraphs, so far; those of them that are for validation
} ValidationSplit;

/* Whether the next document is for validation. On average one of 1 / fraction is; a hash decides which, so that neither
 * length nor an order that repeats does. */
static inline int is_validation_document(ValidationSplit *c) {
    double place = (double)c->chosen + (double)(mix64(c->chosen + 1) >> 11) * 0x1p-53;
    int val = c->fraction * (double)++c->seen > place;
    c->chosen += (uint64_t)val;
    return val;
}

/* Whether the next paragraph, of `len` bytes, is for validation. Spreads them evenly: it is taken if that brings the
 * number of chosen bytes closer to their share. */
static inline int is_validation_paragraph(ValidationSplit *c, size_t len) {
    double share = c->fraction * (double)(c->seen + len / 2);
    int val = c->fraction > 0 && (double)c->chosen + (double)len / 2 <= share;
    c->seen += len;
    c->chosen += val ? len : 0;
    return val;
}

#endif
