/* tokens_options.h: the command line of tokens_llama3. */
#ifndef TOKENS_OPTIONS_H
#define TOKENS_OPTIONS_H
#include "../../lib/io/token_files.h"     // defines: TOKEN_FILE_WINDOW_MAX
#include "../../run/setup/option_table.h" // defines: OptionRow, option_read, options_set_defaults

typedef struct {
    const char *encode, *decode, *tokenizer, *out, *out_train, *out_val, *field;
    int conversations, train_tokenizer, upgrade, audit, help, version;
    int threads, slice, vocab_size, pack;
    double val_fraction, save_seconds;
    const char **files; // (num_files) the words that are no options
    int num_files;
    char given[32]; // 1 for each row of the table that was on the command line
} TokensOptions;

#define FIELD(f) offsetof(TokensOptions, f)
static const OptionRow tokens_options[] = {
    GROUP("token files of texts, of JSON lines, or of conversations"),
    TEXT("tokenizer", tokenizer, "FILE", NULL, "tokenizer.model or tokenizer.json"),
    TEXT("out-train", out_train, "FILE", NULL,
         "the token file to train on; the tokenizer's files are written next to it"),
    TEXT("out-val", out_val, "FILE", NULL, "the token file to validate on; conversations may do without"),
    REAL("val-fraction", val_fraction, 1e-9, 0.5, "X", "0.05", "the part of the text that is for validation"),
    TEXT("field", field, "NAME", "text", "the field of JSON lines that holds the text"),
    FLAG("conversations", conversations,
         "the files are JSON lines with messages; only what the assistant says is a target"),
    INT("pack", pack, 2, TOKEN_FILE_WINDOW_MAX, "SEQ", NULL,
        "with --conversations: samples of SEQ tokens consist of whole conversations, for training with --seq SEQ "
        "--doc-mask; without it they are windows over all conversations, one after the other"),
    INT("threads", threads, 1, 1024, "N", NULL, "threads that encode (default: OMP_NUM_THREADS or all cores)"),
    INT("slice", slice, 1, 1 << 30, "BYTES", "262144", "text that a thread encodes at a time"),
    REAL("save-seconds", save_seconds, 0, 1 << 20, "X", "30",
         "time between two saves of the state from which the same command continues after an interruption"),
    GROUP("other tasks"),
    FLAG("train-tokenizer", train_tokenizer, "train a tokenizer on texts and write it to --out"),
    INT("vocab-size", vocab_size, 512, 1 << 20, "N", "4096",
        "with --train-tokenizer: its size, with 256 bytes and 256 special tokens"),
    FLAG("upgrade", upgrade, "bring token files of version 1 to version 2, which say what training must know"),
    TEXT("encode", encode, "FILE", NULL, "print the token ids of a text, one per line"),
    TEXT("decode", decode, "FILE", NULL, "print the text of token ids, one per line"),
    FLAG("audit", audit, "check in samples.jsonl of --out that the run consumed every sample exactly once per epoch"),
    TEXT("out", out, "FILE|DIR", NULL, "with --train-tokenizer: its file; with --audit: the run's --out"),
    FLAG("help", help, "print this list"),
    FLAG("version", version, "print what a bug report needs: commit, compiler, versions of libraries"),
};
#undef FIELD
enum { TOKENS_OPTIONS = sizeof tokens_options / sizeof *tokens_options };

static int tokens_given(const TokensOptions *o, const char *name) {
    return o->given[option_row(tokens_options, TOKENS_OPTIONS, name) - tokens_options];
}

#endif
