/* comm_watch_cuda.h: the watchdog of a GPU rank. It ends the run when the GPU has made no progress for --timeout, and
 * reports the ranks that a stuck collective waits for. */
#ifndef COMM_WATCH_CUDA_H
#define COMM_WATCH_CUDA_H
#include "comm.h"
#include "transport_nccl.h" // defines: nccl_check_errors

static const double SHOWN_AS_WAITING = 0.5; // seconds without progress before the heartbeat says so

/* Called repeatedly while the host waits for its GPU, and once with waited = 0 after the wait. The GPU makes progress
 * as long as its spans (ops and collectives) end; otherwise it is stuck in a collective or in a kernel. */
static inline void comm_watch(void *arg, double waited) {
    Comm *comm = (Comm *)arg;
    double now = seconds_now(), limit = wait_limit(comm);
    const OpenSpan *running = NULL;
    int64_t spans_ended = waited > 0 ? device_settled(comm->dev, &running) : -1;
#ifdef HAVE_NCCL
    nccl_check_errors(comm);
#endif
    if (spans_ended != comm->gpu_progress) {
        comm->gpu_progress = spans_ended;
        if (comm->news) wait_recovered(comm);
        comm->gpu_progress_at = now;
        rank_state(comm->heartbeat, RANK_COMPUTING, now);
    }
    double stuck = now - comm->gpu_progress_at;
    if (stuck > SHOWN_AS_WAITING && comm->hosts->answer_hosts) comm->hosts->answer_hosts(comm);
    if (running && stuck > SHOWN_AS_WAITING && comm->heartbeat->state != RANK_WAITING)
        rank_waits(comm->heartbeat, running->line, running->number, comm->gpu_progress_at);
    if (spans_ended < 0 || stuck < limit) return;
    if (running) wait_expired(comm, running->line, running->number, stuck);
    else
        run_failure("%s waited %.1f s for its GPU, which runs no collective: a kernel does not end; --timeout "
                    "sets the limit",
                    rank_name(comm->rank), stuck);
}

/* The GPU has finished a collective. */
static inline void comm_finished(void *arg, int line, int64_t number, double start, double end) {
    FlightRecord *record = flight_of(((Comm *)arg)->heartbeat, line, number);
    if (!record) return;
    record->started = start;
    record->finished = end;
}

#endif
