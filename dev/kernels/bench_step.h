/* bench_step.h: `bench_gpu train`: a training job of one rank that takes steps on request and says where the time goes.
 *
 * It takes the program's options, trains on random tokens, reads requests from stdin and answers each with a JSON
 * object. The first step is checked as in the program: expected, dry-run and measured traffic, dry-run and measured
 * memory. A file that includes this one includes train_llama3.cu first.
 */
#ifndef BENCH_STEP_H
#define BENCH_STEP_H

static void write_tokens(const char *path, int V, int64_t count) {
    TokenFileHeader h = ZERO;
    memcpy(h.magic, TOKEN_FILE_MAGIC, 8);
    h.version = TOKEN_FILE_VERSION;
    h.document_end = h.front = NO_ID;
    h.width = 4;
    h.vocab_size = (uint32_t)V;
    h.count = (uint64_t)count;
    FILE *f = fopen(path, "wb");
    if (!f) user_error("cannot write %s: %s", path, strerror(errno));
    fwrite(&h, sizeof h, 1, f);
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = (uint32_t)(mix64((uint64_t)i) % (uint64_t)V);
        fwrite(&token, 4, 1, f);
    }
    if (fclose(f)) user_error("cannot write %s: %s", path, strerror(errno));
}

/* Where a step's time goes: an event behind each op, so that what lies between two ops counts as the second's. */
typedef enum {
    PART_MATMULS,
    PART_HEAD,
    PART_LOSS,
    PART_ATTENTION_FORWARD,
    PART_ATTENTION_BACKWARD,
    PART_MEMORY,
    PART_OPTIMIZER,
    PARTS
} Part;
static const char *const part_names[PARTS] = {"block matmuls",     "head matmuls",       "cross-entropy",
                                              "attention forward", "attention backward", "memory-bound ops",
                                              "AdamW and norm"};

typedef struct {
    Device *dev;
    cudaEvent_t *events;
    Part *parts;
    int64_t count, most;
} Marks; // events: (most + 1), the first the step's start

static Part part_of(const Device *dev) {
    switch (dev->op) {
    case OP_LINEAR_FORWARD:
    case OP_LINEAR_BACKWARD_INPUT:
    case OP_LINEAR_BACKWARD_WEIGHT:
        return dev->rec.phase_name && !strcmp(dev->rec.phase_name, "loss") ? PART_HEAD : PART_MATMULS;
    case OP_CROSS_ENTROPY: return PART_LOSS;
    case OP_ATTENTION_FORWARD: return PART_ATTENTION_FORWARD;
    case OP_ATTENTION_BACKWARD: return PART_ATTENTION_BACKWARD;
    case OP_SQUARED_NORM:
    case OP_MUON_MOMENTUM:
    case OP_NORMALIZE_MATRIX:
    case OP_MUON_MATMUL:
    case OP_WEIGHTED_SUM:
    case OP_MUON_UPDATE:
    case OP_ADAMW: return PART_OPTIMIZER;
    default: return PART_MEMORY;
    }
}
static void mark_op(void *arg) { // called behind each op
    Marks *m = (Marks *)arg;
    if (m->count == m->most) run_failure("bench_gpu.cu: a step has more than %" PRId64 " ops", m->most);
    m->parts[m->count++] = part_of(m->dev);
    cuda_check(cudaEventRecord(m->events[m->count], m->dev->on.stream), "recording an event");
}

static int64_t calls_of(const Device *dev) {
    int64_t calls = 0;
    for (int o = 0; o < OP_COUNT; o++) calls += dev->rec.ops[o].calls;
    return calls;
}

static double timed_step(Trainer *trainer, int64_t step, StepStats *s) {
    double start = seconds_now();
    *s = train_step(trainer, step);
    device_synchronize(&trainer->parallel.dev);
    return seconds_now() - start;
}

static void answer_parts(Trainer *trainer, int64_t step) {
    Marks m = {&trainer->parallel.dev, NULL, NULL, 0, 1 << 16};
    m.events = (cudaEvent_t *)checked_malloc(sizeof(cudaEvent_t) * (size_t)(m.most + 1));
    m.parts = (Part *)checked_malloc(sizeof(Part) * (size_t)m.most);
    for (int64_t i = 0; i <= m.most; i++)
        cuda_check(cudaEventCreateWithFlags(&m.events[i], cudaEventDefault), "making an event");
    int64_t before = calls_of(&trainer->parallel.dev);
    StepStats s;
    trainer->parallel.dev.poll = mark_op; // collectives use this otherwise; one rank has none
    trainer->parallel.dev.poll_arg = &m;
    cuda_check(cudaEventRecord(m.events[0], trainer->parallel.dev.on.stream), "recording an event");
    double took = timed_step(trainer, step, &s), parts[PARTS] = ZERO, sum = 0;
    trainer->parallel.dev.poll = NULL;
    if (m.count != calls_of(&trainer->parallel.dev) - before)
        run_failure("bench_gpu.cu: %" PRId64 " ops were marked, %" PRId64 " ran", m.count,
                    calls_of(&trainer->parallel.dev) - before);
    for (int64_t i = 0; i < m.count; i++) {
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, m.events[i], m.events[i + 1]), "asking for a time");
        parts[m.parts[i]] += ms;
    }
    printf("{\"parts\":{");
    for (int p = 0; p < PARTS; p++) {
        printf("%s\"%s\":%.6g", p ? "," : "", part_names[p], parts[p]);
        sum += parts[p];
    }
    printf("},\"sum\":%.6g,\"step\":%.6g}\n", sum, 1e3 * took);
    for (int64_t i = 0; i <= m.most; i++) cudaEventDestroy(m.events[i]);
    free(m.events);
    free(m.parts);
}

/* `attention wgmma` or `attention mma`: chooses attention's kernels. */
static void answer_attention(Device *dev, const char *line) {
    dev->on.hopper_attention = strstr(line, "wgmma") && dev->on.encode_tensor_map;
    printf("{\"attention\":\"%s\"}\n", dev->on.hopper_attention ? "wgmma" : "mma");
    fflush(stdout);
}

static void train_answers(int argc, char **argv) {
    char path[] = "/tmp/llama3-bench-XXXXXX", line[256], *arguments[64];
    int fd = mkstemp(path), count = 0;
    if (fd < 0 || argc > 50) user_error("bench_gpu train: no place under /tmp, or too many options");
    close(fd);
    const char *more[] = {"--data", path, "--steps", "100000", "--warmup", "0"};
    arguments[count++] = argv[0];
    for (int i = 2; i < argc; i++) arguments[count++] = argv[i];
    for (const char *word : more) arguments[count++] = (char *)word;
    Job *j = new_array(Job, 1);
    job_take_options(j, options_parse(count, arguments));
    j->purpose = training();
    Llama3Config c = config_load(j->run.model);
    int64_t T = j->run.seq ? j->run.seq : c.T,
            samples = max_i64(64, 4 * (int64_t)(j->run.batch ? j->run.batch : c.B) * j->run.accum);
    write_tokens(path, j->run.vocab_size ? j->run.vocab_size : c.V, samples * T + 1);
    j->transport = j->host_transport = &transport_threads;
    job_prepare(j, 1, 1, 1);
    pthread_mutex_init(&j->thread_world.lock, NULL);
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer);
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    dry_run_open(dry_run, j, 0, NULL);
    check_memory(j, &dry_run->parallel.comm);
    double free_before = device_memory(0), planned = (double)device_need(&dry_run->parallel.dev), rate = 0,
           flops = device_flops(&dry_run->parallel.dev, 0);
    trainer_open(trainer, dry_run, j, 0, NULL);
    unlink(path);
    printf("{\"tokens\":%" PRId64 ",\"planned\":%.0f,\"opened\":%.0f,\"flops\":%.6g}\n",
           T * j->run.batch * j->run.accum, planned, free_before - device_memory(0), flops);
    fflush(stdout);
    int64_t step = 0;
    int wanted;
    while (fgets(line, sizeof line, stdin) && strcmp(line, "quit\n")) {
        StepStats s = ZERO;
        if (sscanf(line, "steps %d", &wanted) == 1 && wanted > 0) {
            printf("{\"ms\":[");
            for (int i = 0; i < wanted; i++) {
                printf("%s%.6g", i ? "," : "", 1e3 * timed_step(trainer, ++step, &s));
                if (step == 1) {
                    rate = matmul_rate(&trainer->parallel.dev);
                    check_first_step(trainer); // traffic and memory as planned
                }
            }
            printf("],\"loss\":%.9g,\"norm\":%.9g,\"matmul_rate\":%.6g}\n", s.loss, s.grad_norm, rate);
        } else if (!strncmp(line, "attention ", 10)) {
            answer_attention(&trainer->parallel.dev, line);
        } else if (!strcmp(line, "parts\n") && step) {
            answer_parts(trainer, ++step);
        } else if (!strcmp(line,
                           "memory\n")) { // what is taken beyond the arenas is the libraries' and the kernels' own
            printf("{\"planned\":%.0f,\"taken\":%.0f}\n", planned, free_before - device_memory(0));
        } else {
            user_error("bench_gpu train: not one of its lines, or parts before a step: %s", line);
        }
        fflush(stdout);
    }
    trainer_close(trainer);
    trainer_close(dry_run);
    job_close(j);
}
#endif
