/* test_outliers.h: --outlier-window skips the update of a step whose loss or gradient norm is an outlier, and nothing
 * else; a resumed run finds the same outliers. Part of test_llama3.cu. */

// ---------------------------------------------------------------------------
// windows

static void test_outlier_windows(void) {
    static Outliers o, back;
    OutlierWindow *w = &o.windows[OUTLIER_LOSS];
    double early = 0;
    for (int i = 1; i <= 4; i++) {
        early = worst_of(early, fabs(outlier_z_score(w, 4, 1000)));
        outlier_window_add(w, 4, i);
    }
    double z = outlier_z_score(w, 4, 10), expected = (10 - 2.5) / sqrt(1.25); // of 1, 2, 3, 4
    CHECK("a value is compared with the mean and standard deviation of those before it, once the window is full",
          fabs(z / expected - 1) < 1e-15 && !early, "z-score %.9g, expected %.9g; %g while values were missing", z,
          expected, early);
    outlier_window_add(w, 4, 10);
    double later = outlier_z_score(w, 4, 12), later_expected = (12 - 4.75) / sqrt(9.6875); // of 2, 3, 4, 10
    outlier_window_add(w, 4, NAN);
    outlier_window_add(w, 4, INFINITY);
    CHECK("outliers enter the window, values that are not finite do not",
          fabs(later / later_expected - 1) < 1e-15 && outlier_z_score(w, 4, 12) == later && w->count == 4,
          "z-score %.9g, expected %.9g", later, later_expected);

    char *text;
    size_t length;
    outlier_window_add(&o.windows[OUTLIER_NORM], 4, 0.1 + 1e-17);
    outlier_window_add(&o.windows[OUTLIER_NORM], 4, 1 / 3.0);
    o.skipped = 3;
    FILE *f = text_stream_open(&text, &length);
    fprintf(f, "{\"step\":1");
    outliers_write(&o, f);
    fprintf(f, "}");
    text_stream_close(f);
    cJSON *json = cJSON_Parse(text);
    outliers_read(&back, json, "trainer.json");
    int equal = back.skipped == 3;
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        const OutlierWindow *was = &o.windows[k], *is = &back.windows[k];
        equal &= was->count == is->count && !memcmp(was->values, is->values, sizeof *is->values * (size_t)is->count);
    }
    CHECK("trainer.json gives windows back to the last bit", equal, "%.300s", text);
    outliers_continue(&back, 2);
    CHECK("a shorter window keeps the newest values",
          back.windows[OUTLIER_LOSS].count == 2 && back.windows[OUTLIER_LOSS].values[1] == 10 &&
              back.windows[OUTLIER_LOSS].values[0] == 4,
          "%g, %g", back.windows[OUTLIER_LOSS].values[0], back.windows[OUTLIER_LOSS].values[1]);
    cJSON_Delete(json);
    free(text);
}

/* Noise around 3 that rises to 5 for good: the first steps of the new level are outliers, later ones are not. */
static void test_outlier_level(void) {
    enum { N = 20, STEPS = 200, SHIFT = 100 };
    static OutlierWindow w;
    int before = 0, first = 0, after = 0;
    for (int step = 0; step < STEPS; step++) {
        double value = (step < SHIFT ? 3 : 5) + 0.02 * (double)(mix64((uint64_t)step) % 1000) / 1000;
        int is_outlier = outlier_z_score(&w, N, value) > 6;
        if (step < SHIFT) before += is_outlier;
        else if (step < SHIFT + N) first += is_outlier;
        else after += is_outlier;
        outlier_window_add(&w, N, value);
    }
    CHECK("a lasting change of level is accepted once the window has adapted", !before && first >= 1 && !after,
          "%d outliers before, %d in the %d steps of the change, %d after them", before, first, N, after);
}

// ---------------------------------------------------------------------------
// a run whose step OUTLIER_STEP has random tokens that occur nowhere else

enum {
    OUTLIER_STEP = 20,
    OUTLIER_STEPS = 24,
    OUTLIER_SAVE = 14,
    OUTLIER_SIZE = 10,
    OUTLIER_SAMPLES = 4,
    OUTLIER_T = 16
};

static void outlier_arguments(char *arguments, size_t size, const char *data, int accum, const char *more) {
    snprintf(arguments, size,
             "--model %s --data %s --seq %d --steps %d --warmup 5 --lr 1e-2 --timeout 60 --threads 1 --batch 1 --accum "
             "%d --deterministic%s",
             mesh_model(0), data, OUTLIER_T, OUTLIER_STEPS, accum, more);
}

static int64_t outlier_samples[OUTLIER_SAMPLES]; // of step OUTLIER_STEP

static void outlier_samples_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    for (int step = 1; step <= OUTLIER_STEP; step++) {
        StepBatch *batch = next_batch(&o->trainer, 0);
        if (step == OUTLIER_STEP) memcpy(outlier_samples, batch->samples, sizeof outlier_samples);
        device_record_event(&o->trainer.parallel.dev, &batch->fed);
        loader_release(&o->trainer.loader, &o->trainer.parallel.dev);
    }
    close_rank(o);
}

/* Returns the token file; `spoiled`: with random tokens from 64 to 130 in the samples of one step. */
static const char *outlier_data(int spoiled) {
    enum { COUNT = OUTLIER_SAMPLES * (OUTLIER_T - 1) };
    static char paths[2][300];
    char *path = paths[spoiled], arguments[1024];
    int64_t places[COUNT];
    int tokens[COUNT];
    if (path[0]) return path;
    snprintf(path, sizeof paths[0], "%s", make_token_file(spoiled ? "outlier.tok" : "no-outlier.tok", 3000, 64, 0));
    if (!spoiled) return path;
    outlier_arguments(arguments, sizeof arguments, path, OUTLIER_SAMPLES, "");
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, outlier_samples_body);
    end_job(j);
    for (int i = 0; i < COUNT; i++) { // not the tokens that a sample shares with its neighbors
        places[i] = outlier_samples[i / (OUTLIER_T - 1)] * OUTLIER_T + 1 + i % (OUTLIER_T - 1);
        tokens[i] = 64 + (int)(mix64((uint64_t)i) % 67);
    }
    uint32_t vocabulary = 131;
    spoil_tokens(path, places, tokens, COUNT);
    FILE *f = fopen(path, "r+b");
    fseek(f, offsetof(TokenFileHeader, vocab_size), SEEK_SET);
    fwrite(&vocabulary, sizeof vocabulary, 1, f);
    fclose(f);
    return path;
}

typedef struct {
    int outliers, first;     // skipped steps, and the first of them
    int changed;             // weights or moments changed in a skipped step
    int64_t updates, skips;  // at the end
    double lr_off;           // largest relative difference from the schedule's learning rate
    double z[OUTLIER_KINDS]; // of step OUTLIER_STEP
} OutlierRun;
static OutlierRun outlier_run; // of rank 0

/* The hash of this rank's weights and moments. */
static uint64_t hash_of_state(const Fsdp *f) {
    uint64_t h = HASH_START;
    for (int u = 0; u < f->table->num_units; u++) {
        size_t bytes = sizeof(float) * (size_t)f->units[u].state_count;
        const float *state[3] = {f->units[u].master, f->units[u].exp_avg, f->units[u].exp_avg_sq};
        for (int k = 0; k < 3; k++) {
            void *have = on_host(f->dev, state[k], bytes);
            h = hash_bytes(h, have, bytes);
            free(have);
        }
    }
    return h;
}

static void outlier_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    OutlierRun run = ZERO;
    const LearningRate rate = j->period->rate;
    for (int step = 1; step <= OUTLIER_STEPS; step++) {
        uint64_t before = hash_of_state(&trainer->parallel.fsdp);
        StepStats s = train_step(trainer, step);
        int has_changed = before != hash_of_state(&trainer->parallel.fsdp);
        run.changed += has_changed == s.skipped;
        run.outliers += s.skipped;
        if (s.skipped && !run.first) run.first = step;
        if (step == OUTLIER_STEP) memcpy(run.z, s.z_scores, sizeof run.z);
        run.lr_off = worst_of(run.lr_off, fabs(s.lr / learning_rate_at(&rate, step) - 1));
    }
    run.updates = trainer->progress.updates;
    run.skips = trainer->progress.skips;
    if (rank == 0) outlier_run = run;
    close_rank(o);
}

static OutlierRun run_outlier(int spoiled, int world, const char *more) {
    char arguments[1024];
    outlier_arguments(arguments, sizeof arguments, outlier_data(spoiled), OUTLIER_SAMPLES / world, more);
    Job *j = make_job(arguments, world, &transport_threads);
    launch(j, 0, outlier_body);
    end_job(j);
    return outlier_run;
}

static void test_outlier_step(void) {
    most_skips = 0;
    OutlierRun on = run_outlier(1, 1, " --outlier-window 10"), ranks = run_outlier(1, 2, " --outlier-window 10"),
               off = run_outlier(1, 1, ""), good = run_outlier(0, 1, " --outlier-window 10"),
               early = run_outlier(1, 1, " --outlier-window 20");
    most_skips = 10;
    CHECK("a step with random tokens is skipped, and no other; it does not count as one that is not finite",
          on.outliers == 1 && on.first == OUTLIER_STEP && !on.skips && on.updates == OUTLIER_STEPS - 1,
          "%d skipped, the first %d; z-scores %.3g and %.3g; %" PRId64 " updates", on.outliers, on.first,
          on.z[OUTLIER_LOSS], on.z[OUTLIER_NORM], on.updates);
    CHECK("a skipped step changes neither weights nor moments, every other one does; the schedule goes on",
          !on.changed && on.lr_off == 0, "%d steps otherwise, learning rates off by %.2g", on.changed, on.lr_off);
    CHECK("two ranks skip the same step, with the same z-scores",
          ranks.outliers == 1 && ranks.first == OUTLIER_STEP && !memcmp(ranks.z, on.z, sizeof on.z),
          "z-scores %.17g and %.17g, of one rank %.17g", ranks.z[OUTLIER_LOSS], ranks.z[OUTLIER_NORM],
          on.z[OUTLIER_LOSS]);
    CHECK("without --outlier-window the same step trains", !off.outliers && off.updates == OUTLIER_STEPS,
          "%d skipped, %" PRId64 " updates", off.outliers, off.updates);
    CHECK("good data has no outliers", !good.outliers, "%d skipped", good.outliers);
    CHECK("an outlier before the window is full is not skipped", early.outliers == 0 && early.updates == OUTLIER_STEPS,
          "%d skipped at step %d with a window of 20", early.outliers, OUTLIER_STEP);
}

// ---------------------------------------------------------------------------
// the whole run: what it says, what it writes, and how it resumes

/* How many samples of the spoiled step are named after "inspect the samples of", up to the end of that line */
static int names_samples(const char *said, int count) {
    int found = 0;
    const char *list = strstr(said, "inspect the samples of"), *end = list ? strchr(list, '\n') : NULL;
    for (int i = 0; i < count && end; i++) {
        char number[32];
        int length = snprintf(number, sizeof number, " %" PRId64, outlier_samples[i]), is_named = 0;
        for (const char *at = strstr(list, number); at && at < end; at = strstr(at + 1, number))
            is_named |= at[length] < '0' || at[length] > '9';
        found += is_named;
    }
    return found;
}

static char *text_under(const char *out, const char *name) {
    char path[600];
    size_t length;
    snprintf(path, sizeof path, "%s/%s", out, name);
    return read_file(path, &length);
}

static void test_outlier_resume(void) {
    static const struct {
        int world;
        const char *more;
    } layouts[] = {{1, ""}, {2, " --save-mode async --save-every 1"}, {4, " --pp 2 --dp-shard 2"}};
    char said[SAID], arguments[1024], whole[300], part[300], name[200], a[400], b[400];
    snprintf(whole, sizeof whole, "%s", scratch_path("outlier-whole"));
    outlier_arguments(arguments, sizeof arguments, outlier_data(1), OUTLIER_SAMPLES, "");
    int code = run_whole(said, 1, "%s --outlier-window %d --save-every %d --out %s", arguments, OUTLIER_SIZE,
                         OUTLIER_SAVE, whole);
    char *metrics = text_under(whole, "metrics.jsonl"), line[64];
    snprintf(line, sizeof line, "{\"step\":%d,\"outlier\":\"", OUTLIER_STEP);
    const char *outlier = metrics ? strstr(metrics, line) : NULL,
               *skipped = outlier ? strstr(outlier, "\"skipped\":true") : NULL;
    CHECK("the run names the step and its samples, and metrics.jsonl marks it",
          code == 0 && strstr(said, "(outlier 1)") && names_samples(said, OUTLIER_SAMPLES) == OUTLIER_SAMPLES &&
              outlier && skipped && !strstr(outlier + strlen(line), "\"outlier\""),
          "code %d, %d of %d samples named; %.90s", code, names_samples(said, OUTLIER_SAMPLES), OUTLIER_SAMPLES,
          outlier ? outlier : "no line in metrics.jsonl");
    char *data = text_under(whole, "run-data.js"), *skips = data ? strstr(data, "\"skips\":[") : NULL;
    int marked = skips ? (int)strcspn(skips, "1") - (int)strlen("\"skips\":[") : -1; // two characters for each step
    CHECK("run-data.js counts the outlier and marks its step",
          skips && marked == 2 * (OUTLIER_STEP - 1) && strstr(data, "\"outliers\":1,"), "%s, step %d",
          data ? "the data is there" : "no data", marked / 2 + 1);
    free(data);
    snprintf(a, sizeof a, "%s/step-%08d", whole, OUTLIER_STEPS);
    for (int i = 0; i < 3; i++) {
        int ranks = layouts[i].world, data_ranks = strstr(layouts[i].more, "--pp") ? 2 : ranks, files = 0;
        snprintf(part, sizeof part, "%s", scratch_path("outlier-part"));
        outlier_arguments(arguments, sizeof arguments, outlier_data(1), OUTLIER_SAMPLES / data_ranks, layouts[i].more);
        code = run_whole(said, ranks, "%s --outlier-window %d --resume %s/step-%08d --out %s%d", arguments,
                         OUTLIER_SIZE, whole, OUTLIER_SAVE, part, i);
        snprintf(b, sizeof b, "%s%d/step-%08d", part, i, OUTLIER_STEPS);
        int differ = files_that_differ(a, b, &files);
        snprintf(name, sizeof name, "a run that is resumed on %d ranks%s finds the outlier and has the same bytes",
                 ranks, layouts[i].more);
        CHECK(name, code == 0 && strstr(said, "(outlier 1)") && !differ && files >= 4,
              "code %d, %d of %d files differ %s", code, differ, files, code ? error_line(said) : "");
    }
    // an async save is published later: it must hold the windows of its own step
    int files = 0;
    snprintf(part, sizeof part, "%s1", scratch_path("outlier-part"));
    snprintf(b, sizeof b, "%s/step-%08d", part, OUTLIER_STEP);
    snprintf(a, sizeof a, "%s", scratch_path("outlier-sync"));
    outlier_arguments(arguments, sizeof arguments, outlier_data(1), OUTLIER_SAMPLES, "");
    code = run_whole(said, 1, "%s --outlier-window %d --save-every 1 --out %s", arguments, OUTLIER_SIZE, a);
    snprintf(a + strlen(a), 50, "/step-%08d", OUTLIER_STEP);
    int differ = files_that_differ(a, b, &files);
    CHECK("a checkpoint that is written while training continues has the windows of its step",
          code == 0 && !differ && files >= 4, "code %d, %d of %d files differ", code, differ, files);
    free(metrics);
}

/* trainer.json as versions without --z-loss and --outlier-window wrote it. Returns how many settings were removed. */
static int make_trainer_old(const char *checkpoint) {
    static const char *const newer[] = {"\"--z-loss\":\"0\",", "\"--outlier-window\":\"0\",", "\"--outlier-z\":\"6\","};
    char path[500], *text = text_under(checkpoint, "trainer.json"), *last = NULL;
    int removed = 0;
    for (int i = 0; i < 3 && text; i++) {
        char *at = strstr(text, newer[i]);
        if (!at) continue;
        memmove(at, at + strlen(newer[i]), strlen(at + strlen(newer[i])) + 1);
        removed++;
    }
    for (char *at = text ? strstr(text, ",\n\"crc32\":") : NULL; at; at = strstr(at + 1, ",\n\"crc32\":")) last = at;
    if (!last) return 0;
    snprintf(path, sizeof path, "%s/trainer.json", checkpoint);
    FILE *f = fopen(path, "w");
    fprintf(f, "%.*s,\n\"crc32\":%u}\n", (int)(last - text), text, crc32_of(text, last - text));
    fclose(f);
    free(text);
    return removed;
}

static void test_old_checkpoints(void) {
    char said[SAID], arguments[1024], out[300], checkpoint[400];
    snprintf(out, sizeof out, "%s", scratch_path("outlier-old"));
    snprintf(checkpoint, sizeof checkpoint, "%s/step-%08d", out, OUTLIER_SAVE);
    outlier_arguments(arguments, sizeof arguments, outlier_data(0), OUTLIER_SAMPLES, "");
    int code = run_whole(said, 1, "%s --save-every %d --out %s", arguments, OUTLIER_SAVE, out);
    int removed = make_trainer_old(checkpoint);
    int plain = run_whole(said, 1, "%s --resume %s --out %s-1", arguments, checkpoint, out);
    CHECK("a checkpoint without these settings and windows is resumed", code == 0 && removed == 3 && plain == 0,
          "codes %d and %d, %d settings removed: %s", code, plain, removed, plain ? error_line(said) : "");
    int with = run_whole(said, 1, "%s --resume %s --out %s-2 --outlier-window 5", arguments, checkpoint, out);
    const char *error = error_line(said);
    CHECK("--outlier-window is a setting of checkpoints", with == 1 && strstr(error, "--outlier-window 5, was 0"),
          "code %d: %s", with, error);
    with = run_whole(said, 1, "%s --resume %s --out %s-3 --z-loss 0.001", arguments, checkpoint, out);
    error = error_line(said);
    CHECK("--z-loss is a setting of checkpoints", with == 1 && strstr(error, "--z-loss 0.001, was 0"), "code %d: %s",
          with, error);
    with =
        run_whole(said, 1, "%s --resume %s --out %s-4 --outlier-window 5 --allow-changes", arguments, checkpoint, out);
    CHECK("--allow-changes turns the filter on in the middle of a run", with == 0, "code %d: %s", with,
          with ? error_line(said) : "");
}

static void test_outliers(void) {
    test_outlier_windows();
    test_outlier_level();
    test_outlier_step();
    test_outlier_resume();
    test_old_checkpoints();
}
