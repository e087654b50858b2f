/* test_stored.h: a model written with its adapters merged into it, or in int8: any layout writes one rank's files,
 * which have the loss of what they were made of. Part of test_convert_llama3.cu. */

static double loss_said(const char *said) {
    const char *at = strstr(said, "\"loss\":");
    return at ? atof(at + 7) : NAN;
}

/* A model with adapters next to it, and the two merged, have the same loss on any layout. */
static void test_adapters_merged(const char *model, const char *adapters, const char *data) {
    char said[SAID], name[300], theirs[340] = "";
    const char *merged = strdup(scratch_path("adapted-merged"));
    double beside[3], alone;
    int code, files;
    for (int i = 0; i < 3; i++) {
        const char *const hows[] = {"", " --sharding no_shard", " --tp 2"}, *how = hows[i];
        code = run_whole(said, 1 + (i > 0), "--model %s --adapters %s --eval %s --seq 32 --batch 4%s", model, adapters,
                         data, how);
        beside[i] = code ? NAN : loss_said(said);
    }
    static const char *const mergers[] = {"one rank", "two ranks", "two tp ranks", "two stages"};
    static const char *const merger_options[] = {"", "", " --tp 2", " --pp 2"};
    for (int i = 0; i < 4; i++) { // each writes the same file
        char again[320];
        snprintf(again, sizeof again, "%s-%d", merged, i);
        code = run_whole(said, 1 + (i > 0), "--model %s --adapters %s --export %s --merge%s", model, adapters, again,
                         merger_options[i]);
        int same = files_that_differ(again, i ? theirs : again, &files);
        if (i == 0) snprintf(theirs, sizeof theirs, "%s", again);
        snprintf(name, sizeof name, "adapters: --merge by %s", mergers[i]);
        CHECK(name, !code && !same && files == 2, "%d of %d files differ from one rank's; %s", same, files,
              code ? error_line(said) : "");
    }
    code = run_whole(said, 2, "--model %s --eval %s --seq 32 --batch 4", theirs, data);
    alone = code ? NAN : loss_said(said);
    CHECK("adapters: the merged model has their loss, on any layout",
          fabs(alone / beside[0] - 1) < (FLOATX == DTYPE_F32 ? 1e-5 : 1e-3) && fabs(beside[1] / beside[0] - 1) < 1e-4 &&
              fabs(beside[2] / beside[0] - 1) < 1e-3,
          "%.8f beside, %.8f and %.8f on two ranks, %.8f merged", beside[0], beside[1], beside[2], alone);
    code = run_whole(said, 1, "--model %s --eval %s --seq 32 --batch 4", model, data);
    CHECK("adapters: and it is another one than the base's", fabs(loss_said(said) / beside[0] - 1) > 1e-3,
          "%.8f without them, %.8f with", loss_said(said), beside[0]);
}

// ---------------------------------------------------------------------------
// int8 files

/* A model, and the int8 files that --export --dtype made of it. */
typedef struct {
    int odd;          // odd: the model whose rows do not divide into blocks; else the tied one
    int all;          // --dtype int8:all
    const char *name; // of the model, in the names of the checks
    const char *dtype, *model, *data;
    char stored[400]; // the files that one rank wrote
    char loss[64];    // that they have
} StoredModel;

typedef struct {
    int world, tp;
    const char *options;
} StoredLayout;

static const StoredLayout stored_layouts[] = {{1, 1, ""},
                                              {2, 1, ""},
                                              {3, 1, ""},
                                              {2, 2, " --tp 2"},
                                              {4, 2, " --tp 2 --pp 2"},
                                              {4, 1, " --dp-replicate 2 --sharding shard_grad_op"},
                                              {3, 1, " --sharding no_shard"},
                                              {2, 1, " --wrap size:60000"}};
enum { STORED_LAYOUTS = sizeof stored_layouts / sizeof *stored_layouts };

/* Every layout writes the same files. */
static void test_stored_files(StoredModel *m, int code) {
    char said[SAID], out[400], name[300];
    int files;
    file_bytes = m->odd ? 5000000000ll : 17000; // the tied model's files are cut, also between bytes and scales
    for (int l = 0; l < STORED_LAYOUTS; l++) {
        const StoredLayout *layout = &stored_layouts[l];
        snprintf(out, sizeof out, "%s-%d-%d", m->model, m->all, l);
        if (l == 0) snprintf(m->stored, sizeof m->stored, "%s", out);
        code |= run_whole(said, layout->world, "--model %s --export %s --dtype %s%s", m->model, out, m->dtype,
                          layout->options);
        int differ = files_that_differ(m->stored, out, &files);
        snprintf(name, sizeof name, "%s, --export --dtype %s by %d ranks%s: one rank's files", m->name, m->dtype,
                 layout->world, layout->options);
        CHECK(name, !code && !differ && (m->odd ? files == 2 : files > 4), "%d of %d files differ; %s", differ, files,
              code ? error_line(said) : "");
    }
    file_bytes = 5000000000ll;
}

typedef struct {
    int64_t compared, wrong, other_wrong, apart; // int8 elements; elements of other dtypes; tensors in two files
} BlockComparison;

/* Compares a tensor of the int8 files with the blocks that its whole weights give. */
static void compare_stored_tensor(BlockComparison *found, const StTensor *whole, const StTensor *have, int64_t n) {
    float *want = (float *)checked_malloc(sizeof(float) * (size_t)n),
          *read = (float *)checked_malloc(sizeof(float) * (size_t)n),
          *scales = (float *)checked_malloc(sizeof(float) * (size_t)int8_blocks(n));
    int8_t *bytes = (int8_t *)checked_malloc((size_t)n), block[INT8_BLOCK];
    st_read(whole, want, 0, n);
    st_read(have, read, 0, n);
    if (have->dtype == ST_I8) {
        st_read_quantized(have, bytes, scales, 0, n);
        found->apart += have->file != have->scales->file;
    }
    for (int64_t at = 0; at < n; at += INT8_BLOCK) {
        int64_t m = min_i64(INT8_BLOCK, n - at);
        float step = quantize_int8_block(block, want + at, m);
        for (int64_t e = 0; e < m && have->dtype == ST_I8; e++) {
            found->compared++;
            found->wrong +=
                bytes[at + e] != block[e] || scales[at / INT8_BLOCK] != step || read[at + e] != (float)block[e] * step;
        }
        for (int64_t e = 0; e < m && have->dtype != ST_I8; e++)
            found->other_wrong += read[at + e] != to_float(from_float(want[at + e]));
    }
    float part = 0;
    if (n > 70) { // reading can start within a block
        st_read(have, &part, 67, 1);
        found->wrong += part != read[67];
    }
    free(want);
    free(read);
    free(scales);
    free(bytes);
}

static void test_stored_blocks(const StoredModel *m) {
    char name[300];
    Llama3Config c = config_load(m->stored);
    TensorTable table;
    StFiles whole, blocks;
    BlockComparison found = ZERO;
    table_open(&table, &c, 0, &WHOLE_MODEL);
    int opened = model_weights_open(&whole, m->model, &table, BASE_TRAINED) +
                 model_weights_open(&blocks, m->stored, &table, c.base);
    for (int i = 0; i < table.num_tensors && opened == 2; i++) {
        const Tensor *t = &table.tensors[i];
        compare_stored_tensor(&found, st_find(&whole, t->name), st_find(&blocks, t->name), t->rows * t->cols);
    }
    st_close(&whole);
    st_close(&blocks);
    table_close(&table);
    snprintf(name, sizeof name, "%s, --dtype %s: bytes and scales of the whole tensors' blocks", m->name, m->dtype);
    CHECK(name, opened == 2 && found.compared > 0 && !found.wrong && !found.other_wrong && (found.apart > 0) == !m->odd,
          "%" PRId64 " of %" PRId64 " wrong, %" PRId64 " of the others; %" PRId64
          " tensors and their scales in two files",
          found.wrong, found.compared, found.other_wrong, found.apart);
}

/* A model quantized as it is read, with --base, has the same loss as one that is read from int8 files. */
static void test_stored_losses(StoredModel *m) {
    char said[SAID], name[300], of_model[64] = "";
    for (int l = 0; l < STORED_LAYOUTS; l++) {
        const StoredLayout *layout = &stored_layouts[l];
        if (m->odd && layout->tp > 1) continue; // it would cut blocks
        int code = run_whole(said, layout->world, "--model %s --base %s --eval %s --seq 32 --batch 4%s", m->model,
                             m->dtype, m->data, layout->options);
        snprintf(of_model, sizeof of_model, "%.9g", code ? 0 : loss_said(said));
        code |= run_whole(said, layout->world, "--model %s --eval %s --seq 32 --batch 4%s", m->stored, m->data,
                          layout->options);
        snprintf(m->loss, sizeof m->loss, "%.9g", code ? 1 : loss_said(said));
        snprintf(name, sizeof name, "%s, %s: evaluated by %d ranks%s as the model that they are made of", m->name,
                 m->dtype, layout->world, layout->options);
        CHECK(name, !code && !strcmp(of_model, m->loss), "loss %s, of the model %s; %s", m->loss, of_model,
              code ? error_line(said) : "");
    }
}

/* Adapters train on int8 files as on the model; the files dequantized are a model of the same loss. */
static void test_stored_use(const StoredModel *m) {
    char said[SAID], out[2][400], name[300], path[500];
    int code = 0;
    for (int stored = 0; stored < 2; stored++) {
        snprintf(out[stored], sizeof out[stored], "%s-adapters-%d-%d", m->model, m->all, stored);
        code |= run_whole(said, 2,
                          "--model %s --base %s --lora-rank 3 --data %s --seq 32 --batch 2 --steps 2 --warmup 0 "
                          "--lr 1e-2 --out %s%s",
                          stored ? m->stored : m->model, m->dtype, m->data, out[stored],
                          m->all ? " --sharding no_shard" : "");
    }
    for (int stored = 0; stored < 2; stored++) strcat(out[stored], "/latest/adapter_model.safetensors");
    snprintf(name, sizeof name, "%s, %s: adapters train on the files as on the model", m->name, m->dtype);
    CHECK(name, !code && files_equal(out[0], out[1]), "%s", code ? error_line(said) : "compared byte by byte");
    snprintf(path, sizeof path, "%s-dequantized-%d", m->model, m->all);
    code = run_whole(said, 2, "--model %s --export %s", m->stored, path) ||
           run_whole(said, 1, "--model %s --eval %s --seq 32 --batch 4", path, m->data);
    double error = code ? 1 : fabs(loss_said(said) / atof(m->loss) - 1);
    snprintf(name, sizeof name, "%s, %s: dequantized, they are a model of the same loss", m->name, m->dtype);
    CHECK(name, !code && error < (FLOATX == DTYPE_F32 ? 1e-6 : 1e-3), "off by %.2g; %s", error,
          code ? error_line(said) : "");
}

static void test_stored_int8(void) {
    char said[SAID];
    const char *data = strdup(make_token_file("adapted.tok", 6000, 64, 7));
    for (int i = 0; i < (is_short ? 1 : 4); i++) {
        StoredModel m = ZERO;
        int code = 0;
        m.odd = i % 2;
        m.all = i / 2;
        m.name = m.odd ? "odd" : "tied";
        m.dtype = m.all ? "int8:all" : "int8";
        m.data = data;
        m.model = strdup(scratch_path(m.odd ? "stored-odd/latest" : "stored/latest"));
        if (!m.all) // else it is there
            code = run_whole(said, 1, "--model %s --data %s --seq 32 --batch 4 --steps 2 --warmup 0 --lr 1e-2 --out %s",
                             m.odd ? mesh_model(0) : adapters_model(1), data,
                             scratch_path(m.odd ? "stored-odd" : "stored"));
        test_stored_files(&m, code);
        test_stored_blocks(&m);
        test_stored_losses(&m);
        test_stored_use(&m);
    }
}

/* A model and adapters that were trained beside it. */
static void test_merged(void) {
    char said[SAID];
    const char *model = strdup(scratch_path("adapted-base/latest")),
               *adapters = strdup(scratch_path("adapted-run/latest"));
    const char *data = strdup(make_token_file("adapted.tok", 6000, 64, 7));
    int code = run_whole(said, 1, "--model %s --data %s --seq 32 --batch 4 --steps 3 --warmup 0 --lr 1e-2 --out %s",
                         adapters_model(0), data, scratch_path("adapted-base"));
    code |= run_whole(said, 1,
                      "--model %s --data %s --base int8 --lora-rank 5 --seq 32 --steps 4 --warmup 0 --lr 1e-2 "
                      "--threads 1 --batch 1 --accum 8 --out %s",
                      model, data, scratch_path("adapted-run"));
    CHECK("a model and adapters beside it have been trained", code == 0, "code %d %s", code,
          code ? error_line(said) : "");
    test_adapters_merged(model, adapters, data);
}

static void test_stored(void) {
    test_merged();
    test_stored_int8();
}
