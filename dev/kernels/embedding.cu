/* embedding.cu: the steps of the embedding on a GPU.
 *
 * Forward copies rows. Backward adds rows to rows, several to the same one: which thread adds, and in which order? With
 * atomics every thread may, in an order that changes from run to run. Without them, one thread must know all tokens of
 * a row.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp embedding.cu -o embedding
 * with embedding.h page.cuh page.h lib/device/kernel.h lib/ops/cuda/embedding.cuh lib/ops/cuda/sum_rows.cuh
 * lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/embedding.cuh"
#include "embedding.h"

// ---------------------------------------------------------------------------
// forward

// Thread i copies W elements of token n's row.
template <int W>
static __global__ void __launch_bounds__(256)
    forward_kernel1(floatX *x, const floatX *embed, const int32_t *ids, int64_t N, int64_t C, int V, int first) {
    int64_t i = thread_number(), n = i / (C / W), at = i % (C / W) * W;
    float v[W] = {};
    if (n >= N) return;
    int64_t row = slice_row(ids[n], first, V);
    if (row >= 0) load(v, embed + row * C + at);
    store(x + n * C + at, v);
}
static void forward_elements(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    KERNEL(c->on, forward_kernel1<1>, blocks_for(N * C, 256), 256, 0, X("x"), X("embed"), I("ids"), N, C,
           (int)c->size[2], (int)c->size[5]);
}
static void forward_vectors(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    KERNEL_BY_WIDTH(c->on, C % WIDE == 0, WIDE, forward_kernel1, blocks_for(N * (C / W), 256), 256, 0, X("x"),
                    X("embed"), I("ids"), N, C, (int)c->size[2], (int)c->size[5]);
}

static const Version forward_versions[PAGE_VERSIONS] = {
    {"1 an element a thread", "Adjacent threads copy adjacent elements of a row.", forward_elements},
    {"2 vectors", "16 bytes per thread.", forward_vectors},
    {"in use", "The op of lib/ops/cuda.", forward_in_use}};

// ---------------------------------------------------------------------------
// backward

static __global__ void __launch_bounds__(256)
    backward_kernel1(float *dembed, const floatX *dx, const int32_t *ids, int64_t N, int64_t C, int V, int first) {
    int64_t i = thread_number(), n = i / C, row = n < N ? slice_row(ids[n], first, V) : -1;
    if (row >= 0) atomicAdd(dembed + row * C + i % C, to_float(dx[i]));
}
static void backward_atomic(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    KERNEL(c->on, backward_kernel1, blocks_for(N * C, 256), 256, 0, F("dembed"), X("dx"), I("ids"), N, C,
           (int)c->size[2], (int)c->size[5]);
}

// Thread i owns column i of the whole table, and takes all tokens in their order.
static __global__ void __launch_bounds__(WARP)
    backward_kernel2(float *dembed, const floatX *dx, const int32_t *ids, int64_t N, int64_t C, int V, int first) {
    int64_t i = thread_number();
    for (int64_t n = 0; n < N && i < C; n++) {
        int64_t row = slice_row(ids[n], first, V);
        if (row >= 0) dembed[row * C + i] += to_float(dx[n * C + i]);
    }
}
static void backward_columns(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    KERNEL(c->on, backward_kernel2, blocks_for(C, WARP), WARP, 0, F("dembed"), X("dx"), I("ids"), N, C, (int)c->size[2],
           (int)c->size[5]);
}

// Block (n, y): if token n is the first with its id, adds up columns 256 y to 256 y + 255 of all tokens with that id.
static __global__ void __launch_bounds__(256)
    backward_kernel3(float *dembed, const floatX *dx, const int32_t *ids, int64_t N, int64_t C, int V, int first) {
    int64_t mine = blockIdx.x, i = (int64_t)blockIdx.y * 256 + threadIdx.x, row = slice_row(ids[mine], first, V);
    int32_t id = ids[mine];
    int before = 0;
    for (int64_t n = threadIdx.x; n < mine; n += 256) before |= ids[n] == id;
    if (row < 0 || __syncthreads_or(before)) return;
    float sum = 0;
    for (int64_t n = mine; n < N; n++)
        if (ids[n] == id && i < C) sum += to_float(dx[n * C + i]);
    if (i < C) dembed[row * C + i] += sum;
}
static void backward_first_owns(Case *c) {
    int64_t N = c->size[0], C = c->size[1];
    KERNEL(c->on, backward_kernel3, dim3((unsigned)N, blocks_for(C, 256)), 256, 0, F("dembed"), X("dx"), I("ids"), N, C,
           (int)c->size[2], (int)c->size[5]);
}

static const Version backward_versions[PAGE_VERSIONS] = {
    {"1 atomic additions",
     "An element per thread, added to its row atomically: fast if tokens differ, a queue if one token is most of the "
     "text, and other bits on each run.",
     backward_atomic},
    {"2 columns",
     "A thread has a column and goes over all tokens: the same bits on each run, but there are few threads, and each "
     "waits for memory N times.",
     backward_columns},
    {"3 the first owns",
     "The block of an id's first token searches for its other tokens and adds their rows: there are enough blocks, but "
     "each reads all ids, and the owner of a frequent token works alone.",
     backward_first_owns},
    {"in use: sorted",
     "The op of lib/ops/cuda: tokens are sorted by id, blocks sum up 64 sorted tokens each, then the parts of a row "
     "are added in order. dx and the table's rows are loaded four tokens ahead.",
     backward_in_use}};

PAGE({&forward, forward_versions}, {&backward, backward_versions})
