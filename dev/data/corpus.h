/* corpus.h: what the tools of this folder share: options, the list of documents, where text may be cut, files out.
 *
 * A document is a text file. Files that the user names must be text; in folders, hidden files, token files,
 * tokenizers and whatever is not UTF-8 text are passed over. Documents may be larger than memory: corpus_check
 * reads each once through a small buffer and notes its length; the tools then read as much at a time as they want.
 */
#ifndef CORPUS_H
#define CORPUS_H
#include "../../tokenizer.h"
#include <dirent.h>

typedef struct { char *path; int named; uint64_t len; } Document; // named: given by the user, not found in a folder; len: bytes
typedef struct { Document *documents; size_t count, capacity, passed; uint64_t len; } Corpus; // passed: over, by corpus_check; len: of all

static inline void corpus_add(Corpus *c, const char *path, int named) {
    if (c->count == c->capacity) c->documents = (Document *)grown(c->documents, (c->capacity = 2 * c->capacity + 64) * sizeof *c->documents);
    c->documents[c->count].path = strdup(path);
    c->documents[c->count++].named = named;
}

static inline int ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* All files below a folder in the order of their names, so that the same folder gives the same tokens anywhere. */
static inline void corpus_walk(Corpus *c, const char *folder) {
    struct dirent **entries;
    int n = scandir(folder, &entries, NULL, alphasort); // no setlocale here: alphasort compares bytes
    if (n < 0) user_error("folder %s cannot be read: %s; expected a readable folder of text files", folder, strerror(errno));
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        char *path = (char *)checked_malloc(strlen(folder) + strlen(name) + 2);
        struct stat info;
        sprintf(path, "%s/%s", folder, name);
        if (name[0] != '.' && !ends_with(name, ".tok") && strcmp(name, "tokenizer.model") && !lstat(path, &info)) { // links could lead in a circle
            if (S_ISDIR(info.st_mode)) corpus_walk(c, path);
            else if (S_ISREG(info.st_mode) && info.st_size) corpus_add(c, path, 0);
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
}

static inline void corpus_add_path(Corpus *c, const char *path) {
    struct stat info;
    if (stat(path, &info)) user_error("%s cannot be found: %s; expected a text file or a folder of them", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) corpus_walk(c, path);
    else corpus_add(c, path, 1);
}

static inline FILE *document_open(const Document *d) {
    struct stat info;
    FILE *f = fopen(d->path, "rb");
    if (!f) user_error("%s cannot be opened: %s; expected a readable text file", d->path, strerror(errno));
    if (fstat(fileno(f), &info) || !S_ISREG(info.st_mode)) user_error("%s is no file on a disk, expected one: it is read twice; write the text to a file first", d->path);
    return f;
}

/* The next n bytes, as many as corpus_check has seen. */
static inline void document_read(const Document *d, FILE *f, char *text, size_t n) {
    size_t got = fread(text, 1, n, f);
    if (got != n) user_error("%s ended %zu bytes before its %" PRIu64 ": %s; it must not change while it is read", d->path, n - got, d->len, ferror(f) ? strerror(errno) : "cut short");
}

/* The document's length, 0 where it is to be passed over. */
static inline uint64_t document_length(const Document *d, char *buffer, size_t room) {
    FILE *f = document_open(d);
    uint64_t len = 0;
    for (size_t have = 0, n; (n = fread(buffer + have, 1, room - have, f)) || have;) {
        size_t valid = utf8_valid_length(buffer, have += n);
        const char *zero = (const char *)memchr(buffer, 0, valid);
        if (zero || have - valid > 3 || !n) { // three bytes may wait for the fourth of their character, but not for ever
            if (d->named)
                user_error("%s is not text: %s at byte %" PRIu64 "; expected UTF-8 (iconv -f latin1 -t utf-8 converts older text)", d->path,
                           zero ? "a zero byte" : "no UTF-8", len + (zero ? (uint64_t)(zero - buffer) : valid));
            fclose(f);
            return 0;
        }
        len += valid;
        memmove(buffer, buffer + valid, have -= valid);
    }
    if (ferror(f)) user_error("%s cannot be read: %s; expected a readable text file", d->path, strerror(errno));
    fclose(f);
    return len;
}

/* Keeps the documents that are text, with their lengths. */
static inline void corpus_check(Corpus *c) {
    enum { ROOM = 1 << 20 };
    char *buffer = (char *)checked_malloc(ROOM);
    size_t given = c->count;
    c->count = 0;
    for (size_t i = 0; i < given; i++) {
        Document d = c->documents[i];
        d.len = document_length(&d, buffer, ROOM);
        c->len += d.len;
        if (d.len) c->documents[c->count++] = d;
        else free(d.path);
    }
    free(buffer);
    c->passed = given - c->count;
    if (!c->count) user_error("%zu files were given, none with text in it; expected UTF-8 text", given);
}

/* Where text may be cut without a change in its tokens: behind a letter or a number that something else follows.
 * Of split_open's alternatives, those that take letters or numbers end with them, the others take none: there a piece
 * ends, whatever stands before it or behind. And none looks back, or ahead past the first character that is not blank. */
static inline pcre2_code *cut_open(void) { return expression_open("[" LETTER NUMBER "](?=[^" LETTER NUMBER "])", 0); }

/* The first such place in text[from .. len), or 0. `from` is the start of a character. */
static inline size_t cut_next(const pcre2_code *cut, pcre2_match_data *match, const char *text, size_t len, size_t from) {
    int rc = pcre2_match(cut, (PCRE2_SPTR)text + from, len - from, 0, 0, match, NULL);
    return rc > 0 ? from + pcre2_get_ovector_pointer(match)[1] : 0;
}

/* Output goes to PATH.partial, which replaces PATH only when it is whole. */
static inline FILE *output_open(const char *path) {
    char *partial = (char *)checked_malloc(strlen(path) + 16);
    sprintf(partial, "%s.partial", path);
    FILE *f = fopen(partial, "wb");
    if (!f) user_error("%s cannot be written: %s; expected a folder that exists and may be written to", partial, strerror(errno));
    free(partial);
    return f;
}

static inline void output_discard(FILE *f, const char *path) {
    char *partial = (char *)checked_malloc(strlen(path) + 16);
    sprintf(partial, "%s.partial", path);
    fclose(f);
    unlink(partial);
    free(partial);
}

static inline void output_close(FILE *f, const char *path) {
    char *partial = (char *)checked_malloc(strlen(path) + 16);
    sprintf(partial, "%s.partial", path);
    int failed = fflush(f) || ferror(f) || fsync(fileno(f));
    if (fclose(f) || failed || rename(partial, path)) user_error("%s could not be written whole: %s; is the disk full?", path, strerror(errno));
    free(partial);
}

/* If argv[*i] is `name`, its value, and *i moves on to it; else NULL. */
static inline const char *option_value(int argc, char **argv, int *i, const char *name) {
    if (strcmp(argv[*i], name)) return NULL;
    if (*i + 1 >= argc) user_error("%s was given without a value; expected one after it", name);
    return argv[++*i];
}
#endif
