/* jobs.h: jobs as command lines make them, and the token files that they read. Included after a program that computes
 * with the model, and harness.h. */
#ifndef TEST_JOBS_H
#define TEST_JOBS_H

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

/* Rewrites a token file of version 1, with or without a loss mask, as version 2. Documents end with token `end`, and
 * every smaller token has one byte. `sha256`: the tokenizer's fingerprint. */
static void rewrite_as_version_2(const char *path, const uint8_t sha256[32], int32_t end, int64_t count) {
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

/* Makes a token file of version 2 in a directory with its tokenizer, whose token 2 ends a document. The parameters are
 * those of make_token_file. */
static const char *make_document_file(const char *name, int64_t count, int vocab, int masked) {
    char inside[128], part[330], tokenizer[300];
    uint8_t print[32];
    mkdir(scratch_path("documents"), 0777);
    snprintf(tokenizer, sizeof tokenizer, "%s", scratch_path("documents/tokenizer.model"));
    snprintf(part, sizeof part, "%s.%d", tokenizer,
             (int)getpid()); // renamed when complete: other ranks may be reading it
    FILE *f = fopen(part, "w");
    fprintf(
        f,
        "byte-level-bpe 1\ntokens 3\nmissing 254\nbos -\neos <end>\neot -\nsplit .\nIQ== 0\nIg== 1\nspecial <end> 2\n");
    fclose(f);
    rename(part, tokenizer);
    snprintf(inside, sizeof inside, "documents/%s.%d", name, (int)getpid());
    snprintf(part, sizeof part, "%s", make_token_file(inside, count, vocab, masked));
    sha256_of_file(tokenizer, print);
    rewrite_as_version_2(part, print, 2, count);
    snprintf(inside, sizeof inside, "documents/%s", name);
    const char *path = scratch_path(inside);
    rename(part, path);
    return path;
}

static Job *training_job(int argc, char **argv) {
    Job *j = new_array(Job, 1);
    job_take_options(j, options_parse(argc, argv));
    j->purpose = training();
    return j;
}

/* What a command line starts: a run of train_llama3, unless a test program has changed it. */
static struct {
    Job *(*job)(int argc, char **argv);
    void (*rank)(Job *j, int rank);
} command_line = {training_job, rank_main};

static int has_word(char **argv, int argc, const char *word) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], word)) return 1;
    return 0;
}

/* A job as the command line `arguments` (parted by blanks) makes it, on `world` ranks. */
static Job *make_job(const char *arguments, int world, const Transport *transport) {
    static char *argv[128];
    int argc = 1;
    argv[0] = (char *)"train_llama3";
    for (char *word = strtok(strdup(arguments), " "); word && argc < 128; word = strtok(NULL, " ")) argv[argc++] = word;
    Job *j = command_line.job(argc, argv);
    j->transport = transport;
    j->host_transport = !strcmp(transport->name, "nccl") ? &transport_threads : transport;
    job_prepare(j, world, world, world);
    if (!j->run.threads) j->threads_per_rank = world == 1 && transport == &transport_threads ? 2 : 1;
    pthread_mutex_init(&j->thread_world.lock, NULL);
    return j;
}

#ifdef HAVE_MPI
/* One folder of all processes. */
static void open_scratch_of_processes(int process) {
    if (process == 0) open_scratch();
    MPI_Bcast(scratch_dir, sizeof scratch_dir, MPI_CHAR, 0, MPI_COMM_WORLD);
}
#endif

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

// ---------------------------------------------------------------------------
// runs in processes of their own

typedef struct {
    const char *arguments;
    int world;
} WholeRun;

static void whole_run(void *arg) {
    const WholeRun *w = (const WholeRun *)arg;
    Job *j = make_job(w->arguments, w->world, &transport_threads);
    launch(j, 0, command_line.rank);
    end_job(j);
    fflush(stdout); // the test reads the printed result
}

/* Runs the command line on `world` ranks in a child process. `said` (SAID) receives what it prints. Returns its exit
 * code. */
static int run_whole(char *said, int world, const char *format, ...) {
    char arguments[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    WholeRun w = {arguments, world};
    return child_says(whole_run, &w, said, SAID);
}

/* Files of two directories that are not the same in both; those that only one has count too. */
static int files_that_differ(const char *a, const char *b, int *count) {
    int differ = 0;
    *count = 0;
    for (int turn = 0; turn < 2; turn++) {
        DIR *d = opendir(turn ? b : a);
        if (!d) return 1000;
        for (struct dirent *item = readdir(d); item; item = readdir(d)) {
            char x[512], y[512];
            if (item->d_name[0] == '.') continue;
            snprintf(x, sizeof x, "%s/%.200s", a, item->d_name);
            snprintf(y, sizeof y, "%s/%.200s", b, item->d_name);
            if (turn) differ += access(x, F_OK) != 0;
            else {
                differ += !files_equal(x, y);
                ++*count;
            }
        }
        closedir(d);
    }
    return differ;
}

/* The figure behind "name": in a line of JSON. */
static int64_t figure_in(const char *said, const char *name) {
    const char *at = strstr(said, name);
    return at ? strtoll(at + strlen(name) + 1, NULL, 10) : -1;
}

/* One rank's run of 4 steps, with a checkpoint after 2 and after 4. Returns its directory. */
static const char *saved_run(int tied, const char *name, const char *model, const char *data) {
    static char out[2][300];
    char said[SAID];
    snprintf(out[tied], sizeof out[tied], "%s%s", scratch_path(name), tied ? "-tied" : "");
    int code = run_whole(said, 1,
                         "--model %s --data %s --seq 16 --steps 4 --warmup 0 --threads 1 --deterministic --batch 1 "
                         "--accum 8 --save-every 2 --out %s",
                         model, data, out[tied]);
    CHECK(tied ? "tied: a run saves as it goes" : "untied: a run saves as it goes", code == 0, "code %d %s", code,
          code ? error_line(said) : "");
    return out[tied];
}

#endif
