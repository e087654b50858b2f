/* test_layouts.h: any layout gives the gradients of one rank, tensor by tensor, with the expected memory and traffic,
 * and with --deterministic the layouts of FSDP and pipelines give its bits. Layouts combine options by pairs (pairs.h).
 * Part of test_llama3.cu. */
#include "pairs.h"

/* What a layout combines: one value of each option, written as on the command line; "" stands for none. */
enum {
    LAYOUT_REDUCE_DTYPE,
    LAYOUT_TP,
    LAYOUT_CP,
    LAYOUT_PP,
    LAYOUT_SCHEDULE,
    LAYOUT_LIGHT_ENDS,
    LAYOUT_SHARD,
    LAYOUT_REPLICATE,
    LAYOUT_ACCUM,
    LAYOUT_BATCH,
    LAYOUT_SHARDING,
    LAYOUT_ACCUMULATE,
    LAYOUT_RECOMPUTE,
    LAYOUT_WRAP,
    LAYOUT_SLOTS,
    LAYOUT_OFFLOAD,
    LAYOUT_DETERMINISTIC, // from here on one rank has the option, too
    LAYOUT_Z_LOSS,
    LAYOUT_OPTIMIZER,
    LAYOUT_DOCUMENTS,
    LAYOUT_MODEL, // from here on it is no option of the command line
    LAYOUT_MASK,
    LAYOUT_OPTIONS
};
static const char *const layout_values[LAYOUT_OPTIONS][MOST_VALUES] = {
    {"--reduce-dtype fp32", "--reduce-dtype bf16"},
    {"--tp 1", "--tp 2", "--tp 4"},
    {"--cp 1", "--cp 2", "--cp 4"},
    {"--pp 1", "--pp 2", "--pp 3", "--pp 4"},
    {"", "--pp-schedule interleaved --pp-chunks 2", "--pp-schedule interleaved --pp-chunks 3"},
    {"", "--pp-light-ends"},
    {"--dp-shard 1", "--dp-shard 2", "--dp-shard 3", "--dp-shard 4", "--dp-shard 6", "--dp-shard 8"},
    {"--dp-replicate 1", "--dp-replicate 2", "--dp-replicate 3", "--dp-replicate 4", "--dp-replicate 6",
     "--dp-replicate 8"},
    {"--accum 4", "--accum 1", "--accum 2", "--accum 3", "--accum 8"},
    {"--batch 1", "--batch 2"},
    {"--sharding full_shard", "--sharding shard_grad_op", "--sharding no_shard"},
    {"--accumulate sharded", "--accumulate local"},
    {"--recompute none", "--recompute selective", "--recompute full", "--recompute every:2"},
    {"--wrap block", "--wrap size:30000", "--wrap size:999999"}, // 1, 2 and all blocks in a unit
    {"--slots 2", "--slots 3"},
    {"--offload none", "--offload optimizer", "--offload all"},
    {"", "--deterministic"},
    {"", "--z-loss 0.05"},
    {"", "--optimizer muon"},
    {"", "--doc-mask"},
    {"untied", "tied"},
    {"", "masked losses"}};

/* Joins the values of options [first, end) by blanks. */
static void layout_text(char *text, size_t size, const int *v, int first, int end) {
    text[0] = 0;
    for (int i = first; i < end; i++) {
        size_t used = strlen(text);
        if (layout_values[i][v[i]][0])
            snprintf(text + used, size - used, "%s%s", used ? " " : "", layout_values[i][v[i]]);
    }
}

/* The values of a layout that is written as text; options that it leaves out have their first value. */
static void layout_parse(const char *text, int *v) {
    char padded[512], value[64];
    size_t left = strlen(text) + 1; // bytes of the text that are no value's, with a blank after each value
    snprintf(padded, sizeof padded, " %s ", text);
    for (int i = 0; i < LAYOUT_OPTIONS; i++) {
        v[i] = 0;
        for (int k = 0; k < MOST_VALUES && layout_values[i][k]; k++) {
            snprintf(value, sizeof value, " %s ", layout_values[i][k]);
            if (!layout_values[i][k][0] || !strstr(padded, value)) continue;
            v[i] = k;
            left -= strlen(value) - 1;
        }
    }
    if (left) user_error("\"%s\" is no list of values of layout_values", text);
}

/* The number at the end of an option's value; 1 if there is none or the option is undecided. */
static int layout_number(const int *v, int option) {
    const char *value = v[option] == UNDECIDED ? "" : layout_values[option][v[option]], *blank = strrchr(value, ' ');
    return blank ? atoi(blank + 1) : 1;
}

static int layout_data_ranks(const int *v) {
    return layout_number(v, LAYOUT_SHARD) * layout_number(v, LAYOUT_REPLICATE);
}
static int layout_ranks(const int *v) {
    return layout_number(v, LAYOUT_TP) * layout_number(v, LAYOUT_CP) * layout_number(v, LAYOUT_PP) *
           layout_data_ranks(v);
}
static int layout_samples(const int *v) { // of a step
    return layout_data_ranks(v) * layout_number(v, LAYOUT_ACCUM) * layout_number(v, LAYOUT_BATCH);
}

/* What this test computes in reasonable time, and what run/setup/job.h demands of a pipeline. */
static int layout_allowed(const int *v) {
    int most_ranks = is_short ? 8 : 16, most_samples = 32;
    int pp = layout_number(v, LAYOUT_PP), accum = layout_number(v, LAYOUT_ACCUM);
    int is_interleaved = v[LAYOUT_SCHEDULE] > 0, needs_pipeline = is_interleaved || v[LAYOUT_LIGHT_ENDS] > 0;
    int least_pp = needs_pipeline && v[LAYOUT_PP] == UNDECIDED ? 2 : pp;
    int stages = least_pp * layout_number(v, LAYOUT_SCHEDULE);
    if (layout_ranks(v) / pp * least_pp > most_ranks || layout_samples(v) > most_samples) return 0;
    if (needs_pipeline && least_pp == 1) return 0;
    if (stages > MESH_BLOCKS + (v[LAYOUT_LIGHT_ENDS] ? 2 : 0)) return 0;
    if (!is_interleaved || v[LAYOUT_ACCUM] == UNDECIDED) return 1;
    return v[LAYOUT_PP] == UNDECIDED ? accum > 1 : accum % pp == 0;
}

static int is_power_of_two(int n) { return (n & (n - 1)) == 0; }

/* Does --deterministic give it the bits of one rank? */
static int layout_has_bits(const int *v) {
    int adds_in_order = layout_number(v, LAYOUT_TP) == 1 && layout_number(v, LAYOUT_CP) == 1 &&
                        layout_number(v, LAYOUT_BATCH) == 1 && v[LAYOUT_REDUCE_DTYPE] <= 0;
    int adds_by_twos = is_power_of_two(layout_number(v, LAYOUT_SHARD)) &&
                       is_power_of_two(layout_number(v, LAYOUT_REPLICATE)) &&
                       is_power_of_two(layout_number(v, LAYOUT_ACCUM));
    return v[LAYOUT_DETERMINISTIC] && adds_in_order && adds_by_twos;
}

static int layout_allowed_with_bits(const int *v) {
    int divides = v[LAYOUT_SCHEDULE] <= 0 || is_power_of_two(layout_number(v, LAYOUT_PP)); // pp divides accum
    return divides && layout_has_bits(v) && layout_allowed(v);
}

static void layouts_open(Pairs *p, int (*allowed)(const int *)) {
    memset(p, 0, sizeof *p);
    p->options = LAYOUT_OPTIONS;
    p->coarse = LAYOUT_REDUCE_DTYPE;
    p->allowed = allowed;
    for (int i = 0; i < LAYOUT_OPTIONS; i++)
        while (p->counts[i] < MOST_VALUES && layout_values[i][p->counts[i]]) p->counts[i]++;
}

/* What one rank computes; kept for all layouts that compare with the same run. */
static const OneRank *layout_reference(const char *arguments) {
    enum { MOST_REFERENCES = 2 * MOST_CHOSEN };
    static struct {
        char *arguments;
        OneRank of;
    } kept[MOST_REFERENCES];
    int i = 0;
    while (kept[i].arguments && strcmp(kept[i].arguments, arguments)) i++;
    if (i == MOST_REFERENCES - 1) user_error("more than %d references", i);
    if (kept[i].arguments) return &kept[i].of;
    kept[i].arguments = strdup(arguments);
    kept[i].of = collect_one_rank(arguments);
    return &kept[i].of;
}

/* The command line of a run: `layout`, and what one rank has in common with it. cp divides a sequence into 2·cp parts.
 * tp divides the 38, 18 or 10 tokens that a cp rank has of it, also unevenly. */
static void layout_arguments(char *arguments, size_t size, const int *v, const char *layout) {
    static const int seq[] = {38, 36, 40};
    char training[200];
    int mask = v[LAYOUT_MASK] ? 7 : 0, documents = v[LAYOUT_DOCUMENTS];
    const char *file = mask ? "masked.tok" : "layouts.tok";
    // documents of 16 tokens in the mean are shorter than what a cp rank has of a sequence; else all tokens occur
    const char *data = documents ? make_document_file(file, 6000, 16, mask) : make_token_file(file, 6000, 131, mask);
    layout_text(training, sizeof training, v, LAYOUT_DETERMINISTIC, LAYOUT_MODEL);
    snprintf(arguments, size,
             "--model %s --data %s --seq %d --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 %s %s",
             mesh_model(v[LAYOUT_MODEL]), data, seq[v[LAYOUT_CP]], training, layout);
}

/* Runs a layout and returns what differs from one rank that takes the same samples one at a time (known to process 0).
 */
static Difference try_layout(const int *v, char *name, size_t size, int process, const Transport *transport) {
    char layout[600], one_at_a_time[64], arguments[1400];
    const OneRank *one = NULL;
    Difference d = ZERO;
    layout_text(name, size, v, 0, LAYOUT_OPTIONS);
    snprintf(one_at_a_time, sizeof one_at_a_time, "--batch 1 --accum %d", layout_samples(v));
    layout_arguments(arguments, sizeof arguments, v, one_at_a_time);
    if (process == 0) one = layout_reference(arguments);
    layout_text(layout, sizeof layout, v, 0, LAYOUT_DETERMINISTIC);
    if (v[LAYOUT_OFFLOAD]) { // in files, where the processor is the device
        size_t used = strlen(layout);
        snprintf(layout + used, sizeof layout - used, " --out %s", scratch_dir);
    }
    layout_arguments(arguments, sizeof arguments, v, layout);
    collect(arguments, process, layout_ranks(v), transport);
    if (!one) return d;
    d = difference_from(one, mesh_model(v[LAYOUT_MODEL]));
    d.padding += shared_differ;
    return d;
}

/* The relative difference that rounding may cause. */
static double layout_bound(void) { return sizeof(floatX) == 4 ? 1e-5 : 2e-2; }

static int difference_allowed(const Difference *d, double bound) {
    double loss_bound = bound > 1e-4 ? 3e-3 : bound;
    return d->error <= bound && d->ratio <= bound && d->norm <= bound && d->loss <= loss_bound && !d->padding &&
           !d->allocations && !d->bytes;
}

/* Gradients that travel in bf16 are near those that do not, and not the same. */
static void check_layout(const char *name, const int *v, const Difference *d) {
    double bound = layout_has_bits(v) ? 0 : layout_bound();
    int is_rounded = v[LAYOUT_REDUCE_DTYPE] > 0;
    if (is_rounded) bound = fmax(bound, 1e-2);
    CHECK(name, difference_allowed(d, bound) && (!is_rounded || d->error > 1e-5),
          "worst gradient %.1g, ratio off by %.1g, norm %.1g, <= %.0e%s; losses %.1g; %" PRId64
          " of padding touched or of shared gradients not shared, %" PRId64 " allocations in a step, %" PRId64
          " bytes of state too many",
          d->error, d->ratio, d->norm, bound, is_rounded ? ", > 1e-05" : "", d->loss, d->padding, d->allocations,
          d->bytes);
}

/* Compares a layout that is written as text with one rank. */
static void compare_text(const char *text, const Transport *transport) {
    int v[MOST_OPTIONS];
    char name[700], over[720];
    layout_parse(text, v);
    Difference d = try_layout(v, name, sizeof name, 0, transport);
    snprintf(over, sizeof over, "over %s: %s", transport->name, name);
    check_layout(over, v, &d);
}

/* Layouts in which all pairs of options meet; then those that have the bits of one rank. */
/* `short` tries the first six combinations, which has most of the pairs. */
static void test_layouts(void) {
    static Pairs p;
    char name[700];
    for (int with_bits = 0; with_bits < 2; with_bits++) {
        layouts_open(&p, with_bits ? layout_allowed_with_bits : layout_allowed);
        pairs_choose(&p);
        for (int i = 0; i < (is_short ? 6 : p.num_chosen); i++) {
            Difference d = try_layout(p.chosen[i], name, sizeof name, 0, &transport_threads);
            check_layout(name, p.chosen[i], &d);
        }
        check_pairs(&p, with_bits ? "layouts that have one rank's bits" : "layouts");
    }
    compare_text("--dp-shard 2 --wrap size:30000", &transport_threads); // 4 units, 2 slots: units must be resharded
}

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
                     &trainer->job->run, sizeof(StepReport));
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

/* Gradients that travel in bf16 are the same on every layout that rounds the same sums. Near those of fp32 they are on
 * every layout of test_layouts. */
static void test_reduce_dtype(void) {
    static const struct {
        int world;
        const char *sharding;
    } cases[] = {{1, "full_shard"}, {2, "full_shard"}, {3, "shard_grad_op"}, {8, "full_shard"}};
    enum { SAMPLES = 24 };
    const char *data = strdup(make_token_file("ranks.tok", 6000, 64, 7));
    OneRank one = ZERO;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char arguments[1024], name[200];
        snprintf(arguments, sizeof arguments,
                 "--model %s --data %s --seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 "
                 "--accum %d --sharding %s --reduce-dtype bf16",
                 small_model(0), data, SAMPLES / cases[i].world, cases[i].sharding);
        if (!i) one = collect_one_rank(arguments);
        collect(arguments, 0, cases[i].world, &transport_threads);
        Difference d = difference_from(&one, small_model(0));
        double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
        snprintf(name, sizeof name,
                 "gradients reduced in bf16, dp-shard %d, %s: those of one rank that rounds each micro-batch's too",
                 cases[i].world, cases[i].sharding);
        CHECK(name, difference_allowed(&d, bound), "worst gradient %.1g, norm %.1g <= %.0e", d.error, d.norm, bound);
    }
    free(one.grads);
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
