/* run_page.h: OUT/run.html, a page about the run that is rewritten while it goes on.
 *
 * Rank 0 writes it, at most every PAGE_SECONDS and at the end, into another file that is then renamed: whenever a run
 * is killed, a complete page is there. Between two pages lies at least PAGE_SHARE times the time that writing one
 * takes. A page that cannot be written is reported once, and training continues. The curves are those of history.h, so
 * the size of the page is bounded.
 */
#ifndef RUN_PAGE_H
#define RUN_PAGE_H
#include "history.h"      // defines: History, HistoryBucket
#include "page.h"         // defines: page_open, plot_open, bar_open
#include "parallel.h"     // defines: Parallel, Options
#include "rank_figures.h" // defines: RankFigures, rank_summary

enum { PAGE_RANKS = 64, PAGE_LOG = 4000 }; // how many ranks and bytes of after-save.log are shown
static const double PAGE_SECONDS = 5, PAGE_SHARE = 500;

typedef struct {
    const Options *opt;
    const Parallel *parallel;
    History *history;
    RankFigures *ranks;         // (world) sums over the steps since this start
    int64_t steps;              // since this start
    const Device *planned;      // rank 0's dry run, whose memory plan.json has, too
    double started, next_write; // seconds_now
    double write_seconds;       // of writing it so far
    int has_ended, noted_failure;
} RunPage;

// ---------------------------------------------------------------------------
// curves of the history

typedef struct {
    CurvePoint points[HISTORY_BUCKETS];
    int count;
} CurvePoints;

/* The steps of bucket i are drawn at their middle. */
static double bucket_x(const History *h, int i) {
    double first = (double)(h->first_step + i * h->stride);
    return (first + fmax(first, (double)h->buckets[i].last_step)) / 2;
}

/* `sparse`: buckets without a value are left out and not drawn as gaps. */
static void curve_points(CurvePoints *p, const History *h, Curve curve, int sparse) {
    p->count = 0;
    for (int i = 0; i < h->count; i++) {
        const Spread *s = &h->buckets[i].curves[curve];
        if (sparse && !s->count) continue;
        double x = sparse ? (double)h->buckets[i].last_step : bucket_x(h, i);
        CurvePoint point = {x, s->least, spread_mean(s), s->most};
        p->points[p->count++] = point;
    }
}

static PlotScale step_scale(const History *h) {
    PlotScale x = {(double)h->first_step, (double)h->last_step, 0};
    if (x.low == x.high) {
        x.low -= 0.5;
        x.high += 0.5;
    }
    return x;
}

/* Vertical lines where the run was resumed, red marks at the top where updates were skipped and, `with_saves`, marks at
 * the bottom where checkpoints were saved. */
static void plot_marks(FILE *f, const History *h, const PlotScale *x, int with_saves) {
    static const struct {
        const char *style;
        int y, height;
    } marks[3] = {{"dash k-mark", 0, PLOT_HEIGHT}, {"tick k-bad", 0, 18}, {"save k-mark", PLOT_HEIGHT - 10, 10}};
    for (int m = 0; m < 2 + with_saves; m++) {
        fprintf(f, "<path class=\"%s\" d=\"", marks[m].style);
        for (int i = 0; i < h->count; i++) {
            const HistoryBucket *b = &h->buckets[i];
            const int64_t counts[3] = {b->resumes, b->skips, b->saves};
            if (counts[m]) fprintf(f, "M%.1f %dv%d", plot_x(x, bucket_x(h, i)), marks[m].y, marks[m].height);
        }
        fprintf(f, "\"/>\n");
    }
}

static void page_marks_legend(FILE *f, const History *h) {
    char text[64], number[32];
    snprintf(text, sizeof text, "saved (%s)", with_commas(number, h->saves));
    if (h->saves) page_legend_item(f, "tick", "mark", text);
    snprintf(text, sizeof text, "resumed (%s)", with_commas(number, h->resumes));
    if (h->resumes) page_legend_item(f, "dash", "mark", text);
    snprintf(text, sizeof text, "update skipped (%s)", with_commas(number, h->skips));
    if (h->skips) page_legend_item(f, "tick", "bad", text);
}

static void page_loss(FILE *f, const History *h) {
    CurvePoints *loss = new_array(CurvePoints, 1), *validation = new_array(CurvePoints, 1);
    char output[160], number[32];
    int used = snprintf(output, sizeof output, "per token");
    Curve shown = h->best_step[CURVE_VALIDATION] ? CURVE_VALIDATION : CURVE_LOSS;
    if (h->best_step[shown])
        snprintf(output + used, sizeof output - (size_t)used, "; best%s %.4f at step %s",
                 shown == CURVE_VALIDATION ? " validation" : "", h->best[shown],
                 with_commas(number, h->best_step[shown]));
    page_card_open(f, "Loss", output, 1);
    fprintf(f, "<div class=\"legend\">");
    page_legend_item(f, "line", "loss", h->stride > 1 ? "training, mean and range" : "training");
    if (shown == CURVE_VALIDATION) page_legend_item(f, "line", "val", "validation, best marked");
    page_marks_legend(f, h);
    fprintf(f, "</div>\n");
    curve_points(loss, h, CURVE_LOSS, 0);
    curve_points(validation, h, CURVE_VALIDATION, 1);
    PlotScale x = step_scale(h), y = {INFINITY, -INFINITY, 0};
    scale_include(&y, loss->points, loss->count);
    scale_include(&y, validation->points, validation->count);
    if (y.low > y.high) {
        fprintf(f, "<p class=\"none\">No finite loss so far</p>\n");
    } else {
        scale_finish(&y, 0, 1);
        plot_open(f, &y, "loss val_loss", "");
        if (h->stride > 1) plot_band(f, "band k-loss", &x, &y, loss->points, loss->count);
        plot_line(f, "k-loss", &x, &y, loss->points, loss->count);
        plot_line(f, "k-val", &x, &y, validation->points, validation->count);
        plot_dots(f, "dot k-val", &x, &y, validation->points, validation->count);
        CurvePoint best = {(double)h->best_step[shown], h->best[shown], h->best[shown], h->best[shown]};
        plot_dots(f, shown == CURVE_LOSS ? "best k-loss" : "best k-val", &x, &y, &best, 1);
        plot_marks(f, h, &x, 1);
        plot_close(f, &x, "step ");
    }
    page_card_close(f);
    free(loss);
    free(validation);
}

/* `limit`: a value across the plot, such as that of --clip; 0: none. */
static void page_curve(FILE *f, const History *h, Curve curve, const char *title, const char *unit, double limit) {
    CurvePoints *p = new_array(CurvePoints, 1);
    char output[96], number[48];
    PlotScale x = step_scale(h), y = {INFINITY, -INFINITY, 0};
    int is_sparse = curve == CURVE_ACCURACY;
    curve_points(p, h, curve, is_sparse);
    scale_include(&y, p->points, p->count);
    double last = h->last[curve];
    const char *latest = curve == CURVE_RATE ? page_rate(number, last) : tick_label(number, last, 0);
    snprintf(output, sizeof output, "latest %s", latest);
    if (!isfinite(last)) snprintf(output, sizeof output, "none so far");
    page_card_open(f, title, output, 0);
    if (y.low > y.high) {
        fprintf(f, "<p class=\"none\">No finite value so far</p>\n");
    } else {
        if (curve == CURVE_NORM) y.high = fmax(y.high, limit);
        scale_finish(&y, curve != CURVE_NORM, curve == CURVE_NORM);
        plot_open(f, &y, curve_keys[curve], unit);
        if (h->stride > 1) plot_band(f, "band k-plain", &x, &y, p->points, p->count);
        plot_line(f, "k-plain", &x, &y, p->points, p->count);
        if (is_sparse) plot_dots(f, "dot k-plain", &x, &y, p->points, p->count);
        if (limit > 0 && limit >= y.low)
            fprintf(f, "<path class=\"dash k-host\" d=\"M0 %.1fh%d\"/>\n", plot_y(&y, limit), PLOT_WIDTH);
        plot_marks(f, h, &x, 0);
        plot_close(f, &x, "step ");
    }
    page_card_close(f);
    free(p);
}

// ---------------------------------------------------------------------------
// where the time goes

static const char *const time_names[TIME_PARTS] = {"computing",
                                                   "waiting for fsdp",
                                                   "waiting for dp_replicate",
                                                   "waiting for tp",
                                                   "waiting for cp",
                                                   "waiting for pp",
                                                   "waiting for all ranks",
                                                   "other waits",
                                                   "data"};

/* The parts of one bar, with their shares in the legend. */
static void page_time_shares(FILE *f, const double time[TIME_PARTS], double total) {
    char text[96], duration[32];
    fprintf(f, "<div class=\"bar\">");
    for (int t = 0; t < TIME_PARTS; t++) bar_part(f, time_keys[t], 100 * time[t] / total, time_names[t]);
    fprintf(f, "</div><div class=\"legend\" style=\"margin-top:6px\">");
    for (int t = 0; t < TIME_PARTS; t++) {
        if (time[t] <= 0) continue;
        snprintf(text, sizeof text, "%s %.1f\u00A0%% (%s)", time_names[t], 100 * time[t] / total,
                 page_duration(duration, time[t]));
        page_legend_item(f, "", time_keys[t], text);
    }
    fprintf(f, "</div>\n");
}

/* Stacked areas of all parts, the mean step of each bucket. */
static void page_time_plot(FILE *f, const History *h, const double total[TIME_PARTS]) {
    CurvePoints *p = new_array(CurvePoints, 1);
    double below[HISTORY_BUCKETS] = ZERO, most = 0;
    char curves[160] = "";
    PlotScale x = step_scale(h), y = {0, 0, 0};
    for (int i = 0; i < h->count; i++) {
        double sum = 0;
        for (int t = 0; t < TIME_PARTS; t++) sum += h->buckets[i].time[t] / (double)max_i64(1, h->buckets[i].steps);
        most = fmax(most, sum);
    }
    double unit = most < 1 ? 1000 : 1; // values are shown in ms, or in s
    y.high = 1.05 * unit * most;
    for (int t = 0; t < TIME_PARTS; t++)
        if (total[t] > 0) snprintf(curves + strlen(curves), 32, "%s%s", curves[0] ? " " : "", time_keys[t]);
    fprintf(f, "<p class=\"note dim\">%s per step</p>", unit > 1 ? "Milliseconds" : "Seconds");
    plot_open(f, &y, curves, "s");
    for (int t = 0; t < TIME_PARTS; t++) {
        p->count = h->count;
        for (int i = 0; i < h->count; i++) {
            const HistoryBucket *b = &h->buckets[i];
            double above = below[i] + unit * b->time[t] / (double)max_i64(1, b->steps);
            CurvePoint point = {bucket_x(h, i), below[i], b->steps ? above : NAN, above};
            p->points[i] = point;
            below[i] = above;
        }
        char style[32];
        snprintf(style, sizeof style, "area k-%s", time_keys[t]);
        if (total[t] > 0) plot_band(f, style, &x, &y, p->points, p->count);
    }
    plot_close(f, &x, "step ");
    free(p);
}

static void page_time(FILE *f, const History *h) {
    double time[TIME_PARTS] = ZERO, total = 0;
    int64_t steps = 0;
    char output[64], duration[32];
    for (int i = 0; i < h->count; i++) {
        for (int t = 0; t < TIME_PARTS; t++) time[t] += h->buckets[i].time[t];
        steps += h->buckets[i].steps;
    }
    for (int t = 0; t < TIME_PARTS; t++) {
        time[t] /= (double)max_i64(1, steps);
        total += time[t];
    }
    snprintf(output, sizeof output, "rank 0; %s per step", page_duration(duration, total));
    page_card_open(f, "Where a step's time goes", output, 1);
    if (total > 0) {
        page_time_shares(f, time, total);
        page_time_plot(f, h, time);
    } else {
        fprintf(f, "<p class=\"none\">No step so far</p>\n");
    }
    page_card_close(f);
}

// ---------------------------------------------------------------------------
// memory, and ranks side by side

static void page_memory(FILE *f, const RunPage *p) {
    const Device *dev = &p->parallel->dev;
    double most = 1, total = 0, planned = 0;
    char output[96], value[128], number[3][32];
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        double peak = (double)dev->arenas[c].peak, plan = (double)p->planned->arenas[c].peak;
        most = fmax(most, fmax(peak, plan));
        total += dev->arenas[c].offloaded ? 0 : peak;
        planned += dev->arenas[c].offloaded ? 0 : plan;
    }
    snprintf(output, sizeof output, "rank 0; peaks together %sB, planned %sB", page_si(number[0], total),
             page_si(number[1], planned));
    page_card_open(f, "Memory by category", output, 0);
    bars_open(f, "");
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        const Arena *a = &dev->arenas[c];
        double plan = (double)p->planned->arenas[c].peak;
        if (!a->peak && plan == 0) continue;
        bar_open(f, mem_category_names[c], mem_category_names[c]);
        bar_part(f, mem_category_names[c], 100 * (double)a->peak / most, "peak so far");
        bar_limit(f, 100 * plan / most, "planned");
        snprintf(value, sizeof value, "%sB%s%s of %sB planned", page_si(number[0], (double)a->peak),
                 a->offloaded ? " " : "", a->offloaded ? OFFLOAD_PLACE : "", page_si(number[1], plan));
        bar_close(f, value);
    }
    bars_close(f);
    page_card_close(f);
}

static void page_rank(FILE *f, const RunPage *p, int rank, double most) {
    char name[64], title[300], value[160], duration[2][32], rate[48], memory[32];
    double row[RANK_COLUMNS], steps = (double)p->steps;
    rank_row(&p->ranks[rank], row);
    double compute = row[RANK_COMPUTE] / steps, wait = row[RANK_WAIT] / steps;
    snprintf(name, sizeof name, "rank %d", rank);
    snprintf(title, sizeof title, "%s", name);
    if (run_hosts.count > 1) snprintf(title, sizeof title, "%s on %s", name, host_of_rank(rank)->name);
    bar_open(f, title, title);
    bar_part(f, "compute", 100 * compute / most, "computing");
    bar_part(f, "world", 100 * wait / most, "waiting");
    page_duration(duration[0], compute);
    page_duration(duration[1], wait);
    snprintf(value, sizeof value, "%s + %s · %s · %sB", duration[0], duration[1], page_rate(rate, row[RANK_RATE]),
             page_si(memory, row[RANK_MEMORY]));
    bar_close(f, value);
}

static int by_compute(const void *a, const void *b) { // longest first
    const double *x = *(const double *const *)a, *y = *(const double *const *)b;
    return (*x < *y) - (*x > *y);
}

/* The ranks that are shown, (world): all of them, or first those that computed longest. Returns how many. */
static int choose_ranks(const RunPage *p, int *shown) {
    int world = p->parallel->mesh.world;
    double *compute = new_array(double, world), **order = new_array(double *, world);
    for (int i = 0; i < world; i++) {
        compute[i] = p->ranks[i].seconds - p->ranks[i].wait_seconds;
        order[i] = &compute[i];
    }
    if (world > PAGE_RANKS) qsort(order, (size_t)world, sizeof *order, by_compute);
    for (int i = 0; i < world; i++) shown[i] = (int)(order[i] - compute);
    free(compute);
    free(order);
    return (int)min_i64(world, PAGE_RANKS);
}

static void page_ranks(FILE *f, const RunPage *p) {
    int world = p->parallel->mesh.world, *shown = new_array(int, world);
    int count = choose_ranks(p, shown);
    RankSummary all = rank_summary(p->ranks, world);
    char output[160];
    snprintf(output, sizeof output, "rank %d computed longest, %.1f\u00A0%% above the mean", all.slowest,
             100 * (all.lead - 1));
    page_card_open(f, "Ranks side by side", output, 1);
    fprintf(f, "<div class=\"legend\">");
    page_legend_item(f, "", "compute", "computing");
    page_legend_item(f, "", "world", "waiting for other ranks");
    fprintf(f, "<span>per step, mean since this start; peak memory%s</span></div>\n",
            world > PAGE_RANKS ? "; the 64 ranks that computed longest" : "");
    bars_open(f, "");
    for (int i = 0; i < count; i++) page_rank(f, p, shown[i], all.most[RANK_SECONDS] / (double)p->steps);
    bars_close(f);
    page_card_close(f);
    free(shown);
}

// ---------------------------------------------------------------------------
// texts: what --after-save prints, the command, the options

/* The end of after-save.log, to which a command such as `train_llama3 --generate` writes samples. */
static void page_after_save(FILE *f, const RunPage *p) {
    char path[4096], text[PAGE_LOG];
    snprintf(path, sizeof path, "%s/after-save.log", p->opt->out);
    if (!p->opt->after_save) return;                        // the file may be there from an earlier start
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); // a pipe of this name must not stop training
    FILE *log = fd < 0 ? NULL : fdopen(fd, "r");
    if (!log) return;
    int is_cut = !fseek(log, -(long)sizeof text, SEEK_END);
    if (!is_cut) rewind(log);
    size_t length = fread(text, 1, sizeof text, log), begin = 0;
    fclose(log);
    while (is_cut && begin < length && text[begin] != '\n') begin++; // the line that the cut goes through
    if (begin == length) begin = 0;
    page_card_open(f, "Output of --after-save", is_cut ? "the end of after-save.log" : "", 1);
    fprintf(f, "<pre>");
    page_bytes_as_text(f, text + begin, length - begin, 1);
    fprintf(f, "</pre>\n");
    page_card_close(f);
}

static void page_shell_word(FILE *f, const char *word) {
    char *quoted;
    size_t length;
    FILE *text = text_stream_open(&quoted, &length);
    write_shell_word(text, word);
    text_stream_close(text);
    page_text(f, quoted);
    free(quoted);
}

static void page_command(FILE *f, const RunPage *p) {
    const Options *o = p->opt;
    char value[4096];
    page_card_open(f, "Command and options", "", 1);
    fprintf(f, "<pre>train_llama3");
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (!o->given[i]) continue;
        option_as_text(o, &option_rows[i], value, sizeof value);
        fprintf(f, " --%s", option_rows[i].name);
        if (option_rows[i].kind != OPT_FLAG) fputc(' ', f);
        if (option_rows[i].kind != OPT_FLAG) page_shell_word(f, value);
    }
    fprintf(f, "</pre>\n<details><summary>All options in force</summary><table class=\"text\">\n");
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (is_planner_option(row) || !option_as_text(o, row, value, sizeof value)) continue;
        fprintf(f, "<tr%s><td>--%s<td>", o->given[i] ? " class=\"given\"" : "", row->name);
        page_text(f, value);
        fprintf(f, "</tr>\n");
    }
    fprintf(f, "</table></details>\n");
    page_card_close(f);
}

// ---------------------------------------------------------------------------
// the head of the page

static void page_status(FILE *f, const RunPage *p) {
    const History *h = p->history;
    const Mesh *mesh = &p->parallel->mesh;
    char step[32], steps[32], when[64], axes[160];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", &utc);
    mesh_print(axes, sizeof axes, mesh->size, 1);
    const char *state = "running";
    if (p->has_ended) state = h->last_step >= p->opt->steps ? "finished" : "ended early";
    fprintf(f, "<p><b>Step %s of %s, %s.</b> Written %s%s.</p>\n", with_commas(step, h->last_step),
            with_commas(steps, p->opt->steps), state, when,
            p->has_ended ? "" : "; if that is long ago, the run was killed or has failed");
    fprintf(f, "<p class=\"dim\">%s, %s, %s over %d rank%s%s%s</p>\n", PRECISION_NAME, p->opt->sharding, axes,
            mesh->world, mesh->world > 1 ? "s" : "", p->opt->deterministic ? ", deterministic" : "",
            p->opt->lora_rank ? ", LoRA adapters" : "");
    fprintf(f, "<div class=\"bar\" style=\"height:4px;margin-top:10px\">");
    bar_part(f, "loss", 100 * (double)h->last_step / p->opt->steps, "progress");
    fprintf(f, "</div>\n");
}

static void page_loss_tiles(FILE *f, const History *h) {
    char value[64], detail[96], number[32];
    snprintf(value, sizeof value, "%.4f", h->last[CURVE_LOSS]);
    if (!isfinite(h->last[CURVE_LOSS])) snprintf(value, sizeof value, "–");
    snprintf(detail, sizeof detail, "lowest %.4f", h->best[CURVE_LOSS]);
    page_tile(f, "Training loss", value, isfinite(h->best[CURVE_LOSS]) ? detail : "no finite loss so far");
    if (!h->best_step[CURVE_VALIDATION]) return;
    snprintf(value, sizeof value, "%.4f", h->best[CURVE_VALIDATION]);
    snprintf(detail, sizeof detail, "at step %s; latest %.4f", with_commas(number, h->best_step[CURVE_VALIDATION]),
             h->last[CURVE_VALIDATION]);
    page_tile(f, "Best validation loss", value, detail);
}

static void page_speed_tiles(FILE *f, const RunPage *p) {
    const History *h = p->history;
    char value[64], detail[96], number[32];
    double rate = h->last[CURVE_RATE];
    size_t used;
    snprintf(value, sizeof value, "%s", isfinite(rate) ? page_si(number, rate) : "–");
    used = (size_t)snprintf(detail, sizeof detail, "tokens/s");
    if (h->matmul_share > 0)
        used += (size_t)snprintf(detail + used, sizeof detail - used, "; %.0f\u00A0%% of the matmul rate",
                                 100 * h->matmul_share);
    if (h->mfu > 0) snprintf(detail + used, sizeof detail - used, "; MFU %.1f\u00A0%%", 100 * h->mfu);
    page_tile(f, "Speed", value, detail);
    page_tile(f, "Last step", page_duration(number, h->seconds), "from data to update");
    snprintf(value, sizeof value, "%s", page_si(number, (double)h->tokens));
    page_tile(f, "Trained on", value, "tokens");
    int64_t left = max_i64(0, p->opt->steps - h->last_step);
    double so_far = seconds_now() - p->started;
    if (p->steps && left && !p->has_ended)
        page_tile(f, "Remaining", page_duration(number, so_far / (double)p->steps * (double)left),
                  "at the mean speed so far");
    if (!h->skips) return;
    with_commas(value, h->skips);
    snprintf(detail, sizeof detail, "of at most %d", p->opt->max_skips);
    if (h->outliers)
        snprintf(detail, sizeof detail, "%s with an outlier; others: at most %d", with_commas(number, h->outliers),
                 p->opt->max_skips);
    page_tile(f, "Updates skipped", value, detail);
}

// ---------------------------------------------------------------------------
// the values, as JSON, and the script that shows them

/* A number, or [mean, least, most] of several steps, or null. */
static void page_data_value(FILE *f, int is_first, const Spread *s) {
    if (!is_first) fputc(',', f);
    if (s->count == 1) fprintf(f, "%.9g", s->sum);
    else if (s->count) fprintf(f, "[%.9g,%.9g,%.9g]", spread_mean(s), s->least, s->most);
    else fprintf(f, "null");
}

/* {"step":[…],"first":…,"last":…,"curves":{"loss":[…],…,"compute":[…],…}}: one value for each bucket. */
static void page_data(FILE *f, const History *h) {
    PlotScale x = step_scale(h);
    fprintf(f, "<script type=\"application/json\" id=\"data\">{\"first\":%.9g,\"last\":%.9g,\"step\":[", x.low, x.high);
    for (int i = 0; i < h->count; i++) fprintf(f, "%s%" PRId64, i ? "," : "", h->buckets[i].last_step);
    fprintf(f, "],\"curves\":{");
    for (int c = 0; c < CURVES; c++) {
        fprintf(f, "%s\"%s\":[", c ? "," : "", curve_keys[c]);
        for (int i = 0; i < h->count; i++) page_data_value(f, !i, &h->buckets[i].curves[c]);
        fprintf(f, "]");
    }
    for (int t = 0; t < TIME_PARTS; t++) {
        fprintf(f, ",\"%s\":[", time_keys[t]);
        for (int i = 0; i < h->count; i++)
            fprintf(f, "%s%.4g", i ? "," : "", h->buckets[i].time[t] / (double)max_i64(1, h->buckets[i].steps));
        fprintf(f, "]");
    }
    fprintf(f, "}}</script>\n");
}

/* Shows the values below the pointer in the title line of a chart. The page is complete without it. */
static const char page_script[] =
    "<script>\n"
    "const data = JSON.parse(document.getElementById('data').textContent);\n"
    "const names = {loss: 'loss', val_loss: 'validation', tokens_per_s: '', lr: '', grad_norm: '', compute: "
    "'computing'};\n"
    "const shown = (v, unit) => unit == 's' ? (v < 1 ? (1000 * v).toPrecision(3) + ' ms' : v.toPrecision(3) + ' s')\n"
    "    : (v >= 1e4 ? Math.round(v).toLocaleString('en') : +v.toPrecision(5)) + (unit ? ' ' + unit : '');\n"
    "for (const plot of document.querySelectorAll('.plot')) {\n"
    "    const output = plot.closest('.card').querySelector('output'), usual = [...output.childNodes];\n"
    "    const cursor = plot.querySelector('.cursor'), unit = plot.dataset.unit;\n"
    "    const last = data.step.length - 1;\n"
    "    plot.onpointermove = plot.onpointerdown = event => {\n"
    "        const box = plot.getBoundingClientRect(), part = (event.clientX - box.left) / box.width;\n"
    "        const x = data.first + part * (data.last - data.first);\n"
    "        let i = data.step.findIndex(step => step >= x);\n"
    "        if (i < 0) i = last;\n"
    "        if (i > 0 && x - data.step[i - 1] < data.step[i] - x) i--;\n"
    "        const at = (data.step[i] - data.first) / (data.last - data.first);\n"
    "        cursor.style.left = 100 * at + '%';\n"
    "        cursor.style.visibility = 'visible';\n"
    "        const parts = ['step ' + data.step[i].toLocaleString('en')];\n"
    "        for (const key of plot.dataset.curves.split(' ')) {\n"
    "            const value = data.curves[key][i], several = Array.isArray(value);\n"
    "            if (value === null || (unit == 's' && value === 0)) continue;\n"
    "            parts.push(((key in names ? names[key] : key) + ' ' + shown(several ? value[0] : value, unit) +\n"
    "                (several ? ' (' + shown(value[1], '') + ' to ' + shown(value[2], '') + ')' : '')).trim());\n"
    "        }\n"
    "        output.textContent = parts.join(' · ');\n"
    "    };\n"
    "    plot.onpointerleave = () => { output.replaceChildren(...usual); cursor.style.visibility = 'hidden'; };\n"
    "}\n"
    "</script>\n";

// ---------------------------------------------------------------------------
// the page, and its file

static void page_footer(FILE *f, const RunPage *p) {
    const History *h = p->history;
    char number[32];
    double so_far = fmax(1e-9, seconds_now() - p->started);
    fprintf(f, "<p class=\"note dim\">Each point of a curve stands for %s step%s. ", with_commas(number, h->stride),
            h->stride > 1 ? "s" : "");
    if (h->unreadable)
        fprintf(f, "%s line%s of metrics.jsonl could not be read and %s left out. ", with_commas(number, h->unreadable),
                h->unreadable > 1 ? "s" : "", h->unreadable > 1 ? "are" : "is");
    fprintf(f, "Writing this page has taken %.2g&nbsp;%% of the time so far. metrics.jsonl has all values.</p>\n",
            100 * p->write_seconds / so_far);
}

static void run_page_draw(FILE *f, const RunPage *p) {
    const History *h = p->history;
    char title[512];
    int world = p->parallel->mesh.world;
    snprintf(title, sizeof title, "%s on %d rank%s", p->opt->model, world, world > 1 ? "s" : "");
    page_open(f, title, p->has_ended ? 0 : 30);
    page_status(f, p);
    fprintf(f, "<div class=\"tiles\">\n");
    page_loss_tiles(f, h);
    page_speed_tiles(f, p);
    fprintf(f, "</div>\n<div class=\"cards\">\n");
    page_loss(f, h);
    page_curve(f, h, CURVE_NORM, "Gradient norm", "", p->opt->clip);
    page_curve(f, h, CURVE_LR, "Learning rate", "", 0);
    page_curve(f, h, CURVE_RATE, "Speed", "tokens/s", 0);
    page_memory(f, p);
    if (isfinite(h->last[CURVE_ACCURACY])) page_curve(f, h, CURVE_ACCURACY, "Accuracy on --choices", "", 0);
    page_time(f, h);
    if (p->steps && world > 1) page_ranks(f, p);
    page_after_save(f, p);
    page_command(f, p);
    fprintf(f, "</div>\n");
    page_footer(f, p);
    page_data(f, h);
    fputs(page_script, f);
    page_close(f);
}

/* Returns 0 or errno. */
static int run_page_write_file(const RunPage *p) {
    char path[4096 + 16], written[4096 + 32];
    snprintf(path, sizeof path, "%s/run.html", p->opt->out);
    snprintf(written, sizeof written, "%s/.run.html.part", p->opt->out);
    FILE *f = fopen(written, "w");
    if (!f) return errno;
    run_page_draw(f, p);
    int failed = fflush(f) || ferror(f) ? errno : 0;
    if (fclose(f) && !failed) failed = errno;
    if (!failed && rename(written, path)) failed = errno;
    if (failed) unlink(written);
    return failed;
}

/* Writes the page if it is due, or at the end. */
static void run_page_write(RunPage *p) {
    double start = seconds_now();
    if (!p->history || !p->history->first_step || (!p->has_ended && start < p->next_write)) return;
    int failed = run_page_write_file(p);
    if (failed && !p->noted_failure)
        fprintf(stderr,
                "note: cannot write %s/run.html: %s; training continues, and the page is written again when that is "
                "possible\n",
                p->opt->out, strerror(failed));
    p->noted_failure |= !!failed;
    double now = seconds_now();
    p->write_seconds += now - start;
    p->next_write = now + fmax(PAGE_SECONDS, PAGE_SHARE * (now - start));
}

/* `planned`: rank 0's dry run. `steps_before`: the step that the run resumes from, whose history is read from
 * metrics.jsonl; 0: a new run. */
static void run_page_open(RunPage *p, const Options *o, const Parallel *parallel, const Device *planned,
                          int64_t steps_before) {
    char path[4096];
    memset(p, 0, sizeof *p);
    p->opt = o;
    p->parallel = parallel;
    p->planned = planned;
    p->started = seconds_now();
    if (!o->out) return;
    p->history = history_open();
    snprintf(path, sizeof path, "%s/metrics.jsonl", o->out);
    if (steps_before) history_read(p->history, path, steps_before);
}

#endif
