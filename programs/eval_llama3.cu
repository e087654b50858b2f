/* eval_llama3.cu: how good a model is: its loss on token files, log-probabilities, and multiple-choice tasks.
 *
 *   eval_llama3 --model DIR --eval FILE.tok         loss, perplexity and bits per byte, one line of JSON
 *   eval_llama3 --model DIR --score FILE.jsonl      the log-probability of each request, a line of JSON each
 *   eval_llama3 --model DIR --choices FILE.jsonl    the accuracy on multiple-choice tasks, one line of JSON
 *
 * It takes every layout of train_llama3, which it includes for the forward pass. */
#include "eval/score.h" // defines: score_all, print_scores, print_accuracy, Evaluations, Scoring

#define FIELD(f) offsetof(EvalOptions, f)
static const OptionRow eval_options[] = {
    GROUP("what is evaluated"),
    TEXT("eval", eval, "FILE", NULL, "print the loss, perplexity and bits per byte of a token file"),
    TEXT("score", score, "FILE", NULL,
         "print the log-probability of each request of FILE, lines of JSON with \"context\" and \"continuation\" or "
         "\"context_ids\" and \"continuation_ids\""),
    TEXT("choices", choices, "FILE", NULL,
         "print the accuracy on multiple-choice tasks, lines of JSON with \"context\", \"endings\" and \"label\""),
};
#undef FIELD
static const Program eval_program = {
    "eval_llama3", options_of_eval, eval_options, sizeof eval_options / sizeof *eval_options, {0}};

// ---------------------------------------------------------------------------
// token files

/* Refuses token files that were made with another tokenizer than e->text, or one of another vocabulary. Files without a
 * fingerprint are accepted, with a note. */
static void eval_check_tokenizer(Evaluations *e) {
    uint8_t known[MOST_FINGERPRINTS][32];
    ModelTokenizer *m = &e->text;
    const Dataset *d = &e->job.val;
    int count = 1;
    if (!m->text) return;
    sha256(m->text, m->length, known[0]);
    for (int i = 0; i < d->num_files; i++) {
        const TokenFileHeader *h = &d->files[i].header;
        if (token_file_lacks_tokenizer(&d->files[i])) {
            if (process_end.process == 0)
                fprintf(stderr, "note: %s does not say with which tokenizer it was made; %s is taken for it\n",
                        d->files[i].path, m->path);
            continue;
        }
        if (token_file_knows(h, known[0])) continue;
        model_tokenizer_try(m);
        if (count == 1 && m->tokenizer) count = tokenizer_fingerprints(m->tokenizer, known);
        if (!fingerprint_is_among(h->tokenizer, known, count))
            user_error("%s was tokenized with a different tokenizer than %s: give the right one with --tokenizer (of "
                       "two files with the same vocabulary, the one that was used), or tokenize the text again",
                       d->files[i].path, m->path);
    }
}

/* --doc-mask: takes the end-of-document token from the tokenizer for token files of version 1, which do not record it.
 * Refuses conversations whose template ends every message with that token: an answer would not see its question. */
static void eval_document_ends(Evaluations *e) {
    Dataset *d = &e->job.val;
    const TokenFile *first = NULL, *masked = NULL;
    char source[4096];
    for (int i = 0; i < d->num_files; i++) {
        const TokenFile *f = &d->files[i];
        if (f->header.version > 1) continue;
        if (!first) first = f;
        if (f->header.flags & TOKEN_FILE_MASKED) masked = f;
    }
    if (!first) return;
    model_tokenizer_need(&e->text, "--doc-mask", e->opt.eval, &e->job, 1);
    const Tokenizer *t = e->text.tokenizer;
    char *jinja = chat_template_beside(e->text.path, source, 1);
    const ChatTemplate *form = jinja ? chat_template_of_jinja(jinja) : chat_template_of_tokens(t);
    if (masked && form && tokenizer_special(t, form->end) == t->eos)
        user_error("--doc-mask: %s is a token file of version 1, and in its tokenizer %s %s ends each message as well "
                   "as the conversation, so that an answer would not see its question: make the file again with "
                   "tokens_llama3 --conversations",
                   masked->path, e->text.path, form->end);
    free(jinja);
    d->document_end = t->eos;
}

/* The bytes of the text of all targets, which files of version 1 do not say; special tokens have none. */
static void eval_count_bytes(Evaluations *e) {
    enum { BLOCK = 1 << 16 };
    Dataset *d = &e->job.val;
    char *raw = (char *)checked_malloc(5 * BLOCK);
    model_tokenizer_try(&e->text);
    const Tokenizer *t = e->text.tokenizer;
    for (int i = 0; i < d->num_files && t; i++) {
        const TokenFile *f = &d->files[i];
        int64_t count = (int64_t)f->header.count, n;
        for (int64_t at = 1; at < count; at += n) {
            n = min_i64(BLOCK, count - at);
            if (!token_file_read(f, at, n, raw))
                user_error("%s: tokens %" PRId64 " to %" PRId64 " cannot be read: check the disk, or copy the file "
                           "again",
                           f->path, at, at + n - 1);
            for (int64_t k = 0; k < n; k++) {
                int32_t id = (int32_t)token_at(raw, k, (int)f->header.width);
                int is_target =
                    !(f->header.flags & TOKEN_FILE_MASKED) || token_is_target(&f->header, raw[n * f->header.width + k]);
                if (is_target && id < t->vocab_size && !is_special_token(t, id))
                    d->target_bytes += (int64_t)token_length(t, id);
            }
        }
    }
    free(raw);
}

static void eval_prepare_file(Evaluations *e) {
    Job *j = &e->job;
    j->val = dataset_open(e->opt.eval, j->run.seq, j->config.V, 1);
    eval_check_tokenizer(e);
    if (!j->run.tokenizer) note_other_tokenizer(j->run.adapters, j->run.model, &j->val.files[0]);
    if (j->run.doc_mask) eval_document_ends(e);
    job_check_data(j, &j->val);
    if (!j->val.target_bytes) eval_count_bytes(e);
}

/* One line of JSON. */
static void eval_print(const Evaluations *e, const Evaluation *found) {
    cJSON *line = cJSON_CreateObject();
    json_add_name(line, "file", e->opt.eval);
    json_add_integer(line, "tokens", found->targets);
    json_add_integer(line, "seq", e->job.run.seq);
    cJSON_AddItemToObject(line, "loss", json_real("%.9g", found->loss));
    double perplexity = exp(fmin(found->loss, 709)); // JSON has no infinity
    cJSON_AddItemToObject(line, "perplexity", json_real("%.9g", perplexity));
    if (isfinite(found->bits_per_byte))
        cJSON_AddItemToObject(line, "bits_per_byte", json_real("%.9g", found->bits_per_byte));
    json_write_line(stdout, line);
}

// ---------------------------------------------------------------------------
// requests

/* Reads the requests. Unless --seq and --batch are given, the longest request fits in a sequence, and a batch has about
 * as many tokens as the model's default. */
static void eval_prepare_requests(Evaluations *e) {
    Job *j = &e->job;
    RunSettings *run = &j->run;
    ModelTokenizer *m = &e->text;
    const char *path = e->opt.score ? e->opt.score : e->opt.choices;
    int cp = j->mesh.size[AXIS_CP], whole = 2 * SCORE_LENGTHS * cp;
    char what[UNSUPPORTED_BYTES], why_none[4096 + UNSUPPORTED_BYTES] = "there is none next to the model";
    if (run->tokenizer || model_tokenizer_is_known(m, what)) model_tokenizer_open(m); // requests may hold ids alone
    if (m->tokenizer) model_tokenizer_check(m, j->config.V, 1);
    else if (m->text) snprintf(why_none, sizeof why_none, "%s %s", m->path, what);
    requests_read(&e->requests, path, e->opt.choices != NULL, m->tokenizer, why_none, j->config.V);
    if (!option_given(j->options, "seq")) {
        int64_t default_tokens = (int64_t)run->batch * run->seq, longest = requests_longest(&e->requests);
        run->seq = (int)min_i64(round_up(longest, whole), j->config.max_positions / (2 * cp) * (2 * cp));
        if (!option_given(j->options, "batch")) run->batch = (int)max_i64(1, default_tokens / run->seq);
    }
    requests_cut(&e->requests, run->seq);
    requests_make_batches(&e->requests, run->batch, run->seq, cp > 1);
    j->purpose.softmax_statistics = 1;
    j->purpose.input_hash = e->requests.hash;
    j->purpose.input_option = e->opt.score ? "score" : "choices";
}

static void eval_prepare(Job *j) {
    Evaluations *e = (Evaluations *)j;
    model_tokenizer_find(&e->text, &j->run, e->opt.eval);
    if (j->run.tokenizer) model_tokenizer_open(&e->text);
    if (e->opt.eval) eval_prepare_file(e);
    else eval_prepare_requests(e);
}

static void eval_check_options(const Evaluations *e) {
    const EvalOptions *o = &e->opt;
    int modes = !!o->eval + !!o->score + !!o->choices;
    if (modes != 1)
        user_error("expected one of --eval, --score and --choices, found %s: eval_llama3 --help explains them",
                   modes ? "several" : "none");
    if (e->job.run.doc_mask && !o->eval)
        user_error("--doc-mask has no effect with --%s, where each text is a single document: remove --doc-mask",
                   o->score ? "score" : "choices");
}

// ---------------------------------------------------------------------------
// the ranks

static void eval_dry_run(Trainer *trainer) {
    const Evaluations *e = evaluations_of(trainer);
    if (e->opt.eval) {
        evaluate(trainer, &trainer->job->val, 1);
        return;
    }
    Scoring s = scoring_open(trainer, &e->requests);
    score_requests(&s);
}

static void eval_file(Trainer *trainer) {
    const Evaluations *e = evaluations_of(trainer);
    Evaluation found = evaluate(trainer, &e->job.val, 0);
    if (!isfinite(found.loss))
        user_error("the loss of %s on %s is %g, expected a finite number: check that the weights are those of this "
                   "model",
                   e->job.run.model, e->opt.eval, found.loss);
    if (trainer->parallel.rank == 0) eval_print(e, &found);
}

static void eval_requests(Trainer *trainer) {
    const Evaluations *e = evaluations_of(trainer);
    Scoring s = scoring_open(trainer, &e->requests);
    score_all(&s);
    if (trainer->parallel.rank) return;
    if (e->opt.score) print_scores(&s);
    else print_accuracy(&s);
}

static void eval_work(Trainer *trainer) {
    if (evaluations_of(trainer)->opt.eval) eval_file(trainer);
    else eval_requests(trainer);
}

static Purpose eval_purpose(void) {
    Purpose p = ZERO;
    p.program = eval_program.name;
    p.prepare = eval_prepare;
    p.dry_run = eval_dry_run;
    p.work = eval_work;
    return p;
}

static void evaluations_close(Evaluations *e) {
    requests_close(&e->requests);
    model_tokenizer_close(&e->text);
    job_close(&e->job);
}

#ifndef TESTING_PROGRAM
int main(int argc, char **argv) {
    static Evaluations e; // large for a small stack
    e.program = eval_program;
    e.job.purpose = eval_purpose();
    if (!program_begin(&e.program, &e.opt, &e.job, argc, argv)) return 0;
    eval_check_options(&e);
    program_run(&e.job, &argc, &argv);
    evaluations_close(&e);
    comm_end_process();
    return 0;
}
#endif
