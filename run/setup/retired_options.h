/* retired_options.h: options of earlier versions, and what does their work now.
 *
 * One table serves a command line, a config.txt that is given back as options, and the settings of an old checkpoint. A
 * caller may rely on: a retired option at its old default is accepted and has no effect; with another value it is
 * refused with the whole command that replaces it, ready to be pasted into a shell.
 */
#ifndef RETIRED_OPTIONS_H
#define RETIRED_OPTIONS_H
#include "../../lib/io/json.h" // defines: text_stream_open
#include "option_table.h"      // defines: option_name, write_shell_word

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

/* Writes the command that replaces one with the option `retired`: the program, with those of the options that it
 * takes. */
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

/* Passes over a retired option at argv[*at] that has its old default, and refuses it with any other value. Returns 0 if
 * no retired option is there. */
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

#endif
