/* tokenizer_json.h: reads tokenizer.json, Hugging Face's file of a tokenizer, and opens a tokenizer file of any format.
 *
 * A tokenizer.json describes how text is normalized, split, merged and decoded. This program implements byte-level BPE
 * with the pre-tokenizers of Llama 3, SmolLM2 and GPT-2. A caller may rely on this: ids equal those of AutoTokenizer
 * with add_special_tokens=False and split_special_tokens=True; merges follow the file's own list, in its order; a file
 * that needs anything else is refused by the name of that thing. */
#ifndef TOKENIZER_JSON_H
#define TOKENIZER_JSON_H
#include "../../lib/io/json.h" // defines: json_parse_object, json_refuse_duplicates, json_read_object
#include "tokenizer_model.h"   // defines: tokenizer_from_model, tokenizer_allocate, is_special_token, …
#include "text_input.h"        // defines: json_has_zero_byte

// ---------------------------------------------------------------------------
// GPT-2's way of writing bytes as text: a printable byte is its own character, the others are numbered from U+0100 on

enum { BYTE_CHARACTERS = 0x144 /* one above the last character that stands for a byte */ };

static inline int is_own_character(int byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/* (256) the code point that stands for each byte. */
static inline void byte_characters(uint16_t characters[256]) {
    uint16_t next = 0x100;
    for (int byte = 0; byte < 256; byte++) characters[byte] = is_own_character(byte) ? (uint16_t)byte : next++;
}

/* (BYTE_CHARACTERS) the byte that each code point stands for, or -1. */
static void bytes_of_characters(int16_t bytes[BYTE_CHARACTERS]) {
    uint16_t characters[256];
    byte_characters(characters);
    for (int c = 0; c < BYTE_CHARACTERS; c++) bytes[c] = -1;
    for (int byte = 0; byte < 256; byte++) bytes[characters[byte]] = (int16_t)byte;
}

/* Decodes n bytes of UTF-8, characters that stand for bytes, to `out`; returns how many; 0: one stands for none. */
static size_t token_text_decode(const int16_t bytes[BYTE_CHARACTERS], const char *text, size_t n, char *out) {
    const uint8_t *p = (const uint8_t *)text;
    size_t size = 0;
    for (size_t i = 0; i < n; size++) {
        size_t width = utf8_character_length(p + i, n - i);
        int character = -1;
        if (width == 1) character = p[i];
        if (width == 2) character = (p[i] & 0x1F) << 6 | (p[i + 1] & 0x3F);
        if (character < 0 || character >= BYTE_CHARACTERS || bytes[character] < 0) return 0;
        out[size] = (char)bytes[character];
        i += width;
    }
    return size;
}

// ---------------------------------------------------------------------------
// what a file needs that this program does not implement

/* The expression of Llama 3's pre-tokenizer as its tokenizer.json writes it; llama3_split gives the same pieces. */
static const char llama3_json_expression[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

enum { UNSUPPORTED_BYTES = 400, MOST_PARTS = 8 };

/* Says what a file needs that this program does not implement. Returns 0. */
__attribute__((format(printf, 2, 3))) static int unsupported(char what[UNSUPPORTED_BYTES], const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(what, UNSUPPORTED_BYTES, format, args);
    va_end(args);
    return 0;
}

static const cJSON *json_get(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}
static inline int json_is_absent(const cJSON *item) { return !item || cJSON_IsNull(item); }
static const char *json_string_or(const cJSON *item, const char *otherwise) {
    return cJSON_IsString(item) ? item->valuestring : otherwise;
}
static const char *component_type(const cJSON *component) { return json_string_or(json_get(component, "type"), "?"); }
static int component_is(const cJSON *component, const char *type) { return !strcmp(component_type(component), type); }

/* The parts of a component, such as a pre-tokenizer: those of a Sequence, or the component itself; none of null.
 * Returns their number, or MOST_PARTS + 1 if there are more than MOST_PARTS. */
static int component_parts(const cJSON *component, const char *list_key, const cJSON *parts[MOST_PARTS]) {
    int count = 0;
    const cJSON *part;
    if (json_is_absent(component)) return 0;
    if (!component_is(component, "Sequence")) {
        parts[0] = component;
        return 1;
    }
    cJSON_ArrayForEach(part, json_get(component, list_key)) {
        if (count < MOST_PARTS) parts[count] = part;
        if (count <= MOST_PARTS) count++;
    }
    return count;
}

static int is_byte_level(const cJSON *part, int uses_regex) {
    const cJSON *regex = json_get(part, "use_regex"); // true by default
    return component_is(part, "ByteLevel") && cJSON_IsFalse(json_get(part, "add_prefix_space")) &&
           (!cJSON_IsFalse(regex)) == uses_regex;
}
static int is_single_digits(const cJSON *part) {
    return component_is(part, "Digits") && cJSON_IsTrue(json_get(part, "individual_digits"));
}
static const char *split_expression(const cJSON *part) {
    return json_string_or(json_get(json_get(part, "pattern"), "Regex"), "");
}
static int is_llama3_split(const cJSON *part) {
    return component_is(part, "Split") && !strcmp(split_expression(part), llama3_json_expression) &&
           !strcmp(json_string_or(json_get(part, "behavior"), ""), "Isolated") &&
           !cJSON_IsTrue(json_get(part, "invert"));
}

/* The expression that splits text as the pre-tokenizer does; NULL if it is none of those known here. */
static const char *pre_tokenizer_expression(const cJSON *pre_tokenizer) {
    const cJSON *parts[MOST_PARTS];
    int count = component_parts(pre_tokenizer, "pretokenizers", parts);
    if (count == 1 && is_byte_level(parts[0], 1)) return gpt2_split;
    if (count == 2 && is_single_digits(parts[0]) && is_byte_level(parts[1], 1)) return smollm2_split;
    if (count == 2 && is_llama3_split(parts[0]) && is_byte_level(parts[1], 0)) return llama3_split;
    return NULL;
}

/* Is this a pre-tokenizer that is known here? If not, `what` names its first part that no known one has. */
static int pre_tokenizer_is_known(const cJSON *pre_tokenizer, char what[UNSUPPORTED_BYTES]) {
    const cJSON *parts[MOST_PARTS];
    int count = component_parts(pre_tokenizer, "pretokenizers", parts);
    if (pre_tokenizer_expression(pre_tokenizer)) return 1;
    if (!count) return unsupported(what, "no pre-tokenizer");
    for (int i = 0; i < count && i < MOST_PARTS; i++) {
        const char *type = component_type(parts[i]);
        if (component_is(parts[i], "Split") && !is_llama3_split(parts[i]))
            return unsupported(
                what, "the pre-tokenizer Split with the expression '%.200s', the behavior '%.20s' and \"invert\": %s",
                split_expression(parts[i]), json_string_or(json_get(parts[i], "behavior"), "?"),
                cJSON_IsTrue(json_get(parts[i], "invert")) ? "true" : "false");
        if (component_is(parts[i], "ByteLevel") && !cJSON_IsFalse(json_get(parts[i], "add_prefix_space")))
            return unsupported(what, "the pre-tokenizer ByteLevel with \"add_prefix_space\": true");
        if (component_is(parts[i], "Digits") && !is_single_digits(parts[i]))
            return unsupported(what, "the pre-tokenizer Digits with \"individual_digits\": false");
        if (strcmp(type, "Split") && strcmp(type, "ByteLevel") && strcmp(type, "Digits"))
            return unsupported(what, "the pre-tokenizer '%.80s'", type);
    }
    return unsupported(what, "this combination of the pre-tokenizers Split, Digits and ByteLevel");
}

/* Does the post-processor put at most one token in front of a text, whose name *front receives, and none after it? */
static int post_processor_is_known(const cJSON *post_processor, const char **front, int32_t *id,
                                   char what[UNSUPPORTED_BYTES]) {
    const cJSON *parts[MOST_PARTS], *piece;
    int count = component_parts(post_processor, "processors", parts);
    *front = NULL;
    *id = NO_TOKEN;
    for (int i = 0; i < count; i++) {
        int num_texts = 0;
        const char *type = i < MOST_PARTS ? component_type(parts[i]) : "Sequence";
        if (strcmp(type, "TemplateProcessing") && strcmp(type, "ByteLevel"))
            return unsupported(what, "the post-processor '%.80s'", type);
        cJSON_ArrayForEach(piece, json_get(parts[i], "single")) {
            const char *name = json_string_or(json_get(json_get(piece, "SpecialToken"), "id"), NULL);
            if (name && (num_texts || *front))
                return unsupported(what, "the post-processor TemplateProcessing to put '%.80s' %s a text", name,
                                   num_texts ? "behind" : "and another token in front of");
            num_texts += !name;
            if (!name) continue;
            const cJSON *ids = json_get(json_get(json_get(parts[i], "special_tokens"), name), "ids");
            *front = name;
            if (cJSON_GetArraySize(ids) == 1 && cJSON_IsNumber(ids->child)) *id = ids->child->valueint;
            if (ids && *id == NO_TOKEN)
                return unsupported(
                    what,
                    "the post-processor TemplateProcessing to put '%.80s', which is not one id, in front of a text",
                    name);
        }
        if (json_get(parts[i], "single") && num_texts != 1)
            return unsupported(what, "the post-processor TemplateProcessing to put a text %d times", num_texts);
    }
    return 1;
}

static int model_is_known(const cJSON *model, char what[UNSUPPORTED_BYTES]) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const cJSON *dropout = json_get(model, "dropout");
    if (!component_is(model, "BPE")) return unsupported(what, "the model '%.80s'", component_type(model));
    if (cJSON_IsTrue(json_get(model, "byte_fallback")))
        return unsupported(what, "the model BPE with \"byte_fallback\": true");
    if (!json_is_absent(dropout) && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return unsupported(what, "the model BPE with \"dropout\"");
    for (int i = 0; i < 2; i++)
        if (*json_string_or(json_get(model, affixes[i]), ""))
            return unsupported(what, "the model BPE with \"%s\"", affixes[i]);
    return 1;
}

/* Special tokens are never looked for in a text; other added tokens would have to be. */
static int added_tokens_are_known(const cJSON *added, char what[UNSUPPORTED_BYTES]) {
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    const cJSON *token;
    cJSON_ArrayForEach(token, added) {
        const char *content = json_string_or(json_get(token, "content"), "?");
        if (!cJSON_IsTrue(json_get(token, "special")))
            return unsupported(what, "the added token '%.80s' with \"special\": false", content);
        for (int i = 0; i < 3; i++)
            if (cJSON_IsTrue(json_get(token, flags[i])))
                return unsupported(what, "the added token '%.80s' with \"%s\": true", content, flags[i]);
    }
    return 1;
}

/* Do the added tokens follow the vocabulary without a gap, and is there either a token for every byte or no token for
 * unknown ones? */
static int vocabulary_is_known(const cJSON *root, char what[UNSUPPORTED_BYTES]) {
    const cJSON *vocab = json_get(json_get(root, "model"), "vocab"), *item;
    const char *unknown = json_string_or(json_get(json_get(root, "model"), "unk_token"), NULL);
    int16_t bytes_of[BYTE_CHARACTERS];
    uint8_t has_byte[256] = {0};
    double next = 0;
    int bytes = 0;
    bytes_of_characters(bytes_of);
    if (!cJSON_IsObject(vocab)) return 1; // vocabulary_read_model refuses it
    cJSON_ArrayForEach(item, vocab) {
        char decoded[4];
        size_t length = strlen(item->string);
        next++;
        if (length > 2 || token_text_decode(bytes_of, item->string, length, decoded) != 1) continue;
        bytes += !has_byte[(uint8_t)decoded[0]];
        has_byte[(uint8_t)decoded[0]] = 1;
    }
    double first = next;
    cJSON_ArrayForEach(item, json_get(root, "added_tokens")) {
        const cJSON *id = json_get(item, "id");
        if (!cJSON_IsNumber(id) || id->valuedouble < first) continue;
        if (id->valuedouble != next)
            return unsupported(what, "the added token '%.80s' to have the id %.0f, behind a gap or out of order",
                               json_string_or(json_get(item, "content"), "?"), id->valuedouble);
        next++;
    }
    if (!unknown || bytes == 256) return 1;
    return unsupported(what, "the unknown token '%.80s' for %d bytes without a token", unknown, 256 - bytes);
}

/* Does the file need only what this program implements? If not, `what` names the first other thing. */
static int tokenizer_json_is_known(const cJSON *root, char what[UNSUPPORTED_BYTES]) {
    const cJSON *parts[MOST_PARTS];
    const char *front;
    int32_t front_id;
    if (!model_is_known(json_get(root, "model"), what)) return 0;
    if (component_parts(json_get(root, "normalizer"), "normalizers", parts))
        return unsupported(what, "the normalizer '%.80s'", component_type(parts[0]));
    if (!pre_tokenizer_is_known(json_get(root, "pre_tokenizer"), what)) return 0;
    if (!post_processor_is_known(json_get(root, "post_processor"), &front, &front_id, what)) return 0;
    int decoders = component_parts(json_get(root, "decoder"), "decoders", parts);
    if (decoders > 1 || (decoders && !component_is(parts[0], "ByteLevel")))
        return unsupported(what, "the decoder '%.80s'", component_type(parts[0]));
    return added_tokens_are_known(json_get(root, "added_tokens"), what) && vocabulary_is_known(root, what);
}

// ---------------------------------------------------------------------------
// the vocabulary

/* A tokenizer.json while it is being read. */
typedef struct {
    const char *path;
    const cJSON *model, *added; // "model" and "added_tokens"
    int32_t in_model, size;     // tokens of the model's vocabulary, which have the ids below; all tokens
    const char **names;         // (size) as the file writes them
    uint8_t *is_special;        // (size)
    int16_t bytes_of[BYTE_CHARACTERS];
    char *scratch; // room for the bytes of any two tokens
} JsonVocabulary;

enum { MOST_TOKENS_OF_JSON = 1 << 24 };

static int32_t json_token_id(const JsonVocabulary *v, const cJSON *item, const char *name) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < (double)MOST_TOKENS_OF_JSON) ||
        item->valuedouble != floor(item->valuedouble))
        user_error("tokenizer %s: the token '%.80s' has no id, expected a whole number from 0 to %d", v->path, name,
                   MOST_TOKENS_OF_JSON - 1);
    return (int32_t)item->valuedouble;
}

/* The vocabulary of the model: its n tokens must have the ids 0 to n - 1, since transformers would renumber others. */
static void vocabulary_read_model(JsonVocabulary *v) {
    const cJSON *vocab = json_get(v->model, "vocab"), *item;
    if (!cJSON_IsObject(vocab))
        user_error("tokenizer %s: \"model\" has no \"vocab\", expected an object of tokens and their ids", v->path);
    cJSON_ArrayForEach(item, vocab) v->in_model++;
    v->size = v->in_model;
    cJSON_ArrayForEach(item, v->added) v->size++; // at most
    v->names = new_array(const char *, v->size);
    v->is_special = new_array(uint8_t, v->size);
    cJSON_ArrayForEach(item, vocab) {
        int32_t id = json_token_id(v, item, item->string);
        if (id >= v->in_model)
            user_error("tokenizer %s: the token '%.80s' has the id %d, expected 0 to %d, since the vocabulary has %d "
                       "tokens and its ids leave none out",
                       v->path, item->string, id, v->in_model - 1, v->in_model);
        if (v->names[id])
            user_error("tokenizer %s: the tokens '%.80s' and '%.80s' have the same id %d, expected one token per id",
                       v->path, v->names[id], item->string, id);
        v->names[id] = item->string;
    }
}

/* The added tokens: each is in the model's vocabulary or follows it, in the order of the ids (vocabulary_is_known). */
static void vocabulary_read_added(JsonVocabulary *v) {
    const cJSON *item;
    int32_t next = v->in_model;
    cJSON_ArrayForEach(item, v->added) {
        const char *content = json_string_or(json_get(item, "content"), "");
        int32_t id = json_token_id(v, json_get(item, "id"), content);
        if (!*content) user_error("tokenizer %s: the added token with the id %d has no \"content\"", v->path, id);
        if (id < v->in_model && strcmp(v->names[id], content))
            user_error("tokenizer %s: the added token '%.80s' has the id %d, which the vocabulary gives to '%.80s'",
                       v->path, content, id, v->names[id]);
        if (id < v->in_model && v->is_special[id])
            user_error("tokenizer %s: the added token '%.80s' is listed twice, expected once", v->path, content);
        v->names[id] = content;
        v->is_special[id] = 1;
        next += id == next;
    }
    v->size = next;
}

static void vocabulary_add_base(Tokenizer *t, const JsonVocabulary *v, int32_t id) {
    size_t n = token_text_decode(v->bytes_of, v->names[id], strlen(v->names[id]), t->bytes + t->start[id]);
    if (!n)
        user_error("tokenizer %s: the token '%.80s' (id %d) has a character that ByteLevel uses for no byte, expected "
                   "text in GPT-2's characters for bytes",
                   v->path, v->names[id], id);
    tokenizer_add_base(t, id, n); // it is new: names differ, and each character stands for one byte
}

static int by_token_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Refuses a special token whose name is also that of another token: transformers would give it the id of that one. */
static void vocabulary_refuse_shared_names(const Tokenizer *t, const JsonVocabulary *v) {
    const char **names = new_array(const char *, t->num_special + 1);
    for (int i = 0; i < t->num_special; i++) {
        const char *name = names[i] = v->names[t->special[i]];
        size_t n = token_text_decode(v->bytes_of, name, strlen(name), v->scratch);
        int32_t other = n ? token_find(t, v->scratch, n) : NO_TOKEN;
        if (other != NO_TOKEN)
            user_error("tokenizer %s: the added token '%.80s' has the id %d, but the vocabulary has it as %d", v->path,
                       name, t->special[i], other);
    }
    qsort(names, (size_t)t->num_special, sizeof *names, by_token_name);
    for (int i = 1; i < t->num_special; i++)
        if (!strcmp(names[i - 1], names[i]))
            user_error("tokenizer %s: the added token '%.80s' is listed twice, expected once", v->path, names[i]);
    free(names);
}

static void vocabulary_build(Tokenizer *t, const JsonVocabulary *v, size_t text_length) {
    tokenizer_allocate(t, (size_t)v->size + 1, text_length);
    for (int32_t id = 0; id < v->size; id++) {
        size_t n = strlen(v->names[id]);
        if (!v->is_special[id]) {
            vocabulary_add_base(t, v, id);
            continue;
        }
        memcpy(t->bytes + t->start[id], v->names[id], n);
        t->start[id + 1] = t->start[id] + n;
        t->special[t->num_special++] = id;
    }
    t->vocab_size = v->size;
    vocabulary_refuse_shared_names(t, v);
    tokenizer_find_bytes(t);
    const char *unknown = json_string_or(json_get(v->model, "unk_token"), NULL);
    if (unknown && t->num_missing)
        user_error("tokenizer %s needs the unknown token '%.80s' (\"unk_token\"), because %d of the 256 bytes have no "
                   "token; this program implements only tokenizers without an unknown token",
                   v->path, unknown, t->num_missing);
}

// ---------------------------------------------------------------------------
// merges

/* The two sides of a merge: "a b", or ["a", "b"]. */
typedef struct {
    const char *text[2];
    size_t length[2];
} MergeText;

static int merge_text_parse(const cJSON *item, MergeText *merge) {
    if (cJSON_IsArray(item)) {
        const cJSON *left = item->child, *right = left ? left->next : NULL;
        if (!cJSON_IsString(left) || !cJSON_IsString(right) || right->next) return 0;
        merge->text[0] = left->valuestring;
        merge->text[1] = right->valuestring;
        for (int side = 0; side < 2; side++) merge->length[side] = strlen(merge->text[side]);
        return 1;
    }
    const char *space = cJSON_IsString(item) ? strchr(item->valuestring, ' ') : NULL;
    if (!space || strchr(space + 1, ' ')) return 0;
    merge->text[0] = item->valuestring;
    merge->length[0] = (size_t)(space - item->valuestring);
    merge->text[1] = space + 1;
    merge->length[1] = strlen(space + 1);
    return 1;
}

/* Adds the merge as number t->num_merges of the list. */
static void merge_add(Tokenizer *t, const JsonVocabulary *v, const cJSON *item) {
    MergeText m;
    int32_t ids[2], rank = t->num_merges;
    size_t used = 0;
    if (!merge_text_parse(item, &m))
        user_error("tokenizer %s: merge %d is '%.80s', expected two tokens, as \"a b\" or [\"a\", \"b\"]", v->path,
                   rank, json_string_or(item, "no text"));
    for (int side = 0; side < 2; side++) {
        size_t n = token_text_decode(v->bytes_of, m.text[side], m.length[side], v->scratch + used);
        ids[side] = token_find(t, v->scratch + used, n);
        if (ids[side] == NO_TOKEN)
            user_error("tokenizer %s: merge %d needs the token '%.*s', which is not in the vocabulary or is special",
                       v->path, rank, (int)min_i64(80, (int64_t)m.length[side]), m.text[side]);
        used += n;
    }
    t->merge_result[rank] = token_find(t, v->scratch, used);
    if (t->merge_result[rank] == NO_TOKEN)
        user_error("tokenizer %s: merge %d forms the token '%.*s%.*s', which is not in the vocabulary or is special",
                   v->path, rank, (int)min_i64(80, (int64_t)m.length[0]), m.text[0],
                   (int)min_i64(80, (int64_t)m.length[1]), m.text[1]);
    MergeSlot *slot = merge_slot(t, ids[0], ids[1]);
    if (slot->left != NO_TOKEN)
        user_error("tokenizer %s: the merges %d and %d are the same, '%.*s' and '%.*s', expected each merge once",
                   v->path, slot->rank, rank, (int)min_i64(80, (int64_t)m.length[0]), m.text[0],
                   (int)min_i64(80, (int64_t)m.length[1]), m.text[1]);
    slot->left = ids[0];
    slot->right = ids[1];
    slot->rank = rank;
    t->num_merges++;
}

static void merges_read(Tokenizer *t, const JsonVocabulary *v) {
    const cJSON *merges = json_get(v->model, "merges"), *item;
    size_t count = 0, slots = 2;
    if (!cJSON_IsArray(merges))
        user_error("tokenizer %s: \"model\" has no \"merges\", expected a list of pairs of tokens", v->path);
    cJSON_ArrayForEach(item, merges) count++;
    while (slots < 2 * count) slots *= 2; // at most half full
    t->merge_mask = (uint32_t)(slots - 1);
    t->merges = new_array(MergeSlot, slots);
    t->merge_result = new_array(int32_t, count + 1);
    for (size_t i = 0; i < slots; i++) t->merges[i].left = NO_TOKEN;
    cJSON_ArrayForEach(item, merges) merge_add(t, v, item);
}

/* With "ignore_merges", a piece that is a token is not divided. Otherwise it is what its merges make of it. */
static void merges_find_divided(Tokenizer *t) {
    int32_t *ids = NULL;
    size_t capacity = 0, divided = 0;
    Encoder e = encoder_open(t, &ids, &capacity, 0);
    uint8_t *is_divided = new_array(uint8_t, t->vocab_size);
    for (int32_t id = 0; id < t->vocab_size; id++) {
        if (is_special_token(t, id)) continue;
        const char *bytes = t->bytes + t->start[id];
        size_t n = token_length(t, id), known = 0;
        while (known < n && !t->missing[(uint8_t)bytes[known]]) known++;
        if (known < n) continue; // no text leads to it: bytes that have no token are skipped before
        e.used = 0;
        encode_by_merges(&e, bytes, n);
        is_divided[id] = e.used != 1;
        divided += is_divided[id];
    }
    t->is_divided = divided ? is_divided : NULL;
    if (!divided) free(is_divided);
    free(ids);
    encoder_close(&e);
}

// ---------------------------------------------------------------------------
// tokens that begin and end a document or a turn

/* The special token that `key` names, as a text or as an object with "content", in the tokenizer_config.json next to
 * `path` or, failing that, in special_tokens_map.json. To be freed; NULL: neither names one. */
static char *special_name_beside(const char *path, const char *key) {
    static const char *const files[] = {"tokenizer_config.json", "special_tokens_map.json"};
    char *found = NULL;
    for (int i = 0; i < 2 && !found; i++) {
        char source[4096];
        path_beside(source, sizeof source, path, files[i]);
        cJSON *json = json_read_object(source, "a JSON object of Hugging Face's");
        const cJSON *item = json_get(json, key);
        const char *name = json_string_or(cJSON_IsObject(item) ? json_get(item, "content") : item, "");
        if (name[0]) found = checked_strdup(name);
        cJSON_Delete(json);
    }
    return found;
}

static int32_t special_beside(const Tokenizer *t, const char *path, const char *key) {
    char *name = special_name_beside(path, key);
    int32_t id = name ? tokenizer_special(t, name) : NO_TOKEN;
    free(name);
    return id;
}

/* tokenizer.json does not say what its special tokens are for. Their names do for those that end a document or a turn
 * or, failing that, tokenizer_config.json next to it. What begins a document is what the post-processor puts there or,
 * failing that, what tokenizer_config.json names, or what its name says. */
static void tokenizer_find_ends(Tokenizer *t, const char *path) {
    static const char *const known[][3] = {{"<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"},
                                           {"<|im_start|>", "<|endoftext|>", "<|im_end|>"}};
    char config_path[4096];
    path_beside(config_path, sizeof config_path, path, "tokenizer_config.json");
    t->bos = t->front != NO_TOKEN ? t->front : special_beside(t, path, "bos_token");
    t->eos = t->eot = NO_TOKEN;
    for (int i = 0; i < 2 && t->eos == NO_TOKEN; i++) {
        t->eos = tokenizer_special(t, known[i][1]);
        if (t->eos == NO_TOKEN) continue;
        t->eot = tokenizer_special(t, known[i][2]);
        if (t->bos == NO_TOKEN) t->bos = tokenizer_special(t, known[i][0]);
    }
    int32_t end = special_beside(t, path, "eos_token");
    if (t->eos == NO_TOKEN) t->eos = end;
    else if (t->eot == NO_TOKEN && end != t->eos) t->eot = end;
    if (t->eos == NO_TOKEN)
        user_error("tokenizer %s does not say which token ends a document: expected the special token <|end_of_text|> "
                   "or <|endoftext|>, or one that \"eos_token\" names in %s",
                   path, config_path);
}

// ---------------------------------------------------------------------------
// opening a file

/* Sets the token that the post-processor puts in front of a text. */
static void tokenizer_find_front(Tokenizer *t, const char *path, const cJSON *post_processor) {
    char what[UNSUPPORTED_BYTES];
    const char *name;
    int32_t id;
    post_processor_is_known(post_processor, &name, &id, what);
    t->front = name && id == NO_TOKEN ? tokenizer_special(t, name) : id;
    if (name && (t->front == NO_TOKEN || t->front >= t->vocab_size))
        user_error("tokenizer %s: the post-processor puts '%.80s' in front of a text, and \"added_tokens\" has no such "
                   "special token",
                   path, name);
}

static Tokenizer *tokenizer_from_parsed_json(const char *path, const cJSON *root, size_t text_length) {
    Tokenizer *t = new_array(Tokenizer, 1);
    JsonVocabulary v = ZERO;
    v.path = path;
    v.model = json_get(root, "model");
    v.added = json_get(root, "added_tokens");
    v.scratch = (char *)checked_malloc(text_length + 1);
    bytes_of_characters(v.bytes_of);
    vocabulary_read_model(&v);
    vocabulary_read_added(&v);
    vocabulary_build(t, &v, text_length);
    merges_read(t, &v);
    if (!cJSON_IsTrue(json_get(v.model, "ignore_merges"))) merges_find_divided(t);
    tokenizer_find_front(t, path, json_get(root, "post_processor"));
    tokenizer_find_ends(t, path);
    t->expression = pre_tokenizer_expression(json_get(root, "pre_tokenizer"));
    t->llama3 = t->expression == llama3_split;
    t->split = split_open(path, 0, t->expression);
    free(v.scratch);
    free(v.names);
    free(v.is_special);
    return t;
}

/* `text` (len, and a NUL): the contents of the tokenizer.json `path`, which errors name; frees it. */
static Tokenizer *tokenizer_from_json(const char *path, char *text, size_t len) {
    char what[UNSUPPORTED_BYTES];
    if (json_has_zero_byte(text)) // cJSON would end the string there
        user_error("tokenizer %s has \\u0000 in a string, expected text without this character", path);
    cJSON *root = json_parse_object(text, len, path, "a Hugging Face tokenizer.json");
    json_refuse_duplicates(root, path);
    if (!tokenizer_json_is_known(root, what))
        user_error("tokenizer %s needs %s, which this program does not implement; expected byte-level BPE that splits "
                   "text as Llama 3, SmolLM2 or GPT-2 does",
                   path, what);
    Tokenizer *t = tokenizer_from_parsed_json(path, root, len);
    sha256(text, len, t->fingerprint);
    cJSON_Delete(root);
    free(text);
    return t;
}

static int text_is_json(const char *text) { return text[strspn(text, " \t\r\n")] == '{'; }

/* `text` (len, and a NUL): the contents of the tokenizer file `path` of any format; frees it. "add_bos_token" in
 * tokenizer_config.json says whether a tokenizer.model puts BOS in front of a text, as for transformers. */
static Tokenizer *tokenizer_from_text(const char *path, char *text, size_t len) {
    char source[4096];
    if (text_is_json(text)) return tokenizer_from_json(path, text, len);
    Tokenizer *t = tokenizer_from_model(path, text, len);
    path_beside(source, sizeof source, path, "tokenizer_config.json");
    cJSON *config = json_read_object(source, "a Hugging Face tokenizer_config.json");
    if (cJSON_IsTrue(json_get(config, "add_bos_token"))) t->front = t->bos;
    cJSON_Delete(config);
    return t;
}

/* Is this a tokenizer file that this program reads? If not, `what` says why, after "the tokenizer PATH ". */
static int tokenizer_text_is_known(const char *path, const char *text, size_t len, char what[UNSUPPORTED_BYTES]) {
    char needs[UNSUPPORTED_BYTES];
    if (!text_is_json(text)) {
        size_t n = strlen(tokenizer_header_words[0]), line = strcspn(text, "\n");
        int is_known = !strncmp(text, tokenizer_header_words[0], n) || (line > 2 && !strncmp(text + line - 2, " 0", 2));
        snprintf(what, UNSUPPORTED_BYTES, "is of a kind that this program does not read");
        return is_known;
    }
    cJSON *root = json_parse_object(text, len, path, "a Hugging Face tokenizer.json");
    int is_known = tokenizer_json_is_known(root, needs);
    cJSON_Delete(root);
    if (!is_known) snprintf(what, UNSUPPORTED_BYTES, "needs %.340s, which this program does not implement", needs);
    return is_known;
}

static inline Tokenizer *tokenizer_open(const char *path) {
    size_t len;
    char *text = tokenizer_read_file(path, &len);
    tokenizer_refuse_damaged(path, text, len);
    return tokenizer_from_text(path, text, len);
}

#endif
