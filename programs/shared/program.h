/* program.h: the command line of a program that computes with the trainer's model: its own and the trainer's. */
#ifndef PROGRAM_H
#define PROGRAM_H
#include "trainer.h" // defines: the training program: Job, Options, rank_open, launch

typedef struct {
    const char *name;
    const char *takes;     // the options of train_llama3 that it takes, each between commas; NULL: all
    const OptionRow *rows; // (count) its own options
    int count;
    char given[32]; // (count) 1 for each of them that was on the command line
} Program;

static int program_given(const Program *p, const char *name) {
    return p->given[option_row(p->rows, p->count, name) - p->rows];
}

/* Reads the command line. Returns the options of train_llama3, which job_close frees; `own` receives the program's. */
static const Options *program_options_parse(Program *p, void *own, int argc, char **argv) {
    Options *o = options_open();
    options_set_defaults(own, p->rows, p->count);
    for (int i = 1; i < argc; i++) {
        const OptionRow *row = option_read(own, p->rows, p->count, argc, argv, &i);
        if (row) {
            p->given[row - p->rows] = 1;
            continue;
        }
        if (takes_option(p->takes, argv[i]) && options_read(o, argc, argv, &i)) continue;
        if (!p->takes && skip_retired(argc, argv, &i)) continue;
        user_error("unknown option %s: %s --help lists all options", argv[i], p->name);
    }
    options_check(o);
    return o;
}

/* Reads the command line of a program. Returns 0 if it asks for --help or --version, which is printed. */
static int program_begin(Program *p, void *own, Job *j, int argc, char **argv) {
    process_begin(argv);
    job_take_options(j, program_options_parse(p, own, argc, argv));
    return !help_or_version(&j->run, p->name, p->rows, p->count, p->takes);
}

/* A rank of a program that does not train: opens the model and works with it. */
static void program_rank(Job *j, int rank) {
    Trainer *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer);
    rank_open(trainer, dry_run, j, rank);
    j->purpose.work(trainer);
    trainer_close(trainer);
    trainer_close(dry_run);
    free(trainer);
    free(dry_run);
}

/* Runs all ranks. */
static void program_run(Job *j, int *argc, char ***argv) {
    LaunchInfo started = process_connect(&j->run, 0, seconds_to_connect(&j->run), argc, argv);
    job_open(j, &started);
    launch(j, started.rank, program_rank);
    finish_results();
}

#endif
