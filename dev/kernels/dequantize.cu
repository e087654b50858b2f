/* dequantize.cu: the steps of dequantizing int8 weights on a GPU.
 *
 * One byte is read and two or four are written. Most of the traffic is stores, so these must be wide, and few
 * instructions may come between two loads.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp dequantize.cu -o dequantize
 * with dequantize.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/elementwise.cuh lib/ops/cuda/flat.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/elementwise.cuh"
#include "dequantize.h"

// Thread i converts W bytes from i W on, read one by one.
template <int W>
static __global__ void __launch_bounds__(256)
    dequantize_bytes(floatX *out, const int8_t *in, const float *scales, int64_t count) {
    int64_t i = thread_number() * W;
    float v[W];
    if (i >= count) return;
    float by = scales[i / INT8_BLOCK];
    for (int k = 0; k < W; k++) v[k] = i + k < count ? (float)in[i + k] * by : 0;
    store_some(out + i, v, count - i);
}
template <int W> static void dequantize_by_bytes(Case *c) {
    KERNEL(c->on, dequantize_bytes<W>, blocks_for(c->size[0], 256 * W), 256, 0, X("out"), B("in"), F("scales"),
           c->size[0]);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 a byte a thread", "A warp reads 32 bytes and one scale: a quarter of a cache line at a time.",
     dequantize_by_bytes<1>},
    {"2 a store of 16 bytes",
     "Each thread converts as many elements as fill a store of 16 bytes, but reads their bytes one by one.",
     dequantize_by_bytes<WIDE>},
    {"in use", "The op of lib/ops/cuda: the bytes are loaded as words, too.", dequantize_in_use}};

PAGE({&op, op_versions})
