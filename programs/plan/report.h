/* report.h: the files of a plan: plan.html, the page of run.html with the numbers of the plan in it (memory of every
 * kind of rank, the pipeline's timeline, traffic by axis), and the estimated timeline for --trace. */
#ifndef REPORT_H
#define REPORT_H
#include "estimate.h" // defines: Plan, Simulation, Estimate, Cluster, axis_bytes

// ---------------------------------------------------------------------------
// the step's timeline

typedef enum { DOES_FORWARD, DOES_LOSS, DOES_BACKWARD, DOES_REST, STAGE_WORKS, DOES_NOTHING = -1 } StageWork;
static const char *const activity_names[STAGE_WORKS] = {"forward", "loss", "backward", "the rest of the step"};

/* [activity, begin, end], in seconds */
static void add_bar(cJSON *bars, StageWork activity, double begin, double end) {
    cJSON *bar = cJSON_CreateArray();
    cJSON_AddItemToArray(bar, cJSON_CreateNumber(activity));
    cJSON_AddItemToArray(bar, json_real("%.9g", begin));
    cJSON_AddItemToArray(bar, json_real("%.9g", end));
    cJSON_AddItemToArray(bars, bar);
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
static cJSON *stage_bars(const Simulation *s, int stage) {
    const SimRank *r = &s->ranks[stage * mesh_stride(&s->mesh, AXIS_PP)];
    cJSON *bars = cJSON_CreateArray();
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
            add_bar(bars, activity, begin, now);
            begin = now;
        }
        if (compute > 0) activity = next;
        now += compute;
        if (ends && now > begin && activity != DOES_NOTHING) {
            add_bar(bars, activity, begin, now);
            activity = DOES_NOTHING;
        }
        int waits = event && event->is_wait && (!list->num_points || event->stream == STREAM_COMPUTE);
        if (waits) now = fmax(now, r->times[i].end);
        if (ends) begin = now;
    }
    return bars;
}

// ---------------------------------------------------------------------------
// the numbers of the page

static void json_add_real(cJSON *object, const char *key, double value) {
    cJSON_AddItemToObject(object, key, json_real("%.9g", value));
}

/* The ranks of a class and their memory by category, without what is offloaded. */
static cJSON *report_class(const Plan *p, int class_index) {
    const Device *dry_run = p->classes[class_index].dry_run;
    cJSON *row = cJSON_CreateObject();
    char *name;
    size_t size;
    FILE *text = text_stream_open(&name, &size);
    print_class_ranks(text, p, class_index);
    text_stream_close(text);
    name[strcspn(name, "\n")] = 0;
    cJSON_AddStringToObject(row, "ranks", name);
    free(name);
    json_add_integer(row, "peak", (int64_t)device_peak(dry_run));
    cJSON *memory = cJSON_AddObjectToObject(row, "memory");
    for (int category = 0; category < MEM_CATEGORIES; category++) {
        const Arena *a = &dry_run->arenas[category];
        json_add_integer(memory, mem_category_names[category], a->offloaded ? 0 : (int64_t)a->peak);
    }
    return row;
}

/* Traffic over an axis. Without a cluster there is neither time nor hosts. */
static cJSON *report_axis(const Plan *p, const Cluster *c, const Estimate *e, int axis) {
    const Mesh *mesh = p->mesh;
    int ranks = mesh_group_size(mesh, (Axis)axis);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "axis", axis_names[axis]);
    cJSON_AddNumberToObject(row, "groups", mesh->world / ranks);
    cJSON_AddNumberToObject(row, "ranks", ranks);
    json_add_real(row, "bytes", axis_bytes(p, axis));
    if (!c) return row;
    int per_rack = c->ranks_per_host * c->hosts_per_rack;
    cJSON_AddNumberToObject(row, "hosts", group_spans(mesh, (Axis)axis, c->ranks_per_host));
    if (per_rack) cJSON_AddNumberToObject(row, "racks", group_spans(mesh, (Axis)axis, per_rack));
    json_add_real(row, "communication", e->communication[axis]);
    json_add_real(row, "waited", e->waited[axis]);
    return row;
}

static void add_estimate(cJSON *root, const Simulation *s, const Cluster *c, const Estimate *e) {
    cJSON *estimate = cJSON_AddObjectToObject(root, "estimate");
    json_add_name(estimate, "cluster", c->name);
    json_add_real(estimate, "step_seconds", e->step_seconds);
    json_add_real(estimate, "tokens_per_s", e->tokens_per_second);
    json_add_real(estimate, "mfu", e->mfu);
    json_add_real(estimate, "peak", c->peak);
    json_add_real(estimate, "flops", e->flops);
    json_add_real(estimate, "memory", c->memory);
    json_add_real(estimate, "seconds", s->seconds);
    cJSON *activities = cJSON_AddArrayToObject(estimate, "activities");
    for (int a = 0; a < STAGE_WORKS; a++) cJSON_AddItemToArray(activities, cJSON_CreateString(activity_names[a]));
    cJSON *stages = cJSON_AddArrayToObject(estimate, "stages");
    for (int stage = 0; stage < s->mesh.size[AXIS_PP]; stage++) cJSON_AddItemToArray(stages, stage_bars(s, stage));
}

/* `c` NULL: there is no estimate and no timeline. `goodput`: of plan.json; NULL: failures were not simulated. */
static cJSON *report_json(const Job *j, const Plan *p, const Simulation *s, const Cluster *c, const Estimate *e,
                          const cJSON *goodput) {
    char mesh[160];
    cJSON *root = cJSON_CreateObject();
    mesh_print(mesh, sizeof mesh, p->mesh->size, 1);
    cJSON_AddStringToObject(root, "model", j->run.model);
    cJSON_AddNumberToObject(root, "world", p->mesh->world);
    cJSON_AddStringToObject(root, "precision", PRECISION_NAME);
    cJSON_AddStringToObject(root, "sharding", strategies[j->run.sharding].name);
    cJSON_AddStringToObject(root, "mesh", mesh);
    json_add_integer(root, "tokens_per_step", samples_per_step(&j->run, &j->mesh) * j->run.seq);
    json_add_integer(root, "parameters", j->table.num_parameters);
    if (c) add_estimate(root, s, c, e);
    cJSON *classes = cJSON_AddArrayToObject(root, "classes"), *axes = cJSON_AddArrayToObject(root, "axes");
    for (int k = 0; k < p->count; k++) cJSON_AddItemToArray(classes, report_class(p, k));
    for (int a = 0; a < AXES; a++)
        if (mesh_group_size(p->mesh, (Axis)a) > 1 && a != AXIS_DP_SHARD)
            cJSON_AddItemToArray(axes, report_axis(p, c, e, a));
    if (goodput) cJSON_AddItemToObject(root, "goodput", cJSON_Duplicate(goodput, 1));
    return root;
}

/* Writes the page of run.html with these numbers in place of run-data.js, and deletes them. */
static void report_write(FILE *f, cJSON *numbers) {
    static const char place[] = "<script src=\"run-data.js\"></script>";
    const char *at = strstr(run_html, place);
    char *text = json_text(numbers, 0);
    fprintf(f, "%.*s<script>var plan_data = ", (int)(at - run_html), run_html);
    json_write_inert(f, text, strlen(text), "");
    fprintf(f, ";</script>%s", at + strlen(place));
    free(text);
}

/* Writes plan.html into --out. */
static void report_write_file(const char *out, const Job *j, const Plan *p, const Simulation *s, const Cluster *c,
                              const Estimate *e, const cJSON *goodput) {
    FILE *f = out_file_create(out, "plan.html");
    report_write(f, report_json(j, p, s, c, e, goodput));
    if (fclose(f)) user_error("cannot write plan.html in --out %s: %s", out, strerror(errno));
}

/* Writes --trace: the timeline of the first rank of each pipeline stage, whose times the simulation has recorded. */
static void write_simulated_trace(const Job *j, const Simulation *s) {
    FILE *f = fopen(j->run.trace, "w");
    if (!f) user_error("cannot write --trace %s: %s", j->run.trace, strerror(errno));
    fputs(trace_header, f);
    for (int stage = 0; stage < j->mesh.size[AXIS_PP]; stage++) {
        int rank = stage * mesh_stride(&j->mesh, AXIS_PP), simulated = stage * mesh_stride(&s->mesh, AXIS_PP);
        Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
        dry_run_open(dry_run, j, rank, NULL);
        simulated_timeline(s, simulated, &dry_run->parallel.dev);
        trace_write_events(f, &dry_run->parallel.dev.rec, rank, 0, 0);
        trainer_close(dry_run);
        free(dry_run);
    }
    fputs(trace_footer, f);
    if (fclose(f)) user_error("cannot write --trace %s: %s", j->run.trace, strerror(errno));
}

#endif
