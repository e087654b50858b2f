/* safetensors.h: reads Hugging Face's safetensors files, and lays out those that are written.
 *
 * A caller may rely on: a file's whole header is checked before a tensor of it is read; a damaged file is an error that
 * names the file and the tensor; the layout of written files depends on the tensor table and the dtypes alone. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H
#include "../../optimizer.h"   // defines: Tensor, TensorTable, StateKind
#include "../../lib/io/json.h" // defines: json_read_object, json_parse_object, by_text
#include <dirent.h>            // defines: opendir, readdir

// ---------------------------------------------------------------------------
// reading. A safetensors file is: 8 bytes with the length of the header, the header (JSON), the tensors' bytes

typedef enum {
    ST_F32,
    ST_BF16,
    ST_F16,
    ST_I32,
    ST_I8,
    ST_DTYPES,
    GGUF_Q8_0 = ST_DTYPES, // of GGUF files alone: blocks of an fp16 scale and Q8_0_BLOCK int8 elements
} StDtype;
static const char *const st_dtype_names[ST_DTYPES] = {"F32", "BF16", "F16", "I32", "I8"};
static const char *const torch_dtype_names[ST_DTYPES] = {"float32", "bfloat16", "float16", "int32", "int8"};
static const int st_dtype_sizes[ST_DTYPES] = {4, 2, 2, 4, 1};
// An int8 tensor NAME is followed by its scales, NAME.scale: F32 (blocks), one for each INT8_BLOCK elements.
static const char scale_suffix[] = ".scale";

typedef struct {
    char *path;
    int fd;
    int64_t bytes;
    uint32_t *sums; // (file chunks) their CRC-32 in a checkpoint; NULL: not known
} StFile;

typedef struct StTensor {
    char *name;
    StDtype dtype;
    int64_t rows, cols, elements; // cols: the last dimension; rows: the product of the others
    int64_t begin;                // offset of the first byte in the file
    const StFile *file;
    const struct StTensor *scales; // of an int8 tensor
    int are_scales;                // this tensor holds the scales of another one
    const struct StTensor *copy;   // of a tied embedding: the head, which must be equal; NULL: the files have none
} StTensor;

enum { MAX_OPEN_FILES = 1024 };

typedef struct {       // the tensors of a model's files
    StTensor *tensors; // (capacity, of which `count` are used)
    int count, capacity, num_files;
    int *slots;    // (2 capacity) hash table with open addressing by name: 1 + the tensor's number; 0: an empty slot
    StFile *files; // (MAX_OPEN_FILES, of which `num_files` are used); tensors point to them
    int ignores_index; // next to the only file there is an index that names others, which are not read
} StFiles;

/* The slot of the hash table that holds tensor `name`, or the empty one where it belongs. */
static int *st_slot(const StFiles *s, const char *name) {
    uint64_t slots = 2 * (uint64_t)s->capacity, slot = mix64(hash_bytes(HASH_START, name, strlen(name))) % slots;
    while (s->slots[slot] && strcmp(s->tensors[s->slots[slot] - 1].name, name)) slot = (slot + 1) % slots;
    return &s->slots[slot];
}

static const StTensor *st_find(const StFiles *s, const char *name) {
    int slot = s->count ? *st_slot(s, name) : 0;
    return slot ? &s->tensors[slot - 1] : NULL;
}

/* Enters the names of all tensors into a new hash table. */
static void st_rehash(StFiles *s) {
    free(s->slots);
    s->slots = new_array(int, 2 * s->capacity);
    for (int i = 0; i < s->count; i++) *st_slot(s, s->tensors[i].name) = i + 1;
}

/* Adds the tensor that the header's `item` describes. `data`: offset in the file of the first tensor's bytes. */
static void st_add_tensor(StFiles *s, const StFile *file, const cJSON *item, int64_t data) {
    StTensor t = ZERO;
    const char *path = file->path;
    const StTensor *other = st_find(s, item->string);
    if (other && other->file == file)
        user_error("%s holds tensor %s twice: the file is damaged; copy it again", path, item->string);
    if (other)
        user_error("%s and %s both hold tensor %s: remove the file that does not belong to this model",
                   other->file->path, path, item->string);
    const char *dtype = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "dtype"));
    int known = 0;
    while (dtype && known < ST_DTYPES && strcmp(dtype, st_dtype_names[known])) known++;
    if (!dtype || known == ST_DTYPES)
        user_error("%s: tensor %s has dtype %s, expected F32, BF16, F16, I32 or I8: convert the model to one of these",
                   path, item->string, dtype ? dtype : "?");
    t.dtype = (StDtype)known;
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape"), *dim;
    if (!cJSON_IsArray(shape))
        user_error("%s: tensor %s has no shape: the file is damaged; copy it again", path, item->string);
    t.rows = 1;
    t.cols = 1;
    cJSON_ArrayForEach(dim, shape) {
        double d = dim->valuedouble;
        if (!cJSON_IsNumber(dim) || !(d >= 0 && d <= 1e15) || d != floor(d) ||
            (double)t.rows * (double)t.cols * d > 1e15)
            user_error("%s: the shape of tensor %s is not a list of sizes: the file is damaged; copy it again", path,
                       item->string);
        t.rows *= t.cols;
        t.cols = (int64_t)d;
    }
    t.elements = t.rows * t.cols;
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (cJSON_GetArraySize(offsets) != 2)
        user_error("%s: tensor %s has no data_offsets: the file is damaged; copy it again", path, item->string);
    int64_t bytes = t.elements * st_dtype_sizes[t.dtype];
    double begin = cJSON_GetArrayItem(offsets, 0)->valuedouble, end = cJSON_GetArrayItem(offsets, 1)->valuedouble;
    if (!(begin >= 0) || begin != floor(begin) || end - begin != (double)bytes || end > (double)(file->bytes - data))
        user_error("%s: tensor %s lies at bytes %.0f to %.0f of %" PRId64 ", but its shape needs %" PRId64
                   " bytes: the file is truncated or damaged; copy it again",
                   path, item->string, begin, end, file->bytes - data, bytes);
    t.begin = data + (int64_t)begin;
    t.name = checked_strdup(item->string);
    t.file = file;
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->tensors = (StTensor *)checked_realloc(s->tensors, sizeof(StTensor) * (size_t)s->capacity);
        st_rehash(s);
    }
    *st_slot(s, t.name) = s->count + 1;
    s->tensors[s->count++] = t;
}

/* By offset in the file; an empty tensor comes before the one that starts at the same offset. */
static int by_place(const void *a, const void *b) {
    const StTensor *x = *(const StTensor *const *)a, *y = *(const StTensor *const *)b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : (x->elements > y->elements) - (x->elements < y->elements);
}

/* The format requires that the tensors of a file, from number `first` on, fill it from the header to its end without
 * gaps. */
static void st_check_places(const StFiles *s, int first, const StFile *file, int64_t data) {
    int64_t end = data;
    int count = s->count - first;
    const StTensor **tensors = new_array(const StTensor *, count);
    for (int i = 0; i < count; i++) tensors[i] = &s->tensors[first + i];
    qsort(tensors, (size_t)count, sizeof *tensors, by_place);
    for (int i = 0; i < count; i++) {
        const StTensor *t = tensors[i];
        if (t->begin != end)
            user_error("%s: tensor %s starts at byte %" PRId64 " of the data, expected %" PRId64
                       ": tensors overlap or leave gaps; the file is damaged, copy it again",
                       file->path, t->name, t->begin - data, end - data);
        end += t->elements * st_dtype_sizes[t->dtype];
    }
    if (end != file->bytes)
        user_error("%s: its tensors have %" PRId64 " bytes, but %" PRId64
                   " bytes follow the header: the file is damaged; copy it again",
                   file->path, end - data, file->bytes - data);
    free(tensors);
}

/* Opens a file and adds all of its tensors. */
static void st_add_file(StFiles *s, const char *path) {
    struct stat info;
    uint64_t length = 0;
    char name[4096 + 32];
    int fd = open_regular_file(path, &info), first = s->count;
    if (fd < 0) user_error("cannot read the weights %s: %s", path, strerror(errno));
    if (s->num_files == MAX_OPEN_FILES)
        user_error("%s: the model has more than %d files of weights: save it in fewer, larger files", path,
                   (int)MAX_OPEN_FILES);
    int64_t got = read_bytes_at(fd, &length, 8, 0);
    if (got < 0) user_error("cannot read the weights %s: %s", path, strerror(errno));
    if (got != 8 || length < 2 || length > 100000000 || (int64_t)length + 8 > (int64_t)info.st_size)
        user_error("%s is not a safetensors file: its first 8 bytes should give the length of its header, but they "
                   "give %" PRIu64 " in a file of %" PRId64 " bytes; if the file is damaged, copy it again",
                   path, length, (int64_t)info.st_size);
    char *header = (char *)checked_malloc(length + 1);
    got = read_bytes_at(fd, header, (int64_t)length, 8);
    if (got != (int64_t)length)
        user_error("cannot read the header of %s: %s", path, got < 0 ? strerror(errno) : "the file ends within it");
    snprintf(name, sizeof name, "%s: the header", path);
    cJSON *json = json_parse_object(header, length, name,
                                    "a list of tensors: the file is damaged, or not a safetensors file; copy it again");
    if (!s->files) s->files = new_array(StFile, MAX_OPEN_FILES);
    StFile *file = &s->files[s->num_files++];
    file->path = checked_strdup(path);
    file->fd = fd;
    file->bytes = info.st_size;
    int64_t data = 8 + (int64_t)length;
    cJSON *item;
    cJSON_ArrayForEach(item, json) {
        if (strcmp(item->string, "__metadata__")) st_add_tensor(s, file, item, data);
        json_refuse_duplicates(item, path);
    }
    st_check_places(s, first, file, data);
    cJSON_Delete(json);
    free(header);
}

static void st_close(StFiles *s) {
    for (int i = 0; i < s->count; i++) free(s->tensors[i].name);
    for (int i = 0; i < s->num_files; i++) {
        free(s->files[i].path);
        free(s->files[i].sums);
        close(s->files[i].fd);
    }
    free(s->tensors);
    free(s->slots);
    free(s->files);
    memset(s, 0, sizeof *s);
}

static inline float half_to_float(uint16_t h) { // IEEE 754 binary16
    int exponent = (h >> 10) & 31, fraction = h & 1023;
    float x = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    if (exponent == 31) x = fraction ? NAN : INFINITY;
    return h & 0x8000 ? -x : x;
}

/* Finds the scales of every int8 tensor, when all files are open. */
static void st_find_scales(StFiles *s) {
    char name[4096];
    for (int i = 0; i < s->count; i++) {
        StTensor *t = &s->tensors[i];
        if (t->dtype != ST_I8) continue;
        if (snprintf(name, sizeof name, "%s%s", t->name, scale_suffix) >= (int)sizeof name)
            user_error("%s: the name of tensor %.100s… is longer than %d bytes", t->file->path, t->name,
                       (int)sizeof name - (int)sizeof scale_suffix);
        StTensor *scales = (StTensor *)(uintptr_t)st_find(s, name);
        if (!scales || scales->dtype != ST_F32 || scales->elements != int8_blocks(t->elements))
            user_error("%s: tensor %s is int8, but its scales %s %s: expected F32 [%" PRId64
                       "], as convert_llama3 --dtype int8 writes them; convert the model again",
                       t->file->path, t->name, name, scales ? "have another length or dtype" : "are missing",
                       int8_blocks(t->elements));
        t->scales = scales;
        scales->are_scales = 1;
    }
}

/* Reads `bytes` bytes of a tensor, from its byte `from` on. */
static void st_read_bytes(const StTensor *t, void *out, int64_t from, int64_t bytes) {
    int64_t got = read_bytes_at(t->file->fd, out, bytes, t->begin + from);
    if (got != bytes)
        user_error("%s: cannot read tensor %s: %s", t->file->path, t->name,
                   got < 0 ? strerror(errno) : "the file ends within it; copy it again");
}

/* Reads elements [first, first + count) of an int8 tensor and the scales of their blocks; `first` begins a block. */
static void st_read_quantized(const StTensor *t, int8_t *out /* (count) */, float *scales /* (int8_blocks(count)) */,
                              int64_t first, int64_t count) {
    st_read_bytes(t, out, first, count);
    st_read_bytes(t->scales, scales, first / INT8_BLOCK * (int64_t)sizeof(float),
                  int8_blocks(count) * (int64_t)sizeof(float));
}

enum { READ_ELEMENTS = 1 << 16 }; // how many elements are read and converted at a time: whole int8 blocks

/* Reads elements [first, first + count) of a tensor as fp32; of an int32 tensor, their bits. */
static void st_read(const StTensor *t, float *out, int64_t first, int64_t count) {
    int size = st_dtype_sizes[t->dtype];
    if (size == 4) {
        st_read_bytes(t, out, first * size, count * size);
        return;
    }
    int64_t begin = t->dtype == ST_I8 ? first / INT8_BLOCK * INT8_BLOCK : first;
    int64_t most = min_i64(READ_ELEMENTS, first + count - begin);
    bf16 *half = new_array(bf16, t->dtype == ST_I8 ? 0 : most); // on the heap: the stack may be small
    int8_t *int8 = new_array(int8_t, t->dtype == ST_I8 ? most : 0);
    float *scales = new_array(float, int8_blocks(most));
    for (int64_t at = begin, n; at < first + count; at += n) {
        n = min_i64(READ_ELEMENTS, first + count - at);
        if (t->dtype == ST_I8) st_read_quantized(t, int8, scales, at, n);
        else st_read_bytes(t, half, at * size, n * size);
        for (int64_t i = max_i64(0, first - at); i < n; i++) {
            float *element = &out[at + i - first];
            if (t->dtype == ST_I8) *element = (float)int8[i] * scales[i / INT8_BLOCK];
            else *element = t->dtype == ST_BF16 ? bf16_to_float(half[i]) : half_to_float(half[i].bits);
        }
    }
    free(half);
    free(int8);
    free(scales);
}

// ---------------------------------------------------------------------------
// a model directory

/* Reads the index at `path`. *map receives its list of tensors and their files. */
static cJSON *st_read_index(const char *path, const cJSON **map) {
    cJSON *json = json_read_object(path, "an index with a \"weight_map\"");
    if (!json) user_error("cannot read %s: %s; make it readable, or copy the directory again", path, strerror(errno));
    *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map");
    if (!cJSON_IsObject(*map))
        user_error("%s has no \"weight_map\": the index is damaged; copy the whole directory again", path);
    return json;
}

/* Opens the files that the index at `path` lists, each once, in the order of their names. */
static void st_open_index(StFiles *s, const char *dir, const char *path) {
    char file[4096];
    const cJSON *map, *item;
    cJSON *json = st_read_index(path, &map);
    char **names = new_array(char *, cJSON_GetArraySize(map));
    int count = 0;
    cJSON_ArrayForEach(item, map) {
        if (!cJSON_IsString(item) || strchr(item->valuestring, '/'))
            user_error("%s: the entry of \"%s\" is not the name of a file in the same directory", path, item->string);
        names[count++] = item->valuestring;
    }
    qsort(names, (size_t)count, sizeof *names, by_text);
    for (int i = 0; i < count; i++) {
        if (i && !strcmp(names[i - 1], names[i])) continue;
        snprintf(file, sizeof file, "%s/%s", dir, names[i]);
        st_add_file(s, file);
    }
    free(names);
    cJSON_Delete(json);
}

/* Refuses a directory that holds parts of the weights, stem-00001-of-00002.safetensors, without their index. */
static void st_refuse_parts(const char *dir, const char *stem) {
    size_t length = strlen(stem);
    DIR *d = opendir(dir);
    for (struct dirent *entry = d ? readdir(d) : NULL; entry; entry = readdir(d)) {
        const char *name = entry->d_name, *of = strstr(name, "-of-"), *ending = strstr(name, ".safetensors");
        if (strncmp(name, stem, length) || name[length] != '-' || !of || !ending || strcmp(ending, ".safetensors"))
            continue;
        user_error("%s holds %s, but neither %s.safetensors nor the index %s.safetensors.index.json: copy the whole "
                   "directory again",
                   dir, name, stem, stem);
    }
    if (d) closedir(d);
}

/* Opens `stem`.safetensors in a directory or, if there is none, the files that its index lists: transformers looks for
 * them in this order. Returns 0 if there are none. */
static int st_open(StFiles *s, const char *dir, const char *stem) {
    char path[4096], index[4096];
    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "%s/%s.safetensors", dir, stem);
    snprintf(index, sizeof index, "%s/%s.safetensors.index.json", dir, stem);
    if (entry_exists(path)) {
        st_add_file(s, path);
        const cJSON *map = NULL, *item;
        cJSON *json = entry_exists(index) ? st_read_index(index, &map) : NULL;
        const char *own = strrchr(path, '/') + 1;
        cJSON_ArrayForEach(item, map) s->ignores_index |= !cJSON_IsString(item) || strcmp(item->valuestring, own);
        cJSON_Delete(json);
    } else if (entry_exists(index)) st_open_index(s, dir, index);
    else {
        st_refuse_parts(dir, stem);
        return 0;
    }
    st_find_scales(s);
    return 1;
}

/* Is this the name of a file of weights, in this or another format, which may be incomplete? */
static int is_weights_name(const char *name) {
    static const char *const endings[] = {".safetensors", ".bin",     ".pt",    ".pth",  ".ckpt",
                                          ".h5",          ".msgpack", ".gguf",  ".part", ".nemo",
                                          ".index.json",  ".npz",     ".distcp"};
    static const char *const others[] = {"training_args", "optimizer", "scheduler", "scaler", "rng_state", "tokenizer"};
    for (int i = 0; i < 6; i++)
        if (!strncmp(name, others[i], strlen(others[i]))) return 0;
    for (int i = 0; i < (int)(sizeof endings / sizeof *endings); i++) {
        size_t n = strlen(name), m = strlen(endings[i]);
        if (n >= m && !strcasecmp(name + n - m, endings[i])) return 1;
    }
    return 0;
}

/* Stores in `found` (size) the path, below `dir`, of a file that looks like weights; in folders that are no models of
 * their own, too. Returns whether there is one. */
static int find_other_weights(const char *dir, int below, char *found, size_t size) {
    struct dirent **entries;
    char path[4096];
    int n = scandir(dir, &entries, NULL, alphasort), is_found = 0;
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", dir, name);
        int is_known = !is_found && name[0] != '.' && !stat(path, &info);
        if (is_known && S_ISREG(info.st_mode) && is_weights_name(name)) {
            snprintf(found, size, "%s", path);
            is_found = 1;
        } else if (is_known && S_ISDIR(info.st_mode) && !below) {
            char config[4096 + 32];
            snprintf(config, sizeof config, "%s/config.json", path);
            is_found = !entry_exists(config) && find_other_weights(path, 1, found, size);
        }
        free(entries[i]);
    }
    if (n >= 0) free(entries);
    return is_found;
}

/* Stores the name that one kind of a tensor's state has in files: the tensor's name, which PyTorch's name of the
 * optimizer's state follows. Returns 0 if the tensor has no such state. */
static int state_name(char name[128], const Tensor *t, StateKind kind) {
    static const char *const suffixes[STATES] = {"", ".grad", ".exp_avg", ".exp_avg_sq", ".copy"};
    int is_momentum = t->is_muon && kind == STATE_EXP_AVG;
    snprintf(name, 128, "%s%s", t->name, is_momentum ? ".momentum_buffer" : suffixes[kind]);
    return !t->is_muon || kind != STATE_EXP_AVG_SQ;
}

/* Refuses the files if one kind of state of tensors [first, end) of the table is missing or has another shape. */
static void st_require_tensors(const StFiles *s, const char *dir, const TensorTable *table, int first, int end,
                               StateKind kind) {
    for (int i = first; i < end; i++) {
        const Tensor *want = &table->tensors[i];
        char name[128];
        if (!state_name(name, want, kind)) continue;
        const StTensor *have = st_find(s, name);
        if (!have)
            user_error("%s: tensor %s is missing (%" PRId64 " x %" PRId64
                       "): use weights and a config.json of the same model%s",
                       dir, name, want->rows, want->cols,
                       strcmp(name, "lm_head.weight")
                           ? ""
                           : "; if its embedding is also its head, config.json needs \"tie_word_embeddings\": true");
        if (have->dtype == ST_I32 || have->rows != want->rows || have->cols != want->cols)
            user_error(
                "%s: tensor %s is %" PRId64 " x %" PRId64 " %s, but the model (config.json, --vocab-size) has %" PRId64
                " x %" PRId64 " floating-point numbers: use weights and a config.json of the same model",
                have->file->path, name, have->rows, have->cols, st_dtype_names[have->dtype], want->rows, want->cols);
    }
}

/* Gives tensors the names of the table. A file of LlamaModel, the model without its head, lacks "model." in front of
 * them, and save_model of safetensors may keep a tied embedding under the name of the head. */
static void model_weights_rename(StFiles *s, const char *dir, const TensorTable *table) {
    const char *embedding = "model.embed_tokens.weight", *head = "lm_head.weight";
    int head_is_embedding = table_is_tied(table) && !st_find(s, embedding) && !st_find(s, embedding + 6);
    for (int i = 0; i < s->count; i++) {
        StTensor *t = &s->tensors[i];
        char longer[4096];
        snprintf(longer, sizeof longer, "model.%s", t->name);
        const char *name = !table_find(table, t->name) && table_find(table, longer) ? longer : t->name;
        if (head_is_embedding && !strcmp(name, head)) name = embedding;
        if (name == t->name) continue;
        if (st_find(s, name)) user_error("%s holds both %s and %s: remove one of them", dir, name, t->name);
        free(t->name);
        t->name = checked_strdup(name);
        st_rehash(s);
    }
}

/* Refuses another tensor in a place where elements [first, first + count) of `t`, which are `values`, must be equal. */
static void st_check_copy(const StTensor *t, const float *values, int64_t first, int64_t count) {
    float other[4096];
    for (int64_t at = 0; t->copy && at < count; at += 4096) {
        int64_t n = min_i64(4096, count - at);
        st_read(t->copy, other, first + at, n);
        for (int64_t i = 0; i < n; i++)
            if (other[i] != values[at + i])
                user_error("%s: element %" PRId64 " of %s is %g and that of %s %g, but config.json has "
                           "\"tie_word_embeddings\": true, so that they are one: set it to false, or remove %s",
                           t->copy->file->path, first + at + i, t->copy->name, (double)other[i], t->name,
                           (double)values[at + i], t->copy->name);
    }
}

/* Opens the weights of a Hugging Face directory and compares them with the table. `stored`: which of them are int8
 * according to config.json. Returns 0 if there are none. */
static int model_weights_open(StFiles *s, const char *dir, const TensorTable *table, BaseKind stored) {
    if (!st_open(s, dir, "model")) {
        char found[4096];
        if (find_other_weights(dir, 0, found, sizeof found)) // the run would start from random numbers instead
            user_error("%s has no model.safetensors, but %s, which this program does not read as the model's weights: "
                       "save the model as safetensors (save_pretrained of transformers does it), or, to train from "
                       "random weights, give a directory with config.json alone",
                       dir, found);
        return 0;
    }
    model_weights_rename(s, dir, table);
    st_require_tensors(s, dir, table, 0, table_first_adapter(table), STATE_MASTER);
    for (int i = 0; i < table_first_adapter(table); i++) {
        const Tensor *want = &table->tensors[i];
        if ((st_find(s, want->name)->dtype == ST_I8) != is_quantized(stored, want->row))
            user_error("%s: tensor %s is %sint8, but quantization_config in config.json says otherwise: use weights "
                       "and a config.json of the same model",
                       dir, want->name, is_quantized(stored, want->row) ? "not " : "");
    }
    for (int i = 0; i < s->count; i++) {
        const char *name = s->tensors[i].name;
        int tied_head = !strcmp(name, "lm_head.weight") && table_is_tied(table);
        if (!table_find(table, name) && !tied_head && !s->tensors[i].are_scales && !strstr(name, "rotary_emb.inv_freq"))
            user_error("%s: tensor %s is not part of the model that config.json describes: use weights and a "
                       "config.json of the same model",
                       dir, name);
    }
    const StTensor *head = table_is_tied(table) ? st_find(s, "lm_head.weight") : NULL;
    if (!head) return 1;
    // A tied model's files may hold the head, too. Its values are compared while the embedding is read (st_check_copy).
    StTensor *embedding = (StTensor *)st_find(s, "model.embed_tokens.weight");
    if (head->rows != embedding->rows || head->cols != embedding->cols)
        user_error("%s: tensor lm_head.weight is %" PRId64 " x %" PRId64 " and model.embed_tokens.weight %" PRId64
                   " x %" PRId64 ", but config.json has \"tie_word_embeddings\": true: use weights and a config.json "
                   "of the same model",
                   head->file->path, head->rows, head->cols, embedding->rows, embedding->cols);
    embedding->copy = head;
    return 1;
}

/* Identifies a frozen model by the names, sizes and first elements of its tensors. The elements are taken as the run
 * keeps them (`base`), so that the dtype of the files does not matter. */
static uint64_t model_fingerprint(const StFiles *s, const TensorTable *table, BaseKind base) {
    uint64_t sum = 0;
    for (int i = 0; i < table_first_adapter(table); i++) {
        const StTensor *t = st_find(s, table->tensors[i].name);
        float first[INT8_BLOCK] = {0};
        int8_t bytes[INT8_BLOCK];
        int64_t n = min_i64(INT8_BLOCK, t->elements);
        st_read(t, first, 0, n);
        if (t->dtype != ST_I8 && is_quantized(base, table->tensors[i].row)) {
            float scale = quantize_int8_block(bytes, first, n);
            for (int64_t e = 0; e < n; e++) first[e] = (float)bytes[e] * scale;
        } else if (t->dtype != ST_I8) {
            for (int64_t e = 0; e < n; e++) first[e] = to_float(from_float(first[e]));
        }
        uint64_t name_and_size = hash_bytes(HASH_START, t->name, strlen(t->name)) ^ mix64((uint64_t)t->elements);
        sum += mix64(hash_bytes(name_and_size, first, sizeof first));
    }
    return sum;
}

// ---------------------------------------------------------------------------
// the layout of files that are written: which tensors go into which file, and at which offset

// tests set both smaller
#ifndef FILE_CHUNK_BYTES
#define FILE_CHUNK_BYTES (4 << 20) // a file chunk is written by one rank and has one checksum
#endif
#ifndef MAX_FILE_BYTES
#define MAX_FILE_BYTES 5000000000ll // a larger model is split into several files, as transformers does it
#endif
enum { MAX_FILES = 100 }; // files become larger rather than many more, since all of them may be open at a time

enum { Q8_0_BLOCK = 32, Q8_0_BLOCK_BYTES = 2 + Q8_0_BLOCK, GGUF_ALIGN = 32 /* bytes: where a tensor may begin */ };

typedef struct {
    char name[128];
    const Tensor *tensor;
    StateKind kind; // weights, or one of the optimizer's moments
    StDtype dtype;
    int scales;           // this entry holds the scales of the int8 tensor before it
    int interleaved_rows; // rows per head if its two halves alternate in a GGUF file; 0: the model's order
    int64_t elements, bytes;
    int64_t padding; // zero bytes after it
} OutputTensor;

typedef struct {
    char name[80];
    int parts;                   // how many files together hold what this one is a part of; 1: it is complete
    int first, count;            // range of its tensors in OutputFiles
    char *header;                // (header_bytes) including its length
    int64_t header_bytes, bytes; // bytes: size of the whole file
    int64_t first_chunk, chunks; // its file chunks, numbered over all files
} OutputFile;

typedef struct {
    BaseKind base;         // which weights are written as int8
    StDtype dtype;         // of all others
    OutputTensor *tensors; // (num_tensors)
    OutputFile *files;     // (num_files)
    int num_tensors, num_files;
    int64_t chunks; // file chunks of all files together
} OutputFiles;

static int64_t chunks_of(int64_t bytes) { return (bytes + FILE_CHUNK_BYTES - 1) / FILE_CHUNK_BYTES; }

/* Lays out a file's header, which determines its size. */
static void output_file_header(OutputFiles *o, OutputFile *file) {
    int64_t data = 0;
    char list[64];
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(cJSON_AddObjectToObject(json, "__metadata__"), "format", "pt");
    for (int i = file->first; i < file->first + file->count; i++) {
        const OutputTensor *t = &o->tensors[i];
        cJSON *item = cJSON_AddObjectToObject(json, t->name);
        cJSON_AddStringToObject(item, "dtype", st_dtype_names[t->dtype]);
        if (t->scales || t->tensor->row->rows == DIM_ONE) snprintf(list, sizeof list, "[%" PRId64 "]", t->elements);
        else snprintf(list, sizeof list, "[%" PRId64 ",%" PRId64 "]", t->tensor->rows, t->tensor->cols);
        cJSON_AddRawToObject(item, "shape", list);
        snprintf(list, sizeof list, "[%" PRId64 ",%" PRId64 "]", data, data + t->bytes);
        cJSON_AddRawToObject(item, "data_offsets", list);
        data += t->bytes;
    }
    char *text = json_text(json, 0);
    uint64_t length = (uint64_t)round_up((int64_t)strlen(text), 8); // so that tensors are aligned
    file->header_bytes = 8 + (int64_t)length;
    file->header = (char *)checked_malloc((size_t)file->header_bytes + 1);
    memcpy(file->header, &length, 8);
    snprintf(file->header + 8, length + 1, "%-*s", (int)length, text);
    free(text);
    file->bytes = file->header_bytes + data;
    file->chunks = chunks_of(file->bytes);
    file->first_chunk = o->chunks;
    o->chunks += file->chunks;
}

/* Adds files for tensors [begin, end) of the table: first the state `kind` of all of them, then the next kind of state
 * of all of them, up to `last`. A single file is named stem.safetensors, several stem-00001-of-00003.safetensors and so
 * on. */
static void output_files_add(OutputFiles *o, const TensorTable *table, int begin, int end, const char *stem,
                             StateKind kind, StateKind last) {
    int num_kinds = last - kind + 1, most_tensors = 2 * num_kinds * (end - begin); // with scales
    int first = o->num_tensors, first_file = o->num_files;
    o->tensors = (OutputTensor *)checked_realloc(o->tensors, sizeof(OutputTensor) * (size_t)(first + most_tensors));
    o->files = (OutputFile *)checked_realloc(o->files, sizeof(OutputFile) * (size_t)(first_file + most_tensors));
    for (int k = 0; k < num_kinds; k++)
        for (int i = begin; i < end; i++) {
            const Tensor *tensor = &table->tensors[i];
            int quantized = is_quantized(o->base, tensor->row);
            OutputTensor t = {"", tensor, (StateKind)(kind + k), o->dtype, 0, 0, tensor->rows * tensor->cols, 0, 0};
            if (!state_name(t.name, tensor, t.kind)) continue;
            if (quantized) t.dtype = ST_I8;
            t.bytes = t.elements * st_dtype_sizes[t.dtype];
            o->tensors[o->num_tensors++] = t;
            if (!quantized) continue;
            snprintf(t.name, sizeof t.name, "%s%s", tensor->name, scale_suffix);
            t.scales = 1;
            t.dtype = ST_F32;
            t.elements = int8_blocks(t.elements);
            t.bytes = t.elements * st_dtype_sizes[t.dtype];
            o->tensors[o->num_tensors++] = t;
        }
    int64_t most = max_i64(MAX_FILE_BYTES, num_kinds * table->num_parameters * st_dtype_sizes[o->dtype] / MAX_FILES);
    int64_t held = 0; // bytes in the current file
    for (int i = first; i < o->num_tensors; i++) {
        if (i == first || held + o->tensors[i].bytes > most) {
            OutputFile file = ZERO;
            file.first = i;
            o->files[o->num_files++] = file;
            held = 0;
        }
        o->files[o->num_files - 1].count++;
        held += o->tensors[i].bytes;
    }
    int files = o->num_files - first_file;
    for (int i = 0; i < files; i++) {
        OutputFile *file = &o->files[first_file + i];
        if (files == 1) snprintf(file->name, sizeof file->name, "%s.safetensors", stem);
        else snprintf(file->name, sizeof file->name, "%s-%05d-of-%05d.safetensors", stem, i + 1, files);
        file->parts = files;
        output_file_header(o, file);
    }
}

/* The text of the index of the files whose first one has number `first`. */
static char *output_files_index(const OutputFiles *o, int first) {
    int64_t data = 0;
    cJSON *json = cJSON_CreateObject(), *metadata = cJSON_AddObjectToObject(json, "metadata");
    cJSON *map = cJSON_CreateObject();
    for (int i = first; i < first + o->files[first].parts; i++) {
        const OutputFile *file = &o->files[i];
        data += file->bytes - file->header_bytes;
        for (int t = file->first; t < file->first + file->count; t++)
            cJSON_AddStringToObject(map, o->tensors[t].name, file->name);
    }
    cJSON_AddNumberToObject(metadata, "total_size", (double)data);
    cJSON_AddItemToObject(json, "weight_map", map);
    return json_text(json, 1);
}

static void output_files_close(OutputFiles *o) {
    for (int i = 0; i < o->num_files; i++) free(o->files[i].header);
    free(o->files);
    free(o->tensors);
    memset(o, 0, sizeof *o);
}

#endif
