/* tokenizer_files.h: a tokenizer's files next to token files and in exported models, as Hugging Face's libraries read
 * them.
 *
 * They are the tokenizer's own file, tokenizer.json, tokenizer_config.json and generation_config.json. A caller may
 * rely on: AutoTokenizer gives these programs' ids for every text, and apply_chat_template those of tokens_llama3; the
 * files depend on the tokenizer alone. */
#ifndef TOKENIZER_FILES_H
#define TOKENIZER_FILES_H
#include "../../run/setup/tokenizer_copies.h" // defines: TokenizerCopies, ModelIds, json_of_stop_tokens
#include "chat_template.h"                    // defines: ChatTemplate, chat_template_beside, Tokenizer

// ---------------------------------------------------------------------------
// tokenizer.json of a tokenizer that was read from a tokenizer.model

/* The two tokens that token `id` is formed of; 0 if no merges lead to it.
 *
 * A tokenizer.model merges any two adjacent tokens that form a token, lowest id first. Wherever this forms `id`,
 * nothing has merged across the ends of its bytes, so within them the same merges have happened as when they are
 * encoded alone.
 * The two parts are therefore the same in every text: those that encoding its bytes without `id` itself ends with. So a
 * list with one merge per token, in the order of the ids, gives the ids that the tokenizer.model gives. */
static int token_parts(Encoder *e, int32_t id, int32_t parts[2]) {
    const Tokenizer *t = e->t;
    e->used = 0;
    e->without = id;
    encode_by_merges(e, t->bytes + t->start[id], token_length(t, id));
    if (e->used != 2) return 0;
    parts[0] = (*e->ids)[0];
    parts[1] = (*e->ids)[1];
    return 1;
}

/* Writes the token's bytes in GPT-2's characters; in JSON, a backslash stands before quotes and backslashes. */
static void write_token_text(FILE *f, const Tokenizer *t, int32_t id, const uint16_t characters[256], int in_json) {
    for (uint64_t i = t->start[id]; i < t->start[id + 1]; i++) {
        int c = characters[(uint8_t)t->bytes[i]];
        if (in_json && (c == '"' || c == '\\')) fputc('\\', f);
        if (c >= 0x80) fputc(0xC0 | c >> 6, f);
        fputc(c < 0x80 ? c : 0x80 | (c & 0x3F), f);
    }
}

typedef struct {
    int32_t left, right; // ids of adjacent tokens
} Merge;

typedef struct {
    Merge *list; // (count) a lower one merges first
    int32_t count;
    int reach_all; // they lead to every token
} Merges;

/* The merges of a tokenizer.model: one per token that is not a single byte. */
static Merges merges_of_tokens(const Tokenizer *t) {
    Merges m = {new_array(Merge, t->vocab_size), 0, 1};
    int32_t *ids = NULL, parts[2];
    size_t capacity = 0;
    Encoder e = encoder_open(t, &ids, &capacity, 0);
    for (int32_t id = 0; id < t->vocab_size; id++) {
        if (is_special_token(t, id)) continue;
        if (token_length(t, id) == 1) continue;
        if (token_parts(&e, id, parts)) {
            const Merge merge = {parts[0], parts[1]};
            m.list[m.count++] = merge;
        } else m.reach_all = 0;
    }
    free(ids);
    encoder_close(&e);
    return m;
}

/* The merges of any tokenizer; the caller frees the list. */
static Merges tokenizer_merges(const Tokenizer *t) {
    if (!t->merges) return merges_of_tokens(t);
    Merges m = {new_array(Merge, t->num_merges), t->num_merges, !t->is_divided};
    for (uint32_t i = 0; i <= t->merge_mask; i++) {
        const Merge merge = {t->merges[i].left, t->merges[i].right};
        if (merge.left != NO_TOKEN) m.list[t->merges[i].rank] = merge;
    }
    return m;
}

/* Can transformers split and number text as this tokenizer does? Not if its expression is not one of those known here,
 * or if a special token has the name that a base token has in GPT-2's characters. */
static int tokenizer_fits_json(const Tokenizer *t) {
    int16_t bytes_of[BYTE_CHARACTERS];
    bytes_of_characters(bytes_of);
    for (int i = 0; i < t->num_special; i++) {
        int32_t id = t->special[i];
        char *bytes = (char *)checked_malloc(token_length(t, id) + 1);
        size_t n = token_text_decode(bytes_of, t->bytes + t->start[id], token_length(t, id), bytes);
        int is_shared = n && token_find(t, bytes, n) != NO_TOKEN;
        free(bytes);
        if (is_shared) return 0;
    }
    return t->expression != NULL;
}

static void write_added_tokens(FILE *f, const Tokenizer *t) {
    fprintf(f, "  \"added_tokens\": [");
    for (int i = 0; i < t->num_special; i++) {
        int32_t id = t->special[i];
        fprintf(f, "%s\n    {\"id\": %d, \"content\": ", i ? "," : "", id);
        json_write_string(f, t->bytes + t->start[id], token_length(t, id));
        fprintf(f, ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
                   "\"special\": true}");
    }
    fprintf(f, "\n  ],\n  \"normalizer\": null,\n");
}

/* Writes what puts the token that begins a document in front of a text, and of both texts of a pair; or nothing. */
static void write_post_processor(FILE *f, const Tokenizer *t) {
    char *front; // in JSON
    size_t length;
    if (t->front == NO_TOKEN) {
        fprintf(f,
                "  \"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": false, "
                "\"use_regex\": true},\n");
        return;
    }
    FILE *quoted = text_stream_open(&front, &length);
    json_write_string(quoted, t->bytes + t->start[t->front], token_length(t, t->front));
    text_stream_close(quoted);
    fprintf(f,
            "  \"post_processor\": {\"type\": \"TemplateProcessing\",\n"
            "   \"single\": [{\"SpecialToken\": {\"id\": %1$s, \"type_id\": 0}},\n"
            "              {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}],\n"
            "   \"pair\": [{\"SpecialToken\": {\"id\": %1$s, \"type_id\": 0}}, {\"Sequence\": {\"id\": \"A\", "
            "\"type_id\": 0}},\n"
            "            {\"SpecialToken\": {\"id\": %1$s, \"type_id\": 1}}, {\"Sequence\": {\"id\": \"B\", "
            "\"type_id\": 1}}],\n"
            "   \"special_tokens\": {%1$s: {\"id\": %1$s, \"ids\": [%2$d], \"tokens\": [%1$s]}}},\n",
            front, t->front);
    free(front);
}

static void write_splitting(FILE *f, const Tokenizer *t) {
    int uses_regex = t->expression != llama3_split;
    fprintf(f, "  \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [\n    ");
    if (t->expression == llama3_split) {
        fprintf(f, "{\"type\": \"Split\", \"pattern\": {\"Regex\": ");
        json_write_string(f, llama3_json_expression, strlen(llama3_json_expression));
        fprintf(f, "}, \"behavior\": \"Isolated\", \"invert\": false},\n    ");
    }
    if (t->expression == smollm2_split) fprintf(f, "{\"type\": \"Digits\", \"individual_digits\": true},\n    ");
    fprintf(f,
            "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": %s}\n"
            "  ]},\n",
            uses_regex ? "true" : "false");
    write_post_processor(f, t);
    fprintf(f, "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, "
               "\"use_regex\": true},\n");
}

/* The model's vocabulary: all base tokens, and the special tokens between them. */
static void write_vocabulary(FILE *f, const Tokenizer *t, const uint16_t characters[256]) {
    int32_t end = t->vocab_size;
    while (end > 0 && is_special_token(t, end - 1)) end--;
    fprintf(f, "    \"vocab\": {");
    for (int32_t id = 0; id < end; id++) {
        fprintf(f, "%s\n      ", id ? "," : "");
        if (is_special_token(t, id)) json_write_string(f, t->bytes + t->start[id], token_length(t, id));
        else {
            fputc('"', f);
            write_token_text(f, t, id, characters, 1);
            fputc('"', f);
        }
        fprintf(f, ": %d", id);
    }
    fprintf(f, "\n    },\n");
}

/* The merges; returns whether they lead to every token. */
static int write_merges(FILE *f, const Tokenizer *t, const uint16_t characters[256]) {
    Merges m = merges_of_tokens(t);
    fprintf(f, "    \"merges\": [");
    for (int32_t i = 0; i < m.count; i++) {
        fprintf(f, "%s\n      \"", i ? "," : "");
        write_token_text(f, t, m.list[i].left, characters, 1);
        fputc(' ', f);
        write_token_text(f, t, m.list[i].right, characters, 1);
        fputc('"', f);
    }
    fprintf(f, "\n    ],\n");
    free(m.list);
    return m.reach_all;
}

/* The text of tokenizer.json (length) of a tokenizer that fits it; the caller frees it. */
static char *tokenizer_json_text(const Tokenizer *t, size_t *length) {
    char *text;
    uint16_t characters[256];
    byte_characters(characters);
    FILE *f = text_stream_open(&text, length);
    fprintf(f, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n");
    write_added_tokens(f, t);
    write_splitting(f, t);
    fprintf(f, "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
               "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n"
               "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n");
    write_vocabulary(f, t, characters);
    int reach_all = write_merges(f, t, characters);
    // a piece that is a token becomes this token, also if merges do not lead to it
    fprintf(f, "    \"ignore_merges\": %s\n  }\n}\n", reach_all ? "false" : "true");
    text_stream_close(f);
    return text;
}

// ---------------------------------------------------------------------------
// one vocabulary in two file formats

/* Does the list of merges give the same ids as merging by the lowest id? `same` has the same tokens and no list. True
 * if the list is in the order of the ids that its merges form, has the merge of every token (token_parts), and if
 * pieces that are tokens are never divided. */
static int merges_follow_ids(const Tokenizer *t, const Tokenizer *same) {
    int32_t *ids = NULL, parts[2];
    size_t capacity = 0;
    Encoder e = encoder_open(same, &ids, &capacity, 0);
    int follow = !t->is_divided;
    for (int32_t i = 1; i < t->num_merges && follow; i++) follow = t->merge_result[i - 1] <= t->merge_result[i];
    for (int32_t id = 0; id < t->vocab_size && follow; id++) {
        if (token_length(t, id) < 2 || is_special_token(t, id) || !token_parts(&e, id, parts)) continue;
        const MergeSlot *slot = merge_slot(t, parts[0], parts[1]);
        follow = slot->left != NO_TOKEN;
    }
    free(ids);
    encoder_close(&e);
    return follow;
}

static int has_llama3_special_tokens(const Tokenizer *t) {
    char name[SPECIAL_NAME_BYTES];
    if (t->num_special != NUM_SPECIAL_TOKENS || t->special[0] != t->n_base) return 0;
    for (int i = 0; i < NUM_SPECIAL_TOKENS; i++) {
        llama3_special_name(i, name);
        if (t->special[i] != t->n_base + i || tokenizer_special(t, name) != t->n_base + i) return 0;
    }
    return 1;
}

/* Writes the header's line that names one of the special tokens. */
static void write_header_token(FILE *f, const Tokenizer *t, TokenizerHeader which, int32_t id) {
    fprintf(f, "%s ", tokenizer_header_words[which]);
    if (id == NO_TOKEN) fputc('-', f);
    else print_token(t, id, f);
    fputc('\n', f);
}

/* The text of tokenizer.model (length) with these tokens, in Llama 3's format or with a header; the caller frees it.
 * NULL: neither format can hold them. */
static char *tokenizer_model_text(const Tokenizer *t, size_t *length) {
    char *text;
    int is_llama3 = t->llama3 && has_llama3_special_tokens(t) && !t->num_missing;
    if (!is_llama3 && t->expression != smollm2_split) return NULL;
    for (int i = 0; i < t->num_special; i++)
        for (uint64_t at = t->start[t->special[i]]; at < t->start[t->special[i] + 1]; at++)
            if (t->bytes[at] <= ' ' || t->bytes[at] > '~') return NULL;
    FILE *f = text_stream_open(&text, length);
    if (!is_llama3) {
        fprintf(f, "byte-level-bpe 1\ntokens %d\nmissing %d\n", t->vocab_size, t->num_missing);
        write_header_token(f, t, HEADER_BOS, t->bos);
        write_header_token(f, t, HEADER_EOS, t->eos);
        write_header_token(f, t, HEADER_EOT, t->eot);
        fprintf(f, "split %s\n", t->expression);
    }
    for (int32_t id = 0; id < (is_llama3 ? t->n_base : t->vocab_size); id++) {
        if (!is_special_token(t, id)) {
            token_line_write(f, t->bytes + t->start[id], token_length(t, id), id);
            continue;
        }
        fprintf(f, "special ");
        print_token(t, id, f);
        fprintf(f, " %d\n", id);
    }
    text_stream_close(f);
    return text;
}

enum { MOST_FINGERPRINTS = 3 };

/* The SHA-256 of the tokenizer's file, and of the files that hold the same vocabulary in the other format: data that
 * was made with one of them has the same ids. Returns their number. */
static int tokenizer_fingerprints(const Tokenizer *t, uint8_t out[MOST_FINGERPRINTS][32]) {
    size_t length;
    int count = 0;
    Tokenizer *same = NULL; // of a tokenizer.json: the tokenizer.model with its tokens
    memcpy(out[count++], t->fingerprint, 32);
    if (t->merges) {
        char *model = tokenizer_model_text(t, &length);
        if (!model) return count;
        same = tokenizer_from_model("tokenizer.model", model, length);
        same->front = t->front;
    }
    if (same ? merges_follow_ids(t, same) : tokenizer_fits_json(t)) {
        if (same) memcpy(out[count++], same->fingerprint, 32);
        char *json = tokenizer_json_text(same ? same : t, &length);
        sha256(json, length, out[count++]);
        free(json);
    }
    if (same) tokenizer_close(same);
    return count;
}

static int fingerprint_is_among(const uint8_t wanted[32], const uint8_t known[MOST_FINGERPRINTS][32], int count) {
    for (int i = 0; i < count; i++)
        if (!memcmp(known[i], wanted, 32)) return 1;
    return 0;
}

/* Does the tokenizer.json at `json` say what the tokenizer.model at `model` says, because it was written for it? */
static int tokenizer_json_repeats(const char *json, const char *model) {
    char what[UNSUPPORTED_BYTES];
    size_t json_length, model_length, length = 0;
    char *text = tokenizer_read_file(model, &model_length), *found = tokenizer_read_file(json, &json_length);
    char *written = NULL;
    if (!text_is_json(text) && tokenizer_text_is_known(model, text, model_length, what)) {
        Tokenizer *t = tokenizer_from_text(model, text, model_length);
        if (tokenizer_fits_json(t)) written = tokenizer_json_text(t, &length);
        tokenizer_close(t);
    } else {
        free(text);
    }
    int is_same = written && length == json_length && !memcmp(written, found, length);
    free(written);
    free(found);
    return is_same;
}

/* Is there a tokenizer in the directory of the file `path`? Its path is written to `found` (size). Of two files,
 * tokenizer.json is taken, as transformers does, unless it says the same as tokenizer.model, as in a checkpoint. */
static inline int tokenizer_find_beside(char *found, size_t size, const char *path) {
    char model[4096], json[4096];
    path_beside(model, sizeof model, path, "tokenizer.model");
    path_beside(json, sizeof json, path, "tokenizer.json");
    int has_model = entry_exists(model), has_json = entry_exists(json);
    if (has_model && has_json && !tokenizer_json_repeats(json, model)) has_model = 0;
    if (has_model || has_json) snprintf(found, size, "%s", has_model ? model : json);
    return has_model || has_json;
}

// ---------------------------------------------------------------------------
// tokenizer_config.json and generation_config.json

static void write_config_special(FILE *f, const char *key, const Tokenizer *t, int32_t id) {
    if (id == NO_TOKEN) return;
    fprintf(f, "  \"%s\": ", key);
    json_write_string(f, t->bytes + t->start[id], token_length(t, id));
    fprintf(f, ",\n");
}

/* The text (length) of a new tokenizer_config.json, to be freed. `jinja`: its chat template, or NULL.
 * `max_positions`: of the model; 0: not known. */
static char *tokenizer_config_text(const Tokenizer *t, const char *jinja, int max_positions, size_t *length) {
    char *text;
    FILE *f = text_stream_open(&text, length);
    fprintf(f, "{\n");
    write_config_special(f, "bos_token", t, t->bos);
    write_config_special(f, "eos_token", t, t->eos);
    if (jinja) {
        fprintf(f, "  \"chat_template\": ");
        json_write_string(f, jinja, strlen(jinja));
        fprintf(f, ",\n");
    }
    fprintf(f, "  \"clean_up_tokenization_spaces\": false,\n");
    if (max_positions) fprintf(f, "  \"model_max_length\": %d,\n", max_positions);
    fprintf(f, "  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n");
    text_stream_close(f);
    return text;
}

/* The text (length) of a new generation_config.json, to be freed. */
static char *new_generation_config_text(const ModelIds *ids, size_t *length) {
    char *text, *eos = json_text(json_of_stop_tokens(&ids->eos), 1);
    FILE *f = text_stream_open(&text, length);
    fprintf(f, "{\n");
    if (ids->bos != NO_ID) fprintf(f, "  \"bos_token_id\": %d,\n", ids->bos);
    fprintf(f, "  \"eos_token_id\": %s\n}\n", eos);
    text_stream_close(f);
    free(eos);
    return text;
}

// ---------------------------------------------------------------------------
// all files of a checkpoint

/* The ids of a model, and the stop tokens of its adapters; NULL: there is none. */
static ModelIds ids_with_adapters(const char *model, const char *adapters) {
    ModelIds ids = model_ids_read(model), more = model_ids_read(adapters);
    for (int i = 0; i < more.eos.count; i++) stop_token_add(&ids.eos, more.eos.ids[i]);
    return ids;
}

/* Fills in missing ids from the tokenizer `t` (NULL: there is none): BOS, and as stop tokens the ends of a document and
 * of a turn. The chat template's end of a turn is always added (`form` NULL: there is no template). */
static void model_ids_complete(ModelIds *ids, const Tokenizer *t, const ChatTemplate *form) {
    if (!t) return;
    if (ids->bos == NO_TOKEN) ids->bos = t->bos;
    if (!ids->eos.count) {
        stop_token_add(&ids->eos, t->eos);
        if (t->eot != NO_TOKEN) stop_token_add(&ids->eos, t->eot);
    }
    int32_t end = form ? tokenizer_special(t, form->end) : NO_TOKEN;
    if (end != NO_TOKEN) stop_token_add(&ids->eos, end);
}

typedef struct {
    TokenizerCopies copies;
    char *chat_template;      // in Jinja; NULL: there is none
    const ChatTemplate *form; // the same as this program renders it; NULL: it does not know the template
    int adds_front;           // 1: AutoTokenizer puts the token that begins a document in front of a text
} TokenizerFiles;

/* Can `text` (length), a tokenizer.model, be restored from the tokenizer.json that is written for it? Exported models
 * then omit it, because converters of other projects take any tokenizer.model for a SentencePiece model. */
static int model_is_redundant(const Tokenizer *t, const char *text, size_t length) {
    size_t again_length;
    char *again = tokenizer_model_text(t, &again_length);
    int is_same = again && again_length == length && !memcmp(again, text, length);
    free(again);
    return is_same;
}

/* Finds the chat template that the files have or, if they have none of a known form, adds the one that the tokenizer's
 * special tokens belong to. `t` and `path`: the tokenizer and its file. `has_config`: there is a tokenizer_config.json
 * that was copied. */
static void tokenizer_files_find_template(TokenizerFiles *all, const char *path, const Tokenizer *t, int has_config) {
    char source[4096];
    all->chat_template = chat_template_beside(path, source, 1);
    all->form = all->chat_template ? chat_template_of_jinja(all->chat_template) : chat_template_of_tokens(t);
    if (all->chat_template || !all->form) return;
    all->chat_template = checked_strdup(all->form->jinja);
    if (has_config)
        tokenizer_copies_add(&all->copies, "chat_template.jinja", checked_strdup(all->chat_template),
                             strlen(all->chat_template));
}

/* The tokenizer's file `path`, whose text (length) is copied, and what belongs to it. */
static void tokenizer_files_add_tokenizer(TokenizerFiles *all, const char *path, const char *text, size_t length,
                                          const Tokenizer *t, int max_positions) {
    TokenizerCopies *copies = &all->copies;
    char *copy = (char *)checked_malloc(length + 1);
    int is_json = text_is_json(text);
    size_t size;
    memcpy(copy, text, length);
    tokenizer_copies_add(copies, is_json ? "tokenizer.json" : "tokenizer.model", copy, length);
    if (t && !is_json && tokenizer_fits_json(t)) {
        char *json = tokenizer_json_text(t, &size);
        tokenizer_copies_add(copies, "tokenizer.json", json, size);
        copies->files[0].is_redundant = model_is_redundant(t, text, length);
    }
    int has_config = tokenizer_copies_take(copies, path, "tokenizer_config.json", 1);
    tokenizer_copies_take(copies, path, "special_tokens_map.json", 1);
    tokenizer_copies_take(copies, path, "added_tokens.json", 1);
    int has_template = tokenizer_copies_take_template(copies, path);
    all->adds_front = t && t->front != NO_TOKEN;
    if (!t) return;
    tokenizer_files_find_template(all, path, t, has_config);
    if (has_config) return;
    char *config = tokenizer_config_text(t, has_template ? NULL : all->chat_template, max_positions, &size);
    tokenizer_copies_add(copies, "tokenizer_config.json", config, size);
}

/* Reads or makes the files. `path` and `text` (length): the tokenizer's file; NULL: there is none. `t`: what was read
 * from it, or NULL if this program cannot read it, so that it is only copied. `model`: the directory of the model,
 * whose settings for generation are kept; `adapters`: of those whose stop tokens are added; NULL: there is none.
 * `max_positions`: of the model; 0: not known. */
static void tokenizer_files_open(TokenizerFiles *all, const char *path, const char *text, size_t length,
                                 const Tokenizer *t, const char *model, const char *adapters, int max_positions) {
    TokenizerCopies *copies = &all->copies;
    char in_model[4096 + 2];
    size_t size;
    snprintf(in_model, sizeof in_model, "%s/", model ? model : "");
    copies->ids = ids_with_adapters(model, adapters);
    if (text) tokenizer_files_add_tokenizer(all, path, text, length, t, max_positions);
    else if (model) tokenizer_copies_take_vocabulary(copies, in_model);
    model_ids_complete(&copies->ids, t, all->form);
    if ((model && tokenizer_copies_take_generation_config(copies, in_model)) || !t) return;
    char *config = new_generation_config_text(&copies->ids, &size);
    tokenizer_copies_add(copies, "generation_config.json", config, size);
}

static void tokenizer_files_close(TokenizerFiles *all) {
    tokenizer_copies_close(&all->copies);
    free(all->chat_template);
}

#endif
