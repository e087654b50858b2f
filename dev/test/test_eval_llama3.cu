/* test_eval_llama3.cu: includes eval_llama3 and checks it: every layout has one rank's loss and counts every token
 * once, and so do answers that are scored (test_score.h).
 *
 *   test_eval_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#include "conditions.h"
#include "../../train_llama3.cu"
#include "../../programs/eval_llama3.cu"
#include "harness.h"
#include "jobs.h"
#include "models.h"
#include "eval_jobs.h"
#include "test_score.h"

static Job *eval_or_training_job(int argc, char **argv) {
    return is_evaluation(argc, argv) ? evaluation_job(argc, argv) : training_job(argc, argv);
}

static void eval_or_training_rank(Job *j, int rank) {
    if (j->purpose.trains) rank_main(j, rank);
    else program_rank(j, rank);
}

static void test_layouts_of_evaluation(void) {
    char arguments[1024], name[128];
    double one = 0;
    for (int world = 1; world <= 3; world++) { // 2,999 targets: windows, batches and ranks all have a rest
        snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq 16 --batch 3", FIXTURES,
                 make_token_file("eval.tok", 3000, 64, 0));
        Job *j = make_job(arguments, world, &transport_threads);
        launch(j, 0, eval_body);
        if (world == 1) one = eval_loss;
        snprintf(name, sizeof name, "evaluation on %d ranks counts every token once", world);
        CHECK(name, eval_targets == 2999 && fabs(eval_loss / one - 1) < 1e-6,
              "%" PRId64 " targets, loss %.9g, one rank %.9g", eval_targets, eval_loss, one);
        end_job(j);
    }
}

/* --eval: 2,999 targets, so that windows, batches and ranks all have a rest. */
static void compare_mesh_evaluation(int tied) {
    static const struct {
        int world;
        const char *options;
    } layouts[] = {{1, ""}, {8, " --tp 2 --cp 2 --pp 2"}, {12, " --tp 2 --pp 2 --dp-shard 3 --pp-light-ends"}};
    char arguments[1024], name[200];
    const char *data = strdup(make_token_file("mesh-saved.tok", 3000, 64, 0));
    const char *saved = saved_run(tied, "mesh-saved", mesh_model(tied), data);
    double one = 0, bound = sizeof(floatX) == 4 ? 1e-6 : 3e-3;
    for (int i = 0; i < 3; i++) {
        snprintf(arguments, sizeof arguments,
                 "--model %s/step-00000004 --eval %s --seq 16 --batch 3 --threads 1 --timeout 60%s", saved,
                 make_token_file("eval.tok", 3000, 64, 0), layouts[i].options);
        Job *j = make_job(arguments, layouts[i].world, &transport_threads);
        launch(j, 0, eval_body);
        end_job(j);
        if (!i) one = eval_loss;
        snprintf(name, sizeof name, "%s: evaluation on %d ranks%s counts every token once, with one rank's loss",
                 tied ? "tied" : "untied", layouts[i].world, layouts[i].options);
        CHECK(name, eval_targets == 2999 && fabs(eval_loss / one - 1) <= bound,
              "%" PRId64 " targets, loss %.9g, one rank's %.9g", eval_targets, eval_loss, one);
    }
}

static void open_evaluation(void *arguments) { make_job((const char *)arguments, 1, &transport_threads); }

/* A token file that says that windows of 16 tokens hold several conversations. */
static void test_packed_evaluation(void) {
    char arguments[1024];
    uint32_t flags = 16 << TOKEN_FILE_WINDOW_SHIFT;
    const char *path = strdup(make_token_file("packed.tok", 3201, 64, 0));
    FILE *f = fopen(path, "r+b");
    fseek(f, offsetof(TokenFileHeader, flags), SEEK_SET);
    fwrite(&flags, sizeof flags, 1, f);
    fclose(f);
    snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq 16 --batch 3", FIXTURES, path);
    expect_user_error("packed conversations are refused for evaluation, too", open_evaluation, arguments,
                      "add --doc-mask");
}

static void test_evaluation(void) {
    test_layouts_of_evaluation();
    if (CUDA_BUILD) return; // the rest starts child processes
    test_packed_evaluation();
    for (int tied = 0; tied < 2; tied++)
        if (!is_short || tied == (sizeof(floatX) == 2)) compare_mesh_evaluation(tied);
}

int main(int argc, char **argv) {
    static const TestGroup groups[] = {{"evaluation", test_evaluation, BOTH_BUILDS}, {"score", test_score, C_BUILD}};
    device_prepare_process(1);
    command_line.job = eval_or_training_job;
    command_line.rank = eval_or_training_rank;
    return run_tests(groups, 2, argc, argv);
}
