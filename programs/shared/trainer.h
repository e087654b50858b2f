/* trainer.h: the training program without its main, for other programs. Tests have included it already. */
#ifndef TRAINER_SOURCE_H
#define TRAINER_SOURCE_H
#ifndef TESTING
#define TESTING
#include "../../train_llama3.cu" // defines: Trainer, dry_run_open, trainer_open; includes run/setup/job.h
#endif
#endif
