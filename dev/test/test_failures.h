/* test_failures.h: failures end the run with a sentence that names the rank, the tensor or the token: ranks that hang,
 * skip a collective or differ, gradients that are not finite, damaged data. Each runs in a child process, whose exit
 * code and last sentence are checked. Part of test_llama3.cu. */

static void set_float(Device *dev, float *at, float x) { device_write(dev, at, &x, sizeof x); }

static void late_rank(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    if (rank == 2) {
        op_begin(&o->trainer.parallel.dev, OP_ATTENTION_BACKWARD, 0, 0);
        sleep(20); // computes for ever
    }
    train_step(&o->trainer, 2);
}

static void run_late_rank(void *arguments) {
    launch(make_job((const char *)arguments, 4, &transport_threads), 0, late_rank);
}

static void same_samples(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    if (rank == 3) { // as if its sampler had been given another rank's coordinate
        loader_close(&o->trainer.loader, &o->trainer.parallel.dev);
        Sampler s = o->trainer.loader.sampler;
        s.shard = 1;
        size_t mark = arena_mark(&o->trainer.parallel.dev, MEM_HOST);
        arena_release(
            &o->trainer.parallel.dev, MEM_HOST,
            (size_t)((char *)o->trainer.loader.ring[0].inputs - o->trainer.parallel.dev.arenas[MEM_HOST].base));
        LoaderOptions options = {j->run.seq, 0, 1, 0, 0, j->run.steps, 0, j->cores_per_rank};
        loader_open(&o->trainer.loader, &o->trainer.parallel.dev, &j->data, &s, &options);
        o->trainer.parallel.dev.arenas[MEM_HOST].used = mark;
    }
    train_step(&o->trainer, 1);
}

static void run_same_samples(void *arguments) {
    launch(make_job((const char *)arguments, 4, &transport_threads), 0, same_samples);
}

/* Two collectives, of which one rank skips the first, or which one rank starts in the other order. */
static void two_collectives(Job *j, int rank, int skip, int turn) {
    Opened *o = open_rank(j, rank);
    float send = 0, recv[8];
    train_step(&o->trainer, 1);
    if (rank != skip)
        all_gather_now(&o->trainer.parallel.comm, AXIS_FSDP, rank == turn ? "second" : "first", &send, recv,
                       sizeof send);
    all_gather_now(&o->trainer.parallel.comm, AXIS_FSDP, rank == turn ? "first" : "second", &send, recv, sizeof send);
    sleep(20);
}

static void skips(Job *j, int rank) { two_collectives(j, rank, 1, -1); }
static void turns(Job *j, int rank) { two_collectives(j, rank, -1, 1); }
static void run_skips(void *arguments) { launch(make_job((const char *)arguments, 4, &transport_threads), 0, skips); }
static void run_turns(void *arguments) { launch(make_job((const char *)arguments, 2, &transport_threads), 0, turns); }

/* As if a rank of another host, whose collectives no heartbeat table compares, had reported another order. */
static void other_report(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    if (rank == 1) o->trainer.reports.of_ranks[0].lines.order[AXIS_FSDP]++;
    check_reports(&o->trainer.reports, &o->trainer.loader.sampler, 1, 0);
}

static void run_other_report(void *arguments) {
    launch(make_job((const char *)arguments, 2, &transport_threads), 0, other_report);
}

/* Flight files under `out` whose first line is `first`, and which list the collectives of fsdp. */
static int count_flights(const char *out, int ranks, const char *first) {
    int found = 0;
    for (int i = 0; i < ranks; i++) {
        char path[512];
        size_t length;
        snprintf(path, sizeof path, "%s/flight/rank-%d.txt", out, i);
        char *text = read_file(path, &length);
        found += text && strstr(text, "fsdp: ") && strstr(text, "all_gather") &&
                 (i != 2 || !strncmp(text, first, strlen(first)));
        free(text);
    }
    return found;
}

static void other_seed(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    if (rank == 2) o->trainer.parallel.fsdp.seed++; // as if its weights had been drawn from another one
    train_step(&o->trainer, 1);
}

static void run_other_seed(void *arguments) {
    launch(make_job((const char *)arguments, 4, &transport_threads), 0, other_seed);
}

/* Rank 1 finds an infinity in the gradient of one tensor: everybody learns which. */
static void bad_gradient(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    ShardPiece p;
    train_step(trainer, 1);
    for (int i = 0; next_unique_piece(&trainer->parallel.fsdp, &i, &p);)
        if (rank == 1 && strstr(p.tensor->name, "layers.1.mlp.up_proj"))
            set_float(&trainer->parallel.dev, p.unit->grad + p.at + p.count / 2, INFINITY);
    step_reports_begin(&trainer->reports);
    StepReport mine = own_report(trainer, &trainer->loader.ring[0]);
    gradient_squared_norm(&trainer->parallel.fsdp, &trainer->reports.sums[SUM_SQUARED_NORM]);
    exchange_reports(&trainer->reports, &trainer->parallel.fsdp, &mine, 0);
    StepStats s = sum_reports(&trainer->reports);
    if (s.skipped) report_skip(&trainer->reports, &j->table, &trainer->progress, 2, &s);
}

static void run_bad_gradient(void *arguments) {
    launch(make_job((const char *)arguments, 2, &transport_threads), 0, bad_gradient);
}

/* A bit of a replica's weights falls over. */
static void bad_replica(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    fsdp_check_replicas(&o->trainer.parallel.fsdp, 1);
    if (rank == 2) {
        uint32_t *at = (uint32_t *)(void *)o->trainer.parallel.fsdp.units[2].master + 17, bits;
        device_read(&o->trainer.parallel.dev, &bits, at, sizeof bits);
        bits ^= 1;
        device_write(&o->trainer.parallel.dev, at, &bits, sizeof bits);
    }
    fsdp_check_replicas(&o->trainer.parallel.fsdp, 2);
}

static void run_bad_replica(void *arguments) {
    launch(make_job((const char *)arguments, 4, &transport_threads), 0, bad_replica);
}

/* Weights that make everything NaN, on one rank: all skip alike, nothing changes, and training goes on when they are
 * well again. */
static int64_t skipped_alike, changed_by_skip, trained_after;

static void skipping(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    FsdpUnit *u = &trainer->parallel.fsdp.units[1];
    for (int step = 1; step <= 3; step++) {
        size_t bytes = sizeof(float) * (size_t)u->state_count;
        float *start = floats_on_host(&trainer->parallel.dev, u->master, u->state_count);
        if (step == 2 && rank == 1) {
            set_float(&trainer->parallel.dev, u->master, NAN);
            fsdp_refresh_copies(&trainer->parallel.fsdp);
        }
        float *before = floats_on_host(&trainer->parallel.dev, u->master, u->state_count);
        StepStats s = train_step(trainer, step);
        __atomic_fetch_add(&skipped_alike, s.skipped == (step == 2) && trainer->progress.updates == (step == 3 ? 2 : 1),
                           __ATOMIC_RELAXED);
        float *after = floats_on_host(&trainer->parallel.dev, u->master, u->state_count);
        __atomic_fetch_add(step == 2 ? &changed_by_skip : &trained_after, memcmp(before, after, bytes) != 0,
                           __ATOMIC_RELAXED);
        if (step == 2 && rank == 1) {
            set_float(&trainer->parallel.dev, u->master, start[0]);
            fsdp_refresh_copies(&trainer->parallel.fsdp);
        }
        free(start);
        free(before);
        free(after);
    }
    close_rank(o);
}

static void bad_token(void *arguments) {
    launch(make_job((const char *)arguments, 1, &transport_threads), 0, ranks_body);
}

/* Tokens of 4 of 6 samples of the first step, and all of the second, are outside the vocabulary: 4000 + sample. */
static const Sampler spoiled_sampler = {211, 9, 0, 1, 1, 0, 0, 3, 2, 0, 0, 0, 0, NULL, 1};

static int64_t spoiled_token(int sample) {
    return sampler_sample(&spoiled_sampler, sample / 6, sample % 6 / 2, sample % 2) * 16 + 7;
}

static void run_spoiled(void *workers) { // 0: by hand, the last sample first
    Device dev;
    Loader l;
    Dataset d = dataset_open(scratch_path("spoiled.tok"), 16, 64, 0);
    if (*(int *)workers) open_loader(&l, &dev, &d, &spoiled_sampler, 10, *(int *)workers);
    else open_loader_by_hand(&l, &dev, &d, &spoiled_sampler, 10);
    for (int i = 0; i < 12 && !*(int *)workers; i++) loader_claim(&l);
    for (int i = 11; i >= 0 && !*(int *)workers; i--) loader_read(&l, i, l.workers[0].raw);
    loader_next(&l, &dev, 60);
}

static void run_dead_worker(void *path) {
    Device dev;
    Loader l;
    Dataset d = dataset_open((const char *)path, 16, 64, 0);
    open_loader_by_hand(&l, &dev, &d, &spoiled_sampler, 10);
    for (int i = 0; i < 6; i++) loader_claim(&l);
    for (int i = 1; i < 6; i++)
        loader_read(&l, i, l.workers[0].raw); // who claimed the first sample is never heard of again
    alarm(20);                                // were it endless, it would end as neither
    loader_next(&l, &dev, 1);
}

static void truncated_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    if (rank == 0 && truncate(j->run.data, 64 + 2 * 17))
        run_failure("the file could not be truncated"); // one window is left
    for (int step = 2; step <= 100; step++) train_step(&o->trainer, step);
}

static void run_truncated(void *arguments) {
    launch(make_job((const char *)arguments, 3, &transport_threads), 0, truncated_body);
}

static void test_late_rank(const char *data) {
    char arguments[512];
    Ending end;
    const char *out = scratch_path("late");
    mkdir(out, 0777);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 1 --out %s", FIXTURES,
             data, out);
    end_run(&end, run_late_rank, arguments);
    CHECK("a rank that computes for ever ends the run at the deadline, by name and op",
          end.code == 2 && end.seconds < 3 && strstr(end.said, "of 'embedding' on fsdp (4 ranks)") &&
              strstr(end.said, "; rank 2 has been running attention_backward for 1.") &&
              strstr(end.said, "its last collective was reduce_scatter #10 of 'embedding' on fsdp"),
          "code %d after %.1f s (bound 3): %s", end.code, end.seconds, end.said);
    int flights = count_flights(out, 4, "rank 2 has been running attention_backward");
    CHECK("every rank's last collectives are under OUT/flight", flights == 4, "%d of 4 files", flights);
}

static void test_collective_orders(const char *arguments) {
    static const struct {
        const char *name;
        void (*run)(void *);
        const char *said;
    } orders[] = {
        {"a rank that skips a collective is named as soon as it starts the next one", run_skips,
         "collective #11 on fsdp: ranks 0, 2, 3 started all_gather of 'first' (4 bytes); rank 1 started "
         "all_gather of 'second' (4 bytes); only rank 1 differs"},
        {"of two ranks that start two collectives in different orders both are named", run_turns,
         "collective #11 on fsdp: rank 0 started all_gather of 'first' (4 bytes); rank 1 started all_gather of "
         "'second' (4 bytes). All"}};
    Ending end;
    for (int i = 0; i < 2; i++) {
        end_run(&end, orders[i].run, arguments);
        CHECK(orders[i].name, end.code == 2 && end.seconds < 3 && strstr(end.said, orders[i].said),
              "code %d after %.1f s (bound 3, --timeout 6): %s", end.code, end.seconds, end.said);
    }
    end_run(&end, run_other_report, arguments);
    CHECK("the step's reports find a different order on another host",
          end.code == 2 &&
              strstr(end.said,
                     "step 1: rank 0 and rank 1 did not start the same collectives over fsdp in the same order"),
          "code %d: %s", end.code, end.said);
}

/* Four ranks, tp 2 x dp_shard 2, on the hosts a (0, 1) and b (2, 3). Rank 0 waits in fsdp for rank 2, which waits in tp
 * for rank 3. `rank` is in this state, and of `unknown` nothing is known. Checks what rank 0 says. */
static void check_culprits(const char *name, int rank, int process, int state, int unknown, const char *expected) {
    static const int asked[MESH_AXES] = {2, 1, 1, 2, 1};
    static RunHost hosts[2] = {{"a", 0, 2, 1}, {"b", 2, 2, 2}};
    static int of_rank[4] = {0, 0, 1, 1};
    char text[1024];
    Sentence said = {text, sizeof text, 0};
    Mesh mesh = mesh_open(4, asked, 1);
    RankNews ranks[4];
    WorldNews news = {&mesh, heartbeats_open_threads(1, 2), 2, 1, ranks};
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < 4; i++) {
        ranks[i].lines.rank = i;
        ranks[i].known = i != unknown && (unknown != 2 || i != 3); // a host answers for both of its ranks, or not
        ranks[i].process = i == rank ? process : (int)PROCESS_RUNS;
        ranks[i].state = i == rank ? state : (int)RANK_WAITING;
        ranks[i].wait_line = i < 2 ? AXIS_FSDP : AXIS_TP;
        ranks[i].wait_number = 7;
        ranks[i].started[AXIS_FSDP] = i < 2 ? 7 : 6;
        ranks[i].started[AXIS_TP] = i == 3 && rank == 3 ? 6 : 7;
        snprintf(ranks[i].doing, sizeof ranks[i].doing, "rank %d does this", i);
    }
    run_hosts.count = 2;
    run_hosts.hosts = hosts;
    run_hosts.of_rank = of_rank;
    say_culprits(&said, &news, 0, AXIS_FSDP, 7);
    memset(&run_hosts, 0, sizeof run_hosts);
    munmap(news.table, heartbeats_bytes(1));
    CHECK(name, !strcmp(text, expected), "'%s', expected '%s'", text, expected);
}

static void test_culprits(void) {
    check_culprits("a rank that waits for a busy one on another axis is not blamed", 3, PROCESS_RUNS, RANK_COMPUTING,
                   -1, "rank 2 does this; rank 3 does this");
    check_culprits("a stopped rank is blamed first", 2, PROCESS_STOPPED, RANK_WAITING, -1, "rank 2 does this");
    check_culprits("a host that does not answer is blamed with its ranks", -1, 0, 0, 2,
                   "host b with ranks 2, 3 does not answer: it is down, or all its processes have stopped, or the "
                   "network to it is cut");
    check_culprits("if all ranks wait, the network is to be looked at", -1, 0, 0, -1,
                   "rank 2 does this; none of the 4 ranks that answered keeps it from completing: look at the network "
                   "between the hosts");
}

static void test_recording_time(void) {
    HeartbeatTable *b = heartbeats_open_threads(2, 1);
    double start = processor_seconds();
    for (int i = 0; i < 1000000; i++)
        flight_start(b, heartbeat_at(b, 0), AXIS_FSDP, ALL_GATHER, "model.layers.12", 256, DTYPE_F32);
    double took = (processor_seconds() - start) * 1e3;
    CHECK("a collective is recorded and compared in less than a microsecond", took < 1000, "%.0f ns (bound 1000)",
          took);
    munmap(b, heartbeats_bytes(2));
}

/* Ranks that differ in what must be equal: samples, seed, weights of replicas. */
static void test_ranks_that_differ(const char *arguments) {
    char more[700];
    Ending end;
    end_run(&end, run_same_samples, arguments);
    CHECK("two ranks with the same samples end the run, and are named",
          end.code == 2 && strstr(end.said, "rank 1 and rank 3 train on the same samples"), "code %d: %s", end.code,
          end.said);
    end_run(&end, run_other_seed, arguments);
    CHECK("a rank with another seed ends the run, and is named",
          end.code == 2 && strstr(end.said, "rank 2 shuffles samples or initializes weights with a different seed"),
          "code %d: %s", end.code, end.said);
    for (int ddp = 0; ddp < 2; ddp++) {
        const char *replicas = ddp ? "rank 0 and rank 2 are replicas in the fsdp group"
                                   : "rank 0 and rank 2 are replicas in the dp_replicate group";
        snprintf(more, sizeof more, "%s %s", arguments, ddp ? "--sharding no_shard" : "--dp-replicate 2");
        end_run(&end, run_bad_replica, more);
        CHECK(ddp ? "no_shard: a bit that differs between ranks is found by the replica check"
                  : "hybrid: a bit that differs between replicas is found by the replica check",
              end.code == 2 && strstr(end.said, replicas) && strstr(end.said, "weights of model.layers.1 differ"),
              "code %d: %s", end.code, end.said);
    }
}

static void test_steps_not_finite(const char *arguments) {
    Ending end;
    most_skips = 0;
    end_run(&end, run_bad_gradient, arguments);
    most_skips = 10;
    CHECK("a gradient that is not finite names its tensor and rank, and ends the run after too many of them",
          end.code == 2 && strstr(end.said, "model.layers.1.mlp.up_proj.weight, in the shard of rank 1)"),
          "code %d: %s", end.code, end.said);
    Job *skips = make_job(arguments, 2, &transport_threads);
    launch(skips, 0, skipping);
    end_job(skips);
    CHECK("a step that is not finite is skipped by all ranks alike; the next one trains",
          skipped_alike == 6 && !changed_by_skip && trained_after == 4,
          "%d of 6 as expected, %d weights changed by a skipped step, %d of 4 by others", (int)skipped_alike,
          (int)changed_by_skip, (int)trained_after);
}

/* Writes tokens that no vocabulary of 64 has into a token file. */
static void spoil_tokens(const char *path, const int64_t *places, const int *tokens, int count) {
    FILE *f = fopen(path, "r+b");
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)tokens[i];
        fseek(f, 64 + 2 * (long)places[i], SEEK_SET);
        fwrite(&token, 2, 1, f);
    }
    fclose(f);
}

static void test_spoiled_data(void) {
    char arguments[512], expected[64];
    Ending end;
    int64_t places[12] = {1500};
    int tokens[12] = {4000}, runs = 0, right = 0;
    const char *path = make_token_file("outside.tok", 3000, 64, 0);
    spoil_tokens(path, places, tokens, 1);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 180 --timeout 20", FIXTURES, path);
    end_run(&end, bad_token, arguments);
    CHECK("a token outside the vocabulary is named with its place",
          end.code == 1 && strstr(end.said, "token 1500 is 4000"), "code %d: %s", end.code, end.said);
    for (int i = 0; i < 10; i++) {
        places[i] = spoiled_token(2 + i);
        tokens[i] = 4002 + i;
    }
    spoil_tokens(make_token_file("spoiled.tok", 211 * 16 + 1, 64, 0), places, tokens, 10);
    static const int workers[] = {0, 1, 2, 3, 7};
    snprintf(expected, sizeof expected, "token %" PRId64 " is 4002", spoiled_token(2));
    for (int i = 0; i < 50; i++, runs++) {
        end_run(&end, run_spoiled, &workers[i % 5]);
        right += end.code == 1 && strstr(end.said, expected);
    }
    CHECK("of several tokens outside the vocabulary the first in order is named, whichever worker meets it",
          right == runs, "%d of %d runs name %s; the last: %s", right, runs, expected, end.said);
    end_run(&end, run_dead_worker, make_token_file("dead.tok", 211 * 16 + 1, 64, 0));
    CHECK("a sample that never comes ends the run within the time-out",
          end.code == 2 && end.seconds < 3 && strstr(end.said, "step 1: only 5 of its 6 samples") &&
              strstr(end.said, "dead.tok"),
          "code %d after %.1f s: %s", end.code, end.seconds, end.said);
    path = make_token_file("shrinks.tok", 3000, 64, 0);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 20 --workers 2",
             FIXTURES, path);
    end_run(&end, run_truncated, arguments);
    int64_t first = -1, last = -1;
    const char *at = strstr(end.said, ": tokens ");
    if (at && sscanf(at, ": tokens %" SCNd64 " to %" SCNd64, &first, &last) != 2) last = -1;
    CHECK("a file that is truncated while it is read is named, with its tokens",
          end.code == 1 && strstr(end.said, path) && last == first + 16 && last >= 17, "code %d: %s", end.code,
          end.said);
}

static void test_control_characters(void) {
    static const struct {
        const char *name, *text, *want;
    } cases[] = {
        {"C0 and DEL", "a\x1b[31m\nb\tc\x7f.", "a [31m b c ."},
        {"C1 in UTF-8",
         "a\xC2\x80"
         "b\xC2\x9B"
         "31m\xC2\x9F.",
         "a  b  31m  ."},
        {"C1 as single bytes",
         "a\x80"
         "b\x9B"
         "31m\x9F.",
         "a b 31m ."},
        {"an overlong form of U+009B", "a\xE0\x82\x9B.", "a\xE0  ."},
        {"text in UTF-8", "\xC3\xBC \xE2\x80\xA6 \xC2\xA0 \xE6\xB0\xB4 \xF0\x9F\x98\x80",
         "\xC3\xBC \xE2\x80\xA6 \xC2\xA0 \xE6\xB0\xB4 \xF0\x9F\x98\x80"},
        {"text in Latin-1", "\xFC\xE4", "\xFC\xE4"},
        {"a character cut off", "a\xE2\x80", "a\xE2 "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s", cases[i].text);
        blank_control_characters(text, strlen(text));
        CHECK("messages: control characters become blanks, and text stays", !strcmp(text, cases[i].want), "%s: '%s'",
              cases[i].name, text);
    }
}

static void test_failures(void) {
    char arguments[512];
    const char *data = make_token_file("failures.tok", 3000, 64, 0);
    test_control_characters();
    test_late_rank(data);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 6", FIXTURES, data);
    test_collective_orders(arguments);
    test_culprits();
    test_recording_time();
    test_ranks_that_differ(arguments);
    test_messages_that_fail();
    test_steps_not_finite(arguments);
    test_spoiled_data();
}
