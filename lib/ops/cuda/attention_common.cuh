/* attention_common.cuh: what all attention kernels on NVIDIA GPUs share: the arguments of a call, which block computes
 * which tile, the mask.
 *
 * A tile is a number of consecutive queries (or keys) of one head, the work of one block.
 */
#ifndef CUDA_ATTENTION_COMMON_CUH
#define CUDA_ATTENTION_COMMON_CUH
#include "../ops_common.h" // defines: AttentionShape, query_position, first_query
#include "vectors.cuh"     // defines: DEVICE, UNROLL, round_pair

#ifndef CUDA_ON_CPU // PTX instructions that C++ has no expression for; the emulator has functions of the same names
DEVICE uint32_t ptx_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEVICE float ptx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---------------------------------------------------------------------------
// a call

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f; // exp(x) = exp2(x LOG2_E): the hardware has exp2
enum {
    ATTENTION_PAD = 128,     // the scratch tensors' rows, of queries, are padded to a multiple of this
    ATTENTION_L2 = 16 << 20, // bytes of K and V that blocks work on at a time, so that they stay in the L2 cache
    ATTENTION_BLOCKS = 256   // that backward should have: with causal tiles, 132 multiprocessors are then 97 % busy
};

/* The arguments of the kernels. `padded` is Tq rounded up to ATTENTION_PAD. */
typedef struct {
    AttentionShape s;
    const floatX *q, *k, *v, *dout, *out_read;
    const float *lse_read;
    floatX *out, *dq, *dk, *dv;
    float *lse;
    float *D;         // (B, NH, padded) rowsum(dout * out)
    float *lse2;      // (B, NH, padded) lse LOG2_E; infinity for a query that sees no key or does not exist
    float *part_sums; // (parts, B, NKV, padded Tk, 2, HD) dk and dv of each part of the query heads, in fp32, each tile
                      // as its warps hold it; NULL: there is one part
    float *dq_sums;   // (B, NH, padded, HD) sums of dq in fp32, each tile in the order of dq_add; NULL: not used
    int padded;
    int parts;    // into which backward on tensor cores splits the query heads that share a kv head
    int section;  // (sequence, kv head) pairs that blocks work on at a time
    float scale;  // 1 / sqrt(HD)
    float scale2; // LOG2_E / sqrt(HD)
} AttentionCall;

/* The compiler may assume that all lanes of a warp have this value: what follows from it needs no register per lane. */
DEVICE int warp_of_block() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

/* Which tile has a number. Blocks compute tiles in the order of their numbers: `section` pairs of sequence and kv head
 * at a time, whose K and V fit the L2 cache; within them the tiles with the most work first, so that none of these is
 * last; and of each tile all `heads` heads that share K and V. */
typedef struct {
    int b, kv, h; // sequence, kv head, query head
    int order;    // number of the tile by its amount of work: 0 has the most
} AttentionPlace;

DEVICE AttentionPlace attention_place(const AttentionCall &a, int number, int tiles, int heads) {
    int held = a.section * tiles * heads, i = number % held, first = number / held * a.section;
    int n = min(a.section, a.s.B * a.s.NKV - first), pair = first + i / heads % n;
    AttentionPlace p;
    p.b = pair / a.s.NKV;
    p.kv = pair % a.s.NKV;
    p.h = p.kv * (a.s.NH / a.s.NKV) + i % heads;
    p.order = i / heads / n;
    return p;
}

// ---------------------------------------------------------------------------
// the mask

/* The shape with the documents of sequence b alone. */
DEVICE AttentionShape sequence_of(const AttentionShape &s, int b) {
    AttentionShape x = s;
    x.q_doc = s.q_doc ? s.q_doc + (int64_t)b * s.Tq : NULL;
    x.k_doc = s.q_doc ? s.k_doc + (int64_t)b * s.Tk : NULL;
    return x;
}

/* How many keys query t sees by position; 0 for a query that does not exist. */
DEVICE int seen_by(const AttentionShape &x, int t) {
    return t < x.Tq ? max(0, min(x.Tk, query_position(&x, t) + 1)) : 0;
}

/* Whether query t sees this key, by position and document. */
DEVICE bool sees(const AttentionShape &x, int t, int key) {
    return key < seen_by(x, t) && (!x.q_doc || x.q_doc[t] == x.k_doc[key]);
}

/* Skips tiles of other documents. The tile consists of tokens mine … mine_end - 1 with documents mine_doc. Goes over
 * the other side's documents `doc` from `from` towards `to` (exclusive), upwards or downwards, and returns the first
 * place, rounded to 32, where one may be among the tile's; `to` if there is none. All lanes of a warp call it. */
DEVICE int documents_meet(const int32_t *mine_doc, int mine, int mine_end, const int32_t *doc, int from, int to) {
    int lane = (int)(threadIdx.x % 32), low = INT32_MAX, high = INT32_MIN, step = from < to ? 1 : -1;
    if (!mine_doc) return from;
    ROLLED for (int i = mine + lane; i < mine_end; i += 32) {
        low = min(low, mine_doc[i]);
        high = max(high, mine_doc[i]);
    }
    ROLLED for (int d = 16; d; d /= 2) {
        low = min(low, __shfl_xor_sync(~0u, low, d));
        high = max(high, __shfl_xor_sync(~0u, high, d));
    }
    ROLLED for (int left = (to - from) * step; left > 0; left -= 32) {
        bool meets = lane < left && low <= doc[from + lane * step] && doc[from + lane * step] <= high;
        if (__any_sync(~0u, meets)) return from;
        from += 32 * step;
    }
    return to;
}

// ---------------------------------------------------------------------------
// the kernels for a size, the work space, launches

typedef enum { ATTENTION_NONE, ATTENTION_PLAIN, ATTENTION_TENSOR_CORES } AttentionSupport;

/* Which kernels compute heads of HD elements. */
static AttentionSupport cuda_attention_support(int HD) {
    if (HD < 1 || HD > 256) return ATTENTION_NONE;
    return FLOATX == DTYPE_BF16 && (HD == 64 || HD == 128) ? ATTENTION_TENSOR_CORES : ATTENTION_PLAIN;
}

/* Rows of D, lse2 and dq_sums. */
static int64_t attention_rows(const AttentionShape *s) {
    return (int64_t)s->B * s->NH * round_up(s->Tq, ATTENTION_PAD);
}

static int64_t attention_blocks(const AttentionShape *s, int heads, int T, int tile) {
    return (int64_t)s->B * heads * ((T + tile - 1) / tile);
}

/* A block of backward has a tile of keys, and goes over all query heads that share them. Where that makes too few
 * blocks, the heads are split into equal parts with a block each, whose dk and dv are then added in order. The number
 * of parts decides bits, so it depends on the shape alone, and not on the GPU. */
static int attention_parts(const AttentionShape *s) {
    int group = s->NH / s->NKV, parts = 1;
    int64_t blocks = s->B * s->NKV * blocks_of(s->Tk, ATTENTION_PAD);
    if (cuda_attention_support(s->HD) != ATTENTION_TENSOR_CORES) return 1;
    while (parts < group && (group % parts || blocks * parts < ATTENTION_BLOCKS)) parts++;
    return parts;
}

/* Elements of part_sums. */
static int64_t attention_part_sums(const AttentionShape *s, int parts) {
    return parts > 1 ? parts * s->B * s->NKV * round_up(s->Tk, ATTENTION_PAD) * 2 * s->HD : 0;
}

static size_t cuda_attention_scratch(const OpStream *on, const AttentionShape *s, int backward) {
    int sums = cuda_attention_support(s->HD) == ATTENTION_TENSOR_CORES && !on->deterministic;
    int64_t rows = attention_rows(s) * (2 + (sums ? s->HD : 0));
    return backward ? (size_t)(rows + attention_part_sums(s, attention_parts(s))) * sizeof(float) : 0;
}

static AttentionCall attention_call(const AttentionShape *s, const floatX *q, const floatX *k, const floatX *v,
                                    float *workspace) {
    int64_t groups = (int64_t)s->B * s->NKV, bytes = (int64_t)s->Tk * s->HD * 2 * (int64_t)sizeof *k; // of K and V
    AttentionCall a;
    memset(&a, 0, sizeof a);
    a.s = *s;
    a.q = q;
    a.k = k;
    a.v = v;
    a.D = workspace;
    a.lse2 = workspace + attention_rows(s);
    a.parts = attention_parts(s);
    a.part_sums = a.parts > 1 ? workspace + 2 * attention_rows(s) : NULL;
    a.dq_sums = workspace + 2 * attention_rows(s) + attention_part_sums(s, a.parts);
    a.padded = (int)round_up(s->Tq, ATTENTION_PAD);
    a.section = (int)max_i64(1, min_i64(groups, ATTENTION_L2 / bytes));
    a.scale = 1.0f / sqrtf((float)s->HD);
    a.scale2 = a.scale * LOG2_E;
    return a;
}

static AttentionCall attention_forward_call(const AttentionShape *s, floatX *out, float *lse, const floatX *q,
                                            const floatX *k, const floatX *v, void *workspace) {
    AttentionCall a = attention_call(s, q, k, v, (float *)workspace);
    a.out = out;
    a.lse = lse;
    return a;
}

static AttentionCall attention_backward_call(const AttentionShape *s, floatX *dq, floatX *dk, floatX *dv,
                                             const floatX *dout, const floatX *out, const float *lse, const floatX *q,
                                             const floatX *k, const floatX *v, void *workspace) {
    AttentionCall a = attention_call(s, q, k, v, (float *)workspace);
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    a.dout = dout;
    a.out_read = out;
    a.lse_read = lse;
    return a;
}

#define ATTENTION_KERNEL(kernel, blocks, threads, bytes, a)                                                            \
    do {                                                                                                               \
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)),            \
                   "shared memory for " #kernel);                                                                      \
        KERNEL(on, kernel, (unsigned)(blocks), (unsigned)(threads), (size_t)(bytes), a);                              \
    } while (0)

#endif
