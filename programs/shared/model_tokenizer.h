/* model_tokenizer.h: the tokenizer that belongs to a model, for programs that read or write text.
 *
 * It is the one of --tokenizer, or one next to the data, the adapters or the model. A caller may rely on: its file
 * is read once; after model_tokenizer_need it is there and fits the model's vocabulary. */
#ifndef MODEL_TOKENIZER_H
#define MODEL_TOKENIZER_H
#include "program.h"         // defines: Job, user_error, pattern_expand
#include "tokenizer_files.h" // defines: tokenizer_find_beside, tokenizer_fingerprints; includes tokenizer_model.h

typedef struct {
    char path[4096]; // "": no tokenizer found
    char *text;      // (length) its file; NULL: none
    size_t length;
    Tokenizer *tokenizer; // NULL: not read
} ModelTokenizer;

/* Finds the tokenizer and reads its file. `data`: the pattern of token files; NULL: there are none. */
static void model_tokenizer_find(ModelTokenizer *m, const RunSettings *run, const char *data) {
    const char *const folders[] = {run->adapters, run->model};
    char **paths = NULL, in_folder[4096];
    int count = data && !run->tokenizer ? pattern_expand(data, &paths) : 0;
    if (run->tokenizer) snprintf(m->path, sizeof m->path, "%s", run->tokenizer);
    else if (count) tokenizer_find_beside(m->path, sizeof m->path, paths[0]);
    for (int i = 0; i < 2 && !m->path[0]; i++) {
        if (!folders[i]) continue;
        snprintf(in_folder, sizeof in_folder, "%s/", folders[i]);
        tokenizer_find_beside(m->path, sizeof m->path, in_folder);
    }
    for (int i = 0; i < count; i++) free(paths[i]);
    free(paths);
    if (!m->path[0]) return;
    m->text = tokenizer_read_file(m->path, &m->length);
    tokenizer_refuse_damaged(m->path, m->text, m->length);
}

/* Can this program read the tokenizer? If not, `what` says why. */
static int model_tokenizer_is_known(const ModelTokenizer *m, char what[UNSUPPORTED_BYTES]) {
    if (m->tokenizer || !m->text) return m->tokenizer != NULL;
    return tokenizer_text_is_known(m->path, m->text, m->length, what);
}

/* Reads the tokenizer, if there is one. */
static void model_tokenizer_open(ModelTokenizer *m) {
    if (m->tokenizer || !m->text) return;
    char *text = (char *)checked_malloc(m->length + 1); // reading changes it
    memcpy(text, m->text, m->length);
    m->tokenizer = tokenizer_from_text(m->path, text, m->length);
}

/* Reads the tokenizer, if this program can. */
static void model_tokenizer_try(ModelTokenizer *m) {
    char what[UNSUPPORTED_BYTES];
    if (model_tokenizer_is_known(m, what)) model_tokenizer_open(m);
}

/* The tokens of texts must be in the model's vocabulary. Special tokens behind it, such as one for padding that was
 * added later, are in no text; a GGUF file cannot have them (`may_exceed` 0). */
static void model_tokenizer_check(const ModelTokenizer *m, int32_t V, int may_exceed) {
    const Tokenizer *t = m->tokenizer;
    int32_t beyond = t->vocab_size - 1;
    while (may_exceed && beyond >= V && is_special_token(t, beyond)) beyond--;
    int is_used = t->front >= V || t->eos >= V;
    if (beyond >= V || is_used)
        user_error("%s has %d tokens, but the model's vocabulary has %d, without %.*s: give the model's own tokenizer "
                   "with --tokenizer FILE, or remove the token from it",
                   m->path, t->vocab_size, V, (int)token_length(t, t->vocab_size - 1),
                   t->bytes + t->start[t->vocab_size - 1]);
}

/* Reads the tokenizer that `option` needs. */
static void model_tokenizer_need(ModelTokenizer *m, const char *option, const char *data, const Job *j,
                                 int may_exceed) {
    if (!m->path[0])
        user_error("%s needs a tokenizer, and there is no tokenizer.model or tokenizer.json next to %s: give one with "
                   "--tokenizer FILE",
                   option, data ? data : j->run.model);
    model_tokenizer_open(m);
    model_tokenizer_check(m, j->config.V, may_exceed);
}

static void model_tokenizer_close(ModelTokenizer *m) {
    if (m->tokenizer) tokenizer_close(m->tokenizer);
    free(m->text);
}

#endif
