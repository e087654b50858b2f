/* logits.cu: the program's logits at every position; compare_smollm2.py and compare_adapters.py ask it.
 *   logits MODEL IDS T [ADAPTERS] > LOGITS    IDS: int32, windows of T ids; LOGITS: float, (windows, T, V)
 */
#define TESTING
#include "train_llama3.cu"

/* The last layers of next_token_logits, which computes one row alone, for all T rows of what it computed them from. */
static void all_logits(Trainer *trainer, int T, FILE *out) {
    const Llama3Config *c = &trainer->model.config;
    Model *m = &trainer->model;
    FsdpUnit *head = &trainer->parallel.fsdp.units[trainer->model.table.head];
    const floatX *w = fsdp_unshard(&trainer->parallel.fsdp, head) +
                      head->unit->offsets[head->unit->kind == UNIT_HEAD ? W_HEAD : W_EMBED];
    for (int t = 0; t < T; t++) {
        linear_forward_fp32(&trainer->parallel.dev, m->logits, m->final_norm + (int64_t)t * c->C, w, 1, c->C, c->V);
        device_read(&trainer->parallel.dev, m->next_logits, m->logits, sizeof(float) * (size_t)c->V);
        if (fwrite(m->next_logits, sizeof(float), (size_t)c->V, out) != (size_t)c->V)
            run_failure("the logits could not be written: %s", strerror(errno));
    }
    fsdp_reshard(&trainer->parallel.fsdp, head, AFTER_LAST_USE);
}

int main(int argc, char **argv) {
    if (argc < 4 || argc > 5 || atoi(argv[3]) < 1)
        user_error("logits was given %d arguments, expected: MODEL IDS T, and perhaps ADAPTERS", argc - 1);
    char *arguments[] = {argv[0],     (char *)"--model",    argv[1], (char *)"--generate",
                         (char *)"x", (char *)"--adapters", argv[4]};
    size_t length;
    int T = atoi(argv[3]);
    char *ids = read_file(argv[2], &length);
    if (!ids || length % (sizeof(int32_t) * (size_t)T))
        user_error("%s is no file of int32 ids in windows of %d", argv[2], T);
    Job *j = (Job *)checked_malloc(sizeof *j);
    j->opt = options_parse(argc == 5 ? 7 : 5, arguments);
    j->transport = j->host_transport = &transport_threads;
    job_prepare(j, 1, 1, 1);
    j->opt.seq = T; // as if the prompt were a window
    Trainer *trainer = (Trainer *)checked_malloc(sizeof *trainer),
            *dry_run = (Trainer *)checked_malloc(sizeof *dry_run);
    j->prompt_length = (size_t)T;
    j->prompt = (int32_t *)grown(j->prompt, sizeof(int32_t) * (size_t)T);
    dry_run_open(dry_run, j, 0, NULL);
    trainer_open(trainer, dry_run, j, 0);
    for (size_t at = 0; at < length; at += sizeof(int32_t) * (size_t)T) {
        next_token_logits(trainer, (const int32_t *)(ids + at), T, 0);
        all_logits(trainer, T, stdout);
    }
    return fflush(stdout) ? 2 : 0;
}
