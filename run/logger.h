/* logger.h: what a run says while it runs. The progress line, under --out metrics.jsonl and layout.json, and the
 * timeline (--trace).
 *
 * Owns: the files it writes. Only rank 0 has a logger that writes. Lines of an earlier run are never written over.
 */
#ifndef LOGGER_H
#define LOGGER_H
#include "json.h"
#include "../dataloader.h"
#include "checkpoint.h" // defines: write_all, comm_barrier

typedef struct { // of one rank and step, or of all its steps
    double seconds,
        wait_seconds; // to the step report, which comes before the optimizer; of these, waiting for other ranks
    int64_t tokens;
    int64_t memory; // peak bytes of all arenas in memory
} RankFigures;

typedef struct Logger {
    const char *out;          // NULL: no files
    FILE *metrics, *consumed; // consumed: samples.jsonl
    double last_line;         // when the last progress line was printed
    int64_t samples, steps;   // so far
    RankFigures *ranks;       // (world) sums over the steps so far
    int world;
} Logger;

static double computing(const RankFigures *r) { return fmax(0, r->seconds - r->wait_seconds); }

static int slowest_rank(const RankFigures *ranks, int world, double *over_mean) {
    int slowest = 0;
    double sum = 0;
    for (int i = 0; i < world; i++) {
        sum += computing(&ranks[i]);
        if (computing(&ranks[i]) > computing(&ranks[slowest])) slowest = i;
    }
    *over_mean = sum > 0 ? computing(&ranks[slowest]) * world / sum : 1;
    return slowest;
}

static FILE *logger_file(const char *out, const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", out, name);
    FILE *f = fopen(path, mode);
    if (!f) user_error("cannot write %s: %s", path, strerror(errno));
    return f;
}
static FILE *logger_create(const char *out, const char *name) { return logger_file(out, name, "w"); }

/* `at`: where the run goes on; what it wrote before stands in the files already. */
static void logger_open(Logger *l, const char *out, int world, const Progress *at) {
    memset(l, 0, sizeof *l);
    l->out = out;
    l->world = world;
    l->samples = at->samples;
    l->ranks = (RankFigures *)checked_malloc(sizeof(RankFigures) * (size_t)world);
    if (!out) return;
    l->metrics = logger_file(out, "metrics.jsonl", "a");
    l->consumed = logger_file(out, "samples.jsonl", "a");
    sync_directory(out); // no checkpoint's name lasts without theirs
}

/* What the next lines of samples.jsonl are about, unless earlier ones said so. `consumed_before`: of the epoch in which
 * they begin. */
static void logger_data(Logger *l, const Dataset *data, const char *tail, int64_t consumed_before, int data_changed) {
    if (!l->consumed || (ftell(l->consumed) > 0 && !data_changed)) return;
    fprintf(l->consumed,
            "{\"data\":\"%016" PRIx64 "\",\"windows\":%" PRId64 ",\"tail\":\"%s\",\"consumed_before\":%" PRId64 "}\n",
            data->fingerprint, data->windows, tail, consumed_before);
}

/* The samples of a step, (world, count); of ranks that share them, one is heard. */
static void logger_samples(Logger *l, int64_t step, int64_t epoch, const int64_t *samples, int64_t count,
                           const Mesh *mesh) {
    const char *comma = "";
    if (!l->consumed) return;
    fprintf(l->consumed, "{\"step\":%" PRId64 ",\"epoch\":%" PRId64 ",\"samples\":[", step, epoch);
    for (int rank = 0; rank < mesh->world; rank++)
        for (int64_t i = 0; i < count && mesh_tells_samples(mesh, rank); i++, comma = ",")
            fprintf(l->consumed, "%s%" PRId64, comma, samples[rank * count + i]);
    fprintf(l->consumed, "]}\n");
    fflush(l->consumed);
}

/* A checkpoint must not know of steps that its run's files do not tell. */
static void logger_sync(Logger *l) {
    if (l->out &&
        (fflush(l->metrics) || fflush(l->consumed) || fsync(fileno(l->metrics)) || fsync(fileno(l->consumed))))
        user_error("cannot write metrics.jsonl and samples.jsonl under %s: %s", l->out, strerror(errno));
}

/* What each rank did, least, mean and most, and which was slowest: the one that the others waited for. */
static void logger_ranks(const Logger *l) {
    enum { SHOWN = 64 };
    double over_mean, low[4] = ZERO, mean[4] = ZERO, high[4] = ZERO;
    int slowest = slowest_rank(l->ranks, l->world, &over_mean);
    printf("ranks, over %" PRId64 " step%s %10s %14s %14s %14s\n", l->steps, l->steps == 1 ? "" : "s", "tokens/s",
           "computing s", "waiting s", "memory MB");
    for (int i = 0; i < l->world; i++) {
        const RankFigures *r = &l->ranks[i];
        double of[4] = {(double)r->tokens / r->seconds, computing(r), r->wait_seconds, (double)r->memory / 1e6};
        for (int k = 0; k < 4; k++)
            low[k] = i ? fmin(low[k], of[k]) : of[k], high[k] = i ? fmax(high[k], of[k]) : of[k],
            mean[k] += of[k] / l->world;
        if (i < SHOWN) printf("  rank %-12d %12.0f %14.3f %14.3f %14.1f\n", i, of[0], of[1], of[2], of[3]);
    }
    if (l->world > SHOWN)
        printf("  and %d more; with --out metrics.jsonl has all of them for the last step\n", l->world - SHOWN);
    printf("  %-17s %12.0f %14.3f %14.3f %14.1f\n", "least", low[0], low[1], low[2], low[3]);
    printf("  %-17s %12.0f %14.3f %14.3f %14.1f\n", "mean", mean[0], mean[1], mean[2], mean[3]);
    printf("  %-17s %12.0f %14.3f %14.3f %14.1f\n", "most", high[0], high[1], high[2], high[3]);
    printf("  slowest: rank %d, computing %.1f %% longer than the mean\n", slowest, 100 * (over_mean - 1));
}

static void logger_close(Logger *l) {
    if (l->world > 1 && l->steps) logger_ranks(l);
    free(l->ranks);
    if (l->out && (fclose(l->metrics) || fclose(l->consumed)))
        user_error("cannot write metrics.jsonl and samples.jsonl under %s: %s", l->out, strerror(errno));
}

typedef struct { // one training step
    double loss, grad_norm, lr;
    double seconds, wait_seconds; // of this rank; in which it waited for other ranks
    double data_wait_seconds;     // in which it waited for its samples
    double exchange_seconds,
        overlap;              // in which an exchange was in flight; the part of them that arithmetic hid (0 to 1)
    double mfu;               // FLOP/s over those of bare products; 0: not known yet
    int skipped;              // the weights stay as they are: loss or gradient is not finite
    int64_t targets, samples; // of all ranks
} StepStats;

/* "name": value, as JSON has it: no infinity, no NaN. */
static void json_real(FILE *f, const char *name, double value) {
    if (isfinite(value)) fprintf(f, ",\"%s\":%.9g", name, value);
    else fprintf(f, ",\"%s\":null", name);
}

/* Each rank's figures, as arrays in rank order. */
static void ranks_json(FILE *f, const RankFigures *ranks, int world) {
    static const char *const names[] = {"tokens_per_s", "compute_s", "wait_s", "memory"};
    for (int k = 0; k < 4; k++) {
        fprintf(f, "%s\"%s\":[", k ? "," : ",\"ranks\":{", names[k]);
        for (int i = 0; i < world; i++) {
            const RankFigures *r = &ranks[i];
            if (i) fputc(',', f);
            if (k == 3) fprintf(f, "%" PRId64, r->memory);
            else
                fprintf(f, k ? "%.6f" : "%.1f",
                        k == 0   ? (double)r->tokens / r->seconds
                        : k == 1 ? computing(r)
                                 : r->wait_seconds);
        }
        fprintf(f, "]");
    }
    fprintf(f, "}");
}

/* `ranks`: what each rank told of this step. */
static void logger_step(Logger *l, int64_t step, int64_t steps, const StepStats *s, const RankFigures *ranks, int T,
                        const Device *dev, const Comm *comm) {
    double rate = (double)(s->samples * T) / s->seconds, over_mean; // tokens/s
    int slowest = slowest_rank(ranks, l->world, &over_mean);
    RankFigures least = ranks[0], most = ranks[0];
    l->samples += s->samples;
    l->steps++;
    for (int i = 0; i < l->world; i++) {
        RankFigures *sum = &l->ranks[i];
        least.seconds = fmin(least.seconds, ranks[i].seconds), most.seconds = fmax(most.seconds, ranks[i].seconds);
        least.memory = min_i64(least.memory, ranks[i].memory), most.memory = max_i64(most.memory, ranks[i].memory);
        sum->seconds += ranks[i].seconds, sum->wait_seconds += ranks[i].wait_seconds, sum->tokens += ranks[i].tokens;
        sum->memory = max_i64(sum->memory, ranks[i].memory);
    }
    if (l->metrics) {
        fprintf(l->metrics, "{\"step\":%" PRId64, step);
        json_real(l->metrics, "loss", s->loss);
        json_real(l->metrics, "grad_norm", s->grad_norm);
        if (s->skipped) fprintf(l->metrics, ",\"skipped\":true");
        fprintf(l->metrics,
                ",\"lr\":%.9g,\"tokens\":%" PRId64 ",\"samples\":%" PRId64
                ",\"seconds\":%.6f,\"tokens_per_s\":%.1f,\"mfu\":%.4f,\"wait_s\":%.6f,\"data_wait_s\":%.6f,\"exchange_"
                "s\":%.6f,\"overlap\":%.4f,\"memory\":{",
                s->lr, l->samples * T, l->samples, s->seconds, rate, s->mfu, s->wait_seconds, s->data_wait_seconds,
                s->exchange_seconds, s->overlap);
        for (int c = 0; c < MEM_CATEGORIES; c++)
            fprintf(l->metrics, "%s\"%s\":%zu", c ? "," : "", mem_category_names[c], dev->arenas[c].peak);
        static const Axis shown[] = {AXIS_FSDP, AXIS_DP_REPLICATE, AXIS_TP, AXIS_CP, AXIS_PP};
        fprintf(l->metrics, "},\"bytes\":{");
        for (int i = 0; i < 5; i++) {
            int64_t bytes = 0;
            for (int o = 0; o < COLLECTIVES; o++)
                bytes += o == SEND ? 0 : comm->wire[shown[i]][o].bytes; // what comes from others
            fprintf(l->metrics, "%s\"%s\":%" PRId64, i ? "," : "", axis_names[shown[i]], bytes);
        }
        fprintf(l->metrics,
                "},\"rank_min_max\":{\"seconds\":[%.6f,%.6f],\"memory\":[%" PRId64 ",%" PRId64 "]},\"slowest_rank\":%d",
                least.seconds, most.seconds, least.memory, most.memory, slowest);
        if (l->world <= 64 || step == steps) ranks_json(l->metrics, ranks, l->world);
        fprintf(l->metrics, "}\n");
        fflush(l->metrics);
    }
    if (step > 1 && step < steps && seconds_now() - l->last_line < 2) return; // at most a line every two seconds
    l->last_line = seconds_now();
    flockfile(stdout); // a whole line, whatever other ranks have to say
    printf("step %6" PRId64 "/%" PRId64 " | loss %7.4f | norm %8.4f | lr %.2e | %7.3f s | %8.0f tokens/s", step, steps,
           s->loss, s->grad_norm, s->lr, s->seconds, rate);
    if (s->mfu > 0) printf(" | %3.0f %% of the product rate", 100 * s->mfu);
    printf(" | waiting %2.0f %%", 100 * s->wait_seconds / s->seconds);
    if (s->exchange_seconds > 0) printf(", %2.0f %% of exchange hidden", 100 * s->overlap);
    if (over_mean > 1.1) printf(" | rank %d computes %.0f %% longer than the mean", slowest, 100 * (over_mean - 1));
    for (int c = 0, shown = 0; c < MEM_CATEGORIES && l->steps == 1; c++) // it stays as it is
        if (dev->arenas[c].peak)
            printf("%s%s %.1f", shown++ ? ", " : " | MB of a rank: ", mem_category_names[c],
                   (double)dev->arenas[c].peak / 1e6);
    printf("\n");
    fflush(stdout);
    funlockfile(stdout);
}

static void logger_validation(Logger *l, int64_t step, double loss, int64_t targets) {
    if (l->metrics) {
        fprintf(l->metrics, "{\"step\":%" PRId64 ",\"val_loss\":%.9g,\"val_tokens\":%" PRId64 "}\n", step, loss,
                targets);
        fflush(l->metrics);
    }
    printf("step %6" PRId64 " | validation loss %.4f (perplexity %.2f) on %" PRId64 " tokens\n", step, loss, exp(loss),
           targets);
    fflush(stdout);
}

/* What this rank's samples cost, once its loader is closed: of the reading, what steps waited for is what arithmetic
 * did not hide. */
static void logger_loader(const Loader *l) {
    if (!l->consumed) return;
    printf("loader: %d worker%s, first batch after %.2f ms", l->num_workers, l->num_workers > 1 ? "s" : "",
           1e3 * l->first_batch_seconds);
    if (l->consumed > 1)
        printf(", then %.3f ms a step waiting", 1e3 * l->later_wait_seconds / (double)(l->consumed - 1));
    printf(", %.3f ms a step reading\n", 1e3 * l->read_seconds * (double)l->samples / (double)l->claimed);
    fflush(stdout);
}

/* Which ranks share a group, read back from the transport: (world, AXES) the first member's world rank.
 * All ranks call it; the exchange is one of start-up. */
static int *layout_read_back(Comm *comm) {
    int mine[AXES], *all = (int *)checked_malloc(sizeof(int) * AXES * (size_t)comm->mesh.world);
    for (int a = 0; a < AXES; a++) mine[a] = comm->hosts->group_member(comm, &comm->groups[a], 0);
    all_gather_now(comm, AXIS_WORLD, "layout", mine, all, sizeof mine);
    return all;
}

/* For each rank a number that is its host's alone. All ranks call it. */
static int *hosts_read_back(Comm *comm) {
    int mine = (int)(hash_bytes(HASH_START, comm->board->host, strlen(comm->board->host)) >> 33),
        *all = (int *)checked_malloc(sizeof(int) * (size_t)comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, "hosts", &mine, all, sizeof mine);
    return all;
}

/* Groups of an axis that span hosts: what they exchange crosses the network. */
static int groups_across_hosts(const Mesh *m, const int *colours, int axis, const int *hosts) {
    int across = 0;
    for (int first = 0; first < m->world; first++)
        for (int r = first + 1, same = 1; r < m->world && colours[first * AXES + axis] == first && same; r++) {
            same = colours[r * AXES + axis] != first || hosts[r] == hosts[first];
            across += !same;
        }
    return across;
}

/* "fsdp 0-3, 4-7": the members of every group with more than one, as they were read back. */
static void layout_print(const Mesh *m, const int *colours, const int *hosts, FILE *f) {
    enum { SHOWN = 32 };
    int several = 0, beside = 0; // hosts; ranks that are on the first one
    for (int r = 0; r < m->world; r++) several |= hosts[r] != hosts[0], beside += hosts[r] == hosts[0];
    for (int a = 0; a < AXES; a++) {
        int size = mesh_group_size(m, (Axis)a), groups = 0;
        if (size == 1 || a == AXIS_WORLD) continue;
        fprintf(f, "%s: %d group%s of %d:", axis_names[a], m->world / size, m->world > size ? "s" : "", size);
        char *listed = (char *)checked_malloc((size_t)m->world);
        for (int first = 0; first < m->world && groups < SHOWN; first++) {
            int members = 0, last = first, step = 0, even = 1;
            if (listed[first]) continue;
            for (int r = first; r < m->world; r++) {
                if (colours[r * AXES + a] != colours[first * AXES + a]) continue;
                if (members == 1) step = r - first;
                even &= members < 2 || r - last == step;
                last = r, listed[r] = 1, members++;
            }
            fprintf(f, groups++ ? ", " : " ");
            if (even && (members > 2 || step == 1)) fprintf(f, step > 1 ? "%d-%d by %d" : "%d-%d", first, last, step);
            else
                for (int r = first; r < m->world; r++)
                    if (colours[r * AXES + a] == colours[first * AXES + a]) fprintf(f, r > first ? "+%d" : "%d", r);
            if (members != size) fprintf(f, " (%d members)", members);
        }
        free(listed);
        if (groups < m->world / size) fprintf(f, " … (all of them in layout.json)");
        int across = several ? groups_across_hosts(m, colours, a, hosts) : 0;
        if (across)
            fprintf(f, "; %d of them across hosts%s", across,
                    a == AXIS_FSDP && beside % size == 0
                        ? ", where each would fit within one: start ranks host after host (mpirun --map-by slot)"
                        : "");
        else if (several) fprintf(f, "; each within a host");
        fprintf(f, "\n");
    }
}

static void layout_write(const char *out, const Mesh *mesh, const int *colours) {
    FILE *f = logger_create(out, "layout.json");
    cJSON *root = cJSON_CreateObject();
    json_add_mesh(root, mesh);
    json_add_groups(root, mesh, colours);
    json_write_line(f, root);
    if (fclose(f)) user_error("cannot write layout.json under %s: %s", out, strerror(errno));
}

#endif
