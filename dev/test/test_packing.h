/* test_packing.h: conversations that pack.h packs into windows are whole, and train a model as they do one per window.
 * Part of test_llama3.cu.
 */
#include "../../programs/tokens/pack.h" // defines: Packer, packer_add

// ---------------------------------------------------------------------------
// every conversation, uncut

/* Conversations of random tokens, each followed by the token that ends it. */
typedef struct {
    int64_t num, tokens, targets;
    int64_t *start; // (num + 1) where each begins
    int32_t *ids;   // (tokens)
    uint8_t *mask;  // (tokens) bits of TokenByte
} Talks;

/* Conversations of lengths[i] tokens, or, if `lengths` is NULL, of 1 to `longest`. */
static Talks make_talks(const int *lengths, int64_t num, int longest, uint64_t seed) {
    Talks talks = {num, 0, 0, new_array(int64_t, num + 1), NULL, NULL};
    for (int64_t i = 0; i < num; i++) {
        talks.start[i] = talks.tokens;
        talks.tokens += lengths ? lengths[i] : 1 + (int64_t)(mix64(seed + (uint64_t)i) % (uint64_t)longest);
    }
    talks.start[num] = talks.tokens;
    talks.ids = new_array(int32_t, talks.tokens);
    talks.mask = new_array(uint8_t, talks.tokens);
    for (int64_t i = 0; i < num; i++)
        for (int64_t at = talks.start[i]; at < talks.start[i + 1]; at++) {
            uint64_t random = mix64(seed + 7 * (uint64_t)at);
            int is_last = at + 1 == talks.start[i + 1];
            talks.ids[at] = is_last ? DOCUMENT_END : 3 + (int32_t)(random % 37);
            talks.mask[at] = at > talks.start[i] && random % 5 < 3 ? TOKEN_IS_TARGET : 0;
            if (is_last) talks.mask[at] = TOKEN_ENDS_DOCUMENT;
            talks.targets += talks.mask[at] & TOKEN_IS_TARGET;
        }
    return talks;
}

static void free_talks(Talks *talks) {
    free(talks->start);
    free(talks->ids);
    free(talks->mask);
}

/* Writes conversations to a file beside make_document_file's tokenizer. `alone`: each gets a window of its own. Returns
 * the number of windows. */
static int64_t write_talks(const char *path, const Talks *talks, int T, int alone, int wide) {
    void (*last_words)(int) = process_end.last_words;
    Tokenizer *t = tokenizer_open(scratch_path("documents/tokenizer.model"));
    TokenWriter writer = ZERO;
    Packer packer;
    writer_open(&writer, path, t, 1);
    writer.width = wide ? 4 : 2;
    writer.window = (uint32_t)T;
    packer_open(&packer, &writer, T);
    for (int64_t i = 0; i < talks->num; i++) {
        int64_t at = talks->start[i];
        packer_add(&packer, talks->ids + at, talks->mask + at, (size_t)(talks->start[i + 1] - at));
        if (alone) packer_flush(&packer);
    }
    packer_finish(&packer);
    packer_close(&packer);
    writer_close(&writer);
    tokenizer_close(t);
    process_end.last_words = last_words;
    return (int64_t)(writer.count - 1) / T;
}

typedef struct {
    int64_t found, cut, wrong, ends, targets;
} Reading; // wrong: documents that are no conversation; ends: documents of one token, as padding is

static int compare_to_talk(const Talks *talks, int64_t i, const int32_t *ids, const uint8_t *mask, int64_t n) {
    size_t bytes = sizeof *ids * (size_t)n;
    return talks->start[i + 1] - talks->start[i] == n && !memcmp(talks->ids + talks->start[i], ids, bytes) &&
           !memcmp(talks->mask + talks->start[i], mask, (size_t)n);
}

/* Reads the file by itself: documents end with DOCUMENT_END, and each must be a conversation that was not found yet. */
static Reading read_talks(const char *path, const Talks *talks, int T) {
    Reading r = ZERO;
    size_t bytes;
    char *file = tokenizer_read_file(path, &bytes), *found = (char *)checked_malloc((size_t)talks->num);
    TokenFileHeader h;
    memcpy(&h, file, sizeof h);
    int64_t count = (int64_t)h.count, first = 0;
    int32_t *ids = new_array(int32_t, count);
    const uint8_t *mask = (const uint8_t *)file + sizeof h + count * h.width;
    for (int64_t at = 0; at < count; at++) {
        memcpy(&ids[at], file + sizeof h + at * h.width, h.width);
        r.targets += mask[at] & TOKEN_IS_TARGET;
        r.wrong += (ids[at] == DOCUMENT_END) != !!(mask[at] & TOKEN_ENDS_DOCUMENT);
        if (ids[at] != DOCUMENT_END) continue;
        int64_t n = at + 1 - first, i = 0;
        while (n > 1 && i < talks->num && (found[i] || !compare_to_talk(talks, i, ids + first, mask + first, n))) i++;
        if (n == 1) r.ends++;
        else if (i == talks->num) r.wrong++;
        else {
            found[i] = 1;
            r.found++;
            r.cut += n > T ? first % T != 0 : first / T != at / T;
        }
        first = at + 1;
    }
    r.wrong += first != count;
    free(ids);
    free(found);
    free(file);
    return r;
}

/* The windows that best fit decreasing needs, by comparing each conversation with each window. */
static int64_t windows_by_comparing(const Talks *talks, int T) {
    int64_t *room = new_array(int64_t, talks->tokens), windows = 0, num = 0; // room: of the windows that may be shared
    int64_t *length_count = new_array(int64_t, talks->tokens + 1);
    for (int64_t i = 0; i < talks->num; i++) length_count[talks->start[i + 1] - talks->start[i]]++;
    for (int64_t n = talks->tokens; n > 0; n--)
        for (int64_t i = 0; i < length_count[n]; i++) {
            int64_t best = -1;
            for (int64_t w = 0; w < num && n <= T; w++)
                if (room[w] >= n && (best < 0 || room[w] < room[best])) best = w;
            if (best < 0) {
                best = num++;
                room[best] = (n + T - 1) / T * T;
                windows += room[best] / T;
            }
            room[best] -= n;
        }
    free(room);
    free(length_count);
    return windows;
}

static void check_packing(const char *what, Talks talks, int T, int wide) {
    char name[160];
    const char *path = scratch_path("documents/packed.tok");
    int64_t empty = 0, windows = write_talks(path, &talks, T, 0, wide), least = windows_by_comparing(&talks, T);
    for (int64_t i = 0; i < talks.num; i++) empty += talks.start[i + 1] - talks.start[i] == 1;
    Reading r = read_talks(path, &talks, T);
    int64_t padding = windows * T + 1 - talks.tokens; // one token more, for the last window's last target
    snprintf(name, sizeof name, "packing %s: each conversation is there once, whole, with its targets", what);
    CHECK(name,
          r.found == talks.num - empty && r.ends == padding + empty && !r.cut && !r.wrong && r.targets == talks.targets,
          "%" PRId64 " of %" PRId64 ", %" PRId64 " cut, %" PRId64 " wrong, %" PRId64 " of %" PRId64 " targets",
          r.found + empty, talks.num, r.cut, r.wrong, r.targets, talks.targets);
    snprintf(name, sizeof name, "packing %s: as many windows as best fit decreasing needs", what);
    CHECK(name, windows == least, "%" PRId64 " and %" PRId64 " windows of %d, %.2f %% padding", windows, least, T,
          100.0 * (double)padding / (double)(windows * T + 1));
    free_talks(&talks);
}

static void test_packing_whole(void) {
    static const int one[] = {20}, full[] = {64}, sizes[] = {64, 63, 1, 62, 2, 65, 63, 64, 129, 1, 128, 32, 33, 31};
    static const int several[] = {40, 30, 24, 34, 20, 44, 64}, huge[] = {40, PACK_TOKENS + 100, 30, 3};
    check_packing("one conversation", make_talks(one, 1, 0, 1), 64, 0);
    check_packing("one of a window's length", make_talks(full, 1, 0, 2), 64, 0);
    check_packing("lengths next to the window's", make_talks(sizes, 14, 0, 3), 64, 1);
    check_packing("what fits exactly", make_talks(several, 7, 0, 4), 64, 0);
    check_packing("500 of random lengths", make_talks(NULL, 500, 100, 5), 100, 0);
    check_packing("500, a third of them too long", make_talks(NULL, 500, 96, 6), 64, 0);
    check_packing("one longer than what is placed at a time", make_talks(huge, 4, 0, 11), 64, 0);
    check_packing("into windows of 2", make_talks(NULL, 100, 3, 7), 2, 0);
}

/* More tokens than are placed at a time. */
static void test_packing_in_parts(void) {
    enum { T = 1024 };
    Talks talks = make_talks(NULL, 4000, T, 8);
    const char *path = scratch_path("documents/parts.tok");
    int64_t windows = write_talks(path, &talks, T, 0, 0);
    double padding = 1 - (double)talks.tokens / (double)(windows * T);
    Reading r = read_talks(path, &talks, T);
    CHECK("packing in parts: each conversation is there once, whole, with its targets",
          talks.tokens > 3 * PACK_TOKENS / 2 && r.found + r.ends == talks.num + windows * T + 1 - talks.tokens &&
              !r.cut && !r.wrong && r.targets == talks.targets,
          "%" PRId64 " tokens, %d at a time; %" PRId64 " cut, %" PRId64 " wrong, %" PRId64 " of %" PRId64 " targets",
          talks.tokens, PACK_TOKENS, r.cut, r.wrong, r.targets, talks.targets);
    CHECK("packing in parts leaves little room", padding < 0.02, "%.2f %% padding < 2 %%", 100 * padding);
    free_talks(&talks);
}

// ---------------------------------------------------------------------------
// training on them

/* Three steps that train on all conversations each: gradients, losses and weights of packed ones, of one per window. */
static void compare_packed(const char *model, const char *more) {
    enum { T = 48, NUM = 24 };
    char arguments[1280], name[200], path[300], data[2][260];
    double bound = sizeof(floatX) == 4 ? 1e-6 : 2e-2, loss_bound = sizeof(floatX) == 4 ? 1e-6 : 1e-3;
    Talks talks = make_talks(NULL, NUM, T, 9);
    int64_t windows[2];
    OneRank alone = ZERO;
    snprintf(path, sizeof path, "%s/%s", FIXTURES, model);
    for (int i = 0; i < 2; i++) {
        snprintf(data[i], sizeof data[i], "%s", scratch_path(i ? "documents/packed.tok" : "documents/alone.tok"));
        windows[i] = write_talks(data[i], &talks, T, !i, 0);
        snprintf(arguments, sizeof arguments,
                 "--model %s --data %s --seq %d --batch %d --doc-mask --steps 3 --warmup 0 --lr 1e-3%s", path, data[i],
                 T, (int)windows[i], more);
        if (i) collect(arguments, 0, 1, &transport_threads);
        else alone = collect_one_rank(arguments);
    }
    Difference d = difference_from(&alone, path);
    snprintf(name, sizeof name, "%s%s: packed conversations have the losses of one per window", model, more);
    CHECK(name, d.loss <= loss_bound && windows[0] == NUM && windows[1] < NUM * 3 / 4,
          "three steps off by %.2g <= %.0e; %" PRId64 " windows instead of %" PRId64, d.loss, loss_bound, windows[1],
          windows[0]);
    snprintf(name, sizeof name, "%s%s: packed conversations have the gradients of one per window", model, more);
    CHECK(name, d.error <= bound && d.norm <= bound, "worst tensor %.2g, norm %.2g, <= %.0e", d.error, d.norm, bound);
    free(alone.grads);
    free_talks(&talks);
}

// ---------------------------------------------------------------------------
// use

static void open_job(void *arguments) { make_job((const char *)arguments, 1, &transport_threads); }

static void test_packed_use(void) {
    char arguments[512];
    const char *path = scratch_path("documents/packed.tok");
    Talks talks = make_talks(NULL, 60, 48, 10);
    int64_t windows = write_talks(path, &talks, 48, 0, 0);
    int64_t shared = 0;
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 64 --batch 1 --doc-mask", FIXTURES, path);
    expect_user_error("packed conversations with another --seq are refused", open_job, arguments,
                      "windows of 48 tokens, --seq is 64: use --seq 48");
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 48 --batch 1", FIXTURES, path);
    expect_user_error("packed conversations without --doc-mask are refused", open_job, arguments, "add --doc-mask");
    for (int partial = 0; partial < 2; partial++) {
        Dataset d = dataset_open(path, 48, 131, partial);
        shared += d.windows == windows;
        dataset_close(&d);
    }
    CHECK("training and evaluation see every packed window", shared == 2, "%" PRId64 " windows", windows);
    free_talks(&talks);
}

static void test_packing(void) {
    make_document_file("tokenizer.tok", 100, 40, 0); // for its tokenizer
    test_packing_whole();
    test_packing_in_parts();
    compare_packed("odd", "");
    compare_packed("llama31", "");
    if (!is_short) compare_packed("tied", "");
    test_packed_use();
}
