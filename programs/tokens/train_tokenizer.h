/* train_tokenizer.h: trains a tokenizer.model of a given size on text, by byte-pair encoding (Sennrich et al. 2016, on
 * bytes as in GPT-2): the most frequent pair of adjacent tokens becomes a new token, until there are enough.
 *
 * The size includes Llama 3's 256 special tokens, which have no line in the file. Ranks 0 to 255 are the single bytes.
 * Among equally frequent pairs the one with the smaller ids is merged, so the same text gives the same file. Pieces and
 * pairs are counted in memory; of more text than MAX_TEXT, the first part of each file is used, the same share of all.
 */
#ifndef TRAIN_TOKENIZER_H
#define TRAIN_TOKENIZER_H
#include "corpus.h"
#include "tokens_options.h"       // defines: TokensOptions
#include "../shared/text_input.h" // defines: utf8_valid_length

enum {
    MAX_PIECE = 4096,  // bytes; longer pieces are not language (base64, minified code) and are ignored
    MAX_TOKEN = 128,   // bytes, the length of Llama 3's longest token
    MAX_TEXT = 1 << 29 // bytes
};

/* A distinct piece of text. */
typedef struct {
    char *bytes;
    uint32_t len, hash;
    int64_t count;    // how often it occurs
    int32_t *symbols; // (num_symbols) its tokens so far
    uint32_t num_symbols;
} TextPiece;

/* A pair of adjacent tokens. */
typedef struct {
    uint64_t key;    // left << 32 | right
    int64_t count;   // how often it occurs in the text
    uint32_t *where; // (num_where) pieces that contain it, or did
    uint32_t num_where, room;
} Pair;

typedef struct {
    int64_t count;
    uint64_t key; // of a pair
} MergeCandidate;

typedef struct {
    Tokenizer t;           // the vocabulary so far; only its table of tokens is set
    TextPiece *pieces;     // (num_pieces)
    uint32_t *piece_slots; // (piece_mask + 1) hash table: index of a piece + 1; 0: empty
    uint32_t piece_mask, num_pieces, max_pieces;
    Pair *pairs; // (pair_mask + 1) hash table with open addressing; `where` is NULL in an empty slot
    uint64_t pair_mask, num_pairs;
    MergeCandidate
        *heap; // the most frequent pair on top; an entry with an outdated count is corrected when it is popped
    size_t heap_size, heap_room;
} TokenizerTrainer;

// ---------------------------------------------------------------------------
// the distinct pieces of the text, and how often each occurs

static void pieces_grow(TokenizerTrainer *b) {
    b->max_pieces = 2 * b->max_pieces + 4096;
    b->pieces = (TextPiece *)grown(b->pieces, b->max_pieces * sizeof *b->pieces);
    uint32_t slots = 1;
    while (slots < 2 * b->max_pieces) slots *= 2;
    free(b->piece_slots);
    b->piece_slots = (uint32_t *)checked_malloc(slots * sizeof *b->piece_slots);
    b->piece_mask = slots - 1;
    for (uint32_t p = 0; p < b->num_pieces; p++) {
        uint32_t i = b->pieces[p].hash & b->piece_mask;
        while (b->piece_slots[i]) i = (i + 1) & b->piece_mask;
        b->piece_slots[i] = p + 1;
    }
}

static void piece_count(TokenizerTrainer *b, const char *bytes, size_t len) {
    if (len > MAX_PIECE) return;
    if (b->num_pieces == b->max_pieces) pieces_grow(b);
    uint32_t hash = token_hash(bytes, len), i = hash & b->piece_mask;
    for (; b->piece_slots[i]; i = (i + 1) & b->piece_mask) {
        TextPiece *p = &b->pieces[b->piece_slots[i] - 1];
        if (p->hash == hash && p->len == len && !memcmp(p->bytes, bytes, len)) {
            p->count++;
            return;
        }
    }
    TextPiece *p = &b->pieces[b->num_pieces];
    p->bytes = (char *)checked_malloc(len);
    memcpy(p->bytes, bytes, len);
    p->len = (uint32_t)len;
    p->num_symbols = (uint32_t)len;
    p->hash = hash;
    p->count = 1;
    p->symbols = (int32_t *)checked_malloc(len * sizeof *p->symbols);
    for (size_t j = 0; j < len; j++) p->symbols[j] = (uint8_t)bytes[j];
    b->piece_slots[i] = ++b->num_pieces;
}

/* Counts the pieces of the corpus. Returns the number of bytes that were used. */
static uint64_t pieces_of(TokenizerTrainer *b, const Corpus *corpus) {
    pcre2_code *split = split_open("", 0, llama3_split);
    uint64_t bytes = 0;
    for (size_t d = 0; d < corpus->count; d++) {
        const InputFile *file = &corpus->files[d];
        size_t len =
            (size_t)(corpus->len <= MAX_TEXT ? file->len : file->len * ((double)MAX_TEXT / (double)corpus->len));
        char *text = (char *)checked_malloc(len);
        InputStream s;
        text_open(&s, file);
        text_read(&s, file, text, len);
        stream_close(&s);
        len = utf8_valid_length(text, len); // the last character may be incomplete
        Splitter splitter = splitter_open(split, 1, len);
        for (size_t at = 0, end; at < len; at = end) {
            end = split_next(&splitter, text, len, at);
            piece_count(b, text + at, end - at);
        }
        splitter_close(&splitter);
        bytes += len;
        free(text);
    }
    pcre2_code_free(split);
    return bytes;
}

// ---------------------------------------------------------------------------
// pairs of adjacent tokens, and the most frequent of them

static int more_frequent(MergeCandidate a, MergeCandidate b) {
    return a.count != b.count ? a.count > b.count : a.key < b.key;
}

static void candidate_push(TokenizerTrainer *b, int64_t count, uint64_t key) {
    MergeCandidate c = {count, key};
    if (b->heap_size == b->heap_room) {
        b->heap_room = 2 * b->heap_room + 4096;
        b->heap = (MergeCandidate *)grown(b->heap, b->heap_room * sizeof *b->heap);
    }
    size_t i = b->heap_size++;
    while (i && more_frequent(c, b->heap[(i - 1) / 2])) {
        b->heap[i] = b->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    b->heap[i] = c;
}

static MergeCandidate candidate_pop(TokenizerTrainer *b) {
    MergeCandidate top = b->heap[0], last = b->heap[--b->heap_size];
    size_t i = 0;
    for (size_t child = 1; child < b->heap_size; child = 2 * i + 1) {
        if (child + 1 < b->heap_size && more_frequent(b->heap[child + 1], b->heap[child])) child++;
        if (!more_frequent(b->heap[child], last)) break;
        b->heap[i] = b->heap[child];
        i = child;
    }
    b->heap[i] = last;
    return top;
}

static Pair *pair_slot(Pair *pairs, uint64_t mask, uint64_t key) {
    uint64_t i = (key * 0x9E3779B97F4A7C15u) >> 20 & mask; // Fibonacci hashing (Knuth, volume 3, section 6.4)
    while (pairs[i].where && pairs[i].key != key) i = (i + 1) & mask;
    return &pairs[i];
}

static Pair *pair_find(TokenizerTrainer *b, uint64_t key) {
    if (2 * b->num_pairs >= b->pair_mask) {
        uint64_t mask = 2 * b->pair_mask + 1;
        Pair *wider = (Pair *)checked_malloc((mask + 1) * sizeof *wider);
        for (uint64_t i = 0; b->pairs && i <= b->pair_mask; i++)
            if (b->pairs[i].where) *pair_slot(wider, mask, b->pairs[i].key) = b->pairs[i];
        free(b->pairs);
        b->pairs = wider;
        b->pair_mask = mask;
    }
    Pair *p = pair_slot(b->pairs, b->pair_mask, key);
    if (p->where) return p;
    b->num_pairs++;
    p->key = key;
    p->room = 4;
    p->where = (uint32_t *)checked_malloc(p->room * sizeof *p->where);
    return p;
}

/* Adds the pairs of a piece to the counts (sign +1) or removes them (-1). When adding, the piece is recorded in the
 * pairs that contain `token`; with NO_TOKEN in all of them. */
static void piece_add_pairs(TokenizerTrainer *b, uint32_t piece, int sign, int32_t token) {
    const TextPiece *p = &b->pieces[piece];
    for (uint32_t i = 0; i + 1 < p->num_symbols; i++) {
        int32_t left = p->symbols[i], right = p->symbols[i + 1];
        Pair *pair = pair_find(b, (uint64_t)left << 32 | (uint32_t)right);
        pair->count += sign * p->count;
        if (sign < 0 || (token != NO_TOKEN && left != token && right != token)) continue;
        if (!pair->num_where || pair->where[pair->num_where - 1] != piece) {
            if (pair->num_where == pair->room) {
                pair->room *= 2;
                pair->where = (uint32_t *)grown(pair->where, pair->room * sizeof *pair->where);
            }
            pair->where[pair->num_where++] = piece;
        }
        if (token != NO_TOKEN) candidate_push(b, pair->count, pair->key);
    }
}

/* Replaces the pair by `token` in every piece, from left to right, as the encoder does. */
static void merge_everywhere(TokenizerTrainer *b, uint64_t key, int32_t token) {
    int32_t left = (int32_t)(key >> 32), right = (int32_t)key;
    Pair *pair = pair_find(b, key);
    uint32_t *where = pair->where, num_where = pair->num_where;
    pair->where = (uint32_t *)checked_malloc(sizeof *where); // the table of pairs may move below
    pair->num_where = 0;
    pair->room = 1;
    for (uint32_t w = 0; w < num_where; w++) {
        TextPiece *p = &b->pieces[where[w]];
        int32_t *s = p->symbols;
        uint32_t i = 0, n = 0;
        while (i + 1 < p->num_symbols && (s[i] != left || s[i + 1] != right)) i++;
        if (i + 1 >= p->num_symbols) continue; // it no longer contains the pair
        piece_add_pairs(b, where[w], -1, token);
        for (i = 0; i < p->num_symbols; i++) {
            int merges = i + 1 < p->num_symbols && s[i] == left && s[i + 1] == right;
            s[n++] = merges ? token : s[i];
            i += (uint32_t)merges;
        }
        p->num_symbols = n;
        piece_add_pairs(b, where[w], +1, token);
    }
    free(where);
}

// ---------------------------------------------------------------------------
// the vocabulary

static void tokenizer_learn(TokenizerTrainer *b, int n_base) {
    Tokenizer *t = &b->t;
    tokenizer_allocate(t, (size_t)n_base, (size_t)n_base * MAX_TOKEN);
    for (int byte = 0; byte < 256; byte++) {
        t->bytes[byte] = (char)byte;
        tokenizer_add_base(t, byte, 1);
    }
    for (uint32_t p = 0; p < b->num_pieces; p++) piece_add_pairs(b, p, +1, NO_TOKEN);
    for (uint64_t i = 0; b->pairs && i <= b->pair_mask; i++)
        if (b->pairs[i].where) candidate_push(b, b->pairs[i].count, b->pairs[i].key);
    while (t->n_base < n_base && b->heap_size) {
        MergeCandidate c = candidate_pop(b);
        int64_t count = pair_find(b, c.key)->count;
        if (count < c.count && count > 0) candidate_push(b, count, c.key);
        if (count != c.count || count == 0) continue; // an increase has pushed another entry
        int32_t left = (int32_t)(c.key >> 32), right = (int32_t)c.key;
        size_t n = token_length(t, left) + token_length(t, right);
        char *bytes = t->bytes + t->start[t->n_base]; // where the next token belongs
        if (n > MAX_TOKEN) continue;
        memcpy(bytes, t->bytes + t->start[left], token_length(t, left));
        memcpy(bytes + token_length(t, left), t->bytes + t->start[right], token_length(t, right));
        int32_t token = token_find(t, bytes, n); // several pairs may form the same token: a+bc, ab+c
        if (token == NO_TOKEN) {
            token = t->n_base;
            tokenizer_add_base(t, token, n);
        }
        merge_everywhere(b, c.key, token);
    }
}

/* Trains a tokenizer on the texts that the options name. */
static void train_tokenizer(const TokensOptions *o) {
    static TokenizerTrainer b;
    Corpus corpus = ZERO;
    const Output output = {"--out", o->out};
    const int vocab_size = o->vocab_size;
    for (int i = 0; i < o->num_files; i++) corpus_add_path(&corpus, o->files[i]);
    double started = seconds_now();
    refuse_replaced_documents(&output, &corpus, 1);
    corpus_check(&corpus, "text");
    for (size_t i = 0; i < corpus.count; i++)
        if (corpus.files[i].is_json_lines)
            user_error("%s is JSON lines, but a tokenizer is trained on text files: write the texts of some lines to a "
                       "file (jq -r .text), or use an existing tokenizer",
                       corpus.files[i].path);
    refuse_replaced_documents(&output, &corpus, 0);
    uint64_t bytes = pieces_of(&b, &corpus);
    int n_base = vocab_size - NUM_SPECIAL_TOKENS;
    tokenizer_learn(&b, n_base);
    if (b.t.n_base < n_base)
        user_error("%" PRIu64 " bytes of text contain pairs for only %d tokens, but %d were asked for; give more text, "
                   "or --vocab-size %d",
                   bytes, b.t.n_base, n_base, b.t.n_base + NUM_SPECIAL_TOKENS);
    FILE *f = output_open(output.path, 0);
    for (int32_t id = 0; id < n_base; id++) token_line_write(f, b.t.bytes + b.t.start[id], token_length(&b.t, id), id);
    output_close(f, output.path);
    printf("%s: %d tokens (%d of the text, %d special) from %.2f MB in %u distinct pieces, %.2f s\n", output.path,
           vocab_size, n_base, NUM_SPECIAL_TOKENS, (double)bytes / 1e6, b.num_pieces, seconds_now() - started);
    if (bytes < corpus.len)
        printf("  a sample: the first %.1f %% of each file\n", 100 * (double)bytes / (double)corpus.len);
}

#endif
