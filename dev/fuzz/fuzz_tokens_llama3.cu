/* fuzz_tokens_llama3.cu: the readers of tokens_llama3, given any bytes whatever: tokenizers, chat templates,
 * conversations, samples.jsonl.
 *
 *   make -C dev/fuzz             every target, 1,000,000 executions each; see Makefile and run.sh
 *   build/fuzz/TARGET FILE…      these inputs again, such as one that was a finding
 */
#include "harness.h" // defines: give, finding, EXPECT, held, said_out
#define TESTING_PROGRAM
#include "programs/tokens_llama3.cu"
#include "inputs.h"
#include "target_tokenizer.h"
#include "target_tokenizer_json.h"
#include "target_audit.h"

static const Target targets[] = {
    {"tokenizer", fuzz_tokenizer, 400, 4, -1, tokenizer_words},
    {"audit", fuzz_audit, 600, 7, 1, audit_words},
    {"chat", fuzz_chat, 600, 7, 1, chat_words},
    {"tokenizer_json", fuzz_tokenizer_json, 1500, 7, 1, tokenizer_json_words},
    {"chat_template", fuzz_chat_template, 900, 6, 1, chat_template_words},
};

static void fuzz_prepare(void) { split_open("", 0, llama3_split); }

static void fuzz_reset(void) { memset(&process_end, 0, sizeof process_end); }

#include "execution.h"
