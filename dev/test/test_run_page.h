/* test_run_page.h: run.html of histories that no short test run has: 100,000 steps, losses that are not finite, hostile
 * names, broken lines. Part of test_llama3.cu. */

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

/* The page of a history, which the caller frees. */
static char *page_of_history(const History *h, const Job *j, size_t *length) {
    static Trainer w;
    RankFigures ranks[2] = {{1, 0.25, 1000, 1 << 20}, {1, 0.5, 1000, 1 << 20}};
    RunPage p = ZERO;
    char *text;
    dry_run_open(&w, j, 0, NULL);
    p.opt = &j->opt;
    p.parallel = &w.parallel;
    p.planned = &w.parallel.dev;
    p.history = (History *)(uintptr_t)h;
    p.ranks = ranks;
    p.steps = 1;
    p.started = seconds_now();
    FILE *f = text_stream_open(&text, length);
    run_page_draw(f, &p);
    text_stream_close(f);
    trainer_close(&w);
    return text;
}

static Job *page_job(const char *more) {
    char arguments[400];
    snprintf(arguments, sizeof arguments, "--model tiny --plan --world 2 --out %s/page --steps 100000 %s", scratch_dir,
             more);
    return make_job(arguments, 2, &transport_threads);
}

/* Every value of a curve in the page's data, as text after "name":[ */
static int data_has(const char *page, const char *curve, const char *values) {
    char key[400];
    snprintf(key, sizeof key, "\"%s\":[%s", curve, values);
    return strstr(page, key) != NULL;
}

/* The path of the curve must reach as high as a spike of one step in 100,000. */
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
    char *page = page_of_history(h, j, &length);
    double spike = 0;
    for (int i = 0; i < h->count; i++) spike = fmax(spike, h->buckets[i].curves[CURVE_LOSS].most);
    CHECK("run.html of 100,000 steps is below 1 MB, and a spike of one step survives",
          length < 1000000 && spike == 77 && strstr(page, ",77]") && strstr(page, "</html>") && h->saves == STEPS / 10,
          "%zu bytes, %d points per curve, %.1f us per step with parsing, highest loss %g", length, h->count,
          1e6 * fed / (double)STEPS, spike);
    start = seconds_now();
    for (int i = 0; i < 10; i++) {
        free(page);
        page = page_of_history(h, j, &length);
    }
    int64_t sum = 0;
    for (int i = 0; i < h->count; i++) sum += h->buckets[i].steps;
    CHECK("no step is lost or counted twice when buckets are merged", sum == STEPS && h->stride == 256,
          "%" PRId64 " steps in %d buckets; drawing takes %.1f ms", sum, h->count, 100 * (seconds_now() - start));
    free(page);
    free(h);
    end_job(j);
}

static void test_odd_histories(void) {
    size_t length;
    History *h = history_open();
    Job *j = page_job("");
    feed_step(h, 1, "3.25", "");
    char *one = page_of_history(h, j, &length);
    CHECK("run.html of one step without validation",
          data_has(one, "loss", "3.25]") && !strstr(one, "validation loss") && !strstr(one, "best marked") &&
              !strstr(one, "nan") && !strstr(one, "inf"),
          "%zu bytes", length);
    CHECK("the page says which share is of the measured rate and which is MFU",
          strstr(one, "tokens/s; 40\u00A0% of the matmul rate; MFU 65.1\u00A0%"), "%zu bytes", length);
    feed_step(h, 2, "null", ",\"skipped\":true");
    feed_step(h, 3, "1e400", ",\"skipped\":true");
    feed_step(h, 4, "3.5", "");
    cJSON *outlier = cJSON_Parse("{\"step\":5,\"outlier\":\"loss\",\"z\":9,\"loss\":77,\"grad_norm\":1}");
    history_add_line(h, outlier, 5);
    cJSON_Delete(outlier);
    int64_t outliers = h->outliers, unreadable = h->unreadable;
    char *odd = page_of_history(h, j, &length);
    CHECK("losses that are not finite are gaps, and skipped updates are counted",
          data_has(odd, "loss", "3.25,null,null,3.5]") && strstr(odd, "update skipped (2)") && !strstr(odd, "nan") &&
              !strstr(odd, "inf"), "%" PRId64 " skips, lowest loss %g", h->skips, h->best[CURVE_LOSS]);
    CHECK("the line of an outlier is no step: the step's own line follows it", outliers == 1 && !unreadable,
          "%" PRId64 " outliers, %" PRId64 " lines left out, last step %" PRId64, outliers, unreadable, h->last_step);
    free(one);
    free(odd);
    free(h);
    h = history_open();
    feed_step(h, 1, "null", ",\"skipped\":true");
    odd = page_of_history(h, j, &length);
    CHECK("a run without a finite loss has a page", strstr(odd, "No finite loss so far") && !strstr(odd, "nan"),
          "%zu bytes", length);
    free(odd);
    free(h);
    end_job(j);
}

/* What a resumed run reads back may end in the middle of a line, or have lines of something else. */
static void test_broken_lines(void) {
    static const char *const lines[] = {
        "{\"step\":1,\"loss\":5,\"seconds\":1}", "{\"step\":2,\"loss\":4,\"seconds\":1}", "", "garbage", "[1,2]", "7",
        "{\"step\":1e300,\"loss\":1}", "{\"step\":-4,\"loss\":1}", "{\"step\":2.5,\"loss\":1}", "{\"loss\":1}",
        "{\"step\":3}", "{\"step\":99,\"loss\":1}", "{\"step\":\"3\",\"loss\":1}",
        "{\"step\":3,\"loss\":3,\"seconds\":\"x\",\"wait_axis_s\":[1],\"saved\":1e99,\"resumed\":true}",
        "{\"step\":2,\"val_loss\":4.5,\"val_tokens\":9}",
        "{\"step\":2,\"tasks\":8,\"accuracy\":0.25}", "{\"step\":4,\"lo"};
    History *h = history_open();
    const char *path = scratch_path("broken.jsonl");
    FILE *f = fopen(path, "w");
    for (int i = 0; i < (int)(sizeof lines / sizeof *lines); i++) fprintf(f, i ? "\n%s" : "%s", lines[i]);
    fclose(f);
    history_read(h, path, 10);
    CHECK("broken and foreign lines of metrics.jsonl are left out and counted",
          h->unreadable == 12 && h->last_step == 3 && h->count == 3 && h->best[CURVE_LOSS] == 3 &&
              h->best[CURVE_VALIDATION] == 4.5 && h->last[CURVE_ACCURACY] == 0.25 && h->resumes == 1 && h->saves == 1,
          "%" PRId64 " lines of 17 left out, last step %" PRId64 ", %" PRId64 " resume", h->unreadable, h->last_step,
          h->resumes);
    free(h);
}

/* Names and outputs with markup, quotes, escape sequences and broken UTF-8 must not act. */
static void test_hostile_texts(void) {
    static const char hostile[] = "<script>alert(1)</script>\"'><img src=x onerror=y>&amp;\x1b[31m\x7f\xc0\xaf\xff"
                                  "\xe2\x80\xae";
    char *text, path[300];
    size_t length;
    History *h = history_open();
    Job *j = page_job("");
    j->opt.model = hostile;
    j->opt.given[option_find("model") - option_rows] = 1;
    j->opt.after_save = "true";
    mkdir(scratch_path("page"), 0777);
    snprintf(path, sizeof path, "%s/page/after-save.log", scratch_dir);
    FILE *f = fopen(path, "w");
    for (int i = 0; i < 200; i++) fprintf(f, "%s</pre>\n", hostile);
    fclose(f);
    feed_step(h, 1, "3.25", "");
    text = page_of_history(h, j, &length);
    int acts = strstr(text, "<script>alert") || strstr(text, "<img") || count_of(text, "</pre>") != 2 ||
               strchr(text, '\x1b') || strchr(text, '\x7f') || strchr(text, '\xff') || strstr(text, "\xe2\x80\xae") ||
               count_of(text, "<script") != 2;
    CHECK("names and outputs with markup and control characters are shown and do not act",
          !acts && strstr(text, "&#60;script&#62;alert(1)") && strstr(text, "&#9243;[31m") && strstr(text, "&#9249;"),
          "%zu bytes", length);
    unlink(path);
    free(text);
    free(h);
    end_job(j);
}

/* Rewrites the page as often as possible until it is killed. */
static void rewrite_page(RunPage *p) {
    for (;;) {
        p->next_write = 0;
        run_page_write(p);
    }
}

static void test_killed_writer(void) {
    enum { KILLS = 60 };
    static Trainer w;
    char path[300];
    int whole = 0, status;
    RankFigures ranks[2] = {{1, 0.25, 1000, 1 << 20}, {1, 0.5, 1000, 1 << 20}};
    RunPage p = ZERO;
    Job *j = page_job("");
    mkdir(scratch_path("page"), 0777);
    snprintf(path, sizeof path, "%s/page/run.html", scratch_dir);
    dry_run_open(&w, j, 0, NULL);
    run_page_open(&p, &j->opt, &w.parallel, &w.parallel.dev, 0);
    p.ranks = ranks;
    p.steps = 1;
    for (int64_t step = 1; step <= 300; step++) feed_step(p.history, step, "3.25", "");
    run_page_write(&p);
    unlink(path);
    run_page_write(&p);
    int too_soon = !access(path, F_OK);
    p.has_ended = 1;
    run_page_write(&p);
    CHECK("run.html is rewritten at most every few seconds, and at the end",
          !too_soon && !access(path, F_OK) && p.next_write - seconds_now() > PAGE_SECONDS - 1, "next page in %.1f s",
          p.next_write - seconds_now());
    for (int i = 0; i < KILLS; i++) {
        pid_t child = fork();
        if (!child) rewrite_page(&p);
        usleep((useconds_t)(1000 + mix64((uint64_t)i) % 20000));
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        size_t length = 0;
        char *page = read_regular_file(path, &length);
        whole += page && !strncmp(page, "<!doctype html>", 15) && !strcmp(page + length - 8, "</html>\n");
        free(page);
    }
    CHECK("a run that is killed while it writes run.html leaves a complete page", whole == KILLS,
          "%d of %d pages are complete", whole, KILLS);
    free(p.history);
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
