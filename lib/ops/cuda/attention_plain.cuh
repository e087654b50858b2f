/* attention_plain.cuh: attention in fp32 arithmetic, for heads of 1 to 256 elements and both precisions.
 *
 * The fp32 build's attention, and the bf16 build's for heads that tensor cores do not serve (attention_mma.cuh).
 * dk and dv are computed by blocks that own keys, dq by blocks that own queries: no atomics, the same bits on each run.
 */
#ifndef CUDA_ATTENTION_PLAIN_CUH
#define CUDA_ATTENTION_PLAIN_CUH
#include "attention_common.cuh"  // defines: AttentionCall, attention_place, sees
#include "attention_prepare.cuh" // defines: attention_backward_prepare

// ---------------------------------------------------------------------------
// tiles
//
// A tile is TILE rows of DIM floats in shared memory. DIM is 64, 128 or 256, at least HD, with zeros from HD on. Rows
// are DIM + 4 floats apart, so that they begin in different banks. Of a matrix of scores thread 16 y + x has rows y +
// 16 i and columns x + 16 j; of a sum of rows it has rows y + 16 i and elements 4 x + 64 j … 4 x + 64 j + 3.

enum { PLAIN_THREADS = 256 };

/* TILE of forward and backward. Their shared memory fits the 99 KB that every supported GPU has. */
template <int DIM> struct PlainSizes {
    static constexpr int LD = DIM + 4, FORWARD = DIM == 256 ? 32 : 64, BACKWARD = 4096 / DIM;
    static constexpr int FORWARD_BYTES = (2 * FORWARD * LD + FORWARD * (FORWARD + 4)) * 4;
    static constexpr int BACKWARD_BYTES = (4 * BACKWARD * LD + BACKWARD * (BACKWARD + 4)) * 4;
};

/* Four elements, of which n exist; the others are 0, and are not stored. */
DEVICE float4 plain_get(const floatX *x, int n) {
    float4 y = {0, 0, 0, 0};
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) return *(const float4 *)(const void *)x;
#endif
    if (n > 0) y.x = to_float(x[0]);
    if (n > 1) y.y = to_float(x[1]);
    if (n > 2) y.z = to_float(x[2]);
    if (n > 3) y.w = to_float(x[3]);
    return y;
}
DEVICE void plain_put(floatX *x, int n, float4 y, float scale) {
    y.x *= scale;
    y.y *= scale;
    y.z *= scale;
    y.w *= scale;
#ifndef PRECISION_BF16
    if (n >= 4 && (uintptr_t)x % 16 == 0) {
        *(float4 *)(void *)x = y;
        return;
    }
#endif
    if (n > 0) x[0] = from_float(y.x);
    if (n > 1) x[1] = from_float(y.y);
    if (n > 2) x[2] = from_float(y.z);
    if (n > 3) x[3] = from_float(y.w);
}

/* Loads a tile: TILE rows of HD elements, `stride` apart, of which `count` exist. */
template <int DIM, int TILE>
DEVICE void plain_load(float *tile, const floatX *from, int64_t stride, int count, int HD) {
    for (int i = (int)threadIdx.x; i < TILE * DIM / 4; i += PLAIN_THREADS) {
        int row = i / (DIM / 4), d = i % (DIM / 4) * 4;
        *(float4 *)(void *)(tile + row * (DIM + 4) + d) = plain_get(from + row * stride + d, row < count ? HD - d : 0);
    }
}

/* Stores sums of rows to `count` rows of HD elements, row y + 16 i multiplied by scale[i]. */
template <int DIM, int R>
DEVICE void plain_store(floatX *to, int64_t stride, const float4 (&c)[R][DIM / 64], const float (&scale)[R], int count,
                        int HD) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < DIM / 64; j++)
            if (y + 16 * i < count)
                plain_put(to + (y + 16 * i) * stride + 4 * x + 64 * j, HD - 4 * x - 64 * j, c[i][j], scale[i]);
}

/* c = a b^T of two tiles: scores. */
template <int DIM, int R> DEVICE void plain_scores(float (&c)[R][R], const float *a, const float *b) {
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < R; j++) c[i][j] = 0;
    for (int d = 0; d < DIM; d += 4) {
        float u[R][4], v[R][4];
        UNROLL for (int i = 0; i < R; i++) {
            load(u[i], a + (y + 16 * i) * (DIM + 4) + d);
            load(v[i], b + (x + 16 * i) * (DIM + 4) + d);
        }
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int j = 0; j < R; j++)
                UNROLL for (int e = 0; e < 4; e++) c[i][j] = fmaf(u[i][e], v[j][e], c[i][j]);
    }
}

/* sums += c b: a weighted sum of the rows of tile b. Each thread has a part of the weights c; all threads need all of
 * them, so they are first stored to w in shared memory. */
template <int DIM, int R>
DEVICE void plain_weighted(float4 (&sums)[R][DIM / 64], const float (&c)[R][R], float *w, const float *b) {
    enum { TILE = 16 * R, LD = TILE + 4 };
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < R; j++) w[(y + 16 * i) * LD + x + 16 * j] = c[i][j];
    __syncthreads();
    for (int k = 0; k < TILE; k += 4) {
        float u[R][4];
        UNROLL for (int i = 0; i < R; i++) load(u[i], w + (y + 16 * i) * LD + k);
        UNROLL for (int e = 0; e < 4; e++)
            UNROLL for (int j = 0; j < DIM / 64; j++) {
                float v[4];
                load(v, b + (k + e) * (DIM + 4) + 4 * x + 64 * j);
                UNROLL for (int i = 0; i < R; i++) {
                    sums[i][j].x = fmaf(u[i][e], v[0], sums[i][j].x);
                    sums[i][j].y = fmaf(u[i][e], v[1], sums[i][j].y);
                    sums[i][j].z = fmaf(u[i][e], v[2], sums[i][j].z);
                    sums[i][j].w = fmaf(u[i][e], v[3], sums[i][j].w);
                }
            }
    }
    __syncthreads(); // w and b may now be overwritten
}

template <int DIM, int R> DEVICE void plain_zero(float4 (&sums)[R][DIM / 64]) {
    const float4 zero = {0, 0, 0, 0};
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int j = 0; j < DIM / 64; j++) sums[i][j] = zero;
}

// ---------------------------------------------------------------------------
// forward: a block has a tile of queries and goes over the keys

/* One step of the online softmax (Milakov & Gimelshein 2018) of a thread's R rows, in powers of two: scores c become
 * exp2(c scale - base), where base is the row's largest scaled score so far; o and sum are rescaled to it. Scores that
 * the mask excludes become -infinity first; t and key are the thread's first query and key. */
template <int DIM, int R>
DEVICE void plain_softmax_step(float (&c)[R][R], float4 (&o)[R][DIM / 64], float (&base)[R], float (&sum)[R],
                               const AttentionShape &seq, int t, int key, float scale) {
    UNROLL for (int i = 0; i < R; i++) {
        float top = -INFINITY;
        UNROLL for (int j = 0; j < R; j++) {
            c[i][j] = sees(seq, t + 16 * i, key + 16 * j) ? c[i][j] * scale : -INFINITY;
            top = fmaxf(top, c[i][j]);
        }
        for (int d = 8; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); // 16 threads have the row
        top = fmaxf(top, base[i]);
        float from = top == -INFINITY ? 0.0f : top, rescale = ptx_exp2(base[i] - from); // no key seen: exp2(-inf) = 0
        float total = 0;
        base[i] = top;
        UNROLL for (int j = 0; j < R; j++) {
            c[i][j] = ptx_exp2(c[i][j] - from);
            total += c[i][j];
        }
        sum[i] = fmaf(sum[i], rescale, total);
        UNROLL for (int j = 0; j < DIM / 64; j++) {
            o[i][j].x *= rescale;
            o[i][j].y *= rescale;
            o[i][j].z *= rescale;
            o[i][j].w *= rescale;
        }
    }
}

template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_forward_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::FORWARD, R = TILE / 16 };
    DYN_SHARED(float, qs);
    float *kvs = qs + TILE * Z::LD; // K, then V
    float *ws = kvs + TILE * Z::LD; // P
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, (int)blockIdx.x, tiles, s.NH / s.NKV);
    const AttentionShape seq = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.order) * TILE, end = seen_by(seq, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0;
    const floatX *k = a.k + (int64_t)p.b * s.Tk * s.k_stride + p.kv * s.HD;
    const floatX *v = a.v + (int64_t)p.b * s.Tk * s.v_stride + p.kv * s.HD;
    float4 o[R][DIM / 64];
    float base[R], sum[R];
    plain_zero<DIM>(o);
    UNROLL for (int i = 0; i < R; i++) {
        base[i] = -INFINITY;
        sum[i] = 0;
    }
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        float c[R][R];
        plain_load<DIM, TILE>(kvs, k + j0 * s.k_stride, s.k_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, kvs);
        __syncthreads();
        plain_load<DIM, TILE>(kvs, v + j0 * s.v_stride, s.v_stride, s.Tk - j0, s.HD);
        plain_softmax_step<DIM>(c, o, base, sum, seq, t0 + y, j0 + x, a.scale2);
        plain_weighted<DIM>(o, c, ws, kvs);
    }
    float inverse[R];
    UNROLL for (int i = 0; i < R; i++) {
        for (int d = 8; d; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
        inverse[i] = sum[i] > 0 ? 1.0f / sum[i] : sum[i]; // no key seen: 0; NaN stays NaN
        int t = t0 + y + 16 * i;
        if (x == 0 && t < s.Tq)
            a.lse[((int64_t)p.b * s.NH + p.h) * s.Tq + t] = sum[i] == 0 ? -INFINITY : (base[i] + log2f(sum[i])) * LN_2;
    }
    plain_store<DIM>(a.out + token * s.o_stride + p.h * s.HD, s.o_stride, o, inverse, s.Tq - t0, s.HD);
}

// ---------------------------------------------------------------------------
// backward (the formulas are attention_backward's in lib/ops/ops.h)

/* dk and dv: a block has a tile of keys and goes over the queries that see them, of all query heads that share them. */
template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_keys_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const AttentionPlace p = attention_place(a, (int)blockIdx.x, (s.Tk + TILE - 1) / TILE, 1);
    const AttentionShape seq = sequence_of(s, p.b);
    const int j0 = p.order * TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16, G = s.NH / s.NKV;
    const int64_t key = (int64_t)p.b * s.Tk + j0;
    float4 dk[R][DIM / 64], dv[R][DIM / 64];
    plain_zero<DIM>(dk);
    plain_zero<DIM>(dv);
    plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
    plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
    for (int g = 0; g < G; g++)
        for (int t0 = first_query(&s, j0) / TILE * TILE; t0 < s.Tq; t0 += TILE) {
            const int h = p.kv * G + g;
            const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + h) * a.padded + t0;
            float c[R][R], dp[R][R]; // keys by queries
            plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + h * s.HD, s.q_stride, s.Tq - t0, s.HD);
            plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + h * s.HD, s.o_stride, s.Tq - t0, s.HD);
            __syncthreads();
            plain_scores<DIM>(c, ks, qs);
            plain_scores<DIM>(dp, vs, dos);
            UNROLL for (int i = 0; i < R; i++)
                UNROLL for (int j = 0; j < R; j++) {
                    int t = x + 16 * j;
                    bool seen = sees(seq, t0 + t, j0 + y + 16 * i);
                    c[i][j] = seen ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) : 0;
                    dp[i][j] = c[i][j] * (dp[i][j] - a.D[row + t]);
                }
            plain_weighted<DIM>(dv, c, ws, dos);
            plain_weighted<DIM>(dk, dp, ws, qs);
        }
    float one[R], scale[R];
    UNROLL for (int i = 0; i < R; i++) {
        one[i] = 1;
        scale[i] = a.scale;
    }
    plain_store<DIM>(a.dk + key * s.k_stride + p.kv * s.HD, s.k_stride, dk, scale, s.Tk - j0, s.HD);
    plain_store<DIM>(a.dv + key * s.v_stride + p.kv * s.HD, s.v_stride, dv, one, s.Tk - j0, s.HD);
}

/* dq: a block has a tile of queries and goes over the keys that they see. */
template <int DIM>
static __global__ void __launch_bounds__(PLAIN_THREADS, 2) attention_backward_queries_plain(const AttentionCall a) {
    typedef PlainSizes<DIM> Z;
    enum { TILE = Z::BACKWARD, R = TILE / 16 };
    DYN_SHARED(float, ks);
    float *vs = ks + TILE * Z::LD, *qs = vs + TILE * Z::LD, *dos = qs + TILE * Z::LD, *ws = dos + TILE * Z::LD;
    const AttentionShape &s = a.s;
    const int tiles = (s.Tq + TILE - 1) / TILE, x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
    const AttentionPlace p = attention_place(a, (int)blockIdx.x, tiles, s.NH / s.NKV);
    const AttentionShape seq = sequence_of(s, p.b);
    const int t0 = (tiles - 1 - p.order) * TILE, end = seen_by(seq, min(t0 + TILE, s.Tq) - 1);
    const int64_t token = (int64_t)p.b * s.Tq + t0, row = ((int64_t)p.b * s.NH + p.h) * a.padded + t0;
    float4 dq[R][DIM / 64];
    plain_zero<DIM>(dq);
    plain_load<DIM, TILE>(qs, a.q + token * s.q_stride + p.h * s.HD, s.q_stride, s.Tq - t0, s.HD);
    plain_load<DIM, TILE>(dos, a.dout + token * s.o_stride + p.h * s.HD, s.o_stride, s.Tq - t0, s.HD);
    for (int j0 = 0; j0 < end; j0 += TILE) {
        const int64_t key = (int64_t)p.b * s.Tk + j0;
        float c[R][R], dp[R][R]; // queries by keys
        plain_load<DIM, TILE>(ks, a.k + key * s.k_stride + p.kv * s.HD, s.k_stride, s.Tk - j0, s.HD);
        plain_load<DIM, TILE>(vs, a.v + key * s.v_stride + p.kv * s.HD, s.v_stride, s.Tk - j0, s.HD);
        __syncthreads();
        plain_scores<DIM>(c, qs, ks);
        plain_scores<DIM>(dp, dos, vs);
        UNROLL for (int i = 0; i < R; i++)
            UNROLL for (int j = 0; j < R; j++) {
                int t = y + 16 * i;
                c[i][j] = sees(seq, t0 + t, j0 + x + 16 * j)
                              ? ptx_exp2(fmaf(c[i][j], a.scale2, -a.lse2[row + t])) * (dp[i][j] - a.D[row + t])
                              : 0;
            }
        plain_weighted<DIM>(dq, c, ws, ks);
    }
    float scale[R];
    UNROLL for (int i = 0; i < R; i++) scale[i] = a.scale;
    plain_store<DIM>(a.dq + token * s.q_stride + p.h * s.HD, s.q_stride, dq, scale, s.Tq - t0, s.HD);
}

// ---------------------------------------------------------------------------
// launches

template <int DIM> static void attention_plain_launch(OpStream *on, const AttentionCall *a) {
    typedef PlainSizes<DIM> Z;
    const AttentionShape *s = &a->s;
    if (a->out) {
        ATTENTION_KERNEL(attention_forward_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::FORWARD), PLAIN_THREADS,
                         Z::FORWARD_BYTES, *a);
        return;
    }
    ATTENTION_KERNEL(attention_backward_prepare<32>, attention_rows(s) / ATTENTION_PAD, 256, 0, *a);
    ATTENTION_KERNEL(attention_backward_keys_plain<DIM>, attention_blocks(s, s->NKV, s->Tk, Z::BACKWARD), PLAIN_THREADS,
                     Z::BACKWARD_BYTES, *a);
    ATTENTION_KERNEL(attention_backward_queries_plain<DIM>, attention_blocks(s, s->NH, s->Tq, Z::BACKWARD),
                     PLAIN_THREADS, Z::BACKWARD_BYTES, *a);
}

/* Forward if the call has an output, otherwise backward. */
static void attention_plain(OpStream *on, const AttentionCall *a) {
    if (a->s.HD <= 64) attention_plain_launch<64>(on, a);
    else if (a->s.HD <= 128) attention_plain_launch<128>(on, a);
    else attention_plain_launch<256>(on, a);
}

#endif
