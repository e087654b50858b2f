/* test_layouts.h: every way of sharding a model gives the gradients of one rank, tensor by tensor, and with
 * --deterministic its bits. A part of test_llama3.cu. */

/* A model of five blocks, so that units of several blocks have a rest; no dimension divides anything. Returns its
 * directory. */
static const char *small_model(int tied) {
    static char *dirs[2];
    if (dirs[tied]) return dirs[tied];
    char path[300], part[320], *dir = dirs[tied] = strdup(scratch_path(tied ? "tied5" : "odd5"));
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    snprintf(part, sizeof part, "%s.%d", path, (int)getpid()); // several processes may make it at once
    FILE *f = fopen(part, "w");
    fprintf(f,
            "{\"model_type\":\"llama\",\"hidden_size\":42,\"num_hidden_layers\":5,\"num_attention_heads\":3,\"num_key_"
            "value_heads\":1,\"head_dim\":14,"
            "\"intermediate_size\":77,\"vocab_size\":131,\"max_position_embeddings\":64,\"rope_theta\":500000,\"tie_"
            "word_embeddings\":%s}\n",
            tied ? "true" : "false");
    fclose(f);
    rename(part, path);
    return dir;
}

enum {
    SAMPLES_A_STEP = 24
}; // of every layout: as many micro-batches of one sample as 1, 2, 3, 4, 6 and 8 ranks can share

/* What one rank computes of those samples, one at a time; kept for all who compare. */
static const OneRank *one_rank(int tied, const char *data, int samples, const char *dtype) {
    static struct {
        int tied, samples;
        char dtype[8];
        OneRank of;
    } kept[8];
    char arguments[1024];
    int i = 0;
    while (i < 8 && kept[i].of.grads &&
           (kept[i].tied != tied || kept[i].samples != samples || strcmp(kept[i].dtype, dtype)))
        i++;
    if (i == 8) user_error("more than 8 references");
    if (kept[i].of.grads) return &kept[i].of;
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 --accum "
             "%d --reduce-dtype %s",
             small_model(tied), data, samples, dtype);
    kept[i].tied = tied;
    kept[i].samples = samples;
    snprintf(kept[i].dtype, sizeof kept[i].dtype, "%s", dtype);
    kept[i].of = collect_one_rank(arguments);
    return &kept[i].of;
}

static Difference difference_of(const OneRank *one, int tied) { return difference_from(one, small_model(tied)); }

static int difference_allowed(const Difference *d, double bound) {
    return d->error <= bound && d->ratio <= bound && d->norm <= bound && d->loss <= (bound > 1e-5 ? 3e-3 : 1e-5) &&
           !d->padding && !d->allocations && !d->bytes;
}

/* What a layout is made of; `count` values of each. The first two factors are the ranks. */
typedef struct {
    int shard, replicate;
} RankSplit;
static const RankSplit splits[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {6, 1}, {8, 1}, {1, 2}, {1, 3},
                                   {2, 2}, {1, 4}, {3, 2}, {2, 3}, {1, 6}, {4, 2}, {2, 4}, {1, 8}};
static const char *const factor_sharding[] = {"full_shard", "shard_grad_op", "no_shard"},
                         *const factor_accumulate[] = {"sharded", "local"},
                         *const factor_recompute[] = {"none", "selective", "full", "every:2"},
                         *const factor_wrap[] = {"block", "size:30000", "size:999999"},
                         *const factor_slots[] = {"2", "3"}, *const factor_offload[] = {"none", "optimizer", "all"},
                         *const factor_model[] = {"untied", "tied"};
enum { FACTORS = 8 };
static const int factor_counts[FACTORS] = {16, 3, 2, 4, 3, 2, 3, 2};

/* Runs a layout; what differs from one rank (known to process 0). */
static Difference try_layout(const int *v, char *name, size_t size, int process, const Transport *transport) {
    char arguments[1024];
    RankSplit s = splits[v[0]];
    const char *data = strdup(make_token_file("ranks.tok", 6000, 64, 7));
    int world = s.shard * s.replicate, tied = v[7];
    snprintf(name, size,
             "dp-shard %d x dp-replicate %d, %s, accumulate %s, recompute %s, wrap %s, slots %s, offload %s, %s",
             s.shard, s.replicate, factor_sharding[v[1]], factor_accumulate[v[2]], factor_recompute[v[3]],
             factor_wrap[v[4]], factor_slots[v[5]], factor_offload[v[6]], factor_model[tied]);
    const OneRank *one = process == 0 ? one_rank(tied, data, SAMPLES_A_STEP, "fp32") : NULL;
    Difference nothing = ZERO;
    snprintf(arguments, sizeof arguments,
             "--model %s --data %s --seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --batch 1 --accum %d --out %s "
             "--dp-shard %d --dp-replicate %d"
             " --sharding %s --accumulate %s --recompute %s --wrap %s --slots %s --offload %s",
             small_model(tied), data, SAMPLES_A_STEP / world, scratch_dir, s.shard, s.replicate, factor_sharding[v[1]],
             factor_accumulate[v[2]], factor_recompute[v[3]], factor_wrap[v[4]], factor_slots[v[5]],
             factor_offload[v[6]]);
    collect(arguments, process, world, transport);
    return one ? difference_of(one, tied) : nothing;
}

static void layout_values(int64_t i, int *v) {
    for (int f = 0; f < FACTORS; f++) {
        v[f] = (int)(i % factor_counts[f]);
        i /= factor_counts[f];
    }
}

static int64_t layouts_in_all(void) {
    int64_t all = 1;
    for (int f = 0; f < FACTORS; f++) all *= factor_counts[f];
    return all;
}

/* Every value of every factor meets every value of every other one: layouts are taken greedily, those with the most new
 * pairs first. */
static void test_layouts(void) {
    static char met[FACTORS][16][FACTORS][16];
    int v[FACTORS], taken = 0;
    char name[300];
    double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    memset(met, 0, sizeof met);
    for (int wanted = FACTORS * (FACTORS - 1) / 2; wanted > 0; wanted--)
        for (int64_t n = 0; n < layouts_in_all(); n++) {
            int fresh = 0;
            layout_values(permute(n, layouts_in_all(), 7), v);
            for (int a = 0; a < FACTORS; a++)
                for (int b = a + 1; b < FACTORS; b++) fresh += !met[a][v[a]][b][v[b]];
            if (fresh < wanted) continue;
            for (int a = 0; a < FACTORS; a++)
                for (int b = a + 1; b < FACTORS; b++) met[a][v[a]][b][v[b]] = 1;
            Difference d = try_layout(v, name, sizeof name, 0, &transport_threads);
            taken++;
            CHECK(name, difference_allowed(&d, bound),
                  "worst gradient %.1g, ratio off by %.1g, norm %.1g, <= %.0e; losses %.1g; %" PRId64
                  " of padding touched, %" PRId64 " allocations in a step, %" PRId64 " bytes of state too many",
                  d.error, d.ratio, d.norm, bound, d.loss, d.padding, d.allocations, d.bytes);
        }
    CHECK("every two of the layouts' options were tried together", taken > 40, "%d of %" PRId64 " layouts", taken,
          layouts_in_all());
}

/* All of them, a line for each split, strategy and way to accumulate. */
static void test_layouts_all(void) {
    char name[300];
    double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    int64_t outer = factor_counts[0] * factor_counts[1] * factor_counts[2];
    for (int64_t o = 0; o < outer; o++) {
        Difference worst = ZERO;
        int v[FACTORS], failed = 0, tried = 0;
        char first[300] = "none";
        for (int64_t i = o; i < layouts_in_all(); i += outer, tried++) {
            layout_values(i, v);
            Difference d = try_layout(v, name, sizeof name, 0, &transport_threads);
            if (!difference_allowed(&d, bound) && !failed++) snprintf(first, sizeof first, "%s", name);
            worst.error = worst_of(worst.error, d.error);
            worst.ratio = worst_of(worst.ratio, d.ratio);
            worst.norm = worst_of(worst.norm, d.norm);
        }
        snprintf(name, sizeof name, "dp-shard %d x dp-replicate %d, %s, accumulate %s", splits[v[0]].shard,
                 splits[v[0]].replicate, factor_sharding[v[1]], factor_accumulate[v[2]]);
        CHECK(name, !failed,
              "%d layouts, worst gradient %.1g, ratio off by %.1g, norm %.1g, <= %.0e; the first that fails: %s", tried,
              worst.error, worst.ratio, worst.norm, bound, first);
    }
}

#ifdef HAVE_MPI
/* A few of them, on as many processes as there are. */
static void test_layouts_mpi(int process, int world) {
    int v[FACTORS], taken = 0;
    char name[300];
    for (int64_t n = 0; n < layouts_in_all() && taken < 8; n++) {
        layout_values(permute(n, layouts_in_all(), 11), v);
        if (splits[v[0]].shard * splits[v[0]].replicate != world || v[1] != taken % 3 ||
            (world > 3 && v[1] == 0 && splits[v[0]].replicate == 1))
            continue;
        taken++;
        Difference d = try_layout(v, name, sizeof name, process, &transport_mpi);
        double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
        if (process == 0)
            CHECK(name, difference_allowed(&d, bound),
                  "over mpi: worst gradient %.1g, ratio off by %.1g, norm %.1g, <= %.0e; losses %.1g; %" PRId64
                  " of padding touched, %" PRId64 " allocations in a step, %" PRId64 " bytes of state too many",
                  d.error, d.ratio, d.norm, bound, d.loss, d.padding, d.allocations, d.bytes);
    }
}
#endif

/* Validation between two steps unshards and reshards units as it needs them. It must not change the steps, which have
 * the same losses and the expected traffic. */
static struct {
    double loss[3], validation[2];
    int as_expected; // steps whose traffic the formula predicts
} between;

static void between_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    int validates = trainer->job->val.num_files > 0;
    Traffic expected[AXES][COLLECTIVES];
    expected_traffic(expected, &trainer->job->config, trainer->parallel.mesh.world, trainer->parallel.rank,
                     &trainer->job->opt, sizeof(StepReport));
    for (int step = 1; step <= 3; step++) {
        StepStats s = train_step(trainer, step);
        __atomic_fetch_add(&between.as_expected,
                           !memcmp(expected, trainer->parallel.comm.traffic_measured, sizeof expected),
                           __ATOMIC_RELAXED);
        double loss = validates && step < 3 ? evaluate(trainer, &trainer->job->val, 0).loss : 0;
        if (rank == 0) between.loss[step - 1] = s.loss;
        if (rank == 0 && step < 3) between.validation[step - 1] = loss;
    }
    close_rank(o);
}

static void test_validation_between(void) {
    double one[2] = {0, 0};
    for (int i = -1; i < 2 * STRATEGIES; i++) { // one rank, then each strategy, tied and not
        char arguments[1024], name[200], *data = strdup(make_token_file("ranks.tok", 6000, 64, 7)),
                                         *val = strdup(make_token_file("between.tok", 700, 64, 0));
        double without[3];
        int world = i < 0 ? 1 : 4, tied = i >= STRATEGIES;
        for (int validates = 0; validates < 2; validates++) {
            snprintf(arguments, sizeof arguments,
                     "--model %s --data %s --seq 16 --warmup 0 --lr 1e-3 --batch 1 --accum %d --timeout 60 --steps 3 "
                     "--sharding %s --dp-replicate %d%s%s",
                     small_model(tied), data, 8 / world, strategies[i < 0 ? 0 : i % STRATEGIES].name, i < 0 ? 1 : 2,
                     validates ? " --val " : "", validates ? val : "");
            Job *j = make_job(arguments, world, &transport_threads);
            memset(&between, 0, sizeof between);
            launch(j, 0, between_body);
            end_job(j);
            if (!validates) memcpy(without, between.loss, sizeof without);
        }
        if (i < 0) memcpy(one, between.validation, sizeof one);
        double off = tied || i < 0
                         ? 0
                         : fmax(fabs(between.validation[0] / one[0] - 1), fabs(between.validation[1] / one[1] - 1));
        snprintf(name, sizeof name,
                 "%d ranks, %s, %s: validation between steps changes nothing, and has one rank's loss", world,
                 strategies[i < 0 ? 0 : i % STRATEGIES].name, tied ? "tied" : "untied");
        CHECK(name,
              !memcmp(without, between.loss, sizeof without) && between.as_expected == 3 * world &&
                  off <= (sizeof(floatX) == 4 ? 1e-5 : 3e-3),
              "last loss %.9g and %.9g; %d of %d steps have the expected traffic; validation off by %.1g",
              between.loss[2], without[2], between.as_expected, 3 * world, off);
        free(data);
        free(val);
    }
}

/* Gradients that travel in bf16: near those of fp32, and the same on every layout that rounds the same sums. */
static void test_reduce_dtype(void) {
    static const struct {
        int shard, replicate;
        const char *more;
    } cases[] = {{1, 1, ""},
                 {2, 1, ""},
                 {3, 1, " --sharding shard_grad_op"},
                 {8, 1, ""},
                 {4, 2, ""},
                 {2, 1, " --sharding no_shard"},
                 {4, 1, " --sharding no_shard --accumulate local"},
                 {2, 2, " --sharding no_shard"},
                 {1, 4, ""},
                 {2, 1, " --accumulate local"}};
    const char *data = strdup(make_token_file("ranks.tok", 6000, 64, 7));
    const OneRank *exact = one_rank(0, data, SAMPLES_A_STEP, "fp32"),
                  *rounded = one_rank(0, data, SAMPLES_A_STEP, "bf16");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char arguments[1024], name[200];
        int world = cases[i].shard * cases[i].replicate,
            same = !strstr(cases[i].more, "no_shard") && !strstr(cases[i].more, "local") && cases[i].replicate == 1;
        snprintf(
            arguments, sizeof arguments,
            "--model %s --data %s --seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 --accum "
            "%d --dp-shard %d --dp-replicate %d --reduce-dtype bf16%s",
            small_model(0), data, SAMPLES_A_STEP / world, cases[i].shard, cases[i].replicate, cases[i].more);
        collect(arguments, 0, world, &transport_threads);
        Difference d = difference_of(same ? rounded : exact, 0);
        double bound = same && sizeof(floatX) == 4 ? 1e-5 : 1e-2; // 2^-9 of each leaf
        snprintf(name, sizeof name,
                 "gradients reduced in bf16, dp-shard %d x dp-replicate %d%s: those of one rank that %s",
                 cases[i].shard, cases[i].replicate, cases[i].more,
                 same ? "rounds each micro-batch's too" : "does not round");
        CHECK(name, difference_allowed(&d, bound) && (same || d.error > 1e-5), "worst gradient %.1g, norm %.1g <= %.0e",
              d.error, d.norm, bound);
    }
    // many micro-batches: a sum kept in bf16 would lose the small ones
    double norms[2];
    for (int ddp = 0; ddp < 2; ddp++) {
        char arguments[1024];
        snprintf(arguments, sizeof arguments,
                 "--model %s --data %s --seq 16 --steps 3 --lr 0 --timeout 60 --batch 1 --accum 1024 --tail pad "
                 "--reduce-dtype bf16%s",
                 small_model(0), data, ddp ? " --sharding no_shard" : "");
        collect(arguments, 0, 2, &transport_threads);
        norms[ddp] = collected_norm;
    }
    CHECK("1,024 micro-batches reduced in bf16 are summed in fp32 without sharding too",
          fabs(norms[1] / norms[0] - 1) < 3e-3, "gradient norm %.6f, full_shard's %.6f", norms[1], norms[0]);
}
