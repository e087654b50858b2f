/* tokens_llama3.cu: text and token ids, and what a run has made of its token files.
 *
 *   tokens_llama3 --encode FILE --tokenizer FILE    the token ids of a text
 *   tokens_llama3 --decode FILE --tokenizer FILE    the text of token ids
 *   tokens_llama3 --audit --out DIR                 did a run consume every sample once per epoch?
 */
#include "../run/option_table.h" // defines: OptionRow, option_read, option_print_help
#include "../run/version.h"      // defines: print_version
#include "audit.h"               // defines: audit
#include "encode.h"              // defines: encode_or_decode

typedef struct {
    const char *encode, *decode, *tokenizer, *out;
    int audit, help, version;
} TokensOptions;

#define FIELD(f) offsetof(TokensOptions, f)
static const OptionRow tokens_options[] = {
    TEXT("encode", encode, "FILE", NULL, "print the token ids of a text, one per line"),
    TEXT("decode", decode, "FILE", NULL, "print the text of token ids, one per line"),
    TEXT("tokenizer", tokenizer, "FILE", NULL, "with --encode and --decode: tokenizer.model or tokenizer.json"),
    FLAG("audit", audit, "check in samples.jsonl of --out that the run consumed every sample exactly once per epoch"),
    TEXT("out", out, "DIR", NULL, "with --audit: the run's --out"),
    FLAG("help", help, "print this list"),
    FLAG("version", version, "print what a bug report needs: commit, compiler, versions of libraries"),
};
#undef FIELD
enum { TOKENS_OPTIONS = sizeof tokens_options / sizeof *tokens_options };

static TokensOptions tokens_options_parse(int argc, char **argv) {
    TokensOptions o = ZERO;
    options_set_defaults(&o, tokens_options, TOKENS_OPTIONS);
    for (int i = 1; i < argc; i++)
        if (!option_read(&o, tokens_options, TOKENS_OPTIONS, argc, argv, &i))
            user_error("unknown option %s: tokens_llama3 --help lists all options", argv[i]);
    if (o.help || o.version) return o;
    if (!!o.encode + !!o.decode + o.audit != 1)
        user_error("expected one of --encode, --decode and --audit, found %d of them: tokens_llama3 --help tells what "
                   "each does",
                   !!o.encode + !!o.decode + o.audit);
    if (o.audit && o.tokenizer) user_error("--tokenizer has no effect with --audit: remove it");
    if (o.out && !o.audit) user_error("--out has no effect with --%s: remove it", o.encode ? "encode" : "decode");
    return o;
}

int main(int argc, char **argv) {
    output_prepare();
    const TokensOptions o = tokens_options_parse(argc, argv);
    if (o.version) print_version(stdout, "tokens_llama3");
    for (int i = 0; i < TOKENS_OPTIONS && o.help; i++) option_print_help(stdout, &tokens_options[i]);
    if (o.help || o.version) {
        finish_results();
        return 0;
    }
    if (o.audit) audit(o.out);
    else encode_or_decode(o.tokenizer, o.encode, o.decode);
    finish_results();
    return 0;
}
