/* flat_tensors.cuh: ops on tensors as flat arrays, on NVIDIA GPUs: sums of ranks' pieces, gradient norm, AdamW, casts,
 * int8. The contracts are in lib/ops/ops.h.
 *
 * Elements, or blocks of a fixed number of elements, are computed alone, so the result does not depend on the grid or
 * on where a tensor is cut.
 */
#ifndef CUDA_FLAT_TENSORS_CUH
#define CUDA_FLAT_TENSORS_CUH
#include "../../device/exact_sum.h" // defines: ExactSum
#include "vectors.cuh"     // defines: load_some, store_some, warp_sum, filling_grid

// ---------------------------------------------------------------------------
// sums over pieces

/* A thread sums W elements over all n < 2^LEVELS pieces by a binary tree. level[b] is a finished left half, the sum of
 * 2^b pieces, that waits for its right half. The indices of level[] are constants once the loops are unrolled, so it
 * stays in registers. */
template <int W, int LEVELS, class Out, class T>
DEVICE void tree_sum_of(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float level[LEVELS][W], sum[W] = {};
    if (left <= 0) return;
    for (int k = 0; k < n; k++) {
        int waits = 0;
        load_some<true>(sum, pieces + k * count + i, left);
        UNROLL for (int b = 0; b < LEVELS; b++) {
            if (waits) continue;
            UNROLL for (int j = 0; j < W; j++)
                if (k >> b & 1) sum[j] = level[b][j] + sum[j];
                else level[b][j] = sum[j];
            waits = !(k >> b & 1);
        }
    }
    int some = 0; // what is left are left halves without a right one: they are added from the narrowest on
    UNROLL for (int b = 0; b < LEVELS; b++) {
        if (!(n >> b & 1)) continue;
        UNROLL for (int j = 0; j < W; j++) sum[j] = some ? level[b][j] + sum[j] : level[b][j];
        some = 1;
    }
    if (accumulate) {
        float before[W];
        load_some(before, out + i, left);
        UNROLL for (int j = 0; j < W; j++) sum[j] = before[j] + sum[j];
    }
    store_some(out + i, sum, left);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    tree_sum_of<FLAT, 4>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
__global__ void __launch_bounds__(BLOCK)
    tree_sum_many_kernel(Out *out, const T *pieces, int n, int64_t count, int accumulate) { // also for unaligned pieces
    tree_sum_of<1, 31>(out, pieces, n, count, accumulate);
}
template <class Out, class T>
static void cuda_tree_sum_of(OpStream *on, Out *out, const T *pieces, int n, int64_t count, int accumulate) {
    if (!count) return;
    int vectors = n < 16 && in_vectors(n > 1 ? count : 0, FLAT, out, pieces);
    if (vectors)
        KERNEL(on, (tree_sum_kernel<Out, T>), grid_of(blocks_of(count, BLOCK * FLAT)), BLOCK, 0, out, pieces, n, count,
               accumulate);
    else
        KERNEL(on, (tree_sum_many_kernel<Out, T>), grid_of(blocks_of(count, BLOCK)), BLOCK, 0, out, pieces, n, count,
               accumulate);
}
static void cuda_tree_sum(OpStream *on, float *out, const void *pieces, Dtype dtype, int n, int64_t count,
                          int accumulate) {
    if (dtype == DTYPE_F32) cuda_tree_sum_of(on, out, (const float *)pieces, n, count, accumulate);
    else cuda_tree_sum_of(on, out, (const bf16 *)pieces, n, count, accumulate);
}
static void cuda_sum_pieces(OpStream *on, floatX *out, const floatX *pieces, int n, int64_t count) {
    cuda_tree_sum_of(on, out, pieces, n, count, 0);
}

// ---------------------------------------------------------------------------
// exact sums (ExactSum in lib/device/exact_sum.h) and the gradient norm

/* A thread's part of an exact sum. Its digits are in registers, since every loop over them is unrolled. Digits are
 * integers, so warps add theirs to the total with atomics: any order gives the same sum. The host propagates carries
 * when it reads the total. */
typedef struct {
    uint64_t digit[EXACT_DIGITS], not_finite;
} ExactPart;
DEVICE void exact_add_to(ExactPart *s, float x) {
    uint64_t low, high;
    int i = exact_digits(x, &low, &high);
    s->not_finite += i < 0;
    UNROLL for (int d = 0; d < EXACT_DIGITS; d++) {
        uint64_t word = 0;
        if (d == i) word = low;
        else if (d == i + 1) word = high;
        s->digit[d] += word;
    }
}
DEVICE void exact_add_all(ExactSum *total, ExactPart *s) {
    UNROLL for (int d = 0; d <= EXACT_DIGITS; d++) {
        uint64_t sum = warp_sum(d < EXACT_DIGITS ? s->digit[d] : s->not_finite);
        if (sum && threadIdx.x % WARP == 0)
            atomicAdd((unsigned long long *)(d < EXACT_DIGITS ? &total->digit[d] : &total->not_finite),
                      (unsigned long long)sum);
    }
}

static __global__ void __launch_bounds__(BLOCK) exact_total_kernel(ExactSum *total, const float *x, int64_t count) {
    ExactPart s = {};
    for (int64_t i = thread_of_grid(); i < count; i += (int64_t)gridDim.x * BLOCK)
        exact_add_to(&s, x[i]);
    exact_add_all(total, &s);
}
static void cuda_exact_total(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    if (count) KERNEL(on, exact_total_kernel, filling_grid(on, blocks_of(count, BLOCK)), BLOCK, 0, total, x, count);
}

/* A warp takes WARP blocks of NORM_BLOCK elements at a time. Each lane has 4 elements of every block; when a block's
 * sum of squares is complete, lane k keeps the sum of block k and adds it to its exact sum. The loads of NORM_AHEAD
 * blocks are issued before the first of them is summed. */
static constexpr int NORM_AHEAD = 4;
DEVICE float squares_of_block(const float (&v)[4]) {
    return warp_sum(fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], __fmul_rn(v[0], v[0])))));
}
template <int W, class T>
DEVICE void squared_norm_of(ExactSum *total, const T *x, int64_t count) {
    static_assert(NORM_BLOCK == 4 * WARP, "a lane has 4 elements");
    int lane = (int)threadIdx.x % WARP;
    int64_t begin = thread_of_grid() / WARP * WARP * NORM_BLOCK, step = (int64_t)gridDim.x * BLOCK * NORM_BLOCK;
    const T *mine = x + begin + lane * 4;
    ExactPart s = {};
    for (int64_t left = count - begin; left > 0; left -= step, mine += step) {
        int k = 0, whole = W == 4 ? (int)min_i64(WARP, left / NORM_BLOCK) : 0;
        float v[NORM_AHEAD][4], kept = 0;
        ROLLED for (; k + NORM_AHEAD <= whole; k += NORM_AHEAD) {
            const T *from = mine + k * NORM_BLOCK;
            UNROLL for (int i = 0; i < NORM_AHEAD; i++) load<true>(v[i], from + i * NORM_BLOCK);
            issue_loads();
            UNROLL for (int i = 0; i < NORM_AHEAD; i++) {
                float squares = squares_of_block(v[i]);
                kept = k + i == lane ? squares : kept;
            }
        }
        ROLLED for (; k < WARP && k * NORM_BLOCK < left; k++) { // the tensor's end, or unaligned
            int64_t mine_left = left - k * NORM_BLOCK - lane * 4;
            UNROLL for (int j = 0; j < 4; j++) v[0][j] = j < mine_left ? widen(mine[k * NORM_BLOCK + j]) : 0;
            float squares = squares_of_block(v[0]);
            kept = k == lane ? squares : kept;
        }
        exact_add_to(&s, kept);
    }
    exact_add_all(total, &s);
}
template <int W>
__global__ void __launch_bounds__(BLOCK, 4) squared_norm_kernel(ExactSum *total, const float *x, int64_t count) {
    squared_norm_of<W>(total, x, count);
}
static void cuda_squared_norm(OpStream *on, ExactSum *total, const float *x, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, FLAT, x), FLAT, squared_norm_kernel,
                        filling_grid(on, blocks_of(count, (int)BLOCK * NORM_BLOCK)), BLOCK, 0, total, x, count);
}

// ---------------------------------------------------------------------------
// AdamW

typedef struct {
    float keep;       // 1 - lr * weight_decay
    float rate;       // lr / (1 - beta1^step)
    float root;       // 1 / sqrt(1 - beta2^step)
    float new1, new2; // 1 - beta1, 1 - beta2
    float beta2, eps, grad_scale;
} AdamScalars;

/* A thread has W elements. Every product that meets an addition is explicitly fused (fmaf) or rounded (__fmul_rn), so
 * the result is the same for every W. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    adamw_kernel(float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, AdamScalars a) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float pi[W], mi[W], vi[W], gi[W];
    if (left <= 0) return;
    load_some<true>(gi, g + i, left);
    load_some<true>(mi, m + i, left);
    load_some<true>(vi, v + i, left);
    load_some<true>(pi, p + i, left);
    UNROLL for (int j = 0; j < W; j++) {
        float grad = __fmul_rn(gi[j], a.grad_scale);
        mi[j] = fmaf(grad - mi[j], a.new1, mi[j]);
        vi[j] = fmaf(grad * a.new2, grad, __fmul_rn(vi[j], a.beta2));
        pi[j] = fmaf(mi[j] / fmaf(sqrtf(vi[j]), a.root, a.eps), -a.rate, __fmul_rn(pi[j], a.keep));
    }
    store_some<true>(m + i, mi, left);
    store_some<true>(v + i, vi, left);
    store_some<true>(p + i, pi, left);
    if (copy) store_some(copy + i, pi, left);
}
static void cuda_adamw(OpStream *on, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count,
                       float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    AdamScalars a = {(float)(1.0 - (double)lr * weight_decay),
                     (float)(lr / (1.0 - pow(beta1, step))),
                     (float)(1.0 / sqrt(1.0 - pow(beta2, step))),
                     (float)(1.0 - beta1),
                     (float)(1.0 - beta2),
                     beta2,
                     eps,
                     grad_scale};
    int vectors = in_vectors(0, FLAT, p, m, v, g) && (uintptr_t)copy % (FLAT * sizeof(floatX)) == 0;
    if (count)
        KERNEL_BY_WIDTH(on, vectors, FLAT, adamw_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, p, m, v, g,
                        copy, count, a);
}

// ---------------------------------------------------------------------------
// element by element: a thread has W elements

template <int W>
__global__ void __launch_bounds__(BLOCK) cast_to_bf16_kernel(bf16 *out, const float *in, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some<true>(v, in + i, left);
    store_some(out + i, v, left);
}
static void cuda_cast_to_bf16(OpStream *on, bf16 *out, const float *in, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, 8, out, in), 8, cast_to_bf16_kernel, grid_of(blocks_of(count, BLOCK * W)),
                        BLOCK, 0, out, in, count);
}

template <int W> __global__ void __launch_bounds__(BLOCK) scale_kernel(floatX *x, float by, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    float v[W];
    if (left <= 0) return;
    load_some(v, x + i, left);
    UNROLL for (int k = 0; k < W; k++) v[k] *= by;
    store_some(x + i, v, left);
}
static void cuda_scale(OpStream *on, floatX *x, float by, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, x), WIDE, scale_kernel, grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0,
                        x, by, count);
}

/* The int8 elements are loaded as words of four. A thread's W elements are in one block, since W divides INT8_BLOCK. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    dequantize_kernel(floatX *out, const int8_t *in, const float *scales, int64_t count) {
    int64_t i = thread_of_grid() * W, left = count - i;
    if (left <= 0) return;
    float by = scales[i / INT8_BLOCK], v[W];
    UNROLL for (int k = 0; k < W; k++) {
        if (W % 4 == 0 && left >= W)
            v[k] = (float)(int8_t)(((const uint32_t *)(const void *)(in + i))[k / 4] >> k % 4 * 8) * by;
        else v[k] = k < left ? (float)in[i + k] * by : 0;
    }
    store_some(out + i, v, left);
}
static void cuda_dequantize(OpStream *on, floatX *out, const int8_t *in, const float *scales, int64_t count) {
    if (count)
        KERNEL_BY_WIDTH(on, in_vectors(0, WIDE, out, in), WIDE, dequantize_kernel,
                        grid_of(blocks_of(count, BLOCK * W)), BLOCK, 0, out, in, scales, count);
}

static __global__ void __launch_bounds__(BLOCK)
    adapter_merge_kernel(float *w, const float *a, const float *b, float by, int R, int64_t IC, int64_t count) {
    int64_t at = thread_of_grid();
    float sum = 0;
    if (at >= count) return;
    for (int r = 0; r < R; r++) sum = fmaf(a[r * IC + at % IC], b[at / IC * R + r], sum);
    w[at] = fmaf(sum, by, w[at]);
}
static void cuda_adapter_merge(OpStream *on, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                               int64_t OC) {
    if (IC > 0 && OC > 0)
        KERNEL(on, adapter_merge_kernel, grid_of(blocks_of(IC * OC, BLOCK)), BLOCK, 0, w, a, b, by, R, IC, IC * OC);
}

/* The sum over all words, each hashed together with its index: any order gives the same hash. */
static __global__ void __launch_bounds__(BLOCK)
    fingerprint_kernel(unsigned long long *total, const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = thread_of_grid(); i < count; i += (int64_t)gridDim.x * BLOCK)
        sum += mix64(words[i] + (uint64_t)i * 0x9E3779B97F4A7C15ull);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) atomicAdd(total, (unsigned long long)sum);
}
static void cuda_fingerprint(OpStream *on, uint64_t *total, const void *data, int64_t bytes) {
    cuda_check(cudaMemsetAsync(total, 0, sizeof *total, on->stream), "clearing a hash");
    if (bytes)
        KERNEL(on, fingerprint_kernel, filling_grid(on, blocks_of(bytes / 8, BLOCK)), BLOCK, 0,
               (unsigned long long *)total, (const uint64_t *)data, bytes / 8);
}

#endif
