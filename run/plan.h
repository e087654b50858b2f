/* plan.h: what a step must cost, known before it runs, and the comparison with what it did cost.
 *
 * Traffic has three witnesses: the law (a closed form from the options alone, below), the dry run (the program's own
 * code on a dry-run device) and the wire (counted where the transport moves bytes). Memory has two: the dry run and
 * the arenas. After the first step of every run they are compared; a difference stops it. A plan has a dry run for each
 * kind of ranks; planner.h makes it.
 */
#ifndef PLAN_H
#define PLAN_H
#include "../fsdp.h"
#include "options.h"        // defines: Options, number_after_colon
#include "../plan/replay.h" // defines: Replay, replay_run

// ---------------------------------------------------------------------------
// the law

static int64_t aligned(int64_t elements) { return round_up(elements, TENSOR_ALIGN); }

/* Bytes that each of n ranks has of a frozen unit: `blocks` of 8-bit weights with their scales, and elements in the
 * compute dtype. */
static int64_t packed_bytes(int64_t blocks, int64_t elements, int64_t n) {
    return round_up(blocks, 4 * n) / n * (INT8_BLOCK + (int64_t)sizeof(float)) +
           round_up(elements, TENSOR_ALIGN * n) / n * (int64_t)sizeof(floatX);
}

/* Traffic of one rank and step, in words. Of data parallelism (Rajbhandari et al. 2020, section 7; facts on what is
 * gathered when in fsdp.h): a rank receives all parts of a unit but its own, each time. Weights, in the compute dtype:
 * full_shard gathers every block twice a micro-batch, embedding and head once (the head stays from forward to backward,
 * the embedding's backward needs no weights; tied they are one); shard_grad_op every unit once a step; no_shard none.
 * Gradients, in the reduce dtype: every unit once a micro-batch or, accumulated locally, once a step; without sharding
 * twice, to and fro. Over replicas each rank's part goes to and fro once a step. Of tensor parallelism (Korthikanti et
 * al. 2022, section 4.2.2): of activations (N, C) a rank has 1/tp, and receives the rest when they are gathered, as
 * much when sums are scattered. A block gathers 2 inputs and scatters 2 outputs; its backward gathers 2 gradients and
 * the 2 inputs again, and scatters 2 gradients; embedding and head have one of each. The head's softmax takes 3 words a
 * row, the gradients of norms are summed once a step, those of the adapters' halves that are not split unit by unit. Of
 * context parallelism: a block gathers keys and values, its backward again, and scatters their gradients. Computing a
 * block again gathers its inputs and its keys and values, and scatters attention's output. Of pipeline parallelism:
 * this rank's stages have some of the blocks; the first has the embedding, the last the head. The activations of a
 * micro-batch come in and go out once, and so do their gradients. A tied weight is on both ends, which tell each other
 * its gradient once a step. Beside adapters the model's own weights are gathered as they are kept, in the compute dtype
 * or as bytes with a scale for 64 of them, and have no gradients; each unit of blocks has a unit of adapters, gathered
 * when it is, which alone is reduced. */
static void law_of_step(Traffic law[AXES][COLLECTIVES], const Llama3Config *c, int world, int rank, const Options *o,
                        const Sharding *how, int64_t report_bytes) {
    int64_t asked[MESH_AXES] = {o->tp, o->cp, o->pp, o->dp_shard, o->dp_replicate}, product = 1;
    for (int a = 0; a < MESH_AXES; a++) product *= max_i64(1, asked[a]);
    for (int a = 0; a < MESH_AXES; a++) asked[a] = asked[a] ? asked[a] : world / product;
    int64_t tp = asked[AXIS_TP], cp = asked[AXIS_CP], pp = asked[AXIS_PP],
            n = asked[AXIS_DP_SHARD] * cp /* ranks that shard */, R = asked[AXIS_DP_REPLICATE],
            stage = rank / (tp * cp) % pp;
    int64_t first = stage == 0, last = stage == pp - 1, k = how->micro_batches, reductions = how->accumulate_locally ? 1 : k,
            apart = c->tied && (pp > 1 || o->deterministic);
    int full = !strcmp(how->strategy->name, "full_shard"), ddp = !strcmp(how->strategy->name, "no_shard");
    int64_t C = c->C, V = (c->V + tp - 1) / tp, F = (c->F + tp - 1) / tp, Q = (int64_t)c->NH / tp * c->HD,
            KV = (int64_t)c->NKV / tp * c->HD;
    int64_t weight = (int64_t)sizeof(floatX), gradient = how->reduce_dtype == DTYPE_BF16 ? 2 : 4,
            pad = TENSOR_ALIGN * n * R, every = number_after_colon(o->recompute, "every");
    // units: of blocks, of this stage's runs of them, and at the ends
    int64_t block = 2 * aligned(C) + aligned((Q + 2 * KV) * C) + aligned(C * Q) + aligned(2 * F * C) + aligned(C * F),
            parameters = (2 * (Q + KV) * tp + 3 * c->F + 2) * C; // of the whole block
    // adapters of a block, and what of it is kept in 8 bits
    int adapters = c->base != BASE_TRAINED, bits8 = c->base >= BASE_INT8, all8 = c->base == BASE_INT8_ALL;
    int64_t in[LORA_TARGETS] = {C, C, C, Q, C, C, F}, out[LORA_TARGETS] = {Q, KV, KV, C, F, F, C}, adapter = 0,
            matrices = 0, targets = 0, thin = 0, packed = 0;
    for (int i = 0; i < LORA_TARGETS; i++) {
        matrices += int8_blocks(in[i] * out[i]);
        if (adapters && c->lora_targets >> i & 1)
            targets++, adapter += aligned(c->lora_rank * in[i]) + aligned(out[i] * c->lora_rank);
    }
    if (all8) matrices += 2 * int8_blocks(C);
    int64_t joined = min_i64(c->L, max_i64(1, (number_after_colon(o->wrap, "size") + parameters - 1) / parameters)), L = 0,
            blocks = 0, block_units = 0, again = 0;
    for (int64_t v = 0; v < o->pp_chunks; v++) {
        int begin,
            count = stage_blocks(c->L, (int)(pp * o->pp_chunks), o->pp_light_ends, (int)(v * pp + stage), &begin);
        L += count, block_units += (count + joined - 1) / joined;
        blocks += count / joined * round_up(joined * block, pad) + round_up(count % joined * block, pad);
        thin += count / joined * round_up(joined * adapter, pad) + round_up(count % joined * adapter, pad);
        packed += count / joined * packed_bytes(joined * matrices, all8 ? 0 : joined * 2 * aligned(C), n) +
                  packed_bytes(count % joined * matrices, all8 ? 0 : count % joined * 2 * aligned(C), n);
        for (int l = begin; l < begin + count; l++)
            again += !strcmp(o->recompute, "full") ||
                     (every && l % every == 0); // blocks that are computed again from their input
    }
    int64_t both = aligned(V * C) + aligned(C), embedding = first ? round_up(c->tied ? both : aligned(V * C), pad) : 0,
            head = last && (!c->tied || apart) ? round_up(both, pad) : 0;
    int64_t ends = embedding + head, end_units = (embedding > 0) + (head > 0);
    int64_t kept = bits8 ? packed : blocks / n * weight, kept_ends = ends / n * weight; // bytes of a rank
    if (all8)
        kept_ends = (embedding > 0) * packed_bytes(int8_blocks(V * C) + (c->tied && !apart) * int8_blocks(C), 0, n) +
                    (head > 0) * packed_bytes(int8_blocks(V * C) + int8_blocks(C), 0, n);
    int64_t of_blocks = kept + thin / n * weight, block_gathers = block_units * (1 + adapters),
            reduced = adapters ? thin : blocks + ends, reduced_units = adapters ? block_units : block_units + end_units;
    memset(law, 0, sizeof(Traffic) * AXES * COLLECTIVES);
    if (n > 1) {
        Traffic gather_full = {k * (2 * block_gathers + end_units), k * (2 * of_blocks + kept_ends) * (n - 1)};
        Traffic gather_once = {block_gathers + end_units, (of_blocks + kept_ends) * (n - 1)};
        Traffic reduce = {reductions * reduced_units, reductions * reduced / n * (n - 1) * gradient};
        law[AXIS_FSDP][ALL_GATHER] = ddp ? reduce : full ? gather_full : gather_once;
        law[AXIS_FSDP][REDUCE_SCATTER] = reduce;
    }
    if (R > 1) {
        Traffic replicas = {reduced_units, reduced / n / R * (R - 1) * gradient};
        law[AXIS_DP_REPLICATE][ALL_GATHER] = law[AXIS_DP_REPLICATE][REDUCE_SCATTER] = replicas;
    }
    int64_t N = o->batch * (o->seq / cp), rows = (N + tp - 1) / tp, activations = rows * C * weight,
            logit_rows = min_i64(N, max_i64(16, min_i64(LOGIT_ROWS, LOGITS / V & ~15)));
    if (tp > 1) {
        int64_t gathers = 6 * L + 2 * again + first * !adapters + last, scatters = 4 * L + again + first + last,
                softmaxes = last * ((N + logit_rows - 1) / logit_rows),
                norms = adapters ? targets * L * c->lora_rank * C
                                 : (2 * L + last) * C; // whose gradients are summed over tp
        Traffic gather = {k * (gathers + softmaxes) + (adapters ? block_units : norms > 0),
                          (tp - 1) * (k * (gathers * activations + last * 12 * N) + 4 * norms)},
                scatter = {k * scatters, (tp - 1) * k * scatters * activations};
        law[AXIS_TP][ALL_GATHER] = gather, law[AXIS_TP][REDUCE_SCATTER] = scatter;
    }
    if (cp > 1) {
        Traffic gather = {k * (2 * L + again), (cp - 1) * k * (2 * L + again) * N * 2 * KV * weight},
                scatter = {k * L, (cp - 1) * k * L * N * 2 * KV * weight};
        law[AXIS_CP][ALL_GATHER] = gather, law[AXIS_CP][REDUCE_SCATTER] = scatter;
    }
    if (pp > 1) {
        int64_t messages = k * (2 * o->pp_chunks - first - last), tied = c->tied && (first || last) && !adapters;
        Traffic each_way = {messages + tied, messages * activations + tied * round_up(both, pad) / (ddp ? 1 : n) * 4};
        law[AXIS_PP][SEND] = law[AXIS_PP][RECEIVE] = each_way;
    }
    if (world > 1) { // the step report, and with --out which samples it took
        Traffic report = {o->out ? 2 : 1,
                          (world - 1) * (report_bytes + (o->out ? (int64_t)sizeof(int64_t) * o->accum * o->batch : 0))};
        law[AXIS_WORLD][ALL_GATHER] = report;
    }
}

// ---------------------------------------------------------------------------
// the three held against each other

typedef struct {
    Traffic law[AXES][COLLECTIVES], dry_run[AXES][COLLECTIVES], wire[AXES][COLLECTIVES];
    size_t dry_run_memory[MEM_CATEGORIES], measured[MEM_CATEGORIES]; // peak bytes
    double flops;                                                    // of the dry run
} Ledger;

static int traffic_equal(Traffic a, Traffic b) { return a.calls == b.calls && a.bytes == b.bytes; }

/* One line a row; returns how many rows differ. `f` may be NULL: only count. */
static int ledger_print(const Ledger *l, FILE *f) {
    int differences = 0;
    if (f) fprintf(f, "  %-13s %-15s %14s %14s %14s\n", "axis", "exchange", "law", "walk", "wire");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int a = i / COLLECTIVES, o = i % COLLECTIVES;
        Traffic law = l->law[a][o], dry_run = l->dry_run[a][o], wire = l->wire[a][o];
        int equal = traffic_equal(law, dry_run) && traffic_equal(dry_run, wire);
        differences += !equal;
        if (!f || (!law.calls && !dry_run.calls && !wire.calls)) continue;
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " calls%s\n", axis_names[a],
                collective_names[o], law.calls, dry_run.calls, wire.calls, equal ? "" : "  <- differ");
        fprintf(f, "  %-13s %-15s %14" PRId64 " %14" PRId64 " %14" PRId64 " bytes%s\n", "", "", law.bytes,
                dry_run.bytes, wire.bytes, equal ? "" : "  <- differ");
    }
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        int equal = l->dry_run_memory[c] == l->measured[c];
        differences += !equal;
        if (f)
            fprintf(f, "  %-13s %-15s %14s %14zu %14zu bytes%s\n", "memory", mem_category_names[c], "",
                    l->dry_run_memory[c], l->measured[c], equal ? "" : "  <- differ");
    }
    return differences;
}

static void ledger_check(const Ledger *l, int rank) {
    int differences = ledger_print(l, NULL);
    if (!differences) return;
    ledger_print(l, stderr);
    run_failure("rank %d: law, walk and wire of the first step differ in %d rows (above): the program does not do what "
                "was asked",
                rank, differences);
}

static void traffic_json(FILE *f, const Traffic law[AXES][COLLECTIVES], const Traffic dry_run[AXES][COLLECTIVES],
                         const Traffic wire[AXES][COLLECTIVES]) {
    const char *comma = "";
    fprintf(f, "\"traffic\":[");
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++) {
        int a = i / COLLECTIVES, o = i % COLLECTIVES;
        Traffic counted = wire ? wire[a][o] : dry_run[a][o];
        if (!law[a][o].calls && !dry_run[a][o].calls && !counted.calls) continue;
        fprintf(f, "%s{\"axis\":\"%s\",\"op\":\"%s\"", comma, axis_names[a], collective_names[o]);
        fprintf(f, ",\"calls\":{\"law\":%" PRId64 ",\"walk\":%" PRId64, law[a][o].calls, dry_run[a][o].calls);
        if (wire) fprintf(f, ",\"wire\":%" PRId64, counted.calls);
        fprintf(f, "},\"bytes\":{\"law\":%" PRId64 ",\"walk\":%" PRId64, law[a][o].bytes, dry_run[a][o].bytes);
        if (wire) fprintf(f, ",\"wire\":%" PRId64, counted.bytes);
        fprintf(f, "}}");
        comma = ",";
    }
    fprintf(f, "]");
}

static void flops_json(FILE *f, const Device *dry_run) {
    fprintf(f, "\"flops\":{\"total\":%.0f", device_flops(dry_run, 0));
    if (device_flops(dry_run, 1) > 0) fprintf(f, ",\"again\":%.0f", device_flops(dry_run, 1));
    for (int i = 0; i < OP_COUNT; i++)
        if (dry_run->ops[i].calls) fprintf(f, ",\"%s\":%.0f", op_names[i], dry_run->ops[i].flops);
    fprintf(f, "}");
}

static void ledger_write(const Ledger *l, const Device *dry_run, FILE *f) {
    fprintf(f, "{");
    traffic_json(f, l->law, l->dry_run, l->wire);
    fprintf(f, ",\"memory\":[");
    for (int c = 0; c < MEM_CATEGORIES; c++)
        fprintf(f, "%s{\"category\":\"%s\",\"walk\":%zu,\"measured\":%zu}", c ? "," : "", mem_category_names[c],
                l->dry_run_memory[c], l->measured[c]);
    fprintf(f, "],");
    flops_json(f, dry_run);
    fprintf(f, "}\n");
}

// ---------------------------------------------------------------------------
// a plan: ranks that are alike, one of which was dry-run for all

struct Trainer;
typedef struct {
    int rank;        // the first of them
    struct Trainer *trainer; // its dry run, whose figures these are:
    const Device *dry_run;
    const Comm *comm;
    Traffic law[AXES][COLLECTIVES];
} RankClass;

typedef enum {
    DRY_RUN_STAGES,
    DRY_RUN_PARTS,
    DRY_RUN_ALL
} DryRunKind; // one of each stage; of each stage and each part of tensor parallelism; every one

typedef struct {
    const Mesh *mesh;
    RankClass *classes; // (count), in the order of their first ranks
    int count;
    int *class_of; // (world)
    Names names;
    Script *scripts;  // (num_scripts) what ranks ask of each other, that of many once
    uint64_t *hashes; // (num_scripts)
    int num_scripts;
    int *script_of;  // (world)
    DryRunKind dry_run_kind; // which ranks were dry-run
} Plan;

static int dry_runs_alike(const Device *a, const Comm *a_comm, const Device *b, const Comm *b_comm) {
    int alike = device_flops(a, 0) == device_flops(b, 0) && device_flops(a, 1) == device_flops(b, 1);
    for (int c = 0; c < MEM_CATEGORIES; c++) alike &= a->arenas[c].peak == b->arenas[c].peak;
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES; i++)
        alike &= traffic_equal(a_comm->traffic_started[i / COLLECTIVES][i % COLLECTIVES],
                               b_comm->traffic_started[i / COLLECTIVES][i % COLLECTIVES]);
    return alike;
}

static const RankClass *plan_largest(const Plan *p) {
    const RankClass *largest = p->classes;
    for (int c = 1; c < p->count; c++)
        if (device_peak(p->classes[c].dry_run) > device_peak(largest->dry_run)) largest = &p->classes[c];
    return largest;
}

/* "0-3, 8-11, …": the numbers below n that are set, `most` runs of them. */
static void runs_print(FILE *f, const char *set, int n, int most) {
    int runs = 0;
    for (int i = 0, end; i < n; i = end + 1) {
        for (end = i; end < n && set[end]; end++) {}
        if (end == i) continue;
        if (runs++ == most) {
            fprintf(f, ", …");
            return;
        }
        fprintf(f, end - i > 1 ? "%s%d-%d" : "%s%d", runs > 1 ? ", " : "", i, end - 1);
    }
}

/* "pp 1-14, tp 0: ranks 128, 136, 144, … (1792)" */
static void class_print(FILE *f, const Plan *p, int class_index) {
    const Mesh *m = p->mesh;
    int pp = m->size[AXIS_PP], tp = m->size[AXIS_TP], stages = 0, parts = 0, ranks = 0;
    char *of_stage = (char *)checked_malloc((size_t)pp), *of_part = (char *)checked_malloc((size_t)tp),
         *of_rank = (char *)checked_malloc((size_t)m->world);
    for (int r = 0; r < m->world; r++)
        if (p->class_of[r] == class_index)
            of_rank[r] = of_stage[mesh_coordinate(m, r, AXIS_PP)] = of_part[mesh_coordinate(m, r, AXIS_TP)] = 1,
            ranks++;
    for (int i = 0; i < pp; i++) stages += of_stage[i];
    for (int i = 0; i < tp; i++) parts += of_part[i];
    int told = ranks == m->world / (pp * tp) * stages * parts &&
               (stages < pp || parts < tp); // all of those parts of all of those stages
    if (told && stages < pp) fprintf(f, "pp "), runs_print(f, of_stage, pp, pp);
    if (told && parts < tp) fprintf(f, stages < pp ? ", tp " : "tp "), runs_print(f, of_part, tp, tp);
    fprintf(f, ranks > 1 ? "%sranks " : "%srank ", told ? ": " : "");
    runs_print(f, of_rank, m->world, 4);
    if (ranks > 1) fprintf(f, " (%d)", ranks);
    fprintf(f, "\n");
    free(of_stage), free(of_part), free(of_rank);
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
    fprintf(f, "],\"peak_when\":\"%s\",\"in_files\":%zu,\"memory\":{", c->dry_run->peak_when,
            device_arenas(c->dry_run, 1));
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "%s\"%s\":%zu", i ? "," : "", mem_category_names[i], c->dry_run->arenas[i].peak);
    fprintf(f, "},\"peak\":%zu,", device_peak(c->dry_run));
    flops_json(f, c->dry_run);
    fprintf(f, ",");
    traffic_json(f, c->law, c->comm->traffic_started, NULL);
    fprintf(f, "}");
}

static void class_table(FILE *f, const RankClass *c, int with_buffers) {
    const Device *dry_run = c->dry_run;
    if (with_buffers) fprintf(f, "  memory of a rank by buffer (bytes; of buffers that share a name, the largest)\n");
    for (int i = 0; i < dry_run->num_buffers && with_buffers; i++)
        fprintf(f, "    %-12s %-32s %6d x %16zu\n", mem_category_names[dry_run->buffers[i].category],
                dry_run->buffers[i].name, dry_run->buffers[i].count, dry_run->buffers[i].bytes);
    fprintf(f, "  memory of a rank by category\n");
    for (int i = 0; i < MEM_CATEGORIES; i++)
        fprintf(f, "    %-45s %22zu%s\n", mem_category_names[i], dry_run->arenas[i].peak,
                dry_run->arenas[i].slow ? "  " SLOW_TIER : "");
    fprintf(f, "    %-45s %22zu  (%.2f GB), first in %s\n", "in all", device_peak(dry_run),
            (double)device_peak(dry_run) / 1e9, dry_run->peak_when);
    if (device_arenas(dry_run, 1))
        fprintf(f, "    %-45s %22zu  (%.2f GB)\n", "in files", device_arenas(dry_run, 1),
                (double)device_arenas(dry_run, 1) / 1e9);
    fprintf(f,
            "  arithmetic of a rank and step: %.6g FLOP (a product of M x N x K counts 2MNK, attention what the mask "
            "lets through)\n",
            device_flops(dry_run, 0));
    if (device_flops(dry_run, 1) > 0)
        fprintf(f, "  and of activations computed again: %.6g FLOP\n", device_flops(dry_run, 1));
    fprintf(f, "  exchanges of a rank and step%31s %20s\n", "law", "walk");
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES; o++)
            if (c->law[a][o].calls || c->comm->traffic_started[a][o].calls)
                fprintf(f, "    %-13s %-15s %4" PRId64 " calls %14" PRId64 " %20" PRId64 " bytes\n", axis_names[a],
                        collective_names[o], c->comm->traffic_started[a][o].calls, c->law[a][o].bytes,
                        c->comm->traffic_started[a][o].bytes);
}

/* A class under the other; buffers of the one that needs the most memory. */
static void plan_print(FILE *f, const char *model, int threads, const TensorTable *t, const Plan *p,
                       const char *strategy, int64_t tokens_per_step) {
    const Mesh *m = p->mesh;
    fprintf(f,
            "%s: %.1f M parameters, %s, %d rank%s x %d thread%s: %s over %d, %d replica%s, %" PRId64 " tokens a step; ",
            model, (double)t->num_parameters / 1e6, PRECISION_NAME, m->world, m->world > 1 ? "s" : "", threads,
            threads > 1 ? "s" : "", strategy, mesh_group_size(m, AXIS_FSDP), m->size[AXIS_DP_REPLICATE],
            m->size[AXIS_DP_REPLICATE] > 1 ? "s" : "", tokens_per_step);
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
static double matmul_rate(Device *dev) {
    const int N = RATE_ROWS, C = RATE_COLS, times = 4;
    OpStat ops[OP_COUNT];
    double clock = dev->clock;
    int64_t events = dev->num_events;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    device_phase(dev, "measuring the product rate", NULL);
    memcpy(ops, dev->ops, sizeof ops);
    floatX *x = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C)),
           *w = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(C * C));
    floatX *y = (floatX *)scratch(dev, "product rate", sizeof(floatX) * (size_t)(N * C));
    double best = 1e30;
    int most = dev->dry_run ? 0 : (N > C ? N : C) * C;
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
