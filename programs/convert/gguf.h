/* gguf.h: lays out a GGUF file, the format of llama.cpp and ollama, and writes ollama's Modelfile.
 *
 * A GGUF file is: "GGUF", version 3, the numbers of tensors and of metadata, the metadata (key, type, value), the list
 * of tensors (name, sizes, type, offset), and their data, each at a multiple of GGUF_ALIGN bytes. All numbers are
 * little-endian. It holds the model, its tokenizer and its chat template. A caller may rely on: the bytes depend on the
 * weights, the configuration, the tokenizer and the name alone, not on the layout of the run. */
#ifndef GGUF_H
#define GGUF_H
#include "../../run/checkpoint/safetensors.h" // defines: OutputFiles, OutputTensor, chunks_of
#include "../shared/tokenizer_files.h"        // defines: tokenizer_merges, write_token_text, TokenizerFiles

/* GGUF's numbers of the types of metadata, of those that this file writes. */
typedef enum { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_F32 = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 } GgufValue;

/* By StDtype: ggml's type of a tensor, llama.cpp's of a file (general.file_type). GGUF has neither int32 nor int8. */
static const uint32_t gguf_types[ST_DTYPES + 1] = {0, 30, 1, 0, 0, 8};
static const uint32_t gguf_file_types[ST_DTYPES + 1] = {0, 32, 1, 0, 0, 7};

/* Is this the name of a GGUF file? */
static int is_gguf(const char *path) {
    size_t n = path ? strlen(path) : 0;
    return n > 5 && !strcmp(path + n - 5, ".gguf") && path[n - 6] != '/';
}

// ---------------------------------------------------------------------------
// metadata

typedef struct {
    FILE *f;    // writes the text
    char *text; // (length)
    size_t length;
    uint64_t count; // of keys
} GgufMetadata;

static void gguf_u32(FILE *f, uint32_t x) { fwrite(&x, sizeof x, 1, f); }
static void gguf_u64(FILE *f, uint64_t x) { fwrite(&x, sizeof x, 1, f); }
static void gguf_bytes(FILE *f, const char *text, size_t length) {
    gguf_u64(f, length);
    fwrite(text, 1, length, f);
}

static void gguf_key(GgufMetadata *m, const char *key, GgufValue value) {
    gguf_bytes(m->f, key, strlen(key));
    gguf_u32(m->f, value);
    m->count++;
}
static void gguf_add_u32(GgufMetadata *m, const char *key, uint32_t x) {
    gguf_key(m, key, GGUF_U32);
    gguf_u32(m->f, x);
}
static void gguf_add_f32(GgufMetadata *m, const char *key, float x) {
    gguf_key(m, key, GGUF_F32);
    fwrite(&x, sizeof x, 1, m->f);
}
static void gguf_add_string(GgufMetadata *m, const char *key, const char *text) {
    gguf_key(m, key, GGUF_STRING);
    gguf_bytes(m->f, text, strlen(text));
}
static void gguf_add_array(GgufMetadata *m, const char *key, GgufValue element, uint64_t count) {
    gguf_key(m, key, GGUF_ARRAY);
    gguf_u32(m->f, element);
    gguf_u64(m->f, count);
}
static void gguf_add_token(GgufMetadata *m, const char *key, int32_t id) {
    if (id != NO_TOKEN) gguf_add_u32(m, key, (uint32_t)id);
}

static void gguf_add_model(GgufMetadata *m, const Llama3Config *c, StDtype dtype, const char *name) {
    gguf_add_string(m, "general.architecture", "llama");
    gguf_add_string(m, "general.type", "model");
    char *valid = valid_utf8(name);
    gguf_add_string(m, "general.name", valid);
    free(valid);
    gguf_add_u32(m, "general.file_type", gguf_file_types[dtype]);
    gguf_add_u32(m, "general.quantization_version", 2);
    gguf_add_u32(m, "general.alignment", GGUF_ALIGN);
    gguf_add_u32(m, "llama.block_count", (uint32_t)c->L);
    gguf_add_u32(m, "llama.context_length", (uint32_t)c->max_positions);
    gguf_add_u32(m, "llama.embedding_length", (uint32_t)c->C);
    gguf_add_u32(m, "llama.feed_forward_length", (uint32_t)c->F);
    gguf_add_u32(m, "llama.attention.head_count", (uint32_t)c->NH);
    gguf_add_u32(m, "llama.attention.head_count_kv", (uint32_t)c->NKV);
    gguf_add_u32(m, "llama.attention.key_length", (uint32_t)c->HD);
    gguf_add_u32(m, "llama.attention.value_length", (uint32_t)c->HD);
    gguf_add_f32(m, "llama.attention.layer_norm_rms_epsilon", c->norm_eps);
    gguf_add_u32(m, "llama.rope.dimension_count", (uint32_t)c->HD);
    gguf_add_f32(m, "llama.rope.freq_base", (float)c->rope_theta);
    gguf_add_u32(m, "llama.vocab_size", (uint32_t)c->V);
}

// ---------------------------------------------------------------------------
// the tokenizer

/* llama.cpp's name of the pre-tokenizer; NULL: it has none that gives this tokenizer's ids. With "llama-bpe", llama.cpp
 * takes a piece that is a token as it is. With the other names it only applies merges, so they must lead to every
 * token. The names of tokens must differ. */
static const char *gguf_split_name(const Tokenizer *t, const Merges *merges) {
    if (!tokenizer_fits_json(t)) return NULL;
    if (t->expression == llama3_split) return t->is_divided ? NULL : "llama-bpe";
    if (!t->is_divided && !merges->reach_all) return NULL;
    if (t->expression == smollm2_split) return "smollm";
    return t->expression == gpt2_split ? "gpt-2" : NULL;
}

/* Writes a string: the tokens' texts, separated by spaces. */
static void gguf_token_text(FILE *f, const Tokenizer *t, const int32_t *ids, int count,
                            const uint16_t characters[256]) {
    uint64_t length = (uint64_t)count - 1;
    for (int i = 0; i < count; i++)
        for (uint64_t b = t->start[ids[i]]; b < t->start[ids[i] + 1]; b++)
            length += characters[(uint8_t)t->bytes[b]] < 0x80 ? 1 : 2; // of UTF-8
    gguf_u64(f, length);
    for (int i = 0; i < count; i++) {
        if (i) fputc(' ', f);
        write_token_text(f, t, ids[i], characters, 0);
    }
}

/* The tokens' texts and types, for all V rows of the embedding. */
static void gguf_add_vocabulary(GgufMetadata *m, const Tokenizer *t, int V, const uint16_t characters[256]) {
    enum { NORMAL = 1, CONTROL = 3, UNUSED = 5 };
    uint8_t *types = new_array(uint8_t, V);
    char unused[32];
    for (int32_t id = 0; id < V; id++) types[id] = id < t->vocab_size ? NORMAL : UNUSED;
    for (int i = 0; i < t->num_special; i++) types[t->special[i]] = CONTROL;
    gguf_add_array(m, "tokenizer.ggml.tokens", GGUF_STRING, (uint64_t)V);
    for (int32_t id = 0; id < V; id++) {
        snprintf(unused, sizeof unused, "[PAD%d]", id);
        if (types[id] == NORMAL) gguf_token_text(m->f, t, &id, 1, characters);
        else if (types[id] == CONTROL) gguf_bytes(m->f, t->bytes + t->start[id], token_length(t, id));
        else gguf_bytes(m->f, unused, strlen(unused));
    }
    gguf_add_array(m, "tokenizer.ggml.token_type", GGUF_I32, (uint64_t)V);
    for (int32_t id = 0; id < V; id++) gguf_u32(m->f, types[id]);
    free(types);
}

/* The token that ends a text. llama.cpp also stops at eot_token_id, and at tokens with names such as <|eot_id|>. */
static int32_t gguf_eos(const Tokenizer *t, const StopTokens *listed) {
    for (int i = 0; i < listed->count; i++)
        if (listed->ids[i] == t->eos) return t->eos;
    return listed->count ? listed->ids[0] : t->eos;
}

/* Makes the tokenizer's metadata, once for all ranks of a process; the caller frees m->text. V: embedding rows. */
static void gguf_tokenizer_open(GgufMetadata *m, const Tokenizer *t, int V, const TokenizerFiles *files) {
    int32_t turn_end = files->form ? tokenizer_special(t, files->form->end) : NO_TOKEN;
    uint16_t characters[256];
    Merges merges = tokenizer_merges(t);
    const char *split = gguf_split_name(t, &merges);
    byte_characters(characters);
    if (!split)
        user_error("--export FILE.gguf: GGUF files cannot represent this tokenizer; expected the pre-tokenizer of "
                   "Llama 3, SmolLM2 or GPT-2, merges that lead to every token, and special tokens whose names no "
                   "other token has: export a directory instead");
    m->f = text_stream_open(&m->text, &m->length);
    gguf_add_string(m, "tokenizer.ggml.model", "gpt2"); // byte-level BPE
    gguf_add_string(m, "tokenizer.ggml.pre", split);
    gguf_add_vocabulary(m, t, V, characters);
    gguf_add_array(m, "tokenizer.ggml.merges", GGUF_STRING, (uint64_t)merges.count);
    for (int32_t i = 0; i < merges.count; i++) {
        const int32_t ids[2] = {merges.list[i].left, merges.list[i].right};
        gguf_token_text(m->f, t, ids, 2, characters);
    }
    gguf_add_token(m, "tokenizer.ggml.bos_token_id", t->bos);
    gguf_add_token(m, "tokenizer.ggml.eos_token_id", gguf_eos(t, &files->copies.ids.eos));
    gguf_add_token(m, "tokenizer.ggml.eot_token_id", turn_end != NO_TOKEN ? turn_end : t->eot);
    gguf_key(m, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
    fputc(t->front != NO_TOKEN, m->f);
    if (files->chat_template) gguf_add_string(m, "tokenizer.chat_template", files->chat_template);
    text_stream_close(m->f);
    free(merges.list);
}

// ---------------------------------------------------------------------------
// tensors

static void gguf_tensor_name(char name[128], const Tensor *t) {
    static const char *const names[] = {"token_embd", "attn_norm",   "attn_q",      "attn_k",
                                        "attn_v",     "attn_output", "ffn_norm",    "ffn_gate",
                                        "ffn_up",     "ffn_down",    "output_norm", "output"}; // by WeightKind
    int block = 0;
    if (t->row->unit != UNIT_BLOCK) snprintf(name, 128, "%s.weight", names[t->row->kind]);
    else if (sscanf(t->name, "model.layers.%d.", &block) == 1)
        snprintf(name, 128, "blk.%d.%s.weight", block, names[t->row->kind]);
    else run_failure("a GGUF file has no name for %s", t->name);
}

/* Norms are stored in fp32 and matrices in `dtype`. A matrix whose rows are no multiple of 32 elements cannot be stored
 * in q8_0 and is stored in fp16, as by llama.cpp's converter. */
static StDtype gguf_dtype(const Tensor *t, StDtype dtype) {
    if (t->row->rows == DIM_ONE) return ST_F32;
    return dtype == GGUF_Q8_0 && t->cols % Q8_0_BLOCK ? ST_F16 : dtype;
}

/* ggml rotates neighbors 2i and 2i + 1 of a head, while transformers and this program rotate i and i + HD/2, so the
 * rows of wq and wk are interleaved: row i, then row i + HD/2. */
static OutputTensor gguf_tensor(const Tensor *tensor, const Llama3Config *c, StDtype dtype) {
    OutputTensor t = {"", tensor, STATE_MASTER, gguf_dtype(tensor, dtype), 0, 0, tensor->rows * tensor->cols, 0, 0};
    gguf_tensor_name(t.name, tensor);
    if (tensor->row->kind == W_Q || tensor->row->kind == W_K) t.interleaved_rows = c->HD;
    t.bytes = t.dtype == GGUF_Q8_0 ? t.elements / Q8_0_BLOCK * Q8_0_BLOCK_BYTES : t.elements * st_dtype_sizes[t.dtype];
    t.padding = round_up(t.bytes, GGUF_ALIGN) - t.bytes;
    return t;
}

/* GGUF lists sizes innermost first: cols, then rows. `rows` is 0 for a vector. */
static void gguf_list_tensor(FILE *f, const char *name, StDtype dtype, int64_t rows, int64_t cols, int64_t offset) {
    gguf_bytes(f, name, strlen(name));
    gguf_u32(f, rows > 0 ? 2 : 1);
    gguf_u64(f, (uint64_t)cols);
    if (rows > 0) gguf_u64(f, (uint64_t)rows);
    gguf_u32(f, gguf_types[dtype]);
    gguf_u64(f, (uint64_t)offset);
}

/* Llama 3.1's scaling of RoPE: what each frequency is divided by. */
static void gguf_rope_divisors(const Llama3Config *c, FILE *f) {
    for (int i = 0; i < c->HD / 2; i++) {
        float divisor = rope_base_frequency(c, i) / rope_frequency(c, i);
        fwrite(&divisor, sizeof divisor, 1, f);
    }
}

static void gguf_align(FILE *f) {
    while (ftell(f) % GGUF_ALIGN) fputc(0, f);
}

/* Lays out tensors [0, end) of the table as one file of dtype o->dtype; all but the weights is in the file's header. */
static void gguf_layout(OutputFiles *o, const TensorTable *table, int end, const Llama3Config *c,
                        const GgufMetadata *tokenizer, const char *name) {
    int is_scaled = c->rope_factor != 1;
    int64_t divisors = is_scaled ? round_up(c->HD / 2 * (int64_t)sizeof(float), GGUF_ALIGN) : 0, at = divisors;
    char *header;
    size_t header_bytes;
    GgufMetadata model = ZERO;
    model.f = text_stream_open(&model.text, &model.length);
    gguf_add_model(&model, c, o->dtype, name);
    text_stream_close(model.f);
    FILE *f = text_stream_open(&header, &header_bytes);
    fwrite("GGUF", 1, 4, f);
    gguf_u32(f, 3);
    gguf_u64(f, (uint64_t)(end + is_scaled));
    gguf_u64(f, model.count + tokenizer->count);
    fwrite(model.text, 1, model.length, f);
    fwrite(tokenizer->text, 1, tokenizer->length, f);
    if (is_scaled) gguf_list_tensor(f, "rope_freqs.weight", ST_F32, 0, c->HD / 2, 0);
    o->tensors = new_array(OutputTensor, end);
    o->files = new_array(OutputFile, 1);
    for (int i = 0; i < end; i++) {
        const Tensor *tensor = &table->tensors[i];
        OutputTensor *out = &o->tensors[o->num_tensors++];
        *out = gguf_tensor(tensor, c, o->dtype);
        int64_t rows = tensor->row->rows == DIM_ONE ? 0 : tensor->rows;
        gguf_list_tensor(f, out->name, out->dtype, rows, tensor->cols, at);
        at += out->bytes + out->padding;
    }
    gguf_align(f);
    if (is_scaled) gguf_rope_divisors(c, f);
    gguf_align(f);
    text_stream_close(f);
    free(model.text);
    OutputFile *file = &o->files[o->num_files++];
    snprintf(file->name, sizeof file->name, "model.gguf");
    file->parts = 1;
    file->count = end;
    file->header = header;
    file->header_bytes = (int64_t)header_bytes;
    file->bytes = file->header_bytes + at - divisors;
    file->chunks = o->chunks = chunks_of(file->bytes);
}

// ---------------------------------------------------------------------------
// ollama's Modelfile

/* `file`: the GGUF file's name. A chat template that this program does not know, or that writes the date, is left to
 * ollama, which finds it in the GGUF file; without one, ollama passes the prompt on as it is. */
static char *modelfile_text(const char *file, const TokenizerFiles *tokenizer, size_t *length) {
    char *text;
    const ChatTemplate *form = tokenizer->form;
    FILE *f = text_stream_open(&text, length);
    fprintf(f, "# for ollama: ollama create NAME -f THIS_FILE\nFROM ./%s\n", file);
    if (form && !form->system_start) {
        const char *close = form->close ? form->close : "";
        const char *begin = form->begin && !tokenizer->adds_front ? form->begin : ""; // otherwise ollama adds it
        fprintf(f, "TEMPLATE \"\"\"%s{{ range .Messages }}%s{{ .Role }}%s%s", begin, form->open, close,
                form->before_content);
        fprintf(f, "{{ .Content }}%s%s{{ end }}", form->end, form->after_turn);
        fprintf(f, "%sassistant%s%s\"\"\"\n", form->open, close, form->before_content);
        if (form->system) fprintf(f, "SYSTEM \"\"\"%s\"\"\"\n", form->system);
    } else if (!tokenizer->chat_template) {
        fprintf(f, "TEMPLATE \"{{ .Prompt }}\"\n");
    }
    if (form) fprintf(f, "PARAMETER stop \"%s\"\n", form->end);
    text_stream_close(f);
    return text;
}

#endif
