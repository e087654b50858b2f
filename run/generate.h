/* generate.h: a text continued, token by token.
 *
 * Included by train_llama3.cu behind the forward pass. A caller may rely on: keys and values of what came before are
 * kept, not computed again; all ranks compute, over any FSDP layout, and go on with rank 0's token.
 */

/* Logits (V), on the host, of the token after the given ones; `past` tokens came before and are in the cache. */
static const float *next_token_logits(Trainer *trainer, const int32_t *ids, int count, int past) {
    const Llama3Config *c = &trainer->model.config;
    Model *m = &trainer->model;
    model_set_tokens(m, m->B, count, past);
    device_write(&trainer->parallel.dev, m->ids, ids, sizeof(int32_t) * (size_t)count);
    model_forward(m, &trainer->parallel.pipeline);
    const HeadWeights w = head_weights(m, NO_GRADIENTS);
    const floatX *x = final_norm_forward(m, &w) + (int64_t)(count - 1) * c->C;
    linear_forward_fp32(&trainer->parallel.dev, m->logits, x, w.head, 1, c->C, c->V);
    fsdp_reshard(m->fsdp, &m->fsdp->units[m->table.head], AFTER_LAST_USE);
    device_read(&trainer->parallel.dev, m->next_logits, m->logits, sizeof(float) * (size_t)c->V);
    return m->next_logits;
}

typedef struct {
    float p;
    int32_t id;
} Candidate;

static int by_probability(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p < y->p ? 1 : x->p > y->p ? -1 : (x->id > y->id) - (x->id < y->id);
}

/* One token by temperature and nucleus sampling (Holtzman et al. 2020); `u` is uniform in [0, 1). */
static int32_t sample_token(const float *logits, int V, double temperature, double top_p, double u,
                            Candidate *scratch) {
    float largest = logits[0];
    double sum = 0, kept = 0;
    for (int v = 1; v < V; v++) largest = logits[v] > largest ? logits[v] : largest;
    for (int v = 0; v < V; v++) {
        scratch[v].id = v;
        scratch[v].p = temperature > 0 ? expf((logits[v] - largest) / (float)temperature) : logits[v] == largest;
        sum += scratch[v].p;
    }
    qsort(scratch, (size_t)V, sizeof *scratch, by_probability);
    int n = 0;
    while (n < V && (n == 0 || kept < top_p * sum)) kept += scratch[n++].p;
    if (temperature == 0) n = 1, kept = scratch[0].p;
    for (int i = 0; i < n; i++)
        if ((u -= scratch[i].p / kept) < 0) return scratch[i].id;
    return scratch[n - 1].id;
}

/* Continues the prompt `ids`; all ranks compute it, rank 0 prints it. */
static void generate(Trainer *trainer, const Tokenizer *tokenizer, const int32_t *ids, int count) {
    int V = trainer->model.config.V;
    if (trainer->parallel.dev.dry_run) { // the two shapes that need the most memory
        next_token_logits(trainer, ids, count, 0);
        next_token_logits(trainer, ids, 1, count + trainer->opt->max_tokens - 1);
        return;
    }
    Candidate *scratch = (Candidate *)checked_malloc(sizeof(Candidate) * (size_t)V);
    const float *logits = next_token_logits(trainer, ids, count, 0);
    for (int i = 0; i < count && trainer->parallel.rank == 0; i++) print_token(tokenizer, ids[i], stdout);
    for (int i = 0; i < trainer->opt->max_tokens; i++) {
        double u = (double)(mix64((uint64_t)trainer->opt->seed * 0x9E3779B97F4A7C15ull + (uint64_t)i) >> 11) * 0x1p-53;
        int32_t id = sample_token(logits, V, trainer->opt->temperature, trainer->opt->top_p, u, scratch);
        if (trainer->parallel.mesh.world > 1) { // all go on with rank 0's: GPUs that differ may differ in the last bits
            all_gather_now(&trainer->parallel.comm, AXIS_WORLD, "next token", &id, trainer->reports, sizeof id);
            memcpy(&id, trainer->reports, sizeof id);
        }
        if (tokenizer_ends(tokenizer, id) || id >= tokenizer->vocab_size) break;
        if (trainer->parallel.rank == 0) print_token(tokenizer, id, stdout), fflush(stdout);
        if (i + 1 < trainer->opt->max_tokens) logits = next_token_logits(trainer, &id, 1, count + i);
    }
    if (trainer->parallel.rank == 0) printf("\n");
    free(scratch);
}
