/* options.h: the command line. One table parses it, checks it, and prints --help and config.txt.
 *
 * A row holds an option's name, values, bounds, default and help, and which field of Options stores it; to add an
 * option, add a row and a field. A caller may rely on: after options_parse every value is within its row's bounds.
 * job_prepare (job.h) checks whether options fit each other, the model and the machine.
 */
#ifndef OPTIONS_H
#define OPTIONS_H
#include "../dataloader.h" // defines: LOADER_MAX_WORKERS
#include "../fsdp.h"       // defines: STRATEGY_NAMES, MAX_SLOTS

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
    int steps, warmup, max_skips;
    double lr, min_lr, weight_decay, beta1, beta2, eps, clip;
    const char *lora_targets, *base, *adapters;
    int lora_rank;
    double lora_alpha;
    const char *out, *save_mode, *resume, *transport, *trace;
    int save_every, keep, allow_changes, val_every, val_batches, seed, threads, ranks, check_replicas, deterministic;
    double timeout; // seconds
    const char *cluster, *eval, *export_dir, *dtype, *generate, *encode, *decode;
    int plan, world, search, merge, max_tokens, audit, help;
    int is_planner; // not an option: plan_llama3 is running, not train_llama3
    double temperature, top_p;
    uint64_t given[2]; // bit i: row i of the table was on the command line
} Options;

typedef enum { OPT_GROUP, OPT_INT, OPT_REAL, OPT_TEXT, OPT_FLAG } OptionKind;

typedef struct {
    OptionKind kind;
    const char *name;     // without the dashes; OPT_GROUP: the heading in --help
    size_t offset;        // of the field in Options
    double low, high;     // smallest and largest value of a number
    const char *values;   // lower case: the choices, separated by |; capitals: a placeholder for --help
    const char *fallback; // default, as it would be typed; NULL: none
    const char *help;
} OptionRow;

#define FIELD(f) offsetof(Options, f)
#define TRAINER_TASKS "do instead of training"
#define PLANNER_OPTIONS "estimate a run (plan_llama3)"
static const OptionRow option_rows[] = {
    {OPT_GROUP, "model", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "model", FIELD(model), 0, 0, "NAME|DIR", "tiny",
     "a preset, or a Hugging Face directory (config.json and, if present, its weights)"},
    {OPT_INT, "vocab-size", FIELD(vocab_size), 0, 1 << 28, "N", "0",
     "vocabulary size, instead of the model's; 0: the model's"},
    {OPT_TEXT, "tokenizer", FIELD(tokenizer), 0, 0, "FILE", NULL,
     "tokenizer.model; by default the one next to the data or, failing that, next to the model"},
    {OPT_GROUP, "data", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "data", FIELD(data), 0, 0, "FILE|GLOB", NULL, "token files to train on"},
    {OPT_TEXT, "val", FIELD(val), 0, 0, "FILE|GLOB", NULL, "token files to validate on"},
    {OPT_TEXT, "tail", FIELD(tail), 0, 0, "drop|pad", "drop",
     "what to do with the last, incomplete step of an epoch: drop it, or pad it with samples from the start of the "
     "epoch"},
    {OPT_INT, "workers", FIELD(workers), 0, LOADER_MAX_WORKERS, "N", "0",
     "threads per rank that read samples ahead; 0: one per core, at most 4"},
    {OPT_FLAG, "doc-mask", FIELD(doc_mask), 0, 0, NULL, NULL,
     "attention stays within a document; documents end at the tokenizer's end-of-text token"},
    {OPT_GROUP, "batch", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "seq", FIELD(seq), 0, 1 << 24, "T", "0", "tokens per sample; 0: the model's default"},
    {OPT_INT, "batch", FIELD(batch), 0, 1 << 20, "B", "0", "samples per micro-batch and rank; 0: the model's default"},
    {OPT_INT, "accum", FIELD(accum), 1, 1 << 16, "K", "1", "micro-batches per step"},
    {OPT_TEXT, "accumulate", FIELD(accumulate), 0, 0, "sharded|local", "sharded",
     "reduce gradients to their shards after every micro-batch, or accumulate them locally and reduce once per step "
     "(less communication, 4 more bytes per parameter)"},
    {OPT_GROUP, "mesh", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "tp", FIELD(tp), 0, 1 << 20, "N|auto", "1",
     "tensor parallelism with sequence parallelism: split every matrix over N ranks, best within one host; N must "
     "divide the query heads and the key/value heads"},
    {OPT_INT, "cp", FIELD(cp), 0, 1 << 20, "N|auto", "1",
     "context parallelism for long sequences: split each sequence over N ranks, which all-gather keys and values; FSDP "
     "shards parameters over these ranks too"},
    {OPT_INT, "pp", FIELD(pp), 0, 1 << 20, "N|auto", "1",
     "pipeline parallelism: N stages with a part of the blocks each; --accum should be several times N; the defaults "
     "become --sharding shard_grad_op --accumulate local"},
    {OPT_INT, "world", FIELD(world), 0, 1 << 20, "N", "0",
     "with --plan, and in plan_llama3: the number of ranks; 0: as many as were started"},
    {OPT_TEXT, "pp-schedule", FIELD(pp_schedule), 0, 0, "1f1b|interleaved", "1f1b",
     "1f1b: one stage per rank, one forward and one backward in turn; interleaved: several virtual stages per rank "
     "(--pp-chunks), which idle less and send more messages"},
    {OPT_INT, "pp-chunks", FIELD(pp_chunks), 0, MAX_STAGES, "V", "0",
     "virtual stages per rank; 0: 1 with 1f1b, 2 with interleaved; if there are several, --accum must be a multiple of "
     "--pp"},
    {OPT_FLAG, "pp-light-ends", FIELD(pp_light_ends), 0, 0, NULL, NULL,
     "give the first and the last virtual stage one block fewer, to balance the embedding and the head"},
    {OPT_INT, "dp-shard", FIELD(dp_shard), 0, 1 << 20, "N|auto", "auto",
     "ranks over which FSDP shards the parameters; auto: all that the other dimensions leave"},
    {OPT_INT, "dp-replicate", FIELD(dp_replicate), 0, 1 << 20, "N|auto", "1",
     "replicas of the sharded model (hybrid sharding); their gradients are summed once per step"},
    {OPT_GROUP, "sharding", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "sharding", FIELD(sharding), 0, 0, STRATEGY_NAMES, "full_shard",
     "full_shard: ZeRO-3; shard_grad_op: ZeRO-2, weights stay unsharded from forward to backward; no_shard: DDP, every "
     "rank holds all state"},
    {OPT_TEXT, "wrap", FIELD(wrap), 0, 0, "block|size:N", "block",
     "what one FSDP unit holds: a block, or as many blocks as have N parameters together"},
    {OPT_INT, "slots", FIELD(slots), 2, MAX_SLOTS - 2, "N", "2",
     "how many blocks may be unsharded at once; 2 prefetches one block ahead"},
    {OPT_TEXT, "reduce-dtype", FIELD(reduce_dtype), 0, 0, "fp32|bf16", "fp32",
     "dtype in which gradients are sent; they are summed in fp32, except by NCCL, which sums in this dtype"},
    {OPT_TEXT, "offload", FIELD(offload), 0, 0, "none|optimizer|all", "none",
     "keep AdamW's moments, or all sharded state, " OFFLOAD_HELP},
    {OPT_GROUP, "memory", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "recompute", FIELD(recompute), 0, 0, "none|selective|full|every:N", "none",
     "activations to recompute in backward: norms and SwiGLU (selective), all but the inputs of blocks (full), or "
     "those of every Nth block"},
    {OPT_GROUP, "optimizer", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "steps", FIELD(steps), 1, 1 << 30, "N", "100", "optimizer steps"},
    {OPT_REAL, "lr", FIELD(lr), 0, 1e3, "X", "0.0003", "peak learning rate"},
    {OPT_REAL, "min-lr", FIELD(min_lr), -1, 1e3, "X", "-1", "learning rate after the last step; -1: a tenth of --lr"},
    {OPT_INT, "warmup", FIELD(warmup), 0, 1 << 30, "N", "10", "steps of linear warm-up, before the cosine decay"},
    {OPT_REAL, "weight-decay", FIELD(weight_decay), 0, 1e3, "X", "0.1", "AdamW's weight decay; norm weights have none"},
    {OPT_REAL, "beta1", FIELD(beta1), 0, 0.999999999, "X", "0.9", "AdamW's decay rate of the first moment"},
    {OPT_REAL, "beta2", FIELD(beta2), 0, 0.999999999, "X", "0.95", "AdamW's decay rate of the second moment"},
    {OPT_REAL, "eps", FIELD(eps), 0, 1, "X", "1e-8", "AdamW's epsilon"},
    {OPT_REAL, "clip", FIELD(clip), 0, 1e30, "X", "1",
     "largest global gradient norm; larger gradients are scaled down to it; 0: no clipping"},
    {OPT_INT, "max-skips", FIELD(max_skips), 0, 1 << 30, "N", "10",
     "how many steps with a gradient norm that is not finite are skipped before the run ends"},
    {OPT_GROUP, "adapters", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "lora-rank", FIELD(lora_rank), 0, 1 << 16, "R", "0",
     "train LoRA adapters of this rank and freeze the model; 0: train the model"},
    {OPT_REAL, "lora-alpha", FIELD(lora_alpha), 0, 1e6, "X", "0",
     "LoRA scaling factor alpha; the update is multiplied by alpha / rank; 0: twice the rank"},
    {OPT_TEXT, "lora-targets", FIELD(lora_targets), 0, 0, "NAMES", "q,k,v,o,gate,up,down",
     "linear layers that have adapters, separated by commas"},
    {OPT_TEXT, "base", FIELD(base), 0, 0, "fp32|bf16|int8|int8:all", NULL,
     "with adapters, how the frozen model is stored: in the precision of the build (the default), with the matrices of "
     "its blocks in int8 (64 weights share a scale), or with all tensors in int8; a model whose files are int8 stays "
     "so"},
    {OPT_TEXT, "adapters", FIELD(adapters), 0, 0, "DIR", NULL,
     "adapters to start from, to evaluate or to generate with: adapter_config.json and adapter_model.safetensors in "
     "the format of Hugging Face PEFT"},
    {OPT_GROUP, "run", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "out", FIELD(out), 0, 0, "DIR", NULL,
     "directory for checkpoints, metrics.jsonl, samples.jsonl, config.txt, layout.json, plan.json and ledger.json"},
    {OPT_INT, "save-every", FIELD(save_every), 0, 1 << 30, "N", "0",
     "save a checkpoint every N steps and after the last one; 0: only after the last one; SIGUSR1 saves one too, "
     "SIGUSR2 and SIGTERM save one and end the run with exit code 75"},
    {OPT_TEXT, "save-mode", FIELD(save_mode), 0, 0, "sync|async", "sync",
     "async: copy the state to memory, which the plan includes, and write it while training continues"},
    {OPT_INT, "keep", FIELD(keep), 0, 1 << 30, "K", "0",
     "keep the newest K checkpoints and remove older ones; 0: keep all"},
    {OPT_TEXT, "resume", FIELD(resume), 0, 0, "DIR|auto", NULL,
     "resume from a checkpoint, whatever parallel layout wrote it; auto: from the newest one in --out, if there is "
     "one"},
    {OPT_FLAG, "allow-changes", FIELD(allow_changes), 0, 0, NULL, NULL,
     "resume even if options that affect the training result have changed"},
    {OPT_INT, "val-every", FIELD(val_every), 0, 1 << 30, "N", "0",
     "validate every N steps and after the last one; 0: only after the last one"},
    {OPT_INT, "val-batches", FIELD(val_batches), 0, 1 << 30, "N", "0",
     "micro-batches per rank in a validation; 0: the whole file"},
    {OPT_INT, "seed", FIELD(seed), 0, INT32_MAX, "N", "1", "seed of the initial weights, of shuffling and of sampling"},
    {OPT_INT, "threads", FIELD(threads), 0, 1024, "N", "0",
     "threads per rank; 0: the cores of the host divided by its ranks"},
    {OPT_INT, "check-replicas", FIELD(check_replicas), 0, 1 << 30, "N", "100",
     "every N steps, compare hashes of the weights that replicas, or the ranks of no_shard, have in common; 0: only "
     "before a checkpoint"},
    {OPT_REAL, "timeout", FIELD(timeout), 0.1, 1e6, "SECONDS", "600",
     "longest wait for another rank; four times as long during start-up, validation, saving and the end of the run"},
    {OPT_TEXT, "transport", FIELD(transport), 0, 0, "threads|mpi|nccl", NULL,
     "communication backend (default: nccl for GPUs, mpi under mpirun or srun, threads otherwise)"},
    {OPT_INT, "ranks", FIELD(ranks), 0, 4096, "N", "0",
     "run N ranks as threads of one process, without mpirun; 0: one rank"},
    {OPT_FLAG, "deterministic", FIELD(deterministic), 0, 0, NULL, NULL,
     "sum in a fixed order: layouts with equally many micro-batches give equal bits, if the numbers of micro-batches "
     "and of ranks are powers of two"},
    {OPT_TEXT, "trace", FIELD(trace), 0, 0, "FILE", NULL,
     "write a timeline of every op and collective, for chrome://tracing or ui.perfetto.dev; plan_llama3 --cluster "
     "writes the estimated timeline"},
    {OPT_GROUP, TRAINER_TASKS, 0, 0, 0, NULL, NULL, NULL},
    {OPT_FLAG, "plan", FIELD(plan), 0, 0, NULL, NULL,
     "print memory, FLOPs and traffic of each kind of rank, found by dry runs; nothing large is allocated (plan_llama3 "
     "estimates step times, too)"},
    {OPT_TEXT, "eval", FIELD(eval), 0, 0, "FILE", NULL,
     "print the loss and perplexity of a token file as one line of JSON"},
    {OPT_TEXT, "export", FIELD(export_dir), 0, 0, "DIR", NULL,
     "write the model as a Hugging Face directory: with --data after training, otherwise as it was loaded"},
    {OPT_FLAG, "merge", FIELD(merge), 0, 0, NULL, NULL,
     "with --export: add the adapters to the model's weights, instead of writing the adapters alone"},
    {OPT_TEXT, "dtype", FIELD(dtype), 0, 0, "fp32|bf16|int8|int8:all", "fp32",
     "dtype of exported weights; int8: the matrices of blocks in int8, to be loaded as a frozen --base; int8:all: all "
     "tensors"},
    {OPT_TEXT, "generate", FIELD(generate), 0, 0, "PROMPT", NULL, "continue a text"},
    {OPT_INT, "max-tokens", FIELD(max_tokens), 1, 1 << 20, "N", "100", "with --generate: how many tokens to generate"},
    {OPT_REAL, "temperature", FIELD(temperature), 0, 100, "X", "0.8",
     "with --generate: sampling temperature; 0: always take the most likely token"},
    {OPT_REAL, "top-p", FIELD(top_p), 1e-6, 1, "X", "0.95",
     "with --generate: sample from the most likely tokens that together have this probability"},
    {OPT_FLAG, "audit", FIELD(audit), 0, 0, NULL, NULL,
     "check in samples.jsonl of --out that the run consumed every sample exactly once per epoch"},
    {OPT_TEXT, "encode", FIELD(encode), 0, 0, "FILE", NULL,
     "print the token ids of a text, one per line (needs --tokenizer)"},
    {OPT_TEXT, "decode", FIELD(decode), 0, 0, "FILE", NULL,
     "print the text of token ids, one per line (needs --tokenizer)"},
    {OPT_FLAG, "help", FIELD(help), 0, 0, NULL, NULL, "print this list"},
    {OPT_GROUP, PLANNER_OPTIONS, 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "cluster", FIELD(cluster), 0, 0, "FILE", NULL,
     "estimate the time of a step on the machines that FILE describes (examples in dev/clusters and dev/results); with "
     "--out, also write plan.html"},
    {OPT_FLAG, "search", FIELD(search), 0, 0, NULL, NULL,
     "with --cluster: list the fastest layouts that fit in memory and train as many sequences per step; options of the "
     "mesh, pipeline, sharding and recomputation that are given stay fixed"},
};
enum { OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };

/* Is `word`, up to a |, one of the choices "a|b|c"? */
static int is_listed_word(const char *word, const char *choices) {
    size_t n = strcspn(word, "|");
    if (word[n] || !n) return 0;
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (!strncmp(at, word, n) && (at[n] == '|' || !at[n])) return 1;
    return 0;
}

/* The number of a value "word:N", from 1 to 10^15; 0 if `value` has another form. */
static int64_t number_after_colon(const char *value, const char *word) {
    size_t n = strlen(word);
    if (strncmp(value, word, n) || value[n] != ':') return 0;
    const char *digits = value + n + 1;
    if (!digits[0] || digits[strspn(digits, "0123456789")] || strlen(digits) > 15) return 0;
    return strtoll(digits, NULL, 10);
}

/* Is `value` one of the choices? A choice like every:N stands for the word with any number. */
static int is_valid_choice(const char *value, const char *choices) {
    size_t n = strcspn(value, ":");
    int is_placeholder = value[n] && !strcmp(value + n, ":N");
    if (!is_placeholder && is_listed_word(value, choices)) return 1;
    if (!value[n]) return 0;
    char word[24], with_number[32];
    snprintf(word, sizeof word, "%.*s", (int)min_i64((int64_t)n, 20), value);
    snprintf(with_number, sizeof with_number, "%s:N", word);
    return is_listed_word(with_number, choices) && number_after_colon(value, word) > 0;
}

static void option_set_number(void *field, const OptionRow *row, const char *value) {
    int takes_auto = strstr(row->values, "auto") != NULL, is_auto = takes_auto && !strcmp(value, "auto");
    char *end = NULL;
    double x = is_auto ? 0 : strtod(value, &end);
    int has_other_letters = value[strspn(value, "+-.0123456789eE")] != 0; // strtod also reads inf, nan and 0x10
    int is_number = !has_other_letters && end != value && end && !*end;
    int is_in_range = x >= row->low && x <= row->high && (row->kind != OPT_INT || x == floor(x));
    if (!is_auto && !(is_number && is_in_range))
        user_error("--%s %s: expected a %snumber from %.10g to %.10g%s", row->name, value,
                   row->kind == OPT_INT ? "whole " : "", row->low, row->high, takes_auto ? ", or auto" : "");
    if (row->kind == OPT_INT) *(int *)field = (int)x;
    else *(double *)field = x;
}

static void option_set(Options *o, const OptionRow *row, const char *value) {
    void *field = (char *)o + row->offset;
    if (row->kind == OPT_FLAG) {
        *(int *)field = 1;
        return;
    }
    int may_be_empty = row->offset == FIELD(generate);
    if (!may_be_empty && !value[0])
        user_error("--%s needs a value: expected --%s %s", row->name, row->name, row->values);
    if (row->kind != OPT_TEXT) {
        option_set_number(field, row, value);
        return;
    }
    int is_placeholder = row->values[0] >= 'A' && row->values[0] <= 'Z'; // "FILE|GLOB" is no list of choices
    if (strchr(row->values, '|') && !is_placeholder && !is_valid_choice(value, row->values))
        user_error("--%s %s: expected one of %s", row->name, value, row->values);
    *(const char **)field = value;
}

/* The row of an option, by its name without dashes; NULL: there is none. */
static const OptionRow *option_find(const char *name) {
    for (int i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].kind != OPT_GROUP && !strcmp(option_rows[i].name, name)) return &option_rows[i];
    return NULL;
}

static int option_given(const Options *o, const char *name) {
    int64_t i = option_find(name) - option_rows;
    return (int)(o->given[i / 64] >> i % 64 & 1);
}

/* Reads "--name value", "--name=value" and "--flag". Texts point into argv. */
static Options options_parse(int argc, char **argv) {
    Options o = ZERO;
    for (int i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].fallback) option_set(&o, &option_rows[i], option_rows[i].fallback);
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
        char name[64] = "";
        size_t length = equals ? (size_t)(equals - word) : strlen(word);
        if (!strncmp(word, "--", 2) && length - 2 < sizeof name) memcpy(name, word + 2, length - 2);
        const OptionRow *row = option_find(name);
        if (!row) user_error("unknown option %s: ./train_llama3 --help lists all options", word);
        if (value && row->kind == OPT_FLAG) user_error("--%s takes no value: give --%s alone", name, name);
        if (!value && row->kind != OPT_FLAG && i + 1 < argc) value = argv[++i];
        if (!value && row->kind != OPT_FLAG)
            user_error("--%s needs a value: expected --%s %s", name, name, row->values);
        o.given[(row - option_rows) / 64] |= 1ull << (row - option_rows) % 64;
        option_set(&o, row, value);
    }
    if (o.min_lr < 0 && o.min_lr != -1)
        user_error("--min-lr %g: expected 0 or more, or -1 for a tenth of --lr", o.min_lr);
    if (o.min_lr < 0) o.min_lr = o.lr / 10;
    return o;
}

/* An option's value as it would be typed; flags: "on" or "off". Returns whether config.txt lists it. */
static int option_as_text(const Options *o, const OptionRow *row, char *value, size_t size) {
    const void *field = (const char *)o + row->offset;
    value[0] = 0;
    switch (row->kind) {
    case OPT_GROUP: return 0;
    case OPT_INT:
        snprintf(value, size, "%d", *(const int *)field);
        return 1;
    case OPT_REAL:
        snprintf(value, size, "%.9g", *(const double *)field);
        return 1;
    case OPT_TEXT:
        if (!*(const char *const *)field) return 0;
        snprintf(value, size, "%s", *(const char *const *)field);
        return 1;
    case OPT_FLAG:
        snprintf(value, size, *(const int *)field ? "on" : "off");
        return *(const int *)field;
    }
    return 0;
}

static void option_text(const Options *o, const char *name, char *value, size_t size) {
    option_as_text(o, option_find(name), value, size);
}

/* config.txt: all options in force, one per line, as they would be typed. */
static void options_write(const Options *o, FILE *f) {
    char value[4096];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (!option_as_text(o, row, value, sizeof value)) continue;
        if (row->kind == OPT_FLAG) fprintf(f, "--%s\n", row->name);
        else fprintf(f, "--%s %s\n", row->name, value);
    }
}

/* Prints the words of `text` from `indent` on; the cursor is at `column`. Lines break before column 112. */
static void print_wrapped(FILE *f, const char *text, int column, int indent) {
    for (const char *word = text; *word;) {
        int n = (int)strcspn(word, " ");
        int is_first = word == text;
        if (is_first ? column >= indent : column + 1 + n > 111) {
            fprintf(f, "\n");
            column = 0;
        }
        int space = column < indent ? indent - column : 1;
        column += fprintf(f, "%*s%.*s", space, "", n, word);
        word += n + (word[n] == ' ');
    }
    fprintf(f, "\n");
}

/* `is_planner`: the help of plan_llama3, else that of train_llama3. */
static void options_print_help(FILE *f, int is_planner) {
    enum { INDENT = 36 };
    const char *hidden_group = is_planner ? TRAINER_TASKS : PLANNER_OPTIONS;
    int is_hidden = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->kind == OPT_GROUP) is_hidden = !strcmp(row->name, hidden_group);
        if (is_hidden) continue;
        if (row->kind == OPT_GROUP) {
            fprintf(f, "%s\n", row->name);
            continue;
        }
        char help[1024];
        int used = snprintf(help, sizeof help, "%s", row->help);
        if (row->fallback) snprintf(help + used, sizeof help - (size_t)used, " (%s)", row->fallback);
        int column = fprintf(f, "  --%s %s", row->name, row->values ? row->values : "");
        print_wrapped(f, help, column, INDENT);
    }
}

#endif
