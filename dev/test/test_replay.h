/* test_replay.h: the replay of all ranks' scripts: by hand, against what ranks do in a run, and with faults planted. */

// ---------------------------------------------------------------------------
// a run's own script, line by line

static Plan scripted; // whose scripts the ranks of a run are held against
static int64_t script_lines, script_differences;
static char script_difference[600];

static int same_line(const CommEvents *a, const CommEvent *x, const CommEvents *b, const CommEvent *y) {
    return x->is_wait == y->is_wait && x->slot == y->slot && x->count == y->count && x->peer == y->peer &&
           x->collective == y->collective && x->axis == y->axis && x->dtype == y->dtype &&
           !strcmp(script_text(a, x->name), script_text(b, y->name)) &&
           !strcmp(script_text(a, x->phase), script_text(b, y->phase));
}

static void script_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    NameTable names = ZERO;
    CommEvents own = ZERO;
    const CommEvents *dry_run = &scripted.scripts[scripted.script_of[rank]];
    for (int step = 1; step <= 2; step++) { // the second has what the first left behind
        comm_events_clear(&own, &names);
        o->trainer.parallel.comm.events = &own;
        train_step(&o->trainer, step);
        o->trainer.parallel.comm.events = NULL;
        int64_t differ = own.count != dry_run->count;
        for (int64_t i = 0; i < min_i64(own.count, dry_run->count); i++) {
            if (same_line(&own, &own.events[i], dry_run, &dry_run->events[i])) continue;
            Sentence t = {script_difference, sizeof script_difference, 0};
            if (!differ++)
                say(&t, "rank %d, line %d: ", rank, (int)i), say_script_line(&t, &own, &own.events[i]),
                    say(&t, ", walked "), say_script_line(&t, dry_run, &dry_run->events[i]);
        }
        int64_t mine[2] = {differ, own.count}, all[2 * 16];
        all_gather_now(&o->trainer.parallel.comm, AXIS_WORLD, "differences", mine, all, sizeof mine);
        for (int i = 0; i < j->mesh.world && rank == 0; i++)
            script_differences += all[2 * i], script_lines += all[2 * i + 1];
    }
    free(own.events);
    name_table_close(&names);
    close_rank(o);
}

/* Ranks that run write the scripts that were dry-run, and those fit each other. */
static void check_scripts(int process, int world, const char *options, const Transport *transport) {
    char arguments[1024], name[400], problem[2048] = "";
    Replay replay;
    const char *data = strstr(options, "--doc-mask") ? make_document_file("masked.tok", 6000, 16, 7)
                                                     : make_token_file("scripts.tok", 40000, 64, 0);
    snprintf(arguments, sizeof arguments, "--model %s --data %s --seq 32 --steps 2 --timeout 60 %s",
             mesh_model(strstr(options, "--deterministic") != NULL), data, options);
    Job *j = make_job(arguments, world, transport);
    script_lines = script_differences = 0, script_difference[0] = 0;
    plan_open(&scripted, j, DRY_RUN_ALL);
    int fits = plan_replay(&replay, &scripted, NULL, problem, sizeof problem, 0);
    replay_close(&replay);
    launch(j, process, script_body);
    plan_close(&scripted);
    end_job(j);
    snprintf(name, sizeof name, "%d ranks over %s, %s: events as walked, and they fit", world, transport->name,
             options);
    if (process == 0)
        CHECK(name, fits && !script_differences && script_lines > 0, "%" PRId64 " of %" PRId64 " differ %s%s",
              script_differences, script_lines, script_difference, problem);
}

static const struct {
    int world;
    const char *options;
} script_layouts[] = {
    {2, "--batch 1"},
    {2, "--batch 1 --tp 2"},
    {2, "--batch 1 --cp 2 --doc-mask"},
    {2, "--batch 1 --pp 2 --accum 3"},
    {2, "--batch 1 --pp 2 --accum 2 --deterministic"}, // tied
    {3, "--batch 1 --accum 2 --accumulate local"},
    {3, "--batch 1 --pp 3 --accum 5 --pp-light-ends"},
    {4, "--batch 1 --dp-replicate 2 --accum 2 --slots 3"},
    {4, "--batch 1 --sharding no_shard --accum 2"},
    {4, "--batch 1 --tp 2 --pp 2 --accum 2"},
    {4, "--batch 1 --cp 2 --dp-shard 2 --recompute full"},
    {4, "--batch 1 --pp 2 --accum 4 --pp-schedule interleaved"},
    {4, "--batch 2 --sharding shard_grad_op --reduce-dtype bf16"},
    {6, "--batch 1 --pp 3 --dp-shard 2 --accum 3 --pp-schedule interleaved --pp-light-ends"},
    {8, "--batch 1 --tp 2 --cp 2 --pp 2 --accum 2"},
    {8, "--batch 1 --tp 2 --cp 2 --pp 2 --accum 4 --pp-schedule interleaved --deterministic"},
    {8, "--batch 1 --tp 4 --pp 2 --accum 2 --sharding full_shard --accumulate sharded"},
    {8, "--batch 1 --cp 4 --dp-replicate 2 --recompute every:2"},
    {16, "--batch 1 --tp 2 --cp 2 --pp 2 --dp-shard 2 --accum 4 --pp-schedule interleaved"},
    {16, "--batch 1 --tp 2 --cp 2 --pp 2 --dp-replicate 2 --accum 2 --recompute selective --wrap size:10000"},
    {16, "--batch 1 --pp 8 --accum 8 --dp-shard 2"}};

static void test_scripts(int process, int world, const Transport *transport) {
    for (size_t i = 0; i < sizeof script_layouts / sizeof *script_layouts; i++)
        if (world ? script_layouts[i].world == world
                  : !CUDA_BUILD || (script_layouts[i].world >= 4 && script_layouts[i].world <= 8 && i % 2))
            check_scripts(process, script_layouts[i].world, script_layouts[i].options, transport);
}

// ---------------------------------------------------------------------------
// by hand

/* "rank clock" pairs of a replay of scripts made of words: `g:AXIS:COUNT` a gather, `s:PEER:COUNT` and `r:PEER:COUNT`
 * messages over pp, `wN` the wait for slot N, `cX` X seconds of arithmetic. */
typedef struct {
    CommEvents s;
    NameTable names;
} ByHand;

static void by_hand(ByHand *h, const char *words) {
    char text[1024];
    double computed = 0;
    snprintf(text, sizeof text, "%s", words);
    memset(h, 0, sizeof *h);
    comm_events_clear(&h->s, &h->names);
    for (char *at, *word = strtok_r(text, " ", &at); word; word = strtok_r(NULL, " ", &at)) {
        CommEvent line = ZERO;
        char axis[16] = "";
        int peer = -1;
        long count = 0;
        if (word[0] == 'c') {
            computed += atof(word + 1);
            continue;
        }
        line.compute_before = computed, computed = 0;
        line.phase = name_id(&h->names, "a test"), line.name = -1, line.peer = -1;
        if (word[0] == 'w') line.is_wait = 1, line.slot = (uint8_t)atoi(word + 1), h->s.slots_taken &= ~(1ull << line.slot);
        else {
            if (word[0] == 'g') sscanf(word, "g:%15[a-z_]:%ld", axis, &count);
            else sscanf(word + 1, ":%d:%ld", &peer, &count), strcpy(axis, "pp");
            for (int a = 0; a < AXES; a++) line.axis = strcmp(axis, axis_names[a]) ? line.axis : (uint8_t)a;
            line.collective = word[0] == 'g' ? ALL_GATHER : word[0] == 's' ? SEND : RECEIVE;
            line.count = count, line.peer = peer, line.dtype = DTYPE_BYTE,
            line.name = name_id(&h->names, strrchr(word, ':') + 1);
            line.slot = (uint8_t)__builtin_ctzll(~h->s.slots_taken), h->s.slots_taken |= 1ull << line.slot;
        }
        comm_events_add(&h->s, &line);
    }
    h->s.compute_after = computed;
}

/* Plays one script a rank; 1 second a byte. Returns the step's seconds; -1: they do not fit, and `problem` says why. */
static double play(Mesh mesh, const char *const *words, char *problem, size_t size) {
    enum { MOST = 8 };
    ByHand hands[MOST];
    const CommEvents *scripts[MOST];
    static ExchangeRate rates[AXES][COLLECTIVES];
    Replay r;
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++) rates[a][o].latency = 0, rates[a][o].bandwidth = 1;
    for (int i = 0; i < mesh.world; i++) by_hand(&hands[i], words[i]), scripts[i] = &hands[i].s;
    replay_open(&r, &mesh, scripts, &mesh, (const ExchangeRate(*)[COLLECTIVES])rates, problem, size);
    double seconds = replay_run(&r) ? r.seconds : -1;
    replay_close(&r);
    for (int i = 0; i < mesh.world; i++) free(hands[i].s.events), name_table_close(&hands[i].names);
    return seconds;
}

static void test_replay_by_hand(void) {
    const Mesh tp2 = {2, {2, 1, 1, 1, 1}}, pp2 = {2, {1, 1, 2, 1, 1}}, pp3 = {3, {1, 1, 3, 1, 1}},
               both = {4, {2, 2, 1, 1, 1}};
    static const struct {
        const char *name;
        int mesh;
        const char *words[4];
        double seconds;
        const char *problem[4];
    } cases[] = {
        {"the later member begins a gather, and all end with it",
         0,
         {"c3 g:tp:2 w0 c1", "c5 g:tp:2 c1 w0"},
         5 + 2 + 1,
         {0}},
        {"arithmetic hides an exchange", 0, {"g:tp:4 c10 w0", "g:tp:4 c10 w0"}, 10, {0}},
        {"a group's exchanges come one after the other", 0, {"g:tp:4 g:tp:5 w0 w1", "g:tp:4 g:tp:5 w0 w1"}, 9, {0}},
        {"those of two axes beside each other",
         3,
         {"g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1"},
         5,
         {0}},
        {"messages of a channel come one after the other, another channel's beside them",
         2,
         {"s:1:3 s:1:3 w0 w1", "r:0:3 r:0:3 s:2:5 w0 w1 w2", "r:1:5 w0"},
         6,
         {0}},
        {"a send is synchronous: it waits for its receive", 1, {"s:1:2 w0 c1", "c7 r:0:2 w0"}, 7 + 2 + 1, {0}},
        {"a pipeline of three fills and drains",
         2,
         {"c1 s:1:1 w0 c1 s:1:1 w0", "r:0:1 w0 c1 s:2:1 r:0:1 w1 c1 w0 s:2:1 w0", "r:1:1 w0 c1 r:1:1 w0 c1"},
         7,
         {0}},
        {"a count that differs is told with both",
         0,
         {"g:tp:4 w0", "g:tp:5 w0"},
         -1,
         {"exchange 1 over tp", "all_gather of '4' (4 x bytes)", "rank 1 (tp 1) starts all_gather of '5' (5 x bytes)",
          "in a test"}},
        {"two groups in opposite order on two ranks: the cycle is told",
         0,
         {"g:tp:4 w0 g:world:5 w0", "g:world:5 w0 g:tp:4 w0"},
         -1,
         {"2 of 2 ranks wait for ever",
          "rank 0 (tp 0) has started all_gather of '4' (4 x bytes) over tp in a test, to which rank 1 has not come",
          "rank 1 (tp 1) has started all_gather of '5'", "to which rank 0 has not come"}},
        {"… also where nobody waits before both are started",
         0,
         {"g:tp:4 g:world:5 w0 w1", "g:world:5 g:tp:4 w0 w1"},
         -1,
         {"2 of 2 ranks wait for ever", "rank 1 (tp 1) has started all_gather of '5'", "", ""}},
        {"… but not where there is no cycle",
         3,
         {"g:tp:4 w0 g:cp:5 w0", "g:tp:4 w0 g:cp:5 w0", "g:tp:4 w0 g:cp:5 w0", "g:cp:5 w0 g:tp:4 w0"},
         18,
         {0}},
        {"a missing receive",
         1,
         {"s:1:2 w0 s:1:3 w0", "r:0:2 w0"},
         -1,
         {"1 of 2 ranks wait for ever", "rank 0 (pp 0) has started send of '3'",
          "to which rank 1 does not come: its step has ended", ""}},
        {"a swapped pair of sends",
         1,
         {"s:1:3 s:1:2 w0 w1", "r:0:2 r:0:3 w0 w1"},
         -1,
         {"rank 0 (pp 0) has started send of '3'", "at its other end rank 1 (pp 1) has started receive of '2'", "",
          ""}},
        {"two that send to each other first",
         1,
         {"s:1:2 w0 r:1:2 w0", "s:0:2 w0 r:0:2 w0"},
         -1,
         {"2 of 2 ranks wait for ever", "rank 0 (pp 0) has started send", "rank 1 (pp 1) has started send",
          "to which rank 0 has not come"}},
        {"a member that does not come",
         0,
         {"g:tp:2 w0", "c1"},
         -1,
         {"1 of 2 ranks wait for ever", "rank 0 (tp 0) has started all_gather of '2'", "its step has ended", ""}},
    };
    const Mesh meshes[] = {tp2, pp2, pp3, both};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char problem[2048] = "", name[200];
        double seconds = play(meshes[cases[i].mesh], cases[i].words, problem, sizeof problem);
        int told = 1;
        for (int k = 0; k < 4 && cases[i].problem[k]; k++) told &= strstr(problem, cases[i].problem[k]) != NULL;
        snprintf(name, sizeof name, "replay: %s", cases[i].name);
        CHECK(name, seconds == cases[i].seconds && told && (seconds < 0) == (problem[0] != 0), "%g s, expected %g %s",
              seconds, cases[i].seconds, problem);
    }
}

// ---------------------------------------------------------------------------
// faults in the scripts of 16,384 ranks

static int64_t find_line(const CommEvents *s, int collective, int axis, int64_t number) {
    for (int64_t i = 0; i < s->count; i++)
        if (!s->events[i].is_wait && s->events[i].collective == collective && s->events[i].axis == axis && number-- == 0)
            return i;
    return -1;
}

static void drop_line(CommEvents *s, int64_t at) {
    memmove(&s->events[at], &s->events[at + 1], sizeof *s->events * (size_t)(--s->count - at));
}

/* A receive, and the wait for it. */
static void drop_receive(CommEvents *s, int64_t at) {
    int slot = s->events[at].slot;
    drop_line(s, at);
    while (!s->events[at].is_wait || s->events[at].slot != slot) at++;
    drop_line(s, at);
}

static void swap_lines(CommEvents *s, int64_t a, int64_t b) { // what is exchanged; places and slots stay
    CommEvent x = s->events[a], y = s->events[b];
    s->events[a] = y, s->events[a].slot = x.slot, s->events[a].compute_before = x.compute_before;
    s->events[b] = x, s->events[b].slot = y.slot, s->events[b].compute_before = y.compute_before;
}

static void test_replay_405b(void) {
    enum { ODD = 12345 };
    static const char *const faults[] = {"none", "an all_gather of another count", "a swapped pair of sends",
                                         "a missing receive", "two groups in opposite order"};
    static const char *const told[][3] = {
        {"", "", ""},
        {"of 128 members start all_gather", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) starts all_gather",
         "over fsdp in "},
        {"rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) ", "activations 1 to stage 1", "activations 0 to stage 1"},
        {"gradients 0 to stage 0", "gradients 1 to stage 0", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6)"},
        {"wait for ever", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) has started all_gather of 'keys and values'",
         "to which rank 12345 has not come"}};
    Plan p;
    Job *j = make_job("--plan --model llama3.1-405b --tp 8 --cp 16 --pp 16 --dp-shard 8 --seq 131072 --batch 1 --accum "
                      "16 --pp-light-ends",
                      16384, &transport_threads);
    plan_open(&p, j, DRY_RUN_PARTS); // others of the same part do the same: test_rank_classes
    for (int f = 0; f < 5; f++) {
        char problem[4096] = "", name[200];
        CommEvents *own = &p.scripts[p.script_of[ODD]], changed = *own;
        const CommEvents **scripts = (const CommEvents **)checked_malloc(sizeof *scripts * 16384);
        Replay r;
        changed.events = (CommEvent *)checked_malloc(sizeof *changed.events * (size_t)own->count);
        memcpy(changed.events, own->events, sizeof *changed.events * (size_t)own->count);
        if (f == 1) changed.events[find_line(own, ALL_GATHER, AXIS_FSDP, 3)].count++;
        if (f == 2) swap_lines(&changed, find_line(own, SEND, AXIS_PP, 0), find_line(own, SEND, AXIS_PP, 1));
        if (f == 3) drop_receive(&changed, find_line(own, RECEIVE, AXIS_PP, 0));
        if (f == 4)
            swap_lines(&changed, find_line(own, ALL_GATHER, AXIS_TP, 5), find_line(own, ALL_GATHER, AXIS_CP, 3));
        for (int i = 0; i < 16384; i++) scripts[i] = i == ODD && f ? &changed : &p.scripts[p.script_of[i]];
        replay_open(&r, &j->mesh, scripts, &j->mesh, NULL, problem, sizeof problem);
        int fits = replay_run(&r), says = 1;
        for (int k = 0; k < 3; k++) says &= strstr(problem, told[f][k]) != NULL;
        snprintf(name, sizeof name, "405B on 16,384 ranks replayed, planted on rank %d: %s", ODD, faults[f]);
        CHECK(name, fits == !f && says, "%s", fits ? "fits" : problem);
        replay_close(&r);
        free(changed.events);
        free(scripts);
    }
    plan_close(&p);
    end_job(j);
}

/* A layout's estimate, all ranks dry-run, or fewer that play for them. */
static Estimate estimate_by(const char *options, int world, DryRunKind kind, double *memory) {
    char arguments[512], problem[1024];
    Plan p;
    Replay r;
    snprintf(arguments, sizeof arguments, "--plan --cluster dev/clusters/h100-8.json %s", options);
    Job *j = make_job(arguments, world, &transport_threads);
    plan_open(&p, j, kind);
    int fits = plan_replay(&r, &p, &j->cluster, problem, sizeof problem, 0);
    Estimate e = estimate_of(&p, &j->cluster, &r, samples_per_step(&j->opt, &j->mesh) * j->opt.seq, j->opt.seq);
    if (!fits) e.step = NAN;
    *memory = memory_needed(&p, &j->cluster);
    replay_close(&r);
    plan_close(&p);
    cluster_close(&j->cluster);
    end_job(j);
    return e;
}

/* Ranks that do the same at the same time: one of them tells what all of them do, but for a row of the vocabulary. */
static void test_replay_of_few(void) {
    static const char *const layouts[] = {
        "--model llama3-8b --seq 4096 --batch 1 --tp 2 --cp 2 --pp 4 --accum 8",
        "--model llama3-8b --seq 2048 --batch 1 --tp 2 --cp 2 --pp 2 --dp-replicate 2 --accum 4 --pp-schedule "
        "interleaved --pp-chunks 4 --pp-light-ends",
        "--model llama3-8b --seq 2048 --batch 1 --tp 4 --accum 2 --recompute full",
        "--model llama3.2-1b --seq 2048 --batch 2 --accum 2 --sharding shard_grad_op"};
    for (int i = 0; i < 4; i++) {
        double memory[3];
        Estimate e[3];
        char name[300];
        for (int k = 0; k < 3; k++) e[k] = estimate_by(layouts[i], 32, (DryRunKind)k, &memory[k]);
        double off = fmax(off_by(e[DRY_RUN_STAGES].step, e[DRY_RUN_ALL].step),
                          off_by(e[DRY_RUN_PARTS].step, e[DRY_RUN_ALL].step)),
               waits = 0;
        for (int a = 0; a < AXES; a++)
            waits = fmax(waits, fabs(e[DRY_RUN_STAGES].waited[a] - e[DRY_RUN_ALL].waited[a]) / e[DRY_RUN_ALL].step);
        snprintf(name, sizeof name, "32 ranks, %s: one of each stage tells the step of all", layouts[i]);
        CHECK(name,
              off < 1e-6 && waits < 1e-6 && memory[DRY_RUN_STAGES] == memory[DRY_RUN_ALL] && e[DRY_RUN_ALL].step > 0,
              "%.6g, %.6g and %.6g s, waits off by %.1g of it", e[0].step, e[1].step, e[2].step, waits);
    }
}

/* The Llama 3 paper's Table 4 (arXiv 2407.21783), of 405B in bf16, by a cluster file of datasheets. Nothing is fitted;
 * the number of chunks is not in the paper. */
static void test_paper(void) {
    static const struct {
        const char *options;
        int world;
        double paper;
    } rows[] = {{"--dp-shard 64 --seq 8192 --accum 32", 8192, 430e12},
                {"--dp-shard 128 --seq 8192 --accum 16", 16384, 400e12},
                {"--cp 16 --dp-shard 8 --seq 131072 --accum 16", 16384, 380e12}};
    double have[3], full[3], memory;
    for (int i = 0; i < 3; i++) {
        char options[400];
        snprintf(
            options, sizeof options,
            "--model llama3.1-405b --tp 8 --pp 16 --batch 1 --pp-schedule interleaved --pp-chunks 8 --pp-light-ends %s",
            rows[i].options);
        Estimate e = estimate_by(options, rows[i].world, DRY_RUN_STAGES, &memory);
        have[i] = e.flops / e.step, full[i] = e.full / e.step;
    }
    double ratio = have[1] / have[0], want = rows[1].paper / rows[0].paper;
    CHECK("405B on 8,192 GPUs: the paper's TFLOP/s within 25 %", off_by(have[0], rows[0].paper) < 0.25,
          "%.0f, reported %.0f: %+.1f %%", have[0] / 1e12, rows[0].paper / 1e12, 100 * (have[0] / rows[0].paper - 1));
    CHECK("405B on 16,384 GPUs: the paper's TFLOP/s within 25 %", off_by(have[1], rows[1].paper) < 0.25,
          "%.0f, reported %.0f: %+.1f %%", have[1] / 1e12, rows[1].paper / 1e12, 100 * (have[1] / rows[1].paper - 1));
    CHECK("405B: twice the GPUs with half the micro-batches, the paper's ratio within 4 %", off_by(ratio, want) < 0.04,
          "%.3f, reported %.3f: %+.1f %%", ratio, want, 100 * (ratio / want - 1));
    CHECK("405B with 131,072 tokens: attention counted by its mask, the paper's TFLOP/s within 25 %",
          off_by(have[2], rows[2].paper) < 0.25 && have[2] < full[2],
          "%.0f by the mask, %.0f over all keys, reported %.0f: %+.1f and %+.1f %%", have[2] / 1e12, full[2] / 1e12,
          rows[2].paper / 1e12, 100 * (have[2] / rows[2].paper - 1), 100 * (full[2] / rows[2].paper - 1));
}

static int count_of(const char *text, const char *part) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) n++;
    return n;
}

/* plan.html: every step of the schedule is a stretch of its stage's row, every kind of ranks a bar. */
static void test_page(void) {
    char options[512], *text = NULL, what[40];
    size_t length;
    Trainer w;
    int steps = 1;
    snprintf(options, sizeof options,
             "--model tiny --tp 2 --pp 2 --accum 8 --pp-schedule interleaved --seq 128 --batch 2");
    Estimate e = estimate_with(make_cluster_file("page.json", 1e9, 1e9, 1e-5, 1e9, ""), options, 16, &w);
    FILE *f = open_memstream(&text, &length);
    page_write(f, "tiny & <more>", estimated_plan, &replayed, &estimated->cluster, &e, 1000);
    fclose(f);
    for (int stage = 0; stage < 2; stage++)
        for (int k = 0; k < 2; k++) {
            snprintf(what, sizeof what, "stage %d: %s,", stage, k ? "backward" : "forward");
            steps &= count_of(text, what) == 16;
        }
    int whole = strstr(text, "</html>") && !strstr(text, "nan") && !strstr(text, "inf\"") && !strstr(text, "<more>") &&
                count_of(text, "<svg") == count_of(text, "</svg>") &&
                count_of(text, "<rect") == count_of(text, "</rect>") + count_of(text, "/></svg>");
    CHECK("plan.html shows every step of every stage, and every kind of ranks",
          steps && whole && count_of(text, " GB</text>") == estimated_plan->count,
          "%d forwards of stage 0, %d backwards of stage 1, %d bars of %d, %d bytes",
          count_of(text, "stage 0: forward,"), count_of(text, "stage 1: backward,"), count_of(text, " GB</text>"),
          estimated_plan->count, (int)length);
    free(text);
}

/* A search among all layouts of 16 ranks: none by hand that fits is faster, and the first is what a plan of it says. */
static void test_search(void) {
    static const char *const by_hand[] = {"--tp 2 --dp-shard 8",
                                          "--pp 2 --dp-shard 8 --pp-schedule interleaved --pp-chunks 4",
                                          "--cp 2",
                                          "--dp-replicate 2",
                                          "--sharding full_shard --recompute full",
                                          "--tp 8 --pp 2",
                                          "--pp 4 --tp 4",
                                          "--sharding shard_grad_op --accumulate local",
                                          "--tp 2 --cp 2 --pp 2"};
    char options[512];
    Search *s = (Search *)checked_malloc(sizeof *s);
    Job *j =
        make_job("--plan --cluster dev/clusters/h100-8.json --search --model llama3-8b --seq 8192 --batch 1 --accum 8",
                 16, &transport_threads);
    search_run(s, j);
    double have = j->cluster.memory, best = s->best[0].e.step, memory, fastest = INFINITY;
    int sorted = s->count == BEST, tried = 0;
    for (int i = 0; i < s->count; i++)
        sorted &= s->best[i].memory <= have && (i == 0 || s->best[i - 1].e.step <= s->best[i].e.step);
    for (int i = 0; i < (int)(sizeof by_hand / sizeof *by_hand);
         i++) { // 128 sequences a step, by whatever accumulation
        int model = strstr(by_hand[i], "--tp 8")                                                                 ? 16
                    : strstr(by_hand[i], "--tp 4")                                                               ? 16
                    : strstr(by_hand[i], "--tp 2 --cp")                                                          ? 8
                    : strstr(by_hand[i], "--tp 2") || strstr(by_hand[i], "--cp") || strstr(by_hand[i], "--pp 2") ? 2
                                                                                                                 : 1;
        snprintf(options, sizeof options, "--model llama3-8b --seq 8192 --batch 1 --accum %d %s", 8 * model,
                 by_hand[i]);
        Estimate e = estimate_by(options, 16, DRY_RUN_ALL, &memory);
        if (memory <= have) tried++, fastest = fmin(fastest, e.step);
    }
    const Options *b = &s->best[0].opt;
    snprintf(options, sizeof options,
             "--model llama3-8b --seq 8192 --tp %d --cp %d --pp %d --dp-shard %d --dp-replicate %d --batch %d --accum "
             "%d --sharding %s --accumulate %s --recompute %s%s",
             b->tp, b->cp, b->pp, b->dp_shard, b->dp_replicate, b->batch, b->accum, b->sharding, b->accumulate,
             b->recompute, b->pp_light_ends ? " --pp-light-ends" : "");
    if (b->pp_chunks > 1)
        snprintf(options + strlen(options), sizeof options - strlen(options),
                 " --pp-schedule interleaved --pp-chunks %d", b->pp_chunks);
    Estimate again = estimate_by(options, 16, DRY_RUN_ALL, &memory);
    CHECK("--search: what it lists fits and is in order, no layout by hand that fits is faster, and a plan of the "
          "first says the same",
          sorted && tried > 3 && best <= fastest * (1 + 1e-9) && off_by(again.step, best) < 1e-6 &&
              off_by(memory, s->best[0].memory) < 1e-6,
          "%d of %d walked; %.4g s, by hand %.4g s of %d, planned %.4g s", s->dry_runs, s->tried, best, fastest, tried,
          again.step);
    free(s);
    cluster_close(&j->cluster);
    end_job(j);
}

/* Layouts that the traffic formula alone rules out would not have been listed. */
static void test_search_bounds(void) {
    Search *s[2];
    int equal = 1;
    for (int all = 0; all < 2; all++) {
        Job *j = make_job(
            "--plan --cluster dev/clusters/h100-8.json --search --model llama3.2-1b --seq 4096 --batch 2 --accum 4", 8,
            &transport_threads);
        s[all] = (Search *)checked_malloc(sizeof *s[all]);
        s[all]->all = all;
        search_run(s[all], j);
        cluster_close(&j->cluster);
        end_job(j);
    }
    for (int i = 0; i < BEST; i++)
        equal &= s[0]->best[i].e.step == s[1]->best[i].e.step && s[0]->best[i].memory == s[1]->best[i].memory;
    CHECK("--search: what the traffic formula rules out is not walked, and would not have been listed",
          equal && s[0]->count == BEST && s[1]->count == BEST && s[0]->dry_runs < s[1]->dry_runs,
          "%d and %d of %d walked", s[0]->dry_runs, s[1]->dry_runs, s[1]->tried);
    for (int all = 0; all < 2; all++) free(s[all]);
}

static void test_replay(void) {
    if (!CUDA_BUILD && FLOATX == DTYPE_F32) test_search_bounds();
    if (!CUDA_BUILD) test_page();
    if (!CUDA_BUILD && FLOATX == DTYPE_BF16) test_search();
    if (!CUDA_BUILD) test_replay_of_few();
    if (!CUDA_BUILD && FLOATX == DTYPE_BF16) test_paper();
    if (!CUDA_BUILD) test_replay_by_hand(), test_replay_405b();
    test_scripts(0, 0, &transport_threads);
}
