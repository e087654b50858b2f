/* logits.cu: writes the program's logits at every position, for compare_smollm2.py and compare_adapters.py.
 *   logits MODEL IDS T [ADAPTERS] > LOGITS    IDS: int32, windows of T ids; LOGITS: float, (windows, T, V)
 */
#define TESTING_PROGRAM
#include "programs/generate_llama3.cu"
#include "dev/kernels/one_rank.h" // defines: OneRank, one_rank_open

/* Writes the logits of all T tokens that next_token_logits computed, from the final norm that it left behind; it
 * returns those of the last token only. */
static void all_logits(Llama3 *m, int T, FILE *out) {
    int C = m->config.C, V = m->config.V;
    const HeadWeights w = head_weights(m, NO_GRADIENTS);
    for (int t = 0; t < T; t++) {
        linear_forward_logits(m->dev, model_logits(m, 0), m->final_norm + (int64_t)t * C, w.head, 1, C, V);
        device_read(m->dev, m->next_logits, m->logits, sizeof(float) * (size_t)V);
        if (fwrite(m->next_logits, sizeof(float), (size_t)V, out) != (size_t)V)
            run_failure("the logits could not be written: %s", strerror(errno));
    }
    fsdp_reshard(m->fsdp, &m->fsdp->units[m->table.head], AFTER_LAST_USE);
}

static void dry_run_window(Trainer *trainer) { generator_dry_run(trainer, trainer->job->run.seq, 0); }

int main(int argc, char **argv) {
    if (argc < 4 || argc > 5 || atoi(argv[3]) < 1)
        user_error("logits was given %d arguments, expected: MODEL IDS T, and perhaps ADAPTERS", argc - 1);
    char *arguments[] = {argv[0], (char *)"--model", argv[1], (char *)"--adapters", argv[4]};
    size_t length;
    int T = atoi(argv[3]);
    char *ids = read_file(argv[2], &length);
    if (!ids || length % (sizeof(int32_t) * (size_t)T))
        user_error("%s is no file of int32 ids in windows of %d", argv[2], T);
    static Job job;
    job_take_options(&job, options_parse(argc == 5 ? 5 : 3, arguments));
    job.purpose = generate_purpose();
    job.purpose.prepare = NULL; // there is no prompt
    job.purpose.dry_run = dry_run_window;
    job.purpose.cached_positions = T;
    job.run.batch = 1;
    job.run.seq = T; // as if the prompt were a window
    Trainer *trainer = &one_rank_open(&job)->trainer;
    for (size_t at = 0; at < length; at += sizeof(int32_t) * (size_t)T) {
        next_token_logits(trainer, (int32_t *)(ids + at), T, 0);
        all_logits(&trainer->model, T, stdout);
    }
    return fflush(stdout) ? 2 : 0;
}
