/* plan_page.h: a plan as one HTML file that needs nothing else: memory of every kind of ranks, the pipeline's timeline,
 * traffic by axis.
 *
 * Included by planner.h. Pictures are SVG; whatever lies under the pointer says what it is.
 */

static const char *const category_colours[MEM_CATEGORIES] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759",
                                                             "#76b7b2", "#edc948", "#bab0ac"};
static const char *const axis_colours[AXES] = {"#4e79a7", "#b07aa1", "#f28e2b", "#59a14f",
                                               "#e15759", "#59a14f", "#bab0ac"};

static void html_text(FILE *f, const char *text) {
    for (; *text; text++) {
        if (*text == '<') fputs("&lt;", f);
        else if (*text == '&') fputs("&amp;", f);
        else if (*text == '"') fputs("&quot;", f);
        else fputc(*text, f);
    }
}

static void page_legend(FILE *f, const char *const *names, const char *const *colours, int n) {
    fprintf(f, "<p class=legend>");
    for (int i = 0; i < n; i++) fprintf(f, "<span><i style=\"background:%s\"></i>%s</span> ", colours[i], names[i]);
    fprintf(f, "</p>\n");
}

/* A bar for each kind of ranks, a stretch for each category; a line where a rank's memory ends. */
static void page_memory(FILE *f, const Plan *p, double have) {
    const int LEFT = 250, ROW = 22;
    const double width_of_most = 760;
    double most = have;
    for (int c = 0; c < p->count; c++) most = fmax(most, (double)device_peak(p->classes[c].dry_run));
    fprintf(f, "<h2>Memory of a rank</h2>\n");
    page_legend(f, mem_category_names, category_colours, MEM_CATEGORIES);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\">\n", LEFT + (int)width_of_most + 90, p->count * ROW + 24);
    for (int c = 0; c < p->count; c++) {
        const Device *d = p->classes[c].dry_run;
        double at = LEFT, peak = (double)device_peak(d);
        char *name;
        size_t length;
        FILE *text = open_memstream(&name, &length);
        if (!text) run_failure("out of memory");
        class_print(text, p, c);
        fclose(text);
        if (length) name[length - 1] = 0; // the end of the line
        fprintf(f, "<g><title>");
        html_text(f, name);
        fprintf(f, "</title><text x=\"%d\" y=\"%d\" text-anchor=\"end\">", LEFT - 6, c * ROW + 15);
        int cut = length > 38 ? 35 : (int)length;
        while (cut < (int)length && (name[cut] & 0xC0) == 0x80) cut--; // not within a character
        name[cut] = 0;
        html_text(f, name);
        fprintf(f, "%s</text></g>\n", length > 38 ? "…" : "");
        free(name);
        for (int m = 0; m < MEM_CATEGORIES; m++) {
            double bytes = d->arenas[m].offloaded ? 0 : (double)d->arenas[m].peak, width = bytes / most * width_of_most;
            if (width > 0)
                fprintf(f,
                        "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s: %.3f "
                        "GB</title></rect>\n",
                        at, c * ROW + 3, width, ROW - 6, category_colours[m], mem_category_names[m], bytes / 1e9);
            at += width;
        }
        fprintf(f, "<text x=\"%.1f\" y=\"%d\">%.2f GB</text>\n", at + 6, c * ROW + 15, peak / 1e9);
    }
    double there = LEFT + have / most * width_of_most;
    if (have > 0)
        fprintf(f,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%d\" stroke=\"#c00\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"end\" fill=\"#c00\">%.0f GB</text>\n",
                there, there, p->count * ROW + 20, there - 4, p->count * ROW + 18, have / 1e9);
    fprintf(f, "</svg>\n");
}

typedef enum { DOES_FORWARD, DOES_LOSS, DOES_BACKWARD, DOES_REST, DOES } Doing;
static const char *const doing_names[DOES] = {"forward", "loss", "backward", "the rest of the step"},
                         *const doing_colours[DOES] = {"#4e79a7", "#e15759", "#59a14f", "#bab0ac"};

typedef struct {
    double scale;
    int left, y, height;
} PageRow; // pixels a second; pixels

static void page_stretch(FILE *f, PageRow at, int stage, Doing doing, double begin, double end) {
    fprintf(f,
            "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>stage %d: %s, %.4g to %.4g "
            "s</title></rect>\n",
            at.left + begin * at.scale, at.y, (end - begin) * at.scale, at.height, doing_colours[doing], stage,
            doing_names[doing], begin, end);
}

/* What the first rank of a stage does: a stretch for each step of the schedule, waits within it (for tp, cp, fsdp)
 * included. */
static void page_stage(FILE *f, const Replay *r, int stage, PageRow row) {
    const Actor *a = &r->actors[stage * mesh_stride(r->mesh, AXIS_PP)];
    const CommEvents *s = a->script;
    int64_t started[SLOTS];
    double begin = 0, now = 0;
    int doing = -1;
    for (int64_t i = 0; i <= s->count; i++) {
        const CommEvent *line = i < s->count ? &s->events[i] : NULL;
        const char *phase = line ? script_text(s, line->phase) : "";
        int next = DOES_REST;
        while (next > 0 && strncmp(phase, doing_names[next - 1], strlen(doing_names[next - 1]))) next--;
        next = next ? next - 1 : DOES_REST;
        if (line && !line->is_wait) started[line->slot] = i;
        double computed = line ? line->compute_before : s->compute_after;
        const CommEvent *of = line && line->is_wait ? &s->events[started[line->slot]] : line;
        int apart =
            !line ||
            (of->axis == AXIS_PP && (line->is_wait ? a->times[i].end > a->times[i].start : of->collective == SEND)) ||
            of->axis == AXIS_WORLD;
        if (computed > 0 && doing != next && now > begin && doing >= 0)
            page_stretch(f, row, stage, (Doing)doing, begin, now), begin = now;
        if (computed > 0) doing = next;
        now += computed;
        if (apart && now > begin && doing >= 0) page_stretch(f, row, stage, (Doing)doing, begin, now), doing = -1;
        if (line && line->is_wait) now = fmax(now, a->times[i].end);
        if (apart) begin = now;
    }
}

static void page_timeline(FILE *f, const Replay *r) {
    const int LEFT = 70, ROW = 20, WIDTH = 1000;
    int stages = r->mesh->size[AXIS_PP], ticks = 10;
    double scale = WIDTH / r->seconds;
    fprintf(f, "<h2>The step</h2>\n<p>The first rank of each stage; white is waiting for another stage, or for the end "
               "of the step.</p>\n");
    page_legend(f, doing_names, doing_colours, DOES);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\">\n", LEFT + WIDTH + 30, stages * ROW + 30);
    for (int stage = 0; stage < stages; stage++) {
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">stage %d</text>\n", LEFT - 6, stage * ROW + 14, stage);
        PageRow row = {scale, LEFT, stage * ROW + 2, ROW - 4};
        page_stage(f, r, stage, row);
    }
    for (int i = 0; i <= ticks; i++)
        fprintf(f,
                "<line x1=\"%d\" x2=\"%d\" y1=\"0\" y2=\"%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%d\" "
                "text-anchor=\"middle\">%.3g s</text>\n",
                LEFT + i * WIDTH / ticks, LEFT + i * WIDTH / ticks, stages * ROW + 4, LEFT + i * WIDTH / ticks,
                stages * ROW + 18, r->seconds * i / ticks);
    fprintf(f, "</svg>\n");
}

static void page_traffic(FILE *f, const Plan *p, const Cluster *c, const Estimate *e) {
    const Mesh *m = p->mesh;
    double most = 1;
    for (int a = 0; a < AXES; a++) most = fmax(most, axis_bytes(p, a));
    fprintf(f,
            "<h2>Traffic</h2>\n<table><tr><th>axis<th>groups<th>ranks of a group%s<th>a rank receives in a "
            "step<th>%s</tr>\n",
            c ? "<th>hosts<th>racks" : "", e ? "<th>exchange<th>waited for" : "");
    for (int a = 0; a < AXES; a++) {
        int ranks = mesh_group_size(m, (Axis)a);
        if (ranks == 1 || a == AXIS_DP_SHARD) continue;
        fprintf(f, "<tr><td>%s<td>%d<td>%d", axis_names[a], m->world / ranks, ranks);
        if (c) fprintf(f, "<td>%d", group_spans(m, (Axis)a, c->ranks_per_host));
        if (c && c->hosts_per_rack)
            fprintf(f, "<td>%d", group_spans(m, (Axis)a, c->ranks_per_host * c->hosts_per_rack));
        else if (c) fprintf(f, "<td>");
        fprintf(f,
                "<td>%.3f GB<td><svg class=bar viewBox=\"0 0 200 12\"><rect width=\"%.1f\" height=\"12\" "
                "fill=\"%s\"/></svg>",
                axis_bytes(p, a) / 1e9, 200 * axis_bytes(p, a) / most, axis_colours[a]);
        if (e) fprintf(f, "<td>%.4g s<td>%.4g s", e->exchange[a], e->waited[a]);
        fprintf(f, "</tr>\n");
    }
    fprintf(f, "</table>\n");
}

/* `c` and `e` NULL: there is no estimate, and no timeline. */
static void page_write(FILE *f, const char *model, const Plan *p, const Replay *r, const Cluster *c, const Estimate *e,
                       int64_t tokens_per_step) {
    char mesh[160];
    mesh_print(mesh, sizeof mesh, p->mesh->size, 1);
    fprintf(f, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>");
    html_text(f, model);
    fprintf(
        f,
        " on %d ranks</title>\n<style>body{font:14px system-ui,sans-serif;max-width:1100px;margin:2em "
        "auto;color:#222}svg{width:100%%;font:11px system-ui,sans-serif}svg.bar{width:200px}"
        ".legend span{margin-right:1em}.legend "
        "i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}table{border-collapse:collapse}td,th{padding:."
        "2em .8em;text-align:right}td:first-child,th:first-child{text-align:left}</style></head><body>\n<h1>",
        p->mesh->world);
    html_text(f, model);
    fprintf(f, " on %d ranks</h1>\n<p>%s; %" PRId64 " tokens a step, in %s.</p>\n", p->mesh->world, mesh,
            tokens_per_step, PRECISION_NAME);
    if (e)
        fprintf(f, "<p>Estimated: a step takes %.4g s, %.0f tokens/s, %.1f %% of %.4g FLOP/s a rank; on ", e->step,
                e->tokens, 100 * e->mfu, c->peak),
            html_text(f, c->name), fprintf(f, ".</p>\n");
    page_memory(f, p, c ? c->memory : 0);
    if (e) page_timeline(f, r);
    page_traffic(f, p, c, e);
    fprintf(f, "</body></html>\n");
}
