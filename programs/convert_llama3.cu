/* convert_llama3.cu: writes a model in another format.
 *
 *   convert_llama3 --model DIR --export OTHER_DIR               a Hugging Face directory, in fp32 or --dtype bf16, …
 *   convert_llama3 --model DIR --export FILE.gguf               for llama.cpp and ollama; --dtype q8_0: 8 bits
 *   convert_llama3 --model DIR --adapters LORA --merge --export OTHER_DIR     with LoRA adapters merged into it
 *
 * Weights go from file to file, in pieces of a few megabytes; several ranks share the work. Only to merge adapters, the
 * model is loaded, sharded over the ranks. */
#include "convert/convert_dtypes.h" // defines: convert_tensor
#include "convert/merge.h"          // defines: gather_merged
#include "convert/export.h"         // defines: model_export, export_check, export_files, export_gguf, Conversion

#define FIELD(f) offsetof(ConvertOptions, f)
static const OptionRow convert_options[] = {
    GROUP("what is written"),
    TEXT("export", path, "DIR|FILE.gguf", NULL,
         "write the model as a Hugging Face directory, or as a GGUF file for llama.cpp and ollama"),
    CHOICE("dtype", dtype, "fp32|fp16|bf16|int8|int8:all|q8_0", "fp32",
           "dtype of the weights; int8: the matrices of blocks in int8, to be loaded as a frozen --base; int8:all: all "
           "tensors; q8_0: the matrices of a GGUF file in 8 bits"),
    FLAG("merge", merge, "add the adapters of --adapters DIR to the weights of --model"),
};
#undef FIELD
static const Program convert_program = {
    "convert_llama3", options_of_convert, convert_options, sizeof convert_options / sizeof *convert_options, {0}};

/* Refuses combinations of options whose output would not be what the user asked for. */
static void convert_check(const Conversion *c) {
    const Job *j = &c->job;
    const RunSettings *run = &j->run;
    const char *path = c->opt.path, *dtype = export_dtypes[c->opt.dtype];
    int merges = c->opt.merge, writes_int8 = export_base(&c->opt) > BASE_FROZEN, writes_gguf = is_gguf(path);
    if (j->stored_base > BASE_FROZEN && !merges && writes_int8)
        user_error("--export --dtype %s: the weights of %s are int8 already: copy the directory, or dequantize it with "
                   "--dtype fp32 or bf16",
                   dtype, run->model);
    if (writes_gguf && writes_int8)
        user_error("--export %s --dtype %s: expected fp32, fp16, bf16 or q8_0, which is the int8 of GGUF files: use "
                   "--dtype q8_0",
                   path, dtype);
    if (!writes_gguf && c->opt.dtype == EXPORT_Q8_0)
        user_error("--export %s --dtype q8_0: q8_0 is a format of GGUF files: use --export FILE.gguf, or --dtype int8",
                   path);
    if (writes_gguf && run->lora_rank && !merges)
        user_error("--export %s: a GGUF file holds a whole model: add --merge to export the model with the adapters, "
                   "or export a directory",
                   path);
    if (merges && !run->lora_rank)
        user_error("--merge adds adapters to the model's weights, and there are no adapters: add --adapters DIR, or "
                   "remove --merge");
    if (run->lora_rank && !merges)
        user_error("--export with --adapters would only copy the adapters: add --merge to export the model with them, "
                   "or remove --export");
    if (j->config.base <= BASE_FROZEN || run->lora_rank) return;
    const char *base = option_choice(run, "base");
    if (j->stored_base > BASE_FROZEN)
        user_error("--export --base %s: an export of %s always dequantizes its int8 weights: remove --base", base,
                   run->model);
    user_error("--export --base %s --dtype %s: --dtype alone decides how weights are written: remove --base", base,
               dtype);
}

static int tokenizer_copies_have(const TokenizerCopies *all, const char *name) {
    for (int i = 0; i < all->count; i++)
        if (!strcmp(all->files[i].name, name)) return 1;
    return 0;
}

/* Notes that the tokenizer is copied unchanged, because this program cannot convert it. */
static void convert_note_tokenizer(const Conversion *c) {
    char what[UNSUPPORTED_BYTES];
    const ModelTokenizer *m = &c->text;
    if (process_end.process || !c->files.copies.count) return;
    if (!m->text) {
        if (tokenizer_copies_have(&c->files.copies, "vocab.json"))
            fprintf(stderr, "note: the tokenizer vocab.json and merges.txt of %s is copied as it is\n",
                    c->job.run.model);
    } else if (!model_tokenizer_is_known(m, what)) {
        fprintf(stderr, "note: the tokenizer %s %s; it is copied as it is\n", m->path, what);
    } else if (!m->tokenizer->merges && !tokenizer_fits_json(m->tokenizer)) {
        fprintf(stderr,
                "note: the tokenizer %s splits text in a way that no tokenizer.json is written for; only "
                "tokenizer.model is copied\n",
                m->path);
    }
}

static void convert_prepare(Job *j) {
    Conversion *c = (Conversion *)j;
    ModelTokenizer *m = &c->text;
    int writes_gguf = is_gguf(c->opt.path);
    const char *model = preset_find(j->run.model) ? NULL : j->run.model;
    convert_check(c);
    model_tokenizer_find(m, &j->run, NULL);
    if (writes_gguf) model_tokenizer_need(m, "--export FILE.gguf", NULL, j, 0);
    if (j->run.tokenizer) model_tokenizer_open(m);
    model_tokenizer_try(m);
    tokenizer_files_open(&c->files, m->path, m->text, m->length, m->tokenizer, model, j->run.adapters,
                         j->config.max_positions);
    if (writes_gguf) gguf_tokenizer_open(&c->gguf_tokenizer, m->tokenizer, j->config.V, &c->files);
    convert_note_tokenizer(c);
    if (process_end.process == 0) export_check(c->opt.path);
}

/* Tells the checkpoint writer what to write: the model and the tokenizer's files. Without --merge, convert_tensor reads
 * weights straight from the model's files, so that no rank holds more than the chunks that it writes. */
static void convert_files(CheckpointWriter *w, const Job *j) {
    const Conversion *c = (const Conversion *)j;
    w->gather = job_streams_weights(j) ? NULL : gather_merged;
    w->tokenizer = &c->files.copies;
    w->put_tensor = convert_tensor;
    w->conversion = c;
    if (is_gguf(c->opt.path)) export_gguf(&w->files, &j->table, c);
    else export_files(&w->files, &j->table, &c->opt);
}

static void convert_work(Trainer *trainer) { model_export(&trainer->writer, (const Conversion *)trainer->job); }

static Purpose convert_purpose(int merges) {
    Purpose p = ZERO;
    p.program = convert_program.name;
    p.converts = 1;
    p.merges_adapters = merges;
    p.prepare = convert_prepare;
    p.files = convert_files;
    p.work = convert_work;
    return p;
}

static void conversion_close(Conversion *c) {
    tokenizer_files_close(&c->files);
    free(c->gguf_tokenizer.text);
    model_tokenizer_close(&c->text);
    job_close(&c->job);
}

#ifndef TESTING_PROGRAM
int main(int argc, char **argv) {
    static Conversion c; // large for a small stack
    c.program = convert_program;
    if (!program_begin(&c.program, &c.opt, &c.job, argc, argv)) return 0;
    if (!c.opt.path) user_error("--export DIR or FILE.gguf is missing: convert_llama3 --help tells what it does");
    c.job.purpose = convert_purpose(c.opt.merge);
    program_run(&c.job, &argc, &argv);
    conversion_close(&c);
    comm_end_process();
    return 0;
}
#endif
