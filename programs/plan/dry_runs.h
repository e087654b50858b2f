/* dry_runs.h: the dry runs of a plan, on all cores, and the communication events of every rank, from which a step of
 * all ranks is simulated. A caller may rely on: the result does not depend on the number of cores. */
#ifndef DRY_RUNS_H
#define DRY_RUNS_H
#include "comm_events.h"       // defines: CommEvents, NameTable, comm_events_clear
#include "../shared/program.h" // defines: Plan, plan_begin, plan_representative, dry_run_open, Job

/* Which ranks get a dry run of their own. */
typedef enum {
    DRY_RUN_STAGES, // one rank of each pipeline stage: enough to compare layouts
    DRY_RUN_SHARDS, // one of each pipeline stage and tensor-parallel rank; with Muon also of each number of blocks
    DRY_RUN_ALL     // every rank
} DryRunKind;

typedef struct { // ranks whose lists are equal share one
    DryRunKind kind;
    NameTable names;
    CommEvents *lists; // (count)
    int count;
    int *list_of; // (world) index into lists
} EventLists;

/* A fingerprint of words of 64 bits, `bytes` bytes in all, faster than hash_bytes. Each step is invertible, so that a
 * single difference is never lost. */
static uint64_t hash_words(uint64_t h, const void *words, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word;
        memcpy(&word, (const char *)words + at, sizeof word);
        h = ((h ^ h >> 29) ^ word) * 0x9E3779B97F4A7C15ull;
    }
    return h;
}

static uint64_t comm_events_hash(const CommEvents *e) {
    uint64_t h = hash_words(HASH_START, e->events, sizeof(CommEvent) * (size_t)e->count);
    return hash_words(h, e->points, sizeof(StreamPoint) * (size_t)e->num_points);
}

/* Replaces name ids of the recording thread's own table by ids of the table that all lists share. */
static void event_lists_rename(EventLists *l, CommEvents *events) {
    int32_t *ids = new_array(int32_t, events->names->count + 1);
    for (int i = 0; i < events->names->count; i++) ids[i] = -1;
    for (int64_t k = 0; k < events->count; k++) {
        CommEvent *e = &events->events[k];
        int32_t *const named[] = {&e->name, &e->phase};
        for (int n = 0; n < 2; n++) {
            if (*named[n] < 0) continue;
            int32_t *id = &ids[*named[n]];
            if (*id < 0) *id = name_id(&l->names, events->names->text[*named[n]]);
            *named[n] = *id;
        }
    }
    events->names = &l->names;
    free(ids);
}

/* Keeps a copy of `events` as the list of `rank`, or refers to an equal list of another rank. */
static void event_lists_keep(EventLists *l, int rank, const CommEvents *events) {
    uint64_t hash = comm_events_hash(events);
    int i = 0;
    while (i < l->count && (l->lists[i].hash != hash || l->lists[i].count != events->count)) i++;
    l->list_of[rank] = i;
    if (i < l->count) return;
    l->lists = (CommEvents *)checked_realloc(l->lists, sizeof *l->lists * (size_t)(i + 1));
    CommEvents *copy = &l->lists[l->count++];
    *copy = *events;
    copy->hash = hash;
    copy->event_room = (size_t)events->count;
    copy->point_room = (size_t)events->num_points;
    copy->events = new_array(CommEvent, events->count);
    if (events->count) memcpy(copy->events, events->events, sizeof(CommEvent) * (size_t)events->count);
    copy->points = new_array(StreamPoint, events->num_points);
    if (events->num_points) memcpy(copy->points, events->points, sizeof(StreamPoint) * (size_t)events->num_points);
}

static void event_lists_close(EventLists *l) {
    for (int i = 0; i < l->count; i++) {
        free(l->lists[i].events);
        free(l->lists[i].points);
    }
    name_table_close(&l->names);
    free(l->lists);
    free(l->list_of);
    memset(l, 0, sizeof *l);
}

// ---------------------------------------------------------------------------
// the dry runs

/* The rank whose dry run stands for `rank`. */
static int dry_run_representative(const Plan *p, DryRunKind kind, int rank) {
    int stage = mesh_coordinate(p->mesh, rank, AXIS_PP);
    if (kind == DRY_RUN_STAGES) return stage * mesh_stride(p->mesh, AXIS_PP);
    return kind == DRY_RUN_ALL ? rank : plan_representative(p, rank);
}

/* Adds the dry run of `rank` to the plan. `dry_run` NULL: `rank` uses the result of its representative. */
static void plan_keep(Plan *p, EventLists *lists, int rank, Trainer *dry_run, CommEvents *recorded) {
    if (dry_run) {
        event_lists_rename(lists, recorded);
        event_lists_keep(lists, rank, recorded);
        plan_take(p, rank, dry_run);
    } else {
        int representative = dry_run_representative(p, lists->kind, rank);
        p->class_of[rank] = p->class_of[representative];
        lists->list_of[rank] = lists->list_of[representative];
    }
}

/* Dry-runs the representatives of all ranks in parallel, and adds results in the order of ranks. */
static void plan_dry_run(Plan *p, const Job *j, DryRunKind kind, EventLists *lists) {
    plan_begin(p, j);
    memset(lists, 0, sizeof *lists);
    lists->kind = kind;
    lists->list_of = new_array(int, j->mesh.world);
#pragma omp parallel
    {
        CommEvents recorded = ZERO;
        NameTable names = ZERO; // of this thread
#pragma omp for ordered schedule(dynamic, 1)
        for (int rank = 0; rank < j->mesh.world; rank++) {
            Trainer *dry_run = NULL;
            if (dry_run_representative(p, kind, rank) == rank) {
                dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
                comm_events_clear(&recorded, &names);
                dry_run_open(dry_run, j, rank, &recorded.recorder);
                recorded.compute_after =
                    dry_run->parallel.dev.rec.clock - recorded.compute_total; // since the last event
            }
#pragma omp ordered
            plan_keep(p, lists, rank, dry_run, &recorded);
        }
        name_table_close(&names);
        free(recorded.events);
        free(recorded.points);
    }
}

#endif
