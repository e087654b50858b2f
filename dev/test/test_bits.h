/* test_bits.h: with --deterministic 20 steps of data parallelism have the bits of one rank in losses and norms, and
 * replicas keep equal weights. All pairs of options are compared in test_layouts.h. Part of test_llama3.cu. */

/* --deterministic: 20 steps of 8 micro-batches, whoever computes them: the same bits of loss and norm. */
typedef struct {
    double loss, norm;
} StepBits;
enum { MOST_BITS = 50 };
static StepBits bits_of[MOST_BITS];
static int bits_steps = 20;     // of them
static float *bits_weights;     // after 20 steps, of the whole model; NULL: not wanted
static const char *bits_frozen; // tensors whose names have this word are not trained; NULL: all are

static void bits_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    TensorTable *table = &o->trainer.model.table;
    for (int i = 0; i < table->num_tensors && bits_frozen; i++)
        table->tensors[i].is_frozen |= strstr(table->tensors[i].name, bits_frozen) != NULL;
    for (int step = 1; step <= bits_steps; step++) {
        StepStats s = train_step(&o->trainer, step);
        if (rank == 0) {
            bits_of[step - 1].loss = s.loss;
            bits_of[step - 1].norm = s.grad_norm;
        }
        if (step == 1) {
            matmul_rate(&o->trainer.parallel.dev);
            check_first_step(&o->trainer);
        }
        if (step == 20 && bits_weights) collect_state(&o->trainer, STATE_MASTER, bits_weights);
    }
    close_rank(o);
}

/* One rank's bits into `first` (rank 0 of a run keeps them), or compared with them. */
static void compare_bits(const char *model, int process, int world, int B, const Transport *transport, const char *more,
                         StepBits *first, int reference) {
    char arguments[512], name[300];
    snprintf(arguments, sizeof arguments,
             "--model %s/%s --data %s --seq 16 --batch %d --accum %d --deterministic --lr 1e-3 --warmup 5 --steps 20 "
             "--timeout 60%s",
             FIXTURES, model, make_token_file("bits.tok", 9000, 64, 7), B, 8 / world, more);
    Job *j = make_job(arguments, world, transport);
    launch(j, process, bits_body);
    end_job(j);
    int equal = 0;
    if (reference) { // nothing to compare with yet
        memcpy(first, bits_of, sizeof *first * (size_t)bits_steps);
        return;
    }
    for (int i = 0; i < bits_steps; i++) equal += !memcmp(&bits_of[i], &first[i], sizeof bits_of[i]);
    const char *whose = strstr(more, " --pp ") || strstr(more, " --cp ") ? "seed 0's" : "one rank's";
    snprintf(name, sizeof name, "%s, B %d: %d deterministic steps on %d ranks x accum %d over %s%s have %s bits", model,
             B, bits_steps, world, 8 / world, transport->name, more, whose);
    if (process == 0)
        CHECK(name, equal == bits_steps, "%d of %d steps equal, last loss %.9g, norm %.9g", equal, bits_steps,
              bits_of[bits_steps - 1].loss, bits_of[bits_steps - 1].norm);
}

static void test_bits(void) {
    for (int tied = 0; tied < 2; tied++)
        for (int B = 1; B <= (CUDA_BUILD ? 1 : 2); B++) {
            StepBits first[20] = ZERO;
            char more[192];
            const char *model = tied ? "tied" : "odd";
            int part = CUDA_BUILD ? 6 : 3; // one of so many combinations
            if (is_short) part = 12;
            compare_bits(model, 0, 1, B, &transport_threads, "", first, 1);
            compare_bits(model, 0, 1, B, &transport_threads, " --threads 1", first, 0);
            compare_bits(model, 0, 1, B, &transport_threads, " --recompute full", first, 0);
            for (int world = 2; world <= (CUDA_BUILD ? 4 : 8); world *= 2)
                for (int replicate = 1; replicate <= world; replicate *= 2)
                    for (int i = 0; i < 2 * STRATEGIES; i++) {
                        if ((i + world + replicate + tied) % part) continue;
                        snprintf(more, sizeof more, " --dp-replicate %d --sharding %s --accumulate %s", replicate,
                                 strategies[i / 2].name, i % 2 ? "local" : "sharded");
                        compare_bits(model, 0, world, B, &transport_threads, more, first, 0);
                    }
            snprintf(more, sizeof more, " --recompute %s --wrap size:99999 --slots 3 --offload all%s%s",
                     tied ? "selective" : "every:2", OFFLOAD_IN_PLACE ? " --out " : "",
                     OFFLOAD_IN_PLACE ? scratch_dir : "");
            compare_bits(model, 0, 2, B, &transport_threads, more, first, 0);
        }
    StepBits first[20] = ZERO;
    bits_frozen = "gate_proj"; // up_proj follows it in the middle of a block of the norm, and a shard ends in up_proj
    compare_bits("odd", 0, 1, 1, &transport_threads, "", first, 1);
    compare_bits("odd", 0, 4, 1, &transport_threads, " --sharding full_shard", first, 0);
    bits_frozen = NULL;
}

/* A few steps of two replicas of two shards, compared after each by the program, and at the end here. */
static uint64_t weights_of[4];

static void replicas_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Fsdp *f = &o->trainer.parallel.fsdp;
    for (int step = 1; step <= 3; step++) {
        train_step(&o->trainer, step);
        fsdp_check_replicas(f, step);
    }
    uint64_t h = HASH_START;
    for (int u = 0; u < f->table->num_units; u++) {
        size_t bytes = sizeof(float) * (size_t)f->units[u].state_count;
        void *weights = on_host(f->dev, f->units[u].master, bytes);
        h = hash_bytes(h, weights, bytes);
        free(weights);
    }
    weights_of[rank] = h;
    close_rank(o);
}

static void test_replicas(void) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 60 --dp-replicate 2",
             FIXTURES, make_token_file("replicas.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 4, &transport_threads);
    launch(j, 0, replicas_body);
    end_job(j);
    CHECK("replicas stay equal to the bit, shards differ",
          weights_of[0] == weights_of[2] && weights_of[1] == weights_of[3] && weights_of[0] != weights_of[1],
          "hashes of ranks 0 to 3: %08x %08x %08x %08x", (unsigned)weights_of[0], (unsigned)weights_of[1],
          (unsigned)weights_of[2], (unsigned)weights_of[3]);
}
