/* generate_llama3.cu: continues texts with a model, or talks with it in the terminal.
 *
 *   generate_llama3 --model DIR --prompt "In the beginning"     continues a text
 *   generate_llama3 --model DIR --prompts FILE                  each line of a file, or the requests of FILE.jsonl
 *   generate_llama3 --model DIR --chat                          talks, with the model's chat template
 *
 * The model may be sharded over several ranks (mpirun, or --ranks N). It includes train_llama3, whose forward pass it
 * calls with a cache of keys and values. */
#include "generate/chat.h"     // defines: converse, CHAT_POSITIONS, CHAT_ORDER_TOKENS
#include "generate/generate.h" // defines: generate, Generation
#include "shared/text_input.h" // defines: utf8_valid_length

#define FIELD(f) offsetof(GenerateOptions, f)
static const OptionRow generate_options[] = {
    GROUP("text"),
    TEXT_OR_EMPTY("prompt", prompt, "TEXT", NULL, "continue a text"),
    TEXT("prompts", prompts, "FILE", NULL,
         "continue each line of a file; empty lines are skipped; FILE.jsonl has a request on each line, which is "
         "answered with a line of JSON"),
    FLAG("chat", chat,
         "talk with an instruction-tuned model in the terminal, with its chat template; /reset, /system TEXT and /save "
         "FILE are commands, Ctrl-C stops an answer, Ctrl-D leaves; --seq N limits the conversation to N tokens"),
    INT("max-tokens", max_tokens, 1, 1 << 20, "N", "100",
        "how many tokens to generate; with --chat: the longest answer"),
    REAL("temperature", temperature, 0, 100, "X", "0.8", "sampling temperature; 0: always take the most likely token"),
    REAL("top-p", top_p, 1e-6, 1, "X", "0.95",
         "sample from the most likely tokens that together have this probability"),
};
#undef FIELD
static const Program generate_program = {
    "generate_llama3", options_of_generate, generate_options, sizeof generate_options / sizeof *generate_options, {0}};

// ---------------------------------------------------------------------------
// what is asked for

/* Sets the model's stop tokens, which apply in addition to the tokenizer's. `form`: the chat template, whose
 * end-of-message token is one too; NULL: no chat. */
static void generate_stop_tokens(Generation *g, const ChatTemplate *form) {
    const char *model = g->job.run.model;
    g->stop_tokens = ids_with_adapters(preset_find(model) ? NULL : model, g->job.run.adapters).eos;
    if (form) stop_token_add(&g->stop_tokens, tokenizer_special(g->text.tokenizer, form->end));
}

/* Sets the sampling options; a request may override them. */
static void generate_sampling(Generation *g) {
    const GenerateOptions *o = &g->opt;
    const Sampling s = {o->temperature, o->top_p, 0, (uint64_t)g->job.run.seed};
    g->prompts.defaults.sampling = s;
    g->prompts.defaults.max_tokens = o->max_tokens;
    g->prompts.vocab_size = g->job.config.V;
}

/* Refuses prompts that, with their answers, have more tokens than the model has positions. */
static void generate_check_lengths(const Generation *g) {
    for (int i = 0; i < g->prompts.count; i++) {
        const Prompt *p = &g->prompts.list[i];
        const char *limit = p->is_request ? "\"max_tokens\"" : "--max-tokens";
        char line[32] = "";
        if (p->line) snprintf(line, sizeof line, " of line %d", p->line);
        if ((int64_t)p->length + p->max_tokens > g->job.config.max_positions)
            user_error("the prompt%s has %zu tokens and %s is %d, together more than the model's %d positions: shorten "
                       "the prompt, or use a smaller %s",
                       line, p->length, limit, p->max_tokens, g->job.config.max_positions, limit);
    }
}

/* Encodes the prompts. The buffers are sized for one sequence of the longest one's length. */
static void generate_prompts(Generation *g) {
    const GenerateOptions *o = &g->opt;
    const Tokenizer *t = g->text.tokenizer;
    size_t valid = o->prompt ? utf8_valid_length(o->prompt, strlen(o->prompt)) : 0;
    if (o->prompt && o->prompt[valid])
        user_error("--prompt: found invalid UTF-8 at byte %zu, expected a text in UTF-8", valid);
    if (o->prompt && (o->prompt[0] || !o->prompts)) prompts_add(&g->prompts, t, o->prompt, strlen(o->prompt), 0);
    if (o->prompts) prompts_read(&g->prompts, t, o->prompts);
    generate_check_lengths(g);
    g->job.run.batch = 1;
    g->job.run.seq = g->prompts.longest;
    g->job.purpose.cached_positions = g->prompts.most;
    generate_stop_tokens(g, NULL);
}

/* The special tokens of the chat template must be in the model's vocabulary. */
static void generate_check_template(const Generation *g) {
    const ChatTemplate *form = g->chat_template;
    const char *const names[] = {form->begin, form->open, form->close, form->end};
    for (int i = 0; i < 4; i++)
        if (names[i] && tokenizer_special(g->text.tokenizer, names[i]) >= g->job.config.V)
            user_error("the chat template needs %s, which is token %d of %s, but the model's vocabulary has %d: give "
                       "the model's own tokenizer with --tokenizer FILE",
                       names[i], tokenizer_special(g->text.tokenizer, names[i]), g->text.path, g->job.config.V);
}

/* A conversation of up to --seq tokens, which is computed in parts of CHAT_ORDER_TOKENS. */
static void generate_chat(Generation *g) {
    RunSettings *run = &g->job.run;
    g->chat_template = chat_template_find(g->text.tokenizer, g->text.path);
    generate_check_template(g);
    int positions =
        option_given(g->job.options, "seq") ? run->seq : (int)min_i64(CHAT_POSITIONS, g->job.config.max_positions);
    g->job.purpose.cached_positions = positions;
    run->batch = 1;
    run->seq = (int)min_i64(CHAT_ORDER_TOKENS, positions);
    generate_stop_tokens(g, g->chat_template);
}

static void generate_prepare(Job *j) {
    Generation *g = (Generation *)j;
    const char *texts = g->opt.prompt ? "--prompt" : "--prompts";
    model_tokenizer_find(&g->text, &j->run, NULL);
    model_tokenizer_need(&g->text, g->opt.chat ? "--chat" : texts, NULL, j, 1);
    generate_sampling(g);
    if (g->opt.chat) generate_chat(g);
    else generate_prompts(g);
}

static void generate_check_options(const Generation *g) {
    const GenerateOptions *o = &g->opt;
    int writes = o->prompt || o->prompts;
    if (writes == o->chat)
        user_error("expected --prompt or --prompts, or --chat, found %s: generate_llama3 --help explains them",
                   writes ? "both" : "none of them");
    if (option_given(g->job.options, "seq") && !o->chat)
        user_error("--seq %d has no effect without --chat, where it limits the length of a conversation: remove it",
                   g->job.run.seq);
}

// ---------------------------------------------------------------------------
// the ranks

static void generate_or_converse(Trainer *trainer) {
    if (generation_of(trainer)->opt.chat) converse(trainer);
    else generate(trainer);
}

static Purpose generate_purpose(void) {
    Purpose p = ZERO;
    p.program = generate_program.name;
    p.computes_tokens = 1;
    p.prepare = generate_prepare;
    p.dry_run = p.work = generate_or_converse;
    return p;
}

static void generation_close(Generation *g) {
    prompts_close(&g->prompts);
    model_tokenizer_close(&g->text);
    job_close(&g->job);
}

#ifndef TESTING_PROGRAM
int main(int argc, char **argv) {
    static Generation g; // large for a small stack
    g.program = generate_program;
    g.job.purpose = generate_purpose();
    if (!program_begin(&g.program, &g.opt, &g.job, argc, argv)) return 0;
    generate_check_options(&g);
    program_run(&g.job, &argc, &argv);
    generation_close(&g);
    comm_end_process();
    return 0;
}
#endif
