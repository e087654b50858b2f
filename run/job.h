/* job.h: what a run is asked to do, and everything that can be refused before its ranks start.
 *
 * Owns: the job, which all ranks of a process share and only read: options, model, mesh, data, weights to start from. A
 * caller may rely on: behind job_prepare options fit each other, the model, the mesh and the files; an error says what
 * was given, what was expected and what to do.
 */
#ifndef JOB_H
#define JOB_H
#include "options.h"
#include "../tokenizer.h"
#include "checkpoint.h"
#include "export.h"
#include "trace.h"
#include "plan.h"
#include "../plan/cluster.h"
#include "logger.h"

typedef enum { DO_TRAIN, DO_EVAL, DO_GENERATE, DO_EXPORT, DO_PLAN } Task;

typedef struct {
    Options opt;
    Task task;
    Llama3Config config;
    TensorTable table;
    Mesh mesh;
    Dataset data, val; // num_files 0: none
    StFiles weights, adapters;
    BaseKind stored_base;                              // which of the model's files' weights are in 8 bits
    uint64_t base_fingerprint;                         // fingerprint of the model that adapters stand beside
    Checkpoint resume_from;                            // dir "": the run begins
    int out_lock;                                      // of --out
    int has_weights, threads_per_rank, cores_per_rank; // threads and cores of a rank
    int local_rank, local_ranks;                       // of this process among those of its host; ranks of this host
    double available_memory;                           // bytes that ranks find, before the first takes any
    char tokenizer_path[4096];                         // "": none found
    Tokenizer *tokenizer;
    int32_t *prompt; // ids
    size_t prompt_length;
    const Transport *transport,
        *host_transport; // of what devices exchange, of what hosts do; another one with nccl alone
    ThreadWorld thread_world;
    Cluster cluster; // --plan --cluster
} Job;

/* --tokenizer, else tokenizer.model beside the data, else beside the model; "" when there is none. */
static void job_find_tokenizer(Job *j) {
    const Options *o = &j->opt;
    const char *beside = o->data ? o->data : o->eval;
    if (o->tokenizer) {
        snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%s", o->tokenizer);
        return;
    }
    if (beside) {
        const char *slash = strrchr(beside, '/');
        snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%.*stokenizer.model",
                 slash ? (int)(slash + 1 - beside) : 0, beside);
        if (!access(j->tokenizer_path, R_OK)) return;
    }
    snprintf(j->tokenizer_path, sizeof j->tokenizer_path, "%s/tokenizer.model", o->model);
    if (access(j->tokenizer_path, R_OK)) j->tokenizer_path[0] = 0;
}

static void check_tokenizer_of(const Job *j, const Dataset *d) {
    uint8_t print[32];
    if (!j->tokenizer_path[0] || !d->num_files) return;
    sha256_of_file(j->tokenizer_path, print);
    for (int i = 0; i < d->num_files; i++)
        if (memcmp(print, d->files[i].header.tokenizer, 32))
            user_error("%s was made with another tokenizer than %s: give the right one with --tokenizer, or make the "
                       "token file again",
                       d->files[i].path, j->tokenizer_path);
}

/* Cores a rank: this host's divided by its ranks. A launcher that binds has divided already. */
static int job_cores(int sharing) {
    cpu_set_t allowed;
    int cores =
        sched_getaffinity(0, sizeof allowed, &allowed) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&allowed);
    return (int)max_i64(1, cores / sharing);
}

/* Reads the tokenizer, without which `what` cannot be done. */
static void job_read_tokenizer(Job *j, const char *what) {
    if (!j->tokenizer_path[0])
        user_error("%s needs a tokenizer: none beside %s, give one with --tokenizer", what,
                   j->opt.data   ? j->opt.data
                   : j->opt.eval ? j->opt.eval
                                 : j->opt.model);
    j->tokenizer = tokenizer_open(j->tokenizer_path);
    if (j->tokenizer->vocab_size > j->config.V)
        user_error("%s has %d tokens, the model %d: they do not belong together", j->tokenizer_path,
                   j->tokenizer->vocab_size, j->config.V);
}

/* Encodes the prompt; generation computes one sequence of its length, then token after token. */
static void job_prompt(Job *j) {
    Options *o = &j->opt;
    size_t capacity = 0;
    job_read_tokenizer(j, "--generate");
    Tokenizer *t = j->tokenizer;
    j->prompt_length = tokenizer_encode(t, o->generate, strlen(o->generate), &j->prompt, &capacity, 0);
    if (!j->prompt_length) { // nothing to go on: a document begins
        free(j->prompt);
        j->prompt = (int32_t *)checked_malloc(sizeof(int32_t));
        j->prompt[j->prompt_length++] = t->eos;
    }
    o->batch = 1, o->seq = (int)j->prompt_length;
    if (o->seq + o->max_tokens > j->config.max_positions)
        user_error("the prompt's %d tokens and --max-tokens %d are more than the model's %d positions", o->seq,
                   o->max_tokens, j->config.max_positions);
}

/* What is to be done. One thing at a time: an option that would do nothing is refused. */
static Task job_task(const Options *o) {
    Task task = o->plan                     ? DO_PLAN
                : o->eval                   ? DO_EVAL
                : o->generate               ? DO_GENERATE
                : o->export_dir && !o->data ? DO_EXPORT
                                            : DO_TRAIN;
    const char *name = o->plan ? "plan" : o->eval ? "eval" : "generate";
    int alone = task == DO_PLAN || task == DO_EVAL || task == DO_GENERATE;
    if (alone && !!o->plan + !!o->eval + !!o->generate + !!o->export_dir > 1)
        user_error("--%s is done alone: leave the others of --plan, --eval, --generate, --export out", name);
    if (o->out && task != DO_TRAIN && task != DO_PLAN)
        user_error("--out %s: only training and --plan write there; leave it out", o->out);
    if (o->doc_mask && task == DO_GENERATE)
        user_error("--doc-mask keeps documents apart, and a prompt is one document: leave it out");
    if (o->doc_mask && task == DO_EXPORT)
        user_error("--doc-mask is about training and evaluation, and this is neither: leave it out");
    if (o->resume && task != DO_TRAIN)
        user_error(
            "--resume %s goes on with training, and this is none: leave it out (a checkpoint is a --model DIR too)",
            o->resume);
    if (o->cluster && !o->plan)
        user_error("--cluster %s belongs to --plan, which estimates a step's time by it: add --plan, or leave it out",
                   o->cluster);
    if (o->search && !o->cluster)
        user_error("--search compares what --plan estimates by a cluster: add --plan --cluster FILE (dev/clusters has "
                   "some), or leave it out");
    if (o->search && (o->out || o->trace))
        user_error("--search prints a list, and --%s is of one layout: leave one of them out",
                   o->out ? "out" : "trace");
    if (o->trace && task != DO_TRAIN && !o->cluster)
        user_error("--trace %s: training has a timeline, and --plan with --cluster; leave it out", o->trace);
    return task;
}

/* A plan may be of any size, but its figures are 64-bit integers: the tokens of a step, and the bytes that a rank
 * receives, each unit gathered twice and reduced once a micro-batch. */
static void job_check_figures(const Job *j, int world) {
    const Options *o = &j->opt;
    double elements = 0, tokens = (double)mesh_data_ranks(&j->mesh) * o->batch * o->seq * o->accum;
    for (int u = 0; u < j->table.num_units; u++)
        elements += (double)j->table.units[u].size + (double)TENSOR_ALIGN * world;
    double bytes = 3.0 * sizeof(float) * elements * o->accum;
    if (tokens > 0x1p62 || bytes > 0x1p62)
        user_error("a step of %.3g tokens, in which a rank receives up to %.3g bytes, is more than can be counted: use "
                   "fewer ranks, a smaller --accum, --batch or --seq, or a smaller model",
                   tokens, bytes);
}

/* Which of this host's GPUs a rank has: with nccl each its own; else all share the first, also where there are more. */
static int job_gpu_of_rank(const Job *j, int rank) {
    return j->transport == j->host_transport
               ? 0
               : device_of(j->host_transport == &transport_threads ? rank : j->local_rank);
}

/* "1, 2, 4": the numbers that divide both, for people. */
static void divisors_of(char *text, size_t size, int a, int b) {
    size_t used = 0;
    text[0] = 0;
    for (int n = 1; n <= a && n <= b && used + 12 < size; n++)
        if (a % n == 0 && b % n == 0) used += (size_t)snprintf(text + used, size - used, "%s%d", used ? ", " : "", n);
}

/* What the options of a pipeline mean together. Its weights stay gathered through the step and its gradients are summed
 * locally, as for Llama 3 (paper, section 3.3.2): else each of its many micro-batches would gather and reduce all of
 * them. */
static void job_pipeline_options(Job *j) {
    Options *o = &j->opt;
    int interleaved = !strcmp(o->pp_schedule, "interleaved"), pp = j->mesh.size[AXIS_PP];
    static const char *const of_pipelines[] = {"pp-schedule", "pp-chunks", "pp-light-ends"};
    for (int i = 0; i < 3; i++)
        if (pp == 1 && option_given(o, of_pipelines[i]))
            user_error("--%s does nothing without --pp: add --pp N, or leave it out", of_pipelines[i]);
    if (!o->pp_chunks) o->pp_chunks = interleaved ? 2 : 1;
    if (interleaved != (o->pp_chunks > 1))
        user_error("--pp-schedule %s with --pp-chunks %d: one run of blocks a rank is 1f1b, several are interleaved",
                   o->pp_schedule, o->pp_chunks);
    if (pp > 1 && !option_given(o, "sharding")) o->sharding = "shard_grad_op";
    if (pp > 1 && !option_given(o, "accumulate")) o->accumulate = "local";
}

/* What a value of --base means; BASE_TRAINED: nothing in this build. */
static const char *const base_names[] = {NULL, PRECISION_NAME, "int8", "int8:all"};
static BaseKind base_kind(const char *base) {
    for (int k = BASE_FROZEN; k <= BASE_INT8_ALL; k++)
        if (!strcmp(base, base_names[k])) return (BaseKind)k;
    return BASE_TRAINED;
}

/* Options as the files under --adapters want them; given ones must be the same. */
static void adapters_options(Job *j) {
    static char names[64];
    Options *o = &j->opt;
    Llama3Config c = j->config;
    size_t used = 0;
    adapters_config_read(&c, o->adapters);
    for (int i = 0; i < LORA_TARGETS; i++)
        if (c.lora_targets >> i & 1)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? "," : "", lora_targets[i].name);
    if (option_given(o, "lora-rank") && o->lora_rank != c.lora_rank)
        user_error("--adapters %s have rank %d, not --lora-rank %d: leave that out", o->adapters, c.lora_rank,
                   o->lora_rank);
    if (option_given(o, "lora-alpha") && o->lora_alpha != c.lora_alpha)
        user_error("--adapters %s have alpha %g, not --lora-alpha %g: leave that out", o->adapters, c.lora_alpha,
                   o->lora_alpha);
    if (option_given(o, "lora-targets") && strcmp(o->lora_targets, names))
        user_error("--adapters %s are of %s, not of --lora-targets %s: leave that out", o->adapters, names,
                   o->lora_targets);
    o->lora_rank = c.lora_rank, o->lora_alpha = c.lora_alpha, o->lora_targets = names;
}

/* A checkpoint of adapters is gone on with as such, beside the model that they adapt; another one is not. */
static void job_resumes_adapters(const Job *j) {
    const Options *o = &j->opt;
    Llama3Config c = ZERO;
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", j->resume_from.dir);
    int adapters = !access(path, F_OK);
    c.C = 1 << 20;
    if (adapters) adapters_config_read(&c, j->resume_from.dir);
    if (adapters && !o->lora_rank)
        user_error("--resume %s: the checkpoint is of adapters (rank %d), and the model beside them, perhaps in 8 "
                   "bits, was not trained: go on with --lora-rank %d and the --base it had; to train all of a model, "
                   "begin with --model DIR and --export --merge",
                   j->resume_from.dir, c.lora_rank, c.lora_rank);
    if (!adapters && o->lora_rank)
        user_error(
            "--resume %s: the checkpoint is of a whole model: to train adapters beside it, begin with --model %s",
            j->resume_from.dir, j->resume_from.dir);
    if (adapters && !option_given(o, "model"))
        user_error("--resume %s: the checkpoint is of adapters: give the --model that they adapt", j->resume_from.dir);
    if (o->adapters)
        user_error("--adapters %s begins with those, --resume %s with the checkpoint's: leave one of them out",
                   o->adapters, o->resume);
}

/* A model whose files are in 8 bits is kept so, or widened to be exported. */
static void job_stored(Job *j) {
    Options *o = &j->opt;
    int trains = j->task == DO_TRAIN || j->task == DO_PLAN;
    j->stored_base = j->config.base;
    if (j->task == DO_EXPORT && !o->merge && j->stored_base > BASE_FROZEN && export_base(o) > BASE_FROZEN)
        user_error("--export --dtype %s: %s is in 8 bits already: copy it, or widen it with --dtype fp32 or bf16",
                   o->dtype, o->model);
    if (j->stored_base <= BASE_FROZEN || (j->task == DO_EXPORT && !o->adapters && !o->base)) return;
    if (o->base && base_kind(o->base) != j->stored_base)
        user_error("--base %s: the files of --model %s are in 8 bits, as --base %s keeps them: leave --base out, or "
                   "give the model that they were made of",
                   o->base, o->model, base_names[j->stored_base]);
    if (trains && !o->lora_rank && !o->adapters)
        user_error("--model %s is in 8 bits, and there are no adapters: 8-bit weights are integers: a gradient step on "
                   "them is lost to rounding; add --lora-rank 16, or give the model that they were made of",
                   o->model);
    o->base = base_names[j->stored_base];
}

/* What of the model is trained, and how the rest is kept. */
static void job_adapters(Job *j) {
    Options *o = &j->opt;
    Llama3Config *c = &j->config;
    int trains = j->task == DO_TRAIN || j->task == DO_PLAN;
    job_stored(j);
    if (!o->base) o->base = PRECISION_NAME;
    c->base = base_kind(o->base);
    if (c->base == BASE_TRAINED)
        user_error("--base %s: this build computes in " PRECISION_NAME
                   ", and keeps a model so, or in 8 bits: use --base " PRECISION_NAME ", or make PRECISION=%s",
                   o->base, o->base);
    if (trains && !o->lora_rank && !o->adapters && c->base != BASE_FROZEN)
        user_error("--base %s without adapters: 8-bit weights are integers: a gradient step on them is lost to "
                   "rounding; add --lora-rank 16, or use --base " PRECISION_NAME,
                   o->base);
    if (o->adapters) adapters_options(j);
    if (!o->lora_rank && c->base == BASE_FROZEN) c->base = BASE_TRAINED; // the model itself is
    if (o->merge && !o->lora_rank)
        user_error("--merge adds adapters to the model, and there are none: add --adapters DIR, or leave it out");
    if (j->task == DO_EXPORT && o->lora_rank && !o->merge)
        user_error("--export of --adapters alone would copy them: add --merge, or leave it out");
    if (j->task == DO_EXPORT && c->base > BASE_FROZEN && !o->lora_rank) {
        if (j->stored_base > BASE_FROZEN)
            user_error("--export --base %s: %s is in 8 bits, and --export widens it: leave --base out", o->base,
                       o->model);
        if (export_base(o) > BASE_FROZEN)
            user_error("--export --base %s --dtype %s: --dtype alone says what is written: leave --base out", o->base,
                       o->dtype);
        user_error("--export --base %s would write weights that are rounded to 8 bits in full precision: leave --base "
                   "out, or give --dtype %s to write those 8 bits",
                   o->base, o->base);
    }
    if (o->lora_rank && o->export_dir && !o->merge && export_base(o) > BASE_FROZEN)
        user_error(
            "--export --dtype %s: adapters are trained, and kept in fp32 or bf16: leave --dtype out, or add --merge",
            o->dtype);
    if (!o->lora_rank) return;
    if (!trains && !o->adapters)
        user_error("--lora-rank %d makes adapters to be trained, and this is no training: leave it out", o->lora_rank);
    if (o->lora_rank > c->C)
        user_error("--lora-rank %d is more than the width of %s, %d: adapters are thin; 8 to 64 is usual", o->lora_rank,
                   o->model, c->C);
    if (o->lora_alpha == 0) o->lora_alpha = 2.0 * o->lora_rank;
    c->lora_rank = o->lora_rank, c->lora_alpha = o->lora_alpha;
    for (const char *at = o->lora_targets; *at; at += strcspn(at, ","), at += *at == ',') {
        int n = (int)strcspn(at, ","), known = 0;
        while (known < LORA_TARGETS &&
               ((int)strlen(lora_targets[known].name) != n || strncmp(at, lora_targets[known].name, (size_t)n)))
            known++;
        if (known == LORA_TARGETS)
            user_error("--lora-targets %s: a block has no matrix \"%.*s\": expected some of q,k,v,o,gate,up,down",
                       o->lora_targets, n, at);
        c->lora_targets |= 1u << known;
    }
}

/* Blocks of 8 bits are those of the whole matrix, whoever has which part of it: the first of tp's cuts that would go
 * through one; NULL: none does. */
static const TensorRow *cut_block(const Llama3Config *c, int tp) {
    for (int k = 0; k < W_KINDS; k++) {
        const TensorRow *row = &llama3_tensors[k];
        int64_t rows = dim_size(c, row->rows), cols = dim_size(c, row->cols);
        for (int i = 1; i < tp && is_quantized(c->base, row) && row->split != SPLIT_NONE; i++)
            if (row->split == SPLIT_ROWS ? split_begin(rows, tp, i) * cols % INT8_BLOCK
                                         : split_begin(cols, tp, i) % INT8_BLOCK || cols % INT8_BLOCK)
                return row;
    }
    return NULL;
}

/* Does the model divide as the mesh wants it? 0: no, and `problem` (size) says why, and what would. */
static int job_layout_fits(const Job *j, char *problem, size_t size) {
#define REFUSE(...) return snprintf(problem, size, __VA_ARGS__), 0
    const Options *o = &j->opt;
    const Llama3Config *c = &j->config;
    int tp = j->mesh.size[AXIS_TP], cp = j->mesh.size[AXIS_CP], pp = j->mesh.size[AXIS_PP],
        most = (int)min_i64(c->V, c->F);
    char fits[256], shorter[32] = "";
    divisors_of(fits, sizeof fits, c->NH, c->NKV);
    if (c->NH % tp || c->NKV % tp)
        REFUSE("--tp %d does not divide %s's %d query and %d key/value heads, of which each rank has its part: use "
               "--tp %s",
               tp, o->model, c->NH, c->NKV, fits);
    const TensorRow *cut = cut_block(c, tp);
    if (cut)
        REFUSE("--tp %d would cut %s in the middle of a block of %d weights of 8 bits: use a smaller --tp, or %s", tp,
               strchr(cut->name, '%') ? strchr(cut->name, '%') + 3 : cut->name, INT8_BLOCK,
               j->stored_base > BASE_FROZEN ? "widen the model with --export and --dtype fp32 or bf16"
                                            : "--base " PRECISION_NAME); // "self_attn.o_proj.weight"
    if (tp > most) REFUSE("--tp %d is more than %s has to split: %d; use a smaller one", tp, o->model, most);
    divisors_of(fits, sizeof fits, o->seq / 2, o->seq / 2);
    if (o->seq > 2 * cp) snprintf(shorter, sizeof shorter, "--seq %d or ", o->seq / (2 * cp) * 2 * cp);
    if (cp > 1 && o->seq % (2 * cp))
        REFUSE(
            "--cp %d splits a sequence into %d equal chunks, which do not make up --seq %d: use %s--seq %d, or --cp %s",
            cp, 2 * cp, o->seq, shorter, (o->seq / (2 * cp) + 1) * 2 * cp, fits);
    if (j->task == DO_GENERATE && tp * cp * pp > 1)
        REFUSE("--generate computes one token at a time on every rank: leave --tp, --cp and --pp out; FSDP shards the "
               "model over the ranks");
    int stages = pp * o->pp_chunks, runs = c->L + (o->pp_light_ends ? 2 : 0);
    if (stages > runs)
        REFUSE("--pp %d x --pp-chunks %d = %d runs of blocks%s, and %s has %d blocks: use at most %d runs", pp,
               o->pp_chunks, stages, o->pp_light_ends ? ", the first and the last one a block shorter" : "", o->model,
               c->L, runs);
    if (o->pp_chunks > 1 && pp > 1 && o->accum % pp)
        REFUSE("--pp-schedule interleaved has --pp %d micro-batches in each run of blocks at a time, and --accum %d is "
               "no multiple of it: use --accum %d or %d",
               pp, o->accum, (int)max_i64(1, o->accum / pp) * pp, (o->accum / pp + 1) * pp);
    return 1;
#undef REFUSE
}

/* Everything that can be refused is refused here, before ranks start. */
static void job_prepare(Job *j, int world, int local_ranks, int sharing) {
    static const struct {
        const char *option, *other;
    } needs[] = {{"val-every", "val"},        {"val-batches", "val"},      {"dtype", "export"},
                 {"save-every", "out"},       {"save-mode", "out"},        {"keep", "out"},
                 {"allow-changes", "resume"}, {"temperature", "generate"}, {"top-p", "generate"},
                 {"max-tokens", "generate"},  {"lora-alpha", "lora-rank"}, {"lora-targets", "lora-rank"},
                 {"merge", "export"}};
    Options *o = &j->opt;
    j->task = job_task(o);
    if (SLOW_TIER_COMPUTES && strcmp(o->offload, "none") && j->task == DO_TRAIN && !o->out)
        user_error("--offload %s keeps state in files under --out: give --out DIR, on a disk with room for it",
                   o->offload);
    if ((strcmp(o->offload, "none") || strcmp(o->recompute, "none")) && j->task != DO_TRAIN && j->task != DO_PLAN)
        user_error("--%s is about training, and this is none: leave it out",
                   strcmp(o->offload, "none") ? "offload" : "recompute");
    for (int i = 0; i < (int)(sizeof needs / sizeof *needs); i++)
        if (option_given(o, needs[i].option) && !option_given(o, needs[i].other))
            user_error("--%s does nothing without --%s: add that, or leave it out", needs[i].option, needs[i].other);
    if (j->transport != j->host_transport && !strcmp(o->offload, "all") &&
        (o->dp_replicate != 1 || !strcmp(o->sharding, "no_shard") || (!strcmp(o->accumulate, "local") && o->accum > 1)))
        user_error("--offload all keeps gradients in the host's memory, where NCCL cannot sum them over replicas, for "
                   "no_shard or once a step: use --offload optimizer, or full_shard or shard_grad_op without "
                   "--dp-replicate and --accumulate local");
    int gpus = j->transport != j->host_transport ? device_count() : INT32_MAX;
    if (local_ranks > gpus &&
        (gpus > 1 || j->host_transport == &transport_threads)) // else a launcher may show each rank its own alone
        user_error("%d ranks on a host that has %d GPU%s, and NCCL wants one for each: start as many ranks on a host "
                   "as it has GPUs, or share one with --ranks N --transport threads",
                   local_ranks, gpus, gpus > 1 ? "s" : "");
    if (o->resume && !strcmp(o->resume, "auto") && !o->out)
        user_error("--resume auto looks for checkpoints in --out: add --out DIR, or say which one to resume");
    if (o->resume) checkpoint_find(j->resume_from.dir, o);
    if (o->resume && j->resume_from.dir[0]) job_resumes_adapters(j);
    if (o->resume && j->resume_from.dir[0] && !option_given(o, "model")) o->model = j->resume_from.dir;
    j->config = config_load(o->model);
    if (j->task != DO_PLAN) ops_require_head_size(j->config.HD), j->available_memory = device_memory(job_gpu_of_rank(j, 0));
    if (o->vocab_size) j->config.V = o->vocab_size;
    job_adapters(j);
    if (!o->seq) o->seq = j->config.T;
    if (!o->batch) o->batch = j->config.B;
    if (o->seq > j->config.max_positions)
        user_error("--seq %d is longer than the %d positions that %s is made for", o->seq, j->config.max_positions,
                   o->model);
    if ((int64_t)o->batch * o->seq > 1 << 30)
        user_error("--batch %d x --seq %d = %" PRId64
                   " tokens a micro-batch, expected at most %d: use a smaller --batch, and --accum",
                   o->batch, o->seq, (int64_t)o->batch * o->seq, 1 << 30);
    const int asked[MESH_AXES] = {o->tp, o->cp, o->pp, o->dp_shard, o->dp_replicate};
    j->mesh = mesh_open(world, asked, j->task == DO_PLAN);
    job_pipeline_options(j);
    char problem[1024];
    if (!job_layout_fits(j, problem, sizeof problem)) user_error("%s", problem);
    j->local_ranks = local_ranks;
    j->cores_per_rank = job_cores(sharing);
    j->threads_per_rank = o->threads ? o->threads : j->cores_per_rank;
    table_open(&j->table, &j->config, number_after_colon(o->wrap, "size"), &WHOLE_MODEL);
    job_check_figures(j, world);
    if (o->cluster) cluster_open(&j->cluster, o->cluster, &j->mesh, o->threads, o->transport);
    if (j->task == DO_PLAN) return;
    if (j->task == DO_TRAIN && !o->data)
        user_error(
            "--data is missing: token files to train on (make demo shows the way, --help lists what else there is)");
    j->has_weights = !preset_find(o->model) && (!j->resume_from.dir[0] || o->lora_rank) &&
                     model_weights_open(&j->weights, o->model, &j->table, j->stored_base);
    if (!j->has_weights && j->stored_base > BASE_FROZEN)
        user_error("%s/config.json tells of weights in 8 bits, and there is no model.safetensors: copy all of it",
                   o->model);
    if (o->adapters) adapters_open(&j->adapters, o->adapters, &j->table);
    if (o->lora_rank)
        j->base_fingerprint =
            j->has_weights ? model_fingerprint(&j->weights, &j->table, j->config.base) : mix64((uint64_t)o->seed);
    if (!j->has_weights && j->task != DO_TRAIN)
        user_error(
            "%s has no weights: --%s needs --model DIR with a model.safetensors (train with --export DIR to make one)",
            o->model,
            j->task == DO_EVAL       ? "eval"
            : j->task == DO_GENERATE ? "generate"
                                     : "export");
    job_find_tokenizer(j);
    if (j->task == DO_TRAIN) {
        j->data = dataset_open(o->data, o->seq, j->config.V, 0);
        int64_t per_step = samples_per_step(o, &j->mesh);
        if (!strcmp(o->tail, "drop") && j->data.windows < per_step)
            user_error("%s holds %" PRId64
                       " samples of --seq %d, one step takes %d data ranks x batch %d x accum %d = %" PRId64
                       ": use less of these, more text, or --tail pad",
                       o->data, j->data.windows, o->seq, mesh_data_ranks(&j->mesh), o->batch, o->accum, per_step);
        check_tokenizer_of(j, &j->data);
        if (j->resume_from.dir[0])
            checkpoint_open(&j->resume_from, o, &j->mesh, j->data.fingerprint, j->base_fingerprint, &j->config,
                            &j->table);
    }
    if (o->eval || (o->val && j->task == DO_TRAIN))
        j->val = dataset_open(o->eval ? o->eval : o->val, o->seq, j->config.V, 1);
    check_tokenizer_of(j, &j->val);
    if (o->doc_mask)
        job_read_tokenizer(j, "--doc-mask, which parts documents where a token ends them,"),
            j->data.document_end = j->val.document_end = j->tokenizer->eos;
    if (j->task == DO_GENERATE) job_prompt(j);
}

/* What may leave a trace on disk, checked last, by rank 0. */
static void job_check_outputs(Job *j) {
    if (j->opt.out)
        j->out_lock = out_directory_open(j->opt.out, j->resume_from.dir, j->resume_from.progress.step, !!j->opt.resume,
                                         j->opt.keep);
    if (j->opt.trace) trace_check(j->opt.trace);
    if (j->opt.export_dir && (j->task == DO_TRAIN || j->task == DO_EXPORT))
        export_check(j->opt.export_dir, &j->table, &j->opt);
}

/* The transports and the number of ranks, from how the program was started. Returns the world's size. */
static int choose_transport(Job *j, int processes) {
    Options *o = &j->opt;
    const char *asked = o->transport;
    int mpi = launched_by_mpi() && !(asked && !strcmp(asked, "threads"));
    if (o->plan && CUDA_BUILD && !asked && !o->ranks) o->transport = "nccl"; // as it would be started
    if (o->plan) return o->world ? o->world : o->ranks ? o->ranks : processes;
    if (o->world) user_error("--world belongs to --plan; ranks are started with mpirun -np N, or with --ranks N");
    if (asked && !strcmp(asked, "mpi") && !mpi)
        user_error("--transport mpi: start with mpirun -np N ./train_llama3 …, or srun");
    if (!mpi && processes > 1)
        user_error(
            "--transport threads runs all ranks in one process, but %d were started: use --ranks N without mpirun",
            processes);
    if (mpi && o->ranks && o->ranks != processes)
        user_error("--ranks %d, but mpirun started %d: leave --ranks out%s", o->ranks, processes,
                   processes == 1 ? ", or add --transport threads to have them in this process" : "");
    if (CUDA_BUILD && asked && !strcmp(asked, "mpi"))
        user_error("--transport mpi moves what hosts hold, and these ranks compute on GPUs: leave it out, or use "
                   "./train_llama3");
    if (!CUDA_BUILD && asked && !strcmp(asked, "nccl"))
        user_error("--transport nccl moves what GPUs hold, and these ranks compute on processors: leave it out, or use "
                   "./train_llama3_cuda");
    if (CUDA_BUILD && mpi && processes > 1 && !asked) o->transport = "nccl";
    j->host_transport = mpi ? transport_find("mpi") : &transport_threads;
    j->transport = o->transport ? transport_find(o->transport) : j->host_transport;
    if (j->transport != j->host_transport)
        setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1",
               0); // several communicators a GPU, whose kernels would else wait for each other crosswise
    if (!j->transport)
        user_error("--transport %s: this build has no NCCL: install it beside the CUDA toolkit and build again, or "
                   "share one GPU with --ranks N --transport threads",
                   o->transport);
    return mpi ? processes : o->ranks ? o->ranks : 1;
}

static void job_open(Job *j, const Started *s) {
    int world = choose_transport(j, s->world), threads = j->host_transport == &transport_threads ? world
                                                         : j->opt.plan && j->opt.ranks           ? j->opt.ranks
                                                                                                 : 0;
    j->local_rank = s->local;
    job_prepare(j, world, threads ? threads : s->on_host, threads ? threads : s->on_cores);
    pthread_mutex_init(&j->thread_world.lock, NULL);
}

static void job_close(Job *j) {
    if (j->data.num_files) dataset_close(&j->data);
    if (j->val.num_files) dataset_close(&j->val);
    if (j->has_weights) st_close(&j->weights);
    st_close(&j->adapters);
    if (j->resume_from.dir[0]) checkpoint_close(&j->resume_from);
    if (j->out_lock > 0) close(j->out_lock);
    if (j->tokenizer) tokenizer_close(j->tokenizer);
    thread_world_close(&j->thread_world);
    table_close(&j->table);
    free(j->prompt);
    free(j->cluster.ops);
}

#endif
