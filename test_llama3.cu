/* test_llama3.cu: includes the program and checks it. Each check says the property in its name and prints the
 * measured figure next to the bound.
 *
 *   test_llama3 [GROUP…]              all groups, or the named ones, in this process (ranks as threads); kernels:NAME
 *                                     is one test of the group kernels
 *   test_llama3 list                  the names of the groups that this build runs, and of the tests of kernels
 *   test_llama3 short                 what `make test` runs: fewer layouts, and no group that another build covers
 *   mpirun -np N test_llama3 mpi      the groups that need processes
 *   mpirun -np 2 test_llama3 mpi waiting   of these, that the reported waiting is what MPI's profiling interface sees
 *   mpirun … test_llama3 mpi network  the same on hosts with a slow network between them (dev/test/hosts.sh)
 */
#define TESTING
static int most_skips = 10, replica_check_steps = 100;
#define MOST_SKIPS most_skips
#define REPLICA_CHECK_STEPS replica_check_steps
#include "lib/system.h"
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
#define TESTING_PROGRAM
#include "train_llama3.cu"
#include "programs/convert_llama3.cu"
#include "programs/eval_llama3.cu"
#include "programs/generate_llama3.cu"
#include "programs/plan_llama3.cu"
#include "programs/tokens/audit.h" // defines: audit
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

static void sha256_of_file(const char *path, uint8_t out[32]) {
    size_t len;
    char *text = tokenizer_read_file(path, &len);
    sha256(text, len, out);
    free(text);
}

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
static struct {
    int count;      // requests that were started and not found complete yet
    double since;   // when the first of them was started
    double seconds; // in which there was at least one, so far
} in_flight;

static void profile(Collective op, int count, MPI_Datatype type, MPI_Comm comm) { // of one part, or of a message
    int size, bytes, i = 0;
    if (profile_delay_us) usleep(profile_delay_us);
    if (in_flight.count++ == 0) in_flight.since = seconds_now();
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
    profile(REDUCE_SCATTER, count, type, comm); // or an all-to-all: MPI does not see the difference
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

static int is_short; // run only a part of the checks of each group
static const char *fixture_dir = "dev/test/fixtures";
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
    fwrite(&h, TOKEN_FILE_FIRST_BYTES, 1, f);
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

/* docs (T) as dataset_sample counts them for a window with these tokens. */
static void document_ids(int32_t *docs, const int32_t *inputs, int T, int32_t document_end) {
    int32_t ended = 0;
    for (int t = 0; t < T; t++) {
        docs[t] = ended;
        ended += inputs[t] == document_end;
    }
}

/* Makes a file of version 2 of one of version 1 without a mask or with one, whose documents end with token `end` and
 * whose tokens before it have one byte each, by the tokenizer with this SHA-256. */
static void upgrade_file(const char *path, const uint8_t sha256[32], int32_t end, int64_t count) {
    size_t length;
    char *text = read_file(path, &length);
    TokenFileHeader h = ZERO;
    memcpy(&h, text, TOKEN_FILE_FIRST_BYTES);
    h.version = 2;
    memcpy(h.tokenizer, sha256, 32);
    h.document_end = end;
    h.front = NO_ID;
    for (int64_t i = 0; i < count; i++) {
        uint16_t token;
        char *mask = h.flags & TOKEN_FILE_MASKED ? text + TOKEN_FILE_FIRST_BYTES + 2 * count + i : NULL;
        memcpy(&token, text + TOKEN_FILE_FIRST_BYTES + 2 * i, sizeof token);
        h.target_bytes += i > 0 && token < end && (!mask || *mask);
        if (mask && token == end) *mask |= TOKEN_ENDS_DOCUMENT;
    }
    FILE *f = fopen(path, "wb");
    fwrite(&h, sizeof h, 1, f);
    fwrite(text + TOKEN_FILE_FIRST_BYTES, 1, length - TOKEN_FILE_FIRST_BYTES, f);
    fclose(f);
    free(text);
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
    upgrade_file(part, print, 2, count);
    snprintf(inside, sizeof inside, "documents/%s", name);
    const char *path = scratch_path(inside);
    rename(part, path);
    return path;
}

typedef union { // each begins with its job
    Job job;
    Conversion convert;
    Evaluations eval;
    Planning plan;
} AnyJob;

static int has_word(char **argv, int argc, const char *word) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], word)) return 1;
    return 0;
}

/* Reads the command line of the program whose option is there, or of train_llama3. */
static void job_options(AnyJob *any, int argc, char **argv) {
    Options *o = &any->job.opt;
    if (has_word(argv, argc, "--export")) {
        any->convert.program = convert_program;
        program_options_parse(&any->convert.program, &any->convert.opt, o, argc, argv);
        any->job.purpose = convert_purpose(any->convert.opt.merge);
    } else if (has_word(argv, argc, "--eval") || has_word(argv, argc, "--score")) {
        any->eval.program = eval_program;
        program_options_parse(&any->eval.program, &any->eval.opt, o, argc, argv);
        any->job.purpose = eval_purpose();
    } else if (has_word(argv, argc, "--plan")) {
        any->plan.program = plan_program;
        program_options_parse(&any->plan.program, &any->plan.opt, o, argc, argv);
        any->job.purpose = plan_purpose(any->plan.opt.world);
    } else {
        *o = options_parse(argc, argv);
        any->job.purpose = training();
    }
}

/* What a rank of the job's program does. */
static void any_rank(Job *j, int rank) {
    if (j->purpose.converts) convert_rank(j, rank);
    else if (!j->purpose.trains) eval_rank(j, rank);
    else rank_main(j, rank);
}

/* A job as the command line `arguments` (parted by blanks) makes it, on `world` ranks. */
static Job *make_job(const char *arguments, int world, const Transport *transport) {
    static char *argv[128];
    int argc = 1;
    AnyJob *any = new_array(AnyJob, 1);
    Job *j = &any->job;
    argv[0] = (char *)"train_llama3";
    for (char *word = strtok(strdup(arguments), " "); word && argc < 128; word = strtok(NULL, " ")) argv[argc++] = word;
    job_options(any, argc, argv);
    j->transport = transport;
    j->host_transport = !strcmp(transport->name, "nccl") ? &transport_threads : transport;
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
    trainer_open(&o->trainer, &o->dry_run, j, rank, NULL);
    return o;
}

static void close_rank(Opened *o) {
    trainer_close(&o->trainer);
    trainer_close(&o->dry_run);
    free(o);
}

/* Copies `bytes` from the device into new memory of the host. */
static void *on_host(Device *dev, const void *from, size_t bytes) {
    void *copy = checked_malloc(bytes);
    device_read(dev, copy, from, bytes);
    return copy;
}
static float *floats_on_host(Device *dev, const float *from, int64_t count) {
    return (float *)on_host(dev, from, sizeof(float) * (size_t)count);
}

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

// ---------------------------------------------------------------------------
// a child process, so that a test can check its exit code and its messages

typedef struct {
    void (*body)(void *);
    void *arg;
} Child;

static void *child_thread(void *arg) { // a thread of its own: OpenMP's threads of the main one did not survive the fork
    ((Child *)arg)->body(((Child *)arg)->arg);
    return NULL;
}

enum { SAID = 1 << 15 }; // room for what a child process prints, in bytes

/* Runs body(arg) in a child process and keeps what it prints in `said`. Returns its exit code, or -1 if it was killed
 * or printed too much for `size` bytes. */
static int child_says(void (*body)(void *), void *arg, char *said, size_t size) {
    int ends[2], status;
    if (pipe(ends)) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(600); // a check that hangs is a failure, not a hang of all tests
        dup2(ends[1], STDERR_FILENO);
        dup2(ends[1], STDOUT_FILENO);
        Child child = {body, arg};
        pthread_t thread;
        if (!pthread_create(&thread, NULL, child_thread, &child)) pthread_join(thread, NULL);
        fflush(stdout);
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
    int is_cut = used + 1 == size;
    if (is_cut) printf("error: a child process printed more than its test has room for, %zu bytes\n", size);
    return WIFEXITED(status) && !is_cut ? WEXITSTATUS(status) : -1;
}

/* The sentence it ended with, without what was said before. */
static const char *sentence(char *said) {
    for (char *line = strtok(said, "\n"); line; line = strtok(NULL, "\n"))
        if (!strncmp(line, "error: ", 7) || !strncmp(line, "failure: ", 9)) return line;
    return "";
}

/* How a run ended that was started with `run`: its exit code, its last sentence, and how long it took. */
typedef struct {
    int code;
    double seconds;
    const char *said;
    char output[SAID];
} Ending;

static void end_run(Ending *e, void (*run)(void *), const void *argument) {
    double start = seconds_now();
    e->code = child_says(run, (void *)argument, e->output, sizeof e->output);
    e->seconds = seconds_now() - start;
    e->said = sentence(e->output);
}

/* Runs fn(arg) in a child: it must exit with code 1 after one line `error: ...` that contains `part`. */
static void expect_user_error(const char *name, void (*fn)(void *), const void *arg, const char *part) {
    char text[8192];
    int lines = 0, code = child_says(fn, (void *)arg, text, sizeof text);
    size_t len = strlen(text);
    for (size_t i = 0; i < len; i++) lines += text[i] == '\n';
    if (len && text[len - 1] == '\n') text[len - 1] = 0;
    CHECK(name, code == 1 && lines == 1 && !strncmp(text, "error: ", 7) && strstr(text, part),
          "exit %d, %d line(s): %.300s", code, lines, text);
}

// ---------------------------------------------------------------------------
// the tests

#include "dev/test/test_kernels.h"
#include "dev/test/test_tokenizer_files.h"
#include "dev/test/test_tokenizer.h"
#include "dev/test/test_family.h"
#include "dev/test/test_mfu.h"
#include "dev/test/test_data.h"
#include "dev/test/test_safetensors.h"
#include "dev/test/test_pytorch.h"
#include "dev/test/test_ranks.h"
#include "dev/test/test_layouts.h"
#include "dev/test/test_mesh.h"
#include "dev/test/test_bits.h"
#include "dev/test/test_use.h"
#include "dev/test/test_gguf.h"
#include "dev/test/test_score.h"
#include "dev/test/test_generate.h"
#include "dev/test/test_waiting.h"
#include "dev/test/test_mpi.h"
#include "dev/test/test_messages.h"
#include "dev/test/test_pipeline.h"
#include "dev/test/test_failures.h"
#define TESTING_PROGRAM
#include "programs/check_hosts.cu"
#include "dev/test/test_hosts.h"
#include "dev/test/test_documents.h"
#include "dev/test/test_packing.h"
#include "dev/test/test_mesh_bits.h"
#include "dev/test/test_plan.h"
#include "dev/test/test_simulate.h"
#include "dev/test/test_goodput.h"
#include "dev/test/test_run_page.h"
#include "dev/test/test_hard_places.h"
#include "dev/test/test_checkpoints.h"
#include "dev/test/test_mixture.h"
#include "dev/test/test_adapters.h"
#include "dev/test/test_muon.h"
#include "dev/test/test_mesh_use.h"
#include "dev/test/test_z_loss.h"
#include "dev/test/test_logits.h"
#include "dev/test/test_outliers.h"
#ifdef CUDA_ON_CPU
#include "dev/test/test_streams.h"
#else
static void test_mesh_of_gpus(void) {}
static void test_streams(void) {} // these need several GPUs, or dev/cuda_on_cpu
static void test_orders(void) {}
static void test_mesh_orders(void) {}
#endif

// ---------------------------------------------------------------------------
// the table of groups

static const char *spaced(const char *word) {
    static char text[64];
    snprintf(text, sizeof text, " %s ", word);
    return text;
}

/* `short` runs a group in the build that finds the most with it; all builds together run each group. */
static const char *left_out_if_short(void) {
    if (CUDA_BUILD && FLOATX == DTYPE_BF16)
        return " mesh orders mesh-orders streams pipeline faults use adapters simulate muon ";
    if (CUDA_BUILD) return " documents bits simulate pytorch mesh adapters ";
    if (FLOATX == DTYPE_BF16)
        return " tokenizer data layouts mesh-use mesh-bits bits adapters plan simulate goodput run-page hard-places "
               "checkpoints failures pipeline mixture outliers muon z-loss ";
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
              {"mfu", test_mfu, C_BUILD},
              {"data", test_data, C_BUILD},
              {"safetensors", test_safetensors, C_BUILD},
              {"pytorch", test_pytorch, BOTH_BUILDS},
              {"documents", test_doc_mask, BOTH_BUILDS},
              {"packing", test_packing, C_BUILD},
              {"ranks", test_ranks, C_BUILD},
              {"layouts", test_layouts, C_BUILD},
              {"mesh", test_mesh_of_gpus, CUDA},
              {"mesh-use", test_mesh_use, C_BUILD},
              {"mesh-use-all", test_mesh_use_all, IF_NAMED},
              {"mesh-bits", test_mesh_bits, C_BUILD},
              {"mesh-faults", test_mesh_faults, IF_NAMED},
              {"reduce-dtype", test_reduce_dtype, C_BUILD},
              {"validation", test_validation_between, C_BUILD},
              {"bits", test_bits, BOTH_BUILDS},
              {"replicas", test_replicas, BOTH_BUILDS},
              {"use", test_use, BOTH_BUILDS},
              {"gguf", test_gguf, C_BUILD},
              {"score", test_score, C_BUILD},
              {"generate", test_generate, C_BUILD},
              {"checkpoints", test_checkpoints, C_BUILD},
              {"mixture", test_mixture, C_BUILD},
              {"checkpoints-all", test_checkpoints_all, IF_NAMED},
              {"z-loss", test_z_loss, C_BUILD},
              {"logits", test_logits_of_model, BOTH_BUILDS},
              {"outliers", test_outliers, C_BUILD},
              {"adapters", test_adapters, BOTH_BUILDS},
              {"muon", test_muon, BOTH_BUILDS},
              {"plan", test_plan, C_BUILD},
              {"simulate", test_simulate, BOTH_BUILDS},
              {"goodput", test_goodput, C_BUILD},
              {"run-page", test_run_page, C_BUILD},
              {"failures", test_failures, C_BUILD},
              {"hosts", test_check_hosts, C_BUILD},
              {"hard-places", test_hard_places, C_BUILD},
              {"pipeline", test_pipeline, BOTH_BUILDS},
              {"faults", test_faults, CUDA}, // a part of "ranks"
              {"streams", test_streams, CUDA},
              {"accumulation", test_accumulation, IF_NAMED}, // a part of "ranks"
              {"orders", test_orders, CUDA},
              {"mesh-orders", test_mesh_orders, CUDA}};

static const char KERNEL_TEST[] = "kernels:";

/* The test of kernels that an argument names, or NULL. */
static const char *named_kernel_test(const char *argument) {
    size_t length = strlen(KERNEL_TEST);
    return strncmp(argument, KERNEL_TEST, length) ? NULL : argument + length;
}

static void list_groups(void) {
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        if (groups[g].where & (CUDA_BUILD ? CUDA : C_BUILD)) printf("%s\n", groups[g].name);
    for (int i = 0; i < KERNEL_TESTS; i++) printf("%s%s\n", KERNEL_TEST, kernel_tests[i].name);
}

/* A name that is no group's must not end as a run that found nothing wrong. */
static void check_names(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *test = named_kernel_test(argv[i]);
        int known = is_short;
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) known |= !strcmp(argv[i], groups[g].name);
        for (int k = 0; k < KERNEL_TESTS && test; k++) known |= !strcmp(test, kernel_tests[k].name);
        if (!known) user_error("%s is not a group of tests; `%s list` prints their names", argv[i], argv[0]);
    }
}

/* Runs the groups that are named, or those of this build. */
static void run_groups(int argc, char **argv) {
    check_names(argc, argv);
    for (int i = 1; i < argc; i++) {
        const char *test = named_kernel_test(argv[i]);
        if (test) run_kernel_tests(test);
    }
    // dev/test/cuda.sh compares some layouts' bits, and so do "orders" and "mesh-orders"
    int bits_too = !CUDA_BUILD || (FLOATX == DTYPE_BF16 && !is_short);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        int elsewhere = is_short && strstr(left_out_if_short(), spaced(groups[g].name));
        int runs_here = groups[g].where & (CUDA_BUILD ? CUDA : C_BUILD);
        int of_orders = groups[g].run == test_orders || groups[g].run == test_mesh_orders;
        int left_out = bits_too ? CUDA_BUILD && of_orders : groups[g].run == test_bits;
        int wanted = (argc == 1 || is_short) && runs_here && !elsewhere && !left_out;
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], groups[g].name);
        if (!wanted) continue;
        double start = seconds_now(), used = (double)clock() / CLOCKS_PER_SEC;
        groups[g].run();
        printf("---- %s: %.1f s, this process computed for %.1f s\n", groups[g].name, seconds_now() - start,
               (double)clock() / CLOCKS_PER_SEC - used);
    }
}

int main(int argc, char **argv) {
    device_prepare_process(1);
    is_short = argc == 2 && !strcmp(argv[1], "short");
    if (argc == 2 && !strcmp(argv[1], "list")) {
        list_groups();
        return 0;
    }
    int process = 0, processes = 1, mpi = argc > 1 && !strcmp(argv[1], "mpi");
    if (mpi) {
        LaunchInfo started = comm_start_process(&argc, &argv, 60, 60);
        process = started.rank;
        processes = started.world;
        (void)processes;
    }
    const char *place = getenv("TMPDIR") && strlen(getenv("TMPDIR")) < 40 ? getenv("TMPDIR") : "/tmp";
    snprintf(scratch_dir, sizeof scratch_dir, "%.40s/llama3-test-XXXXXX", place);
    if (process == 0 && !mkdtemp(scratch_dir)) return 1;
#ifdef HAVE_MPI
    if (mpi) MPI_Bcast(scratch_dir, sizeof scratch_dir, MPI_CHAR, 0, MPI_COMM_WORLD);
    int on_network = mpi && argc > 2 && !strcmp(argv[2], "network");
    if (on_network) test_waiting_network(process, processes);
    else if (mpi) test_waiting(process, processes);
    int all_of_mpi = mpi && !on_network && !(argc > 2 && !strcmp(argv[2], "waiting"));
    if (all_of_mpi) {
        test_mpi(process, processes);
        test_layouts_mpi(process, processes);
        test_mesh_bits_mpi(process, processes);
        test_events(process, processes, &transport_mpi);
        test_trace(process, processes, &transport_mpi);
        test_checkpoints_mpi(process, processes);
        test_muon_mpi(process, processes);
    }
    if (all_of_mpi && processes > 1 && processes <= 4) {
        test_messages(process, processes, &transport_mpi);
        test_toys(process, processes, &transport_mpi);
    }
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
