/* progress.h: what happens to requests between their start and the end of their wait. A collective in flight moves
 * forward only while its ranks call the transport: between ops, and while a rank waits. A wait that lasts too long ends
 * the run with a message that names who is to blame.
 */
#ifndef PROGRESS_H
#define PROGRESS_H
#include "comm_types.h" // defines: Comm, Group, Request, Transport
#include <sched.h>

// ---------------------------------------------------------------------------
// progress

static inline void comm_poll(void *arg);

/* Tests everything in flight. On each stream of a GPU, collectives keep the order in which they were started. */
static inline void comm_progress(Comm *comm) {
    int kept = 0, is_busy[STREAMS] = ZERO;
    for (int i = 0; i < comm->num_in_flight; i++) {
        Request *r = comm->in_flight[i];
        if (!r->active || (CUDA_BUILD && r->on_device && is_busy[r->stream])) continue;
        StreamKind before = device_set_stream(comm->dev, r->stream);
        const Transport *t = r->on_device ? comm->transport : comm->hosts;
        r->active = t->test && !t->test(comm, r);
        is_busy[r->stream] |= r->active;
        if (!r->active) note_arrived(comm, r);
        if (!r->active && r->on_device) {
            device_record_event(comm->dev, &r->arrived); // all its work is in the stream, and maybe not yet executed
            r->enqueued = 1;
        }
        device_set_stream(comm->dev, before);
    }
    for (int i = 0; i < comm->num_in_flight; i++)
        if (comm->in_flight[i]->active) comm->in_flight[kept++] = comm->in_flight[i];
    if (comm->num_in_flight && !kept && !CUDA_BUILD) comm->comm_seconds += seconds_now() - comm->in_flight_since;
    comm->num_in_flight = kept;
    comm->dev->poll = kept || run_hosts.count > 1 ? comm_poll : NULL;
}

/* Called between ops while something is in flight, and if other hosts may ask what this one is doing. */
static inline void comm_poll(void *arg) {
    Comm *comm = (Comm *)arg;
    double start = seconds_now();
    comm_progress(comm);
    if (comm->hosts->answer_hosts && start - comm->answered_at > 0.25) comm->hosts->answer_hosts(comm);
    if (!CUDA_BUILD) comm->poll_seconds += seconds_now() - start; // a GPU computes meanwhile
}

// ---------------------------------------------------------------------------
// a wait, and the end of the run if it lasts too long

/* The seconds beyond its limit after which a rank reports. They give the monitor of the culprit's host, and then hosts
 * with lower numbers, time to report first: a monitor takes up to 0.5 s, and the launcher about 1 s to end the run. */
static inline double patience(const Comm *comm, int hosts_heard) {
    if (run_hosts.count < 2) return 0;
    if (!hosts_heard) return 1.8 + (double)ASKING_HOSTS;
    return (hosts_heard == run_hosts.count ? 0.6 : 1.8) + (double)(host_of_rank(comm->rank) - run_hosts.hosts);
}

/* Called repeatedly once a wait has exceeded its limit: ends the run and names who is to blame, unless other hosts may
 * know more. */
static inline void wait_expired(Comm *comm, int line, int64_t number, double waited) {
    char culprits[2048], name[160];
    Sentence blame = {culprits, sizeof culprits, 0}, collective = {name, sizeof name, 0};
    int phase = comm->heartbeat->phase, times = phases[phase].limit, heard = 1;
    double limit = wait_limit(comm);
    if (!comm->news) comm->news = new_array(RankNews, comm->mesh.world);
    WorldNews news = {&comm->mesh, comm->heartbeats, limit, 0, comm->news};
    news_of_host(&news);
    if (comm->hosts->ask_hosts) heard = comm->hosts->ask_hosts(comm);
    int is_patient = waited < limit + patience(comm, heard);
    if (is_patient && !lost_on_host_of(&news, comm->rank)) return;
    news.asked = heard > 0 && !is_patient;
    say_culprits(&blame, &news, comm->rank, line, number);
    if (news.asked && heard == 1 && run_hosts.count > 2)
        say(&blame, "; no other host answers: the network of host %s itself may be cut", comm->heartbeats->host);
    if (times > 1) say(&blame, "; in %s a wait may last %d x --timeout", phases[phase].name, times);
    const char *library = comm->transport->last_error ? comm->transport->last_error() : "";
    say_collective(&collective, comm->heartbeat, line, number);
    if (!is_channel(line)) say(&collective, " (%d ranks)", comm->groups[line].size);
    run_failure("%s waited %.1f s for %s; %s. Look there first; --timeout sets the limit%s%s", rank_name(comm->rank),
                waited, name, culprits, *library ? ". NCCL's last message, which may be older: " : "", library);
}

/* A wait that had exceeded its limit has ended after all: what was found out about the other ranks is forgotten. */
static inline void wait_recovered(Comm *comm) {
    int own = comm->rank + 1;
    free(comm->news);
    comm->news = NULL;
    __atomic_compare_exchange_n(&comm->heartbeats->asker, &own, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* The host polls until the transport is done with this request. */
static inline void request_poll_until_done(Comm *comm, Request *r) {
    double start = seconds_now(), limit = wait_limit(comm);
    rank_waits(comm->heartbeat, r->line, r->number, start);
    for (int spins = 0;; spins++) {
        comm_progress(comm);
        if (!r->active) break;
        sched_yield();
        int sleeps = spins > 2000;
        if (sleeps) usleep(20);
        else if (spins % 64) continue; // reading the clock takes longer than a spin
        double waited = seconds_now() - start;
        if (waited > 0.5 && comm->hosts->answer_hosts) comm->hosts->answer_hosts(comm);
        if (waited > limit) wait_expired(comm, r->line, r->number, waited);
    }
    if (comm->news) wait_recovered(comm);
    rank_state(comm->heartbeat, RANK_COMPUTING, seconds_now());
}

#endif
