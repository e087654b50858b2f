/* test_z_loss.h: a run with --z-loss has one rank's gradients, losses and z-losses on every layout, and validation is
 * as without. That the values are PyTorch's is tested with the fixture "z_loss". Part of test_llama3.cu. */

enum { Z_STEPS = 8 };
typedef struct {
    double loss[Z_STEPS], z_loss[Z_STEPS], norm[Z_STEPS];
    double validation; // before the first step
} ZRun;
static ZRun z_run; // of rank 0

static void z_loss_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    double validation = evaluate(trainer, &j->val, 0).loss;
    for (int step = 1; step <= Z_STEPS; step++) {
        StepStats s = train_step(trainer, step);
        if (rank == 0) {
            z_run.loss[step - 1] = s.loss;
            z_run.z_loss[step - 1] = s.z_loss;
            z_run.norm[step - 1] = s.grad_norm;
        }
        if (step > 1) continue;
        matmul_rate(&trainer->parallel.dev);
        check_first_step(trainer); // expected = dry run = measured, or the test ends here
    }
    if (rank == 0) z_run.validation = validation;
    close_rank(o);
}

/* 8 samples a step on `ranks`, of which `data_ranks` have different ones. */
static ZRun run_z_loss(int ranks, int data_ranks, const char *more) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --val %s --seq 36 --steps %d --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch "
             "1 --accum %d --deterministic%s",
             mesh_model(0), make_token_file("z-loss.tok", 9000, 64, 7), make_token_file("z-loss-val.tok", 400, 64, 7),
             Z_STEPS, 8 / data_ranks, more);
    Job *j = make_job(arguments, ranks, &transport_threads);
    launch(j, 0, z_loss_body);
    end_job(j);
    return z_run;
}

/* Gradients of one rank, tensor by tensor. Returns the largest difference of a tensor. */
static double z_loss_gradients(const OneRank *one, int ranks, const char *more) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 38 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 --accum "
             "8%s",
             mesh_model(0), make_token_file("z-loss.tok", 9000, 64, 7), more);
    collect(arguments, 0, ranks, &transport_threads);
    return difference_from(one, mesh_model(0)).error;
}

static void test_z_loss_gradients(void) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 38 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 --accum "
             "8 --z-loss 0.05",
             mesh_model(0), make_token_file("z-loss.tok", 9000, 64, 7));
    OneRank one = collect_one_rank(arguments);
    double tp2 = z_loss_gradients(&one, 2, " --z-loss 0.05 --tp 2");
    double tp4 = z_loss_gradients(&one, 4, " --z-loss 0.05 --tp 4");
    double chunks = z_loss_gradients(&one, 1, " --z-loss 0.05 --logit-rows 7");
    double without = z_loss_gradients(&one, 1, "");
    CHECK("z-loss over tp 2 and tp 4, and with few logits at a time: every gradient of one rank",
          tp2 <= layout_bound() && tp4 <= layout_bound() && chunks <= layout_bound(),
          "worst gradient %.2g, %.2g and %.2g <= %.0e", tp2, tp4, chunks, layout_bound());
    CHECK("z-loss changes gradients", without > 5 * layout_bound(), "by %.2g > %.0e", without, 5 * layout_bound());
    free(one.grads);
}

static int equal_steps(const ZRun *a, const ZRun *b) {
    int equal = 0;
    for (int i = 0; i < Z_STEPS; i++)
        equal += !memcmp(&a->loss[i], &b->loss[i], sizeof(double)) &&
                 !memcmp(&a->z_loss[i], &b->z_loss[i], sizeof(double)) &&
                 !memcmp(&a->norm[i], &b->norm[i], sizeof(double));
    return equal;
}

static void test_z_loss_layouts(void) {
    static const struct {
        int ranks, data_ranks;
        const char *layout;
    } equal[] = {{2, 2, " --z-loss 0.05"},
                 {4, 4, " --z-loss 0.05 --dp-replicate 2 --sharding shard_grad_op --accumulate local"},
                 {2, 1, " --z-loss 0.05 --pp 2"},
                 {4, 2, " --z-loss 0.05 --pp 2 --pp-schedule interleaved --dp-shard 2"}};
    static const char *const near[] = {" --z-loss 0.05 --tp 2", " --z-loss 0.05 --cp 2"};
    char name[200];
    const ZRun one = run_z_loss(1, 1, " --z-loss 0.05"), off = run_z_loss(1, 1, ""),
               tiny = run_z_loss(1, 1, " --z-loss 1e-30");
    for (int i = 0; i < 4; i++) {
        ZRun run = run_z_loss(equal[i].ranks, equal[i].data_ranks, equal[i].layout);
        int steps = equal_steps(&run, &one);
        snprintf(name, sizeof name, "%d ranks%s: losses, z-losses and norms have one rank's bits", equal[i].ranks,
                 equal[i].layout);
        CHECK(name, steps == Z_STEPS, "%d of %d steps equal, the last z-loss %.9g", steps, Z_STEPS,
              run.z_loss[Z_STEPS - 1]);
    }
    for (int i = 0; i < 2; i++) {
        double loss = 0, z_loss = 0, bound = sizeof(floatX) == 4 ? 1e-5 : 3e-3;
        ZRun run = run_z_loss(2, 1, near[i]);
        for (int s = 0; s < Z_STEPS; s++) {
            loss = worst_of(loss, fabs(run.loss[s] / one.loss[s] - 1));
            z_loss = worst_of(z_loss, fabs(run.z_loss[s] / one.z_loss[s] - 1));
        }
        snprintf(name, sizeof name, "2 ranks%s: losses and z-losses of one rank", near[i]);
        CHECK(name, loss <= bound && z_loss <= bound, "off by %.2g and %.2g <= %.0e", loss, z_loss, bound);
    }
    CHECK("the loss that is reported is cross-entropy alone, and validation has no z-loss",
          one.loss[0] == off.loss[0] && one.validation == off.validation && one.z_loss[0] > 0.1 && !off.z_loss[0],
          "first losses %.9g and %.9g, validation %.9g and %.9g, z-losses %.9g and %g", one.loss[0], off.loss[0],
          one.validation, off.validation, one.z_loss[0], off.z_loss[0]);
    int same = 0;
    for (int i = 0; i < Z_STEPS; i++) same += tiny.loss[i] == off.loss[i] && tiny.norm[i] == off.norm[i];
    CHECK("a z-loss too small to matter leaves the bits of a run without", same == Z_STEPS && tiny.z_loss[0] > 0,
          "%d of %d steps equal", same, Z_STEPS);
    double with = one.z_loss[Z_STEPS - 1] / 0.05, without = tiny.z_loss[Z_STEPS - 1] / 1e-30;
    CHECK("z-loss brings the softmax's denominator towards 1", with < without && off.norm[0] != one.norm[0],
          "after %d steps the mean of log^2 Z is %.4g, and %.4g without; norms of the first step %.4g and %.4g",
          Z_STEPS, with, without, one.norm[0], off.norm[0]);
}

static void test_z_loss(void) {
    test_z_loss_gradients();
    test_z_loss_layouts();
}
