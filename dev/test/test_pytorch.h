/* test_pytorch.h: losses, logits, every gradient and ten AdamW steps equal PyTorch's, for small models of every kind
 * and for adapters. dev/pytorch/make_fixtures.py wrote the expected values. In bf16, errors are compared with those of
 * PyTorch's own bf16. Part of test_llama3.cu. */

/* Every step trains on this one batch, in place of the loader's. */
static void feed(Trainer *trainer, const float *ids, const float *targets) {
    int n = trainer->job->run.batch * trainer->job->run.seq;
    loader_close(&trainer->loader, &trainer->parallel.dev);
    trainer->loader.produced = INT64_MAX;
    trainer->loader.consumed = 0;
    for (int i = 0; i < LOADER_DEPTH; i++) {
        StepBatch *b = &trainer->loader.ring[i];
        memcpy(b->inputs, ids, sizeof(int32_t) * (size_t)n);
        memcpy(b->targets, targets, sizeof(int32_t) * (size_t)n);
        b->num_targets = 0;
        for (int t = 0; t < n; t++) b->num_targets += b->targets[t] >= 0;
        for (int t = 0; t < n && b->docs; t += trainer->job->run.seq)
            document_ids(b->docs + t, b->inputs + t, trainer->job->run.seq,
                         trainer->job->data.files[0].header.document_end);
    }
}

/* Forward and backward of one micro-batch, without a pipeline. */
static void micro_step(Trainer *trainer, const StepBatch *batch) {
    PipelineStep forward = {PIPE_FORWARD, 0, 0, 0, 0, 0}, backward = {PIPE_BACKWARD, 0, 0, 0, 0, 0};
    stage_forward(&trainer->model, &trainer->parallel.pipeline, &forward, batch, AFTER_FORWARD);
    stage_backward(&trainer->model, &trainer->parallel.pipeline, &backward, batch);
}

static float *fixture_tensor(const StFiles *s, const char *name, int64_t *count) {
    const StTensor *t = st_find(s, name);
    if (!t) user_error("fixture tensor %s is missing", name);
    float *x = (float *)checked_malloc(sizeof(float) * (size_t)t->elements);
    st_read(t, x, 0, t->elements);
    if (count) *count = t->elements;
    return x;
}

typedef struct {
    double error, ratio;
    char name[80];
} Worst; // error: ‖Δ‖/‖g‖; ratio: |‖g₁‖/‖g₀‖ − 1|

/* Holds r's gradients (times scale) against tensors `prefix`NAME; the worst tensor of all. `limits`: errors are
 * taken relative to 1.5 × the error of that name in the fixture. */
static Worst compare_gradients(Trainer *trainer, const StFiles *s, const char *prefix, const char *limits,
                               double scale) {
    Worst worst = ZERO;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        char name[160];
        int64_t n;
        if (trainer->model.table.units[t->unit].frozen) continue;
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        float *want = fixture_tensor(s, name, &n),
              *have = floats_on_host(&trainer->parallel.dev, trainer->parallel.fsdp.units[t->unit].grad + t->offset, n),
              limit = 1;
        double size = norm_of(want, n), error = norm_of_difference(have, want, scale, n), ratio = 0;
        if (size > 1e-7) {
            ratio = fabs(scale * norm_of(have, n) / size - 1);
            error /= size;
        } else if (limits) error = 0; // exactly zero there: judged in fp32
        if (limits) {
            snprintf(name, sizeof name, "%s%s", limits, t->name);
            float *torch_error = fixture_tensor(s, name, NULL);
            limit = 1.5f * torch_error[0];
            free(torch_error);
            error = error == 0 ? 0 : error / limit;
        }
        if (!(error < worst.error)) snprintf(worst.name, sizeof worst.name, "%s", t->name);
        worst.error = worst_of(worst.error, error);
        worst.ratio = worst_of(worst.ratio, ratio);
        free(want);
        free(have);
    }
    return worst;
}

/* Relative error of the weights of the tensor that was trained worst; `compared`: tensors that the fixture has. */
static double compare_final_weights(Trainer *trainer, const StFiles *s, int *compared) {
    double error = 0;
    *compared = 0;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        int64_t n;
        char tensor[160];
        snprintf(tensor, sizeof tensor, "final.%s", t->name);
        if (trainer->model.table.units[t->unit].frozen || !st_find(s, tensor)) continue;
        const float *master = trainer->parallel.fsdp.units[t->unit].master + t->offset;
        float *want = fixture_tensor(s, tensor, &n), *have = floats_on_host(&trainer->parallel.dev, master, n);
        error = worst_of(error, norm_of_difference(have, want, 1, n) / norm_of(want, n));
        ++*compared;
        free(want);
        free(have);
    }
    return error;
}

/* Calls of AdamW in a step of one rank: one for each run of tensors that follow each other without padding in a unit
 * and have equal weight decay. */
static int64_t adamw_calls_expected(const TensorTable *table) {
    int64_t runs = 0;
    const Tensor *before = NULL; // the trained tensor before this one
    for (int i = 0; i < table->num_tensors; i++) {
        const Tensor *t = &table->tensors[i];
        if (table->units[t->unit].frozen || t->is_frozen) continue;
        runs += !before || before->unit != t->unit || before->row->weight_decay != t->row->weight_decay ||
                before->offset + before->rows * before->cols != t->offset;
        before = t;
    }
    return runs;
}

static void compare_steps(Trainer *trainer, const StFiles *s, const char *fixture) {
    int64_t calls = trainer->parallel.dev.rec.ops[OP_ADAMW].calls, runs = adamw_calls_expected(&trainer->model.table);
    double loss_error = 0, norm_error = 0, z_error = 0;
    float *losses = fixture_tensor(s, "step_losses", NULL), *norms = fixture_tensor(s, "step_norms", NULL);
    float *z_losses = st_find(s, "z_loss") ? fixture_tensor(s, "step_z_losses", NULL) : NULL;
    for (int step = 1; step <= 10; step++) {
        StepStats stats = train_step(trainer, step);
        loss_error = worst_of(loss_error, fabs(stats.loss - losses[step - 1]) / fmax(1, fabs(losses[step - 1])));
        norm_error = worst_of(norm_error, fabs(stats.grad_norm / norms[step - 1] - 1));
        if (z_losses) z_error = worst_of(z_error, fabs(stats.z_loss / z_losses[step - 1] - 1));
    }
    char name[128];
    snprintf(name, sizeof name, "%s: losses of ten AdamW steps equal PyTorch's", fixture);
    CHECK(name, loss_error <= 1e-5, "error %.2g <= 1e-5", loss_error);
    snprintf(name, sizeof name, "%s: gradient norms of ten steps equal PyTorch's", fixture);
    CHECK(name, norm_error <= 1e-4, "error %.2g <= 1e-4", norm_error);
    snprintf(name, sizeof name, "%s: z-losses of ten steps equal PyTorch's", fixture);
    if (z_losses) CHECK(name, z_error <= 1e-5, "error %.2g <= 1e-5, the last %.7g", z_error, z_losses[9]);
    int compared;
    double error = compare_final_weights(trainer, s, &compared);
    snprintf(name, sizeof name, "%s: weights after ten steps equal PyTorch's", fixture);
    if (compared) CHECK(name, error <= 1e-5, "worst of %d tensors %.2g <= 1e-5", compared, error);
    calls = trainer->parallel.dev.rec.ops[OP_ADAMW].calls - calls;
    snprintf(name, sizeof name, "%s: one call of AdamW for neighbouring tensors with equal weight decay", fixture);
    CHECK(name, calls == 10 * runs, "%" PRId64 " calls in ten steps, expected 10 x %" PRId64 " of %d tensors", calls,
          runs, trainer->model.table.num_tensors);
    free(losses);
    free(norms);
    free(z_losses);
}

/* A job whose model, batch and hyperparameters are the fixture's. `base`: the fixture's model, if the fixture has
 * adapters beside the model of another fixture. */
static Job *fixture_job(const StFiles *expected, const char *fixture, const char *base) {
    char arguments[1024];
    const StTensor *shape = st_find(expected, "input_ids");
    int masked = !strcmp(fixture, "documents");
    snprintf(arguments, sizeof arguments,
             "--model %s/%s --data %s --seq %d --batch %d --lr 1e-3 --min-lr 1e-3 --warmup 0 --beta2 0.95 "
             "--weight-decay 0.1 --clip 1%s",
             FIXTURES, base ? base : fixture,
             masked ? make_document_file("small.tok", 3000, 40, 7) : make_token_file("small.tok", 3000, 64, 0),
             (int)shape->cols, (int)shape->rows, masked ? " --doc-mask" : "");
    if (base) snprintf(arguments + strlen(arguments), 300, " --adapters %s/%s", FIXTURES, fixture);
    float *z_loss = st_find(expected, "z_loss") ? fixture_tensor(expected, "z_loss", NULL) : NULL;
    if (z_loss) snprintf(arguments + strlen(arguments), 100, " --z-loss %.9g", z_loss[0]);
    free(z_loss);
    return make_job(arguments, 1, &transport_threads);
}

/* Returns the mean loss of the batch, and leaves its logits. */
static double fixture_loss(Trainer *trainer, const StepBatch *b) {
    step_reports_begin(&trainer->reports);
    model_forward(&trainer->model, &trainer->parallel.pipeline, b);
    head_loss(&trainer->model, NO_GRADIENTS);
    ExactSum sum = ZERO, unsettled;
    device_read(&trainer->parallel.dev, &unsettled, &trainer->reports.sums[SUM_LOSS], sizeof unsettled);
    exact_merge(&sum, &unsettled);
    fsdp_reshard(&trainer->parallel.fsdp, &trainer->parallel.fsdp.units[trainer->model.table.head], AFTER_LAST_USE);
    return exact_value(&sum) / (double)b->num_targets;
}

static void compare_loss_and_logits(Trainer *trainer, const StFiles *s, const char *fixture, double loss) {
    char name[128];
    int64_t n;
    float *want = fixture_tensor(s, "logits", &n), *want_loss = fixture_tensor(s, "loss", NULL);
    float *logits = floats_on_host(&trainer->parallel.dev, (const float *)trainer->model.logits, n);
    double error = norm_of_difference(logits, want, 1, n) / norm_of(want, n), largest = 0;
    for (int64_t i = 0; i < n; i++) largest = worst_of(largest, fabs(logits[i] - want[i]));
    snprintf(name, sizeof name, "%s: loss equals PyTorch's", fixture);
    CHECK(name, fabs(loss - want_loss[0]) <= 1e-5 * fmax(1, fabs(want_loss[0])), "%.8f and %.8f, within 1e-5", loss,
          want_loss[0]);
    snprintf(name, sizeof name, "%s: logits equal PyTorch's", fixture);
    CHECK(name, largest <= 1e-4 && error <= 1e-5, "largest difference %.2g <= 1e-4, relative %.2g <= 1e-5", largest,
          error);
    free(logits);
    free(want);
    free(want_loss);
}

/* In bf16 the loss may be off by half as much again as PyTorch's in bf16. */
static void compare_bf16_loss(const StFiles *s, const char *fixture, double loss) {
    char name[128];
    float *exact = fixture_tensor(s, "bf16.ref_loss", NULL), *torch_loss = fixture_tensor(s, "bf16.loss", NULL);
    double bound = fmax(1.5 * fabs(torch_loss[0] - exact[0]), 2e-3 * fabs(exact[0]));
    snprintf(name, sizeof name, "%s: bf16 loss is near fp32's", fixture);
    CHECK(name, fabs(loss - exact[0]) <= bound, "%.6f and %.6f, within %.2g", loss, exact[0], bound);
    free(exact);
    free(torch_loss);
}

static void test_fixture(const char *fixture, const char *base) {
    char path[512], name[128];
    StFiles expected = ZERO;
    snprintf(path, sizeof path, "%s/%s/expected.safetensors", FIXTURES, fixture);
    st_add_file(&expected, path);
    float *ids = fixture_tensor(&expected, "input_ids", NULL), *targets = fixture_tensor(&expected, "targets", NULL);
    Job *j = fixture_job(&expected, fixture, base);
    Opened *o = open_rank(j, 0);
    Trainer *trainer = &o->trainer;
    feed(trainer, ids, targets);
    StepBatch *b = &trainer->loader.ring[0];
    double count = (double)b->num_targets, loss = fixture_loss(trainer, b);
    int is_fp32 = sizeof(floatX) == sizeof(float);
    if (is_fp32) compare_loss_and_logits(trainer, &expected, fixture, loss);
    else compare_bf16_loss(&expected, fixture, loss);
    micro_step(trainer, b);
    fsdp_finish_gradients(&trainer->parallel.fsdp);
    if (is_fp32) {
        Worst w = compare_gradients(trainer, &expected, "grad.", NULL, 1 / count);
        snprintf(name, sizeof name, "%s: every gradient equals PyTorch's", fixture);
        CHECK(name, w.error <= 1e-5, "worst %.2g <= 1e-5 (%s)", w.error, w.name);
        snprintf(name, sizeof name, "%s: every gradient has PyTorch's norm", fixture);
        CHECK(name, w.ratio <= 1e-4, "worst ratio is off 1 by %.2g <= 1e-4", w.ratio);
        compare_steps(trainer, &expected, fixture);
    } else {
        Worst w = compare_gradients(trainer, &expected, "bf16.ref_grad.", "bf16.grad_error.", 1 / count);
        snprintf(name, sizeof name, "%s: bf16 gradients err at most 1.5 x as much as PyTorch's", fixture);
        CHECK(name, w.error <= 1, "worst is %.2f of the bound (%s)", w.error, w.name);
    }
    free(ids);
    free(targets);
    close_rank(o);
    end_job(j);
    st_close(&expected);
}

static void test_pytorch(void) {
    static const char *const fixtures[] = {"base",   "tied",       "llama31",  "llama31_short", "llama32",
                                           "odd",    "one_token",  "one_head", "headdim",       "eps",
                                           "longer", "headdim128", "z_loss"};
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) test_fixture(fixtures[i], NULL);
    test_fixture("lora_odd", "odd");
    test_fixture("lora_tied", "tied");
}
