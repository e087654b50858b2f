/* test_family.h: the presets have the published sizes; initial weights and the learning rate follow their definition.
 * Part of test_llama3.cu. */

/* Every shape of the learning-rate curve against PyTorch's schedulers (dev/pytorch/make_schedule_fixture.py). */
static void test_rate_shapes(void) {
    char path[256], shape[16], name[128];
    LearningRate rate = ZERO;
    snprintf(path, sizeof path, "%s/learning_rates.txt", FIXTURES);
    FILE *f = fopen(path, "r");
    while (f && fscanf(f, "%15s %lf %lf %" SCNd64 " %" SCNd64 " %" SCNd64, shape, &rate.peak, &rate.minimum,
                       &rate.warmup, &rate.decay, &rate.steps) == 6) {
        double worst = 0, wanted;
        int64_t step = 0;
        rate.shape = (RateShape)choice_index(shape, strlen(shape), RATE_SHAPE_NAMES);
        rate.first_step = rate.steps; // a curve that does not begin at the run's first step
        while (step < rate.steps && fscanf(f, "%lf", &wanted) == 1)
            worst = worst_of(worst, fabs(learning_rate_at(&rate, rate.first_step + ++step) - wanted) / rate.peak);
        snprintf(name, sizeof name, "learning rate as PyTorch's schedulers: %s, warm-up %" PRId64 ", %" PRId64 " steps",
                 shape, rate.warmup, rate.steps);
        CHECK(name, step == rate.steps && worst < 1e-7, "%.1e of the peak, bound 1e-7", worst);
    }
    CHECK("learning rate: the fixture has been read", f && feof(f), "%s", path);
    if (f) fclose(f);
}

static void test_family(void) {
    test_rate_shapes();
    static const struct {
        const char *name;
        int64_t parameters;
    } known[] = {// published sizes
                 {"llama3-8b", 8030261248},
                 {"llama3-70b", 70553706496},
                 {"llama3.1-405b", 405853388800},
                 {"llama3.2-1b", 1235814400},
                 {"llama3.2-3b", 3212749824}};
    for (int i = 0; i < 5; i++) {
        char name[96];
        Llama3Config c = config_load(known[i].name);
        TensorTable t;
        table_open(&t, &c, 0, &WHOLE_MODEL);
        snprintf(name, sizeof name, "%s has the published number of parameters", known[i].name);
        CHECK(name, t.num_parameters == known[i].parameters, "%" PRId64 ", published %" PRId64, t.num_parameters,
              known[i].parameters);
        int bad = 0;
        for (int k = 0; k < t.num_tensors; k++)
            bad += !t.tensors[k].row->fused && t.tensors[k].offset % TENSOR_ALIGN != 0;
        snprintf(name, sizeof name, "%s: every product's weights start on %d elements", known[i].name, TENSOR_ALIGN);
        CHECK(name, bad == 0, "%d do not", bad);
        table_close(&t);
    }
    Llama3Config c = config_load("tiny");
    TensorTable t;
    table_open(&t, &c, 0, &WHOLE_MODEL);
    const Tensor *head = table_find(&t, "lm_head.weight");
    float whole[4096], part[1000];
    double sum = 0, square = 0;
    tensor_init(whole, head, &c, 7, 1000, 4096, 2);
    tensor_init(part, head, &c, 7, 2000, 1000, 1);
    for (int i = 0; i < 4096; i++) {
        sum += whole[i];
        square += (double)whole[i] * whole[i];
    }
    CHECK("initial weights depend on seed, tensor and element alone", !memcmp(part, whole + 1000, sizeof part),
          "1000 elements drawn from another place");
    CHECK("initial weights have mean 0 and deviation 0.02",
          fabs(sum / 4096) < 1e-3 && fabs(sqrt(square / 4096) - 0.02) < 1e-3, "mean %.2g, deviation %.4f", sum / 4096,
          sqrt(square / 4096));
    table_close(&t);
    const LearningRate rate = {RATE_COSINE, 1, 0.1, 10, 0, 0, 110};
    const double at[4] = {learning_rate_at(&rate, 5), learning_rate_at(&rate, 10), learning_rate_at(&rate, 60),
                          learning_rate_at(&rate, 110)};
    CHECK("learning rate: warm-up, peak, half-way, end",
          fabs(at[0] - 0.5) < 1e-12 && fabs(at[1] - 1) < 1e-12 && fabs(at[2] - 0.55) < 1e-12 &&
              fabs(at[3] - 0.1) < 1e-12,
          "%.3f %.3f %.3f %.3f", at[0], at[1], at[2], at[3]);
}
