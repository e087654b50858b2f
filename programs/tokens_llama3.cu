/* tokens_llama3.cu: makes token files from texts and conversations, trains tokenizers, and audits which samples a run
 * consumed.
 *
 *   tokens_llama3 --tokenizer F --out-train A.tok --out-val B.tok TEXT|JSONL|FOLDER|-...        texts
 *   tokens_llama3 --conversations --tokenizer F --out-train A.tok [--pack SEQ] JSONL|-...       for instruction tuning
 *   tokens_llama3 --train-tokenizer --out tokenizer.model TEXT|FOLDER...                        a new tokenizer
 *   tokens_llama3 --upgrade FILE.tok...               token files of version 1 to version 2
 *   tokens_llama3 --encode FILE --tokenizer F         the token ids of a text
 *   tokens_llama3 --decode FILE --tokenizer F         the text of token ids
 *   tokens_llama3 --audit --out DIR                   did a run consume every sample once per epoch? */
#include "../run/setup/version.h"   // defines: print_version
#include "tokens/audit.h"           // defines: audit
#include "tokens/conversations.h"   // defines: tokenize_conversations
#include "tokens/encode.h"          // defines: encode_or_decode
#include "tokens/texts.h"           // defines: tokenize_texts
#include "tokens/tokens_options.h"  // defines: TokensOptions, tokens_options
#include "tokens/train_tokenizer.h" // defines: train_tokenizer
#include "tokens/upgrade.h"         // defines: upgrade_file

/* One task of the program, and the options that it needs and accepts: names between commas. */
typedef struct {
    const char *option; // the option that selects the task; NULL: tokenizing texts, the task without such an option
    const char *needs, *takes;
    int has_files;
} TokensTask;
static const TokensTask tokens_tasks[] = {
    {"conversations", ",tokenizer,out-train,", ",out-val,val-fraction,pack,", 1},
    {"train-tokenizer", ",out,", ",vocab-size,", 1},
    {"upgrade", "", ",tokenizer,", 1},
    {"encode", ",tokenizer,", "", 0},
    {"decode", ",tokenizer,", "", 0},
    {"audit", ",out,", "", 0},
    {NULL, ",tokenizer,out-train,out-val,", ",val-fraction,field,threads,slice,save-seconds,", 1},
};

/* The one task that the options ask for. */
static const TokensTask *tokens_task(const TokensOptions *o) {
    const TokensTask *task = tokens_tasks, *asked = NULL;
    for (; task->option; task++) {
        if (!tokens_given(o, task->option)) continue;
        if (asked) user_error("--%s and --%s are two tasks: give one of them", asked->option, task->option);
        asked = task;
    }
    return asked ? asked : task;
}

/* Refuses what the task lacks, and what has no effect on it. */
static void tokens_check_options(const TokensOptions *o, const TokensTask *task) {
    const char *name = task->option ? task->option : "out-train";
    if (!task->option && !o->out_train)
        user_error("--out-train is missing: give a token file to write, or one of --train-tokenizer, --upgrade, "
                   "--encode, --decode and --audit (tokens_llama3 --help)");
    for (int i = 0; i < TOKENS_OPTIONS; i++) {
        const char *option = tokens_options[i].name;
        int is_task = task->option && !strcmp(option, task->option);
        if (option_listed(task->needs, option) && !o->given[i])
            user_error("--%s is missing, which --%s needs: tokens_llama3 --help tells what it is", option, name);
        if (o->given[i] && !is_task && !option_listed(task->needs, option) && !option_listed(task->takes, option))
            user_error("--%s has no effect with --%s: remove it", option, name);
    }
    if (task->has_files && !o->num_files) user_error("--%s: a file is missing", name);
    if (!task->has_files && o->num_files) user_error("--%s takes no further file: remove %s", name, o->files[0]);
    if (tokens_given(o, "val-fraction") && !o->out_val)
        user_error("--val-fraction has no effect without --out-val: add --out-val FILE, or remove --val-fraction");
}

static TokensOptions tokens_options_parse(int argc, char **argv) {
    TokensOptions o = ZERO;
    options_set_defaults(&o, tokens_options, TOKENS_OPTIONS);
    o.files = new_array(const char *, argc);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2)) {
            o.files[o.num_files++] = argv[i];
            continue;
        }
        const OptionRow *row = option_read(&o, tokens_options, TOKENS_OPTIONS, argc, argv, &i);
        if (!row) user_error("unknown option %s: tokens_llama3 --help lists all options", argv[i]);
        o.given[row - tokens_options] = 1;
    }
    return o;
}

static void tokens_do(const TokensOptions *o, const TokensTask *task) {
    if (!task->option) tokenize_texts(o);
    if (o->conversations) tokenize_conversations(o);
    if (o->train_tokenizer) train_tokenizer(o);
    for (int i = 0; i < o->num_files && o->upgrade; i++) upgrade_file(o->files[i], o->tokenizer);
    if (o->encode || o->decode) encode_or_decode(o->tokenizer, o->encode, o->decode);
    if (o->audit) audit(o->out);
}

#ifndef TESTING_PROGRAM
int main(int argc, char **argv) {
    output_prepare();
    TokensOptions o = tokens_options_parse(argc, argv);
    if (o.help) options_explain(tokens_options, TOKENS_OPTIONS, NULL, "all");
    else if (o.version) print_version("tokens_llama3");
    else {
        const TokensTask *task = tokens_task(&o);
        tokens_check_options(&o, task);
        tokens_do(&o, task);
    }
    free(o.files);
    finish_results();
    return 0;
}
#endif
