/* cluster.h: how fast the machines of a cluster compute and communicate, read from a JSON file (--cluster).
 *
 * dev/kernels/collectives.cu documents the format and measures such files; dev/clusters has files written by hand, with
 * the source of every constant. A caller may rely on: whatever a file lacks or has wrong is an error that names it. */
#ifndef CLUSTER_H
#define CLUSTER_H
#include "../../lib/comm/comm.h" // defines: Mesh, Collective, collective_names
#include "../../lib/io/json.h"   // defines: json_number, json_integer, json_object
#include "../../lib/ops/ops.h"   // defines: AttentionShape, attention_pairs, attention_bytes

enum { MAX_POINTS = 32 };

typedef struct {               // how long a collective of one group takes
    double latency, bandwidth; // seconds; bytes per second that a rank receives
    int points;                // how many sizes were measured; 0: use latency and bandwidth
    double bytes[MAX_POINTS], seconds[MAX_POINTS];
    char source[160]; // which transport, ranks and hosts it was measured with, for people
} CollectiveRate;

/* Measured speed of an op at one size. */
typedef struct {
    OpKind op;
    double flops;
    double intensity; // FLOPs per byte
    double rate;      // FLOPs per second
} OpRate;

/* The speed of a machine for one rank. */
typedef struct {
    OpTimes times; // first: op_seconds finds the OpRates behind it
    OpRate *ops;   // (count)
    int count;
    double memory; // bytes per second, read and written
} OpRates;

typedef struct {
    const char *path; // of its file
    char name[128];
    OpRates rates;                      // of one rank
    double peak;                        // FLOP/s of a rank's fastest matmul
    double memory;                      // bytes of a rank; 0: the file does not say
    int ranks_per_host, hosts_per_rack; // hosts_per_rack 0: the file does not say
    double storage;                     // bytes per second that all hosts together write to files; 0: unknown
    CollectiveRate collectives[AXES][COLLECTIVES];
} Cluster;

/* Estimated seconds of an op: its FLOPs at the rate of the nearest measured size of that op, where distance is the
 * ratio of FLOPs and of intensity; but at least the time its bytes take. Muon's matmuls have the rates of a linear
 * layer's forward. Any other op without measurements only moves bytes. */
static double op_seconds(const OpTimes *times, OpKind op, double flops, double bytes) {
    const OpRates *r = (const OpRates *)times;
    double nearest = INFINITY, rate = INFINITY;
    OpKind rated = op == OP_MUON_MATMUL ? OP_LINEAR_FORWARD : op;
    for (int i = 0; i < r->count; i++) {
        if (r->ops[i].op != rated) continue;
        double distance = hypot(log(flops / r->ops[i].flops), log(flops / bytes / r->ops[i].intensity));
        if (distance >= nearest) continue;
        nearest = distance;
        rate = r->ops[i].rate;
    }
    return fmax(flops / rate, bytes / r->memory);
}

/* Seconds in which a rank receives `bytes`: measured points are interpolated in logarithms of bytes and seconds; above
 * the last one, the bandwidth stays that of the last. */
static double collective_seconds(const CollectiveRate *rate, double bytes) {
    if (!rate->points) return rate->latency + bytes / rate->bandwidth;
    int last = rate->points - 1, i = 1;
    if (bytes <= rate->bytes[0]) return rate->seconds[0];
    if (bytes >= rate->bytes[last]) return rate->seconds[last] * bytes / rate->bytes[last];
    while (bytes > rate->bytes[i]) i++;
    double fraction = log(bytes / rate->bytes[i - 1]) / log(rate->bytes[i] / rate->bytes[i - 1]);
    return rate->seconds[i - 1] * pow(rate->seconds[i] / rate->seconds[i - 1], fraction);
}

/* The largest number of hosts that one group of this axis spans, if each host has `ranks` consecutive ranks. */
static int group_spans(const Mesh *mesh, Axis axis, int ranks) {
    int most = 0;
    for (int r = 0; r < mesh->world; r++) {
        int colour, key, spans = 1;
        mesh_group(mesh, r, axis, &colour, &key);
        if (colour != r) continue;
        for (int i = 1; i < mesh_group_size(mesh, axis); i++)
            spans += mesh_group_member(mesh, r, axis, i) / ranks != mesh_group_member(mesh, r, axis, i - 1) / ranks;
        most = spans > most ? spans : most;
    }
    return most;
}

// ---------------------------------------------------------------------------
// fields of the file

static double cluster_number(const cJSON *json, const char *where, const char *key, double low, double high) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item))
        user_error("%s: \"%s\" is missing: add it; dev/kernels/collectives.cu documents cluster files", where, key);
    return json_number(json, where, key, NAN, low, high);
}

static int cluster_integer(const cJSON *json, const char *where, const char *key, int low, int high) {
    cluster_number(json, where, key, low, high);
    return json_integer(json, where, key, NAN, low, high);
}

/* Reads a string. `choices`: the allowed values, separated by |; NULL: any. Returns which of them it is. */
static int cluster_word(const cJSON *json, const char *where, const char *key, const char *choices, const char **word) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int index = 0;
    if (!cJSON_IsString(item) || !item->valuestring[0])
        user_error("%s: \"%s\" must be %s%s", where, key, choices ? "one of " : "a text", choices ? choices : "");
    *word = item->valuestring;
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
        if (strcspn(at, "|") == strlen(*word) && !strncmp(at, *word, strlen(*word))) return index;
        index++;
    }
    if (choices) user_error("%s: \"%s\" is \"%s\", expected one of %s", where, key, *word, choices);
    return 0;
}

static const cJSON *cluster_list(const cJSON *root, const char *path, const char *key) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(root, key);
    if (list && !cJSON_IsArray(list)) user_error("%s: \"%s\" must be a list", path, key);
    return list;
}

// ---------------------------------------------------------------------------
// rates of ops

enum { RATED_OPS = 5, RATED_MATMULS = 3 };
static const OpKind rated_ops[RATED_OPS] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_WEIGHT, OP_LINEAR_BACKWARD_INPUT,
                                            OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
static const char *const rate_lists[2] = {"matmuls", "attention"}; // of the file

/* Sets a matmul's FLOPs, (M, N) = (M, K)·(K, N), or its backward's; returns its bytes. Weight gradients are fp32. */
static double matmul_row(OpRate *o, const cJSON *row, const char *where, int element_size) {
    double M = cluster_number(row, where, "M", 1, 1e9), N = cluster_number(row, where, "N", 1, 1e9);
    double K = cluster_number(row, where, "K", 1, 1e9);
    o->flops = 2 * M * N * K;
    return (M + N) * K * element_size + M * N * (o->op == OP_LINEAR_BACKWARD_WEIGHT ? 4 : element_size);
}

static double attention_row(OpRate *o, const cJSON *row, const char *where) {
    AttentionShape s = ZERO;
    s.B = cluster_integer(row, where, "B", 1, 1000000);
    s.Tq = cluster_integer(row, where, "T", 1, 1 << 24);
    s.Tk = s.Tq;
    s.HD = cluster_integer(row, where, "HD", 1, 1000000);
    s.NH = cluster_integer(row, where, "NH", 1, 1000000);
    s.NKV = cluster_integer(row, where, "NKV", 1, 1000000);
    o->flops = (o->op == OP_ATTENTION_FORWARD ? 4 : 10) * s.HD * attention_pairs(&s);
    return attention_bytes(&s, o->op == OP_ATTENTION_FORWARD ? 1 : 2);
}

/* Reads one row into `o`. Returns whether it is in the dtype of this build. */
static int cluster_op(OpRate *o, const cJSON *row, const char *where, int is_attention, double share) {
    static const char *const names[] = {"linear_forward|linear_backward_weight|linear_backward_input",
                                        "attention_forward|attention_backward"};
    const char *dtype, *op;
    int is_bf16 = cluster_word(row, where, "dtype", "fp32|bf16", &dtype);
    int which = cluster_word(row, where, "op", names[is_attention], &op);
    o->op = rated_ops[is_attention ? RATED_MATMULS + which : which];
    o->rate = share * cluster_number(row, where, "flops_per_s", 1, 1e30);
    double bytes = is_attention ? attention_row(o, row, where) : matmul_row(o, row, where, is_bf16 ? 2 : 4);
    o->intensity = o->flops / bytes;
    return is_bf16 == (FLOATX == DTYPE_BF16);
}

/* Reads the rates of matmuls and attention by shape, in the dtype of this build. A rank has `share` of them. */
static void cluster_ops(Cluster *c, const cJSON *root, const char *path, double share) {
    int rows = 0;
    for (int l = 0; l < 2; l++) rows += cJSON_GetArraySize(cluster_list(root, path, rate_lists[l]));
    c->rates.ops = (OpRate *)checked_malloc(sizeof(OpRate) * (size_t)rows);
    for (int l = 0; l < 2; l++) {
        const cJSON *row;
        int i = 0;
        cJSON_ArrayForEach(row, cluster_list(root, path, rate_lists[l])) {
            OpRate *o = &c->rates.ops[c->rates.count];
            char where[1024];
            snprintf(where, sizeof where, "%s: row %d of \"%s\"", path, ++i, rate_lists[l]);
            if (!cluster_op(o, row, where, l == 1, share)) continue;
            if (l == 0) c->peak = fmax(c->peak, o->rate);
            c->rates.count++;
        }
    }
    for (int k = 0; k < RATED_OPS; k++) {
        int found = 0;
        for (int i = 0; i < c->rates.count; i++) found += c->rates.ops[i].op == rated_ops[k];
        if (!found)
            user_error("%s: \"%s\" has no row of %s in %s, the precision of this build: add one, or build the other "
                       "precision",
                       path, rate_lists[k >= RATED_MATMULS], op_names[rated_ops[k]], PRECISION_NAME);
    }
}

// ---------------------------------------------------------------------------
// rates of collectives

/* Finds the row whose ranks and hosts are nearest, in ratio. Returns its distance, 0 for an exact match; INFINITY: no
 * row. `where`: names it in errors. */
static double nearest_row(const cJSON **nearest, CollectiveRate *rate, char where[1024], const cJSON *root,
                          const char *path, const char *transport, const char *collective, const int group[2]) {
    const cJSON *row;
    double smallest = INFINITY;
    int i = 0, ranks = group[0], hosts = group[1];
    char here[1024];
    const char *by, *op;
    cJSON_ArrayForEach(row, cluster_list(root, path, "collectives")) {
        snprintf(here, sizeof here, "%s: row %d of \"collectives\"", path, ++i);
        cluster_word(row, here, "transport", NULL, &by);
        cluster_word(row, here, "op", "all_gather|reduce_scatter|reduce_scatter+sum", &op);
        int row_ranks = cluster_integer(row, here, "ranks", 2, 1 << 20);
        int row_hosts = cluster_integer(row, here, "hosts", 1, 1 << 20);
        double distance = fabs(log((double)row_ranks / ranks)) + fabs(log((double)row_hosts / hosts));
        if (strcmp(op, collective) || (transport && strcmp(by, transport)) || distance >= smallest) continue;
        smallest = distance;
        *nearest = row;
        memcpy(where, here, sizeof here);
        snprintf(rate->source, sizeof rate->source, "%s, %d ranks on %d host%s%s", by, row_ranks, row_hosts,
                 row_hosts > 1 ? "s" : "", distance > 0 ? ", the nearest in the file" : "");
    }
    return smallest;
}

/* Derives the rate from "links". An all-gather brings each part to a host once, over the links of all its members
 * together, and spreads it within the host; a reduce-scatter that the transport sums, as NCCL's does, is its mirror
 * image. Without that sum (`all_to_all`) each part has one receiver, so what comes from other hosts uses that rank's
 * own link. */
static void rate_of_links(CollectiveRate *rate, const cJSON *links, const char *path, int all_to_all, int ranks,
                          int hosts) {
    static const char *const names[] = {"within_host", "between_hosts"};
    double latency[2] = {0, 0}, bandwidth[2] = {INFINITY, INFINITY}, members = (double)ranks / hosts;
    char where[1024];
    for (int l = 0; l < 2; l++) {
        snprintf(where, sizeof where, "%s: \"links\": \"%s\"", path, names[l]);
        const cJSON *link = json_object(links, path, names[l]);
        if (!link && (l ? hosts > 1 : members > 1))
            user_error("%s is missing: add it; a group of %d ranks on %d hosts needs it", where, ranks, hosts);
        if (!link) continue;
        latency[l] = cluster_number(link, where, "latency_s", 0, 1e6);
        bandwidth[l] = cluster_number(link, where, "bytes_per_s", 1, 1e30);
    }
    rate->latency = latency[0] * ceil(log2(fmax(1, members))) + latency[1] * ceil(log2(hosts));
    double within = members > 1 ? bandwidth[0] : INFINITY, between = hosts > 1 ? bandwidth[1] * members : INFINITY;
    if (!all_to_all) rate->bandwidth = fmin(within, between);
    else rate->bandwidth = (ranks - 1) / fmax((members - 1) / bandwidth[0], (ranks - members) / bandwidth[1]);
    rate->points = 0;
    snprintf(rate->source, sizeof rate->source, "links, %d ranks on %d host%s", ranks, hosts, hosts > 1 ? "s" : "");
}

static void rate_of_row(CollectiveRate *rate, const cJSON *row, const char *where) {
    const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(row, "measured_bytes");
    const cJSON *seconds = cJSON_GetObjectItemCaseSensitive(row, "measured_s");
    rate->latency = cluster_number(row, where, "latency_s", 0, 1e6);
    rate->bandwidth = cluster_number(row, where, "bytes_per_s", 1, 1e30);
    rate->points = cJSON_GetArraySize(bytes);
    if (cJSON_GetArraySize(seconds) != rate->points || rate->points > MAX_POINTS)
        user_error("%s: \"measured_bytes\" has %d and \"measured_s\" %d numbers, expected equally many, at most %d",
                   where, rate->points, cJSON_GetArraySize(seconds), MAX_POINTS);
    for (int p = 0; p < rate->points; p++) {
        const cJSON *b = cJSON_GetArrayItem(bytes, p), *s = cJSON_GetArrayItem(seconds, p);
        rate->bytes[p] = cJSON_IsNumber(b) ? b->valuedouble : 0;
        rate->seconds[p] = cJSON_IsNumber(s) ? s->valuedouble : 0;
        int bytes_rise = rate->bytes[p] > (p ? rate->bytes[p - 1] : 0) && rate->bytes[p] <= 1e30;
        if (!bytes_rise || !(rate->seconds[p] > 0 && rate->seconds[p] < 1e30))
            user_error("%s: number %d of \"measured_bytes\" or \"measured_s\" is %g or %g, expected numbers above 0, "
                       "the bytes in rising order",
                       where, p + 1, rate->bytes[p], rate->seconds[p]);
    }
}

/* How long a collective of `ranks` ranks on `hosts` hosts takes: by their row, by links, or by the nearest row. */
static void cluster_collective(CollectiveRate *rate, const cJSON *root, const char *path, const char *transport,
                               Collective collective, int all_to_all, int ranks, int hosts) {
    const cJSON *links = json_object(root, path, "links"), *row = NULL;
    const int group[2] = {ranks, hosts};
    char where[1024] = "";
    double distance = nearest_row(&row, rate, where, root, path, transport, collective_names[collective], group);
    if (links && distance > 0) rate_of_links(rate, links, path, all_to_all, ranks, hosts);
    else if (row) rate_of_row(rate, row, where);
    else
        user_error("%s: \"collectives\" has no row of %s%s%s, and there are no \"links\", but a group of %d ranks "
                   "needs one of them: add it",
                   path, collective_names[collective], transport ? " over " : "", transport ? transport : "", ranks);
}

// ---------------------------------------------------------------------------
// the cluster

/* Reads the rates for a rank of `mesh`. Ranks are placed on hosts in the order of their numbers. If the rates are those
 * of a whole host, each rank gets 1 / ranks_per_host of them, or threads / cores if that is less. `threads` 0: all
 * cores; `transport` "auto": any. `transport_sums`: the transport adds gradients while it reduces them. */
static void cluster_open(Cluster *c, const char *path, const Mesh *mesh, int threads, const char *transport,
                         int transport_sums) {
    if (!strcmp(transport, "auto")) transport = NULL;
    memset(c, 0, sizeof *c);
    cJSON *root = json_read_object(path, "a cluster file as make -C dev/kernels collectives writes it");
    if (!root) user_error("cannot read --cluster %s: %s", path, strerror(errno));
    const char *name, *of;
    c->path = path;
    cluster_word(root, path, "name", NULL, &name);
    snprintf(c->name, sizeof c->name, "%s", name);
    int of_device = cluster_word(root, path, "rates_of", "host|device", &of);
    int cores = of_device ? 1 : cluster_integer(root, path, "cores_per_host", 1, 1 << 20);
    int ranks_per_host = of_device ? cluster_integer(root, path, "ranks_per_host", 1, 1 << 20)
                                   : json_integer(root, path, "ranks_per_host", cores, 1, 1 << 20);
    c->ranks_per_host = (int)min_i64(ranks_per_host, mesh->world);
    double share = of_device ? 1 : fmin(threads ? (double)threads / cores : 1, 1.0 / c->ranks_per_host);
    c->rates.times.seconds = op_seconds;
    c->rates.times.has_streams = of_device && !CUDA_BUILD; // a dry run of the CUDA build lists no points of streams
    c->rates.memory = share * cluster_number(root, path, "memory_bytes_per_s", 1, 1e30);
    c->memory =
        json_number(root, path, "memory_bytes_per_host", 0, 0, 1e30) / (of_device ? ranks_per_host : c->ranks_per_host);
    c->hosts_per_rack = json_integer(root, path, "hosts_per_rack", 0, 0, 1 << 20);
    c->storage = json_number(root, path, "storage_bytes_per_s", 0, 0, 1e30);
    cluster_ops(c, root, path, share);
    const cJSON *peaks = json_object(root, path, "peak_flops_per_s");
    if (peaks) c->peak = share * cluster_number(peaks, path, PRECISION_NAME, 1, 1e30);
    for (int a = 0; a < AXES; a++) {
        int ranks = mesh_group_size(mesh, (Axis)a), hosts = group_spans(mesh, (Axis)a, c->ranks_per_host);
        if (ranks == 1) continue;
        CollectiveRate *rates = c->collectives[a];
        // over the other axes the program adds by itself
        int sums = transport_sums && (a == AXIS_FSDP || a == AXIS_DP_REPLICATE);
        cluster_collective(&rates[ALL_GATHER], root, path, transport, ALL_GATHER, 0, ranks, hosts);
        cluster_collective(&rates[REDUCE_SCATTER], root, path, transport, REDUCE_SCATTER, !sums, ranks, hosts);
        cluster_collective(&rates[ALL_TO_ALL], root, path, transport, REDUCE_SCATTER, 1, ranks, hosts);
        // a message takes as long as an all-gather of two ranks, in which each receives one part
        cluster_collective(&rates[SEND], root, path, transport, ALL_GATHER, 0, 2, (int)min_i64(hosts, 2));
        rates[RECEIVE] = rates[SEND];
    }
    cJSON_Delete(root);
}

static void cluster_close(Cluster *c) {
    free(c->rates.ops);
    c->rates.ops = NULL;
}

#endif
