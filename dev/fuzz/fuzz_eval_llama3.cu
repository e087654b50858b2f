/* fuzz_eval_llama3.cu: the requests of eval_llama3, any bytes whatever.
 *
 *   make -C dev/fuzz             every target, 1,000,000 executions each; see Makefile and run.sh
 *   build/fuzz/TARGET FILE…      these inputs again, such as one that was a finding
 */
#include "harness.h" // defines: give, finding, EXPECT, held, said_out
#define TESTING_PROGRAM
#include "programs/eval_llama3.cu"
#include "inputs.h"
#include "target_requests.h"

static const Target targets[] = {
    {"requests", fuzz_requests, 600, 7, 1, request_words},
};

static void fuzz_prepare(void) { split_open("", 0, llama3_split); }

static void fuzz_reset(void) {
    memset(&process_end, 0, sizeof process_end);
    memset(&own_heartbeat, 0, sizeof own_heartbeat);
}

#include "execution.h"
