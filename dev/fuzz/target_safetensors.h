/* target_safetensors.h: weights, one file or several with an index.
 * Input: f FILE, h HEADER 0 DATA, t (q: of a model whose blocks are in 8 bits) and lines `NAME DTYPE DIM,DIM…` of
 * tensors one after the other; F, H, T, Q: of a tied model. Input of `index`: i INDEX (of part-1.safetensors and
 * part-2.safetensors), or I INDEX: of a tied model.
 */
#ifndef TARGET_SAFETENSORS_H
#define TARGET_SAFETENSORS_H

static const Llama3Config smallest = {"smallest",   2, 2, 1, 1, 1, 2, 1, 8, 0, 1e-5f, 10000, 1, 1, 4, 8192, 1, 1,
                                      BASE_TRAINED, 0, 0, 0, 0};

/* A file of tensors [first, first + count), all zero. */
static void give_weights(const char *name, const TensorTable *all, int first, int count) {
    TensorTable t = *all;
    OutputFiles out = ZERO;
    char file[4096] = "";
    t.tensors += first;
    t.num_tensors = count;
    output_files_add(&out, &t, 0, t.num_tensors, "part", STATE_MASTER, STATE_MASTER);
    memcpy(file, out.files[0].header, (size_t)out.files[0].header_bytes);
    give(name, file, (size_t)out.files[0].bytes);
    output_files_close(&out);
}

/* Every tensor is read, and is what lies in the file. */
static void check_weights(const StFiles *s, const uint8_t *file, size_t size) {
    for (int i = 0; i < s->count; i++) {
        const StTensor *t = &s->tensors[i];
        int width = st_dtype_sizes[t->dtype];
        EXPECT(t->elements >= 0 && t->elements == t->rows * t->cols && t->begin >= 8 &&
                   t->begin + t->elements * width <= (int64_t)size,
               "tensor %s: %" PRId64 " x %" PRId64 " elements from byte %" PRId64 " of %zu", t->name, t->rows, t->cols,
               t->begin, size);
        float *read = (float *)malloc(sizeof(float) * (size_t)t->elements);
        st_read(t, read, 0, t->elements);
        for (int64_t e = 0; e < t->elements; e++) {
            uint32_t bits, want = 0;
            memcpy(&bits, read + e, 4);
            if (t->dtype == ST_I8) {
                float scale, value;
                memcpy(&scale, file + t->scales->begin + e / INT8_BLOCK * 4, 4);
                value = (float)(int8_t)file[t->begin + e] * scale;
                memcpy(&want, &value, 4);
                EXPECT(bits == want || (isnan(read[e]) && isnan(value)),
                       "tensor %s, element %" PRId64 ": %g, its byte and its scale make %g", t->name, e, read[e],
                       value);
                continue;
            }
            for (int b = 0; b < width; b++)
                want |= (uint32_t)file[t->begin + e * width + b] << 8 * (b + (t->dtype == ST_BF16 ? 2 : 0));
            EXPECT(bits == want || t->dtype == ST_F16, "tensor %s, element %" PRId64 ": %08x, the file has %08x",
                   t->name, e, bits, want);
        }
        free(read);
    }
}

/* The file of the tensors that are listed, its data as long as they need it (up to a limit). Returns its size. */
static size_t build_safetensors(uint8_t *file, size_t room, Bytes lines) {
    char *list = text_of(lines), *p = (char *)file + 8, *state = NULL;
    double at = 0;
    p += sprintf(p, "{\"__metadata__\":{}");
    for (char *line = strtok_r(list, "\n", &state); line; line = strtok_r(NULL, "\n", &state)) {
        char name[64] = "", dtype[8] = "", dims[64] = "";
        sscanf(line, "%63s %7s %63s", name, dtype, dims);
        double bytes = 4;
        if (strstr(dtype, "16")) bytes = 2;
        else if (strstr(dtype, "8")) bytes = 1;
        for (char *dim = dims; *dim; dim += strcspn(dim, ","), dim += *dim == ',') bytes *= atof(dim);
        p += sprintf(p, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%.17g,%.17g]}", name, dtype, dims,
                     at, at + bytes);
        at += bytes;
    }
    *p++ = '}';
    uint64_t length = (uint64_t)(p - (char *)file) - 8;
    memcpy(file, &length, 8);
    size_t data = at >= 0 && at <= (double)(room - 8 - length) ? (size_t)at : 0;
    for (size_t i = 0; i < data; i++) p[i] = (char)(i * 37);
    free(list);
    return 8 + length + data;
}

/* The weights of a directory are those of the table. */
static void check_model_weights(const char *dir, const TensorTable *table, BaseKind base) {
    static StFiles s;
    EXPECT(model_weights_open(&s, path_of(dir), table, base), "the weights were not found");
    held.taken = 1;
    for (int i = 0; i < table->num_tensors; i++) {
        const StTensor *t = st_find(&s, table->tensors[i].name);
        EXPECT(t && t->rows == table->tensors[i].rows && t->cols == table->tensors[i].cols,
               "tensor %s was taken as it is not", table->tensors[i].name);
    }
    st_close(&s);
}

static void fuzz_safetensors(Bytes in) {
    static StFiles s;
    TensorTable table;
    Llama3Config c = smallest;
    int kind = next_byte(&in);
    c.tied = kind < 'a';
    if ((kind | 32) == 'q') c.base = BASE_INT8;
    table_open(&table, &c, 0, &WHOLE_MODEL);
    size_t room = 100 * in.left + 4096, at = 0; // a line grows by less than 100 bytes
    uint8_t *file = (uint8_t *)checked_malloc(room);
    if ((kind | 32) == 't' || (kind | 32) == 'q') {
        at = build_safetensors(file, room, in);
        in.left = 0;
    } else if ((kind | 32) == 'h') {
        Bytes header = up_to_zero(&in);
        uint64_t length = header.left;
        at = sizeof length;
        memcpy(file, &length, at);
        if (length) {
            memcpy(file + at, header.at, length);
            at += length;
        }
    }
    if (in.left) {
        memcpy(file + at, in.at, in.left);
        at += in.left;
    }
    give("weights/model.safetensors", file, at);
    memset(&s, 0, sizeof s);
    st_add_file(&s, path_of("weights/model.safetensors")); // by itself, whatever its tensors
    st_find_scales(&s);
    held.taken = 1;
    check_weights(&s, file, at);
    st_close(&s);
    free(file);
    check_model_weights("weights", &table, c.base);
    table_close(&table);
}

static void fuzz_index(Bytes in) {
    TensorTable table;
    Llama3Config c = smallest;
    c.tied = next_byte(&in) < 'a';
    table_open(&table, &c, 0, &WHOLE_MODEL);
    give("parts/model.safetensors.index.json", in.at, in.left);
    give_weights("parts/part-1.safetensors", &table, 0, 5);
    give_weights("parts/part-2.safetensors", &table, 5, table.num_tensors - 5);
    check_model_weights("parts", &table, c.base);
    table_close(&table);
}

static const char *const safetensors_words[] = {"\"__metadata__\":{\"format\":\"pt\"}",
                                                "\"dtype\":\"F32\"",
                                                "\"dtype\":\"BF16\"",
                                                "\"dtype\":\"F16\"",
                                                "\"dtype\":\"I32\"",
                                                "\"dtype\":\"I8\"",
                                                ".scale",
                                                "\"shape\":[]",
                                                "\"shape\":[2,0]",
                                                "\"data_offsets\":[0,0]",
                                                "\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}",
                                                "\"rotary_emb.inv_freq\"",
                                                "\"lm_head.weight\"",
                                                "\"model.norm.weight\"",
                                                NULL};

static const char *const index_words[] = {"\"metadata\":{}",
                                          "\"weight_map\":{}",
                                          "\"a\":\"part-1.safetensors\"",
                                          "\"part-1.safetensors\"",
                                          "\"part-2.safetensors\"",
                                          "\"../part-2.safetensors\"",
                                          NULL};

#endif
