/* report.h: the files of a plan: plan.html, a page like run.html (memory of every kind of rank, the pipeline's
 * timeline, traffic by axis), and the estimated timeline for --trace.
 */
#ifndef REPORT_H
#define REPORT_H
#include "../run/page.h" // defines: page_open, page_card_open, bar_open
#include "estimate.h"    // defines: Plan, Simulation, Estimate, Cluster, axis_bytes

// ---------------------------------------------------------------------------
// memory

/* Begins the row of a class: which ranks it has. */
static void html_class_open(FILE *f, const Plan *p, int class_index) {
    char *name;
    size_t size;
    FILE *text = text_stream_open(&name, &size);
    print_class_ranks(text, p, class_index);
    text_stream_close(text);
    name[strcspn(name, "\n")] = 0;
    bar_open(f, name, name);
    free(name);
}

/* A bar for each kind of rank, a part of it for each category, and a line at the memory of a rank (0: unknown). */
static void html_memory(FILE *f, const Plan *p, double memory) {
    double most = fmax(memory, (double)device_peak(plan_largest(p)->dry_run));
    char text[128], number[2][32];
    snprintf(text, sizeof text, "the line is a rank's memory, %sB", page_si(number[0], memory));
    page_card_open(f, "Memory per rank", memory > 0 ? text : "", 1);
    fprintf(f, "<div class=\"legend\">");
    for (int m = 0; m < MEM_CATEGORIES; m++) page_legend_item(f, "", mem_category_names[m], mem_category_names[m]);
    fprintf(f, "</div>\n");
    bars_open(f, "long");
    for (int c = 0; c < p->count; c++) {
        const Device *dry_run = p->classes[c].dry_run;
        html_class_open(f, p, c);
        for (int m = 0; m < MEM_CATEGORIES; m++) {
            double bytes = dry_run->arenas[m].offloaded ? 0 : (double)dry_run->arenas[m].peak;
            snprintf(text, sizeof text, "%s: %sB", mem_category_names[m], page_si(number[0], bytes));
            bar_part(f, mem_category_names[m], 100 * bytes / most, text);
        }
        if (memory > 0) bar_limit(f, 100 * memory / most, "memory of a rank");
        snprintf(text, sizeof text, "%sB", page_si(number[1], (double)device_peak(dry_run)));
        bar_close(f, text);
    }
    bars_close(f);
    page_card_close(f);
}

// ---------------------------------------------------------------------------
// the step's timeline

typedef enum { DOES_FORWARD, DOES_LOSS, DOES_BACKWARD, DOES_REST, STAGE_WORKS, DOES_NOTHING = -1 } StageWork;
static const char *const activity_names[STAGE_WORKS] = {"forward", "loss", "backward", "the rest of the step"};
static const char *const activity_colors[STAGE_WORKS] = {"forward", "head", "backward", "rest"};

typedef struct {
    double units_per_second; // of the SVG, PLOT_WIDTH units wide
    int stage;
} TimelineRow;

static void html_activity(FILE *f, const TimelineRow *row, StageWork activity, double begin, double end) {
    fprintf(f,
            "<rect class=\"k-%s\" x=\"%.2f\" width=\"%.2f\" height=\"1\"><title>stage %d: %s, %.4g to %.4g "
            "s</title></rect>\n",
            activity_colors[activity], begin * row->units_per_second, (end - begin) * row->units_per_second, row->stage,
            activity_names[activity], begin, end);
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

/* Ticks of seconds below the rows. */
static void html_timeline_ticks(FILE *f, double seconds) {
    const PlotScale scale = {0, seconds, 0};
    double ticks[MOST_TICKS];
    int n = linear_ticks(&scale, ticks, 5);
    fprintf(f, "<div class=\"x\">");
    for (int i = 0; i < n; i++) {
        plot_tick_open(f, &scale, ticks[i], i);
        fprintf(f, "%.3g s</span>", ticks[i]);
    }
    fprintf(f, "</div>");
}

static void html_timeline(FILE *f, const Simulation *s) {
    char output[96], number[32], name[32];
    int stages = s->mesh.size[AXIS_PP];
    snprintf(output, sizeof output, "the first rank of each pipeline stage; %s", page_duration(number, s->seconds));
    page_card_open(f, "The step", output, 1);
    fprintf(f, "<div class=\"legend\">");
    for (int a = 0; a < STAGE_WORKS; a++) page_legend_item(f, "", activity_colors[a], activity_names[a]);
    fprintf(f, "<span>gaps: waiting for another stage, or for the end of the step</span></div>\n"
               "<div class=\"bars timeline\">\n");
    for (int stage = 0; stage < stages; stage++) {
        TimelineRow row = {(double)PLOT_WIDTH / s->seconds, stage};
        snprintf(name, sizeof name, "stage %d", stage);
        bar_open(f, name, name);
        fprintf(f, "<svg viewBox=\"0 0 %d 1\" preserveAspectRatio=\"none\">\n", PLOT_WIDTH);
        html_stage(f, s, &row);
        fprintf(f, "</svg></div>\n");
    }
    html_timeline_ticks(f, s->seconds);
    bars_close(f);
    page_card_close(f);
}

// ---------------------------------------------------------------------------
// traffic, and the page

static void html_traffic_row(FILE *f, const Plan *p, const Cluster *c, const Estimate *e, int axis) {
    const Mesh *m = p->mesh;
    char number[32], duration[32];
    int ranks = mesh_group_size(m, (Axis)axis);
    fprintf(f, "<tr><td><i class=\"swatch k-%s\"></i>%s<td>%d<td>%d", axis_names[axis], axis_names[axis],
            m->world / ranks, ranks);
    if (c) fprintf(f, "<td>%d<td>", group_spans(m, (Axis)axis, c->ranks_per_host));
    if (c && c->hosts_per_rack) fprintf(f, "%d", group_spans(m, (Axis)axis, c->ranks_per_host * c->hosts_per_rack));
    fprintf(f, "<td>%sB", page_si(number, axis_bytes(p, axis)));
    if (c) fprintf(f, "<td>%s", page_duration(duration, e->communication[axis]));
    if (c) fprintf(f, "<td>%s", page_duration(duration, e->waited[axis]));
    fprintf(f, "</tr>\n");
}

static int axis_is_used(const Plan *p, int axis) {
    return mesh_group_size(p->mesh, (Axis)axis) > 1 && axis != AXIS_DP_SHARD;
}

static void html_traffic(FILE *f, const Plan *p, const Cluster *c, const Estimate *e) {
    double most = 1;
    char number[32];
    if (p->mesh->world == 1) return;
    for (int a = 0; a < AXES; a++) most = fmax(most, axis_bytes(p, a));
    page_card_open(f, "Traffic", "received per rank and step", 1);
    bars_open(f, "");
    for (int a = 0; a < AXES; a++) {
        if (!axis_is_used(p, a)) continue;
        bar_open(f, axis_names[a], axis_names[a]);
        bar_part(f, axis_names[a], 100 * axis_bytes(p, a) / most, axis_names[a]);
        fprintf(f, "</div><div class=\"v\">%sB</div>\n", page_si(number, axis_bytes(p, a)));
    }
    bars_close(f);
    fprintf(f, "<div class=\"scroll\"><table><tr><th>axis<th>groups<th>ranks per group%s<th>received<th>%s</tr>\n",
            c ? "<th>hosts<th>racks" : "", c ? "communication<th>waited" : "");
    for (int a = 0; a < AXES; a++)
        if (axis_is_used(p, a)) html_traffic_row(f, p, c, e, a);
    fprintf(f, "</table></div>\n");
    page_card_close(f);
}

/* The rows of "goodput" in plan.json. */
static void html_goodput(FILE *f, const cJSON *goodput) {
    const cJSON *rows = cJSON_GetObjectItemCaseSensitive(goodput, "rows"), *row, *cell, *part;
    page_card_open(f, "Goodput", "", 1);
    fprintf(f, "<p>The part of the wall-clock time that advances training although hosts fail, and the parts that are "
               "lost.</p>\n<div class=\"scroll\"><table>");
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
            if (cJSON_IsString(cell)) page_text(f, cell->valuestring);
            if (cJSON_IsNumber(cell)) fprintf(f, "%.6g", cell->valuedouble);
        }
        cJSON_ArrayForEach(part, lost) fprintf(f, "<td>%.2f %%", 100 * part->valuedouble);
        fprintf(f, "</tr>\n");
    }
    fprintf(f, "</table></div>\n");
    page_card_close(f);
}

static void html_tiles(FILE *f, const Job *j, const Plan *p, const Cluster *c, const Estimate *e) {
    char value[64], detail[96], number[32];
    double tokens = (double)(samples_per_step(&j->opt, &j->mesh) * j->opt.seq);
    fprintf(f, "<div class=\"tiles\">\n");
    if (c) page_tile(f, "Estimated step", page_duration(number, e->step_seconds), "");
    snprintf(value, sizeof value, "%s", page_si(number, c ? e->tokens_per_second : 0));
    if (c) page_tile(f, "Speed", value, "tokens/s");
    snprintf(value, sizeof value, "%.1f\u00A0%%", 100 * e->mfu);
    snprintf(detail, sizeof detail, "of %sFLOP/s per rank", page_si(number, c ? c->peak : 0));
    if (c) page_tile(f, "MFU", value, detail);
    snprintf(value, sizeof value, "%.1f", c ? 1e-12 * e->flops / e->step_seconds : 0);
    if (c) page_tile(f, "TFLOP/s", value, "per rank");
    page_tile(f, "Tokens per step", page_si(number, tokens), "");
    snprintf(value, sizeof value, "%sB", page_si(number, (double)device_peak(plan_largest(p)->dry_run)));
    page_tile(f, "Memory per rank", value, p->count > 1 ? "of the kind that needs most" : "all ranks alike");
    page_tile(f, "Parameters", page_si(number, (double)j->table.num_parameters), "");
    fprintf(f, "</div>\n");
}

/* `c` NULL: there is no estimate and no timeline. `goodput`: of plan.json; NULL: failures were not simulated. */
static void report_write(FILE *f, const Job *j, const Plan *p, const Simulation *s, const Cluster *c, const Estimate *e,
                         const cJSON *goodput) {
    char mesh[160], title[512];
    mesh_print(mesh, sizeof mesh, p->mesh->size, 1);
    snprintf(title, sizeof title, "%s on %d rank%s", j->opt.model, p->mesh->world, p->mesh->world > 1 ? "s" : "");
    page_open(f, title, 0);
    fprintf(f, "<p><b>A plan, found by dry runs.</b></p>\n<p class=\"dim\">%s, %s, %s", PRECISION_NAME, j->opt.sharding,
            mesh);
    if (c) fprintf(f, "; estimated on ");
    if (c) page_text(f, c->name);
    fprintf(f, "</p>\n");
    html_tiles(f, j, p, c, e);
    fprintf(f, "<div class=\"cards\">\n");
    html_memory(f, p, c ? c->memory : 0);
    if (c) html_timeline(f, s);
    html_traffic(f, p, c, e);
    if (goodput) html_goodput(f, goodput);
    fprintf(f, "</div>\n");
    page_close(f);
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
        int rank = stage * mesh_stride(&j->mesh, AXIS_PP), simulated = stage * mesh_stride(&s->mesh, AXIS_PP);
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_open(dry_run, j, rank, NULL);
        simulated_timeline(s, simulated, &dry_run->parallel.dev);
        trace_write_events(f, &dry_run->parallel.dev, rank, 0, 0);
        trainer_close(dry_run);
        free(dry_run);
    }
    fputs(trace_footer, f);
    if (fclose(f)) user_error("cannot write --trace %s: %s", j->opt.trace, strerror(errno));
}

#endif
