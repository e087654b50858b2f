/* test_tokens_llama3.cu: includes tokens_llama3 and checks its tokenizers of every format (test_tokenizer.h,
 * test_tokenizer_json.h), and which documents are for validation. What it does with texts and options is tested from
 * outside: tokenize.sh, chat.sh.
 *
 *   test_tokens_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#define TESTING_PROGRAM
#include "../../programs/tokens_llama3.cu"
#include "harness.h"
#include "test_tokenizer_files.h"
#include "test_tokenizer.h"

/* Documents for validation: their number is the fraction, at any place in an order that repeats. */
static void test_validation_documents(void) {
    static const double fractions[] = {0.5, 0.3, 0.05, 0.001};
    enum { DOCUMENTS = 40000 };
    for (int f = 0; f < 4; f++) {
        ValidationSplit split = {fractions[f], 0, 0};
        double expected = fractions[f] * DOCUMENTS, off = 0;
        int of_period[21][20] = {{0}};
        for (int i = 0; i < DOCUMENTS; i++)
            if (is_validation_document(&split))
                for (int period = 2; period <= 20; period++) of_period[period][i % period]++;
        for (int period = 2; period <= 20; period++) // in standard deviations of places chosen by chance
            for (int k = 0; k < period; k++)
                off = fmax(off, fabs(of_period[period][k] - expected / period) / sqrt(expected / period));
        CHECK("documents for validation: the fraction of their number, and no order",
              fabs((double)split.chosen - expected) <= 1 && off < 5, "%g: %d of %d, %.1f standard deviations",
              fractions[f], (int)split.chosen, (int)DOCUMENTS, off);
    }
}

int main(int argc, char **argv) {
    static const TestGroup groups[] = {{"tokenizer", test_tokenizer, C_BUILD},
                                       {"validation-documents", test_validation_documents, C_BUILD}};
    return run_tests(groups, 2, argc, argv);
}
