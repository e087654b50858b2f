/* logger.h: what a run reports while it trains: progress lines, metrics.jsonl, samples.jsonl and run.html.
 *
 * Only rank 0 has an open logger; the other ranks' figures come with the step report. A caller may rely on: the files
 * are appended to, so that a resumed run continues them; logger_sync has everything on disk.
 */
#ifndef LOGGER_H
#define LOGGER_H
#include "../../dataloader.h"         // defines: Dataset, Loader
#include "../checkpoint/checkpoint.h" // defines: Progress
#include "../../lib/io/output.h"      // defines: out_file_open
#include "../../lib/io/json.h"        // defines: json_add_integer, json_real, json_write_line
#include "run_data.h"                 // defines: RankFigures, rank_summary, RunData, run_data_open, run_data_write

typedef struct {                    // of one training step
    double z_scores[OUTLIER_KINDS]; // of loss and grad_norm among the last steps; 0 without --outlier-window
    double loss, grad_norm, lr;
    double z_loss;                // mean of the targets; 0 without --z-loss
    double seconds;               // on this rank
    double wait_seconds;          // waiting for other ranks
    double data_wait_seconds;     // waiting for samples
    double communication_seconds; // with a collective or message in flight
    double overlap;               // fraction of communication_seconds during which this rank did not wait
    double matmul_share;          // FLOP/s relative to the measured rate of a large matmul; 0: not measured
    double mfu;                   // model FLOPs utilization; 0: fp32, adapters, or a GPU that mfu.h does not list
    int skipped;                  // loss or gradient was not finite or an outlier; the weights were not changed
    int64_t targets, samples;     // of all ranks
} StepStats;

typedef struct Logger {
    const RunSettings *run;
    const Comm *comm;
    const Progress *progress; // after the step that is being reported
    FILE *metrics, *consumed; // consumed: samples.jsonl; NULL without --out
    double last_line;         // time of the last progress line
    int64_t saved;            // the step of a checkpoint that the next line of metrics.jsonl will name; 0: none
    int resumed;              // the next line of metrics.jsonl will say that the run was resumed
    RunData page;             // run.html, with the sums over the steps so far
} Logger;

/* The files must be complete: a line that is lost, because the disk is full for a moment, could not be found again. */
__attribute__((noreturn)) static void logger_failed(const Logger *l) {
    user_error("cannot write metrics.jsonl and samples.jsonl under %s: %s", l->run->out, strerror(errno));
}

/* Writes a line to one of the files. */
static void logger_line(const Logger *l, FILE *f, cJSON *line) {
    json_write_line(f, line);
    if (fflush(f) || ferror(f)) logger_failed(l);
}

/* Opens the files of a run that has come as far as `at`. `resumed`: from a checkpoint; `saved`: the step of a
 * checkpoint that no line of metrics.jsonl has named yet; 0: none. */
static void logger_open(Logger *l, const Options *o, const RunSettings *run, const Comm *comm, const Device *planned,
                        const Progress *at, int resumed, int64_t saved) {
    memset(l, 0, sizeof *l);
    l->run = run;
    l->comm = comm;
    l->progress = at;
    l->resumed = resumed;
    l->saved = saved;
    run_data_open(&l->page, o, run, comm, planned, at->step);
    l->page.ranks = new_array(RankFigures, comm->mesh.world);
    if (!run->out) return;
    l->metrics = out_file_open(run->out, "metrics.jsonl", "a");
    l->consumed = out_file_open(run->out, "samples.jsonl", "a");
    sync_directory(run->out); // the files' names must be on disk before those of checkpoints
}

/* Describes the data of the following lines of samples.jsonl, and the sources of a mixture, unless a run with the same
 * data has done so. `consumed_before`: samples of the current epoch that were consumed before these lines. */
static void logger_data(Logger *l, const Dataset *data, int64_t consumed_before, int has_changed) {
    if (!l->consumed || (ftell(l->consumed) > 0 && !has_changed)) return;
    char fingerprint[20];
    snprintf(fingerprint, sizeof fingerprint, "%016" PRIx64, data->fingerprint);
    cJSON *line = cJSON_CreateObject();
    cJSON_AddStringToObject(line, "data", fingerprint);
    json_add_integer(line, "windows", dataset_samples(data));
    json_add_integer(line, "seq", data->T);
    json_add_integer(line, "pieces", data->pieces);
    cJSON_AddStringToObject(line, "tail", l->run->tail == TAIL_PAD ? "pad" : "drop");
    json_add_integer(line, "consumed_before", consumed_before);
    cJSON *sources = data->mixture ? cJSON_AddArrayToObject(line, "sources") : NULL;
    for (int k = 0; sources && k < data->num_sources; k++) {
        cJSON *row = cJSON_CreateObject();
        json_add_name(row, "data", data->sources[k].pattern);
        json_add_integer(row, "windows", data->sources[k].windows * data->pieces);
        cJSON_AddItemToObject(row, "share", json_real("%.6f", source_share(data, k)));
        json_add_integer(row, "consumed_before", mixture_samples(data, k, consumed_before));
        json_add_integer(row, "used_before", data->sources[k].used * data->pieces);
        cJSON_AddItemToArray(sources, row);
    }
    logger_line(l, l->consumed, line);
}

/* Writes the samples (world, count) of a step. Of ranks that share samples, only one is listed. */
static void logger_samples(Logger *l, int64_t step, int64_t epoch, const int64_t *samples, int64_t count) {
    const Mesh *mesh = &l->comm->mesh;
    if (!l->consumed) return;
    cJSON *line = cJSON_CreateObject();
    json_add_integer(line, "step", step);
    json_add_integer(line, "epoch", epoch);
    cJSON *list = cJSON_AddArrayToObject(line, "samples");
    for (int rank = 0; rank < mesh->world; rank++)
        for (int64_t i = 0; i < count && mesh_counts_samples(mesh, rank); i++)
            cJSON_AddItemToArray(list, cJSON_CreateNumber((double)samples[rank * count + i]));
    logger_line(l, l->consumed, line);
}

/* Syncs the files to disk before the checkpoint of `step` is written, which must not be newer than they are. */
static void logger_sync(Logger *l, int64_t step) {
    l->saved = step;
    if (l->page.history) history_mark_save(l->page.history, step);
    if (l->metrics &&
        (fflush(l->metrics) || fflush(l->consumed) || fsync(fileno(l->metrics)) || fsync(fileno(l->consumed))))
        logger_failed(l);
}

// ---------------------------------------------------------------------------
// the table of ranks at the end of a run

static void print_table_row(const char *name, const double row[RANK_COLUMNS]) {
    printf("  %-17s %12.0f %14.3f %14.3f %14.1f\n", name, row[RANK_RATE], row[RANK_COMPUTE], row[RANK_WAIT],
           row[RANK_MEMORY] / 1e6);
}

/* Prints what each rank did over all steps, and the slowest rank, which the others waited for. */
static void logger_ranks(const Logger *l) {
    enum { SHOWN = 64 };
    int world = l->comm->mesh.world;
    RankSummary all = rank_summary(l->page.ranks, world);
    printf("ranks, over %" PRId64 " step%s %10s %14s %14s %14s\n", l->page.steps, l->page.steps == 1 ? "" : "s",
           "tokens/s", "computing s", "waiting s", "memory MB");
    for (int i = 0; i < world && i < SHOWN; i++) {
        char name[96];
        double row[RANK_COLUMNS];
        int used = snprintf(name, sizeof name, "rank %d", i);
        if (run_hosts.count > 1) snprintf(name + used, sizeof name - (size_t)used, " on %s", host_of_rank(i)->name);
        rank_row(&l->page.ranks[i], row);
        print_table_row(name, row);
    }
    if (world > SHOWN)
        printf("  … and %d more ranks; with --out, metrics.jsonl lists all of them for the last step\n", world - SHOWN);
    print_table_row("least", all.least);
    print_table_row("mean", all.mean);
    print_table_row("most", all.most);
    printf("  slowest: %s, which computed %.1f %% longer than the mean\n", rank_name(all.slowest),
           100 * (all.lead - 1));
}

/* `run_ends`: this was the last period. */
static void logger_close(Logger *l, int run_ends) {
    if (l->comm->mesh.world > 1 && l->page.steps) logger_ranks(l);
    l->page.has_ended = run_ends;
    run_data_write(&l->page);
    if (l->metrics && (fclose(l->metrics) || fclose(l->consumed))) logger_failed(l);
}

/* Once the commands of --after-save have ended, run.html shows the output of the last one, too. */
static void logger_free(Logger *l) {
    if (l->page.has_ended && l->run->after_save) run_data_write(&l->page);
    free(l->page.history);
    free(l->page.ranks);
}

// ---------------------------------------------------------------------------
// one step

/* Adds "rank_min_max":{"seconds":[least,most],"memory":[least,most]}, the slowest rank, and, if `lists_all`, every
 * rank's figures of this step, as arrays in the order of ranks. */
static void json_add_ranks(cJSON *line, const RankFigures *ranks, int world, const RankSummary *all, int lists_all) {
    static const int columns[] = {RANK_SECONDS, RANK_MEMORY};
    cJSON *ranges = cJSON_AddObjectToObject(line, "rank_min_max");
    for (int i = 0; i < 2; i++) {
        int k = columns[i];
        cJSON *range = cJSON_AddArrayToObject(ranges, rank_columns[k].name);
        cJSON_AddItemToArray(range, json_real(rank_columns[k].format, all->least[k]));
        cJSON_AddItemToArray(range, json_real(rank_columns[k].format, all->most[k]));
    }
    json_add_integer(line, "slowest_rank", all->slowest);
    cJSON *lists = lists_all ? cJSON_AddObjectToObject(line, "ranks") : NULL;
    for (int k = 0; lists && k < RANK_SECONDS; k++) {
        cJSON *list = cJSON_AddArrayToObject(lists, rank_columns[k].name);
        for (int i = 0; i < world; i++) {
            double row[RANK_COLUMNS];
            rank_row(&ranks[i], row);
            cJSON_AddItemToArray(list, json_real(rank_columns[k].format, row[k]));
        }
    }
}

/* Memory by category, and by axis the bytes that this rank received in this step and how long it waited. */
static void json_add_device(cJSON *line, const Comm *comm) {
    static const Axis axes[] = {AXIS_FSDP, AXIS_DP_REPLICATE, AXIS_TP, AXIS_CP, AXIS_PP};
    cJSON *memory = cJSON_AddObjectToObject(line, "memory");
    for (int c = 0; c < MEM_CATEGORIES; c++)
        json_add_integer(memory, mem_category_names[c], (int64_t)comm->dev->arenas[c].peak);
    cJSON *traffic = cJSON_AddObjectToObject(line, "bytes"), *waits = cJSON_AddObjectToObject(line, "wait_axis_s");
    for (int i = 0; i < (int)(sizeof axes / sizeof *axes); i++) {
        int64_t received = 0;
        for (int op = 0; op < COLLECTIVES; op++)
            if (op != SEND) received += comm->traffic_measured[axes[i]][op].bytes;
        json_add_integer(traffic, axis_names[axes[i]], received);
        cJSON_AddItemToObject(waits, axis_names[axes[i]], json_real("%.6f", comm->wait_seconds[axes[i]]));
    }
    cJSON_AddItemToObject(waits, axis_names[AXIS_WORLD], json_real("%.6f", comm->wait_seconds[AXIS_WORLD]));
}

static void logger_metrics(Logger *l, int64_t step, const StepStats *s, const RankFigures *ranks,
                           const RankSummary *all) {
    const RunSettings *run = l->run;
    const Progress *progress = l->progress;
    const Dataset *data = progress->data;
    int world = l->comm->mesh.world;
    cJSON *line = cJSON_CreateObject();
    json_add_integer(line, "step", step);
    cJSON_AddItemToObject(line, "loss", json_real("%.9g", s->targets ? s->loss : NAN)); // null without a target
    cJSON_AddItemToObject(line, "grad_norm", json_real("%.9g", s->grad_norm));
    if (run->z_loss > 0) cJSON_AddItemToObject(line, "z_loss", json_real("%.9g", s->z_loss));
    if (s->skipped) cJSON_AddTrueToObject(line, "skipped");
    if (l->resumed) cJSON_AddTrueToObject(line, "resumed");
    if (l->saved) json_add_integer(line, "saved", l->saved);
    l->resumed = 0;
    l->saved = 0;
    cJSON_AddItemToObject(line, "lr", json_real("%.9g", s->lr));
    json_add_integer(line, "tokens", progress->tokens);
    json_add_integer(line, "samples", progress->samples);
    // "source_epochs" says how often the run has gone through each source of a mixture, in the order of --data.
    cJSON *epochs = data && data->mixture ? cJSON_AddArrayToObject(line, "source_epochs") : NULL;
    for (int k = 0; epochs && k < data->num_sources; k++) {
        int64_t windows = source_windows_used(data, k, progress->samples_in_epoch / data->pieces);
        cJSON_AddItemToArray(epochs, json_real("%.6f", (double)windows / (double)data->sources[k].windows));
    }
    cJSON_AddItemToObject(line, "seconds", json_real("%.6f", s->seconds));
    cJSON_AddItemToObject(line, "tokens_per_s", json_real("%.1f", (double)(s->samples * run->seq) / s->seconds));
    // A share of a rate that is not known is null.
    cJSON_AddItemToObject(line, "matmul_share", json_real("%.4f", s->matmul_share > 0 ? s->matmul_share : NAN));
    cJSON_AddItemToObject(line, "mfu", json_real("%.4f", s->mfu > 0 ? s->mfu : NAN));
    cJSON_AddItemToObject(line, "wait_s", json_real("%.6f", s->wait_seconds));
    cJSON_AddItemToObject(line, "data_wait_s", json_real("%.6f", s->data_wait_seconds));
    cJSON_AddItemToObject(line, "communication_s", json_real("%.6f", s->communication_seconds));
    cJSON_AddItemToObject(line, "overlap", json_real("%.4f", s->overlap));
    json_add_device(line, l->comm);
    json_add_ranks(line, ranks, world, all, world <= 64 || step == run->steps);
    history_add_line(l->page.history, line, step);
    logger_line(l, l->metrics, line);
}

/* Records a step whose update is skipped because of an outlier. The step's own line follows. */
static void logger_outlier(const Logger *l, int64_t step, const StepStats *s, OutlierKind kind) {
    if (!l->metrics) return;
    cJSON *line = cJSON_CreateObject();
    json_add_integer(line, "step", step);
    cJSON_AddStringToObject(line, "outlier", outlier_keys[kind]);
    cJSON_AddItemToObject(line, "z", json_real("%.9g", s->z_scores[kind]));
    cJSON_AddItemToObject(line, "loss", json_real("%.9g", s->loss));
    cJSON_AddItemToObject(line, "grad_norm", json_real("%.9g", s->grad_norm));
    history_add_line(l->page.history, line, step);
    logger_line(l, l->metrics, line);
}

static void logger_progress(const Logger *l, int64_t step, const StepStats *s, const RankSummary *all) {
    const RunSettings *run = l->run;
    const Device *dev = l->comm->dev;
    double rate = (double)(s->samples * run->seq) / s->seconds; // tokens/s
    flockfile(stdout);                                          // keeps the line whole while other ranks print
    printf("step %6" PRId64 "/%d | ", step, run->steps);
    if (s->targets) printf("loss %7.4f", s->loss);
    else printf("no targets");
    if (run->z_loss > 0) printf(" | z-loss %.2e", s->z_loss);
    printf(" | norm %8.4f | lr %.2e | %7.3f s | %8.0f tokens/s", s->grad_norm, s->lr, s->seconds, rate);
    if (s->matmul_share > 0) printf(" | %3.0f %% of the matmul rate", 100 * s->matmul_share);
    if (s->mfu > 0) printf(" | MFU %4.1f %%", 100 * s->mfu);
    printf(" | waiting %2.0f %%", 100 * s->wait_seconds / s->seconds);
    if (s->communication_seconds > 0) printf(" · communication %2.0f %% overlapped", 100 * s->overlap);
    if (all->lead > 1.1)
        printf(" | %s computed %.0f %% longer than the mean", rank_name(all->slowest), 100 * (all->lead - 1));
    for (int c = 0, shown = 0; c < MEM_CATEGORIES && l->page.steps == 1; c++) // it is the same in every step
        if (dev->arenas[c].peak)
            printf("%s%s %.1f", shown++ ? ", " : " | MB per rank: ", mem_category_names[c],
                   (double)dev->arenas[c].peak / 1e6);
    printf("\n");
    fflush(stdout);
    funlockfile(stdout);
}

/* Records a step; `ranks` (world) are all ranks' figures. Prints the first and the last step, and at most one line in
 * two seconds. */
static void logger_step(Logger *l, int64_t step, const StepStats *s, const RankFigures *ranks) {
    int world = l->comm->mesh.world;
    RankSummary all = rank_summary(ranks, world);
    l->page.steps++;
    for (int i = 0; i < world; i++) {
        RankFigures *sum = &l->page.ranks[i];
        sum->seconds += ranks[i].seconds;
        sum->wait_seconds += ranks[i].wait_seconds;
        sum->tokens += ranks[i].tokens;
        sum->memory = max_i64(sum->memory, ranks[i].memory);
    }
    if (l->metrics) logger_metrics(l, step, s, ranks, &all);
    run_data_write(&l->page);
    if (step > 1 && step < l->run->steps && seconds_now() - l->last_line < 2) return;
    l->last_line = seconds_now();
    logger_progress(l, step, s, &all);
}

/* `bits_per_byte`: NAN if the bytes of the text are not known. */
static void logger_validation(Logger *l, int64_t step, double loss, int64_t targets, double bits_per_byte) {
    char bits[64] = "";
    if (isfinite(bits_per_byte)) snprintf(bits, sizeof bits, ", %.4f bits per byte", bits_per_byte);
    if (l->metrics) {
        cJSON *line = cJSON_CreateObject();
        json_add_integer(line, "step", step);
        cJSON_AddItemToObject(line, "val_loss", json_real("%.9g", targets ? loss : NAN));
        json_add_integer(line, "val_tokens", targets);
        if (isfinite(bits_per_byte)) cJSON_AddItemToObject(line, "bits_per_byte", json_real("%.9g", bits_per_byte));
        history_add_line(l->page.history, line, step);
        logger_line(l, l->metrics, line);
        run_data_write(&l->page);
    }
    if (!targets) printf("step %6" PRId64 " | validation: no targets\n", step);
    else
        printf("step %6" PRId64 " | validation loss %.4f (perplexity %.2f%s) on %" PRId64 " tokens\n", step, loss,
               exp(loss), bits, targets);
    fflush(stdout);
}

/* What reading cost this rank, once its loader is closed. Steps wait only for what was not read ahead. */
static void logger_loader(const Loader *l) {
    if (!l->consumed) return;
    printf("data loading: %d worker%s; the first batch took %.2f ms", l->num_workers, l->num_workers > 1 ? "s" : "",
           1e3 * l->first_batch_seconds);
    if (l->consumed > 1)
        printf("; later steps waited %.3f ms each", 1e3 * l->later_wait_seconds / (double)(l->consumed - 1));
    printf("; reading took %.3f ms per step\n", 1e3 * l->read_seconds * (double)l->samples / (double)l->claimed);
    fflush(stdout);
}

#endif
