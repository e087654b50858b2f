/* cast.cu: the steps of rounding fp32 to floatX on a GPU.
 *
 * Four bytes are read and two written. One instruction rounds two elements, so all there is to gain is the number of
 * bytes that one load or store moves.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp cast.cu -o cast
 * with cast.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/elementwise.cuh lib/ops/cuda/flat.cuh
 * lib/ops/cuda/tree_sum.cuh lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/elementwise.cuh" // defines: cuda_cast_to_bf16
#include "../../lib/ops/cuda/tree_sum.cuh"    // defines: cuda_tree_sum, for fp32
#include "cast.h"

// Thread i converts W elements from i W on; a shorter tail is taken one by one.
template <int W>
static __global__ void __launch_bounds__(256) cast_kernel(floatX *out, const float *in, int64_t count) {
    int64_t i = thread_number() * W;
    float x[W];
    if (i >= count) return;
    load_some(x, in + i, count - i);
    store_some(out + i, x, count - i);
}
template <int W> static void cast_by(Case *c) {
    KERNEL(c->on, cast_kernel<W>, blocks_for(c->size[0], 256 * W), 256, 0, X("out"), F("in"), c->size[0]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 an element a thread",
     "Each thread loads four bytes and stores two: a warp stores 64 bytes at a time, half a cache line.", cast_by<1>},
    {"2 four", "One load of 16 bytes and one store of 8 per thread.", cast_by<4>},
    {"3 sixteen bytes out",
     "As many elements as fill a store of 16 bytes: in bf16 eight, with two loads in flight at once.", cast_by<WIDE>},
    {"in use", "The op of lib/ops/cuda (in fp32 a tree_sum of one piece, which is a copy).", cast_in_use}};

PAGE({&op, op_versions})
