/* bench.cu: the time of a whole training step next to the time of its matmuls alone, measured in turns in one run.
 *
 *   bench MODEL [ROUNDS]    medians; the step's efficiency is (matmul time) / (step time)
 *
 * The matmuls are those of the step, in its order and shapes, on the same buffers: oneDNN on plain layouts and nothing
 * else. What is missing to 100 % is attention and the ops that are limited by memory bandwidth.
 */
#define TESTING
#include "train_llama3.cu"
#include "programs/shared/median.h" // defines: median_of
#include "one_rank.h"               // defines: OneRank, one_rank_open, one_rank_close

static void forward_matmuls(Trainer *trainer) {
    const Llama3Config *c = &trainer->model.config;
    Llama3 *m = &trainer->model;
    int N = m->B * m->T, Q = c->NH * c->HD, QKV = qkv_width(c);
    for (int l = 0; l < c->L; l++) {
        BlockActivations *a = &m->blocks[l];
        const FsdpUnit *u = &trainer->parallel.fsdp.units[table_block_unit(&trainer->model.table, l)];
        const int64_t *at = u->table_unit->offsets;
        const floatX *w = u->sharded_weights;
        linear_forward(&trainer->parallel.dev, a->qkv, a->attn_norm, w + at[W_Q], N, c->C, QKV);
        linear_forward(&trainer->parallel.dev, m->sublayer_out, a->attn, w + at[W_O], N, Q, c->C);
        linear_forward(&trainer->parallel.dev, a->gate_up, a->mlp_norm, w + at[W_GATE], N, c->C, 2 * c->F);
        linear_forward(&trainer->parallel.dev, m->sublayer_out, a->swiglu, w + at[W_DOWN], N, c->F, c->C);
    }
}

static void backward_matmuls(Trainer *trainer) {
    const Llama3Config *c = &trainer->model.config;
    Llama3 *m = &trainer->model;
    int N = m->B * m->T, Q = c->NH * c->HD, QKV = qkv_width(c);
    for (int l = c->L - 1; l >= 0; l--) {
        BlockActivations *a = &m->blocks[l];
        const FsdpUnit *u = &trainer->parallel.fsdp.units[table_block_unit(&trainer->model.table, l)];
        const int64_t *at = u->table_unit->offsets;
        const floatX *w = u->sharded_weights;
        float *dw = u->grad;
        linear_backward_input(&trainer->parallel.dev, m->d_swiglu, m->d_x, c->C, w + at[W_DOWN], N, c->F, c->C);
        linear_backward_weight(&trainer->parallel.dev, dw + at[W_DOWN], m->d_x, c->C, a->swiglu, N, c->F, c->C, 0);
        linear_backward_input(&trainer->parallel.dev, m->d_norm, a->gate_up, 2 * c->F, w + at[W_GATE], N, c->C,
                              2 * c->F);
        linear_backward_weight(&trainer->parallel.dev, dw + at[W_GATE], a->gate_up, 2 * c->F, a->mlp_norm, N, c->C,
                               2 * c->F, 0);
        linear_backward_input(&trainer->parallel.dev, m->d_attn, m->d_x, c->C, w + at[W_O], N, Q, c->C);
        linear_backward_weight(&trainer->parallel.dev, dw + at[W_O], m->d_x, c->C, a->attn, N, Q, c->C, 0);
        linear_backward_input(&trainer->parallel.dev, m->d_norm, m->d_qkv, QKV, w + at[W_Q], N, c->C, QKV);
        linear_backward_weight(&trainer->parallel.dev, dw + at[W_Q], m->d_qkv, QKV, a->attn_norm, N, c->C, QKV, 0);
    }
}

static void head_matmuls(Trainer *trainer) {
    const Llama3Config *c = &trainer->model.config;
    Llama3 *m = &trainer->model;
    const FsdpUnit *u = &trainer->parallel.fsdp.units[trainer->model.table.head];
    int64_t head = u->table_unit->offsets[W_HEAD], stride = logits_stride(c->V);
    for (int row = 0; row < m->B * m->T; row += m->logit_rows) {
        int n = (int)min_i64(m->logit_rows, m->B * m->T - row);
        const floatX *in = m->final_norm + (int64_t)row * c->C, *dlogits = (const floatX *)m->logits;
        linear_forward_logits(&trainer->parallel.dev, model_logits(m, 1), in, u->sharded_weights + head, n, c->C, c->V);
        linear_backward_input(&trainer->parallel.dev, m->d_norm + (int64_t)row * c->C, dlogits, stride,
                              u->sharded_weights + head, n, c->C, c->V);
        linear_backward_weight(&trainer->parallel.dev, u->grad + head, dlogits, stride, in, n, c->C, c->V, row > 0);
    }
}

enum { BENCH_ROUNDS = 64 };
typedef struct {
    int rounds;
    double steps[BENCH_ROUNDS], matmuls[BENCH_ROUNDS], ratios[BENCH_ROUNDS]; // seconds; ratios: matmuls / steps
    OpStat ops[OP_COUNT];                                                    // of one step; seconds are means
} Measured;

static void write_random_tokens(FILE *f) {
    TokenFileHeader h = ZERO;
    memcpy(h.magic, TOKEN_FILE_MAGIC, 8);
    h.version = TOKEN_FILE_VERSION;
    h.document_end = h.front = NO_ID;
    h.width = 2;
    h.vocab_size = 4096;
    h.count = 200000;
    fwrite(&h, sizeof h, 1, f);
    for (uint64_t i = 0; i < h.count; i++) {
        uint16_t token = (uint16_t)(mix64(i) % 4096);
        fwrite(&token, 2, 1, f);
    }
}

/* Steps and their matmuls in turns, after a first step that is not measured. */
static void measure(Trainer *trainer, Measured *m) {
    train_step(trainer, 1);
    for (int i = 0; i < m->rounds; i++) {
        OpStat *ops = trainer->parallel.dev.rec.ops;
        memset(ops, 0, sizeof trainer->parallel.dev.rec.ops);
        m->steps[i] = train_step(trainer, i + 2).seconds;
        for (int o = 0; o < OP_COUNT; o++) {
            m->ops[o].calls = ops[o].calls;
            m->ops[o].flops = ops[o].flops;
            m->ops[o].bytes = ops[o].bytes;
            m->ops[o].seconds += ops[o].seconds / m->rounds;
        }
        double start = seconds_now();
        forward_matmuls(trainer);
        head_matmuls(trainer);
        backward_matmuls(trainer);
        m->matmuls[i] = seconds_now() - start;
        m->ratios[i] = m->matmuls[i] / m->steps[i];
    }
}

static void print_measured(const char *model, const Trainer *trainer, Measured *m) {
    const RunSettings *run = &trainer->job->run;
    const OpStat *ops = m->ops;
    double flops =
        ops[OP_LINEAR_FORWARD].flops + ops[OP_LINEAR_BACKWARD_INPUT].flops + ops[OP_LINEAR_BACKWARD_WEIGHT].flops;
    double step = median_of(m->steps, m->rounds), matmul = median_of(m->matmuls, m->rounds);
    printf("%s, %s, %d threads, %d rounds, medians\n", model, PRECISION_NAME, trainer->parallel.dev.on.threads,
           m->rounds);
    printf("  step      %9.1f ms  %8.0f tokens/s  %6.1f GFLOP/s of matmuls\n", 1e3 * step, run->batch * run->seq / step,
           flops / step / 1e9);
    printf("  matmuls   %9.1f ms                    %6.1f GFLOP/s\n", 1e3 * matmul, flops / matmul / 1e9);
    printf("  the whole step runs at %.1f %% of the rate of its matmuls\n", 100 * median_of(m->ratios, m->rounds));
    printf("  %-24s %6s %10s %10s %10s\n", "op", "calls", "ms a step", "GFLOP/s", "GB/s");
    for (int o = 0; o < OP_COUNT; o++)
        if (ops[o].calls)
            printf("  %-24s %6" PRId64 " %10.2f %10.1f %10.1f\n", op_names[o], ops[o].calls, 1e3 * ops[o].seconds,
                   ops[o].flops / ops[o].seconds / 1e9, ops[o].bytes / ops[o].seconds / 1e9);
}

int main(int argc, char **argv) {
    if (argc < 2) user_error("bench MODEL [ROUNDS]");
    static Measured measured;
    measured.rounds = argc > 2 ? atoi(argv[2]) : 7;
    if (measured.rounds < 1 || measured.rounds > BENCH_ROUNDS)
        user_error("ROUNDS is %d, expected 1 to %d", measured.rounds, BENCH_ROUNDS);
    char path[] = "/tmp/llama3-bench-XXXXXX";
    FILE *f = fdopen(mkstemp(path), "wb");
    write_random_tokens(f);
    fclose(f);
    char *arguments[] = {argv[0], (char *)"--model", argv[1], (char *)"--data", path, (char *)"--warmup", (char *)"0"};
    static Job job;
    job_take_options(&job, options_parse(7, arguments));
    job.purpose = training();
    OneRank *o = one_rank_open(&job);
    unlink(path);
    measure(&o->trainer, &measured);
    print_measured(argv[1], &o->trainer, &measured);
    one_rank_close(o);
    return 0;
}
