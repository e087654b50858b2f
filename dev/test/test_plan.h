/* test_plan.h: memory, FLOPs and traffic of a plan against its ranks' own dry runs, estimated step times against
 * arithmetic done by hand, and the timelines of plans.
 */
#include "../../programs/plan/alternatives.h"
#include "../../programs/plan/report.h"
#include "../../programs/plan/search.h"
#include "timeline.h"

/* Writes the cluster file of a machine with one rate for matmuls and attention (FLOP/s), one for memory (bytes/s), and
 * one latency and bandwidth for every collective. `more`: additional keys. */
static const char *make_cluster_file(const char *name, double rate, double memory, double latency, double bandwidth,
                                     const char *more) {
    static const char *const products[] = {"linear_forward", "linear_backward_weight", "linear_backward_input"},
                             *const attention[] = {"attention_forward", "attention_backward"};
    static const char *const dtypes[] = {"fp32", "bf16"}, *const exchanges[] = {"all_gather", "reduce_scatter"};
    const char *path = scratch_path(name);
    FILE *f = fopen(path, "w");
    fprintf(f,
            "{\"name\":\"by "
            "hand\",\"rates_of\":\"device\",\"ranks_per_host\":2,\"memory_bytes_per_s\":%.17g,%s\n\"matmuls\":[",
            memory, more);
    for (int i = 0; i < 6; i++)
        fprintf(f, "%s{\"dtype\":\"%s\",\"op\":\"%s\",\"M\":64,\"N\":64,\"K\":64,\"flops_per_s\":%.17g}",
                i ? ",\n" : "", dtypes[i / 3], products[i % 3], rate);
    fprintf(f, "],\n\"attention\":[");
    for (int i = 0; i < 4; i++)
        fprintf(
            f, "%s{\"dtype\":\"%s\",\"op\":\"%s\",\"B\":1,\"T\":64,\"NH\":4,\"NKV\":2,\"HD\":64,\"flops_per_s\":%.17g}",
            i ? ",\n" : "", dtypes[i / 2], attention[i % 2], rate);
    fprintf(f, "],\n\"collectives\":[");
    for (int i = 0; i < 2; i++)
        fprintf(f,
                "%s{\"transport\":\"threads\",\"ranks\":2,\"hosts\":1,\"op\":\"%s\",\"latency_s\":%.17g,\"bytes_per_"
                "s\":%.17g}",
                i ? ",\n" : "", exchanges[i], latency, bandwidth);
    fprintf(f, "]}\n");
    fclose(f);
    return path;
}

static struct { // the last estimate; stays open, since its dry runs point into it
    Job *job;
    Plan plan;
    EventLists events;
    Simulation simulation;
    Cluster cluster;
} estimated;

static int estimates_gpus; // 1: streams run side by side; 0: a rank does one thing after the other

/* Estimates a step of `world` ranks by the cluster file at `path`. `dry_run`: takes that of rank 0. */
static Estimate estimate_with(const char *path, const char *options, int world, Trainer *dry_run) {
    char arguments[1024], problem[1024];
    snprintf(arguments, sizeof arguments, "--plan --cluster %s %s", path, options);
    Job *j = make_job(arguments, world, &transport_threads);
    estimated.job = j;
    cluster_open(&estimated.cluster, path, &j->mesh, j->run.threads, option_choice(&j->run, "transport"),
                 transport_sums(&j->run));
    estimated.cluster.rates.times.has_streams = estimates_gpus && !CUDA_BUILD;
    j->op_times = &estimated.cluster.rates.times;
    plan_dry_run(&estimated.plan, j, DRY_RUN_ALL, &estimated.events);
    int fits = plan_simulate(&estimated.simulation, &estimated.plan, &estimated.events, &estimated.cluster, 1, problem,
                             sizeof problem);
    Estimate e = estimate_of(&estimated.plan, &estimated.events, &estimated.cluster, &estimated.simulation, j);
    if (!fits) e.step_seconds = NAN;
    *dry_run = *estimated.plan.classes[0].trainer;
    return e;
}

/* Tokens per second of the last estimate, if a step took `seconds`. */
static double estimated_tokens(double seconds) {
    const Job *j = estimated.job;
    return (double)(samples_per_step(&j->run, &j->mesh) * j->run.seq) / seconds;
}

static double off_by(double have, double want) { return fabs(have / want - 1); }

static void test_estimate(void) {
    Trainer w;
    const double R = 3e9, free_of_cost = 1e30;
    Estimate e = estimate_with(make_cluster_file("rate.json", R, free_of_cost, 0, free_of_cost, ""),
                               "--model tiny --accum 2", 1, &w);
    double want = device_flops(&w.parallel.dev, 0) / R;
    CHECK("with one rate of matmuls and no other cost a step takes FLOPs / rate",
          off_by(e.step_seconds, want) < 1e-9 && exposed_seconds(&e) == 0 && off_by(e.mfu, 1) < 1e-9 &&
              off_by(e.tokens_per_second, estimated_tokens(want)) < 1e-9,
          "%.9g s and %.9g s, %g s of waits, %.9g of the peak", e.step_seconds, want, exposed_seconds(&e), e.mfu);

    e = estimate_with(make_cluster_file("memory.json", free_of_cost, 5e9, 0, free_of_cost, ""), "--model tiny", 1, &w);
    want = 0;
    for (int i = 0; i < OP_COUNT; i++) want += w.parallel.dev.rec.ops[i].bytes / 5e9;
    CHECK("with one rate of memory and no other cost a step takes bytes / rate",
          off_by(e.step_seconds, want) < 1e-9 && off_by(e.compute, want) < 1e-9, "%.9g s and %.9g s", e.step_seconds,
          want);
}

/* Communication that takes time, with arithmetic that takes none and with arithmetic that hides it. */
static void test_estimated_communication(void) {
    Trainer w;
    const double free_of_cost = 1e30, latency = 1e-5, bandwidth = 2e9;
    const char *line = make_cluster_file("line.json", free_of_cost, free_of_cost, latency, bandwidth, "");
    Traffic expected[AXES][COLLECTIVES], all = {0, 0};
    Estimate e = estimate_with(line, "--model tiny --accum 3 --slots 4", 2, &w);
    expected_traffic(expected, &w.job->config, w.parallel.mesh.world, w.parallel.rank, &w.job->run, sizeof(StepReport));
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        all.calls += expected[i / COLLECTIVES][i % COLLECTIVES].calls;
        all.bytes += expected[i / COLLECTIVES][i % COLLECTIVES].bytes;
    }
    double want = (double)all.calls * latency + (double)all.bytes / bandwidth;
    CHECK("without arithmetic, communication takes calls x latency + bytes / bandwidth, all of it exposed",
          off_by(e.step_seconds, want) < 1e-9 && off_by(exposed_seconds(&e), want) < 1e-9,
          "%.9g s and %.9g s, of which %.9g s of waits", e.step_seconds, want, exposed_seconds(&e));

    // Every block computes longer than its collectives take: only the first all-gathers and the last reductions are
    // exposed, because nothing computes at the same time.
    double arithmetic = 0;
    for (estimates_gpus = 0; estimates_gpus <= !CUDA_BUILD; estimates_gpus++) {
        e = estimate_with(make_cluster_file("hidden.json", 1e9, free_of_cost, latency, bandwidth, ""), "--model tiny",
                          2, &w);
        double embed = (double)w.parallel.fsdp.units[0].shard_size, block = (double)w.parallel.fsdp.units[1].shard_size;
        double bytes = (embed + block) * (sizeof(floatX) + sizeof(float)) + sizeof(StepReport);
        want = 5 * latency + bytes / bandwidth;
        arithmetic = device_flops(&w.parallel.dev, 0) / 1e9;
        double fsdp = e.communication[AXIS_FSDP];
        CHECK(estimates_gpus
                  ? "GPUs: no communication of fsdp is exposed between the first two all-gathers and the last two "
                    "reductions"
                  : "arithmetic hides communication, except the first two all-gathers, the last two reductions "
                    "and the report",
              off_by(exposed_seconds(&e), want) < 1e-6 && off_by(e.step_seconds, arithmetic + want) < 1e-9 &&
                  fsdp > 2 * want,
              "%.9g s and %.9g s of waits, of %.4g s of communication; step %.9g s and %.9g s", exposed_seconds(&e),
              want, fsdp, e.step_seconds, arithmetic + want);
    }
    estimates_gpus = 0;

    e = estimate_with(make_cluster_file("slow.json", 1e9, free_of_cost, latency, 1e5, ""), "--model tiny", 2, &w);
    double lane = e.communication[AXIS_FSDP];
    CHECK("communication longer than arithmetic: the step takes at least as long, and is arithmetic + waits",
          e.step_seconds >= lane && e.step_seconds < lane + arithmetic &&
              off_by(e.step_seconds, e.compute + exposed_seconds(&e)) < 1e-9,
          "step %.6g s, communication %.6g s, arithmetic %.6g s, waits %.6g s", e.step_seconds, lane, e.compute,
          exposed_seconds(&e));
}

static void test_rates(void) {
    Trainer w;
    const double free_of_cost = 1e30, latency = 1e-5, bandwidth = 2e9;
    CollectiveRate curve = {0, 0, 2, {100, 10000}, {1, 4}, ""};
    CHECK("between measured points seconds are interpolated in logarithms; above them the bandwidth is that of "
          "the last",
          off_by(collective_seconds(&curve, 1000), 2) < 1e-12 && collective_seconds(&curve, 10) == 1 &&
              off_by(collective_seconds(&curve, 20000), 8) < 1e-12,
          "%g, %g, %g s", collective_seconds(&curve, 1000), collective_seconds(&curve, 10),
          collective_seconds(&curve, 20000));
    OpRate shapes[] = {
        {OP_LINEAR_FORWARD, 1e6, 10, 1e9}, {OP_LINEAR_FORWARD, 1e9, 10, 2e9}, {OP_LINEAR_FORWARD, 1e9, 1000, 4e9}};
    const OpRates rates = {{op_seconds, 0}, shapes, 3, 1e30};
    CHECK("an op has the rate of the shape nearest in FLOPs and FLOPs per byte",
          off_by(op_seconds(&rates.times, OP_LINEAR_FORWARD, 2e6, 2e5), 2e6 / 1e9) < 1e-12 &&
              off_by(op_seconds(&rates.times, OP_LINEAR_FORWARD, 2e8, 2e7), 2e8 / 2e9) < 1e-12 &&
              off_by(op_seconds(&rates.times, OP_LINEAR_FORWARD, 2e8, 3e5), 2e8 / 4e9) < 1e-12,
          "%s", "three shapes");

    // 16 ranks, 2 per host: an all-gather uses both links of a host; of an all-to-all, 14 of 15 parts use one's own
    const char *links = make_cluster_file("links.json", 1e9, free_of_cost, latency, bandwidth,
                                          "\"links\":{\"within_host\":{\"latency_s\":1e-6,\"bytes_per_s\":8e10},"
                                          "\"between_hosts\":{\"latency_s\":1e-5,\"bytes_per_s\":1e10}},");
    estimate_with(links, "--model tiny", 16, &w);
    const CollectiveRate *gather = &estimated.cluster.collectives[AXIS_FSDP][ALL_GATHER],
                         *scatter = &estimated.cluster.collectives[AXIS_FSDP][REDUCE_SCATTER];
    CHECK("links: an all-gather uses all links of a host, an all-to-all one per rank",
          off_by(gather->bandwidth, 2e10) < 1e-12 && off_by(scatter->bandwidth, 15.0 / 14 * 1e10) < 1e-12 &&
              off_by(gather->latency, 1e-6 + 3e-5) < 1e-12,
          "%.4g and %.4g bytes/s, latency %.3g s", gather->bandwidth, scatter->bandwidth, gather->latency);
    estimate_with(links, "--model tiny --transport nccl --deterministic", 16, &w);
    double deterministic = scatter->bandwidth;
    estimate_with(links, "--model tiny --transport nccl", 16, &w);
    const CollectiveRate *pieces = &estimated.cluster.collectives[AXIS_FSDP][ALL_TO_ALL];
    CHECK("links: NCCL's reduce-scatter is as fast as an all-gather, with --deterministic as an all-to-all",
          scatter->bandwidth == gather->bandwidth && deterministic == pieces->bandwidth &&
              off_by(pieces->bandwidth, 15.0 / 14 * 1e10) < 1e-12,
          "%.4g bytes/s, with --deterministic %.4g", scatter->bandwidth, deterministic);
    estimate_with(links, "--model llama3.2-1b --transport nccl --tp 4", 16, &w);
    scatter = &estimated.cluster.collectives[AXIS_TP][REDUCE_SCATTER];
    CHECK("links: over tp the program adds by itself, so a reduce-scatter is an all-to-all over NCCL, too",
          off_by(scatter->bandwidth, 3.0 / 2 * 1e10) < 1e-12, "%.4g bytes/s", scatter->bandwidth);
}

// ---------------------------------------------------------------------------
// ranks that are alike

/* With data parallelism alone, all ranks have the same memory, FLOPs and traffic. */
static void test_ranks_alike(void) {
    static const char *const layouts[] = {"--accum 3", "--dp-replicate 2 --accumulate local --accum 2 --recompute full",
                                          "--dp-replicate 3 --sharding no_shard --wrap size:2000000",
                                          "--sharding shard_grad_op --reduce-dtype bf16"};
    for (int i = 0; i < 4; i++) {
        char arguments[256], name[300];
        static Trainer first, other;
        int world = i % 2 ? 8 : 6, differ = 0;
        snprintf(arguments, sizeof arguments, "--plan --model tiny --vocab-size 4099 %s", layouts[i]);
        Job *j = make_job(arguments, world, &transport_threads);
        dry_run_open(&first, j, 0, NULL);
        for (int rank = 1; rank < world; rank++) {
            dry_run_open(&other, j, rank, NULL);
            for (int c = 0; c < MEM_CATEGORIES; c++)
                differ += first.parallel.dev.arenas[c].peak != other.parallel.dev.arenas[c].peak;
            differ += memcmp(first.parallel.comm.traffic_started, other.parallel.comm.traffic_started,
                             sizeof first.parallel.comm.traffic_started) != 0 ||
                      device_flops(&first.parallel.dev, 0) != device_flops(&other.parallel.dev, 0) ||
                      device_flops(&first.parallel.dev, 1) != device_flops(&other.parallel.dev, 1);
            trainer_close(&other);
        }
        snprintf(name, sizeof name, "%d ranks, %s: all ranks have the same memory, FLOPs and traffic", world,
                 layouts[i]);
        CHECK(name, !differ && first.parallel.dev.rec.peak == device_peak(&first.parallel.dev),
              "%d differences; %zu bytes at the fullest moment, %zu in arenas", differ, first.parallel.dev.rec.peak,
              device_peak(&first.parallel.dev));
        trainer_close(&first);
        end_job(j);
    }
}

/* What plan.json says of a rank: the class that lists it, its peak, its FLOPs; NULL unless exactly one class does. */
static const cJSON *class_in_json(const cJSON *plan, int rank) {
    const cJSON *found = NULL, *c, *r;
    int listed = 0;
    cJSON_ArrayForEach(c, cJSON_GetObjectItemCaseSensitive(plan, "rank_classes"))
        cJSON_ArrayForEach(r, cJSON_GetObjectItemCaseSensitive(c, "ranks")) {
        if ((int)cJSON_GetNumberValue(r) != rank) continue;
        found = c;
        listed++;
    }
    return listed == 1 ? found : NULL;
}

/* Differences between a rank's own dry run and traffic formula and its class in the plan, in memory and as JSON. */
static int differs_from_class(const Plan *p, const cJSON *json, Job *j, const Trainer *own) {
    const RankClass *c = &p->classes[p->class_of[own->parallel.rank]];
    const cJSON *said = class_in_json(json, own->parallel.rank);
    Traffic expected[AXES][COLLECTIVES];
    expected_traffic(expected, &j->config, j->mesh.world, own->parallel.rank, &j->run, sizeof(StepReport));
    int differ = memcmp(expected, c->traffic[EXPECTED], sizeof expected) != 0 ||
                 memcmp(expected, own->parallel.comm.traffic_started, sizeof expected) != 0 ||
                 memcmp(expected, c->traffic[DRY_RUN], sizeof expected) != 0;
    for (int m = 0; m < MEM_CATEGORIES; m++) differ += own->parallel.dev.arenas[m].peak != c->dry_run->arenas[m].peak;
    differ += device_flops(&own->parallel.dev, 0) != device_flops(c->dry_run, 0) ||
              device_flops(&own->parallel.dev, 1) != device_flops(c->dry_run, 1);
    differ += !said || (size_t)cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(said, "peak")) !=
                           device_peak(&own->parallel.dev);
    differ +=
        !said || cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(said, "flops"),
                                                                       "total")) != device_flops(&own->parallel.dev, 0);
    return differ;
}

/* Pairs of ranks that a plan of parts takes to be alike or different, and a dry run of every rank does not. */
static int differs_from_every_rank(Job *j, Plan *plan, int ranks) {
    Plan every;
    EventLists of_parts, of_all;
    int differ = 0;
    plan_dry_run(plan, j, DRY_RUN_SHARDS, &of_parts);
    plan_dry_run(&every, j, DRY_RUN_ALL, &of_all);
    for (int a = 0; a < ranks; a++)
        for (int b = 0; b < a; b++)
            differ += (of_all.list_of[a] == of_all.list_of[b]) != (of_parts.list_of[a] == of_parts.list_of[b]);
    differ += memcmp(plan->class_of, every.class_of, sizeof(int) * (size_t)ranks) != 0;
    plan_close(&every);
    event_lists_close(&of_parts);
    event_lists_close(&of_all);
    return differ;
}

static cJSON *plan_as_json(Plan *plan) {
    FILE *f = fopen(scratch_path("classes.json"), "w");
    json_write_line(f, plan_json(plan, 1, NULL));
    fclose(f);
    char *text = read_text_file(scratch_path("classes.json"));
    cJSON *json = cJSON_Parse(text);
    free(text);
    return json;
}

/* Pipeline stages differ, and tensor-parallel ranks by one row: each rank's plan must be that of its own dry run. */
static void test_rank_classes(void) {
    static const struct {
        const char *options;
        int odd /* sizes that 2 does not divide; 2: and tied */, classes;
    } meshes[] = {
        {"--tp 2 --cp 2 --pp 2 --dp-shard 2 --accum 4", 1, 4},
        {"--tp 2 --cp 2 --pp 2 --dp-shard 2 --accum 4 --pp-schedule interleaved --pp-light-ends --recompute every:2 "
         "--doc-mask",
         2, 4},
        {"--tp 2 --cp 2 --pp 2 --dp-replicate 2 --accum 4 --sharding full_shard --accumulate sharded", 0, 2},
        {"--tp 2 --pp 4 --dp-shard 2 --accum 2", 0,
         3}, // two micro-batches: of the two stages between as many are alive
        {"--tp 2 --pp 4 --dp-shard 2 --accum 4", 0, 4},    // and here they differ in memory alone
        {"--tp 2 --pp 8 --pp-light-ends --accum 8", 0, 8}, // the first stage has the embedding alone, the last the head
        {"--tp 2 --cp 2 --dp-shard 2 --dp-replicate 2 --sharding no_shard", 1, 2},
        {"--tp 2 --cp 2 --dp-shard 4", 0, 1},
        {"--tp 2 --dp-shard 8 --optimizer muon", 0, 2}, // 6 blocks for 8 ranks: two of them own none
        {"--tp 2 --cp 2 --pp 2 --dp-replicate 2 --accum 4 --sharding full_shard --optimizer muon", 0, 4},
    };
    for (int i = 0; i < (int)(sizeof meshes / sizeof *meshes); i++) {
        enum { RANKS = 16 };
        char arguments[1024], name[400];
        static Trainer own;
        Plan plan;
        int odd = meshes[i].odd;
        int64_t owned = 0;
        snprintf(arguments, sizeof arguments,
                 "--plan --model %s --seq 32 --batch 1 --reduce-dtype bf16 --deterministic %s",
                 odd ? mesh_model(odd == 2) : "tiny", meshes[i].options);
        Job *j = make_job(arguments, RANKS, &transport_threads);
        int differ = differs_from_every_rank(j, &plan, RANKS);
        cJSON *json = plan_as_json(&plan);
        for (int rank = 0, at; rank < RANKS; rank++) {
            ShardPiece piece;
            dry_run_open(&own, j, rank, NULL);
            differ += differs_from_class(&plan, json, j, &own);
            for (at = 0; next_unique_piece(&own.parallel.fsdp, &at, &piece);) owned += piece.count;
            trainer_close(&own);
        }
        snprintf(name, sizeof name, "16 ranks, %s: the plan of each rank is that of its own dry run",
                 meshes[i].options);
        CHECK(name, !differ && plan.count == meshes[i].classes && owned == j->table.num_parameters,
              "%d differences; %d kinds of ranks, expected %d; %" PRId64 " parameters owned of %" PRId64, differ,
              plan.count, meshes[i].classes, owned, j->table.num_parameters);
        cJSON_Delete(json);
        plan_close(&plan);
        end_job(j);
    }
}

/* Activation memory of tiny, counted by hand: what each --recompute keeps of a block, and one set of what blocks share.
 */
static void test_recompute_memory(void) {
    static const char *const ways[] = {"none", "selective", "full", "every:2", "every:1"};
    enum { N = 8 * 256, C = 256, F = 768, NH = 4, QKV = 8 * 64, L = 6, X = sizeof(floatX) };
    const int64_t input = N * C * X, products = N * (QKV + C + C + 2 * F) * X + 4 * N * NH,
                  rest = N * (2 * C + F) * X + 8 * N;
    const int64_t want[] = {L * (input + products + rest), L * (input + products) + rest, L * input + products + rest,
                            L * input + (L / 2 + 1) * (products + rest), L * input + products + rest};
    int64_t none = 0;
    for (int i = 0; i < 5; i++) {
        char arguments[128], name[200];
        static Trainer w;
        snprintf(arguments, sizeof arguments, "--plan --model tiny --recompute %s", ways[i]);
        Job *j = make_job(arguments, 1, &transport_threads);
        dry_run_open(&w, j, 0, NULL);
        int64_t have = (int64_t)w.parallel.dev.arenas[MEM_ACTIVATIONS].peak;
        if (i == 0) none = have;
        snprintf(name, sizeof name, "--recompute %s: activations as counted by hand", ways[i]);
        CHECK(name, none - have == want[0] - want[i],
              "%" PRId64 " bytes in all, %" PRId64 " less than without; by hand %" PRId64 " less", have, none - have,
              want[0] - want[i]);
        trainer_close(&w);
        end_job(j);
    }
}

/* Eight ranks on two hosts, placed host by host and alternately. */
static void test_hosts(void) {
    Mesh mesh = mesh_of(8, 4, 2);
    int colours[8 * AXES], one[8], alternate[8], key;
    for (int r = 0; r < 8; r++) {
        one[r] = r / 4;
        alternate[r] = r % 2;
        for (int a = 0; a < AXES; a++) mesh_group(&mesh, r, (Axis)a, &colours[r * AXES + a], &key);
    }
    int within = groups_across_hosts(&mesh, colours, AXIS_FSDP, one),
        across = groups_across_hosts(&mesh, colours, AXIS_DP_REPLICATE, one),
        mixed = groups_across_hosts(&mesh, colours, AXIS_FSDP, alternate);
    CHECK("groups that span hosts are counted",
          !within && across == 4 && mixed == 2 && !groups_across_hosts(&mesh, colours, AXIS_DP_REPLICATE, alternate),
          "fsdp %d, dp_replicate %d; alternately fsdp %d", within, across, mixed);
}

/* Each alternative has the options that its text names, and all others of the plan. */
static void test_alternatives(void) {
    Alternatives a;
    Job *j = make_job("--model tiny --plan --ranks 8 --pp 2 --pp-chunks 2 --pp-schedule interleaved --accum 4 "
                      "--batch 2 --lora-rank 4",
                      8, &transport_threads);
    int wrong = 0, named = 0;
    alternatives_open(&a, j, NULL);
    for (int i = 0; i < a.count; i++) {
        Layout *c = &a.list[i];
        char words[sizeof c->change], value[64], planned[64];
        RunSettings said = a.base.run;
        snprintf(words, sizeof words, "%s", c->change);
        for (char *name = strtok(words, " "), *word; name; name = strtok(NULL, " ")) {
            word = strtok(NULL, " ");
            option_set(&said, option_find(name + 2), name, strdup(word));
            named++;
        }
        if (strstr(c->change, "1f1b")) said.pp_chunks = 1;
        for (int r = 0; r < OPTION_ROWS; r++) {
            option_as_text(&said, &option_rows[r], value, sizeof value);
            option_as_text(&c->run, &option_rows[r], planned, sizeof planned);
            wrong += option_rows[r].kind != OPT_GROUP && strcmp(value, planned) != 0;
        }
    }
    free(a.list);
    CHECK("an alternative has the options that it names, and all others of the plan",
          a.count > 9 && named > 9 && !wrong, "%d alternatives, %d options, %d wrong", a.count, named, wrong);
    end_job(j);
}

static void test_plan(void) {
    test_hosts();
    test_alternatives();
    test_ranks_alike();
    test_rank_classes();
    test_recompute_memory();
    test_estimate();
    test_estimated_communication();
    test_rates();
    char arguments[1024], path[256];
    snprintf(path, sizeof path, "%s/planned.json", scratch_dir);
    snprintf(arguments, sizeof arguments, "--model tiny --accum 2 --tp 2 --pp 2 --sharding full_shard --trace %s",
             path);
    for (estimates_gpus = 0; estimates_gpus < 2; estimates_gpus++) {
        Trainer w;
        char name[160];
        Estimate e = estimate_with(make_cluster_file("trace.json", 1e9, 1e9, 1e-5, 1e7, ""), arguments, 8, &w);
        write_simulated_trace(estimated.job, &estimated.simulation);
        TraceFound t = read_trace(path);
        int ops = 0;
        for (int i = 0; i < OP_COUNT; i++) ops += (int)w.parallel.dev.rec.ops[i].calls;
        snprintf(name, sizeof name,
                 "the estimated timeline of %s has every op of rank 0 and the collectives of both stages, and no lane "
                 "overlaps itself",
                 estimates_gpus ? "GPUs" : "CPUs");
        CHECK(name,
              t.valid && t.ranks == 2 && t.ops == ops && t.overlaps == 0 && t.steps == 2 && t.waits > 0 &&
                  exposed_seconds(&e) > 0 &&
                  t.fsdp == 2 * (int)(w.parallel.comm.traffic_started[AXIS_FSDP][ALL_GATHER].calls +
                                      w.parallel.comm.traffic_started[AXIS_FSDP][REDUCE_SCATTER].calls),
              "%d ranks, %d ops of %d, %d collectives, %d overlap", t.ranks, t.ops, ops, t.fsdp, t.overlaps);
        trainer_close(&w);
    }
    estimates_gpus = 0;
}
