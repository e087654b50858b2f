/* adamw.cuh: AdamW on NVIDIA GPUs. The contract is in lib/ops/ops.h. */
#ifndef CUDA_ADAMW_CUH
#define CUDA_ADAMW_CUH
#include "flat.cuh" // defines: load_some, store_some, KERNEL_BY_WIDTH; includes vectors.cuh

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

#endif
