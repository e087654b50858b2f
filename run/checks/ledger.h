/* ledger.h: what the first training step was expected to cost, and what it did cost (ledger.json).
 *
 * Every collective is known three times: "expected" by the traffic formula (traffic.h), "dry_run" by executing the step
 * with the arithmetic off, and "measured" where the transport moves the bytes. Memory is known twice: by the dry run
 * and by the arenas. After the first step all figures must be equal on every rank, or the run stops and prints them.
 */
#ifndef LEDGER_H
#define LEDGER_H
#include "../../lib/io/json.h" // defines: json_add_integer, json_add_flops, text_stream_open
#include "traffic.h"           // defines: expected_traffic

typedef enum { EXPECTED, DRY_RUN, MEASURED, SOURCES } FigureSource;

typedef struct {
    Traffic traffic[SOURCES][AXES][COLLECTIVES];
    size_t dry_run_memory[MEM_CATEGORIES], measured_memory[MEM_CATEGORIES]; // peak bytes
} Ledger;

static int traffic_equal(Traffic a, Traffic b) { return a.calls == b.calls && a.bytes == b.bytes; }

static int is_unused(Traffic t) { return !t.calls && !t.bytes; }

/* Ends the run if any figures differ, after it has printed all of them. */
static void ledger_check(const Ledger *l, int rank) {
    int differences = 0;
    char *table;
    size_t length;
    FILE *f = text_stream_open(&table, &length);
    fprintf(f, "  %-13s %-15s %14s %14s %14s\n", "axis", "collective", "expected", "dry run", "measured");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int axis = i / COLLECTIVES, op = i % COLLECTIVES;
        Traffic expected = l->traffic[EXPECTED][axis][op], dry_run = l->traffic[DRY_RUN][axis][op];
        Traffic measured = l->traffic[MEASURED][axis][op];
        int equal = traffic_equal(expected, dry_run) && traffic_equal(expected, measured);
        const char *mark = equal ? "" : "  <- different";
        differences += !equal;
        if (equal && is_unused(expected)) continue;
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " calls%s\n", axis_names[axis],
                collective_names[op], expected.calls, dry_run.calls, measured.calls, mark);
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " bytes%s\n", "", "", expected.bytes,
                dry_run.bytes, measured.bytes, mark);
    }
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        int equal = l->dry_run_memory[c] == l->measured_memory[c];
        differences += !equal;
        fprintf(f, "  %-13s %-15s %14s %14zu %14zu bytes%s\n", "memory", mem_category_names[c], "",
                l->dry_run_memory[c], l->measured_memory[c], equal ? "" : "  <- different");
    }
    text_stream_close(f);
    if (differences) {
        fputs(table, stderr);
        run_failure("%s: expected, dry-run and measured figures of the first step differ in %d rows (table above): "
                    "the program did not communicate or allocate what these options ask for, which is a bug in it",
                    rank_name(rank), differences);
    }
    free(table);
}

// ---------------------------------------------------------------------------
// JSON

/* Adds "traffic": one row for each axis and collective that is used, with its calls and bytes from the first `sources`
 * sources. */
static void json_add_traffic(cJSON *parent, const Traffic traffic[][AXES][COLLECTIVES], int sources) {
    static const char *const names[SOURCES] = {"expected", "dry_run", "measured"};
    cJSON *rows = cJSON_AddArrayToObject(parent, "traffic");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int axis = i / COLLECTIVES, op = i % COLLECTIVES, used = 0;
        for (int source = 0; source < sources; source++) used |= !is_unused(traffic[source][axis][op]);
        if (!used) continue;
        cJSON *row = cJSON_CreateObject();
        cJSON_AddStringToObject(row, "axis", axis_names[axis]);
        cJSON_AddStringToObject(row, "op", collective_names[op]);
        cJSON *calls = cJSON_AddObjectToObject(row, "calls"), *bytes = cJSON_AddObjectToObject(row, "bytes");
        for (int source = 0; source < sources; source++) {
            json_add_integer(calls, names[source], traffic[source][axis][op].calls);
            json_add_integer(bytes, names[source], traffic[source][axis][op].bytes);
        }
        cJSON_AddItemToArray(rows, row);
    }
}

/* Adds "flops" of the dry run: "total", "recomputed" (activation checkpointing's second forward, part of no total) and
 * each op. */
static void json_add_flops_by_op(cJSON *parent, const Device *dry_run) {
    cJSON *flops = cJSON_AddObjectToObject(parent, "flops");
    json_add_flops(flops, "total", device_flops(dry_run, 0));
    if (device_flops(dry_run, 1) > 0) json_add_flops(flops, "recomputed", device_flops(dry_run, 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (dry_run->rec.ops[i].calls) json_add_flops(flops, op_names[i], dry_run->rec.ops[i].flops);
}

static void ledger_write(const Ledger *l, const Device *dry_run, FILE *f) {
    cJSON *root = cJSON_CreateObject();
    json_add_traffic(root, l->traffic, SOURCES);
    cJSON *memory = cJSON_AddArrayToObject(root, "memory");
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddStringToObject(row, "category", mem_category_names[c]);
        json_add_integer(row, "dry_run", (int64_t)l->dry_run_memory[c]);
        json_add_integer(row, "measured", (int64_t)l->measured_memory[c]);
        cJSON_AddItemToArray(memory, row);
    }
    json_add_flops_by_op(root, dry_run);
    json_write_line(f, root);
}

#endif
