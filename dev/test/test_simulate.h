/* test_simulate.h: the simulation of all ranks: on lists of events written by hand, against the events of a real run,
 * and with faults planted; estimates against the Llama 3 paper; the search.
 */

// ---------------------------------------------------------------------------
// the events of a real run, one by one

static EventLists dry_run_events; // of all ranks; the run's events are compared with these
static int64_t events_compared, events_differing;
static char first_difference[600];

static int same_event(const CommEvents *a, const CommEvent *x, const CommEvents *b, const CommEvent *y) {
    return x->is_wait == y->is_wait && x->slot == y->slot && x->count == y->count && x->peer == y->peer &&
           x->collective == y->collective && x->axis == y->axis && x->dtype == y->dtype &&
           !strcmp(event_name(a, x->name), event_name(b, y->name)) &&
           !strcmp(event_name(a, x->phase), event_name(b, y->phase));
}

static int64_t count_differences(int rank, const CommEvents *run, const CommEvents *dry_run) {
    int64_t differences = run->count != dry_run->count;
    for (int64_t i = 0; i < min_i64(run->count, dry_run->count); i++) {
        if (same_event(run, &run->events[i], dry_run, &dry_run->events[i]) || differences++) continue;
        Sentence t = {first_difference, sizeof first_difference, 0};
        say(&t, "rank %d, event %d: ", rank, (int)i);
        say_event(&t, run, &run->events[i]);
        say(&t, "; dry run: ");
        say_event(&t, dry_run, &dry_run->events[i]);
    }
    return differences;
}

static void record_events_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    NameTable names = ZERO;
    CommEvents run = ZERO;
    for (int step = 1; step <= 2; step++) { // the second step starts with what the first left behind
        comm_events_clear(&run, &names);
        o->trainer.parallel.comm.recorder = &run.recorder;
        train_step(&o->trainer, step);
        o->trainer.parallel.comm.recorder = NULL;
        const CommEvents *dry_run = &dry_run_events.lists[dry_run_events.list_of[rank]];
        int64_t mine[2] = {count_differences(rank, &run, dry_run), run.count}, all[2 * 16];
        all_gather_now(&o->trainer.parallel.comm, AXIS_WORLD, "differences", mine, all, sizeof mine);
        for (int i = 0; i < j->mesh.world && rank == 0; i++) {
            events_differing += all[2 * i];
            events_compared += all[2 * i + 1];
        }
    }
    free(run.events);
    name_table_close(&names);
    close_rank(o);
}

static double one_second(const OpTimes *times, OpKind op, double flops, double bytes) {
    (void)times;
    (void)op;
    (void)flops;
    (void)bytes;
    return 1;
}

/* How many blocks' backward waits for weights whose all-gather started after the last op. */
static int late_all_gathers(Job *j, int rank) {
    static const OpTimes of_each_op = {one_second, 0};
    Trainer w;
    NameTable names = ZERO;
    CommEvents e = ZERO;
    double computed = 0, started_at[COMM_EVENT_SLOTS] = {0};
    int late = 0;
    comm_events_clear(&e, &names);
    j->op_times = &of_each_op;
    dry_run_open(&w, j, rank, &e.recorder);
    for (int64_t i = 0; i < e.count; i++) {
        const CommEvent *event = &e.events[i];
        computed += event->compute_before;
        if (!event->is_wait) started_at[event->slot] = computed;
        else
            late += event->axis == AXIS_FSDP && event->collective == ALL_GATHER &&
                    started_at[event->slot] == computed &&
                    !strncmp(event_name(&e, event->phase), "backward of model.layers", 24);
    }
    trainer_close(&w);
    free(e.events);
    name_table_close(&names);
    return late;
}

/* A stage without the loss has nothing to compute while its last unit is all-gathered; all others are prefetched. */
static void test_backward_prefetch(void) {
    static const struct {
        const char *options;
        int ranks, accum, stages; // of the whole pipeline
    } layouts[] = {{"", 2, 2, 1},
                   {"--pp 2", 4, 2, 2},
                   {"--pp 2 --pp-schedule interleaved --pp-chunks 2", 4, 4, 4},
                   {"--pp 2 --slots 3", 4, 2, 2}};
    for (int i = 0; i < 4; i++) {
        char arguments[300], name[400];
        int late = 0, pp = layouts[i].stages > 1 ? 2 : 1, replicas = layouts[i].ranks / pp;
        int expected = replicas * layouts[i].accum * (layouts[i].stages - 1);
        snprintf(arguments, sizeof arguments,
                 "--plan --model tiny --seq 64 --sharding full_shard --ranks %d --accum %d %s", layouts[i].ranks,
                 layouts[i].accum, layouts[i].options);
        Job *j = make_job(arguments, layouts[i].ranks, &transport_threads);
        for (int rank = 0; rank < layouts[i].ranks; rank++) late += late_all_gathers(j, rank);
        snprintf(name, sizeof name, "%d stages %s: backward prefetches all units of a stage but its last",
                 layouts[i].stages, layouts[i].options);
        CHECK(name, late == expected, "%d all-gathers start just before they are waited for, expected %d", late,
              expected);
        end_job(j);
    }
}

/* A run has the events of the dry run, and the ranks fit together. */
static void check_events(int process, int world, const char *options, const Transport *transport) {
    char arguments[1024], name[400], problem[2048] = "";
    Plan plan;
    Simulation simulation;
    const char *data = strstr(options, "--doc-mask") ? make_document_file("masked.tok", 6000, 16, 7)
                                                     : make_token_file("scripts.tok", 40000, 64, 0);
    snprintf(arguments, sizeof arguments, "--model %s --data %s --seq 32 --steps 2 --timeout 60 %s",
             mesh_model(strstr(options, "--deterministic") != NULL), data, options);
    Job *j = make_job(arguments, world, transport);
    events_compared = 0;
    events_differing = 0;
    first_difference[0] = 0;
    plan_dry_run(&plan, j, DRY_RUN_ALL, &dry_run_events);
    int fits = plan_simulate(&simulation, &plan, &dry_run_events, NULL, 0, problem, sizeof problem);
    simulation_close(&simulation);
    plan_close(&plan);
    launch(j, process, record_events_body);
    event_lists_close(&dry_run_events);
    end_job(j);
    snprintf(name, sizeof name, "%d ranks over %s, %s: the events of the dry run, and the ranks fit together", world,
             transport->name, options);
    if (process == 0)
        CHECK(name, fits && !events_differing && events_compared > 0, "%" PRId64 " of %" PRId64 " differ %s%s",
              events_differing, events_compared, first_difference, problem);
}

static const struct {
    int world;
    const char *options;
} event_layouts[] = {
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

static void test_events(int process, int world, const Transport *transport) {
    for (size_t i = 0; i < sizeof event_layouts / sizeof *event_layouts; i++)
        if (world ? event_layouts[i].world == world
                  : !CUDA_BUILD || (event_layouts[i].world >= 4 && event_layouts[i].world <= 8 && i % 2))
            check_events(process, event_layouts[i].world, event_layouts[i].options, transport);
}

// ---------------------------------------------------------------------------
// by hand

/* A rank's list of events, from words: `g:AXIS:COUNT` an all-gather, `s:PEER:COUNT` and `r:PEER:COUNT` messages over
 * pp, `wN` the wait for slot N, `cX` X seconds of arithmetic. */
typedef struct {
    CommEvents list;
    NameTable names;
} ByHand;

static void add_by_hand(ByHand *h, const char *word, double compute) {
    CommEvent event = ZERO;
    char axis[16] = "pp";
    long count = 0;
    event.compute_before = compute;
    event.phase = name_id(&h->names, "a test");
    event.name = -1;
    event.peer = -1;
    if (word[0] == 'w') {
        event.is_wait = 1;
        event.slot = (uint8_t)atoi(word + 1);
        h->list.slots_taken &= ~(1ull << event.slot);
        comm_events_add(&h->list, &event);
        return;
    }
    if (word[0] == 'g') sscanf(word, "g:%15[a-z_]:%ld", axis, &count);
    else sscanf(word + 1, ":%d:%ld", &event.peer, &count);
    for (int a = 0; a < AXES; a++)
        if (!strcmp(axis, axis_names[a])) event.axis = (uint8_t)a;
    event.collective = word[0] == 's' ? SEND : RECEIVE;
    if (word[0] == 'g') event.collective = ALL_GATHER;
    event.count = count;
    event.dtype = DTYPE_BYTE;
    event.name = name_id(&h->names, strrchr(word, ':') + 1);
    event.slot = (uint8_t)__builtin_ctzll(~h->list.slots_taken);
    h->list.slots_taken |= 1ull << event.slot;
    comm_events_add(&h->list, &event);
}

static void by_hand(ByHand *h, const char *words) {
    char text[1024];
    double compute = 0;
    snprintf(text, sizeof text, "%s", words);
    memset(h, 0, sizeof *h);
    comm_events_clear(&h->list, &h->names);
    for (char *at, *word = strtok_r(text, " ", &at); word; word = strtok_r(NULL, " ", &at)) {
        if (word[0] == 'c') {
            compute += atof(word + 1);
            continue;
        }
        add_by_hand(h, word, compute);
        compute = 0;
    }
    h->list.compute_after = compute;
}

/* Simulates one list of words for each rank, at 1 byte per second. Returns the step's seconds; -1: the ranks do not fit
 * together, and `problem` says why. */
static double simulate_words(Mesh mesh, const char *const *words, char *problem, size_t size) {
    enum { MOST = 8 };
    ByHand hands[MOST];
    const CommEvents *lists[MOST];
    static CollectiveRate rates[AXES][COLLECTIVES];
    Simulation s;
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++) rates[a][o].bandwidth = 1;
    for (int i = 0; i < mesh.world; i++) {
        by_hand(&hands[i], words[i]);
        lists[i] = &hands[i].list;
    }
    simulation_open(&s, &mesh, lists, &mesh, (const CollectiveRate(*)[COLLECTIVES])rates, problem, size);
    double seconds = simulation_run(&s) ? s.seconds : -1;
    simulation_close(&s);
    for (int i = 0; i < mesh.world; i++) {
        free(hands[i].list.events);
        name_table_close(&hands[i].names);
    }
    return seconds;
}

/* `mesh`: index into the meshes of test_simulation_by_hand. */
static const struct {
    const char *name;
    int mesh;
    const char *words[4];
    double seconds;
    const char *problem[4];
} simulation_cases[] = {
    {"a gather begins with its last member, and all end together",
     0,
     {"c3 g:tp:2 w0 c1", "c5 g:tp:2 c1 w0"},
     5 + 2 + 1,
     {0}},
    {"arithmetic hides communication", 0, {"g:tp:4 c10 w0", "g:tp:4 c10 w0"}, 10, {0}},
    {"a group's collectives follow each other", 0, {"g:tp:4 g:tp:5 w0 w1", "g:tp:4 g:tp:5 w0 w1"}, 9, {0}},
    {"collectives of two axes overlap",
     3,
     {"g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1", "g:tp:4 g:cp:5 w0 w1"},
     5,
     {0}},
    {"messages of a channel follow each other, those of another channel overlap",
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
    {"a different count: both counts are named",
     0,
     {"g:tp:4 w0", "g:tp:5 w0"},
     -1,
     {"collective 1 over tp", "all_gather of '4' (4 x bytes)", "rank 1 (tp 1) starts all_gather of '5' (5 x bytes)",
      "in a test"}},
    {"two groups in opposite order on two ranks: the cycle is named",
     0,
     {"g:tp:4 w0 g:world:5 w0", "g:world:5 w0 g:tp:4 w0"},
     -1,
     {"2 of 2 ranks wait forever",
      "rank 0 (tp 0) started all_gather of '4' (4 x bytes) over tp in a test, which rank 1 has not reached",
      "rank 1 (tp 1) started all_gather of '5'", "which rank 0 has not reached"}},
    {"the cycle is named also if nobody waits before both are started",
     0,
     {"g:tp:4 g:world:5 w0 w1", "g:world:5 g:tp:4 w0 w1"},
     -1,
     {"2 of 2 ranks wait forever", "rank 1 (tp 1) started all_gather of '5'", "", ""}},
    {"opposite order without a cycle is no problem",
     3,
     {"g:tp:4 w0 g:cp:5 w0", "g:tp:4 w0 g:cp:5 w0", "g:tp:4 w0 g:cp:5 w0", "g:cp:5 w0 g:tp:4 w0"},
     18,
     {0}},
    {"a missing receive",
     1,
     {"s:1:2 w0 s:1:3 w0", "r:0:2 w0"},
     -1,
     {"1 of 2 ranks wait forever", "rank 0 (pp 0) started send of '3'",
      "which rank 1 never reaches: its step has ended", ""}},
    {"a swapped pair of sends",
     1,
     {"s:1:3 s:1:2 w0 w1", "r:0:2 r:0:3 w0 w1"},
     -1,
     {"rank 0 (pp 0) started send of '3'", "at the other end rank 1 (pp 1) started receive of '2'", "", ""}},
    {"two that send to each other first",
     1,
     {"s:1:2 w0 r:1:2 w0", "s:0:2 w0 r:0:2 w0"},
     -1,
     {"2 of 2 ranks wait forever", "rank 0 (pp 0) started send", "rank 1 (pp 1) started send",
      "which rank 0 has not reached"}},
    {"a member that does not take part",
     0,
     {"g:tp:2 w0", "c1"},
     -1,
     {"1 of 2 ranks wait forever", "rank 0 (tp 0) started all_gather of '2'", "its step has ended", ""}},
};

static void test_simulation_by_hand(void) {
    const Mesh tp2 = {2, {2, 1, 1, 1, 1}}, pp2 = {2, {1, 1, 2, 1, 1}}, pp3 = {3, {1, 1, 3, 1, 1}},
               both = {4, {2, 2, 1, 1, 1}};
    const Mesh meshes[] = {tp2, pp2, pp3, both};
    for (size_t i = 0; i < sizeof simulation_cases / sizeof *simulation_cases; i++) {
        char problem[2048] = "", name[200];
        double seconds =
            simulate_words(meshes[simulation_cases[i].mesh], simulation_cases[i].words, problem, sizeof problem);
        int says = 1;
        for (int k = 0; k < 4 && simulation_cases[i].problem[k]; k++)
            says &= strstr(problem, simulation_cases[i].problem[k]) != NULL;
        snprintf(name, sizeof name, "simulation: %s", simulation_cases[i].name);
        CHECK(name, seconds == simulation_cases[i].seconds && says && (seconds < 0) == (problem[0] != 0),
              "%g s, expected %g %s", seconds, simulation_cases[i].seconds, problem);
    }
}

// ---------------------------------------------------------------------------
// streams of GPUs, by hand

/* What a rank gives to a stream after `compute` seconds of arithmetic there. 'g', 's': starts an all-gather or a
 * reduce-scatter over axis `number` of `count` bytes. 'w': waits for the number-th of them, from 0. 'r', 'e': records
 * event `number`, waits for it. 0: the end. */
typedef struct {
    StreamKind stream;
    double compute;
    char what;
    int number, count;
} StreamStep;

enum { STREAM_STEPS = 12 };

static const struct {
    const char *name;
    StreamStep steps[STREAM_STEPS];
    double seconds[2], waited_tp[2]; // with one communicator for fsdp, with one for reductions
} stream_cases[] = {
    {"reduce-scatter beside an all-gather of fsdp: with one communicator it begins after that, and tp's all-gather "
     "begins no earlier",
     {{STREAM_GATHER, 0, 'g', AXIS_FSDP, 10},
      {STREAM_REDUCE, 0, 's', AXIS_FSDP, 4},
      {STREAM_TP, 0, 'g', AXIS_TP, 2},
      {STREAM_COMPUTE, 0, 'w', 2, 0},
      {STREAM_COMPUTE, 3, 'w', 0, 0}},
     {15, 10},
     {12, 2}},
    {"operations of one communicator follow each other on whatever stream",
     {{STREAM_GATHER, 0, 'g', AXIS_TP, 4}, {STREAM_TP, 0, 'g', AXIS_TP, 3}, {STREAM_COMPUTE, 0, 'w', 1, 0}},
     {7, 7},
     {7, 7}},
    {"what is started on the compute stream occupies it",
     {{STREAM_COMPUTE, 1, 'g', AXIS_TP, 3}, {STREAM_COMPUTE, 2, 'w', 0, 0}},
     {6, 6},
     {3, 3}},
    {"a stream waits for an event of another one, and arithmetic hides communication",
     {{STREAM_COMPUTE, 5, 'r', 1, 0},
      {STREAM_TP, 0, 'e', 1, 0},
      {STREAM_TP, 0, 'g', AXIS_TP, 3},
      {STREAM_COMPUTE, 2, 'w', 0, 0}},
     {8, 8},
     {1, 1}},
    {"an operation begins when all that were started before have begun",
     {{STREAM_COMPUTE, 5, 'r', 1, 0},
      {STREAM_REDUCE, 0, 'e', 1, 0},
      {STREAM_REDUCE, 0, 's', AXIS_FSDP, 1},
      {STREAM_TP, 0, 'g', AXIS_TP, 3},
      {STREAM_COMPUTE, 0, 'w', 1, 0}},
     {8, 8},
     {3, 3}},
    {"arithmetic of two streams overlaps",
     {{STREAM_REDUCE, 4, 'r', 1, 0}, {STREAM_COMPUTE, 3, 'e', 1, 0}, {STREAM_COMPUTE, 2, 'r', 2, 0}},
     {6, 6},
     {0, 0}}};

static void add_stream_step(CommEvents *list, const StreamStep *step, int *starts) {
    if (step->what == 'r' || step->what == 'e') {
        StreamPoint point = ZERO;
        point.at = list->count;
        point.compute = step->compute;
        point.event = step->number;
        point.stream = (uint8_t)step->stream;
        point.is_wait = step->what == 'e';
        int32_t *events = &list->recorder.streams.events;
        list->points[list->num_points++] = point;
        *events = (int32_t)max_i64(*events, step->number);
        return;
    }
    CommEvent event = ZERO;
    event.stream = (uint8_t)step->stream;
    event.stream_compute = step->compute;
    event.is_wait = step->what == 'w';
    event.slot = (uint8_t)(event.is_wait ? step->number : *starts);
    event.axis = (uint8_t)step->number;
    event.collective = step->what == 's' ? REDUCE_SCATTER : ALL_GATHER;
    event.count = step->count;
    event.dtype = DTYPE_BYTE;
    event.peer = event.name = -1;
    *starts += !event.is_wait;
    comm_events_add(list, &event);
}

/* Four ranks do the same, tp 2 x dp_shard 2, at 1 byte per second. */
static void test_streams_by_hand(void) {
    const Mesh mesh = {4, {2, 1, 1, 2, 1}};
    static CollectiveRate rates[AXES][COLLECTIVES];
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++) rates[a][o].bandwidth = 1;
    for (size_t i = 0; i < sizeof stream_cases / sizeof *stream_cases; i++) {
        char problem[512] = "", name[300];
        StreamPoint points[STREAM_STEPS];
        double seconds[2], waited[2];
        for (int apart = 0; apart < 2; apart++) {
            CommEvents list = ZERO;
            NameTable names = ZERO;
            int starts = 0;
            Simulation s;
            comm_events_clear(&list, &names);
            list.points = points;
            for (const StreamStep *step = stream_cases[i].steps; step->what; step++)
                add_stream_step(&list, step, &starts);
            const CommEvents *lists[4] = {&list, &list, &list, &list};
            simulation_open(&s, &mesh, lists, &mesh, (const CollectiveRate(*)[COLLECTIVES])rates, problem,
                            sizeof problem);
            int fits = simulation_run(&s) && simulate_streams(&s, apart);
            seconds[apart] = fits ? s.seconds : NAN;
            waited[apart] = s.ranks[3].waited[AXIS_TP];
            simulation_close(&s);
            free(list.events);
        }
        snprintf(name, sizeof name, "GPUs: %s", stream_cases[i].name);
        CHECK(name,
              !memcmp(seconds, stream_cases[i].seconds, sizeof seconds) &&
                  !memcmp(waited, stream_cases[i].waited_tp, sizeof waited),
              "%g and %g s, waits %g and %g s for tp %s", seconds[0], seconds[1], waited[0], waited[1], problem);
    }
}

// ---------------------------------------------------------------------------
// faults in the events of 16,384 ranks

static int64_t find_event(const CommEvents *list, int collective, int axis, int64_t number) {
    for (int64_t i = 0; i < list->count; i++) {
        const CommEvent *e = &list->events[i];
        if (!e->is_wait && e->collective == collective && e->axis == axis && number-- == 0) return i;
    }
    return -1;
}

static void drop_event(CommEvents *list, int64_t at) {
    size_t behind = (size_t)(--list->count - at);
    memmove(&list->events[at], &list->events[at + 1], sizeof *list->events * behind);
}

/* Removes a receive and the wait for it. */
static void drop_receive(CommEvents *list, int64_t at) {
    int slot = list->events[at].slot;
    drop_event(list, at);
    while (!list->events[at].is_wait || list->events[at].slot != slot) at++;
    drop_event(list, at);
}

/* Exchanges two events, but leaves each place its slot and its arithmetic. */
static void swap_events(CommEvents *list, int64_t a, int64_t b) {
    CommEvent x = list->events[a], y = list->events[b];
    list->events[a] = y;
    list->events[a].slot = x.slot;
    list->events[a].compute_before = x.compute_before;
    list->events[b] = x;
    list->events[b].slot = y.slot;
    list->events[b].compute_before = y.compute_before;
}

static void test_simulation_405b(void) {
    enum { ODD = 12345 };
    static const char *const faults[] = {"none", "an all_gather of another count", "a swapped pair of sends",
                                         "a missing receive", "two groups in opposite order"};
    static const char *const words[][3] = {
        {"", "", ""},
        {"of 128 members start all_gather", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) starts all_gather",
         "over fsdp in "},
        {"rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) ", "activations 1 to stage 1", "activations 0 to stage 1"},
        {"gradients 0 to stage 0", "gradients 1 to stage 0", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6)"},
        {"wait forever", "rank 12345 (tp 1, cp 7, pp 0, dp_shard 6) started all_gather of 'keys and values'",
         "which rank 12345 has not reached"}};
    Plan plan;
    EventLists events;
    Job *j = make_job("--plan --model llama3.1-405b --tp 8 --cp 16 --pp 16 --dp-shard 8 --seq 131072 --batch 1 --accum "
                      "16 --pp-light-ends",
                      16384, &transport_threads);
    plan_dry_run(&plan, j, DRY_RUN_SHARDS,
                 &events); // other ranks of the same part have the same events: test_rank_classes
    for (int f = 0; f < 5; f++) {
        char problem[4096] = "", name[200];
        CommEvents *own = &events.lists[events.list_of[ODD]], changed = *own;
        const CommEvents **lists = (const CommEvents **)checked_malloc(sizeof *lists * 16384);
        Simulation s;
        changed.events = (CommEvent *)checked_malloc(sizeof *changed.events * (size_t)own->count);
        memcpy(changed.events, own->events, sizeof *changed.events * (size_t)own->count);
        if (f == 1) changed.events[find_event(own, ALL_GATHER, AXIS_FSDP, 3)].count++;
        if (f == 2) swap_events(&changed, find_event(own, SEND, AXIS_PP, 0), find_event(own, SEND, AXIS_PP, 1));
        if (f == 3) drop_receive(&changed, find_event(own, RECEIVE, AXIS_PP, 0));
        if (f == 4)
            swap_events(&changed, find_event(own, ALL_GATHER, AXIS_TP, 5), find_event(own, ALL_GATHER, AXIS_CP, 3));
        for (int i = 0; i < 16384; i++) lists[i] = i == ODD && f ? &changed : &events.lists[events.list_of[i]];
        simulation_open(&s, &j->mesh, lists, &j->mesh, NULL, problem, sizeof problem);
        int fits = simulation_run(&s), says = 1;
        for (int k = 0; k < 3; k++) says &= strstr(problem, words[f][k]) != NULL;
        snprintf(name, sizeof name, "405B on 16,384 ranks simulated, planted on rank %d: %s", ODD, faults[f]);
        CHECK(name, fits == !f && says, "%s", fits ? "fits" : problem);
        simulation_close(&s);
        free(changed.events);
        free(lists);
    }
    event_lists_close(&events);
    plan_close(&plan);
    end_job(j);
}

/* The estimate of a layout, with a dry run of every rank or of fewer that stand for the others. */
static Estimate estimate_by(const char *options, int world, DryRunKind kind, double *memory) {
    char arguments[512], problem[1024];
    Plan plan;
    EventLists events;
    Simulation simulation;
    Cluster cluster;
    snprintf(arguments, sizeof arguments, "--plan --cluster dev/clusters/h100-8.json %s", options);
    Job *j = make_job(arguments, world, &transport_threads);
    cluster_open(&cluster, ((Planning *)j)->opt.cluster, &j->mesh, j->run.threads, option_choice(&j->run, "transport"),
                 transport_sums(&j->run));
    j->op_times = &cluster.rates.times;
    plan_dry_run(&plan, j, kind, &events);
    int fits = plan_simulate(&simulation, &plan, &events, &cluster, 0, problem, sizeof problem);
    Estimate e = estimate_of(&plan, &events, &cluster, &simulation, j);
    if (!fits) e.step_seconds = NAN;
    *memory = memory_needed(&plan, &cluster);
    simulation_close(&simulation);
    event_lists_close(&events);
    plan_close(&plan);
    cluster_close(&cluster);
    end_job(j);
    return e;
}

/* What is exposed, by the cluster file of H100s. Before, tp's collectives ran on the compute stream, and fsdp's gathers
 * and reductions, or the messages of a link, shared a communicator: dev/results/overlap.md. */
static void test_exposed(void) {
    static const struct {
        const char *options;
        int world;
        double before; // exposed seconds
    } layouts[] = {{"--model llama3-8b --tp 8 --batch 4 --seq 8192", 64, 0.2615},
                   {"--model llama3-70b --tp 8 --batch 2 --seq 8192 --recompute selective", 64, 0.9012},
                   {"--model llama3.1-405b --tp 8 --pp 16 --seq 8192 --batch 1 --accum 16 --pp-schedule interleaved "
                    "--pp-chunks 8 --pp-light-ends --sharding shard_grad_op --accumulate local",
                    512, 3.393}};
    for (int i = 0; i < 3; i++) {
        double memory;
        char name[300];
        Estimate e = estimate_by(layouts[i].options, layouts[i].world, DRY_RUN_SHARDS, &memory);
        snprintf(name, sizeof name, "%s, on %d H100s: at most half as much waiting as before", layouts[i].options,
                 layouts[i].world);
        CHECK(name, exposed_seconds(&e) <= 0.5 * layouts[i].before, "%.4g s, of %.4g s of communication; before %.4g s",
              exposed_seconds(&e), e.communication[AXIS_TP] + e.communication[AXIS_FSDP], layouts[i].before);
    }
}

/* Ranks with the same part of the model do the same at the same time, so that one of them is enough; tensor-parallel
 * ranks differ by at most one row of the vocabulary. */
static void test_simulation_of_few(void) {
    static const char *const layouts[] = {
        "--model llama3-8b --seq 4096 --batch 1 --tp 2 --cp 2 --pp 4 --accum 8",
        ("--model llama3-8b --seq 2048 --batch 1 --tp 2 --cp 2 --pp 2 --dp-replicate 2 --accum 4 --pp-schedule "
         "interleaved --pp-chunks 4 --pp-light-ends"),
        "--model llama3-8b --seq 2048 --batch 1 --tp 4 --accum 2 --recompute full",
        "--model llama3.2-1b --seq 2048 --batch 2 --accum 2 --sharding shard_grad_op"};
    for (int i = 0; i < 4; i++) {
        double memory[3];
        Estimate e[3];
        char name[300];
        for (int k = 0; k < 3; k++) e[k] = estimate_by(layouts[i], 32, (DryRunKind)k, &memory[k]);
        double off = fmax(off_by(e[DRY_RUN_STAGES].step_seconds, e[DRY_RUN_ALL].step_seconds),
                          off_by(e[DRY_RUN_SHARDS].step_seconds, e[DRY_RUN_ALL].step_seconds)),
               waits = 0;
        for (int a = 0; a < AXES; a++)
            waits =
                fmax(waits, fabs(e[DRY_RUN_STAGES].waited[a] - e[DRY_RUN_ALL].waited[a]) / e[DRY_RUN_ALL].step_seconds);
        snprintf(name, sizeof name, "32 ranks, %s: simulating one rank of each stage gives the step of all",
                 layouts[i]);
        CHECK(name,
              off < 1e-6 && waits < 1e-6 && memory[DRY_RUN_STAGES] == memory[DRY_RUN_ALL] &&
                  e[DRY_RUN_ALL].step_seconds > 0,
              "%.6g, %.6g and %.6g s, waits off by %.1g of it", e[0].step_seconds, e[1].step_seconds, e[2].step_seconds,
              waits);
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
        have[i] = e.flops / e.step_seconds;
        full[i] = e.full_attention_flops / e.step_seconds;
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

/* How many bars of an activity a stage has in the numbers of plan.html. */
static int count_bars(const cJSON *numbers, int stage, int activity) {
    const cJSON *estimate = cJSON_GetObjectItemCaseSensitive(numbers, "estimate"), *bar;
    const cJSON *stages = cJSON_GetObjectItemCaseSensitive(estimate, "stages");
    int count = 0;
    cJSON_ArrayForEach(bar, cJSON_GetArrayItem(stages, stage)) count +=
        cJSON_GetArrayItem(bar, 0)->valueint == activity;
    return count;
}

/* plan.html has a bar for each forward and backward of the schedule in the row of its stage, and one for each kind of
 * rank. */
static void test_plan_page(void) {
    static const char begin[] = "<script>var plan_data = ";
    char *text = NULL;
    const char *options = "--model tiny --tp 2 --pp 2 --accum 8 --pp-schedule interleaved --seq 128 --batch 2", *end;
    size_t length;
    Trainer w;
    Estimate e = estimate_with(make_cluster_file("page.json", 1e9, 1e9, 1e-5, 1e9, ""), options, 16, &w);
    FILE *f = text_stream_open(&text, &length);
    estimated.job->run.model = "tiny & </script>";
    report_write(f, report_json(estimated.job, &estimated.plan, &estimated.simulation, &estimated.cluster, &e, NULL));
    text_stream_close(f);
    const char *at = strstr(text, begin);
    cJSON *numbers = at ? cJSON_ParseWithOpts(at + strlen(begin), &end, 0) : NULL;
    int kinds = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(numbers, "classes"));
    int forwards[2] = {count_bars(numbers, 0, DOES_FORWARD), count_bars(numbers, 1, DOES_FORWARD)};
    int backwards[2] = {count_bars(numbers, 0, DOES_BACKWARD), count_bars(numbers, 1, DOES_BACKWARD)};
    int is_whole = numbers && !strncmp(end, ";</script>", 10) && !strcmp(text + length - 8, "</html>\n") &&
                   count_of(text, "</script>") == count_of(run_html, "</script>");
    CHECK("plan.html has every step of every stage, and every kind of rank",
          is_whole && forwards[0] == 16 && forwards[1] == 16 && backwards[0] == 16 && backwards[1] == 16 &&
              kinds == estimated.plan.count,
          "%d and %d forwards, %d and %d backwards, %d bars of %d, %d bytes", forwards[0], forwards[1], backwards[0],
          backwards[1], kinds, estimated.plan.count, (int)length);
    cJSON_Delete(numbers);
    free(text);
}

/* A search among all layouts of 16 ranks: no layout that is given by hand and fits is faster. */
static void test_search(void) {
    static const struct {
        const char *options;
        int model_ranks; // tp x cp x pp: the accumulation makes 128 sequences per step of every layout
    } by_hand[] = {{"--tp 2 --dp-shard 8", 2},
                   {"--pp 2 --dp-shard 8 --pp-schedule interleaved --pp-chunks 4", 2},
                   {"--cp 2", 2},
                   {"--dp-replicate 2", 1},
                   {"--sharding full_shard --recompute full", 1},
                   {"--tp 8 --pp 2", 16},
                   {"--pp 4 --tp 4", 16},
                   {"--sharding shard_grad_op --accumulate local", 1},
                   {"--tp 2 --cp 2 --pp 2", 8}};
    char options[512];
    Search *s = (Search *)checked_malloc(sizeof *s);
    Job *j =
        make_job("--plan --cluster dev/clusters/h100-8.json --search --model llama3-8b --seq 8192 --batch 1 --accum 8",
                 16, &transport_threads);
    Cluster cluster;
    cluster_open(&cluster, ((Planning *)j)->opt.cluster, &j->mesh, j->run.threads, option_choice(&j->run, "transport"),
                 transport_sums(&j->run));
    search_run(s, j, &cluster);
    double have = cluster.memory, best = s->best[0].estimate.step_seconds, memory, fastest = INFINITY;
    int sorted = s->count == BEST, tried = 0;
    for (int i = 0; i < s->count; i++)
        sorted &= s->best[i].memory <= have &&
                  (i == 0 || s->best[i - 1].estimate.step_seconds <= s->best[i].estimate.step_seconds);
    for (int i = 0; i < (int)(sizeof by_hand / sizeof *by_hand); i++) {
        snprintf(options, sizeof options, "--model llama3-8b --seq 8192 --batch 1 --accum %d %s",
                 8 * by_hand[i].model_ranks, by_hand[i].options);
        Estimate e = estimate_by(options, 16, DRY_RUN_ALL, &memory);
        if (memory > have) continue;
        tried++;
        fastest = fmin(fastest, e.step_seconds);
    }
    const RunSettings *b = &s->best[0].run;
    snprintf(options, sizeof options,
             "--model llama3-8b --seq 8192 --tp %d --cp %d --pp %d --dp-shard %d --dp-replicate %d --batch %d --accum "
             "%d --sharding %s --accumulate %s --recompute %s%s",
             b->tp, b->cp, b->pp, b->dp_shard, b->dp_replicate, b->batch, b->accum, strategies[b->sharding].name,
             b->accumulate == ACCUMULATE_LOCALLY ? "local" : "sharded", option_choice(b, "recompute"),
             b->pp_light_ends ? " --pp-light-ends" : "");
    if (b->pp_chunks > 1)
        snprintf(options + strlen(options), sizeof options - strlen(options),
                 " --pp-schedule interleaved --pp-chunks %d", b->pp_chunks);
    Estimate again = estimate_by(options, 16, DRY_RUN_ALL, &memory);
    CHECK("--search: the list fits and is in order, no layout by hand that fits is faster, and a plan of the "
          "first one agrees",
          sorted && tried > 3 && best <= fastest * (1 + 1e-9) && off_by(again.step_seconds, best) < 1e-6 &&
              off_by(memory, s->best[0].memory) < 1e-6,
          "%d of %d dry-run; %.4g s, by hand %.4g s of %d, planned %.4g s", s->dry_runs, s->tried, best, fastest, tried,
          again.step_seconds);
    free(s);
    cluster_close(&cluster);
    end_job(j);
}

/* Layouts that the traffic formula alone rules out would not be among the fastest. */
static void test_search_bounds(void) {
    Search *s[2];
    int equal = 1;
    for (int all = 0; all < 2; all++) {
        Job *j = make_job(
            "--plan --cluster dev/clusters/h100-8.json --search --model llama3.2-1b --seq 4096 --batch 2 --accum 4", 8,
            &transport_threads);
        s[all] = (Search *)checked_malloc(sizeof *s[all]);
        s[all]->keeps_slow = all;
        Cluster cluster;
        cluster_open(&cluster, ((Planning *)j)->opt.cluster, &j->mesh, 0, "auto", 0);
        search_run(s[all], j, &cluster);
        cluster_close(&cluster);
        end_job(j);
    }
    for (int i = 0; i < BEST; i++)
        equal &= s[0]->best[i].estimate.step_seconds == s[1]->best[i].estimate.step_seconds &&
                 s[0]->best[i].memory == s[1]->best[i].memory;
    CHECK("--search: what the traffic formula rules out is not dry-run, and would not be among the fastest",
          equal && s[0]->count == BEST && s[1]->count == BEST && s[0]->dry_runs < s[1]->dry_runs,
          "%d and %d of %d dry-run", s[0]->dry_runs, s[1]->dry_runs, s[1]->tried);
    for (int all = 0; all < 2; all++) free(s[all]);
}

static void test_simulate(void) {
    test_backward_prefetch();
    if (!CUDA_BUILD && FLOATX == DTYPE_F32) test_search_bounds();
    if (!CUDA_BUILD) test_plan_page();
    if (!CUDA_BUILD && FLOATX == DTYPE_BF16) test_search();
    if (!CUDA_BUILD) test_simulation_of_few();
    if (!CUDA_BUILD && FLOATX == DTYPE_BF16) test_paper();
    if (!CUDA_BUILD && FLOATX == DTYPE_BF16) test_exposed();
    if (!CUDA_BUILD) {
        test_simulation_by_hand();
        test_streams_by_hand();
        test_simulation_405b();
    }
    test_events(0, 0, &transport_threads);
}
