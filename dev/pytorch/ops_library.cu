/* ops_library.cu: the ops of lib/ops/ops.h as plain C functions in a shared library, for llama3_ops.py.
 *
 * `make ops` compiles this file once in each precision and links both into build/libllama3_ops.so, so that a process
 * has both: llama3_fp32_rmsnorm_forward and llama3_bf16_rmsnorm_forward. Each function has the parameters of its op's
 * contract in lib/ops/ops.h, with a handle in place of the Device. A caller may rely on: tensors are used where they
 * are, and workspace is allocated as needed. A handle is for one thread at a time; a failure ends the process with a
 * line.
 */
#include "../../lib/ops/ops.h"                 // defines: Device, floatX, the ops
#include "../../lib/ops/cpu/attention_query.h" // computes attention of single queries
#include <omp.h>

typedef struct {
    Device dev;
    Device dry_run; // finds the workspace, FLOPs and bytes of each call before it computes
    int has_stream; // the caller gave a stream and waits for it; otherwise each call waits for its op
} Library;

#ifdef PRECISION_BF16
#define SYMBOL(name) llama3_bf16_##name
#else
#define SYMBOL(name) llama3_fp32_##name
#endif
#ifdef __cplusplus
#define VISIBLE extern "C" __attribute__((visibility("default")))
#else
#define VISIBLE __attribute__((visibility("default")))
#endif

// ---------------------------------------------------------------------------
// handles

/* Opens the device with the memory that its dry run has asked for so far. */
static void library_open_device(Library *l) {
    device_open(&l->dev, &l->dry_run, ".", 0, NULL);
    ops_open(&l->dev, 1);
}

/* A handle for `threads` threads of this process, or for GPU number `gpu`. */
VISIBLE void *SYMBOL(open)(int threads, int gpu) {
    Library *l = (Library *)checked_malloc(sizeof *l);
#ifdef USE_CUDA
    device_count(); // ends the process with an error if there is no GPU
#endif
    device_open_dry_run(&l->dry_run, threads, 0);
    l->dry_run.gpu = gpu;
    ops_open(&l->dry_run, 0); // counts the workspace of the matmul library
    library_open_device(l);
    return l;
}

VISIBLE void SYMBOL(close)(void *handle) {
    Library *l = (Library *)handle;
    ops_close(&l->dev);
    device_close(&l->dev);
    free(l);
}

/* GPU: from now on ops go to this stream, as PyTorch's current one, and the caller waits for it. */
VISIBLE void SYMBOL(use_stream)(void *handle, void *stream) {
    Library *l = (Library *)handle;
    l->has_stream = 1;
#ifdef USE_CUDA
    l->dev.on.stream = (cudaStream_t)stream;
#else
    (void)stream;
#endif
}

/* FLOPs and bytes of the handle's last call, as its op counts them. */
VISIBLE void SYMBOL(cost)(void *handle, double *flops, double *bytes) {
    const Library *l = (const Library *)handle;
    *flops = *bytes = 0;
    for (int i = 0; i < OP_COUNT; i++) {
        *flops += l->dry_run.rec.ops[i].flops;
        *bytes += l->dry_run.rec.ops[i].bytes;
    }
}

/* Sizes of the structs that calls receive, so that a caller can compare them with its own declarations. */
VISIBLE int SYMBOL(struct_bytes)(int which) {
    static const size_t bytes[] = {sizeof(AttentionShape), sizeof(ZLoss), sizeof(Logits), sizeof(ExactSum)};
    return (int)bytes[which];
}

#ifdef CUDA_ON_CPU
/* For tests: the emulator's kernels refuse memory that is not the device's, and the host may not touch that. */
VISIBLE void *SYMBOL(device_memory)(size_t bytes) {
    void *p = NULL;
    cuda_check(cudaMalloc(&p, bytes), "allocating memory");
    return p;
}
VISIBLE void SYMBOL(copy)(void *to, const void *from, size_t bytes) {
    cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "a copy");
}
#endif

// ---------------------------------------------------------------------------
// calls

static Device *library_dry_run(Library *l) {
    memset(l->dry_run.rec.ops, 0, sizeof l->dry_run.rec.ops);
    return &l->dry_run;
}

/* The device for the call that the dry run has just made. If its workspace does not fit, the device is opened again
 * with twice as much as is needed, so that this happens a few times at most. */
static Device *library_device(Library *l) {
    Arena *need = &l->dry_run.arenas[MEM_WORKSPACE];
    if (need->peak > l->dev.arenas[MEM_WORKSPACE].reserved) {
#ifdef USE_CUDA
        cudaStream_t stream = l->dev.on.stream;
        cuda_check(cudaDeviceSynchronize(), "waiting for earlier calls");
#endif
        ops_close(&l->dev);
        device_close(&l->dev);
        need->peak *= 2;
        library_open_device(l);
#ifdef USE_CUDA
        if (l->has_stream) l->dev.on.stream = stream;
#endif
    }
#ifdef USE_CUDA
    cuda_check(cudaSetDevice(l->dev.gpu), "choosing a GPU");
#endif
    omp_set_num_threads(l->dev.on.threads); // oneDNN takes it from the calling thread, which may be another each time
    return &l->dev;
}

static void library_called(Library *l) {
    if (!l->has_stream) device_synchronize(&l->dev);
}

/* EXPORT(op) begins the definition of an op's exported function. If `op` is a macro, as in the libraries of
 * dev/kernels/mine, CALL expands it and EXPORT does not. */
#ifdef PRECISION_BF16
#define EXPORT(op) VISIBLE void llama3_bf16_##op
#else
#define EXPORT(op) VISIBLE void llama3_fp32_##op
#endif
#define CALL(l, op, ...)                                                                                               \
    do {                                                                                                               \
        op(library_dry_run(l), __VA_ARGS__);                                                                           \
        op(library_device(l), __VA_ARGS__);                                                                            \
        library_called(l);                                                                                             \
    } while (0)

// ---------------------------------------------------------------------------
// the ops, in the order of lib/ops/ops.h, which has their contracts: formula, shapes and dtypes

EXPORT(linear_forward)(Library *l, floatX *y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    CALL(l, linear_forward, y, x, w, N, IC, OC);
}
EXPORT(linear_forward_logits)(Library *l, Logits y, const floatX *x, const floatX *w, int N, int IC, int OC) {
    CALL(l, linear_forward_logits, y, x, w, N, IC, OC);
}
EXPORT(linear_backward_input)
(Library *l, floatX *dx, const floatX *dy, int64_t dy_stride, const floatX *w, int N, int IC, int OC) {
    CALL(l, linear_backward_input, dx, dy, dy_stride, w, N, IC, OC);
}
EXPORT(linear_backward_weight)
(Library *l, float *dw, const floatX *dy, int64_t dy_stride, const floatX *x, int N, int IC, int OC, int accumulate) {
    CALL(l, linear_backward_weight, dw, dy, dy_stride, x, N, IC, OC, accumulate);
}

EXPORT(linear_forward_add)
(Library *l, floatX *y, int64_t y_stride, const floatX *x, const floatX *w, int N, int IC, int OC) {
    CALL(l, linear_forward_add, y, y_stride, x, w, N, IC, OC);
}
EXPORT(linear_backward_input_add)(Library *l, floatX *dx, const floatX *dy, const floatX *w, int N, int IC, int OC) {
    CALL(l, linear_backward_input_add, dx, dy, w, N, IC, OC);
}
EXPORT(scale)(Library *l, floatX *x, float by, int64_t count) { CALL(l, scale, x, by, count); }
EXPORT(adapter_merge)(Library *l, float *w, const float *a, const float *b, float by, int R, int64_t IC, int64_t OC) {
    CALL(l, adapter_merge, w, a, b, by, R, IC, OC);
}
EXPORT(dequantize)(Library *l, floatX *out, const int8_t *in, const float *scales, int64_t count) {
    CALL(l, dequantize, out, in, scales, count);
}

EXPORT(embedding_forward)
(Library *l, floatX *x, const floatX *embed, const int32_t *ids, int first, int N, int C, int V) {
    CALL(l, embedding_forward, x, embed, ids, first, N, C, V);
}
EXPORT(embedding_backward)
(Library *l, float *dembed, const floatX *dx, const int32_t *ids, int first, int N, int C, int V) {
    CALL(l, embedding_backward, dembed, dx, ids, first, N, C, V);
}

EXPORT(rmsnorm_forward)
(Library *l, floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w, float eps,
 int N, int C) {
    CALL(l, rmsnorm_forward, out, rstd, sum, x, delta, w, eps, N, C);
}
EXPORT(rmsnorm_backward)
(Library *l, floatX *dx, float *dw, const floatX *dout, const floatX *dresidual, const floatX *x, const float *rstd,
 const floatX *w, int N, int C) {
    CALL(l, rmsnorm_backward, dx, dw, dout, dresidual, x, rstd, w, N, C);
}
EXPORT(residual_add)(Library *l, floatX *out, const floatX *x, const floatX *delta, int64_t count) {
    CALL(l, residual_add, out, x, delta, count);
}

EXPORT(rope_forward)
(Library *l, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads,
 int HD) {
    CALL(l, rope_forward, x, stride, cos_sin, positions, N, T, heads, HD);
}
EXPORT(rope_backward)
(Library *l, floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int N, int T, int heads,
 int HD) {
    CALL(l, rope_backward, x, stride, cos_sin, positions, N, T, heads, HD);
}

EXPORT(attention_forward)
(Library *l, floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s) {
    CALL(l, attention_forward, out, lse, q, k, v, s);
}
EXPORT(attention_backward)
(Library *l, floatX *dq, floatX *dk, floatX *dv, const floatX *dout, const floatX *out, const float *lse,
 const floatX *q, const floatX *k, const floatX *v, const AttentionShape *s) {
    CALL(l, attention_backward, dq, dk, dv, dout, out, lse, q, k, v, s);
}

EXPORT(swiglu_forward)(Library *l, floatX *h, const floatX *gate_up, int N, int F) {
    CALL(l, swiglu_forward, h, gate_up, N, F);
}
EXPORT(swiglu_backward)(Library *l, floatX *dgate_up, const floatX *dh, const floatX *gate_up, int N, int F) {
    CALL(l, swiglu_backward, dgate_up, dh, gate_up, N, F);
}

EXPORT(cross_entropy)
(Library *l, float *losses, Logits logits, const int32_t *targets, ZLoss z, int N, int V, int want_grad) {
    CALL(l, cross_entropy, losses, logits, targets, z, N, V, want_grad);
}
EXPORT(cross_entropy_part)
(Library *l, float *parts, Logits logits, const int32_t *targets, int first, int N, int V) {
    CALL(l, cross_entropy_part, parts, logits, targets, first, N, V);
}
EXPORT(cross_entropy_join)
(Library *l, float *losses, Logits logits, const float *parts, const int32_t *targets, ZLoss z, int ranks, int first,
 int N, int V, int want_grad) {
    CALL(l, cross_entropy_join, losses, logits, parts, targets, z, ranks, first, N, V, want_grad);
}

EXPORT(tree_sum)(Library *l, float *out, const void *pieces, Dtype dtype, int n, int64_t count, int accumulate) {
    CALL(l, tree_sum, out, pieces, dtype, n, count, accumulate);
}
EXPORT(sum_pieces)(Library *l, floatX *out, const floatX *pieces, int n, int64_t count) {
    CALL(l, sum_pieces, out, pieces, n, count);
}
EXPORT(exact_total)(Library *l, ExactSum *total, const float *x, int64_t count) {
    CALL(l, exact_total, total, x, count);
}
EXPORT(squared_norm)(Library *l, ExactSum *total, const float *x, int64_t count) {
    CALL(l, squared_norm, total, x, count);
}
EXPORT(adamw)
(Library *l, float *p, float *m, float *v, const float *g, floatX *copy, int64_t count, float lr, float beta1,
 float beta2, float eps, float weight_decay, float grad_scale, int step) {
    CALL(l, adamw, p, m, v, g, copy, count, lr, beta1, beta2, eps, weight_decay, grad_scale, step);
}

EXPORT(muon_momentum)
(Library *l, floatX *update, float *m, const float *g, int64_t count, float momentum, float grad_scale) {
    CALL(l, muon_momentum, update, m, g, count, momentum, grad_scale);
}
EXPORT(normalize_matrix)(Library *l, floatX *x, int64_t count) { CALL(l, normalize_matrix, x, count); }
EXPORT(gram_matrix)(Library *l, floatX *g, const floatX *x, int64_t rows, int64_t cols) {
    CALL(l, gram_matrix, g, x, rows, cols);
}
EXPORT(symmetric_matmul)(Library *l, float *y, const floatX *s, const floatX *x, int64_t rows, int64_t cols) {
    CALL(l, symmetric_matmul, y, s, x, rows, cols);
}
EXPORT(weighted_sum)(Library *l, floatX *x, float a, const float *y, float b, int64_t count) {
    CALL(l, weighted_sum, x, a, y, b, count);
}
EXPORT(muon_update)
(Library *l, float *p, floatX *copy, const floatX *direction, int64_t count, float lr, float adjust,
 float weight_decay) {
    CALL(l, muon_update, p, copy, direction, count, lr, adjust, weight_decay);
}

EXPORT(cast_to_bf16)(Library *l, bf16 *out, const float *in, int64_t count) { CALL(l, cast_to_bf16, out, in, count); }
EXPORT(fingerprint)(Library *l, uint64_t *hash, const void *data, int64_t bytes) {
    CALL(l, fingerprint, hash, data, bytes);
}
