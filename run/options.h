/* options.h: the command line. One table parses, validates, prints --help and writes config.txt.
 *
 * Owns: every option's name, values, default and the field that holds it. A new option is a row and a field.
 * A caller may rely on: what options_parse returns is within each row's bounds. What options mean together is checked
 * where it is known: job_prepare (job.h).
 */
#ifndef OPTIONS_H
#define OPTIONS_H
#include "../fsdp.h"       // defines: STRATEGY_NAMES, MAX_SLOTS
#include "../dataloader.h" // defines: LOADER_MAX_WORKERS

typedef struct {
    const char *model, *tokenizer, *data, *val, *tail, *transport, *accumulate, *sharding, *wrap, *reduce_dtype,
        *recompute, *offload, *out, *eval, *generate, *encode, *decode, *export_dir, *dtype, *trace, *cluster,
        *save_mode, *resume, *pp_schedule, *lora_targets, *base, *adapters;
    int lora_rank, merge;
    int vocab_size, seq, batch, accum, tp, cp, pp, pp_chunks, pp_light_ends, dp_shard, dp_replicate, slots, max_skips,
        check_replicas, steps, warmup, val_every, val_batches, max_tokens;
    int seed, threads, ranks, plan, world, help, search, deterministic, workers, save_every, keep, allow_changes, audit,
        doc_mask;
    uint64_t given[2]; // bit i: row i of the table was on the command line
    double lora_alpha, lr, min_lr, weight_decay, beta1, beta2, eps, clip, timeout, temperature, top_p;
} Options;

typedef enum { OPT_GROUP, OPT_INT, OPT_REAL, OPT_TEXT, OPT_FLAG } OptionKind;

typedef struct {
    OptionKind kind;
    const char *name;     // without the dashes
    size_t offset;        // in Options
    double low, high;     // of numbers
    const char *values;   // what stands behind it: a word for --help, or the choices, parted by |
    const char *fallback; // as it would be typed; NULL: none
    const char *help;
} OptionRow;

#define FIELD(f) offsetof(Options, f)
static const OptionRow option_rows[] = {
    {OPT_GROUP, "model", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "model", FIELD(model), 0, 0, "NAME|DIR", "tiny",
     "a preset, or a Hugging Face directory (config.json, with weights if there are any)"},
    {OPT_INT, "vocab-size", FIELD(vocab_size), 0, 1 << 28, "N", "0",
     "overrides the model's vocabulary size; 0 keeps it"},
    {OPT_TEXT, "tokenizer", FIELD(tokenizer), 0, 0, "FILE", NULL,
     "tokenizer.model; default: beside the data, else beside the model"},
    {OPT_GROUP, "data", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "data", FIELD(data), 0, 0, "FILE|GLOB", NULL, "token files to train on"},
    {OPT_TEXT, "val", FIELD(val), 0, 0, "FILE|GLOB", NULL, "token files to validate on"},
    {OPT_TEXT, "tail", FIELD(tail), 0, 0, "drop|pad", "drop",
     "the last, incomplete step of an epoch: dropped, or padded with the epoch's head"},
    {OPT_INT, "workers", FIELD(workers), 0, LOADER_MAX_WORKERS, "N", "0",
     "threads of a rank that read ahead; 0: its cores, up to 4"},
    {OPT_FLAG, "doc-mask", FIELD(doc_mask), 0, 0, NULL, NULL,
     "attention sees tokens of its own document only; documents end with the tokenizer's end-of-text token"},
    {OPT_GROUP, "batch", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "seq", FIELD(seq), 0, 1 << 24, "T", "0", "tokens a sample; 0: the model's default"},
    {OPT_INT, "batch", FIELD(batch), 0, 1 << 20, "B", "0", "samples a micro-batch and rank; 0: the model's default"},
    {OPT_INT, "accum", FIELD(accum), 1, 1 << 16, "K", "1", "micro-batches a step"},
    {OPT_TEXT, "accumulate", FIELD(accumulate), 0, 0, "sharded|local", "sharded",
     "gradients are reduced every micro-batch, or once a step: fewer exchanges, 4 bytes a parameter more"},
    {OPT_GROUP, "mesh", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "tp", FIELD(tp), 0, 1 << 20, "N|auto", "1",
     "tensor parallelism: N ranks share every matrix, and tokens between products; best on one host; N divides the "
     "heads, key/value heads too"},
    {OPT_INT, "cp", FIELD(cp), 0, 1 << 20, "N|auto", "1",
     "context parallelism, for long sequences: N ranks share each one, 2 of 2N chunks a rank, and gather keys and "
     "values; parameters shard over them too"},
    {OPT_INT, "pp", FIELD(pp), 0, 1 << 20, "N|auto", "1",
     "pipeline parallelism: N stages with some of the blocks each; --accum should be several times N; --sharding is "
     "then shard_grad_op, --accumulate local, unless given"},
    {OPT_TEXT, "pp-schedule", FIELD(pp_schedule), 0, 0, "1f1b|interleaved", "1f1b",
     "1f1b: a stage is one run of blocks, and does one forward and one backward in turn; interleaved: it is "
     "--pp-chunks runs: stages idle less, for more messages"},
    {OPT_INT, "pp-chunks", FIELD(pp_chunks), 0, MAX_CHUNKS, "V", "0",
     "runs of blocks a stage has; 0: one, interleaved two; of several, --accum must be a multiple of --pp"},
    {OPT_FLAG, "pp-light-ends", FIELD(pp_light_ends), 0, 0, NULL, NULL,
     "the first and the last run of blocks is a block shorter, to make up for embedding and head"},
    {OPT_INT, "dp-shard", FIELD(dp_shard), 0, 1 << 20, "N|auto", "auto",
     "ranks over which parameters are sharded; auto: all, of each replica"},
    {OPT_INT, "dp-replicate", FIELD(dp_replicate), 0, 1 << 20, "N|auto", "1",
     "replicas of the sharded model (hybrid): gradients are summed over them once a step"},
    {OPT_GROUP, "sharding", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "sharding", FIELD(sharding), 0, 0, STRATEGY_NAMES, "full_shard",
     "ZeRO-3; ZeRO-2: weights stay gathered from forward to backward; DDP: every rank has all state"},
    {OPT_TEXT, "wrap", FIELD(wrap), 0, 0, "block|size:N", "block",
     "what is gathered at once: a block, or as many as it takes to hold N parameters"},
    {OPT_INT, "slots", FIELD(slots), 2, MAX_SLOTS - 2, "N", "2",
     "units of blocks that may be gathered at a time; the next ones are, while one computes"},
    {OPT_TEXT, "reduce-dtype", FIELD(reduce_dtype), 0, 0, "fp32|bf16", "fp32",
     "dtype in which gradients travel; they are summed in fp32, by NCCL in this one"},
    {OPT_TEXT, "offload", FIELD(offload), 0, 0, "none|optimizer|all", "none",
     "AdamW's moments, or all state, " SLOW_TIER_HELP},
    {OPT_GROUP, "memory", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "recompute", FIELD(recompute), 0, 0, "none|selective|full|every:N", "none",
     "activations computed again in backward: norms and SwiGLU; all but a block's input; that of every Nth block"},
    {OPT_GROUP, "optimizer", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "steps", FIELD(steps), 1, 1 << 30, "N", "100", "optimizer steps"},
    {OPT_REAL, "lr", FIELD(lr), 0, 1e3, "X", "0.0003", "peak learning rate"},
    {OPT_REAL, "min-lr", FIELD(min_lr), -1, 1e3, "X", "-1", "learning rate after the last step; -1: a tenth of --lr"},
    {OPT_INT, "warmup", FIELD(warmup), 0, 1 << 30, "N", "10", "steps of linear warm-up; a cosine follows"},
    {OPT_REAL, "weight-decay", FIELD(weight_decay), 0, 1e3, "X", "0.1", "AdamW's decay; norms have none"},
    {OPT_REAL, "beta1", FIELD(beta1), 0, 0.999999999, "X", "0.9", "AdamW"},
    {OPT_REAL, "beta2", FIELD(beta2), 0, 0.999999999, "X", "0.95", "AdamW"},
    {OPT_REAL, "eps", FIELD(eps), 0, 1, "X", "1e-8", "AdamW"},
    {OPT_REAL, "clip", FIELD(clip), 0, 1e30, "X", "1", "largest global gradient norm; 0: no clipping"},
    {OPT_INT, "max-skips", FIELD(max_skips), 0, 1 << 30, "N", "10",
     "steps with a gradient norm that is not finite: skipped, at most so many"},
    {OPT_GROUP, "adapters", 0, 0, 0, NULL, NULL, NULL},
    {OPT_INT, "lora-rank", FIELD(lora_rank), 0, 1 << 16, "R", "0",
     "train adapters of this rank (LoRA) beside the model's matrices, and nothing else; 0: train the model"},
    {OPT_REAL, "lora-alpha", FIELD(lora_alpha), 0, 1e6, "X", "0", "what adapters add is scaled by X / R; 0: 2 R"},
    {OPT_TEXT, "lora-targets", FIELD(lora_targets), 0, 0, "NAMES", "q,k,v,o,gate,up,down",
     "which matrices have adapters, parted by commas"},
    {OPT_TEXT, "base", FIELD(base), 0, 0, "fp32|bf16|int8|int8:all", NULL,
     "with adapters: how the frozen model is kept: as it is computed with, its blocks' matrices in 8 bits (64 share a "
     "scale), or all of it; a model whose files are in 8 bits is kept as they are"},
    {OPT_TEXT, "adapters", FIELD(adapters), 0, 0, "DIR", NULL,
     "adapters to begin with, to evaluate or to generate by: adapter_config.json and adapter_model.safetensors, as "
     "PEFT has them"},
    {OPT_GROUP, "run", 0, 0, 0, NULL, NULL, NULL},
    {OPT_TEXT, "out", FIELD(out), 0, 0, "DIR", NULL,
     "directory for checkpoints, metrics.jsonl, samples.jsonl, config.txt, layout.json, ledger.json"},
    {OPT_INT, "save-every", FIELD(save_every), 0, 1 << 30, "N", "0",
     "checkpoint every N steps and after the last; 0: only after the last, and on SIGUSR1 (SIGUSR2, SIGTERM: and end)"},
    {OPT_TEXT, "save-mode", FIELD(save_mode), 0, 0, "sync|async", "sync",
     "async: state is copied (to memory that the plan has), and written while training goes on"},
    {OPT_INT, "keep", FIELD(keep), 0, 1 << 30, "K", "0",
     "the newest K checkpoints stay, older ones are removed; 0: all stay"},
    {OPT_TEXT, "resume", FIELD(resume), 0, 0, "DIR|auto", NULL,
     "go on from a checkpoint, whatever layout wrote it; auto: the newest in --out, if there is one"},
    {OPT_FLAG, "allow-changes", FIELD(allow_changes), 0, 0, NULL, NULL,
     "with --resume: also with options that change what is computed"},
    {OPT_INT, "val-every", FIELD(val_every), 0, 1 << 30, "N", "0",
     "validate every N steps and after the last; 0: only after the last"},
    {OPT_INT, "val-batches", FIELD(val_batches), 0, 1 << 30, "N", "0",
     "micro-batches a rank in a validation; 0: the whole file"},
    {OPT_INT, "seed", FIELD(seed), 0, INT32_MAX, "N", "1", "of initial weights, shuffling and sampling"},
    {OPT_INT, "threads", FIELD(threads), 0, 1024, "N", "0", "threads a rank; 0: cores divided by ranks on this host"},
    {OPT_INT, "check-replicas", FIELD(check_replicas), 0, 1 << 30, "N", "100",
     "compare hashes of what replicas have in common every N steps; 0: never"},
    {OPT_REAL, "timeout", FIELD(timeout), 0.1, 1e6, "SECONDS", "600",
     "limit of every wait for another rank; 4 x as long in start-up, validation and saving"},
    {OPT_TEXT, "transport", FIELD(transport), 0, 0, "threads|mpi|nccl", NULL,
     "how ranks exchange; default: under mpirun or srun mpi, of GPUs nccl, else threads"},
    {OPT_INT, "ranks", FIELD(ranks), 0, 4096, "N", "0", "ranks as threads of one process, without mpirun; 0: one"},
    {OPT_FLAG, "deterministic", FIELD(deterministic), 0, 0, NULL, NULL,
     "equal bits on every layout of as many micro-batches, where their number and the ranks are powers of two"},
    {OPT_TEXT, "trace", FIELD(trace), 0, 0, "FILE", NULL,
     "timeline of every op and exchange, for chrome://tracing or Perfetto; with --plan --cluster, the estimated one"},
    {OPT_GROUP, "do instead of training", 0, 0, 0, NULL, NULL, NULL},
    {OPT_FLAG, "plan", FIELD(plan), 0, 0, NULL, NULL,
     "walk and replay every rank: memory, FLOPs and traffic of each kind of ranks, and that their exchanges fit; "
     "allocates nothing"},
    {OPT_INT, "world", FIELD(world), 0, 1 << 20, "N", "0", "with --plan: for N ranks"},
    {OPT_TEXT, "cluster", FIELD(cluster), 0, 0, "FILE", NULL,
     "with --plan: the time of a step on such machines (dev/clusters, dev/results), and with --out plan.html"},
    {OPT_FLAG, "search", FIELD(search), 0, 0, NULL, NULL,
     "with --plan --cluster: the fastest layouts that fit, for as many sequences a step as the options make; what is "
     "given of mesh, pipeline, sharding and recomputation stays"},
    {OPT_TEXT, "eval", FIELD(eval), 0, 0, "FILE", NULL,
     "print loss and perplexity of a token file as one line of JSON"},
    {OPT_TEXT, "export", FIELD(export_dir), 0, 0, "DIR", NULL,
     "write the model as a Hugging Face directory: with --data after training, else as it was loaded"},
    {OPT_FLAG, "merge", FIELD(merge), 0, 0, NULL, NULL,
     "with --export: the model with what its adapters add, not the adapters alone"},
    {OPT_TEXT, "dtype", FIELD(dtype), 0, 0, "fp32|bf16|int8|int8:all", "fp32",
     "with --export; int8: the blocks' matrices in 8 bits, for a frozen --base; int8:all: everything"},
    {OPT_TEXT, "generate", FIELD(generate), 0, 0, "PROMPT", NULL, "continue a text"},
    {OPT_INT, "max-tokens", FIELD(max_tokens), 1, 1 << 20, "N", "100", "with --generate"},
    {OPT_REAL, "temperature", FIELD(temperature), 0, 100, "X", "0.8", "with --generate; 0: always the likeliest token"},
    {OPT_REAL, "top-p", FIELD(top_p), 1e-6, 1, "X", "0.95",
     "with --generate: the likeliest tokens that hold this much probability"},
    {OPT_FLAG, "audit", FIELD(audit), 0, 0, NULL, NULL,
     "hold the samples that the run in --out consumed against the rule: each once an epoch"},
    {OPT_TEXT, "encode", FIELD(encode), 0, 0, "FILE", NULL,
     "print the token ids of a text, one a line (needs --tokenizer)"},
    {OPT_TEXT, "decode", FIELD(decode), 0, 0, "FILE", NULL,
     "print the text of token ids, one a line (needs --tokenizer)"},
    {OPT_FLAG, "help", FIELD(help), 0, 0, NULL, NULL, "this"},
};
enum { OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };

static int is_listed_word(const char *word, const char *choices) { // choices: "a|b|c"
    size_t n = strcspn(word, "|");
    if (word[n] || !n) return 0;
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (!strncmp(at, word, n) && (at[n] == '|' || !at[n])) return 1;
    return 0;
}

/* N of a choice "word:N", from 1 to 10^15; 0: `value` is no such thing. */
static int64_t number_after_colon(const char *value, const char *word) {
    size_t n = strlen(word);
    const char *digits = value + n + 1;
    if (strncmp(value, word, n) || value[n] != ':' || !digits[0] || digits[strspn(digits, "0123456789")] ||
        strlen(digits) > 15)
        return 0;
    return strtoll(digits, NULL, 10);
}

/* Is `value` one of the choices, of which those like every:N take a number? */
static int is_valid_choice(const char *value, const char *choices) {
    char word[32];
    size_t n = strcspn(value, ":");
    if (!value[n] || strcmp(value + n, ":N")) // a word, which may have a second one behind a colon
        if (is_listed_word(value, choices)) return 1;
    if (!value[n]) return 0;
    snprintf(word, sizeof word, "%.*s:N", (int)min_i64((int64_t)n, 20), value);
    return is_listed_word(word, choices) && number_after_colon(value, strtok(word, ":"));
}

static void option_set(Options *o, const OptionRow *row, const char *name, const char *value) {
    char *field = (char *)o + row->offset, *end;
    int may_be_empty = row->kind == OPT_FLAG || row->offset == FIELD(generate);
    if (!may_be_empty && !value[0]) user_error("--%s needs a value: --%s %s", name, name, row->values);
    if (row->kind == OPT_TEXT) {
        int choices = strchr(row->values, '|') &&
                      (row->values[0] < 'A' || row->values[0] > 'Z'); // words in capitals stand for themselves
        if (choices && !is_valid_choice(value, row->values))
            user_error("--%s %s: expected one of %s", name, value, row->values);
        *(const char **)field = value;
    } else if (row->kind == OPT_FLAG) {
        *(int *)field = 1;
    } else {
        int is_auto = row->kind == OPT_INT && strstr(row->values, "auto") && !strcmp(value, "auto");
        double x = is_auto ? 0 : strtod(value, &end);
        int bad = !is_auto && (value[strspn(value, "+-.0123456789eE")] || end == value || *end ||
                               !(x >= row->low && x <= row->high) || (row->kind == OPT_INT && x != floor(x)));
        if (bad)
            user_error("--%s %s: expected a %snumber from %.10g to %.10g%s", name, value,
                       row->kind == OPT_INT ? "whole " : "", row->low, row->high,
                       strstr(row->values, "auto") ? ", or auto" : "");
        if (row->kind == OPT_INT) *(int *)field = (int)x;
        else *(double *)field = x;
    }
}

static int option_given(const Options *o, const char *name) {
    for (int i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].kind != OPT_GROUP && !strcmp(option_rows[i].name, name))
            return (int)(o->given[i / 64] >> i % 64 & 1);
    return 0;
}

static Options options_parse(int argc, char **argv) {
    Options o = ZERO;
    for (int i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].fallback) option_set(&o, &option_rows[i], option_rows[i].name, option_rows[i].fallback);
    for (int i = 1; i < argc; i++) {
        const OptionRow *row = NULL;
        char name[64] = "";
        const char *equals = strchr(argv[i], '=');
        if (!strncmp(argv[i], "--", 2))
            snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - argv[i]) - 2 : (int)sizeof name, argv[i] + 2);
        for (int j = 0; j < OPTION_ROWS && name[0]; j++)
            if (option_rows[j].kind != OPT_GROUP && !strcmp(name, option_rows[j].name)) row = &option_rows[j];
        if (!row) user_error("unknown option %s: ./train_llama3 --help lists them all", argv[i]);
        int takes_value = row->kind != OPT_FLAG;
        if (equals && !takes_value) user_error("--%s takes no value", name);
        if (takes_value && !equals && i + 1 == argc) user_error("--%s needs a value: --%s %s", name, name, row->values);
        o.given[(row - option_rows) / 64] |= 1ull << (row - option_rows) % 64;
        option_set(&o, row, name, equals ? equals + 1 : takes_value ? argv[++i] : NULL);
    }
    if (o.min_lr < 0 && o.min_lr != -1)
        user_error("--min-lr %g: expected 0 or more, or -1 for a tenth of --lr", o.min_lr);
    if (o.min_lr < 0) o.min_lr = o.lr / 10;
    return o;
}

/* The value in force as it would be typed. 0: it has none, or is not given. */
static int option_as_text(const Options *o, const OptionRow *row, char *value, size_t size) {
    const char *field = (const char *)o + row->offset;
    value[0] = 0;
    if (row->kind == OPT_INT) return snprintf(value, size, "%d", *(const int *)field);
    if (row->kind == OPT_REAL) return snprintf(value, size, "%.9g", *(const double *)field);
    if (row->kind == OPT_TEXT && *(const char *const *)field)
        return snprintf(value, size, "%s", *(const char *const *)field) >= 0;
    if (row->kind == OPT_FLAG) snprintf(value, size, *(const int *)field ? "on" : "off");
    return row->kind == OPT_FLAG && *(const int *)field;
}

static void option_text(const Options *o, const char *name, char *value, size_t size) {
    for (int i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].kind != OPT_GROUP && !strcmp(option_rows[i].name, name))
            option_as_text(o, &option_rows[i], value, size);
}

/* `values`: the options in force as config.txt has them; else --help. */
static void options_print(const Options *o, FILE *f, int values) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        char left[64], value[4096];
        snprintf(left, sizeof left, "--%s %s", row->name, row->values ? row->values : "");
        if (values && option_as_text(o, row, value, sizeof value))
            fprintf(f, row->kind == OPT_FLAG ? "--%s\n" : "--%s %s\n", row->name, value);
        if (values) continue;
        if (row->kind == OPT_GROUP) fprintf(f, "%s\n", row->name);
        else
            fprintf(f, "  %-44s %s%s%s%s\n", left, row->help, row->fallback ? " (" : "",
                    row->fallback ? row->fallback : "", row->fallback ? ")" : "");
    }
}

#endif
