/* embedding.cuh: the embedding and its gradient on NVIDIA GPUs. The contracts are in lib/ops/ops.h. */
#ifndef CUDA_EMBEDDING_CUH
#define CUDA_EMBEDDING_CUH
#include "sum_rows.cuh" // defines: add_rows; includes vectors.cuh: fetch, unpack, load, store, KERNEL_BY_WIDTH

static constexpr int TOKEN_BLOCK = 64; // occurrences of tokens in a partial sum of the embedding's gradient
static constexpr int TOKENS_AHEAD = 4; // rows of dx and of dembed that a thread loads ahead of adding them
static constexpr int SORT_BLOCK = 512; // threads in a block of the sort
static constexpr int SORT_TOKENS = 2;  // tokens that each of its threads places

/* A thread copies one T: 16 bytes, or one floatX. A row is `length` of them and takes `row_blocks` blocks. */
template <class T>
__global__ void __launch_bounds__(BLOCK)
    embedding_forward_kernel(T *x, const T *embed, const int32_t *ids, int first, int V, int length, int row_blocks) {
    int64_t n = blockIdx.x / (unsigned)row_blocks;
    int64_t i = (int64_t)(blockIdx.x % (unsigned)row_blocks) * BLOCK + threadIdx.x;
    int64_t row = slice_row(ids[n], first, V);
    if (i < length) x[n * length + i] = row < 0 ? T{} : embed[row * length + i];
}
static void cuda_embedding_forward(OpStream *on, floatX *x, const floatX *embed, const int32_t *ids, int first, int N,
                                   int C, int V) {
    if (!N) return;
    int vectors = in_vectors(C, WIDE, x, embed), length = vectors ? C / WIDE : C;
    int row_blocks = (int)blocks_of(length, BLOCK);
    unsigned grid = grid_of((int64_t)N * row_blocks), threads = threads_for(length, BLOCK);
    if (vectors)
        KERNEL(on, (embedding_forward_kernel<uint4>), grid, threads, 0, (uint4 *)x, (const uint4 *)embed, ids, first,
               V, length, row_blocks);
    else KERNEL(on, (embedding_forward_kernel<floatX>), grid, threads, 0, x, embed, ids, first, V, length, row_blocks);
}

/* The embedding's gradient. One token may fill most of a batch, so its sum must not be the work of one thread; and the
 * order of additions must be fixed, so there are no atomics. Three kernels:
 *   1. sort the tokens by id (stable, so equal ids stay in the order of tokens);
 *   2. each block takes TOKEN_BLOCK sorted tokens. It sums up runs of equal ids and adds those that begin in the block
 *      to dembed. A run that began in an earlier block goes to `partial`, one row per block;
 *   3. for each run that crosses blocks, add its rows of `partial` to dembed, in order.
 *
 * The sort: a token's place is the number of tokens that come before it. Each block finds it for WARP * SORT_TOKENS
 * tokens; its warps share the N comparisons of each. That is N^2 comparisons of two instructions: at N = 32,768 about
 * as long as the sums take, but without passes over the data and without a counter per id. */
static __global__ void __launch_bounds__(SORT_BLOCK) sort_tokens_kernel(int32_t *order, const int32_t *ids, int N) {
    SHARED(int, counts, SORT_BLOCK *SORT_TOKENS);
    const int warps = SORT_BLOCK / WARP, tokens = WARP * SORT_TOKENS;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int64_t n0 = (int64_t)blockIdx.x * tokens, n1 = min_i64(N, n0 + tokens);                     // this block's tokens
    int64_t begin = (int64_t)N * warp / warps, end = (int64_t)N * (warp + 1) / warps; // this warp compares with these
    int32_t mine[SORT_TOKENS], before[SORT_TOKENS] = {};
    UNROLL for (int j = 0; j < SORT_TOKENS; j++) mine[j] = n0 + lane + WARP * j < N ? ids[n0 + lane + WARP * j] : 0;
    for (int64_t m = begin; m < min_i64(end, n0); m++) // earlier tokens: those of the same id come before
        UNROLL for (int j = 0; j < SORT_TOKENS; j++) before[j] += ids[m] <= mine[j];
    for (int64_t m = max_i64(begin, n1); m < end; m++) // later tokens
        UNROLL for (int j = 0; j < SORT_TOKENS; j++) before[j] += ids[m] < mine[j];
    for (int64_t m = n0 + warp; m < n1; m += warps) // tokens of this block
        UNROLL for (int j = 0; j < SORT_TOKENS; j++)
            before[j] += ids[m] < mine[j] || (ids[m] == mine[j] && m < n0 + lane + WARP * j);
    UNROLL for (int j = 0; j < SORT_TOKENS; j++) counts[warp * tokens + WARP * j + lane] = before[j];
    __syncthreads();
    int place = 0;
    if ((int)threadIdx.x < tokens && n0 + threadIdx.x < n1) {
        for (int w = 0; w < warps; w++) place += counts[w * tokens + (int)threadIdx.x];
        order[place] = (int32_t)(n0 + threadIdx.x);
    }
}

/* Step 2. A block has TOKEN_BLOCK sorted tokens, a thread W columns of all of them. dx is read once, a row of dembed
 * once for each id in the block. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    embedding_backward_kernel(float *dembed, float *partial /* (blocks, C) = */, const floatX *dx, const int32_t *ids,
                              const int32_t *order, int first, int V, int N, int C) {
    SHARED(int32_t, token, TOKEN_BLOCK);
    SHARED(int32_t, id, TOKEN_BLOCK + TOKENS_AHEAD); // rows of this rank's table; -1: the token of another rank
    int64_t begin = (int64_t)blockIdx.x * TOKEN_BLOCK, column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    int count = (int)min_i64(TOKEN_BLOCK, N - begin);
    if ((int)threadIdx.x < count) {
        token[threadIdx.x] = order[begin + threadIdx.x];
        id[threadIdx.x] = slice_row(ids[order[begin + threadIdx.x]], first, V);
    } else if (threadIdx.x < TOKEN_BLOCK + TOKENS_AHEAD) {
        id[threadIdx.x] = -1;
    }
    int32_t earlier = begin ? slice_row(ids[order[begin - 1]], first, V) : -1; // a run of this id began earlier
    __syncthreads();
    const int exists = column < C;
    Waiting<W> rows[TOKENS_AHEAD];
    float old[TOKENS_AHEAD][W], v[W], sum[W] = {};
    for (int k0 = 0; k0 < count; k0 += TOKENS_AHEAD) {
        int any = -1; // other ranks' tokens are sorted next to each other; their rows of dx are not read
        UNROLL for (int r = 0; r < TOKENS_AHEAD; r++) any = max(any, id[k0 + r]);
        if (any < 0) continue;
        UNROLL for (int r = 0; r < TOKENS_AHEAD; r++) {
            int k = k0 + r, run_ends = id[k] >= 0 && id[k + 1] != id[k];
            if (exists) fetch(rows[r], dx + (int64_t)token[k < count ? k : k0] * C + column);
            if (exists && run_ends && id[k] != earlier) load(old[r], dembed + (int64_t)id[k] * C + column);
        }
        issue_loads();
        UNROLL for (int r = 0; r < TOKENS_AHEAD; r++) {
            int k = k0 + r;
            if (!exists || id[k] < 0) continue;
            unpack(v, rows[r]);
            UNROLL for (int j = 0; j < W; j++) sum[j] += v[j];
            if (id[k + 1] == id[k]) continue; // the run continues
            if (id[k] == earlier) {
                store(partial + (int64_t)blockIdx.x * C + column, sum);
            } else {
                UNROLL for (int j = 0; j < W; j++) old[r][j] += sum[j];
                store(dembed + (int64_t)id[k] * C + column, old[r]);
            }
            UNROLL for (int j = 0; j < W; j++) sum[j] = 0;
        }
    }
}

/* Step 3. The run that crosses from block b - 1 of the sorted tokens into block b, unless it already crossed into block
 * b - 1: then an earlier block of this kernel adds it. A binary search finds the run's last block. */
template <int W>
__global__ void __launch_bounds__(WARP *SUM_LANES)
    embedding_runs_kernel(float *dembed, const float *partial, const int32_t *ids, const int32_t *order, int first,
                          int V, int N, int C) {
    SHARED(float, sums, SUM_LANES *WARP *W);
    int b = (int)blockIdx.x + 1, last = (int)((N - 1) / TOKEN_BLOCK);
    const int32_t *tokens = order + (int64_t)b * TOKEN_BLOCK; // block b begins here
    int32_t id = ids[*tokens];
    int64_t row = slice_row(id, first, V);
    if (row < 0 || ids[tokens[-1]] != id || (b > 1 && ids[tokens[-TOKEN_BLOCK - 1]] == id)) return;
    int low = 0, high = last - b; // the run's last block is between b + low and b + high
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (ids[tokens[(int64_t)middle * TOKEN_BLOCK]] == id) low = middle;
        else high = middle - 1;
    }
    add_rows<W>(dembed + row * C, partial + (int64_t)b * C, low + 1, C, sums);
}

static size_t embedding_order_bytes(int N) { return (size_t)round_up((int64_t)N * 4, 256); }
static size_t cuda_embedding_backward_scratch(int N, int C) {
    return embedding_order_bytes(N) + (size_t)(blocks_of(N, TOKEN_BLOCK) * C) * sizeof(float);
}
static void cuda_embedding_backward(OpStream *on, float *dembed, const floatX *dx, const int32_t *ids, int first, int N,
                                    int C, int V, void *workspace) {
    if (!N) return;
    int32_t *order = (int32_t *)workspace; // (N) the tokens, sorted by id
    float *partial = (float *)((char *)workspace + embedding_order_bytes(N)); // (blocks, C)
    unsigned blocks = (unsigned)blocks_of(N, TOKEN_BLOCK);
    KERNEL(on, sort_tokens_kernel, (unsigned)blocks_of(N, WARP * SORT_TOKENS), SORT_BLOCK, 0, order, ids, N);
    KERNEL_BY_WIDTH(on, in_vectors(C, WIDE, dx, dembed), WIDE, embedding_backward_kernel,
                    dim3(blocks, (unsigned)blocks_of(C, BLOCK * W)), BLOCK, 0, dembed, partial, dx, ids, order, first,
                    V, N, C);
    if (blocks > 1)
        KERNEL_BY_WIDTH(on, in_vectors(C, FLAT, dembed), FLAT, embedding_runs_kernel,
                        dim3(blocks - 1, (unsigned)blocks_of(C, WARP * W)), dim3(WARP, SUM_LANES), 0, dembed, partial,
                        ids, order, first, V, N, C);
}

#endif
