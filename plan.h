/* plan.h: what a step must cost, known before it runs, and the comparison with what it did cost.
 *
 * Traffic has three witnesses: the law (a closed form from the options alone, below), the walk (the program's own
 * code on a walking device) and the wire (counted where the transport moves bytes). Memory has two: the walk and
 * the arenas. After the first step of every run they are compared; a difference stops it. A plan has a walk for each kind of ranks.
 * Given a cluster file the walk has a clock, and so tells the time of a step as well.
 */
#ifndef PLAN_H
#define PLAN_H
#include "fsdp.h"
#include "options.h" // defines: Options, number_behind
#include "replay.h"  // defines: Replay, replay_run

// ---------------------------------------------------------------------------
// the law

static int64_t aligned(int64_t elements) { return round_up(elements, TENSOR_ALIGN); }

/* Traffic of one rank and step, in words. Of data parallelism (Rajbhandari et al. 2020, section 7; facts on what is gathered
 * when in fsdp.h): a rank receives all parts of a unit but its own, each time. Weights, in the compute dtype: full_shard gathers
 * every block twice a micro-batch, embedding and head once (the head stays from forward to backward, the embedding's backward
 * needs no weights; tied they are one); shard_grad_op every unit once a step; no_shard none. Gradients, in the reduce
 * dtype: every unit once a micro-batch or, accumulated locally, once a step; without sharding twice, to and fro. Over
 * replicas each rank's part goes to and fro once a step.
 * Of tensor parallelism (Korthikanti et al. 2022, section 4.2.2): of activations (N, C) a rank has 1/tp, and receives the rest when
 * they are gathered, as much when sums are scattered. A block gathers 2 inputs and scatters 2 outputs; its backward gathers 2
 * gradients and the 2 inputs again, and scatters 2 gradients; embedding and head have one of each. The head's softmax takes 3 words a row,
 * the norms' gradients are summed once a step. Of context parallelism: a block gathers keys and values, its backward again,
 * and scatters their gradients. Computing a block again gathers its inputs and its keys and values, and scatters attention's output.
 * Of pipeline parallelism: this rank's stages have some of the blocks; the first has the embedding, the last the head. The activations of a
 * micro-batch come in and go out once, and so do their gradients. A tied weight is on both ends, which tell each other its gradient once a step. */
static void law_of_step(Traffic law[AXES][COLLECTIVES], const Llama3Config *c, int world, int rank, const Options *o, const Sharding *how, int64_t report_bytes) {
    int64_t asked[MESH_AXES] = {o->tp, o->cp, o->pp, o->dp_shard, o->dp_replicate}, product = 1;
    for (int a = 0; a < MESH_AXES; a++) product *= max_i64(1, asked[a]);
    for (int a = 0; a < MESH_AXES; a++) asked[a] = asked[a] ? asked[a] : world / product;
    int64_t tp = asked[AXIS_TP], cp = asked[AXIS_CP], pp = asked[AXIS_PP], n = asked[AXIS_DP_SHARD] * cp /* ranks that shard */, R = asked[AXIS_DP_REPLICATE], stage = rank / (tp * cp) % pp;
    int64_t first = stage == 0, last = stage == pp - 1, k = how->accumulation, reductions = how->local ? 1 : k, apart = c->tied && (pp > 1 || o->deterministic);
    int full = !strcmp(how->strategy->name, "full_shard"), ddp = !strcmp(how->strategy->name, "no_shard");
    int64_t C = c->C, V = (c->V + tp - 1) / tp, F = (c->F + tp - 1) / tp, Q = (int64_t)c->NH / tp * c->HD, KV = (int64_t)c->NKV / tp * c->HD;
    int64_t weight = (int64_t)sizeof(floatX), gradient = how->reduce_dtype == DTYPE_BF16 ? 2 : 4, pad = TENSOR_ALIGN * n * R, every = number_behind(o->recompute, "every");
    // units: of blocks, of this stage's runs of them, and at the ends
    int64_t block = 2 * aligned(C) + aligned((Q + 2 * KV) * C) + aligned(C * Q) + aligned(2 * F * C) + aligned(C * F), parameters = (2 * (Q + KV) * tp + 3 * c->F + 2) * C; // of the whole block
    int64_t joined = min_i64(c->L, max_i64(1, (number_behind(o->wrap, "size") + parameters - 1) / parameters)), L = 0, blocks = 0, block_units = 0, again = 0;
    for (int64_t v = 0; v < o->pp_chunks; v++) {
        int begin, count = stage_blocks(c->L, (int)(pp * o->pp_chunks), o->pp_light_ends, (int)(v * pp + stage), &begin);
        L += count, block_units += (count + joined - 1) / joined;
        blocks += count / joined * round_up(joined * block, pad) + round_up(count % joined * block, pad);
        for (int l = begin; l < begin + count; l++) again += !strcmp(o->recompute, "full") || (every && l % every == 0); // blocks that are computed again from their input
    }
    int64_t both = aligned(V * C) + aligned(C), embedding = first ? round_up(c->tied ? both : aligned(V * C), pad) : 0, head = last && (!c->tied || apart) ? round_up(both, pad) : 0;
    int64_t ends = embedding + head, end_units = (embedding > 0) + (head > 0);
    memset(law, 0, sizeof(Traffic) * AXES * COLLECTIVES);
    if (n > 1) {
        Traffic gather_full = {k * (2 * block_units + end_units), k * (2 * blocks + ends) / n * (n - 1) * weight};
        Traffic gather_once = {block_units + end_units, (blocks + ends) / n * (n - 1) * weight};
        Traffic reduce = {reductions * (block_units + end_units), reductions * (blocks + ends) / n * (n - 1) * gradient};
        law[AXIS_FSDP][ALL_GATHER] = ddp ? reduce : full ? gather_full : gather_once;
        law[AXIS_FSDP][REDUCE_SCATTER] = reduce;
    }
    if (R > 1) {
        Traffic replicas = {block_units + end_units, (blocks + ends) / n / R * (R - 1) * gradient};
        law[AXIS_DP_REPLICATE][ALL_GATHER] = law[AXIS_DP_REPLICATE][REDUCE_SCATTER] = replicas;
    }
    int64_t N = o->batch * (o->seq / cp), rows = (N + tp - 1) / tp, activations = rows * C * weight, logit_rows = min_i64(N, max_i64(16, min_i64(LOGIT_ROWS, LOGITS / V & ~15)));
    if (tp > 1) {
        int64_t gathers = 6 * L + 2 * again + first + last, scatters = 4 * L + again + first + last, softmaxes = last * ((N + logit_rows - 1) / logit_rows), norms = (2 * L + last) * C;
        Traffic gather = {k * (gathers + softmaxes) + 1, (tp - 1) * (k * (gathers * activations + last * 12 * N) + 4 * norms)}, scatter = {k * scatters, (tp - 1) * k * scatters * activations};
        law[AXIS_TP][ALL_GATHER] = gather, law[AXIS_TP][REDUCE_SCATTER] = scatter;
    }
    if (cp > 1) {
        Traffic gather = {k * (2 * L + again), (cp - 1) * k * (2 * L + again) * N * 2 * KV * weight}, scatter = {k * L, (cp - 1) * k * L * N * 2 * KV * weight};
        law[AXIS_CP][ALL_GATHER] = gather, law[AXIS_CP][REDUCE_SCATTER] = scatter;
    }
    if (pp > 1) {
        int64_t messages = k * (2 * o->pp_chunks - first - last), tied = c->tied && (first || last);
        Traffic each_way = {messages + tied, messages * activations + tied * round_up(both, pad) / (ddp ? 1 : n) * 4};
        law[AXIS_PP][SEND] = law[AXIS_PP][RECEIVE] = each_way;
    }
    if (world > 1) { // the step report, and with --out which samples it took
        Traffic report = {o->out ? 2 : 1, (world - 1) * (report_bytes + (o->out ? (int64_t)sizeof(int64_t) * o->accum * o->batch : 0))};
        law[AXIS_WORLD][ALL_GATHER] = report;
    }
}

// ---------------------------------------------------------------------------
// the three held against each other

typedef struct {
    Traffic law[AXES][COLLECTIVES], walk[AXES][COLLECTIVES], wire[AXES][COLLECTIVES];
    size_t walked[MEM_CATEGORIES], measured[MEM_CATEGORIES]; // peak bytes
    double flops;                                            // of the walk
} Ledger;

static int traffic_equal(Traffic a, Traffic b) { return a.calls == b.calls && a.bytes == b.bytes; }

/* One line a row; returns how many rows differ. `f` may be NULL: only count. */
static int ledger_print(const Ledger *l, FILE *f) {
    int differences = 0;
    if (f) fprintf(f, "  %-13s %-15s %14s %14s %14s\n", "axis", "exchange", "law", "walk", "wire");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int a = i / COLLECTIVES, o = i % COLLECTIVES;
        Traffic law = l->law[a][o], walk = l->walk[a][o], wire = l->wire[a][o];
        int equal = traffic_equal(law, walk) && traffic_equal(walk, wire);
        differences += !equal;
        if (!f || (!law.calls && !walk.calls && !wire.calls)) continue;
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " calls%s\n", axis_names[a], collective_names[o], law.calls, walk.calls, wire.calls, equal ? "" : "  <- differ");
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " bytes%s\n", "", "", law.bytes, walk.bytes, wire.bytes, equal ? "" : "  <- differ");
    }
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        int equal = l->walked[c] == l->measured[c];
        differences += !equal;
        if (f) fprintf(f, "  %-13s %-15s %14s %14zu %14zu bytes%s\n", "memory", mem_category_names[c], "", l->walked[c], l->measured[c], equal ? "" : "  <- differ");
    }
    return differences;
}

static void ledger_check(const Ledger *l, int rank) {
    int differences = ledger_print(l, NULL);
    if (!differences) return;
    ledger_print(l, stderr);
    run_failure("rank %d: law, walk and wire of the first step differ in %d rows (above): the program does not do what was asked", rank, differences);
}

static void traffic_json(FILE *f, const Traffic law[AXES][COLLECTIVES], const Traffic walk[AXES][COLLECTIVES], const Traffic wire[AXES][COLLECTIVES]) {
    const char *comma = "";
    fprintf(f, "\"traffic\":[");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int a = i / COLLECTIVES, o = i % COLLECTIVES;
        Traffic counted = wire ? wire[a][o] : walk[a][o];
        if (!law[a][o].calls && !walk[a][o].calls && !counted.calls) continue;
        fprintf(f, "%s{\"axis\":\"%s\",\"op\":\"%s\"", comma, axis_names[a], collective_names[o]);
        fprintf(f, ",\"calls\":{\"law\":%" PRId64 ",\"walk\":%" PRId64, law[a][o].calls, walk[a][o].calls);
        if (wire) fprintf(f, ",\"wire\":%" PRId64, counted.calls);
        fprintf(f, "},\"bytes\":{\"law\":%" PRId64 ",\"walk\":%" PRId64, law[a][o].bytes, walk[a][o].bytes);
        if (wire) fprintf(f, ",\"wire\":%" PRId64, counted.bytes);
        fprintf(f, "}}");
        comma = ",";
    }
    fprintf(f, "]");
}

static void flops_json(FILE *f, const Device *walked) {
    fprintf(f, "\"flops\":{\"total\":%.0f", device_flops(walked, 0));
    if (device_flops(walked, 1) > 0) fprintf(f, ",\"again\":%.0f", device_flops(walked, 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (walked->ops[i].calls) fprintf(f, ",\"%s\":%.0f", op_names[i], walked->ops[i].flops);
    fprintf(f, "}");
}

static void ledger_write(const Ledger *l, const Device *walked, FILE *f) {
    fprintf(f, "{");
    traffic_json(f, l->law, l->walk, l->wire);
    fprintf(f, ",\"memory\":[");
    for (int c = 0; c < MEM_CATEGORIES; c++)
        fprintf(f, "%s{\"category\":\"%s\",\"walk\":%zu,\"measured\":%zu}", c ? "," : "", mem_category_names[c], l->walked[c], l->measured[c]);
    fprintf(f, "],");
    flops_json(f, walked);
    fprintf(f, "}\n");
}

// ---------------------------------------------------------------------------
// a cluster: what its machines do in a second, from a file whose format stands at the head of dev/kernels/collectives.cu

typedef struct {
    char name[128];
    OpRates rates;              // of one rank
    OpRate *ops;                // what rates.ops points to
    double peak;                // FLOP/s of a rank's products at best
    double memory;              // bytes of a rank; 0: the file does not say
    int ranks_per_host;
    ExchangeRate exchange[AXES][COLLECTIVES];
} Cluster;

static double cluster_number(const cJSON *json, const char *where, const char *key, double low, double high) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!item || cJSON_IsNull(item)) user_error("%s: \"%s\" is missing; dev/kernels/collectives.cu says what a cluster file holds", where, key);
    return json_number(json, where, key, NAN, low, high);
}

/* A string under `key`, one of `choices` (parted by |; NULL: any); which of them. */
static int cluster_word(const cJSON *json, const char *where, const char *key, const char *choices, const char **word) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    int index = 0;
    if (!cJSON_IsString(item) || !item->valuestring[0]) user_error("%s: \"%s\" must be %s%s", where, key, choices ? "one of " : "a text", choices ? choices : "");
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
    static const OpKind kinds[] = {OP_LINEAR_FORWARD, OP_LINEAR_BACKWARD_WEIGHT, OP_LINEAR_BACKWARD_INPUT, OP_ATTENTION_FORWARD, OP_ATTENTION_BACKWARD};
    static const char *const lists[] = {"products", "attention"};
    static const char *const names[] = {"linear_forward|linear_backward_weight|linear_backward_input", "attention_forward|attention_backward"};
    char where[1024];
    const char *dtype, *op;
    c->ops = (OpRate *)checked_malloc(sizeof(OpRate) * (size_t)(cJSON_GetArraySize(cluster_list(root, path, lists[0])) + cJSON_GetArraySize(cluster_list(root, path, lists[1]))));
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
                double M = cluster_number(row, where, "M", 1, 1e9), N = cluster_number(row, where, "N", 1, 1e9), K = cluster_number(row, where, "K", 1, 1e9);
                o->flops = 2 * M * N * K;
                bytes = (M + N) * K * size + M * N * (o->op == OP_LINEAR_BACKWARD_WEIGHT ? 4 : size);
            } else {
                AttentionShape s = ZERO;
                s.B = (int)cluster_number(row, where, "B", 1, 1e6), s.Tq = s.Tk = (int)cluster_number(row, where, "T", 1, 1 << 24), s.HD = (int)cluster_number(row, where, "HD", 1, 1e6);
                s.NH = (int)cluster_number(row, where, "NH", 1, 1e6), s.NKV = (int)cluster_number(row, where, "NKV", 1, 1e6);
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
        if (!found) user_error("%s: \"%s\" has no row of %s in %s, in which this build computes: add one, or build the other precision", path, lists[k > 2], op_names[kinds[k]], PRECISION_NAME);
    }
}

/* What an exchange of `ranks` ranks on `hosts` hosts takes: the row of just these, else by the links between ranks, else the nearest row. */
static void cluster_exchange(ExchangeRate *e, const cJSON *root, const char *path, const char *transport, Collective collective, int ranks, int hosts) {
    const cJSON *links = json_object(root, path, "links"), *row, *best = NULL;
    double nearest = INFINITY;
    int i = 0;
    char where[1024], best_where[1024] = "";
    const char *by, *op;
    cJSON_ArrayForEach(row, cluster_list(root, path, "exchange")) {
        snprintf(where, sizeof where, "%s: row %d of \"exchange\"", path, ++i);
        cluster_word(row, where, "transport", NULL, &by);
        cluster_word(row, where, "op", "all_gather|reduce_scatter|reduce_scatter+sum", &op);
        int of_ranks = (int)cluster_number(row, where, "ranks", 2, 1 << 20), of_hosts = (int)cluster_number(row, where, "hosts", 1, 1 << 20);
        double distance = fabs(log((double)of_ranks / ranks)) + fabs(log((double)of_hosts / hosts));
        if (strcmp(op, collective_names[collective]) || (transport && strcmp(by, transport)) || distance >= nearest) continue;
        nearest = distance, best = row;
        memcpy(best_where, where, sizeof where);
        snprintf(e->of, sizeof e->of, "%s, %d ranks on %d host%s%s", by, of_ranks, of_hosts, of_hosts > 1 ? "s" : "", distance > 0 ? ", the nearest that the file has" : "");
    }
    if (links && nearest > 0) {
        /* Gathered parts come to a host once, over the links of all its members together, and spread within it. Of an all-to-all
         * (which a reduce-scatter is here) every part has but one receiver: what comes from other hosts comes over its own link. */
        static const char *const names[] = {"within_host", "between_hosts"};
        double latency[2] = {0, 0}, bandwidth[2] = {INFINITY, INFINITY}, members = (double)ranks / hosts;
        for (int l = 0; l < 2; l++) {
            snprintf(where, sizeof where, "%s: \"links\": \"%s\"", path, names[l]);
            const cJSON *link = json_object(links, path, names[l]);
            if (!link && (l ? hosts > 1 : members > 1)) user_error("%s is missing; a group of %d ranks on %d hosts needs it", where, ranks, hosts);
            if (link) latency[l] = cluster_number(link, where, "latency_s", 0, 1e6), bandwidth[l] = cluster_number(link, where, "bytes_per_s", 1, 1e30);
        }
        e->latency = latency[0] * ceil(log2(fmax(1, members))) + latency[1] * ceil(log2(hosts));
        if (collective == ALL_GATHER) e->bandwidth = fmin(members > 1 ? bandwidth[0] : INFINITY, hosts > 1 ? bandwidth[1] * members : INFINITY);
        else e->bandwidth = (ranks - 1) / fmax((members - 1) / bandwidth[0], (ranks - members) / bandwidth[1]);
        e->points = 0;
        snprintf(e->of, sizeof e->of, "links, %d ranks on %d host%s", ranks, hosts, hosts > 1 ? "s" : "");
        return;
    }
    if (!best) user_error("%s: \"exchange\" has no row of %s%s%s, and there are no \"links\": a group of %d ranks needs one of them", path, collective_names[collective],
                          transport ? " over " : "", transport ? transport : "", ranks);
    const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(best, "measured_bytes"), *seconds = cJSON_GetObjectItemCaseSensitive(best, "measured_s");
    e->latency = cluster_number(best, best_where, "latency_s", 0, 1e6), e->bandwidth = cluster_number(best, best_where, "bytes_per_s", 1, 1e30);
    e->points = cJSON_GetArraySize(bytes);
    if (cJSON_GetArraySize(seconds) != e->points || e->points > MAX_POINTS)
        user_error("%s: \"measured_bytes\" has %d and \"measured_s\" %d numbers, expected as many, at most %d", best_where, e->points, cJSON_GetArraySize(seconds), MAX_POINTS);
    for (int p = 0; p < e->points; p++) {
        const cJSON *b = cJSON_GetArrayItem(bytes, p), *s = cJSON_GetArrayItem(seconds, p);
        e->bytes[p] = cJSON_IsNumber(b) ? b->valuedouble : 0, e->seconds[p] = cJSON_IsNumber(s) ? s->valuedouble : 0;
        if (!(e->bytes[p] > (p ? e->bytes[p - 1] : 0)) || !(e->seconds[p] > 0 && e->seconds[p] < 1e30) || e->bytes[p] > 1e30)
            user_error("%s: number %d of \"measured_bytes\" or \"measured_s\" is %g or %g; expected numbers above 0, the bytes in rising order", best_where, p + 1, e->bytes[p], e->seconds[p]);
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
    if (!cJSON_IsObject(root)) user_error("--cluster %s is no JSON object: expected one as make -C dev/kernels collectives writes it", path);
    cluster_word(root, path, "name", NULL, &name);
    snprintf(c->name, sizeof c->name, "%s", name);
    int device = cluster_word(root, path, "rates_of", "host|device", &of);
    int cores = device ? 1 : (int)cluster_number(root, path, "cores_per_host", 1, 1 << 20);
    c->ranks_per_host = device ? (int)cluster_number(root, path, "ranks_per_host", 1, 1 << 20) : json_integer(root, path, "ranks_per_host", cores, 1, 1 << 20);
    c->ranks_per_host = (int)min_i64(c->ranks_per_host, mesh->world);
    double share = device ? 1 : fmin(threads ? (double)threads / cores : 1, 1.0 / c->ranks_per_host); // of a host's rates
    c->rates.memory = share * cluster_number(root, path, "memory_bytes_per_s", 1, 1e30);
    c->memory = json_number(root, path, "memory_bytes_per_host", 0, 0, 1e30) / (device ? cluster_number(root, path, "ranks_per_host", 1, 1 << 20) : c->ranks_per_host);
    cluster_ops(c, root, path, share);
    const cJSON *peaks = json_object(root, path, "peak_flops_per_s");
    if (peaks) c->peak = share * cluster_number(peaks, path, PRECISION_NAME, 1, 1e30);
    for (int a = 0; a < AXES; a++) {
        int colour, other, key, hosts = 0, ranks = mesh_group_size(mesh, (Axis)a), last = -1;
        if (ranks == 1) continue;
        mesh_group(mesh, 0, (Axis)a, &colour, &key);
        for (int r = 0; r < mesh->world; r++) {
            mesh_group(mesh, r, (Axis)a, &other, &key);
            if (other == colour && r / c->ranks_per_host != last) hosts++, last = r / c->ranks_per_host;
        }
        for (int o = 0; o < COLLECTIVES; o++) {
            int message = o == SEND || o == RECEIVE; // takes what two ranks take to gather: each receives one part
            cluster_exchange(&c->exchange[a][o], root, path, transport, message ? ALL_GATHER : (Collective)o, message ? 2 : ranks, message ? (int)min_i64(hosts, 2) : hosts);
        }
    }
    cJSON_Delete(root);
    free(text);
}

// ---------------------------------------------------------------------------
// a plan: ranks that are alike, one of which was walked for all

struct Run;
typedef struct {
    int rank;             // the first of them
    struct Run *run;      // its walk, whose figures these are:
    const Device *walked;
    const Comm *comm;
    Traffic law[AXES][COLLECTIVES];
} RankClass;

typedef struct {
    const Mesh *mesh;
    RankClass *classes;   // (count), in the order of their first ranks
    int count;
    int *class_of;        // (world)
    Names names;
    Script *scripts;      // (num_scripts) what ranks ask of each other, that of many once
    uint64_t *hashes;     // (num_scripts)
    int num_scripts;
    int *script_of;       // (world)
    int every;            // each rank was walked; 0: one for all with the same part of the model
} Plan;

static uint64_t script_hash(const Script *s) {
    uint64_t h = HASH_START;
    for (int64_t i = 0; i < s->count; i++) {
        const ScriptLine *l = &s->lines[i];
        uint64_t computed, words[4];
        memcpy(&computed, &l->computed, sizeof computed);
        words[0] = computed, words[1] = (uint64_t)l->count, words[2] = (uint64_t)(uint32_t)l->what << 32 | (uint32_t)l->phase;
        words[3] = (uint64_t)(uint32_t)l->peer << 32 | (uint64_t)l->dtype << 24 | (uint64_t)(l->slot << 1 | l->waits) << 16 | (uint64_t)l->collective << 8 | l->axis;
        for (int w = 0; w < 4; w++) h = ((h ^ h >> 29) ^ words[w]) * 0x9E3779B97F4A7C15ull;
    }
    return h;
}

/* Keeps what `rank` asks of others: as that of another rank, where that is the same. */
static void plan_keep_script(Plan *p, int rank, const Script *s) {
    uint64_t hash = script_hash(s);
    int k = 0;
    while (k < p->num_scripts && (p->hashes[k] != hash || p->scripts[k].count != s->count)) k++;
    p->script_of[rank] = k;
    if (k < p->num_scripts) return;
    p->scripts = (Script *)realloc(p->scripts, sizeof *p->scripts * (size_t)(k + 1));
    p->hashes = (uint64_t *)realloc(p->hashes, sizeof hash * (size_t)(k + 1));
    if (!p->scripts || !p->hashes) run_failure("out of memory");
    Script *own = &p->scripts[p->num_scripts++];
    *own = *s, p->hashes[k] = hash;
    own->room = s->count, own->lines = (ScriptLine *)checked_malloc(sizeof(ScriptLine) * (size_t)s->count);
    memcpy(own->lines, s->lines, sizeof(ScriptLine) * (size_t)s->count);
}

static int walks_alike(const Device *a, const Comm *a_comm, const Device *b, const Comm *b_comm) {
    int alike = device_flops(a, 0) == device_flops(b, 0) && device_flops(a, 1) == device_flops(b, 1);
    for (int c = 0; c < MEM_CATEGORIES; c++) alike &= a->arenas[c].peak == b->arenas[c].peak;
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) alike &= traffic_equal(a_comm->booked[i / COLLECTIVES][i % COLLECTIVES], b_comm->booked[i / COLLECTIVES][i % COLLECTIVES]);
    return alike;
}

static const RankClass *plan_largest(const Plan *p) {
    const RankClass *largest = p->classes;
    for (int c = 1; c < p->count; c++)
        if (device_peak(p->classes[c].walked) > device_peak(largest->walked)) largest = &p->classes[c];
    return largest;
}

/* "0-3, 8-11, …": the numbers below n that are set, `most` runs of them. */
static void runs_print(FILE *f, const char *set, int n, int most) {
    int runs = 0;
    for (int i = 0, end; i < n; i = end + 1) {
        for (end = i; end < n && set[end]; end++) {}
        if (end == i) continue;
        if (runs++ == most) { fprintf(f, ", …"); return; }
        fprintf(f, end - i > 1 ? "%s%d-%d" : "%s%d", runs > 1 ? ", " : "", i, end - 1);
    }
}

/* "pp 1-14, tp 0: ranks 128, 136, 144, … (1792)" */
static void class_print(FILE *f, const Plan *p, int class_index) {
    const Mesh *m = p->mesh;
    int pp = m->size[AXIS_PP], tp = m->size[AXIS_TP], stages = 0, parts = 0, ranks = 0;
    char *of_stage = (char *)checked_malloc((size_t)pp), *of_part = (char *)checked_malloc((size_t)tp), *of_rank = (char *)checked_malloc((size_t)m->world);
    for (int r = 0; r < m->world; r++)
        if (p->class_of[r] == class_index) of_rank[r] = of_stage[mesh_coordinate(m, r, AXIS_PP)] = of_part[mesh_coordinate(m, r, AXIS_TP)] = 1, ranks++;
    for (int i = 0; i < pp; i++) stages += of_stage[i];
    for (int i = 0; i < tp; i++) parts += of_part[i];
    int told = ranks == m->world / (pp * tp) * stages * parts && (stages < pp || parts < tp); // all of those parts of all of those stages
    if (told && stages < pp) fprintf(f, "pp "), runs_print(f, of_stage, pp, pp);
    if (told && parts < tp) fprintf(f, stages < pp ? ", tp " : "tp "), runs_print(f, of_part, tp, tp);
    fprintf(f, ranks > 1 ? "%sranks " : "%srank ", told ? ": " : "");
    runs_print(f, of_rank, m->world, 4);
    if (ranks > 1) fprintf(f, " (%d)", ranks);
    fprintf(f, "\n");
    free(of_stage), free(of_part), free(of_rank);
}

// ---------------------------------------------------------------------------
// the replay of a plan's ranks, and by a cluster's clock the estimate of a step

/* Which rank the i-th to play is, where one plays for others. */
static int replay_rank(const Plan *p, int i) {
    int parts = p->mesh->size[AXIS_TP];
    return i / parts * mesh_stride(p->mesh, AXIS_PP) + i % parts;
}

/* Every rank plays, where every one was walked; else one for each part of the model: with others that do the same its exchanges take the same time.
 * `problem` (size) says what is wrong where 0 is returned. `timed`: it is kept when the exchanges of each stage's first rank took place. */
static int plan_replay(Replay *r, const Plan *p, const Cluster *c, char *problem, size_t size, int timed) {
    int parts = p->mesh->size[AXIS_TP], of_parts = parts * p->mesh->size[AXIS_PP];
    Mesh mesh = {of_parts, {parts, 1, p->mesh->size[AXIS_PP], 1, 1}};
    if (p->every) mesh = *p->mesh;
    const Script **scripts = (const Script **)checked_malloc(sizeof *scripts * (size_t)mesh.world);
    for (int i = 0; i < mesh.world; i++) scripts[i] = &p->scripts[p->script_of[p->every ? i : replay_rank(p, i)]];
    replay_open(r, &mesh, scripts, p->mesh, c ? c->exchange : NULL, problem, size);
    free(scripts);
    for (int i = 0; i < mesh.world && timed; i += mesh_stride(&mesh, AXIS_PP))
        if (i / mesh_stride(&mesh, AXIS_PP) < mesh.size[AXIS_PP]) r->actors[i].times = (LineTime *)checked_malloc(sizeof(LineTime) * (size_t)r->actors[i].script->count);
    return replay_run(r);
}

/* What was played, and that it fits. */
static void replay_print(FILE *f, const Plan *p, const Replay *r, double seconds) {
    int64_t lines = 0, exchanges = 0;
    for (int i = 0; i < r->mesh->world; i++) lines += r->actors[i].script->count;
    for (int i = 0; i < r->mesh->world * (int)AXES; i++) exchanges += r->groups[i].number;
    fprintf(f, "  %d ranks walked and replayed in %.2f s: %" PRId64 " events (%d lists of them), every one of %" PRId64 " collectives begins with all its members alike, every send meets its receive\n", r->mesh->world, seconds,
            lines, p->num_scripts, exchanges);
}

typedef struct {
    double step, tokens;        // seconds; tokens/s of all ranks
    // of the mean rank, seconds:
    double compute, waited[AXES], exchange[AXES]; // of which arithmetic; waits for exchanges; exchanges, hidden or not
    double ops[OP_COUNT];
    double most;                // arithmetic of the rank that has the most …
    int most_rank;              // … which one
    double flops, again, full;  // FLOPs of the mean rank: of the step; computed again; of the step if attention saw all keys and its backward took twice its forward
    double mfu;                 // flops a second, of the peak
} Estimate;

/* By a replay that went to its end. T: tokens of a sequence. */
static Estimate estimate_of(const Plan *p, const Cluster *c, const Replay *r, int64_t tokens_per_step, int T) {
    Estimate e = ZERO;
    e.step = r->seconds, e.tokens = (double)tokens_per_step / e.step;
    double share = 1.0 / r->mesh->world;
    for (int i = 0; i < r->mesh->world; i++) {
        const Actor *a = &r->actors[i];
        double computed = a->clock;
        for (int x = 0; x < AXES; x++) computed -= a->waited[x], e.waited[x] += share * a->waited[x];
        e.compute += share * computed;
        if (computed > e.most * (1 + 1e-9)) e.most = computed, e.most_rank = p->every ? i : replay_rank(p, i);
        const Device *walked = p->classes[p->class_of[p->every ? i : replay_rank(p, i)]].walked;
        for (int o = 0; o < OP_COUNT; o++) e.ops[o] += share * walked->ops[o].seconds;
        double attention[2] = {walked->ops[OP_ATTENTION_FORWARD].flops - walked->ops[OP_ATTENTION_FORWARD].again, walked->ops[OP_ATTENTION_BACKWARD].flops};
        e.flops += share * device_flops(walked, 0), e.again += share * device_flops(walked, 1);
        e.full += share * (device_flops(walked, 0) - attention[0] - attention[1] + 3 * attention[0] * 2 * T / (T + 1.0));
    }
    for (int s = 0; s < p->num_scripts; s++) {
        double seconds[AXES] = ZERO, players = 0;
        for (int i = 0; i < r->mesh->world; i++) players += r->actors[i].script == &p->scripts[s];
        for (int64_t l = 0; l < p->scripts[s].count && players > 0; l++) {
            const ScriptLine *line = &p->scripts[s].lines[l];
            if (!line->waits && line->collective != SEND) seconds[line->axis] += line_seconds(r, line); // as with bytes: of what comes
        }
        for (int x = 0; x < AXES; x++) e.exchange[x] += players * share * seconds[x];
    }
    e.mfu = e.flops / e.step / c->peak;
    return e;
}

static double exposed_of(const Estimate *e) {
    double sum = 0;
    for (int a = 0; a < AXES; a++) sum += e->waited[a];
    return sum;
}

static void estimate_json(FILE *f, const Cluster *c, const Estimate *e) {
    const char *comma = "";
    fprintf(f, "\"step_s\":%.9g,\"tokens_per_s\":%.9g,\"mfu\":%.6g,\"flops_per_s\":{\"by_mask\":%.9g,\"with_again\":%.9g,\"full_attention\":%.9g},\"compute_s\":%.9g,\"exposed_s\":%.9g", e->step, e->tokens, e->mfu,
            e->flops / e->step, (e->flops + e->again) / e->step, e->full / e->step, e->compute, exposed_of(e));
    for (int k = 0; k < 2; k++) {
        fprintf(f, k ? "},\"exchange_s\":{" : ",\"waited_s\":{");
        comma = "";
        for (int a = 0; a < AXES; a++)
            if (e->exchange[a] > 0) fprintf(f, "%s\"%s\":%.9g", comma, axis_names[a], k ? e->exchange[a] : e->waited[a]), comma = ",";
    }
    comma = "";
    fprintf(f, "},\"ops\":{");
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0) fprintf(f, "%s\"%s\":%.9g", comma, op_names[i], e->ops[i]), comma = ",";
    fprintf(f, "},\"cluster\":\"%s\"", c->name);
}

static void estimate_print(FILE *f, const Cluster *c, const Plan *p, const Estimate *e) {
    double need = (double)device_peak(plan_largest(p)->walked), T = 1e-12 / e->step;
    fprintf(f, "  estimated step %.4g s: %.4g s arithmetic, %.4g s waiting for exchanges, of the mean rank; %.0f tokens/s; MFU %.1f %% of %.4g FLOP/s a rank\n", e->step, e->compute, exposed_of(e), e->tokens, 100 * e->mfu, c->peak);
    fprintf(f, "    TFLOP/s a rank: %.1f (attention as the mask lets it through, its backward 2.5 times its forward)", T * e->flops);
    if (e->again > 0) fprintf(f, "; %.1f with what is computed again (HFU %.1f %%)", T * (e->flops + e->again), 1e14 * T * (e->flops + e->again) / c->peak);
    fprintf(f, "; %.1f (attention over all keys, backward twice its forward, as in Chowdhery et al. 2022)\n", T * e->full);
    fprintf(f, "    on %s: %d rank%s a host; an op has its nearest listed shape's rate, at most %.4g bytes/s\n", c->name, c->ranks_per_host, c->ranks_per_host > 1 ? "s" : "", c->rates.memory);
    if (c->memory > 0) fprintf(f, "    memory: %.2f of %.2f GB a rank%s\n", need / 1e9, c->memory / 1e9, need > c->memory ? ": does not fit" : "");
    if (e->most > 1.001 * e->compute) fprintf(f, "    most arithmetic: rank %d, %.4g s, %.1f %% more than the mean\n", e->most_rank, e->most, 100 * (e->most / e->compute - 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (e->ops[i] > 0.005 * e->step) fprintf(f, "    %-24s %10.4g s  %5.1f %%\n", op_names[i], e->ops[i], 100 * e->ops[i] / e->step);
    for (int a = 0; a < AXES; a++)
        if (e->exchange[a] > 0) fprintf(f, "    exchange over %-13s %7.4g s, %.4g s waited for  (as %s)%s\n", axis_names[a], e->exchange[a], e->waited[a], c->exchange[a][ALL_GATHER].of,
                a == AXIS_PP ? "; the pipeline's bubble is in it" : a == AXIS_WORLD && p->mesh->size[AXIS_PP] > 1 ? "; and what the stages end apart" : "");
}

// ---------------------------------------------------------------------------
// the plan for people, and as plan.json

static void mesh_json(FILE *f, const Mesh *m) {
    fprintf(f, "\"world\":%d,\"mesh\":{", m->world);
    for (int a = 0; a < MESH_AXES; a++) fprintf(f, "%s\"%s\":%d", a ? "," : "", axis_names[a], m->size[a]);
    fprintf(f, "}");
}

/* {"fsdp":[[0,1,…],…],…}: leaders[rank][axis] is the colour of rank's group; members come in rank order. */
static void groups_json(FILE *f, const Mesh *m, const int *colours) {
    fprintf(f, "\"groups\":{");
    for (int a = 0; a < AXES; a++) {
        fprintf(f, "%s\"%s\":[", a ? "," : "", axis_names[a]);
        char *listed = (char *)checked_malloc((size_t)m->world);
        int size = mesh_group_size(m, (Axis)a), groups = 0;
        for (int first = 0; first < m->world; first++) {
            if (listed[first]) continue;
            fprintf(f, "%s[", groups++ ? "," : "");
            int members = 0;
            for (int r = first; r < m->world && members < size; r++)
                if (colours[r * AXES + a] == colours[first * AXES + a]) {
                    fprintf(f, "%s%d", members++ ? "," : "", r);
                    listed[r] = 1;
                }
            fprintf(f, "]");
        }
        free(listed);
        fprintf(f, "]");
    }
    fprintf(f, "}");
}

static void class_json(FILE *f, const Plan *p, int class_index) {
    const RankClass *c = &p->classes[class_index];
    const char *comma = "";
    fprintf(f, "{\"ranks\":[");
    for (int r = 0; r < p->mesh->world; r++)
        if (p->class_of[r] == class_index) fprintf(f, "%s%d", comma, r), comma = ",";
    fprintf(f, "],\"peak_when\":\"%s\",\"in_files\":%zu,\"memory\":{", c->walked->peak_when, device_arenas(c->walked, 1));
    for (int i = 0; i < MEM_CATEGORIES; i++) fprintf(f, "%s\"%s\":%zu", i ? "," : "", mem_category_names[i], c->walked->arenas[i].peak);
    fprintf(f, "},\"peak\":%zu,", device_peak(c->walked));
    flops_json(f, c->walked);
    fprintf(f, ",");
    traffic_json(f, c->law, c->comm->booked, NULL);
    fprintf(f, "}");
}

/* `estimate` NULL: there is none. */
static void plan_write(FILE *f, const Plan *p, int64_t tokens_per_step, const Cluster *cluster, const Estimate *estimate) {
    const Mesh *m = p->mesh;
    int *colours = (int *)checked_malloc(sizeof(int) * AXES * (size_t)m->world), key;
    for (int r = 0; r < m->world; r++)
        for (int a = 0; a < AXES; a++) mesh_group(m, r, (Axis)a, &colours[r * AXES + a], &key);
    fprintf(f, "{");
    mesh_json(f, m);
    fprintf(f, ",\"tokens_per_step\":%" PRId64 ",\"rank_classes\":[", tokens_per_step);
    for (int c = 0; c < p->count; c++) {
        if (c) fprintf(f, ",");
        class_json(f, p, c);
    }
    fprintf(f, "],");
    groups_json(f, m, colours);
    fprintf(f, ",\"estimate\":{");
    if (estimate) estimate_json(f, cluster, estimate);
    fprintf(f, "}}\n");
    free(colours);
}

static void class_table(FILE *f, const RankClass *c, int with_buffers) {
    const Device *walked = c->walked;
    if (with_buffers) fprintf(f, "  memory of a rank by buffer (bytes; of buffers that share a name, the largest)\n");
    for (int i = 0; i < walked->num_buffers && with_buffers; i++)
        fprintf(f, "    %-12s %-32s %6d x %16zu\n", mem_category_names[walked->buffers[i].category], walked->buffers[i].name, walked->buffers[i].count, walked->buffers[i].bytes);
    fprintf(f, "  memory of a rank by category\n");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "    %-45s %22zu%s\n", mem_category_names[i], walked->arenas[i].peak, walked->arenas[i].slow ? "  " SLOW_TIER : "");
    fprintf(f, "    %-45s %22zu  (%.2f GB), first in %s\n", "in all", device_peak(walked), (double)device_peak(walked) / 1e9, walked->peak_when);
    if (device_arenas(walked, 1)) fprintf(f, "    %-45s %22zu  (%.2f GB)\n", "in files", device_arenas(walked, 1), (double)device_arenas(walked, 1) / 1e9);
    fprintf(f, "  arithmetic of a rank and step: %.6g FLOP (a product of M x N x K counts 2MNK, attention what the mask lets through)\n", device_flops(walked, 0));
    if (device_flops(walked, 1) > 0) fprintf(f, "  and of activations computed again: %.6g FLOP\n", device_flops(walked, 1));
    fprintf(f, "  exchanges of a rank and step%31s %20s\n", "law", "walk");
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++)
            if (c->law[a][o].calls || c->comm->booked[a][o].calls)
                fprintf(f, "    %-13s %-15s %4" PRId64 " calls %14" PRId64 " %20" PRId64 " bytes\n", axis_names[a], collective_names[o], c->comm->booked[a][o].calls,
                        c->law[a][o].bytes, c->comm->booked[a][o].bytes);
}

/* A class under the other; buffers of the one that needs the most memory. */
static void plan_print(FILE *f, const char *model, int threads, const TensorTable *t, const Plan *p, const char *strategy, int64_t tokens_per_step) {
    const Mesh *m = p->mesh;
    fprintf(f, "%s: %.1f M parameters, %s, %d rank%s x %d thread%s: %s over %d, %d replica%s, %" PRId64 " tokens a step; ", model, (double)t->num_parameters / 1e6, PRECISION_NAME,
            m->world, m->world > 1 ? "s" : "", threads, threads > 1 ? "s" : "", strategy, mesh_group_size(m, AXIS_FSDP), m->size[AXIS_DP_REPLICATE], m->size[AXIS_DP_REPLICATE] > 1 ? "s" : "", tokens_per_step);
    if (p->count == 1) fprintf(f, "all ranks are alike\n");
    else fprintf(f, "%d kinds of ranks\n", p->count);
    for (int c = 0; c < p->count; c++) {
        if (p->count > 1) class_print(f, p, c);
        class_table(f, &p->classes[c], &p->classes[c] == plan_largest(p));
    }
}

// ---------------------------------------------------------------------------
// the rate of bare products

/* FLOP/s of this rank at a plain product of the model's kind, beside which a step's speed is shown. */
static double product_rate(Device *dev) {
    const int N = RATE_ROWS, C = RATE_COLS, times = 4;
    OpStat ops[OP_COUNT];
    double clock = dev->clock;
    int64_t events = dev->num_events;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    device_phase(dev, "measuring the product rate", NULL);
    memcpy(ops, dev->ops, sizeof ops);
    floatX *x = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C)), *w = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(C * C));
    floatX *y = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C));
    double best = 1e30;
    int most = dev->walk ? 0 : (N > C ? N : C) * C;
    floatX *numbers = (floatX *)checked_malloc(sizeof(floatX) * (size_t)most);
    for (int i = 0; i < most; i++) numbers[i] = from_float((float)(i % 17) - 8);
    device_write(dev, x, numbers, sizeof(floatX) * (size_t)(N * C));
    device_write(dev, w, numbers, sizeof(floatX) * (size_t)(C * C));
    free(numbers);
    for (int i = 0; i < times; i++) {
        device_wait(dev);
        double start = seconds_now();
        linear_forward(dev, y, x, w, N, C, C);
        device_wait(dev);
        best = fmin(best, seconds_now() - start);
    }
    memcpy(dev->ops, ops, sizeof ops); // no op of the step
    device_phase(dev, NULL, NULL);
    dev->clock = clock, events_drop(dev, events);
    arena_release(dev, MEM_WORKSPACE, mark);
    return RATE_COUNTS ? 2.0 * N * C * C / best : 0;
}

#endif
