/* config_json.h: reads and writes config.json, Hugging Face's description of a model.
 *
 * A caller may rely on: config_load accepts only models that this program computes exactly as transformers does; any
 * other architecture, bias, activation or RoPE scaling is refused by name. */
#ifndef CONFIG_JSON_H
#define CONFIG_JSON_H
#include "../../lib/io/json.h"
#include "../../lib/io/token_files.h" // defines: NO_ID
#include "../../llama3.h"
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// the ids of special tokens that a model's directory names: those that begin and end a text, and padding. What
// config.json and generation_config.json of --model say is read here once, and is in every checkpoint and export.

enum { MOST_STOP_TOKENS = 32 };
typedef struct {
    int32_t ids[MOST_STOP_TOKENS]; // (count)
    int count;
} StopTokens;

typedef struct {
    int32_t bos, pad; // NO_ID: unknown
    StopTokens eos;   // generation ends at each of them
} ModelIds;

// ---------------------------------------------------------------------------
// reading

static void stop_token_add(StopTokens *stop, int32_t id) {
    for (int i = 0; i < stop->count; i++)
        if (stop->ids[i] == id) return;
    if (stop->count == MOST_STOP_TOKENS)
        user_error(
            "more than %d token ids end a text in \"eos_token_id\" of config.json and generation_config.json and in "
            "the chat template: remove some from these files",
            (int)MOST_STOP_TOKENS);
    stop->ids[stop->count++] = id;
}

/* A token's id. One beyond the vocabulary is never generated. */
static int32_t json_id(const cJSON *item, const char *path, const char *key) {
    double id = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (id >= 0 && id <= INT32_MAX && id == floor(id)) return (int32_t)id;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" has %s; expected a token's id, or null%s", path, key, given ? given : "?",
               strcmp(key, "eos_token_id") ? "" : ", or a list of ids");
}

/* Adds the ids of "eos_token_id". */
static void stop_tokens_add(StopTokens *stop, const cJSON *json, const char *path) {
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id"), *item;
    if (cJSON_IsArray(ids)) {
        cJSON_ArrayForEach(item, ids) stop_token_add(stop, json_id(item, path, "eos_token_id"));
    } else if (ids && !cJSON_IsNull(ids)) {
        stop_token_add(stop, json_id(ids, path, "eos_token_id"));
    }
}

/* Sets an id that is still unknown. Some files have -1 where there is no token. */
static void model_id_read(int32_t *id, const cJSON *json, const char *path, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int is_none = !item || cJSON_IsNull(item) || (cJSON_IsNumber(item) && item->valuedouble == -1);
    if (*id == NO_ID && !is_none) *id = json_id(item, path, key);
}

static const ModelIds no_model_ids = {NO_ID, NO_ID, {{0}, 0}};

/* The ids that the files of a model's directory name; NULL: a preset, which has none. A missing file has none. */
static ModelIds model_ids_read(const char *model) {
    static const char *const names[] = {"config.json", "generation_config.json"};
    ModelIds ids = no_model_ids;
    for (int i = 0; i < 2 && model; i++) {
        char path[4096 + 32];
        snprintf(path, sizeof path, "%s/%s", model, names[i]);
        if (!entry_exists(path)) continue;
        cJSON *json = json_read_object(path, "a JSON object");
        if (!json) user_error("%s cannot be read: %s; expected a JSON object", path, strerror(errno));
        model_id_read(&ids.bos, json, path, "bos_token_id");
        model_id_read(&ids.pad, json, path, "pad_token_id");
        stop_tokens_add(&ids.eos, json, path);
        cJSON_Delete(json);
    }
    return ids;
}

// ---------------------------------------------------------------------------
// writing

static cJSON *json_of_id(int32_t id) { return id == NO_ID ? cJSON_CreateNull() : cJSON_CreateNumber(id); }

/* One id as a number, several as a list. */
static cJSON *json_of_stop_tokens(const StopTokens *stop) {
    if (stop->count <= 1) return json_of_id(stop->count ? stop->ids[0] : NO_ID);
    return cJSON_CreateIntArray(stop->ids, stop->count);
}

/* Replaces "eos_token_id" in `text` (length), a generation_config.json, unless it lists ids->eos. Frees `text`. */
static char *generation_config_text(const ModelIds *ids, char *text, size_t *length) {
    cJSON *json = cJSON_Parse(text);
    StopTokens given = {{0}, 0};
    stop_tokens_add(&given, json, "generation_config.json");
    int has_all = given.count == ids->eos.count && !memcmp(given.ids, ids->eos.ids, sizeof *given.ids * given.count);
    if (has_all) {
        cJSON_Delete(json);
        return text;
    }
    // The rest stays as it is: printed again, 2.0 would be 2, which transformers refuses for some keys.
    size_t value_length = 0;
    const char *value = json_member_text(text, "eos_token_id", &value_length), *first = strchr(text, '{') + 1;
    char *eos = json_text(json_of_stop_tokens(&ids->eos), 0), *changed;
    FILE *f = text_stream_open(&changed, length);
    if (value) fprintf(f, "%.*s%s%s", (int)(value - text), text, eos, value + value_length);
    else fprintf(f, "%.*s\n  \"eos_token_id\": %s%s%s", (int)(first - text), text, eos, json->child ? "," : "", first);
    text_stream_close(f);
    cJSON_Delete(json);
    free(eos);
    free(text);
    return changed;
}

// ---------------------------------------------------------------------------
// config.json

/* Refuses a key that is present and is not `wanted`, which is a string or "false". */
static void json_refuse_unless(const cJSON *json, const char *path, const char *key, const char *wanted) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item) || (cJSON_IsFalse(item) && !strcmp(wanted, "false"))) return;
    if (cJSON_IsString(item) && !strcmp(item->valuestring, wanted)) return;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" is %s; this program trains Llama 3, where it is %s", path, key, given ? given : "?", wanted);
}

/* "rope_type", or its former name "type"; "default" if there is neither. */
static const char *rope_type(const cJSON *rope, const char *path) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(rope, "rope_type");
    if (!type || cJSON_IsNull(type)) type = cJSON_GetObjectItemCaseSensitive(rope, "type");
    if (!type || cJSON_IsNull(type)) return "default";
    if (!cJSON_IsString(type)) user_error("%s: \"rope_type\" must be a text, \"llama3\" or \"default\"", path);
    return type->valuestring;
}

/* RoPE's settings, as transformers reads them. A "rope_scaling" that is not empty replaces all of "rope_parameters".
 * "rope_theta" is taken from this object, else from the top level, but "original_max_position_embeddings" from the top
 * level, else from this object. */
static void config_read_rope(Llama3Config *c, const cJSON *json, const char *path) {
    const cJSON *scaling = json_object(json, path, "rope_scaling");
    const cJSON *rope = scaling && scaling->child ? scaling : json_object(json, path, "rope_parameters");
    const char *type = rope_type(rope, path), *original = "original_max_position_embeddings";
    double theta = json_number(json, path, "rope_theta", 10000, 1, 1e12);
    c->rope_theta = json_number(rope, path, "rope_theta", theta, 1, 1e12);
    c->rope_factor = 1;
    c->rope_low = 1;
    c->rope_high = 4;
    c->rope_original = 8192;
    if (!strcmp(type, "default")) return;
    if (strcmp(type, "llama3"))
        user_error("%s: rope scaling \"%s\" is not supported; expected \"llama3\" or \"default\"", path, type);
    c->rope_factor = json_number(rope, path, "factor", NAN, 1, 1e6);
    c->rope_low = json_number(rope, path, "low_freq_factor", NAN, 1e-6, 1e6);
    c->rope_high = json_number(rope, path, "high_freq_factor", NAN, 1e-6, 1e6);
    int inside = json_integer(rope, path, original, c->max_positions ? c->max_positions : NAN, 1, 1 << 30);
    c->rope_original = json_integer(json, path, original, inside, 1, 1 << 30);
    if (c->rope_high <= c->rope_low)
        user_error("%s: high_freq_factor %g must be above low_freq_factor %g", path, c->rope_high, c->rope_low);
}

/* This program's int8 format (lib/ops/int8.h) in "quantization_config". The key is "method", not "quant_method":
 * without the latter transformers refuses the model, instead of taking int8 bytes for weights. */
static const char quantization_method[] = "absmax_int8_block64";

/* The longest default of --seq. 4,096 tokens of a model of a billion parameters take 4e13 FLOPs, minutes on a CPU. */
enum { DEFAULT_POSITIONS = CUDA_BUILD ? 4096 : 256 };

static Llama3Config config_from_json(const char *path) {
    cJSON *json = json_read_object(path, "a Hugging Face config.json");
    if (!json)
        user_error("cannot read %s (%s): --model takes a preset or a directory with a config.json", path,
                   strerror(errno));
    json_refuse_unless(json, path, "model_type", "llama");
    json_refuse_unless(json, path, "hidden_act", "silu");
    json_refuse_unless(json, path, "attention_bias", "false");
    json_refuse_unless(json, path, "mlp_bias", "false");
    const cJSON *weights = cJSON_GetObjectItemCaseSensitive(json, "transformers_weights"); // the file to load
    int is_usual = cJSON_IsString(weights) && !strcmp(weights->valuestring, "model.safetensors");
    if (weights && !cJSON_IsNull(weights) && !is_usual)
        user_error("%s: \"transformers_weights\" is %s; this program reads weights from model.safetensors or the files "
                   "of its index: rename the file, and remove the key",
                   path, cJSON_IsString(weights) ? weights->valuestring : "no text");
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
    const cJSON *quantization = json_object(json, path, "quantization_config");
    if (quantization) { // the files next to this one store weights in int8
        const cJSON *ours = cJSON_GetObjectItemCaseSensitive(quantization, "method");
        const cJSON *method = ours ? ours : cJSON_GetObjectItemCaseSensitive(quantization, "quant_method");
        const cJSON *all = cJSON_GetObjectItemCaseSensitive(quantization, "all_tensors");
        if (!cJSON_IsString(ours) || strcmp(ours->valuestring, quantization_method))
            user_error("%s: the weights are quantized by %s; the only supported method is %s, which convert_llama3 "
                       "--dtype int8 writes: export the model without quantization first",
                       path, cJSON_IsString(method) ? method->valuestring : "?", quantization_method);
        if (!cJSON_IsBool(all))
            user_error("%s: \"all_tensors\" of \"quantization_config\" must be true or false", path);
        c.base = cJSON_IsTrue(all) ? BASE_INT8_ALL : BASE_INT8;
    }
    c.T = (int)min_i64(c.max_positions, DEFAULT_POSITIONS);
    c.B = 1;
    cJSON_Delete(json);
    return c;
}

/* `model` is a preset's name or a directory with a config.json. */
static Llama3Config config_load(const char *model) {
    char path[4096], known[512] = "";
    struct stat info;
    if (preset_find(model)) return *preset_find(model);
    for (int i = 0; i < LLAMA3_PRESETS; i++) strcat(strcat(known, i ? ", " : ""), llama3_presets[i].name);
    if (!entry_exists(model) || stat(model, &info) || !S_ISDIR(info.st_mode))
        user_error("--model %s is neither a directory nor a preset (%s)", model, known);
    snprintf(path, sizeof path, "%s/config.json", model);
    Llama3Config c = config_from_json(path);
    if (c.NH % c.NKV)
        user_error("%s: %d query heads cannot share %d key/value heads equally: num_attention_heads must be a multiple "
                   "of num_key_value_heads",
                   path, c.NH, c.NKV);
    if ((int64_t)(c.NH + 2 * c.NKV) * c.HD > 1 << 24)
        user_error("%s: %d query and 2 x %d key/value heads of dimension %d are more than %d values per token: reduce "
                   "num_attention_heads or head_dim",
                   path, c.NH, c.NKV, c.HD, 1 << 24);
    if (c.HD % 2)
        user_error("%s: head dimension %d is odd; RoPE rotates pairs of dimensions, so it must be even", path, c.HD);
    return c;
}

/* The config.json that transformers reads. `base`: which of the exported weights are int8. */
static void config_write_json(const Llama3Config *c, const char *dtype, BaseKind base, const ModelIds *ids, FILE *f) {
    fprintf(f, "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n");
    fprintf(f, "  \"hidden_act\": \"silu\",\n  \"attention_bias\": false,\n  \"mlp_bias\": false,\n");
    fprintf(f, "  \"hidden_size\": %d,\n  \"num_hidden_layers\": %d,\n", c->C, c->L);
    fprintf(f, "  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n", c->NH, c->NKV);
    fprintf(f, "  \"head_dim\": %d,\n  \"intermediate_size\": %d,\n  \"vocab_size\": %d,\n", c->HD, c->F, c->V);
    fprintf(f, "  \"max_position_embeddings\": %d,\n  \"rms_norm_eps\": %.9g,\n", c->max_positions, c->norm_eps);
    fprintf(f, "  \"rope_theta\": %.17g,\n", c->rope_theta);
    if (c->rope_factor == 1) fprintf(f, "  \"rope_scaling\": null,\n");
    else
        fprintf(f,
                "  \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": %.17g, \"low_freq_factor\": %.17g, "
                "\"high_freq_factor\": %.17g, \"original_max_position_embeddings\": %d},\n",
                c->rope_factor, c->rope_low, c->rope_high, c->rope_original);
    const char *const id_keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    cJSON *id_values[] = {json_of_id(ids->bos), json_of_stop_tokens(&ids->eos), json_of_id(ids->pad)};
    for (int i = 0; i < 3; i++) {
        char *id = json_text(id_values[i], 0);
        fprintf(f, "  \"%s\": %s,\n", id_keys[i], id);
        free(id);
    }
    if (base > BASE_FROZEN)
        fprintf(f, "  \"quantization_config\": {\"method\": \"%s\", \"all_tensors\": %s},\n", quantization_method,
                base == BASE_INT8_ALL ? "true" : "false");
    fprintf(f, "  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\"\n}\n", c->tied ? "true" : "false", dtype);
}

#endif
