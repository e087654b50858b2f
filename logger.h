/* logger.h: what a run says while it runs. The progress line, under --out metrics.jsonl and layout.json, and the
 * timeline (--trace).
 *
 * Owns: the files it writes. Only rank 0 has a logger that writes. A file of an earlier run is never written over.
 */
#ifndef LOGGER_H
#define LOGGER_H
#include "plan.h"
#include "checkpoint.h" // defines: write_all, export_agree

typedef struct Logger {
    const char *out;        // NULL: no files
    FILE *metrics;
    double last_line;       // when the last progress line was printed
    int64_t samples;        // so far
} Logger;

static FILE *logger_create(const char *out, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", out, name);
    FILE *f = fopen(path, "w");
    if (!f) user_error("cannot write %s: %s", path, strerror(errno));
    return f;
}

/* Makes every folder of `path`, as mkdir -p does. 0 or errno. */
static int make_directories(const char *path) {
    char part[4096];
    for (size_t i = 1; i <= strlen(path) && i < sizeof part; i++) {
        if (path[i] != '/' && path[i]) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) && errno != EEXIST) return errno;
    }
    struct stat info;
    if (stat(path, &info)) return errno;
    return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
}

static void logger_check_out(const char *out) {
    char path[4096];
    int failed = make_directories(out);
    if (failed) user_error("cannot make --out %s: %s", out, strerror(failed));
    static const char *const names[] = {"metrics.jsonl", "config.txt", "layout.json", "plan.json", "ledger.json"};
    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/%s", out, names[i]);
        if (!access(path, F_OK)) user_error("--out %s already holds a run (%s): choose another directory, or remove that one", out, names[i]);
    }
    if (access(out, W_OK)) user_error("cannot write into --out %s: %s", out, strerror(errno));
}

static void logger_open(Logger *l, const char *out) {
    memset(l, 0, sizeof *l);
    l->out = out;
    if (out) l->metrics = logger_create(out, "metrics.jsonl");
}

static void logger_close(Logger *l) {
    if (l->metrics && fclose(l->metrics)) user_error("cannot write metrics.jsonl under %s: %s", l->out, strerror(errno));
}

typedef struct {                     // one training step
    double loss, grad_norm, lr;
    double seconds, wait_seconds;    // of this rank
    double exchange_seconds, overlap; // in which an exchange was in flight; the part of them that arithmetic hid (0 to 1)
    double mfu;                      // FLOP/s over those of bare products; 0: not known yet
    int64_t targets, samples;        // of all ranks
    double seconds_min, seconds_max; // over ranks
    int64_t memory_min, memory_max;
} StepStats;

static void logger_step(Logger *l, int64_t step, int64_t steps, const StepStats *s, int T, const Device *dev, const Comm *comm) {
    double rate = (double)(s->samples * T) / s->seconds; // tokens/s
    l->samples += s->samples;
    if (l->metrics) {
        fprintf(l->metrics, "{\"step\":%" PRId64 ",\"loss\":%.9g,\"grad_norm\":%.9g,\"lr\":%.9g,\"tokens\":%" PRId64 ",\"samples\":%" PRId64
                            ",\"seconds\":%.6f,\"tokens_per_s\":%.1f,\"mfu\":%.4f,\"wait_s\":%.6f,\"exchange_s\":%.6f,\"overlap\":%.4f,\"memory\":{",
                step, s->loss, s->grad_norm, s->lr, l->samples * T, l->samples, s->seconds, rate, s->mfu, s->wait_seconds, s->exchange_seconds, s->overlap);
        for (int c = 0; c < MEM_CATEGORIES; c++) fprintf(l->metrics, "%s\"%s\":%zu", c ? "," : "", mem_category_names[c], dev->arenas[c].peak);
        static const Axis shown[] = {AXIS_FSDP, AXIS_DP_REPLICATE, AXIS_TP, AXIS_CP, AXIS_PP};
        fprintf(l->metrics, "},\"bytes\":{");
        for (int i = 0; i < 5; i++) {
            int64_t bytes = 0;
            for (int o = 0; o < COLLECTIVES; o++) bytes += comm->wire[shown[i]][o].bytes;
            fprintf(l->metrics, "%s\"%s\":%" PRId64, i ? "," : "", axis_names[shown[i]], bytes);
        }
        fprintf(l->metrics, "},\"rank_min_max\":{\"seconds\":[%.6f,%.6f],\"memory\":[%" PRId64 ",%" PRId64 "]}}\n", s->seconds_min, s->seconds_max, s->memory_min, s->memory_max);
        fflush(l->metrics);
    }
    if (step > 1 && step < steps && seconds_now() - l->last_line < 2) return; // at most a line every two seconds
    l->last_line = seconds_now();
    printf("step %6" PRId64 "/%" PRId64 " | loss %7.4f | norm %8.4f | lr %.2e | %7.3f s | %8.0f tokens/s", step, steps, s->loss, s->grad_norm, s->lr, s->seconds, rate);
    if (s->mfu > 0) printf(" | %3.0f %% of the product rate", 100 * s->mfu);
    printf(" | waiting %2.0f %%", 100 * s->wait_seconds / s->seconds);
    if (s->exchange_seconds > 0) printf(", %2.0f %% of exchange hidden", 100 * s->overlap);
    printf("\n");
    fflush(stdout);
}

static void logger_validation(Logger *l, int64_t step, double loss, int64_t targets) {
    if (l->metrics) {
        fprintf(l->metrics, "{\"step\":%" PRId64 ",\"val_loss\":%.9g,\"val_tokens\":%" PRId64 "}\n", step, loss, targets);
        fflush(l->metrics);
    }
    printf("step %6" PRId64 " | validation loss %.4f (perplexity %.2f) on %" PRId64 " tokens\n", step, loss, exp(loss), targets);
    fflush(stdout);
}

/* Which ranks share a group, read back from the transport: (world, AXES) the first member's world rank.
 * All ranks call it; the exchange is one of start-up. */
static int *layout_read_back(Comm *comm) {
    int mine[AXES], *all = (int *)checked_malloc(sizeof(int) * AXES * (size_t)comm->mesh.world);
    for (int a = 0; a < AXES; a++) mine[a] = comm->transport->group_member(comm, &comm->groups[a], 0);
    all_gather_now(comm, AXIS_WORLD, "layout", mine, all, sizeof mine);
    return all;
}

static void layout_write(const char *out, const Mesh *mesh, const int *colours) {
    FILE *f = logger_create(out, "layout.json");
    fprintf(f, "{");
    mesh_json(f, mesh);
    fprintf(f, ",");
    groups_json(f, mesh, colours);
    fprintf(f, "}\n");
    if (fclose(f)) user_error("cannot write layout.json under %s: %s", out, strerror(errno));
}

// ---------------------------------------------------------------------------
// the timeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open: a process is a rank, a thread a lane

/* A file that is there already, or cannot be made, is refused before the run. */
static void trace_check(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) user_error("--trace %s exists already: choose another name, or remove it first", path);
    if (fd < 0) user_error("cannot write --trace %s: %s", path, strerror(errno));
    close(fd);
    unlink(path);
}

static const char trace_head[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", trace_tail[] = "\n]}\n";

/* One rank's events. Times count from `zero`, by the clock that the events have; whole nanoseconds, so that what follows or
 * lies within does so in the file too. */
static void trace_events(FILE *f, const Device *dev, int rank, double zero, double clock_error) {
    static const char *const kinds[] = {"op", "wait", "phase", "step", "exchange"}, *const amounts[] = {"flops", NULL, NULL, "step", "bytes"};
    enum { LANES = 1 + AXES * (MAX_IN_FLIGHT + 1) };
    char named[LANES] = "";
    fprintf(f, "%s{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}", rank ? ",\n" : "", rank, rank);
    fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_labels\",\"args\":{\"labels\":\"clock within %.0f us of rank 0's\"}}", rank, 1e6 * clock_error);
    for (int64_t i = 0; i < min_i64(dev->num_events, dev->max_events); i++) {
        const Event *e = &dev->events[i];
        int row = e->lane ? (e->lane - 1) / AXES + 1 : 1;
        const char *lane = e->lane ? axis_names[(e->lane - 1) % AXES] : "compute";
        if (!named[e->lane]) {
            fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s", rank, e->lane, lane);
            fprintf(f, row > 1 ? " %d\"}}" : "\"}}", row);
        }
        named[e->lane] = 1;
        int64_t start = llround(1e9 * (e->start - zero)), took = llround(1e9 * (e->end - zero)) - start; // ns
        fprintf(f, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%" PRId64 ".%03d,\"dur\":%" PRId64 ".%03d,\"cat\":\"%s\",\"name\":\"%s%s%s\"", rank, e->lane,
                start / 1000, (int)(start % 1000), took / 1000, (int)(took % 1000), kinds[e->kind], e->name, e->of ? ": " : "", e->of ? e->of : "");
        if (amounts[e->kind]) fprintf(f, ",\"args\":{\"%s\":%.0f}", amounts[e->kind], e->amount);
        fprintf(f, "}");
    }
}

/* All ranks write into one file, each its part at its place. Their clocks are aligned now, by exchanges. */
static void trace_write(Comm *comm, const char *path) {
    typedef struct { double first; int64_t bytes; } Part; // when it begins, by rank 0's clock
    Device *dev = comm->dev;
    dev->max_events = min_i64(dev->max_events, dev->num_events); // it ends here: what follows is of the writing
    Part mine = ZERO, *all = (Part *)checked_malloc(sizeof mine * (size_t)comm->mesh.world);
    double error, offset = comm_clock_offset(comm, &error), zero = INFINITY;
    char *text, temporary[4096 + 16];
    size_t length;
    mine.first = dev->num_events ? dev->events[0].start - offset : INFINITY;
    all_gather_now(comm, AXIS_WORLD, "trace: first events", &mine, all, sizeof mine);
    for (int i = 0; i < comm->mesh.world; i++) zero = fmin(zero, all[i].first);
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    if (comm->rank == 0) fputs(trace_head, f);
    trace_events(f, dev, comm->rank, zero + offset, error);
    if (comm->rank == comm->mesh.world - 1) fputs(trace_tail, f);
    if (fclose(f)) run_failure("out of memory");
    mine.bytes = (int64_t)length;
    all_gather_now(comm, AXIS_WORLD, "trace: sizes", &mine, all, sizeof mine);
    int64_t at = 0;
    for (int i = 0; i < comm->rank; i++) at += all[i].bytes;
    snprintf(temporary, sizeof temporary, "%s.part", path);
    int fd = comm->rank == 0 ? open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    if (comm->rank == 0 && fd < 0) user_error("cannot write %s: %s", temporary, strerror(errno));
    export_agree(comm, "trace: file made");
    if (comm->rank) fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (fd < 0) user_error("rank %d cannot open %s (%s): --trace needs a directory that all hosts share", comm->rank, temporary, strerror(errno));
    write_all(fd, temporary, text, length, at);
    if (close(fd)) user_error("cannot write %s: %s", temporary, strerror(errno));
    export_agree(comm, "trace: parts written");
    if (comm->rank == 0 && rename(temporary, path)) user_error("cannot rename %s: %s", temporary, strerror(errno));
    export_agree(comm, "trace: done");
    free(text);
    free(all);
}

#endif
