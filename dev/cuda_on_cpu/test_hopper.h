/* test_hopper.h: the instructions of compute capability 9.0, each result next to a plain computation. Addresses of
 * swizzled and canonical layouts are those of NVIDIA's documents, as numbers. */
#ifndef TEST_HOPPER_H
#define TEST_HOPPER_H
#include "test.h"
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

static PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
    MUST(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status));
    if (status != cudaDriverEntryPointSuccess) must(1, "cudaGetDriverEntryPointByVersion");
    return (PFN_cuTensorMapEncodeTiled_v12000)function;
}

/* A map of a bf16 tensor (planes, rows, columns) whose rows have `pitch` elements; boxes of (box_rows, box_columns). */
static CUtensorMap map_of(const bf16 *p, int planes, int rows, int columns, int pitch, int box_rows, int box_columns,
                          CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    CUtensorMap map;
    cuuint64_t dims[4] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)planes, 1};
    cuuint64_t strides[3] = {(cuuint64_t)pitch * 2, (cuuint64_t)pitch * 2 * (cuuint64_t)rows,
                             (cuuint64_t)pitch * 2 * (cuuint64_t)rows * (cuuint64_t)planes};
    cuuint32_t box[4] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    MUST(tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)p, dims, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

static bf16 *device_bf16(size_t count, const std::vector<float> &x) {
    std::vector<bf16> h(count);
    for (size_t i = 0; i < count; i++) h[i] = bf16(i < x.size() ? x[i] : 0.0f);
    bf16 *d;
    MUST(cudaMalloc(&d, count * sizeof *d));
    MUST(cudaMemcpy(d, h.data(), count * sizeof *d, cudaMemcpyHostToDevice));
    return d;
}

/* A matrix descriptor from its fields, in bytes; swizzle: 0 none, 1 128 bytes, 2 64, 3 32 (PTX ISA). */
static uint64_t describe(const void *tile, uint32_t leading, uint32_t stride, uint64_t swizzle) {
    return (uint64_t)(ptx_shared(tile) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           swizzle << 62;
}

// ---------------------------------------------------------------------------
// a matmul as a real kernel writes it: a producer warp loads stages, a warpgroup multiplies

enum { TILE_M = 64, TILE_K = 64, STAGES = 3, CONSUMERS = 128, A_BYTES = TILE_M * TILE_K * 2 };

template <int N> struct Stage {
    char a[A_BYTES], b[N * TILE_K * 2];
};

struct ProductMaps {
    CUtensorMap a, b;
};

template <int N, bool TA, bool TB>
__device__ void load_stages(const ProductMaps &maps, Stage<N> *stages, uint64_t *full, uint64_t *empty, int tiles,
                            int m, int n) {
    for (int t = 0; t < tiles; t++) {
        Stage<N> &s = stages[t % STAGES];
        uint64_t *f = &full[t % STAGES];
        ptx_mbarrier_wait(&empty[t % STAGES], (t / STAGES & 1) ^ 1);
        ptx_mbarrier_arrive_expect(f, (int)sizeof s);
        if (TA) ptx_tma_load(s.a, &maps.a, f, m, t * TILE_K, 0, 0);
        else ptx_tma_load(s.a, &maps.a, f, t * TILE_K, m, 0, 0);
        if (!TB) ptx_tma_load(s.b, &maps.b, f, t * TILE_K, n, 0, 0);
        for (int i = 0; i < N && TB; i += 64)
            ptx_tma_load(s.b + i * TILE_K * 2, &maps.b, f, n + i, t * TILE_K, 0, 0);
    }
}

/* d (64, N) of a stage: four steps of 16 k. */
template <int N, bool TA, bool TB> __device__ void multiply_stage(float (&d)[N / 2], const Stage<N> &s, bool first) {
    ptx_wgmma_fence();
    for (int k = 0; k < TILE_K / 16; k++)
        ptx_wgmma<TA, TB>(d, describe(s.a + k * (TA ? 2048 : 32), 0, 1024, 1),
                          describe(s.b + k * (TB ? 2048 : 32), TB ? TILE_K * 128 : 0, 1024, 1), !first || k);
    ptx_wgmma_commit();
}

template <int N> __device__ void write_tile(float *c, const float (&d)[N / 2], int m, int n, int M, int columns) {
    const int t = (int)threadIdx.x;
    for (int i = 0; i < N / 2; i++) {
        int row = m + t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = n + i / 4 * 8 + t % 4 * 2 + i % 2;
        if (row < M && column < columns) c[row * columns + column] = d[i];
    }
}

/* c (M, columns) = a b^T over k, a block of 160 threads a tile. */
template <int N, bool TA, bool TB>
__global__ void stages_product(const __grid_constant__ ProductMaps maps, float *c, int M, int columns, int K) {
    DYN_SHARED(Stage<N>, stages);
    SHARED(uint64_t, full, STAGES);
    SHARED(uint64_t, empty, STAGES);
    const int tiles = (K + TILE_K - 1) / TILE_K, m = (int)blockIdx.x * TILE_M, n = (int)blockIdx.y * N;
    stages = (Stage<N> *)((char *)stages + (-(int)ptx_shared(stages) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ptx_mbarrier_init(&full[i], 1);
            ptx_mbarrier_init(&empty[i], CONSUMERS);
        }
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) load_stages<N, TA, TB>(maps, stages, full, empty, tiles, m, n);
        return;
    }
    float d[N / 2];
    for (int t = 0; t < tiles; t++) {
        ptx_mbarrier_wait(&full[t % STAGES], t / STAGES & 1);
        multiply_stage<N, TA, TB>(d, stages[t % STAGES], !t);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(d);
        ptx_mbarrier_arrive(&empty[t % STAGES]);
    }
    write_tile<N>(c, d, m, n, M, columns);
}

static std::vector<float> small_floats(size_t count, size_t from) {
    std::vector<float> x(count);
    for (size_t i = 0; i < count; i++) x[i] = small(i + from);
    return x;
}

template <int N, bool TA, bool TB> static std::vector<float> run_stages_product(int M, int columns, int K) {
    int a_pitch = ((TA ? M : K) + 7) / 8 * 8, b_pitch = ((TB ? columns : K) + 7) / 8 * 8;
    size_t a_count = (size_t)(TA ? K : M) * (size_t)a_pitch, b_count = (size_t)(TB ? K : columns) * (size_t)b_pitch;
    bf16 *a = device_bf16(a_count, small_floats(a_count, 0)), *b = device_bf16(b_count, small_floats(b_count, 77));
    float *c = device_floats((size_t)M * (size_t)columns, nullptr);
    ProductMaps maps = {map_of(a, 1, TA ? K : M, TA ? M : K, a_pitch, 64, 64),
                        map_of(b, 1, TB ? K : columns, TB ? columns : K, b_pitch, TB ? 64 : N, 64)};
    const size_t shared = sizeof(Stage<N>) * STAGES + 1024;
    MUST(cudaFuncSetAttribute(stages_product<N, TA, TB>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    RUN((stages_product<N, TA, TB>), dim3((unsigned)(M + 63) / 64, (unsigned)(columns + N - 1) / N), CONSUMERS + 32,
        shared, 0, maps, c, M, columns, K);
    std::vector<float> h = host_floats(c, (size_t)M * (size_t)columns);
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    return h;
}

template <int N, bool TA, bool TB> static void test_stages_product(int M, int columns, int K) {
    int a_pitch = ((TA ? M : K) + 7) / 8 * 8, b_pitch = ((TB ? columns : K) + 7) / 8 * 8;
    std::vector<float> got = run_stages_product<N, TA, TB>(M, columns, K);
    double worst = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < columns; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += (double)small((size_t)(TA ? k * a_pitch + i : i * a_pitch + k)) *
                       (double)small((size_t)(TB ? k * b_pitch + j : j * b_pitch + k) + 77);
            double error = fabs(sum - (double)got[(size_t)(i * columns + j)]);
            worst = error <= worst ? worst : error; // a NaN becomes the worst
        }
    check(worst == 0, "wgmma, N = %d, %s a, %s b, (%d, %d, %d) in stages by TMA: worst error %g", N,
          TA ? "transposed" : "plain", TB ? "transposed" : "plain", M, columns, K, worst);
}

static void test_hopper() {
    test_stages_product<64, false, false>(64, 64, 64);
    test_stages_product<64, false, false>(70, 72, 424);
    test_stages_product<128, false, false>(130, 72, 264);
    test_stages_product<128, false, true>(72, 136, 320);
    test_stages_product<128, true, false>(72, 136, 320);
    test_stages_product<64, true, true>(72, 136, 320);
    test_stages_product<128, true, true>(72, 136, 320);
}
#endif
