/* collectives.cu: measures the collectives of comm.h by transport and group size, next to plain ways of doing the same,
 * and writes the cluster file, from which plan_llama3 estimates step times.
 *
 *   collectives rates                    memory, matmuls and attention of this host, by the program's own ops
 *   collectives threads                  collectives in groups of 2, 3, 4 and 8 threads of this process
 *   mpirun -np N … collectives mpi       collectives in one group of N processes
 *     --into FILE                        adds the figures to FILE
 *     --check                            a few small sizes only
 *     --rounds N
 *     --command TEXT  --commit HASH      what FILE records as its origin
 *
 * The last line is `N passed, N failed`; the exit code is 1 when a check failed. `make collectives` runs all of them.
 *
 * The cluster file is one JSON object. Units are in the names: _s is seconds, bytes_per_s, flops_per_s.
 *   name                  processor and cores
 *   command, commit       what wrote the file
 *   rates_of              "host": the rates are those of all cores of a host together, which its ranks share;
 *                         "device": of one device, which one rank has to itself
 *   cores_per_host, memory_bytes_per_host
 *   memory_bytes_per_s    bytes read and written by an op that only moves memory (out += in, larger than the caches)
 *   copy_bytes_per_s      the same for memcpy
 *   matmuls               [{dtype, op, of, M, N, K, flops_per_s}, …]  matmuls C(M,N) with a sum over K; `of` names the
 *                         model whose shape it is
 *   attention             [{dtype, op, of, B, T, NH, NKV, HD, flops_per_s}, …]  FLOPs of the pairs that the mask lets
 *                         through
 *   collectives           [{transport, ranks, hosts, op, oversubscribed, latency_s, bytes_per_s, fit_error,
 *                           measured_bytes: […], measured_s: […]}, …]
 * A plan looks up each axis of its mesh by the size of the group and the number of hosts it spans. A collective takes
 * latency_s + (bytes that a rank receives) / bytes_per_s. This line is fitted to the measured pairs by least squares of
 * the relative error; fit_error is the largest relative error. Messages that fit a cache are faster than one line can
 * express: for more accuracy interpolate between the pairs. `oversubscribed` means more ranks than cores. op is
 * "all_gather", "reduce_scatter" (the communication alone, which can overlap with computation) or "reduce_scatter+sum".
 *
 * plan_llama3 --cluster FILE reads the file (programs/shared/cluster.h). dev/clusters/h100-8.json was written by hand.
 * Such a file may also have these keys, and needs them if its rates are those of a device:
 *   ranks_per_host        ranks are placed on hosts in the order of their numbers (default: one per core)
 *   hosts_per_rack        for people: which groups leave a rack
 *   storage_bytes_per_s   what all hosts together write to the file system of the checkpoints (--mtbf)
 *   peak_flops_per_s      {fp32, bf16}: the peak that utilization is relative to (default: the fastest matmul listed)
 *   links                 {within_host: {latency_s, bytes_per_s}, between_hosts: {…}} of one rank and direction, for
 *                         groups that "collectives" does not list; latency_s counts once per doubling of the group.
 *                         Without links the nearest row of "collectives" is used
 * With links, an all-gather reaches a host once, over the links of all members on it; in an all-to-all (here: a
 * reduce-scatter) data from other hosts arrives over a rank's own link. Keys that no program reads (source, note, of)
 * say where a figure comes from. Each matmul and attention op needs a row in the build's dtype; an op takes the rate of
 * the row that is nearest in FLOPs and in FLOPs per byte. All other ops take bytes / memory_bytes_per_s.
 */
#include "../../lib/comm/comm_open.h" // defines: Comm, collective_start, comm_wait, all_gather_now, the transports
#include "../../lib/ops/ops.h"        // defines: tree_sum, linear_forward, attention_forward, …
#include "../../lib/io/json.h"        // defines: cJSON
#include "../../llama3.h"             // defines: llama3_presets
#include <sys/resource.h>

enum { MOST_SIZES = 16, MOST_ROUNDS = 99, MOST_VERSIONS = 10, FEWEST_ROUNDS = 3 };
static const double TURN_SECONDS = 2e-3,
                    VERSION_SECONDS = 0.15; // how long a short call is repeated; when a slow version is stopped

static struct {
    int check, rounds, passed, failed;
    const char *into, *command, *commit;
} page;

static void page_check(int ok, const char *what, const char *format, ...) {
    va_list args;
    va_start(args, format);
    *(ok ? &page.passed : &page.failed) += 1;
    printf("%s %s: ", ok ? "pass" : "FAIL", what);
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

static int host_cores(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

// ---------------------------------------------------------------------------
// one rank, its buffers and their contents

typedef struct {
    int arrived, turn;
} Barrier; // of the plain versions in threads

typedef struct Rank {
    Comm comm;
    Device dev;
    Mesh mesh;
    int n, rank, on_host; // ranks in all, and on this host
    int64_t most;         // elements of the largest part
    int64_t count;        // elements of a part now
    float *send;          // (n, count): part p goes to member p; an all-gather sends the first
    float *recv;          // (n, count)
    float *sum;           // (count): the sum of what all members sent here
    double *agreed;       // (n)
    int planted;          // the comparison was tried on a wrong element
    int64_t received;     // bytes from others since the ledger was cleared, by our own count
    struct Rank *all;     // (n) threads: the others
    Barrier *barrier;
    struct Results *results;
} Rank;

/* Element i of rank r's send buffer: in (-1, 1), with bits that no other rank has there.
 */
static inline float value(int rank, int64_t i) {
    uint32_t x = (uint32_t)i * 0x9E3779B1u ^ (uint32_t)(rank + 1) * 0x85EBCA77u;
    x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
    return (float)(int32_t)(x ^ (x >> 13)) * (1.0f / 2147483648.0f);
}

/* The sum over ranks first … first + n - 1 in the order that tree_sum promises, written without it: (left half) +
 * (right half). */
enum { BLOCK = 1024 };
static void tree_of_values(float *out, int first, int n, int64_t at, int64_t count) {
    float right[BLOCK];
    int half = 1;
    while (2 * half < n) half *= 2;
    if (n == 1) {
        for (int64_t i = 0; i < count; i++) out[i] = value(first, at + i);
        return;
    }
    tree_of_values(out, first, half, at, count);
    tree_of_values(right, first + half, n - half, at, count);
    for (int64_t i = 0; i < count; i++) out[i] += right[i];
}

// what a version leaves behind
typedef enum { NOTHING, GATHERED, SCATTERED, TREE_SUM, ANY_SUM } Leaves;

/* How many of the elements are wrong. ANY_SUM: the order of additions is not fixed, so within rounding. */
static int64_t count_wrong(const Rank *r, Leaves leaves, int64_t *compared) {
    int sums = leaves == TREE_SUM || leaves == ANY_SUM;
    float expected[BLOCK], bound = leaves == ANY_SUM ? (float)(r->n * r->n) * 0x1p-24f : 0;
    int64_t wrong = 0;
    for (int p = 0; p < (sums ? 1 : r->n); p++)
        for (int64_t i = 0; i < r->count; i += BLOCK) {
            int64_t some = min_i64(BLOCK, r->count - i), at = leaves == GATHERED ? i : r->rank * r->count + i;
            const float *got = sums ? r->sum + i : r->recv + p * r->count + i;
            tree_of_values(expected, sums ? 0 : p, sums ? r->n : 1, at, some);
            for (int64_t j = 0; j < some; j++) wrong += !(fabsf(got[j] - expected[j]) <= bound); // NaN is wrong
            *compared += some;
        }
    return wrong;
}

// ---------------------------------------------------------------------------
// the versions in use

static size_t part_bytes(const Rank *r) { return (size_t)r->count * sizeof(float); }

static void in_use(Rank *r, Collective collective) {
    Request request = ZERO;
    size_t n = part_bytes(r);
    if (collective == ALL_GATHER)
        all_gather_start(&r->comm, &request, AXIS_FSDP, "page", r->send, r->recv, n, DTYPE_BYTE);
    else reduce_scatter_pieces_start(&r->comm, &request, AXIS_FSDP, "page", r->send, r->recv, n, DTYPE_BYTE);
    comm_wait(&r->comm, &request);
    r->received += (int64_t)part_bytes(r) * (r->n - 1);
}
static void gather_in_use(Rank *r) { in_use(r, ALL_GATHER); }
static void scatter_in_use(Rank *r) { in_use(r, REDUCE_SCATTER); }
static void reduce_in_use(Rank *r) {
    in_use(r, REDUCE_SCATTER);
    tree_sum(&r->dev, r->sum, r->recv, DTYPE_F32, r->n, r->count, 0);
}

/* The roofline: each rank copies as many bytes as it receives, its own part included, without any synchronization. */
static void copy_alone(Rank *r) { memcpy(r->recv, r->send, part_bytes(r) * (size_t)r->n); }

// ---------------------------------------------------------------------------
// plain versions in threads

static void everybody(Rank *r) {
    int turn = __atomic_load_n(&r->barrier->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&r->barrier->arrived, 1, __ATOMIC_ACQ_REL) == r->n) {
        __atomic_store_n(&r->barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&r->barrier->turn, turn + 1, __ATOMIC_RELEASE);
    } else {
        while (__atomic_load_n(&r->barrier->turn, __ATOMIC_ACQUIRE) == turn) sched_yield();
    }
}

static void gather_by_one(Rank *r) {
    everybody(r);
    for (int to = 0; to < r->n && r->rank == 0; to++)
        for (int p = 0; p < r->n; p++) memcpy(r->all[to].recv + p * r->count, r->all[p].send, part_bytes(r));
    everybody(r);
}

static void gather_in_rank_order(Rank *r) {
    everybody(r);
    for (int p = 0; p < r->n; p++) memcpy(r->recv + p * r->count, r->all[p].send, part_bytes(r));
    everybody(r);
}

static void sum_from_senders(Rank *r, int to) {
    float *restrict sum = r->all[to].sum;
    memcpy(sum, r->all[0].send + to * r->count, part_bytes(r));
    for (int p = 1; p < r->n; p++) {
        const float *restrict from = r->all[p].send + to * r->count;
        for (int64_t i = 0; i < r->count; i++) sum[i] += from[i];
    }
}
static void reduce_by_one(Rank *r) {
    everybody(r);
    for (int to = 0; to < r->n && r->rank == 0; to++) sum_from_senders(r, to);
    everybody(r);
}
static void reduce_from_senders(Rank *r) {
    everybody(r);
    sum_from_senders(r, r->rank);
    everybody(r);
}

// ---------------------------------------------------------------------------
// plain versions in MPI

#ifdef HAVE_MPI
static MPI_Comm group_of(Rank *r) { return r->comm.groups[AXIS_FSDP].mpi; }
static void gather_mpi(Rank *r) {
    MPI_Allgather(r->send, (int)r->count, MPI_FLOAT, r->recv, (int)r->count, MPI_FLOAT, group_of(r));
}
static void reduce_mpi(Rank *r) {
    MPI_Reduce_scatter_block(r->send, r->sum, (int)r->count, MPI_FLOAT, MPI_SUM, group_of(r));
}
static void alltoall_and_sum(Rank *r) {
    MPI_Alltoall(r->send, (int)r->count, MPI_FLOAT, r->recv, (int)r->count, MPI_FLOAT, group_of(r));
    tree_sum(&r->dev, r->sum, r->recv, DTYPE_F32, r->n, r->count, 0);
}
#endif

// ---------------------------------------------------------------------------
// the steps

typedef struct {
    Collective collective;
    const char *name;
    void (*run)(Rank *);
    Leaves leaves;
    const char *op;   // in the cluster file; NULL: a version that is not in use
    const char *what; // one sentence, what changed and why
} Version;

static const Version threads_versions[] = {
    {ALL_GATHER, "copy", copy_alone, NOTHING, NULL,
     "the roofline: every rank copies as many bytes as it receives, and waits for nobody."},
    {ALL_GATHER, "1 one thread", gather_by_one, GATHERED, NULL,
     "rank 0 copies every part to everybody: one core's share of the memory."},
    {ALL_GATHER, "2 rank order", gather_in_rank_order, GATHERED, NULL,
     "each rank copies for itself between two barriers, part 0 first: all cores work, all read from one rank."},
    {ALL_GATHER, "in use", gather_in_use, GATHERED, "all_gather",
     "each posts where its data lies and copies what is posted whenever it looks, its own part first: no barrier, "
     "arithmetic in between."},
    {REDUCE_SCATTER, "copy", copy_alone, NOTHING, NULL, "the roofline again."},
    {REDUCE_SCATTER, "1 one thread", reduce_by_one, ANY_SUM, NULL, "rank 0 adds up every part for everybody."},
    {REDUCE_SCATTER, "2 from senders", reduce_from_senders, ANY_SUM, NULL,
     "each adds its part up straight from the others' memory: the least traffic, but two barriers, and nobody computes "
     "until all have summed."},
    {REDUCE_SCATTER, "in use: moved", scatter_in_use, SCATTERED, "reduce_scatter",
     "an all-to-all, copied like the gather: it travels while the next block computes, and the sender's buffer is soon "
     "free."},
    {REDUCE_SCATTER, "in use: + sum", reduce_in_use, TREE_SUM, "reduce_scatter+sum",
     "and the sum as a binary tree: the same bits over any transport, whoever came first."},
};
#ifdef HAVE_MPI
static const Version mpi_versions[] = {
    {ALL_GATHER, "copy", copy_alone, NOTHING, NULL,
     "the roofline: every rank copies as many bytes as it receives, and waits for nobody."},
    {ALL_GATHER, "1 Allgather", gather_mpi, GATHERED, NULL,
     "MPI_Allgather: the library chooses how; nothing else happens meanwhile."},
    {ALL_GATHER, "in use", gather_in_use, GATHERED, "all_gather",
     "MPI_Iallgather, tested between ops: it travels behind arithmetic, and a wait has a deadline."},
    {REDUCE_SCATTER, "copy", copy_alone, NOTHING, NULL, "the roofline again."},
    {REDUCE_SCATTER, "1 Reduce_scatter", reduce_mpi, ANY_SUM, NULL,
     "MPI_Reduce_scatter_block: sums on the way, in an order that depends on the library and on the size."},
    {REDUCE_SCATTER, "2 Alltoall, sum", alltoall_and_sum, TREE_SUM, NULL,
     "MPI_Alltoall, then the sum as a binary tree: the same bits as in threads, n - 1 parts more memory."},
    {REDUCE_SCATTER, "in use: moved", scatter_in_use, SCATTERED, "reduce_scatter",
     "MPI_Ialltoall, tested between ops."},
    {REDUCE_SCATTER, "in use: + sum", reduce_in_use, TREE_SUM, "reduce_scatter+sum", "and the same sum."},
};
#endif

typedef struct Results { // of one group; rank 0 keeps them
    const Transport *transport;
    const Version *versions;
    int num_versions, ranks, hosts, oversubscribed, threads;
    int64_t part[MOST_SIZES]; // bytes of one member's part
    int num_sizes;
    double seconds[MOST_VERSIONS][MOST_SIZES];
    int64_t wrong[MOST_VERSIONS], compared[MOST_VERSIONS]; // elements
    int64_t planted;                                       // elements found wrong where one was
    Traffic started, measured;
    int64_t received; // bytes, by our own count
    double unrest;    // times a second that this process lost a core
} Results;

// ---------------------------------------------------------------------------
// measuring: everything that decides how often a loop runs is agreed on, so that all ranks do the same

static double slowest(Rank *r, double mine) { // also where ranks meet before they start
    all_gather_now(&r->comm, AXIS_WORLD, "times", &mine, r->agreed, sizeof mine);
    for (int i = 0; i < r->n; i++) mine = fmax(mine, r->agreed[i]);
    return mine;
}
static double total(Rank *r, double mine) { // exact for counts, and in the same order everywhere
    double sum = 0;
    all_gather_now(&r->comm, AXIS_WORLD, "counts", &mine, r->agreed, sizeof mine);
    for (int i = 0; i < r->n; i++) sum += r->agreed[i];
    return sum;
}

/* Seconds a call, of the slowest rank. */
static double take_turn(Rank *r, const Version *v, int calls) {
    slowest(r, 0);
    double start = seconds_now();
    for (int i = 0; i < calls; i++) v->run(r);
    return slowest(r, (seconds_now() - start) / calls);
}

static void check_version(Rank *r, int v) {
    const Version *version = &r->results->versions[v];
    int64_t compared = 0;
    memset(r->recv, 0xFF, part_bytes(r) * (size_t)r->n); // NaN: what is left unwritten shows
    memset(r->sum, 0xFF, part_bytes(r));
    slowest(r, 0); // some versions write into the others' buffers
    version->run(r);
    if (version->leaves == NOTHING) return;
    double wrong = total(r, (double)count_wrong(r, version->leaves, &compared)), all = total(r, (double)compared);
    if (r->rank == 0) {
        r->results->wrong[v] += (int64_t)wrong;
        r->results->compared[v] += (int64_t)all;
    }
    if (version->leaves != GATHERED || !version->op || r->planted) return;
    r->planted = 1;
    r->recv[r->n * r->count - 1] += 0.5f; // does the comparison see it?
    wrong = total(r, (double)count_wrong(r, GATHERED, &compared));
    if (r->rank == 0) r->results->planted = (int64_t)wrong;
}

/* All versions at one size. They take turns, so that whatever slows one slows all; medians over rounds. */
static void measure(Rank *r, int size) {
    Results *out = r->results;
    double times[MOST_VERSIONS][MOST_ROUNDS], spent[MOST_VERSIONS], estimate[MOST_VERSIONS];
    int rounds[MOST_VERSIONS];
    r->count = out->part[size] / (int64_t)sizeof(float);
    for (int v = 0; v < out->num_versions; v++) check_version(r, v);
    for (int v = 0; v < out->num_versions; v++) {
        estimate[v] = times[v][0] = spent[v] = take_turn(r, &out->versions[v], 1);
        rounds[v] = estimate[v] > TURN_SECONDS; // a short call alone says little
    }
    for (int round = 0; round < page.rounds; round++)
        for (int v = 0; v < out->num_versions; v++) {
            if (rounds[v] == page.rounds || (rounds[v] >= FEWEST_ROUNDS && spent[v] > VERSION_SECONDS) || spent[v] > 1)
                continue;
            int calls = (int)fmax(1, fmin(256, TURN_SECONDS / estimate[v]));
            double seconds = take_turn(r, &out->versions[v], calls);
            times[v][rounds[v]++] = estimate[v] = seconds;
            spent[v] += seconds * calls;
        }
    for (int v = 0; v < out->num_versions && r->rank == 0; v++) out->seconds[v][size] = median(times[v], rounds[v]);
}

/* Parts of 256 B to 64 MB, as far as an eighth of the memory reaches. */
static int choose_sizes(int64_t *part, int n, int on_host) {
    static const int64_t few[] = {256, 1004, 1 << 16, (1 << 20) + 4}; // two that are no multiple of a vector
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 8;
    int count = 0;
    if (page.check) {
        memcpy(part, few, sizeof few);
        count = 4;
    }
    for (int64_t bytes = 256; !page.check && bytes <= 64 << 20 && (double)bytes * (2 * n + 1) * on_host <= memory;
         bytes *= 4)
        part[count++] = bytes;
    return count;
}

/* Opens a rank as the program does: a device whose arenas are as large as what it will take, then its groups. */
static void rank_open(Rank *r, const Transport *transport, ThreadWorld *threads) {
    Results *out = r->results;
    Device dry_run;
    Mesh mesh = {r->n, {1, 1, 1, r->n, 1}};
    r->mesh = mesh;
    r->most = round_up(out->part[out->num_sizes - 1], 256) / (int64_t)sizeof(float);
    device_open_dry_run(&dry_run, (int)max_i64(1, host_cores() / r->on_host), 0);
    dry_run.arenas[MEM_COMM].peak = (size_t)(r->most * (2 * r->n + 1)) * sizeof(float);
    device_open(&r->dev, &dry_run, ".", 0, NULL);
    comm_open(&r->comm, &r->dev, &r->mesh, r->rank, transport, transport, threads, 60);
    r->send = (float *)arena_alloc(&r->dev, MEM_COMM, "sent", (size_t)(r->most * r->n) * sizeof(float));
    r->recv = (float *)arena_alloc(&r->dev, MEM_COMM, "received", (size_t)(r->most * r->n) * sizeof(float));
    r->sum = (float *)arena_alloc(&r->dev, MEM_COMM, "sum", (size_t)r->most * sizeof(float));
    r->agreed = (double *)checked_malloc(sizeof(double) * (size_t)r->n);
    for (int64_t i = 0; i < r->most * r->n; i++) r->send[i] = value(r->rank, i);
}

static void rank_measure(Rank *r) {
    Results *out = r->results;
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    double start = seconds_now();
    for (int i = 0; i < out->num_sizes; i++) measure(r, i);
    getrusage(RUSAGE_SELF, &after);
    double hosts = total(r, 1.0 / r->on_host);
    if (r->rank == 0) {
        out->unrest = (double)(after.ru_nivcsw - before.ru_nivcsw) / (seconds_now() - start);
        out->ranks = r->n;
        out->hosts = (int)lround(hosts);
        out->oversubscribed = r->on_host > host_cores();
        out->threads = r->dev.on.threads;
        for (int c = 0; c < COLLECTIVES; c++) {
            Traffic started = r->comm.traffic_started[AXIS_FSDP][c], measured = r->comm.traffic_measured[AXIS_FSDP][c];
            out->started.calls += started.calls;
            out->started.bytes += started.bytes;
            out->measured.calls += measured.calls;
            out->measured.bytes += measured.bytes;
        }
        out->received = r->received;
    }
    slowest(r, 0); // nobody's buffers go while another reads them
    free(r->agreed);
    device_close(&r->dev);
}

// ---------------------------------------------------------------------------
// the line: seconds = latency + bytes / rate

/* Least squares on the relative error. Measured from the line's side or from the points', an error of a factor of two
 * should weigh the same: so it is divided by the geometric mean of both, with the line of the turn before. */
typedef struct {
    double latency, seconds_per_byte, error;
} Line;

static Line fit_line(const double *bytes, const double *seconds, int n) {
    Line line = {0, 0, 0};
    double least = INFINITY; // a byte takes no longer than this: where noise hides the rest, it is what is known
    for (int i = 0; i < n; i++) least = fmin(least, seconds[i] / bytes[i]);
    for (int turn = 0; turn < 50; turn++) {
        double s0 = 0, s1 = 0, s2 = 0, t0 = 0, t1 = 0;
        for (int i = 0; i < n; i++) {
            double x = bytes[i], y = seconds[i], now = line.latency + x * line.seconds_per_byte,
                   weight = 1 / (y * (turn ? now : y));
            s0 += weight;
            s1 += weight * x;
            s2 += weight * x * x;
            t0 += weight * y;
            t1 += weight * x * y;
        }
        double slope = (s0 * t1 - s1 * t0) / (s0 * s2 - s1 * s1), latency = (t0 - slope * s1) / s0;
        if (!(latency > 0)) {
            latency = 0;
            slope = t1 / s2; // a line through zero, or one that noise alone shapes, where the best is neither
        }
        if (!(slope > 0)) {
            slope = least;
            latency = fmax(0, (t0 - slope * s1) / s0);
        }
        line.latency = latency;
        line.seconds_per_byte = slope;
    }
    for (int i = 0; i < n; i++)
        line.error = fmax(line.error, fabs((line.latency + bytes[i] * line.seconds_per_byte) / seconds[i] - 1));
    return line;
}

static void check_fit(void) {
    double bytes[10], seconds[10], worst = 0;
    for (double latency = 1e-7; latency < 1e-2; latency *= 10)
        for (double rate = 1e7; rate < 1e12; rate *= 10) {
            for (int i = 0; i < 10; i++) {
                bytes[i] = 256 * exp2(2 * i);
                seconds[i] = latency + bytes[i] / rate;
            }
            Line line = fit_line(bytes, seconds, 10);
            worst = fmax(worst, fmax(fabs(line.latency / latency - 1), fabs(line.seconds_per_byte * rate - 1)));
        }
    for (int i = 0; i < 4; i++) {
        bytes[i] = 256 << (4 * i);
        seconds[i] = 4e-3 - 1e-4 * i;
    }
    Line falling = fit_line(bytes, seconds, 4);
    page_check(falling.seconds_per_byte > 0 && isfinite(1 / falling.seconds_per_byte) && falling.latency >= 0,
               "points that fall, as noise has them, give a rate all the same", "%.3g s and %.3g bytes/s",
               falling.latency, 1 / falling.seconds_per_byte);
    page_check(worst < 1e-6, "points on a line give that line back",
               "latency and rate off by %.1g <= 1e-6 (100 ns to 1 ms, 10 MB/s to 100 GB/s)", worst);
}

// ---------------------------------------------------------------------------
// the cluster file

static double digits(double x) { // four: more than a measurement has, and the file stays readable
    char text[32];
    snprintf(text, sizeof text, "%.4g", x);
    return strtod(text, NULL);
}

static void add(cJSON *object, const char *key, double x) { cJSON_AddNumberToObject(object, key, digits(x)); }

/* One line an entry. */
static void cluster_print(const cJSON *root, FILE *f) {
    const char *comma = "{\n ";
    const cJSON *item, *entry;
    cJSON_ArrayForEach(item, root) {
        fprintf(f, "%s\"%s\": ", comma, item->string);
        comma = ",\n ";
        const char *between = "[\n  ";
        if (cJSON_IsArray(item) && item->child) {
            cJSON_ArrayForEach(entry, item) {
                char *text = cJSON_PrintUnformatted(entry);
                fprintf(f, "%s%s", between, text);
                between = ",\n  ";
                free(text);
            }
            fprintf(f, "]");
        } else {
            char *text = cJSON_PrintUnformatted(item);
            fputs(text, f);
            free(text);
        }
    }
    fprintf(f, "}\n");
}

static void describe_host(char *text, size_t size) {
    char line[256], processor[128] = "unknown processor";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name%*[^:]: %127[^\n]", processor) == 1) break;
    if (f) fclose(f);
    snprintf(text, size, "%s, %d cores", processor, host_cores());
}

/* The file's present contents, or those of a new one. */
static cJSON *cluster_open(const char *path) {
    char name[256];
    size_t length;
    describe_host(name, sizeof name);
    char *text = read_file(path, &length);
    if (text) {
        cJSON *root = cJSON_Parse(text), *of = cJSON_GetObjectItemCaseSensitive(root, "name");
        if (!cJSON_IsString(of))
            user_error("%s is no cluster file (JSON with a \"name\"): give another path, or remove it", path);
        if (strcmp(of->valuestring, name))
            user_error("%s is of \"%s\", this is \"%s\": give another path, or remove it", path, of->valuestring, name);
        free(text);
        return root;
    }
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "name", name);
    cJSON_AddStringToObject(root, "command", page.command);
    cJSON_AddStringToObject(root, "commit", page.commit);
    cJSON_AddStringToObject(root, "rates_of", "host");
    cJSON_AddNumberToObject(root, "cores_per_host", host_cores());
    cJSON_AddNumberToObject(root, "memory_bytes_per_host",
                            (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE));
    return root;
}

static int says(const cJSON *entry, const char *key, const char *text) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(entry, key);
    return cJSON_IsString(item) && !strcmp(item->valuestring, text);
}
static double number(const cJSON *entry, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(entry, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

/* A list of the file, made if need be. */
static cJSON *cluster_list(cJSON *root, const char *key) {
    cJSON *list = cJSON_GetObjectItemCaseSensitive(root, key);
    return list ? list : cJSON_AddArrayToObject(root, key);
}
static void set_number(cJSON *root, const char *key, double x) {
    if (cJSON_HasObjectItem(root, key))
        cJSON_ReplaceItemInObjectCaseSensitive(root, key, cJSON_CreateNumber(digits(x))); // where it stands
    else add(root, key, x);
}

/* The entry of the same collective in the file, or NULL. */
static cJSON *cluster_exchange(const cJSON *root, const char *transport, int ranks, int hosts, const char *op) {
    cJSON *list = cJSON_GetObjectItemCaseSensitive(root, "collectives"), *entry;
    cJSON_ArrayForEach(entry, list) {
        int is_same_group = number(entry, "ranks") == ranks && number(entry, "hosts") == hosts;
        if (is_same_group && says(entry, "transport", transport) && says(entry, "op", op)) return entry;
    }
    return NULL;
}

/* Every number of the file that a time can be computed from is positive; a latency may be 0. Returns how many are not.
 */
static int count_unusable(const cJSON *item) {
    int bad = 0;
    const cJSON *child;
    if (cJSON_IsNumber(item)) {
        int may_be_zero = item->string && (!strcmp(item->string, "latency_s") || !strcmp(item->string, "fit_error"));
        bad = !(item->valuedouble > 0 || (may_be_zero && item->valuedouble == 0)) || !isfinite(item->valuedouble);
    }
    cJSON_ArrayForEach(child, item) bad += count_unusable(child);
    return bad;
}

/* Writes a temporary file and renames it, so that a reader finds a whole file; then reads it back and compares.
 */
static void cluster_close(cJSON *root, const char *path) {
    char beside[4096];
    size_t length;
    snprintf(beside, sizeof beside, "%s.new", path);
    FILE *f = fopen(beside, "w");
    if (!f) user_error("cannot write %s: %s", beside, strerror(errno));
    cluster_print(root, f);
    if (ferror(f) | fclose(f) || rename(beside, path)) user_error("cannot write %s: %s", path, strerror(errno));
    char *text = read_file(path, &length);
    cJSON *back = text ? cJSON_Parse(text) : NULL;
    const cJSON *exchange = cJSON_GetObjectItemCaseSensitive(back, "collectives"),
                *matmuls = cJSON_GetObjectItemCaseSensitive(back, "matmuls");
    page_check(back && cJSON_Compare(root, back, 1), "the cluster file read back is what was written",
               "%zu bytes, %d collectives, %d matmuls", length, cJSON_GetArraySize(exchange),
               cJSON_GetArraySize(matmuls));
    page_check(back && !count_unusable(back), "its figures are positive and finite", "%d are not",
               back ? count_unusable(back) : 0);
    cJSON_Delete(back);
    free(text);
    cJSON_Delete(root);
}

// ---------------------------------------------------------------------------
// results: the table, the checks, the entries of the file

static double received_bytes(const Results *r, int size) { return (double)r->part[size] * (r->ranks - 1); }

static void results_print(const Results *r) {
    printf("\n%s, %d ranks x %d thread%s, %d host%s%s: microseconds of the slowest rank; GB/s that a rank receives; "
           "share of the copy's rate\n",
           r->transport->name, r->ranks, r->threads, r->threads > 1 ? "s" : "", r->hosts, r->hosts > 1 ? "s" : "",
           r->oversubscribed ? ", more ranks than cores" : "");
    for (int c = 0; c <= REDUCE_SCATTER; c++) { // no messages
        const double *copy = NULL;
        printf("%-15s %10s", collective_names[c], "part bytes");
        for (int v = 0; v < r->num_versions; v++)
            if ((int)r->versions[v].collective == c)
                printf(r->versions[v].op ? " %17s %7s %6s" : " %17s", r->versions[v].name, "GB/s", "copy");
        printf("\n");
        for (int i = 0; i < r->num_sizes; i++) {
            printf("%26" PRId64, r->part[i]);
            for (int v = 0; v < r->num_versions; v++) {
                const double *seconds = r->seconds[v];
                if ((int)r->versions[v].collective != c) continue;
                if (r->versions[v].leaves == NOTHING) copy = seconds;
                printf(" %17.1f", 1e6 * seconds[i]);
                if (r->versions[v].op)
                    printf(" %7.3f %4.0f %%", received_bytes(r, i) / seconds[i] / 1e9,
                           copy ? 100 * copy[i] / seconds[i] : 0);
            }
            printf("\n");
        }
    }
    fflush(stdout);
    if (r->unrest > 25 && !r->oversubscribed && !page.check)
        fprintf(stderr,
                "note: %s, %d ranks lost their core %.0f times a second: other programs run, these times are not to be "
                "quoted\n",
                r->transport->name, r->ranks, r->unrest);
}

static void results_check(const Results *r) {
    char what[160];
    for (int v = 0; v < r->num_versions; v++) {
        if (r->versions[v].leaves == NOTHING) continue;
        const char *summed = r->versions[v].leaves == ANY_SUM ? ", summed" : "";
        if (r->versions[v].leaves == TREE_SUM) summed = ", summed as a tree";
        snprintf(what, sizeof what, "%s, %d ranks, %s, %s: every element arrives%s", r->transport->name, r->ranks,
                 collective_names[r->versions[v].collective], r->versions[v].name, summed);
        page_check(r->wrong[v] == 0 && r->compared[v] > 0, what, "%" PRId64 " of %" PRId64 " wrong, %d sizes",
                   r->wrong[v], r->compared[v], r->num_sizes);
    }
    snprintf(what, sizeof what, "%s, %d ranks: an element made wrong on each is seen", r->transport->name, r->ranks);
    page_check(r->planted == r->ranks, what, "%" PRId64 " of %d", r->planted, r->ranks);
    snprintf(what, sizeof what, "%s, %d ranks: op ledger = measured = received", r->transport->name, r->ranks);
    page_check(r->started.calls == r->measured.calls && r->started.bytes == r->measured.bytes &&
                   r->measured.bytes == r->received,
               what, "%" PRId64 " and %" PRId64 " calls, %" PRId64 ", %" PRId64 " and %" PRId64 " bytes",
               r->started.calls, r->measured.calls, r->started.bytes, r->measured.bytes, r->received);
}

static void results_into(const Results *r, cJSON *root) {
    cJSON *list = cluster_list(root, "collectives");
    printf("\n%-20s %12s %10s %10s\n", "the line", "latency us", "GB/s", "off by");
    for (int v = 0; v < r->num_versions; v++) {
        double bytes[MOST_SIZES], seconds[MOST_SIZES];
        const char *op = r->versions[v].op;
        if (!op) continue;
        for (int i = 0; i < r->num_sizes; i++) {
            bytes[i] = received_bytes(r, i);
            seconds[i] = digits(r->seconds[v][i]);
        }
        Line line = fit_line(bytes, seconds, r->num_sizes);
        printf("%-20s %12.2f %10.3f %8.0f %%\n", op, 1e6 * line.latency, 1e-9 / line.seconds_per_byte,
               100 * line.error);
        cJSON_Delete(
            cJSON_DetachItemViaPointer(list, cluster_exchange(root, r->transport->name, r->ranks, r->hosts, op)));
        cJSON *e = cJSON_CreateObject();
        cJSON_AddItemToArray(list, e);
        cJSON_AddStringToObject(e, "transport", r->transport->name);
        cJSON_AddNumberToObject(e, "ranks", r->ranks);
        cJSON_AddNumberToObject(e, "hosts", r->hosts);
        cJSON_AddStringToObject(e, "op", op);
        cJSON_AddBoolToObject(e, "oversubscribed", r->oversubscribed);
        add(e, "latency_s", line.latency);
        add(e, "bytes_per_s", 1 / line.seconds_per_byte);
        add(e, "fit_error", line.error);
        cJSON_AddItemToObject(e, "measured_bytes", cJSON_CreateDoubleArray(bytes, r->num_sizes));
        cJSON_AddItemToObject(e, "measured_s", cJSON_CreateDoubleArray(seconds, r->num_sizes));
    }
    fflush(stdout);
}

static void versions_print(const Version *versions, int count, const char *transport) {
    printf("%s\n", transport);
    for (int v = 0; v < count; v++)
        printf("  %-14s %-18s %s\n", collective_names[versions[v].collective], versions[v].name, versions[v].what);
}

// ---------------------------------------------------------------------------
// groups: threads of this process, or the processes of mpirun

typedef struct {
    Rank *rank;
    ThreadWorld *world;
} RankThread;

static void *rank_thread(void *arg) {
    RankThread *t = (RankThread *)arg;
    rank_open(t->rank, &transport_threads, t->world);
    slowest(t->rank, 0); // the others' buffers exist
    rank_measure(t->rank);
    return NULL;
}

static void results_open(Results *r, const Transport *transport, const Version *versions, int count, int n,
                         int on_host) {
    memset(r, 0, sizeof *r);
    r->transport = transport;
    r->versions = versions;
    r->num_versions = count;
    r->num_sizes = choose_sizes(r->part, n, on_host);
    if (!r->num_sizes)
        user_error("%d ranks: an eighth of this host's memory does not hold even their smallest messages: start fewer",
                   n);
}

static void threads_group(Results *out, int n) {
    ThreadWorld world = ZERO;
    Barrier barrier = ZERO;
    pthread_t threads[8];
    RankThread args[8];
    Rank *ranks = (Rank *)checked_malloc(sizeof(Rank) * (size_t)n);
    pthread_mutex_init(&world.lock, NULL);
    results_open(out, &transport_threads, threads_versions, (int)(sizeof threads_versions / sizeof *threads_versions),
                 n, n);
    for (int i = 0; i < n; i++) {
        ranks[i].n = ranks[i].on_host = n;
        ranks[i].rank = i;
        ranks[i].all = ranks;
        ranks[i].barrier = &barrier;
        ranks[i].results = out;
        args[i].rank = &ranks[i];
        args[i].world = &world;
    }
    for (int i = 0; i < n; i++)
        if (pthread_create(&threads[i], NULL, rank_thread, &args[i]))
            run_failure("the thread of rank %d could not be started", i);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    thread_world_close(&world);
    free(ranks);
}

static void results_report(const Results *r) {
    results_print(r);
    if (page.into) {
        cJSON *root = cluster_open(page.into);
        results_into(r, root);
        cluster_close(root, page.into);
    }
    results_check(r);
    fflush(stdout);
}

static void run_threads(void) {
    static const int sizes[] = {2, 3, 4, 8};
    Results *r = (Results *)checked_malloc(sizeof *r);
    if (!page.check)
        versions_print(threads_versions, (int)(sizeof threads_versions / sizeof *threads_versions), "threads");
    for (int i = 0; i < 4; i++) {
        threads_group(r, sizes[i]);
        results_report(r);
    }
    free(r);
}

#ifdef HAVE_MPI
static void run_mpi(int process, int processes, int on_host) {
    int crowd = on_host; // the most ranks on a host: all hosts choose the same sizes
    Results *results = (Results *)checked_malloc(sizeof *results);
    Rank *r = (Rank *)checked_malloc(sizeof *r);
    MPI_Allreduce(MPI_IN_PLACE, &crowd, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    r->n = processes;
    r->rank = process;
    r->on_host = on_host;
    r->results = results;
    results_open(results, &transport_mpi, mpi_versions, (int)(sizeof mpi_versions / sizeof *mpi_versions), processes,
                 crowd);
    MPI_Allreduce(MPI_IN_PLACE, &results->num_sizes, 1, MPI_INT, MPI_MIN,
                  MPI_COMM_WORLD); // nor do they all have as much memory
    if (process == 0 && !page.check && processes == 2) versions_print(mpi_versions, results->num_versions, "mpi");
    rank_open(r, &transport_mpi, NULL);
    rank_measure(r);
    if (process == 0) results_report(results);
    free(results);
    free(r);
}
#endif

// ---------------------------------------------------------------------------
// rates of the ops, all cores at work on one

typedef struct {
    Device *dev;
    int N, IC, OC; // of a matmul
    AttentionShape shape;
    floatX *x, *y, *w; // inputs, outputs, weights of a matmul; attention: q, k and v; out; their gradients
    float *dw;         // matmuls: gradient of the weights; attention: lse
    int64_t count;     // memory: floats
} Rates;

static void forward(Rates *r) { linear_forward(r->dev, r->y, r->x, r->w, r->N, r->IC, r->OC); }
static void backward_input(Rates *r) { linear_backward_input(r->dev, r->x, r->y, r->OC, r->w, r->N, r->IC, r->OC); }
static void backward_weight(Rates *r) {
    linear_backward_weight(r->dev, r->dw, r->y, r->OC, r->x, r->N, r->IC, r->OC, 0);
}

static void attend(Rates *r) {
    const AttentionShape *s = &r->shape;
    attention_forward(r->dev, r->y, r->dw, r->x, r->x + s->NH * s->HD, r->x + (s->NH + s->NKV) * s->HD, s);
}
static void attend_backward(Rates *r) { // its own output serves as a gradient
    const AttentionShape *s = &r->shape;
    int64_t k = s->NH * s->HD, v = (s->NH + s->NKV) * s->HD;
    attention_backward(r->dev, r->w, r->w + k, r->w + v, r->y, r->y, r->dw, r->x, r->x + k, r->x + v, s);
}

static void move_memory(Rates *r) { tree_sum(r->dev, r->dw, r->x, DTYPE_F32, 1, r->count, 1); }
static void copy_memory(Rates *r) {
    enum { PIECE = 1 << 16 };
#pragma omp parallel for num_threads(r->dev->on.threads)
    for (int64_t i = 0; i < r->count; i += PIECE)
        memcpy(r->dw + i, (float *)(void *)r->x + i, sizeof(float) * (size_t)min_i64(PIECE, r->count - i));
}

/* Median seconds of a call. The first call, which touches new pages and creates matmul primitives, does not count. */
static double seconds_of(Rates *r, void (*run)(Rates *)) {
    double times[MOST_ROUNDS], spent = 0;
    int n = 0;
    run(r);
    while (n < page.rounds && (n < FEWEST_ROUNDS || spent < 0.5)) {
        int calls = 0;
        double start = seconds_now(), now;
        do {
            run(r);
            calls++;
            now = seconds_now();
        } while (now - start < TURN_SECONDS);
        times[n++] = (now - start) / calls;
        spent += now - start;
    }
    return median(times, n);
}

/* One op of one shape as an entry of `list`; its FLOPs are those of the op ledger. */
static void rate_of(Rates *r, cJSON *list, OpKind op, const char *of, void (*run)(Rates *), const char *const *names,
                    const int *sizes, int dims) {
    double seconds = seconds_of(r, run), flops = r->dev->rec.ops[op].flops / (double)r->dev->rec.ops[op].calls;
    printf("%-24s %-26s %12.3f %10.1f\n", op_names[op], of, 1e3 * seconds, flops / seconds / 1e9);
    memset(r->dev->rec.ops, 0, sizeof r->dev->rec.ops);
    cJSON *e = cJSON_CreateObject();
    cJSON_AddItemToArray(list, e);
    cJSON_AddStringToObject(e, "dtype", PRECISION_NAME);
    cJSON_AddStringToObject(e, "op", op_names[op]);
    cJSON_AddStringToObject(e, "of", of);
    for (int i = 0; i < dims; i++) cJSON_AddNumberToObject(e, names[i], sizes[i]);
    add(e, "flops_per_s", flops / seconds);
}

static floatX *random_x(Device *dev, int64_t count, float scale) {
    floatX *x = (floatX *)arena_alloc(dev, MEM_ACTIVATIONS, "a tensor", (size_t)count * sizeof(floatX));
    for (int64_t i = 0; i < count; i++) x[i] = from_float(scale * value(0, i));
    return x;
}
static float *floats(Device *dev, int64_t count) {
    return (float *)arena_alloc(dev, MEM_ACTIVATIONS, "a tensor", (size_t)count * sizeof(float));
}

typedef enum { QKV, GATE_UP, HEAD } Which;

static void matmul_rates(Device *dev, cJSON *list) {
    static const struct {
        const char *model, *of;
        Which which;
        int tokens;
    } shapes[] = {// narrow to wide; the first alone for --check
                  {"tiny", "tiny: gate and up", GATE_UP, 2048},
                  {"bench-125m", "bench-125m: q, k, v", QKV, 1024},
                  {"bench-125m", "bench-125m: gate and up", GATE_UP, 1024},
                  {"bench-125m", "bench-125m: head", HEAD, 1024},
                  {"llama3-8b", "llama3-8b: q, k, v", QKV, 512}};
    static const char *const names[] = {"M", "N", "K"};
    for (int i = 0; i < (page.check ? 1 : (int)(sizeof shapes / sizeof *shapes)); i++) {
        const Llama3Config *c = llama3_presets;
        while (strcmp(c->name, shapes[i].model)) c++;
        Rates r = ZERO;
        r.dev = dev;
        r.N = shapes[i].tokens;
        r.IC = c->C;
        const int outputs[] = {[QKV] = (c->NH + 2 * c->NKV) * c->HD, [GATE_UP] = 2 * c->F, [HEAD] = c->V};
        r.OC = outputs[shapes[i].which];
        r.x = random_x(dev, (int64_t)r.N * r.IC, 1);
        r.w = random_x(dev, (int64_t)r.OC * r.IC, 0.02f);
        r.y = random_x(dev, (int64_t)r.N * r.OC, 1);
        r.dw = floats(dev, (int64_t)r.OC * r.IC);
        const int forward_size[] = {r.N, r.OC, r.IC}, input_size[] = {r.N, r.IC, r.OC},
                  weight_size[] = {r.OC, r.IC, r.N};
        rate_of(&r, list, OP_LINEAR_FORWARD, shapes[i].of, forward, names, forward_size, 3);
        rate_of(&r, list, OP_LINEAR_BACKWARD_WEIGHT, shapes[i].of, backward_weight, names, weight_size,
                3); // before x is overwritten
        rate_of(&r, list, OP_LINEAR_BACKWARD_INPUT, shapes[i].of, backward_input, names, input_size, 3);
        arena_release(dev, MEM_ACTIVATIONS, 0);
    }
}

static void attention_rates(Device *dev, cJSON *list) {
    static const struct {
        const char *of;
        int size[5];
    } shapes[] = {{"tiny", {8, 256, 4, 2, 64}},
                  {"bench-125m", {2, 512, 12, 4, 64}},
                  {"llama3-8b: a quarter", {1, 2048, 8, 2, 128}}};
    static const char *const names[] = {"B", "T", "NH", "NKV", "HD"};
    for (int i = 0; i < (page.check ? 1 : 3); i++) {
        const int *size = shapes[i].size;
        Rates r = ZERO;
        r.dev = dev;
        AttentionShape *s = &r.shape;
        s->B = size[0];
        s->Tq = s->Tk = size[1];
        s->NH = size[2];
        s->NKV = size[3];
        s->HD = size[4];
        s->q_stride = s->k_stride = s->v_stride = (int64_t)(s->NH + 2 * s->NKV) * s->HD;
        s->o_stride = (int64_t)s->NH * s->HD;
        int64_t tokens = (int64_t)s->B * s->Tq;
        r.x = random_x(dev, tokens * s->q_stride, 1);
        r.y = random_x(dev, tokens * s->o_stride, 1);
        r.w = random_x(dev, tokens * s->q_stride, 1);
        r.dw = floats(dev, tokens * s->NH);
        rate_of(&r, list, OP_ATTENTION_FORWARD, shapes[i].of, attend, names, size, 5);
        rate_of(&r, list, OP_ATTENTION_BACKWARD, shapes[i].of, attend_backward, names, size, 5);
        arena_release(dev, MEM_ACTIVATIONS, 0);
    }
}

static void memory_rates(Device *dev, cJSON *root) {
    Rates r = ZERO;
    r.dev = dev;
    r.count = page.check ? 1 << 20 : 1 << 26; // 256 MB each: beyond the caches of most
    r.x = (floatX *)(void *)floats(dev, r.count);
    r.dw = floats(dev, r.count);
    double moved = seconds_of(&r, move_memory),
           bytes = dev->rec.ops[OP_TREE_SUM].bytes / (double)dev->rec.ops[OP_TREE_SUM].calls;
    double copied = seconds_of(&r, copy_memory), all = 2 * sizeof(float) * (double)r.count;
    int equal = !memcmp(r.x, r.dw, sizeof(float) * (size_t)r.count);
    set_number(root, "memory_bytes_per_s", bytes / moved);
    set_number(root, "copy_bytes_per_s", all / copied);
    printf("%-24s %-26s %12.3f %10.1f\n%-24s %-26s %12.3f %10.1f\n", "tree_sum", "out += in, GB/s", 1e3 * moved,
           bytes / moved / 1e9, "memcpy", "GB/s read and written", 1e3 * copied, all / copied / 1e9);
    page_check(equal, "memcpy by all threads copies all", "%" PRId64 " floats", r.count);
    memset(dev->rec.ops, 0, sizeof dev->rec.ops);
    arena_release(dev, MEM_ACTIVATIONS, 0);
}

static void drop_dtype(cJSON *list) {
    for (cJSON *e = list->child, *next; e; e = next) {
        next = e->next;
        if (says(e, "dtype", PRECISION_NAME)) cJSON_Delete(cJSON_DetachItemViaPointer(list, e));
    }
}

static void run_rates(void) {
    Device dry_run, dev;
    device_open_dry_run(&dry_run, host_cores(), 0);
    dry_run.arenas[MEM_WORKSPACE].peak = dry_run.arenas[MEM_ACTIVATIONS].peak =
        (size_t)16 << 30; // address space only: pages are allocated when touched
    device_open(&dev, &dry_run, ".", 0, NULL);
    ops_open(&dev, 1);
    cJSON *root = page.into ? cluster_open(page.into) : cJSON_CreateObject();
    printf("\nrates, %s, %d threads\n%-24s %-26s %12s %10s\n", PRECISION_NAME, dev.on.threads, "op", "of", "ms",
           "GFLOP/s");
    memory_rates(&dev, root);
    cJSON *matmuls = cluster_list(root, "matmuls"), *attention = cluster_list(root, "attention");
    drop_dtype(matmuls);
    drop_dtype(attention);
    matmul_rates(&dev, matmuls);
    attention_rates(&dev, attention);
    if (page.into) cluster_close(root, page.into);
    else cJSON_Delete(root);
    ops_close(&dev);
    device_close(&dev);
}

// ---------------------------------------------------------------------------

static void options(int argc, char **argv) {
    page.rounds = 9;
    page.command = "collectives";
    page.commit = "none";
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--check")) page.check = 1;
        else if (!strcmp(argv[i], "--into")) {
            page.into = value;
            i++;
        } else if (!strcmp(argv[i], "--rounds")) {
            page.rounds = atoi(value);
            i++;
        } else if (!strcmp(argv[i], "--command")) {
            page.command = value;
            i++;
        } else if (!strcmp(argv[i], "--commit")) {
            page.commit = value;
            i++;
        } else user_error("%s: expected --check, --into FILE, --rounds N, --command TEXT or --commit HASH", argv[i]);
    }
    if (page.rounds < 1 || page.rounds > MOST_ROUNDS)
        user_error("--rounds is %d, expected 1 to %d", page.rounds, MOST_ROUNDS);
    if (page.check) page.rounds = FEWEST_ROUNDS;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "nothing";
    int process = 0;
    options(argc, argv);
    if (!strcmp(what, "rates")) run_rates();
    else if (!strcmp(what, "threads")) {
        check_fit();
        run_threads();
    }
#ifdef HAVE_MPI
    else if (!strcmp(what, "mpi")) {
        LaunchInfo started = comm_start_process(&argc, &argv, 60, 60);
        process = started.rank;
        if (started.world < 2) user_error("mpi: %d process: start with mpirun -np N, N at least 2", started.world);
        run_mpi(started.rank, started.world, started.on_host);
        comm_end_process();
    }
#endif
    else
        user_error("%s: expected rates, threads or mpi%s", what,
#ifdef HAVE_MPI
                   ""
#else
                   " (this build has no MPI)"
#endif
        );
    if (process == 0) printf("%d passed, %d failed\n", page.passed, page.failed);
    return page.failed > 0;
}
