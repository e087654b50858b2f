/* attention.cu: the steps of attention on a GPU in fp32 arithmetic; those on tensor cores are in attention_mma.cu.
 *
 * Naive: three kernels, with the scores of all queries and keys in memory between them: 8 GB for 32 heads and 8,192
 * tokens. Tiled: a block keeps its queries and loads one tile of keys and values after the other into shared memory,
 * with an online softmax from tile to tile; nothing of size T^2 exists. What is left is the speed of two small matmuls:
 * FMAs here. On tensor cores each warp multiplies by itself (attention_mma.cu); GPUs of compute capability 9.0 also
 * have matmuls of four warps that read shared memory and run asynchronously (attention_hopper_forward.cu,
 * attention_hopper_backward.cu).
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp attention.cu -o attention -lcublasLt
 * with attention.h attention_backward.h attention_forward.h attention_shape.h page.cuh page.h page_rate.cuh
 * lib/device/kernel.h lib/ops/cuda/attention_common.cuh lib/ops/cuda/attention_plain.cuh
 * lib/ops/cuda/attention_prepare.cuh lib/ops/cuda/vectors.cuh lib/ops/ops_common.h */
#include "../../lib/ops/cuda/attention_plain.cuh"
#include "page_rate.cuh" // defines: page_rate_open

#ifndef CUDA_ATTENTION_CUH // pages.cu has the whole op, which chooses kernels; this page has one choice
static void cuda_attention_forward(OpStream *on, floatX *out, float *lse, const floatX *q, const floatX *k,
                                   const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_forward_call(s, out, lse, q, k, v, workspace);
    attention_plain(on, &a);
}
static void cuda_attention_backward(OpStream *on, floatX *dq, floatX *dk, floatX *dv, const floatX *dout,
                                    const floatX *out, const float *lse, const floatX *q, const floatX *k,
                                    const floatX *v, const AttentionShape *s, void *workspace) {
    AttentionCall a = attention_backward_call(s, dq, dk, dv, dout, out, lse, q, k, v, workspace);
    a.dq_sums = NULL; // only tensor cores' kernels use them
    attention_plain(on, &a);
}
#endif
#include "attention.h"

// ---------------------------------------------------------------------------
// forward, naive: scores(B, NH, Tq, Tk)

static __global__ void __launch_bounds__(256)
    scores_kernel(float *scores, const floatX *q, const floatX *k, AttentionShape s) {
    int64_t i = thread_number(), j = i % s.Tk, t = i / s.Tk % s.Tq, h = i / s.Tk / s.Tq % s.NH,
            b = i / s.Tk / s.Tq / s.NH;
    if (b >= s.B) return;
    const floatX *query = q + q_at(&s, b, t, h), *key = k + k_at(&s, b, j, h);
    float sum = 0;
    for (int d = 0; d < s.HD && j < keys_seen(&s, t); d++) sum += to_float(query[d]) * to_float(key[d]);
    scores[i] = j < keys_seen(&s, t) ? sum / sqrtf((float)s.HD) : -INFINITY;
}
// A warp per row; a row that sees no key becomes zeros.
static __global__ void __launch_bounds__(256) softmax_kernel(float *scores, float *lse, int64_t rows, int64_t Tk) {
    int64_t row = thread_number() / WARP;
    if (row >= rows) return;
    float *p = scores + row * Tk, max = -INFINITY, sum = 0;
    for (int64_t j = threadIdx.x % WARP; j < Tk; j += WARP) max = fmaxf(max, p[j]);
    max = warp_max(max);
    float base = max == -INFINITY ? 0 : max;
    for (int64_t j = threadIdx.x % WARP; j < Tk; j += WARP) sum += expf(p[j] - base);
    sum = warp_sum(sum);
    for (int64_t j = threadIdx.x % WARP; j < Tk; j += WARP) p[j] = sum > 0 ? expf(p[j] - base) / sum : 0;
    if (threadIdx.x % WARP == 0) lse[row] = max + logf(sum);
}
static __global__ void __launch_bounds__(256)
    weighted_kernel(floatX *out, const float *p, const floatX *v, AttentionShape s) {
    int64_t i = thread_number(), d = i % s.HD, h = i / s.HD % s.NH, t = i / s.HD / s.NH % s.Tq,
            b = i / s.HD / s.NH / s.Tq;
    if (b >= s.B) return;
    float sum = 0;
    for (int64_t j = 0; j < keys_seen(&s, t); j++)
        sum += p[l_at(&s, b, t, h) * s.Tk + j] * to_float(v[k_at(&s, b, j, h) + d]);
    out[i] = from_float(sum);
}
static void forward_three_kernels(Case *c) {
    AttentionShape s = shape_of(c);
    int64_t rows = (int64_t)s.B * s.NH * s.Tq;
    float *scores = (float *)page_scratch(c, (size_t)(rows * s.Tk) * sizeof(float));
    KERNEL(c->on, scores_kernel, blocks_for(rows * s.Tk, 256), 256, 0, scores, X("q"), X("k"), s);
    KERNEL(c->on, softmax_kernel, blocks_for(rows, 256 / WARP), 256, 0, scores, F("lse"), rows, s.Tk);
    KERNEL(c->on, weighted_kernel, blocks_for(rows * s.HD, 256), 256, 0, X("out"), scores, X("v"), s);
}

// ---------------------------------------------------------------------------
// forward, tiles: 32 queries of one head, four threads each, which share its keys and its HD sums; 32 keys at a time

enum { TILE = 32, TEAM = 4, MOST = 128 / TEAM /* sums a thread has registers for: HD up to 128 */ };

/* Loads rows first ... first + TILE - 1 of `count` into tile (TILE, HD + 1), zeros beyond the last. The odd width
 * spreads a column over the banks. */
static __device__ void tile_rows(float *tile, const floatX *rows, int64_t stride, int64_t first, int64_t count,
                                 int HD) {
    for (int i = threadIdx.x; i < TILE * HD; i += TILE * TEAM)
        tile[i / HD * (HD + 1) + i % HD] =
            first + i / HD < count ? to_float(rows[(first + i / HD) * stride + i % HD]) : 0;
}
static __device__ __forceinline__ float team_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
static __device__ __forceinline__ float dot_of(const float *a, const float *b, int n) {
    float sum = 0;
    for (int d = 0; d < n; d++) sum += a[d] * b[d];
    return sum;
}

static __global__ void __launch_bounds__(TILE *TEAM)
    tiles_kernel(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v, AttentionShape s) {
    DYN_SHARED(float, qs); // three tiles, then the probabilities
    float *ks = qs + TILE * (s.HD + 1), *vs = ks + TILE * (s.HD + 1), *ps = vs + TILE * (s.HD + 1);
    // the last queries see the most keys: their blocks start first
    int64_t tiles = blocks_of(s.Tq, TILE), first = (tiles - 1 - blockIdx.x % tiles) * TILE,
            h = blockIdx.x / tiles % s.NH, b = blockIdx.x / tiles / s.NH;
    int row = threadIdx.x / TEAM, part = threadIdx.x % TEAM, width = s.HD + 1;
    int64_t t = first + row, seen = t < s.Tq ? keys_seen(&s, t) : 0,
            end = keys_seen(&s, min_i64(s.Tq, first + TILE) - 1);
    float o[MOST] = {}, max = -INFINITY, sum = 0, scale = 1 / sqrtf((float)s.HD);
    tile_rows(qs, q + q_at(&s, b, 0, h), s.q_stride, first, s.Tq, s.HD);
    for (int64_t j0 = 0; j0 < end; j0 += TILE) {
        __syncthreads(); // nobody reads the previous tile any more
        tile_rows(ks, k + k_at(&s, b, 0, h), s.k_stride, j0, s.Tk, s.HD);
        tile_rows(vs, v + k_at(&s, b, 0, h), s.v_stride, j0, s.Tk, s.HD);
        __syncthreads();
        float score[TILE / TEAM], largest = max, total = 0;
#pragma unroll
        for (int i = 0; i < TILE / TEAM; i++) { // keys part, part + 4, …
            int j = part + TEAM * i;
            score[i] = j0 + j < seen ? dot_of(qs + row * width, ks + j * width, s.HD) * scale : -INFINITY;
            largest = fmaxf(largest, score[i]);
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        float base = largest == -INFINITY ? 0 : largest,
              rescale = expf(max - base); // no key seen yet: exp(-inf - 0) = 0
#pragma unroll
        for (int i = 0; i < TILE / TEAM; i++) {
            float p = expf(score[i] - base);
            ps[row * (TILE + 1) + part + TEAM * i] = p;
            total += p;
        }
        sum = sum * rescale + team_sum(total);
        max = largest;
        __syncwarp(); // a team's four threads are of one warp
#pragma unroll
        for (int i = 0; i < MOST; i++) { // elements part, part + 4, …
            int d = part + TEAM * i;
            if (d >= s.HD) break;
            o[i] *= rescale;
            for (int j = 0; j < TILE; j++) o[i] += ps[row * (TILE + 1) + j] * vs[j * width + d];
        }
    }
    if (t >= s.Tq) return;
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (part + TEAM * i < s.HD) out[q_at(&s, b, t, h) + part + TEAM * i] = from_float(sum > 0 ? o[i] / sum : 0);
    if (part == 0) lse[l_at(&s, b, t, h)] = max + logf(sum);
}
static size_t tiles_bytes(const AttentionShape *s, int tiles, int squares) {
    if (s->HD > MOST * TEAM) run_failure("this page's tiles have heads of at most %d elements", MOST * TEAM);
    return (size_t)TILE * (size_t)(tiles * (s->HD + 1) + squares * (TILE + 1)) * sizeof(float);
}
static void forward_tiles(Case *c) {
    AttentionShape s = shape_of(c);
    size_t bytes = tiles_bytes(&s, 3, 1);
    cuda_check(cudaFuncSetAttribute(tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
               "asking for shared memory");
    KERNEL(c->on, tiles_kernel, (unsigned)(blocks_of(s.Tq, TILE) * s.NH * s.B), TILE * TEAM, bytes, X("out"), F("lse"),
           X("q"), X("k"), X("v"), s);
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 three kernels",
     "Scores, softmax, weighted sum, a thread per element (softmax: a warp per row): T x T numbers are written "
     "twice and read four times.",
     forward_three_kernels},
    {"2 tiles, online softmax",
     "Tiles of 32 queries by 32 keys in shared memory; four threads keep a query's largest score, sum and output in "
     "registers. Scores are never stored, and tiles that the mask hides are skipped.",
     forward_tiles},
    {"in use", "The op of lib/ops/cuda: on tensor cores if the build is in bf16, else a kernel in fp32 arithmetic.",
     forward_in_use}};

// ---------------------------------------------------------------------------
// backward, naive: P and dS (B, NH, Tq, Tk) in memory, then one thread per element of dq, dk and dv

static __global__ void __launch_bounds__(256)
    p_and_ds_kernel(float *P, float *dS, const floatX *q, const floatX *k, const floatX *v, const floatX *out,
                    const floatX *dout, const float *lse, AttentionShape s) {
    int64_t i = thread_number(), j = i % s.Tk, t = i / s.Tk % s.Tq, h = i / s.Tk / s.Tq % s.NH,
            b = i / s.Tk / s.Tq / s.NH, at = q_at(&s, b, t, h), key = k_at(&s, b, j, h);
    float score = 0, dp = 0, D = 0, scale = 1 / sqrtf((float)s.HD);
    if (b >= s.B) return;
    int sees = j < keys_seen(&s, t);
    for (int d = 0; d < s.HD && sees; d++) {
        float g = to_float(dout[at + d]);
        score += to_float(q[at + d]) * to_float(k[key + d]);
        dp += g * to_float(v[key + d]);
        D += g * to_float(out[at + d]);
    }
    float p = sees ? expf(score * scale - lse[l_at(&s, b, t, h)]) : 0;
    P[i] = p;
    dS[i] = p * (dp - D) * scale;
}
static __global__ void __launch_bounds__(256)
    dq_kernel(floatX *dq, const float *dS, const floatX *k, AttentionShape s) {
    int64_t i = thread_number(), d = i % s.HD, h = i / s.HD % s.NH, t = i / s.HD / s.NH % s.Tq,
            b = i / s.HD / s.NH / s.Tq;
    if (b >= s.B) return;
    float sum = 0;
    for (int64_t j = 0; j < keys_seen(&s, t); j++)
        sum += dS[l_at(&s, b, t, h) * s.Tk + j] * to_float(k[k_at(&s, b, j, h) + d]);
    dq[i] = from_float(sum);
}
static __global__ void __launch_bounds__(256) dk_dv_kernel(floatX *dk, floatX *dv, const float *P, const float *dS,
                                                           const floatX *q, const floatX *dout, AttentionShape s) {
    int64_t i = thread_number(), d = i % s.HD, kv = i / s.HD % s.NKV, j = i / s.HD / s.NKV % s.Tk,
            b = i / s.HD / s.NKV / s.Tk, G = s.NH / s.NKV;
    if (b >= s.B) return;
    float to_k = 0, to_v = 0;
    for (int64_t h = kv * G; h < (kv + 1) * G; h++) {
        int64_t t = first_query(&s, (int)j), at = l_at(&s, b, t, h) * s.Tk + j, row = q_at(&s, b, t, h) + d;
        for (; t < s.Tq; t++, at += s.Tk, row += s.NH * s.HD) {
            to_k += dS[at] * to_float(q[row]);
            to_v += P[at] * to_float(dout[row]);
        }
    }
    dk[i] = from_float(to_k);
    dv[i] = from_float(to_v);
}
static void backward_naive(Case *c) {
    AttentionShape s = shape_of(c);
    int64_t scores = (int64_t)s.B * s.NH * s.Tq * s.Tk;
    float *P = (float *)page_scratch(c, (size_t)scores * sizeof(float)),
          *dS = (float *)page_scratch(c, (size_t)scores * sizeof(float));
    KERNEL(c->on, p_and_ds_kernel, blocks_for(scores, 256), 256, 0, P, dS, X("q"), X("k"), X("v"), X("out"), X("dout"),
           F("lse"), s);
    KERNEL(c->on, dq_kernel, blocks_for((int64_t)s.B * s.Tq * s.NH * s.HD, 256), 256, 0, X("dq"), dS, X("k"), s);
    KERNEL(c->on, dk_dv_kernel, blocks_for((int64_t)s.B * s.Tk * s.NKV * s.HD, 256), 256, 0, X("dk"), X("dv"), P, dS,
           X("q"), X("dout"), s);
}

// ---------------------------------------------------------------------------
// backward, tiles. A block owns 32 queries and goes through the keys for dq, or 32 keys and goes through the queries of
// the heads that share them, for dk and dv: only the owner of a row adds to it. Both compute P and dS.

/* Computes P and dS of 32 x 32 pairs, one team per query, into ps and ds (TILE, TILE + 1). seen: how many keys of the
 * tile, from its first on, the team's query sees. */
static __device__ void tile_p_and_ds(float *ps, float *ds, const float *qs, const float *dos, const float *ks,
                                     const float *vs, int64_t seen, float lse, float D, int HD) {
    int row = threadIdx.x / TEAM, part = threadIdx.x % TEAM, width = HD + 1;
    float scale = 1 / sqrtf((float)HD);
    for (int j = part; j < TILE; j += TEAM) {
        float p = j < seen ? expf(dot_of(qs + row * width, ks + j * width, HD) * scale - lse) : 0;
        ps[row * (TILE + 1) + j] = p;
        ds[row * (TILE + 1) + j] = j < seen ? p * (dot_of(dos + row * width, vs + j * width, HD) - D) * scale : 0;
    }
}
static __global__ void __launch_bounds__(TILE *TEAM)
    tiles_backward_kernel(floatX *dq, floatX *dk, floatX *dv, const floatX *q, const floatX *k, const floatX *v,
                          const floatX *out, const floatX *dout, const float *lse, int of_keys, AttentionShape s) {
    DYN_SHARED(float, qs);
    int width = s.HD + 1, row = threadIdx.x / TEAM, part = threadIdx.x % TEAM, heads = of_keys ? s.NH / s.NKV : 1;
    float *dos = qs + TILE * width, *ks = dos + TILE * width, *vs = ks + TILE * width, *ps = vs + TILE * width,
          *ds = ps + TILE * (TILE + 1), one[MOST] = {}, two[MOST] = {};
    int64_t own = of_keys ? s.Tk : s.Tq, tiles = blocks_of(own, TILE), first = blockIdx.x % tiles * TILE,
            h0 = blockIdx.x / tiles % (s.NH / heads) * heads, b = blockIdx.x / tiles / (s.NH / heads);
    for (int64_t h = h0; h < h0 + heads; h++)
        for (int64_t other = 0; other < (of_keys ? s.Tq : s.Tk); other += TILE) {
            int64_t t0 = of_keys ? other : first, j0 = of_keys ? first : other, t = t0 + row, at = q_at(&s, b, t, h);
            if (keys_seen(&s, min_i64(s.Tq, t0 + TILE) - 1) <= j0)
                continue; // no query of the tile sees a key of it; the same for all threads
            __syncthreads();
            tile_rows(qs, q + q_at(&s, b, 0, h), s.q_stride, t0, s.Tq, s.HD);
            tile_rows(dos, dout + q_at(&s, b, 0, h), s.o_stride, t0, s.Tq, s.HD);
            tile_rows(ks, k + k_at(&s, b, 0, h), s.k_stride, j0, s.Tk, s.HD);
            tile_rows(vs, v + k_at(&s, b, 0, h), s.v_stride, j0, s.Tk, s.HD);
            __syncthreads();
            float D = 0;
            for (int d = part; d < s.HD && t < s.Tq; d += TEAM) D += dos[row * width + d] * to_float(out[at + d]);
            tile_p_and_ds(ps, ds, qs, dos, ks, vs, t < s.Tq ? keys_seen(&s, t) - j0 : 0,
                          t < s.Tq ? lse[l_at(&s, b, t, h)] : 0, team_sum(D), s.HD);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < MOST; i++) { // elements part, part + 4, … of the team's row: of dq, or of dk and dv
                int d = part + TEAM * i;
                if (d >= s.HD) break;
                for (int x = 0; x < TILE; x++)
                    if (of_keys) {
                        one[i] += ds[x * (TILE + 1) + row] * qs[x * width + d];
                        two[i] += ps[x * (TILE + 1) + row] * dos[x * width + d];
                    } else one[i] += ds[row * (TILE + 1) + x] * ks[x * width + d];
            }
        }
    if (first + row >= own) return;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        int d = part + TEAM * i;
        if (d >= s.HD) break;
        if (of_keys) {
            dk[k_at(&s, b, first + row, h0) + d] = from_float(one[i]);
            dv[k_at(&s, b, first + row, h0) + d] = from_float(two[i]);
        } else dq[q_at(&s, b, first + row, h0) + d] = from_float(one[i]);
    }
}
static void backward_tiles(Case *c) {
    AttentionShape s = shape_of(c);
    size_t bytes = tiles_bytes(&s, 4, 2);
    cuda_check(cudaFuncSetAttribute(tiles_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
               "asking for shared memory");
    for (int of_keys = 0; of_keys < 2; of_keys++)
        KERNEL(c->on, tiles_backward_kernel,
               (unsigned)(of_keys ? blocks_of(s.Tk, TILE) * s.NKV * s.B : blocks_of(s.Tq, TILE) * s.NH * s.B),
               TILE * TEAM, bytes, X("dq"), X("dk"), X("dv"), X("q"), X("k"), X("v"), X("out"), X("dout"), F("lse"),
               of_keys, s);
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 three kernels",
     "P and dS of all pairs in memory, then a thread for each element of dq, dk and dv: of the two T x T tensors, P is "
     "read once and dS twice.",
     backward_naive},
    {"2 tiles, twice",
     "P and dS are recomputed, 32 x 32 at a time, in shared memory: once by blocks that own queries, for dq, and once "
     "by blocks that own keys, for dk and dv. Seven matmuls instead of five, but no atomics and the same bits on each "
     "run.",
     backward_tiles},
    {"in use", "The op of lib/ops/cuda: on tensor cores if the build is in bf16, else a kernel in fp32 arithmetic.",
     backward_in_use}};

PAGE_THAT_OPENS(page_rate_open, {&forward, forward_versions}, {&backward, backward_versions})
