/* trace.h: the timeline of all ranks as a Chrome trace file (--trace), for chrome://tracing and ui.perfetto.dev.
 *
 * In the file a process is a rank and a thread is a lane: a stream, or collectives of one axis. A caller may rely on:
 * ranks' clocks are aligned; the file appears under its name only when all of it is written.
 */
#ifndef TRACE_H
#define TRACE_H
#include "../lib/comm.h" // defines: Comm, Device, comm_clock_offset, comm_barrier
#include "out_dir.h"     // defines: write_all

/* What happened since `events` that is no part of a step is one event of the timeline. */
static void trace_as_one_event(Device *dev, int64_t events, const char *name, double start) {
    events_drop(dev, events);
    event_add(dev, EVENT_PHASE, STREAM_COMPUTE, name, NULL, start, seconds_now(), 0);
}

/* A file that is there already, or cannot be made, is refused before the run. */
static void trace_check(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST)
        user_error("--trace %s exists already: choose another name, or remove it first", path);
    if (fd < 0) user_error("cannot write --trace %s: %s", path, strerror(errno));
    close(fd);
    unlink(path);
}

static const char trace_header[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", trace_footer[] = "\n]}\n";

/* One rank's events. Times count from `zero`, by the clock that the events have; whole nanoseconds, so that what
 * follows or lies within does so in the file too. */
static void trace_write_events(FILE *f, const Device *dev, int rank, double zero, double clock_error) {
    static const char *const kinds[] = {"op", "wait", "phase", "step", "exchange"}, *const amounts[] = {"flops", NULL,
                                                                                                        NULL, "step",
                                                                                                        "bytes"};
    enum { LANES = (int)STREAMS + (int)AXES * (MAX_IN_FLIGHT + 1) };
    char named[LANES] = "";
    fprintf(f, "%s{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}",
            rank ? ",\n" : "", rank, rank);
    fprintf(f,
            ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_labels\",\"args\":{\"labels\":\"clock within %.0f us of "
            "rank 0's\"}}",
            rank, 1e6 * clock_error);
    for (int64_t i = 0; i < min_i64(dev->num_events, dev->max_events); i++) {
        const Event *e = &dev->events[i];
        int exchanges = e->lane - STREAMS,
            row = exchanges < 0 ? 1 : exchanges / AXES + 1; // lanes of streams come first
        const char *lane = exchanges < 0 ? stream_names[e->lane] : axis_names[exchanges % AXES];
        if (!named[e->lane]) {
            fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s", rank,
                    e->lane, lane);
            fprintf(f, row > 1 ? " %d\"}}" : "\"}}", row);
        }
        named[e->lane] = 1;
        int64_t start = llround(1e9 * (e->start - zero)), took = llround(1e9 * (e->end - zero)) - start; // ns
        fprintf(f,
                ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%" PRId64 ".%03d,\"dur\":%" PRId64
                ".%03d,\"cat\":\"%s\",\"name\":\"%s%s%s\"",
                rank, e->lane, start / 1000, (int)(start % 1000), took / 1000, (int)(took % 1000), kinds[e->kind],
                e->name, e->of ? ": " : "", e->of ? e->of : "");
        if (amounts[e->kind]) fprintf(f, ",\"args\":{\"%s\":%.0f}", amounts[e->kind], e->amount);
        fprintf(f, "}");
    }
}

/* All ranks write into one file, each its part at its place. Their clocks are aligned now, by exchanges. */
static void trace_write(Comm *comm, const char *path) {
    typedef struct {
        double first;
        int64_t bytes;
    } Part; // when it begins, by rank 0's clock
    Device *dev = comm->dev;
    Phase before = comm_phase(comm, PHASE_SAVING);
    device_finish(dev);                                          // the last ops have their times
    dev->max_events = min_i64(dev->max_events, dev->num_events); // it ends here: what follows is of the writing
    Part mine = ZERO, *all = (Part *)checked_malloc(sizeof mine * (size_t)comm->mesh.world);
    double error, offset = comm_clock_offset(comm, &error), zero = INFINITY;
    char *text, temporary[4096 + 16];
    size_t length;
    mine.first = dev->num_events ? dev->events[0].start - offset : INFINITY;
    all_gather_now(comm, AXIS_WORLD, "trace: first events", &mine, all, sizeof mine);
    for (int i = 0; i < comm->mesh.world; i++) zero = fmin(zero, all[i].first);
    FILE *f = open_memstream(&text, &length);
    if (!f) run_failure("out of memory");
    if (comm->rank == 0) fputs(trace_header, f);
    trace_write_events(f, dev, comm->rank, zero + offset, error);
    if (comm->rank == comm->mesh.world - 1) fputs(trace_footer, f);
    if (fclose(f)) run_failure("out of memory");
    mine.bytes = (int64_t)length;
    all_gather_now(comm, AXIS_WORLD, "trace: sizes", &mine, all, sizeof mine);
    int64_t at = 0;
    for (int i = 0; i < comm->rank; i++) at += all[i].bytes;
    snprintf(temporary, sizeof temporary, "%s.part", path);
    int fd = comm->rank == 0 ? open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    if (comm->rank == 0 && fd < 0) user_error("cannot write %s: %s", temporary, strerror(errno));
    comm_barrier(comm, "trace: file made");
    if (comm->rank) fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        user_error("rank %d cannot open %s (%s): --trace needs a directory that all hosts share", comm->rank, temporary,
                   strerror(errno));
    write_all(fd, temporary, text, length, at);
    if (close(fd)) user_error("cannot write %s: %s", temporary, strerror(errno));
    comm_barrier(comm, "trace: parts written");
    if (comm->rank == 0 && rename(temporary, path)) user_error("cannot rename %s: %s", temporary, strerror(errno));
    comm_barrier(comm, "trace: done");
    comm_phase(comm, before);
    free(text);
    free(all);
}

#endif
