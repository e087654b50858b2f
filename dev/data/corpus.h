/* corpus.h: what the two tools of this folder share: options, the list of documents, and whole files in and out.
 *
 * A document is a text file. Files that the user names must be text; in folders, hidden files, token files,
 * tokenizers and whatever is not UTF-8 text are passed over.
 */
#ifndef CORPUS_H
#define CORPUS_H
#include "../../tokenizer.h"
#include <dirent.h>

typedef struct { char *path; int named; } Document; // named: given by the user, not found in a folder
typedef struct { Document *documents; size_t count, capacity; } Corpus;

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

/* The document's text, or NULL where it is to be passed over. */
static inline char *document_read(const Document *d, size_t *len) {
    FILE *f = fopen(d->path, "rb");
    size_t capacity = 1 << 16, n;
    char *text = (char *)checked_malloc(capacity);
    if (!f) user_error("%s cannot be opened: %s; expected a readable text file", d->path, strerror(errno));
    for (*len = 0; (n = fread(text + *len, 1, capacity - *len, f)); *len += n)
        if (*len + n == capacity) text = (char *)grown(text, capacity *= 2);
    if (ferror(f)) user_error("%s cannot be read: %s; expected a readable text file", d->path, strerror(errno));
    fclose(f);
    size_t valid = utf8_valid_length(text, *len);
    int is_text = valid == *len && !memchr(text, 0, *len);
    if (!is_text && d->named)
        user_error("%s is not text: %s at byte %zu; expected UTF-8 (iconv -f latin1 -t utf-8 converts older text)", d->path,
                   valid < *len ? "no UTF-8" : "a zero byte", valid < *len ? valid : (size_t)((char *)memchr(text, 0, *len) - text));
    if (is_text && *len) return text;
    free(text);
    return NULL;
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
