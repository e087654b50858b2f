/* test_convert_llama3.cu: includes convert_llama3 and checks it: any layout writes one rank's files (here and in
 * test_stored.h), GGUF files are what their format says (test_gguf.h). The loss that eval_llama3 has with a written
 * model says that it is the same model.
 *
 *   test_convert_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#include "conditions.h"
#include "../../train_llama3.cu"
#include "../../programs/convert_llama3.cu"
#include "../../programs/eval_llama3.cu"
#include "harness.h"
#include "jobs.h"
#include "models.h"
#include "eval_jobs.h"
#include "test_tokenizer_files.h"
#include "test_stored.h"

static Job *conversion_job(int argc, char **argv) {
    Conversion *c = new_array(Conversion, 1);
    c->program = convert_program;
    job_take_options(&c->job, program_options_parse(&c->program, &c->opt, argc, argv));
    c->job.purpose = convert_purpose(c->opt.merge);
    return &c->job;
}

static void export_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    model_export(&o->trainer.writer, (const Conversion *)j);
    close_rank(o);
}

#include "test_gguf.h"

static Job *any_job(int argc, char **argv) {
    if (has_word(argv, argc, "--export")) return conversion_job(argc, argv);
    return is_evaluation(argc, argv) ? evaluation_job(argc, argv) : training_job(argc, argv);
}

static void any_rank(Job *j, int rank) {
    if (j->purpose.trains) rank_main(j, rank);
    else program_rank(j, rank);
}

/* `loss`: of the model that is exported. */
static void test_layouts_of_export(double loss) {
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
        snprintf(arguments, sizeof arguments, "--model %s/odd --export %s%s", FIXTURES, model,
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
             make_token_file("eval.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, eval_body);
    CHECK("an exported model read again has the same loss", eval_loss == loss, "%.9g and %.9g", eval_loss, loss);
    end_job(j);
}

/* `count`: of the layouts that export, the first of which is one rank. */
static void compare_mesh_exports(int tied, int count, const char *reference, const char *out) {
    static const struct {
        int world;
        const char *options;
    } exporters[] = {
        {1, ""}, {8, " --tp 2 --cp 2 --pp 2"}, {8, " --tp 4 --dp-replicate 2"}, {3, " --pp 3 --pp-light-ends"}};
    char said[SAID], name[200], of_one[400], export_of[400];
    snprintf(of_one, sizeof of_one, "%s-export0", out);
    for (int i = 0; i < count; i++) {
        int files;
        snprintf(export_of, sizeof export_of, "%s-export%d", out, i);
        int code =
            run_whole(said, exporters[i].world, "--model %s/step-00000004 --threads 1 --timeout 60 --export %s%s",
                      reference, export_of, exporters[i].options);
        if (!i) continue;
        int differ = files_that_differ(of_one, export_of, &files);
        snprintf(name, sizeof name, "%s: an export from %d ranks%s writes the bytes of one", tied ? "tied" : "untied",
                 exporters[i].world, exporters[i].options);
        CHECK(name, code == 0 && !differ && files >= 2, "%d of %d files differ; code %d %s", differ, files, code,
              code ? error_line(said) : "");
    }
}

/* The loss of the fixture that is exported. */
static double loss_of_fixture(void) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq 16 --batch 3", FIXTURES,
             make_token_file("eval.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, eval_body);
    end_job(j);
    return eval_loss;
}

static void test_exports(void) {
    test_layouts_of_export(loss_of_fixture());
    if (CUDA_BUILD) return; // the rest starts child processes
    for (int tied = 0; tied < 2; tied++) {
        if (is_short && tied != (sizeof(floatX) == 2)) continue;
        char out[300];
        const char *data = strdup(make_token_file("mesh-saved.tok", 3000, 64, 0));
        file_bytes = tied ? 100000 : 5000000000ll; // tied, the files are cut
        const char *reference = saved_run(tied, "mesh-saved", mesh_model(tied), data);
        snprintf(out, sizeof out, "%s%s", scratch_path("pipeline-saved"), tied ? "-tied" : "");
        compare_mesh_exports(tied, is_short ? 2 : 4, reference, out);
        file_bytes = 5000000000ll;
    }
}

int main(int argc, char **argv) {
    static const TestGroup groups[] = {
        {"exports", test_exports, BOTH_BUILDS}, {"stored", test_stored, C_BUILD}, {"gguf", test_gguf, C_BUILD}};
    device_prepare_process(1);
    command_line.job = any_job;
    command_line.rank = any_rank;
    return run_tests(groups, 3, argc, argv);
}
