/* cluster.h: what the machines of a cluster do in a second, read from a file.
 *
 * The format stands at the head of dev/kernels/collectives.cu, which measures such files; dev/clusters has some written
 * by hand, with the source of every constant. A caller may rely on: whatever a file leaves out, or has wrong, is an
 * error that names it.
 */
#ifndef CLUSTER_H
#define CLUSTER_H
#include "../lib/comm.h"
#include "../lib/json.h"
#include "../llama3.h"

typedef struct {
    char name[128];
    OpRates rates;                      // of one rank
    OpRate *ops;                        // what rates.ops points to
    double peak;                        // FLOP/s of a rank's products at best
    double memory;                      // bytes of a rank; 0: the file does not say
    int ranks_per_host, hosts_per_rack; // racks: 0: the file does not say
    double
        communicator; // bytes that a communicator of NCCL's takes of a rank, beside the plan; 0: the file does not say
    ExchangeRate exchange[AXES][COLLECTIVES];
} Cluster;

static double cluster_number(const cJSON *json, const char *where, const char *key, double low, double high) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item))
        user_error("%s: \"%s\" is missing; dev/kernels/collectives.cu says what a cluster file holds", where, key);
    return json_number(json, where, key, NAN, low, high);
}

/* A string under `key`, one of `choices` (parted by |; NULL: any); which of them. */
static int cluster_word(const cJSON *json, const char *where, const char *key, const char *choices, const char **word) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int index = 0;
    if (!cJSON_IsString(item) || !item->valuestring[0])
        user_error("%s: \"%s\" must be %s%s", where, key, choices ? "one of " : "a text", choices ? choices : "");
    *word = item->valuestring;
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL, index++)
        if (strcspn(at, "|") == strlen(*word) && !strncmp(at, *word, strlen(*word))) return index;
    if (choices) user_error("%s: \"%s\" is \"%s\", expected one of %s", where, key, *word, choices);
    return 0;
}

static const cJSON *cluster_list(const cJSON *root, const char *path, const char *key) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(root, key);
    if (list && !cJSON_IsArray(list)) user_error("%s: \"%s\" must be a list", path, key);
    return list;
}

/* Rates of products and of attention in this build's dtype, by shape. */
static void cluster_ops(Cluster *c, const cJSON *root, const char *path, double share) {
    static const OpKind kinds[] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_WEIGHT, OP_LINEAR_BACKWARD_INPUT,
                                   OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
    static const char *const lists[] = {"products", "attention"};
    static const char *const names[] = {"linear_forward|linear_backward_weight|linear_backward_input",
                                        "attention_forward|attention_backward"};
    char where[1024];
    const char *dtype, *op;
    c->ops =
        (OpRate *)checked_malloc(sizeof(OpRate) * (size_t)(cJSON_GetArraySize(cluster_list(root, path, lists[0])) +
                                                           cJSON_GetArraySize(cluster_list(root, path, lists[1]))));
    c->rates.ops = c->ops;
    for (int l = 0; l < 2; l++) {
        const cJSON *row;
        int i = 0;
        cJSON_ArrayForEach(row, cluster_list(root, path, lists[l])) {
            OpRate *o = &c->ops[c->rates.count];
            double bytes;
            snprintf(where, sizeof where, "%s: row %d of \"%s\"", path, ++i, lists[l]);
            int bf16_row = cluster_word(row, where, "dtype", "fp32|bf16", &dtype), size = bf16_row ? 2 : 4;
            o->op = kinds[3 * l + cluster_word(row, where, "op", names[l], &op)];
            o->rate = share * cluster_number(row, where, "flops_per_s", 1, 1e30);
            if (l == 0) {
                double M = cluster_number(row, where, "M", 1, 1e9), N = cluster_number(row, where, "N", 1, 1e9),
                       K = cluster_number(row, where, "K", 1, 1e9);
                o->flops = 2 * M * N * K;
                bytes = (M + N) * K * size + M * N * (o->op == OP_LINEAR_BACKWARD_WEIGHT ? 4 : size);
            } else {
                AttentionShape s = ZERO;
                s.B = (int)cluster_number(row, where, "B", 1, 1e6),
                s.Tq = s.Tk = (int)cluster_number(row, where, "T", 1, 1 << 24),
                s.HD = (int)cluster_number(row, where, "HD", 1, 1e6);
                s.NH = (int)cluster_number(row, where, "NH", 1, 1e6),
                s.NKV = (int)cluster_number(row, where, "NKV", 1, 1e6);
                o->flops = (o->op == OP_ATTENTION_FORWARD ? 4 : 10) * s.HD * attention_pairs(&s);
                bytes = attention_bytes(&s, o->op == OP_ATTENTION_FORWARD ? 1 : 2);
            }
            o->intensity = o->flops / bytes;
            if (bf16_row != (FLOATX == DTYPE_BF16)) continue;
            if (l == 0) c->peak = fmax(c->peak, o->rate);
            c->rates.count++;
        }
    }
    for (int k = 0; k < 5; k++) {
        int found = 0;
        for (int i = 0; i < c->rates.count; i++) found += c->ops[i].op == kinds[k];
        if (!found)
            user_error("%s: \"%s\" has no row of %s in %s, in which this build computes: add one, or build the other "
                       "precision",
                       path, lists[k > 2], op_names[kinds[k]], PRECISION_NAME);
    }
}

/* What an exchange of `ranks` ranks on `hosts` hosts takes: the row of just these, else by the links between ranks,
 * else the nearest row. */
static void cluster_exchange(ExchangeRate *e, const cJSON *root, const char *path, const char *transport,
                             Collective collective, int ranks, int hosts) {
    const cJSON *links = json_object(root, path, "links"), *row, *best = NULL;
    double nearest = INFINITY;
    int i = 0;
    char where[1024], best_where[1024] = "";
    const char *by, *op;
    cJSON_ArrayForEach(row, cluster_list(root, path, "exchange")) {
        snprintf(where, sizeof where, "%s: row %d of \"exchange\"", path, ++i);
        cluster_word(row, where, "transport", NULL, &by);
        cluster_word(row, where, "op", "all_gather|reduce_scatter|reduce_scatter+sum", &op);
        int of_ranks = (int)cluster_number(row, where, "ranks", 2, 1 << 20),
            of_hosts = (int)cluster_number(row, where, "hosts", 1, 1 << 20);
        double distance = fabs(log((double)of_ranks / ranks)) + fabs(log((double)of_hosts / hosts));
        if (strcmp(op, collective_names[collective]) || (transport && strcmp(by, transport)) || distance >= nearest)
            continue;
        nearest = distance, best = row;
        memcpy(best_where, where, sizeof where);
        snprintf(e->of, sizeof e->of, "%s, %d ranks on %d host%s%s", by, of_ranks, of_hosts, of_hosts > 1 ? "s" : "",
                 distance > 0 ? ", the nearest that the file has" : "");
    }
    if (links && nearest > 0) {
        /* Gathered parts come to a host once, over the links of all its members together, and spread within it. Of an
         * all-to-all (which a reduce-scatter is here) every part has but one receiver: what comes from other hosts
         * comes over its own link. */
        static const char *const names[] = {"within_host", "between_hosts"};
        double latency[2] = {0, 0}, bandwidth[2] = {INFINITY, INFINITY}, members = (double)ranks / hosts;
        for (int l = 0; l < 2; l++) {
            snprintf(where, sizeof where, "%s: \"links\": \"%s\"", path, names[l]);
            const cJSON *link = json_object(links, path, names[l]);
            if (!link && (l ? hosts > 1 : members > 1))
                user_error("%s is missing; a group of %d ranks on %d hosts needs it", where, ranks, hosts);
            if (link)
                latency[l] = cluster_number(link, where, "latency_s", 0, 1e6),
                bandwidth[l] = cluster_number(link, where, "bytes_per_s", 1, 1e30);
        }
        e->latency = latency[0] * ceil(log2(fmax(1, members))) + latency[1] * ceil(log2(hosts));
        if (collective == ALL_GATHER)
            e->bandwidth = fmin(members > 1 ? bandwidth[0] : INFINITY, hosts > 1 ? bandwidth[1] * members : INFINITY);
        else e->bandwidth = (ranks - 1) / fmax((members - 1) / bandwidth[0], (ranks - members) / bandwidth[1]);
        e->points = 0;
        snprintf(e->of, sizeof e->of, "links, %d ranks on %d host%s", ranks, hosts, hosts > 1 ? "s" : "");
        return;
    }
    if (!best)
        user_error(
            "%s: \"exchange\" has no row of %s%s%s, and there are no \"links\": a group of %d ranks needs one of them",
            path, collective_names[collective], transport ? " over " : "", transport ? transport : "", ranks);
    const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(best, "measured_bytes"),
                *seconds = cJSON_GetObjectItemCaseSensitive(best, "measured_s");
    e->latency = cluster_number(best, best_where, "latency_s", 0, 1e6),
    e->bandwidth = cluster_number(best, best_where, "bytes_per_s", 1, 1e30);
    e->points = cJSON_GetArraySize(bytes);
    if (cJSON_GetArraySize(seconds) != e->points || e->points > MAX_POINTS)
        user_error("%s: \"measured_bytes\" has %d and \"measured_s\" %d numbers, expected as many, at most %d",
                   best_where, e->points, cJSON_GetArraySize(seconds), MAX_POINTS);
    for (int p = 0; p < e->points; p++) {
        const cJSON *b = cJSON_GetArrayItem(bytes, p), *s = cJSON_GetArrayItem(seconds, p);
        e->bytes[p] = cJSON_IsNumber(b) ? b->valuedouble : 0, e->seconds[p] = cJSON_IsNumber(s) ? s->valuedouble : 0;
        if (!(e->bytes[p] > (p ? e->bytes[p - 1] : 0)) || !(e->seconds[p] > 0 && e->seconds[p] < 1e30) ||
            e->bytes[p] > 1e30)
            user_error("%s: number %d of \"measured_bytes\" or \"measured_s\" is %g or %g; expected numbers above 0, "
                       "the bytes in rising order",
                       best_where, p + 1, e->bytes[p], e->seconds[p]);
    }
}

/* Rates of a rank of `mesh`. Ranks stand on hosts in the order of their numbers; where the file has rates of a host its
 * ranks share them, or as many threads as each has. threads 0: all cores. transport NULL: any. */
static void cluster_open(Cluster *c, const char *path, const Mesh *mesh, int threads, const char *transport) {
    memset(c, 0, sizeof *c);
    char *text = read_text_file(path);
    if (!text) user_error("cannot read --cluster %s: %s", path, strerror(errno));
    cJSON *root = cJSON_Parse(text);
    const char *name, *of;
    if (!cJSON_IsObject(root))
        user_error("--cluster %s is no JSON object: expected one as make -C dev/kernels collectives writes it", path);
    cluster_word(root, path, "name", NULL, &name);
    snprintf(c->name, sizeof c->name, "%s", name);
    int device = cluster_word(root, path, "rates_of", "host|device", &of);
    int cores = device ? 1 : (int)cluster_number(root, path, "cores_per_host", 1, 1 << 20);
    c->ranks_per_host = device ? (int)cluster_number(root, path, "ranks_per_host", 1, 1 << 20)
                               : json_integer(root, path, "ranks_per_host", cores, 1, 1 << 20);
    c->ranks_per_host = (int)min_i64(c->ranks_per_host, mesh->world);
    double share =
        device ? 1 : fmin(threads ? (double)threads / cores : 1, 1.0 / c->ranks_per_host); // of a host's rates
    c->rates.memory = share * cluster_number(root, path, "memory_bytes_per_s", 1, 1e30);
    c->memory = json_number(root, path, "memory_bytes_per_host", 0, 0, 1e30) /
                (device ? cluster_number(root, path, "ranks_per_host", 1, 1 << 20) : c->ranks_per_host);
    c->hosts_per_rack = json_integer(root, path, "hosts_per_rack", 0, 0, 1 << 20);
    c->communicator = json_number(root, path, "communicator_bytes", 0, 0, 1e12);
    cluster_ops(c, root, path, share);
    const cJSON *peaks = json_object(root, path, "peak_flops_per_s");
    if (peaks) c->peak = share * cluster_number(peaks, path, PRECISION_NAME, 1, 1e30);
    for (int a = 0; a < AXES; a++) {
        int ranks = mesh_group_size(mesh, (Axis)a), hosts = group_spans(mesh, (Axis)a, c->ranks_per_host);
        if (ranks == 1) continue;
        for (int o = 0; o < COLLECTIVES; o++) {
            int message = o == SEND || o == RECEIVE; // takes what two ranks take to gather: each receives one part
            cluster_exchange(&c->exchange[a][o], root, path, transport, message ? ALL_GATHER : (Collective)o,
                             message ? 2 : ranks, message ? (int)min_i64(hosts, 2) : hosts);
        }
    }
    cJSON_Delete(root);
    free(text);
}

static void cluster_close(Cluster *c) { free(c->ops), c->ops = NULL; }

#endif
