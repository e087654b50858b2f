/* models.h: directories of small models without weights, whose sizes divide nothing. */
#ifndef TEST_MODELS_H
#define TEST_MODELS_H
#include "jobs.h"

/* Makes the directory of a model without weights, whose sizes divide nothing. Returns its path. */
static const char *make_model(const char *name, int blocks, int heads, int kv_heads, int head_dim, int tied) {
    char path[300], part[320], *dir = strdup(scratch_path(name));
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    snprintf(part, sizeof part, "%s.%d", path, (int)getpid()); // several processes may make it at once
    FILE *f = fopen(part, "w");
    fprintf(f,
            "{\"model_type\":\"llama\",\"hidden_size\":42,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,"
            "\"num_key_value_heads\":%d,\"head_dim\":%d,\"intermediate_size\":77,\"vocab_size\":131,"
            "\"max_position_embeddings\":64,\"rope_theta\":500000,\"tie_word_embeddings\":%s}\n",
            blocks, heads, kv_heads, head_dim, tied ? "true" : "false");
    fclose(f);
    rename(part, path);
    return dir;
}

/* Five blocks, so that units of several blocks have a rest. */
static const char *small_model(int tied) {
    static const char *dirs[2];
    if (!dirs[tied]) dirs[tied] = make_model(tied ? "tied5" : "odd5", 5, 3, 1, 14, tied);
    return dirs[tied];
}

enum { MESH_BLOCKS = CUDA_BUILD ? 4 : 8 };

/* Four key/value heads, so that tp 4 has one each. 8 blocks are one for each of 8 stages, and none for the first and
 * the last of 10 with light ends. */
static const char *mesh_model(int tied) {
    static const char *dirs[2];
    if (!dirs[tied]) dirs[tied] = make_model(tied ? "tied-mesh" : "odd-mesh", MESH_BLOCKS, 8, 4, 6, tied);
    return dirs[tied];
}

/* Five blocks, of which two tp ranks have whole blocks of 64 weights; 131 tokens. Returns its directory. */
static const char *adapters_model(int tied) {
    static char *dirs[2];
    if (dirs[tied]) return dirs[tied];
    char path[300], *dir = dirs[tied] = strdup(scratch_path(tied ? "adapted-tied" : "adapted"));
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    fprintf(f,
            "{\"model_type\":\"llama\",\"hidden_size\":64,\"num_hidden_layers\":5,\"num_attention_heads\":8,\"num_key_"
            "value_heads\":4,\"head_dim\":16,"
            "\"intermediate_size\":128,\"vocab_size\":131,\"max_position_embeddings\":64,\"rope_theta\":500000,\"tie_"
            "word_embeddings\":%s}\n",
            tied ? "true" : "false");
    fclose(f);
    return dir;
}

#endif
