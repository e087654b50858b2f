/* generate.h: generating text: the choice of the next token, and the loop over prompts.
 *
 * All ranks compute every token; rank 0 chooses and prints. */
#ifndef GENERATE_H
#define GENERATE_H
#include "../../lib/ops/cpu/attention_query.h" // computes attention of single queries
#include "../../lib/ops/cpu/vectors.h"         // defines: vexp, vmax, load_fill
#include "../../lib/io/output.h"               // defines: flush_results
#include "../shared/text_output.h"             // defines: TextOutput, text_output_token
#include "generation.h"                        // defines: Generation, Prompt, is_stop_token, Trainer
#include <float.h>                             // defines: FLT_MIN

typedef struct {
    float p; // probability, up to a common factor
    int32_t id;
} Candidate;

typedef struct {
    Trainer *trainer;
    Candidate *scratch; // (V)
} Generator;

// ---------------------------------------------------------------------------
// the logits of the next token

/* The logits (V), in host memory, of the token after the given ones; `past` tokens before them are in the cache. */
static const float *next_token_logits(Trainer *trainer, int32_t *ids, int count, int past) {
    Llama3 *m = &trainer->model;
    int C = m->config.C, V = m->config.V;
    StepBatch batch = ZERO;
    batch.inputs = ids;
    model_set_tokens(m, m->B, count, past);
    model_forward(m, &trainer->parallel.pipeline, &batch);
    const HeadWeights w = head_weights(m, NO_GRADIENTS);
    const floatX *x = final_norm_forward(m, &w);
    linear_forward_logits(m->dev, model_logits(m, 0), x + (int64_t)(count - 1) * C, w.head, 1, C, V);
    fsdp_reshard(m->fsdp, fsdp_unit(m, m->table.head), AFTER_LAST_USE);
    device_read(m->dev, m->next_logits, m->logits, sizeof(float) * V);
    return m->next_logits;
}

// ---------------------------------------------------------------------------
// the choice of a token

/* Uniform in [0, 1), a function of the seed and the number of the token: the same on every rank. */
static double uniform_of_seed(uint64_t seed, int64_t number) {
    return (double)(mix64(seed * 0x9E3779B97F4A7C15ull + (uint64_t)number) >> 11) * 0x1p-53;
}

/* Most probable first; of equal ones the smaller id first. */
static inline int is_likelier(Candidate a, Candidate b) { return a.p != b.p ? a.p > b.p : a.id < b.id; }

/* Restores the order of a heap (count), the likeliest on top, below element i. */
static void heap_sift(Candidate *heap, int count, int i) {
    for (int child = 2 * i + 1; child < count; child = 2 * i + 1) {
        if (child + 1 < count && is_likelier(heap[child + 1], heap[child])) child++;
        if (!is_likelier(heap[child], heap[i])) return;
        Candidate moved = heap[i];
        heap[i] = heap[child];
        heap[child] = moved;
        i = child;
    }
}

/* Are all logits finite numbers? */
static int logits_are_finite(const float *logits /* (V) */, int V) {
    vfloat zero = vsplat(0);
    for (int v = 0; v < V; v += VL) zero += load_fill(logits + v, V - v, 0) * vsplat(0); // else NaN
    return vsum(zero) == 0;
}

/* The first of the largest logits. */
static int32_t likeliest_token(const float *logits /* (V) */, int V) {
    vfloat largest = vsplat(-INFINITY);
    for (int v = 0; v < V; v += VL) largest = vmax(load_fill(logits + v, V - v, -INFINITY), largest);
    float max = vmax_lane(largest);
    int32_t v = 0;
    while (v < V - 1 && logits[v] != max) v++;
    return v;
}

/* exp((logit - largest) / temperature) of VL tokens; 0 beyond the vocabulary. */
static inline vfloat probabilities_at(const float *logits, int v, int V, float largest, float temperature) {
    return vexp((load_fill(logits + v, V - v, -INFINITY) - largest) / temperature);
}

/* Samples with temperature from the nucleus of the top_k most probable tokens: the fewest of these with at least top_p
 * of their total probability (Holtzman et al. 2020). Temperature 0 takes the most probable token, and so does one that
 * is less than the smallest normal fp32 number, by which one cannot divide. `u` is uniform in [0, 1). */
static int32_t sample_token(const float *logits /* (V) */, int V, const Sampling *s, double u,
                            Candidate *scratch /* (V) */) {
    int32_t likeliest = likeliest_token(logits, V);
    double top_p = s->top_p;
    float divisor = (float)s->temperature, largest = logits[likeliest];
    if (divisor < FLT_MIN) return likeliest;
    vfloat total = vsplat(0);
    for (int v = 0; v < V; v += VL) total += probabilities_at(logits, v, V, largest, divisor);
    double sum = vsum(total), nucleus = 0;
    // All tokens below this bound together have less than 1 - top_p, even if they are V: none is in the nucleus.
    float least = s->top_k ? 0 : (float)((1 - top_p) * sum / V * 0.5);
    int count = 0, taken = 0;
    for (int v = 0; v < V; v += VL) {
        vfloat p = probabilities_at(logits, v, V, largest, divisor);
        if (vmax_lane(p) < least) continue;
        for (int i = 0; i < VL && v + i < V; i++) {
            Candidate candidate = {p[i], v + i};
            if (!(p[i] < least)) scratch[count++] = candidate;
        }
    }
    for (int i = count / 2 - 1; i >= 0; i--) heap_sift(scratch, count, i);
    int most = s->top_k ? (int)min_i64(s->top_k, count) : count;
    while (taken < most && (taken == 0 || s->top_k || nucleus < top_p * sum)) { // moves the top behind the heap
        Candidate top = scratch[0];
        nucleus += top.p;
        taken++;
        scratch[0] = scratch[count - taken];
        scratch[count - taken] = top;
        heap_sift(scratch, count - taken, 0);
    }
    for (double all = nucleus; taken > 1 && s->top_k && nucleus - scratch[count - taken].p >= top_p * all; taken--)
        nucleus -= scratch[count - taken].p;
    for (int i = 1; i <= taken; i++) {
        u -= scratch[count - i].p / nucleus;
        if (u < 0) return scratch[count - i].id;
    }
    return taken ? scratch[count - taken].id : 0;
}

/* Replaces `value`, which is no larger than a StepReport, by that of rank 0. */
static void take_from_rank_0(Trainer *trainer, const char *what, void *value, size_t bytes) {
    Parallel *p = &trainer->parallel;
    if (p->mesh.world == 1) return;
    all_gather_now(&p->comm, AXIS_WORLD, what, value, trainer->reports.of_ranks, bytes);
    memcpy(value, trainer->reports.of_ranks, bytes);
}

// ---------------------------------------------------------------------------
// prompts

static Generator generator_open(Trainer *trainer) {
    Generator g = {trainer, new_array(Candidate, trainer->model.config.V)};
    return g;
}

/* The dry run: the calls that need the most memory. The longest input comes after at most `past` tokens. */
static void generator_dry_run(Trainer *trainer, int longest_input, int past) {
    next_token_logits(trainer, NULL, longest_input, past);
    next_token_logits(trainer, NULL, 1, trainer->job->purpose.cached_positions - 1);
}

/* The id of token `number` of an answer. */
static int32_t next_token(Generator *g, const Sampling *s, const float *logits, int64_t number) {
    int V = g->trainer->model.config.V;
    if (!logits_are_finite(logits, V))
        user_error("the logits of token %" PRId64 " are not finite numbers: check that the weights of %s are those of "
                   "this model",
                   number + 1, g->trainer->job->run.model);
    return sample_token(logits, V, s, uniform_of_seed(s->seed, number), g->scratch);
}

/* Prints the answer to a request, `ids` (count), as a line of JSON. Its text is without special tokens. */
static void print_answer(const Prompt *prompt, const Tokenizer *t, const int32_t *ids, int count) {
    cJSON *line = cJSON_CreateObject();
    char *text, *quoted;
    size_t length, quoted_length;
    FILE *f = text_stream_open(&text, &length);
    TextOutput out = {f, 1, 0, {0}, 0};
    for (int i = 0; i < count; i++)
        if (!is_special_token(t, ids[i])) text_output_token(&out, t, ids[i]);
    text_output_end(&out);
    text_stream_close(f);
    if (prompt->name) cJSON_AddRawToObject(line, "id", prompt->name);
    f = text_stream_open(&quoted, &quoted_length);
    json_write_string(f, text, length); // which may hold NULs
    text_stream_close(f);
    cJSON_AddRawToObject(line, "text", quoted);
    cJSON_AddItemToObject(line, "ids", cJSON_CreateIntArray(ids, count));
    json_write_line(stdout, line);
    free(text);
    free(quoted);
}

/* Prints the prompt and its continuation, or the answer to a request. */
static void continue_prompt(Generator *g, const Prompt *prompt) {
    Trainer *trainer = g->trainer;
    const Generation *asked = generation_of(trainer);
    const Tokenizer *t = asked->text.tokenizer;
    int is_first = trainer->parallel.rank == 0, prints = is_first && !prompt->is_request, count = 0;
    int32_t *ids = new_array(int32_t, prompt->max_tokens);
    TextOutput out = text_output_open();
    for (int i = prompt->unprinted; i < (int)prompt->length && prints; i++) text_output_token(&out, t, prompt->ids[i]);
    if (prints) flush_results();
    const float *logits = next_token_logits(trainer, prompt->ids, (int)prompt->length, 0);
    while (count < prompt->max_tokens) {
        int32_t id = next_token(g, &prompt->sampling, logits, count);
        // GPUs of different kinds may differ in the last bits of the logits
        take_from_rank_0(trainer, "next token", &id, sizeof id);
        if (is_stop_token(&asked->stop_tokens, t, id, prompt->is_request)) break;
        ids[count++] = id;
        if (prints) {
            text_output_token(&out, t, id);
            flush_results();
        }
        if (count < prompt->max_tokens) logits = next_token_logits(trainer, &id, 1, (int)prompt->length + count - 1);
    }
    if (is_first && prompt->is_request) print_answer(prompt, t, ids, count);
    if (prints) {
        text_output_end(&out);
        printf("\n");
    }
    if (is_first) flush_results();
    free(ids);
}

/* Continues the prompts of --prompt and --prompts, one after the other. An empty line separates their texts. */
static void generate(Trainer *trainer) {
    const Prompts *prompts = &generation_of(trainer)->prompts;
    if (trainer->parallel.dev.dry_run) {
        generator_dry_run(trainer, prompts->longest, 0);
        return;
    }
    Generator g = generator_open(trainer);
    for (int i = 0; i < prompts->count; i++) {
        if (i && trainer->parallel.rank == 0 && !prompts->list[i].is_request) printf("\n");
        continue_prompt(&g, &prompts->list[i]);
    }
    free(g.scratch);
}

#endif
