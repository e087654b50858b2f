/* flat.cuh: what the ops on flat arrays share: the number of a thread, loads and stores at an array's end, a grid. */
#ifndef CUDA_FLAT_CUH
#define CUDA_FLAT_CUH
#include "vectors.cuh" // defines: load, store, narrow, BLOCK

/* The number of this thread in a grid of blocks of BLOCK threads. */
DEVICE int64_t thread_of_grid() { return (int64_t)blockIdx.x * BLOCK + threadIdx.x; }

/* Loads and stores at the end of a tensor, where only n elements are left: the others are 0, and are not stored. */
template <bool ONCE = false, int W, class T>
DEVICE void load_some(float (&v)[W], const T *p, int64_t n) {
    if (n >= W) load<ONCE>(v, p);
    else
        UNROLL for (int j = 0; j < W; j++) v[j] = j < n ? widen(p[j]) : 0.0f;
}
template <bool ONCE = false, int W, class T>
DEVICE void store_some(T *p, const float (&v)[W], int64_t n) {
    if (n >= W) store<ONCE>(p, v);
    else
        UNROLL for (int j = 0; j < W; j++)
            if (j < n) narrow(p + j, v[j]);
}

/* As many blocks as keep the GPU busy, if there is work for them. Only for kernels whose result does not depend on the
 * number of blocks. */
static unsigned filling_grid(const OpStream *on, int64_t blocks) {
    return (unsigned)min_i64(blocks, 4 * (int64_t)on->multiprocessors);
}

#endif
