/* target_token_file.h: token files, their windows, and an epoch of them.
 * Input: T, V, how it is read, ranks and batch and accumulation, a byte each; then the file, or (BUILT) what stands
 * behind a good header, which is made here.
 */
#ifndef TARGET_TOKEN_FILE_H
#define TARGET_TOKEN_FILE_H

enum {
    READ_PARTIAL = 1,
    READ_BUILT = 2,
    READ_SECOND = 4,
    READ_PADDED = 8,
    BUILT_WIDE = 16,
    BUILT_MASKED = 32,
    BUILT_FITTING = 64,
    BUILT_SECOND_VERSION = 128
};

typedef struct { // a token file, understood from its length
    const uint8_t *tokens;
    int64_t count, windows;
    int version, width, masked;
    int32_t document_end; // the token that ends documents
} Witness;

static Witness witness_of(const uint8_t *bytes, size_t size, int T, int partial) {
    size_t header = bytes[8] == 1 ? 64 : 192;
    Witness w = {bytes + header, 0, 0, bytes[8], bytes[12], bytes[20] & 1, 0};
    if (w.version == 2) memcpy(&w.document_end, bytes + 64, 4);
    w.count = (int64_t)(size - header) / (w.width + w.masked);
    for (int64_t first = 0; first + (partial ? 1 : T) < w.count; first += T) w.windows++;
    return w;
}

static uint32_t witness_token(const Witness *w, int64_t i) {
    const uint8_t *p = w->tokens + i * w->width;
    return p[0] | (uint32_t)p[1] << 8 | (w->width == 4 ? (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24 : 0);
}

static int witness_counts(const Witness *w, int64_t i) {
    if (!w->masked) return 1;
    int byte = w->tokens[w->count * w->width + i];
    return w->version == 1 ? byte : byte % 2;
}

static int witness_ends_document(const Witness *w, int64_t i) {
    if (w->version == 2 && w->masked) return w->tokens[w->count * w->width + i] / 2 % 2;
    return (int32_t)witness_token(w, i) == w->document_end;
}

/* Window `index` of the file against what dataset_sample says of it. */
static void check_window(const Dataset *d, const Witness *w, int64_t index, int found, const int32_t *inputs,
                         const int32_t *targets, const int32_t *docs, const char *error) {
    int64_t first = index * d->T;
    int bad = 0, count = 0, ended = 0;
    for (int64_t i = first; i <= first + d->T && i < w->count; i++)
        bad |= witness_token(w, i) >= (uint32_t)d->vocab_size;
    EXPECT((found < 0) == bad, "window %" PRId64 ": %d targets, though its tokens are %s", index, found,
           bad ? "beyond the vocabulary" : "good");
    if (found < 0) {
        EXPECT(error[0], "window %" PRId64 " is refused without a word", index);
        return;
    }
    for (int t = 0; t < d->T; t++) {
        int64_t i = first + t;
        int32_t input = i < w->count ? (int32_t)witness_token(w, i) : 0;
        int32_t target =
            i + 1 < w->count && witness_counts(w, i + 1) ? (int32_t)witness_token(w, i + 1) : IGNORED_TARGET;
        EXPECT(inputs[t] == input && targets[t] == target,
               "window %" PRId64 ", position %d: %d -> %d, the file has %d -> %d", index, t, inputs[t], targets[t],
               input, target);
        EXPECT(docs[t] == ended, "window %" PRId64 ", position %d: %d documents ended before, counted %d", index, t,
               docs[t], ended);
        count += target != IGNORED_TARGET;
        ended += i < w->count && witness_ends_document(w, i);
    }
    EXPECT(found == count, "window %" PRId64 " has %d targets, counted %d", index, count, found);
}

static void check_windows(const Dataset *d, const Witness *files, int num_files) {
    int32_t *inputs = (int32_t *)malloc(sizeof(int32_t) * (size_t)d->T),
            *targets = (int32_t *)malloc(sizeof(int32_t) * (size_t)d->T),
            *docs = (int32_t *)malloc(sizeof(int32_t) * (size_t)d->T);
    char *raw = (char *)malloc(5 * ((size_t)d->T + 1)), error[1024] = "";
    int64_t before = 0, tokens = 0;
    int refused = 0;
    for (int f = 0; f < num_files; before += files[f].windows, tokens += files[f++].count)
        for (int64_t i = 0; i < files[f].windows;
             i += i == 20 && files[f].windows > 40 ? files[f].windows - 40 : 1) { // of many, the first and the last
            int found = dataset_sample(d, before + i, inputs, targets, docs, raw, error, sizeof error);
            check_window(d, &files[f], i, found, inputs, targets, docs, error);
            refused |= found < 0;
        }
    EXPECT(d->windows == before && d->tokens == tokens,
           "%" PRId64 " windows of %" PRId64 " tokens, expected %" PRId64 " of %" PRId64, d->windows, d->tokens, before,
           tokens);
    EXPECT(dataset_sample(d, d->windows, inputs, targets, docs, raw, error, sizeof error) == 0 &&
               targets[0] == IGNORED_TARGET,
           "the window behind the last has targets");
    free(inputs);
    free(targets);
    free(docs);
    free(raw);
    if (refused) user_error("%s", error);
}

/* Every rank's samples of one epoch: each window once (with padding: at least once). The first step is read. */
static void check_epoch(const Dataset *d, int shape, int pad) {
    Sampler s = ZERO;
    s.samples = d->windows;
    s.pieces = 1;
    s.seed = (uint64_t)shape;
    s.pad = pad;
    s.replicas = 1;
    s.local = shape >> 6 & 1;
    s.shards = 1 + (shape & 3);
    s.micro_batches = 1 + (shape >> 2 & 3);
    s.B = 1 + (shape >> 4 & 3);
    if (!pad && d->windows < sampler_global_batch(&s)) return; // the program refuses it
    int64_t steps = sampler_steps_per_epoch(&s), once = 0;
    uint8_t *seen = (uint8_t *)calloc(1, (size_t)d->windows);
    for (s.shard = 0; s.shard < s.shards; s.shard++)
        for (int64_t i = 0; i < steps * s.micro_batches * s.B; i++) {
            int64_t w = sampler_sample(&s, i / s.B / s.micro_batches, (int)(i / s.B % s.micro_batches), (int)(i % s.B));
            EXPECT(w >= 0 && w < d->windows && (pad || !seen[w]),
                   "an epoch takes window %" PRId64 " of %" PRId64 " again", w, d->windows);
            once += !seen[w];
            seen[w] = 1;
        }
    EXPECT(once == (pad ? d->windows : steps * sampler_global_batch(&s)),
           "an epoch of %" PRId64 " windows takes %" PRId64, d->windows, once);
    free(seen);
    size_t elements = (size_t)s.micro_batches * (size_t)s.B * (size_t)d->T;
    static Loader l;
    memset(&l, 0, sizeof l);
    l.data = d;
    l.sampler = s;
    l.sampler.shard = 0;
    l.samples = s.micro_batches * s.B;
    l.options.first_step = steps; // the first of the second epoch
    l.options.cp = 1;
    l.steps = 1;
    pthread_mutex_init(&l.lock, NULL);
    pthread_cond_init(&l.ready, NULL);
    char *raw = (char *)malloc(5 * ((size_t)d->T + 1));
    StepBatch *batch = &l.ring[0];
    batch->inputs = (int32_t *)malloc(sizeof(int32_t) * elements);
    batch->targets = (int32_t *)malloc(sizeof(int32_t) * elements);
    batch->samples = (int64_t *)malloc(sizeof(int64_t) * (size_t)l.samples);
    for (int64_t sample = loader_claim(&l); sample >= 0; sample = loader_claim(&l)) loader_read(&l, sample, raw);
    if (batch->error[0]) user_error("%s", batch->error);
    int64_t targets = 0;
    for (size_t i = 0; i < elements; i++) {
        EXPECT(batch->inputs[i] >= 0 && batch->inputs[i] < d->vocab_size, "a step has the token %d", batch->inputs[i]);
        EXPECT(batch->targets[i] == IGNORED_TARGET || (batch->targets[i] >= 0 && batch->targets[i] < d->vocab_size),
               "a step has the target %d", batch->targets[i]);
        targets += batch->targets[i] != IGNORED_TARGET;
    }
    EXPECT(batch->num_targets == targets, "a step has %" PRId64 " targets, counted %" PRId64, targets,
           batch->num_targets);
    free(batch->inputs);
    free(batch->targets);
    free(batch->samples);
    free(raw);
}

/* A header that belongs to the bytes, which FITTING makes tokens below V. Returns the file's size. */
static size_t build_token_file(uint8_t *file, Bytes in, int V, int how) {
    TokenFileHeader h = ZERO;
    memcpy(h.magic, TOKEN_FILE_MAGIC, 8);
    h.version = how & BUILT_SECOND_VERSION ? TOKEN_FILE_VERSION : 1;
    h.width = how & BUILT_WIDE ? 4 : 2;
    h.vocab_size = (uint32_t)V;
    h.flags = how & BUILT_MASKED ? TOKEN_FILE_MASKED : 0;
    h.count = in.left / (h.width + h.flags);
    h.document_end = in.left ? *in.at % V : NO_ID;
    size_t header = h.version == 1 ? 64 : 192;
    memcpy(file, &h, header);
    if (in.left) memcpy(file + header, in.at, in.left);
    for (uint64_t i = 0; i < h.count && how & BUILT_FITTING; i++) {
        uint8_t *token = file + header + i * h.width;
        token[0] = (uint8_t)(token[0] % V);
        memset(token + 1, 0, h.width - 1);
    }
    return header + (size_t)h.count * (h.width + h.flags);
}

static void fuzz_token_file(Bytes in) {
    static const uint8_t second[64 + 2 * 9] = "LLM3TOK1\1\0\0\0\2\0\0\0\2\0\0\0\0\0\0\0\11"; // nine tokens 0
    int T = 1 + next_byte(&in) % 24, V = 2 + next_byte(&in), how = next_byte(&in), shape = next_byte(&in);
    uint8_t *file = (uint8_t *)checked_malloc(192 + in.left);
    size_t size = how & READ_BUILT ? build_token_file(file, in, V, how) : in.left;
    if (!(how & READ_BUILT) && size) memcpy(file, in.at, size);
    give("1.tok", file, size);
    if (how & READ_SECOND) give("2.tok", second, sizeof second);
    else unlink(path_of("2.tok"));
    Dataset d = dataset_open(path_of(how & READ_SECOND ? "*.tok" : "1.tok"), T, V, how & READ_PARTIAL);
    held.taken = 1;
    d.document_end = V - 1; // of files of version 1, as a tokenizer would say
    Witness files[2] = {witness_of(file, size, T, how & READ_PARTIAL),
                        witness_of(second, sizeof second, T, how & READ_PARTIAL)};
    for (int f = 0; f < 2; f++)
        if (files[f].version == 1) files[f].document_end = d.document_end;
    EXPECT(d.num_files == (how & READ_SECOND ? 2 : 1), "%d files", d.num_files);
    check_windows(&d, files, d.num_files);
    check_epoch(&d, shape, how & READ_PADDED);
    dataset_close(&d);
    free(file);
}

static const char *const token_file_words[] = {"LLM3TOK1", NULL};

#endif
