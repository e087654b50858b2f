/* test_data.h: the sampler deals out every window once an epoch, in one rank's order on any layout; the loader's
 * workers read what one thread reads, and its dry run counts its memory. Part of test_llama3.cu. */

/* Layouts of ranks against the rules of their numbers, over three epochs: what one rank would take sample by sample,
 * dealt out first over shard ranks, then micro-steps, then replicas; accumulated locally: micro-steps, shard ranks,
 * replicas. */
static void test_sampler(void) {
    static const Sampler layouts[] = {
        // samples, seed, pad, shards, replicas, shard, replica, accumulation, B, local
        {103, 9, 0, 3, 1, 0, 0, 2, 2, 0, 0, 0, 0, NULL, 1}, {103, 9, 0, 2, 2, 0, 0, 2, 2, 0, 0, 0, 0, NULL, 1},
        {103, 9, 0, 3, 2, 0, 0, 3, 1, 0, 0, 0, 0, NULL, 1}, {96, 9, 0, 1, 4, 0, 0, 2, 3, 0, 0, 0, 0, NULL, 1},
        {96, 9, 0, 2, 2, 0, 0, 3, 1, 0, 0, 0, 0, NULL, 1},  {5, 9, 0, 2, 2, 0, 0, 2, 2, 0, 0, 0, 0, NULL, 1}};
    for (size_t i = 0; i < 4 * sizeof layouts / sizeof *layouts; i++) {
        Sampler s = layouts[i / 4], one = {s.samples, s.seed, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, NULL, 1};
        s.pad = i % 2;
        s.local = i / 2 % 2;
        int64_t gb = sampler_global_batch(&s), steps = s.pad ? (s.samples + gb - 1) / gb : s.samples / gb, wrong = 0,
                uneven = 0;
        int64_t least = steps * gb / s.samples, most = (steps * gb + s.samples - 1) / s.samples;
        char name[200];
        if (!steps) continue; // a step larger than the data, and nothing to pad it with: the program refuses it
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int counts[128] = {0};
            for (int64_t step = 0; step < steps; step++) {
                int64_t at = step * gb;
                for (s.replica = 0; s.replica < s.replicas; s.replica++)
                    for (int outer = 0; outer < (s.local ? s.shards : s.micro_batches); outer++)
                        for (int inner = 0; inner < (s.local ? s.micro_batches : s.shards); inner++)
                            for (int b = 0; b < s.B; b++, at++) {
                                s.shard = s.local ? outer : inner;
                                int64_t window = sampler_sample(&s, epoch * steps + step, s.local ? inner : outer, b);
                                wrong += window != sampler_sample(&one, epoch * s.samples + at % s.samples, 0,
                                                                  0); // beyond the end: the head of this epoch
                                if (window >= 0 && window < s.samples) counts[window]++;
                            }
            }
            for (int w = 0; w < s.samples; w++) uneven += counts[w] < least || counts[w] > most;
        }
        snprintf(
            name, sizeof name,
            "%d shards x %d replicas x accum %d x B %d of %d samples, %s, tail %s: one rank's order over three epochs",
            s.shards, s.replicas, s.micro_batches, s.B, (int)s.samples, s.local ? "local" : "sharded",
            s.pad ? "padded" : "dropped");
        CHECK(name, wrong == 0 && uneven == 0, "%d of %d elsewhere; %d windows not %d to %d times an epoch", (int)wrong,
              (int)(3 * steps * gb), (int)uneven, (int)least, (int)most);
    }
}

/* 30 steps of 3 samples, then steps of 4 (--allow-changes): the epoch goes on where it was, and the next one begins as
 * any. */
static void test_sampler_goes_on(void) {
    Sampler before = {103, 9, 0, 1, 1, 0, 0, 3, 1, 0, 0, 0, 0, NULL, 1},
            after = {103, 9, 0, 1, 1, 0, 0, 4, 1, 0, 30, 0, 90, NULL, 1};
    for (int pad = 0; pad < 2; pad++) {
        int counts[2][103] = {{0}, {0}}, more = 0, missing[2] = {0, 0};
        int64_t first = pad ? 4 : 3, epoch,
                whole = pad ? 26 : 25; // steps that the 13 samples left make; that an epoch makes
        before.pad = after.pad = pad;
        for (int64_t step = 0; step < 30; step++)
            for (int m = 0; m < 3; m++) counts[0][sampler_sample(&before, step, m, 0)]++;
        for (int64_t step = 30; step < 30 + first + whole; step++)
            for (int m = 0; m < 4; m++) {
                sampler_position(&after, step, &epoch);
                if (epoch != (step >= 30 + first)) more = 1000;
                else counts[epoch][sampler_sample(&after, step, m, 0)]++;
            }
        for (int e = 0; e < 2; e++)
            for (int w = 0; w < 103; w++) {
                more += counts[e][w] > 1;
                missing[e] += !counts[e][w];
            }
        CHECK(pad ? "an epoch goes on with steps of another size, tail padded"
                  : "an epoch goes on with steps of another size, tail dropped",
              more == (pad ? 4 : 0) && missing[0] == (pad ? 0 : 1) && missing[1] == (pad ? 0 : 3),
              "%d windows twice, %d and %d never in two epochs", more, missing[0], missing[1]);
    }
}

static void open_loader(Loader *l, Device *dev, const Dataset *d, const Sampler *s, int64_t end, int workers) {
    Device dry_run;
    LoaderOptions options = {d->T, 0, 1, 0, 0, end, workers, 2};
    device_open_dry_run(&dry_run, 1, 0);
    loader_open(l, &dry_run, d, s, &options);
    device_open(dev, &dry_run, ".", 0, NULL);
    loader_open(l, dev, d, s, &options);
}

/* The same without threads: the caller claims and reads, in the order that it wants to try. */
static void open_loader_by_hand(Loader *l, Device *dev, const Dataset *d, const Sampler *s, int64_t end) {
    open_loader(l, dev, d, s, end, 1);
    loader_close(l, dev);
    l->claimed = l->produced = l->consumed = l->stop = 0;
}

/* Elements of a batch that are not what one thread reads, sample by sample. */
static int64_t count_different(const StepBatch *batch, const Dataset *d, const Sampler *s, int64_t step) {
    int32_t inputs[64], targets[64];
    char raw[5 * 65], error[256];
    int64_t different = 0, count = 0;
    for (int i = 0; i < s->micro_batches * s->B; i++) {
        count += dataset_sample(d, sampler_sample(s, step, i / s->B, i % s->B), inputs, targets, NULL, raw, error,
                                sizeof error);
        for (int t = 0; t < d->T; t++)
            different += inputs[t] != batch->inputs[i * d->T + t] || targets[t] != batch->targets[i * d->T + t];
    }
    return different + (batch->num_targets != count) + (batch->samples[0] != sampler_sample(s, step, 0, 0));
}

static const Sampler loader_samplers[] = {{211, 9, 0, 1, 1, 0, 0, 3, 2, 0, 0, 0, 0, NULL, 1},
                                          {211, 9, 1, 3, 1, 2, 0, 2, 1, 0, 0, 0, 0, NULL, 1},
                                          {211, 9, 1, 2, 2, 1, 1, 2, 2, 1, 0, 0, 0, NULL, 1},
                                          {211, 9, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, NULL, 1}};

static void test_loader_batches(Dataset *d) {
    static const int workers[] = {1, 2, 3, 7};
    char name[200];
    Device dev;
    Loader l;
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < 4; w++) {
            const Sampler *s = &loader_samplers[i];
            static uint64_t hashes[4][422]; // of one worker
            int64_t steps = 2 * sampler_steps_per_epoch(s), different = 0, ahead = 0, other_hashes = 0;
            open_loader(&l, &dev, d, s, steps, workers[w]);
            for (int64_t step = 0; step < steps; step++) {
                StepBatch *batch = loader_next(&l, &dev, 60);
                if (step % 16 == 0) usleep(2000); // the others read on, and leave this batch alone
                different += count_different(batch, d, s, step);
                if (!w) hashes[i][step] = batch->samples_hash;
                other_hashes += batch->samples_hash != hashes[i][step];
                pthread_mutex_lock(&l.lock);
                ahead = max_i64(ahead, (l.claimed + l.samples - 1) / l.samples - step);
                pthread_mutex_unlock(&l.lock);
                loader_release(&l, &dev);
            }
            loader_close(&l, &dev);
            device_close(&dev);
            snprintf(name, sizeof name,
                     "%d worker%s, %d shards x %d replicas x accum %d x B %d, tail %s: the batches of one thread, bit "
                     "for bit, over two epochs",
                     workers[w], w ? "s" : "", s->shards, s->replicas, s->micro_batches, s->B,
                     s->pad ? "padded" : "dropped");
            CHECK(name, different == 0 && other_hashes == 0 && ahead <= LOADER_DEPTH && l.claimed == steps * l.samples,
                  "%d elements and %d hashes of %d steps differ; at most %d steps ahead (bound %d), %d samples read",
                  (int)different, (int)other_hashes, (int)steps, (int)ahead, LOADER_DEPTH, (int)l.claimed);
        }
}

/* Samples that are read in another order than that of the steps. */
static void test_loader_order(Dataset *d) {
    Device dev;
    Loader l;
    open_loader_by_hand(&l, &dev, d, &loader_samplers[0], 10);
    int64_t whole[4] = {0}, n = l.samples;
    for (int64_t i = 0; i < 2 * n; i++) loader_claim(&l);
    for (int64_t i = 2 * n - 1; i >= n; i--) loader_read(&l, i, l.workers[0].raw);
    whole[0] = l.produced; // the second step is there, the first is not
    for (int64_t i = n - 1; i >= 1; i--) loader_read(&l, i, l.workers[0].raw);
    whole[1] = l.produced; // all but one sample
    loader_read(&l, 0, l.workers[0].raw);
    whole[2] = l.produced;
    CHECK("a step is handed out when all of its samples are there, and not before the step ahead of it",
          !whole[0] && !whole[1] && whole[2] == 2 && !count_different(&l.ring[0], d, &loader_samplers[0], 0) &&
              !count_different(&l.ring[1], d, &loader_samplers[0], 1),
          "%d whole without the first step's samples, %d without one of them, %d with all", (int)whole[0],
          (int)whole[1], (int)whole[2]);
    device_close(&dev);
}

/* Workers that have read ahead take no processor time. */
static void test_loader_at_rest(Dataset *d) {
    Device dev;
    Loader l;
    struct timespec before, after;
    open_loader(&l, &dev, d, &loader_samplers[0], 10, 7);
    loader_next(&l, &dev, 60);
    usleep(50000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep(300000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double busy = (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    loader_close(&l, &dev);
    device_close(&dev);
    CHECK("workers that have read ahead sleep", busy < 0.015,
          "7 of them: %.2f ms of processor time in 300 ms (bound 15)", 1e3 * busy);
}

/* The training step itself sleeps once a step, and each worker once if there is a sample for it. */
static void test_loader_at_work(Dataset *d) {
    char name[200];
    Device dev;
    Loader l;
    static const int sharers[][3] = {{7, 0, 6}, {2, 0, 2}, {7, 3, 1}}; // workers, sampler, workers that find a sample
    for (int i = 0; i < 3; i++) {
        struct rusage start, end;
        open_loader(&l, &dev, d, &loader_samplers[sharers[i][1]], 300, sharers[i][0]);
        getrusage(RUSAGE_SELF, &start);
        for (int step = 0; step < 200; step++) {
            loader_next(&l, &dev, 60);
            usleep(300);
            loader_release(&l, &dev);
        }
        getrusage(RUSAGE_SELF, &end);
        loader_close(&l, &dev);
        device_close(&dev);
        double sleeps = (double)(end.ru_nvcsw - start.ru_nvcsw) / 200;
        snprintf(name, sizeof name,
                 "%d workers, %d samples a step: a worker wakes once a step, and only where there is one for it",
                 sharers[i][0], (int)l.samples);
        CHECK(name, sleeps <= 1 + 2 * sharers[i][2],
              "%.2f times a step a thread goes to sleep, this one's own 1 with them (bound %d: each may meet the lock "
              "taken)",
              sleeps, 1 + 2 * sharers[i][2]);
    }
}

static void test_loader(void) {
    Dataset d = dataset_open(make_token_file("loader.tok", 211 * 16 + 1, 64, 5), 16, 64, 0);
    test_loader_batches(&d);
    test_loader_order(&d);
    test_loader_at_rest(&d);
    test_loader_at_work(&d);
    dataset_close(&d);
}

/* Memory: the dry run books what the run takes, whatever --workers and whatever machine. */
static size_t dry_run_loader(const Sampler *s, int workers, int cores, int *started) {
    Device dry_run;
    Loader l;
    LoaderOptions options = {256, 0, 1, 0, 0, 1, workers, cores};
    device_open_dry_run(&dry_run, 1, 0);
    loader_open(&l, &dry_run, NULL, s, &options);
    *started = l.num_workers;
    return device_peak(&dry_run);
}

static void workers_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    for (int step = 1; step <= 2; step++) train_step(&o->trainer, step);
    matmul_rate(&o->trainer.parallel.dev);
    size_t dry_run = o->dry_run.parallel.dev.arenas[MEM_HOST].peak,
           measured = o->trainer.parallel.dev.arenas[MEM_HOST].peak;
    char name[96];
    snprintf(name, sizeof name, "--workers %d: memory of the dry run = measured", j->run.workers);
    CHECK(name, dry_run == measured && device_peak(&o->dry_run.parallel.dev) == device_peak(&o->trainer.parallel.dev),
          "host memory of %zu and %zu bytes; %d started", dry_run, measured, o->trainer.loader.num_workers);
    close_rank(o);
}

static void test_loader_memory(void) {
    static const int workers[] = {0, 1, 2, 3, 7, LOADER_MAX_WORKERS};
    char arguments[512];
    for (int w = 0; w < 6; w++) {
        snprintf(arguments, sizeof arguments,
                 "--model %s/odd --data %s --seq 16 --batch 2 --accum 3 --threads 1 --workers %d", FIXTURES,
                 make_token_file("ranks.tok", 6000, 64, 7), workers[w]);
        Job *j = make_job(arguments, 1, &transport_threads);
        launch(j, 0, workers_body);
        end_job(j);
    }
    static const Sampler s = {100, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, NULL, 1};
    int few, four, given;
    size_t small = dry_run_loader(&s, 0, 1, &few), large = dry_run_loader(&s, 0, 64, &four),
           seven = dry_run_loader(&s, 7, 1, &given);
    CHECK("4 workers by default where there are cores, as much memory where there are not",
          few == 1 && four == 4 && given == 7 && small == large && seven > large,
          "%d on 1 core, %d on 64, %zu and %zu bytes; --workers 7: %d, %zu bytes", few, four, small, large, given,
          seven);
}

static void test_shuffling(void) {
    int64_t sizes[] = {1, 2, 3, 5, 64, 1000, 65537};
    for (int s = 0; s < 7; s++) {
        int64_t n = sizes[s], wrong = 0, moved = 0;
        char *seen = (char *)checked_malloc((size_t)n), name[96];
        for (int64_t i = 0; i < n; i++) {
            int64_t p = permute(i, n, 42);
            if (p < 0 || p >= n || seen[p]++) wrong++;
            moved += p != i;
        }
        snprintf(name, sizeof name, "shuffling %" PRId64 " windows is a permutation", n);
        CHECK(name, wrong == 0 && (n < 64 || moved > n * 9 / 10), "%" PRId64 " wrong, %" PRId64 " moved", wrong, moved);
        free(seen);
    }
}

/* Over all ranks every window comes once an epoch, with the tail dropped or padded; epochs differ. */
static void test_epochs(void) {
    for (int kind = 0; kind < 4; kind++) {
        int pad = kind % 2, local = kind / 2;
        enum { SAMPLES = 103, RANKS = 3, ACCUM = 2, BATCH = 2 };
        int counts[SAMPLES] = {0}, repeated = 0, once = 0, same = 0;
        Sampler s = {SAMPLES, 9, pad, RANKS, 1, 0, 0, ACCUM, BATCH, local, 0, 0, 0, NULL, 1},
                reference = {SAMPLES, 9, pad, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, NULL, 1};
        int64_t steps = sampler_steps_per_epoch(&s);
        for (int64_t step = 0; step < steps; step++)
            for (s.shard = 0; s.shard < RANKS; s.shard++)
                for (int m = 0; m < ACCUM; m++)
                    for (int b = 0; b < BATCH; b++) {
                        int64_t j = local ? (int64_t)s.shard * ACCUM + m
                                          : (int64_t)m * RANKS + s.shard; // numbered as they are summed
                        int64_t window = sampler_sample(&s, step, m, b);
                        if (step * 12 + j * BATCH + b < SAMPLES)
                            same += window == sampler_sample(&reference, step * 12 + j * BATCH + b, 0, 0);
                        counts[window]++;
                    }
        for (int i = 0; i < SAMPLES; i++) {
            once += counts[i] == 1;
            repeated += counts[i] > 1;
        }
        s.shard = 0;
        int other_epoch = 0;
        for (int64_t step = 0; step < steps; step++)
            other_epoch += sampler_sample(&s, step, 0, 0) != sampler_sample(&s, step + steps, 0, 0);
        CHECK(pad ? "padded epoch: every window is used, the head again at the end"
                  : "dropped tail: every window at most once an epoch",
              pad ? once + repeated == SAMPLES && repeated == steps * 12 - SAMPLES
                  : repeated == 0 && once == steps * 12,
              "%d once, %d twice, of %d in %d steps", once, repeated, SAMPLES, (int)steps);
        CHECK(local ? "accumulating locally, ranks take consecutive micro-batches of one rank's order"
                    : "ranks take the samples of one rank's order in turn (DistributedSampler's perm[rank::world])",
              same == (pad ? (int)SAMPLES : steps * 12), "%d equal", same);
        CHECK("the next epoch has another order", other_epoch >= steps - 1, "%d of %d steps begin elsewhere",
              other_epoch, (int)steps);
    }
}

/* Windows of a token file: tokens, targets, mask, the partial last window. */
static void test_windows(void) {
    char error[256], raw[200];
    int32_t inputs[16], targets[16];
    Dataset d = dataset_open(make_token_file("windows.tok", 100, 64, 5), 16, 64, 1);
    int next_token = 0, masked = 0, total = 0;
    for (int64_t w = 0; w < d.windows; w++) {
        int n = dataset_sample(&d, w, inputs, targets, NULL, raw, error, sizeof error);
        total += n;
        for (int t = 0; t < 16; t++) {
            next_token += t < 15 && targets[t] >= 0 && targets[t] != inputs[t + 1] && w * 16 + t + 1 < 99;
            masked += targets[t] < 0 && (w * 16 + t + 1) % 5 != 0 && w * 16 + t + 1 < 100;
        }
    }
    CHECK("targets are the next token, masked ones ignored, all counted once",
          next_token == 0 && masked == 0 && total == 99 - 19, "%d wrong, %d wrongly ignored, %d of 80 targets",
          next_token, masked, total);
    dataset_close(&d);
}

/* The hash of the first step's samples. */
static uint64_t hash_of_first_step(const Dataset *d, const Sampler *s) {
    Device dev;
    Loader l;
    open_loader(&l, &dev, d, s, 1, 1);
    uint64_t h = loader_next(&l, &dev, 60)->samples_hash;
    loader_close(&l, &dev);
    device_close(&dev);
    return h;
}

/* A file with the same header but other tokens: start-up and the step reports tell it apart. */
static void test_other_contents(void) {
    const char *path = strdup(make_token_file("contents.tok", 3000, 64, 0));
    const char *copy = strdup(make_token_file("other-contents.tok", 3000, 64, 0));
    FILE *f = fopen(copy, "r+b");
    uint16_t tokens[2999];
    for (int i = 0; i < 2999; i++) tokens[i] = (uint16_t)((i * 7 + 3) % 64);
    fseek(f, 64 + 2, SEEK_SET);
    fwrite(tokens, sizeof tokens, 1, f);
    fclose(f);
    Dataset d = dataset_open(path, 16, 64, 0), same = dataset_open(path, 16, 64, 0),
            other = dataset_open(copy, 16, 64, 0);
    const Sampler *s = &loader_samplers[3];
    CHECK("other tokens behind the same header have another fingerprint",
          d.fingerprint == other.fingerprint && data_contents(&d) == data_contents(&same) &&
              data_contents(&d) != data_contents(&other),
          "%016" PRIx64 " and %016" PRIx64, data_contents(&d), data_contents(&other));
    CHECK("the samples of a step have another hash if their tokens differ",
          hash_of_first_step(&d, s) == hash_of_first_step(&same, s) &&
              hash_of_first_step(&d, s) != hash_of_first_step(&other, s),
          "%016" PRIx64 " and %016" PRIx64, hash_of_first_step(&d, s), hash_of_first_step(&other, s));
    dataset_close(&d);
    dataset_close(&same);
    dataset_close(&other);
}

static void test_data(void) {
    test_other_contents();
    test_shuffling();
    test_epochs();
    test_windows();
    test_sampler();
    test_sampler_goes_on();
    test_loader();
    test_loader_memory();
}
