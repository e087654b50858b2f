/* scale.cu: the steps of multiplying a tensor by a number on a GPU.
 *
 * Each element is read and written once. All there is to gain is the number of bytes that one load or store moves.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp scale.cu -o scale
 * with page.cuh page.h scale.h lib/device/kernel.h lib/ops/cuda/elementwise.cuh lib/ops/cuda/flat.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/elementwise.cuh"
#include "scale.h"

// Thread i scales W elements from i W on; a shorter tail is taken one by one.
template <int W> static __global__ void __launch_bounds__(256) scale_kernel1(floatX *x, float by, int64_t count) {
    int64_t i = thread_number() * W;
    float v[W];
    if (i >= count) return;
    load_some(v, x + i, count - i);
    for (int k = 0; k < W; k++) v[k] *= by;
    store_some(x + i, v, count - i);
}
template <int W> static void scale_by(Case *c) {
    KERNEL(c->on, scale_kernel1<W>, blocks_for(c->size[0], 256 * W), 256, 0, X("x"), SCALE_BY, c->size[0]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 an element a thread", "In bf16 a warp loads and stores 64 bytes at a time, half a cache line.", scale_by<1>},
    {"2 sixteen bytes a thread", "As many elements as fill a load and a store of 16 bytes.", scale_by<WIDE>},
    {"in use", "The op of lib/ops/cuda: the same, and by element if the tensor is not aligned to 16 bytes.",
     scale_in_use}};

PAGE({&op, op_versions})
