/* page_matmul.cuh: opens cuBLASLt for a page whose op has matmuls, and measures the matmul rate of page.cuh. */
#ifndef PAGE_MATMUL_CUH
#define PAGE_MATMUL_CUH
#include "../../lib/ops/cuda/matmul.cuh" // defines: cuda_matmul, matmul_open
#include "page_rate.cuh"                 // defines: page_rate_open

static void page_matmul_open(OpStream *on) {
    if (!on->matmuls) matmul_open(on, page_alloc(CUDA_WORKSPACE_BYTES), 1); // else another page has opened it
    page_rate_open(on);
}

#endif
