/* ledger.h: what the first training step was expected to cost, and what it did cost (ledger.json).
 *
 * Every collective is known three times: "expected" by the traffic formula (traffic.h), "dry_run" by executing the step
 * with the arithmetic off, and "measured" where the transport moves the bytes. Memory is known twice: by the dry run
 * and by the arenas. After the first step all figures must be equal on every rank, or the run stops and prints them.
 */
#ifndef LEDGER_H
#define LEDGER_H
#include "../lib/json.h" // defines: json_add_integer, json_add_flops, json_write_line
#include "traffic.h" // defines: expected_traffic

typedef struct {
    Traffic expected[AXES][COLLECTIVES], dry_run[AXES][COLLECTIVES], measured[AXES][COLLECTIVES];
    size_t dry_run_memory[MEM_CATEGORIES], measured_memory[MEM_CATEGORIES]; // peak bytes
} Ledger;

static int traffic_equal(Traffic a, Traffic b) { return a.calls == b.calls && a.bytes == b.bytes; }

static int is_unused(Traffic t) { return !t.calls && !t.bytes; }

/* The three figures of one row: "calls" or "bytes". */
static void ledger_print_row(FILE *f, const char *axis, const char *collective, const int64_t figures[3],
                             const char *unit, int equal) {
    fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " %s%s\n", axis, collective, figures[0],
            figures[1], figures[2], unit, equal ? "" : "  <- different");
}

/* Prints the ledger, or only counts if `f` is NULL. Returns how many rows differ. */
static int ledger_print(const Ledger *l, FILE *f) {
    int differences = 0;
    if (f) fprintf(f, "  %-13s %-15s %14s %14s %14s\n", "axis", "collective", "expected", "dry run", "measured");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int axis = i / COLLECTIVES, op = i % COLLECTIVES;
        Traffic expected = l->expected[axis][op], dry_run = l->dry_run[axis][op], measured = l->measured[axis][op];
        int equal = traffic_equal(expected, dry_run) && traffic_equal(dry_run, measured);
        differences += !equal;
        if (!f || (is_unused(expected) && is_unused(dry_run) && is_unused(measured))) continue;
        int64_t calls[3] = {expected.calls, dry_run.calls, measured.calls};
        int64_t bytes[3] = {expected.bytes, dry_run.bytes, measured.bytes};
        ledger_print_row(f, axis_names[axis], collective_names[op], calls, "calls", equal);
        ledger_print_row(f, "", "", bytes, "bytes", equal);
    }
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        int equal = l->dry_run_memory[c] == l->measured_memory[c];
        differences += !equal;
        if (f)
            fprintf(f, "  %-13s %-15s %14s %14zu %14zu bytes%s\n", "memory", mem_category_names[c], "",
                    l->dry_run_memory[c], l->measured_memory[c], equal ? "" : "  <- different");
    }
    return differences;
}

static void ledger_check(const Ledger *l, int rank) {
    int differences = ledger_print(l, NULL);
    if (!differences) return;
    ledger_print(l, stderr);
    run_failure("rank %d: expected, dry-run and measured figures of the first step differ in %d rows (table above): "
                "the program did not communicate or allocate what these options ask for, which is a bug in it",
                rank, differences);
}

// ---------------------------------------------------------------------------
// JSON

/* {"expected":…,"dry_run":…} and, if `measured` is not NULL, "measured". */
static void json_add_figures(cJSON *row, const char *key, int64_t expected, int64_t dry_run, const int64_t *measured) {
    cJSON *figures = cJSON_AddObjectToObject(row, key);
    json_add_integer(figures, "expected", expected);
    json_add_integer(figures, "dry_run", dry_run);
    if (measured) json_add_integer(figures, "measured", *measured);
}

/* Adds "traffic": one row for each axis and collective that is used. `measured` NULL: before the run, in plan.json. */
static void json_add_traffic(cJSON *parent, const Traffic expected[AXES][COLLECTIVES],
                             const Traffic dry_run[AXES][COLLECTIVES], const Traffic measured[AXES][COLLECTIVES]) {
    cJSON *rows = cJSON_AddArrayToObject(parent, "traffic");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int axis = i / COLLECTIVES, op = i % COLLECTIVES;
        Traffic e = expected[axis][op], d = dry_run[axis][op], m = measured ? measured[axis][op] : d;
        if (is_unused(e) && is_unused(d) && is_unused(m)) continue;
        cJSON *row = cJSON_CreateObject();
        cJSON_AddStringToObject(row, "axis", axis_names[axis]);
        cJSON_AddStringToObject(row, "op", collective_names[op]);
        json_add_figures(row, "calls", e.calls, d.calls, measured ? &m.calls : NULL);
        json_add_figures(row, "bytes", e.bytes, d.bytes, measured ? &m.bytes : NULL);
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
        if (dry_run->ops[i].calls) json_add_flops(flops, op_names[i], dry_run->ops[i].flops);
}

static void ledger_write(const Ledger *l, const Device *dry_run, FILE *f) {
    cJSON *root = cJSON_CreateObject();
    json_add_traffic(root, l->expected, l->dry_run, l->measured);
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
