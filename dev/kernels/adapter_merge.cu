/* adapter_merge.cu: the steps of merging a LoRA adapter into its weight on a GPU.
 *
 * The weight is read and written once; a and b are so small that they stay in the caches. What matters is that the
 * threads of a warp touch adjacent elements of w and a.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp adapter_merge.cu -o adapter_merge
 * with adapter_merge.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/elementwise.cuh lib/ops/cuda/flat.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/elementwise.cuh"
#include "adapter_merge.h"

// Thread o merges row o of w.
static __global__ void __launch_bounds__(256)
    merge_kernel1(float *w, const float *a, const float *b, float by, int rank, int64_t IC, int64_t OC) {
    int64_t o = thread_number();
    if (o >= OC) return;
    for (int64_t i = 0; i < IC; i++) {
        float sum = 0;
        for (int r = 0; r < rank; r++) sum = fmaf(a[r * IC + i], b[o * rank + r], sum);
        w[o * IC + i] = fmaf(sum, by, w[o * IC + i]);
    }
}
static void merge_by_rows(Case *c) {
    KERNEL(c->on, merge_kernel1, blocks_for(c->size[0], 256), 256, 0, F("w"), F("a"), F("b"), MERGE_BY, (int)c->size[2],
           c->size[1], c->size[0]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 a row a thread",
     "The elements of w that a warp touches together are a row apart: 32 cache lines for 32 of them.", merge_by_rows},
    {"in use",
     "The op of lib/ops/cuda, an element a thread: a warp reads 32 adjacent elements of w and of each row of a.",
     merge_in_use}};

PAGE({&op, op_versions})
