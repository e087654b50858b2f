/* test_tokens_llama3.cu: includes tokens_llama3 and checks its tokenizers of every format (test_tokenizer.h,
 * test_tokenizer_json.h). What it does with texts and options is tested from outside: tokenize.sh, chat.sh.
 *
 *   test_tokens_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#define TESTING_PROGRAM
#include "../../programs/tokens_llama3.cu"
#include "harness.h"
#include "test_tokenizer_files.h"
#include "test_tokenizer.h"

int main(int argc, char **argv) {
    static const TestGroup groups[] = {{"tokenizer", test_tokenizer, C_BUILD}};
    return run_tests(groups, 1, argc, argv);
}
