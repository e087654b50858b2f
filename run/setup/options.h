/* options.h: the command line. One table parses it, checks it, and prints --help and config.txt.
 *
 * To add an option, add a row and a field of RunSettings. A caller may rely on: after options_parse every value is
 * within its row's bounds, or 0 or NULL if its option has no default and was not given. Options never change. What a
 * run uses are the RunSettings of its Job, a copy that job_open (job.h) completes where an option says 0 or auto, and
 * where the model, the checkpoint, the adapters, the mesh or a recipe decide. */
#ifndef OPTIONS_H
#define OPTIONS_H
#include "../../dataloader.h"   // defines: LOADER_MAX_WORKERS
#include "../../fsdp.h"         // defines: STRATEGY_NAMES, MAX_SLOTS
#include "../../optimizer.h"    // defines: RATE_SHAPE_NAMES, rate_shape_names
#include "option_table.h"       // defines: OptionRow, option_read, option_set, option_as_text, write_shell_word
#include "../checks/outliers.h" // defines: MAX_OUTLIER_WINDOW
#include "../../lib/io/json.h"  // defines: text_stream_open

// ---------------------------------------------------------------------------
// options of earlier versions, and what does their work now
//
// One table serves a command line, a config.txt that is given back as options, and the settings of an old checkpoint. A
// caller may rely on: a retired option at its old default is accepted and has no effect; with another value it is
// refused with the whole command that replaces it, ready to be pasted into a shell.

/* Options of train_llama3 that other programs take too, each between commas. */
#define OPTIONS_OF_LAYOUT                                                                                              \
    ",tp,cp,pp,dp-shard,dp-replicate,pp-schedule,pp-chunks,pp-light-ends,sharding,wrap,slots,threads,timeout,"         \
    "transport,ranks,deterministic,help,version,"
#define OPTIONS_OF_MODEL OPTIONS_OF_LAYOUT "model,vocab-size,tokenizer,adapters,base,lora-rank,lora-alpha,lora-targets,"
static const char options_of_generate[] = OPTIONS_OF_MODEL "seq,seed,logit-rows,";
static const char options_of_eval[] = OPTIONS_OF_MODEL "seq,batch,doc-mask,logit-rows,";
static const char options_of_convert[] = OPTIONS_OF_MODEL;
static const char options_of_encode[] = ",tokenizer,", options_of_audit[] = ",out,";

typedef struct {
    const char *name;     // without the dashes
    const char *fallback; // the old default; NULL: it had none
    const char *program;  // that does it now; NULL: none does
    const char *option;   // as which that program takes it; NULL: it is all that the program does
    int has_value;
    const char *takes;  // the options of train_llama3 that the program takes, too; NULL: all
    const char *reason; // why the option was removed, if no program does it
} RetiredOption;
static const RetiredOption retired_options[] = {
    {"generate", NULL, "generate_llama3", "prompt", 1, options_of_generate, NULL},
    {"prompts", NULL, "generate_llama3", "prompts", 1, options_of_generate, NULL},
    {"chat", NULL, "generate_llama3", "chat", 0, options_of_generate, NULL},
    {"max-tokens", "100", "generate_llama3", "max-tokens", 1, options_of_generate, NULL},
    {"temperature", "0.8", "generate_llama3", "temperature", 1, options_of_generate, NULL},
    {"top-p", "0.95", "generate_llama3", "top-p", 1, options_of_generate, NULL},
    {"eval", NULL, "eval_llama3", "eval", 1, options_of_eval, NULL},
    {"score", NULL, "eval_llama3", "score", 1, options_of_eval, NULL},
    {"choices", NULL, "eval_llama3", "choices", 1, options_of_eval, NULL},
    {"choices-every", "0", NULL, NULL, 1, NULL,
     "eval_llama3 computes it: add --save-every N --after-save './eval_llama3 --model \"$1\" --choices FILE'"},
    {"export", NULL, "convert_llama3", "export", 1, options_of_convert, NULL},
    {"dtype", "fp32", "convert_llama3", "dtype", 1, options_of_convert, NULL},
    {"merge", NULL, "convert_llama3", "merge", 0, options_of_convert, NULL},
    {"plan", NULL, "plan_llama3", NULL, 0, NULL, NULL},
    {"world", "0", "plan_llama3", "world", 1, NULL, NULL},
    {"cluster", NULL, "plan_llama3", "cluster", 1, NULL, NULL},
    {"simulate", "all", "plan_llama3", "simulate", 1, NULL, NULL},
    {"search", NULL, "plan_llama3", "search", 0, NULL, NULL},
    {"mtbf", NULL, "plan_llama3", "mtbf", 1, NULL, NULL},
    {"hosts", NULL, "plan_llama3", "hosts", 1, NULL, NULL},
    {"spares", "0", "plan_llama3", "spares", 1, NULL, NULL},
    {"repair", "4", "plan_llama3", "repair", 1, NULL, NULL},
    {"detect", NULL, "plan_llama3", "detect", 1, NULL, NULL},
    {"relaunch", "120", "plan_llama3", "relaunch", 1, NULL, NULL},
    {"step-seconds", NULL, "plan_llama3", "step-seconds", 1, NULL, NULL},
    {"save-seconds", NULL, "plan_llama3", "save-seconds", 1, NULL, NULL},
    {"pause-seconds", NULL, "plan_llama3", "pause-seconds", 1, NULL, NULL},
    {"check-hosts", NULL, "check_hosts", NULL, 0, NULL, NULL},
    {"encode", NULL, "tokens_llama3", "encode", 1, options_of_encode, NULL},
    {"decode", NULL, "tokens_llama3", "decode", 1, options_of_encode, NULL},
    {"audit", NULL, "tokens_llama3", "audit", 0, options_of_audit, NULL},
    {"muon-momentum", "0.95", NULL, NULL, 1, NULL, "give the momentum as --optimizer muon:X"},
    {"lr-decay", "0", NULL, NULL, 1, NULL, "give the steps of the decay as --lr-schedule wsd:N"},
    {"max-skips", "10", NULL, NULL, 1, NULL, "a run ends after 10 steps whose loss or gradient norm is not finite"},
    {"check-replicas", "100", NULL, NULL, 1, NULL, "replicas are compared every 100 steps and before each save"},
    {"start-timeout", "120", NULL, NULL, 1, NULL, "ranks may take four times --timeout to connect, at most 120 s"},
    {"outlier-z", "6", NULL, NULL, 1, NULL, "an outlier is more than 6 standard deviations above the mean"},
    {"matmul-choices", NULL, NULL, NULL, 1, NULL, "it made training no faster"},
};

/* The retired option that a word "--name" or "--name=value" names; NULL: none. */
static const RetiredOption *retired_find(const char *word) {
    char name[64];
    option_name(name, sizeof name, word);
    for (size_t i = 0; i < sizeof retired_options / sizeof *retired_options; i++)
        if (!strcmp(name, retired_options[i].name)) return &retired_options[i];
    return NULL;
}

/* Is the option that `word` ("--name" or "--name=value") names in the list `takes`? NULL: every option is. */
static int takes_option(const char *takes, const char *word) {
    char name[64];
    option_name(name, sizeof name, word);
    return option_listed(takes, name);
}

/* Writes the command that replaces one with the option `retired`: the program, with the options that it takes. */
static void write_new_command(FILE *f, const RetiredOption *retired, int argc, char **argv) {
    const char *slash = strrchr(argv[0], '/');
    int has_cuda_form = CUDA_BUILD && strcmp(retired->program, "tokens_llama3");
    char path[4096];
    snprintf(path, sizeof path, "%.*s%s%s", slash ? (int)(slash + 1 - argv[0]) : 0, argv[0], retired->program,
             has_cuda_form ? "_cuda" : "");
    write_shell_word(f, path);
    for (int i = 1; i < argc; i++) {
        const RetiredOption *other = retired_find(argv[i]);
        int takes_value = other ? other->has_value : i + 1 < argc && strncmp(argv[i + 1], "--", 2);
        int has_value = takes_value && !strchr(argv[i], '=') && i + 1 < argc; // in the next word
        int is_kept = other ? other->option && other->program && !strcmp(other->program, retired->program)
                            : takes_option(retired->takes, argv[i]);
        if (is_kept && other) fprintf(f, " --%s%s", other->option, strchr(argv[i], '=') ? "=" : "");
        if (is_kept && other && strchr(argv[i], '=')) write_shell_word(f, strchr(argv[i], '=') + 1);
        for (int word = other ? i + 1 : i; word <= i + has_value && is_kept; word++) {
            fputc(' ', f);
            write_shell_word(f, argv[word]);
        }
        i += has_value;
    }
}

/* Passes over a retired option at argv[*at] with its old default; refuses other values. Returns 0 if there is none. */
static int skip_retired(int argc, char **argv, int *at) {
    const RetiredOption *retired = retired_find(argv[*at]);
    const char *equals = strchr(argv[*at], '='), *value = equals ? equals + 1 : NULL;
    char *command;
    size_t length;
    if (!retired) return 0;
    if (!value && retired->has_value && *at + 1 < argc) value = argv[*at + 1];
    if (retired->fallback && value && !strcmp(value, retired->fallback)) {
        *at += !equals;
        return 1;
    }
    if (!retired->program) user_error("--%s was removed: %s", retired->name, retired->reason);
    FILE *f = text_stream_open(&command, &length);
    write_new_command(f, retired, argc, argv);
    text_stream_close(f);
    user_error("--%s is not an option of this program any more: run %s", retired->name, command);
}

// ---------------------------------------------------------------------------
// today's options

// the values of options that are choices, in the order of the table; those of lr_schedule are RateShape (optimizer.h)
enum { TAIL_DROP, TAIL_PAD };
enum { ACCUMULATE_SHARDED, ACCUMULATE_LOCALLY };
enum { SCHEDULE_1F1B, SCHEDULE_INTERLEAVED };
enum { REDUCE_FP32, REDUCE_BF16 };
enum { OFFLOAD_NONE, OFFLOAD_OPTIMIZER, OFFLOAD_ALL };
enum { SAVE_SYNC, SAVE_ASYNC };
enum { WRAP_BLOCK, WRAP_SIZE };
enum { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL, RECOMPUTE_EVERY };
enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };
enum { BASE_AUTO, BASE_OF_FP32, BASE_OF_BF16, BASE_OF_INT8, BASE_OF_INT8_ALL };
enum { TRANSPORT_AUTO, TRANSPORT_THREADS, TRANSPORT_MPI, TRANSPORT_NCCL };

typedef struct { // in the groups of --help; the table below says what each one means
    const char *model, *tokenizer;
    int vocab_size;
    const char *data, *val;
    int tail, workers, doc_mask;
    int seq, batch, accum, accumulate;
    int tp, cp, pp, dp_shard, dp_replicate; // 0: auto
    int pp_schedule, pp_chunks, pp_light_ends;
    int sharding, wrap, slots, reduce_dtype, offload; // sharding: index into strategies (fsdp.h)
    int64_t wrap_size;                                // parameters; 0: one block
    int recompute, logit_rows;
    int64_t recompute_every; // blocks
    const char *recipe;
    int optimizer, steps, lr_schedule, lr_decay, warmup, outlier_window;
    double lr, min_lr, muon_momentum, weight_decay, beta1, beta2, eps, clip, z_loss, outlier_z;
    const char *lora_targets, *adapters;
    int lora_rank, base;
    double lora_alpha;
    const char *out, *after_save, *resume, *trace;
    int save_every, save_mode, keep, allow_changes, val_every, val_batches, seed, threads, ranks, transport;
    int deterministic;
    double timeout;   // seconds
    const char *help; // what --help explains, instead of a run; "": it lists all; NULL: it was not given
    int version;      // asked for, instead of a run
} RunSettings;

typedef struct {
    RunSettings run; // what was given, and defaults for the rest
    char given[128]; // 1 for each row of the table that was on the command line
} Options;

#define FIELD(f) offsetof(RunSettings, f)
#define SIZE(f) sizeof(((RunSettings *)0)->f)
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
    CHOICE("tail", tail, "drop|pad", "drop",
           "an epoch's last, incomplete step: drop it, or pad it with samples from the epoch's start"),
    INT("workers", workers, 0, LOADER_MAX_WORKERS, "N", "0",
        "threads per rank that read samples ahead; 0: one per core, at most 4"),
    FLAG("doc-mask", doc_mask, "attention stays within a document, whose end the token files mark"),
    GROUP("batch"),
    INT("seq", seq, 0, 1 << 24, "T", "0",
        "tokens per sample; 0: the model's default, which for a Hugging Face directory is its "
        "max_position_embeddings, on a GPU at most 4096 and on a CPU at most 256"),
    INT("batch", batch, 0, 1 << 20, "B", "0", "samples per micro-batch and rank; 0: the model's default"),
    INT("accum", accum, 1, 1 << 16, "K", "1", "micro-batches per step"),
    CHOICE("accumulate", accumulate, "sharded|local", "sharded",
           "reduce gradients to their shards after every micro-batch, or accumulate them locally and reduce once per "
           "step (less communication, 4 more bytes per parameter)"),
    GROUP("mesh"),
    INT("tp", tp, 0, 1 << 20, "N|auto", "1",
        "tensor parallelism with sequence parallelism: split every matrix over N ranks, best within one host; N must "
        "divide the query heads and the key/value heads"),
    INT("cp", cp, 0, 1 << 20, "N|auto", "1",
        "context parallelism for long sequences: split each sequence over N ranks, which all-gather keys and values; "
        "FSDP shards parameters over these ranks too"),
    INT("pp", pp, 0, 1 << 20, "N|auto", "1",
        "pipeline parallelism: N stages with a part of the blocks each; --accum should be several times N; the "
        "defaults become --sharding shard_grad_op --accumulate local"),
    CHOICE(
        "pp-schedule", pp_schedule, "1f1b|interleaved", "1f1b",
        "1f1b: one stage per rank, one forward and one backward in turn; interleaved: several virtual stages per rank "
        "(--pp-chunks), which idle less and send more messages"),
    INT("pp-chunks", pp_chunks, 0, MAX_STAGES, "V", "0",
        "virtual stages per rank; 0: 1 with 1f1b, 2 with interleaved; if there are several, --accum must be a "
        "multiple of --pp"),
    FLAG("pp-light-ends", pp_light_ends,
         "give the first and the last virtual stage one block fewer, to balance the embedding and the head"),
    INT("dp-shard", dp_shard, 0, 1 << 20, "N|auto", "auto",
        "ranks over which FSDP shards the parameters; auto: all that the other dimensions leave"),
    INT("dp-replicate", dp_replicate, 0, 1 << 20, "N|auto", "1",
        "replicas of the sharded model (hybrid sharding); their gradients are summed once per step"),
    GROUP("sharding"),
    CHOICE("sharding", sharding, STRATEGY_NAMES, "full_shard",
           "full_shard: ZeRO-3; shard_grad_op: ZeRO-2, weights stay unsharded from forward to backward; no_shard: "
           "DDP, every rank holds all state"),
    CHOICE_OR_NUMBER("wrap", wrap, wrap_size, "block|size:N", "block",
                     "what one FSDP unit holds: a block, or as many blocks as have N parameters together"),
    INT("slots", slots, 2, MAX_SLOTS - 2, "N", "2",
        "how many blocks may be unsharded at once; 2 prefetches one block ahead"),
    CHOICE("reduce-dtype", reduce_dtype, "fp32|bf16", "fp32",
           "dtype in which gradients are sent; they are summed in fp32, except by NCCL, which sums in this dtype"),
    CHOICE("offload", offload, "none|optimizer|all", "none",
           "keep the optimizer's state, or all sharded state, " OFFLOAD_HELP),
    GROUP("memory"),
    CHOICE_OR_NUMBER(
        "recompute", recompute, recompute_every, "none|selective|full|every:N", "none",
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
    CHOICE_OR_NUMBER(
        "optimizer", optimizer, muon_momentum, "adamw|muon|muon:X", "adamw",
        "muon: orthogonalized momentum (Nesterov, X, 0.95) for the matrices of the blocks, AdamW for everything "
        "else, both with --lr; keeps 12 instead of 16 bytes per parameter of these matrices"),
    REAL("lr", lr, 0, 1e3, "X", "0.0003", "peak learning rate"),
    CHOICE_OR_NUMBER(
        "lr-schedule", lr_schedule, lr_decay, RATE_SHAPE_NAMES "|wsd:N", "cosine",
        "what follows the warm-up: a cosine or a straight line down to --min-lr, --lr until the end (constant), or "
        "--lr until the last N steps, a tenth of all, which fall to --min-lr in a straight line (wsd)"),
    REAL("min-lr", min_lr, -1, 1e3, "X", "-1", "learning rate after the last step; -1: a tenth of --lr"),
    INT("warmup", warmup, 0, 1 << 30, "N", "10", "steps of linear warm-up"),
    REAL("weight-decay", weight_decay, 0, 1e3, "X", "0.1", "AdamW's weight decay; norm weights have none"),
    REAL("beta1", beta1, 0, 0.999999999, "X", "0.9", "AdamW's decay rate of the first moment"),
    REAL("beta2", beta2, 0, 0.999999999, "X", "0.95", "AdamW's decay rate of the second moment"),
    REAL("eps", eps, 0, 1, "X", "1e-8", "AdamW's epsilon"),
    REAL("clip", clip, 0, 1e30, "X", "1",
         "largest global gradient norm; larger gradients are scaled down to it; 0: no clipping"),
    REAL("z-loss", z_loss, 0, 1e3, "X", "0",
         "also minimize X times the square of log Z, where Z is the denominator of each target's softmax; keeps "
         "logits from drifting; reported apart from the loss; 1e-4 is usual; 0: off"),
    INT("outlier-window", outlier_window, 0, MAX_OUTLIER_WINDOW, "N", "0",
        "skip the update of a step whose loss or gradient norm is more than 6 standard deviations above the mean of "
        "the last N steps; 0: off"),
    GROUP("adapters"),
    INT("lora-rank", lora_rank, 0, 1 << 16, "R", "0",
        "train LoRA adapters of this rank and freeze the model; 0: train the model"),
    REAL("lora-alpha", lora_alpha, 0, 1e6, "X", "0",
         "LoRA scaling factor alpha; the update is multiplied by alpha / rank; 0: twice the rank"),
    TEXT("lora-targets", lora_targets, "NAMES", "q,k,v,o,gate,up,down",
         "linear layers that have adapters, separated by commas"),
    CHOICE("base", base, "auto|fp32|bf16|int8|int8:all", "auto",
           "with adapters, how the frozen model is stored: in the precision of the build, with the matrices of its "
           "blocks in int8 (64 weights share a scale), or with all tensors in int8; auto: as in the model's files if "
           "these are int8, else in the precision of the build"),
    TEXT("adapters", adapters, "DIR", NULL,
         "adapters to start from: adapter_config.json and adapter_model.safetensors, as Hugging Face PEFT has them"),
    GROUP("run"),
    TEXT("out", out, "DIR", NULL,
         "directory for checkpoints, metrics.jsonl, run.html (a page to watch the run) and other reports"),
    INT("save-every", save_every, 0, 1 << 30, "N", "0",
        "save a checkpoint every N steps and after the last one; 0: only after the last one; SIGUSR1 saves one too, "
        "SIGUSR2, SIGTERM, SIGINT (Ctrl-C) and SIGHUP save one and end the run with exit code 75"),
    CHOICE("save-mode", save_mode, "sync|async", "sync",
           "async: copy the state to memory, which the plan includes, and write it while training continues"),
    INT("keep", keep, 0, 1 << 30, "K", "0", "keep the newest K checkpoints and remove older ones; 0: keep all"),
    TEXT("after-save", after_save, "CMD", NULL,
         "run sh -c CMD after each save, while training continues, with the checkpoint's path as \"$1\"; its output "
         "is in OUT/after-save.log; a failure is reported, and the run goes on; at its end it waits for the command"),
    TEXT("resume", resume, "DIR|auto", NULL,
         "resume from a checkpoint, whatever parallel layout wrote it; auto: from the newest one in --out, if there "
         "is one"),
    FLAG("allow-changes", allow_changes, "resume even if options that affect the training result have changed"),
    INT("val-every", val_every, 0, 1 << 30, "N", "0",
        "validate every N steps and after the last one; 0: only after the last one"),
    INT("val-batches", val_batches, 0, 1 << 30, "N", "0", "micro-batches per rank in a validation; 0: the whole file"),
    INT("seed", seed, 0, INT32_MAX, "N", "1", "seed of the initial weights and of shuffling"),
    INT("threads", threads, 0, 1024, "N", "0",
        "threads per rank; 0: OMP_NUM_THREADS or, if it is not set, the cores of the host divided by its ranks"),
    REAL(
        "timeout", timeout, 0.1, 1e6, "SECONDS", "600",
        "longest wait for another rank; four times as long during start-up, validation, saving and the end of the run"),
    CHOICE(
        "transport", transport, "auto|threads|mpi|nccl", "auto",
        "communication backend; auto: for GPUs nccl, or threads if all --ranks share the only GPU; for CPUs mpi under "
        "mpirun or srun, threads otherwise"),
    INT("ranks", ranks, 0, 4096, "N", "0", "run N ranks as threads of one process, without mpirun; 0: one rank"),
    FLAG("deterministic", deterministic,
         "sum in a fixed order: FSDP and pipeline layouts with equally many micro-batches give equal bits, if the "
         "numbers of micro-batches and of ranks are powers of two"),
    TEXT("trace", trace, "FILE", NULL,
         "write a timeline of every op and collective, for chrome://tracing or ui.perfetto.dev"),
    // settings that checkpoints and recipes name
    REAL("muon-momentum", muon_momentum, 0, 1, "X", "0.95", NULL),
    INT("lr-decay", lr_decay, 0, 1 << 30, "N", "0", NULL),
    REAL("outlier-z", outlier_z, 0, 1e6, "X", "6", NULL),
    TEXT_OR_ALONE("help", help, "[all|GROUP]", "list all options, or explain each, or those of a group"),
    FLAG("version", version, "print what a bug report needs: commit, precision, compiler, processor, libraries"),
};
#undef FIELD
#undef SIZE
enum { OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };
static_assert((int)OPTION_ROWS <= (int)sizeof(((Options *)0)->given), "Options.given has room for every row");

/* The row of an option, by its name without dashes; NULL: there is none. */
static const OptionRow *option_find(const char *name) { return option_row(option_rows, OPTION_ROWS, name); }

static int option_given(const Options *o, const char *name) { return o->given[option_find(name) - option_rows]; }

static void option_text(const RunSettings *run, const char *name, char *value, size_t size) {
    option_as_text(run, option_find(name), value, size);
}

/* The text of a choice. Valid until the thread's next call. */
static const char *option_choice(const RunSettings *run, const char *name) {
    static __thread char text[64];
    option_text(run, name, text, sizeof text);
    return text;
}

/* Was the option given, with another value than its default? A config.txt that is given back has all of them. */
static int option_changed(const Options *o, const char *name) {
    RunSettings defaults = ZERO;
    char is[4096], was[4096];
    options_set_defaults(&defaults, option_rows, OPTION_ROWS);
    option_text(&o->run, name, is, sizeof is);
    option_text(&defaults, name, was, sizeof was);
    return option_given(o, name) && strcmp(is, was) != 0;
}

static int uses_muon(const RunSettings *run) { return run->optimizer == OPTIMIZER_MUON; }

/* Checks the learning rate's curve, and resolves --min-lr -1. `place`: within a recipe, for errors; or "". */
static void settings_check_rate(RunSettings *run, const char *place) {
    int decays = run->lr_schedule == RATE_WSD, is_constant = run->lr_schedule == RATE_CONSTANT;
    int is_field = place[0] != 0;
    const char *colon = is_field ? ": " : "", *minimum = is_field ? "\"min_lr\"" : "--min-lr",
               *schedule = is_field ? "\"lr_schedule\"" : "--lr-schedule";
    if (run->min_lr < 0 && run->min_lr != -1)
        user_error("%s%s%s %g: expected 0 or more, or -1 for a tenth of the peak", place, colon, minimum, run->min_lr);
    if (run->lr_decay && !decays) // in a recipe
        user_error("%s%s\"lr_decay\" %d has no effect with %s %s: use %s wsd, or remove \"lr_decay\"", place, colon,
                   run->lr_decay, schedule, rate_shape_names[run->lr_schedule], schedule);
    if (run->min_lr >= 0 && is_constant && run->min_lr != run->lr) // config.txt has the rate as its minimum
        user_error("%s%s%s %g has no effect with %s constant: remove %s, or use another schedule", place, colon,
                   minimum, run->min_lr, schedule, minimum);
    if (run->min_lr < 0) run->min_lr = is_constant ? run->lr : run->lr / 10;
}

static Options *options_open(void) {
    Options *o = new_array(Options, 1);
    options_set_defaults(&o->run, option_rows, OPTION_ROWS);
    return o;
}

/* Reads the option at argv[*at] and moves *at to its last word. Returns 0 if there is no such option. */
static int options_read(Options *o, int argc, char **argv, int *at) {
    const OptionRow *row = option_read(&o->run, option_rows, OPTION_ROWS, argc, argv, at);
    if (row) o->given[row - option_rows] = 1;
    return row != NULL;
}

/* What is known before the model and the machine are. */
static void options_check(Options *o) {
    settings_check_rate(&o->run, "");
    if (o->run.outlier_window == 1)
        user_error("--outlier-window 1: expected 2 or more steps, since one value has no standard deviation, or 0 to "
                   "skip no outliers");
}

/* Reads the command line of train_llama3. job_close frees what it returns. */
static const Options *options_parse(int argc, char **argv) {
    Options *o = options_open();
    for (int i = 1; i < argc; i++)
        if (!options_read(o, argc, argv, &i) && !skip_retired(argc, argv, &i))
            user_error("unknown option %s: ./train_llama3 --help lists all options", argv[i]);
    options_check(o);
    return o;
}

/* Prints what --help asks for. `own` (count): options of a program that does not train; `takes`: the trainer's. */
static void options_print_help(const OptionRow *own, int count, const char *takes, const char *group) {
    int explained = options_explain(own, count, NULL, group[0] ? group : "all");
    if (!group[0]) {
        if (count) printf("options of train_llama3\n");
        options_list(option_rows, OPTION_ROWS, takes);
        printf("--help GROUP explains the options of a group, --help all every option\n");
    } else if (options_explain(option_rows, OPTION_ROWS, takes, group) + explained == 0)
        user_error("--help %s: expected all, or a group of options that --help alone lists", group);
}

/* config.txt: all options in force, one per line, as they would be typed; with a recipe, those that were given. */
static void options_write(const Options *o, const RunSettings *run, FILE *f) {
    char value[4096];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (run->recipe && !o->given[i]) continue;
        if (!row->help || !strcmp(row->name, "help") || !option_as_text(run, row, value, sizeof value)) continue;
        if (!strcmp(row->name, "optimizer") && uses_muon(run))
            snprintf(value, sizeof value, "muon:%.9g", run->muon_momentum);
        if (!strcmp(row->name, "lr-schedule") && run->lr_decay) snprintf(value, sizeof value, "wsd:%d", run->lr_decay);
        if (row->kind == OPT_FLAG) fprintf(f, "--%s\n", row->name);
        else fprintf(f, "--%s %s\n", row->name, value);
    }
}

#endif
