/* plan.h: what a step must cost, known before it runs, and the comparison with what it did cost.
 *
 * Traffic has three witnesses: the law (a closed form from the options alone, below), the walk (the program's own
 * code on a walking device) and the wire (counted where the transport moves bytes). Memory has two: the walk and
 * the arenas. After the first step of every run they are compared; a difference stops it.
 */
#ifndef PLAN_H
#define PLAN_H
#include "fsdp.h"

// ---------------------------------------------------------------------------
// the law

static int64_t aligned(int64_t elements) { return round_up(elements, TENSOR_ALIGN); }

/* Traffic of one rank and step, in words (Rajbhandari et al. 2020, section 7; facts on what is gathered when in fsdp.h).
 * A rank receives all parts of a unit but its own, each time. Weights, in the compute dtype: full_shard gathers every
 * block twice a micro-batch, embedding and head once (the head stays from forward to backward, the embedding's backward
 * needs no weights; tied they are one); shard_grad_op every unit once a step; no_shard none. Gradients, in the reduce
 * dtype: every unit once a micro-batch or, accumulated locally, once a step; without sharding twice, to and fro. Over
 * replicas each rank's part goes to and fro once a step. */
static void law_of_step(Traffic law[AXES][COLLECTIVES], const Llama3Config *c, int world, int64_t n /* ranks that shard */, int64_t R /* replicas */, const Sharding *how, int64_t wrap,
                        int64_t report_bytes) {
    int64_t C = c->C, V = c->V, F = c->F, Q = (int64_t)c->NH * c->HD, KV = (int64_t)c->NKV * c->HD;
    int64_t matrices = (Q + 2 * KV) * C + C * Q + 3 * F * C, block = 2 * aligned(C) + aligned((Q + 2 * KV) * C) + aligned(C * Q) + aligned(2 * F * C) + aligned(C * F);
    int64_t joined = min_i64(c->L, max_i64(1, (wrap + matrices + 2 * C - 1) / (matrices + 2 * C))), rest = c->L % joined; // blocks in a unit, in the last
    int64_t embedding = c->tied ? aligned(V * C) + aligned(C) : aligned(V * C), head = c->tied ? 0 : aligned(C) + aligned(V * C);
    int64_t pad = TENSOR_ALIGN * n * R, blocks = c->L / joined * round_up(joined * block, pad) + round_up(rest * block, pad), ends = round_up(embedding, pad) + round_up(head, pad);
    int64_t block_units = (c->L + joined - 1) / joined, end_units = c->tied ? 1 : 2, k = how->accumulation, reductions = how->local ? 1 : k;
    int64_t weight = (int64_t)sizeof(floatX), gradient = how->reduce_dtype == DTYPE_BF16 ? 2 : 4;
    int full = !strcmp(how->strategy->name, "full_shard"), ddp = !strcmp(how->strategy->name, "no_shard");
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
    if (world > 1) { // the step report
        Traffic report = {1, (world - 1) * report_bytes};
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
// the plan: a walked rank, for people and as plan.json

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

static void plan_write(FILE *f, const Mesh *m, const Device *walked, const Traffic law[AXES][COLLECTIVES], const Comm *comm, int64_t tokens_per_step) {
    int *colours = (int *)checked_malloc(sizeof(int) * AXES * (size_t)m->world), key;
    for (int r = 0; r < m->world; r++)
        for (int a = 0; a < AXES; a++) mesh_group(m, r, (Axis)a, &colours[r * AXES + a], &key);
    size_t peak = 0;
    fprintf(f, "{");
    mesh_json(f, m);
    fprintf(f, ",\"tokens_per_step\":%" PRId64 ",\"rank_classes\":[{\"ranks\":[", tokens_per_step);
    for (int r = 0; r < m->world; r++) fprintf(f, "%s%d", r ? "," : "", r);
    fprintf(f, "],\"peak_when\":\"%s\",\"in_files\":%zu,\"memory\":{", walked->peak_when, device_arenas(walked, 1));
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        fprintf(f, "%s\"%s\":%zu", c ? "," : "", mem_category_names[c], walked->arenas[c].peak);
        peak += walked->arenas[c].in_file ? 0 : walked->arenas[c].peak;
    }
    fprintf(f, "},\"peak\":%zu,", peak);
    flops_json(f, walked);
    fprintf(f, ",");
    traffic_json(f, law, comm->booked, NULL);
    fprintf(f, "}],");
    groups_json(f, m, colours);
    fprintf(f, ",\"estimate\":{}}\n"); // of times: needs --cluster
    free(colours);
}

static void plan_print(FILE *f, const Llama3Config *c, const TensorTable *t, const Mesh *m, const char *strategy, const Device *walked, const Traffic law[AXES][COLLECTIVES],
                       const Comm *comm, int64_t tokens_per_step) {
    fprintf(f, "%s: %.1f M parameters, %s, %d rank%s: %s over %d, %d replica%s, %" PRId64 " tokens a step; all ranks are alike\n", c->name, (double)t->num_parameters / 1e6, PRECISION_NAME,
            m->world, m->world > 1 ? "s" : "", strategy, mesh_group_size(m, AXIS_FSDP), m->size[AXIS_DP_REPLICATE], m->size[AXIS_DP_REPLICATE] > 1 ? "s" : "", tokens_per_step);
    fprintf(f, "  memory of a rank by buffer (bytes; of buffers that share a name, the largest)\n");
    for (int i = 0; i < walked->num_buffers; i++)
        fprintf(f, "    %-12s %-32s %6d x %16zu\n", mem_category_names[walked->buffers[i].category], walked->buffers[i].name, walked->buffers[i].count, walked->buffers[i].bytes);
    fprintf(f, "  memory of a rank by category\n");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "    %-45s %22zu%s\n", mem_category_names[i], walked->arenas[i].peak, walked->arenas[i].in_file ? "  in a file" : "");
    fprintf(f, "    %-45s %22zu  (%.2f GB): first so much in the %s\n", "in all", device_peak(walked), (double)device_peak(walked) / 1e9, walked->peak_when);
    if (device_arenas(walked, 1)) fprintf(f, "    %-45s %22zu  (%.2f GB)\n", "in files", device_arenas(walked, 1), (double)device_arenas(walked, 1) / 1e9);
    fprintf(f, "  arithmetic of a rank and step: %.6g FLOP (a product of M x N x K counts 2MNK, attention what the mask lets through)\n", device_flops(walked, 0));
    if (device_flops(walked, 1) > 0) fprintf(f, "  and of activations computed again: %.6g FLOP\n", device_flops(walked, 1));
    fprintf(f, "  exchanges of a rank and step%31s %20s\n", "law", "walk");
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++)
            if (law[a][o].calls || comm->booked[a][o].calls)
                fprintf(f, "    %-13s %-15s %4" PRId64 " calls %14" PRId64 " %20" PRId64 " bytes\n", axis_names[a], collective_names[o], comm->booked[a][o].calls,
                        law[a][o].bytes, comm->booked[a][o].bytes);
}

#endif
