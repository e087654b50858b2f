/* generation.h: what generate_llama3 was asked to do. Every rank of a process shares it and only reads it. */
#ifndef GENERATION_H
#define GENERATION_H
#include "../shared/model_tokenizer.h" // defines: ModelTokenizer, Program, Job, ChatTemplate
#include "prompts.h"                   // defines: Prompts, StopTokens

typedef struct {
    const char *prompt, *prompts;
    int chat, max_tokens;
    double temperature, top_p;
} GenerateOptions;

typedef struct {
    Job job; // first: a rank finds the Generation behind its job
    Program program;
    GenerateOptions opt;
    ModelTokenizer text;
    Prompts prompts;
    StopTokens stop_tokens;            // that end a generated text, apart from the tokenizer's
    const ChatTemplate *chat_template; // of --chat
} Generation;

static const Generation *generation_of(const Trainer *trainer) { return (const Generation *)trainer->job; }

#endif
