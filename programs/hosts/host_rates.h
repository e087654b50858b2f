/* host_rates.h: measures how fast hosts compute and communicate, in a few seconds, for check_hosts.
 *
 * Few hosts are measured one after the other, so that hosts that share a machine or a switch do not disturb each other;
 * ranks that are not measured sleep. All ranks call these functions together. */
#ifndef HOST_RATES_H
#define HOST_RATES_H
#include "../../lib/comm/comm_open.h" // defines: Comm, all_gather_start, comm_progress
#include "../../lib/ops/ops.h"        // defines: linear_forward, attention_forward, tree_sum, …
#include "../../llama3.h"             // defines: Llama3Config
#include "../shared/cluster.h"        // defines: rated_ops, RATED_OPS

/* All-gathers `send` (bytes) of all ranks into `recv` (world, bytes), and sleeps while it waits. After --timeout it
 * waits without sleeping, as long as start-up may take, and then names who is to blame. */
static void quiet_all_gather(Comm *comm, const char *what, const void *send, void *recv, size_t bytes) {
    Request r = ZERO;
    double start = seconds_now();
    all_gather_start(comm, &r, AXIS_WORLD, what, send, recv, bytes, DTYPE_BYTE);
    while (r.active && seconds_now() - start < comm->timeout) {
        usleep(500);
        comm_alive(comm);
        comm_progress(comm);
    }
    comm_wait(comm, &r);
    request_close(&r);
}

static void quiet_barrier(Comm *comm, const char *what) {
    int *ranks = new_array(int, comm->mesh.world);
    quiet_all_gather(comm, what, &comm->rank, ranks, sizeof(int));
    free(ranks);
}

/* How many turns the hosts take when each is measured alone. */
enum { TURNS = 8 };
static int host_index(int rank) { return (int)(host_of_rank(rank) - run_hosts.hosts); }

// ---------------------------------------------------------------------------
// ops

typedef struct {
    double seconds, flops; // of a call
    int64_t size[5];       // M, N, K of a matmul; B, T, NH, NKV, HD of attention
} OpFigure;

typedef struct {
    OpFigure ops[RATED_OPS]; // in the order of rated_ops
    double memory_bytes_per_s;
} RankRates;

/* The buffers of the measured ops. */
typedef struct {
    Device *dev;
    int N, C;                          // a matmul y (N, C) = x (N, C) · w (C, C)
    floatX *x, *w, *y;                 // (N, C), (C, C), (N, C)
    float *dw;                         // (C, C)
    AttentionShape shape;              // one sequence
    floatX *qkv, *out, *d_out, *d_qkv; // (T, NH + 2·NKV, HD); (T, NH, HD) twice; like qkv
    float *lse;                        // (NH, T)
    float *from, *to;                  // (count)
    int64_t count;
} OpBuffers;

/* Memory of the device with small numbers in it. */
static void *filled(Device *dev, int64_t count, Dtype dtype) {
    void *p = scratch(dev, "measured op", (size_t)count * dtype_size(dtype));
    if (dev->dry_run) return p;
    int64_t floats = round_up(count * (int64_t)dtype_size(dtype), 4) / 4;
    uint32_t *bits = new_array(uint32_t, floats);
    for (int64_t i = 0; i < floats; i++) bits[i] = 0x3c003c00u + (uint32_t)(i % 61) * 0x00030003u; // fp32 or two bf16
    device_write(dev, p, bits, (size_t)count * dtype_size(dtype));
    free(bits);
    return p;
}

static void op_buffers_open(OpBuffers *b, Device *dev, const Llama3Config *c) {
    memset(b, 0, sizeof *b);
    AttentionShape *s = &b->shape;
    b->dev = dev;
    b->N = RATE_ROWS;
    b->C = RATE_COLS;
    s->B = 1;
    s->Tq = s->Tk = RATE_ROWS;
    s->HD = c->HD;
    s->NKV = (int)min_i64(c->NKV, 4);
    s->NH = s->NKV * (c->NH / c->NKV);
    s->q_stride = s->k_stride = s->v_stride = (int64_t)(s->NH + 2 * s->NKV) * s->HD;
    s->o_stride = (int64_t)s->NH * s->HD;
    b->count = 8 << 20;
    b->x = (floatX *)filled(dev, (int64_t)b->N * b->C, FLOATX);
    b->w = (floatX *)filled(dev, (int64_t)b->C * b->C, FLOATX);
    b->y = (floatX *)filled(dev, (int64_t)b->N * b->C, FLOATX);
    b->dw = (float *)filled(dev, (int64_t)b->C * b->C, DTYPE_F32);
    b->qkv = (floatX *)filled(dev, s->Tq * s->q_stride, FLOATX);
    b->out = (floatX *)filled(dev, s->Tq * s->o_stride, FLOATX);
    b->d_out = (floatX *)filled(dev, s->Tq * s->o_stride, FLOATX);
    b->d_qkv = (floatX *)filled(dev, s->Tq * s->q_stride, FLOATX);
    b->lse = (float *)filled(dev, (int64_t)s->NH * s->Tq, DTYPE_F32);
    b->from = (float *)filled(dev, b->count, DTYPE_F32);
    b->to = (float *)filled(dev, b->count, DTYPE_F32);
}

static void call_op(const OpBuffers *b, OpKind op) {
    const AttentionShape *s = &b->shape;
    int64_t k = (int64_t)s->NH * s->HD, v = k + (int64_t)s->NKV * s->HD;
    switch (op) {
    case OP_LINEAR_FORWARD: linear_forward(b->dev, b->y, b->x, b->w, b->N, b->C, b->C); break;
    case OP_LINEAR_BACKWARD_WEIGHT: linear_backward_weight(b->dev, b->dw, b->y, b->C, b->x, b->N, b->C, b->C, 0); break;
    case OP_LINEAR_BACKWARD_INPUT: linear_backward_input(b->dev, b->x, b->y, b->C, b->w, b->N, b->C, b->C); break;
    case OP_ATTENTION_FORWARD: attention_forward(b->dev, b->out, b->lse, b->qkv, b->qkv + k, b->qkv + v, s); break;
    case OP_ATTENTION_BACKWARD:
        attention_backward(b->dev, b->d_qkv, b->d_qkv + k, b->d_qkv + v, b->d_out, b->out, b->lse, b->qkv, b->qkv + k,
                           b->qkv + v, s);
        break;
    default: tree_sum(b->dev, b->to, b->from, DTYPE_F32, 1, b->count, 1);
    }
}

/* The mean of several calls, because ranks may share cores; the first one, which touches new memory, does not count. */
static OpFigure measure_op(const OpBuffers *b, OpKind op) {
    OpFigure figure = ZERO;
    double start = 0, flops = 0;
    int calls = 0;
    while (calls < 3 || (figure.seconds < 0.02 && calls < 100)) {
        call_op(b, op);
        device_synchronize(b->dev);
        if (calls++ == 0) {
            start = seconds_now();
            flops = b->dev->rec.ops[op].flops;
        }
        figure.seconds = seconds_now() - start;
    }
    figure.flops = (b->dev->rec.ops[op].flops - flops) / (calls - 1);
    figure.seconds /= calls - 1;
    return figure;
}

/* Rates of the ops that cluster files list, on this rank. In a dry run it only finds out how much memory they need. */
static RankRates measure_ops(Device *dev, const Llama3Config *c) {
    RankRates rates = ZERO;
    OpBuffers b;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    op_buffers_open(&b, dev, c);
    const AttentionShape *s = &b.shape;
    for (int i = 0; i < RATED_OPS; i++) {
        int is_matmul = i < RATED_MATMULS, by_weight = rated_ops[i] == OP_LINEAR_BACKWARD_WEIGHT;
        const int64_t matmul[5] = {by_weight ? b.C : b.N, b.C, by_weight ? b.N : b.C, 0, 0};
        const int64_t attention[5] = {s->B, s->Tq, s->NH, s->NKV, s->HD};
        rates.ops[i] = measure_op(&b, rated_ops[i]);
        memcpy(rates.ops[i].size, is_matmul ? matmul : attention, sizeof matmul);
    }
    rates.memory_bytes_per_s = 3.0 * sizeof(float) * (double)b.count / measure_op(&b, OP_TREE_SUM).seconds;
    arena_release(dev, MEM_WORKSPACE, mark);
    return rates;
}

/* FLOP/s of all ranks of each host together, (hosts), by one op; rates (world). The caller frees it. */
static double *flops_of_hosts(const RankRates *rates, int world, int op) {
    double *sums = new_array(double, run_hosts.count);
    for (int i = 0; i < world; i++) sums[host_index(i)] += rates[i].ops[op].flops / rates[i].ops[op].seconds;
    return sums;
}

/* Measures the hosts for which `due` is set: the ranks of a host together, and few hosts one after the other. */
static void measure_due_hosts(Comm *comm, const Llama3Config *c, const char *due, RankRates *all) {
    RankRates mine = all[comm->rank];
    int host = host_index(comm->rank), turns = (int)min_i64(run_hosts.count, TURNS);
    for (int turn = 0; turn < turns; turn++) {
        quiet_barrier(comm, "turn of a host");
        if (host % turns == turn && due[host]) mine = measure_ops(comm->dev, c);
    }
    quiet_all_gather(comm, "rates of ranks", &mine, all, sizeof mine);
}

/* Marks in due (hosts) the hosts that look slow. Returns whether there are any. */
static int hosts_that_look_slow(const RankRates *all, int world, char *due) {
    double fastest = 0, *flops = flops_of_hosts(all, world, 0);
    int some = 0;
    for (int i = 0; i < run_hosts.count; i++) fastest = fmax(fastest, flops[i] / run_hosts.hosts[i].ranks);
    for (int i = 0; i < run_hosts.count; i++) {
        due[i] = flops[i] / run_hosts.hosts[i].ranks < 0.75 * fastest;
        some |= due[i];
    }
    free(flops);
    return some;
}

/* The rates of all ranks, (world). A host that looks slow, perhaps just now, is measured again, up to three times. */
static RankRates *measure_hosts(Comm *comm, const Llama3Config *c) {
    int world = comm->mesh.world, again = 3;
    RankRates *all = new_array(RankRates, world);
    char *due = new_array(char, run_hosts.count);
    memset(due, 1, (size_t)run_hosts.count);
    measure_due_hosts(comm, c, due, all);
    while (again-- && hosts_that_look_slow(all, world, due)) measure_due_hosts(comm, c, due, all);
    free(due);
    return all;
}

// ---------------------------------------------------------------------------
// messages between two ranks

typedef struct {
    int from, to;                // hosts; from == to: two ranks of that host
    double latency, bytes_per_s; // latency 0: not measured
} LinkRate;

#ifdef HAVE_MPI
/* Seconds for `bytes` bytes of `buffer` to another rank, which calls this too, and back. `first`: this one begins. */
static double mpi_round_trip(Comm *comm, int peer, char *buffer, int bytes, int first) {
    enum { TAG_ROUND_TRIP = TAG_ANSWER + 1 };
    double start = seconds_now();
    for (int i = 0; i < 2; i++) {
        MPI_Request message;
        int done = 0;
        if (first == (i == 0)) MPI_Isend(buffer, bytes, MPI_BYTE, peer, TAG_ROUND_TRIP, MPI_COMM_WORLD, &message);
        else MPI_Irecv(buffer, bytes, MPI_BYTE, peer, TAG_ROUND_TRIP, MPI_COMM_WORLD, &message);
        while (!done) {
            MPI_Test(&message, &done, MPI_STATUS_IGNORE);
            if (!done && seconds_now() - start > comm->timeout)
                run_failure("%s has sent a message to %s and got no answer within %.1f s: the network between the two "
                            "is cut, or one of them is stopped",
                            rank_name(comm->rank), rank_name(peer), comm->timeout);
        }
    }
    comm->heartbeat->since = seconds_now();
    return seconds_now() - start;
}

/* Sends messages to another rank and back, which calls this too. `first` sends first. */
static LinkRate measure_link(Comm *comm, int peer, int first) {
    enum { SMALL = 64, LARGE = 1 << 20 };
    LinkRate link = {host_index(comm->rank), host_index(peer), INFINITY, 0};
    char *buffer = new_array(char, LARGE);
    for (int i = 0; i < 20; i++)
        link.latency = fmin(link.latency, mpi_round_trip(comm, peer, buffer, SMALL, first) / 2);
    for (int i = 0; i < 4; i++)
        link.bytes_per_s = fmax(link.bytes_per_s, 2 * LARGE / mpi_round_trip(comm, peer, buffer, LARGE, first));
    free(buffer);
    return link;
}

/* The partner of `host` in a round-robin tournament (circle method); -1: none in this round. After count - 1 rounds, or
 * count rounds if count is odd, every pair has met once. */
static int partner_in_round(int host, int round, int count) {
    int n = count + count % 2; // with an odd number of hosts, one has no partner
    int partner = (round - host % (n - 1) + 2 * (n - 1)) % (n - 1);
    if (host == n - 1) partner = round * (n / 2) % (n - 1);
    else if (partner == host) partner = n - 1;
    return partner < count ? partner : -1;
}

/* Measures every pair of hosts, between their first ranks, and the first two ranks of each host. With more than
 * MOST_ROUNDS hosts each host meets that many others. On rank 0, `links` keeps the better of two passes. Returns how
 * many links there are. */
enum { MOST_ROUNDS = 255 };
static int measure_links_once(Comm *comm, LinkRate *links /* (hosts, rounds + 1) */, int rounds) {
    int hosts = run_hosts.count, host = host_index(comm->rank), first_rank = run_hosts.hosts[host].first_rank;
    int one_by_one = hosts <= TURNS, second = -1, count = 0;
    LinkRate none = ZERO, *all = new_array(LinkRate, comm->mesh.world);
    for (int i = first_rank + 1; i < comm->mesh.world && second < 0; i++)
        if (host_index(i) == host) second = i;
    for (int round = -1; round < rounds; round++) // round -1: within each host
        for (int turn = 0; turn < (one_by_one ? hosts : 1); turn++) {
            LinkRate mine = none;
            int partner = round < 0 ? host : partner_in_round(host, round, hosts), peer = -1;
            if (round < 0 && comm->rank == first_rank) peer = second;
            else if (round < 0 && comm->rank == second) peer = first_rank;
            else if (round >= 0 && partner >= 0 && comm->rank == first_rank) peer = run_hosts.hosts[partner].first_rank;
            int is_due = !one_by_one || min_i64(host, partner) == turn;
            if (peer >= 0 && is_due) mine = measure_link(comm, peer, comm->rank < peer);
            quiet_all_gather(comm, "rate of a link", &mine, all, sizeof mine);
            for (int i = 0; i < comm->mesh.world && comm->rank == 0; i++)
                if (all[i].latency > 0 && i == run_hosts.hosts[all[i].from].first_rank && all[i].from <= all[i].to) {
                    LinkRate *link = &links[count++];
                    if (all[i].bytes_per_s > link->bytes_per_s) *link = all[i];
                }
        }
    free(all);
    return count;
}

/* The rates of the links. If one between hosts looks slow, all are measured a second time: perhaps another program used
 * a host or its network for a moment. Rank 0 keeps the *count results; the caller frees them. */
static LinkRate *measure_links(Comm *comm, int *count) {
    int hosts = run_hosts.count, rounds = (int)min_i64(MOST_ROUNDS, hosts - 1 + hosts % 2), again = 0;
    LinkRate *links = new_array(LinkRate, (int64_t)hosts * (rounds + 1));
    int *flags = new_array(int, comm->mesh.world);
    double fastest = 0;
    *count = measure_links_once(comm, links, rounds);
    for (int i = 0; i < *count; i++)
        if (links[i].from != links[i].to) fastest = fmax(fastest, links[i].bytes_per_s);
    for (int i = 0; i < *count; i++) again |= links[i].from != links[i].to && links[i].bytes_per_s < 0.5 * fastest;
    quiet_all_gather(comm, "a link looks slow", &again, flags, sizeof again);
    if (flags[0]) measure_links_once(comm, links, rounds);
    free(flags);
    return links;
}
#endif

// ---------------------------------------------------------------------------
// collectives of the mesh's groups

enum { MOST_SIZES = 6 };

typedef struct {
    Axis axis;
    int ranks, hosts; // in a group; the largest number of hosts that one group spans
    int sizes;
    double bytes[MOST_SIZES];                       // that a rank receives
    double seconds[REDUCE_SCATTER + 1][MOST_SIZES]; // of the slowest group, when all groups communicate at once
} AxisRate;

/* Repeats a collective and returns the shortest time in seconds. A repetition takes as long as its slowest rank. */
static double measure_collective(Comm *comm, Axis axis, Collective collective, char *buffers, size_t part,
                                 double *all) {
    double best = INFINITY, spent = 0;
    size_t whole = part * (size_t)comm->groups[axis].size;
    for (int i = 0; i < 2 || (i < 8 && spent < 0.1); i++) { // the first one may touch new memory
        Request r = ZERO;
        all_gather_now(comm, AXIS_WORLD, "start of a measurement", &best, all, sizeof best);
        double start = seconds_now(), slowest = 0;
        if (collective == ALL_GATHER)
            all_gather_start(comm, &r, axis, "measured", buffers, buffers + whole, part, DTYPE_BYTE);
        else reduce_scatter_pieces_start(comm, &r, axis, "measured", buffers, buffers + whole, part, DTYPE_BYTE);
        comm_wait(comm, &r);
        device_synchronize_all(comm->dev);
        double mine = seconds_now() - start;
        request_close(&r);
        all_gather_now(comm, AXIS_WORLD, "times of a measurement", &mine, all, sizeof mine);
        for (int k = 0; k < comm->mesh.world; k++) slowest = fmax(slowest, all[k]);
        best = fmin(best, slowest);
        spent += slowest;
    }
    return best;
}

/* The largest number of hosts that one group of this axis spans. */
static int hosts_of_axis(const Mesh *mesh, Axis axis) {
    int most = 1;
    int *group_seen = new_array(int, run_hosts.count); // by a host: the last group with a member there + 1
    for (int first = 0; first < mesh->world; first++) {
        int colour, key, hosts = 0;
        mesh_group(mesh, first, axis, &colour, &key);
        if (key) continue;
        for (int i = 0; i < mesh_group_size(mesh, axis); i++) {
            int host = host_index(mesh_group_member(mesh, colour, axis, i));
            hosts += group_seen[host] != first + 1;
            group_seen[host] = first + 1;
        }
        most = (int)max_i64(most, hosts);
    }
    free(group_seen);
    return most;
}

/* Bytes of the buffers for measure_axes: what all members send to each other at most, sent and received. */
enum { LARGEST_COLLECTIVE = 32 << 20 };

/* Measures all-gathers and reduce-scatters over every axis with groups of several ranks: all its groups at once, as in
 * training. NCCL has no collectives over pp, only messages. Returns how many axes were measured. */
static int measure_axes(Comm *comm, AxisRate rates[MESH_AXES], char *buffers) {
    static const Axis axes[] = {AXIS_TP, AXIS_CP, AXIS_PP, AXIS_FSDP, AXIS_DP_REPLICATE};
    int count = 0;
    double *all = new_array(double, comm->mesh.world);
    for (int a = 0; a < (int)(sizeof axes / sizeof *axes); a++) {
        int n = comm->groups[axes[a]].size;
        if (n == 1 || (axes[a] == AXIS_PP && comm->transport != comm->hosts)) continue;
        AxisRate *r = &rates[count++];
        memset(r, 0, sizeof *r);
        r->axis = axes[a];
        r->ranks = n;
        r->hosts = hosts_of_axis(&comm->mesh, axes[a]);
        double longest = 0;
        for (size_t part = 256; r->sizes < MOST_SIZES && part * (size_t)n <= LARGEST_COLLECTIVE && longest < 0.05;
             part *= 8) {
            r->bytes[r->sizes] = (double)part * (n - 1);
            for (int c = ALL_GATHER; c <= REDUCE_SCATTER; c++) {
                double seconds = measure_collective(comm, axes[a], (Collective)c, buffers, part, all);
                r->seconds[c][r->sizes] = seconds;
                longest = fmax(longest, seconds);
            }
            r->sizes++;
        }
    }
    free(all);
    return count;
}

#endif
