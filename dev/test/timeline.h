/* timeline.h: reads a timeline that --trace has written, of a run or of a plan. */
#ifndef TEST_TIMELINE_H
#define TEST_TIMELINE_H

typedef struct {
    int pid, tid;
    int64_t start, end;
} Slice; // ns

/* If two slices start together, the longer one comes first. */
static int by_start(const void *a, const void *b) {
    const Slice *x = (const Slice *)a, *y = (const Slice *)b;
    if (x->pid != y->pid) return x->pid - y->pid;
    if (x->tid != y->tid) return x->tid - y->tid;
    if (x->start != y->start) return x->start > y->start ? 1 : -1;
    return (x->end < y->end) - (x->end > y->end);
}

/* Counts slices that begin within another slice of their lane and end after it; in lanes of communication, nested ones
 * count too. */
static int count_overlaps(Slice *s, int n) {
    int overlaps = 0, depth = 0;
    int64_t ends[64]; // of the slices that are open
    qsort(s, (size_t)n, sizeof *s, by_start);
    for (int i = 0; i < n; i++) {
        if (i == 0 || s[i].pid != s[i - 1].pid || s[i].tid != s[i - 1].tid) depth = 0;
        while (depth && ends[depth - 1] <= s[i].start) depth--;
        if (depth) overlaps += s[i].end > ends[depth - 1] || s[i].tid >= STREAMS;
        if (depth < 64) ends[depth++] = s[i].end;
    }
    return overlaps;
}

typedef struct {
    int valid, ranks, lanes, ops, phases, steps, waits, fsdp, world, overlaps, events, counters;
    double apart;
    double most_gathered, last_gathered; // bytes of gathered weights in use, of the last rank
} TraceFound;                            // counts over all ranks; `ops` of rank 0; `apart`: seconds

static int64_t json_ns(const cJSON *event, const char *key) {
    return llround(1000 * cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(event, key)));
}

enum { TRACED_REPORTS = 8, TRACED_RANKS = 16 };

typedef struct { // the step reports, which all ranks all-gather together
    int64_t last_start[TRACED_REPORTS], first_end[TRACED_REPORTS]; // ns, over all ranks
    int count[TRACED_RANKS];
} TracedReports;

/* Counts one event of the file. */
static void count_traced(TraceFound *t, TracedReports *reports, Slice *slice, const cJSON *e, const char *kind) {
    slice->pid = (int)json_ns(e, "pid") / 1000;
    slice->tid = (int)json_ns(e, "tid") / 1000;
    slice->start = json_ns(e, "ts");
    slice->end = slice->start + json_ns(e, "dur");
    t->valid &= slice->start >= 0 && slice->end >= slice->start;
    t->ops += !strcmp(kind, "op") && slice->pid == 0;
    t->phases += !strcmp(kind, "phase");
    t->steps += !strcmp(kind, "step");
    t->waits += !strcmp(kind, "wait");
    if (strcmp(kind, "communication")) return;
    int axis = (slice->tid - (int)STREAMS) % (int)AXES; // lanes of communication follow those of streams
    t->fsdp += axis == AXIS_FSDP;
    t->world += axis == AXIS_WORLD;
    if (axis != AXIS_WORLD || slice->pid >= TRACED_RANKS || reports->count[slice->pid] == TRACED_REPORTS) return;
    int report = reports->count[slice->pid]++;
    reports->last_start[report] = max_i64(reports->last_start[report], slice->start);
    reports->first_end[report] = min_i64(reports->first_end[report], slice->end);
}

/* Reads a counter of memory. */
static void count_counter(TraceFound *t, const cJSON *e, const char *name) {
    const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(e, "args"), "bytes");
    t->counters++;
    if (strcmp(name, "memory: gathered weights in use")) return;
    t->last_gathered = cJSON_GetNumberValue(bytes);
    t->most_gathered = fmax(t->most_gathered, t->last_gathered);
}

static TraceFound read_trace(const char *path) {
    TraceFound t = ZERO;
    TracedReports reports = ZERO;
    char *text = read_text_file(path);
    cJSON *root = text ? cJSON_Parse(text) : NULL, *list = cJSON_GetObjectItemCaseSensitive(root, "traceEvents"), *e;
    Slice *slices = (Slice *)checked_malloc(sizeof(Slice) * (size_t)(cJSON_GetArraySize(list) + 1));
    t.valid = cJSON_IsArray(list);
    for (int i = 0; i < TRACED_REPORTS; i++) reports.first_end[i] = INT64_MAX;
    cJSON_ArrayForEach(e, list) {
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "name"));
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "cat"));
        t.ranks += !strcmp(name, "process_name");
        t.lanes += !strcmp(name, "thread_name");
        if (!strncmp(name, "memory: ", 8)) count_counter(&t, e, name);
        if (kind) count_traced(&t, &reports, &slices[t.events++], e, kind);
    }
    for (int i = 0; i < TRACED_REPORTS && reports.first_end[i] < INT64_MAX; i++)
        t.apart = fmax(t.apart, 1e-9 * (double)(reports.last_start[i] - reports.first_end[i]));
    t.overlaps = count_overlaps(slices, t.events);
    free(slices);
    cJSON_Delete(root);
    free(text);
    return t;
}

#endif
