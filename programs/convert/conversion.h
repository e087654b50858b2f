/* conversion.h: what convert_llama3 was asked to do. Every rank of a process shares it and only reads it. */
#ifndef CONVERSION_H
#define CONVERSION_H
#include "../shared/model_tokenizer.h" // defines: ModelTokenizer, TokenizerFiles, Program, Job
#include "gguf.h"                      // defines: GgufMetadata, is_gguf, gguf_layout, modelfile_text

typedef struct {
    const char *path, *dtype; // of --export and --dtype
    int merge;
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
