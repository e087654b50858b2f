/* program.h: the training program without its main, for plan_llama3. Tests have included it already. */
#ifndef PROGRAM_H
#define PROGRAM_H
#ifndef TESTING
#define TESTING
#include "../train_llama3.cu" // defines: plan_open, dry_run_open, Job, Trainer
#endif
#endif
