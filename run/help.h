/* help.h: --help and --version of the programs that take train_llama3's options. */
#ifndef HELP_H
#define HELP_H
#include "../lib/output.h" // defines: finish_results
#include "options.h"       // defines: Options, options_print_help
#include "version.h"       // defines: print_version

/* Prints what --help or --version asks for, and returns whether one was given. `prints`: this process is the one that
 * prints. */
static int help_or_version(const Options *o, int prints, Program program) {
    if (!o->help && !o->version) return 0;
    if (!prints) return 1;
    if (o->help) options_print_help(stdout, program);
    else print_version(stdout, program_names[program]);
    finish_results();
    return 1;
}

#endif
