/* adapters.h: the files of adapters, in the layout of Hugging Face's PEFT.
 *
 * Owns: adapter_config.json, read and written, and the check of adapter_model.safetensors against the tensor table. A
 * caller may rely on: what these files ask for and this program does not do (another kind of adapter, biases, ranks
 * that differ) is refused by name.
 */
#ifndef ADAPTERS_H
#define ADAPTERS_H
#include "run/safetensors.h"

static const char adapters_stem[] = "adapter_model"; // of the files of tensors

/* A key that must be as this program has it, where it is there at all: false, null, empty, or `wanted`. */
static void adapters_refuse_unless(const cJSON *json, const char *path, const char *key, const char *wanted) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item) ||
        ((cJSON_IsObject(item) || cJSON_IsArray(item)) && !item->child))
        return;
    if (cJSON_IsString(item) && wanted && !strcmp(item->valuestring, wanted)) return;
    char *given = cJSON_PrintUnformatted(item);
    user_error("%s: \"%s\" is %s, which this program's adapters do not have: expected %s", path, key,
               given ? given : "?", wanted ? wanted : "false, null, or none of it");
}

/* Rank, alpha and targets of the adapters in `dir`, into the model's configuration. */
static void adapters_config_read(Llama3Config *c, const char *dir) {
    static const char *const unknown[] = {"use_rslora",
                                          "use_dora",
                                          "use_qalora",
                                          "use_bdlora",
                                          "alora_invocation_tokens",
                                          "arrow_config",
                                          "kasa_config",
                                          "monteclora_config",
                                          "velora_config",
                                          "fan_in_fan_out",
                                          "lora_bias",
                                          "layers_to_transform",
                                          "layer_replication",
                                          "rank_pattern",
                                          "alpha_pattern",
                                          "modules_to_save",
                                          "trainable_token_indices",
                                          "target_parameters",
                                          "exclude_modules"};
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    char *text = read_text_file(path);
    if (!text) user_error("--adapters %s: cannot read %s: %s", dir, path, strerror(errno));
    cJSON *json = cJSON_Parse(text);
    if (!cJSON_IsObject(json)) user_error("%s is not a JSON object: expected PEFT's adapter_config.json", path);
    adapters_refuse_unless(json, path, "peft_type", "LORA");
    adapters_refuse_unless(json, path, "bias", "none");
    for (int i = 0; i < (int)(sizeof unknown / sizeof *unknown); i++)
        adapters_refuse_unless(json, path, unknown[i], NULL);
    c->lora_rank = json_integer(json, path, "r", NAN, 1, c->C);
    c->lora_alpha = json_number(json, path, "lora_alpha", NAN, 1e-6, 1e6);
    const cJSON *modules = cJSON_GetObjectItemCaseSensitive(json, "target_modules"), *module;
    if (!cJSON_IsArray(modules) || !modules->child)
        user_error("%s: \"target_modules\" is no list of names: expected some of q_proj, k_proj, v_proj, o_proj, "
                   "gate_proj, up_proj, down_proj",
                   path);
    cJSON_ArrayForEach(module, modules) {
        const char *name = cJSON_IsString(module) ? module->valuestring : "?";
        int known = 0;
        while (known < LORA_TARGETS && strcmp(name, lora_targets[known].peft)) known++;
        if (known == LORA_TARGETS)
            user_error("%s: \"target_modules\" has \"%s\", which has no adapters here: expected some of q_proj, "
                       "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
                       path, name);
        c->lora_targets |= 1u << known;
    }
    cJSON_Delete(json);
    free(text);
}

/* As PEFT reads it; goes beside adapter_model.safetensors. Nothing in it depends on where the base came from. */
static void adapters_config_write(const Llama3Config *c, FILE *f) {
    const char *comma = "";
    fprintf(f,
            "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": null,\n  "
            "\"r\": %d,\n  \"lora_alpha\": %.9g,\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n"
            "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"target_modules\": [",
            c->lora_rank, c->lora_alpha);
    for (int i = 0; i < LORA_TARGETS; i++)
        if (c->lora_targets >> i & 1) fprintf(f, "%s\"%s\"", comma, lora_targets[i].peft), comma = ", ";
    fprintf(f, "]\n}\n");
}

/* Opens the tensors and holds them against the table, whose adapters are of this configuration. */
static void adapters_open(StFiles *s, const char *dir, const TensorTable *table) {
    if (!st_open(s, dir, adapters_stem)) user_error("%s has no %s.safetensors", dir, adapters_stem);
    for (int i = table_first_adapter(table); i < table->num_tensors; i++) st_require_tensor(s, dir, &table->tensors[i], "");
    for (int i = 0; i < s->count; i++)
        if (!table_find(table, s->tensors[i].name))
            user_error("%s: tensor %s adapts nothing that this model and its adapter_config.json have", dir,
                       s->tensors[i].name);
}

#endif
