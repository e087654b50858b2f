/* bench_fp8.h: whether matmuls in fp8 would pay, measured. Part of bench_gpu.cu; the trainer has no fp8.
 *
 * The blocks' matmuls of both models, forward, dX and dW, by the program in bf16 and by cuBLASLt in fp8, with slow and
 * fast accumulation, in turns, each for SUSTAINED seconds, so that clocks are those of a step. x and w are E4M3, dy is
 * E5M2; each tensor has one scale (fp8.h). On Hopper both operands of an fp8 matmul are contiguous along its sum, so x,
 * w and dy are needed transposed, too: one kernel writes both copies, after another has found the largest |x|.
 */
#ifndef BENCH_FP8_H
#define BENCH_FP8_H
#include "fp8.h" // defines: fp8_round, fp8_value, fp8_scale
#include <string>

enum { FP8_TILE = 64, FP8_SAMPLES = 16, MICRO_BATCHES = 4 };
static const double SUSTAINED = 0.3;

typedef struct {
    floatX *x;               // (rows, cols)
    uint8_t *q, *transposed; // (rows, cols), (cols, rows): x in fp8
    float *scale;            // (1)
    float *inverse;          // (1) of the scale, by which cuBLASLt multiplies; its address is a multiple of 16
    uint32_t *amax;          // bits of the largest |x|
    int64_t rows, cols;
    Fp8Format format;
} Fp8Tensor;

/* Two values, in one instruction where the GPU has it; `low` is in the lower byte. */
DEVICE uint32_t fp8_pair(float low, float high, Fp8Format f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    if (f.mantissa == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return fp8_round(low, f) | (uint32_t)fp8_round(high, f) << 8;
#endif
}

static __global__ void __launch_bounds__(BLOCK, 4) fp8_amax_kernel(uint32_t *amax, const floatX *x, int64_t count) {
    const int64_t step = (int64_t)gridDim.x * BLOCK * 8;
    uint32_t most = 0; // compared as integers: NaN counts as larger than infinity
    float v[4][8];
    for (int64_t i = thread_of_grid() * 8; i - threadIdx.x * 8 < count; i += 4 * step) {
        UNROLL for (int r = 0; r < 4; r++) load(v[r], x + min_i64(i + r * step, count - 8)); // the last one again
        issue_loads();
        UNROLL for (int j = 0; j < 32; j++) most = max(most, __float_as_uint(v[j / 8][j % 8]) & 0x7FFFFFFFu);
    }
    UNROLL for (int h = WARP / 2; h; h /= 2) most = max(most, __shfl_xor_sync(~0u, most, h));
    if (threadIdx.x % WARP == 0) atomicMax(amax, most);
}

/* A block has a tile of FP8_TILE x FP8_TILE elements. */
static __global__ void __launch_bounds__(BLOCK) fp8_cast_kernel(Fp8Tensor t, int with_transposed) {
    SHARED(uint32_t, tile, FP8_TILE * (FP8_TILE / 4 + 1)); // four elements a word; rows are a word longer than needed
    const int64_t row0 = (int64_t)blockIdx.y * FP8_TILE, col0 = (int64_t)blockIdx.x * FP8_TILE;
    const float scale = fp8_scale(__uint_as_float(*t.amax), t.format);
    if (!blockIdx.x && !blockIdx.y && threadIdx.x == 0) {
        *t.scale = scale;
        *t.inverse = 1 / scale;
    }
    const int row = (int)threadIdx.x / (FP8_TILE / 8), col8 = (int)threadIdx.x % (FP8_TILE / 8) * 8;
    const int64_t at = (row0 + row) * t.cols + col0 + col8;
    float v[2][8]; // of this row and of the one FP8_TILE / 2 below it
    UNROLL for (int k = 0; k < 2; k++) load(v[k], t.x + at + k * FP8_TILE / 2 * t.cols);
    issue_loads();
    UNROLL for (int k = 0; k < 2; k++) {
        uint32_t words[2] = {};
        UNROLL for (int j = 0; j < 8; j += 2) words[j / 4] |= fp8_pair(v[k][j] * scale, v[k][j + 1] * scale, t.format)
                                                              << j % 4 * 8;
        *(uint2 *)(void *)(t.q + at + k * FP8_TILE / 2 * t.cols) = make_uint2(words[0], words[1]);
        UNROLL for (int j = 0; j < 2; j++) tile[(row + k * FP8_TILE / 2) * (FP8_TILE / 4 + 1) + col8 / 4 + j] =
            words[j];
    }
    if (!with_transposed) return;
    __syncthreads();
    int col = (int)threadIdx.x / 4, first = (int)threadIdx.x % 4 * 16; // 16 rows of a column
    uint32_t out[4] = {};
    UNROLL for (int j = 0; j < 16; j++) out[j / 4] |=
        (tile[(first + j) * (FP8_TILE / 4 + 1) + col / 4] >> col % 4 * 8 & 0xFF) << j % 4 * 8;
    *(uint4 *)(void *)(t.transposed + (col0 + col) * t.rows + row0 + first) =
        make_uint4(out[0], out[1], out[2], out[3]);
}

static void fp8_cast(Device *dev, const Fp8Tensor *t, int with_transposed) {
    int64_t count = t->rows * t->cols;
    dim3 tiles((unsigned)(t->cols / FP8_TILE), (unsigned)(t->rows / FP8_TILE));
    device_zero(dev, t->amax, sizeof *t->amax);
    KERNEL(&dev->on, fp8_amax_kernel, filling_grid(&dev->on, blocks_of(count, BLOCK * 8)), BLOCK, 0, t->amax, t->x,
           count);
    KERNEL(&dev->on, fp8_cast_kernel, tiles, BLOCK, 0, *t, with_transposed);
}

template <class T> static T fp8_read(Bench *b, const T *p) {
    T x;
    device_read(&b->dev, &x, p, sizeof x);
    return x;
}

/* A random tensor in all its forms; some casts are checked. rows and cols are multiples of FP8_TILE. */
static Fp8Tensor take_fp8(Bench *b, int64_t rows, int64_t cols, Fp8Format format) {
    Fp8Tensor t = {take_x(b, rows * cols),
                   (uint8_t *)take(b, rows * cols),
                   (uint8_t *)take(b, rows * cols),
                   (float *)take(b, 4),
                   (float *)take(b, 4),
                   (uint32_t *)take(b, 4),
                   rows,
                   cols,
                   format};
    fp8_cast(&b->dev, &t, 1);
    for (uint64_t s = 0; s < FP8_SAMPLES; s++) {
        int64_t i = (int64_t)(mix64(s) % (uint64_t)rows), j = (int64_t)(mix64(~s) % (uint64_t)cols);
        uint8_t want = fp8_round(to_float(fp8_read(b, t.x + i * cols + j)) * fp8_read(b, t.scale), format);
        if (fp8_read(b, t.q + i * cols + j) != want || fp8_read(b, t.transposed + j * rows + i) != want)
            run_failure("bench_gpu.cu: a cast to fp8, or its transposed copy, is not %02x", want);
    }
    return t;
}

/* c (M, N) = a (M, K) b (N, K)^T in fp8; c is bf16 or, where dW is added to gradients, fp32. To cuBLASLt a is B. */
typedef struct {
    const Fp8Tensor *of[2];   // the tensors of b and a
    const uint8_t *b_q, *a_q; // their copies that are contiguous along K
    Matmul shape;
    void *c;
} Fp8Matmul;

static CudaMatmulEntry fp8_describe(Bench *b, const Fp8Matmul *m, int8_t fast) {
    const cublasLtMatmulDescAttributes_t scale_of[2] = {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                                        CUBLASLT_MATMUL_DESC_B_SCALE_POINTER};
    const MatmulKey key = matmul_key(&m->shape, m->a_q, m->b_q, m->c);
    CudaMatmulEntry entry = matmul_describe(&key, 0);
    cublasStatus_t bad = cublasLtMatmulDescSetAttribute(entry.desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, 1);
    for (int i = 0; i < 2 && !bad; i++) {
        const float *inverse = m->of[i]->inverse;
        int32_t type = m->of[i]->format.mantissa == 3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
        bad = cublasLtMatrixLayoutSetAttribute(entry.layout[i], CUBLASLT_MATRIX_LAYOUT_TYPE, &type, sizeof type);
        if (!bad) bad = cublasLtMatmulDescSetAttribute(entry.desc, scale_of[i], &inverse, sizeof inverse);
    }
    cublas_check(bad, "describing a matmul in fp8");
    matmul_propose(b->dev.on.matmuls, &entry);
    return entry;
}
static void fp8_matmul(Bench *b, CudaMatmulEntry *entry, const Fp8Matmul *m) {
    if (!cublas_matmul(&b->dev.on, entry, m->c, (const floatX *)m->a_q, (const floatX *)m->b_q))
        run_failure("bench_gpu.cu: cuBLASLt has no such matmul in fp8");
}

/* The relative error of some elements of c against sums in double of the operands as they are in fp8. */
static double fp8_error(Bench *b, CudaMatmulEntry *entry, const Fp8Matmul *m) {
    int64_t K = m->shape.K, N = m->shape.N;
    uint8_t *rows = (uint8_t *)checked_malloc(2 * (size_t)K);
    double off = 0, all = 0, inverse = (double)fp8_read(b, m->of[0]->inverse) * fp8_read(b, m->of[1]->inverse);
    if (m->shape.c_float) device_zero(&b->dev, m->c, sizeof(float) * (size_t)(m->shape.M * N));
    fp8_matmul(b, entry, m);
    for (uint64_t s = 0; s < FP8_SAMPLES; s++) {
        int64_t i = (int64_t)(mix64(s) % (uint64_t)m->shape.M), j = (int64_t)(mix64(~s) % (uint64_t)N), at = i * N + j;
        double got = m->shape.c_float ? fp8_read(b, (float *)m->c + at) : to_float(fp8_read(b, (floatX *)m->c + at));
        double sum = 0;
        device_read(&b->dev, rows, m->b_q + j * K, (size_t)K);
        device_read(&b->dev, rows + K, m->a_q + i * K, (size_t)K);
        for (int64_t k = 0; k < K; k++)
            sum += inverse * fp8_value(rows[k], m->of[0]->format) * fp8_value(rows[K + k], m->of[1]->format);
        off += (got - sum) * (got - sum);
        all += sum * sum;
    }
    free(rows);
    return sqrt(off / all);
}

/* Seconds of one call of run(), which is called for SUSTAINED seconds. */
template <class Run> static double sustained(Bench *b, Run run) {
    int calls = b->tiny ? 1 : (int)ceil(SUSTAINED / median_time(&b->dev, 3, [&](int) { run(); }));
    auto all = [&](int i) {
        for (int k = 0; k < (i < WARM_CALLS ? 1 : calls); k++) run();
    };
    return median_time(&b->dev, 1, all) / calls;
}

/* One matmul in three ways; adds their seconds to sums (3). */
template <class Run>
static void fp8_rows(Bench *b, const char *what, const char *pass, const Fp8Matmul *m, double *sums, Run in_bf16) {
    static const char *const names[3] = {"bf16", "fp8", "fp8, fast accumulation"};
    double seconds[3], flops = 2.0 * m->shape.M * m->shape.N * m->shape.K;
    for (int way = 0; way < 3; way++) {
        char name[128];
        CudaMatmulEntry entry = fp8_describe(b, m, way == 2);
        seconds[way] = way ? sustained(b, [&] { fp8_matmul(b, &entry, m); }) : sustained(b, in_bf16);
        sums[way] += seconds[way];
        int end = snprintf(name, sizeof name, "%s %s, %s", what, pass, names[way]);
        if (way) snprintf(name + end, sizeof name - (size_t)end, ", error %.2g", fp8_error(b, &entry, m));
        figure("fp8", name, seconds[way], 1e-12 * flops / seconds[way], seconds[0] / seconds[way]);
    }
}

/* The matmuls of one weight (OC, IC). Returns the seconds of its casts for a micro-batch of N tokens: x and dy are cast
 * once, w once in MICRO_BATCHES. */
static double fp8_weight(Bench *b, const char *what, int N, int IC, int OC, double *sums) {
    Device *dev = &b->dev;
    b->used = 0;
    const Fp8Tensor x = take_fp8(b, N, IC, E4M3), w = take_fp8(b, OC, IC, E4M3), dy = take_fp8(b, N, OC, E5M2);
    floatX *y = take_x(b, N * OC), *dx = take_x(b, N * IC);
    float *dw = take_floats(b, OC * IC, -1, 1);
    const Fp8Matmul forward = {{&w, &x}, w.q, x.q, {N, OC, IC, IC, 1, 1, IC, OC, 0, 0}, y};
    const Fp8Matmul to_x = {{&w, &dy}, w.transposed, dy.q, {N, IC, OC, OC, 1, 1, OC, IC, 0, 0}, dx};
    const Fp8Matmul to_w = {{&x, &dy}, x.transposed, dy.transposed, {OC, IC, N, N, 1, 1, N, IC, 1, 1}, dw};
    fp8_rows(b, what, "forward", &forward, sums, [&] { linear_forward(dev, y, x.x, w.x, N, IC, OC); });
    fp8_rows(b, what, "dX", &to_x, sums, [&] { linear_backward_input(dev, dx, dy.x, OC, w.x, N, IC, OC); });
    fp8_rows(b, what, "dW", &to_w, sums, [&] { linear_backward_weight(dev, dw, dy.x, OC, x.x, N, IC, OC, 1); });
    char name[96];
    double casts = 0;
    const Fp8Tensor *tensors[3] = {&x, &dy, &w};
    const char *names[3] = {"x", "dy", "w"};
    for (int i = 0; i < 6; i++) {
        const Fp8Tensor *t = tensors[i / 2];
        int both = i % 2; // the cast alone is for a comparison
        double took = sustained(b, [&] { fp8_cast(dev, t, both); }), bytes = (5.0 + both) * t->rows * t->cols;
        snprintf(name, sizeof name, "%s, %s of %s", what, both ? "cast and transpose" : "cast", names[i / 2]);
        figure("fp8", name, took, 1e-9 * bytes / took, bytes / took / b->copy);
        if (both) casts += took / (t == &w ? MICRO_BATCHES : 1);
    }
    return casts;
}

static void fp8_probe(Bench *b) {
    heading("Matmuls of the blocks in fp8, operands cast before; casts, at the bytes that they move", "TFLOP/s, GB/s",
            "of bf16's speed, of the copy rate");
    for (int i = 0; i < 2; i++) {
        const Shape *s = b->tiny ? &tiny_shapes[i] : &shapes[i];
        const int C = s->C, F = (int)round_up(s->F, FP8_TILE), tokens = b->tiny ? FP8_TILE : 8192;
        const struct {
            const char *name;
            int IC, OC;
        } weights[4] = {{"QKV", C, width(s)}, {"out", s->NH * s->HD, C}, {"gate and up", C, 2 * F}, {"down", F, C}};
        double sums[3] = {0, 0, 0}, casts = 0;
        for (const auto &w : weights)
            casts += fp8_weight(b, (std::string(s->name) + " " + w.name).c_str(), tokens, w.IC, w.OC, sums);
        printf("\n%s: bf16 %.2f ms, fp8 %.2f ms, with fast accumulation %.2f ms, casts %.2f ms.\n", s->name,
               1e3 * sums[0], 1e3 * sums[1], 1e3 * sums[2], 1e3 * casts);
        printf("bound: fp8 matmuls, %s: times bf16's speed | >= 1.60 | %.3f (fast accumulation %.3f) | %s\n", s->name,
               sums[0] / sums[1], sums[0] / sums[2], sums[0] / sums[1] >= 1.6 ? "met" : "MISSED");
        printf("bound: fp8 casts, %s: of bf16's matmuls | <= 0.12 | %.3f | %s\n", s->name, casts / sums[0],
               casts / sums[0] <= 0.12 ? "met" : "MISSED");
    }
}
#endif
