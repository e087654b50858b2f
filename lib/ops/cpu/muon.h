/* muon.h: Muon's elementwise ops on the CPU: momentum, normalization, weighted sums, update of the weights.
 *
 * The contracts are in lib/ops/ops.h. Each element, or each block of a fixed number of elements, is computed alone, so
 * the result does not depend on the number of threads.
 */
#ifndef CPU_MUON_H
#define CPU_MUON_H
#include "../../device/device.h" // defines: Device, ExactSum
#include "../ops_common.h"       // defines: NORM_BLOCK, LEAST_NORM
#include "vectors.h"             // defines: vfloat, load_float, store_x, vfma

static void cpu_muon_momentum(Device *dev, floatX *update, float *m, const float *g, int64_t count, float momentum,
                              float grad_scale) {
    float new_part = (float)(1.0 - (double)momentum);
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vfloat grad = vrounded(load_float(g + i, n) * grad_scale), m0 = load_float(m + i, n);
        vfloat m1 = vfma(grad - m0, vsplat(new_part), m0);
        store_float(m + i, m1, n);
        store_x(update + i, vfma(m1 - grad, vsplat(momentum), grad), n);
    }
}

static size_t cpu_normalize_matrix_scratch(void) { return 0; }

static void cpu_normalize_matrix(Device *dev, floatX *x, int64_t count, void *workspace) {
    ExactSum total = ZERO;
    (void)workspace;
#pragma omp parallel num_threads(dev->threads)
    {
        ExactSum sum = ZERO;
#pragma omp for
        for (int64_t b = 0; b < count; b += NORM_BLOCK) {
            vfloat squares = vsplat(0);
            for (int64_t i = b; i < min_i64(count, b + NORM_BLOCK); i += VL) {
                vfloat v = load_x(x + i, count - i);
                squares = vfma(v, v, squares);
            }
            exact_add(&sum, vsum(squares));
        }
#pragma omp critical(normalize_matrix)
        exact_merge(&total, &sum);
    }
    float norm = (float)sqrt(exact_value(&total)), by = 1.0f / fmaxf(norm, LEAST_NORM);
    if (isnan(norm)) by = norm; // fmaxf would ignore it
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) store_x(x + i, load_x(x + i, count - i) * by, count - i);
}

static void cpu_weighted_sum(Device *dev, floatX *x, float a, const float *y, float b, int64_t count) {
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) {
        vfloat scaled = vrounded(load_float(y + i, count - i) * b);
        store_x(x + i, vfma(load_x(x + i, count - i), vsplat(a), scaled), count - i);
    }
}

static void cpu_muon_update(Device *dev, float *p, floatX *copy, const floatX *direction, int64_t count, float lr,
                            float adjust, float weight_decay) {
    float keep = (float)(1.0 - (double)lr * weight_decay), rate = lr * adjust;
#pragma omp parallel for num_threads(dev->threads)
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vfloat kept = vrounded(load_float(p + i, n) * keep);
        vfloat p1 = vfma(load_x(direction + i, n), vsplat(-rate), kept);
        store_float(p + i, p1, n);
        if (copy) store_x(copy + i, p1, n);
    }
}

#endif
