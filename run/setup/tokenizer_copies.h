/* tokenizer_copies.h: the tokenizer's files, which every checkpoint gets as they are.
 *
 * Training reads token ids and needs no tokenizer. It finds these files by their names, compares the SHA-256 of the
 * tokenizer with the fingerprints in the token files, and copies bytes. tokens_llama3 writes all of them next to the
 * token files. A caller may rely on: they are read before training starts; the only file that may differ from its
 * source is generation_config.json, whose "eos_token_id" also lists where the data's conversations end. */
#ifndef TOKENIZER_COPIES_H
#define TOKENIZER_COPIES_H
#include "../../lib/io/sha256.h" // defines: sha256
#include "config_json.h"         // defines: ModelIds, generation_config_text; includes token_files.h

typedef struct {
    const char *name;
    char *text; // (length)
    size_t length;
    int is_redundant; // the other files say the same: exported models omit it
} TokenizerFile;

typedef struct {
    TokenizerFile files[12];
    int count;
    ModelIds ids; // of config.json and generation_config.json
} TokenizerCopies;

/* A tokenizer that was found: one vocabulary in one or two file formats. */
typedef struct {
    char path[4096]; // of the file that messages name; "": there is none
    int count;       // of the formats
    TokenizerFile files[2];
    uint8_t sha256[2][32];
    int is_wanted[2]; // the user named it, or the token files were made with it
} FoundTokenizer;

static void tokenizer_copies_add(TokenizerCopies *all, const char *name, char *text, size_t length) {
    TokenizerFile file = {name, text, length, 0};
    all->files[all->count++] = file;
}

/* Adds the file `name` in the directory of `path`, if there is one. Returns whether there is. */
static int tokenizer_copies_take(TokenizerCopies *all, const char *path, const char *name, int is_json) {
    char source[4096];
    size_t length;
    path_beside(source, sizeof source, path, name);
    if (!entry_exists(source)) return 0;
    char *text = read_regular_file(source, &length);
    if (!text) user_error("cannot read %s: %s", source, strerror(errno));
    if (is_json) cJSON_Delete(json_parse_object(text, length, source, "a file of Hugging Face's"));
    tokenizer_copies_add(all, name, text, length);
    return 1;
}

// ---------------------------------------------------------------------------
// finding the tokenizer

/* Adds the file at `path`, if there is one, as a format of the tokenizer, unless there is a file of this format. */
static void found_tokenizer_add(FoundTokenizer *f, const char *path) {
    size_t length;
    if (!entry_exists(path)) return;
    char *text = read_regular_file(path, &length);
    if (!text) user_error("cannot read the tokenizer %s: %s", path, strerror(errno));
    if (!length || !memcmp(text, TOKEN_FILE_MAGIC, min_i64((int64_t)length, 8)))
        user_error("%s %s, expected tokenizer.model or tokenizer.json: give the tokenizer's file with --tokenizer",
                   path, length ? "is a token file" : "is empty");
    const char *name = text[strspn(text, " \t\r\n")] == '{' ? "tokenizer.json" : "tokenizer.model";
    if (f->count == 2 || (f->count && !strcmp(f->files[0].name, name))) {
        free(text);
        return;
    }
    TokenizerFile file = {name, text, length, 0};
    f->files[f->count] = file;
    sha256(text, length, f->sha256[f->count]);
    if (!f->count++) snprintf(f->path, sizeof f->path, "%s", path);
}

/* Looks for tokenizer.json and tokenizer.model in the directory of the file `path`. */
static void found_tokenizer_look(FoundTokenizer *f, const char *path) {
    static const char *const names[] = {"tokenizer.json", "tokenizer.model"};
    char at[4096];
    for (int i = 0; i < 2; i++) {
        path_beside(at, sizeof at, path, names[i]);
        found_tokenizer_add(f, at);
    }
}

/* Looks for them next to the adapters (NULL: there are none) and, failing that, next to the model. */
static void found_tokenizer_look_beside_weights(FoundTokenizer *f, const char *adapters, const char *model) {
    char path[4096];
    snprintf(path, sizeof path, "%s/", adapters ? adapters : model);
    found_tokenizer_look(f, path);
    if (!f->count && adapters) found_tokenizer_look_beside_weights(f, NULL, model);
}

/* Was the token file made with this format of the tokenizer, or with one of the same vocabulary? */
static int token_file_knows(const TokenFileHeader *h, const uint8_t sha256[32]) {
    int knows = !memcmp(h->tokenizer, sha256, 32);
    for (uint32_t i = 0; i < h->num_fingerprints && !knows; i++) knows = !memcmp(h->fingerprints[i], sha256, 32);
    return knows;
}

/* Refuses token files of another tokenizer; accepts those that name none. `is_named`: the user named its file. */
static void found_tokenizer_check(FoundTokenizer *f, const Dataset *d, int is_named) {
    for (int i = 0; i < d->num_files && f->count; i++) {
        const TokenFileHeader *h = &d->files[i].header;
        int matches = token_file_lacks_tokenizer(&d->files[i]);
        for (int k = 0; k < f->count; k++) {
            int knows = token_file_knows(h, f->sha256[k]);
            f->is_wanted[k] |= knows;
            matches |= knows && (k == 0 || !is_named);
        }
        if (!matches)
            user_error("%s was tokenized with a different tokenizer than %s: give the right one with --tokenizer (of "
                       "two files with the same vocabulary, the one that was used), or tokenize the text again",
                       d->files[i].path, f->path);
    }
}

static void found_tokenizer_close(FoundTokenizer *f) {
    for (int i = 0; i < f->count; i++) free(f->files[i].text);
}

/* Notes that a token file was made with another tokenizer than the one next to the weights. */
static void note_other_tokenizer(const char *adapters, const char *model, const TokenFile *file) {
    FoundTokenizer own = ZERO;
    int knows = token_file_lacks_tokenizer(file);
    found_tokenizer_look_beside_weights(&own, adapters, model);
    for (int k = 0; k < own.count; k++) knows |= token_file_knows(&file->header, own.sha256[k]);
    if (own.count && !knows && process_end.process == 0)
        fprintf(stderr,
                "note: %s was not made with %s, the tokenizer of the weights: check that both have the same ids\n",
                file->path, own.path);
    found_tokenizer_close(&own);
}

// ---------------------------------------------------------------------------
// copying its files

/* Copies a tokenizer that has no tokenizer.json, but the files from which transformers makes one. */
static void tokenizer_copies_take_vocabulary(TokenizerCopies *all, const char *path) {
    static const char *const names[] = {"vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json",
                                        "special_tokens_map.json"};
    for (int i = 0; i < 5; i++)
        if (!tokenizer_copies_take(all, path, names[i], strcmp(names[i], "merges.txt") != 0) && !i) return;
}

/* Copies the chat template that has a file of its own. Returns whether there is one. */
static int tokenizer_copies_take_template(TokenizerCopies *all, const char *path) {
    int is_taken = tokenizer_copies_take(all, path, "additional_chat_templates/default.jinja", 0);
    if (!is_taken) return tokenizer_copies_take(all, path, "chat_template.jinja", 0);
    all->files[all->count - 1].name = "chat_template.jinja"; // it comes before the file of this name
    return 1;
}

/* Copies generation_config.json with the ids in `all`. Returns whether there is one in the directory of `path`. */
static int tokenizer_copies_take_generation_config(TokenizerCopies *all, const char *path) {
    if (!tokenizer_copies_take(all, path, "generation_config.json", 0)) return 0;
    TokenizerFile *file = &all->files[all->count - 1];
    file->text = generation_config_text(&all->ids, file->text, &file->length);
    return 1;
}

/* Takes over the texts of the tokenizer `f` and copies the files next to it; if there is no tokenizer, copies the
 * vocabulary next to the model (`model`: its directory; NULL: a preset). Collects the ids of special tokens from the
 * model's and the tokenizer's directory, and adds generation_config.json with these ids, from the first of the two
 * directories that has one. */
static void tokenizer_copies_collect(TokenizerCopies *all, FoundTokenizer *f, const char *model) {
    char directory[4096], in_model[4096 + 2];
    int wanted = f->is_wanted[0] || f->is_wanted[1];
    snprintf(in_model, sizeof in_model, "%s/", model ? model : "");
    for (int i = f->count - 1; i >= 0; i--) { // tokenizer.model comes first, as in earlier checkpoints
        if (wanted ? !f->is_wanted[i] : i > 0) continue;
        all->files[all->count++] = f->files[i];
        f->files[i].text = NULL;
    }
    if (f->count) {
        tokenizer_copies_take(all, f->path, "tokenizer_config.json", 1);
        tokenizer_copies_take(all, f->path, "special_tokens_map.json", 1);
        tokenizer_copies_take(all, f->path, "added_tokens.json", 1);
        tokenizer_copies_take_template(all, f->path);
    } else if (model) {
        tokenizer_copies_take_vocabulary(all, in_model);
    }
    all->ids = model_ids_read(model);
    if (f->count) {
        path_beside(directory, sizeof directory, f->path, ".");
        ModelIds more = model_ids_read(directory);
        if (all->ids.bos == NO_ID) all->ids.bos = more.bos;
        for (int i = 0; i < more.eos.count; i++) stop_token_add(&all->ids.eos, more.eos.ids[i]);
    }
    if (model && tokenizer_copies_take_generation_config(all, in_model)) return;
    if (f->count) tokenizer_copies_take_generation_config(all, f->path);
}

static void tokenizer_copies_close(TokenizerCopies *all) {
    for (int i = 0; i < all->count; i++) free(all->files[i].text);
}

#endif
