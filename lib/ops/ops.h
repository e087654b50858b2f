/* ops.h: the ops that the model calls, one contract each; lib/ops/cpu and lib/ops/cuda implement them.
 *
 * Every op adds its FLOPs and bytes to the op ledger and then calls the implementation, unless the device is a dry run.
 * Tensors are row-major and in the device's memory. A caller may rely on: sums are fp32 whatever floatX is; results
 * have the same bits for any number of threads; an elementwise op has the same bits if a tensor is processed in pieces,
 * and so have squared_norm and dequantize if it is cut at multiples of their blocks. Exceptions: in bf16, attention
 * rounds P and dS to bf16 for its matmuls; on tensor cores dq is summed with atomics unless dev->on.deterministic;
 * cuBLASLt's bits change with the number of rows and the algorithm. In the contracts N = B·T tokens; "=" overwrites,
 * "+=" adds.
 */
#ifndef OPS_H
#define OPS_H
#include "../device/device.h" // defines: Device, floatX, op_begin, op_end, scratch, arena_release
#include "logits.h"     // defines: Logits, LossPart, ZLoss
#include "ops_common.h" // defines: Matmul, AttentionShape

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // a program need not call every op

#ifdef USE_CUDA
#include "cuda/adamw.cuh"         // defines: cuda_adamw
#include "cuda/attention.cuh"     // defines: cuda_attention_forward, cuda_attention_backward
#include "cuda/cross_entropy.cuh" // defines: cuda_cross_entropy and its two halves for vocabulary slices
#include "cuda/elementwise.cuh"   // defines: cuda_residual_add, cuda_cast_to_bf16, cuda_dequantize, cuda_scale, …
#include "cuda/embedding.cuh"     // defines: cuda_embedding_forward, cuda_embedding_backward
#include "cuda/matmul.cuh"        // defines: cuda_matmul
#include "cuda/muon.cuh"          // defines: cuda_muon_momentum, cuda_normalize_matrix, …
#include "cuda/rmsnorm.cuh"       // defines: cuda_rmsnorm_forward, cuda_rmsnorm_backward
#include "cuda/rope.cuh"          // defines: cuda_rope
#include "cuda/squared_norm.cuh"  // defines: cuda_squared_norm, cuda_exact_total
#include "cuda/start.cuh"         // defines: cuda_ops_open, cuda_ops_close, cuda_require_head_size
#include "cuda/swiglu.cuh"        // defines: cuda_swiglu_forward, cuda_swiglu_backward
#include "cuda/tree_sum.cuh"      // defines: cuda_tree_sum, cuda_sum_pieces
#else
#include "cpu/attention.h"     // defines: cpu_attention_forward, cpu_attention_backward
#include "cpu/cross_entropy.h" // defines: cpu_cross_entropy and its two halves for vocabulary slices
#include "cpu/flat_tensors.h"  // defines: cpu_tree_sum, cpu_squared_norm, cpu_adamw, cpu_muon_momentum, …
#include "cpu/layers.h"        // defines: cpu_embedding_*, cpu_residual_add, cpu_rope, cpu_swiglu_*
#include "cpu/matmul.h"        // defines: cpu_matmul, cpu_ops_open, cpu_ops_close
#include "cpu/rmsnorm.h"       // defines: cpu_rmsnorm_forward, cpu_rmsnorm_backward
#endif

static const double X_BYTES = sizeof(floatX), F_BYTES = sizeof(float); // of one element, for the op ledger

/* Adds an op's FLOPs and bytes to the ledger, and runs its implementation unless the device is a dry run. */
#define RUN_OP(dev, op, flops, bytes, implementation, ...)                                                             \
    do {                                                                                                               \
        if (!op_begin(dev, op, flops, bytes)) break;                                                                   \
        IMPLEMENTATION(implementation)(&(dev)->on, __VA_ARGS__);                                                       \
        op_end(dev);                                                                                                   \
    } while (0)

/* Workspace of one op; NULL if it needs none. The op releases it with arena_release. */
static void *op_workspace(Device *dev, const char *name, size_t bytes) {
    return bytes ? scratch(dev, name, bytes) : NULL;
}

// ---------------------------------------------------------------------------
// start and end

/* Ends the program with an error if the CUDA build finds no GPU or has no attention kernel for heads of HD elements.
 * On the CPU every HD works. */
static void ops_require_head_size(int HD) {
    device_count(); // ends the program with an error if the build needs a GPU and there is none
    IMPLEMENTATION(require_head_size)(HD);
}

/* Prepares the implementation: matmul libraries and their workspace. Called once per rank, on the rank's own thread.
 * say: this rank prints notes about slow configurations. */
static void ops_open(Device *dev, int say) {
    void *workspace = op_workspace(dev, "cuBLASLt", IMPLEMENTATION(ops_workspace)());
    if (dev->dry_run) return;
    device_prepare_threads(dev->on.threads);
    IMPLEMENTATION(ops_open)(&dev->on, workspace, say);
}

static void ops_close(Device *dev) {
    if (dev->dry_run) return;
    device_synchronize(dev); // matmuls may still use the workspace
    IMPLEMENTATION(ops_close)(&dev->on);
}

// ---------------------------------------------------------------------------
// linear layers (torch.nn.functional.linear, without bias)

/* Every linear layer is one matmul, with the weight's transposition in the strides. If K > depth, the sum over K is
 * computed in parts of `depth` elements, each added to the output. Only fp32 sums are cut, and only on a CPU: oneDNN is
 * slower on longer sums than DX_DEPTH, and beyond DW_TOKENS its bits depend on the number of threads (cpu/matmul.h). */
static void linear_matmul(Device *dev, OpKind op, Matmul p, int64_t depth, void *c, const floatX *a, const floatX *b) {
    double M = (double)p.M, N = (double)p.N, K = (double)p.K, c_bytes = p.c_float ? F_BYTES : X_BYTES;
    double bytes = (M * K + K * N) * X_BYTES + M * N * c_bytes * (p.accumulate ? 2 : 1);
    if (!op_begin(dev, op, 2 * M * N * K, bytes)) return;
    // a recomputed forward counts as forward: another number could mean another algorithm, and other bits than it had
    dev->on.left_to_nccl = dev->left_to_nccl[op != OP_LINEAR_FORWARD];
    for (int64_t k = 0, end = p.K; k < end; k += depth) {
        p.K = min_i64(depth, end - k);
        IMPLEMENTATION(matmul)(&dev->on, &p, c, a + k * p.a_col, b + k * p.b_row);
        p.accumulate = 1;
    }
    op_end(dev);
}

/* y (N, OC) = x (N, IC) w (OC, IC)^T */
static void linear_forward(Device *dev, floatX *y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    Matmul p = {.M = N, .N = OC, .K = IC, .a_row = IC, .a_col = 1, .b_row = 1, .b_col = IC, .c_row = OC,
                .c_float = FLOATX == DTYPE_F32, .accumulate = 0};
    linear_matmul(dev, OP_LINEAR_FORWARD, p, IC, y, x, w);
}

/* Elements from one row of floatX logits to the next. In bf16 the stride is a multiple of 8 elements, so that a GPU
 * can load 16 bytes at a time even if V is odd. */
static inline int64_t logits_stride(int64_t V) {
    return FLOATX == DTYPE_BF16 ? round_up(V, 16 / (int64_t)sizeof(bf16)) : V;
}
static inline Logits logits_x(floatX *data, int64_t V) {
    Logits logits = {data, logits_stride(V), FLOATX};
    return logits;
}
static inline Logits logits_fp32(float *data, int64_t V) {
    Logits logits = {data, V, DTYPE_F32};
    return logits;
}

/* The head's linear layer: y (N, OC) are logits, fp32 or floatX (Logits in logits.h). */
static void linear_forward_logits(Device *dev, Logits y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    Matmul p = {.M = N, .N = OC, .K = IC, .a_row = IC, .a_col = 1, .b_row = 1, .b_col = IC, .c_row = y.stride,
                .c_float = y.dtype == DTYPE_F32, .accumulate = 0};
    linear_matmul(dev, OP_LINEAR_FORWARD, p, IC, y.data, x, w);
}

/* dx (N, IC) = dy (N, OC) w (OC, IC). dy's rows are dy_stride elements apart. In bf16 the sum is not cut, since dx
 * would be rounded between parts. */
static void linear_backward_input(Device *dev, floatX *dx, const floatX *dy, int64_t dy_stride, const floatX *w, int N,
                                  int IC, int OC) {
    Matmul p = {.M = N, .N = IC, .K = OC, .a_row = dy_stride, .a_col = 1, .b_row = IC, .b_col = 1, .c_row = IC,
                .c_float = FLOATX == DTYPE_F32, .accumulate = 0};
    linear_matmul(dev, OP_LINEAR_BACKWARD_INPUT, p, FLOATX == DTYPE_F32 ? DX_DEPTH : OC, dx, dy, w);
}

/* dw (OC, IC) = dy (N, OC)^T x (N, IC), or += with `accumulate`. dy's rows are dy_stride elements apart; dw is fp32,
 * because it sums over all tokens and micro-batches. */
static void linear_backward_weight(Device *dev, float *dw, const floatX *dy, int64_t dy_stride, const floatX *x, int N,
                                   int IC, int OC, int accumulate) {
    Matmul p = {.M = OC, .N = IC, .K = N, .a_row = 1, .a_col = dy_stride, .b_row = IC, .b_col = 1, .c_row = IC,
                .c_float = 1, .accumulate = accumulate};
    linear_matmul(dev, OP_LINEAR_BACKWARD_WEIGHT, p, DW_TOKENS, dw, dy, x);
}

// ---------------------------------------------------------------------------
// LoRA (Hu et al. 2021, section 4.1) and int8 weights

/* y (N, OC) += x (N, IC) w (OC, IC)^T. y's rows are y_stride elements apart; the sum is rounded to floatX again. */
static void linear_forward_add(Device *dev, floatX *y, int64_t y_stride, const floatX *x, const floatX *w, int N,
                               int IC, int OC) {
    Matmul p = {.M = N, .N = OC, .K = IC, .a_row = IC, .a_col = 1, .b_row = 1, .b_col = IC, .c_row = y_stride,
                .c_float = FLOATX == DTYPE_F32, .accumulate = 1};
    linear_matmul(dev, OP_LINEAR_FORWARD, p, IC, y, x, w);
}

/* dx (N, IC) += dy (N, OC) w (OC, IC) */
static void linear_backward_input_add(Device *dev, floatX *dx, const floatX *dy, const floatX *w, int N, int IC,
                                      int OC) {
    Matmul p = {.M = N, .N = IC, .K = OC, .a_row = OC, .a_col = 1, .b_row = IC, .b_col = 1, .c_row = IC,
                .c_float = FLOATX == DTYPE_F32, .accumulate = 1};
    linear_matmul(dev, OP_LINEAR_BACKWARD_INPUT, p, OC, dx, dy, w);
}

/* x (count) *= by: the LoRA scaling factor alpha / r */
static void scale(Device *dev, floatX *x, float by, int64_t count) {
    RUN_OP(dev, OP_SCALE, (double)count, 2.0 * (double)count * X_BYTES, scale, x, by, count);
}

/* w (OC, IC) += by * b (OC, R) a (R, IC): merges an adapter into its weight, in fp32 */
static void adapter_merge(Device *dev, float *w, const float *a, const float *b, float by, int R, int64_t IC,
                          int64_t OC) {
    double flops = 2.0 * R * (double)IC * (double)OC;
    double bytes = (2.0 * (double)IC * (double)OC + (double)R * (double)(IC + OC)) * F_BYTES;
    RUN_OP(dev, OP_ADAPTER_MERGE, flops, bytes, adapter_merge, w, a, b, by, R, IC, OC);
}

/* out (count) = in (count) * its block's scale. A block is INT8_BLOCK elements, the last one may be shorter;
 * scales (count / INT8_BLOCK, rounded up) are quantize_int8_block's. */
static void dequantize(Device *dev, floatX *out, const int8_t *in, const float *scales, int64_t count) {
    double flops = (double)count, bytes = (double)count * (1 + X_BYTES + F_BYTES / (double)INT8_BLOCK);
    RUN_OP(dev, OP_DEQUANTIZE, flops, bytes, dequantize, out, in, scales, count);
}

// ---------------------------------------------------------------------------
// embedding (torch.nn.functional.embedding)

/* x (N, C) = the rows of embed (V, C) that ids (N) name. The table is this rank's slice of the vocabulary, V tokens
 * beginning with `first`; tokens of other ranks get zeros, so that a sum over ranks is the embedding. */
static void embedding_forward(Device *dev, floatX *x, const floatX *embed, const int32_t *ids, int first, int N, int C,
                              int V) {
    double bytes = 2.0 * N * C * X_BYTES + F_BYTES * N;
    RUN_OP(dev, OP_EMBEDDING_FORWARD, 0, bytes, embedding_forward, x, embed, ids, first, N, C, V);
}

/* dembed (V, C) += dx (N, C): each row of dx is added to the row of its token, if the token is in this slice. */
static void embedding_backward(Device *dev, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                               int C, int V) {
    double flops = (double)N * C, bytes = (double)N * C * (X_BYTES + 2 * F_BYTES) + F_BYTES * N;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "embedding backward", IMPLEMENTATION(embedding_backward_scratch)(N, C));
    RUN_OP(dev, OP_EMBEDDING_BACKWARD, flops, bytes, embedding_backward, dembed, dx, ids, first, N, C, V, workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

// ---------------------------------------------------------------------------
// RMSNorm (Zhang & Sennrich 2019, equation 4), fused with the residual addition before it

/* out (N, C) = w (C) * v / sqrt(mean(v^2) + eps), with v = x (N, C), or v = x + delta (N, C) if delta is given.
 *   rstd (N)    = 1 / sqrt(mean(v^2) + eps) of each row, for backward
 *   sum  (N, C) = v, rounded to floatX; the norm is taken of the rounded v. May be x or delta. NULL without delta. */
static void rmsnorm_forward(Device *dev, floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta,
                            const floatX *w, float eps, int N, int C) {
    double flops = 4.0 * N * C; // of the norm; the addition of delta is not counted
    double bytes = (double)N * C * X_BYTES * (delta ? 4 : 2) + N * F_BYTES + C * X_BYTES;
    RUN_OP(dev, OP_RMSNORM_FORWARD, flops, bytes, rmsnorm_forward, out, rstd, sum, x, delta, w, eps, N, C);
}

/* With y = x rstd and g = dout w:
 *   dx (N, C) = rstd (g - y mean(g y)) + dresidual
 *   dw (C)   += sum over rows of dout y; NULL if the weight is frozen
 * x (N, C) is the tensor that forward normalized. dresidual (N, C) is the gradient that reaches x through the residual
 * connection: it may be the same memory as dx; NULL means zero. */
static void rmsnorm_backward(Device *dev, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual,
                             const floatX *x, const float *rstd, const floatX *w, int N, int C) {
    double bytes = (double)N * C * X_BYTES * (dresidual ? 4 : 3) + N * F_BYTES + C * (X_BYTES + 2 * F_BYTES);
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "rmsnorm backward", IMPLEMENTATION(rmsnorm_backward_scratch)(N, C));
    RUN_OP(dev, OP_RMSNORM_BACKWARD, 10.0 * N * C, bytes, rmsnorm_backward, dx, dw, dout, dresidual, x, rstd, w, N, C,
           workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* out (count) = x (count) + delta (count), rounded as rmsnorm_forward rounds its sum: the same bits. out may be x or
 * delta. */
static void residual_add(Device *dev, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    RUN_OP(dev, OP_RESIDUAL_ADD, (double)count, 3.0 * (double)count * X_BYTES, residual_add, out, x, delta, count);
}

// ---------------------------------------------------------------------------
// rotary position embedding (Su et al. 2021), with Hugging Face's pairing: element i rotates with element i + HD/2

/* Rotates, in place, the first `heads` heads of each row of x (N rows, `stride` elements apart). Row n is at position
 * positions[n % T], with positions (T); cos_sin (largest position + 1, 2, HD/2) holds the cosines, then the sines, of
 * each position's angles. */
static void rope_forward(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                         int T, int heads, int HD) {
    double flops = 3.0 * N * heads * HD, bytes = 2.0 * N * heads * HD * X_BYTES;
    RUN_OP(dev, OP_ROPE_FORWARD, flops, bytes, rope, x, stride, cos_sin, positions, N, T, heads, HD, 1);
}

/* Rotates the gradient back, in place: a rotation's transpose is the rotation by the opposite angle. */
static void rope_backward(Device *dev, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N,
                          int T, int heads, int HD) {
    double flops = 3.0 * N * heads * HD, bytes = 2.0 * N * heads * HD * X_BYTES;
    RUN_OP(dev, OP_ROPE_BACKWARD, flops, bytes, rope, x, stride, cos_sin, positions, N, T, heads, HD, -1);
}

// ---------------------------------------------------------------------------
// attention: causal, grouped query heads, never a (T, T) tensor (FlashAttention-2, Dao 2023)

/* Visible (query, key) pairs, in one head of one sequence, if there were one query at each of the positions 0 to
 * position - 1; the query at position p sees min(p + 1, Tk) keys. */
static double pairs_below(const AttentionShape *s, double position) {
    double within = fmax(0, fmin(position, s->Tk));
    return within * (within + 1) / 2 + fmax(0, position - s->Tk) * s->Tk;
}

/* Visible (query, key) pairs of the whole op. Document boundaries are not considered: a dry run does not know them. */
static double attention_pairs(const AttentionShape *s) {
    int split = (int)max_i64(0, min_i64(s->q_split, s->Tq));
    // With context parallelism a rank's queries are two runs of positions. These are the first positions of both.
    double first = s->q_offset, second = first + split + s->q_gap;
    double first_half = pairs_below(s, first + split) - pairs_below(s, first);
    double second_half = pairs_below(s, second + s->Tq - split) - pairs_below(s, second);
    return (first_half + second_half) * s->B * s->NH;
}

/* Bytes of q, k, v and out, each moved `times` times, and of lse. */
static double attention_bytes(const AttentionShape *s, int times) {
    double elements = 2.0 * s->B * s->HD * ((double)s->Tq * s->NH + (double)s->Tk * s->NKV);
    return times * elements * X_BYTES + (double)s->B * s->NH * s->Tq * F_BYTES;
}

/* A query sees the keys of its document at its own position and before; positions of queries and the strides between
 * the rows of all tensors are in AttentionShape (ops_common.h).
 *   out (B, Tq, NH, HD) = softmax(q k^T / sqrt(HD), masked) v; zeros for a query that sees no key
 *   lse (B, NH, Tq)   = log of the sum of the exponentials of a query's scores, for backward; -INFINITY without keys
 *   q (B, Tq, NH, HD), k and v (B, Tk, NKV, HD); query head h attends to key/value head h / (NH / NKV) */
static void attention_forward(Device *dev, floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                              const AttentionShape *s) {
    double flops = 4.0 * s->HD * attention_pairs(s);
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "attention", IMPLEMENTATION(attention_scratch)(&dev->on, s, 0));
    dev->on.left_to_nccl = dev->left_to_nccl[dev->recomputing];
    RUN_OP(dev, OP_ATTENTION_FORWARD, flops, attention_bytes(s, 1), attention_forward, out, lse, q, k, v, s, workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* dq, dk, dv = the gradients, laid out as q, k, v and in memory of their own. dout is laid out as out. With
 * S = q k^T / sqrt(HD), masked, P = exp(S - lse) and D = rowsum(dout * out) (Dao et al. 2022, appendix B.2):
 *   dv = P^T dout,  dP = dout v^T,  dS = P (dP - D),  dq = dS k / sqrt(HD),  dk = dS^T q / sqrt(HD)
 * for each query head; dk and dv of a key/value head are the sums over the query heads that attend to it. */
static void attention_backward(Device *dev, floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out,
                               const float *lse, const floatX *q, const floatX *k, const floatX *v,
                               const AttentionShape *s) {
    double flops = 10.0 * s->HD * attention_pairs(s);
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "attention", IMPLEMENTATION(attention_scratch)(&dev->on, s, 1));
    RUN_OP(dev, OP_ATTENTION_BACKWARD, flops, attention_bytes(s, 2), attention_backward, dq, dk, dv, dout, out, lse,
           q, k, v, s, workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

// ---------------------------------------------------------------------------
// SwiGLU (Shazeer 2020, equation 6): h = silu(gate) * up, silu(x) = x sigmoid(x)

/* h (N, F) = silu(gate) * up. Each row of gate_up (N, 2F) holds the gate's F elements, then up's. */
static void swiglu_forward(Device *dev, floatX *h, const floatX *gate_up, int N, int F) {
    RUN_OP(dev, OP_SWIGLU_FORWARD, 5.0 * N * F, 3.0 * N * F * X_BYTES, swiglu_forward, h, gate_up, N, F);
}

/* dgate_up (N, 2F) = the gradient, from dh (N, F) and gate_up (N, 2F); may be gate_up itself. */
static void swiglu_backward(Device *dev, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
    RUN_OP(dev, OP_SWIGLU_BACKWARD, 10.0 * N * F, 5.0 * N * F * X_BYTES, swiglu_backward, dgate_up, dh, gate_up, N, F);
}

// ---------------------------------------------------------------------------
// cross-entropy (torch.nn.functional.cross_entropy, reduction "none", negative targets ignored), with z-loss

static const ZLoss no_z_loss = {0, NULL};

/* The z-losses of the rows from `first` on. */
static inline ZLoss z_loss_from(ZLoss z, int first) {
    if (z.losses) z.losses += first;
    return z;
}

/* losses (N) = -log softmax(logits)[target]; 0 where the target is negative. logits (N, V), targets (N). Losses are
 * computed in fp32 from the logits as they are stored. With want_grad the gradient of the sum of losses,
 * softmax(logits) - onehot(target) or, where the target is negative, 0, takes the place of the logits, in their dtype.
 * With a z-loss (logits.h), z.losses (N) are the rows' z-losses, and the gradient is that of the sum of
 * both; `losses` are the same as without. */
static void cross_entropy(Device *dev, float *losses, Logits logits, const int32_t *targets, ZLoss z, int N, int V,
                          int want_grad) {
    double moved = want_grad ? 2 : 1; // times that a logit or its gradient crosses the memory bus
    double bytes = moved * N * V * (double)dtype_size(logits.dtype) + (z.losses ? 3 : 2) * F_BYTES * N;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "cross entropy", IMPLEMENTATION(cross_entropy_scratch)(&dev->on, V));
    RUN_OP(dev, OP_CROSS_ENTROPY, 4.0 * N * V, bytes, cross_entropy, losses, logits, targets, z, N, V, want_grad,
           workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* Vocabulary-parallel cross-entropy (Shoeybi et al. 2019, section 3), first half: what this rank's slice of V tokens,
 * beginning with `first`, contributes. parts (N, 3) = the LossPart of each row: the largest logit, the sum of
 * exp(logit - largest), the target's logit or -INFINITY. targets (N) are of the whole vocabulary. The ranks then
 * all-gather their parts. */
static void cross_entropy_part(Device *dev, float *parts, Logits logits, const int32_t *targets, int first, int N,
                               int V) {
    double bytes = (double)N * V * (double)dtype_size(logits.dtype) + 4 * F_BYTES * N;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "cross entropy", IMPLEMENTATION(cross_entropy_scratch)(&dev->on, V));
    RUN_OP(dev, OP_CROSS_ENTROPY, 3.0 * N * V, bytes, cross_entropy_part, parts, logits, targets, first, N, V,
           workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* Second half: losses and z-losses (N) from all ranks' parts (ranks, N, 3), in the order of their slices, with the same
 * bits on every rank. With want_grad this rank's logits (N, V) become their gradient, as in cross_entropy. */
static void cross_entropy_join(Device *dev, float *losses, Logits logits, const float *parts, const int32_t *targets,
                               ZLoss z, int ranks, int first, int N, int V, int want_grad) {
    double flops = 4.0 * ranks * N + (want_grad ? 3.0 * N * V : 0);
    double of_row = 3.0 * ranks + (z.losses ? 3 : 2);
    double bytes = (want_grad ? 2.0 * N * V * (double)dtype_size(logits.dtype) : 0) + of_row * F_BYTES * N;
    RUN_OP(dev, OP_CROSS_ENTROPY, flops, bytes, cross_entropy_join, losses, logits, parts, targets, z, ranks, first,
           N, V, want_grad);
}

// ---------------------------------------------------------------------------
// sums over ranks' pieces, gradient norm, AdamW

/* out (count) = the sum over pieces (n, count) of dtype, or += with `accumulate`. The order is a binary tree over the
 * pieces, ((0+1)+(2+3))+…, in fp32. out may be pieces. The sum of one piece is a copy. */
static void tree_sum(Device *dev, float *out, const void *pieces, Dtype dtype, int n, int64_t count, int accumulate) {
    double flops = (double)(n - 1 + accumulate) * count;
    double bytes = (double)count * ((1 + accumulate) * F_BYTES + n * (dtype == DTYPE_F32 ? F_BYTES : 2));
    RUN_OP(dev, OP_TREE_SUM, flops, bytes, tree_sum, out, pieces, dtype, n, count, accumulate);
}

/* The same for activations: out (count) and pieces (n, count) are floatX, and the fp32 sum is rounded once. */
static void sum_pieces(Device *dev, floatX *out, const floatX *pieces, int n, int64_t count) {
    double flops = (double)(n - 1) * (double)count, bytes = (double)count * (n + 1) * X_BYTES;
    RUN_OP(dev, OP_SUM_PIECES, flops, bytes, sum_pieces, out, pieces, n, count);
}

/* *total += the exact sum of x (count), none of which is negative. */
static void exact_total(Device *dev, ExactSum *total, const float *x, int64_t count) {
    RUN_OP(dev, OP_EXACT_TOTAL, (double)count, (double)count * F_BYTES, exact_total, total, x, count);
}

/* *total += the sum of the squares of x (count): fp32 within each block of NORM_BLOCK elements, exact over the blocks.
 * So the gradient norm has the same bits however the blocks are divided among ranks. */
static void squared_norm(Device *dev, ExactSum *total, const float *x, int64_t count) {
    RUN_OP(dev, OP_SQUARED_NORM, 2.0 * (double)count, (double)count * F_BYTES, squared_norm, total, x, count);
}

/* AdamW (torch.optim.AdamW; Loshchilov & Hutter 2019), with the gradient s = g * grad_scale:
 *   p *= 1 - lr weight_decay;  m += (1 - beta1) (s - m);  v = beta2 v + (1 - beta2) s^2
 *   p -= lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)
 * p, m, v (count) are updated: parameters, first and second moment. copy (count) = p rounded to floatX, or NULL.
 * grad_scale combines gradient clipping and 1 / number of target tokens; step counts from 1. */
static void adamw(Device *dev, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr,
                  float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step) {
    double flops = 14.0 * (double)count, bytes = (double)count * (7 * F_BYTES + (copy ? X_BYTES : 0));
    RUN_OP(dev, OP_ADAMW, flops, bytes, adamw, p, m, v, g, copy, count, lr, beta1, beta2, eps, weight_decay,
           grad_scale, step);
}

// ---------------------------------------------------------------------------
// Muon (Jordan et al. 2024; torch.optim.Muon): momentum, Newton-Schulz iterations on matrices, update of the weights.
// The iterations run in floatX; PyTorch always runs them in bf16.

/* Momentum and Nesterov's step, with the gradient s = g * grad_scale:
 *   m += (1 - momentum) (s - m);  update = s + momentum (m - s), rounded to floatX
 * m (count) is updated. */
static void muon_momentum(Device *dev, floatX *update, float *m, const float *g, int64_t count, float momentum,
                          float grad_scale) {
    double flops = 7.0 * (double)count, bytes = (double)count * (3 * F_BYTES + X_BYTES);
    RUN_OP(dev, OP_MUON_MOMENTUM, flops, bytes, muon_momentum, update, m, g, count, momentum, grad_scale);
}

/* x (count) /= its Frobenius norm, or 1e-7 if that is larger (as torch.optim.Muon: norm().clamp(min=eps)). The norm has
 * the same bits for any number of threads: its squares are summed as in squared_norm. */
static void normalize_matrix(Device *dev, floatX *x, int64_t count) {
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    void *workspace = op_workspace(dev, "norm of a matrix", IMPLEMENTATION(normalize_matrix_scratch)());
    RUN_OP(dev, OP_NORMALIZE_MATRIX, 3.0 * (double)count, 3.0 * (double)count * X_BYTES, normalize_matrix, x, count,
           workspace);
    arena_release(dev, MEM_WORKSPACE, mark);
}

/* g (m, m) = the smaller of x x^T and x^T x, for x (rows, cols): m = min(rows, cols) */
static void gram_matrix(Device *dev, floatX *g, const floatX *x, int64_t rows, int64_t cols) {
    int is_tall = rows > cols;
    int64_t m = is_tall ? cols : rows, length = is_tall ? rows : cols;
    int64_t along_m = is_tall ? 1 : cols, along_sum = is_tall ? cols : 1; // distance of neighbors in x
    Matmul p = {.M = m, .N = m, .K = length, .a_row = along_m, .a_col = along_sum, .b_row = along_sum, .b_col = along_m,
                .c_row = m, .c_float = FLOATX == DTYPE_F32, .accumulate = 0};
    linear_matmul(dev, OP_MUON_MATMUL, p, is_tall && FLOATX == DTYPE_F32 ? (int64_t)DW_TOKENS : length, g, x, x);
}

/* y (rows, cols) = s x, or x s if x (rows, cols) has more rows than columns; s (m, m) is symmetric, with m = min(rows,
 * cols). y is fp32, so that weighted_sum rounds once, as torch.addmm does. */
static void symmetric_matmul(Device *dev, float *y, const floatX *s, const floatX *x, int64_t rows, int64_t cols) {
    int is_tall = rows > cols;
    int64_t m = is_tall ? cols : rows, depth = FLOATX == DTYPE_F32 ? (int64_t)DX_DEPTH : m;
    Matmul p = {.M = rows, .N = cols, .K = m, .a_row = m, .a_col = 1, .b_row = cols, .b_col = 1, .c_row = cols,
                .c_float = 1, .accumulate = 0};
    linear_matmul(dev, OP_MUON_MATMUL, p, depth, y, is_tall ? x : s, is_tall ? s : x);
}

/* x (count) = a * x + y (count) * b */
static void weighted_sum(Device *dev, floatX *x, float a, const float *y, float b, int64_t count) {
    double bytes = (double)count * (2 * X_BYTES + F_BYTES);
    RUN_OP(dev, OP_WEIGHTED_SUM, 3.0 * (double)count, bytes, weighted_sum, x, a, y, b, count);
}

/* p (count) = (1 - lr weight_decay) p - lr * adjust * direction (count); copy (count) = p rounded to floatX, or NULL */
static void muon_update(Device *dev, float *p, floatX *copy, const floatX *direction, int64_t count, float lr,
                        float adjust, float weight_decay) {
    double flops = 3.0 * (double)count, bytes = (double)count * (2 * F_BYTES + X_BYTES * (copy ? 2 : 1));
    RUN_OP(dev, OP_MUON_UPDATE, flops, bytes, muon_update, p, copy, direction, count, lr, adjust, weight_decay);
}

// ---------------------------------------------------------------------------
// casts and hashes

/* out (count) = in (count), rounded to the nearest bf16, ties to even */
static void cast_to_bf16(Device *dev, bf16 *out, const float *in, int64_t count) {
    RUN_OP(dev, OP_CAST, 0, (double)count * (2 + F_BYTES), cast_to_bf16, out, in, count);
}

/* *hash = a hash of `bytes` bytes, a multiple of 8. Two ranks compare hashes to check that they hold the same bits. */
static void fingerprint(Device *dev, uint64_t *hash, const void *data, int64_t bytes) {
    RUN_OP(dev, OP_FINGERPRINT, 0, (double)bytes, fingerprint, hash, data, bytes);
}

#pragma GCC diagnostic pop
#endif
