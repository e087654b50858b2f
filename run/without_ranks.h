/* without_ranks.h: tasks that need neither ranks nor a model: --help, --version, --encode, --decode, --audit. */
#ifndef WITHOUT_RANKS_H
#define WITHOUT_RANKS_H
#include "../lib/output.h" // defines: finish_results
#include "audit.h"         // defines: audit
#include "encode.h"        // defines: encode_or_decode
#include "options.h"       // defines: Options, options_print_help
#include "version.h"       // defines: print_version

/* Does such a task if one was asked for, and returns whether there was one. `prints`: this process is the one that
 * prints. `is_planner`: plan_llama3 is running, which has --help and --version alone. */
static int task_without_ranks(const Options *o, int prints, int is_planner) {
    int found = o->help || o->version || (!is_planner && (o->encode || o->decode || o->audit));
    if (!found || !prints) return found;
    if (o->help) options_print_help(stdout, is_planner);
    else if (o->version) print_version(stdout, is_planner);
    else if (o->audit) audit(o->out);
    else encode_or_decode(o->tokenizer, o->encode, o->decode);
    finish_results();
    return 1;
}

#endif
