/* test_mesh_use.h: what surrounds the steps, under tensor, context and pipeline parallelism: checkpoints have one
 * rank's bytes and go on on any mesh; validation has its loss; each sample is consumed once. Part of test_llama3.cu. */

/* Layouts that resume from a checkpoint of one rank, and layouts whose checkpoints must have its bytes. */
static const SavingLayout mesh_goers[] = {
    {4, " --pp 4 --pp-schedule interleaved --pp-light-ends", 4},
    {8, " --pp 2 --dp-shard 2 --dp-replicate 2 --sharding full_shard --save-mode async", 2},
    {2, " --pp 2", 2},
    {3, " --pp 3 --offload all", 3},
    {4, " --pp 2 --dp-shard 2 --offload optimizer --recompute full", 2},
    {16, " --pp 8 --dp-replicate 2 --pp-light-ends", 8}};
static const SavingLayout mesh_savers[] = {
    {8, " --tp 2 --cp 2 --pp 2", 0},
    {12, " --tp 4 --pp 3 --pp-light-ends", 0},
    {8, " --cp 2 --pp 2 --dp-shard 2 --sharding full_shard --save-mode async", 0},
    {6, " --tp 2 --dp-shard 3", 0},
    {2, " --tp 2", 0},
    {4, " --tp 4 --save-mode async", 0},
    {2, " --cp 2", 0},
    {4, " --cp 4 --sharding no_shard", 0},
    {4, " --pp 4", 0},
    {16, " --tp 2 --cp 2 --pp 2 --dp-replicate 2 --pp-light-ends", 0},
    {6, " --pp 3 --dp-shard 2 --sharding no_shard", 0},
    {8, " --tp 4 --pp 2 --accum 2 --pp-schedule interleaved", 0},
    {12, " --tp 4 --dp-shard 3 --offload all", 0},
    {12, " --tp 2 --cp 2 --dp-shard 3 --wrap size:30000", 0}};

/* A pipeline's own run saves one rank's checkpoints, and another pipeline resumes from them. */
static void compare_pipeline_saving(int tied, const char *model, const char *data, const char *reference,
                                    const char *out) {
    static const SavingLayout other = {4, " --pp 4 --pp-light-ends", 4};
    char said[SAID], name[200];
    int differ[2], files[2];
    int code = run_whole(said, 4,
                         "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --timeout 60 --deterministic "
                         "--batch 1 --accum 4 --save-every 2 --pp 2 --dp-shard 2 --pp-schedule interleaved --out %s",
                         model, data, out);
    for (int i = 0; i < 2; i++) {
        char one[400], theirs[400];
        snprintf(one, sizeof one, "%s/step-%08d", reference, 2 + 2 * i);
        snprintf(theirs, sizeof theirs, "%s/step-%08d", out, 2 + 2 * i);
        differ[i] = files_that_differ(one, theirs, &files[i]);
    }
    snprintf(name, sizeof name, "%s: a pipeline of 2 x dp-shard 2 saves the checkpoints of one rank",
             tied ? "tied" : "untied");
    CHECK(name, code == 0 && !differ[0] && !differ[1] && files[0] >= 4, "%d and %d of %d files differ; code %d %s",
          differ[0], differ[1], files[0], code, code ? error_line(said) : "");
    goes_on(tied, &other, model, data, out);
}

static void compare_mesh_saving(int tied, int all) {
    char out[300];
    const char *model = mesh_model(tied), *data = strdup(make_token_file("mesh-saved.tok", 3000, 64, 0));
    file_bytes = tied ? 100000 : 5000000000ll; // tied, the files are cut
    const char *reference = saved_run(tied, "mesh-saved", model, data);
    for (int i = 0; i < (all ? 6 : 2); i++) goes_on(tied, &mesh_goers[i], model, data, reference);
    for (int i = 0; i < (all ? 14 : 4); i++) saves_again(tied, &mesh_savers[i], model, data, reference);
    snprintf(out, sizeof out, "%s%s", scratch_path("pipeline-saved"), tied ? "-tied" : "");
    compare_pipeline_saving(tied, model, data, reference, out);
    file_bytes = 5000000000ll;
}

/* Validation between two steps, on a mesh: one rank's losses of both. */
static void compare_mesh_validation(int tied, int ranks, int data_ranks, const char *layout) {
    char arguments[1024], name[300], *data = strdup(make_token_file("ranks.tok", 6000, 64, 7)),
                                     *val = strdup(make_token_file("between.tok", 700, 64, 0));
    double validation[2], loss[3], off = 0, steps_off = 0;
    for (int one = 1; one >= 0; one--) {
        int world = one ? 1 : ranks;
        snprintf(arguments, sizeof arguments,
                 "--model %s --data %s --seq 16 --warmup 0 --lr 1e-3 --batch 1 --accum %d --threads 1 --timeout 60 "
                 "--steps 3 --val %s%s",
                 mesh_model(tied), data, one ? 8 : 8 / data_ranks, val, one ? "" : layout);
        Job *j = make_job(arguments, world, &transport_threads);
        memset(&between, 0, sizeof between);
        launch(j, 0, between_body);
        end_job(j);
        if (one) {
            memcpy(validation, between.validation, sizeof validation);
            memcpy(loss, between.loss, sizeof loss);
        }
    }
    for (int i = 0; i < 2; i++) off = worst_of(off, fabs(between.validation[i] / validation[i] - 1));
    for (int i = 0; i < 3; i++) steps_off = worst_of(steps_off, fabs(between.loss[i] / loss[i] - 1));
    double bound = sizeof(floatX) == 4 ? 1e-6 : 3e-3;
    snprintf(name, sizeof name,
             "%s, %d ranks,%s: validation between steps has one rank's loss, and the steps have theirs",
             tied ? "tied" : "untied", ranks, layout);
    CHECK(name,
          off <= bound && steps_off <= bound && between.as_expected == 3 * ranks && validation[0] > 1 &&
              validation[0] != validation[1],
          "validation off by %.1g, steps by %.1g, <= %.0e; %d of %d steps have the expected traffic", off, steps_off,
          bound, between.as_expected, 3 * ranks);
    free(data);
    free(val);
}

/* An epoch in four runs, each on another mesh: --audit finds every window once, and a rank that shares samples adds
 * none. */
static void audit_meshes(void) {
    static const struct {
        int world, accum, until;
        const char *options;
    } runs[] = {{2, 6, 4, ""},
                {4, 12, 8, " --tp 2 --cp 2"},
                {12, 4, 12, " --tp 2 --pp 2 --dp-shard 3"},
                {8, 3, 16, " --pp 2 --dp-shard 2 --dp-replicate 2"}};
    char said[SAID];
    const char *data = strdup(make_token_file("audit.tok", 3001, 64, 0)),
               *out = strdup(scratch_path("audit-meshes")); // 187 windows: 15 steps of 12, and 7 that are dropped
    int code = 0;
    for (int i = 0; i < 4 && !code; i++)
        code = run_whole(said, runs[i].world,
                         "--model %s --data %s --seq 16 --steps %d --lr 1e-4 --min-lr 1e-4 --warmup 0 --threads 1 "
                         "--timeout 60 --batch 1 --accum %d --out %s --resume auto --keep 1%s",
                         mesh_model(0), data, runs[i].until, runs[i].accum, out, runs[i].options);
    CHECK("four runs on 2, 4, 12 and 8 ranks, of other meshes, each from the last one's checkpoint", code == 0,
          "code %d %s", code, code ? error_line(said) : "");
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    int64_t epochs = figure_in(said, "\"whole_epochs\""), dropped = figure_in(said, "\"dropped\""),
            samples = figure_in(said, "\"samples\"");
    CHECK("--audit of four meshes: every window once", code == 0 && epochs == 1 && dropped == 7 && samples == 16 * 12,
          "%" PRId64 " whole epochs, %" PRId64 " windows dropped, %" PRId64 " samples: %.200s", epochs, dropped,
          samples, said);
}

static void test_mesh_use(void) {
    for (int tied = 0; tied < 2; tied++)
        if (!is_short || tied == (sizeof(floatX) == 2)) compare_mesh_saving(tied, 0); // in each precision one
    compare_mesh_validation(0, 8, 1, " --tp 2 --cp 2 --pp 2");
    if (!is_short) compare_mesh_validation(1, 8, 2, " --tp 2 --pp 2 --dp-shard 2 --pp-light-ends");
    audit_meshes();
}

static void test_mesh_use_all(void) {
    for (int tied = 0; tied < 2; tied++) compare_mesh_saving(tied, 1);
    compare_mesh_validation(1, 8, 1, " --tp 2 --cp 2 --pp 2");
    compare_mesh_validation(0, 4, 1, " --pp 4 --pp-schedule interleaved");
    compare_mesh_validation(0, 8, 4, " --cp 2 --dp-shard 2 --dp-replicate 2");
}
