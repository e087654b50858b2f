/* run_hosts.h: which host each rank of the run is on, so that every message about a rank can name its host.
 *
 * The table is filled once, when the processes of a run have found each other (comm_open.h). Ranks that are threads of
 * one process have one host, and no table of ranks.
 */
#ifndef RUN_HOSTS_H
#define RUN_HOSTS_H
#include "../device/base.h"

typedef struct {
    char name[64];
    int first_rank; // the lowest rank on this host
    int ranks;      // how many of the run's ranks are on it
    uint64_t id;    // unique for each host of the run
} RunHost;

/* A mutable global like process_end: there is one for each process, and it is filled once. */
static struct {
    int count;      // hosts, in the order of their first ranks; 0: not known yet
    RunHost *hosts; // (count)
    int *of_rank;   // (ranks of the run) index into `hosts`; NULL: all ranks are threads of one process
} run_hosts;

/* The host of a rank. */
static inline const RunHost *host_of_rank(int rank) {
    return &run_hosts.hosts[run_hosts.of_rank ? run_hosts.of_rank[rank] : 0];
}

/* Without a launcher all ranks are threads of this process. */
static inline void run_hosts_only_this_one(void) {
    run_hosts.hosts = new_array(RunHost, 1);
    gethostname(run_hosts.hosts[0].name, sizeof run_hosts.hosts[0].name - 1);
    run_hosts.count = 1;
}

/* The ranks of the run are threads of this process. */
static inline void run_hosts_of_threads(int ranks) {
    free(run_hosts.of_rank);
    run_hosts.of_rank = NULL;
    run_hosts.hosts[0].ranks = ranks;
}

/* "rank 2 on host n2"; "rank 2" if all ranks are on one host. Valid until the eighth next call by the same thread. */
static inline const char *rank_name(int rank) {
    static __thread char names[8][96];
    static __thread int next;
    char *name = names[next];
    next = (next + 1) % 8;
    int used = snprintf(name, sizeof names[0], "rank %d", rank);
    if (run_hosts.count > 1)
        snprintf(name + used, sizeof names[0] - (size_t)used, " on host %s", host_of_rank(rank)->name);
    return name;
}

#endif
