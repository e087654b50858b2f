/* report.h: the files of a plan: plan.html, one page that needs nothing else (memory of every kind of rank, the
 * pipeline's timeline, traffic by axis), and the estimated timeline for --trace. Charts are SVG with tooltips.
 */
#ifndef REPORT_H
#define REPORT_H
#include "estimate.h" // defines: Plan, Simulation, Estimate, Cluster, axis_bytes

static const char *const category_colors[MEM_CATEGORIES] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759",
                                                            "#76b7b2", "#edc948", "#bab0ac"};
static const char *const axis_colors[AXES] = {"#4e79a7", "#b07aa1", "#f28e2b", "#59a14f",
                                              "#e15759", "#59a14f", "#bab0ac"};

static void html_text(FILE *f, const char *text) {
    for (; *text; text++) {
        if (*text == '<') fputs("&lt;", f);
        else if (*text == '&') fputs("&amp;", f);
        else if (*text == '"') fputs("&quot;", f);
        else fputc(*text, f);
    }
}

static void html_legend(FILE *f, const char *const *names, const char *const *colors, int n) {
    fprintf(f, "<p class=legend>");
    for (int i = 0; i < n; i++) fprintf(f, "<span><i style=\"background:%s\"></i>%s</span> ", colors[i], names[i]);
    fprintf(f, "</p>\n");
}

// ---------------------------------------------------------------------------
// memory

enum { MEMORY_LEFT = 250, MEMORY_ROW = 22, MEMORY_WIDTH = 760 }; // pixels: labels, a bar's row, the longest bar

/* Which ranks the bar is for, at most 38 bytes of it; the tooltip has all. */
static void html_class_label(FILE *f, const Plan *p, int class_index) {
    char *name;
    size_t size;
    FILE *text = open_memstream(&name, &size);
    if (!text) run_failure("out of memory");
    print_class_ranks(text, p, class_index);
    fclose(text);
    int length = (int)size, shown = length > 38 ? 35 : length;
    if (length) name[length - 1] = 0; // the newline
    fprintf(f, "<g><title>");
    html_text(f, name);
    fprintf(f, "</title><text x=\"%d\" y=\"%d\" text-anchor=\"end\">", MEMORY_LEFT - 6, class_index * MEMORY_ROW + 15);
    while (shown < length && (name[shown] & 0xC0) == 0x80) shown--; // do not cut within a UTF-8 character
    name[shown] = 0;
    html_text(f, name);
    fprintf(f, "%s</text></g>\n", length > 38 ? "…" : "");
    free(name);
}

static void html_memory_bar(FILE *f, const Device *dry_run, int row, double pixels_per_byte) {
    double x = (double)MEMORY_LEFT, peak = (double)device_peak(dry_run);
    for (int m = 0; m < MEM_CATEGORIES; m++) {
        double bytes = dry_run->arenas[m].offloaded ? 0 : (double)dry_run->arenas[m].peak,
               width = bytes * pixels_per_byte;
        if (width > 0)
            fprintf(f,
                    "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s: %.3f "
                    "GB</title></rect>\n",
                    x, row * MEMORY_ROW + 3, width, MEMORY_ROW - 6, category_colors[m], mem_category_names[m],
                    bytes / 1e9);
        x += width;
    }
    fprintf(f, "<text x=\"%.1f\" y=\"%d\">%.2f GB</text>\n", x + 6, row * MEMORY_ROW + 15, peak / 1e9);
}

/* A bar for each kind of rank, a part of it for each category, and a line at the memory of a rank (0: unknown). */
static void html_memory(FILE *f, const Plan *p, double memory) {
    double most = fmax(memory, (double)device_peak(plan_largest(p)->dry_run));
    double pixels_per_byte = (double)MEMORY_WIDTH / most, limit = (double)MEMORY_LEFT + memory * pixels_per_byte;
    fprintf(f, "<h2>Memory per rank</h2>\n");
    html_legend(f, mem_category_names, category_colors, MEM_CATEGORIES);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\">\n", MEMORY_LEFT + MEMORY_WIDTH + 90, p->count * MEMORY_ROW + 24);
    for (int c = 0; c < p->count; c++) {
        html_class_label(f, p, c);
        html_memory_bar(f, p->classes[c].dry_run, c, pixels_per_byte);
    }
    if (memory > 0)
        fprintf(f,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"#c00\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"end\" fill=\"#c00\">%.0f GB</text>\n",
                limit, limit, p->count * MEMORY_ROW + 20, limit - 4, p->count * MEMORY_ROW + 18, memory / 1e9);
    fprintf(f, "</svg>\n");
}

// ---------------------------------------------------------------------------
// the step's timeline

typedef enum { DOES_FORWARD, DOES_LOSS, DOES_BACKWARD, DOES_REST, STAGE_WORKS, DOES_NOTHING = -1 } StageWork;
static const char *const activity_names[STAGE_WORKS] = {"forward", "loss", "backward", "the rest of the step"};
static const char *const activity_colors[STAGE_WORKS] = {"#4e79a7", "#e15759", "#59a14f", "#bab0ac"};

typedef struct {
    double pixels_per_second;
    int left, y, height; // pixels
    int stage;
} TimelineRow;

static void html_activity(FILE *f, const TimelineRow *row, StageWork activity, double begin, double end) {
    fprintf(f,
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>stage %d: %s, %.4g to %.4g "
            "s</title></rect>\n",
            row->left + begin * row->pixels_per_second, row->y, (end - begin) * row->pixels_per_second, row->height,
            activity_colors[activity], row->stage, activity_names[activity], begin, end);
}

/* The activity that a phase such as "forward of model.layers.3" belongs to. */
static StageWork stage_work_of(const char *phase) {
    for (int a = DOES_FORWARD; a < DOES_REST; a++)
        if (!strncmp(phase, activity_names[a], strlen(activity_names[a]))) return (StageWork)a;
    return DOES_REST;
}

/* Does event `i` separate two activities: a send to another stage, a wait for one that took time, the end of the step?
 * `start`: the event that started what event `i` waits for, or itself. */
static int separates(const CommEvent *event, const CommEvent *start, const EventTime *time) {
    if (!event || start->axis == AXIS_WORLD) return 1;
    if (start->axis != AXIS_PP) return 0;
    return event->is_wait ? time->end > time->start : start->collective == SEND;
}

/* The first rank of a pipeline stage: one bar for each forward and backward of the schedule. Waiting for tp, cp and
 * fsdp is part of a bar; waiting for another stage is not. */
static void html_stage(FILE *f, const Simulation *s, const TimelineRow *row) {
    const SimRank *r = &s->ranks[row->stage * mesh_stride(&s->mesh, AXIS_PP)];
    const CommEvents *list = r->list;
    int64_t started_by[COMM_EVENT_SLOTS];
    double begin = 0, now = 0;
    StageWork activity = DOES_NOTHING;
    for (int64_t i = 0; i <= list->count; i++) {
        const CommEvent *event = i < list->count ? &list->events[i] : NULL, *start = event;
        double compute = event ? event->compute_before : list->compute_after;
        if (event && event->is_wait) start = &list->events[started_by[event->slot]];
        else if (event) started_by[event->slot] = i;
        StageWork next = stage_work_of(event ? event_name(list, event->phase) : "");
        int ends = separates(event, start, &r->times[i < list->count ? i : 0]);
        if (compute > 0 && activity != next && now > begin && activity != DOES_NOTHING) {
            html_activity(f, row, activity, begin, now);
            begin = now;
        }
        if (compute > 0) activity = next;
        now += compute;
        if (ends && now > begin && activity != DOES_NOTHING) {
            html_activity(f, row, activity, begin, now);
            activity = DOES_NOTHING;
        }
        int waits = event && event->is_wait && (!list->points.count || event->stream == STREAM_COMPUTE);
        if (waits) now = fmax(now, r->times[i].end);
        if (ends) begin = now;
    }
}

static void html_timeline(FILE *f, const Simulation *s) {
    const int LEFT = 70, ROW = 20, WIDTH = 1000, ticks = 10;
    int stages = s->mesh.size[AXIS_PP];
    fprintf(f,
            "<h2>The step</h2>\n<p>The first rank of each pipeline stage. White is waiting for another stage, or for "
            "the end of the step.</p>\n");
    html_legend(f, activity_names, activity_colors, STAGE_WORKS);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\">\n", LEFT + WIDTH + 30, stages * ROW + 30);
    for (int stage = 0; stage < stages; stage++) {
        TimelineRow row = {WIDTH / s->seconds, LEFT, stage * ROW + 2, ROW - 4, stage};
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">stage %d</text>\n", LEFT - 6, stage * ROW + 14, stage);
        html_stage(f, s, &row);
    }
    for (int i = 0; i <= ticks; i++) {
        int x = LEFT + i * WIDTH / ticks;
        fprintf(f,
                "<line x1=\"%d\" x2=\"%d\" y1=\"0\" y2=\"%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%d\" "
                "text-anchor=\"middle\">%.3g s</text>\n",
                x, x, stages * ROW + 4, x, stages * ROW + 18, s->seconds * i / ticks);
    }
    fprintf(f, "</svg>\n");
}

// ---------------------------------------------------------------------------
// traffic, and the page

static void html_traffic_row(FILE *f, const Plan *p, const Cluster *c, const Estimate *e, int axis, double most) {
    const Mesh *m = p->mesh;
    int ranks = mesh_group_size(m, (Axis)axis);
    double bytes = axis_bytes(p, axis);
    fprintf(f, "<tr><td>%s<td>%d<td>%d", axis_names[axis], m->world / ranks, ranks);
    if (c) fprintf(f, "<td>%d<td>", group_spans(m, (Axis)axis, c->ranks_per_host));
    if (c && c->hosts_per_rack) fprintf(f, "%d", group_spans(m, (Axis)axis, c->ranks_per_host * c->hosts_per_rack));
    fprintf(f,
            "<td>%.3f GB<td><svg class=bar viewBox=\"0 0 200 12\"><rect width=\"%.1f\" height=\"12\" "
            "fill=\"%s\"/></svg>",
            bytes / 1e9, 200 * bytes / most, axis_colors[axis]);
    if (c) fprintf(f, "<td>%.4g s<td>%.4g s", e->communication[axis], e->waited[axis]);
    fprintf(f, "</tr>\n");
}

static void html_traffic(FILE *f, const Plan *p, const Cluster *c, const Estimate *e) {
    double most = 1;
    for (int a = 0; a < AXES; a++) most = fmax(most, axis_bytes(p, a));
    fprintf(f,
            "<h2>Traffic</h2>\n<table><tr><th>axis<th>groups<th>ranks per group%s<th>received per rank and step<th>%s"
            "</tr>\n",
            c ? "<th>hosts<th>racks" : "", c ? "<th>communication<th>waited" : "");
    for (int a = 0; a < AXES; a++)
        if (mesh_group_size(p->mesh, (Axis)a) > 1 && a != AXIS_DP_SHARD) html_traffic_row(f, p, c, e, a, most);
    fprintf(f, "</table>\n");
}

/* The rows of "goodput" in plan.json. */
static void html_goodput(FILE *f, const cJSON *goodput) {
    const cJSON *rows = cJSON_GetObjectItemCaseSensitive(goodput, "rows"), *row, *cell, *part;
    fprintf(f, "<h2>Goodput</h2>\n<p>The part of the wall-clock time that advances training although hosts fail, and "
               "the parts that are lost.</p>\n<table>");
    cJSON_ArrayForEach(row, rows) {
        const cJSON *lost = cJSON_GetObjectItemCaseSensitive(row, "lost");
        if (row == rows->child) {
            fprintf(f, "<tr>");
            cJSON_ArrayForEach(cell, row) fprintf(f, "<th>%s", cell == lost ? "" : cell->string);
            cJSON_ArrayForEach(part, lost) fprintf(f, "<th>%s", part->string);
            fprintf(f, "</tr>\n");
        }
        fprintf(f, "<tr>");
        cJSON_ArrayForEach(cell, row) {
            fprintf(f, "<td>");
            if (cJSON_IsString(cell)) html_text(f, cell->valuestring);
            if (cJSON_IsNumber(cell)) fprintf(f, "%.6g", cell->valuedouble);
        }
        cJSON_ArrayForEach(part, lost) fprintf(f, "<td>%.2f %%", 100 * part->valuedouble);
        fprintf(f, "</tr>\n");
    }
    fprintf(f, "</table>\n");
}

static void html_head(FILE *f, const char *model, int world) {
    fprintf(f, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>");
    html_text(f, model);
    fprintf(f,
            " on %d ranks</title>\n<style>body{font:14px system-ui,sans-serif;max-width:1100px;margin:2em auto;"
            "color:#222}svg{width:100%%;font:11px system-ui,sans-serif}svg.bar{width:200px}"
            ".legend span{margin-right:1em}"
            ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}"
            "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
            "td:first-child,th:first-child{text-align:left}</style></head><body>\n<h1>",
            world);
    html_text(f, model);
    fprintf(f, " on %d ranks</h1>\n", world);
}

/* `c` NULL: there is no estimate and no timeline. `goodput`: of plan.json; NULL: failures were not simulated. */
static void report_write(FILE *f, const Job *j, const Plan *p, const Simulation *s, const Cluster *c, const Estimate *e,
                         const cJSON *goodput) {
    char mesh[160];
    mesh_print(mesh, sizeof mesh, p->mesh->size, 1);
    html_head(f, j->opt.model, p->mesh->world);
    fprintf(f, "<p>%s; %" PRId64 " tokens per step, in %s.</p>\n", mesh,
            samples_per_step(&j->opt, &j->mesh) * j->opt.seq, PRECISION_NAME);
    if (c) {
        fprintf(f, "<p>Estimated step time %.4g s: %.0f tokens/s, %.1f %% of %.4g FLOP/s per rank, on ",
                e->step_seconds, e->tokens_per_second, 100 * e->mfu, c->peak);
        html_text(f, c->name);
        fprintf(f, ".</p>\n");
    }
    html_memory(f, p, c ? c->memory : 0);
    if (c) html_timeline(f, s);
    html_traffic(f, p, c, e);
    if (goodput) html_goodput(f, goodput);
    fprintf(f, "</body></html>\n");
}

/* Writes plan.html into --out. */
static void report_write_file(const char *out, const Job *j, const Plan *p, const Simulation *s, const Cluster *c,
                              const Estimate *e, const cJSON *goodput) {
    FILE *f = logger_create(out, "plan.html");
    report_write(f, j, p, s, c, e, goodput);
    if (fclose(f)) user_error("cannot write plan.html in --out %s: %s", out, strerror(errno));
}

/* Writes --trace: the estimated timeline of the first rank of each pipeline stage. The simulation has recorded their
 * times. */
static void write_simulated_trace(const Job *j, const Simulation *s) {
    FILE *f = fopen(j->opt.trace, "w");
    if (!f) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
    fputs(trace_header, f);
    for (int stage = 0; stage < j->mesh.size[AXIS_PP]; stage++) {
        int rank = stage * mesh_stride(&j->mesh, AXIS_PP);
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_open(dry_run, j, rank, NULL);
        simulated_timeline(s, rank, &dry_run->parallel.dev);
        trace_write_events(f, &dry_run->parallel.dev, rank, 0, 0);
        trainer_close(dry_run);
        free(dry_run);
    }
    fputs(trace_footer, f);
    if (fclose(f)) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
}

#endif
