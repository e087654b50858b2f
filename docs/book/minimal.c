/* minimal.c: Llama 3 and ZeRO-3 in one file of plain C, to be read from the first line to the last.
 *
 *     cc -O3 -fopenmp docs/book/minimal.c -lm -o minimal
 *     ./minimal MODEL_DIR DATA.tok RANKS STEPS T
 *
 * It trains the model in MODEL_DIR (config.json and model.safetensors, in fp32) on a token file with RANKS ranks, for
 * STEPS steps of one sequence of T tokens per rank. It prints the loss and the gradient norm of each step, and at the
 * end how many bytes of weights and gradients rank 0 received per step. It does nothing else, and saves nothing. It
 * shares no code with train_llama3, so each checks the other: both must have the same losses but for rounding, and
 * receive the same number of bytes.
 *
 * ZeRO-3 (Rajbhandari et al. 2020), which PyTorch calls FSDP, is data parallelism that stores nothing twice. In plain
 * data parallelism each of N ranks has the whole model and trains on a sequence of its own; then the ranks add up their
 * gradients, and all make the same update. Here the model is divided into units: the embedding, each block, the head.
 * All tensors of a unit lie in a row, and each rank keeps one Nth of that row, its shard, wherever the cuts fall:
 *
 *     unit            | norm | Q            | K  | V  | O        | norm | gate      | up        | down      | padding |
 *     shards, N = 3   |            rank 0            |            rank 1            |            rank 2             |
 *
 * A rank has its shards of the weights, of their gradient, and of AdamW's two moments. This is one step of a rank:
 *
 *   1. Read this rank's sequence.
 *   2. For the embedding and then each block: all-gather the weights from the shards of all ranks, compute with them,
 *      free them. What backward needs of a block's intermediate results, its activations, stays in memory.
 *   3. For the head: all-gather its weights, compute the logits and the loss, and at once the gradients of its weights
 *      and of its input; free the weights; reduce-scatter the gradient: each rank receives its own shard of it, summed
 *      over all ranks, and frees the rest.
 *   4. For each block in the reverse order: all-gather the weights again, because forward has freed them; compute the
 *      gradients of the weights and of the block's input; free the weights; reduce-scatter the gradient. Last comes the
 *      embedding, whose gradient needs no weights.
 *   5. Add up three numbers over all ranks: the losses, the targets, and the squares of the gradient's elements.
 *   6. Divide the gradient by the number of targets, clip it, and update the rank's own shards with AdamW. Nothing is
 *      sent: the next all-gather reads the new weights.
 *
 * So a rank always has 16 / N bytes per parameter (four arrays of fp32), and the activations and work buffers of its
 * own sequence, which ZeRO-3 does not divide; the largest are the logits or, for a large T, the attention probabilities
 * of all blocks (train_llama3 never stores either whole). While a block runs forward, the rank also has the block's
 * weights in full size (4 bytes per parameter of the block), and while it runs backward, and for the head, the weights
 * and the gradient (8). With E, B and H elements in the embedding, a block and the head, padding included, each rank
 * receives 4 (N - 1) / N (2 E + 3 L B + 2 H) bytes per step besides the three numbers: of each unit its weights and its
 * gradient, of each block the weights twice. That is about 12 P (N - 1) / N for P parameters, nearly all in blocks.
 * Plain data parallelism receives 8 P (N - 1) / N, since its all-reduce is a reduce-scatter of the gradient and then an
 * all-gather. The second all-gather of the blocks, half as much again, is the price of the memory.
 *
 * With N = 2 and one block, this happens from top to bottom. A unit's weights are freed before the next row.
 *
 *     what happens           in full size then          rank 0 receives
 *     all-gather embedding   its weights                2 E bytes    (4 bytes for half of the elements)
 *     all-gather block       its weights                2 B
 *     all-gather head        its weights, its gradient  2 H
 *     reduce-scatter head    its gradient               2 H
 *     all-gather block       its weights, its gradient  2 B
 *     reduce-scatter block   its gradient               2 B
 *     reduce-scatter emb.    its gradient               2 E
 *
 * Real ranks are processes, each with a GPU, that talk over a network while they compute: PyTorch's FSDP and the
 * trainer gather the next unit during the computation of this one, and so have two units in full size at a time. Here
 * ranks are threads that copy from each other's memory, and nothing overlaps.
 */
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Numbers that training needs and that the command line does not have: the defaults of train_llama3. */
static const double PEAK_RATE = 3e-4, MINIMUM_RATE = 3e-5, WEIGHT_DECAY = 0.1, MAX_NORM = 1;
static const float BETA1 = 0.9f, BETA2 = 0.95f, EPSILON = 1e-8f;
enum { WARMUP_STEPS = 10, SEED = 1, IGNORED_TARGET = -100 };

// ---------------------------------------------------------------------------
// types. In comments, (rows, cols) is the shape of an array, and T the number of tokens of a rank's sequence

typedef struct {
    int V, C, L;        // vocabulary, width of the residual stream, blocks
    int NH, NKV, HD, F; // query heads, key/value heads, elements of a head, width of the MLP
    float norm_eps;
    double rope_theta;
} Config;

/* A weight, (rows, cols) = (outputs, inputs), as a part of its unit. */
typedef struct {
    char name[72]; // in Hugging Face's files
    int rows, cols;
    int64_t offset; // first element within the unit
    int decays;     // whether AdamW decays it: all weights but those of norms
} Tensor;

/* The tensors of a unit, by number. */
enum { EMBEDDING };
enum { ATTN_NORM, Q_PROJ, K_PROJ, V_PROJ, O_PROJ, MLP_NORM, GATE, UP, DOWN, BLOCK_TENSORS };
enum { FINAL_NORM, HEAD };

/* What is all-gathered, freed and reduce-scattered at once: all tensors of the embedding, of a block, or of the head
 * (with the final norm), one after the other. */
typedef struct {
    Tensor tensors[BLOCK_TENSORS];
    int num_tensors;
    // Elements of all tensors, with the gaps between them; of a shard. All shards together are `size` elements, and
    // then padding. Gaps and padding are always zero.
    int64_t size, shard_size;

    // this rank's shard, (shard_size) each, from the first step to the last
    float *shard, *d_shard;      // weights; gradient of the sum of all ranks' losses: train_step divides by the targets
    float *exp_avg, *exp_avg_sq; // AdamW's moments

    // in full size, (ranks * shard_size) each
    float *weights;   // from unshard to reshard, else NULL
    float *d_weights; // gradient of this rank's losses, from gradient_begin to gradient_reduce, else NULL
} Unit;

/* What forward leaves of a block for its backward. */
typedef struct {
    float *x;                   // (T, C) residual stream before the block
    float *attn_norm;           // (T, C) x, normalized
    float *attn_rstd;           // (T) 1 / root mean square of each row of x
    float *qkv;                 // (T, QKV) queries and keys after RoPE, and values; QKV: see qkv_width
    float *probabilities;       // (NH, T, T) of attention
    float *attn;                // (T, NH * HD) output of all heads
    float *after_attention;     // (T, C) residual stream between attention and MLP
    float *mlp_norm, *mlp_rstd; // (T, C), (T) the same for after_attention
    float *gate_up;             // (T, 2 F) gate and up
    float *swiglu;              // (T, F) silu(gate) * up
} BlockActivations;

/* The first 32 bytes of a token file's header, which has 64 bytes in version 1 and 192 in version 2. The tokens follow
 * it. */
typedef struct {
    char magic[8];
    uint32_t version, width; // width: bytes per token
    uint32_t vocab_size;
    uint32_t flags; // bit 0: behind the tokens is a byte for each, whose bit 0 (in version 1 any bit) says that it is a
                    // target; bits 8 to 31: the T that it was packed for, or 0
    uint64_t count; // tokens
} TokenHeader;

/* What all ranks see. */
typedef struct {
    Config config;
    int ranks, T, steps;
    const char *model_dir, *data_path;
    pthread_barrier_t barrier;
    const void **posted; // (ranks) what each rank lets the others read between two barriers
} Shared;

typedef struct {
    Shared *shared;
    int rank;
    pthread_t thread;
    FILE *data;
    TokenHeader header;
    int64_t windows;           // of the file, with T inputs and T targets each
    Unit *units;               // (L + 2) embedding, blocks, head
    BlockActivations *blocks;  // (L)
    int32_t *inputs, *targets; // (T) token ids; a target may be IGNORED_TARGET

    float *x;              // (T, C) residual stream after the last block
    float *norm, *rstd;    // (T, C), (T) output of the final norm
    float *logits;         // (T, V), and then their gradient
    float *sublayer_out;   // (T, C) of attention or MLP, before it is added to the residual stream
    float *d_x;            // (T, C) gradient of the residual stream
    float *d_norm;         // (T, C) gradient of a norm's output
    float *d_qkv, *d_attn; // as in BlockActivations
    float *d_gate_up, *d_swiglu;

    int64_t bytes_received; // weights and gradients, in this step
} Rank;

// ---------------------------------------------------------------------------
// errors and memory

/* Ends the program with one line. If several ranks fail, the first one prints, and the others wait here for the end. */
_Noreturn static void fail(const char *format, ...) {
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    va_list args;
    pthread_mutex_lock(&first); // never unlocked
    va_start(args, format);
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

/* Memory, all zero. */
static void *zeros(int64_t bytes) {
    void *p = calloc(1, (size_t)bytes);
    if (!p) fail("there is no memory for %lld bytes: use a smaller model, T or RANKS", (long long)bytes);
    return p;
}
static float *floats(int64_t count) { return (float *)zeros(count * (int64_t)sizeof(float)); }

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---------------------------------------------------------------------------
// what the units hold

/* Appends a tensor to a unit. It begins at a multiple of 128 elements, which leaves a gap after a tensor of another
 * size; or, for K, V and up (`follows`), where the tensor before it ends, so that one linear layer can use both. The
 * trainer aligns tensors in the same way for the processor's sake; here it makes the bytes comparable. */
static void add_tensor(Unit *u, const char *name, int layer, int rows, int cols, int follows) {
    Tensor *t = &u->tensors[u->num_tensors++];
    snprintf(t->name, sizeof t->name, name, layer);
    t->rows = rows;
    t->cols = cols;
    t->decays = rows > 1;
    t->offset = follows ? u->size : round_up(u->size, 128);
    u->size = t->offset + (int64_t)rows * cols;
}

/* The tensors of all units: embedding, blocks, head; and the size of their shards, also multiples of 128. */
static void describe_units(Unit *units, const Config *c, int ranks) {
    int L = c->L;
    add_tensor(&units[0], "model.embed_tokens.weight", 0, c->V, c->C, 0);
    for (int l = 0; l < L; l++) {
        Unit *u = &units[1 + l];
        add_tensor(u, "model.layers.%d.input_layernorm.weight", l, 1, c->C, 0);
        add_tensor(u, "model.layers.%d.self_attn.q_proj.weight", l, c->NH * c->HD, c->C, 0);
        add_tensor(u, "model.layers.%d.self_attn.k_proj.weight", l, c->NKV * c->HD, c->C, 1);
        add_tensor(u, "model.layers.%d.self_attn.v_proj.weight", l, c->NKV * c->HD, c->C, 1);
        add_tensor(u, "model.layers.%d.self_attn.o_proj.weight", l, c->C, c->NH * c->HD, 0);
        add_tensor(u, "model.layers.%d.post_attention_layernorm.weight", l, 1, c->C, 0);
        add_tensor(u, "model.layers.%d.mlp.gate_proj.weight", l, c->F, c->C, 0);
        add_tensor(u, "model.layers.%d.mlp.up_proj.weight", l, c->F, c->C, 1);
        add_tensor(u, "model.layers.%d.mlp.down_proj.weight", l, c->C, c->F, 0);
    }
    add_tensor(&units[L + 1], "model.norm.weight", 0, 1, c->C, 0);
    add_tensor(&units[L + 1], "lm_head.weight", 0, c->V, c->C, 0);
    for (int i = 0; i < L + 2; i++) units[i].shard_size = round_up(units[i].size, 128 * ranks) / ranks;
}

// ---------------------------------------------------------------------------
// communication. All ranks call these functions in the same order, and each call waits for all ranks twice: until all
// have posted what the others read, and until all have read it

static void wait_for_all_ranks(const Rank *r) { pthread_barrier_wait(&r->shared->barrier); }

/* Every rank receives all shards: whole (ranks, count) = the `mine` (count) of rank 0, of rank 1, ... */
static void all_gather(Rank *r, float *whole, const float *mine, int64_t count) {
    const Shared *s = r->shared;
    s->posted[r->rank] = mine;
    wait_for_all_ranks(r);
    for (int i = 0; i < s->ranks; i++) memcpy(whole + i * count, s->posted[i], sizeof(float) * (size_t)count);
    wait_for_all_ranks(r);
    r->bytes_received += (int64_t)sizeof(float) * count * (s->ranks - 1);
}

/* Every rank receives the sum of its own shard: mine (count) = sum over ranks of part r->rank of whole (ranks, count).
 * What `mine` held is overwritten: a step has one sequence a rank, so no gradient is added to another. */
static void reduce_scatter(Rank *r, float *mine, const float *whole, int64_t count) {
    const Shared *s = r->shared;
    s->posted[r->rank] = whole;
    wait_for_all_ranks(r);
    memset(mine, 0, sizeof(float) * (size_t)count);
    for (int i = 0; i < s->ranks; i++) {
        const float *part = (const float *)s->posted[i] + r->rank * count;
        for (int64_t e = 0; e < count; e++) mine[e] += part[e];
    }
    wait_for_all_ranks(r);
    r->bytes_received += (int64_t)sizeof(float) * count * (s->ranks - 1);
}

/* Replaces each of the `count` numbers by its sum over all ranks. */
static void all_reduce(Rank *r, double *numbers, int count) {
    const Shared *s = r->shared;
    double sums[4] = {0};
    s->posted[r->rank] = numbers;
    wait_for_all_ranks(r);
    for (int i = 0; i < s->ranks; i++)
        for (int e = 0; e < count; e++) sums[e] += ((const double *)s->posted[i])[e];
    wait_for_all_ranks(r);
    memcpy(numbers, sums, sizeof(double) * (size_t)count);
}

// ---------------------------------------------------------------------------
// ZeRO-3: what is done with a unit

/* All-gathers the weights of a unit. */
static void unshard(Rank *r, Unit *u) {
    u->weights = floats(r->shared->ranks * u->shard_size);
    all_gather(r, u->weights, u->shard, u->shard_size);
}

/* Frees the weights. This rank's shard of them stays. */
static void reshard(Unit *u) {
    free(u->weights);
    u->weights = NULL;
}

/* Allocates this rank's full-size gradient of a unit, all zero: backward adds to it, as several tokens use a weight. */
static void gradient_begin(const Rank *r, Unit *u) { u->d_weights = floats(r->shared->ranks * u->shard_size); }

/* Sums the gradient over all ranks, into the shards, and frees it. */
static void gradient_reduce(Rank *r, Unit *u) {
    reduce_scatter(r, u->d_shard, u->d_weights, u->shard_size);
    free(u->d_weights);
    u->d_weights = NULL;
}

static const float *weight(const Unit *u, int tensor) { return u->weights + u->tensors[tensor].offset; }
static float *d_weight(const Unit *u, int tensor) { return u->d_weights + u->tensors[tensor].offset; }

// ---------------------------------------------------------------------------
// linear layers and norms

/* simd: the compiler may add in another order. */
static float dot(const float *a, const float *b, int n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* out (n) += factor * in. */
static void add_scaled(float *out, float factor, const float *in, int n) {
    for (int i = 0; i < n; i++) out[i] += factor * in[i];
}

/* y (T, OC) = x (T, IC) w^T, with w (OC, IC). */
static void linear_forward(float *y, const float *x, const float *w, int T, int IC, int OC) {
#pragma omp parallel for
    for (int t = 0; t < T; t++)
        for (int o = 0; o < OC; o++) y[(int64_t)t * OC + o] = dot(x + (int64_t)t * IC, w + (int64_t)o * IC, IC);
}

/* d_x (T, IC) = d_y (T, OC) w. */
static void linear_backward_input(float *d_x, const float *d_y, const float *w, int T, int IC, int OC) {
#pragma omp parallel for
    for (int t = 0; t < T; t++) {
        float *row = d_x + (int64_t)t * IC;
        memset(row, 0, sizeof(float) * (size_t)IC);
        for (int o = 0; o < OC; o++) add_scaled(row, d_y[(int64_t)t * OC + o], w + (int64_t)o * IC, IC);
    }
}

/* d_w (OC, IC) += d_y^T x: a weight's gradient is a sum over tokens. */
static void linear_backward_weight(float *d_w, const float *d_y, const float *x, int T, int IC, int OC) {
#pragma omp parallel for
    for (int o = 0; o < OC; o++)
        for (int t = 0; t < T; t++)
            add_scaled(d_w + (int64_t)o * IC, d_y[(int64_t)t * OC + o], x + (int64_t)t * IC, IC);
}

/* RMSNorm (Zhang and Sennrich 2019): y_i = x_i rstd w_i, with rstd = 1 / sqrt(mean of the row's x^2 + eps). */
static void rmsnorm_forward(float *y, float *rstd, const float *x, const float *w, float eps, int T, int C) {
    for (int t = 0; t < T; t++, x += C, y += C) {
        double squares = 0;
        for (int i = 0; i < C; i++) squares += (double)x[i] * x[i];
        rstd[t] = (float)(1 / sqrt(squares / C + eps));
        for (int i = 0; i < C; i++) y[i] = x[i] * rstd[t] * w[i];
    }
}

/* d_x += the gradient of the norm's input, d_w += that of its weight. x_i changes its own output and, through rstd, all
 * outputs of the row: d_x_i = rstd (d_y_i w_i - x_i rstd^2 m), where m is the mean of the row's d_y w x. */
static void rmsnorm_backward(float *d_x, float *d_w, const float *d_y, const float *x, const float *rstd,
                             const float *w, int T, int C) {
    for (int t = 0; t < T; t++, x += C, d_x += C, d_y += C) {
        double sum = 0;
        for (int i = 0; i < C; i++) sum += (double)d_y[i] * w[i] * x[i];
        float through_rstd = (float)(sum / C) * rstd[t] * rstd[t];
        for (int i = 0; i < C; i++) {
            d_x[i] += rstd[t] * (d_y[i] * w[i] - x[i] * through_rstd);
            d_w[i] += d_y[i] * x[i] * rstd[t];
        }
    }
}

// ---------------------------------------------------------------------------
// attention

/* Columns of a row of qkv: the queries of NH heads, the keys of NKV heads, the values of NKV heads. */
static int qkv_width(const Config *c) { return (c->NH + 2 * c->NKV) * c->HD; }

/* RoPE (Su et al. 2021) rotates each query and key by angles that grow with its position: elements i and i + HD/2
 * of a head are a point in the plane, and pair i turns by theta^(-2i / HD) per position. So a query times a key
 * depends on their positions only through the distance between them. direction: 1 forward, -1 backward, since the
 * gradient of a rotation is the rotation back. */
static void rope(float *qkv, const Config *c, int T, int direction) {
    int half = c->HD / 2;
    for (int i = 0; i < half; i++) {
        float frequency = 1 / powf((float)c->rope_theta, (float)(2 * i) / (float)c->HD);
        for (int t = 0; t < T; t++) {
            float cosine = cosf((float)t * frequency), sine = sinf((float)t * frequency) * (float)direction;
            for (int h = 0; h < c->NH + c->NKV; h++) {
                float *p = qkv + (int64_t)t * qkv_width(c) + h * c->HD + i;
                float x = p[0], y = p[half];
                p[0] = x * cosine - y * sine;
                p[half] = y * cosine + x * sine;
            }
        }
    }
}

/* Vector `number` (HD) of token t, counted over queries, keys and values. */
static float *vector(float *qkv, const Config *c, int t, int number) {
    return qkv + (int64_t)t * qkv_width(c) + number * c->HD;
}

/* The query of head h, and the key and the value that it uses: NH / NKV neighboring query heads share one. */
static float *query(float *qkv, const Config *c, int t, int h) { return vector(qkv, c, t, h); }
static float *key(float *qkv, const Config *c, int t, int h) { return vector(qkv, c, t, c->NH + h / (c->NH / c->NKV)); }
static float *value(float *qkv, const Config *c, int t, int h) {
    return vector(qkv, c, t, c->NH + c->NKV + h / (c->NH / c->NKV));
}

/* Turns scores (n) into probabilities: exp(score) / sum of exp(scores). Returns the logarithm of that sum. */
static double softmax(float *scores, int n) {
    float largest = scores[0];
    double sum = 0;
    for (int i = 1; i < n; i++) largest = fmaxf(largest, scores[i]);
    for (int i = 0; i < n; i++) sum += scores[i] = expf(scores[i] - largest);
    for (int i = 0; i < n; i++) scores[i] /= (float)sum;
    return largest + log(sum);
}

/* attn (T, NH * HD): in each head, the output of token t is the mean of the values of tokens 0 to t, weighted with the
 * softmax of its query times their keys / sqrt(HD). No token sees a later one: this is the causal mask. */
static void attention_forward(BlockActivations *a, const Config *c, int T) {
    float scale = 1 / sqrtf((float)c->HD);
    memset(a->attn, 0, sizeof(float) * (size_t)T * (size_t)(c->NH * c->HD));
#pragma omp parallel for
    for (int h = 0; h < c->NH; h++)
        for (int t = 0; t < T; t++) {
            float *p = a->probabilities + ((int64_t)h * T + t) * T;
            for (int s = 0; s <= t; s++) p[s] = scale * dot(query(a->qkv, c, t, h), key(a->qkv, c, s, h), c->HD);
            softmax(p, t + 1);
            float *out = a->attn + ((int64_t)t * c->NH + h) * c->HD;
            for (int s = 0; s <= t; s++) add_scaled(out, p[s], value(a->qkv, c, s, h), c->HD);
        }
}

/* d_qkv (T, QKV) = the gradient of queries, keys and values, from d_attn (T, NH * HD). With scores z and probabilities
 * p = softmax(z), d_p_s = d_out . v_s and d_z_s = p_s (d_p_s - mean), where mean is the sum over s <= t of p_s d_p_s.
 * Then d_v_s += p_s d_out, d_q_t += scale d_z_s k_s and d_k_s += scale d_z_s q_t. */
static void attention_backward(float *d_qkv, const float *d_attn, const BlockActivations *a, const Config *c, int T) {
    float scale = 1 / sqrtf((float)c->HD);
    memset(d_qkv, 0, sizeof(float) * (size_t)T * (size_t)qkv_width(c));
#pragma omp parallel for
    for (int kv = 0; kv < c->NKV; kv++) // one thread has all query heads of a key/value head: they add to its gradient
        for (int h = kv * (c->NH / c->NKV); h < (kv + 1) * (c->NH / c->NKV); h++)
            for (int t = 0; t < T; t++) {
                const float *p = a->probabilities + ((int64_t)h * T + t) * T;
                const float *d_out = d_attn + ((int64_t)t * c->NH + h) * c->HD;
                float mean = 0;
                for (int s = 0; s <= t; s++) mean += p[s] * dot(d_out, value(a->qkv, c, s, h), c->HD);
                for (int s = 0; s <= t; s++) {
                    float d_z = p[s] * (dot(d_out, value(a->qkv, c, s, h), c->HD) - mean);
                    add_scaled(value(d_qkv, c, s, h), p[s], d_out, c->HD);
                    add_scaled(query(d_qkv, c, t, h), scale * d_z, key(a->qkv, c, s, h), c->HD);
                    add_scaled(key(d_qkv, c, s, h), scale * d_z, query(a->qkv, c, t, h), c->HD);
                }
            }
}

// ---------------------------------------------------------------------------
// the MLP's activation function

/* SwiGLU (Shazeer 2020): silu(gate) * up, with silu(g) = g sigmoid(g). Row t of gate_up is gate (F), then up (F). */
static void swiglu_forward(float *out, const float *gate_up, int T, int F) {
    for (int t = 0; t < T; t++, gate_up += 2 * F, out += F)
        for (int i = 0; i < F; i++) out[i] = gate_up[i] / (1 + expf(-gate_up[i])) * gate_up[F + i];
}

/* silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g))), since sigmoid' = sigmoid (1 - sigmoid). */
static void swiglu_backward(float *d_gate_up, const float *d_out, const float *gate_up, int T, int F) {
    for (int t = 0; t < T; t++, gate_up += 2 * F, d_gate_up += 2 * F, d_out += F)
        for (int i = 0; i < F; i++) {
            float gate = gate_up[i], up = gate_up[F + i], sigmoid = 1 / (1 + expf(-gate));
            d_gate_up[i] = d_out[i] * up * sigmoid * (1 + gate * (1 - sigmoid));
            d_gate_up[F + i] = d_out[i] * gate * sigmoid;
        }
}

// ---------------------------------------------------------------------------
// a block: x = x + attention(norm(x)), then x = x + MLP(norm(x))

/* out (T, C) = a + b: a sublayer's output is added to the residual stream. */
static void residual_add(float *out, const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

/* From a->x, the residual stream before the block, to `out`, the stream after it. Q, K and V have no gap between them,
 * so one linear layer with the weight Q_PROJ and QKV outputs computes all three; so it is with gate and up. */
static void block_forward(Rank *r, const Unit *u, BlockActivations *a, float *out) {
    const Config *c = &r->shared->config;
    int T = r->shared->T, C = c->C, F = c->F;
    rmsnorm_forward(a->attn_norm, a->attn_rstd, a->x, weight(u, ATTN_NORM), c->norm_eps, T, C);
    linear_forward(a->qkv, a->attn_norm, weight(u, Q_PROJ), T, C, qkv_width(c));
    rope(a->qkv, c, T, 1);
    attention_forward(a, c, T);
    linear_forward(r->sublayer_out, a->attn, weight(u, O_PROJ), T, c->NH * c->HD, C);
    residual_add(a->after_attention, a->x, r->sublayer_out, (int64_t)T * C);

    rmsnorm_forward(a->mlp_norm, a->mlp_rstd, a->after_attention, weight(u, MLP_NORM), c->norm_eps, T, C);
    linear_forward(a->gate_up, a->mlp_norm, weight(u, GATE), T, C, 2 * F);
    swiglu_forward(a->swiglu, a->gate_up, T, F);
    linear_forward(r->sublayer_out, a->swiglu, weight(u, DOWN), T, F, C);
    residual_add(out, a->after_attention, r->sublayer_out, (int64_t)T * C);
}

/* The lines of block_forward in reverse order. r->d_x is the gradient of the residual stream after the block, and
 * becomes the gradient of the stream before it. It is also the gradient of a sublayer's output, since that is added to
 * the stream; and what comes back through a norm is added to it, since the stream feeds both the norm and the sum. */
static void block_backward(Rank *r, const Unit *u, const BlockActivations *a) {
    const Config *c = &r->shared->config;
    int T = r->shared->T, C = c->C, F = c->F;
    linear_backward_weight(d_weight(u, DOWN), r->d_x, a->swiglu, T, F, C);
    linear_backward_input(r->d_swiglu, r->d_x, weight(u, DOWN), T, F, C);
    swiglu_backward(r->d_gate_up, r->d_swiglu, a->gate_up, T, F);
    linear_backward_weight(d_weight(u, GATE), r->d_gate_up, a->mlp_norm, T, C, 2 * F);
    linear_backward_input(r->d_norm, r->d_gate_up, weight(u, GATE), T, C, 2 * F);
    rmsnorm_backward(r->d_x, d_weight(u, MLP_NORM), r->d_norm, a->after_attention, a->mlp_rstd, weight(u, MLP_NORM), T,
                     C);

    linear_backward_weight(d_weight(u, O_PROJ), r->d_x, a->attn, T, c->NH * c->HD, C);
    linear_backward_input(r->d_attn, r->d_x, weight(u, O_PROJ), T, c->NH * c->HD, C);
    attention_backward(r->d_qkv, r->d_attn, a, c, T);
    rope(r->d_qkv, c, T, -1);
    linear_backward_weight(d_weight(u, Q_PROJ), r->d_qkv, a->attn_norm, T, C, qkv_width(c));
    linear_backward_input(r->d_norm, r->d_qkv, weight(u, Q_PROJ), T, C, qkv_width(c));
    rmsnorm_backward(r->d_x, d_weight(u, ATTN_NORM), r->d_norm, a->x, a->attn_rstd, weight(u, ATTN_NORM), T, C);
}

// ---------------------------------------------------------------------------
// embedding and head

/* out (T, C): the row of each input token. */
static void embedding_forward(const Rank *r, const Unit *u, float *out) {
    int C = r->shared->config.C;
    for (int t = 0; t < r->shared->T; t++)
        memcpy(out + (int64_t)t * C, weight(u, EMBEDDING) + (int64_t)r->inputs[t] * C, sizeof(float) * (size_t)C);
}

/* Each token adds to the gradient of its row. No weight is read. */
static void embedding_backward(const Rank *r, const Unit *u) {
    int C = r->shared->config.C;
    for (int t = 0; t < r->shared->T; t++)
        add_scaled(d_weight(u, EMBEDDING) + (int64_t)r->inputs[t] * C, 1, r->d_x + (int64_t)t * C, C);
}

/* The loss of each token is -log of its target's probability. Turns logits (T, V) into the gradient of the sum of the
 * losses: a logit's gradient is its probability, minus 1 for the target. Returns that sum. */
static double cross_entropy(float *logits, const int32_t *targets, int T, int V) {
    double loss = 0;
    for (int t = 0; t < T; t++, logits += V) {
        if (targets[t] == IGNORED_TARGET) {
            memset(logits, 0, sizeof(float) * (size_t)V);
            continue;
        }
        float score = logits[targets[t]]; // before softmax overwrites it
        loss += softmax(logits, V) - score;
        logits[targets[t]] -= 1;
    }
    return loss;
}

/* The final norm, the logits and the loss, and back to r->d_x. Returns the sum of the losses of this rank's tokens. */
static double head_forward_and_backward(Rank *r, const Unit *u) {
    const Config *c = &r->shared->config;
    int T = r->shared->T, C = c->C;
    rmsnorm_forward(r->norm, r->rstd, r->x, weight(u, FINAL_NORM), c->norm_eps, T, C);
    linear_forward(r->logits, r->norm, weight(u, HEAD), T, C, c->V);
    double loss = cross_entropy(r->logits, r->targets, T, c->V);
    float *d_logits = r->logits;
    linear_backward_weight(d_weight(u, HEAD), d_logits, r->norm, T, C, c->V);
    linear_backward_input(r->d_norm, d_logits, weight(u, HEAD), T, C, c->V);
    memset(r->d_x, 0, sizeof(float) * (size_t)T * (size_t)C);
    rmsnorm_backward(r->d_x, d_weight(u, FINAL_NORM), r->d_norm, r->x, r->rstd, weight(u, FINAL_NORM), T, C);
    return loss;
}

// ---------------------------------------------------------------------------
// the model under ZeRO-3

/* Steps 2 to 4 at the top of this file. Afterwards d_shard of each unit is this rank's shard of the gradient, summed
 * over all ranks. Returns the sum of this rank's losses. */
static double forward_and_backward(Rank *r) {
    int L = r->shared->config.L;
    Unit *embedding = &r->units[0], *blocks = &r->units[1], *head = &r->units[L + 1];

    // 2. forward
    unshard(r, embedding);
    embedding_forward(r, embedding, r->blocks[0].x);
    reshard(embedding);
    for (int l = 0; l < L; l++) {
        unshard(r, &blocks[l]);
        block_forward(r, &blocks[l], &r->blocks[l], l + 1 < L ? r->blocks[l + 1].x : r->x);
        reshard(&blocks[l]);
    }

    // 3. the head, forward and backward
    unshard(r, head);
    gradient_begin(r, head);
    double loss = head_forward_and_backward(r, head);
    reshard(head);
    gradient_reduce(r, head);

    // 4. backward: the blocks' weights are all-gathered for the second time
    for (int l = L - 1; l >= 0; l--) {
        unshard(r, &blocks[l]);
        gradient_begin(r, &blocks[l]);
        block_backward(r, &blocks[l], &r->blocks[l]);
        reshard(&blocks[l]);
        gradient_reduce(r, &blocks[l]);
    }
    gradient_begin(r, embedding);
    embedding_backward(r, embedding);
    gradient_reduce(r, embedding);
    return loss;
}

// ---------------------------------------------------------------------------
// the optimizer

/* The learning rate of step `step`, which counts from 1: a linear warm-up, then a cosine from the peak down to the
 * minimum. */
static double learning_rate(int step, int steps) {
    if (step <= WARMUP_STEPS) return PEAK_RATE * step / WARMUP_STEPS;
    double progress = (double)(step - WARMUP_STEPS) / (steps - WARMUP_STEPS);
    return MINIMUM_RATE + (PEAK_RATE - MINIMUM_RATE) * 0.5 * (1 + cos(acos(-1) * progress));
}

/* AdamW (Loshchilov and Hutter 2019) on this rank's shard of one unit. `scale` turns the sum of gradients into their
 * clipped mean. Gaps and padding are not touched. */
static void adamw(Unit *u, int rank, int step, float lr, float scale) {
    int64_t shard_begin = rank * u->shard_size, shard_end = shard_begin + u->shard_size;
    float correction = 1 - powf(BETA1, (float)step), correction_sq = 1 - powf(BETA2, (float)step);
    for (int i = 0; i < u->num_tensors; i++) {
        const Tensor *t = &u->tensors[i];
        int64_t begin = t->offset, end = t->offset + (int64_t)t->rows * t->cols; // within the unit
        if (begin < shard_begin) begin = shard_begin;
        if (end > shard_end) end = shard_end;
        for (int64_t e = begin - shard_begin; e < end - shard_begin; e++) {
            float g = u->d_shard[e] * scale;
            u->exp_avg[e] = BETA1 * u->exp_avg[e] + (1 - BETA1) * g;
            u->exp_avg_sq[e] = BETA2 * u->exp_avg_sq[e] + (1 - BETA2) * g * g;
            float root = sqrtf(u->exp_avg_sq[e] / correction_sq) + EPSILON;
            float decay = t->decays ? (float)WEIGHT_DECAY * u->shard[e] : 0;
            u->shard[e] -= lr * (u->exp_avg[e] / correction / root + decay);
        }
    }
}

// ---------------------------------------------------------------------------
// data: a token file, and which of its windows a rank trains on

/* Opens the token file. A window is T + 1 tokens: T inputs and, one token later, T targets. Neighboring windows share a
 * token. */
static void data_open(Rank *r) {
    const Shared *s = r->shared;
    TokenHeader *h = &r->header;
    r->data = fopen(s->data_path, "rb");
    if (!r->data) fail("cannot open %s: %s", s->data_path, strerror(errno));
    if (fread(h, sizeof *h, 1, r->data) != 1 || memcmp(h->magic, "LLM3TOK1", 8))
        fail("%s is not a token file: make one with tokens_llama3", s->data_path);
    if (h->version < 1 || h->version > 2 || (h->width != 2 && h->width != 4))
        fail("%s has version %u and %u bytes per token; expected version 1 or 2, and 2 or 4 bytes", s->data_path,
             h->version, h->width);
    if (h->vocab_size > (uint32_t)s->config.V)
        fail("%s has a vocabulary of %u tokens, the model one of %d: make it with the model's tokenizer", s->data_path,
             h->vocab_size, s->config.V);
    if (h->flags >> 8 && h->flags >> 8 != (uint32_t)s->T)
        fail("%s has conversations packed into windows of %u tokens, T is %d: use %u for T", s->data_path,
             h->flags >> 8, s->T, h->flags >> 8);
    r->windows = h->count ? (int64_t)(h->count - 1) / s->T : 0;
    if (r->windows < s->ranks)
        fail("%s has %lld windows of %d tokens, fewer than the %d ranks: use a smaller T", s->data_path,
             (long long)r->windows, s->T, s->ranks);
}

/* Random bits of x: the output function of splitmix64 (Steele et al. 2014). */
static uint64_t random_bits(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Element i of a random permutation of 0 to n - 1, without a table. How it works may be skipped: any shuffle would do
 * on which all ranks agree. A Feistel network (Luby and Rackoff 1988) mixes the two halves of a number's bits and can
 * be undone, so it permutes all numbers of that many bits. A result that is not below n is permuted again. That ends:
 * repeating a permutation leads from i back to i, which is below n. And no two i get the same result, because every
 * number is the image of only one other. */
static int64_t permuted(int64_t i, int64_t n, uint64_t seed) {
    int bits = 1; // of each half
    while (n > (int64_t)1 << 2 * bits) bits++;
    uint64_t half = ((uint64_t)1 << bits) - 1, x = (uint64_t)i;
    do {
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t high = x >> bits, low = x & half;
            x = low << bits | (high ^ (random_bits(low + seed + round * 0x9E3779B97F4A7C15u) & half));
        }
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* The window that a rank trains on in a step, which counts from 0 here. As PyTorch's DistributedSampler with drop_last,
 * each epoch shuffles all windows again and deals them out to the ranks in turn. The last few, if they are too few for
 * all ranks, are left out. */
static int64_t sample(int64_t step, int rank, int ranks, int64_t windows) {
    int64_t steps_per_epoch = windows / ranks, epoch = step / steps_per_epoch;
    int64_t position = step % steps_per_epoch * ranks + rank;
    return permuted(position, windows, random_bits((uint64_t)(SEED + epoch + 1)));
}

/* Reads a window into r->inputs and r->targets. Returns the number of targets. */
static int read_window(Rank *r, int64_t window) {
    const Shared *s = r->shared;
    const TokenHeader *h = &r->header;
    int T = s->T, targets = 0;
    long first = (long)(window * T), tokens_at = h->version == 1 ? 64 : 192;
    long bytes_at = tokens_at + (long)h->count * (long)h->width;       // of the bytes that say what is a target
    unsigned char *raw = (unsigned char *)zeros(5 * (int64_t)(T + 1)); // up to 4 bytes for each token,
    unsigned char *byte = raw + 4 * (T + 1);                           // then the byte of each
    memset(byte, 1, (size_t)T + 1);
    int ok = !fseek(r->data, tokens_at + first * (long)h->width, SEEK_SET) &&
             fread(raw, h->width, (size_t)T + 1, r->data) == (size_t)T + 1;
    if (ok && h->flags & 1)
        ok = !fseek(r->data, bytes_at + first, SEEK_SET) && fread(byte, 1, (size_t)T + 1, r->data) == (size_t)T + 1;
    if (!ok) fail("%s ends before its token %ld: copy it again", s->data_path, first + T);
    for (int t = 0; t <= T; t++) {
        uint32_t id = 0;
        memcpy(&id, raw + t * (int)h->width, h->width); // the file and the processor are little-endian
        if (id >= (uint32_t)s->config.V)
            fail("%s: token %ld is %u, the model has %d: make the file with the model's tokenizer", s->data_path,
                 first + t, id, s->config.V);
        int is_target = h->version == 1 ? byte[t] : byte[t] & 1;
        if (t < T) r->inputs[t] = (int32_t)id;
        if (t > 0) r->targets[t - 1] = is_target ? (int32_t)id : IGNORED_TARGET;
        targets += t > 0 && is_target;
    }
    free(raw);
    return targets;
}

// ---------------------------------------------------------------------------
// the step

/* One training step, as at the top of this file. `step` counts from 1. */
static void train_step(Rank *r, int step) {
    const Shared *s = r->shared;
    int num_units = s->config.L + 2;
    r->bytes_received = 0;
    double targets = read_window(r, sample(step - 1, r->rank, s->ranks, r->windows)); // 1.
    double loss = forward_and_backward(r), squares = 0;                               // 2. to 4.

    // 5. Each element of the gradient is in the shard of exactly one rank, and gaps and padding are zero, because
    // backward never writes them. So the sum of all ranks' squares is the square of the whole gradient's norm.
    for (int i = 0; i < num_units; i++)
        for (int64_t e = 0; e < r->units[i].shard_size; e++)
            squares += (double)r->units[i].d_shard[e] * r->units[i].d_shard[e];
    double sums[3] = {loss, targets, squares};
    all_reduce(r, sums, 3);
    if (sums[1] == 0) fail("step %d has no target: the file masks all tokens of its windows", step);

    // 6. The loss is a mean over the targets of all ranks, so its gradient is the sum of gradients divided by their
    // number. Each rank knew only its own number until the all-reduce, so the division comes here and not in
    // cross_entropy. A mean over each rank's own targets would give ranks with few of them too much weight. Clipping is
    // that of PyTorch's clip_grad_norm_.
    double norm = sqrt(sums[2]) / sums[1], clip = MAX_NORM / (norm + 1e-6);
    if (clip > 1) clip = 1;
    for (int i = 0; i < num_units; i++)
        adamw(&r->units[i], r->rank, step, (float)learning_rate(step, s->steps), (float)(clip / sums[1]));
    if (r->rank == 0) printf("step %d loss %.9g norm %.9g\n", step, sums[0] / sums[1], norm);
    if (r->rank == 0) fflush(stdout);
}

// ---------------------------------------------------------------------------
// the model's files

/* The text of the file, with a zero at its end. */
static char *read_text(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) fail("cannot open %s: %s", path, strerror(errno));
    long size = ftell(f);
    char *text = (char *)zeros(size + 1);
    rewind(f);
    if (fread(text, 1, (size_t)size, f) != (size_t)size) fail("cannot read %s", path);
    fclose(f);
    return text;
}

/* What follows "key": in JSON, wherever it is; NULL: there is no such key. */
static const char *json_find(const char *json, const char *key) {
    size_t length = strlen(key);
    for (const char *at = strchr(json, '"'); at; at = strchr(at + 1, '"')) {
        if (strncmp(at + 1, key, length) || at[1 + length] != '"') continue;
        const char *colon = at + length + 2 + strspn(at + length + 2, " \t\r\n");
        if (*colon == ':') return colon + 1 + strspn(colon + 1, " \t\r\n");
    }
    return NULL;
}

/* A number of config.json, or `otherwise` if it is absent or null. otherwise = 0: it is required. */
static double config_number(const char *json, const char *key, double otherwise) {
    const char *text = json_find(json, key);
    double number = text && *text != 'n' ? strtod(text, NULL) : otherwise;
    if (!(number > 0) || number > 1e9) fail("config.json has no \"%s\" that is a number above 0", key);
    return number;
}

static Config config_read(const char *dir) {
    char path[4096];
    Config c;
    snprintf(path, sizeof path, "%s/config.json", dir);
    char *json = read_text(path);
    const char *tied = json_find(json, "tie_word_embeddings");
    if (tied && *tied == 't') fail("%s: embedding and head are one weight; train_llama3 trains such models", path);
    if (json_find(json, "factor")) fail("%s: RoPE is scaled; train_llama3 trains such models", path);
    const char *act = json_find(json, "hidden_act"), *bias = json_find(json, "attention_bias");
    const char *mlp_bias = json_find(json, "mlp_bias");
    if ((act && strncmp(act, "\"silu\"", 6)) || (bias && *bias == 't') || (mlp_bias && *mlp_bias == 't'))
        fail("%s: found another activation than silu, or biases, which Llama 3 does not have", path);
    c.V = (int)config_number(json, "vocab_size", 0);
    c.C = (int)config_number(json, "hidden_size", 0);
    c.L = (int)config_number(json, "num_hidden_layers", 0);
    c.NH = (int)config_number(json, "num_attention_heads", 0);
    c.NKV = (int)config_number(json, "num_key_value_heads", c.NH);
    c.HD = (int)config_number(json, "head_dim", c.C / c.NH);
    c.F = (int)config_number(json, "intermediate_size", 0);
    c.norm_eps = (float)config_number(json, "rms_norm_eps", 1e-6);
    c.rope_theta = config_number(json, "rope_theta", 10000);
    if (c.NH % c.NKV || c.HD % 2)
        fail("%s: %d query heads cannot share %d key/value heads of %d elements", path, c.NH, c.NKV, c.HD);
    free(json);
    return c;
}

/* Reads one tensor of a safetensors file: 8 bytes with the size of a header, the header in JSON, which has the type,
 * shape and place of each tensor, and the tensors. `header`: its text; `data_at`: where the tensors begin. */
static void read_tensor(float *out, const Tensor *t, FILE *f, const char *header, int64_t data_at) {
    const char *entry = json_find(header, t->name);
    long long shape[2] = {0, 0}, begin = 0, end = 0, count = (long long)t->rows * t->cols;
    if (!entry) fail("model.safetensors has no tensor %s", t->name);
    const char *type = json_find(entry, "dtype"), *place = json_find(entry, "data_offsets");
    const char *dimensions = json_find(entry, "shape");
    if (!type || !place || !dimensions) fail("model.safetensors does not describe %s", t->name);
    int dims = sscanf(dimensions, "[ %lld , %lld", &shape[0], &shape[1]);
    if (t->rows > 1 ? dims != 2 || shape[0] != t->rows || shape[1] != t->cols : dims != 1 || shape[0] != t->cols)
        fail("model.safetensors: %s has the shape (%lld, %lld), by config.json it must be (%d, %d)", t->name, shape[0],
             shape[1], t->rows, t->cols);
    if (strncmp(type, "\"F32\"", 5)) fail("model.safetensors: %s is not in fp32 (F32)", t->name);
    sscanf(place, "[ %lld , %lld", &begin, &end);
    if (end - begin != 4 * count || fseek(f, (long)(data_at + begin), SEEK_SET) ||
        fread(out, 4, (size_t)count, f) != (size_t)count)
        fail("model.safetensors ends within %s: copy it again", t->name);
}

/* Reads the weights. A rank has one unit at a time in full size, and keeps its shard of it. */
static void read_weights(Rank *r) {
    const Shared *s = r->shared;
    char path[4096];
    uint64_t header_size = 0;
    snprintf(path, sizeof path, "%s/model.safetensors", s->model_dir);
    FILE *f = fopen(path, "rb");
    if (!f) fail("cannot open %s: %s; the weights must be in one file", path, strerror(errno));
    if (fread(&header_size, 8, 1, f) != 1 || header_size > 1 << 27) fail("%s is not a safetensors file", path);
    char *header = (char *)zeros((int64_t)header_size + 1);
    if (fread(header, 1, header_size, f) != header_size) fail("%s ends within its header: copy it again", path);
    for (int i = 0; i < s->config.L + 2; i++) {
        Unit *u = &r->units[i];
        float *whole = floats(s->ranks * u->shard_size);
        for (int t = 0; t < u->num_tensors; t++)
            read_tensor(whole + u->tensors[t].offset, &u->tensors[t], f, header, 8 + (int64_t)header_size);
        memcpy(u->shard, whole + r->rank * u->shard_size, sizeof(float) * (size_t)u->shard_size);
        free(whole);
    }
    free(header);
    fclose(f);
}

// ---------------------------------------------------------------------------
// one rank

static void allocate(Rank *r) {
    const Config *c = &r->shared->config;
    int64_t T = r->shared->T, ranks = r->shared->ranks, C = c->C, QKV = qkv_width(c), heads = c->NH * c->HD;
    r->units = (Unit *)zeros((c->L + 2) * (int64_t)sizeof(Unit));
    r->blocks = (BlockActivations *)zeros(c->L * (int64_t)sizeof(BlockActivations));
    describe_units(r->units, c, r->shared->ranks);
    for (int i = 0; i < c->L + 2; i++) {
        Unit *u = &r->units[i];
        if (ranks > u->size) fail("%d ranks are more than the %lld elements of a unit", (int)ranks, (long long)u->size);
        u->shard = floats(u->shard_size);
        u->d_shard = floats(u->shard_size);
        u->exp_avg = floats(u->shard_size);
        u->exp_avg_sq = floats(u->shard_size);
    }
    for (int l = 0; l < c->L; l++) {
        BlockActivations *a = &r->blocks[l];
        a->x = floats(T * C);
        a->attn_norm = floats(T * C);
        a->attn_rstd = floats(T);
        a->qkv = floats(T * QKV);
        a->probabilities = floats(c->NH * T * T);
        a->attn = floats(T * heads);
        a->after_attention = floats(T * C);
        a->mlp_norm = floats(T * C);
        a->mlp_rstd = floats(T);
        a->gate_up = floats(T * 2 * c->F);
        a->swiglu = floats(T * c->F);
    }
    r->inputs = (int32_t *)zeros(T * (int64_t)sizeof(int32_t));
    r->targets = (int32_t *)zeros(T * (int64_t)sizeof(int32_t));
    r->x = floats(T * C);
    r->norm = floats(T * C);
    r->rstd = floats(T);
    r->logits = floats(T * c->V);
    r->sublayer_out = floats(T * C);
    r->d_x = floats(T * C);
    r->d_norm = floats(T * C);
    r->d_qkv = floats(T * QKV);
    r->d_attn = floats(T * heads);
    r->d_gate_up = floats(T * 2 * c->F);
    r->d_swiglu = floats(T * c->F);
}

static void *rank_main(void *argument) {
    Rank *r = (Rank *)argument;
    const Shared *s = r->shared;
    int threads = omp_get_num_procs() / s->ranks; // the ranks share the cores
    omp_set_num_threads(threads > 1 ? threads : 1);
    data_open(r);
    allocate(r);
    read_weights(r);
    for (int step = 1; step <= s->steps; step++) train_step(r, step);
    fclose(r->data);
    return NULL;
}

// ---------------------------------------------------------------------------
// the command line

static int positive_number(const char *text, const char *name, int most) {
    char *end;
    long number = strtol(text, &end, 10);
    if (end == text || *end || number < 1 || number > most)
        fail("%s is '%s', expected a number from 1 to %d", name, text, most);
    return (int)number;
}

int main(int argc, char **argv) {
    static Shared s;    // static: other ranks may still read it when a rank ends the program
    static Rank *ranks; // (s.ranks)
    if (argc != 6) fail("expected five arguments: %s MODEL_DIR DATA.tok RANKS STEPS T", argv[0]);
    s.model_dir = argv[1];
    s.data_path = argv[2];
    s.ranks = positive_number(argv[3], "RANKS", 1024);
    s.steps = positive_number(argv[4], "STEPS", 1 << 30);
    s.T = positive_number(argv[5], "T", 1 << 20);
    s.config = config_read(s.model_dir);
    s.posted = (const void **)zeros(s.ranks * (int64_t)sizeof *s.posted);
    ranks = (Rank *)zeros(s.ranks * (int64_t)sizeof *ranks);
    pthread_barrier_init(&s.barrier, NULL, (unsigned)s.ranks);
    for (int i = 0; i < s.ranks; i++) {
        ranks[i].shared = &s;
        ranks[i].rank = i;
        if (pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i])) fail("cannot start %d threads", s.ranks);
    }
    for (int i = 0; i < s.ranks; i++) pthread_join(ranks[i].thread, NULL);
    printf("received %lld bytes a step\n", (long long)ranks[0].bytes_received);
    return 0;
}
