/* host_problems.h: gathers facts about the hosts of a run for check_hosts, and reports those that would make the run
 * fail or slow it down.
 *
 * All ranks gather the facts and measure together; rank 0 judges. Each problem is a line that names the host, what was
 * found, what was expected and what to do. */
#ifndef HOST_PROBLEMS_H
#define HOST_PROBLEMS_H
#include "../../run/setup/agreement.h" // defines: RankStart, gather_starts, say_other_start, gather_views_of_out
#include "../shared/median.h"          // defines: median_of
#include "../shared/program.h"         // defines: Program, Job
#include "network_test.h"              // defines: HostNetwork, NetworkState, try_networks
#include "host_rates.h" // defines: measure_hosts, measure_links, measure_axes, RankRates, LinkRate, AxisRate

/* Factors to the median host beyond which a host counts as slow, or as short of memory. */
static const double SLOW_LINK = 2.5, SLOW_COMPUTE = 1.5, LITTLE_MEMORY = 2;

/* What a rank reports about its host. */
typedef struct {
    CoreSet cores;                // that it may run on
    double free_memory, free_shm; // bytes
    double clock;                 // seconds that its wall clock is ahead of that of rank 0
    HostNetwork network;
} HostFacts;

enum { NEIGHBORS = 8 }; // how many of the next hosts a host connects to in the test of the networks
typedef uint8_t NetworkStates[NEIGHBORS][MAX_INTERFACES]; // NetworkState of each interface to each of them

/* What all ranks of a host reach together. */
typedef struct {
    double flops_per_s; // in a matmul
    int cores;          // that the ranks may run on
    double link;        // bytes per second of the best link to another host; 0: none was measured
} HostSummary;

/* What check_hosts found out; complete on rank 0. */
typedef struct {
    Job *job;
    Comm *comm;
    RankStart *starts;     // (world)
    HostFacts *facts;      // (world)
    NetworkStates *states; // (world) those of a host's first rank count
    int *sees_out;         // (world); NULL: no --out, or one host
    RankRates *rates;      // (world)
    Cluster cluster;       // of --cluster
    HostSummary *hosts;    // (run_hosts.count)
    LinkRate *links;       // (num_links)
    int num_links;
    AxisRate axes[MESH_AXES], hybrid[MESH_AXES]; // of the mesh, and of hybrid sharding with a replica on each host
    int num_axes, num_hybrid;                    // num_hybrid 0: it does not apply
    int problems;
} HostCheck;

static double wall_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Bytes of memory that programs can still get; 0 if the kernel does not say. */
static double free_memory(void) {
    char line[128];
    double kilobytes = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %lf", &kilobytes) != 1) continue;
    if (f) fclose(f);
    return 1024 * kilobytes;
}

// ---------------------------------------------------------------------------
// finding out

static void gather_facts(HostCheck *h, Listener *listener) {
    double error, base;
    HostFacts mine = ZERO;
    Comm *comm = h->comm;
    h->facts = new_array(HostFacts, comm->mesh.world);
    mine.free_memory = free_memory();
    mine.free_shm = shared_memory_free();
    mine.cores = core_set_of_process();
    mine.network.count = list_interfaces(mine.network.interfaces);
    mine.network.id = mix64((uint64_t)(wall_clock() * 1e6) ^ (uint64_t)comm->rank << 48 ^ (uint64_t)getpid());
    if (run_hosts.count > 1 && comm->rank == host_of_rank(comm->rank)->first_rank)
        mine.network.port = listener_open(listener, mine.network.id);
    base = wall_clock() - seconds_now();
    mine.clock = base + comm_clock_offset(comm, &error); // this rank's wall clock minus rank 0's seconds_now
    all_gather_now(comm, AXIS_WORLD, "facts about hosts", &mine, h->facts, sizeof mine);
    for (int i = comm->mesh.world - 1; i >= 0; i--) h->facts[i].clock -= h->facts[0].clock;
}

/* The first rank of each host connects to the next hosts over all networks. */
static void check_networks(HostCheck *h, Listener *listener) {
    Comm *comm = h->comm;
    const HostNetwork *others[NEIGHBORS];
    NetworkStates mine = ZERO;
    int hosts = run_hosts.count, host = host_index(comm->rank);
    int count = (int)min_i64(NEIGHBORS, hosts - 1);
    h->states = (NetworkStates *)checked_malloc(sizeof(NetworkStates) * (size_t)comm->mesh.world);
    for (int i = 0; i < count; i++) others[i] = &h->facts[run_hosts.hosts[(host + 1 + i) % hosts].first_rank].network;
    if (h->facts[comm->rank].network.port) try_networks(&h->facts[comm->rank].network, others, count, mine);
    quiet_all_gather(comm, "states of networks", mine, h->states, sizeof mine);
    if (h->facts[comm->rank].network.port) listener_close(listener);
}

/* Measures the layout with one replica of the model per host (hybrid sharding), if the ranks allow it and it is not the
 * layout of this run. */
static void measure_hybrid(HostCheck *h, char *buffers) {
    Job *j = h->job;
    Mesh mesh = j->mesh;
    Comm comm;
    int hosts = run_hosts.count, shard = mesh.size[AXIS_DP_SHARD];
    if (hosts < 2 || mesh.size[AXIS_DP_REPLICATE] > 1 || shard % hosts) return;
    mesh.size[AXIS_DP_SHARD] = shard / hosts;
    mesh.size[AXIS_DP_REPLICATE] = hosts;
    if (hosts_of_axis(&mesh, AXIS_FSDP) > 1) return;
    size_t mark = arena_mark(h->comm->dev, MEM_COMM);
    comm_close(h->comm);
    comm_open(&comm, h->comm->dev, &mesh, h->comm->rank, j->transport, j->host_transport, &j->thread_world,
              h->comm->timeout);
    h->num_hybrid = measure_axes(&comm, h->hybrid, buffers);
    quiet_barrier(&comm, "end of the measurements");
    comm_close(&comm);
    arena_release(h->comm->dev, MEM_COMM, mark);
    h->comm->dev->poll_arg = h->comm; // from here on this rank's waits belong to the run's own groups again
}

// ---------------------------------------------------------------------------
// problems

__attribute__((format(printf, 2, 3))) static void problem(HostCheck *h, const char *format, ...) {
    va_list args;
    printf("problem: ");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    h->problems++;
}

static const HostFacts *facts_of_host(const HostCheck *h, int host) {
    return &h->facts[run_hosts.hosts[host].first_rank];
}

static void core_set_add(CoreSet *set, const CoreSet *other) {
    for (size_t i = 0; i < sizeof *set; i++) set->bits[i] = (uint8_t)(set->bits[i] | other->bits[i]);
}

/* Fills in h->hosts. */
static void summarize_hosts(HostCheck *h) {
    int hosts = run_hosts.count, world = h->comm->mesh.world;
    h->hosts = new_array(HostSummary, hosts);
    CoreSet *cores = new_array(CoreSet, hosts);
    double *flops = flops_of_hosts(h->rates, world, 0);
    for (int i = 0; i < world; i++) core_set_add(&cores[host_index(i)], &h->facts[i].cores);
    for (int i = 0; i < hosts; i++) {
        h->hosts[i].flops_per_s = flops[i];
        h->hosts[i].cores = core_set_count(&cores[i]);
    }
    for (int i = 0; i < h->num_links; i++) {
        const LinkRate *l = &h->links[i];
        if (l->from == l->to) continue;
        h->hosts[l->from].link = fmax(h->hosts[l->from].link, l->bytes_per_s);
        h->hosts[l->to].link = fmax(h->hosts[l->to].link, l->bytes_per_s);
    }
    free(cores);
    free(flops);
}

static void check_starts(HostCheck *h) {
    char text[1024];
    for (int i = 1; i < h->comm->mesh.world; i++) {
        Sentence t = {text, sizeof text, 0};
        if (i == host_of_rank(i)->first_rank && say_other_start(&t, h->job, h->starts, i)) problem(h, "%s", text);
    }
    for (int host = 1; host < run_hosts.count; host++) {
        const RankStart *other = &h->starts[run_hosts.hosts[host].first_rank];
        if (other->program != h->starts[0].program)
            problem(h, "host %s has another build of the program than host %s: copy one build to all hosts",
                    run_hosts.hosts[host].name, run_hosts.hosts[0].name);
        if (strcmp(other->processor, h->starts[0].processor))
            printf("note: host %s has another processor (%s) than host %s (%s): results may differ in the last bits\n",
                   run_hosts.hosts[host].name, other->processor, run_hosts.hosts[0].name, h->starts[0].processor);
    }
}

static void check_out(HostCheck *h) {
    char text[8192];
    for (int host = 0; h->sees_out && host < run_hosts.count; host++) {
        Sentence t = {text, sizeof text, 0};
        if (h->sees_out[run_hosts.hosts[host].first_rank]) continue;
        say_unshared_out(&t, h->job->run.out, &run_hosts.hosts[host]);
        problem(h, "%s", text);
    }
}

/* Reports each network once, for the first pair of hosts that it does not connect. */
static void check_states(HostCheck *h) {
    int hosts = run_hosts.count, count = (int)min_i64(NEIGHBORS, hosts - 1);
    uint32_t reported[MAX_INTERFACES];
    int num_reported = 0;
    for (int i = 0; i < hosts && hosts > 1; i++)
        if (!facts_of_host(h, i)->network.port)
            printf("note: the networks of host %s were not tested, because it could not listen on a TCP port\n",
                   run_hosts.hosts[i].name);
    for (int n = 0; n < hosts * count * MAX_INTERFACES && num_reported < MAX_INTERFACES; n++) {
        int from = n / MAX_INTERFACES / count, neighbor = n / MAX_INTERFACES % count, i = n % MAX_INTERFACES;
        int state = h->states[run_hosts.hosts[from].first_rank][neighbor][i], seen = 0;
        const Interface *own = &facts_of_host(h, from)->network.interfaces[i];
        const char *names[2] = {run_hosts.hosts[from].name, run_hosts.hosts[(from + 1 + neighbor) % hosts].name};
        char network[32];
        Sentence t = {network, sizeof network, 0};
        for (int k = 0; k < num_reported; k++) seen |= reported[k] == (own->address & own->mask);
        if (state == NOT_SHARED || state == CONNECTS || seen) continue;
        reported[num_reported++] = own->address & own->mask;
        say_network(&t, own->address & own->mask, own->mask);
        problem(h,
                "the network %s (%s) does not connect host %s to host %s%s: tell Open MPI to use the network that "
                "does, for example with --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 after mpirun, or "
                "OMPI_MCA_btl_tcp_if_include=eth0 in the environment of srun",
                network, own->name, names[0], names[1],
                state == SAME_ADDRESS ? ", because both have the same address there" : "");
    }
}

static void check_memory_of_hosts(HostCheck *h) {
    int hosts = run_hosts.count;
    double *free_bytes = new_array(double, hosts);
    for (int i = 0; i < hosts; i++) free_bytes[i] = facts_of_host(h, i)->free_memory;
    double median = median_of(free_bytes, hosts);
    for (int i = 0; i < hosts; i++) {
        const HostFacts *f = facts_of_host(h, i);
        const RunHost *host = &run_hosts.hosts[i];
        if (f->free_memory * LITTLE_MEMORY < median)
            problem(h, "host %s has %.2f GB of free memory, the median host %.2f GB: end what else runs there",
                    host->name, f->free_memory / 1e9, median / 1e9);
        if (host->ranks > 1 && f->free_shm < 16e6 * host->ranks)
            problem(h,
                    "host %s has %.0f MB free in /dev/shm, but its %d ranks need about 16 MB each to communicate: "
                    "remove old files there, or enlarge it (docker run --shm-size)",
                    host->name, f->free_shm / 1e6, host->ranks);
        if (fabs(f->clock) > 1)
            problem(h,
                    "the clock of host %s is %.1f s %s that of host %s: synchronize the clocks (NTP), since batch "
                    "systems and file systems compare times",
                    host->name, fabs(f->clock), f->clock > 0 ? "ahead of" : "behind", run_hosts.hosts[0].name);
    }
    free(free_bytes);
}

/* Hosts that compute slower than the median host, or with fewer cores. */
static void check_compute_of_hosts(HostCheck *h) {
    int hosts = run_hosts.count;
    double *flops = new_array(double, hosts), *cores = new_array(double, hosts);
    for (int i = 0; i < hosts; i++) {
        flops[i] = h->hosts[i].flops_per_s / run_hosts.hosts[i].ranks;
        cores[i] = (double)h->hosts[i].cores / run_hosts.hosts[i].ranks;
    }
    double median_flops = median_of(flops, hosts), median_cores = median_of(cores, hosts);
    for (int i = 0; i < hosts; i++) {
        const RunHost *host = &run_hosts.hosts[i];
        double rate = h->hosts[i].flops_per_s / host->ranks, its_cores = (double)h->hosts[i].cores / host->ranks;
        if (rate * SLOW_COMPUTE < median_flops || its_cores * SLOW_COMPUTE < median_cores)
            problem(h,
                    "host %s computes with %.1f GFLOP/s and %.3g cores per rank, the median host with %.1f and %.3g: "
                    "see what else runs there and which cores the launcher gives, or leave the host out, because all "
                    "ranks wait for the slowest",
                    host->name, rate / 1e9, its_cores, median_flops / 1e9, median_cores);
    }
    free(flops);
    free(cores);
}

/* Hosts and pairs of hosts that communicate slower than others. */
static void check_links_of_hosts(HostCheck *h) {
    int hosts = run_hosts.count;
    double *links = new_array(double, hosts);
    for (int i = 0; i < hosts; i++) links[i] = h->hosts[i].link;
    double median = median_of(links, hosts);
    for (int i = 0; i < hosts; i++) {
        double link = h->hosts[i].link;
        if (link > 0 && link * SLOW_LINK < median)
            problem(h,
                    "host %s communicates %.1f times slower than the median host (%.3f and %.3f GB/s): check its "
                    "network, or leave it out",
                    run_hosts.hosts[i].name, median / link, link / 1e9, median / 1e9);
    }
    for (int i = 0; i < h->num_links; i++) {
        const LinkRate *l = &h->links[i];
        double other = fmin(h->hosts[l->from].link, h->hosts[l->to].link);
        if (l->from != l->to && l->bytes_per_s * SLOW_LINK < other)
            problem(
                h,
                "the connection between host %s and host %s is %.1f times slower than the other connections of these "
                "two hosts (%.3f and %.3f GB/s): check the switches between them",
                run_hosts.hosts[l->from].name, run_hosts.hosts[l->to].name, other / l->bytes_per_s,
                l->bytes_per_s / 1e9, other / 1e9);
    }
    free(links);
}

/* Compares the measured collectives with those of --cluster. */
static void check_against_cluster(HostCheck *h) {
    const char *file = h->cluster.path;
    if (!file) return;
    for (int a = 0; a < h->num_axes; a++) {
        const AxisRate *r = &h->axes[a];
        for (int c = ALL_GATHER; c <= REDUCE_SCATTER; c++) {
            int last = r->sizes - 1;
            double expected = collective_seconds(&h->cluster.collectives[r->axis][c], r->bytes[last]);
            double factor = r->seconds[c][last] / expected;
            printf("%s over %s: %.3g s for %.3g MB per rank, %.2f times what %s expects\n", collective_names[c],
                   axis_names[r->axis], r->seconds[c][last], r->bytes[last] / 1e6, factor, file);
            if (factor > SLOW_LINK)
                problem(h,
                        "%s over %s takes %.1f times as long as %s expects: check the network, or which ranks are "
                        "on which host",
                        collective_names[c], axis_names[r->axis], factor, file);
        }
    }
}

#endif
