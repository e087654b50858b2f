/* Tensor, context and pipeline parallelism, with FSDP and replicas: any mesh has the gradients of one rank, tensor by
 * tensor. No size divides what it need not: 42 columns, 77 of the feed-forward, 131 tokens, and rows that tp splits
 * unevenly. Part of test_llama3.cu. */

enum { MESH_SAMPLES = CUDA_BUILD ? 4 : 16, MESH_MOST_RANKS = 16, MESH_BLOCKS = CUDA_BUILD ? 4 : 8 };

/* 4 key/value heads, so that tp 4 has one each; 8 blocks: of 8 runs each has one, and with light ends the first and the
 * last have none (of GPUs: 4). */
static const char *mesh_model(int tied) {
    static char *dirs[2];
    if (dirs[tied]) return dirs[tied];
    char path[300], part[320], *dir = dirs[tied] = strdup(scratch_path(tied ? "tied-mesh" : "odd-mesh"));
    mkdir(dir, 0777);
    snprintf(path, sizeof path, "%s/config.json", dir);
    snprintf(part, sizeof part, "%s.%d", path, (int)getpid()); // several processes may make it at once
    FILE *f = fopen(part, "w");
    fprintf(f,
            "{\"model_type\":\"llama\",\"hidden_size\":42,\"num_hidden_layers\":%d,\"num_attention_heads\":8,\"num_key_"
            "value_heads\":4,\"head_dim\":6,"
            "\"intermediate_size\":77,\"vocab_size\":131,\"max_position_embeddings\":64,\"rope_theta\":500000,\"tie_"
            "word_embeddings\":%s}\n",
            MESH_BLOCKS, tied ? "true" : "false");
    fclose(f);
    rename(part, path);
    return dir;
}

enum {
    MESH_TP,
    MESH_CP,
    MESH_PP,
    MESH_SHARD,
    MESH_REPLICATE,
    MESH_SCHEDULE,
    MESH_LIGHT,
    MESH_DOCS,
    MESH_TIED,
    MESH_RECOMPUTE,
    MESH_MASK,
    MESH_SHARDING,
    MESH_ACCUMULATE,
    MESH_FACTORS
};
static const int mesh_counts[MESH_FACTORS] = {3, 3, 3, 3, 2, 2, 2, 2, 2, 4, 2, 3, 2};

static void mesh_values(int64_t i, int *v) {
    for (int f = 0; f < MESH_FACTORS; f++) {
        v[f] = (int)(i % mesh_counts[f]);
        i /= mesh_counts[f];
    }
}

static int64_t meshes_in_all(void) {
    int64_t all = 1;
    for (int f = 0; f < MESH_FACTORS; f++) all *= mesh_counts[f];
    return all;
}

/* 1, 2, 4; and 3, beyond mesh_counts. */
static int mesh_size(int value) { return value == 3 ? 3 : 1 << value; }

static int mesh_ranks(const int *v) {
    return mesh_size(v[MESH_TP]) * mesh_size(v[MESH_CP]) * mesh_size(v[MESH_PP]) * mesh_size(v[MESH_SHARD]) *
           mesh_size(v[MESH_REPLICATE]);
}

/* Is it a layout, and one that another's values do not say already? */
static int mesh_exists(const int *v) {
    int pipeline = v[MESH_PP] > 0;
    return mesh_ranks(v) <= MESH_MOST_RANKS && (pipeline || (!v[MESH_SCHEDULE] && !v[MESH_LIGHT]));
}

/* cp divides a sequence into 2·cp chunks; what tp has of its rows need not be equal: of 38, 18 or 10 of a rank. */
static const int mesh_seq[3] = {38, 36, 40};

typedef struct {
    int key;
    OneRank of;
} MeshReference;

static void mesh_arguments(char *arguments, size_t size, const int *v, int accum) {
    int masked = v[MESH_MASK] ? 7 : 0; // documents of 16 tokens in the mean: some chunks see nothing of some
    const char *name = masked ? "masked.tok" : "mesh.tok", *data = v[MESH_DOCS]
                                                                       ? make_document_file(name, 6000, 16, masked)
                                                                       : make_token_file(name, 6000, 64, masked);
    snprintf(
        arguments, size,
        "--model %s --data %s --seq %d --steps 3 --warmup 0 --lr 1e-3 --timeout 60 --threads 1 --batch 1 --accum %d%s",
        mesh_model(v[MESH_TIED]), data, mesh_seq[v[MESH_CP]], accum, v[MESH_DOCS] ? " --doc-mask" : "");
}

/* What one rank computes of the same samples, one at a time. */
static const OneRank *mesh_reference(const int *v) {
    static MeshReference kept[24];
    int key = 1 + v[MESH_CP] + 3 * (v[MESH_TIED] + 2 * (v[MESH_MASK] + 2 * v[MESH_DOCS]));
    MeshReference *m = kept;
    while (m->key && m->key != key) m++;
    if (m->key) return &m->of;
    char arguments[1024];
    mesh_arguments(arguments, sizeof arguments, v, MESH_SAMPLES);
    collect(arguments, 0, 1, &transport_threads);
    m->key = key;
    m->of.grads = collected;
    m->of.norm = collected_norm;
    memcpy(m->of.losses, collected_losses, sizeof collected_losses);
    collected = NULL;
    return &m->of;
}

/* Runs a mesh; what differs from one rank (known to process 0). */
static Difference try_mesh(const int *v, char *name, size_t size, int process, const Transport *transport) {
    static const char *const recompute[] = {"none", "selective", "full", "every:2"};
    static const char *const sharding[] = {"shard_grad_op", "full_shard", "no_shard"};
    const char *not_the_default = v[MESH_PP] ? " --accumulate sharded" : " --accumulate local";
    char arguments[2048], layout[400];
    int data_ranks = 1 << (v[MESH_SHARD] + v[MESH_REPLICATE]);
    snprintf(layout, sizeof layout,
             "--tp %d --cp %d --pp %d --dp-shard %d --dp-replicate %d%s%s --recompute %s --sharding %s%s",
             mesh_size(v[MESH_TP]), mesh_size(v[MESH_CP]), mesh_size(v[MESH_PP]), mesh_size(v[MESH_SHARD]),
             mesh_size(v[MESH_REPLICATE]), v[MESH_SCHEDULE] ? " --pp-schedule interleaved" : "",
             v[MESH_LIGHT] ? " --pp-light-ends" : "", recompute[v[MESH_RECOMPUTE]], sharding[v[MESH_SHARDING]],
             v[MESH_ACCUMULATE] ? not_the_default : "");
    snprintf(name, size, "%s%s%s%s", layout, v[MESH_DOCS] ? ", documents" : "", v[MESH_MASK] ? ", masked losses" : "",
             v[MESH_TIED] ? ", tied" : "");
    const OneRank *one = process == 0 ? mesh_reference(v) : NULL;
    Difference nothing = ZERO;
    mesh_arguments(arguments, sizeof arguments, v, MESH_SAMPLES / data_ranks);
    size_t used = strlen(arguments);
    snprintf(arguments + used, sizeof arguments - used, " %s", layout);
    collect(arguments, process, mesh_ranks(v), transport);
    if (!one) return nothing;
    Difference d = difference_from(one, mesh_model(v[MESH_TIED]));
    d.padding += shared_differ;
    return d;
}

static double mesh_bound(void) { return sizeof(floatX) == 4 ? 2e-5 : 2e-2; }

static int mesh_allowed(const Difference *d) {
    return d->error <= mesh_bound() && d->ratio <= (sizeof(floatX) == 4 ? 1e-5 : 1e-2) && d->norm <= mesh_bound() &&
           d->loss <= (sizeof(floatX) == 4 ? 1e-5 : 3e-3) && !d->padding && !d->allocations && !d->bytes;
}

static void check_mesh(const char *name, const Difference *d) {
    CHECK(name, mesh_allowed(d),
          "worst gradient %.1g <= %.0e, ratio off by %.1g, norm %.1g, losses %.1g; %" PRId64
          " of padding touched or of shared gradients not shared, %" PRId64 " allocations in a step, %" PRId64
          " bytes of state too many",
          d->error, mesh_bound(), d->ratio, d->norm, d->loss, d->padding, d->allocations, d->bytes);
}

/* Every value of every factor meets every value of every other one that it can meet; meshes are taken greedily, those
 * with the most new pairs first. */
static void test_mesh(void) {
    static char met[MESH_FACTORS][4][MESH_FACTORS][4];
    int v[MESH_FACTORS], taken = 0;
    char name[500];
    memset(met, 0, sizeof met);
    for (int wanted = MESH_FACTORS * (MESH_FACTORS - 1) / 2; wanted > 0; wanted--)
        for (int64_t n = 0; n < meshes_in_all(); n++) {
            int fresh = 0;
            mesh_values(permute(n, meshes_in_all(), 7), v);
            if (!mesh_exists(v)) continue;
            for (int a = 0; a < MESH_FACTORS; a++)
                for (int b = a + 1; b < MESH_FACTORS; b++) fresh += !met[a][v[a]][b][v[b]];
            if (fresh < wanted) continue;
            for (int a = 0; a < MESH_FACTORS; a++)
                for (int b = a + 1; b < MESH_FACTORS; b++) met[a][v[a]][b][v[b]] = 1;
            Difference d = try_mesh(v, name, sizeof name, 0, &transport_threads);
            taken++;
            check_mesh(name, &d);
        }
    CHECK("every two of the meshes' options that go together were tried together", taken > 15,
          "%d of %" PRId64 " meshes", taken, meshes_in_all());
}

#ifdef HAVE_MPI
/* Over as many processes as there are, with MPI's own witness of what is exchanged. */
static void test_mesh_mpi(int process, int world) {
    static const int of_mpi[][MESH_FACTORS] = {// tp, cp, pp, dp-shard, dp-replicate, interleaved, light ends,
                                               // documents, tied, recompute, masked, sharding, accumulate
                                               {1},
                                               {0, 1, 0, 0, 0, 0, 0, 1},
                                               {0, 0, 1, 0, 0, 0, 0, 0, 1},
                                               {0, 0, 1, 0, 0, 1, 1, 0, 0, 2},
                                               {0, 0, 3, 0, 0, 0, 1, 0, 1, 1},
                                               {0, 0, 3},
                                               {1, 0, 1, 0, 0, 0, 0, 0, 1},
                                               {0, 1, 1, 0, 0, 0, 0, 1, 1},
                                               {1, 1, 0, 0, 0, 0, 0, 0, 0, 3},
                                               {0, 0, 2, 0, 0, 1, 1, 0, 1},
                                               {0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1},
                                               {1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1},
                                               {1, 1, 1, 0, 0, 0, 0, 1, 1},
                                               {1, 0, 1, 1, 0, 1, 0, 0, 0, 2, 0, 2},
                                               {0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 1},
                                               {2, 0, 1, 0, 0, 0, 1, 0, 1}};
    char name[500], over[520];
    for (size_t i = 0; i < sizeof of_mpi / sizeof *of_mpi; i++) {
        if (mesh_ranks(of_mpi[i]) != world) continue;
        Difference d = try_mesh(of_mpi[i], name, sizeof name, process, &transport_mpi);
        snprintf(over, sizeof over, "over mpi, %s", name);
        if (process == 0) check_mesh(over, &d);
    }
}
#endif

/* The meshes that planted faults are tried on, one for each way to split a model. */
static void test_mesh_faults(void) {
    static const int of_faults[][MESH_FACTORS] = {
        {1, 0, 0, 1}, {0, 1, 0, 0}, {0, 0, 1, 0, 0, 0, 0, 0, 1}}; // tp 2 x dp-shard 2; cp 2; pp 2, tied
    char name[500];
    for (int i = 0; i < 3; i++) {
        Difference d = try_mesh(of_faults[i], name, sizeof name, 0, &transport_threads);
        check_mesh(name, &d);
    }
}

/* Every mesh with every schedule, documents, tied or not, masked or not, one step each, a line for each mesh.
 * Recomputation, sharding and accumulation are taken in turn, so that on each mesh every two of them meet. */
static void test_mesh_all(void) {
    static const int turning[3] = {MESH_RECOMPUTE, MESH_SHARDING, MESH_ACCUMULATE};
    char name[500], first[500];
    int v[MESH_FACTORS], runs = 0;
    collect_steps = 1;
    for (int64_t mesh = 0; mesh < 3 * 3 * 3 * 3 * 2; mesh++) {
        Difference worst = ZERO;
        int failed = 0, tried = 0, met = 0, pairs = 0;
        char seen[3][4][4] = ZERO;
        snprintf(first, sizeof first, "none");
        mesh_values(mesh, v);
        for (int i = 0; i < (v[MESH_PP] ? 32 : 16); i++) { // without a pipeline there are no schedules: all else twice
            v[MESH_DOCS] = i & 1;
            v[MESH_TIED] = i >> 1 & 1;
            v[MESH_MASK] = i >> 2 & 1;
            v[MESH_SCHEDULE] = v[MESH_PP] ? i >> 3 & 1 : 0;
            v[MESH_LIGHT] = i >> 4 & 1;
            int turn = (i + (int)mesh) % 24; // any 16 that follow each other have all pairs
            v[MESH_RECOMPUTE] = turn % 4;
            v[MESH_SHARDING] = turn % 3;
            v[MESH_ACCUMULATE] = turn / 12;
            if (!mesh_exists(v)) continue;
            Difference d = try_mesh(v, name, sizeof name, 0, &transport_threads);
            tried++;
            if (!mesh_allowed(&d) && !failed++) snprintf(first, sizeof first, "%s", name);
            worst.error = worst_of(worst.error, d.error);
            worst.ratio = worst_of(worst.ratio, d.ratio);
            worst.norm = worst_of(worst.norm, d.norm);
            worst.loss = worst_of(worst.loss, d.loss);
            for (int t = 0; t < 3; t++) met += !seen[t][v[turning[t]]][v[turning[(t + 1) % 3]]]++;
        }
        if (!tried) continue;
        for (int t = 0; t < 3; t++) pairs += mesh_counts[turning[t]] * mesh_counts[turning[(t + 1) % 3]];
        runs += tried;
        snprintf(name, sizeof name, "tp %d x cp %d x pp %d x dp-shard %d x dp-replicate %d", 1 << v[MESH_TP],
                 1 << v[MESH_CP], 1 << v[MESH_PP], 1 << v[MESH_SHARD], 1 << v[MESH_REPLICATE]);
        CHECK(name, !failed && met == pairs,
              "%d runs, %d of %d pairs of options that turn, worst gradient %.1g <= %.0e, ratio off by %.1g, norm "
              "%.1g, losses %.1g; the first that fails: %s",
              tried, met, pairs, worst.error, mesh_bound(), worst.ratio, worst.norm, worst.loss, first);
        fflush(stdout);
    }
    collect_steps = 3;
    printf("%d runs\n", runs);
}

#ifdef CUDA_ON_CPU
/* GPUs that a processor plays take their time: a few meshes that have every axis, over both transports. */
static void test_mesh_of_gpus(void) {
    static const struct {
        const char *transport;
        int v[MESH_FACTORS];
    } meshes[] = {//          tp cp pp shard, replicate, schedule, light, docs, tied, recompute, mask, sharding
                  {"nccl", {1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1}}, {"threads", {1, 1, 1, 0, 0, 0, 0, 1, 1, 3, 0, 0}},
                  {"nccl", {0, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 2}}, {"nccl", {1, 0, 1, 1, 0, 0, 0, 0, 1, 2, 0, 0}},
                  {"nccl", {0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 1}}, {"nccl", {0, 2, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1}}};
    char name[500], title[600];
    int devices = cuda_on_cpu.devices;
    cuda_on_cpu.devices = 8;
    for (int i = 0; i < (int)(sizeof meshes / sizeof *meshes); i++) {
        Difference d = try_mesh(meshes[i].v, name, sizeof name, 0, transport_find(meshes[i].transport));
        snprintf(title, sizeof title, "over %s: %s", meshes[i].transport, name);
        check_mesh(title, &d);
    }
    cuda_on_cpu.devices = devices;
}
#endif
