/* test_llama3.cu: includes the program and checks it. Each check says the property in its name and prints the
 * measured figure next to the bound.
 *
 *   test_llama3 [GROUP…]              all groups, or the named ones, in this process (ranks as threads)
 *   test_llama3 short                 all, with fewer layouts where others show the same, and in bf16 without what fp32
 * shows: what `make test` runs mpirun -np N test_llama3 mpi      the groups that need processes
 *   mpirun -np 2 test_llama3 mpi waiting   of these, that the reported waiting is what MPI's profiling interface sees
 */
#define TESTING
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <time.h>
static __thread double
    clock_ahead; // seconds: hosts' monotonic clocks have nothing in common, and neither have ranks' here
static int clock_of_rank(clockid_t id, struct timespec *t) {
    int failed = clock_gettime(id, t);
    if (id == CLOCK_MONOTONIC) t->tv_sec += (time_t)clock_ahead;
    return failed;
}
#define clock_gettime clock_of_rank
static long long file_bytes = 5000000000ll;
#define MAX_FILE_BYTES file_bytes
#define FILE_CHUNK_BYTES (4 << 12) // small models have many, and few end with a tensor
#include "train_llama3.cu"
#include <sys/resource.h>
#include <sys/wait.h>

static int checks_passed, checks_failed;

static void check(int ok, const char *name, const char *format, ...) {
    va_list args;
    va_start(args, format);
    __atomic_fetch_add(ok ? &checks_passed : &checks_failed, 1, __ATOMIC_RELAXED);
    printf("%s %s: ", ok ? "pass" : "FAIL", name);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
}
#define CHECK(name, condition, ...) check((condition) != 0, name, __VA_ARGS__)

// ---------------------------------------------------------------------------
// witnesses of our own: allocations (the linker wraps them), and MPI's profiling interface

static int64_t allocations;              // of all threads
static __thread int64_t own_allocations; // of this one

#ifdef WRAP_MALLOC
static void count_allocation(void) {
    __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    own_allocations++;
}

#ifdef __cplusplus
extern "C" {
#endif
void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__wrap_malloc(size_t n) {
    count_allocation();
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t m) {
    count_allocation();
    return __real_calloc(n, m);
}
void *__wrap_realloc(void *p, size_t n) {
    count_allocation();
    return __real_realloc(p, n);
}
#ifdef __cplusplus
}
#endif
#endif

#ifdef HAVE_MPI
static struct {
    MPI_Comm comm;
    Traffic of[COLLECTIVES];
} profiled[AXES]; // by communicator, in the order in which they appeared
static int num_profiled;
static useconds_t profile_delay_us; // this process sleeps so long before each collective, send or receive

static void profile(Collective op, int count, MPI_Datatype type, MPI_Comm comm) { // of one part, or of a message
    int size, bytes, i = 0;
    if (profile_delay_us) usleep(profile_delay_us);
    MPI_Comm_size(comm, &size);
    MPI_Type_size(type, &bytes);
    while (i < num_profiled && profiled[i].comm != comm) i++;
    if (i == AXES) {
        memset(profiled, 0, sizeof profiled);
        i = num_profiled = 0; // those of earlier cases, at which nobody looks any more
    }
    if (i == num_profiled) profiled[num_profiled++].comm = comm;
    profiled[i].of[op].calls++;
    profiled[i].of[op].bytes += (op == SEND || op == RECEIVE ? 1 : (int64_t)(size - 1)) * count * bytes;
}

int MPI_Iallgather(const void *send, int count, MPI_Datatype type, void *recv, int recv_count, MPI_Datatype recv_type,
                   MPI_Comm comm, MPI_Request *request) {
    profile(ALL_GATHER, count, type, comm);
    return PMPI_Iallgather(send, count, type, recv, recv_count, recv_type, comm, request);
}

int MPI_Ialltoall(const void *send, int count, MPI_Datatype type, void *recv, int recv_count, MPI_Datatype recv_type,
                  MPI_Comm comm, MPI_Request *request) {
    profile(REDUCE_SCATTER, count, type, comm);
    return PMPI_Ialltoall(send, count, type, recv, recv_count, recv_type, comm, request);
}

int MPI_Isend(const void *send, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    profile(SEND, count, type, comm);
    return PMPI_Isend(send, count, type, to, tag, comm, request);
}

int MPI_Irecv(void *recv, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    profile(RECEIVE, count, type, comm);
    return PMPI_Irecv(recv, count, type, from, tag, comm, request);
}
#endif

// ---------------------------------------------------------------------------
// helpers

/* The larger error; NaN is larger than all, and stays (fmax would lose it). */
static double worst_of(double a, double b) { return a >= b || a != a ? a : b; }

static char scratch_dir[64];

static const char *scratch_path(const char *name) {
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, 256, "%s/%s", scratch_dir, name);
    return p;
}

/* A token file of `count` tokens below `vocab`, some of them predictable; every `masked`-th no target (0: no mask). */
static const char *make_token_file(const char *name, int64_t count, int vocab, int masked) {
    const char *path = scratch_path(name);
    TokenFileHeader h = ZERO;
    memcpy(h.magic, TOKEN_FILE_MAGIC, 8);
    h.version = 1;
    h.width = 2;
    h.vocab_size = (uint32_t)vocab;
    h.flags = masked ? TOKEN_FILE_MASKED : 0;
    h.count = (uint64_t)count;
    char part[300];
    snprintf(part, sizeof part, "%s.%d", path,
             (int)getpid()); // other ranks may be reading the same file of an earlier case
    FILE *f = fopen(part, "wb");
    fwrite(&h, sizeof h, 1, f);
    uint16_t token = 1;
    for (int64_t i = 0; i < count; i++) {
        token = (uint16_t)((token * 5u + (unsigned)(mix64((uint64_t)i) % 3)) % (unsigned)vocab);
        fwrite(&token, 2, 1, f);
    }
    for (int64_t i = 0; i < count && masked; i++) fputc(i % masked != 0, f);
    fclose(f);
    rename(part, path);
    return path;
}

/* The same in a directory with a tokenizer, by which token 2 ends a document. */
static const char *make_document_file(const char *name, int64_t count, int vocab, int masked) {
    char inside[128], part[330], tokenizer[300];
    uint8_t print[32];
    mkdir(scratch_path("documents"), 0777);
    snprintf(tokenizer, sizeof tokenizer, "%s", scratch_path("documents/tokenizer.model"));
    snprintf(part, sizeof part, "%s.%d", tokenizer, (int)getpid()); // as above
    FILE *f = fopen(part, "w");
    fprintf(
        f,
        "byte-level-bpe 1\ntokens 3\nmissing 254\nbos -\neos <end>\neot -\nsplit .\nIQ== 0\nIg== 1\nspecial <end> 2\n");
    fclose(f);
    rename(part, tokenizer);
    snprintf(inside, sizeof inside, "documents/%s.%d", name, (int)getpid());
    snprintf(part, sizeof part, "%s", make_token_file(inside, count, vocab, masked));
    sha256_of_file(tokenizer, print);
    f = fopen(part, "r+b");
    fseek(f, offsetof(TokenFileHeader, tokenizer), SEEK_SET);
    fwrite(print, sizeof print, 1, f);
    fclose(f);
    snprintf(inside, sizeof inside, "documents/%s", name);
    const char *path = scratch_path(inside);
    rename(part, path);
    return path;
}

/* A job as the command line `arguments` (parted by blanks) makes it, on `world` ranks. */
static Job *make_job(const char *arguments, int world, const Transport *transport) {
    static char *argv[128];
    int argc = 1;
    Job *j = (Job *)checked_malloc(sizeof *j);
    argv[0] = (char *)"train_llama3";
    for (char *word = strtok(strdup(arguments), " "); word && argc < 128; word = strtok(NULL, " ")) argv[argc++] = word;
    j->opt = options_parse(argc, argv);
    j->opt.is_planner = j->opt.plan;
    j->transport = transport;
    j->host_transport = !strcmp(transport->name, "nccl") ? &transport_threads : transport;
    if (j->transport != j->host_transport) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0); // as choose_transport does
    job_prepare(j, world, world, world);
    if (!j->opt.threads) j->threads_per_rank = world == 1 && transport == &transport_threads ? 2 : 1;
    pthread_mutex_init(&j->thread_world.lock, NULL);
    return j;
}

/* A mesh of data parallelism alone. */
static Mesh mesh_of(int world, int shard, int replicate) {
    const int asked[MESH_AXES] = {1, 1, 1, shard, replicate};
    return mesh_open(world, asked, 1);
}

/* Forward and backward of one micro-batch, without a pipeline. */
static void micro_step(Trainer *trainer, const int32_t *inputs, const int32_t *targets, const int32_t *docs,
                       int micro) {
    MicroBatch batch = {inputs, targets, docs, docs};
    PipelineStep forward = {PIPE_FORWARD, micro, 0, 0, 0, 0}, backward = {PIPE_BACKWARD, micro, 0, 0, 0, 0};
    stage_forward(&trainer->model, &trainer->parallel.pipeline, &forward, &batch, AFTER_FORWARD);
    stage_backward(&trainer->model, &trainer->parallel.pipeline, &backward, &batch);
}

static void end_job(Job *j) {
    job_close(j);
    free(j);
}

typedef struct {
    Trainer trainer, dry_run;
} Opened;

static Opened *open_rank(Job *j, int rank) {
    Opened *o = (Opened *)checked_malloc(sizeof *o);
    dry_run_open(&o->dry_run, j, rank, NULL);
    trainer_open(&o->trainer, &o->dry_run, j, rank);
    return o;
}

static void close_rank(Opened *o) {
    trainer_close(&o->trainer);
    trainer_close(&o->dry_run);
    free(o);
}

/* Every step trains on this one batch, in place of the loader's. */
static void feed(Trainer *trainer, const float *ids, const float *targets) {
    int n = trainer->opt->batch * trainer->opt->seq;
    loader_close(&trainer->loader, &trainer->parallel.dev);
    trainer->loader.produced = INT64_MAX;
    trainer->loader.consumed = 0;
    for (int i = 0; i < LOADER_DEPTH; i++) {
        StepBatch *b = &trainer->loader.ring[i];
        memcpy(b->inputs, ids, sizeof(int32_t) * (size_t)n);
        memcpy(b->targets, targets, sizeof(int32_t) * (size_t)n);
        b->num_targets = 0;
        for (int t = 0; t < n; t++) b->num_targets += b->targets[t] >= 0;
        for (int t = 0; t < n && b->docs; t += trainer->opt->seq)
            document_ids(b->docs + t, b->inputs + t, trainer->opt->seq, trainer->data->document_end);
    }
}

/* A copy of what lies in the device's memory, for the host to read; and one value there set by the host. */
static void *on_host(Device *dev, const void *from, size_t bytes) {
    void *copy = checked_malloc(bytes);
    device_read(dev, copy, from, bytes);
    return copy;
}
static float *floats_on_host(Device *dev, const float *from, int64_t count) {
    return (float *)on_host(dev, from, sizeof(float) * (size_t)count);
}
static void set_float(Device *dev, float *at, float x) { device_write(dev, at, &x, sizeof x); }

static double norm_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

static double norm_of_difference(const float *x, const float *y, double scale, int64_t n) { // ‖scale·x − y‖
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (scale * x[i] - y[i]) * (scale * x[i] - y[i]);
    return sqrt(sum);
}

// ---------------------------------------------------------------------------
// against PyTorch: fixtures written by dev/pytorch/make_fixtures.py

static const char *fixture_dir = "dev/test/fixtures";

static float *fixture_tensor(const StFiles *s, const char *name, int64_t *count) {
    const StTensor *t = st_find(s, name);
    if (!t) user_error("fixture tensor %s is missing", name);
    float *x = (float *)checked_malloc(sizeof(float) * (size_t)t->elements);
    st_read(t, x, 0, t->elements);
    if (count) *count = t->elements;
    return x;
}

typedef struct {
    double error, ratio;
    char name[80];
} Worst; // error: ‖Δ‖/‖g‖; ratio: |‖g₁‖/‖g₀‖ − 1|

/* Holds r's gradients (times scale) against tensors `prefix`NAME; the worst tensor of all. `limits`: errors are
 * taken relative to 1.5 × the error of that name in the fixture. */
static Worst compare_gradients(Trainer *trainer, const StFiles *s, const char *prefix, const char *limits,
                               double scale) {
    Worst worst = ZERO;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        char name[160];
        int64_t n;
        if (trainer->model.table.units[t->unit].frozen) continue;
        snprintf(name, sizeof name, "%s%s", prefix, t->name);
        float *want = fixture_tensor(s, name, &n),
              *have = floats_on_host(&trainer->parallel.dev, trainer->parallel.fsdp.units[t->unit].grad + t->offset, n),
              limit = 1;
        double size = norm_of(want, n), error = norm_of_difference(have, want, scale, n), ratio = 0;
        if (size > 1e-7) {
            ratio = fabs(scale * norm_of(have, n) / size - 1);
            error /= size;
        } else if (limits) error = 0; // exactly zero there: judged in fp32
        if (limits) {
            snprintf(name, sizeof name, "%s%s", limits, t->name);
            float *torch_error = fixture_tensor(s, name, NULL);
            limit = 1.5f * torch_error[0];
            free(torch_error);
            error = error == 0 ? 0 : error / limit;
        }
        if (!(error < worst.error)) snprintf(worst.name, sizeof worst.name, "%s", t->name);
        worst.error = worst_of(worst.error, error);
        worst.ratio = worst_of(worst.ratio, ratio);
        free(want);
        free(have);
    }
    return worst;
}

static void compare_steps(Trainer *trainer, const StFiles *s, const char *fixture) {
    double loss_error = 0, norm_error = 0;
    float *losses = fixture_tensor(s, "step_losses", NULL), *norms = fixture_tensor(s, "step_norms", NULL);
    for (int step = 1; step <= 10; step++) {
        StepStats stats = train_step(trainer, step);
        loss_error = worst_of(loss_error, fabs(stats.loss - losses[step - 1]) / fmax(1, fabs(losses[step - 1])));
        norm_error = worst_of(norm_error, fabs(stats.grad_norm / norms[step - 1] - 1));
    }
    char name[128];
    snprintf(name, sizeof name, "%s: losses of ten AdamW steps equal PyTorch's", fixture);
    CHECK(name, loss_error <= 1e-5, "error %.2g <= 1e-5", loss_error);
    snprintf(name, sizeof name, "%s: gradient norms of ten steps equal PyTorch's", fixture);
    CHECK(name, norm_error <= 1e-4, "error %.2g <= 1e-4", norm_error);
    double error = 0;
    int compared = 0;
    for (int i = 0; i < trainer->model.table.num_tensors; i++) {
        const Tensor *t = &trainer->model.table.tensors[i];
        int64_t n;
        char tensor[160];
        snprintf(tensor, sizeof tensor, "final.%s", t->name);
        if (trainer->model.table.units[t->unit].frozen || !st_find(s, tensor)) continue;
        float *want = fixture_tensor(s, tensor, &n),
              *have =
                  floats_on_host(&trainer->parallel.dev, trainer->parallel.fsdp.units[t->unit].master + t->offset, n);
        error = worst_of(error, norm_of_difference(have, want, 1, n) / norm_of(want, n));
        compared++;
        free(want);
        free(have);
    }
    snprintf(name, sizeof name, "%s: weights after ten steps equal PyTorch's", fixture);
    if (compared) CHECK(name, error <= 1e-5, "worst of %d tensors %.2g <= 1e-5", compared, error);
    free(losses);
    free(norms);
}

/* `base`: the fixture's model, where it is of adapters beside that of another one. */
static void test_fixture(const char *fixture, const char *base) {
    char path[512], arguments[1024], name[128];
    StFiles expected = ZERO;
    snprintf(path, sizeof path, "%s/%s/expected.safetensors", fixture_dir, fixture);
    st_add_file(&expected, path);
    const StTensor *shape = st_find(&expected, "input_ids");
    float *ids = fixture_tensor(&expected, "input_ids", NULL), *targets = fixture_tensor(&expected, "targets", NULL);
    int masked = !strcmp(fixture, "documents");
    snprintf(arguments, sizeof arguments,
             "--model %s/%s --data %s --seq %d --batch %d --lr 1e-3 --min-lr 1e-3 --warmup 0 --beta2 0.95 "
             "--weight-decay 0.1 --clip 1%s",
             fixture_dir, base ? base : fixture,
             masked ? make_document_file("small.tok", 3000, 40, 7) : make_token_file("small.tok", 3000, 64, 0),
             (int)shape->cols, (int)shape->rows, masked ? " --doc-mask" : "");
    if (base) snprintf(arguments + strlen(arguments), 300, " --adapters %s/%s", fixture_dir, fixture);
    Job *j = make_job(arguments, 1, &transport_threads);
    Opened *o = open_rank(j, 0);
    Trainer *trainer = &o->trainer;
    feed(trainer, ids, targets);
    StepBatch *b = &trainer->loader.ring[0];
    double count = (double)b->num_targets;

    MicroBatch batch = micro_batch_of(&trainer->model, b, 0);
    device_zero(&trainer->parallel.dev, trainer->sums, sizeof *trainer->sums * SUMS);
    model_forward(&trainer->model, &trainer->parallel.pipeline, &batch);
    head_forward(&trainer->model);
    ExactSum sum = ZERO, unsettled;
    device_read(&trainer->parallel.dev, &unsettled, &trainer->sums[SUM_LOSS], sizeof unsettled);
    exact_merge(&sum, &unsettled);
    double loss = exact_value(&sum) / count;
    fsdp_reshard(&trainer->parallel.fsdp, &trainer->parallel.fsdp.units[trainer->model.table.head], AFTER_LAST_USE);
    int64_t n;
    float *want = fixture_tensor(&expected, "logits", &n),
          *want_loss = fixture_tensor(&expected, sizeof(floatX) == 4 ? "loss" : "bf16.ref_loss", NULL);
    float *logits = floats_on_host(&trainer->parallel.dev, trainer->model.logits, n);
    double logits_error = norm_of_difference(logits, want, 1, n) / norm_of(want, n), largest = 0;
    for (int64_t i = 0; i < n; i++) largest = worst_of(largest, fabs(logits[i] - want[i]));
    free(logits);
    micro_step(trainer, b->inputs, b->targets, b->docs, 0);
    fsdp_finish_gradients(&trainer->parallel.fsdp);
    if (sizeof(floatX) == sizeof(float)) {
        Worst w = compare_gradients(trainer, &expected, "grad.", NULL, 1 / count);
        snprintf(name, sizeof name, "%s: loss equals PyTorch's", fixture);
        CHECK(name, fabs(loss - want_loss[0]) <= 1e-5 * fmax(1, fabs(want_loss[0])), "%.8f and %.8f, within 1e-5", loss,
              want_loss[0]);
        snprintf(name, sizeof name, "%s: logits equal PyTorch's", fixture);
        CHECK(name, largest <= 1e-4 && logits_error <= 1e-5, "largest difference %.2g <= 1e-4, relative %.2g <= 1e-5",
              largest, logits_error);
        snprintf(name, sizeof name, "%s: every gradient equals PyTorch's", fixture);
        CHECK(name, w.error <= 1e-5, "worst %.2g <= 1e-5 (%s)", w.error, w.name);
        snprintf(name, sizeof name, "%s: every gradient has PyTorch's norm", fixture);
        CHECK(name, w.ratio <= 1e-4, "worst ratio is off 1 by %.2g <= 1e-4", w.ratio);
        compare_steps(trainer, &expected, fixture);
    } else {
        Worst w = compare_gradients(trainer, &expected, "bf16.ref_grad.", "bf16.grad_error.", 1 / count);
        float *torch_loss = fixture_tensor(&expected, "bf16.loss", NULL);
        double bound = fmax(1.5 * fabs(torch_loss[0] - want_loss[0]), 2e-3 * fabs(want_loss[0]));
        snprintf(name, sizeof name, "%s: bf16 loss is near fp32's", fixture);
        CHECK(name, fabs(loss - want_loss[0]) <= bound, "%.6f and %.6f, within %.2g", loss, want_loss[0], bound);
        snprintf(name, sizeof name, "%s: bf16 gradients err at most 1.5 x as much as PyTorch's", fixture);
        CHECK(name, w.error <= 1, "worst is %.2f of the bound (%s)", w.error, w.name);
        free(torch_loss);
    }
    free(want);
    free(want_loss);
    free(ids);
    free(targets);
    close_rank(o);
    end_job(j);
    st_close(&expected);
}

static void test_pytorch(void) {
    static const char *const fixtures[] = {"base",    "tied", "llama31",   "llama31_short",
                                           "llama32", "odd",  "one_token", "one_head",
                                           "headdim", "eps",  "longer",    "headdim128"};
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) test_fixture(fixtures[i], NULL);
    test_fixture("lora_odd", "odd");
    test_fixture("lora_tied", "tied");
}

// ---------------------------------------------------------------------------
// ranks: any number of them gives the gradients of one

static float *collected; // all gradients of the model, tensors one after the other, before the optimizer
static double collected_losses[3], collected_norm; // of all three steps; of the first
static int collect_steps = 3;                      // or the first one alone
static int64_t padding_touched, state_bytes, state_expected, steady_allocations, shared_differ;

/* Fills the pools' buffers with garbage before use, so that a forgotten wait for a gather, or padding that is not
 * cleared, shows. */
static void poison_pools(Fsdp *f) {
    for (int pool = 0; pool < POOLS; pool++)
        for (int i = 0; i < f->pools[pool].count; i++) {
            PoolBuffer *buffer = &f->pools[pool].buffers[i];
            size_t bytes = 0, element = pool == POOL_GRADIENTS ? sizeof(float) : sizeof(floatX);
            for (int u = 0; u < f->table->num_units; u++) {
                size_t of_unit = pool_bytes((PoolKind)pool, &f->units[u]);
                if (f->units[u].table_unit->kind == buffer->kind && of_unit > bytes) bytes = of_unit;
            }
            char *garbage = (char *)checked_malloc(bytes);
            for (size_t at = 0; at + element <= bytes; at += element) {
                float large = 1e3f;
                floatX wrong = from_float(3.0f);
                memcpy(garbage + at, pool == POOL_GRADIENTS ? (const void *)&large : &wrong, element);
            }
            device_write(f->dev, buffer->memory, garbage, bytes);
            free(garbage);
        }
}

/* Elements of this rank's shards that belong to no tensor and are not zero. */
static int64_t count_touched_padding(const Fsdp *f) {
    int64_t touched = 0;
    for (int u = 0; u < f->table->num_units; u++) {
        const FsdpUnit *unit = &f->units[u];
        if (unit->table_unit->frozen) continue;
        char *owned = (char *)checked_malloc((size_t)unit->state_count);
        ShardPiece p;
        for (int i = 0; next_state_piece(f, &i, &p);)
            if (p.unit == unit) memset(owned + p.at, 1, (size_t)p.count);
        const float *state[4] = {unit->master, unit->grad, unit->exp_avg, unit->exp_avg_sq};
        for (int k = 0; k < 4; k++) {
            float *have = floats_on_host(f->dev, state[k], unit->state_count);
            for (int64_t e = 0; e < unit->state_count; e++) touched += !owned[e] && have[e] != 0;
            free(have);
        }
        free(owned);
    }
    return touched;
}

/* What this rank owns of a kind of state, to its place in the whole model's: (num_parameters). */
static void collect_state(Trainer *trainer, StateKind kind, float *all) {
    ShardPiece p;
    for (int i = 0; next_unique_piece(&trainer->parallel.fsdp, &i, &p);) {
        int64_t begin = 0, whole, run;
        for (int t = 0; t < p.tensor->index; t++)
            begin += trainer->whole_table->tensors[t].rows * trainer->whole_table->tensors[t].cols;
        for (int64_t at = 0; at < p.count; at += run) {
            run = min_i64(p.count - at, tensor_run(p.tensor, p.first + at, &whole));
            device_read(&trainer->parallel.dev, all + begin + whole, (float *)state_of(p.unit, kind) + p.at + at,
                        sizeof(float) * (size_t)run);
        }
    }
#ifdef HAVE_MPI
    if (trainer->parallel.comm.transport == &transport_mpi)
        MPI_Allreduce(MPI_IN_PLACE, all, (int)trainer->whole_table->num_parameters, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
}

/* What several ranks have the whole gradient of, has the same bits on each: norms over tp, a tied weight on the first
 * and the last stage. */
static void compare_shared_gradients(Trainer *trainer) {
    uint64_t mine[2] = {HASH_START, HASH_START},
             *all = (uint64_t *)checked_malloc(sizeof mine * (size_t)trainer->parallel.mesh.world);
    ShardPiece p;
    for (int i = 0; next_state_piece(&trainer->parallel.fsdp, &i, &p);) {
        int is_norm = p.tensor->row->split == SPLIT_NONE;
        int is_tied = p.tensor->index == 0 && trainer->model.table.part.tied_head_copy;
        if (!is_norm && !is_tied) continue;
        int shared = is_norm ? 0 : 1;
        float *have = floats_on_host(&trainer->parallel.dev, p.unit->grad + p.at, p.count);
        mine[shared] = hash_bytes(mine[shared], have, sizeof(float) * (size_t)p.count);
        free(have);
    }
    int stages = trainer->parallel.mesh.size[AXIS_PP], stride = mesh_stride(&trainer->parallel.mesh, AXIS_PP);
    all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "hashes", mine, all, sizeof mine);
    for (int i = 0; i < trainer->parallel.rank; i++) {
        if (mesh_together(&trainer->parallel.mesh, i, trainer->parallel.rank, AXIS_TP))
            __atomic_fetch_add(&shared_differ, all[2 * i] != mine[0], __ATOMIC_RELAXED);
        if (trainer->model.table.part.tied_head_copy && trainer->parallel.rank - i == (stages - 1) * stride &&
            mesh_together(&trainer->parallel.mesh, i, trainer->parallel.rank, AXIS_PP))
            __atomic_fetch_add(&shared_differ, all[2 * i + 1] != mine[1], __ATOMIC_RELAXED);
    }
    free(all);
}

static int64_t frozen_changed;

/* The hash of all frozen weights. */
static uint64_t frozen_hash(const Fsdp *f) {
    uint64_t hash = HASH_START;
    for (int u = 0; u < f->table->num_units; u++) {
        size_t bytes = sharded_bytes(f, &f->units[u]);
        if (!f->units[u].table_unit->frozen) continue;
        void *have = on_host(f->dev, f->units[u].sharded_weights, bytes);
        hash = hash_bytes(hash, have, bytes);
        free(have);
    }
    return hash;
}

static void ranks_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    poison_pools(&trainer->parallel.fsdp);
    uint64_t frozen = frozen_hash(&trainer->parallel.fsdp);
#ifdef HAVE_MPI
    memset(profiled, 0, sizeof profiled);
    num_profiled = 0;
#endif
    for (int step = 1; step <= collect_steps; step++) {
        int alone = trainer->parallel.mesh.world == 1 ||
                    j->transport != &transport_threads; // else other ranks' threads may be elsewhere
        int64_t *counter = alone ? &allocations : &own_allocations, before = *counter;
        StepStats s = train_step(trainer, step);
        if (rank == 0) collected_losses[step - 1] = s.loss;
        if (rank == 0 && step == 1) collected_norm = s.grad_norm;
        if (step == 3) __atomic_fetch_add(&steady_allocations, *counter - before, __ATOMIC_RELAXED);
        if (step > 1) continue;
#ifdef HAVE_MPI
        Traffic expected[AXES][COLLECTIVES];
        expected_traffic(expected, trainer->whole_config, trainer->parallel.mesh.world, trainer->parallel.rank,
                         trainer->opt, sizeof(StepReport));
        for (int row = 0; row < (int)AXES * (int)COLLECTIVES && j->transport == &transport_mpi; row++) {
            int a = row / COLLECTIVES, op = row % COLLECTIVES, c = 0;
            while (c < num_profiled && profiled[c].comm != trainer->parallel.comm.groups[a].mpi) c++;
            Traffic none = {0, 0}, seen = c < num_profiled ? profiled[c].of[op] : none;
            if (!traffic_equal(expected[a][op], seen))
                run_failure("over %s MPI's profiling interface saw %" PRId64 " calls and %" PRId64
                            " bytes of %s, expected %" PRId64 " and %" PRId64,
                            axis_names[a], seen.calls, seen.bytes, collective_names[op], expected[a][op].calls,
                            expected[a][op].bytes);
        }
#endif
        matmul_rate(&trainer->parallel.dev);
        check_first_step(trainer, &o->dry_run); // expected = dry run = measured, or the test ends here
        collect_state(trainer, STATE_GRAD, collected);
        compare_shared_gradients(trainer);
    }
    __atomic_fetch_add(&padding_touched, count_touched_padding(&trainer->parallel.fsdp), __ATOMIC_RELAXED);
    __atomic_fetch_add(&frozen_changed, frozen_hash(&trainer->parallel.fsdp) != frozen, __ATOMIC_RELAXED);
    if (rank == 0) {
        state_bytes =
            (int64_t)(trainer->parallel.dev.arenas[MEM_PARAMS].peak + trainer->parallel.dev.arenas[MEM_GRADS].peak +
                      trainer->parallel.dev.arenas[MEM_OPTIMIZER].peak);
        int sharded = strcmp(trainer->opt->sharding, "no_shard") != 0, ranks = trainer->parallel.fsdp.ranks;
        int local = !strcmp(trainer->opt->accumulate, "local") && trainer->opt->accum > 1 && ranks > 1 &&
                    sharded; // an unsharded gradient beside the shards
        int bytes = 16 + (sizeof(floatX) == 2 && !strcmp(trainer->opt->offload, "all")
                              ? 2
                              : 0); // offloaded, the copy in bf16 lies with the master
        state_expected = 0;
        for (int i = 0; i < trainer->parallel.dev.num_buffers; i++)
            state_expected += trainer->parallel.dev.buffers[i].category <= MEM_OPTIMIZER
                                  ? trainer->parallel.dev.buffers[i].count * RED_ZONE
                                  : 0;
        for (int u = 0; u < trainer->model.table.num_units; u++)
            if (trainer->model.table.units[u].frozen)
                state_expected +=
                    round_up((int64_t)sharded_bytes(&trainer->parallel.fsdp, &trainer->parallel.fsdp.units[u]), 256);
            else
                state_expected += bytes * trainer->parallel.fsdp.units[u].padded / (sharded ? ranks : 1) +
                                  (local ? 4 * trainer->parallel.fsdp.units[u].padded : 0);
    }
    close_rank(o);
}

/* Runs three steps; leaves gradients of the first, losses of all, and the witnesses' figures. */
static int64_t collect(const char *arguments, int process, int world, const Transport *transport) {
    Job *j = make_job(arguments, world, transport);
    int64_t n = j->table.num_parameters;
    free(collected);
    collected = (float *)checked_malloc(sizeof(float) * (size_t)n);
    padding_touched = steady_allocations = shared_differ = frozen_changed = 0;
    launch(j, process, ranks_body);
    end_job(j);
    return n;
}

/* ranks × accum × B samples of one step, against one rank that takes them one at a time. */
static void compare_layout(const char *model, int process, int world, int accum, int B, const Transport *transport,
                           const char *more) {
    char arguments[1024], name[256];
    const char *common = "--seq 16 --steps 3 --warmup 0 --lr 1e-3 --timeout 60";
    const char *data = make_token_file("ranks.tok", 6000, 64, 7);
    int total = world * accum * B;
    snprintf(arguments, sizeof arguments, "--model %s/%s --data %s %s --threads 1 --batch 1 --accum %d", fixture_dir,
             model, data, common, total);
    Job *table_of = make_job(arguments, 1, &transport_threads);
    int64_t n = process == 0 ? collect(arguments, 0, 1, &transport_threads) : 0; // the first process compares
    float *one = collected;
    double norm = collected_norm, losses[3] = {collected_losses[0], collected_losses[1], collected_losses[2]},
           error = 0, ratio = 0, loss_error = 0;
    collected = NULL;
    snprintf(arguments, sizeof arguments, "--model %s/%s --data %s %s --batch %d --accum %d %s", fixture_dir, model,
             data, common, B, accum, more);
    collect(arguments, process, world, transport);
    int64_t at = 0;
    for (int i = 0; i < table_of->table.num_tensors && process == 0; i++) {
        int64_t m = table_of->table.tensors[i].rows * table_of->table.tensors[i].cols;
        double size = fmax(norm_of(one + at, m), 1e-20);
        error = worst_of(error, norm_of_difference(collected + at, one + at, 1, m) / size);
        ratio = worst_of(ratio, fabs(norm_of(collected + at, m) / size - 1));
        at += m;
    }
    for (int i = 0; i < 3 && process == 0; i++)
        loss_error = worst_of(loss_error, fabs(collected_losses[i] / losses[i] - 1));
    double bound = sizeof(floatX) == 4 ? 1e-5 : 1e-2;
    if (process == 0) {
        snprintf(name, sizeof name, "%s, %d ranks x accum %d x B %d over %s%s: gradients of one rank", model, world,
                 accum, B, transport->name, more);
        CHECK(name, error <= bound && ratio <= bound,
              "worst tensor of %" PRId64 " parameters %.2g, norm ratio off by %.2g, <= %.0e", n, error, ratio, bound);
        snprintf(name, sizeof name, "%s, %d ranks x accum %d x B %d over %s%s: losses of three steps of one rank",
                 model, world, accum, B, transport->name, more);
        CHECK(name, loss_error <= (sizeof(floatX) == 4 ? 1e-5 : 3e-3), "off by %.2g", loss_error);
        snprintf(name, sizeof name, "%s, %d ranks x accum %d x B %d over %s%s: gradient norm of one rank", model, world,
                 accum, B, transport->name, more);
        CHECK(name, fabs(collected_norm / norm - 1) <= bound, "ratio off by %.2g", fabs(collected_norm / norm - 1));
        snprintf(name, sizeof name,
                 "%s, %d ranks x accum %d x B %d over %s%s: padding stays zero, state is 16 bytes a padded parameter "
                 "over ranks, no allocation in a step",
                 model, world, accum, B, transport->name, more);
        CHECK(name, padding_touched == 0 && state_bytes == state_expected && steady_allocations == 0,
              "%" PRId64 " touched, %" PRId64 " of %" PRId64 " bytes, %" PRId64 " allocations", padding_touched,
              state_bytes, state_expected, steady_allocations);
    }
    free(one);
    end_job(table_of);
}

#include "dev/test/test_layouts.h"
#include "dev/test/test_mesh.h"
#include "dev/test/test_waiting.h"

static void test_ranks(void) {
    static const int worlds[] = {1, 2, 3, 4, 8};
    for (int tied = 0; tied < 2; tied++)
        for (int B = 1; B <= 2; B++)
            for (int w = 0; w < 5; w++)
                compare_layout(tied ? "tied" : "odd", 0, worlds[w], 48 / worlds[w] / B, B, &transport_threads, "");
    compare_layout("odd", 0, 3, 1, 1, &transport_threads, "");
    compare_layout("odd", 0, 8, 1, 2, &transport_threads, "");
    compare_layout("base", 0, 2, 1, 2, &transport_threads, " --slots 3");
    compare_layout("odd", 0, 3, 4, 1, &transport_threads, " --accumulate local");
    compare_layout("tied", 0, 2, 3, 2, &transport_threads, " --accumulate local");
    compare_layout("odd", 0, 2, 1, 2, &transport_threads, " --accumulate local");
}

/* --deterministic: 20 steps of 8 micro-batches, whoever computes them: the same bits of loss and norm. */
typedef struct {
    double loss, norm;
} StepBits;
enum { MOST_BITS = 50 };
static StepBits bits_of[MOST_BITS];
static int bits_steps = 20; // of them
static float *bits_weights; // after 20 steps, of the whole model; NULL: not wanted
static int is_short;        // a part of what all groups have

static void bits_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    for (int step = 1; step <= bits_steps; step++) {
        StepStats s = train_step(&o->trainer, step);
        if (rank == 0) {
            bits_of[step - 1].loss = s.loss;
            bits_of[step - 1].norm = s.grad_norm;
        }
        if (step == 1) {
            matmul_rate(&o->trainer.parallel.dev);
            check_first_step(&o->trainer, &o->dry_run);
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
             fixture_dir, model, make_token_file("bits.tok", 9000, 64, 7), B, 8 / world, more);
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
            compare_bits(model, 0, 1, B, &transport_threads, "", first, 1);
            compare_bits(model, 0, 1, B, &transport_threads, " --threads 1", first, 0);
            compare_bits(model, 0, 1, B, &transport_threads, " --recompute full", first, 0);
            for (int world = 2; world <= (CUDA_BUILD ? 4 : 8); world *= 2)
                for (int replicate = 1; replicate <= world; replicate *= 2)
                    for (int i = 0; i < 2 * STRATEGIES; i++) {
                        if ((CUDA_BUILD || B == 2 || is_short) && (i + world + replicate + tied) % (CUDA_BUILD ? 6 : 3))
                            continue; // a part of them
                        snprintf(more, sizeof more, " --dp-replicate %d --sharding %s --accumulate %s", replicate,
                                 strategies[i / 2].name, i % 2 ? "local" : "sharded");
                        compare_bits(model, 0, world, B, &transport_threads, more, first, 0);
                    }
            snprintf(more, sizeof more, " --recompute %s --wrap size:99999 --slots 3 --offload all%s%s",
                     tied ? "selective" : "every:2", OFFLOAD_IN_PLACE ? " --out " : "",
                     OFFLOAD_IN_PLACE ? scratch_dir : "");
            compare_bits(model, 0, 2, B, &transport_threads, more, first, 0);
        }
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
             fixture_dir, make_token_file("replicas.tok", 3000, 64, 0));
    Job *j = make_job(arguments, 4, &transport_threads);
    launch(j, 0, replicas_body);
    end_job(j);
    CHECK("replicas stay equal to the bit, shards differ",
          weights_of[0] == weights_of[2] && weights_of[1] == weights_of[3] && weights_of[0] != weights_of[1],
          "hashes of ranks 0 to 3: %08x %08x %08x %08x", (unsigned)weights_of[0], (unsigned)weights_of[1],
          (unsigned)weights_of[2], (unsigned)weights_of[3]);
}

/* The layouts that planted faults are tried on. */
static void test_faults(void) {
    compare_layout("odd", 0, 3, 2, 2, &transport_threads, "");
    compare_layout("odd", 0, 4, 1, 1, &transport_threads, "");
    compare_layout("odd", 0, 2, 2, 1, &transport_threads, " --accumulate local");
    compare_layout("odd", 0, 4, 2, 1, &transport_threads, " --dp-replicate 2 --recompute full");
    compare_layout("odd", 0, 3, 2, 1, &transport_threads, " --sharding no_shard");
    compare_layout("odd", 0, 2, 2, 1, &transport_threads, " --sharding shard_grad_op --recompute selective");
}

#ifdef HAVE_MPI
static double resident_bytes(void) {
    long pages = 0, size = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &size, &pages) != 2) pages = 0;
    if (f) fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

/* What the operating system sees against what the arenas say, for a model whose state is large beside the libraries. */
static void resident_body(Job *j, int rank) {
    double before = resident_bytes();
    Opened *o = open_rank(j, rank);
    train_step(&o->trainer, 1);
    train_step(&o->trainer, 2);
    double grown = resident_bytes() - before, arenas = (double)device_peak(&o->trainer.parallel.dev);
    double state =
        (double)(o->trainer.parallel.dev.arenas[MEM_PARAMS].peak + o->trainer.parallel.dev.arenas[MEM_GRADS].peak +
                 o->trainer.parallel.dev.arenas[MEM_OPTIMIZER].peak);
    if (rank == 0) {
        CHECK("resident memory of a rank is what its arenas say", fabs(grown - arenas) <= 32e6,
              "%.1f MB resident, %.1f MB in arenas (%.1f MB of state), within 32 MB", grown / 1e6, arenas / 1e6,
              state / 1e6);
    }
    close_rank(o);
}

static void test_mpi(int process, int world) {
    char arguments[512];
    for (int tied = 0; tied < 2; tied++)
        for (int B = 1; B <= 2; B++)
            compare_layout(tied ? "tied" : "odd", process, world, 48 / world / B, B, &transport_mpi,
                           B == 2 && tied ? " --accumulate local" : "");
    for (int tied = 0; tied < 2 && 8 % world == 0; tied++) {
        StepBits first[20] = ZERO;
        if (process == 0) compare_bits(tied ? "tied" : "odd", 0, 1, 1, &transport_threads, "", first, 1);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi, "", first, 0);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi, " --accumulate local", first, 0);
        if (world % 2) continue;
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi,
                     " --dp-replicate 2 --sharding shard_grad_op", first, 0);
        compare_bits(tied ? "tied" : "odd", process, world, 1, &transport_mpi,
                     tied ? " --sharding no_shard" : " --dp-replicate 2 --sharding no_shard --accumulate local", first,
                     0);
    }
    static const char *const adapted[] = {" --lora-rank 4 --base " PRECISION_NAME, " --lora-rank 4 --base int8",
                                          " --lora-rank 4 --base int8:all --sharding shard_grad_op",
                                          " --lora-rank 4 --base int8 --dp-replicate 2"};
    for (int i = 0; i < 4 && 8 % world == 0; i++) {
        StepBits first[20] = ZERO;
        if (i == 3 && world % 2) continue;
        if (process == 0) compare_bits("odd", 0, 1, 1, &transport_threads, i == 3 ? adapted[1] : adapted[i], first, 1);
        compare_bits("odd", process, world, 1, &transport_mpi, adapted[i], first, 0);
    }
    test_layouts_mpi(process, world);
    for (int s = 0; s < STRATEGIES; s++) {
        snprintf(arguments, sizeof arguments,
                 "--model bench-8m --vocab-size 40000 --data %s --seq 64 --batch 1 --timeout 60 --sharding %s",
                 make_token_file("resident.tok", 6000, 64, 0), strategies[s].name);
        Job *j = make_job(arguments, world, &transport_mpi);
        launch(j, process, resident_body);
        end_job(j);
    }
}
#endif

// ---------------------------------------------------------------------------
// the family: presets, the tensor table, initial weights

static void test_family(void) {
    static const struct {
        const char *name;
        int64_t parameters;
    } known[] = {// published sizes
                 {"llama3-8b", 8030261248},
                 {"llama3-70b", 70553706496},
                 {"llama3.1-405b", 405853388800},
                 {"llama3.2-1b", 1235814400},
                 {"llama3.2-3b", 3212749824}};
    for (int i = 0; i < 5; i++) {
        char name[96];
        Llama3Config c = config_load(known[i].name);
        TensorTable t;
        table_open(&t, &c, 0, &WHOLE_MODEL);
        snprintf(name, sizeof name, "%s has the published number of parameters", known[i].name);
        CHECK(name, t.num_parameters == known[i].parameters, "%" PRId64 ", published %" PRId64, t.num_parameters,
              known[i].parameters);
        int bad = 0;
        for (int k = 0; k < t.num_tensors; k++)
            bad += !t.tensors[k].row->fused && t.tensors[k].offset % TENSOR_ALIGN != 0;
        snprintf(name, sizeof name, "%s: every product's weights start on %d elements", known[i].name, TENSOR_ALIGN);
        CHECK(name, bad == 0, "%d do not", bad);
        table_close(&t);
    }
    Llama3Config c = config_load("tiny");
    TensorTable t;
    table_open(&t, &c, 0, &WHOLE_MODEL);
    const Tensor *head = table_find(&t, "lm_head.weight");
    float whole[4096], part[1000];
    double sum = 0, square = 0;
    tensor_init(whole, head, &c, 7, 1000, 4096, 2);
    tensor_init(part, head, &c, 7, 2000, 1000, 1);
    for (int i = 0; i < 4096; i++) {
        sum += whole[i];
        square += (double)whole[i] * whole[i];
    }
    CHECK("initial weights depend on seed, tensor and element alone", !memcmp(part, whole + 1000, sizeof part),
          "1000 elements drawn from another place");
    CHECK("initial weights have mean 0 and deviation 0.02",
          fabs(sum / 4096) < 1e-3 && fabs(sqrt(square / 4096) - 0.02) < 1e-3, "mean %.2g, deviation %.4f", sum / 4096,
          sqrt(square / 4096));
    table_close(&t);
    const LearningRate rate = {1, 0.1, 10, 110};
    const double at[4] = {learning_rate_at(&rate, 5), learning_rate_at(&rate, 10), learning_rate_at(&rate, 60),
                          learning_rate_at(&rate, 110)};
    CHECK("learning rate: warm-up, peak, half-way, end",
          fabs(at[0] - 0.5) < 1e-12 && fabs(at[1] - 1) < 1e-12 && fabs(at[2] - 0.55) < 1e-12 &&
              fabs(at[3] - 0.1) < 1e-12,
          "%.3f %.3f %.3f %.3f", at[0], at[1], at[2], at[3]);
}

// ---------------------------------------------------------------------------
// data: the sampler and the loader

/* Layouts of ranks against the rules of their numbers, over three epochs: what one rank would take sample by sample,
 * dealt out first over shard ranks, then micro-steps, then replicas; accumulated locally: micro-steps, shard ranks,
 * replicas. */
static void test_sampler(void) {
    static const Sampler layouts[] = {
        // samples, seed, pad, shards, replicas, shard, replica, accumulation, B, local
        {103, 9, 0, 3, 1, 0, 0, 2, 2, 0, 0, 0, 0}, {103, 9, 0, 2, 2, 0, 0, 2, 2, 0, 0, 0, 0},
        {103, 9, 0, 3, 2, 0, 0, 3, 1, 0, 0, 0, 0}, {96, 9, 0, 1, 4, 0, 0, 2, 3, 0, 0, 0, 0},
        {96, 9, 0, 2, 2, 0, 0, 3, 1, 0, 0, 0, 0},  {5, 9, 0, 2, 2, 0, 0, 2, 2, 0, 0, 0, 0}};
    for (size_t i = 0; i < 4 * sizeof layouts / sizeof *layouts; i++) {
        Sampler s = layouts[i / 4], one = {s.samples, s.seed, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0};
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
                    for (int outer = 0; outer < (s.local ? s.shards : s.accumulation); outer++)
                        for (int inner = 0; inner < (s.local ? s.accumulation : s.shards); inner++)
                            for (int b = 0; b < s.B; b++, at++) {
                                s.shard = s.local ? outer : inner;
                                int64_t window = sampler_window(&s, epoch * steps + step, s.local ? inner : outer, b);
                                wrong += window != sampler_window(&one, epoch * s.samples + at % s.samples, 0,
                                                                  0); // beyond the end: the head of this epoch
                                if (window >= 0 && window < s.samples) counts[window]++;
                            }
            }
            for (int w = 0; w < s.samples; w++) uneven += counts[w] < least || counts[w] > most;
        }
        snprintf(
            name, sizeof name,
            "%d shards x %d replicas x accum %d x B %d of %d samples, %s, tail %s: one rank's order over three epochs",
            s.shards, s.replicas, s.accumulation, s.B, (int)s.samples, s.local ? "local" : "sharded",
            s.pad ? "padded" : "dropped");
        CHECK(name, wrong == 0 && uneven == 0, "%d of %d elsewhere; %d windows not %d to %d times an epoch", (int)wrong,
              (int)(3 * steps * gb), (int)uneven, (int)least, (int)most);
    }
}

/* 30 steps of 3 samples, then steps of 4 (--allow-changes): the epoch goes on where it was, and the next one begins as
 * any. */
static void test_sampler_goes_on(void) {
    Sampler before = {103, 9, 0, 1, 1, 0, 0, 3, 1, 0, 0, 0, 0}, after = {103, 9, 0, 1, 1, 0, 0, 4, 1, 0, 30, 0, 90};
    for (int pad = 0; pad < 2; pad++) {
        int counts[2][103] = {{0}, {0}}, more = 0, missing[2] = {0, 0};
        int64_t first = pad ? 4 : 3, epoch,
                whole = pad ? 26 : 25; // steps that the 13 samples left make; that an epoch makes
        before.pad = after.pad = pad;
        for (int64_t step = 0; step < 30; step++)
            for (int m = 0; m < 3; m++) counts[0][sampler_window(&before, step, m, 0)]++;
        for (int64_t step = 30; step < 30 + first + whole; step++)
            for (int m = 0; m < 4; m++) {
                sampler_position(&after, step, &epoch);
                if (epoch != (step >= 30 + first)) more = 1000;
                else counts[epoch][sampler_window(&after, step, m, 0)]++;
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
    device_open(dev, &dry_run, ".", 0);
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
    for (int i = 0; i < s->accumulation * s->B; i++) {
        count +=
            dataset_window(d, sampler_window(s, step, i / s->B, i % s->B), inputs, targets, raw, error, sizeof error);
        for (int t = 0; t < d->T; t++)
            different += inputs[t] != batch->inputs[i * d->T + t] || targets[t] != batch->targets[i * d->T + t];
    }
    return different + (batch->num_targets != count) + (batch->windows[0] != sampler_window(s, step, 0, 0));
}

static const Sampler loader_samplers[] = {{211, 9, 0, 1, 1, 0, 0, 3, 2, 0, 0, 0, 0},
                                          {211, 9, 1, 3, 1, 2, 0, 2, 1, 0, 0, 0, 0},
                                          {211, 9, 1, 2, 2, 1, 1, 2, 2, 1, 0, 0, 0},
                                          {211, 9, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0}};

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
                     workers[w], w ? "s" : "", s->shards, s->replicas, s->accumulation, s->B,
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
    snprintf(name, sizeof name, "--workers %d: memory of the dry run = measured", j->opt.workers);
    CHECK(name, dry_run == measured && device_peak(&o->dry_run.parallel.dev) == device_peak(&o->trainer.parallel.dev),
          "host memory of %zu and %zu bytes; %d started", dry_run, measured, o->trainer.loader.num_workers);
    close_rank(o);
}

static void test_loader_memory(void) {
    static const int workers[] = {0, 1, 2, 3, 7, LOADER_MAX_WORKERS};
    char arguments[512];
    for (int w = 0; w < 6; w++) {
        snprintf(arguments, sizeof arguments,
                 "--model %s/odd --data %s --seq 16 --batch 2 --accum 3 --threads 1 --workers %d", fixture_dir,
                 make_token_file("ranks.tok", 6000, 64, 7), workers[w]);
        Job *j = make_job(arguments, 1, &transport_threads);
        launch(j, 0, workers_body);
        end_job(j);
    }
    static const Sampler s = {100, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0};
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
        Sampler s = {SAMPLES, 9, pad, RANKS, 1, 0, 0, ACCUM, BATCH, local, 0, 0, 0},
                reference = {SAMPLES, 9, pad, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0};
        int64_t steps = sampler_steps_per_epoch(&s);
        for (int64_t step = 0; step < steps; step++)
            for (s.shard = 0; s.shard < RANKS; s.shard++)
                for (int m = 0; m < ACCUM; m++)
                    for (int b = 0; b < BATCH; b++) {
                        int64_t j = local ? (int64_t)s.shard * ACCUM + m
                                          : (int64_t)m * RANKS + s.shard; // numbered as they are summed
                        int64_t window = sampler_window(&s, step, m, b);
                        if (step * 12 + j * BATCH + b < SAMPLES)
                            same += window == sampler_window(&reference, step * 12 + j * BATCH + b, 0, 0);
                        counts[window]++;
                    }
        for (int i = 0; i < SAMPLES; i++) {
            once += counts[i] == 1;
            repeated += counts[i] > 1;
        }
        s.shard = 0;
        int other_epoch = 0;
        for (int64_t step = 0; step < steps; step++)
            other_epoch += sampler_window(&s, step, 0, 0) != sampler_window(&s, step + steps, 0, 0);
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
        int n = dataset_window(&d, w, inputs, targets, raw, error, sizeof error);
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

static void test_data(void) {
    test_shuffling();
    test_epochs();
    test_windows();
    test_sampler();
    test_sampler_goes_on();
    test_loader();
    test_loader_memory();
}

// ---------------------------------------------------------------------------
// evaluation, generation, files

static double eval_loss;
static int64_t eval_targets;

static void eval_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    int64_t targets;
    double loss = evaluate(&o->trainer, &j->val, 0, &targets);
    if (rank == 0) {
        eval_loss = loss;
        eval_targets = targets;
    }
    close_rank(o);
}

static double generation_difference;

static void generation_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    int V = trainer->model.config.V, n = (int)j->prompt_length;
    float *whole = (float *)checked_malloc(sizeof(float) * (size_t)V);
    memcpy(whole, next_token_logits(trainer, j->prompt, n, 0), sizeof(float) * (size_t)V); // all tokens at once
    next_token_logits(trainer, j->prompt, n / 2, 0); // then half of them, and the rest one by one
    const float *logits = NULL;
    for (int t = n / 2; t < n; t++) logits = next_token_logits(trainer, j->prompt + t, 1, t);
    if (rank == 0) generation_difference = norm_of_difference(logits, whole, 1, V) / norm_of(whole, V);
    free(whole);
    close_rank(o);
}

static void export_body(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    model_export(&o->trainer.writer);
    close_rank(o);
}

static int files_equal(const char *a, const char *b) {
    FILE *x = fopen(a, "rb"), *y = fopen(b, "rb");
    int equal = x && y;
    for (int c = 0; equal && c != EOF;) {
        c = fgetc(x);
        equal = c == fgetc(y);
    }
    if (x) fclose(x);
    if (y) fclose(y);
    return equal;
}

/* Returns the loss of one rank. */
static double test_evaluation(void) {
    char arguments[1024], name[128];
    double one = 0;
    for (int world = 1; world <= 3; world++) { // 2,999 targets: windows, batches and ranks all have a rest
        snprintf(arguments, sizeof arguments, "--model %s/odd --eval %s --seq 16 --batch 3", fixture_dir,
                 make_token_file("eval.tok", 3000, 64, 0));
        Job *j = make_job(arguments, world, &transport_threads);
        launch(j, 0, eval_body);
        if (world == 1) one = eval_loss;
        snprintf(name, sizeof name, "evaluation on %d ranks counts every token once", world);
        CHECK(name, eval_targets == 2999 && fabs(eval_loss / one - 1) < 1e-6,
              "%" PRId64 " targets, loss %.9g, one rank %.9g", eval_targets, eval_loss, one);
        end_job(j);
    }
    return one;
}

static void test_generation(void) {
    char arguments[1024], name[128];
    for (int world = 1; world <= 2; world++) {
        Job *j = make_job("--plan", 1, &transport_threads);
        snprintf(arguments, sizeof arguments, "%s/odd", fixture_dir);
        j->opt.model = strdup(arguments);
        j->config = config_load(j->opt.model);
        table_close(&j->table);
        table_open(&j->table, &j->config, 0, &WHOLE_MODEL);
        j->has_weights = model_weights_open(&j->weights, j->opt.model, &j->table, BASE_TRAINED);
        j->task = DO_GENERATE;
        j->opt.batch = 1;
        j->opt.seq = 12;
        j->opt.max_tokens = 4;
        j->prompt_length = 12;
        j->prompt = (int32_t *)checked_malloc(sizeof(int32_t) * 12);
        for (int t = 0; t < 12; t++) j->prompt[t] = (t * 37 + 5) % 131;
        j->mesh = mesh_of(world, 0, 1);
        launch(j, 0, generation_body);
        snprintf(name, sizeof name, "generation with cached keys and values on %d ranks: logits of the whole text",
                 world);
        CHECK(name, generation_difference < (sizeof(floatX) == 4 ? 2e-6 : 2e-2), "relative difference %.2g",
              generation_difference);
        end_job(j);
    }
}

/* `loss`: of the model that is exported. */
static void test_export(double loss) {
    char arguments[1024], name[128];
    static const struct {
        int world;
        const char *options, *name;
    } exporters[] = {
        {1, "", ""},
        {2, "", ""},
        {3, "", ""},
        {4, " --dp-replicate 2", ", 2 replicas,"},
        {3, " --sharding no_shard", " without sharding"},
    };
    for (int layout = 1; layout <= 5; layout++) {
        char model[256], original[512];
        int world = exporters[layout - 1].world;
        snprintf(model, sizeof model, "%s/export%d", scratch_dir, layout);
        snprintf(arguments, sizeof arguments, "--model %s/odd --export %s%s", fixture_dir, model,
                 exporters[layout - 1].options);
        Job *j = make_job(arguments, world, &transport_threads);
        export_check(model, &j->table, &j->opt);
        launch(j, 0, export_body);
        end_job(j);
        snprintf(original, sizeof original, "%s/export1/model.safetensors", scratch_dir);
        strcat(model, "/model.safetensors");
        snprintf(name, sizeof name, "export from %d ranks%s writes the bytes of one", world,
                 exporters[layout - 1].name);
        CHECK(name, files_equal(model, original), "%s", "compared byte by byte");
    }
    snprintf(arguments, sizeof arguments, "--model %s/export3 --eval %s --seq 16 --batch 3", scratch_dir,
             scratch_path("eval.tok"));
    Job *j = make_job(arguments, 1, &transport_threads);
    launch(j, 0, eval_body);
    CHECK("an exported model read again has the same loss", eval_loss == loss, "%.9g and %.9g", eval_loss, loss);
    end_job(j);
}

static void test_use(void) {
    double loss = test_evaluation();
    test_generation();
    test_export(loss);
    static const float logits[4] = {1, 3, 2, -5};
    Candidate scratch[4];
    CHECK("sampling: temperature 0 takes the likeliest, top-p cuts the rest off",
          sample_token(logits, 4, 0, 1, 0.99, scratch) == 1 && sample_token(logits, 4, 1, 0.5, 0.99, scratch) == 1 &&
              sample_token(logits, 4, 1, 1, 0.9999999, scratch) == 3,
          "%s", "three draws");
}

// ---------------------------------------------------------------------------
// failures end the run: in a child process, whose exit code and words are checked

typedef struct {
    void (*body)(void *);
    void *arg;
} Child;

static void *child_thread(void *arg) { // a thread of its own: OpenMP's threads of the main one did not survive the fork
    ((Child *)arg)->body(((Child *)arg)->arg);
    return NULL;
}

static int child_says(void (*body)(void *), void *arg, char *said, size_t size) {
    int ends[2], status;
    if (pipe(ends)) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        dup2(ends[1], STDOUT_FILENO);
        Child child = {body, arg};
        pthread_t thread;
        if (!pthread_create(&thread, NULL, child_thread, &child)) pthread_join(thread, NULL);
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used + 1 < size;) {
        got = read(ends[0], said + used, size - 1 - used);
        if (got > 0) used += (size_t)got;
    }
    said[used] = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The sentence it ended with, without what was said before. */
static const char *sentence(char *said) {
    for (char *line = strtok(said, "\n"); line; line = strtok(NULL, "\n"))
        if (!strncmp(line, "error: ", 7) || !strncmp(line, "failure: ", 9)) return line;
    return "";
}

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
        LoaderOptions options = {j->opt.seq, 0, 1, 0, 0, j->opt.steps, 0, j->cores_per_rank};
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
    if (rank == 1) o->trainer.reports[0].order[AXIS_FSDP]++;
    check_reports(&o->trainer, 1, 0);
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
    device_zero(&trainer->parallel.dev, trainer->sums, sizeof *trainer->sums * SUMS);
    exchange_reports(trainer, &trainer->loader.ring[0], 0, 0);
    StepStats s = sum_reports(trainer);
    if (s.skipped) skip_update(trainer, 2, &s);
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
static const Sampler spoiled_sampler = {211, 9, 0, 1, 1, 0, 0, 3, 2, 0, 0, 0, 0};

static int64_t spoiled_token(int sample) {
    return sampler_window(&spoiled_sampler, sample / 6, sample % 6 / 2, sample % 2) * 16 + 7;
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
    if (rank == 0 && truncate(j->opt.data, 64 + 2 * 17))
        run_failure("the file could not be truncated"); // one window is left
    for (int step = 2; step <= 100; step++) train_step(&o->trainer, step);
}

static void run_truncated(void *arguments) {
    launch(make_job((const char *)arguments, 3, &transport_threads), 0, truncated_body);
}

#include "dev/test/test_pipeline.h"

/* How a run ended that was started with `run`: its exit code, its last sentence, and how long it took. */
typedef struct {
    int code;
    double seconds;
    const char *said;
    char output[4096];
} Ending;

static void end_run(Ending *e, void (*run)(void *), const void *argument) {
    double start = seconds_now();
    e->code = child_says(run, (void *)argument, e->output, sizeof e->output);
    e->seconds = seconds_now() - start;
    e->said = sentence(e->output);
}

static void test_late_rank(const char *data) {
    char arguments[512];
    Ending end;
    const char *out = scratch_path("late");
    mkdir(out, 0777);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 1 --out %s",
             fixture_dir, data, out);
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
              strstr(end.said, "step 1: ranks 0 and 1 did not start the same collectives over fsdp in the same order"),
          "code %d: %s", end.code, end.said);
}

static void test_recording_time(void) {
    HeartbeatTable *b = heartbeats_open_threads(2, 1);
    Heartbeat *const neighbors[2] = {heartbeat_at(b, 1), heartbeat_at(b, 1)};
    uint64_t order = HASH_START;
    double start = seconds_now();
    FlightStart gather = {ALL_GATHER, "model.layers.12", 256, DTYPE_F32, start};
    for (int i = 0; i < 1000000; i++) flight_collective(b, heartbeat_at(b, 0), neighbors, AXIS_FSDP, &gather, &order);
    double took = (seconds_now() - start) * 1e3;
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
          end.code == 2 && strstr(end.said, "ranks 1 and 3 train on the same samples"), "code %d: %s", end.code,
          end.said);
    end_run(&end, run_other_seed, arguments);
    CHECK("a rank with another seed ends the run, and is named",
          end.code == 2 && strstr(end.said, "rank 2 shuffles samples or initializes weights with a different seed"),
          "code %d: %s", end.code, end.said);
    for (int ddp = 0; ddp < 2; ddp++) {
        const char *replicas = ddp ? "ranks 0 and 2 are replicas" : "ranks 0 and 2 are replicas (of dp_replicate)";
        snprintf(more, sizeof more, "%s %s", arguments, ddp ? "--sharding no_shard" : "--dp-replicate 2");
        end_run(&end, run_bad_replica, more);
        CHECK(ddp ? "no_shard: a bit that differs between ranks is found by the replica check"
                  : "hybrid: a bit that differs between replicas is found by the replica check",
              end.code == 2 && strstr(end.said, replicas) && strstr(end.said, "weights of model.layers.1 differ"),
              "code %d: %s", end.code, end.said);
    }
}

static void test_steps_not_finite(const char *arguments) {
    char more[700];
    Ending end;
    snprintf(more, sizeof more, "%s --max-skips 0", arguments);
    end_run(&end, run_bad_gradient, more);
    CHECK("a gradient that is not finite names its tensor and rank, and ends the run after --max-skips",
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
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 180 --timeout 20", fixture_dir,
             path);
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
             fixture_dir, path);
    end_run(&end, run_truncated, arguments);
    int64_t first = -1, last = -1;
    const char *at = strstr(end.said, ": tokens ");
    if (at && sscanf(at, ": tokens %" SCNd64 " to %" SCNd64, &first, &last) != 2) last = -1;
    CHECK("a file that is truncated while it is read is named, with its tokens",
          end.code == 1 && strstr(end.said, path) && last == first + 16 && last >= 17, "code %d: %s", end.code,
          end.said);
}

static void test_failures(void) {
    char arguments[512];
    const char *data = make_token_file("failures.tok", 3000, 64, 0);
    test_late_rank(data);
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq 16 --batch 1 --timeout 6", fixture_dir, data);
    test_collective_orders(arguments);
    test_recording_time();
    test_ranks_that_differ(arguments);
    test_messages_that_fail();
    test_steps_not_finite(arguments);
    test_spoiled_data();
}

#include "dev/test/test_kernels.h"
#include "dev/test/test_tokenizer.h"
#include "dev/test/test_documents.h"
#include "dev/test/test_mesh_bits.h"
#include "dev/test/test_plan.h"
#include "dev/test/test_simulate.h"
#include "dev/test/test_checkpoints.h"
#include "dev/test/test_adapters.h"
#include "dev/test/test_mesh_use.h"
#ifdef CUDA_ON_CPU
#include "dev/test/test_streams.h"
#else
static void test_mesh_of_gpus(void) {}
static void test_streams(void) {} // these need several GPUs, or dev/cuda_on_cpu
static void test_orders(void) {}
#endif

// ---------------------------------------------------------------------------

static const char *spaced(const char *word) {
    static char text[64];
    snprintf(text, sizeof text, " %s ", word);
    return text;
}

/* `short` runs a group in the build that finds the most with it; all builds together run each group. */
static const char *left_out_if_short(void) {
    if (CUDA_BUILD && FLOATX == DTYPE_BF16) return " mesh orders streams pipeline faults use adapters simulate ";
    if (CUDA_BUILD) return " documents bits simulate pytorch ";
    if (FLOATX == DTYPE_BF16)
        return " tokenizer data mesh-use mesh-bits bits adapters plan simulate checkpoints failures pipeline ";
    return " ";
}

enum { IF_NAMED, C_BUILD = 1, CUDA = 2, BOTH_BUILDS = C_BUILD | CUDA }; // where a group runs unless groups are named
static const struct {
    const char *name;
    void (*run)(void);
    int where;
} groups[] = {{"kernels", test_kernels, BOTH_BUILDS},
              {"tokenizer", test_tokenizer, C_BUILD},
              {"family", test_family, C_BUILD},
              {"data", test_data, C_BUILD},
              {"pytorch", test_pytorch, BOTH_BUILDS},
              {"documents", test_doc_mask, BOTH_BUILDS},
              {"ranks", test_ranks, C_BUILD},
              {"layouts", test_layouts, C_BUILD},
              {"layouts-all", test_layouts_all, IF_NAMED},
              {"mesh", CUDA_BUILD ? test_mesh_of_gpus : test_mesh, BOTH_BUILDS},
              {"mesh-use", test_mesh_use, C_BUILD},
              {"mesh-use-all", test_mesh_use_all, IF_NAMED},
              {"mesh-bits", test_mesh_bits, C_BUILD},
              {"mesh-bits-all", test_mesh_bits_all, IF_NAMED},
              {"mesh-faults", test_mesh_faults, IF_NAMED},
              {"mesh-all", test_mesh_all, IF_NAMED},
              {"reduce-dtype", test_reduce_dtype, C_BUILD},
              {"validation", test_validation_between, C_BUILD},
              {"bits", test_bits, BOTH_BUILDS},
              {"replicas", test_replicas, BOTH_BUILDS},
              {"use", test_use, BOTH_BUILDS},
              {"checkpoints", test_checkpoints, C_BUILD},
              {"checkpoints-all", test_checkpoints_all, IF_NAMED},
              {"adapters", test_adapters, BOTH_BUILDS},
              {"plan", test_plan, C_BUILD},
              {"simulate", test_simulate, BOTH_BUILDS},
              {"failures", test_failures, C_BUILD},
              {"pipeline", test_pipeline, BOTH_BUILDS},
              {"faults", test_faults, CUDA}, // a part of "ranks"
              {"streams", test_streams, CUDA},
              {"orders", test_orders, CUDA}};

/* Runs the groups that are named, or those of this build. */
static void run_groups(int argc, char **argv) {
    // dev/test/cuda.sh compares some layouts' bits, and so do "orders"
    int bits_too = !CUDA_BUILD || (FLOATX == DTYPE_BF16 && !is_short);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        int elsewhere = is_short && strstr(left_out_if_short(), spaced(groups[g].name));
        int runs_here = groups[g].where & (CUDA_BUILD ? CUDA : C_BUILD);
        int left_out = bits_too ? CUDA_BUILD && groups[g].run == test_orders : groups[g].run == test_bits;
        int wanted = (argc == 1 || is_short) && runs_here && !elsewhere && !left_out;
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], groups[g].name);
        if (!wanted) continue;
        double start = seconds_now();
        groups[g].run();
        printf("---- %s: %.1f s\n", groups[g].name, seconds_now() - start);
    }
}

int main(int argc, char **argv) {
    is_short = argc == 2 && !strcmp(argv[1], "short");
    int process = 0, processes = 1, mpi = argc > 1 && !strcmp(argv[1], "mpi");
    if (mpi) {
        LaunchInfo started = comm_start_process(&argc, &argv, 60);
        process = started.rank;
        processes = started.world;
        (void)processes;
    }
    const char *place = getenv("TMPDIR") && strlen(getenv("TMPDIR")) < 40 ? getenv("TMPDIR") : "/tmp";
    snprintf(scratch_dir, sizeof scratch_dir, "%.40s/llama3-test-XXXXXX", place);
    if (process == 0 && !mkdtemp(scratch_dir)) return 1;
#ifdef HAVE_MPI
    if (mpi) MPI_Bcast(scratch_dir, sizeof scratch_dir, MPI_CHAR, 0, MPI_COMM_WORLD);
    if (mpi) test_waiting(process, processes);
    int all_of_mpi = mpi && !(argc > 2 && !strcmp(argv[2], "waiting"));
    if (all_of_mpi) {
        test_mpi(process, processes);
        test_mesh_mpi(process, processes);
        test_mesh_bits_mpi(process, processes);
        test_events(process, processes, &transport_mpi);
        test_trace(process, processes, &transport_mpi);
        test_checkpoints_mpi(process, processes);
    }
    if (all_of_mpi && processes > 1 && processes <= 4) test_messages(process, processes, &transport_mpi);
#endif
    if (!mpi) run_groups(argc, argv);
    if (process == 0) {
        char command[128];
        snprintf(command, sizeof command, "rm -rf %s", scratch_dir);
        if (system(command)) printf("could not remove %s\n", scratch_dir);
        printf("%d passed, %d failed\n", checks_passed, checks_failed);
    }
    if (mpi) comm_end_process();
    return checks_failed > 0;
}
