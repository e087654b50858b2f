/* test_generate_llama3.cu: includes generate_llama3 and checks it: with cached keys and values the logits are those of
 * the whole text; how tokens are drawn, printed and stopped (test_generate.h).
 *
 *   test_generate_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#include "conditions.h"
#include "../../train_llama3.cu"
#include "../../programs/generate_llama3.cu"
#include "harness.h"
#include "jobs.h"
#include "test_tokenizer_files.h"
#include "test_generate.h"

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

/* The job of generate_llama3, but for its prompt: the test computes logits by itself. */
static Job *generation_job(int argc, char **argv) {
    Generation *g = new_array(Generation, 1);
    g->program = generate_program;
    job_take_options(&g->job, program_options_parse(&g->program, &g->opt, argc, argv));
    g->job.purpose = generate_purpose();
    g->job.purpose.prepare = NULL;
    g->job.purpose.dry_run = generation_dry_run;
    g->job.purpose.cached_positions = 16;
    return &g->job;
}

static void test_generation(void) {
    char arguments[1024], name[128];
#ifndef USE_CUDA
    CHECK("generation has the faster attention of single queries", query_attention.forward == query_attention_forward,
          "%s", query_attention.forward ? "a function is set" : "none is set");
#endif
    for (int world = 1; world <= 2; world++) {
        snprintf(arguments, sizeof arguments, "--model %s/odd", FIXTURES);
        Job *j = make_job(arguments, world, &transport_threads);
        j->run.batch = 1;
        j->run.seq = PROMPT_TOKENS;
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

static void test_draws(void) {
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

static void test_cached(void) {
    test_generation();
    test_draws();
}

int main(int argc, char **argv) {
    static const TestGroup groups[] = {{"cached", test_cached, BOTH_BUILDS}, {"generate", test_generate, C_BUILD}};
    device_prepare_process(1);
    command_line.job = generation_job;
    return run_tests(groups, 2, argc, argv);
}
