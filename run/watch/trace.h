/* trace.h: the timeline of all ranks as a Chrome trace file (--trace), for chrome://tracing and ui.perfetto.dev.
 *
 * In the file a process is a rank, and a thread is a stream of that rank or one collective in flight on an axis. A
 * caller may rely on: the clocks of all ranks are aligned; the file appears under its name only when it is complete.
 */
#ifndef TRACE_H
#define TRACE_H
#include "../../lib/comm/comm.h"   // defines: Comm, Device, comm_clock_offset, comm_barrier
#include "../checkpoint/out_dir.h" // defines: write_all
#include <fcntl.h>

/* Replaces the events since number `events` by one event: work outside of a training step, such as a validation. */
static void trace_as_one_event(Device *dev, int64_t events, const char *name, double start) {
    timeline_truncate(dev, events);
    event_add(dev, EVENT_PHASE, STREAM_COMPUTE, name, NULL, start, seconds_now(), 0);
}

/* Refuses, before training starts, a file that exists or cannot be created. */
static void trace_check(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST)
        user_error("--trace %s exists already: choose another name, or remove the file first", path);
    if (fd < 0)
        user_error("cannot create --trace %s: %s; choose a file in a directory that you can write to", path,
                   strerror(errno));
    close(fd);
    unlink(path);
}

static const char trace_header[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", trace_footer[] = "\n]}\n";

/* Writes one rank's events. Times count from `zero`, on the clock of the events. They are whole nanoseconds, so that
 * events that follow each other or nest do so in the file, too. */
static void trace_write_events(FILE *f, const Recorder *rec, int rank, double zero, double clock_error) {
    static const char *const kinds[] = {"op", "wait", "phase", "step", "communication"};
    static const char *const amounts[] = {"flops", NULL, NULL, "step", "bytes"};
    enum { LANES = (int)STREAMS + (int)AXES * (MAX_IN_FLIGHT + 1) };
    char is_named[LANES] = "";
    fprintf(f, "%s{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}",
            rank ? ",\n" : "", rank, rank);
    fprintf(f,
            ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_labels\",\"args\":{\"labels\":\"clock within %.0f us of "
            "rank 0's\"}}",
            rank, 1e6 * clock_error);
    for (int64_t i = 0; i < min_i64(rec->num_events, rec->max_events); i++) {
        const Event *e = &rec->events[i];
        int64_t start = llround(1e9 * (e->start - zero)), took = llround(1e9 * (e->end - zero)) - start; // ns
        if (e->kind == EVENT_MEMORY) {
            // A counter: the bytes of a memory category or of FSDP's buffers that are in use from `start` on
            fprintf(f,
                    ",\n{\"ph\":\"C\",\"pid\":%d,\"ts\":%" PRId64
                    ".%03d,\"name\":\"memory: %s\",\"args\":{\"bytes\":%.0f}}",
                    rank, start / 1000, (int)(start % 1000), e->name, e->amount);
            continue;
        }
        if (!is_named[e->lane]) {
            // A lane is named after its stream, or after its axis and how many collectives are in flight beneath it.
            int axis = e->lane - STREAMS; // lanes of streams come first
            fprintf(f, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s", rank,
                    e->lane, axis < 0 ? stream_names[e->lane] : axis_names[axis % AXES]);
            if (axis >= AXES) fprintf(f, " %d", axis / AXES + 1);
            fprintf(f, "\"}}");
        }
        is_named[e->lane] = 1;
        fprintf(f,
                ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%" PRId64 ".%03d,\"dur\":%" PRId64
                ".%03d,\"cat\":\"%s\",\"name\":\"%s%s%s\"",
                rank, e->lane, start / 1000, (int)(start % 1000), took / 1000, (int)(took % 1000), kinds[e->kind],
                e->name, e->of ? ": " : "", e->of ? e->of : "");
        if (amounts[e->kind]) fprintf(f, ",\"args\":{\"%s\":%.0f}", amounts[e->kind], e->amount);
        fprintf(f, "}");
    }
}

/* This rank's part of the file, as text of `length` bytes. Ranks agree on the earliest event, which has time 0. */
static char *trace_text(Comm *comm, size_t *length) {
    const Recorder *rec = &comm->dev->rec;
    int world = comm->mesh.world;
    double error, offset = comm_clock_offset(comm, &error); // seconds that this rank's clock is ahead of rank 0's
    double first = INFINITY, zero = INFINITY, *all = new_array(double, world);
    for (int64_t i = 0; i < min_i64(rec->num_events, rec->max_events); i++) // a GPU's events are not in order
        first = fmin(first, rec->events[i].start - offset);
    all_gather_now(comm, AXIS_WORLD, "trace: first events", &first, all, sizeof first);
    for (int i = 0; i < world; i++) zero = fmin(zero, all[i]);
    free(all);
    char *text;
    FILE *f = open_memstream(&text, length);
    if (!f) run_failure("out of memory for the trace");
    if (comm->rank == 0) fputs(trace_header, f);
    trace_write_events(f, rec, comm->rank, zero + offset, error);
    if (comm->rank == world - 1) fputs(trace_footer, f);
    if (fclose(f)) run_failure("out of memory for the trace");
    return text;
}

/* All ranks write their parts into one file at the same time. Parts follow each other in the order of ranks. */
static void trace_write(Comm *comm, const char *path) {
    Device *dev = comm->dev;
    Phase before = comm_phase(comm, PHASE_SAVING);
    device_synchronize_all(dev);                                             // so that the last ops have their times
    dev->rec.max_events = min_i64(dev->rec.max_events, dev->rec.num_events); // it ends before its own collectives
    size_t length;
    char *text = trace_text(comm, &length), temporary[4096 + 32];
    int64_t bytes = (int64_t)length, offset = 0, *all = new_array(int64_t, comm->mesh.world);
    all_gather_now(comm, AXIS_WORLD, "trace: sizes", &bytes, all, sizeof bytes);
    for (int i = 0; i < comm->rank; i++) offset += all[i];
    free(all);
    snprintf(temporary, sizeof temporary, "%s.part-%016" PRIx64, path, comm_random_name(comm, "trace: name"));
    int fd = comm->rank == 0 ? open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
    if (comm->rank == 0 && fd < 0) user_error("cannot create %s: %s", temporary, strerror(errno));
    comm_barrier(comm, "trace: file created");
    if (comm->rank) fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        user_error("%s cannot open %s: %s; --trace needs a directory that all hosts share", rank_name(comm->rank),
                   temporary, strerror(errno));
    write_all(fd, temporary, text, length, offset);
    if (close(fd)) user_error("cannot write %s: %s", temporary, strerror(errno));
    comm_barrier(comm, "trace: parts written");
    int failed = comm->rank == 0 ? publish_file(temporary, path) : 0;
    if (failed)
        user_error("cannot rename %s, which holds the complete timeline, to --trace %s: %s; rename it yourself",
                   temporary, path, strerror(failed));
    comm_barrier(comm, "trace: done");
    comm_phase(comm, before);
    free(text);
}

#endif
