/* test_adapters.h: adapters beside a frozen model, as it is or in 8 bits: on any layout the gradients, bits and files
 * of one rank; the model itself stays as it is, and weights of 8 bits are the whole tensor's blocks whoever holds them.
 * PEFT's gradients: test_pytorch. A part of test_llama3.cu. */

/* Adapters whose B is not zero, as it is before the first step: one rank's after three large ones. Returns their
 * directory. They are not trained in a child process: CUDA, which may be open here, does not work in one. */
static const char *adapters_beside(int tied) {
    static char *dirs[2];
    char arguments[1024];
    if (dirs[tied]) return dirs[tied];
    dirs[tied] = strdup(scratch_path(tied ? "adapters-tied/latest" : "adapters/latest"));
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 32 --batch 4 --steps 3 --warmup 0 --lr 0.03 --lora-rank 5 --lora-alpha 15 "
             "--lora-targets %s --out %s",
             adapters_model(tied), make_token_file("unmasked.tok", 6000, 64, 0),
             tied ? "q,v,down" : "q,k,v,o,gate,up,down", scratch_path(tied ? "adapters-tied" : "adapters"));
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, rank_main);
    end_job(j);
    return dirs[tied];
}

enum { ADAPTED_SAMPLES = 12 };
static const char *const adapted_bases[] = {PRECISION_NAME, "int8", "int8:all"};

static void adapted_arguments(char *arguments, size_t size, int tied, int base, int accum, const char *options) {
    snprintf(arguments, size,
             "--model %s --adapters %s --base %s --data %s --seq 32 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 "
             "--threads 1 --batch 1 --accum %d %s",
             adapters_model(tied), adapters_beside(tied), adapted_bases[base],
             make_token_file("adapted.tok", 6000, 64, 7), accum, options);
}

/* The largest relative difference of a trained tensor's gradient between `one` rank and what is collected. */
static double worst_adapter_gradient(const TensorTable *table, const float *one, int64_t *compared) {
    double worst = 0;
    int64_t at = 0;
    for (int i = 0; i < table->num_tensors; i++) {
        const Tensor *t = &table->tensors[i];
        int64_t n = t->rows * t->cols;
        double norm = fmax(norm_of(one + at, n), 1e-20);
        if (!table->units[t->unit].frozen) {
            ++*compared;
            worst = worst_of(worst, norm_of_difference(collected + at, one + at, 1, n) / norm);
        }
        at += n;
    }
    return worst;
}

static void test_adapters_layouts(void) {
    static const struct {
        int world, data_ranks;
        const char *options;
    } layouts[] = {{2, 2, ""},
                   {3, 3, "--recompute selective"},
                   {4, 4, "--dp-replicate 2 --sharding shard_grad_op"},
                   {4, 4, "--sharding no_shard --accumulate local"},
                   {2, 1, "--tp 2"},
                   {4, 1, "--tp 2 --cp 2 --recompute full"},
                   {3, 1, "--pp 3 --pp-light-ends"},
                   {4, 2, "--pp 2 --pp-schedule interleaved --dp-shard 2"},
                   {8, 1, "--tp 2 --cp 2 --pp 2"},
                   {2, 2, "--wrap size:60000 --slots 3 --accumulate local"},
                   {6, 6, "--dp-replicate 3 --accumulate local --wrap size:1000000"},
                   {2, 2, "--offload all"}};
    for (int tied = 0; tied < (CUDA_BUILD ? 1 : 2); tied++)
        for (int base = 0; base < 3; base++) {
            char arguments[2048], name[400], out[300];
            adapted_arguments(arguments, sizeof arguments, tied, base, ADAPTED_SAMPLES, "");
            Job *j =
                make_job(arguments, 1, &transport_threads); // its table tells where tensors are in what is collected
            collect(arguments, 0, 1, &transport_threads);
            OneRank one = {collected, {collected_losses[0], collected_losses[1], collected_losses[2]}, collected_norm};
            collected = NULL;
            for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
                double loss = 0;
                int64_t compared = 0;
                static const size_t layout_on_gpus[] = {4, 0, 3};
                if (CUDA_BUILD && l != layout_on_gpus[base]) continue; // one layout for each kind of base
                if (!CUDA_BUILD && base && (l + (size_t)tied + (size_t)base) % 2) continue; // half of the layouts
                if (!CUDA_BUILD && is_short && (l + (size_t)tied) % 4) continue;
                snprintf(out, sizeof out, "%s --out %s", layouts[l].options, scratch_dir);
                adapted_arguments(arguments, sizeof arguments, tied, base, ADAPTED_SAMPLES / layouts[l].data_ranks,
                                  strstr(layouts[l].options, "offload") ? out : layouts[l].options);
                collect(arguments, 0, layouts[l].world, &transport_threads);
                double error = worst_adapter_gradient(&j->table, one.grads, &compared);
                for (int i = 0; i < 3; i++) loss = worst_of(loss, fabs(collected_losses[i] / one.losses[i] - 1));
                snprintf(name, sizeof name,
                         "adapters%s, base %s, %d ranks %s: gradients, losses of one rank; the base is as it was",
                         tied ? ", tied" : "", adapted_bases[base], layouts[l].world, layouts[l].options);
                // in bf16 an adapter's gradient is also rounded between its two matmuls
                double bound = FLOATX == DTYPE_F32 ? layout_bound() : 1.5 * layout_bound();
                CHECK(name,
                      error <= bound && loss <= (FLOATX == DTYPE_F32 ? 1e-5 : 3e-3) && compared > 0 &&
                          !padding_touched && !shared_differ && !steady_allocations && !frozen_changed &&
                          state_bytes == state_expected,
                      "worst of %d gradients %.1g, losses %.1g; %d of padding touched, %d shared gradients differ, %d "
                      "allocations, %d frozen units changed, %" PRId64 " bytes of state too many",
                      (int)compared, error, loss, (int)padding_touched, (int)shared_differ, (int)steady_allocations,
                      (int)frozen_changed, state_bytes - state_expected);
            }
            free(one.grads);
            end_job(j);
        }
}

// ---------------------------------------------------------------------------
// 8 bits

static void test_blocks8(void) {
    double worst = 0;
    int wrong = 0;
    for (int b = 0; b < 2000; b++) {
        float in[INT8_BLOCK];
        int8_t out[INT8_BLOCK];
        int n = b % 3 ? INT8_BLOCK : 1 + b % INT8_BLOCK;
        for (int i = 0; i < n; i++) {
            float outlier = b % 7 == 0 && i == n / 2 ? 100 : 1, magnitude = powf(10, (float)(b % 30) - 20) * outlier;
            in[i] = b % 50 == 0 ? 0 : normal_of_bits(mix64((uint64_t)(b * INT8_BLOCK + i))) * magnitude;
        }
        float step = quantize_int8_block(out, in, n), largest = 0;
        for (int i = 0; i < n; i++) {
            largest = fmaxf(largest, fabsf(in[i]));
            worst = fmax(worst, step > 0 ? fabs(in[i] - (double)out[i] * step) / step : fabs(in[i]));
        }
        for (int i = 0; i < n; i++)
            wrong += out[i] < -127 || (step > 0 && fabsf(in[i]) == largest && abs(out[i]) != 127);
    }
    float broken[3] = {1, NAN, 2};
    int8_t out[3];
    int hidden = 0;
    for (int i = 0; i < 2; i++, broken[1] = -INFINITY) hidden += !isnan(quantize_int8_block(out, broken, 3));
    CHECK("a block of 8 bits with a number that is none is none", !hidden, "%d hidden", hidden);
    CHECK("weights of 8 bits are off by half a step at most, the largest of a block by nothing",
          worst <= 0.5 + 1e-5 && !wrong, "%.7f of a step, %d of the largest are not 127", worst, wrong);
}

static int64_t widened_wrong, widened_elements;

/* What a rank computes with is what the blocks of the whole tensors stand for. */
static void widened_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        FsdpUnit *u = &trainer->parallel.fsdp.units[t->unit];
        int64_t n = t->rows * t->cols, all = t->whole_rows * t->whole_cols, run, whole;
        if (!u->table_unit->frozen) continue;
        float *want = (float *)checked_malloc(sizeof(float) * (size_t)all);
        tensor_init(want, t, &trainer->job->config, (uint64_t)j->run.seed, 0, all, 1);
        for (int64_t at = 0; at < all && is_quantized(trainer->job->config.base, t->row); at += INT8_BLOCK) {
            int8_t bytes[INT8_BLOCK];
            int64_t m = min_i64(INT8_BLOCK, all - at);
            float step = quantize_int8_block(bytes, want + at, m);
            for (int64_t e = 0; e < m; e++) want[at + e] = (float)bytes[e] * step;
        }
        floatX *have = (floatX *)on_host(&trainer->parallel.dev, fsdp_unshard(&trainer->parallel.fsdp, u) + t->offset,
                                         sizeof(floatX) * (size_t)n);
        int64_t wrong = 0;
        for (int64_t at = 0; at < n; at += run) {
            run = min_i64(n - at, tensor_run(t, at, &whole));
            for (int64_t e = 0; e < run; e++) wrong += to_float(have[at + e]) != to_float(from_float(want[whole + e]));
        }
        __atomic_fetch_add(&widened_wrong, wrong, __ATOMIC_RELAXED);
        __atomic_fetch_add(&widened_elements, n, __ATOMIC_RELAXED);
        free(want);
        free(have);
        if (i == u->table_unit->end_tensor - 1) fsdp_reshard(&trainer->parallel.fsdp, u, AFTER_LAST_USE);
    }
    close_rank(o);
}

static void test_widened(void) {
    static const struct {
        int world, odd;
        const char *options;
    } layouts[] = {{1, 1, ""},
                   {2, 1, ""},
                   {3, 1, ""},
                   {4, 1, "--dp-replicate 2"},
                   {5, 1, "--sharding no_shard"},
                   {3, 1, "--wrap size:40000"},
                   {2, 0, "--tp 2"},
                   {6, 0, "--tp 2 --sharding shard_grad_op"}};
    for (int base = 0; base < 3; base++)
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
            char arguments[1024], name[300];
            if (CUDA_BUILD && (base == 0 || l % 4 != 2)) continue;
            widened_wrong = widened_elements = 0;
            snprintf(arguments, sizeof arguments,
                     "--model %s --data %s --seq 16 --batch 1 --steps 1 --lora-rank 3 --base %s --timeout 60 %s",
                     layouts[l].odd ? small_model(base == 2) : adapters_model(0),
                     make_token_file("dequantized.tok", 3000, 64, 0), adapted_bases[base], layouts[l].options);
            Job *j = make_job(arguments, layouts[l].world, &transport_threads);
            launch(j, 0, widened_body);
            end_job(j);
            snprintf(name, sizeof name, "base %s, %d ranks %s: every weight is that of its block in the whole tensor",
                     adapted_bases[base], layouts[l].world, layouts[l].options);
            CHECK(name, !widened_wrong && widened_elements > 0, "%" PRId64 " of %" PRId64 " differ", widened_wrong,
                  widened_elements);
        }
}

// ---------------------------------------------------------------------------
// bits and files

static void test_adapters_bits(void) {
    static const struct {
        int world;
        const char *options;
    } layouts[] = {{2, ""},
                   {4, ""},
                   {2, " --sharding shard_grad_op"},
                   {4, " --sharding no_shard"},
                   {4, " --dp-replicate 2"},
                   {2, " --pp 2 --accum 8"},
                   {4, " --pp 2 --accum 4"}};
    for (int base = 0; base < 3; base++) {
        if (is_short && base != 1) continue;
        StepBits first[MOST_BITS];
        char more[200];
        for (int l = -1; l < (int)(sizeof layouts / sizeof *layouts); l += is_short ? 2 : 1) {
            snprintf(more, sizeof more, " --lora-rank 4 --base %s%s", adapted_bases[base],
                     l < 0 ? "" : layouts[l].options);
            compare_bits(base == 1 ? "tied" : "odd", 0, l < 0 ? 1 : layouts[l].world, 1, &transport_threads, more,
                         first, l < 0);
        }
    }
}

/* A run that trains adapters saves, resumes and exports the same files on any layout as on one rank. */
static void test_adapters_files(void) {
    static const struct {
        int world, split;
        const char *options;
    } layouts[] = {{2, 1, ""},
                   {4, 1, " --dp-replicate 2 --save-mode async"},
                   {4, 2, " --pp 2"},
                   {2, 1, " --sharding no_shard"},
                   {3, 0, ""},
                   {4, 0, " --tp 2 --cp 2"},
                   {4, 0, " --tp 2 --pp 2"}};
    char said[SAID], common[900], reference[300], adapters[320], name[300], theirs[340], step[340];
    int files;
    const char *model = strdup(scratch_path("adapted-base/latest"));
    snprintf(reference, sizeof reference, "%s", scratch_path("adapted-run"));
    snprintf(adapters, sizeof adapters, "%s/latest", reference);
    const char *data = strdup(make_token_file("adapted.tok", 6000, 64, 7));
    int code = run_whole(said, 1, "--model %s --data %s --seq 32 --batch 4 --steps 3 --warmup 0 --lr 1e-2 --out %s",
                         adapters_model(0), data, scratch_path("adapted-base"));
    snprintf(common, sizeof common,
             "--model %s --data %s --base int8 --lora-rank 5 --seq 32 --steps 4 --warmup 0 --lr 1e-2 --threads 1 "
             "--timeout 60 --deterministic --batch 1",
             model, data);
    code |= run_whole(said, 1, "%s --accum 8 --save-every 2 --out %s", common, reference);
    snprintf(step, sizeof step, "%s/step-00000004", reference);
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        const char *out = strdup(scratch_path("adapted-again"));
        int goes_on = layouts[l].split > 0; // else it reads the last one and saves it again
        int failed =
            goes_on ? run_whole(said, layouts[l].world, "%s --accum %d --resume %s/step-00000002 --out %s%s", common,
                                8 * layouts[l].split / layouts[l].world, reference, out, layouts[l].options)
                    : run_whole(said, layouts[l].world, "%s --resume %s --allow-changes --out %s%s", common, step, out,
                                layouts[l].options);
        snprintf(theirs, sizeof theirs, "%s/step-00000004", out);
        int differ = files_that_differ(step, theirs, &files);
        snprintf(name, sizeof name, "adapters: %s %d ranks%s, the files of one rank's run",
                 goes_on ? "2 steps, and 2 more on" : "read and saved again by", layouts[l].world, layouts[l].options);
        CHECK(name, !code && !failed && !differ && files >= 4, "%d of %d files differ; %s", differ, files,
              failed ? error_line(said) : "");
        snprintf(theirs, sizeof theirs, "rm -rf %s", out);
        if (system(theirs)) printf("could not remove %s\n", out);
    }
}

// ---------------------------------------------------------------------------
// nothing reads the gradient of the first block's input

static int64_t input_gradients, norm_backwards; // calls in a step, of all ranks

static void first_block_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    OpStat *ops = o->trainer.parallel.dev.rec.ops;
    int64_t inputs = ops[OP_LINEAR_BACKWARD_INPUT].calls, norms = ops[OP_RMSNORM_BACKWARD].calls;
    train_step(&o->trainer, 1);
    __atomic_fetch_add(&input_gradients, ops[OP_LINEAR_BACKWARD_INPUT].calls - inputs, __ATOMIC_RELAXED);
    __atomic_fetch_add(&norm_backwards, ops[OP_RMSNORM_BACKWARD].calls - norms, __ATOMIC_RELAXED);
    matmul_rate(&o->trainer.parallel.dev);
    check_first_step(&o->trainer); // the traffic formula leaves out its reduce-scatter, too
    close_rank(o);
}

static void test_first_block(void) {
    static const struct {
        int world, ranks_of_block;
        const char *options;
        int skipped; // 1: the first block is on the embedding's rank
    } cases[] = {{1, 1, "--lora-rank 3", 1},
                 {2, 2, "--lora-rank 3 --tp 2 --recompute full", 1},
                 {4, 2, "--lora-rank 3 --tp 2 --pp 2", 1},
                 {4, 1, "--lora-rank 3 --pp 4 --pp-light-ends", 0},
                 {2, 2, "--tp 2", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char arguments[512], name[200];
        input_gradients = norm_backwards = 0;
        snprintf(arguments, sizeof arguments, "--model %s/base --data %s --seq 16 --batch 1 --steps 1 --timeout 60 %s",
                 FIXTURES, make_token_file("first.tok", 3000, 64, 0), cases[i].options);
        Job *j = make_job(arguments, cases[i].world, &transport_threads);
        launch(j, 0, first_block_body);
        end_job(j);
        // a block has 4 layers and 7 adapters of two matrices; the first one lacks QKV and half of its 3 adapters
        int of_block = strstr(cases[i].options, "lora") ? 4 + 2 * 7 : 4, blocks = 2;
        int64_t inputs = cases[i].ranks_of_block * (of_block * blocks + 1 - 4 * cases[i].skipped);
        int64_t norms = cases[i].ranks_of_block * (2 * blocks + 1 - cases[i].skipped);
        snprintf(name, sizeof name, "%s: the gradient of the first block's input is %s", cases[i].options,
                 cases[i].skipped ? "left out" : "computed");
        CHECK(name, input_gradients == inputs && norm_backwards == norms,
              "%" PRId64 " matmuls of input gradients, expected %" PRId64 "; %" PRId64 " norms, expected %" PRId64,
              input_gradients, inputs, norm_backwards, norms);
    }
}

static void test_adapters(void) {
    test_first_block();
    test_blocks8();
    test_widened();
    test_adapters_layouts();
    if (CUDA_BUILD) return;
    test_adapters_bits();
    test_adapters_files();
}
