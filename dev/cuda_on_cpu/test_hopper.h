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

enum Mistake { // planted by test_hopper_planted.h
    NO_MISTAKE,
    WRONG_PARITY,     // consumers wait for the phase before
    STAGE_REUSED,     // the producer does not wait for the consumers
    TOO_FEW_BYTES,    // it announces a alone
    WRONG_DESCRIPTOR, // without a swizzle
    NO_FENCE,         // no ptx_wgmma_fence
    READ_EARLY,       // d is used before the wait
    FREED_EARLY       // consumers free a stage before the wait
};

template <int N> struct Stage { char a[A_BYTES], b[N * TILE_K * 2]; };

struct ProductMaps {
    CUtensorMap a, b;
};

template <int N, bool TA, bool TB, Mistake WRONG>
__device__ void load_stages(const ProductMaps &maps, Stage<N> *stages, uint64_t *full, uint64_t *empty, int tiles,
                            int m, int n) {
    for (int t = 0; t < tiles; t++) {
        Stage<N> &s = stages[t % STAGES];
        uint64_t *f = &full[t % STAGES];
        if (WRONG != STAGE_REUSED) ptx_mbarrier_wait(&empty[t % STAGES], (t / STAGES & 1) ^ 1);
        ptx_mbarrier_arrive_expect(f, (int)(WRONG == TOO_FEW_BYTES ? sizeof s.a : sizeof s));
        if (TA) ptx_tma_load(s.a, &maps.a, f, m, t * TILE_K, 0, 0);
        else ptx_tma_load(s.a, &maps.a, f, t * TILE_K, m, 0, 0);
        if (!TB) ptx_tma_load(s.b, &maps.b, f, t * TILE_K, n, 0, 0);
        for (int i = 0; i < N && TB; i += 64) ptx_tma_load(s.b + i * TILE_K * 2, &maps.b, f, n + i, t * TILE_K, 0, 0);
    }
}

/* d (64, N) += a b^T of a stage: four steps of 16 k. */
template <int N, bool TA, bool TB, Mistake WRONG>
__device__ void multiply_stage(float (&d)[N / 2], const Stage<N> &s, bool first) {
    if (WRONG != NO_FENCE) ptx_wgmma_fence();
    for (int k = 0; k < TILE_K / 16; k++)
        ptx_wgmma<TA, TB>(d, describe(s.a + k * (TA ? 2048 : 32), 0, 1024, WRONG == WRONG_DESCRIPTOR ? 0 : 1),
                          describe(s.b + k * (TB ? 2048 : 32), TB ? TILE_K * 128 : 0, 1024, 1), !first || k);
    ptx_wgmma_commit();
}

/* Row and column in a tile of register i of d of a thread (PTX ISA, "register fragment layout for accumulator matrix
 * D"). */
static int d_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8; }
static int d_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

template <int R> __device__ void write_tile(float *c, const float (&d)[R], int m, int n, int M, int columns) {
    for (int i = 0; i < R; i++) {
        int row = m + d_row((int)threadIdx.x, i), column = n + d_column((int)threadIdx.x, i);
        if (row < M && column < columns) c[row * columns + column] = d[i];
    }
}

/* c (M, columns) = a b^T over k, a block of 160 threads a tile. */
template <int N, bool TA, bool TB, Mistake WRONG>
__global__ void stages_product(const __grid_constant__ ProductMaps maps, float *c, int M, int columns, int K) {
    DYN_SHARED(Stage<N>, stages);
    SHARED(uint64_t, full, STAGES);
    SHARED(uint64_t, empty, STAGES);
    const int tiles = (K + TILE_K - 1) / TILE_K, m = (int)blockIdx.x * TILE_M, n = (int)blockIdx.y * N;
    stages = (Stage<N> *)((char *)stages + (-(int)ptx_shared(stages) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ptx_mbarrier_init(&full[i], 1);
            ptx_mbarrier_init(&empty[i], 1);
        }
        ptx_mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) load_stages<N, TA, TB, WRONG>(maps, stages, full, empty, tiles, m, n);
        return;
    }
    float d[N / 2];
    for (int t = 0; t < tiles; t++) {
        ptx_mbarrier_wait(&full[t % STAGES], (t / STAGES & 1) ^ (WRONG == WRONG_PARITY));
        multiply_stage<N, TA, TB, WRONG>(d, stages[t % STAGES], !t);
        if (WRONG == FREED_EARLY && threadIdx.x == 0) ptx_mbarrier_arrive(&empty[t % STAGES]);
        if (WRONG == READ_EARLY && t == tiles - 1) write_tile(c, d, m, n, M, columns);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(d);
        if (WRONG != FREED_EARLY && threadIdx.x == 0) ptx_mbarrier_arrive(&empty[t % STAGES]);
    }
    if (WRONG != READ_EARLY) write_tile(c, d, m, n, M, columns);
}

struct Product { // a (M, K) or (K, M); b (columns, K) or (K, columns)
    int M, columns, K;
};

static std::vector<float> small_floats(size_t count, size_t from) {
    std::vector<float> x(count);
    for (size_t i = 0; i < count; i++) x[i] = small(i + from);
    return x;
}

static int pitch_of(int columns) { return (columns + 7) / 8 * 8; }

template <int N, bool TA, bool TB, Mistake WRONG = NO_MISTAKE>
static std::vector<float> run_stages_product(Product p, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    const int a_rows = TA ? p.K : p.M, a_columns = TA ? p.M : p.K, b_rows = TB ? p.K : p.columns,
              b_columns = TB ? p.columns : p.K;
    size_t a_count = (size_t)(a_rows * pitch_of(a_columns)), b_count = (size_t)(b_rows * pitch_of(b_columns));
    bf16 *a = device_bf16(a_count, small_floats(a_count, 0)), *b = device_bf16(b_count, small_floats(b_count, 77));
    float *c = device_floats((size_t)(p.M * p.columns), nullptr);
    ProductMaps maps = {map_of(a, 1, a_rows, a_columns, pitch_of(a_columns), 64, 64, swizzle),
                        map_of(b, 1, b_rows, b_columns, pitch_of(b_columns), TB ? 64 : N, 64)};
    const size_t shared = sizeof(Stage<N>) * STAGES + 1024;
    const dim3 grid((unsigned)(p.M + 63) / 64, (unsigned)(p.columns + N - 1) / N);
    MUST(cudaFuncSetAttribute(stages_product<N, TA, TB, WRONG>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              (int)shared));
    RUN((stages_product<N, TA, TB, WRONG>), grid, CONSUMERS + 32, shared, 0, maps, c, p.M, p.columns, p.K);
    std::vector<float> h = host_floats(c, (size_t)(p.M * p.columns));
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    return h;
}

template <int N, bool TA, bool TB> static void test_stages_product(Product p) {
    const int a_pitch = pitch_of(TA ? p.M : p.K), b_pitch = pitch_of(TB ? p.columns : p.K);
    std::vector<float> got = run_stages_product<N, TA, TB>(p);
    double worst = 0;
    for (int i = 0; i < p.M; i++)
        for (int j = 0; j < p.columns; j++) {
            double sum = 0;
            for (int k = 0; k < p.K; k++)
                sum += (double)small((size_t)(TA ? k * a_pitch + i : i * a_pitch + k)) *
                       (double)small((size_t)(TB ? k * b_pitch + j : j * b_pitch + k) + 77);
            double error = fabs(sum - (double)got[(size_t)(i * p.columns + j)]);
            worst = error <= worst ? worst : error; // a NaN becomes the worst
        }
    check(worst == 0, "wgmma, N = %d, %s a, %s b, (%d, %d, %d) in stages by TMA: worst error %g", N,
          TA ? "transposed" : "plain", TB ? "transposed" : "plain", p.M, p.columns, p.K, worst);
}

static uint64_t stages_fingerprint() {
    std::vector<float> x = run_stages_product<64, false, true>({70, 72, 424});
    return fingerprint(1, x.data(), x.size() * 4);
}

static void test_stages() {
    test_stages_product<64, false, false>({64, 64, 64});
    test_stages_product<64, false, false>({70, 72, 424});
    test_stages_product<128, false, false>({130, 72, 264});
    test_stages_product<128, false, true>({72, 136, 320});
    test_stages_product<128, true, false>({72, 136, 320});
    test_stages_product<64, true, true>({72, 136, 320});
    test_stages_product<128, true, true>({72, 136, 320});
    check(!different_bits(stages_fingerprint), "stages by TMA: %d seeds give equal bits", SEEDS);
}

// ---------------------------------------------------------------------------
// where the elements of an operand lie, by the documents

struct PlacedElement {
    int mn, k;
    uint32_t address; // bytes from the matrix's start
};

static void test_addresses(const char *title, uint64_t descriptor, bool k_major, std::vector<PlacedElement> wanted) {
    const emu::MatrixDescriptor d = emu::decode_descriptor(descriptor);
    int wrong = 0;
    for (const PlacedElement &w : wanted) {
        uint32_t got = emu::element_address(d, k_major, w.mn, w.k);
        if (got != w.address) printf("       element (%d, %d) is at %u, wanted %u\n", w.mn, w.k, got, w.address);
        wrong += got != w.address;
    }
    check(!wrong, "%s: %d of %zu elements elsewhere", title, wrong, wanted.size());
}

/* The examples of PTX ISA, section "Canonical Layouts", with their encodings of leading and stride dimension byte
 * offsets. The figures with tf32 show pieces of 16 bytes, which hold 8 bf16. An address is the "exact layout" times 2
 * bytes, then its Swizzle. The 128-byte swizzle has no figure with numbers: it is the line of the table above them. */
static void test_canonical_layouts() {
    const uint64_t leading = 1ull << 16, stride = 1ull << 32, swizzle = 1ull << 62;
    test_addresses("PTX ISA, figure K major, no-swizzling", 16 * leading | 8 * stride, true,
                   {{0, 0, 0}, {1, 0, 16}, {7, 7, 126}, {8, 0, 128}, {0, 8, 256}, {9, 15, 414}});
    test_addresses("PTX ISA, figure K major, 32B swizzling", leading | 16 * stride | 3 * swizzle, true,
                   {{0, 0, 0}, {1, 0, 32}, {0, 8, 16}, {4, 0, 144}, {4, 8, 128}, {8, 0, 256}, {12, 8, 384}});
    test_addresses(
        "PTX ISA, figure MN major, no-swizzling", 16 * leading | 8 * stride, false,
        {{0, 0, 0}, {7, 0, 14}, {8, 0, 128}, {0, 1, 16}, {0, 7, 112}, {0, 8, 256}, {8, 8, 384}, {9, 15, 498}});
    test_addresses(
        "PTX ISA, figure MN major, 32B swizzling", 16 * leading | 32 * stride | 3 * swizzle, false,
        {{8, 0, 16}, {16, 0, 256}, {0, 1, 32}, {0, 4, 144}, {8, 4, 128}, {0, 8, 512}, {24, 13, 928}, {31, 15, 1006}});
    test_addresses(
        "PTX ISA, figure MN major, 64B swizzling", 32 * leading | 64 * stride | 2 * swizzle, false,
        {{8, 0, 16}, {32, 0, 512}, {0, 2, 144}, {0, 4, 288}, {0, 6, 432}, {24, 6, 384}, {40, 9, 1616}, {63, 15, 1998}});
    test_addresses("PTX ISA, table of canonical layouts, MN major, 128B", 512 * leading | 64 * stride | swizzle, false,
                   {{0, 1, 144}, {8, 1, 128}, {0, 7, 1008}, {56, 7, 896}, {0, 8, 1024}, {0, 9, 1168}, {64, 0, 8192}});
    test_addresses("PTX ISA, table of canonical layouts, K major, 128B", leading | 64 * stride | swizzle, true,
                   {{1, 0, 144}, {1, 8, 128}, {7, 0, 1008}, {7, 15, 1006}, {8, 0, 1024}, {9, 8, 1152}});
    test_addresses("K major, 128B, the second 16 k of 64", 2ull | leading | 64 * stride | swizzle, true,
                   {{0, 0, 32}, {1, 0, 176}, {2, 0, 256}, {7, 8, 960}});
}

/* A CuTe layout of a matrix (mn, k) of 16-bit elements, in bytes: ((8 or T, …), …) as in the table "Canonical Layouts",
 * with its Swizzle<bits, 4, 3>. */
struct CanonicalLayout {
    const char *name;
    bool k_major;
    int bits, leading, stride; // bytes; bits of the swizzle
};

static size_t canonical_byte(const CanonicalLayout &c, int mn, int k) {
    const int T = 8, atoms = 1 << c.bits; // of 16 bytes in the swizzle's width
    int at = 0;
    if (c.k_major) at = mn % 8 * atoms * T * 2 + mn / 8 * c.stride + k % T * 2 + k / T * (c.bits ? T * 2 : c.leading);
    else
        at = mn % T * 2 + mn / T % atoms * T * 2 + mn / (T * atoms) * (c.bits ? c.leading : c.stride) +
             k % 8 * atoms * T * 2 + k / 8 * (c.bits ? c.stride : c.leading);
    for (int b = 0; b < c.bits; b++) at ^= (at >> (7 + b) & 1) << (4 + b);
    return (size_t)at;
}

enum { IMAGE = 16 << 10 };

/* d (64, 128) = a b, one wgmma; the images are what shared memory holds. */
template <int TA, int TB, bool PUBLISH>
__global__ void images_product(float *c, const uint4 *a, const uint4 *b, uint64_t a_fields, uint64_t b_fields) {
    DYN_SHARED(uint4, images);
    images = (uint4 *)((char *)images + (-(int)ptx_shared(images) & 1023));
    for (int i = (int)threadIdx.x; i < IMAGE / 16; i += 128) {
        images[i] = a[i];
        images[IMAGE / 16 + i] = b[i];
    }
    if (PUBLISH) ptx_fence_proxy_async();
    __syncthreads();
    float d[64];
    for (float &x : d) x = 0;
    ptx_wgmma_fence();
    ptx_wgmma<TA, TB>(d, a_fields | ptx_shared(images) >> 4, b_fields | ptx_shared(images + IMAGE / 16) >> 4, 0);
    ptx_wgmma_commit();
    ptx_wgmma_wait<0>();
    write_tile(c, d, 0, 0, 64, 128);
}

static void *image_of(const CanonicalLayout &c, int count, size_t from) {
    std::vector<bf16> image(IMAGE / 2, bf16(999.0f));
    for (int mn = 0; mn < count; mn++)
        for (int k = 0; k < 16; k++) image[canonical_byte(c, mn, k) / 2] = bf16(small((size_t)(mn * 16 + k) + from));
    void *d;
    MUST(cudaMalloc((char **)&d, IMAGE));
    MUST(cudaMemcpy(d, image.data(), IMAGE, cudaMemcpyHostToDevice));
    return d;
}

static uint64_t fields_of(const CanonicalLayout &c) {
    static const uint64_t modes[] = {0, 3, 2, 1}; // none, 32, 64, 128 bytes
    return (uint64_t)(c.leading >> 4) << 16 | (uint64_t)(c.stride >> 4) << 32 | modes[c.bits] << 62;
}

static void test_images_product(const CanonicalLayout &a, const CanonicalLayout &b) {
    uint4 *a_image = (uint4 *)image_of(a, 64, 0), *b_image = (uint4 *)image_of(b, 128, 501);
    float *c = device_floats(64 * 128, nullptr);
    void (*const kernels[2][2])(float *, const uint4 *, const uint4 *, uint64_t,
                                uint64_t) = {{images_product<1, 1, true>, images_product<1, 0, true>},
                                             {images_product<0, 1, true>, images_product<0, 0, true>}};
    RUN(kernels[a.k_major][b.k_major], 1, 128, 2 * IMAGE + 1024, 0, c, a_image, b_image, fields_of(a), fields_of(b));
    std::vector<float> got = host_floats(c, 64 * 128);
    int wrong = 0;
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < 128; j++) {
            float sum = 0;
            for (size_t k = 0; k < 16; k++) sum += small(i * 16 + k) * small(j * 16 + k + 501);
            wrong += !(sum == got[i * 128 + j]);
        }
    check(!wrong, "wgmma, a %s, b %s: %d of 8192 elements differ", a.name, b.name, wrong);
    for (void *p : {(void *)a_image, (void *)b_image, (void *)c}) MUST(cudaFree(p));
}

static void test_images() {
    static const CanonicalLayout layouts[] = {
        {"K major", true, 0, 2048, 128},
        {"MN major", false, 0, 2176, 128},
        {"K major, 32B", true, 1, 16, 512},
        {"MN major, 32B", false, 1, 512, 256},
        {"K major, 64B", true, 2, 16, 512},
        {"MN major, 64B", false, 2, 1024, 512},
        {"K major, 128B", true, 3, 16, 1024},
        {"MN major, 128B", false, 3, 2048, 1024},
        {"MN major, 128B, k apart", false, 3, 1024, 4096},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        test_images_product(layouts[i], layouts[(i * 4 + 3) % (sizeof layouts / sizeof *layouts)]);
}

// ---------------------------------------------------------------------------
// boxes of TMA

/* Copies one box from a tensor to shared memory, shared memory as it is to `image`, and the box to another tensor. */
__global__ void one_box(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out, char *image,
                        int bytes, int offset, int4 at) {
    DYN_SHARED(char, box);
    SHARED(uint64_t, arrived, 1);
    box += (-(int)ptx_shared(box) & 1023) + offset;
    if (threadIdx.x == 0) {
        ptx_mbarrier_init(arrived, 1);
        ptx_mbarrier_init_fence();
        ptx_mbarrier_arrive_expect(arrived, bytes);
        ptx_tma_load(box, &in, arrived, at.x, at.y, at.z, at.w);
    }
    __syncthreads();
    ptx_mbarrier_wait(arrived, 0);
    for (int i = (int)threadIdx.x; i < bytes; i += (int)blockDim.x) image[i] = box[i];
    if (threadIdx.x == 0) {
        ptx_tma_store(&out, box, at.x, at.y, at.z, at.w);
        ptx_tma_store_commit();
        ptx_tma_store_wait_read<0>();
    }
}

enum { PLANES = 3, ROWS = 21, COLUMNS = 75, PITCH = 80, TENSOR = PLANES * ROWS * PITCH };

static float tensor_value(int plane, int row, int column) {
    return (float)((plane * ROWS + row) * COLUMNS + column) /
           32.0f; // rounded to bf16, and different next to each other
}

struct BoxCase {
    CUtensorMapSwizzle swizzle;
    int rows, columns;      // of the box
    int plane, row, column; // where it begins
    int offset;             // in shared memory
};

/* For a box of rows as wide as the swizzle: the 128-byte lines of shared memory hold 16-byte pieces in this order (CUDA
 * programming guide, "The Swizzle Modes", table "Swizzle Pattern Pointer Offset Formula and Index Relation"). */
static int piece_place(CUtensorMapSwizzle swizzle, int offset, int piece) {
    static const int order[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5},
                                    {3, 2, 1, 0, 7, 6, 5, 4}, {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                                    {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};
    static const int lines[] = {1, 2, 4, 8}; // after which the pattern repeats: none, 32, 64, 128 bytes
    const int line = piece / 8;
    return line * 8 + order[(line + offset / 128) % lines[swizzle]][piece % 8];
}

static void test_box(const BoxCase &b) {
    std::vector<float> values(TENSOR);
    for (int i = 0; i < TENSOR; i++) values[(size_t)i] = tensor_value(i / PITCH / ROWS, i / PITCH % ROWS, i % PITCH);
    bf16 *in = device_bf16(TENSOR, values), *out = device_bf16(TENSOR, std::vector<float>(TENSOR, -1.0f));
    const int bytes = b.rows * b.columns * 2;
    char *image;
    MUST(cudaMalloc(&image, (size_t)bytes));
    RUN(one_box, 1, 64, 4096 + 2048, 0, map_of(in, PLANES, ROWS, COLUMNS, PITCH, b.rows, b.columns, b.swizzle),
        map_of(out, PLANES, ROWS, COLUMNS, PITCH, b.rows, b.columns, b.swizzle), image, bytes, b.offset,
        make_int4(b.column, b.row, b.plane, 0));
    std::vector<bf16> got((size_t)bytes / 2), stored(TENSOR);
    MUST(cudaMemcpy(got.data(), image, (size_t)bytes, cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy(stored.data(), out, TENSOR * 2, cudaMemcpyDeviceToHost));
    int wrong = 0, elsewhere = 0;
    for (int i = 0; i < bytes / 2; i++) {
        const int row = b.row + i / b.columns, column = b.column + i % b.columns, piece = i / 8;
        const bool inside =
            b.plane >= 0 && b.plane < PLANES && row >= 0 && row < ROWS && column >= 0 && column < COLUMNS;
        const float want = inside ? (float)bf16(tensor_value(b.plane, row, column)) : 0.0f;
        wrong += !((float)got[(size_t)(piece_place(b.swizzle, b.offset, piece) * 8 + i % 8)] == want);
    }
    for (int i = 0; i < TENSOR; i++) {
        const int plane = i / PITCH / ROWS, row = i / PITCH % ROWS, column = i % PITCH;
        const bool inside = plane == b.plane && row >= b.row && row < b.row + b.rows && column >= b.column &&
                            column < b.column + b.columns && column < COLUMNS;
        elsewhere += !((float)stored[(size_t)i] == (inside ? (float)bf16(tensor_value(plane, row, column)) : -1.0f));
    }
    check(!wrong && !elsewhere,
          "TMA, swizzle %d, box (%d, %d) from (%d, %d, %d): %d loaded and %d stored elements differ", (int)b.swizzle,
          b.rows, b.columns, b.plane, b.row, b.column, wrong, elsewhere);
    for (void *p : {(void *)in, (void *)out, (void *)image}) MUST(cudaFree(p));
}

static void test_boxes() {
    const CUtensorMapSwizzle none = CU_TENSOR_MAP_SWIZZLE_NONE, by_128 = CU_TENSOR_MAP_SWIZZLE_128B;
    test_box({none, 8, 16, 1, 5, 8, 0});
    test_box({none, 16, 40, 2, 12, 48, 128}); // over the ends of rows and columns
    test_box({CU_TENSOR_MAP_SWIZZLE_32B, 24, 16, 0, 0, 16, 0});
    test_box({CU_TENSOR_MAP_SWIZZLE_64B, 24, 32, 1, 2, 40, 0});
    test_box({by_128, 16, 64, 0, 0, 0, 0});
    test_box({by_128, 16, 64, 2, 9, 64, 0});   // over both ends
    test_box({by_128, 16, 64, 1, -4, -16, 0}); // before both
    test_box({by_128, 8, 64, 1, 3, 0, 384});   // the pattern goes by address: it begins with line 3
    test_box({by_128, 8, 64, 3, 0, 0, 0});     // outside
}

/* What the driver refuses. */
static void test_map_arguments() {
    struct Arguments {
        cuuint64_t dims[4] = {64, 16, 4, 2}, strides[3] = {128, 2048, 8192};
        cuuint32_t box[4] = {64, 8, 1, 1}, steps[4] = {1, 1, 1, 1}, rank = 4;
        size_t misaligned = 0;
        CUtensorMapInterleave interleave = CU_TENSOR_MAP_INTERLEAVE_NONE;
    } wrong[13];
    bf16 *p = device_bf16(16384, {});
    wrong[1].rank = 0;
    wrong[2].rank = 6;
    wrong[3].misaligned = 8;
    wrong[4].dims[1] = 0;
    wrong[5].dims[2] = (1ull << 32) + 1;
    wrong[6].strides[0] = 136;
    wrong[7].strides[1] = 1ull << 40;
    wrong[8].box[1] = 257;
    wrong[9].box[0] = 72; // 144 bytes are more than the swizzle's width
    wrong[10].box[0] = 4; // not 16 bytes
    wrong[11].steps[1] = 9;
    wrong[12].interleave = CU_TENSOR_MAP_INTERLEAVE_32B; // wants another swizzle
    auto encode = [p](const Arguments &w) {
        CUtensorMap map;
        return tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, w.rank, (char *)p + w.misaligned, w.dims,
                                    w.strides, w.box, w.steps, w.interleave, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    int right = 0;
    for (const Arguments &w : wrong) right += encode(w) == (&w == wrong ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    check(right == 13, "cuTensorMapEncodeTiled: %d of 13 calls return what the driver does", right);
    cuda_on_cpu_fail("cuTensorMapEncodeTiled", (cudaError_t)CUDA_ERROR_NOT_INITIALIZED, 1);
    right = encode(wrong[0]) == CUDA_ERROR_NOT_INITIALIZED && encode(wrong[0]) == CUDA_SUCCESS;
    cuda_on_cpu.chip = 80;
    right &= encode(wrong[0]) == CUDA_ERROR_INVALID_VALUE;
    cuda_on_cpu.chip = 90;
    check(right, "cuTensorMapEncodeTiled fails as injected, and on a chip without TMA");
    MUST(cudaFree(p));
}

static void test_entry_point() {
    void *function = &function;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSuccess;
    int right = 1;
    auto ask = [&](const char *name, unsigned version) {
        return cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status);
    };
    cuda_on_cpu.tensor_maps = 0;
    right &= !ask("cuTensorMapEncodeTiled", 12000) && !function && status == cudaDriverEntryPointSymbolNotFound;
    cuda_on_cpu.tensor_maps = 1;
    right &= !ask("cuTensorMapEncodeTiled", 12000) && function && status == cudaDriverEntryPointSuccess;
    right &= !ask("cuTensorMapEncodeTiled", 11080) && !function && status == cudaDriverEntryPointVersionNotSufficent;
    right &= !ask("cuNothing", 12000) && !function && status == cudaDriverEntryPointSymbolNotFound;
    right &= ask("cuTensorMapEncodeTiled", 99000) == cudaErrorInvalidValue;
    cudaGetLastError();
    cuda_on_cpu_fail("cudaGetDriverEntryPointByVersion", cudaErrorInsufficientDriver, 1);
    right &= ask("cuTensorMapEncodeTiled", 12000) == cudaErrorInsufficientDriver;
    cudaGetLastError();
    check(right, "cudaGetDriverEntryPointByVersion finds the driver's function, or says that there is none");
}

// ---------------------------------------------------------------------------
// barriers, registers, stmatrix

/* Each thread reads what its neighbour has written, in several phases of one mbarrier. */
__global__ void mbarrier_phases(int *out) {
    SHARED(uint64_t, barrier, 1);
    SHARED(int, x, 96);
    const int t = (int)threadIdx.x;
    if (t == 0) ptx_mbarrier_init(barrier, 96);
    __syncthreads();
    ptx_mbarrier_wait(barrier, 1); // the phase before the first one has ended
    for (int phase = 0; phase < 6; phase++) {
        if (phase % 2 == 0) x[t] = phase * 100 + t;
        else out[phase / 2 * 96 + t] = x[(t + 37) % 96];
        ptx_mbarrier_arrive(barrier);
        ptx_mbarrier_wait(barrier, phase & 1);
    }
}

/* Two warps write, two others read; each side waits for the other at a barrier of its own. */
__global__ void named_barriers_turns(int *out) {
    SHARED(int, x, 64);
    const int t = (int)threadIdx.x % 64;
    for (int turn = 0; turn < 4; turn++)
        if (threadIdx.x < 64) {
            if (turn) ptx_barrier_sync(2, 128);
            x[t] = turn * 100 + t;
            ptx_barrier_arrive(1, 128);
        } else {
            ptx_barrier_sync(1, 128);
            out[turn * 64 + t] = x[63 - t];
            if (turn < 3) ptx_barrier_arrive(15 - 13, 128);
        }
}

__global__ void registers_move(int *out) { // 384 threads of 168 registers: 24 + 240 + 240 are as many
    if (threadIdx.x < 128) ptx_setmaxnreg_dec<24>();
    else ptx_setmaxnreg_inc<240>();
    out[threadIdx.x] = emu::register_pool.of[threadIdx.x / 128];
}

__global__ void stored_matrices(uint16_t *out) { // (32, 8): matrix i in rows 8 i … 8 i + 7
    SHARED(uint4, rows, 32);
    uint32_t r[4];
    const uint32_t lane = threadIdx.x;
    for (uint32_t i = 0; i < 4; i++) r[i] = (i * 64 + lane * 2) | (i * 64 + lane * 2 + 1) << 16;
    ptx_stmatrix_x4(&rows[lane], r);
    __syncwarp();
    for (int i = 0; i < 8; i++) out[lane * 8 + i] = ((uint16_t *)&rows[lane])[i];
}

static void test_barriers() {
    int *d, h[384], wrong = 0;
    MUST(cudaMalloc(&d, sizeof h));
    RUN(mbarrier_phases, 1, 96, 0, 0, d);
    MUST(cudaMemcpy(h, d, 288 * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 288; i++) wrong += h[i] != i / 96 * 200 + (i % 96 + 37) % 96;
    check(!wrong, "an mbarrier's phases: %d of 288 values differ", wrong);
    RUN(named_barriers_turns, 1, 128, 0, 0, d);
    MUST(cudaMemcpy(h, d, 256 * 4, cudaMemcpyDeviceToHost));
    for (int i = wrong = 0; i < 256; i++) wrong += h[i] != i / 64 * 100 + 63 - i % 64;
    check(!wrong, "named barriers, arrive and sync: %d of 256 values differ", wrong);
    RUN(registers_move, 1, 384, 0, 0, d);
    MUST(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
    for (int i = wrong = 0; i < 384; i++) wrong += h[i] != (i < 128 ? 24 : 240);
    check(!wrong, "registers move from one warpgroup to two: %d of 384 threads have others", wrong);
    RUN(stored_matrices, 1, 32, 0, 0, (uint16_t *)d);
    MUST(cudaMemcpy(h, d, 512, cudaMemcpyDeviceToHost));
    for (int i = wrong = 0; i < 256; i++) wrong += ((uint16_t *)h)[i] != i;
    check(!wrong, "stmatrix: %d of 256 elements differ", wrong);
    MUST(cudaFree(d));
}

// ---------------------------------------------------------------------------
// two matmuls in flight, the left operand of one in registers: o = sum over tiles of (q k^T) v, as attention has it

enum { KEYS = 64, WIDTH = 128, TILES = 3, QUERIES = 128 };

/* A tile (rows, 128) of a tensor into two panels, by ordinary stores. */
__device__ void copy_tile(bf16 *tile, const bf16 *from, int rows) {
    for (int i = (int)threadIdx.x; i < rows * WIDTH / 8; i += (int)blockDim.x) {
        const int row = i / (WIDTH / 8), piece = i % (WIDTH / 8), at = piece / 8 * rows * 8 + row * 8 + piece % 8;
        ((uint4 *)tile)[at ^ (at / 8 % 8)] = ((const uint4 *)from)[i];
    }
}

/* s (64, 64) = q k^T. */
__device__ void start_scores(float (&s)[KEYS / 2], const bf16 *q, const bf16 *k) {
    ptx_wgmma_fence();
    for (int i = 0; i < WIDTH / 16; i++)
        ptx_wgmma<0, 0>(s, describe(q + i / 4 * QUERIES * 64 + i % 4 * 16, 0, 1024, 1),
                        describe(k + i / 4 * KEYS * 64 + i % 4 * 16, 0, 1024, 1), i > 0);
    ptx_wgmma_commit();
}

/* A block of two warpgroups: each has 64 queries. Scores of the next tile are computed while o is. */
__global__ void scores_times_values(float *o_out, const bf16 *q, const bf16 *k, const bf16 *v) {
    DYN_SHARED(bf16, tiles);
    tiles += (-(int)ptx_shared(tiles) & 1023) / 2;
    bf16 *qs = tiles, *ks = qs + QUERIES * WIDTH, *vs = ks + TILES * KEYS * WIDTH;
    const int group = (int)threadIdx.x / 128;
    copy_tile(qs, q, QUERIES);
    for (int t = 0; t < TILES; t++) {
        copy_tile(ks + t * KEYS * WIDTH, k + t * KEYS * WIDTH, KEYS);
        copy_tile(vs + t * KEYS * WIDTH, v + t * KEYS * WIDTH, KEYS);
    }
    ptx_fence_proxy_async();
    __syncthreads();
    float o[WIDTH / 2], s[KEYS / 2];
    uint32_t p[KEYS / 16][4];
    start_scores(s, qs + group * 64 * 64, ks);
    ptx_wgmma_wait<0>();
    for (int t = 0; t < TILES; t++) {
        for (int i = 0; i < KEYS / 16; i++)
            for (int j = 0; j < 4; j++) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
                p[i][j] = (uint32_t)__bfloat16_as_ushort(pair.x) | (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
            }
        if (t + 1 < TILES) start_scores(s, qs + group * 64 * 64, ks + (t + 1) * KEYS * WIDTH);
        ptx_wgmma_fence();
        for (int i = 0; i < KEYS / 16; i++)
            ptx_wgmma<1>(o, p[i], describe(vs + t * KEYS * WIDTH + i * 16 * 64, KEYS * 128, 1024, 1), t > 0 || i > 0);
        ptx_wgmma_commit();
        ptx_wgmma_wait<1>(); // the scores
        if (t + 1 < TILES) ptx_wgmma_settle(s);
        ptx_wgmma_wait<0>();
    }
    for (int i = 0; i < WIDTH / 2; i++) {
        const int row = group * 64 + d_row((int)threadIdx.x % 128, i);
        o_out[row * WIDTH + d_column((int)threadIdx.x % 128, i)] = o[i];
    }
}

static std::vector<float> integers(size_t count, int from) { // -1, 0, 1
    std::vector<float> x(count);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = ((uint32_t)i * 4 + (uint32_t)from) * 2654435761u;
        x[i] = (float)((bits ^ bits >> 15) * 2246822519u >> 16) / 21846.0f - 1;
        x[i] = (float)((x[i] > 0.3f) - (x[i] < -0.3f));
    }
    return x;
}

static std::vector<float> run_scores() {
    const size_t keys = TILES * KEYS * WIDTH, queries = QUERIES * WIDTH;
    bf16 *q = device_bf16(queries, integers(queries, 0)), *k = device_bf16(keys, integers(keys, 1)),
         *v = device_bf16(keys, integers(keys, 2));
    float *o = device_floats(queries, nullptr);
    const int shared = (int)(queries + 2 * keys) * 2 + 1024;
    MUST(cudaFuncSetAttribute(scores_times_values, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    RUN(scores_times_values, 1, 256, (size_t)shared, 0, o, q, k, v);
    std::vector<float> h = host_floats(o, queries);
    for (void *p : {(void *)q, (void *)k, (void *)v, (void *)o}) MUST(cudaFree(p));
    return h;
}

static uint64_t scores_fingerprint() {
    std::vector<float> o = run_scores();
    return fingerprint(1, o.data(), o.size() * 4);
}

static void test_registers_product() {
    const size_t keys = TILES * KEYS * WIDTH, queries = QUERIES * WIDTH;
    std::vector<float> q = integers(queries, 0), k = integers(keys, 1), v = integers(keys, 2), got = run_scores();
    int wrong = 0;
    for (size_t i = 0; i < QUERIES; i++) {
        std::vector<float> o(WIDTH, 0.0f);
        for (size_t j = 0; j < TILES * KEYS; j++) {
            float s = 0;
            for (size_t c = 0; c < WIDTH; c++) s += q[i * WIDTH + c] * k[j * WIDTH + c];
            for (size_t c = 0; c < WIDTH; c++) o[c] += s * v[j * WIDTH + c];
        }
        for (size_t c = 0; c < WIDTH; c++) wrong += !(o[c] == got[i * WIDTH + c]);
    }
    check(!wrong, "wgmma, two groups in flight, a in registers: %d of 16384 elements differ", wrong);
    check(!different_bits(scores_fingerprint), "the same: %d seeds give equal bits", SEEDS);
    cuda_on_cpu.rough = 1;
    std::vector<float> rough = run_scores();
    cuda_on_cpu.rough = 0;
    check(rough == got, "the same with tensor cores that truncate, as sums are integers");
}

static void test_hopper() {
    test_stages();
    test_canonical_layouts();
    test_images();
    test_boxes();
    test_map_arguments();
    test_entry_point();
    test_barriers();
    test_registers_product();
}
#endif
