/* without_ranks.h: tasks that need neither ranks nor a model: --help, --version, --encode, --decode, --audit. */
#ifndef WITHOUT_RANKS_H
#define WITHOUT_RANKS_H
#include "../lib/output.h" // defines: finish_results
#include "audit.h"         // defines: audit
#include "encode.h"        // defines: encode_or_decode
#include "options.h"       // defines: Options, options_print_help
#include "version.h"       // defines: print_version

/* Does such a task if one was asked for, and returns whether there was one. `prints`: this process is the one that
 * prints. Other programs than train_llama3 have --help and --version alone. */
static int task_without_ranks(const Options *o, int prints, Program program) {
    int found = o->help || o->version || (program == TRAIN_LLAMA3 && (o->encode || o->decode || o->audit));
    if (!found || !prints) return found;
    if (o->help) options_print_help(stdout, program);
    else if (o->version) print_version(stdout, program);
    else if (o->audit) audit(o->out);
    else encode_or_decode(o->tokenizer, o->encode, o->decode);
    finish_results();
    return 1;
}

#endif
