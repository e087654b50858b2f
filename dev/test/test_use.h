/* test_use.h: evaluation counts every token once, generation with cached keys and values has the logits of the whole
 * text, an export from any number of ranks has the bytes of one rank's. Part of test_llama3.cu. */

static double eval_loss;
static int64_t eval_targets;

static void eval_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Evaluation e = evaluate(&o->trainer, &j->val, 0);
    if (rank == 0) {
        eval_loss = e.loss;
        eval_targets = e.targets;
    }
    close_rank(o);
}

enum { PROMPT_TOKENS = 12 };
static double generation_difference;
static int generation_differs; // tokens that the cache and a whole recomputation choose differently

/* Continues the prompt greedily, once with the cache and once by computing the whole text for each token. */
static int count_different_tokens(Trainer *trainer, const int32_t *prompt, int n, int tokens) {
    int V = trainer->model.config.V, differ = 0;
    int32_t *text = new_array(int32_t, n + tokens);
    memcpy(text, prompt, sizeof(int32_t) * (size_t)n);
    const float *logits = next_token_logits(trainer, text, n, 0);
    for (int i = 0; i < tokens; i++) {
        text[n + i] = likeliest_token(logits, V);
        logits = next_token_logits(trainer, text + n + i, 1, n + i);
    }
    for (int i = 0; i < tokens; i++)
        differ += likeliest_token(next_token_logits(trainer, text, n + i, 0), V) != text[n + i];
    free(text);
    return differ;
}

static void generation_dry_run(Trainer *trainer) { generator_dry_run(trainer, PROMPT_TOKENS, 0); }

static void generation_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    int V = trainer->model.config.V, n = PROMPT_TOKENS;
    int32_t prompt[PROMPT_TOKENS];
    for (int t = 0; t < n; t++) prompt[t] = (t * 37 + 5) % 131;
    float *whole = (float *)checked_malloc(sizeof(float) * (size_t)V);
    memcpy(whole, next_token_logits(trainer, prompt, n, 0), sizeof(float) * (size_t)V); // all tokens at once
    next_token_logits(trainer, prompt, n / 2, 0); // then half of them, and the rest one by one
    const float *logits = NULL;
    for (int t = n / 2; t < n; t++) logits = next_token_logits(trainer, prompt + t, 1, t);
    if (rank == 0) generation_difference = norm_of_difference(logits, whole, 1, V) / norm_of(whole, V);
    int differ = count_different_tokens(trainer, prompt, n / 2, n - n / 2);
    if (rank == 0) generation_differs = differ;
    free(whole);
    close_rank(o);
}

static void export_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    model_export(&o->trainer.writer, (const Conversion *)j);
    close_rank(o);
}

/* Returns the loss of one rank. */
static double test_evaluation(void) {
    char arguments[1024], name[128];
    double one = 0;
    for (int world = 1; world <= 3; world++) { // 2,999 targets: windows, batches and ranks all have a rest
        snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq 16 --batch 3", fixture_dir,
                 make_token_file("eval.tok", 3000, 64, 0));
        Job *j = make_job(arguments, world, &transport_threads);
        launch(j, 0, eval_body);
        if (world == 1) one = eval_loss;
        snprintf(name, sizeof name, "evaluation on %d ranks counts every token once", world);
        CHECK(name, eval_targets == 2999 && fabs(eval_loss / one - 1) < 1e-6,
              "%" PRId64 " targets, loss %.9g, one rank %.9g", eval_targets, eval_loss, one);
        end_job(j);
    }
    return one;
}

static void test_generation(void) {
    char arguments[1024], name[128];
    for (int world = 1; world <= 2; world++) {
        Job *j = make_job("--plan", 1, &transport_threads);
        snprintf(arguments, sizeof arguments, "%s/odd", fixture_dir);
        j->opt.model = strdup(arguments);
        j->config = config_load(j->opt.model);
        table_close(&j->table);
        table_open(&j->table, &j->config, 0, &WHOLE_MODEL);
        j->has_weights = model_weights_open(&j->weights, j->opt.model, &j->table, BASE_TRAINED);
        j->purpose = generate_purpose();
        j->purpose.dry_run = generation_dry_run;
        j->opt.batch = 1;
        j->opt.seq = PROMPT_TOKENS;
        j->purpose.cached_positions = 16;
        j->mesh = mesh_of(world, 0, 1);
        launch(j, 0, generation_body);
        snprintf(name, sizeof name, "generation with cached keys and values on %d ranks: logits of the whole text",
                 world);
        CHECK(name, generation_difference < (sizeof(floatX) == 4 ? 2e-6 : 2e-2), "relative difference %.2g",
              generation_difference);
        snprintf(name, sizeof name, "generation with a cache on %d ranks: tokens of a whole recomputation", world);
        CHECK(name, !generation_differs, "%d of 6 tokens differ", generation_differs);
        end_job(j);
    }
}

/* `loss`: of the model that is exported. */
static void test_export(double loss) {
    char arguments[1024], name[128];
    static const struct {
        int world;
        const char *options, *name;
    } exporters[] = {
        {1, "", ""},
        {2, "", ""},
        {3, "", ""},
        {4, " --dp-replicate 2", ", 2 replicas,"},
        {3, " --sharding no_shard", " without sharding"},
    };
    for (int layout = 1; layout <= 5; layout++) {
        char model[256], original[512];
        int world = exporters[layout - 1].world;
        snprintf(model, sizeof model, "%s/export%d", scratch_dir, layout);
        snprintf(arguments, sizeof arguments, "--model %s/odd --export %s%s", fixture_dir, model,
                 exporters[layout - 1].options);
        Job *j = make_job(arguments, world, &transport_threads);
        export_check(model);
        launch(j, 0, export_body);
        end_job(j);
        snprintf(original, sizeof original, "%s/export1/model.safetensors", scratch_dir);
        strcat(model, "/model.safetensors");
        snprintf(name, sizeof name, "export from %d ranks%s writes the bytes of one", world,
                 exporters[layout - 1].name);
        CHECK(name, files_equal(model, original), "%s", "compared byte by byte");
    }
    snprintf(arguments, sizeof arguments, "--model %s/export3 --eval %s --seq 16 --batch 3", scratch_dir,
             scratch_path("eval.tok"));
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, eval_body);
    CHECK("an exported model read again has the same loss", eval_loss == loss, "%.9g and %.9g", eval_loss, loss);
    end_job(j);
}

static void test_use(void) {
    double loss = test_evaluation();
    test_generation();
    test_export(loss);
    static const float logits[4] = {1, 3, 2, -5};
    Candidate scratch[4];
    const Sampling sure = {0, 1, 0, 1}, half = {1, 0.5, 0, 1}, all = {1, 1, 0, 1}, two = {1, 1, 2, 1};
    CHECK("sampling: temperature 0 takes the likeliest, top-p cuts the rest off",
          sample_token(logits, 4, &sure, 0.99, scratch) == 1 && sample_token(logits, 4, &half, 0.99, scratch) == 1 &&
              sample_token(logits, 4, &all, 0.9999999, scratch) == 3,
          "%s", "three draws");
    CHECK("sampling: top-k keeps the likeliest tokens, of which top-p takes its share",
          sample_token(logits, 4, &two, 0.9999999, scratch) == 2 && sample_token(logits, 4, &two, 0.7, scratch) == 1,
          "%s", "two draws of exp(1) to 1");
    const float broken[2][4] = {{1, NAN, 2, 0}, {1, 2, 3, INFINITY}};
    CHECK("sampling: a logit that is not a finite number is noticed",
          logits_are_finite(logits, 4) && !logits_are_finite(broken[0], 4) && !logits_are_finite(broken[1], 4), "%s",
          "NaN and infinity among four");
    for (double temperature = 1e-3; temperature > 1e-60; temperature /= 1e12) {
        const Sampling s = {temperature, 1, 0, 1};
        int32_t first = sample_token(logits, 4, &s, 0, scratch), last = sample_token(logits, 4, &s, 0.99, scratch);
        CHECK("sampling: the smallest temperatures take the likeliest", first == 1 && last == 1,
              "temperature %g: tokens %d and %d, expected 1", temperature, first, last);
    }
}
