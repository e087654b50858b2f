/* options.h: the command line. One table parses it, checks it, and prints --help and config.txt.
 *
 * A row holds an option's name, values, bounds, default and help, and which field of Options stores it; to add an
 * option, add a row and a field. A caller may rely on: after options_parse every value is within its row's bounds,
 * or 0 or NULL if its option has no default and was not given.
 * job_prepare (job.h) checks whether options fit each other, the model and the machine.
 */
#ifndef OPTIONS_H
#define OPTIONS_H
#include "../dataloader.h" // defines: LOADER_MAX_WORKERS
#include "../fsdp.h"       // defines: STRATEGY_NAMES, MAX_SLOTS
#include "../optimizer.h"  // defines: RATE_SHAPE_NAMES
#include "option_table.h"  // defines: OptionRow, option_read, option_set, option_as_text, write_shell_word
#include "outliers.h"      // defines: MAX_OUTLIER_WINDOW

/* Programs that take these options. */
typedef enum { TRAIN_LLAMA3, PLAN_LLAMA3, CHECK_HOSTS } Program;
static const char *const program_names[] = {"train_llama3", "plan_llama3", "check_hosts"};

typedef struct { // in the groups of --help; the table below says what each one means
    const char *model, *tokenizer;
    int vocab_size;
    const char *data, *val, *tail;
    int workers, doc_mask;
    int seq, batch, accum;
    const char *accumulate;
    int tp, cp, pp, dp_shard, dp_replicate; // 0: auto
    const char *pp_schedule;
    int pp_chunks, pp_light_ends;
    const char *sharding, *wrap, *reduce_dtype, *offload;
    int slots;
    const char *recompute;
    int logit_rows;
    const char *recipe, *lr_schedule, *optimizer;
    int steps, warmup, lr_decay, max_skips, outlier_window;
    double lr, min_lr, muon_momentum, weight_decay, beta1, beta2, eps, clip, z_loss, outlier_z;
    const char *lora_targets, *base, *adapters;
    int lora_rank;
    double lora_alpha;
    const char *out, *save_mode, *after_save, *resume, *transport, *trace;
    int save_every, keep, allow_changes, val_every, val_batches, choices_every, seed, threads, ranks, check_replicas,
        deterministic;
    double timeout, start_timeout; // seconds
    const char *cluster, *simulate, *eval, *score, *choices, *export_dir, *dtype, *generate, *prompts;
    int plan, chat, world, search, merge, max_tokens, help, version;
    Program program; // not an option: the one that is running
    double temperature, top_p;
    double mtbf, repair, detect, relaunch, step_seconds, save_seconds, pause_seconds; // mtbf, repair: hours
    int hosts, spares;
    char given[128]; // 1 for each row of the table that was on the command line
} Options;

#define FIELD(f) offsetof(Options, f)
#define TRAINER_TASKS "do instead of training"
#define PLANNER_OPTIONS "estimate a run (plan_llama3)"
static const OptionRow option_rows[] = {
    GROUP("model"),
    TEXT("model", model, "NAME|DIR", "tiny",
         "a preset, or a Hugging Face directory (config.json and, if present, its weights)"),
    INT("vocab-size", vocab_size, 0, 1 << 28, "N", "0", "vocabulary size, instead of the model's; 0: the model's"),
    TEXT("tokenizer", tokenizer, "FILE", NULL,
         "tokenizer.model or tokenizer.json; by default the one next to the data or, failing that, next to the model"),
    GROUP("data"),
    TEXT("data", data, "FILE|GLOB[:WEIGHT],...", NULL,
         "token files to train on; with weights a mixture, which takes each entry's share of samples"),
    TEXT("val", val, "FILE|GLOB,...", NULL, "token files to validate on"),
    TEXT("tail", tail, "drop|pad", "drop",
         "what to do with the last, incomplete step of an epoch: drop it, or pad it with samples from the start of the "
         "epoch"),
    INT("workers", workers, 0, LOADER_MAX_WORKERS, "N", "0",
        "threads per rank that read samples ahead; 0: one per core, at most 4"),
    FLAG("doc-mask", doc_mask, "attention stays within a document; documents end at the tokenizer's end-of-text token"),
    GROUP("batch"),
    INT("seq", seq, 0, 1 << 24, "T", "0",
        "tokens per sample; 0: the model's default, which for a Hugging Face directory is its max_position_embeddings, "
        "on a GPU at most 4096 and on a CPU at most 256"),
    INT("batch", batch, 0, 1 << 20, "B", "0", "samples per micro-batch and rank; 0: the model's default"),
    INT("accum", accum, 1, 1 << 16, "K", "1", "micro-batches per step"),
    TEXT(
        "accumulate", accumulate, "sharded|local", "sharded",
        "reduce gradients to their shards after every micro-batch, or accumulate them locally and reduce once per step "
        "(less communication, 4 more bytes per parameter)"),
    GROUP("mesh"),
    INT("tp", tp, 0, 1 << 20, "N|auto", "1",
        "tensor parallelism with sequence parallelism: split every matrix over N ranks, best within one host; N must "
        "divide the query heads and the key/value heads"),
    INT("cp", cp, 0, 1 << 20, "N|auto", "1",
        "context parallelism for long sequences: split each sequence over N ranks, which all-gather keys and values; "
        "FSDP "
        "shards parameters over these ranks too"),
    INT("pp", pp, 0, 1 << 20, "N|auto", "1",
        "pipeline parallelism: N stages with a part of the blocks each; --accum should be several times N; the "
        "defaults "
        "become --sharding shard_grad_op --accumulate local"),
    INT("world", world, 0, 1 << 20, "N", "0",
        "with --plan, and in plan_llama3: the number of ranks; 0: as many as were started"),
    TEXT("pp-schedule", pp_schedule, "1f1b|interleaved", "1f1b",
         "1f1b: one stage per rank, one forward and one backward in turn; interleaved: several virtual stages per rank "
         "(--pp-chunks), which idle less and send more messages"),
    INT("pp-chunks", pp_chunks, 0, MAX_STAGES, "V", "0",
        "virtual stages per rank; 0: 1 with 1f1b, 2 with interleaved; if there are several, --accum must be a multiple "
        "of "
        "--pp"),
    FLAG("pp-light-ends", pp_light_ends,
         "give the first and the last virtual stage one block fewer, to balance the embedding and the head"),
    INT("dp-shard", dp_shard, 0, 1 << 20, "N|auto", "auto",
        "ranks over which FSDP shards the parameters; auto: all that the other dimensions leave"),
    INT("dp-replicate", dp_replicate, 0, 1 << 20, "N|auto", "1",
        "replicas of the sharded model (hybrid sharding); their gradients are summed once per step"),
    GROUP("sharding"),
    TEXT("sharding", sharding, STRATEGY_NAMES, "full_shard",
         "full_shard: ZeRO-3; shard_grad_op: ZeRO-2, weights stay unsharded from forward to backward; no_shard: DDP, "
         "every "
         "rank holds all state"),
    TEXT("wrap", wrap, "block|size:N", "block",
         "what one FSDP unit holds: a block, or as many blocks as have N parameters together"),
    INT("slots", slots, 2, MAX_SLOTS - 2, "N", "2",
        "how many blocks may be unsharded at once; 2 prefetches one block ahead"),
    TEXT("reduce-dtype", reduce_dtype, "fp32|bf16", "fp32",
         "dtype in which gradients are sent; they are summed in fp32, except by NCCL, which sums in this dtype"),
    TEXT("offload", offload, "none|optimizer|all", "none",
         "keep the optimizer's state, or all sharded state, " OFFLOAD_HELP),
    GROUP("memory"),
    TEXT("recompute", recompute, "none|selective|full|every:N", "none",
         "activations to recompute in backward: norms and SwiGLU (selective), all but the inputs of blocks (full), or "
         "those of every Nth block"),
    INT("logit-rows", logit_rows, 0, 1 << 30, "N", "0",
        "tokens whose logits exist at a time; 0: on a GPU at most 8192 tokens and 2^30 logits, on a CPU at most 1024 "
        "and 2^25; fewer take less memory and more time"),
    GROUP("optimizer"),
    TEXT("recipe", recipe, "FILE", NULL,
         "train in stages that FILE describes, JSON with their tokens, batch, sequence length, learning rate and data "
         "(examples in dev/recipes)"),
    INT("steps", steps, 1, 1 << 30, "N", "100", "optimizer steps"),
    TEXT("optimizer", optimizer, "adamw|muon", "adamw",
         "muon: orthogonalized momentum for the matrices of the blocks, AdamW for everything else, both with --lr; "
         "keeps 12 instead of 16 bytes per parameter of these matrices"),
    REAL("muon-momentum", muon_momentum, 0, 0.999999999, "X", "0.95", "with --optimizer muon: its momentum (Nesterov)"),
    REAL("lr", lr, 0, 1e3, "X", "0.0003", "peak learning rate"),
    TEXT("lr-schedule", lr_schedule, RATE_SHAPE_NAMES, "cosine",
         "what follows the warm-up: a cosine or a straight line down to --min-lr, --lr until the end (constant), or "
         "--lr until the --lr-decay last steps, which fall to --min-lr in a straight line (wsd)"),
    REAL("min-lr", min_lr, -1, 1e3, "X", "-1", "learning rate after the last step; -1: a tenth of --lr"),
    INT("warmup", warmup, 0, 1 << 30, "N", "10", "steps of linear warm-up"),
    INT("lr-decay", lr_decay, 0, 1 << 30, "N", "0",
        "with --lr-schedule wsd: steps of the decay; 0: a tenth of all steps"),
    REAL("weight-decay", weight_decay, 0, 1e3, "X", "0.1", "AdamW's weight decay; norm weights have none"),
    REAL("beta1", beta1, 0, 0.999999999, "X", "0.9", "AdamW's decay rate of the first moment"),
    REAL("beta2", beta2, 0, 0.999999999, "X", "0.95", "AdamW's decay rate of the second moment"),
    REAL("eps", eps, 0, 1, "X", "1e-8", "AdamW's epsilon"),
    REAL("clip", clip, 0, 1e30, "X", "1",
         "largest global gradient norm; larger gradients are scaled down to it; 0: no clipping"),
    INT("max-skips", max_skips, 0, 1 << 30, "N", "10",
        "how many steps with a gradient norm that is not finite are skipped before the run ends"),
    REAL("z-loss", z_loss, 0, 1e3, "X", "0",
         "also minimize X times the square of log Z, where Z is the denominator of each target's softmax; keeps logits "
         "from drifting; reported apart from the loss; 1e-4 is usual; 0: off"),
    INT("outlier-window", outlier_window, 0, MAX_OUTLIER_WINDOW, "N", "0",
        "skip the update of a step whose loss or gradient norm is an outlier among those of the last N steps; 0: off"),
    REAL("outlier-z", outlier_z, 0, 1e6, "X", "6",
         "an outlier is more than X standard deviations above the mean of the last steps"),
    GROUP("adapters"),
    INT("lora-rank", lora_rank, 0, 1 << 16, "R", "0",
        "train LoRA adapters of this rank and freeze the model; 0: train the model"),
    REAL("lora-alpha", lora_alpha, 0, 1e6, "X", "0",
         "LoRA scaling factor alpha; the update is multiplied by alpha / rank; 0: twice the rank"),
    TEXT("lora-targets", lora_targets, "NAMES", "q,k,v,o,gate,up,down",
         "linear layers that have adapters, separated by commas"),
    TEXT("base", base, "fp32|bf16|int8|int8:all", NULL,
         "with adapters, how the frozen model is stored: in the precision of the build (the default), with the "
         "matrices of "
         "its blocks in int8 (64 weights share a scale), or with all tensors in int8; a model whose files are int8 "
         "stays "
         "so"),
    TEXT(
        "adapters", adapters, "DIR", NULL,
        "adapters to start from, to evaluate or to generate with: adapter_config.json and adapter_model.safetensors in "
        "the format of Hugging Face PEFT"),
    GROUP("run"),
    TEXT("out", out, "DIR", NULL,
         "directory for checkpoints, metrics.jsonl, run.html (a page to watch the run), samples.jsonl, config.txt, "
         "layout.json, plan.json and ledger.json"),
    INT("save-every", save_every, 0, 1 << 30, "N", "0",
        "save a checkpoint every N steps and after the last one; 0: only after the last one; SIGUSR1 saves one too, "
        "SIGUSR2, SIGTERM, SIGINT (Ctrl-C) and SIGHUP save one and end the run with exit code 75"),
    TEXT("save-mode", save_mode, "sync|async", "sync",
         "async: copy the state to memory, which the plan includes, and write it while training continues"),
    INT("keep", keep, 0, 1 << 30, "K", "0", "keep the newest K checkpoints and remove older ones; 0: keep all"),
    TEXT("after-save", after_save, "CMD", NULL,
         "run sh -c CMD after each save, while training continues; \"$1\" is the checkpoint's path; output goes to "
         "after-save.log in --out; a failure is reported and does not end the run, which waits for the last command"),
    TEXT("resume", resume, "DIR|auto", NULL,
         "resume from a checkpoint, whatever parallel layout wrote it; auto: from the newest one in --out, if there is "
         "one"),
    FLAG("allow-changes", allow_changes, "resume even if options that affect the training result have changed"),
    INT("val-every", val_every, 0, 1 << 30, "N", "0",
        "validate every N steps and after the last one; 0: only after the last one"),
    INT("val-batches", val_batches, 0, 1 << 30, "N", "0", "micro-batches per rank in a validation; 0: the whole file"),
    INT("seed", seed, 0, INT32_MAX, "N", "1", "seed of the initial weights, of shuffling and of sampling"),
    INT("threads", threads, 0, 1024, "N", "0",
        "threads per rank; 0: OMP_NUM_THREADS or, if it is not set, the cores of the host divided by its ranks"),
    INT("check-replicas", check_replicas, 0, 1 << 30, "N", "100",
        "every N steps, compare hashes of the weights that replicas, or the ranks of no_shard, have in common; 0: only "
        "before a checkpoint"),
    REAL(
        "timeout", timeout, 0.1, 1e6, "SECONDS", "600",
        "longest wait for another rank; four times as long during start-up, validation, saving and the end of the run"),
    REAL("start-timeout", start_timeout, 0.1, 1e6, "SECONDS", "120",
         "longest time that ranks on several hosts may take to connect, before they read anything"),
    TEXT("transport", transport, "threads|mpi|nccl", NULL,
         "communication backend (default: for GPUs nccl, or threads if all --ranks share the only GPU; for CPUs mpi "
         "under mpirun or srun, threads otherwise)"),
    INT("ranks", ranks, 0, 4096, "N", "0", "run N ranks as threads of one process, without mpirun; 0: one rank"),
    FLAG("deterministic", deterministic,
         "sum in a fixed order: FSDP and pipeline layouts with equally many micro-batches give equal bits, if the "
         "numbers of micro-batches and of ranks are powers of two"),
    TEXT("trace", trace, "FILE", NULL,
         "write a timeline of every op and collective, for chrome://tracing or ui.perfetto.dev; plan_llama3 --cluster "
         "writes the estimated timeline"),
    GROUP(TRAINER_TASKS),
    FLAG("plan", plan,
         "print memory, FLOPs and traffic of each kind of rank, found by dry runs; nothing large is allocated "
         "(plan_llama3 "
         "estimates step times, too)"),
    TEXT("eval", eval, "FILE", NULL,
         "print the loss, perplexity and bits per byte of a token file as one line of JSON"),
    TEXT("score", score, "FILE", NULL,
         "print the log-probability of each request of FILE, lines of JSON with \"context\" and \"continuation\" or "
         "\"context_ids\" and \"continuation_ids\""),
    TEXT("choices", choices, "FILE", NULL,
         "print the accuracy on multiple-choice tasks, lines of JSON with \"context\", \"endings\" and \"label\"; "
         "with --data after training"),
    INT("choices-every", choices_every, 0, 1 << 30, "N", "0",
        "with --data and --choices: compute the accuracy every N steps, too"),
    TEXT("export", export_dir, "DIR|FILE.gguf", NULL,
         "write the model as a Hugging Face directory, or as a GGUF file for llama.cpp and ollama: with --data after "
         "training, otherwise as it was loaded"),
    FLAG("merge", merge,
         "with --export: add the adapters to the model's weights, instead of writing the adapters alone"),
    TEXT("dtype", dtype, "fp32|fp16|bf16|int8|int8:all|q8_0", "fp32",
         "dtype of exported weights; int8: the matrices of blocks in int8, to be loaded as a frozen --base; int8:all: "
         "all tensors; q8_0: the matrices of a GGUF file in 8 bits"),
    TEXT_OR_EMPTY("generate", generate, "PROMPT", NULL, "continue a text"),
    TEXT("prompts", prompts, "FILE", NULL, "continue each line of a file, as --generate does; empty lines are skipped"),
    FLAG("chat", chat,
         "talk with an instruction-tuned model in the terminal, with its chat template; /reset, /system TEXT and /save "
         "FILE are commands, Ctrl-C stops an answer, Ctrl-D leaves; --seq is the longest conversation"),
    INT("max-tokens", max_tokens, 1, 1 << 20, "N", "100",
        "with --generate: how many tokens to generate; with --chat: the longest answer"),
    REAL("temperature", temperature, 0, 100, "X", "0.8",
         "with --generate and --chat: sampling temperature; 0: always take the most likely token"),
    REAL("top-p", top_p, 1e-6, 1, "X", "0.95",
         "with --generate and --chat: sample from the most likely tokens that together have this probability"),
    FLAG("help", help, "print this list"),
    FLAG(
        "version", version,
        "print what a bug report needs: commit, precision, compiler, features of the processor, versions of libraries"),
    GROUP(PLANNER_OPTIONS),
    TEXT("cluster", cluster, "FILE", NULL,
         "estimate the time of a step on the machines that FILE describes (examples in dev/clusters and dev/results); "
         "with "
         "--out, also write plan.html"),
    TEXT("simulate", simulate, "all|stages", "all",
         "all: dry-run and simulate every rank; stages: only one rank of each pipeline stage, which is much faster, "
         "but prints no alternative options and ignores that tensor-parallel ranks differ by a row where --tp does not "
         "divide a size"),
    FLAG("search", search,
         "with --cluster: list the fastest layouts that fit in memory and train as many sequences per step; options of "
         "the "
         "mesh, pipeline, sharding and recomputation that are given stay fixed"),
    REAL("mtbf", mtbf, 1e-6, 1e12, "HOURS", NULL,
         "simulate failures over the run of --steps steps: mean time between failures of one host; prints the best "
         "interval between checkpoints and the part of the time that trains"),
    INT("hosts", hosts, 1, 1 << 20, "N", NULL, "with --mtbf: hosts of the run, instead of those of the cluster file"),
    INT("spares", spares, 0, 1 << 20, "N", "0", "with --mtbf: hosts that replace failed ones"),
    REAL("repair", repair, 0, 1e6, "HOURS", "4", "with --mtbf: until a failed host is back"),
    REAL("detect", detect, 0, 1e6, "SECONDS", NULL,
         "with --mtbf: until a failure is noticed and the run has ended (default: --timeout)"),
    REAL("relaunch", relaunch, 0, 1e6, "SECONDS", "120",
         "with --mtbf: from starting the run again until it trains, with reading the checkpoint"),
    REAL("step-seconds", step_seconds, 1e-9, 1e6, "X", NULL,
         "with --mtbf: measured time of a step, instead of the cluster file's estimate"),
    REAL("save-seconds", save_seconds, 0, 1e6, "X", NULL,
         "with --mtbf: measured time of a save, which a run prints, instead of an estimate"),
    REAL("pause-seconds", pause_seconds, 0, 1e6, "X", NULL,
         "with --mtbf: for how long a save stops training with --save-mode async, which a run prints"),
};
#undef FIELD
enum { OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };
static_assert((int)OPTION_ROWS <= (int)sizeof(((Options *)0)->given), "Options.given has room for every row");

/* The row of an option, by its name without dashes; NULL: there is none. */
static const OptionRow *option_find(const char *name) { return option_row(option_rows, OPTION_ROWS, name); }

/* Is it an option of plan_llama3? */
static int is_planner_option(const OptionRow *row) {
    while (row->kind != OPT_GROUP) row--;
    return !strcmp(row->name, PLANNER_OPTIONS);
}
static int program_takes(Program program, const OptionRow *row) {
    return program == PLAN_LLAMA3 || !is_planner_option(row) ||
           (program == CHECK_HOSTS && !strcmp(row->name, "cluster"));
}

/* Is there anything to train on? */
static int options_train(const Options *o) { return o->data || o->recipe; }

static int option_given(const Options *o, const char *name) { return o->given[option_find(name) - option_rows]; }

/* Resolves --min-lr -1. `place`: of the options in a recipe, for errors; "": the command line. */
static void options_check_rate(Options *o, const char *place) {
    int decays = !strcmp(o->lr_schedule, "wsd"), is_constant = !strcmp(o->lr_schedule, "constant");
    int is_field = place[0] != 0;
    const char *colon = is_field ? ": " : "", *minimum = is_field ? "\"min_lr\"" : "--min-lr",
               *decay = is_field ? "\"lr_decay\"" : "--lr-decay",
               *schedule = is_field ? "\"lr_schedule\"" : "--lr-schedule";
    if (o->min_lr < 0 && o->min_lr != -1)
        user_error("%s%s%s %g: expected 0 or more, or -1 for a tenth of the peak", place, colon, minimum, o->min_lr);
    if (o->lr_decay && !decays)
        user_error("%s%s%s %d has no effect with %s %s: use %s wsd, or remove %s", place, colon, decay, o->lr_decay,
                   schedule, o->lr_schedule, schedule, decay);
    if (o->min_lr >= 0 && is_constant && o->min_lr != o->lr) // config.txt has the rate as its minimum
        user_error("%s%s%s %g has no effect with %s constant: remove %s, or use another schedule", place, colon,
                   minimum, o->min_lr, schedule, minimum);
    if (o->min_lr < 0) o->min_lr = is_constant ? o->lr : o->lr / 10;
}

/* Options of earlier versions, and what replaces them. */
typedef struct {
    const char *name;
    const char *program; // that does it now; NULL: none does
    const char *option;  // as which that program takes it; NULL: it is all that the program does
    int has_value;
    const char *takes;   // the other options that the program takes, each between commas; NULL: those of train_llama3
    const char *reason;  // why the option was removed, if no program does it
} RetiredOption;
static const RetiredOption retired_options[] = {
    {"check-hosts", "check_hosts", NULL, 0, NULL, NULL},
    {"encode", "tokens_llama3", "encode", 1, ",tokenizer,", NULL},
    {"decode", "tokens_llama3", "decode", 1, ",tokenizer,", NULL},
    {"audit", "tokens_llama3", "audit", 0, ",out,", NULL},
    {"matmul-choices", NULL, NULL, 1, NULL, "it made training no faster"},
};

/* Writes the command that replaces one with a retired option at argv[at]. */
static void write_new_command(FILE *f, const RetiredOption *retired, int argc, char **argv, int at) {
    const char *slash = strrchr(argv[0], '/');
    int has_cuda_form = CUDA_BUILD && !retired->takes;
    fprintf(f, "%.*s%s%s", slash ? (int)(slash + 1 - argv[0]) : 0, argv[0], retired->program,
            has_cuda_form ? "_cuda" : "");
    for (int i = 1; i < argc; i++) {
        char name[64], listed[66];
        option_name(name, sizeof name, argv[i]);
        snprintf(listed, sizeof listed, ",%s,", name);
        const OptionRow *row = option_find(name);
        int takes_value = i == at ? retired->has_value : row && row->kind != OPT_FLAG;
        int has_value = takes_value && !strchr(argv[i], '=') && i + 1 < argc; // in the next word
        int is_kept = i == at ? retired->option != NULL : !retired->takes || strstr(retired->takes, listed);
        for (int word = i; word <= i + has_value && is_kept; word++) {
            fputc(' ', f);
            write_shell_word(f, argv[word]);
        }
        i += has_value;
    }
}

/* Refuses an option that was retired, at argv[at], with the command that replaces it. */
static void refuse_retired(int argc, char **argv, int at) {
    char name[64], *command;
    size_t length;
    option_name(name, sizeof name, argv[at]);
    for (size_t i = 0; i < sizeof retired_options / sizeof *retired_options; i++) {
        const RetiredOption *retired = &retired_options[i];
        if (strcmp(name, retired->name)) continue;
        if (!retired->program) user_error("--%s was removed, because %s: leave it out", name, retired->reason);
        FILE *f = text_stream_open(&command, &length);
        write_new_command(f, retired, argc, argv, at);
        text_stream_close(f);
        user_error("--%s is not an option of this program any more: run %s", name, command);
    }
}

static Options options_parse(int argc, char **argv) {
    Options o = ZERO;
    options_set_defaults(&o, option_rows, OPTION_ROWS);
    for (int i = 1; i < argc; i++) {
        int first = i;
        const OptionRow *row = option_read(&o, option_rows, OPTION_ROWS, argc, argv, &i);
        if (!row) {
            refuse_retired(argc, argv, first);
            user_error("unknown option %s: ./train_llama3 --help lists all options", argv[first]);
        }
        o.given[row - option_rows] = 1;
    }
    options_check_rate(&o, "");
    if (o.outlier_window == 1)
        user_error("--outlier-window 1: expected 2 or more steps, since one value has no standard deviation, or 0 to "
                   "skip no outliers");
    return o;
}

static int uses_muon(const Options *o) { return !strcmp(o->optimizer, "muon"); }

static void option_text(const Options *o, const char *name, char *value, size_t size) {
    option_as_text(o, option_find(name), value, size);
}

/* config.txt: all options in force, one per line, as they would be typed; with a recipe, which changes options from
 * stage to stage, those that were given. Options of the planner are left out. */
static void options_write(const Options *o, FILE *f) {
    char value[4096];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (o->recipe && !o->given[i]) continue;
        if (is_planner_option(row) || !option_as_text(o, row, value, sizeof value)) continue;
        if (row->kind == OPT_FLAG) fprintf(f, "--%s\n", row->name);
        else fprintf(f, "--%s %s\n", row->name, value);
    }
}

/* The options that a program takes. */
static void options_print_help(FILE *f, Program program) {
    int is_hidden = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->kind == OPT_GROUP) {
            is_hidden = (!strcmp(row->name, TRAINER_TASKS) && program != TRAIN_LLAMA3) ||
                        (!strcmp(row->name, PLANNER_OPTIONS) && program == TRAIN_LLAMA3);
            if (!is_hidden) fprintf(f, "%s\n", row->name);
            continue;
        }
        if (is_hidden || (is_planner_option(row) && !program_takes(program, row))) continue;
        option_print_help(f, row);
    }
}

#endif
