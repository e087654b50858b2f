/* test_run_page.h: run-data.js of histories that no short test run has: 100,000 steps, losses that are not finite,
 * hostile names, broken lines. Part of test_llama3.cu. What run.html draws of it: run_page.sh. */

/* A step's line of metrics.jsonl; `loss` as text. */
static void feed_step(History *h, int64_t step, const char *loss, const char *more) {
    char text[600];
    snprintf(text, sizeof text,
             "{\"step\":%" PRId64 ",\"loss\":%s,\"grad_norm\":%.9g%s,\"lr\":0.0003,\"tokens\":%" PRId64
             ",\"seconds\":0.5,\"tokens_per_s\":%d,\"matmul_share\":0.4,\"mfu\":0.651,\"wait_s\":0.2,"
             "\"data_wait_s\":0.01,\"wait_axis_s\":"
             "{\"fsdp\":0.1,\"dp_replicate\":0.0,\"tp\":0.07,\"cp\":0.0,\"pp\":0.0,\"world\":0.03}}",
             step, loss, 1.0 + (double)(step % 7), more, step * 100, (int)(1000 + step % 50));
    cJSON *line = cJSON_Parse(text);
    history_add_line(h, line, INT64_MAX);
    cJSON_Delete(line);
}

/* The script run-data.js of a history, which the caller frees. */
static char *data_of_history(const History *h, const Job *j, size_t *length) {
    static Trainer w;
    RankFigures ranks[2] = {{1, 0.25, 1000, 1 << 20}, {1, 0.5, 1000, 1 << 20}};
    RunData d = ZERO;
    char *text;
    dry_run_open(&w, j, 0, NULL);
    d.options = j->options;
    d.run = &j->run;
    d.comm = &w.parallel.comm;
    d.planned = &w.parallel.dev;
    d.history = (History *)(uintptr_t)h;
    d.ranks = ranks;
    d.steps = 1;
    d.started = seconds_now();
    FILE *f = text_stream_open(&text, length);
    run_data_print(f, &d);
    text_stream_close(f);
    trainer_close(&w);
    return text;
}

static Job *page_job(const char *more) {
    char arguments[400];
    snprintf(arguments, sizeof arguments, "--model tiny --data %s --seq 16 --batch 1 --out %s/page --steps 100000 %s",
             make_token_file("page.tok", 3000, 64, 0), scratch_dir, more);
    return make_job(arguments, 2, &transport_threads);
}

/* Whether the values of a curve begin with this text. */
static int data_has(const char *data, const char *curve, const char *values) {
    char key[400];
    snprintf(key, sizeof key, "\"%s\":{\"last\":", curve);
    const char *at = strstr(data, key), *begin = at ? strstr(at, "\"values\":[") : NULL;
    return begin && !strncmp(begin + strlen("\"values\":["), values, strlen(values));
}

static int64_t history_total(const History *h, int kind) {
    int64_t total = 0;
    for (int i = 0; i < h->count; i++) total += h->buckets[i].counts[kind];
    return total;
}

/* Is it one assignment of JSON in ASCII, without a character that may act? */
static int data_is_whole(const char *data) {
    static const char begin[] = "var run_data = ";
    if (strncmp(data, begin, strlen(begin)) || strstr(data, "nan") || strchr(data, '<')) return 0;
    for (const char *p = data; *p; p++)
        if ((*p < 0x20 && *p != '\n') || *p == 0x7F) return 0;
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithOpts(data + strlen(begin), &end, 0);
    int is_whole = json && !strcmp(end, ";\n");
    cJSON_Delete(json);
    return is_whole;
}

/* The curve must reach as high as a spike of one step in 100,000. */
static void test_long_history(void) {
    enum { STEPS = 100000, SPIKE = 61400 };
    History *h = history_open();
    char loss[32];
    double start = seconds_now();
    size_t length;
    for (int64_t step = 1; step <= STEPS; step++) {
        snprintf(loss, sizeof loss, "%.9g", step == SPIKE ? 77.0 : 2 + 5 * exp(-(double)step / 20000));
        feed_step(h, step, loss, "");
        if (step % 10 == 0) history_mark_save(h, step);
    }
    double fed = seconds_now() - start;
    Job *j = page_job("");
    char *data = data_of_history(h, j, &length);
    double spike = 0;
    for (int i = 0; i < h->count; i++) spike = fmax(spike, h->buckets[i].curves[CURVE_LOSS].most);
    CHECK("run-data.js of 100,000 steps is below 1 MB, and a spike of one step survives",
          length < 1000000 && spike == 77 && strstr(data, ",77]") && data_is_whole(data) &&
              history_total(h, COUNT_SAVES) == STEPS / 10,
          "%zu bytes, %d points per curve, %.1f us per step with parsing, highest loss %g", length, h->count,
          1e6 * fed / (double)STEPS, spike);
    start = seconds_now();
    for (int i = 0; i < 10; i++) {
        free(data);
        data = data_of_history(h, j, &length);
    }
    int64_t sum = history_total(h, COUNT_STEPS);
    CHECK("no step is lost or counted twice when buckets are merged", sum == STEPS && h->stride == 256,
          "%" PRId64 " steps in %d buckets; printing takes %.1f ms", sum, h->count, 100 * (seconds_now() - start));
    free(data);
    free(h);
    end_job(j);
}

static void test_odd_histories(void) {
    size_t length;
    History *h = history_open();
    Job *j = page_job("");
    feed_step(h, 1, "3.25", "");
    char *one = data_of_history(h, j, &length);
    CHECK("run-data.js of one step without validation",
          data_is_whole(one) && data_has(one, "loss", "3.25]") && data_has(one, "val_loss", "null]") &&
              strstr(one, "\"val_loss\":{\"last\":null,\"best\":null,\"best_step\":0,"),
          "%zu bytes", length);
    CHECK("the data say which share is of the measured rate and which is MFU",
          data_has(one, "matmul_share", "0.4]") && data_has(one, "mfu", "0.651]"), "%zu bytes", length);
    feed_step(h, 2, "null", ",\"skipped\":true");
    feed_step(h, 3, "1e400", ",\"skipped\":true");
    feed_step(h, 4, "3.5", "");
    cJSON *outlier = cJSON_Parse("{\"step\":5,\"outlier\":\"loss\",\"z\":9,\"loss\":77,\"grad_norm\":1}");
    history_add_line(h, outlier, 5);
    cJSON_Delete(outlier);
    int64_t outliers = h->outliers, unreadable = h->unreadable;
    char *odd = data_of_history(h, j, &length);
    CHECK("losses that are not finite are gaps, and skipped updates are counted",
          data_is_whole(odd) && data_has(odd, "loss", "3.25,null,null,3.5]") && strstr(odd, "\"skips\":[0,1,1,0]") &&
              h->best[CURVE_LOSS] == 3.25,
          "%" PRId64 " skips, lowest loss %g", history_total(h, COUNT_SKIPS), h->best[CURVE_LOSS]);
    history_merge(h);
    history_merge(h);
    char *merged = data_of_history(h, j, &length);
    CHECK("losses that are not finite do not enter the mean and the range of several steps",
          data_is_whole(merged) && data_has(merged, "loss", "[3.375,3.25,3.5]]") && strstr(merged, "\"skips\":[2]"),
          "%" PRId64 " losses of %" PRId64 " steps", h->buckets[0].curves[CURVE_LOSS].count,
          h->buckets[0].counts[COUNT_STEPS]);
    free(merged);
    CHECK("the line of an outlier is no step: the step's own line follows it", outliers == 1 && !unreadable,
          "%" PRId64 " outliers, %" PRId64 " lines left out, last step %" PRId64, outliers, unreadable, h->last_step);
    free(one);
    free(odd);
    free(h);
    h = history_open();
    feed_step(h, 1, "null", ",\"skipped\":true");
    odd = data_of_history(h, j, &length);
    CHECK("a run without a finite loss has a page", data_is_whole(odd) && data_has(odd, "loss", "null]"), "%zu bytes",
          length);
    free(odd);
    free(h);
    end_job(j);
}

/* What a resumed run reads back may end in the middle of a line, or have lines of something else. */
static void test_broken_lines(void) {
    static const char *const lines[] = {
        "{\"step\":1,\"loss\":5,\"seconds\":1}",
        "{\"step\":2,\"loss\":4,\"seconds\":1}",
        "",
        "garbage",
        "[1,2]",
        "7",
        "{\"step\":1e300,\"loss\":1}",
        "{\"step\":-4,\"loss\":1}",
        "{\"step\":2.5,\"loss\":1}",
        "{\"loss\":1}",
        "{\"step\":3}",
        "{\"step\":99,\"loss\":1}",
        "{\"step\":\"3\",\"loss\":1}",
        "{\"step\":3,\"loss\":3,\"seconds\":\"x\",\"wait_axis_s\":[1],\"saved\":1e99,\"resumed\":true}",
        "{\"step\":2,\"val_loss\":4.5,\"val_tokens\":9}",
        "{\"step\":2,\"tasks\":8,\"accuracy\":0.25}",
        "{\"step\":4,\"lo"};
    History *h = history_open();
    const char *path = scratch_path("broken.jsonl");
    FILE *f = fopen(path, "w");
    for (int i = 0; i < (int)(sizeof lines / sizeof *lines); i++) fprintf(f, i ? "\n%s" : "%s", lines[i]);
    fclose(f);
    history_read(h, path, 10);
    CHECK("broken and foreign lines of metrics.jsonl are left out and counted",
          h->unreadable == 12 && h->last_step == 3 && h->count == 3 && h->best[CURVE_LOSS] == 3 &&
              h->best[CURVE_VALIDATION] == 4.5 && history_total(h, COUNT_RESUMES) == 1 &&
              history_total(h, COUNT_SAVES) == 1 && history_total(h, COUNT_STEPS) == 3,
          "%" PRId64 " lines of 17 left out, last step %" PRId64 ", %" PRId64 " resume", h->unreadable, h->last_step,
          history_total(h, COUNT_RESUMES));
    free(h);
}

/* Names and outputs with the end of a script, quotes, escape sequences and broken UTF-8 must not act. */
static void test_hostile_texts(void) {
    static const char hostile[] = "</script><script>alert(1)</script>\"'\\\x1b[31m\x7f\xc0\xaf\xff\xe2\x80\xae"
                                  "\xe2\x80\xa8\xf0\x9f\xa6\x99";
    static const char escaped[] = "\\u003c/script>\\u003cscript>alert(1)\\u003c/script>\\u0022'\\u005c\\u001b[31m"
                                  "\\u007f\\ufffd\\ufffd\\ufffd\\u202e\\u2028\\ud83e\\udd99";
    char *text, path[300];
    size_t length;
    History *h = history_open();
    Job *j = page_job("");
    j->run.model = hostile;
    j->run.after_save = "true";
    mkdir(scratch_path("page"), 0777);
    snprintf(path, sizeof path, "%s/page/after-save.log", scratch_dir);
    FILE *f = fopen(path, "w");
    fprintf(f, "%s%c\n", hostile, 0);
    fclose(f);
    feed_step(h, 1, "3.25", "");
    text = data_of_history(h, j, &length);
    CHECK("names and outputs with markup and control characters are escaped and do not act",
          data_is_whole(text) && count_of(text, escaped) == 2 && strstr(text, "\\udd99\\u0000\\u000a\""), "%zu bytes",
          length);
    unlink(path);
    free(text);
    free(h);
    end_job(j);
}

/* Rewrites the data as often as possible until it is killed. */
static void rewrite_data(RunData *d) {
    for (;;) {
        d->next_write = 0;
        d->write_seconds++; // other data each time
        run_data_write(d);
    }
}

static void test_killed_writer(void) {
    enum { KILLS = 60 };
    static Trainer w;
    char path[300], page[300];
    int whole = 0, status;
    RankFigures ranks[2] = {{1, 0.25, 1000, 1 << 20}, {1, 0.5, 1000, 1 << 20}};
    RunData d = ZERO;
    Job *j = page_job("");
    mkdir(scratch_path("page"), 0777);
    snprintf(path, sizeof path, "%s/page/run-data.js", scratch_dir);
    snprintf(page, sizeof page, "%s/page/run.html", scratch_dir);
    unlink(page);
    dry_run_open(&w, j, 0, NULL);
    run_data_open(&d, j->options, &j->run, &w.parallel.comm, &w.parallel.dev, 0);
    CHECK("run.html is there when a run starts", !access(page, F_OK), "%zu bytes", strlen(run_html));
    d.ranks = ranks;
    d.steps = 1;
    for (int64_t step = 1; step <= 300; step++) feed_step(d.history, step, "3.25", "");
    run_data_write(&d);
    unlink(path);
    unlink(page);
    run_data_write(&d);
    int too_soon = !access(path, F_OK);
    d.has_ended = 1;
    run_data_write(&d);
    CHECK("run-data.js is rewritten at most every few seconds, and at the end",
          !too_soon && !access(path, F_OK) && d.next_write - seconds_now() > PAGE_SECONDS - 1, "next time in %.1f s",
          d.next_write - seconds_now());
    CHECK("run.html is written again where it is missing", !access(page, F_OK), "%zu bytes", strlen(run_html));
    for (int i = 0; i < KILLS; i++) {
        pid_t child = fork();
        if (!child) rewrite_data(&d);
        usleep((useconds_t)(1000 + mix64((uint64_t)i) % 20000));
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        size_t length = 0;
        char *data = read_regular_file(path, &length);
        whole += data && data_is_whole(data);
        free(data);
    }
    CHECK("a run that is killed while it writes run-data.js leaves a complete file", whole == KILLS,
          "%d of %d files are complete", whole, KILLS);
    free(d.history);
    trainer_close(&w);
    end_job(j);
}

static void test_run_page(void) {
    test_long_history();
    test_odd_histories();
    test_broken_lines();
    test_hostile_texts();
    test_killed_writer();
}
