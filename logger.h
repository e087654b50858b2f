/* logger.h: what a run says while it runs. The progress line, and under --out metrics.jsonl and layout.json.
 *
 * Owns: the files it writes. Only rank 0 has a logger that writes. A file of an earlier run is never written over.
 */
#ifndef LOGGER_H
#define LOGGER_H
#include "plan.h"
#include "dataloader.h"

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
    double seconds, wait_seconds;    // of this rank; in which it waited for other ranks
    double data_wait_seconds;        // in which it waited for its samples
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
                            ",\"seconds\":%.6f,\"tokens_per_s\":%.1f,\"mfu\":%.4f,\"wait_s\":%.6f,\"data_wait_s\":%.6f,\"exchange_s\":%.6f,\"overlap\":%.4f,\"memory\":{",
                step, s->loss, s->grad_norm, s->lr, l->samples * T, l->samples, s->seconds, rate, s->mfu, s->wait_seconds, s->data_wait_seconds, s->exchange_seconds, s->overlap);
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

/* What this rank's samples cost, once its loader is closed: of the reading, what steps waited for is what arithmetic did not hide. */
static void logger_loader(const Loader *l) {
    printf("loader: %d worker%s, first batch after %.2f ms", l->num_workers, l->num_workers > 1 ? "s" : "", 1e3 * l->first_after);
    if (l->consumed > 1) printf(", then %.3f ms a step waiting", 1e3 * l->later_wait_seconds / (double)(l->consumed - 1));
    printf(", %.3f ms a step reading\n", 1e3 * l->read_seconds * (double)l->samples / (double)l->claimed);
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

#endif
