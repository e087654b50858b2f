/* check_hosts.cu: tests the hosts and networks of a run in seconds, before the run starts.
 *
 *   srun ... ./check_hosts --model bench-8m --data '/data/train-*.tok' --out /shared/a
 *
 * It takes the launcher and the options of train_llama3, whose source it includes, and --cluster FILE, which it
 * compares with what it measures. All ranks measure, rank 0 prints. What would make the run fail or slow is a line that
 * begins with "problem:"; if there is one, the exit code is 1. With --out it also writes cluster.json, from which
 * plan_llama3 --cluster estimates step times on these hosts. */
#include "hosts/host_problems.h" // defines: HostCheck, gather_facts, check_starts, …
#include "../lib/io/json.h"      // defines: json_real, json_add_integer

typedef struct {
    Job job; // first: a rank finds the HostsJob behind its job
    const char *cluster;
    int has_problems; // some were found
} HostsJob;

#define FIELD(f) offsetof(HostsJob, f)
static const OptionRow hosts_options[] = {
    GROUP("what is measured"),
    TEXT("cluster", cluster, "FILE", NULL, "compare the rates with those of a cluster file"),
};
#undef FIELD
static const Program hosts_program = {
    "check_hosts", NULL, hosts_options, sizeof hosts_options / sizeof *hosts_options, {0}};

// ---------------------------------------------------------------------------
// the report

static void print_hosts(const HostCheck *h) {
    printf("%-16s %6s %6s %12s %12s %10s %12s %12s\n", "host", "ranks", "cores", "memory, GB", "/dev/shm, GB",
           "clock, ms", "GFLOP/s", "link, GB/s");
    for (int i = 0; i < run_hosts.count; i++) {
        const HostFacts *f = facts_of_host(h, i);
        printf("%-16s %6d %6d %12.2f %12.2f %+10.1f %12.1f", run_hosts.hosts[i].name, run_hosts.hosts[i].ranks,
               h->hosts[i].cores, f->free_memory / 1e9, f->free_shm / 1e9, 1e3 * f->clock,
               h->hosts[i].flops_per_s / 1e9);
        if (h->hosts[i].link > 0) printf(" %12.3f", h->hosts[i].link / 1e9);
        printf("\n");
    }
    printf("memory and /dev/shm: free bytes; clock: how far it is ahead of the first host's; GFLOP/s: matmuls of all "
           "ranks of the host together; link: the fastest connection to another host\n");
}

static void print_links(const HostCheck *h) {
    enum { SHOWN = 28 }; // all pairs of eight hosts
    if (h->num_links - run_hosts.count > SHOWN) return;
    for (int i = 0; i < h->num_links; i++) {
        const LinkRate *l = &h->links[i];
        if (l->from == l->to) printf("within %s", run_hosts.hosts[l->from].name);
        else printf("%s to %s", run_hosts.hosts[l->from].name, run_hosts.hosts[l->to].name);
        printf(": latency %.1f us, %.3f GB/s\n", 1e6 * l->latency, l->bytes_per_s / 1e9);
    }
}

static void print_axes(const AxisRate *axes, int count) {
    for (int a = 0; a < count; a++) {
        const AxisRate *r = &axes[a];
        int last = r->sizes - 1;
        double gather = r->seconds[ALL_GATHER][last], scatter = r->seconds[REDUCE_SCATTER][last];
        printf("%s, %d ranks on %d host%s: all-gather %.3f GB/s, reduce-scatter %.3f GB/s per rank; all-reduce of "
               "%.3g MB in about %.1f ms\n",
               axis_names[r->axis], r->ranks, r->hosts, r->hosts == 1 ? "" : "s", r->bytes[last] / gather / 1e9,
               r->bytes[last] / scatter / 1e9, r->bytes[last] * r->ranks / (r->ranks - 1) / 1e6,
               1e3 * (gather + scatter));
    }
}

static const AxisRate *rate_of_axis(const AxisRate *axes, int count, Axis axis) {
    for (int a = 0; a < count; a++)
        if (axes[a].axis == axis) return &axes[a];
    return NULL;
}

/* Seconds in which a rank receives `bytes` at the rate of the largest measured size; 0: the group has one member. */
static double axis_seconds(const AxisRate *r, Collective c, double bytes) {
    return r ? bytes * r->seconds[c][r->sizes - 1] / r->bytes[r->sizes - 1] : 0;
}

/* Seconds of communication in a training step, without overlap. FSDP all-gathers the weights in forward and in backward
 * and reduce-scatters fp32 gradients; replicas then all-reduce the gradients of their shards. `parameters`: of this
 * rank's part of the model. */
static double step_communication(const AxisRate *axes, int count, double parameters) {
    const AxisRate *fsdp = rate_of_axis(axes, count, AXIS_FSDP);
    const AxisRate *replicas = rate_of_axis(axes, count, AXIS_DP_REPLICATE);
    int n = fsdp ? fsdp->ranks : 1, m = replicas ? replicas->ranks : 1;
    double received = parameters * (n - 1) / n, shard = parameters / n * (m - 1) / m;
    return 2 * axis_seconds(fsdp, ALL_GATHER, received * sizeof(floatX)) +
           axis_seconds(fsdp, REDUCE_SCATTER, received * sizeof(float)) +
           axis_seconds(replicas, REDUCE_SCATTER, shard * sizeof(float)) +
           axis_seconds(replicas, ALL_GATHER, shard * sizeof(float));
}

static void print_advice(const HostCheck *h) {
    const Mesh *mesh = &h->job->mesh;
    double parameters = (double)h->job->table.num_parameters / (mesh->size[AXIS_TP] * mesh->size[AXIS_PP]);
    for (int a = 0; a < h->num_axes; a++) {
        Axis axis = h->axes[a].axis;
        if (h->axes[a].hosts > 1 && (axis == AXIS_TP || axis == AXIS_CP))
            printf("advice: %s groups cross hosts, and they communicate in every layer: keep --tp x --cp within the "
                   "ranks of a host, and use pipeline or data parallelism between hosts\n",
                   axis_names[axis]);
    }
    if (!h->num_hybrid) return;
    double full = step_communication(h->axes, h->num_axes, parameters);
    double hybrid = step_communication(h->hybrid, h->num_hybrid, parameters);
    printf("advice: for %s, a step communicates for %.3g s when parameters are sharded over all hosts, and for %.3g s "
           "with hybrid sharding (--dp-shard %d --dp-replicate %d), not counting what overlaps with computation: ",
           h->job->run.model, full, hybrid, mesh->size[AXIS_DP_SHARD] / run_hosts.count, run_hosts.count);
    if (hybrid < 0.8 * full) printf("use hybrid sharding if the model's state fits into the memory of a host\n");
    else printf("shard over all hosts, which needs less memory\n");
}

// ---------------------------------------------------------------------------
// the cluster file

static void add_collectives(cJSON *list, const HostCheck *h, const AxisRate *axes, int count) {
    for (int n = 0; n < count * (REDUCE_SCATTER + 1); n++) {
        const AxisRate *r = &axes[n / (REDUCE_SCATTER + 1)];
        int c = n % (REDUCE_SCATTER + 1), last = r->sizes - 1;
        double latency = fmin(r->seconds[c][0], r->seconds[c][last]);
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(list, row);
        cJSON_AddStringToObject(row, "transport", h->job->transport->name);
        json_add_integer(row, "ranks", r->ranks);
        json_add_integer(row, "hosts", r->hosts);
        cJSON_AddStringToObject(row, "op", collective_names[c]);
        cJSON_AddItemToObject(row, "latency_s", json_real("%.4g", latency));
        cJSON_AddItemToObject(row, "bytes_per_s", json_real("%.4g", r->bytes[last] / r->seconds[c][last]));
        cJSON_AddItemToObject(row, "measured_bytes", cJSON_CreateDoubleArray(r->bytes, r->sizes));
        cJSON_AddItemToObject(row, "measured_s", cJSON_CreateDoubleArray(r->seconds[c], r->sizes));
    }
}

/* The rates of the ops, those of the median host. */
static void add_ops(cJSON *root, const HostCheck *h, double share) {
    static const char *const names[2][5] = {{"M", "N", "K"}, {"B", "T", "NH", "NKV", "HD"}};
    cJSON *lists[2] = {cJSON_AddArrayToObject(root, "matmuls"), cJSON_AddArrayToObject(root, "attention")};
    for (int op = 0; op < RATED_OPS; op++) {
        int is_attention = op >= RATED_MATMULS;
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(lists[is_attention], row);
        cJSON_AddStringToObject(row, "dtype", PRECISION_NAME);
        cJSON_AddStringToObject(row, "op", op_names[rated_ops[op]]);
        for (int i = 0; i < 5 && names[is_attention][i]; i++)
            json_add_integer(row, names[is_attention][i], h->rates[0].ops[op].size[i]);
        double *hosts = flops_of_hosts(h->rates, h->comm->mesh.world, op);
        cJSON_AddItemToObject(row, "flops_per_s", json_real("%.4g", share * median_of(hosts, run_hosts.count)));
        free(hosts);
    }
}

/* The median latency and rate of the links within hosts, or between them. */
static void add_link(cJSON *links, const HostCheck *h, const char *name, int is_within) {
    double *latency = new_array(double, h->num_links), *rate = new_array(double, h->num_links);
    int count = 0;
    for (int i = 0; i < h->num_links; i++) {
        if ((h->links[i].from == h->links[i].to) != is_within) continue;
        latency[count] = h->links[i].latency;
        rate[count++] = h->links[i].bytes_per_s;
    }
    if (count) {
        cJSON *link = cJSON_AddObjectToObject(links, name);
        cJSON_AddItemToObject(link, "latency_s", json_real("%.4g", median_of(latency, count)));
        cJSON_AddItemToObject(link, "bytes_per_s", json_real("%.4g", median_of(rate, count)));
    }
    free(latency);
    free(rate);
}

/* Writes OUT/cluster.json; dev/kernels/collectives.cu documents the format. */
static void write_cluster(const HostCheck *h) {
    const RunSettings *run = &h->job->run;
    int ranks_per_host = run_hosts.hosts[0].ranks, of_device = uses_nccl(h->job);
    char name[256];
    cJSON *root = cJSON_CreateObject();
    snprintf(name, sizeof name, "%d host%s like %s: %s", run_hosts.count, run_hosts.count == 1 ? "" : "s",
             run_hosts.hosts[0].name, h->starts[0].processor);
    cJSON_AddStringToObject(root, "name", name);
    cJSON_AddStringToObject(root, "command", "check_hosts");
    cJSON_AddStringToObject(root, "rates_of", of_device ? "device" : "host");
    json_add_integer(root, "cores_per_host", (int64_t)ranks_per_host * h->job->threads_per_rank); // that were measured
    json_add_integer(root, "ranks_per_host", ranks_per_host);
    double memory = of_device ? device_memory(h->comm->dev->gpu) * ranks_per_host : device_memory(0);
    cJSON_AddItemToObject(root, "memory_bytes_per_host", json_real("%.0f", memory));
    double share = of_device ? 1.0 / ranks_per_host : 1, moved = 0; // a file of a device has the rates of one rank
    for (int i = 0; i < h->comm->mesh.world; i++)
        if (host_index(i) == 0) moved += h->rates[i].memory_bytes_per_s;
    cJSON_AddItemToObject(root, "memory_bytes_per_s", json_real("%.4g", share * moved));
    add_ops(root, h, share);
    cJSON *list = cJSON_AddArrayToObject(root, "collectives");
    add_collectives(list, h, h->axes, h->num_axes);
    add_collectives(list, h, h->hybrid, h->num_hybrid);
    if (h->num_links) {
        cJSON *links = cJSON_AddObjectToObject(root, "links");
        add_link(links, h, "within_host", 1);
        add_link(links, h, "between_hosts", 0);
    }
    char *text = json_text(root, 1);
    FILE *f = out_file_create(run->out, "cluster.json");
    int failed = fprintf(f, "%s\n", text) < 0;
    if (fclose(f) || failed) user_error("cannot write cluster.json under %s: %s", run->out, strerror(errno));
    free(text);
    printf("written: %s/cluster.json, for plan_llama3 --cluster\n", run->out);
}

// ---------------------------------------------------------------------------
// all of it

/* Shortens --timeout, unless given, so that a dead network is reported soon. Returns how long connecting may take. */
static double check_hosts_limits(Job *j) {
    double processes = processes_of_launcher();
    if (option_given(j->options, "timeout")) return seconds_to_connect(&j->run);
    j->run.timeout = 5 + 0.01 * processes;
    return 4 + 0.02 * processes;
}

static void measure_all(HostCheck *h, char *buffers) {
    Job *j = h->job;
    Listener listener = ZERO;
    gather_facts(h, &listener);
    check_networks(h, &listener);
    h->starts = gather_starts(h->comm, j);
    if (j->run.out && run_hosts.count > 1) h->sees_out = gather_views_of_out(h->comm, j->run.out);
    h->rates = measure_hosts(h->comm, &j->config);
#ifdef HAVE_MPI
    if (j->host_transport == transport_find("mpi")) h->links = measure_links(h->comm, &h->num_links);
#endif
    h->num_axes = measure_axes(h->comm, h->axes, buffers);
    quiet_barrier(h->comm, "end of the measurements");
}

static void report_all(HostCheck *h, double seconds) {
    summarize_hosts(h);
    print_hosts(h);
    print_links(h);
    print_axes(h->axes, h->num_axes);
    if (h->num_hybrid) printf("with hybrid sharding, a replica of the model on each host:\n");
    print_axes(h->hybrid, h->num_hybrid);
    check_starts(h);
    check_out(h);
    check_states(h);
    check_memory_of_hosts(h);
    check_compute_of_hosts(h);
    check_links_of_hosts(h);
    check_against_cluster(h);
    print_advice(h);
    if (h->job->run.out) write_cluster(h);
    printf("checked %d host%s with %d rank%s in %.1f s\n", run_hosts.count, run_hosts.count == 1 ? "" : "s",
           h->comm->mesh.world, h->comm->mesh.world == 1 ? "" : "s", seconds);
    if (!h->problems) printf("no problem found\n");
    flush_results();
    if (h->problems)
        fprintf(stderr, "error: check_hosts found %d problem%s, listed above: correct %s, and check again\n",
                h->problems, h->problems == 1 ? "" : "s", h->problems == 1 ? "it" : "them");
}

/* One rank. */
static void check_hosts(Job *j, int rank) {
    HostCheck *h = new_array(HostCheck, 1); // on the heap: the stack may be small
    Device dry_run, dev;
    Comm comm;
    double start = seconds_now();
    device_open_dry_run(&dry_run, j->threads_per_rank, 0);
    dry_run.gpu = job_gpu_of_rank(j, rank);
    dry_run.by_nccl = uses_nccl(j);
    ops_open(&dry_run, 0);
    measure_ops(&dry_run, &j->config);
    comm_open_dry_run(&comm, &dry_run, &j->mesh, rank);
    arena_alloc(&dry_run, MEM_COMM, "measured", 2 * LARGEST_COLLECTIVE);
    device_open(&dev, &dry_run, j->run.out, rank, NULL);
    ops_open(&dev, 0);
    if (rank == 0 && j->run.out) make_directories(j->run.out);
    comm_open(&comm, &dev, &j->mesh, rank, j->transport, j->host_transport, &j->thread_world, j->run.timeout);
    __atomic_store_n(&process_end.quiet, 0, __ATOMIC_RELAXED); // from here on each process reports its own errors
    char *buffers = (char *)arena_alloc(&dev, MEM_COMM, "measured", 2 * LARGEST_COLLECTIVE);
    h->job = j;
    h->comm = &comm;
    if (rank == 0 && ((HostsJob *)j)->cluster)
        cluster_open(&h->cluster, ((HostsJob *)j)->cluster, &j->mesh, j->run.threads, j->transport->name, 0);
    measure_all(h, buffers);
    measure_hybrid(h, buffers);
    if (rank == 0) report_all(h, seconds_now() - start);
    // all ranks end in order, with the same exit code: an abort could keep the launcher from showing the report
    int *problems = new_array(int, j->mesh.world);
    quiet_all_gather(&comm, "number of problems", &h->problems, problems, sizeof(int));
    if (problems[0]) __atomic_store_n(&((HostsJob *)j)->has_problems, 1, __ATOMIC_RELAXED); // by all threads
    free(problems);
    cluster_close(&h->cluster);
    free(h);
    comm_close(&comm);
    ops_close(&dev);
    device_close(&dev);
}

static Purpose hosts_purpose(void) {
    Purpose p = ZERO;
    p.program = hosts_program.name;
    p.measures_hosts = 1;
    return p;
}

#ifndef TESTING_PROGRAM
/* The path of the train_llama3 next to this program; NULL: there is none. */
static const char *trainer_beside(void) {
    static char beside[4096];
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[max_i64(n, 0)] = 0;
    path_beside(beside, sizeof beside, path, CUDA_BUILD ? "train_llama3_cuda" : "train_llama3");
    return n > 0 && entry_exists(beside) ? beside : NULL;
}

int main(int argc, char **argv) {
    static HostsJob h; // large for a small stack
    Job *j = &h.job;
    Program program = hosts_program;
    if (!program_begin(&program, &h, j, argc, argv)) return 0;
    j->purpose = hosts_purpose();
    double to_connect = check_hosts_limits(j);
    LaunchInfo started = process_connect(&j->run, 0, to_connect, &argc, &argv);
    job_open(j, &started);
    if (run_hosts.count > 1) j->purpose.program_file = trainer_beside();
    launch(j, started.rank, check_hosts);
    finish_results();
    job_close(j);
    comm_end_process();
    return h.has_problems;
}
#endif
