/* peft.h: adapter files in the layout of Hugging Face's PEFT.
 *
 * Reads and writes adapter_config.json, and checks adapter_model.safetensors against the tensor table. A caller may
 * rely on: whatever these files ask for and this program does not support (other kinds of adapters, biases, LoRA ranks
 * that differ between layers) is refused by name.
 */
#ifndef PEFT_H
#define PEFT_H
#include "../../lib/io/json.h" // defines: json_number, json_integer, json_read_object
#include "safetensors.h"       // defines: StFiles, st_open, st_require_tensors, Llama3Config, TensorTable

static const char adapters_stem[] = "adapter_model"; // file name of the tensors, without .safetensors

/* Accepts a key that is absent, false, null, empty or equal to `wanted`; anything else is an error. */
static void adapters_refuse_unless(const cJSON *json, const char *path, const char *key, const char *wanted) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item) ||
        ((cJSON_IsObject(item) || cJSON_IsArray(item)) && !item->child))
        return;
    if (cJSON_IsString(item) && wanted && !strcmp(item->valuestring, wanted)) return;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" is %s, which is not supported: expected %s", path, key, given ? given : "?",
               wanted ? wanted : "false, null, or no such key");
}

/* Refuses a model with adapters in its own directory: transformers adds them, and --adapters says so here. */
static void model_refuse_adapters(const char *model) {
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", model);
    if (entry_exists(path))
        user_error("%s is next to the model's weights, and transformers would add these adapters: give --adapters %s "
                   "to do so, or move the file away to use the model alone",
                   path, model);
}

/* Sets the configuration's LoRA rank, alpha and target matrices from DIR/adapter_config.json. */
static void adapters_config_read(Llama3Config *c, const char *dir) {
    static const char *const changes_base[] = {"pissa", "olora", "corda", "loftq"};
    static const char *const unsupported[] = {
        "use_rslora",     "use_dora",        "use_qalora",          "use_bdlora",        "alora_invocation_tokens",
        "arrow_config",   "kasa_config",     "monteclora_config",   "velora_config",     "trainable_token_indices",
        "fan_in_fan_out", "lora_bias",       "layers_to_transform", "layer_replication", "rank_pattern",
        "alpha_pattern",  "modules_to_save", "target_parameters",   "exclude_modules"};
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    cJSON *json = json_read_object(path, "PEFT's adapter_config.json");
    if (!json) user_error("--adapters %s: cannot read %s: %s", dir, path, strerror(errno));
    adapters_refuse_unless(json, path, "peft_type", "LORA");
    adapters_refuse_unless(json, path, "bias", "none");
    for (int i = 0; i < (int)(sizeof unsupported / sizeof *unsupported); i++)
        adapters_refuse_unless(json, path, unsupported[i], NULL);
    const cJSON *init = cJSON_GetObjectItemCaseSensitive(json, "init_lora_weights");
    for (int i = 0; i < 4 && cJSON_IsString(init); i++)
        if (!strncasecmp(init->valuestring, changes_base[i], strlen(changes_base[i])))
            user_error("%s: \"init_lora_weights\" is \"%s\", with which PEFT changes the base model itself: save plain "
                       "LoRA adapters with save_pretrained(…, path_initial_model_for_weight_conversion=…)",
                       path, init->valuestring);
    c->lora_rank = json_integer(json, path, "r", NAN, 1, c->C);
    c->lora_alpha = json_number(json, path, "lora_alpha", NAN, 1e-6, 1e6);
    const cJSON *modules = cJSON_GetObjectItemCaseSensitive(json, "target_modules"), *target;
    if (!cJSON_IsArray(modules) || !modules->child)
        user_error("%s: \"target_modules\" is not a list of names: expected some of q_proj, k_proj, v_proj, o_proj, "
                   "gate_proj, up_proj, down_proj",
                   path);
    cJSON_ArrayForEach(target, modules) {
        const char *name = cJSON_IsString(target) ? target->valuestring : "?";
        int known = 0;
        while (known < LORA_TARGETS && strcmp(name, lora_targets[known].peft)) known++;
        if (known == LORA_TARGETS)
            user_error("%s: \"target_modules\" has \"%s\", which cannot have an adapter: expected some of q_proj, "
                       "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
                       path, name);
        c->lora_targets |= 1u << known;
    }
    cJSON_Delete(json);
}

/* The name or path of the base model in DIR/adapter_config.json, to be freed, or NULL. *dropout receives
 * "lora_dropout", which training ignores. */
static char *adapters_base_model(const char *dir, double *dropout) {
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    cJSON *json = json_read_object(path, "PEFT's adapter_config.json");
    const cJSON *base = cJSON_GetObjectItemCaseSensitive(json, "base_model_name_or_path");
    char *name = cJSON_IsString(base) ? checked_strdup(base->valuestring) : NULL;
    *dropout = json_number(json, path, "lora_dropout", 0, 0, 1);
    cJSON_Delete(json);
    return name;
}

/* Writes adapter_config.json as PEFT reads it. `base`: the base model's path or name. */
static void adapters_config_write(const Llama3Config *c, const char *base, FILE *f) {
    int count = 0;
    fprintf(f, "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": ");
    json_write_string(f, base, strlen(base));
    fprintf(f,
            ",\n  \"r\": %d,\n  \"lora_alpha\": %.9g,\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n"
            "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"target_modules\": [",
            c->lora_rank, c->lora_alpha);
    for (int i = 0; i < LORA_TARGETS; i++)
        if (c->lora_targets >> i & 1) fprintf(f, "%s\"%s\"", count++ ? ", " : "", lora_targets[i].peft);
    fprintf(f, "]\n}\n");
}

/* Opens adapter_model.safetensors in `dir` and checks that it has exactly the adapters of the table. */
static void adapters_open(StFiles *s, const char *dir, const TensorTable *table) {
    if (!st_open(s, dir, adapters_stem))
        user_error("%s has no %s.safetensors: expected a directory with PEFT adapters", dir, adapters_stem);
    st_require_tensors(s, dir, table, table_first_adapter(table), table->num_tensors, STATE_MASTER);
    for (int i = 0; i < s->count; i++)
        if (!table_find(table, s->tensors[i].name))
            user_error("%s: tensor %s does not belong to this model and its adapter_config.json: expected adapters of "
                       "target_modules only",
                       dir, s->tensors[i].name);
}

#endif
