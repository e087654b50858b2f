/* rmsnorm.cu: the steps of RMSNorm on a GPU.
 *
 * Every element of a row waits for the row's sum. So the question is who owns a row: one thread, which reads memory
 * with a stride of a whole row; a warp, whose lanes add up with shuffles; or a block. The weight's gradient is a sum
 * over all rows, which many blocks must share in an order that does not change from run to run.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp rmsnorm.cu -o rmsnorm
 * with page.cuh page.h rmsnorm.h lib/device/kernel.h lib/ops/cuda/rmsnorm.cuh lib/ops/cuda/sum_rows.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/rmsnorm.cuh"
#include "rmsnorm.h"

// ---------------------------------------------------------------------------
// forward

// A row has LANES threads, 1 or 32, each with one element per step. With 1, neighbouring threads read C elements apart:
// for each element, 2 bytes in bf16, memory delivers a sector of 32.
template <int LANES>
static __global__ void __launch_bounds__(128)
    forward_kernel1(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w,
                    int64_t N, int64_t C) {
    int64_t n = thread_number() / LANES, row = n * C;
    int lane = threadIdx.x % LANES;
    if (n >= N) return;
    float squares = 0;
    for (int64_t i = lane; i < C; i += LANES) {
        floatX s = from_float(to_float(x[row + i]) + to_float(delta[row + i]));
        sum[row + i] = s;
        squares += to_float(s) * to_float(s); // of the rounded sum: backward reads these bits
    }
    float scale = 1.0f / sqrtf((LANES == 1 ? squares : warp_sum(squares)) / (float)C + EPS);
    if (lane == 0) rstd[n] = scale;
    for (int64_t i = lane; i < C; i += LANES)
        out[row + i] = from_float(to_float(sum[row + i]) * scale * to_float(w[i]));
}
template <int LANES> static void forward_rows(Case *c) {
    KERNEL(c->on, forward_kernel1<LANES>, blocks_for(c->size[0] * LANES, 128), 128, 0, X("out"), F("rstd"), X("sum"),
           X("x"), X("delta"), X("w"), c->size[0], c->size[1]);
}

// A warp per row, with W elements per lane and step. The row is kept in shared memory until its rstd is known.
template <int W>
static __global__ void __launch_bounds__(128)
    forward_kernel2(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w,
                    int64_t N, int64_t C) {
    DYN_SHARED(floatX, rows); // (4, C)
    int64_t n = thread_number() / WARP, row = n * C;
    int lane = threadIdx.x % WARP;
    floatX *kept = rows + threadIdx.x / WARP * C;
    float v[W], other[W], squares = 0;
    if (n >= N) return;
    for (int64_t i = lane * W; i < C; i += WARP * W) {
        load(v, x + row + i);
        load(other, delta + row + i);
        for (int j = 0; j < W; j++) {
            v[j] = to_float(from_float(v[j] + other[j]));
            squares += v[j] * v[j];
        }
        store(sum + row + i, v);
        for (int j = 0; j < W; j++) kept[i + j] = from_float(v[j]); // only this lane reads it: no barrier is needed
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)C + EPS);
    if (lane == 0) rstd[n] = scale;
    for (int64_t i = lane * W; i < C; i += WARP * W) {
        load(v, kept + i);
        load(other, w + i);
        for (int j = 0; j < W; j++) v[j] *= scale * other[j];
        store(out + row + i, v);
    }
}
static void forward_vectors(Case *c) {
    int bytes = 4 * (int)c->size[1] * (int)sizeof(floatX), vectors = c->size[1] % WIDE == 0;
    cuda_check(cudaFuncSetAttribute(vectors ? forward_kernel2<WIDE> : forward_kernel2<1>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "asking for shared memory");
    KERNEL_BY_WIDTH(c->on, vectors, WIDE, forward_kernel2, blocks_for(c->size[0], 4), 128, (size_t)bytes, X("out"),
                    F("rstd"), X("sum"), X("x"), X("delta"), X("w"), c->size[0], c->size[1]);
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 one thread per row",
     "The scalar loop with the addition in it, one row per thread. A warp's loads are a row apart, so only a sixteenth "
     "of each memory sector is used at once (bf16); the caches, small for so many rows, must keep the rest.",
     forward_rows<1>},
    {"2 one warp per row",
     "Lanes take adjacent elements and add up their sums by five shuffles: a warp reads whole sectors of 32 bytes, two "
     "at a time in bf16, four in fp32.",
     forward_rows<WARP>},
    {"3 vectors, row kept", "Loads of 16 bytes; the rounded sum stays in shared memory until its rstd is known.",
     forward_vectors},
    {"in use", "The op of lib/ops/cuda.", forward_in_use}};

// ---------------------------------------------------------------------------
// backward

enum { DW_ROWS = 32, DW_COLS = 128 }; // rows in a partial sum of dw; columns per block of the two dw kernels

// One warp per row: the dot product, then dx. With ATOMIC also dw: each dout y is added to its column atomically.
template <bool ATOMIC>
static __global__ void __launch_bounds__(128) dx_kernel(floatX *dx, float *dw, const floatX *dout, const floatX *x,
                                                        const float *rstd, const floatX *w, int64_t N, int64_t C) {
    int64_t n = thread_number() / WARP, row = n * C;
    int lane = threadIdx.x % WARP;
    if (n >= N) return;
    float dot = 0, scale = rstd[n];
    for (int64_t i = lane; i < C; i += WARP) {
        float y = to_float(x[row + i]) * scale, d = to_float(dout[row + i]);
        dot += d * to_float(w[i]) * y;
        if (ATOMIC) atomicAdd(dw + i, d * y);
    }
    float mean = warp_sum(dot) / (float)C;
    for (int64_t i = lane; i < C; i += WARP) {
        float y = to_float(x[row + i]) * scale, g = to_float(dout[row + i]) * to_float(w[i]);
        dx[row + i] = from_float(scale * (g - y * mean) + to_float(dx[row + i])); // dx held the residual's gradient
    }
}
template <bool ATOMIC> static void dx_rows(Case *c) {
    KERNEL(c->on, dx_kernel<ATOMIC>, blocks_for(c->size[0], 4), 128, 0, X("dx"), F("dw"), X("dout"), X("x"), F("rstd"),
           X("w"), c->size[0], c->size[1]);
}

// Block (bx, by) sums rows by * DW_ROWS to by * DW_ROWS + DW_ROWS - 1 of DW_COLS columns, one column per thread, into
// row by of partial (blocks, C).
static __global__ void __launch_bounds__(DW_COLS)
    dw_partial_kernel(float *partial, const floatX *dout, const floatX *x, const float *rstd, int64_t N, int64_t C) {
    int64_t i = (int64_t)blockIdx.x * DW_COLS + threadIdx.x, first = (int64_t)blockIdx.y * DW_ROWS;
    float sum = 0;
    for (int64_t n = first; i < C && n < min_i64(N, first + DW_ROWS); n++)
        sum += to_float(dout[n * C + i]) * to_float(x[n * C + i]) * rstd[n];
    if (i < C) partial[blockIdx.y * C + i] = sum;
}
// Adds the rows of `partial` to dw, in order, one column per thread.
static __global__ void __launch_bounds__(DW_COLS)
    dw_total_kernel(float *dw, const float *partial, int64_t blocks, int64_t C) {
    int64_t i = thread_number();
    float sum = 0;
    for (int64_t b = 0; i < C && b < blocks; b++) sum += partial[b * C + i];
    if (i < C) dw[i] += sum;
}
static void backward_two_stages(Case *c) {
    int64_t N = c->size[0], C = c->size[1], blocks = blocks_of(N, DW_ROWS);
    float *partial = (float *)page_scratch(c, (size_t)(blocks * C) * sizeof(float));
    dim3 grid(blocks_for(C, DW_COLS), (unsigned)blocks);
    KERNEL(c->on, dw_partial_kernel, grid, DW_COLS, 0, partial, X("dout"), X("x"), F("rstd"), N, C);
    KERNEL(c->on, dw_total_kernel, blocks_for(C, DW_COLS), DW_COLS, 0, F("dw"), partial, blocks, C);
    dx_rows<false>(c);
}

// A block has DW_ROWS rows, one after the other, and a thread the same W columns of each: x and dout are read once, and
// dw stays in registers. A row waits for memory twice, before the dot product and after it. C is at most 1024 W.
template <int W>
static __global__ void __launch_bounds__(1024)
    one_pass_kernel(floatX *dx, float *partial, const floatX *dout, const floatX *x, const float *rstd, const floatX *w,
                    int64_t N, int64_t C) {
    SHARED(float, sums, 2 * WARP);
    int64_t begin = (int64_t)blockIdx.x * DW_ROWS, end = min_i64(N, begin + DW_ROWS), i = (int64_t)threadIdx.x * W;
    float weight[W] = {}, dw[W] = {};
    if (i < C) load(weight, w + i);
    for (int64_t n = begin; n < end; n++) {
        float y[W] = {}, d[W] = {}, r[W], dot = 0, scale = rstd[n];
        if (i < C) load(y, x + n * C + i);
        if (i < C) load(d, dout + n * C + i);
        UNROLL for (int j = 0; j < W; j++) {
            y[j] *= scale;
            dot += d[j] * weight[j] * y[j];
            dw[j] += d[j] * y[j];
        }
        float mean = block_sum(dot, sums + n % 2 * WARP) / (float)C;
        if (i >= C) continue;
        load(r, dx + n * C + i); // the residual's gradient
        UNROLL for (int j = 0; j < W; j++) r[j] += scale * (d[j] * weight[j] - y[j] * mean);
        store(dx + n * C + i, r);
    }
    if (i < C) store(partial + (int64_t)blockIdx.x * C + i, dw);
}
static void backward_one_pass(Case *c) {
    int64_t N = c->size[0], C = c->size[1], blocks = blocks_of(N, DW_ROWS);
    float *partial = (float *)page_scratch(c, (size_t)(blocks * C) * sizeof(float));
    KERNEL_BY_WIDTH(c->on, C % WIDE == 0, WIDE, one_pass_kernel, (unsigned)blocks,
                    threads_for(blocks_of(C, W), MAX_BLOCK), 0, X("dx"), partial, X("dout"), X("x"), F("rstd"), X("w"),
                    N, C);
    KERNEL(c->on, dw_total_kernel, blocks_for(C, DW_COLS), DW_COLS, 0, F("dw"), partial, blocks, C);
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 atomic additions",
     "A warp per row; every dout y is added to its column of dw at once. N threads queue for each of the C sums, and "
     "the order of additions, hence the bits, changes from run to run.",
     dx_rows<true>},
    {"2 two stages",
     "dw separately: sums over 32 rows, then over those sums, each in a fixed order, so the same bits on each run; but "
     "dout and x are read twice.",
     backward_two_stages},
    {"3 one pass",
     "dx and the sums over 32 rows together: dout and x are read once. N / 32 blocks are too few to hide that each row "
     "waits for memory twice.",
     backward_one_pass},
    {"in use",
     "The op of lib/ops/cuda: the next row's x, dout and residual gradient are under way while a row is computed and "
     "the block adds up its dot product. A barrier of the warp keeps their loads in front of the sum.",
     backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
