/* test_gguf.h: GGUF files hold the model's weights, configuration and tokenizer, which a reader of this file finds, and
 * their bytes do not depend on the layout. Part of test_convert_llama3.cu. */

/* A tokenizer.json with the letters a to z, one merge and two special tokens: fits the vocabulary of every fixture. */
static const char *write_gguf_tokenizer(void) {
    const char *path = strdup(scratch_path("gguf-tokenizer.json"));
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"version\":\"1.0\",\"added_tokens\":[" JSON_TOKEN("27", "<|endoftext|>") "," JSON_TOKEN(
                   "28", "<|im_start|>") "],\"normalizer\":null,\"pre_tokenizer\":" JSON_SPLIT
                                         ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{"
                                         "\"SpecialToken\":{\"id\":\"<|im_start|>\"}},{\"Sequence\":{\"id\":\"A\"}}]},"
                                         "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{"
                                         "\"type\":\"BPE\",\"vocab\":{");
    for (char c = 'a'; c <= 'z'; c++) fprintf(f, "\"%c\":%d,", c, c - 'a');
    fprintf(f, "\"ab\":26},\"merges\":[\"a b\"]}}\n");
    fclose(f);
    return path;
}

// ---------------------------------------------------------------------------
// a reader

typedef struct {
    char name[64];
    int64_t rows, cols, offset; // offset: from the first tensor's byte on
    uint32_t type;
} ReadTensor;

typedef struct {
    char *bytes; // of the whole file
    size_t length, at;
    int is_broken;   // something does not fit into the file
    char text[4000]; // all metadata but long lists: "key=value;"
    ReadTensor tensors[64];
    int count;
    const char *data; // the first tensor's
} ReadGguf;

static uint64_t gguf_number(ReadGguf *r, size_t bytes) {
    uint64_t x = 0;
    if (r->at + bytes > r->length) r->is_broken = 1;
    else memcpy(&x, r->bytes + r->at, bytes);
    r->at += bytes;
    return x;
}

static void gguf_text(ReadGguf *r, char *out, size_t size) {
    uint64_t n = gguf_number(r, 8);
    if (n > r->length || r->at + n > r->length) r->is_broken = 1;
    else snprintf(out, size, "%.*s", (int)n, r->bytes + r->at);
    r->at += n;
}

/* Appends a value to the text; of an array its length and first elements. */
static void gguf_value(ReadGguf *r, uint32_t type) {
    char text[600] = "";
    size_t used = strlen(r->text);
    if (type == GGUF_STRING) gguf_text(r, text, sizeof text);
    else if (type == GGUF_F32) {
        uint32_t bits = (uint32_t)gguf_number(r, 4);
        float x;
        memcpy(&x, &bits, sizeof x);
        snprintf(text, sizeof text, "%g", x);
    } else snprintf(text, sizeof text, "%" PRIu64, gguf_number(r, type == GGUF_BOOL ? 1 : 4));
    snprintf(r->text + used, sizeof r->text - used, "%s,", text);
}

static ReadGguf *read_gguf(const char *path) {
    ReadGguf *r = new_array(ReadGguf, 1);
    r->bytes = read_regular_file(path, &r->length);
    r->is_broken = !r->bytes || memcmp(r->bytes, "GGUF\3\0\0\0", 8) != 0;
    r->at = 8;
    r->count = (int)gguf_number(r, 8);
    uint64_t values = gguf_number(r, 8);
    for (uint64_t i = 0; i < values && !r->is_broken; i++) {
        size_t used = strlen(r->text);
        gguf_text(r, r->text + used, sizeof r->text - used);
        strcat(r->text, "=");
        uint32_t type = (uint32_t)gguf_number(r, 4), element = type;
        uint64_t count = 1;
        if (type == GGUF_ARRAY) element = (uint32_t)gguf_number(r, 4);
        if (type == GGUF_ARRAY) count = gguf_number(r, 8);
        for (uint64_t e = 0; e < count && !r->is_broken; e++) gguf_value(r, element);
        strcat(r->text, ";");
    }
    for (int i = 0; i < r->count && !r->is_broken; i++) {
        ReadTensor *t = &r->tensors[i];
        gguf_text(r, t->name, sizeof t->name);
        int sizes = (int)gguf_number(r, 4);
        t->cols = (int64_t)gguf_number(r, 8);
        t->rows = sizes == 2 ? (int64_t)gguf_number(r, 8) : 1;
        t->type = (uint32_t)gguf_number(r, 4);
        t->offset = (int64_t)gguf_number(r, 8);
    }
    r->data = r->bytes + (r->at + 31) / 32 * 32;
    return r;
}

static const ReadTensor *gguf_find(const ReadGguf *r, const char *name) {
    for (int i = 0; i < r->count; i++)
        if (!strcmp(r->tensors[i].name, name)) return &r->tensors[i];
    return NULL;
}

/* ggml's numbers of types; an element, and the largest error that its type may have. */
static float gguf_element(const ReadGguf *r, const ReadTensor *t, int64_t i, float *error) {
    const char *p = r->data + t->offset;
    float x = 0;
    uint16_t half;
    *error = 0;
    if (t->type == 0) {
        memcpy(&x, p + 4 * i, sizeof x);
        return x;
    }
    memcpy(&half, t->type == 8 ? p + i / 32 * 34 : p + 2 * i, sizeof half);
    float as_half = half_to_float(half);
    bf16 b;
    b.bits = half;
    if (t->type == 8) {
        *error = 0.58f * as_half; // half of a step for rounding, and 127 times the rounding of the scale itself
        return as_half * (float)(int8_t)p[i / 32 * 34 + 2 + i % 32];
    }
    x = t->type == 1 ? as_half : bf16_to_float(b);
    *error = t->type == 1 ? fabsf(x) / 2048 + 6e-8f : fabsf(x) / 256;
    return x;
}

static int64_t gguf_tensor_bytes(const ReadTensor *t) {
    int64_t n = t->rows * t->cols;
    if (t->type == 0) return 4 * n;
    return t->type == 8 ? n / 32 * 34 : 2 * n;
}

// ---------------------------------------------------------------------------
// comparisons

/* transformers' name of a tensor, from GGUF's. */
static void name_of_gguf(const char *name, char *out, size_t size) {
    static const char *const pairs[][2] = {
        {"attn_norm", "input_layernorm"}, {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
        {"attn_v", "self_attn.v_proj"},   {"attn_output", "self_attn.o_proj"}, {"ffn_norm", "post_attention_layernorm"},
        {"ffn_gate", "mlp.gate_proj"},    {"ffn_up", "mlp.up_proj"},           {"ffn_down", "mlp.down_proj"},
    };
    char part[32];
    int block;
    snprintf(out, size, "?");
    if (!strcmp(name, "token_embd.weight")) snprintf(out, size, "model.embed_tokens.weight");
    if (!strcmp(name, "output_norm.weight")) snprintf(out, size, "model.norm.weight");
    if (!strcmp(name, "output.weight")) snprintf(out, size, "lm_head.weight");
    if (sscanf(name, "blk.%d.%31[a-z_].weight", &block, part) != 2) return;
    for (int i = 0; i < 9; i++)
        if (!strcmp(part, pairs[i][0])) snprintf(out, size, "model.layers.%d.%s.weight", block, pairs[i][1]);
}

/* How many elements differ from the fixture's by more than their type explains. */
static int64_t gguf_wrong_elements(const ReadGguf *r, const StFiles *weights, const Llama3Config *c, char *first) {
    int64_t wrong = 0;
    for (int i = 0; i < r->count; i++) {
        const ReadTensor *t = &r->tensors[i];
        char name[128];
        name_of_gguf(t->name, name, sizeof name);
        const StTensor *want = st_find(weights, name);
        if (!strcmp(t->name, "rope_freqs.weight")) continue;
        if (!want || want->rows != t->rows || want->cols != t->cols) {
            snprintf(first, 128, "%s has another shape or name", t->name);
            return -1;
        }
        float *values = new_array(float, want->elements);
        st_read(want, values, 0, want->elements);
        int alternate = strstr(t->name, "attn_q") || strstr(t->name, "attn_k");
        for (int64_t e = 0; e < want->elements; e++) {
            int64_t row = e / t->cols, pair = row % c->HD / 2, half = row % 2; // ggml's row: 2 * pair + half of a head
            int64_t from = alternate ? row / c->HD * c->HD + half * (c->HD / 2) + pair : row;
            float error, x = gguf_element(r, t, e, &error);
            int bad = !(fabsf(x - values[from * t->cols + e % t->cols]) <= error);
            if (bad && !wrong) snprintf(first, 128, "first in %.60s at %" PRId64, t->name, e);
            wrong += bad;
        }
        free(values);
    }
    return wrong;
}

/* Tensors begin at multiples of 32, do not overlap and end where the file does. */
static int gguf_is_packed(const ReadGguf *r) {
    int64_t end = 0;
    for (int i = 0; i < r->count; i++) {
        if (r->tensors[i].offset != (end + 31) / 32 * 32) return 0;
        end = r->tensors[i].offset + gguf_tensor_bytes(&r->tensors[i]);
    }
    return !r->is_broken && r->data + (end + 31) / 32 * 32 == r->bytes + r->length;
}

/* What llama.cpp divides the frequencies of RoPE by, as its converter computes it. */
static double gguf_wrong_divisors(const ReadGguf *r, const Llama3Config *c) {
    const ReadTensor *t = gguf_find(r, "rope_freqs.weight");
    double worst = 0;
    if (!t) return c->rope_factor == 1 ? 0 : INFINITY;
    for (int i = 0; i < c->HD / 2; i++) {
        double wavelength = 2 * M_PI * pow(c->rope_theta, 2.0 * i / c->HD), divisor = 1, error;
        double longest = c->rope_original / c->rope_low, shortest = c->rope_original / c->rope_high;
        double smooth = (c->rope_original / wavelength - c->rope_low) / (c->rope_high - c->rope_low);
        if (wavelength > longest) divisor = c->rope_factor;
        else if (wavelength >= shortest) divisor = 1 / ((1 - smooth) / c->rope_factor + smooth);
        float unused;
        error = fabs(gguf_element(r, t, i, &unused) / divisor - 1);
        worst = fmax(worst, error);
    }
    return t->cols == c->HD / 2 ? worst : INFINITY;
}

static void export_gguf_file(const char *fixture, const char *dtype, int world, const char *options, const char *path) {
    char arguments[2048];
    snprintf(arguments, sizeof arguments, "--model %s/%s --export %s --dtype %s --tokenizer %s%s", FIXTURES, fixture,
             path, dtype, scratch_path("gguf-tokenizer.json"), options);
    Job *j = make_job(arguments, world, &transport_threads);
    export_check(path);
    launch(j, 0, export_body);
    end_job(j);
}

static const char *const gguf_dtypes[] = {"fp32", "fp16", "bf16", "q8_0"};

static void test_gguf_contents(const char *fixture, int d) {
    static const uint32_t types[] = {0, 1, 30, 8}, file_types[] = {0, 1, 32, 7}; // of gguf_dtypes, by ggml
    const char *dtype = gguf_dtypes[d];
    char model[1024], path[1024], name[200], first[128] = "";
    snprintf(model, sizeof model, "%s/%s", FIXTURES, fixture);
    snprintf(path, sizeof path, "%s/%s-%s.gguf", scratch_dir, fixture, dtype);
    export_gguf_file(fixture, dtype, 1, "", path);
    ReadGguf *r = read_gguf(path);
    Llama3Config c = config_load(model);
    StFiles weights = ZERO;
    st_open(&weights, model, "model");
    int64_t wrong = gguf_wrong_elements(r, &weights, &c, first);
    int tensors = 2 + !c.tied + 9 * c.L + (c.rope_factor != 1);
    double divisors = gguf_wrong_divisors(r, &c);
    snprintf(name, sizeof name, "GGUF of %s in %s: every weight in its place", fixture, dtype);
    CHECK(name, !wrong && r->count == tensors && gguf_is_packed(r), "%" PRId64 " wrong elements %s, %d of %d tensors%s",
          wrong, first, r->count, tensors, gguf_is_packed(r) ? "" : ", not packed as expected");
    snprintf(name, sizeof name, "GGUF of %s in %s: divisors of RoPE's frequencies", fixture, dtype);
    CHECK(name, divisors < 1e-6, "off by %.2g", divisors);
    char want[600];
    const ReadTensor *embedding = gguf_find(r, "token_embd.weight"), *norm = gguf_find(r, "output_norm.weight");
    uint32_t type = d == 3 && c.C % 32 ? types[1] : types[d];
    snprintf(want, sizeof want, ";general.file_type=%u,;general.quantization_version=2,;general.alignment=32,;",
             file_types[d]);
    snprintf(name, sizeof name, "GGUF of %s in %s: the types of matrices, norms and the file", fixture, dtype);
    CHECK(name, embedding && embedding->type == type && norm && norm->type == 0 && strstr(r->text, want),
          "matrices %u, norms %u", embedding ? embedding->type : 0, norm ? norm->type : 0);
    snprintf(want, sizeof want,
             "llama.block_count=%d,;llama.context_length=%d,;llama.embedding_length=%d,;llama.feed_forward_length=%d,;"
             "llama.attention.head_count=%d,;llama.attention.head_count_kv=%d,;llama.attention.key_length=%d,;"
             "llama.attention.value_length=%d,;llama.attention.layer_norm_rms_epsilon=%g,;llama.rope.dimension_count=%d"
             ",;llama.rope.freq_base=%g,;llama.vocab_size=%d,;tokenizer.ggml.model=gpt2,;tokenizer.ggml.pre=gpt-2,;"
             "tokenizer.ggml.tokens=a,b,c,",
             c.L, c.max_positions, c.C, c.F, c.NH, c.NKV, c.HD, c.HD, c.norm_eps, c.HD, c.rope_theta, c.V);
    snprintf(name, sizeof name, "GGUF of %s in %s: the configuration", fixture, dtype);
    CHECK(name, strstr(r->text, want) != NULL, "%.300s", r->text);
    snprintf(name, sizeof name, "GGUF of %s in %s: the tokenizer", fixture, dtype);
    CHECK(name,
          strstr(r->text, ",z,ab,<|endoftext|>,<|im_start|>,[PAD29],") && strstr(r->text, ",1,1,1,3,3,5,5,") &&
              strstr(r->text, "tokenizer.ggml.merges=a b,;tokenizer.ggml.bos_token_id=28,;"
                              "tokenizer.ggml.eos_token_id=1,;tokenizer.ggml.add_bos_token=1,;"), // that of config.json
          "%.300s", strstr(r->text, "tokenizer.ggml.tokens"));
    st_close(&weights);
    free(r->bytes);
    free(r);
}

/* Every half, and what lies between two of them, rounded to nearest with ties to even. */
static void test_halves(void) {
    int wrong = 0;
    for (int h = 0; h < 0x7C00; h++) {
        float x = half_to_float((uint16_t)h), next = half_to_float((uint16_t)(h + 1));
        if (h == 0x7BFF) next = 65536;
        float middle = x + (next - x) / 2;
        int even = h % 2 ? h + 1 : h;
        wrong += float_to_half(x) != h || float_to_half(-x) != (h | 0x8000) || float_to_half(middle) != even ||
                 float_to_half(nextafterf(middle, 0)) != h || float_to_half(nextafterf(middle, INFINITY)) != h + 1;
    }
    wrong += float_to_half(INFINITY) != 0x7C00 || float_to_half(1e30f) != 0x7C00 || float_to_half(1e-30f) != 0;
    CHECK("fp16: every value, what lies between two, and what is too large are rounded to the nearest", !wrong,
          "%d of %d wrong", wrong, 0x7C00);
}

static void test_gguf(void) {
    static const char *const fixtures[] = {"odd", "llama31_short", "tied", "headdim"};
    static const struct {
        int world;
        const char *options;
    } layouts[] = {{2, ""}, {3, ""}, {4, " --dp-replicate 2"}, {2, " --tp 2"}, {2, " --pp 2"}, {4, " --tp 2 --pp 2"}};
    char one[1024], path[1024], name[200];
    write_gguf_tokenizer();
    test_halves();
    for (int f = 0; f < 4; f++)
        for (int d = 0; d < 4; d++) test_gguf_contents(fixtures[f], d);
    for (int l = 0; l < (int)(sizeof layouts / sizeof *layouts); l++)
        for (int d = 0; d < 4; d += 3) {
            snprintf(one, sizeof one, "%s/tied-%s.gguf", scratch_dir, gguf_dtypes[d]);
            snprintf(path, sizeof path, "%s/layout%d/tied-%s.gguf", scratch_dir, l, gguf_dtypes[d]);
            export_gguf_file("tied", gguf_dtypes[d], layouts[l].world, layouts[l].options, path);
            snprintf(name, sizeof name, "GGUF in %s from %d ranks%s has the bytes of one rank's", gguf_dtypes[d],
                     layouts[l].world, layouts[l].options);
            CHECK(name, files_equal(path, one), "%s", "compared byte by byte");
        }
}
