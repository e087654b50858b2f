/* test_checkpoints.h: a checkpoint's bytes depend on the state alone; a run that resumes from one is the run that was
 * never stopped; every sample is consumed once an epoch, across resumes. A part of test_llama3.cu. What happens when a
 * run dies while it saves, and what damaged files say, is tested from outside: checkpoints.sh. */

typedef struct {
    int world;
    const char *options;
    int split;
} SavingLayout; // split: tp x cp x pp, whose ranks share samples; 0: none

/* Every layout resumes from one rank's checkpoint, with as many micro-batches of one sample in a step: its next
 * checkpoint is one rank's. */
static void goes_on(int tied, const SavingLayout *l, const char *model, const char *data, const char *reference) {
    char said[SAID], out[300], name[256], step2[320], step4[320], theirs[320];
    int files, code;
    snprintf(out, sizeof out, "%s-%d", scratch_path("goes-on"), l->world);
    snprintf(step2, sizeof step2, "%s/step-00000002", reference);
    snprintf(step4, sizeof step4, "%s/step-00000004", reference);
    code = run_whole(said, l->world,
                     "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --timeout 60 --deterministic "
                     "--batch 1 --accum %d --resume %s --out %s%s",
                     model, data, (l->split ? 8 * l->split : 8) / l->world, step2, out, l->options);
    snprintf(theirs, sizeof theirs, "%s/step-00000004", out);
    int differ = files_that_differ(step4, theirs, &files);
    snprintf(name, sizeof name, "%s: 2 steps, and 2 more on %d ranks%s, are 4 steps", tied ? "tied" : "untied",
             l->world, l->options);
    CHECK(name, code == 0 && !differ && files >= 4, "%d of %d files differ; code %d %s", differ, files, code,
          code ? error_line(said) : "");
    remove_directory(theirs);
    char command[400];
    snprintf(command, sizeof command, "rm -rf %s", out);
    if (system(command)) printf("could not remove %s\n", out);
}

/* Any layout saves the same state again. */
static void saves_again(int tied, const SavingLayout *l, const char *model, const char *data, const char *reference) {
    char said[SAID], out[300], name[256], step4[320], theirs[320], command[400];
    int files, code;
    snprintf(out, sizeof out, "%s-%d", scratch_path("again"), l->world);
    snprintf(step4, sizeof step4, "%s/step-00000004", reference);
    snprintf(theirs, sizeof theirs, "%s/step-00000004", out);
    code = run_whole(said, l->world,
                     "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --timeout 60 --batch 1 --resume "
                     "%s --allow-changes --out %s%s",
                     model, data, step4, out, l->options);
    int differ = files_that_differ(step4, theirs, &files);
    snprintf(name, sizeof name, "%s: a checkpoint that %d ranks%s read and save again has the same bytes",
             tied ? "tied" : "untied", l->world, l->options);
    CHECK(name, code == 0 && !differ && files >= 4, "%d of %d files differ; code %d %s", differ, files, code,
          code ? error_line(said) : "");
    snprintf(command, sizeof command, "rm -rf %s", out);
    if (system(command)) printf("could not remove %s\n", out);
}

static void compare_saving(int all) {
    static const SavingLayout goers[] = {{1, "", 0},
                                         {2, "", 0},
                                         {4, " --dp-replicate 2", 0},
                                         {8, " --save-mode async", 0},
                                         {4, " --sharding no_shard", 0},
                                         {2, " --offload all", 0}, // power-of-two layouts: equal bits
                                         {8, " --dp-replicate 4 --sharding shard_grad_op --save-mode async", 0},
                                         {4, " --accumulate local", 0},
                                         {2, " --sharding no_shard --offload all --save-mode async", 0},
                                         {4, " --wrap size:30000 --recompute full", 0},
                                         {8, " --dp-shard 2 --dp-replicate 4 --sharding no_shard", 0}};
    static const SavingLayout savers[] = {{1, "", 0},
                                          {2, " --sharding no_shard", 0},
                                          {3, "", 0},
                                          {4, " --save-mode async", 0},
                                          {6, " --dp-replicate 2", 0},
                                          {8, "", 0},
                                          {1, " --save-mode async", 0},
                                          {2, " --dp-replicate 2", 0},
                                          {3, " --sharding no_shard --save-mode async", 0},
                                          {4, " --dp-replicate 2 --sharding shard_grad_op", 0},
                                          {6, " --dp-replicate 3 --offload all", 0},
                                          {8, " --dp-replicate 4", 0},
                                          {3, " --wrap size:30000", 0}};
    const char *data = strdup(make_token_file("checkpoints.tok", 3000, 64, 0));
    for (int tied = 0; tied < 2;
         tied++) { // the vocabulary of 131 divides nothing; tied, the files are cut: weights in 3, moments in 6
        const char *model = small_model(tied);
        file_bytes = tied ? 100000 : 5000000000ll;
        const char *reference = saved_run(tied, "saved", model, data);
        for (int i = 0; i < (all ? 11 : 6); i++) goes_on(tied, &goers[i], model, data, reference);
        for (int i = 0; i < (all ? 13 : 6); i++) saves_again(tied, &savers[i], model, data, reference);
    }
    file_bytes = 5000000000ll;
}

// ---------------------------------------------------------------------------
// samples across resumes

static void audit_child(void *out) { audit((const char *)out); }

/* Three epochs in six runs on changing numbers of ranks. `pad`: the tail of an epoch. */
static void audit_run(int pad) {
    static const struct {
        int world, accum, until;
        const char *options;
    } runs[] = {{1, 12, 7, ""},
                {2, 6, 12, ""},
                {4, 3, 20, " --dp-replicate 2 --sharding no_shard"},
                {3, 4, 33, ""},
                {6, 2, 41, " --accumulate local"},
                {12, 1, 48, " --dp-replicate 3"}};
    char said[SAID], name[160], path[320];
    const char *data = strdup(make_token_file("audit.tok", 3001, 64, 0)),
               *out = strdup(
                   scratch_path(pad ? "audit-pad" : "audit-drop")); // 187 windows of 16: 15 steps of 12 and 7 more
    int code = 0;
    for (int i = 0; i < 6 && !code; i++)
        code =
            run_whole(said, runs[i].world,
                      "--model %s --data %s --seq 16 --steps %d --lr 1e-4 --min-lr 1e-4 --warmup 0 --threads 1 "
                      "--timeout 60 --batch 1 --accum %d --tail %s --out %s --resume auto --keep 1%s",
                      small_model(0), data, runs[i].until, runs[i].accum, pad ? "pad" : "drop", out, runs[i].options);
    snprintf(name, sizeof name, "six runs on 1, 2, 4, 3, 6 and 12 ranks, each from the last one's checkpoint, tail %s",
             pad ? "padded" : "dropped");
    CHECK(name, code == 0, "code %d %s", code, code ? error_line(said) : "");
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    int64_t epochs = figure_in(said, "\"whole_epochs\""), dropped = figure_in(said, "\"dropped\""),
            samples = figure_in(said, "\"samples\"");
    snprintf(name, sizeof name, "--audit: every window once in each of three epochs, tail %s",
             pad ? "padded" : "dropped");
    CHECK(name, code == 0 && epochs == 3 && dropped == (pad ? 0 : 3 * 7) && samples == 48 * 12,
          "%" PRId64 " whole epochs, %" PRId64 " windows dropped, %" PRId64 " samples: %.200s", epochs, dropped,
          samples, said);
    snprintf(path, sizeof path, "%s/samples.jsonl", out);
    size_t length = 0;
    char *text = read_file(path, &length), *line = strstr(text, "\"step\":20,"), *first = strstr(text, "\"samples\":["),
         *tenth = strstr(line, "\"samples\":[");
    memcpy(tenth + 11, first + 11, 4); // the window of step 1 once more, in step 20 of the second epoch: there it is
                                       // consumed twice, and another one never
    FILE *f = fopen(path, "w");
    fwrite(text, 1, length, f);
    fclose(f);
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    snprintf(name, sizeof name, "--audit: a window that is consumed twice, or never, is found, tail %s",
             pad ? "padded" : "dropped");
    CHECK(name, code == 1, "code %d: %s", code, error_line(said));
    f = fopen(path, "w"); // a step is lost
    fwrite(text, 1, (size_t)(line - text) - 1, f);
    line = strchr(line, '\n') + 1;
    fwrite(line, 1, length - (size_t)(line - text), f);
    fclose(f);
    code = child_says(audit_child, (void *)(uintptr_t)out, said, sizeof said);
    CHECK("--audit: a step that is not told is found", code == 1, "code %d: %s", code, error_line(said));
    free(text);
}

#ifdef __linux__
/* Bytes of VmRSS, what is resident now, or VmHWM, the most there was since memory_forget. */
static double memory_told(const char *name) {
    char line[256];
    double kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, name, strlen(name))) kb = strtod(line + strlen(name) + 1, NULL);
    if (f) fclose(f);
    return 1024 * kb;
}

static int memory_forget(void) {
    FILE *f = fopen("/proc/self/clear_refs", "w");
    return f && fputs("5", f) >= 0 && !fclose(f);
}

typedef struct {
    double start, loaded, expected, before, saved, more, state;
} Resident;                // bytes, of both ranks
static Resident *resident; // shared with the child that measures

/* A step, and a save of it, by two ranks of this process; what they need beside their state. */
static void saving_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    size_t unit = 0, copies = 0, chunks = (size_t)trainer->writer.num_buffers * FILE_CHUNK_BYTES + PAGE_BYTES;
    for (int u = 0; u < trainer->model.table.num_units; u++) {
        unit = trainer->parallel.fsdp.units[u].padded > (int64_t)unit ? (size_t)trainer->parallel.fsdp.units[u].padded
                                                                      : unit;
        if ((void *)trainer->parallel.fsdp.units[u].sharded_weights != (void *)trainer->parallel.fsdp.units[u].master)
            copies +=
                sizeof(floatX) *
                (size_t)trainer->parallel.fsdp.units[u].state_count; // in bf16 what is read is rounded, to be gathered
    }
    comm_barrier(&trainer->parallel.comm, "all have loaded");
    if (rank == 0) {
        resident->state = 2.0 * (double)(trainer->parallel.dev.arenas[MEM_PARAMS].used +
                                         trainer->parallel.dev.arenas[MEM_OPTIMIZER].used);
        resident->loaded = memory_told("VmHWM") - resident->start;
        resident->expected =
            resident->state + 2.0 * (double)copies +
            2.0 * sizeof(float) * ((double)unit + (1 << 20)); // fsdp_set_state reads a million elements at a time
    }
    train_step(trainer, trainer->progress.step + 1);
    comm_barrier(&trainer->parallel.comm, "all have trained");
    if (rank == 0) {
        resident->before = memory_told("VmRSS");
        resident->more = 2.0 * (double)(sizeof(float) * unit + chunks);
        memory_forget();
    }
    comm_barrier(&trainer->parallel.comm, "before saving");
    checkpoint_save(&trainer->writer, &trainer->progress);
    comm_barrier(&trainer->parallel.comm, "all have saved");
    if (rank == 0) resident->saved = memory_told("VmHWM") - resident->before;
    close_rank(o);
}

/* In a process of its own: glibc's reading ahead (aio) leaves threads behind, which those that are forked later would
 * wait for in vain. */
static void measure_saving(void *arguments) {
    Job *j = make_job((const char *)arguments, 2, &transport_threads);
    job_check_outputs(j);
    memory_forget();
    resident->start = memory_told("VmRSS");
    launch(j, 0, saving_body);
    end_job(j);
}

/* The most memory that is resident while state is read and written: no whole model beside the shards, in no rank. */
static void test_memory_of_saving(void) {
    char said[SAID], arguments[1024], model[300], out[2][300];
    const double spare = 16e6; // stacks, buffers of files, what the libraries take
    snprintf(model, sizeof model, "%s", scratch_path("many-blocks"));
    snprintf(out[0], sizeof out[0], "%s", scratch_path("many-saved"));
    snprintf(out[1], sizeof out[1], "%s", scratch_path("many-again"));
    const char *data = make_token_file("many.tok", 3000, 64, 0);
    mkdir(model, 0777);
    char path[400];
    snprintf(path, sizeof path, "%s/config.json", model);
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"model_type\":\"llama\",\"hidden_size\":128,\"num_hidden_layers\":24,\"num_attention_heads\":4,\"num_"
               "key_value_heads\":4,\"intermediate_size\":512,\"vocab_size\":64,\"max_position_embeddings\":64}");
    fclose(f);
    const char *common = "--threads 1 --timeout 60 --seq 8 --batch 1 --lr 1e-3 --min-lr 1e-3";
    int code = run_whole(said, 2, "--model %s --data %s %s --steps 1 --out %s", model, data, common, out[0]);
    snprintf(arguments, sizeof arguments, "--model %s --data %s %s --steps 2 --out %s --resume %s/step-00000001", model,
             data, common, out[1], out[0]);
    if (!memory_forget()) {
        printf("this kernel does not forget the most memory that there was: memory while saving is left out\n");
        return;
    }
    resident = (Resident *)mmap(NULL, sizeof *resident, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!code) code = child_says(measure_saving, arguments, said, sizeof said);
#ifdef __SANITIZE_ADDRESS__
    int seen = 1; // the sanitizer has pages of before in store, which are resident already
#else
    int seen = resident->loaded > 0.5 * resident->state;
#endif
    CHECK("memory while a checkpoint is read: the state, a unit and what is read at a time",
          code == 0 && seen && resident->loaded <= resident->expected + spare,
          "%.1f MB, <= %.1f + %.0f MB, for %.1f MB of state%s%s", resident->loaded / 1e6, resident->expected / 1e6,
          spare / 1e6, resident->state / 1e6, code ? "; " : "", code ? error_line(said) : "");
    CHECK("memory while a checkpoint is saved: a unit and the planned chunks more than before",
          code == 0 && resident->saved <= resident->more + spare,
          "%.1f MB more, <= %.1f + %.0f MB, for %.1f MB of state", resident->saved / 1e6, resident->more / 1e6,
          spare / 1e6, resident->state / 1e6);
    munmap(resident, sizeof *resident);
}
#else
static void test_memory_of_saving(void) {} // Linux tells
#endif

static void test_checkpoints(void) {
    test_memory_of_saving();
    compare_saving(0);
    for (int pad = 0; pad < 2; pad++) audit_run(pad);
}
static void test_checkpoints_all(void) { compare_saving(1); }

#ifdef HAVE_MPI
/* Processes resume from a checkpoint that threads wrote, and write its bytes. */
static void test_checkpoints_mpi(int process, int world) {
    char arguments[2048], out[280], theirs[320];
    const char *model = small_model(0), *data = strdup(make_token_file("checkpoints.tok", 3000, 64, 0));
    snprintf(out, sizeof out, "%s", scratch_path("saved"));
    for (int mode = 0; mode < 3; mode++) { // save, go on, save again
        int power = 8 % world == 0, files;
        static const char *const modes[] = {" --save-mode sync", "", " --save-mode async"};
        if (mode < 2 && !power) continue;
        char from[400] = "", here[300];
        snprintf(here, sizeof here, "%s-%d", out, mode);
        if (mode == 1)
            snprintf(from, sizeof from, " --resume %s-0/step-00000002%s", out, world % 2 ? "" : " --dp-replicate 2");
        if (mode == 2) snprintf(from, sizeof from, " --resume %s-0/step-00000004 --allow-changes", out);
        if (mode == 2 && !power) return; // three ranks have no reference of their own here: threads test them
        snprintf(arguments, sizeof arguments,
                 "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --timeout 60 --deterministic --batch "
                 "1 --accum %d --save-every 2 --out %s%s%s",
                 model, data, 8 / world, here, from, modes[mode]);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, rank_main);
        end_job(j);
        MPI_Barrier(MPI_COMM_WORLD);
        if (process || !mode) continue;
        char first[320];
        snprintf(first, sizeof first, "%s-0/step-00000004", out);
        snprintf(theirs, sizeof theirs, "%s/step-00000004", here);
        int differ = files_that_differ(first, theirs, &files);
        snprintf(arguments, sizeof arguments, "%d processes %s", world,
                 mode == 1 ? "resume from a checkpoint as the run that was not stopped"
                           : "save a checkpoint again, async, with the same bytes");
        CHECK(arguments, !differ && files >= 4, "%d of %d files differ", differ, files);
    }
}
#endif
