/* page_matmul.cuh: opens cuBLASLt for a page whose op has matmuls, and measures the matmul rate of page.cuh. */
#ifndef PAGE_MATMUL_CUH
#define PAGE_MATMUL_CUH
#include "../../lib/ops/cuda/matmul.cuh" // defines: cuda_matmul, matmul_open
#include "page.h"

static __global__ void random_kernel(floatX *x, int64_t count) { // uniform in (-1, 1)
    int64_t i = thread_number();
    if (i < count) x[i] = from_float((float)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
}

static void page_matmul_open(OpStream *on) {
    static const int shapes[][2] = {
        {2048, 16384}, {8192, 2048}, {4096, 6144}, {4096, 28672}, {14336, 4096}}; // IC, OC of 1B and 8B layers
    const int64_t N = 8192;                                                        // tokens
    if (on->matmuls) return; // another page has opened it
    matmul_open(on, page_alloc(CUDA_WORKSPACE_BYTES), 1);
    for (int i = 0; page_gpu.flush && i < 5; i++) { // flush: this run times
        int64_t IC = shapes[i][0], OC = shapes[i][1];
        floatX *x = (floatX *)page_alloc((size_t)(N * IC) * sizeof(floatX)), *w, *y;
        w = (floatX *)page_alloc((size_t)(OC * IC) * sizeof(floatX));
        y = (floatX *)page_alloc((size_t)(N * OC) * sizeof(floatX));
        KERNEL(on, random_kernel, blocks_for(N * IC, 256), 256, 0, x, N * IC);
        KERNEL(on, random_kernel, blocks_for(OC * IC, 256), 256, 0, w, OC * IC);
        const Matmul p = {N, OC, IC, IC, 1, 1, IC, OC, FLOATX == DTYPE_F32, 0};
        double seconds = page_timed_median(on, [&] { cuda_matmul(on, &p, y, x, w); });
        page_gpu.matmul = fmax(page_gpu.matmul, 2 * (double)(N * IC * OC) / seconds);
        page_free(x);
        page_free(w);
        page_free(y);
    }
    if (page_gpu.flush)
        printf("\n%.1f TFLOP/s in the fastest matmul of %s.\n", page_gpu.matmul / 1e12, PRECISION_NAME);
}

#endif
