/* checkpoint.h: weights in and out, in Hugging Face's safetensors.
 *
 * Owns: the safetensors reader and the writing of a model directory that transformers loads as it lies.
 * A caller may rely on: each rank reads and writes only its own ranges of each tensor, so nobody ever holds more
 * than its shards; a file that lies about itself is an error that names it; nothing that exists is overwritten.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H
#include "fsdp.h"
#include <fcntl.h>

// ---------------------------------------------------------------------------
// safetensors: 8 bytes length of a JSON header, the header, the tensors' bytes

typedef enum { ST_F32, ST_BF16, ST_F16, ST_I32, ST_DTYPES } StDtype;
static const char *const st_dtype_names[ST_DTYPES] = {"F32", "BF16", "F16", "I32"};
static const int st_dtype_sizes[ST_DTYPES] = {4, 2, 2, 4};

typedef struct {
    char *name;
    StDtype dtype;
    int64_t rows, cols, elements; // the last dimension is cols, all before it rows
    int64_t begin;                // first byte in the file
    int fd;
    const char *path;             // of the file, for errors
} StTensor;

typedef struct {                  // all tensors of one or several files
    StTensor *tensors;
    int count;
    char *paths[1024];
    int fds[1024], num_files;
} StFiles;

static void st_add_tensor(StFiles *s, const char *path, int fd, const cJSON *item, int64_t data, int64_t file_size) {
    StTensor t = ZERO;
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype"), *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets"), *dim;
    int known = 0;
    while (known < ST_DTYPES && !(cJSON_IsString(dtype) && !strcmp(dtype->valuestring, st_dtype_names[known]))) known++;
    if (known == ST_DTYPES) user_error("%s: tensor %s has dtype %s, expected F32, BF16, F16 or I32", path, item->string, cJSON_IsString(dtype) ? dtype->valuestring : "?");
    t.dtype = (StDtype)known;
    t.rows = 1, t.cols = 1;
    if (!cJSON_IsArray(shape) || cJSON_GetArraySize(offsets) != 2) user_error("%s: tensor %s has no shape or no data_offsets", path, item->string);
    cJSON_ArrayForEach(dim, shape) {
        double d = dim->valuedouble;
        if (!cJSON_IsNumber(dim) || !(d >= 0 && d <= 1e15) || d != floor(d) || (double)t.rows * (double)t.cols * d > 1e15)
            user_error("%s: the shape of tensor %s is not one", path, item->string);
        t.rows *= t.cols;
        t.cols = (int64_t)d;
    }
    t.elements = t.rows * t.cols;
    double begin = cJSON_GetArrayItem(offsets, 0)->valuedouble, end = cJSON_GetArrayItem(offsets, 1)->valuedouble;
    if (!(begin >= 0) || begin != floor(begin) || end - begin != (double)t.elements * st_dtype_sizes[known] || end > (double)(file_size - data))
        user_error("%s: tensor %s lies at bytes %.0f to %.0f of %" PRId64 ", its shape needs %" PRId64 " bytes: the file is truncated or damaged",
                   path, item->string, begin, end, file_size - data, t.elements * st_dtype_sizes[known]);
    t.begin = data + (int64_t)begin;
    t.name = strdup(item->string);
    t.fd = fd;
    t.path = path;
    s->tensors = (StTensor *)realloc(s->tensors, sizeof(StTensor) * (size_t)(s->count + 1));
    if (!s->tensors) run_failure("out of memory reading %s", path);
    s->tensors[s->count++] = t;
}

static int by_place(const void *a, const void *b) { // tensors without bytes before the one that starts there
    const StTensor *x = (const StTensor *)a, *y = (const StTensor *)b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin) : (x->elements > y->elements) - (x->elements < y->elements);
}

static int by_name(const void *a, const void *b) { return strcmp(((const StTensor *)a)->name, ((const StTensor *)b)->name); }

/* As the format asks: every name once, and the tensors lie one behind the other from the header to the file's end. */
static void st_check_places(StTensor *tensors, int count, const char *path, int64_t data, int64_t file_size) {
    int64_t end = data;
    if (count) qsort(tensors, (size_t)count, sizeof *tensors, by_name);
    for (int i = 1; i < count; i++)
        if (!strcmp(tensors[i].name, tensors[i - 1].name)) user_error("%s holds tensor %s twice: the file is damaged", path, tensors[i].name);
    if (count) qsort(tensors, (size_t)count, sizeof *tensors, by_place);
    for (int i = 0; i < count; i++) {
        if (tensors[i].begin != end)
            user_error("%s: tensor %s starts at byte %" PRId64 " of the data, expected %" PRId64 ": tensors overlap or leave gaps, the file is damaged",
                       path, tensors[i].name, tensors[i].begin - data, end - data);
        end += tensors[i].elements * st_dtype_sizes[tensors[i].dtype];
    }
    if (end != file_size)
        user_error("%s: its tensors take %" PRId64 " bytes, %" PRId64 " follow the header: the file is damaged, copy it again", path, end - data, file_size - data);
}

static void st_add_file(StFiles *s, const char *path) {
    struct stat info;
    uint64_t length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC), first = s->count;
    if (fd < 0 || fstat(fd, &info)) user_error("cannot read weights %s: %s", path, strerror(errno));
    if (s->num_files == 1024) user_error("%s: more than 1024 files of weights", path);
    if (pread(fd, &length, 8, 0) != 8 || length < 2 || length > 100000000 || (int64_t)length + 8 > (int64_t)info.st_size)
        user_error("%s is not a safetensors file: its header would be %" PRIu64 " bytes of %" PRId64, path, length, (int64_t)info.st_size);
    char *header = (char *)checked_malloc(length + 1);
    if (pread(fd, header, length, 8) != (ssize_t)length) user_error("cannot read the header of %s", path);
    cJSON *json = cJSON_Parse(header);
    if (!cJSON_IsObject(json)) user_error("%s: the header is not JSON: the file is damaged, or no safetensors file", path);
    s->paths[s->num_files] = strdup(path);
    s->fds[s->num_files] = fd;
    cJSON *item;
    cJSON_ArrayForEach(item, json)
        if (strcmp(item->string, "__metadata__")) st_add_tensor(s, s->paths[s->num_files], fd, item, 8 + (int64_t)length, info.st_size);
    st_check_places(s->count > first ? s->tensors + first : NULL, s->count - first, path, 8 + (int64_t)length, info.st_size);
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
            : exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -x : x;
}

/* Elements [first, first + count) of a tensor, as fp32 (int32 tensors: their bits). */
static void st_read(const StTensor *t, float *out, int64_t first, int64_t count) {
    enum { AT_ONCE = 1 << 16 };
    char buffer[4 * AT_ONCE];
    int size = st_dtype_sizes[t->dtype];
    for (int64_t done = 0; done < count; done += AT_ONCE) {
        int64_t n = min_i64(AT_ONCE, count - done);
        if (pread(t->fd, buffer, (size_t)(n * size), t->begin + (first + done) * size) != n * size)
            user_error("%s: tensor %s cannot be read: %s", t->path, t->name, strerror(errno));
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

/* Opens the weights of a Hugging Face directory and holds them against the table. 0: there are none. */
static int model_files_open(StFiles *s, const char *dir, const TensorTable *table) {
    char path[4096];
    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    char *text = read_text_file(path);
    if (text) {
        cJSON *json = cJSON_Parse(text), *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map"), *item;
        if (!cJSON_IsObject(map)) user_error("%s has no \"weight_map\"", path);
        cJSON_ArrayForEach(item, map) {
            int seen = 0;
            if (!cJSON_IsString(item) || strchr(item->valuestring, '/')) user_error("%s: \"%s\" names no file beside it", path, item->string);
            snprintf(path, sizeof path, "%s/%s", dir, item->valuestring);
            for (int i = 0; i < s->num_files; i++) seen |= !strcmp(s->paths[i], path);
            if (!seen) st_add_file(s, path);
        }
        cJSON_Delete(json);
        free(text);
    } else {
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        if (access(path, F_OK)) return 0;
        st_add_file(s, path);
    }
    for (int i = 0; i < table->num_tensors; i++) {
        const Tensor *want = &table->tensors[i];
        const StTensor *have = st_find(s, want->name);
        if (!have) user_error("%s: tensor %s is missing; the model has it", dir, want->name);
        if (have->dtype == ST_I32 || have->rows != want->rows || have->cols != want->cols)
            user_error("%s: tensor %s is %" PRId64 " x %" PRId64 " %s, the model (config.json, --vocab-size) has %" PRId64 " x %" PRId64 " floats",
                       dir, want->name, have->rows, have->cols, st_dtype_names[have->dtype], want->rows, want->cols);
    }
    for (int i = 0; i < s->count; i++) {
        const char *name = s->tensors[i].name;
        int tied_head = !strcmp(name, "lm_head.weight") && table_head_unit(table) == 0; // some files keep both
        if (!table_find(table, name) && !tied_head && !strstr(name, "rotary_emb.inv_freq"))
            user_error("%s: tensor %s is not part of the model that config.json describes", dir, name);
    }
    return 1;
}

static void fill_from_files(const Fsdp *f, const void *files, float *out, const Tensor *tensor, int64_t first, int64_t count) {
    (void)f;
    st_read(st_find((const StFiles *)files, tensor->name), out, first, count);
}
/* Master weights from files; each rank reads its own ranges. */
static void model_load(Fsdp *f, const StFiles *s) { fsdp_set_weights(f, fill_from_files, s); }

// ---------------------------------------------------------------------------
// export

static void write_all(int fd, const char *path, const void *data, size_t n, int64_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t wrote = pwrite(fd, (const char *)data + done, n - done, at + (int64_t)done);
        if (wrote <= 0) user_error("cannot write %s: %s", path, strerror(errno));
        done += (size_t)wrote;
    }
}

/* The header, and where each tensor starts in the file (num_tensors). Depends on table and dtype alone. */
static char *export_header(const TensorTable *table, StDtype dtype, int64_t *begin, int64_t *file_size) {
    size_t capacity = 256 + 256 * (size_t)table->num_tensors, used = 8;
    char *h = (char *)checked_malloc(capacity);
    int64_t data = 0;
    used += (size_t)snprintf(h + used, capacity - used, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = 0; i < table->num_tensors; i++) {
        const Tensor *t = &table->tensors[i];
        int64_t bytes = t->rows * t->cols * st_dtype_sizes[dtype];
        char shape[48];
        if (t->row->rows == DIM_ONE) snprintf(shape, sizeof shape, "%" PRId64, t->cols);
        else snprintf(shape, sizeof shape, "%" PRId64 ",%" PRId64, t->rows, t->cols);
        used += (size_t)snprintf(h + used, capacity - used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
                                 t->name, st_dtype_names[dtype], shape, data, data + bytes);
        begin[i] = data;
        data += bytes;
    }
    h[used++] = '}';
    while (used % 8) h[used++] = ' ';
    uint64_t length = used - 8;
    memcpy(h, &length, 8);
    for (int i = 0; i < table->num_tensors; i++) begin[i] += (int64_t)used;
    *file_size = (int64_t)used + data;
    return h;
}

/* All ranks have come here, and each did its part. */
static void ranks_meet(Comm *comm, const char *what) {
    int *all = (int *)checked_malloc(sizeof(int) * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, what, &comm->rank, all, sizeof(int));
    free(all);
}

/* Makes every folder of `path`, as mkdir -p does. 0 or errno. */
static int make_directories(const char *path) {
    char part[4096];
    for (size_t i = 1; i <= strlen(path) && i < sizeof part; i++) {
        if (path[i] != '/' && path[i]) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) && errno != EEXIST) return errno;
    }
    struct stat info;
    if (stat(path, &info)) return errno;
    return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

/* Checked before training starts, so that nothing is lost at its end. */
static void export_check(const char *dir) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.model"};
    char path[4096];
    struct stat info;
    int failed = make_directories(dir);
    if (failed) user_error("cannot make --export %s: %s", dir, strerror(failed));
    if (stat(dir, &info) || !S_ISDIR(info.st_mode)) user_error("--export %s is not a directory: choose another name", dir);
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        if (!access(path, F_OK)) user_error("%s exists already: choose another --export directory, or remove it first", path);
    }
    if (access(dir, W_OK)) user_error("cannot write into --export %s: %s", dir, strerror(errno));
}

/* Writes config.json, model.safetensors and, where there is one, the tokenizer's file into `dir`. */
static void model_export(Fsdp *f, const char *dir, StDtype dtype, const char *tokenizer) {
    char path[4096], temporary[4096 + 16];
    int64_t *begin = (int64_t *)checked_malloc(sizeof(int64_t) * (size_t)f->table->num_tensors), file_size;
    char *header = export_header(f->table, dtype, begin, &file_size);
    Phase before = comm_phase(f->comm, PHASE_SAVING);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    snprintf(temporary, sizeof temporary, "%s.part", path);
    if (f->comm->rank == 0) {
        int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0 || ftruncate(fd, file_size)) user_error("cannot write %s: %s", temporary, strerror(errno));
        uint64_t length;
        memcpy(&length, header, 8);
        write_all(fd, temporary, header, 8 + length, 0);
        close(fd);
    }
    ranks_meet(f->comm, "export: file made");
    int fd = open(temporary, O_WRONLY | O_CLOEXEC), size = st_dtype_sizes[dtype];
    if (fd < 0) user_error("rank %d cannot open %s (%s): --export needs a directory that all hosts share", f->comm->rank, temporary, strerror(errno));
    ShardPiece p;
    for (int i = 0; owned_next(f, &i, &p);)
        for (int64_t done = 0; done < p.count; done += 65536) {
            int64_t n = min_i64(65536, p.count - done), at = begin[p.tensor - f->table->tensors] + (p.first + done) * size;
            float from[65536];
            bf16 narrow[65536];
            device_read(f->dev, from, p.unit->master + p.at + done, sizeof(float) * (size_t)n);
            for (int64_t j = 0; j < n && dtype == ST_BF16; j++) narrow[j] = float_to_bf16(from[j]);
            write_all(fd, temporary, dtype == ST_BF16 ? (const void *)narrow : (const void *)from, (size_t)(n * size), at);
            comm_alive(f->comm);
        }
    if (fsync(fd) || close(fd)) user_error("cannot write %s: %s", temporary, strerror(errno));
    ranks_meet(f->comm, "export: shards written");
    if (f->comm->rank == 0) {
        if (rename(temporary, path)) user_error("cannot rename %s: %s", temporary, strerror(errno));
        snprintf(path, sizeof path, "%s/config.json", dir);
        FILE *out = fopen(path, "w");
        if (!out) user_error("cannot write %s: %s", path, strerror(errno));
        config_write_json(f->config, dtype == ST_BF16 ? "bfloat16" : "float32", out);
        if (fclose(out)) user_error("cannot write %s: %s", path, strerror(errno));
        char *text = tokenizer ? read_text_file(tokenizer) : NULL;
        snprintf(path, sizeof path, "%s/tokenizer.model", dir);
        if (text && (out = fopen(path, "w"))) {
            if (fputs(text, out) < 0 || fclose(out)) user_error("cannot write %s: %s", path, strerror(errno));
        }
        free(text);
    }
    ranks_meet(f->comm, "export: done");
    comm_phase(f->comm, before);
    free(header);
    free(begin);
}

#endif
