/* fuzz_plan_llama3.cu: the readers of plan_llama3, given any bytes whatever: the command line and config.txt,
 * config.json, cluster files.
 *
 *   make -C dev/fuzz             every target, 1,000,000 executions each; see Makefile and run.sh
 *   build/fuzz/TARGET FILE…      these inputs again, such as one that was a finding
 */
#include "harness.h" // defines: give, finding, EXPECT, held, said_out
#include "run/setup/config_json.h"

/* A dry run takes as long as the model has blocks, and a deep model has only more of the same: a few have to do. */
static Llama3Config config_shallow(const char *model) {
    Llama3Config c = config_load(model);
    c.L = 1 + (c.L - 1) % 4;
    return c;
}
#define config_load(model) config_shallow(model)
#define TESTING_PROGRAM
#include "programs/plan_llama3.cu"
#include "inputs.h"
#include "target_options.h"
#include "target_config.h"
#include "target_cluster.h"

static const Target targets[] = {
    {"config", fuzz_config, 1200, 7, 1, config_words},
    {"options", fuzz_options, 400, 7, -1, option_words},
    {"cluster", fuzz_cluster, 3000, 7, 1, cluster_words},
};

static void fuzz_prepare(void) { collect_option_words(); }

static void fuzz_reset(void) {
    memset(&process_end, 0, sizeof process_end);
    memset(&own_heartbeat, 0, sizeof own_heartbeat);
}

#include "execution.h"
