/* my_rmsnorm.cu: a naive RMSNorm to be replaced by your own; `make mine KERNEL=my_rmsnorm` checks and times it.
 *
 * my_rmsnorm_forward has the contract of rmsnorm_forward in lib/ops/ops.h:
 *   out (N, C) = w (C) * v / sqrt(mean(v^2) + eps), with v = x (N, C), or v = x + delta (N, C) if delta is given.
 *   rstd (N)    = 1 / sqrt(mean(v^2) + eps) of each row
 *   sum  (N, C) = v, rounded to floatX, if delta is given
 * floatX is float or bf16; to_float and from_float convert. The C version runs on a CPU, the kernel on a GPU, or on a
 * CPU in the emulator of dev/cuda_on_cpu, which finds accesses outside of tensors.
 */
#include "mine.h"
#include "../rmsnorm.h" // tensors, random values, sizes, definition, the op in use

/* Row n, the naive way: one pass for the sum of squares, and one that scales. */
static inline BOTH void my_rmsnorm_row(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta,
                                       const floatX *w, float eps, int n, int C) {
    int64_t row = (int64_t)n * C;
    float squares = 0;
    for (int i = 0; i < C; i++) {
        if (delta) sum[row + i] = from_float(to_float(x[row + i]) + to_float(delta[row + i]));
        float v = to_float(delta ? sum[row + i] : x[row + i]);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(squares / (float)C + eps);
    rstd[n] = scale;
    for (int i = 0; i < C; i++) {
        float v = to_float(delta ? sum[row + i] : x[row + i]);
        out[row + i] = from_float(v * scale * to_float(w[i]));
    }
}

#ifdef USE_CUDA
/* Thread n computes row n. */
static __global__ void __launch_bounds__(128)
    my_rmsnorm_kernel(floatX *out, float *rstd, floatX *sum, const floatX *x, const floatX *delta, const floatX *w,
                      float eps, int N, int C) {
    int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n < N) my_rmsnorm_row(out, rstd, sum, x, delta, w, eps, n, C);
}
#endif

/* The op, with the parameters of cpu_rmsnorm_forward and cuda_rmsnorm_forward. */
static void my_rmsnorm_forward(OpStream *on, floatX *out, float *rstd, floatX *sum, const floatX *x,
                               const floatX *delta, const floatX *w, float eps, int N, int C) {
#ifdef USE_CUDA
    if (N) KERNEL(on, my_rmsnorm_kernel, (unsigned)((N + 127) / 128), 128, 0, out, rstd, sum, x, delta, w, eps, N, C);
#else
    (void)on; // on->threads: how many threads an op may use
    for (int n = 0; n < N; n++) my_rmsnorm_row(out, rstd, sum, x, delta, w, eps, n, C);
#endif
}

/* Runs the op on the tensors and sizes that the page declares for a case. */
static void run_mine(Case *c) {
    my_rmsnorm_forward(c->on, X("out"), F("rstd"), X("sum"), X("x"), X("delta"), X("w"), EPS, (int)c->size[0],
                       (int)c->size[1]);
}
MY_KERNEL(forward, run_mine)
