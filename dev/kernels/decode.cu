/* decode.cu: the speed of generation next to the limit that memory sets, measured in turns in one run.
 *
 *   decode MODEL [ROUNDS [TOKENS]]    medians of ROUNDS (7), in each of which TOKENS (64) tokens are generated
 *
 * A token needs every weight and all cached keys and values once. The limit is the rate at which the same threads read
 * a buffer that is larger than the caches and do nothing else with it.
 */
#define TESTING_PROGRAM
#include "programs/generate_llama3.cu"
#include "programs/shared/median.h" // defines: median_of
#include "one_rank.h"               // defines: OneRank, one_rank_open, one_rank_close

enum { BUFFER_BYTES = 1 << 29, STREAMS_OF_SUMS = 8, DECODE_ROUNDS = 64 };

/* Bytes per second at which the threads read the buffer. Each has a part of it, in order. */
static double read_rate(const float *buffer, int threads) {
    int64_t vectors = BUFFER_BYTES / (int64_t)sizeof(vfloat);
    float total = 0;
    double start = seconds_now();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t thread = 0; thread < threads; thread++) {
        vfloat sum[STREAMS_OF_SUMS];
        for (int i = 0; i < STREAMS_OF_SUMS; i++) sum[i] = vsplat(0);
        int64_t begin = vectors * thread / threads, end = vectors * (thread + 1) / threads;
        for (int64_t v = begin; v + STREAMS_OF_SUMS <= end; v += STREAMS_OF_SUMS)
#pragma GCC unroll 8
            for (int i = 0; i < STREAMS_OF_SUMS; i++) sum[i] += vload(buffer + (v + i) * VL);
        for (int i = 0; i < STREAMS_OF_SUMS; i++) total += vsum(sum[i]);
    }
    double seconds = seconds_now() - start;
    if (total != 0) run_failure("the buffer holds zeros, and their sum is %g", total);
    return (double)BUFFER_BYTES / seconds;
}

/* Bytes of weights that a token needs: all but the rows of an embedding that is not also the head. */
static double weight_bytes(const Trainer *trainer) {
    const TensorTable *table = &trainer->model.table;
    double elements = 0;
    for (int i = 0; i < table->num_tensors; i++) {
        const Tensor *t = &table->tensors[i];
        int is_lookup = t->row->kind == W_EMBED && !table_is_tied(table);
        if (!is_lookup && !t->is_tied_copy) elements += (double)t->rows * (double)t->cols;
    }
    return elements * sizeof(floatX);
}

/* Seconds per token for `tokens` tokens after the prompt, including their choice. */
static double decode(Generator *g, int tokens) {
    const Prompt *prompt = &generation_of(g->trainer)->prompts.list[0];
    const float *logits = next_token_logits(g->trainer, prompt->ids, (int)prompt->length, 0);
    double start = seconds_now();
    for (int i = 0; i < tokens; i++) {
        int32_t id = next_token(g, &prompt->sampling, logits, i);
        logits = next_token_logits(g->trainer, &id, 1, (int)prompt->length + i);
    }
    return (seconds_now() - start) / tokens;
}

static void measure(Generator *g, int rounds, int tokens) {
    const Trainer *trainer = g->trainer;
    const Llama3Config *c = &trainer->model.config;
    int threads = trainer->parallel.dev.on.threads;
    double seconds[DECODE_ROUNDS], rates[DECODE_ROUNDS], parts[DECODE_ROUNDS];
    double positions = (double)generation_of(trainer)->prompts.longest + tokens / 2.0; // on average
    double bytes = weight_bytes(trainer) + positions * c->L * 2.0 * c->NKV * c->HD * sizeof(floatX);
    float *buffer = (float *)aligned_alloc(1 << 21, BUFFER_BYTES);
    if (!buffer) user_error("%d bytes for the buffer cannot be allocated", (int)BUFFER_BYTES);
#ifdef LINUX
    madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); // reading must not wait for page tables
#endif
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < BUFFER_BYTES / (int64_t)sizeof(float); i++) buffer[i] = 0;
    decode(g, tokens); // not measured
    for (int i = 0; i < rounds; i++) {
        double before = read_rate(buffer, threads);
        seconds[i] = decode(g, tokens);
        rates[i] = fmax(before, read_rate(buffer, threads));
        parts[i] = bytes / seconds[i] / rates[i];
    }
    double token = median_of(seconds, rounds), rate = median_of(rates, rounds);
    printf("| %s | %d | %.1f | %.1f | %.1f | %.1f | %.1f | %.0f %% |\n", PRECISION_NAME, threads, bytes / 1e6,
           rate / 1e9, rate / bytes, 1 / token, 1e3 * token, 100 * median_of(parts, rounds));
    free(buffer);
}

int main(int argc, char **argv) {
    limit_spinning(argv);
    int rounds = argc > 2 ? atoi(argv[2]) : 7, tokens = argc > 3 ? atoi(argv[3]) : 64;
    if (argc < 2 || rounds < 1 || rounds > DECODE_ROUNDS || tokens < 1)
        user_error("decode was given %d arguments, expected: MODEL, 1 to %d rounds, and how many tokens", argc - 1,
                   (int)DECODE_ROUNDS);
    char count[32];
    snprintf(count, sizeof count, "%d", tokens);
    char *arguments[] = {
        argv[0], (char *)"--model", argv[1], (char *)"--prompt", (char *)"Once upon a time", (char *)"--max-tokens",
        count};
    static Generation asked;
    asked.program = generate_program;
    asked.job.purpose = generate_purpose();
    job_take_options(&asked.job, program_options_parse(&asked.program, &asked.opt, 7, arguments));
    OneRank *o = one_rank_open(&asked.job);
    Generator g = generator_open(&o->trainer);
    measure(&g, rounds, tokens);
    free(g.scratch);
    one_rank_close(o);
    return 0;
}
