/* conversion.h: what convert_llama3 was asked to do. Every rank of a process shares it and only reads it. */
#ifndef CONVERSION_H
#define CONVERSION_H
#include "../shared/model_tokenizer.h" // defines: ModelTokenizer, TokenizerFiles, Program, Job
#include "gguf.h"                      // defines: GgufMetadata, is_gguf, gguf_layout, modelfile_text

enum { EXPORT_FP32, EXPORT_FP16, EXPORT_BF16, EXPORT_INT8, EXPORT_INT8_ALL, EXPORT_Q8_0 }; // values of --dtype
static const char *const export_dtypes[] = {"fp32", "fp16", "bf16", "int8", "int8:all", "q8_0"};

typedef struct {
    const char *path; // of --export
    int dtype, merge; // dtype: EXPORT_FP32, …
} ConvertOptions;

typedef struct {
    Job job; // first: a rank finds the Conversion behind its job
    Program program;
    ConvertOptions opt;
    ModelTokenizer text;
    TokenizerFiles files;        // next to the weights
    GgufMetadata gguf_tokenizer; // in a GGUF file
} Conversion;

#endif
