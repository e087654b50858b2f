/* test_logits.h: the losses of training come from logits that are rounded to floatX, those of validation from fp32
 * logits, each token by token against a definition in double precision. Under tensor parallelism each token's loss is
 * that of one rank. Part of test_llama3.cu. */

enum { LOGIT_TOKENS = 38 };
typedef struct {
    float training[LOGIT_TOKENS], validation[LOGIT_TOKENS]; // losses
    double exact[2][LOGIT_TOKENS]; // their definition: from logits that are rounded to floatX, and from exact ones
    double largest;                // logit
    int64_t activations;           // bytes, of the dry run
} LogitRun;
static LogitRun logit_run; // of rank 0

/* The losses of `batch` by definition, from the final norm's output that the model has just computed. */
static void define_losses(Trainer *trainer, const StepBatch *batch, LogitRun *run) {
    const Llama3 *m = &trainer->model;
    Device *dev = &trainer->parallel.dev;
    const FsdpUnit *u = &trainer->parallel.fsdp.units[m->table.head];
    const int C = m->config.C, V = m->config.V;
    const floatX *head = u->sharded_weights + u->table_unit->offsets[W_HEAD];
    floatX *x = (floatX *)on_host(dev, m->final_norm, sizeof(floatX) * LOGIT_TOKENS * (size_t)C);
    floatX *w = (floatX *)on_host(dev, head, sizeof(floatX) * (size_t)(V * C));
    for (int n = 0; n < LOGIT_TOKENS; n++) {
        double sums[2] = {0, 0}, target[2] = {0, 0};
        for (int v = 0; v < V; v++) {
            double exact = 0;
            for (int c = 0; c < C; c++) exact += (double)to_float(x[n * C + c]) * to_float(w[v * C + c]);
            const double logits[2] = {to_float(from_float((float)exact)), exact};
            for (int k = 0; k < 2; k++) {
                sums[k] += exp(logits[k]); // logits are small: there is no need of their largest
                if (v == batch->targets[n]) target[k] = logits[k];
            }
            run->largest = worst_of(run->largest, fabs(exact));
        }
        for (int k = 0; k < 2; k++) run->exact[k][n] = batch->targets[n] < 0 ? 0 : log(sums[k]) - target[k];
    }
    free(x);
    free(w);
}

static void logit_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    Llama3 *m = &trainer->model;
    LogitRun run = ZERO;
    StepBatch *batch = loader_next(&trainer->loader, &trainer->parallel.dev, j->run.timeout);
    fixture_loss(trainer, batch);
    device_read(m->dev, run.validation, m->losses, sizeof run.validation);
    micro_step(trainer, batch);
    fsdp_finish_gradients(&trainer->parallel.fsdp);
    device_read(m->dev, run.training, m->losses, sizeof run.training);
    if (m->tp->size == 1) define_losses(trainer, batch, &run);
    run.activations = (int64_t)o->dry_run.parallel.dev.arenas[MEM_ACTIVATIONS].peak;
    if (rank == 0) logit_run = run;
    close_rank(o);
}

static LogitRun run_logits(int ranks, const char *more) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq %d --steps 1 --timeout 60 --threads 1 --batch 1 --deterministic%s",
             mesh_model(0), make_token_file("logits.tok", 4000, 131, 7), LOGIT_TOKENS, more);
    Job *j = make_job(arguments, ranks, &transport_threads);
    launch(j, 0, logit_body);
    end_job(j);
    return logit_run;
}

/* The largest difference of a token's loss. */
static double loss_error(const float *losses, const double *expected) {
    double worst = 0;
    for (int n = 0; n < LOGIT_TOKENS; n++) worst = worst_of(worst, fabs(losses[n] - expected[n]));
    return worst;
}

static void test_logits_under_tp(const LogitRun *one, int tp) {
    char name[160], more[32];
    double training[LOGIT_TOKENS], validation[LOGIT_TOKENS];
    // The inputs of the head differ in their last bits, too. In bf16 a logit may round the other way.
    double bound = sizeof(floatX) == 4 ? 1e-5 : 0x1p-7 * one->largest;
    snprintf(more, sizeof more, " --tp %d", tp);
    LogitRun run = run_logits(tp, more);
    for (int n = 0; n < LOGIT_TOKENS; n++) {
        training[n] = one->training[n];
        validation[n] = one->validation[n];
    }
    double a = loss_error(run.training, training), b = loss_error(run.validation, validation);
    snprintf(name, sizeof name, "tp %d: each token's loss is that of one rank", tp);
    CHECK(name, a <= bound && b <= bound, "off by %.2g in training and %.2g in validation <= %.2g", a, b, bound);
}

static void test_logits_of_model(void) {
    static const char *const rows[] = {"", " --logit-rows 7", " --logit-rows 1"};
    const int row_bytes = sizeof(floatX) == 4 ? 524 : 272; // of 131 logits; in bf16 padded to 16 bytes
    char name[160];
    LogitRun one = ZERO;
    for (int i = 0; i < 3; i++) {
        LogitRun run = run_logits(1, rows[i]);
        double training = loss_error(run.training, run.exact[0]), validation = loss_error(run.validation, run.exact[1]);
        double apart = 0;
        for (int n = 0; n < LOGIT_TOKENS; n++) apart = worst_of(apart, fabs(run.exact[0][n] - run.exact[1][n]));
        snprintf(name, sizeof name, "training's losses are those of logits in %s, validation's of fp32 logits%s",
                 PRECISION_NAME, rows[i]);
        CHECK(name, training <= 2e-6 && validation <= 2e-6 && (sizeof(floatX) == 4 || apart > 1e-4),
              "off by %.2g and %.2g <= 2e-6; the two differ by %.2g", training, validation, apart);
        if (!i) one = run;
    }
    int64_t many = run_logits(1, " --logit-rows 38").activations, few = run_logits(1, " --logit-rows 16").activations;
    int64_t expected = round_up(38 * row_bytes, 256) - round_up(16 * row_bytes, 256);
    CHECK("a chunk of logits takes a row of floatX per token", many - few == expected,
          "22 rows more take %" PRId64 " bytes, expected %" PRId64, many - few, expected);
    test_logits_under_tp(&one, 2);
    test_logits_under_tp(&one, 4);
}
