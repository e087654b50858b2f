/* job.h: what a run is asked to do. job_open refuses every input that can be refused before ranks start.
 *
 * The ranks of a process share one Job and only read it: options, configuration, mesh, data, and the weights to start
 * from. A caller may rely on: after job_open, options fit each other, the model, the mesh, the files and the host. Each
 * error names what was given, what was expected and what to do. Ranks check the rest: whether the outputs can be
 * written (job_check_outputs), memory suffices (run/checks/plan.h), and all ranks were started alike (agreement.h). */
#ifndef JOB_H
#define JOB_H
#include "options.h"
#include "tokenizer_copies.h" // defines: TokenizerCopies, FoundTokenizer, found_tokenizer_check
#include "../checkpoint/checkpoint.h"
#include "config_json.h"
#include "../watch/trace.h"
#include "../checks/mfu.h"
#include "recipe.h"                   // defines: Recipe, recipe_count_used, recipe_check_epochs
#include "../../lib/comm/comm_open.h" // defines: LaunchInfo, Transport, ThreadWorld, transport_find, launched_by_mpi

struct Job;
struct Trainer;
struct CheckpointWriter;

/* What a program opens the model for. */
typedef struct {
    const char *program;           // its name, for messages
    int trains;                    // the job has gradients, an optimizer and data
    int plans;                     // training steps are only dry-run; the planned machines may be elsewhere
    int measures_hosts;            // check_hosts: the model is never computed
    const char *program_file;      // which must be the same on all hosts; NULL: this program's own
    int converts;                  // convert_llama3: weights are read and written, the model is never computed
    int computes_tokens;           // generate_llama3: tokens are computed one by one, with a key/value cache
    int cached_positions;          // positions of the key/value cache
    int softmax_statistics;        // eval_llama3 reads softmax statistics of the logits, not only losses
    int merges_adapters;           // the written weights include the adapters' update
    uint64_t input_hash;           // of the input file, which must be the same on all hosts; 0: there is none
    const char *input_option;      // the option that names the input file
    void (*prepare)(struct Job *); // reads the program's input, and may set --seq, --batch and the fields above
    void (*files)(struct CheckpointWriter *, const struct Job *); // lays out the files that it writes; NULL: none
    void (*dry_run)(struct Trainer *);                            // what the dry run of a rank computes; NULL: nothing
    void (*work)(struct Trainer *);                               // what a rank does, if it does not train
} Purpose;

typedef struct Job {
    const Options *options; // the command line
    RunSettings run;        // what this period uses
    Purpose purpose;
    Recipe recipe;
    const RecipePeriod *period;
    struct Job *previous_period, *next_period; // the run's periods around this one; NULL: none
    char *problem;                             // why a period that is planned does not fit the layout; NULL: it fits
    Progress start;                            // where the period begins, or the run resumes in it
    Llama3Config config;                       // of this period
    TensorTable table;                         // all tensors of the model
    Mesh mesh;
    Dataset data, val; // num_files 0: none
    StFiles weights, adapters;
    char *base_model;                     // of adapters: its path or name
    double dropout;                       // that PEFT trained the loaded adapters with
    BaseKind stored_base;                 // which weights of the model's files are int8
    uint64_t base_fingerprint;            // identifies the frozen model that adapters are trained for
    Checkpoint resume_from;               // dir "": a new run, or a later period of a run
    int out_lock;                         // descriptor of the lock on --out
    int has_weights;                      // there are files of weights to start from
    int threads_of_environment;           // OMP_NUM_THREADS; 0: not set, or --threads is given
    int threads_per_rank, cores_per_rank; // compute threads; cores of this host for each of its ranks
    int local_rank, local_ranks;          // this process among those of its host; ranks on this host
    double available_memory;              // bytes free on a rank's device before any rank allocates
    double total_memory;                  // bytes of that device
    double datasheet_rate;                // bf16 FLOP/s of all GPUs of the run, by the datasheet; 0: not known
    FoundTokenizer tokenizer;             // next to the data or the model
    TokenizerCopies tokenizer_files;      // of checkpoints
    const Transport *transport;           // between the ranks' devices
    const Transport *host_transport;      // between host memories; differs from `transport` only with NCCL
    ThreadWorld thread_world;             // ranks that are threads meet here
    int ended_early;                      // a signal ended training before its last step, and everything is saved
    const OpTimes *op_times;              // of the planned machines; NULL: dry runs take no time
} Job;

/* Does the run train, instead of planning a run? */
static int job_runs(const Job *j) { return j->purpose.trains && !j->purpose.plans; }
/* Do weights go from file to file, so that no rank holds the model? */
static int job_streams_weights(const Job *j) { return j->purpose.converts && !j->purpose.merges_adapters; }
static int64_t period_end_step(const Job *j) { return j->period->first_step + j->period->steps; }
/* Does the run enter this period at its first step, coming from an earlier period? */
static int begins_later_period(const Job *j) {
    return j->period > j->recipe.periods && j->start.step == j->period->first_step;
}
/* NCCL communicates only GPU memory, so with it host memory has another transport. */
static int uses_nccl(const Job *j) { return j->transport != j->host_transport; }
/* Does backward all-gather weights while it reduces gradients over the same ranks? Then each has a communicator. */
static int job_reductions_apart(const Job *j) {
    return j->purpose.trains && strategies[j->run.sharding].reshard == AFTER_FORWARD;
}

// ---------------------------------------------------------------------------
// what options mean for FSDP and for memory

static int asks_nccl(const RunSettings *run) { return run->transport == TRANSPORT_NCCL; }

/* Does the transport sum gradients while it reduces them? NCCL does, in an order of its own. */
static int transport_sums(const RunSettings *run) { return asks_nccl(run) && !run->deterministic; }

/* How the options shard the model. */
static Sharding sharding_of(const RunSettings *run) {
    Sharding s = ZERO;
    s.strategy = &strategies[run->sharding];
    s.slots = run->slots;
    s.micro_batches = run->accum;
    s.accumulate_locally = run->accumulate == ACCUMULATE_LOCALLY;
    s.deterministic = run->deterministic;
    s.writes_files = run->out != NULL;
    s.reduce_dtype = run->reduce_dtype == REDUCE_BF16 ? DTYPE_BF16 : DTYPE_F32;
    s.transport_sums = transport_sums(run);
    return s;
}

/* The categories of memory that are offloaded, as bits by MemCategory. */
static unsigned offloaded(const RunSettings *run) {
    unsigned optimizer = 1u << MEM_OPTIMIZER, all = optimizer | 1u << MEM_PARAMS | 1u << MEM_GRADS;
    if (run->offload == OFFLOAD_ALL) return all;
    return run->offload == OFFLOAD_OPTIMIZER ? optimizer : 0;
}

// ---------------------------------------------------------------------------
// options that have no effect

static void check_needed_options(const Options *o) {
    static const char *const needs[][2] = {
        // an option, and the one that it needs
        {"val-every", "val"}, {"val-batches", "val"},      {"save-every", "out"},       {"save-mode", "out"},
        {"keep", "out"},      {"allow-changes", "resume"}, {"lora-alpha", "lora-rank"}, {"lora-targets", "lora-rank"},
        {"after-save", "out"}};
    for (int i = 0; i < (int)(sizeof needs / sizeof *needs); i++) {
        const char *option = needs[i][0], *other = needs[i][1];
        if (option_changed(o, option) && !option_changed(o, other))
            user_error("--%s has no effect without --%s: add --%s, or remove --%s", option, other, other, option);
    }
}

static void check_offload(const Job *j) {
    const RunSettings *run = &j->run;
    if (OFFLOAD_IN_PLACE && run->offload != OFFLOAD_NONE && job_runs(j) && !run->out)
        user_error("--offload %s keeps state in files under --out: add --out DIR, on a disk with enough space",
                   run->offload == OFFLOAD_ALL ? "all" : "optimizer");
    int all_reduces = run->dp_replicate != 1 || run->sharding == NO_SHARD ||
                      (run->accumulate == ACCUMULATE_LOCALLY && run->accum > 1);
    if (uses_nccl(j) && run->offload == OFFLOAD_ALL && all_reduces)
        user_error("--offload all keeps gradients in host memory, where NCCL cannot all-reduce them: use --offload "
                   "optimizer, or --sharding full_shard or shard_grad_op without --dp-replicate and without "
                   "--accumulate local");
}

/* The GPU of a rank: with NCCL its own; otherwise all ranks share the first one. */
static int job_gpu_of_rank(const Job *j, int rank) {
    if (!uses_nccl(j)) return 0;
    return device_of(j->host_transport == &transport_threads ? rank : j->local_rank);
}

// ---------------------------------------------------------------------------
// data, and the tokenizer's files

/* Packed conversations need --doc-mask, or each would see those before it in its window. --doc-mask needs files that
 * say where their documents end, which those of version 1 do not. */
static void job_check_data(const Job *j, const Dataset *d) {
    for (const TokenFile *f = d->files; f < d->files + d->num_files; f++) {
        if (!j->run.doc_mask && f->header.flags >> TOKEN_FILE_WINDOW_SHIFT)
            user_error("%s has several conversations in a window, and without --doc-mask each would see those before "
                       "it: add --doc-mask",
                       f->path);
        if (j->run.doc_mask && f->header.version == 1 && d->document_end == NO_ID)
            user_error("--doc-mask: %s is a token file of version 1, which does not say where its documents end: bring "
                       "it to version 2 with tokens_llama3 --upgrade %s --tokenizer FILE",
                       f->path, f->path);
    }
}

/* The tokenizer of --tokenizer, the one next to the data or, failing that, the one next to the model. */
static void job_find_tokenizer(Job *j) {
    const RunSettings *run = &j->run;
    FoundTokenizer *f = &j->tokenizer;
    if (run->tokenizer) {
        found_tokenizer_add(f, run->tokenizer);
        if (!f->count) user_error("cannot read the tokenizer %s: %s", run->tokenizer, strerror(ENOENT));
        f->is_wanted[0] = 1;
        found_tokenizer_look(f, run->tokenizer); // for the other format
        return;
    }
    if (j->data.num_files) found_tokenizer_look(f, j->data.files[0].path);
    if (!f->count) found_tokenizer_look_beside_weights(f, run->adapters, run->model);
    else if (j->has_weights) note_other_tokenizer(run->adapters, run->model, &j->data.files[0]);
}

// ---------------------------------------------------------------------------
// adapters, and the base model beneath them

#define INT8_IS_FROZEN "int8 weights cannot be trained, because a gradient step is smaller than their rounding error"

/* The value of --base for a frozen model in the compute dtype. */
enum { BASE_OF_BUILD = FLOATX == DTYPE_F32 ? BASE_OF_FP32 : BASE_OF_BF16 };

/* The BaseKind that a value of --base means; BASE_TRAINED if this build cannot keep a base in it. */
static BaseKind base_kind(int base) {
    if (base == BASE_OF_BUILD) return BASE_FROZEN;
    if (base == BASE_OF_INT8) return BASE_INT8;
    return base == BASE_OF_INT8_ALL ? BASE_INT8_ALL : BASE_TRAINED;
}

/* Takes rank, alpha and targets from the files of --adapters. Options that were given must agree with them. */
static void job_read_adapters(Job *j) {
    static const char *const options[] = {"lora-rank", "lora-alpha", "lora-targets"};
    static char names[64];
    RunSettings theirs = j->run;
    Llama3Config c = j->config;
    char given[128], has[128];
    size_t used = 0;
    adapters_config_read(&c, theirs.adapters);
    j->base_model = adapters_base_model(theirs.adapters, &j->dropout);
    for (int i = 0; i < LORA_TARGETS; i++)
        if (c.lora_targets >> i & 1)
            used += snprintf(names + used, sizeof names - used, "%s%s", used ? "," : "", lora_targets[i].name);
    theirs.lora_rank = c.lora_rank;
    theirs.lora_alpha = c.lora_alpha;
    theirs.lora_targets = names;
    for (int i = 0; i < 3; i++) {
        option_text(&j->run, options[i], given, sizeof given);
        option_text(&theirs, options[i], has, sizeof has);
        if (option_given(j->options, options[i]) && strcmp(given, has))
            user_error("--%s %s, but the adapters in %s have %s: remove --%s", options[i], given, theirs.adapters, has,
                       options[i]);
    }
    j->run = theirs;
}

/* A checkpoint of adapters can only be resumed as such, with its base model; one of a whole model only without them. */
static void job_resume_adapters(const Job *j) {
    const RunSettings *run = &j->run;
    const char *dir = j->resume_from.dir;
    Llama3Config c = ZERO;
    char path[4096 + 32];
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    int has_adapters = entry_exists(path);
    c.C = 1 << 20; // the model is not known yet: accept any rank
    if (has_adapters) adapters_config_read(&c, dir);
    if (has_adapters && !run->lora_rank)
        user_error("--resume %s holds adapters of rank %d: resume with --lora-rank %d, the same --model and the same "
                   "--base; to train a whole model, merge the adapters into it (convert_llama3 --merge) and start from "
                   "--model DIR",
                   dir, c.lora_rank, c.lora_rank);
    if (!has_adapters && run->lora_rank)
        user_error("--resume %s holds a whole model, but --lora-rank %d trains adapters: start a new run with "
                   "--model %s",
                   dir, run->lora_rank, dir);
    if (has_adapters && !option_given(j->options, "model"))
        user_error("--resume %s holds adapters: add --model with the model that they were trained for", dir);
    if (run->adapters)
        user_error("--adapters %s and --resume %s both give the adapters to start from: remove one of them",
                   run->adapters, run->resume);
}

/* How the frozen model is kept: as --base says. A model whose files are int8 stays int8, except when it is exported in
 * full precision. Without adapters there is no frozen model. */
static void job_base(Job *j) {
    RunSettings *run = &j->run;
    int trains_all = j->purpose.trains && !run->lora_rank && !run->adapters;
    int is_dequantized = j->purpose.converts && !run->adapters && run->base == BASE_AUTO;
    j->stored_base = j->config.base;
    if (j->stored_base > BASE_FROZEN && !is_dequantized) {
        int stored = j->stored_base == BASE_INT8 ? BASE_OF_INT8 : BASE_OF_INT8_ALL;
        if (run->base != BASE_AUTO && run->base != stored)
            user_error("--base %s: the weights of --model %s are stored as --base %s: remove --base, or give the model "
                       "that they were quantized from",
                       option_choice(run, "base"), run->model, stored == BASE_OF_INT8 ? "int8" : "int8:all");
        if (trains_all)
            user_error("--model %s has int8 weights, and " INT8_IS_FROZEN
                       ": add --lora-rank 16 to train adapters, or give the model that they were quantized from",
                       run->model);
        run->base = stored;
    }
    if (run->base == BASE_AUTO) run->base = BASE_OF_BUILD;
    const char *base = option_choice(run, "base");
    j->config.base = base_kind(run->base);
    if (j->config.base == BASE_TRAINED)
        user_error("--base %s: this build computes in " PRECISION_NAME " and keeps a frozen model in " PRECISION_NAME
                   " or int8: use --base " PRECISION_NAME ", or build with make PRECISION=%s",
                   base, base);
    if (trains_all && j->config.base != BASE_FROZEN)
        user_error("--base %s needs adapters: " INT8_IS_FROZEN "; add --lora-rank 16, or use --base " PRECISION_NAME,
                   base);
    if (run->adapters) job_read_adapters(j);
    if (!run->lora_rank && j->config.base == BASE_FROZEN) j->config.base = BASE_TRAINED;
}

/* The bit set of linear layers that --lora-targets names. */
static unsigned parse_lora_targets(const char *names) {
    unsigned targets = 0;
    for (const char *at = names; *at;) {
        int n = (int)strcspn(at, ","), i = 0;
        while (i < LORA_TARGETS && ((int)strlen(lora_targets[i].name) != n || strncmp(at, lora_targets[i].name, n)))
            i++;
        if (i == LORA_TARGETS)
            user_error("--lora-targets %s: a block has no linear layer \"%.*s\": expected some of q,k,v,o,gate,up,down",
                       names, n, at);
        targets |= 1u << i;
        at += n + (at[n] == ',');
    }
    return targets;
}

/* The configuration of the model, which part of it is trained, and how the rest is stored. */
static void job_model(Job *j) {
    RunSettings *run = &j->run;
    Llama3Config *c = &j->config;
    *c = config_load(run->model);
    if (!j->purpose.plans) {
        ops_require_head_size(c->HD);
        j->available_memory = device_memory_with_total(job_gpu_of_rank(j, 0), &j->total_memory);
    }
    if (run->vocab_size) c->V = run->vocab_size;
    job_base(j);
    if (!j->base_model) j->base_model = checked_strdup(run->model);
    c->muon = uses_muon(run);
    if (!run->lora_rank) return;
    if (!j->purpose.trains && !j->purpose.measures_hosts && !run->adapters)
        user_error("--lora-rank %d creates adapters to be trained, and %s does not train: remove --lora-rank, or give "
                   "trained adapters with --adapters DIR",
                   run->lora_rank, j->purpose.program);
    if (run->lora_rank > c->C)
        user_error("--lora-rank %d exceeds the hidden size of %s, %d: use a smaller rank; 8 to 64 is usual",
                   run->lora_rank, run->model, c->C);
    if (run->lora_alpha == 0) run->lora_alpha = 2.0 * run->lora_rank;
    c->lora_rank = run->lora_rank;
    c->lora_alpha = run->lora_alpha;
    c->lora_targets = parse_lora_targets(run->lora_targets);
    if (c->muon)
        user_error("--optimizer muon trains the matrices of the blocks, which are frozen while LoRA adapters "
                   "(rank %d) are trained: use --optimizer adamw, or train the model without adapters",
                   run->lora_rank);
}

// ---------------------------------------------------------------------------
// the layout: does the model divide over the mesh?

/* The model FLOPs utilization of a step that took `seconds`; 0: not known. */
static double job_mfu(const Job *j, double seconds) {
    double tokens = (double)mesh_data_ranks(&j->mesh) * j->run.batch * j->run.accum * j->run.seq;
    if (j->datasheet_rate <= 0) return 0;
    return mfu_flops_per_token(&j->table, &j->config, j->run.seq) * tokens / seconds / j->datasheet_rate;
}

/* The common divisors of a and b as text, "1, 2, 4". */
static void divisors_of(char *text, size_t size, int a, int b) {
    size_t used = 0;
    text[0] = 0;
    for (int n = 1; n <= a && n <= b && used + 12 < size; n++)
        if (a % n == 0 && b % n == 0) used += snprintf(text + used, size - used, "%s%d", used ? ", " : "", n);
}

/* Defaults of a pipeline. Its weights stay unsharded for the whole step and its gradients are accumulated locally, as
 * for Llama 3 (paper, section 3.3.2): otherwise each of its many micro-batches would gather and reduce everything. */
static void job_pipeline_options(Job *j) {
    static const char *const needs_pp[] = {"pp-schedule", "pp-chunks", "pp-light-ends"};
    RunSettings *run = &j->run;
    int interleaved = run->pp_schedule == SCHEDULE_INTERLEAVED, pp = j->mesh.size[AXIS_PP];
    for (int i = 0; i < 3 && pp == 1 && run->pp_chunks != 1; i++) // 1: as config.txt says it
        if (option_changed(j->options, needs_pp[i]))
            user_error("--%s has no effect without --pp: add --pp N, or remove --%s", needs_pp[i], needs_pp[i]);
    if (!run->pp_chunks) run->pp_chunks = interleaved ? 2 : 1;
    if (interleaved != (run->pp_chunks > 1))
        user_error("--pp-schedule %s with --pp-chunks %d: 1f1b has one virtual stage per rank, interleaved has two or "
                   "more; change one of the two options",
                   interleaved ? "interleaved" : "1f1b", run->pp_chunks);
    if (pp > 1 && !option_given(j->options, "sharding")) run->sharding = SHARD_GRAD_OP;
    if (pp > 1 && !option_given(j->options, "accumulate")) run->accumulate = ACCUMULATE_LOCALLY;
}

/* The first tensor in which --tp would put weights that share an int8 scale on two ranks; NULL: there is none. */
static const TensorRow *find_split_int8_block(const Llama3Config *c, int tp) {
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

#define REFUSE(...) return snprintf(problem, size, __VA_ARGS__), 0

/* Does the model divide over the mesh? If not, returns 0 and `problem` (size) says why, and what would work. */
static int job_layout_fits(const Job *j, char *problem, size_t size) {
    const RunSettings *run = &j->run;
    const Llama3Config *c = &j->config;
    int tp = j->mesh.size[AXIS_TP], cp = j->mesh.size[AXIS_CP], pp = j->mesh.size[AXIS_PP];
    char fits[256], shorter[32] = "";
    divisors_of(fits, sizeof fits, c->NH, c->NKV);
    if (c->NH % tp || c->NKV % tp)
        REFUSE("--tp %d does not divide %s's %d query heads and %d key/value heads, which are split over the ranks: "
               "use --tp %s",
               tp, run->model, c->NH, c->NKV, fits);
    const TensorRow *split = find_split_int8_block(c, tp);
    if (split) {
        const char *layer = strstr(split->name, "%d."); // "model.layers.%d.self_attn.o_proj"
        REFUSE("--tp %d would split %s.weight within a block of %d int8 weights that share a scale: use a smaller "
               "--tp, or %s",
               tp, layer ? layer + 3 : split->name, INT8_BLOCK,
               j->stored_base > BASE_FROZEN ? "dequantize the model with convert_llama3 --export DIR"
                                            : "--base " PRECISION_NAME);
    }
    int smallest = (int)min_i64(c->V, c->F);
    if (tp > smallest)
        REFUSE("--tp %d is too large for %s, whose vocabulary or MLP has only %d rows to split: use a smaller --tp", tp,
               run->model, smallest);
    int halves = 2 * cp;
    if (cp > 1 && run->seq % halves) {
        divisors_of(fits, sizeof fits, run->seq / 2, run->seq / 2);
        if (run->seq > halves) snprintf(shorter, sizeof shorter, "--seq %d or ", run->seq / halves * halves);
        REFUSE("--cp %d splits each sequence into %d equal parts, and --seq %d is not a multiple of %d: use %s--seq "
               "%d, or --cp %s",
               cp, halves, run->seq, halves, shorter, (run->seq / halves + 1) * halves, fits);
    }
    if (j->purpose.computes_tokens && tp * cp * pp > 1)
        REFUSE("%s computes one token at a time, without --tp, --cp and --pp: remove them; FSDP shards the model over "
               "all ranks",
               j->purpose.program);
    int stages = pp * run->pp_chunks, most = c->L + (run->pp_light_ends ? 2 : 0);
    if (stages > most)
        REFUSE("--pp %d x --pp-chunks %d = %d virtual stages%s, but %s has %d blocks: use at most %d virtual stages",
               pp, run->pp_chunks, stages, run->pp_light_ends ? ", the first and the last with one block fewer" : "",
               run->model, c->L, most);
    if (run->pp_chunks > 1 && pp > 1 && run->accum % pp)
        REFUSE("--pp-schedule interleaved needs --accum to be a multiple of --pp %d, and --accum is %d: use --accum %d "
               "or %d",
               pp, run->accum, (int)max_i64(1, run->accum / pp) * pp, (run->accum / pp + 1) * pp);
    return 1;
}
#undef REFUSE

// ---------------------------------------------------------------------------
// preparing the job

/* The sampler of `rank` in this period. */
static Sampler job_sampler(const Job *j, int rank) {
    const RunSettings *run = &j->run;
    const Mesh *mesh = &j->mesh;
    Sampler s = ZERO;
    s.samples = dataset_samples(&j->data);
    s.seed = (uint64_t)run->seed;
    s.pad = run->tail == TAIL_PAD;
    s.shards = mesh->size[AXIS_DP_SHARD];
    s.shard = mesh_coordinate(mesh, rank, AXIS_DP_SHARD);
    s.replicas = mesh->size[AXIS_DP_REPLICATE];
    s.replica = mesh_coordinate(mesh, rank, AXIS_DP_REPLICATE);
    s.micro_batches = run->accum;
    s.B = run->batch;
    s.local = run->accumulate == ACCUMULATE_LOCALLY;
    s.start_step = j->start.step;
    s.start_epoch = j->start.epoch;
    s.start_sample = j->start.samples_in_epoch;
    s.mixed = j->data.mixture ? &j->data : NULL;
    s.pieces = j->data.pieces;
    return s;
}

/* OMP_NUM_THREADS, which may be a list for nested loops; 0: it is not set, or no number of threads. */
static int threads_of_environment(void) {
    const char *text = getenv("OMP_NUM_THREADS");
    char *end = NULL;
    long threads = text ? strtol(text, &end, 10) : 0;
    return text && end > text && (!*end || *end == ',') && threads >= 1 && threads <= 4096 ? (int)threads : 0;
}

/* Threads of a rank. Its cores are those of this process, at most as many as its container may keep busy, divided by
 * the ranks that share them. A launcher that binds processes to cores has divided them already. */
static void job_threads(Job *j, int local_ranks, int ranks_sharing) {
    CoreSet allowed = core_set_of_process();
    int cores = core_set_count(&allowed) / ranks_sharing;
    j->local_ranks = local_ranks;
    j->cores_per_rank = (int)fmax(1, fmin(cores, round(container_limits().cpus / local_ranks)));
    j->threads_of_environment = j->run.threads ? 0 : threads_of_environment();
    j->threads_per_rank = j->run.threads ? j->run.threads : j->cores_per_rank;
    if (j->threads_of_environment) j->threads_per_rank = j->threads_of_environment;
}

/* A step's counts of tokens and bytes have 64 bits. In a micro-batch, a rank all-gathers each unit at most twice, and
 * reduces its gradients once. */
static void check_counters(const Job *j) {
    const RunSettings *run = &j->run;
    double elements = 0, tokens = (double)mesh_data_ranks(&j->mesh) * run->batch * run->seq * run->accum;
    for (int u = 0; u < j->table.num_units; u++)
        elements += (double)j->table.units[u].size + (double)TENSOR_ALIGN * j->mesh.world;
    double bytes = 3.0 * sizeof(float) * elements * run->accum;
    if (tokens > 0x1p62 || bytes > 0x1p62)
        user_error("one step has %.3g tokens, and a rank receives up to %.3g bytes: that exceeds the 64-bit counters; "
                   "use fewer ranks, a smaller --accum, --batch or --seq, or a smaller model",
                   tokens, bytes);
}

/* The options and the configuration of period i, and whether they fit the mesh. */
static void job_enter_period(Job *j, int i) {
    enum { MOST_TOKENS_OF_MICRO_BATCH = 1 << 30 };
    const RunSettings *run = &j->run;
    char problem[1024];
    j->period = &j->recipe.periods[i];
    j->run = j->period->run;
    j->run.steps = (int)recipe_steps(&j->recipe);
    j->config = j->period->config;
    if (run->seq > j->config.max_positions && j->recipe.path)
        user_error("%s: \"seq\" is %d, and %s has %d positions: use a smaller \"seq\", or add "
                   "\"max_position_embeddings\": %d",
                   period_place(&j->recipe, j->period), run->seq, run->model, j->config.max_positions, run->seq);
    if (run->seq > j->config.max_positions)
        user_error("--seq %d exceeds the %d positions of %s: use a smaller --seq", run->seq, j->config.max_positions,
                   run->model);
    if ((int64_t)run->batch * run->seq > MOST_TOKENS_OF_MICRO_BATCH)
        user_error("--batch %d x --seq %d = %" PRId64
                   " tokens per micro-batch, but at most %d are supported: use a smaller --batch and a larger --accum",
                   run->batch, run->seq, (int64_t)run->batch * run->seq, (int)MOST_TOKENS_OF_MICRO_BATCH);
    snprintf(problem, sizeof problem, "%s", j->period->problem);
    j->problem = NULL;
    if (problem[0] || !job_layout_fits(j, problem, sizeof problem)) {
        if (j->purpose.plans && j->recipe.path) { // other periods can be planned
            j->problem = checked_strdup(problem);
            return;
        }
        if (j->recipe.path) user_error("%s: %s", period_place(&j->recipe, j->period), problem);
        user_error("%s", problem);
    }
    table_open(&j->table, &j->config, run->wrap_size, &WHOLE_MODEL);
    table_freeze(&j->table, &j->recipe, j->period);
    check_counters(j);
}

/* The weights to start from: files of the model, adapters, or random numbers from the seed. */
static void job_weights(Job *j) {
    const RunSettings *run = &j->run;
    int from_model = !preset_find(run->model) && (!j->resume_from.dir[0] || run->lora_rank); // not from the checkpoint
    j->has_weights = from_model && model_weights_open(&j->weights, run->model, &j->table, j->stored_base);
    if (!j->has_weights && j->stored_base > BASE_FROZEN)
        user_error("%s/config.json describes int8 weights, but there is no model.safetensors next to it: copy the "
                   "whole directory",
                   run->model);
    if (run->adapters) adapters_open(&j->adapters, run->adapters, &j->table);
    else if (j->has_weights) model_refuse_adapters(run->model);
    if (run->lora_rank)
        j->base_fingerprint =
            j->has_weights ? model_fingerprint(&j->weights, &j->table, j->config.base) : mix64((uint64_t)run->seed);
    if (!j->has_weights && !j->purpose.trains)
        user_error("%s has no weights: %s needs --model DIR with a model.safetensors, such as a checkpoint of "
                   "train_llama3",
                   run->model, j->purpose.program);
}

/* The token files of this period, the checkpoint that the run resumes from, and the tokenizer. */
static void job_data(Job *j) {
    const RunSettings *run = &j->run;
    const Recipe *r = &j->recipe;
    j->data = dataset_open_windows(run->data, run->seq, r->longest / run->seq, j->config.V, 0, r->path != NULL);
    recipe_number_sources(r, &j->data);
    recipe_count_used(r, j->period, &j->data);
    if (r->path) recipe_check_epochs(r, j->period, &j->data);
    int64_t per_step = samples_per_step(run, &j->mesh), samples = dataset_samples(&j->data);
    if (j->data.mixture && option_changed(j->options, "tail"))
        user_error("--tail %s has no effect on a mixture, whose sources begin their next epochs within a step: remove "
                   "--tail, or the weights of --data",
                   run->tail == TAIL_PAD ? "pad" : "drop");
    if (!j->data.mixture && run->tail == TAIL_DROP && samples < per_step) // a step must fit into an epoch
        user_error("%s holds %" PRId64
                   " samples of --seq %d, but one step takes %d data ranks x batch %d x accum %d = %" PRId64
                   ": reduce one of these, add data, or use --tail pad",
                   run->data, samples, run->seq, mesh_data_ranks(&j->mesh), run->batch, run->accum, per_step);
    if (j->resume_from.dir[0]) {
        // A checkpoint from the end of a period has that period's configuration; the run starts with the next one.
        int wrote = recipe_period_after(r, j->resume_from.progress.step - 1);
        checkpoint_open(&j->resume_from, run, r, &j->mesh, &j->data, j->base_fingerprint, &r->periods[wrote].config,
                        &j->table);
    }
    if (run->val) j->val = dataset_open(run->val, run->seq, j->config.V, 1);
    if (!j->previous_period) job_find_tokenizer(j); // read once: the files may change while the run trains
    found_tokenizer_check(&j->tokenizer, &j->data, run->tokenizer != NULL);
    found_tokenizer_check(&j->tokenizer, &j->val, run->tokenizer != NULL);
    job_check_data(j, &j->data);
    job_check_data(j, &j->val);
}

/* Sets where in the data the period begins: where the period before it ended, or where the run resumes. */
static void job_place_in_data(Job *j) {
    const RecipePeriod *p = j->period;
    Progress *at = &j->start;
    int begins = begins_later_period(j), old_seq = begins ? p[-1].run.seq : p->run.seq;
    if ((begins && p->begins_data) || j->resume_from.data_changed) at->epoch = at->samples_in_epoch = 0;
    if (at->samples_in_epoch * old_seq % p->run.seq)
        user_error("%s: the stage would begin within a sequence of %d tokens, because an epoch has ended in the stage "
                   "before: make its \"batch\" a multiple of %d",
                   period_place(&j->recipe, p), p->run.seq, p->run.seq / old_seq);
    at->samples_in_epoch = at->samples_in_epoch * old_seq / p->run.seq;
    at->data = &j->data;
}

/* The Job of the period after `j`. It shares everything that is the same in all periods. */
static Job *job_of_next_period(Job *j) {
    Job *next = new_array(Job, 1);
    *next = *j;
    next->previous_period = j;
    next->has_weights = 0;
    memset(&next->resume_from, 0, sizeof next->resume_from);
    memset(&next->data, 0, sizeof next->data);
    memset(&next->val, 0, sizeof next->val);
    memset(&next->table, 0, sizeof next->table);
    memset(&next->thread_world, 0, sizeof next->thread_world);
    pthread_mutex_init(&next->thread_world.lock, NULL);
    next->start.step = period_end_step(j);
    job_enter_period(next, (int)(j->period - j->recipe.periods) + 1);
    if (next->purpose.plans) return next;     // its data may be on other machines
    next->run.trace = NULL;                   // the timeline is that of the period in which the run starts
    if (period_end_step(j) > j->start.step) { // the position that a checkpoint of the last step has
        Sampler sampler = job_sampler(j, 0);
        int64_t last = sampler_position(&sampler, period_end_step(j) - 1, &next->start.epoch); // where it begins
        next->start.samples_in_epoch = last + sampler_global_batch(&sampler);
    }
    job_data(next);
    job_place_in_data(next);
    return next;
}

/* Checks everything that can be refused. `ranks_sharing`: how many ranks share the cores of this process. */
static void job_prepare(Job *j, int world, int local_ranks, int ranks_sharing) {
    RunSettings *run = &j->run;
    if (!j->purpose.plans && !j->purpose.measures_hosts) check_needed_options(j->options);
    check_offload(j);
    if (world > 1 && j->transport && j->transport->check_host)
        j->transport->check_host(job_gpu_of_rank(j, 0), j->local_rank, local_ranks, j->host_transport);
    if (run->resume && !strcmp(run->resume, "auto") && !run->out)
        user_error("--resume auto looks for checkpoints in --out: add --out DIR, or give the checkpoint's directory");
    if (run->resume) checkpoint_find(j->resume_from.dir, run);
    if (j->resume_from.dir[0]) {
        job_resume_adapters(j);
        // Unless --model is given, the checkpoint's own config.json describes the model.
        if (!option_given(j->options, "model")) run->model = j->resume_from.dir;
    }
    job_model(j);
    const int asked[MESH_AXES] = {run->tp, run->cp, run->pp, run->dp_shard, run->dp_replicate};
    j->mesh = mesh_open(world, asked, j->purpose.plans);
    job_pipeline_options(j);
    job_threads(j, local_ranks, ranks_sharing);
    j->recipe = recipe_open(run, j->options, &j->config);
    recipe_schedule(&j->recipe, j->options, &j->mesh);
    if (j->resume_from.dir[0]) j->resume_from.progress = j->start = checkpoint_progress(j->resume_from.dir);
    job_enter_period(j, recipe_period_after(&j->recipe, j->start.step));
    if (job_runs(j) && !run->data)
        user_error("--data is missing: give token files to train on (make demo shows a complete run, --help lists all "
                   "options)%s",
                   j->recipe.path ? ", or give the recipe's first stage \"data\"" : "");
    if (job_runs(j) && FLOATX == DTYPE_BF16) {
        char gpu[256]; // all GPUs of the run are taken to be like that of rank 0
        device_model(job_gpu_of_rank(j, 0), gpu, sizeof gpu);
        j->datasheet_rate = (uses_nccl(j) ? world : 1) * datasheet_rate(gpu);
    }
    if (!j->purpose.plans && !j->purpose.measures_hosts) job_weights(j);
    if (job_runs(j) || (j->purpose.measures_hosts && run->data)) job_data(j);
    if (j->purpose.prepare) j->purpose.prepare(j);
    if (!j->purpose.trains) return;
    if (job_runs(j) && run->out)
        tokenizer_copies_collect(&j->tokenizer_files, &j->tokenizer, preset_find(run->model) ? NULL : run->model);
    if (job_runs(j)) job_place_in_data(j);
    for (Job *last = j; period_end_step(last) < recipe_steps(&j->recipe); last = last->next_period)
        last->next_period = job_of_next_period(last);
}

/* Rank 0 checks the outputs last, because checking may create a directory. */
static void job_check_outputs(Job *j) {
    if (j->run.out)
        j->out_lock = out_directory_open(j->run.out, j->resume_from.dir, j->resume_from.progress.step, !!j->run.resume,
                                         j->run.keep);
    if (j->run.trace) trace_check(j->run.trace);
}

// ---------------------------------------------------------------------------
// the transport and the number of ranks, from how the program was started

/* Chooses the transports. Returns the number of ranks. */
static int choose_transport(Job *j, int processes) {
    RunSettings *run = &j->run;
    int is_auto = run->transport == TRANSPORT_AUTO;
    int under_mpi = launched_by_mpi() && run->transport != TRANSPORT_THREADS;
    if (j->purpose.plans) return processes; // nothing is sent; plan_launch chose what the planned run would use
    if (run->transport == TRANSPORT_MPI && !under_mpi)
        user_error("--transport mpi needs a launcher: start with mpirun -np N, or with srun");
    if (!under_mpi && processes > 1)
        user_error("--transport threads runs all ranks in one process, but %d processes were started: use --ranks N "
                   "without mpirun",
                   processes);
    if (under_mpi && run->ranks && run->ranks != processes)
        user_error("--ranks %d, but mpirun started %d: remove --ranks%s", run->ranks, processes,
                   processes == 1 ? ", or add --transport threads to run the ranks as threads of this process" : "");
    if (CUDA_BUILD && run->transport == TRANSPORT_MPI)
        user_error("--transport mpi sends from host memory, but this build computes on GPUs: remove --transport, or "
                   "use ./train_llama3");
    if (!CUDA_BUILD && asks_nccl(run))
        user_error("--transport nccl sends from GPU memory, but this build computes on CPUs: remove --transport, or "
                   "use ./train_llama3_cuda");
    if (CUDA_BUILD && under_mpi && processes > 1 && is_auto) run->transport = TRANSPORT_NCCL;
    if (CUDA_BUILD && !under_mpi && run->ranks > 1 && is_auto) {
        // Ranks are threads. NCCL needs a GPU for each of them; if the host has one GPU, they share it without NCCL.
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        int gpus = device_count();
        if (gpus != 1 && run->ranks > gpus)
            user_error("--ranks %d, but this host has %d GPUs%s%s%s, and NCCL needs one GPU per rank: use --ranks %d, "
                       "or let all %d ranks share the first GPU with --transport threads",
                       run->ranks, gpus, visible ? " (CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "",
                       visible ? ")" : "", gpus, run->ranks);
        run->transport = gpus == 1 ? TRANSPORT_THREADS : TRANSPORT_NCCL;
    }
    j->host_transport = under_mpi ? transport_find("mpi") : &transport_threads;
    j->transport = run->transport ? transport_find(option_choice(run, "transport")) : j->host_transport;
    if (!j->transport)
        user_error(
            "--transport %s, which several GPUs need: this build has no NCCL: install it next to the CUDA toolkit "
            "and build again, or share one GPU with --ranks N --transport threads",
            option_choice(run, "transport"));
    return under_mpi ? processes : (int)max_i64(1, run->ranks);
}

/* Gives a job its command line. Its settings are complete after job_open; until then they are what was given. */
static void job_take_options(Job *j, const Options *options) {
    j->options = options;
    j->run = options->run;
}

static void job_open(Job *j, const LaunchInfo *s) {
    int world = choose_transport(j, s->world), are_threads = j->host_transport == &transport_threads;
    if (run_hosts.count && (!run_hosts.of_rank || are_threads)) run_hosts_of_threads(world);
    j->local_rank = s->local;
    job_prepare(j, world, are_threads ? world : s->on_host, are_threads ? world : s->on_cores);
    pthread_mutex_init(&j->thread_world.lock, NULL);
}

static void job_close(Job *j) {
    for (Job *period = j, *next; period; period = next) {
        next = period->next_period;
        dataset_close(&period->data);
        dataset_close(&period->val);
        thread_world_close(&period->thread_world);
        table_close(&period->table);
        free(period->problem);
        if (period != j) free(period);
    }
    free(j->recipe.periods);
    st_close(&j->weights);
    st_close(&j->adapters);
    free(j->base_model);
    checkpoint_close(&j->resume_from);
    if (j->out_lock > 0) close(j->out_lock);
    found_tokenizer_close(&j->tokenizer);
    tokenizer_copies_close(&j->tokenizer_files);
    free((void *)j->options);
}

#endif
