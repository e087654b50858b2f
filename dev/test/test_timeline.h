/* test_timeline.h: the timeline of --trace has every rank, op, step and collective of a run, in memory that the dry run
 * predicts. Part of test_llama3.cu. */
#include "timeline.h"

static int64_t traced_allocations; // of the third step
static int64_t traced_calls[2];    // of fsdp and of world, in a step of rank 0
static int64_t traced_ops;         // of a step of rank 0
static int traced_memory_equal;    // ranks whose timeline has the memory of the dry run
static int traced_room;            // events; 0: as many as are needed

static void trace_body(Job *j, int rank) {
    clock_ahead = 1000 * rank;
    Opened *o = open_rank(j, rank);
    Trainer *trainer = &o->trainer;
    if (traced_room) trainer->parallel.dev.rec.max_events = traced_room;
    pthread_mutex_lock(&trainer->loader.lock);
    trainer->loader.steps++; // one more below
    pthread_mutex_unlock(&trainer->loader.lock);
    if (rank == 0)
        logger_open(&trainer->logger, j->options, &j->run, &trainer->parallel.comm, &trainer->dry_run->parallel.dev,
                    &trainer->progress, 0, 0);
    train(trainer);
    int equal =
        o->dry_run.parallel.dev.arenas[MEM_HOST].peak == trainer->parallel.dev.arenas[MEM_HOST].peak &&
        trainer->parallel.dev.arenas[MEM_HOST].peak > sizeof(Event) * (size_t)trainer->parallel.dev.rec.max_events;
    Loader *l = &trainer->loader;
    l->stop = 0; // train has closed the loader, perhaps before its workers had read the step that follows
    while (l->claimed < l->steps * l->samples) loader_read(l, loader_claim(l), l->workers[0].raw);
    l->stop = 1;
    int64_t before = own_allocations;
    train_step(trainer, trainer->job->run.steps + 1);
    __atomic_fetch_add(&traced_allocations, own_allocations - before, __ATOMIC_RELAXED);
    __atomic_fetch_add(&traced_memory_equal, equal, __ATOMIC_RELAXED);
    if (rank == 0) {
        for (int op = 0; op < COLLECTIVES; op++) {
            traced_calls[0] += o->dry_run.parallel.comm.traffic_started[AXIS_FSDP][op].calls;
            traced_calls[1] += o->dry_run.parallel.comm.traffic_started[AXIS_WORLD][op].calls;
        }
        for (int i = 0; i < OP_COUNT; i++) traced_ops += o->dry_run.parallel.dev.rec.ops[i].calls;
    }
    close_rank(o);
    clock_ahead = 0;
}

/* Trains `steps` steps with --trace; sets the counts above. */
static TraceFound trace_run(const char *name, int process, int world, int steps, int room, const Transport *transport) {
    char arguments[1024], path[256];
    snprintf(path, sizeof path, "%s/%s", scratch_dir, name);
    snprintf(arguments, sizeof arguments,
             "--model %s/odd --data %s --seq 16 --batch 2 --accum 2 --slots 3 --steps %d --timeout 60 --trace %s",
             FIXTURES, make_token_file("trace.tok", 6000, 64, 0), steps, path);
    traced_allocations = 0;
    traced_calls[0] = 0;
    traced_calls[1] = 0;
    traced_ops = 0;
    traced_memory_equal = 0;
    traced_room = room;
    Job *j = make_job(arguments, world, transport);
    if (process == 0) unlink(path); // of an earlier run: a timeline never replaces a file
    launch(j, process, trace_body);
    end_job(j);
    return read_trace(path);
}

static void check_trace(const char *name, TraceFound t, int world, int steps, const Transport *transport) {
    char what[160];
    int of_threads = transport == &transport_threads ? world : 1; // whose figures this process has
    snprintf(what, sizeof what, "%s: a timeline of %d ranks over %s has every rank, op, step and collective", name,
             world, transport->name);
    CHECK(what,
          t.valid && t.ranks == world && t.lanes >= world * (world > 1 ? 3 : 1) && t.ops == steps * (int)traced_ops &&
              t.steps == world * steps && t.phases > t.steps && t.fsdp == world * steps * (int)traced_calls[0] &&
              t.world == world * steps * (int)traced_calls[1],
          "%d ranks, %d lanes, %d ops of %d, %d collectives over fsdp of %d, %d over world of %d, %d waits", t.ranks,
          t.lanes, t.ops, steps * (int)traced_ops, t.fsdp, world * steps * (int)traced_calls[0], t.world,
          world * steps * (int)traced_calls[1], t.waits);
    snprintf(what, sizeof what, "%s: events of a lane follow or nest, over %s", name, transport->name);
    CHECK(what, t.events > 0 && t.overlaps == 0, "%d of %d overlap", t.overlaps, t.events);
    snprintf(what, sizeof what, "%s: ranks whose clocks are 1000 s apart are aligned, over %s", name, transport->name);
    CHECK(what, t.apart < 0.02,
          "the last rank started a step's report at most %.2g s after the first had finished it, < 0.02", t.apart);
    snprintf(what, sizeof what, "%s: the dry run predicts the timeline's memory, and no step allocates, over %s", name,
             transport->name);
    CHECK(what, traced_memory_equal == of_threads && traced_allocations == 0, "%d of %d ranks, %" PRId64 " allocations",
          traced_memory_equal, of_threads, traced_allocations);
}

static void test_trace(int process, int world, const Transport *transport) {
    TraceFound t = trace_run("timeline.json", process, world, 3, 0, transport);
    if (process) return;
    check_trace("--trace", t, world, 3, transport);
    CHECK("the timeline counts gathered weights while they are in use, and none after a step",
          t.counters > 0 && (t.most_gathered > 0) == (world > 1) && t.last_gathered == 0,
          "%d ranks: %d values of counters; at most %.0f bytes, %.0f at the end", world, t.counters, t.most_gathered,
          t.last_gathered);
}

static void test_timeline(void) {
    test_trace(0, 1, &transport_threads);
    test_trace(0, 2, &transport_threads);
    test_trace(0, 3, &transport_threads);
    TraceFound full = trace_run("full.json", 0, 2, 3, 400, &transport_threads);
    CHECK("a timeline without room for more events stops, and is a valid file",
          full.valid && full.events + full.counters == 2 * 400 && full.overlaps == 0,
          "%d events and %d values of counters, 2 x 400 in all, %d overlap", full.events, full.counters, full.overlaps);
}
