/* test_mixture.h: mixtures of token files: what a list of entries means, the share of each source after any number of
 * samples, the same samples on every layout and across resumes, and what --audit finds. Part of test_llama3.cu. */

// ---------------------------------------------------------------------------
// the list of --data

/* Two sources of 20 and 5 windows of 16 tokens, and names that hold a comma or a colon. */
static void make_sources(void) {
    make_token_file("web-1.tok", 12 * 16 + 1, 64, 0);
    make_token_file("web-2.tok", 8 * 16 + 1, 64, 3);
    make_token_file("code.tok", 5 * 16 + 1, 64, 0);
    make_token_file("a,b.tok", 100, 64, 0);
    make_token_file("a:5.tok", 100, 64, 0);
    make_token_file("a:5", 100, 64, 0);
    make_token_file("short.tok", 16, 64, 0);
}

/* The list in `text`, where @ stands for the scratch directory. */
static const char *in_scratch(const char *text) {
    static char lists[4][1024];
    static int next;
    char *list = lists[next++ % 4];
    size_t used = 0;
    for (const char *at = text; *at; at++)
        used += (size_t)snprintf(list + used, sizeof lists[0] - used, "%.*s", *at == '@' ? 200 : 1,
                                 *at == '@' ? scratch_dir : at);
    return list;
}

static void open_dataset(void *text) {
    Dataset d = dataset_open((const char *)text, 16, 64, 0);
    dataset_close(&d);
}

static void test_lists_read(void) {
    static const struct {
        const char *list;
        int files, sources;
        const char *shares;
    } cases[] = {{"@/web-*.tok", 2, 1, ""},
                 {"@/web-*.tok,@/code.tok", 3, 2, ""},
                 {"@/web-*.tok:0.7,@/code.tok:0.3", 3, 2, "0.7, 0.3"},
                 {"@/web-*.tok:7e2,@/code.tok:300", 3, 2, "0.7, 0.3"},
                 {"@/web-1.tok:1,@/web-2.tok:1,@/code.tok:1", 3, 3, "0.333334, 0.333333, 0.333333"},
                 {"@/web-*.tok:0.5", 2, 1, ""}, // one source alone needs no mixture
                 {"@/a,b.tok", 1, 1, ""},
                 {"@/a:5.tok", 1, 1, ""},
                 {"@/a:5", 1, 1, ""},
                 {"@/a:5:2,@/a:5.tok:3,@/a?b.tok:5", 3, 3, "0.2, 0.3, 0.5"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[160], shares[200];
        Dataset d = dataset_open(in_scratch(cases[i].list), 16, 64, 0);
        dataset_shares(&d, shares, sizeof shares);
        snprintf(name, sizeof name, "--data %s: files, sources and shares", cases[i].list);
        CHECK(name,
              d.num_files == cases[i].files && d.num_sources == cases[i].sources && !strcmp(shares, cases[i].shares),
              "%d files (expected %d), %d sources (%d), shares '%s' ('%s')", d.num_files, cases[i].files, d.num_sources,
              cases[i].sources, shares, cases[i].shares);
        dataset_close(&d);
    }
}

static void test_lists_refused(void) {
    static const struct {
        const char *list, *message;
    } cases[] = {{"@/web-*.tok:0.7,@/none-*.tok:0.3", "no token file at "},
                 {"@/web-*.tok:0,@/code.tok:1", "the weight after the last colon is '0', expected a number above 0"},
                 {"@/web-*.tok:-1,@/code.tok:1", "the weight after the last colon is '-1'"},
                 {"@/web-*.tok:nan,@/code.tok:1", "the weight after the last colon is 'nan'"},
                 {"@/web-*.tok:inf,@/code.tok:1", "the weight after the last colon is 'inf'"},
                 {"@/web-*.tok:0x1,@/code.tok:1", "the weight after the last colon is '0x1'"},
                 {"@/web-*.tok:1e16,@/code.tok:1", "the weight after the last colon is '1e16'"},
                 {"@/web-*.tok:,@/code.tok:1", "the weight after the last colon is ''"},
                 {"@/web-*.tok:0.7x,@/code.tok:1", "the weight after the last colon is '0.7x'"},
                 {"@/web-*.tok:1,,@/code.tok:1", "found an empty entry"},
                 {"@/web-*.tok:1,", "found an empty entry"},
                 {":1,@/code.tok:1", "a weight without files"},
                 {"@/web-*.tok:1,@/code.tok", "1 of 2 entries have a weight: give all of them one, or none"},
                 {"@/web-*.tok:1,@/web-1.tok:1", "expected each token file once"},
                 {"@/web-1.tok,@/web-1.tok", "expected each token file once"},
                 {"@/web-*.tok:1000000,@/code.tok:0.1", "its share is less than one sample in 1000000"},
                 {"@/web-*.tok:1,@/short.tok:1",
                  "short.tok has no file with the 17 tokens that a sample of --seq 16 needs, but 16"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char said[SAID], name[160];
        int code = child_says(open_dataset, (void *)(uintptr_t)in_scratch(cases[i].list), said, sizeof said);
        const char *error = error_line(said);
        snprintf(name, sizeof name, "--data %s is refused", cases[i].list);
        CHECK(name, code == 1 && strstr(error, cases[i].message), "code %d: %s", code, error);
    }
}

// ---------------------------------------------------------------------------
// the schedule

/* Follows the schedule over two cycles. Returns the largest distance between a source's samples and its share of the
 * samples so far; `wrong` counts samples whose index or count differ from those that were counted one by one. */
static double follow_schedule(const Mixture *mixture, int64_t *wrong) {
    int64_t counts[MOST_SOURCES] = {0};
    double worst = 0;
    for (int64_t n = 0; n < 2 * (int64_t)mixture->cycle; n++) {
        MixtureSample sample = mixture_sample(mixture, n);
        *wrong += sample.index != counts[sample.source]++;
        for (int k = 0; k < mixture->num_sources; k++) {
            worst = fmax(worst, fabs((double)counts[k] - (double)mixture->quota[k] * (double)(n + 1) / mixture->cycle));
            *wrong += mixture->cycle < 2000 && mixture_count(mixture, k, n + 1) != counts[k];
        }
    }
    for (int k = 0; k < mixture->num_sources; k++) *wrong += counts[k] != 2 * mixture->quota[k];
    return worst;
}

static void test_mixture_schedules(void) {
    static const struct {
        int count;
        int units[MOST_SOURCES];
    } cases[] = {{2, {7, 3}},
                 {2, {1, 999}},
                 {3, {1, 1, 1}},
                 {4, {5, 3, 1, 1}},
                 {5, {90, 4, 3, 2, 1}},
                 {6, {251, 251, 251, 1, 1, 245}},
                 {3, {500000, 333333, 166667}},
                 {8, {400001, 199999, 150000, 100003, 99997, 30011, 19988, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Mixture mixture;
        int64_t wrong = 0;
        char name[120];
        mixture_open(&mixture, cases[i].units, cases[i].count);
        double worst = follow_schedule(&mixture, &wrong);
        snprintf(name, sizeof name, "a mixture of %d sources with a cycle of %d: each within one of its share",
                 mixture.num_sources, mixture.cycle);
        CHECK(name, worst < 1 && !wrong, "at most %.6f samples off (bound 1), %d wrong counts", worst, (int)wrong);
        mixture_close(&mixture);
    }
    Mixture mixture;
    int units[MOST_SOURCES], worst_of = 0;
    double worst = 0;
    int64_t wrong = 0;
    for (int c = 0; c < 200; c++) { // random shares
        int count = 2 + c % 40;
        for (int k = 0; k < count; k++) units[k] = 1 + (int)(mix64((uint64_t)(c * 64 + k)) % 30);
        mixture_open(&mixture, units, count);
        double off = follow_schedule(&mixture, &wrong);
        if (off > worst) worst_of = count;
        worst = fmax(worst, off);
        mixture_close(&mixture);
    }
    CHECK("200 mixtures of 2 to 41 sources: each source within one of its share, after any number of samples",
          worst < 1 && !wrong, "at most %.6f samples off (with %d sources, bound 1), %d wrong counts", worst, worst_of,
          (int)wrong);
    mixture_open(&mixture, cases[6].units, 3);
    MixtureSample late = mixture_sample(&mixture, (int64_t)1 << 40);
    CHECK("sample 2^40 of a mixture is found without the ones before it",
          late.index == mixture_count(&mixture, late.source, (int64_t)1 << 40), "source %d, index %" PRId64,
          late.source, late.index);
    mixture_close(&mixture);
}

// ---------------------------------------------------------------------------
// the sampler

/* A source's windows in the first `n` samples: each one once an epoch, in another order in the next. */
static void check_source_epochs(const Dataset *d, const Sampler *s, int source, int64_t n) {
    int counts[64] = {0}, orders[8][64], uneven = 0, same = 0;
    const DataSource *of = &d->sources[source];
    int64_t taken = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t w = sampler_sample(s, i, 0, 0) - of->first_window;
        if (w < 0 || w >= of->windows) continue;
        counts[w]++;
        if (taken < 8 * of->windows) orders[taken / of->windows][taken % of->windows] = (int)w;
        taken++;
        if (taken % of->windows == 0)
            for (int64_t k = 0; k < of->windows; k++) uneven += counts[k] != taken / of->windows;
    }
    int epochs = (int)min_i64(8, taken / of->windows);
    for (int e = 1; e < epochs; e++) same += !memcmp(orders[e], orders[e - 1], sizeof(int) * (size_t)of->windows);
    CHECK(source ? "the smaller source of a mixture: every window once in each of its epochs, in another order"
                 : "the larger source of a mixture: every window once in each of its epochs, in another order",
          epochs > 2 && !uneven && same < epochs / 2, "%d epochs, %d windows not once, %d orders like the one before",
          epochs, uneven, same);
}

/* Layouts deal out the samples of one rank. */
static void check_mixture_layouts(const Dataset *d, const Sampler *one) {
    static const Sampler layouts[] = {{25, 9, 0, 3, 1, 0, 0, 2, 2, 0, 0, 0, 0, NULL, 1},
                                      {25, 9, 0, 2, 2, 0, 0, 2, 2, 1, 0, 0, 0, NULL, 1},
                                      {25, 9, 0, 3, 2, 0, 0, 3, 1, 0, 5, 0, 90, NULL, 1},
                                      {25, 9, 0, 1, 4, 0, 0, 1, 3, 1, 0, 0, 0, NULL, 1}};
    int wrong = 0, repeats = 0, unsaid = 0;
    for (int i = 0; i < 4; i++) {
        Sampler s = layouts[i];
        s.mixed = d;
        int64_t global_batch = sampler_global_batch(&s), at = s.start_sample;
        for (int64_t step = s.start_step; step < s.start_step + 20; step++) {
            int seen[25] = {0}, repeated = 0;
            for (s.replica = 0; s.replica < s.replicas; s.replica++)
                for (int outer = 0; outer < (s.local ? s.shards : s.micro_batches); outer++)
                    for (int inner = 0; inner < (s.local ? s.micro_batches : s.shards); inner++)
                        for (int b = 0; b < s.B; b++, at++) {
                            s.shard = s.local ? outer : inner;
                            int64_t window = sampler_sample(&s, step, s.local ? inner : outer, b);
                            wrong += window != sampler_sample(one, at, 0, 0);
                            repeated |= seen[window]++;
                        }
            repeats += repeated;
            unsaid += repeated && !sampler_may_repeat(&s, step);
        }
        wrong += at != s.start_sample + 20 * global_batch;
    }
    CHECK("four layouts deal out the samples of a mixture in one rank's order", wrong == 0, "%d of them elsewhere",
          wrong);
    CHECK("steps that repeat a window of a mixture are known beforehand", repeats > 0 && !unsaid,
          "%d steps repeat one, %d of them unannounced", repeats, unsaid);
}

static void test_mixture_sampler(void) {
    Dataset d = dataset_open(in_scratch("@/web-*.tok:0.7,@/code.tok:0.3"), 16, 64, 0);
    Sampler one = {25, 9, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, &d, 1};
    for (int k = 0; k < 2; k++) check_source_epochs(&d, &one, k, 300);
    check_mixture_layouts(&d, &one);
    Dataset other = dataset_open(in_scratch("@/web-*.tok:0.6,@/code.tok:0.4"), 16, 64, 0);
    Sampler another = one;
    another.mixed = &other;
    CHECK("other weights have another fingerprint, and a sampler of them too",
          d.fingerprint != other.fingerprint && sampler_fingerprint(&one) != sampler_fingerprint(&another),
          "%016" PRIx64 " and %016" PRIx64, d.fingerprint, other.fingerprint);
    dataset_close(&other);
    dataset_close(&d);
}

// ---------------------------------------------------------------------------
// runs

/* One rank's checkpoints, from a mixture, are those of every layout; a resumed run is the run that was never stopped.
 */
static void test_mixture_layouts(const char *mixture) {
    static const SavingLayout layouts[] = {{1, "", 0},
                                           {2, "", 0},
                                           {4, " --dp-replicate 2", 0},
                                           {4, " --accumulate local", 0},
                                           {8, " --dp-shard 2 --dp-replicate 4 --sharding no_shard", 0},
                                           {2, " --pp 2", 2}};
    const char *model = small_model(0), *reference = saved_run(0, "mixed", model, mixture);
    for (int i = 0; i < 6; i++) goes_on(0, &layouts[i], model, mixture, reference);
}

static void test_other_weights(const char *mixture) {
    char said[SAID], step[320];
    snprintf(step, sizeof step, "%s/step-00000002", scratch_path("mixed"));
    for (int allow = 0; allow < 2; allow++) {
        int code = run_whole(said, 1,
                             "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --deterministic --batch 1 "
                             "--accum 8 --resume %s%s",
                             small_model(0), in_scratch("@/web-*.tok:0.6,@/code.tok:0.4"), step,
                             allow ? " --allow-changes" : "");
        int tells = strstr(said, "shares of --data 0.6, 0.4, was 0.7, 0.3") != NULL;
        CHECK(allow ? "resuming with other weights and --allow-changes says what changed"
                    : "resuming with other weights is refused",
              code == !allow && tells, "code %d: %.300s", code, allow ? strstr(said, "resumed") : error_line(said));
    }
    int code = run_whole(said, 1, "--model %s --data %s --seq 16 --tail pad", small_model(0), mixture);
    CHECK("--tail with a mixture is refused", code == 1 && strstr(said, "--tail pad has no effect on a mixture"),
          "code %d: %s", code, error_line(said));
    code = run_whole(said, 1, "--model %s --data %s --seq 16 --val %s", small_model(0), mixture, mixture);
    CHECK("--val with weights is refused", code == 1 && strstr(said, "--val and --eval use every token once"),
          "code %d: %s", code, error_line(said));
}

/* Writes samples.jsonl, whose text is `text`, with `count` windows below 20 of a step, which the first source gave,
 * replaced by `window`. Returns what --audit says. */
static const char *audit_of_changed(const char *out, const char *text, int step, int count, int window, int *code) {
    static char said[SAID];
    char key[32], path[320], *changed;
    size_t length;
    snprintf(path, sizeof path, "%s/samples.jsonl", out);
    snprintf(key, sizeof key, "{\"step\":%d,", step);
    const char *at = strstr(strstr(text, key), "\"samples\":[") + strlen("\"samples\":[");
    FILE *f = text_stream_open(&changed, &length);
    fwrite(text, 1, (size_t)(at - text), f);
    for (; count > 0; count--) {
        for (; atoi(at) >= 20; at = strchr(at, ',') + 1) fprintf(f, "%d,", atoi(at));
        fprintf(f, "%d", window);
        at += strspn(at, "0123456789");
        if (*at == ',') fputc(*at++, f);
    }
    fputs(at, f);
    text_stream_close(f);
    test_write(path, changed, length);
    free(changed);
    *code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    return error_line(said);
}

static void check_audit_of_faults(const char *out, const char *path) {
    size_t length;
    int code;
    char *text = read_file(path, &length);
    const char *error = audit_of_changed(out, text, 4, 2, 20, &code);
    CHECK("--audit: two samples of a wrong source are found", code == 1 && strstr(error, "but its share is"),
          "code %d: %s", code, error);
    error = audit_of_changed(out, text, 5, 2, 3, &code);
    CHECK("--audit: a sample that a source gives twice in an epoch, or never, is found",
          code == 1 && (strstr(error, "a second time in an epoch") || strstr(error, "was not consumed")), "code %d: %s",
          code, error);
    free(text);
    static const char late[] = "{\"windows\":3,\"tail\":\"drop\",\"sources\":[{\"data\":\"a\",\"windows\":3,"
                               "\"share\":1,\"consumed_before\":0}]}\n"
                               "{\"step\":1,\"epoch\":0,\"samples\":[0,1]}\n"
                               "{\"step\":2,\"epoch\":0,\"samples\":[1,0]}\n"
                               "{\"step\":3,\"epoch\":0,\"samples\":[2,2]}\n";
    char said[SAID];
    test_write(path, late, sizeof late - 1);
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    error = error_line(said);
    CHECK("--audit: a window that comes after its epoch has ended is found",
          code == 1 && strstr(error, "its window 2 was not consumed"), "code %d: %s", code, error);
}

/* Twelve steps of 12 samples in four runs on changing layouts, so that both sources go through several epochs. */
static void test_mixture_audit(const char *mixture) {
    static const struct {
        int world, accum, until;
        const char *options;
    } runs[] = {{1, 12, 3, ""},
                {4, 3, 6, " --dp-replicate 2 --sharding no_shard"},
                {6, 2, 9, " --accumulate local"},
                {4, 6, 12, " --cp 2"}};
    char said[SAID], path[320];
    const char *out = strdup(scratch_path("audit-mixture"));
    int code = 0;
    for (int i = 0; i < 4 && !code; i++)
        code = run_whole(said, runs[i].world,
                         "--model %s --data %s --seq 16 --steps %d --lr 1e-4 --min-lr 1e-4 --warmup 0 --threads 1 "
                         "--timeout 60 --batch 1 --accum %d --out %s --resume auto --keep 1%s",
                         small_model(0), mixture, runs[i].until, runs[i].accum, out, runs[i].options);
    CHECK("four runs of a mixture on 1, 4, 6 and 4 ranks, each from the last one's checkpoint", code == 0, "code %d %s",
          code, code ? error_line(said) : "");
    CHECK("the banner tells shares and epochs of the sources",
          strstr(said, "70 % from ") && strstr(said, "code.tok: 1 file, 5 samples; 8.60 epochs by step 12"), "%.600s",
          strstr(said, "data: "));
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    size_t length;
    char *metrics = read_file(path, &length);
    CHECK("metrics.jsonl tells the epochs of the sources", // 101 and 43 of 144 samples
          strstr(metrics, "\"source_epochs\":[5.050000,8.600000]") != NULL, "%.100s",
          strstr(metrics, "source_epochs") ? strstr(metrics, "source_epochs") : "no source_epochs");
    free(metrics);
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    int64_t samples = figure_in(said, "\"samples\""), epochs = figure_in(said, "\"whole_epochs\"");
    CHECK("--audit of a mixture: every window once in each epoch of its source, and each source its share",
          code == 0 && samples == 144 && epochs == 5, "code %d, %d samples, %d whole epochs of the slowest: %.500s",
          code, (int)samples, (int)epochs, said);
    snprintf(path, sizeof path, "%s/samples.jsonl", out);
    check_audit_of_faults(out, path);
}

static void test_mixture(void) {
    make_sources();
    test_lists_read();
    test_lists_refused();
    test_mixture_schedules();
    test_mixture_sampler();
    const char *mixture = strdup(in_scratch("@/web-*.tok:0.7,@/code.tok:0.3"));
    test_mixture_layouts(mixture);
    test_other_weights(mixture);
    test_mixture_audit(mixture);
}
