/* bench_gpu.cu: the CUDA build on a GPU, in milliseconds. dev/gpu_check.sh and dev/pytorch/bench_gpu.py run it.
 *
 *   bench_gpu probe               the GPU, its driver and memory; one kernel, checked
 *   bench_gpu tokens FILE         random tokens of a vocabulary of 4,096, for runs of --model tiny
 *   bench_gpu roofline [tiny]     copy rate and matmul rate, then every op next to them: Markdown, one JSON object per
 *                                 figure, and lines `bound: …`
 *   bench_gpu fp8 [tiny]          the blocks' matmuls in bf16 and fp8 in turns, casts, errors; figures as above
 *   bench_gpu attention [tiny]    for each input line `HD CALLS` a JSON object: milliseconds of forward and backward,
 *                                 call by call
 *   bench_gpu train OPTION…       a job of one rank with the program's options and random tokens; for each input line
 *                                 (`steps N`, `parts`, `memory`) a JSON object; ends at `quit` or at the input's end
 *
 * `train` also takes the lines `attention mma` and `attention wgmma`: from then on attention uses these kernels, if the
 * GPU can run them. The answer names those that it uses.
 *
 * Times are the GPU's own, between events, with the next calls already enqueued. A step's time is the host's, until the
 * step's last kernel has ended. Shapes are those of a micro-batch of one sequence of 8,192 tokens. Operands are random,
 * at least twice as large as the L2 cache, and used in rotation, so that no cache holds them. With `tiny` every line is
 * printed, without figures.
 */
#ifndef USE_CUDA
#error "bench_gpu.cu is for CUDA; bench.cu measures a step on a processor"
#endif
#define TESTING
#include "train_llama3.cu"
#include "bench_step.h" // defines: train_answers, write_tokens

// ---------------------------------------------------------------------------
// times

enum { MAX_CALLS = 64, WARM_CALLS = 3 };
static cudaEvent_t call_start[MAX_CALLS], call_end[MAX_CALLS];

static void events_open(void) {
    for (int i = 0; i < MAX_CALLS; i++) {
        cuda_check(cudaEventCreateWithFlags(&call_start[i], cudaEventDefault), "making an event");
        cuda_check(cudaEventCreateWithFlags(&call_end[i], cudaEventDefault), "making an event");
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* Seconds of `calls` calls of run(i), all enqueued before the first is waited for; prepare(i), before each, is not
 * timed. */
template <class Run, class Prepare>
static void time_calls(Device *dev, double *seconds, int calls, Run run, Prepare prepare) {
    for (int i = -WARM_CALLS; i < calls; i++) {
        int set = i + WARM_CALLS;
        prepare(set);
        if (i >= 0) cuda_check(cudaEventRecord(call_start[i], dev->on.stream), "recording an event");
        run(set);
        if (i >= 0) cuda_check(cudaEventRecord(call_end[i], dev->on.stream), "recording an event");
    }
    device_synchronize(dev);
    for (int i = 0; i < calls; i++) {
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, call_start[i], call_end[i]), "asking for a time");
        seconds[i] = fmax(1e-3 * ms, 1e-9);
    }
}
template <class Run> static double median_time(Device *dev, int calls, Run run) {
    double seconds[MAX_CALLS];
    time_calls(dev, seconds, calls, run, [](int) {});
    return median(seconds, calls);
}

// ---------------------------------------------------------------------------
// a GPU, and tensors of random numbers on it

static __global__ void random_kernel(floatX *x, int64_t count, uint64_t seed, float low,
                                     float high) { // uniform in [low, high)
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        x[i] = from_float(low +
                          (high - low) * (float)(mix64(seed + (uint64_t)i * 0x9E3779B97F4A7C15ull) >> 40) * 0x1p-24f);
}
static __global__ void random_ids_kernel(int32_t *ids, int64_t count, int below) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) ids[i] = (int32_t)(mix64((uint64_t)i + 77) % (uint64_t)below);
}

typedef struct { // a pool of device memory; each measurement reuses all of it
    Device dev;
    char *base;
    size_t size, used;
    uint64_t seed;
    int tiny;
    double copy, matmul_rate; // bytes/s read + written; FLOP/s: of this GPU, measured
    double cache;             // bytes of its L2 cache
} Bench;

static void *take(Bench *b, int64_t bytes) {
    void *p = b->base + b->used;
    b->used += (size_t)round_up(bytes, 256);
    if (b->used > b->size)
        run_failure("bench_gpu.cu: a measurement needs %zu bytes, its pool has %zu", b->used, b->size);
    return p;
}
static floatX *take_random(Bench *b, int64_t count, float low, float high) {
    floatX *x = (floatX *)take(b, count * (int64_t)sizeof(floatX));
    b->seed += 1ull << 40;
    KERNEL(&b->dev.on, random_kernel, grid_of(blocks_of(count, 256)), 256, 0, x, count, b->seed, low, high);
    return x;
}
static floatX *take_x(Bench *b, int64_t count) { return take_random(b, count, -1, 1); }
static float *take_floats(Bench *b, int64_t count, float low, float high) { // random in their upper half, which decides
    return (float *)take_random(b, count * (int64_t)(sizeof(float) / sizeof(floatX)), low, high);
}
static int32_t *take_ids(Bench *b, int64_t count, int below) {
    int32_t *ids = (int32_t *)take(b, count * 4);
    KERNEL(&b->dev.on, random_ids_kernel, grid_of(blocks_of(count, 256)), 256, 0, ids, count, below);
    return ids;
}

static void bench_open(Bench *b, int tiny, size_t pool) {
    Device dry_run;
    memset(b, 0, sizeof *b);
    device_count();
    device_open_dry_run(&dry_run, 1, 0);
    dry_run.arenas[MEM_WORKSPACE].peak = (tiny ? 4u << 20 : 1u << 30) + CUDA_WORKSPACE_BYTES;
    device_open(&b->dev, &dry_run, ".", 0, NULL);
    ops_open(&b->dev, 0);
    events_open();
    int cache = 0;
    cuda_check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, 0), "asking for the size of the cache");
    b->cache = cache;
    b->tiny = tiny;
    b->size = tiny ? (size_t)32 << 20 : pool;
    cuda_check(cudaMalloc((void **)&b->base, b->size), "getting memory to measure in");
}
static void bench_close(Bench *b) {
    device_synchronize(&b->dev);
    cudaFree(b->base);
    ops_close(&b->dev);
    device_close(&b->dev);
}

// ---------------------------------------------------------------------------
// figures, for people and for programs

static void heading(const char *title, const char *rate, const char *share) {
    printf("\n## %s\n\n| | ms | %s | %s |\n|---|---:|---:|---:|\n", title, rate, share);
}
static void figure(const char *section, const char *what, double seconds, double rate, double share) {
    printf("| %s | %.4g | %.4g | %.3f |\n", what, 1e3 * seconds, rate, share);
    printf("{\"section\":\"%s\",\"what\":\"%s\",\"ms\":%.6g,\"rate\":%.6g,\"share\":%.5g}\n", section, what,
           1e3 * seconds, rate, share);
    fflush(stdout);
}
typedef struct {
    double share;
    char what[96];
} Worst;
static void note_worst(Worst *w, double share, const char *what) {
    if (share >= w->share) return;
    w->share = share;
    snprintf(w->what, sizeof w->what, "%s", what);
}
static void bound(const char *name, double least, const Worst *w) {
    printf("bound: %s | >= %.2f | %.3f (%s) | %s\n", name, least, w->share, w->what,
           w->share >= least ? "met" : "MISSED");
    fflush(stdout);
}

typedef struct {
    const char *name;
    int C, F, NH, NKV, HD, V;
} Shape;
static const Shape shapes[] = {{"1B", 2048, 8192, 32, 8, 64, 128256}, {"8B", 4096, 14336, 32, 8, 128, 128256}};
static const Shape tiny_shapes[] = {{"1B", 64, 160, 2, 1, 64, 320}, {"8B", 128, 96, 2, 1, 128, 264}};
static int width(const Shape *s) { return (s->NH + 2 * s->NKV) * s->HD; } // of a row of queries, keys and values

// ---------------------------------------------------------------------------
// rates of this GPU

static void rates(Bench *b) {
    int64_t bytes = b->tiny ? 1 << 20 : 1ll << 30, n = b->tiny ? 64 : 8192;
    char *from[3], *to[3];
    b->used = 0;
    for (int i = 0; i < 3; i++) {
        from[i] = (char *)take_x(b, bytes / (int64_t)sizeof(floatX));
        to[i] = (char *)take(b, bytes);
    }
    double copy = median_time(&b->dev, 15, [&](int i) { device_copy(&b->dev, to[i % 3], from[i % 3], (size_t)bytes); });
    b->copy = 2.0 * (double)bytes / copy;
    b->used = 0;
    floatX *x = take_x(b, n * n), *w = take_x(b, n * n), *y = take_x(b, n * n);
    double matmul = median_time(&b->dev, 15, [&](int) { linear_forward(&b->dev, y, x, w, (int)n, (int)n, (int)n); });
    b->matmul_rate = 2.0 * (double)(n * n * n) / matmul;
    heading("Rates of this GPU, on random data", "GB/s, TFLOP/s", "of itself");
    figure("rates", "copy within the device, bytes read and written", copy, b->copy / 1e9, 1);
    char what[96];
    snprintf(what, sizeof what, "%s matmul of %" PRId64 " cubed", PRECISION_NAME, n);
    figure("rates", what, matmul, b->matmul_rate / 1e12, 1);
}

// ---------------------------------------------------------------------------
// ops that move memory

/* What share of the copy rate ops must reach. exact_total and fingerprint have no bound: they are arithmetic. */
typedef struct {
    const char *name;
    double least;
    OpKind ops[11];
    int num_ops;
} CopyBound;
static const CopyBound copy_bounds[] = {
    {"RMSNorm forward, RoPE, SwiGLU, cross-entropy, AdamW, squared_norm, tree_sum, cast, of the copy rate",
     0.85,
     {OP_RMSNORM_FORWARD, OP_ROPE_FORWARD, OP_ROPE_BACKWARD, OP_SWIGLU_FORWARD, OP_SWIGLU_BACKWARD, OP_CROSS_ENTROPY,
      OP_ADAMW, OP_SQUARED_NORM, OP_TREE_SUM, OP_CAST},
     10},
    {"RMSNorm backward, of the copy rate", 0.80, {OP_RMSNORM_BACKWARD}, 1},
    {"embedding forward, of the copy rate", 0.72, {OP_EMBEDDING_FORWARD}, 1},
    {"embedding backward, of the copy rate", 0.55, {OP_EMBEDDING_BACKWARD}, 1}};
enum { COPY_BOUNDS = sizeof copy_bounds / sizeof *copy_bounds };

/* `worst` (COPY_BOUNDS) */
static void note_share(Worst *worst, OpKind op, double share, const char *what) {
    for (int i = 0; i < COPY_BOUNDS; i++)
        for (int k = 0; k < copy_bounds[i].num_ops; k++)
            if (copy_bounds[i].ops[k] == op) note_worst(&worst[i], share, what);
}

/* One op over SETS sets of operands in turn. Its bytes are those that it tells the ledger. */
enum { SETS = WARM_CALLS };
template <class Run, class Prepare>
static void memory_op(Bench *b, Worst *worst, OpKind op, const char *of, Run run, Prepare prepare) {
    double seconds[MAX_CALLS], before = b->dev.rec.ops[op].bytes;
    int64_t calls = b->dev.rec.ops[op].calls;
    time_calls(
        &b->dev, seconds, 15, [&](int i) { run(i % SETS); }, [&](int i) { prepare(i % SETS); });
    double bytes = (b->dev.rec.ops[op].bytes - before) / (double)(b->dev.rec.ops[op].calls - calls),
           took = median(seconds, 15), rate = bytes / took;
    char what[96];
    snprintf(what, sizeof what, "%s, %s, %.0f MB", op_names[op], of, bytes / 1e6);
    figure("memory", what, took, rate / 1e9, rate / b->copy);
    note_share(worst, op, rate / b->copy, what);
    if (!b->tiny && (int)SETS * bytes < 2 * b->cache)
        run_failure("bench_gpu.cu: %s: %d sets of operands are less than twice the L2 cache", what, (int)SETS);
}
template <class Run> static void memory_op(Bench *b, Worst *worst, OpKind op, const char *of, Run run) {
    memory_op(b, worst, op, of, run, [](int) {});
}

static void memory_ops_of_rows(Bench *b, Worst *worst, const Shape *s) {
    Device *dev = &b->dev;
    int N = b->tiny ? 48 : 8192, T = b->tiny ? 24 : 8192, rows = b->tiny ? 16 : LOGIT_ROWS, QKV = width(s);
    int64_t C = s->C, F = s->F, V = s->V, count = rows * logits_stride(V); // count: of the logits
    floatX *x[SETS], *y[SETS], *z[SETS], *sum[SETS];
    floatX *logits[SETS];
    b->used = 0;
    for (int i = 0; i < SETS; i++) {
        x[i] = take_x(b, N * C);
        y[i] = take_x(b, N * C);
        z[i] = take_x(b, N * C);
        sum[i] = take_x(b, N * C);
    }
    floatX *w = take_x(b, C), *embed = take_x(b, V * C);
    float *rstd = take_floats(b, N, 0.5f, 1), *dw = take_floats(b, C, -1, 1), *losses = take_floats(b, N, 0, 1);
    float *dembed = take_floats(b, V * C, -1, 1), *table = take_floats(b, (int64_t)T * s->HD, -1, 1);
    int32_t *ids = take_ids(b, N, s->V), *places = take_ids(b, T, T);
    memory_op(b, worst, OP_RMSNORM_FORWARD, s->name,
              [&](int i) { rmsnorm_forward(dev, y[i], rstd, sum[i], x[i], z[i], w, 1e-5f, N, s->C); });
    memory_op(b, worst, OP_RMSNORM_BACKWARD, s->name,
              [&](int i) { rmsnorm_backward(dev, y[i], dw, x[i], z[i], sum[i], rstd, w, N, s->C); });
    memory_op(b, worst, OP_EMBEDDING_FORWARD, s->name,
              [&](int i) { embedding_forward(dev, x[i], embed, ids, 0, N, s->C, s->V); });
    memory_op(b, worst, OP_EMBEDDING_BACKWARD, s->name,
              [&](int i) { embedding_backward(dev, dembed, x[i], ids, 0, N, s->C, s->V); });
    size_t mark = b->used;
    for (int i = 0; i < SETS; i++) x[i] = take_x(b, (int64_t)N * QKV);
    memory_op(b, worst, OP_ROPE_FORWARD, s->name,
              [&](int i) { rope_forward(dev, x[i], QKV, table, places, N, T, s->NH + s->NKV, s->HD); });
    memory_op(b, worst, OP_ROPE_BACKWARD, s->name,
              [&](int i) { rope_backward(dev, x[i], QKV, table, places, N, T, s->NH + s->NKV, s->HD); });
    b->used = mark;
    for (int i = 0; i < SETS; i++) {
        x[i] = take_x(b, N * F);
        y[i] = take_x(b, 2 * N * F);
    }
    memory_op(b, worst, OP_SWIGLU_FORWARD, s->name, [&](int i) { swiglu_forward(dev, x[i], y[i], N, s->F); });
    memory_op(b, worst, OP_SWIGLU_BACKWARD, s->name, [&](int i) { swiglu_backward(dev, y[i], x[i], y[i], N, s->F); });
    b->used = mark;
    for (int i = 0; i < SETS; i++) logits[i] = take_x(b, count);
    memory_op(
        b, worst, OP_CROSS_ENTROPY, s->name,
        [&](int i) { // overwrites the logits
            cross_entropy(dev, losses, logits_x(logits[i], V), ids, no_z_loss, rows, s->V, 1);
        },
        [&](int i) {
            KERNEL(&dev->on, random_kernel, grid_of(blocks_of(count, 256)), 256, 0, logits[i], count, (uint64_t)i << 40,
                   -1.0f, 1.0f);
        });
}

static void memory_ops_flat(Bench *b, Worst *worst) {
    Device *dev = &b->dev;
    int64_t n = b->tiny ? 1 << 14 : 1 << 27;
    float *p[SETS], *m[SETS], *v[SETS], *g[SETS];
    floatX *copy[SETS];
    b->used = 0;
    uint64_t *print = (uint64_t *)take(b, 256);
    ExactSum *total = (ExactSum *)take(b, sizeof *total);
    device_zero(dev, total, sizeof *total);
    for (int i = 0; i < SETS; i++) {
        p[i] = take_floats(b, n, -1, 1);
        m[i] = take_floats(b, n, -1, 1);
        v[i] = take_floats(b, n, 0, 1);
        g[i] = take_floats(b, n, -1, 1);
        copy[i] = take_x(b, n);
    }
    memory_op(b, worst, OP_ADAMW, "flat",
              [&](int i) { adamw(dev, p[i], m[i], v[i], g[i], copy[i], n, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 10); });
    memory_op(b, worst, OP_SQUARED_NORM, "flat", [&](int i) { squared_norm(dev, total, g[i], n); });
    memory_op(b, worst, OP_TREE_SUM, "one piece added", [&](int i) { tree_sum(dev, m[i], g[i], DTYPE_F32, 1, n, 1); });
    memory_op(b, worst, OP_CAST, "flat", [&](int i) { cast_to_bf16(dev, (bf16 *)copy[i], g[i], n); });
    memory_op(b, worst, OP_FINGERPRINT, "flat", [&](int i) { fingerprint(dev, print, g[i], n * 4); });
    memory_op(b, worst, OP_EXACT_TOTAL, "flat", [&](int i) { exact_total(dev, total, v[i], n); });
}

// ---------------------------------------------------------------------------
// attention

/* Seconds of each call on one sequence, rows of queries, keys and values as the model has them. */
static double attention_seconds(Bench *b, int HD, int calls, double *forward,
                                double *backward) { // returns forward's FLOPs
    Device *dev = &b->dev;
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = 1;
    s.Tq = s.Tk = b->tiny ? 160 : 8192;
    s.NH = b->tiny ? 4 : 32;
    s.NKV = b->tiny ? 2 : 8;
    s.HD = HD;
    int64_t Q = (int64_t)s.NH * HD, KV = (int64_t)s.NKV * HD, T = s.Tq;
    s.q_stride = s.k_stride = s.v_stride = Q + 2 * KV;
    s.o_stride = Q;
    floatX *qkv[SETS], *dqkv[SETS], *out[SETS], *dout[SETS];
    float *lse[SETS];
    b->used = 0;
    for (int i = 0; i < SETS; i++) {
        qkv[i] = take_x(b, T * s.q_stride);
        dqkv[i] = take_x(b, T * s.q_stride);
        out[i] = take_x(b, T * Q);
        dout[i] = take_x(b, T * Q);
        lse[i] = take_floats(b, T * s.NH, 0, 1);
    }
    auto run_forward = [&](int c) {
        int i = c % SETS;
        attention_forward(dev, out[i], lse[i], qkv[i], qkv[i] + Q, qkv[i] + Q + KV, &s);
    };
    auto run_backward = [&](int c) {
        int i = c % SETS;
        attention_backward(dev, dqkv[i], dqkv[i] + Q, dqkv[i] + Q + KV, dout[i], out[i], lse[i], qkv[i], qkv[i] + Q,
                           qkv[i] + Q + KV, &s);
    };
    time_calls(dev, forward, calls, run_forward, [](int) {}); // the warm-up calls have filled out and lse of every set
    time_calls(dev, backward, calls, run_backward, [](int) {});
    return 4.0 * HD * attention_pairs(&s);
}

static void attention_row(Bench *b, int HD, int by_wgmma, int deterministic) {
    double forward[MAX_CALLS], backward[MAX_CALLS];
    char what[96];
    const char *by = by_wgmma ? "wgmma" : "mma.sync";
    b->dev.on.deterministic = deterministic;
    b->dev.on.hopper_attention = by_wgmma;
    double flops = attention_seconds(b, HD, 15, forward, backward), f = median(forward, 15), g = median(backward, 15);
    b->dev.on.deterministic = 0;
    snprintf(what, sizeof what, "forward, heads of %d, %s", HD, by);
    if (!deterministic) figure("attention", what, f, flops / f / 1e12, flops / f / b->matmul_rate);
    snprintf(what, sizeof what, "backward, heads of %d, %s%s", HD, by, deterministic ? ", deterministic" : "");
    figure("attention", what, g, 2.5 * flops / g / 1e12, 2.5 * flops / g / b->matmul_rate);
}

/* By every kind of kernel that this GPU can run. */
static void attention_rows_of(Bench *b) {
    int in_use = b->dev.on.hopper_attention;
    heading("Attention, 8,192 tokens, 32 heads over 8, causal counted half, backward 2.5 x forward", "TFLOP/s",
            "of the matmul rate");
    for (int HD = 64; HD <= 128; HD += 64)
        for (int by_wgmma = 0; by_wgmma <= (b->dev.on.encode_tensor_map != NULL); by_wgmma++)
            for (int deterministic = 0; deterministic < 2; deterministic++)
                attention_row(b, HD, by_wgmma, deterministic);
    b->dev.on.hopper_attention = in_use;
}

static void attention_answers(Bench *b) {
    char line[256];
    int HD, calls;
    double seconds[2][MAX_CALLS];
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%d %d", &HD, &calls) != 2 || calls < 1 || calls > MAX_CALLS) break;
        double flops = attention_seconds(b, HD, calls, seconds[0], seconds[1]);
        printf("{\"HD\":%d,\"forward_flops\":%.6g", HD, flops);
        for (int way = 0; way < 2; way++) {
            printf(",\"%s\":[", way ? "backward" : "forward");
            for (int i = 0; i < calls; i++) printf("%s%.6g", i ? "," : "", 1e3 * seconds[way][i]);
            printf("]");
        }
        printf("}\n");
        fflush(stdout);
    }
}

// ---------------------------------------------------------------------------
// matmuls: the algorithm that the program chooses next to the fastest that cuBLASLt offers

enum { MOST_CANDIDATES = 48 };

/* `run` is one matmul op. The program's algorithm and the fastest one are timed in turns. */
template <class Run> static void matmul_row(Bench *b, double *sums, const char *what, double flops, Run run) {
    static cublasLtMatmulHeuristicResult_t results[MOST_CANDIDATES];
    enum { ROUNDS = 9 };
    int calls = b->tiny ? 1 : 5, found, fastest = -1;
    run(0);
    device_synchronize(&b->dev);
    CudaMatmulEntry *m = b->dev.on.matmuls->entries; // the newest: this shape's
    if (!m || m->now == m->count) run_failure("bench_gpu.cu: cuBLASLt has nothing for %s", what);
    cublasLtMatmulAlgo_t chosen = m->algorithms[m->now];
    double least = INFINITY, times[2][ROUNDS];
    found = matmul_algorithms(b->dev.on.matmuls, m, results, MOST_CANDIDATES);
    m->now = 0;
    m->count = 1;
    for (int i = 0; i < found; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
        m->algorithms[0] = results[i].algo;
        run(0);
        if (m->now) { // cuBLASLt listed it and then refused it, so the plain kernel ran
            m->now = 0;
            continue;
        }
        double took = median_time(&b->dev, calls, run);
        if (took < least) {
            least = took;
            fastest = i;
        }
    }
    for (int r = 0; r < ROUNDS; r++)
        for (int way = 0; way < 2; way++) {
            m->algorithms[0] = way && fastest >= 0 ? results[fastest].algo : chosen;
            times[way][r] = median_time(&b->dev, 1, run);
        }
    m->algorithms[0] = chosen;
    double ours = median(times[0], ROUNDS), best = fmin(ours, median(times[1], ROUNDS));
    char name[160];
    snprintf(name, sizeof name, "%s; of %d: number %d", what, found, fastest + 1);
    figure("matmuls", name, ours, flops / ours / 1e12, best / ours);
    sums[0] += ours;
    sums[1] += best;
}

static void matmuls_of(Bench *b, double *sums, const Shape *s) {
    Device *dev = &b->dev;
    int N = b->tiny ? 32 : 8192, rows = b->tiny ? 16 : LOGIT_ROWS, Q = s->NH * s->HD;
    const struct {
        const char *name;
        int IC, OC, head;
    } list[] = {{"QKV", s->C, width(s), 0},
                {"out", Q, s->C, 0},
                {"gate and up", s->C, 2 * s->F, 0},
                {"down", s->F, s->C, 0},
                {"head", s->C, s->V, 1}};
    for (const auto &p : list) {
        int M = p.head ? rows : N, IC = p.IC, OC = p.OC;
        int64_t stride = p.head ? logits_stride(OC) : OC;
        double flops = 2.0 * M * IC * OC;
        b->used = 0;
        floatX *x = take_x(b, (int64_t)M * IC), *dx = take_x(b, (int64_t)M * IC), *w = take_x(b, (int64_t)OC * IC),
               *y = take_x(b, M * stride);
        float *dw = take_floats(b, (int64_t)OC * IC, -1, 1);
        floatX *into = take_x(b, M * stride); // forward's: dy stays random
        char what[96];
        snprintf(what, sizeof what, "%s %s, %d rows, forward", s->name, p.name, M);
        if (p.head)
            matmul_row(b, sums, what, flops,
                       [&](int) { linear_forward_logits(dev, logits_x(into, OC), x, w, M, IC, OC); });
        else matmul_row(b, sums, what, flops, [&](int) { linear_forward(dev, into, x, w, M, IC, OC); });
        snprintf(what, sizeof what, "%s %s, %d rows, dX", s->name, p.name, M);
        matmul_row(b, sums, what, flops, [&](int) { linear_backward_input(dev, dx, y, stride, w, M, IC, OC); });
        snprintf(what, sizeof what, "%s %s, %d rows, dW", s->name, p.name, M);
        matmul_row(b, sums, what, flops,
                   [&](int) { linear_backward_weight(dev, dw, y, stride, x, M, IC, OC, p.head); });
    }
}

static void roofline(Bench *b) {
    const Shape *of = b->tiny ? tiny_shapes : shapes;
    Worst memory[COPY_BOUNDS];
    double sums[2] = {0, 0};
    for (int i = 0; i < COPY_BOUNDS; i++) memory[i] = {INFINITY, ""};
    rates(b);
    heading("Ops that move memory, at the bytes that the op's ledger counts", "GB/s", "of the copy rate");
    for (int i = 0; i < 2; i++) memory_ops_of_rows(b, memory, &of[i]);
    memory_ops_flat(b, memory);
    for (int i = 0; i < COPY_BOUNDS; i++) bound(copy_bounds[i].name, copy_bounds[i].least, &memory[i]);
    attention_rows_of(b);
    heading("Matmuls of a micro-batch of 8,192 tokens: the program's choice, and which of cuBLASLt's candidates is "
            "fastest",
            "TFLOP/s", "of the fastest");
    for (int i = 0; i < 2; i++) matmuls_of(b, sums, &of[i]);
    printf("\nAll matmuls together: %.2f ms, the fastest of each %.2f ms.\n", 1e3 * sums[0], 1e3 * sums[1]);
}

#include "bench_fp8.h" // defines: fp8_probe

// ---------------------------------------------------------------------------

static void probe(void) {
    cudaDeviceProp gpu;
    int driver = 0, runtime = 0, wrong = 0;
    Bench b;
    bench_open(&b, 1, 0);
    cuda_check(cudaGetDeviceProperties(&gpu, 0), "asking what GPU this is");
    cuda_check(cudaDriverGetVersion(&driver), "asking for the driver's version");
    cuda_check(cudaRuntimeGetVersion(&runtime), "asking for the runtime's version");
    floatX *x = take_x(&b, 1000), here[1000];
    device_read(&b.dev, here, x, sizeof here);
    for (int i = 0; i < 1000; i++) wrong += !(to_float(here[i]) >= -1 && to_float(here[i]) <= 1);
    if (wrong) run_failure("%d of 1000 numbers that a kernel wrote are wrong", wrong);
    printf("%s, %d.%d, %d multiprocessors; driver for CUDA %d.%d, runtime %d.%d; %.1f GB free\n", gpu.name, gpu.major,
           gpu.minor, gpu.multiProcessorCount, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
           device_memory(0) / 1e9);
    bench_close(&b);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    int tiny = argc > 2 && !strcmp(argv[2], "tiny");
    Bench b;
    if (!strcmp(what, "probe")) {
        probe();
        return 0;
    }
    if (!strcmp(what, "train")) {
        train_answers(argc, argv);
        return 0;
    }
    if (!strcmp(what, "tokens") && argc == 3) {
        write_tokens(argv[2], 4096, 1 << 17);
        return 0;
    }
    if (strcmp(what, "roofline") && strcmp(what, "attention") && strcmp(what, "fp8"))
        user_error("bench_gpu probe | tokens FILE | roofline [tiny] | fp8 [tiny] | attention [tiny] | train OPTION…, "
                   "not '%s'",
                   what);
    bench_open(&b, tiny, (size_t)20 << 30);
    if (!strcmp(what, "attention")) attention_answers(&b);
    else if (!strcmp(what, "roofline")) roofline(&b);
    else {
        rates(&b);
        fp8_probe(&b);
    }
    bench_close(&b);
    return 0;
}
