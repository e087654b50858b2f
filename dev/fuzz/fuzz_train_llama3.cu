/* fuzz_train_llama3.cu: the readers of train_llama3, given any bytes whatever: token files and lists of them,
 * safetensors and their index, adapters, trainer.json.
 *
 *   make -C dev/fuzz             every target, 1,000,000 executions each; see Makefile and run.sh
 *   build/fuzz/TARGET FILE…      these inputs again, such as one that was a finding
 */
#include "harness.h" // defines: give, finding, EXPECT, held, said_out
#define TESTING_PROGRAM
#define TESTING
#include "train_llama3.cu"
#include "inputs.h"
#include "target_token_file.h"
#include "target_safetensors.h"
#include "target_checkpoint.h"
#include "target_adapters.h"
#include "target_mixture.h"

// ---------------------------------------------------------------------------
// a fault that is no fault of the program: an engine that does not find it finds nothing

static void fuzz_planted(Bytes in) {
    char *volatile word = (char *)malloc(7);
    for (size_t i = 0; i + 7 <= in.left; i++)
        if (!memcmp(in.at + i, "planted", 7)) word[7] = 0; // one byte too far
    free(word);
}

static const char *const planted_words[] = {"planted", NULL};

static const Target targets[] = {
    {"token_file", fuzz_token_file, 400, 1, -1, token_file_words},
    {"safetensors", fuzz_safetensors, 2000, 7, 1, safetensors_words},
    {"index", fuzz_index, 2000, 7, 1, index_words},
    {"trainer", fuzz_trainer, 800, 7, 1, trainer_words},
    {"adapters", fuzz_adapter_files, 1200, 7, 0, adapter_words},
    {"mixture", fuzz_mixture, 160, 6, -1, mixture_words},
    {"planted", fuzz_planted, 64, 4, -1, planted_words},
};

static void fuzz_prepare(void) {}

static void fuzz_reset(void) {
    memset(&process_end, 0, sizeof process_end);
    memset(&own_heartbeat, 0, sizeof own_heartbeat);
}

#include "execution.h"
