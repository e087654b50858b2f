/* safetensors.h: Hugging Face's file of tensors, read and laid out.
 *
 * Owns: the reader, the check of a model's files against the tensor table, and where each tensor starts in files
 * that are written. A caller may rely on: every header is checked before a tensor of it is read, and a file that lies
 * about itself is an error that names it and the tensor; where a tensor is written depends on the table and on dtypes
 * alone.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H
#include "../fsdp.h" // defines: Tensor, TensorTable, StateKind
#include <fcntl.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------
// safetensors: 8 bytes length of a JSON header, the header, the tensors' bytes

typedef enum { ST_F32, ST_BF16, ST_F16, ST_I32, ST_I8, ST_DTYPES } StDtype;
static const char *const st_dtype_names[ST_DTYPES] = {"F32", "BF16", "F16", "I32", "I8"};
static const int st_dtype_sizes[ST_DTYPES] = {4, 2, 2, 4, 1};
static const char scale_suffix[] =
    ".scale"; // a tensor of I8 has beside it, under its name with this behind, the scales of its blocks, F32 (blocks)

typedef struct StTensor {
    char *name;
    StDtype dtype;
    int64_t rows, cols, elements;  // the last dimension is cols, all before it rows
    int64_t begin;                 // first byte in the file
    int fd, file;                  // file: which of several
    const char *path;              // of the file, for errors
    const struct StTensor *scales; // of I8; NULL: not found yet
    int are_scales;                // of another tensor
} StTensor;

typedef struct { // all tensors of one or several files
    StTensor *tensors;
    int count;
    char *paths[1024];
    int fds[1024], num_files;
} StFiles;

static void st_add_tensor(StFiles *s, const char *path, int fd, const cJSON *item, int64_t data, int64_t file_size) {
    StTensor t = ZERO;
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype"),
                *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets"), *dim;
    int known = 0;
    while (known < ST_DTYPES && !(cJSON_IsString(dtype) && !strcmp(dtype->valuestring, st_dtype_names[known]))) known++;
    if (known == ST_DTYPES)
        user_error("%s: tensor %s has dtype %s, expected F32, BF16, F16, I32 or I8", path, item->string,
                   cJSON_IsString(dtype) ? dtype->valuestring : "?");
    t.dtype = (StDtype)known;
    t.rows = 1, t.cols = 1;
    if (!cJSON_IsArray(shape) || cJSON_GetArraySize(offsets) != 2)
        user_error("%s: tensor %s has no shape or no data_offsets", path, item->string);
    cJSON_ArrayForEach(dim, shape) {
        double d = dim->valuedouble;
        if (!cJSON_IsNumber(dim) || !(d >= 0 && d <= 1e15) || d != floor(d) ||
            (double)t.rows * (double)t.cols * d > 1e15)
            user_error("%s: the shape of tensor %s is not one", path, item->string);
        t.rows *= t.cols;
        t.cols = (int64_t)d;
    }
    t.elements = t.rows * t.cols;
    double begin = cJSON_GetArrayItem(offsets, 0)->valuedouble, end = cJSON_GetArrayItem(offsets, 1)->valuedouble;
    if (!(begin >= 0) || begin != floor(begin) || end - begin != (double)t.elements * st_dtype_sizes[known] ||
        end > (double)(file_size - data))
        user_error("%s: tensor %s lies at bytes %.0f to %.0f of %" PRId64 ", its shape needs %" PRId64
                   " bytes: the file is truncated or damaged",
                   path, item->string, begin, end, file_size - data, t.elements * st_dtype_sizes[known]);
    t.begin = data + (int64_t)begin;
    t.name = strdup(item->string);
    t.fd = fd, t.file = s->num_files;
    t.path = path;
    s->tensors = (StTensor *)realloc(s->tensors, sizeof(StTensor) * (size_t)(s->count + 1));
    if (!s->tensors) run_failure("out of memory reading %s", path);
    s->tensors[s->count++] = t;
}

static int by_place(const void *a, const void *b) { // tensors without bytes before the one that starts there
    const StTensor *x = (const StTensor *)a, *y = (const StTensor *)b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : (x->elements > y->elements) - (x->elements < y->elements);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const StTensor *)a)->name, ((const StTensor *)b)->name);
}

/* As the format asks: every name once, and the tensors lie one behind the other from the header to the file's end. */
static void st_check_places(StTensor *tensors, int count, const char *path, int64_t data, int64_t file_size) {
    int64_t end = data;
    if (count) qsort(tensors, (size_t)count, sizeof *tensors, by_name);
    for (int i = 1; i < count; i++)
        if (!strcmp(tensors[i].name, tensors[i - 1].name))
            user_error("%s holds tensor %s twice: the file is damaged", path, tensors[i].name);
    if (count) qsort(tensors, (size_t)count, sizeof *tensors, by_place);
    for (int i = 0; i < count; i++) {
        if (tensors[i].begin != end)
            user_error("%s: tensor %s starts at byte %" PRId64 " of the data, expected %" PRId64
                       ": tensors overlap or leave gaps, the file is damaged",
                       path, tensors[i].name, tensors[i].begin - data, end - data);
        end += tensors[i].elements * st_dtype_sizes[tensors[i].dtype];
    }
    if (end != file_size)
        user_error("%s: its tensors take %" PRId64 " bytes, %" PRId64
                   " follow the header: the file is damaged, copy it again",
                   path, end - data, file_size - data);
}

static void st_add_file(StFiles *s, const char *path) {
    struct stat info;
    uint64_t length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC), first = s->count;
    if (fd < 0 || fstat(fd, &info)) user_error("cannot read weights %s: %s", path, strerror(errno));
    if (s->num_files == 1024) user_error("%s: more than 1024 files of weights", path);
    if (pread(fd, &length, 8, 0) != 8 || length < 2 || length > 100000000 ||
        (int64_t)length + 8 > (int64_t)info.st_size)
        user_error("%s is not a safetensors file: its header would be %" PRIu64 " bytes of %" PRId64, path, length,
                   (int64_t)info.st_size);
    char *header = (char *)checked_malloc(length + 1);
    if (pread(fd, header, length, 8) != (ssize_t)length) user_error("cannot read the header of %s", path);
    cJSON *json = cJSON_Parse(header);
    if (!cJSON_IsObject(json))
        user_error("%s: the header is not JSON: the file is damaged, or no safetensors file", path);
    s->paths[s->num_files] = strdup(path);
    s->fds[s->num_files] = fd;
    cJSON *item;
    cJSON_ArrayForEach(item, json) if (strcmp(item->string, "__metadata__"))
        st_add_tensor(s, s->paths[s->num_files], fd, item, 8 + (int64_t)length, info.st_size);
    st_check_places(s->count > first ? s->tensors + first : NULL, s->count - first, path, 8 + (int64_t)length,
                    info.st_size);
    s->num_files++;
    cJSON_Delete(json);
    free(header);
}

static void st_close(StFiles *s) {
    for (int i = 0; i < s->count; i++) free(s->tensors[i].name);
    for (int i = 0; i < s->num_files; i++) {
        free(s->paths[i]);
        close(s->fds[i]);
    }
    free(s->tensors);
    memset(s, 0, sizeof *s);
}

static const StTensor *st_find(const StFiles *s, const char *name) {
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->tensors[i].name, name)) return &s->tensors[i];
    return NULL;
}

static inline float half_to_float(uint16_t h) { // IEEE 754 binary16
    int exponent = (h >> 10) & 31, fraction = h & 1023;
    float x = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                             : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -x : x;
}

/* Every tensor of I8 must have its scales; once all files are open. */
static void st_find_scales(StFiles *s) {
    char name[4096];
    for (int i = 0; i < s->count; i++) {
        StTensor *t = &s->tensors[i], *scales;
        if (t->dtype != ST_I8) continue;
        if (snprintf(name, sizeof name, "%s%s", t->name, scale_suffix) >= (int)sizeof name)
            user_error("%s: the name of tensor %.100s… is too long", t->path, t->name);
        t->scales = scales = (StTensor *)(uintptr_t)st_find(s, name);
        if (!scales || scales->dtype != ST_F32 || scales->elements != int8_blocks(t->elements))
            user_error("%s: tensor %s is in 8 bits, and %s of its %" PRId64 " blocks %s: expected F32 [%" PRId64
                       "], as --export --dtype int8 writes them",
                       t->path, t->name, name, int8_blocks(t->elements),
                       scales ? "is not as long, or no F32" : "is missing", int8_blocks(t->elements));
        scales->are_scales = 1;
    }
}

/* Bytes of a tensor, from byte `from` of it on. */
static void st_read_bytes(const StTensor *t, void *out, int64_t from, int64_t bytes) {
    int64_t came = pread(t->fd, out, (size_t)bytes, t->begin + from);
    if (came != bytes)
        user_error("%s: tensor %s cannot be read: %s", t->path, t->name,
                   came < 0 ? strerror(errno) : "the file ends within it");
}

/* Elements [first, first + count) of a tensor of I8, where `first` begins a block, and the scales of their blocks. */
static void st_read_quantized(const StTensor *t, int8_t *out /* (count) */, float *scales /* (int8_blocks(count)) */,
                              int64_t first, int64_t count) {
    st_read_bytes(t, out, first, count);
    st_read_bytes(t->scales, scales, first / INT8_BLOCK * (int64_t)sizeof(float),
                  int8_blocks(count) * (int64_t)sizeof(float));
}

/* Elements [first, first + count) of a tensor, as fp32 (int32 tensors: their bits). */
static void st_read(const StTensor *t, float *out, int64_t first, int64_t count) {
    enum { AT_ONCE = 1 << 16 }; // whole blocks
    char buffer[4 * AT_ONCE];
    int size = st_dtype_sizes[t->dtype];
    for (int64_t at = first / INT8_BLOCK * INT8_BLOCK, n; t->dtype == ST_I8 && at < first + count; at += n) {
        float scales[(int)AT_ONCE / (int)INT8_BLOCK];
        n = min_i64(AT_ONCE, first + count - at);
        st_read_quantized(t, (int8_t *)buffer, scales, at, n);
        for (int64_t i = max_i64(0, first - at); i < n; i++)
            out[at + i - first] = (float)((int8_t *)buffer)[i] * scales[i / INT8_BLOCK];
    }
    if (t->dtype == ST_I8) return;
    for (int64_t done = 0; done < count; done += AT_ONCE) {
        int64_t n = min_i64(AT_ONCE, count - done);
        st_read_bytes(t, buffer, (first + done) * size, n * size);
        if (size == 4) memcpy(out + done, buffer, (size_t)(n * 4));
        for (int64_t i = 0; i < n && size == 2; i++) {
            bf16 b;
            memcpy(&b, buffer + 2 * i, 2);
            out[done + i] = t->dtype == ST_BF16 ? bf16_to_float(b) : half_to_float(b.bits);
        }
    }
}

// ---------------------------------------------------------------------------
// a model directory

/* Opens `stem`.safetensors in a directory, or the files that its index lists. 0: there are none. */
static int st_open(StFiles *s, const char *dir, const char *stem) {
    char path[4096];
    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "%s/%s.safetensors.index.json", dir, stem);
    char *text = read_text_file(path);
    if (text) {
        cJSON *json = cJSON_Parse(text), *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map"), *item;
        if (!cJSON_IsObject(map)) user_error("%s has no \"weight_map\"", path);
        cJSON_ArrayForEach(item, map) {
            int seen = 0;
            if (!cJSON_IsString(item) || strchr(item->valuestring, '/'))
                user_error("%s: \"%s\" names no file beside it", path, item->string);
            snprintf(path, sizeof path, "%s/%s", dir, item->valuestring);
            for (int i = 0; i < s->num_files; i++) seen |= !strcmp(s->paths[i], path);
            if (!seen) st_add_file(s, path);
        }
        cJSON_Delete(json);
        free(text);
        for (int i = 0; i < s->count; i++) // within a file each is there once
            if (st_find(s, s->tensors[i].name) != &s->tensors[i])
                user_error("%s and %s both hold tensor %s", st_find(s, s->tensors[i].name)->path, s->tensors[i].path,
                           s->tensors[i].name);
    } else {
        snprintf(path, sizeof path, "%s/%s.safetensors", dir, stem);
        if (access(path, F_OK)) return 0;
        st_add_file(s, path);
    }
    st_find_scales(s);
    return 1;
}

/* A tensor of the table, or with a suffix its state, must be there as the model has it. */
static void st_require_tensor(const StFiles *s, const char *dir, const Tensor *want, const char *suffix) {
    char name[96];
    snprintf(name, sizeof name, "%s%s", want->name, suffix);
    const StTensor *have = st_find(s, name);
    if (!have) user_error("%s: tensor %s is missing; the model has it", dir, name);
    if (have->dtype == ST_I32 || have->rows != want->rows || have->cols != want->cols)
        user_error("%s: tensor %s is %" PRId64 " x %" PRId64 " %s, the model (config.json, --vocab-size) has %" PRId64
                   " x %" PRId64 " floats",
                   dir, name, have->rows, have->cols, st_dtype_names[have->dtype], want->rows, want->cols);
}

/* Opens the weights of a Hugging Face directory and holds them against the table; `stored`: which of them config.json
 * has in 8 bits. 0: there are none. */
static int model_weights_open(StFiles *s, const char *dir, const TensorTable *table, BaseKind stored) {
    if (!st_open(s, dir, "model")) return 0;
    for (int i = 0; i < table_first_adapter(table); i++) {
        const Tensor *want = &table->tensors[i];
        st_require_tensor(s, dir, want, "");
        if ((st_find(s, want->name)->dtype == ST_I8) != is_quantized(stored, want->row))
            user_error("%s: tensor %s is %s in 8 bits, config.json (quantization_config) says otherwise: they are not "
                       "of the same model",
                       dir, want->name, is_quantized(stored, want->row) ? "not" : "kept");
    }
    for (int i = 0; i < s->count; i++) {
        const char *name = s->tensors[i].name;
        int tied_head = !strcmp(name, "lm_head.weight") && table_is_tied(table); // some files keep both
        if (!table_find(table, name) && !tied_head && !s->tensors[i].are_scales && !strstr(name, "rotary_emb.inv_freq"))
            user_error("%s: tensor %s is not part of the model that config.json describes", dir, name);
    }
    return 1;
}

/* Tells one frozen model's weights from another's: by names, shapes and each tensor's first elements, as they are kept,
 * whatever they are stored in. */
static uint64_t model_fingerprint(const StFiles *s, const TensorTable *table, BaseKind base) {
    uint64_t sum = 0;
    for (int i = 0; i < table_first_adapter(table); i++) {
        const StTensor *t = st_find(s, table->tensors[i].name);
        float first[INT8_BLOCK] = {0}, scale = 1;
        int8_t bytes[INT8_BLOCK];
        int64_t n = min_i64(INT8_BLOCK, t->elements);
        if (t->dtype == ST_I8) st_read_quantized(t, bytes, &scale, 0, n);
        else st_read(t, first, 0, n);
        if (t->dtype != ST_I8 && is_quantized(base, table->tensors[i].row)) scale = quantize_int8_block(bytes, first, n);
        for (int64_t e = 0; e < n; e++)
            first[e] =
                is_quantized(base, table->tensors[i].row) ? (float)bytes[e] * scale : to_float(from_float(first[e]));
        sum += mix64(hash_bytes(hash_bytes(HASH_START, t->name, strlen(t->name)) ^ mix64((uint64_t)t->elements), first,
                                sizeof first));
    }
    return sum;
}

// ---------------------------------------------------------------------------
// files to be written: which tensors, in which file, from which byte on

// tests set both smaller
#ifndef FILE_CHUNK_BYTES
#define FILE_CHUNK_BYTES (4 << 20) // of a file: has one writer, and one checksum
#endif
#ifndef MAX_FILE_BYTES
#define MAX_FILE_BYTES 5000000000ll // a file ends before the tensor that would make it longer, as transformers splits …
#endif
enum { MAX_FILES = 100 }; // … but there are not many more than these, since they may all be open at a time

typedef struct {
    const Tensor *tensor;
    StateKind kind; // of which state: weights, or a moment
    StDtype dtype;
    int scales; // not its elements: the scales of their blocks of 8 bits
} OutputTensor;

typedef struct {
    char name[80];
    int first, count;            // of the tensors
    char *header;                // (header_bytes), with its length in front
    int64_t header_bytes, bytes; // bytes: of the whole file
} OutputFile;

typedef struct {
    BaseKind base; // which weights are written in 8 bits, …
    StDtype dtype; // … and what all others are
    OutputTensor *tensors;
    OutputFile *files;
    int num_tensors, num_files;
    int64_t chunks; // of all files, counted file by file
} OutputFiles;

static const char *const out_suffixes[STATES] = {"", ".grad", ".exp_avg", ".exp_avg_sq", ".copy"};

static int64_t out_elements(const OutputTensor *t) {
    return t->scales ? int8_blocks(t->tensor->rows * t->tensor->cols) : t->tensor->rows * t->tensor->cols;
}
static int64_t out_bytes(const OutputTensor *t) { return out_elements(t) * st_dtype_sizes[t->dtype]; }
static const char *out_suffix(const OutputTensor *t) { return t->scales ? scale_suffix : out_suffixes[t->kind]; }
static int64_t chunks_of(int64_t bytes) { return (bytes + FILE_CHUNK_BYTES - 1) / FILE_CHUNK_BYTES; }
static int64_t output_file_chunks(const OutputFile *f) { return chunks_of(f->bytes); }

/* Ends what is in memory as `f`; returns it. */
static char *memory_file(FILE *f, char **text, size_t *length) {
    if (fclose(f) || !*text) run_failure("out of memory: a text of %zu bytes", *length);
    return *text;
}

static void output_file_header(OutputFiles *o, OutputFile *file) {
    char *text;
    size_t length;
    int64_t data = 0;
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    fprintf(f, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = file->first; i < file->first + file->count; i++) {
        const OutputTensor *out = &o->tensors[i];
        const Tensor *t = out->tensor;
        fprintf(f, ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, out_suffix(out), st_dtype_names[out->dtype]);
        if (t->row->rows != DIM_ONE && !out->scales) fprintf(f, "%" PRId64 ",", t->rows);
        fprintf(f, "%" PRId64 "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
                out->scales ? out_elements(out) : t->cols, data, data + out_bytes(out));
        data += out_bytes(out);
    }
    fprintf(f, "}");
    memory_file(f, &text, &length);
    uint64_t padded = (uint64_t)round_up((int64_t)length, 8);
    file->header = (char *)checked_malloc(8 + padded);
    memcpy(file->header, &padded, 8);
    memset(file->header + 8, ' ', padded);
    memcpy(file->header + 8, text, length);
    file->header_bytes = 8 + (int64_t)padded;
    file->bytes = file->header_bytes + data;
    free(text);
}

/* Adds files `stem`… of the states of tensors from `begin` to the one before `end`, one kind after the other. */
static void output_files_add(OutputFiles *o, const TensorTable *table, int begin, int end, const char *stem,
                             const StateKind *kinds, int num_kinds) {
    int first = o->num_tensors, first_file = o->num_files, count = num_kinds * (end - begin),
        most_tensors = o->base > BASE_FROZEN ? 2 * count : count;
    int64_t most = MAX_FILE_BYTES, held = 0;
    o->tensors = (OutputTensor *)realloc(o->tensors, sizeof(OutputTensor) * (size_t)(first + most_tensors));
    o->files = (OutputFile *)realloc(o->files, sizeof(OutputFile) * (size_t)(first_file + most_tensors));
    if (!o->tensors || !o->files) run_failure("out of memory");
    for (int i = 0; i < count; i++) {
        OutputTensor t = {&table->tensors[begin + i % (end - begin)], kinds[i / (end - begin)], o->dtype, 0};
        int in_8_bits = is_quantized(o->base, t.tensor->row);
        if (in_8_bits) t.dtype = ST_I8;
        o->tensors[o->num_tensors++] = t;
        if (in_8_bits) t.dtype = ST_F32, t.scales = 1, o->tensors[o->num_tensors++] = t;
    }
    most = max_i64(most, num_kinds * table->num_parameters * st_dtype_sizes[o->dtype] / MAX_FILES);
    for (int i = first; i < o->num_tensors; held += out_bytes(&o->tensors[i++])) {
        if (i == first || held + out_bytes(&o->tensors[i]) > most) {
            OutputFile file = ZERO;
            file.first = i;
            o->files[o->num_files++] = file;
            held = 0;
        }
        o->files[o->num_files - 1].count++;
    }
    int parts = o->num_files - first_file;
    for (int i = 0; i < parts; i++) {
        OutputFile *file = &o->files[first_file + i];
        if (parts == 1) snprintf(file->name, sizeof file->name, "%s.safetensors", stem);
        else snprintf(file->name, sizeof file->name, "%s-%05d-of-%05d.safetensors", stem, i + 1, parts);
        output_file_header(o, file);
        o->chunks += output_file_chunks(file);
    }
}

/* The index of files `stem`-…; NULL: there is one file, which needs none. */
static char *output_files_index(const OutputFiles *o, const char *stem, size_t *length) {
    char *text;
    int64_t data = 0;
    int listed = 0;
    FILE *f = open_memstream(&text, length);
    if (!f) run_failure("out of memory");
    size_t n = strlen(stem);
    for (int i = 0; i < o->num_files; i++)
        if (!strncmp(o->files[i].name, stem, n) && o->files[i].name[n] == '-')
            data += o->files[i].bytes - o->files[i].header_bytes;
    fprintf(f, "{\"metadata\":{\"total_size\":%" PRId64 "},\"weight_map\":{", data);
    for (int i = 0; i < o->num_files && data; i++)
        for (int t = o->files[i].first;
             t < o->files[i].first + o->files[i].count && !strncmp(o->files[i].name, stem, n); t++)
            fprintf(f, "%s\n\"%s%s\":\"%s\"", listed++ ? "," : "", o->tensors[t].tensor->name,
                    out_suffix(&o->tensors[t]), o->files[i].name);
    fprintf(f, "}}\n");
    memory_file(f, &text, length);
    if (listed) return text;
    free(text);
    return NULL;
}

static void output_files_close(OutputFiles *o) {
    for (int i = 0; i < o->num_files; i++) free(o->files[i].header);
    free(o->files);
    free(o->tensors);
    memset(o, 0, sizeof *o);
}

#endif
