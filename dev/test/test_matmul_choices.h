/* test_matmul_choices.h: --matmul-choices, with the proposals of dev/cuda_on_cpu's cuBLASLt, whose times are known: the
 * fastest is chosen, all ranks and later runs choose alike, refused proposals are passed over, and files that belong to
 * another machine or are damaged are refused. Part of test_llama3.cu.
 */
static struct {
    int choices, of_file, plain; // of rank 0: matmuls with a choice, from the file; entries without an algorithm
    int slower;                  // entries that do not compute with their fastest proposal
    int differ;                  // ranks whose choices are not rank 0's
    double losses[3];
} chosen;

/* Is the entry's algorithm slower than another that cuBLASLt proposes for it and does not refuse? */
static int is_slower(Device *dev, const CudaMatmulEntry *m) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    int found = matmul_algorithms(dev->cuda_matmuls, m, results, MATMUL_CANDIDATES), slower = 0;
    for (int i = 0; i < found; i++) {
        int is_refused = cuda_on_cpu.refused_algorithms >> i & 1;
        slower |= !is_refused && results[i].algo.data[7] < m->algorithms[m->now].data[7];
    }
    return slower;
}

static void choosing_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    Device *dev = &trainer->parallel.dev;
    int world = trainer->parallel.mesh.world;
    for (int step = 1; step <= 3; step++) {
        StepStats s = train_step(trainer, step);
        if (rank == 0) chosen.losses[step - 1] = s.loss;
        if (step > 1) continue;
        matmul_rate(dev);
        check_first_step(trainer); // expected = dry run = measured, or the test ends here
    }
    uint64_t mine = hash_bytes(HASH_START, &trainer->matmul_choices, sizeof trainer->matmul_choices);
    uint64_t *all = new_array(uint64_t, world);
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "choices", &mine, all, sizeof mine);
    for (int r = 1; r < world && rank == 0; r++) chosen.differ += all[r] != all[0];
    free(all);
    for (CudaMatmulEntry *m = dev->cuda_matmuls->entries; m; m = m->next) {
        int none = m->now == m->count, slower = none ? 0 : is_slower(dev, m);
        __atomic_fetch_add(&chosen.plain, none, __ATOMIC_RELAXED);
        __atomic_fetch_add(&chosen.slower, slower, __ATOMIC_RELAXED);
    }
    for (int i = 0; i < trainer->matmul_choices.count && rank == 0; i++) {
        chosen.choices += trainer->matmul_choices.list[i].is_chosen;
        chosen.of_file += trainer->matmul_choices.list[i].is_of_file;
    }
    close_rank(o);
}

/* Three steps; `file` NULL: without --matmul-choices. */
static void run_choosing(const char *file, int world, const Transport *transport, const char *more) {
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "--model %s/base --data %s --seq 16 --batch 2 --accum 2 --steps 3 --warmup 0 --lr 1e-3 --threads 1%s%s%s",
             fixture_dir, make_token_file("choices.tok", 6000, 64, 0), more, file ? " --matmul-choices " : "",
             file ? file : "");
    memset(&chosen, 0, sizeof chosen);
    Job *j = make_job(arguments, world, transport);
    launch(j, 0, choosing_body);
    end_job(j);
}

static double worst_loss(const double *losses) {
    double worst = 0;
    for (int i = 0; i < 3; i++) worst = worst_of(worst, fabs(chosen.losses[i] / losses[i] - 1));
    return worst;
}

static void test_choosing(void) {
    const char *file = checked_strdup(scratch_path("choices.json"));
    double losses[3];
    run_choosing(NULL, 1, &transport_threads, "");
    memcpy(losses, chosen.losses, sizeof losses);
    CHECK("without --matmul-choices some matmuls are slower than they could be", chosen.slower > 2, "%d matmuls",
          chosen.slower);
    run_choosing(file, 1, &transport_threads, "");
    int measured = chosen.choices;
    CHECK("--matmul-choices computes each matmul with its fastest proposal",
          !chosen.slower && !chosen.plain && measured > 10 && !chosen.of_file,
          "%d matmuls, %d slower, %d by no proposal", measured, chosen.slower, chosen.plain);
    double worst = worst_loss(losses);
    CHECK("measuring leaves no trace in the losses", worst == 0, "off by %.2g", worst);
    uint8_t before[32], after[32];
    sha256_of_file(file, before);
    run_choosing(file, 1, &transport_threads, "");
    sha256_of_file(file, after);
    CHECK("a second run takes every choice from the file", chosen.of_file == measured && !chosen.slower, "%d of %d",
          chosen.of_file, measured);
    CHECK("and leaves the file as it is", !memcmp(before, after, 32), "%s", file);
    run_choosing(file, 1, &transport_threads, " --batch 3");
    CHECK("other options add their matmuls to the file", chosen.of_file > 0 && chosen.choices > chosen.of_file,
          "%d choices, %d of them from the file", chosen.choices, chosen.of_file);
    int all = chosen.choices;
    run_choosing(file, 1, &transport_threads, " --batch 3");
    CHECK("where the next run finds them", chosen.of_file == all, "%d of %d", chosen.of_file, all);
}

static void test_refused_proposals(void) {
    const char *file = checked_strdup(scratch_path("refused.json")), *kept = checked_strdup(scratch_path("kept.json"));
    double losses[3];
    run_choosing(NULL, 1, &transport_threads, "");
    memcpy(losses, chosen.losses, sizeof losses);
    for (unsigned refused = 1; refused <= 31; refused = 2 * refused + 1) {
        char name[128];
        int all = refused == 31;
        cuda_on_cpu.refused_algorithms = refused;
        run_choosing(NULL, 1, &transport_threads, "");
        double worst = worst_loss(losses), bound = all ? 1e-2 : 0; // the plain kernel sums in another order
        snprintf(name, sizeof name, "proposals %#x are refused: %s computes", refused,
                 all ? "the plain kernel" : "the next one");
        CHECK(name, all ? chosen.plain > 10 && worst <= bound : !chosen.plain && worst == 0,
              "%d matmuls by no proposal, losses off by %.2g <= %.2g", chosen.plain, worst, bound);
        unlink(file);
        run_choosing(file, 1, &transport_threads, "");
        snprintf(name, sizeof name, "proposals %#x are refused: the fastest of the others is chosen, if there is one",
                 refused);
        CHECK(name, !chosen.slower && (chosen.choices == 0) == all, "%d choices, %d slower", chosen.choices,
              chosen.slower);
    }
    cuda_on_cpu.refused_algorithms = 0;
    run_choosing(kept, 1, &transport_threads, "");
    cuda_on_cpu.refused_algorithms = 0x1E; // all but the first, after they were chosen
    run_choosing(kept, 1, &transport_threads, "");
    CHECK("a choice that is refused later gives way to a proposal that works", !chosen.plain, "%d by no proposal",
          chosen.plain);
    cuda_on_cpu.refused_algorithms = 0;
}

static void test_ranks_choose_alike(void) {
    static const char *const layouts[] = {"", " --tp 2 --pp 2 --accum 4", " --cp 2 --dp-replicate 2", " --pp 2"};
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 4;
    for (int i = 0; i < 4; i++) {
        char name[128], file[300], more[128];
        snprintf(file, sizeof file, "%s.%d", scratch_path("ranks.json"), i);
        snprintf(more, sizeof more, "%s --transport nccl", layouts[i]);
        run_choosing(file, 4, transport_find("nccl"), more);
        snprintf(name, sizeof name, "4 ranks%s: all make the same choices, and the fastest", layouts[i]);
        CHECK(name, !chosen.differ && !chosen.slower && chosen.choices > 10, "%d choices, %d ranks differ, %d slower",
              chosen.choices, chosen.differ, chosen.slower);
    }
    cuda_on_cpu.devices = devices;
}

static void run_with_choices(void *file) { run_choosing((const char *)file, 1, &transport_threads, ""); }

/* Replaces the first `from` in the file's text by `to`. */
static void change_file(const char *to_path, const char *path, const char *from, const char *to) {
    size_t length;
    char *text = read_regular_file(path, &length), *at = strstr(text, from);
    FILE *f = fopen(to_path, "w");
    fprintf(f, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    fclose(f);
    free(text);
}

static void test_choice_files(void) {
    const char *good = checked_strdup(scratch_path("good.json")), *bad = checked_strdup(scratch_path("bad.json"));
    static const struct {
        const char *name, *from, *to, *says;
    } cases[] = {{"of another GPU", "CUDA on a CPU (sm_90)", "NVIDIA A100-SXM4-80GB",
                  "holds choices for \"NVIDIA A100-SXM4-80GB\""},
                 {"of another cuBLASLt", "13.0.0", "12.4.5", "cuBLASLt 12.4.5"},
                 {"of the other precision", "\"" PRECISION_NAME "\"", "\"fp64\"", "and fp64, but this run computes on"},
                 {"that is cut off", "\"matmuls\"", "\0", "is not a JSON object"},
                 {"of something else", "\"matmuls\"", "\"layers\"", "is no file of --matmul-choices"},
                 {"with an algorithm that is too short", "\"algorithm\":\t\"", "\"algorithm\":\t\"00\", \"x\":\t\"",
                  "128 hexadecimal digits"},
                 {"with a matmul that lacks a size", "\"K\"", "\"k\"", "\"K\" is missing"}};
    run_choosing(good, 1, &transport_threads, "");
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        char name[128], said[SAID];
        change_file(bad, good, cases[i].from, cases[i].to);
        if (!cases[i].to[0] && truncate(bad, 60)) return;
        int code = child_says(run_with_choices, (void *)bad, said, sizeof said);
        const char *line = sentence(said);
        snprintf(name, sizeof name, "a file of choices %s is refused", cases[i].name);
        CHECK(name, code == 1 && strstr(line, cases[i].says) && strstr(line, bad), "exit %d: %s", code, line);
    }
    char said[SAID];
    int code = child_says(run_with_choices, (void *)"/nowhere/choices.json", said, sizeof said);
    const char *line = sentence(said);
    CHECK("a file that cannot be written is an error", code == 1 && strstr(line, "cannot be written"), "exit %d: %s",
          code, line);
}

static void test_matmul_choices(void) {
    test_choosing();
    test_refused_proposals();
    test_ranks_choose_alike();
    test_choice_files();
}
