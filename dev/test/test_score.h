/* test_score.h: --score against the loss of --eval and against the sum of all probabilities, on several layouts, with
 * batches of other shapes; how texts become tokens; accuracy; bits per byte. Part of test_eval_llama3.cu. */

static RequestScore scores_of_test[4096];

static void score_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    const Requests *r = &((Evaluations *)j)->requests;
    Scoring s = scoring_open(&o->trainer, r);
    score_requests(&s);
    if (rank == 0) memcpy(scores_of_test, s.scores, sizeof(RequestScore) * (size_t)r->count);
    close_rank(o);
}

/* Scores the requests of a file into scores_of_test. Returns how many there are. */
static int score_file(const char *model, const char *file, int world, const char *options) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments, "--model %s/%s --score %s%s", FIXTURES, model, file, options);
    Job *j = make_job(arguments, world, &transport_threads);
    launch(j, 0, score_body);
    int count = (int)((Evaluations *)j)->requests.count;
    end_job(j);
    return count;
}

static int id_of_test(int request, int t) { return (int)(mix64((uint64_t)request * 1000 + (uint64_t)t) % 131); }

enum { SCORED_REQUESTS = 23 };
static int tokens_of_test(int request) { return 2 + request * request % 39; }
static int scored_of_test(int request) { return 1 + request % (tokens_of_test(request) - 1); }

/* Requests of 2 to 40 tokens. */
static const char *make_requests(void) {
    const char *path = scratch_path("requests.jsonl");
    FILE *f = fopen(path, "w");
    for (int i = 0; i < SCORED_REQUESTS; i++) {
        int tokens = tokens_of_test(i), context = tokens - scored_of_test(i);
        fprintf(f, "{\"id\":%d,\"context_ids\":[", i);
        for (int t = 0; t < tokens; t++) {
            if (t == context) fprintf(f, "],\"continuation_ids\":[");
            fprintf(f, "%s%d", t && t != context ? "," : "", id_of_test(i, t));
        }
        fprintf(f, "]}\n");
    }
    fclose(f);
    return path;
}

/* The loss of a token file that holds request i alone, where only its continuation has targets. */
static double score_by_loss(int i) {
    char arguments[1024];
    int tokens = tokens_of_test(i);
    const char *path = make_token_file("scored.tok", tokens, 131, 1 << 20);
    FILE *f = fopen(path, "r+b");
    fseek(f, TOKEN_FILE_FIRST_BYTES, SEEK_SET);
    for (int t = 0; t < tokens; t++) {
        uint16_t id = (uint16_t)id_of_test(i, t);
        fwrite(&id, sizeof id, 1, f);
    }
    for (int t = 0; t < tokens; t++) fputc(t >= tokens - scored_of_test(i), f);
    fclose(f);
    snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq %d --batch 1", FIXTURES, path, tokens - 1);
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, eval_body);
    end_job(j);
    return -eval_loss * (double)eval_targets;
}

static void test_scores_by_loss(const char *requests) {
    double worst = 0;
    score_file("odd", requests, 1, "");
    for (int i = 0; i < SCORED_REQUESTS; i += is_short ? 4 : 1)
        worst = worst_of(worst, fabs(score_by_loss(i) - scores_of_test[i].logprob));
    CHECK("a score is the loss of a token file with the request's tokens", worst <= 2e-5, "%.2g", worst);
}

/* Whatever the batches: their rows, their length, and who computes them. */
static void test_scores_of_layouts(const char *requests) {
    static const struct {
        int world;
        const char *options;
        int equal_bits;
    } layouts[] = {{2, " --deterministic", 1},
                   {3, " --deterministic", 1},
                   {4, " --deterministic --dp-replicate 2", 1},
                   {2, " --deterministic --pp 2", 1},
                   {2, " --batch 1 --seq 39", 0},
                   {1, " --batch 5 --seq 64", 0},
                   {2, " --tp 2", 0},
                   {2, " --cp 2", 0},
                   {8, " --tp 2 --cp 2 --pp 2", 0}};
    RequestScore one[SCORED_REQUESTS];
    char name[160];
    score_file("base", requests, 1, " --deterministic");
    memcpy(one, scores_of_test, sizeof one);
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        double worst = 0;
        int others = 0;
        score_file("base", requests, layouts[i].world, layouts[i].options);
        for (int r = 0; r < SCORED_REQUESTS; r++) {
            worst = worst_of(worst, fabs(scores_of_test[r].logprob - one[r].logprob));
            others += scores_of_test[r].surprises != one[r].surprises;
        }
        int is_bf16 = sizeof(floatX) == 2; // where other partial sums are rounded: 0.042 with tp 2
        double bound = is_bf16 ? 0.1 : 2e-5;
        snprintf(name, sizeof name, "scores on %d ranks%s are those of one rank", layouts[i].world, layouts[i].options);
        CHECK(name, layouts[i].equal_bits ? worst == 0 && !others : worst <= bound && others <= 2 * is_bf16,
              "off by %.2g, %d of %d greedy otherwise", worst, others, SCORED_REQUESTS);
    }
}

/* After one context, the probabilities of all tokens add up to 1, and exactly the most probable one is greedy. Under
 * tensor parallelism it is in the first slice of the vocabulary after some contexts, and in the second after others. */
static void test_scores_of_all_tokens(void) {
    static const char *const contexts[] = {"7,99,3", "1", "200,31", "5,5,5,5", "255,128,17,80", "64,2"};
    const char *path = scratch_path("all-tokens.jsonl");
    enum { CONTEXTS = sizeof contexts / sizeof *contexts };
    FILE *f = fopen(path, "w");
    for (int i = 0; i < CONTEXTS; i++)
        for (int id = 0; id < 256; id++)
            fprintf(f, "{\"context_ids\":[%s],\"continuation_ids\":[%d]}\n", contexts[i], id);
    fclose(f);
    for (int tp = 1; tp <= 2; tp++) {
        double worst = 0;
        int greedy = 0, greedy_and_best = 0, in_first_slice = 0;
        score_file("base", path, tp, tp == 2 ? " --tp 2" : "");
        for (int i = 0; i < CONTEXTS; i++) {
            const RequestScore *scores = scores_of_test + 256 * i;
            double sum = 0;
            int best = 0;
            for (int id = 0; id < 256; id++) {
                sum += exp(scores[id].logprob);
                if (scores[id].logprob > scores[best].logprob) best = id;
                greedy += !scores[id].surprises;
            }
            worst = worst_of(worst, fabs(sum - 1));
            greedy_and_best += !scores[best].surprises;
            in_first_slice += best < 128;
        }
        CHECK("the probabilities of all tokens add up to 1, and the largest alone is greedy",
              worst < 1e-5 && greedy == CONTEXTS && greedy_and_best == CONTEXTS && in_first_slice % CONTEXTS,
              "tp %d: off by %.1g; %d contexts, %d greedy, %d of them the largest, %d in the first half", tp, worst,
              (int)CONTEXTS, greedy, greedy_and_best, in_first_slice);
    }
}

/* A context that does not fit loses its beginning. */
static void test_cut_contexts(void) {
    const char *path = scratch_path("long.jsonl");
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"context_ids\":[1,2,3,4,5,6,7],\"continuation_ids\":[8,9]}\n");
    fprintf(f, "{\"context_ids\":[4,5,6,7],\"continuation_ids\":[8,9]}\n");
    fclose(f);
    score_file("odd", path, 1, " --seq 5");
    CHECK("a context that is too long loses its beginning",
          fabs(scores_of_test[0].logprob - scores_of_test[1].logprob) < 1e-5, "%.9g and %.9g",
          scores_of_test[0].logprob, scores_of_test[1].logprob);
}

// ---------------------------------------------------------------------------
// texts

/* A tokenizer with the tokens a, b, a space, "ab", " b", and the end of a document. */
static Tokenizer *small_tokenizer(void) {
    static const char text[] = "byte-level-bpe 1\ntokens 6\nmissing 253\nbos -\neos <end>\neot -\n"
                               "split [ab]+| [ab]+| +\nYQ== 0\nYg== 1\nIA== 2\nYWI= 3\nIGI= 4\nspecial <end> 5\n";
    return tokenizer_from_text("small", strdup(text), sizeof text - 1);
}

static void check_texts(const char *context, const char *continuation, const char *ids, int scored) {
    Tokenizer *t = small_tokenizer();
    Requests r = ZERO;
    char name[128], found[128] = "";
    r.tokenizer = t;
    r.vocab_size = 6;
    int n = request_add_texts(&r, "line", context, continuation);
    for (size_t i = 0; i < r.num_ids; i++) snprintf(found + strlen(found), 16, "%s%d", i ? " " : "", r.ids[i]);
    snprintf(name, sizeof name, "tokens of '%s' and '%s'", context, continuation);
    CHECK(name, !strcmp(found, ids) && n == scored, "%s with %d scored, expected %s with %d", found, n, ids, scored);
    requests_close(&r);
    tokenizer_close(t);
}

static void test_texts_of_requests(void) {
    check_texts("ab", " b", "3 4", 1);
    check_texts("ab ", "b", "3 4", 1); // the space is the continuation's
    check_texts("", "ab", "5 3", 1);   // an empty context is the end of a document
    check_texts("  ", "b", "5 2 2 1", 3);
    check_texts("a", "b", "0 1", 1);  // one token for both: each is encoded by itself
    check_texts("a", "bb", "0 1", 1); // one token across the boundary: the context keeps its own
    check_texts("a", "", "0", 0);     // nothing to score, which is refused
    check_texts("b", "a a", "1 0 2 0", 3);
}

static void test_choices(void) {
    const char *path = scratch_path("choices.jsonl");
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"context\":\"ab\",\"endings\":[\"b\",\"abab\"],\"label\":1}\n\n");
    fprintf(f, "{\"ctx\":\"ab \",\"endings\":[\" b\",\"a\",\"b\"],\"label\":\"2\"}");
    fclose(f);
    Tokenizer *t = small_tokenizer();
    Requests r;
    requests_read(&r, path, 1, t, NULL, 6);
    CHECK("tasks with several endings",
          r.num_tasks == 2 && r.count == 5 && r.tasks[1].label == 2 && r.tasks[1].first == 2 &&
              r.requests[1].ending_bytes == 4 && r.requests[2].ending_bytes == 2,
          "%d tasks, %d requests", (int)r.num_tasks, (int)r.count);
    // per byte: -3 / 1 and -10 / 4; then -9 / 2, -5 / 1, -4 / 1
    const RequestScore scores[] = {{-3, 0}, {-10, 0}, {-9, 0}, {-5, 0}, {-4, 0}};
    Accuracy a = accuracy_of_scores(&r, scores);
    CHECK("accuracy by sums and by sums per byte", a.plain == 0.5 && a.normalized == 1, "%g and %g", a.plain,
          a.normalized);
    requests_close(&r);
    tokenizer_close(t);
}

static double bytes_inverse, bytes_of_some;
static void bytes_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Evaluation e = evaluate(&o->trainer, &j->val, 0);
    Evaluation some = evaluate(&o->trainer, &j->val, 1);
    if (rank == 0) bytes_inverse = e.bits_per_byte * log(2.0) / (e.loss * (double)e.targets); // 1 / bytes
    if (rank == 0)
        bytes_of_some = some.loss * (double)some.targets / log(2.0) / some.bits_per_byte / (double)some.targets;
    close_rank(o);
}

/* In a file of make_document_file tokens 0 and 1 have one byte each, token 2 ends a document and has none. */
static void test_bits_per_byte(void) {
    static const char *const options[] = {"", "", " --tp 2", " --cp 2", " --pp 2"};
    static const int worlds[] = {1, 3, 2, 2, 2};
    const char *data = make_document_file("bits.tok", 700, 3, 0);
    for (int i = 0; i < 5; i++) {
        char arguments[768];
        snprintf(arguments, sizeof arguments, "--model %s/base --eval %s --seq 16 --batch 3%s", FIXTURES, data,
                 options[i]);
        Job *j = make_job(arguments, worlds[i], &transport_threads);
        int32_t inputs[16], targets[16];
        char raw[128], error[256];
        int64_t bytes = 0;
        for (int64_t w = 0; w < j->val.windows; w++) {
            dataset_sample(&j->val, w, inputs, targets, NULL, raw, error, sizeof error);
            for (int t = 0; t < 16; t++) bytes += targets[t] == 0 || targets[t] == 1;
        }
        launch(j, 0, bytes_body);
        CHECK("bits per byte count the bytes of all targets, special tokens as none",
              fabs(1 / bytes_inverse / (double)bytes - 1) < 1e-9, "%d ranks%s: %.3f bytes, expected %" PRId64,
              worlds[i], options[i], 1 / bytes_inverse, bytes);
        double each = (double)bytes / (double)j->val.targets;
        CHECK("bits per byte of some micro-batches take the average text of a target",
              fabs(bytes_of_some / each - 1) < 1e-9, "%d ranks%s: %.6f bytes a target, expected %.6f", worlds[i],
              options[i], bytes_of_some, each);
        end_job(j);
    }
}

static void test_score(void) {
    char requests[256]; // scratch_path remembers only the last few
    snprintf(requests, sizeof requests, "%s", make_requests());
    test_scores_by_loss(requests);
    test_scores_of_layouts(requests);
    test_scores_of_all_tokens();
    test_cut_contexts();
    test_texts_of_requests();
    test_choices();
    test_bits_per_byte();
}
