/* llama3.h: the Llama 3 family. Configurations, presets, Hugging Face's config.json, and the tensor table.
 *
 * Owns: what tensors a model has, its adapters' among them, in which unit each lives, and where it starts there; what
 * weights of 8 bits are. Initialisation, sharding, AdamW, files and tests are loops over this table; nothing knows a
 * tensor by number. A caller may rely on: a table depends on the configuration (and how blocks are wrapped into units),
 * never on ranks or precision.
 */
#ifndef LLAMA3_H
#define LLAMA3_H
#include "lib/device.h"
#include "lib/int8.h"
#include <cjson/cJSON.h> // defines: cJSON_Parse, cJSON_GetObjectItemCaseSensitive, …
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// configuration

/* What becomes of the model's own weights. Adapters (LoRA, Hu et al. 2021) leave them as they are and train, beside a
 * matrix W (out, in), two thin ones, A (rank, in) and B (out, rank): y = W x + alpha / rank · B A x. */
typedef enum {
    BASE_TRAINED,
    BASE_FROZEN,
    BASE_INT8,
    BASE_INT8_ALL
} BaseKind; // frozen in the dtype that is computed in; the blocks' in 8 bits; all in 8 bits

typedef struct {
    const char *name;
    int V, C, L;        // vocabulary, width of the residual stream, blocks
    int NH, NKV, HD, F; // query heads, key/value heads, head dimension, feed-forward width
    int max_positions;  // longest sequence the model was made for
    int tied;           // the head is the embedding
    float norm_eps;
    double rope_theta;
    double rope_factor; // 1: no scaling; Llama 3.1 and 3.2: by wavelength, see rope_table
    double rope_low, rope_high;
    int rope_original;     // positions of the model before it was stretched
    int T, B;              // defaults of --seq and --batch
    BaseKind base;         // BASE_TRAINED: there are no adapters
    int lora_rank;         // 0: no adapters, as where weights of 8 bits are only evaluated
    unsigned lora_targets; // bit i: matrix i of lora_targets
    double lora_alpha;
} Llama3Config;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // presets have no adapters

/* Figures from the models' own config.json. */
static const Llama3Config llama3_presets[] = {
    //               V       C    L    NH  NKV   HD      F positions tied eps   theta  factor low high original  T  B
    {"tiny", 4096, 256, 6, 4, 2, 64, 768, 2048, 0, 1e-5f, 500000, 1, 1, 4, 8192, 256, 8},
    {"bench-8m", 4096, 288, 6, 6, 6, 48, 768, 2048, 0, 1e-5f, 500000, 1, 1, 4, 8192, 256, 8},
    {"bench-125m", 32000, 768, 12, 12, 4, 64, 2048, 2048, 0, 1e-5f, 500000, 1, 1, 4, 8192, 512, 2},
    {"llama3-8b", 128256, 4096, 32, 32, 8, 128, 14336, 8192, 0, 1e-5f, 500000, 1, 1, 4, 8192, 8192, 1},
    {"llama3-70b", 128256, 8192, 80, 64, 8, 128, 28672, 8192, 0, 1e-5f, 500000, 1, 1, 4, 8192, 8192, 1},
    {"llama3.1-8b", 128256, 4096, 32, 32, 8, 128, 14336, 131072, 0, 1e-5f, 500000, 8, 1, 4, 8192, 8192, 1},
    {"llama3.1-70b", 128256, 8192, 80, 64, 8, 128, 28672, 131072, 0, 1e-5f, 500000, 8, 1, 4, 8192, 8192, 1},
    {"llama3.1-405b", 128256, 16384, 126, 128, 8, 128, 53248, 131072, 0, 1e-5f, 500000, 8, 1, 4, 8192, 8192, 1},
    {"llama3.2-1b", 128256, 2048, 16, 32, 8, 64, 8192, 131072, 1, 1e-5f, 500000, 32, 1, 4, 8192, 8192, 1},
    {"llama3.2-3b", 128256, 3072, 28, 24, 8, 128, 8192, 131072, 1, 1e-5f, 500000, 32, 1, 4, 8192, 8192, 1},
};
#pragma GCC diagnostic pop
enum { LLAMA3_PRESETS = sizeof llama3_presets / sizeof llama3_presets[0] };

static char *read_text_file(const char *path) {
    size_t length;
    return read_file(path, &length);
}

static double json_number(const cJSON *json, const char *path, const char *key, double fallback, double low,
                          double high) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    double x = fallback;
    if (item && !cJSON_IsNull(item)) {
        if (!cJSON_IsNumber(item)) user_error("%s: \"%s\" must be a number", path, key);
        x = item->valuedouble;
    } else if (isnan(fallback)) {
        user_error("%s: \"%s\" is missing; a Hugging Face config.json of a Llama model has it", path, key);
    }
    if (!(x >= low && x <= high)) user_error("%s: \"%s\" is %g, expected %g to %g", path, key, x, low, high);
    return x;
}

static int json_integer(const cJSON *json, const char *path, const char *key, double fallback, int low, int high) {
    double x = json_number(json, path, key, fallback, low, high);
    if (x != floor(x)) user_error("%s: \"%s\" is %g, expected a whole number", path, key, x);
    return (int)x;
}

/* NULL: absent or null. */
static const cJSON *json_object(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item)) return NULL;
    if (!cJSON_IsObject(item)) user_error("%s: \"%s\" must be an object or null", path, key);
    return item;
}

static int json_flag(const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (item && !cJSON_IsBool(item) && !cJSON_IsNull(item)) user_error("%s: \"%s\" must be true or false", path, key);
    return cJSON_IsTrue(item);
}

static void json_refuse_unless(const cJSON *json, const char *path, const char *key, const char *wanted) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item) || (cJSON_IsFalse(item) && !strcmp(wanted, "false"))) return;
    if (cJSON_IsString(item) && !strcmp(item->valuestring, wanted)) return;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" is %s; this program trains Llama 3, where it is %s", path, key, given ? given : "?", wanted);
}

/* Rope settings stand in "rope_theta" + "rope_scaling", and since transformers 5 in "rope_parameters". */
static void config_read_rope(Llama3Config *c, const cJSON *json, const char *path) {
    const cJSON *newer = json_object(json, path, "rope_parameters");
    const cJSON *scaling = newer ? newer : json_object(json, path, "rope_scaling");
    c->rope_theta = json_number(json, path, "rope_theta", 10000, 1, 1e12);
    c->rope_factor = 1, c->rope_low = 1, c->rope_high = 4, c->rope_original = 8192;
    if (!scaling) return;
    c->rope_theta = json_number(scaling, path, "rope_theta", c->rope_theta, 1, 1e12);
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(scaling, "rope_type");
    if (!type) type = cJSON_GetObjectItemCaseSensitive(scaling, "type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "?";
    if (!strcmp(name, "default")) return;
    if (strcmp(name, "llama3"))
        user_error("%s: rope scaling \"%s\" is not built; expected \"llama3\" or \"default\"", path, name);
    c->rope_factor = json_number(scaling, path, "factor", NAN, 1, 1e6);
    c->rope_low = json_number(scaling, path, "low_freq_factor", NAN, 1e-6, 1e6);
    c->rope_high = json_number(scaling, path, "high_freq_factor", NAN, 1e-6, 1e6);
    c->rope_original = json_integer(scaling, path, "original_max_position_embeddings", NAN, 1, 1 << 30);
    if (c->rope_high <= c->rope_low)
        user_error("%s: high_freq_factor %g must be above low_freq_factor %g", path, c->rope_high, c->rope_low);
}

static const char quantization_method[] =
    "absmax_int8_block64"; // the name of this program's 8 bits: see is_quantized. Under "method": transformers refuses
                           // a model without "quant_method", and would load one that it does not know as if its bytes
                           // were weights

/* Which weights the files beside a config.json have in 8 bits. */
static BaseKind config_read_base(const cJSON *json, const char *path) {
    const cJSON *how = json_object(json, path, "quantization_config"),
                *method = cJSON_GetObjectItemCaseSensitive(how, "method"),
                *theirs = cJSON_GetObjectItemCaseSensitive(how, "quant_method"),
                *all = cJSON_GetObjectItemCaseSensitive(how, "all_tensors");
    if (!how) return BASE_TRAINED;
    if (!cJSON_IsString(method) || strcmp(method->valuestring, quantization_method))
        user_error("%s: \"quantization_config\" is %s; weights of 8 bits are read as --export --dtype int8 writes them "
                   "(%s): export the model unquantized first",
                   path,
                   cJSON_IsString(method)   ? method->valuestring
                   : cJSON_IsString(theirs) ? theirs->valuestring
                                            : "?",
                   quantization_method);
    if (!cJSON_IsBool(all)) user_error("%s: \"all_tensors\" of \"quantization_config\" must be true or false", path);
    return cJSON_IsTrue(all) ? BASE_INT8_ALL : BASE_INT8;
}

static Llama3Config config_from_json(const char *path) {
    char *text = read_text_file(path);
    if (!text)
        user_error("cannot read %s (%s): --model takes a preset or a directory with a config.json", path,
                   strerror(errno));
    cJSON *json = cJSON_Parse(text);
    if (!cJSON_IsObject(json)) user_error("%s is not a JSON object: expected a Hugging Face config.json", path);
    json_refuse_unless(json, path, "model_type", "llama");
    json_refuse_unless(json, path, "hidden_act", "silu");
    json_refuse_unless(json, path, "attention_bias", "false");
    json_refuse_unless(json, path, "mlp_bias", "false");
    Llama3Config c = ZERO;
    c.name = "config.json";
    c.C = json_integer(json, path, "hidden_size", NAN, 1, 1 << 20);
    c.L = json_integer(json, path, "num_hidden_layers", NAN, 1, 1 << 16);
    c.NH = json_integer(json, path, "num_attention_heads", NAN, 1, 1 << 16);
    c.NKV = json_integer(json, path, "num_key_value_heads", c.NH, 1, 1 << 16);
    c.HD = json_integer(json, path, "head_dim", c.C / c.NH, 1, 1 << 16);
    c.F = json_integer(json, path, "intermediate_size", NAN, 1, 1 << 24);
    c.V = json_integer(json, path, "vocab_size", NAN, 2, 1 << 28);
    c.max_positions = json_integer(json, path, "max_position_embeddings", 2048, 1, 1 << 30);
    c.norm_eps = (float)json_number(json, path, "rms_norm_eps", 1e-6, 0, 1);
    c.tied = json_flag(json, path, "tie_word_embeddings");
    config_read_rope(&c, json, path);
    c.base = config_read_base(json, path);
    c.T = c.max_positions < 256 ? c.max_positions : 256;
    c.B = 1;
    cJSON_Delete(json);
    free(text);
    return c;
}

static const Llama3Config *preset_find(const char *name) {
    for (int i = 0; i < LLAMA3_PRESETS; i++)
        if (!strcmp(name, llama3_presets[i].name)) return &llama3_presets[i];
    return NULL;
}

/* `model` is a preset's name or a directory with a config.json. */
static Llama3Config config_load(const char *model) {
    char path[4096], known[512] = "";
    struct stat info;
    if (preset_find(model)) return *preset_find(model);
    for (int i = 0; i < LLAMA3_PRESETS; i++) strcat(strcat(known, i ? ", " : ""), llama3_presets[i].name);
    if (stat(model, &info) || !S_ISDIR(info.st_mode))
        user_error("--model %s is neither a directory nor a preset (%s)", model, known);
    snprintf(path, sizeof path, "%s/config.json", model);
    Llama3Config c = config_from_json(path);
    if (c.NH % c.NKV)
        user_error("%s: %d query heads do not divide into %d key/value heads: num_attention_heads must be a multiple "
                   "of num_key_value_heads",
                   path, c.NH, c.NKV);
    if ((int64_t)(c.NH + 2 * c.NKV) * c.HD > 1 << 24)
        user_error("%s: %d query and 2 x %d key/value heads of dimension %d make a row of more than %d values: smaller "
                   "num_attention_heads or head_dim",
                   path, c.NH, c.NKV, c.HD, 1 << 24);
    if (c.HD % 2)
        user_error("%s: head dimension %d is odd: rotary embedding turns pairs, so it must be even", path, c.HD);
    return c;
}

/* The config.json that transformers reads; goes beside exported weights, of which `base` says what is in 8 bits. */
static void config_write_json(const Llama3Config *c, const char *dtype, BaseKind base, FILE *f) {
    fprintf(
        f,
        "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n  \"hidden_act\": \"silu\",\n"
        "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n  \"hidden_size\": %d,\n  \"num_hidden_layers\": %d,\n"
        "  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n  \"head_dim\": %d,\n  \"intermediate_size\": "
        "%d,\n"
        "  \"vocab_size\": %d,\n  \"max_position_embeddings\": %d,\n  \"rms_norm_eps\": %.9g,\n  \"rope_theta\": "
        "%.17g,\n",
        c->C, c->L, c->NH, c->NKV, c->HD, c->F, c->V, c->max_positions, c->norm_eps, c->rope_theta);
    if (c->rope_factor == 1) fprintf(f, "  \"rope_scaling\": null,\n");
    else
        fprintf(f,
                "  \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": %.17g, \"low_freq_factor\": %.17g, "
                "\"high_freq_factor\": %.17g, \"original_max_position_embeddings\": %d},\n",
                c->rope_factor, c->rope_low, c->rope_high, c->rope_original);
    if (base > BASE_FROZEN)
        fprintf(f, "  \"quantization_config\": {\"method\": \"%s\", \"all_tensors\": %s},\n", quantization_method,
                base == BASE_INT8_ALL ? "true" : "false");
    fprintf(f, "  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\"\n}\n", c->tied ? "true" : "false", dtype);
}

/* cos and sin of every position and pair of dimensions, fp32, (positions, 2, HD/2).
 * Frequencies as in transformers' _compute_llama3_parameters: long wavelengths are divided by the factor,
 * short ones kept, between them interpolated. In fp32 throughout, as there. */
static void rope_table(float *cos_sin, const Llama3Config *c, int positions) {
    for (int i = 0; i < c->HD / 2; i++) {
        float frequency = 1.0f / powf((float)c->rope_theta, (float)(2 * i) / (float)c->HD);
        if (c->rope_factor != 1) {
            float wavelength = 2 * (float)M_PI / frequency;
            float low_wavelength = (float)(c->rope_original / c->rope_low),
                  high_wavelength = (float)(c->rope_original / c->rope_high);
            float smooth =
                ((float)c->rope_original / wavelength - (float)c->rope_low) / (float)(c->rope_high - c->rope_low);
            if (wavelength > low_wavelength) frequency /= (float)c->rope_factor;
            else if (wavelength >= high_wavelength)
                frequency = (1 - smooth) * frequency / (float)c->rope_factor + smooth * frequency;
        }
        for (int t = 0; t < positions; t++) {
            float angle = (float)t * frequency;
            cos_sin[(int64_t)t * c->HD + i] = cosf(angle);
            cos_sin[(int64_t)t * c->HD + c->HD / 2 + i] = sinf(angle);
        }
    }
}

// ---------------------------------------------------------------------------
// the tensor table

typedef enum {
    UNIT_EMBED,
    UNIT_BLOCK,
    UNIT_HEAD,
    UNIT_ADAPTERS,
    UNIT_KINDS
} UnitKind; // adapters: those of as many blocks as a unit of blocks has
typedef enum {
    W_EMBED,
    W_ATTN_NORM,
    W_Q,
    W_K,
    W_V,
    W_O,
    W_FFN_NORM,
    W_GATE,
    W_UP,
    W_DOWN,
    W_FINAL_NORM,
    W_HEAD,
    W_Q_A,
    W_Q_B,
    W_K_A,
    W_K_B,
    W_V_A,
    W_V_B,
    W_O_A,
    W_O_B,
    W_GATE_A,
    W_GATE_B,
    W_UP_A,
    W_UP_B,
    W_DOWN_A,
    W_DOWN_B,
    W_KINDS
} WeightKind;
typedef enum {
    DIM_ONE,
    DIM_V,
    DIM_C,
    DIM_Q,
    DIM_KV,
    DIM_F,
    DIM_R
} Dim; // DIM_Q = NH·HD, DIM_KV = NKV·HD, DIM_R: the adapters' rank
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS } Split; // what tensor parallelism splits
typedef enum {
    INIT_ONES,
    INIT_NORMAL,
    INIT_RESIDUAL,
    INIT_UNIFORM,
    INIT_ZEROS
} Init; // residual: smaller by √(2L), so that the stream's variance stays; uniform: within 1/√in

typedef struct {
    WeightKind kind;
    UnitKind unit;
    const char *name; // Hugging Face's, %d is the block
    Dim rows, cols;
    Split split;
    int fused;        // directly follows the tensor above: both are one product (Q, K, V; gate, up)
    int weight_decay; // AdamW's weight decay applies
    Init init;
} TensorRow;

static const TensorRow llama3_tensors[W_KINDS] = {
    {W_EMBED, UNIT_EMBED, "model.embed_tokens.weight", DIM_V, DIM_C, SPLIT_ROWS, 0, 1, INIT_NORMAL},
    {W_ATTN_NORM, UNIT_BLOCK, "model.layers.%d.input_layernorm.weight", DIM_ONE, DIM_C, SPLIT_NONE, 0, 0, INIT_ONES},
    {W_Q, UNIT_BLOCK, "model.layers.%d.self_attn.q_proj.weight", DIM_Q, DIM_C, SPLIT_ROWS, 0, 1, INIT_NORMAL},
    {W_K, UNIT_BLOCK, "model.layers.%d.self_attn.k_proj.weight", DIM_KV, DIM_C, SPLIT_ROWS, 1, 1, INIT_NORMAL},
    {W_V, UNIT_BLOCK, "model.layers.%d.self_attn.v_proj.weight", DIM_KV, DIM_C, SPLIT_ROWS, 1, 1, INIT_NORMAL},
    {W_O, UNIT_BLOCK, "model.layers.%d.self_attn.o_proj.weight", DIM_C, DIM_Q, SPLIT_COLUMNS, 0, 1, INIT_RESIDUAL},
    {W_FFN_NORM, UNIT_BLOCK, "model.layers.%d.post_attention_layernorm.weight", DIM_ONE, DIM_C, SPLIT_NONE, 0, 0,
     INIT_ONES},
    {W_GATE, UNIT_BLOCK, "model.layers.%d.mlp.gate_proj.weight", DIM_F, DIM_C, SPLIT_ROWS, 0, 1, INIT_NORMAL},
    {W_UP, UNIT_BLOCK, "model.layers.%d.mlp.up_proj.weight", DIM_F, DIM_C, SPLIT_ROWS, 1, 1, INIT_NORMAL},
    {W_DOWN, UNIT_BLOCK, "model.layers.%d.mlp.down_proj.weight", DIM_C, DIM_F, SPLIT_COLUMNS, 0, 1, INIT_RESIDUAL},
    {W_FINAL_NORM, UNIT_HEAD, "model.norm.weight", DIM_ONE, DIM_C, SPLIT_NONE, 0, 0, INIT_ONES},
    {W_HEAD, UNIT_HEAD, "lm_head.weight", DIM_V, DIM_C, SPLIT_ROWS, 0, 1, INIT_NORMAL},
// adapters, under PEFT's names. Tensor parallelism splits of a matrix's two what it splits of the matrix: outputs are
// B's rows, inputs A's columns
#define ADAPTER(kind, name, out, in, split_a, split_b)                                                                 \
    {kind##_A, UNIT_ADAPTERS, "base_model.model.model.layers.%d." name ".lora_A.weight", DIM_R, in, split_a, 0,        \
     1,        INIT_UNIFORM},                                                                                          \
    {                                                                                                                  \
        kind##_B, UNIT_ADAPTERS, "base_model.model.model.layers.%d." name ".lora_B.weight", out, DIM_R, split_b, 0, 1, \
            INIT_ZEROS                                                                                                 \
    }
    ADAPTER(W_Q, "self_attn.q_proj", DIM_Q, DIM_C, SPLIT_NONE, SPLIT_ROWS),
    ADAPTER(W_K, "self_attn.k_proj", DIM_KV, DIM_C, SPLIT_NONE, SPLIT_ROWS),
    ADAPTER(W_V, "self_attn.v_proj", DIM_KV, DIM_C, SPLIT_NONE, SPLIT_ROWS),
    ADAPTER(W_O, "self_attn.o_proj", DIM_C, DIM_Q, SPLIT_COLUMNS, SPLIT_NONE),
    ADAPTER(W_GATE, "mlp.gate_proj", DIM_F, DIM_C, SPLIT_NONE, SPLIT_ROWS),
    ADAPTER(W_UP, "mlp.up_proj", DIM_F, DIM_C, SPLIT_NONE, SPLIT_ROWS),
    ADAPTER(W_DOWN, "mlp.down_proj", DIM_C, DIM_F, SPLIT_COLUMNS, SPLIT_NONE),
};

/* The matrices that may have adapters, as --lora-targets and PEFT name them. */
static const struct {
    WeightKind kind;
    const char *name, *peft;
} lora_targets[] = {{W_Q, "q", "q_proj"},         {W_K, "k", "k_proj"},          {W_V, "v", "v_proj"},
                    {W_O, "o", "o_proj"},         {W_GATE, "gate", "gate_proj"}, {W_UP, "up", "up_proj"},
                    {W_DOWN, "down", "down_proj"}};
enum { LORA_TARGETS = sizeof lora_targets / sizeof lora_targets[0] };

/* Which of the matrices a kind of weight is, or adapts; -1: none. */
static inline int lora_target(WeightKind kind) {
    for (int i = 0; i < LORA_TARGETS; i++)
        if (lora_targets[i].kind == kind || (int)kind == (int)W_Q_A + 2 * i || (int)kind == (int)W_Q_B + 2 * i)
            return i;
    return -1;
}
static inline WeightKind lora_a(WeightKind of) { return (WeightKind)((int)W_Q_A + 2 * lora_target(of)); }
static inline WeightKind lora_b(WeightKind of) { return (WeightKind)((int)W_Q_B + 2 * lora_target(of)); }
static inline int is_adapted(const Llama3Config *c, WeightKind kind) {
    return c->lora_rank && lora_target(kind) >= 0 && (c->lora_targets >> lora_target(kind) & 1);
}

static inline float adapter_scale(const Llama3Config *c) { return (float)(c->lora_alpha / c->lora_rank); }

/* Is a tensor of the model's own kept in 8 bits? Blocks of INT8_BLOCK elements of its row-major order (the last one may
 * be short): a byte each, from -127 to 127, and a scale, fp32, for all of them: the largest magnitude / 127. So what a
 * byte stands for is off by half a step at most. */
static inline int is_quantized(BaseKind base, const TensorRow *row) {
    return row->unit != UNIT_ADAPTERS &&
           (base == BASE_INT8_ALL || (base == BASE_INT8 && row->unit == UNIT_BLOCK && row->rows != DIM_ONE));
}

enum { TENSOR_ALIGN = 128 }; // elements: 256 bytes in bf16, 512 in fp32; the same places in both precisions

/* Which part of the model a rank has. Tensor parallelism gives each an equal part, give or take a row, of what `Split`
 * says; pipeline parallelism gives it `chunks` runs of blocks, each a virtual stage: chunk v of stage p is number v *
 * stages + p. */
typedef struct {
    int tp, tp_rank;
    int pp, pp_rank, virtual_stages;
    int light_ends;     // the first and the last virtual stage have one block less
    int tied_head_copy; // tied: the head is a unit of its own with a copy of the embedding, whose gradients are added once
                        // a step
} ModelPart;

static const ModelPart WHOLE_MODEL = {1, 0, 1, 0, 1, 0, 0};

typedef struct {
    char name[72];
    const TensorRow *row;
    int unit;                     // index into units
    int index;                    // of the whole model's tensors; a tied copy has that of the embedding
    int is_tied_copy;             // of the embedding, as a head apart from it: nobody saves it, nobody counts it
    int64_t rows, cols;           // that this rank has of the model's whole_rows x whole_cols, …
    int64_t first_row, first_col; // … from this row or column on
    int64_t whole_rows, whole_cols;
    int64_t offset;     // first element within the unit
    int64_t int8_block; // in 8 bits: the first of its blocks among the unit's; -1: it is not
    int64_t
        unquantized_offset; // of a unit that has some tensors in 8 bits, not this one: its first element among those
} Tensor;

typedef struct {
    UnitKind kind;
    char name[64];
    int first_tensor, num_tensors; // its tensors
    int first_block, num_blocks;   // the first block it holds, and how many
    int64_t size;                  // elements, gaps between tensors included: the same on all tp ranks
    int frozen;                    // nobody trains it
    int64_t int8_blocks,
        unquantized; // weights of 8 bits: how many blocks; elements that are none. 0, 0: it has no such weights
    int64_t offsets[W_KINDS]; // offset of each kind of weight, of the first block's; -1 where the unit has none
} Unit;

typedef struct {
    int first_block, num_blocks, first_unit, first_adapters;
} Stage; // blocks first … first + blocks - 1 are a virtual stage, from unit `unit` on; their adapters from unit
         // `adapters` on

enum { MAX_STAGES = 64 };

typedef struct {
    ModelPart part;
    Tensor *tensors;
    int num_tensors;
    Unit *units; // embedding, blocks, head, as far as this part has them; tied: embedding (with the final norm), blocks
    int num_units;
    Stage stages[MAX_STAGES];
    int num_blocks;      // of all chunks
    int embed, head;     // units; -1: another stage has it; tied they are one, unless they are apart
    int64_t wrap;        // parameters that a unit of blocks shall hold; 0: each block is one
    int blocks_per_unit; // 1, or what that makes of it; the last unit of a chunk may hold fewer
    int64_t block_stride,
        adapters_stride; // elements from a block to the next of its unit, of its weights and of their adapters
    int64_t num_parameters, num_trained; // of this part, without gaps
} TensorTable;

/* Quantized units keep quantized elements and others apart (lib/int8.h): which sort this tensor is, and the number of
 * its first element among the unit's elements of that sort. */
static inline int tensor_is_quantized(const Tensor *t) { return t->int8_block >= 0; }
static inline int64_t tensor_first_of_sort(const Tensor *t) {
    return tensor_is_quantized(t) ? t->int8_block * INT8_BLOCK : t->unquantized_offset;
}

static int64_t dim_size(const Llama3Config *c, Dim d) {
    switch (d) {
    case DIM_V: return c->V;
    case DIM_C: return c->C;
    case DIM_Q: return (int64_t)c->NH * c->HD;
    case DIM_KV: return (int64_t)c->NKV * c->HD;
    case DIM_F: return c->F;
    case DIM_R: return c->lora_rank;
    default: return 1;
    }
}

/* Of `whole` rows or columns the first that rank i of n has: as equal parts as can be, in order. */
static inline int64_t split_begin(int64_t whole, int n, int i) { return whole * i / n; }

/* What a rank computes with: its heads, its part of the feed-forward and of the vocabulary. */
static Llama3Config config_of_part(const Llama3Config *whole, const ModelPart *part) {
    Llama3Config c = *whole;
    c.NH /= part->tp, c.NKV /= part->tp;
    c.F = (int)(split_begin(whole->F, part->tp, part->tp_rank + 1) - split_begin(whole->F, part->tp, part->tp_rank));
    c.V = (int)(split_begin(whole->V, part->tp, part->tp_rank + 1) - split_begin(whole->V, part->tp, part->tp_rank));
    return c;
}

/* A tensor's number in the whole model's table. */
static int tensor_index(const Llama3Config *c, WeightKind kind, int block) {
    int of_block = W_DOWN - W_ATTN_NORM + 1,
        before = c->tied ? 2 : 1; // tied: the final norm stands beside the embedding
    if (kind == W_EMBED || (c->tied && kind == W_HEAD)) return 0;
    if (kind >= W_Q_A) { // behind all others
        int behind = before + c->L * of_block + (c->tied ? 0 : 2),
            of_adapters = 2 * __builtin_popcount(c->lora_targets), target = lora_target(kind);
        return behind + block * of_adapters + 2 * __builtin_popcount(c->lora_targets & ((1u << target) - 1)) +
               (kind == lora_b(lora_targets[target].kind));
    }
    if (kind == W_FINAL_NORM) return c->tied ? 1 : before + c->L * of_block;
    return before + (kind == W_HEAD ? c->L * of_block + 1 : block * of_block + (int)kind - (int)W_ATTN_NORM);
}

/* The tensor's part comes behind what the unit has; the unit grows by what the largest part of any tp rank takes.
 * Returns where the next one goes. */
static int64_t table_add_tensor(TensorTable *t, const Llama3Config *c, const TensorRow *row, int unit, int block,
                                int64_t joined /* end of the tensor above */) {
    const ModelPart *part = &t->part;
    Unit *u = &t->units[unit];
    Tensor *tensor = &t->tensors[t->num_tensors++];
    int64_t whole[2] = {dim_size(c, row->rows), dim_size(c, row->cols)}, begin[2] = {0, 0},
            count[2] = {whole[0], whole[1]}, most[2] = {whole[0], whole[1]};
    if (row->split != SPLIT_NONE) {
        int d = row->split == SPLIT_COLUMNS;
        begin[d] = split_begin(whole[d], part->tp, part->tp_rank);
        count[d] = split_begin(whole[d], part->tp, part->tp_rank + 1) - begin[d];
        most[d] = (whole[d] + part->tp - 1) / part->tp;
    }
    tensor->is_tied_copy = c->tied && row->kind == W_HEAD;
    snprintf(tensor->name, sizeof tensor->name, tensor->is_tied_copy ? llama3_tensors[W_EMBED].name : row->name,
             block); // the copy has the embedding's
    tensor->row = row;
    tensor->unit = unit;
    tensor->index = tensor_index(c, row->kind, block);
    tensor->rows = count[0], tensor->cols = count[1];
    tensor->first_row = begin[0], tensor->first_col = begin[1];
    tensor->whole_rows = whole[0], tensor->whole_cols = whole[1];
    tensor->offset = row->fused ? joined : round_up(u->size, TENSOR_ALIGN);
    if (u->offsets[row->kind] < 0) u->offsets[row->kind] = tensor->offset;
    u->size = (row->fused ? u->size : tensor->offset) + most[0] * most[1];
    tensor->int8_block = -1;
    if (is_quantized(c->base, row))
        tensor->int8_block = u->int8_blocks, u->int8_blocks += int8_blocks(most[0] * most[1]);
    else tensor->unquantized_offset = u->unquantized, u->unquantized += round_up(most[0] * most[1], TENSOR_ALIGN);
    u->num_tensors++;
    if (!tensor->is_tied_copy) t->num_parameters += count[0] * count[1];
    if (!tensor->is_tied_copy && !u->frozen) t->num_trained += count[0] * count[1];
    return tensor->offset + count[0] * count[1];
}

/* `blocks` of them from `block` on; of embedding and head one. Returns its number. */
static int table_add_unit(TensorTable *t, const Llama3Config *c, UnitKind kind, int block, int blocks) {
    int unit = t->num_units++;
    Unit *u = &t->units[unit];
    int64_t end = 0;
    u->kind = kind;
    u->first_tensor = t->num_tensors;
    u->first_block = block;
    u->num_blocks = blocks;
    u->frozen = c->base != BASE_TRAINED && kind != UNIT_ADAPTERS;
    for (int k = 0; k < W_KINDS; k++) u->offsets[k] = -1;
    const char *of = kind == UNIT_ADAPTERS ? "adapters of " : "";
    if (kind == UNIT_EMBED || kind == UNIT_HEAD)
        snprintf(u->name, sizeof u->name, "%s", kind == UNIT_EMBED ? "embedding" : "head");
    else if (blocks == 1) snprintf(u->name, sizeof u->name, "%smodel.layers.%d", of, block);
    else snprintf(u->name, sizeof u->name, "%smodel.layers.%d-%d", of, block, block + blocks - 1);
    if (c->tied && kind == UNIT_HEAD)
        table_add_tensor(t, c, &llama3_tensors[W_HEAD], unit, 0, 0); // the copy stands where the embedding has it
    for (int l = block; l < block + blocks; l++)
        for (int k = 0; k < W_KINDS; k++) {
            const TensorRow *row = &llama3_tensors[k];
            int final_norm_of_tied =
                c->tied && !t->part.tied_head_copy && kind == UNIT_EMBED && row->kind == W_FINAL_NORM;
            if (kind == UNIT_ADAPTERS && !is_adapted(c, row->kind)) continue;
            if ((row->unit == kind && !(c->tied && row->kind == W_HEAD)) || final_norm_of_tied)
                end = table_add_tensor(t, c, row, unit, l, end);
        }
    if (t->part.tied_head_copy && kind == UNIT_EMBED)
        u->size = round_up(u->size, TENSOR_ALIGN) +
                  c->C; // as long as the head with its norm: so shards are of the same elements
    if (!u->int8_blocks) u->unquantized = 0;
    return unit;
}

static int64_t block_parameters(const Llama3Config *c) {
    int64_t sum = 0;
    for (int k = 0; k < W_KINDS; k++)
        if (llama3_tensors[k].unit == UNIT_BLOCK)
            sum += dim_size(c, llama3_tensors[k].rows) * dim_size(c, llama3_tensors[k].cols);
    return sum;
}

/* How many of `L` blocks virtual stage `s` has, and which is the first: as equal as can be. What is over goes to the
 * stages before the last, which also has the head; the first, which keeps the most micro-batches alive, gets of it
 * last. light_ends: first and last one have one block less than an equal share, for embedding and head (Llama 3 paper,
 * section 3.3.2); with fewer than 2 * stages - 2 blocks they have none. */
static int stage_blocks(int L, int stages, int light_ends, int s, int *first) {
    int light = light_ends && stages > 1, last = stages - 1;
    int share = (L + 2 * light) / stages, over = (L + 2 * light) % stages,
        larger = last - over; // stages from `larger` to the one before the last have one more
    *first = s * share + (s > larger ? s - larger : 0) - (light && s > 0);
    return share + (s >= larger && s < last) - (light && (s == 0 || s == last));
}

/* `wrap`: as many blocks join in a unit as it takes to hold that many parameters (PyTorch's size-based policy); 0: each
 * block is one. */
static void table_open(TensorTable *t, const Llama3Config *c, int64_t wrap, const ModelPart *part) {
    memset(t, 0, sizeof *t);
    t->part = *part, t->wrap = wrap;
    t->blocks_per_unit = (int)min_i64(c->L, max_i64(1, (wrap + block_parameters(c) - 1) / block_parameters(c)));
    for (int v = 0; v < part->virtual_stages; v++)
        t->num_blocks += t->stages[v].num_blocks =
            stage_blocks(c->L, part->pp * part->virtual_stages, part->light_ends, v * part->pp + part->pp_rank,
                         &t->stages[v].first_block);
    t->tensors = (Tensor *)checked_malloc(sizeof(Tensor) * (size_t)(t->num_blocks + 2) *
                                          (c->base == BASE_TRAINED ? W_Q_A : W_KINDS));
    t->units = (Unit *)checked_malloc(sizeof(Unit) * (size_t)(t->num_blocks + 2) * (c->base == BASE_TRAINED ? 1 : 2));
    int last = part->pp_rank == part->pp - 1;
    t->embed = part->pp_rank == 0 ? table_add_unit(t, c, UNIT_EMBED, 0, 1) : -1;
    for (int v = 0; v < part->virtual_stages; v++) {
        Stage *chunk = &t->stages[v];
        chunk->first_unit = t->num_units;
        for (int l = chunk->first_block, end = l + chunk->num_blocks; l < end; l += t->blocks_per_unit)
            table_add_unit(t, c, UNIT_BLOCK, l, (int)min_i64(t->blocks_per_unit, end - l));
    }
    t->head = !last ? -1 : c->tied && !part->tied_head_copy ? t->embed : table_add_unit(t, c, UNIT_HEAD, 0, 1);
    for (int v = 0; v < part->virtual_stages && c->lora_rank; v++) {
        Stage *chunk = &t->stages[v];
        chunk->first_adapters = t->num_units;
        for (int l = chunk->first_block, end = l + chunk->num_blocks; l < end; l += t->blocks_per_unit)
            table_add_unit(t, c, UNIT_ADAPTERS, l, (int)min_i64(t->blocks_per_unit, end - l));
    }
    for (int i = 0; i < t->num_units; i++) {
        const Unit *u = &t->units[i];
        const Tensor *first = &t->tensors[u->first_tensor],
                     *next = first + u->num_tensors / u->num_blocks; // a block's first tensor, and the next one's
        int64_t size = u->num_blocks > 1 ? next->offset - first->offset : u->size;
        if (u->kind == UNIT_BLOCK) t->block_stride = max_i64(t->block_stride, size);
        if (u->kind == UNIT_ADAPTERS) t->adapters_stride = max_i64(t->adapters_stride, size);
    }
}

static void table_close(TensorTable *t) {
    free(t->tensors);
    free(t->units);
}

/* The chunk that block `block` is of; it is one of this part. */
static inline const Stage *table_stage(const TensorTable *t, int block) {
    const Stage *chunk = t->stages;
    while (block < chunk->first_block || block >= chunk->first_block + chunk->num_blocks) chunk++;
    return chunk;
}
static inline int table_block_unit(const TensorTable *t, int block) {
    const Stage *chunk = table_stage(t, block);
    return chunk->first_unit + (block - chunk->first_block) / t->blocks_per_unit;
}
static inline int table_block_adapters(const TensorTable *t, int block) {
    return table_block_unit(t, block) - table_stage(t, block)->first_unit + table_stage(t, block)->first_adapters;
}
static inline int table_block_in_unit(const TensorTable *t, int block) {
    return (block - table_stage(t, block)->first_block) % t->blocks_per_unit;
}
static inline int64_t table_block_offset(const TensorTable *t, int block) {
    return table_block_in_unit(t, block) * t->block_stride;
} // of a block within its unit
static inline int64_t table_adapters_offset(const TensorTable *t, int block) {
    return table_block_in_unit(t, block) * t->adapters_stride;
}
static inline int table_is_tied(const TensorTable *t) {
    return t->embed >= 0 && t->embed == t->head;
} // head and embedding are one unit

/* Adapters stand behind all other tensors: the number of the first; num_tensors: there are none. */
static inline int table_first_adapter(const TensorTable *t) {
    int i = t->num_tensors;
    while (i > 0 && t->tensors[i - 1].row->unit == UNIT_ADAPTERS) i--;
    return i;
}

static const Tensor *table_find(const TensorTable *t, const char *name) {
    for (int i = 0; i < t->num_tensors; i++)
        if (!strcmp(t->tensors[i].name, name)) return &t->tensors[i];
    return NULL;
}

/* From element `at` of the rank's part on, the elements that follow each other in the whole tensor too: how many, and
 * `*whole` is the first. */
static inline int64_t tensor_run(const Tensor *t, int64_t at, int64_t *whole) {
    int64_t row = at / t->cols, col = at % t->cols;
    *whole = (t->first_row + row) * t->whole_cols + t->first_col + col;
    return t->cols == t->whole_cols ? t->rows * t->cols - at : t->cols - col;
}

/* The part of `tensor` that elements [begin, end) of its unit hold: element `*first` of the tensor on, `count` of them.
 */
static int64_t tensor_overlap(const Tensor *tensor, int64_t begin, int64_t end, int64_t *first) {
    int64_t from = max_i64(begin, tensor->offset), to = min_i64(end, tensor->offset + tensor->rows * tensor->cols);
    *first = from - tensor->offset;
    return max_i64(0, to - from);
}

// ---------------------------------------------------------------------------
// initial weights: a function of (seed, tensor, element), so every layout starts from the same model

/* One standard normal value from 64 random bits (Box and Muller 1958). */
static inline float normal_of_bits(uint64_t bits) {
    float u = ((float)(uint32_t)(bits >> 40) + 1.0f) * 0x1p-24f; // (0, 1]
    float angle = (float)(uint32_t)(bits & 0xFFFFFF) * (0x1p-24f * 2 * (float)M_PI);
    return sqrtf(-2.0f * logf(u)) * cosf(angle);
}

/* Elements [first, first + count) of the whole tensor's initial value. */
static void tensor_init(float *out, const Tensor *tensor, const Llama3Config *c, uint64_t seed, int64_t first,
                        int64_t count, int threads) {
    float std = tensor->row->init == INIT_RESIDUAL ? 0.02f / sqrtf(2.0f * (float)c->L) : 0.02f;
    uint64_t key = mix64(hash_bytes(HASH_START, tensor->name, strlen(tensor->name)) + seed * 0x9E3779B97F4A7C15ull);
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = mix64(key + (uint64_t)(first + i) * 0x9E3779B97F4A7C15ull);
        switch (tensor->row->init) {
        case INIT_ONES: out[i] = 1; break;
        case INIT_ZEROS: out[i] = 0; break;
        case INIT_UNIFORM: out[i] = ((float)(bits >> 40) * 0x1p-23f - 1) / sqrtf((float)tensor->whole_cols); break;
        default: out[i] = std * normal_of_bits(bits);
        }
    }
}

#endif
