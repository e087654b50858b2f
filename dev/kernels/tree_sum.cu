/* tree_sum.cu: the steps of the tree-shaped sum on a GPU.
 *
 * Every element has a tree of its own, so threads share nothing. What a thread needs is a place for the sums that wait
 * for their right half: memory, or registers. Registers cannot be indexed, so the shape of the tree must be known when
 * the kernel is compiled.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp tree_sum.cu -o tree_sum
 * with page.cuh page.h tree_sum.h lib/device/kernel.h lib/ops/cuda/flat.cuh lib/ops/cuda/tree_sum.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/tree_sum.cuh"
#include "tree_sum.h"

static __global__ void __launch_bounds__(256) add_kernel(float *a, const float *b, int64_t count) {
    int64_t i = thread_number();
    if (i < count) a[i] += b[i];
}
static void sum_levels(Case *c) {
    int64_t n = c->size[0], count = c->size[1];
    size_t bytes = (size_t)(n * count) * sizeof(float);
    float *sums = (float *)page_scratch(c, bytes);
    page_move(c, sums, F("pieces"), bytes);
    for (int64_t width = 1; width < n; width *= 2)
        for (int64_t k = 0; k + width < n; k += 2 * width)
            KERNEL(c->on, add_kernel, blocks_for(count, 256), 256, 0, sums + k * count, sums + (k + width) * count,
                   count);
    if (c->size[2]) KERNEL(c->on, add_kernel, blocks_for(count, 256), 256, 0, F("out"), sums, count);
    else page_move(c, F("out"), sums, (size_t)count * sizeof(float));
}

// The sum of W elements of pieces first ... first + WIDTH - 1; those from n on do not exist. Inlined to the last level.
template <int WIDTH, int W>
static __device__ __forceinline__ void tree_of(float (&sum)[W], const float *pieces, int64_t count, int first, int n) {
    if constexpr (WIDTH == 1) load(sum, pieces + first * count);
    else {
        float right[W];
        tree_of<WIDTH / 2>(sum, pieces, count, first, n);
        if (first + WIDTH / 2 >= n) return; // the same for all threads
        tree_of<WIDTH / 2>(right, pieces, count, first + WIDTH / 2, n);
        for (int j = 0; j < W; j++) sum[j] += right[j];
    }
}
template <int WIDTH, int W>
static __global__ void __launch_bounds__(256)
    sum_kernel(float *out, const float *pieces, int n, int64_t count, int accumulate) {
    int64_t i = thread_number() * W;
    float sum[W], before[W];
    if (i >= count) return;
    tree_of<WIDTH>(sum, pieces + i, count, 0, n);
    if (accumulate) {
        load(before, out + i);
        for (int j = 0; j < W; j++) sum[j] += before[j];
    }
    store(out + i, sum);
}
template <int WIDTH, int W> static void sum_width(Case *c) { // the narrowest tree that holds n pieces
    if constexpr (WIDTH < 64)
        if (c->size[0] > WIDTH) {
            sum_width<2 * WIDTH, W>(c);
            return;
        }
    if (c->size[0] > WIDTH) run_failure("this page sums at most %d pieces", WIDTH);
    KERNEL(c->on, (sum_kernel<WIDTH, W>), blocks_for(c->size[1], 256 * W), 256, 0, F("out"), F("pieces"),
           (int)c->size[0], c->size[1], (int)c->size[2]);
}
static void sum_vectors(Case *c) { // a piece of odd length begins where no vector may
    if (c->size[1] % FLAT) sum_width<1, 1>(c);
    else sum_width<1, FLAT>(c);
}

static const Version op_versions[PAGE_VERSIONS] = {
    {"1 level by level",
     "A kernel for each pair of pieces: every sum of a level goes to memory and comes back for the next, and the "
     "pieces must be copied first.",
     sum_levels},
    {"2 one pass",
     "A thread has its element's whole tree in registers, unrolled by templates for 1, 2, 4, … 64 pieces: each piece "
     "is read once.",
     sum_width<1, 1>},
    {"3 vectors", "Loads of 16 bytes, with the loads of all pieces in flight together.", sum_vectors},
    {"in use", "The op of lib/ops/cuda.", sum_in_use}};
static const Version pieces_versions[PAGE_VERSIONS] = {
    {"in use", "The op of lib/ops/cuda: tree_sum with floatX pieces and output.", pieces_in_use}};

PAGE({&op, op_versions}, {&pieces, pieces_versions})
