/* comm_watch_cuda.h: what the communicator does while the host waits for its GPU: it looks whether the GPU makes
 * progress, and names who is to blame if it does not.
 */
#ifndef COMM_WATCH_CUDA_H
#define COMM_WATCH_CUDA_H
#include "comm.h"
#include "transport_nccl.h" // defines: nccl_check_errors

/* Called while the host waits for its GPU, and with waited = 0 when it has finished waiting. As long as spans of the
 * GPU end, it makes progress; else it is stuck in a collective or a kernel. */
static inline void comm_watch(void *arg, double waited) {
    Comm *comm = (Comm *)arg;
    double now = seconds_now(), limit = wait_limit(comm);
    const OpenSpan *running = NULL;
    int64_t settled = waited > 0 ? device_settled(comm->dev, &running) : -1;
#ifdef HAVE_NCCL
    nccl_check_errors(comm);
#endif
    if (settled != comm->gpu_progress) {
        comm->gpu_progress = settled;
        if (comm->news.ranks) wait_recovered(comm);
        comm->gpu_progress_at = now;
        rank_state(comm->heartbeat, RANK_COMPUTING, now);
    }
    double stuck = now - comm->gpu_progress_at;
    if (stuck > 0.5 && comm->hosts->answer_hosts) comm->hosts->answer_hosts(comm);
    if (running && stuck > 0.5 && comm->heartbeat->state != RANK_WAITING)
        rank_waits(comm->heartbeat, running->line, running->number, comm->gpu_progress_at);
    if (settled < 0 || stuck < limit) return;
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
